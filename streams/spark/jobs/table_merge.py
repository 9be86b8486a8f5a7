"""Merges new records into a table that has the newest record of each tag.

    new records ─► newest of each box and tag ─► files that have these tags are written again without them
                                              └► new files

A record whose data is `null` deletes its tag. One commit removes the old files and adds the new ones, so
readers see all changes of a run or none. A merge reads the columns box and tag of all files of the changed
boxes, and rewrites the files that it changes: its time depends on the size of the table, not only on the
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sql

from streams.spark.jobs.job_context import JobRefused
from streams.spark.jobs.table_files import read_files, write_run
from streams.spark.jobs.tables.columns import Column
from streams.spark.jobs.tables.versions import OpenTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KEY = ["box", "tag"]


class MergedFiles(NamedTuple):
    new_files: list[str]
    old_files: list[str]
    #: Box -> tags that were written or deleted.
    counts: dict[str, int]


def newest_rows(rows: DataFrame) -> DataFrame:
    """Return the newest row of each box and tag."""
    newest = rows.groupBy(*_KEY).agg(sql.max_by(sql.struct(*rows.columns), "seq").alias("_row"))
    return newest.select("_row.*")


def merge_rows(rows: DataFrame, newest: DataFrame) -> DataFrame:
    """Return rows with the newest rows in the place of those with the same box and tag."""
    kept_rows = rows.join(newest.select(*_KEY), _KEY, "left_anti").select(*rows.columns)
    return kept_rows.unionByName(newest.filter("data != 'null'"))


def write_merge(
    spark: SparkSession,
    rows: DataFrame,
    table: OpenTable,
    columns: Sequence[Column],
    boxes: Sequence[str],
    folder: str,
) -> MergedFiles:
    """Write the files that a merge adds, and return them with the files that they replace."""
    newest = newest_rows(rows).persist()
    try:
        if newest.filter("tag is null").limit(1).count():
            raise JobRefused(
                "some records have no tag, and a merged table keeps the newest record of each tag; every "
                "record needs its key as tag"
            )
        counts = {row["box"]: row["count"] for row in newest.groupBy("box").count().collect()}
        old_files = _files_with_keys(spark, table, boxes, newest)
        merged_rows = merge_rows(read_files(spark, old_files, columns), newest)
        return MergedFiles(write_run(spark, merged_rows, table, folder), old_files, counts)
    finally:
        newest.unpersist()


def _files_with_keys(
    spark: SparkSession, table: OpenTable, boxes: Sequence[str], newest: DataFrame
) -> list[str]:
    """Return the files of the table that have rows with the same box and tag."""
    paths = {_short_path(file.path): file.path for file in table.files(boxes=boxes)}
    if not paths:
        return []
    rows = read_files(spark, list(paths.values()), []).select(
        *_KEY, sql.col("_metadata.file_path").alias("_file")
    )
    files = rows.join(newest.select(*_KEY), _KEY, "left_semi").select("_file").distinct().collect()
    return sorted(paths[_short_path(row["_file"])] for row in files)


def _short_path(path: str) -> str:
    """Return RUN/_p=HASH/FILE: engines spell the folder before it differently."""
    return "/".join(path.split("/")[-3:])
