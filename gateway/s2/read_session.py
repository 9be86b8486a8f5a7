"""Serves read sessions (s2 §12, §13), as s2s frames or server-sent events; also has code for all sessions.

    pages from the shard, one after the other ──► frames or events out; heartbeats at the tail

Limits: with more than `UNSENT_BYTES_MAX` unsent, a session waits for its client. Meanwhile it prefetches one
page if the budget of answers has room for it.
"""

from __future__ import annotations

import random
import time
from typing import Protocol

import msgspec
import trio

from gateway.admission.limits import Slot
from gateway.admission.memory import EVERYONE
from gateway.requests.request import BodyBroken, Buffer, ClientStalled, Live, Sink
from gateway.requests.s2_errors import S2Error, to_s2_error
from gateway.requests.unsent_charge import UnsentCharge
from gateway.s2 import record_formats, session_frames
from gateway.s2.permits import Permit
from gateway.s2.records import SLICE_MS, ReadQuery, after, decrypt_records, error_event, ping_event, tail_of
from gateway.s2.shard_calls import PendingRead, ShardCalls
from streams.protocol.errors import StreamsError
from streams.protocol.messages.s2 import (
    BATCH_METERED_MAX,
    BATCH_RECORDS_MAX,
    ReadHead,
    StreamRecords,
)
from streams.protocol.model import binary_records

UNSENT_BYTES_MAX = 2 * 1024 * 1024
#: The front's limit for any response without progress.
STALL_S = 30.0
#: Range of the random interval between heartbeats at the tail.
_HEARTBEAT_S = (5.0, 15.0)
#: Sessions are ended this long before the drain time of the server is over.
_DRAIN_MARGIN_S = 2.0


class Draining:
    """The drain state of the server, and how long sessions may stay open."""

    def __init__(self, event: trio.Event, drain_s: float) -> None:
        self.event = event
        self._stay_s = max(0.0, drain_s - _DRAIN_MARGIN_S)

    @property
    def is_set(self) -> bool:
        return self.event.is_set()

    async def wait_deadline(self) -> None:
        await self.event.wait()
        await trio.sleep(self._stay_s)


class AuthorizedSession:
    """A session that holds a stream slot of its key, and ends when its key or token is revoked."""

    def __init__(self, session: Live, slot: Slot, permit: Permit, ending: bytes) -> None:
        self._session = session
        self._slot = slot
        self._permit = permit
        #: The last bytes to a client whose key or token was revoked.
        self._ending = ending

    def __repr__(self) -> str:
        return f"<AuthorizedSession {self._session!r}, {self._slot!r}>"

    def close(self) -> None:
        self._session.close()
        self._slot.give_back()

    async def run(self, sink: Sink) -> None:
        stall: ClientStalled | None = None
        is_revoked = False
        async with trio.open_nursery() as nursery:

            def revoke() -> None:
                nonlocal is_revoked
                is_revoked = True
                nursery.cancel_scope.cancel()

            async def watch_permit() -> None:
                await self._permit.wait_revoked()
                revoke()

            nursery.start_soon(watch_permit)
            self._slot.on_revoked(revoke)
            try:
                await self._session.run(sink)
            except ClientStalled as error:  # a nursery would wrap it in a group
                stall = error
            nursery.cancel_scope.cancel()
        if stall is not None:
            raise stall
        if is_revoked:
            sink.put(self._ending)


def failure_of(error: StreamsError | S2Error | BodyBroken) -> S2Error:
    """Convert any session error to an S2 error."""
    if isinstance(error, BodyBroken):
        return S2Error("bad_frame", str(error))
    return error if isinstance(error, S2Error) else to_s2_error(error)


class SessionEncoder(Protocol):
    """Encodes the output of a read session."""

    def batch(self, records: Buffer, tail: tuple[int, int] | None, *, advises_reconnect: bool) -> bytes: ...

    def heartbeat(self, tail: tuple[int, int], *, advises_reconnect: bool) -> bytes: ...

    def failure(self, error: S2Error) -> bytes: ...

    def end(self) -> bytes: ...


class FrameEncoder:
    def __init__(self, codec: int) -> None:
        self._codec = codec

    def batch(self, records: Buffer, tail: tuple[int, int] | None, *, advises_reconnect: bool) -> bytes:
        parts = record_formats.batch_parts(records, tail)
        return session_frames.frame(*parts, codec=self._codec, advises_reconnect=advises_reconnect)

    def heartbeat(self, tail: tuple[int, int], *, advises_reconnect: bool) -> bytes:
        return session_frames.frame(
            record_formats.batch_as_protobuf(b"", tail), advises_reconnect=advises_reconnect
        )

    def failure(self, error: S2Error) -> bytes:
        return session_frames.terminal(error)

    def end(self) -> bytes:
        return b""


class S2EventEncoder:
    def __init__(self, *, is_base64: bool, already_delivered: tuple[int, int] = (0, 0)) -> None:
        """`already_delivered`: records and metered bytes of this read before the client reconnected."""
        self._is_base64 = is_base64
        self._count, self._metered_bytes = already_delivered

    def batch(self, records: Buffer, tail: tuple[int, int] | None, *, advises_reconnect: bool) -> bytes:
        decoded_records = list(binary_records.records_of(bytes(records)))
        self._count += len(decoded_records)
        self._metered_bytes += sum(record.metered_size for record in decoded_records)
        data = record_formats.batch_as_json(decoded_records, tail, is_base64=self._is_base64)
        id = b"%d,%d,%d" % (decoded_records[-1].seq_num, self._count, self._metered_bytes)
        return b"event: batch\nid: %b\ndata: %b\n\n" % (id, data)

    def heartbeat(self, tail: tuple[int, int], *, advises_reconnect: bool) -> bytes:
        return ping_event(int(time.time() * 1000), tail)

    def failure(self, error: S2Error) -> bytes:
        return error_event(error)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class ReadSession:
    """The response body of one read session. Its first page is read already, so its start is valid."""

    def __init__(
        self,
        calls: ShardCalls,
        query: ReadQuery,
        head: ReadHead,
        first: StreamRecords,
        key: str,
        encoder: SessionEncoder,
        draining: Draining,
        owner: str = EVERYONE,
    ) -> None:
        self._calls = calls
        self._owner = owner
        self._query = query
        self._head = head
        self._page = first
        #: The prefetch of the next page, if any.
        self._ahead: PendingRead | None = None
        self._key = key
        self._encoder = encoder
        self._draining = draining
        self._count_left = query.count
        self._bytes_left = query.bytes
        #: When a reader at the tail stops waiting; None for never.
        self._until_s: float | None = None
        self._is_live = False
        #: True if the client was advised to reconnect because the server drains.
        self._has_advised = False

    def __repr__(self) -> str:
        return f"<ReadSession {self._head.box} at {self._head.from_seq}>"

    def close(self) -> None:
        pass

    @property
    def _advises_reconnect(self) -> bool:
        """True if batches advise a reconnect.

        Clients with a limit and a wait mishandle the advice (s2 §13).
        """
        return self._draining.is_set and not (self._query.is_bounded and self._query.wait_s)

    async def run(self, sink: Sink) -> None:
        unsent = UnsentCharge(self._calls.answers, self._owner, sink)
        try:
            while not await self._send_page(sink, unsent):
                self._page = await self._next(sink, unsent)
            sink.put(self._encoder.end())
        except (StreamsError, S2Error) as error:
            sink.put(self._encoder.failure(_as_retryable(failure_of(error))))
        finally:
            if self._ahead is not None:
                self._ahead.close()
            unsent.close()

    async def _send_page(self, sink: Sink, unsent: UnsentCharge) -> bool:
        """Send the page. Return True if it was the last one."""
        page, encoder = self._page, self._encoder
        tail = tail_of(page)
        if page.records:
            records = decrypt_records(page, self._key, self._head.box)
            sink.put(encoder.batch(records, tail, advises_reconnect=self._advises_reconnect))
            self._calls.history.counters.count_read(self._head.box.partition("/")[0], len(records))
            self._consume(page.count, records)
            self._until_s = None
            unsent.settle()
            if sink.unsent_bytes > UNSENT_BYTES_MAX:
                if tail is None and not self._is_over(page):
                    self._fetch_ahead(unsent)
                await unsent.wait_sent(STALL_S)
        if self._is_over(page):
            if tail is not None and self._query.is_empty and self._query.wait_s:
                sink.put(encoder.heartbeat(tail, advises_reconnect=self._advises_reconnect))
            return True
        if tail is None:
            self._is_live = False
            return False
        if self._query.wait_s == 0 or (self._query.is_bounded and not self._query.wait_s):
            return True
        if self._until_s is None and self._query.wait_s is not None:
            self._until_s = trio.current_time() + self._query.wait_s
        if self._until_s is not None and trio.current_time() >= self._until_s:
            return True
        if not (self._is_live and page.records):
            sink.put(encoder.heartbeat(tail, advises_reconnect=self._advises_reconnect))
        self._is_live = True
        return False

    def _consume(self, count: int, records: Buffer) -> None:
        if self._count_left is not None:
            self._count_left -= count
        if self._bytes_left is not None:
            self._bytes_left -= sum(binary_records.metered_sizes(memoryview(records)))

    def _is_over(self, page: StreamRecords) -> bool:
        """Return True if the session has reached its limit. Limits of a page do not count."""
        if self._count_left == 0 or self._bytes_left == 0:
            return True
        # A full page stopped at its own limit, at the session's limit or at `until`. In the last two cases
        # the next page is empty.
        return page.is_full and not page.records

    async def _next(self, sink: Sink, unsent: UnsentCharge) -> StreamRecords:
        """Return the next page; an empty one if nothing arrives within the heartbeat interval."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return await ahead.page()
        head = self._next_head(self._wait_ms() if tail_of(self._page) is not None else 0)
        if not head.wait_ms:
            await unsent.reserve(head.max_bytes)
            return await self._calls.read(head)
        if sink.unsent_bytes:  # a client that has not read the backlog needs no new records
            await unsent.wait_sent(STALL_S)
        unsent.close()
        page: StreamRecords | StreamsError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_draining, nursery.cancel_scope)
            try:
                page = await self._calls.read(head)
            except StreamsError as error:  # a nursery would wrap it in a group
                page = error
            nursery.cancel_scope.cancel()
        if isinstance(page, StreamsError):
            raise page
        if page is None:  # the server drains: send the client its position
            self._leave()
            return msgspec.structs.replace(self._page, records=b"")
        return page

    def _next_head(self, wait_ms: int) -> ReadHead:
        return msgspec.structs.replace(
            after(self._head, self._page),
            limit=min(BATCH_RECORDS_MAX, self._count_left or BATCH_RECORDS_MAX),
            max_bytes=min(BATCH_METERED_MAX, self._bytes_left or BATCH_METERED_MAX),
            wait_ms=wait_ms,
        )

    def _fetch_ahead(self, unsent: UnsentCharge) -> None:
        """Prefetch the next page if the budget has room for it now."""
        head = self._next_head(0)
        if unsent.try_reserve(head.max_bytes):
            self._ahead = self._calls.begin_read(head)

    def _wait_ms(self) -> int:
        wait_s = random.uniform(*_HEARTBEAT_S)
        if self._until_s is not None:
            wait_s = min(wait_s, max(0.001, self._until_s - trio.current_time()))
        # Millisecond clocks may fire early: 2 ms more make sure that the session waits long enough.
        return min(SLICE_MS, int(wait_s * 1000) + 2)

    async def _end_when_draining(self, scope: trio.CancelScope) -> None:
        if not self._draining.is_set:
            await self._draining.event.wait()
        else:
            await self._draining.wait_deadline()
        scope.cancel()

    def _leave(self) -> None:
        """Advise a reconnect once. At the end of the drain time, end the session."""
        if self._has_advised:
            raise S2Error("server_draining", "the server is stopping")
        self._has_advised = True


def _as_retryable(error: S2Error) -> S2Error:
    """Convert "stream is gone" to a retryable error: the client reconnects and gets the reason."""
    if error.code in ("stream_not_found", "stream_deletion_pending"):
        return S2Error("unavailable", str(error))
    return error
