"""A disk in memory that keeps only the promises a disk has to keep, and can fail or stop at any operation.

What is written and what is durable are two things, for each file and for each directory:

    pwritev, truncate     change the file as it is read; durable after `fdatasync` or `fsync` of that file
    create, rename, ...   change the names as they are seen; durable after `fsync_dir` of their directory
    crash(rng)            the power fails: every change that is not durable is kept, lost or torn, by chance
    kill()                the process dies: everything stays as it is read, and no more durable than it was
    image()               all of this as bytes: where they are equal, nobody could tell two disks apart

Every operation has a number, from 0. `crash_at` stops the disk before, midway through or after one of them:
the operation raises `Crashed`, and so does every later one but `close`. `watch` shows the disk at all these
moments in one run, instead of stopping it. `fail_at` makes one raise an `OSError`; a failed write may have
written a part, and what a failed sync did not write is not written by a later one either, as on Linux.

Faults that are modelled: lost writes, writes out of order, writes cut at any byte, writes of which any
512-byte sectors are missing, names lost in order or out of it. Not modelled: bits that change by themselves
(`flip` does that on request), and damage to sectors that were not being written.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from shard.storage.files import Buffer, Space

SECTOR_BYTES = 512
MOMENTS = ("before", "midway", "after")

#: Whether sweeps look at everything.
IS_FULL = os.environ.get("STREAMS_SWEEP") == "full"

T = TypeVar("T")


class Crashed(BaseException):
    """The disk is gone. Not an Exception, so that nothing under test can handle it by chance."""


def sweep(points: Iterable[T], *, seed: int, sample: int) -> list[T]:
    """All points if STREAMS_SWEEP=full, else `sample` of them. Prints what is needed to run it again."""
    everything = list(points)
    count = len(everything) if IS_FULL else min(sample, len(everything))
    print(f"sweep: seed {seed}, {count} of {len(everything)} points")
    return everything if IS_FULL else random.Random(seed).sample(everything, count)


class _Change:
    """A write (`data` at `offset`) or a truncation (`data` is None, `offset` is the size)."""

    __slots__ = ("data", "dropped", "offset")

    def __init__(self, offset: int, data: bytes | None) -> None:
        self.offset = offset
        self.data = data
        self.dropped = False

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
        else:
            _place(content, self.offset, self.data)

    def apply_some(self, content: bytearray, rng: random.Random) -> None:
        """Apply what a power failure left of this change."""
        fate = rng.choice(("kept", "lost", "cut", "sectors"))
        if fate == "lost":
            return
        if fate == "kept" or self.data is None:
            self.apply(content)
        elif fate == "cut":
            _place(content, self.offset, self.data[: rng.randrange(len(self.data) + 1)])
        else:
            for start in range(self.offset - self.offset % SECTOR_BYTES, self._end, SECTOR_BYTES):
                if rng.random() < 0.5:
                    first = max(start, self.offset)
                    piece = self.data[first - self.offset : start + SECTOR_BYTES - self.offset]
                    _place(content, first, piece)

    @property
    def _end(self) -> int:
        return self.offset + len(self.data or b"")


def _place(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


class _Inode:
    __slots__ = ("content", "durable", "pending")

    def __init__(self, content: Buffer = b"", durable: Buffer = b"") -> None:
        self.content = bytearray(content)
        self.durable = bytearray(durable)
        self.pending: list[_Change] = []

    def change(self, change: _Change) -> None:
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            if not change.dropped:
                change.apply(self.durable)
        self.pending = [change for change in self.pending if change.dropped]

    def fail_sync(self) -> None:
        for change in self.pending:
            change.dropped = True

    def after_crash(self, rng: random.Random) -> _Inode:
        content = bytearray(self.durable)
        # Some disks write in order and only stop somewhere; those show what the worst ones would hide.
        in_order = rng.randrange(len(self.pending) + 1) if rng.random() < 0.5 else 0
        for change in self.pending[:in_order]:
            change.apply(content)
        if rng.random() < 0.75:
            for change in self.pending[in_order:]:
                change.apply_some(content, rng)
        return _Inode(content, content)

    def after_kill(self) -> _Inode:
        twin = _Inode(self.content, self.durable)
        twin.pending = list(self.pending)
        return twin


#: (old name or None, new name or None, file or None for a directory): one change of a directory.
_NameChange = tuple[str | None, str | None, _Inode | None]


class FaultDisk:
    def __init__(self, *roots: str) -> None:
        """`roots` are directories that are there; "/data" unless others are given."""
        self.operations = 0
        self.history: list[str] = []
        #: What the disk says is free, and how large it says that it is; it is only said.
        self.free = self.total = 1 << 40
        #: While this is so, no file grows.
        self.is_full = False
        self._names: dict[str, _Inode | None] = dict.fromkeys(roots or ("/data",))
        self._durable_names = dict(self._names)
        self._pending_names: dict[str, list[_NameChange]] = {}
        self._handles: dict[int, tuple[_Inode, bool, str]] = {}
        self._locked: set[str] = set()
        self._next_handle = 1000
        self._failures: dict[int, OSError] = {}
        self._failures_by_name: dict[str, OSError] = {}
        self._crash: tuple[int, str] | None = None
        self._crashed = False
        self._watcher: Callable[[int, str], None] | None = None
        self._mutex = threading.RLock()

    def __repr__(self) -> str:
        state = "crashed" if self._crashed else "running"
        return f"<FaultDisk {state}: {len(self._names)} names, {self.operations} operations>"

    # What a test does to the disk.

    def fail_at(self, operation: int, error: OSError) -> None:
        self._failures[operation] = error

    def fail_next(self, name: str, error: OSError) -> None:
        """Let the next operation of this name fail, whichever number it has."""
        self._failures_by_name[name] = error

    def crash_at(self, operation: int, moment: str = "before") -> None:
        assert moment in MOMENTS
        self._crash = (operation, moment)

    def watch(self, watcher: Callable[[int, str], None]) -> None:
        """Calls it with the number of every operation before and after it, and midway through a write: there
        alone is a midway of its own. It may take an `image`, and touches nothing."""
        self._watcher = watcher

    def image(self) -> bytes:
        """What `kill` leaves of this disk, for `from_image`."""
        return pickle.dumps((self._names, self._durable_names, self._pending_names))

    @classmethod
    def from_image(cls, image: bytes) -> FaultDisk:
        disk = cls()
        disk._names, disk._durable_names, disk._pending_names = pickle.loads(image)
        return disk

    def crash(self, rng: random.Random) -> FaultDisk:
        """A disk as it may be found after a power failure. This one answers no more."""
        self._crashed = True
        names = dict(self._durable_names)
        for changes in self._pending_names.values():
            for change in _surviving(changes, rng):
                _rename(names, change)
        after = FaultDisk()
        after._names = _twins(names, lambda inode: inode.after_crash(rng))
        after._durable_names = dict(after._names)
        return after

    def kill(self) -> FaultDisk:
        """A disk as it is found after the process alone died. This one answers no more."""
        self._crashed = True
        after = FaultDisk()
        everything: dict[int, _Inode] = {}

        def twin(inode: _Inode) -> _Inode:
            return everything.setdefault(id(inode), inode.after_kill())

        after._names = _twins(self._names, twin)
        after._durable_names = _twins(self._durable_names, twin)
        for directory, changes in self._pending_names.items():
            after._pending_names[directory] = [
                (old, new, inode and twin(inode)) for old, new, inode in changes
            ]
        return after

    def flip(self, path: str, offset: int, bits: int = 1) -> None:
        """Damage a byte that is durable."""
        inode = self._file(path)
        assert not inode.pending
        inode.content[offset] ^= bits
        inode.durable[offset] ^= bits

    def paths(self, under: str) -> list[str]:
        """Every file below a directory, sorted."""
        return sorted(path for path, inode in self._names.items() if inode and path.startswith(f"{under}/"))

    def peek(self, path: str) -> bytes:
        return bytes(self._file(path).content)

    # What the code under test does with it: `DiskLike`.

    def open(self, path: str, *, writable: bool) -> int:
        return self._do("open", lambda: self._handle_for(self._file(path), path, writable=writable))

    def create(self, path: str) -> int:
        def effect() -> int:
            self._directory_of(path)
            inode = self._names.get(path)
            if inode is None:
                inode = _Inode()
                self._change_name((None, path, inode))
            else:
                inode.change(_Change(0, None))
            return self._handle_for(inode, path, writable=True)

        return self._do("create", effect)

    def lock(self, path: str) -> int:
        def effect() -> int:
            if path in self._locked:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
            if path not in self._names:
                self._change_name((None, path, _Inode()))
            self._locked.add(path)
            return self._handle_for(self._file(path), path, writable=True)

        return self._do("lock", effect)

    def close(self, handle: int) -> None:
        def effect() -> None:
            self._open_file(handle)
            self._locked.discard(self._handles.pop(handle)[2])

        self._do("close", effect)

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)

        def write(length: int) -> int:
            inode, writable, _ = self._open_file(handle)
            if not writable:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._refuse_growth(inode, offset + length)
            inode.change(_Change(offset, data[:length]))
            return length

        if self._watcher is not None and not self._crashed:
            # Half of it is written, looked at and taken back.
            inode = self._open_file(handle)[0]
            before = bytes(inode.content)
            write(len(data) // 2)
            self._watcher(self.operations, "midway")
            inode.pending.pop()
            inode.content[:] = before
        return self._do("pwritev", lambda: write(len(data)), half=lambda: write(len(data) // 2))

    def read_ahead(self, handle: int, length: int, offset: int) -> None:
        """Nothing: all bytes are in memory."""

    def pread(self, handle: int, length: int, offset: int) -> bytes:
        return self._do("pread", lambda: bytes(self._open_file(handle)[0].content[offset : offset + length]))

    def read_all(self, path: str) -> bytes:
        return self._do("read_all", lambda: bytes(self._file(path).content))

    def truncate(self, handle: int, size: int) -> None:
        self._do("truncate", lambda: self._open_file(handle)[0].change(_Change(size, None)))

    def allocate(self, handle: int, size: int) -> None:
        def effect() -> None:
            inode = self._open_file(handle)[0]
            self._refuse_growth(inode, size)
            if len(inode.content) < size:
                inode.change(_Change(size, None))

        self._do("allocate", effect)

    def _refuse_growth(self, inode: _Inode, size: int) -> None:
        if self.is_full and size > len(inode.content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fdatasync(self, handle: int) -> None:
        inode = self._open_file(handle)[0]
        self._do("fdatasync", inode.sync, failing=inode.fail_sync)

    def fsync(self, handle: int) -> None:
        inode = self._open_file(handle)[0]
        self._do("fsync", inode.sync, failing=inode.fail_sync)

    def fsync_dir(self, path: str) -> None:
        def effect() -> None:
            if not self._is_dir(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            for change in self._pending_names.pop(path, []):
                _rename(self._durable_names, change)

        self._do("fsync_dir", effect)

    def rename(self, old: str, new: str) -> None:
        assert os.path.dirname(old) == os.path.dirname(new)
        self._do("rename", lambda: self._change_name((old, new, self._file(old))))

    def link(self, old: str, new: str) -> None:
        def effect() -> None:
            self._directory_of(new)
            if new in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            self._change_name((None, new, self._file(old)))

        self._do("link", effect)

    def unlink(self, path: str) -> None:
        self._do("unlink", lambda: self._change_name((path, None, self._file(path))))

    def mkdir(self, path: str) -> None:
        def effect() -> None:
            self._directory_of(path)
            if path not in self._names:
                self._change_name((None, path, None))
            elif self._names[path] is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

        self._do("mkdir", effect)

    def rmdir(self, path: str) -> None:
        def effect() -> None:
            if not self._is_dir(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if any(os.path.dirname(name) == path for name in self._names):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            self._change_name((path, None, None))

        self._do("rmdir", effect)

    def listdir(self, path: str) -> list[str]:
        def effect() -> list[str]:
            if path not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return sorted(os.path.basename(name) for name in self._names if os.path.dirname(name) == path)

        return self._do("listdir", effect)

    def exists(self, path: str) -> bool:
        return self._do("exists", lambda: path in self._names)

    def size(self, path: str) -> int:
        return self._do("size", lambda: len(self._file(path).content))

    def is_dir(self, path: str) -> bool:
        return self._do("is_dir", lambda: self._is_dir(path))

    def space(self, path: str) -> Space:
        return self._do("space", lambda: Space(self.free, self.total))

    def free_bytes(self, path: str) -> int:
        return self._do("free_bytes", lambda: self.free)

    # How it is done.

    def _do(
        self,
        name: str,
        effect: Callable[[], T],
        *,
        half: Callable[[], object] = lambda: None,
        failing: Callable[[], object] = lambda: None,
    ) -> T:
        with self._mutex:
            if self._crashed and name != "close":
                raise Crashed
            number = self.operations
            self.operations += 1
            self.history.append(name)
            failure = self._failures.pop(number, None) or self._failures_by_name.pop(name, None)
            if failure is not None:
                half()
                failing()
                raise failure
            if self._watcher is not None:
                self._watcher(number, "before")
                result = effect()
                self._watcher(number, "after")
                return result
            if self._crash is None or self._crash[0] != number:
                return effect()
            self._crashed = True
            {"before": lambda: None, "midway": half, "after": effect}[self._crash[1]]()
            raise Crashed

    def _is_dir(self, path: str) -> bool:
        return self._names.get(path, path) is None

    def _file(self, path: str) -> _Inode:
        inode = self._names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def _directory_of(self, path: str) -> None:
        if os.path.dirname(path) not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _handle_for(self, inode: _Inode, path: str, *, writable: bool) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = (inode, writable, path)
        return self._next_handle

    def _open_file(self, handle: int) -> tuple[_Inode, bool, str]:
        if handle not in self._handles:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._handles[handle]

    def _change_name(self, change: _NameChange) -> None:
        _rename(self._names, change)
        directory = os.path.dirname(change[0] or change[1] or "")
        self._pending_names.setdefault(directory, []).append(change)


def _rename(names: dict[str, _Inode | None], change: _NameChange) -> None:
    old, new, inode = change
    # A name may since have been given to another file; then this change is not about it any more.
    if old is not None and names.get(old) is inode:
        names.pop(old, None)
    if new is not None:
        names[new] = inode


def _surviving(changes: list[_NameChange], rng: random.Random) -> list[_NameChange]:
    if rng.random() < 0.5:
        return changes[: rng.randrange(len(changes) + 1)]
    return [change for change in changes if rng.random() < 0.5]


def _twins(names: dict[str, _Inode | None], twin: Callable[[_Inode], _Inode]) -> dict[str, _Inode | None]:
    """The same names for twins of the files. What stands in a directory that was lost is lost with it."""
    twins: dict[str, _Inode | None] = {}
    known: dict[int, _Inode] = {}
    for path, inode in sorted(names.items(), key=lambda item: item[0]):
        parent = os.path.dirname(path)
        if parent in twins or parent == "/":
            if inode is not None and id(inode) not in known:
                known[id(inode)] = twin(inode)
            twins[path] = known[id(inode)] if inode is not None else None
    return twins
