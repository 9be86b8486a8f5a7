"""Goal: packed columns become the very batches that the same records make as JSON, and nothing that is not
valid gets in (docs/reference/wire.md, v0 §3).
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge, StreamsError
from streams.protocol.messages import bulk_requests
from streams.protocol.model.records import Columns, render
from streams.protocol.payloads import packed
from streams.protocol.payloads.appends import RecordLimits, parse_append
from streams.protocol.payloads.packed import PackedColumns, join_columns, pack, unpack, unpack_again
from tests.support.machines import sampled

LIMITS = RecordLimits(
    batch_records_max=50, record_bytes_max=200, tag_bytes_max=10, node_bytes_max=10, meta_bytes_max=100
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=2)
rows = st.fixed_dictionaries(
    {"data": json_values},
    optional={
        "tag": texts,
        "node": texts,
        "meta": st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
        "ts": st.integers(0, 2**40),
    },
)


def packed_of(boxes: dict[str, list[dict[str, Any]]], **options: Any) -> PackedColumns:
    every = [row for records in boxes.values() for row in records]
    return pack(
        list(boxes),
        [len(records) for records in boxes.values()],
        [msgspec.json.encode(row["data"]) for row in every],
        tag=[row.get("tag", "").encode() for row in every],
        node=[row.get("node", "").encode() for row in every],
        meta=[msgspec.json.encode(row["meta"]) if "meta" in row else b"" for row in every],
        ts=[row.get("ts", -1) for row in every],
        **options,
    )


def unpacked(columns: PackedColumns, limits: RecordLimits = LIMITS) -> dict[str, Columns]:
    found = unpack(columns.head(), b"".join(columns.buffers()), limits)
    return {each.box: each.columns for each in found}


def stored(columns: Columns) -> bytes:
    return b"".join(render(columns, first_seq=998, times=1_700).to_parts())


@sampled(150)
@given(
    boxes=st.dictionaries(st.sampled_from("abc"), st.lists(rows, min_size=1, max_size=5), min_size=1),
    node=st.sampled_from(["", "n"]),
)
def test_rows_are_stored_as_the_same_records_in_json_are(
    boxes: dict[str, list[dict[str, Any]]], node: str
) -> None:
    limits = RecordLimits()
    found = unpacked(packed_of(boxes, default_node=node), limits)
    for box, records in boxes.items():
        body = {"records": records, **({"node": node} if node else {})}
        expected = parse_append(msgspec.json.encode(body), limits).columns
        assert stored(found[box]) == stored(expected)
        assert found[box].times == expected.times


@sampled(60)
@given(pieces=st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=4))
def test_pieces_are_joined_to_what_they_would_be_together(pieces: list[list[dict[str, Any]]]) -> None:
    limits = RecordLimits()
    apart = [unpacked(packed_of({"b": piece}), limits)["b"] for piece in pieces]
    together = unpacked(packed_of({"b": [row for piece in pieces for row in piece]}), limits)["b"]
    assert stored(join_columns(apart)) == stored(together)
    assert join_columns(apart).times == together.times


def refused(columns: PackedColumns, limits: RecordLimits = LIMITS) -> StreamsError:
    with pytest.raises(StreamsError) as found:
        unpacked(columns, limits)
    return found.value


@pytest.mark.parametrize(
    "bad",
    [
        b"1,2", b"", b" 1", b"1 ", b"{", b'"', b'{"a":1}}', b"[1],[2]", b"nul", b"01", b'"\xff"', b"1]",
        b"NaN",
        b"[" * 5_000 + b"]" * 5_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("column", ["data", "meta"])
def test_what_is_not_exactly_one_json_value_is_named(bad: bytes, column: str) -> None:
    bad = bad or b" "  # an empty meta is none
    values = [b"{}", b"{}", b"{}", bad, b"{}"]
    wrong = pack(["a", "b"], [2, 3], **{"data": [b"1"] * 5, column: values})  # type: ignore[arg-type]
    error = refused(wrong, RecordLimits())
    assert isinstance(error, InvalidRequest)
    assert error.message.startswith(f"b records[1].{column}: "), error.message
    assert error.detail["box"] == "b" and error.detail["row"] == 3


def test_values_that_make_up_for_each_other_are_seen_through() -> None:
    """Two broken rows whose join is a valid array of the right length."""
    error = refused(pack(["b"], [3], [b"1,2", b'"a', b'b"']))
    assert "b records[0].data" in error.message


@pytest.mark.parametrize(
    ("columns", "kind", "words"),
    [
        (pack([], [], []), InvalidRequest, "boxes"),
        (pack(["b"], [1, 1], [b"1", b"2"]), InvalidRequest, "counts"),
        (pack(["b", "b"], [1, 1], [b"1", b"2"]), InvalidRequest, "twice"),
        (pack(["b", "c"], [2, 0], [b"1", b"2"]), InvalidRequest, "c has 0 rows"),
        (pack(["no/slash"], [1], [b"1"]), InvalidRequest, "box"),
        (pack(["b"], [51], [b"1"] * 51), BatchTooLarge, "at most 50"),
        (pack(["a", "b"], [1, 1], [b"1", b'"%b"' % (b"x" * 300)]), RecordTooLarge, r"b records\[0\]"),
        (pack(["b"], [1], [b"1" * 150], meta=[b'{"m":"%b"}' % (b"x" * 80)]), RecordTooLarge, r"records\[0\]"),
        (pack(["b"], [1], [b"1"], meta=[b"[]"]), InvalidRequest, r"b records\[0\].meta: must be a JSON"),
        (pack(["b"], [1], [b"1"], meta=[b'{"m":"%b"}' % (b"x" * 101)]), RecordTooLarge, "meta"),
        (pack(["a", "b"], [1, 2], [b"1"] * 3, tag=[b"", b"", b"x" * 11]), InvalidRequest, r"b rec.*\[1\]"),
        (pack(["b"], [1], [b"1"], tag=["ü".encode() * 6]), InvalidRequest, "longer than 10 bytes"),
        (pack(["b"], [1], [b"1"], tag=[b"\xff"]), InvalidRequest, "not valid UTF-8"),
        (pack(["b"], [2], [b"1"] * 2, tag=[b"a\0b", b""]), InvalidRequest, "offsets say"),
        (pack(["b"], [1], [b"1"], node=[b"x" * 11]), InvalidRequest, r"records\[0\].node"),
        (pack(["b"], [1], [b"1"], default_node="x" * 11), InvalidRequest, "node"),
        (pack(["b"], [2], [b"1"] * 2, ts=[1, -2]), InvalidRequest, r"records\[1\].ts"),
        (pack(["b"], [2], [b"1"] * 2, ts=[1, 2**62]), InvalidRequest, r"records\[1\].ts"),
    ],
)  # fmt: skip
def test_what_is_over_a_limit_or_out_of_shape_is_refused(
    columns: PackedColumns, kind: type[StreamsError], words: str
) -> None:
    error = refused(columns)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


def test_offsets_that_lie_are_refused() -> None:
    good = packed_of({"a": [{"data": 1, "tag": "xy"}], "b": [{"data": 22, "tag": "z"}, {"data": 3}]})
    for name in ("data_offsets", "tag_offsets"):
        for at in range(4):
            for delta in (-1, 1, 1000, -1000):
                offsets = packed.array("i", bytes(getattr(good, name)))
                offsets[at] += delta
                error = None
                try:
                    found = unpacked(msgspec.structs.replace(good, **{name: offsets.tobytes()}))
                except StreamsError as raised:
                    error = raised
                # Where a box begins is believed only when it is so; inside a box tags need no offsets.
                assert error is not None or {box: stored(each) for box, each in found.items()} == {
                    box: stored(each) for box, each in unpacked(good).items()
                }
                assert isinstance(error, InvalidRequest) or (name, at) == ("tag_offsets", 2)


def test_a_body_of_another_size_is_refused() -> None:
    good = packed_of({"a": [{"data": 1, "tag": "t", "ts": 5}]})
    body = b"".join(good.buffers())
    for wrong in (body[:-1], body + b"\0", b""):
        with pytest.raises(InvalidRequest, match="sizes"):
            unpack(good.head(), wrong, LIMITS)
    for sizes in ((0, 0, 0, 0, 0), (3, 1, 0, 0, 7), (-3, 1, 0, 0, 8)):
        head = good.head()
        head.sizes = sizes
        with pytest.raises(InvalidRequest, match="sizes"):
            unpack(head, body, LIMITS)


def test_bytes_by_chance_are_refused_or_read_and_never_worse() -> None:
    rng = random.Random(5)
    good = packed_of({"a": [{"data": {"k": "ü"}, "tag": "t", "meta": {"m": 1}, "node": "n", "ts": 1}] * 3})
    body = b"".join(good.buffers())
    for _ in range(2_000):
        broken = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            for each in unpack(good.head(), bytes(broken), LIMITS):
                render(each.columns, first_seq=1, times=1)
        except StreamsError:
            pass


def test_limits_that_have_become_narrower_do_not_matter_for_what_is_held() -> None:
    columns = pack(["b"], [60], [b'"%b"' % (b"x" * 300)] * 60, tag=[b"t" * 20] * 60)
    (rows,) = unpack_again(columns.head(), b"".join(columns.buffers()))
    assert rows.columns.count == 60


def test_heads_of_bulk_messages_are_checked() -> None:
    encode = msgspec.msgpack.encode
    txn = ["w", 1, "", False]
    packed_head = [["b"], [1], [3, 0, 0, 0, 0]]
    bad: list[tuple[int, object]] = [
        (85, ["no/slash"]), (85, ["b", -1]), (85, ["b", 0, 0, None, 1, 16]), (85, ["b", 0, -1]),
        (86, ["", "", 0]), (86, ["", "", 10, ["b"] * 10_001]), (87, [[["b", 1]] * 10_001]), (87, 1),
        (90, [["", 1], "p", 0, packed_head]), (90, [["w" * 257, 1], "p", 0, packed_head]),
        (90, [["w", -1], "p", 0, packed_head]), (90, [txn, "", 0, packed_head]),
        (90, [txn, "p", -1, packed_head]), (90, [txn, "p" * 65, 0, packed_head]),
        (91, [txn, [["p", 1], ["p", 1]]]), (91, [txn]),
        (91, [txn, [[str(n), 1] for n in range(100_001)]]), (92, [["", 1], []]), (93, [1]),
    ]  # fmt: skip
    for op, head in bad:
        with pytest.raises(InvalidRequest):
            bulk_requests.decode(op, encode(head), b"", RecordLimits())
    for head, words in (
        (b"\xc1", "head"),
        (encode([["b"], [1], [3, 0, 0, 0, 0], "", None, "k" * 257]), "key"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            bulk_requests.decode_columns(head, b"", RecordLimits())
