"""The write-ahead log of one shard: append, sync, rotate, release. It knows only files and positions.

Rules of the file:
  1. `scan` only reads. `settle` makes its result durable and must come before the first `append`.
  2. Nothing is written after an old tail: it is cut off durably, and new frames begin a new file.
  3. After a failed write or sync this object never writes, syncs or acknowledges again. Exception: a write
     that fails for lack of space is repeated while `on_full` waits for space. It has changed nothing.
  4. One thread at a time appends and syncs; only `run_sync` may run beside it. `prepare_next` and `release`
     may run on one other thread; they share the spares and a dict of files, changed by single steps.

Invariants:
  CONTIGUOUS_LSN      frames carry first_lsn, first_lsn + 1, …, through all files, with no gap and no repeat.
  CONTIGUOUS_NUMBER   files carry n, n + 1, …; only the oldest may be released, the newest never. Retained
                      files are no longer part of the log.
  WHOLE_BEFORE_NEXT   a file gets its `.wal` name only when every frame before it, and its own header, are
                      durable; it gets its first frame only when that name is. So only the newest file can
                      have a torn tail, and a later file's header proves all frames before its first lsn.
  ROOM_BEFORE_FRAMES  a log that `reserves` writes frames only into allocated space: a full disk is noticed
                      when a file is created, before anything is in it.
  PROVEN_WHEN_QUIET   after `settle`, `mark` and `close` a marker or header proves every durable frame; after
                      a `settle` on a full disk, from the next file's header on.
  STATE               new, then scanned, then open, then closed; or failed, from any state.
  DURABLE_IS_LOGGED   proven ≤ durable ≤ logged.
  ALIGNED             every frame begins at a multiple of eight, after the header.
  WRITTEN_WHOLE       after an append the file ends where its last frame does.
  MARKER_KIND         no frame has the kind of a marker.
  ONE_SYNC            one thread syncs at a time.
  KEPT_OR_NOT         a file is part of the log or retained, both only while it is being renamed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from shard.storage.files import NO_SPACE, Buffer, Corrupt, DiskLike, parent_of
from shard.storage.wal.format import (
    CHECKSUM_BYTES,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    MARKER_BYTES,
    MARKER_KIND,
    Frame,
    FrameParts,
    encode_frame,
    encode_header,
    encode_marker,
    path_of,
    retained_path_of,
)
from shard.storage.wal.scan import LogFile, LogScan, read_frame
from shard.storage.wal.spares import ZEROS, Spares

T = TypeVar("T")

FILE_BYTES = 64 << 20

#: Retries of a read whose file is being renamed, and the delay before each.
_RENAME_LOOKS, _RENAME_LOOK_S = 5, 0.002


class PendingSync(NamedTuple):
    """A sync that runs beside further appends: the handle of its file, and the last lsn it covers."""

    handle: int
    lsn: int


class WalFile(NamedTuple):
    """One file of the log; it is empty if `last_lsn` is `first_lsn - 1`."""

    number: int
    first_lsn: int
    last_lsn: int


class Wal:
    def __init__(
        self, disk: DiskLike, directory: str, *, file_bytes: int = FILE_BYTES, reserves: bool = False
    ) -> None:
        """`reserves`: files are allocated in full, and one spare outlives the process, so that a start on a
        full disk has a file to write to."""
        assert file_bytes > HEADER_BYTES + 2 * MARKER_BYTES, "ROOM_BEFORE_FRAMES"
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._reserves = reserves
        #: Called when the disk is full. It waits, then returns True to repeat the write or False to fail it.
        self.on_full: Callable[[OSError], bool] = lambda error: False
        #: Frames leave room for one marker, so that `mark` always fits and the size stays the same.
        self._frames_end_max = file_bytes - MARKER_BYTES
        #: Called when a file is released: returns True if a frame between these lsns is still needed.
        self.must_retain: Callable[[int, int], bool] = lambda first_lsn, last_lsn: False
        self._scan = LogScan(disk, directory)
        self._files = self._scan.files
        #: Released files that are retained, by number.
        self._retained_files = self._scan.retained_files
        self._spares = Spares(disk, directory, file_bytes=file_bytes, reserves=reserves)
        self._current: LogFile | None = None
        self._handle = -1
        #: Locked while the disk syncs. A failed sync must not be repeated: the next one would succeed and
        #: prove nothing. So each sync waits for the result of the one before.
        self._sync_lock = threading.Lock()
        self._state = "new"  # -> scanned -> open -> closed, or failed from anywhere
        #: The greatest lsn that a marker or a header in the newest file proves durable.
        self._proven_lsn = 0
        self.logged_lsn = 0
        self.durable_lsn = 0
        self.bytes_written = 0
        self.rotations = 0

    def __repr__(self) -> str:
        return (
            f"<Wal {self._directory} {self._state}: {len(self._files)} files, logged {self.logged_lsn}, "
            f"durable {self.durable_lsn}>"
        )

    @property
    def needs_marker(self) -> bool:
        """True if the newest file has durable frames that nothing in it proves."""
        return self._current is not None and self._proven_lsn < self.durable_lsn

    def path_of(self, number: int) -> str:
        """Return the path of a file, for messages."""
        return path_of(self._directory, number)

    def files(self) -> list[WalFile]:
        """Return all files, oldest first; the last is the newest, which cannot be released."""
        return list(map(_describe, list(self._files.values())))

    def retained_files(self) -> list[WalFile]:
        """Return released files that are retained, oldest first."""
        return list(map(_describe, list(self._retained_files.values())))

    # -- reading: scan_retained, scan, settle, read

    @property
    def scanned_bytes(self) -> int:
        return self._scan.scanned_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that `scan` has to read."""
        return self._scan.total_bytes

    def scan_retained(self) -> Iterator[Frame]:
        """Yield all frames of released files that are retained (`LogScan.retained_frames`). Call it before
        `scan`."""
        assert self._state == "new", "STATE"
        return self._scan.retained_frames()

    def scan(self, *, snapshot_lsn: int = 0) -> Iterator[Frame]:
        """Yield all frames in order (`LogScan.frames`). Raises `Corrupt` where durable bytes are missing or
        changed."""
        assert self._state == "new", "STATE"
        self._state = "scanning"
        yield from self._scan.frames(snapshot_lsn)
        self.logged_lsn = self.durable_lsn = self._scan.last_lsn
        self._proven_lsn = self._scan.proven_lsn
        self._state = "scanned"

    def verify_closed(self) -> Iterator[Corrupt]:
        """Yield the damage in completed files, while another process writes the newest one."""
        return self._scan.verify_closed()

    def settle(self) -> None:
        """Make the scanned frames durable, and nothing else. Afterwards the log is open for `append`.

        A killed process leaves frames in the page cache. They have been scanned, so they are synced before a
        reader sees them. A torn tail is cut off before a marker replaces it: if both were done at once, a
        crash could keep the marker and the old frames after it.
        """
        assert self._state == "scanned", "STATE"
        self._state = "failed"  # until the last line below
        disk = self._disk
        disk.mkdir(self._directory)
        disk.fsync_dir(parent_of(self._directory))
        self._spares.settle()
        if self._files:
            newest = self._newest()
            assert newest.last_lsn == self.logged_lsn and newest.end % 8 == 0, "WRITTEN_WHOLE"
            handle = disk.open(newest.path, writable=True)
            self._write_again(handle, newest)
            disk.truncate(handle, newest.end)
            disk.fsync(handle)
            if self._proven_lsn < newest.last_lsn and self._mark_settled(handle, newest):
                disk.fdatasync(handle)
                newest.end += MARKER_BYTES
            disk.close(handle)
        disk.fsync_dir(self._directory)
        self._proven_lsn = self.logged_lsn
        self._state = "open"

    def _mark_settled(self, handle: int, newest: LogFile) -> bool:
        """Write a marker after the scanned frames. Returns False if a full disk has no block for it.

        Then the header of the next file is the first proof, and until then damage may pass for a torn tail.
        """
        marker = [encode_marker(newest.number, newest.last_lsn, newest.last_lsn)]
        try:
            self._disk.pwritev(handle, marker, newest.end)
        except OSError as error:
            if error.errno not in NO_SPACE or not self._reserves:
                raise
            self._disk.truncate(handle, newest.end)
            return False
        return True

    def _write_again(self, handle: int, newest: LogFile) -> None:
        """Rewrite the frames that nothing proves durable.

        After a failed sync the kernel treats their pages as clean, and a later sync skips them. Rewriting
        marks the pages dirty.
        """
        if self._proven_lsn < newest.last_lsn:
            # From the last proven frame, because a marker may follow it.
            proven_at = self._proven_lsn - newest.first_lsn
            offset = newest.offsets[proven_at] << 3 if proven_at >= 0 else HEADER_BYTES
            for at in range(offset, newest.end, len(ZEROS)):
                length = min(len(ZEROS), newest.end - at)
                self._disk.pwritev(handle, [self._disk.pread(handle, length, at)], at)

    def read(self, lsn: int) -> Frame:
        """Read one frame and verify it. Any thread may call it. The file of the frame must be in the log or
        retained."""
        for _ in range(_RENAME_LOOKS):
            try:
                return read_frame(self._disk, self._file_of(lsn), lsn)
            except FileNotFoundError:  # the file is being renamed
                time.sleep(_RENAME_LOOK_S)
        return read_frame(self._disk, self._file_of(lsn), lsn)

    def _file_of(self, lsn: int) -> LogFile:
        for file in reversed([*self._retained_files.values(), *self._files.values()]):
            if file.first_lsn <= lsn <= file.last_lsn:
                return file
        raise AssertionError(f"lsn {lsn} was released")

    # -- writing, one thread: append, sync, mark, close

    def append(self, frames: Sequence[FrameParts]) -> None:
        """Write frames at once, into as many files as they need. They are logged, not durable."""
        self._refuse_unless_open()
        try:
            self._append(frames)
        except BaseException:
            self._state = "failed"
            raise

    def try_append(self, frames: Sequence[FrameParts]) -> bool:
        """Append frames that `has_room` has accepted, without waiting. Returns False, with nothing logged, if
        the disk is full."""
        self._refuse_unless_open()
        file = self._current
        assert file is not None, "STATE: it has room"
        before = len(file.offsets), self.logged_lsn, self._proven_lsn
        try:
            self._append(frames, waits=False)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE and self._current is file:
                del file.offsets[before[0] :]
                self.logged_lsn, self._proven_lsn = before[1:]
                return False
            self._state = "failed"
            raise
        return True

    @property
    def room_bytes(self) -> int:
        """Bytes that can certainly be written, into the current file and the spares. Any thread may read it;
        it may be off by the write in progress."""
        current = self._current
        current_room = 0 if current is None else max(0, self._frames_end_max - current.end)
        return current_room + len(self._spares) * (self._frames_end_max - HEADER_BYTES)

    @property
    def has_spare(self) -> bool:
        return bool(self._spares)

    def has_room(self, frames: int, size: int) -> bool:
        """Return True if this many frames with this many bytes of content fit into the current file."""
        if self._current is None:
            return False
        most = size + (frames + 1) * (FRAME_HEAD_BYTES + 8 + CHECKSUM_BYTES) + MARKER_BYTES
        return self._current.end + most <= self._frames_end_max

    def sync(self) -> None:
        """Make everything logged durable."""
        self._refuse_unless_open()
        try:
            self._sync()
        except BaseException:
            self._state = "failed"
            raise

    def begin_sync(self) -> PendingSync | None:
        """Begin a sync that another thread runs with `run_sync`, beside appends; None if all is durable.
        It counts from `end_sync` on. All methods except `run_sync` belong to the writing thread."""
        self._refuse_unless_open()
        if self.durable_lsn == self.logged_lsn:
            return None
        self._sync_lock.acquire()
        return PendingSync(self._handle, self.logged_lsn)

    def run_sync(self, pending_sync: PendingSync) -> None:
        assert self._sync_lock.locked(), "ONE_SYNC"
        try:
            self._disk.fdatasync(pending_sync.handle)
        except BaseException:
            self._state = "failed"
            raise
        finally:
            self._sync_lock.release()

    def end_sync(self, pending_sync: PendingSync) -> bool:
        """Return True if the durable lsn has advanced."""
        assert pending_sync.lsn <= self.logged_lsn, "DURABLE_IS_LOGGED"
        is_further = pending_sync.lsn > self.durable_lsn
        self.durable_lsn = max(self.durable_lsn, pending_sync.lsn)
        return is_further

    def mark(self) -> None:
        """Write a marker that proves all durable frames, before the log goes quiet."""
        self._refuse_unless_open()
        try:
            self._sync()
            self._mark()
            assert self._proven_lsn == self.durable_lsn == self.logged_lsn, "PROVEN_WHEN_QUIET"
        except BaseException:
            self._state = "failed"
            raise

    def close(self) -> None:
        """Sync, write a marker, and close the file."""
        if self._state == "open":
            self.mark()
        self.abandon()

    def abandon(self) -> None:
        """Close the file without writing a byte, after a failure."""
        if self._handle >= 0:
            self._close_handle()
        self._state = "closed"

    def _close_handle(self) -> None:
        with self._sync_lock:
            self._disk.close(self._handle)
            self._handle = -1

    def _refuse_unless_open(self) -> None:
        if self._state != "open":
            raise RuntimeError(f"{self!r} is not open: it must be scanned and settled, and not have failed")

    def _append(self, frames: Sequence[FrameParts], *, waits: bool = True) -> None:
        buffers: list[Buffer] = []
        file = self._current
        offset = file.end if file is not None else self._file_bytes
        lsn = self.logged_lsn
        assert self._proven_lsn <= self.durable_lsn <= lsn, "DURABLE_IS_LOGGED"
        assert offset % 8 == 0 or file is None, "ALIGNED"
        proof = b""
        if file is not None and self.needs_marker:
            proof = encode_marker(file.number, lsn, self.durable_lsn)
        for kind, version, frame_lsn, parts in frames:
            lsn += 1
            assert frame_lsn == lsn, f"CONTIGUOUS_LSN: got {frame_lsn}, {lsn} is next"
            assert kind != MARKER_KIND, "MARKER_KIND: a frame is no marker"
            length = sum(map(len, parts))
            size = FRAME_HEAD_BYTES + (length + 7 & ~7) + CHECKSUM_BYTES
            end = offset + len(proof) + size
            if file is None or (end > self._frames_end_max and offset > HEADER_BYTES):
                self._write(buffers, waits=waits)
                buffers = []
                file = self._rotate(first_lsn=lsn, frame_bytes=size)
                offset = HEADER_BYTES
                proof = b""  # the new file's header proves as much
            if proof:
                buffers.append(proof)
                offset += len(proof)
                proof = b""
                self._proven_lsn = self.durable_lsn
            file.offsets.append(offset >> 3)
            encode_frame(buffers, file.number, kind, version, lsn, length, parts)
            offset += size
            self.logged_lsn = lsn
        self._write(buffers, waits=waits)
        assert file is None or (file.end == offset and file.last_lsn == lsn), "WRITTEN_WHOLE"
        assert file is None or offset <= self._frames_end_max or len(file.offsets) == 1, "ROOM_BEFORE_FRAMES"

    def _write(self, buffers: list[Buffer], *, waits: bool = True) -> None:
        if buffers:
            assert self._current is not None, "STATE: a file was begun"
            at = self._current.end
            write = partial(self._disk.pwritev, self._handle, buffers, at)
            size = self._when_there_is_room(write) if waits else write()
            self._current.end += size
            self.bytes_written += size

    def _sync(self) -> None:
        if self.durable_lsn < self.logged_lsn:
            self._sync_file()
            self.durable_lsn = self.logged_lsn

    def _sync_file(self) -> None:
        with self._sync_lock:
            self._refuse_unless_open()
            self._disk.fdatasync(self._handle)

    def _mark(self) -> None:
        if self.needs_marker:
            assert self._current is not None, "STATE: a file was begun"
            self._write([encode_marker(self._current.number, self.logged_lsn, self.durable_lsn)])
            self._sync_file()
            self._proven_lsn = self.durable_lsn

    # -- files: rotate on the writing thread, prepare_next and release on another

    def _when_there_is_room(self, work: Callable[[], T]) -> T:
        """Run `work`; repeat it while the disk is full and `on_full` returns True."""
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in NO_SPACE or not self.on_full(error):
                    raise

    def _rotate(self, *, first_lsn: int, frame_bytes: int) -> LogFile:
        """Begin the next file, with room for a frame of this size. WHOLE_BEFORE_NEXT gives the order of the
        steps."""
        disk = self._disk
        self._sync()
        if self._handle >= 0:
            self._close_handle()
        number = self._newest().number + 1 if self._files else 1
        assert number not in self._retained_files, "KEPT_OR_NOT"
        spare = self._when_there_is_room(self._spares.take)
        file = LogFile(number, self.path_of(number), first_lsn)
        handle = disk.open(spare, writable=True)
        self._handle = handle
        if self._reserves and HEADER_BYTES + frame_bytes > self._frames_end_max:
            whole = HEADER_BYTES + frame_bytes + MARKER_BYTES
            self._when_there_is_room(partial(disk.allocate, handle, whole))
        header: list[Buffer] = [encode_header(number, first_lsn)]
        self._when_there_is_room(partial(disk.pwritev, handle, header, 0))
        disk.fdatasync(handle)
        disk.rename(spare, file.path)
        disk.fsync_dir(self._directory)
        assert self.durable_lsn == first_lsn - 1, "WHOLE_BEFORE_NEXT: all before this file was synced above"
        self._proven_lsn = first_lsn - 1
        self._files[number] = self._current = file
        self.rotations += 1
        return file

    def prepare_next(self, *, zeros: bool = True) -> None:
        """Create the next spare (`Spares.prepare`)."""
        self._refuse_unless_open()
        self._spares.prepare(zeros=zeros)

    def release(self, number: int) -> None:
        """Remove the oldest file from the log: retain it (`must_retain`), recycle it as a spare, or delete
        it.

        It is durably gone from the log on return. A crash before the directory is synced may bring the file
        back, as the oldest file again."""
        self._refuse_unless_open()
        numbers = list(self._files)
        assert number == numbers[0] != numbers[-1], "CONTIGUOUS_NUMBER"
        assert number not in self._retained_files, "KEPT_OR_NOT"
        file = self._files[number]
        try:
            if self.must_retain(file.first_lsn, file.last_lsn):
                old, file.path = file.path, retained_path_of(self._directory, number)
                self._retained_files[number] = file  # first, so that a reader finds it in one of the two
                self._disk.rename(old, file.path)
                self._disk.fsync_dir(self._directory)
                del self._files[number]
            else:
                del self._files[number]
                self._spares.recycle(file.path)
        except BaseException:
            self._state = "failed"
            raise

    def drop_retained(self, number: int) -> None:
        """Delete a retained file. A repeated call has no effect."""
        self._refuse_unless_open()
        file = self._retained_files.pop(number, None)
        if file is not None:
            self._disk.unlink(file.path)
            self._disk.fsync_dir(self._directory)

    def _newest(self) -> LogFile:
        return list(self._files.values())[-1]


def _describe(file: LogFile) -> WalFile:
    return WalFile(file.number, file.first_lsn, file.last_lsn)
