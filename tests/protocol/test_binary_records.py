"""Goal: binary records are kept as the records of a protobuf `ReadBatch`, byte for byte (s2 §10).

Method: vectors that were taken off the wire, and records of any shape there and back.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.model import binary_records
from streams.protocol.model.binary_records import BadProtobuf
from streams.protocol.model.records import BINARY, Batch, render_binary
from tests.support.machines import sampled

HEADER = st.tuples(st.binary(max_size=5), st.binary(max_size=200))
RECORD = st.tuples(st.lists(HEADER, max_size=3), st.binary(max_size=300))


def test_a_record_is_what_the_wire_has() -> None:
    batch = render_binary([binary_records.tail_of([(b"k", b"v")], b"hi")], first_seq=1, times=1000)
    assert (binary_records.SEPARATOR + batch.blob).hex() == "0a0f10e8071a060a016b12017622026869"


@sampled(60)
@given(
    records=st.lists(RECORD, min_size=1, max_size=8),
    first_seq=st.sampled_from([1, 2, 128, 129, 2**40]),
    base=st.sampled_from([0, 5, 1_700_000_000_000]),
    step=st.sampled_from([0, 300]),
)
def test_records_of_any_shape_come_back_as_they_were(
    records: list[tuple[list[tuple[bytes, bytes]], bytes]], first_seq: int, base: int, step: int
) -> None:
    times = array("q", [base + step * at for at in range(len(records))]) if step else base
    tails = [binary_records.tail_of(headers, body) for headers, body in records]
    batch = Batch.from_bytes(
        memoryview(b"".join(render_binary(tails, first_seq=first_seq, times=times).to_parts()))
    )
    assert batch.encoding == BINARY
    found = list(binary_records.records_of(batch.blob))
    assert [(list(each.headers), each.body) for each in found] == records
    assert [each.seq_num for each in found] == list(range(first_seq - 1, first_seq - 1 + len(records)))
    assert [each.timestamp for each in found] == [base + step * at for at in range(len(records))]
    for first in range(batch.count):
        for last in range(first, batch.count):
            part = batch.part(first, last)
            assert bytes(batch.text(first, last)) == part.blob
            assert list(binary_records.records_of(part.blob)) == found[first : last + 1]
            assert batch.size(first, last) == sum(batch.sizes()[first : last + 1])
    assert list(binary_records.metered_sizes(memoryview(batch.blob))) == [each.metered_size for each in found]
    assert [each.metered_size for each in found] == [
        8 + len(body) + sum(2 + len(name) + len(value) for name, value in headers)
        for headers, body in records
    ]


@pytest.mark.parametrize("first_seq", [1, 2, 100, 128, 129, 130, 16_300, 16_384, 16_385, 2**21 + 1, 2**40])
@pytest.mark.parametrize("time", [0, 7, 1_700_000_000_000])
def test_records_that_are_joined_at_once_are_those_that_are_joined_one_by_one(
    first_seq: int, time: int
) -> None:
    tails = [binary_records.tail_of([], b"x" * (120 + at % 9)) for at in range(300)]
    blob, ends = binary_records.join_records(tails, first_seq=first_seq, times=time)
    entries = [binary_records.entry(first_seq - 1 + at, time, tail) for at, tail in enumerate(tails)]
    assert blob == binary_records.SEPARATOR.join(entries)
    assert list(ends) == list(accumulate(map(len, entries)))


def test_a_sealed_record_says_its_size_and_nothing_else() -> None:
    batch = render_binary([binary_records.sealed_tail(b"\1\2", size=300)], first_seq=5, times=9)
    (record,) = binary_records.records_of(batch.blob)
    assert (record.ciphertext, record.metered_size, record.headers, record.body) == (b"\1\2", 300, [], b"")
    assert list(binary_records.metered_sizes(batch.blob)) == [300]


def test_fields_that_are_not_known_are_passed_over() -> None:
    known = b"\x22\x01x"
    others = b"\x29" + b"8" * 8 + b"\x2d" + b"4" * 4 + b"\x30\x05"
    text = bytes([len(known + others)]) + others + known
    (record,) = binary_records.records_of(text)
    assert record.body == b"x"
    assert binary_records.header_of(b"\x1a\x01?\x0a\x01n", 0, 6) == (b"n", b"")


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x05x", b"\x02x", b"\x0b", b"\x08" + b"\xff" * 11, b"\x2d\x00"],
    ids=["longer than its message", "field 0", "a group", "an endless number", "cut short"],
)
def test_what_is_no_protobuf_is_told(data: bytes) -> None:
    with pytest.raises(BadProtobuf):
        list(binary_records.fields(data, 0, len(data)))
