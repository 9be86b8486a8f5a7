"""Serves the sockets of a shard: accepts connections, and divides the memory for answers among them.

Each connection has a task that reads (`connection.py`) and one that sends (`outgoing_replies.py`). Replies
that wait for the log are sent together after the committer's report that releases them.

Bounds: unsent answers are bounded for each connection and for all of them (`answer_pool.py`). Connections
with deferred requests take turns.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import trio

from shard.engine import replies as engine_replies
from shard.engine.engine import Engine
from shard.server import outgoing_replies
from shard.server.answer_pool import LINK_LIMITS, PEER_LIMITS, AnswerPool
from shard.server.answer_times import AnswerTimes
from shard.server.connection import Connection
from shard.server.outgoing_replies import Replies
from shard.server.peers import Peer, Peers
from shard.server.pressure import ShardPressure
from shard.server.recent_times import RecentTimes
from shard.server.tickets import MessageTicket
from streams.protocol.access.keys import Key
from streams.protocol.payloads.appends import RecordLimits
from streams.protocol.telemetry.pressure import THROTTLING, Thresholds
from streams.protocol.telemetry.reports import ShardReport

log = structlog.get_logger()

_EXHAUSTED_WAIT_S = 0.1
_PEER_CREDENTIALS = struct.Struct("3i")


class ReportRequest(Protocol):
    def __call__(self, answer: Callable[[ShardReport], None], *, is_brief: bool = False) -> None: ...


def _no_report(answer: Callable[[ShardReport], None], *, is_brief: bool = False) -> None:
    """A server without a reporter answers no report."""


class ShardServer:
    """Serves one listening Unix socket, and TCP sockets if there are `peers`. Until it has an engine it
    answers `NotReady`."""

    def __init__(
        self,
        listener: socket.socket,
        limits: RecordLimits,
        thresholds: Thresholds | None = None,
        tcp: Sequence[socket.socket] = (),
        peers: Peers | None = None,
    ) -> None:
        self._listener = listener
        self._tcp = tcp
        self._peers = peers
        self._limits = limits
        self._connections: set[Connection] = set()
        self._dirty: list[Replies] = []
        self.link_answers = AnswerPool(LINK_LIMITS)
        self.peer_answers = AnswerPool(PEER_LIMITS)
        #: Connections with deferred requests; the one that was served last is at the end.
        self.deferring_connections: dict[Connection, None] = {}
        #: How many connections are not read from until there is memory for answers.
        self._paused_count = 0
        self._sent_some = trio.Event()
        self._room_changed = trio.Event()
        self.engine: Engine | None = None
        self.progress = 0.0
        self.draining = False
        self.describe: Callable[[], dict[str, object]] = dict
        #: Finds the key of a secret. A client on the Unix socket may send one, as owner of its transactions.
        self.find_key: Callable[[str], Key | None] = lambda secret: None
        #: Requests a report; the callback gets it, at once or later.
        self.report: ReportRequest = _no_report
        self.times = AnswerTimes()
        self.recent_acks = RecentTimes(self.times.acks)
        self.pressure = ShardPressure(thresholds or Thresholds(), self.recent_acks)

    def __repr__(self) -> str:
        return (
            f"<ShardServer {len(self._connections)} connections, {'ready' if self.engine else 'replaying'}>"
        )

    def load(self) -> dict[str, object]:
        """Return the load by which a CLI command that reads our files paces itself
        (`streams/cli/pacing.py`)."""
        return {"acks": self.times.acks.facts().counts, "level": self.pressure.gauge.level}

    def begin(self, engine: Engine) -> None:
        self.engine = engine
        engine.after_answers = self.flush
        engine.delivery.deferred_answers.has_room = _has_room

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_serving_deferred)
            nursery.start_soon(self._keep_closing_stalled)
            nursery.start_soon(self._accept, self._listener, nursery, None)
            for listener in self._tcp:
                assert self._peers is not None
                nursery.start_soon(self._accept, listener, nursery, self._peers)

    async def _accept(self, on: socket.socket, nursery: trio.Nursery, peers: Peers | None) -> None:
        on.setblocking(False)
        listener = trio.socket.from_stdlib_socket(on)
        while True:
            try:
                stream, _ = await listener.accept()
            except OSError as error:
                if peers is None or error.errno in (errno.EBADF, errno.EINVAL):
                    raise
                # One connection failed, or there are no descriptors left. Keep serving the other connections.
                peers.accept_failures.note(error=str(error))
                await trio.sleep(_EXHAUSTED_WAIT_S)
                continue
            sock = socket.socket(fileno=stream.detach())
            sock.setblocking(False)
            if peers is None and not _is_same_user(sock):
                log.warning("refused a connection on the Unix socket: the process belongs to another user")
                sock.close()
                continue
            nursery.start_soon(self._serve, sock, None if peers is None else peers.accept(sock))

    async def _serve(self, sock: socket.socket, peer: Peer | None) -> None:
        connection = Connection(self, sock, self._limits, peer)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if peer is not None and self._peers is not None:
                self._peers.forget(peer)
            sock.close()

    @property
    def accepts_writes(self) -> bool:
        """True if the shard is ready and throttles no writes."""
        return self.engine is not None and self.pressure.gauge.level != THROTTLING

    # -- room for answers

    def on_sent(self) -> None:
        """Serve deferred requests: a connection has sent or dropped answers, so there may be memory."""
        if (
            self.deferring_connections
            or self._paused_count
            or (self.engine is not None and self.engine.delivery.deferred_answers)
        ):
            self._sent_some.set()

    async def wait_room(self) -> None:
        """Wait until answers were sent and deferred requests have been served."""
        self._paused_count += 1
        try:
            await self._room_changed.wait()
        finally:
            self._paused_count -= 1

    async def _keep_serving_deferred(self) -> None:
        while True:
            await self._sent_some.wait()
            self._sent_some = trio.Event()
            if self.engine is not None:
                self.engine.delivery.serve_deferred()
            has_served = True
            while has_served:
                has_served = False
                for connection in list(self.deferring_connections):
                    has_served = connection.serve_deferred() or has_served
                self.flush_all()
                await trio.lowlevel.checkpoint()
            self._room_changed.set()
            self._room_changed = trio.Event()

    async def _keep_closing_stalled(self) -> None:
        while True:
            await trio.sleep(outgoing_replies.STALL_CHECK_S)
            for connection in list(self._connections):
                connection.replies.close_if_stalled()

    def note_dirty(self, replies: Replies) -> None:
        """Send these replies with the next flush."""
        self._dirty.append(replies)

    def flush_all(self) -> None:
        """Flush the engine's changes to the log, then the replies to the connections. Ends a turn."""
        if self.engine is not None:
            self.engine.flush()
        self.flush()

    def flush(self) -> None:
        """Send all buffered replies, with one `sendmsg` per connection."""
        while self._dirty:
            self._dirty.pop().flush()
        self.times.flush()


def _has_room(ticket: engine_replies.Ticket) -> bool:
    """True if a page may be produced for this ticket now."""
    return not isinstance(ticket, MessageTicket) or ticket.connection.has_room


def _is_same_user(sock: socket.socket) -> bool:
    """Return True if the peer process runs as our user or as root. The socket's directory mode protects it
    too."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return uid in (os.getuid(), 0)
