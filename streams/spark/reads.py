"""What a reader asks the shards: which boxes there are, where a read begins and ends, what a range holds, and
what was lost of it.

Loss is looked for twice: when a read is planned, and again when a task comes to its range, because a box can
drop records in between. Both say the same and follow the same policy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from streams.client._sync.client import Client
from streams.client.answers import Entry, Tombstone
from streams.client.retry import Retry
from streams.direct import ScanPage, Shards
from streams.protocol.errors import BoxNotFound
from streams.spark import offsets
from streams.spark.columns import COLUMNS, batch_of, gap_batch
from streams.spark.gaps import Gap, GapError
from streams.spark.offsets import Head, Offset, Place, Range
from streams.spark.options import EARLIEST, EMIT, FAIL, LATEST, BadOption, Reading, Server

T = TypeVar("T")

#: Rows of small runs are put together up to this many: each batch costs Spark about as much as a thousand
#: rows.
_BATCH_ROWS = 10_000


def open_shards(server: Server, *, retry_s: float | None = None) -> Shards:
    total_s = server.retry_s if retry_s is None else retry_s
    return Shards(server.url, key=server.key(), retry=Retry(total_s=total_s), over_tcp=server.over_tcp)


def open_client(server: Server) -> Client:
    return Client(server.url, key=server.key(), retry=Retry(total_s=server.retry_s))


# -- which boxes, and where they stand


def heads(shards: Shards, asked: Reading) -> dict[str, Head]:
    if asked.boxes:
        positions = shards.states(boxes=asked.boxes)
    else:
        positions = [each for each in shards.states(prefix=asked.prefix or "") if asked.wants(each.box)]
    if len(positions) > asked.max_boxes:
        raise BadOption(
            f"maxBoxes: {len(positions)} boxes are wanted and {asked.max_boxes} allowed; "
            f"offsets of all are written with each micro-batch"
        )
    found = {each.box: Head.of(each) for each in positions}
    missing = [box for box in asked.boxes if box not in found]
    if missing and asked.missing == "fail":
        raise BoxNotFound(
            f"there is no box {', '.join(missing)}; missingBoxes=wait takes it when it comes, ignore does "
            f"without",
            boxes=missing,
        )
    return found


def start_of(shards: Shards, asked: Reading, known: Mapping[str, Head]) -> Offset:
    """Where a read begins that has no checkpoint."""
    if asked.starting_ms is not None:
        return _by_time(shards, asked, known)
    given = asked.starting
    found: Offset = {}
    for box, head in known.items():
        seq = given if isinstance(given, str) else given.get(box, -2)
        if seq in (EARLIEST, -2):
            found[box] = head.start
        elif seq in (LATEST, -1):
            found[box] = head.place
        else:
            found[box] = Place(head.gen, _within(box, int(seq), head, "startingOffsets"))
    if isinstance(given, dict) and (strange := sorted(given.keys() - known.keys() - set(asked.boxes))):
        raise BadOption(f"startingOffsets: {', '.join(strange)} is not among the boxes of this read")
    return found


def end_of(shards: Shards, asked: Reading, known: Mapping[str, Head]) -> Offset:
    """Where a batch read ends."""
    found = {box: head.place for box, head in known.items()}
    if asked.ending_ms is not None:
        for box, (gen, seq) in shards.locate(dict.fromkeys(known, asked.ending_ms)).items():
            found[box] = Place(gen, seq - 1)
    elif isinstance(asked.ending, dict):
        for box, seq in asked.ending.items():
            if box not in known:
                raise BadOption(f"endingOffsets: {box} is not among the boxes of this read")
            if seq >= 0:
                found[box] = Place(known[box].gen, _within(box, seq, known[box], "endingOffsets"))
    return found


def _within(box: str, seq: int, head: Head, option: str) -> int:
    if seq > head.head_seq:
        raise BadOption(f"{option}: {box} has no record {seq} yet; its last is {head.head_seq}")
    return seq


def _by_time(shards: Shards, asked: Reading, known: Mapping[str, Head]) -> Offset:
    wanted = (
        asked.starting_ms if isinstance(asked.starting_ms, dict) else dict.fromkeys(known, asked.starting_ms)
    )
    found = {box: head.start for box, head in known.items()}
    for box, (gen, seq) in shards.locate({box: ms for box, ms in wanted.items() if box in known}).items():  # type: ignore[misc]
        if seq > known[box].head_seq and asked.when_none_so_new == "error":
            raise BadOption(
                f"startingTimestamp: {box} has no record so new; "
                f"startingOffsetsByTimestampStrategy=latest begins at its end"
            )
        found[box] = Place(gen, seq - 1)
    return found


# -- what is lost, told when a read is planned


def plan(
    shards: Shards, asked: Reading, start: Offset, end: Offset, *, wanted: Iterable[Range] | None = None
) -> list[Task]:
    """The tasks of a read from `start` to `end`. What is already known to be lost is one gap, at the head of
    the first of them, and no task goes over it again."""
    ranges = offsets.ranges(start, end) if wanted is None else list(wanted)
    lost = offsets.losses(start, end)
    known = {each.box: each for each in shards.states(boxes=[each.box for each in ranges])} if ranges else {}
    kept = []
    for each in ranges:
        state = known.get(each.box)
        if state is None or state.generation != each.gen or each.after + 1 >= state.evict_floor:
            kept.append(each)  # whatever there is to tell, the task will be told
            continue
        page = shards.scan_page(
            each.box, from_seq=each.after, to_seq=each.to, generation=each.gen, max_bytes=1, data=False
        )
        gap = _gap_of(each, page.tombstone)
        if gap is None:
            kept.append(each)
            continue
        lost.append(gap)
        assert gap.last is not None, "a tombstone has an end"
        if gap.last < each.to:
            kept.append(Range(each.box, each.gen, gap.last, each.to))
    teller = Teller(asked)
    for gap in lost:
        teller.tell(gap)
    found = offsets.plan(
        kept,
        partition_records=asked.partition_records,
        min_partitions=asked.min_partitions,
        partition_bytes=asked.partition_bytes,
        sizes={box: state.bytes / max(1, state.count) for box, state in known.items()},
        cores=os.cpu_count() or 1,
    )
    tasks = [Task(ranges) for ranges in found]
    if lost and asked.on_gap == EMIT:
        tasks.insert(0, Task([], lost))
    return tasks


def _gap_of(wanted: Range, tombstone: Tombstone | None) -> Gap | None:
    """The part of a tombstone that concerns this range."""
    if tombstone is None:
        return None
    found = Gap(wanted.box, tombstone.gap_from, tombstone.gap_to, tombstone.reason, tombstone.missed_estimate)
    return found.within(wanted.after + 1, wanted.to)


@dataclass(frozen=True, slots=True)
class Task:
    """Of one partition: ranges to read, and gaps to tell before."""

    ranges: list[Range]
    gaps: list[Gap] = field(default_factory=list)


class Teller:
    """Follows the policy for what is lost."""

    def __init__(self, asked: Reading) -> None:
        self._asked = asked

    def tell(self, gap: Gap) -> None:
        if self._asked.on_gap == FAIL:
            raise GapError.of(gap)
        print(f"streams: warning: {gap}", file=sys.stderr)
        if self._asked.gap_box is not None:
            with open_client(self._asked.server) as client:
                # The key makes the repeat of a failed task the same record.
                client.box(self._asked.gap_box).append_batch(
                    [Entry(gap.as_dict(), tag=gap.box)],
                    # Cut at its end if at all: the numbers tell two gaps of a box apart.
                    idempotency_key=f"gap-{gap.first}-{gap.last}-{gap.box}"[:256],
                )


# -- what is there, read by a task


def pull(asked: Reading, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a task in the columns of `schema`."""
    if task.gaps and "gap" in schema.names:
        yield gap_batch(task.gaps, schema)
    if not task.ranges:
        return
    teller = Teller(asked)
    have = set(schema.names)
    extra = [name for name, used in (("tag", asked.match), ("node", asked.node)) if used and name not in have]
    full = schema
    for name in extra:
        full = full.append(pa.field(name, COLUMNS[name]))
    gathered: list[pa.RecordBatch] = []
    rows = 0
    with open_shards(asked.server) as shards:
        for wanted, page in _ahead(_pages(shards, asked, task.ranges, full.names)):
            gap: Gap | None
            if page.generation != wanted.gen:
                # Another box has its name now. Its records are for the next plan; those of this one are gone.
                gap = Gap(wanted.box, wanted.after + 1, wanted.to, "recreated", None)
            else:
                gap = _gap_of(wanted, page.tombstone)
            if gap is not None:
                teller.tell(gap)
                if "gap" in have:
                    gathered.append(gap_batch([gap], schema))  # at its place
                    rows += 1
            if page.generation != wanted.gen:
                continue
            for run in page.runs:
                batch = _filtered(batch_of(run, wanted.box, full), asked)
                gathered.append(batch.select(schema.names) if extra else batch)
                rows += batch.num_rows
                if rows >= _BATCH_ROWS:
                    yield _together(gathered)
                    gathered, rows = [], 0
    if rows:
        yield _together(gathered)


def _pages(
    shards: Shards, asked: Reading, ranges: Iterable[Range], columns: Iterable[str]
) -> Iterator[tuple[Range, ScanPage]]:
    """Every page of these ranges, with the part of the range that was asked for."""
    wanted = set(columns)
    for each in ranges:
        at = each.after
        while at < each.to:
            try:
                page = shards.scan_page(
                    each.box,
                    from_seq=at,
                    to_seq=each.to,
                    generation=each.gen,
                    max_bytes=asked.scan_bytes,
                    data="data" in wanted,
                    tags="tag" in wanted,
                    nodes="node" in wanted,
                    meta="meta" in wanted and asked.include_meta,
                )
            except BoxNotFound:
                if asked.missing == "fail":
                    raise
                break
            yield Range(each.box, each.gen, at, each.to), page
            if page.generation != each.gen:
                break
            assert page.next_from_seq > at, "a scan goes on"
            at = page.next_from_seq


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Gets the next item in a thread while the caller works on the current one: the shard reads the next page
    while this task makes columns of one and hands them to Spark."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _filtered(batch: pa.RecordBatch, asked: Reading) -> pa.RecordBatch:
    """Without what the own-node filter and the filter by tag leave out (v0 §4.5, §5)."""
    if asked.node:
        own = pc.fill_null(pc.equal(batch.column("node"), asked.node), False)
        batch = batch.filter(pc.invert(own))
    if asked.match is not None:
        tags, text = batch.column("tag"), asked.match.text
        hits = pc.starts_with(tags, text) if asked.match.is_prefix else pc.equal(tags, text)
        batch = batch.filter(hits)
    return batch
