"""A disk that a test can fill and empty again: a small one of its own, or a part of the one that is there.

Root mounts a file system in memory of a few MiB. Where that is not allowed, the watermarks of the server are
put so far below what is free now that a file of some hundred MiB, which takes no time to allocate, reaches
them.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
#: The watermarks of a server on it.
LOW_MIB, FULL_MIB = 12, 4


@dataclass
class SmallDisk:
    path: Path
    #: Settings of a server on it.
    settings: dict[str, object]
    #: Whether it can be filled to the last byte.
    is_own: bool
    #: What is free beyond what the test may take, and what each MiB of the watermarks stands for.
    _margin: int
    _scale: int
    _filled: list[Path] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill_below_low(self) -> None:
        self._fill(leaving=(LOW_MIB + FULL_MIB) // 2)

    def fill_below_full(self) -> None:
        self._fill(leaving=FULL_MIB // 2)

    def fill_whole(self) -> None:
        """To the last byte, if it is a disk of its own."""
        self._fill(leaving=0 if self.is_own else FULL_MIB // 2)

    def _fill(self, *, leaving: int) -> None:
        """Take space until so many MiB, as the watermarks count them, are left."""
        path = self.path / f"filler-{len(self._filled)}"
        self._filled.append(path)
        size = 0
        with open(path, "wb") as file:
            while (free := self.free_bytes - self._margin - leaving * self._scale * MIB) > 0:
                try:
                    os.posix_fallocate(file.fileno(), size, free)
                    size += free
                except OSError as error:  # others take space too, and may have been quicker
                    assert error.errno == errno.ENOSPC

    def empty(self) -> None:
        """Give back all that was taken."""
        for path in self._filled:
            path.unlink()
        self._filled.clear()


@contextmanager
def small_disk(folder: Path, *, mebibytes: int = 64) -> Iterator[SmallDisk]:
    folder.mkdir()
    low, full = LOW_MIB * MIB, FULL_MIB * MIB
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0:
        try:
            yield SmallDisk(folder, {"disk_low_bytes": low, "disk_full_bytes": full}, True, 0, 1)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
        return
    # Others use this disk too, so everything is a hundred times as large.
    scale = 100
    found = os.statvfs(folder)
    margin = found.f_bavail * found.f_frsize - mebibytes * scale * MIB
    assert margin > 0, "the disk is too small for this test"
    settings = {"disk_low_bytes": margin + low * scale, "disk_full_bytes": margin + full * scale}
    disk = SmallDisk(folder, settings, False, margin, scale)
    try:
        yield disk
    finally:
        disk.empty()
