"""Converts records between protobuf or JSON and their stored form (s2 §10, §14). Pure.

Protobuf is encoded and decoded by hand. There are seven small messages, and a library would create an object
for every record and header, which would cost more than the rest of an append.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import orjson

from gateway.requests.request import Buffer
from gateway.requests.s2_errors import S2Error
from gateway.s2.fields import TIME_MAX, U64_MAX, bad_json
from streams.protocol.messages.s2 import (
    BATCH_METERED_MAX,
    BATCH_RECORDS_MAX,
    STREAM_TOKEN_BYTES_MAX,
    AppendHead,
    AppendStreamReply,
    Cipher,
)
from streams.protocol.model import binary_records
from streams.protocol.model.binary_records import (
    BadProtobuf,
    BinaryRecord,
    Header,
    read_varint,
    varint,
    wrong_wire_type,
)
from streams.protocol.model.names import quote

_TRIM_BYTES = 8
_HEADERS_MAX = 2**24


class InputRecord(NamedTuple):
    """A record as the client sent it."""

    timestamp: int | None
    headers: list[Header]
    body: bytes


class Input:
    """One validated batch to append, with the effects of its command records."""

    __slots__ = (
        "account",
        "fence",
        "fencing_token",
        "match_seq_num",
        "metered_bytes",
        "sizes",
        "tails",
        "times",
        "trims",
    )

    def __init__(
        self, records: list[InputRecord], match_seq_num: int | None = None, fencing_token: str | None = None
    ) -> None:
        self._begin(len(records), match_seq_num, fencing_token)
        self.sizes: list[int] = []
        for index, record in enumerate(records):
            if record.headers:
                self._check_headers(index, record)
            self.sizes.append(binary_records.metered_of(record.headers, record.body))
        self._measure()
        self.tails = [binary_records.tail_of(record.headers, record.body) for record in records]
        self.times = array("q")
        if any(record.timestamp is not None for record in records):
            for record in records:
                # Times are signed in the log; a time in the far future would be capped anyway.
                self.times.append(-1 if record.timestamp is None else min(record.timestamp, TIME_MAX))

    @classmethod
    def of_bodies(
        cls, tails: list[bytes], sizes: list[int], match_seq_num: int | None, fencing_token: str | None
    ) -> Input:
        """Build a batch of records without headers and times. `tails` are the records in stored form."""
        batch = cls.__new__(cls)
        batch._begin(len(tails), match_seq_num, fencing_token)
        batch.sizes, batch.tails = sizes, tails
        batch._measure()
        batch.times = array("q")
        return batch

    def _begin(self, count: int, match_seq_num: int | None, fencing_token: str | None) -> None:
        if not 1 <= count <= BATCH_RECORDS_MAX:
            raise _invalid(
                f"records: a batch must have 1 to {BATCH_RECORDS_MAX} records, this one has {count}"
            )
        if fencing_token is not None and len(fencing_token.encode()) > STREAM_TOKEN_BYTES_MAX:
            raise _invalid(f"fencing_token: is longer than {STREAM_TOKEN_BYTES_MAX} bytes")
        #: The key whose limits apply, or "".
        self.account = ""
        self.match_seq_num = match_seq_num
        self.fencing_token = fencing_token
        self.fence: str | None = None
        self.trims: list[tuple[int, int]] = []

    def _measure(self) -> None:
        self.metered_bytes = sum(self.sizes)
        if self.metered_bytes > BATCH_METERED_MAX:
            raise _invalid(
                f"records: {self.metered_bytes} metered bytes, at most {BATCH_METERED_MAX} are allowed"
            )

    def _check_headers(self, index: int, record: InputRecord) -> None:
        """Check headers and record commands: a single header with an empty name makes a record a command."""
        if len(record.headers) >= _HEADERS_MAX:
            raise _invalid(f"records[{index}].headers: has more than {_HEADERS_MAX - 1} headers")
        if all(name for name, _ in record.headers):
            return
        if len(record.headers) > 1:
            raise _invalid(f"records[{index}].headers: a name is empty")
        operation, body = record.headers[0][1], record.body
        if operation == b"fence":
            try:
                token = str(body, "utf-8")
            except UnicodeDecodeError:
                raise _invalid(f"records[{index}].body: a fencing token must be UTF-8") from None
            if len(body) > STREAM_TOKEN_BYTES_MAX:
                raise _invalid(f"records[{index}].body: is longer than {STREAM_TOKEN_BYTES_MAX} bytes")
            self.fence = token
        elif operation == b"trim":
            if len(body) != _TRIM_BYTES:
                raise _invalid(f"records[{index}].body: a trim point has {_TRIM_BYTES} bytes")
            self.trims.append((index, int.from_bytes(body, "big")))
        else:
            name = quote(str(operation[:32], "utf-8", "replace"))
            raise _invalid(f"records[{index}].headers: {name} is not a command")

    @property
    def count(self) -> int:
        return len(self.tails)

    @property
    def command_indexes(self) -> frozenset[int]:
        """Return the indexes of command records, which are never encrypted."""
        return frozenset(index for index, tail in enumerate(self.tails) if _is_command(tail))

    def wire(self, box: str, *, cipher: Cipher | None, tails: list[bytes], chain: str) -> tuple[bytes, bytes]:
        """Return head and body of the request to the shard."""
        head = AppendHead(
            box,
            array("I", accumulate(map(len, tails))).tobytes(),
            self.times.tobytes(),
            cipher,
            self.match_seq_num,
            self.fencing_token,
            self.fence,
            tuple(self.trims),
            chain,
            self.account,
        )
        return msgspec.msgpack.encode(head), b"".join(tails)


def _is_command(tail: bytes) -> bool:
    """Return True for a command record: its first header has no name (bytes 1a len 12)."""
    return len(tail) > 2 and tail[0] == 0x1A and tail[1] < 128 and tail[2] == 0x12


def _invalid(message: str) -> S2Error:
    return S2Error("invalid", message)


# ---------------------------------------------------------------------------------------------------
# Protobuf


def input_from_protobuf(data: bytes) -> Input:
    try:
        return _plain_input(data) or Input(*_append_input(data))
    except (BadProtobuf, IndexError, UnicodeDecodeError) as error:
        raise S2Error("bad_proto", f"not an AppendInput: {error}") from None


def _append_input(data: bytes) -> tuple[list[InputRecord], int | None, str | None]:
    records: list[InputRecord] = []
    match_seq_num: int | None = None
    fencing_token: str | None = None
    for tag, number, start, stop in binary_records.fields(data, 0, len(data)):
        if tag == 0x0A:
            records.append(_append_record(data, start, stop))
        elif tag == 0x10:
            match_seq_num = number
        elif tag == 0x1A:
            fencing_token = str(data[start:stop], "utf-8")
        elif tag >> 3 <= 3:
            raise wrong_wire_type(tag)
    return records, match_seq_num, fencing_token


def _plain_input(data: bytes) -> Input | None:
    """Decode a batch whose records have only bodies, the common case.

    Returns None for any other batch and for malformed input; the caller then decodes field by field.

    A record is `0a size 1a size body`; its stored form (`binary_records.tail_of`) is `22 size body`. Records
    of one size start with the same bytes, so a run of them is sliced without decoding their sizes again.
    """
    tails: list[bytes] = []
    sizes: list[int] = []
    at, end = 0, len(data)
    try:
        while at < end and data[at] == 0x0A:
            size, start = _minimal_varint(data, at + 1)
            if data[start] != 0x1A:
                return None
            body_bytes, body = _minimal_varint(data, start + 1)
            if body + body_bytes != start + size or not body_bytes:
                return None
            prefix, stride, cut = data[at:body], body + body_bytes - at, start + 1 - at
            count = len(tails)
            while data.startswith(prefix, at) and at + stride <= end:
                tails.append(b"\x22" + data[at + cut : at + stride])
                at += stride
            if len(tails) == count:
                return None
            sizes += [binary_records.metered_of((), b"") + body_bytes] * (len(tails) - count)
    except (BadProtobuf, IndexError):
        return None
    others: tuple[list[InputRecord], int | None, str | None] = ([], None, None)
    if at < end:
        others = _append_input(data[at:])
    return None if others[0] or not tails else Input.of_bodies(tails, sizes, *others[1:])


def _minimal_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint of at most three bytes in its shortest form. Return the number and its end."""
    number, end = read_varint(data, at)
    if end - at > 3 or (end - at > 1 and not data[end - 1]):
        raise BadProtobuf
    return number, end


def _append_record(data: bytes, at: int, end: int) -> InputRecord:
    if at < end and data[at] == 0x1A:  # only a body, as in most records
        size, start = read_varint(data, at + 1)
        if start + size == end:
            return InputRecord(None, [], data[start:end])
    timestamp: int | None = None
    headers: list[Header] = []
    body = b""
    for tag, number, start, stop in binary_records.fields(data, at, end):
        if tag == 0x12:
            headers.append(binary_records.header_of(data, start, stop))
        elif tag == 0x1A:
            body = data[start:stop]
        elif tag == 0x08:
            timestamp = number
        elif tag >> 3 <= 3:
            raise wrong_wire_type(tag)
    return InputRecord(timestamp, headers, body)


def _position(seq_num: int, timestamp: int) -> bytes:
    text = b"\x08%b" % varint(seq_num) if seq_num else b""
    return text + (b"\x10%b" % varint(timestamp) if timestamp else b"")


def ack_as_protobuf(ack: AppendStreamReply) -> bytes:
    """Encode an ack. All three positions are present, even if their fields are zero."""
    start, end = _position(ack.start_seq_num, ack.start_ts), _position(ack.end_seq_num, ack.end_ts)
    return b"\x0a%b%b\x12%b%b\x1a%b%b" % (varint(len(start)), start, *(varint(len(end)), end) * 2)


def batch_parts(records: Buffer, tail: tuple[int, int] | None) -> list[Buffer]:
    """Return the parts of an encoded batch. `records` are stored entries with separators between them."""
    parts: list[Buffer] = [binary_records.SEPARATOR, records] if records else []
    if tail is not None:
        position = _position(*tail)
        parts.append(b"\x12%b%b" % (varint(len(position)), position))
    return parts


def batch_as_protobuf(records: Buffer, tail: tuple[int, int] | None) -> bytes:
    return b"".join(batch_parts(records, tail))


# ---------------------------------------------------------------------------------------------------
# JSON


class _JsonRecord(msgspec.Struct, gc=False):
    timestamp: int | None = None
    headers: list[tuple[str, str]] = []
    body: str = ""


class _JsonInput(msgspec.Struct):
    records: list[_JsonRecord]
    match_seq_num: int | None = None
    fencing_token: str | None = None


_decode_input = msgspec.json.Decoder(_JsonInput).decode


def input_from_json(data: bytes, *, is_base64: bool) -> Input:
    try:
        body = _decode_input(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(error) from None
    numbers = [body.match_seq_num, *(record.timestamp for record in body.records)]
    if any(number is not None and not 0 <= number <= U64_MAX for number in numbers):
        raise S2Error("bad_json", "body: a number is not an unsigned 64-bit integer")
    if body.fencing_token is not None and len(body.fencing_token.encode()) > STREAM_TOKEN_BYTES_MAX:
        raise S2Error("bad_json", f"fencing_token: is longer than {STREAM_TOKEN_BYTES_MAX} bytes")
    to_bytes = _from_base64 if is_base64 else str.encode
    records = [
        InputRecord(
            record.timestamp,
            [(to_bytes(name), to_bytes(value)) for name, value in record.headers],
            to_bytes(record.body) if record.body else b"",
        )
        for record in body.records
    ]
    return Input(records, body.match_seq_num, body.fencing_token)


def _from_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (NotBase64, ValueError):
        raise _invalid("records: a header or body is not valid base64") from None


def position(seq_num: int, timestamp: int) -> dict[str, int]:
    return {"seq_num": seq_num, "timestamp": timestamp}


def ack_as_json(ack: AppendStreamReply) -> bytes:
    end = position(ack.end_seq_num, ack.end_ts)
    return orjson.dumps({"start": position(ack.start_seq_num, ack.start_ts), "end": end, "tail": end})


def batch_as_json(records: list[BinaryRecord], tail: tuple[int, int] | None, *, is_base64: bool) -> bytes:
    json_records: list[dict[str, Any]] = []
    to_text = _as_base64 if is_base64 else _as_text
    for record in records:
        each: dict[str, Any] = position(record.seq_num, record.timestamp)
        if record.headers:
            each["headers"] = [(to_text(name), to_text(value)) for name, value in record.headers]
        if record.body:
            each["body"] = to_text(record.body)
        json_records.append(each)
    answer: dict[str, Any] = {"records": json_records}
    if tail is not None:
        answer["tail"] = position(*tail)
    return orjson.dumps(answer)


def _as_base64(data: bytes) -> str:
    return b64encode(data).decode()


def _as_text(data: bytes) -> str:
    return str(data, "utf-8", "replace")
