"""Makes the folder of a damaged shard whole: cuts what is damaged, invents nothing, tells what is lost.

    damaged folder ──read, as far as it goes──► machine ──what is lost: holes──► ShardBuilder ──► new folder

| damaged                    | what is done                                                               |
|----------------------------|----------------------------------------------------------------------------|
| a snapshot                 | the one before it is used, with the log since; or the log alone, from lsn 1 |
| a frame of the log         | passed over; what is whole behind it counts (below)                        |
| a batch in a segment       | its live records are lost; the segment is written anew without it          |
| tags of a segment          | the segment is written anew; nothing is lost                               |
| the index of a segment     | that of its stub is used, or of the copy in the cold store; without any all |
|                            | its live records are lost                                                  |
| a stub                     | it is written anew from the copy in the cold store; nothing is lost        |
| a batch in the cold store  | its live records are lost; the rest of the segment is written anew, here,  |
|                            | and the server drops the copy in the cold store                            |

A cold store that does not answer, or is not named, proves nothing about what is in it: then nothing is given
up because of it, and the repair is refused.

A server drops a copy from the cold store when it finds a stub that nothing names. So the new folder gets such
stubs: of the copies that were waiting to be dropped, unless a damaged log may have named them, and of the
segments that the repair gives up. If the store has no copy of such a segment, its stub stays behind: the
store may be the wrong one, and the copy in the right one must survive that mistake.

Frames behind a damaged one are applied by the machine like any other, lsns aside. What tells that one of a
box is missing: a batch that does not begin at the next seq. The seqs between are lost, and told. A box of
which no later batch is found may have lost records too, and its seqs must not be given to others: as many
seqs as would fit into the damaged bytes become a hole, unless the bytes say whose they were. What else a
damaged frame may have held (a delete, a config, a box created or deleted) is not known, and stays undone.

What a repaired shard has lost may be known to others: copies of its records, dead letters, streams. So the
shards are compared as after a restore (`reconcile.py`), and one that has to be corrected is built anew too.

Rules of the file
- The damaged folder is only read.
- Numbers that changes carry are not believed behind damage: what is live is measured again, from the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shard.core import changes
from shard.core.boxes import offline_edits
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.changes import BatchAppended, BatchKept, BoxFacts, Change, SegmentFacts, ShardState
from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.core.transactions.commits import render_step
from shard.core.transactions.state import Mark
from shard.core.transactions.unrendered import UnrenderedRows
from shard.offline.lost_ranges import lost_ranges, uncovered
from shard.offline.reconcile import Corrections, Made, Reconciler
from shard.offline.verify import name_of
from shard.recovery.page_cache import has_failed
from shard.storage import frames, segments
from shard.storage.files import Corrupt, DiskLike
from shard.storage.salvage import Gap, salvage
from shard.storage.segments.index import SegmentIndex
from shard.storage.segments.store import Name, SegmentStore, Unreachable, segment_of
from shard.storage.snapshot import Snapshots
from shard.storage.sources import FileSource, Source
from shard.storage.wal import FILE_BYTES, Frame, Wal
from shard.transfer.boxes import ShardBuilder, end_life, parts_of, read_shard, servers_of
from streams.protocol.model.records import Batch

if TYPE_CHECKING:
    from shard.storage.cold import ColdStore

#: A record takes at least this in the log: `{"$seq":1,"$ts":1,"data":0}`.
_RECORD_BYTES_MIN = 24
#: Where no bound is known, this many seqs are skipped: as many as a disk box reserves.
_SEQS_SKIPPED_MAX = 131_072


class CannotRepair(Exception):
    """Too much is damaged: what is left proves nothing."""


class Loss(msgspec.Struct, frozen=True):
    """Live records first_seq..last_seq of a box that are lost, or may be."""

    box: str
    generation: int
    first_seq: int
    last_seq: int
    why: str


class Repaired(NamedTuple):
    losses: list[Loss]
    #: What was done beside that, for people.
    notes: list[str]
    boxes: int
    records: int


def repair_shard(
    disk: DiskLike,
    source: str,
    target: str,
    *,
    shard: int,
    boot_id: str,
    now_ms: int,
    cold: ColdStore | None = None,
    looks_at_cold: bool = False,
    server: str = "",
    file_bytes: int = FILE_BYTES,
) -> Repaired:
    """Builds `target`, a folder that is not there yet, from what is whole in `source`. `server` is the number
    of the data directory, under which `cold` has its segments. With `looks_at_cold` every byte of them is
    read, too."""
    store = SegmentStore(disk, f"{source}/segments", cold, server=server)
    patient = _Patient(disk, source, shard, store, looks_at_cold=looks_at_cold)
    patient.recover()
    builder = ShardBuilder(disk, target, file_bytes=file_bytes)
    patient.mend(SegmentStore(disk, builder.segments))
    machine = patient.machine
    for box in machine.boxes.values():
        offline_edits.settle_rest(box)
    survived = not has_failed(disk, source)
    end_life(machine, boot_id=boot_id, now_ms=now_ms, cache_survived=survived)
    parts = parts_of(machine)
    for facts in parts.state.boxes:
        builder.bring(f"{source}/segments", patient.brought(facts))
        builder.add(facts, parts.batches_of(facts))
    for index in patient.stubs.values():
        segments.write_stub(disk, builder.segments, index)
    for stub in patient.dropped_stubs:
        builder.bring_stub(f"{source}/segments", stub)
    builder.add_not_recreated(parts.state.not_recreated)
    builder.add_routers(parts.state)
    builder.add_marks(parts.state.marks)
    builder.add_follows(servers_of(parts.state))
    builder.finish(last_generation=machine.last_generation, boot_id=boot_id, now_ms=now_ms)
    builder.check()
    records = sum(facts.live_count for facts in parts.state.boxes)
    return Repaired(patient.losses, patient.notes, len(parts.state.boxes), records)


def compare_shards(
    disk: DiskLike,
    folders: Sequence[str],
    stores: Sequence[SegmentStore],
    owner_of: Callable[[str], int],
    *,
    now_ms: int,
) -> tuple[Corrections, list[Made]]:
    """Finds out what the shards do not agree about. Returns the changes of each that make them agree; nothing
    is written."""
    machines = [
        read_shard(disk, folder, shard=shard, open_segment=store.open)
        for shard, (folder, store) in enumerate(zip(folders, stores, strict=True))
    ]
    reconciler = Reconciler(machines, stores, owner_of, cuts={}, younger=set(), until_ms=None, now_ms=now_ms)
    return reconciler.run(), reconciler.made


def _begins_at(change: BatchAppended) -> int:
    """The first seq that a write takes: copies behind a loss of their source begin with the hole that tells
    of it."""
    is_behind_loss = isinstance(change, changes.BatchForwarded) and change.lost > 0
    return change.batch.first_seq - is_behind_loss


class _Patient:
    def __init__(
        self, disk: DiskLike, source: str, shard: int, store: SegmentStore, *, looks_at_cold: bool
    ) -> None:
        self._disk = disk
        self._source = source
        self._segments = f"{source}/segments"
        self._store = store
        self._looks_at_cold = looks_at_cold
        self.machine = Machine(shard=shard)
        self.machine.txns.keeps_rows = True
        self.losses: list[Loss] = []
        self.notes: list[str] = []
        #: Boxes of which something is lost, or whose numbers may not be right: to be measured again.
        self._wounded: dict[int, Box] = {}
        #: By generation and serial: which batches of a segment cannot be read.
        self._lost: dict[int, dict[int, set[int]]] = {}
        self._indexes: dict[Name, SegmentIndex | None] = {}
        #: Segments that were written anew, into the new folder.
        self._new: set[Name] = set()
        #: Segments in the cold store whose stub is to be written anew: their indexes.
        self.stubs: dict[Name, SegmentIndex] = {}
        #: Stubs that nothing names any more: they make the server drop the copies in the cold store.
        self.dropped_stubs: list[str] = []
        #: False if a change behind the snapshot is missing, so that the machine may not know every segment.
        self._knows_all_segments = True
        #: Boxes that may have lost records behind their head: by generation, in how many bytes.
        self._suspects: dict[int, int] = {}
        #: The lsns of what the snapshot says is held for transactions.
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"<_Patient {self._source}: {self.machine!r}, {len(self.losses)} losses>"

    # -- reading what is there

    def recover(self) -> None:
        state = self._newest_state()
        snapshot_lsn = state.lsn if state is not None else 0
        facts_of = {facts.generation: facts for facts in state.boxes} if state is not None else {}
        wanted: dict[int, Box] = {}
        missing: set[tuple[int, int]] = set()
        if state is not None:
            named = self.machine.restore(state)
            wanted = dict(named.batches)
            self._held = named.held
            missing = set(self._attach(named.segments))
        self._hydrate_kept()
        hydrating = True
        for found in salvage(self._disk, f"{self._source}/wal"):
            if isinstance(found, Frame) and found.lsn <= snapshot_lsn:
                self._hydrate(wanted, found)
                continue
            if hydrating and (isinstance(found, Frame) or found.first_lsn > snapshot_lsn):
                hydrating = False
                self._settle(facts_of, wanted, missing)
            if isinstance(found, Gap):
                self.notes.append(f"{found.path} at byte {found.offset}: {found.reason}")
                if found.last_lsn > snapshot_lsn:
                    self._pass_over(found)
            else:
                self._apply(found)
        if hydrating:
            self._settle(facts_of, wanted, missing)
        self._lose_unrendered()
        self._skip_seqs()
        self.machine.recovered(self.machine.lsn)
        if self._knows_all_segments:
            self._take_unnamed_stubs(missing)

    def _take_unnamed_stubs(self, missing: set[tuple[int, int]]) -> None:
        """Takes along the stubs of copies that were waiting to be dropped. Their numbers are not given again:
        a segment that is written anew must not get the name of such a stub."""
        named = {Name.of(segment) for segment in self.machine.segments()}
        for stub in segments.list_stubs(self._disk, self._segments):
            name = name_of(stub)
            if name in named or name in self.stubs or (name.generation, name.serial) in missing:
                continue
            self.dropped_stubs.append(stub)
            box = self.machine.generations.get(name.generation)
            if box is not None:
                box.last_serial = max(box.last_serial, name.serial)

    def _newest_state(self) -> ShardState | None:
        try:
            loaded = Snapshots(self._disk, f"{self._source}/snapshot").load_newest()
        except Corrupt as damage:
            first = next(iter(salvage(self._disk, f"{self._source}/wal")), None)
            if isinstance(first, Frame) and first.lsn == 1:
                self.notes.append(f"{damage.path}: no snapshot is whole; the log is, from its begin")
                return None
            raise CannotRepair(
                f"{damage}: no snapshot of this shard is whole, and its log does not reach back to the begin"
            ) from damage
        if loaded is None:
            return None
        self.notes += [
            f"{path}: the snapshot is damaged, the one before it was used" for path in loaded.skipped
        ]
        return frames.decode_state(loaded.content)

    def _attach(self, named: list[tuple[Box, SegmentFacts]]) -> Iterator[tuple[int, int]]:
        """Gives back segments that can be opened. Yields (generation, serial) of the others."""
        for box, facts in named:
            name = Name(box.generation, facts.first_seq, facts.serial)
            index = self._index(name)
            if index is None:
                self._give_up(name)
                yield box.generation, facts.serial
                continue
            segment = segment_of(index)
            segment.is_cold = not self._disk.exists(f"{self._segments}/{name.file}")
            box.log.attach(segment, facts.dead)

    def _index(self, name: Name) -> SegmentIndex | None:
        if name not in self._indexes:
            self._indexes[name] = self._read_index(name)
        return self._indexes[name]

    def _read_index(self, name: Name) -> SegmentIndex | None:
        """From the file, or else from the stub. A file whose index is damaged has to be written anew."""
        path = f"{self._segments}/{name.file}"
        try:
            return segments.open_segment(FileSource(self._disk, path))
        except FileNotFoundError:
            reason = "the segment is missing"
        except Corrupt as damage:
            reason = damage.reason
        used = "the index of its stub was used"
        try:
            index = segments.open_stub(FileSource(self._disk, f"{self._segments}/{name.stub}"))
        except FileNotFoundError:
            self.notes.append(f"{path}: {reason}")
            return None
        except Corrupt as damage:
            reason = f"{reason}; its stub: {damage.reason}"
            found = self._index_in_cold(name, reason)
            if found is None:
                return None
            index, used = found, "the index of its copy in the cold store was used"
            if not self._disk.exists(path):
                self.stubs[name] = index
                self.notes.append(f"{damage.path}: {damage.reason}; written anew from the cold store")
        if self._disk.exists(path):
            self._lost.setdefault(name.generation, {}).setdefault(name.serial, set())
            self.notes.append(f"{path}: {reason}; {used}")
        return index

    def _index_in_cold(self, name: Name, reason: str) -> SegmentIndex | None:
        """The index of the copy in the cold store; None if the store has no copy whose index is whole."""
        try:
            return segments.open_segment(self._store.source_in_cold(name))
        except Unreachable as trouble:
            raise CannotRepair(
                f"{self._segments}/{name.file}: {reason}. Its copy in the cold store may be whole, and "
                f"cannot be read ({trouble}). Repeat this when the store answers, and name it with "
                "--cold-dir. If it is gone for good, name an empty folder in its place"
            ) from trouble
        except Corrupt as damage:
            self.notes.append(f"{self._segments}/{name.file}: {reason}; in the cold store: {damage.reason}")
            return None

    def _hydrate(self, wanted: dict[int, Box], frame: Frame) -> None:
        box = wanted.pop(frame.lsn, None)
        if frame.lsn in self._held:  # one that is damaged is missed when its transaction is committed
            chunk = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(chunk, changes.TxnHeld)
            self.machine.txns.give_back(chunk, frame.lsn)
        if box is not None:
            change = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(change, BatchAppended | BatchKept)
            change.batch.lsn = frame.lsn
            box.log.hydrate(change.batch)

    def _hydrate_kept(self) -> None:
        """Gives back chunks from files of the log that were kept for them."""
        kept = Wal(self._disk, f"{self._source}/wal").scan_kept()
        try:
            for frame in kept:
                self._hydrate({}, frame)
        except Corrupt as damage:
            self.notes.append(f"{damage.path}: {damage.reason}; rows that were held in it may be lost")

    def _settle(
        self, facts_of: dict[int, BoxFacts], wanted: dict[int, Box], missing: set[tuple[int, int]]
    ) -> None:
        """All that the snapshot names and that is whole has been given back."""
        for generation in {box.generation for box in wanted.values()} | {each for each, _ in missing}:
            box, facts = self.machine.generations[generation], facts_of[generation]
            serials = {serial for each, serial in missing if each == generation}
            self._lose(box, lost_ranges(box, facts, serials), "a segment or a frame of the log is damaged")
            offline_edits.recount(box.log)
        self.machine.hydrated()
        self._render_commits()

    # -- behind the snapshot

    def _pass_over(self, gap: Gap) -> None:
        """Frames are missing. Whatever they changed, what the next ones say is not to be relied on."""
        self._knows_all_segments = False
        self._wounded.update(self.machine.generations)
        guess = gap.guess if gap.first_lsn == gap.last_lsn else None
        if guess is None:
            self._suspect(self.machine.generations, gap.bytes)
        elif guess.kind in frames.GIVES_SEQS:
            self._lose_claimed(frames.claimed(guess.kind, guess.content), gap.bytes)
        self.machine.lsn = gap.last_lsn

    def _lose_claimed(self, claimed: frames.Claimed | None, size: int) -> None:
        """One frame is damaged, and holds a batch, or gives seqs in another way. A flipped bit in its front
        has been put right (`storage/salvage.py`), so a generation there is believed; how many records there
        were only if the batch fits where its box stands and says so twice."""
        own = None if claimed is None else self.machine.generations.get(claimed.generation)
        if claimed is None or own is None:
            self._suspect(self.machine.generations, size)
        elif claimed.is_kept and claimed.begins_at <= own.log.head_seq:
            pass  # it is there from before, or was to be stored (`_make_way`)
        elif (
            claimed.begins_at == own.log.head_seq + 1
            and claimed.is_count_sure
            and claimed.records <= size // _RECORD_BYTES_MIN
        ):
            self._lose_next(own, claimed.records)
        elif claimed.begins_at == own.log.head_seq + 1 or claimed.is_generation_sure:
            self._suspect({own.generation: own}, size)
        else:
            self._suspect(self.machine.generations, size)

    def _lose_next(self, box: Box, records: int) -> None:
        head_seq = box.log.head_seq
        self._lose(box, [(head_seq + 1, head_seq + records)], "a frame of the log is damaged")
        box.log.head_seq = head_seq + records

    def _suspect(self, generations: Mapping[int, Box], size: int) -> None:
        """Records of these boxes may have been among so many bytes that are damaged, until a later batch of
        the box tells where it stood."""
        for generation in generations:
            self._suspects[generation] = max(size, self._suspects.get(generation, 0))

    def _apply(self, frame: Frame) -> None:
        try:
            change = frames.decode(frame.kind, frame.version, frame.content)
        except frames.UnknownFrame as error:
            raise CannotRepair(f"{self._source}/wal: {error}; use the version that wrote it") from error
        try:
            change = self._make_way(change)
            self.machine.lsn = frame.lsn - 1
            self.machine.apply(change, frame.lsn)
            if isinstance(change, changes.TxnCommitted):
                self._render_commits()
        except DoesNotApply:
            self._apply_what_can_be(change)
        self.machine.lsn = frame.lsn

    def _require(self, generation: int) -> Box:
        box = self.machine.generations.get(generation)
        if box is None:
            raise DoesNotApply(f"there is no box of generation {generation}")
        return box

    def _make_way(self, change: Change) -> Change:
        """Says what missing frames must have said. Returns what the change is, now that they are missing."""
        if isinstance(change, changes.BoxCreated):
            old = self.machine.boxes.get(change.name)
            if old is not None and not old.is_memory:  # it was deleted in between
                self.machine.apply(changes.BoxDeleted(old.generation), 0)
        elif isinstance(change, BatchAppended):
            self._lose_before(change.generation, _begins_at(change))
        elif isinstance(change, BatchKept):
            box = self._require(change.generation)
            self._pass_unrendered(box, change.batch.first_seq)
            is_new = change.batch.first_seq > box.log.head_seq  # by a transaction of which a frame is missing
            if is_new or (box.is_memory and not box.log.awaited):  # or it was to be stored: see below
                self._lose_before(change.generation, change.batch.first_seq)
                return BatchAppended(change.generation, change.batch, box.last_append_ms)
        elif isinstance(change, changes.BoxConfigured):
            box = self._require(change.generation)
            if box.log.awaited:  # what it had in memory was stored, and not all of that is whole
                self._lose(box, uncovered(box), "a frame of the log is damaged")
                offline_edits.recount(box.log)
        elif isinstance(change, changes.SeqsLost):
            self._lose_before(change.generation, change.first_seq)
        elif isinstance(change, changes.SegmentSealed):
            self._seal_before(change)
        elif isinstance(change, changes.RecordsDeleted):
            # Batch by batch, so that it fails at once if the segments are not those that it was made for.
            return msgspec.structs.replace(change, groups=())
        elif isinstance(change, changes.TxnCommitted):
            for part in change.parts:
                self._lose_before(part.generation, part.first_seq)
        return change

    def _render_commits(self) -> None:
        """Renders the rows of commits of which all chunks are whole. Others have what the frames behind them
        hold."""
        for commit in list(self.machine.txns.commits.values()):
            if all(commit.left(box) >= rows.count for box, rows in commit.places.items()):
                step = commit.plan(1 << 62)
                batches = list(render_step(step, [chunk.taken_apart() for chunk in step.chunks]))
                self.machine.keep_rendered(commit, batches, len(step.chunks))

    def _pass_unrendered(self, box: Box, first_seq: int) -> None:
        """The rows of a commit before the batch that is found next are lost."""
        at = box.log.tail.at(first_seq)
        rows = None if at is None else box.log.tail.batches[at]
        if isinstance(rows, UnrenderedRows) and rows.first_seq < first_seq:
            self._lose(box, [(rows.first_seq, first_seq - 1)], "rows of a transaction are damaged")
            rows.drop(first_seq - rows.first_seq)
            offline_edits.recount(box.log)

    def _lose_unrendered(self) -> None:
        """What was not rendered by now is damaged."""
        for box in self.machine.boxes.values():
            for rows in box.log.tail.unrendered():
                self._lose(box, [(rows.first_seq, rows.last_seq)], "rows of a transaction are damaged")
                box.log.tail.remove(rows)
                offline_edits.recount(box.log)
        self.machine.txns.give_up_commits()

    def _lose_before(self, generation: int, first_seq: int) -> None:
        """Between the head of a box and its next batch there is nothing, unless that is lost."""
        self._suspects.pop(generation, None)
        box = self._require(generation)
        head_seq = box.log.head_seq
        if first_seq > head_seq + 1:
            self._lose(box, [(head_seq + 1, first_seq - 1)], "a frame of the log is damaged")
            box.log.head_seq = first_seq - 1

    def _seal_before(self, change: changes.SegmentSealed) -> None:
        """Batches are sealed in order. If older ones are not, the frame that said so is missing, and their
        file is there: it holds what they hold. If it is not, they would be taken for sealed: lost."""
        box = self._require(change.generation)
        log = box.log
        first_seq = Segment.from_bytes(change.generation, change.serial, change.columns).first_seq
        while (oldest := log.tail.oldest) is not None and oldest.first_seq < first_seq:
            found = self._segment_of(change.generation, log.sealed_seq, oldest.first_seq, first_seq)
            if found is None:
                older = [batch for batch in log.tail if batch.first_seq < first_seq]
                self._lose(box, [(each.first_seq, each.last_seq) for each in older], "its segment is missing")
                return
            sealed = changes.SegmentSealed(change.generation, found.serial, found.to_bytes())
            self.machine.apply(sealed, 0)

    def _segment_of(self, generation: int, sealed_seq: int, seq: int, before_seq: int) -> Segment | None:
        """The newest segment file of a box that holds `seq`, and nothing up to `sealed_seq` or from
        `before_seq` on."""
        found: Segment | None = None
        for file in segments.list_segments(self._disk, self._segments):
            name = name_of(file)
            if name.generation == generation and sealed_seq < name.first_seq <= seq:
                index = self._index(name)
                if index is not None and seq <= index.last_seq < before_seq:
                    candidate = segment_of(index)
                    found = candidate if found is None or candidate.serial > found.serial else found
        return found

    def _apply_what_can_be(self, change: Change) -> None:
        """What it takes away is gone, even if how much that is cannot be told yet. The rest is left out."""
        self._knows_all_segments = False
        if isinstance(change, changes.TxnCommitted):
            # Rows that were held are missing. Those of the batches are in the frames behind this one.
            mark = Mark(change.epoch, change.query, change.at_ms, owner=change.owner, once=change.once)
            self.machine.txns.note_mark(change.writer, mark)
            for part in change.parts:
                self._drop_before(self.machine.generations.get(part.generation), part.evict_before_seq)
            return
        generation = getattr(change, "generation", 0)
        box = self.machine.generations.get(generation)
        if box is None:
            if isinstance(change, BatchAppended | BatchKept):
                batch = change.batch
                why = "the frame that created the box is damaged"
                self.losses.append(Loss("", generation, batch.first_seq, batch.last_seq, why))
            return
        log = box.log
        self._wounded[generation] = box
        if isinstance(change, changes.RecordsDeleted) and change.seqs:
            log.add_deleted(log.live_of(change.seqs))
        if isinstance(change, changes.RecordsDeleted | changes.RecordsEvicted):
            self._drop_before(box, change.before_seq)
        if isinstance(change, BatchAppended):
            self._drop_before(box, max(change.trim_before_seq, change.evict_before_seq))
            self._lose(box, [(change.batch.first_seq, change.batch.last_seq)], "it does not fit into its box")
            log.head_seq = max(log.head_seq, change.batch.last_seq)

    def _drop_before(self, box: Box | None, before_seq: int) -> None:
        """Records before this seq were deleted or evicted by a change that cannot be applied as a whole."""
        if box is not None and before_seq:
            self._wounded[box.generation] = box
            box.log.earliest_seq = max(box.log.earliest_seq, min(before_seq, box.log.head_seq + 1))

    def _skip_seqs(self) -> None:
        """Boxes of which nothing came behind a gap may have lost records in it."""
        for generation, size in self._suspects.items():
            box = self.machine.generations.get(generation)
            skipped = min(_SEQS_SKIPPED_MAX, size // _RECORD_BYTES_MIN)
            if box is None or box.is_memory or not skipped:
                continue
            head_seq = box.log.head_seq
            last_seq = head_seq + skipped
            if box.is_disk:  # up to here its seqs may have been given, and lost once before
                last_seq = max(last_seq, box.reserved_seq)
            why = "a frame of the log is damaged, and may have been of this box"
            self._lose(box, [(head_seq + 1, last_seq)], why)
            box.log.head_seq = last_seq

    def _lose(self, box: Box, ranges: list[tuple[int, int]], why: str) -> None:
        self._wounded[box.generation] = box
        offline_edits.add_holes(box.log, ranges)
        self.losses += [Loss(box.name, box.generation, first, last, why) for first, last in ranges]

    # -- segments

    def mend(self, target: SegmentStore) -> None:
        """Looks at every byte of every segment, and writes those anew into which there is damage."""
        for box in self.machine.boxes.values():
            for segment in list(box.log.segments):
                self._look_at(box, segment)
            lost = self._lost.get(box.generation, {})
            if lost or box.generation in self._wounded:
                why = "a batch of a segment is damaged"
                before = {segment.serial: Name.of(segment) for segment in box.log.segments}
                holes = offline_edits.remeasure(box.log, self._read, lost)
                self.losses += [Loss(box.name, box.generation, first, last, why) for first, last in holes]
                for serial in before.keys() - {segment.serial for segment in box.log.segments}:
                    self._give_up(before[serial])  # nothing in it is both whole and live
                for segment in [each for each in box.log.segments if each.serial in lost]:
                    self._write_anew(box, segment, target)
                box.log.show(box.log.head_seq, box.log.last_ts)
                if box.is_disk:  # CEILING: the frame that reserved them may be among the damaged ones
                    box.reserved_seq = max(box.reserved_seq, box.log.head_seq)

    def _look_at(self, box: Box, segment: Segment) -> None:
        name = Name.of(segment)
        path = f"{self._segments}/{name.file}"
        if not self._disk.exists(path):
            if not self._disk.exists(f"{self._segments}/{name.stub}"):
                self.notes.append(f"{path}: the segment is missing")
                self._note_lost(segment, set(range(len(segment))))
                return
            if not self._looks_at_cold:
                return
        index = self._index(name)
        if index is None:
            self._note_lost(segment, set(range(len(segment))))
            return
        try:
            source = self._source_of(name, index)
            if next(segments.verify_segment(source), None) is None:
                return
            bad = set(self._bad_batches(source, index))
        except Unreachable as trouble:
            raise CannotRepair(f"{trouble}; repeat this when it answers") from trouble
        if not bad:
            self.notes.append(f"{path}: everything but the records was damaged; it was written anew")
        self._note_lost(segment, bad)

    def _bad_batches(self, source: Source, index: SegmentIndex) -> Iterator[int]:
        """Which batches cannot be read; of those in a row that fail for one reason the first is noted."""
        said = ""
        for at in range(len(index)):
            try:
                segments.read_batches(source, index, at, at)
            except Corrupt as damage:
                if damage.reason != said:
                    self.notes.append(f"{source.name} at byte {damage.offset}: {damage.reason}")
                said = damage.reason
                yield at

    def _source_of(self, name: Name, index: SegmentIndex) -> Source:
        """The file, or the copy in the cold store."""
        path = f"{self._segments}/{name.file}"
        if self._disk.exists(path):
            return FileSource(self._disk, path)
        return self._store.source_in_cold(name, index.file_bytes)

    def _note_lost(self, segment: Segment, ats: set[int]) -> None:
        self._lost.setdefault(segment.generation, {})[segment.serial] = ats

    def _read(self, segment: Segment, at: int) -> Batch:
        name = Name.of(segment)
        index = self._index(name)
        assert index is not None, "what cannot be opened is lost as a whole"
        try:
            return segments.read_batches(self._source_of(name, index), index, at, at)[0]
        except Unreachable as trouble:
            raise CannotRepair(f"{trouble}; it is needed to tell what is live there") from trouble

    def _give_up(self, name: Name) -> None:
        """Has the server drop the copy of a segment of which nothing is left, if the cold store has one."""
        file, stub = f"{self._segments}/{name.file}", f"{self._segments}/{name.stub}"
        if name in self.stubs or self._disk.exists(file) or not self._disk.exists(stub):
            return  # the stub is written anew, or the copy was not looked at, or there is none
        try:
            self._store.source_in_cold(name)
        except (Unreachable, Corrupt):
            return
        self.dropped_stubs.append(name.stub)

    def _write_anew(self, box: Box, segment: Segment, target: SegmentStore) -> None:
        def live() -> Iterator[Batch]:
            for at, runs in offline_edits.live_runs(box.log, segment).items():
                batch = self._read(segment, at)
                for first, last in runs:
                    yield batch.part(first, last)

        box.last_serial += 1
        stand_in = target.write(box.generation, box.last_serial, live())
        self._new.add(Name.of(stand_in))
        offline_edits.replace_segment(box.log, segment, stand_in)
        name = Name.of(segment)
        if name not in self.stubs and self._disk.exists(f"{self._segments}/{name.stub}"):
            self.dropped_stubs.append(name.stub)

    def brought(self, facts: BoxFacts) -> BoxFacts:
        """The facts with those segments alone whose files, or stubs, are whole in the damaged folder."""
        old = [
            each
            for each in facts.segments
            if (name := Name(facts.generation, each.first_seq, each.serial)) not in self._new
            and name not in self.stubs
        ]
        return msgspec.structs.replace(facts, segments=old)
