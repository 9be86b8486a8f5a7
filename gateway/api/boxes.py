"""`/v0/boxes` and the box itself (v0-api §2, and the fence of §3)."""

from __future__ import annotations

from gateway.api.answers import from_facts, from_shard
from gateway.content import is_ndjson, uncompressed
from gateway.dispatch import Dispatch
from gateway.http import Request, Response
from streams.protocol import wire


class Boxes:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max

    async def _forward(self, op: int, request: Request, box: str, *, with_body: bool) -> Response:
        body = b"" if not with_body else await uncompressed(request, self._body_bytes_max)
        head = wire.RequestHead(box, request.query)
        return from_shard(request, await self._dispatch.to_owner(op, head, body))

    async def put(self, request: Request, box: str, rest: str) -> Response:
        is_ndjson(request, allowed=False)
        return await self._forward(wire.OP_PUT_BOX, request, box, with_body=True)

    async def state(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_GET_STATE, request, box, with_body=False)

    async def delete(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_DELETE_BOX, request, box, with_body=False)

    async def fence(self, request: Request, box: str, rest: str) -> Response:
        is_ndjson(request, allowed=False)
        return await self._forward(wire.OP_SET_FENCE, request, box, with_body=True)

    async def list(self, request: Request) -> Response:
        return from_facts(request, await self._dispatch.list_boxes(request.query))
