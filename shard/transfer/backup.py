"""Takes, lists and prunes backups. `offline/restore.py` restores them.

A backup is a manifest and the objects that it names, in a folder or an object store (`backup_manifest.py`).

A segment never changes, and its object's name holds a digest of its content. So a backup copies only segments
that no earlier backup has, and servers whose histories diverged never mistake each other's segments.

Segments in the cold store are copied too, even if the backup goes to that same store: the server drops them
there when their records are gone, and a backup must outlive that.

Rules of the file
- Every copy is verified while it is read, and read back from the target before it counts.
- A backup without a manifest does not exist. The remains of an interrupted one are overwritten, or removed by
  `prune`.
- One server backs up into one target. `prune` expects no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64

from shard.core.snapshot_facts import ShardState
from shard.storage import frames, segments
from shard.storage.cold import ColdMissing, ColdStore, measure
from shard.storage.files import Buffer, Corrupt, DiskLike, read_chunks
from shard.storage.segments.index import SegmentIndex, digest_of
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.sources import Source
from shard.transfer import backup_manifest
from shard.transfer.backup_manifest import (
    FORMAT,
    FORMAT_SIGNED,
    ID,
    MANIFESTS,
    SEGMENTS,
    SHARDS,
    Backup,
    BackupShard,
    StoredObject,
    StoredSegment,
    new_id,
    object_of,
)

_READ_BYTES = 8 << 20

#: Called with the number of bytes after each copy: sleeping there bounds the rate.
Pause = Callable[[int], None]
#: Called once with the number of bytes to copy.
Expect = Callable[[int], None]

#: Returns True if the signature (second) of a manifest (first) is right.
Verify = Callable[[bytes, bytes], bool]


class Signer(NamedTuple):
    """A private key: signs manifests, and verifies its own signatures."""

    sign: Callable[[bytes], bytes]
    verify: Verify


class BadSignature(Exception):
    """A backup is not signed with the requested key. Nothing was read or written."""


class ShardSource(NamedTuple):
    """A shard to back up: a folder as `shard_folders.py` builds it, and the store of its segments.

    Segments from a cold store are copied through the folder.
    """

    folder: str
    store: SegmentStore
    taken_ms: int


class BackupResult(NamedTuple):
    """A new backup, and how much was copied for it."""

    backup: Backup
    copied_segments: int
    copied_bytes: int


class BackupStore:
    """A store with backups."""

    def __init__(
        self, store: ColdStore, disk: DiskLike, *, root: str = "", verify: Verify | None = None
    ) -> None:
        """All names begin with `root`. With `verify`, only backups that it accepts are loaded."""
        self.store = store
        self._disk = disk
        self._root = root
        self._verify = verify

    def __repr__(self) -> str:
        return f"<Target {self.store!r} {self._root}>"

    # -- listing and loading

    def ids(self) -> list[str]:
        """Return the ids of all backups, oldest first."""
        prefix = self._root + MANIFESTS
        names = self.store.names(prefix)
        ids = [name.removeprefix(prefix).removesuffix(".json") for name in names if name.endswith(".json")]
        return [id for id in ids if ID.fullmatch(id)]

    def load(self, id: str) -> Backup:
        """Load a manifest. Raises `ColdMissing`, `BadSignature`, or `Corrupt` if it breaks the format."""
        return self._load(id, self._verify)

    def _load(self, id: str, verify: Verify | None) -> Backup:
        name = self._manifest(id)
        content = self._content(name)
        if verify is not None:
            try:
                signature = self._content(self._signature(id))
            except ColdMissing:
                raise BadSignature(f"backup {id} is not signed") from None
            if not verify(content, signature):
                raise BadSignature(f"backup {id} is not signed with this key, or was changed since")
        return backup_manifest.decode(content, name=name, id=id, root=self._root)

    def _content(self, name: str) -> bytes:
        size = self.store.size(name)
        if size is None:
            raise ColdMissing(name)
        return self.store.read(name, 0, size)

    def _manifest(self, id: str) -> str:
        return f"{self._root}{MANIFESTS}{id}.json"

    def _signature(self, id: str) -> str:
        return f"{self._root}{MANIFESTS}{id}.sig"

    # -- taking

    def take(
        self,
        shards: Sequence[ShardSource],
        slots: list[tuple[int, int, int]],
        *,
        id: str = "",
        signer: Signer | None = None,
        pause: Pause = segments.no_pause,
        expect: Expect = lambda size: None,
    ) -> BackupResult:
        """Copy the objects that the target lacks, then write the manifest. If it raises, there is no
        backup."""
        taken_ms = min(shard.taken_ms for shard in shards)
        id = id or new_id(taken_ms)
        states = [_state_of(self._disk, shard.folder) for shard in shards]
        needed_segments = [
            self._list_segments(shard, state) for shard, state in zip(shards, states, strict=True)
        ]
        existing_segments = self._existing_segments(signer)
        missing = [
            (shard, segment)
            for shard, names in zip(shards, needed_segments, strict=True)
            for segment in names
            if not self._has(segment, existing_segments)
        ]
        files_bytes = sum(self._disk.size(path) for shard in shards for path in self._files_of(shard.folder))
        expect(sum(segment.size for _, segment in missing) + files_bytes)
        copied_bytes = 0
        for shard, segment in missing:
            existing_segments[segment] = self._copy_segment(shard, segment, pause, signer is not None)
            copied_bytes += segment.size
        backup_shards = [
            BackupShard(
                state.lsn,
                len(state.boxes),
                self._copy_files(id, number, shard.folder, pause, signer is not None),
                [existing_segments[segment] for segment in names],
            )
            for number, (shard, state, names) in enumerate(zip(shards, states, needed_segments, strict=True))
        ]
        format = FORMAT if signer is None else FORMAT_SIGNED
        backup = Backup(format=format, id=id, taken_ms=taken_ms, slots=slots, shards=backup_shards)
        content = backup.encode()
        if signer is not None:
            self._put(self._signature(id), [signer.sign(content)])
        self._put(self._manifest(id), [content])
        files = sum(stored_object.size for shard in backup_shards for stored_object in shard.files.values())
        return BackupResult(backup, len(missing), copied_bytes + files + len(content))

    def _list_segments(self, shard: ShardSource, state: ShardState) -> list[StoredSegment]:
        needed_segments: list[StoredSegment] = []
        for facts in state.boxes:
            for segment in facts.segments:
                name = Name(facts.generation, segment.first_seq, segment.serial)
                index = shard.store.index_of(name)
                needed_segments.append(StoredSegment(*name, index.file_bytes, digest_of(index)))
        return needed_segments

    def _existing_segments(self, signer: Signer | None) -> dict[StoredSegment, StoredSegment]:
        """Return the segments of the newest readable backup, by their identity without SHA-256.

        They were verified when it was taken. A signed backup vouches for the SHA-256s too, so it relies only
        on a manifest with its own signature.
        """
        for id in reversed(self.ids()):
            try:
                shards = self._load(id, None if signer is None else signer.verify).shards
            except (Corrupt, BadSignature):  # the new backup does not depend on it
                continue
            backup_segments = [segment for shard in shards for segment in shard.segments]
            return {
                _without_sha256(segment): segment if signer is not None else _without_sha256(segment)
                for segment in backup_segments
            }
        return {}

    def _has(self, segment: StoredSegment, existing_segments: dict[StoredSegment, StoredSegment]) -> bool:
        return segment in existing_segments and self.store.size(self._root + segment.object) == segment.size

    def _copy_segment(
        self, shard: ShardSource, segment: StoredSegment, pause: Pause, is_signed: bool
    ) -> StoredSegment:
        """Copy a segment. Returns it as the manifest names it."""
        name, store = segment.name, shard.store
        index = store.index_of(name)
        sha256 = hashlib.sha256() if is_signed else None
        if not store.is_only_in_cold(name):
            try:
                source = _VerifiedSegment(store.source_of(name), index, pause)
                self._put(self._root + segment.object, source, sha256)
                return _with_sha256(segment, sha256)
            except FileNotFoundError:  # it has moved to the cold store meanwhile
                sha256 = hashlib.sha256() if is_signed else None
        path = f"{shard.folder}/segment"
        self._copy_through_file(path, store.source_of(name), index, segment, pause, sha256)
        return _with_sha256(segment, sha256)

    def _copy_through_file(
        self,
        path: str,
        source: Source,
        index: SegmentIndex,
        segment: StoredSegment,
        pause: Pause,
        sha256: hashlib._Hash | None,
    ) -> None:
        """Copy a segment from a cold store through a local file.

        So it is fetched once, and not while it is uploaded. Both may be object stores, and a call on one of
        them must not wait for a call on the other.
        """
        handle = self._disk.create(path)
        try:
            offset = 0
            for step in segments.verified_bytes(source, index):
                step_bytes = self._disk.pwritev(handle, step, offset)
                offset += step_bytes
                pause(step_bytes)
                if sha256 is not None:
                    for buffer in step:
                        sha256.update(buffer)
        finally:
            self._disk.close(handle)
        size, checksum = measure(self._disk, path)
        self.store.put(self._root + segment.object, path, size=size, checksum=checksum)
        self.store.verify(self._root + segment.object, size=size, checksum=checksum)
        self._disk.unlink(path)

    def _copy_files(
        self, id: str, number: int, folder: str, pause: Pause, is_signed: bool
    ) -> dict[str, StoredObject]:
        objects: dict[str, StoredObject] = {}
        for path in self._files_of(folder):
            file = path.removeprefix(f"{folder}/")
            name = object_of(self._root, id, number, file)
            size, checksum = measure(self._disk, path)
            self.store.put(name, path, size=size, checksum=checksum)
            self.store.verify(name, size=size, checksum=checksum)
            sha256 = _sha256_of(self._disk, path) if is_signed else ""
            objects[file] = StoredObject(name, size, checksum, sha256)
            pause(size)
        return objects

    def _files_of(self, folder: str) -> list[str]:
        """Return the paths of a shard's log and snapshots."""
        parts = (f"{folder}/wal", f"{folder}/snapshot")
        return [f"{part}/{file}" for part in parts for file in self._disk.listdir(part)]

    def _put(self, name: str, buffers: Iterable[Buffer], sha256: hashlib._Hash | None = None) -> None:
        digest = xxh3_64()
        size = 0
        for buffer in buffers:
            digest.update(buffer)
            size += len(buffer)
            if sha256 is not None:
                sha256.update(buffer)
        self.store.put(name, buffers, size=size, checksum=digest.intdigest())
        self.store.verify(name, size=size, checksum=digest.intdigest())

    # -- pruning

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` backups, and objects that no backup needs. Returns the removed
        ids.

        Manifests are removed first; the next call removes the objects that a failed call leaves."""
        assert keep > 0
        ids = self.ids()
        dropped_ids, retained_ids = ids[:-keep], ids[-keep:]
        needed_names: set[str] = set()
        for id in retained_ids:
            for shard in self.load(id).shards:
                needed_names.update(self._root + segment.object for segment in shard.segments)
                needed_names.update(stored_object.name for stored_object in shard.files.values())
        for id in dropped_ids:
            self.store.delete(self._manifest(id))
        for name in list(self.store.names(self._root + MANIFESTS)):
            if name.endswith(".sig") and name not in map(self._signature, retained_ids):
                self.store.delete(name)
        for prefix in (SHARDS, SEGMENTS):
            for name in list(self.store.names(self._root + prefix)):
                if name not in needed_names:
                    self.store.delete(name)
        return dropped_ids

    # -- fetching

    def fetch(self, stored_object: StoredObject, path: str, pause: Pause) -> None:
        """Copy an object into a local file, and verify it. It is durable with its folder."""
        handle = self._disk.create(path)
        try:
            for offset in range(0, stored_object.size, _READ_BYTES):
                piece = self.store.read(
                    stored_object.name, offset, min(_READ_BYTES, stored_object.size - offset)
                )
                self._disk.pwritev(handle, [piece], offset)
                pause(len(piece))
            self._disk.fsync(handle)
        finally:
            self._disk.close(handle)
        if measure(self._disk, path) != (stored_object.size, stored_object.checksum):
            raise Corrupt(stored_object.name, 0, "the object does not match the checksum in the backup")
        check_sha256(self._disk, path, stored_object.name, stored_object.sha256)

    def source(self, segment: StoredSegment) -> Source:
        """Return a source for a segment, under its original name."""
        return _SegmentObject(self.store, segment, self._root + segment.object)


class _VerifiedSegment:
    """The bytes of a segment. Each iteration verifies them again."""

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


def check_sha256(disk: DiskLike, path: str, object: str, sha256: str) -> None:
    """Raise `Corrupt` if a file does not match the SHA-256 of its object in a signed backup."""
    if sha256 and _sha256_of(disk, path) != sha256:
        raise Corrupt(object, 0, "the object does not match the SHA-256 in the backup")


def _sha256_of(disk: DiskLike, path: str) -> str:
    digest = hashlib.sha256()
    for piece in read_chunks(disk, path, _READ_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _without_sha256(segment: StoredSegment) -> StoredSegment:
    return msgspec.structs.replace(segment, sha256="") if segment.sha256 else segment


def _with_sha256(segment: StoredSegment, sha256: hashlib._Hash | None) -> StoredSegment:
    return segment if sha256 is None else msgspec.structs.replace(segment, sha256=sha256.hexdigest())


def _state_of(disk: DiskLike, folder: str) -> ShardState:
    snapshot = Snapshots(disk, f"{folder}/snapshot").load_newest()
    assert snapshot is not None, "an export has a snapshot"
    return frames.decode_state(snapshot.content)
