"""Holds connections that have sent nothing, at the price of a descriptor.

A connection costs its client one packet. A task, its first step and its registration with the event loop cost
a gateway ten times that. So a new connection gets none of them: its socket is in one epoll set, and it is
served from the moment at which its first byte is there.

    accepted ──► pending ──first byte──► served
                    └──► closed: for a new connection, by its client, or after the keep-alive time

A pending connection is an idle stranger to the table of connections (`admission/connection_table.py`),
which may close it like any other. Closing it is closing its socket: no task has to be woken for that.

Nothing is read here. A byte that came before a socket was added is found by the next `admit`, and a socket
that has been admitted is watched by the code that serves it.

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

#: Connections that are served from one turn of the event loop on. To begin with one takes about 50 µs.
ADMIT_MAX: Final = 16

#: Called with a connection whose first byte is there, and the address of its client.
Serve = Callable[[OpenConnection, str], None]


class PendingConnections:
    """The connections of one front that have sent nothing. To the table, it is the server of all of them."""

    __slots__ = ("_epoll", "_serve", "_table", "_waiting")

    is_idle, is_busy, served = True, False, 0

    def __init__(self, table: ConnectionTable, serve: Serve) -> None:
        self._table = table
        self._serve = serve
        self._epoll = select.epoll()
        #: By descriptor: a connection, its client's address, and until when it may stay; the oldest first.
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
        """Let a connection wait for its first byte. Deadlines must come in order."""
        fd = connection.sock.fileno()
        connection.server = connection.pending_set = self
        self._waiting[fd] = connection, address, deadline_s
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def close(self, connection: OpenConnection) -> None:
        """Close a connection that waits here. Its place in the table is given back too."""
        del self._waiting[connection.sock.fileno()]
        connection.pending_set = None
        connection.sock.close()  # The kernel takes it out of the epoll set.
        self._table.remove(connection)

    def close_expired(self, now_s: float) -> None:
        """Close the connections whose time is over, and serve those that have sent something by now."""
        for connection, _, deadline_s in list(self._waiting.values()):
            if deadline_s > now_s:
                break
            self._admit_or_close(connection)

    def drain(self) -> None:
        """Serve every connection that has sent something by now, and close the others."""
        self.close_expired(inf)

    def admit(self) -> None:
        """Serve connections whose first byte is there, at most `ADMIT_MAX` of them."""
        for fd, _ in self._epoll.poll(0, ADMIT_MAX):
            entry = self._waiting.get(fd)
            if entry is not None:
                self._admit_or_close(entry[0])

    async def keep_admitting(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            self.admit()

    def _admit_or_close(self, connection: OpenConnection) -> None:
        """Serve a connection that has sent something, and close one that has not."""
        if not connection.has_input:
            self.close(connection)
            return
        _, address, _ = self._waiting.pop(connection.sock.fileno())
        connection.server = connection.pending_set = None
        self._serve(connection, address)
