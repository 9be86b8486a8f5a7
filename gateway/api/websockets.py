"""Serves WebSocket connections (v0 §7.5): subscribe, unsubscribe, publish, ping.

A command is a JSON object with an `op` and an optional `request_id`. Every reply to a command carries its
`request_id`, and so do the records of a subscription. A connection executes one command at a time, so its
records are appended in the order in which the client published them.

    subscribe    box, from_seq or tail; or boxes as in POST /v0/watch; and the options of that  -> subscribed
    unsubscribe  box or boxes (a list)                                                          -> ack
    publish      box, and the body of an append                                                 -> ack
    ping                                                                                        -> ack

Browsers open WebSockets to other sites without a preflight. So a page of another origin is rejected unless
its origin is allowed (`gateway/access/origins.py`).

Limits: `WATCHED_BOXES_MAX` boxes per connection. `http/hypercorn/server.py` bounds the size of a message,
`watch/subscription.py` the unsent events. No command is read while more than `_ANSWERS_BYTES_MAX` bytes are
unsent.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
import structlog
import trio

from gateway.access.auth import Guard
from gateway.access.origins import Origins
from gateway.admission.memory import owner_of
from gateway.api import unknown_fields
from gateway.api.responses import from_shard
from gateway.requests.queued_sink import QueuedSink
from gateway.requests.request import ClientStalled, Request, Socket
from gateway.shards.dispatch import Dispatch
from gateway.watch.plan import WatchPlan
from gateway.watch.service import Watch, merge_of, starts_in
from gateway.watch.subscription import Subscription
from streams.protocol import wire
from streams.protocol.access.grants import READ, WRITE
from streams.protocol.access.keys import Key
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import InvalidRequest, StreamsError
from streams.protocol.messages.bodies import WATCHED_BOXES_MAX
from streams.protocol.payloads.appends import decode_json

log = structlog.get_logger()

_REQUEST_ID_BYTES_MAX = 256
_ANSWERS_BYTES_MAX = 1024 * 1024
#: WebSocket heartbeats are empty: clients ping if they need to, and TCP keepalive finds dead peers.
_HEARTBEAT_MS = 60_000

Fields = dict[str, msgspec.Raw]
_decode_fields = msgspec.json.Decoder(Fields).decode
_COMMAND_FIELDS = frozenset(("op", "request_id", "box"))


class WebSockets:
    def __init__(
        self, watch: Watch, dispatch: Dispatch, origins: Origins, guard: Guard | None = None
    ) -> None:
        self._watch = watch
        self._origins = origins
        self._dispatch = dispatch
        self._guard = guard

    async def serve(self, headers: dict[str, str], accept: Callable[[], Awaitable[Socket]]) -> None:
        self._origins.check_socket(headers)
        key = None if self._guard is None else self._guard.admit(headers)
        slot = self._watch.take_slot(key)
        try:
            rates = None if self._guard is None else self._guard.in_flight.rates
            strict = unknown_fields.wants_strict(headers)
            connection = WebSocketConnection(
                self._watch, self._dispatch, await accept(), key, rates, strict=strict
            )
            slot.on_revoked(connection.end)
            await connection.run()
        finally:
            slot.give_back()


class WebSocketEncoder:
    """Encodes events as messages with the `request_id` of the command that caused them."""

    key = None

    def __init__(self, request_id: bytes) -> None:
        self._id = b',"request_id":%b' % request_id if request_id else b""

    def event(self, name: bytes, data: bytes, id: bytes) -> bytes:
        start = b'{"op":"%b"%b' % (name.replace(b"-", b"_"), self._id)
        return start + b"}" if data == b"{}" else b"%b,%b" % (start, data[1:])

    def error(self, status: int, code: str, message: str, boxes: list[str]) -> bytes:
        return self._error({"code": code, "message": message}, boxes=boxes)

    def refusal(self, error: StreamsError) -> bytes:
        return self._error({"code": error.code, "message": error.message}, detail=error.detail)

    def _error(self, fields: dict[str, Any], **more: Any) -> bytes:
        fields |= {name: value for name, value in more.items() if value}
        return self.event(b"error", orjson.dumps(fields), b"")

    def heartbeat(self) -> bytes:
        return b""


class WebSocketConnection:
    def __init__(
        self,
        watch: Watch,
        dispatch: Dispatch,
        socket: Socket,
        key: Key | None = None,
        rates: RequestRates | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._watch = watch
        self._strict = strict
        self._dispatch = dispatch
        self._key = key
        self._rates = rates
        self._socket = socket
        self._sink = QueuedSink()
        #: Held while a stream reads its backlog: one page of all streams is in flight.
        self._backlog_lock = trio.Lock()
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        #: Box -> cancel scope of its stream.
        self._scopes: dict[str, trio.CancelScope] = {}
        self._commands: dict[str, Callable[[Fields, WebSocketEncoder], Awaitable[bytes]]] = {
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "publish": self._publish,
            "ping": self._ping,
        }

    def __repr__(self) -> str:
        return f"<WebSocketConnection {len(self._scopes)} boxes>"

    def end(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        """Serve until the client disconnects or stalls, or the gateway drains."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._watch.track(self)
                    self._nursery.start_soon(self._keep_sending)
                    await self._keep_answering()
        finally:
            self._watch.forget(self)

    async def _keep_sending(self) -> None:
        while True:
            message = await self._sink.next()
            await self._socket.send(message)
            self._sink.note_sent(len(message))

    async def _keep_answering(self) -> None:
        while True:
            await self._answer(await self._socket.receive())
            if self._sink.unsent_bytes > _ANSWERS_BYTES_MAX:
                try:
                    await self._sink.wait_sent(self._watch.stall_s)
                except ClientStalled:
                    self.end()

    async def _answer(self, message: bytes) -> None:
        wording = WebSocketEncoder(b"")
        try:
            fields: Fields = decode_json(_decode_fields, message)
            wording = WebSocketEncoder(_request_id(fields))
            if self._key is not None and self._rates is not None:
                self._rates.take(self._key, time.monotonic())
            op = _text(fields, "op")
            command = self._commands.get(op)
            if command is None:
                raise InvalidRequest(f"op: {op[:64]} is not one of {', '.join(self._commands)}", field="op")
            self._sink.put(await command(fields, wording))
        except StreamsError as error:
            self._sink.put(wording.refusal(error))

    # -- commands

    async def _subscribe(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        body = _watch_body(fields)
        plan, warnings = unknown_fields.plan_watch(body, self._watch.node_bytes_max, strict=self._strict)
        self._check(READ, *plan.starts)
        for box in plan.starts:
            if box in self._scopes:
                raise InvalidRequest(f"boxes: {box} is already subscribed on this connection", field="boxes")
        if len(self._scopes) + len(plan.starts) > WATCHED_BOXES_MAX:
            raise InvalidRequest(
                f"boxes: at most {WATCHED_BOXES_MAX} subscriptions per connection", field="boxes"
            )
        views = await self._watch.view_boxes(plan, lenient=False)
        assert self._nursery is not None
        description: dict[str, Any] = {"boxes": starts_in(plan, views)}
        if warnings:
            description["warnings"] = warnings
        self._sink.put(wording.event(b"subscribed", msgspec.json.encode(description), b""))
        for box, view in views.items():
            merge = merge_of(WatchPlan({box: plan.starts[box]}, plan.encoding, _HEARTBEAT_MS), {box: view})
            stream = self._watch.stream(
                merge, plan.encoding, _HEARTBEAT_MS, wording, self._backlog_lock, owner=owner_of(self._key)
            )
            scope = self._scopes[box] = trio.CancelScope()
            self._nursery.start_soon(self._run_stream, stream, scope)
        return b""  # the reply is in the sink already: it must precede all events

    async def _run_stream(self, stream: Subscription, scope: trio.CancelScope) -> None:
        with scope:
            await stream.run(self._sink)
            self.end()  # a stream returns only if the client does not read

    async def _unsubscribe(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        boxes = _box_names(fields)
        for box in boxes:
            if box not in self._scopes:
                raise InvalidRequest(f"box: {box[:256]} is not subscribed on this connection", field="box")
        for box in boxes:
            self._scopes.pop(box).cancel()
        await trio.lowlevel.checkpoint()
        return wording.event(b"ack", orjson.dumps({"boxes": boxes}), b"")

    async def _publish(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        box = _text(fields, "box")
        self._check(WRITE, box)
        body = {name: raw for name, raw in fields.items() if name not in _COMMAND_FIELDS}
        request = Request("POST", "", "", {}, b"", time.perf_counter_ns())
        grant, account = (None, "") if self._key is None else (self._key.shard_grant, self._key.account)
        head = wire.RequestHead(box, grant=grant, account=account)
        owner = owner_of(self._key)
        is_urgent = bytes(fields.get("disable_backpressure", b"")) == b"true"
        payload = msgspec.json.encode(body)
        answer, waited_s = await self._dispatch.append(head, payload, owner=owner, is_urgent=is_urgent)
        return wording.event(b"ack", b"".join(from_shard(request, answer, waited_s).parts), b"")

    def _check(self, scope: int, *boxes: str) -> None:
        if self._key is not None:
            self._key.grant.require(scope)
            for box in boxes:
                self._key.grant.require_name(box)

    async def _ping(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        await trio.lowlevel.checkpoint()
        return wording.event(b"ack", b"{}", b"")


# -- fields


def _request_id(fields: Fields) -> bytes:
    """Return the raw JSON of `request_id`: a string or a number, echoed unchanged."""
    raw = bytes(fields.get("request_id", b""))
    if raw[:1] in (b"{", b"[") or len(raw) > _REQUEST_ID_BYTES_MAX:
        raise InvalidRequest(
            f"request_id: must be a string or number of at most {_REQUEST_ID_BYTES_MAX} bytes",
            field="request_id",
        )
    return raw


def _value(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise InvalidRequest(f"{name}: is missing", field=name)
    return decode_json(msgspec.json.decode, bytes(fields[name]))


def _text(fields: Fields, name: str) -> str:
    value = _value(fields, name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be a string", field=name)
    return value


def _box_names(fields: Fields) -> list[str]:
    if "boxes" not in fields:
        return [_text(fields, "box")]
    boxes = _value(fields, "boxes")
    if not isinstance(boxes, list) or not all(isinstance(box, str) for box in boxes):
        raise InvalidRequest("boxes: must be a list of box names", field="boxes")
    return list(dict.fromkeys(boxes))


def _watch_body(fields: Fields) -> bytes:
    """Build the body of an equivalent `POST /v0/watch`. A single `box` replaces the `boxes` map."""
    body: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in ("op", "request_id")}
    if "box" in body:
        if "boxes" in body:
            raise InvalidRequest("box: cannot be combined with boxes", field="box")
        box = _text(fields, "box")
        del body["box"]
        body["boxes"] = {box: {name: body.pop(name) for name in ("from_seq", "tail") if name in body}}
    return msgspec.json.encode(body)
