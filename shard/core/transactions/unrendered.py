"""Rows of a commit that have their seqs and are not rendered yet: a place in the tail without a payload.

    tail   [■■■ ■■ ▒▒▒▒▒▒▒▒▒▒ ■■]       ▒ rows of a commit; the batches after them were written later
    tail   [■■■ ■■ ▓▓▓▓ ▒▒▒▒▒▒ ■■]      ▓ rendered from the front, batch by batch (`BoxLog.render`)

The number of rows and the range of their times are known from the start; their size is an estimate until they
are rendered. An operation that needs more (a read, a cut through them) gets `NotRendered`, waits until more
rows are rendered, and retries. So these rows are either all live or all removed.
"""

from __future__ import annotations

from shard.core.boxes.sealed import NotLoaded
from streams.protocol.model.records import Batch

#: Not an encoding that is ever stored.
UNRENDERED = 255


class NotRendered(NotLoaded):
    """The operation needs rows of a commit that are not rendered yet."""

    def __init__(self, generation: int) -> None:
        Exception.__init__(self, generation)
        self.generation = generation


class UnrenderedRows(Batch):
    """A batch in memory without a payload: every method that needs the payload raises `NotRendered`."""

    __slots__ = ("commit_lsn", "generation")

    def __init__(
        self,
        *,
        generation: int,
        commit_lsn: int,
        first_seq: int,
        count: int,
        size: int,
        first_ts: int,
        last_ts: int,
    ) -> None:
        super().__init__(
            encoding=UNRENDERED, first_seq=first_seq, count=count, first_ts=first_ts, last_ts=last_ts
        )
        self.generation = generation
        self.commit_lsn = commit_lsn
        self.dead_bytes = -(count - 1) - size  # so that its live bytes are the estimate

    def __repr__(self) -> str:
        return f"<UnrenderedRows {self.first_seq}..{self.last_seq} of commit {self.commit_lsn}>"

    @property
    def payload(self) -> Batch:
        raise NotRendered(self.generation)

    @property
    def bytes_in_memory(self) -> int:
        return 400

    def size(self, first: int, last: int) -> int:
        if first == 0 and last == self.count - 1:
            return self.live_bytes
        raise NotRendered(self.generation)

    def ts(self, index: int) -> int:
        if self.first_ts == self.last_ts:
            return self.first_ts
        raise NotRendered(self.generation)

    def ts_at_least(self, index: int) -> int:
        return self.first_ts

    def index_from_ts(self, ts: int) -> int:
        if ts <= self.first_ts:
            return 0
        if ts > self.last_ts:
            return self.count
        raise NotRendered(self.generation)

    def index_from_size(self, first: int, bytes_wanted: int) -> int:
        raise NotRendered(self.generation)

    def tag_list(self) -> list[str] | None:
        raise NotRendered(self.generation)

    def take(self, batch: Batch) -> int:
        """Remove the first rows, which are rendered as `batch`. Return the bytes estimated for them."""
        assert batch.first_seq == self.first_seq and batch.count <= self.count, "ORDER"
        assert self.dead == 0, "such rows are all live"
        rows_left = self.count - batch.count
        size = self.live_bytes
        share = size if not rows_left else size * batch.count // self.count
        self.first_seq += batch.count
        self.count = rows_left
        self.first_ts = batch.last_ts
        self.dead_bytes = -(rows_left - 1) - (size - share)
        return share

    def drop(self, count: int) -> None:
        """Remove the first rows, which are lost (`offline/repair.py`)."""
        size = self.live_bytes
        self.first_seq += count
        self.count -= count
        self.dead_bytes = -(self.count - 1) - size

    def facts(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.first_seq,
            self.count,
            self.live_bytes,
            self.first_ts,
            self.last_ts,
            self.commit_lsn,
        )

    @classmethod
    def from_facts(cls, generation: int, facts: tuple[int, int, int, int, int, int]) -> UnrenderedRows:
        first_seq, count, size, first_ts, last_ts, commit_lsn = facts
        return cls(
            generation=generation,
            commit_lsn=commit_lsn,
            first_seq=first_seq,
            count=count,
            size=size,
            first_ts=first_ts,
            last_ts=last_ts,
        )
