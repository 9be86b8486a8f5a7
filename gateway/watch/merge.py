"""The place of one stream in each of its boxes, and which box is read next. Pure.

    Track    one box of one stream: its place, and whether it follows the live feed or reads backlog
    Merge    all tracks of one stream: turns pages into events, has the cursor, picks the next box

Rules of the file
- Only a page moves a track, and only a page that starts exactly at the track's place. So no record is missed
  and none is delivered twice, in any order of pages, deletions and reconnections.
- Turns: each box with backlog gets one page, then the next box does. A flood in one delays another by at
  most one page.

Invariants
- EXACT: a track has delivered exactly the records between its start and its place.
- TURNS: a track is either live, or dropped, or in the queue of turns once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gateway.watch import cursors
from gateway.watch.page import OTHER_GENERATION, EncodedPage, Place
from streams.protocol.messages.watch_events import BoxDeleted, CaughtUp


class MergedEvent(NamedTuple):
    name: bytes
    data: bytes
    #: The cursor of the whole stream after this event.
    id: bytes
    #: True if all streams of only this box share the text of the event. The text, including its id, is then
    #: encoded once, and `id` is empty here: `Merge.id` has it.
    is_shared: bool = False


class Track:
    __slots__ = ("at_connect", "box", "head_seq", "is_dropped", "is_live", "not_before_s", "place")

    def __init__(self, box: str, place: Place, head_seq: int = 0) -> None:
        self.box = box
        self.place = place
        #: The last known head of the box.
        self.head_seq = head_seq
        self.is_live = False
        #: True after an error that a retry does not cure: this box delivers nothing more.
        self.is_dropped = False
        #: True until the first page of this connection.
        self.at_connect = True
        #: When to read again after a shard could not answer, on the caller's clock.
        self.not_before_s = 0.0

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "live" if self.is_live else "backlog"
        return f"<Track {self.box} at {self.place.seq}, {state}>"

    def continues_with(self, page: EncodedPage) -> bool:
        return page.was == self.place

    def has_passed(self, page: EncodedPage) -> bool:
        """Return True if this track has already delivered everything in the page."""
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
        """Return the track whose backlog is read next, or None if none is due."""
        for _ in range(len(self._turns)):
            track = self._turns.popleft()
            if track.not_before_s <= now_s:
                return track
            self._turns.append(track)
        return None

    def next_due_s(self) -> float | None:
        return min((track.not_before_s for track in self._turns), default=None)

    def wait_turn(self, track: Track, not_before_s: float = 0.0) -> None:
        """Queue a track that has backlog."""
        assert track not in self._turns, "TURNS"
        track.is_live = False
        track.not_before_s = not_before_s
        self._turns.append(track)

    def go_live(self, track: Track) -> list[MergedEvent]:
        track.is_live = True
        if track.place.is_gone:
            return []
        head = CaughtUp(track.box, track.head_seq)
        return [MergedEvent(b"caught-up", msgspec.json.encode(head), self.id())]

    # -- pages

    def take(self, track: Track, page: EncodedPage) -> list[MergedEvent]:
        """Move the track over the page. Returns the events for the client."""
        assert track.continues_with(page), "EXACT"
        if page.tombstone is None and page.record and self.is_single:
            track.place, track.head_seq, track.at_connect = page.place, page.head_seq, False
            return [MergedEvent(b"record", page.record, b"", is_shared=True)]
        events: list[MergedEvent] = []
        if page.tombstone is not None:
            track.place = Place(page.start_seq, page.place.generation)
            data = page.tombstone_json(at_connect=track.at_connect)
            events.append(MergedEvent(b"tombstone", data, self.id()))
        track.place, track.head_seq, track.at_connect = page.place, page.head_seq, False
        if page.record:
            events.append(MergedEvent(b"record", page.record, self.id()))
        return events

    def note_delete(self, track: Track) -> list[MergedEvent]:
        """Note that the box was deleted. The track waits until it is created again. Returns the events."""
        if track.place.is_gone:
            return []
        track.place = track.place._replace(is_gone=True)
        track.at_connect = False
        deletion = BoxDeleted(track.box, track.head_seq, "deleted")
        return [MergedEvent(b"box-deleted", msgspec.json.encode(deletion), self.id())]

    def drop(self, track: Track) -> None:
        track.is_live = False
        track.is_dropped = True

    # -- cursors

    def id(self) -> bytes:
        return cursors.encode((box, track.place) for box, track in self.tracks.items())

    def boxes_of_other_generations(self, cursor: cursors.Cursor) -> list[str]:
        """Return the boxes whose generation in the client's cursor differs from ours."""
        return [
            box
            for box, entry in cursor.items()
            if box in self.tracks and not entry.is_of(self.tracks[box].place.generation)
        ]

    def resume(
        self, cursor: cursors.Cursor, *, may_advance: bool, generations: Mapping[str, int] | None = None
    ) -> None:
        """Move the tracks to the client's cursor. It can only rewind them, unless `may_advance`: our own
        places may then be old, and `generations` has the current ones of `boxes_of_other_generations`."""
        for box, entry in cursor.items():
            track = self.tracks.get(box)
            if track is None:
                continue
            generation = (generations or {}).get(box)
            if may_advance and generation is not None and entry.is_of(generation):
                track.place = Place(entry.seq, generation)
            elif not entry.is_of(track.place.generation):
                # The client does not know the current generation: report it again, from the start.
                track.place = track.place._replace(seq=entry.seq, generation=OTHER_GENERATION)
            elif entry.seq < track.place.seq or may_advance:
                track.place = track.place._replace(seq=entry.seq)
