"""One stream's place in each of its boxes, and whose turn it is. Pure.

    Track    one box as one stream sees it: its place, and whether it follows the live feed or its backlog
    Merge    all of them: what a page makes of the stream, the cursor of the whole, turns

Rules of the file
- A track moves by pages alone, and only by a page that starts exactly where the track is. So nothing is
  missed and nothing comes twice, whatever order pages, deletions and reconnections come in.
- Turns: each box with backlog gets one page, then the next box does. A flood in one delays another by at
  most one page.

Invariants
- EXACT: what a track has been given is what lies between where it began and where it is.
- TURNS: a track is either live, or dropped, or in the queue of turns once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import orjson

from gateway.watch import cursors
from gateway.watch.page import ANOTHER_LIFE, Page, Place


class Event(NamedTuple):
    name: bytes
    data: bytes
    #: The cursor of the whole stream after this event.
    id: bytes
    #: Every reader who watches this box alone words the event the same way, so its text, id included, is made
    #: once and `id` is left out here: `Merge.id` has it.
    is_shared: bool = False


class Track:
    __slots__ = ("at_connect", "box", "head_seq", "is_dropped", "is_live", "not_before_s", "place")

    def __init__(self, box: str, place: Place, head_seq: int = 0) -> None:
        self.box = box
        self.place = place
        #: As far as we have heard.
        self.head_seq = head_seq
        self.is_live = False
        #: Nothing more comes of this box: an error that asking again does not cure.
        self.is_dropped = False
        #: No page has come yet on this connection.
        self.at_connect = True
        #: When to ask the shard again that could not answer. The clock is the caller's.
        self.not_before_s = 0.0

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "live" if self.is_live else "backlog"
        return f"<Track {self.box} at {self.place.seq}, {state}>"

    def continues_with(self, page: Page) -> bool:
        return page.was == self.place

    def has_passed(self, page: Page) -> bool:
        """Whether this track has had everything in the page already."""
        return page.place.generation == self.place.generation and page.place.seq <= self.place.seq


class Merge:
    def __init__(self, tracks: Iterable[Track]) -> None:
        self.tracks = {track.box: track for track in tracks}
        self._turns = deque(self.tracks.values())
        self.is_single = len(self.tracks) == 1

    def __repr__(self) -> str:
        live = sum(track.is_live for track in self.tracks.values())
        return f"<Merge {live} live, {len(self._turns)} behind>"

    # -- turns

    def next_turn(self, now_s: float) -> Track | None:
        """The box whose backlog is next, if one is due."""
        for _ in range(len(self._turns)):
            track = self._turns.popleft()
            if track.not_before_s <= now_s:
                return track
            self._turns.append(track)
        return None

    def next_due_s(self) -> float | None:
        return min((track.not_before_s for track in self._turns), default=None)

    def wait_turn(self, track: Track, not_before_s: float = 0.0) -> None:
        """The track has backlog: it reads when its turn comes."""
        assert track not in self._turns, "TURNS"
        track.is_live = False
        track.not_before_s = not_before_s
        self._turns.append(track)

    def go_live(self, track: Track) -> list[Event]:
        track.is_live = True
        if track.place.is_gone:
            return []
        head = orjson.dumps({"box": track.box, "head_seq": track.head_seq})
        return [Event(b"caught-up", head, self.id())]

    # -- what comes

    def take(self, track: Track, page: Page) -> list[Event]:
        """Moves the track over the page; what the reader is told of it."""
        assert track.continues_with(page), "EXACT"
        if page.tombstone is None and page.record and self.is_single:
            track.place, track.head_seq, track.at_connect = page.place, page.head_seq, False
            return [Event(b"record", page.record, b"", is_shared=True)]
        events: list[Event] = []
        if page.tombstone is not None:
            track.place = Place(page.start_seq, page.place.generation)
            data = page.tombstone_json(at_connect=track.at_connect)
            events.append(Event(b"tombstone", data, self.id()))
        track.place, track.head_seq, track.at_connect = page.place, page.head_seq, False
        if page.record:
            events.append(Event(b"record", page.record, self.id()))
        return events

    def box_gone(self, track: Track) -> list[Event]:
        """The box was deleted. The track waits for its next life, if there is to be one."""
        if track.place.is_gone:
            return []
        track.place = track.place._replace(is_gone=True)
        track.at_connect = False
        told = {"box": track.box, "head_seq": track.head_seq, "reason": "deleted"}
        return [Event(b"box-deleted", orjson.dumps(told), self.id())]

    def drop(self, track: Track) -> None:
        track.is_live = False
        track.is_dropped = True

    # -- cursors

    def id(self) -> bytes:
        return cursors.encode((box, track.place) for box, track in self.tracks.items())

    def strangers(self, told: cursors.Cursor) -> list[str]:
        """Boxes of which the client speaks in another life than we do."""
        return [
            box
            for box, its in told.items()
            if box in self.tracks and not its.is_of(self.tracks[box].place.generation)
        ]

    def resume(
        self, told: cursors.Cursor, *, may_advance: bool, lives: Mapping[str, int] | None = None
    ) -> None:
        """What the client says it has had. It can only rewind us, unless we do not know how far we got: then
        `lives` has the generations that the `strangers` are in now."""
        for box, its in told.items():
            track = self.tracks.get(box)
            if track is None:
                continue
            life = (lives or {}).get(box)
            if may_advance and life is not None and its.is_of(life):
                track.place = Place(its.seq, life)
            elif not its.is_of(track.place.generation):
                # It has not heard of the life that the box is in now: it is told again, from the start.
                track.place = track.place._replace(seq=its.seq, generation=ANOTHER_LIFE)
            elif its.seq < track.place.seq or may_advance:
                track.place = track.place._replace(seq=its.seq)
