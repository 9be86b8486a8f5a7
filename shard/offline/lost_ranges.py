"""Finds the missing seqs of a box: compares its batches with those that its snapshot lists."""

from __future__ import annotations

from array import array

from shard.core.boxes.box import Box
from shard.core.snapshot_facts import BoxFacts


def find_uncovered(box: Box) -> list[tuple[int, int]]:
    """Return the ranges of seqs that are in no batch. Some of these records may have been dead."""
    ranges: list[tuple[int, int]] = []
    next_seq = box.log.earliest_seq
    for span in box.log.spans():
        if span.first_seq > next_seq:
            ranges.append((next_seq, span.first_seq - 1))
        next_seq = max(next_seq, span.last_seq + 1)
    if next_seq <= box.log.head_seq:
        ranges.append((next_seq, box.log.head_seq))
    return ranges


def find_lost(box: Box, facts: BoxFacts, serials: set[int]) -> list[tuple[int, int]]:
    """Return the ranges of seqs whose batches are missing.

    They follow from the order of batches in the snapshot and from the seqs of their intact neighbours.
    """
    present_batches = {batch.lsn: batch for batch in box.log.tail.batches}
    present_segments = {segment.serial: segment for segment in box.log.segments}
    #: (first seq, last seq) of each segment and batch, in order; 0 if unknown.
    places: list[tuple[int, int]] = []
    for each in facts.segments:
        segment = present_segments.get(each.serial)
        is_lost = each.serial in serials or segment is None
        places.append(
            (each.first_seq, 0) if is_lost or segment is None else (each.first_seq, segment.last_seq)
        )
    for lsn in array("Q", facts.batches):
        batch = present_batches.get(lsn)
        places.append((0, 0) if batch is None else (batch.first_seq, batch.last_seq))
    ranges: list[tuple[int, int]] = []
    next_seq = facts.earliest_seq
    for at, (first, last) in enumerate(places):
        if last:
            next_seq = last + 1
            continue
        after = [first for first, _ in places[at + 1 :] if first]
        low, high = max(first, next_seq), (after[0] - 1 if after else facts.head_seq)
        if low <= high and (not ranges or ranges[-1][1] < high):
            ranges.append((low, high))
    return ranges
