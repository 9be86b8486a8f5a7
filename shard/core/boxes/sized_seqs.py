"""Seqs of sealed records with their sizes, so that a delete can be measured without their payloads."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from shard.core.boxes.sealed import Span


class SizedSeqs:
    """Seqs of records, rising, and the bytes of each: what an index of tags says of sealed records."""

    __slots__ = ("seqs", "sizes")

    def __init__(self, seqs: array[int], sizes: array[int]) -> None:
        self.seqs = seqs
        self.sizes = sizes

    @classmethod
    def of(cls, size_of: Mapping[int, int]) -> SizedSeqs:
        seqs = sorted(size_of)
        return cls(array("Q", seqs), array("I", map(size_of.__getitem__, seqs)))

    def extend(self, seqs: Sequence[int], sizes: Sequence[int]) -> None:
        """Adds records behind those that are here."""
        self.seqs.extend(seqs)
        self.sizes.extend(sizes)

    def total(self, seqs: array[int], first: int, end: int, span: Span) -> int:
        """Bytes of the records `wanted[first:end]`, all of one batch. Where they are not known here the
        payload of the batch is asked."""
        low = bisect_left(self.seqs, seqs[first])
        high = bisect_right(self.seqs, seqs[end - 1], low)
        here = seqs[first:end]
        if self.seqs[low:high] == here:
            return sum(self.sizes[low:high])
        size_of = dict(zip(self.seqs[low:high], self.sizes[low:high], strict=True))
        base = span.first_seq
        return sum(size_of[seq] if seq in size_of else span.size(seq - base, seq - base) for seq in here)
