"""Reads a damaged log: every frame that is whole, and where others were. It only reads.

    good · good · ▒▒▒▒▒▒▒▒▒ · good · good ─► Frame, Frame, Gap, Frame, Frame

`Wal.scan` refuses a log of which durable bytes have changed; this goes on behind them. A frame counts only if
its checksum does, and its seed is the file's number, so what is found behind damage was written there, by us.

Rules of the file
- A gap is told only where something is missing: a frame behind it has a later lsn than the next one, or a
  marker or a later file proves that there was more. What was not synced and is torn is no gap.
- What may have stood in a gap is a guess (`Gap.guess`), never a frame.
- What the disk cannot give back is as good as zeros: the frames around it count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from shard.storage.files import Corrupt, DiskLike, read_around
from shard.storage.wal import (
    CHECKSUM_BYTES,
    FRAME_HEAD,
    HEADER_BYTES,
    MARKER_KIND,
    MARKER_MAGIC,
    U64,
    Frame,
    first_lsn_of,
    number_of,
    path_of,
)

#: Frames are looked for at every multiple of this.
_STEP = 8
#: A lsn that is further ahead than this is no lsn: a file of 1 GiB holds fewer frames.
_LSNS_MAX = 1 << 26
_KINDS_MAX = 128
_FILE_BYTES_MAX = 1 << 30


class Gap(NamedTuple):
    """Where frames first_lsn..last_lsn should be. `last_lsn` is 0 when nobody knows how many there were."""

    path: str
    offset: int
    bytes: int
    first_lsn: int
    last_lsn: int
    reason: str
    #: What the bytes say that stood there, if they say anything: unverified.
    guess: Frame | None = None


class _Found(NamedTuple):
    frame: Frame
    end: int


class _Newest(NamedTuple):
    path: str
    number: int
    data: bytes


def salvage(disk: DiskLike, directory: str) -> Iterator[Frame | Gap]:
    """All that is whole, in order."""
    numbers = sorted(
        number
        for name in (disk.listdir(directory) if disk.exists(directory) else ())
        if (number := number_of(name)) is not None
    )
    newest: _Newest | None = None
    next_lsn = proven = 0
    end = (directory, 0)
    for number in numbers:
        path = path_of(directory, number)
        data = read_around(disk, path)
        try:
            first_lsn = first_lsn_of(path, data, number)
            proven = max(proven, first_lsn - 1)
            if next_lsn and first_lsn > next_lsn:
                # They are missing from the end of the file before, or a file between is. How many bytes they
                # had is not known.
                yield Gap(*end, _FILE_BYTES_MAX, next_lsn, first_lsn - 1, f"frames before {path} are missing")
                next_lsn = first_lsn
            next_lsn = next_lsn or first_lsn
        except Corrupt as damage:
            # Its number is its name's, and the lsns are in its frames: nothing is lost by this alone.
            if not next_lsn:
                yield Gap(path, 0, HEADER_BYTES, 0, 0, damage.reason)
        bad_at: int | None = None
        for found in _frames(path, data, number, next_lsn):
            if isinstance(found, int):
                bad_at = found if bad_at is None else bad_at
                continue
            frame = found.frame
            if frame.kind == MARKER_KIND:
                proven = max(proven, U64.unpack_from(frame.content, 8)[0])
                continue
            if next_lsn and frame.lsn != next_lsn:
                at = frame.offset if bad_at is None else bad_at
                guess = _guess(data, at, number, next_lsn, until=frame.offset)
                reason = f"the frame of lsn {next_lsn} is not valid"
                yield Gap(path, at, frame.offset - at, next_lsn, frame.lsn - 1, reason, guess)
            yield frame
            next_lsn = frame.lsn + 1
            bad_at = None
            end = (path, found.end)
        if bad_at is not None:
            end = (path, bad_at)
        newest = _Newest(path, number, data)
    if newest is not None and proven >= next_lsn:
        path, offset = end
        reason = f"the frame of lsn {next_lsn} is not valid, but lsn {proven} was durable"
        if path == newest.path:
            left = max(0, len(newest.data.rstrip(b"\0")) - offset)
            guess = _guess(newest.data, offset, newest.number, next_lsn, until=None)
            yield Gap(path, offset, left, next_lsn, proven, reason, guess)
        else:
            yield Gap(path, offset, len(newest.data), next_lsn, proven, reason)


def frames_of(disk: DiskLike, path: str) -> Iterator[Frame | int]:
    """Frames of one file that are whole, markers left out, and offsets at which one is missing. Behind the
    last one there is nothing, unless a marker or the next file proves that there was more."""
    directory, _, name = path.rpartition("/")
    number = number_of(name)
    if number is None:
        raise Corrupt(path, 0, "a log file is named by its number")
    # Looked at before: a server may fill this file and begin the next one while it is read.
    proven = _proven_by(disk, path_of(directory or ".", number + 1), number + 1)
    data = read_around(disk, path)
    next_lsn = first_lsn_of(path, data, number)
    bad_at: int | None = None
    for found in _frames(path, data, number, next_lsn):
        if isinstance(found, int):
            bad_at = found if bad_at is None else bad_at
        elif found.frame.kind == MARKER_KIND:
            proven = max(proven, U64.unpack_from(found.frame.content, 8)[0])
        else:
            if bad_at is not None:
                yield bad_at
            bad_at = None
            yield found.frame
            next_lsn = found.frame.lsn + 1
    if bad_at is not None and proven >= next_lsn:
        yield bad_at


def _proven_by(disk: DiskLike, path: str, number: int) -> int:
    """The last lsn that was durable before this file was begun; 0 if the file is not there to say so."""
    try:
        handle = disk.open(path, writable=False)
    except FileNotFoundError:
        return 0
    try:
        return first_lsn_of(path, disk.pread(handle, HEADER_BYTES, 0), number) - 1
    except Corrupt:
        return 0
    finally:
        disk.close(handle)


def _frames(path: str, data: bytes, number: int, next_lsn: int) -> Iterator[_Found | int]:
    """Frames and markers that are whole, and where they are not."""
    offset = HEADER_BYTES
    end = len(data.rstrip(b"\0")) + CHECKSUM_BYTES
    while offset + FRAME_HEAD.size + CHECKSUM_BYTES <= len(data) and offset < end:
        found = _frame_at(data, offset, number, next_lsn)
        if found is None:
            yield offset
            offset += _STEP
            while offset < end and (found := _frame_at(data, offset, number, next_lsn)) is None:
                offset += _STEP
            if found is None:
                return
        yield found
        offset = found.end
        if found.frame.kind != MARKER_KIND:
            next_lsn = found.frame.lsn + 1


def _frame_at(data: bytes, offset: int, number: int, next_lsn: int) -> _Found | None:
    if offset + FRAME_HEAD.size + CHECKSUM_BYTES > len(data):
        return None
    length, kind, version, zero, lsn = FRAME_HEAD.unpack_from(data, offset)
    start = offset + FRAME_HEAD.size
    end = start + (length + 7 & ~7)
    if zero or version != 1 or kind >= _KINDS_MAX or end + CHECKSUM_BYTES > len(data):
        return None
    if kind == MARKER_KIND:
        if length != 16 or U64.unpack_from(data, start)[0] != MARKER_MAGIC ^ number:
            return None
    elif next_lsn and not next_lsn <= lsn < next_lsn + _LSNS_MAX:
        return None
    view = memoryview(data)
    if xxh3_64_intdigest(view[offset:end], number) != U64.unpack_from(data, end)[0]:
        return None
    frame = Frame(kind, version, lsn, view[start : start + length], number, offset)
    return _Found(frame, end + CHECKSUM_BYTES)


def _guess(data: bytes, offset: int, number: int, lsn: int, *, until: int | None) -> Frame | None:
    """The frame that seems to be there: of the lsn that is next, and ending where the next one begins."""
    if offset + FRAME_HEAD.size > len(data):
        return None
    length, kind, version, zero, found_lsn = FRAME_HEAD.unpack_from(data, offset)
    start = offset + FRAME_HEAD.size
    end = start + (length + 7 & ~7) + CHECKSUM_BYTES
    if zero or version != 1 or found_lsn != lsn or end > len(data) or until not in (None, end):
        return None
    return Frame(kind, version, lsn, memoryview(data)[start : start + length], number, offset)
