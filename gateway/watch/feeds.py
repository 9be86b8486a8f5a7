"""One live read for each (box, encoding), shared by all its watchers in this gateway (v0 §7.2).

    shard ◄── follow(place, wait) ── Feed ──► page ──► every watcher that is exactly there

A feed asks its shard for the page after its place, waits for the answer, delivers it to its watchers, and
asks again. The answer's callback delivers it, in the task of the link: an event waits for no other task. If
there are many watchers, or the answer is an error, the feed's own task handles it.

Only one request is in flight: while a page is delivered the shard gathers the next one, so pages grow with
the load. If the shard goes down, the feed repeats its request until the shard is back; the log has the
records of the meantime.

A watcher joins at the feed's own place or ahead of it, so that there is neither gap nor repeat. Any other
watcher reads its backlog first. A watcher whose client does not keep up leaves the feed, and reads the log
from its own place.

Bounds: one request and one page for each feed; at most `FEEDS_MAX` feeds, each a request in flight on a link
that takes twice as many. A watcher whose box gets no feed polls once a second. A feed without watchers ends
with its next answer, at most `WAIT_MS` later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from gateway.shards.dispatch import Dispatch
from gateway.shards.links import OnAnswer
from gateway.watch.merge import Track
from gateway.watch.page import EncodedPage, Encoding, Place
from streams.protocol import wire
from streams.protocol.errors import BoxNotFound, Busy, StreamsError, Uncertain
from streams.protocol.telemetry.histogram import Histogram

log = structlog.get_logger()

FEEDS_MAX = 10_000
#: How long one request waits in the shard. It bounds how long an abandoned request stays there.
WAIT_MS = 10_000
#: Watchers served in a row before other tasks get a turn: about half a millisecond.
_TURN = 50
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.02, 0.5

_encode_head = wire.head_encoder.encode
_decode_head = wire.page_head_decoder.decode


class Follower(Protocol):
    """A watcher, as its feeds see it. None of these methods blocks."""

    def on_page(self, track: Track, page: EncodedPage) -> bool:
        """Deliver a page. Returns True if the track stays in the feed."""

    def on_box_delete(self, track: Track) -> None: ...

    def on_box_error(self, track: Track, error: StreamsError) -> None: ...


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    feeds: int
    #: Pages of records that feeds and backlog reads have read so far.
    pages_encoded: int
    pages_delivered: int


class Feeds:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self.answers = dispatch.answers
        self._feeds: dict[tuple[str, Encoding], Feed] = {}
        self._nursery: trio.Nursery | None = None
        self._pages_encoded = 0
        self.pages_delivered = 0
        #: By shard: time from an append to the delivery of its page.
        self.delivery_times = [Histogram() for _ in dispatch.links]

    def __repr__(self) -> str:
        return f"<Feeds {len(self._feeds)}>"

    def statistics(self) -> FeedStatistics:
        return FeedStatistics(len(self._feeds), self._pages_encoded, self.pages_delivered)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the tasks of all feeds."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def read(self, box: str, encoding: Encoding, place: Place) -> EncodedPage:
        """Read the page of backlog after a place. Raises `BoxNotFound`, and the errors of a shard that does
        not answer."""
        # Not the urgent link, because pages of backlog would delay urgent appends.
        link = self._dispatch.links[self._dispatch.placement.shard_of(box)]
        request = _encode_head(encoding.request_head(box, place, 0))
        return self.page_of(box, place, await link.call(wire.OP_FOLLOW, request, b""))

    def follow(self, box: str, encoding: Encoding, place: Place, on_answer: OnAnswer) -> None:
        """Ask for the page after a place, when there is one. Raises the errors of a link that is down."""
        link = self._dispatch.urgent[self._dispatch.placement.shard_of(box)]
        link.post(wire.OP_FOLLOW, _encode_head(encoding.request_head(box, place, WAIT_MS)), b"", on_answer)

    def page_of(self, box: str, place: Place, message: wire.Message) -> EncodedPage:
        if message.body:
            self._pages_encoded += 1
        return EncodedPage(box, place, _decode_head(message.head), message.body)

    def join(self, follower: Follower, track: Track, encoding: Encoding) -> bool | None:
        """Add a track to the feed of its box. Returns True if it follows the feed now, False if it is behind
        and must read on, None if there is no room for a feed."""
        key = (track.box, encoding)
        feed = self._feeds.get(key)
        if feed is None:
            if len(self._feeds) >= FEEDS_MAX:
                return None
            assert self._nursery is not None
            feed = self._feeds[key] = Feed(self, track.box, encoding, track.place)
            self._nursery.start_soon(feed.run)
        return feed.join(follower, track)

    def leave(self, follower: Follower, track: Track, encoding: Encoding) -> None:
        feed = self._feeds.get((track.box, encoding))
        if feed is not None:
            feed.tracks.pop(track, None)

    def note_delivery(self, box: str, page: EncodedPage, count: int) -> None:
        """Note that a live page was delivered to `count` watchers."""
        self.pages_delivered += count
        if page.record and page.reaches_head:
            took_s = max(0.0, time.time() - page.appended_ms / 1000)
            self.delivery_times[self._dispatch.placement.shard_of(box)].observe(took_s)

    def remove(self, feed: Feed) -> None:
        del self._feeds[(feed.box, feed.encoding)]


def _has_news(page: EncodedPage) -> bool:
    """Return True if watchers get anything, or only move on."""
    return page.place != page.was or page.tombstone is not None


class Feed:
    def __init__(self, feeds: Feeds, box: str, encoding: Encoding, place: Place) -> None:
        self.box = box
        self.encoding = encoding
        self.place = place
        self.tracks: dict[Track, Follower] = {}
        self._feeds = feeds
        #: The answer that the feed's own task has to handle, and the event that wakes it.
        self._answer: wire.Message | StreamsError | None = None
        self._has_answer = trio.Event()

    def __repr__(self) -> str:
        return f"<Feed {self.box} at {self.place.seq}, {len(self.tracks)} watchers>"

    def join(self, follower: Follower, track: Track) -> bool:
        here, there = self.place, track.place
        if here.is_gone and there.is_gone:
            track.place = here  # the box is deleted: no record is missing, and both wait for a new one
        elif here != there and not (here.generation == there.generation and here.seq < there.seq):
            return False
        self.tracks[track] = follower
        return True

    async def run(self) -> None:
        pause_s = _PAUSE_S_MIN
        try:
            while True:
                try:
                    page = await self._next_page()
                except BoxNotFound:
                    await self._announce_delete()
                except (Busy, Uncertain) as error:
                    # The shard is down, restarting or overloaded. The log keeps the records of the meantime.
                    log.debug("feed: read failed, retrying", box=self.box, error=error.message)
                    await trio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _PAUSE_S_MAX)
                    continue
                except StreamsError as error:
                    for track, follower in list(self.tracks.items()):
                        follower.on_box_error(track, error)
                    return
                else:
                    if _has_news(page):
                        self.place = page.place
                        await self._deliver(page)
                pause_s = _PAUSE_S_MIN
                if not self.tracks:
                    return
        finally:
            self._feeds.remove(self)

    async def _next_page(self) -> EncodedPage:
        """Return the next page that this task has to deliver, or raise the error of the shard."""
        self._has_answer = trio.Event()
        self._feeds.follow(self.box, self.encoding, self.place, self._on_answer)
        await self._has_answer.wait()
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if isinstance(answer, StreamsError):
            raise answer
        return self._feeds.page_of(self.box, self.place, answer)

    def _on_answer(self, answer: wire.Message | StreamsError) -> None:
        """Deliver a page to a few watchers and ask for the next one. Otherwise leave it to the feed's task:
        called in the task of the link, it must not take long."""
        tracks = self.tracks
        if isinstance(answer, StreamsError) or not 0 < len(tracks) <= _TURN:
            self._wake_task(answer)
            return
        page = self._feeds.page_of(self.box, self.place, answer)
        if _has_news(page):
            self.place = page.place
            count = len(tracks)
            for track, follower in list(tracks.items()):
                if not follower.on_page(track, page):
                    tracks.pop(track, None)
            self._feeds.note_delivery(self.box, page, count)
        try:
            self._feeds.follow(self.box, self.encoding, self.place, self._on_answer)
        except StreamsError as error:
            self._wake_task(error)

    def _wake_task(self, answer: wire.Message | StreamsError) -> None:
        self._answer = answer
        self._has_answer.set()

    async def _deliver(self, page: EncodedPage) -> None:
        tracks = self.tracks
        count = 0
        for track, follower in list(tracks.items()):
            if track not in tracks:  # it left while other tasks ran
                continue
            if not follower.on_page(track, page):
                del tracks[track]
            count += 1
            if count % _TURN == 0:
                await trio.lowlevel.checkpoint()
        self._feeds.note_delivery(self.box, page, count)

    async def _announce_delete(self) -> None:
        """Report once that the box was deleted. The next requests wait until it is created again."""
        if self.place.is_gone:
            return
        self.place = self.place._replace(is_gone=True)
        for track, follower in list(self.tracks.items()):
            follower.on_box_delete(track)
        await trio.lowlevel.checkpoint()
