"""Plans background work: which batches to seal, to log again, to rewrite. Plans only; changes nothing.

    tail ──due──► ToSeal      its oldest batches become a segment
         ──small─► ToKeep     too little for a file: written to the log again, so that older log can go
    segments ───► ToRewrite   neighbours that are a third dead, or small, become one

Rules of the file
- A plan names batches and segments as they are now. The engine carries it out and returns a change, which is
  applied only if the plan is still valid (`still_stands`).
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.boxes.unsealed import is_worth_a_file
from shard.core.context import Context
from streams.protocol.model.records import Batch

#: Boxes looked at in one go.
_LOOK_MAX = 1000

#: A box that is not written to for this long is compacted however little is new.
_QUIET_MS = 10_000

#: Segments of less than this part of the usual size are joined with their neighbours.
_SMALL_PART = 4


class SealPolicy(NamedTuple):
    """When unsealed batches are sealed: as soon as a box has so many records or bytes, or is so old."""

    records: int
    bytes: int
    age_ms: int


class HotPolicy(NamedTuple):
    """How much of a box stays on this disk when there is a cold store: so many segments and bytes."""

    segments: int
    bytes: int


class ToSeal(NamedTuple):
    box: Box
    serial: int
    batches: list[Batch]


class ToKeep(NamedTuple):
    box: Box
    batches: list[Batch]


class LivePart(NamedTuple):
    """The live part of a segment that is rewritten."""

    segment: Segment
    dead_version: int
    #: Live stretches (indexes) of batches in which something is dead; of all others everything is taken.
    runs: dict[int, list[tuple[int, int]]]


class ToRewrite(NamedTuple):
    box: Box
    serial: int
    parts: list[LivePart]

    def still_stands(self, context: Context) -> bool:
        """Return True if no record has died in the segments read, and the box is still stored."""
        if context.generations.get(self.box.generation) is not self.box or self.box.is_memory:
            return False
        present = set(map(id, self.box.log.segments))
        return all(
            id(part.segment) in present and part.segment.dead_version == part.dead_version
            for part in self.parts
        )


def plan_seal(
    context: Context, policy: SealPolicy, *, now_ms: int, pinned_lsn: int = 0, is_pressed: bool = False
) -> ToSeal | ToKeep | None:
    """Return the next box to seal, or to log again. `pinned_lsn`: log up to here should become free.
    `is_pressed`: the unsealed batches take too much memory."""
    for box in list(islice(context.due.values(), _LOOK_MAX)):
        tail = box.log.tail
        if box.is_memory or (tail.records < policy.records and tail.held_bytes < policy.bytes):
            del context.due[box.generation]  # it is in memory alone, or much of it is gone, meanwhile
            continue
        plan = _seal(context, box, policy)
        if plan is not None:
            return plan

    def free_log(box: Box) -> ToSeal | ToKeep | None:
        if is_pressed or is_worth_a_file(box):
            return _seal(context, box, policy)
        return _keep(context, box)

    boxes = context.unsealed_boxes
    upto_lsn = context.durability.durable_lsn if is_pressed else pinned_lsn
    to_free_log: ToSeal | ToKeep | None = boxes.first_by_lsn(upto_lsn, free_log)
    if to_free_log is not None:
        return to_free_log
    # Small ones wait until their part of the log is wanted.
    oldest: ToSeal | None = boxes.first_by_age(
        now_ms - policy.age_ms, lambda box: _seal(context, box, policy)
    )
    return oldest


def _seal(context: Context, box: Box, policy: SealPolicy) -> ToSeal | None:
    batches = box.log.sealable(durable_lsn=context.durability.durable_lsn, bytes_max=policy.bytes)
    return ToSeal(box, box.last_serial + 1, batches) if batches else None


def _keep(context: Context, box: Box) -> ToKeep | None:
    """All of a tail or nothing, so that its batches stay in the order of their lsns."""
    if box.log.tail.has_unrendered:  # they are in no frame of their own yet
        return None
    batches = [batch for batch in box.log.tail if batch.dead < batch.count]
    if not batches or batches[-1].lsn > context.durability.durable_lsn:
        return None
    return ToKeep(box, batches)


def plan_rewrite(context: Context, policy: SealPolicy) -> ToRewrite | None:
    """Return segments to rewrite as one. Boxes without such segments are passed over until a record dies or a
    segment is sealed in them."""
    for _ in range(_LOOK_MAX):
        if not context.boxes_with_dead_records:
            return None
        generation, box = next(iter(context.boxes_with_dead_records.items()))
        run = [] if box.is_memory else _run_to_rewrite(box.log.segments, policy)
        if run:
            return ToRewrite(box, box.last_serial + 1, [_part(box, segment) for segment in run])
        del context.boxes_with_dead_records[generation]
    return None


def plan_compaction(context: Context, *, now_ms: int) -> Box | None:
    """A box to compact: half of it is new, or it has been quiet for a while. A box whose new records are not
    durable yet stays a candidate."""
    for box in list(islice(context.compactable.values(), _LOOK_MAX)):
        compacted_seq = box.volatile.compacted_seq
        if box.config.compact != "tag" or box.log.head_seq <= compacted_seq:
            del context.compactable[box.generation]
        elif box.log.visible_seq > compacted_seq:
            fresh = box.log.sealable_upto(context.durability.durable_lsn) - compacted_seq
            if fresh > 0 and (2 * fresh >= box.log.count or now_ms - box.last_append_ms >= _QUIET_MS):
                return box
    return None


def plan_move(context: Context, policy: HotPolicy) -> tuple[Box, Segment] | None:
    """The oldest segment of a box that has more here than it should."""
    for _ in range(_LOOK_MAX):
        if not context.movable:
            return None
        generation, box = next(iter(context.movable.items()))
        hot = [segment for segment in box.log.segments if not segment.is_cold]
        newer_bytes = sum(segment.total_bytes for segment in hot[1:])
        if len(hot) > policy.segments and newer_bytes >= policy.bytes and not box.is_memory:
            return box, hot[0]
        del context.movable[generation]
    return None


def _run_to_rewrite(segments: list[Segment], policy: SealPolicy) -> list[Segment]:
    """Neighbours of which each is a third dead or small, and which fit into one; or nothing."""
    run: list[Segment] = []
    records = size = 0
    for segment in segments:
        has_dead_records = segment.bytes * 3 <= segment.total_bytes * 2
        small = segment.count * _SMALL_PART < policy.records and segment.bytes * _SMALL_PART < policy.bytes
        fits = records + segment.count <= policy.records and size + segment.bytes <= policy.bytes
        if (has_dead_records or small) and not segment.is_cold and (fits or not run):
            run.append(segment)
            records += segment.count
            size += segment.bytes
            continue
        if _is_worth_it(run):
            return run
        run = []
        records = size = 0
        if has_dead_records and not segment.is_cold:
            run, records, size = [segment], segment.count, segment.bytes
    return run if _is_worth_it(run) else []


def _is_worth_it(run: list[Segment]) -> bool:
    """A single segment must be a third dead. Small ones are joined when there are enough of them: each byte
    is then written again a few times at most."""
    if any(segment.bytes * 3 <= segment.total_bytes * 2 for segment in run):
        return True
    return len(run) >= _SMALL_PART


def _part(box: Box, segment: Segment) -> LivePart:
    log = box.log
    runs: dict[int, list[tuple[int, int]]] = {at: [] for at in range(segment.front)}
    dead = {at for at, _, _ in segment.dead_batches()}
    if segment.first_seqs[segment.front] < log.earliest_seq:
        dead.add(segment.front)
    for at in dead:
        batch = segment.batch(at)
        runs[at] = [] if batch.dead == batch.count else log.runs(batch, 0, batch.count - 1)
    return LivePart(segment, segment.dead_version, runs)
