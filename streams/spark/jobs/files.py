"""Files where Spark keeps them: listed, moved and deleted, on any store that Spark can reach.

With a session of our own it is Hadoop's file system that moves and deletes. A Spark Connect client has no
access to it: there a task on the server does it, with Arrow's file systems, which know local paths, S3, GCS
and HDFS.

Every call may be repeated: a file that was moved or deleted already is passed over.
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
    """A file that should be there is not."""

    code = "file_missing"


class File(NamedTuple):
    #: Below the folder that was listed.
    path: str
    size: int


def list_files(spark: SparkSession, folder: str) -> list[File]:
    """Parquet files below a folder, at any depth. Folders whose names begin with _ or . are left out."""
    reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
    try:
        rows = reader.option("pathGlobFilter", "*.parquet").load(folder).select("path", "length").collect()
    except AnalysisException:  # there is no such folder
        return []
    return sorted(File(below(folder, row["path"]), row["length"]) for row in rows)


def below(folder: str, path: str) -> str:
    """The path of a file as seen from a folder. Spark may add a scheme and a host that the folder was given
    without."""
    base, inside = (re.sub(r"^\w+://[^/]*", "", plain(each)) for each in (folder.rstrip("/") + "/", path))
    assert inside.startswith(base), f"{inside} is not below {base}"
    return inside[len(base) :]


def plain(path: str) -> str:
    """A path as it is compared: Hadoop writes file:/a where others write /a or file:///a."""
    return re.sub(r"^file:/*", "/", path)


def move_files(spark: SparkSession, pairs: Sequence[tuple[str, str]]) -> None:
    """Moves each file to its new path. `FileMissing` when one is at neither of the two."""
    _apply(spark, [("move", source, target) for source, target in pairs])


def delete_folders(spark: SparkSession, folders: Iterable[str]) -> None:
    _apply(spark, [("delete", folder, "") for folder in folders])


def _apply(spark: SparkSession, steps: list[tuple[str, str, str]]) -> None:
    if not steps:
        return
    if hasattr(spark, "_jvm"):
        _apply_here(spark, steps)
        return
    frame = spark.createDataFrame(steps, "verb string, source string, target string").coalesce(1)
    frame.mapInArrow(_apply_in_task, "done int").collect()


def _apply_here(spark: Any, steps: list[tuple[str, str, str]]) -> None:
    path_of = spark._jvm.org.apache.hadoop.fs.Path
    settings = spark._jsc.hadoopConfiguration()
    store = path_of(steps[0][1]).getFileSystem(settings)
    made: set[str] = set()
    for verb, source, target in steps:
        if verb == "delete":
            store.delete(path_of(source), True)
            continue
        folder = target.rpartition("/")[0]
        if folder not in made:
            store.mkdirs(path_of(folder))
            made.add(folder)
        if store.exists(path_of(target)):
            continue
        try:
            is_moved = store.rename(path_of(source), path_of(target))
        except Exception as error:
            # Hadoop's local and remote stores raise different errors here; what counts is where the file is.
            if not store.exists(path_of(target)):
                raise FileMissing(f"{source} could not be moved to {target}: {error}") from error
            continue
        if not is_moved and not store.exists(path_of(target)):
            raise FileMissing(f"{source} is not there, and neither is {target}")


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
                raise FileMissing(f"{source} is not there, and neither is {target}")
            store.move(source, target)
        yield pa.RecordBatch.from_pydict({"done": pa.array([batch.num_rows], pa.int32())})


def _arrow_uri(path: str) -> str:
    return re.sub(r"^s3[an]://", "s3://", plain(path))
