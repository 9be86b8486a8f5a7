"""One connection of a shard: reads messages, decodes them and hands them to the engine.

A connection on the Unix socket belongs to a gateway or another local client. A connection over TCP has a
`Peer`, with its key (`peers.py`).

It decides nothing. The messages of one wake-up are handled in one turn, or in several if they are many, and
the replies of a turn leave together (`outgoing_replies.py`).

Bounds: a request for a page that finds no room waits in `deferred_pages.py`; other requests go on. A
connection is not read from while it has `_UNSENT_BYTES_MAX` unsent. A TCP peer, which serves one client only,
is not read from while it has no room for a page. No connection is read from while the log cannot keep up
(`engine/pressure.py`); the limit of the urgent link is higher. One message is at most `MESSAGE_BYTES_MAX`.
"""

from __future__ import annotations

import socket
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from shard.engine.engine import Engine
from shard.server.deferred_pages import DeferredPages
from shard.server.job_holders import JobHolders
from shard.server.outgoing_replies import Replies
from shard.server.peers import HELLO_BYTES_MAX, HELLO_S, Peer
from shard.server.tickets import (
    ColumnsReply,
    ColumnsTicket,
    InvalidRequestTicket,
    MessageTicket,
    WaitingTicket,
)
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, NotReady, ShuttingDown, StreamsError, Throttled
from streams.protocol.messages import bulk_requests, requests
from streams.protocol.messages.bulk import LOCAL, Caller
from streams.protocol.messages.commands import Append, Command
from streams.protocol.messages.s2 import AppendStream
from streams.protocol.payloads.appends import RecordLimits
from streams.protocol.telemetry.pressure import THROTTLING
from streams.protocol.telemetry.reports import ShardReport

if TYPE_CHECKING:
    from shard.server.server import ShardServer

log = structlog.get_logger()

#: Far more than pages alone can add up to: only a client that never reads many small answers reaches it.
_UNSENT_BYTES_MAX = 128 * 1024 * 1024
_TOO_MANY_DEFERRED = "too many requests of this connection wait for room; read its answers, then try again"
#: Messages, and bytes of them, after which a long wake-up is flushed, so that gateway and shard work in
#: parallel. A flush costs one write to the log and one `sendmsg`, as much as one or two single records.
_FLUSH_MESSAGES = 32
_FLUSH_BYTES = 64 * 1024
#: Messages after which a flush goes to the commit thread, which costs two thread switches more.
_THREAD_FLUSH_MESSAGES = 8

#: Messages of a link without an answer.
_NOTICES = frozenset((wire.OP_FORGET, wire.OP_HOLD_PAGES, wire.OP_SEND_PAGES))
#: Messages about the shard itself. Peers over TCP have their own hello, and ask for no statistics.
_LINK_QUESTIONS = frozenset((wire.OP_STATS, wire.OP_HELLO))
_QUESTIONS = _LINK_QUESTIONS | {wire.OP_PING, wire.OP_REPORT}

_NO_THROTTLE_FIELD = b"disable_backpressure"
_EMPTY_HEAD = wire.head_encoder.encode(wire.ReplyHead())


class Connection:
    __slots__ = (
        "_caller",
        "_deferred_pages",
        "_is_urgent",
        "_jobs",
        "_limits",
        "_pauses_pages",
        "_peer",
        "_server",
        "_sock",
        "received_ns",
        "replies",
        "times",
        "waiting",
    )

    def __init__(
        self, server: ShardServer, sock: socket.socket, limits: RecordLimits, peer: Peer | None = None
    ) -> None:
        self._server = server
        self._peer = peer
        self._sock = sock
        self._limits = limits
        pool, transport = (server.link_answers, "unix") if peer is None else (server.peer_answers, "tcp")
        self.replies = Replies(server, sock, pool, transport)
        self.times = server.times
        self._deferred_pages = DeferredPages()
        self._jobs = JobHolders()
        #: True if it carries only urgent messages.
        self._is_urgent = False
        #: True while the gateway at the other end has no room for pages.
        self._pauses_pages = False
        #: The owner of the transactions that come over this connection, unless it has a peer.
        self._caller = LOCAL
        #: Arrival time of the messages that are being handled: the clock is read once for all of them.
        self.received_ns = 0
        #: By message id: tickets whose replies may have to wait.
        self.waiting: dict[int, WaitingTicket] = {}

    def __repr__(self) -> str:
        return f"<Connection {self._peer or 'link'}, {self.replies!r}>"

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.replies.keep_sending)
            if self._peer is not None:
                nursery.start_soon(self._expect_hello, self._peer, nursery.cancel_scope)
            try:
                await self._keep_receiving()
            except (OSError, wire.WireError) as error:
                if self._peer is None:
                    log.warning("connection of a peer ended with an error", error=str(error))
                else:
                    self._peer.note_error(error)
            finally:
                self.replies.close()
                self._cancel_all()
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
            self.received_ns = monotonic_ns()
            await self._handle_all(receiver.parse(count))
            while self._is_paused:
                await server.wait_room()
            if server.engine is not None and server.engine.backpressure.exceeds():
                await server.engine.backpressure.wait(is_urgent=self._is_urgent)
            if self._peer is not None:
                if self._peer.key is None:  # its hello was refused
                    return
                receiver.message_bytes_max = self._peer.message_bytes_max

    async def _handle_all(self, messages: list[wire.Message]) -> None:
        """Handle the messages of one wake-up. If they are many, other connections run in between."""
        server = self._server
        number = size = 0
        for message in messages:
            self._handle(message)
            number += 1
            size += len(message.body)
            if message is messages[-1]:
                break
            if (number >= _THREAD_FLUSH_MESSAGES or size >= _FLUSH_BYTES) and self._is_enough(number, size):
                server.flush_all()
                number = size = 0
                await trio.lowlevel.checkpoint()
        server.flush_all()

    def _is_enough(self, number: int, size: int) -> bool:
        """Return True if these messages of a longer wake-up are worth a flush of their own."""
        engine = self._server.engine
        if engine is not None and engine.staging.goes_to_thread(size):
            return number >= _THREAD_FLUSH_MESSAGES
        return number >= _FLUSH_MESSAGES or size >= _FLUSH_BYTES

    def _handle(self, message: wire.Message) -> None:
        server = self._server
        is_append = message.op == wire.OP_APPEND and self._peer is None
        if is_append and server.accepts_writes and server.engine is not None:
            ticket = MessageTicket(self, message.op, message.id)
            command = self._command_of(message, server.engine, ticket)
            if command is not None:
                server.engine.submit(command, ticket)
            return
        if message.op in wire.PAGE_OPS and (self._deferred_pages or not self.has_room):
            self._defer(message)
            return
        self._handle_now(message)

    def _handle_now(self, message: wire.Message) -> None:
        server = self._server
        peer = self._peer
        if peer is None and message.op in _NOTICES:
            self._take_notice(message)
            return
        is_waiting = message.op in wire.WAITING_OPS
        ticket = (WaitingTicket if is_waiting else MessageTicket)(self, message.op, message.id)
        if peer is not None and not self._admit(peer, message, ticket):
            return
        if message.op in _QUESTIONS and (peer is None or message.op not in _LINK_QUESTIONS):
            self._answer_question(message)
            return
        if server.engine is None:
            error: StreamsError = NotReady(replay_progress=round(server.progress, 4))
            if server.draining:
                error = ShuttingDown()
            ticket.answer(error, 0.0, 0.0)
            return
        is_pressed = server.pressure.gauge.level == THROTTLING
        # Messages on the urgent link have set `disable_backpressure`, in the body or as a header.
        may_throttle = is_pressed and message.op in wire.WRITE_OPS and not self._is_urgent
        if may_throttle and _NO_THROTTLE_FIELD not in message.body and _NO_THROTTLE_FIELD not in message.head:
            ticket.answer(server.pressure.refuse(), 0.0, 0.0)  # without parsing it, which would cost most
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
        if (may_throttle and isinstance(command, Append) and not command.disable_backpressure) or (
            # An append of a session is not refused alone: later ones of the session are in flight already.
            is_pressed and isinstance(command, AppendStream) and not command.chain
        ):
            ticket.answer(server.pressure.refuse(), 0.0, 0.0)
            return
        if message.op == wire.OP_WORK:
            command = self._jobs.claim_of(command, server.engine)
        elif message.op == wire.OP_WORK_END:
            self._jobs.release(command, server.engine, ticket)
            return
        server.engine.submit(command, ticket)
        if (is_waiting or message.op == wire.OP_WORK) and server.engine.delivery.waits(ticket):
            ticket.began_ns = 0

    def _take_notice(self, message: wire.Message) -> None:
        """Handle a message that has no answer."""
        if message.op == wire.OP_FORGET:
            self._cancel(message.id)
        else:
            self._pauses_pages = message.op == wire.OP_HOLD_PAGES
            self._server.on_sent()

    def _answer_question(self, message: wire.Message) -> None:
        """Answer a message about the shard itself: it answers before it is ready, too."""
        server = self._server
        if message.op == wire.OP_REPORT:
            server.report(partial(self._answer_report, message), is_brief=bool(message.body))
            return
        if message.op == wire.OP_PING:
            server.pressure.note_gateway_level(message.body[0] if message.body else 0)
            answer = b"" if server.engine is None else bytes((server.pressure.gauge.level,))
        else:
            self._is_urgent = self._is_urgent or message.body == wire.HELLO_URGENT
            key = server.find_key(message.body.decode("utf-8", "replace")) if message.body else None
            if key is not None:
                self._caller = Caller(key.id)
            answer = msgspec.json.encode(server.describe())
        self.replies.put(message.op, message.id, 0, _EMPTY_HEAD, answer)

    def _refuse(
        self, error: StreamsError, message: wire.Message, engine: Engine, ticket: MessageTicket
    ) -> None:
        """Refuse an invalid request. If its box does not exist or is no queue, that error comes first."""
        check = None
        if self._peer is None and isinstance(error, InvalidRequest):
            check = requests.existence_check(message.op, message.head)
        if check is None:
            ticket.answer(error, 0.0, 0.0)
        else:
            engine.submit(check, InvalidRequestTicket(ticket, error))

    def _command_of(self, message: wire.Message, engine: Engine, ticket: MessageTicket) -> Command | None:
        """Return the command of a message, or None if it was refused."""
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

    def _admit(self, peer: Peer, message: wire.Message, ticket: MessageTicket) -> bool:
        """Return True if the message may be handled. Otherwise it is answered here: a hello, or an operation
        that the key does not allow."""
        try:
            if peer.key is not None:
                peer.check(message.op)
                return True
            self.replies.put(message.op, message.id, 0, _EMPTY_HEAD, peer.authenticate(message))
        except StreamsError as error:
            ticket.answer(error, 0.0, 0.0)
        return False

    def _answer_report(self, message: wire.Message, report: ShardReport) -> None:
        self.replies.put(message.op, message.id, 0, _EMPTY_HEAD, msgspec.json.encode(report))
        self._server.flush()

    def _put_columns(self, message: wire.Message, engine: Engine, ticket: MessageTicket) -> None:
        """Submit packed columns: one write for each box, and one reply for all."""
        account = "" if self._peer is None else self._peer.account
        try:
            writes = bulk_requests.decode_columns(message.head, message.body, self._limits, account)
            if self._peer is not None:
                self._peer.check_writes(writes)
        except StreamsError as error:
            self._refuse(error, message, engine, ticket)
            return
        reply = ColumnsReply(ticket, writes)
        for at, write in enumerate(writes):
            engine.submit(write, ColumnsTicket(reply, at))

    def _answer_export(self, message: wire.Message, answer: dict[str, object] | StreamsError) -> None:
        if isinstance(answer, StreamsError):
            self.replies.put(message.op, message.id, wire.FAILED, b"", requests.encode_failure(answer))
        else:
            facts = msgspec.json.encode({**answer, "load": self._server.load()})
            self.replies.put(message.op, message.id, 0, _EMPTY_HEAD, facts)
        self._server.flush()

    # -- requests that the client cancels

    def _cancel(self, id: int) -> None:
        """Cancel a request that the peer does not wait for any more. The peer gets a reply in every case: the
        normal one if it was sent already."""
        message = self._deferred_pages.remove(id)
        if message is not None:
            MessageTicket(self, message.op, id).answer(
                ShuttingDown("the client cancelled this request"), 0.0, 0.0
            )
            return
        ticket, engine = self.waiting.get(id), self._server.engine
        if ticket is not None and engine is not None and engine.delivery.forget(ticket):
            ticket.answer(ShuttingDown("the client cancelled this request"), 0.0, 0.0)

    def _cancel_all(self) -> None:
        """Cancel all requests of a lost connection: its waiting claims must not get the next job."""
        self._deferred_pages.clear()
        self._server.deferring_connections.pop(self, None)
        engine = self._server.engine
        if engine is not None:
            for ticket in self.waiting.values():
                engine.delivery.forget(ticket)
        self.waiting.clear()

    def _release_all(self) -> None:
        """Release the jobs that are leased to work streams of a lost connection."""
        engine = self._server.engine
        if engine is not None and engine.failure is None and self._jobs:
            self._jobs.release_all(engine)
            self._server.flush_all()

    # -- room for answers

    @property
    def has_room(self) -> bool:
        """True if another page may be produced for this connection. A closed connection drops its replies."""
        replies = self.replies
        return not replies.is_open or (
            not self._pauses_pages and replies.has_room and (self._is_urgent or not replies.is_pool_full)
        )

    @property
    def _is_paused(self) -> bool:
        """True while this connection is not read from, because its answers have no room."""
        if not self.replies.is_open:
            return False
        if self._peer is not None and not self.has_room:
            return True
        return self.replies.unsent_bytes >= _UNSENT_BYTES_MAX

    def _defer(self, message: wire.Message) -> None:
        """Queue a request for a page until there is room, or refuse it if the queue is full."""
        if (
            not self._deferred_pages.fits(message) and message.op != wire.OP_WORK_END
        ):  # which must not be lost
            MessageTicket(self, message.op, message.id).answer(Throttled(_TOO_MANY_DEFERRED), 0.0, 0.0)
            return
        self._deferred_pages.put(message)
        self._server.deferring_connections[self] = None

    def serve_deferred(self) -> bool:
        """Handle the oldest deferred request, if there is room now. Return True if it was handled."""
        deferring = self._server.deferring_connections
        deferring.pop(self, None)
        if not self._deferred_pages:
            return False
        if not self.has_room:
            deferring[self] = None
            return False
        self._handle_now(self._deferred_pages.pop())
        if self._deferred_pages:
            deferring[self] = None
        return True
