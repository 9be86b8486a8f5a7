"""Defines the disk calls of the shard's storage, and `Corrupt`, the error for damaged bytes.

Only this file uses `os` and `fcntl` in the shard's storage. Everything else takes a `DiskLike`, so that tests
can pass a disk that loses writes or fails (`tests/support/faultdisk.py`).

Rules of the file:
  1. An `OSError` is raised unchanged. The caller decides what a failed write means.
  2. No call makes data durable by itself. Data is durable after `fdatasync` or `fsync` of the file, a name
     (creation, rename, removal) after `fsync_dir` of its directory.
  3. Nothing is cached or retried; a short write is continued, which is not a retry.

Invariants:
  WHOLE_WRITE  `pwritev` returns only when it has written every byte.
  SHORT_READ   `pread` returns the requested bytes, or fewer at the end of a file; never more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

#: A run of bytes to write. A memoryview must be of bytes (format "B"), so that `len` is its size.
Buffer = bytes | bytearray | memoryview

#: Linux takes at most this many buffers in one `pwritev` (`getconf IOV_MAX`).
BUFFERS_PER_CALL = 1024

#: Linux moves at most 2 GiB less a page in one call; stay well under and loop.
READ_BYTES_PER_CALL = 1 << 30


#: Errors of a disk or file system that cannot read stored bytes: a bad sector, a failed checksum.
UNREADABLE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)

#: Errors of a file system that is full, or of a user whose quota is used up.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

#: A disk reads or loses at least this much at once.
PAGE_BYTES = 4096

#: A read of at least this size is most likely that of a reader that goes on behind it.
_SEQUENTIAL_BYTES = 512 << 10

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Corrupt(Exception):
    """Stored bytes are not what was written there."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        self.path = path
        self.offset = offset
        self.reason = reason
        super().__init__(
            f"{path} is damaged at byte {offset}: {reason}. Nothing was changed. Run `streams verify` to see "
            "how far the damage goes, then `streams repair` to keep the intact data, or restore a backup."
        )


class Space(NamedTuple):
    """Free and total bytes of a file system."""

    free_bytes: int
    total_bytes: int


class DiskLike(Protocol):
    """The disk calls that storage uses. A handle is an int that is valid only on the disk that returned
    it."""

    def open(self, path: str, *, writable: bool) -> int:
        """Open an existing file."""

    def create(self, path: str) -> int:
        """Open a file for reading and writing. Create it if it does not exist, truncate it if it does."""

    def lock(self, path: str) -> int:
        """Lock `path` exclusively until the handle is closed; `BlockingIOError` if another process holds
        it."""

    def close(self, handle: int) -> None: ...

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write the buffers one after the other from `offset` on; return the number of bytes."""

    def pread(self, handle: int, length: int, offset: int) -> bytes: ...

    def read_ahead(self, handle: int, length: int, offset: int) -> None:
        """Begin to load bytes that are read soon, without waiting for them. Only a hint."""

    def read_all(self, path: str) -> bytes: ...

    def truncate(self, handle: int, size: int) -> None: ...

    def allocate(self, handle: int, size: int) -> None:
        """Reserve space for the first `size` bytes of a file, so that writing them cannot run out of space.

        Unwritten bytes read as zeros. A copy-on-write file system guarantees less.
        """

    def fdatasync(self, handle: int) -> None:
        """Make a file's bytes and its size durable."""

    def fsync(self, handle: int) -> None: ...

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file within its directory, atomically, replacing any file with the new name."""

    def link(self, old: str, new: str) -> None:
        """Create a hard link in any directory of the same file system; `OSError` if it supports none."""

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None:
        """Create a directory unless it exists. Its parent must exist."""

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def is_dir(self, path: str) -> bool: ...

    def space(self, path: str) -> Space:
        """Return free and total bytes of the file system that holds `path`."""

    def free_bytes(self, path: str) -> int:
        """Return the bytes that can still be written to the file system of `path`."""


class Disk:
    """The real disk. It has no state; every method is a system call or a loop over one."""

    def __repr__(self) -> str:
        return "<Disk>"

    def open(self, path: str, *, writable: bool) -> int:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def create(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def lock(self, path: str) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle

    def close(self, handle: int) -> None:
        os.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        total = 0
        for first in range(0, len(buffers), BUFFERS_PER_CALL):
            run = buffers[first : first + BUFFERS_PER_CALL]
            run_bytes = sum(map(len, run))
            count = os.pwritev(handle, run, offset + total)
            if count < run_bytes:
                count += self._write_rest(handle, run, count, offset + total)
            assert count == run_bytes, "WHOLE_WRITE: the loop above ends only there or by raising"
            total += count
        return total

    def _write_rest(self, handle: int, buffers: Sequence[Buffer], skip: int, offset: int) -> int:
        """Write the remaining buffers of a short `pwritev`, one by one. This is rare, so it is simple."""
        total = 0
        start = offset
        for buffer in buffers:
            view = memoryview(buffer)[skip:]
            skip = max(0, skip - len(buffer))
            offset = start + len(buffer) - len(view)
            while view:
                count = os.pwrite(handle, view, offset)
                assert count > 0, "WHOLE_WRITE: a regular file takes at least a byte or raises"
                total += count
                offset += count
                view = view[count:]
            start += len(buffer)
        return total

    def pread(self, handle: int, length: int, offset: int) -> bytes:
        data = os.pread(handle, min(length, READ_BYTES_PER_CALL), offset)
        if len(data) == length:
            return data
        parts = []
        while data:
            parts.append(data)
            length -= len(data)
            offset += len(data)
            data = os.pread(handle, min(length, READ_BYTES_PER_CALL), offset) if length else b""
        assert length >= 0, "SHORT_READ"
        return b"".join(parts)

    def read_ahead(self, handle: int, length: int, offset: int) -> None:
        os.posix_fadvise(handle, offset, length, os.POSIX_FADV_WILLNEED)

    def read_all(self, path: str) -> bytes:
        handle = self.open(path, writable=False)
        try:
            return self.pread(handle, os.fstat(handle).st_size, 0)
        finally:
            os.close(handle)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def allocate(self, handle: int, size: int) -> None:
        os.posix_fallocate(handle, 0, size)

    def fdatasync(self, handle: int) -> None:
        os.fdatasync(handle)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def fsync_dir(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def space(self, path: str) -> Space:
        stats = os.statvfs(path)
        return Space(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)

    def free_bytes(self, path: str) -> int:
        return self.space(path).free_bytes


class ExaminedDisk(Disk):
    """A disk for tools that look for damage: unreadable bytes raise `Corrupt` with their position.

    A serving shard uses `Disk` and gets the `OSError`.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}

    def open(self, path: str, *, writable: bool) -> int:
        handle = super().open(path, writable=writable)
        self._paths[handle] = path
        return handle

    def create(self, path: str) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        return handle

    def pread(self, handle: int, length: int, offset: int) -> bytes:
        try:
            return super().pread(handle, length, offset)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            path = self._paths.get(handle, "a file")
            if length > PAGE_BYTES:  # find the first unreadable page
                for page in range(offset, offset + length, PAGE_BYTES):
                    self.pread(handle, min(PAGE_BYTES, offset + length - page), page)
            raise Corrupt(path, offset, f"the disk cannot read it ({error.strerror})") from error


class ConfinedDisk(Disk):
    """A disk that reaches one directory only, for files whose names come from untrusted files.

    Every path is opened folder by folder, relative to that directory, and no symbolic link is followed. So
    neither a name nor a link that an attacker plants leads out of it. `create` makes new files only.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._root_handle = os.open(root, _DIRECTORY)

    def __repr__(self) -> str:
        return f"<ConfinedDisk {self._root}>"

    def close_root(self) -> None:
        """Close the directory. Nothing can be opened afterwards."""
        os.close(self._root_handle)

    def open(self, path: str, *, writable: bool) -> int:
        flags = os.O_RDWR if writable else os.O_RDONLY
        with self._parent(path) as (parent, name):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)

    def create(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._parent(path) as (parent, name):
            return os.open(name, flags, 0o600, dir_fd=parent)

    def lock(self, path: str) -> int:
        raise NotImplementedError("a confined disk locks nothing")

    def fsync_dir(self, path: str) -> None:
        with self._directory(path) as handle:
            os.fsync(handle)

    def rename(self, old: str, new: str) -> None:
        with self._parent(old) as (old_parent, old_name), self._parent(new) as (parent, name):
            os.rename(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent)

    def link(self, old: str, new: str) -> None:
        with self._parent(old) as (old_parent, old_name), self._parent(new) as (parent, name):
            os.link(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def mkdir(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                os.close(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))

    def rmdir(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def listdir(self, path: str) -> list[str]:
        with self._directory(path) as handle:
            return sorted(os.listdir(handle))

    def exists(self, path: str) -> bool:
        return self._mode(path) != 0

    def is_dir(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def size(self, path: str) -> int:
        with self._parent(path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False).st_size

    def space(self, path: str) -> Space:
        stats = os.fstatvfs(self._root_handle)
        return Space(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)

    def _mode(self, path: str) -> int:
        try:
            with self._parent(path) as (parent, name):
                return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory that holds `path`; yield its handle and the last name."""
        *folders, name = self._parts(path) or ["."]
        with self._open_folder(folders) as handle:
            yield handle, name

    @contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        with self._open_folder(self._parts(path)) as handle:
            yield handle

    @contextmanager
    def _open_folder(self, folders: Sequence[str]) -> Iterator[int]:
        handle = os.dup(self._root_handle)
        try:
            for folder in folders:
                inner = os.open(folder, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    def _parts(self, path: str) -> list[str]:
        rest = path.removeprefix(self._root)
        parts = rest.split("/")[1:]
        if not path.startswith(self._root) or (rest and rest[0] != "/") or {"", ".", ".."} & set(parts):
            raise ValueError(f"{path!r} is not below {self._root}")
        return parts


def read_part(disk: DiskLike, handle: int, offset: int, length: int) -> bytes:
    """Read a part of an open file. Behind a large part the disk begins to load as much again.

    So the disk works while the part is decoded, sent and processed, and a reader that goes on finds its next
    bytes in the page cache. If they are there already, the hint costs 40 µs for a mebibyte.
    """
    content = disk.pread(handle, length, offset)
    if length >= _SEQUENTIAL_BYTES:
        disk.read_ahead(handle, length, offset + length)
    return content


def read_chunks(disk: DiskLike, path: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yield all bytes of a file, in chunks of one size except the last."""
    handle = disk.open(path, writable=False)
    try:
        offset = 0
        while chunk := disk.pread(handle, chunk_bytes, offset):
            yield chunk
            offset += len(chunk)
    finally:
        disk.close(handle)


def read_skipping_damage(disk: DiskLike, path: str) -> bytes:
    """Return all bytes of a file, with zeros in place of unreadable pages. Needs an `ExaminedDisk`."""
    try:
        return disk.read_all(path)
    except Corrupt:
        pass
    size = disk.size(path)
    parts: list[bytes] = []
    handle = disk.open(path, writable=False)
    try:
        for offset in range(0, size, PAGE_BYTES):
            length = min(PAGE_BYTES, size - offset)
            try:
                parts.append(disk.pread(handle, length, offset))
            except Corrupt:
                parts.append(bytes(length))
    finally:
        disk.close(handle)
    return b"".join(parts)


def remove_tree(disk: DiskLike, path: str) -> None:
    """Remove a directory with its content, if it exists. The removal is durable on return."""
    if not disk.exists(path):
        return
    for name in disk.listdir(path):
        inner = f"{path}/{name}"
        if disk.is_dir(inner):
            remove_tree(disk, inner)
        else:
            disk.unlink(inner)
    disk.rmdir(path)
    disk.fsync_dir(parent_of(path))


def parent_of(path: str) -> str:
    """Return the directory of a path."""
    return os.path.dirname(path) or "."
