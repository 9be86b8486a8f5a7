"""Goal: bulk clients, against real shards: packed columns, scans, states, and jobs that are run again
(docs/reference/wire.md).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import streams
from streams.client.retry import NEVER
from streams.direct import BoxMoved, BoxResult, Parcel, Shards, ShardWriter, Txn, pack
from streams.protocol.errors import BatchTooLarge, InvalidRequest, NotFound, Throttled, WriterConflict
from streams.testing import Server, running_server
from tests.support.crashing import eventually


@pytest.fixture
def shards(server: Server) -> Iterator[Shards]:
    with Shards(server.url) as found:
        yield found


def boxes_of(shards: Shards, name: str, count: int, shard: int = 0) -> list[str]:
    """Names that one shard owns."""
    names = (f"{name}.{number}" for number in range(10_000))
    return [
        found
        for found, _ in zip((n for n in names if shards.shard_of(n) == shard), range(count), strict=False)
    ]


def datas(client: streams.Client, box: str) -> list[object]:
    return [item.data for item in client.box(box).read()]  # type: ignore[union-attr]


# -- packed columns and scans


def test_columns_are_written_as_appends_are_with_a_result_for_each_box(
    shards: Shards, client: streams.Client, name: str
) -> None:
    a, b, full = boxes_of(shards, name, 3)
    client.box(full).create(cap_records=1, discard="reject")
    client.box(full).append(0)
    packed = pack([a, full, b], [2, 1, 1], [b"1", b"2", b"3", b'{"x":4}'], tag=[b"", b"t", b"", b""])
    results = shards.put_columns(packed, idempotency_key="once")
    assert [(each.box, each.first_seq, each.last_seq, each.created) for each in results] == [
        (a, 1, 2, True),
        (full, 0, 0, False),
        (b, 1, 1, True),
    ]
    assert results[1].error is not None and results[1].error[0] == "box_full"
    assert [each.deduped for each in shards.put_columns(packed, idempotency_key="once")] == [
        True,
        False,
        True,
    ]
    assert datas(client, a) == [1, 2] and datas(client, b) == [{"x": 4}] and datas(client, full) == [0]


def test_a_row_that_is_not_valid_refuses_the_message(
    shards: Shards, client: streams.Client, name: str
) -> None:
    a, b = boxes_of(shards, name, 2)
    with pytest.raises(InvalidRequest, match=r"records\[0\].data"):
        shards.put_columns(pack([a, b], [1, 1], [b"1", b"{"]))
    assert shards.states(boxes=[a, b]) == []


def test_rows_for_boxes_of_several_shards_are_not_sent(shards: Shards, name: str) -> None:
    (a,), (b,) = boxes_of(shards, name, 1, 0), boxes_of(shards, name, 1, 1)
    packed = pack([a, b], [1, 1], [b"1", b"2"])
    with pytest.raises(BoxMoved):
        shards.put_columns(packed)
    with pytest.raises(BoxMoved):
        shards.txn_put(1, Txn(name, 1), "p", 0, packed)
    with pytest.raises(BoxMoved, match="no shard 9"):
        shards.txn_list(9)
    assert shards.states(boxes=[a, b]) == []


def test_a_scan_brings_everything_in_pages(shards: Shards, client: streams.Client, name: str) -> None:
    rows = [b'{"n":%d}' % number for number in range(3_000)]
    for at in range(0, 3_000, 500):
        some = rows[at : at + 500]
        shards.put_columns(pack([name], [500], some, tag=[b"t%d" % (at + n) for n in range(500)]))
    client.box(name).append("alone", tag="last", meta={"m": 1})
    pages = list(shards.scan(name, max_bytes=40_000))
    assert len(pages) > 2
    runs = [run for page in pages for run in page.runs]
    assert [data for run in runs for data in run.datas()] == [*rows, b'"alone"']
    assert [tag for run in runs for tag in run.tag_list()] == [*(f"t{n}" for n in range(3_000)), "last"]
    assert [seq for run in runs for seq in run.seq_list()] == list(range(1, 3_002))
    assert runs[-1].meta_list()[-1] == b'{"m":1}'
    some_runs = [run for page in shards.scan(name, from_seq=10, to_seq=20) for run in page.runs]
    assert [seq for run in some_runs for seq in run.seq_list()] == list(range(11, 21))


def test_states_and_times_of_boxes_on_all_shards(shards: Shards, client: streams.Client, name: str) -> None:
    names = [*boxes_of(shards, name, 2, 0), *boxes_of(shards, name, 2, 1)]
    for box in names:
        shards.put_columns(pack([box], [2], [b"1", b"2"]))
    states = shards.states(prefix=f"{name}.")
    assert [each.box for each in states] == sorted(names)
    for each in states:
        state = client.box(each.box).state()
        assert (each.generation, each.head_seq, each.count, each.bytes) == (
            state.generation,
            2,
            2,
            state.bytes,
        )
    located = shards.locate({**dict.fromkeys(names, 0), f"{name}.never": 0})
    assert located == {each.box: (each.generation, 1) for each in states}


def test_a_writer_takes_columns_too(server: Server, client: streams.Client, name: str) -> None:
    with ShardWriter(server.url) as writer:
        (result,) = writer.put_columns(pack([name], [1], [b"1"]))
        assert result == BoxResult(name, 1, 1, True)
        assert writer.append(name, [2]).first_seq == 2
    assert datas(client, name) == [1, 2]


# -- transactions


def test_a_job_that_is_run_again_with_other_parts_writes_each_row_once(
    shards: Shards, client: streams.Client, name: str
) -> None:
    box = boxes_of(shards, name, 1)[0]
    rows = [b"%d" % number for number in range(1_000)]

    def run(parts: int, chunk: int) -> bool:
        txn = Txn(name, 7, "query")
        parcels = []
        for part in range(parts):
            mine = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
            parcel = Parcel(shards, 0, txn, f"{parts}-{part}")
            for at in range(0, len(mine), chunk):
                parcel.put(pack([box], [len(mine[at : at + chunk])], mine[at : at + chunk]))
            parcels.append((parcel.name, parcel.close()))
        zombie = Parcel(shards, 0, txn, f"zombie-{parts}")
        zombie.put(pack([box], [1], [b'"zombie"']))
        zombie.close()
        assert zombie.is_done == (parts == 3)
        return shards.txn_commit(0, txn, parcels).is_done if not zombie.is_done else True

    assert run(2, 90) is False
    assert run(3, 40) is True
    assert datas(client, box) == list(range(1_000))
    assert shards.txn_list(0, prefix=name).pending == []
    assert shards.txn_list(0, prefix=name).marks[0].epoch == 7


def test_refusals_of_transactions_reach_the_client(shards: Shards, name: str) -> None:
    (box,) = boxes_of(shards, name, 1)
    txn = Txn(name, 1, "query")
    with pytest.raises(NotFound):
        shards.txn_commit(0, txn, [("never", 1)])
    shards.txn_put(0, txn, "p", 0, pack([box], [1], [b"1"]))
    assert shards.txn_abort(0, txn).parcels == 1
    shards.txn_commit(0, txn, [])
    with pytest.raises(WriterConflict):
        shards.txn_put(0, Txn(name, 2, "another"), "p", 0, pack([box], [1], [b"1"]))
    with pytest.raises(InvalidRequest, match="data"):
        shards.txn_put(0, Txn(name, 2, "query"), "p", 0, pack([box], [1], [b"nope"]))


def test_a_transaction_holds_far_more_than_its_share_of_memory_and_kills_change_nothing(
    tmp_path: Path,
) -> None:
    """STREAMS_TXN_BYTES bounds what is known of the rows in memory, and not the rows: 200 times as much is
    held here, and committed at once. The shard is killed while rows are put and while they are rendered."""
    boxes, rows, chunks = 8, 400, 60
    settings = {"txn_bytes": "64KiB", "cache_bytes": "8MiB", "wal_file_bytes": "4MiB"}
    with running_server(tmp_path, shards=1, **settings) as server, Shards(server.url) as shards:
        txn, names = Txn("w", 1), [f"box-{number}" for number in range(boxes)]
        parcel = Parcel(shards, 0, txn, "p")
        for chunk in range(chunks):
            values = [b'[%d,"%b"]' % (chunk * rows + at, b"x" * 60) for at in range(rows)] * boxes
            parcel.put(pack(names, [rows] * boxes, values))
            if chunk == chunks // 2:
                os.kill(eventually(lambda: server.shard_pids().get(0)), signal.SIGKILL)
        held = parcel.close()
        state = shards.txn_list(0).pending[0]
        assert (state.chunks, state.records) == (chunks, boxes * rows * chunks)
        assert state.bytes > 200 * 64 * 1024
        small = Txn("small", 1)  # others are not refused meanwhile
        shards.txn_put(0, small, "p", 0, pack(["other"], [1], [b"1"]))
        assert shards.txn_commit(0, small, [("p", 1)]).records == 1
        committed = shards.txn_commit(0, txn, [("p", held)])
        assert committed.records == boxes * rows * chunks
        assert {(first, last) for _, first, last in committed.boxes} == {(1, rows * chunks)}
        assert shards.scan_page(names[0]).head_seq == rows * chunks, "all of it is there, rendered or not"
        os.kill(eventually(lambda: server.shard_pids().get(0)), signal.SIGKILL)
        assert shards.txn_commit(0, txn, [("p", held)]).is_done
        for box in names:
            found = [data for page in shards.scan(box) for run in page.runs for data in run.datas()]
            assert [int(data[1 : data.index(b",")]) for data in found] == list(range(rows * chunks))
        assert not shards.txn_list(0).pending


def test_what_is_known_of_held_rows_is_bounded_by_a_setting(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1, txn_bytes="64KiB") as server, Shards(server.url) as shards:
        packed = pack([f"box-{number}" for number in range(1000)], [1] * 1000, [b"1"] * 1000)
        shards.txn_put(0, Txn("w", 1), "p", 0, packed)
        with Shards(server.url, retry=NEVER) as hasty:
            with pytest.raises(Throttled):
                hasty.txn_put(0, Txn("v", 1), "p", 0, packed)
            with pytest.raises(BatchTooLarge):
                hasty.txn_put(0, Txn("w", 1), "p", 1, packed)
        assert shards.txn_commit(0, Txn("w", 1), [("p", 1)]).records == 1000


def test_an_epoch_that_some_shards_had_committed_is_completed_after_a_change_of_their_number(
    tmp_path: Path,
) -> None:
    """A driver dies between the commits of two shards, and the server comes back with other shards."""
    txn = Txn("w", 3, "q")
    names = [f"box-{number}" for number in range(40)]

    def put_all(shards: Shards) -> dict[int, list[tuple[str, int]]]:
        parcels = {}
        for shard in range(shards.count):
            mine = [name for name in names if shards.shard_of(name) == shard]
            parcel = Parcel(shards, shard, txn, f"try-{shards.count}")
            parcel.put(pack(mine, [1] * len(mine), [b'"%b"' % name.encode() for name in mine]))
            parcels[shard] = [(parcel.name, parcel.close())]
        return parcels

    with running_server(tmp_path, shards=2) as server, Shards(server.url) as shards:
        parcels = put_all(shards)
        shards.txn_commit(1, txn, parcels[1])
        seen = {each.box for each in shards.states()}
        assert 0 < len(seen) < len(names)
    with running_server(tmp_path, shards=1) as server, Shards(server.url) as shards:
        state = shards.txn_list(0)
        assert state.pending == [] and [mark.is_partial for mark in state.marks] == [True]
        assert shards.txn_commit(0, txn, put_all(shards)[0]).records == len(names) - len(seen)
        assert shards.txn_commit(0, txn, []).is_done
        assert {each.box: each.head_seq for each in shards.states()} == dict.fromkeys(names, 1)
