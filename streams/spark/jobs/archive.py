"""Boxes to Parquet, a range at a time, with a ledger that says which files count.

A run writes into a folder of its own, reads it back, and then appends to the ledger which ranges it holds.
Files without an entry (of a run that was killed) are never looked at: the ledger is the truth, not the
listing.
"""

from __future__ import annotations

import uuid
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import Observation
from pyspark.sql import functions as sql

from streams.client._sync.client import Client
from streams.direct import BoxPosition
from streams.spark.jobs.plainly import plainly
from streams.spark.jobs.site import SCHEMA, JobRefused, Ledger, Site, continued, states, summary
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "archive."
FORMATS = ("parquet", "json", "csv", "orc")


class Range(msgspec.Struct, frozen=True):
    """What a run has put away of one box: records `first` to `last`, as far as they were there."""

    box: str
    gen: int
    first: int
    last: int
    records: int
    fingerprint: int
    folder: str
    gaps: list[dict[str, Any]] = []


class Archive(msgspec.Struct, frozen=True):
    name: str
    records: int
    ranges: list[Range]
    trimmed: int
    is_dry: bool = False


@plainly
def archive(
    spark: SparkSession,
    boxes: Sequence[str],
    path: str,
    *,
    name: str,
    url: str | None = None,
    key: str | None = None,
    trim: bool = False,
    on_gap: str = "fail",
    dry_run: bool = False,
) -> Archive:
    """Puts what is new in these boxes since the last run into Parquet files below `path`, by box and day,
    sorted. `trim` then deletes all that is archived from the boxes, after both sides have been read once more
    and compared: also what earlier runs have archived and left there, or were killed before they deleted."""
    site = Site(url, key)
    with site.client() as client, site.shards() as shards:
        ledger = Ledger(client, LEDGER + name)
        known = states(shards, boxes)
        places = cursors(ledger)
        start, end = {}, {}
        for box, state in known.items():
            after = continued(box, state, places[box], on_gap) if box in places else state.earliest_seq - 1
            if after < state.head_seq:
                start[box], end[box] = after, state.head_seq
        if dry_run:
            planned = [
                Range(box, known[box].generation, start[box] + 1, end[box], end[box] - start[box], 0, "")
                for box in end
            ]
            return Archive(name, sum(each.records for each in planned), planned, 0, is_dry=True)
        found = []
        if end:
            found = _put_away(spark, site, ledger, known, path, start, end, on_gap=on_gap, compare=trim)
        trimmed = _trim(spark, site, client, ledger, known, start) if trim else 0
    return Archive(name, sum(each.records for each in found), found, trimmed)


def _put_away(
    spark: SparkSession,
    site: Site,
    ledger: Ledger,
    known: Mapping[str, BoxPosition],
    path: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    *,
    on_gap: str,
    compare: bool,
) -> list[Range]:
    folder = f"{path.rstrip('/')}/{len(ledger.entries):06d}-{uuid.uuid4().hex[:8]}"
    rows = site.frame(spark, start, end, on_gap=on_gap)
    gaps = _gaps(rows)
    rows = rows.drop("gap").filter("data is not null")
    _write(rows, folder)
    written = {row["box"]: row for row in summary(stored(spark, [folder])).collect()}
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
            folder=folder,
            gaps=gaps.get(box, []),
        )
        for box in end
    ]
    ledger.append(msgspec.to_builtins(each) for each in found)
    return found


def _trim(
    spark: SparkSession,
    site: Site,
    client: Client,
    ledger: Ledger,
    known: Mapping[str, BoxPosition],
    start: Mapping[str, int],
) -> int:
    """Deletes what the ledger has. This run's own range was compared already; what stands before it, of runs
    that did not trim, is compared here."""
    upto = {
        box: place.seq
        for box, place in cursors(ledger).items()
        if box in known and known[box].generation == place.gen and known[box].earliest_seq <= place.seq
    }
    before = {box: start.get(box, last) for box, last in upto.items()}
    older = {box: last for box, last in before.items() if known[box].earliest_seq <= last}
    if older:
        live = site.frame(spark, {box: known[box].earliest_seq - 1 for box in older}, older, on_gap="skip")
        lost = unarchived(live, stored(spark, folders_of(ledger.entries, older))).limit(1).collect()
        if lost:
            raise JobRefused(
                f"record {lost[0]['seq']} of {lost[0]['box']} is not in the archive as the box holds it; "
                f"nothing was trimmed. streams pipeline audit tells what else differs"
            )
    return sum(client.box(box).delete(before_seq=last + 1).deleted for box, last in upto.items())


def folders_of(entries: Iterable[Mapping[str, Any]], boxes: Container[str]) -> list[str]:
    return sorted({entry["folder"] for entry in entries if entry["box"] in boxes})


def unarchived(live: DataFrame, cold: DataFrame) -> DataFrame:
    """Box and seq of records that the archive does not have, or has otherwise."""
    content = sql.xxhash64("ts", "data", "tag", "node", "meta").alias("content")
    mine, theirs = live.select("box", "seq", content), cold.select("box", "seq", content)
    return mine.join(theirs, ["box", "seq", "content"], "left_anti")


def _gaps(rows: DataFrame) -> dict[str, list[dict[str, Any]]]:
    if "gap" not in rows.columns:
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows.filter("gap is not null").select("box", "gap").collect():
        found.setdefault(row["box"], []).append(row["gap"].asDict())
    return found


def _write(rows: DataFrame, folder: str) -> None:
    """By box and day of the record's time; in each file sorted, so that a range of seqs is found by the
    file's own statistics."""
    days = rows.withColumn("day", sql.to_date("ts"))
    ordered = days.sortWithinPartitions("box", "day", "seq")
    ordered.write.partitionBy("box", "day").option("compression", "zstd").parquet(folder)


def stored(spark: SparkSession, folders: Sequence[str]) -> DataFrame:
    """The records of these runs. With a schema: else a box called 7 would be a number."""
    found = None
    for folder in folders:
        rows = spark.read.schema(f"{SCHEMA}, day date").option("basePath", folder).parquet(folder).drop("day")
        rows = rows.withColumn("folder", sql.lit(folder))
        found = rows if found is None else found.unionByName(rows)
    assert found is not None, "there is a run"
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


def cursors(ledger: Ledger) -> dict[str, Place]:
    """How far each box has been put away."""
    return {entry["box"]: Place(entry["gen"], entry["last"]) for entry in ledger.entries}


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
    and a record that is lost between the two fails the query. Of a box that was deleted since, what is
    archived."""
    site = Site(url, key)
    with site.client() as client, site.shards() as shards:
        ledger = Ledger(client, LEDGER + name)
        places = cursors(ledger)
        wanted = list(boxes) or sorted(places)
        there = {each.box for each in shards.states(boxes=wanted)}
        known = states(shards, [box for box in wanted if box in there or box not in places], least=0)
        start = {
            box: continued(box, state, places[box], "fail") if box in places else state.earliest_seq - 1
            for box, state in known.items()
        }
        end = {box: state.head_seq for box, state in known.items()}
    if not wanted:
        raise JobRefused(f"there is no archive {name}; its ledger would be the box {LEDGER}{name}")
    live = site.frame(spark, start, end) if end else spark.createDataFrame([], SCHEMA)
    folders = folders_of(ledger.entries, wanted)
    if not folders:
        return live
    cold = stored(spark, folders).drop("folder").filter(sql.col("box").isin(wanted))
    return cold.unionByName(live)


@plainly
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
