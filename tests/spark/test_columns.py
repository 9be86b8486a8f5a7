"""Arrow batches to packed columns and back. The reference is `pack`, which goes through plain lists."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.direct import Run, pack
from streams.spark.columns import COLUMNS, BadRows, Packer, gaps_to_batch, run_to_batch, split_batch
from streams.spark.gaps import Gap

NAMES = [f"box.{n}" for n in range(9)]
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
VALUES = st.one_of(TEXTS, st.integers(), st.lists(st.booleans(), max_size=3)).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "box": st.sampled_from(NAMES),
            "data": VALUES,
            "tag": st.none() | TEXTS,
            "node": st.none() | TEXTS,
            "meta": st.none() | TEXTS.map(lambda text: json.dumps({"k": text})),
            "ts": st.none() | st.integers(0, 2**40),
        }
    ),
    max_size=40,
)


def shard_of(box: str) -> int:
    return int(box[-1]) % 3


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    names = ["box", "data", "tag", "node", "meta"]
    arrays = [pa.array([row[name] for row in rows], pa.utf8()) for name in names]
    times = [None if row["ts"] is None else row["ts"] * 1000 for row in rows]
    arrays.append(pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")))
    return pa.RecordBatch.from_arrays(arrays, names=[*names, "ts"])


def encoded(value: str | None) -> bytes:
    return (value or "").encode()


@given(ROWS, st.integers(0, 5))
def test_packed_columns_are_those_that_plain_lists_give(rows: list[dict[str, Any]], cut: int) -> None:
    whole = batch([*rows[:cut], *rows]).slice(len(rows[:cut]))  # offsets that do not begin at 0
    messages = Packer(shard_of, default_node="spark").pack(whole)
    assert [shard for shard, _ in messages] == sorted({shard_of(row["box"]) for row in rows})
    for shard, message in messages:
        assert {shard_of(box) for box in message.boxes} == {shard}
        mine = [row for box in message.boxes for row in rows if row["box"] == box]
        # A node that all rows have is sent once.
        nodes = {encoded(row["node"]) for row in mine}
        shared_node = nodes.pop().decode() if len(nodes) == 1 else ""
        reference = pack(
            message.boxes,
            message.counts,
            [encoded(row["data"]) for row in mine],
            tag=[encoded(row["tag"]) for row in mine],
            node=None if shared_node else [encoded(row["node"]) for row in mine],
            meta=[encoded(row["meta"]) for row in mine],
            ts=[-1 if row["ts"] is None else row["ts"] for row in mine],
            default_node=shared_node or "spark",
        )
        assert message == reference


def test_spaces_around_json_go_and_nothing_else() -> None:
    rows = [{"data": ' {"a": 1}\n'}, {"data": "\t2"}, {"data": '" x "'}]
    ((_, packed),) = Packer(shard_of, box="box.1").pack(pa.RecordBatch.from_pylist(rows))
    assert packed.data == b'[{"a": 1},2," x "]'
    assert (packed.boxes, packed.counts) == (["box.1"], [3])


def test_binary_data_and_wide_offsets_are_taken() -> None:
    for kind in (pa.binary(), pa.large_utf8(), pa.large_binary()):
        rows = pa.RecordBatch.from_arrays([pa.array([b"1", b"22"], kind)], names=["data"])
        ((_, packed),) = Packer(shard_of, box="box.1").pack(rows)
        assert packed.data == b"[1,22]"


def test_times_may_be_milliseconds() -> None:
    rows = pa.RecordBatch.from_pydict({"data": ["1", "2"], "ts": pa.array([5, None], pa.int64())})
    ((_, packed),) = Packer(shard_of, box="box.1").pack(rows)
    assert np.frombuffer(packed.ts, np.int64).tolist() == [5, -1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"data": ["1"]}, "no column box"),
        ({"data": ["1", "2"], "box": ["box.1", None]}, "box: is null"),
        ({"data": ["1", "2", None], "box": ["box.1", "box.2", "box.2"]}, "data: is null in a row for box.2"),
        ({"data": ["1"], "box": ["no/box"]}, "no/box"),
        (
            {"data": [b"1", b"\xff\xfe"], "box": ["box.1", "box.2"]},
            r"data: is not UTF-8 in a row for box.2: '\\\\xff",
        ),
    ],
)
def test_rows_that_cannot_be_written_are_refused_by_name(columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(Exception, match=message) as error:
        Packer(lambda box: 0).pack(pa.RecordBatch.from_pydict(columns))
    assert error.type is BadRows or "name" in str(error.value)


def test_a_batch_is_cut_to_what_one_message_holds() -> None:
    many = pa.RecordBatch.from_pydict({"data": ["1"] * 25_000})
    assert [part.num_rows for part in split_batch(many)] == [10_000, 10_000, 5_000]
    big = pa.RecordBatch.from_pydict({"data": ["x" * (1 << 20)] * 20})
    parts = list(split_batch(big))
    assert sum(part.num_rows for part in parts) == 20 and all(part.nbytes <= 8 << 20 for part in parts)
    assert pa.Table.from_batches(parts).to_pylist() == big.to_pylist()
    assert list(split_batch(many.slice(0, 0))) == []
    assert Packer(shard_of).pack(many.slice(0, 0)) == []


# -- reading

ALL = pa.schema([pa.field(name, kind) for name, kind in COLUMNS.items()])


def run(**overrides: Any) -> Run:
    empty = memoryview(b"")
    fields: dict[str, Any] = {
        "count": 2,
        "first_seq": 5,
        "first_ts": 1_700_000_000_123,
        "prefix": 0,
        "suffix": 0,
        "base": 0,
        "stride": 0,
        "node": "",
        "sizes": (0,) * 8,
        "ends": memoryview(np.array([1, 3], np.uint32).tobytes()),
        "values": memoryview(b"122"),
        **dict.fromkeys(("seqs", "times", "tags", "nodes", "meta_ends", "metas"), empty),
    }
    return Run(**(fields | overrides))


def test_a_run_without_extras() -> None:
    moment = datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    nothing = dict.fromkeys(("tag", "node", "meta", "gap"))
    assert run_to_batch(run(), "orders", ALL).to_pylist() == [
        {"box": "orders", "seq": 5, "ts": moment, "data": "1", **nothing},
        {"box": "orders", "seq": 6, "ts": moment, "data": "22", **nothing},
    ]


def test_a_run_with_everything() -> None:
    found = run_to_batch(
        run(
            prefix=2,
            suffix=1,
            base=100,
            stride=3,
            ends=memoryview(np.array([101, 103], np.uint32).tobytes()),
            values=memoryview(b"<<1>ab22>"[:4] + b"<<22>"),
            seqs=memoryview(np.array([7, 9], np.int64).tobytes()),
            times=memoryview(np.array([1, 2], np.int64).tobytes()),
            tags=memoryview("\0é".encode()),
            nodes=memoryview(b"n\0"),
            meta_ends=memoryview(np.array([0, 7], np.uint32).tobytes()),
            metas=memoryview(b'{"a":1}'),
        ),
        "orders",
        ALL,
    )
    assert found.select(["seq", "data", "tag", "node", "meta"]).to_pylist() == [
        {"seq": 7, "data": "1", "tag": None, "node": "n", "meta": None},
        {"seq": 9, "data": "22", "tag": "é", "node": None, "meta": '{"a":1}'},
    ]
    assert found.column("ts").cast(pa.int64()).to_pylist() == [1000, 2000]


def test_only_the_columns_that_are_wanted_are_made_in_their_order() -> None:
    schema = pa.schema([ALL.field("node"), ALL.field("seq")])
    assert run_to_batch(run(node="n"), "orders", schema).to_pylist() == [
        {"node": "n", "seq": 5},
        {"node": "n", "seq": 6},
    ]


def test_a_gap_is_a_row_at_the_last_seq_that_is_missing() -> None:
    (row,) = gaps_to_batch([Gap("orders", 3, 9, "cap", None)], ALL).to_pylist()
    assert (row["box"], row["seq"], row["data"]) == ("orders", 9, None)
    assert row["gap"] == {"from": 3, "to": 9, "reason": "cap", "missed": None}


def test_a_map_in_meta_becomes_json() -> None:
    kind = pa.map_(pa.utf8(), pa.int64())
    metas = pa.array([[("a", 1), ("b", 2)], None], kind)
    rows = pa.RecordBatch.from_arrays([pa.array(["1", "2"]), metas], names=["data", "meta"])
    ((_, packed),) = Packer(shard_of, box=NAMES[0]).pack(rows)
    assert packed.meta == b'[{"a":1,"b":2},null]'
