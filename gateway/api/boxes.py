"""Handlers for boxes: list, create, describe, delete, and the fence of a box (v0 §2, §3)."""

from __future__ import annotations

import msgspec

from gateway.api.responses import from_reply, from_shard
from gateway.requests.content import check_content_type, decompress_body
from gateway.requests.request import Request, Response
from gateway.shards.box_lists import list_boxes
from gateway.shards.dispatch import Dispatch
from gateway.shards.router_reconciler import RouterReconciler
from streams.protocol import wire
from streams.protocol.messages.replies import DeleteBoxReply
from streams.protocol.messages.routers import router_of

_decode_delete_reply = msgspec.json.Decoder(DeleteBoxReply).decode


class BoxApi:
    def __init__(self, dispatch: Dispatch, reconciler: RouterReconciler, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._reconciler = reconciler
        self._body_bytes_max = body_bytes_max

    async def _forward(self, op: int, request: Request, box: str, *, with_body: bool) -> Response:
        body = b"" if not with_body else await decompress_body(request, self._body_bytes_max)
        head = wire.RequestHead(box, request.query, grant=request.passed_on, account=request.account)
        return from_shard(request, await self._dispatch.to_owner(op, head, body))

    async def put(self, request: Request, box: str, rest: str) -> Response:
        check_content_type(request, allow_ndjson=False)
        return await self._forward(wire.OP_PUT_BOX, request, box, with_body=True)

    async def state(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_GET_STATE, request, box, with_body=False)

    async def delete(self, request: Request, box: str, rest: str) -> Response:
        head = wire.RequestHead(box, request.query)
        answer = await self._dispatch.to_owner(wire.OP_DELETE_BOX, head, b"")
        if answer.body.endswith(b'"schedules_removed":[],"routers_removed":[]}'):
            return from_shard(request, answer)
        reply = _decode_delete_reply(answer.body)
        origins = reply.routers_removed
        await self._reconciler.on_box_delete(origins)
        names = {router[0] for router in map(router_of, origins) if router is not None}
        schedules = reply.schedules_removed
        if request.grant is not None:
            names = set(filter(request.grant.covers, names))
            schedules = list(filter(request.grant.covers, schedules))
        return from_reply(request, DeleteBoxReply(reply.box, reply.deleted, schedules, sorted(names)))

    async def fence(self, request: Request, box: str, rest: str) -> Response:
        check_content_type(request, allow_ndjson=False)
        return await self._forward(wire.OP_SET_FENCE, request, box, with_body=True)

    async def list(self, request: Request) -> Response:
        return from_reply(request, await list_boxes(self._dispatch, request.query, request.grant))
