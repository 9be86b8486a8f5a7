"""Boxes to Parquet, partitioned by box and date, and both read as one.

A run writes its files where no reader looks, reads them back, appends to the ledger what they hold, and then
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
    cold,
    cursors,
    migrate,
    new_run,
    publish,
    read_files,
    staging,
    write,
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


#: Times that a reader looks again because a run has ended meanwhile.
_LOOKS_MAX = 10


class Range(msgspec.Struct, frozen=True):
    """What a run has archived of one box: records `first` to `last`, as far as they were there."""

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
    ranges: list[Range]
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
    """Writes what is new in these boxes, or in all whose names start with `prefix`, since the last run into
    Parquet files below `path`, by box and day. `trim` then deletes from the boxes everything that is
    archived, after both sides have been read once more and compared: also what earlier runs have archived
    and not deleted."""
    site = JobContext(url, key)
    path = (path if "://" in path else os.path.abspath(path)).rstrip("/")
    with site.client() as client, site.shards() as shards:
        boxes = select_boxes(shards, boxes, prefix)
        ledger = Ledger(client, LEDGER + name)
        if not dry_run:
            migrate(spark, ledger)
            publish(spark, ledger)
        known = box_positions(shards, boxes)
        places = cursors(ledger)
        start, end = {}, {}
        for box, state in known.items():
            after = resume_seq(box, state, places[box], on_gap) if box in places else state.earliest_seq - 1
            if after < state.head_seq:
                start[box], end[box] = after, state.head_seq
        if dry_run:
            planned = [
                Range(
                    box, known[box].generation, start[box] + 1, end[box], end[box] - start[box], 0, path, ""
                )
                for box in end
            ]
            return Archive(name, sum(each.records for each in planned), planned, 0, is_dry=True)
        found = []
        if end:
            found = _archive(spark, site, ledger, known, path, start, end, on_gap=on_gap, compare=trim)
            archive_upkeep.compact_if_due(spark, ledger)
        trimmed = _trim(spark, site, client, ledger, known, start) if trim else 0
    return Archive(name, sum(each.records for each in found), found, trimmed)


def _archive(
    spark: SparkSession,
    site: JobContext,
    ledger: Ledger,
    known: Mapping[str, BoxPosition],
    path: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    *,
    on_gap: str,
    compare: bool,
) -> list[Range]:
    run = new_run()
    staged = staging(path, run)
    rows = site.frame(spark, start, end, on_gap=on_gap)
    gaps = _gaps(rows)
    rows = rows.drop("gap").filter("data is not null")
    write(rows, staged)
    written = {row["box"]: row for row in summary(read_files(spark, staged)).collect()}
    if compare:
        _compare(written, {row["box"]: row for row in summary(rows).collect()})
    found = [
        Range(
            box=box,
            gen=known[box].generation,
            first=start[box] + 1,
            last=end[box],
            records=written[box]["records"] if box in written else 0,
            fingerprint=written[box]["fingerprint"] if box in written else 0,
            path=path,
            run=run,
            gaps=gaps.get(box, []),
        )
        for box in end
    ]
    ledger.append(msgspec.to_builtins(each) for each in found)
    publish(spark, ledger)
    return found


def _trim(
    spark: SparkSession,
    site: JobContext,
    client: Client,
    ledger: Ledger,
    known: Mapping[str, BoxPosition],
    start: Mapping[str, int],
) -> int:
    """Deletes what is archived. The range of this run was compared already; earlier ranges, of runs that did
    not trim, are compared here."""
    upto = {
        box: place.seq
        for box, place in cursors(ledger).items()
        if box in known and known[box].generation == place.gen and known[box].earliest_seq <= place.seq
    }
    before = {box: start.get(box, last) for box, last in upto.items()}
    older = {box: last for box, last in before.items() if known[box].earliest_seq <= last}
    if older:
        live = site.frame(spark, {box: known[box].earliest_seq - 1 for box in older}, older, on_gap="skip")
        lost = unarchived(live, cold(spark, ledger, older)).limit(1).collect()
        if lost:
            raise JobRefused(
                f"record {lost[0]['seq']} of {lost[0]['box']} is not in the archive as the box holds it; "
                f"nothing was trimmed. streams pipeline audit shows what else differs"
            )
    return sum(client.box(box).delete(before_seq=last + 1).deleted for box, last in upto.items())


def unarchived(live: DataFrame, archived: DataFrame | None) -> DataFrame:
    """Box and seq of records that the archive does not have, or has with other contents."""
    content = sql.xxhash64("ts", "data", "tag", "node", "meta").alias("content")
    mine = live.select("box", "seq", content)
    if archived is None:
        return mine
    theirs = archived.select("box", "seq", content)
    return mine.join(theirs, ["box", "seq", "content"], "left_anti")


def _gaps(rows: DataFrame) -> dict[str, list[dict[str, Any]]]:
    if "gap" not in rows.columns:
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows.filter("gap is not null").select("box", "gap").collect():
        found.setdefault(row["box"], []).append(row["gap"].asDict())
    return found


def _compare(written: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    different = sorted(
        box
        for box in written.keys() | source.keys()
        if box not in written or box not in source or written[box] != source[box]
    )
    if different:
        raise JobRefused(
            f"what was read back of {', '.join(different)} is not what the box holds; nothing was trimmed. "
            f"Records that were deleted meanwhile do this: start again"
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
    """Archive and boxes as one: files up to where the archive goes, the boxes from there. No record twice,
    and a record that is lost between the two fails the query. Of a box that was deleted since, only what is
    archived."""
    site = JobContext(url, key)
    with site.client() as client, site.shards() as shards:
        for _ in range(_LOOKS_MAX):
            ledger = Ledger(client, LEDGER + name)
            places = cursors(ledger)
            wanted = list(boxes) or sorted(places)
            there = {each.box for each in shards.states(boxes=wanted)}
            known = box_positions(
                shards, [box for box in wanted if box in there or box not in places], least=0
            )
            archived = cold(spark, ledger, wanted)
            if ledger.is_unchanged():
                break  # the files were listed while the ledger said the same
        else:
            raise JobRefused(f"the archive {name} is being written all the time; try again")
        start = {
            box: resume_seq(box, state, places[box], "fail") if box in places else state.earliest_seq - 1
            for box, state in known.items()
        }
        end = {box: state.head_seq for box, state in known.items()}
    if not wanted:
        raise JobRefused(f"there is no archive {name}; its ledger would be the box {LEDGER}{name}")
    live = site.frame(spark, start, end) if end else spark.createDataFrame([], SCHEMA)
    return live if archived is None else archived.unionByName(live)


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
    """What `read_all` gives, as files in a folder that is not there yet."""
    if format not in FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(FORMATS)}")
    rows = read_all(spark, name, boxes, url=url, key=key)
    if dry_run:
        return Export(name, path, rows.count(), is_dry=True)
    seen = Observation()
    counted = rows.observe(seen, sql.count(sql.lit(1)).alias("rows"))
    counted.write.format(format).save(path)
    return Export(name, path, int(seen.get["rows"]))
