"""Holds connections that have sent nothing, without a task for each.

A connection costs its client one packet. A task, its first step and its registration with the event loop cost
a gateway ten times that. So a new connection gets no task: its socket is in one epoll set, and a task is
started when its first byte has come.

    accepted ──► pending ──first byte──► served
                    └──► closed: for a new connection, by its client, or after the keep-alive time

The table of connections (`admission/connection_table.py`) treats a pending connection as an idle stranger and
may close it like any other. Closing it only closes its socket: no task has to be woken.

Nothing is read here. The next `admit` finds a byte that came before the socket was added. After admission,
the code that serves the connection watches its socket.

Bounds: the front bounds the connections; `ADMIT_MAX` of them are admitted at a time.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Final

import trio

from gateway.admission.connection_table import ConnectionTable, OpenConnection

#: Connections admitted in one turn of the event loop. Starting to serve one takes about 50 µs.
ADMIT_MAX: Final = 16

#: Called with a connection whose first byte has come, and the address of its client.
Serve = Callable[[OpenConnection, str], None]


class PendingConnections:
    """The connections of one front that have sent nothing. It is the `Server` of all of them in the table."""

    __slots__ = ("_epoll", "_serve", "_table", "_waiting")

    is_idle, is_busy, request_count = True, False, 0

    def __init__(self, table: ConnectionTable, serve: Serve) -> None:
        self._table = table
        self._serve = serve
        self._epoll = select.epoll()
        #: By descriptor: a connection, its client's address, and its deadline; the oldest first.
        self._waiting: dict[int, tuple[OpenConnection, str, float]] = {}

    def __repr__(self) -> str:
        return f"<PendingConnections {len(self._waiting)} waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> PendingConnections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, _, _ in list(self._waiting.values()):
            self.close(connection)
        self._epoll.close()

    def add(self, connection: OpenConnection, address: str, deadline_s: float) -> None:
        """Add a connection that waits for its first byte. Deadlines must be added in order."""
        fd = connection.sock.fileno()
        connection.server = connection.pending_set = self
        self._waiting[fd] = connection, address, deadline_s
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def close(self, connection: OpenConnection) -> None:
        """Close a pending connection and free its place in the table."""
        del self._waiting[connection.sock.fileno()]
        connection.pending_set = None
        connection.sock.close()  # The kernel takes it out of the epoll set.
        self._table.remove(connection)

    def close_expired(self, now_s: float) -> None:
        """Close the connections whose deadline has passed. Serves those that have sent something by now."""
        for connection, _, deadline_s in list(self._waiting.values()):
            if deadline_s > now_s:
                break
            self._admit_or_close(connection)

    def drain(self) -> None:
        """Serve every connection that has sent something by now, and close the others."""
        self.close_expired(inf)

    def admit(self) -> None:
        """Serve connections whose first byte has come, at most `ADMIT_MAX` of them."""
        for fd, _ in self._epoll.poll(0, ADMIT_MAX):
            entry = self._waiting.get(fd)
            if entry is not None:
                self._admit_or_close(entry[0])

    async def keep_admitting(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            self.admit()

    def _admit_or_close(self, connection: OpenConnection) -> None:
        """Serve a connection that has sent something; close one that has not."""
        if not connection.has_input:
            self.close(connection)
            return
        _, address, _ = self._waiting.pop(connection.sock.fileno())
        connection.server = connection.pending_set = None
        self._serve(connection, address)
