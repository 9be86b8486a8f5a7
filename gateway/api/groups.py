"""Handlers for groups: cursors that a box stores for its readers (v0 §10). Bodies pass through unparsed."""

from __future__ import annotations

from urllib.parse import unquote, urlencode

from gateway.api.responses import from_reply, from_shard
from gateway.requests.content import check_content_type, decompress_body
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.query import Query
from streams.protocol.model.names import quote


class GroupApi:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max

    async def commit(self, request: Request, box: str, rest: str) -> Response:
        check_content_type(request, allow_ndjson=False)
        body = await decompress_body(request, self._body_bytes_max)
        head = _head(request, box, rest)
        return from_shard(request, await self._dispatch.to_owner(wire.OP_COMMIT_GROUP, head, body))

    async def state(self, request: Request, box: str, rest: str) -> Response:
        head = _head(request, box, rest)
        return from_shard(request, await self._dispatch.to_owner(wire.OP_GET_GROUP, head, b""))

    async def delete(self, request: Request, box: str, rest: str) -> Response:
        head = _head(request, box, rest)
        return from_shard(request, await self._dispatch.to_owner(wire.OP_DELETE_GROUP, head, b""))

    async def list(self, request: Request, box: str, rest: str) -> Response:
        return from_reply(request, await self._dispatch.list_groups(box, request.query))


def _head(request: Request, box: str, rest: str) -> wire.RequestHead:
    Query(request.query).reject_unknown()
    try:
        group = unquote(rest, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequest(f"group: {quote(rest)} is not percent-encoded UTF-8", field="group") from None
    return wire.RequestHead(box, urlencode({"group": group}), account=request.account)
