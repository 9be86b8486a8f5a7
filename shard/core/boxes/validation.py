"""Says whether a change of a box can be applied to the box as it is, before anything is changed.

Live, every change fits: a handler has just worked it out. In a log of which frames are missing some do not,
and `shard/offline/repair.py` passes over these. Only what an applier would stumble over is looked at, and
never a payload, so that an append pays for two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.log import Log
from shard.core.boxes.sealed import Segment
from shard.core.kernel import DoesNotApply
from shard.core.transactions.unrendered import UnrenderedRows


def appended(change: changes.BatchAppended, box: Box) -> None:
    require_behind(box.log, change.batch.first_seq, change.batch.first_ts)


def forwarded(change: changes.BatchForwarded, box: Box) -> None:
    # Copies behind a loss of their source begin with one seq for the loss.
    require_behind(box.log, change.batch.first_seq - (change.lost > 0), change.batch.first_ts)


def require_behind(log: Log, first_seq: int, first_ts: int) -> None:
    """Raises `DoesNotApply` unless a batch that begins so can follow what the box has."""
    if first_seq <= log.head_seq:
        raise DoesNotApply(f"a batch begins at {first_seq}, and its box ends at {log.head_seq}")
    if first_ts < log.last_ts:
        raise DoesNotApply(f"a batch begins at {first_ts} ms, and its box ends at {log.last_ts} ms")


def deleted(change: changes.RecordsDeleted, box: Box) -> None:
    if change.seqs:
        _can_delete(change, box.log)


def _can_delete(change: changes.RecordsDeleted, log: Log) -> None:
    seqs = change.seqs
    assert seqs is not None
    floor = max(log.earliest_seq, min(change.before_seq, log.head_seq + 1))
    if seqs.min() < floor or not log.deleted.isdisjoint(seqs):
        raise DoesNotApply("records that are to be deleted are gone already")
    batches = 0
    if change.groups:
        held = [seqs.range_cardinality(each.first_seq, each.last_seq + 1) for each in log.segments]
        if len(change.groups) != sum(map(bool, held)):
            raise DoesNotApply("records that are to be deleted are in other segments")
        batches = sum(count for count, _ in change.groups)
        seqs = seqs.copy()
        seqs.remove_range(0, log.sealed_seq + 1)
    located = log.locate(seqs)
    if located is None:
        raise DoesNotApply("a record that is to be deleted is not there")
    if batches + len(located) != len(change.sizes):
        raise DoesNotApply(
            f"records of {len(change.sizes)} batches are to be deleted, and {len(located)} have some"
        )


def lost(change: changes.SeqsLost, box: Box) -> None:
    if change.first_seq != box.log.head_seq + 1:
        raise DoesNotApply(f"seqs from {change.first_seq} are lost, and the box ends at {box.log.head_seq}")


def sealed(change: changes.SegmentSealed, box: Box) -> None:
    segment = Segment.from_bytes(change.generation, change.serial, change.columns)
    log = box.log
    if segment.first_seq <= log.sealed_seq:
        raise DoesNotApply(f"a segment begins at {segment.first_seq}, and {log.sealed_seq} is sealed")
    if any(rows.first_seq <= segment.last_seq for rows in log.tail.unrendered_rows()):
        raise DoesNotApply("a segment has rows that are yet to be rendered")


def replaced(change: changes.SegmentsReplaced, box: Box) -> None:
    found = _segments_of(box.log, change.serials)
    if found is None:
        raise DoesNotApply(f"segments {change.serials} are not there, or not side by side")
    segment = Segment.from_bytes(change.generation, change.serial, change.columns)
    live = (sum(each.count for each in found), sum(each.bytes for each in found))
    if live != (segment.count, segment.bytes):
        raise DoesNotApply(f"segments with {live} live records and bytes give way to {segment}")


def _segments_of(log: Log, serials: Sequence[int]) -> list[Segment] | None:
    """The segments with these serials, if they are there, side by side and in this order."""
    first = next((at for at, each in enumerate(log.segments) if each.serial == serials[0]), None)
    if first is None:
        return None
    found = log.segments[first : first + len(serials)]
    return found if [each.serial for each in found] == list(serials) else None


def kept(change: changes.BatchKept, box: Box) -> None:
    batch = change.batch
    at = box.log.tail.at(batch.first_seq)
    if at is None:
        if not box.is_memory:
            raise DoesNotApply(f"the batch at {batch.first_seq} is logged again, and is not there")
        return
    rows = box.log.tail.batches[at]
    if isinstance(rows, UnrenderedRows) and (
        batch.first_seq != rows.first_seq or batch.count > rows.count or rows.dead
    ):
        raise DoesNotApply(f"a batch of {batch.count} records at {batch.first_seq} is not part of {rows}")


def is_queue(change: object, box: Box) -> None:
    if box.queue is None:
        raise DoesNotApply(f"box {box.name} is not a queue")


def is_stream(change: object, box: Box) -> None:
    if box.stream is None:
        raise DoesNotApply(f"box {box.name} is not a stream")
