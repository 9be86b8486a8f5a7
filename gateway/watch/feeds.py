"""One live read for each (box, encoding), shared by everyone who watches it in this gateway (v0 §7.2).

    shard ◄── follow(place, wait) ── Feed ──► page ──► every watcher that is exactly there

A feed asks its shard for what comes after its place, waits for the answer, hands it to its watchers, and asks
again. The answer on its way is all the credit there is: while a page is being handed out the shard gathers
the next one, so the more there is to do, the larger the pages get. When the shard goes away the same question
is asked again until it is back; whatever was missed meanwhile is in the log.

A watcher joins at the feed's own place or ahead of it, so that there is neither gap nor repeat; one that is
anywhere else reads its backlog first. A watcher whose peer does not keep up leaves, and reads the log from
where it stopped.

Bounds: one question and one page a feed; at most `FEEDS_MAX` feeds, each a request in flight on a link that
takes twice as many. A box that finds no room here is asked for once a second. A feed without watchers
ends with its next answer, at most `WAIT_MS` later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from gateway.shards.dispatch import Dispatch
from gateway.watch.merge import Track
from gateway.watch.page import Encoding, Page, Place
from streams.protocol import wire
from streams.protocol.errors import BoxNotFound, Busy, StreamsError, Uncertain
from streams.protocol.telemetry.histogram import Histogram

log = structlog.get_logger()

FEEDS_MAX = 10_000
#: How long one question waits in the shard. It only bounds how long an abandoned one stays there.
WAIT_MS = 10_000
#: Watchers served in a row before other tasks get a turn: about half a millisecond.
_TURN = 50
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.02, 0.5

_encode_head = wire.head_encoder.encode
_decode_head = wire.page_head_decoder.decode


class Follower(Protocol):
    """A watcher, as its feeds see it. None of these waits."""

    def page_came(self, track: Track, page: Page) -> bool:
        """Whether the track goes on with the feed."""

    def box_went(self, track: Track) -> None: ...

    def box_failed(self, track: Track, error: StreamsError) -> None: ...


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    feeds: int
    #: Pages of records that were worded, by all feeds and backlog reads so far.
    pages_worded: int
    pages_delivered: int


class Feeds:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self.answers = dispatch.answers
        self._feeds: dict[tuple[str, Encoding], Feed] = {}
        self._nursery: trio.Nursery | None = None
        self._pages_worded = 0
        self.pages_delivered = 0
        #: By shard: from an append to its page being handed out.
        self.delivery_times = [Histogram() for _ in dispatch.links]

    def __repr__(self) -> str:
        return f"<Feeds {len(self._feeds)}>"

    def statistics(self) -> FeedStatistics:
        return FeedStatistics(len(self._feeds), self._pages_worded, self.pages_delivered)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The home of all feeds' tasks."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def read(self, box: str, encoding: Encoding, place: Place, wait_ms: int = 0) -> Page:
        """What comes after a place. Raises `BoxNotFound`, and what becomes of a shard."""
        # A backlog is no reason to delay urgent appends; what has just come is delivered beside them.
        links = self._dispatch.urgent if wait_ms else self._dispatch.links
        link = links[self._dispatch.placement.shard_of(box)]
        message = await link.call(wire.OP_FOLLOW, _encode_head(encoding.asking(box, place, wait_ms)), b"")
        if message.body:
            self._pages_worded += 1
        return Page(box, place, _decode_head(message.head), message.body)

    def join(self, follower: Follower, track: Track, encoding: Encoding) -> bool | None:
        """Whether the track follows the feed from here on. False: it is behind and must read on. None: there
        is no room for a feed."""
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

    def delivered(self, box: str, page: Page, count: int) -> None:
        """A page that came live has been handed to so many watchers."""
        self.pages_delivered += count
        if page.record and page.reaches_head:
            took_s = max(0.0, time.time() - page.appended_ms / 1000)
            self.delivery_times[self._dispatch.placement.shard_of(box)].observe(took_s)

    def ended(self, feed: Feed) -> None:
        del self._feeds[(feed.box, feed.encoding)]


class Feed:
    def __init__(self, feeds: Feeds, box: str, encoding: Encoding, place: Place) -> None:
        self.box = box
        self.encoding = encoding
        self.place = place
        self.tracks: dict[Track, Follower] = {}
        self._feeds = feeds

    def __repr__(self) -> str:
        return f"<Feed {self.box} at {self.place.seq}, {len(self.tracks)} watchers>"

    def join(self, follower: Follower, track: Track) -> bool:
        here, there = self.place, track.place
        if here.is_gone and there.is_gone:
            track.place = here  # nothing is owed of a box that is gone, and both wait for the next one
        elif here != there and not (here.generation == there.generation and here.seq < there.seq):
            return False
        self.tracks[track] = follower
        return True

    async def run(self) -> None:
        pause_s = _PAUSE_S_MIN
        try:
            while True:
                try:
                    page = await self._feeds.read(self.box, self.encoding, self.place, WAIT_MS)
                except BoxNotFound:
                    await self._box_went()
                except (Busy, Uncertain) as error:
                    # The shard is away, starts again or has too much to do. The log keeps what we miss.
                    log.debug("a feed waits for its shard", box=self.box, error=error.message)
                    await trio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _PAUSE_S_MAX)
                    continue
                except StreamsError as error:
                    for track, follower in list(self.tracks.items()):
                        follower.box_failed(track, error)
                    return
                else:
                    if page.place != page.was or page.tombstone is not None:
                        self.place = page.place
                        await self._hand_out(page)
                pause_s = _PAUSE_S_MIN
                if not self.tracks:
                    return
        finally:
            self._feeds.ended(self)

    async def _hand_out(self, page: Page) -> None:
        tracks = self.tracks
        count = 0
        for track, follower in list(tracks.items()):
            if track not in tracks:  # it left while others had their turn
                continue
            if not follower.page_came(track, page):
                del tracks[track]
            count += 1
            if count % _TURN == 0:
                await trio.lowlevel.checkpoint()
        self._feeds.delivered(self.box, page, count)

    async def _box_went(self) -> None:
        """Tells once. From here on the questions wait for the box to be made again."""
        if self.place.is_gone:
            return
        self.place = self.place._replace(is_gone=True)
        for track, follower in list(self.tracks.items()):
            follower.box_went(track)
        await trio.lowlevel.checkpoint()
