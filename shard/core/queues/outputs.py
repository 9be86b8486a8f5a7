"""Acks jobs with outputs: records that appear in other boxes exactly once (v0 §24).

    AckWithOutputs ─► are all jobs held by the worker? ─► OutputsPlanned: the jobs are deleted, each output
                                                          has the next position      (one change)
                            │                                         │
                            │                                durable ─┴─► copy batch ─► its box
                            └─► no: `lease_lost`, nothing changes           OutputsDelivered ◄─┘

The reply waits for the change as any ack of this queue does. Outputs are sent when the change is durable
(`record_moves.py` releases them), so a power cut never keeps outputs and loses their ack. Their box stores
its position with them, so it has them once (`routers/copy_sources.py`).

The gateway sends a `CheckOutput` for each box first: an output that its box would refuse for good must not be
accepted. A box that is full later, or fenced, holds its outputs back.

Bounds: `BYTES_MAX` of one queue, `SHARD_BYTES_MAX` of the shard. They are tested before an ack is added, so
its own outputs come on top: at most `OUTPUT_BYTES_MAX` of the contract.
"""

from __future__ import annotations

from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.boxes.handlers import make_room_for_keys
from shard.core.boxes.idempotency_keys import IdempotencyKey
from shard.core.changes import Change
from shard.core.context import Context
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome
from shard.core.queues.jobs import Jobs
from shard.core.queues.new_jobs import job_fields_of
from shard.core.queues.output_queue import DESTS_MAX, DeliveryTotal, Outputs
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import (
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    LeaseLost,
    RecordTooLarge,
    Throttled,
)
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import RELAY
from streams.protocol.model.names import RESERVED_KEY_PREFIX
from streams.protocol.model.records import Batch, render

BYTES_MAX = 16 << 20
SHARD_BYTES_MAX = 64 << 20


class OutputHandlers:
    def __init__(self, context: Context, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs
        #: Boxes with pending outputs. Some may have none any more.
        self._boxes: dict[int, Box] = {}
        context.on_check(self.check)
        context.on_snapshot(lambda state: None, self._restore)
        context.observe_before(frozenset((changes.BoxRestated,)), self._note_restated)
        context.on_command(queues.AckWithOutputs, self._ack)
        context.on_command(queues.CheckOutput, self._check_output)
        context.on_box_change(changes.OutputsPlanned, self._apply_plan, _can_plan)
        context.on_box_change(changes.OutputsDelivered, self._apply_delivery, validation.is_queue)

    def __repr__(self) -> str:
        return f"<OutputHandlers {self._pending_bytes()} bytes pending>"

    # -- deciding

    def _check_output(self, command: queues.CheckOutput, now_ms: int, entries: LogEntries) -> Outcome:
        """Refuse outputs that this box would never take. Changes nothing: a missing box is created later."""
        context = self._context
        box = context.boxes.get(command.box)
        context.require_room(command.account, command.bytes, now_ms, counts=False)
        if box is None:
            if command.box in context.not_recreated:
                raise BoxNotFound(
                    f"box {command.box} does not exist, and outputs may not create it; create the box first",
                    box=command.box,
                )
            context.plan_generation(now_ms)
            reply = queues.CheckOutputReply(command.box, False)
            return context.answer_absent(command.box, reply, entries)
        config = box.config
        if box.is_memory:
            raise InvalidRequest(
                f"outputs: {box.name} has durability memory, which cannot take outputs exactly once; use "
                "disk, fsync or object",
                field="outputs",
            )
        if box.fencing_token:
            raise FencingTokenMismatch(
                f"outputs: box {box.name} is fenced, and outputs have no token", field="outputs"
            )
        if config.cap_bytes and command.record_bytes > config.cap_bytes:
            raise RecordTooLarge(
                f"outputs: a record of {command.record_bytes} bytes can never fit into {box.name} "
                f"(cap_bytes {config.cap_bytes})",
                cap_bytes=config.cap_bytes,
            )
        reply = queues.CheckOutputReply(box.name, box.queue is not None)
        return context.answer(box, reply, entries, box.config_lsn)

    def _ack(self, command: queues.AckWithOutputs, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box, queue = self._jobs.queue_of(command.box, now_ms, entries)
        key = _key_of(command.idempotency_key)
        earlier = box.known_key(key, now_ms)
        if earlier is not None:
            reply = queues.AckReply(box.name, earlier.first_seq, [], *self._jobs.totals(box, queue), True)
            return context.answer(box, reply, entries, max(earlier.lsn, box.config_lsn))
        if command.only_repeats:
            raise LeaseLost(f"no earlier ack of {box.name} has this idempotency key", skipped=command.seqs)
        leased_seqs, skipped_seqs = self._jobs.split_by_lease(queue, command, now_ms)
        if skipped_seqs:
            raise LeaseLost(
                f"seqs: {len(skipped_seqs)} of {len(command.seqs)} jobs of {box.name} are not leased to "
                f"{command.node} any more, so nothing was acked; drop the results",
                skipped=skipped_seqs,
            )
        self._require_room(box, command)
        make_room_for_keys(context, command.account, now_ms)
        jobs = [queue.jobs[seq] for seq in leased_seqs]
        change = self._plan(box, command, leased_seqs, key, now_ms)
        context.stage(change, box, entries)
        reply = queues.AckReply(box.name, len(leased_seqs), [], *self._jobs.totals(box, queue), deduped=False)
        outcome = context.answer(box, reply, entries, box.floor_lsn)
        wakes = (box.name,) if any(job.holder or job.key for job in jobs) else ()
        # The plan of a memory box is in no log, so no report of the log wakes the relay.
        return outcome._replace(wakes=(*wakes, RELAY) if box.is_memory else wakes)

    def _plan(
        self, box: Box, command: queues.AckWithOutputs, leased_seqs: list[int], key: str, now_ms: int
    ) -> changes.OutputsPlanned:
        position = 0 if box.outputs is None else box.outputs.last_position
        wall_ms = self._context.wall_ms(now_ms)
        outputs: list[tuple[str, bytes]] = []
        for dest, columns in command.outputs:
            batch = render(columns, first_seq=position + 1, times=now_ms)
            is_queue = dest not in command.log_boxes
            batch.job_fields = job_fields_of(columns, dest, is_queue=is_queue, wall_ms=wall_ms)
            outputs.append((dest, b"".join(batch.to_parts())))
            position = batch.last_seq
        seqs = BitMap64(leased_seqs)
        sizes = box.log.measure_seqs(seqs)
        kept_key = key if box.config.idempotency_window_ms else ""
        return changes.OutputsPlanned(box.generation, list(seqs), list(sizes), kept_key, outputs, now_ms)

    def _require_room(self, box: Box, command: queues.AckWithOutputs) -> None:
        outputs = box.outputs
        pending_bytes = 0 if outputs is None else outputs.pending_bytes
        if pending_bytes >= BYTES_MAX or self._pending_bytes() >= SHARD_BYTES_MAX:
            raise Throttled(
                f"{pending_bytes} bytes of outputs of {box.name} wait for their boxes; make room there, see "
                f"outputs_error in GET /v0/boxes/{box.name}",
                limit="outputs_pending",
            )
        if outputs is None:
            return
        new_count = sum(dest not in outputs.queues for dest, _ in command.outputs)
        if len(outputs.queues) + new_count > DESTS_MAX and outputs.is_full:
            raise Throttled(
                f"outputs of {box.name} wait for {len(outputs.queues)} boxes, which is the limit",
                limit="outputs_pending",
            )

    def _pending_bytes(self) -> int:
        """Return the bytes of pending outputs of this shard."""
        total = 0
        for generation, box in list(self._boxes.items()):
            size = 0 if box.outputs is None else box.outputs.pending_bytes
            if size and generation in self._context.generations:
                total += size
            else:
                del self._boxes[generation]
        return total

    # -- applying

    def _apply_plan(self, change: changes.OutputsPlanned, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        keys = len(box.keys)
        if box.outputs is None:
            box.outputs = Outputs(box.name, box.generation)
        for dest, content in change.outputs:
            idle_queue = None if dest in box.outputs.queues else box.outputs.forget_idle()
            if idle_queue is not None:
                context.forwarding.close(idle_queue)
            queue = box.outputs.apply_plan(dest, Batch.from_bytes(memoryview(content)))
            context.moves.on_plan(box, queue, lsn)
        self._boxes[box.generation] = box
        if change.idempotency_key:
            count, head_seq = len(change.seqs), box.log.head_seq
            box.keys.note(IdempotencyKey(change.idempotency_key, count, head_seq, change.at_ms, lsn))
        context.keys_kept += len(box.keys) - keys
        if not keys:
            context.key_expiry.watch(box)
        context.box_appliers.apply_deletion(_deletion_of(change), lsn)

    def _apply_delivery(self, change: changes.OutputsDelivered, lsn: int) -> None:
        context = self._context
        box = context.generations[change.generation]
        box.last_lsn = max(box.last_lsn, lsn)
        if box.outputs is None:
            box.outputs = Outputs(box.name, box.generation)
        delivery = DeliveryTotal(change.total, change.dest_generation)
        box.outputs.apply_delivery(change.dest, change.position, delivery)
        context.arm_timer(box)  # it may be deleted when it is empty

    def _note_restated(self, change: Change, lsn: int) -> None:
        """The box was in memory, and may have had pending outputs there."""
        if isinstance(change, changes.BoxRestated) and change.generation in self._context.generations:
            self._boxes[change.generation] = self._context.generations[change.generation]

    def _restore(self, state: ShardState) -> None:
        for box in self._context.boxes.values():
            if box.outputs is not None:
                self._boxes[box.generation] = box

    def check(self) -> None:
        """Asserts OUTPUTS of each queue, and that boxes with pending outputs are known. For tests."""
        for generation, box in self._context.generations.items():
            if box.outputs is not None:
                box.outputs.check()
                assert not box.outputs.pending_bytes or generation in self._boxes, "OUTPUTS"


def _key_of(key: str) -> str:
    """The idempotency key of an ack, apart from those of appends to the same box."""
    return f"{RESERVED_KEY_PREFIX}ack {key}"


def _deletion_of(change: changes.OutputsPlanned) -> changes.RecordsDeleted:
    return changes.RecordsDeleted(change.generation, 0, 0, BitMap64(change.seqs), change.sizes, change.at_ms)


def _can_plan(change: changes.OutputsPlanned, box: Box) -> None:
    validation.is_queue(change, box)
    validation.validate_deletion(_deletion_of(change), box)
    position = 0 if box.outputs is None else box.outputs.last_position
    for _, content in change.outputs:
        first_position, count, _ = Batch.peek(memoryview(content))
        if first_position <= position:
            raise DoesNotApply(f"outputs of {box.name} begin at {first_position}, behind {position}")
        position = first_position + count - 1
