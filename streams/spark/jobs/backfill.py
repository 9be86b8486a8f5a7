"""Files to boxes: Parquet, JSON lines, CSV, or whatever Spark reads.

Files are taken in groups; each group is one transaction, so a backfill that was stopped goes on after the
last group that is whole. Which files are in which group stands in the ledger and never changes: files that
have come since make groups of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.spark.expressions import prepare
from streams.spark.jobs.plainly import plainly
from streams.spark.jobs.site import JobRefused, Ledger, Site, done_epoch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "backfill."
#: Of rows that are no JSON, so many are shown.
_BAD_SHOWN = 10
_FORMATS = ("json", "parquet", "csv", "orc")


class Backfill(msgspec.Struct, frozen=True):
    name: str
    files: int
    #: Written by this run; by an earlier one: 0.
    records: int
    groups: int
    groups_done_before: int
    #: (file, text) of rows that are not JSON. Looked for in a dry run only.
    bad: list[tuple[str, str]] = []
    is_dry: bool = False


@plainly
def backfill(
    spark: SparkSession,
    path: str,
    *,
    name: str,
    box: str | None = None,
    format: str = "json",
    url: str | None = None,
    key: str | None = None,
    box_column: str | None = None,
    data: str | None = None,
    tag: str | None = None,
    ts: str | None = None,
    node: str = "backfill",
    files_per_group: int = 8,
    options: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Backfill:
    """Appends the rows of the files at `path`: to `box`, or to the one that the SQL expression `box_column`
    says.

    Lines of JSON are records as they are, digits and all, and expressions see them as `data`; of other
    formats a record is the row as JSON, unless the SQL expression `data` says otherwise. `tag` and `ts` are
    SQL expressions too; boxes keep a `ts` only if their `timestamping` takes the client's.
    """
    if format not in _FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(_FORMATS)}")
    if (box is None) == (box_column is None):
        raise JobRefused("give either a box, or an expression for it (box_column)")
    site = Site(url, key)
    writer = f"job:backfill:{name}"

    def rows(files: list[str]) -> DataFrame:
        return prepare(
            _read(spark, files, format, options or {}),
            data=data or ("data" if format == "json" else None),
            box=box_column,
            tag=tag,
            ts=ts,
        )

    with site.client() as client, site.shards() as shards:
        ledger = Ledger(client, LEDGER + name)
        done = done_epoch(shards, writer)
        planned = {file for entry in ledger.entries for file in entry["files"]}
        new = sorted(set(_files(spark, path, format)) - planned)
        groups = [new[at : at + files_per_group] for at in range(0, len(new), files_per_group)]
        first = len(ledger.entries)
        entries = [{"group": first + at, "files": files} for at, files in enumerate(groups)]
        everything = [*ledger.entries, *entries]
        if dry_run:
            todo = [file for entry in everything if entry["group"] > done for file in entry["files"]]
            counted = rows(todo).count() if todo else 0
            bad = _bad(spark, todo, format) if todo and format == "json" else []
            return Backfill(name, len(todo), counted, len(everything), done + 1, bad, is_dry=True)
        if entries:
            ledger.append(entries)
        records = files_done = 0
        for entry in everything:
            if entry["group"] > done:
                more: dict[str, Any] = {"box": box} if box is not None else {}
                records += site.write(
                    rows(entry["files"]), writer=writer, epoch=entry["group"], node=node, **more
                )
                files_done += len(entry["files"])
    return Backfill(name, files_done, records, len(everything), done + 1)


def _read(spark: SparkSession, files: list[str], format: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.options(**options)
    if format == "json":
        lines = reader.text(files)
        return lines.filter("trim(value) != ''").select(sql.col("value").alias("data"))
    if format == "csv":
        reader = reader.option("header", options.get("header", "true"))
    return reader.format(format).load(files)


def _files(spark: SparkSession, path: str, format: str) -> list[str]:
    found = spark.read.format("text" if format in ("json", "csv") else format).load(path).inputFiles()
    if not found:
        raise JobRefused(f"there is no file at {path}")
    return list(found)


def _bad(spark: SparkSession, files: list[str], format: str) -> list[tuple[str, str]]:
    lines = spark.read.text(files).filter("trim(value) != ''")
    broken = lines.filter("try_parse_json(value) is null").select(
        sql.input_file_name().alias("file"), sql.substring("value", 1, 100).alias("text")
    )
    return [(row["file"], row["text"]) for row in broken.limit(_BAD_SHOWN).collect()]
