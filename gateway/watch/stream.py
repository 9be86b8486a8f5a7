"""Serves one watcher: first the backlog, box by box in turns, then the live feeds; with heartbeats.

Most of a stream's life is spent asleep: feeds write into its sink from their own task. It wakes for backlog,
for a peer that has fallen behind, and for heartbeats.

Slow readers (v0 §7.3). A page is put only while nothing is unsent, so the buffer holds at most a page of
backlog and one from a feed beyond what the kernel took, and a line for each box that was deleted. A peer that
is behind leaves its feeds; when it has taken what was put, it reads on from the log, in pages as large as it
asked for. After `stall_s` in which it took nothing it is told so, if it will hear it, and the stream ends.
Streams that share a sink (a WebSocket has one for each box) take turns at reading their backlogs, so the
bound is the same for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import orjson
import structlog
import trio

from gateway.admission.memory import EVERYONE
from gateway.requests import sse
from gateway.requests.errors import STATUS_OF
from gateway.requests.request import ClientStalled, Sink
from gateway.requests.unsent_charge import UnsentCharge
from gateway.watch.feeds import Feeds
from gateway.watch.merge import Event, Merge, Track
from gateway.watch.page import Encoding, Page
from streams.protocol.errors import BoxNotFound, Busy, StreamsError, Uncertain

log = structlog.get_logger()

STALL_S = 30.0
#: A shard that does not answer one read of a backlog must not hold up the other boxes.
_READ_S_MAX = 5.0
#: When to ask again: a shard that could not answer, a box for which there was no room among the feeds.
_RETRY_S, _POLL_S = 0.05, 1.0


class Wording(Protocol):
    """How events are written: as SSE, or as messages of a WebSocket."""

    @property
    def key(self) -> object:
        """Equal for streams whose events about one page read the same; None when no other's do."""

    def event(self, name: bytes, data: bytes, id: bytes) -> bytes: ...

    def error(self, status: int, code: str, message: str, boxes: list[str]) -> bytes: ...

    def heartbeat(self) -> bytes: ...


class SseWording:
    key = "sse"

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    def event(self, name: bytes, data: bytes, id: bytes) -> bytes:
        return sse.event(name, sse.one_value(data), id)

    def error(self, status: int, code: str, message: str, boxes: list[str]) -> bytes:
        told: dict[str, object] = {"code": status, "error": message}
        if boxes:
            told["boxes"] = boxes
        return sse.event(b"error", orjson.dumps(told))

    def heartbeat(self) -> bytes:
        return sse.heartbeat(self._now_ms())


class Stream:
    def __init__(
        self,
        feeds: Feeds,
        merge: Merge,
        encoding: Encoding,
        wording: Wording,
        *,
        heartbeat_ms: int,
        stall_s: float = STALL_S,
        turn: trio.Lock | None = None,
        owner: str = EVERYONE,
    ) -> None:
        """`turn` is shared by all who share a sink."""
        self.merge = merge
        self._owner = owner
        self._unread: UnsentCharge | None = None
        self._feeds = feeds
        self._encoding = encoding
        self._wording = wording
        self._heartbeat_s = heartbeat_ms / 1000
        self._stall_s = stall_s
        self._turn = turn or trio.Lock()
        self._sink: Sink | None = None
        self._put_at_s = 0.0
        self._awake = trio.Event()
        self._ending: bytes | None = None
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<Stream {self.merge!r}>"

    # -- called by feeds and by whoever owns the stream; nothing here waits

    def end(self, message: str = "") -> None:
        """Ends the stream soon; with a message, the reader is told why, and not to come back as it came."""
        if not self._is_ending:
            self._is_ending = True
            if message:
                self._ending = self._wording.error(410, "gone", message, [])
            self._awake.set()

    def page_came(self, track: Track, page: Page) -> bool:
        sink = self._sink
        assert sink is not None
        if track.has_passed(page) and not track.continues_with(page):
            return True
        if sink.unsent_bytes or self._is_ending or not track.continues_with(page):
            self._fall_behind(track)
            return False
        is_shared = self._put_page(track, page)
        if sink.unsent_bytes:
            assert self._unread is not None
            if is_shared:
                page.unread = self._unread.share(page.unread, len(page.record))
            else:
                self._unread.settle()
            self._awake.set()
        return True

    def box_went(self, track: Track) -> None:
        self._put_events(self.merge.box_gone(track))
        self._awake.set()

    def box_failed(self, track: Track, error: StreamsError) -> None:
        self.merge.drop(track)
        self._put(self._wording.error(STATUS_OF[error.code], error.code, error.message, [track.box]))
        self._awake.set()

    def _fall_behind(self, track: Track) -> None:
        self.merge.wait_turn(track)
        self._awake.set()

    # -- writing

    def _put(self, text: bytes) -> None:
        assert self._sink is not None
        self._sink.put(text)
        self._put_at_s = trio.current_time()

    def _put_events(self, events: list[Event]) -> None:
        for name, data, id, _ in events:
            self._put(self._wording.event(name, data, id))

    def _put_page(self, track: Track, page: Page) -> bool:
        """Return True if other streams have put the same bytes, or may do so."""
        events = self.merge.take(track, page)
        if len(events) == 1 and events[0].is_shared:
            key = self._wording.key
            text = page.shared(key) if key is not None else None
            if text is None:
                text = self._wording.event(events[0].name, events[0].data, self.merge.id())
                if key is not None:
                    page.share(key, text)
            self._put(text)
            return key is not None
        self._put_events(events)
        return False

    # -- the stream's own task

    async def run(self, sink: Sink) -> None:
        """Until `end`, a stall, or the peer's leaving (then it is cancelled)."""
        self._sink = sink
        self._unread = UnsentCharge(self._feeds.answers, self._owner, sink)
        self._put_at_s = trio.current_time()
        try:
            await self._serve(sink)
        except ClientStalled:
            message = f"nothing was read for {self._stall_s:g} s; connect again to go on"
            self._put(self._wording.error(408, "stalled", message, []))
        finally:
            self._unread.close()
            for track in self.merge.tracks.values():
                if track.is_live:
                    self._feeds.leave(self, track, self._encoding)

    async def _serve(self, sink: Sink) -> None:
        unread = self._unread
        assert unread is not None
        while True:
            if sink.unsent_bytes:
                await unread.wait_sent(self._stall_s)
            else:
                unread.clear()
            if self._is_ending:
                if self._ending is not None:
                    self._put(self._ending)
                return
            track = self.merge.next_turn(trio.current_time())
            if track is None:
                await self._sleep()
            else:
                async with self._turn:
                    if sink.unsent_bytes:  # somebody else's, put while we waited for our turn
                        await unread.wait_sent(self._stall_s)
                    await self._read(track, unread)
                await trio.lowlevel.checkpoint()

    async def _sleep(self) -> None:
        """Until woken, or a heartbeat or a retry is due."""
        until_s = self._put_at_s + self._heartbeat_s
        due_s = self.merge.next_due_s()
        with trio.CancelScope(deadline=until_s if due_s is None else min(until_s, due_s)):
            await self._awake.wait()
        self._awake = trio.Event()
        if trio.current_time() >= self._put_at_s + self._heartbeat_s:
            self._put(self._wording.heartbeat())

    async def _read(self, track: Track, unread: UnsentCharge) -> None:
        """One page of a box's backlog; at its end the track goes over to the feed."""
        page: Page | None = None
        try:
            with trio.move_on_after(_READ_S_MAX):
                await unread.reserve(self._encoding.max_bytes)
                page = await self._feeds.read(track.box, self._encoding, track.place)
        except BoxNotFound:
            unread.close()
            self._put_events(self.merge.box_gone(track))
            self._go_live(track, has_moved=False)
            return
        except (Busy, Uncertain):
            pass
        except StreamsError as error:
            unread.close()
            self.box_failed(track, error)
            return
        if page is None:
            unread.close()
            self.merge.wait_turn(track, trio.current_time() + _RETRY_S)
            return
        self._put_page(track, page)
        unread.settle()
        if page.reaches_head:
            self._go_live(track, has_moved=page.place != page.was)
        else:
            self.merge.wait_turn(track)

    def _go_live(self, track: Track, *, has_moved: bool) -> None:
        joined = self._feeds.join(self, track, self._encoding)
        if joined:
            self._put_events(self.merge.go_live(track))
        elif joined is None:
            self.merge.wait_turn(track, trio.current_time() + _POLL_S)
        elif has_moved:
            self.merge.wait_turn(track)
        else:
            # We are where the feed is not, and reading again brings nothing: it has yet to hear that the box
            # began another life, which it is told when that is on the disk.
            self.merge.wait_turn(track, trio.current_time() + _RETRY_S)
