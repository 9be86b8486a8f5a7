"""Walks the live runs of a log within the limits of one reader.

A run is a stretch of live records in one batch. Pages of `/v0` (`pages.py`), scans of bulk clients
(`pages.py`), reads of S2 streams (`s2/streams.py`) and copies of routers (`routers/router_outbox.py`) differ
in their limits and filters, and each of them is a `RunCollector`. The loop is here once.
"""

from __future__ import annotations

from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import Span
from streams.protocol.model.records import Batch


class RunCollector:
    """Takes live runs, one after another, until a limit is reached."""

    __slots__ = ()

    @property
    def is_full(self) -> bool:
        """True if nothing more is taken. Asked after each batch."""
        return False

    def stops_before(self, span: Span) -> bool:
        """Return True to end the walk before this batch."""
        return False

    def take(self, batch: Batch, first: int, last: int) -> int:
        """Take as much as fits of a live run (indexes). Returns the last index that was examined; less than
        `last` ends the walk."""
        raise NotImplementedError


def walk_live_runs(collector: RunCollector, log: BoxLog, from_seq: int, upto_seq: int) -> int:
    """Give the live runs of these seqs to a collector, in order. Returns the last seq that was examined."""
    for span in log.spans(from_seq):
        first_seq = span.first_seq
        if first_seq > upto_seq:
            break
        if collector.stops_before(span):
            return first_seq - 1
        last = min(span.count - 1, upto_seq - first_seq)
        for run_first, run_last in log.runs(span, max(0, from_seq - first_seq), last):
            last_examined = collector.take(span.payload, run_first, run_last)
            if last_examined < run_last:
                return first_seq + last_examined
        if collector.is_full:
            return first_seq + last
    return max(upto_seq, from_seq - 1)
