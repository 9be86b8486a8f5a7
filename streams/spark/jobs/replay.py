"""Boxes to boxes, with a filter or a transformation on the way.

The range of each step is in the ledger before the step begins, and each step is one transaction (`steps.py`).
Steps are cut by bytes. A step that failed is cut anew by the next run, and one that is too large for the
server is halved at once.
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
from streams.spark.offsets import Head, Offset, Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "replay."
#: Records of one step, however small they are.
STEP_RECORDS = 1_000_000


class Replay(msgspec.Struct, frozen=True):
    name: str
    #: Records that this run has examined, and those it has written.
    examined: int
    records: int
    steps: int
    #: Examined up to here.
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
    """Copies what these boxes hold, or all boxes whose names start with `prefix`, and at the next run what
    has come since, to box `to`.

    `where` is an SQL condition on the columns of a read; `transform` gets the frame and returns one with the
    columns of a write (with `box`, when `to` is not given). Tag and meta are kept; with `with_source`, meta
    says where a record is from (`{"src": "orders:41"}`). `node` marks the copies, so that routers back to
    the source can leave them out. The first run begins after `from_seq`, at the time `from_ts`, or at the
    beginning; a run ends with record `to_seq`, before the time `to_ts`, or where the boxes are now.
    """
    site = JobContext(url, key)
    writer = f"job:replay:{name}"
    with site.client() as client, site.shards() as shards:
        steps = Steps(Ledger(client, LEDGER + name), shards, writer, is_dry=dry_run)
        known = box_positions(shards, select_boxes(shards, boxes, prefix, besides=to))
        start = _start(shards, known, from_seq, from_ts, steps, on_gap)
        heads = _ends(shards, known, start, to_seq, to_ts)
        sizes = {box: Head.of(state) for box, state in known.items()}

        def limit() -> int:
            return min(step_records, offsets.bytes_to_records(start, sizes, step_bytes))

        if dry_run:
            waiting = sum(offsets.pending(start, heads).values())
            return Replay(name, waiting, 0, -(-waiting // limit()), _cursors(start), is_dry=True)
        more: dict[str, Any] = {"box": to} if to is not None else {}
        copier = _Copier(
            steps,
            heads,
            read=partial(site.frame, spark, on_gap=on_gap),
            shape=partial(
                _shaped, where=where, transform=transform, to=to, keep_ts=keep_ts, with_source=with_source
            ),
            write=partial(site.write, writer=writer, node=node, **more),
        )
        if steps.unfinished is not None:
            copier.run(steps.unfinished)
        while offsets.pending(start, heads):
            end = offsets.admit(start, heads, limit())
            try:
                copier.run(steps.plan({"start": offsets.dump(start), "end": offsets.dump(end)}))
            except BatchTooLarge:
                if sum(offsets.pending(start, end).values()) == 1:
                    raise
                step_bytes //= 2
                continue
            start = end
    return Replay(name, copier.examined, copier.records, copier.steps_run, _cursors(start))


@dataclass
class _Copier:
    """Carries out planned steps, and counts what was read and written."""

    steps: Steps
    heads: Offset
    read: Callable[[Mapping[str, int], Mapping[str, int]], DataFrame]
    shape: Callable[[DataFrame], DataFrame]
    write: Callable[..., int]
    examined: int = 0
    records: int = 0
    steps_run: int = 0

    def run(self, plan: dict[str, Any]) -> None:
        begin, end = offsets.load(plan["start"]), offsets.load(plan["end"])
        # A box that was created again since the step was planned has nothing of the step any more; the run
        # has come this far only if that is allowed.
        heads = self.heads
        end = {box: place for box, place in end.items() if box in heads and heads[box].gen == place.gen}
        if not end:
            self.steps.run(plan, lambda **_: 0)
            return
        rows = self.read({box: begin[box].seq for box in end}, {box: place.seq for box, place in end.items()})
        self.records += self.steps.run(plan, partial(self.write, self.shape(rows)))
        self.examined += sum(offsets.pending(begin, end).values())
        self.steps_run += 1


def _start(
    shards: Shards,
    known: Mapping[str, BoxPosition],
    from_seq: int | None,
    from_ts: int | None,
    steps: Steps,
    on_gap: str,
) -> Offset:
    """Where this run begins: after the last step of earlier runs, and without any where the caller says."""
    start: Offset = {
        box: Place(state.generation, state.earliest_seq - 1 if from_seq is None else from_seq)
        for box, state in known.items()
    }
    if from_ts is not None:
        found = shards.locate(dict.fromkeys(known, from_ts))
        start = {box: Place(gen, seq - 1) for box, (gen, seq) in found.items()}
    for plan in steps.begun:
        start |= offsets.load(plan["end"])
    for box, state in known.items():
        start[box] = Place(state.generation, resume_seq(box, state, start[box], on_gap))
    return start


def _ends(
    shards: Shards,
    known: Mapping[str, BoxPosition],
    start: Offset,
    to_seq: int | None,
    to_ts: int | None,
) -> Offset:
    """Where this run ends, which is never before where it begins."""
    upto = {box: state.head_seq for box, state in known.items()}
    if to_seq is not None:
        upto = {box: min(seq, to_seq) for box, seq in upto.items()}
    if to_ts is not None:
        for box, (_, seq) in shards.locate(dict.fromkeys(known, to_ts)).items():
            upto[box] = min(upto[box], seq - 1)
    return {box: Place(state.generation, max(start[box].seq, upto[box])) for box, state in known.items()}


def _cursors(start: Offset) -> dict[str, int]:
    return {box: place.seq for box, place in sorted(start.items())}


def _shaped(
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
    wanted = [sql.col("data"), sql.col("tag"), sql.col("meta")]
    if with_source:
        source = sql.concat(sql.lit('{"src":"'), sql.col("box"), sql.lit(":"), sql.col("seq"), sql.lit('"}'))
        wanted[2] = source.alias("meta")
    if keep_ts:
        wanted.append(sql.col("ts"))
    if to is None:
        wanted.append(sql.col("box"))
    # In the order of the source: what one task has stands in the destination as it stood there.
    return rows.select(*wanted)
