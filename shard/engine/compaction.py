"""Finds the records of a box with `compact: "tag"` that a newer record with the same tag supersedes.

It reads segments from the newest to the oldest and remembers the tags that it has seen, so it needs memory
for the tags of one box and no more. It runs in a thread, on `CompactionInput`, which is copied from the
machine. Its result stays valid while the box changes: a superseded record stays superseded, and
`Box.plan_deletes` leaves out records that are deleted by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyroaring import BitMap64

from shard.core.boxes.box import Box
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.storage.segments.store import Name, SegmentStore
from streams.protocol.model.records import Batch

#: Records deleted by one change: a millisecond or so of the machine's time.
_CHUNK_RECORDS = 5_000


class CompactionInput(NamedTuple):
    """The batches and segments that compaction reads. All are durable and visible, so no record is deleted
    whose successor could still be lost."""

    generation: int
    #: The last seq of the tail that compaction reads. The tail may end with deleted records.
    upto_seq: int
    tail: list[Batch]
    segments: list[Name]
    earliest_seq: int
    deleted_seqs: BitMap64


class SupersededSeqs(NamedTuple):
    """Seqs to delete, and the bytes of each."""

    seqs: BitMap64
    sizes: SizedSeqs


def copy_input(box: Box, *, durable_lsn: int) -> CompactionInput:
    log = box.log
    return CompactionInput(
        box.generation,
        log.sealable_upto(durable_lsn),
        log.sealable(durable_lsn=durable_lsn, bytes_max=1 << 62),
        list(map(Name.of, log.segments)),
        log.earliest_seq,
        log.deleted_seqs.copy(),
    )


def find_superseded(source: CompactionInput, store: SegmentStore) -> Iterator[SupersededSeqs]:
    """Yield superseded records, from the newest to the oldest, about `_CHUNK_RECORDS` at a time."""
    seen_tags: set[str] = set()
    size_of: dict[int, int] = {}
    for group in _groups(source, store):
        new_tags: set[str] = set()
        for tag, seqs, sizes in group:
            live = [
                (seq, size)
                for seq, size in zip(seqs, sizes, strict=True)
                if seq >= source.earliest_seq and seq not in source.deleted_seqs
            ]
            if not live:
                continue
            if tag not in seen_tags:
                live.pop()  # the newest one stays
                new_tags.add(tag)
            size_of.update(live)
            if len(size_of) >= _CHUNK_RECORDS:
                yield SupersededSeqs(BitMap64(size_of), SizedSeqs.of(size_of))
                size_of = {}
        seen_tags |= new_tags
    if size_of:
        yield SupersededSeqs(BitMap64(size_of), SizedSeqs.of(size_of))


def _groups(
    source: CompactionInput, store: SegmentStore
) -> Iterator[Iterator[tuple[str, list[int], list[int]]]]:
    """Yield tags with their seqs, ascending, and sizes: one group for the tail, one for each segment."""
    tail: dict[str, tuple[list[int], list[int]]] = {}
    for batch in source.tail:
        for seq, (tag, size) in enumerate(
            zip(batch.tag_list() or (), batch.sizes(), strict=False), batch.first_seq
        ):
            if tag:
                seqs, sizes = tail.setdefault(tag, ([], []))
                seqs.append(seq)
                sizes.append(size)
    yield ((tag, seqs, sizes) for tag, (seqs, sizes) in tail.items())
    for name in reversed(source.segments):
        yield ((tag, list(seqs), list(sizes)) for tag, seqs, sizes in store.walk_tags(name))
