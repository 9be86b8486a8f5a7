"""Backups: what they are made of, taking one, listing and pruning them. `restore.py` puts one back.

In the target, a folder or an object store:

    backups/<id>.json                     what the backup holds; written last: it *is* the backup
    backup-shards/<id>/shard-00/wal/…     the folder of each shard, as `transfer.py` builds it: everything
    backup-shards/<id>/shard-00/snapshot/…        but what is in segments
    backup-segments/7/<first seq>-<serial>-<digest>.seg   shared by all backups that need it

An id is the time in UTC and four random digits: `20261116T163512042Z-9f3a`. Ids sort by time.

A segment never changes, and its object's name holds a digest of its content. So a backup copies only segments
that no backup had before, and backups of servers whose histories parted never mistake one for another.

Segments in the cold store are copied too, even if that is where the backup goes: the server drops them there
when their records are gone, and a backup must outlive that.

Rules of the file
- What is copied is verified on its way out of its file, and read back from the target before it is counted.
- A backup whose JSON is not there does not exist. What was left of one that was cut short is written over, or
  removed by `prune`.
- One server backs up into one target. `prune` knows of no other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_64_hexdigest

from shard.core.changes import ShardState
from shard.storage import frames, segments
from shard.storage.cold import ColdMissing, ColdStore, measure
from shard.storage.files import Buffer, Corrupt, DiskLike
from shard.storage.segmentindex import SegmentIndex, digest_of
from shard.storage.snapshot import Snapshots
from shard.storage.sources import Source
from shard.storage.store import Name, SegmentStore

FORMAT = 1

_MANIFESTS, _SHARDS, _SEGMENTS = "backups/", "backup-shards/", "backup-segments/"
_READ_BYTES = 8 << 20

#: Called with the bytes that were just copied: to sleep there bounds the rate.
Pause = Callable[[int], None]
Report = Callable[[float], None]


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """An object: its name in the target, and what it must be like."""

    name: str
    size: int
    checksum: int


class StoredSegment(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    first_seq: int
    serial: int
    size: int
    digest: int

    @property
    def name(self) -> Name:
        return Name(self.generation, self.first_seq, self.serial)

    @property
    def object(self) -> str:
        """Its name below the root of the target."""
        stem = self.name.file.removesuffix(".seg")
        return f"{_SEGMENTS}{stem}-{self.digest:016x}.seg"


class BackupShard(msgspec.Struct, frozen=True):
    lsn: int
    boxes: int
    #: By path in the shard's folder.
    files: dict[str, Stored]
    segments: list[StoredSegment]


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """One backup, all of it."""

    format: int = FORMAT
    id: str
    taken_ms: int
    #: The map of slots when it was taken, as in the manifest of a data directory.
    slots: list[tuple[int, int, int]]
    shards: list[BackupShard]

    @property
    def boxes(self) -> int:
        return sum(shard.boxes for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes that it needs, those it shares with others included."""
        files = sum(stored.size for shard in self.shards for stored in shard.files.values())
        return files + sum(segment.size for shard in self.shards for segment in shard.segments)

    def encode(self) -> bytes:
        """A line of JSON and a line with its checksum."""
        line = msgspec.json.encode(self)
        return line + b"\n" + xxh3_64_hexdigest(line).encode() + b"\n"


class ShardSource(NamedTuple):
    """What of a shard is to be copied: a folder as `transfer.py` builds it, and where its segments are. What
    comes from a cold store is put into the folder on its way."""

    folder: str
    store: SegmentStore
    taken_ms: int


class Taken(NamedTuple):
    backup: Backup
    copied_segments: int
    copied_bytes: int


class Target:
    """Where backups are kept."""

    def __init__(self, store: ColdStore, disk: DiskLike, *, root: str = "") -> None:
        """All names begin with `root`."""
        self.store = store
        self._disk = disk
        self._root = root

    def __repr__(self) -> str:
        return f"<Target {self.store!r} {self._root}>"

    # -- looking

    def ids(self) -> list[str]:
        """Of all backups, the oldest first."""
        prefix = self._root + _MANIFESTS
        names = self.store.names(prefix)
        return [name.removeprefix(prefix).removesuffix(".json") for name in names if name.endswith(".json")]

    def load(self, id: str) -> Backup:
        """Raises `ColdMissing`, or `Corrupt` if it is not what was written."""
        name = f"{self._root}{_MANIFESTS}{id}.json"
        size = self.store.size(name)
        if size is None:
            raise ColdMissing(name)
        content = self.store.read(name, 0, size)
        line, _, rest = content.partition(b"\n")
        if rest != xxh3_64_hexdigest(line).encode() + b"\n":
            raise Corrupt(name, 0, "it does not match its checksum")
        found: dict[str, Any] = msgspec.json.decode(line)
        if found["format"] != FORMAT:
            raise Corrupt(name, 0, f"the backup is of format {found['format']}, known is {FORMAT}")
        return msgspec.json.decode(line, type=Backup)

    # -- taking

    def take(
        self,
        shards: Sequence[ShardSource],
        slots: list[tuple[int, int, int]],
        *,
        id: str = "",
        pause: Pause = segments.no_pause,
        report: Report = lambda ratio: None,
    ) -> Taken:
        """Copies what is not there yet. It is a backup when this returns, and none if it raises."""
        taken_ms = min(shard.taken_ms for shard in shards)
        id = id or _new_id(taken_ms)
        states = [_state_of(self._disk, shard.folder) for shard in shards]
        needed = [self._needed(shard, state) for shard, state in zip(shards, states, strict=True)]
        known = self._known()
        missing = [
            (shard, segment)
            for shard, names in zip(shards, needed, strict=True)
            for segment in names
            if not self._has(segment, known)
        ]
        total = sum(segment.size for _, segment in missing) or 1
        copied = 0
        for shard, segment in missing:
            self._copy_segment(shard, segment, pause)
            copied += segment.size
            report(copied / total)
        found = [
            BackupShard(state.lsn, len(state.boxes), self._copy_files(id, number, shard.folder, pause), names)
            for number, (shard, state, names) in enumerate(zip(shards, states, needed, strict=True))
        ]
        backup = Backup(id=id, taken_ms=taken_ms, slots=slots, shards=found)
        content = backup.encode()
        self._put(f"{self._root}{_MANIFESTS}{id}.json", [content])
        files = sum(stored.size for shard in found for stored in shard.files.values())
        return Taken(backup, len(missing), copied + files + len(content))

    def _needed(self, shard: ShardSource, state: ShardState) -> list[StoredSegment]:
        needed: list[StoredSegment] = []
        for facts in state.boxes:
            for segment in facts.segments:
                name = Name(facts.generation, segment.first_seq, segment.serial)
                index = shard.store.index_of(name)
                needed.append(StoredSegment(*name, index.file_bytes, digest_of(index)))
        return needed

    def _known(self) -> set[StoredSegment]:
        """What the newest backup has that can be read. It was whole when that was taken."""
        for id in reversed(self.ids()):
            try:
                return {segment for shard in self.load(id).shards for segment in shard.segments}
            except Corrupt:  # that one is lost; the next is not to be lost for it
                continue
        return set()

    def _has(self, segment: StoredSegment, known: set[StoredSegment]) -> bool:
        return segment in known and self.store.size(self._root + segment.object) == segment.size

    def _copy_segment(self, shard: ShardSource, segment: StoredSegment, pause: Pause) -> None:
        name, store = segment.name, shard.store
        index = store.index_of(name)
        if not store.is_elsewhere(name):
            try:
                self._put(self._root + segment.object, _Verified(store.source_of(name), index, pause))
                return
            except FileNotFoundError:  # it has moved to the cold store between two steps
                pass
        self._copy_by_way_of(f"{shard.folder}/segment", store.source_of(name), index, segment, pause)

    def _copy_by_way_of(
        self, path: str, source: Source, index: SegmentIndex, segment: StoredSegment, pause: Pause
    ) -> None:
        """From a cold store, into a file here first: so it is fetched once, and not while the target takes
        it. Both may be object stores, and a call on one of them must not wait for a call on another."""
        handle = self._disk.create(path)
        try:
            offset = 0
            for step in segments.verified_bytes(source, index):
                written = self._disk.pwritev(handle, step, offset)
                offset += written
                pause(written)
        finally:
            self._disk.close(handle)
        size, checksum = measure(self._disk, path)
        self.store.put(self._root + segment.object, path, size=size, checksum=checksum)
        self.store.verify(self._root + segment.object, size=size, checksum=checksum)
        self._disk.unlink(path)

    def _copy_files(self, id: str, number: int, folder: str, pause: Pause) -> dict[str, Stored]:
        copied: dict[str, Stored] = {}
        for part in ("wal", "snapshot"):
            for file in self._disk.listdir(f"{folder}/{part}"):
                name = f"{self._root}{_SHARDS}{id}/shard-{number:02d}/{part}/{file}"
                size, checksum = measure(self._disk, f"{folder}/{part}/{file}")
                self.store.put(name, f"{folder}/{part}/{file}", size=size, checksum=checksum)
                self.store.verify(name, size=size, checksum=checksum)
                copied[f"{part}/{file}"] = Stored(name, size, checksum)
                pause(size)
        return copied

    def _put(self, name: str, buffers: Iterable[Buffer]) -> None:
        digest = xxh3_64()
        size = 0
        for buffer in buffers:
            digest.update(buffer)
            size += len(buffer)
        self.store.put(name, buffers, size=size, checksum=digest.intdigest())
        self.store.verify(name, size=size, checksum=digest.intdigest())

    # -- pruning

    def prune(self, keep: int) -> list[str]:
        """Drops all but the newest `keep` backups, and what no backup needs. Returns the ids that went.

        A backup ends when its JSON does, first of all: whatever this leaves behind is dropped the next time.
        """
        assert keep > 0
        ids = self.ids()
        gone, kept = ids[:-keep], ids[-keep:]
        needed: set[str] = set()
        for id in kept:
            for shard in self.load(id).shards:
                needed.update(self._root + segment.object for segment in shard.segments)
                needed.update(stored.name for stored in shard.files.values())
        for id in gone:
            self.store.delete(f"{self._root}{_MANIFESTS}{id}.json")
        for prefix in (_SHARDS, _SEGMENTS):
            for name in list(self.store.names(self._root + prefix)):
                if name not in needed:
                    self.store.delete(name)
        return gone

    # -- fetching

    def fetch(self, stored: Stored, path: str, pause: Pause) -> None:
        """Puts an object into a local file, and proves that it is whole. Durable with its folder."""
        handle = self._disk.create(path)
        try:
            for offset in range(0, stored.size, _READ_BYTES):
                piece = self.store.read(stored.name, offset, min(_READ_BYTES, stored.size - offset))
                self._disk.pwritev(handle, [piece], offset)
                pause(len(piece))
            self._disk.fsync(handle)
        finally:
            self._disk.close(handle)
        if measure(self._disk, path) != (stored.size, stored.checksum):
            raise Corrupt(stored.name, 0, "the object does not match the checksum that the backup has of it")

    def source(self, segment: StoredSegment) -> Source:
        """The bytes of a segment, under the name it had."""
        return _SegmentObject(self.store, segment, self._root + segment.object)


class _Verified:
    """The bytes of a segment, to be gone through more than once, each time verified."""

    def __init__(self, source: Source, index: SegmentIndex, pause: Pause) -> None:
        self._source = source
        self._index = index
        self._pause = pause

    def __iter__(self) -> Iterator[Buffer]:
        for step in segments.verified_bytes(self._source, self._index):
            for buffer in step:
                yield buffer
                self._pause(len(buffer) // 2)  # everything is read twice


class _SegmentObject:
    __slots__ = ("_object", "_size", "_store", "name")

    def __init__(self, store: ColdStore, segment: StoredSegment, object: str) -> None:
        self._store = store
        self._object = object
        self._size = segment.size
        self.name = segment.name.file

    def __repr__(self) -> str:
        return f"<_SegmentObject {self._object}>"

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        return self._store.read(self._object, offset, max(0, min(length, self._size - offset)))


def _state_of(disk: DiskLike, folder: str) -> ShardState:
    loaded = Snapshots(disk, f"{folder}/snapshot").load_newest()
    assert loaded is not None, "an export has a snapshot"
    return frames.decode_state(loaded.content)


def _new_id(taken_ms: int) -> str:
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(taken_ms // 1000))
    return f"{moment}{taken_ms % 1000:03d}Z-{secrets.token_hex(2)}"
