"""Converts errors that come back through Spark to the original streams errors.

An error raised in one of Spark's Python processes arrives as an error of Spark with a traceback as its text.
The caller of a job needs the original error.
"""

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

_ERRORS_BY_NAME: dict[str, type[StreamsError]] = {
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
_TRACEBACK_END = re.compile(r"^(?:streams\.[\w.]+\.)(\w+): (.*)$", re.MULTILINE)


def parse_error(text: str) -> StreamsError | None:
    """Return the streams error in a traceback, or None."""
    for name, message in _TRACEBACK_END.findall(text):
        if name in _ERRORS_BY_NAME:
            return _ERRORS_BY_NAME[name](message)
    return None


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Raise the original streams error if an error of Spark has it in its text."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        ours = parse_error(str(error)) or _missing_store_error(str(error))
        if ours is None:
            raise
        raise ours from error


class StoreNotInstalled(Refused):
    """Spark needs another package to reach this kind of path."""

    code = "store_not_installed"


#: Class that Hadoop looks for -> package that has it, without the version, which must be Spark's Hadoop
#: version.
_STORES = {
    "org.apache.hadoop.fs.s3a.S3AFileSystem": "org.apache.hadoop:hadoop-aws",
    "org.apache.hadoop.fs.azurebfs": "org.apache.hadoop:hadoop-azure",
}


def _missing_store_error(text: str) -> StreamsError | None:
    for name, package in _STORES.items():
        if f"Class {name}" in text and "not found" in text:
            coordinates = f"{package}:{hadoop_version()}"
            return StoreNotInstalled(
                f"Spark cannot reach this path: {coordinates} is not installed. "
                f"Add --packages {coordinates}, or in Python "
                f"session(config={{'spark.jars.packages': '{coordinates}'}}). "
                f"Pass settings such as keys with --conf"
            )
    return None


def hadoop_version() -> str:
    """Return the version of Spark's Hadoop. A package of another version fails at run time."""
    spec = importlib.util.find_spec("pyspark")
    folder = Path(os.environ.get("SPARK_HOME") or (Path(spec.origin).parent if spec and spec.origin else "."))
    names = [path.stem for path in (folder / "jars").glob("hadoop-client-api-*.jar")]
    return names[0].removeprefix("hadoop-client-api-") if names else "VERSION_OF_HADOOP"


def spark_job(job: Callable[P, T]) -> Callable[P, T]:
    """Decorate a job whose first argument is the session: it runs in any thread and raises streams errors."""

    @wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unwrap_errors():
            activate(cast("SparkSession", args[0] if args else kwargs["spark"]))
            return job(*args, **kwargs)

    return run
