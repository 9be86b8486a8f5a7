"""Serves append sessions (s2 §13): receives inputs in frames, sends their acks in the same order.

    frames ──► reading task ──► link of the shard ──► answers ──► acking task ──► acks, many in one write

One task reads inputs and posts them to the shard, without a task per input. Replies may arrive in any order.
The acking task wakes up once for all replies that have arrived, and writes the acks of the inputs at the
front of the queue. The first failure is the last frame: the shard rejects the inputs after it, or the session
withdraws them.

Limits: at most `_INPUTS_MAX` inputs and `_INPUT_BYTES_MAX` bytes are in flight; beyond that, the session
stops reading from the client. `append_window.py` bounds all sessions together. A partial frame, and a
decompressed frame that waits to be sent, are charged to the budget of bodies.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from gateway.admission.memory import Charge
from gateway.requests.request import BodyBroken, ClientStalled, Sink
from gateway.requests.s2_errors import S2Error
from gateway.s2 import record_formats, session_frames
from gateway.s2.ciphers import RecordCipher
from gateway.s2.read_session import STALL_S, UNSENT_BYTES_MAX, Draining, failure_of
from gateway.s2.record_formats import Input
from gateway.s2.shard_calls import PostedAppend, ShardCalls
from streams.protocol.errors import StreamsError
from streams.protocol.messages.s2 import Cipher

_INPUTS_MAX = 64
_INPUT_BYTES_MAX = 8 * 1024 * 1024


class AppendSession:
    """The response body of one append session."""

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
        """`charge` is for received bytes that are not in flight yet. The session closes it."""
        self._charge = charge
        self._calls = calls
        self._box = box
        self._record_cipher = None if cipher is None else RecordCipher(cipher, key, box)
        self._incoming = incoming
        #: Raises if the caller may not append this input.
        self._check = check
        #: Waits until the caller may send the next input.
        self._pace = pace
        self._draining = draining
        self._chain = uuid.uuid4().hex
        #: Inputs without an ack, oldest first, and their bytes.
        self._pending: deque[PostedAppend] = deque()
        self._bytes = 0
        #: Wake-ups: for the acking task (a reply or the end), and for the reading task (room for inputs).
        self._has_work = trio.Event()
        self._has_room = trio.Event()
        #: True when no more inputs will be posted, and the error if reading failed.
        self._has_ended = False
        self._failure: S2Error | None = None
        self._reading = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<AppendSession {self._box}, {len(self._pending)} inputs of {self._bytes} B in flight>"

    def close(self) -> None:
        if self._charge is not None:
            self._charge.close()

    async def run(self, sink: Sink) -> None:
        stall: ClientStalled | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_reading)
                nursery.start_soon(self._end_at_drain_deadline)
                try:
                    await self._keep_acking(sink)
                except ClientStalled as error:  # a nursery would wrap it in a group
                    stall = error
                nursery.cancel_scope.cancel()
        finally:
            for append in self._pending:
                append.close()
            self._pending.clear()
        if stall is not None:
            raise stall

    # -- reading

    def _hold(self, size: int) -> None:
        """Set the charge for received frames to `size` bytes. Raises `Throttled`."""
        if self._charge is not None:
            self._charge.shrink_to(size)
            self._charge.grow(size - self._charge.size)

    async def _receive(self) -> bytes:
        """Return the next bytes from the client; b"" at the end.

        Only here the session waits for the client, so only here its charge can end it as stalled.
        """
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
        receiver = session_frames.FrameReceiver()
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
                    self._charge.grow(0)  # raises if the client stalled
                raise S2Error("server_draining", "the server is stopping")
        except (S2Error, StreamsError, BodyBroken) as error:
            self._failure = failure_of(error)
        self._has_ended = True
        self._has_work.set()

    async def _post(self, batch: Input) -> None:
        self._check(batch)
        await self._pace()
        while len(self._pending) >= _INPUTS_MAX or self._bytes > _INPUT_BYTES_MAX:
            self._has_room = trio.Event()
            await self._has_room.wait()
        append = await self._calls.post_append(
            self._box, batch, self._record_cipher, self._chain, self._on_settled
        )
        self._pending.append(append)
        self._bytes += append.metered_bytes

    async def _end_at_drain_deadline(self) -> None:
        """Stop reading when the drain time is over. Inputs read by then are still acked."""
        await self._draining.wait_deadline()
        self._reading.cancel()

    # -- acking

    def _on_settled(self) -> None:
        if self._pending and self._pending[0].result is not None:
            self._has_work.set()

    async def _keep_acking(self, sink: Sink) -> None:
        """Send one ack per input, in order, and stop after the first failure."""
        while True:
            acks: list[bytes] = []
            while self._pending and self._pending[0].result is not None:
                append = self._pending.popleft()
                self._bytes -= append.metered_bytes
                if isinstance(append.result, StreamsError):
                    acks.append(session_frames.terminal(failure_of(append.result)))
                    sink.put(b"".join(acks))
                    return
                assert append.result is not None
                body = record_formats.ack_as_protobuf(append.result)
                acks.append(session_frames.frame(body, advises_reconnect=self._draining.is_set))
            if acks:
                self._has_room.set()
                sink.put(b"".join(acks))
                if sink.unsent_bytes > UNSENT_BYTES_MAX:
                    await sink.wait_sent(STALL_S)
                    continue
            if self._has_ended and not self._pending:
                if self._failure is not None:
                    sink.put(session_frames.terminal(self._failure))
                return
            self._has_work = trio.Event()
            await self._has_work.wait()


def _input(body: bytes) -> Input:
    try:
        return record_formats.input_from_protobuf(body)
    except S2Error as error:
        raise S2Error("bad_frame", str(error)) if error.code == "bad_proto" else error from None
