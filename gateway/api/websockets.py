"""The data plane over one WebSocket (v0 §7.5): subscribe, unsubscribe, publish, ping.

Commands are JSON objects with an `op` and, if the client likes, a `request_id` that every answer to it
carries, the records of a subscription included. They are carried out one after the other, so what one socket
publishes is appended in the order in which it was sent, and one command is all that is in flight.

    subscribe    box, from_seq or tail; or boxes as in POST /v0/watch; and the options of that  -> subscribed
    unsubscribe  box or boxes (a list)                                                          -> ack
    publish      box, and the body of an append                                                 -> ack
    ping                                                                                        -> ack

A browser sends `Origin` and asks nobody before it opens a socket to another site, so a page of another origin
is refused unless it is allowed (`gateway/access/origins.py`).

Bounds: `WATCHED_BOXES_MAX` boxes a socket; the size of a message in `http/hypercorn/server.py`; unsent events
as for every stream (`watch/stream.py`), and while more than `_ANSWERS_BYTES_MAX` are, no command is taken.
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
from gateway.watch.plan import Plan
from gateway.watch.service import Watch, merge_of, starts_shown
from gateway.watch.stream import Stream
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
#: There is nothing to beat with: a client that wants to hear us pings, the kernel looks after the rest.
_HEARTBEAT_MS = 60_000

Fields = dict[str, msgspec.Raw]
_decode_fields = msgspec.json.Decoder(Fields).decode
_NOT_OF_AN_APPEND = frozenset(("op", "request_id", "box"))


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
            slot.give()


class WebSocketEncoder:
    """Events as messages that carry the id of the request that asked for them."""

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

    def _error(self, told: dict[str, Any], **more: Any) -> bytes:
        told |= {name: value for name, value in more.items() if value}
        return self.event(b"error", orjson.dumps(told), b"")

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
        #: Whose backlog is read next: one page of all is on its way.
        self._turn = trio.Lock()
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        #: Box -> how to end its stream.
        self._subscribed: dict[str, trio.CancelScope] = {}
        self._commands: dict[str, Callable[[Fields, WebSocketEncoder], Awaitable[bytes]]] = {
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "publish": self._publish,
            "ping": self._ping,
        }

    def __repr__(self) -> str:
        return f"<WebSocketConnection {len(self._subscribed)} boxes>"

    def end(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        """Until the peer goes away, does not read what it asked for, or the gateway drains."""
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
                raise InvalidRequest(f"op: {op[:64]} is none of {', '.join(self._commands)}", field="op")
            self._sink.put(await command(fields, wording))
        except StreamsError as error:
            self._sink.put(wording.refusal(error))

    # -- commands

    async def _subscribe(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        body = _watch_body(fields)
        plan, warnings = unknown_fields.plan_watch(body, self._watch.node_bytes_max, strict=self._strict)
        self._check(READ, *plan.starts)
        for box in plan.starts:
            if box in self._subscribed:
                raise InvalidRequest(f"boxes: {box} is subscribed on this socket already", field="boxes")
        if len(self._subscribed) + len(plan.starts) > WATCHED_BOXES_MAX:
            raise InvalidRequest(f"boxes: at most {WATCHED_BOXES_MAX} on one socket", field="boxes")
        views = await self._watch.look_at(plan, lenient=False)
        assert self._nursery is not None
        shown: dict[str, Any] = {"boxes": starts_shown(plan, views)}
        if warnings:
            shown["warnings"] = warnings
        self._sink.put(wording.event(b"subscribed", msgspec.json.encode(shown), b""))
        for box, view in views.items():
            merge = merge_of(Plan({box: plan.starts[box]}, plan.encoding, _HEARTBEAT_MS), {box: view})
            stream = self._watch.stream(
                merge, plan.encoding, _HEARTBEAT_MS, wording, self._turn, owner=owner_of(self._key)
            )
            scope = self._subscribed[box] = trio.CancelScope()
            self._nursery.start_soon(self._run_stream, stream, scope)
        return b""  # said already: nothing of the boxes may come before it

    async def _run_stream(self, stream: Stream, scope: trio.CancelScope) -> None:
        with scope:
            await stream.run(self._sink)
            self.end()  # by itself it ends only when the peer does not read

    async def _unsubscribe(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        boxes = _listed(fields)
        for box in boxes:
            if box not in self._subscribed:
                raise InvalidRequest(f"box: {box[:256]} is not subscribed on this socket", field="box")
        for box in boxes:
            self._subscribed.pop(box).cancel()
        await trio.lowlevel.checkpoint()
        return wording.event(b"ack", orjson.dumps({"boxes": boxes}), b"")

    async def _publish(self, fields: Fields, wording: WebSocketEncoder) -> bytes:
        box = _text(fields, "box")
        self._check(WRITE, box)
        body = {name: raw for name, raw in fields.items() if name not in _NOT_OF_AN_APPEND}
        request = Request("POST", "", "", {}, b"", time.perf_counter_ns())
        grant, account = (None, "") if self._key is None else (self._key.passed_on, self._key.account)
        head = wire.RequestHead(box, grant=grant, account=account)
        owner = owner_of(self._key)
        is_urgent = bytes(fields.get("disable_backpressure", b"")) == b"true"
        encoded = msgspec.json.encode(body)
        answer, waited_s = await self._dispatch.append(head, encoded, owner=owner, is_urgent=is_urgent)
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
    """As it was written; text or a number, whatever the client counts with."""
    raw = bytes(fields.get("request_id", b""))
    if raw[:1] in (b"{", b"[") or len(raw) > _REQUEST_ID_BYTES_MAX:
        raise InvalidRequest("request_id: must be a short text or a number", field="request_id")
    return raw


def _value(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise InvalidRequest(f"{name}: is missing", field=name)
    return decode_json(msgspec.json.decode, bytes(fields[name]))


def _text(fields: Fields, name: str) -> str:
    value = _value(fields, name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be text", field=name)
    return value


def _listed(fields: Fields) -> list[str]:
    if "boxes" not in fields:
        return [_text(fields, "box")]
    boxes = _value(fields, "boxes")
    if not isinstance(boxes, list) or not all(isinstance(box, str) for box in boxes):
        raise InvalidRequest("boxes: must be a list of names", field="boxes")
    return list(dict.fromkeys(boxes))


def _watch_body(fields: Fields) -> bytes:
    """What `POST /v0/watch` would be sent. One box can be said without the map."""
    body: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in ("op", "request_id")}
    if "box" in body:
        if "boxes" in body:
            raise InvalidRequest("box: cannot be given together with boxes", field="box")
        box = _text(fields, "box")
        del body["box"]
        body["boxes"] = {box: {name: body.pop(name) for name in ("from_seq", "tail") if name in body}}
    return msgspec.json.encode(body)
