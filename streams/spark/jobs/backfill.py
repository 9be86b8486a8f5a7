"""Files to boxes: Parquet, JSON lines, CSV, or whatever Spark reads.

Files are taken in groups, cut by bytes. Each group is one step (`steps.py`): a backfill that was stopped
goes on after the last group that was written, and groups that were not begun are cut anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
from pyspark.sql import functions as sql

from streams.protocol.errors import InvalidRequest
from streams.spark.expressions import prepare
from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.jobs.steps import STEP_BYTES, Steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "backfill."
#: Bad lines that a result or an error names.
_BAD_SHOWN = 10
_SPLIT = "spark.sql.files.maxPartitionBytes"
_FORMATS = ("json", "parquet", "csv", "orc")


class Backfill(msgspec.Struct, frozen=True):
    name: str
    files: int
    #: Written by this run; by an earlier one: 0.
    records: int
    groups: int
    groups_done_before: int
    #: (file, line, text) of lines that are not JSON or not UTF-8. Looked for in a dry run only.
    bad: list[tuple[str, int, str]] = []
    is_dry: bool = False


@spark_job
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
    files_per_group: int = 1000,
    group_bytes: int = STEP_BYTES,
    options: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Backfill:
    """Appends the rows of the files at `path`: to `box`, or to the one that the SQL expression `box_column`
    says.

    Lines of JSON are records as they are, digits and all, and expressions see them as `data`; of other
    formats a record is the row as JSON, unless the SQL expression `data` says otherwise. `tag` and `ts` are
    SQL expressions too; boxes keep a `ts` only if their `timestamping` takes the client's.

    A group has at most `files_per_group` files and about `group_bytes` bytes, but at least one file.
    """
    if format not in _FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(_FORMATS)}")
    if (box is None) == (box_column is None):
        raise JobRefused("give either a box, or an expression for it (box_column)")
    site = JobContext(url, key)
    writer = f"job:backfill:{name}"
    columns = {
        "data": data or ("data" if format == "json" else None),
        "box": box_column,
        "tag": tag,
        "ts": ts,
    }
    source = _Source(spark, format, options or {}, columns)
    with site.client() as client, site.shards() as shards:
        steps = Steps(Ledger(client, LEDGER + name), shards, writer, is_dry=dry_run)
        begun, before = len(steps.begun), len(steps.done)
        taken = {file for plan in steps.begun for file in plan["files"]}
        new = [each for each in _files(spark, path, format) if each[0] not in taken]
        groups = _groups(new, files_per_group, group_bytes)
        if dry_run:
            todo = [file for file, _ in new]
            counted = source.rows(todo).count() if todo else 0
            return Backfill(
                name, len(todo), counted, begun + len(groups), before, source.bad_lines(todo), is_dry=True
            )
        to: dict[str, Any] = {"box": box} if box is not None else {}
        write = partial(site.write, writer=writer, node=node, **to)
        records = files_done = 0
        for plan in _plans(steps, groups):
            records += _write_group(source, steps, plan, write)
            files_done += len(plan["files"])
    return Backfill(name, files_done, records, len(steps.done), before)


@dataclass(frozen=True)
class _Source:
    """Reads files as the rows that are written."""

    spark: SparkSession
    format: str
    options: Mapping[str, str]
    #: data, box, tag and ts as SQL expressions.
    columns: Mapping[str, str | None]

    def rows(self, files: list[str]) -> DataFrame:
        return prepare(_read(self.spark, files, self.format, self.options), **self.columns)

    def bad_lines(self, files: Sequence[str]) -> list[tuple[str, int, str]]:
        return _bad(self.spark, files) if files and self.format == "json" else []


def _plans(steps: Steps, groups: Sequence[list[str]]) -> Iterator[dict[str, Any]]:
    """The step that was begun, then the new ones, each planned when the one before it is done."""
    if steps.unfinished is not None:
        yield steps.unfinished
    for files in groups:
        yield steps.plan({"files": files})


def _write_group(source: _Source, steps: Steps, plan: dict[str, Any], write: Callable[..., int]) -> int:
    """How many records were written. `JobRefused` names lines that cannot be records."""
    try:
        return steps.run(plan, partial(write, source.rows(plan["files"])))
    except InvalidRequest as error:
        bad = source.bad_lines(plan["files"])
        if not bad:
            raise
        shown = "; ".join(f"{file}, line {line}: {text!r}" for file, line, text in bad)
        raise JobRefused(
            f"lines that are not JSON in UTF-8 ({shown}). Nothing of this group of files was written; "
            f"repair them and start again, or use a dry run to see the bad lines of all files"
        ) from error


def _groups(files: Sequence[tuple[str, int]], files_max: int, bytes_max: int) -> list[list[str]]:
    found: list[list[str]] = []
    room = 0
    for file, size in sorted(files):
        if not found or size > room or len(found[-1]) >= files_max:
            found.append([])
            room = bytes_max
        found[-1].append(file)
        room -= size
    return found


def _read(spark: SparkSession, files: list[str], format: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.options(**options)
    if format == "json":
        lines = reader.text(files)
        return lines.filter("trim(value) != ''").select(sql.col("value").alias("data"))
    if format == "csv":
        reader = reader.option("header", options.get("header", "true"))
    return reader.format(format).load(files)


def _files(spark: SparkSession, path: str, format: str) -> list[tuple[str, int]]:
    """Files with their sizes."""
    names = spark.read.format("text" if format in ("json", "csv") else format).load(path).inputFiles()
    if not names:
        raise JobRefused(f"there is no file at {path}")
    # Reads no contents. Its paths are written otherwise: file:/a, not file:///a.
    listed = spark.read.format("binaryFile").load(path).select("path", "length").collect()
    sizes = {_plain(row["path"]): row["length"] for row in listed}
    return [(name, sizes.get(_plain(name), 0)) for name in names]


def _plain(path: str) -> str:
    return unquote(re.sub(r"^(\w+):/+", r"\1:/", path))


def _bad(spark: SparkSession, files: Sequence[str]) -> list[tuple[str, int, str]]:
    """Lines that cannot be records, with their numbers."""
    wrong = "trim(value) != '' and (not is_valid_utf8(value) or try_parse_json(value) is null)"
    names = spark.read.text(list(files)).filter(wrong).select("_metadata.file_path").distinct()
    found: list[tuple[str, int, str]] = []
    before = spark.conf.get(_SPLIT)
    spark.conf.set(_SPLIT, str(1 << 60))  # a file is one partition: so its rows are numbered by line
    try:
        for name in sorted(row["file_path"] for row in names.limit(_BAD_SHOWN).collect()):
            lines = spark.read.text(name)
            lines = lines.select((sql.monotonically_increasing_id() + 1).alias("line"), "value")
            text = sql.make_valid_utf8(sql.substring("value", 1, 100))
            some = lines.filter(wrong).select("line", text.alias("text")).limit(_BAD_SHOWN - len(found))
            found += [(name, row["line"], row["text"]) for row in some.collect()]
            if len(found) >= _BAD_SHOWN:
                break
    finally:
        spark.conf.set(_SPLIT, str(before))
    return found
