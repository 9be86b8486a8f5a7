"""Defines the names of segments and stubs, and reads and encodes their index.

    segments/7/00000000000000000001-000000000012.seg    box generation 7, from seq 1 on, segment serial 12
    segments/7/00000000000000004711-000000000013.stub   the index of a segment in the cold store

    segment     header · batches · batch index · tag index · footer
    stub        header · batch index · footer

    header      0         8         12      16           24       32          40      56        64
                | magic   | version | 0     | generation | serial | first seq | 0 …   | xxh3_64 |
    batch index one column after the other, each with an entry per batch:
                first seq u64 · offset u64 · xxh3_64 u64 · first ts i64 · last ts i64 ·
                length u32 (zeros not counted) · records u32 · bytes of the records without commas u32
    footer      0         8         12        16         24        32             40
                | magic   | version | batches | last seq | records | record bytes |
                40             48              56                 64           72            80
                | index offset | index xxh3_64 | directory offset | its length | its xxh3_64 |
                80           84     88           96      120       128
                | tag blocks | tags | file bytes | 0 …   | xxh3_64 |

Integers are little-endian. Checksums are seeded with the generation; those of header and footer cover all
bytes before them. A stub has a magic of its own. Its batch index and footer are copies of the segment's, byte
for byte, so offsets and file bytes refer to the segment.

Rules of the file:
  1. This file writes no file and reads no batch.
  2. Bytes are verified before they are used.

Invariants:
  SIZES          header, footer and index entry have the sizes of the layout.
  COLUMNS_EVEN   each column of the batch index has one entry per batch.
  PARTS_IN_ORDER batches, batch index, tag index and footer follow each other, then the file ends.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from shard.storage.files import Corrupt, DiskLike, parent_of
from shard.storage.segments.tags import VERSIONS, TagDirectory
from shard.storage.sources import PieceTable, Source, column_of, read_exactly, read_verified

#: Written. `VERSIONS` are read.
FORMAT_VERSION = 2

_FOOTER_MAGIC = b"streams\x67"
_HEADER = struct.Struct("<8sIIQQQ16x")
_FOOTER = struct.Struct("<8sIIQQQQQQQQIIQ24x")
_U64 = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _U64.size
FOOTER_BYTES = _FOOTER.size + _U64.size

#: The columns of the batch index in the order of the file, each with its type.
COLUMNS = (
    ("first_seqs", "Q"),
    ("offsets", "Q"),
    ("checksums", "Q"),
    ("first_times", "q"),
    ("last_times", "q"),
    ("lengths", "I"),
    ("counts", "I"),
    ("sizes", "I"),
)
INDEX_ENTRY_BYTES = sum(array(kind).itemsize for _, kind in COLUMNS)

assert HEADER_BYTES == 64 and FOOTER_BYTES == 128 and INDEX_ENTRY_BYTES == 52, "SIZES"


# ---------------------------------------------------------------------------------------------------
# Names


def segment_name(*, generation: int, first_seq: int, serial: int) -> str:
    """Return the name of a segment inside the segments directory."""
    return f"{generation}/{first_seq:020d}-{serial:012d}.seg"


def stub_name(*, generation: int, first_seq: int, serial: int) -> str:
    """Return the name of a segment's stub, in the folder of the segment."""
    return f"{generation}/{first_seq:020d}-{serial:012d}.stub"


class _NameParts(NamedTuple):
    generation: int
    first_seq: int
    serial: int


class Kind(NamedTuple):
    """The differences between a segment and a stub."""

    label: str
    suffix: str
    magic: bytes
    name_of: Callable[..., str]


SEGMENT = Kind("segment", ".seg", b"streams\x47", segment_name)
STUB = Kind("stub", ".stub", b"streams\x48", stub_name)


def _parse_name(name: str, kind: Kind) -> _NameParts | None:
    """Parse the last two parts of a path; None if they are not the name of a segment or stub."""
    generation, _, file = "/".join(name.split("/")[-2:]).partition("/")
    numbers = (generation, *file.removesuffix(kind.suffix).split("-"))
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    parts = _NameParts(*map(int, numbers))
    return parts if kind.name_of(**parts._asdict()) == f"{generation}/{file}" else None


def list_segments(disk: DiskLike, directory: str) -> list[str]:
    """Return the names of all segments by generation and seq, unreferenced ones included."""
    return _list(disk, directory, SEGMENT)


def list_stubs(disk: DiskLike, directory: str) -> list[str]:
    """Return the names of all stubs by generation and seq, unreferenced ones included."""
    return _list(disk, directory, STUB)


def _list(disk: DiskLike, directory: str, kind: Kind) -> list[str]:
    entries = [(parts, name) for name in _names(disk, directory) if (parts := _parse_name(name, kind))]
    return [name for _, name in sorted(entries)]


def remove_leftovers(disk: DiskLike, directory: str) -> list[str]:
    """Remove the temporary files of unfinished writes, and return their names. No write may be in
    progress."""
    leftovers = [name for name in _names(disk, directory) if name.endswith(".tmp")]
    for name in leftovers:
        disk.unlink(f"{directory}/{name}")
    return leftovers


def remove_segment(disk: DiskLike, directory: str, name: str) -> None:
    """Remove a segment or a stub durably. A missing file is no error: a crash may come between the removal
    and its record."""
    path = f"{directory}/{name}"
    if disk.exists(path):
        disk.unlink(path)
    if disk.exists(parent_of(path)):
        disk.fsync_dir(parent_of(path))


def list_folders(disk: DiskLike, directory: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names in it) for each box that has, or had, a file here."""
    if disk.exists(directory):
        for generation in disk.listdir(directory):
            if generation.isdigit():
                yield generation, disk.listdir(f"{directory}/{generation}")


def _names(disk: DiskLike, directory: str) -> Iterator[str]:
    for folder, files in list_folders(disk, directory):
        for file in files:
            yield f"{folder}/{file}"


# ---------------------------------------------------------------------------------------------------
# The index in memory


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The index of a segment: 52 bytes per batch. Methods refer to a batch by its position."""

    #: Of the format of the file: says how its tag index is read.
    version: int
    generation: int
    serial: int
    #: The seqs of the first and the last record. There may be holes between batches.
    first_seq: int
    last_seq: int
    records: int
    #: Bytes of all records, without commas.
    record_bytes: int
    file_bytes: int
    directory: TagDirectory
    first_seqs: array[int]
    offsets: array[int]
    checksums: array[int]
    first_times: array[int]
    last_times: array[int]
    #: Bytes of each batch in the file, without the zeros after it.
    lengths: array[int]
    #: Number of records of each batch, and their bytes without commas.
    counts: array[int]
    sizes: array[int]

    def __repr__(self) -> str:
        return (
            f"<SegmentIndex {self.name}: seqs {self.first_seq}..{self.last_seq}, {self.records} records in "
            f"{len(self)} batches, {self.directory.tags} tags, {self.file_bytes} B>"
        )

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.first_seqs)

    @property
    def name(self) -> str:
        return segment_name(generation=self.generation, first_seq=self.first_seq, serial=self.serial)

    @property
    def stub_name(self) -> str:
        return stub_name(generation=self.generation, first_seq=self.first_seq, serial=self.serial)

    @property
    def piece_table(self) -> PieceTable:
        """The offsets, lengths and checksums of the batches."""
        return PieceTable(self.offsets, self.lengths, self.checksums)

    @property
    def batches_end(self) -> int:
        """The offset where the batches end and the batch index begins."""
        return self.piece_table.end(-1)

    def at(self, seq: int) -> int | None:
        """Return the position of the batch that holds `seq`; None if there is none."""
        at = bisect_right(self.first_seqs, seq) - 1
        return at if at >= 0 and seq < self.first_seqs[at] + self.counts[at] else None

    def from_seq(self, seq: int) -> int:
        """Return the position of the first batch that holds `seq` or a later one; `len` if there is none."""
        at = bisect_right(self.first_seqs, seq) - 1
        return at if at >= 0 and seq < self.first_seqs[at] + self.counts[at] else at + 1

    def from_ts(self, ts: int) -> int:
        """Return the position of the first batch with a record whose `$ts` is at least `ts`; `len` if there
        is none."""
        return bisect_left(self.last_times, ts)


# ---------------------------------------------------------------------------------------------------
# Encoding and decoding


def encode_header(
    kind: Kind, generation: int, serial: int, first_seq: int, *, version: int = FORMAT_VERSION
) -> bytes:
    head = _HEADER.pack(kind.magic, version, 0, generation, serial, first_seq)
    return head + _U64.pack(xxh3_64_intdigest(head, generation))


def encode_columns(index: SegmentIndex) -> bytes:
    columns = b"".join(getattr(index, name) for name, _ in COLUMNS)
    assert len(columns) == len(index) * INDEX_ENTRY_BYTES, "COLUMNS_EVEN"
    return columns


def encode_footer(index: SegmentIndex, columns: bytes) -> bytes:
    directory = index.directory
    assert index.batches_end + len(columns) <= directory.offset, "PARTS_IN_ORDER"
    assert directory.offset + directory.length + FOOTER_BYTES == index.file_bytes, "PARTS_IN_ORDER"
    body = _FOOTER.pack(
        _FOOTER_MAGIC,
        index.version,
        len(index),
        index.last_seq,
        index.records,
        index.record_bytes,
        index.batches_end,
        xxh3_64_intdigest(columns, index.generation),
        directory.offset,
        directory.length,
        directory.checksum,
        directory.blocks,
        directory.tags,
        index.file_bytes,
    )
    return body + _U64.pack(xxh3_64_intdigest(body, index.generation))


def digest_of(index: SegmentIndex) -> int:
    """Return a digest of the whole content: the footer's checksum covers the checksums of index and tags,
    which cover the rest."""
    return int(_U64.unpack(encode_footer(index, encode_columns(index))[-_U64.size :])[0])


def open_segment(source: Source) -> SegmentIndex:
    """Read the index of a segment: header, footer and batch index, no batch."""
    return _open(source, SEGMENT)


def open_stub(source: Source) -> SegmentIndex:
    """Read the index of a segment from its stub."""
    return _open(source, STUB)


def _open(source: Source, kind: Kind) -> SegmentIndex:
    name_parts = _parse_name(source.name, kind)
    if name_parts is None:
        raise Corrupt(source.name, 0, f"this is not the name of a {kind.label}")
    generation, first_seq, serial = name_parts
    size = source.size()
    if size < HEADER_BYTES + FOOTER_BYTES:
        raise Corrupt(source.name, size, f"the file ends here; no {kind.label} is as short as {size} bytes")
    header_version = _check_header(source, kind, name_parts)
    at = size - FOOTER_BYTES
    body = _read_checksummed(source, at, FOOTER_BYTES, generation, "footer")
    (magic, version, batches, last_seq, records, record_bytes, index_offset, index_checksum, *rest) = (
        _FOOTER.unpack(body)
    )
    directory_offset, directory_bytes, directory_checksum, tag_blocks, tags, file_bytes = rest
    columns_bytes = batches * INDEX_ENTRY_BYTES
    columns_at = index_offset if kind is SEGMENT else HEADER_BYTES
    expected_size = file_bytes if kind is SEGMENT else HEADER_BYTES + columns_bytes + FOOTER_BYTES
    if magic != _FOOTER_MAGIC or version != header_version or size != expected_size:
        raise Corrupt(source.name, at, f"the footer does not belong to a {kind.label} of {size} bytes")
    content = read_verified(
        source, columns_at, columns_bytes, checksum=index_checksum, seed=generation, label="batch index"
    )
    index = SegmentIndex(
        version=version,
        generation=generation,
        serial=serial,
        first_seq=first_seq,
        last_seq=last_seq,
        records=records,
        record_bytes=record_bytes,
        file_bytes=file_bytes,
        directory=TagDirectory(
            directory_offset, directory_bytes, directory_checksum, blocks=tag_blocks, tags=tags
        ),
        **_decode_columns(content, batches),
    )
    if not _is_coherent(index, index_offset):
        raise Corrupt(source.name, columns_at, "header, batch index and footer contradict each other")
    return index


def _check_header(source: Source, kind: Kind, name_parts: _NameParts) -> int:
    """Verify the header, and return the version of the format."""
    head = _read_checksummed(source, 0, HEADER_BYTES, name_parts.generation, "header")
    magic, version, _, generation, serial, first_seq = _HEADER.unpack(head)
    if magic != kind.magic:
        raise Corrupt(source.name, 0, f"the header does not belong to a {kind.label}")
    if version not in VERSIONS:
        reason = f"the {kind.label} is of format {version}, this server reads {FORMAT_VERSION} and older ones"
        raise Corrupt(source.name, 0, reason)
    if _NameParts(generation, first_seq, serial) != name_parts:
        other_name = kind.name_of(generation=generation, first_seq=first_seq, serial=serial)
        raise Corrupt(source.name, 0, f"the header belongs to {other_name}")
    return int(version)


def _is_coherent(index: SegmentIndex, index_offset: int) -> bool:
    """Return True if the verified parts belong to one file. `verify_segment` checks much more."""
    return (
        len(index) > 0
        and index.first_seq == index.first_seqs[0]
        and index.last_seq == index.first_seqs[-1] + index.counts[-1] - 1
        and index.records == sum(index.counts)
        and index.record_bytes == sum(index.sizes)
        and index.batches_end == index_offset
        and index.directory.offset >= index_offset + len(index) * INDEX_ENTRY_BYTES
        and index.directory.offset + index.directory.length + FOOTER_BYTES == index.file_bytes
    )


def _decode_columns(content: bytes, count: int) -> dict[str, array[int]]:
    columns = {}
    view = memoryview(content)
    at = 0
    for name, kind in COLUMNS:
        column = columns[name] = column_of(kind, view, at, count)
        at += count * column.itemsize
    return columns


def _read_checksummed(source: Source, offset: int, length: int, generation: int, label: str) -> bytes:
    """Read a header or footer, verify it, and return it without its checksum."""
    content = read_exactly(source, offset, length)
    body = content[: -_U64.size]
    if xxh3_64_intdigest(body, generation) != _U64.unpack_from(content, len(body))[0]:
        raise Corrupt(source.name, offset, f"the {label} does not match its checksum")
    return body
