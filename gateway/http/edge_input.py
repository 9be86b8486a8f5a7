"""The input of one HTTP/1.1 connection: heads and bodies of its requests, one after the other.

A read usually has to wait, so we wait for the socket first; but not for the rest of a body that has begun. If
more connections are ready than one turn of the event loop should serve, a connection waits for its turn
(`admission/request_scheduler.py`) before it reads.

Bounds: bytes behind a request wait in `pending`, which holds at most one read. Further pipelined requests
wait in the kernel's buffer. Bodies are charged to their owner (`admission/memory.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from trio.lowlevel import wait_readable

from gateway.admission.inline import need_task
from gateway.admission.memory import EVERYONE, STRANGERS, Charge
from gateway.admission.request_scheduler import PIECE_BYTES, REQUEST_COST
from gateway.http.body_memory import BodyMemory
from gateway.http.edge_rules import CHUNKED, check_body_length
from gateway.http.edge_socket import RECEIVE_BYTES, EdgeSocket, WaitExpired
from gateway.http.h1 import HEAD_END, ChunkedBody, HttpRequestHead, check_partial_head_untrusted
from gateway.requests.request import BodyBroken, Buffer
from streams.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from gateway.http.edge import Front

#: Bodies up to this size that came in one read with their head are not charged: on all 10,000 connections
#: together they are 40 MB.
SMALL_BODY_BYTES = 4 * 1024
#: Bytes that the peer of a stream may send ahead. Beyond it we stop reading, and so stop watching for its
#: end.
STREAM_PENDING_BYTES_MAX = RECEIVE_BYTES


class EdgeInput:
    __slots__ = (
        "_front",
        "_wire",
        "charge",
        "cost",
        "is_idle",
        "is_urgent",
        "pending",
        "waited_s",
    )

    def __init__(self, wire: EdgeSocket, front: Front) -> None:
        self._wire = wire
        self._front = front
        #: The memory of the body that is being read or handled.
        self.charge: Charge | None = None
        #: Bytes received behind the current request.
        self.pending = b""
        #: Cost and urgent flag of the last request. The next one is scheduled as if it had the same.
        self.cost = REQUEST_COST
        self.is_urgent = False
        #: How long the current request has waited for its turn.
        self.waited_s = 0.0
        self.is_idle = True

    def __repr__(self) -> str:
        return f"<EdgeInput {'idle' if self.is_idle else 'busy'}, {len(self.pending)} B pending>"

    def note_request(self, head: HttpRequestHead, body: Buffer) -> None:
        """Set the cost of the next request to that of this one. A long body was charged while it came."""
        is_paid = head.length != CHUNKED and len(body) > PIECE_BYTES
        self.cost = REQUEST_COST + 2 * (PIECE_BYTES if is_paid else len(body))

    def take_waited_s(self) -> float:
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s

    async def receive_idle(self, *, is_first: bool) -> bytes:
        """Return the first bytes of the next request, or b"" if the connection ends. Waits inline."""
        wire, scheduler = self._wire, self._front.scheduler
        wire.deadline = self._front.idle_deadline_s
        self.is_idle = True
        must_wait = not is_first  # A new connection is readable (`pending_connections.py`).
        while not self._front.is_draining:
            try:
                if must_wait or not scheduler.try_take(self.cost):
                    self.waited_s = await scheduler.wait_readable(
                        wire.raw, wire.owner, self.cost, was_urgent=self.is_urgent
                    )
                must_wait = True
                data = wire.receive_now()
                self.is_idle = False
                return data
            except BlockingIOError:
                continue
            except trio.ClosedResourceError:
                break
        # Draining: a request that has arrived is still served.
        self.is_idle = False
        try:
            return wire.receive_now()
        except BlockingIOError:
            return b""

    async def receive_or_break(self) -> bytes:
        """Read more of a body that is handled as it arrives."""
        try:
            data = await self._wire.receive()
        except (OSError, WaitExpired):
            data = b""
        if not data:
            raise BodyBroken("the request ended in the middle of its body")
        return data

    def cut_head(self, data: bytes) -> bytes:
        """Return the head at the start of `data`, including CRLF CRLF, or b"" if it is incomplete. The bytes
        behind it become `pending`."""
        if data.startswith(b"\r\n"):
            data = data[2:]  # RFC 9112 asks to ignore one empty line before a request.
        end = data.find(HEAD_END) + 4
        if end < 4:
            return b""
        self.pending = data[end:]
        return data[:end]

    async def read_slow_head(self, data: bytes) -> bytes:
        """Read the head that starts with `data`. Returns b"" if the connection ends before its first byte."""
        if not data:
            return b""
        await need_task()
        limits = self._front.limits
        self.pending = b""
        self._wire.deadline = trio.current_time() + limits.head_timeout_s
        partial = bytearray(data)
        is_line_forgiven = False
        search_start = 0
        while True:
            if not is_line_forgiven and partial.startswith(b"\r\n"):
                is_line_forgiven = True
                del partial[:2]
            end = partial.find(HEAD_END, search_start) + 4
            if end >= 4:
                self.pending = bytes(partial[end:])
                return bytes(partial[:end])
            if partial:
                check_partial_head_untrusted(partial, limits)
            search_start = max(0, len(partial) - 3)
            try:
                data = await self._wire.receive()
            except WaitExpired:
                raise InvalidRequest(
                    f"the request head did not arrive within {limits.head_timeout_s:g} s"
                ) from None
            if not data:
                if not partial:
                    return b""
                raise InvalidRequest("the request ended in the middle of its head")
            partial += data

    def cut_body(self, head: HttpRequestHead) -> bytes | None:
        """Return the body if it came together with its head, else None. A body that is not small is charged
        to the clients without a key until its handler knows its owner."""
        length = head.length
        if length == 0:
            return b""
        if length == CHUNKED:
            return None
        front = self._front
        check_body_length(length, front.limits)
        pending = self.pending
        if len(pending) < length:
            return None
        if length > SMALL_BODY_BYTES:
            charge = front.bodies.open(EVERYONE if front.admit is None else STRANGERS)
            if not charge.try_grow(length):
                return None  # `read_body` charges its owner, who may have room.
            self.charge = charge
        self.pending = pending[length:]
        return pending[:length]

    async def read_body(self, head: HttpRequestHead, charge: Charge) -> Buffer:
        """Read a body that did not come with its head. `charge` belongs to its owner."""
        self.charge = charge
        charge.watch(self._wire.wake)
        body: Buffer
        if head.length == CHUNKED:
            body = await self._read_chunked_body(charge)
        else:
            body = await self._read_long_body(charge, head.length)
        charge.unwatch()
        return body

    async def _read_long_body(self, charge: Charge, length: int) -> Buffer:
        """Read a body of known length into one buffer, in pieces, and let others have their turn between
        two pieces."""
        data, self.pending = self.pending, b""
        if len(data) >= length:  # The whole body came in one read.
            charge.grow(length)
            self.pending = data[length:]
            return data[:length]
        scheduler = self._front.scheduler
        body = BodyMemory(charge, length, data)
        started_s = trio.current_time()
        unpaid = 0
        must_wait = not data  # After the first bytes of a body, more are usually ready.
        while body.have < length:
            if must_wait:
                self._set_body_deadline(started_s, body.have)
                await self._wait_body(charge)
            must_wait = True
            try:
                count = self._wire.raw.recv_into(body.space())
            except BlockingIOError:
                continue
            if count == 0:
                raise InvalidRequest("the request ended in the middle of its body")
            body.have += count
            charge.note_progress(count)
            unpaid += count
            if unpaid >= PIECE_BYTES:
                if not scheduler.try_take(unpaid):
                    await scheduler.take(charge.owner, unpaid)
                must_wait = count < PIECE_BYTES or charge.is_ended
                unpaid = 0
        return body.take_whole()

    async def _wait_body(self, charge: Charge) -> None:
        """Wait until more of a body has come."""
        if not charge.is_ended:
            try:
                await wait_readable(self._wire.raw)
            except trio.ClosedResourceError:
                if not charge.is_ended:
                    raise self._too_slow() from None
        if charge.is_ended:
            raise self._front.bodies.refusal(charge.owner, is_stalled=True)

    async def _read_chunked_body(self, charge: Charge) -> bytearray:
        body = ChunkedBody(self._front.limits)
        data = self.pending
        started_s = trio.current_time()
        while True:
            if data:
                body.feed_untrusted(data)
                while body.is_behind:
                    await trio.lowlevel.checkpoint()
                    body.feed_untrusted(b"")
                charge.grow(len(body.body) - charge.size)
            if body.is_complete:
                self.pending = body.rest
                return body.body
            self._set_body_deadline(started_s, charge.size)
            await self._wait_body(charge)
            try:
                data = self._wire.receive_now()
            except BlockingIOError:
                data = b""
                continue
            if not data:
                raise InvalidRequest("the request ended in the middle of its body")
            charge.note_progress(len(data))

    def _set_body_deadline(self, started_s: float, have: int) -> None:
        limits = self._front.limits
        self._wire.deadline = started_s + limits.body_timeout_s + have / limits.rate_bytes_per_s_min

    def _too_slow(self) -> InvalidRequest:
        limits = self._front.limits
        return InvalidRequest(
            f"the request body came too slowly: it may take {limits.body_timeout_s:g} s, and one second more "
            f"for every {limits.rate_bytes_per_s_min} bytes"
        )

    async def watch_peer(self, stream_scope: trio.CancelScope) -> None:
        """End a stream when its peer closes. A peer that has only shut down its sending side counts as
        closed: the two look the same until we write, and a quiet stream may not write for a long time."""
        while len(self.pending) < STREAM_PENDING_BYTES_MAX:
            try:
                data = await self._wire.receive()
            except (OSError, WaitExpired):
                data = b""
            if not data:
                stream_scope.cancel()
                return
            self.pending += data
