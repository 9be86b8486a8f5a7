"""State of transactions: pending rows of each writer's epochs, and marks of the committed epochs.

    writer ─► epoch ─► parcel ─► chunk       pending: in the log, without seqs, invisible
    writer ─► mark                           its last epoch that was committed here
    commit ─► chunk                          logged: its rows have seqs, and are being rendered

A commit names parcels. One change turns them into records, drops all other rows of the writer up to that
epoch, and sets the mark. So a commit is atomic across a crash, and a repeated commit finds the mark.

The change assigns the seqs of each box and does not need the rows. They have a place in their boxes from then
on, and are rendered from the log in steps (`commits.py`); a small commit is rendered at once.

Bounds: the rows are in the log; their index in memory (`chunks.py`) is bounded by `bytes_max`:
with the default, 200 million rows in chunks of a thousand rows for one box. Small transactions keep their
rows in memory too (`LOADED_MAX`). Marks: `MARKS_MAX`, `ONCE_MAX`.

Invariants (`check`)
- HELD: `bytes` is the sum over the chunks, and `_by_lsn` has every chunk.
- OPEN: every pending epoch is after the writer's mark.
- COMMITS: a commit stays in `commits` until all its rows are rendered.
- MARKS: every mark that expires is in `marks`, and in one of `_once` and `_old`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from shard.core import changes
from shard.core.context import Context
from shard.core.snapshot_facts import MarkFacts, ShardState
from shard.core.transactions import validation
from shard.core.transactions.chunks import Chunk
from shard.core.transactions.commits import Commit, Target
from shard.core.transactions.epochs import Epoch, add_pieces
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.model.slots import slot_of
from streams.protocol.payloads.packed import Rows

#: A transaction up to this size keeps its rows in memory, and its commit renders them at once: about four
#: milliseconds. All of them together keep at most `LOADED_MAX`.
SMALL_RECORDS, SMALL_BYTES = 4_000, 1 << 20
LOADED_MAX = 32 << 20

#: Writers that a shard remembers for good: about 300 bytes each, 30 MB. Their marks do not expire, because a
#: forgotten one could let rows be written twice. At the limit new writers are refused (`streams txn forget`).
MARKS_MAX = 100_000
#: Marks of writers that are used once: kept for as long as their job may repeat its commit, and at most this
#: many, the newest ones. Forgetting one early is safe: the rows of the job are gone, so a repeated commit
#: is refused, and no other job uses the name of the writer.
ONCE_MS, ONCE_MAX = 86_400_000, 100_000
#: Retention of marks from old logs, which did not record `once`.
OLD_MARK_MS = 90 * 86_400_000
#: Replaced attempts that one epoch remembers.
REPLACED_MAX = 16


class Mark(NamedTuple):
    epoch: int
    query: str
    at_ms: int
    #: Bitmap of the slots that it covers; empty: all slots of the shard.
    slots: bytes = b""
    lsn: int = 0
    #: As in `changes.TxnHeld`.
    owner: str | None = None
    #: As in `MarkFacts`.
    once: bool | None = None

    def covers(self, box: str) -> bool:
        slot = slot_of(box)
        return not self.slots or bool(self.slots[slot >> 3] >> (slot & 7) & 1)


class Txns:
    """The state of transactions. The command handlers are in `handlers.py`."""

    def __init__(self, context: Context, *, bytes_max: int, ttl_ms: int) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        self.bytes_max, self.ttl_ms = bytes_max, ttl_ms
        #: Bytes of the chunks of open epochs in the log.
        self.bytes = 0
        #: Memory of all chunks, without rows.
        self.memory = 0
        #: By key: bytes of its chunks in the log and in memory.
        self._bytes_of: dict[str, int] = {}
        self._memory_of: dict[str, int] = {}
        #: Bytes of the messages in memory.
        self._loaded_bytes = 0
        #: True if all messages stay in memory (`offline/repair.py`).
        self.keeps_rows = False
        self.epochs: dict[tuple[str, int], Epoch] = {}
        #: Open epochs by writer and number.
        self._of_writer: dict[str, dict[int, Epoch]] = {}
        #: By writer, oldest first. A writer has several only if merged shards had different marks.
        self.marks: dict[str, tuple[Mark, ...]] = {}
        #: Writers whose marks expire, oldest first: writers used once, and writers of old logs.
        self._once: dict[str, None] = {}
        self._old: dict[str, None] = {}
        #: Location of each chunk, in the order of the log.
        self._by_lsn: dict[int, tuple[str, int, str, int]] = {}
        #: Epochs, the one with the oldest last put first.
        self._by_age: dict[tuple[str, int], None] = {}
        #: By lsn, oldest first: commits with rows left to render.
        self.commits: dict[int, Commit] = {}
        #: By lsn: the commit and index of each chunk that a snapshot names.
        self._chunks_to_restore: dict[int, tuple[Commit, int]] = {}
        context.on_change(changes.TxnHeld, self._apply_held)
        context.on_change(changes.TxnKept, self._apply_held)
        context.on_change(changes.TxnCommitted, self._apply_committed, self._require_held)
        context.on_change(changes.TxnDropped, self._apply_dropped, self._require_parcels)
        context.on_change(changes.TxnForgotten, self._apply_forgotten)
        context.on_change(changes.TxnRendered, self._apply_rendered)

    def __repr__(self) -> str:
        return f"<Txns {len(self.epochs)} epochs, {self.bytes} B held, {len(self.marks)} marks>"

    # -- queries

    def find(self, writer: str, epoch: int) -> Epoch | None:
        return self.epochs.get((writer, epoch))

    def bytes_of(self, owner: str) -> int:
        """Return the bytes in the log of the open transactions of a key."""
        return self._bytes_of.get(owner, 0)

    def memory_of(self, owner: str) -> int:
        """Return the memory of the open transactions of a key."""
        return self._memory_of.get(owner, 0)

    def _count(self, owner: str | None, chunk: Chunk, sign: int) -> None:
        if owner is not None:
            for totals, cost in ((self._bytes_of, chunk.bytes), (self._memory_of, chunk.memory)):
                total = totals.get(owner, 0) + sign * cost
                if total:
                    totals[owner] = total
                else:
                    totals.pop(owner, None)

    def owners_of(self, writer: str) -> set[str]:
        """Return the keys that own a writer: those of its open epochs and of its marks. More than one only
        if merged shards had different owners."""
        owners = {epoch.owner for epoch in self._of_writer.get(writer, {}).values()}
        owners |= {mark.owner for mark in self.marks.get(writer, ())}
        return {owner for owner in owners if owner is not None}

    def is_small(self, epoch: Epoch) -> bool:
        """Return True if all its rows are in memory and few enough to render at once."""
        return epoch.records <= SMALL_RECORDS and epoch.loaded_bytes == epoch.bytes

    @property
    def permanent_marks(self) -> int:
        """Number of writers whose marks do not expire."""
        return len(self.marks) - len(self._once) - len(self._old)

    def of_writer(self, writer: str) -> dict[int, Epoch]:
        """Return the open epochs of a writer by number."""
        return dict(self._of_writer.get(writer, {}))

    def epochs_of_others(self, writer: str, query: str) -> dict[int, Epoch]:
        """Return the open epochs of a writer that belong to other queries."""
        epochs = self._of_writer.get(writer, {})
        return {number: epoch for number, epoch in epochs.items() if epoch.query != query}

    @property
    def oldest_lsn(self) -> int | None:
        """The oldest log frame that a chunk or a commit still needs."""
        oldest = [commit.oldest_lsn for commit in self.commits.values()]
        return min(oldest + list(islice(self._by_lsn, 1)), default=None)

    def next_expiry_ms(self) -> int | None:
        oldest = next(iter(self._by_age), None)
        return None if oldest is None else self.epochs[oldest].put_ms + self.ttl_ms

    def find_expired(self, now_ms: int) -> tuple[str, int] | None:
        """Return an epoch that got no put within the time to live."""
        when = self.next_expiry_ms()
        return next(iter(self._by_age)) if when is not None and when <= now_ms else None

    def to_keep(self, pinned_lsn: int) -> changes.TxnKept | None:
        """Return the oldest chunk to log again, if it is in memory and keeps the log up to `pinned_lsn`."""
        lsn = next(iter(self._by_lsn), None)
        if lsn is None or lsn > pinned_lsn:
            return None
        writer, number, parcel, at = self._by_lsn[lsn]
        epoch = self.epochs[writer, number]
        chunk = epoch.parcels[parcel][at]
        if chunk.message is None:
            return None
        return changes.TxnKept(
            writer,
            number,
            epoch.query,
            parcel,
            at,
            chunk.at_ms,
            *chunk.message,
            epoch.owner,
            epoch.takes_over,
            epoch.attempt,
            epoch.replaced_attempts,
        )

    def remember(self, chunk: Chunk, rows: list[Rows]) -> None:
        """Cache the unpacked rows of a chunk, so that its commit need not unpack them."""
        if chunk.message is not None:
            chunk.rows = rows

    def _keep_rows(self, epoch: Epoch, chunk: Chunk) -> None:
        """Keep the rows of a new chunk in memory if all rows of its epoch fit."""
        is_small = epoch.records <= SMALL_RECORDS and epoch.bytes <= SMALL_BYTES
        is_small = is_small and epoch.bytes == epoch.loaded_bytes + chunk.bytes  # else some are gone already
        if self.keeps_rows or (is_small and self._loaded_bytes + chunk.bytes <= LOADED_MAX):
            epoch.loaded_bytes += chunk.bytes
            self._loaded_bytes += chunk.bytes
            chunk.is_counted = True
            return
        chunk.forget()
        self._forget_rows(epoch)

    def _forget_rows(self, epoch: Epoch) -> None:
        if epoch.loaded_bytes:
            for chunk in epoch.chunks():
                if chunk.is_counted:
                    chunk.forget()
            self._loaded_bytes -= epoch.loaded_bytes
            epoch.loaded_bytes = 0

    def _forget(self, epoch: Epoch, chunk: Chunk) -> None:
        """Remove a chunk of an epoch from the sums and indexes."""
        del self._by_lsn[chunk.lsn]
        self.bytes -= chunk.bytes
        self.memory -= chunk.memory
        epoch.bytes -= chunk.bytes
        epoch.records -= chunk.records
        epoch.totals = None
        if chunk.is_counted:
            chunk.is_counted = False
            epoch.loaded_bytes -= chunk.bytes
            self._loaded_bytes -= chunk.bytes
        self._count(epoch.owner, chunk, -1)

    # -- applying

    def _apply_held(self, change: changes.TxnHeld, lsn: int) -> None:
        chunk = Chunk(change.packed, change.body, change.at_ms, lsn)
        epoch = self._open(change.writer, change.epoch, change.query, change.owner)
        epoch.takes_over = change.takes_over
        epoch.attempt, epoch.replaced_attempts = change.attempt, change.replaced
        self._hold(epoch, change.writer, change.epoch, change.parcel, change.chunk, chunk)

    def _open(self, writer: str, number: int, query: str, owner: str | None) -> Epoch:
        epoch = self.epochs.get((writer, number))
        if epoch is None:
            epoch = self.epochs[writer, number] = Epoch(query, owner)
            self._of_writer.setdefault(writer, {})[number] = epoch
        if epoch.owner != owner:
            for chunk in epoch.chunks():
                self._count(epoch.owner, chunk, -1)
                self._count(owner, chunk, 1)
        epoch.query, epoch.owner = query, owner
        return epoch

    def _hold(self, epoch: Epoch, writer: str, number: int, parcel: str, at: int, chunk: Chunk) -> None:
        key = (writer, number)
        old = epoch.parcels.setdefault(parcel, {}).get(at)
        if old is not None:
            self._forget(epoch, old)
        epoch.parcels[parcel][at] = chunk
        self._by_lsn[chunk.lsn] = (writer, number, parcel, at)
        self.bytes += chunk.bytes
        self.memory += chunk.memory
        epoch.bytes += chunk.bytes
        epoch.records += chunk.records
        if epoch.totals is not None:
            add_pieces(epoch.totals, chunk)
        self._count(epoch.owner, chunk, 1)
        self._keep_rows(epoch, chunk)
        if old is None:
            epoch.put_ms = max(epoch.put_ms, chunk.at_ms)
            self._by_age.pop(key, None)
            self._by_age[key] = None

    def _apply_committed(self, change: changes.TxnCommitted, lsn: int) -> None:
        if change.parts:
            self._begin(change, lsn)
        for number in list(self._of_writer.get(change.writer, ())):
            if number <= change.epoch:
                self._drop(change.writer, number, list(self.epochs[change.writer, number].parcels))
        mark = Mark(change.epoch, change.query, change.at_ms, lsn=lsn, owner=change.owner, once=change.once)
        self.note_mark(change.writer, mark)
        self._forget_marks(change.at_ms)

    def _require_held(self, change: changes.TxnCommitted) -> None:
        if change.parts:
            epoch = self.find(change.writer, change.epoch)
            validation.require_commit(change, epoch, self._context.generations)

    def _require_parcels(self, change: changes.TxnDropped) -> None:
        validation.require_parcels(change, self.find(change.writer, change.epoch))

    def _begin(self, change: changes.TxnCommitted, lsn: int) -> None:
        """Start a commit: add the places of its rows to their boxes."""
        context = self._context
        epoch = self.epochs[change.writer, change.epoch]
        chunks = list(epoch.chunks_of(change.parcels))
        targets = {part.box: Target(part.generation, part.mode, part.uncapped) for part in change.parts}
        rows_left = {part.box: sum(part.counts) for part in change.parts}
        commit = Commit(change, lsn, targets, chunks, rows_left)
        for part in change.parts:
            first_ts, last_ts = validation.times_of(part, change.at_ms)
            rows = UnrenderedRows(
                generation=part.generation,
                commit_lsn=lsn,
                first_seq=part.first_seq,
                count=sum(part.counts),
                size=part.size,
                first_ts=first_ts,
                last_ts=last_ts,
            )
            cuts = (0, part.evict_before_seq, 0, part.evict_cut_bytes, part.evicted_ts)
            context.box_appliers.apply_append(
                changes.BatchAppended(part.generation, rows, change.at_ms, None, *cuts), lsn
            )
            commit.add_place(part.box, rows)
            if context.uploading.is_on and context.generations[part.generation].is_object:
                commit.to_ship = change
                commit.objects_open += 1
        self.commits[lsn] = commit
        self.memory += sum(chunk.memory for chunk in chunks)

    def on_rows_rendered(self, rows: UnrenderedRows, lsn: int) -> None:
        """Note that some rows of a commit are logged as a batch."""
        commit = self.commits.get(rows.commit_lsn)
        if commit is None or rows.count:
            return
        commit.open -= 1
        if commit.to_ship is not None and self._context.generations[rows.generation].is_object:
            commit.objects_open -= 1
            if not commit.objects_open:
                self._ship(commit, commit.to_ship, lsn)
        if not commit.open:
            self._end(commit, lsn)

    def _ship(self, commit: Commit, change: changes.TxnCommitted, lsn: int) -> None:
        """Ship the changes of a commit to object boxes, all under one lsn."""
        context, uploading = self._context, self._context.uploading
        commit.to_ship = None
        for part in change.parts:
            box = context.generations.get(part.generation)
            if box is None or not box.is_object:
                continue
            tail, cuts = box.log.tail, (0, part.evict_before_seq, 0, part.evict_cut_bytes, part.evicted_ts)
            last_seq = part.first_seq + sum(part.counts) - 1
            for batch in tail.batches[tail.from_seq(part.first_seq) :]:
                if batch.last_seq > last_seq:
                    break
                uploading.ship(changes.BatchAppended(part.generation, batch, change.at_ms, None, *cuts), lsn)
                cuts = (0, 0, 0, 0, 0)
            uploading.stage_upto(box, lsn, last_seq)
        # Ship the commit without parts: its batches were shipped above.
        uploading.ship(msgspec.structs.replace(change, parcels=[], parts=[]), lsn)
        marks = self.marks.get(change.writer, ())
        self.marks[change.writer] = tuple(
            mark._replace(lsn=lsn) if mark.lsn == commit.lsn else mark for mark in marks
        )

    def _apply_rendered(self, change: changes.TxnRendered, lsn: int) -> None:
        commit = self.commits.get(change.commit_lsn)
        if commit is not None:
            for chunk in commit.drop_chunks(change.chunks):
                self.memory -= chunk.memory
            if not commit.chunks:
                self._end(commit, lsn)

    def give_up_commits(self) -> None:
        """End all open commits, whose remaining rows are lost (`offline/repair.py`)."""
        for commit in list(self.commits.values()):
            commit.to_ship = None
            self._end(commit, 0)

    def _end(self, commit: Commit, lsn: int) -> None:
        if commit.to_ship is not None:  # an object box was deleted with its rows
            self._ship(commit, commit.to_ship, lsn)
        self.memory -= sum(chunk.memory for chunk in commit.chunks)
        del self.commits[commit.lsn]

    def rewound(self, now_ms: int) -> None:
        """Clamp times to `now_ms` after the clock went back."""
        for epoch in self.epochs.values():
            epoch.put_ms = min(epoch.put_ms, now_ms)

    def note_mark(self, writer: str, mark: Mark) -> None:
        # The mark is the newest. Keep marks of boxes that came from a shard which was ahead of this one.
        ahead = [
            earlier
            for earlier in self.marks.pop(writer, ())
            if earlier.slots and earlier.epoch > mark.epoch and earlier.query == mark.query
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
        """Forget expired marks."""
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

    # -- snapshots

    def mark_facts(self) -> list[MarkFacts]:
        return [
            MarkFacts(writer, mark.epoch, mark.query, mark.at_ms, mark.slots, mark.owner, mark.once)
            for writer, marks in self.marks.items()
            for mark in marks
        ]

    def _take_snapshot(self, state: ShardState) -> None:
        of_commits = [chunk.lsn for commit in self.commits.values() for chunk in commit.chunks]
        state.held = [*self._by_lsn, *of_commits]
        state.marks = self.mark_facts()
        state.commits = [commit.facts() for commit in self.commits.values()]

    def _restore(self, state: ShardState) -> None:
        """Restore marks and commits. Recovery restores the chunks one by one through `give_back`."""
        for facts in state.commits:
            commit = self.commits[facts.lsn] = Commit.from_facts(facts)
            for at, lsn in enumerate(facts.chunks):
                self._chunks_to_restore[lsn] = (commit, at)
        for fact in state.marks:
            mark = Mark(fact.epoch, fact.query, fact.at_ms, fact.slots, owner=fact.owner, once=fact.once)
            self._keep_mark(fact.writer, (*self.marks.get(fact.writer, ()), mark))

    def give_back(self, change: changes.TxnHeld, lsn: int) -> None:
        """Restore a chunk that the snapshot names from its log frame."""
        commit, at = self._chunks_to_restore.pop(lsn, (None, 0))
        if commit is None:
            self._apply_held(change, lsn)
            return
        chunk = Chunk(change.packed, change.body, change.at_ms, lsn)
        if not self.keeps_rows:
            chunk.forget()
        commit.give_back(at, chunk)
        self.memory += chunk.memory

    def finish_restore(self) -> None:
        """Finish the restore: all chunks of the snapshot are restored, in the order of the log."""
        ages = sorted(self.epochs, key=lambda key: self.epochs[key].put_ms)
        self._by_age = dict.fromkeys(ages)
        self._by_lsn = dict(sorted(self._by_lsn.items()))
        if not self.commits:
            return
        for box in self._context.boxes.values():
            for rows in box.log.tail.unrendered_rows():
                commit = self.commits[rows.commit_lsn]
                commit.add_place(box.name, rows)
                commit.objects_open += box.is_object
        for commit in self.commits.values():
            commit.finish_restore()

    # -- for tests

    def check(self) -> None:
        chunks = [chunk for epoch in self.epochs.values() for chunk in epoch.chunks()]
        assert self.bytes == sum(chunk.bytes for chunk in chunks), "HELD"
        for epoch in self.epochs.values():
            own = list(epoch.chunks())
            assert epoch.bytes == sum(chunk.bytes for chunk in own), "HELD"
            assert epoch.records == sum(chunk.records for chunk in own), "HELD"
            totals, epoch.totals = epoch.totals, None
            assert totals is None or totals == epoch.totals_of(list(epoch.parcels)), "HELD"
            loaded_bytes = sum(chunk.bytes for chunk in own if chunk.is_counted)
            assert epoch.loaded_bytes == loaded_bytes, "HELD"
        assert self._loaded_bytes == sum(epoch.loaded_bytes for epoch in self.epochs.values()), "HELD"
        commit_chunks = [chunk for commit in self.commits.values() for chunk in commit.chunks]
        assert self.memory == sum(chunk.memory for chunk in chunks + commit_chunks), "HELD"
        for commit in self.commits.values():
            assert commit.open and commit.chunks, "COMMITS"
        assert sorted(self._by_lsn) == sorted(chunk.lsn for chunk in chunks), "HELD"
        assert list(self._by_lsn) == sorted(self._by_lsn), "HELD"
        assert set(self._by_age) == set(self.epochs), "HELD"
        by_writer = {(w, n): epoch for w, epochs in self._of_writer.items() for n, epoch in epochs.items()}
        owners = {epoch.owner for epoch in self.epochs.values() if epoch.owner is not None}
        assert self._bytes_of == {
            owner: sum(epoch.bytes for epoch in self.epochs.values() if epoch.owner == owner)
            for owner in owners
        }, "HELD"
        assert self._memory_of == {
            owner: sum(
                chunk.memory
                for epoch in self.epochs.values()
                if epoch.owner == owner
                for chunk in epoch.chunks()
            )
            for owner in owners
        }, "HELD"
        assert by_writer == self.epochs and all(self._of_writer.values()), "HELD"
        assert {*self._once, *self._old} <= set(self.marks), "MARKS"
        assert not set(self._once) & set(self._old), "MARKS"
        for writer, number in self.epochs:
            for mark in self.marks.get(writer, ()):
                is_same = mark.query == self.epochs[writer, number].query and not mark.slots
                assert not is_same or mark.epoch < number, "OPEN"
