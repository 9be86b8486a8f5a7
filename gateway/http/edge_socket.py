"""The socket of one HTTP/1.1 connection, and until when the connection waits for it.

There is no cancel scope for each wait (5 µs each, three a request). A connection says in `deadline` until
when it will wait, and the front's sweep wakes it when that has passed (`trio.lowlevel.notify_closing`), which
surfaces here as `Expired`.
"""

from __future__ import annotations

import socket
from math import inf

import trio
from trio.lowlevel import wait_readable

from gateway.admission.request_scheduler import RequestScheduler
from gateway.http.edge_rules import FrontLimits

RECEIVE_BYTES = 64 * 1024

#: Reads of all connections land here and are copied out before anything is awaited, so one is enough:
#: a buffer per connection would be 640 MB at 10,000 connections.
_landing = memoryview(bytearray(RECEIVE_BYTES))


class Expired(Exception):
    """The deadline of a wait has passed, or the front is draining and this connection was idle."""


class EdgeSocket:
    __slots__ = ("_scheduler", "deadline", "owner", "raw")

    def __init__(self, raw: socket.socket, scheduler: RequestScheduler, owner: str) -> None:
        self.raw = raw
        self._scheduler = scheduler
        #: Whose turns it takes: the owner of its last request.
        self.owner = owner
        self.deadline = inf

    def __repr__(self) -> str:
        return f"<EdgeSocket {'closed' if self.raw.fileno() < 0 else 'open'}>"

    def wake(self) -> None:
        """Interrupts whatever the connection waits for on its socket."""
        self._scheduler.interrupt(self.raw)
        trio.lowlevel.notify_closing(self.raw)

    def receive_now(self) -> bytes:
        """Reads what has come; b"" is the end. Raises `BlockingIOError` if nothing has."""
        return bytes(_landing[: self.raw.recv_into(_landing)])

    async def receive(self) -> bytes:
        """Waits, then reads; b"" is the end."""
        while True:
            try:
                await wait_readable(self.raw)
                return self.receive_now()
            except trio.ClosedResourceError:
                raise Expired from None
            except BlockingIOError:
                continue

    async def linger(self, limits: FrontLimits) -> None:
        """Closing a socket with unread input resets the connection, and a reset may overtake our answer
        on its way. So: end our output, then read and drop until the peer closes or it is enough."""
        self.raw.shutdown(socket.SHUT_WR)
        self.deadline = trio.current_time() + limits.linger_s
        dropped = 0
        while dropped <= limits.body_bytes_max:
            data = await self.receive()
            if not data:
                return
            dropped += len(data)
