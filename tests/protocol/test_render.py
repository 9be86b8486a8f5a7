"""Goal: a stored batch holds exactly the text that readers get, and answers every question about it right.

Method: a renderer that formats one record at a time is compared with `render` over many shapes of writes;
positions, sizes and cuts are compared with those of the naive list of texts. Digits of seqs change length at
9/10, 9999/10000 (the renderer's own table ends there) and 99999/100000.
"""

from __future__ import annotations

import json
import tracemalloc
from array import array
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.errors import InvalidRequest
from streams.protocol.model.records import Batch, render, resolve_times
from streams.protocol.payloads.appends import RecordLimits, parse_append
from tests.support.machines import sampled
from tests.support.model import text_of

FIRST_SEQS = [1, 5, 9, 95, 9_990, 9_995, 9_999, 10_000, 19_998, 99_995, 100_000, 2**53, 2**63]

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
datas = st.sampled_from(
    ["0", "1.0", "1e400", "-0.0", "123456789012345678901234567890", '"\\u00e9é"', "null", "true", "[]"]
) | st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value, ensure_ascii=False))
metas = st.none() | st.dictionaries(texts, st.integers(), max_size=3).map(json.dumps)


@st.composite
def writes(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int, int | array[int]]:
    """Records as the model has them, the first seq, and the times that `render` is given."""
    count = draw(st.sampled_from([1, 1, 2, 3, 7, 15]))
    first_seq = draw(st.sampled_from(FIRST_SEQS))
    shape = draw(st.sampled_from(["none", "same", "mixed"]))
    one = draw(texts)
    with_metas, with_tags, with_times = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    start = draw(st.integers(0, 2**53 - 100))
    steps = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    times = array("q", [start + sum(steps[: index + 1]) for index in range(count)])
    same_times = not with_times or times[0] == times[-1]
    records = [
        {
            "seq": first_seq + index,
            "ts": times[0] if same_times else times[index],
            "node": {"none": "", "same": one, "mixed": draw(texts) if shape == "mixed" else ""}[shape],
            "tag": draw(texts) if with_tags else "",
            "meta": draw(metas) if with_metas else None,
            "data": draw(datas),
        }
        for index in range(count)
    ]
    return records, first_seq, times[0] if same_times else times


def rendered(records: list[dict[str, Any]], first_seq: int, times: int | array[int]) -> Batch:
    """By the road of a real write: a JSON body, parsed, then rendered."""
    parts = []
    for record in records:
        part = f'{{"data":{record["data"]}'
        for name in ("tag", "node"):
            if record[name]:
                part += f',"{name}":{json.dumps(record[name])}'
        if record["meta"] is not None:
            part += f',"meta":{record["meta"]}'
        parts.append(part + "}")
    parsed = parse_append(f'{{"records":[{",".join(parts)}]}}'.encode(), RecordLimits())
    return render(parsed.columns, first_seq=first_seq, times=times)


@sampled(150)
@given(writes())
def test_a_batch_is_its_records_one_after_the_other(
    write: tuple[list[dict[str, Any]], int, int | array[int]],
) -> None:
    records, first_seq, times = write
    batch = rendered(records, first_seq, times)
    naive = [text_of(record).encode() for record in records]
    assert batch.blob == b",".join(naive)
    assert json.loads(b"[" + batch.blob + b"]")[-1]["$seq"] == batch.last_seq == first_seq + len(records) - 1
    assert (batch.first_ts, batch.last_ts) == (records[0]["ts"], records[-1]["ts"])
    check_positions(batch, records, naive)
    again = Batch.from_bytes(memoryview(b"".join(batch.to_parts())))
    for slot in Batch.__slots__:
        assert getattr(again, slot) == getattr(batch, slot), slot
    check_positions(again, records, naive)


@sampled(100)
@given(writes(), st.data())
def test_a_part_of_a_batch_is_as_if_its_records_alone_had_been_written(
    write: tuple[list[dict[str, Any]], int, int | array[int]], choose: st.DataObject
) -> None:
    records, first_seq, times = write
    batch = rendered(records, first_seq, times)
    first = choose.draw(st.integers(0, batch.count - 1))
    last = choose.draw(st.integers(first, batch.count - 1))
    chosen = records[first : last + 1]
    part = batch.part(first, last)
    check_part(part, chosen)
    # Alone they may be laid out more tightly, so `ends` and `stride` are compared by what they say.
    part_times = times if isinstance(times, int) else times[first : last + 1]
    same = isinstance(part_times, int) or part_times[0] == part_times[-1]
    alone = rendered(chosen, first_seq + first, chosen[0]["ts"] if same else part_times)
    for slot in set(Batch.__slots__) - {"ends", "stride"}:
        assert getattr(part, slot) == getattr(alone, slot), slot
    # What was stored and read again, and a part of a part, are no different.
    check_part(Batch.from_bytes(memoryview(b"".join(part.to_parts()))), chosen)
    if len(chosen) > 1:
        check_part(part.part(1, part.count - 1), chosen[1:])


def check_part(part: Batch, records: list[dict[str, Any]]) -> None:
    naive = [text_of(record).encode() for record in records]
    assert part.blob == b",".join(naive)
    assert (part.first_seq, part.count) == (records[0]["seq"], len(records))
    assert part.sizes() == list(map(len, naive))
    check_positions(part, records, naive)


def test_all_of_a_batch_is_a_part_that_shares_its_blob_and_none_of_its_notes() -> None:
    body = b'{"records":[{"data":1,"tag":"a"},{"data":22,"node":"n"}]}'
    batch = render(parse_append(body, RecordLimits()).columns, first_seq=9, times=5)
    batch.lsn, batch.dead, batch.dead_bytes, batch.hops = 7, 1, 27, 3
    part = batch.part(0, 1)
    assert part.blob is batch.blob and part.to_parts() == batch.to_parts()
    assert part.hops == 3, "a record that was copied does not forget how often"
    assert (part.lsn, part.dead, part.dead_bytes) == (0, 0, 0)


def test_a_part_does_not_keep_columns_that_none_of_its_records_uses() -> None:
    nodes = b'{"data":2,"node":"m"},{"data":3,"node":"m"}'
    body = b'{"records":[{"data":1,"tag":"a","node":"n"},%b,{"data":4}]}' % nodes
    columns = parse_append(body, RecordLimits()).columns
    batch = render(columns, first_seq=9, times=array("q", [5, 6, 6, 7]))
    middle, end = batch.part(1, 2), batch.part(3, 3)
    assert (middle.tags, middle.nodes, middle.times, middle.first_ts) == (None, b"m", None, 6)
    assert (end.tags, end.nodes, end.times, end.first_ts, end.ends) == (None, None, None, 7, None)


@pytest.mark.parametrize("count", [1, 2, 20, 1000])
@pytest.mark.parametrize("field", ["", ',"tag":"some tag"', ',"tag":"t","node":"%d"'])
@pytest.mark.parametrize("own_times", [False, True])
def test_what_a_batch_costs_in_memory_is_known_within_a_tenth(
    count: int, field: str, own_times: bool
) -> None:
    records = ",".join(f'{{"data":{at}{field % at if "%" in field else field}}}' for at in range(count))
    columns = parse_append(f'{{"records":[{records}]}}'.encode(), RecordLimits()).columns
    stored = []
    for first_seq in range(10**12, 10**12 + 50):
        times = array("q", range(first_seq, first_seq + count)) if own_times and count > 1 else first_seq
        stored.append(memoryview(b"".join(render(columns, first_seq=first_seq, times=times).to_parts())))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        batches = [Batch.from_bytes(content) for content in stored]
        for at, batch in enumerate(batches):
            batch.lsn = 10**12 + at
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    measured = (after - before) / len(batches)
    assert 0.9 * measured <= batches[0].bytes_in_memory <= 1.1 * measured


def check_positions(batch: Batch, records: list[dict[str, Any]], naive: list[bytes]) -> None:
    count = len(naive)
    assert batch.live_bytes == sum(map(len, naive))
    for first in range(count):
        assert batch.ts(first) == records[first]["ts"]
        assert batch.start(first) == len(b",".join(naive[:first])) + (first > 0)
        assert batch.end(first) == len(b",".join(naive[: first + 1]))
        for last in range(first, count):
            part = naive[first : last + 1]
            assert bytes(batch.text(first, last)) == b",".join(part)
            assert batch.size(first, last) == sum(map(len, part))
            check_forms(batch, first, last, records)
            whole = len(b",".join(part))
            for limit in {0, len(part[0]) - 1, len(part[0]), whole - 1, whole, whole + 1, whole // 2}:
                fit = [at for at in range(first, last + 1) if len(b",".join(naive[first : at + 1])) <= limit]
                assert batch.index_within_bytes(first, last, limit) == (fit[-1] if fit else first - 1)
        for wanted in {1, len(naive[first]), len(naive[first]) + 1, sum(map(len, naive[first:]))}:
            enough = [at for at in range(first, count) if sum(map(len, naive[first : at + 1])) >= wanted]
            assert batch.index_from_size(first, wanted) == (enough[0] if enough else count - 1)
    for ts in {0, 2**53, *(record["ts"] + offset for record in records for offset in (-1, 0, 1))}:
        late = [index for index, record in enumerate(records) if record["ts"] >= ts]
        assert batch.index_from_ts(ts) == (late[0] if late else count)


def check_forms(batch: Batch, first: int, last: int, records: list[dict[str, Any]]) -> None:
    for tags, meta, data in product((False, True), repeat=3):
        shown = [text_of(record, tags=tags, meta=meta, data=data) for record in records[first : last + 1]]
        found = bytes(batch.text_as(first, last, tags=tags, meta=meta, data=data))
        assert found.decode() == ",".join(shown)


@pytest.mark.parametrize("first_seq", FIRST_SEQS)
@pytest.mark.parametrize("count", [1, 2, 12, 10_000])
def test_seqs_are_written_out_in_full_where_their_length_changes(first_seq: int, count: int) -> None:
    body = b'{"records":[' + b",".join([b'{"data":7}'] * count) + b"]}"
    batch = render(parse_append(body, RecordLimits()).columns, first_seq=first_seq, times=5)
    naive = [b'{"$seq":%d,"$ts":5,"data":7}' % seq for seq in range(first_seq, first_seq + count)]
    assert batch.blob == b",".join(naive)
    for index in {0, count // 2, count - 1}:
        assert bytes(batch.text(index, index)) == naive[index]
    assert batch.size(0, count - 1) == sum(map(len, naive))


def test_columns_that_nobody_uses_are_absent_and_one_node_is_kept_once() -> None:
    def batch(body: bytes) -> Batch:
        return render(parse_append(body, RecordLimits()).columns, first_seq=1, times=1)

    plain = batch(b'{"records":[{"data":1},{"data":2}]}')
    assert (plain.tags, plain.nodes, plain.times) == (None, None, None)
    assert plain.tag_list() is None and plain.node_list() is None
    one = batch(b'{"node":"n","records":[{"data":1},{"data":2}]}')
    assert one.nodes == b"n" and one.node_list() == ["n"]
    mixed = batch(b'{"node":"n","records":[{"data":1},{"data":2,"node":"m"},{"data":3,"tag":"t"}]}')
    assert mixed.node_list() == ["n", "m", "n"] and mixed.tag_list() == ["", "", "t"]
    assert repr(mixed) == f"<Batch 1..3 {len(mixed.blob)} B, 0 dead>"


def test_strings_are_worded_as_any_json_writer_would() -> None:
    every = [chr(code) for code in range(1, 0xD800)] + [chr(code) for code in range(0xE000, 0x11000)]
    assert msgspec.json.encode("".join(every)).decode() == json.dumps("".join(every), ensure_ascii=False)


# -- times


def resolved(times: list[int | None] | None, mode: str, uncapped: bool = False, count: int = 3) -> Any:
    found = resolve_times(times, count, now_ms=100, not_before=50, mode=mode, allow_future=uncapped)
    return found if isinstance(found, int) else list(found)


def test_arrival_ignores_what_the_client_says() -> None:
    assert resolved([1, 2, 3], "arrival") == 100
    assert resolve_times(None, 1, now_ms=100, not_before=150, mode="arrival", allow_future=False) == 150


def test_client_times_are_capped_at_arrival_and_never_go_back() -> None:
    assert resolved([60, 70, 65], "client-prefer") == [60, 70, 70]
    assert resolved([10, 60, 900], "client-prefer") == [50, 60, 100]
    assert resolved([60, None, 70], "client-prefer") == [60, 100, 100]
    assert resolved(None, "client-prefer") == 100
    assert resolved([60, 900, 80], "client-require", uncapped=True) == [60, 900, 900]


def test_times_that_come_out_the_same_are_kept_as_one() -> None:
    assert resolved([10, 20, 30], "client-prefer") == 50


def test_a_missing_client_time_names_the_record() -> None:
    with pytest.raises(InvalidRequest, match=r"records\[1\]\.ts"):
        resolved([60, None, 70], "client-require")
    with pytest.raises(InvalidRequest, match=r"records\[0\]\.ts"):
        resolved(None, "client-require")


def test_a_node_of_any_length_can_be_stored() -> None:
    """The bytes that every record shares have room for 16 bits; longer ones are counted record by record."""
    node = "n" * 70_000
    parsed = parse_append(
        b'{"node":"%b","records":[{"data":1},{"data":2}]}' % node.encode(),
        RecordLimits(node_bytes_max=100_000),
    )
    stored = Batch.from_bytes(memoryview(b"".join(render(parsed.columns, first_seq=1, times=5).to_parts())))
    assert [json.loads(bytes(stored.text(at, at)))["$node"] for at in (0, 1)] == [node, node]
