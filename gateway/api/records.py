"""Handlers for records of a box: append, diff, one, tail, delete (v0 §3-§5). Bodies pass through unparsed."""

from __future__ import annotations

from gateway.api import unknown_fields
from gateway.api.responses import from_shard
from gateway.requests.content import check_content_type, decompress_body
from gateway.requests.request import Request, Response
from gateway.requests.urgency import is_urgent
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.query import Query
from streams.protocol.model.names import quote


class RecordApi:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max

    async def append(self, request: Request, box: str, rest: str) -> Response:
        form = wire.FORM_NDJSON if check_content_type(request, allow_ndjson=True) else wire.FORM_JSON
        body = request.body
        if "content-encoding" in request.headers:
            body = await decompress_body(request, self._body_bytes_max)
        key = request.key
        grant, account = (None, "") if key is None else (key.shard_grant, key.account)
        idempotency_key = request.headers.get("idempotency-key", "")
        head = wire.RequestHead(box, request.query, form, idempotency_key, grant, account)
        answer, waited_s = await self._dispatch.append(
            head, body, request.waited_s, owner=request.owner, is_urgent=is_urgent(request)
        )
        return from_shard(request, answer, waited_s)

    async def diff(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_DIFF, request, box)

    async def delete(self, request: Request, box: str, rest: str) -> Response:
        return await self._forward(wire.OP_DELETE_RECORDS, request, box)

    async def _forward(self, op: int, request: Request, box: str) -> Response:
        return await unknown_fields.forward_json(self._dispatch, op, request, box, self._body_bytes_max)

    async def one(self, request: Request, box: str, rest: str) -> Response:
        Query(request.query).reject_unknown()
        if not (rest.isascii() and rest.isdigit() and len(rest) <= 20):
            raise InvalidRequest(f"seq: {quote(rest)} is not a sequence number", field="seq")
        head = wire.RequestHead(box, f"seq={rest}")
        return from_shard(request, await self._dispatch.to_owner(wire.OP_GET_RECORD, head, b""))

    async def tail(self, request: Request, box: str, rest: str) -> Response:
        head = wire.RequestHead(box, request.query)
        return from_shard(request, await self._dispatch.to_owner(wire.OP_GET_TAIL, head, b""))
