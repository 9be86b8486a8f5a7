"""Recovers the state of a damaged shard from its snapshot and its log.

The machine applies frames after a damaged one like any other, except that lsns may jump. A batch that does
not begin at the next seq of its box shows that a frame of the box is missing. The seqs in between are lost
and reported. A box without a later batch may have lost records too, and their seqs must not be assigned
again: as many seqs as fit into the damaged bytes become a hole, unless the bytes name another box. Other
changes in a damaged frame (a delete, a config, a box created or deleted) are unknown and stay undone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shard.core import changes
from shard.core.boxes import offline_edits
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.changes import BatchAppended, BatchKept, Change
from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts, ShardState
from shard.core.transactions.commits import render_step
from shard.core.transactions.state import Mark
from shard.core.transactions.unrendered import UnrenderedRows
from shard.offline.lost_ranges import find_lost, find_uncovered
from shard.offline.repair_findings import CannotRepair, Findings, Loss
from shard.offline.segment_repair import SegmentRepair
from shard.storage import frames
from shard.storage.files import Corrupt, DiskLike
from shard.storage.salvage import FrameGap, salvage
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Frame, Wal

#: The smallest record in the log: `{"$seq":1,"$ts":1,"data":0}`.
_RECORD_BYTES_MIN = 24
#: The most seqs that are skipped without a known bound: as many as a disk box reserves.
_SEQS_SKIPPED_MAX = 131_072


class LogRepair:
    """Replays the intact part of a log into a machine."""

    def __init__(
        self, disk: DiskLike, source: str, shard: int, segment_repair: SegmentRepair, findings: Findings
    ) -> None:
        self._disk = disk
        self._source = source
        self._segments = segment_repair
        self._findings = findings
        self.machine = Machine(shard=shard)
        self.machine.txns.keeps_rows = True
        #: Boxes with losses, or with counts that may be wrong: to be counted again.
        self.suspect_boxes: dict[int, Box] = {}
        #: False if a change after the snapshot is missing: then the machine may not know every segment.
        self._knows_all_segments = True
        #: By generation of a box that may have lost records after its head: the damaged bytes.
        self._possible_losses: dict[int, int] = {}
        #: The lsns of the transaction chunks that the snapshot names.
        self._chunk_lsns: set[int] = set()

    def __repr__(self) -> str:
        return f"<LogRepair {self._source}: {self.machine!r}, {self._findings!r}>"

    # -- up to the snapshot

    def recover(self) -> None:
        """Recover the machine from the newest intact snapshot and the intact frames of the log."""
        state = self._newest_state()
        snapshot_lsn = state.lsn if state is not None else 0
        facts_of = {facts.generation: facts for facts in state.boxes} if state is not None else {}
        batch_boxes: dict[int, Box] = {}
        missing_segments: set[tuple[int, int]] = set()
        if state is not None:
            references = self.machine.restore(state)
            batch_boxes = dict(references.batches)
            self._chunk_lsns = references.held_lsns
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
            if isinstance(item, FrameGap):
                self._findings.notes.append(f"{item.path} at byte {item.offset}: {item.reason}")
                if item.last_lsn > snapshot_lsn:
                    self._skip_gap(item)
            else:
                self._apply(item)
        if is_hydrating:
            self._settle(facts_of, batch_boxes, missing_segments)
        self._lose_unrendered()
        self._skip_seqs()
        self.machine.end_recovery(self.machine.lsn)
        if self._knows_all_segments:
            self._segments.collect_unnamed_stubs(self.machine, missing_segments)

    def _newest_state(self) -> ShardState | None:
        try:
            snapshot = Snapshots(self._disk, f"{self._source}/snapshot").load_newest()
        except Corrupt as damage:
            first = next(iter(salvage(self._disk, f"{self._source}/wal")), None)
            if isinstance(first, Frame) and first.lsn == 1:
                self._findings.notes.append(
                    f"{damage.path}: no snapshot is intact; the log alone was used, from lsn 1"
                )
                return None
            raise CannotRepair(
                f"{damage}: no snapshot of this shard is intact, and its log does not begin at lsn 1"
            ) from damage
        if snapshot is None:
            return None
        self._findings.notes += [
            f"{path}: the snapshot is damaged, the one before it was used" for path in snapshot.damaged_paths
        ]
        return frames.decode_state(snapshot.content)

    def _hydrate(self, batch_boxes: dict[int, Box], frame: Frame) -> None:
        box = batch_boxes.pop(frame.lsn, None)
        if frame.lsn in self._chunk_lsns:  # a damaged one is noticed when its transaction is committed
            chunk = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(chunk, changes.TxnHeld)
            self.machine.txns.give_back(chunk, frame.lsn)
        if box is not None:
            change = frames.decode(frame.kind, frame.version, frame.content)
            assert isinstance(change, BatchAppended | BatchKept)
            change.batch.lsn = frame.lsn
            box.log.hydrate(change.batch)

    def _hydrate_retained(self) -> None:
        """Load transaction chunks from retained log files."""
        retained_frames = Wal(self._disk, f"{self._source}/wal").scan_retained()
        try:
            for frame in retained_frames:
                self._hydrate({}, frame)
        except Corrupt as damage:
            self._findings.notes.append(
                f"{damage.path}: {damage.reason}; held rows of transactions in it may be lost"
            )

    def _settle(
        self,
        facts_of: dict[int, BoxFacts],
        batch_boxes: dict[int, Box],
        missing_segments: set[tuple[int, int]],
    ) -> None:
        """Report missing batches and segments, after all intact ones of the snapshot are loaded."""
        for generation in {box.generation for box in batch_boxes.values()} | {
            each for each, _ in missing_segments
        }:
            box, facts = self.machine.generations[generation], facts_of[generation]
            serials = {serial for each, serial in missing_segments if each == generation}
            self._lose(box, find_lost(box, facts, serials), "a segment or a frame of the log is damaged")
            offline_edits.recount(box.log)
        self.machine.end_hydration()
        self._render_commits()

    # -- after the snapshot

    def _skip_gap(self, gap: FrameGap) -> None:
        """Handle missing frames: the counts in later frames are not trusted any more."""
        self._knows_all_segments = False
        self.suspect_boxes.update(self.machine.generations)
        guess = gap.guess if gap.first_lsn == gap.last_lsn else None
        if guess is None:
            self._suspect(self.machine.generations, gap.bytes)
        elif guess.kind in frames.ASSIGNS_SEQS:
            self._lose_batch(frames.read_claim(guess.kind, guess.content), gap.bytes)
        self.machine.lsn = gap.last_lsn

    def _lose_batch(self, claim: frames.DamagedBatch | None, size: int) -> None:
        """Handle one damaged frame that holds a batch, or uses up seqs in another way.

        A flipped bit in its front has been repaired (`storage/salvage.py`), so a generation there is trusted.
        The number of records is trusted only if the batch continues its box and two of its parts agree.
        """
        own = None if claim is None else self.machine.generations.get(claim.generation)
        if claim is None or own is None:
            self._suspect(self.machine.generations, size)
        elif claim.is_kept and claim.first_seq_taken <= own.log.head_seq:
            pass  # the batch exists already, or was about to be stored (`_adjust`)
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
        """Note that records of these boxes may have been in damaged bytes, until a later batch shows the next
        seq."""
        for generation in generations:
            self._possible_losses[generation] = max(size, self._possible_losses.get(generation, 0))

    def _apply(self, frame: Frame) -> None:
        try:
            change = frames.decode(frame.kind, frame.version, frame.content)
        except frames.UnknownFrame as error:
            raise CannotRepair(
                f"{self._source}/wal: {error}; use the server version that wrote it"
            ) from error
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
        """Apply the effect of missing frames, and return the change in the form that fits without them."""
        if isinstance(change, changes.BoxCreated):
            old = self.machine.boxes.get(change.name)
            if old is not None and not old.is_memory:  # the frame that deleted it is missing
                self.machine.apply(changes.BoxDeleted(old.generation), 0)
        elif isinstance(change, BatchAppended):
            self._lose_before(change.generation, _begins_at(change))
        elif isinstance(change, BatchKept):
            box = self._require(change.generation)
            self._lose_unrendered_before(box, change.batch.first_seq)
            is_new = change.batch.first_seq > box.log.head_seq  # from a transaction with a missing frame
            if is_new or (box.is_memory and not box.log.records_awaited):  # or about to be stored: see below
                self._lose_before(change.generation, change.batch.first_seq)
                return BatchAppended(change.generation, change.batch, box.last_append_ms)
        elif isinstance(change, changes.BoxConfigured):
            box = self._require(change.generation)
            if box.log.records_awaited:  # its memory records were stored, and some of the frames are damaged
                self._lose(box, find_uncovered(box), "a frame of the log is damaged")
                offline_edits.recount(box.log)
        elif isinstance(change, changes.SeqsLost):
            self._lose_before(change.generation, change.first_seq)
        elif isinstance(change, changes.SegmentSealed):
            self._seal_before(change)
        elif isinstance(change, changes.RecordsDeleted):
            # Batch by batch, so that it fails at once if the segments have changed.
            return msgspec.structs.replace(change, groups=())
        elif isinstance(change, changes.TxnCommitted):
            for part in change.parts:
                self._lose_before(part.generation, part.first_seq)
        return change

    def _render_commits(self) -> None:
        """Render the rows of commits whose chunks are all intact. Others rely on later frames."""
        for commit in list(self.machine.txns.commits.values()):
            if all(commit.rows_left(box) >= rows.count for box, rows in commit.places.items()):
                step = commit.plan(1 << 62)
                batches = list(render_step(step, [chunk.unpack_rows() for chunk in step.chunks]))
                self.machine.keep_rendered(commit, batches, len(step.chunks))

    def _lose_unrendered_before(self, box: Box, first_seq: int) -> None:
        """Lose the rows of a commit before the next intact batch."""
        at = box.log.tail.at(first_seq)
        rows = None if at is None else box.log.tail.batches[at]
        if isinstance(rows, UnrenderedRows) and rows.first_seq < first_seq:
            self._lose(box, [(rows.first_seq, first_seq - 1)], "rows of a transaction are damaged")
            rows.drop(first_seq - rows.first_seq)
            offline_edits.recount(box.log)

    def _lose_unrendered(self) -> None:
        """Lose all rows that are not rendered yet: their chunks are damaged."""
        for box in self.machine.boxes.values():
            for rows in box.log.tail.unrendered_rows():
                self._lose(box, [(rows.first_seq, rows.last_seq)], "rows of a transaction are damaged")
                box.log.tail.remove(rows)
                offline_edits.recount(box.log)
        self.machine.txns.give_up_commits()

    def _lose_before(self, generation: int, first_seq: int) -> None:
        """Lose the seqs between the head of a box and its next batch."""
        self._possible_losses.pop(generation, None)
        box = self._require(generation)
        head_seq = box.log.head_seq
        if first_seq > head_seq + 1:
            self._lose(box, [(head_seq + 1, first_seq - 1)], "a frame of the log is damaged")
            box.log.head_seq = first_seq - 1

    def _seal_before(self, change: changes.SegmentSealed) -> None:
        """Seal older batches whose frame is missing.

        Batches are sealed in order, so the segment file of the older ones should exist. If it does not, they
        are lost.
        """
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
        """Apply the deletes of a change that cannot be applied as a whole, and skip the rest."""
        self._knows_all_segments = False
        if isinstance(change, changes.TxnCommitted):
            # Held rows are missing. The batches are in the frames after this one.
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
            self._lose(
                box,
                [(change.batch.first_seq, change.batch.last_seq)],
                "its batch contradicts the state of the box",
            )
            log.head_seq = max(log.head_seq, change.batch.last_seq)

    def _drop_before(self, box: Box | None, before_seq: int) -> None:
        """Drop records before this seq, which a partly applied change deleted or evicted."""
        if box is not None and before_seq:
            self.suspect_boxes[box.generation] = box
            box.log.earliest_seq = max(box.log.earliest_seq, min(before_seq, box.log.head_seq + 1))

    def _skip_seqs(self) -> None:
        """Skip seqs of boxes that may have lost records in a gap."""
        for generation, size in self._possible_losses.items():
            box = self.machine.generations.get(generation)
            seq_count = min(_SEQS_SKIPPED_MAX, size // _RECORD_BYTES_MIN)
            if box is None or box.is_memory or not seq_count:
                continue
            head_seq = box.log.head_seq
            last_seq = head_seq + seq_count
            if box.is_disk:  # seqs up to here may have been assigned and lost before
                last_seq = max(last_seq, box.reserved_seq)
            why = "a frame of the log is damaged, and may have been of this box"
            self._lose(box, [(head_seq + 1, last_seq)], why)
            box.log.head_seq = last_seq

    def _lose(self, box: Box, ranges: list[tuple[int, int]], why: str) -> None:
        self.suspect_boxes[box.generation] = box
        offline_edits.add_holes(box.log, ranges)
        self._findings.losses += [Loss(box.name, box.generation, first, last, why) for first, last in ranges]


def _begins_at(change: BatchAppended) -> int:
    """Return the first seq that a write uses: copies after a loss at their source begin with a hole."""
    follows_loss = isinstance(change, changes.BatchForwarded) and change.lost > 0
    return change.batch.first_seq - follows_loss
