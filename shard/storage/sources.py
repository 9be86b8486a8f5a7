"""Reads verified bytes of immutable files, from the disk, the cold store or memory.

    source.read(offset, length)     from the disk, from an object store, from memory
    pieces                          |--- one ---|0|-- two --|000|------ three ------|
                                    begin at multiples of eight, each with a checksum that covers its zeros

Rules of the file:
  1. Bytes are verified before they are returned; a mismatch raises `Corrupt` with its position.
  2. Reading needs only a `Source`, keeps no state, and may run in any thread.

Invariants:
  LITTLE_ENDIAN  columns are stored as arrays lie in memory.
  WITHIN         a read of pieces first..last takes at least `first`, and none after `last`.
  PROGRESS       each read continues after the one before.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, DiskLike, read_part

#: The largest single read of a sequential pass.
READ_BYTES = 4 << 20

#: The zeros after a piece, by its length modulo eight.
PADDING = tuple(bytes(-length % 8) for length in range(8))

assert sys.byteorder == "little", "LITTLE_ENDIAN: columns are stored as arrays lie in memory"


class Source(Protocol):
    """The bytes of one file. Any thread may read; failures raise."""

    @property
    def name(self) -> str:
        """The name for messages. It must end in the file's own name."""

    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes, fewer only at the end of the file."""


class FileSource:
    """A file on the disk. Each read opens and closes it, which costs a few µs; see `held_open`."""

    __slots__ = ("_disk", "name")

    def __init__(self, disk: DiskLike, path: str) -> None:
        self._disk = disk
        self.name = path

    def __repr__(self) -> str:
        return f"<FileSource {self.name}>"

    def size(self) -> int:
        return self._disk.size(self.name)

    def read(self, offset: int, length: int) -> bytes:
        handle = self._disk.open(self.name, writable=False)
        try:
            return read_part(self._disk, handle, offset, length)
        finally:
            self._disk.close(handle)

    @contextmanager
    def held_open(self) -> Iterator[Source]:
        """Open the file once, for several reads."""
        handle = self._disk.open(self.name, writable=False)
        try:
            yield _OpenFile(self._disk, self.name, handle)
        finally:
            self._disk.close(handle)


class _OpenFile(FileSource):
    __slots__ = ("_handle",)

    def __init__(self, disk: DiskLike, path: str, handle: int) -> None:
        super().__init__(disk, path)
        self._handle = handle

    def read(self, offset: int, length: int) -> bytes:
        return read_part(self._disk, self._handle, offset, length)


class WrappedSource:
    """Base of sources that read another source in a different way."""

    __slots__ = ("_source",)

    def __init__(self, source: Source) -> None:
        self._source = source

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._source!r}>"

    @property
    def name(self) -> str:
        return self._source.name

    def size(self) -> int:
        return self._source.size()


class ReadAhead(WrappedSource):
    """A source that reads in large steps, for a sequential pass from start to end."""

    __slots__ = ("_start", "_step")

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._start = 0
        self._step = b""

    def __repr__(self) -> str:
        return f"<ReadAhead of {self.name}: {len(self._step)} bytes from {self._start}>"

    def read(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if not 0 <= at <= at + length <= len(self._step):
            try:
                self._step = self._source.read(offset, max(length, READ_BYTES))
            except Corrupt:  # the unreadable bytes may be after the requested ones
                self._step = self._source.read(offset, length)
            self._start = offset
            at = 0
        return self._step[at : at + length]


class PieceTable(NamedTuple):
    """Offsets, lengths and checksums of consecutive pieces. A length excludes the zeros after its piece."""

    offsets: array[int]
    lengths: array[int]
    checksums: array[int]

    def last_within(self, first: int, last: int, bytes_max: int) -> int:
        """Return the last piece such that first up to it have at most `bytes_max` bytes; at least `first`."""
        end_max = self.offsets[first] + bytes_max
        at = bisect_right(self.offsets, end_max, first, last + 1) - 1
        until = at - 1 if at > first and self.end(at) > end_max else at
        assert first <= until <= last, "WITHIN"
        return until

    def end(self, at: int) -> int:
        """Return the offset after a piece and its zeros."""
        return self.offsets[at] + padded_length(self.lengths[at])


def padded_length(length: int) -> int:
    """Round a length up to a multiple of eight."""
    return length + 7 & ~7


def checksum_of(parts: Sequence[Buffer], seed: int) -> int:
    checksum = xxh3_64(seed=seed)
    for part in parts:
        checksum.update(part)
    return int(checksum.intdigest())


def column_of(kind: str, content: memoryview, offset: int, count: int) -> array[int]:
    """Return `count` numbers of `content`, from `offset` on."""
    column = array(kind)
    column.frombytes(content[offset : offset + count * column.itemsize])
    return column


def read_exactly(source: Source, offset: int, length: int) -> bytes:
    content = source.read(offset, length)
    if len(content) != length:
        reason = f"the file ends here, {length - len(content)} bytes are missing"
        raise Corrupt(source.name, offset + len(content), reason)
    return content


def read_verified(source: Source, offset: int, length: int, *, checksum: int, seed: int, label: str) -> bytes:
    content = read_exactly(source, offset, length)
    if xxh3_64_intdigest(content, seed) != checksum:
        raise Corrupt(source.name, offset, f"the {label} does not match its checksum")
    return content


def read_runs(
    source: Source, table: PieceTable, first: int, last: int, *, bytes_max: int, seed: int, label: str
) -> Iterator[tuple[int, int, memoryview]]:
    """Read pieces first..last in as few reads as `bytes_max` allows: yield (first, last, bytes with all
    zeros).

    Neighbours are read together. Every piece of a run is verified before the run is yielded."""
    offsets, lengths, checksums = table
    while first <= last:
        until = table.last_within(first, last, bytes_max)
        start = offsets[first]
        assert table.end(until) > start, "PROGRESS"
        content = memoryview(read_exactly(source, start, table.end(until) - start))
        for at in range(first, until + 1):
            offset = offsets[at] - start
            if (
                xxh3_64_intdigest(content[offset : offset + padded_length(lengths[at])], seed)
                != checksums[at]
            ):
                raise Corrupt(source.name, offsets[at], f"the {label} does not match its checksum")
        yield first, until, content
        first = until + 1


def read_pieces(
    source: Source, table: PieceTable, first: int, last: int, *, seed: int, label: str
) -> Iterator[memoryview]:
    """Yield pieces first..last one by one, without their zeros."""
    runs = read_runs(source, table, first, last, bytes_max=READ_BYTES, seed=seed, label=label)
    for run_first, run_last, content in runs:
        start = table.offsets[run_first]
        for at in range(run_first, run_last + 1):
            offset = table.offsets[at] - start
            yield content[offset : offset + table.lengths[at]]
