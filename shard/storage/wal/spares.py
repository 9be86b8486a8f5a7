"""Spares: files that wait to become the next log file.

    wal/000000000003.spare    allocated, or an old file

A spare is made ahead of need, because a sync over blocks that exist is several times faster, and because a
full disk is then met when a file is made, before anything is in it. An old log file becomes a spare when it
has the right size. Its content needs no wiping: see SEED_IS_NUMBER (`format.py`).

    files thread     prepare, recycle ─► deque ─► take     writing thread

Bounds: at most `SPARES_MAX` spares.

Rules of the file:
  1. Two threads share the deque, and each of them changes it by single steps.
  2. What is half made is removed, and the error is the caller's.

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

#: Zeros are written and synced in steps of this size, so that a commit never queues behind a whole file.
ZEROS = bytes(4 << 20)

_SUFFIX = ".spare"


class Spares:
    def __init__(self, disk: DiskLike, directory: str, *, file_bytes: int, reserves: bool) -> None:
        """`reserves`: spares have all their room from the start, and one outlives the process."""
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
        """Drop the spares of the process before, all but one that is whole if this log `reserves`."""
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
        """Have a spare ready if none is: full of zeros, or with room for them alone. Without zeros its syncs
        are slower, but nothing is written twice."""
        if not self._ready:
            self._offer(self._create(zeros=zeros))

    def take(self) -> str:
        """The path of a spare. If none is ready, one without zeros is made: its syncs are slower, but nobody
        waits long."""
        try:
            return self._ready.popleft()
        except IndexError:
            return self._create(zeros=False)

    def recycle(self, path: str) -> None:
        """Make a spare of an old log file, or drop it. Its old name is durably gone on return.

        A file that began empty ends a little short of the full size, and is as good as a full one, unless
        there must be room for all that a file can take.
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
            # Most likely the disk is full. What is half done goes; the caller says what to do without it.
            self._disk.unlink(path)
            raise
        finally:
            self._disk.close(handle)
        return path

    def _next_path(self) -> str:
        return f"{self._directory}/{next(self._numbers):012d}{_SUFFIX}"
