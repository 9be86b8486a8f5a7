"""Serves one SSE or WebSocket subscription: first the backlog, box by box in turns, then the live feeds, with
heartbeats.

A stream sleeps most of the time: feeds write into its sink from their own tasks. It wakes to read backlog,
when its client has fallen behind, and to send heartbeats.

Slow clients (v0 §7.3). A page is put only when nothing is waiting to be sent. So the buffer holds at most one
page of backlog, one page of a feed, and a line for each deleted box, beyond the buffer of the kernel. A
client that falls behind leaves its feeds; when the buffer is empty, it catches up from the log, in pages of
its own page size. A client that reads nothing for `stall_s` gets an error event, if it still reads, and the
stream ends. Streams that share a sink (a WebSocket has one for each box) read their backlogs in turns, so the
same bound holds for all of them together."""

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
from gateway.watch.merge import Merge, MergedEvent, Track
from gateway.watch.page import EncodedPage, Encoding
from streams.protocol.errors import BoxNotFound, Busy, StreamsError, Uncertain

log = structlog.get_logger()

STALL_S = 30.0
#: Time limit of one backlog read: a shard that does not answer must not delay the other boxes.
_READ_S_MAX = 5.0
#: Retry delay after a shard could not answer, and poll interval of a box without a feed.
_RETRY_S, _POLL_S = 0.05, 1.0


class EventEncoder(Protocol):
    """Encodes events: as SSE, or as messages of a WebSocket."""

    @property
    def key(self) -> object:
        """Equal for streams that encode a page to the same text; None if no other stream does."""

    def event(self, name: bytes, data: bytes, id: bytes) -> bytes: ...

    def error(self, status: int, code: str, message: str, boxes: list[str]) -> bytes: ...

    def heartbeat(self) -> bytes: ...


class SseEncoder:
    key = "sse"

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    def event(self, name: bytes, data: bytes, id: bytes) -> bytes:
        return sse.event(name, sse.one_value(data), id)

    def error(self, status: int, code: str, message: str, boxes: list[str]) -> bytes:
        data: dict[str, object] = {"code": status, "error": message}
        if boxes:
            data["boxes"] = boxes
        return sse.event(b"error", orjson.dumps(data))

    def heartbeat(self) -> bytes:
        return sse.heartbeat(self._now_ms())


class Subscription:
    def __init__(
        self,
        feeds: Feeds,
        merge: Merge,
        encoding: Encoding,
        encoder: EventEncoder,
        *,
        heartbeat_ms: int,
        stall_s: float = STALL_S,
        turn: trio.Lock | None = None,
        owner: str = EVERYONE,
    ) -> None:
        """Streams that share a sink share `turn`."""
        self.merge = merge
        self._owner = owner
        self._unread: UnsentCharge | None = None
        self._feeds = feeds
        self._encoding = encoding
        self._encoder = encoder
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

    # -- called by feeds and by the owner of the stream; nothing here blocks

    def end(self, message: str = "") -> None:
        """End the stream soon. With a message, the client first gets an error event: reconnecting with the
        same key or session will not help."""
        if not self._is_ending:
            self._is_ending = True
            if message:
                self._ending = self._encoder.error(410, "gone", message, [])
            self._awake.set()

    def on_page(self, track: Track, page: EncodedPage) -> bool:
        sink = self._sink
        assert sink is not None
        if track.has_passed(page) and not track.continues_with(page):
            return True
        if sink.unsent_bytes or self._is_ending or not track.continues_with(page):
            self._leave_feed(track)
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

    def on_box_delete(self, track: Track) -> None:
        self._put_events(self.merge.note_delete(track))
        self._awake.set()

    def on_box_error(self, track: Track, error: StreamsError) -> None:
        self.merge.drop(track)
        self._put(self._encoder.error(STATUS_OF[error.code], error.code, error.message, [track.box]))
        self._awake.set()

    def _leave_feed(self, track: Track) -> None:
        self.merge.wait_turn(track)
        self._awake.set()

    # -- writing

    def _put(self, text: bytes) -> None:
        assert self._sink is not None
        self._sink.put(text)
        self._put_at_s = trio.current_time()

    def _put_events(self, events: list[MergedEvent]) -> None:
        for name, data, id, _ in events:
            self._put(self._encoder.event(name, data, id))

    def _put_page(self, track: Track, page: EncodedPage) -> bool:
        """Put the events of a page. Returns True if other streams share the same bytes."""
        events = self.merge.take(track, page)
        if len(events) == 1 and events[0].is_shared:
            key = self._encoder.key
            text = page.text_of(key) if key is not None else None
            if text is None:
                text = self._encoder.event(events[0].name, events[0].data, self.merge.id())
                if key is not None:
                    page.keep_text(key, text)
            self._put(text)
            return key is not None
        self._put_events(events)
        return False

    # -- the stream's own task

    async def run(self, sink: Sink) -> None:
        """Serve until `end` or a stall. The caller cancels it when the client disconnects."""
        self._sink = sink
        self._unread = UnsentCharge(self._feeds.answers, self._owner, sink)
        self._put_at_s = trio.current_time()
        try:
            await self._serve(sink)
        except ClientStalled:
            message = f"the client read nothing for {self._stall_s:g} s; reconnect to continue"
            self._put(self._encoder.error(408, "stalled", message, []))
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
                    if sink.unsent_bytes:  # another stream has put it while this one waited for its turn
                        await unread.wait_sent(self._stall_s)
                    await self._read(track, unread)
                await trio.lowlevel.checkpoint()

    async def _sleep(self) -> None:
        """Sleep until woken, or until a heartbeat or a retry is due."""
        until_s = self._put_at_s + self._heartbeat_s
        due_s = self.merge.next_due_s()
        with trio.CancelScope(deadline=until_s if due_s is None else min(until_s, due_s)):
            await self._awake.wait()
        self._awake = trio.Event()
        if trio.current_time() >= self._put_at_s + self._heartbeat_s:
            self._put(self._encoder.heartbeat())

    async def _read(self, track: Track, unread: UnsentCharge) -> None:
        """Read one page of a box's backlog. At the end of the backlog the track joins the feed."""
        page: EncodedPage | None = None
        try:
            with trio.move_on_after(_READ_S_MAX):
                await unread.reserve(self._encoding.max_bytes)
                page = await self._feeds.read(track.box, self._encoding, track.place)
        except BoxNotFound:
            unread.close()
            self._put_events(self.merge.note_delete(track))
            self._go_live(track, has_moved=False)
            return
        except (Busy, Uncertain):
            pass
        except StreamsError as error:
            unread.close()
            self.on_box_error(track, error)
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
        is_following = self._feeds.join(self, track, self._encoding)
        if is_following:
            self._put_events(self.merge.go_live(track))
        elif is_following is None:
            self.merge.wait_turn(track, trio.current_time() + _POLL_S)
        elif has_moved:
            self.merge.wait_turn(track)
        else:
            # This track is ahead of the feed, and reading again brings nothing: the feed does not know the
            # new generation of the box yet. The shard reports it when the change is durable.
            self.merge.wait_turn(track, trio.current_time() + _RETRY_S)
