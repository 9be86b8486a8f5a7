"""Restores a backup into the folders of any number of new shards; up to a point in time, if requested.

    objects of a shard ──► scratch folder ──read──► machine ──(cut at the time)──► ShardBuilder, by slot
    segment objects ─────────────── copied and verified ───────────────► the segments of the new owner

Up to a point in time: records with a later `$ts`, and boxes created later, are left out. Records deleted or
evicted between that time and the backup do not come back, and configs, fences and keys are those of the
backup: a backup holds the current state, not its history. Marks of later transactions are dropped. Dead
letters, and jobs that were requeued from dead letters, are retained beyond the time if their job existed
then: there is no other copy. If compaction has deleted the record that a tag had at that time, the tag is
counted, and readers see a tombstone.

After all shards are built, `reconcile.py` makes them agree about state that two boxes share.

The caller marks the new folders as unfinished, and activates them when this returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pyroaring import BitMap64

from shard.core.boxes.box import Box
from shard.core.boxes.offline_edits import cut_after, live_runs
from shard.core.boxes.sealed import Segment
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.changes import SeqsLost, SeqsReserved
from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts, SegmentFacts
from shard.offline.box_cuts import Cut, survey_cut
from shard.offline.payload_loading import load_missing
from shard.offline.reconcile import Reconciler
from shard.storage import frames, segments
from shard.storage.files import Corrupt, DiskLike, remove_tree
from shard.storage.segments.index import digest_of
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import FILE_BYTES
from shard.transfer.backup import BackupStore, BadSignature, Pause, check_sha256
from shard.transfer.backup_manifest import Backup, BackupShard
from shard.transfer.shard_folders import ShardBuilder, end_life, parts_of, read_shard, servers_of
from shard.transfer.transaction_marks import MarkMerge, owners_of
from streams.protocol.model.records import Batch
from streams.protocol.model.slots import slot_of

#: Called with the progress, from 0 to 1.
Report = Callable[[float], None]


class RestoreResult(NamedTuple):
    """Counts of a restore. Its fields are part of the CLI's JSON output."""

    boxes: int
    records: int
    #: Records and boxes that are later than the requested time.
    cut_records: int
    cut_boxes: int
    #: As in `Corrections`.
    skipped_seqs: int = 0
    missing_copies: int = 0
    #: Tags of boxes with `compact: "tag"` whose record of that time compaction may have deleted since.
    compacted_keys: int = 0


def choose_backup(target: BackupStore, *, id: str = "", until_ms: int | None = None) -> str:
    """Return the id of the backup to restore: the requested one, else the oldest taken at or after the time,
    else the newest. Raises `LookupError` with the available ids."""
    ids = target.ids()
    if id and id not in ids:
        raise LookupError(f"there is no backup {id}; the existing ones are {', '.join(ids[-5:]) or 'none'}")
    if not ids:
        raise LookupError("it contains no backup")
    if id:
        return id
    if until_ms is not None:
        for candidate in ids:
            try:
                if target.load(candidate).taken_ms >= until_ms:
                    return candidate
            except BadSignature:  # an older backup, made before backups were signed
                continue
    return ids[-1]


class RestoreJob:
    """One restore of a backup into new folders."""

    def __init__(
        self,
        disk: DiskLike,
        target: BackupStore,
        backup: Backup,
        *,
        data_dir: str,
        folders: list[str],
        slots: list[int],
        owners: list[int] | None = None,
        until_ms: int | None = None,
        file_bytes: int = FILE_BYTES,
        boot_id: str,
        now_ms: int,
        pause: Pause = segments.no_pause,
        report: Report = lambda ratio: None,
    ) -> None:
        """`slots` has the new shard of each slot, `folders` the folder of each new shard. `owners` has the
        old shard of each slot if the backup does not say it."""
        self._disk = disk
        self._target = target
        self._backup = backup
        self._data_dir = data_dir
        self._slots = slots
        self._until_ms = until_ms
        self._boot_id = boot_id
        self._now_ms = now_ms
        self._pause = pause
        self._report = report
        self._builders = [
            ShardBuilder(disk, f"{data_dir}/{name}", file_bytes=file_bytes, pause=pause) for name in folders
        ]
        self._stores = [SegmentStore(disk, builder.segments) for builder in self._builders]
        self._segment_names: list[set[Name]] = [set() for _ in folders]
        self._marks = MarkMerge(owners_of(backup.slots) if owners is None else owners, slots)
        #: Cuts by generation, and boxes that were created later than the time.
        self._cuts: dict[int, Cut] = {}
        self._later_boxes: set[str] = set()
        self._done_bytes = 0
        self._result = RestoreResult(0, 0, 0, 0)

    def __repr__(self) -> str:
        return f"<RestoreJob {self._backup.id} into {len(self._builders)} shards: {self._result}>"

    def run(self) -> RestoreResult:
        last_generation = 0
        for number, machine in self.machines():
            self._distribute(number, machine)
            last_generation = max(last_generation, machine.last_generation)
        for at, builder in enumerate(self._builders):
            builder.add_marks(self._marks.of(at))
        for builder, store, segment_names in zip(
            self._builders, self._stores, self._segment_names, strict=True
        ):
            builder.finish(last_generation=last_generation, boot_id=self._boot_id, now_ms=self._now_ms)
            store.remove_unnamed(segment_names)  # segments that a cut has rewritten
        self._reconcile()
        self._report(1.0)
        return self._result

    def _reconcile(self) -> None:
        """Read the new folders, and correct state about which the shards disagree."""
        if not any(builder.needs_reconciling for builder in self._builders):
            for builder in self._builders:
                builder.check()
            return
        reconciler = Reconciler(
            [builder.check() for builder in self._builders],
            self._stores,
            lambda name: self._slots[slot_of(name)],
            cuts=self._cuts,
            later_boxes=self._later_boxes,
            until_ms=self._until_ms,
            now_ms=self._now_ms,
        )
        self._result = self._result._replace(**reconciler.run()._asdict())
        for builder, changes in zip(self._builders, reconciler.changes_by_shard, strict=True):
            if changes:
                builder.amend(changes, now_ms=self._now_ms)

    def machines(self) -> Iterator[tuple[int, Machine]]:
        """Yield the shards to restore, one after the other."""
        for number, shard in enumerate(self._backup.shards):
            scratch = f"{self._data_dir}/{scratch_of(number)}"
            self._fetch_files(shard, scratch)
            yield number, self._read(shard, scratch, number)
            remove_tree(self._disk, scratch)

    def includes(self, facts: BoxFacts) -> bool:
        """Return True if the box is to be restored."""
        return True

    def includes_registers(self, number: int) -> bool:
        """Return True if the registries of this shard are to be restored: routers, basins and tokens."""
        return True

    # -- fetching

    def _fetch_files(self, shard: BackupShard, scratch: str) -> None:
        for path in ("", "/wal", "/snapshot"):
            self._disk.mkdir(scratch + path)
        for path, stored_object in shard.files.items():
            self._target.fetch(stored_object, f"{scratch}/{path}", self._pause)
            self._note(stored_object.size)

    def _read(self, shard: BackupShard, scratch: str, number: int) -> Machine:
        snapshot = Snapshots(self._disk, f"{scratch}/snapshot").load_newest()
        if snapshot is None:
            raise Corrupt(
                f"{self._backup.id}/shard-{number:02d}", 0, "the backup of this shard has no snapshot"
            )
        owners = {
            facts.generation: self._slots[slot_of(facts.name)]
            for facts in frames.decode_state(snapshot.content).boxes
        }
        for segment in shard.segments:
            if segment.generation not in owners:
                raise Corrupt(segment.object, 0, "the segment belongs to no box of this backup")
            source = self._target.source(segment)
            directory = self._builders[owners[segment.generation]].segments
            index = segments.copy_segment(self._disk, directory, source, pause=self._pause)
            if digest_of(index) != segment.digest or index.name != segment.name.file:
                raise Corrupt(segment.object, 0, "the object holds another segment than the backup names")
            check_sha256(self._disk, f"{directory}/{index.name}", segment.object, segment.sha256)
            self._note(segment.size)

        def open_segment(generation: int, facts: SegmentFacts) -> Segment:
            return self._stores[owners[generation]].open(generation, facts)

        return read_shard(self._disk, scratch, shard=number, open_segment=open_segment)

    def _note(self, size: int) -> None:
        self._done_bytes += size
        self._report(min(0.99, self._done_bytes / max(1, self._backup.size)))

    # -- distributing

    def _distribute(self, number: int, machine: Machine) -> None:
        # The backed-up process went on running. Here it counts as stopped cleanly: nothing was lost.
        machine.stopped_clean = True
        end_life(machine, boot_id=self._boot_id, now_ms=self._now_ms)
        later_boxes = self._cut(machine)
        parts = parts_of(machine)
        boxes = [
            facts for facts in parts.state.boxes if facts.name not in later_boxes and self.includes(facts)
        ]
        for facts in boxes:
            owner = self._slots[slot_of(facts.name)]
            self._builders[owner].add(facts, parts.batches_of(facts))
            self._segment_names[owner].update(
                Name(facts.generation, segment.first_seq, segment.serial) for segment in facts.segments
            )
        for name in parts.state.not_recreated:
            self._builders[self._slots[slot_of(name)]].add_not_recreated([name])
        if self.includes_registers(number):
            self._builders[0].add_routers(parts.state)
        for builder in self._builders:
            builder.add_follows(servers_of(parts.state))
        until_ms = self._until_ms
        self._marks.add(
            number, [mark for mark in parts.state.marks if until_ms is None or mark.at_ms <= until_ms]
        )
        self._result = self._result._replace(
            boxes=self._result.boxes + len(boxes),
            records=self._result.records + sum(facts.live_count for facts in boxes),
        )

    def _cut(self, machine: Machine) -> set[str]:
        """Remove records later than the time. Returns the boxes that did not exist yet."""
        if self._until_ms is None:
            return set()
        later_boxes = {name for name, box in machine.boxes.items() if box.created_ms > self._until_ms}
        cut_records = keys = 0
        for name, box in machine.boxes.items():
            before = box.log.count
            if name in later_boxes:
                cut_records += before
            elif not box.is_memory:
                store = self._stores[self._slots[slot_of(name)]]
                self._cuts[box.generation] = box_cut = cut_box(box, self._until_ms, store, machine)
                cut_records += before - box.log.count
                keys += box_cut.keys
        self._later_boxes |= later_boxes
        self._result = self._result._replace(
            cut_records=self._result.cut_records + cut_records,
            cut_boxes=self._result.cut_boxes + len(later_boxes),
            compacted_keys=self._result.compacted_keys + keys,
        )
        return later_boxes


def cut_box(box: Box, until_ms: int, store: SegmentStore, machine: Machine) -> Cut:
    """Cut off the records of a box with a later `$ts`, except the only copies of jobs.

    Returns the consequences for other boxes.
    """
    log = box.log
    until_seq = max(load_missing(store, lambda: log.first_seq_at(until_ms + 1)) - 1, log.earliest_seq - 1)
    if until_seq >= log.head_seq:
        return Cut()
    cut = survey_cut(box, until_seq, store)
    seq = cut.retained_seqs.max() if cut.retained_seqs else until_seq
    last = log.last_live_before(seq + 1)
    last_ts = load_missing(store, lambda: log.ts_of(last)) if last else min(log.last_ts, until_ms)
    replacement: Segment | None = None
    for segment in log.segments:
        if segment.first_seq <= seq < segment.last_seq:
            runs = live_runs(log, segment, seq)
            if runs:
                box.last_serial += 1
                replacement = store.write(box.generation, box.last_serial, live_batches(store, segment, runs))
    cut_after(box, seq, last_ts=last_ts, replacement=replacement)
    if cut.retained_seqs:
        for key in [key for key, entry in box.keys.items() if entry.last_seq > until_seq]:
            del box.keys[key]
        younger = BitMap64()
        younger.add_range(until_seq + 1, seq + 1)
        younger -= cut.retained_seqs
        change = load_missing(store, lambda: box.plan_deletes(younger, SizedSeqs.of({}), until_ms))
        if change.seqs:
            machine.apply(change, machine.lsn + 1)
    if cut.keys:
        seq, top = log.head_seq, log.head_seq + cut.keys
        if box.is_disk and box.reserved_seq < top:
            machine.apply(SeqsReserved(box.generation, top), machine.lsn + 1)
        machine.apply(SeqsLost(box.generation, seq + 1, top), machine.lsn + 1)
    return cut


def live_batches(
    store: SegmentStore, segment: Segment, runs: dict[int, list[tuple[int, int]]]
) -> Iterator[Batch]:
    """Yield parts of a segment's batches, read from its file one batch at a time."""
    for at, stretches in runs.items():
        (batch,) = store.read(Name.of(segment), at, bytes_max=1)
        for first, last in stretches:
            yield batch.part(first, last)


def scratch_of(number: int) -> str:
    """Return the name of the folder in which a shard of the backup is unpacked."""
    return f"restore-{number:02d}"
