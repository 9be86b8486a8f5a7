"""The socket of one HTTP/1.1 connection, with the deadline of its waits.

A cancel scope for each wait would cost 5 µs, three times a request. Instead a connection sets `deadline`, and
the front's sweep wakes it when that has passed (`trio.lowlevel.notify_closing`). The wait then raises
`WaitExpired`.
"""

from __future__ import annotations

import socket
from math import inf

import trio
from trio.lowlevel import wait_readable

from gateway.admission.inline import need_task
from gateway.admission.request_scheduler import RequestScheduler
from gateway.http.edge_rules import FrontLimits

RECEIVE_BYTES = 64 * 1024

#: The receive buffer of all connections. Bytes are copied out before the task yields, so one is enough: a
#: buffer per connection would be 640 MB at 10,000 connections.
_receive_buffer = memoryview(bytearray(RECEIVE_BYTES))


class WaitExpired(Exception):
    """The deadline of a wait has passed, or the front is draining and this connection was idle."""


class EdgeSocket:
    __slots__ = ("_scheduler", "deadline", "owner", "raw")

    def __init__(self, raw: socket.socket, scheduler: RequestScheduler, owner: str) -> None:
        self.raw = raw
        self._scheduler = scheduler
        #: The owner in the request scheduler: the owner of the last request.
        self.owner = owner
        self.deadline = inf

    def __repr__(self) -> str:
        return f"<EdgeSocket {'closed' if self.raw.fileno() < 0 else 'open'}>"

    def wake(self) -> None:
        """Interrupt the wait of the connection for its socket."""
        self._scheduler.interrupt(self.raw)
        trio.lowlevel.notify_closing(self.raw)

    def receive_now(self) -> bytes:
        """Read the received bytes; b"" is the end. Raises `BlockingIOError` if there are none."""
        return bytes(_receive_buffer[: self.raw.recv_into(_receive_buffer)])

    async def receive(self) -> bytes:
        """Wait, then read; b"" is the end."""
        while True:
            try:
                await wait_readable(self.raw)
                return self.receive_now()
            except trio.ClosedResourceError:
                raise WaitExpired from None
            except BlockingIOError:
                continue

    async def linger(self, limits: FrontLimits) -> None:
        """End the output, then read and drop input until the peer closes or a limit is reached. Closing a
        socket with unread input resets the connection, and a reset may overtake our answer."""
        await need_task()
        self.raw.shutdown(socket.SHUT_WR)
        self.deadline = trio.current_time() + limits.linger_s
        dropped_bytes = 0
        while dropped_bytes <= limits.body_bytes_max:
            data = await self.receive()
            if not data:
                return
            dropped_bytes += len(data)
