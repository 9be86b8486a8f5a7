"""A hole of a box: seqs that have no record, and that are reported to every reader that reads across them."""

from __future__ import annotations


class Hole:
    """Seqs without records. After a crash: first_seq..last_seq were never logged as far as we know. After a
    source's loss: one seq, and `missed_count` is how many records the source lost."""

    __slots__ = ("first_seq", "last_seq", "missed_count")

    def __init__(self, first_seq: int, last_seq: int, missed_count: int = 0) -> None:
        self.first_seq = first_seq
        self.last_seq = last_seq
        self.missed_count = missed_count

    @property
    def reason(self) -> str:
        return "source_trim" if self.missed_count else "crash"

    def missed_after(self, seq: int) -> int:
        """Return how many records a reader at `seq` misses because of this hole."""
        return self.missed_count or self.last_seq - max(seq, self.first_seq - 1)

    def __repr__(self) -> str:
        return f"<Hole {self.first_seq}..{self.last_seq}>"
