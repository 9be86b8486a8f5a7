"""The write-ahead log of one shard: append, sync, rotate, scan, release. It knows files and positions only.

    wal/000000000007.wal      oldest file still needed
    wal/000000000008.wal      newest: the only one that is written
    wal/000000000003.spare    allocated, or an old file, waiting to become 000000000009.wal
    wal/000000000002.held     released, and kept for single frames in it that are still wanted

A file is one page of header, then frames, then whatever was there before (zeros, or an older file's frames).
All integers are little-endian; every frame begins at a multiple of eight.

    header   0         8         12        16        24          32           56          64        4096
             | magic   | version | 0       | number  | first lsn | 0 …        | xxh3_64   | 0 …     |
    frame    0         4      5         6      8     16                     16+length    …8        +8
             | length  | kind | version | 0    | lsn | content (opaque)     | zeros      | xxh3_64 |
    marker   a frame of kind 0; its lsn is the last one before it; its content is
             | magic xor number (8) | durable lsn when it was written (8) |

`length` counts the content alone. A checksum covers all before it; its seed is the file's number.

How a torn tail is told from damage. Writes that were not synced may reach the disk in any order, so a bad
frame followed by good ones proves nothing by itself. But a marker that says "durable up to D" was written
after a sync which covered D: when the frame that should carry lsn e is bad and any good marker behind it, or
the header of a later file, says D >= e, then bytes that were durable have changed, and that is `Corrupt`.
Otherwise the bad frame and all behind it were never promised to anyone, and the log ends before it.

Rules of the file:
  1. `scan` only reads. `settle` makes its verdict durable and must come before the first `append`.
  2. Nothing is written behind an old tail: it is cut off durably, and new frames begin a new file.
  3. After a failed write or sync nothing is written, synced or promised again by this object. A write for
     which the disk has no room is not one of these while `on_full` waits for room: it has changed nothing
     that counts, and is made again.
  4. A payload is never copied, unless it is so small that a copy is cheaper than one more buffer.
  5. One thread at a time appends and syncs; `run_sync` alone may run beside it. `prepare_next` and `release`
     may run on one other thread; what they share is a deque of spares and a dict of files, each changed by
     single steps.

Invariants:
  contiguous-lsn     frames carry first_lsn, first_lsn + 1, …, through all files, with no gap and no repeat.
  contiguous-number  files carry n, n + 1, …; only the oldest may be released, the newest never. Those that
                     are kept after that are no part of the log any more.
  whole-before-next  a file gets its `.wal` name only when every frame before it, and its own header, are
                     durable; it gets its first frame only when that name is. So only the newest file can
                     have a torn tail, and a later file's header proves all frames before its first lsn.
  seed-is-number     a frame verifies in the file it was written for and in no other, so the remains of an
                     older file in a recycled one are never frames. Numbers of a directory only grow.
  room-before-frames a log that `reserves` writes frames only where its file has room already: a full disk is
                     met when a file is made, before anything is in it.
  proven-when-quiet  after `settle`, `mark` and `close` a marker or header proves every durable frame; after a
                     `settle` on a full disk, from the next file's header on.
"""

from __future__ import annotations

import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import NO_SPACE, Buffer, Corrupt, DiskLike, parent_of

#: (kind, version, lsn, the parts of the content): a frame on its way to the file.
FrameParts = tuple[int, int, int, Sequence[Buffer]]

T = TypeVar("T")

FORMAT_VERSION = 1
FILE_BYTES = 64 << 20
#: The header has a page to itself, so that no later write touches the bytes that name the file.
HEADER_BYTES = 4096
#: One spare to rotate into while the next is being made.
SPARES_MAX = 2

_FILE_HEAD = struct.Struct("<8sIIQQ24x")
FRAME_HEAD = struct.Struct("<IBBHQ")
_MARKER = struct.Struct("<IBBHQQQ")
U64 = struct.Struct("<Q")
_FILE_MAGIC = b"streams\x57"
#: No meaning; only unlikely to stand in a payload by chance.
MARKER_MAGIC = 0x9D5C_E6F1_2B8A_73C7

MARKER_KIND = 0
FRAME_HEAD_BYTES = FRAME_HEAD.size
CHECKSUM_BYTES = U64.size
_MARKER_BYTES = _MARKER.size + CHECKSUM_BYTES
_PADDING = tuple(bytes(-length % 8) for length in range(8))

#: Frames up to this size are joined into one buffer: the copy costs less than three more buffers do.
_JOIN_BYTES_MAX = 4096
#: How often a file that is being renamed is looked for again, and how long after each look.
_RENAME_LOOKS, _RENAME_LOOK_S = 5, 0.002
#: Zeros are written and synced in steps of this size, so that a commit never queues behind a whole file.
_ZEROS = bytes(4 << 20)

assert _FILE_HEAD.size + CHECKSUM_BYTES == 64 <= HEADER_BYTES
assert FRAME_HEAD_BYTES % 8 == 0 and HEADER_BYTES % 8 == 0 and _MARKER_BYTES == 40


class Frame(NamedTuple):
    """A frame as it was found. `content` is a view into its whole file: copy what must outlive the scan."""

    kind: int
    version: int
    lsn: int
    content: memoryview
    file: int
    offset: int


class Syncing(NamedTuple):
    """A sync that goes on beside further appends: of which file, and up to which lsn."""

    handle: int
    lsn: int


class WalFile(NamedTuple):
    """One file of the log; it is empty when `last_lsn` is `first_lsn - 1`."""

    number: int
    first_lsn: int
    last_lsn: int


class _File:
    """What is remembered of a file: where it ends, and where each frame begins (in units of eight bytes)."""

    __slots__ = ("end", "first_lsn", "number", "offsets", "path")

    def __init__(self, number: int, path: str, first_lsn: int) -> None:
        self.number = number
        self.path = path
        self.first_lsn = first_lsn
        self.end = HEADER_BYTES
        self.offsets: array[int] = array("I")

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + len(self.offsets) - 1


class Wal:
    def __init__(
        self, disk: DiskLike, directory: str, *, file_bytes: int = FILE_BYTES, reserves: bool = False
    ) -> None:
        """`reserves`: files have all their room from the start, and one spare outlives the process, so that a
        start on a full disk has a file to write to."""
        assert file_bytes > HEADER_BYTES + 2 * _MARKER_BYTES
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._reserves = reserves
        #: Asked when the disk has no room for the next frames. It waits a while and returns True to have the
        #: write made again, or False to have it fail.
        self.on_full: Callable[[OSError], bool] = lambda error: False
        #: Frames stop short of the end by one marker, so that `mark` always fits and the size stays the same.
        self._frames_end_max = file_bytes - _MARKER_BYTES
        #: Asked when a file is released: True if a frame between these lsns is still wanted.
        self.keeps: Callable[[int, int], bool] = lambda first_lsn, last_lsn: False
        self._files: dict[int, _File] = {}
        #: Released files that are kept, by number.
        self._kept: dict[int, _File] = {}
        self._spares: deque[str] = deque()
        self._spare_names = count(1)
        self._current: _File | None = None
        self._handle = -1
        #: Held while the disk syncs. A sync that fails may not be repeated: the next one would succeed and
        #: prove nothing. So each waits for the one before, and for what became of it.
        self._syncing = threading.Lock()
        self._state = "new"  # -> scanned -> open -> closed, or failed from anywhere
        #: The greatest lsn that a marker or a header in the newest file proves durable.
        self._proven_lsn = 0
        self.logged_lsn = 0
        self.durable_lsn = 0
        self.bytes_written = 0
        self.rotations = 0
        self.scanned_bytes = 0
        self.total_bytes = 0

    def __repr__(self) -> str:
        return (
            f"<Wal {self._directory} {self._state}: {len(self._files)} files, logged {self.logged_lsn}, "
            f"durable {self.durable_lsn}>"
        )

    @property
    def mark_due(self) -> bool:
        """Whether durable frames stand in the newest file that nothing in it proves."""
        return self._current is not None and self._proven_lsn < self.durable_lsn

    def path_of(self, number: int) -> str:
        """For messages: where a file of this number is."""
        return self._path(number)

    def files(self) -> list[WalFile]:
        """All files, oldest first; the last one is the newest, which cannot be released."""
        return [WalFile(file.number, file.first_lsn, file.last_lsn) for file in list(self._files.values())]

    def kept_files(self) -> list[WalFile]:
        """Files that were released and kept, oldest first."""
        return [WalFile(file.number, file.first_lsn, file.last_lsn) for file in list(self._kept.values())]

    # Reading: scan_kept, scan, settle, read.

    def scan_kept(self) -> Iterator[Frame]:
        """All frames of files that were released and kept. It comes before `scan`, and only reads. A file
        ends at its first damaged frame; the caller finds out which frames are missing."""
        assert self._state == "new", self._state
        for number in self._numbers(".held"):
            path = kept_path_of(self._directory, number)
            data = self._disk.read_all(path)
            file = _File(number, path, first_lsn_of(path, data, number))
            yield from self._scan_frames(file, data)
            self._kept[number] = file
        self._proven_lsn = 0

    def scan(self, *, snapshot_lsn: int = 0) -> Iterator[Frame]:
        """All frames in order. Writes nothing; raises `Corrupt` where durable bytes are missing or changed.

        `snapshot_lsn` is the lsn up to which a snapshot stands in for the log: the log must begin no later
        than right after it and must not end before it.
        """
        assert self._state == "new", self._state
        self._state = "scanning"
        numbers = self._numbers()
        self.total_bytes = sum(self._disk.size(self._path(number)) for number in numbers)
        if not numbers and snapshot_lsn > 0:
            raise Corrupt(self._directory, 0, f"there is no log file, but a snapshot of lsn {snapshot_lsn}")
        previous: _File | None = None
        for number in numbers:
            data = self._disk.read_all(self._path(number))
            file = self._open_scanned(number, data, previous, snapshot_lsn)
            yield from self._scan_frames(file, data)
            self.scanned_bytes += len(data)
            previous = self._files[number] = file
        if previous is not None:
            self._refuse_damaged_tail(previous, data, snapshot_lsn)
            self.logged_lsn = self.durable_lsn = previous.last_lsn
        self._state = "scanned"

    def _numbers(self, ending: str = ".wal") -> list[int]:
        if not self._disk.exists(self._directory):
            return []
        numbers = (number_of(name, ending) for name in self._disk.listdir(self._directory))
        return sorted(number for number in numbers if number is not None)

    def _open_scanned(self, number: int, data: bytes, previous: _File | None, snapshot_lsn: int) -> _File:
        """Check a file's header, and that it continues the one before it, or the snapshot."""
        path = self._path(number)
        if previous is not None and number != previous.number + 1:
            raise Corrupt(self._path(previous.number + 1), 0, f"the file is missing, {path} is there")
        first_lsn = first_lsn_of(path, data, number)
        self._proven_lsn = first_lsn - 1
        if previous is None:
            if first_lsn > snapshot_lsn + 1:
                reason = f"the log begins at lsn {first_lsn}, the state before it ends at lsn {snapshot_lsn}"
                raise Corrupt(path, 0, f"{reason}; older files are missing")
        elif first_lsn != previous.last_lsn + 1:
            reason = f"the frame of lsn {previous.last_lsn + 1} is not valid"
            raise Corrupt(previous.path, previous.end, f"{reason}, and {path} begins at lsn {first_lsn}")
        return _File(number, path, first_lsn)

    def _scan_frames(self, file: _File, data: bytes) -> Iterator[Frame]:
        """The good frames from the start; afterwards `file.end` is where the first bad one would be."""
        number = file.number
        view = memoryview(data)
        remember = file.offsets.append
        unpack_head = FRAME_HEAD.unpack_from
        unpack_u64 = U64.unpack_from
        size = len(data)
        lsn = file.first_lsn
        offset = HEADER_BYTES
        while offset + FRAME_HEAD_BYTES + CHECKSUM_BYTES <= size:
            length, kind, version, _, found_lsn = unpack_head(data, offset)
            start = offset + FRAME_HEAD_BYTES
            end = start + (length + 7 & ~7)
            if end + CHECKSUM_BYTES > size:
                break
            if xxh3_64_intdigest(view[offset:end], number) != unpack_u64(data, end)[0]:
                break
            if kind == MARKER_KIND:
                self._proven_lsn = unpack_u64(data, start + 8)[0]
            elif found_lsn != lsn:
                # contiguous-lsn: a frame with a good checksum was written here, by us, with the next lsn.
                raise Corrupt(file.path, offset, f"the frame is of lsn {found_lsn}, lsn {lsn} was expected")
            else:
                remember(offset >> 3)
                yield Frame(kind, version, lsn, view[start : start + length], number, offset)
                lsn += 1
            offset = end + CHECKSUM_BYTES
        file.end = offset

    def _refuse_damaged_tail(self, file: _File, data: bytes, snapshot_lsn: int) -> None:
        """Raise `Corrupt` if what comes after the newest file's last good frame was once durable."""
        lost_lsn = file.last_lsn + 1
        claim = max((self._proven_lsn, *_markers_after(data, file.end, file.number)))
        if claim >= lost_lsn:
            reason = f"the frame of lsn {lost_lsn} is not valid, but lsn {claim} was durable"
            raise Corrupt(file.path, file.end, reason)
        if snapshot_lsn >= lost_lsn:
            reason = f"the log ends at lsn {lost_lsn - 1}, before the snapshot of lsn {snapshot_lsn}"
            raise Corrupt(file.path, file.end, reason)

    def verify_closed(self) -> Iterator[Corrupt]:
        """What is wrong with the files that are not written any more, while another process writes the newest
        one. The first damage hides the rest. Files that are released meanwhile are passed over."""
        numbers = self._numbers()
        previous: _File | None = None
        for number in numbers:
            try:
                data = self._disk.read_all(self._path(number))
            except FileNotFoundError:
                previous = None
                continue
            try:
                file = self._open_scanned(number, data, previous, snapshot_lsn=1 << 62)
                if number != numbers[-1]:
                    for _ in self._scan_frames(file, data):
                        pass
            except Corrupt as damage:
                yield damage
                return
            previous = file

    def settle(self) -> None:
        """Make durable what the scan found, and nothing else: afterwards the log is open for `append`.

        A process that was killed leaves frames that are in the file but not on the disk; they have been
        scanned, so they are synced before anyone is shown them. A torn tail is cut off before a marker takes
        its place: were both done at once, a crash could keep the marker and the old frames behind it.
        """
        assert self._state == "scanned", self._state
        self._state = "failed"  # until the last line below
        disk = self._disk
        disk.mkdir(self._directory)
        disk.fsync_dir(parent_of(self._directory))
        self._settle_spares()
        if self._files:
            newest = self._newest()
            handle = disk.open(newest.path, writable=True)
            self._write_again(handle, newest)
            disk.truncate(handle, newest.end)
            disk.fsync(handle)
            if self._proven_lsn < newest.last_lsn and self._mark_settled(handle, newest):
                disk.fdatasync(handle)
                newest.end += _MARKER_BYTES
            disk.close(handle)
        disk.fsync_dir(self._directory)
        self._proven_lsn = self.logged_lsn
        self._state = "open"

    def _settle_spares(self) -> None:
        """Drop the spares of the process before, all but one that is whole if this log `reserves`."""
        for name in self._disk.listdir(self._directory):
            if not name.endswith(".spare"):
                continue
            path = f"{self._directory}/{name}"
            if self._reserves and not self._spares and self._disk.size(path) == self._file_bytes:
                self._spares.append(path)
                self._spare_names = count(int(name.partition(".")[0]) + 1)
            else:
                self._disk.unlink(path)

    def _mark_settled(self, handle: int, newest: _File) -> bool:
        """Write the marker behind what the scan found. False if a full disk has no block for it: then the
        header of the next file is the first proof, and until then damage may pass for a torn tail."""
        marker = [_marker(newest.number, newest.last_lsn, newest.last_lsn)]
        try:
            self._disk.pwritev(handle, marker, newest.end)
        except OSError as error:
            if error.errno not in NO_SPACE or not self._reserves:
                raise
            self._disk.truncate(handle, newest.end)
            return False
        return True

    def _write_again(self, handle: int, newest: _File) -> None:
        """Frames that nothing proves durable may stand in memory only: after a failed sync the kernel takes
        their pages for clean, and a later sync passes over them. Writing them again makes it look."""
        if self._proven_lsn < newest.last_lsn:
            # From the last frame that is proven, because a marker may stand between it and the next.
            proven = self._proven_lsn - newest.first_lsn
            offset = newest.offsets[proven] << 3 if proven >= 0 else HEADER_BYTES
            for at in range(offset, newest.end, len(_ZEROS)):
                length = min(len(_ZEROS), newest.end - at)
                self._disk.pwritev(handle, [self._disk.pread(handle, length, at)], at)

    def read(self, lsn: int) -> Frame:
        """One frame, checked again. Any thread may call this; its file must not be released meanwhile, unless
        it is kept."""
        for _ in range(_RENAME_LOOKS):
            try:
                return self._read(self._file_of(lsn), lsn)
            except FileNotFoundError:  # it is just getting another name
                time.sleep(_RENAME_LOOK_S)
        return self._read(self._file_of(lsn), lsn)

    def _file_of(self, lsn: int) -> _File:
        for file in reversed([*self._kept.values(), *self._files.values()]):
            if file.first_lsn <= lsn <= file.last_lsn:
                return file
        raise AssertionError(f"lsn {lsn} was released")

    def _read(self, file: _File, lsn: int) -> Frame:
        offset = file.offsets[lsn - file.first_lsn] << 3
        handle = self._disk.open(file.path, writable=False)
        try:
            head = self._disk.pread(handle, FRAME_HEAD_BYTES, offset)
            length = FRAME_HEAD.unpack(head)[0] if len(head) == FRAME_HEAD_BYTES else 0
            padded = length + 7 & ~7
            data = self._disk.pread(handle, FRAME_HEAD_BYTES + padded + CHECKSUM_BYTES, offset)
        finally:
            self._disk.close(handle)
        view = memoryview(data)
        whole = len(data) == FRAME_HEAD_BYTES + padded + CHECKSUM_BYTES
        body = view[:-CHECKSUM_BYTES]
        if not whole or xxh3_64_intdigest(body, file.number) != U64.unpack(view[-CHECKSUM_BYTES:])[0]:
            raise Corrupt(file.path, offset, f"the frame of lsn {lsn} is not valid")
        _, kind, version, _, found_lsn = FRAME_HEAD.unpack_from(data)
        assert found_lsn == lsn, "contiguous-lsn: the offsets were taken down as the frames were"
        content = view[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + length]
        return Frame(kind, version, lsn, content, file.number, offset)

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
        assert file is not None, "it has room"
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
        left = 0 if current is None else max(0, self._frames_end_max - current.end)
        return left + len(self._spares) * (self._frames_end_max - HEADER_BYTES)

    @property
    def has_spare(self) -> bool:
        return bool(self._spares)

    def has_room(self, frames: int, size: int) -> bool:
        """Whether so many frames with so many bytes of content fit into the file that is being written."""
        if self._current is None:
            return False
        most = size + (frames + 1) * (FRAME_HEAD_BYTES + 8 + CHECKSUM_BYTES) + _MARKER_BYTES
        return self._current.end + most <= self._frames_end_max

    def sync(self) -> None:
        """Make everything logged durable."""
        self._refuse_unless_open()
        try:
            self._sync()
        except BaseException:
            self._state = "failed"
            raise

    def begin_sync(self) -> Syncing | None:
        """A sync that another thread is to make with `run_sync`, beside further appends, and that counts from
        `end_sync` on. None if all is durable. Like all but `run_sync` it belongs to the writing thread."""
        self._refuse_unless_open()
        if self.durable_lsn == self.logged_lsn:
            return None
        self._syncing.acquire()
        return Syncing(self._handle, self.logged_lsn)

    def run_sync(self, syncing: Syncing) -> None:
        try:
            self._disk.fdatasync(syncing.handle)
        except BaseException:
            self._state = "failed"
            raise
        finally:
            self._syncing.release()

    def end_sync(self, syncing: Syncing) -> bool:
        """Whether more is durable now."""
        grown = syncing.lsn > self.durable_lsn
        self.durable_lsn = max(self.durable_lsn, syncing.lsn)
        return grown

    def mark(self) -> None:
        """Leave proof, in the file itself, of all that is durable; for when nothing else is coming."""
        self._refuse_unless_open()
        try:
            self._sync()
            self._mark()
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
        with self._syncing:
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
        marker = _marker(file.number, lsn, self.durable_lsn) if file is not None and self.mark_due else b""
        for kind, version, frame_lsn, parts in frames:
            lsn += 1
            assert frame_lsn == lsn, f"contiguous-lsn: got {frame_lsn}, {lsn} is next"
            assert kind != MARKER_KIND
            length = sum(map(len, parts))
            size = FRAME_HEAD_BYTES + (length + 7 & ~7) + CHECKSUM_BYTES
            end = offset + len(marker) + size
            if file is None or (end > self._frames_end_max and offset > HEADER_BYTES):
                self._write(buffers, waits=waits)
                buffers = []
                file = self._rotate(first_lsn=lsn, frame_bytes=size)
                offset = HEADER_BYTES
                marker = b""  # The new file's header says the same.
            if marker:
                buffers.append(marker)
                offset += len(marker)
                marker = b""
                self._proven_lsn = self.durable_lsn
            file.offsets.append(offset >> 3)
            _encode(buffers, file.number, kind, version, lsn, length, parts)
            offset += size
            self.logged_lsn = lsn
        self._write(buffers, waits=waits)
        assert file is None or file.end == offset

    def _write(self, buffers: list[Buffer], *, waits: bool = True) -> None:
        if buffers:
            assert self._current is not None
            at = self._current.end
            write = partial(self._disk.pwritev, self._handle, buffers, at)
            written = self._when_there_is_room(write) if waits else write()
            self._current.end += written
            self.bytes_written += written

    def _sync(self) -> None:
        if self.durable_lsn < self.logged_lsn:
            self._sync_file()
            self.durable_lsn = self.logged_lsn

    def _sync_file(self) -> None:
        with self._syncing:
            self._refuse_unless_open()
            self._disk.fdatasync(self._handle)

    def _mark(self) -> None:
        if self.mark_due:
            assert self._current is not None
            self._write([_marker(self._current.number, self.logged_lsn, self.durable_lsn)])
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

    def _rotate(self, *, first_lsn: int, frame_bytes: int) -> _File:
        """Begin the next file, with room for a frame of this size; see whole-before-next for the order of the
        steps."""
        disk = self._disk
        self._sync()
        if self._handle >= 0:
            self._close_handle()
        number = self._newest().number + 1 if self._files else 1
        try:
            spare = self._spares.popleft()
        except IndexError:
            # The spare is not ready. One without zeros will do: its syncs are slower, but nobody waits long.
            spare = self._when_there_is_room(partial(self._create_spare, zeros=False))
        file = _File(number, self._path(number), first_lsn)
        handle = disk.open(spare, writable=True)
        self._handle = handle
        if self._reserves and HEADER_BYTES + frame_bytes > self._frames_end_max:
            whole = HEADER_BYTES + frame_bytes + _MARKER_BYTES
            self._when_there_is_room(partial(disk.allocate, handle, whole))
        header: list[Buffer] = [_header(number, first_lsn)]
        self._when_there_is_room(partial(disk.pwritev, handle, header, 0))
        disk.fdatasync(handle)
        disk.rename(spare, file.path)
        disk.fsync_dir(self._directory)
        assert self.durable_lsn == first_lsn - 1, "whole-before-next: all before this file was synced above"
        self._proven_lsn = first_lsn - 1
        self._files[number] = self._current = file
        self.rotations += 1
        return file

    def prepare_next(self, *, zeros: bool = True) -> None:
        """Have a file full of zeros ready: a sync over blocks that exist is several times faster. Without
        zeros it has only room for them: then its syncs are slower, but nothing is written twice."""
        self._refuse_unless_open()
        if not self._spares:
            self._spares.append(self._create_spare(zeros=zeros))

    def _create_spare(self, *, zeros: bool) -> str:
        path = f"{self._directory}/{next(self._spare_names):012d}.spare"
        size = self._file_bytes if zeros else 0
        handle = self._disk.create(path)
        try:
            if self._reserves and not zeros:
                self._disk.allocate(handle, self._file_bytes)
            for offset in range(0, size, len(_ZEROS)):
                self._disk.pwritev(handle, [memoryview(_ZEROS)[: size - offset]], offset)
                self._disk.fdatasync(handle)
            self._disk.fsync(handle)
        except OSError:
            # Most likely the disk is full. What is half done goes; the caller says what to do without it.
            self._disk.unlink(path)
            raise
        finally:
            self._disk.close(handle)
        return path

    def release(self, number: int) -> None:
        """Drop the oldest file, or keep it as a spare, or for frames in it that are wanted (`keeps`). It is
        durably gone from the log on return.

        Its content needs no wiping: see seed-is-number. A crash before the directory is synced may bring the
        file back, and then it is only the oldest file again.
        """
        self._refuse_unless_open()
        numbers = list(self._files)
        assert number == numbers[0] != numbers[-1], "contiguous-number"
        file = self._files[number]
        try:
            if self.keeps(file.first_lsn, file.last_lsn):
                old, file.path = file.path, kept_path_of(self._directory, number)
                self._kept[number] = file  # before it is gone from the others: whoever looks finds it
                self._disk.rename(old, file.path)
                self._disk.fsync_dir(self._directory)
                del self._files[number]
            else:
                del self._files[number]
                self._drop(file.path)
        except BaseException:
            self._state = "failed"
            raise

    def drop_kept(self, number: int) -> None:
        """Drop a file that was kept. May be asked twice."""
        self._refuse_unless_open()
        file = self._kept.pop(number, None)
        if file is not None:
            self._disk.unlink(file.path)
            self._disk.fsync_dir(self._directory)

    def _drop(self, path: str) -> None:
        # One that began empty ends a little short of the full size, and is as good as a full one, unless
        # there must be room for all that a file can take.
        least = self._file_bytes if self._reserves else self._file_bytes // 2
        if len(self._spares) < SPARES_MAX and least <= self._disk.size(path) <= self._file_bytes:
            spare = f"{self._directory}/{next(self._spare_names):012d}.spare"
            self._disk.rename(path, spare)
            self._disk.fsync_dir(self._directory)
            self._spares.append(spare)
        else:
            self._disk.unlink(path)
            self._disk.fsync_dir(self._directory)

    def _newest(self) -> _File:
        return list(self._files.values())[-1]

    def _path(self, number: int) -> str:
        return path_of(self._directory, number)


def path_of(directory: str, number: int) -> str:
    return f"{directory}/{number:012d}.wal"


def kept_path_of(directory: str, number: int) -> str:
    return f"{directory}/{number:012d}.held"


def number_of(name: str, ending: str = ".wal") -> int | None:
    """The number of the log file of this name, if it is the name of one."""
    stem = name.removesuffix(ending)
    return int(stem) if stem != name and stem.isdigit() else None


def _encode(
    buffers: list[Buffer],
    number: int,
    kind: int,
    version: int,
    lsn: int,
    length: int,
    parts: Sequence[Buffer],
) -> None:
    """Add a frame's buffers. The padding's length and the head follow from `length`, the sum of the parts."""
    head = FRAME_HEAD.pack(length, kind, version, 0, lsn)
    padding = _PADDING[length & 7]
    if length <= _JOIN_BYTES_MAX:
        body = b"".join((head, *parts, padding))
        buffers.append(body + U64.pack(xxh3_64_intdigest(body, number)))
        return
    checksum = xxh3_64(head, seed=number)
    buffers.append(head)
    for part in parts:
        checksum.update(part)
        buffers.append(part)
    checksum.update(padding)
    buffers.append(padding + U64.pack(checksum.intdigest()))


def _header(number: int, first_lsn: int) -> bytes:
    head = _FILE_HEAD.pack(_FILE_MAGIC, FORMAT_VERSION, 0, number, first_lsn)
    return (head + U64.pack(xxh3_64_intdigest(head, number))).ljust(HEADER_BYTES, b"\0")


def first_lsn_of(path: str, data: bytes, number: int) -> int:
    """The first lsn of a file, if its header is that of file `number`. See whole-before-next: it must be."""
    head = data[: _FILE_HEAD.size]
    if len(data) < HEADER_BYTES or xxh3_64_intdigest(head, number) != U64.unpack_from(data, len(head))[0]:
        raise Corrupt(path, 0, "the file's header is not valid")
    magic, version, _, found_number, first_lsn = _FILE_HEAD.unpack(head)
    if magic != _FILE_MAGIC or found_number != number:
        raise Corrupt(path, 0, f"the header is that of file {found_number}")
    if version != FORMAT_VERSION:
        raise Corrupt(path, 0, f"the file is of format {version}, this server reads {FORMAT_VERSION}")
    return int(first_lsn)


def _marker(number: int, lsn: int, durable_lsn: int) -> bytes:
    body = _MARKER.pack(16, MARKER_KIND, FORMAT_VERSION, 0, lsn, MARKER_MAGIC ^ number, durable_lsn)
    return body + U64.pack(xxh3_64_intdigest(body, number))


def _markers_after(data: bytes, offset: int, number: int) -> Iterator[int]:
    """What the good markers behind `offset` claim is durable. The magic makes this a search, not a parse."""
    magic = U64.pack(MARKER_MAGIC ^ number)
    found = data.find(magic, offset)
    while found >= 0:
        start = found - FRAME_HEAD_BYTES
        body = data[start : start + _MARKER.size]
        checksum = data[start + _MARKER.size : start + _MARKER_BYTES]
        if start >= offset and start % 8 == 0 and checksum == U64.pack(xxh3_64_intdigest(body, number)):
            yield _MARKER.unpack(body)[-1]
        found = data.find(magic, found + 1)
