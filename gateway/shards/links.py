"""Connections to shards: pipelined links, many requests in flight, answers as they become ready.

A gateway has three to each shard (`gateway/__main__.py`, `dispatch.py`): an urgent one for the little that
must not wait (`admission/append_limiter.py` says what), one for requests whose answers are large, and one for
all else.

A link says what it knows and never guesses: a request that was not sent is `ShardUnavailable` (nothing was
done), one that was sent and got no answer is `OutcomeUnknown`.

A shard that hangs keeps its sockets open. So a link on which requests wait and nothing comes for a second
asks for a sign of life, and counts as down when none has come for `STALLED_S`: what waits fails, new requests
fail at once, and the next byte brings the link back.

Bounds: at most `IN_FLIGHT_MAX` requests a link; each waits at most `ANSWER_S_MAX`. Bodies are bounded by the
fronts.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from math import inf

import outcome
import structlog
import trio
from trio.lowlevel import current_task, wait_task_rescheduled

from gateway.requests.request import Buffer
from gateway.shards.process_states import StatesReader
from gateway.shards.unix_sockets import connectable_path
from streams.protocol import wire
from streams.protocol.errors import (
    BY_CODE,
    OutcomeUnknown,
    ShardUnavailable,
    ShuttingDown,
    StreamsError,
    Throttled,
)
from streams.protocol.messages.requests import failure_decoder
from streams.unsent import UnsentBuffers

log = structlog.get_logger()

IN_FLIGHT_MAX = 20_000
#: A long poll waits 30 s in the shard; twice that means that the shard is stuck.
ANSWER_S_MAX = 60.0
#: How long a sign of life may take before the shard counts as hanging: ten times the longest step of a
#: healthy one.
STALLED_S = 5.0
_CONNECT_PAUSE_S_MIN, _CONNECT_PAUSE_S_MAX = 0.02, 1.0
#: How often it is looked who waits for too long. They need no better clock, and this one costs nothing.
_LOOK_S = 1.0
#: Buffers that make a piece worth its `sendmsg`: eight requests, or four with long bodies.
_SEND_AT_BUFFERS = 8
#: A request that comes so long after the last one that was sent by itself is sent by itself too. Under load
#: a turn of the event loop takes several milliseconds, and a request that waits for its end waits for one
#: turn of three. Batches of 100 records cost the same with and without it.
_SEND_EVERY_S = 0.003
#: Bodies up to this size are joined with what stands before them: the copy costs less than one more buffer.
_JOIN_BYTES_MAX = 2048


#: Called once with the answer of a shard, or with what it raised. It must not raise, nor wait.
OnAnswer = Callable[[wire.Message | StreamsError], None]
_Waiter = trio.lowlevel.Task | OnAnswer


class Link:
    """One shard as the gateway sees it."""

    def __init__(
        self, shard: int, path: str, *, is_urgent: bool = False, states: StatesReader | None = None
    ) -> None:
        self.shard = shard
        self._states = states or StatesReader(None)
        self._is_urgent = is_urgent
        self._path = path
        #: Of the connection that there is.
        self._unsent: UnsentBuffers | None = None
        #: Whether the shard has answered our hello. That a connection was accepted proves nothing: the
        #: supervisor keeps the listening socket open while the shard behind it is starting again.
        self.is_up = False
        #: Whether it is down because the shard hangs, and not because the connection ended.
        self._is_stalled = False
        self._came_up = trio.Event()
        #: Set with that, or when nobody listens at the other end.
        self._settled = trio.Event()
        self._ids = itertools.count(1)
        #: id -> (the waiting task or the function to call, since which look of `_keep_watch`, op, where the
        #: request begins in the bytes that this connection sends), oldest first.
        self._waiting: dict[int, tuple[_Waiter, int, int, int]] = {}
        self._looks = 0
        #: Whether something has come since the last look, and at which look a sign of life was asked for.
        self._has_heard = True
        self._asked_look: int | None = None
        self._holds_pages = False
        #: From when on the next request is sent by itself.
        self._send_next_s = 0.0

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        return f"<Link {self.shard} {state}, {len(self._waiting)} in flight>"

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    # -- calling

    async def call(self, op: int, head: bytes, body: Buffer) -> wire.Message:
        """The shard's answer to one request. Raises what the shard raised, or what became of the link."""
        id = self._begin(current_task(), op, head, body)

        def abort(_: object) -> trio.lowlevel.Abort:
            self.withdraw(id)
            return trio.lowlevel.Abort.SUCCEEDED

        message: wire.Message = await wait_task_rescheduled(abort)
        if message.flags & wire.FAILED:
            raise _failure(message.body)
        return message

    def post(self, op: int, head: bytes, body: Buffer, on_answer: OnAnswer) -> int:
        """Sends a request whose answer is a call of `on_answer`, in the task of this link: for a caller that
        has many of them under way. Returns the id by which it can be withdrawn. Raises as `call` does."""
        return self._begin(on_answer, op, head, body)

    def withdraw(self, id: int) -> None:
        """The caller does not wait for this answer any more."""
        entry = self._waiting.pop(id, None)
        if entry is not None and entry[2] in wire.WAITING_OPS:
            self._forget(id)

    def _begin(self, waiter: _Waiter, op: int, head: bytes, body: Buffer) -> int:
        unsent = self._unsent
        if not self.is_up or unsent is None:
            raise self._away()
        waiting = self._waiting
        if len(waiting) >= IN_FLIGHT_MAX:
            raise Throttled("too many requests in flight", limit="in_flight")
        id = next(self._ids)
        waiting[id] = (waiter, self._looks, op, unsent.sent_bytes + unsent.bytes)
        framed = wire.frame(wire.REQUEST, 0, op, id, head, len(body))
        if len(body) <= _JOIN_BYTES_MAX:
            unsent.put(framed + body)
        else:
            unsent.put(framed)
            unsent.put(body)
        # The first one of a while, and an urgent one, goes at once. In company, a request waits for the end
        # of this turn of the event loop, and all that the turn has gathered goes in one `sendmsg`.
        # A long turn is sent in pieces, so that the shard is at work while we still read.
        now_s = trio.current_time()
        if now_s >= self._send_next_s:
            self._send_next_s = now_s + _SEND_EVERY_S
            self._send()
        elif self._is_urgent or len(waiting) == 1 or len(unsent) >= _SEND_AT_BUFFERS:
            self._send()
        if unsent:
            unsent.wake_sender()
        return id

    def _away(self) -> ShardUnavailable:
        message, why = self._states.why_away(self.shard)
        return ShardUnavailable(message, shard=self.shard, **why)

    def end_polls(self) -> int:
        """Turns away whoever waits for a read or a job: a long poll would hold up the end of a gateway for as
        long as it likes. A read leaves nothing undone; of a claim only the shard knows whether it has been
        given a job by now, so the shard is asked to end it. How many there were."""
        polls = [
            (id, waiter, op)
            for id, (waiter, _, op, _) in self._waiting.items()
            if op in (wire.OP_DIFF, wire.OP_CLAIM)
        ]
        for id, waiter, op in polls:
            self._forget(id)
            if op == wire.OP_DIFF:
                del self._waiting[id]
                _fail(waiter, ShuttingDown())
        return len(polls)

    def _forget(self, id: int) -> None:
        """Has the shard forget a question that it may be holding back: a claim, above all, which would be
        given the next job and take it to nobody."""
        self._send_unawaited(wire.OP_FORGET, id)

    def hold_pages(self, is_full: bool) -> None:
        """Has the shard produce no pages for this link, or go on with them. Other answers come as before."""
        self._holds_pages = is_full
        self._send_unawaited(wire.OP_HOLD_PAGES if is_full else wire.OP_SEND_PAGES, 0)

    def _send_unawaited(self, op: int, id: int) -> None:
        """Send a message that nobody waits for."""
        if self._unsent is not None:
            self._unsent.put(wire.frame(wire.REQUEST, 0, op, id, b"", 0))
            self._unsent.wake_sender()

    # -- life

    async def came_up(self) -> None:
        """Returns when the link has been up once."""
        await self._came_up.wait()

    async def settled(self) -> None:
        """The same, or when it is known not to: the supervisor closes the listening socket of a shard that it
        does not start again, because its data is damaged."""
        await self._settled.wait()

    async def run(self) -> None:
        """Keeps the link up, for ever."""
        pause_s = _CONNECT_PAUSE_S_MIN
        while True:
            try:
                sock = await self._connect()
            except OSError as error:
                log.debug("shard not reachable", shard=self.shard, error=str(error))
                if isinstance(error, ConnectionRefusedError):
                    self._settled.set()
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, _CONNECT_PAUSE_S_MAX)
                continue
            pause_s = _CONNECT_PAUSE_S_MIN
            try:
                await self._talk(sock)
            finally:
                self._down()
                sock.close()

    async def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with connectable_path(self._path) as path:
                try:
                    sock.connect(path)
                except BlockingIOError:  # its backlog is full
                    await trio.lowlevel.wait_writable(sock)
                    sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _talk(self, sock: socket.socket) -> None:
        self._unsent = unsent = UnsentBuffers(sock)
        hello = wire.HELLO_URGENT if self._is_urgent else b""
        unsent.put(wire.frame(wire.REQUEST, 0, wire.OP_HELLO, 0, b"", len(hello)) + hello)
        if self._holds_pages:
            self.hold_pages(True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(unsent.keep_sending, self._send)
            nursery.start_soon(self._keep_watch)
            try:
                await self._keep_receiving(sock)
            except (OSError, wire.WireError) as error:
                log.warning("link lost", shard=self.shard, error=str(error))
            nursery.cancel_scope.cancel()

    def _down(self) -> None:
        unsent, self._unsent = self._unsent, None
        self.is_up = self._is_stalled = False
        self._fail_all(0 if unsent is None else unsent.sent_bytes)

    def _fail_all(self, sent_bytes: float) -> None:
        """Fail all requests. Of those that begin within `sent_bytes` the outcome is unknown."""
        waiting, self._waiting = self._waiting, {}
        for waiter, _, _, start in waiting.values():
            error: StreamsError
            if start >= sent_bytes:
                error = self._away()
            else:
                error = OutcomeUnknown(shard=self.shard, outcome="unknown")
            _fail(waiter, error)

    async def _keep_receiving(self, sock: socket.socket) -> None:
        receiver = wire.Receiver()
        reschedule, value = trio.lowlevel.reschedule, outcome.Value
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                count = sock.recv_into(receiver.space())
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionResetError("the shard closed the link")
            self._has_heard = True
            if self._is_stalled:
                self._is_stalled = False
                self.is_up = True
                log.warning("the shard answers again", shard=self.shard)
            for message in receiver.received(count):
                entry = self._waiting.pop(message.id, None)
                if entry is not None:
                    waiter = entry[0]
                    if isinstance(waiter, trio.lowlevel.Task):
                        reschedule(waiter, value(message))
                    else:
                        waiter(_failure(message.body) if message.flags & wire.FAILED else message)
                elif message.op == wire.OP_HELLO:
                    self.is_up = True
                    self._came_up.set()
                    self._settled.set()
                # else the caller gave up

    def _send(self) -> None:
        """Send what the socket takes now."""
        unsent = self._unsent
        if unsent is not None:
            try:
                unsent.send()
            except OSError:
                # The receiving side notices too and takes the link down. What is left was not sent.
                unsent.clear()

    async def _keep_watch(self) -> None:
        """Gives up on answers that do not come."""
        while True:
            await trio.sleep(_LOOK_S)
            self._looks += 1
            self._look_for_stall()
            for id, (waiter, since, _, _) in list(itertools.islice(self._waiting.items(), 1000)):
                if (self._looks - since - 1) * _LOOK_S < ANSWER_S_MAX:
                    break
                del self._waiting[id]
                error = OutcomeUnknown(
                    "the shard did not answer in time", shard=self.shard, outcome="unknown"
                )
                _fail(waiter, error)

    def _look_for_stall(self) -> None:
        """Ask a silent shard for a sign of life, and count the link as down when none comes in time."""
        if self._has_heard or not self._waiting or not self.is_up:
            self._has_heard, self._asked_look = False, None
            return
        if self._asked_look is None:
            self._asked_look = self._looks
            self._send_unawaited(wire.OP_PING, 0)
            return
        if (self._looks - self._asked_look) * _LOOK_S < STALLED_S:
            return
        log.warning("the shard hangs: its requests fail until it answers", shard=self.shard)
        self._is_stalled = True
        self.is_up = False
        for id, (_, _, op, _) in self._waiting.items():
            if op in wire.WAITING_OPS:
                self._forget(id)
        # Unsent requests stay in the queue, and are handled if the shard goes on: all outcomes are unknown.
        self._fail_all(inf)


def _fail(waiter: _Waiter, error: StreamsError) -> None:
    if isinstance(waiter, trio.lowlevel.Task):
        trio.lowlevel.reschedule(waiter, outcome.Error(error))
    else:
        waiter(error)


def _failure(body: bytes) -> StreamsError:
    failure = failure_decoder.decode(body)
    return BY_CODE.get(failure.code, StreamsError)(failure.message, **failure.detail)
