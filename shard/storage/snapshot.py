"""Stores snapshots: the state up to an lsn as one file, complete or absent.

    snapshot/00000000000000001234.snap     the state after lsn 1234; the newest two are retained
    snapshot/00000000000000001300.tmp      being written, or left by a crash

    0         8         12        16        24          32                40               48
    | magic   | version | 0       | lsn     | length    | xxh3_64 content | xxh3_64 header | content …

Integers are little-endian and the content is opaque. Both checksums are seeded with the lsn; the
header's covers the 40 bytes before it.

Rules of the file:
  1. A snapshot appears by rename, after its bytes are durable. So a bad snapshot is damage, never a crash.
  2. An older snapshot is removed only after a newer one is durable under its name.
  3. A damaged snapshot never counts as one of the two that are retained.

Invariants:
  TWO_KEPT      while the newest snapshot is being read or replaced, the one before it is untouched. It is
                usable only with the log after it: release log files by the *oldest* lsn in `list_lsns()`.
  WRITTEN_WHOLE a snapshot gets its name only when its header and all of its content are in the file.
  HEADER_BYTES  the header has the size that the layout gives it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, DiskLike, parent_of

FORMAT_VERSION = 1
KEPT_MAX = 2
#: Bytes per write and sync, so that a commit of the log never waits for a whole snapshot.
STEP_BYTES = 1 << 20

_MAGIC = b"streams\x53"
_HEAD = struct.Struct("<8sIIQQQ")
_U64 = struct.Struct("<Q")
_HEADER_BYTES = _HEAD.size + _U64.size

assert _HEADER_BYTES == 48, "HEADER_BYTES"


class LoadedSnapshot(NamedTuple):
    """A snapshot that verified, and the paths of newer snapshots that are damaged."""

    lsn: int
    content: memoryview
    damaged_paths: list[str]


class Snapshots:
    """The snapshot files of a shard."""

    def __init__(self, disk: DiskLike, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._damaged_lsns: set[int] = set()

    def __repr__(self) -> str:
        return f"<Snapshots {self._directory}: {len(self._damaged_lsns)} damaged>"

    def list_lsns(self) -> list[int]:
        """Return the lsns of the snapshots that are not known to be damaged, oldest first."""
        return [lsn for lsn in self._lsns() if lsn not in self._damaged_lsns]

    def load_newest(self) -> LoadedSnapshot | None:
        """Load the newest snapshot that verifies; None if there is none. Raises `Corrupt` if all are
        damaged."""
        lsns = self._lsns()
        damaged_paths: list[str] = []
        first: Corrupt | None = None
        for lsn in reversed(lsns):
            path = self._path(lsn)
            try:
                return LoadedSnapshot(lsn, _content(path, self._disk.read_all(path), lsn), damaged_paths)
            except Corrupt as damage:
                self._damaged_lsns.add(lsn)
                damaged_paths.append(path)
                first = first or damage
        if first is None:
            return None
        raise Corrupt(first.path, first.offset, f"{first.reason}, and no older snapshot is valid")

    def load(self, lsn: int) -> memoryview:
        """Return the content of one snapshot. Raises `Corrupt`."""
        path = self._path(lsn)
        return _content(path, self._disk.read_all(path), lsn)

    def write(self, lsn: int, parts: Sequence[Buffer]) -> None:
        """Make a snapshot durable, then drop all but the newest two. `lsn` must be durable in the log."""
        disk = self._disk
        disk.mkdir(self._directory)
        disk.fsync_dir(parent_of(self._directory))
        temporary = f"{self._directory}/{lsn:020d}.tmp"
        handle = disk.create(temporary)
        try:
            offset = 0
            for step in _steps([_header(lsn, parts), *parts]):
                if offset:
                    disk.fdatasync(handle)
                offset += disk.pwritev(handle, step, offset)
            disk.fsync(handle)
            assert offset == _HEADER_BYTES + sum(map(len, parts)), "WRITTEN_WHOLE"
        finally:
            disk.close(handle)
        disk.rename(temporary, self._path(lsn))
        disk.fsync_dir(self._directory)
        self._damaged_lsns.discard(lsn)
        self._drop_old()
        assert len(self.list_lsns()) <= KEPT_MAX, "TWO_KEPT"

    def _drop_old(self) -> None:
        """Remove old, damaged and half-written files. If a crash brings one back, the next call removes
        it."""
        keep = {f"{lsn:020d}.snap" for lsn in self.list_lsns()[-KEPT_MAX:]}
        for name in self._disk.listdir(self._directory):
            if name not in keep and name.endswith((".snap", ".tmp")):
                self._disk.unlink(f"{self._directory}/{name}")
        self._damaged_lsns.clear()

    def _lsns(self) -> list[int]:
        if not self._disk.exists(self._directory):
            return []
        names = self._disk.listdir(self._directory)
        return sorted(int(name[:-5]) for name in names if name.endswith(".snap") and name[:-5].isdigit())

    def _path(self, lsn: int) -> str:
        return f"{self._directory}/{lsn:020d}.snap"


def _steps(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Yield runs of buffers, each of `STEP_BYTES` or a little more except the last."""
    step: list[Buffer] = []
    size = 0
    for buffer in buffers:
        step.append(buffer)
        size += len(buffer)
        if size >= STEP_BYTES:
            yield step
            step, size = [], 0
    if step:
        yield step


def _header(lsn: int, parts: Sequence[Buffer]) -> bytes:
    checksum = xxh3_64(seed=lsn)
    for part in parts:
        checksum.update(part)
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, lsn, sum(map(len, parts)), checksum.intdigest())
    return head + _U64.pack(xxh3_64_intdigest(head, lsn))


def _content(path: str, data: bytes, lsn: int) -> memoryview:
    head = data[: _HEAD.size]
    if len(data) < _HEADER_BYTES or xxh3_64_intdigest(head, lsn) != _U64.unpack_from(data, len(head))[0]:
        raise Corrupt(path, 0, "the snapshot's header is not valid")
    magic, version, _, header_lsn, length, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or header_lsn != lsn:
        raise Corrupt(path, 0, f"the header is that of a snapshot of lsn {header_lsn}")
    if version != FORMAT_VERSION:
        raise Corrupt(path, 0, f"the snapshot is of format {version}, this server reads {FORMAT_VERSION}")
    content = memoryview(data)[_HEADER_BYTES:]
    if len(content) != length:
        raise Corrupt(path, _HEADER_BYTES, f"the content is {len(content)} bytes long, not {length}")
    if xxh3_64_intdigest(content, lsn) != checksum:
        raise Corrupt(path, _HEADER_BYTES, "the content does not match its checksum")
    return content
