"""The data directory as a whole: who may use it, and how many shards it was made for.

`LOCK` is held with flock by the supervisor and, through inheritance, by each of its children: the kernel
frees it when the last of them is gone. So a supervisor that was killed cannot let a second server in while
one of its shards is still writing. Its content says who holds it, for people; it is not what locks.

`manifest.json` says how slots map to shards. It is written once and replaced whole:

    {"format": 1, "shards": 2, "slots": [[0, 2048, 0], [2048, 4096, 1]], "version": 1, "created_ms": ...}

What is inside `shard-NN/` belongs to that shard and is never looked at here.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.placement import Placement, even

MANIFEST_FORMAT: Final = 1


class CannotServe(Exception):
    """The server does not start, and nothing was changed. The message names the thing and the next step."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote `LOCK` last. It may be gone, or on another machine."""

    pid: int
    host: str
    url: str

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where}" + (f" ({self.url})" if self.url else "")

    def is_alive(self) -> bool:
        """Whether that process surely runs. A process of another machine, or one with our own number (each
        container counts from 1), tells nothing, and neither does an empty file."""
        if self.pid <= 0 or self.pid == os.getpid() or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class DataDir:
    """A data directory, made when it is missing. Opening it locks nothing yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sync_directory(path.parent)
            self.lock_fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CannotServe(
                f"the data directory {path} cannot be used ({error.strerror}); make it writable, or choose "
                "another with STREAMS_DATA_DIR"
            ) from error

    def __repr__(self) -> str:
        return f"<DataDir {self.path}>"

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise CannotServe(
                f"{self.path / 'LOCK'} cannot be locked ({error.strerror}); the file system must support "
                "flock, so put the data directory on a local disk with STREAMS_DATA_DIR"
            ) from error
        return True

    def holder(self) -> Holder:
        try:
            found = orjson.loads(os.pread(self.lock_fd, 4096, 0))
            return Holder(int(found["pid"]), str(found["host"]), str(found["url"]))
        except (ValueError, KeyError, TypeError):
            return Holder(0, "", "")

    def describe_holder(self, *, url: str, now_ms: int) -> None:
        """Say in `LOCK` that it is us. Padding keeps a reader from seeing the end of an older text."""
        text = orjson.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "started_ms": now_ms, "url": url}
        )
        os.pwrite(self.lock_fd, text.ljust(1023) + b"\n", 0)
        os.ftruncate(self.lock_fd, max(1024, len(text) + 1))

    def close(self) -> None:
        """Give up our share of the lock; it is free when no child holds it either."""
        os.close(self.lock_fd)

    def placement(self, *, shards_wanted: int, shards_default: int, now_ms: int) -> Placement:
        """The directory's placement, made now if it is new. `shards_wanted` 0 takes what is there."""
        path = self.path / "manifest.json"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return self._create_manifest(path, shards_wanted or shards_default, now_ms)
        placement = _read_manifest(path, content)
        if shards_wanted not in (0, placement.shards):
            raise CannotServe(
                f"STREAMS_SHARDS is {shards_wanted}, but {self.path} was made with {placement.shards} "
                "shards, and changing that is not supported by this version; unset STREAMS_SHARDS, or start "
                "with a new data directory"
            )
        return placement

    def _create_manifest(self, path: Path, shards: int, now_ms: int) -> Placement:
        orphans = sorted(found.name for found in self.path.glob("shard-*"))
        if orphans:
            raise CannotServe(
                f"{path} is missing, but {', '.join(orphans)} is there: which boxes live where is not known. "
                "Put the manifest back from a backup, or choose another STREAMS_DATA_DIR"
            )
        placement = even(shards)
        manifest = {"format": MANIFEST_FORMAT, **placement.to_dict(), "created_ms": now_ms}
        write_atomically(path, manifest, durable=True)
        return placement


def _read_manifest(path: Path, content: bytes) -> Placement:
    try:
        manifest = orjson.loads(content)
        known = manifest["format"]
        if known == MANIFEST_FORMAT:
            return Placement.from_dict(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise CannotServe(f"{path} is damaged ({error}); put it back from a backup") from error
    raise CannotServe(
        f"{path} has format {known}, and this version knows {MANIFEST_FORMAT}; use a newer version"
    )


def write_atomically(path: Path, content: dict[str, Any], *, durable: bool = False) -> None:
    """Readers see the old file or the new one, never a part; `durable` says the same of a power cut."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
