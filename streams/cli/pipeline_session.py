"""A Spark session for one job of `streams pipeline`, with a bar that shows how far it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

from streams.cli import output
from streams.cli.pipeline_options import Engine
from streams.cli.verbs import Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Between two looks at how far Spark is.
_LOOK_EVERY_S = 0.5


class Server(TypedDict):
    """The server that a job works with, as arguments of the job."""

    url: str
    key: str | None


@contextmanager
def spark_session(title: str, target: Target, engine: Engine) -> Iterator[tuple[SparkSession, Server]]:
    """A session, and the server to work with. A bar shows how many of Spark's tasks are done; there is none
    for a program (`--json`)."""
    from pyspark.sql import SparkSession

    from streams.spark.sessions import session

    at = target.resolved()
    remote = engine.remote
    is_ours = remote is not None or SparkSession.getActiveSession() is None
    spark = session(
        engine.cores,
        master=engine.master,
        remote=remote,
        app=f"streams pipeline {title}",
        config=engine.settings(),
    )
    ended = threading.Event()
    try:
        with output.progress(title, None) if not target.as_json else nullcontext(_untold) as step:
            watcher = threading.Thread(target=_watch, args=(spark, step, ended), daemon=True)
            if remote is None:
                watcher.start()
            try:
                yield spark, {"url": at.url, "key": at.key or None}
            finally:
                ended.set()
                if remote is None:
                    watcher.join()
    finally:
        if is_ours:
            spark.stop()


def _untold(done: int) -> None:
    """Nobody looks."""


def _watch(spark: SparkSession, step: output.Progress, ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    #: By stage. One that is over between two looks is looked at once more: as many as the job has stages.
    done: dict[int, int] = {}
    while not ended.wait(_LOOK_EVERY_S):
        for stage in {*done, *tracker.getActiveStageIds()}:
            info = tracker.getStageInfo(stage)
            if info is not None:
                done[stage] = info.numCompletedTasks
        step(sum(done.values()))


def show_result(result: Any, target: Target) -> None:
    import msgspec

    output.show_facts(msgspec.to_builtins(result), as_json=target.as_json)
