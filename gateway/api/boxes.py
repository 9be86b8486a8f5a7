"""`/v0/boxes` and the box itself (v0 §2, and the fence of §3)."""

from __future__ import annotations

import msgspec

from gateway.api.responses import from_reply, from_shard
from gateway.requests.content import is_ndjson, uncompressed
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from gateway.shards.router_reconciler import RouterReconciler
from streams.protocol import wire
from streams.protocol.messages.replies import DeleteBoxReply
from streams.protocol.messages.routers import router_of

_decode_gone = msgspec.json.Decoder(DeleteBoxReply).decode


class Boxes:
    def __init__(self, dispatch: Dispatch, reconciler: RouterReconciler, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._reconciler = reconciler
        self._body_bytes_max = body_bytes_max

    async def _forward(self, op: int, request: Request, box: str, *, with_body: bool) -> Response:
        body = b"" if not with_body else await uncompressed(request, self._body_bytes_max)
        head = wire.RequestHead(box, request.query, grant=request.passed_on, account=request.account)
        return from_shard(request, await self._dispatch.to_owner(op, head, body))

    async def put(self, request: Request, box: str, rest: str) -> Response:
        is_ndjson(request, allowed=False)
        return await self._forward(wire.OP_PUT_BOX, request, box, with_body=True)

    async def state(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_GET_STATE, request, box, with_body=False)

    async def delete(self, request: Request, box: str, rest: str) -> Response:
        head = wire.RequestHead(box, request.query)
        answer = await self._dispatch.to_owner(wire.OP_DELETE_BOX, head, b"")
        if answer.body.endswith(b'"routers_removed":[]}'):
            return from_shard(request, answer)
        gone = _decode_gone(answer.body)
        origins = gone.routers_removed
        await self._reconciler.on_box_delete(origins)
        names = {router[0] for router in map(router_of, origins) if router is not None}
        if request.grant is not None:
            names = set(filter(request.grant.covers, names))
        return from_reply(request, DeleteBoxReply(gone.box, gone.deleted, sorted(names)))

    async def fence(self, request: Request, box: str, rest: str) -> Response:
        is_ndjson(request, allowed=False)
        return await self._forward(wire.OP_SET_FENCE, request, box, with_body=True)

    async def list(self, request: Request) -> Response:
        return from_reply(request, await self._dispatch.list_boxes(request.query, request.grant))
