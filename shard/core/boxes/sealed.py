"""Sealed batches: their index in memory, while their payload is in a segment file.

A segment holds some batches of one box, in order. Of each batch five numbers stay here (32 bytes); the
payload comes back through `load` when a command needs it, and may be dropped again at any time.

    segment   ■■■■  ■■□■  □□□□  ■■■■        ■ live  □ dead      front: the first batch with anything live
              at 0  at 1  at 2  at 3        dead = {1: (1, 31), 2: (4, 120)}

Rules of the file
- The numbers of a batch never change; its dead records are noted beside them.
- Which payloads are in memory never changes an answer: a command that needs a missing one raises `NotLoaded`
  and is handled again when it has been fetched.

Invariants (`check`)
- LIVE: `count` and `bytes` are those of the live records; batches before `front` have none.
- LATER: no deferred delete (`kill_later`) concerns a batch before `front`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pyroaring import BitMap64

from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

_COLUMN_KINDS = ("Q", "q", "q", "I", "I")
#: Memory that a sealed batch takes for as long as its segment has anything live.
SEALED_BATCH_BYTES = sum(array(kind).itemsize for kind in _COLUMN_KINDS)


class NotLoaded(Exception):
    """The payload of a sealed batch is needed and is not in memory."""

    def __init__(self, segment: Segment, at: int) -> None:
        super().__init__(segment, at)
        self.segment = segment
        self.at = at


class TagsNotLoaded(Exception):
    """The tag indexes of some segments have to be looked into."""

    def __init__(self, segments: Sequence[Segment], match: Match) -> None:
        super().__init__(segments, match)
        self.segments = segments
        self.match = match


class NeedsAnotherStep:
    """A command has done a part of its work. Nothing has to be fetched: others get their turn."""


UNFINISHED = NeedsAnotherStep()

_NONE_DEAD = (0, 0, 0)


class Segment:
    __slots__ = (
        "_dead",
        "_later",
        "_payloads",
        "_recently_used",
        "bytes",
        "count",
        "counts",
        "dead_version",
        "first_seqs",
        "first_times",
        "front",
        "generation",
        "is_cold",
        "last_times",
        "serial",
        "sizes",
        "total_bytes",
        "total_count",
    )

    def __init__(
        self,
        *,
        generation: int,
        serial: int,
        first_seqs: array[int],
        first_times: array[int],
        last_times: array[int],
        counts: array[int],
        sizes: array[int],
    ) -> None:
        self.generation = generation
        self.serial = serial
        self.first_seqs = first_seqs
        self.first_times = first_times
        self.last_times = last_times
        #: Records of each batch, and their bytes without the commas between them.
        self.counts = counts
        self.sizes = sizes
        self.front = 0
        #: Of its live records, and of all of them.
        self.count = self.total_count = sum(counts)
        self.bytes = self.total_bytes = sum(sizes)
        self.is_cold = False
        #: Grows with every record that dies here, so that a user of a copy of the segment sees it.
        self.dead_version = 0
        #: (at, records, bytes) of what is dead in a batch; absent when nothing is, and before `front`.
        self._dead: dict[int, tuple[int, int, int]] = {}
        #: Deletes that are not in `_dead` yet: seqs, some of them here, and the bytes of those in each batch.
        self._later: list[tuple[BitMap64, Sequence[int]]] = []
        self._payloads: dict[int, Batch] = {}
        self._recently_used: set[int] = set()

    def __repr__(self) -> str:
        return (
            f"<Segment {self.serial} of {self.generation}: {self.first_seq}..{self.last_seq}, "
            f"{self.count} live, {len(self._payloads)} of {len(self)} batches loaded>"
        )

    def __len__(self) -> int:
        return len(self.first_seqs)

    @property
    def first_seq(self) -> int:
        """Of its first batch, dead or not: it is part of the file's name."""
        return self.first_seqs[0]

    @property
    def last_seq(self) -> int:
        return self.first_seqs[-1] + self.counts[-1] - 1

    @property
    def last_ts(self) -> int:
        return self.last_times[-1]

    # -- bytes, for the log

    def to_bytes(self) -> bytes:
        columns = (self.first_seqs, self.first_times, self.last_times, self.counts, self.sizes)
        return b"".join(column.tobytes() for column in columns)

    @classmethod
    def from_bytes(cls, generation: int, serial: int, content: bytes) -> Segment:
        batches = len(content) // SEALED_BATCH_BYTES
        columns: list[array[int]] = []
        at = 0
        for kind in _COLUMN_KINDS:
            column = array(kind)
            end = at + batches * column.itemsize
            column.frombytes(content[at:end])
            columns.append(column)
            at = end
        first_seqs, first_times, last_times, counts, sizes = columns
        return cls(
            generation=generation,
            serial=serial,
            first_seqs=first_seqs,
            first_times=first_times,
            last_times=last_times,
            counts=counts,
            sizes=sizes,
        )

    # -- asking

    def batch(self, at: int) -> SealedBatch:
        return SealedBatch(self, at)

    def at(self, seq: int) -> int | None:
        """Which batch holds `seq`; None when none does or nothing in it is live."""
        at = bisect_right(self.first_seqs, seq) - 1
        return at if at >= self.front and seq < self.first_seqs[at] + self.counts[at] else None

    def from_seq(self, seq: int) -> int:
        """The first batch that may hold something live at or above `seq`; `len` when there is none."""
        at = bisect_right(self.first_seqs, seq) - 1
        if at < self.front:
            return self.front
        return at if seq < self.first_seqs[at] + self.counts[at] else at + 1

    def from_ts(self, ts: int) -> int:
        return max(self.front, bisect_left(self.last_times, ts))

    def dead(self, at: int) -> int:
        if self._later:
            self.settle_deletes()
        return self.counts[at] if at < self.front else self._dead.get(at, _NONE_DEAD)[1]

    def live_bytes(self, at: int) -> int:
        if self._later:
            self.settle_deletes()
        return 0 if at < self.front else self.sizes[at] - self._dead.get(at, _NONE_DEAD)[2]

    def dead_batches(self) -> list[tuple[int, int, int]]:
        """(at, records, bytes) of every batch at or behind `front` in which something is dead."""
        self.settle_deletes()
        return sorted(self._dead.values())

    # -- payloads

    def load(self, at: int, batch: Batch) -> None:
        assert batch.first_seq == self.first_seqs[at] and batch.count == self.counts[at], "ORDER"
        self._payloads[at] = batch

    def forget(self, at: int) -> None:
        self._payloads.pop(at, None)
        self._recently_used.discard(at)
        if not self._payloads:  # tables that have grown do not shrink: 130 bytes a batch
            self._payloads, self._recently_used = {}, set()

    def cached_payload(self, at: int) -> Batch | None:
        return self._payloads.get(at)

    def use(self, at: int) -> Batch:
        """Return the payload of a batch and mark it as used. Raises `NotLoaded` if it is not in memory."""
        batch = self._payloads.get(at)
        if batch is None:
            raise NotLoaded(self, at)
        self._recently_used.add(at)
        return batch

    def was_used(self, at: int) -> bool:
        """Return True if a payload was used since the last call."""
        is_recent = at in self._recently_used
        self._recently_used.discard(at)
        return is_recent

    # -- changing

    def kill(self, at: int, count: int, size: int) -> None:
        """Marks more live records of a batch as dead."""
        if self._later:
            self.settle_deletes()
        self._note_dead(at, count, size)
        self.count -= count
        self.bytes -= size
        self.dead_version += 1

    def _note_dead(self, at: int, count: int, size: int) -> None:
        _, dead, dead_bytes = self._dead.get(at, _NONE_DEAD)
        assert dead + count <= self.counts[at], "LIVE"
        self._dead[at] = (at, dead + count, dead_bytes + size)

    def count_batches(self, seqs: BitMap64) -> int | None:
        """How many batches hold those of `seqs` that are in the range of this segment; None if one of them is
        in no batch."""
        if not seqs.range_cardinality(self.first_seq, self.last_seq + 1):
            return 0
        here = self._part_of(seqs)
        batches = first = at = 0
        while first < len(here):
            at = bisect_right(self.first_seqs, here[first], at) - 1
            end_seq = self.first_seqs[at] + self.counts[at]
            if here[first] >= end_seq:
                return None
            first = bisect_left(here, end_seq, first)
            batches += 1
        return batches

    def _part_of(self, seqs: BitMap64) -> array[int]:
        here = BitMap64()
        here.add_range(self.first_seq, self.last_seq + 1)
        here &= seqs
        return here.to_array()

    def kill_later(self, seqs: BitMap64, count: int, sizes: Sequence[int], size: int) -> None:
        """Marks those of `seqs` that are here as dead: `count` live records. `sizes`: their bytes in each
        batch that holds some. The numbers of each batch are computed when they are needed."""
        self._later.append((seqs, sizes))
        self.count -= count
        self.bytes -= size
        self.dead_version += 1

    def settle_deletes(self) -> int:
        """Does the work that `kill_later` has deferred. Returns how many batches it concerned."""
        later, self._later = self._later, []
        batches = 0
        first_seqs, counts = self.first_seqs, self.counts
        for seqs, sizes in later:
            dead = self._part_of(seqs)
            first = at = 0
            for size in sizes:
                at = bisect_right(first_seqs, dead[first], at) - 1
                end = bisect_left(dead, first_seqs[at] + counts[at], first)
                self._note_dead(at, end - first, size)
                first = end
            assert first == len(dead), "LIVE"
            batches += len(sizes)
        return batches

    def kill_whole(self, at: int) -> None:
        """Marks all records of a batch as dead."""
        self.kill(at, self.counts[at] - self.dead(at), self.live_bytes(at))

    def drop_before(self, seq: int) -> None:
        """Drops batches that end below `seq`. The caller handles the batch that contains `seq`."""
        self.settle_deletes()
        while self.front < len(self) and self.first_seqs[self.front] + self.counts[self.front] <= seq:
            self.count -= self.counts[self.front] - self.dead(self.front)
            self.bytes -= self.live_bytes(self.front)
            self._dead.pop(self.front, None)
            self._payloads.pop(self.front, None)
            self.front += 1
            self.dead_version += 1

    def settle(self) -> None:
        """Moves `front` behind batches in which nothing is live."""
        while self.front < len(self) and self.dead(self.front) == self.counts[self.front]:
            del self._dead[self.front]
            self._payloads.pop(self.front, None)
            self.front += 1

    def check(self) -> None:
        live = range(self.front, len(self))
        assert self.count == sum(self.counts[at] - self.dead(at) for at in live), "LIVE"
        assert self.bytes == sum(self.live_bytes(at) for at in live), "LIVE"
        assert all(at >= self.front for at in self._dead), "LIVE"


class SealedBatch:
    """A batch of a segment, to be looked at like one that is in memory whole."""

    __slots__ = ("_at", "_segment", "count", "first_seq")

    def __init__(self, segment: Segment, at: int) -> None:
        self._segment = segment
        self._at = at
        self.first_seq = segment.first_seqs[at]
        self.count = segment.counts[at]

    def __repr__(self) -> str:
        return f"<SealedBatch {self.first_seq}..{self.last_seq} of {self._segment!r}>"

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def first_ts(self) -> int:
        return self._segment.first_times[self._at]

    @property
    def last_ts(self) -> int:
        return self._segment.last_times[self._at]

    @property
    def dead(self) -> int:
        return self._segment.dead(self._at)

    @property
    def live_bytes(self) -> int:
        return self._segment.live_bytes(self._at)

    @property
    def payload(self) -> Batch:
        return self._segment.use(self._at)

    def kill(self, count: int, size: int) -> None:
        self._segment.kill(self._at, count, size)

    # Asked like a batch in memory; the payload is needed only where the numbers do not tell.

    def size(self, first: int, last: int) -> int:
        if first == 0 and last == self.count - 1:
            return self._segment.sizes[self._at]
        return self.payload.size(first, last)

    def ts(self, index: int) -> int:
        return self.first_ts if self.first_ts == self.last_ts else self.payload.ts(index)

    def ts_at_least(self, index: int) -> int:
        """A time that the record is not older than: its own, unless that is not in memory."""
        batch = self._segment.cached_payload(self._at)
        return self.first_ts if batch is None else batch.ts(index)

    def index_from_ts(self, ts: int) -> int:
        if ts <= self.first_ts:
            return 0
        return self.count if ts > self.last_ts else self.payload.index_from_ts(ts)

    def index_from_size(self, first: int, bytes_wanted: int) -> int:
        return self.payload.index_from_size(first, bytes_wanted)


#: A batch of a log, wherever its payload is.
Span = Batch | SealedBatch
