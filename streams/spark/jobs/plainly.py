"""Errors of ours that come back through Spark. An error that was raised in one of Spark's Python processes
arrives as an error of Spark's with a traceback as its text; the caller of a job needs the error itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from pyspark.errors import PySparkException

from streams.client.errors import AnswerLost, Unreachable
from streams.protocol.errors import BY_CODE, StreamsError
from streams.spark.columns import BadRows
from streams.spark.gaps import GapError
from streams.spark.options import BadOption
from streams.spark.sink import AlreadyCommitted, PartialCommit

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
def unwrapped() -> Iterator[None]:
    """Raises our own error where Spark raises one that has it in its text."""
    try:
        yield
    except PySparkException as error:
        ours = our_error(str(error))
        if ours is None:
            raise
        raise ours from error


def plainly(job: Callable[P, T]) -> Callable[P, T]:
    @wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unwrapped():
            return job(*args, **kwargs)

    return run
