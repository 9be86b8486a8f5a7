"""Handlers for queues: claim, ack, nack, extend, work, requeue (v0 §8).

Only the bodies of a requeue and of an ack with outputs are parsed here; the others pass through to the shard.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import urlencode

import msgspec

from gateway.api import acks, unknown_fields
from gateway.api.job_streams import JobStreams
from gateway.api.responses import from_reply, from_shard
from gateway.requests import sse
from gateway.requests.content import check_content_type, control_body
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.queue_requests import decode_requeue
from streams.protocol.messages.queues import AwaitMovesReply, PlanRequeueReply
from streams.protocol.messages.replies import RequeueReply

#: A requeue request waits this long for its moves. The moves continue after that.
_REQUEUE_WAIT_MS = 10_000

_decode_plan_reply = msgspec.json.Decoder(PlanRequeueReply).decode
_decode_await_reply = msgspec.json.Decoder(AwaitMovesReply).decode


class QueueApi:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int, job_streams: JobStreams) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max
        self._job_streams = job_streams

    async def claim(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_CLAIM, request, box)

    async def ack(self, request: Request, box: str, rest: str) -> Response:
        if acks.may_have_outputs(request):
            return await acks.ack_with_outputs(self._dispatch, request, box, self._body_bytes_max)
        return await self._forward(wire.OP_ACK, request, box)

    async def nack(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_NACK, request, box)

    async def extend(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_EXTEND, request, box)

    async def reschedule(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_RESCHEDULE, request, box)

    async def reprioritize(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_REPRIORITIZE, request, box)

    async def pause(self, request: Request, box: str, rest: str) -> Response:
        return await self._set_paused(request, box, is_paused=True)

    async def resume(self, request: Request, box: str, rest: str) -> Response:
        return await self._set_paused(request, box, is_paused=False)

    async def _set_paused(self, request: Request, box: str, *, is_paused: bool) -> Response:
        check_content_type(request, allow_ndjson=False)
        body = await control_body(request, self._body_bytes_max)
        if request.query:
            raise InvalidRequest("query: pause and resume take no parameters", field="query")
        head = wire.RequestHead(box, urlencode({"paused": "true" if is_paused else "false"}))
        return from_shard(request, await self._dispatch.to_owner(wire.OP_SET_PAUSED, head, body))

    async def leases(self, request: Request, box: str, rest: str) -> Response:
        head = wire.RequestHead(box, request.query)
        return from_shard(request, await self._dispatch.to_owner(wire.OP_LIST_JOBS, head, b""))

    async def work(self, request: Request, box: str, rest: str) -> Response:
        sse.check_accepts(request)
        return await self._job_streams.open(box, request.query, request.key)

    async def requeue(self, request: Request, box: str, rest: str) -> Response:
        """Move dead letters back into their queue.

        The shard of the dead-letter box plans the moves, the router relay copies the records, and this
        request waits until they arrive.
        """
        check_content_type(request, allow_ndjson=False)
        body = await control_body(request, self._body_bytes_max)
        send = self._dispatch.to_owner
        require_queue = partial(send, wire.OP_REQUIRE_QUEUE, wire.RequestHead(box, request.query), b"")
        try:
            requeue = decode_requeue(body, box)
        except InvalidRequest:
            await require_queue()  # if the box is no queue, report that first
            raise
        request.require_name(requeue.from_box, "from")
        await require_queue()
        source = requeue.from_box
        plan = wire.RequestHead(source, urlencode({"to": box}))
        plan_reply = _decode_plan_reply((await send(wire.OP_PLAN_REQUEUE, plan, body)).body)
        if requeue.dry_run:
            return from_reply(request, RequeueReply(box, source, plan_reply.planned, 0, True))
        wait = {"to": box, "position": plan_reply.position, "wait_ms": _REQUEUE_WAIT_MS}
        wait_reply = await send(wire.OP_AWAIT_MOVES, wire.RequestHead(source, urlencode(wait)), b"")
        pending = _decode_await_reply(wait_reply.body).pending
        return from_reply(request, RequeueReply(box, source, plan_reply.planned, pending))

    async def _forward(self, op: int, request: Request, box: str) -> Response:
        return await unknown_fields.forward_json(self._dispatch, op, request, box, self._body_bytes_max)
