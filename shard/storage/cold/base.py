"""Defines the cold store interface: errors, names, and checksums of files that are stored.

    name      shard-00/segments/7/00000000000000000001-000000000012.seg
              folders have no dot; a file has one, and does not end in `.tmp`

There are three kinds of failure, by the reaction of the caller: `ColdUnavailable` (wait, then retry),
`ColdMissing` and `ColdDamaged` (use another copy). Failures of the *local* file are none of them: they are
raised as `OSError`, or as `Corrupt` if its bytes do not match the expected checksum.

Invariants:
  REPEATABLE  a source of a put can be read more than once: an attempt may have to be repeated.
  EXACT_READ  a read returns exactly the requested bytes, or raises.
  RANGES      offsets and lengths are not negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_64

from shard.storage.files import Buffer, Corrupt, DiskLike, read_chunks

#: Bytes per read or write of a disk.
CHUNK_BYTES = 1 << 20

_LEGAL = (
    "Give the path of a folder that exists, file:///path, s3://bucket/prefix, gs://bucket/prefix or "
    "az://container/prefix"
)
TEMPORARY = ".tmp"
#: With `.tmp` appended a part still fits the 255 bytes of a file system; S3 allows 1,024 in all.
_PART_BYTES_MAX = 200
_NAME_BYTES_MAX = 700
FOLDER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")

Chunks = Callable[[], Generator[Buffer, None, None]]


class ColdConfigError(ValueError):
    """The configured location cannot be a cold store."""

    def __init__(self, location: str, reason: str) -> None:
        self.location = location
        self.reason = reason
        super().__init__(f"{location!r} cannot be the cold store: {reason}. {_LEGAL}.")


class ColdError(Exception):
    """A failure that concerns one name in the cold store."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name or 'the listing'} in the cold store: {reason}")


class ColdUnavailable(ColdError):
    """The store does not answer, or refuses access. This says nothing about the data in it."""


class ColdMissing(ColdError):
    """The store answers, and has nothing under this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "the object does not exist")


class ColdDamaged(ColdError):
    """The stored object differs from the one that was put there."""


class ColdStore(Protocol):
    """The calls of a cold store."""

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        """Store a local file, by its path, or buffers that can be iterated more than once.

        Returns when the copy is durable. `checksum` is the `xxh3_64` of all bytes, without a seed. Putting a
        name again with the same content is harmless; other content replaces it.
        """

    def create(self, name: str, content: bytes) -> bool:
        """Store a few bytes unless the name exists; False if it does.

        Of two concurrent calls at most one succeeds, if the store supports conditional writes. After
        `ColdUnavailable`, read the name to see which call succeeded.
        """

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        """Read all of it back; `ColdDamaged` unless size and checksum match."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly these bytes; `ColdDamaged` if the file ends before."""

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each `(offset, length)`, in order. Ranges close to each other are fetched
        together."""

    def size(self, name: str) -> int | None: ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield all names under a folder ("a/b/", or "" for all), sorted. Each page is a separate call."""

    def delete(self, name: str) -> None:
        """Delete the name. A missing name is no error."""


class ColdSource:
    """One file in the cold store as a `Source`, so that segments are read as from a local file."""

    __slots__ = ("_size", "_store", "name")

    def __init__(self, store: ColdStore, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self.name = name

    def __repr__(self) -> str:
        return f"<ColdSource {self.name}: {self._size} bytes>"

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes, fewer only at the end of the file as it was put there."""
        return self._store.read(self.name, offset, max(0, min(length, self._size - offset)))


class Measure(NamedTuple):
    """Size and checksum of a file."""

    size: int
    checksum: int


def measure(disk: DiskLike, path: str) -> Measure:
    """Return size and checksum of a local file, for `put` and `verify`."""
    digest = xxh3_64()
    size = 0
    for chunk in read_chunks(disk, path, CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return Measure(size, digest.intdigest())


class LocalFailure(Exception):
    """The local disk failed while a source was read. It carries the error past code that translates
    errors."""

    def __init__(self, error: OSError) -> None:
        self.error = error


class ColdBase:
    """Base of both kinds of store: checks names, and computes checksums while sources are read."""

    def __init__(self, disk: DiskLike) -> None:
        self._disk = disk

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        check_name(name)
        assert isinstance(source, str) or iter(source) is not source, "REPEATABLE"
        try:
            self._put(name, lambda: self._chunks(name, source, Measure(size, checksum)), size)
        except LocalFailure as failure:
            raise failure.error from None

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self.read_many(name, [(offset, length)])[0]

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_name(name)
        assert all(offset >= 0 and length >= 0 for offset, length in ranges), "RANGES"
        nonempty_ranges = [(offset, length) for offset, length in ranges if length]
        contents = iter(self._read(name, nonempty_ranges) if nonempty_ranges else ())
        parts = [next(contents) if length else b"" for _, length in ranges]
        assert all(len(part) == length for part, (_, length) in zip(parts, ranges, strict=True)), "EXACT_READ"
        return parts

    def _put(self, name: str, chunks: Chunks, size: int) -> None:
        raise NotImplementedError

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        raise NotImplementedError

    def _chunks(
        self, name: str, source: str | Iterable[Buffer], expected_measure: Measure
    ) -> Generator[Buffer, None, None]:
        """Yield the bytes of a source; then raise `Corrupt` unless size and checksum match."""
        where = source if isinstance(source, str) else name
        digest = xxh3_64()
        size = 0
        try:
            for chunk in read_chunks(self._disk, source, CHUNK_BYTES) if isinstance(source, str) else source:
                digest.update(chunk)
                size += len(chunk)
                yield chunk
        except OSError as error:
            raise LocalFailure(error) from error
        if size != expected_measure.size:
            raise Corrupt(
                where, size, f"it is {size} bytes long, not {expected_measure.size}; it was not copied"
            )
        if digest.intdigest() != expected_measure.checksum:
            raise Corrupt(where, 0, "it does not match its checksum; it was not copied")


def compare(name: str, actual: Measure, expected_measure: Measure) -> None:
    if actual.size != expected_measure.size:
        raise ColdDamaged(name, f"it is {actual.size} bytes long, not {expected_measure.size}")
    if actual.checksum != expected_measure.checksum:
        raise ColdDamaged(name, "it does not match its checksum")


def too_short(name: str, end: int) -> ColdDamaged:
    return ColdDamaged(name, f"it ends before byte {end}")


def check_name(name: str) -> None:
    """Raise `ValueError` for an invalid name. Names come from this server, but a bad one could leave the
    folder."""
    if not is_name(name):
        raise ValueError(f"{name!r} is not a valid name in the cold store")


def check_prefix(prefix: str) -> None:
    if prefix and not (prefix.endswith("/") and is_name(f"{prefix}x.x")):
        raise ValueError(f"{prefix!r} is not a folder in the cold store; it must end in a slash")


def is_name(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        len(name) <= _NAME_BYTES_MAX
        and all(len(folder) <= _PART_BYTES_MAX and FOLDER_NAME.fullmatch(folder) for folder in folders)
        and len(file) <= _PART_BYTES_MAX
        and _FILE.fullmatch(file) is not None
        and not file.endswith(TEMPORARY)
    )
