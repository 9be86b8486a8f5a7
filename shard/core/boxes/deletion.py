"""A delete by tag: finds what matches in bounded steps, then deletes all of it in one change.

    step ─► step ─► … ─► change ─► step ─► … ─► answer
    └ search segments ┘     │      └ work out what the change means for each batch
      and the tail          └ applied per segment, not per record (`Segment.kill_later`)

The steps before the change only look, and those behind it change nothing that a reader sees. So readers, and
a crash, see all of the delete or nothing.

It deletes what matched when it began: seqs below `end_seq`. Meanwhile others may delete, evict, seal or
rewrite. So what was found in a segment counts only while nothing has died there (`Segment.touched`);
otherwise the segment is searched again, after all that were never searched. The last search and the change
are made in one step. So a segment that changes all the time cannot put the change off for ever.

Bounds: a match takes about two bytes (a bitmap) and a batch with a match eight, which is less than the box
keeps in memory for its batches (32 bytes each). Tag indexes are looked up for `LOOKUP_RECORDS` at a time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import Segment, Span, TagsNotLoaded
from shard.core.boxes.tags import Tags
from streams.protocol.messages.commands import Match

#: Records of the segments whose tag indexes are looked up at a time: 2 MB if all of them match.
LOOKUP_RECORDS = 200_000
#: Batches and records with a match that one step takes from segments, and unsealed records: 5 to 10 ms each.
STEP_BATCHES, STEP_RECORDS, STEP_UNSEALED = 5_000, 50_000, 20_000


class _TagLookups(Protocol):
    tag_lookups: dict[tuple[int, Match], tuple[Sequence[int], Sequence[int]]]


class SearchedBox(Protocol):
    """The part of a box that a deletion by tag uses."""

    generation: int
    log: BoxLog
    tags: Tags

    @property
    def volatile(self) -> _TagLookups: ...


class _Matches(NamedTuple):
    """The matching records of a segment. Valid while `dead_version` is that of the segment."""

    dead_version: int
    seqs: BitMap64
    #: Bytes of `seqs` in each batch that holds some of them, in order, and of all.
    sizes: array[int]
    bytes: int


class Deletion:
    __slots__ = (
        "_matches",
        "_position",
        "_sizes",
        "_tags",
        "_to_measure",
        "_unsealed_seqs",
        "command",
        "deleted_count",
        "end_seq",
        "match",
    )

    def __init__(self, command: object, match: Match, head_seq: int, before_seq: int | None) -> None:
        self.command = command
        self.match = match
        #: Nothing is deleted from here on.
        self.end_seq = head_seq + 1 if before_seq is None else min(head_seq + 1, before_seq)
        #: How many records the change has deleted; None while there was no change.
        self.deleted_count: int | None = None
        #: By serial.
        self._matches: dict[int, _Matches] = {}
        self._unsealed_seqs = BitMap64()
        #: Those of them that are yet to be measured, the last first; and by the first seq of its batch: how
        #: many were dead there, how many match, and the bytes of those.
        self._to_measure = array("Q")
        self._sizes: dict[int, tuple[int, int, int]] = {}
        #: The tag index of the tail that is being searched, and the next tag with the next of its seqs. None
        #: when the whole tail was searched.
        self._tags: Tags | None = None
        self._position: tuple[str, int] | None = (match.text, 0)

    def __repr__(self) -> str:
        return f"<Deletion {self.match}, {len(self._matches)} segments searched>"

    def step(self, box: SearchedBox, now_ms: int) -> changes.RecordsDeleted | None:
        """Searches for matching records. Returns the change when the search is complete, None before."""
        segments = [segment for segment in box.log.segments if segment.first_seq < self.end_seq]
        pending = [segment for segment in segments if not self._is_known(segment)]
        pending.sort(key=lambda segment: segment.serial in self._matches)
        if pending and not self._search_sealed(box, pending):
            return None
        if self._position is not None and not self._search_unsealed(box):
            return None
        if self._to_measure and not self._measure_unsealed(box):
            return None
        return self._plan(box, segments, now_ms)

    def _is_known(self, segment: Segment) -> bool:
        matches = self._matches.get(segment.serial)
        return matches is not None and matches.dead_version == segment.dead_version

    # -- segments

    def _search_sealed(self, box: SearchedBox, segments: Sequence[Segment]) -> bool:
        """Searches some segments, one at least. Returns True if that was all of them."""
        some: list[Segment] = []
        records = 0
        for segment in segments:
            records += segment.total_count
            if some and records > LOOKUP_RECORDS:
                break
            some.append(segment)
        missing = [each for each in some if (each.serial, self.match) not in box.volatile.tag_lookups]
        if missing:
            raise TagsNotLoaded(missing, self.match)
        batches = matches = 0
        for at, segment in enumerate(some):
            if batches >= STEP_BATCHES or matches >= STEP_RECORDS:
                return at == len(segments)
            result = self._search(box, segment)
            self._matches[segment.serial] = result
            batches += len(result.sizes)
            matches += len(result.seqs)
        return len(some) == len(segments)

    def _search(self, box: SearchedBox, segment: Segment) -> _Matches:
        seqs, sizes = box.volatile.tag_lookups.pop((segment.serial, self.match))
        live = self._filter_live(BitMap64(seqs), box)
        if not live:
            return _Matches(segment.dead_version, live, array("Q"), 0)
        if len(live) < len(seqs):
            sizes = [size for seq, size in zip(seqs, sizes, strict=True) if seq in live]
        live_seqs = live.to_array()
        by_batch = array("Q")
        first = at = 0
        while first < len(live_seqs):
            at = bisect_right(segment.first_seqs, live_seqs[first], at) - 1
            end = bisect_left(live_seqs, segment.first_seqs[at] + segment.counts[at], first)
            by_batch.append(sum(sizes[first:end]))
            first = end
        return _Matches(segment.dead_version, live, by_batch, sum(sizes))

    def _filter_live(self, seqs: BitMap64, box: SearchedBox) -> BitMap64:
        """Those of the seqs that are not deleted, as far as the floor and the bitmap of deletes say."""
        live = seqs - box.log.deleted_seqs
        live.remove_range(0, box.log.earliest_seq)
        if live and live.max() >= self.end_seq:
            live.remove_range(self.end_seq, live.max() + 1)
        return live

    # -- the tail

    def _search_unsealed(self, box: SearchedBox) -> bool:
        """Searches a part of the tail. Returns True if that was the rest. Batches that are sealed meanwhile
        are found in their segment."""
        if box.tags.is_stale(box.log.count):
            box.tags = Tags()
        tags, tail = box.tags, box.log.tail
        if tags is not self._tags:
            self._tags, self._position = tags, (self.match.text, 0)
        records_left = STEP_UNSEALED
        at = tail.from_seq(tags.upto_seq + 1)
        while at < len(tail) and records_left > 0:
            records_left -= tail.batches[at].count
            tags.take_in((tail.batches[at],))
            at += 1
        if at < len(tail):
            return False
        assert self._position is not None
        seqs, self._position = tags.find_some(self.match, self._position, STEP_RECORDS)
        self._unsealed_seqs |= seqs
        if self._position is None:
            self._to_measure = self._filter_live(self._unsealed_seqs, box).to_array()
            self._to_measure.reverse()
        return self._position is None

    def _measure_unsealed(self, box: SearchedBox) -> bool:
        """Measures a part of what was found in the tail. Returns True if that was the rest."""
        some = self._to_measure[-STEP_UNSEALED:]
        del self._to_measure[-STEP_UNSEALED:]
        for span, seqs in self._in_tail(box, BitMap64(some)):
            base = span.first_seq
            size = sum(span.size(seq - base, seq - base) for seq in seqs)
            before = self._sizes.get(base)
            if before is not None and before[0] == span.dead:  # the last step has ended within this batch
                self._sizes[base] = (span.dead, before[1] + len(seqs), before[2] + size)
            else:
                self._sizes[base] = (span.dead, len(seqs), size)
        return not self._to_measure

    def _in_tail(self, box: SearchedBox, seqs: BitMap64) -> Iterator[tuple[Span, array[int]]]:
        """Batches of the tail that hold some of the seqs, and those that they hold."""
        log = box.log
        live_seqs = self._filter_live(seqs, box).to_array()
        first = bisect_right(live_seqs, log.sealed_seq)
        while first < len(live_seqs):
            span = log.span_at(live_seqs[first])
            if span is None:  # what was there is long gone
                first += 1
                continue
            end = bisect_right(live_seqs, span.last_seq, first)
            yield span, live_seqs[first:end]
            first = end

    # -- the change

    def _plan(self, box: SearchedBox, segments: Sequence[Segment], now_ms: int) -> changes.RecordsDeleted:
        """The deletion of everything that was found and is live."""
        seqs = BitMap64()
        tail_sizes: list[int] = []
        for span, some in self._in_tail(box, self._unsealed_seqs):
            seqs.update(some)
            dead, count, size = self._sizes.get(span.first_seq, (-1, 0, 0))
            if (dead, count) != (span.dead, len(some)):  # something has died there
                base = span.first_seq
                size = sum(span.size(seq - base, seq - base) for seq in some)
            tail_sizes.append(size)
        sizes = array("Q")
        groups: list[tuple[int, int]] = []
        for segment in segments:
            matches = self._matches[segment.serial]
            if matches.seqs:
                seqs |= matches.seqs
                sizes += matches.sizes
                groups.append((len(matches.sizes), matches.bytes))
        sizes.extend(tail_sizes)
        return changes.RecordsDeleted(box.generation, 0, 0, seqs, sizes, now_ms, groups)
