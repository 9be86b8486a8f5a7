"""Builds responses from shard replies: passes the bytes through and appends `performance` (v0 §0.7)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import orjson

from gateway.requests.request import Request, Response
from streams.protocol import wire

_decode_head = wire.reply_head_decoder.decode
_encode = msgspec.json.Encoder().encode


def from_shard(
    request: Request, message: wire.Message, throttle_wait_s: float = 0.0, warnings: Sequence[str] = ()
) -> Response:
    status, shard_costs = _status_and_costs(message.head)
    if throttle_wait_s:
        shard_costs += b',"throttle_wait_ms":%.3f' % (throttle_wait_s * 1000)
    spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
    costs = b',"performance":{"server_total_ms":%.3f%b}}' % (spent_ms, shard_costs)
    if warnings:
        costs = b',"warnings":%b%b' % (orjson.dumps(warnings), costs)
    return Response(status, memoryview(message.body)[:-1], costs)


@lru_cache(maxsize=64)
def _status_and_costs(head: bytes) -> tuple[int, bytes]:
    """Return the status and the cost fields of a reply head.

    Cached: all replies that one write or fsync releases have identical heads.
    """
    reply_head = _decode_head(head)
    costs = b""
    if reply_head.fsync_ms >= 0:
        costs = b',"fsync_ms":%.3f,"wal_append_ms":%.3f' % (reply_head.fsync_ms, reply_head.wal_append_ms)
    if reply_head.records_scanned >= 0:
        costs += b',"records_scanned":%d' % reply_head.records_scanned
    return reply_head.status, costs


def from_reply(request: Request, reply: msgspec.Struct, status: int = 200) -> Response:
    """Build the response for a reply that the gateway produced itself."""
    spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
    costs = b',"performance":{"server_total_ms":%.3f}}' % spent_ms
    return Response(status, memoryview(_encode(reply))[:-1], costs)


def from_facts(request: Request, facts: dict[str, Any], status: int = 200) -> Response:
    spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
    return Response(status, orjson.dumps({**facts, "performance": {"server_total_ms": round(spent_ms, 3)}}))
