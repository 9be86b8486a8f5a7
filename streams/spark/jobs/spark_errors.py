"""Errors of ours that come back through Spark. An error that was raised in one of Spark's Python processes
arrives as an error of Spark's with a traceback as its text; the caller of a job needs the error itself."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from streams.client.errors import AnswerLost, Unreachable
from streams.protocol.errors import BY_CODE, Refused, StreamsError
from streams.spark.columns import BadRows
from streams.spark.gaps import GapError
from streams.spark.options import BadOption
from streams.spark.sessions import activate
from streams.spark.sink import AlreadyCommitted, PartialCommit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
T = TypeVar("T")

_OURS: dict[str, type[StreamsError]] = {
    kind.__name__: kind
    for kind in (
        *BY_CODE.values(),
        AlreadyCommitted,
        AnswerLost,
        BadOption,
        BadRows,
        GapError,
        PartialCommit,
        Unreachable,
    )
}
#: The last line of a traceback.
_RAISED = re.compile(r"^(?:streams\.[\w.]+\.)(\w+): (.*)$", re.MULTILINE)


def our_error(text: str) -> StreamsError | None:
    """The error in a traceback, if it is one of ours."""
    for name, message in _RAISED.findall(text):
        if name in _OURS:
            return _OURS[name](message)
    return None


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Raises our own error where Spark raises one that has it in its text."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        ours = our_error(str(error)) or _missing_store(str(error))
        if ours is None:
            raise
        raise ours from error


class StoreNotInstalled(Refused):
    """Spark cannot reach this kind of path without another package."""

    code = "store_not_installed"


#: The class that Hadoop looks for -> the package that has it. Spark's own Hadoop version must be appended.
_STORES = {
    "org.apache.hadoop.fs.s3a.S3AFileSystem": "org.apache.hadoop:hadoop-aws",
    "org.apache.hadoop.fs.azurebfs": "org.apache.hadoop:hadoop-azure",
}


def _missing_store(text: str) -> StreamsError | None:
    for name, package in _STORES.items():
        if f"Class {name}" in text and "not found" in text:
            wanted = f"{package}:{hadoop_version()}"
            return StoreNotInstalled(
                f"Spark cannot reach this path: {wanted} is not installed. Use --packages {wanted}, or "
                f"in Python "
                f"session(config={{'spark.jars.packages': '{wanted}'}}); settings such as keys are given "
                f"with --conf"
            )
    return None


def hadoop_version() -> str:
    """Of the Hadoop that this Spark has; a package of another version fails at run time."""
    found = importlib.util.find_spec("pyspark")
    folder = Path(
        os.environ.get("SPARK_HOME") or (Path(found.origin).parent if found and found.origin else ".")
    )
    names = [path.stem for path in (folder / "jars").glob("hadoop-client-api-*.jar")]
    return names[0].removeprefix("hadoop-client-api-") if names else "VERSION_OF_HADOOP"


def spark_job(job: Callable[P, T]) -> Callable[P, T]:
    """Wraps a job, whose first argument is the session: it runs in any thread, and raises our own errors."""

    @wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unwrap_errors():
            activate(cast("SparkSession", args[0] if args else kwargs["spark"]))
            return job(*args, **kwargs)

    return run
