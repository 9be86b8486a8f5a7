"""Pages of one box: the live runs that one read shows, within its limits (`live_runs.py` walks them)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shard.core.boxes.live_runs import RunCollector
from shard.core.boxes.sealed import Span
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.messages.commands import ReadBox, Tombstone
from streams.protocol.model.records import Batch
from streams.protocol.payloads.scans import RunWriter

#: Records one read may look at before it answers with what it has. Filters skip records; this bounds how
#: long one read can hold the shard (about 5 ms).
EXAMINE_MAX = 20_000


def runs_of(flags: Iterable[bool], first: int) -> list[tuple[int, int]]:
    """The stretches of wanted indexes; the first flag is of index `first`."""
    runs: list[tuple[int, int]] = []
    start = -1
    index = first
    for index, is_wanted in enumerate(flags, first):
        if is_wanted and start < 0:
            start = index
        elif not is_wanted and start >= 0:
            runs.append((start, index - 1))
            start = -1
    if start >= 0:
        runs.append((start, index))
    return runs


class ScanRuns(RunCollector):
    """Collects runs for a bulk client, by bytes and without filters; one record at least."""

    __slots__ = ("_bytes_left", "_is_first", "_runs")

    def __init__(self, runs: RunWriter, bytes_max: int) -> None:
        self._runs = runs
        self._bytes_left = bytes_max
        self._is_first = True

    def stops_before(self, span: Span) -> bool:
        # Rows of a commit are rendered first; a page that has something is sent without them.
        return not self._is_first and isinstance(span, UnrenderedRows)

    def take(self, batch: Batch, first: int, last: int) -> int:
        top = batch.index_within_bytes(first, last, self._bytes_left)
        if top < first and self._is_first:
            top = first
        if top >= first:
            self._runs.add(batch, first, top)
            self._bytes_left = max(0, self._bytes_left - batch.size(first, top))
            self._is_first = False
        return top


class PageCollector(RunCollector):
    """Collects the runs that one read shows, within its limits."""

    __slots__ = ("_bytes_left", "_command", "_matches", "_nodes", "_parts", "_records_left", "examined_count")

    def __init__(self, command: ReadBox, *, nodes_filtered: bool) -> None:
        self._command = command
        self._records_left = command.limit
        self._bytes_left = command.max_bytes
        self._nodes = command.nodes if nodes_filtered else frozenset()
        self._matches = command.match
        self._parts: list[bytes | memoryview] = []
        self.examined_count = 0

    def text(self) -> bytes:
        return b",".join(self._parts)

    @property
    def is_full(self) -> bool:
        return self._records_left == 0 or self.examined_count >= EXAMINE_MAX

    def stops_before(self, span: Span) -> bool:
        # Rows of a commit are rendered first; a page that has something is sent without them.
        return self.examined_count > 0 and isinstance(span, UnrenderedRows)

    def take(self, batch: Batch, first: int, last: int) -> int:
        examine_max = EXAMINE_MAX - self.examined_count
        if examine_max <= 0:
            return first - 1
        last = min(last, first + examine_max - 1)
        for run_first, run_last in self._matching_runs(batch, first, last):
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
                self.examined_count += top - first + 1
                return top
        self.examined_count += last - first + 1
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

    def _matching_runs(self, batch: Batch, first: int, last: int) -> list[tuple[int, int]]:
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


class ReadBounds(NamedTuple):
    """The range of a read: records after `from_seq`, up to and including `upto_seq`."""

    from_seq: int
    upto_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
