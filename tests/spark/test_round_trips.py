"""Rows through Spark into boxes and back are exact, whatever fails on the way.

Method: a real Spark and a real server of four shards. Failures are injected where they hurt: a task dies
after it has sent its rows, the process that commits is killed between two shards, a shard is killed by the
very task that writes to it. Every row carries its number, so what is missing or doubled is counted, not
estimated.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition

import streams
import streams.spark as ss
from streams.client._sync.box import Group
from streams.client.answers import Entry, Record
from streams.direct import ScanPage, Shards
from streams.protocol.model.slots import slot_of
from streams.spark import checkpoints, reads, sink
from streams.spark.columns import COLUMNS
from streams.spark.gaps import GapError
from streams.spark.lag import Lag
from streams.spark.offsets import Cursor, SeqRange, to_json
from streams.spark.options import BATCH, WRITE, parse_read_options, parse_write_options
from streams.spark.source import BatchReader
from streams.testing import Server, running_server
from tests.spark.numbered import BOXES, Misdeed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 100_000


def rows(spark: SparkSession, name: str, count: int = ROWS, **options: object) -> DataFrame:
    """Numbered rows for boxes `NAME.0` and on."""
    reader = spark.read.format("numbered").option("prefix", name).option("count", count)
    return reader.options(**{key: str(value) for key, value in options.items()}).load()


def save(frame: DataFrame, server: Server, **options: object) -> None:
    writer = frame.write.format("streams").option("url", server.url)
    for key, value in options.items():
        writer = writer.option(key, str(value))
    writer.mode("append").save()


def load(spark: SparkSession, server: Server, **options: object) -> DataFrame:
    reader = spark.read.format("streams").option("url", server.url)
    for key, value in options.items():
        reader = reader.option(key, str(value))
    return reader.load()


def numbers(frame: DataFrame) -> tuple[int, int, int, int]:
    """Of rows that are numbered: how many, how many different ones, the first and the last number."""
    number = sql.get_json_object("data", "$.n").cast("bigint")
    row = frame.agg(sql.count(number), sql.count_distinct(number), sql.min(number), sql.max(number)).first()
    assert row is not None
    return row[0], row[1], row[2], row[3]


def exactly(count: int) -> tuple[int, int, int, int]:
    return count, count, 0, count - 1


# -- without failures


def test_a_hundred_thousand_rows_over_four_shards_come_back_as_they_were_written(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    written = rows(spark, name)
    save(written, server)
    placement = client.placement()
    owners = {
        next(shard for a, b, shard in placement.slots if a <= slot_of(f"{name}.{n}") < b)
        for n in range(BOXES)
    }
    assert owners == {0, 1, 2, 3}
    found = load(spark, server, subscribePrefix=f"{name}.", minPartitions=4).cache()
    fields = ["box", "data", "tag", "node", "meta"]
    assert found.count() == ROWS
    assert found.select(*fields).exceptAll(written.select(*fields)).count() == 0
    # Seqs of a box have no hole, and stand in the order of the rows: tasks in the order of their partitions.
    number = sql.get_json_object("data", "$.n").cast("bigint")
    order = found.withColumn("place", sql.floor(number / BOXES) + 1)
    assert order.filter("place != seq").count() == 0
    found.unpersist()


def test_a_stream_takes_what_is_new_under_its_limit_and_goes_on_from_its_checkpoint(
    spark: SparkSession, server: Server, name: str, tmp_path: Path
) -> None:
    def run() -> list[int]:
        source = spark.readStream.format("streams").option("url", server.url)
        source = source.option("startingOffsets", "earliest").option("maxRecordsPerTrigger", 15_000)
        copied = source.option("subscribePrefix", f"{name}.").load().select("data", "tag", "meta")
        query = (
            copied.writeStream.format("streams")
            .option("url", server.url)
            .option("box", f"{name}:copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [each.numInputRows for each in query.recentProgress if each.numInputRows]

    save(rows(spark, name, 40_000), server)
    assert run() == [15_000, 15_000, 10_000]
    assert numbers(load(spark, server, path=f"{name}:copy")) == exactly(40_000)
    assert run() == [], "there was nothing new"
    # A driver that dies after our commit leaves its batch without an entry; it is run again under its number.
    commits = tmp_path / "checkpoint" / "commits"
    for entry in (commits / "2", commits / ".2.crc"):
        entry.unlink(missing_ok=True)
    run()
    assert numbers(load(spark, server, path=f"{name}:copy")) == exactly(40_000)
    save(rows(spark, name, 10, first=40_000), server)
    assert run() == [10]
    assert numbers(load(spark, server, path=f"{name}:copy")) == exactly(40_010)


def test_another_session_finds_the_format_by_itself_and_sql_can_use_it(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch([Entry({"n": n}, tag="a" if n % 2 else None) for n in range(10)])
    other = spark.newSession()
    other.sql(f"CREATE TEMPORARY VIEW it USING streams OPTIONS (url '{server.url}', subscribe '{name}')")
    assert other.sql("SELECT count(*), sum(seq), count(tag) FROM it").first()[:] == (10, 55, 5)  # type: ignore[index]
    # Spark does not pass the options of a table on: it would be a table of whatever listens on port 4000.
    with pytest.raises(PySparkException, match="Spark loses the options of a table"):
        other.sql(f"CREATE TABLE t USING streams OPTIONS (url '{server.url}', subscribe '{name}')")


def test_a_schema_says_which_columns_are_read(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch([Entry(n, tag=f"t{n}", node=f"n{n % 2}") for n in range(4)])
    reader = spark.read.format("streams").option("url", server.url).schema("tag string, seq bigint")
    assert [tuple(row) for row in reader.load(name).collect()] == [("t0", 1), ("t1", 2), ("t2", 3), ("t3", 4)]
    assert [row.seq for row in reader.option("node", "n0").load(name).collect()] == [2, 4]
    assert [row.seq for row in reader.option("match", "t3").option("node", "x").load(name).collect()] == [4]
    with pytest.raises(PySparkException, match="there is no column colour"):
        spark.read.format("streams").option("url", server.url).schema("colour string").load(name).collect()


def test_offsets_times_and_filters_narrow_what_is_read(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    for box in ("a", "b"):
        client.box(f"{name}.{box}").create(timestamping={"mode": "client-require", "uncapped": True})
        client.box(f"{name}.{box}").append_batch([Entry(n, ts=1000 * n) for n in range(1, 11)])

    def found(**options: object) -> list[tuple[str, int]]:
        frame = load(spark, server, **({"subscribePrefix": f"{name}."} | options))
        return sorted((row.box[-1], row.seq) for row in frame.select("box", "seq").collect())

    only_a = {"subscribe": f"{name}.a", "subscribePrefix": ""}
    assert found(**only_a, startingOffsets=f'{{"{name}.a": 7}}') == [("a", 8), ("a", 9), ("a", 10)]
    assert found(**only_a, startingOffsets=f'{{"{name}.a": 2}}', endingOffsets=f'{{"{name}.a": 3}}') == [
        ("a", 3)
    ]
    assert found(startingTimestamp="9000", endingTimestamp="10000") == [("a", 9), ("b", 9)]
    assert found(startingOffsets="latest") == []
    pushed = load(spark, server, subscribePrefix=f"{name}.", pushdown="true")
    pushed = pushed.filter((sql.col("box") == f"{name}.b") & (sql.col("seq") > 4) & (sql.col("seq") <= 6))
    assert sorted(row.seq for row in pushed.collect()) == [5, 6]
    timed = load(spark, server, subscribePrefix=f"{name}.", pushdown="true")
    timed = timed.filter("ts >= timestamp_millis(9500) and box != 'x'")
    assert sorted((row.box[-1], row.seq) for row in timed.collect()) == [("a", 10), ("b", 10)]


def test_slot_and_shard_are_those_of_the_server(
    spark: SparkSession, server: Server, client: streams.Client
) -> None:
    names = [f"box.{n}é" for n in range(50)]
    frame = spark.createDataFrame([(each,) for each in names], "box string")
    placement = client.placement()
    for row in frame.select(
        "box", ss.slot("box").alias("slot"), ss.shard("box", placement).alias("shard")
    ).collect():
        assert row.slot == slot_of(row.box)
        assert any(a <= row.slot < b and row.shard == shard for a, b, shard in placement.slots)


def test_what_cannot_be_written_is_said_before_anything_is(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    good = spark.createDataFrame([("1", 5)], "data string, n int")
    with pytest.raises(PySparkException, match="column n: is not written"):
        save(good, server, box=name)
    with pytest.raises(PySparkException, match="there is no column box"):
        save(good.select("data"), server)
    with pytest.raises(PySparkException, match="use to_json"):
        save(good.select(sql.struct("n").alias("data")), server, box=name)
    with pytest.raises(PySparkException, match="did you mean txnVersion"):
        save(good.select("data"), server, box=name, txnVersio=1)
    with pytest.raises(PySparkException, match="a box is a log"):
        good.select("data").write.format("streams").mode("overwrite").save(name)
    assert not client.box(name).exists()
    save(ss.prepare(good, tag="n", meta="map('k', n)"), server, box=name)
    (record,) = client.box(name).read()
    assert (record.data, record.tag, record.meta) == ({"data": "1", "n": 5}, "5", {"k": 5})  # type: ignore[union-attr]


# -- with failures


def test_a_task_that_dies_after_sending_its_rows_doubles_nothing(
    spark: SparkSession, server: Server, name: str
) -> None:
    save(rows(spark, name, doing="raise"), server)
    assert numbers(load(spark, server, subscribePrefix=f"{name}.")) == exactly(ROWS)


def test_a_job_that_fails_leaves_nothing_to_see_and_its_rerun_cut_otherwise_is_whole(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    with pytest.raises(PySparkException, match="injected"):
        save(rows(spark, name, doing="always raise"), server, txnAppId=name, txnVersion=1)
    assert [each.box for each in client.boxes(name) if each.count] == []
    save(rows(spark, name, cut=2), server, txnAppId=name, txnVersion=1)
    assert numbers(load(spark, server, subscribePrefix=f"{name}.")) == exactly(ROWS)
    save(rows(spark, name, cut=5), server, txnAppId=name, txnVersion=1)
    assert numbers(load(spark, server, subscribePrefix=f"{name}.")) == exactly(ROWS)


class KilledBetweenShards(DataSource):
    """Our sink, whose driver is killed after two shards of four have committed."""

    @classmethod
    def name(cls) -> str:
        return "streams_killed_between_shards"

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return _KilledWriter(parse_write_options(self.options, WRITE))


class _KilledWriter(sink.BatchWriter):
    def commit(self, messages: list[Any]) -> None:
        real, all_there = reads.Shards.txn_commit, threading.Barrier(4)

        def commit_two(shards: Any, shard: int, *args: Any, dry: bool, **more: Any) -> Any:
            answer = real(shards, shard, *args, dry=dry, **more) if dry or shard < 2 else None
            if not dry:
                all_there.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        reads.Shards.txn_commit = commit_two  # type: ignore[method-assign]
        super().commit(messages)

    def abort(self, messages: list[Any]) -> None:
        """The dead do not clean up."""


def test_a_query_with_output_mode_update_writes_each_micro_batch_once(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    rows = spark.readStream.format("streams").options(url=server.url, startingOffsets="earliest").load(name)
    counts = rows.groupBy("tag").count().select("tag", sql.to_json(sql.struct("count")).alias("data"))
    write = ss.batch_writer(server.url, f"{name}.counts")
    batches: list[int] = []

    def write_twice(batch_rows: DataFrame, batch: int) -> None:
        batches.append(batch)
        write(batch_rows, batch)
        write(batch_rows, batch)  # as after a crash between the write and Spark's own commit

    for tags in ("aab", "ac"):
        client.box(name).append_batch([Entry(1, tag=tag) for tag in tags])
        query = counts.writeStream.outputMode("update").foreachBatch(write_twice)
        query = query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
        query.start().awaitTermination()
    found = [
        (each.tag, each.data["count"])
        for each in client.box(f"{name}.counts").read()
        if isinstance(each, Record)
    ]
    assert sorted(found) == [("a", 2), ("a", 3), ("b", 1), ("c", 1)] and len(batches) == 2
    refused = counts.writeStream.outputMode("update").format("streams").options(url=server.url, box=name)
    with pytest.raises(Exception, match=r"(?i)update"):
        refused.option("checkpointLocation", str(tmp_path / "2")).start().awaitTermination()


def test_a_driver_killed_between_two_shards_is_finished_by_its_rerun(
    spark: SparkSession, server: Server, name: str
) -> None:
    spark.dataSource.register(KilledBetweenShards)
    killed = rows(spark, name).write.format(KilledBetweenShards.name()).option("url", server.url)
    with pytest.raises(Py4JJavaError, match="crashed"):
        killed.option("txnAppId", name).option("txnVersion", "7").mode("append").save()
    count, different, _, _ = numbers(load(spark, server, subscribePrefix=f"{name}."))
    assert 0 < count < ROWS and count == different, "atomic in each shard, not across them"
    save(rows(spark, name, cut=5), server, txnAppId=name, txnVersion=7)
    assert numbers(load(spark, server, subscribePrefix=f"{name}.")) == exactly(ROWS)


class KillingReader(ss.StreamsDataSource):
    """Our source, whose tasks kill a shard after their first batch. (Its number comes in an option that "
    "is free.)"""

    @classmethod
    def name(cls) -> str:
        return "streams_killing"

    def reader(self, schema: Any) -> DataSourceReader:
        return _KillingReader(parse_read_options(self.options, BATCH), pa.schema([("data", pa.utf8())]))

    def schema(self) -> str:
        return "data string"


class _KillingReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        misdeed = Misdeed("kill a shard", int((self._options.gap_box or "").removeprefix("pid.")))
        is_it = partition.value.ranges[0].after == 0 and partition.value.ranges[0].box.endswith(".0")
        for batch in super().read(partition):
            yield batch
            misdeed.after_a_batch(1 if is_it else 0)


def test_a_shard_killed_in_the_middle_of_writing_and_of_reading_costs_nothing(
    spark: SparkSession, server: Server, name: str
) -> None:
    save(rows(spark, name, doing="kill a shard", argument=server.shard_pids()[1]), server)
    assert numbers(load(spark, server, subscribePrefix=f"{name}.")) == exactly(ROWS)
    spark.dataSource.register(KillingReader)
    killing = spark.read.format(KillingReader.name()).option("url", server.url)
    killing = killing.option("minPartitions", "4").option("scanBytes", "65536")
    killing = killing.option("gapBox", f"pid.{server.shard_pids()[2]}")
    assert numbers(killing.option("subscribePrefix", f"{name}.").load()) == exactly(ROWS)


def test_a_query_that_has_met_a_limit_goes_on_with_a_smaller_trigger(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The end of the batch is in Spark's offset log, so a restart alone would fail in the same way."""
    checkpoint = str(tmp_path / "checkpoint")

    def run(url: str, limit: int) -> list[int]:
        source = spark.readStream.format("streams").option("url", url).option("maxRecordsPerTrigger", limit)
        source = source.option("startingOffsets", "earliest").load("source")
        sink = source.select("data").writeStream.format("streams").option("url", url).option("box", "target")
        query = sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        return [each.numInputRows for each in query.recentProgress if each.numInputRows]

    with running_server(shards=1, txn_bytes="64KiB") as small, streams.Client(small.url) as client:
        client.box("source").append_batch([{"n": n, "text": "x" * 100} for n in range(1000)])
        client.box("target").create(durability="memory")  # its rows must fit into the memory of one commit
        for limit in (1000, 400):
            with pytest.raises(PySparkException, match="BatchTooLarge"):
                run(small.url, limit)
        assert ss.recut(checkpoint, 400, url=small.url) == checkpoints.Recut(0, 1000, 400)
        assert run(small.url, 400) == [400, 400, 200]
        copied = [item.data["n"] for item in client.box("target").read() if isinstance(item, Record)]
        assert copied == [*range(1000)]
        with pytest.raises(checkpoints.NotRecut, match="no micro-batch that is planned but not committed"):
            ss.recut(checkpoint, 400, url=small.url)
        # A driver that died after a part of its commit: the batch must be finished as it is.
        (tmp_path / "checkpoint" / "commits" / "2").unlink()
        with pytest.raises(checkpoints.NotRecut, match="shard 0 has committed micro-batch 2"):
            ss.recut(checkpoint, 10, url=small.url)


# -- loss


@pytest.fixture
def capped(client: streams.Client, name: str) -> str:
    """A box that had 30 records and keeps 10: 1 to 20 are lost."""
    client.box(name).create(cap_records=10)
    for first in range(0, 30, 10):
        client.box(name).append_batch([{"n": n} for n in range(first, first + 10)])
    return name


def test_lost_records_fail_the_read_with_their_exact_range_unless_it_is_told_otherwise(
    spark: SparkSession, server: Server, client: streams.Client, capped: str
) -> None:
    start = f'{{"{capped}": 4}}'
    with pytest.raises(PySparkException, match=rf"{capped} has lost records 5 to 20 \(cap"):
        load(spark, server, path=capped, startingOffsets=start).collect()
    told = load(
        spark, server, path=capped, startingOffsets=start, onGap="emit", gapBox=f"{capped}:gaps"
    ).collect()
    (gap,) = [row for row in told if row.gap is not None]
    assert (gap.box, gap.seq, gap.data) == (capped, 20, None)
    assert (gap.gap["from"], gap.gap["to"], gap.gap["reason"]) == (5, 20, "cap")
    assert sorted(row.seq for row in told if row.gap is None) == list(range(21, 31))
    (noted,) = client.box(f"{capped}:gaps").read()
    assert noted.data["gap_to"] == 20  # type: ignore[union-attr]
    skipped = load(spark, server, path=capped, startingOffsets=start, failOnDataLoss="false")
    assert sorted(row.seq for row in skipped.collect()) == list(range(21, 31))
    assert load(spark, server, path=capped).count() == 10, "earliest is never a gap"


def test_a_stream_whose_records_are_lost_between_two_runs_fails_and_can_go_on(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    box = client.box(name)
    box.create(cap_records=10)

    def run(**options: str) -> None:
        source = spark.readStream.format("streams").option("url", server.url).options(**options)
        query = (
            source.option("startingOffsets", "earliest")
            .load(name)
            .select("data")
            .writeStream.format("streams")
            .option("url", server.url)
            .option("box", f"{name}:copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    box.append_batch([{"n": n} for n in range(5)])
    run()
    box.append_batch([{"n": n} for n in range(5, 12)])
    box.append_batch([{"n": n} for n in range(12, 20)])
    with pytest.raises(PySparkException, match=rf"{name} has lost records 6 to 10 \(cap"):
        run()
    run(failOnDataLoss="false")
    found = [item.data["n"] for item in client.box(f"{name}:copy").read()]  # type: ignore[union-attr]
    assert found == [*range(5), *range(10, 20)]
    box.drop()
    box.append_batch([{"n": n} for n in range(100, 125)][:10])
    with pytest.raises(PySparkException, match="recreated"):
        run()


def test_records_that_go_while_a_task_is_on_its_way_are_told_by_the_task(
    server: Server, client: streams.Client, capped: str
) -> None:
    """No Spark: the plan was made when record 15 was there, and the task comes later."""
    gen = client.box(capped).state().generation
    schema = pa.schema([(each, COLUMNS[each]) for each in ("seq", "gap")])

    def pulled(wanted: SeqRange, **options: str) -> list[dict[str, Any]]:
        asked = parse_read_options({"url": server.url, "path": capped, **options}, BATCH)
        batches = reads.read_task(asked, reads.ReadTask([wanted]), schema)
        return [row for batch in batches for row in batch.to_pylist()]

    with pytest.raises(GapError, match="has lost records 15 to 20"):
        pulled(SeqRange(capped, gen, 14, 30))
    told = pulled(SeqRange(capped, gen, 14, 25), onGap="emit")
    assert [row["seq"] for row in told] == [20, 21, 22, 23, 24, 25]
    assert told[0]["gap"]["from"] == 15 and told[1]["gap"] is None
    assert [row["gap"]["to"] for row in pulled(SeqRange(capped, gen, 14, 18), onGap="emit")] == [18]
    anew = pulled(SeqRange(capped, gen + 1, 3, 9), onGap="emit")
    assert [(row["gap"]["from"], row["gap"]["to"], row["gap"]["reason"]) for row in anew] == [
        (4, 9, "recreated")
    ]
    client.box(capped).drop()
    with pytest.raises(streams.Refused, match=capped):
        pulled(SeqRange(capped, gen, 20, 30))
    assert pulled(SeqRange(capped, gen, 20, 30), missingBoxes="ignore") == []


class _Fading:
    """Shards as they are, of which a box has gone, or lost records, after the first page of a scan."""

    def __init__(self, url: str, then: Callable[[], object]) -> None:
        self._shards, self._then, self._pages = Shards(url), then, 0

    def __enter__(self) -> _Fading:
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.close()

    def scan_page(self, box: str, **asked: Any) -> ScanPage:
        self._pages += 1
        if self._pages == 2:
            self._then()
        return self._shards.scan_page(box, **(asked | {"max_bytes": 1}))


def test_rows_that_were_read_before_a_box_went_or_lost_some_are_given_and_a_gap_stands_at_its_place(
    server: Server, client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Spark: a task that is at work while the box changes."""
    box = client.box(name)
    box.create(cap_records=10)
    for n in range(10):
        box.append({"n": n})
    schema = pa.schema([(each, COLUMNS[each]) for each in ("seq", "gap")])
    wanted = SeqRange(name, box.state().generation, 0, 12)

    def pulled(then: Callable[[], object]) -> list[tuple[int, bool]]:
        asked = parse_read_options(
            {"url": server.url, "path": name, "onGap": "emit", "missingBoxes": "wait"}, BATCH
        )
        monkeypatch.setattr(reads, "open_shards", lambda _: _Fading(server.url, then))
        batches = reads.read_task(asked, reads.ReadTask([wanted]), schema)
        return [(row["seq"], row["gap"] is not None) for batch in batches for row in batch.to_pylist()]

    def grow() -> None:
        for n in range(10, 15):
            box.append({"n": n})

    assert pulled(grow) == [(1, False), (5, True), *[(seq, False) for seq in range(6, 13)]]
    wanted = SeqRange(name, wanted.gen, 5, 15)
    assert pulled(box.drop) == [(6, False)]


# -- streams of the S2 API


def test_a_stream_is_read_by_its_qualified_name(spark: SparkSession, server: Server) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        http.put("/v1/basins/spark-basin", json={"config": {"create_stream_on_append": True}})
        records = [{"body": f"body {n}", "headers": [["n", str(n)]]} for n in range(50)]
        answer = http.post(
            "/v1/streams/orders%2F1/records", json={"records": records}, headers={"s2-basin": "spark-basin"}
        )
        assert answer.status_code == 200, answer.text
    frame = spark.read.format("streams").option("url", server.url).load("spark-basin/orders/1")
    body = sql.unbase64(sql.get_json_object("data", "$")).cast("string")
    assert [(row[0], row[1]) for row in frame.select("seq", body).orderBy("seq").collect()] == [
        (n + 1, f"body {n}") for n in range(50)
    ]
    assert frame.where("seq = 3").select("meta").collect()[0][0] == '{"headers":[["bg==","Mg=="]]}'


# -- how far a query is


def test_boxes_without_news_are_not_reported_again(
    server: Server, client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {}
    for n in range(20):
        client.box(f"{name}.{n}").append_batch([1, 2, 3])
        places[f"{name}.{n}"] = Cursor(client.box(f"{name}.{n}").state().generation, 3)
    lag = Lag(server.url, "g")
    commits: list[str] = []
    real: Any = Group.commit
    monkeypatch.setattr(
        Group, "commit", lambda self, *args: (commits.append(self._box.name), real(self, *args))
    )
    latest = json.dumps(to_json(places))
    behind = {**places, f"{name}.0": Cursor(places[f"{name}.0"].gen, 1)}
    lag._report_source(json.dumps(to_json(behind)), latest)
    assert sorted(commits) == sorted(places) and lag.records_behind[f"{name}.0"] == 2
    assert 0 < lag.seconds_behind[f"{name}.0"] < 600 and lag.seconds_behind[f"{name}.1"] == 0
    commits.clear()
    lag._report_source(latest, latest)
    assert commits == [f"{name}.0"]
    assert client.box(f"{name}.7").group("g").state().cursor == 3


class Following(Lag):
    """Stores its report after each micro-batch."""

    seen: list[tuple[dict[str, int], dict[str, float]]]

    def onQueryProgress(self, event: Any) -> None:
        super().onQueryProgress(event)
        self.seen = [*getattr(self, "seen", []), (dict(self.records_behind), dict(self.seconds_behind))]


def test_a_query_is_a_consumer_like_any_other(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    client.box(name).create(timestamping={"mode": "client-require", "uncapped": True})
    client.box(name).append_batch([Entry({"n": n}, ts=1000) for n in range(30)])
    lag = ss.follow_lag(spark, url=server.url, group="billing", query="the-bill")
    own = Following(server.url, None)
    spark.streams.addListener(own)
    try:
        source = spark.readStream.format("streams").option("url", server.url).option("group", "auditors")
        source = source.option("startingOffsets", "earliest").option("maxRecordsPerTrigger", "20")
        query = (
            source.load(name)
            .writeStream.format("noop")
            .queryName("the-bill")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(240_000)
    finally:
        spark.streams.removeListener(lag)
        spark.streams.removeListener(own)
    for group in ("billing", "auditors"):
        assert client.box(name).group(group).state().cursor == 30
    assert lag.records_behind == {name: 0} and lag.seconds_behind == {name: 0.0}
    # After its first micro-batch it had ten records before it, which were as old as 1970 is.
    assert own.seen[0][0] == {name: 10} and own.seen[0][1][name] > 1_000_000_000
    assert own.seen[-1] == ({name: 0}, {name: 0.0})
