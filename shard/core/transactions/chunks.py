"""One message of pending rows of a transaction: its position in the log, and the totals that a commit needs.

The rows themselves are in the log. In memory a chunk takes 600 bytes and 40 more for each box that it names.
Chunks of small transactions keep their rows in memory too (`Txns`), so a small commit reads nothing from the
disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from sys import intern
from typing import NamedTuple

from streams.protocol.payloads.packed import PackedHead, Rows, sizes_of, unpack_again

#: Memory of a chunk without its rows, and of each box that it names: measured, rounded up.
_CHUNK_MEMORY, _PIECE_MEMORY = 600, 40

#: Overhead of a chunk in the log, and of each box that it names.
_CHUNK_BYTES, _NAME_BYTES = 1024, 160


class ClientTimes(NamedTuple):
    """Client times of the rows of one box: the latest one (-1 if none), and whether some rows lack one."""

    latest: int
    has_gaps: bool


class Piece(NamedTuple):
    """The rows of one box in one chunk."""

    box: str
    records: int
    #: Bytes of the rendered rows, without seqs, times and the fixed part of each record.
    size: int
    times: ClientTimes | None

    def merge(self, other: Piece) -> Piece:
        """Return the totals of these rows and of other rows of the same box."""
        times, more = self.times, other.times
        if times is not None and more is not None:
            both: ClientTimes | None = ClientTimes(
                max(times.latest, more.latest), times.has_gaps or more.has_gaps
            )
        elif times is None and more is None:
            both = None
        else:
            client_times = times or more
            assert client_times is not None
            both = ClientTimes(client_times.latest, True)
        return Piece(self.box, self.records + other.records, self.size + other.size, both)


class Chunk:
    __slots__ = (
        "at_ms",
        "boxes",
        "bytes",
        "counts",
        "create",
        "is_counted",
        "lsn",
        "message",
        "rows",
        "sizes",
        "times",
    )

    def __init__(self, head: PackedHead, body: bytes, at_ms: int, lsn: int) -> None:
        self.at_ms = at_ms
        #: The log frame that contains it.
        self.lsn = lsn
        self.create = head.create
        #: Bytes in the log.
        self.bytes = cost_of(head, body)
        self.boxes = tuple(map(intern, head.boxes))
        self.counts = array("I", head.counts)
        self.sizes = array("Q", _sizes(head, body))
        #: Times of the rows of each box; None when no row has a client time.
        self.times = _times(head, body) if head.sizes[4] else None
        #: The message, while it is in memory.
        self.message: tuple[PackedHead, bytes] | None = (head, body)
        #: True if `Txns` counts it as loaded; other chunks are loaded only for one step.
        self.is_counted = False
        #: The unpacked rows of `message`, if they are cached.
        self.rows: list[Rows] | None = None

    def __repr__(self) -> str:
        return f"<Chunk {self.bytes} B, lsn {self.lsn}{'' if self.message else ', in the log'}>"

    @property
    def records(self) -> int:
        return sum(self.counts)

    @property
    def memory(self) -> int:
        """Bytes in memory without its rows."""
        return memory_of(len(self.boxes))

    def pieces(self) -> Iterator[Piece]:
        for at, box in enumerate(self.boxes):
            times = None if self.times is None else self.times[at]
            yield Piece(box, self.counts[at], self.sizes[at], times)

    def load(self, head: PackedHead, body: bytes) -> None:
        """Set the message, which was read from the log."""
        self.message = (head, body)

    def forget(self) -> None:
        self.message = self.rows = None
        self.is_counted = False

    def unpack_rows(self) -> list[Rows]:
        assert self.message is not None, "the chunk is not loaded"
        return self.rows or unpack_again(*self.message)


class ChunksNotLoaded(Exception):
    """The operation needs rows of chunks that are not in memory."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(chunks)
        self.chunks = chunks


def cost_of(head: PackedHead, body: bytes) -> int:
    """Return the bytes that a chunk takes in the log."""
    return len(body) + _CHUNK_BYTES + _NAME_BYTES * len(head.boxes)


def memory_of(boxes: int) -> int:
    """Return the memory of a chunk that names this many boxes, without its rows."""
    return _CHUNK_MEMORY + _PIECE_MEMORY * boxes


def _sizes(head: PackedHead, body: bytes) -> Iterator[int]:
    """Yield the bytes of each box: its data, and its share of metas and nodes."""
    total = sum(head.counts)
    _, _, node_bytes, meta_bytes, _ = head.sizes
    beside = node_bytes + meta_bytes
    if meta_bytes:
        beside += total * len(b',"meta":')
    if node_bytes or head.node:
        beside += total * (len(b',"$node":""') + (0 if node_bytes else len(head.node)))
    for _, count, size in sizes_of(head, body):
        yield size + beside * count // total


def _times(head: PackedHead, body: bytes) -> list[ClientTimes]:
    numbers = array("q")
    numbers.frombytes(body[-head.sizes[4] :])
    times: list[ClientTimes] = []
    first = 0
    for count in head.counts:
        own = numbers[first : first + count]
        times.append(ClientTimes(max(own), min(own) < 0))
        first += count
    return times
