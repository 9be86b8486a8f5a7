"""Changes one box's positions: which seqs exist, which are live, where the floors are. No config, no policy.

`box_positions.py` describes the positions and finds things in them.

Rules of the file
- Positions only move forward. A batch leaves when nothing in it is live.
- Work is per batch, and per segment where a whole one is concerned; only the batch that a floor cuts through
  is looked at inside.
- Older batches are sealed (`sealed.py`), newer ones are in memory whole (`tail.py`). Appliers never
  need the payload of a sealed batch; handlers may, and then raise `NotLoaded`.

Invariants (`check`)
- ORDER: batches are sorted and do not overlap; all sealed ones come before those in the tail.
- FRONT: only the first segment has let go of batches at its front: a snapshot does not name those, it says
  `earliest_seq`, which lies behind them.
- FLOORS: cap_floor, ttl_floor <= earliest_seq <= head_seq + 1; visible_seq <= head_seq.
- COUNT: `count` and `bytes` are exactly those of the live records.
- TIMES: `$ts` never falls from one batch to the next.
- SHARED: the bitmap that all logs without deleted seqs share stays empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pyroaring import BitMap64

from shard.core.boxes.box_positions import NONE_DELETED, NOTHING_LOCATED, BoxPositions
from shard.core.boxes.holes import Hole
from shard.core.boxes.sealed import SealedBatch, Segment, Span
from shard.core.boxes.tail import dead_of
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.model.records import Batch

#: Holes kept in one box. Each costs about 100 bytes, so they stay small beside what they lie between. Beyond
#: it the oldest gives its count to the one after it: a reader before both sees the same loss, a reader
#: between them sees a larger loss than it missed. Loss is never silent.
HOLES_MAX = 4096

#: Batches that one step of `settle_deletes` works out: about 5 ms.
SETTLE_BATCHES = 5_000

_NONE_DELETED_BYTES = NONE_DELETED.serialize()


class BoxLog(BoxPositions):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"<BoxLog {self.earliest_seq}..{self.visible_seq}..{self.head_seq}, {self.count} live>"

    # -- changing

    def append(self, batch: Batch) -> None:
        assert batch.first_seq > self.head_seq, "ORDER"
        assert batch.first_ts >= self.last_ts, "TIMES"
        if self.count == 0:
            self.earliest_seq = batch.first_seq
        self.tail.append(batch)
        self.head_seq = batch.last_seq
        self.last_ts = batch.last_ts
        self.count += batch.count
        self.bytes += batch.live_bytes

    def evict_before(self, seq: int, reason: str, *, cut_bytes: int, evicted_ts: int) -> int:
        """Live records below `seq` are lost. Returns how many."""
        lost_to = self.last_live_before(min(seq, self.head_seq + 1))
        if lost_to:
            self.evicted_ts = evicted_ts
            if reason == "cap":
                self.cap_floor = lost_to + 1
            else:
                self.ttl_floor = lost_to + 1
        return self._drop_before(seq, cut_bytes)

    def delete_before(self, seq: int, *, cut_bytes: int) -> int:
        """Live records below `seq` are gone because somebody asked for it. Returns how many."""
        return self._drop_before(seq, cut_bytes)

    def delete_seqs(
        self, seqs: BitMap64, sizes: Sequence[int], groups: Sequence[tuple[int, int]] = ()
    ) -> int:
        """These live records are gone; `sizes` are their bytes, a number for each batch. With `groups`, as in
        `RecordsDeleted`, the sealed ones are taken per segment. Returns how many."""
        rest, rest_sizes = seqs, sizes
        if groups:
            rest_sizes = sizes[self._delete_sealed(seqs, sizes, groups) :]
            rest = seqs.copy()
            rest.remove_range(0, self.sealed_seq + 1)
        empty_spans: list[Span] = []
        for (span, count), size in zip(self._take_located(rest), rest_sizes, strict=True):
            span.kill(count, size)
            self.bytes -= size
            if span.dead == span.count:
                empty_spans.append(span)
        self.count -= len(seqs)
        self.add_deleted(seqs)
        for span in empty_spans:
            if isinstance(span, Batch):
                at = self.tail.at(span.first_seq)
                assert at is not None
                self.tail.bury(at)
        for first, last in self.tail.compact():
            self.deleted_seqs.remove_range(first, last + 1)
        if groups or any(isinstance(span, SealedBatch) for span in empty_spans):
            self.drop_empty_segments()
        self.advance_earliest()
        return len(seqs)

    def _delete_sealed(self, seqs: BitMap64, sizes: Sequence[int], groups: Sequence[tuple[int, int]]) -> int:
        """Sealed records go, per segment. Returns how many of `sizes` were of them."""
        sizes_used = 0
        group_of_segment = iter(groups)
        for segment in self.segments:
            count = seqs.range_cardinality(segment.first_seq, segment.last_seq + 1)
            if count:
                batches, size = next(group_of_segment)
                segment.kill_later(seqs, count, sizes[sizes_used : sizes_used + batches], size)
                self.bytes -= size
                sizes_used += batches
                self._unsettled_segments.append(segment)
        assert next(group_of_segment, None) is None, "only what is live is deleted"
        return sizes_used

    @property
    def is_settled(self) -> bool:
        """True if deletes have left nothing for later."""
        return not self._unsettled_segments

    def settle_deletes(self) -> bool:
        """Works out a part of what deletes have left for later in segments. Returns True if more is left."""
        batches = SETTLE_BATCHES
        while self._unsettled_segments and batches > 0:
            batches -= self._unsettled_segments.pop().settle_deletes()
        return bool(self._unsettled_segments)

    def add_deleted(self, seqs: BitMap64 | range) -> None:
        """Notes seqs as deleted."""
        if self.deleted_seqs is NONE_DELETED:
            self.deleted_seqs = BitMap64()
        if isinstance(seqs, range):
            self.deleted_seqs.add_range(seqs.start, seqs.stop)
        else:
            self.deleted_seqs |= seqs

    def restore_deleted(self, content: bytes) -> None:
        """Takes over the deleted seqs of a snapshot."""
        is_none = content == _NONE_DELETED_BYTES
        self.deleted_seqs = NONE_DELETED if is_none else BitMap64.deserialize(content)

    def drop_empty_segments(self) -> None:
        for segment in self.segments:
            if segment.count == 0:
                self.deleted_seqs.remove_range(segment.first_seq, segment.last_seq + 1)
        self.segments = [segment for segment in self.segments if segment.count]
        self._unsettled_segments = [segment for segment in self._unsettled_segments if segment.count]

    def locate(self, seqs: BitMap64) -> list[tuple[Span, int]] | None:
        """(batch, how many of `seqs` it holds) for every batch that holds some, in order; None if one of them
        is in no batch. A `delete_seqs` of the same bitmap that follows at once does not look again."""
        array = seqs.to_array()
        batches: list[tuple[Span, int]] = []
        first = 0
        while first < len(array):
            span = self.span_at(array[first])
            if span is None:
                return None
            end = bisect_right(array, span.last_seq, first)
            batches.append((span, end - first))
            first = end
        self._last_located = seqs, batches
        return batches

    def _take_located(self, seqs: BitMap64) -> list[tuple[Span, int]]:
        (located_seqs, batches), self._last_located = self._last_located, NOTHING_LOCATED
        if located_seqs is not seqs:
            batches = self.locate(seqs) or []
            self._last_located = NOTHING_LOCATED
        return batches

    def lose(self, first_seq: int, last_seq: int, missed_count: int = 0) -> None:
        """Seqs that were handed out but may not have survived: skipped for ever, and reported to readers.
        With `missed_count`, one seq represents so many copies that never came."""
        assert first_seq == self.head_seq + 1 and last_seq >= first_seq
        assert not missed_count or last_seq == first_seq
        before = self.holes[-1] if self.holes else None
        joins = (
            before is not None
            and before.last_seq == first_seq - 1
            and not (before.missed_count or missed_count)
        )
        if before is not None and joins:
            before.last_seq = last_seq
        else:
            self._note_hole(Hole(first_seq, last_seq, missed_count))
        self.head_seq = last_seq
        self.show(last_seq, self.last_ts)
        if self.count == 0:
            self.earliest_seq = last_seq + 1

    def skip(self, missed_count: int) -> None:
        """Skips one seq, for records that a source lost before they were copied. A batch follows at once."""
        self.head_seq += 1
        self._note_hole(Hole(self.head_seq, self.head_seq, missed_count))

    def _note_hole(self, hole: Hole) -> None:
        self.holes.append(hole)
        if len(self.holes) > HOLES_MAX:
            oldest = self.holes.pop(0)
            self.holes[0].missed_count += oldest.missed_after(0)

    def show(self, seq: int, ts: int) -> None:
        """Readers may have everything up to `seq`, whose `$ts` is `ts`."""
        self.visible_seq = seq
        self.visible_ts = ts

    def _drop_before(self, seq: int, cut_bytes: int) -> int:
        seq = min(seq, self.head_seq + 1)
        if seq <= self.earliest_seq:
            return 0
        drop_count, drop_bytes = self._drop_segments_before(seq)
        count, size = self.tail.drop_before(seq)
        drop_count += count
        drop_bytes += size
        cut = self.span_at(seq - 1)
        if cut is not None and cut.last_seq >= seq:
            live = sum(last - first + 1 for first, last in self.runs(cut, 0, seq - 1 - cut.first_seq))
            cut.kill(live, cut_bytes)
            drop_count += live
            drop_bytes += cut_bytes
        self.count -= drop_count
        self.bytes -= drop_bytes
        self.earliest_seq = seq
        self.advance_earliest()
        return drop_count

    def _drop_segments_before(self, seq: int) -> tuple[int, int]:
        """Sealed batches that end below `seq` go. Returns how many live records and bytes they had."""
        whole = self._segment_from(seq)
        count = sum(segment.count for segment in self.segments[:whole])
        size = sum(segment.bytes for segment in self.segments[:whole])
        del self.segments[:whole]
        if self.segments:
            first = self.segments[0]
            count += first.count
            size += first.bytes
            first.drop_before(seq)
            count -= first.count
            size -= first.bytes
        return count, size

    def advance_earliest(self) -> None:
        """Moves `earliest_seq` onto the first live record and lets go of what lies before it."""
        empty = 0
        while empty < len(self.segments) and self.segments[empty].count == 0:
            empty += 1
        del self.segments[:empty]
        if self.segments:
            self.segments[0].settle()
        self.tail.settle()
        oldest = self.oldest
        if oldest is not None:
            seq = max(self.earliest_seq, oldest.first_seq)
            while seq in self.deleted_seqs:
                seq += 1
            self.earliest_seq = seq
        else:
            self.earliest_seq = self.head_seq + 1
        self.deleted_seqs.remove_range(0, self.earliest_seq)
        while (
            self.holes and self.holes[0].last_seq < self.earliest_seq and self._hole_is_covered(self.holes[0])
        ):
            self.holes.pop(0)

    def _hole_is_covered(self, hole: Hole) -> bool:
        """Return True if every reader that reads across the hole gets a tombstone for a larger gap anyway."""
        return self.evict_floor > hole.last_seq

    # -- sealing

    def sealable(self, *, durable_lsn: int, bytes_max: int) -> list[Batch]:
        """The oldest batches of the tail that may be sealed, so many that they fit, but one at least."""
        return self.tail.sealable(self.visible_seq, durable_lsn, bytes_max)

    def sealable_upto(self, durable_lsn: int) -> int:
        """Return the last seq, live or deleted, before the first batch that may not be sealed yet."""
        return self.tail.sealable_upto(self.visible_seq, durable_lsn)

    def render(self, at: int, batch: Batch) -> None:
        """The first of the rows at this place of the tail, which were not rendered, are this batch."""
        share = self.tail.render(at, batch)
        self.bytes += batch.live_bytes - share
        self.last_ts = max(self.last_ts, batch.last_ts)  # an old log does not say it at the commit

    def seal(self, segment: Segment) -> None:
        """Replaces the oldest batches of the tail by this segment. Records that died since are dead in it."""
        assert segment.first_seq > self.sealed_seq, "ORDER"
        batches = self.tail.take_upto(segment.last_seq)
        if len(batches) < len(segment) or any(map(dead_of, batches)):
            alive = {batch.first_seq: batch for batch in batches}
            for at, first_seq in enumerate(segment.first_seqs):
                batch = alive.get(first_seq)
                if batch is None:
                    segment.kill_whole(at)
                    self.add_deleted(range(first_seq, first_seq + segment.counts[at]))
                elif batch.dead:
                    segment.kill(at, batch.dead, batch.dead_bytes)
            segment.dead_version = 0
        self.deleted_seqs.remove_range(0, self.earliest_seq)
        if segment.count:
            self.segments.append(segment)
        self.advance_earliest()

    def replace(self, old: Sequence[int], segment: Segment) -> None:
        """Neighbouring segments, by their serials, give way to one with what was live in them."""
        first = next(at for at, each in enumerate(self.segments) if each.serial == old[0])
        old_segments = self.segments[first : first + len(old)]
        assert [each.serial for each in old_segments] == list(old), "ORDER"
        live = (sum(each.count for each in old_segments), sum(each.bytes for each in old_segments))
        assert live == (segment.count, segment.bytes), "COUNT"
        self.segments[first : first + len(old)] = [segment]
        self.deleted_seqs.remove_range(old_segments[0].first_seq, old_segments[-1].last_seq + 1)

    # -- after a snapshot

    def attach(self, segment: Segment, dead: Sequence[tuple[int, int, int]]) -> None:
        """Gives back a segment that the snapshot names, and says what is dead in it. They come in order."""
        for at, count, size in dead:
            segment.kill(at, count, size)
        if not self.segments:
            segment.drop_before(self.earliest_seq)
            segment.settle()
        segment.dead_version = 0
        self.segments.append(segment)

    def hydrate(self, batch: Batch) -> None:
        """Gives back a batch of the tail that the snapshot names. They come in any order."""
        self.tail.batches.append(batch)

    def end_hydration(self) -> None:
        """All batches are back: works out what is dead in them and compares with what the snapshot says."""
        self.tail.sort()
        count = sum(segment.count for segment in self.segments)
        size = sum(segment.bytes for segment in self.segments)
        for batch in self.tail:
            self.count_dead(batch)
            count += batch.count - batch.dead
            size += batch.live_bytes
        assert (count, size) == (self.count, self.bytes), "COUNT"
        self.records_awaited = 0

    def give_back(self, batch: Batch) -> None:
        """One batch, the next in order, of a log whose positions are those of `BoxFacts` already."""
        self.count_dead(batch)
        self.tail.append(batch)
        self.records_awaited -= batch.count - batch.dead

    def count_dead(self, batch: Batch) -> None:
        """Works out what is dead in a batch."""
        if isinstance(batch, UnrenderedRows):  # nothing is
            return
        batch.dead = -1  # not known yet: `runs` must look at the deletes
        batch.dead_bytes = 0
        runs = self.runs(batch, 0, batch.count - 1)
        batch.dead = batch.count - sum(last - first + 1 for first, last in runs)
        batch.dead_bytes = batch.live_bytes - sum(batch.size(first, last) for first, last in runs)

    # -- checking

    def check(self) -> None:
        """Asserts the invariants named above. For tests: it looks at everything."""
        assert not NONE_DELETED, "SHARED"
        if self.records_awaited:
            return
        self.tail.check()
        count = size = last = 0
        for at, segment in enumerate(self.segments):
            assert segment.count and segment.first_seq > last, "ORDER"
            assert at == 0 or segment.front == 0, "FRONT"
            segment.check()
            last = segment.last_seq
            size += segment.bytes
        for span in self.spans():
            live = [
                seq
                for seq in range(span.first_seq, span.last_seq + 1)
                if seq >= self.earliest_seq and seq not in self.deleted_seqs
            ]
            assert len(live) == span.count - span.dead, "COUNT"
            count += len(live)
            if isinstance(span, UnrenderedRows):
                assert span.first_seq > last and len(live) == span.count, "ORDER"
                last = span.last_seq
                size += span.live_bytes
            elif isinstance(span, Batch):
                assert span.first_seq > last, "ORDER"
                last = span.last_seq
                size += sum(span.size(seq - span.first_seq, seq - span.first_seq) for seq in live)
        assert (count, size) == (self.count, self.bytes), "COUNT"
        assert last <= self.head_seq, "ORDER"
        assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1, "FLOORS"
        assert self.visible_seq <= self.head_seq, "FLOORS"
        if self.count:
            assert self.is_live(self.earliest_seq), "FLOORS"
        else:
            assert self.earliest_seq == self.head_seq + 1, "FLOORS"
