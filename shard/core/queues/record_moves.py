"""Records that move from one box to another, once each: dead letters to their box, and back into their queue.

A move is planned, copied, done:

    MovesPlanned   each record gets the next position of the line to its destination
         │         (durable before anything leaves: a position never means two records)
    a parcel       copies leave and are appended once, because the destination knows how far it has the line
         │
    MovesDone      the destination has them up to here: they are deleted, and count as moved

`routers/outbox.py` and `routers/copy_sources.py` do the middle part. A record that is deleted or evicted
while it waits is passed over. A line ends with its box; its origin is named after the box's generation, so a
box made again under the same name has lines of its own.
"""

from __future__ import annotations

from collections import deque

import msgspec
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.context import Context
from shard.core.durability import Answer
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.move_lines import FROM, Line, Move
from shard.core.routers.outbox import EXAMINE_MAX, Outboxes
from streams.protocol.errors import NotAQueue
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import RELAY
from streams.protocol.model.records import metas_of


class Moves:
    """What the machine does with moves."""

    def __init__(self, context: Context, outboxes: Outboxes) -> None:
        self._context = context
        self._outboxes = outboxes
        context.on_check(self.check)
        #: Plans that are on their way to the disk, in the order of their lsns.
        self._until_durable: deque[tuple[int, Line, int]] = deque()
        #: Those of object boxes, on their way to the store.
        self._until_uploaded: deque[tuple[int, Line, int]] = deque()
        context.on_command(queues.RequireQueue, self._require_queue)
        context.on_command(queues.PlanRequeue, self._plan_requeue)
        context.on_command(queues.AwaitMoves, self._await)
        context.on_box_change(changes.MovesPlanned, self._apply_planned)
        context.on_box_change(changes.MovesDone, self._apply_done, _require_line)

    # -- planning

    def plan(
        self, box: Box, dest: str, seqs: list[int], deliveries: list[int], *, is_dead: bool
    ) -> changes.MovesPlanned:
        """The change that would move these records. Reads how large they are."""
        sizes = [box.log.measure_seqs(BitMap64([seq]))[0] for seq in seqs]
        return changes.MovesPlanned(box.generation, dest, is_dead, seqs, deliveries, sizes)

    def _require_queue(self, command: queues.RequireQueue, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        if box.queue is None:
            raise NotAQueue(f"box {box.name} is a log; dead letters go back into queues only", box=box.name)
        return self._context.answer(box, queues.RequireQueueReply(box.name), entries, box.config_lsn)

    def _plan_requeue(self, command: queues.PlanRequeue, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        seqs = self._find_letters(box, command.to, command.max, now_ms)
        lsn = 0
        if seqs:
            change = self.plan(box, command.to, seqs, [0] * len(seqs), is_dead=False)
            lsn = self._context.stage(change, box, entries)
        line = box.moves.get((command.to, False))
        reply = queues.PlanRequeueReply(box.name, len(seqs), line.last if line is not None else 0)
        # Nothing leaves before the plan is on the disk, so the reply asks for a sync.
        wait = self._context.durability.wait_for(
            Answer.MOVE if lsn else Answer.RECORDS, box, max(lsn, box.floor_lsn)
        )
        return reply_after(wait, entries, reply)

    def _find_letters(self, box: Box, to: str, count: int, now_ms: int) -> list[int]:
        """The oldest records that died in `to`, are not on their way yet, and that no worker has."""
        if box.queue is not None:
            box.queue.advance(now_ms)
        moving = {move.seq for line in box.moves.values() for move in line.moves.values()}
        wanted = msgspec.json.encode(to)
        found: list[int] = []
        examined = 0
        log = box.log
        for span in log.spans():
            if span.first_seq > log.visible_seq or len(found) >= count or examined >= EXAMINE_MAX:
                break
            for first, last in log.runs(span, 0, min(span.count - 1, log.visible_seq - span.first_seq)):
                examined += last - first + 1
                text = span.payload.text(first, last)
                for seq, meta in enumerate(metas_of(text), span.first_seq + first):
                    is_free = seq not in moving and (box.queue is None or box.queue.is_ready(seq))
                    if len(found) < count and is_free and bytes(meta.get(FROM, b"")) == wanted:
                        found.append(seq)
        return found

    def _await(self, command: queues.AwaitMoves, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.require(command.box)
        line = box.moves.get((command.to, False))
        waiting = max(0, command.position - line.saved_position) if line is not None else 0
        if waiting and command.wait_ms:
            return self._context.nothing_yet(entries)
        return self._context.answer(box, queues.AwaitMovesReply(waiting), entries, box.config_lsn)

    # -- on the way

    def durable(self, lsn: int) -> bool:
        """Plans up to `lsn` are on the disk: what they say may leave. Whether there is something."""
        return self._let_go(self._until_durable, lsn)

    def uploaded(self, lsn: int) -> list[str]:
        """The same of object boxes, whose plans are in the store."""
        return [RELAY] if self._let_go(self._until_uploaded, lsn) else []

    def _let_go(self, waiting: deque[tuple[int, Line, int]], lsn: int) -> bool:
        noted = False
        while waiting and waiting[0][0] <= lsn:
            _, line, position = waiting.popleft()
            line.shown = position
            noted = self._outboxes.note((line,)) or noted
        return noted

    def hold_back(self, box: Box, lsn: int) -> None:
        """What is on its way out of this box must wait until `lsn` is in the store."""
        for line in box.moves.values():
            line.shown = line.saved_position
            self._until_uploaded.append((lsn, line, line.last))

    def note(self, box: Box) -> None:
        self._outboxes.note(box.moves.values())

    def hold(self) -> None:
        """From now on nothing new leaves, and what has arrived is not let go of. Not a fact: it ends with the
        process at the latest."""
        self._outboxes.lines_held = True

    def let_go(self, now_ms: int, entries: LogEntries) -> list[str]:
        """Ends a hold. Returns the boxes that have let go of something."""
        outboxes = self._outboxes
        outboxes.lines_held = False
        freed: list[str] = []
        for box in list(self._context.boxes.values()):
            for line in box.moves.values():
                done = line.change_of_move(box.generation, now_ms)
                if done is not None:
                    self._context.stage(done, box, entries)
                    freed.append(box.name)
            outboxes.note(box.moves.values())
        return freed

    def close(self, box: Box) -> None:
        for line in box.moves.values():
            self._outboxes.close(line)

    # -- applying

    def _apply_planned(self, change: changes.MovesPlanned, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.last_lsn = max(box.last_lsn, lsn)
        key = (change.dest, change.is_dead)
        line = box.moves.get(key)
        if line is None:
            line = box.new_line(change.dest, is_dead=change.is_dead)
        line.planned(list(map(Move, change.seqs, change.deliveries, change.sizes)))
        if box.queue is not None:
            for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
                if seq:
                    box.queue.moving(seq, deliveries)
        if lsn:
            waiting = self._until_uploaded if box.is_object else self._until_durable
            waiting.append((lsn, line, line.last))
        else:
            line.shown = line.last
            self._outboxes.note((line,))

    def _apply_done(self, change: changes.MovesDone, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        line = box.moves[change.dest, change.is_dead]
        line.done(change.position)
        if box.queue is not None and line.is_dead:
            box.queue.dead_lettered += len(change.seqs)
        context.box_appliers.records_deleted(_deleted_by(change), lsn)

    def check(self) -> None:
        """Asserts MOVES: a line holds one move for each position behind the confirmed one. For tests."""
        for box in self._context.boxes.values():
            for line in box.moves.values():
                assert list(line.moves) == list(range(line.saved_position + 1, line.last + 1)), "MOVES"
                assert line.saved_position <= line.last and line.shown <= line.last, "MOVES"
        for waiting in (self._until_durable, self._until_uploaded):
            lsns = [lsn for lsn, _, _ in waiting]
            assert lsns == sorted(lsns), "MOVES"


def _require_line(change: changes.MovesDone, box: Box) -> None:
    line = box.moves.get((change.dest, change.is_dead))
    if line is None or change.position > line.last:
        raise DoesNotApply(f"moves from {box.name} to {change.dest} are done that were not planned")
    if change.seqs:
        validation.deleted(_deleted_by(change), box)


def _deleted_by(change: changes.MovesDone) -> changes.RecordsDeleted:
    seqs = BitMap64(change.seqs)
    return changes.RecordsDeleted(change.generation, 0, 0, seqs, change.sizes, change.at_ms)
