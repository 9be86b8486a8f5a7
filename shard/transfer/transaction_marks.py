"""Merges marks of transactions when boxes move to other shards: for resharding and restores. Pure.

A mark says that a shard has committed a writer's epoch. If the old shards of a new one agree, the new shard
takes their mark. If they do not (a job died between two commits), the new shard must still know which of its
boxes have the epoch. Then a mark lists the slots of the old shard, and the next commit of the writer skips
rows for boxes in these slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shard.core.snapshot_facts import MarkFacts
from streams.protocol.model.slots import SLOTS


class MarkMerge:
    """The marks of old shards, to be merged for new shards."""

    def __init__(self, old: Sequence[int], new: Sequence[int]) -> None:
        """`old` and `new` have the old and the new shard of each slot."""
        assert len(old) == len(new) == SLOTS
        #: (old shard, new shard) -> the slots that move between them, as bits.
        self._slots_by_move: dict[tuple[int, int], int] = {}
        for slot, move in enumerate(zip(old, new, strict=True)):
            self._slots_by_move[move] = self._slots_by_move.get(move, 0) | 1 << slot
        #: writer -> old shard -> its marks.
        self._marks: dict[str, dict[int, list[MarkFacts]]] = {}

    def __repr__(self) -> str:
        return f"<MarkMerge of {len(self._marks)} writers>"

    def add(self, shard: int, marks: Iterable[MarkFacts]) -> None:
        """Add the marks of an old shard."""
        for mark in marks:
            self._marks.setdefault(mark.writer, {}).setdefault(shard, []).append(mark)

    def of(self, shard: int) -> list[MarkFacts]:
        """Return the marks of a new shard, oldest first."""
        sources = {old: slots for (old, new), slots in self._slots_by_move.items() if new == shard}
        marks: list[MarkFacts] = []
        for writer, by_shard in self._marks.items():
            #: (epoch, query) -> the slots that have it, its time, its owner, and its lifetime.
            epochs: dict[tuple[int, str], tuple[int, int, str | None, bool | None]] = {}
            for old, slots in sources.items():
                for mark in by_shard.get(old, ()):
                    own = int.from_bytes(mark.slots, "little") & slots if mark.slots else slots
                    known_slots, at_ms, owner, once = epochs.get(
                        (mark.epoch, mark.query), (0, 0, None, mark.once)
                    )
                    owner = mark.owner if owner is None else owner
                    # The longest lifetime wins: unlimited, 90 days, one day.
                    once = False if False in (once, mark.once) else once and mark.once
                    epochs[mark.epoch, mark.query] = (known_slots | own, max(at_ms, mark.at_ms), owner, once)
            everything = sum(sources.values())
            for (epoch, query), (slots, at_ms, owner, once) in epochs.items():
                if slots:
                    bits = b"" if slots == everything else slots.to_bytes(SLOTS // 8, "little")
                    marks.append(MarkFacts(writer, epoch, query, at_ms, bits, owner, once))
        return sorted(marks, key=lambda mark: mark.at_ms)


def owners_of(runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the shard of each slot, from runs (start, end, shard)."""
    return [shard for start, end, shard in runs for _ in range(start, end)]
