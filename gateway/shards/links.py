"""Connections to shards: pipelined links, many requests in flight, answers as they become ready.

A gateway has three links to each shard (`gateway/__main__.py`, `dispatch.py`): one for urgent appends
(`admission/append_limiter.py`), one for requests with large answers, and one for all other requests.

A link reports exactly what it knows: a request that was not sent fails with `ShardUnavailable` (nothing was
done), a request that was sent and got no answer fails with `OutcomeUnknown`.

A shard that hangs keeps its sockets open. So a link with pending requests that receives nothing for a second
sends a ping. If nothing comes within `STALLED_S`, the link counts as down: pending requests fail, new
requests fail at once, and the next byte from the shard brings the link back up.

Bounds: at most `IN_FLIGHT_MAX` requests a link; each waits at most `ANSWER_S_MAX`. Bodies are bounded by the
fronts.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from math import inf
from typing import Any

import outcome
import structlog
import trio
from trio.lowlevel import current_task, wait_task_rescheduled

from gateway.admission import inline
from gateway.admission.inline import resume_loop
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
#: How long the answer to a ping may take before the shard counts as hanging: ten times the longest step of a
#: healthy shard.
STALLED_S = 5.0
_CONNECT_PAUSE_S_MIN, _CONNECT_PAUSE_S_MAX = 0.02, 1.0
#: How often the link checks for requests that time out. A coarse clock is enough, and this one costs nothing.
_CHECK_S = 1.0
#: Buffers that are worth one `sendmsg`: eight requests, or four with long bodies.
_SEND_AT_BUFFERS = 8
#: At most once in this time, a request is sent at once instead of at the end of the turn of the event loop.
#: Under load a turn takes several milliseconds, and a request that waits for its end waits for one turn of
#: three. Batches of 100 records cost the same with and without it.
_SEND_EVERY_S = 0.003
#: Bodies up to this size are copied behind their head: the copy costs less than one more buffer.
_JOIN_BYTES_MAX = 2048


#: Called once with the answer of a shard, or with its error. It must not raise or block.
OnAnswer = Callable[[wire.Message | StreamsError], None]
_Waiter = inline.InlineCoroutine[Any] | trio.lowlevel.Task | OnAnswer


class Link:
    """One connection to a shard, reconnected when it is lost."""

    def __init__(
        self, shard: int, path: str, *, is_urgent: bool = False, states: StatesReader | None = None
    ) -> None:
        self.shard = shard
        self._states = states or StatesReader(None)
        self._is_urgent = is_urgent
        self._path = path
        #: Send buffers of the current connection. None while there is no connection.
        self._unsent: UnsentBuffers | None = None
        #: True once the shard has answered our hello. An accepted connection proves nothing: the supervisor
        #: keeps the listening socket open while the shard behind it restarts.
        self.is_up = False
        #: True if the link is down because the shard hangs, and not because the connection ended.
        self._is_stalled = False
        self._came_up = trio.Event()
        #: Set when the link has come up once, or when no process listens at the other end.
        self._is_decided = trio.Event()
        self._ids = itertools.count(1)
        #: id -> (the waiting task or inline coroutine, or the function to call, the check of `_keep_checking`
        #: before it, op, where the request begins in the bytes that this connection sends), oldest first.
        self._waiting: dict[int, tuple[_Waiter, int, int, int]] = {}
        self._checks = 0
        #: True if bytes have come since the last check.
        self._has_received = True
        #: The check that sent a ping. None if no ping is unanswered.
        self._ping_check: int | None = None
        self._holds_pages = False
        #: When a request may next be sent at once.
        self._send_next_s = 0.0

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        return f"<Link {self.shard} {state}, {len(self._waiting)} in flight>"

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    # -- calling

    async def call(self, op: int, head: bytes, body: Buffer) -> wire.Message:
        """Send one request and return the shard's answer. Raises the shard's error, or the error of the
        link. The caller is a task, or runs inline: then the task of this link resumes it."""
        run = inline.current_run
        id = self._begin(run or current_task(), op, head, body)
        message: wire.Message
        if run is not None:
            try:
                message = await inline.suspend()
            except trio.Cancelled:
                self.withdraw(id)
                raise
        else:

            def abort(_: object) -> trio.lowlevel.Abort:
                self.withdraw(id)
                return trio.lowlevel.Abort.SUCCEEDED

            message = await wait_task_rescheduled(abort)
        if message.flags & wire.FAILED:
            raise _failure(message.body)
        return message

    def post(self, op: int, head: bytes, body: Buffer, on_answer: OnAnswer) -> int:
        """Send a request without waiting. The task of this link calls `on_answer` with the answer. Meant for
        a caller with many requests in flight. Returns the id for `withdraw`. Raises as `call` does."""
        return self._begin(on_answer, op, head, body)

    def withdraw(self, id: int) -> None:
        """Drop a request whose caller no longer waits for the answer."""
        entry = self._waiting.pop(id, None)
        if entry is not None and entry[2] in wire.WAITING_OPS:
            self._cancel_in_shard(id)

    def _begin(self, waiter: _Waiter, op: int, head: bytes, body: Buffer) -> int:
        unsent = self._unsent
        if not self.is_up or unsent is None:
            raise self._unavailable()
        waiting = self._waiting
        if len(waiting) >= IN_FLIGHT_MAX:
            raise Throttled("too many requests in flight to this shard; retry later", limit="in_flight")
        id = next(self._ids)
        waiting[id] = (waiter, self._checks, op, unsent.sent_bytes + unsent.bytes)
        frame_head = wire.frame(wire.REQUEST, 0, op, id, head, len(body))
        if len(body) <= _JOIN_BYTES_MAX:
            unsent.put(frame_head + body)
        else:
            unsent.put(frame_head)
            unsent.put(body)
        # An urgent request, and one request every `_SEND_EVERY_S`, is sent at once. All others wait for the
        # end of the loop that resumes them, or of this turn of the event loop, and go in one `sendmsg`. A
        # long turn is sent in pieces, so that the shard already works while we still read.
        now_s = trio.current_time()
        if now_s >= self._send_next_s:
            self._send_next_s = now_s + _SEND_EVERY_S
            self._send()
        elif self._is_urgent or len(waiting) == 1 or len(unsent) >= _SEND_AT_BUFFERS:
            self._send()
        if unsent and not resume_loop.call_at_end(self._flush):
            unsent.wake_sender()
        return id

    def _unavailable(self) -> ShardUnavailable:
        message, why = self._states.why_away(self.shard)
        return ShardUnavailable(message, shard=self.shard, **why)

    def end_polls(self) -> int:
        """End all long polls, which would delay the shutdown of a gateway. Returns how many there were.

        A read fails at once. Only the shard knows whether a claim has got a job by now, so the shard is asked
        to end it."""
        polls = [
            (id, waiter, op)
            for id, (waiter, _, op, _) in self._waiting.items()
            if op in (wire.OP_DIFF, wire.OP_CLAIM)
        ]
        for id, waiter, op in polls:
            self._cancel_in_shard(id)
            if op == wire.OP_DIFF:
                del self._waiting[id]
                _fail(waiter, ShuttingDown())
        return len(polls)

    def _cancel_in_shard(self, id: int) -> None:
        """Ask the shard to drop a waiting request. A waiting claim would otherwise take the next job for a
        caller that has gone."""
        self._notify(wire.OP_FORGET, id)

    def hold_pages(self, is_full: bool) -> None:
        """Ask the shard to stop producing pages for this link, or to go on. Other answers are not
        affected."""
        self._holds_pages = is_full
        self._notify(wire.OP_HOLD_PAGES if is_full else wire.OP_SEND_PAGES, 0)

    def _notify(self, op: int, id: int) -> None:
        """Send a message that has no answer."""
        if self._unsent is not None:
            self._unsent.put(wire.frame(wire.REQUEST, 0, op, id, b"", 0))
            self._unsent.wake_sender()

    # -- connection

    async def wait_up(self) -> None:
        """Wait until the link has been up once."""
        await self._came_up.wait()

    async def wait_decided(self) -> None:
        """Wait until the link has been up once, or it is certain that it will not come up: the supervisor
        closes the listening socket of a shard that it does not start again, because its data is damaged."""
        await self._is_decided.wait()

    async def run(self) -> None:
        """Keep the link connected until cancelled."""
        pause_s = _CONNECT_PAUSE_S_MIN
        while True:
            try:
                sock = await self._connect()
            except OSError as error:
                log.debug("shard not reachable, retrying", shard=self.shard, error=str(error))
                if isinstance(error, ConnectionRefusedError):
                    self._is_decided.set()
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
            nursery.start_soon(self._keep_checking)
            try:
                await self._keep_receiving(sock)
            except (OSError, wire.WireError) as error:
                log.warning("connection to the shard lost, reconnecting", shard=self.shard, error=str(error))
            nursery.cancel_scope.cancel()

    def _down(self) -> None:
        unsent, self._unsent = self._unsent, None
        self.is_up = self._is_stalled = False
        self._fail_all(0 if unsent is None else unsent.sent_bytes)

    def _fail_all(self, sent_bytes: float) -> None:
        """Fail all pending requests. The outcome of those that begin within `sent_bytes` is unknown."""
        waiting, self._waiting = self._waiting, {}
        for waiter, _, _, start in waiting.values():
            error: StreamsError
            if start >= sent_bytes:
                error = self._unavailable()
            else:
                error = OutcomeUnknown(shard=self.shard, outcome="unknown")
            _fail(waiter, error)

    async def _keep_receiving(self, sock: socket.socket) -> None:
        receiver = wire.Receiver()
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                count = sock.recv_into(receiver.space())
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionResetError("the shard closed the link")
            self._has_received = True
            if self._is_stalled:
                self._is_stalled = False
                self.is_up = True
                log.warning("the shard answers again", shard=self.shard)
            messages = receiver.parse(count)
            with resume_loop:
                self._answer_all(messages)

    def _answer_all(self, messages: list[wire.Message]) -> None:
        """Hand answers to the requests that wait for them."""
        for message in messages:
            entry = self._waiting.pop(message.id, None)
            if entry is not None:
                waiter = entry[0]
                if isinstance(waiter, inline.InlineCoroutine):
                    waiter.resume(message)
                elif isinstance(waiter, trio.lowlevel.Task):
                    trio.lowlevel.reschedule(waiter, outcome.Value(message))
                else:
                    waiter(_failure(message.body) if message.flags & wire.FAILED else message)
            elif message.op == wire.OP_HELLO:
                self.is_up = True
                self._came_up.set()
                self._is_decided.set()
            # else the caller has withdrawn the request

    def _send(self) -> None:
        """Send as much as the socket accepts now."""
        unsent = self._unsent
        if unsent is not None:
            try:
                unsent.send()
            except OSError:
                # The receiving side notices too and takes the link down. The remaining bytes were not sent.
                unsent.clear()

    def _flush(self) -> None:
        """Send what the requests of one loop have put."""
        self._send()
        if self._unsent:
            self._unsent.wake_sender()

    async def _keep_checking(self) -> None:
        """Fail requests whose answers do not come in time."""
        while True:
            await trio.sleep(_CHECK_S)
            self._checks += 1
            self._check_stall()
            for id, (waiter, since, _, _) in list(itertools.islice(self._waiting.items(), 1000)):
                if (self._checks - since - 1) * _CHECK_S < ANSWER_S_MAX:
                    break
                del self._waiting[id]
                error = OutcomeUnknown(
                    "the shard did not answer in time; the request may have been executed",
                    shard=self.shard,
                    outcome="unknown",
                )
                _fail(waiter, error)

    def _check_stall(self) -> None:
        """Ping a silent shard, and count the link as down if no answer comes within `STALLED_S`."""
        if self._has_received or not self._waiting or not self.is_up:
            self._has_received, self._ping_check = False, None
            return
        if self._ping_check is None:
            self._ping_check = self._checks
            self._notify(wire.OP_PING, 0)
            return
        if (self._checks - self._ping_check) * _CHECK_S < STALLED_S:
            return
        log.warning("the shard hangs: its requests fail until it answers", shard=self.shard)
        self._is_stalled = True
        self.is_up = False
        for id, (_, _, op, _) in self._waiting.items():
            if op in wire.WAITING_OPS:
                self._cancel_in_shard(id)
        # Unsent requests stay in the queue, and the shard handles them if it goes on: all outcomes are
        # unknown.
        self._fail_all(inf)


def _fail(waiter: _Waiter, error: StreamsError) -> None:
    if isinstance(waiter, inline.InlineCoroutine):
        waiter.fail(error)
    elif isinstance(waiter, trio.lowlevel.Task):
        trio.lowlevel.reschedule(waiter, outcome.Error(error))
    else:
        waiter(error)


def _failure(body: bytes) -> StreamsError:
    failure = failure_decoder.decode(body)
    return BY_CODE.get(failure.code, StreamsError)(failure.message, **failure.detail)
