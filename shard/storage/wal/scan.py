"""Reads a log back, and distinguishes a torn tail from damage. Read-only.

Writes that were not synced may reach the disk in any order, so a bad frame followed by good ones proves
nothing by itself. But a marker that says "durable up to D" was written after a sync that covered D. If the
frame of lsn e is bad, and a good marker after it or the header of a later file says D >= e, then durable
bytes have changed: `Corrupt`. Otherwise the bad frame and everything after it was never acknowledged, and
the log ends before it.

    good · good · marker(2) · good · ▒▒▒▒ · good              torn: lsn 4 was never durable
    good · good · marker(2) · good · ▒▒▒▒ · good · marker(5)  damage: lsn 4 was durable
    good · good · ▒▒▒▒  then a file that begins at lsn 5      damage: WHOLE_BEFORE_NEXT (`log.py`)

Invariants:
  CONTIGUOUS_LSN     frames carry first_lsn, first_lsn + 1, …, through all files, with no gap and no repeat.
  CONTIGUOUS_NUMBER  files carry n, n + 1, ….
  PROVEN_IS_FOUND    every frame that is proven durable was read: otherwise the log is `Corrupt`.
  SCANNED_ONCE       a log is scanned once, the retained files before the others.
  ALIGNED            frames begin and end at multiples of eight.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from shard.storage.files import Corrupt, DiskLike
from shard.storage.wal.format import (
    CHECKSUM_BYTES,
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    MARKER_KIND,
    U64,
    Frame,
    first_lsn_of,
    markers_after,
    number_of,
    path_of,
    retained_path_of,
)


class LogFile:
    """Positions in one file: its end, and the offset of each frame (in units of eight bytes)."""

    __slots__ = ("end", "first_lsn", "number", "offsets", "path")

    def __init__(self, number: int, path: str, first_lsn: int) -> None:
        self.number = number
        self.path = path
        self.first_lsn = first_lsn
        self.end = HEADER_BYTES
        self.offsets: array[int] = array("I")

    def __repr__(self) -> str:
        return f"<LogFile {self.path}: lsns {self.first_lsn} to {self.last_lsn}, {self.end} B>"

    @property
    def last_lsn(self) -> int:
        """The lsn of the last frame; `first_lsn - 1` while the file has no frame."""
        return self.first_lsn + len(self.offsets) - 1


class LogScan:
    """One pass over the files of a log."""

    def __init__(self, disk: DiskLike, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        #: Files scanned so far, by number.
        self.files: dict[int, LogFile] = {}
        #: Released files that are retained, by number.
        self.retained_files: dict[int, LogFile] = {}
        #: The greatest lsn that a marker or a header in the newest file proves durable.
        self.proven_lsn = 0
        self.scanned_bytes = 0
        self.total_bytes = 0

    def __repr__(self) -> str:
        return f"<LogScan {self._directory}: {self.scanned_bytes} of {self.total_bytes} B>"

    @property
    def last_lsn(self) -> int:
        """The lsn of the last frame; 0 if the log has no file."""
        return list(self.files.values())[-1].last_lsn if self.files else 0

    def retained_frames(self) -> Iterator[Frame]:
        """Yield all frames of released files that are retained. Call it before `frames`.

        A file ends at its first damaged frame; the caller finds out which frames are missing.
        """
        assert not self.files and not self.retained_files, "SCANNED_ONCE"
        for number in self._numbers(".held"):
            path = retained_path_of(self._directory, number)
            data = self._disk.read_all(path)
            file = LogFile(number, path, first_lsn_of(path, data, number))
            yield from self._frames_of(file, data)
            self.retained_files[number] = file
        self.proven_lsn = 0

    def frames(self, snapshot_lsn: int) -> Iterator[Frame]:
        """Yield all frames in order. Raises `Corrupt` where durable bytes are missing or changed.

        `snapshot_lsn` is the lsn of the snapshot that the log continues: the log must begin no later than
        right after it and must not end before it.
        """
        assert not self.files, "SCANNED_ONCE"
        numbers = self._numbers()
        self.total_bytes = sum(self._disk.size(path_of(self._directory, number)) for number in numbers)
        if not numbers and snapshot_lsn > 0:
            raise Corrupt(self._directory, 0, f"there is no log file, but a snapshot of lsn {snapshot_lsn}")
        previous: LogFile | None = None
        for number in numbers:
            data = self._disk.read_all(path_of(self._directory, number))
            file = self._open(number, data, previous, snapshot_lsn)
            yield from self._frames_of(file, data)
            self.scanned_bytes += len(data)
            previous = self.files[number] = file
        if previous is not None:
            self._refuse_damaged_tail(previous, data, snapshot_lsn)
            assert self.proven_lsn <= previous.last_lsn, "PROVEN_IS_FOUND"

    def verify_closed(self) -> Iterator[Corrupt]:
        """Yield the damage in completed files, while another process writes the newest one.

        The scan ends at the first damage. Files that are released meanwhile are skipped.
        """
        numbers = self._numbers()
        previous: LogFile | None = None
        for number in numbers:
            try:
                data = self._disk.read_all(path_of(self._directory, number))
            except FileNotFoundError:
                previous = None
                continue
            try:
                file = self._open(number, data, previous, snapshot_lsn=1 << 62)
                if number != numbers[-1]:
                    for _ in self._frames_of(file, data):
                        pass
            except Corrupt as damage:
                yield damage
                return
            previous = file

    def _numbers(self, ending: str = ".wal") -> list[int]:
        if not self._disk.exists(self._directory):
            return []
        numbers = (number_of(name, ending) for name in self._disk.listdir(self._directory))
        return sorted(number for number in numbers if number is not None)

    def _open(self, number: int, data: bytes, previous: LogFile | None, snapshot_lsn: int) -> LogFile:
        """Check a file's header, and that the file continues the one before it, or the snapshot."""
        path = path_of(self._directory, number)
        if previous is not None and number != previous.number + 1:
            raise Corrupt(
                path_of(self._directory, previous.number + 1), 0, f"the file is missing, {path} is there"
            )
        first_lsn = first_lsn_of(path, data, number)
        self.proven_lsn = first_lsn - 1
        if previous is None:
            if first_lsn > snapshot_lsn + 1:
                reason = f"the log begins at lsn {first_lsn}, the state before it ends at lsn {snapshot_lsn}"
                raise Corrupt(path, 0, f"{reason}; older files are missing")
        elif first_lsn != previous.last_lsn + 1:
            reason = f"the frame of lsn {previous.last_lsn + 1} is not valid"
            raise Corrupt(previous.path, previous.end, f"{reason}, and {path} begins at lsn {first_lsn}")
        assert previous is None or previous.number + 1 == number, "CONTIGUOUS_NUMBER"
        return LogFile(number, path, first_lsn)

    def _frames_of(self, file: LogFile, data: bytes) -> Iterator[Frame]:
        """Yield the good frames from the start; then set `file.end` to the offset of the first bad one."""
        number = file.number
        view = memoryview(data)
        remember = file.offsets.append
        unpack_head = FRAME_HEAD.unpack_from
        unpack_u64 = U64.unpack_from
        size = len(data)
        lsn = file.first_lsn
        offset = HEADER_BYTES
        while offset + FRAME_HEAD_BYTES + CHECKSUM_BYTES <= size:
            length, kind, version, _, frame_lsn = unpack_head(data, offset)
            start = offset + FRAME_HEAD_BYTES
            end = start + (length + 7 & ~7)
            if end + CHECKSUM_BYTES > size:
                break
            if xxh3_64_intdigest(view[offset:end], number) != unpack_u64(data, end)[0]:
                break
            if kind == MARKER_KIND:
                self.proven_lsn = unpack_u64(data, start + 8)[0]
            elif frame_lsn != lsn:
                # CONTIGUOUS_LSN: this server writes frames with consecutive lsns, and the checksum is right.
                raise Corrupt(file.path, offset, f"the frame is of lsn {frame_lsn}, lsn {lsn} was expected")
            else:
                remember(offset >> 3)
                yield Frame(kind, version, lsn, view[start : start + length], number, offset)
                lsn += 1
            offset = end + CHECKSUM_BYTES
        assert offset % 8 == 0 and offset >= HEADER_BYTES, "ALIGNED"
        assert file.last_lsn == lsn - 1, "CONTIGUOUS_LSN"
        file.end = offset

    def _refuse_damaged_tail(self, file: LogFile, data: bytes, snapshot_lsn: int) -> None:
        """Raise `Corrupt` if bytes after the newest file's last good frame were durable."""
        lost_lsn = file.last_lsn + 1
        claim = max((self.proven_lsn, *markers_after(data, file.end, file.number)))
        if claim >= lost_lsn:
            reason = f"the frame of lsn {lost_lsn} is not valid, but lsn {claim} was durable"
            raise Corrupt(file.path, file.end, reason)
        if snapshot_lsn >= lost_lsn:
            reason = f"the log ends at lsn {lost_lsn - 1}, before the snapshot of lsn {snapshot_lsn}"
            raise Corrupt(file.path, file.end, reason)


def read_frame(disk: DiskLike, file: LogFile, lsn: int) -> Frame:
    """Read one frame of a scanned or written file, and verify it again."""
    offset = file.offsets[lsn - file.first_lsn] << 3
    handle = disk.open(file.path, writable=False)
    try:
        head = disk.pread(handle, FRAME_HEAD_BYTES, offset)
        length = FRAME_HEAD.unpack(head)[0] if len(head) == FRAME_HEAD_BYTES else 0
        padded_length = length + 7 & ~7
        data = disk.pread(handle, FRAME_HEAD_BYTES + padded_length + CHECKSUM_BYTES, offset)
    finally:
        disk.close(handle)
    view = memoryview(data)
    is_whole = len(data) == FRAME_HEAD_BYTES + padded_length + CHECKSUM_BYTES
    body = view[:-CHECKSUM_BYTES]
    if not is_whole or xxh3_64_intdigest(body, file.number) != U64.unpack(view[-CHECKSUM_BYTES:])[0]:
        raise Corrupt(file.path, offset, f"the frame of lsn {lsn} is not valid")
    _, kind, version, _, frame_lsn = FRAME_HEAD.unpack_from(data)
    assert frame_lsn == lsn, "CONTIGUOUS_LSN: each offset was recorded with its frame"
    content = view[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + length]
    return Frame(kind, version, lsn, content, file.number, offset)
