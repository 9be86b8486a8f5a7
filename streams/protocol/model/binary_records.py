"""Encodes and decodes binary records (headers and a body) of the S2 API, as batches store them. Pure.

The blob of a batch has the records in the form of a protobuf `ReadBatch`, so a read is a slice of it:

    0a  len  { 08 seq_num · 10 timestamp · 1a header … · 22 body }   0a  len  { … }
    └ tag    └────────────── record 0, end(0) ──────────────────┘   └ tag of record 1, in the place of
      (not stored)                                                     the comma of JSON

The tag of the first record is not stored. So in both encodings there is one byte between two records, and the
code that computes positions in a batch is the same. The **tail** of a record is all bytes after its
timestamp. It is encoded when the record arrives; the log and the readers copy it without decoding it.

A sealed record has one field 15 in place of headers and body: `metered size varint · ciphertext of the tail`.
A gateway that has the key decrypts it (`gateway/s2/ciphers.py`).

**Seqs.** The first record of a stream is number 0, the first seq of a box is 1. `seq_num = seq - 1`, and
only this file converts them. So the next `seq_num` of a stream is the head seq of its box. To read from
`seq_num` n, a reader passes n as its cursor: the cursor is the last seq that it does not need.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import orjson

#: Between two records of a batch: the tag of field 1, bytes.
SEPARATOR = b"\x0a"

_SEQ, _TIME, _HEADER, _BODY, _SEALED = 0x08, 0x10, 0x1A, 0x22, 0x7A
_HEADER_NAME, _HEADER_VALUE = 0x0A, 0x12

Header = tuple[bytes, bytes]


class BadProtobuf(ValueError):
    """The bytes are not the message that was expected."""


class BinaryRecord(NamedTuple):
    seq_num: int
    timestamp: int
    headers: Sequence[Header]
    body: bytes
    #: The encrypted headers and body; b"" when the record is not encrypted.
    ciphertext: bytes = b""
    #: Of a sealed record: its metered bytes.
    sealed_size: int = 0

    @property
    def metered_size(self) -> int:
        return self.sealed_size if self.ciphertext else metered_of(self.headers, self.body)


def seq_of(seq_num: int) -> int:
    """Return the seq of the record that S2 numbers `seq_num`."""
    return seq_num + 1


def metered_of(headers: Sequence[Header], body: bytes) -> int:
    """Return the metered size of a record, which S2 defines independent of encoding."""
    size = 8 + len(body)
    for name, value in headers:
        size += 2 + len(name) + len(value)
    return size


# ---------------------------------------------------------------------------------------------------
# Protobuf: the part that these messages use

_SMALL = [bytes([number]) for number in range(128)]
#: The tag of `seq_num` and the first byte of its varint: if it is the only byte, and if more bytes follow.
_FIRSTS = [bytes((_SEQ, low)) for low in range(128)]
_FIRSTS_OF_MORE = [bytes((_SEQ, low | 128)) for low in range(128)]


def varint(number: int) -> bytes:
    if number < 128:
        return _SMALL[number]
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it."""
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    number, shift = byte & 127, 7
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            if number > 0xFFFFFFFFFFFFFFFF:
                raise BadProtobuf("a number has more than 64 bits")
            return number, at
        shift += 7
        if shift > 63:
            raise BadProtobuf("a number has more than ten bytes")


def fields(data: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, number or 0, start, end) of every field; its bytes are those from `start` to `end`."""
    while at < end:
        tag, at = read_varint(data, at)
        kind = tag & 7
        if not 8 <= tag <= 0xFFFFFFFF:
            raise BadProtobuf("a field has the number 0, or one that is too large")
        if kind == 2:
            size, at = read_varint(data, at)
            if size > end - at:
                raise BadProtobuf("a field is longer than its message")
            yield tag, 0, at, at + size
            at += size
        elif kind == 0:
            number, at = read_varint(data, at)
            yield tag, number, at, at
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
            yield tag, 0, at, at
        else:
            raise BadProtobuf(f"a field has the unknown wire type {kind}")
    if at > end:
        raise BadProtobuf("a field is longer than its message")


def wrong_wire_type(tag: int) -> BadProtobuf:
    """Return the error for a known field with a wire type that it cannot have."""
    return BadProtobuf(f"field {tag >> 3} has the wrong wire type")


def header_of(data: bytes, at: int, end: int) -> Header:
    name = value = b""
    for tag, _, start, stop in fields(data, at, end):
        if tag == _HEADER_NAME:
            name = data[start:stop]
        elif tag == _HEADER_VALUE:
            value = data[start:stop]
        elif tag >> 3 <= 2:
            raise wrong_wire_type(tag)
    return name, value


# ---------------------------------------------------------------------------------------------------
# Writing


def tail_of(headers: Sequence[Header], body: bytes) -> bytes:
    """Encode the tail of a record: all bytes after its timestamp."""
    if not headers:
        return b"\x22%b%b" % (varint(len(body)), body) if body else b""
    parts: list[bytes] = []
    for name, value in headers:
        header = b"\x0a%b%b" % (varint(len(name)), name) if name else b""
        if value:
            header += b"\x12%b%b" % (varint(len(value)), value)
        parts.append(b"\x1a%b%b" % (varint(len(header)), header))
    if body:
        parts.append(b"\x22%b%b" % (varint(len(body)), body))
    return b"".join(parts)


def sealed_tail(ciphertext: bytes, *, size: int) -> bytes:
    """Return the tail of an encrypted record; `size` is its metered size."""
    content = varint(size) + ciphertext
    return b"\x7a%b%b" % (varint(len(content)), content)


def entry(seq_num: int, timestamp: int, tail: bytes) -> bytes:
    """Encode one record of a batch, without the tag before it."""
    seq = b"\x08%b" % varint(seq_num) if seq_num else b""
    time = b"\x10%b" % varint(timestamp) if timestamp else b""
    return b"%b%b%b%b" % (varint(len(seq) + len(time) + len(tail)), seq, time, tail)


def _heads(number: int, count: int, time: bytes) -> list[bytes]:
    """Encode the fields before the tails of `count` records, from `seq_num` `number` on. `time` is the
    encoded timestamp, the same for all of them.

    Within a block of 128, numbers differ only in the first byte of their varints. So the heads of a block are
    built by one list expression.
    """
    heads: list[bytes] = []
    end = number + count
    if number == 0 and count:  # a field that is zero is left out
        heads.append(time)
        number = 1
    while number < end:
        block_end = min(end, (number | 127) + 1)
        rest = (varint(number >> 7) if number > 127 else b"") + time
        firsts = _FIRSTS_OF_MORE if number > 127 else _FIRSTS
        heads += [first + rest for first in firsts[number & 127 : ((block_end - 1) & 127) + 1]]
        number = block_end
    return heads


def join_records(
    tails: Sequence[bytes], *, first_seq: int, times: int | Sequence[int]
) -> tuple[bytes, array[int]]:
    """Return the blob of a batch, and for each record the total size of all records up to it."""
    number, count = first_seq - 1, len(tails)
    if isinstance(times, int):
        heads = _heads(number, count, b"\x10%b" % varint(times) if times else b"")
        lengths = list(map(add, map(len, heads), map(len, tails)))
        sizes = {length: varint(length) for length in set(lengths)}  # mostly one or a few
        prefixes = [sizes[length] + head for length, head in zip(lengths, heads, strict=True)]
        totals = {length: length + len(size) for length, size in sizes.items()}
        # In one piece, with one copy of each tail.
        parts: list[bytes] = [SEPARATOR] * (3 * count)
        parts[0::3], parts[1::3] = prefixes, tails
        parts.pop()
        return b"".join(parts), array("I", accumulate(map(totals.__getitem__, lengths)))
    entries = [
        entry(seq_num, time, tail)
        for seq_num, (time, tail) in enumerate(zip(times, tails, strict=True), number)
    ]
    return SEPARATOR.join(entries), array("I", accumulate(map(len, entries)))


# ---------------------------------------------------------------------------------------------------
# Reading


def records_of(text: bytes) -> Iterator[BinaryRecord]:
    """Decode a part of a blob: records with a separator between them."""
    at, end = 0, len(text)
    while at < end:
        size, at = read_varint(text, at)
        yield _record(text, at, at + size)
        at += size + 1


def metered_sizes(text: bytes | memoryview) -> Iterator[int]:
    """Yield the metered size of each record in a part of a blob, without copying."""
    at, end = 0, len(text)
    while at < end:
        size, at = read_varint(text, at)
        yield _metered_size(text, at, at + size)
        at += size + 1


def _metered_size(text: bytes | memoryview, at: int, end: int) -> int:
    size = metered_of((), b"")
    for tag, _, start, stop in fields(text, at, end):
        if tag == _BODY:
            size += stop - start
        elif tag == _HEADER:
            size += 2 + sum(last - first for _, _, first, last in fields(text, start, stop))
        elif tag == _SEALED:
            return read_varint(text, start)[0]
    return size


def _record(text: bytes, at: int, end: int) -> BinaryRecord:
    seq_num = timestamp = sealed_size = 0
    headers: list[Header] = []
    body = ciphertext = b""
    for tag, number, start, stop in fields(text, at, end):
        if tag == _BODY:
            body = text[start:stop]
        elif tag == _SEQ:
            seq_num = number
        elif tag == _TIME:
            timestamp = number
        elif tag == _HEADER:
            headers.append(header_of(text, start, stop))
        elif tag == _SEALED:
            sealed_size, start = read_varint(text, start)
            ciphertext = text[start:stop]
    return BinaryRecord(seq_num, timestamp, headers, body, ciphertext, sealed_size)


def render_json(text: bytes, *, meta: bool, data: bool) -> bytes:
    """Render records as JSON for `/v0`: the body as base64, headers as pairs of base64 in `meta`. An
    encrypted record shows its ciphertext, and `meta` says so."""
    parts: list[bytes] = []
    for record in records_of(text):
        part = b'{"$seq":%d,"$ts":%d' % (seq_of(record.seq_num), record.timestamp)
        if meta and record.ciphertext:
            part += b',"meta":{"sealed":true}'
        elif meta and record.headers:
            pairs = [[b64encode(name).decode(), b64encode(value).decode()] for name, value in record.headers]
            part += b',"meta":{"headers":%b}' % orjson.dumps(pairs)
        if data:
            part += b',"data":"%b"' % b64encode(record.ciphertext or record.body)
        parts.append(part + b"}")
    return b",".join(parts)
