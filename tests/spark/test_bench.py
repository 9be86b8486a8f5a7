"""The rows of Spark in `make bench` are measured: tiny sizes, in the JVM that the tests here share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtests.spark_rows import SPARK_CASES
from loadtests.spark_throughput import DropAll, measure_rows
from streams.testing import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_every_row_of_spark_is_measured(spark: SparkSession, server: Server) -> None:
    spark.dataSource.register(DropAll)
    names = [row.key.removeprefix("spark-") for case in SPARK_CASES for row in case.rows]
    figures = measure_rows(spark, server.url, rows=2_000, repeat=0, only=",".join(names))
    assert list(figures) and set(figures) == set(names) and min(figures.values()) > 0
