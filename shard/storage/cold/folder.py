"""A cold store in a folder.

Rules of the file:
  1. The folder must exist and is never created: it is often a mount, and a missing mount is no empty store.
  2. A call has no timeout of its own: a hung mount hangs the call.

Invariants:
  WHOLE_OR_ABSENT  a name has no file or a complete one: a file appears by rename, after its bytes are durable
                   and its size and checksum were verified.
  ONE_PUT_A_NAME   a temporary file has one writer. A second put of that name is refused until the first ends.
  ONE_KIND         a name is never both a file and a folder: files have a dot, folders have none.
  INSIDE           no name leads out of the folder.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from shard.storage.cold.base import (
    FOLDER_NAME,
    TEMPORARY,
    Chunks,
    ColdBase,
    ColdMissing,
    ColdUnavailable,
    Measure,
    check_name,
    check_prefix,
    compare,
    is_name,
    measure,
    too_short,
)
from shard.storage.files import DiskLike, parent_of, read_part


class FolderCold(ColdBase):
    """A cold store whose objects are files below one folder."""

    def __init__(self, folder: str, disk: DiskLike) -> None:
        super().__init__(disk)
        self._folder = folder
        #: name -> a token of the thread that puts it. Each change is one dict operation.
        self._putting: dict[str, object] = {}
        #: Folders whose names are durable.
        self._durable_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"<FolderCold {self._folder}: {len(self._putting)} puts in progress>"

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        with self._translate_errors(name):
            actual = measure(self._disk, self._path(name))
        compare(name, actual, Measure(size, checksum))

    def size(self, name: str) -> int | None:
        try:
            with self._translate_errors(name):
                return self._disk.size(self._path(name))
        except ColdMissing:
            return None

    def names(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        try:
            with self._translate_errors(prefix):
                entries = self._disk.listdir(f"{self._folder}/{prefix}".rstrip("/"))
        except ColdMissing:
            return
        # A folder sorts with its slash, like the names in it: "a-b.seg" comes before "a/c.seg".
        for entry in sorted(entry if "." in entry else f"{entry}/" for entry in entries):
            if entry.endswith("/"):
                if FOLDER_NAME.fullmatch(entry[:-1]):
                    yield from self.names(prefix + entry)
            elif is_name(prefix + entry):
                yield prefix + entry

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            with self._translate_errors(name):
                if self._disk.exists(path):
                    self._disk.unlink(path)
                # A temporary file that a crash has left.
                if name not in self._putting and self._disk.exists(path + TEMPORARY):
                    self._disk.unlink(path + TEMPORARY)
                # Also if the file was missing: an earlier call may have failed before its fsync.
                self._disk.fsync_dir(parent_of(path))
                self._drop_empty_folders(parent_of(path))
        except ColdMissing:
            pass

    def _drop_empty_folders(self, folder: str) -> None:
        """Remove empty folders, except the topmost, which other writers share.

        Between creating a folder and creating a file in it, nothing else may remove it.
        """
        while parent_of(folder) != self._folder and folder != self._folder:
            assert folder.startswith(f"{self._folder}/"), "INSIDE"
            try:
                self._disk.rmdir(folder)
            except OSError:  # there is something in it
                return
            self._durable_folders.discard(folder)
            folder = parent_of(folder)

    def _put(self, name: str, chunks: Chunks, size: int) -> None:
        own_token = object()
        if self._putting.setdefault(name, own_token) is not own_token:
            raise ColdUnavailable(name, "another thread is writing it")
        path = self._path(name)
        try:
            self._make_folders(name)
            written_bytes = self._write(path + TEMPORARY, chunks)
            assert written_bytes == size, "WHOLE_OR_ABSENT"
            self._disk.rename(path + TEMPORARY, path)
            self._disk.fsync_dir(parent_of(path))
        except OSError as error:
            # Another process may have removed a folder; check all of them again next time.
            self._durable_folders.clear()
            raise ColdUnavailable(name, str(error)) from error
        finally:
            token = self._putting.pop(name)
            assert token is own_token, "ONE_PUT_A_NAME"

    def create(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        # Unique to this call: another server may create the same name now.
        temporary = f"{path}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            self._make_folders(name)
            self._write(temporary, lambda: (chunk for chunk in (content,)))
            try:
                self._disk.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                self._drop_quietly(temporary)
            self._disk.fsync_dir(parent_of(path))
        except OSError as error:
            self._durable_folders.clear()
            raise ColdUnavailable(name, str(error)) from error
        return True

    def _write(self, path: str, chunks: Chunks) -> int:
        """Write the chunks to a durable file; return its size. The next put overwrites the remains of a
        crash."""
        disk = self._disk
        handle = disk.create(path)
        try:
            offset = 0
            with closing(chunks()) as buffers:
                for buffer in buffers:
                    offset += disk.pwritev(handle, [buffer], offset)
            disk.fsync(handle)
        except Exception:
            self._drop_quietly(path)
            raise
        finally:
            disk.close(handle)
        return offset

    def _drop_quietly(self, path: str) -> None:
        """Remove a failed file, to free its space. If this fails too, the first error is the useful one."""
        try:
            self._disk.unlink(path)
        except OSError:
            pass

    def _make_folders(self, name: str) -> None:
        """Create the folders of a name, from the top, so that each is durable before it is used."""
        path = self._folder
        for part in name.split("/")[:-1]:
            assert "." not in part, "ONE_KIND"
            parent, path = path, f"{path}/{part}"
            if path not in self._durable_folders:
                self._disk.mkdir(path)
                self._disk.fsync_dir(parent)
                self._durable_folders.add(path)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._translate_errors(name):
            handle = self._disk.open(self._path(name), writable=False)
            try:
                parts = [read_part(self._disk, handle, offset, length) for offset, length in ranges]
            finally:
                self._disk.close(handle)
        for part, (offset, length) in zip(parts, ranges, strict=True):
            if len(part) != length:
                raise too_short(name, offset + length)
        return parts

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._folder}/{name}"

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            if self._disk.exists(self._folder):
                raise ColdMissing(name) from None
            raise ColdUnavailable(
                name, f"the folder {self._folder} does not exist; check that it is mounted"
            ) from None
        except OSError as error:
            raise ColdUnavailable(name, str(error)) from error
