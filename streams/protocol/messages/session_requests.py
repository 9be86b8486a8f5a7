"""Bytes to commands of watch sessions. `requests.py` calls it. The name of a session is where a box's is."""

from __future__ import annotations

from collections.abc import Callable

from streams.protocol import wire
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Command
from streams.protocol.messages.query import Query
from streams.protocol.payloads.appends import RecordLimits


def _put_session(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = Query(head.query)
    ttl_ms, epoch = query.number("ttl_ms") or 0, query.number("epoch") or 0
    owner = query.text("owner") or ""
    query.reject_unknown()
    return commands.PutSession(head.box, body, ttl_ms, epoch, owner)


def _take_session(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = Query(head.query)
    ttl_ms, owner = query.number("ttl_ms") or 0, query.text("owner") or ""
    has_cursor = bool(query.number("has_cursor"))
    query.reject_unknown()
    return commands.TakeSession(head.box, ttl_ms, owner, has_cursor)


def _keep_session(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = Query(head.query)
    ttl_ms, epoch = query.number("ttl_ms") or 0, query.number("epoch") or 0
    query.reject_unknown()
    return commands.KeepSession(head.box, epoch, body, ttl_ms)


DECODERS: dict[int, Callable[[wire.RequestHead, bytes, RecordLimits], Command]] = {
    wire.OP_PUT_SESSION: _put_session,
    wire.OP_TAKE_SESSION: _take_session,
    wire.OP_KEEP_SESSION: _keep_session,
}
