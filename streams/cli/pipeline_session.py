"""A Spark session for one job of `streams pipeline`, with a progress bar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

from streams.cli import output
from streams.cli.pipeline_options import SparkOptions
from streams.cli.verbs import ServerTarget

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Time between two polls of Spark's progress.
_POLL_S = 0.5


class ServerArguments(TypedDict):
    """The server that a job uses, as keyword arguments of the job."""

    url: str
    key: str | None


@contextmanager
def spark_session(
    title: str, target: ServerTarget, engine: SparkOptions
) -> Iterator[tuple[SparkSession, ServerArguments]]:
    """Open a Spark session for the server. A bar shows the number of finished tasks, except with `--json`."""
    from pyspark.sql import SparkSession

    from streams.spark.sessions import session

    server = target.resolve()
    remote = engine.remote
    is_ours = remote is not None or SparkSession.getActiveSession() is None
    spark = session(
        engine.cores,
        master=engine.master,
        remote=remote,
        app=f"streams pipeline {title}",
        config=engine.settings(),
    )
    stop = threading.Event()
    try:
        with output.progress(title, None) if not target.as_json else nullcontext(_ignore_progress) as step:
            watcher = threading.Thread(target=_watch, args=(spark, step, stop), daemon=True)
            if remote is None:
                watcher.start()
            try:
                yield spark, {"url": server.url, "key": server.key or None}
            finally:
                stop.set()
                if remote is None:
                    watcher.join()
    finally:
        if is_ours:
            spark.stop()


def _ignore_progress(count: int) -> None:
    """Show no progress."""


def _watch(spark: SparkSession, step: output.AdvanceProgress, stop: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    #: Finished tasks by stage. Stages stay, so one that ends between two polls is counted. Bounded by the
    #: number of stages of the job.
    tasks_by_stage: dict[int, int] = {}
    while not stop.wait(_POLL_S):
        for stage in {*tasks_by_stage, *tracker.getActiveStageIds()}:
            info = tracker.getStageInfo(stage)
            if info is not None:
                tasks_by_stage[stage] = info.numCompletedTasks
        step(sum(tasks_by_stage.values()))


def show_result(result: Any, target: ServerTarget) -> None:
    import msgspec

    output.show_facts(msgspec.to_builtins(result), as_json=target.as_json)
