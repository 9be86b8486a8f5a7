"""Names and encodes the objects that hold the changes of object boxes in the object store. Pure.

    object/00000003-002-1700000000000/                    a chain: its number, its shard, its server
        log/<first lsn>-<last lsn>-<life>.frames          changes, one object for each group
        backups/<lsn>.json, backup-shards/…, backup-segments/…    bases: `transfer/backup_manifest.py`

An object is a header and frames, one after the other:

    header    magic `streams\\x4f` (8) · version u32 · frames u32 · life u64 · previous lsn u64 ·
              last lsn u64 · length of the frames u64 · xxh3_64 of the frames · xxh3_64 of the header
    frame     length u32 · kind u8 · version u8 · 0 u16 · lsn u64 · content, as in the log (`frames.py`)

Checksums are seeded with the object's name, so that an object under another name does not verify. `previous`
is the last lsn of the object before it, or of the base. The object holds every change of object boxes
between the two.

Invariants
- BEHIND_PREVIOUS: an object ends at a higher lsn than the one before it.
- WITHIN_NAME: the lsns of an object's changes are above `previous` and at most its last lsn.
- FRAME_COUNT: an object holds as many frames as its header says.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from shard.core.changes import Change
from shard.storage import frames
from shard.storage.files import Corrupt

ROOT = "object/"
VERSION = 1

_MAGIC = b"streams\x4f"
_HEADER = struct.Struct("<8sIIQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IBBHQ")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_CHAIN = re.compile(r"([0-9]{8})-([0-9]{3})-([0-9]+)")
_LOG = re.compile(r"log/([0-9]{20})-([0-9]{20})-([0-9]{20})\.frames")
_BASE = re.compile(r"backups/([0-9]{20})\.json")


class ChainName(NamedTuple):
    number: int
    shard: int
    server: str

    @property
    def text(self) -> str:
        return f"{self.number:08d}-{self.shard:03d}-{self.server}"

    @property
    def root(self) -> str:
        return f"{ROOT}{self.text}/"

    @classmethod
    def parse(cls, text: str) -> ChainName | None:
        match = _CHAIN.fullmatch(text)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


class LogName(NamedTuple):
    """The name of an object with changes. Names sort in the order of their changes."""

    first_lsn: int
    last_lsn: int
    life: int

    @property
    def text(self) -> str:
        return f"log/{self.first_lsn:020d}-{self.last_lsn:020d}-{self.life:020d}.frames"

    @classmethod
    def parse(cls, text: str) -> LogName | None:
        match = _LOG.fullmatch(text)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None


def base_id(lsn: int) -> str:
    return f"{lsn:020d}"


def base_lsn(text: str) -> int | None:
    """Return the lsn of a base from a name below a chain; None if it is not the name of a base."""
    match = _BASE.fullmatch(text)
    return int(match[1]) if match else None


class ObjectLog(NamedTuple):
    """The content of one object."""

    previous_lsn: int
    last_lsn: int
    changes: list[tuple[int, Change]]


def encode(
    name: str, changes: Sequence[tuple[int, Change]], *, previous_lsn: int, last_lsn: int, life: int
) -> bytes:
    assert previous_lsn < last_lsn, "BEHIND_PREVIOUS"
    assert not changes or previous_lsn < changes[0][0] <= changes[-1][0] <= last_lsn, "WITHIN_NAME"
    parts: list[bytes] = []
    for lsn, change in changes:
        kind, version, _, content = frames.encode(lsn, change)
        parts.append(_FRAME.pack(sum(map(len, content)), kind, version, 0, lsn))
        parts += content
    body = b"".join(parts)
    seed = xxh3_64_intdigest(name.encode())
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        len(changes),
        life,
        previous_lsn,
        last_lsn,
        len(body),
        xxh3_64_intdigest(body, seed=seed),
    )
    return header + _CHECKSUM.pack(xxh3_64_intdigest(header, seed=seed)) + body


def decode(name: str, content: bytes) -> ObjectLog:
    """Decode an object. Raises `Corrupt` unless every bit is as it was stored under this name."""
    seed = xxh3_64_intdigest(name.encode())
    header = content[: _HEADER.size]
    if len(content) < _HEADER_BYTES or content[_HEADER.size : _HEADER_BYTES] != _CHECKSUM.pack(
        xxh3_64_intdigest(header, seed=seed)
    ):
        raise Corrupt(name, 0, "the header of the object does not match its checksum")
    magic, version, count, _, previous_lsn, last_lsn, length, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION:
        raise Corrupt(name, 0, f"the object is of version {version}, this server reads {VERSION}")
    body = memoryview(content)[_HEADER_BYTES:]
    if len(body) != length or xxh3_64_intdigest(body, seed=seed) != checksum:
        raise Corrupt(name, _HEADER_BYTES, "the object does not match its checksum")
    changes: list[tuple[int, Change]] = []
    at = 0
    while at < length:
        size, kind, frame_version, _, lsn = _FRAME.unpack_from(body, at)
        at += _FRAME.size
        try:
            changes.append((lsn, frames.decode(kind, frame_version, body[at : at + size])))
        except frames.UnknownFrame as error:
            raise Corrupt(name, _HEADER_BYTES + at, str(error)) from None
        at += size
    assert len(changes) == count, "FRAME_COUNT: the checksum is right"
    return ObjectLog(previous_lsn, last_lsn, changes)
