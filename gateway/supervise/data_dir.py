"""The data directory as a whole: who may use it, and which folders of it are its shards.

`LOCK` is held with flock by the supervisor and, through inheritance, by each of its children: the kernel
frees it when the last of them is gone. So a supervisor that was killed cannot let a second server in while
one of its shards is still writing. Its content says who holds it, for people; it is not what locks.

`manifest.json` (`manifest.py`) is replaced whole, durably, and is what counts. `manifest.copy.json` is its
twin, for `streams repair`. When folders change, the order is

    manifest with the intent ─► folders built ─► manifest ─► copy ─► replaced folders go ─► settled manifest

so wherever that ends, the manifest names whole folders, and so does the copy as long as nobody has served.

What is inside a shard's folder belongs to that shard and is never looked at here.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.supervise.manifest import SALTS, Manifest, ManifestDamaged, ManifestUnknown, fresh


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
            # Its content is written, so a link that somebody has planted there is not followed.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self.lock_fd = os.open(path / "LOCK", flags, 0o600)
        except OSError as error:
            raise CannotServe(
                f"the data directory {path} cannot be used ({error.strerror}); make it writable, or choose "
                "another with STREAMS_DATA_DIR"
            ) from error

    def __repr__(self) -> str:
        return f"<DataDir {self.path}>"

    @property
    def mode_for_others(self) -> int:
        """The permission bits that other users and groups have on the directory; 0 is private."""
        return os.stat(self.path).st_mode & 0o077

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

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def copy_path(self) -> Path:
        return self.path / "manifest.copy.json"

    def open(self, *, shards_default: int, now_ms: int) -> Manifest:
        """The manifest, made now if the directory is new; with what a crash left of a change put in order."""
        found = self.read()
        if found is None:
            return self._create(shards_default, now_ms)
        if found.is_restoring:
            raise CannotServe(
                f"{self.path} is being restored, and that did not end; run the same `streams restore` again"
            )
        missing = [name for name in found.directories if not (self.path / name).is_dir()]
        if missing:
            raise CannotServe(
                f"{self.path / missing[0]} is missing, and {self.manifest_path} names it: the boxes in it "
                "would be lost. Put it back, or restore a backup into another directory (`streams restore`)"
            )
        self.settle(found)
        return found.settled()

    def read(self) -> Manifest | None:
        """The manifest, or None where there is none yet."""
        try:
            return Manifest.decode(self.manifest_path.read_bytes())
        except FileNotFoundError:
            return None
        except ManifestDamaged as damage:
            raise CannotServe(
                f"{self.manifest_path} is {damage}. Nothing was changed. {self._advice()}"
            ) from damage
        except ManifestUnknown as unknown:
            raise CannotServe(f"{self.manifest_path} {unknown}; use a newer version") from unknown

    def _advice(self) -> str:
        """What to do about a manifest that is missing or damaged. Only its copy can repair it."""
        otherwise = (
            f"put back manifest.json from a copy of {self.path}, restore a backup into another directory "
            "(`streams restore BACKUPS --data-dir NEW`), or choose another STREAMS_DATA_DIR"
        )
        try:
            Manifest.decode(self.copy_path.read_bytes())
        except (FileNotFoundError, ManifestDamaged, ManifestUnknown) as error:
            state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
            copy = self.copy_path.name
            return f"Its copy, {copy}, is {state} too, and `streams repair` cannot help: {otherwise}"
        return f"Run `streams repair`, which puts its copy in place; or {otherwise}"

    def _create(self, shards: int, now_ms: int) -> Manifest:
        orphans = sorted(found.name for found in self.path.glob("shard-*") if any(found.iterdir()))
        if orphans:
            raise CannotServe(
                f"{self.manifest_path} is missing, but {', '.join(orphans)} is there: which boxes live where "
                f"is not known. {self._advice()}"
            )
        manifest = fresh(shards, now_ms=now_ms, salt=secrets.randbelow(SALTS))
        for name in manifest.directories:  # before they are named: a folder that is named must be there
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
        self.commit(manifest)
        self._write(self.copy_path, manifest)
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """From here on this manifest counts."""
        self._write(self.manifest_path, manifest)

    def settle(self, manifest: Manifest) -> None:
        """Ends what a change of folders has left: those that were not finished go, and those replaced."""
        settled = manifest.settled()
        if not self._is_written(self.copy_path, settled):
            self._write(self.copy_path, settled)
        for name in (*manifest.building, *manifest.dropping):
            if name not in manifest.directories:
                self.remove(name)
        if not self._is_written(self.manifest_path, settled):
            self.commit(settled)

    def remove(self, name: str) -> None:
        """Removes a folder that the manifest names as unfinished or replaced."""
        try:
            shutil.rmtree(self.path / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CannotServe(
                f"{error.filename} cannot be removed ({error.strerror}); it is left over from an earlier "
                "change and holds nothing that is needed. Remove it, then start again"
            ) from error
        _sync_directory(self.path)

    def _is_written(self, path: Path, manifest: Manifest) -> bool:
        return path.is_file() and path.read_bytes() == manifest.encode()

    def _write(self, path: Path, manifest: Manifest) -> None:
        _replace(path, manifest.encode(), durable=True)


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Readers see the old file or the new one, never a part."""
    _replace(path, orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE), durable=False)


def _replace(path: Path, content: bytes, *, durable: bool) -> None:
    """`durable` says of a power cut what is so for readers anyway: the old file or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a crash, or a link that somebody has planted
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o666), "wb") as file:
        file.write(content)
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
