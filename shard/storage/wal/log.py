"""The write-ahead log of one shard: append, sync, rotate, release. It knows files and positions only.

Rules of the file:
  1. `scan` only reads. `settle` makes its verdict durable and must come before the first `append`.
  2. Nothing is written behind an old tail: it is cut off durably, and new frames begin a new file.
  3. After a failed write or sync nothing is written, synced or promised again by this object. A write for
     which the disk has no room is not one of these while `on_full` waits for room: it has changed nothing
     that counts, and is made again.
  4. One thread at a time appends and syncs; `run_sync` alone may run beside it. `prepare_next` and `release`
     may run on one other thread; what they share is the spares and a dict of files, each changed by single
     steps.

Invariants:
  CONTIGUOUS_LSN      frames carry first_lsn, first_lsn + 1, …, through all files, with no gap and no repeat.
  CONTIGUOUS_NUMBER   files carry n, n + 1, …; only the oldest may be released, the newest never. Those that
                      are kept after that are no part of the log any more.
  WHOLE_BEFORE_NEXT   a file gets its `.wal` name only when every frame before it, and its own header, are
                      durable; it gets its first frame only when that name is. So only the newest file can
                      have a torn tail, and a later file's header proves all frames before its first lsn.
  ROOM_BEFORE_FRAMES  a log that `reserves` writes frames only where its file has room already: a full disk is
                      met when a file is made, before anything is in it.
  PROVEN_WHEN_QUIET   after `settle`, `mark` and `close` a marker or header proves every durable frame; after
                      a `settle` on a full disk, from the next file's header on.
  STATE               new, then scanned, then open, then closed; or failed, from anywhere.
  DURABLE_IS_LOGGED   what is durable is logged, and what is proven is durable: proven ≤ durable ≤ logged.
  ALIGNED             every frame begins at a multiple of eight, behind the header.
  WRITTEN_WHOLE       after an append the file ends where its last frame does.
  MARKER_KIND         no frame has the kind of a marker.
  ONE_SYNC            one thread syncs at a time.
  KEPT_OR_NOT         a file is part of the log or kept, never both for longer than its renaming takes.
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

#: How often a file that is being renamed is looked for again, and how long after each look.
_RENAME_LOOKS, _RENAME_LOOK_S = 5, 0.002


class PendingSync(NamedTuple):
    """A sync that goes on beside further appends: of which file, and up to which lsn."""

    handle: int
    lsn: int


class WalFile(NamedTuple):
    """One file of the log; it is empty when `last_lsn` is `first_lsn - 1`."""

    number: int
    first_lsn: int
    last_lsn: int


class Wal:
    def __init__(
        self, disk: DiskLike, directory: str, *, file_bytes: int = FILE_BYTES, reserves: bool = False
    ) -> None:
        """`reserves`: files have all their room from the start, and one spare outlives the process, so that a
        start on a full disk has a file to write to."""
        assert file_bytes > HEADER_BYTES + 2 * MARKER_BYTES, "ROOM_BEFORE_FRAMES"
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._reserves = reserves
        #: Asked when the disk has no room for the next frames. It waits a while and returns True to have the
        #: write made again, or False to have it fail.
        self.on_full: Callable[[OSError], bool] = lambda error: False
        #: Frames stop short of the end by one marker, so that `mark` always fits and the size stays the same.
        self._frames_end_max = file_bytes - MARKER_BYTES
        #: Asked when a file is released: True if a frame between these lsns is still wanted.
        self.must_retain: Callable[[int, int], bool] = lambda first_lsn, last_lsn: False
        self._scan = LogScan(disk, directory)
        self._files = self._scan.files
        #: Released files that are kept, by number.
        self._retained_files = self._scan.retained_files
        self._spares = Spares(disk, directory, file_bytes=file_bytes, reserves=reserves)
        self._current: LogFile | None = None
        self._handle = -1
        #: Held while the disk syncs. A sync that fails may not be repeated: the next one would succeed and
        #: prove nothing. So each waits for the one before, and for what became of it.
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
        """Whether durable frames stand in the newest file that nothing in it proves."""
        return self._current is not None and self._proven_lsn < self.durable_lsn

    def path_of(self, number: int) -> str:
        """For messages: where a file of this number is."""
        return path_of(self._directory, number)

    def files(self) -> list[WalFile]:
        """All files, oldest first; the last one is the newest, which cannot be released."""
        return [WalFile(file.number, file.first_lsn, file.last_lsn) for file in list(self._files.values())]

    def retained_files(self) -> list[WalFile]:
        """Files that were released and kept, oldest first."""
        return [
            WalFile(file.number, file.first_lsn, file.last_lsn)
            for file in list(self._retained_files.values())
        ]

    # Reading: scan_retained, scan, settle, read.

    @property
    def scanned_bytes(self) -> int:
        return self._scan.scanned_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that `scan` has to read."""
        return self._scan.total_bytes

    def scan_retained(self) -> Iterator[Frame]:
        """All frames of files that were released and kept. It comes before `scan`. A file ends at its first
        damaged frame; the caller finds out which frames are missing."""
        assert self._state == "new", "STATE"
        return self._scan.retained_frames()

    def scan(self, *, snapshot_lsn: int = 0) -> Iterator[Frame]:
        """All frames in order. Writes nothing; raises `Corrupt` where durable bytes are missing or changed.

        `snapshot_lsn` is the lsn up to which a snapshot stands in for the log: the log must begin no later
        than right after it and must not end before it.
        """
        assert self._state == "new", "STATE"
        self._state = "scanning"
        yield from self._scan.frames(snapshot_lsn)
        self.logged_lsn = self.durable_lsn = self._scan.last_lsn
        self._proven_lsn = self._scan.proven_lsn
        self._state = "scanned"

    def verify_closed(self) -> Iterator[Corrupt]:
        """What is wrong with the files that are not written any more, while another process writes the newest
        one."""
        return self._scan.verify_closed()

    def settle(self) -> None:
        """Make durable what the scan found, and nothing else: afterwards the log is open for `append`.

        A process that was killed leaves frames that are in the file but not on the disk; they have been
        scanned, so they are synced before anyone is shown them. A torn tail is cut off before a marker takes
        its place: were both done at once, a crash could keep the marker and the old frames behind it.
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
        """Write the marker behind what the scan found. False if a full disk has no block for it: then the
        header of the next file is the first proof, and until then damage may pass for a torn tail."""
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
        """Frames that nothing proves durable may stand in memory only: after a failed sync the kernel takes
        their pages for clean, and a later sync passes over them. Writing them again makes it look."""
        if self._proven_lsn < newest.last_lsn:
            # From the last frame that is proven, because a marker may stand between it and the next.
            proven_at = self._proven_lsn - newest.first_lsn
            offset = newest.offsets[proven_at] << 3 if proven_at >= 0 else HEADER_BYTES
            for at in range(offset, newest.end, len(ZEROS)):
                length = min(len(ZEROS), newest.end - at)
                self._disk.pwritev(handle, [self._disk.pread(handle, length, at)], at)

    def read(self, lsn: int) -> Frame:
        """One frame, checked again. Any thread may call this; its file must not be released meanwhile, unless
        it is kept."""
        for _ in range(_RENAME_LOOKS):
            try:
                return read_frame(self._disk, self._file_of(lsn), lsn)
            except FileNotFoundError:  # it is just getting another name
                time.sleep(_RENAME_LOOK_S)
        return read_frame(self._disk, self._file_of(lsn), lsn)

    def _file_of(self, lsn: int) -> LogFile:
        for file in reversed([*self._retained_files.values(), *self._files.values()]):
            if file.first_lsn <= lsn <= file.last_lsn:
                return file
        raise AssertionError(f"lsn {lsn} was released")

    # Writing: append, sync, mark, close. One thread.

    def append(self, frames: Sequence[FrameParts]) -> None:
        """Write frames in one go, into as many files as they need. They are logged, not durable."""
        self._refuse_unless_open()
        try:
            self._append(frames)
        except BaseException:
            self._state = "failed"
            raise

    def try_append(self, frames: Sequence[FrameParts]) -> bool:
        """Append frames for which there `has_room`, without waiting. False if the disk has no room for them
        after all; then nothing was logged."""
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
        """What can be written for certain: into the current file, and into those that are ready. Any thread
        may ask; it is right to within what is being written."""
        current = self._current
        current_room = 0 if current is None else max(0, self._frames_end_max - current.end)
        return current_room + len(self._spares) * (self._frames_end_max - HEADER_BYTES)

    @property
    def has_spare(self) -> bool:
        return bool(self._spares)

    def has_room(self, frames: int, size: int) -> bool:
        """Whether so many frames with so many bytes of content fit into the file that is being written."""
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
        """A sync that another thread is to make with `run_sync`, beside further appends, and that counts from
        `end_sync` on. None if all is durable. Like all but `run_sync` it belongs to the writing thread."""
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
        """Whether more is durable now."""
        assert pending_sync.lsn <= self.logged_lsn, "DURABLE_IS_LOGGED"
        is_further = pending_sync.lsn > self.durable_lsn
        self.durable_lsn = max(self.durable_lsn, pending_sync.lsn)
        return is_further

    def mark(self) -> None:
        """Leave proof, in the file itself, of all that is durable; for when nothing else is coming."""
        self._refuse_unless_open()
        try:
            self._sync()
            self._mark()
            assert self._proven_lsn == self.durable_lsn == self.logged_lsn, "PROVEN_WHEN_QUIET"
        except BaseException:
            self._state = "failed"
            raise

    def close(self) -> None:
        """Sync, leave proof, and let go."""
        if self._state == "open":
            self.mark()
        self.abandon()

    def abandon(self) -> None:
        """Let go without writing a byte: for after a failure."""
        if self._handle >= 0:
            self._close_handle()
        self._state = "closed"

    def _close_handle(self) -> None:
        with self._sync_lock:
            self._disk.close(self._handle)
            self._handle = -1

    def _refuse_unless_open(self) -> None:
        if self._state != "open":
            raise RuntimeError(f"{self!r} takes nothing: it must be scanned, settled and not have failed")

    def _append(self, frames: Sequence[FrameParts], *, waits: bool = True) -> None:
        buffers: list[Buffer] = []
        file = self._current
        offset = file.end if file is not None else self._file_bytes
        lsn = self.logged_lsn
        assert self._proven_lsn <= self.durable_lsn <= lsn, "DURABLE_IS_LOGGED"
        assert offset % 8 == 0 or file is None, "ALIGNED"
        proof = (
            encode_marker(file.number, lsn, self.durable_lsn)
            if file is not None and self.needs_marker
            else b""
        )
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
                proof = b""  # The new file's header says the same.
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

    # Files: rotate on the writing thread, prepare_next and release on another.

    def _when_there_is_room(self, work: Callable[[], T]) -> T:
        """Do something that a full disk refuses, again and again while `on_full` says so."""
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in NO_SPACE or not self.on_full(error):
                    raise

    def _rotate(self, *, first_lsn: int, frame_bytes: int) -> LogFile:
        """Begin the next file, with room for a frame of this size; see WHOLE_BEFORE_NEXT for the order of the
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
        """Have a file full of zeros ready: a sync over blocks that exist is several times faster. Without
        zeros it has only room for them: then its syncs are slower, but nothing is written twice."""
        self._refuse_unless_open()
        self._spares.prepare(zeros=zeros)

    def release(self, number: int) -> None:
        """Drop the oldest file, or keep it as a spare, or for frames in it that are wanted (`keeps`). It is
        durably gone from the log on return.

        Its content needs no wiping: see SEED_IS_NUMBER. A crash before the directory is synced may bring the
        file back, and then it is only the oldest file again.
        """
        self._refuse_unless_open()
        numbers = list(self._files)
        assert number == numbers[0] != numbers[-1], "CONTIGUOUS_NUMBER"
        assert number not in self._retained_files, "KEPT_OR_NOT"
        file = self._files[number]
        try:
            if self.must_retain(file.first_lsn, file.last_lsn):
                old, file.path = file.path, retained_path_of(self._directory, number)
                self._retained_files[number] = file  # first: a reader finds it in one of the two
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
        """Drop a file that was kept. May be asked twice."""
        self._refuse_unless_open()
        file = self._retained_files.pop(number, None)
        if file is not None:
            self._disk.unlink(file.path)
            self._disk.fsync_dir(self._directory)

    def _newest(self) -> LogFile:
        return list(self._files.values())[-1]
