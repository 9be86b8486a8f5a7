"""Measures Spark's writes to boxes and reads from them: `python -m loadtests.spark_throughput`.

The same run measures the job with a sink that drops everything and a source of generated rows, which shows
how much of the cost is Spark's. Server, JVM and Python workers share the cores of this machine. Rows have 128
bytes of data, a tag and a node, and go to 64 boxes. The first run warms up, because the first use of a source
starts half a dozen interpreters; the figure is the best of the others. Jobs alternate, so that other load
affects all of them. After each job it waits until the server has rendered the rows of the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

import streams.spark as ss
from loadtests import machine
from streams.direct import Shards
from streams.testing import running_server

BOXES = 64
#: The first row number: all numbers have ten digits.
FIRST_NUMBER = 1_000_000_000
#: Aims in rows a second, on an idle machine.
AIMS = {"write-txn": 800_000, "read": 1_200_000}

_SCHEMA = "box string, seq bigint, ts timestamp, data string, tag string, node string, meta string"


class DropAll(DataSource):
    """A sink that drops its Arrow batches, and a source of one repeated batch."""

    @classmethod
    def name(cls) -> str:
        return "drop_all"

    def schema(self) -> str:
        return _SCHEMA

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return _DroppingWriter()

    def reader(self, schema: Any) -> DataSourceReader:
        return _GeneratedReader(int(self.options["rows"]), int(self.options["cut"]))


class _DroppingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[Any]) -> None:
        pass

    def abort(self, messages: list[Any]) -> None:
        pass


class _GeneratedReader(DataSourceReader):
    def __init__(self, rows: int, cut: int) -> None:
        self._rows, self._cut = rows, cut

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._rows // self._cut) for _ in range(self._cut)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        size = 10_000
        columns = [
            pa.repeat("box.1", size),
            pa.array(np.arange(size)),
            pa.array(np.full(size, 1_700_000_000_000_000)).cast(pa.timestamp("us", tz="UTC")),
            pa.repeat('{"text":"' + "x" * 117 + '"}', size),
            pa.repeat("user-1", size),
            pa.repeat("spark", size),
            pa.nulls(size, pa.utf8()),
        ]
        names = ["box", "seq", "ts", "data", "tag", "node", "meta"]
        batch = pa.RecordBatch.from_arrays(columns, names=names)
        for start in range(0, partition.value, size):
            yield batch.slice(0, min(size, partition.value - start))


def make_rows(
    spark: SparkSession, rows: int, prefix: str, *, with_meta: bool = False, partitions: int = 4
) -> DataFrame:
    frame = spark.range(0, rows, 1, partitions).select(
        sql.concat(sql.lit(prefix), sql.col("id") % BOXES).alias("box"),
        sql.concat(
            sql.lit('{"n":'), sql.col("id") + FIRST_NUMBER, sql.lit(',"text":"' + "x" * 101 + '"}')
        ).alias("data"),
        sql.concat(sql.lit("user-"), sql.col("id") % 1000).alias("tag"),
        sql.lit("spark").alias("node"),
    )
    return frame.withColumn("meta", sql.lit('{"k":1}')) if with_meta else frame


def measure(
    rows: int, repeat: int, runs: dict[str, Callable[[], None]], settle: Callable[[], None]
) -> dict[str, float]:
    """Return rows a second of each job: the best run after the warm-up. With `repeat` 0, the warm-up.

    `settle` waits until the server has finished the work that a job left behind, so that the next job does
    not pay for it.
    """
    times_s: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat + 1):
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            times_s[name].append(time.perf_counter() - began_s)
            settle()
    return {name: rows / min(times[1:] or times) for name, times in times_s.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3, help="0: once, cold; the figures mean nothing")
    parser.add_argument("--only", metavar="ROW,ROW", help="only these rows")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args(argv)
    if arguments.repeat == 0:
        # Too short for the second compiler.
        os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    with (
        tempfile.TemporaryDirectory(prefix="spark-bench-") as folder,
        running_server(**machine.USER_SETTINGS) as server,
    ):
        spark = ss.session(arguments.cores, config={"spark.local.dir": folder, "spark.driver.memory": "2g"})
        spark.dataSource.register(DropAll)
        figures = measure_rows(spark, server.url, arguments.rows, arguments.repeat, arguments.only)
        spark.stop()
    print(f"{'row':24}{'rows/s':>12}{'aim':>12}   of the empty one")
    for key, figure in figures.items():
        aim = f"{AIMS[key]:>12,}" if key in AIMS else f"{'–':>12}"
        empty = figures.get(f"{key.split('-')[0]}-empty")
        print(f"{key:24}{figure:>12,.0f}{aim}   {f'{figure / empty:.0%}' if empty else '–'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": arguments.rows, "figures": figures, "aims": AIMS}))
    return 0


def measure_rows(
    spark: SparkSession, url: str, rows: int, repeat: int, only: str | None = None
) -> dict[str, float]:
    def write(format: str, *, with_meta: bool = False, **options: str) -> Callable[[], None]:
        def run() -> None:
            frame = make_rows(spark, rows, f"bench.{uuid.uuid4().hex[:8]}.", with_meta=with_meta)
            frame.write.format(format).options(**options).mode("append").save()

        return run

    def read(format: str, **options: str) -> Callable[[], None]:
        def run() -> None:
            spark.read.format(format).options(**options).load().write.format("noop").mode("append").save()

        return run

    runs = {
        "write-nothing": write("noop"),
        "write-empty": write("drop_all"),
        "write-txn": write("streams", url=url),
        "write-txn-meta": write("streams", with_meta=True, url=url),
        "write-append": write("streams", url=url, delivery="append"),
        "read-empty": read("drop_all", rows=str(rows), cut="4"),
        "read": read("streams", url=url, subscribePrefix="bench.read."),
    }

    def settle() -> None:
        """Wait until the rows of all commits are rendered: only then can the last record be read."""
        with Shards(url) as shards:
            for each in shards.states(prefix="bench."):
                shards.scan_page(each.box, from_seq=max(0, each.head_seq - 1))

    if only is not None:
        runs = {name: runs[name] for name in only.split(",")}
    if "read" in runs:
        make_rows(spark, rows, "bench.read.").write.format("streams").option("url", url).mode("append").save()
        settle()
    return measure(rows, repeat, runs, settle)


if __name__ == "__main__":
    raise SystemExit(main())
