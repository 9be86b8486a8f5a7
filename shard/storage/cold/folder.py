"""A cold store in a folder, by way of the disk.

Rules of the file:
  1. The folder must be there: it is often a mount, and its absence is not emptiness. It is never made.
  2. A call can be no more patient than its disk: a hung mount hangs the call.

Invariants:
  WHOLE_OR_ABSENT  under a name there is nothing or everything: a file appears by rename after its bytes are
                   durable, and not before size and checksum of what was read were found right.
  ONE_PUT_A_NAME   a temporary file has one writer. A second put of that name is refused until the first ends.
  ONE_KIND         a name is never both a file and a folder: one has a dot, the other has none.
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
from shard.storage.files import DiskLike, parent_of


class FolderCold(ColdBase):
    """Files below one folder, which must be there: it is often a mount, and its absence is not emptiness."""

    def __init__(self, folder: str, disk: DiskLike) -> None:
        super().__init__(disk)
        self._folder = folder
        #: name -> a token of the thread that puts it; changed by single steps only.
        self._putting: dict[str, object] = {}
        #: Folders whose own names are known to be durable.
        self._durable_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"<FolderCold {self._folder}: {len(self._putting)} being put>"

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
        # A folder sorts as its names do, with the slash: "a-b.seg" comes before what is in "a".
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
                # What a crash has left of a put.
                if name not in self._putting and self._disk.exists(path + TEMPORARY):
                    self._disk.unlink(path + TEMPORARY)
                # Also if it was gone: an earlier call may have failed between the two.
                self._disk.fsync_dir(parent_of(path))
                self._drop_empty_folders(parent_of(path))
        except ColdMissing:
            pass

    def _drop_empty_folders(self, folder: str) -> None:
        """Folders of which nothing is left, but for the topmost, which others share: between the making of a
        folder and of a file in it nobody else may remove it."""
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
            raise ColdUnavailable(name, "another thread is putting it")
        path = self._path(name)
        try:
            self._make_folders(name)
            written_bytes = self._write(path + TEMPORARY, chunks)
            assert written_bytes == size, "WHOLE_OR_ABSENT"
            self._disk.rename(path + TEMPORARY, path)
            self._disk.fsync_dir(parent_of(path))
        except OSError as error:
            # Someone may have removed folders that we believe to be there; look again the next time.
            self._durable_folders.clear()
            raise ColdUnavailable(name, str(error)) from error
        finally:
            token = self._putting.pop(name)
            assert token is own_token, "ONE_PUT_A_NAME"

    def create(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        # Of this process and call alone: another server may be at the same at this moment.
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
        """Make a durable file of the chunks; return its size. The next put overwrites what a crash leaves."""
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
        """A full disk should not stay full of what failed. If even this fails, the first error tells more."""
        try:
            self._disk.unlink(path)
        except OSError:
            pass

    def _make_folders(self, name: str) -> None:
        """Make the folders of a name, from the top, so that each is durable before anything is in it."""
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
                parts = [self._disk.pread(handle, length, offset) for offset, length in ranges]
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
            raise ColdUnavailable(name, f"the folder {self._folder} is not there") from None
        except OSError as error:
            raise ColdUnavailable(name, str(error)) from error
