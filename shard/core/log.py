"""One box's positions: which seqs exist, which are live, where the floors are. No config, no policy.

        evict_floor          earliest_seq                 visible_seq      head_seq
             ▼                    ▼                            ▼               ▼
   · · lost ·|· deleted/lost · · ·|■■■■■■□■■■□□■■■■■■■■■■■■■■■■|▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒|
                                   ■ live   □ deleted            ▒ staged, not yet for readers

- `earliest_seq` is the first live seq, `head_seq + 1` when there is none. It moves on every kind of loss.
- `evict_floor` is one past the last *live* record lost to a cap or to the TTL. Below it, loss is told.
  It is kept as two floors, one for each reason, so that a gap can say exactly why it is there.
- A hole is a run of seqs that a machine crash took from a disk box: told to whoever reads across it.

Rules of the file
- Positions only move forward. A batch leaves when nothing in it is live.
- Work is per batch; only the batch that a floor cuts through is looked at inside.

Invariants (`check`)
- ORDER: batches are sorted and do not overlap; one that is entirely dead holds no payload.
- FLOORS: cap_floor, ttl_floor <= earliest_seq <= head_seq + 1; visible_seq <= head_seq.
- COUNT: `count` and `bytes` are exactly those of the live records.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from pyroaring import BitMap64

from streams.protocol.records import Batch

_COMPACT_AT = 1024
_NO_ENCODING = 0


class Hole:
    """Seqs that may have been lost: first_seq..last_seq were never logged as far as we know."""

    __slots__ = ("first_seq", "last_seq")

    def __init__(self, first_seq: int, last_seq: int) -> None:
        self.first_seq = first_seq
        self.last_seq = last_seq

    def __repr__(self) -> str:
        return f"<Hole {self.first_seq}..{self.last_seq}>"


class Log:
    __slots__ = (
        "_firsts",
        "_front",
        "_husks",
        "batches",
        "bytes",
        "cap_floor",
        "count",
        "deleted",
        "earliest_seq",
        "evicted_ts",
        "head_seq",
        "holes",
        "last_ts",
        "ttl_floor",
        "visible_seq",
        "visible_ts",
    )

    def __init__(self) -> None:
        #: Live batches are `batches[_front:]`; the front is cut off in bulk, not one by one.
        self.batches: list[Batch] = []
        self._firsts: array[int] = array("Q")
        self._front = 0
        #: Batches in the middle whose records are all deleted: their place is kept, their payload is not.
        self._husks = 0
        self.head_seq = 0
        self.visible_seq = 0
        self.earliest_seq = 1
        self.cap_floor = 0
        self.ttl_floor = 0
        #: Deleted seqs at or above `earliest_seq`. Below it everything is gone anyway.
        self.deleted = BitMap64()
        self.holes: list[Hole] = []
        self.count = 0
        self.bytes = 0
        self.last_ts = 0
        #: `$ts` of the newest record that readers may have, or might have had.
        self.visible_ts = 0
        #: `$ts` of the newest record that a cap or the TTL took.
        self.evicted_ts = 0

    def __repr__(self) -> str:
        return f"<Log {self.earliest_seq}..{self.visible_seq}..{self.head_seq}, {self.count} live>"

    @property
    def evict_floor(self) -> int:
        return max(self.cap_floor, self.ttl_floor)

    @property
    def front(self) -> int:
        """Where the live batches begin in `batches`."""
        return self._front

    @property
    def oldest(self) -> Batch | None:
        return self.batches[self._front] if self._front < len(self.batches) else None

    def live_batches(self) -> Iterator[Batch]:
        for at in range(self._front, len(self.batches)):
            yield self.batches[at]

    def batches_after(self, seq: int) -> Iterator[Batch]:
        """Live batches that hold something above `seq`."""
        for at in range(self.batch_from(seq + 1), len(self.batches)):
            yield self.batches[at]

    # -- changing

    def append(self, batch: Batch) -> None:
        assert batch.first_seq > self.head_seq, "ORDER"
        assert batch.first_ts >= self.last_ts, "TIMES"
        if self.count == 0:
            self.earliest_seq = batch.first_seq
        self.batches.append(batch)
        self._firsts.append(batch.first_seq)
        self.head_seq = batch.last_seq
        self.last_ts = batch.last_ts
        self.count += batch.count
        self.bytes += batch.live_bytes

    def evict_before(self, seq: int, reason: str, *, cut_bytes: int, evicted_ts: int) -> int:
        """Live records below `seq` are lost. Returns how many."""
        lost_to = self._last_live_before(min(seq, self.head_seq + 1))
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

    def delete_seqs(self, seqs: BitMap64, sizes: Sequence[int]) -> int:
        """These live records are gone; `sizes` are their bytes, a number for each batch. Returns how many."""
        touched = list(self._by_batch(seqs))
        for (at, count), size in zip(touched, sizes, strict=True):
            batch = self.batches[at]
            batch.dead += count
            batch.dead_bytes += size
            self.bytes -= size
        self.count -= len(seqs)
        self.deleted |= seqs
        for at, _ in touched:
            if self.batches[at].dead == self.batches[at].count:
                self._bury(at)
        self._compact()
        self._settle()
        return len(seqs)

    def _by_batch(self, seqs: BitMap64) -> Iterator[tuple[int, int]]:
        """(where a batch is, how many of `seqs` it holds) for every batch that holds some, in order."""
        last_seq = -1
        for seq in seqs:
            if seq > last_seq:
                at = self.batch_at(seq)
                assert at is not None, "only what is live is deleted"
                last_seq = self.batches[at].last_seq
                yield at, seqs.range_cardinality(seq, last_seq + 1)

    def lose(self, first_seq: int, last_seq: int) -> None:
        """Seqs that were handed out but may not have survived: skipped for ever, and told."""
        assert first_seq == self.head_seq + 1 and last_seq >= first_seq
        if self.holes and self.holes[-1].last_seq == first_seq - 1:
            self.holes[-1].last_seq = last_seq
        else:
            self.holes.append(Hole(first_seq, last_seq))
        self.head_seq = last_seq
        self.show(last_seq, self.last_ts)
        if self.count == 0:
            self.earliest_seq = last_seq + 1

    def show(self, seq: int, ts: int) -> None:
        """Readers may have everything up to `seq`, whose `$ts` is `ts`."""
        self.visible_seq = seq
        self.visible_ts = ts

    def _drop_before(self, seq: int, cut_bytes: int) -> int:
        seq = min(seq, self.head_seq + 1)
        if seq <= self.earliest_seq:
            return 0
        dropped = 0
        dropped_bytes = 0
        front = self._front
        while front < len(self.batches):
            batch = self.batches[front]
            if batch.last_seq >= seq:
                break
            dropped += batch.count - batch.dead
            dropped_bytes += batch.live_bytes
            if batch.encoding == _NO_ENCODING:
                self._husks -= 1
            front += 1
        self._front = front
        if front < len(self.batches) and self.batches[front].first_seq < seq:
            batch = self.batches[front]
            live = sum(last - first + 1 for first, last in self.runs(batch, 0, seq - 1 - batch.first_seq))
            batch.dead += live
            batch.dead_bytes += cut_bytes
            dropped += live
            dropped_bytes += cut_bytes
        self.count -= dropped
        self.bytes -= dropped_bytes
        self.earliest_seq = seq
        self._settle()
        return dropped

    def _bury(self, at: int) -> None:
        """Lets go of the payload of a batch that has nothing live left; its place is cut out later."""
        batch = self.batches[at]
        husk = _husk(batch.first_seq, batch.count, batch.last_ts)
        self.batches[at] = husk
        self._husks += 1

    def _compact(self) -> None:
        """Cuts out the places of buried batches when they are many."""
        if self._husks < _COMPACT_AT or self._husks * 2 < len(self.batches) - self._front:
            return
        kept = [b for b in self.live_batches() if b.dead < b.count]
        for gone in self.live_batches():
            if gone.dead == gone.count:
                self.deleted.remove_range(gone.first_seq, gone.last_seq + 1)
        self.batches = kept
        self._firsts = array("Q", [b.first_seq for b in kept])
        self._front = self._husks = 0

    def _settle(self) -> None:
        """Moves `earliest_seq` onto the first live record and lets go of what lies before it."""
        while (
            self._front < len(self.batches)
            and self.batches[self._front].dead == self.batches[self._front].count
        ):
            if self.batches[self._front].encoding == _NO_ENCODING:
                self._husks -= 1
            self._front += 1
        if self._front < len(self.batches):
            seq = max(self.earliest_seq, self.batches[self._front].first_seq)
            while seq in self.deleted:
                seq += 1
            self.earliest_seq = seq
        else:
            self.earliest_seq = self.head_seq + 1
        self.deleted.remove_range(0, self.earliest_seq)
        if self._front >= _COMPACT_AT and self._front * 2 >= len(self.batches):
            del self.batches[: self._front]
            del self._firsts[: self._front]
            self._front = 0
        else:
            # The list keeps its slots until it is cut, but not the payloads.
            for at in range(self._front - 1, -1, -1):
                if self.batches[at] is _GONE:
                    break
                self.batches[at] = _GONE
        while (
            self.holes and self.holes[0].last_seq < self.earliest_seq and self._hole_is_covered(self.holes[0])
        ):
            self.holes.pop(0)

    def _hole_is_covered(self, hole: Hole) -> bool:
        """Whether everyone who would read across the hole is told of a loss beyond it anyway."""
        return self.evict_floor > hole.last_seq

    # -- after a snapshot

    def hydrate(self, batch: Batch) -> None:
        """Gives back a batch that the snapshot names. They come in order."""
        assert not self._firsts or batch.first_seq > self._firsts[-1], "ORDER"
        self.batches.append(batch)
        self._firsts.append(batch.first_seq)

    def hydrated(self) -> None:
        """All batches are back: works out what is dead in them and compares with what the snapshot says."""
        count = size = 0
        for batch in self.batches:
            runs = self._live_runs(batch)
            live = sum(last - first + 1 for first, last in runs)
            live_bytes = sum(batch.size(first, last) for first, last in runs)
            batch.dead_bytes = batch.live_bytes - live_bytes
            batch.dead = batch.count - live
            count += live
            size += live_bytes
        assert (count, size) == (self.count, self.bytes), "COUNT"

    def _live_runs(self, batch: Batch) -> list[tuple[int, int]]:
        batch.dead = -1  # not known yet: `runs` must look at the deletes
        return self.runs(batch, 0, batch.count - 1)

    # -- asking

    def batch_at(self, seq: int) -> int | None:
        """Where the batch that holds `seq` is, if there is one."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front or self.batches[at].last_seq < seq:
            return None
        return at

    def batch_from(self, seq: int) -> int:
        """Where the first batch is that holds `seq` or something after it; len(batches) when none does."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front:
            return self._front
        return at if self.batches[at].last_seq >= seq else at + 1

    def is_live(self, seq: int) -> bool:
        return (
            self.earliest_seq <= seq <= self.head_seq
            and seq not in self.deleted
            and self.batch_at(seq) is not None
        )

    def ts_of(self, seq: int) -> int:
        at = self.batch_at(seq)
        assert at is not None
        return self.batches[at].ts(seq - self.batches[at].first_seq)

    def first_seq_at(self, ts: int) -> int:
        """The first seq whose `$ts` is at least `ts`; `head_seq + 1` when there is none."""
        at = bisect_left(self.batches, ts, self._front, key=lambda batch: batch.last_ts)
        if at == len(self.batches):
            return self.head_seq + 1
        batch = self.batches[at]
        return batch.first_seq + batch.index_from_ts(ts)

    def live_of(self, seqs: BitMap64) -> BitMap64:
        """Those of `seqs` that are live records."""
        live = seqs - self.deleted
        live.remove_range(0, self.earliest_seq)
        gaps: list[tuple[int, int]] = []
        known_to = 0
        for seq in live:
            if seq >= known_to:
                at = self.batch_from(seq)
                if at == len(self.batches):
                    gaps.append((seq, live.max() + 1))
                    break
                batch = self.batches[at]
                if batch.first_seq > seq:  # between two batches: what was there is long gone
                    gaps.append((seq, batch.first_seq))
                    known_to = batch.first_seq
                else:
                    known_to = batch.last_seq + 1
        for low, high in gaps:
            live.remove_range(low, high)
        return live

    def measure_before(self, seq: int, *, above: int = 0) -> int:
        """Bytes of the live records below `seq`, from `above` on, in the batch that `seq` cuts through."""
        at = self.batch_at(seq - 1)
        if at is None or self.batches[at].last_seq < seq:
            return 0
        batch = self.batches[at]
        runs = self.runs(batch, max(0, above - batch.first_seq), seq - 1 - batch.first_seq)
        return sum(batch.size(first, last) for first, last in runs)

    def measure_seqs(self, seqs: BitMap64) -> list[int]:
        """Bytes of these live records, a number for each batch that holds some of them."""
        sizes: list[int] = []
        for at, _ in self._by_batch(seqs):
            batch = self.batches[at]
            first_seq = batch.first_seq
            indexes = (seq - first_seq for seq in _between(seqs, first_seq, batch.last_seq + 1))
            sizes.append(sum(batch.size(index, index) for index in indexes))
        return sizes

    def newest_ts_before(self, seq: int) -> int:
        """`$ts` of the last live record below `seq`; 0 when there is none."""
        last = self._last_live_before(min(seq, self.head_seq + 1))
        return self.ts_of(last) if last else 0

    def visible_totals(self) -> tuple[int, int]:
        """Count and bytes of the live records that readers may have."""
        count, size = self.count, self.bytes
        for at in range(len(self.batches) - 1, self._front - 1, -1):
            batch = self.batches[at]
            if batch.first_seq <= self.visible_seq:
                break
            count -= batch.count - batch.dead
            size -= batch.live_bytes
        return count, size

    def live_before(self, seq: int) -> tuple[int, int]:
        """How many live records, and how many bytes of them, lie below `seq`."""
        count = size = 0
        for batch in self.live_batches():
            if batch.first_seq >= seq:
                break
            if batch.last_seq < seq:
                count += batch.count - batch.dead
                size += batch.live_bytes
                continue
            for first, last in self.runs(batch, 0, seq - 1 - batch.first_seq):
                count += last - first + 1
                size += batch.size(first, last)
        return count, size

    def floor_for_caps(
        self, records_max: int, bytes_max: int, *, extra: int = 0, extra_bytes: int = 0, above: int = 0
    ) -> int:
        """The seq below which everything must go so that what is left fits; 0 when it fits already.

        0 as a maximum means that there is none. `extra` is what is about to be added; records below `above`
        are about to go and count as gone already (`extra` has been reduced by them).
        """
        excess = self.count + extra - records_max if records_max else 0
        excess_bytes = self.bytes + extra_bytes - bytes_max if bytes_max else 0
        if excess <= 0 and excess_bytes <= 0:
            return 0
        for batch in self.live_batches():
            for first, last in self.runs(batch, max(0, above - batch.first_seq), batch.count - 1):
                live, live_bytes = last - first + 1, batch.size(first, last)
                if excess >= live or excess_bytes >= live_bytes:
                    excess -= live
                    excess_bytes -= live_bytes
                    if excess <= 0 and excess_bytes <= 0:
                        return batch.first_seq + last + 1
                    continue
                cut = first + max(excess, 0)
                if excess_bytes > 0:
                    cut = max(cut, batch.index_from_size(first, excess_bytes) + 1)
                return batch.first_seq + cut
        return self.head_seq + 1

    def _last_live_before(self, seq: int) -> int:
        """The last live seq below `seq`, or 0."""
        at = min(self.batch_from(seq), len(self.batches) - 1)
        while at >= self._front:
            batch = self.batches[at]
            candidate = min(batch.last_seq, seq - 1)
            low = max(batch.first_seq, self.earliest_seq)
            while candidate >= low and candidate in self.deleted:
                candidate -= 1
            if candidate >= low:
                return candidate
            at -= 1
        return 0

    def gap_reason(self, gap_from: int) -> str:
        by_cap = gap_from < self.cap_floor
        by_ttl = gap_from < self.ttl_floor
        return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"

    def hole_after(self, seq: int) -> Hole | None:
        """The first hole that somebody who has read up to `seq` has not read across yet."""
        for hole in self.holes:
            if hole.last_seq > seq:
                return hole
        return None

    def hole_before(self, seq: int) -> Hole | None:
        """The hole that ends below `seq` with no batch in between, if there is one."""
        for hole in reversed(self.holes):
            if hole.last_seq < seq:
                at = self.batch_from(hole.last_seq + 1)
                return hole if at == len(self.batches) or self.batches[at].first_seq >= seq else None
        return None

    def runs(self, batch: Batch, first: int, last: int) -> list[tuple[int, int]]:
        """The live stretches of records first..last (indexes) of a batch, as index pairs."""
        base = batch.first_seq
        first = max(first, self.earliest_seq - base)
        if first > last:
            return []
        if batch.dead == 0 or self.deleted.range_cardinality(base + first, base + last + 1) == 0:
            return [(first, last)]
        runs: list[tuple[int, int]] = []
        start = first
        for seq in self._deleted_in(base + first, base + last + 1):
            index = seq - base
            if index > start:
                runs.append((start, index - 1))
            start = index + 1
        if start <= last:
            runs.append((start, last))
        return runs

    def _deleted_in(self, low: int, high: int) -> Iterator[int]:
        """Deleted seqs in [low, high)."""
        return _between(self.deleted, low, high)

    def check(self) -> None:
        """Asserts the invariants named above. For tests: it looks at everything."""
        count = size = 0
        last = 0
        for batch in self.live_batches():
            assert batch.first_seq > last, "ORDER"
            last = batch.last_seq
            assert batch.dead < batch.count or batch.encoding == _NO_ENCODING, "ORDER"
            live = [
                seq
                for seq in range(batch.first_seq, batch.last_seq + 1)
                if seq >= self.earliest_seq and seq not in self.deleted
            ]
            assert len(live) == batch.count - batch.dead, "COUNT"
            count += len(live)
            size += sum(batch.size(seq - batch.first_seq, seq - batch.first_seq) for seq in live)
        assert (count, size) == (self.count, self.bytes), "COUNT"
        assert last <= self.head_seq, "ORDER"
        assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1, "FLOORS"
        assert self.visible_seq <= self.head_seq, "FLOORS"
        if self.count:
            assert self.is_live(self.earliest_seq), "FLOORS"
        else:
            assert self.earliest_seq == self.head_seq + 1, "FLOORS"


def _between(seqs: BitMap64, low: int, high: int) -> Iterator[int]:
    for seq in seqs.iter_equal_or_larger(low):
        if seq >= high:
            return
        yield seq


def _husk(first_seq: int, count: int, ts: int) -> Batch:
    """A batch without payload, entirely dead."""
    husk = Batch(
        encoding=_NO_ENCODING,
        first_seq=first_seq,
        count=count,
        first_ts=ts,
        last_ts=ts,
        times=None,
        ends=None,
        stride=0,
        tags=None,
        nodes=None,
        blob=b"",
    )
    husk.dead = count
    husk.dead_bytes = -(count - 1)  # so that its live bytes are none
    return husk


_GONE = _husk(0, 1, 0)
