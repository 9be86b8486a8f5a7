"""Pages of one box: the stretches of live records that one read shows, within its limits."""

from __future__ import annotations

from collections.abc import Iterable

from shard.core.boxes.log import Log
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.messages.commands import Diff
from streams.protocol.model.records import Batch
from streams.protocol.wire.scans import RunWriter

#: Records one read may look at before it answers with what it has. Filters skip records; this bounds how
#: long one read can hold the shard (about 5 ms).
EXAMINE_MAX = 20_000


def runs_of(wanted: Iterable[bool], first: int) -> list[tuple[int, int]]:
    """The stretches of wanted indexes; the first flag is of index `first`."""
    runs: list[tuple[int, int]] = []
    start = -1
    index = first
    for index, is_wanted in enumerate(wanted, first):
        if is_wanted and start < 0:
            start = index
        elif not is_wanted and start >= 0:
            runs.append((start, index - 1))
            start = -1
    if start >= 0:
        runs.append((start, index))
    return runs


def fill_runs(runs: RunWriter, log: Log, from_seq: int, upto_seq: int, bytes_max: int) -> int:
    """Takes live records from `from_seq` on, one at least. Returns the last seq that was looked at."""
    left = bytes_max
    is_first = True
    for span in log.spans(from_seq):
        if span.first_seq > upto_seq:
            break
        first = max(0, from_seq - span.first_seq)
        last = min(span.count - 1, upto_seq - span.first_seq)
        for run_first, run_last in log.runs(span, first, last):
            if not is_first and isinstance(span, UnrenderedRows):
                return span.first_seq - 1  # what there is leaves now
            batch = span.payload
            top = batch.index_within_bytes(run_first, run_last, left)
            if top < run_first and is_first:
                top = run_first
            if top >= run_first:
                runs.add(batch, run_first, top)
                left = max(0, left - batch.size(run_first, top))
                is_first = False
            if top < run_last:
                return span.first_seq + top
    return upto_seq


class Page:
    """Collects the stretches of records that one read shows, within its limits."""

    __slots__ = ("_bytes_left", "_command", "_matches", "_nodes", "_parts", "_records_left", "examined")

    def __init__(self, command: Diff, *, nodes_filtered: bool) -> None:
        self._command = command
        self._records_left = command.limit
        self._bytes_left = command.max_bytes
        self._nodes = command.nodes if nodes_filtered else frozenset()
        self._matches = command.match
        self._parts: list[bytes | memoryview] = []
        self.examined = 0

    def text(self) -> bytes:
        return b",".join(self._parts)

    def fill(self, log: Log, from_seq: int, upto_seq: int) -> int:
        """Takes records from `from_seq` on. Returns the last seq examined."""
        reached = from_seq - 1
        for batch in log.spans(from_seq):
            if batch.first_seq > upto_seq:
                break
            first = max(0, from_seq - batch.first_seq)
            last = min(batch.count - 1, upto_seq - batch.first_seq)
            if self.examined and isinstance(batch, UnrenderedRows):
                return max(reached, batch.first_seq - 1)  # what there is leaves now
            for run_first, run_last in log.runs(batch, first, last):
                shown_to = self._take(batch.payload, run_first, run_last)
                if shown_to < run_last:
                    return max(reached, batch.first_seq + shown_to)
                reached = batch.first_seq + run_last
            reached = batch.first_seq + last
            if self._records_left == 0 or self.examined >= EXAMINE_MAX:
                return reached
        return upto_seq if upto_seq > reached else reached

    def _take(self, batch: Batch, first: int, last: int) -> int:
        """Shows what it can of a live stretch. Returns the last index examined."""
        allowed = EXAMINE_MAX - self.examined
        if allowed <= 0:
            return first - 1
        last = min(last, first + allowed - 1)
        for run_first, run_last in self._wanted(batch, first, last):
            if self._records_left == 0:
                return run_first - 1
            top = min(run_last, run_first + self._records_left - 1)
            top = batch.index_within_bytes(run_first, top, self._bytes_left)
            if top < run_first:
                if self._parts:
                    self._records_left = 0
                    return run_first - 1
                top = run_first  # at least one record is always returned
            self._show(batch, run_first, top)
            if top < run_last:
                self._records_left = 0
                self.examined += top - first + 1
                return top
        self.examined += last - first + 1
        return last

    def _show(self, batch: Batch, first: int, last: int) -> None:
        command = self._command
        self._parts.append(
            batch.text_as(
                first,
                last,
                tags=command.include_tags,
                meta=command.include_meta,
                data=command.include_data,
            )
        )
        self._records_left -= last - first + 1
        self._bytes_left = max(0, self._bytes_left - batch.size(first, last))

    def _wanted(self, batch: Batch, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of a stretch that pass the filters."""
        nodes = batch.node_list() if self._nodes else None
        if nodes is not None and len(nodes) == 1 and nodes[0] in self._nodes:
            return []
        own = self._nodes if nodes is not None and len(nodes) > 1 else None
        match = self._matches
        if own is None and match is None:
            return [(first, last)]
        tags = batch.tag_list() if match is not None else None
        if match is not None and tags is None:
            return []
        return runs_of(
            (
                (own is None or nodes is None or nodes[index] not in own)
                and (match is None or tags is None or match.accepts(tags[index]))
                for index in range(first, last + 1)
            ),
            first,
        )
