"""The output of one HTTP/1.1 connection: whole answers, and answers that are streams.

We write first and wait only if the socket buffer is full. The rest of an answer is then sent in pieces, each
in its turn.

Bounds: the rest of an answer is charged to its owner (`admission/memory.py`). A client has `write_timeout_s`,
plus a second for each `rate_bytes_per_s_min` bytes, to read it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import wait_writable

from gateway.admission.inline import need_task
from gateway.admission.memory import STRANGERS, Charge
from gateway.admission.request_scheduler import PIECE_BYTES
from gateway.http.edge_rules import bug_response, close_body, has_no_body
from gateway.http.edge_sink import JOIN_BYTES_MAX, EdgeSink
from gateway.http.edge_socket import EdgeSocket, WaitExpired
from gateway.http.h1 import LAST_CHUNK, HttpRequestHead
from gateway.requests.request import Buffer, ClientStalled, Live, Request, Response
from streams.unsent import BUFFERS_MAX, UnsentBuffers

if TYPE_CHECKING:
    from gateway.http.edge import Front

WatchPeer = Callable[[trio.CancelScope], Awaitable[None]]


class EdgeOutput:
    __slots__ = ("_front", "_wire", "charge")

    def __init__(self, wire: EdgeSocket, front: Front) -> None:
        self._wire = wire
        self._front = front
        #: The memory of the answer that is being sent.
        self.charge: Charge | None = None

    def __repr__(self) -> str:
        return f"<EdgeOutput {self.charge or 'uncharged'}>"

    def render(
        self, head: HttpRequestHead, request: Request, response: Response, keep_alive: bool
    ) -> list[Buffer]:
        """Return the whole answer as buffers to send, small ones joined."""
        parts = response.parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        framing = _connection_line(head, keep_alive)
        if response.status != 204:
            framing = b"content-length: %d\r\n%b" % (size, framing)
        try:
            start = self._front.writer.render(response.status, response.headers, framing)
        except (ValueError, KeyError, TypeError) as error:  # A header or a status that cannot be sent.
            return self.render(head, request, bug_response(request, error), keep_alive)
        if size == 0 or has_no_body(head.method, response.status):
            return [start]
        if size <= JOIN_BYTES_MAX:
            return [b"".join((start, *parts))]
        return [start, *parts]

    def send_nowait(self, parts: Sequence[Buffer]) -> int:
        """Send as much as the socket accepts at once. Returns -1 if that was all, else the number of bytes.

        A large answer is left to `_send_rest`, which sends it in pieces. Nearly all answers are sent whole
        here, without the cost of `UnsentBuffers`."""
        try:
            if len(parts) > 1:
                if sum(map(len, parts)) > PIECE_BYTES:
                    return 0
                return self._wire.raw.sendmsg(parts[:BUFFERS_MAX])
            sent_bytes = self._wire.raw.send(parts[0])
            return -1 if sent_bytes == len(parts[0]) else sent_bytes
        except BlockingIOError:
            return 0

    async def send(self, parts: Sequence[Buffer]) -> None:
        sent_bytes = self.send_nowait(parts)
        if sent_bytes >= 0:
            await self._send_rest(parts, sent_bytes)

    def _charge_rest(self, request: Request, parts: Sequence[Buffer], sent_bytes: int) -> Charge | None:
        """Charge the rest of an answer that has no charge yet."""
        front = self._front
        owner = STRANGERS if request.key is None and front.admit is not None else request.owner
        self.charge = front.answers.charge(owner, 0, sum(map(len, parts)) - sent_bytes)
        return self.charge

    async def _send_rest(
        self, parts: Sequence[Buffer], sent_bytes: int, charge: Charge | None = None
    ) -> None:
        """Send the rest as the client reads it. Disconnects a client that stalls while others need its
        memory."""
        if charge is not None:
            charge.watch(self._wire.wake)
        limits, scheduler = self._front.limits, self._front.scheduler
        started_s = trio.current_time()
        unsent = UnsentBuffers(self._wire.raw, parts)
        unsent.skip(sent_bytes)
        while unsent:
            moved_s = unsent.sent_bytes / limits.rate_bytes_per_s_min
            self._wire.deadline = started_s + limits.write_timeout_s + moved_s
            if charge is not None and charge.is_ended:
                raise WaitExpired
            try:
                await wait_writable(self._wire.raw)
                cost = min(unsent.bytes, PIECE_BYTES)
                if not scheduler.try_take(cost):
                    await scheduler.take(self._wire.owner, cost)
                sent_bytes = unsent.send_some(PIECE_BYTES)
            except trio.ClosedResourceError:
                raise WaitExpired from None
            if charge is not None:
                charge.note_progress(sent_bytes)

    async def finish(self, request: Request, parts: Sequence[Buffer], sent_bytes: int) -> None:
        """Send the rest of an answer after `send_nowait`."""
        await need_task()
        await self._send_rest(parts, sent_bytes, self.charge or self._charge_rest(request, parts, sent_bytes))

    def close(self) -> None:
        """Give back the memory of the answer."""
        if self.charge is not None:
            self.charge.close()
            self.charge = None

    async def send_streamed(
        self,
        head: HttpRequestHead,
        request: Request,
        response: Response,
        keep_alive: bool,
        watch_peer: WatchPeer,
    ) -> bool:
        """Send a streamed answer. Returns True if the stream ended by itself, the peer has all of it, and
        another request may follow. `watch_peer` ends the stream when its peer disconnects."""
        keep_alive = keep_alive and not head.is_http_10
        is_chunked = not head.is_http_10
        framing = _connection_line(head, keep_alive)
        if is_chunked:
            framing += b"transfer-encoding: chunked\r\n"
        is_complete = False
        try:
            start = self._front.writer.render(response.status, response.headers, framing)
            await self.send([start])
            self._wire.deadline = inf
            if has_no_body(head.method, response.status):
                return keep_alive
            async with trio.open_nursery() as nursery:
                if request.incoming is None:
                    nursery.start_soon(watch_peer, nursery.cancel_scope)
                if response.live is not None:
                    is_complete = await self._run_live(request, response.live, is_chunked=is_chunked)
                elif response.stream is not None:
                    is_complete = await self._pump(request, response.stream, is_chunked=is_chunked)
                nursery.cancel_scope.cancel()
        finally:
            await close_body(response)
        return is_complete and keep_alive

    async def _run_live(self, request: Request, live: Live, *, is_chunked: bool) -> bool:
        sink = EdgeSink(self._wire.raw, is_chunked=is_chunked)
        try:
            await live.run(sink)
            sink.put_end()
            await sink.wait_sent(self._front.limits.linger_s)
        except ClientStalled:
            return False
        except Exception as error:
            bug_response(
                request, error
            )  # It logs the error. The client notices that the last chunk is missing.
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
                    await self.send([chunk])
                self._wire.deadline = inf
            if is_chunked:
                await self.send([LAST_CHUNK])
        except (OSError, WaitExpired):
            return False  # The peer disconnected or does not read.
        except Exception as error:
            bug_response(
                request, error
            )  # It logs the error. The client notices that the last chunk is missing.
            return False
        return True

    async def _send_chunk(self, chunk: bytes) -> None:
        size = b"%x\r\n" % len(chunk)
        if len(chunk) <= JOIN_BYTES_MAX:
            await self.send([b"%b%b\r\n" % (size, chunk)])
        else:
            await self.send([size, chunk, b"\r\n"])


def _connection_line(head: HttpRequestHead, keep_alive: bool) -> bytes:
    if not keep_alive:
        return b"connection: close\r\n"
    return b"connection: keep-alive\r\n" if head.is_http_10 else b""
