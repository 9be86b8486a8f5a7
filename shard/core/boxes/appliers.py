"""Applies the changes of boxes. `box.py` and `box_log.py` have the part inside one box.

Other features apply parts of their changes through the public methods: a stream is a box that is created, a
copy or a committed row is an append, a move is a delete.
"""

from __future__ import annotations

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.context import Context
from shard.core.kernel import DoesNotApply
from shard.core.transactions.unrendered import UnrenderedRows

#: Deleted names remembered because their box must not come back by itself. Beyond it the oldest is forgotten.
NOT_RECREATED_MAX = 100_000


class BoxAppliers:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_box_change(changes.BatchAppended, self.apply_append, validation.validate_append)
        context.on_change(changes.BoxCreated, self.apply_creation, self.require_new)
        context.on_box_change(changes.BoxConfigured, self._apply_config)
        context.on_box_change(changes.BoxDeleted, self._apply_box_deletion)
        context.on_box_change(changes.RecordsEvicted, self._apply_eviction)
        context.on_box_change(changes.RecordsDeleted, self.apply_deletion, validation.validate_deletion)
        context.on_box_change(changes.TokenFenced, self._apply_fence)
        context.on_box_change(changes.SeqsReserved, self._apply_reservation)
        context.on_box_change(changes.SeqsLost, self._apply_loss, validation.validate_loss)
        context.on_box_change(changes.SegmentSealed, self._apply_seal, validation.validate_seal)
        context.on_box_change(
            changes.SegmentsReplaced, self._apply_replacement, validation.validate_replacement
        )
        context.on_box_change(changes.SegmentMoved, self._apply_relocation)
        context.on_box_change(changes.BatchKept, self._apply_relog, validation.validate_relog)
        context.on_box_change(changes.BoxRestated, self._apply_facts)

    def require_new(self, change: changes.BoxCreated) -> None:
        """Raises `DoesNotApply` if a box has this name or generation."""
        if change.name in self._context.boxes or change.generation in self._context.generations:
            raise DoesNotApply(f"there is a box {change.name} already, or one of its generation")

    def apply_creation(self, change: changes.BoxCreated, lsn: int) -> None:
        context = self._context
        box = Box(
            name=change.name,
            generation=change.generation,
            config=change.config,
            created_ms=change.at_ms,
            reserved_seq=change.reserved_seq,
        )
        box.last_lsn = box.floor_lsn = box.config_lsn = lsn
        context.boxes[change.name] = box
        context.generations[change.generation] = box
        context.last_generation = max(context.last_generation, change.generation)
        context.not_recreated.pop(change.name, None)
        context.durability.note_reservation(box, lsn)
        context.arm_timer(box)

    def _apply_config(self, change: changes.BoxConfigured, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        bytes_before = context.unsealed_boxes.bytes_of(box)
        box.apply_config(change, lsn)
        context.key_expiry.watch(box)  # the window may be shorter now
        if change.reserved_seq:
            context.durability.note_reservation(box, lsn)
        if box.is_memory:  # where a record is visible as soon as it has a seq
            box.log.show(box.log.head_seq, box.log.last_ts)
        if box.is_object:
            context.uploading.stage(box, lsn)
        self.note_unsealed(box, bytes_before)
        if box.config.compact == "tag":
            context.compactable[box.generation] = box

    def _apply_facts(self, change: changes.BoxRestated, lsn: int) -> None:
        """Live, the box has these facts already; in recovery it takes them over."""
        context = self._context
        box = context.generations[change.generation]
        box.last_lsn = lsn
        if box.facts(whole=True) == change.facts:
            return
        context.keys_kept -= len(box.keys)
        for outbox in box.outboxes.values():
            context.forwarding.close(outbox)
        context.moves.close(box)
        box.restore_facts(change.facts)
        context.schedules.on_box_replaced(box)
        context.keys_kept += len(box.keys)
        context.key_expiry.watch(box)

    def _apply_box_deletion(self, change: changes.BoxDeleted, lsn: int) -> None:
        context = self._context
        box = context.generations.pop(change.generation)
        del context.boxes[box.name]
        context.durability.note_deletion(lsn)
        context.forget_timer(change.generation)
        context.keys_kept -= len(box.keys)
        context.key_expiry.forget(change.generation)
        context.unsealed_boxes.forget(box)
        self.leave_alone(change.generation)
        context.forwarding.box_deleted(box, lsn)
        context.moves.close(box)
        context.schedules.on_box_deleted(box, lsn)
        if not box.config.auto_create:
            context.not_recreated[box.name] = None
            if len(context.not_recreated) > NOT_RECREATED_MAX:
                del context.not_recreated[next(iter(context.not_recreated))]

    def leave_alone(self, generation: int) -> None:
        """Removes a box from the candidates of background work."""
        context = self._context
        for waiting in (
            context.due,
            context.boxes_with_dead_records,
            context.compactable,
            context.movable,
        ):
            waiting.pop(generation, None)

    def apply_append(self, change: changes.BatchAppended, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        keys = len(box.keys)
        was_empty = box.log.count == 0
        bytes_before = context.unsealed_boxes.bytes_of(box)
        tally = context.tally
        tally.records_evicted += box.apply_append(change, lsn)
        tally.appends += 1
        tally.records_appended += change.batch.count
        context.keys_kept += len(box.keys) - keys
        if not keys and box.keys:
            context.key_expiry.watch(box)
        self.note_unsealed(box, bytes_before)
        if change.trim_before_seq or change.evict_before_seq:
            self.note_dead_records(box)
        if box.config.compact == "tag":
            context.compactable[box.generation] = box
        if lsn == 0:
            box.log.show(box.log.head_seq, box.log.last_ts)
        elif box.is_object and not isinstance(change.batch, UnrenderedRows):
            context.uploading.stage(box, lsn)
        if was_empty:
            context.arm_timer(box)
        if box.queue is not None:
            if not isinstance(change.batch, UnrenderedRows) and change.batch.job_fields is not None:
                box.queue.add_jobs(change.batch.first_seq, change.batch.count, change.batch.job_fields)
            box.queue.drop_before(box.log.earliest_seq)

    def _apply_eviction(self, change: changes.RecordsEvicted, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        bytes_before = context.unsealed_boxes.bytes_of(box)
        context.tally.records_evicted += box.apply_eviction(change, lsn)
        self.note_unsealed(box, bytes_before)
        self.note_dead_records(box)
        if box.stream is not None:
            box.stream.drop_before(box.log.earliest_seq)
        if box.queue is not None:
            box.queue.drop_before(box.log.earliest_seq)
        if box.log.count == 0:
            context.arm_timer(box)

    def apply_deletion(self, change: changes.RecordsDeleted, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        bytes_before = context.unsealed_boxes.bytes_of(box)
        context.tally.records_deleted += box.apply_deletion(change, lsn)
        self.note_unsealed(box, bytes_before)
        self.note_dead_records(box)
        if box.stream is not None:
            box.stream.drop_before(box.log.earliest_seq)
        if box.queue is not None:
            if change.seqs is not None:
                box.queue.drop(change.seqs)
            box.queue.drop_before(box.log.earliest_seq)
        if box.log.count == 0:
            context.arm_timer(box)

    def note_unsealed(self, box: Box, bytes_before: int) -> None:
        """Keeps count of the unsealed batches; those of this box cost `bytes_before` until now."""
        context = self._context
        context.unsealed_boxes.note(box, bytes_before)
        tail = box.log.tail
        if (
            tail.records >= context.due_records or tail.held_bytes >= context.due_bytes
        ) and not box.is_memory:
            context.due[box.generation] = box

    def _apply_seal(self, change: changes.SegmentSealed, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        bytes_before = context.unsealed_boxes.bytes_of(box)
        box.apply_seal(change)
        context.due.pop(box.generation, None)
        self.note_unsealed(box, bytes_before)
        self.note_dead_records(box)
        self.note_movable(box)

    def note_movable(self, box: Box) -> None:
        if box.log.segments:
            self._context.movable[box.generation] = box

    def note_dead_records(self, box: Box) -> None:
        if box.log.segments:
            self._context.boxes_with_dead_records[box.generation] = box

    def _apply_replacement(self, change: changes.SegmentsReplaced, lsn: int) -> None:
        self._context.generations[change.generation].apply_replacement(change)

    def _apply_relocation(self, change: changes.SegmentMoved, lsn: int) -> None:
        for segment in self._context.generations[change.generation].log.segments:
            if segment.serial == change.serial:
                segment.is_cold = True

    def _apply_relog(self, change: changes.BatchKept, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        box.last_lsn = max(box.last_lsn, lsn)
        at = box.log.tail.at(change.batch.first_seq)
        rows = None if at is None else box.log.tail.batches[at]
        if at is not None and isinstance(rows, UnrenderedRows):
            change.batch.lsn = lsn
            bytes_before = context.unsealed_boxes.bytes_of(box)
            box.log.render(at, change.batch)
            self.note_unsealed(box, bytes_before)
            context.txns.on_rows_rendered(rows, lsn)
            return
        if at is None:
            assert box.is_memory, "KEPT: a batch of the tail is kept, or one that was restated just before"
            change.batch.lsn = lsn
            box.log.give_back(change.batch)
            return
        box.log.tail.relog(at, lsn)

    def _apply_fence(self, change: changes.TokenFenced, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.fencing_token = change.token
        box.last_lsn = box.floor_lsn = lsn

    def _apply_reservation(self, change: changes.SeqsReserved, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.reserved_seq = change.reserved_seq
        box.volatile.reserved_durable_seq = min(box.volatile.reserved_durable_seq, change.reserved_seq)
        self._context.durability.note_reservation(box, lsn)

    def _apply_loss(self, change: changes.SeqsLost, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.log.lose(change.first_seq, change.last_seq, change.missed)
        box.last_lsn = box.floor_lsn = lsn
