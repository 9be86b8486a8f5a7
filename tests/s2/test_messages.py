"""Goal: records, acks and frames are on the wire what the S2 API says (s2 §4, §10, §13, §14).

Method: vectors that were taken off the wire, and tables of what is refused with which code.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.s2_errors import STATUS_OF, S2Error, to_s2_error
from gateway.s2 import record_formats, session_frames
from gateway.s2.record_formats import Input, InputRecord
from streams.protocol import errors
from streams.protocol.messages.s2 import AppendStreamReply
from streams.protocol.model import binary_records
from tests.support.machines import sampled

MIB = 1024 * 1024


def code_of(call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(S2Error) as refused:
        call(*arguments, **options)  # type: ignore[operator]
    return refused.value.code


# -- protobuf


def test_a_batch_is_read_as_it_is_on_the_wire() -> None:
    one = record_formats.input_from_protobuf(bytes.fromhex("0a041a026869"))
    assert (one.tails, one.match_seq_num, one.fencing_token) == (
        [binary_records.tail_of([], b"hi")],
        None,
        None,
    )
    fence = record_formats.input_from_protobuf(bytes.fromhex("0a1008001207120566656e63651a03746f6b10001a00"))
    assert (fence.fence, fence.match_seq_num, fence.fencing_token) == ("tok", 0, "")
    assert fence.times == array("q", [0])
    trim = record_formats.input_from_protobuf(
        b"\x0a\x12" + bytes.fromhex("120612047472696d1a080000000000000005")
    )
    assert (trim.trims, trim.command_indexes) == ([(0, 5)], {0})


@sampled(150)
@given(
    st.lists(st.tuples(st.sampled_from([1, 100, 127, 128, 130, 16_400]), st.integers(1, 4)), max_size=4),
    st.sampled_from(["", "1000", "1a0174", "10071a0174", "0a00", "0a021a00", "0a041a026869", "3001", "0a"]),
    st.sampled_from([b"", b"\x0a\x0b\x08\x07\x12\x03\x0a\x01\x6b\x1a\x02hi"]),
    st.integers(0, 40),
)
def test_a_batch_of_bodies_is_read_in_stretches_as_it_is_field_by_field(
    stretches: list[tuple[int, int]], behind: str, between: bytes, cut: int
) -> None:
    """Whatever stands behind and between them, and wherever it breaks off."""
    data = b""
    for size, count in stretches:
        record = b"\x1a" + binary_records.varint(size) + b"x" * size
        data += (b"\x0a" + binary_records.varint(len(record)) + record) * count + between
    data += bytes.fromhex(behind)
    data = data[: len(data) - cut]

    def outcome(read: Callable[[bytes], Input]) -> object:
        try:
            found = read(data)
        except S2Error as error:
            return error.code
        return {name: getattr(found, name) for name in Input.__slots__}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_formats, "_plain_input", lambda _: None)
        expected = outcome(record_formats.input_from_protobuf)
    assert outcome(record_formats.input_from_protobuf) == expected


@pytest.mark.parametrize("text", ["0a85001a02686922", "0a041a82006869", "0a051a8200686920"])
def test_a_batch_with_numbers_that_are_too_long_is_not_read_in_stretches(text: str) -> None:
    assert record_formats._plain_input(bytes.fromhex(text)) is None


def test_an_ack_has_all_its_positions_even_when_they_are_zero() -> None:
    assert (
        record_formats.ack_as_protobuf(AppendStreamReply(0, 1000, 1, 1000)).hex()
        == "0a0310e8071205080110e8071a05080110e807"
    )
    assert record_formats.ack_as_protobuf(AppendStreamReply(0, 0, 0, 0)).hex() == "0a0012001a00"


def test_a_heartbeat_is_a_batch_of_nothing_but_the_tail() -> None:
    assert (
        session_frames.frame(record_formats.batch_as_protobuf(b"", (1, 1000))).hex()
        == "000008001205080110e807"
    )
    assert record_formats.batch_as_protobuf(b"", (0, 0)).hex() == "1200"
    record = binary_records.entry(0, 1000, binary_records.tail_of([(b"k", b"v")], b"hi"))
    found = session_frames.frame(record_formats.batch_as_protobuf(record, None))
    assert found.hex() == "000012000a0f10e8071a060a016b12017622026869"


@pytest.mark.parametrize("data", [b"\x0a\x05x", b"\x0a\x02\x1a\x05", b"\x1a\x01\xff", b"\x08\xff"])
def test_what_is_no_batch_is_bad_proto(data: bytes) -> None:
    assert code_of(record_formats.input_from_protobuf, data) == "bad_proto"


@sampled(40)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 2**40),
            st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.binary(max_size=4)), max_size=2),
            st.binary(max_size=200),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_batch_is_read_as_it_was_written(
    records: list[tuple[int | None, list[tuple[bytes, bytes]], bytes]],
) -> None:
    data = b""
    for time, headers, body in records:
        record = b"" if time is None else b"\x08" + binary_records.varint(time)
        for name, value in headers:
            header = b"\x0a%b%b\x12%b%b" % (
                binary_records.varint(len(name)),
                name,
                bytes([len(value)]),
                value,
            )
            record += b"\x12" + binary_records.varint(len(header)) + header
        record += b"\x1a%b%b" % (binary_records.varint(len(body)), body)
        data += b"\x0a" + binary_records.varint(len(record)) + record
    found = record_formats.input_from_protobuf(data)
    assert found.tails == [binary_records.tail_of(headers, body) for _, headers, body in records]
    if any(time is not None for time, _, _ in records):
        assert list(found.times) == [-1 if time is None else time for time, _, _ in records]
    else:
        assert not found.times


# -- what a batch may hold


def command(operation: bytes, body: bytes = b"") -> list[InputRecord]:
    return [InputRecord(None, [(b"", operation)], body)]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [InputRecord(None, [], b"")] * 1001,
        [InputRecord(None, [], b"x" * MIB)],
        [InputRecord(None, [], b"x" * (MIB // 2))] * 2,
        [InputRecord(None, [(b"", b"fence"), (b"a", b"b")], b"")],
        command(b"explode"),
        command(b"trim", b"short"),
        command(b"fence", b"\xff"),
        command(b"fence", b"x" * 37),
    ],
    ids=[
        "none",
        "too many",
        "too large",
        "too large together",
        "a name is empty",
        "no such command",
        "trim of five bytes",
        "a token that is no text",
        "a long token",
    ],
)
def test_a_batch_that_may_not_be_is_invalid(records: list[InputRecord]) -> None:
    assert code_of(Input, records) == "invalid"


def test_the_largest_batch_is_taken() -> None:
    assert Input([InputRecord(None, [], b"x" * (MIB - 8))]).metered_bytes == MIB
    assert Input([InputRecord(None, [], b"")] * 1000).count == 1000
    assert code_of(Input, [InputRecord(None, [], b"")], None, "x" * 37) == "invalid"


# -- JSON


def test_json_and_base64_say_the_same() -> None:
    raw = record_formats.input_from_json(
        b'{"records":[{"timestamp":5,"headers":[["k","v"]],"body":"hi"},{}],"match_seq_num":3}',
        is_base64=False,
    )
    coded = record_formats.input_from_json(
        b'{"records":[{"timestamp":5,"headers":[["aw==","dg=="]],"body":"aGk="},{}],"match_seq_num":3}',
        is_base64=True,
    )
    assert raw.tails == coded.tails == [binary_records.tail_of([(b"k", b"v")], b"hi"), b""]
    assert (list(raw.times), raw.match_seq_num) == ([5, -1], 3)


@pytest.mark.parametrize(
    ("body", "is_base64", "code"),
    [
        (b"{", False, "bad_json"),
        (b"{}", False, "bad_json"),
        (b'{"records":[{"body":5}]}', False, "bad_json"),
        (b'{"records":[{"headers":[["a"]]}]}', False, "bad_json"),
        (b'{"records":[{"timestamp":-1}]}', False, "bad_json"),
        (b'{"records":[{}],"match_seq_num":18446744073709551616}', False, "bad_json"),
        (b'{"records":[{"body":"?"}]}', True, "invalid"),
        (b'{"records":[]}', False, "invalid"),
    ],
)
def test_json_that_is_not_a_batch_is_refused(body: bytes, is_base64: bool, code: str) -> None:
    assert code_of(record_formats.input_from_json, body, is_base64=is_base64) == code


def test_a_batch_as_json_leaves_out_what_is_empty() -> None:
    text = binary_records.SEPARATOR.join(
        (
            binary_records.entry(7, 5, binary_records.tail_of([(b"k", b"\xff")], b"a")),
            binary_records.entry(8, 5, b""),
        )
    )
    records = list(binary_records.records_of(text))
    assert json.loads(record_formats.batch_as_json(records, None, is_base64=True)) == {
        "records": [
            {"seq_num": 7, "timestamp": 5, "headers": [["aw==", "/w=="]], "body": "YQ=="},
            {"seq_num": 8, "timestamp": 5},
        ]
    }
    raw = json.loads(record_formats.batch_as_json(records, (9, 5), is_base64=False))
    assert raw["records"][0]["headers"] == [["k", "�"]]
    assert raw["tail"] == {"seq_num": 9, "timestamp": 5}


# -- frames


def test_a_terminal_frame_carries_a_status_and_the_body_of_the_answer() -> None:
    error = to_s2_error(errors.SeqMismatch("", next_seq=1))
    assert session_frames.terminal(error).hex() == "000019" + "80" + "019c" + b'{"seq_num_mismatch":1}'.hex()


@pytest.mark.parametrize("codec", [session_frames.NONE, session_frames.ZSTD, session_frames.GZIP])
@pytest.mark.parametrize("size", [0, 1, 1023, 100_000])
def test_frames_come_back_whatever_they_are_cut_into(codec: int, size: int) -> None:
    bodies = [b"x" * size, b"second"]
    data = b"".join(session_frames.frame(body, codec=codec, advises_reconnect=True) for body in bodies)
    assert bool(data[3] >> 5) == (codec != session_frames.NONE and size >= 1024)
    for step in (1, 7, len(data)):
        receiver = session_frames.FrameReceiver()
        found = []
        for at in range(0, len(data), max(step, len(data) // 50)):
            found += receiver.feed_untrusted(data[at : at + max(step, len(data) // 50)])
        receiver.end_untrusted()
        assert found == bodies


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\0",
        b"\0\0\x02\x80?",
        b"\0\0\x02\x60?",
        b"\0\0\x02\x20?",
        b"\0\0\x02\x40?",
        (1 + len(bomb := gzip.compress(bytes(3 * MIB)))).to_bytes(3, "big") + b"\x40" + bomb,
        (1 + len(boom := zstandard.compress(bytes(3 * MIB)))).to_bytes(3, "big") + b"\x20" + boom,
    ],
    ids=["empty", "too long", "terminal", "codec 3", "no zstd", "no gzip", "gzip bomb", "zstd bomb"],
)
def test_a_bad_frame_is_told_as_one(data: bytes) -> None:
    assert code_of(lambda: list(session_frames.FrameReceiver().feed_untrusted(data))) == "bad_frame"


def test_a_session_may_not_end_in_the_middle_of_a_frame() -> None:
    receiver = session_frames.FrameReceiver()
    assert list(receiver.feed_untrusted(b"\0\0\x05\0ab")) == []
    assert code_of(receiver.end_untrusted) == "bad_frame"


def test_frames_are_compressed_with_the_best_that_is_accepted() -> None:
    assert session_frames.codec_for(None) == session_frames.NONE
    assert session_frames.codec_for("gzip, deflate") == session_frames.GZIP
    assert session_frames.codec_for("gzip;q=1, zstd;q=0.5") == session_frames.ZSTD


# -- errors


def test_every_error_of_ours_has_a_status_in_theirs() -> None:
    details = {"token": "", "next_seq": 0, "seq_num": 0, "timestamp": 0}
    for kind in errors.BY_CODE.values():
        found = to_s2_error(kind("why", **details))
        assert found.code in STATUS_OF or found.status in (412, 416)
        assert found.body


def test_nothing_that_may_have_happened_is_told_as_if_it_had_not() -> None:
    assert to_s2_error(errors.OutcomeUnknown()).code == "unavailable"
    assert to_s2_error(errors.ShardUnavailable()).code == "hot_server"
    assert to_s2_error(errors.Throttled("", limit="boxes")).code == "quota_exhausted"
    assert to_s2_error(errors.Throttled("", limit="in_flight")).code == "rate_limited"
