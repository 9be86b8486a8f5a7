"""One HTTP/1.1 connection of the edge: read a head, read its body, ask the handler, send the answer, again.

Rules of this file:
- One task per connection; requests are answered one after the other, so pipelined answers are in order and
  what a client has pipelined waits in the kernel's buffer and in `_pending`, which one read bounds.
- There is no cancel scope per wait (5 µs each, three a request). A connection says in `deadline` until when
  it will wait, and the front's sweep wakes it when that has passed (`trio.lowlevel.notify_closing`), which
  surfaces here as `Expired`.
- A handler is never cancelled because its client went away: a write would be left in doubt. Its answer is
  dropped. Only a streamed answer watches its peer, and a handler that says that it only waits. An append
  session reads its own body, which is the same socket, and so sees its peer go.
- We write first and wait only when the socket says so. We wait before we read, because there a wait is the
  rule; but not before the rest of a body whose beginning has come.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import wait_readable, wait_writable

from gateway.admission.memory import EVERYONE, STRANGERS, Charge
from gateway.admission.request_scheduler import PIECE_BYTES, REQUEST_COST
from gateway.http.body_memory import BodyMemory
from gateway.http.edge_incoming import IncomingBody
from gateway.http.edge_rules import (
    CHUNKED,
    answer,
    bug,
    check_body_length,
    close_body,
    has_no_body,
    refusal,
    refused_stream,
)
from gateway.http.edge_sink import JOIN_BYTES_MAX, EdgeSink
from gateway.http.h1 import (
    CONTINUE,
    H2_PREFACE,
    HEAD_END,
    LAST_CHUNK,
    ChunkedBody,
    Head,
    check_partial_head_untrusted,
)
from gateway.requests import urgency
from gateway.requests.request import BodyBroken, Buffer, Live, RefusedEarly, Request, Response, Stalled
from streams.protocol.errors import InvalidRequest, StreamsError
from streams.unsent import BUFFERS_MAX, UnsentBuffers

if TYPE_CHECKING:
    from gateway.admission.connection_table import OpenConnection
    from gateway.http.edge import Front

RECEIVE_BYTES = 64 * 1024
#: Bodies up to this size that came in one read with their head are not charged: on all 10,000 connections
#: together they are 40 MB.
SMALL_BODY_BYTES = 4 * 1024
#: Pipelined requests of a client with a valid key that are served in a row before others get a turn. All
#: other clients take a turn for each request.
PIPELINE_TURN = 16
#: What a stream's peer may send ahead while the stream runs; past it we stop reading and so stop watching.
STREAM_PENDING_BYTES_MAX = RECEIVE_BYTES

#: Reads of all connections land here and are copied out before anything is awaited, so one is enough:
#: a buffer per connection would be 640 MB at 10,000 connections.
_landing = memoryview(bytearray(RECEIVE_BYTES))


class Expired(Exception):
    """The deadline of a wait has passed, or the front is draining and this connection was idle."""


class Connection:
    __slots__ = (
        "_charge",
        "_cost",
        "_front",
        "_head",
        "_is_urgent",
        "_owner",
        "_pending",
        "_place",
        "_sock",
        "_waited_s",
        "deadline",
        "is_idle",
        "served",
    )

    def __init__(self, sock: socket.socket, front: Front, place: OpenConnection) -> None:
        self._sock = sock
        self._place = place
        self._front = front
        self._head: Head | None = None
        #: The memory of the body that is being read or handled.
        self._charge: Charge | None = None
        self._pending = b""
        #: What its last request was: whose, how expensive, and whether it said that it is urgent. The next
        #: one takes its turn as if it were the same.
        self._owner = EVERYONE if front.admit is None else STRANGERS
        self._cost = REQUEST_COST
        self._is_urgent = False
        #: How long the request that is served has waited for its turn.
        self._waited_s = 0.0
        self.deadline = inf
        self.is_idle = True
        self.served = 0

    def __repr__(self) -> str:
        return f"<Connection {'idle' if self.is_idle else 'busy'}, {self.served} served>"

    @property
    def is_busy(self) -> bool:
        """True while a request is handled: there is no deadline then."""
        return not self.is_idle and self.deadline == inf

    def wake(self) -> None:
        """Interrupts whatever this connection waits for on its socket."""
        self._front.scheduler.interrupt(self._sock)
        trio.lowlevel.notify_closing(self._sock)

    async def run(self) -> bytes | None:
        """Serves until the connection ends, or returns the bytes with which Hypercorn must take it over."""
        refused: Response | None = None
        try:
            return await self._serve_requests()
        except StreamsError as error:
            head = self._head
            now_ns = perf_counter_ns()
            refused = refusal(error, head.headers, now_ns, head.path) if head else refusal(error, {}, now_ns)
        except RefusedEarly as early:
            refused = early.response
        except (OSError, Expired):
            pass
        finally:
            if self._charge is not None:
                self._charge.close()
        if refused is not None:  # Not above: there, the traceback keeps the body in memory.
            await self._refuse(refused)
        return None

    async def _serve_requests(self) -> bytes | None:
        """The hot path: a small request passes through here with one wait, one read, one write and no other
        coroutine of ours than the handler's."""
        front = self._front
        handler, parse_head = front.handler, front.heads.parse_untrusted
        while True:
            self._head = None
            data = self._pending or await self._receive_idle()
            raw = self._cut_head(data) or await self._read_slow_head(data)
            if not raw:
                return None
            if raw == H2_PREFACE and not self.served:
                return raw + self._pending
            head = parse_head(raw)
            if head.upgrades:
                return raw + self._pending
            self._head = head
            self.served += 1
            self._is_urgent = "urgent" in head.query or urgency.HEADER in head.headers
            if self._is_urgent:
                front.scheduler.note_urgent()
            if head.is_full_duplex:
                del data
                if not await self._serve_full_duplex(head):
                    return None
                continue
            body: Buffer | None = self._cut_body(head)
            if body is None:
                body = await self._read_body(head)
            self._cost = _cost_like(head, body)
            self.deadline = inf
            headers = head.headers.copy()
            request = Request(head.method, head.path, head.query, headers, body, perf_counter_ns())
            request.memory, request.charge = front.bodies, self._charge
            request.watch_peer = self._watch_peer
            request.waited_s, self._waited_s = self._waited_s, 0.0
            try:
                response = await handler(request)
            except Exception as error:  # A handler raises only by a bug.
                response = bug(request, error)
            finally:
                if request.charge is not None:
                    request.charge.close()
                    self._charge = None
            if request.key is not None:
                self._owner = request.key.id
            if not self._place.is_kept and (request.key is not None or front.admit is None):
                self._place.keep()
            keep_alive = head.keep_alive and not front.is_draining
            if response.is_streamed and not self._place.is_kept:
                response = await refused_stream(request, response)
            if response.is_streamed:
                keep_alive &= await self._send_streamed(head, request, response, keep_alive)
            else:
                self._charge = response.charge
                parts = self._render(head, request, response, keep_alive)
                sent = self._send_nowait(parts)
                if sent >= 0:
                    charge = self._charge or self._charge_rest(request, parts, sent)
                    await self._send_rest(parts, sent, charge)
                del parts
                if self._charge is not None:
                    self._charge.close()
                    self._charge = None
            if not keep_alive:
                if head.keep_alive:
                    await self._linger()  # The client has not heard yet that we close: it may be sending.
                return None
            pause_s = response.pause_s
            # While it waits for its next request, a connection must not hold on to its last one.
            del data, body, request, response
            if pause_s:
                await trio.sleep(pause_s)
            if self._pending and (self.served % PIPELINE_TURN == 0 or not self._place.is_kept):
                await trio.lowlevel.checkpoint()
                if not front.scheduler.try_take():
                    await front.scheduler.take(self._owner)

    async def _serve_full_duplex(self, head: Head) -> bool:
        """Answers a request while its body arrives. Returns True if another request can follow.

        The handler authenticates the request before anything of the body is read. The body has no deadline:
        an open session may be silent, as an open stream may. A client that has shut down its sending side
        still gets the rest of its answer."""
        front = self._front
        self.deadline = inf
        first, self._pending = self._pending, b""
        body = IncomingBody(self._receive_or_break, first, head.length, front.limits)
        request = Request(head.method, head.path, head.query, head.headers.copy(), b"", perf_counter_ns())
        request.memory, request.incoming = front.bodies, body
        request.waited_s, self._waited_s = self._waited_s, 0.0
        response = await answer(front.handler, request)
        if not self._place.is_kept and (request.key is not None or front.admit is None):
            self._place.keep()
        if response.is_streamed and not self._place.is_kept:
            response = await refused_stream(request, response)
        if not response.is_streamed:
            await self._refuse(response)
            return False
        if head.expects_continue and not first:
            await self._send([CONTINUE])
        keep_alive = head.keep_alive and not front.is_draining
        keep_alive = await self._send_streamed(head, request, response, keep_alive) and body.is_whole
        if keep_alive:
            self._pending = body.rest
        elif head.keep_alive or not body.is_whole:
            await self._linger()
        return keep_alive

    # Reading.

    async def _receive_idle(self) -> bytes:
        """The first bytes of the next request; b"" when there will be none."""
        sock, scheduler = self._sock, self._front.scheduler
        self.deadline = self._front.idle_deadline_s
        self.is_idle = True
        must_wait = self.served > 0  # The first bytes of a connection are there (`lobby.py`).
        while not self._front.is_draining:
            try:
                if scheduler.is_crowded and not self._is_urgent and must_wait:
                    self._waited_s = await scheduler.wait_readable(sock, self._owner, self._cost)
                else:
                    if must_wait:
                        await wait_readable(sock)
                    must_wait = True
                    if not scheduler.try_take(self._cost):
                        self._waited_s = await scheduler.take_to_read(sock, self._owner, self._cost)
                data = bytes(_landing[: sock.recv_into(_landing)])
                self.is_idle = False
                return data
            except BlockingIOError:
                continue
            except trio.ClosedResourceError:
                break
        # Time to go, but a request that has arrived is still served.
        self.is_idle = False
        try:
            return bytes(_landing[: sock.recv_into(_landing)])
        except BlockingIOError:
            return b""

    async def _receive(self) -> bytes:
        """Waits, then reads; b"" is the end."""
        while True:
            try:
                await wait_readable(self._sock)
                return bytes(_landing[: self._sock.recv_into(_landing)])
            except trio.ClosedResourceError:
                raise Expired from None
            except BlockingIOError:
                continue

    async def _receive_or_break(self) -> bytes:
        """Reads more of a body that is handled as it arrives."""
        try:
            data = await self._receive()
        except (OSError, Expired):
            data = b""
        if not data:
            raise BodyBroken("the request ended in the middle of its body")
        return data

    def _cut_head(self, data: bytes) -> bytes:
        """The head at the start of `data`, CRLF CRLF included, or b"" when it is not whole. What follows it
        becomes `_pending`."""
        if data.startswith(b"\r\n"):
            data = data[2:]  # One empty line before a request is forgiven, as RFC 9112 asks.
        end = data.find(HEAD_END) + 4
        if end < 4:
            return b""
        self._pending = data[end:]
        return data[:end]

    async def _read_slow_head(self, data: bytes) -> bytes:
        """The head that starts with `data`, or b"" when nothing of one ever comes."""
        if not data:
            return b""
        limits = self._front.limits
        self._pending = b""
        self.deadline = trio.current_time() + limits.head_timeout_s
        partial = bytearray(data)
        is_line_forgiven = False
        looked = 0
        while True:
            if not is_line_forgiven and partial.startswith(b"\r\n"):
                is_line_forgiven = True
                del partial[:2]
            end = partial.find(HEAD_END, looked) + 4
            if end >= 4:
                self._pending = bytes(partial[end:])
                return bytes(partial[:end])
            if partial:
                check_partial_head_untrusted(partial, limits)
            looked = max(0, len(partial) - 3)
            try:
                data = await self._receive()
            except Expired:
                raise InvalidRequest(
                    f"the request head did not arrive within {limits.head_timeout_s:g} s"
                ) from None
            if not data:
                if not partial:
                    return b""
                raise InvalidRequest("the request ended in the middle of its head")
            partial += data

    def _cut_body(self, head: Head) -> bytes | None:
        """The body, when it came together with its head. One that is not small is charged to the clients
        without a key until its handler knows whose it is."""
        length = head.length
        if length == 0:
            return b""
        if length == CHUNKED:
            return None
        front = self._front
        check_body_length(length, front.limits)
        pending = self._pending
        if len(pending) < length:
            return None
        if length > SMALL_BODY_BYTES:
            charge = front.bodies.open(EVERYONE if front.admit is None else STRANGERS)
            if not charge.try_grow(length):
                return None  # It is charged to its owner, who may have room.
            self._charge = charge
        self._pending = pending[length:]
        return pending[:length]

    async def _read_body(self, head: Head) -> Buffer:
        """The body of a client that is known: a stranger's is not waited for."""
        front = self._front
        owner = EVERYONE
        if front.admit is not None:
            owner = await front.admit(head.path, head.headers, head.query)
        if owner != STRANGERS:
            self._place.keep()
        charge = self._charge = front.bodies.open(owner)
        charge.watch(self.wake)
        if head.expects_continue and not self._pending:
            await self._send([CONTINUE])
        body: Buffer
        if head.length == CHUNKED:
            body = await self._read_chunked_body(charge)
        else:
            body = await self._read_long_body(charge, head.length)
        charge.unwatch()
        return body

    async def _read_long_body(self, charge: Charge, length: int) -> Buffer:
        """Straight from the kernel into its place, however long, a piece at a time between which others have
        their turn."""
        data, self._pending = self._pending, b""
        if len(data) >= length:  # It came whole in one read.
            charge.grow(length)
            self._pending = data[length:]
            return data[:length]
        scheduler = self._front.scheduler
        body = BodyMemory(charge, length, data)
        started_s = trio.current_time()
        unpaid = 0
        must_wait = not data  # What follows the beginning of a body is there already, as a rule.
        while body.have < length:
            if must_wait:
                self._set_body_deadline(started_s, body.have)
                await self._wait_body(charge)
            must_wait = True
            try:
                count = self._sock.recv_into(body.space())
            except BlockingIOError:
                continue
            if count == 0:
                raise InvalidRequest("the request ended in the middle of its body")
            body.have += count
            charge.moved(count)
            unpaid += count
            if unpaid >= PIECE_BYTES:
                if not scheduler.try_take(unpaid):
                    await scheduler.take(charge.owner, unpaid)
                must_wait = count < PIECE_BYTES or charge.is_ended
                unpaid = 0
        return body.take_whole()

    async def _wait_body(self, charge: Charge) -> None:
        """Waits until more of a body has come."""
        if not charge.is_ended:
            try:
                await wait_readable(self._sock)
            except trio.ClosedResourceError:
                if not charge.is_ended:
                    raise self._too_slow() from None
        if charge.is_ended:
            raise self._front.bodies.refusal(charge.owner, is_stalled=True)

    async def _read_chunked_body(self, charge: Charge) -> bytearray:
        chunked = ChunkedBody(self._front.limits)
        data = self._pending
        started_s = trio.current_time()
        while True:
            if data:
                chunked.feed_untrusted(data)
                while chunked.is_behind:
                    await trio.lowlevel.checkpoint()
                    chunked.feed_untrusted(b"")
                charge.grow(len(chunked.body) - charge.size)
            if chunked.done:
                self._pending = chunked.rest
                return chunked.body
            self._set_body_deadline(started_s, charge.size)
            await self._wait_body(charge)
            try:
                data = bytes(_landing[: self._sock.recv_into(_landing)])
            except BlockingIOError:
                data = b""
                continue
            if not data:
                raise InvalidRequest("the request ended in the middle of its body")
            charge.moved(len(data))

    def _set_body_deadline(self, started_s: float, have: int) -> None:
        limits = self._front.limits
        self.deadline = started_s + limits.body_timeout_s + have / limits.rate_bytes_per_s_min

    def _too_slow(self) -> InvalidRequest:
        limits = self._front.limits
        return InvalidRequest(
            f"the request body came too slowly: {limits.body_timeout_s:g} s are given, and one more for "
            f"every {limits.rate_bytes_per_s_min} bytes"
        )

    # Writing.

    def _render(self, head: Head, request: Request, response: Response, keep_alive: bool) -> list[Buffer]:
        """The whole answer as the buffers to send, small ones joined."""
        parts = response.parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        framing = _connection_line(head, keep_alive)
        if response.status != 204:
            framing = b"content-length: %d\r\n%b" % (size, framing)
        try:
            start = self._front.writer.render(response.status, response.headers, framing)
        except (ValueError, KeyError, TypeError) as error:  # A header or a status that cannot be sent.
            return self._render(head, request, bug(request, error), keep_alive)
        if size == 0 or has_no_body(head.method, response.status):
            return [start]
        if size <= JOIN_BYTES_MAX:
            return [b"".join((start, *parts))]
        return [start, *parts]

    def _send_nowait(self, parts: Sequence[Buffer]) -> int:
        """Sends what the socket takes at once. -1 when that was all, else how many bytes. A large answer is
        left to `_send_rest`, which sends it in pieces. Nearly all answers are sent whole here, so no
        `UnsentBuffers` is made for them."""
        try:
            if len(parts) > 1:
                if sum(map(len, parts)) > PIECE_BYTES:
                    return 0
                return self._sock.sendmsg(parts[:BUFFERS_MAX])
            sent = self._sock.send(parts[0])
            return -1 if sent == len(parts[0]) else sent
        except BlockingIOError:
            return 0

    async def _send(self, parts: Sequence[Buffer]) -> None:
        sent = self._send_nowait(parts)
        if sent >= 0:
            await self._send_rest(parts, sent)

    def _charge_rest(self, request: Request, parts: Sequence[Buffer], sent: int) -> Charge | None:
        """Charges what is left of an answer for which nobody has asked for room."""
        front = self._front
        owner = STRANGERS if request.key is None and front.admit is not None else request.owner
        self._charge = front.answers.charge(owner, 0, sum(map(len, parts)) - sent)
        return self._charge

    async def _send_rest(self, parts: Sequence[Buffer], sent: int, charge: Charge | None = None) -> None:
        """Sends as the client takes it. A client that stalls while others need its room is cut off."""
        if charge is not None:
            charge.watch(self.wake)
        limits, scheduler = self._front.limits, self._front.scheduler
        started_s = trio.current_time()
        unsent = UnsentBuffers(self._sock, parts)
        unsent.skip(sent)
        while unsent:
            moved_s = unsent.sent_bytes / limits.rate_bytes_per_s_min
            self.deadline = started_s + limits.write_timeout_s + moved_s
            if charge is not None and charge.is_ended:
                raise Expired
            try:
                await wait_writable(self._sock)
                cost = min(unsent.bytes, PIECE_BYTES)
                if not scheduler.try_take(cost):
                    await scheduler.take(self._owner, cost)
                sent = unsent.send_some(PIECE_BYTES)
            except trio.ClosedResourceError:
                raise Expired from None
            if charge is not None:
                charge.moved(sent)

    async def _send_streamed(
        self, head: Head, request: Request, response: Response, keep_alive: bool
    ) -> bool:
        """Whether the stream came to its own end, and the peer has all of it."""
        keep_alive = keep_alive and not head.is_http_10
        is_chunked = not head.is_http_10
        framing = _connection_line(head, keep_alive)
        if is_chunked:
            framing += b"transfer-encoding: chunked\r\n"
        done = False
        try:
            start = self._front.writer.render(response.status, response.headers, framing)
            await self._send([start])
            self.deadline = inf
            if has_no_body(head.method, response.status):
                return keep_alive
            async with trio.open_nursery() as nursery:
                if request.incoming is None:
                    nursery.start_soon(self._watch_peer, nursery.cancel_scope)
                if response.live is not None:
                    done = await self._run_live(request, response.live, is_chunked=is_chunked)
                elif response.stream is not None:
                    done = await self._pump(request, response.stream, is_chunked=is_chunked)
                nursery.cancel_scope.cancel()
        finally:
            await close_body(response)
        return done and keep_alive

    async def _run_live(self, request: Request, live: Live, *, is_chunked: bool) -> bool:
        sink = EdgeSink(self._sock, is_chunked=is_chunked)
        try:
            await live.run(sink)
            sink.put_end()
            await sink.wait_sent(self._front.limits.linger_s)
        except Stalled:
            return False
        except Exception as error:
            bug(request, error)  # Logged. The client learns of it by the missing last chunk.
            return False
        return True

    async def _pump(self, request: Request, stream: AsyncIterator[bytes], *, is_chunked: bool) -> bool:
        try:
            async for chunk in stream:
                if not chunk:
                    continue
                if is_chunked:
                    await self._send_chunk(chunk)
                else:
                    await self._send([chunk])
                self.deadline = inf
            if is_chunked:
                await self._send([LAST_CHUNK])
        except (OSError, Expired):
            return False  # The peer went away or would not read.
        except Exception as error:
            bug(request, error)  # Logged. The client learns of it by the missing last chunk.
            return False
        return True

    async def _send_chunk(self, chunk: bytes) -> None:
        size = b"%x\r\n" % len(chunk)
        if len(chunk) <= JOIN_BYTES_MAX:
            await self._send([b"%b%b\r\n" % (size, chunk)])
        else:
            await self._send([size, chunk, b"\r\n"])

    async def _watch_peer(self, stream_scope: trio.CancelScope) -> None:
        """Ends a stream when its peer closes. A peer that has only shut down its sending side counts as gone:
        the two look the same until we write, and a quiet stream may not write for a long time."""
        while len(self._pending) < STREAM_PENDING_BYTES_MAX:
            try:
                data = await self._receive()
            except (OSError, Expired):
                data = b""
            if not data:
                stream_scope.cancel()
                return
            self._pending += data

    # Ending.

    async def _refuse(self, response: Response) -> None:
        """Answers what never became a request, then closes: where the next request starts is not known."""
        head = self._head
        size = sum(map(len, response.parts))
        framing = b"content-length: %d\r\nconnection: close\r\n" % size
        start = self._front.writer.render(response.status, response.headers, framing)
        parts = [] if head and head.method == "HEAD" else response.parts
        try:
            await self._send([b"".join((start, *parts))])
            await self._linger()
        except (OSError, Expired):
            pass

    async def _linger(self) -> None:
        """Closing a socket with unread input resets the connection, and a reset may overtake our answer
        on its way. So: end our output, then read and drop until the peer closes or it is enough."""
        limits = self._front.limits
        self._sock.shutdown(socket.SHUT_WR)
        self.deadline = trio.current_time() + limits.linger_s
        dropped = 0
        while dropped <= limits.body_bytes_max:
            data = await self._receive()
            if not data:
                return
            dropped += len(data)


def _cost_like(head: Head, body: Buffer) -> int:
    """What a request like this one costs. A long body was paid for as it came."""
    is_paid = head.length != CHUNKED and len(body) > PIECE_BYTES
    return REQUEST_COST + 2 * (PIECE_BYTES if is_paid else len(body))


def _connection_line(head: Head, keep_alive: bool) -> bytes:
    if not keep_alive:
        return b"connection: close\r\n"
    return b"connection: keep-alive\r\n" if head.is_http_10 else b""
