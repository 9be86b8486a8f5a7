"""Queues: claim, ack, nack, extend, work (v0-api §8). Bodies go through unread."""

from __future__ import annotations

from gateway import sse
from gateway.api.answers import from_shard
from gateway.content import is_ndjson, uncompressed
from gateway.dispatch import Dispatch
from gateway.http import Request, Response
from gateway.work import WorkStreams
from streams.protocol import wire


class Queues:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int, work: WorkStreams) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max
        self._work = work

    async def claim(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_CLAIM, request, box)

    async def ack(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_ACK, request, box)

    async def nack(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_NACK, request, box)

    async def extend(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_EXTEND, request, box)

    async def work(self, request: Request, box: str, rest: str) -> Response:
        sse.check_accepts(request)
        return await self._work.open(box, request.query)

    async def _forward(self, op: int, request: Request, box: str) -> Response:
        is_ndjson(request, allowed=False)
        body = request.body
        if "content-encoding" in request.headers:
            body = await uncompressed(request, self._body_bytes_max)
        head = wire.RequestHead(box, request.query)
        return from_shard(request, await self._dispatch.to_owner(op, head, body))
