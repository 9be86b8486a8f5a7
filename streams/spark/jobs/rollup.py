"""Windows of boxes into a box: a streaming query that takes all there is and ends.

State and cursors are those of Spark's checkpoint; each micro-batch is one transaction. A window that is
counted again gets a new record under the same tag: in a box with `compact: "tag"` the newest is what stays.
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
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Under this name Spark counts the rows that each micro-batch has written.
_SENT = "sent"
#: How long the last report about a query may take after its end.
_LISTENER_S = 60.0


class Rollup(msgspec.Struct, frozen=True):
    to: str
    #: Records read and records written by this run.
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
    """Counts `boxes` in windows (`5 minutes`, `1 hour`) into box `to`, which is made to keep the newest
    record of each window. `aggregates` are names and SQL (`{"orders": "count(*)"}`), `by` an SQL expression
    to count separately by, `time` one for the time that counts.

    With `late`, windows older than that are given up and their state is forgotten. `closed_only` writes a
    window once, when it is over, and needs `late`; otherwise every run writes what has changed. With
    `on_gap="skip"` it goes on when records were lost before they were counted.
    """
    if closed_only and late is None:
        raise JobRefused("closed_only needs late: when is a window over?")
    if not aggregates:
        raise JobRefused("no aggregate is given; for example orders=count(*)")
    site = JobContext(url, key)
    if not to or bool(boxes) == (prefix is not None):
        raise JobRefused("give boxes or a prefix of their names, and the box to write to")
    if dry_run:
        with site.shards() as shards:
            known = box_positions(shards, boxes or boxes_with_prefix(shards, prefix, besides=to))
        heads = {box: Place(state.generation, state.head_seq) for box, state in known.items()}
        first = {box: Place(state.generation, state.earliest_seq - 1) for box, state in known.items()}
        waiting = offsets.pending(first | _reached(spark, checkpoint), heads)
        return Rollup(to, sum(waiting.values()), 0, 0, is_dry=True)
    with site.client() as client:
        if not client.box(to).exists():
            client.box(to).create(compact="tag")
    reader = spark.readStream.format("streams").options(**site.options())
    reader = reader.option("startingOffsets", "earliest").option("onGap", on_gap)
    if max_records is not None:
        reader = reader.option("maxRecordsPerTrigger", max_records)
    if prefix is not None:
        # A box must not be counted into itself.
        rows = reader.option("subscribePrefix", prefix).load().filter(sql.col("box") != to)
    else:
        rows = reader.load(",".join(boxes))
    counted = _counted(rows, window, aggregates, by, time, late)
    mode = "append" if closed_only else "update"
    return _run(spark, counted, site, to, checkpoint=checkpoint, mode=mode)


def _run(
    spark: SparkSession, counted: DataFrame, site: JobContext, to: str, *, checkpoint: str, mode: str
) -> Rollup:
    """Runs the query until it has taken all there is, and adds up what it has done."""
    counted = counted.observe(_SENT, sql.count(sql.lit(1)).alias("rows"))
    writer: list[str] = []

    def write(batch_rows: DataFrame, batch: int) -> None:
        # Python sinks cannot have the mode "update". A batch write under the id of the query and the number
        # of the micro-batch is the transaction that the sink itself would make. With Spark Connect this runs
        # on the server, in a process that lives as long as the query.
        if not writer:
            writer.append(_query_id(batch_rows.sparkSession, checkpoint))
        site.write(batch_rows, writer=writer[0], epoch=batch, box=to, node="rollup")

    progress = _Progress()
    spark.streams.addListener(progress)
    try:
        query = (
            counted.writeStream.foreachBatch(write)
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
    return Rollup(to, progress.examined[run], progress.sent[run], progress.batches[run])


class _Progress(QuietListener):
    """Adds up all micro-batches of each run of a query. `recentProgress` has the last hundred only."""

    def __init__(self) -> None:
        self.examined: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.batches: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        run = str(progress.runId)
        if progress.numInputRows:
            self.examined[run] += progress.numInputRows
            self.batches[run] += 1
        seen = progress.observedMetrics.get(_SENT)
        self.sent[run] += seen["rows"] if seen is not None else 0

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def wait_for_end(self, run: str) -> None:
        """Spark calls a listener from a thread of its own, after the query has ended."""
        with self._changed:
            self._changed.wait_for(lambda: run in self._ended, timeout=_LISTENER_S)


def _query_id(spark: SparkSession, checkpoint: str) -> str:
    """The id of the query, which stays the same when it goes on from its checkpoint."""
    row = spark.read.text(f"{checkpoint.rstrip('/')}/metadata").first()
    assert row is not None, "Spark writes it before the first micro-batch"
    return str(json.loads(row["value"])["id"])


def _reached(spark: SparkSession, checkpoint: str) -> offsets.Offset:
    """How far the last micro-batch came that was committed, as Spark's checkpoint says."""

    def entries(folder: str) -> dict[int, str]:
        try:
            files = spark.read.option("wholetext", "true").text(f"{checkpoint.rstrip('/')}/{folder}")
            found = files.select(sql.input_file_name().alias("file"), "value").collect()
        except AnalysisException:  # there is none yet
            return {}
        named = {row["file"].rpartition("/")[2]: row["value"] for row in found}
        return {int(name): text for name, text in named.items() if name.isdigit()}

    done = entries("commits")
    text = entries("offsets").get(max(done)) if done else None
    return offsets.load(json.loads(text.splitlines()[-1])) if text is not None else {}


def _counted(
    rows: DataFrame, window: str, aggregates: Mapping[str, str], by: str | None, time: str, late: str | None
) -> DataFrame:
    timed = rows.withColumn("__time", sql.expr(time).cast("timestamp"))
    if late is not None:
        timed = timed.withWatermark("__time", late)
    keys = [sql.window("__time", window).alias("__window")]
    if by is not None:
        keys.append(sql.expr(by).cast("string").alias("__key"))
    counted = timed.groupBy(*keys).agg(*[sql.expr(text).alias(name) for name, text in aggregates.items()])
    start = sql.date_format("__window.start", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    end = sql.date_format("__window.end", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    fields = [start.alias("start"), end.alias("end")]
    tag = start
    if by is not None:
        fields.append(sql.col("__key").alias("key"))
        tag = sql.concat_ws("|", sql.col("__key"), start)
    fields += [sql.col(f"`{name}`") for name in aggregates]
    return counted.select(sql.to_json(sql.struct(*fields)).alias("data"), tag.alias("tag"))
