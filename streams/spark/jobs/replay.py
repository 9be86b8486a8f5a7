"""Copies boxes to boxes, with a filter or a transformation.

The range of each step is in the ledger before the step starts, and each step is one transaction (`steps.py`).
Steps are limited by bytes. The next run plans a failed step again. A step that is too large for the server is
halved at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.direct import BoxPosition, Shards
from streams.protocol.errors import BatchTooLarge
from streams.spark import offsets
from streams.spark.jobs.job_context import JobContext, Ledger, box_positions, resume_seq, select_boxes
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.jobs.steps import STEP_BYTES, Steps
from streams.spark.offsets import BoxHead, Cursor, Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "replay."
#: Most records of one step, even if they are small.
STEP_RECORDS = 1_000_000


class Replay(msgspec.Struct, frozen=True):
    name: str
    #: Records that this run has read, and records that it has written.
    examined: int
    records: int
    steps: int
    #: Box -> last seq read.
    cursors: dict[str, int]
    is_dry: bool = False


@spark_job
def replay(
    spark: SparkSession,
    boxes: Sequence[str] = (),
    to: str | None = None,
    *,
    name: str,
    prefix: str | None = None,
    url: str | None = None,
    key: str | None = None,
    where: str | None = None,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    from_seq: int | None = None,
    from_ts: int | None = None,
    to_seq: int | None = None,
    to_ts: int | None = None,
    node: str = "replay",
    keep_ts: bool = False,
    with_source: bool = False,
    on_gap: str = "fail",
    step_records: int = STEP_RECORDS,
    step_bytes: int = STEP_BYTES,
    dry_run: bool = False,
) -> Replay:
    """Copy the records of boxes to box `to`; the next run copies the records that have come since.

    The boxes are `boxes`, or all boxes whose names start with `prefix`. `where` is an SQL condition on the
    columns of a read. `transform` gets the frame and returns one with the columns of a write (with `box`, if
    `to` is not set). Copies keep tag and meta; with `with_source`, meta is the origin of a record
    (`{"src": "orders:41"}`). `node` marks the copies, so that routers back to the source can skip them. The
    first run starts after `from_seq`, at the time `from_ts`, or at the beginning. A run ends with record
    `to_seq`, before the time `to_ts`, or at the current heads.
    """
    context = JobContext(url, key)
    writer = f"job:replay:{name}"
    with context.client() as client, context.shards() as shards:
        steps = Steps(Ledger(client, LEDGER + name), shards, writer, is_dry=dry_run)
        positions = box_positions(shards, select_boxes(shards, boxes, prefix, besides=to))
        start = _start(shards, positions, from_seq, from_ts, steps, on_gap)
        heads = _ends(shards, positions, start, to_seq, to_ts)
        sizes = {box: BoxHead.of(state) for box, state in positions.items()}

        def limit() -> int:
            return min(step_records, offsets.bytes_to_records(start, sizes, step_bytes))

        if dry_run:
            backlog = sum(offsets.pending_counts(start, heads).values())
            return Replay(name, backlog, 0, -(-backlog // limit()), _cursors(start), is_dry=True)
        target: dict[str, Any] = {"box": to} if to is not None else {}
        copier = _Copier(
            steps,
            heads,
            read=partial(context.frame, spark, on_gap=on_gap),
            shape=partial(
                _shape, where=where, transform=transform, to=to, keep_ts=keep_ts, with_source=with_source
            ),
            write=partial(context.write, writer=writer, node=node, **target),
        )
        if steps.unfinished_plan is not None:
            copier.run(steps.unfinished_plan)
        while offsets.pending_counts(start, heads):
            end = offsets.next_end(start, heads, limit())
            try:
                copier.run(steps.plan({"start": offsets.to_json(start), "end": offsets.to_json(end)}))
            except BatchTooLarge:
                if sum(offsets.pending_counts(start, end).values()) == 1:
                    raise
                step_bytes //= 2
                continue
            start = end
    return Replay(name, copier.records_read, copier.records, copier.steps_run, _cursors(start))


@dataclass
class _Copier:
    """Runs planned steps, and counts the records read and written."""

    steps: Steps
    heads: Offset
    read: Callable[[Mapping[str, int], Mapping[str, int]], DataFrame]
    shape: Callable[[DataFrame], DataFrame]
    write: Callable[..., int]
    records_read: int = 0
    records: int = 0
    steps_run: int = 0

    def run(self, plan: dict[str, Any]) -> None:
        begin, end = offsets.from_json(plan["start"]), offsets.from_json(plan["end"])
        # A box that was created again since the plan has no records of the step. `on_gap` allows it, or the
        # run would have failed before.
        heads = self.heads
        end = {box: cursor for box, cursor in end.items() if box in heads and heads[box].gen == cursor.gen}
        if not end:
            self.steps.run(plan, lambda **_: 0)
            return
        rows = self.read(
            {box: begin[box].seq for box in end}, {box: cursor.seq for box, cursor in end.items()}
        )
        self.records += self.steps.run(plan, partial(self.write, self.shape(rows)))
        self.records_read += sum(offsets.pending_counts(begin, end).values())
        self.steps_run += 1


def _start(
    shards: Shards,
    positions: Mapping[str, BoxPosition],
    from_seq: int | None,
    from_ts: int | None,
    steps: Steps,
    on_gap: str,
) -> Offset:
    """Return the start of this run: after the last planned step, or, for a new box, the caller's start."""
    start: Offset = {
        box: Cursor(state.generation, state.earliest_seq - 1 if from_seq is None else from_seq)
        for box, state in positions.items()
    }
    if from_ts is not None:
        first_seqs = shards.locate(dict.fromkeys(positions, from_ts))
        start = {box: Cursor(gen, seq - 1) for box, (gen, seq) in first_seqs.items()}
    for plan in steps.fixed_plans:
        start |= offsets.from_json(plan["end"])
    for box, state in positions.items():
        start[box] = Cursor(state.generation, resume_seq(box, state, start[box], on_gap))
    return start


def _ends(
    shards: Shards,
    positions: Mapping[str, BoxPosition],
    start: Offset,
    to_seq: int | None,
    to_ts: int | None,
) -> Offset:
    """Return the end of this run, which is never before its start."""
    end_seqs = {box: state.head_seq for box, state in positions.items()}
    if to_seq is not None:
        end_seqs = {box: min(seq, to_seq) for box, seq in end_seqs.items()}
    if to_ts is not None:
        for box, (_, seq) in shards.locate(dict.fromkeys(positions, to_ts)).items():
            end_seqs[box] = min(end_seqs[box], seq - 1)
    return {
        box: Cursor(state.generation, max(start[box].seq, end_seqs[box])) for box, state in positions.items()
    }


def _cursors(start: Offset) -> dict[str, int]:
    return {box: cursor.seq for box, cursor in sorted(start.items())}


def _shape(
    rows: DataFrame,
    *,
    where: str | None,
    transform: Callable[[DataFrame], DataFrame] | None,
    to: str | None,
    keep_ts: bool,
    with_source: bool,
) -> DataFrame:
    rows = rows.filter("data is not null")
    if "gap" in rows.columns:
        rows = rows.drop("gap")
    if where is not None:
        rows = rows.filter(where)
    if transform is not None:
        return transform(rows)
    columns = [sql.col("data"), sql.col("tag"), sql.col("meta")]
    if with_source:
        source = sql.concat(sql.lit('{"src":"'), sql.col("box"), sql.lit(":"), sql.col("seq"), sql.lit('"}'))
        columns[2] = source.alias("meta")
    if keep_ts:
        columns.append(sql.col("ts"))
    if to is None:
        columns.append(sql.col("box"))
    # No sort: rows of one task keep the order of the source.
    return rows.select(*columns)
