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

from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

#: Entries of records that are long gone are swept out when they outnumber the live ones by this much.
_STALE_FACTOR = 2
_STALE_MIN = 4096


#: The tags of a box in which none was looked for: shared, because an empty table is 1.5 kB.
_NO_TAGS: SortedDict[str, list[int]] = SortedDict()


class Tags:
    __slots__ = ("_entries", "_seqs_of", "upto_seq")

    def __init__(self) -> None:
        self._seqs_of = _NO_TAGS
        self._entries = 0
        self.upto_seq = 0

    def __repr__(self) -> str:
        return f"<Tags {len(self._seqs_of)} tags, {self._entries} entries up to {self.upto_seq}>"

    def take_in(self, batches: Iterable[Batch]) -> None:
        if self._seqs_of is _NO_TAGS:
            self._seqs_of = SortedDict()
        for batch in batches:
            if batch.last_seq <= self.upto_seq:
                continue
            tags = batch.tag_list()  # which may have to wait
            self.upto_seq = batch.last_seq
            if tags is None:
                continue
            for seq, tag in enumerate(tags, batch.first_seq):
                if tag:
                    self._seqs_of.setdefault(tag, []).append(seq)
                    self._entries += 1

    def find_some(
        self, match: Match, position: tuple[str, int], seqs_max: int
    ) -> tuple[BitMap64, tuple[str, int] | None]:
        """Seqs of matching records from a position on (a tag and the next of its seqs), about `seqs_max` of
        them. The first position is (text of the match, 0). Returns the next one too, or None at the end."""
        tag, first = position
        matches = BitMap64()
        seqs_left = seqs_max
        tags = self._seqs_of.irange(minimum=tag) if match.is_prefix else (tag,)
        for each in tags:
            if match.is_prefix and not each.startswith(match.text):
                break
            if seqs_left <= 0:
                return matches, (each, 0)
            start = first if each == tag else 0
            seqs = self._seqs_of.get(each, ())
            matches.update(seqs[start : start + seqs_left])
            if len(seqs) > start + seqs_left:
                return matches, (each, start + seqs_left)
            seqs_left -= len(seqs) - start + 1
        return matches, None

    def is_stale(self, live: int) -> bool:
        return self._entries > max(_STALE_MIN, _STALE_FACTOR * live)
