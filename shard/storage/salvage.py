"""Reads a damaged log for repair: yields every intact frame, and a gap where frames are missing. Read-only.

    good · good · ▒▒▒▒▒▒▒▒▒ · good · good ─► Frame, Frame, Gap, Frame, Frame

`Wal.scan` refuses a log in which durable bytes have changed; this reads on after them. A frame counts only if
its checksum is right. The checksum is seeded with the file's number, so a frame found after damage was
written to this file by this server.

Rules of the file
- A gap is reported only where frames are missing: the next frame has a higher lsn than expected, or a marker
  or a later file proves that there were more frames. A torn tail that was not synced is not a gap.
- `Gap.guess` is a guess at the content of a gap; it is never treated as a frame.
- A frame with a damaged head is repaired if another head makes its checksum right: for a frame between two
  others everything but kind and padding is known. A frame with one flipped bit in its checksum or its front
  is repaired too. Every repair is reported. Nothing more is tried, because each try reads the frame.
- Unreadable pages count as zeros: the frames around them are intact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, DiskLike, read_skipping_damage
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
#: An lsn further ahead than this is not plausible: a file of 1 GiB holds fewer frames.
_LSNS_MAX = 1 << 26
_KINDS_MAX = 128
#: Length of the front of a frame, before the columns and records of its batch (`frames.py`): 58 bytes,
#: the key, 48 bytes.
_FRONT_BYTES = 112
_FILE_BYTES_MAX = 1 << 30


class FrameGap(NamedTuple):
    """Where frames first_lsn..last_lsn should be. `last_lsn` is 0 if the number of frames is unknown."""

    path: str
    offset: int
    bytes: int
    first_lsn: int
    last_lsn: int
    reason: str
    #: The frame that the damaged bytes seem to hold, unverified.
    guess: Frame | None = None


class _ScannedFrame(NamedTuple):
    """An intact frame and the offset after it."""

    frame: Frame
    end: int


class _Newest(NamedTuple):
    path: str
    number: int
    data: bytes


def salvage(disk: DiskLike, directory: str) -> Iterator[Frame | FrameGap]:
    """Yield all intact frames of a log in order, and the gaps between them."""
    numbers = sorted(
        number
        for name in (disk.listdir(directory) if disk.exists(directory) else ())
        if (number := number_of(name)) is not None
    )
    newest: _Newest | None = None
    next_lsn = proven_lsn = 0
    proof_at = end = (directory, 0)
    for number in numbers:
        path = path_of(directory, number)
        data = read_skipping_damage(disk, path)
        try:
            first_lsn = first_lsn_of(path, data, number)
            if first_lsn - 1 > proven_lsn:
                proven_lsn, proof_at = first_lsn - 1, (path, 0)
            if next_lsn and first_lsn > next_lsn:
                # The end of the file before is missing, or files between the two are.
                is_next = newest is not None and newest.number == number - 1
                reason = f"frames before {path} are missing"
                yield from _salvage_tail(newest if is_next else None, end, next_lsn, first_lsn - 1, reason)
                next_lsn = first_lsn
            next_lsn = next_lsn or first_lsn
        except Corrupt as damage:
            # The number is in the file's name, and the lsns are in its frames: a bad header loses nothing.
            if not next_lsn:
                yield FrameGap(path, 0, HEADER_BYTES, 0, 0, damage.reason)
        bad_at: int | None = None
        #: End of the latest damage: the next frame or marker.
        bad_until: int | None = None
        for item in _frames(path, data, number, next_lsn):
            if isinstance(item, int):
                bad_at, bad_until = item if bad_at is None else bad_at, None
                continue
            frame = item.frame
            if bad_at is not None and bad_until is None:
                bad_until = frame.offset
            if bad_at is not None and next_lsn and bad_until == frame.offset:
                repaired_frame = _repair_frame(data, bad_at, number, next_lsn, until=frame.offset)
                if repaired_frame is not None:
                    yield _note_repair(path, repaired_frame)
                    yield repaired_frame
                    next_lsn += 1
                    bad_at = bad_until = None
                    end = (path, frame.offset)
            if frame.kind == MARKER_KIND:
                durable_lsn = U64.unpack_from(frame.content, 8)[0]
                if durable_lsn > proven_lsn:
                    proven_lsn, proof_at = durable_lsn, (path, frame.offset)
                continue
            if next_lsn and frame.lsn != next_lsn:
                at = frame.offset if bad_at is None else bad_at
                until = frame.offset if bad_until is None else bad_until
                guess = _guess(data, at, number, next_lsn, until=until)
                reason = f"the frame of lsn {next_lsn} is not valid"
                yield FrameGap(path, at, until - at, next_lsn, frame.lsn - 1, reason, guess)
            yield frame
            next_lsn = frame.lsn + 1
            bad_at = bad_until = None
            end = (path, item.end)
        if bad_at is not None:
            end = (path, bad_at)
        newest = _Newest(path, number, data)
    if newest is not None and proven_lsn >= next_lsn:
        reason = f"the frame of lsn {next_lsn} is not valid, but lsn {proven_lsn} was durable"
        # Proven frames come before their proof. After it there may be remains of an older file.
        ends_at = proof_at[1] if proof_at[0] == newest.path else None
        yield from _salvage_tail(newest, end, next_lsn, proven_lsn, reason, until=ends_at)


def _salvage_tail(
    file: _Newest | None,
    end: tuple[str, int],
    next_lsn: int,
    last_lsn: int,
    reason: str,
    *,
    until: int | None = None,
) -> Iterator[Frame | FrameGap]:
    """Yield the frame repaired from the end of a file, and the gap after it.

    `end` is the end of the last intact frame. Without the file nothing is known about the gap. The missing
    frames end before `until`, if it is set.
    """
    path, offset = end
    if file is None or path != file.path:
        size = _FILE_BYTES_MAX if file is None else len(file.data)
        yield FrameGap(path, offset, size, next_lsn, last_lsn, reason)
        return
    repaired_frame = _repair_frame(file.data, offset, file.number, next_lsn, until=None)
    if repaired_frame is not None:
        yield _note_repair(path, repaired_frame)
        yield repaired_frame
        offset += FRAME_HEAD.size + (len(repaired_frame.content) + 7 & ~7) + CHECKSUM_BYTES
        next_lsn += 1
    if next_lsn <= last_lsn:
        gap_bytes = (len(file.data) if until is None else until) - offset
        guess = _guess(file.data, offset, file.number, next_lsn, until=None)
        yield FrameGap(path, offset, max(0, gap_bytes), next_lsn, last_lsn, reason, guess)


def _note_repair(path: str, frame: Frame) -> FrameGap:
    """Return a gap without frames that reports a repaired frame."""
    reason = f"the frame of lsn {frame.lsn} was damaged; it was repaired, and its checksum is right"
    return FrameGap(path, frame.offset, 0, 0, 0, reason)


def frames_of(disk: DiskLike, path: str) -> Iterator[Frame | int]:
    """Yield the intact frames of one file without markers, and the offsets at which a frame is missing.

    Nothing is missing after the last frame unless a marker or the next file proves that there was more.
    """
    directory, _, name = path.rpartition("/")
    number = number_of(name)
    if number is None:
        raise Corrupt(path, 0, "the name of a log file must be its number")
    # Read first: a server may fill this file and begin the next one meanwhile.
    proven_lsn = _proven_by(disk, path_of(directory or ".", number + 1), number + 1)
    data = read_skipping_damage(disk, path)
    next_lsn = first_lsn_of(path, data, number)
    bad_at: int | None = None
    for item in _frames(path, data, number, next_lsn):
        if isinstance(item, int):
            bad_at = item if bad_at is None else bad_at
        elif item.frame.kind == MARKER_KIND:
            proven_lsn = max(proven_lsn, U64.unpack_from(item.frame.content, 8)[0])
        else:
            if bad_at is not None:
                yield bad_at
            bad_at = None
            yield item.frame
            next_lsn = item.frame.lsn + 1
    if bad_at is not None and proven_lsn >= next_lsn:
        yield bad_at


def _proven_by(disk: DiskLike, path: str, number: int) -> int:
    """Return the last lsn that was durable before this file was begun; 0 if the file does not exist."""
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


def _frames(path: str, data: bytes, number: int, next_lsn: int) -> Iterator[_ScannedFrame | int]:
    """Yield intact frames and markers, and the offsets of damage."""
    offset = HEADER_BYTES
    end = len(data.rstrip(b"\0")) + CHECKSUM_BYTES
    while offset + FRAME_HEAD.size + CHECKSUM_BYTES <= len(data) and offset < end:
        scanned_frame = _frame_at(data, offset, number, next_lsn)
        if scanned_frame is None:
            yield offset
            offset += _STEP
            while offset < end and (scanned_frame := _frame_at(data, offset, number, next_lsn)) is None:
                offset += _STEP
            if scanned_frame is None:
                return
        yield scanned_frame
        offset = scanned_frame.end
        if scanned_frame.frame.kind != MARKER_KIND:
            next_lsn = scanned_frame.frame.lsn + 1


def _frame_at(data: bytes, offset: int, number: int, next_lsn: int) -> _ScannedFrame | None:
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
    return _ScannedFrame(frame, end + CHECKSUM_BYTES)


def _repair_frame(data: bytes, offset: int, number: int, lsn: int, *, until: int | None) -> Frame | None:
    """Return the frame at `offset` if only its head, or one bit of its checksum or front, is damaged.

    `until` is the end of the frame, if it is known.
    """
    if offset + FRAME_HEAD.size + CHECKSUM_BYTES > len(data):
        return None
    view, start = memoryview(data), offset + FRAME_HEAD.size
    own_head = _length_and_kind(view[offset:start], lsn)
    for length, kind in (*([own_head] if own_head else ()), *_candidate_heads(view, offset, lsn, until)):
        end = start + (length + 7 & ~7)
        if end + CHECKSUM_BYTES > len(data):
            continue
        digest = xxh3_64(FRAME_HEAD.pack(length, kind, 1, 0, lsn), seed=number)
        digest.update(view[start:end])
        wrong_bits = (digest.intdigest() ^ U64.unpack_from(data, end)[0]).bit_count()
        if wrong_bits == 0 or (wrong_bits == 1 and (length, kind) == own_head):
            return Frame(kind, 1, lsn, view[start : start + length], number, offset)
    return None if own_head is None else _repair_front(view, offset, number, lsn, *own_head)


def _repair_front(
    view: memoryview, offset: int, number: int, lsn: int, length: int, kind: int
) -> Frame | None:
    """Return the frame with one bit of its front flipped, if that makes its checksum right.

    The front names the box and the seqs of the batch. A damaged bit in a record loses that batch only.
    """
    start = offset + FRAME_HEAD.size
    end = start + (length + 7 & ~7)
    if end + CHECKSUM_BYTES > len(view):
        return None
    (stored_checksum,) = U64.unpack_from(view, end)
    front = bytearray(view[offset : min(end, start + _FRONT_BYTES)])
    rest = view[offset + len(front) : end]
    for at in range(FRAME_HEAD.size, len(front)):
        for bit in range(8):
            front[at] ^= 1 << bit
            digest = xxh3_64(front, seed=number)
            digest.update(rest)
            if digest.intdigest() == stored_checksum:
                content = memoryview(bytes(front) + bytes(rest))[FRAME_HEAD.size : FRAME_HEAD.size + length]
                return Frame(kind, 1, lsn, content, number, offset)
            front[at] ^= 1 << bit
    return None


def _candidate_heads(view: memoryview, offset: int, lsn: int, until: int | None) -> Iterator[tuple[int, int]]:
    """Yield (length, kind) of every head that the frame may have had.

    These are all heads of a frame that ends at `until`, or else all that differ in one bit from the bytes
    there.
    """
    start = offset + FRAME_HEAD.size
    if until is None:
        head = int.from_bytes(view[offset:start], "little")
        for bit in range(8 * FRAME_HEAD.size):
            candidate = _length_and_kind((head ^ 1 << bit).to_bytes(FRAME_HEAD.size, "little"), lsn)
            if candidate is not None:
                yield candidate
        return
    end = until - CHECKSUM_BYTES
    for padding in range(min(8, end - start + 1)):
        if any(view[end - padding : end]):
            return
        yield from ((end - start - padding, kind) for kind in range(_KINDS_MAX))


def _length_and_kind(head: Buffer, lsn: int) -> tuple[int, int] | None:
    """Return (length, kind) of a head with this lsn; None if it is not a valid head."""
    length, kind, version, zero, head_lsn = FRAME_HEAD.unpack(head)
    is_head = not zero and version == 1 and kind < _KINDS_MAX and head_lsn == lsn
    return (length, kind) if is_head else None


def _guess(data: bytes, offset: int, number: int, lsn: int, *, until: int | None) -> Frame | None:
    """Return the frame that seems to be there: it has the next lsn and ends where the next frame begins."""
    if offset + FRAME_HEAD.size > len(data):
        return None
    length, kind, version, zero, head_lsn = FRAME_HEAD.unpack_from(data, offset)
    start = offset + FRAME_HEAD.size
    end = start + (length + 7 & ~7) + CHECKSUM_BYTES
    if zero or version != 1 or head_lsn != lsn or end > len(data) or until not in (None, end):
        return None
    return Frame(kind, version, lsn, memoryview(data)[start : start + length], number, offset)
