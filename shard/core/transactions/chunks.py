"""One message of rows that is held for a transaction: where the log has it, and what a commit must know.

The rows themselves are in the log. In memory a chunk takes 600 bytes and 40 more for each box that it names;
only those of small transactions keep their rows too (`Txns`), so that a small commit needs nothing from the
disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from sys import intern
from typing import NamedTuple

from streams.protocol.payloads.packed import PackedHead, Rows, sizes_of, unpack_again

#: What a chunk takes in memory without its rows, and what each box does that it names: measured, rounded up.
_CHUNK_MEMORY, _PIECE_MEMORY = 600, 40

#: What a chunk takes in the log beside its bytes, and what each box does that it names.
_CHUNK_BYTES, _NAME_BYTES = 1024, 160


class Times(NamedTuple):
    """Of the rows of one box: the latest time that a client gave, -1 if none; and whether some have none."""

    latest: int
    has_gaps: bool


class Piece(NamedTuple):
    """The rows of one box in one chunk."""

    box: str
    records: int
    #: Bytes that they will take, but for seqs, times and what all records have.
    size: int
    times: Times | None

    def joined(self, other: Piece) -> Piece:
        """These rows and others of the same box."""
        times, more = self.times, other.times
        if times is not None and more is not None:
            both: Times | None = Times(max(times.latest, more.latest), times.has_gaps or more.has_gaps)
        elif times is None and more is None:
            both = None
        else:
            found = times or more
            assert found is not None
            both = Times(found.latest, True)
        return Piece(self.box, self.records + other.records, self.size + other.size, both)


class Chunk:
    __slots__ = (
        "at_ms",
        "boxes",
        "bytes",
        "counts",
        "create",
        "held",
        "is_counted",
        "lsn",
        "rows",
        "sizes",
        "times",
    )

    def __init__(self, packed: PackedHead, body: bytes, at_ms: int, lsn: int) -> None:
        self.at_ms = at_ms
        #: The frame of the log that has it.
        self.lsn = lsn
        self.create = packed.create
        #: What it takes in the log.
        self.bytes = cost_of(packed, body)
        self.boxes = tuple(map(intern, packed.boxes))
        self.counts = array("I", packed.counts)
        self.sizes = array("Q", _sizes(packed, body))
        #: Of the rows of each box; None when no row brings a time.
        self.times = _times(packed, body) if packed.sizes[4] else None
        #: The message, while it is in memory.
        self.held: tuple[PackedHead, bytes] | None = (packed, body)
        #: Whether it counts among those that `Txns` keeps in memory; others are loaded for a moment.
        self.is_counted = False
        #: The same taken apart, if that is remembered.
        self.rows: list[Rows] | None = None

    def __repr__(self) -> str:
        return f"<Chunk {self.bytes} B, lsn {self.lsn}{'' if self.held else ', in the log'}>"

    @property
    def records(self) -> int:
        return sum(self.counts)

    @property
    def memory(self) -> int:
        """What it takes in memory without its rows."""
        return memory_of(len(self.boxes))

    def pieces(self) -> Iterator[Piece]:
        for at, box in enumerate(self.boxes):
            times = None if self.times is None else self.times[at]
            yield Piece(box, self.counts[at], self.sizes[at], times)

    def load(self, packed: PackedHead, body: bytes) -> None:
        """Its message was read from the log."""
        self.held = (packed, body)

    def forget(self) -> None:
        self.held = self.rows = None
        self.is_counted = False

    def taken_apart(self) -> list[Rows]:
        assert self.held is not None, "whoever asks has had it loaded"
        return self.rows or unpack_again(*self.held)


class ChunksNotLoaded(Exception):
    """The rows of some chunks are wanted and are not in memory."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(chunks)
        self.chunks = chunks


def cost_of(packed: PackedHead, body: bytes) -> int:
    """What it takes in the log to hold a chunk."""
    return len(body) + _CHUNK_BYTES + _NAME_BYTES * len(packed.boxes)


def memory_of(boxes: int) -> int:
    """What a chunk that names so many boxes takes in memory without its rows."""
    return _CHUNK_MEMORY + _PIECE_MEMORY * boxes


def _sizes(packed: PackedHead, body: bytes) -> Iterator[int]:
    """Of each box: its data, and its share of metas and nodes."""
    total = sum(packed.counts)
    _, _, node_bytes, meta_bytes, _ = packed.sizes
    beside = node_bytes + meta_bytes
    if meta_bytes:
        beside += total * len(b',"meta":')
    if node_bytes or packed.node:
        beside += total * (len(b',"$node":""') + (0 if node_bytes else len(packed.node)))
    for _, count, size in sizes_of(packed, body):
        yield size + beside * count // total


def _times(packed: PackedHead, body: bytes) -> list[Times]:
    numbers = array("q")
    numbers.frombytes(body[-packed.sizes[4] :])
    found: list[Times] = []
    first = 0
    for count in packed.counts:
        own = numbers[first : first + count]
        found.append(Times(max(own), min(own) < 0))
        first += count
    return found
