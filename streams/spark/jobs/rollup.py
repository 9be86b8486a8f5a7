"""Windows of boxes into a box: a streaming query that takes all there is and ends.

State and cursors are those of Spark's checkpoint; each micro-batch is one transaction. A window that is
counted again gets a new record under the same tag: in a box with `compact: "tag"` the newest is what stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql

from streams.spark import offsets
from streams.spark.jobs.plainly import plainly
from streams.spark.jobs.site import JobRefused, Site, states
from streams.spark.offsets import Place

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
    if not hasattr(spark, "_jsparkSession"):
        raise JobRefused(
            "rollup needs a session of its own (master), not Spark Connect: see docs/howto/spark.md"
        )
    site = Site(url, key)
    if dry_run:
        with site.shards() as shards:
            known = states(shards, boxes)
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
    counted = _counted(reader.load(",".join(boxes)), window, aggregates, by, time, late)
    written: list[int] = []

    def write(rows: DataFrame, batch: int) -> None:
        # The mode "update" is not open to Python sinks. A batch write under the query's id and the number
        # of the micro-batch is the same transaction that the sink itself would make.
        app = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert app is not None, "a micro-batch knows its query"
        written.append(site.write(rows, writer=app, epoch=batch, box=to, node="rollup"))

    query = (
        counted.writeStream.foreachBatch(write)
        .outputMode("append" if closed_only else "update")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    # Spark does not know how many rows such a sink takes.
    examined = [each.numInputRows for each in query.recentProgress if each.numInputRows]
    return Rollup(to, sum(examined), sum(written), len(written))


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
