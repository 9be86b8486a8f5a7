"""The Quart-Trio app: calls the handler for requests that Hypercorn serves (HTTP/2, upgrades, or everything).

Quart provides the lifespan and WebSockets. Its HTTP half is replaced through Quart's own extension point
(`asgi_http_class`), because its default breaks our guarantees: it cancels a handler when the client
disconnects (the outcome of a write would be unknown), decodes the path, and has no deadline with a minimum
rate."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import quart
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from gateway.admission.memory import EVERYONE, STRANGERS, Charge, MemoryBudget, answer_budget
from gateway.http.edge_rules import (
    FrontLimits,
    answer,
    body_budget,
    bug_response,
    check_body_length,
    check_host,
    check_response_header,
    check_url_length,
    close_body,
    content_length_of,
    has_no_body,
    no_free_connection_error,
    refusal,
    refused_stream,
    split_target,
)
from gateway.http.hypercorn.incoming import IncomingBody
from gateway.http.hypercorn.server import ABORT, SET_KNOWN
from gateway.requests.errors import response_for
from gateway.requests.queued_sink import QueuedSink
from gateway.requests.request import (
    Admit,
    Buffer,
    ClientStalled,
    EarlyRejection,
    Handler,
    Live,
    Request,
    Response,
    Socket,
    SocketHandler,
    is_full_duplex,
)
from streams.protocol.errors import InvalidRequest, StreamsError

#: The one address that speaks WebSocket (v0 §7.5).
SOCKET_PATH = "/v0/ws"

#: Bytes handed to Hypercorn at a time. When Hypercorn has taken a piece, most of it has reached the client.
_SLICE_BYTES = 256 * 1024

#: Methods without an expected body. A body that comes anyway is read only for a known client.
_BODYLESS = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))


def build_app(
    handler: Handler,
    limits: FrontLimits | None = None,
    *,
    bodies: MemoryBudget | None = None,
    answers: MemoryBudget | None = None,
    draining: trio.Event | None = None,
    socket_handler: SocketHandler | None = None,
    admit: Admit | None = None,
) -> QuartTrio:
    limits = limits or FrontLimits()
    if bodies is None:
        bodies = body_budget(limits)
    if draining is None:
        draining = trio.Event()
    if answers is None:
        answers = answer_budget()
    return _App(handler, limits, bodies, answers, draining, socket_handler, admit)


class _App(QuartTrio):
    def __init__(
        self,
        handler: Handler,
        limits: FrontLimits,
        bodies: MemoryBudget,
        answers: MemoryBudget,
        draining: trio.Event,
        socket_handler: SocketHandler | None,
        admit: Admit | None = None,
    ) -> None:
        super().__init__("gateway", static_folder=None)
        self.asgi_http_class = Exchange  # type: ignore[assignment]  # it wants an _App, as here
        self.handler = handler
        self.admit = admit
        self.limits = limits
        self.bodies = bodies
        self.answers = answers
        self.draining = draining
        self.socket_handler = socket_handler
        if socket_handler is not None:
            self.add_websocket(SOCKET_PATH, "socket", self._serve_socket)

    async def _serve_socket(self) -> quart.Response | None:
        assert self.socket_handler is not None
        headers = {name.lower(): value for name, value in quart.websocket.headers.items()}
        started_ns = time.perf_counter_ns()

        async def accept() -> Socket:
            if not _set_known(quart.websocket.scope):
                raise no_free_connection_error()
            await quart.websocket.accept()
            return _Socket()

        try:
            await self.socket_handler(headers, accept)
        except StreamsError as error:
            spent_ms = (time.perf_counter_ns() - started_ns) / 1e6
            error_response = response_for(error, server_total_ms=spent_ms)
            answer = quart.Response(b"".join(error_response.parts), error_response.status)
            for name, value in error_response.headers:
                answer.headers[name.decode()] = value.decode()
            return answer
        return None


class _Socket:
    """The WebSocket of the Quart context that this task runs in."""

    async def receive(self) -> bytes:
        message = await quart.websocket.receive()
        return message.encode() if isinstance(message, str) else bytes(message)

    async def send(self, text: bytes) -> None:
        await quart.websocket.send(text.decode())


class _ClientGone(Exception):
    """The client disconnected before its request was complete."""


class _ClientStalled(Exception):
    """The client does not read its answer."""


class Exchange(TrioASGIHTTPConnection):
    """One request and its answer, over ASGI."""

    app: _App

    def __init__(self, app: _App, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._is_http_1 = scope["http_version"].startswith("1")
        self._method = scope["method"]

    def __repr__(self) -> str:
        return f"<Exchange {self._method} {self.scope['raw_path']!r}>"

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        started_ns = time.perf_counter_ns()
        headers = _headers_of(self.scope)
        error_response: Response | None = None
        try:
            path, query = self._check_head(headers)
            if is_full_duplex(self._method, path, headers.get("content-type")):
                await self._serve_full_duplex(path, query, headers, receive, send)
                return
            body, charge = await self._read_body(path, headers, query, receive)
        except StreamsError as error:
            error_response = refusal(error, headers, started_ns, self.scope["raw_path"].decode("latin-1"))
        except EarlyRejection as early:
            error_response = early.response
        except _ClientGone:
            return
        if error_response is not None:  # Not above: there, the traceback keeps the body in memory.
            await self._refuse(error_response, receive, send)
            return
        request = Request(self._method, path, query, headers, body, time.perf_counter_ns())
        request.memory, request.charge = self.app.bodies, charge
        request.watch_peer = partial(_cancel_when_gone, receive)
        try:
            response = await self._answer(request)
        finally:
            charge.close()
        del body
        try:
            for header in response.headers:
                check_response_header(*header)
        except ValueError as error:
            if response.live is not None:
                response.live.close()
            response = bug_response(request, error)
        if response.is_streamed:
            await self._send_streamed(request, response, receive, send)
            return
        if response.charge is None:  # nobody has asked for room
            owner = STRANGERS if request.key is None and self.app.admit is not None else request.owner
            response.charge = self.app.answers.charge(owner, 0, sum(map(len, response.parts)))
        try:
            with suppress(_ClientStalled):
                await self._send(response, send)
                await self._emit(send, _END)
        finally:
            if response.charge is not None:
                response.charge.close()

    async def _serve_full_duplex(
        self,
        path: str,
        query: str,
        headers: dict[str, str],
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        """Answer a request while its body arrives. The handler authenticates it before it reads the body."""
        request = Request(self._method, path, query, headers, b"", time.perf_counter_ns())
        incoming = IncomingBody(ends_with_client=not self._is_http_1)
        request.incoming = incoming
        request.memory = self.app.bodies
        response = await self._answer(request)
        if response.is_streamed:
            await self._send_streamed(request, response, receive, send, incoming)
        else:
            await self._refuse(response, receive, send)

    async def _answer(self, request: Request) -> Response:
        response = await answer(self.app.handler, request)
        is_known = request.key is not None or self.app.admit is None
        is_kept = is_known and _set_known(self.scope)
        return await refused_stream(request, response) if response.is_streamed and not is_kept else response

    def _note_owner(self, owner: str) -> None:
        if owner != STRANGERS:
            _set_known(self.scope)

    # Reading.

    def _check_head(self, headers: Mapping[str, str]) -> tuple[str, str]:
        limits = self.app.limits
        scope = self.scope
        raw_path: bytes = scope["raw_path"]
        raw_query: bytes = scope["query_string"]
        check_url_length(len(raw_path) + len(raw_query) + 1, limits)
        if sum(1 for _ in scope["headers"]) > limits.header_count_max:
            raise InvalidRequest(f"the request has more than {limits.header_count_max} headers")
        target = raw_path + b"?" + raw_query if raw_query else raw_path
        if not target.isascii():
            raise InvalidRequest("the request target is not ASCII")
        if scope["http_version"] != "1.0" or "host" in headers:
            check_host(headers.get("host"))
        return split_target(self._method, target.decode("ascii"))

    async def _read_body(
        self, path: str, headers: dict[str, str], query: str, receive: ASGIReceiveCallable
    ) -> tuple[bytearray, Charge]:
        """Return the whole body and its charge, which the caller closes. Does not wait for a stranger's
        body."""
        limits, admit = self.app.limits, self.app.admit
        length = content_length_of(headers.get("content-length"))
        check_body_length(length, limits)
        owner = EVERYONE if admit is None else STRANGERS
        if admit is not None and (length or self._method not in _BODYLESS):
            owner = await admit(path, headers, query)
        self._note_owner(owner)
        charge = self.app.bodies.open(owner)
        body = bytearray()
        started_s = trio.current_time()
        with trio.CancelScope() as scope:
            charge.watch(scope.cancel)
            try:
                while True:
                    scope.deadline = (
                        started_s + limits.body_timeout_s + len(body) / limits.rate_bytes_per_s_min
                    )
                    message: Any = await receive()
                    if message["type"] != "http.request":
                        raise _ClientGone
                    part = message["body"]
                    check_body_length(len(body) + len(part), limits)
                    charge.grow(len(part))
                    charge.note_progress(len(part))
                    body += part
                    if not message.get("more_body", False):
                        charge.unwatch()
                        return body, charge
                    if admit is not None and charge.owner == STRANGERS:
                        charge.assign(await admit(path, headers, query))
                        self._note_owner(charge.owner)
            except BaseException:
                charge.close()
                raise
        if charge.is_ended:
            raise self.app.bodies.refusal(charge.owner, is_stalled=True)
        raise InvalidRequest("the request body came too slowly")

    # Writing.

    def _start(self, response: Response, *, closes: bool) -> dict[str, Any]:
        headers = list(response.headers)
        if not response.is_streamed and response.status != 204:
            headers.append((b"content-length", b"%d" % sum(map(len, response.parts))))
        if self._is_http_1 and (closes or self.app.draining.is_set()):
            headers.append((b"connection", b"close"))
        return {"type": "http.response.start", "status": response.status, "headers": headers}

    async def _emit(
        self, send: ASGISendCallable, event: Mapping[str, Any], size: int = 0, since_s: float | None = None
    ) -> None:
        """Send an event of `size` bytes with a deadline that counts from `since_s`, by default now. Hypercorn
        alone would wait forever for an HTTP/2 client that gives no window."""
        limits = self.app.limits
        send_any: Any = send
        since_s = trio.current_time() if since_s is None else since_s
        deadline_s = since_s + limits.write_timeout_s + size / limits.rate_bytes_per_s_min
        with trio.CancelScope(deadline=deadline_s) as scope:
            await send_any(event)
        if scope.cancelled_caught:
            # The buffers of this client would stay for as long as it keeps the connection.
            self.scope.get("state", {}).get(ABORT, lambda: None)()
            raise _ClientStalled

    async def _send(self, response: Response, send: ASGISendCallable, *, closes: bool = False) -> None:
        """Send an answer without the end of the exchange. Closes the whole connection of a client that stalls
        while others need its memory."""
        charge = response.charge
        if charge is not None:
            charge.watch(self.scope.get("state", {}).get(ABORT, lambda: None))
        await self._emit(send, self._start(response, closes=closes))
        if not has_no_body(self._method, response.status):
            since_s, total = trio.current_time(), 0
            for part in response.parts:
                for at in range(0, len(part), _SLICE_BYTES):
                    piece = part if len(part) <= _SLICE_BYTES else memoryview(part)[at : at + _SLICE_BYTES]
                    total += len(piece)
                    await self._emit(send, _body(piece), total, since_s)
                    if charge is not None:
                        charge.note_progress(len(piece))

    async def _send_streamed(
        self,
        request: Request,
        response: Response,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        incoming: IncomingBody | None = None,
    ) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope, incoming)
                try:
                    await self._emit(send, self._start(response, closes=False))
                    if not has_no_body(self._method, response.status):
                        if response.live is not None:
                            await self._run_live(response.live, send, incoming)
                        elif response.stream is not None:
                            await self._pump(response.stream, send)
                    if incoming is not None:
                        incoming.close()
                    await self._emit(send, _END)
                except _ClientStalled:
                    pass
                except Exception as error:
                    bug_response(request, error)  # Logged. The client sees the stream break off.
                nursery.cancel_scope.cancel()
        finally:
            await close_body(response)

    async def _pump(self, stream: AsyncIterator[bytes], send: ASGISendCallable) -> None:
        async for chunk in stream:
            await self._emit(send, _body(chunk), len(chunk))

    async def _run_live(self, live: Live, send: ASGISendCallable, incoming: IncomingBody | None) -> None:
        """Run a live answer. Input of `incoming` that comes after the last answer is dropped: the task that
        would wait with it also receives the peer's window updates, which the answer may need."""
        sink = QueuedSink()
        with trio.CancelScope() as body:
            is_stalled = False

            async def keep_sending() -> None:
                nonlocal is_stalled
                try:
                    while True:
                        part = await sink.next_all()
                        await self._emit(send, _body(part), len(part))
                        sink.note_sent(len(part))
                except _ClientStalled:
                    is_stalled = True
                    body.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_sending)
                try:
                    await live.run(sink)
                    if incoming is not None:
                        incoming.close()
                    await sink.wait_sent(self.app.limits.linger_s)
                except ClientStalled:
                    is_stalled = True
                nursery.cancel_scope.cancel()
        if is_stalled:
            raise _ClientStalled

    async def _refuse(self, response: Response, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer before the body is read. A connection of HTTP/1.1 is then closed (`connection.py`)."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drop_input, receive)  # It may be in the way of a window for the answer.
            with suppress(_ClientStalled):
                await self._send(response, send, closes=True)
                await self._emit(send, _END)
            nursery.cancel_scope.cancel()


_END: Mapping[str, Any] = {"type": "http.response.body", "body": b"", "more_body": False}


def _body(part: Buffer) -> Mapping[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": True}


async def _cancel_when_gone(
    receive: ASGIReceiveCallable, stream_scope: trio.CancelScope, incoming: IncomingBody | None = None
) -> None:
    """Pass the input on to a handler that reads it as it arrives."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            if incoming is None or incoming.ends_with_client:
                stream_scope.cancel()
            else:
                incoming.break_off()
            return
        if incoming is not None:
            await incoming.put(message)


async def _drop_input(receive: ASGIReceiveCallable) -> None:
    message: Any = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


def _set_known(scope: Any) -> bool:
    """Note that the client has shown a valid key, or that the server has no keys. Returns False if there is
    no room to keep the connection."""
    return bool(scope.get("state", {}).get(SET_KNOWN, lambda: True)())


def _headers_of(scope: HTTPScope) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
