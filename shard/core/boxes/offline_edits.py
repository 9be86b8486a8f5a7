"""Edits a box's log while no server runs on it: cuts off its end, or removes lost batches from its middle.

A repair and a restore to a time use this on a recovered machine, and then write a new log. The edits are not
changes and are never logged, because the old log is replaced.

Rules of the file
- A loss is reported: records removed from the middle become a hole. Records cut off the end never existed.
- Segments are files. The caller has written the replacement segments, and passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec.structs import replace
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.holes import Hole
from shard.core.boxes.idempotency_keys import IdempotencyKeys
from shard.core.boxes.sealed import Segment
from shard.core.boxes.tail import UnsealedTail
from shard.core.changes import Change
from streams.protocol.model.records import Batch

#: More than any seq.
_END = (1 << 64) - 1


def live_runs(log: BoxLog, segment: Segment, upto_seq: int = _END) -> dict[int, list[tuple[int, int]]]:
    """Live stretches (indexes) of each batch of a segment that has some up to `upto_seq`."""
    runs_by_batch: dict[int, list[tuple[int, int]]] = {}
    for at in range(segment.front, len(segment)):
        batch = segment.batch(at)
        if batch.first_seq <= upto_seq and batch.dead < batch.count:
            runs = log.runs(batch, 0, min(batch.count - 1, upto_seq - batch.first_seq))
            if runs:
                runs_by_batch[at] = runs
    return runs_by_batch


def cut_after(box: Box, seq: int, *, last_ts: int, replacement: Segment | None = None) -> None:
    """Removes all records above `seq`. `replacement` has the live records up to `seq` of the segment that the
    cut goes through; None if it has none."""
    log = box.log
    assert log.earliest_seq - 1 <= seq <= log.head_seq, "FLOORS"
    segments = [segment for segment in log.segments if segment.last_seq <= seq]
    for segment in log.segments[len(segments) :]:
        log.deleted_seqs.remove_range(segment.first_seq, segment.last_seq + 1)
    log.segments = segments if replacement is None else [*segments, replacement]
    tail, log.tail = log.tail, UnsealedTail()
    for batch in tail:
        if batch.first_seq <= seq and batch.dead < batch.count:
            if batch.last_seq > seq:
                part = batch.part(0, seq - batch.first_seq)
                part.lsn, batch = batch.lsn, part
            log.hydrate(batch)
    log.deleted_seqs.remove_range(seq + 1, _END)
    log.holes = [
        Hole(hole.first_seq, min(hole.last_seq, seq), hole.missed_count)
        for hole in log.holes
        if hole.first_seq <= seq
    ]
    log.head_seq, log.last_ts = seq, last_ts
    log.show(seq, last_ts)
    recount(log)
    box.keys = IdempotencyKeys(entry for entry in box.keys.values() if entry.last_seq <= seq)
    box.volatile.unsealed_since_ms = box.last_append_ms
    settle_rest(box)


def settle_rest(box: Box) -> None:
    """Makes the rest of a box agree with its log: jobs of missing records are dropped, all others can be
    claimed, no group is ahead of the head, and the times that a stream keeps end with its records."""
    log = box.log
    log.advance_earliest()
    if box.queue is not None:
        facts = box.queue.facts(leases_kept=True)
        jobs = [entry for entry in facts.jobs if log.is_live(int(entry[0]))]
        # The change that moved `fresh_seq` may be lost; without it, each job without an entry is fresh.
        box.queue.restore(msgspec.structs.replace(facts, fresh_seq=0, jobs=jobs))
        for line in box.moves.values():
            box.queue.mark_all_moving(move for move in line.moves.values() if log.is_live(move.seq))
        box.queue.drop_before(log.earliest_seq)
    if box.stream is not None:
        box.stream.cut_after(log.head_seq)
        box.stream.drop_before(log.earliest_seq)
    box.groups.restore([(name, min(cursor, log.head_seq), at) for name, cursor, at in box.groups.facts()])


def recount(log: BoxLog) -> None:
    """Computes count and bytes again, from the batches and segments."""
    log.count = sum(segment.count for segment in log.segments)
    log.bytes = sum(segment.bytes for segment in log.segments)
    batches, log.tail = sorted(log.tail.batches, key=lambda batch: batch.first_seq), UnsealedTail()
    for batch in batches:
        log.count_dead(batch)
        if batch.dead < batch.count:
            log.tail.append(batch)
            log.count += batch.count - batch.dead
            log.bytes += batch.live_bytes
        else:
            log.deleted_seqs.remove_range(batch.first_seq, batch.last_seq + 1)
    log.records_awaited = 0
    log.advance_earliest()


def remeasure(
    log: BoxLog,
    read: Callable[[Segment, int], Batch],
    lost_records: Mapping[int, Container[int]] = MappingProxyType({}),
) -> list[tuple[int, int]]:
    """Computes again which records of every segment are dead and live, from floors and deletes alone.

    `read` returns a batch of a segment; it is called for partly dead batches. `lost_records` names, by the
    serial of the segment, batches that cannot be read any more. Their live records become holes. Returns the
    first and last seqs of the holes; the caller replaces these segments at once (`replace_segment`).
    """
    holes: list[tuple[int, int]] = []
    fresh: list[Segment] = []
    for segment in log.segments:
        again = Segment.from_bytes(segment.generation, segment.serial, segment.to_bytes())
        again.is_cold = segment.is_cold
        for at in range(len(again)):
            runs = _runs(log, again, at)
            base, count = again.first_seqs[at], again.counts[at]
            live = sum(last - first + 1 for first, last in runs)
            if live and at in lost_records.get(again.serial, ()):
                holes += [(base + first, base + last) for first, last in runs]
                live = 0
            if live == 0:
                again.kill_whole(at)
                log.add_deleted(range(base, base + count))
            elif live < count:
                batch = read(again, at)
                size = sum(batch.size(first, last) for first, last in runs)
                again.kill(at, count - live, again.sizes[at] - size)
        again.dead_version = 0
        if again.count:
            fresh.append(again)
        else:
            log.deleted_seqs.remove_range(again.first_seq, again.last_seq + 1)
    log.segments = fresh
    add_holes(log, holes)
    recount(log)
    return holes


def _runs(log: BoxLog, segment: Segment, at: int) -> list[tuple[int, int]]:
    """Live stretches (indexes) of a batch by floors and deletes, whatever the segment says is dead in it."""
    base, count = segment.first_seqs[at], segment.counts[at]
    runs: list[tuple[int, int]] = []
    start = max(base, log.earliest_seq)
    for seq in log.deleted_in(start, base + count):
        if seq > start:
            runs.append((start - base, seq - 1 - base))
        start = seq + 1
    if start < base + count:
        runs.append((start - base, count - 1))
    return runs


def replace_segment(log: BoxLog, segment: Segment, replacement: Segment | None) -> None:
    """Replaces a segment by another that has its live records, or by none."""
    if replacement is None:
        assert segment.count == 0, "COUNT"
        log.drop_empty_segments()
    else:
        log.replace([segment.serial], replacement)
    log.advance_earliest()


def add_holes(log: BoxLog, holes: Sequence[tuple[int, int]]) -> None:
    """Adds holes anywhere in the log, so that readers see these seqs as lost."""
    all_holes = [*log.holes, *(Hole(first, last) for first, last in holes)]
    log.holes = []
    for hole in sorted(all_holes, key=lambda hole: hole.first_seq):
        before = log.holes[-1] if log.holes else None
        touches = before is not None and hole.first_seq <= before.last_seq + 1
        if before is not None and touches and not (before.missed_count or hole.missed_count):
            before.last_seq = max(hole.last_seq, before.last_seq)
        else:  # a hole from a loss at a router's source keeps its own count
            log.holes.append(hole)


def fit_change(change: Change, box: Box) -> Change:
    """Return the change, adapted to a box whose batches are not those of the box where it was logged. The
    sizes inside batches are computed again, which may need payloads."""
    log = box.log
    if isinstance(change, changes.BatchAppended) and (change.trim_before_seq or change.evict_before_seq):
        return replace(
            change,
            trim_cut_bytes=log.measure_before(change.trim_before_seq),
            evict_cut_bytes=log.measure_before(change.evict_before_seq, above=change.trim_before_seq),
        )
    if isinstance(change, changes.RecordsEvicted):
        return replace(change, cut_bytes=log.measure_before(change.before_seq))
    if isinstance(change, changes.RecordsDeleted):
        cut_bytes = log.measure_before(change.before_seq) if change.before_seq else 0
        sizes = log.measure_seqs(change.seqs) if change.seqs else ()
        return replace(change, cut_bytes=cut_bytes, sizes=sizes, groups=())
    if isinstance(change, changes.MovesDone | changes.OutputsPlanned):
        return replace(change, sizes=log.measure_seqs(BitMap64(change.seqs)))
    return change
