"""Archives boxes to Parquet, partitioned by box and date, and reads archive and boxes as one.

A run writes its files to a staging folder, reads them back, appends their ranges to the ledger, and then
moves them into the table (`archive_files.py`). After every 16 runs it merges small files
(`archive_upkeep.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import Observation
from pyspark.sql import functions as sql

from streams.client._sync.client import Client
from streams.direct import BoxPosition
from streams.spark.jobs import archive_upkeep
from streams.spark.jobs.archive_files import (
    LEDGER,
    archive_cursors,
    migrate,
    new_run_id,
    publish,
    read_archived,
    read_files,
    staging_folder,
    write_files,
)
from streams.spark.jobs.job_context import (
    SCHEMA,
    JobContext,
    JobRefused,
    Ledger,
    box_positions,
    resume_seq,
    select_boxes,
    summary,
)
from streams.spark.jobs.spark_errors import spark_job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS = ("parquet", "json", "csv", "orc")


#: Attempts of a reader to list files between two runs.
_ATTEMPTS_MAX = 10


class ArchivedRange(msgspec.Struct, frozen=True):
    """Records `first` to `last` of one box in one run; deleted records are absent."""

    box: str
    gen: int
    first: int
    last: int
    records: int
    fingerprint: int
    path: str
    run: str
    gaps: list[dict[str, Any]] = []


class Archive(msgspec.Struct, frozen=True):
    name: str
    records: int
    ranges: list[ArchivedRange]
    trimmed: int
    is_dry: bool = False


@spark_job
def archive(
    spark: SparkSession,
    boxes: Sequence[str],
    path: str,
    *,
    name: str,
    prefix: str | None = None,
    url: str | None = None,
    key: str | None = None,
    trim: bool = False,
    on_gap: str = "fail",
    dry_run: bool = False,
) -> Archive:
    """Write the new records of boxes since the last run to Parquet files below `path`, by box and day.

    The boxes are `boxes`, or all boxes whose names start with `prefix`. `trim` then deletes all archived
    records from the boxes, including those that earlier runs archived and did not delete. Before that, the
    run reads both sides again and compares them.
    """
    context = JobContext(url, key)
    path = (path if "://" in path else os.path.abspath(path)).rstrip("/")
    with context.client() as client, context.shards() as shards:
        boxes = select_boxes(shards, boxes, prefix)
        ledger = Ledger(client, LEDGER + name)
        if not dry_run:
            migrate(spark, ledger)
            publish(spark, ledger)
        positions = box_positions(shards, boxes)
        cursors = archive_cursors(ledger)
        start, end = {}, {}
        for box, state in positions.items():
            after = resume_seq(box, state, cursors[box], on_gap) if box in cursors else state.earliest_seq - 1
            if after < state.head_seq:
                start[box], end[box] = after, state.head_seq
        if dry_run:
            plan = [
                ArchivedRange(
                    box,
                    positions[box].generation,
                    start[box] + 1,
                    end[box],
                    end[box] - start[box],
                    0,
                    path,
                    "",
                )
                for box in end
            ]
            return Archive(name, sum(each.records for each in plan), plan, 0, is_dry=True)
        ranges = []
        if end:
            ranges = _archive_range(
                spark, context, ledger, positions, path, start, end, on_gap=on_gap, compare=trim
            )
            archive_upkeep.compact_if_due(spark, ledger)
        deleted_records = _trim_boxes(spark, context, client, ledger, positions, start) if trim else 0
    return Archive(name, sum(each.records for each in ranges), ranges, deleted_records)


def _archive_range(
    spark: SparkSession,
    context: JobContext,
    ledger: Ledger,
    positions: Mapping[str, BoxPosition],
    path: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    *,
    on_gap: str,
    compare: bool,
) -> list[ArchivedRange]:
    run = new_run_id()
    folder = staging_folder(path, run)
    rows = context.frame(spark, start, end, on_gap=on_gap)
    gaps = collect_gaps(rows)
    rows = rows.drop("gap").filter("data is not null")
    write_files(rows, folder)
    summaries = {row["box"]: row for row in summary(read_files(spark, folder)).collect()}
    if compare:
        _check_equal(summaries, {row["box"]: row for row in summary(rows).collect()})
    ranges = [
        ArchivedRange(
            box=box,
            gen=positions[box].generation,
            first=start[box] + 1,
            last=end[box],
            records=summaries[box]["records"] if box in summaries else 0,
            fingerprint=summaries[box]["fingerprint"] if box in summaries else 0,
            path=path,
            run=run,
            gaps=gaps.get(box, []),
        )
        for box in end
    ]
    ledger.append(msgspec.to_builtins(each) for each in ranges)
    publish(spark, ledger)
    return ranges


def _trim_boxes(
    spark: SparkSession,
    context: JobContext,
    client: Client,
    ledger: Ledger,
    positions: Mapping[str, BoxPosition],
    start: Mapping[str, int],
) -> int:
    """Delete the archived records from the boxes.

    The range of this run is compared already. Earlier ranges, from runs without `trim`, are compared here.
    """
    trim_ends = {
        box: cursor.seq
        for box, cursor in archive_cursors(ledger).items()
        if box in positions
        and positions[box].generation == cursor.gen
        and positions[box].earliest_seq <= cursor.seq
    }
    compare_ends = {box: start.get(box, last) for box, last in trim_ends.items()}
    uncompared_boxes = {
        box: last for box, last in compare_ends.items() if positions[box].earliest_seq <= last
    }
    if uncompared_boxes:
        live = context.frame(
            spark,
            {box: positions[box].earliest_seq - 1 for box in uncompared_boxes},
            uncompared_boxes,
            on_gap="skip",
        )
        differences = find_unarchived(live, read_archived(spark, ledger, uncompared_boxes)).limit(1).collect()
        if differences:
            raise JobRefused(
                f"record {differences[0]['seq']} of {differences[0]['box']} is not in the archive as the box "
                f"holds it; nothing was trimmed. List all differences with streams pipeline audit"
            )
    return sum(client.box(box).delete(before_seq=last + 1).deleted for box, last in trim_ends.items())


def find_unarchived(box_rows: DataFrame, archive_rows: DataFrame | None) -> DataFrame:
    """Return box and seq of records that the archive lacks, or has with other contents."""
    content = sql.xxhash64("ts", "data", "tag", "node", "meta").alias("content")
    box_contents = box_rows.select("box", "seq", content)
    if archive_rows is None:
        return box_contents
    archive_contents = archive_rows.select("box", "seq", content)
    return box_contents.join(archive_contents, ["box", "seq", "content"], "left_anti")


def collect_gaps(rows: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Return the gaps of each box in rows that were read with `onGap=emit`."""
    if "gap" not in rows.columns:
        return {}
    gaps: dict[str, list[dict[str, Any]]] = {}
    for row in rows.filter("gap is not null").select("box", "gap").collect():
        gaps.setdefault(row["box"], []).append(row["gap"].asDict())
    return gaps


def _check_equal(files: Mapping[str, Any], boxes: Mapping[str, Any]) -> None:
    different_boxes = sorted(
        box
        for box in files.keys() | boxes.keys()
        if box not in files or box not in boxes or files[box] != boxes[box]
    )
    if different_boxes:
        raise JobRefused(
            f"the archived files of {', '.join(different_boxes)} do not match the boxes; nothing was trimmed."
            f" Records deleted during the run can cause this: run the job again"
        )


class Export(msgspec.Struct, frozen=True):
    name: str
    path: str
    records: int
    is_dry: bool = False


def read_all(
    spark: SparkSession,
    name: str,
    boxes: Sequence[str] = (),
    *,
    url: str | None = None,
    key: str | None = None,
) -> DataFrame:
    """Read the archive and its boxes as one frame: files up to the end of the archive, then the boxes.

    Each record appears once. A record that is lost between the two fails the query. A deleted box contributes
    its archived records only.
    """
    context = JobContext(url, key)
    with context.client() as client, context.shards() as shards:
        for _ in range(_ATTEMPTS_MAX):
            ledger = Ledger(client, LEDGER + name)
            cursors = archive_cursors(ledger)
            names = list(boxes) or sorted(cursors)
            existing_boxes = {each.box for each in shards.states(boxes=names)}
            positions = box_positions(
                shards, [box for box in names if box in existing_boxes or box not in cursors], least=0
            )
            archive_rows = read_archived(spark, ledger, names)
            if ledger.is_unchanged():
                break  # the ledger did not change while the files were listed
        else:
            raise JobRefused(
                f"the archive {name} changed during all {_ATTEMPTS_MAX} attempts to list its files; try again"
            )
        start = {
            box: resume_seq(box, state, cursors[box], "fail") if box in cursors else state.earliest_seq - 1
            for box, state in positions.items()
        }
        end = {box: state.head_seq for box, state in positions.items()}
    if not names:
        raise JobRefused(f"there is no archive {name}; its ledger would be the box {LEDGER}{name}")
    box_rows = context.frame(spark, start, end) if end else spark.createDataFrame([], SCHEMA)
    return box_rows if archive_rows is None else archive_rows.unionByName(box_rows)


@spark_job
def export_all(
    spark: SparkSession,
    name: str,
    path: str,
    boxes: Sequence[str] = (),
    *,
    format: str = "parquet",
    url: str | None = None,
    key: str | None = None,
    dry_run: bool = False,
) -> Export:
    """Write the rows of `read_all` to files in a new folder."""
    if format not in FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(FORMATS)}")
    rows = read_all(spark, name, boxes, url=url, key=key)
    if dry_run:
        return Export(name, path, rows.count(), is_dry=True)
    observation = Observation()
    observed_rows = rows.observe(observation, sql.count(sql.lit(1)).alias("rows"))
    observed_rows.write.format(format).save(path)
    return Export(name, path, int(observation.get["rows"]))
