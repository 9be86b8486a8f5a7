"""Recovers the state of a damaged shard from its snapshot and its log.

Frames behind a damaged one are applied by the machine like any other, lsns aside. What tells that one of a
box is missing: a batch that does not begin at the next seq. The seqs between are lost, and told. A box of
which no later batch is found may have lost records too, and its seqs must not be given to others: as many
seqs as would fit into the damaged bytes become a hole, unless the bytes say whose they were. What else a
damaged frame may have held (a delete, a config, a box created or deleted) is not known, and stays undone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shard.core import changes
from shard.core.boxes import offline_edits
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.changes import BatchAppended, BatchKept, BoxFacts, Change, ShardState
from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.core.transactions.commits import render_step
from shard.core.transactions.state import Mark
from shard.core.transactions.unrendered import UnrenderedRows
from shard.offline.lost_ranges import find_lost, find_uncovered
from shard.offline.repair_findings import CannotRepair, Findings, Loss
from shard.offline.segment_repair import SegmentRepair
from shard.storage import frames
from shard.storage.files import Corrupt, DiskLike
from shard.storage.salvage import Gap, salvage
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Frame, Wal

#: A record takes at least this in the log: `{"$seq":1,"$ts":1,"data":0}`.
_RECORD_BYTES_MIN = 24
#: Where no bound is known, this many seqs are skipped: as many as a disk box reserves.
_SEQS_SKIPPED_MAX = 131_072


class LogRepair:
    def __init__(
        self, disk: DiskLike, source: str, shard: int, segment_repair: SegmentRepair, findings: Findings
    ) -> None:
        self._disk = disk
        self._source = source
        self._segments = segment_repair
        self._findings = findings
        self.machine = Machine(shard=shard)
        self.machine.txns.keeps_rows = True
        #: Boxes of which something is lost, or whose numbers may not be right: to be measured again.
        self.suspect_boxes: dict[int, Box] = {}
        #: False if a change behind the snapshot is missing, so that the machine may not know every segment.
        self._knows_all_segments = True
        #: Boxes that may have lost records behind their head: by generation, in how many bytes.
        self._possible_losses: dict[int, int] = {}
        #: The lsns of what the snapshot says is held for transactions.
        self._chunk_lsns: set[int] = set()

    def __repr__(self) -> str:
        return f"<LogRepair {self._source}: {self.machine!r}, {self._findings!r}>"

    # -- up to the snapshot

    def recover(self) -> None:
        state = self._newest_state()
        snapshot_lsn = state.lsn if state is not None else 0
        facts_of = {facts.generation: facts for facts in state.boxes} if state is not None else {}
        batch_boxes: dict[int, Box] = {}
        missing_segments: set[tuple[int, int]] = set()
        if state is not None:
            references = self.machine.restore(state)
            batch_boxes = dict(references.batches)
            self._chunk_lsns = references.held
            missing_segments = set(self._segments.attach(references.segments))
        self._hydrate_retained()
        is_hydrating = True
        for item in salvage(self._disk, f"{self._source}/wal"):
            if isinstance(item, Frame) and item.lsn <= snapshot_lsn:
                self._hydrate(batch_boxes, item)
                continue
            if is_hydrating and (isinstance(item, Frame) or item.first_lsn > snapshot_lsn):
                is_hydrating = False
                self._settle(facts_of, batch_boxes, missing_segments)
            if isinstance(item, Gap):
                self._findings.notes.append(f"{item.path} at byte {item.offset}: {item.reason}")
                if item.last_lsn > snapshot_lsn:
                    self._skip_gap(item)
            else:
                self._apply(item)
        if is_hydrating:
            self._settle(facts_of, batch_boxes, missing_segments)
        self._lose_unrendered()
        self._skip_seqs()
        self.machine.recovered(self.machine.lsn)
        if self._knows_all_segments:
            self._segments.collect_unnamed_stubs(self.machine, missing_segments)

    def _newest_state(self) -> ShardState | None:
        try:
            snapshot = Snapshots(self._disk, f"{self._source}/snapshot").load_newest()
        except Corrupt as damage:
            first = next(iter(salvage(self._disk, f"{self._source}/wal")), None)
            if isinstance(first, Frame) and first.lsn == 1:
                self._findings.notes.append(
                    f"{damage.path}: no snapshot is whole; the log is, from its begin"
                )
                return None
            raise CannotRepair(
                f"{damage}: no snapshot of this shard is whole, and its log does not reach back to the begin"
            ) from damage
        if snapshot is None:
            return None
        self._findings.notes += [
            f"{path}: the snapshot is damaged, the one before it was used" for path in snapshot.damaged_paths
        ]
        return frames.decode_state(snapshot.content)

    def _hydrate(self, batch_boxes: dict[int, Box], frame: Frame) -> None:
        box = batch_boxes.pop(frame.lsn, None)
        if frame.lsn in self._chunk_lsns:  # one that is damaged is missed when its transaction is committed
            chunk = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(chunk, changes.TxnHeld)
            self.machine.txns.give_back(chunk, frame.lsn)
        if box is not None:
            change = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(change, BatchAppended | BatchKept)
            change.batch.lsn = frame.lsn
            box.log.hydrate(change.batch)

    def _hydrate_retained(self) -> None:
        """Gives back chunks from files of the log that were kept for them."""
        retained_frames = Wal(self._disk, f"{self._source}/wal").scan_retained()
        try:
            for frame in retained_frames:
                self._hydrate({}, frame)
        except Corrupt as damage:
            self._findings.notes.append(
                f"{damage.path}: {damage.reason}; rows that were held in it may be lost"
            )

    def _settle(
        self,
        facts_of: dict[int, BoxFacts],
        batch_boxes: dict[int, Box],
        missing_segments: set[tuple[int, int]],
    ) -> None:
        """All that the snapshot names and that is whole has been given back."""
        for generation in {box.generation for box in batch_boxes.values()} | {
            each for each, _ in missing_segments
        }:
            box, facts = self.machine.generations[generation], facts_of[generation]
            serials = {serial for each, serial in missing_segments if each == generation}
            self._lose(box, find_lost(box, facts, serials), "a segment or a frame of the log is damaged")
            offline_edits.recount(box.log)
        self.machine.hydrated()
        self._render_commits()

    # -- behind the snapshot

    def _skip_gap(self, gap: Gap) -> None:
        """Frames are missing. Whatever they changed, what the next ones say is not to be relied on."""
        self._knows_all_segments = False
        self.suspect_boxes.update(self.machine.generations)
        guess = gap.guess if gap.first_lsn == gap.last_lsn else None
        if guess is None:
            self._suspect(self.machine.generations, gap.bytes)
        elif guess.kind in frames.ASSIGNS_SEQS:
            self._lose_batch(frames.read_claim(guess.kind, guess.content), gap.bytes)
        self.machine.lsn = gap.last_lsn

    def _lose_batch(self, claim: frames.BatchClaim | None, size: int) -> None:
        """One frame is damaged, and holds a batch, or gives seqs in another way. A flipped bit in its front
        has been put right (`storage/salvage.py`), so a generation there is believed; how many records there
        were only if the batch fits where its box stands and says so twice."""
        own = None if claim is None else self.machine.generations.get(claim.generation)
        if claim is None or own is None:
            self._suspect(self.machine.generations, size)
        elif claim.is_kept and claim.first_seq_taken <= own.log.head_seq:
            pass  # it is there from before, or was to be stored (`_adjust`)
        elif (
            claim.first_seq_taken == own.log.head_seq + 1
            and claim.is_count_sure
            and claim.records <= size // _RECORD_BYTES_MIN
        ):
            self._lose_next(own, claim.records)
        elif claim.first_seq_taken == own.log.head_seq + 1 or claim.is_generation_sure:
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
            self._possible_losses[generation] = max(size, self._possible_losses.get(generation, 0))

    def _apply(self, frame: Frame) -> None:
        try:
            change = frames.decode(frame.kind, frame.version, frame.content)
        except frames.UnknownFrame as error:
            raise CannotRepair(f"{self._source}/wal: {error}; use the version that wrote it") from error
        try:
            change = self._adjust(change)
            self.machine.lsn = frame.lsn - 1
            self.machine.apply(change, frame.lsn)
            if isinstance(change, changes.TxnCommitted):
                self._render_commits()
        except DoesNotApply:
            self._apply_partly(change)
        self.machine.lsn = frame.lsn

    def _require(self, generation: int) -> Box:
        box = self.machine.generations.get(generation)
        if box is None:
            raise DoesNotApply(f"there is no box of generation {generation}")
        return box

    def _adjust(self, change: Change) -> Change:
        """Says what missing frames must have said. Returns what the change is, now that they are missing."""
        if isinstance(change, changes.BoxCreated):
            old = self.machine.boxes.get(change.name)
            if old is not None and not old.is_memory:  # it was deleted in between
                self.machine.apply(changes.BoxDeleted(old.generation), 0)
        elif isinstance(change, BatchAppended):
            self._lose_before(change.generation, _begins_at(change))
        elif isinstance(change, BatchKept):
            box = self._require(change.generation)
            self._lose_unrendered_before(box, change.batch.first_seq)
            is_new = change.batch.first_seq > box.log.head_seq  # by a transaction of which a frame is missing
            if is_new or (box.is_memory and not box.log.awaited):  # or it was to be stored: see below
                self._lose_before(change.generation, change.batch.first_seq)
                return BatchAppended(change.generation, change.batch, box.last_append_ms)
        elif isinstance(change, changes.BoxConfigured):
            box = self._require(change.generation)
            if box.log.awaited:  # what it had in memory was stored, and not all of that is whole
                self._lose(box, find_uncovered(box), "a frame of the log is damaged")
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

    def _lose_unrendered_before(self, box: Box, first_seq: int) -> None:
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
        self._possible_losses.pop(generation, None)
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
            segment = self._segments.newest_segment_with(
                change.generation, log.sealed_seq, oldest.first_seq, first_seq
            )
            if segment is None:
                older = [batch for batch in log.tail if batch.first_seq < first_seq]
                self._lose(box, [(each.first_seq, each.last_seq) for each in older], "its segment is missing")
                return
            earlier_seal = changes.SegmentSealed(change.generation, segment.serial, segment.to_bytes())
            self.machine.apply(earlier_seal, 0)

    def _apply_partly(self, change: Change) -> None:
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
                self._findings.losses.append(Loss("", generation, batch.first_seq, batch.last_seq, why))
            return
        log = box.log
        self.suspect_boxes[generation] = box
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
            self.suspect_boxes[box.generation] = box
            box.log.earliest_seq = max(box.log.earliest_seq, min(before_seq, box.log.head_seq + 1))

    def _skip_seqs(self) -> None:
        """Boxes of which nothing came behind a gap may have lost records in it."""
        for generation, size in self._possible_losses.items():
            box = self.machine.generations.get(generation)
            seq_count = min(_SEQS_SKIPPED_MAX, size // _RECORD_BYTES_MIN)
            if box is None or box.is_memory or not seq_count:
                continue
            head_seq = box.log.head_seq
            last_seq = head_seq + seq_count
            if box.is_disk:  # up to here its seqs may have been given, and lost once before
                last_seq = max(last_seq, box.reserved_seq)
            why = "a frame of the log is damaged, and may have been of this box"
            self._lose(box, [(head_seq + 1, last_seq)], why)
            box.log.head_seq = last_seq

    def _lose(self, box: Box, ranges: list[tuple[int, int]], why: str) -> None:
        self.suspect_boxes[box.generation] = box
        offline_edits.add_holes(box.log, ranges)
        self._findings.losses += [Loss(box.name, box.generation, first, last, why) for first, last in ranges]


def _begins_at(change: BatchAppended) -> int:
    """The first seq that a write takes: copies behind a loss of their source begin with the hole that tells
    of it."""
    follows_loss = isinstance(change, changes.BatchForwarded) and change.lost > 0
    return change.batch.first_seq - follows_loss
