"""Locks a data directory, and manages its manifest and the folders of its shards.

The supervisor holds a flock on `LOCK`, and each of its children inherits it: the kernel frees it when the
last of them has ended. So after a supervisor was killed, a second server cannot start while a shard still
writes. The content of `LOCK` tells people which process holds it; it does not lock anything.

`manifest.json` (`manifest.py`) is the source of truth. It is replaced atomically and durably.
`manifest.copy.json` is a copy for `streams repair`. When folders change, the order is

    manifest with the intent ─► folders built ─► manifest ─► copy ─► replaced folders removed ─► final
    manifest

So after a crash at any point the manifest names complete folders, and so does the copy until a server serves.

This file never reads or changes the contents of a shard's folder.
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
    """The process that wrote `LOCK` last. It may have ended, or run on another machine."""

    pid: int
    host: str
    url: str

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where}" + (f" ({self.url})" if self.url else "")

    def is_alive(self) -> bool:
        """Return True if that process certainly runs. A process of another machine, or one with our own pid
        (each container counts from 1), or an empty file, proves nothing."""
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
    """A data directory, created if it is missing. The constructor does not lock it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sync_directory(path.parent)
            # We write to the file, so a symbolic link that another user has planted is not followed.
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
            fields = orjson.loads(os.pread(self.lock_fd, 4096, 0))
            return Holder(int(fields["pid"]), str(fields["host"]), str(fields["url"]))
        except (ValueError, KeyError, TypeError):
            return Holder(0, "", "")

    def describe_holder(self, *, url: str, now_ms: int) -> None:
        """Write our pid and URL into `LOCK`. Padding keeps a reader from seeing the end of an older text."""
        text = orjson.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "started_ms": now_ms, "url": url}
        )
        os.pwrite(self.lock_fd, text.ljust(1023) + b"\n", 0)
        os.ftruncate(self.lock_fd, max(1024, len(text) + 1))

    def close(self) -> None:
        """Release our share of the lock. The lock is free when no child holds it either."""
        os.close(self.lock_fd)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def copy_path(self) -> Path:
        return self.path / "manifest.copy.json"

    def open(self, *, shards_default: int, now_ms: int) -> Manifest:
        """Return the manifest; create it if the directory is new. Completes a change that a crash
        interrupted."""
        manifest = self.read()
        if manifest is None:
            return self._create(shards_default, now_ms)
        if manifest.is_restoring:
            raise CannotServe(
                f"{self.path} is only partly restored; run the same `streams restore` again to complete it"
            )
        missing = [name for name in manifest.directories if not (self.path / name).is_dir()]
        if missing:
            raise CannotServe(
                f"{self.path / missing[0]} is missing, and {self.manifest_path} names it: the boxes in it "
                "would be lost. Put it back, or restore a backup into another directory (`streams restore`)"
            )
        self.settle(manifest)
        return manifest.without_intents()

    def read(self) -> Manifest | None:
        """Return the manifest, or None if there is none yet."""
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
        """Return the next step for a missing or damaged manifest. Only its copy can repair it."""
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
        orphans = sorted(folder.name for folder in self.path.glob("shard-*") if any(folder.iterdir()))
        if orphans:
            raise CannotServe(
                f"{self.manifest_path} is missing, but {', '.join(orphans)} exists: the server cannot know "
                f"which shard owns which boxes. {self._advice()}"
            )
        manifest = fresh(shards, now_ms=now_ms, salt=secrets.randbelow(SALTS))
        for name in manifest.directories:  # before the manifest: a folder that it names must exist
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
        self.commit(manifest)
        self._write(self.copy_path, manifest)
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Make this manifest the current one, durably."""
        self._write(self.manifest_path, manifest)

    def settle(self, manifest: Manifest) -> None:
        """Complete a change of folders: remove unfinished and replaced folders."""
        final = manifest.without_intents()
        if not self._is_written(self.copy_path, final):
            self._write(self.copy_path, final)
        for name in (*manifest.building, *manifest.dropping):
            if name not in manifest.directories:
                self.remove(name)
        if not self._is_written(self.manifest_path, final):
            self.commit(final)

    def remove(self, name: str) -> None:
        """Remove a folder that the manifest names as unfinished or replaced."""
        try:
            shutil.rmtree(self.path / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CannotServe(
                f"{error.filename} cannot be removed ({error.strerror}); it is a remnant of an earlier "
                "change and no longer needed. Remove it, then start again"
            ) from error
        _sync_directory(self.path)

    def _is_written(self, path: Path, manifest: Manifest) -> bool:
        return path.is_file() and path.read_bytes() == manifest.encode()

    def _write(self, path: Path, manifest: Manifest) -> None:
        _replace(path, manifest.encode(), durable=True)


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically: readers see the old file or the new one, never a part."""
    _replace(path, orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE), durable=False)


def _replace(path: Path, content: bytes, *, durable: bool) -> None:
    """Replace a file atomically. With `durable`, it is the old file or the new one even after a power cut."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # a remnant of a crash, or a link that another user has planted
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
