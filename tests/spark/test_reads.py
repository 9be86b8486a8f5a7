"""Where a read begins and ends, what a micro-batch takes, which boxes there are: every option that decides
it, against a real server and without a JVM. These are the objects that Spark calls, called as it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual, StringStartsWith
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

import streams
from streams.client.answers import Entry
from streams.protocol.errors import BoxNotFound
from streams.spark import offsets
from streams.spark.options import BadOption
from streams.spark.source import BatchReader, StreamReader, StreamsDataSource
from streams.testing import Server

SCHEMA = StructType().add("box", "string").add("seq", "long").add("tag", "string").add("meta", "string")


def source(server: Server, **options: object) -> StreamsDataSource:
    return StreamsDataSource({name: str(value) for name, value in ({"url": server.url} | options).items()})


def stream(server: Server, **options: object) -> StreamReader:
    reader = source(server, **options).streamReader(SCHEMA)
    assert isinstance(reader, StreamReader)
    return reader


def batch(server: Server, **options: object) -> BatchReader:
    reader = source(server, **options).reader(SCHEMA)
    assert isinstance(reader, BatchReader)
    return reader


def rows(reader: BatchReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def seqs(reader: BatchReader) -> list[int]:
    return sorted(row["seq"] for row in rows(reader))


def push_filters(reader: BatchReader, *filters: Filter) -> tuple[list[Filter], list[int]]:
    """Return the filters that remain for Spark, and the seqs read."""
    remaining = list(reader.pushFilters(list(filters)))
    return remaining, seqs(reader)


@pytest.fixture
def timed(client: streams.Client, name: str) -> str:
    """Records 1 to 10 at the seconds 1 to 10."""
    client.box(name).create(timestamping={"mode": "client-require", "uncapped": True})
    client.box(name).append_batch(
        [Entry(n, ts=1000 * n, tag=f"t{n % 3}", meta={"n": n}) for n in range(1, 11)]
    )
    return name


# -- where


def test_a_time_that_no_record_has_reached_is_an_error_or_the_end(server: Server, timed: str) -> None:
    assert seqs(batch(server, path=timed, startingTimestamp=8500)) == [9, 10]
    assert seqs(batch(server, path=timed, startingTimestamp="1970-01-01T00:00:10Z")) == [10]
    assert seqs(batch(server, path=timed, startingOffsetsByTimestamp=f'{{"{timed}": 10000}}')) == [10]
    for option in ({"startingTimestamp": 10_001}, {"startingOffsetsByTimestamp": f'{{"{timed}": 10001}}'}):
        with pytest.raises(BadOption, match=f"{timed} has no record at or after this time"):
            batch(server, path=timed, **option).partitions()
        told = {**option, "startingOffsetsByTimestampStrategy": "latest"}
        assert seqs(batch(server, path=timed, **told)) == []
        assert stream(server, path=timed, **told).initialOffset()[timed]["seq"] == 10


def test_seqs_that_are_not_there_yet_and_boxes_that_are_not_read_are_refused(
    server: Server, timed: str
) -> None:
    def refused(**options: str) -> str:
        with pytest.raises(BadOption) as error:
            batch(server, path=timed, **options).partitions()
        return error.value.message

    assert "has no record 11 yet; its last is 10" in refused(startingOffsets=f'{{"{timed}": 11}}')
    assert "has no record 12 yet" in refused(endingOffsets=f'{{"{timed}": 12}}')
    assert "other is not a box of this read" in refused(startingOffsets='{"other": 1}')
    assert "other is not a box of this read" in refused(endingOffsets='{"other": 1}')
    both = f'{{"{timed}": -2}}', f'{{"{timed}": -1}}'
    assert seqs(batch(server, path=timed, startingOffsets=both[0], endingOffsets=both[1])) == [*range(1, 11)]
    assert seqs(batch(server, path=timed, startingOffsets=both[1])) == []


def test_a_query_that_goes_on_from_its_checkpoint_says_that_the_starting_option_is_not_used(
    server: Server, timed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = stream(server, path=timed, startingOffsets="earliest")
    start = fresh.initialOffset()
    end = fresh.latestOffset(start, ReadAllAvailable())
    assert end[timed]["seq"] == 10 and capfd.readouterr().err == ""
    fresh.stop()
    resumed = stream(server, path=timed, startingOffsets="earliest")
    assert resumed.latestOffset(end, ReadAllAvailable()) == end
    assert "startingOffsets is ignored: the query resumes from its checkpoint" in capfd.readouterr().err
    resumed.latestOffset(end, ReadAllAvailable())
    stream(server, path=timed).latestOffset(end, ReadAllAvailable())
    assert capfd.readouterr().err == "", "once, and only where an option was given"


def test_the_first_micro_batch_of_a_query_that_begins_at_the_end_is_the_same_after_a_restart(
    server: Server, client: streams.Client, name: str
) -> None:
    """Spark keeps the ends of micro-batches only. A driver that dies in the first one must not begin at what
    is the end by then: what lies between would be lost without a word."""
    client.box(name).append_batch([1, 2])
    first = stream(server, path=name, startingOffsets="latest")
    start = first.initialOffset()
    client.box(name).append_batch([3, 4, 5])
    end = json.loads(json.dumps(first.latestOffset(start, ReadAllAvailable())))
    client.box(name).append_batch([6])
    again = stream(server, path=name, startingOffsets="latest")
    tasks = [each.value for each in again.partitions(again.initialOffset(), end)]
    assert [(each.after, each.to) for task in tasks for each in task.ranges] == [(2, 5)]
    later = again.latestOffset(end, ReadAllAvailable())
    tasks = [each.value for each in again.partitions(end, later)]
    assert [(each.after, each.to) for task in tasks for each in task.ranges] == [(5, 6)]
    assert again.latestOffset(later, ReadAllAvailable()) == later


# -- which boxes


def test_a_box_that_is_not_there_fails_or_is_waited_for_or_done_without(
    server: Server, client: streams.Client, name: str
) -> None:
    client.box(f"{name}.a").append_batch([1, 2])
    both = f"{name}.a,{name}.b"
    with pytest.raises(BoxNotFound, match=f"there is no box {name}.b"):
        batch(server, path=both).partitions()
    assert seqs(batch(server, path=both, missingBoxes="ignore")) == [1, 2]
    waiting = stream(server, path=both, missingBoxes="wait")
    start = waiting.initialOffset()
    assert set(start) == {f"{name}.a"}
    client.box(f"{name}.b").append_batch([1, 2, 3])
    end = waiting.latestOffset(start, ReadAllAvailable())
    assert offsets.pending_counts(offsets.from_json(start), offsets.from_json(end)) == {f"{name}.b": 3}, (
        "from its beginning"
    )
    client.box(f"{name}.a").drop()
    assert waiting.latestOffset(end, ReadAllAvailable()) == end, "one that has gone keeps its place"


def test_too_many_boxes_are_refused_and_a_pattern_takes_those_that_come_later(
    server: Server, client: streams.Client, name: str
) -> None:
    for each in "ab":
        client.box(f"{name}.{each}").append(1)
    with pytest.raises(BadOption, match="maxBoxes: this read has 2 boxes and the limit is 1"):
        batch(server, subscribePrefix=f"{name}.", maxBoxes=1).partitions()
    query = stream(server, subscribePattern=f"{name}\\.[ac]")
    start = query.initialOffset()
    client.box(f"{name}.c").append(1)
    end = offsets.from_json(query.latestOffset(start, ReadAllAvailable()))
    assert set(end) == {f"{name}.a", f"{name}.c"}


# -- how much


def test_a_micro_batch_waits_until_it_is_worth_it_or_has_waited_long_enough(
    server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch([1, 2])

    def taken(**options: object) -> int:
        query = stream(server, path=name, startingOffsets="earliest", **options)
        return int(query.latestOffset(query.initialOffset(), ReadAllAvailable())[name]["seq"])

    assert taken(minOffsetsPerTrigger=2) == 2
    assert taken(minOffsetsPerTrigger=3) == 0, "for as long as maxTriggerDelay says"
    assert taken(minOffsetsPerTrigger=3, maxTriggerDelay="0ms") == 2
    at_once = stream(server, path=name, startingOffsets="earliest", minOffsetsPerTrigger=3)
    start = at_once.initialOffset()
    at_once.prepareForTriggerAvailableNow()
    assert at_once.latestOffset(start, ReadAllAvailable())[name]["seq"] == 2, "under AvailableNow it is void"


def test_records_and_bytes_of_a_micro_batch_are_limited_each_and_both(
    server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch(["x" * 100] * 100)

    def taken(**options: object) -> int:
        query = stream(server, path=name, startingOffsets="earliest", **options)
        return int(query.latestOffset(query.initialOffset(), query.getDefaultReadLimit())[name]["seq"])

    assert isinstance(stream(server, path=name, maxBytesPerTrigger=0).getDefaultReadLimit(), ReadAllAvailable)
    by_default = stream(server, path=name).getDefaultReadLimit()
    assert isinstance(by_default, ReadMaxBytes) and by_default.max_bytes == 64 << 20
    assert isinstance(stream(server, path=name, maxBytesPerTrigger=1).getDefaultReadLimit(), ReadMaxBytes)
    both = stream(server, path=name, maxBytesPerTrigger=1, maxRecordsPerTrigger=7)
    assert isinstance(both.getDefaultReadLimit(), ReadMaxRows)
    assert taken() == 100 and taken(maxOffsetsPerTrigger=7) == 7
    assert 5 <= taken(maxBytesPerTrigger=2000) <= 20 and taken(maxBytesPerTrigger=1) == 1
    assert taken(maxRecordsPerTrigger=90, maxBytesPerTrigger=1) == 1, "the smaller one counts"
    everything = stream(server, path=name, startingOffsets="earliest", maxRecordsPerTrigger=7)
    assert everything.latestOffset(everything.initialOffset(), ReadAllAvailable())[name]["seq"] == 100


def test_an_available_now_run_goes_up_to_where_the_boxes_were_when_it_began(
    server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch([1, 2])
    query = stream(server, path=name, startingOffsets="earliest", group="billing")
    start = query.initialOffset()
    query.prepareForTriggerAvailableNow()
    client.box(name).append_batch([3])
    assert query.latestOffset(start, ReadAllAvailable())[name]["seq"] == 2
    told = query.reportLatestOffset()
    assert (told[name]["seq"], told[offsets.GROUP]) == (3, "billing")
    assert offsets.GROUP not in stream(server, path=name).reportLatestOffset()


def test_long_ranges_are_cut_and_at_least_so_many_partitions_are_made(
    server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append_batch([0] * 100)
    assert len(batch(server, path=name).partitions()) == 1
    cut = batch(server, path=name, maxRecordsPerPartition=30)
    assert len(cut.partitions()) == 4 and seqs(cut) == [*range(1, 101)]
    cut = batch(server, path=name, minPartitions=5)
    assert len(cut.partitions()) == 5 and seqs(cut) == [*range(1, 101)]


# -- what


def test_meta_is_left_off_when_it_is_not_wanted(server: Server, timed: str) -> None:
    assert rows(batch(server, path=timed))[0]["meta"] == '{"n":1}'
    assert {row["meta"] for row in rows(batch(server, path=timed, includeMeta="false"))} == {None}


def test_filters_that_can_be_are_done_here_and_the_rest_is_left_to_spark(server: Server, timed: str) -> None:
    def reader(**options: str) -> BatchReader:
        return batch(server, path=timed, pushdown="true", **options)

    assert push_filters(reader(), EqualTo(("tag",), "t1")) == ([], [1, 4, 7, 10])
    assert push_filters(reader(), StringStartsWith(("tag",), "t"), GreaterThan(("seq",), 8)) == ([], [9, 10])
    two = EqualTo(("tag",), "t1"), StringStartsWith(("tag",), "t")
    assert push_filters(reader(), *two) == ([two[1]], [1, 4, 7, 10])
    assert push_filters(reader(match="t1"), two[0]) == ([two[0]], [1, 4, 7, 10])
    assert push_filters(reader(), In(("box",), ("x", timed)), LessThanOrEqual(("seq",), 2)) == ([], [1, 2])
    assert push_filters(reader(), EqualTo(("box",), "x")) == ([], [])
    assert push_filters(reader(), EqualTo(("node",), "x"))[0] == [EqualTo(("node",), "x")]
    assert not hasattr(batch(server, path=timed), "_boxes"), "the reader that Spark fails on by default"
