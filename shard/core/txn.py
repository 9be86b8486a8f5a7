"""Transactions: rows that are held for a writer's epoch, and marks of the epochs that were committed.

    writer ─► epoch ─► parcel ─► chunk       held: logged, in memory, without seqs, shown to nobody
    writer ─► mark                           the last epoch of it that was committed here

A commit names parcels. In one change they become records, all else of the writer up to that epoch is
dropped, and the mark is set; so a crash leaves all of that or nothing, and a repeat finds the mark.

The change says where every box's rows go, and the rows are what is held: applying it renders them. That is
the one place where applying needs payloads, and these are always in memory: a chunk comes with its change, or
is given back by recovery before anything is applied. The batches are in no frame of their own then, so the
machine logs each of them as `BatchKept` at once; what a crash cut off of that, the next start logs.

Bounds: chunks are held up to `bytes_max`, in memory, because a commit is to be quick and a job that needs
more can be split; committing needs about twice that again for a moment. Rows that were taken apart when they
came stay so, up to `_APART_MAX` of them; others are taken apart again. Marks: `MARKS_MAX`, `ONCE_MAX`.

Invariants (`check`)
- HELD: `bytes` is what the chunks cost, and every chunk is known under its lsn.
- OPEN: nothing is held of an epoch that is not after the writer's mark.
- MARKS: every mark that expires is known, and of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shard.core import changes
from streams.protocol.packed import PackedHead, Rows, joined, sizes_of, unpack_again
from streams.protocol.records import Batch, Columns, render, resolve_times
from streams.protocol.slots import slot_of

if TYPE_CHECKING:
    from shard.core.machine import Machine

#: What a chunk costs in memory beside its bytes, and what each box does that it names: measured, rounded up.
_CHUNK_BYTES, _NAME_BYTES = 1024, 160

#: Rows that stay taken apart: 60 to 100 bytes each beside those of the body, which they point into.
_APART_MAX = 500_000

#: Writers that a shard remembers for good: about 300 bytes each, 30 MB. Their marks do not expire, because to
#: forget one would be to write rows twice. Beyond it new writers are refused; an operator may forget some.
MARKS_MAX = 100_000
#: Marks of writers that are used once: kept for as long as their job may repeat its commit, and at most this
#: many, the newest ones. To forget one early does no harm: what the job put is gone, so that a repeated
#: commit is refused, and nobody else has the name of the writer.
ONCE_MS, ONCE_MAX = 86_400_000, 100_000
#: Marks from logs that did not tell the two apart.
OLD_MARK_MS = 90 * 86_400_000
#: Attempts that one epoch remembers to have been replaced.
REPLACED_MAX = 16


class Mark(NamedTuple):
    epoch: int
    query: str
    at_ms: int
    #: Bits of the slots that it stands for; all of the shard's when there are none.
    slots: bytes = b""
    lsn: int = 0
    #: As in `changes.TxnHeld`.
    owner: str | None = None
    #: As in `changes.MarkFacts`.
    once: bool | None = None

    def covers(self, box: str) -> bool:
        slot = slot_of(box)
        return not self.slots or bool(self.slots[slot >> 3] >> (slot & 7) & 1)


class Chunk:
    """One message of rows."""

    __slots__ = ("at_ms", "body", "lsn", "packed", "rows")

    def __init__(self, packed: PackedHead, body: bytes, at_ms: int, lsn: int) -> None:
        self.packed = packed
        self.body = body
        self.at_ms = at_ms
        self.lsn = lsn
        #: What the body says, if it is remembered.
        self.rows: list[Rows] | None = None

    def __repr__(self) -> str:
        return f"<Chunk {len(self.body)} B, lsn {self.lsn}>"

    @property
    def cost(self) -> int:
        return cost_of(self.packed, self.body)

    @property
    def records(self) -> int:
        return sum(self.packed.counts)


def cost_of(packed: PackedHead, body: bytes) -> int:
    """What it takes to hold a chunk."""
    return len(body) + _CHUNK_BYTES + _NAME_BYTES * len(packed.boxes)


class Epoch:
    """What is held of one transaction."""

    __slots__ = ("attempt", "owner", "parcels", "put_ms", "query", "replaced", "takes_over")

    def __init__(self, query: str, owner: str | None = None) -> None:
        self.query = query
        #: As in `changes.TxnHeld`.
        self.owner = owner
        #: The attempt whose rows are held, and those that it has replaced.
        self.attempt = ""
        self.replaced: list[str] = []
        self.parcels: dict[str, dict[int, Chunk]] = {}
        #: When the last chunk came.
        self.put_ms = 0
        #: Whether its query took the writer over from another one.
        self.takes_over = False

    def __repr__(self) -> str:
        return f"<Epoch of {self.query!r}, {len(self.parcels)} parcels>"

    @property
    def bytes(self) -> int:
        return sum(chunk.cost for chunk in self.chunks())

    def chunks(self) -> Iterator[Chunk]:
        for parcel in self.parcels.values():
            yield from parcel.values()

    def create_of(self, box: str) -> bool | None:
        """Whether the rows of a box may create it, as whoever put the first of them said."""
        return next(chunk.packed.create for chunk in self.chunks() if box in chunk.packed.boxes)

    def shapes(self, parcels: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
        """Of each box in these parcels the rows and bytes of data of each of its pieces, in order."""
        found: dict[str, list[tuple[int, int]]] = {}
        for chunk in self._ordered(parcels):
            for box, count, size in sizes_of(chunk.packed, chunk.body):
                found.setdefault(box, []).append((count, size))
        return found

    def rows(self, parcels: Sequence[str]) -> dict[str, list[Columns]]:
        """The pieces themselves."""
        found: dict[str, list[Columns]] = {}
        for chunk in self._ordered(parcels):
            for rows in chunk.rows or unpack_again(chunk.packed, chunk.body):
                found.setdefault(rows.box, []).append(rows.columns)
        return found

    def _ordered(self, parcels: Sequence[str]) -> Iterator[Chunk]:
        for name in parcels:
            chunks = self.parcels[name]
            for number in sorted(chunks):
                yield chunks[number]


def batches_of(part: changes.TxnPart, pieces: Sequence[Columns], at_ms: int) -> Iterator[Batch]:
    """The batches that the rows of a box become. Asks nothing but what the part says."""
    at, seq, not_before = 0, part.first_seq, part.not_before
    for count in part.counts:
        first, taken = at, 0
        while taken < count:
            taken += pieces[at].count
            at += 1
        columns = joined(pieces[first:at])
        times = resolve_times(
            columns.times,
            count,
            now_ms=at_ms,
            not_before=not_before,
            mode=part.mode,
            uncapped=part.uncapped,
        )
        batch = render(columns, first_seq=seq, times=times)
        seq, not_before = seq + count, batch.last_ts
        yield batch


class Txns:
    """What the machine knows of transactions; what it does about them is in `committing.py`."""

    def __init__(self, machine: Machine, *, bytes_max: int, ttl_ms: int) -> None:
        self._machine = machine
        self.bytes_max = bytes_max
        self.ttl_ms = ttl_ms
        self.bytes = 0
        #: What the chunks of each key cost.
        self._bytes_of: dict[str, int] = {}
        #: Rows of chunks that are taken apart.
        self._apart = 0
        self.epochs: dict[tuple[str, int], Epoch] = {}
        #: The same by writer.
        self._of_writer: dict[str, dict[int, Epoch]] = {}
        #: By writer; of one writer several only where shards came together that did not agree. Oldest first.
        self.marks: dict[str, tuple[Mark, ...]] = {}
        #: Writers whose marks expire, oldest first: those that are used once, and those of old logs.
        self._once: dict[str, None] = {}
        self._old: dict[str, None] = {}
        #: In the order of lsns, which is that of the log.
        self._by_lsn: dict[int, tuple[str, int, str, int]] = {}
        #: Epochs, the one that waits longest for another put first.
        self._by_age: dict[tuple[str, int], None] = {}
        #: (generation, first seq) of batches that are in no frame of their own yet.
        self.unkept: dict[tuple[int, int], None] = {}
        self.appliers: dict[type[Any], Callable[[Any, int], None]] = {
            changes.TxnHeld: self._apply_held,
            changes.TxnKept: self._apply_held,
            changes.TxnCommitted: self._apply_committed,
            changes.TxnDropped: self._apply_dropped,
            changes.TxnForgotten: self._apply_forgotten,
        }

    def __repr__(self) -> str:
        return f"<Txns {len(self.epochs)} epochs, {self.bytes} B held, {len(self.marks)} marks>"

    # -- asking

    def find(self, writer: str, epoch: int) -> Epoch | None:
        return self.epochs.get((writer, epoch))

    def bytes_of(self, owner: str) -> int:
        """What is held for the open transactions of a key."""
        return self._bytes_of.get(owner, 0)

    def _count(self, owner: str | None, cost: int) -> None:
        if owner is not None:
            total = self._bytes_of.get(owner, 0) + cost
            if total:
                self._bytes_of[owner] = total
            else:
                self._bytes_of.pop(owner, None)

    def owners_of(self, writer: str) -> set[str]:
        """The keys that a writer belongs to: those of its open epochs and of its marks. More than one only
        where shards came together that did not agree."""
        found = {epoch.owner for epoch in self._of_writer.get(writer, {}).values()}
        found |= {mark.owner for mark in self.marks.get(writer, ())}
        return {owner for owner in found if owner is not None}

    @property
    def marks_kept(self) -> int:
        """Writers whose marks do not expire."""
        return len(self.marks) - len(self._once) - len(self._old)

    def of_writer(self, writer: str) -> dict[int, Epoch]:
        """Open epochs of a writer, by their numbers."""
        return dict(self._of_writer.get(writer, {}))

    def held_by_others(self, writer: str, query: str) -> dict[int, Epoch]:
        """Open epochs of a writer that are another query's."""
        known = self._of_writer.get(writer, {})
        return {number: epoch for number, epoch in known.items() if epoch.query != query}

    @property
    def oldest_lsn(self) -> int | None:
        """The oldest frame that holds something."""
        return next(iter(self._by_lsn), None)

    def next_expiry_ms(self) -> int | None:
        oldest = next(iter(self._by_age), None)
        return None if oldest is None else self.epochs[oldest].put_ms + self.ttl_ms

    def expired(self, now_ms: int) -> tuple[str, int] | None:
        """An epoch that nobody has put to for too long."""
        when = self.next_expiry_ms()
        return next(iter(self._by_age)) if when is not None and when <= now_ms else None

    def to_keep(self, pinned_lsn: int) -> changes.TxnKept | None:
        """The oldest chunk once more, when the log up to `pinned_lsn` is to become free."""
        lsn = self.oldest_lsn
        if lsn is None or lsn > pinned_lsn:
            return None
        writer, number, parcel, at = self._by_lsn[lsn]
        epoch = self.epochs[writer, number]
        chunk = epoch.parcels[parcel][at]
        return changes.TxnKept(
            writer,
            number,
            epoch.query,
            parcel,
            at,
            chunk.at_ms,
            chunk.packed,
            chunk.body,
            epoch.owner,
            epoch.takes_over,
            epoch.attempt,
            epoch.replaced,
        )

    def remember(self, chunk: Chunk, rows: list[Rows]) -> None:
        """What a chunk says is known; a commit need not find it out again."""
        if self._apart + chunk.records <= _APART_MAX:
            self._apart += chunk.records
            chunk.rows = rows

    def _forget(self, epoch: Epoch, chunk: Chunk) -> None:
        del self._by_lsn[chunk.lsn]
        self.bytes -= chunk.cost
        self._count(epoch.owner, -chunk.cost)
        if chunk.rows is not None:
            self._apart -= chunk.records

    # -- applying

    def _apply_held(self, change: changes.TxnHeld, lsn: int) -> None:
        chunk = Chunk(change.packed, change.body, change.at_ms, lsn)
        epoch = self._open(change.writer, change.epoch, change.query, change.owner)
        epoch.takes_over = change.takes_over
        epoch.attempt, epoch.replaced = change.attempt, change.replaced
        self._hold(epoch, change.writer, change.epoch, change.parcel, change.chunk, chunk)

    def _open(self, writer: str, number: int, query: str, owner: str | None) -> Epoch:
        epoch = self.epochs.get((writer, number))
        if epoch is None:
            epoch = self.epochs[writer, number] = Epoch(query, owner)
            self._of_writer.setdefault(writer, {})[number] = epoch
        if epoch.owner != owner:
            self._count(epoch.owner, -epoch.bytes)
            self._count(owner, epoch.bytes)
        epoch.query, epoch.owner = query, owner
        return epoch

    def _hold(self, epoch: Epoch, writer: str, number: int, parcel: str, at: int, chunk: Chunk) -> None:
        key = (writer, number)
        old = epoch.parcels.setdefault(parcel, {}).get(at)
        if old is not None:
            self._forget(epoch, old)
        epoch.parcels[parcel][at] = chunk
        self._by_lsn[chunk.lsn] = (writer, number, parcel, at)
        self.bytes += chunk.cost
        self._count(epoch.owner, chunk.cost)
        if old is None:
            epoch.put_ms = max(epoch.put_ms, chunk.at_ms)
            self._by_age.pop(key, None)
            self._by_age[key] = None

    def _apply_committed(self, change: changes.TxnCommitted, lsn: int) -> None:
        machine, uploading = self._machine, self._machine.uploading
        is_shipped = False
        if change.parts:
            rows = self.epochs[change.writer, change.epoch].rows(change.parcels)
            for part in change.parts:  # before any of them is made true
                held = sum(piece.count for piece in rows.get(part.box, ()))
                assert held == sum(part.counts), f"{held} rows of {part.box} are held"
            for part in change.parts:
                cuts = (0, part.evict_before_seq, 0, part.evict_cut_bytes, part.evicted_ts)
                for batch in batches_of(part, rows.pop(part.box), change.at_ms):
                    appended = changes.BatchAppended(part.generation, batch, change.at_ms, None, *cuts)
                    if uploading.is_on and machine.generations[part.generation].is_object:
                        uploading.ship(appended, lsn)
                        is_shipped = True
                    machine._apply_appended(appended, lsn)
                    self.unkept[part.generation, batch.first_seq] = None
                    cuts = (0, 0, 0, 0, 0)
        for number in list(self._of_writer.get(change.writer, ())):
            if number <= change.epoch:
                self._drop(change.writer, number, list(self.epochs[change.writer, number].parcels))
        if is_shipped:  # as a commit of nothing more: what it made was shipped above
            uploading.ship(msgspec.structs.replace(change, parcels=[], parts=[]), lsn)
        mark = Mark(change.epoch, change.query, change.at_ms, lsn=lsn, owner=change.owner, once=change.once)
        self.note_mark(change.writer, mark)
        self._forget_marks(change.at_ms)

    def rewound(self, now_ms: int) -> None:
        """Time begins again at `now_ms`: nothing was put later."""
        for epoch in self.epochs.values():
            epoch.put_ms = min(epoch.put_ms, now_ms)

    def note_mark(self, writer: str, mark: Mark) -> None:
        # It is the youngest now. Boxes that came from a shard of a later moment are still ahead of it.
        ahead = [
            known
            for known in self.marks.pop(writer, ())
            if known.slots and known.epoch > mark.epoch and known.query == mark.query
        ]
        self._keep_mark(writer, (*ahead, mark))

    def _keep_mark(self, writer: str, marks: tuple[Mark, ...]) -> None:
        self.marks[writer] = marks
        for expiring, once in ((self._once, True), (self._old, None)):
            expiring.pop(writer, None)
            if all(mark.once is once for mark in marks):
                expiring[writer] = None

    def _forget_mark(self, writer: str) -> None:
        del self.marks[writer]
        self._once.pop(writer, None)
        self._old.pop(writer, None)

    def _forget_marks(self, now_ms: int) -> None:
        """Forgets marks whose time is over."""
        for expiring, kept_ms, most in ((self._once, ONCE_MS, ONCE_MAX), (self._old, OLD_MARK_MS, 0)):
            while expiring:
                oldest = next(iter(expiring))
                is_over = self.marks[oldest][-1].at_ms + kept_ms < now_ms
                if not is_over and (not most or len(expiring) <= most):
                    break
                self._forget_mark(oldest)

    def _apply_forgotten(self, change: changes.TxnForgotten, lsn: int) -> None:
        if change.writer in self.marks:
            self._forget_mark(change.writer)

    def _apply_dropped(self, change: changes.TxnDropped, lsn: int) -> None:
        epoch = self.epochs[change.writer, change.epoch]
        self._drop(change.writer, change.epoch, change.parcels or list(epoch.parcels))

    def _drop(self, writer: str, number: int, parcels: Sequence[str]) -> None:
        epoch = self.epochs[writer, number]
        for parcel in parcels:
            for chunk in epoch.parcels.pop(parcel).values():
                self._forget(epoch, chunk)
        if not epoch.parcels:
            del self.epochs[writer, number]
            del self._by_age[writer, number]
            of_writer = self._of_writer[writer]
            del of_writer[number]
            if not of_writer:
                del self._of_writer[writer]

    def kept(self, generation: int, first_seq: int) -> None:
        """A batch has a frame of its own."""
        self.unkept.pop((generation, first_seq), None)

    def take_unkept(self) -> list[changes.BatchKept]:
        """What a crash cut off: the batches that no frame holds, to be logged."""
        found: list[changes.BatchKept] = []
        for generation, first_seq in self.unkept:
            box = self._machine.generations.get(generation)
            at = box.log.tail.at(first_seq) if box is not None else None
            batch = box.log.tail.batches[at] if box is not None and at is not None else None
            if batch is not None and batch.dead < batch.count:
                found.append(changes.BatchKept(generation, batch))
        self.unkept.clear()
        return found

    # -- snapshots

    def held_lsns(self) -> list[int]:
        """Where the log has what is held."""
        return list(self._by_lsn)

    def mark_facts(self) -> list[changes.MarkFacts]:
        return [
            changes.MarkFacts(writer, mark.epoch, mark.query, mark.at_ms, mark.slots, mark.owner, mark.once)
            for writer, marks in self.marks.items()
            for mark in marks
        ]

    def restore(self, marks: Sequence[changes.MarkFacts]) -> None:
        """Takes over marks; chunks come back one by one, through `give_back`."""
        for fact in marks:
            mark = Mark(fact.epoch, fact.query, fact.at_ms, fact.slots, owner=fact.owner, once=fact.once)
            self._keep_mark(fact.writer, (*self.marks.get(fact.writer, ()), mark))

    def give_back(self, change: changes.TxnHeld, lsn: int) -> None:
        """A chunk that the snapshot names, from the frame that has it."""
        self._apply_held(change, lsn)

    def hydrated(self) -> None:
        """All chunks of the snapshot have been given back, in the order of the log."""
        ages = sorted(self.epochs, key=lambda key: self.epochs[key].put_ms)
        self._by_age = dict.fromkeys(ages)

    # -- for tests

    def check(self) -> None:
        chunks = [chunk for epoch in self.epochs.values() for chunk in epoch.chunks()]
        assert self.bytes == sum(chunk.cost for chunk in chunks), "HELD"
        assert sorted(self._by_lsn) == sorted(chunk.lsn for chunk in chunks), "HELD"
        assert list(self._by_lsn) == sorted(self._by_lsn), "HELD"
        assert set(self._by_age) == set(self.epochs), "HELD"
        by_writer = {(w, n): epoch for w, epochs in self._of_writer.items() for n, epoch in epochs.items()}
        owned = {epoch.owner for epoch in self.epochs.values() if epoch.owner is not None}
        assert self._bytes_of == {
            owner: sum(epoch.bytes for epoch in self.epochs.values() if epoch.owner == owner)
            for owner in owned
        }, "HELD"
        assert by_writer == self.epochs and all(self._of_writer.values()), "HELD"
        assert {*self._once, *self._old} <= set(self.marks), "MARKS"
        assert not set(self._once) & set(self._old), "MARKS"
        assert self._apart == sum(chunk.records for chunk in chunks if chunk.rows is not None), "HELD"
        for writer, number in self.epochs:
            for mark in self.marks.get(writer, ()):
                is_same = mark.query == self.epochs[writer, number].query and not mark.slots
                assert not is_same or mark.epoch < number, "OPEN"
