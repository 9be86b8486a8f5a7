"""The positions of one box, and read-only functions on them: find a batch, measure sizes, compute a floor.

        evict_floor          earliest_seq                 visible_seq      head_seq
             ▼                    ▼                            ▼               ▼
   · · lost ·|· deleted/lost · · ·|■■■■■■□■■■□□■■■■■■■■■■■■■■■■|▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒|
                                   ■ live   □ deleted            ▒ staged, not yet for readers

- `earliest_seq` is the first live seq, `head_seq + 1` when there is none. It moves on every kind of loss.
- `evict_floor` is one past the last *live* record lost to a cap or to the TTL. Loss below it is
  reported. It is kept as two floors, one for each reason, so that a gap can say exactly why it is there.
- A hole is a run of seqs without records, reported to every reader that reads across it: records that a crash
  took from a disk box, or one seq for all records that a router's source lost before they were copied.

`box_log.py` changes the positions and has their invariants. A function here needs the payload of a sealed
batch only to measure records inside it; if the payload is not in memory, it raises `NotLoaded`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

from pyroaring import BitMap64

from shard.core.boxes.holes import Hole
from shard.core.boxes.sealed import Segment, Span
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.boxes.tail import UnsealedTail

_NO_SIZES = SizedSeqs.of({})

#: The deleted seqs of a log that has none: shared, because an empty bitmap takes 270 bytes. Only
#: `BoxLog.add_deleted` adds to `BoxLog.deleted_seqs`, and never to this one.
NONE_DELETED = BitMap64()

NOTHING_LOCATED: tuple[BitMap64, list[tuple[Span, int]]] = NONE_DELETED, []


class BoxPositions:
    __slots__ = (
        "_last_located",
        "_unsettled_segments",
        "bytes",
        "cap_floor",
        "count",
        "deleted_seqs",
        "earliest_seq",
        "evicted_ts",
        "head_seq",
        "holes",
        "last_ts",
        "records_awaited",
        "segments",
        "tail",
        "ttl_floor",
        "visible_seq",
        "visible_ts",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset to the state of a new box."""
        #: Segments that have live records, oldest first.
        self.segments: list[Segment] = []
        self.tail = UnsealedTail()
        self.head_seq = 0
        self.visible_seq = 0
        self.earliest_seq = 1
        self.cap_floor = 0
        self.ttl_floor = 0
        #: Deleted seqs at or above `earliest_seq`. Below it there are no records.
        self.deleted_seqs = NONE_DELETED
        self.holes: list[Hole] = []
        self.count = 0
        self.bytes = 0
        self.last_ts = 0
        #: `$ts` of the newest record that is or was visible.
        self.visible_ts = 0
        #: `$ts` of the newest record that a cap or the TTL evicted.
        self.evicted_ts = 0
        #: During recovery: live records that are counted in `count` and whose batches are not restored yet.
        self.records_awaited = 0
        #: Segments with deletes that are not counted yet (`Segment.kill_later`). Some may no longer exist.
        self._unsettled_segments: list[Segment] = []
        #: The last result of `locate`. Valid until the next change.
        self._last_located = NOTHING_LOCATED

    # -- finding

    @property
    def evict_floor(self) -> int:
        return max(self.cap_floor, self.ttl_floor)

    @property
    def oldest(self) -> Span | None:
        """The batch of the first live record."""
        if self.segments:
            return self.segments[0].batch(self.segments[0].front)
        return self.tail.oldest

    @property
    def sealed_seq(self) -> int:
        """The last seq that is in a segment; 0 if there is no segment."""
        return self.segments[-1].last_seq if self.segments else 0

    def spans(self, from_seq: int = 0) -> Iterator[Span]:
        """Yield the batches that may have live records at or above `from_seq`, in order."""
        if self.segments and from_seq <= self.segments[-1].last_seq:
            for segment in islice(self.segments, self._segment_from(from_seq), None):
                for at in range(segment.from_seq(from_seq), len(segment)):
                    yield segment.batch(at)
        batches = self.tail.batches
        for at in range(self.tail.from_seq(from_seq), len(batches)):
            yield batches[at]

    def spans_back(self, seq: int) -> Iterator[Span]:
        """Yield the batches that begin below `seq` and have live records, the last one first."""
        for at in range(min(self.tail.from_seq(seq), len(self.tail) - 1), self.tail.front - 1, -1):
            batch = self.tail.batches[at]
            if batch.first_seq < seq and batch.dead < batch.count:
                yield batch
        for segment in reversed(self.segments):
            for at in range(min(segment.from_seq(seq), len(segment) - 1), segment.front - 1, -1):
                if segment.first_seqs[at] < seq and segment.dead(at) < segment.counts[at]:
                    yield segment.batch(at)

    def span_at(self, seq: int) -> Span | None:
        """Return the batch that contains `seq`; None if there is none."""
        if self.segments and seq <= self.segments[-1].last_seq:
            segment = self.segments[self._segment_from(seq)]
            at = segment.at(seq)
            return None if at is None else segment.batch(at)
        at = self.tail.at(seq)
        return None if at is None else self.tail.batches[at]

    def _segment_from(self, seq: int) -> int:
        """Return the index of the first segment that ends at or after `seq`."""
        return bisect_left(self.segments, seq, key=_last_seq)

    # -- measuring

    def is_live(self, seq: int) -> bool:
        return (
            self.earliest_seq <= seq <= self.head_seq
            and seq not in self.deleted_seqs
            and self.span_at(seq) is not None
        )

    def ts_of(self, seq: int) -> int:
        span = self.span_at(seq)
        assert span is not None
        return span.ts(seq - span.first_seq)

    def first_seq_at(self, ts: int) -> int:
        """Return the first seq whose `$ts` is at least `ts`; `head_seq + 1` if there is none."""
        if self.segments and ts <= self.segments[-1].last_ts:
            segment = self.segments[bisect_left(self.segments, ts, key=_last_ts)]
            batch_of_segment = segment.batch(segment.from_ts(ts))
            return batch_of_segment.first_seq + batch_of_segment.index_from_ts(ts)
        at = self.tail.from_ts(ts)
        if at == len(self.tail):
            return self.head_seq + 1
        batch = self.tail.batches[at]
        return batch.first_seq + batch.index_from_ts(ts)

    def live_of(self, seqs: BitMap64) -> BitMap64:
        """Return the seqs of live records among `seqs`."""
        live = seqs - self.deleted_seqs
        live.remove_range(0, self.earliest_seq)
        candidates = live.to_array()
        at = 0
        while at < len(candidates):
            seq = candidates[at]
            span = next(self.spans(seq), None)
            if span is None:
                live.remove_range(seq, candidates[-1] + 1)
                break
            if span.first_seq > seq:  # between two batches: there are no records any more
                live.remove_range(seq, span.first_seq)
                at = bisect_left(candidates, span.first_seq, at)
            else:
                at = bisect_right(candidates, span.last_seq, at)
        return live

    def measure_before(self, seq: int, *, above: int = 0) -> int:
        """Return the size of some live records: those from `above` up to `seq` (exclusive) in the batch that
        `seq` divides. 0 if `seq` divides no batch."""
        span = self.span_at(seq - 1)
        if span is None or span.last_seq < seq:
            return 0
        runs = self.runs(span, max(0, above - span.first_seq), seq - 1 - span.first_seq)
        return sum(span.size(first, last) for first, last in runs)

    def measure_seqs(self, seqs: BitMap64, sized_seqs: SizedSeqs = _NO_SIZES) -> list[int]:
        """Return the total size of these live records for each batch that has some of them. `sized_seqs` may
        have the sizes of sealed records; for all others the payload is needed."""
        array = seqs.to_array()
        return [sized_seqs.total(array, first, end, span) for span, first, end in self._stretches(array)]

    def _stretches(self, seqs: array[int]) -> Iterator[tuple[Span, int, int]]:
        """Yield (batch, first, end) for every batch that has the records `seqs[first:end]`. All must be
        live."""
        first = 0
        while first < len(seqs):
            span = self.span_at(seqs[first])
            assert span is not None, "only what is live is deleted"
            end = bisect_right(seqs, span.last_seq, first)
            yield span, first, end
            first = end

    def newest_ts_before(self, seq: int) -> int:
        """Return the `$ts` of the last live record below `seq`; 0 if there is none."""
        last = self.last_live_before(min(seq, self.head_seq + 1))
        return self.ts_of(last) if last else 0

    def visible_totals(self) -> tuple[int, int]:
        """Return count and size of the visible live records. All sealed records are visible."""
        count, size = self.count, self.bytes
        for at in range(len(self.tail) - 1, self.tail.front - 1, -1):
            batch = self.tail.batches[at]
            if batch.first_seq <= self.visible_seq:
                break
            count -= batch.count - batch.dead
            size -= batch.live_bytes
        return count, size

    def live_before(self, seq: int) -> tuple[int, int]:
        """Return count and size of the live records below `seq`."""
        whole = self._segment_from(seq)
        count = sum(segment.count for segment in self.segments[:whole])
        size = sum(segment.bytes for segment in self.segments[:whole])
        for span in self.spans(self.segments[whole - 1].last_seq + 1 if whole else 0):
            if span.first_seq >= seq:
                break
            if span.last_seq < seq:
                count += span.count - span.dead
                size += span.live_bytes
                continue
            for first, last in self.runs(span, 0, seq - 1 - span.first_seq):
                count += last - first + 1
                size += span.size(first, last)
        return count, size

    def floor_for_caps(
        self, records_max: int, bytes_max: int, *, extra: int = 0, extra_bytes: int = 0, above: int = 0
    ) -> int:
        """Return the seq below which records must be evicted so that the rest fits; 0 if everything fits.

        A maximum of 0 means no limit. `extra` records are about to be added. Records below `above` are about
        to be trimmed and count as trimmed already (the caller has subtracted them from `extra`).
        """
        excess = self.count + extra - records_max if records_max else 0
        excess_bytes = self.bytes + extra_bytes - bytes_max if bytes_max else 0
        if excess <= 0 and excess_bytes <= 0:
            return 0
        start = above
        for segment in self.segments:  # segments that are evicted as a whole
            if above > segment.first_seq or (excess <= segment.count and excess_bytes <= segment.bytes):
                break
            excess -= segment.count
            excess_bytes -= segment.bytes
            start = segment.last_seq + 1
        for span in self.spans(start):
            if above <= span.first_seq:
                live, live_bytes = span.count - span.dead, span.live_bytes
                if excess > live or excess_bytes > live_bytes:
                    excess -= live
                    excess_bytes -= live_bytes
                    continue
            for first, last in self.runs(span, max(0, above - span.first_seq), span.count - 1):
                live, live_bytes = last - first + 1, span.size(first, last)
                if excess >= live or excess_bytes >= live_bytes:
                    excess -= live
                    excess_bytes -= live_bytes
                    if excess <= 0 and excess_bytes <= 0:
                        return span.first_seq + last + 1
                    continue
                cut = first + max(excess, 0)
                if excess_bytes > 0:
                    cut = max(cut, span.index_from_size(first, excess_bytes) + 1)
                return span.first_seq + cut
        return self.head_seq + 1

    def last_live_before(self, seq: int) -> int:
        """Return the last live seq below `seq`; 0 if there is none."""
        for span in self.spans_back(seq):
            candidate = min(span.last_seq, seq - 1)
            low = max(span.first_seq, self.earliest_seq)
            while candidate >= low and candidate in self.deleted_seqs:
                candidate -= 1
            if candidate >= low:
                return candidate
        return 0

    def gap_reason(self, gap_from: int) -> str:
        by_cap = gap_from < self.cap_floor
        by_ttl = gap_from < self.ttl_floor
        return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"

    def hole_after(self, seq: int) -> Hole | None:
        """Return the first hole that a reader with cursor `seq` has not passed; None if there is none."""
        at = bisect_right(self.holes, seq, key=lambda hole: hole.last_seq)
        return self.holes[at] if at < len(self.holes) else None

    def hole_before(self, seq: int) -> Hole | None:
        """Return the hole directly before `seq`, with no batch in between; None if there is none."""
        for hole in reversed(self.holes):
            if hole.last_seq < seq:
                span = next(self.spans(hole.last_seq + 1), None)
                return hole if span is None or span.first_seq >= seq else None
        return None

    def runs(self, batch: Span, first: int, last: int) -> list[tuple[int, int]]:
        """Return the runs of live records among records first..last (indexes) of a batch, as index pairs."""
        base = batch.first_seq
        first = max(first, self.earliest_seq - base)
        if first > last:
            return []
        if batch.dead == 0 or self.deleted_seqs.range_cardinality(base + first, base + last + 1) == 0:
            return [(first, last)]
        runs: list[tuple[int, int]] = []
        start = first
        for seq in self.deleted_in(base + first, base + last + 1):
            index = seq - base
            if index > start:
                runs.append((start, index - 1))
            start = index + 1
        if start <= last:
            runs.append((start, last))
        return runs

    def deleted_in(self, low: int, high: int) -> Iterator[int]:
        """Yield the deleted seqs in [low, high)."""
        return _between(self.deleted_seqs, low, high)


def _between(seqs: BitMap64, low: int, high: int) -> Iterator[int]:
    for seq in seqs.iter_equal_or_larger(low):
        if seq >= high:
            return
        yield seq


def _last_seq(segment: Segment) -> int:
    return segment.last_seq


def _last_ts(segment: Segment) -> int:
    return segment.last_ts
