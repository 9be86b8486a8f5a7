"""Manages spares: files that wait to become the next log file.

    wal/000000000003.spare    allocated, or an old file

A spare is created ahead of need, for two reasons: a sync over allocated blocks is several times faster, and
a full disk is noticed when a file is created, before anything is in it. An old log file of the right size
becomes a spare. Its content needs no wiping: see SEED_IS_NUMBER (`format.py`).

    files thread     prepare, recycle ─► deque ─► take     writing thread

Bounds: at most `SPARES_MAX` spares.

Rules of the file:
  1. Two threads share the deque, and each of them changes it by single steps.
  2. A half-made spare is removed, and the error is raised to the caller.

Invariants:
  SPARES_BOUNDED  there are at most `SPARES_MAX` spares.
  SPARE_WHOLE     a log that `reserves` has room for a whole file in each of its spares.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from shard.storage.files import DiskLike

#: One spare to rotate into while the next is being made.
SPARES_MAX = 2

#: Zeros are written and synced in steps of this size, so that a commit never waits for a whole file.
ZEROS = bytes(4 << 20)

_SUFFIX = ".spare"


class Spares:
    """The spare files of one log."""

    def __init__(self, disk: DiskLike, directory: str, *, file_bytes: int, reserves: bool) -> None:
        """`reserves`: spares are allocated in full, and one outlives the process."""
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._reserves = reserves
        self._ready: deque[str] = deque()
        self._numbers = count(1)

    def __repr__(self) -> str:
        return f"<Spares {self._directory}: {len(self._ready)} ready>"

    def __len__(self) -> int:
        return len(self._ready)

    def settle(self) -> None:
        """Drop the spares of the previous process, except one complete spare if this log `reserves`."""
        assert not self._ready, "SPARES_BOUNDED: a log is settled once, before anything is prepared"
        for name in self._disk.listdir(self._directory):
            if not name.endswith(_SUFFIX):
                continue
            path = f"{self._directory}/{name}"
            if self._reserves and not self._ready and self._disk.size(path) == self._file_bytes:
                self._numbers = count(int(name.partition(".")[0]) + 1)
                self._offer(path)
            else:
                self._disk.unlink(path)

    def prepare(self, *, zeros: bool) -> None:
        """Create a spare if none is ready: filled with zeros, or only allocated.

        Without zeros its syncs are slower, but nothing is written twice.
        """
        if not self._ready:
            self._offer(self._create(zeros=zeros))

    def take(self) -> str:
        """Return the path of a spare. If none is ready, create one without zeros: slower syncs, but a short
        wait."""
        try:
            return self._ready.popleft()
        except IndexError:
            return self._create(zeros=False)

    def recycle(self, path: str) -> None:
        """Turn an old log file into a spare, or delete it. Its old name is durably gone on return.

        A file that began empty ends a little short of the full size. It is as good as a full one, unless the
        log `reserves` the full size.
        """
        size_min = self._file_bytes if self._reserves else self._file_bytes // 2
        spare = ""
        if len(self._ready) < SPARES_MAX and size_min <= self._disk.size(path) <= self._file_bytes:
            spare = self._next_path()
            self._disk.rename(path, spare)
        else:
            self._disk.unlink(path)
        self._disk.fsync_dir(self._directory)
        if spare:
            self._offer(spare)

    def _offer(self, path: str) -> None:
        assert len(self._ready) < SPARES_MAX, "SPARES_BOUNDED"
        assert not self._reserves or self._disk.size(path) >= self._file_bytes, "SPARE_WHOLE"
        self._ready.append(path)

    def _create(self, *, zeros: bool) -> str:
        path = self._next_path()
        size = self._file_bytes if zeros else 0
        handle = self._disk.create(path)
        try:
            if self._reserves and not zeros:
                self._disk.allocate(handle, self._file_bytes)
            for offset in range(0, size, len(ZEROS)):
                self._disk.pwritev(handle, [memoryview(ZEROS)[: size - offset]], offset)
                self._disk.fdatasync(handle)
            self._disk.fsync(handle)
        except OSError:
            # Most likely the disk is full. Remove the half-made file; the caller decides how to go on.
            self._disk.unlink(path)
            raise
        finally:
            self._disk.close(handle)
        return path

    def _next_path(self) -> str:
        return f"{self._directory}/{next(self._numbers):012d}{_SUFFIX}"
