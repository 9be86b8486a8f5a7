"""Defines the manifest of a backup, and the names of its objects. Pure.

    backups/<id>.json                     the manifest; written last: without it there is no backup
    backups/<id>.sig                      its ed25519 signature, if it was taken with a key
    backup-shards/<id>/shard-00/wal/…     the folder of each shard, as `shard_folders.py` builds it, without
    backup-shards/<id>/shard-00/snapshot/…        segments
    backup-segments/7/<first seq>-<serial>-<digest>.seg   shared by all backups that need it

An id is the time in UTC and four random digits: `20261116T163512042Z-9f3a`. Ids sort by time.

Rules of the file
- `decode` accepts only manifests that this server could have written: their names become paths.
- A signed manifest has the SHA-256 of every object. xxh3_64 detects damage, not forgery.
"""

from __future__ import annotations

import re
import secrets
import time

import msgspec
from xxhash import xxh3_64_hexdigest

from shard.storage.files import Corrupt
from shard.storage.segments.store import Name
from streams.protocol.model.slots import SLOTS

#: Formats of a manifest without and with SHA-256s.
FORMAT, FORMAT_SIGNED = 1, 2

ID = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{4}|[0-9]{20}")
_FILE = re.compile(r"wal/[0-9]{12}\.wal|snapshot/[0-9]{20}\.snap")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARDS_MAX = 256

MANIFESTS, SHARDS, SEGMENTS = "backups/", "backup-shards/", "backup-segments/"


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """An object: its name in the target, its size and its checksums."""

    name: str
    size: int
    checksum: int
    #: Empty in a backup that is not signed.
    sha256: str = ""


class StoredSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment in a backup."""

    generation: int
    first_seq: int
    serial: int
    size: int
    digest: int
    #: Empty in a backup that is not signed.
    sha256: str = ""

    @property
    def name(self) -> Name:
        return Name(self.generation, self.first_seq, self.serial)

    @property
    def object(self) -> str:
        """The name of the object, below the root of the target."""
        stem = self.name.file.removesuffix(".seg")
        return f"{SEGMENTS}{stem}-{self.digest:016x}.seg"


class BackupShard(msgspec.Struct, frozen=True):
    """One shard of a backup."""

    lsn: int
    boxes: int
    #: By path in the shard's folder.
    files: dict[str, StoredObject]
    segments: list[StoredSegment]


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a backup."""

    format: int = FORMAT
    id: str
    taken_ms: int
    #: The placement when it was taken, as in the manifest of a data directory.
    slots: list[tuple[int, int, int]]
    shards: list[BackupShard]

    @property
    def boxes(self) -> int:
        return sum(shard.boxes for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes of all its objects, shared ones included."""
        files = sum(stored_object.size for shard in self.shards for stored_object in shard.files.values())
        return files + sum(segment.size for shard in self.shards for segment in shard.segments)

    def encode(self) -> bytes:
        """Return one line of JSON and one line with its checksum."""
        line = msgspec.json.encode(self)
        return line + b"\n" + xxh3_64_hexdigest(line).encode() + b"\n"


def decode(content: bytes, *, name: str, id: str, root: str) -> Backup:
    """Decode the manifest in the object `name`. Raises `Corrupt` if this server could not have written it."""
    line, _, rest = content.partition(b"\n")
    if rest != xxh3_64_hexdigest(line).encode() + b"\n":
        raise Corrupt(name, 0, "the manifest does not match its checksum")
    try:
        _check_format(msgspec.json.decode(line, type=_AnyFormat).format)
        backup = msgspec.json.decode(line, type=Backup)
        _check(backup, id, root)
    except ValueError as error:
        raise Corrupt(name, 0, str(error)) from None
    return backup


def new_id(taken_ms: int) -> str:
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(taken_ms // 1000))
    return f"{moment}{taken_ms % 1000:03d}Z-{secrets.token_hex(2)}"


def object_of(root: str, id: str, number: int, path: str) -> str:
    """Return the name of the object that holds a file of a shard's folder."""
    return f"{root}{SHARDS}{id}/shard-{number:02d}/{path}"


class _AnyFormat(msgspec.Struct):
    format: int


def _check_format(format: int) -> None:
    if format not in (FORMAT, FORMAT_SIGNED):
        raise ValueError(f"the backup is of format {format}; this server reads {FORMAT} and {FORMAT_SIGNED}")


def _check(backup: Backup, id: str, root: str) -> None:
    """Raise `ValueError` if this server could not have written the manifest.

    Its names become paths in the data directory, so this is a closed grammar and not a search for `..`.
    """
    if backup.id != id or not ID.fullmatch(id):
        raise ValueError(f"it says that it is the backup {backup.id!r}")
    if not 1 <= len(backup.shards) <= _SHARDS_MAX:
        raise ValueError(f"it has {len(backup.shards)} shards")
    # A base of a chain holds one shard, and the placement of all.
    _check_slots(backup.slots, shards=_SHARDS_MAX if root else len(backup.shards))
    for number, shard in enumerate(backup.shards):
        for path, stored_object in shard.files.items():
            if not _FILE.fullmatch(path):
                raise ValueError(f"{path!r} is not the name of a file in a backup")
            if stored_object.name != object_of(root, id, number, path):
                raise ValueError(f"{stored_object.name!r} is not the object of {path} of shard {number}")
            _check_numbers(stored_object.size, stored_object.checksum)
            _check_sha256(backup.format, stored_object.sha256)
        for segment in shard.segments:
            _check_numbers(
                segment.generation, segment.first_seq, segment.serial, segment.size, segment.digest
            )
            _check_sha256(backup.format, segment.sha256)


def _check_numbers(*numbers: int) -> None:
    if not all(0 <= number < 1 << 64 for number in numbers):
        raise ValueError(f"{min(numbers)} or {max(numbers)} is no size, seq or checksum")


def _check_sha256(format: int, text: str) -> None:
    is_right = _SHA256.fullmatch(text) is not None if format == FORMAT_SIGNED else not text
    if not is_right:
        raise ValueError(f"{text[:80]!r} is not a SHA-256 in a backup of format {format}")


def _check_slots(runs: list[tuple[int, int, int]], *, shards: int) -> None:
    """Check that each slot has one owner."""
    after = 0
    for start, end, shard in runs:
        if start != after or not start < end <= SLOTS or not 0 <= shard < shards:
            raise ValueError(f"the slots {start} to {end} of shard {shard} do not follow slot {after}")
        after = end
    if after != SLOTS:
        raise ValueError(f"{after} of {SLOTS} slots have an owner")
