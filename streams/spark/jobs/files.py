"""Lists, moves and deletes files on any store that Spark can reach.

A local session uses Hadoop's file system. A Spark Connect client has no access to it: there a task on the
server uses Arrow's file systems, which support local paths, S3, GCS and HDFS.

Every call is idempotent: it skips files that are already moved or deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.errors import AnalysisException

from streams.protocol.errors import Refused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class FileMissing(Refused):
    """A file that must exist does not."""

    code = "file_missing"


class File(NamedTuple):
    #: Relative to the listed folder.
    path: str
    size: int


def list_files(spark: SparkSession, folder: str) -> list[File]:
    """Return the Parquet files below a folder, at any depth, except in folders named _… or .…"""
    reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    try:
        rows = reader.option("pathGlobFilter", "*.parquet").load(folder).select("path", "length").collect()
    except AnalysisException:  # there is no such folder
        return []
    return sorted(File(relative_path(folder, row["path"]), row["length"]) for row in rows)


def relative_path(folder: str, path: str) -> str:
    """Return the path of a file relative to a folder. The file may have a scheme and a host from Spark."""
    base, inside = (
        re.sub(r"^\w+://[^/]*", "", normalize_path(each)) for each in (folder.rstrip("/") + "/", path)
    )
    assert inside.startswith(base), f"{inside} is not below {base}"
    return inside[len(base) :]


def normalize_path(path: str) -> str:
    """Return a path in one spelling: Hadoop writes file:/a, others write /a or file:///a."""
    return re.sub(r"^file:/*", "/", path)


def move_files(spark: SparkSession, pairs: Sequence[tuple[str, str]]) -> None:
    """Move each file to its new path. Raises `FileMissing` if a file is at neither path."""
    _apply(spark, [("move", source, target) for source, target in pairs])


def delete_folders(spark: SparkSession, folders: Iterable[str]) -> None:
    _apply(spark, [("delete", folder, "") for folder in folders])


def _apply(spark: SparkSession, operations: list[tuple[str, str, str]]) -> None:
    if not operations:
        return
    if hasattr(spark, "_jvm"):
        _apply_with_hadoop(spark, operations)
        return
    frame = spark.createDataFrame(operations, "verb string, source string, target string").coalesce(1)
    frame.mapInArrow(_apply_in_task, "done int").collect()


def _apply_with_hadoop(spark: Any, operations: list[tuple[str, str, str]]) -> None:
    path_of = spark._jvm.org.apache.hadoop.fs.Path
    settings = spark._jsc.hadoopConfiguration()
    store = path_of(operations[0][1]).getFileSystem(settings)
    created_folders: set[str] = set()
    for verb, source, target in operations:
        if verb == "delete":
            store.delete(path_of(source), True)
            continue
        folder = target.rpartition("/")[0]
        if folder not in created_folders:
            store.mkdirs(path_of(folder))
            created_folders.add(folder)
        if store.exists(path_of(target)):
            continue
        try:
            is_moved = store.rename(path_of(source), path_of(target))
        except Exception as error:
            # Hadoop's stores raise different errors here. The move is complete if the target exists.
            if not store.exists(path_of(target)):
                raise FileMissing(f"{source} could not be moved to {target}: {error}") from error
            continue
        if not is_moved and not store.exists(path_of(target)):
            raise FileMissing(f"{source} and {target} do not exist; restore one, then run the job again")


def _apply_in_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyarrow.fs import FileSystem, FileType

    for batch in batches:
        for step in batch.to_pylist():
            store, source = FileSystem.from_uri(_arrow_uri(step["source"]))
            if step["verb"] == "delete":
                if store.get_file_info(source).type != FileType.NotFound:
                    store.delete_dir(source)
                continue
            _, target = FileSystem.from_uri(_arrow_uri(step["target"]))
            store.create_dir(target.rpartition("/")[0])
            if store.get_file_info(target).type != FileType.NotFound:
                continue
            if store.get_file_info(source).type == FileType.NotFound:
                raise FileMissing(f"{source} and {target} do not exist; restore one, then run the job again")
            store.move(source, target)
        yield pa.RecordBatch.from_pydict({"done": pa.array([batch.num_rows], pa.int32())})


def _arrow_uri(path: str) -> str:
    return re.sub(r"^s3[an]://", "s3://", normalize_path(path))
