"""Append sessions (s2 §13): frames of inputs come in, acks go out in their order.

    frames ──► reading task ──► link of the shard ──► answers ──► acking task ──► acks, many in one write

One task reads inputs and posts them to the shard, without a task for each. Answers settle inputs in whatever
order; the acking task wakes up once for all that have come, and writes the acks of the inputs at the front of
the queue. The first failure is the last frame: the inputs behind it were refused by the shard, or are
withdrawn.

Bounds: at most `_INPUTS_MAX` inputs and `_INPUT_BYTES_MAX` bytes are on the way, and nothing is read from the
client beyond that. `append_window.py` bounds all sessions together. A partial frame, and a decompressed frame
that waits to be sent, are charged to the budget of bodies.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from gateway.admission.memory import Charge
from gateway.requests.request import BodyBroken, ClientStalled, Sink
from gateway.requests.s2_errors import S2Error
from gateway.s2 import frames, messages
from gateway.s2.ciphers import Sealing
from gateway.s2.messages import Input
from gateway.s2.sessions import STALL_S, UNSENT_BYTES_MAX, Draining, failure_of
from gateway.s2.shard_calls import PostedAppend, ShardCalls
from streams.protocol.errors import StreamsError
from streams.protocol.messages.s2 import Cipher

_INPUTS_MAX = 64
_INPUT_BYTES_MAX = 8 * 1024 * 1024


class AppendSession:
    """The body of the answer to an append session."""

    def __init__(
        self,
        calls: ShardCalls,
        box: str,
        cipher: Cipher | None,
        key: str,
        incoming: AsyncIterator[bytes],
        check: Callable[[Input], None],
        pace: Callable[[], Awaitable[None]],
        draining: Draining,
        charge: Charge | None = None,
    ) -> None:
        """`charge`: the memory of what has come and is not on its way yet. The session closes it."""
        self._charge = charge
        self._calls = calls
        self._box = box
        self._sealing = None if cipher is None else Sealing(cipher, key, box)
        self._incoming = incoming
        #: Raises when the caller may not send this.
        self._check = check
        #: Waits until the caller may send the next input.
        self._pace = pace
        self._draining = draining
        self._chain = uuid.uuid4().hex
        #: Inputs without an ack, oldest first, and their bytes.
        self._posted: deque[PostedAppend] = deque()
        self._bytes = 0
        #: Set when the acking task has something to do, and when there is room for inputs.
        self._has_news = trio.Event()
        self._relieved = trio.Event()
        #: True when no more inputs will be posted, and why if that is a failure.
        self._has_ended = False
        self._failure: S2Error | None = None
        self._reading = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<AppendSession {self._box}, {len(self._posted)} inputs of {self._bytes} B on the way>"

    def close(self) -> None:
        if self._charge is not None:
            self._charge.close()

    async def run(self, sink: Sink) -> None:
        stalled: ClientStalled | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_reading)
                nursery.start_soon(self._end_in_time)
                try:
                    await self._keep_acking(sink)
                except ClientStalled as error:  # raised here, it would come out as a group
                    stalled = error
                nursery.cancel_scope.cancel()
        finally:
            for posted in self._posted:
                posted.close()
            self._posted.clear()
        if stalled is not None:
            raise stalled

    # -- reading

    def _hold(self, size: int) -> None:
        """Charges what is in memory of the frames that come. Raises `Throttled`."""
        if self._charge is not None:
            self._charge.shrink_to(size)
            self._charge.grow(size - self._charge.size)

    async def _receive(self) -> bytes:
        """The next bytes of the client; b"" at the end. Only a wait in here is the client's."""
        charge = self._charge
        if charge is not None:
            charge.watch(self._reading.cancel)
        try:
            async for data in self._incoming:
                return data
            return b""
        finally:
            if charge is not None:
                charge.unwatch()

    async def _keep_reading(self) -> None:
        receiver = frames.Receiver()
        try:
            with self._reading:
                while data := await self._receive():
                    for body in receiver.feed_untrusted(data):
                        self._hold(len(receiver) + len(body))
                        await self._post(_input(body))
                    self._hold(len(receiver))
                receiver.end_untrusted()
            if self._reading.cancelled_caught:
                if self._charge is not None:
                    self._charge.grow(0)  # raises when the client had stalled
                raise S2Error("server_draining", "the server is stopping")
        except (S2Error, StreamsError, BodyBroken) as error:
            self._failure = failure_of(error)
        self._has_ended = True
        self._has_news.set()

    async def _post(self, given: Input) -> None:
        self._check(given)
        await self._pace()
        while len(self._posted) >= _INPUTS_MAX or self._bytes > _INPUT_BYTES_MAX:
            self._relieved = trio.Event()
            await self._relieved.wait()
        posted = await self._calls.post_append(self._box, given, self._sealing, self._chain, self._on_settled)
        self._posted.append(posted)
        self._bytes += posted.metered

    async def _end_in_time(self) -> None:
        """What has come by then gets its ack; then the session is told that this was all."""
        await self._draining.wait_over()
        self._reading.cancel()

    # -- acking

    def _on_settled(self) -> None:
        if self._posted and self._posted[0].result is not None:
            self._has_news.set()

    async def _keep_acking(self, sink: Sink) -> None:
        """One ack an input, in their order; the first failure is the last frame."""
        while True:
            acks: list[bytes] = []
            while self._posted and self._posted[0].result is not None:
                posted = self._posted.popleft()
                self._bytes -= posted.metered
                if isinstance(posted.result, StreamsError):
                    acks.append(frames.terminal(failure_of(posted.result)))
                    sink.put(b"".join(acks))
                    return
                assert posted.result is not None
                body = messages.ack_as_protobuf(posted.result)
                acks.append(frames.frame(body, is_advised=self._draining.is_set))
            if acks:
                self._relieved.set()
                sink.put(b"".join(acks))
                if sink.unsent_bytes > UNSENT_BYTES_MAX:
                    await sink.wait_sent(STALL_S)
                    continue
            if self._has_ended and not self._posted:
                if self._failure is not None:
                    sink.put(frames.terminal(self._failure))
                return
            self._has_news = trio.Event()
            await self._has_news.wait()


def _input(body: bytes) -> Input:
    try:
        return messages.input_from_protobuf(body)
    except S2Error as error:
        raise S2Error("bad_frame", str(error)) if error.code == "bad_proto" else error from None
