"""The unsealed end of a box's log: batches that are in memory whole, in the order of their seqs.

    batches   [gone, gone, ■■■, ■□■, husk, ■■, ■■■■]
                           ▲ front          a husk keeps the place of a batch that has nothing live left

Rules of the file
- The front is cut off in bulk, not one by one; what is before it holds no payload any more.
- Positions (`at`) are good until the next change.

Invariants
- ORDER: batches are sorted and do not overlap; one that is entirely dead holds no payload.
- HELD: `held_bytes` and `records` are those of the batches from the front on.
- COPIES: what is kept of the batches in columns is what they say themselves.
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
        # Of each batch the first seq, the lsn and what it costs in memory, in a form that can be searched,
        # copied and summed at once.
        self._firsts: array[int] = array("Q")
        self._lsns: array[int] = array("Q")
        self._costs: array[int] = array("I")
        self._front = 0
        self._husks = 0
        #: How many of the batches are yet to be rendered.
        self._unrendered_count = 0
        # Whether the lsns are in order, as they are but where something was logged again or put before, and
        # the last of them. A snapshot asks every box for its first.
        self._is_in_order = True
        self._newest_lsn = 0
        #: Memory that its batches take.
        self.held_bytes = 0
        #: Records of the batches from the front on, dead or not.
        self.records = 0

    def __repr__(self) -> str:
        return f"<UnsealedTail {len(self.batches) - self._front} batches, {self._husks} husks>"

    def __len__(self) -> int:
        """Positions end here."""
        return len(self.batches)

    @property
    def front(self) -> int:
        """Where the first batch with anything live is."""
        return self._front

    @property
    def oldest(self) -> Batch | None:
        return self.batches[self._front] if self._front < len(self.batches) else None

    @property
    def oldest_lsn(self) -> int:
        """The first frame of the log that any batch here is in; 0 when there is none. Not that of the oldest
        batch: one that is logged again comes behind its successors, and a commit's rows were put before."""
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
        """Where the batch that holds `seq` is, if there is one."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front or self.batches[at].last_seq < seq:
            return None
        return at

    def from_seq(self, seq: int) -> int:
        """Where the first batch is that holds `seq` or something after it; `len` when none does."""
        at = bisect_right(self._firsts, seq, self._front) - 1
        if at < self._front:
            return self._front
        return at if self.batches[at].last_seq >= seq else at + 1

    def copy(self) -> list[Batch]:
        """The batches from the front on; husks among them."""
        return self.batches[self._front :]

    def lsns(self) -> bytes:
        """Of the batches from the front on, as u64s; 0 for a husk, and for one that is not rendered yet."""
        return self._lsns[self._front :].tobytes()

    @property
    def has_unrendered(self) -> bool:
        """True if rows of a commit are yet to be rendered (`transactions/unrendered.py`)."""
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
        """A batch was logged again, under this lsn."""
        self.batches[at].lsn = self._lsns[at] = lsn
        self._is_in_order = False

    def render(self, at: int, batch: Batch) -> int:
        """The first rows of an entry that is not rendered are this batch. Returns what was estimated for
        them."""
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
        """Takes out rows that are lost (`offline/repair.py`)."""
        self._keep([batch for batch in self if batch is not rows])

    def _note_lsn(self, lsn: int) -> None:
        if self._front == len(self.batches) - 1:
            self._is_in_order, self._newest_lsn = True, 0
        if lsn < self._newest_lsn:
            self._is_in_order = False
        else:
            self._newest_lsn = lsn

    def sealable(self, visible_seq: int, durable_lsn: int, bytes_max: int) -> list[Batch]:
        """The oldest live batches that may be sealed, so many that they fit, but one at least."""
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
        """Return the batches that are visible and durable, found by search; [] where the columns do not
        tell: batches are out of order, or some record is dead."""
        if not self._is_in_order or self._husks or self._unrendered_count:
            return []
        end = min(
            bisect_right(self._firsts, visible_seq, self._front),
            bisect_right(self._lsns, durable_lsn, self._front),
        )
        if end > self._front and not _is_sealable(self.batches[end - 1], visible_seq, durable_lsn):
            end -= 1  # the last one is visible in part
        batches = self.batches[self._front : end]
        return [] if any(map(dead_of, batches)) else batches

    def sealable_upto(self, visible_seq: int, durable_lsn: int) -> int:
        """Return the last seq, live or deleted, before the first batch that may not be sealed yet."""
        for batch in self.batches[self._front :]:
            if not _is_sealable(batch, visible_seq, durable_lsn):
                return min(batch.first_seq - 1, visible_seq)
        return visible_seq

    def drop_before(self, seq: int) -> tuple[int, int]:
        """Drops batches that end below `seq`. Returns how many live records and bytes they had."""
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
        """Drops the payload of a batch that has nothing live; its position is removed later."""
        batch = self.batches[at]
        husk = _husk(batch.first_seq, batch.count, batch.last_ts)
        self.batches[at] = husk
        self._lsns[at] = 0
        cost = husk.bytes_in_memory
        self.held_bytes += cost - self._costs[at]
        self._costs[at] = cost
        self._husks += 1

    def compact(self) -> list[tuple[int, int]]:
        """Cuts out the places of buried batches when they are many. Returns their (first, last) seqs."""
        if self._husks < _COMPACT_AT or self._husks * 2 < len(self.batches) - self._front:
            return []
        dead_ranges = [(batch.first_seq, batch.last_seq) for batch in self if batch.dead == batch.count]
        self._keep([batch for batch in self if batch.dead < batch.count])
        return dead_ranges

    def settle(self) -> None:
        """Moves the front behind what has nothing live left, and lets go of what lies before it."""
        while self._front < len(self.batches):
            batch = self.batches[self._front]
            if batch.dead < batch.count:
                break
            self._pass_over(self._front)
            self._front += 1
        if self._front >= _COMPACT_AT and self._front * 2 >= len(self.batches):
            self._cut(self._front)
            return
        # The list keeps its slots until it is cut, but not the payloads.
        for at in range(self._front - 1, -1, -1):
            if self.batches[at] is _GONE:
                break
            self.batches[at] = _GONE

    def take_upto(self, seq: int) -> list[Batch]:
        """Takes out all batches up to `seq`, where a batch ends. Returns those that have live records."""
        end = self.from_seq(seq + 1)
        batches = self.batches[self._front : end]
        self.held_bytes -= sum(self._costs[self._front : end])
        # Tens of thousands of small batches come at once, and appends wait: loops in C take a fifth.
        self.records -= sum(map(_count_of, batches))
        self._cut(end)
        assert UnrenderedRows not in set(map(type, batches)), "ORDER"
        if not any(map(dead_of, batches)):
            return batches
        live = [batch for batch in batches if batch.dead < batch.count]
        self._husks -= len(batches) - len(live)  # ORDER: what is entirely dead is a husk
        return live

    def _cut(self, end: int) -> None:
        """Removes the positions before `end`, which the caller has accounted for."""
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
        """Sorts batches that came in any order."""
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
    """The frame that has a batch; 0 if none has, because it is yet to be rendered."""
    return 0 if isinstance(batch, UnrenderedRows) else batch.lsn


def _husk(first_seq: int, count: int, ts: int) -> Batch:
    """A batch without payload, entirely dead."""
    husk = Batch(encoding=_NO_ENCODING, first_seq=first_seq, count=count, first_ts=ts, last_ts=ts)
    husk.dead = count
    husk.dead_bytes = -(count - 1)  # so that its live bytes are none
    return husk


_GONE = _husk(0, 1, 0)
