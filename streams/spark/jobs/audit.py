"""Is anything missing or doubled? Of one box; of a box and its archive; of two boxes.

A hole in the seqs is not loss by itself: records are deleted on purpose. What must hold is told as findings
when it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.spark.jobs.archive import unarchived
from streams.spark.jobs.archive_files import LEDGER, cold, ranges
from streams.spark.jobs.job_context import (
    JobContext,
    JobRefused,
    Ledger,
    box_positions,
    select_boxes,
    summary,
)
from streams.spark.jobs.spark_errors import spark_job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Examples that one finding names.
_SHOWN = 5


class Audited(msgspec.Struct, frozen=True):
    """A box as it is now."""

    box: str
    records: int
    first_seq: int | None
    last_seq: int | None
    #: Seqs between the first and the last that no record has: deleted on purpose.
    holes: int
    #: What the server says is lost.
    gaps: list[dict[str, Any]]


class Audit(msgspec.Struct, frozen=True):
    ok: bool
    boxes: list[Audited]
    findings: list[str]


@spark_job
def audit(
    spark: SparkSession,
    boxes: Sequence[str] = (),
    *,
    prefix: str | None = None,
    archive: str | None = None,
    against: str | None = None,
    url: str | None = None,
    key: str | None = None,
) -> Audit:
    """Looks at every record of `boxes`; with `archive`, also at every record of the archive of that name;
    with `against`, whether the one box holds the same records (data, tag) as often as the other box."""
    site = JobContext(url, key)
    with site.client() as client, site.shards() as shards:
        boxes = select_boxes(shards, boxes, prefix)
        if against is not None and len(boxes) != 1:
            raise JobRefused("against compares one box with another")
        known = box_positions(shards, boxes)
        other = box_positions(shards, [against]) if against is not None else {}
        ledger = Ledger(client, LEDGER + archive) if archive is not None else None
    if ledger is not None and not ledger.entries:
        raise JobRefused(f"there is no archive {archive}; its ledger would be the box {LEDGER}{archive}")
    end = {box: state.head_seq for box, state in known.items()}
    # From 0, and with gaps as rows: so the server says what is lost, and nothing else is taken for it.
    rows = site.frame(spark, dict.fromkeys(end, 0), end, on_gap="emit").cache()
    try:
        found, findings = _boxes(rows, list(end))
        if ledger is not None:
            findings += _against_archive(spark, rows.filter("gap is null"), ledger, set(end))
        else:
            findings += [
                f"{each.box} has lost records {gap['from']} to {gap['to']} ({gap['reason']})"
                for each in found
                for gap in each.gaps
            ]
        if against is not None:
            theirs = site.frame(spark, {against: 0}, {against: other[against].head_seq}, on_gap="emit")
            findings += _against_box(
                rows.filter("gap is null"), theirs.filter("gap is null"), boxes[0], against
            )
    finally:
        rows.unpersist()
    return Audit(not findings, found, findings)


def _boxes(rows: DataFrame, boxes: list[str]) -> tuple[list[Audited], list[str]]:
    counts = {row["box"]: row for row in summary(rows.filter("gap is null")).collect()}
    gaps: dict[str, list[dict[str, Any]]] = {}
    for lost in rows.filter("gap is not null").select("box", "gap").collect():
        gaps.setdefault(lost["box"], []).append(lost["gap"].asDict())
    found, findings = [], []
    for box in boxes:
        row = counts.get(box)
        if row is None:
            found.append(Audited(box, 0, None, None, 0, gaps.get(box, [])))
            continue
        holes = row["last_seq"] - row["first_seq"] + 1 - row["seqs"]
        found.append(
            Audited(box, row["records"], row["first_seq"], row["last_seq"], holes, gaps.get(box, []))
        )
        if row["records"] != row["seqs"]:
            findings.append(f"{box}: {row['records'] - row['seqs']} seqs come more than once")
    return found, findings


def _against_archive(spark: SparkSession, live: DataFrame, ledger: Ledger, boxes: set[str]) -> list[str]:
    """Ranges of the ledger follow each other; the files of each box hold what the ledger says; and what the
    box still has of them are the same records."""
    findings: list[str] = []
    entries = [entry for entry in ranges(ledger) if entry["box"] in boxes]
    reached: dict[str, tuple[int, int]] = {}
    records: Counter[str] = Counter()
    fingerprints: dict[str, int] = {}
    for entry in entries:
        box = entry["box"]
        gen, last = reached.get(box, (entry["gen"], entry["first"] - 1))
        if gen == entry["gen"] and entry["first"] != last + 1:
            findings.append(
                f"{box}: the archive goes from record {last} on to {entry['first']}; nothing is between"
            )
        for gap in entry["gaps"]:
            findings.append(f"{box}: lost before it was archived: {gap['from']} to {gap['to']}")
        reached[box] = (entry["gen"], entry["last"])
        records[box] += entry["records"]
        fingerprints[box] = fingerprints.get(box, 0) ^ entry["fingerprint"]
    archived = cold(spark, ledger, boxes) if entries else None
    found = {row["box"]: row for row in summary(archived).collect()} if archived is not None else {}
    for box, wanted in records.items():
        row = found.get(box)
        count, fingerprint = (row["records"], row["fingerprint"]) if row is not None else (0, 0)
        if count != wanted:
            findings.append(f"{box}: the files have {count} records, and the ledger says {wanted}")
        elif fingerprint != fingerprints[box]:
            findings.append(f"{box}: the files are not as they were written")
    if not entries:
        return findings
    ends = [(box, last) for box, (_, last) in reached.items()]
    cursors = spark.createDataFrame(ends, "box string, last bigint")
    covered = live.join(sql.broadcast(cursors), "box").filter("seq <= last")
    for row in unarchived(covered, archived).limit(_SHOWN).collect():
        findings.append(f"{row['box']}: record {row['seq']} of the box is not in the archive as it is here")
    return findings


def _against_box(left: DataFrame, right: DataFrame, name: str, other: str) -> list[str]:
    """The same records as often. Compared by content, for copies have seqs of their own."""
    content = sql.xxhash64("data", "tag")
    mine = left.groupBy(content.alias("content")).agg(sql.count(sql.lit(1)).alias("mine"))
    theirs = right.groupBy(content.alias("content")).agg(sql.count(sql.lit(1)).alias("theirs"))
    both = mine.join(theirs, "content", "full_outer").fillna(0, ["mine", "theirs"])
    row = both.agg(
        sql.sum(sql.greatest(sql.col("mine") - sql.col("theirs"), sql.lit(0))).alias("missing"),
        sql.sum(sql.greatest(sql.col("theirs") - sql.col("mine"), sql.lit(0))).alias("extra"),
    ).collect()[0]
    found = []
    if row["missing"]:
        found.append(f"{row['missing']} records of {name} are missing in {other}")
    if row["extra"]:
        found.append(f"{row['extra']} records of {other} are not in {name}, or are there more often")
    return found
