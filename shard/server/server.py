"""The shard's sockets: decodes commands, hands them to the engine, writes replies as they get ready.

A connection on the Unix socket is ours. One over TCP has a `Peer`, which says who it is (`peers.py`).

It decides nothing. One task a connection reads; what one wake-up brings is handled in one go, or in a few
when it is much, and the replies it produces leave in one `sendmsg` each time. Replies that get ready later
are sent together after the committer's report that released them.

One task a connection sends. It alone waits for the socket to become writable; the task that receives waits
for an event when it has to wait for room.

Bounds: answers that are not sent yet are bounded for each connection and for all of them (`answers.py`). A
request for a page that finds no room waits in `_Connection.deferred`, which has `_DEFERRED_MAX` requests and
`_DEFERRED_BYTES_MAX` at most; other requests go on. A connection is not read from while it has
`_UNSENT_BYTES_MAX` unsent, and a TCP peer, behind whom nobody else waits, while it has no room for a page. A
connection that takes nothing of its answers for `AnswerPool.stall_s` is closed. Nobody is read from while the
log cannot keep up (`Engine.is_congested`); what is urgent is read a while longer. One message is at most
`MESSAGE_BYTES_MAX`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import monotonic_ns

import msgspec
import structlog
import trio

from shard.engine.engine import Engine, Ticket
from shard.server.answers import LINK_LIMITS, PEER_LIMITS, AnswerPool
from shard.server.peers import HELLO_BYTES_MAX, HELLO_S, Peer, Peers
from shard.server.pressure import ShardPressure
from shard.server.recent_times import RecentTimes
from streams.protocol.access.keys import Key
from streams.protocol.errors import (
    BoxNotFound,
    InvalidRequest,
    NotAQueue,
    NotReady,
    ShuttingDown,
    StreamsError,
    Throttled,
)
from streams.protocol.messages import bulk_requests, requests
from streams.protocol.messages.bulk import LOCAL, BoxResult, Caller, ColumnsPut
from streams.protocol.messages.commands import Append, Appended, Command, Page, Records, Reply
from streams.protocol.messages.queues import Claim, ReleaseHolder
from streams.protocol.messages.streams import AppendStream
from streams.protocol.telemetry.histogram import Histogram
from streams.protocol.telemetry.pressure import THROTTLING, Thresholds
from streams.protocol.telemetry.reports import ShardReport
from streams.protocol.wire import framing as wire
from streams.protocol.wire.appends import RecordLimits
from streams.protocol.wire.scans import Scanned
from streams.unsent import UnsentBuffers

log = structlog.get_logger()

#: Far more than pages alone can add up to: only a client that never reads its many small answers gets here.
_UNSENT_BYTES_MAX = 128 * 1024 * 1024
#: As many requests as a gateway has in flight on one link.
_DEFERRED_MAX = 20_000
#: A request for a page is some hundred bytes, unless somebody means to fill the memory with them.
_DEFERRED_BYTES_MAX = 16 * 1024 * 1024
_TOO_MANY_DEFERRED = "too many requests for pages wait for room; read the answers that came, then try again"
#: How often to look for connections that take nothing of their answers.
_STALL_LOOK_S = 1.0
#: Bodies up to this size are joined with what stands before them: the copy costs less than one more buffer.
_JOIN_BYTES_MAX = 2048
#: Messages, and bytes of them, after which a long wake-up hands on what it has, so that gateway and shard
#: work at once. The price is one write to the log and one `sendmsg`, as much as one or two single records.
_FLUSH_MESSAGES = 32
_FLUSH_BYTES = 64 * 1024
#: The same for what the log's own thread has to write, which is a hop there and back more.
_HOP_MESSAGES = 8
#: How long after an urgent append the next one is expected, and after how many bytes of other messages the
#: urgent link is looked at meanwhile: about a batch of 100 records, a fifth of a millisecond.
_URGENT_NS = 250_000_000
_URGENT_LOOK_BYTES = 12 * 1024
_EXHAUSTED_WAIT_S = 0.1
_PEER_CREDENTIALS = struct.Struct("3i")

_encode_head = wire.head_encoder.encode
_CLAIM_OPS = frozenset((wire.OP_CLAIM, wire.OP_WORK))
_SKIPS = b"disable_backpressure"
_PLAIN_READ = _encode_head(wire.ReplyHead())


class Server:
    """Serves one listening Unix socket, and TCP ones if there are `peers`. Until it has an engine it answers
    that it is not ready."""

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
        self._connections: set[_Connection] = set()
        self._dirty: list[_Connection] = []
        self.link_answers = AnswerPool(LINK_LIMITS)
        self.peer_answers = AnswerPool(PEER_LIMITS)
        #: Connections with deferred requests, the one that was served last at the end.
        self.deferring: dict[_Connection, None] = {}
        #: Connections that are not read from until there is room.
        self._paused = 0
        self._sent_some = trio.Event()
        self._room_changed = trio.Event()
        self.engine: Engine | None = None
        self.progress = 0.0
        self.draining = False
        self.describe: Callable[[], dict[str, object]] = dict
        #: Finds the key of a secret. A process of our own user may bring one, for its transactions.
        self.find_key: Callable[[str], Key | None] = lambda secret: None
        #: Asks for a report, which comes at once or later.
        self.report: Callable[[Callable[[ShardReport], None]], None] = lambda answer: None
        #: From the wake-up that brought an append to its acknowledgement.
        self.ack_times = Histogram()
        self.recent_acks = RecentTimes(self.ack_times)
        self.pressure = ShardPressure(thresholds or Thresholds(), self.recent_acks)
        #: From the wake-up that brought a read or a claim to its answer; not of those that wait.
        self.read_times = Histogram()
        self.claim_times = Histogram()
        #: Until when another urgent append is expected.
        self.urgent_until_ns = 0
        #: Requests whose answers leave with the next `flush`, by when they came: how many came at that time.
        self.acked: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.claimed: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Server {len(self._connections)} connections, {'ready' if self.engine else 'replaying'}>"

    def load(self) -> dict[str, object]:
        """Return what a command that reads our files is paced by (`streams/cli/pacing.py`)."""
        return {"acks": self.ack_times.facts().counts, "level": self.pressure.gauge.level}

    def begin(self, engine: Engine) -> None:
        self.engine = engine
        engine.after_answers = self.flush
        engine.has_room = _has_room

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
                accepted, _ = await listener.accept()
            except OSError as error:
                if peers is None or error.errno in (errno.EBADF, errno.EINVAL):
                    raise
                # The fault of one connection, or too many of them: in both cases others must not suffer.
                peers.not_accepted.note(error=str(error))
                await trio.sleep(_EXHAUSTED_WAIT_S)
                continue
            sock = socket.socket(fileno=accepted.detach())
            sock.setblocking(False)
            if peers is None and not _is_same_user(sock):
                log.warning("refused a connection of another user")
                sock.close()
                continue
            nursery.start_soon(self._serve, sock, None if peers is None else peers.accept(sock))

    async def _serve(self, sock: socket.socket, peer: Peer | None) -> None:
        connection = _Connection(self, sock, self._limits, peer)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if peer is not None and self._peers is not None:
                self._peers.forget(peer)
            sock.close()

    @property
    def takes_writes(self) -> bool:
        """Whether none is refused for what the shard is at."""
        return self.engine is not None and self.pressure.gauge.level != THROTTLING

    # -- room for answers

    def on_sent(self) -> None:
        """A connection has sent something, or dropped it: there may be room for what waits."""
        if self.deferring or self._paused or (self.engine is not None and self.engine.has_deferred):
            self._sent_some.set()

    async def wait_room(self) -> None:
        """Waits until something was sent and requests that were deferred have had their turn."""
        self._paused += 1
        try:
            await self._room_changed.wait()
        finally:
            self._paused -= 1

    async def _keep_serving_deferred(self) -> None:
        while True:
            await self._sent_some.wait()
            self._sent_some = trio.Event()
            if self.engine is not None:
                self.engine.serve_deferred()
            is_moving = True
            while is_moving:
                is_moving = False
                for connection in list(self.deferring):
                    is_moving = connection.serve_deferred() or is_moving
                self.flush_all()
                await trio.lowlevel.checkpoint()
            self._room_changed.set()
            self._room_changed = trio.Event()

    async def _keep_closing_stalled(self) -> None:
        while True:
            await trio.sleep(_STALL_LOOK_S)
            for connection in list(self._connections):
                connection.close_if_stalled()

    def note_dirty(self, connection: _Connection) -> None:
        self._dirty.append(connection)

    def flush_all(self) -> None:
        """Hands on to the log and to the connections what a wake-up, or a good part of it, has brought."""
        if self.engine is not None:
            self.engine.flush()
        self.flush()

    def flush(self) -> None:
        """Sends what has gathered, one `sendmsg` a connection."""
        while self._dirty:
            self._dirty.pop().flush()
        if self.acked:
            _observe(self.ack_times, self.acked)
        if self.read:
            _observe(self.read_times, self.read)
        if self.claimed:
            _observe(self.claim_times, self.claimed)


def _observe(times: Histogram, began: dict[int, int]) -> None:
    """Time the requests that came at these times, and are answered now."""
    now_ns = monotonic_ns()
    for began_ns, count in began.items():
        times.observe((now_ns - began_ns) / 1e9, count)
    began.clear()


def _has_room(ticket: Ticket) -> bool:
    """True if a page may be produced for this ticket now."""
    return not isinstance(ticket, _Ticket) or ticket.connection.has_room


class _Ticket:
    """Where the reply to one message goes."""

    __slots__ = ("began_ns", "connection", "id", "op")

    def __init__(self, connection: _Connection, op: int, id: int) -> None:
        self.connection = connection
        self.op = op
        self.id = id
        #: 0 for a request that has waited for a record or a job: its time says nothing about the shard.
        self.began_ns = connection.woken_ns

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        if isinstance(reply, StreamsError):
            self.connection.reply(self.op, self.id, wire.FAILED, b"", requests.encode_failure(reply))
            return
        if type(reply) is Page:
            head = _encode_head(requests.page_head(reply))
            self.connection.reply(self.op, self.id, 0, head, reply.records)
            self._note_read()
            return
        if type(reply) is Scanned:
            self.connection.reply_in_parts(self.op, self.id, _encode_head(reply.head), reply.parts)
            self._note_read()
            return
        if type(reply) is Records:
            head = _encode_head(wire.ReplyHead(records_scanned=reply.records_scanned))
            self._note_read()
        else:
            head = _head_of_write(requests.status_of(reply), fsync_ms, wal_append_ms)
            if self.op == wire.OP_APPEND:
                self.connection.acked(self.began_ns)
            elif self.op in _CLAIM_OPS and self.began_ns:
                self.connection.claimed(self.began_ns)
        self.connection.reply(self.op, self.id, 0, head, requests.encode_reply(reply))

    def _note_read(self) -> None:
        if self.began_ns:
            self.connection.read(self.began_ns)


class _InvalidRequestTicket:
    """Where the answer to the existence check of an invalid request goes."""

    __slots__ = ("_error", "_ticket")

    def __init__(self, ticket: _Ticket, error: StreamsError) -> None:
        self._ticket = ticket
        self._error = error

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        is_first = isinstance(reply, (BoxNotFound, NotAQueue))
        self._ticket.answer(reply if is_first else self._error, 0.0, 0.0)


class _WaitingTicket(_Ticket):
    """The same for a message whose reply may be held back, and which the peer may take back meanwhile."""

    __slots__ = ()

    def __init__(self, connection: _Connection, op: int, id: int) -> None:
        super().__init__(connection, op, id)
        connection.waiting[id] = self

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        self.connection.waiting.pop(self.id, None)
        super().answer(reply, fsync_ms, wal_append_ms)


class _Gathering:
    """The reply to packed columns: what becomes of each box, when all of them are told."""

    __slots__ = ("_left", "_results", "_ticket")

    def __init__(self, ticket: _Ticket, writes: list[Append]) -> None:
        self._ticket = ticket
        self._results = [BoxResult(write.box) for write in writes]
        self._left = len(writes)

    def take(self, at: int, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        box = self._results[at].box
        if isinstance(reply, StreamsError):
            self._results[at] = BoxResult(box, error=(reply.code, reply.message, reply.detail))
        else:
            assert isinstance(reply, Appended)
            self._results[at] = BoxResult(box, reply.first_seq, reply.last_seq, reply.created, reply.deduped)
        self._left -= 1
        if self._left == 0:
            self._ticket.answer(ColumnsPut(self._results), fsync_ms, wal_append_ms)


class _Part:
    """Where the reply to the write of one box goes."""

    __slots__ = ("_at", "_gathering")

    def __init__(self, gathering: _Gathering, at: int) -> None:
        self._gathering = gathering
        self._at = at

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        self._gathering.take(self._at, reply, fsync_ms, wal_append_ms)


@lru_cache(maxsize=8)
def _head_of_write(status: int, fsync_ms: float, wal_append_ms: float) -> bytes:
    """All replies that one report of the committer releases share their head."""
    return _encode_head(wire.ReplyHead(status, round(fsync_ms, 3), round(wal_append_ms, 3)))


class _Nobody:
    """Takes the answer that nobody waits for."""

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        pass


class _Connection:
    __slots__ = (
        "_caller",
        "_deferred_bytes",
        "_holders",
        "_holds_pages",
        "_is_urgent",
        "_limits",
        "_looks_stalled",
        "_peer",
        "_pool",
        "_sent_at_look",
        "_server",
        "_sock",
        "_unsent",
        "deferred",
        "is_dirty",
        "is_open",
        "waiting",
        "woken_ns",
    )

    def __init__(
        self, server: Server, sock: socket.socket, limits: RecordLimits, peer: Peer | None = None
    ) -> None:
        self._server = server
        self._peer = peer
        self._sock = sock
        self._limits = limits
        self._unsent = UnsentBuffers(sock)
        self._pool = server.link_answers if peer is None else server.peer_answers
        #: How many looks in a row have found that nothing was sent since the one before.
        self._looks_stalled = 0
        self._sent_at_look = 0
        #: By id: requests for pages that wait for room, in their order.
        self.deferred: dict[int, wire.Message] = {}
        self._deferred_bytes = 0
        #: Whether it carries only what must not wait behind the messages of others.
        self._is_urgent = False
        #: True while the gateway at the other end has no room for pages.
        self._holds_pages = False
        #: Whose the transactions are that come over this connection, unless it has a peer.
        self._caller = LOCAL
        self.is_dirty = False
        self.is_open = True
        #: When the messages came that are being handled: one look at the clock for all of them.
        self.woken_ns = 0
        #: By id: messages whose replies may be held back.
        self.waiting: dict[int, _WaitingTicket] = {}
        #: (box, stream of the peer) -> the number that jobs leased to this stream are held under.
        self._holders: dict[tuple[str, int], int] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._unsent.keep_sending, self._send)
            if self._peer is not None:
                nursery.start_soon(self._expect_hello, self._peer, nursery.cancel_scope)
            try:
                await self._keep_receiving()
            except (OSError, wire.WireError) as error:
                if self._peer is None:
                    log.warning("connection ended", error=str(error))
                else:
                    self._peer.note_broken(error)
            finally:
                self.is_open = False
                self._drop_unsent()
                self._forget_all()
                self._release_all()
                nursery.cancel_scope.cancel()

    async def _expect_hello(self, peer: Peer, scope: trio.CancelScope) -> None:
        await trio.sleep(HELLO_S)
        if peer.key is None:
            peer.note_silent()
            scope.cancel()

    async def _keep_receiving(self) -> None:
        sock, server = self._sock, self._server
        receiver = wire.Receiver() if self._peer is None else wire.Receiver(HELLO_BYTES_MAX)
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                count = sock.recv_into(receiver.space())
            except BlockingIOError:
                continue
            if count == 0:
                return
            self.woken_ns = monotonic_ns()
            await self._handle_all(receiver.received(count))
            while self._is_held_up:
                await server.wait_room()
            if server.engine is not None and server.engine.is_congested:
                await server.engine.wait_relieved(is_urgent=self._is_urgent)
            if self._peer is not None:
                if self._peer.key is None:  # it was greeted, and told that its key is no good
                    return
                receiver.message_bytes_max = self._peer.message_bytes_max

    async def _handle_all(self, messages: list[wire.Message]) -> None:
        """What one wake-up has brought. When that is much, others get their turn in between."""
        server = self._server
        number = size = looked = 0
        looks_often = not self._is_urgent and self.woken_ns < server.urgent_until_ns
        for message in messages:
            self._handle(message)
            number += 1
            size += len(message.body)
            if message is messages[-1]:
                break
            if looks_often and size - looked >= _URGENT_LOOK_BYTES:
                looked = size
                os.sched_yield()  # as `RequestScheduler` does
                await trio.lowlevel.checkpoint()
            if (number >= _HOP_MESSAGES or size >= _FLUSH_BYTES) and self._is_enough(number, size):
                server.flush_all()
                number = size = looked = 0
                await trio.lowlevel.checkpoint()
        server.flush_all()

    def _is_enough(self, number: int, size: int) -> bool:
        """Whether so much of a wake-up is worth handing on by itself."""
        engine = self._server.engine
        if engine is not None and engine.leaves_to_thread(size):
            return number >= _HOP_MESSAGES
        return number >= _FLUSH_MESSAGES or size >= _FLUSH_BYTES

    def _handle(self, message: wire.Message) -> None:
        server = self._server
        if message.op == wire.OP_APPEND and self._peer is None:
            if self._is_urgent:
                server.urgent_until_ns = self.woken_ns + _URGENT_NS
            if server.takes_writes and server.engine is not None:
                ticket = _Ticket(self, message.op, message.id)
                command = self._command_of(message, server.engine, ticket)
                if command is not None:
                    server.engine.submit(command, ticket)
                return
        if message.op in wire.PAGE_OPS and (self.deferred or not self.has_room):
            self._defer(message)
            return
        self._handle_now(message)

    def _handle_now(self, message: wire.Message) -> None:
        server = self._server
        peer = self._peer
        if peer is None and message.op == wire.OP_FORGET:
            self._forget(message.id)
            return
        if peer is None and message.op in (wire.OP_HOLD_PAGES, wire.OP_SEND_PAGES):
            self._holds_pages = message.op == wire.OP_HOLD_PAGES
            server.on_sent()
            return
        is_waiting = message.op in wire.WAITING_OPS
        ticket = (_WaitingTicket if is_waiting else _Ticket)(self, message.op, message.id)
        if peer is not None and not self._let_in(peer, message, ticket):
            return
        if peer is None and (message.op == wire.OP_STATS or message.op == wire.OP_HELLO):
            self._is_urgent = self._is_urgent or message.body == wire.HELLO_URGENT
            key = server.find_key(message.body.decode("utf-8", "replace")) if message.body else None
            if key is not None:
                self._caller = Caller(key.id)
            self.reply(message.op, message.id, 0, _PLAIN_READ, msgspec.json.encode(server.describe()))
            return
        if message.op == wire.OP_PING:
            server.pressure.told(message.body[0] if message.body else 0)
            level = b"" if server.engine is None else bytes((server.pressure.gauge.level,))
            self.reply(message.op, message.id, 0, _PLAIN_READ, level)
            return
        if message.op == wire.OP_REPORT:
            server.report(partial(self._answer_report, message))
            return
        if server.engine is None:
            error: StreamsError = NotReady(replay_progress=round(server.progress, 4))
            if server.draining:
                error = ShuttingDown()
            ticket.answer(error, 0.0, 0.0)
            return
        is_pressed = server.pressure.gauge.level == THROTTLING
        # What comes on the urgent link has the flag, wherever the request had it.
        throttles = is_pressed and message.op in wire.WRITE_OPS and not self._is_urgent
        if throttles and _SKIPS not in message.body and _SKIPS not in message.head:
            ticket.answer(server.pressure.refuse(), 0.0, 0.0)  # without parsing it: that is most of its price
            return
        if peer is None and message.op in wire.EXPORT_OPS:
            server.engine.exports.ask(message.op, message.body, partial(self._answer_export, message))
            return
        if message.op == wire.OP_PUT_COLUMNS:
            self._put_columns(message, server.engine, ticket)
            return
        command = self._command_of(message, server.engine, ticket)
        if command is None:
            return
        if (throttles and isinstance(command, Append) and not command.disable_backpressure) or (
            # One of a session is not refused by itself: those behind it are on their way already.
            is_pressed and isinstance(command, AppendStream) and not command.chain
        ):
            ticket.answer(server.pressure.refuse(), 0.0, 0.0)
            return
        if message.op == wire.OP_WORK:
            command = self._held(command, server.engine)
        elif message.op == wire.OP_WORK_END:
            self._release(command, server.engine, ticket)
            return
        server.engine.submit(command, ticket)
        if (is_waiting or message.op == wire.OP_WORK) and server.engine.waits(ticket):
            ticket.began_ns = 0

    def _refuse(self, error: StreamsError, message: wire.Message, engine: Engine, ticket: _Ticket) -> None:
        """Refuse an invalid request; but first because its box does not exist or is of another kind."""
        check = None
        if self._peer is None and isinstance(error, InvalidRequest):
            check = requests.existence_check(message.op, message.head)
        if check is None:
            ticket.answer(error, 0.0, 0.0)
        else:
            engine.submit(check, _InvalidRequestTicket(ticket, error))

    def _command_of(self, message: wire.Message, engine: Engine, ticket: _Ticket) -> Command | None:
        """The command in a message; None if it was refused."""
        try:
            if self._peer is not None:
                return self._peer.command_of(message, self._limits)
            command = requests.decode_command(message.op, message.head, message.body, self._limits)
            if message.op in wire.TXN_OPS:
                command = msgspec.structs.replace(command, caller=self._caller)
            return command
        except StreamsError as error:
            self._refuse(error, message, engine, ticket)
            return None

    def _let_in(self, peer: Peer, message: wire.Message, ticket: _Ticket) -> bool:
        """Whether there is more to do: the hello is answered here, and so is what its key does not allow."""
        try:
            if peer.key is not None:
                peer.check(message.op)
                return True
            self.reply(message.op, message.id, 0, _PLAIN_READ, peer.greet(message))
        except StreamsError as error:
            ticket.answer(error, 0.0, 0.0)
        return False

    def _answer_report(self, message: wire.Message, report: ShardReport) -> None:
        self.reply(message.op, message.id, 0, _PLAIN_READ, msgspec.json.encode(report))
        self._server.flush()

    def acked(self, began_ns: int) -> None:
        acked = self._server.acked
        acked[began_ns] = acked.get(began_ns, 0) + 1

    def read(self, began_ns: int) -> None:
        read = self._server.read
        read[began_ns] = read.get(began_ns, 0) + 1

    def claimed(self, began_ns: int) -> None:
        claimed = self._server.claimed
        claimed[began_ns] = claimed.get(began_ns, 0) + 1

    def _put_columns(self, message: wire.Message, engine: Engine, ticket: _Ticket) -> None:
        """As many writes as there are boxes, and one reply."""
        account = "" if self._peer is None else self._peer.account
        try:
            writes = bulk_requests.decode_columns(message.head, message.body, self._limits, account)
            if self._peer is not None:
                self._peer.check_writes(writes)
        except StreamsError as error:
            self._refuse(error, message, engine, ticket)
            return
        gathering = _Gathering(ticket, writes)
        for at, write in enumerate(writes):
            engine.submit(write, _Part(gathering, at))

    def _answer_export(self, message: wire.Message, answer: dict[str, object] | StreamsError) -> None:
        if isinstance(answer, StreamsError):
            self.reply(message.op, message.id, wire.FAILED, b"", requests.encode_failure(answer))
        else:
            facts = msgspec.json.encode({**answer, "load": self._server.load()})
            self.reply(message.op, message.id, 0, _PLAIN_READ, facts)
        self._server.flush()

    # -- questions that are taken back

    def _forget(self, id: int) -> None:
        """The peer does not wait for this reply any more. It is told so all the same: if it has been answered
        already, that answer is on its way."""
        message = self.deferred.pop(id, None)
        if message is not None:
            self._deferred_bytes -= len(message.head) + len(message.body)
            _Ticket(self, message.op, id).answer(ShuttingDown("the question was taken back"), 0.0, 0.0)
            return
        ticket, engine = self.waiting.get(id), self._server.engine
        if ticket is not None and engine is not None and engine.forget(ticket):
            ticket.answer(ShuttingDown("the question was taken back"), 0.0, 0.0)

    def _forget_all(self) -> None:
        """The peer is gone: a claim of its that waits must not be given the next job."""
        self.deferred.clear()
        self._deferred_bytes = 0
        self._server.deferring.pop(self, None)
        engine = self._server.engine
        if engine is not None:
            for ticket in self.waiting.values():
                engine.forget(ticket)
        self.waiting.clear()

    # -- streams that jobs are leased to

    def _held(self, command: Command, engine: Engine) -> Claim:
        """The claim with the number of its stream in this shard, for streams are numbered by each gateway."""
        assert isinstance(command, Claim)
        key = (command.box, command.holder)
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = engine.new_holder()
        return msgspec.structs.replace(command, holder=holder)

    def _release(self, command: Command, engine: Engine, ticket: _Ticket) -> None:
        assert isinstance(command, ReleaseHolder)
        holder = self._holders.pop((command.box, command.holder), -1)  # -1 holds nothing
        engine.release(command.box, holder, ticket)

    def _release_all(self) -> None:
        """The peer is gone, and with it all streams it has carried."""
        engine = self._server.engine
        if engine is not None and engine.failure is None and self._holders:
            for (box, _), holder in self._holders.items():
                engine.release(box, holder, _Nobody())
            self._server.flush_all()
        self._holders.clear()

    # -- room for answers

    @property
    def has_room(self) -> bool:
        """True if another page may be produced for this connection. A closed one drops what it gets."""
        pool = self._pool
        return not self.is_open or (
            not self._holds_pages
            and self._unsent.bytes < pool.limits.connection_bytes
            and (self._is_urgent or not pool.is_full)
        )

    @property
    def _is_held_up(self) -> bool:
        """True while nothing may be read from this connection, because its answers have no room."""
        if not self.is_open:
            return False
        if self._peer is not None and not self.has_room:
            return True
        return self._unsent.bytes >= _UNSENT_BYTES_MAX

    def _defer(self, message: wire.Message) -> None:
        """Has a request for a page wait for room, or refuses it when too many do."""
        size = len(message.head) + len(message.body)
        is_too_much = len(self.deferred) >= _DEFERRED_MAX or self._deferred_bytes + size > _DEFERRED_BYTES_MAX
        if is_too_much and message.op != wire.OP_WORK_END:  # which must not be lost
            _Ticket(self, message.op, message.id).answer(Throttled(_TOO_MANY_DEFERRED), 0.0, 0.0)
            return
        self._deferred_bytes += size
        self.deferred[message.id] = message
        self._server.deferring[self] = None

    def serve_deferred(self) -> bool:
        """Handles the first request that waits for room, if there is room now. True if it did."""
        server = self._server
        server.deferring.pop(self, None)
        if not self.deferred:
            return False
        if not self.has_room:
            server.deferring[self] = None
            return False
        message = self.deferred.pop(next(iter(self.deferred)))
        self._deferred_bytes -= len(message.head) + len(message.body)
        self._handle_now(message)
        if self.deferred:
            server.deferring[self] = None
        return True

    def close_if_stalled(self) -> None:
        """Closes the connection if its peer has taken nothing of its answers for too long."""
        if not self._unsent or self._unsent.sent_bytes != self._sent_at_look:
            self._sent_at_look = self._unsent.sent_bytes
            self._looks_stalled = 0
            return
        self._looks_stalled += 1
        stalled_s = self._looks_stalled * _STALL_LOOK_S
        if stalled_s > self._pool.stall_s:
            log.warning(
                "closed a connection whose peer does not read its answers",
                transport="unix" if self._peer is None else "tcp",
                unsent_bytes=self._unsent.bytes,
                seconds=stalled_s,
            )
            self._cut_off()

    def _cut_off(self) -> None:
        self.is_open = False
        self._drop_unsent()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already

    def _drop_unsent(self) -> None:
        self._pool.used_bytes -= self._unsent.bytes
        self._unsent.clear()
        self._server.on_sent()

    # -- sending

    def reply_in_parts(self, op: int, id: int, head: bytes, parts: list[bytes | memoryview]) -> None:
        """Send a reply whose body is sent from where it is."""
        if not self.is_open:
            return
        size = sum(map(len, parts))
        framed = wire.frame(wire.REPLY, 0, op, id, head, size)
        self._unsent.put(framed)
        self._unsent.put_all(parts, size)
        self._note_unsent(len(framed) + size)

    def reply(self, op: int, id: int, flags: int, head: bytes, body: bytes) -> None:
        if not self.is_open:
            return
        framed = wire.frame(wire.REPLY, flags, op, id, head, len(body))
        if len(body) <= _JOIN_BYTES_MAX:
            self._unsent.put(framed + body)
        else:
            self._unsent.put(framed)
            self._unsent.put(body)
        self._note_unsent(len(framed) + len(body))

    def _note_unsent(self, size: int) -> None:
        self._pool.used_bytes += size
        if not self.is_dirty:
            self.is_dirty = True
            self._server.note_dirty(self)

    def flush(self) -> None:
        """Send at once what the socket takes, and the rest when it takes more."""
        self.is_dirty = False
        self._send()
        if self._unsent:
            self._unsent.wake_sender()

    def _send(self) -> None:
        unsent = self._unsent
        before = unsent.sent_bytes
        is_lost = False
        try:
            unsent.send()
        except OSError:
            is_lost = True
        if unsent.sent_bytes != before:
            self._pool.used_bytes -= unsent.sent_bytes - before
            self._server.on_sent()
        if is_lost:
            self._cut_off()


def _is_same_user(sock: socket.socket) -> bool:
    """A Unix socket is trusted by its directory's mode and, here, by who is at the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return uid in (os.getuid(), 0)
