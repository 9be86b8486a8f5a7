"""The sink's functions for tasks and driver, against a real server and without a JVM.

`test_round_trips.py` tests them through Spark.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streams
from streams.client.answers import Record
from streams.client.errors import Unreachable
from streams.direct import Shards, Txn
from streams.protocol.errors import BoxNotFound, InvalidRequest, WriterConflict
from streams.spark import reads, sink
from streams.spark.columns import COLUMNS
from streams.spark.options import (
    BATCH,
    WRITE,
    BadOption,
    SparkWriteOptions,
    parse_read_options,
    parse_write_options,
)
from streams.spark.sink import AlreadyCommitted, PartialCommit, TaskCommit
from streams.testing import Server

BOXES = 12


def write_options(server: Server, **options: str) -> SparkWriteOptions:
    return parse_write_options({"url": server.url, **options}, WRITE)


def batches(name: str, first: int, last: int) -> Iterator[pa.RecordBatch]:
    """Row n goes to box n % BOXES, so all shards have some."""
    for start in range(first, last, 100):
        numbers = range(start, min(start + 100, last))
        yield pa.RecordBatch.from_pydict(
            {"box": [f"{name}.{n % BOXES}" for n in numbers], "data": [str(n) for n in numbers]}
        )


def read_numbers(client: streams.Client, name: str) -> list[int]:
    boxes = [client.box(each.box) for each in client.boxes(f"{name}.")]
    return sorted(item.data for box in boxes for item in box.read() if isinstance(item, Record))


def test_rows_are_hidden_until_the_commit_and_only_those_it_names_are_shown(
    server: Server, client: streams.Client, name: str
) -> None:
    write, txn = write_options(server), Txn(name, 1)
    first = sink.send_rows(write, txn, batches(name, 0, 250))
    sink.send_rows(
        write, txn, batches(name, 0, 250)
    )  # its twin: a speculative task, or an attempt that was lost
    second = sink.send_rows(write, txn, batches(name, 250, 300))
    assert read_numbers(client, name) == []
    assert pickle.loads(pickle.dumps(first)) == first and first.rows == 250 and len(first.chunks) == 4
    assert sink.commit_tasks(write, [first, None, second]) == 300
    assert read_numbers(client, name) == list(range(300))
    with Shards(server.url) as shards:
        held = [each for shard in range(4) for each in shards.txn_list(shard, prefix=name).pending]
    assert held == [], "what was not named is gone"


def test_an_epoch_that_was_committed_changes_nothing_when_it_comes_again(
    server: Server, client: streams.Client, name: str
) -> None:
    write = write_options(server, txnAppId=name, txnVersion="3")
    for epoch, expected in ((3, 40), (3, 40), (2, 40), (4, 80)):
        txn = Txn(name, epoch)
        sink.commit_tasks(write, [sink.send_rows(write, txn, batches(name, 0, 40))])
        assert len(read_numbers(client, name)) == expected


def test_a_commit_that_some_shards_miss_says_so_and_the_rerun_adds_the_rest(
    server: Server, client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, txn = write_options(server, commitTimeoutMs="0"), Txn(name, 7)
    sent = sink.send_rows(write, txn, batches(name, 0, 120))
    real = Shards.txn_commit

    def cut_off(self: Shards, shard: int, *args: Any, **more: Any) -> Any:
        if shard in (1, 3) and not more["dry"]:
            raise Unreachable(f"shard {shard} is away")
        return real(self, shard, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Shards, "txn_commit", cut_off)
        with pytest.raises(PartialCommit, match="not committed on 2 of 4 shards") as partial:
            sink.commit_tasks(write, [sent])
    assert partial.value.detail == {"writer": name, "epoch": 7, "shards": [1, 3]}
    assert 0 < len(read_numbers(client, name)) < 120
    sink.commit_tasks(
        write,
        [
            sink.send_rows(write, txn, batches(name, 60, 120)),
            sink.send_rows(write, txn, batches(name, 0, 60)),
        ],
    )
    assert read_numbers(client, name) == list(range(120))


def test_what_one_shard_would_refuse_leaves_nothing_on_any(
    server: Server, client: streams.Client, name: str
) -> None:
    write, txn = write_options(server), Txn(name, 1)
    sent = sink.send_rows(write, txn, batches(name, 0, 120))
    with Shards(server.url) as shards:
        last = next(f"{name}.{n}" for n in range(BOXES) if shards.shard_of(f"{name}.{n}") == 3)
    client.box(last).create(cap_records=1, discard="reject")
    with pytest.raises(streams.Refused, match=last):
        sink.commit_tasks(write, [sent])
    assert read_numbers(client, name) == []
    client.box(last).drop()
    assert sink.commit_tasks(write, [sent]) == 120
    assert read_numbers(client, name) == list(range(120))


def test_a_writer_belongs_to_one_query_until_it_is_taken_over(
    server: Server, client: streams.Client, name: str
) -> None:
    """A checkpoint was deleted and `txnAppId` kept: batches begin at 0 again and would all be passed over."""
    write = write_options(server)
    sink.commit_tasks(write, [sink.send_rows(write, Txn(name, 5, "first-query"), batches(name, 0, 40))])
    with pytest.raises(WriterConflict):
        sink.send_rows(write, Txn(name, 0, "second-query"), batches(name, 40, 80))
    taken = Txn(name, 0, "second-query", True)
    sink.commit_tasks(write, [sink.send_rows(write, taken, batches(name, 40, 80))])
    assert read_numbers(client, name) == list(range(80))


def test_what_is_aborted_is_gone_and_a_server_that_is_away_does_not_hide_the_error(
    server: Server, client: streams.Client, name: str
) -> None:
    write, txn = write_options(server), Txn(name, 1)
    sent = sink.send_rows(write, txn, batches(name, 0, 40))
    sink.abort_epoch(write, None, [None, sent])
    with pytest.raises(streams.Refused, match="0 chunks are held"):
        sink.commit_tasks(write, [sent])
    sink.send_rows(write, txn, batches(name, 0, 40))
    sink.abort_epoch(write, txn, [None])
    with Shards(server.url) as shards:
        assert not any(shards.txn_list(shard, prefix=name).pending for shard in range(4))
    sink.abort_epoch(write, None, [None])
    sink.abort_epoch(parse_write_options({"url": "http://127.0.0.1:1"}, WRITE), txn, [])
    assert read_numbers(client, name) == []


def count_held(server: Server, name: str) -> int:
    with Shards(server.url) as shards:
        return sum(len(shards.txn_list(shard, prefix=name).pending) for shard in range(4))


def test_a_micro_batch_that_spark_gives_up_without_a_message_is_dropped_by_query_and_batch(
    server: Server, name: str, tmp_path: Path
) -> None:
    (tmp_path / "metadata").write_text(f'{{"id":"{name}"}}')
    for checkpoint in (str(tmp_path), tmp_path.as_uri()):
        write = write_options(server, checkpointLocation=checkpoint)
        sink.send_rows(write, Txn(name, 5, name), batches(name, 0, 40))
        assert count_held(server, name) == 4
        sink.StreamWriter(write).abort([None, None], 5)
        assert count_held(server, name) == 0
    sink.StreamWriter(write_options(server, checkpointLocation="s3a://bucket/c")).abort([None], 5)


def test_a_task_that_fails_leaves_nothing_held(server: Server, name: str) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(name, 0, 200)
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        sink.send_rows(write_options(server), Txn(name, 1), failing())
    assert count_held(server, name) == 0


def test_a_version_that_was_committed_before_is_an_error_where_that_is_wanted(
    server: Server, client: streams.Client, name: str
) -> None:
    write = write_options(server, txnAppId=name, txnVersion="3", txnIfDone="fail")
    sink.commit_tasks(write, [sink.send_rows(write, Txn(name, 3), batches(name, 0, 40))])
    again = sink.send_rows(write, Txn(name, 3), batches(name, 0, 40))
    with pytest.raises(AlreadyCommitted, match="epoch 3 of writer"):
        sink.commit_tasks(write, [again])
    assert read_numbers(client, name) == list(range(40))


def test_more_than_a_thousand_boxes_are_written_and_read(server: Server, name: str) -> None:
    rows = pa.RecordBatch.from_pydict({"box": [f"{name}.{n}" for n in range(1100)], "data": ["1"] * 1100})
    write = write_options(server)
    sink.commit_tasks(write, [sink.send_rows(write, Txn(name, 1), iter([rows]))])
    read = parse_read_options({"url": server.url, "subscribePrefix": f"{name}."}, BATCH)
    with Shards(server.url) as shards:
        assert len(reads.read_heads(shards, read)) == 1100


def test_delivery_append_is_there_at_once(server: Server, client: streams.Client, name: str) -> None:
    write = write_options(server, delivery="append")
    sent = sink.send_rows(write, Txn(name, 1), batches(name, 0, 40))
    assert read_numbers(client, name) == list(range(40))
    assert sink.commit_tasks(write, [sent]) == 40 and sent.chunks == ()
    sink.abort_epoch(write, None, [sent])
    client.box(f"{name}.full").create(cap_records=1, discard="reject")
    client.box(f"{name}.full").append(0)
    one = iter([pa.RecordBatch.from_pydict({"data": ["1"], "box": [f"{name}.full"]})])
    with pytest.raises(streams.Refused, match=f"{name}.full: "):
        sink.send_rows(write, Txn(name, 2), one)


def test_delivery_keyed_is_there_at_once_and_a_second_attempt_changes_nothing(
    server: Server, client: streams.Client, name: str
) -> None:
    write, txn = (
        write_options(server, delivery="keyed", txnAppId="w" * 256, txnVersion="1"),
        Txn("w" * 256, 1),
    )
    sink.send_rows(write, txn, itertools.islice(batches(name, 0, 250), 2))  # a task that died on its way
    assert read_numbers(client, name) == list(range(200))
    sent = sink.send_rows(write, txn, batches(name, 0, 250))
    assert sink.commit_tasks(write, [sent]) == 250 and sent.chunks == ()
    sink.abort_epoch(write, txn, [sent])
    assert read_numbers(client, name) == list(range(250))
    sink.send_rows(write, Txn("w" * 256, 2), batches(name, 250, 300))
    assert read_numbers(client, name) == list(range(300))


@pytest.mark.parametrize("first", [12, 1], ids=["as many others", "more of some boxes"])
def test_delivery_keyed_refuses_other_rows_under_the_same_key(
    server: Server, client: streams.Client, name: str, first: int
) -> None:
    write, txn = write_options(server, delivery="keyed"), Txn(name, 1)
    sink.send_rows(write, txn, batches(name, 0, 24))
    with pytest.raises(WriterConflict, match="this run partitions its rows differently"):
        sink.send_rows(write, txn, batches(name, first, first + 30))
    assert read_numbers(client, name) == list(range(24))


def test_boxes_are_made_as_asked_or_not_at_all(server: Server, client: streams.Client, name: str) -> None:
    client.box(f"{name}.0").create(durability="memory")
    write = write_options(server, durability="fsync")
    sink.commit_tasks(write, [sink.send_rows(write, Txn(name, 1), batches(name, 0, 300))])
    made = {each.box[len(name) + 1 :]: each.durability for each in client.boxes(f"{name}.")}
    assert made == {str(n): "memory" if n == 0 else "fsync" for n in range(BOXES)}
    with pytest.raises(BoxNotFound):
        sink.send_rows(write_options(server, create="false"), Txn(name, 2), batches(f"{name}.other", 0, 1))


def test_a_row_that_is_no_json_fails_the_task_with_its_box(server: Server, name: str) -> None:
    bad = pa.RecordBatch.from_pydict({"data": ['{"a": 1}', '{"a": '], "box": [name, name]})
    with pytest.raises(InvalidRequest) as refused:
        sink.send_rows(write_options(server), Txn(name, 1), iter([bad]))
    assert refused.value.message == (
        f"{name} records[1].data: must be exactly one JSON value, got '{{\"a\":'"
    )


def test_rows_that_cannot_be_written_become_dead_letters_in_the_same_transaction(
    server: Server, client: streams.Client, name: str
) -> None:
    rows = [
        ("a", b'{"n": 1}', "t", None),
        ("a", b'{"n": ', "t", '{"file": "f", "line": 2}'),
        ("a", b"\xff", None, None),
        ("no box!", b"1", None, None),
        (None, b"1", None, None),
        ("a", None, None, None),
        ("a", b"2", "x" * 257, None),
        ("a", b" 3", None, None),
    ]
    columns = zip(("box", "data", "tag", "source"), zip(*rows, strict=True), strict=True)
    types = {"data": pa.binary()}
    batch = pa.RecordBatch.from_pydict(
        {
            column: pa.array(
                [name if value == "a" else value for value in values], types.get(column, pa.string())
            )
            for column, values in columns
        }
    )
    dead_box = f"{name}.dead"
    write = write_options(server, onBadRow="deadletter", deadLetterBox=dead_box)
    message = sink.send_rows(write, Txn(name, 1), iter([batch]))
    assert not client.box(dead_box).exists() or client.box(dead_box).state().count == 0, "not committed yet"
    sink.commit_tasks(write, [message])
    assert [item.data for item in client.box(name).read() if isinstance(item, Record)] == [{"n": 1}, 3]
    dead = [item.data for item in client.box(dead_box).read() if isinstance(item, Record)]
    assert [(each["box"], each["data"], each["reason"].partition(":")[0]) for each in dead] == [
        (name, '{"n": ', "data"),
        (name, "\N{REPLACEMENT CHARACTER}", "data"),
        ("no box!", "1", "box"),
        (None, "1", "box"),
        (name, None, "data"),
        (name, "2", "tag"),
    ]
    assert dead[0]["source"] == {"file": "f", "line": 2} and "not UTF-8" in dead[1]["reason"]
    with pytest.raises(BadOption, match="onBadRow=deadletter and deadLetterBox go together"):
        write_options(server, onBadRow="deadletter")


def test_nothing_to_commit_is_no_transaction(server: Server) -> None:
    assert sink.commit_tasks(write_options(server), []) == 0
    assert sink.commit_tasks(write_options(server), [None]) == 0


def test_what_was_written_is_read_with_all_its_columns(
    server: Server, client: streams.Client, name: str
) -> None:
    rows = [
        {"data": '{"n":1.0}', "tag": "é", "node": None, "meta": '{"k":1}'},
        {"data": " null", "tag": None, "node": "me", "meta": None},
        {"data": '"x"', "tag": "t", "node": None, "meta": None},
    ]
    schema = pa.schema([(each, pa.utf8()) for each in ("data", "tag", "node", "meta")])
    write = write_options(server, box=name)
    sent: TaskCommit = sink.send_rows(write, Txn(name, 1), iter([pa.RecordBatch.from_pylist(rows, schema)]))
    sink.commit_tasks(write, [sent])
    read = parse_read_options({"url": server.url, "path": name}, BATCH)
    with Shards(server.url) as shards:
        known = reads.read_heads(shards, read)
        start, end = reads.resolve_start(shards, read, known), reads.resolve_end(shards, read, known)
        (task,) = reads.plan_read(shards, read, start, end)
    wanted = pa.schema([(each, COLUMNS[each]) for each in ("box", "seq", "data", "tag", "node", "meta")])
    assert [row for batch in reads.read_task(read, task, wanted) for row in batch.to_pylist()] == [
        {"box": name, "seq": 1, "data": '{"n":1.0}', "tag": "é", "node": "spark", "meta": '{"k":1}'},
        {"box": name, "seq": 2, "data": "null", "tag": None, "node": "me", "meta": None},
        {"box": name, "seq": 3, "data": '"x"', "tag": "t", "node": "spark", "meta": None},
    ]
