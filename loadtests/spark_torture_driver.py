"""The Spark driver of `spark_torture.py`: its jobs in one application.

    boxes     in.N ──stream──► copy.N,   files ──backfill──► filled.N ──replay──► replayed.N
    tables    in.N ──archive──► table ──rollup──► sums ──merge──► newest

It reads its plan as JSON from standard input. It touches `ready` when a job has made progress.
When `stop` exists, it writes the remaining rows and ends with exit code 0. Any error ends it with exit code
1; the next driver resumes from checkpoint and ledgers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streams.spark as ss
from loadtests.spark_torture_tables import AGGREGATES, WINDOW_MS
from streams.spark import jobs
from streams.spark.spark_home import spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: Small, so that kills meet many steps.
GROUP_BYTES, STEP_RECORDS = 2 << 20, 20_000
PAUSE_S = 0.5


class Driver:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._url, self._prefix, self._boxes = plan["url"], plan["prefix"], plan["boxes"]
        self._folder = Path(plan["folder"])
        self._jobs = plan["jobs"]
        self._threads: list[threading.Thread] = []
        self._stop, self._ready = Path(plan["stop"]), Path(plan["ready"])
        home = spark_home()
        if home is not None:  # its Python processes start faster
            os.environ["SPARK_HOME"] = str(home)
        self._spark: SparkSession = ss.session(
            master=plan["master"],
            app="torture",
            config={
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.memory": "1g",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.executor.memory": "512m",
                "spark.sql.shuffle.partitions": 2,
                "spark.local.dir": plan["folder"],
            },
        )
        self._spark.sparkContext.setLogLevel("ERROR")

    def run(self) -> None:
        if "tables" in self._jobs:
            self._start(self._tables, lambda: True)
        if "boxes" in self._jobs:
            self._run_boxes()
        for thread in self._threads:
            thread.join()
        self._spark.stop()

    def _run_boxes(self) -> None:
        query = self._query()
        filling = self._start(self._backfill, lambda: True)
        # The source of the replay is complete when the backfill has ended.
        replaying = self._start(self._replay, lambda: not filling.is_alive())
        while filling.is_alive() or replaying.is_alive():
            if not query.isActive:
                raise RuntimeError(f"the streaming query ended: {query.exception()}")
            progress = query.lastProgress
            if progress is not None and progress.numInputRows:
                self._ready.touch()
            time.sleep(PAUSE_S)
        query.stop()
        self._query(availableNow=True).awaitTermination()

    def _tables(self) -> int:
        """Archive the source boxes to a table, roll it up into a box, and merge the box into a table."""
        name, sums = f"{self._prefix}.rows", f"{self._prefix}.sums"
        archive = jobs.archive_table(
            self._spark,
            [],
            str(self._folder / "table"),
            name=name,
            prefix=f"{self._prefix}.in.",
            columns="n bigint, text string",
            url=self._url,
        )
        jobs.rollup_table(
            self._spark,
            name,
            sums,
            name=f"{self._prefix}.sums",
            window=f"{WINDOW_MS} milliseconds",
            aggregates=AGGREGATES,
            by="box",
            url=self._url,
        )
        jobs.archive_table(
            self._spark,
            [sums],
            str(self._folder / "newest"),
            name=f"{self._prefix}.newest",
            columns="rows bigint, total bigint",
            merge=True,
            url=self._url,
        )
        return archive.records

    def _start(self, job: Callable[[], int], is_complete: Callable[[], bool]) -> threading.Thread:
        """Repeat a job in a thread until its source is complete."""

        def repeat() -> None:
            try:
                is_last = False
                while not is_last:
                    is_last = self._stop.exists() and is_complete()
                    if job():
                        self._ready.touch()
                    time.sleep(PAUSE_S)
            except BaseException:
                _fail()

        thread = threading.Thread(target=repeat, name=job.__name__)
        thread.start()
        self._threads.append(thread)
        return thread

    def _query(self, **trigger: Any) -> StreamingQuery:
        source = self._spark.readStream.format("streams").option("url", self._url)
        source = source.option("startingOffsets", "earliest").option("subscribePrefix", f"{self._prefix}.in.")
        rows = source.load().selectExpr(self._box_column("copy"), "data", "tag")
        sink = rows.writeStream.format("streams").option("url", self._url)
        sink = sink.option("checkpointLocation", str(self._folder / "checkpoint"))
        return (sink.trigger(**trigger) if trigger else sink).queryName("torture").start()

    def _backfill(self) -> int:
        box = f"cast(get_json_object(data, '$.n') as bigint) % {self._boxes}"
        result = jobs.backfill(
            self._spark,
            str(self._folder / "files"),
            name=f"{self._prefix}.files",
            box_column=f"concat('{self._prefix}.filled.', {box})",
            group_bytes=GROUP_BYTES,
            url=self._url,
        )
        return result.records

    def _replay(self) -> int:
        result = jobs.replay(
            self._spark,
            name=f"{self._prefix}.again",
            prefix=f"{self._prefix}.filled.",
            transform=lambda rows: rows.selectExpr(self._box_column("replayed"), "data", "tag"),
            step_records=STEP_RECORDS,
            url=self._url,
        )
        return result.records

    def _box_column(self, target: str) -> str:
        return f"concat('{self._prefix}.{target}.', substring_index(box, '.', -1)) as box"


def _fail() -> None:
    """End the process at once, with its threads and its JVM."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    try:
        Driver(json.load(sys.stdin)).run()
    except BaseException:
        _fail()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
