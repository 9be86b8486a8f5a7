"""Manages all segments of a shard: locates each one, and reads from it.

    segments/<generation>/<first seq>-<serial>.seg     the segment, on this disk
    segments/<generation>/<first seq>-<serial>.stub    its index only; the segment is, or will be, in the
                                                       cold store (below)

    segments-<server>/<generation>/<first seq>-<serial>.seg    a segment in the cold store
    segments/<generation>/<first seq>-<serial>.seg             the old name, before names held the server

Two servers may have equal generations: a restored server has those of the original, and two servers may
create a box in the same millisecond. The server number in the name keeps their segments apart.

    moving      write stub ─► copy ─► verify ─► (the machine logs the move) ─► remove the local file
    dropping    remove the copy in the cold store ─► remove the stub

So after a crash: if the local file exists, it counts; if only the stub exists, the copy is complete; and
wherever a copy may exist, a stub says so.

Every call may come from any thread and blocks it. Recently used indexes are cached (`_INDEX_BATCHES_MAX`), so
that a read is one read of the file.

Rules of the file
- It knows files, and never which of them the machine still names: the caller of `remove_unnamed` says that.
- A segment never changes, so a cached index is never out of date.

Invariants
- NAME_IS_CONTENT: a segment has the generation, first seq and serial of its name.
- COLD_IS_NAMED: a segment whose local file may go, because the cold store has it, is in use.
- HAS_COLD: segments move only to a cold store that is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from errno import ENOENT
from functools import partial
from typing import NamedTuple, TypeVar

from shard.core.boxes.sealed import Segment
from shard.core.snapshot_facts import SegmentFacts
from shard.storage.cold import ColdError, ColdMissing, ColdSource, ColdStore, ColdUnavailable, measure
from shard.storage.files import Corrupt, DiskLike
from shard.storage.segments import index as segment_index
from shard.storage.segments import reader, tags, writer
from shard.storage.segments.index import SegmentIndex, segment_name, stub_name
from shard.storage.sources import FileSource, Source, WrappedSource
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

T = TypeVar("T")

#: An index has 52 bytes per batch, so this is about 13 MB.
_INDEX_BATCHES_MAX = 250_000


_NO_COLD = "the segment is in a cold store, and none is configured; set STREAMS_COLD_DIR"


class ColdStoreUnreachable(Exception):
    """The cold store does not answer now. This says nothing about the data in it."""


class Name(NamedTuple):
    """The identity of a segment."""

    generation: int
    first_seq: int
    serial: int

    @classmethod
    def of(cls, segment: Segment) -> Name:
        return cls(segment.generation, segment.first_seq, segment.serial)

    @property
    def file(self) -> str:
        return segment_name(generation=self.generation, first_seq=self.first_seq, serial=self.serial)

    @property
    def stub(self) -> str:
        return stub_name(generation=self.generation, first_seq=self.first_seq, serial=self.serial)


class SegmentStore:
    """The segments of one shard, on disk and in the cold store."""

    def __init__(
        self, disk: DiskLike, directory: str, cold: ColdStore | None = None, *, server: str = ""
    ) -> None:
        """`server` is the number of the data directory (`gateway/supervise/manifest.py`)."""
        self._disk = disk
        self._directory = directory
        self._cold = cold
        self._server = server
        #: Segments whose copy has the old name without the server. At most one per old stub.
        self._without_server: set[Name] = set()
        #: The most recently used index comes last.
        self._indexes: dict[Name, SegmentIndex] = {}

    def __repr__(self) -> str:
        return f"<SegmentStore {self._directory}: {len(self._indexes)} indexes, cold {self._cold!r}>"

    @property
    def has_cold(self) -> bool:
        return self._cold is not None

    # -- writing

    def write(
        self,
        generation: int,
        serial: int,
        batches: Iterable[Batch],
        pause: Callable[[int], None] = writer.no_pause,
    ) -> Segment:
        """Make a segment durable, and return its in-memory form."""
        index = writer.write_segment(
            self._disk, self._directory, generation=generation, serial=serial, batches=batches, pause=pause
        )
        assert (index.generation, index.serial) == (generation, serial), "NAME_IS_CONTENT"
        self._indexes.pop(Name(generation, index.first_seq, serial), None)
        return segment_of(index)

    def copy_to_cold(self, name: Name) -> None:
        """Copy a segment to the cold store and verify the copy. Safe to repeat."""
        assert self._cold is not None, "HAS_COLD: moves are planned only with a cold store"
        path = self._path(name.file)
        with self._reading(name):
            index = self._index(name)
            size, checksum = measure(self._disk, path)
        writer.write_stub(self._disk, self._directory, index)
        with self._reading(name):
            cold_name = self._cold_name(name.file)
            self._cold.put(cold_name, path, size=size, checksum=checksum)
            self._cold.verify(cold_name, size=size, checksum=checksum)

    def remove_local(self, name: Name) -> None:
        """Remove the local file of a segment whose copy is in the cold store."""
        segment_index.remove_segment(self._disk, self._directory, name.file)

    def remove_unnamed(self, names_in_use: Set[Name], cold: Set[Name] = frozenset()) -> int:
        """Remove the segments that are not in use, here and in the cold store, and the local files of those
        in `cold`. Returns how many were removed. A failed removal in the cold store is repeated by the next
        call."""
        assert cold <= names_in_use, "COLD_IS_NAMED"
        files_in_use = {name.file for name in names_in_use - cold} | {name.stub for name in names_in_use}
        removed_count = 0
        stubs: list[str] = []
        empty_folders: list[str] = []
        for folder, files in segment_index.list_folders(self._disk, self._directory):
            names = [f"{folder}/{file}" for file in files]
            unused_files = [name for name in names if name.endswith(".seg") and name not in files_in_use]
            for name in unused_files:
                segment_index.remove_segment(self._disk, self._directory, name)
            removed_count += len(unused_files)
            stubs += [name for name in names if name.endswith(".stub") and name not in files_in_use]
            if len(unused_files) == len(names):
                empty_folders.append(folder)
        for folder in empty_folders:
            self._disk.rmdir(self._path(folder))
        # The cold store comes last: if it does not answer, everything else is done.
        for stub in stubs:
            if self._cold is None:
                break
            with self._translate_errors():
                self._delete_cold(self._cold, f"{stub.removesuffix('.stub')}.seg")
            segment_index.remove_segment(self._disk, self._directory, stub)
            removed_count += 1
        return removed_count

    def _delete_cold(self, cold: ColdStore, file: str) -> None:
        name = self._cold_name(file)
        if self._server and cold.size(name) is None:
            name = _name_without_server(file)
        cold.delete(name)

    def remove_leftovers(self) -> None:
        """Remove the unfinished writes of an earlier process."""
        segment_index.remove_leftovers(self._disk, self._directory)

    # -- reading

    def index_of(self, name: Name) -> SegmentIndex:
        """Return the index, from the file or the stub."""
        return self._index(name)

    def is_only_in_cold(self, name: Name) -> bool:
        """Return True if the segment has no local file."""
        return not self._disk.exists(self._path(name.file))

    def source_of(self, name: Name) -> Source:
        """Return a source for the segment. It fails if the file moves to the cold store meanwhile."""
        with self._translate_errors():
            return _TranslatedSource(self._source(name), self._translate_errors)

    def source_in_cold(self, name: Name, size: int | None = None) -> Source:
        """Return a source for the copy in the cold store, with or without a local file or stub.

        Without `size`, the store is asked for it. Raises `Unreachable`, or `Corrupt` if there is no copy.
        """
        cold = self._cold
        if cold is None:
            raise ColdStoreUnreachable(f"{self._path(name.file)}: {_NO_COLD}")
        with self._translate_errors():
            if size is None:
                names = dict.fromkeys((self._cold_name(name.file), _name_without_server(name.file)))
                stored_size = next((each for each in map(cold.size, names) if each is not None), None)
                if stored_size is None:
                    raise Corrupt(self._cold_name(name.file), 0, "the object does not exist")
                size = stored_size
            return _TranslatedSource(self._cold_source(cold, name, size), self._translate_errors)

    def open(self, generation: int, facts: SegmentFacts) -> Segment:
        """Open a segment from its file or its stub, and return its in-memory form."""
        name = Name(generation, facts.first_seq, facts.serial)
        try:
            segment = segment_of(self._index(name))
        except FileNotFoundError:
            reason = "the segment is missing, and a snapshot names it"
            raise Corrupt(self._path(name.file), 0, reason) from None
        segment.is_cold = not self._disk.exists(self._path(name.file))
        return segment

    def read(self, name: Name, at: int, *, bytes_max: int) -> list[Batch]:
        """Read batches from `at` on, as many as fit into `bytes_max`, but at least one."""

        def read() -> list[Batch]:
            index = self._index(name)
            return reader.read_batches(self._source(name), index, at, len(index) - 1, bytes_max=bytes_max)

        return self._read_again_if_moved(name, read)

    def read_all(self, name: Name) -> Iterator[Batch]:
        with self._reading(name):
            index = self._index(name)
        at = 0
        while at < len(index):
            with self._reading(name):
                batches = reader.read_batches(self._source(name), index, at, len(index) - 1)
            yield from batches
            at += len(batches)

    def find_tags(self, name: Name, match: Match) -> tuple[Sequence[int], Sequence[int]]:
        """Return seqs and sizes of the records whose tag matches."""
        return self._read_again_if_moved(
            name, lambda: tags.find_tags(self._source(name), self._index(name), match)
        )

    def walk_tags(self, name: Name) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """Yield every tag with the seqs and sizes of its records."""
        with self._reading(name):
            yield from tags.walk_tags(self._source(name), self._index(name))

    def _read_again_if_moved(self, name: Name, read: Callable[[], T]) -> T:
        """Run `read`; repeat it if the file has moved to the cold store meanwhile."""
        with self._reading(name):
            try:
                return read()
            except FileNotFoundError:
                return read()

    def _source(self, name: Name) -> Source:
        path = self._path(name.file)
        if self._disk.exists(path):
            return FileSource(self._disk, path)
        if not self._disk.exists(self._path(name.stub)):
            raise FileNotFoundError(ENOENT, "neither the segment nor its stub exists", path)
        if self._cold is None:
            raise ColdStoreUnreachable(f"{path}: {_NO_COLD}")
        return self._cold_source(self._cold, name, self._index(name).file_bytes)

    def _cold_source(self, cold: ColdStore, name: Name, size: int) -> Source:
        without_server = ColdSource(cold, _name_without_server(name.file), size)
        if not self._server or name in self._without_server:
            return without_server
        note = partial(self._without_server.add, name)
        return _FallbackSource(ColdSource(cold, self._cold_name(name.file), size), without_server, note)

    def _cold_name(self, file: str) -> str:
        """Return the name of a segment in the cold store.

        It holds no shard number, because a box keeps its generation when it moves to another shard.
        """
        return f"segments-{self._server}/{file}" if self._server else _name_without_server(file)

    def _path(self, file: str) -> str:
        return f"{self._directory}/{file}"

    def _index(self, name: Name) -> SegmentIndex:
        # Thread-safe: each step is one dict operation, and a lost entry is read again.
        index = self._indexes.pop(name, None)
        if index is not None:
            self._indexes[name] = index
            return index
        if self._disk.exists(self._path(name.file)):
            with FileSource(self._disk, self._path(name.file)).held_open() as source:
                index = segment_index.open_segment(source)
        else:
            with FileSource(self._disk, self._path(name.stub)).held_open() as source:
                index = segment_index.open_stub(source)
        assert name == (index.generation, index.first_seq, index.serial), "NAME_IS_CONTENT"
        self._indexes[name] = index
        entries = list(self._indexes.items())
        excess = sum(len(each) for _, each in entries) - _INDEX_BATCHES_MAX
        for old, its_index in entries[:-1]:
            if excess <= 0:
                break
            self._indexes.pop(old, None)
            excess -= len(its_index)
        return index

    @contextmanager
    def _reading(self, name: Name) -> Iterator[None]:
        """Raise `Corrupt` for a segment that cannot be read.

        An unreadable segment does not end the shard, as a disk that cannot be written does.
        """
        try:
            with self._translate_errors():
                yield
        except OSError as error:
            raise Corrupt(self._path(name.file), 0, f"it cannot be read ({error.strerror})") from error

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of the cold store into `Unreachable` and `Corrupt`."""
        if self._cold is None:
            yield
            return
        try:
            yield
        except ColdUnavailable as error:
            raise ColdStoreUnreachable(str(error)) from error
        except ColdError as error:
            raise Corrupt(error.name, 0, error.reason) from error


class _FallbackSource(WrappedSource):
    """A segment in the cold store, under its name or else under the old name without the server."""

    __slots__ = ("_note", "_second")

    def __init__(self, first: Source, second: Source, note: Callable[[], None]) -> None:
        """`note` is called when the second name is used."""
        super().__init__(first)
        self._second = second
        self._note = note

    def read(self, offset: int, length: int) -> bytes:
        try:
            return self._source.read(offset, length)
        except ColdMissing as missing:
            try:
                content = self._second.read(offset, length)
            except ColdMissing:
                raise missing from None
        self._note()
        return content


class _TranslatedSource(WrappedSource):
    """A source that raises `Unreachable` and `Corrupt` in place of cold store errors."""

    __slots__ = ("_translate_errors",)

    def __init__(self, source: Source, translate_errors: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(source)
        self._translate_errors = translate_errors

    def read(self, offset: int, length: int) -> bytes:
        with self._translate_errors():
            return self._source.read(offset, length)


def segment_of(index: SegmentIndex) -> Segment:
    """Return the in-memory form of a segment."""
    return Segment(
        generation=index.generation,
        serial=index.serial,
        first_seqs=index.first_seqs,
        first_times=index.first_times,
        last_times=index.last_times,
        counts=index.counts,
        sizes=index.sizes,
    )


def _name_without_server(file: str) -> str:
    return f"segments/{file}"
