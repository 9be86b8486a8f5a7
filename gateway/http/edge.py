"""The HTTP front of a gateway: accepts connections on an inherited socket and starts a server for each.

A new connection waits in `pending_connections.py` for its first byte.

HTTP/1.1 is served by `edge_connection.py`, which costs about 30 µs of CPU a request. The HTTP/2 preface and
every `Upgrade` hand the connection, with the bytes read so far, to Hypercorn (`hypercorn/`), which speaks
every protocol and costs 30 times as much (1.2 ms). With `front="hypercorn"` Hypercorn gets every connection.
Otherwise it is imported with the first connection that needs it: most gateways never need it, and the import
would take a third of their startup time."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Literal

import trio

from gateway.admission.connection_table import ConnectionTable, OpenConnection
from gateway.admission.inline import InlineCoroutine
from gateway.admission.memory import MemoryBudget, answer_budget
from gateway.admission.request_scheduler import RequestScheduler
from gateway.admission.slice_lane import SliceLane
from gateway.http.edge_connection import EdgeConnection
from gateway.http.edge_rules import FrontLimits, body_budget, log
from gateway.http.h1 import HeadMemory, HeadWriter
from gateway.http.pending_connections import PendingConnections
from gateway.requests.request import Admit, Handler, SocketHandler
from gateway.requests.urgency import head_is_urgent

if TYPE_CHECKING:
    from gateway.http.hypercorn.server import HypercornServer

__all__ = ["Front", "FrontLimits", "FrontName", "FrontStatistics", "serve_front"]

FrontName = Literal["edge", "hypercorn"]

#: Bytes of an answer that the kernel buffers for a client that does not read. By default it would buffer up
#: to four megabytes (`tcp_wmem`), and the gateway would encode backlog for many clients that never read it.
UNSENT_BYTES_MAX = 128 * 1024
#: Connections accepted in a row before other tasks get a turn. One at a time would be too slow when many come
#: at once while turns of the event loop are long: the kernel's accept queue would overflow.
ACCEPT_TURN = 16
#: Out of file descriptors or kernel memory: wait for some connection to end. Nothing else helps.
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_EXHAUSTED_WAIT_S = 0.1
#: How long a new connection is left to other gateways before an idle one with a valid key is closed for it.
_FULL_WAIT_S = 0.05
_SWEEP_S_MAX = 1.0
#: TCP keepalive: a dead peer is noticed after a minute.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_EVERY_S, _KEEP_ALIVE_TIMES = 30, 10, 3


@dataclass(frozen=True, slots=True)
class FrontStatistics:
    connections: int
    connections_total: int
    handed_to_hypercorn_total: int
    body_bytes_in_flight: int
    #: Connections that were closed against their client's will, by reason.
    closed_by_reason: dict[str, int]


async def serve_front(
    listener: socket.socket,
    handler: Handler,
    *,
    draining: trio.Event,
    limits: FrontLimits | None = None,
    front: FrontName = "edge",
    socket_handler: SocketHandler | None = None,
    admit: Admit | None = None,
    bodies: MemoryBudget | None = None,
    table: ConnectionTable | None = None,
    answers: MemoryBudget | None = None,
    task_status: trio.TaskStatus[Front] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `draining` is set and every connection has ended, at most `limits.drain_s` later.

    `listener` is bound and listening; it is closed here when draining starts. Fronts of one gateway share
    `bodies`, `table` and `answers`.
    """
    limits = limits or FrontLimits()
    server = Front(listener, handler, draining, limits, front, socket_handler, admit, bodies, table, answers)
    await server.run(task_status)


class Front:
    """The shared state of the connections of one front. Its mutable state is the set of open connections and
    the budget; both change only in this task's nursery."""

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        draining: trio.Event,
        limits: FrontLimits,
        name: FrontName,
        socket_handler: SocketHandler | None = None,
        admit: Admit | None = None,
        bodies: MemoryBudget | None = None,
        table: ConnectionTable | None = None,
        answers: MemoryBudget | None = None,
    ) -> None:
        self.handler = handler
        self.admit = admit
        self.limits = limits
        self.name = name
        self.bodies = body_budget(limits) if bodies is None else bodies
        self.answers = answer_budget() if answers is None else answers
        self.writer = HeadWriter()
        self.heads = HeadMemory(limits)
        self.scheduler = RequestScheduler(head_is_urgent)
        self.lane = SliceLane()
        self.table = table or ConnectionTable(limits.connections_max, limits.connections_per_address_max)
        self.close_counters = self.table.close_counters
        #: The deadline of a connection that becomes idle now. The sweep moves it forward.
        self.idle_deadline_s = inf
        self.is_draining = False
        self._draining = draining
        self._listener = listener
        self._pending = PendingConnections(self.table, self._start_serving)
        #: Sockets of the connections that a task serves.
        self._sockets: set[socket.socket] = set()
        self._connections: set[EdgeConnection] = set()
        self._connections_total = 0
        self._handed_over_total = 0
        self._empty = trio.Event()
        self._socket_handler = socket_handler
        self._hypercorn: HypercornServer | None = None
        self._loading = trio.Lock()

    def __repr__(self) -> str:
        state = "draining" if self.is_draining else "serving"
        return f"<Front {self.name}, {state}, {self._open} connections>"

    @property
    def _open(self) -> int:
        """The number of open connections."""
        return len(self._sockets) + len(self._pending)

    def statistics(self) -> FrontStatistics:
        return FrontStatistics(
            connections=self._open,
            connections_total=self._connections_total,
            handed_to_hypercorn_total=self._handed_over_total,
            body_bytes_in_flight=self.bodies.bytes_used,
            closed_by_reason=self.close_counters.counts.copy(),
        )

    async def run(self, task_status: trio.TaskStatus[Front] = trio.TASK_STATUS_IGNORED) -> None:
        with self._listener, self._pending:
            _set_options(self._listener)
            async with trio.open_nursery() as self._lasting:
                if self.name == "hypercorn":
                    await self._load_hypercorn()
                async with trio.open_nursery() as nursery:
                    self._serving = nursery
                    nursery.start_soon(self._sweep)
                    nursery.start_soon(self.scheduler.run)
                    nursery.start_soon(self._pending.keep_admitting)
                    async with self._accepting():
                        task_status.started(self)
                        await self._draining.wait()
                    await self._drain()
                    nursery.cancel_scope.cancel()
                if self._hypercorn is not None:
                    self._hypercorn.finish()

    @asynccontextmanager
    async def _accepting(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_accepting)
            yield
            nursery.cancel_scope.cancel()

    async def _keep_accepting(self) -> None:
        """Accept connections until cancelled.

        A full gateway closes an idle connection for a new one (`admission/connection_table.py`). While none
        can be closed, it stops accepting: connections then wait in the kernel's backlog, where another
        gateway on the same socket can accept them."""
        while True:
            await trio.lowlevel.wait_readable(self._listener)
            for _ in range(ACCEPT_TURN):
                if self.table.is_full:
                    if not _has_waiting(self._listener):
                        break
                    if not self.table.make_room():
                        await self._wait_for_room()
                if not await self._accept():
                    break
            self._pending.admit()  # The first byte comes with the connection, as a rule.

    async def _wait_for_room(self) -> None:
        """Wait until a connection ends or can be closed. Every connection has a valid key or a request in
        progress. Another gateway may have room, so this one closes an idle connection with a valid key only
        for a client that has waited for `_FULL_WAIT_S`."""
        while True:
            await trio.sleep(_FULL_WAIT_S)
            if self.table.make_room(of_kept=_has_waiting(self._listener)):
                return
            self.close_counters.warn_full(self._open)

    async def _accept(self) -> bool:
        """Accept a connection. Returns False if none is waiting to be accepted."""
        try:
            # Processes share the non-blocking flag of the socket. Another one may have cleared it
            # (`socket.dup` does), and a blocking accept would stop the event loop.
            self._listener.setblocking(False)
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self.table.close_stranger()
                log.warning("cannot accept a connection, retrying", error=str(error), open=self._open)
                await trio.sleep(_EXHAUSTED_WAIT_S)
            elif error.errno == errno.EBADF:
                raise
            return True  # Any other error belongs to that one connection, which is already closed.
        sock.setblocking(False)
        self._connections_total += 1
        address = peer[0] if isinstance(peer, tuple) else ""
        connection = self.table.add(sock, address)
        if connection is None:
            sock.close()
        else:
            self._pending.add(connection, address, self.idle_deadline_s)
        return True

    def _start_serving(self, connection: OpenConnection, address: str) -> None:
        self._sockets.add(connection.sock)
        self._serving.start_soon(self._serve, connection, address)

    async def _serve(self, connection: OpenConnection, address: str) -> None:
        sock = connection.sock
        try:
            first: bytes | None = b""
            if self.name == "edge":
                first = await self._serve_edge(connection)
            if first is not None:
                self._handed_over_total += 1
                with trio.CancelScope() as scope:
                    connection.waiting = scope
                    server = await self._load_hypercorn()
                    await self.lane.wait_turn()  # Setting up such a connection takes as long as 30 requests.
                connection.waiting = None
                if not scope.cancelled_caught:
                    await server.serve(sock, first, address, connection)
        except OSError as error:
            log.debug("connection lost", error=str(error))
        except Exception as error:  # A bug may end this connection, never the others.
            log.error("connection closed because of a bug", exc_info=error)
        finally:
            sock.close()
            self._sockets.discard(sock)
            self.table.remove(connection)
            if not self._sockets:
                self._empty.set()
                self._empty = trio.Event()

    async def _load_hypercorn(self) -> HypercornServer:
        async with self._loading:
            if self._hypercorn is None:
                with trio.CancelScope(shield=True):  # Other connections need it even if this one is closed.
                    self._hypercorn = await self._build_hypercorn()
            assert self._hypercorn is not None  # The shield lets no cancellation through.
            return self._hypercorn

    async def _build_hypercorn(self) -> HypercornServer:
        # In a thread, so that no other client waits for it.
        await trio.to_thread.run_sync(import_module, "gateway.http.hypercorn.app")
        from gateway.http.hypercorn.app import build_app
        from gateway.http.hypercorn.server import HypercornServer

        app = build_app(
            self.handler,
            self.limits,
            bodies=self.bodies,
            answers=self.answers,
            draining=self._draining,
            socket_handler=self._socket_handler,
            admit=self.admit,
        )
        server = HypercornServer(app, self.limits, self.lane, self.close_counters)
        await self._lasting.start(server.run)
        if self.is_draining:
            await server.drain()
        return server

    async def _serve_edge(self, place: OpenConnection) -> bytes | None:
        connection = place.server = EdgeConnection(place.sock, self, place)
        self._connections.add(connection)
        try:
            return await InlineCoroutine(connection.run()).run()
        finally:
            self._connections.discard(connection)
            self.scheduler.forget(place.sock)

    async def _sweep(self) -> None:
        """Wake connections whose deadline has passed. A pass over 10,000 costs a millisecond each second; a
        timer per wait would cost as much for a few hundred requests."""
        limits = self.limits
        shortest_s = min(
            limits.head_timeout_s,
            limits.body_timeout_s,
            limits.write_timeout_s,
            limits.keep_alive_s,
            limits.linger_s,
        )
        pause_s = min(_SWEEP_S_MAX, max(0.005, shortest_s / 4))
        while True:
            now_s = trio.current_time()
            self.idle_deadline_s = now_s + pause_s + limits.keep_alive_s
            self._pending.close_expired(now_s)
            for connection in list(self._connections):
                if connection.deadline <= now_s:
                    connection.wake()
            await trio.sleep(pause_s)

    async def _drain(self) -> None:
        self.is_draining = True
        self._listener.close()
        if self._hypercorn is not None:
            await self._hypercorn.drain()
        self._pending.drain()
        for connection in list(self._connections):
            if connection.is_idle:
                connection.wake()
        if self._sockets:
            log.info(
                "gateway is draining",
                waiting_for="connections with a request in progress",
                open=len(self._sockets),
            )
        with trio.move_on_after(self.limits.drain_s) as scope:
            while self._sockets:
                await self._empty.wait()
        if scope.cancelled_caught:
            log.warning("drain time is over: open connections were closed", open=len(self._sockets))


def _has_waiting(listener: socket.socket) -> bool:
    """Return True if a connection waits to be accepted. (`select` takes no descriptor above 1023.)"""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


def _set_options(listener: socket.socket) -> None:
    """Set the socket options that accepted connections inherit from their listener.

    With TCP keepalive the kernel probes silent peers. A WebSocket may be silent forever, and a peer that
    vanished would otherwise hold its connection as long."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_EVERY_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_TIMES)
