"""Moves records from one box to another, once each: dead letters to their box, and back into their queue.

A move has three steps:

    MovesPlanned   each record gets the next position of the move queue to its destination
         │         (durable before a copy is sent: a position never means two records)
    a copy batch   the copies are appended once, because the destination has a position of the move queue
         │
    MovesDone      the destination has the copies up to here: the records are deleted, and count as moved

`routers/outbox.py` and `routers/copy_sources.py` do the second step. A record that is deleted or evicted
before that is skipped. A move queue ends with its box. Its origin contains the box's generation, so a box
that is created again under the same name has its own move queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import UNFINISHED
from shard.core.context import Context
from shard.core.durability import ReplyKind
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.move_queue import FROM, Move
from shard.core.queues.planned_outbox import PlannedOutbox
from shard.core.routers.outbox import EXAMINE_MAX, Outboxes
from streams.protocol.errors import NotAQueue
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import RELAY
from streams.protocol.model.records import metas_of


class Moves:
    """Handles the commands and applies the changes of moves."""

    def __init__(self, context: Context, outboxes: Outboxes) -> None:
        self._context = context
        self._outboxes = outboxes
        context.on_check(self.check)
        #: Plans that are not durable yet, by lsn: (lsn, outbox, last position).
        self._until_durable: deque[tuple[int, PlannedOutbox, int]] = deque()
        #: Plans of object boxes that are not in the object store yet.
        self._until_uploaded: deque[tuple[int, PlannedOutbox, int]] = deque()
        context.on_command(queues.RequireQueue, self._require_queue)
        context.on_command(queues.PlanRequeue, self._plan_requeue)
        context.on_command(queues.AwaitMoves, self._await)
        context.on_box_change(changes.MovesPlanned, self._apply_plan)
        context.on_box_change(changes.MovesDone, self._apply_arrival, _require_move_queue)

    # -- planning

    def plan(
        self, box: Box, dest: str, seqs: list[int], deliveries: list[int], *, is_dead: bool
    ) -> changes.MovesPlanned:
        """Return the change that plans the moves of these records, with their sizes."""
        sizes = [box.log.measure_seqs(BitMap64([seq]))[0] for seq in seqs]
        return changes.MovesPlanned(box.generation, dest, is_dead, seqs, deliveries, sizes)

    def _require_queue(self, command: queues.RequireQueue, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        if box.queue is None:
            raise NotAQueue(
                f"box {box.name} is a log; dead letters can be requeued only into a queue", box=box.name
            )
        return self._context.answer(box, queues.RequireQueueReply(box.name), entries, box.config_lsn)

    def _plan_requeue(self, command: queues.PlanRequeue, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        seqs = self._select_letters(box, command, now_ms)
        if seqs is None:
            return Outcome(entries, None, needs=(UNFINISHED,))
        lsn = 0
        if seqs and not command.dry_run:
            change = self.plan(box, command.to, seqs, [0] * len(seqs), is_dead=False)
            lsn = self._context.stage(change, box, entries)
        move_queue = box.moves.get((command.to, False))
        reply = queues.PlanRequeueReply(
            box.name, len(seqs), move_queue.last_position if move_queue is not None else 0
        )
        # No copy is sent before the plan is durable, so the reply asks for a sync.
        wait = self._context.durability.wait_for(
            ReplyKind.MOVE if lsn else ReplyKind.RECORDS, box, max(lsn, box.floor_lsn)
        )
        return reply_after(wait, entries, reply)

    def _select_letters(self, box: Box, command: queues.PlanRequeue, now_ms: int) -> list[int] | None:
        """Return the dead letters of a command. None if the search needs another step."""
        if box.queue is not None:
            box.queue.advance(now_ms, now_ms + self._context.wall_ahead_ms)
        moving = {move.seq for move_queue in box.moves.values() for move in move_queue.moves.values()}
        if command.match is None and not command.seqs:
            return self._find_letters(box, command.to, command.max, moving)
        candidates: Iterable[int] = sorted(set(command.seqs))
        if command.match is not None:
            search = box.begin_deletion(command, command.match)  # the same search; nothing is deleted
            matches = search.step(box, now_ms)
            if matches is None:
                return None
            candidates = islice(matches.seqs or (), EXAMINE_MAX)
        seqs: list[int] = []
        for seq in candidates:
            if len(seqs) >= command.max:
                break
            if seq <= box.log.visible_seq and box.log.is_live(seq) and seq not in moving:
                seqs += self._letter_at(box, command.to, seq)
        box.end_deletion()
        return seqs

    @staticmethod
    def _letter_at(box: Box, to: str, seq: int) -> list[int]:
        """Return the seq if this live record is a dead letter of `to` that nobody has leased."""
        span = box.log.span_at(seq)
        if span is None or not (box.queue is None or box.queue.is_ready(seq)):
            return []
        batch = span.payload
        (meta,) = metas_of(batch.text(seq - batch.first_seq, seq - batch.first_seq))
        return [seq] if bytes(meta.get(FROM, b"")) == msgspec.json.encode(to) else []

    @staticmethod
    def _find_letters(box: Box, to: str, count: int, moving: set[int]) -> list[int]:
        """Return the oldest dead letters of `to` that are neither moving nor leased."""
        from_queue = msgspec.json.encode(to)
        seqs: list[int] = []
        examined_count = 0
        log = box.log
        for span in log.spans():
            if span.first_seq > log.visible_seq or len(seqs) >= count or examined_count >= EXAMINE_MAX:
                break
            for first, last in log.runs(span, 0, min(span.count - 1, log.visible_seq - span.first_seq)):
                examined_count += last - first + 1
                text = span.payload.text(first, last)
                for seq, meta in enumerate(metas_of(text), span.first_seq + first):
                    is_free = seq not in moving and (box.queue is None or box.queue.is_ready(seq))
                    if len(seqs) < count and is_free and bytes(meta.get(FROM, b"")) == from_queue:
                        seqs.append(seq)
        return seqs

    def _await(self, command: queues.AwaitMoves, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.require(command.box)
        move_queue = box.moves.get((command.to, False))
        waiting = max(0, command.position - move_queue.log_position.position) if move_queue is not None else 0
        if waiting and command.wait_ms:
            return self._context.nothing_yet(entries)
        return self._context.answer(box, queues.AwaitMovesReply(waiting), entries, box.config_lsn)

    # -- when to send

    def on_durable(self, lsn: int) -> bool:
        """Release the plans up to `lsn`, which are durable. Return True if an outbox may send now."""
        return self._release(self._until_durable, lsn)

    def on_upload(self, lsn: int) -> list[str]:
        """Release the plans of object boxes up to `lsn`, which are in the store. Returns names to wake."""
        return [RELAY] if self._release(self._until_uploaded, lsn) else []

    def _release(self, waiting: deque[tuple[int, PlannedOutbox, int]], lsn: int) -> bool:
        can_send = False
        while waiting and waiting[0][0] <= lsn:
            _, outbox, position = waiting.popleft()
            # A plan of another class may have been released before.
            outbox.sendable_position = max(outbox.sendable_position, position)
            can_send = self._outboxes.note((outbox,)) or can_send
        return can_send

    def delay_until_upload(self, box: Box, lsn: int) -> None:
        """Send no moves and outputs of this box before `lsn` is in the store."""
        for outbox in planned_outboxes(box):
            outbox.sendable_position = outbox.log_position.position
            self._until_uploaded.append((lsn, outbox, outbox.last_position))

    def note(self, box: Box) -> None:
        self._outboxes.note(planned_outboxes(box))

    def pause(self) -> None:
        """Send no new moves and outputs, and drop none that have arrived, until `resume`. It is not logged:
        it ends with the process at the latest."""
        self._outboxes.are_moves_paused = True

    def resume(self, now_ms: int, entries: LogEntries) -> list[str]:
        """End a pause. Returns the boxes that have deleted moved records."""
        outboxes = self._outboxes
        outboxes.are_moves_paused = False
        box_names: list[str] = []
        for box in list(self._context.boxes.values()):
            for outbox in planned_outboxes(box):
                change = outbox.change_of_move(box.generation, now_ms)
                if change is not None:
                    self._context.stage(change, box, entries)
                    box_names.append(box.name)
            outboxes.note(planned_outboxes(box))
        return box_names

    def close(self, box: Box) -> None:
        for outbox in planned_outboxes(box):
            self._outboxes.close(outbox)

    # -- applying

    def _apply_plan(self, change: changes.MovesPlanned, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.last_lsn = max(box.last_lsn, lsn)
        key = (change.dest, change.is_dead)
        move_queue = box.moves.get(key)
        if move_queue is None:
            move_queue = box.new_line(change.dest, is_dead=change.is_dead)
        rows = zip(change.seqs, change.deliveries, change.sizes, strict=True)
        errors, nodes = change.errors or [""] * len(change.seqs), change.nodes or [""] * len(change.seqs)
        move_queue.apply_plan(
            [
                Move(*row, error, node, change.at_ms)
                for row, error, node in zip(rows, errors, nodes, strict=True)
            ]
        )
        if box.queue is not None:
            for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
                if seq:
                    box.queue.mark_moving(seq, deliveries)
        self.on_plan(box, move_queue, lsn)

    def on_plan(self, box: Box, outbox: PlannedOutbox, lsn: int) -> None:
        """Send what was planned by the change at `lsn` when it is durable. 0 = the box is in memory."""
        waiting = self._until_uploaded if box.is_object else self._until_durable
        if not lsn and box.config_lsn > self._context.durability.durable_lsn:
            # A power cut may undo the change of class, and with it earlier plans of these positions.
            lsn = max(box.config_lsn, waiting[-1][0] if waiting else 0)
        if lsn:
            waiting.append((lsn, outbox, outbox.last_position))
        else:
            outbox.sendable_position = outbox.last_position
            self._outboxes.note((outbox,))

    def _apply_arrival(self, change: changes.MovesDone, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        move_queue = box.moves[change.dest, change.is_dead]
        move_queue.apply_arrival(change.position)
        if box.queue is not None and move_queue.is_dead:
            box.queue.dead_lettered += len(change.seqs)
        context.box_appliers.apply_deletion(_deletion_of(change), lsn)

    def check(self) -> None:
        """Asserts MOVES: a move queue has one move for each position after the logged one. For tests."""
        for box in self._context.boxes.values():
            for move_queue in box.moves.values():
                assert list(move_queue.moves) == list(
                    range(move_queue.log_position.position + 1, move_queue.last_position + 1)
                ), "MOVES"
                assert (
                    move_queue.log_position.position <= move_queue.last_position
                    and move_queue.sendable_position <= move_queue.last_position
                ), "MOVES"
        for waiting in (self._until_durable, self._until_uploaded):
            lsns = [lsn for lsn, _, _ in waiting]
            assert lsns == sorted(lsns), "MOVES"


def planned_outboxes(box: Box) -> list[PlannedOutbox]:
    """Return the moves and outputs of a box."""
    outputs = () if box.outputs is None else box.outputs.queues.values()
    return [*box.moves.values(), *outputs]


def _require_move_queue(change: changes.MovesDone, box: Box) -> None:
    move_queue = box.moves.get((change.dest, change.is_dead))
    if move_queue is None or change.position > move_queue.last_position:
        raise DoesNotApply(f"moves from {box.name} to {change.dest} are done that were not planned")
    if change.seqs:
        validation.validate_deletion(_deletion_of(change), box)


def _deletion_of(change: changes.MovesDone) -> changes.RecordsDeleted:
    seqs = BitMap64(change.seqs)
    return changes.RecordsDeleted(change.generation, 0, 0, seqs, change.sizes, change.at_ms)
