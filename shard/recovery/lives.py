"""Tells whether the page cache has survived since the last life of a shard.

A record of a `disk` box is acknowledged when it is in the page cache. It is there in the next life if only
the process died. It may be gone if the page cache went: with a restart of the operating system, with a file
system that was mounted anew, or after a write or a sync that failed. Then the shard skips the seqs that it
had reserved, as after a power cut (`Machine.start`).

    life_of(folder)         names the page cache: boot id · device · mount of the file system
    failed (a file)         the last life ended because a write or a sync failed; the next one removes it

The mount is named by the inode of `/sys/fs/<type>/<device>`, which the kernel makes anew for each mount, and
which bind mounts and containers share. The number of a mount (`/proc/self/mountinfo`) is neither: it is
given again as soon as it is free, and each container has another. So it is used only for file systems that
are not in `/sys/fs`, and then the unique one, if the kernel has it (6.8).
"""

from __future__ import annotations

import os
import struct
import uuid
from typing import Final

from shard.storage.files import DiskLike

#: The file in a shard's folder.
FAILED: Final = "failed"

#: Types of file systems that have a folder for each device in `/sys/fs`.
_TYPES: Final = ("ext4", "xfs", "f2fs")

#: `statx`: what to ask for, and where the answer has it.
_AT_FDCWD: Final = -100
_STATX_MNT_ID, _STATX_MNT_ID_UNIQUE = 0x1000, 0x4000
_STATX_BYTES, _MASK_AT, _MNT_ID_AT = 256, 0, 144


def life_of(folder: str, *, system: str = "/sys") -> str:
    """Name the page cache that holds what is written to this folder now."""
    return f"{_boot_id()} {_file_system(folder, system)}"


def _boot_id() -> str:
    """Names this run of the operating system. Where it cannot be read, every start counts as a new one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"unknown-{uuid.uuid4()}"


def _file_system(folder: str, system: str) -> str:
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    name = os.path.basename(os.path.realpath(f"{system}/dev/block/{number}"))
    for kind in _TYPES:
        try:
            return f"{number} {kind}-{os.stat(f'{system}/fs/{kind}/{name}').st_ino}"
        except OSError:
            pass
    return f"{number} mount-{_mount_id(folder)}"


def _mount_id(folder: str) -> int:
    """The number of the mount; 0 where it cannot be had."""
    import ctypes  # takes a while, and few need it

    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    asked = _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE
    if statx(_AT_FDCWD, os.fsencode(folder), 0, asked, answer) != 0:
        return 0
    (known,) = struct.unpack_from("=I", answer, _MASK_AT)
    (number,) = struct.unpack_from("=Q", answer, _MNT_ID_AT)
    return int(number) if known & asked else 0


def note_failure(disk: DiskLike, folder: str) -> None:
    """Leave word that a write or a sync has failed. The disk may fail at this too: then only the supervisor
    knows, as long as it lives."""
    try:
        disk.close(disk.create(f"{folder}/{FAILED}"))
    except OSError:
        pass


def has_failed(disk: DiskLike, folder: str) -> bool:
    """Return True if the last life of the shard ended because a write or a sync failed."""
    return disk.exists(f"{folder}/{FAILED}")


def forget_cached(folder: str) -> None:
    """Have the files of a folder read from the disk. After a sync that failed the page cache may show bytes
    that are not on the disk and will not be written any more; recovery must not count on them."""
    if not hasattr(os, "posix_fadvise") or not os.path.isdir(folder):
        return
    for entry in os.scandir(folder):
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def clear_failure(disk: DiskLike, folder: str) -> None:
    """Called when the next life is durably begun."""
    if has_failed(disk, folder):
        disk.unlink(f"{folder}/{FAILED}")
