"""A logged commit: its rows have seqs, and are rendered from the log in steps.

    TxnCommitted  ─►  Commit: chunks in order, and in each box the place of its rows (`unrendered.py`)
    a step        ─►  some chunks ─► read, unpacked, rendered (in a thread) ─► BatchKept for each batch
                      TxnRendered: these chunks are no longer needed

Each chunk is read once, in the order of the commit, and all boxes advance together: a chunk has rows of many
boxes, and rendering box by box would read the whole chunk once for each box.

After a crash, the next start continues the commit. A step skips the rows that are rendered already; their
number follows from the number of rows left (`Commit.plan`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from shard.core import changes
from shard.core.snapshot_facts import CommitFacts
from shard.core.transactions.chunks import Chunk, Piece
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.model.records import Batch, Columns, render, resolve_times
from streams.protocol.payloads.packed import Rows, join_columns

#: Rows of several chunks become one batch until it has this many records or bytes: few batches read faster,
#: and none is so large that reading a little of it costs much.
BATCH_RECORDS, BATCH_BYTES = 4_000, 1 << 20


class Target(NamedTuple):
    """Where the rows of one box go."""

    generation: int
    mode: str
    allow_future: bool


class Start(NamedTuple):
    """Where a step continues with the rows of one box."""

    target: Target
    #: Rows that are rendered already.
    skip: int
    seq: int
    not_before: int


class Step(NamedTuple):
    chunks: list[Chunk]
    starts: dict[str, Start]
    at_ms: int


class Commit:
    def __init__(
        self,
        change: changes.TxnCommitted | CommitFacts,
        lsn: int,
        targets: dict[str, Target],
        chunks: Iterable[Chunk],
        rows_left: dict[str, int],
    ) -> None:
        self.lsn = lsn
        self.writer = change.writer
        self.epoch = change.epoch
        self.at_ms = change.at_ms
        self.targets = targets
        #: Chunks that are not rendered yet.
        self.chunks = deque(chunks)
        #: By box: the place of its rows. The box may have dropped it.
        self.places: dict[str, UnrenderedRows] = {}
        #: By box: rows in the remaining chunks.
        self._rows_left = rows_left
        #: Number of places with rows left to render.
        self.open = 0
        #: The change to upload when all rows of object boxes are rendered.
        self.to_ship: changes.TxnCommitted | None = None
        self.objects_open = 0
        #: While a snapshot is restored: its chunks; None for each that was not restored yet.
        self._restored_chunks: list[Chunk | None] = []

    def __repr__(self) -> str:
        return f"<Commit {self.lsn} of {self.writer!r}, epoch {self.epoch}: {len(self.chunks)} chunks left>"

    def _count(self, chunk: Chunk, sign: int) -> None:
        for box, count in zip(chunk.boxes, chunk.counts, strict=True):
            if box in self.targets:
                self._rows_left[box] = self._rows_left.get(box, 0) + sign * count

    def rows_left(self, box: str) -> int:
        """Return the rows of a box in the remaining chunks."""
        return self._rows_left.get(box, 0)

    @property
    def records(self) -> int:
        """Rows that are left to render."""
        return sum(rows.count for rows in self.places.values())

    def add_place(self, box: str, rows: UnrenderedRows) -> None:
        self.places[box] = rows
        self.open += 1

    @property
    def oldest_lsn(self) -> int:
        return min(chunk.lsn for chunk in self.chunks)

    def plan(self, bytes_max: int, only: Iterable[str] | None = None) -> Step:
        """Plan a step over the next chunks, about `bytes_max` of them; `only` limits it to these boxes."""
        chunks: list[Chunk] = []
        size = 0
        for chunk in self.chunks:
            if chunks and size + chunk.bytes > bytes_max:
                break
            chunks.append(chunk)
            size += chunk.bytes
        names = self.targets if only is None else only
        starts = {
            box: Start(self.targets[box], self._rows_left[box] - rows.count, rows.first_seq, rows.first_ts)
            for box in names
            if (rows := self.places.get(box)) is not None and rows.count
        }
        return Step(chunks, starts, self.at_ms)

    def drop_chunks(self, count: int) -> list[Chunk]:
        """Remove and return the first chunks, which are no longer needed."""
        chunks = list(islice(self.chunks, count))
        for chunk in chunks:
            self.chunks.popleft()
            self._count(chunk, -1)
        return chunks

    @classmethod
    def from_facts(cls, facts: CommitFacts) -> Commit:
        """Return the commit without chunks and places, which are restored afterwards."""
        targets = {
            box: Target(generation, mode, allow_future)
            for box, generation, mode, allow_future in facts.targets
        }
        commit = cls(facts, facts.lsn, targets, (), {})
        commit._restored_chunks = [None] * len(facts.chunks)
        if facts.ships:
            commit.to_ship = facts.ships
        return commit

    def give_back(self, at: int, chunk: Chunk) -> None:
        self._restored_chunks[at] = chunk

    def finish_restore(self) -> None:
        """Finish the restore: every chunk and place is restored, except damaged ones."""
        self.chunks = deque(chunk for chunk in self._restored_chunks if chunk is not None)
        self._restored_chunks = []
        for chunk in self.chunks:
            self._count(chunk, 1)

    def facts(self) -> CommitFacts:
        return CommitFacts(
            self.lsn,
            self.writer,
            self.epoch,
            self.at_ms,
            [(box, *target) for box, target in self.targets.items()],
            [chunk.lsn for chunk in self.chunks],
            self.to_ship,
        )


def render_step(step: Step, rows_of_chunks: Sequence[list[Rows]]) -> Iterator[tuple[int, Batch]]:
    """Yield (generation, batch) for each batch of a step, from the unpacked rows of its chunks.

    It changes no state, so it may run in a thread."""
    pieces: dict[str, list[tuple[Piece, Columns]]] = {box: [] for box in step.starts}
    for chunk, rows in zip(step.chunks, rows_of_chunks, strict=True):
        for piece, own in zip(chunk.pieces(), rows, strict=True):
            if piece.box in pieces:
                pieces[piece.box].append((piece, own.columns))
    for box, start in step.starts.items():
        yield from _render(start, _after(pieces.pop(box), start.skip), step.at_ms)


def _after(pieces: list[tuple[Piece, Columns]], skip: int) -> Iterator[tuple[Piece, Columns]]:
    """Yield the pieces without their first `skip` rows."""
    for piece, columns in pieces:
        if skip >= piece.records:
            skip -= piece.records
        elif skip:
            yield piece._replace(records=piece.records - skip), _rest(columns, skip)
            skip = 0
        else:
            yield piece, columns


def _render(start: Start, pieces: Iterable[tuple[Piece, Columns]], at_ms: int) -> Iterator[tuple[int, Batch]]:
    seq, not_before = start.seq, start.not_before
    for group in _group_pieces(pieces):
        columns = join_columns(group)
        times = resolve_times(
            columns.times,
            columns.count,
            now_ms=at_ms,
            not_before=not_before,
            mode=start.target.mode,
            allow_future=start.target.allow_future,
        )
        batch = render(columns, first_seq=seq, times=times)
        seq, not_before = seq + batch.count, batch.last_ts
        yield start.target.generation, batch


def _group_pieces(pieces: Iterable[tuple[Piece, Columns]]) -> Iterator[list[Columns]]:
    """Yield the pieces of each batch. A piece is never split."""
    group: list[Columns] = []
    records = size = 0
    for piece, columns in pieces:
        if group and (records + piece.records > BATCH_RECORDS or size + piece.size > BATCH_BYTES):
            yield group
            group, records, size = [], 0, 0
        group.append(columns)
        records += piece.records
        size += piece.size
    if group:
        yield group


def _rest(columns: Columns, first: int) -> Columns:
    """Return the rows from `first` on."""
    tags = columns.tags
    return Columns(
        columns.datas[first:],
        tags=None if tags is None else b"\0".join(tags.split(b"\0")[first:]),
        nodes=None if columns.nodes is None else columns.nodes[first:],
        metas=None if columns.metas is None else columns.metas[first:],
        times=None if columns.times is None else columns.times[first:],
    )
