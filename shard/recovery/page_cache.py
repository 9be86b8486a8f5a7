"""Detects whether the page cache has survived since the previous run of a shard.

A record of a `disk` box is acknowledged when it is in the page cache. If only the process dies, the record is
still there when the shard starts again. It may be lost if the page cache is lost: after a restart of the
operating system, after the file system is mounted again, or after a write or an fsync has failed. Then the
shard skips the seqs that it had reserved, as after a power cut (`Machine.start`).

    page_cache_id(folder)   names the page cache: boot id · device · mount of the file system
    failed (a file)         the previous run ended because a write or an fsync failed; the next run removes it

The mount is named by the inode of `/sys/fs/<type>/<device>`. The kernel creates a new inode for each mount,
and bind mounts and containers share it. A mount id (`/proc/self/mountinfo`) has neither property: the kernel
reuses it as soon as it is free, and each container has another one. So the mount id is used only for file
systems that are not in `/sys/fs`, and then the unique one if the kernel has it (6.8).
"""

from __future__ import annotations

import os
import struct
import uuid
from typing import Final

from shard.storage.files import DiskLike

#: The failure marker: an empty file in the shard's folder.
FAILED: Final = "failed"

#: Types of file systems that have a folder for each device in `/sys/fs`.
_TYPES: Final = ("ext4", "xfs", "f2fs")

#: `statx`: the fields to request, and their offsets in the result.
_AT_FDCWD: Final = -100
_STATX_MNT_ID, _STATX_MNT_ID_UNIQUE = 0x1000, 0x4000
_STATX_BYTES, _MASK_AT, _MNT_ID_AT = 256, 0, 144


def page_cache_id(folder: str, *, system: str = "/sys") -> str:
    """Return an id of the page cache that holds writes to this folder now."""
    return f"{_boot_id()} {_file_system(folder, system)}"


def _boot_id() -> str:
    """Return the id of this boot of the operating system. If it cannot be read, every start counts as a
    boot."""
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
    """Return the mount id, or 0 if the system does not provide it."""
    import ctypes  # slow to import, and rarely needed

    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return 0
    result = ctypes.create_string_buffer(_STATX_BYTES)
    request_mask = _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE
    if statx(_AT_FDCWD, os.fsencode(folder), 0, request_mask, result) != 0:
        return 0
    (result_mask,) = struct.unpack_from("=I", result, _MASK_AT)
    (mount_id,) = struct.unpack_from("=Q", result, _MNT_ID_AT)
    return int(mount_id) if result_mask & request_mask else 0


def record_failure(disk: DiskLike, folder: str) -> None:
    """Create the failure marker: a write or an fsync has failed. If the disk refuses the marker too, only the
    supervisor remembers the failure, as long as it runs."""
    try:
        disk.close(disk.create(f"{folder}/{FAILED}"))
    except OSError:
        pass


def has_failed(disk: DiskLike, folder: str) -> bool:
    """Return True if the previous run of the shard ended because a write or an fsync failed."""
    return disk.exists(f"{folder}/{FAILED}")


def evict_page_cache(folder: str) -> None:
    """Evict the files of a folder from the page cache, so that they are read from the disk. After a failed
    fsync the page cache may show bytes that are not on the disk and never will be. Recovery must not use
    them."""
    if not hasattr(os, "posix_fadvise") or not os.path.isdir(folder):
        return
    for entry in os.scandir(folder):
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def clear_failure(disk: DiskLike, folder: str) -> None:
    """Remove the failure marker. Called when the start of the next run is durable."""
    if has_failed(disk, folder):
        disk.unlink(f"{folder}/{FAILED}")
