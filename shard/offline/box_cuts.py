"""Records what a restore to a point in time cuts off the end of a box, for the boxes that depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pyroaring import BitMap64

from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.queues.move_queue import Letter, letters_in, move_queue_of
from shard.core.routers.router_outbox import RouterOutbox, runs_to_copy
from shard.offline.payload_loading import load_missing
from shard.storage.segments.store import Name, SegmentStore
from streams.protocol.messages.routers import router_of
from streams.protocol.model.records import Batch


class Cut(NamedTuple):
    """The end of a box that a restore to a point in time cuts off, as far as it concerns other boxes."""

    #: Number of records that routers had copied here.
    copies: int = 0
    #: True if no record of the cut part was missing already. If False, the other numbers are too low.
    is_whole: bool = True
    #: By the origin of each router that copies from here: the cut seqs that it copies.
    copied_seqs: Mapping[str, BitMap64] = MappingProxyType({})
    #: Dead letters that are later than the time and are retained: they may be the only copy of a job.
    letters: tuple[Letter, ...] = ()
    #: Seqs of these letters, and of jobs that were requeued from dead letters.
    retained_seqs: BitMap64 = BitMap64()
    #: In a box with `compact: "tag"`: how many tags may be lost, because compaction has deleted their earlier
    #: records.
    keys: int = 0
    #: The head before the cut; 0 if nothing was cut.
    head_seq: int = 0


def survey_cut(box: Box, seq: int, store: SegmentStore) -> Cut:
    """Describe the records after `seq`, which are about to be cut off a box."""
    outboxes = [outbox for outbox in box.outboxes.values() if isinstance(outbox, RouterOutbox)]
    lines = [move_queue_of(origin) for origin in box.origins if router_of(origin) is None]
    takes_letters = any(line is not None and line.is_dead for line in lines)
    takes_jobs = any(line is not None and not line.is_dead for line in lines)
    routers = sum(router_of(origin) is not None for origin in box.origins)
    log = box.log
    keys = _count_keys(box, seq, store) if box.config.compact == "tag" else 0
    if not (outboxes or box.origins):
        return Cut(keys=keys)
    copied_seqs = {outbox.origin: BitMap64() for outbox in outboxes}
    retained_seqs, letters = BitMap64(), list[Letter]()
    copies = 0
    next_seq = seq + 1
    # A cut begins at a live record. With several routers, deleted copies before the cut may be later than the
    # time, too. With one router, all copies before the cut are earlier in its source.
    is_whole = routers < 2 or not _is_deleted(log, seq)
    for batch in _batches_after(log, seq, store):
        first = max(0, seq + 1 - batch.first_seq)
        is_whole &= not is_gap(log, next_seq, batch.first_seq)
        next_seq = batch.last_seq + 1
        runs = log.runs(batch, first, batch.count - 1)
        is_whole &= sum(last - start + 1 for start, last in runs) == batch.count - first
        for outbox in outboxes:
            for start, last in runs_to_copy(outbox.route, batch, runs):
                copied_seqs[outbox.origin].add_range(batch.first_seq + start, batch.first_seq + last + 1)
        if not batch.hops:
            continue
        batch_letters = letters_in(batch, runs) if takes_letters else []
        letters += batch_letters
        retained_seqs.update(letter.seq for letter in batch_letters)
        if takes_jobs and not routers:
            for start, last in runs:
                retained_seqs.add_range(batch.first_seq + start, batch.first_seq + last + 1)
        elif len(batch_letters) < batch.count - first:
            copies += batch.count - first - len(batch_letters)
    is_whole &= not is_gap(log, next_seq, log.head_seq + 1)
    return Cut(copies, is_whole, copied_seqs, tuple(letters), retained_seqs, keys, log.head_seq)


def _count_keys(box: Box, seq: int, store: SegmentStore) -> int:
    """Return how many tags, at most, have a record after `seq` and had one at or before it that is gone.

    A tag may also be new after `seq`, and nothing tells the two apart. So the result is at most the number of
    records that are missing at or before `seq`.
    """
    log = box.log
    missing = seq - load_missing(store, lambda: log.live_before(seq + 1))[0]
    if not missing:
        return 0
    behind: set[str] = set()
    for batch in _batches_after(log, seq, store):
        tags = batch.tag_list()
        if tags is not None:
            for first, last in log.runs(batch, max(0, seq + 1 - batch.first_seq), batch.count - 1):
                behind.update(tags[first : last + 1])
    behind.discard("")
    for segment in log.segments:
        if segment.first_seq <= seq:
            for tag, seqs, _ in store.walk_tags(Name.of(segment)):
                if tag in behind and any(each <= seq and log.is_live(each) for each in seqs):
                    behind.discard(tag)
    for batch in log.tail:
        tags = batch.tag_list() if batch.first_seq <= seq and batch.dead < batch.count else None
        if tags is not None:
            for first, last in log.runs(batch, 0, min(batch.count - 1, seq - batch.first_seq)):
                behind.difference_update(tags[first : last + 1])
    return min(missing, len(behind))


def _batches_after(log: BoxLog, seq: int, store: SegmentStore) -> Iterator[Batch]:
    """Yield the batches that reach beyond `seq`, one at a time: together they might not fit into memory."""
    for segment in log.segments:
        if segment.last_seq > seq:
            for at in range(segment.from_seq(seq + 1), len(segment)):
                (batch,) = store.read(Name.of(segment), at, bytes_max=1)
                batch.dead = segment.dead(at)
                yield batch
    for batch in log.tail.batches[log.tail.from_seq(seq + 1) :]:
        if batch.dead < batch.count:
            yield batch


def _is_deleted(log: BoxLog, seq: int) -> bool:
    """Return True if the record is gone and readers see no tombstone for it."""
    is_evicted = seq < max(log.cap_floor, log.ttl_floor)
    return seq > 0 and not is_evicted and not log.is_live(seq) and is_gap(log, seq, seq + 1)


def is_gap(log: BoxLog, next_seq: int, seq: int) -> bool:
    """Return True if records between two batches are missing without a hole that readers see."""
    while next_seq < seq:
        hole = log.hole_after(next_seq - 1)
        if hole is None or hole.first_seq > next_seq:
            return True
        next_seq = hole.last_seq + 1
    return False
