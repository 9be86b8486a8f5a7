"""Which connections a gateway keeps when there are more than it can hold.

A connection is **kept** once its client has shown a valid key (on a server without keys: has made a request).
All others are **strangers**. When the gateway is full, a new connection takes the place of another one:

    1. the stranger that has been idle longest;
    2. an idle kept connection, first of an address that has more than an equal share.

A connection with a request under way is never closed. The last slots, the reserve, are never kept: a client
that comes when all others are taken is answered there, and its connection stays a stranger that gives way to
the next one. So a probe or a valid key is always heard, however many connections are idle. Streams are
refused in the reserve, for they would hold it.

An address may have a tenth of all connections as strangers; for one more, its own longest idle one is closed.
A flood from one address thus closes only connections of that address. The first 64 bits of an IPv6 address
count as one address: a client can use all addresses behind them.

Cost: a connection is entered once and left once, and moves once when it is kept; requests do not touch the
table. What was active since it was last looked at is found out when a place is needed (second chance, as in
the CLOCK algorithm), `LOOKS_MAX` connections at a time. So a new connection costs a few microseconds, whether
10 or 10,000 are open.

Rules of this file: it closes by shutting the socket down; the task that serves the connection then ends by
itself and calls `remove`. Until then the closed connection has its descriptor, but no place. A connection
that has sent nothing has no task (`http/pending_connections.py`), and is closed at once.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from typing import Final, Protocol

import trio

from gateway.admission.close_counters import CloseCounters, Reason

#: Connections that are looked at to find one that can be closed. A look is about 1 µs.
LOOKS_MAX: Final = 64
#: The reserve: one slot in this many, within these bounds.
RESERVE_PART, RESERVE_MAX = 20, 256
#: Strangers of one address: one slot in this many, and at least so many.
STRANGERS_PART, STRANGERS_LEAST = 10, 16


class Server(Protocol):
    """The code that serves a connection."""

    @property
    def is_idle(self) -> bool:
        """True while it waits for the first byte of a request."""

    @property
    def is_busy(self) -> bool:
        """True while a request is handled."""

    @property
    def served(self) -> int:
        """How many requests it has begun."""


class WaitingRoom(Protocol):
    """The place of connections that no task serves yet."""

    def close(self, connection: OpenConnection) -> None: ...


class OpenConnection:
    """One connection and its place in the table."""

    __slots__ = ("_seen", "_table", "address", "is_kept", "pending_set", "server", "sock", "waiting")

    def __init__(self, sock: socket.socket, address: str, table: ConnectionTable) -> None:
        self.address = address
        self.is_kept = False
        #: None for the moment before it is served.
        self.server: Server | None = None
        #: Where it waits for its first byte. None once it is served.
        self.pending_set: WaitingRoom | None = None
        #: What its task waits in when it does not wait for the socket. It is cancelled at the end.
        self.waiting: trio.CancelScope | None = None
        self.sock = sock
        self._table = table
        #: How many requests it had served when it was last looked at.
        self._seen = 0

    def __repr__(self) -> str:
        return f"<OpenConnection of {self.address}, {'kept' if self.is_kept else 'stranger'}>"

    def keep(self) -> bool:
        """Notes that its client is known. Returns False if only the reserve is left; ask again later."""
        return self.is_kept or self._table.keep(self)

    def was_active(self) -> bool:
        """Return True if it has served a request since the last look."""
        served = 0 if self.server is None else self.server.served
        was_active, self._seen = served != self._seen, served
        return was_active

    @property
    def can_close(self) -> bool:
        """True if closing it would lose no request. A stranger may also be closed in the middle of a head or
        of an answer that it does not take."""
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
        self.strangers: Ordered = OrderedDict()


Ordered = OrderedDict[OpenConnection, None]


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
        #: Longest without a look first.
        self._strangers: Ordered = OrderedDict()
        self._kept: Ordered = OrderedDict()
        self._addresses: dict[str, _Address] = {}

    def __repr__(self) -> str:
        return f"<ConnectionTable {len(self._kept)} kept, {len(self._strangers)} strangers>"

    @property
    def is_full(self) -> bool:
        return len(self._kept) + len(self._strangers) >= self.connections_max

    def make_room(self, *, of_kept: bool = False) -> bool:
        """Return True if there is room for one more, after closing one connection if it must be."""
        if not self.is_full:
            return True
        if self._close_one(self._strangers, "no_key"):
            return True
        return of_kept and self._close_kept()

    def close_stranger(self) -> bool:
        """Closes the stranger that has been idle longest. Returns False if there is none."""
        return self._close_one(self._strangers, "no_key")

    def add(self, sock: socket.socket, client: str) -> OpenConnection | None:
        """Enters a new connection; None if its address has as many as it may, and none of them is idle."""
        name = address_group(client)
        address = self._addresses.get(name)
        if address is None:
            address = self._addresses[name] = _Address()
        if len(address.strangers) >= self._strangers_max or address.count >= self._per_address_max:
            self._close_one(address.strangers, "address")
            self._addresses[name] = address  # It may have been the last one of its address.
            if address.count >= self._per_address_max:
                self.close_counters.count("address_limit", client)
                return None
        connection = OpenConnection(sock, name, self)
        address.count += 1
        address.strangers[connection] = None
        self._strangers[connection] = None
        return connection

    def remove(self, connection: OpenConnection) -> None:
        """Gives the place back. Does nothing if it has been given back."""
        address = self._addresses.get(connection.address)
        if connection in self._strangers:
            assert address is not None
            del self._strangers[connection], address.strangers[connection]
        elif connection in self._kept:
            del self._kept[connection]
        else:
            return
        assert address is not None
        address.count -= 1
        if not address.count:
            del self._addresses[connection.address]

    def check(self) -> None:
        """Asserts that the parts agree with each other. For tests."""
        assert sum(len(address.strangers) for address in self._addresses.values()) == len(self._strangers)
        assert sum(address.count for address in self._addresses.values()) == len(self._strangers) + len(
            self._kept
        )
        assert all(connection.is_kept for connection in self._kept)
        assert not any(connection.is_kept for connection in self._strangers)
        assert len(self._kept) <= self._kept_max
        assert all(address.count for address in self._addresses.values())

    def keep(self, connection: OpenConnection) -> bool:
        if connection not in self._strangers or len(self._kept) >= self._kept_max:
            return False
        del self._strangers[connection], self._addresses[connection.address].strangers[connection]
        self._kept[connection] = None
        connection.is_kept = True
        return True

    def _close_one(self, connections: Ordered, reason: Reason) -> bool:
        """Closes the first one that can be closed and was not active; else the first that can be closed."""
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
        for _ in range(min(LOOKS_MAX, len(self._kept))):
            connection = next(iter(self._kept))
            if connection.can_close and not connection.was_active():
                if self._addresses[connection.address].count > share:
                    self._close(connection, "idle")
                    return True
                within = within or connection
            self._kept.move_to_end(connection)
        if within is not None:
            self._close(within, "idle")
        return within is not None

    def _close(self, connection: OpenConnection, reason: Reason) -> None:
        self.remove(connection)
        self.close_counters.count(reason, connection.address)
        connection.close()


def address_group(client: str) -> str:
    """The name under which connections of a client are counted."""
    if ":" not in client:
        return client
    try:
        packed = socket.inet_pton(socket.AF_INET6, client.partition("%")[0])
    except OSError:
        return client
    if packed[:12] == b"\0" * 10 + b"\xff\xff":  # an IPv4 address on a socket for both
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def _has_input(sock: socket.socket) -> bool:
    """Return True if bytes of a request wait in the kernel. The end of the client's side is not input."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
