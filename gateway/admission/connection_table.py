"""Decides which connection a full gateway closes for a new one.

A connection is **kept** once its client has shown a valid key (on a server without keys: has made a request).
All others are **strangers**. When the gateway is full, a new connection takes the place of another one:

    1. the stranger that has been idle longest;
    2. an idle kept connection, first of an address that has more than an equal share.

A connection with a request in progress is never closed. The last slots are the reserve. A connection in the
reserve is served but stays a stranger, so the next new connection can take its place. So a health probe or a
client with a valid key is always served, however many connections are idle. Streams are refused in the
reserve, because they would occupy it.

An address may have a tenth of all connections as strangers; for one more, its own longest idle one is closed.
A flood from one address thus closes only connections of that address. The first 64 bits of an IPv6 address
count as one address: a client can use all addresses behind them.

Cost: a connection is added once, removed once, and moves once when it becomes kept; requests do not touch the
table. The table checks for recent activity only when it needs a place (second chance, as in the CLOCK
algorithm), and at most `LOOKS_MAX` connections at a time. So a new connection costs a few microseconds,
whether 10 or 10,000 are open.

Rules of this file: it closes a connection by shutting its socket down; the task that serves the connection
then ends by itself and calls `remove`. Until then the connection has a descriptor, but no place. A connection
that has sent nothing has no task (`http/pending_connections.py`) and is closed at once.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from typing import Final, Protocol

import trio

from gateway.admission.close_counters import CloseCounters, Reason

#: Connections that are examined to find one that can be closed. Each takes about 1 µs.
LOOKS_MAX: Final = 64
#: The reserve: one slot in this many, within these bounds.
RESERVE_PART, RESERVE_MAX = 20, 256
#: Strangers of one address: one slot in `STRANGERS_PART`, at least `STRANGERS_LEAST`.
STRANGERS_PART, STRANGERS_LEAST = 10, 16


class ConnectionServer(Protocol):
    """The code that serves a connection."""

    @property
    def is_idle(self) -> bool:
        """True while the connection waits for the first byte of a request."""

    @property
    def is_busy(self) -> bool:
        """True while the connection handles a request."""

    @property
    def request_count(self) -> int:
        """How many requests have begun on the connection."""


class PendingSet(Protocol):
    """The connections that have sent nothing, so that no task serves them yet."""

    def close(self, connection: OpenConnection) -> None: ...


class OpenConnection:
    """One connection and its place in the table."""

    __slots__ = (
        "_last_request_count",
        "_table",
        "address",
        "is_kept",
        "pending_set",
        "server",
        "sock",
        "waiting",
    )

    def __init__(self, sock: socket.socket, address: str, table: ConnectionTable) -> None:
        self.address = address
        self.is_kept = False
        #: None while it is handed over from one server to the next.
        self.server: ConnectionServer | None = None
        #: The set in which it waits for its first byte. None once a task serves it.
        self.pending_set: PendingSet | None = None
        #: The cancel scope around a wait of its task that does not end with the socket. `close` cancels it.
        self.waiting: trio.CancelScope | None = None
        self.sock = sock
        self._table = table
        #: `request_count` at the last check of `was_active`.
        self._last_request_count = 0

    def __repr__(self) -> str:
        return f"<OpenConnection of {self.address}, {'kept' if self.is_kept else 'stranger'}>"

    def keep(self) -> bool:
        """Make this a kept connection. Returns False if only the reserve has room; try again later."""
        return self.is_kept or self._table.keep(self)

    def was_active(self) -> bool:
        """Return True if a request has begun since the last call."""
        count = 0 if self.server is None else self.server.request_count
        was_active, self._last_request_count = count != self._last_request_count, count
        return was_active

    @property
    def can_close(self) -> bool:
        """True if closing it would lose no request. A stranger may also be closed in the middle of a head or
        of an answer that it does not read."""
        server = self.server
        if server is None:
            return False
        if server.is_idle:
            return not self.has_input
        return not self.is_kept and not server.is_busy

    @property
    def has_input(self) -> bool:
        """True if bytes of a request wait in the kernel."""
        return _has_input(self.sock)

    def close(self) -> None:
        if self.pending_set is not None:
            self.pending_set.close(self)
            return
        if self.waiting is not None:
            self.waiting.cancel()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Address:
    """The connections of one address."""

    __slots__ = ("count", "strangers")

    def __init__(self) -> None:
        self.count = 0
        self.strangers: ConnectionQueue = OrderedDict()


ConnectionQueue = OrderedDict[OpenConnection, None]


class ConnectionTable:
    """The connections of all fronts of a gateway."""

    def __init__(
        self, connections_max: int, per_address_max: int = 0, close_counters: CloseCounters | None = None
    ) -> None:
        self.connections_max = connections_max
        self.close_counters = close_counters or CloseCounters()
        self._per_address_max = per_address_max or connections_max
        self._strangers_max = max(STRANGERS_LEAST, connections_max // STRANGERS_PART)
        self._kept_max = connections_max - min(RESERVE_MAX, max(1, connections_max // RESERVE_PART))
        #: The connection whose last check is oldest comes first.
        self._strangers: ConnectionQueue = OrderedDict()
        self._kept_connections: ConnectionQueue = OrderedDict()
        self._addresses: dict[str, _Address] = {}

    def __repr__(self) -> str:
        return f"<ConnectionTable {len(self._kept_connections)} kept, {len(self._strangers)} strangers>"

    @property
    def is_full(self) -> bool:
        return len(self._kept_connections) + len(self._strangers) >= self.connections_max

    def make_room(self, *, of_kept: bool = False) -> bool:
        """Return True if there is room for one more connection. Closes another one if necessary."""
        if not self.is_full:
            return True
        if self._close_one(self._strangers, "no_key"):
            return True
        return of_kept and self._close_kept()

    def close_stranger(self) -> bool:
        """Close the stranger that has been idle longest. Returns False if there is none."""
        return self._close_one(self._strangers, "no_key")

    def add(self, sock: socket.socket, client: str) -> OpenConnection | None:
        """Add a new connection. Returns None if its address has reached its limit and none of its connections
        is idle."""
        name = address_group(client)
        address = self._addresses.get(name)
        if address is None:
            address = self._addresses[name] = _Address()
        if len(address.strangers) >= self._strangers_max or address.count >= self._per_address_max:
            self._close_one(address.strangers, "address")
            self._addresses[name] = address  # `_close_one` removes the entry with the last connection.
            if address.count >= self._per_address_max:
                self.close_counters.count("address_limit", client)
                return None
        connection = OpenConnection(sock, name, self)
        address.count += 1
        address.strangers[connection] = None
        self._strangers[connection] = None
        return connection

    def remove(self, connection: OpenConnection) -> None:
        """Free the place of a connection. Does nothing if it was freed before."""
        address = self._addresses.get(connection.address)
        if connection in self._strangers:
            assert address is not None
            del self._strangers[connection], address.strangers[connection]
        elif connection in self._kept_connections:
            del self._kept_connections[connection]
        else:
            return
        assert address is not None
        address.count -= 1
        if not address.count:
            del self._addresses[connection.address]

    def check(self) -> None:
        """Assert the invariants of the table. For tests."""
        assert sum(len(address.strangers) for address in self._addresses.values()) == len(self._strangers)
        assert sum(address.count for address in self._addresses.values()) == len(self._strangers) + len(
            self._kept_connections
        )
        assert all(connection.is_kept for connection in self._kept_connections)
        assert not any(connection.is_kept for connection in self._strangers)
        assert len(self._kept_connections) <= self._kept_max
        assert all(address.count for address in self._addresses.values())

    def keep(self, connection: OpenConnection) -> bool:
        if connection not in self._strangers or len(self._kept_connections) >= self._kept_max:
            return False
        del self._strangers[connection], self._addresses[connection.address].strangers[connection]
        self._kept_connections[connection] = None
        connection.is_kept = True
        return True

    def _close_one(self, connections: ConnectionQueue, reason: Reason) -> bool:
        """Close the first connection that can be closed and was not active, or else the first that can be
        closed. Returns False if there is none."""
        active: OpenConnection | None = None
        for _ in range(min(LOOKS_MAX, len(connections))):
            connection = next(iter(connections))
            if connection.can_close:
                if not connection.was_active():
                    self._close(connection, reason)
                    return True
                active = active or connection
            connections.move_to_end(connection)
        if active is not None:
            self._close(active, reason)
        return active is not None

    def _close_kept(self) -> bool:
        share = self.connections_max // len(self._addresses)
        within: OpenConnection | None = None
        for _ in range(min(LOOKS_MAX, len(self._kept_connections))):
            connection = next(iter(self._kept_connections))
            if connection.can_close and not connection.was_active():
                if self._addresses[connection.address].count > share:
                    self._close(connection, "idle")
                    return True
                within = within or connection
            self._kept_connections.move_to_end(connection)
        if within is not None:
            self._close(within, "idle")
        return within is not None

    def _close(self, connection: OpenConnection, reason: Reason) -> None:
        self.remove(connection)
        self.close_counters.count(reason, connection.address)
        connection.close()


def address_group(client: str) -> str:
    """Return the name under which the connections of a client address are counted."""
    if ":" not in client:
        return client
    try:
        address_bytes = socket.inet_pton(socket.AF_INET6, client.partition("%")[0])
    except OSError:
        return client
    if address_bytes[:12] == b"\0" * 10 + b"\xff\xff":  # an IPv4 address on a dual-stack socket
        return socket.inet_ntop(socket.AF_INET, address_bytes[12:])
    return socket.inet_ntop(socket.AF_INET6, address_bytes[:8] + bytes(8)) + "/64"


def _has_input(sock: socket.socket) -> bool:
    """Return True if bytes of a request wait in the kernel. The end of the client's side is not input."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
