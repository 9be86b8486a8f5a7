"""Paths as Hadoop, Spark and people write them. Needs no JVM."""

from __future__ import annotations

import pytest

from streams.spark.jobs.archive_files import box_folder
from streams.spark.jobs.files import relative_path


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        ("/data/a", "file:/data/a/box=x/f.parquet"),
        ("file:///data/a/", "file:/data/a/box=x/f.parquet"),
        ("s3a://bucket/a", "s3a://bucket/a/box=x/f.parquet"),
        ("hdfs:///data/a", "hdfs://name:8020/data/a/box=x/f.parquet"),
        ("/data/a", "hdfs://name:8020/data/a/box=x/f.parquet"),
    ],
)
def test_a_file_is_found_below_its_folder_however_the_two_are_written(folder: str, path: str) -> None:
    assert relative_path(folder, path) == "box=x/f.parquet"


def test_names_of_boxes_are_escaped_as_spark_does() -> None:
    assert box_folder("orders.7") == "box=orders.7"
    assert box_folder("a/b:c=d") == "box=a%2Fb%3Ac%3Dd"
