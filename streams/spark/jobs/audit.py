"""Checks for missing or duplicated records: in one box, between a box and its archive, or between two boxes.

A hole in the seqs is not loss by itself: records are deleted on purpose. Each violation is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.spark.jobs.archive import find_unarchived
from streams.spark.jobs.archive_files import LEDGER, range_entries, read_archived
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

#: Most examples of one finding.
_EXAMPLES_MAX = 5


class BoxAudit(msgspec.Struct, frozen=True):
    """Counts of one box, now."""

    box: str
    records: int
    first_seq: int | None
    last_seq: int | None
    #: Seqs between the first and the last that no record has: deleted on purpose.
    holes: int
    #: Ranges that the server reports as lost.
    gaps: list[dict[str, Any]]


class Audit(msgspec.Struct, frozen=True):
    ok: bool
    boxes: list[BoxAudit]
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
    """Check every record of `boxes`.

    With `archive`, also check every record of the archive of that name. With `against`, compare one box with
    another: both must have the same records (data, tag), equally often.
    """
    context = JobContext(url, key)
    with context.client() as client, context.shards() as shards:
        boxes = select_boxes(shards, boxes, prefix)
        if against is not None and len(boxes) != 1:
            raise JobRefused("against compares exactly one box with another; name one box")
        positions = box_positions(shards, boxes)
        other_positions = box_positions(shards, [against]) if against is not None else {}
        ledger = Ledger(client, LEDGER + archive) if archive is not None else None
    if ledger is not None and not ledger.entries:
        raise JobRefused(f"there is no archive {archive}; its ledger would be the box {LEDGER}{archive}")
    end = {box: state.head_seq for box, state in positions.items()}
    # From 0, and with gaps as rows: so only the server's tombstones count as loss.
    rows = context.frame(spark, dict.fromkeys(end, 0), end, on_gap="emit").cache()
    try:
        box_audits, findings = _audit_boxes(rows, list(end))
        if ledger is not None:
            findings += _compare_with_archive(spark, rows.filter("gap is null"), ledger, set(end))
        else:
            findings += [
                f"{each.box} has lost records {gap['from']} to {gap['to']} ({gap['reason']})"
                for each in box_audits
                for gap in each.gaps
            ]
        if against is not None:
            other_rows = context.frame(
                spark, {against: 0}, {against: other_positions[against].head_seq}, on_gap="emit"
            )
            findings += _compare_with_box(
                rows.filter("gap is null"), other_rows.filter("gap is null"), boxes[0], against
            )
    finally:
        rows.unpersist()
    return Audit(not findings, box_audits, findings)


def _audit_boxes(rows: DataFrame, boxes: list[str]) -> tuple[list[BoxAudit], list[str]]:
    counts = {row["box"]: row for row in summary(rows.filter("gap is null")).collect()}
    gaps: dict[str, list[dict[str, Any]]] = {}
    for gap_row in rows.filter("gap is not null").select("box", "gap").collect():
        gaps.setdefault(gap_row["box"], []).append(gap_row["gap"].asDict())
    box_audits, findings = [], []
    for box in boxes:
        row = counts.get(box)
        if row is None:
            box_audits.append(BoxAudit(box, 0, None, None, 0, gaps.get(box, [])))
            continue
        holes = row["last_seq"] - row["first_seq"] + 1 - row["seqs"]
        box_audits.append(
            BoxAudit(box, row["records"], row["first_seq"], row["last_seq"], holes, gaps.get(box, []))
        )
        if row["records"] != row["seqs"]:
            findings.append(f"{box}: {row['records'] - row['seqs']} seqs are duplicated")
    return box_audits, findings


def _compare_with_archive(
    spark: SparkSession, box_rows: DataFrame, ledger: Ledger, boxes: set[str]
) -> list[str]:
    """Return the differences between ledger, files and boxes.

    The ranges of the ledger must be contiguous. The files of each box must match the counts and fingerprints
    of the ledger. Archived records that are still in the box must be equal.
    """
    findings: list[str] = []
    entries = [entry for entry in range_entries(ledger) if entry["box"] in boxes]
    ledger_ends: dict[str, tuple[int, int]] = {}
    records: Counter[str] = Counter()
    fingerprints: dict[str, int] = {}
    for entry in entries:
        box = entry["box"]
        gen, last = ledger_ends.get(box, (entry["gen"], entry["first"] - 1))
        if gen == entry["gen"] and entry["first"] != last + 1:
            findings.append(f"{box}: the archive has no records between {last} and {entry['first']}")
        for gap in entry["gaps"]:
            findings.append(f"{box}: records {gap['from']} to {gap['to']} were lost before the archive run")
        ledger_ends[box] = (entry["gen"], entry["last"])
        records[box] += entry["records"]
        fingerprints[box] = fingerprints.get(box, 0) ^ entry["fingerprint"]
    archive_rows = read_archived(spark, ledger, boxes) if entries else None
    summaries = (
        {row["box"]: row for row in summary(archive_rows).collect()} if archive_rows is not None else {}
    )
    for box, ledger_count in records.items():
        row = summaries.get(box)
        count, fingerprint = (row["records"], row["fingerprint"]) if row is not None else (0, 0)
        if count != ledger_count:
            findings.append(f"{box}: the files have {count} records, but the ledger has {ledger_count}")
        elif fingerprint != fingerprints[box]:
            findings.append(f"{box}: the contents of the files have changed since they were written")
    if not entries:
        return findings
    ends = [(box, last) for box, (_, last) in ledger_ends.items()]
    cursors = spark.createDataFrame(ends, "box string, last bigint")
    archivable_rows = box_rows.join(sql.broadcast(cursors), "box").filter("seq <= last")
    for row in find_unarchived(archivable_rows, archive_rows).limit(_EXAMPLES_MAX).collect():
        findings.append(f"{row['box']}: record {row['seq']} is not in the archive, or differs there")
    return findings


def _compare_with_box(rows: DataFrame, other_rows: DataFrame, name: str, other: str) -> list[str]:
    """Count the records that only one box has. Compares contents, because copies have other seqs."""
    content = sql.xxhash64("data", "tag")
    mine = rows.groupBy(content.alias("content")).agg(sql.count(sql.lit(1)).alias("mine"))
    theirs = other_rows.groupBy(content.alias("content")).agg(sql.count(sql.lit(1)).alias("theirs"))
    both = mine.join(theirs, "content", "full_outer").fillna(0, ["mine", "theirs"])
    row = both.agg(
        sql.sum(sql.greatest(sql.col("mine") - sql.col("theirs"), sql.lit(0))).alias("missing"),
        sql.sum(sql.greatest(sql.col("theirs") - sql.col("mine"), sql.lit(0))).alias("extra"),
    ).collect()[0]
    findings = []
    if row["missing"]:
        findings.append(f"{row['missing']} records of {name} are missing in {other}")
    if row["extra"]:
        findings.append(f"{row['extra']} records of {other} are missing in {name}")
    return findings
