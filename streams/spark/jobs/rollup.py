"""Aggregates boxes in time windows into a box, with a streaming query that reads the backlog and ends.

State and cursors are in Spark's checkpoint; each micro-batch is one transaction. A window whose values change
gets a new record with the same tag: a box with `compact: "tag"` retains the newest.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryTerminatedEvent

from streams.spark import offsets
from streams.spark.jobs.job_context import JobContext, JobRefused, box_positions, boxes_with_prefix
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.listeners import QuietListener
from streams.spark.offsets import Cursor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Name of the observation with which Spark counts the rows of each micro-batch.
_OBSERVATION = "sent"
#: Longest wait for the termination event of a query after its end.
_LISTENER_S = 60.0


class Rollup(msgspec.Struct, frozen=True):
    to: str
    #: Records that this run has read, and records that it has written.
    examined: int
    records: int
    batches: int
    is_dry: bool = False


@spark_job
def rollup(
    spark: SparkSession,
    boxes: Sequence[str] = (),
    to: str = "",
    *,
    prefix: str | None = None,
    checkpoint: str,
    window: str,
    aggregates: Mapping[str, str],
    by: str | None = None,
    time: str = "ts",
    late: str | None = None,
    closed_only: bool = False,
    url: str | None = None,
    key: str | None = None,
    max_records: int | None = None,
    on_gap: str = "fail",
    dry_run: bool = False,
) -> Rollup:
    """Aggregate boxes in windows (`5 minutes`, `1 hour`) into box `to`.

    If `to` does not exist, it is created with `compact: "tag"`, which retains the newest record of each
    window. `aggregates` maps names to SQL (`{"orders": "count(*)"}`). `by` is an SQL expression to group by,
    `time` an SQL expression for the time of a record.

    With `late`, records that are later than this are ignored, and the state of older windows is dropped.
    `closed_only` writes a window once, when it has ended, and needs `late`; otherwise every run writes the
    windows that have changed. With `on_gap="skip"` the job continues if records were lost before it read
    them.
    """
    if closed_only and late is None:
        raise JobRefused("closed_only needs late: set how long to wait for late records")
    if not aggregates:
        raise JobRefused("no aggregates; give at least one, for example orders=count(*)")
    context = JobContext(url, key)
    if not to or bool(boxes) == (prefix is not None):
        raise JobRefused("give boxes or a prefix of their names, and the box to write to")
    if dry_run:
        with context.shards() as shards:
            positions = box_positions(shards, boxes or boxes_with_prefix(shards, prefix, besides=to))
        heads = {box: Cursor(state.generation, state.head_seq) for box, state in positions.items()}
        first = {box: Cursor(state.generation, state.earliest_seq - 1) for box, state in positions.items()}
        backlog = offsets.pending_counts(first | _committed_offset(spark, checkpoint), heads)
        return Rollup(to, sum(backlog.values()), 0, 0, is_dry=True)
    with context.client() as client:
        if not client.box(to).exists():
            client.box(to).create(compact="tag")
    reader = spark.readStream.format("streams").options(**context.options())
    reader = reader.option("startingOffsets", "earliest").option("onGap", on_gap)
    if max_records is not None:
        reader = reader.option("maxRecordsPerTrigger", max_records)
    if prefix is not None:
        # The target must not be its own source.
        rows = reader.option("subscribePrefix", prefix).load().filter(sql.col("box") != to)
    else:
        rows = reader.load(",".join(boxes))
    aggregated_rows = aggregate_windows(rows, window, aggregates, by, time, late)
    mode = "append" if closed_only else "update"
    return _run_query(spark, aggregated_rows, context, to, checkpoint=checkpoint, mode=mode)


def _run_query(
    spark: SparkSession, rows: DataFrame, context: JobContext, to: str, *, checkpoint: str, mode: str
) -> Rollup:
    """Run the query until it has read the backlog, and return its totals."""
    rows = rows.observe(_OBSERVATION, sql.count(sql.lit(1)).alias("rows"))
    writer: list[str] = []

    def write(batch_rows: DataFrame, batch: int) -> None:
        # Python sinks do not support the mode "update". A batch write with the query's id and the number of
        # the micro-batch is the transaction that the streaming sink would use. With Spark Connect this runs
        # on the server, in a process that lives as long as the query.
        if not writer:
            writer.append(_query_id(batch_rows.sparkSession, checkpoint))
        context.write(batch_rows, writer=writer[0], epoch=batch, box=to, node="rollup")

    progress = _Progress()
    spark.streams.addListener(progress)
    try:
        query = (
            rows.writeStream.foreachBatch(write)
            .outputMode(mode)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        run = str(query.runId)
        progress.wait_for_end(run)
    finally:
        spark.streams.removeListener(progress)
    return Rollup(to, progress.rows_read[run], progress.rows_written[run], progress.batches[run])


class _Progress(QuietListener):
    """Totals of all micro-batches of each run. Spark's `recentProgress` has the last hundred only."""

    def __init__(self) -> None:
        self.rows_read: Counter[str] = Counter()
        self.rows_written: Counter[str] = Counter()
        self.batches: Counter[str] = Counter()
        self._ended_runs: set[str] = set()
        self._run_ended = threading.Condition()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        run = str(progress.runId)
        if progress.numInputRows:
            self.rows_read[run] += progress.numInputRows
            self.batches[run] += 1
        metrics = progress.observedMetrics.get(_OBSERVATION)
        self.rows_written[run] += metrics["rows"] if metrics is not None else 0

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._run_ended:
            self._ended_runs.add(str(event.runId))
            self._run_ended.notify_all()

    def wait_for_end(self, run: str) -> None:
        """Wait for the termination event, which Spark sends from another thread after the query has ended."""
        with self._run_ended:
            self._run_ended.wait_for(lambda: run in self._ended_runs, timeout=_LISTENER_S)


def _query_id(spark: SparkSession, checkpoint: str) -> str:
    """Return the id of the query, which is stable across restarts from its checkpoint."""
    row = spark.read.text(f"{checkpoint.rstrip('/')}/metadata").first()
    assert row is not None, "Spark writes it before the first micro-batch"
    return str(json.loads(row["value"])["id"])


def _committed_offset(spark: SparkSession, checkpoint: str) -> offsets.Offset:
    """Return the end of the last committed micro-batch, from Spark's checkpoint."""

    def entries(folder: str) -> dict[int, str]:
        try:
            files = spark.read.option("wholetext", "true").text(f"{checkpoint.rstrip('/')}/{folder}")
            rows = files.select(sql.input_file_name().alias("file"), "value").collect()
        except AnalysisException:  # there is none yet
            return {}
        texts = {row["file"].rpartition("/")[2]: row["value"] for row in rows}
        return {int(name): text for name, text in texts.items() if name.isdigit()}

    commits = entries("commits")
    text = entries("offsets").get(max(commits)) if commits else None
    return offsets.from_json(json.loads(text.splitlines()[-1])) if text is not None else {}


def aggregate_windows(
    rows: DataFrame,
    window: str,
    aggregates: Mapping[str, str],
    by: str | None,
    time: str,
    late: str | None = None,
) -> DataFrame:
    """Return a record for each window and key, with the tag `key|start`."""
    timed_rows = rows.withColumn("__time", sql.expr(time).cast("timestamp"))
    if late is not None:
        timed_rows = timed_rows.withWatermark("__time", late)
    keys = [sql.window("__time", window).alias("__window")]
    if by is not None:
        keys.append(sql.expr(by).cast("string").alias("__key"))
    windows = timed_rows.groupBy(*keys).agg(
        *[sql.expr(text).alias(name) for name, text in aggregates.items()]
    )
    start = sql.date_format("__window.start", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    end = sql.date_format("__window.end", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    fields = [start.alias("start"), end.alias("end")]
    tag = start
    if by is not None:
        fields.append(sql.col("__key").alias("key"))
        tag = sql.concat_ws("|", sql.col("__key"), start)
    fields += [sql.col(f"`{name}`") for name in aggregates]
    return windows.select(sql.to_json(sql.struct(*fields)).alias("data"), tag.alias("tag"))
