"""Keyed compaction (`compact: "tag"`): which records are superseded by a newer one with the same tag.

It goes from the newest segment to the oldest and remembers the tags it has met, so it needs memory for the
tags of one box and no more. It runs in a thread, on what `Survey` copied from the machine; what it finds
stays true whatever happens meanwhile, because records only ever become superseded, and what dies meanwhile
is left out when the deletion is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyroaring import BitMap64

from shard.core.boxes.box import Box
from shard.core.boxes.log import SizedSeqs
from shard.storage.segments.store import Name, SegmentStore
from streams.protocol.model.records import Batch

#: Records deleted by one change: a millisecond or so of the machine's time.
_CHUNK_RECORDS = 5_000


class Survey(NamedTuple):
    """What compaction looks at: durable and visible, so that no record goes whose successor could vanish."""

    generation: int
    tail: list[Batch]
    segments: list[Name]
    earliest_seq: int
    deleted: BitMap64


class Superseded(NamedTuple):
    """Seqs to delete, and the bytes of each."""

    seqs: BitMap64
    sized: SizedSeqs


def survey(box: Box, *, durable_lsn: int) -> Survey:
    log = box.log
    return Survey(
        box.generation,
        log.sealable(durable_lsn=durable_lsn, bytes_max=1 << 62),
        list(map(Name.of, log.segments)),
        log.earliest_seq,
        log.deleted.copy(),
    )


def find_superseded(given: Survey, store: SegmentStore) -> Iterator[Superseded]:
    """Newest first, in pieces of `_CHUNK_RECORDS` or so."""
    met: set[str] = set()
    size_of: dict[int, int] = {}
    for group in _groups(given, store):
        newly_met: set[str] = set()
        for tag, seqs, sizes in group:
            live = [
                (seq, size)
                for seq, size in zip(seqs, sizes, strict=True)
                if seq >= given.earliest_seq and seq not in given.deleted
            ]
            if not live:
                continue
            if tag not in met:
                live.pop()  # the newest one stays
                newly_met.add(tag)
            size_of.update(live)
            if len(size_of) >= _CHUNK_RECORDS:
                yield Superseded(BitMap64(size_of), SizedSeqs.of(size_of))
                size_of = {}
        met |= newly_met
    if size_of:
        yield Superseded(BitMap64(size_of), SizedSeqs.of(size_of))


def _groups(given: Survey, store: SegmentStore) -> Iterator[Iterator[tuple[str, list[int], list[int]]]]:
    """Tags with their seqs, ascending, and bytes; a group for the tail and one for each segment."""
    tail: dict[str, tuple[list[int], list[int]]] = {}
    for batch in given.tail:
        for seq, (tag, size) in enumerate(
            zip(batch.tag_list() or (), batch.sizes(), strict=False), batch.first_seq
        ):
            if tag:
                seqs, sizes = tail.setdefault(tag, ([], []))
                seqs.append(seq)
                sizes.append(size)
    yield ((tag, seqs, sizes) for tag, (seqs, sizes) in tail.items())
    for name in reversed(given.segments):
        yield ((tag, list(seqs), list(sizes)) for tag, seqs, sizes in store.walk_tags(name))
