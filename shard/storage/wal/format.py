"""Names and encodes log files: header, frame and marker. Pure.

A file is one page of header, then frames, then old bytes (zeros, or the frames of an older file).
All integers are little-endian; every frame begins at a multiple of eight.

    header   0         8         12        16        24          32           56          64        4096
             | magic   | version | 0       | number  | first lsn | 0 …        | xxh3_64   | 0 …     |
    frame    0         4      5         6      8     16                     16+length    …8        +8
             | length  | kind | version | 0    | lsn | content (opaque)     | zeros      | xxh3_64 |
    marker   a frame of kind 0; its lsn is the last one before it; its content is
             | magic xor number (8) | durable lsn when it was written (8) |

`length` counts the content only. A checksum covers everything before it; its seed is the file's number.

Rules of the file:
  1. A payload is never copied, unless it is so small that a copy is cheaper than one more buffer.

Invariants:
  SEED_IS_NUMBER  a frame verifies in the file it was written for and in no other, so the remains of an older
                  file in a recycled one are never frames. Numbers of a directory only grow, from 1.
  ALIGNED         header, frame and marker have a multiple of eight bytes.
  MARKER_CLAIMS   a marker claims only frames before it as durable: its durable lsn is at most its own lsn.
  FIRST_LSN       lsns begin at 1, so a file's first lsn is at least that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt

#: A frame to write: (kind, version, lsn, parts of the content).
FrameParts = tuple[int, int, int, Sequence[Buffer]]

FORMAT_VERSION = 1
#: The header has its own page, so that no later write touches it.
HEADER_BYTES = 4096

_FILE_HEAD = struct.Struct("<8sIIQQ24x")
FRAME_HEAD = struct.Struct("<IBBHQ")
_MARKER = struct.Struct("<IBBHQQQ")
U64 = struct.Struct("<Q")
_FILE_MAGIC = b"streams\x57"
#: Random; unlikely to occur in a payload.
MARKER_MAGIC = 0x9D5C_E6F1_2B8A_73C7

MARKER_KIND = 0
FRAME_HEAD_BYTES = FRAME_HEAD.size
CHECKSUM_BYTES = U64.size
MARKER_BYTES = _MARKER.size + CHECKSUM_BYTES
_PADDING = tuple(bytes(-length % 8) for length in range(8))

#: Frames up to this size are joined into one buffer: the copy costs less than three more buffers do.
_JOIN_BYTES_MAX = 4096

assert _FILE_HEAD.size + CHECKSUM_BYTES == 64 <= HEADER_BYTES, "ALIGNED"
assert FRAME_HEAD_BYTES % 8 == 0 and HEADER_BYTES % 8 == 0 and MARKER_BYTES == 40, "ALIGNED"


class Frame(NamedTuple):
    """A frame that was read. `content` is a view into its whole file: copy it if it must outlive the scan."""

    kind: int
    version: int
    lsn: int
    content: memoryview
    file: int
    offset: int


# Names


def path_of(directory: str, number: int) -> str:
    return f"{directory}/{number:012d}.wal"


def retained_path_of(directory: str, number: int) -> str:
    return f"{directory}/{number:012d}.held"


def number_of(name: str, ending: str = ".wal") -> int | None:
    """Return the number in the name of a log file; None for other names."""
    stem = name.removesuffix(ending)
    return int(stem) if stem != name and stem.isdigit() else None


# Frames, headers, markers


def encode_frame(
    buffers: list[Buffer],
    number: int,
    kind: int,
    version: int,
    lsn: int,
    length: int,
    parts: Sequence[Buffer],
) -> None:
    """Append the buffers of a frame. `length` is the sum of the lengths of the parts."""
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


def encode_header(number: int, first_lsn: int) -> bytes:
    assert number > 0, "SEED_IS_NUMBER"
    assert first_lsn > 0, "FIRST_LSN"
    head = _FILE_HEAD.pack(_FILE_MAGIC, FORMAT_VERSION, 0, number, first_lsn)
    return (head + U64.pack(xxh3_64_intdigest(head, number))).ljust(HEADER_BYTES, b"\0")


def first_lsn_of(path: str, data: bytes, number: int) -> int:
    """Return the first lsn of file `number` from its header. Raises `Corrupt` if the header is not valid.

    The header must be valid: see WHOLE_BEFORE_NEXT (`log.py`).
    """
    head = data[: _FILE_HEAD.size]
    if len(data) < HEADER_BYTES or xxh3_64_intdigest(head, number) != U64.unpack_from(data, len(head))[0]:
        raise Corrupt(path, 0, "the file's header is not valid")
    magic, version, _, header_number, first_lsn = _FILE_HEAD.unpack(head)
    if magic != _FILE_MAGIC or header_number != number:
        raise Corrupt(path, 0, f"the header is that of file {header_number}")
    if version != FORMAT_VERSION:
        raise Corrupt(path, 0, f"the file is of format {version}, this server reads {FORMAT_VERSION}")
    return int(first_lsn)


def encode_marker(number: int, lsn: int, durable_lsn: int) -> bytes:
    assert durable_lsn <= lsn, "MARKER_CLAIMS"
    body = _MARKER.pack(16, MARKER_KIND, FORMAT_VERSION, 0, lsn, MARKER_MAGIC ^ number, durable_lsn)
    return body + U64.pack(xxh3_64_intdigest(body, number))


def markers_after(data: bytes, offset: int, number: int) -> Iterator[int]:
    """Yield the durable lsns of the valid markers after `offset`. The magic makes this a search, not a
    parse."""
    magic = U64.pack(MARKER_MAGIC ^ number)
    position = data.find(magic, offset)
    while position >= 0:
        start = position - FRAME_HEAD_BYTES
        body = data[start : start + _MARKER.size]
        checksum = data[start + _MARKER.size : start + MARKER_BYTES]
        if start >= offset and start % 8 == 0 and checksum == U64.pack(xxh3_64_intdigest(body, number)):
            yield _MARKER.unpack(body)[-1]
        position = data.find(magic, position + 1)
