"""Windows of boxes into a box: a streaming query that takes all there is and ends.

State and cursors are those of Spark's checkpoint; each micro-batch is one transaction. A window that is
counted again gets a new record under the same tag: in a box with `compact: "tag"` the newest is what stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as sql

from streams.spark.jobs.plainly import plainly
from streams.spark.jobs.site import JobRefused, Site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Rollup(msgspec.Struct, frozen=True):
    to: str
    #: Records read and records written by this run.
    examined: int
    records: int
    batches: int
    is_dry: bool = False


@plainly
def rollup(
    spark: SparkSession,
    boxes: Sequence[str],
    to: str,
    *,
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
    dry_run: bool = False,
) -> Rollup:
    """Counts `boxes` in windows (`5 minutes`, `1 hour`) into box `to`, which is made to keep the newest
    record of each window. `aggregates` are names and SQL (`{"orders": "count(*)"}`), `by` an SQL expression
    to count separately by, `time` one for the time that counts.

    With `late`, windows older than that are given up and their state is forgotten. `closed_only` writes a
    window once, when it is over, and needs `late`; otherwise every run writes what has changed.
    """
    if closed_only and late is None:
        raise JobRefused("closed_only needs late: when is a window over?")
    if not aggregates:
        raise JobRefused("no aggregate is given; for example orders=count(*)")
    if not hasattr(spark, "_jsparkSession"):
        raise JobRefused(
            "rollup needs a session of its own (master), not Spark Connect: see docs/howto/spark.md"
        )
    site = Site(url, key)
    if dry_run:
        with site.shards() as shards:
            waiting = sum(state.count for state in shards.states(boxes=list(boxes)))
        return Rollup(to, waiting, 0, 0, is_dry=True)
    with site.client() as client:
        if not client.box(to).exists():
            client.box(to).create(compact="tag")
    reader = spark.readStream.format("streams").options(**site.options())
    reader = reader.option("startingOffsets", "earliest")
    if max_records is not None:
        reader = reader.option("maxRecordsPerTrigger", max_records)
    counted = _counted(reader.load(",".join(boxes)), window, aggregates, by, time, late)
    options = site.options() | {"box": to, "node": "rollup"}

    def write(rows: DataFrame, batch: int) -> None:
        # The mode "update" is not open to Python sinks. A batch write under the query's id and the number
        # of the micro-batch is the same transaction that the sink itself would make.
        app = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert app is not None, "a micro-batch knows its query"
        sink = rows.write.format("streams").options(**options)
        sink.option("txnAppId", app).option("txnVersion", str(batch)).mode("append").save()

    query = (
        counted.writeStream.foreachBatch(write)
        .outputMode("append" if closed_only else "update")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [each for each in query.recentProgress if each.numInputRows or each.sink.numOutputRows > 0]
    return Rollup(
        to,
        sum(each.numInputRows for each in progress),
        sum(max(0, each.sink.numOutputRows) for each in progress),
        len(progress),
    )


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
