"""Sessions: appends and reads that stay (s2 §12, §13), as s2s frames or as server-sent events.

    append   frames in ──► one write after the other on its way to the shard ──► acks out, in order
    read     pages from the shard, one after the other ──► frames or events out; at the end, heartbeats

Bounds: an append session has at most `_INPUTS_MAX` inputs and `_INPUT_BYTES_MAX` bytes on the way, and is not
read from beyond that; all of them together have what `inflight.py` says. A frame that is not whole, and the
decompressed one that waits to go on its way, are charged to the budget of bodies. A reader's answers wait for
it to take them (`_UNSENT_BYTES_MAX`).
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec
import trio

from gateway.http import BodyBroken, Live, Sink, Stalled
from gateway.limits import Slot
from gateway.memory import EVERYONE, Charge
from gateway.s2 import frames, messages
from gateway.s2.access import Permit
from gateway.s2.calls import Calls
from gateway.s2.errors import S2Error, translated
from gateway.s2.messages import Input
from gateway.s2.records import SLICE_MS, Asked, after, error_event, opened, ping_event, tail_of
from gateway.unread import Unread
from streams.protocol import sequenced
from streams.protocol.errors import StreamsError, Throttled
from streams.protocol.streams import (
    BATCH_METERED_MAX,
    BATCH_RECORDS_MAX,
    Cipher,
    ReadHead,
    StreamAppended,
    StreamRecords,
)

_INPUTS_MAX = 64
_INPUT_BYTES_MAX = 8 * 1024 * 1024
_UNSENT_BYTES_MAX = 2 * 1024 * 1024
#: As long as the front gives to any answer that does not move.
_STALL_S = 30.0
#: Between two signs of life of a session at the end of its stream.
_HEARTBEAT_S = (5.0, 15.0)
#: A session that is still there when the server is about to stop is told so this long before.
_DRAIN_LEFT_S = 2.0


class Draining:
    """Whether the server is about to stop, and until when sessions may stay."""

    def __init__(self, event: trio.Event, drain_s: float) -> None:
        self.event = event
        self._stay_s = max(0.0, drain_s - _DRAIN_LEFT_S)

    @property
    def is_set(self) -> bool:
        return self.event.is_set()

    async def wait_over(self) -> None:
        await self.event.wait()
        await trio.sleep(self._stay_s)


class Held:
    """A session as an open stream of its key: it holds a slot, and ends when its key or token is taken."""

    def __init__(self, session: Live, slot: Slot, permit: Permit, ending: bytes) -> None:
        self._session = session
        self._slot = slot
        self._permit = permit
        #: What is said last to one whose key is gone.
        self._ending = ending

    def __repr__(self) -> str:
        return f"<Held {self._session!r}, {self._slot!r}>"

    def close(self) -> None:
        self._session.close()
        self._slot.give()

    async def run(self, sink: Sink) -> None:
        stalled: Stalled | None = None
        is_void = False
        async with trio.open_nursery() as nursery:

            def revoked() -> None:
                nonlocal is_void
                is_void = True
                nursery.cancel_scope.cancel()

            async def watch_permit() -> None:
                await self._permit.wait_void()
                revoked()

            nursery.start_soon(watch_permit)
            self._slot.on_revoked(revoked)
            try:
                await self._session.run(sink)
            except Stalled as error:  # raised here, it would come out as a group
                stalled = error
            nursery.cancel_scope.cancel()
        if stalled is not None:
            raise stalled
        if is_void:
            sink.put(self._ending)


def _failure(error: StreamsError | S2Error | BodyBroken) -> S2Error:
    if isinstance(error, BodyBroken):
        return S2Error("bad_frame", str(error))
    return error if isinstance(error, S2Error) else translated(error)


# ---------------------------------------------------------------------------------------------------
# Appending


class _Slot:
    """An input on its way, and what became of it."""

    __slots__ = ("done", "given", "result")

    def __init__(self, given: Input) -> None:
        self.given = given
        self.done = trio.Event()
        self.result: StreamAppended | S2Error | None = None

    def settle(self, result: StreamAppended | S2Error) -> None:
        self.result = result
        self.done.set()


class AppendSession:
    """The body of the answer to an append session."""

    def __init__(
        self,
        calls: Calls,
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
        #: What the charge held before: a body that came whole, before the session began.
        self._charged = 0 if charge is None else charge.size
        self._calls = calls
        self._box = box
        self._cipher = cipher
        self._key = key
        self._incoming = incoming
        #: Raises when the caller may not send this.
        self._check = check
        #: Waits until the caller may send the next input.
        self._pace = pace
        self._draining = draining
        self._chain = uuid.uuid4().hex
        self._bytes = 0
        self._relieved = trio.Event()
        self._reading = trio.CancelScope()
        self._has_failed = False

    def __repr__(self) -> str:
        return f"<AppendSession {self._box}, {self._bytes} B on the way>"

    def close(self) -> None:
        if self._charge is not None:
            self._charge.close()

    def _hold(self, size: int) -> None:
        """Charges what is in memory of the frames that come. Raises `Throttled`."""
        if self._charge is not None:
            self._charge.shrink_to(self._charged + size)
            self._charge.grow(self._charged + size - self._charge.size)

    async def _receive(self, incoming: AsyncIterator[bytes]) -> bytes:
        """The next bytes of the client; b"" at the end. Only a wait in here is the client's."""
        charge = self._charge
        if charge is not None:
            charge.watch(self._reading.cancel)
        try:
            async for data in incoming:
                return data
            return b""
        finally:
            if charge is not None:
                charge.unwatch()

    async def run(self, sink: Sink) -> None:
        send, receive = trio.open_memory_channel[_Slot | S2Error](_INPUTS_MAX)
        stalled: Stalled | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_reading, send, nursery)
            nursery.start_soon(self._end_in_time)
            try:
                await self._keep_acking(receive, sink)
            except Stalled as error:  # raised here, it would come out as a group
                stalled = error
            nursery.cancel_scope.cancel()
        if stalled is not None:
            raise stalled

    async def _keep_reading(
        self, slots: trio.MemorySendChannel[_Slot | S2Error], nursery: trio.Nursery
    ) -> None:
        receiver = frames.Receiver()
        async with slots:
            # The next input goes to the shard when the one before it has: each has its turn.
            turn = trio.Event()
            turn.set()
            try:
                with self._reading:
                    while data := await self._receive(self._incoming):
                        for body in receiver.feed_untrusted(data):
                            self._hold(len(receiver) + len(body))
                            slot = _Slot(_input(body))
                            self._check(slot.given)
                            await self._pace()
                            await self._admit(slot, slots)
                            self._bytes += slot.given.metered
                            next_turn = trio.Event()
                            nursery.start_soon(self._append, slot, turn, next_turn)
                            turn = next_turn
                            while self._bytes > _INPUT_BYTES_MAX:
                                self._relieved = trio.Event()
                                await self._relieved.wait()
                        self._hold(len(receiver))
                    receiver.end_untrusted()
                if self._reading.cancelled_caught:
                    if self._charge is not None:
                        self._charge.grow(0)  # raises when the client had stalled
                    raise S2Error("server_draining", "the server is stopping")
            except (S2Error, Throttled, BodyBroken) as error:
                await slots.send(_failure(error))

    async def _admit(self, slot: _Slot, slots: trio.MemorySendChannel[_Slot | S2Error]) -> None:
        """Waits for room here and for a permit, which is given back when the slot is settled."""
        inflight = self._calls.inflight
        await inflight.enter(slot.given.metered)
        try:
            await slots.send(slot)
        except BaseException:
            inflight.leave(slot.given.metered)
            raise

    async def _append(self, slot: _Slot, turn: trio.Event, next_turn: trio.Event) -> None:
        try:
            await turn.wait()
            if self._has_failed:
                raise S2Error("invalid", "an earlier input of this session has failed")
            slot.settle(
                await self._calls.append_as(
                    self._cipher, self._box, slot.given, self._key, self._chain, entered=next_turn
                )
            )
        except (StreamsError, S2Error) as error:
            self._has_failed = True
            slot.settle(_failure(error))
        finally:
            next_turn.set()
            self._calls.inflight.leave(slot.given.metered)

    async def _keep_acking(self, slots: trio.MemoryReceiveChannel[_Slot | S2Error], sink: Sink) -> None:
        """One ack an input, in their order; the first failure is the last frame."""
        async for slot in slots:
            if isinstance(slot, S2Error):
                sink.put(frames.terminal(slot))
                return
            await slot.done.wait()
            self._bytes -= slot.given.metered
            self._relieved.set()
            if isinstance(slot.result, S2Error):
                sink.put(frames.terminal(slot.result))
                return
            assert slot.result is not None
            body = messages.ack_as_protobuf(slot.result)
            sink.put(frames.frame(body, is_advised=self._draining.is_set))
            if sink.unsent_bytes > _UNSENT_BYTES_MAX:
                await sink.wait_sent(_STALL_S)

    async def _end_in_time(self) -> None:
        """What has come by then gets its ack; then the session is told that this was all."""
        await self._draining.wait_over()
        self._reading.cancel()


def _input(body: bytes) -> Input:
    try:
        return messages.input_from_protobuf(body)
    except S2Error as error:
        raise S2Error("bad_frame", str(error)) if error.code == "bad_proto" else error from None


# ---------------------------------------------------------------------------------------------------
# Reading


class Wording(Protocol):
    """How a read session is told to its client."""

    def batch(self, records: bytes, tail: tuple[int, int] | None, *, is_advised: bool) -> bytes: ...

    def heartbeat(self, tail: tuple[int, int], *, is_advised: bool) -> bytes: ...

    def failure(self, error: S2Error) -> bytes: ...

    def end(self) -> bytes: ...


class FrameWording:
    def __init__(self, codec: int) -> None:
        self._codec = codec

    def batch(self, records: bytes, tail: tuple[int, int] | None, *, is_advised: bool) -> bytes:
        body = messages.batch_as_protobuf(records, tail)
        return frames.frame(body, codec=self._codec, is_advised=is_advised)

    def heartbeat(self, tail: tuple[int, int], *, is_advised: bool) -> bytes:
        return frames.frame(messages.batch_as_protobuf(b"", tail), is_advised=is_advised)

    def failure(self, error: S2Error) -> bytes:
        return frames.terminal(error)

    def end(self) -> bytes:
        return b""


class EventWording:
    def __init__(self, *, is_base64: bool) -> None:
        self._is_base64 = is_base64
        self._count = 0
        self._metered = 0

    def batch(self, records: bytes, tail: tuple[int, int] | None, *, is_advised: bool) -> bytes:
        listed = list(sequenced.records_of(records))
        self._count += len(listed)
        self._metered += sum(record.metered for record in listed)
        data = messages.batch_as_json(listed, tail, is_base64=self._is_base64)
        id = b"%d,%d,%d" % (listed[-1].seq_num, self._count, self._metered)
        return b"event: batch\nid: %b\ndata: %b\n\n" % (id, data)

    def heartbeat(self, tail: tuple[int, int], *, is_advised: bool) -> bytes:
        return ping_event(int(time.time() * 1000), tail)

    def failure(self, error: S2Error) -> bytes:
        return error_event(error)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class ReadSession:
    """The body of the answer to a read session. Its first page has been read, so its start is good."""

    def __init__(
        self,
        calls: Calls,
        asked: Asked,
        head: ReadHead,
        first: StreamRecords,
        key: str,
        wording: Wording,
        draining: Draining,
        owner: str = EVERYONE,
    ) -> None:
        self._calls = calls
        self._owner = owner
        self._asked = asked
        self._head = head
        self._page = first
        self._key = key
        self._wording = wording
        self._draining = draining
        self._count_left = asked.count
        self._bytes_left = asked.bytes
        #: When a reader at the end of the stream gives up, if ever.
        self._until_s: float | None = None
        self._is_live = False
        #: Whether the reader has been told that the server is about to stop.
        self._is_told = False

    def __repr__(self) -> str:
        return f"<ReadSession {self._head.box} at {self._head.from_seq}>"

    def close(self) -> None:
        pass

    @property
    def _is_advised(self) -> bool:
        """Clients that have a bound and a wait take the advice badly (s2 §13)."""
        return self._draining.is_set and not (self._asked.is_bounded and self._asked.wait_s)

    async def run(self, sink: Sink) -> None:
        unread = Unread(self._calls.answers, self._owner, sink)
        try:
            while not await self._told(sink, unread):
                self._page = await self._next(sink, unread)
            sink.put(self._wording.end())
        except (StreamsError, S2Error) as error:
            sink.put(self._wording.failure(_gone(_failure(error))))
        finally:
            unread.close()

    async def _told(self, sink: Sink, unread: Unread) -> bool:
        """Tells the page. Whether it was the last one."""
        page, wording = self._page, self._wording
        tail = tail_of(page)
        if page.records:
            records = opened(page, self._key, self._head.box)
            sink.put(wording.batch(records, tail, is_advised=self._is_advised))
            self._calls.history.tally.read(self._head.box.partition("/")[0], len(records))
            self._consume(records)
            self._until_s = None
            unread.settle()
            if sink.unsent_bytes > _UNSENT_BYTES_MAX:
                await unread.wait_sent(_STALL_S)
        if self._is_over(page):
            return True
        if tail is None:
            self._is_live = False
            return False
        if self._asked.wait_s == 0 or (self._asked.is_bounded and not self._asked.wait_s):
            return True
        if self._until_s is None and self._asked.wait_s is not None:
            self._until_s = trio.current_time() + self._asked.wait_s
        if self._until_s is not None and trio.current_time() >= self._until_s:
            return True
        if not (self._is_live and page.records):
            sink.put(wording.heartbeat(tail, is_advised=self._is_advised))
        self._is_live = True
        return False

    def _consume(self, records: bytes) -> None:
        if self._count_left is not None or self._bytes_left is not None:
            listed = list(sequenced.records_of(records))
            if self._count_left is not None:
                self._count_left -= len(listed)
            if self._bytes_left is not None:
                self._bytes_left -= sum(record.metered for record in listed)

    def _is_over(self, page: StreamRecords) -> bool:
        """Whether a bound of the session is met. A page has bounds of its own, which mean nothing here."""
        if self._count_left == 0 or self._bytes_left == 0:
            return True
        # It may have stopped at the limit of a page, or at that of the session, or at `until`. In the latter
        # cases the next one has nothing in it.
        return page.is_full and not page.records

    async def _next(self, sink: Sink, unread: Unread) -> StreamRecords:
        """The next page; an empty one after a while in which nothing came."""
        head = msgspec.structs.replace(
            after(self._head, self._page),
            limit=min(BATCH_RECORDS_MAX, self._count_left or BATCH_RECORDS_MAX),
            max_bytes=min(BATCH_METERED_MAX, self._bytes_left or BATCH_METERED_MAX),
            wait_ms=self._wait_ms() if tail_of(self._page) is not None else 0,
        )
        if not head.wait_ms:
            await unread.reserve(head.max_bytes)
            return await self._calls.read(head)
        if sink.unsent_bytes:  # A reader that has not taken what there is need not hear of what comes.
            await unread.wait_sent(_STALL_S)
        unread.close()
        page: StreamRecords | StreamsError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_draining, nursery.cancel_scope)
            try:
                page = await self._calls.read(head)
            except StreamsError as error:  # raised here, it would come out as a group
                page = error
            nursery.cancel_scope.cancel()
        if isinstance(page, StreamsError):
            raise page
        if page is None:  # the server is about to stop: the reader is told where it stands
            self._leave()
            return msgspec.structs.replace(self._page, records=b"")
        return page

    def _wait_ms(self) -> int:
        wait_s = random.uniform(*_HEARTBEAT_S)
        if self._until_s is not None:
            wait_s = min(wait_s, max(0.001, self._until_s - trio.current_time()))
        # A clock of whole milliseconds may come a little early; who gives up then has not waited long enough.
        return min(SLICE_MS, int(wait_s * 1000) + 2)

    async def _end_when_draining(self, scope: trio.CancelScope) -> None:
        if not self._draining.is_set:
            await self._draining.event.wait()
        else:
            await self._draining.wait_over()
        scope.cancel()

    def _leave(self) -> None:
        """Advice is given once; whoever is still there at the end of the time is told that it is over."""
        if self._is_told:
            raise S2Error("server_draining", "the server is stopping")
        self._is_told = True


def _gone(error: S2Error) -> S2Error:
    """A stream that goes away under its reader: the client comes again, and hears why."""
    if error.code in ("stream_not_found", "stream_deletion_pending"):
        return S2Error("unavailable", str(error))
    return error
