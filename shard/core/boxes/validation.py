"""Validates a change against its box before it is applied. Raises `DoesNotApply` if it does not fit.

Live, every change fits: a handler has just computed it. In a log with missing frames some changes do not fit,
and `shard/offline/repair.py` skips them. Only conditions that an applier depends on are checked, and never a
payload, so that an append pays for two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import Segment
from shard.core.kernel import DoesNotApply
from shard.core.transactions.unrendered import UnrenderedRows


def validate_append(change: changes.BatchAppended, box: Box) -> None:
    require_behind(box.log, change.batch.first_seq, change.batch.first_ts)


def validate_forward(change: changes.BatchForwarded, box: Box) -> None:
    # Copies behind a loss of their source begin with one seq for the loss.
    require_behind(box.log, change.batch.first_seq - (change.lost > 0), change.batch.first_ts)


def require_behind(log: BoxLog, first_seq: int, first_ts: int) -> None:
    """Raises `DoesNotApply` unless a batch that begins so can follow what the box has."""
    if first_seq <= log.head_seq:
        raise DoesNotApply(f"a batch begins at {first_seq}, and its box ends at {log.head_seq}")
    if first_ts < log.last_ts:
        raise DoesNotApply(f"a batch begins at {first_ts} ms, and its box ends at {log.last_ts} ms")


def validate_deletion(change: changes.RecordsDeleted, box: Box) -> None:
    if change.seqs:
        _can_delete(change, box.log)


def _can_delete(change: changes.RecordsDeleted, log: BoxLog) -> None:
    seqs = change.seqs
    assert seqs is not None
    floor = max(log.earliest_seq, min(change.before_seq, log.head_seq + 1))
    if seqs.min() < floor or not log.deleted_seqs.isdisjoint(seqs):
        raise DoesNotApply("records that are to be deleted are gone already")
    batches = 0
    if change.groups:
        counts = [count for count in (each.count_batches(seqs) for each in log.segments) if count != 0]
        if counts != [count for count, _ in change.groups]:
            raise DoesNotApply("records that are to be deleted are in other batches")
        batches = sum(count for count, _ in change.groups)
        seqs = seqs.copy()
        seqs.remove_range(0, log.sealed_seq + 1)
    matches = log.locate(seqs)
    if matches is None:
        raise DoesNotApply("a record that is to be deleted is not there")
    if batches + len(matches) != len(change.sizes):
        raise DoesNotApply(
            f"records of {len(change.sizes)} batches are to be deleted, and {len(matches)} have some"
        )


def validate_loss(change: changes.SeqsLost, box: Box) -> None:
    if change.first_seq != box.log.head_seq + 1:
        raise DoesNotApply(f"seqs from {change.first_seq} are lost, and the box ends at {box.log.head_seq}")


def validate_seal(change: changes.SegmentSealed, box: Box) -> None:
    segment = Segment.from_bytes(change.generation, change.serial, change.columns)
    log = box.log
    if segment.first_seq <= log.sealed_seq:
        raise DoesNotApply(f"a segment begins at {segment.first_seq}, and {log.sealed_seq} is sealed")
    if any(rows.first_seq <= segment.last_seq for rows in log.tail.unrendered_rows()):
        raise DoesNotApply("a segment has rows that are yet to be rendered")


def validate_replacement(change: changes.SegmentsReplaced, box: Box) -> None:
    segments = _segments_of(box.log, change.serials)
    if segments is None:
        raise DoesNotApply(f"segments {change.serials} are not there, or not side by side")
    segment = Segment.from_bytes(change.generation, change.serial, change.columns)
    live = (sum(each.count for each in segments), sum(each.bytes for each in segments))
    if live != (segment.count, segment.bytes):
        raise DoesNotApply(f"segments with {live} live records and bytes give way to {segment}")


def _segments_of(log: BoxLog, serials: Sequence[int]) -> list[Segment] | None:
    """The segments with these serials, if they are there, side by side and in this order."""
    first = next((at for at, each in enumerate(log.segments) if each.serial == serials[0]), None)
    if first is None:
        return None
    segments = log.segments[first : first + len(serials)]
    return segments if [each.serial for each in segments] == list(serials) else None


def validate_relog(change: changes.BatchKept, box: Box) -> None:
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
