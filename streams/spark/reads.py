"""Plans a read (boxes, start, end, tasks) and reads the ranges of a task from the shards.

Gaps are detected twice: when the read is planned, and again when a task reads its range, because a box can
drop records in between. Both follow the same policy (`GapPolicy`).
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
from streams.spark.columns import COLUMNS, gaps_to_batch, run_to_batch
from streams.spark.gaps import Gap, GapError
from streams.spark.offsets import BoxHead, Cursor, Offset, SeqRange
from streams.spark.options import EARLIEST, EMIT, FAIL, LATEST, BadOption, ConnectionOptions, SparkReadOptions

T = TypeVar("T")

#: Small batches are merged up to this many rows: a batch costs Spark about as much as a thousand rows.
_BATCH_ROWS = 10_000


def open_shards(server: ConnectionOptions, *, retry_s: float | None = None) -> Shards:
    total_s = server.retry_s if retry_s is None else retry_s
    return Shards(server.url, key=server.key(), retry=Retry(total_s=total_s), over_tcp=server.over_tcp)


def open_client(server: ConnectionOptions) -> Client:
    return Client(server.url, key=server.key(), retry=Retry(total_s=server.retry_s))


# -- boxes, start and end


def read_heads(shards: Shards, options: SparkReadOptions) -> dict[str, BoxHead]:
    """Return the heads of the boxes that a read selects."""
    if options.boxes:
        positions = shards.states(boxes=options.boxes)
    else:
        positions = [each for each in shards.states(prefix=options.prefix or "") if options.wants(each.box)]
    if len(positions) > options.max_boxes:
        raise BadOption(
            f"maxBoxes: this read has {len(positions)} boxes and the limit is {options.max_boxes}; raise "
            f"maxBoxes or narrow the selection (every micro-batch stores the offsets of all boxes)"
        )
    heads = {each.box: BoxHead.of(each) for each in positions}
    missing = [box for box in options.boxes if box not in heads]
    if missing and options.missing_boxes == "fail":
        raise BoxNotFound(
            f"there is no box {', '.join(missing)}; create it, or set missingBoxes=wait (read it when it "
            f"exists) or missingBoxes=ignore",
            boxes=missing,
        )
    return heads


def resolve_start(shards: Shards, options: SparkReadOptions, heads: Mapping[str, BoxHead]) -> Offset:
    """Return the start of a read without a checkpoint, from its options."""
    if options.starting_ms is not None:
        return _start_by_time(shards, options, heads)
    starting = options.starting
    start: Offset = {}
    for box, head in heads.items():
        seq = starting if isinstance(starting, str) else starting.get(box, -2)
        if seq in (EARLIEST, -2):
            start[box] = head.start
        elif seq in (LATEST, -1):
            start[box] = head.cursor
        else:
            start[box] = Cursor(head.gen, _check_exists(box, int(seq), head, "startingOffsets"))
    if isinstance(starting, dict) and (
        unknown_boxes := sorted(starting.keys() - heads.keys() - set(options.boxes))
    ):
        raise BadOption(f"startingOffsets: {', '.join(unknown_boxes)} is not a box of this read")
    return start


def resolve_end(shards: Shards, options: SparkReadOptions, heads: Mapping[str, BoxHead]) -> Offset:
    """Return the end of a batch read."""
    end = {box: head.cursor for box, head in heads.items()}
    if options.ending_ms is not None:
        for box, (gen, seq) in shards.locate(dict.fromkeys(heads, options.ending_ms)).items():
            end[box] = Cursor(gen, seq - 1)
    elif isinstance(options.ending, dict):
        for box, seq in options.ending.items():
            if box not in heads:
                raise BadOption(f"endingOffsets: {box} is not a box of this read")
            if seq >= 0:
                end[box] = Cursor(heads[box].gen, _check_exists(box, seq, heads[box], "endingOffsets"))
    return end


def _check_exists(box: str, seq: int, head: BoxHead, option: str) -> int:
    if seq > head.head_seq:
        raise BadOption(f"{option}: {box} has no record {seq} yet; its last is {head.head_seq}")
    return seq


def _start_by_time(shards: Shards, options: SparkReadOptions, heads: Mapping[str, BoxHead]) -> Offset:
    times_ms = (
        options.starting_ms
        if isinstance(options.starting_ms, dict)
        else dict.fromkeys(heads, options.starting_ms)
    )
    start = {box: head.start for box, head in heads.items()}
    for box, (gen, seq) in shards.locate({box: ms for box, ms in times_ms.items() if box in heads}).items():  # type: ignore[misc]
        if seq > heads[box].head_seq and options.no_newer_record == "error":
            raise BadOption(
                f"startingTimestamp: {box} has no record at or after this time; "
                f"set startingOffsetsByTimestampStrategy=latest to start at its end"
            )
        start[box] = Cursor(gen, seq - 1)
    return start


# -- plan, and gaps known when the read is planned


def plan_read(
    shards: Shards,
    options: SparkReadOptions,
    start: Offset,
    end: Offset,
    *,
    ranges: Iterable[SeqRange] | None = None,
) -> list[ReadTask]:
    """Return the tasks of a read from `start` to `end`.

    Gaps that are known now form the first task; no task reads their seqs.
    """
    seq_ranges = offsets.ranges(start, end) if ranges is None else list(ranges)
    gaps = offsets.recreated_gaps(start, end)
    positions = (
        {each.box: each for each in shards.states(boxes=[each.box for each in seq_ranges])}
        if seq_ranges
        else {}
    )
    readable_ranges = []
    for each in seq_ranges:
        state = positions.get(each.box)
        if state is None or state.generation != each.gen or each.after + 1 >= state.evict_floor:
            readable_ranges.append(each)  # if there is a gap, the task finds it
            continue
        page = shards.scan_page(
            each.box, from_seq=each.after, to_seq=each.to, generation=each.gen, max_bytes=1, data=False
        )
        gap = _gap_in_range(each, page.tombstone)
        if gap is None:
            readable_ranges.append(each)
            continue
        gaps.append(gap)
        assert gap.last is not None, "a tombstone has an end"
        if gap.last < each.to:
            readable_ranges.append(SeqRange(each.box, each.gen, gap.last, each.to))
    policy = GapPolicy(options)
    for gap in gaps:
        policy.apply(gap)
    range_lists = offsets.plan_tasks(
        readable_ranges,
        partition_records=options.partition_records,
        min_partitions=options.min_partitions,
        partition_bytes=options.partition_bytes,
        sizes={box: state.bytes / max(1, state.count) for box, state in positions.items()},
        cores=os.cpu_count() or 1,
    )
    tasks = [ReadTask(seq_ranges) for seq_ranges in range_lists]
    if gaps and options.on_gap == EMIT:
        tasks.insert(0, ReadTask([], gaps))
    return tasks


def _gap_in_range(seq_range: SeqRange, tombstone: Tombstone | None) -> Gap | None:
    """Return the part of a tombstone that lies in this range, or None."""
    if tombstone is None:
        return None
    gap = Gap(
        seq_range.box, tombstone.gap_from, tombstone.gap_to, tombstone.reason, tombstone.missed_estimate
    )
    return gap.within(seq_range.after + 1, seq_range.to)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The work of one partition: gaps to report first, then ranges to read."""

    ranges: list[SeqRange]
    gaps: list[Gap] = field(default_factory=list)


class GapPolicy:
    """Handles gaps as the option `onGap` demands: fails, or logs a warning and appends to `gapBox`."""

    def __init__(self, options: SparkReadOptions) -> None:
        self._options = options

    def apply(self, gap: Gap) -> None:
        if self._options.on_gap == FAIL:
            raise GapError.of(gap)
        print(f"streams: warning: {gap}", file=sys.stderr)
        if self._options.gap_box is not None:
            with open_client(self._options.server) as client:
                # With this key, a retry of a failed task appends no second record.
                client.box(self._options.gap_box).append_batch(
                    [Entry(gap.as_dict(), tag=gap.box)],
                    # The numbers come first: truncation must not make two gaps of a box equal.
                    idempotency_key=f"gap-{gap.first}-{gap.last}-{gap.box}"[:256],
                )


# -- the rows of a task


def read_task(options: SparkReadOptions, task: ReadTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task in the columns of `schema`."""
    if task.gaps and "gap" in schema.names:
        yield gaps_to_batch(task.gaps, schema)
    if not task.ranges:
        return
    policy = GapPolicy(options)
    columns = set(schema.names)
    filter_columns = [
        name
        for name, value in (("tag", options.match), ("node", options.node))
        if value and name not in columns
    ]
    scan_schema = schema
    for name in filter_columns:
        scan_schema = scan_schema.append(pa.field(name, COLUMNS[name]))
    batches: list[pa.RecordBatch] = []
    rows = 0
    with open_shards(options.server) as shards:
        for seq_range, page in _prefetch(_pages(shards, options, task.ranges, scan_schema.names)):
            gap: Gap | None
            if page.generation != seq_range.gen:
                # The box was created again. The next plan reads the new box; the rest of this one is lost.
                gap = Gap(seq_range.box, seq_range.after + 1, seq_range.to, "recreated", None)
            else:
                gap = _gap_in_range(seq_range, page.tombstone)
            if gap is not None:
                policy.apply(gap)
                if "gap" in columns:
                    batches.append(gaps_to_batch([gap], schema))  # in seq order
                    rows += 1
            if page.generation != seq_range.gen:
                continue
            for run in page.runs:
                batch = _filter_rows(run_to_batch(run, seq_range.box, scan_schema), options)
                batches.append(batch.select(schema.names) if filter_columns else batch)
                rows += batch.num_rows
                if rows >= _BATCH_ROWS:
                    yield _concat(batches)
                    batches, rows = [], 0
    if rows:
        yield _concat(batches)


def _pages(
    shards: Shards, options: SparkReadOptions, ranges: Iterable[SeqRange], column_names: Iterable[str]
) -> Iterator[tuple[SeqRange, ScanPage]]:
    """Yield every page of these ranges, with the part of the range it was requested for."""
    columns = set(column_names)
    for each in ranges:
        after = each.after
        while after < each.to:
            try:
                page = shards.scan_page(
                    each.box,
                    from_seq=after,
                    to_seq=each.to,
                    generation=each.gen,
                    max_bytes=options.scan_bytes,
                    data="data" in columns,
                    tags="tag" in columns,
                    nodes="node" in columns,
                    meta="meta" in columns and options.include_meta,
                )
            except BoxNotFound:
                if options.missing_boxes == "fail":
                    raise
                break
            yield SeqRange(each.box, each.gen, after, each.to), page
            if page.generation != each.gen:
                break
            assert page.next_from_seq > after, "a scan goes on"
            after = page.next_from_seq


def _prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield items, and fetch the next one in a thread while the caller works on the current one.

    The shard reads the next page while the task converts one page and passes it to Spark.
    """
    with ThreadPoolExecutor(1) as thread:
        next_item = thread.submit(next, items, None)
        while (item := next_item.result()) is not None:
            next_item = thread.submit(next, items, None)
            yield item


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _filter_rows(batch: pa.RecordBatch, options: SparkReadOptions) -> pa.RecordBatch:
    """Remove rows of the own node and rows with other tags (v0 §4.5, §5)."""
    if options.node:
        is_own_node = pc.fill_null(pc.equal(batch.column("node"), options.node), False)
        batch = batch.filter(pc.invert(is_own_node))
    if options.match is not None:
        tags, text = batch.column("tag"), options.match.text
        is_match = pc.starts_with(tags, text) if options.match.is_prefix else pc.equal(tags, text)
        batch = batch.filter(is_match)
    return batch
