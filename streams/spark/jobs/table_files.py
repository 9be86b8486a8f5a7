"""Data files of a table: written by Spark, read by Spark, and merged when they are small.

PATH/data/RUN/_p=HASH/part-….parquet     HASH: of the values of the partition columns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from streams.spark.jobs.archive_files import new_run_id
from streams.spark.jobs.files import list_files
from streams.spark.jobs.job_context import JobRefused, summary
from streams.spark.jobs.tables.columns import BASE_COLUMNS, Column
from streams.spark.jobs.tables.versions import DataFile, OpenTable, find_version, summary_properties

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Day of a record; to_date would depend on the time zone of the session.
_DAY_OF_TS = "date_from_unix_date(int(floor(unix_millis(ts) / 86400000)))"

#: Smaller files are merged, when a partition has this many of them.
_SMALL_BYTES, _SMALL_FILES = 32 << 20, 8


@contextmanager
def _parquet_times(spark: SparkSession) -> Iterator[None]:
    """Make Spark write times in microseconds. Its default, INT96, is not allowed in open tables."""
    name = "spark.sql.parquet.outputTimestampType"
    default = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, default or "INT96")


def write_run(spark: SparkSession, rows: DataFrame, table: OpenTable, folder: str) -> list[str]:
    """Write rows to Parquet files, each for one combination of partition values, and return their paths.

    The name of a folder is a hash of the values: paths with escaped characters are read differently by
    different engines.
    """
    values = [
        sql.expr(_DAY_OF_TS) if each == "date" and "date" not in rows.columns else sql.col(each)
        for each in table.partition_by
    ]
    partition = sql.hex(sql.xxhash64(*values)) if values else sql.lit("all")
    sorted_rows = rows.withColumn("_p", partition).sortWithinPartitions("_p", "box", "seq")
    with _parquet_times(spark):
        sorted_rows.write.partitionBy("_p").option("compression", "zstd").parquet(folder)
    return [f"{folder}/{file.path}" for file in list_files(spark, folder)]


def count_records(spark: SparkSession, files: Sequence[str]) -> dict[str, int]:
    if not files:
        return {}
    rows = spark.read.schema("box string, seq bigint").parquet(*files).groupBy("box").count().collect()
    return {row["box"]: row["count"] for row in rows}


def read_files(spark: SparkSession, files: Sequence[str], columns: Sequence[Column]) -> DataFrame:
    """Read data files of a table. A column that a file lacks is null: it was added later."""
    schema = ", ".join(
        f"`{name}` {type}"
        for name, type in [*BASE_COLUMNS.items(), *((each.name, each.type) for each in columns)]
    )
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def compact_if_due(spark: SparkSession, table: OpenTable, path: str) -> int:
    """Merge the small files of partitions that have many of them, in one commit. Return how many there were.

    The new snapshot has the same records and the same cursors.
    """
    small: dict[str, list[DataFile]] = {}
    for file in table.files():
        if file.bytes < _SMALL_BYTES:
            small.setdefault(file.path.rpartition("/")[0].rpartition("/")[2], []).append(file)
    old = [file.path for files in small.values() if len(files) >= _SMALL_FILES for file in files]
    if not old:
        return 0
    run = new_run_id()
    rows = read_files(spark, old, table.columns)
    new = write_run(spark, rows.coalesce(1), table, f"{path}/data/{run}")
    before, after = (
        {row["box"]: row for row in summary(each).collect()} for each in (rows, read_files(spark, new, []))
    )
    if before != after:
        raise JobRefused(f"the merged files in {path}/data/{run} differ from the files they replace")
    version = find_version(table, None)
    table.commit(new, summary_properties(run, version.cursors, {}), remove=old)
    return len(old)
