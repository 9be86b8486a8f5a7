"""Serves one HTTP/1.1 connection: read a head, read its body, call the handler, send the answer, repeat.

    EdgeSocket ──► EdgeInput ──► Connection ──► handler
         ▲                           └──► EdgeOutput ─┐
         └────────────────────────────────────────────┘

Rules of this file:
- Requests of a connection are answered one after the other, so pipelined answers are in order.
- A connection runs inline (`gateway/admission/inline.py`): in the function that reports that its socket is
  readable, and in the link that has the answer of its shard. Its task takes over for everything else that
  waits: `need_task`.
- A handler is never cancelled because its client disconnected: the outcome of a write would be unknown. Its
  answer is dropped. Only streamed answers, and handlers that declare that they only wait, watch their peer.
  An append session reads its own body from the same socket, and so notices a disconnect.
"""

from __future__ import annotations

import socket
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

from gateway.admission import inline
from gateway.admission.inline import need_task
from gateway.admission.memory import EVERYONE, STRANGERS
from gateway.http.edge_incoming import IncomingBody
from gateway.http.edge_input import EdgeInput
from gateway.http.edge_output import EdgeOutput
from gateway.http.edge_rules import answer, bug_response, refusal, refused_stream
from gateway.http.edge_socket import EdgeSocket, WaitExpired
from gateway.http.h1 import CONTINUE, H2_PREFACE, HttpRequestHead
from gateway.requests import urgency
from gateway.requests.request import Buffer, EarlyRejection, Request, Response
from streams.protocol.errors import StreamsError

if TYPE_CHECKING:
    from gateway.admission.connection_table import OpenConnection
    from gateway.http.edge import Front

#: Pipelined requests of a client with a valid key that are served in a row before others get a turn. All
#: other clients take a turn for each request.
PIPELINE_TURN = 16


class EdgeConnection:
    __slots__ = ("_front", "_head", "_input", "_output", "_place", "_wire", "request_count")

    def __init__(self, sock: socket.socket, front: Front, place: OpenConnection) -> None:
        self._wire = EdgeSocket(sock, front.scheduler, EVERYONE if front.admit is None else STRANGERS)
        self._input = EdgeInput(self._wire, front)
        self._output = EdgeOutput(self._wire, front)
        self._place = place
        self._front = front
        self._head: HttpRequestHead | None = None
        self.request_count = 0

    def __repr__(self) -> str:
        return f"<EdgeConnection {'idle' if self.is_idle else 'busy'}, {self.request_count} served>"

    @property
    def deadline(self) -> float:
        return self._wire.deadline

    @property
    def is_idle(self) -> bool:
        return self._input.is_idle

    @property
    def is_busy(self) -> bool:
        """True while a request is handled. It has no deadline then."""
        return not self._input.is_idle and self._wire.deadline == inf

    def wake(self) -> None:
        """Interrupt the wait of this connection for its socket."""
        self._wire.wake()

    async def run(self) -> bytes | None:
        """Serve until the connection ends. Returns None, or the bytes read so far if Hypercorn must take
        over. An `InlineCoroutine` runs it."""
        error_response: Response | None = None
        try:
            return await self._serve_requests()
        except StreamsError as error:
            head = self._head
            now_ns = perf_counter_ns()
            error_response = (
                refusal(error, head.headers, now_ns, head.path) if head else refusal(error, {}, now_ns)
            )
        except EarlyRejection as early:
            error_response = early.response
        except (OSError, WaitExpired):
            pass
        finally:
            if self._input.charge is not None:
                self._input.charge.close()
            self._output.close()
        if error_response is not None:  # Outside `except`, whose traceback would keep the body in memory.
            await self._refuse(error_response)
        return None

    async def _serve_requests(self) -> bytes | None:
        """Serve requests one after the other. This is the hot path: a small request costs one read, one
        write, no task and no coroutine but the handler's."""
        front, wire, reader, sender = self._front, self._wire, self._input, self._output
        handler, parse_head = front.handler, front.heads.parse_untrusted
        while True:
            self._head = None
            if inline.current_run is None:
                await inline.leave_task()
            data = reader.pending or await reader.receive_idle(is_first=self.request_count == 0)
            raw = reader.cut_head(data) or await reader.read_slow_head(data)
            if not raw:
                return None
            if raw == H2_PREFACE and not self.request_count:
                return raw + reader.pending
            head = parse_head(raw)
            if head.upgrades:
                return raw + reader.pending
            self._head = head
            self.request_count += 1
            reader.is_urgent = "urgent" in head.query or urgency.HEADER in head.headers
            if reader.is_urgent:
                front.scheduler.note_urgent()
            if head.is_full_duplex:
                del data
                if not await self._serve_full_duplex(head):
                    return None
                continue
            body: Buffer | None = reader.cut_body(head)
            if body is None:
                body = await self._read_body(head)
            reader.note_request(head, body)
            wire.deadline = inf
            request = self._request_of(head, body)
            request.charge, request.watch_peer = reader.charge, reader.watch_peer
            try:
                response = await handler(request)
            except Exception as error:  # Only a bug makes a handler raise.
                response = bug_response(request, error)
            finally:
                if request.charge is not None:
                    request.charge.close()
                    reader.charge = None
            self._keep(request)
            keep_alive = head.keep_alive and not front.is_draining
            if response.is_streamed:
                keep_alive = await self._send_streamed(head, request, response, keep_alive)
            else:
                sender.charge = response.charge
                parts = sender.render(head, request, response, keep_alive)
                sent_bytes = sender.send_nowait(parts)
                if sent_bytes >= 0:
                    await sender.finish(request, parts, sent_bytes)
                del parts
                sender.close()
            if not keep_alive:
                if head.keep_alive:
                    await wire.linger(front.limits)  # The client may still be sending.
                return None
            pause_s = response.pause_s
            # Free the last request while the connection waits for the next one.
            del data, body, request, response
            if pause_s:
                await need_task()
                await trio.sleep(pause_s)
            if reader.pending and (self.request_count % PIPELINE_TURN == 0 or not self._place.is_kept):
                await self._take_turn()

    async def _send_streamed(
        self, head: HttpRequestHead, request: Request, response: Response, keep_alive: bool
    ) -> bool:
        """Send a streamed answer, or a refusal if the connection cannot be kept. Returns True if another
        request can follow."""
        await need_task()
        sender = self._output
        if self._place.is_kept:
            return await sender.send_streamed(head, request, response, keep_alive, self._input.watch_peer)
        refusal = await refused_stream(request, response)
        await sender.send(sender.render(head, request, refusal, keep_alive))
        return keep_alive

    def _request_of(self, head: HttpRequestHead, body: Buffer) -> Request:
        request = Request(head.method, head.path, head.query, head.headers.copy(), body, perf_counter_ns())
        request.memory = self._front.bodies
        request.waited_s = self._input.take_waited_s()
        return request

    def _keep(self, request: Request) -> None:
        """Set the owner of this connection, and keep it, once its client has shown a key."""
        if request.key is not None:
            self._wire.owner = request.key.id
        if not self._place.is_kept and (request.key is not None or self._front.admit is None):
            self._place.keep()

    async def _take_turn(self) -> None:
        """Let other connections go first after many pipelined requests."""
        await need_task()
        await trio.lowlevel.checkpoint()
        if not self._front.scheduler.try_take():
            await self._front.scheduler.take(self._wire.owner)

    async def _read_body(self, head: HttpRequestHead) -> Buffer:
        """Read the body of a known client. `admit` refuses a stranger, so no body of a stranger is waited
        for."""
        await need_task()
        front = self._front
        owner = EVERYONE
        if front.admit is not None:
            owner = await front.admit(head.path, head.headers, head.query)
        if owner != STRANGERS:
            self._place.keep()
        self._input.charge = charge = front.bodies.open(owner)
        if head.expects_continue and not self._input.pending:
            await self._output.send([CONTINUE])
        return await self._input.read_body(head, charge)

    async def _serve_full_duplex(self, head: HttpRequestHead) -> bool:
        """Answer a request while its body arrives. Returns True if another request can follow.

        The handler authenticates the request before it reads the body. The body has no deadline: an open
        session may be silent, like an open stream. A client that has shut down its sending side still gets
        the rest of its answer."""
        await need_task()
        front = self._front
        self._wire.deadline = inf
        reader = self._input
        first, reader.pending = reader.pending, b""
        body = IncomingBody(reader.receive_or_break, first, head.length, front.limits)
        request = self._request_of(head, b"")
        request.incoming = body
        response = await answer(front.handler, request)
        self._keep(request)
        if response.is_streamed and not self._place.is_kept:
            response = await refused_stream(request, response)
        if not response.is_streamed:
            await self._refuse(response)
            return False
        if head.expects_continue and not first:
            await self._output.send([CONTINUE])
        keep_alive = head.keep_alive and not front.is_draining
        keep_alive = (
            await self._output.send_streamed(head, request, response, keep_alive, reader.watch_peer)
            and body.is_whole
        )
        if keep_alive:
            reader.pending = body.rest
        elif head.keep_alive or not body.is_whole:
            await self._wire.linger(front.limits)
        return keep_alive

    async def _refuse(self, response: Response) -> None:
        """Send an error and close the connection: it is not known where the next request starts."""
        await need_task()
        head = self._head
        size = sum(map(len, response.parts))
        framing = b"content-length: %d\r\nconnection: close\r\n" % size
        start = self._front.writer.render(response.status, response.headers, framing)
        parts = [] if head and head.method == "HEAD" else response.parts
        try:
            await self._output.send([b"".join((start, *parts))])
            await self._wire.linger(self._front.limits)
        except (OSError, WaitExpired):
            pass
