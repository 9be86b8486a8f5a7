"""Handlers for append, read and check tail: one request, one response (s2 §11).

`ReadQuery` and the page helpers are shared with read sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
import orjson

from gateway.requests.request import Buffer, Request, Response
from gateway.requests.s2_errors import S2Error
from gateway.s2 import ciphers, configs, fields, record_formats
from gateway.s2.control import json_body, json_response, plain_body
from gateway.s2.permits import Permit
from gateway.s2.shard_calls import ShardCalls
from streams.protocol.errors import PositionUnwritten
from streams.protocol.messages.s2 import (
    BATCH_METERED_MAX,
    BATCH_RECORDS_MAX,
    Cipher,
    ReadHead,
    Spec,
    StreamRecords,
    box_of,
)
from streams.protocol.model import binary_records

_WAIT_S_MAX = 60
#: Longest wait of one request to a shard: links time out after a minute.
SLICE_MS = 20_000


class ReadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query parameters of a read. None means no limit."""

    seq_num: int | None = None
    timestamp: int | None = None
    tail_offset: int | None = None
    clamp: bool = False
    count: int | None = None
    bytes: int | None = None
    until: int | None = None
    wait_s: int | None = None
    #: Records and metered bytes that this read delivered before its client reconnected.
    already_delivered: tuple[int, int] = (0, 0)

    @classmethod
    def from_query(cls, text: str, last_event_id: str | None = None) -> ReadQuery:
        query = fields.QueryParameters(text)
        read = cls(
            seq_num=query.number("seq_num"),
            timestamp=query.number("timestamp"),
            tail_offset=query.number("tail_offset"),
            clamp=query.flag("clamp"),
            count=query.number("count"),
            bytes=query.number("bytes"),
            until=query.number("until"),
            wait_s=query.number("wait", fields.U32_MAX),
        )
        return read if last_event_id is None else read._resume_after(last_event_id)

    def check(self) -> None:
        """Raise `invalid` if the start or the end is invalid. Call it after checking the headers."""
        if sum(each is not None for each in (self.seq_num, self.timestamp, self.tail_offset)) > 1:
            raise S2Error(
                "invalid", "seq_num, timestamp, tail_offset: at most one of these may set the start"
            )
        if self.until is not None and self.timestamp is not None and self.timestamp >= self.until:
            raise S2Error("invalid", "until: must be later than timestamp")

    def _resume_after(self, last_event_id: str) -> ReadQuery:
        """Return the read that continues after the last event of the client, `seq,count,bytes`.

        The event id overrides the start in the query.
        """
        parts = last_event_id.strip().split(",")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
            raise S2Error(
                "bad_header", "last-event-id: is not an event id of this API; expected seq,count,bytes"
            )
        seq_num, count, size = map(int, parts)
        return msgspec.structs.replace(
            self,
            seq_num=seq_num + 1,
            timestamp=None,
            tail_offset=None,
            count=None if self.count is None else max(0, self.count - count),
            bytes=None if self.bytes is None else max(0, self.bytes - size),
            already_delivered=(count, size),
        )

    @property
    def is_bounded(self) -> bool:
        return self.count is not None or self.bytes is not None or self.until is not None

    @property
    def is_empty(self) -> bool:
        """Return True if the read is limited to zero records: it returns at once, wherever it starts."""
        return self.count == 0 or self.bytes == 0

    @property
    def may_follow(self) -> bool:
        return not self.is_bounded or bool(self.wait_s)

    def head(self, box: str, *, may_follow: bool, wait_ms: int = 0) -> ReadHead:
        """Return the first request to the shard."""
        offset = self.tail_offset
        if self.seq_num is None and self.timestamp is None and offset is None:
            offset = 0
        return ReadHead(
            box,
            from_seq=self.seq_num or 0,
            from_ts=None if self.timestamp is None else min(self.timestamp, fields.TIME_MAX),
            tail_offset=offset,
            clamp=self.clamp or self.is_empty,
            limit=BATCH_RECORDS_MAX if self.count is None else min(self.count, BATCH_RECORDS_MAX),
            max_bytes=BATCH_METERED_MAX if self.bytes is None else min(self.bytes, BATCH_METERED_MAX),
            until=None if self.until is None else min(self.until, fields.TIME_MAX),
            wait_ms=wait_ms,
            may_follow=may_follow or self.is_empty,
        )


def after(head: ReadHead, page: StreamRecords) -> ReadHead:
    """Return the request for the page after `page`."""
    return msgspec.structs.replace(
        head,
        from_seq=page.next_seq_num,
        from_ts=None,
        tail_offset=None,
        begins=False,
        generation=page.generation,
    )


def decrypt_records(page: StreamRecords, key: str, box: str) -> Buffer:
    """Return the records of a page, decrypted if the stream has a cipher."""
    if page.cipher is None:
        return page.records
    return ciphers.RecordCipher(_cipher(page.cipher), key, box).decrypt_page(bytes(page.records))


def _cipher(name: str) -> Cipher:
    return "aegis-256" if name == "aegis-256" else "aes-256-gcm"


def tail_of(page: StreamRecords) -> tuple[int, int] | None:
    """Return the tail of the stream if the page reaches it, else None."""
    at_end = page.next_seq_num >= page.tail_seq_num
    return (page.tail_seq_num, page.tail_ts) if at_end else None


def stream_config(headers: Mapping[str, str]) -> Spec | None:
    """Return the config for a stream that this request may create, from its header."""
    text = headers.get("s2-stream-config")
    if text is None:
        return None
    try:
        return configs.decode_body(text.encode("latin-1"), configs.StreamBody).spec()
    except S2Error as error:
        if error.code == "bad_json":
            raise S2Error("bad_header", f"s2-stream-config: {error}") from None
        raise


class StreamRecordApi:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    async def append(self, request: Request, permit: Permit, basin: str, stream: str) -> Response:
        headers = request.headers
        key = ciphers.check_header(headers)
        spec = stream_config(headers)
        if fields.is_protobuf(fields.media_type(headers, "content-type")):
            batch = record_formats.input_from_protobuf(await plain_body(request, "bad_proto"))
        else:
            is_base64 = fields.is_base64(headers)
            batch = record_formats.input_from_json(await json_body(request), is_base64=is_base64)
        check_commands(permit, batch, basin, stream)
        batch.account = account = request.account
        call = partial(self._calls.append, box_of(basin, stream), batch, key)
        ack = await self._calls.call_or_create(
            basin, stream, spec, is_append=True, call=call, account=account
        )
        if fields.is_protobuf(fields.media_type(headers, "accept")):
            return Response(200, record_formats.ack_as_protobuf(ack), content_type=b"application/protobuf")
        return Response(200, record_formats.ack_as_json(ack))

    async def read(self, request: Request, basin: str, stream: str) -> Response:
        headers = request.headers
        query = ReadQuery.from_query(request.query)
        key = ciphers.check_header(headers)
        spec = stream_config(headers)
        is_base64 = fields.is_base64(headers)
        query.check()
        box = box_of(basin, stream)
        wait_s = 0 if query.is_empty else min(query.wait_s or 0, _WAIT_S_MAX)
        head = query.head(box, may_follow=wait_s > 0)
        answers, owner = self._calls.answers, request.owner
        await answers.take(owner, head.max_bytes)
        try:  # a page that arrives after a wait is charged on arrival
            page = await first_page(self._calls, basin, stream, spec, head, key, request.account)
        finally:
            answers.give(owner, head.max_bytes)
        page = await self._wait_page(page, head, wait_ms=1000 * wait_s)
        records = decrypt_records(page, key, box)
        self._calls.history.counters.count_read(basin, len(records))
        tail = tail_of(page) if records else None
        if fields.is_protobuf(fields.media_type(headers, "accept")):
            body = record_formats.batch_as_protobuf(records, tail)
            response = Response(200, body, content_type=b"application/protobuf")
        else:
            decoded_records = list(binary_records.records_of(bytes(records)))
            body = record_formats.batch_as_json(decoded_records, tail, is_base64=is_base64)
            response = Response(200, body)
        response.charge = answers.charge(owner, 0, len(body))
        return response

    async def _wait_page(self, page: StreamRecords, head: ReadHead, *, wait_ms: int) -> StreamRecords:
        """Return the page if it has records, or wait up to `wait_ms` for the next records."""
        while not page.records and not page.is_full and wait_ms > 0:
            slice_ms = min(wait_ms, SLICE_MS)
            page = await self._calls.read(msgspec.structs.replace(after(head, page), wait_ms=slice_ms))
            wait_ms -= slice_ms
        return page

    async def tail(self, request: Request, basin: str, stream: str) -> Response:
        """Check the tail. A stream created by this request gets the basin's defaults.

        `s2-stream-config` applies only to appends and reads.
        """
        call = partial(self._calls.tail, box_of(basin, stream))
        account = request.account
        tail = await self._calls.call_or_create(
            basin, stream, None, is_append=False, call=call, account=account
        )
        return json_response({"tail": record_formats.position(tail.seq_num, tail.timestamp)})


def check_commands(permit: Permit, batch: record_formats.Input, basin: str, stream: str) -> None:
    """Check the permissions for the commands in a batch: each command is an operation."""
    if batch.fence is not None:
        permit.check("fence", basin, stream)
    if batch.trims:
        permit.check("trim", basin, stream)


async def first_page(
    calls: ShardCalls, basin: str, stream: str, spec: Spec | None, head: ReadHead, key: str, account: str
) -> StreamRecords:
    """Read the first page. Raises if its start or the encryption key is invalid."""
    try:
        call = partial(calls.read, head)
        page = await calls.call_or_create(basin, stream, spec, is_append=False, call=call, account=account)
        cipher = page.cipher
    except PositionUnwritten as error:
        _check_key(error.detail["cipher"], key, head.box)
        raise
    _check_key(cipher, key, head.box)
    return page


def _check_key(cipher: str | None, key: str, box: str) -> None:
    if cipher is not None:
        ciphers.RecordCipher(_cipher(cipher), key, box)


def error_event(error: S2Error) -> bytes:
    return b"event: error\ndata: %b\n\n" % error.body


def ping_event(now_ms: int, tail: tuple[int, int]) -> bytes:
    facts = {"timestamp": now_ms, "tail": record_formats.position(*tail)}
    return b"event: ping\ndata: %b\n\n" % orjson.dumps(facts)
