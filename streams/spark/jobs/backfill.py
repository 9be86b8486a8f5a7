"""Appends files to boxes: JSON lines, Parquet, CSV or ORC.

Files are read in groups, limited by bytes. Each group is one step (`steps.py`): a stopped backfill resumes
after the last committed group, and regroups the remaining files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as sql

from streams.client._sync.client import Client
from streams.protocol.errors import InvalidRequest
from streams.spark.expressions import prepare
from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.jobs.steps import STEP_BYTES, Steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "backfill."
#: Most bad lines in a result or an error.
_BAD_LINES_MAX = 10
_FORMATS = ("json", "parquet", "csv", "orc")


class Backfill(msgspec.Struct, frozen=True):
    name: str
    files: int
    #: Records that this run has written.
    records: int
    groups: int
    groups_done_before: int
    #: (file, line, text) of lines that are not JSON or not UTF-8. Only a dry run fills it.
    bad: list[tuple[str, int, str]] = []
    is_dry: bool = False
    #: Rows that this run has written as dead letters.
    dead_letters: int = 0


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
    on_bad_row: str = "fail",
    dead_letter_box: str | None = None,
    dry_run: bool = False,
) -> Backfill:
    """Append the rows of the files at `path` to `box`, or to the box that the SQL expression `box_column`
    gives.

    A line of JSON becomes a record byte for byte, and expressions see it as the column `data`. In other
    formats a record is the row as JSON, or the value of the SQL expression `data`. `tag` and `ts` are SQL
    expressions too; a box keeps `ts` only if its `timestamping` accepts the client's.

    With `on_bad_row="deadletter"`, a row that cannot be written becomes a record in `dead_letter_box`
    (default: NAME.dead) with the reason, the file and, for JSON and Parquet, the line or row, in the
    transaction of its group. Otherwise it fails the group.

    A group has at most `files_per_group` files and about `group_bytes` bytes, but at least one file.
    """
    if format not in _FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(_FORMATS)}")
    if (box is None) == (box_column is None):
        raise JobRefused("give either a box, or an expression for it (box_column), not both")
    if on_bad_row not in ("fail", "deadletter"):
        raise JobRefused(f"on_bad_row {on_bad_row}: must be fail or deadletter")
    context = JobContext(url, key)
    writer = f"job:backfill:{name}"
    dead_box = (dead_letter_box or f"{name}.dead") if on_bad_row == "deadletter" else None
    columns = {
        "data": data or ("data" if format == "json" else None),
        "box": box_column,
        "tag": tag,
        "ts": ts,
    }
    source = _Source(spark, format, options or {}, columns, has_source=dead_box is not None)
    with context.client() as client, context.shards() as shards:
        steps = Steps(Ledger(client, LEDGER + name), shards, writer, is_dry=dry_run)
        groups_planned, before = len(steps.fixed_plans), len(steps.completed_plans)
        planned_files = {file for plan in steps.fixed_plans for file in plan["files"]}
        new_files = [each for each in _list_files(spark, path, format) if each[0] not in planned_files]
        groups = _group_files(new_files, files_per_group, group_bytes)
        if dry_run:
            return _dry_run(
                source, name, [file for file, _ in new_files], groups_planned + len(groups), before
            )
        target: dict[str, Any] = {"box": box} if box is not None else {}
        if dead_box is not None:
            target |= {"onBadRow": "deadletter", "deadLetterBox": dead_box}
        write = partial(context.write, writer=writer, node=node, **target)
        dead_before = _head(client, dead_box)
        records, files_done = _write_groups(source, steps, groups, write)
        dead_letters = _head(client, dead_box) - dead_before
        groups_done = len(steps.completed_plans)
    return Backfill(name, files_done, records - dead_letters, groups_done, before, dead_letters=dead_letters)


def _write_groups(
    source: _Source, steps: Steps, groups: Sequence[list[str]], write: Callable[..., int]
) -> tuple[int, int]:
    """Write all groups, and return the numbers of rows and files."""
    rows = files = 0
    for plan in _plans(steps, groups):
        rows += _write_group(source, steps, plan, write)
        files += len(plan["files"])
    return rows, files


def _head(client: Client, box: str | None) -> int:
    return client.box(box).position().head_seq if box is not None and client.box(box).exists() else 0


def _dry_run(source: _Source, name: str, files: list[str], groups: int, groups_done: int) -> Backfill:
    records = source.rows(files).count() if files else 0
    return Backfill(name, len(files), records, groups, groups_done, source.bad_lines(files), is_dry=True)


@dataclass(frozen=True)
class _Source:
    """Reads files as rows with the columns of the sink."""

    spark: SparkSession
    format: str
    options: Mapping[str, str]
    #: SQL expressions of the columns data, box, tag and ts.
    columns: Mapping[str, str | None]
    #: Add the column `source`, with file and line.
    has_source: bool = False

    def rows(self, files: list[str]) -> DataFrame:
        if not self.has_source:
            return prepare(_read(self.spark, files, self.format, self.options), **self.columns)
        if self.format == "json":
            lines = _numbered_lines(self.spark, files).filter("trim(value) != ''")
            rows = lines.withColumnRenamed("value", "data")
            origin = sql.struct("file", "line")
        else:
            rows = _read(self.spark, files, self.format, self.options)
            fields = [sql.col("_metadata.file_path").alias("file")]
            if self.format == "parquet":
                fields.append((sql.col("_metadata.row_index") + 1).alias("line"))
            origin = sql.struct(*fields)
        return prepare(rows, **self.columns, source=sql.to_json(origin))

    def bad_lines(self, files: Sequence[str]) -> list[tuple[str, int, str]]:
        return _find_bad_lines(self.spark, files) if files and self.format == "json" else []


def _plans(steps: Steps, groups: Sequence[list[str]]) -> Iterator[dict[str, Any]]:
    """Yield the unfinished plan, then a new plan for each group, made when the one before is done."""
    if steps.unfinished_plan is not None:
        yield steps.unfinished_plan
    for files in groups:
        yield steps.plan({"files": files})


def _write_group(source: _Source, steps: Steps, plan: dict[str, Any], write: Callable[..., int]) -> int:
    """Write one group and return how many records. `JobRefused` names lines that are not JSON."""
    try:
        return steps.run(plan, partial(write, source.rows(plan["files"])))
    except InvalidRequest as error:
        bad = source.bad_lines(plan["files"])
        if not bad:
            raise
        examples = "; ".join(f"{file}, line {line}: {text!r}" for file, line, text in bad)
        raise JobRefused(
            f"some lines are not JSON in UTF-8 ({examples}). No record of this group of files was written. "
            f"Repair the lines and run the job again; a dry run lists the bad lines of all files"
        ) from error


def _group_files(files: Sequence[tuple[str, int]], files_max: int, bytes_max: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for file, size in sorted(files):
        if not groups or size > room or len(groups[-1]) >= files_max:
            groups.append([])
            room = bytes_max
        groups[-1].append(file)
        room -= size
    return groups


def _read(spark: SparkSession, files: list[str], format: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.options(**options)
    if format == "json":
        lines = reader.text(files)
        return lines.filter("trim(value) != ''").select(sql.col("value").alias("data"))
    if format == "csv":
        reader = reader.option("header", options.get("header", "true"))
    return reader.format(format).load(files)


def _list_files(spark: SparkSession, path: str, format: str) -> list[tuple[str, int]]:
    """Return the files at `path` with their sizes."""
    names = spark.read.format("text" if format in ("json", "csv") else format).load(path).inputFiles()
    if not names:
        raise JobRefused(f"there is no file at {path}")
    # Reads no contents. Spells paths as file:/a, not file:///a.
    rows = spark.read.format("binaryFile").load(path).select("path", "length").collect()
    sizes = {_normalize_path(row["path"]): row["length"] for row in rows}
    return [(name, sizes.get(_normalize_path(name), 0)) for name in names]


def _normalize_path(path: str) -> str:
    return unquote(re.sub(r"^(\w+):/+", r"\1:/", path))


def _numbered_lines(spark: SparkSession, files: Sequence[str]) -> DataFrame:
    """Return the lines of files with the columns file, line (from 1) and value.

    Spark reads a large file in blocks, and several small files in one task. So the lines of each block are
    counted first. In a task, the ids of lines increase in the order of the file.
    """
    lines = spark.read.text(list(files)).select(
        sql.col("_metadata.file_path").alias("file"),
        sql.col("_metadata.file_block_start").alias("block"),
        sql.monotonically_increasing_id().alias("id"),
        "value",
    )
    blocks = lines.groupBy("file", "block").agg(
        sql.count("*").alias("lines"), sql.min("id").alias("first_id")
    )
    lines_before = sql.sum("lines").over(Window.partitionBy("file").orderBy("block")) - sql.col("lines")
    offset = (lines_before - sql.col("first_id") + 1).alias("offset")
    offsets = blocks.select("file", "block", offset)
    lines = lines.join(sql.broadcast(offsets), ["file", "block"])
    return lines.select("file", (sql.col("id") + sql.col("offset")).alias("line"), "value")


def _find_bad_lines(spark: SparkSession, files: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return (file, line number, text) of lines that cannot be records."""
    wrong = "trim(value) != '' and (not is_valid_utf8(value) or try_parse_json(value) is null)"
    text = sql.make_valid_utf8(sql.substring("value", 1, 100)).alias("text")
    lines = _numbered_lines(spark, files).filter(wrong).select("file", "line", text)
    first_lines = lines.orderBy("file", "line").limit(_BAD_LINES_MAX).collect()
    return [(row["file"], row["line"], row["text"]) for row in first_lines]
