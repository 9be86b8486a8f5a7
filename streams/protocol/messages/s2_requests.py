"""Encodes and decodes commands of the S2 API between a gateway and the shards of one server.

Op 102 carries one of `s2.Asked` as msgpack, and its replies are msgpack too. Appends (op 100) and reads
(op 101) have heads of their own and raw bodies.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.commands import ReadStream
from streams.protocol.messages.s2 import (
    BATCH_METERED_MAX,
    BATCH_RECORDS_MAX,
    AppendHead,
    AppendStream,
    AppendStreamReply,
    BasinPage,
    ControlCommand,
    FindTokenReply,
    GetBasinReply,
    GetStreamReply,
    PutBasinReply,
    PutStreamReply,
    ReadHead,
    StreamPage,
    StreamRecords,
    StreamTail,
    StreamUsage,
    TokenPage,
)

_T = TypeVar("_T")

_PAGE_HEAD = struct.Struct("<QQQQIBB")
_CIPHERS: tuple[str | None, ...] = (None, "aegis-256", "aes-256-gcm")

encode = msgspec.msgpack.Encoder().encode
_decode_control = msgspec.msgpack.Decoder(ControlCommand).decode
_decode_append = msgspec.msgpack.Decoder(AppendHead).decode
_decode_read = msgspec.msgpack.Decoder(ReadHead).decode


def _encode_records(reply: StreamRecords) -> bytes:
    head = _PAGE_HEAD.pack(
        reply.next_seq_num,
        reply.tail_seq_num,
        reply.tail_ts,
        reply.generation,
        reply.count,
        _CIPHERS.index(reply.cipher),
        reply.is_full,
    )
    return head + reply.records


def decode_records(body: bytes) -> StreamRecords:
    """A page whose records are a view of its bytes."""
    next_seq_num, tail_seq_num, tail_ts, generation, count, cipher, is_full = _PAGE_HEAD.unpack_from(body)
    return StreamRecords(
        records=memoryview(body)[_PAGE_HEAD.size :],
        count=count,
        next_seq_num=next_seq_num,
        tail_seq_num=tail_seq_num,
        tail_ts=tail_ts,
        generation=generation,
        cipher=_CIPHERS[cipher],
        is_full=bool(is_full),
    )


def append_of(head: AppendHead, body: bytes) -> AppendStream:
    ends = array("I", head.ends)
    tails: list[bytes] = []
    start = 0
    for end in ends:
        tails.append(body[start:end])
        start = end
    times: list[int | None] | None = None
    if head.times:
        times = [None if time < 0 else time for time in array("q", head.times)]
    return AppendStream(
        box=head.box,
        tails=tails,
        times=times,
        cipher=head.cipher,
        match_seq_num=head.match_seq_num,
        fencing_token=head.fencing_token,
        fence=head.fence,
        trims=head.trims,
        chain=head.chain,
        account=head.account,
    )


def read_of(head: ReadHead) -> ReadStream:
    return ReadStream(
        box=head.box,
        from_seq=head.from_seq,
        from_ts=head.from_ts,
        tail_offset=head.tail_offset,
        clamp=head.clamp,
        limit=min(head.limit, BATCH_RECORDS_MAX),
        max_bytes=min(head.max_bytes, BATCH_METERED_MAX),
        until=head.until,
        wait_ms=head.wait_ms,
        begins=head.begins,
        may_follow=head.may_follow,
        generation=head.generation,
    )


def _decode(decode: Callable[[bytes], _T], head: bytes) -> _T:
    try:
        return decode(head)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None


#: op -> (head, body) -> the command. From gateways, which have checked what clients say.
DECODERS: dict[int, Callable[[bytes, bytes], AppendStream | ReadStream | ControlCommand]] = {
    wire.OP_APPEND_STREAM: lambda head, body: append_of(_decode(_decode_append, head), body),
    wire.OP_READ_STREAM: lambda head, body: read_of(_decode(_decode_read, head)),
    wire.OP_S2_CONTROL: lambda head, body: _decode(_decode_control, head),
}

_PLAIN = (
    PutBasinReply,
    GetBasinReply,
    BasinPage,
    FindTokenReply,
    TokenPage,
    PutStreamReply,
    GetStreamReply,
    StreamPage,
    StreamTail,
    StreamUsage,
    AppendStreamReply,
)
ENCODERS: dict[type[Any], Callable[[Any], bytes]] = {
    **dict.fromkeys(_PLAIN, encode),
    StreamRecords: _encode_records,
}
