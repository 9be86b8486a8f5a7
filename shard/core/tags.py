"""Tag -> seqs, for point-in-time deletes. Says which records carry a tag, never which of them are live.

The index is lazy: a batch is taken in when the first match after its append asks. So a box that never
deletes by tag never pays for it, and one that does pays for each record once. An exact match is one look-up,
a prefix a range of a sorted list; neither scans the log.

Invariant
- COVER: every live record with a tag, in a batch at or below `upto_seq`, is under its tag.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap64
from sortedcontainers import SortedDict

from streams.protocol.commands import Match
from streams.protocol.records import Batch

#: Entries of records that are long gone are swept out when they outnumber the live ones by this much.
_STALE_FACTOR = 2
_STALE_MIN = 4096


class Tags:
    __slots__ = ("_entries", "_seqs_of", "upto_seq")

    def __init__(self) -> None:
        self._seqs_of: SortedDict[str, list[int]] = SortedDict()
        self._entries = 0
        self.upto_seq = 0

    def __repr__(self) -> str:
        return f"<Tags {len(self._seqs_of)} tags, {self._entries} entries up to {self.upto_seq}>"

    def take_in(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            if batch.last_seq <= self.upto_seq:
                continue
            self.upto_seq = batch.last_seq
            tags = batch.tag_list()
            if tags is None:
                continue
            for seq, tag in enumerate(tags, batch.first_seq):
                if tag:
                    self._seqs_of.setdefault(tag, []).append(seq)
                    self._entries += 1

    def find(self, match: Match) -> BitMap64:
        if not match.is_prefix:
            return BitMap64(self._seqs_of.get(match.text, ()))
        found = BitMap64()
        for tag in self._seqs_of.irange(minimum=match.text):
            if not tag.startswith(match.text):
                break
            found.update(self._seqs_of[tag])
        return found

    def is_stale(self, live: int) -> bool:
        return self._entries > max(_STALE_MIN, _STALE_FACTOR * live)
