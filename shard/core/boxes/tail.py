"""The unsealed end of a box's log: batches that are completely in memory, in the order of their seqs.

    batches   [gone, gone, ■■■, ■□■, husk, ■■, ■■■■]
                           ▲ front          a husk replaces a batch that has no live record left

Rules of the file
- Entries before the front have no payload. They are removed many at a time, not one by one.
- Positions (`at`) are valid until the next change.

Invariants
- ORDER: batches are sorted and do not overlap; a batch without live records is a husk and has no payload.
- HELD: `held_bytes` and `records` are totals of the batches from the front on.
- COPIES: the columns (first seqs, lsns, costs) have the same values as the batches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from operator import attrgetter

from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.model.records import Batch

_COMPACT_AT = 1024
_NO_ENCODING = 0

_blob_of = attrgetter("blob")
_count_of = attrgetter("count")
dead_of = attrgetter("dead")


class UnsealedTail:
    __slots__ = (
        "_costs",
        "_firsts",
        "_front",
        "_husks",
        "_is_in_order",
        "_lsns",
        "_newest_lsn",
        "_unrendered_count",
        "batches",
        "held_bytes",
        "records",
    )

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        # Columns: first seq, lsn and bytes in memory of each batch. Arrays are fast to search, copy and sum.
        self._firsts: array[int] = array("Q")
        self._lsns: array[int] = array("Q")
        self._costs: array[int] = array("I")
        self._front = 0
        self._husks = 0
        #: How many of the batches are not rendered yet.
        self._unrendered_count = 0
        # True while the lsns are in ascending order, and the last of them. They are not if a batch was logged
        # again or rows of a commit were inserted. It makes `oldest_lsn` fast: a snapshot reads that of every
        # box.
        self._is_in_order = True
        self._newest_lsn = 0
        #: Bytes in memory of its batches.
        self.held_bytes = 0
        #: Records of the batches from the front on, dead or not.
        self.records = 0

    def __repr__(self) -> str:
        return f"<UnsealedTail {len(self.batches) - self._front} batches, {self._husks} husks>"

    def __len__(self) -> int:
        """Return the position after the last batch."""
        return len(self.batches)

    @property
    def front(self) -> int:
        """The position of the first batch with live records."""
        return self._front

    @property
    def oldest(self) -> Batch | None:
        return self.batches[self._front] if self._front < len(self.batches) else None

    @property
    def oldest_lsn(self) -> int:
        """The lowest lsn of a batch; 0 if there is no batch.

        It is not always that of the first batch: a batch that is logged again gets a higher lsn than the
        batches after it, and rows of a commit are in earlier frames.
        """
        if self._front == len(self.batches):
            return 0
        first = self._lsns[self._front]
        if self._is_in_order and first:
            return first
        return min(filter(None, self._lsns[self._front :]), default=0)

    def __iter__(self) -> Iterator[Batch]:
        for at in range(self._front, len(self.batches)):
            yield self.batches[at]

    def at(self, seq: int) -> int | None:
        """Return the position of the batch that contains `seq`; None if there is none."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front or self.batches[at].last_seq < seq:
            return None
        return at

    def from_seq(self, seq: int) -> int:
        """Return the position of the first batch that contains `seq` or a later seq; `len` if there is
        none."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front:
            return self._front
        return at if self.batches[at].last_seq >= seq else at + 1

    def copy(self) -> list[Batch]:
        """Return the batches from the front on, including husks."""
        return self.batches[self._front :]

    def lsns(self) -> bytes:
        """Return the lsns of the batches from the front on, as u64s; 0 for husks and for rows that are not
        rendered."""
        return self._lsns[self._front :].tobytes()

    @property
    def has_unrendered(self) -> bool:
        """True if rows of a commit are not rendered yet (`transactions/unrendered.py`)."""
        return self._unrendered_count > 0

    def unrendered_rows(self) -> list[UnrenderedRows]:
        if not self._unrendered_count:
            return []
        return [batch for batch in self if isinstance(batch, UnrenderedRows)]

    def from_ts(self, ts: int) -> int:
        return bisect_left(self.batches, ts, self._front, key=lambda batch: batch.last_ts)

    # -- changing

    def append(self, batch: Batch) -> None:
        assert not self._firsts or batch.first_seq > self._firsts[-1], "ORDER"
        self.batches.append(batch)
        self._firsts.append(batch.first_seq)
        if isinstance(batch, UnrenderedRows):
            self._lsns.append(0)
            self._is_in_order = False
            self._unrendered_count += 1
        else:
            self._lsns.append(batch.lsn)
            self._note_lsn(batch.lsn)
        cost = batch.bytes_in_memory
        self._costs.append(cost)
        self.held_bytes += cost
        self.records += batch.count

    def relog(self, at: int, lsn: int) -> None:
        """Set the lsn of a batch that was logged again."""
        self.batches[at].lsn = self._lsns[at] = lsn
        self._is_in_order = False

    def render(self, at: int, batch: Batch) -> int:
        """Replace the first rows of an entry that is not rendered by their batch. Return the estimated size
        of these rows."""
        rows = self.batches[at]
        assert isinstance(rows, UnrenderedRows), "ORDER"
        share = rows.take(batch)
        cost = batch.bytes_in_memory
        if rows.count:
            self.batches.insert(at, batch)
            self._firsts.insert(at, batch.first_seq)
            self._firsts[at + 1] = rows.first_seq
            self._lsns.insert(at, batch.lsn)
            self._costs.insert(at, cost)
            self.held_bytes += cost
        else:
            self.batches[at] = batch
            self._lsns[at] = batch.lsn
            self.held_bytes += cost - self._costs[at]
            self._costs[at] = cost
            self._unrendered_count -= 1
        self._is_in_order = False
        return share

    def remove(self, rows: UnrenderedRows) -> None:
        """Remove rows that are lost (`offline/repair.py`)."""
        self._keep([batch for batch in self if batch is not rows])

    def _note_lsn(self, lsn: int) -> None:
        if self._front == len(self.batches) - 1:
            self._is_in_order, self._newest_lsn = True, 0
        if lsn < self._newest_lsn:
            self._is_in_order = False
        else:
            self._newest_lsn = lsn

    def sealable(self, visible_seq: int, durable_lsn: int, bytes_max: int) -> list[Batch]:
        """Return the oldest live batches that may be sealed: at most `bytes_max`, but at least one batch."""
        batches = self._sealable_prefix(visible_seq, durable_lsn)
        if batches:
            ends = array("Q", accumulate(map(len, map(_blob_of, batches))))
            return batches[: max(1, bisect_right(ends, bytes_max))]
        size = 0
        for batch in self.batches[self._front :]:
            size += len(batch.blob)
            if not _is_sealable(batch, visible_seq, durable_lsn) or (batches and size > bytes_max):
                break
            if batch.dead < batch.count:
                batches.append(batch)
        return batches

    def _sealable_prefix(self, visible_seq: int, durable_lsn: int) -> list[Batch]:
        """Return the batches that are visible and durable, found by a search in the columns. Return [] if the
        columns are not enough: lsns are not in order, or some record is dead."""
        if not self._is_in_order or self._husks or self._unrendered_count:
            return []
        end = min(
            bisect_right(self._firsts, visible_seq, self._front),
            bisect_right(self._lsns, durable_lsn, self._front),
        )
        if end > self._front and not _is_sealable(self.batches[end - 1], visible_seq, durable_lsn):
            end -= 1  # only a part of the last one is visible
        batches = self.batches[self._front : end]
        return [] if any(map(dead_of, batches)) else batches

    def sealable_upto(self, visible_seq: int, durable_lsn: int) -> int:
        """Return the last seq, live or deleted, before the first batch that may not be sealed yet."""
        for batch in self.batches[self._front :]:
            if not _is_sealable(batch, visible_seq, durable_lsn):
                return min(batch.first_seq - 1, visible_seq)
        return visible_seq

    def drop_before(self, seq: int) -> tuple[int, int]:
        """Drop the batches that end below `seq`. Return the count and size of their live records."""
        count = size = 0
        front = self._front
        while front < len(self.batches):
            batch = self.batches[front]
            if batch.last_seq >= seq:
                break
            count += batch.count - batch.dead
            size += batch.live_bytes
            self._pass_over(front)
            front += 1
        self._front = front
        return count, size

    def _pass_over(self, at: int) -> None:
        batch = self.batches[at]
        self.held_bytes -= self._costs[at]
        self.records -= batch.count
        if batch.encoding == _NO_ENCODING:
            self._husks -= 1
        elif isinstance(batch, UnrenderedRows):
            self._unrendered_count -= 1

    def bury(self, at: int) -> None:
        """Replace a batch without live records by a husk; `compact` removes it later."""
        batch = self.batches[at]
        husk = _husk(batch.first_seq, batch.count, batch.last_ts)
        self.batches[at] = husk
        self._lsns[at] = 0
        cost = husk.bytes_in_memory
        self.held_bytes += cost - self._costs[at]
        self._costs[at] = cost
        self._husks += 1

    def compact(self) -> list[tuple[int, int]]:
        """Remove the husks if there are many. Return their (first, last) seqs."""
        if self._husks < _COMPACT_AT or self._husks * 2 < len(self.batches) - self._front:
            return []
        dead_ranges = [(batch.first_seq, batch.last_seq) for batch in self if batch.dead == batch.count]
        self._keep([batch for batch in self if batch.dead < batch.count])
        return dead_ranges

    def settle(self) -> None:
        """Move the front to the first batch with live records, and release the payloads before it."""
        while self._front < len(self.batches):
            batch = self.batches[self._front]
            if batch.dead < batch.count:
                break
            self._pass_over(self._front)
            self._front += 1
        if self._front >= _COMPACT_AT and self._front * 2 >= len(self.batches):
            self._cut(self._front)
            return
        # The list keeps these entries until it is cut, but without payloads.
        for at in range(self._front - 1, -1, -1):
            if self.batches[at] is _GONE:
                break
            self.batches[at] = _GONE

    def take_upto(self, seq: int) -> list[Batch]:
        """Remove all batches up to `seq`, the last seq of a batch. Return those that have live records."""
        end = self.from_seq(seq + 1)
        batches = self.batches[self._front : end]
        self.held_bytes -= sum(self._costs[self._front : end])
        # There may be tens of thousands of small batches while appends wait. Loops in C take a fifth of the
        # time.
        self.records -= sum(map(_count_of, batches))
        self._cut(end)
        assert UnrenderedRows not in set(map(type, batches)), "ORDER"
        if not any(map(dead_of, batches)):
            return batches
        live = [batch for batch in batches if batch.dead < batch.count]
        self._husks -= len(batches) - len(live)  # ORDER: a batch without live records is a husk
        return live

    def _cut(self, end: int) -> None:
        """Remove the entries before `end`. The caller has updated the totals."""
        del self.batches[:end]
        del self._firsts[:end]
        del self._lsns[:end]
        del self._costs[:end]
        self._front = 0

    def _keep(self, batches: list[Batch]) -> None:
        self.batches = batches
        self._firsts = array("Q", [batch.first_seq for batch in batches])
        self._lsns = array("Q", map(_logged_lsn, batches))
        self._unrendered_count = sum(isinstance(batch, UnrenderedRows) for batch in batches)
        self._costs = array("I", [batch.bytes_in_memory for batch in batches])
        self._front = 0
        self._is_in_order, self._newest_lsn = True, 0
        for lsn in self._lsns:
            if lsn < self._newest_lsn:
                self._is_in_order = False
            self._newest_lsn = max(lsn, self._newest_lsn)
        self._husks = sum(batch.encoding == _NO_ENCODING for batch in batches)
        self.held_bytes = sum(self._costs)
        self.records = sum(batch.count for batch in batches)

    def sort(self) -> None:
        """Sort batches that were added in any order."""
        self._keep(sorted(self.batches, key=lambda batch: batch.first_seq))

    def check(self) -> None:
        last = 0
        for batch in self:
            assert batch.first_seq > last, "ORDER"
            last = batch.last_seq
            assert batch.dead < batch.count or batch.encoding == _NO_ENCODING, "ORDER"
        lsns = list(map(_logged_lsn, self))
        assert list(self._lsns[self._front :]) == lsns, "COPIES"
        assert self.oldest_lsn == min(filter(None, lsns), default=0), "COPIES"
        assert self._unrendered_count == len([each for each in self if isinstance(each, UnrenderedRows)]), (
            "COPIES"
        )
        assert list(self._firsts[self._front :]) == [batch.first_seq for batch in self], "COPIES"
        assert list(self._costs[self._front :]) == [batch.bytes_in_memory for batch in self], "COPIES"
        assert self._husks == sum(batch.encoding == _NO_ENCODING for batch in self), "ORDER"
        assert self.held_bytes == sum(batch.bytes_in_memory for batch in self), "HELD"
        assert self.records == sum(batch.count for batch in self), "HELD"


def _is_sealable(batch: Batch, visible_seq: int, durable_lsn: int) -> bool:
    is_visible = batch.first_seq + batch.count - 1 <= visible_seq
    return batch.lsn <= durable_lsn and is_visible and not isinstance(batch, UnrenderedRows)


def _logged_lsn(batch: Batch) -> int:
    """Return the lsn of a batch; 0 if it is not rendered yet and so is in no frame."""
    return 0 if isinstance(batch, UnrenderedRows) else batch.lsn


def _husk(first_seq: int, count: int, ts: int) -> Batch:
    """Return a batch without payload and without live records."""
    husk = Batch(encoding=_NO_ENCODING, first_seq=first_seq, count=count, first_ts=ts, last_ts=ts)
    husk.dead = count
    husk.dead_bytes = -(count - 1)  # so that its live bytes are 0
    return husk


_GONE = _husk(0, 1, 0)
