"""A shard's answer as a response: its bytes go through, `performance` is put at their end (v0-api §0.7)."""

from __future__ import annotations

import time
from typing import Any

import orjson

from gateway.http import Request, Response
from streams.protocol import wire

_decode_head = wire.reply_head_decoder.decode


def from_shard(request: Request, message: wire.Message, throttle_wait_s: float = 0.0) -> Response:
    head = _decode_head(message.head)
    spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
    costs = b',"performance":{"server_total_ms":%.3f' % spent_ms
    if head.fsync_ms >= 0:
        costs += b',"fsync_ms":%.3f,"wal_append_ms":%.3f' % (head.fsync_ms, head.wal_append_ms)
    if head.records_scanned >= 0:
        costs += b',"records_scanned":%d' % head.records_scanned
    if throttle_wait_s:
        costs += b',"throttle_wait_ms":%.3f' % (throttle_wait_s * 1000)
    return Response(head.status, memoryview(message.body)[:-1], costs + b"}}")


def from_facts(request: Request, facts: dict[str, Any], status: int = 200) -> Response:
    spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
    return Response(status, orjson.dumps({**facts, "performance": {"server_total_ms": round(spent_ms, 3)}}))
