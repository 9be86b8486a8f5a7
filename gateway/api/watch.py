"""Handlers for watching over server-sent events (v0 §7.1-§7.4)."""

from __future__ import annotations

from gateway.api import unknown_fields
from gateway.api.responses import from_reply
from gateway.requests import sse
from gateway.requests.content import check_content_type, control_body
from gateway.requests.request import Request, Response, Sink
from gateway.watch import cursors
from gateway.watch.plan import plan_of_query
from gateway.watch.service import OPEN_S_MAX, Watch, starts_in
from gateway.watch.sessions import SESSION_TTL_MS
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.query import Query
from streams.protocol.messages.replies import WatchReply


class WatchApi:
    def __init__(self, watch: Watch, body_bytes_max: int) -> None:
        self._watch = watch
        self._body_bytes_max = body_bytes_max

    async def create(self, request: Request) -> Response:
        """`POST /v0/watch`"""
        query = Query(request.query)
        lenient = bool(query.flag("lenient", False))
        query.reject_unknown()
        check_content_type(request, allow_ndjson=False)
        body = await control_body(request, self._body_bytes_max)
        strict = unknown_fields.wants_strict(request.headers)
        plan, warnings = unknown_fields.plan_watch(body, self._watch.node_bytes_max, strict=strict)
        for name in plan.starts:
            request.require_name(name, "boxes")
        views = await self._watch.view_boxes(plan, lenient=lenient)
        wid = await self._watch.create_session(plan, views, request.key)
        reply = WatchReply(
            wid=wid,
            stream_url=f"/v0/watch/{wid}",
            session_ttl_ms=SESSION_TTL_MS,
            boxes=starts_in(plan, views),
            warnings=list(warnings),
        )
        return from_reply(request, reply)

    async def open(self, request: Request, wid: str) -> Response:
        """`GET /v0/watch/{wid}`"""
        sse.check_accepts(request)
        Query(request.query).reject_unknown()
        last_event_id = request.headers.get("last-event-id")
        cursor = cursors.decode_untrusted(last_event_id, "last-event-id") if last_event_id else None
        if request.method == "HEAD":
            return sse.response(_EmptyBody())
        return sse.response(await self._watch.open_session(wid, cursor, request.key))

    async def box(self, request: Request, box: str, rest: str) -> Response:
        """`GET /v0/boxes/{box}/watch`"""
        sse.check_accepts(request)
        last_event_id = request.headers.get("last-event-id")
        plan = plan_of_query(box, request.query, last_event_id, self._watch.node_bytes_max)
        views = await self._watch.view_boxes(plan, lenient=False, wait_s=OPEN_S_MAX)
        if request.method == "HEAD":
            return sse.response(_EmptyBody())
        return sse.response(self._watch.open_stream(plan, views, request.key))

    async def require_upgrade(self, request: Request) -> Response:
        """Refuse a `GET /v0/ws` without a WebSocket upgrade."""
        raise InvalidRequest("upgrade: this route accepts WebSocket connections only", field="upgrade")


class _EmptyBody:
    """The body of a response to HEAD: never sent."""

    async def run(self, sink: Sink) -> None:
        raise AssertionError("a HEAD has no body")

    def close(self) -> None:
        pass
