"""Sealed segments: batches of one box in one file that is written once, read at random, and dropped whole.

    segments/7/00000000000000000001-000000000012.seg    box generation 7, from seq 1 on, segment serial 12
    segments/7/00000000000000004711-000000000015.tmp    being written, or left by a crash

    header · batch · batch · … · batch index · tag block · tag block · … · tag directory · footer

    header      0         8         12      16           24       32          40      56        64
                | magic   | version | 0     | generation | serial | first seq | 0 …   | xxh3_64 |
    batch       the bytes of `Batch.to_parts`, then zeros up to a multiple of eight
    batch index one column after the other, each with an entry per batch:
                first seq u64 · offset u64 · xxh3_64 u64 · first ts i64 · last ts i64 ·
                length u32 (zeros not counted) · records u32 · bytes of the records without commas u32
    tag block   n u32 · end of each name u32 · end of each posting u32 · kind of each posting u8 ·
                names (UTF-8, ascending) · postings, then zeros up to a multiple of eight
                posting of kind 0: seqs u64, ascending; of kind 1: a 64-bit roaring bitmap of seqs
    directory   columns with an entry per tag block:
                offset u64 · xxh3_64 u64 · length u32 · end of its first name u32; then those names
    footer      0         8         12        16         24        32             40
                | magic   | version | batches | last seq | records | record bytes |
                40             48              56                 64           72            80
                | index offset | index xxh3_64 | directory offset | its length | its xxh3_64 |
                80           84     88           96      120       128
                | tag blocks | tags | file bytes | 0 …   | xxh3_64 |

Integers are little-endian; every batch begins at a multiple of eight. Every checksum is seeded with
the generation; that of a batch or tag block covers its zeros too, that of header and footer all before it.
An exact tag costs two reads (directory, one block), a prefix the directory and the blocks it spans.

Rules of the file:
  1. A segment appears by rename, after its bytes are durable. So a bad segment is damage, never a crash.
  2. Bytes are verified before anything in them is believed, and again whenever they are read.
  3. Reading needs a `Source` and nothing else, keeps no state, and may be done from any thread.
  4. A payload is never copied on its way to the file, unless it is so small that a copy is cheaper than one
     more buffer.

Invariants:
  ascending      seqs rise from batch to batch (there may be holes), times never fall.
  every-byte     no byte of the file is without a checksum: a flipped bit is found by whoever reads it.
  from-batches   all of the file, and so its index, follows from generation, serial and batches alone:
                 `SegmentIndex.build` gives without a disk the index that `write_segment` writes.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
from pyroaring import BitMap64
from xxhash import xxh3_64, xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, DiskLike, parent_of
from streams.protocol.commands import Match
from streams.protocol.records import Batch

FORMAT_VERSION = 1
#: What is written in one go and then synced, so that a commit of the log never queues behind a whole segment.
#: Also the most that is read in one go when there is much to read.
STEP_BYTES = 4 << 20
#: A block is as much as an exact tag has to read. 16 KiB hold about 500 tags that one record each has.
TAG_BLOCK_BYTES = 16 << 10

_HEADER_MAGIC = b"streams\x47"
_FOOTER_MAGIC = b"streams\x67"
_HEADER = struct.Struct("<8sIIQQQ16x")
_FOOTER = struct.Struct("<8sIIQQQQQQQQIIQ24x")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _U64.size
FOOTER_BYTES = _FOOTER.size + _U64.size

#: The columns of the batch index in the order of the file, each with its type.
_COLUMNS = (
    ("first_seqs", "Q"),
    ("offsets", "Q"),
    ("checksums", "Q"),
    ("first_times", "q"),
    ("last_times", "q"),
    ("lengths", "I"),
    ("counts", "I"),
    ("sizes", "I"),
)
_INDEX_ENTRY_BYTES = sum(array(kind).itemsize for _, kind in _COLUMNS)
_DIRECTORY_ENTRY_BYTES = 24

_SEQS, _BITMAP = 0, 1
_PADDING = tuple(bytes(-length % 8) for length in range(8))
#: Batches up to this size are joined into one buffer: the copy costs less than two more buffers do.
_JOIN_BYTES_MAX = 4096

assert HEADER_BYTES == 64 and FOOTER_BYTES == 128 and _INDEX_ENTRY_BYTES == 52
assert sys.byteorder == "little", "columns are stored as arrays lie in memory"


# ---------------------------------------------------------------------------------------------------
# Names


def segment_name(*, generation: int, first_seq: int, serial: int) -> str:
    """The name of a segment inside the segments directory."""
    return f"{generation}/{first_seq:020d}-{serial:012d}.seg"


class _Named(NamedTuple):
    generation: int
    first_seq: int
    serial: int


def _parse_name(name: str) -> _Named | None:
    """What the last two steps of a path say, or None if they are not a segment's."""
    generation, _, file = "/".join(name.split("/")[-2:]).partition("/")
    numbers = (generation, *file.removesuffix(".seg").split("-"))
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    named = _Named(*map(int, numbers))
    return named if segment_name(**named._asdict()) == f"{generation}/{file}" else None


def list_segments(disk: DiskLike, directory: str) -> list[str]:
    """The names of all segments by generation and seq, those nobody refers to included."""
    names = [name for name in _names(disk, directory) if _parse_name(name) is not None]
    return sorted(names, key=lambda name: _parse_name(name) or ())


def remove_leftovers(disk: DiskLike, directory: str) -> list[str]:
    """Drop what writes that did not end have left. No write may be going on; gives the names that went."""
    leftovers = [name for name in _names(disk, directory) if name.endswith(".tmp")]
    for name in leftovers:
        disk.unlink(f"{directory}/{name}")
    return leftovers


def remove_segment(disk: DiskLike, directory: str, name: str) -> None:
    """Drop a segment durably. One that is gone already is no error: a crash may come before it is noted."""
    path = f"{directory}/{name}"
    if disk.exists(path):
        disk.unlink(path)
    if disk.exists(parent_of(path)):
        disk.fsync_dir(parent_of(path))


def _names(disk: DiskLike, directory: str) -> Iterator[str]:
    if disk.exists(directory):
        for generation in disk.listdir(directory):
            if generation.isdigit():
                for file in disk.listdir(f"{directory}/{generation}"):
                    yield f"{generation}/{file}"


# ---------------------------------------------------------------------------------------------------
# The index that is kept in memory


class TagDirectory(NamedTuple):
    """Where the tag directory is, and how much it lists."""

    offset: int
    length: int
    checksum: int
    blocks: int
    tags: int


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that must be known of a segment to read from it: 52 bytes a batch. Batches are meant by index."""

    generation: int
    serial: int
    #: The seqs of the first and the last record; there may be holes between batches.
    first_seq: int
    last_seq: int
    records: int
    #: Bytes of all records, commas not counted.
    record_bytes: int
    file_bytes: int
    directory: TagDirectory
    first_seqs: array[int]
    offsets: array[int]
    checksums: array[int]
    first_times: array[int]
    last_times: array[int]
    #: Bytes of each batch in the file, the zeros behind it not counted.
    lengths: array[int]
    #: Records of each batch, and their bytes, commas not counted.
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
    def batches_end(self) -> int:
        """Where the batches end in the file and the batch index begins."""
        return self.offsets[-1] + _padded(self.lengths[-1])

    def at(self, seq: int) -> int | None:
        """Which batch holds `seq`; None if it is outside or in a hole."""
        at = bisect_right(self.first_seqs, seq) - 1
        return at if at >= 0 and seq < self.first_seqs[at] + self.counts[at] else None

    def from_seq(self, seq: int) -> int:
        """The first batch that holds `seq` or a later one; `len` when there is none."""
        at = bisect_right(self.first_seqs, seq) - 1
        return at if at >= 0 and seq < self.first_seqs[at] + self.counts[at] else at + 1

    def from_ts(self, ts: int) -> int:
        """The first batch with a record whose `$ts` is at least `ts`; `len` when there is none."""
        return bisect_left(self.last_times, ts)

    @classmethod
    def build(cls, *, generation: int, serial: int, batches: Iterable[Batch]) -> SegmentIndex:
        """The index of a segment of these batches, without writing it: see from-batches.

        It costs what writing costs but for the disk: every payload is hashed, every tag indexed.
        """
        builder = _Builder(generation=generation, serial=serial)
        for batch in batches:
            builder.add(batch)
        return builder.finish()[0]


def layout(batches: Iterable[Batch]) -> array[int]:
    """Where each batch will begin in the file."""
    offsets = array("Q")
    offset = HEADER_BYTES
    for batch in batches:
        offsets.append(offset)
        offset += _padded(sum(map(len, batch.to_parts())))
    return offsets


def _padded(length: int) -> int:
    return length + 7 & ~7


# ---------------------------------------------------------------------------------------------------
# Writing


def write_segment(
    disk: DiskLike, directory: str, *, generation: int, serial: int, batches: Iterable[Batch]
) -> SegmentIndex:
    """Make a segment durable under its name. A write that fails leaves no segment and raises what came.

    Batches are taken one by one and let go of, so they may come from a generator; one at least must come.
    """
    builder = _Builder(generation=generation, serial=serial)
    steps = _steps(builder, batches)
    step = next(steps)  # before anything is created: the name is known only with the first batch
    path = f"{directory}/{builder.name}"
    disk.mkdir(directory)
    disk.fsync_dir(parent_of(directory))
    disk.mkdir(parent_of(path))
    disk.fsync_dir(directory)
    made = path.removesuffix(".seg") + ".tmp"
    handle = disk.create(made)
    try:
        try:
            offset = disk.pwritev(handle, step, 0)
            for step in steps:
                disk.fdatasync(handle)
                offset += disk.pwritev(handle, step, offset)
            disk.fsync(handle)
        finally:
            disk.close(handle)
        index = builder.index()
        assert offset == index.file_bytes, "from-batches"
        disk.rename(made, path)
        made = path
        disk.fsync_dir(parent_of(path))
    except BaseException:
        # Nobody knows of this file yet. What cannot be removed now is found by whoever lists the directory.
        with suppress(OSError):
            disk.unlink(made)
        raise
    return index


def _steps(builder: _Builder, batches: Iterable[Batch]) -> Iterator[list[Buffer]]:
    """The whole file in order, as runs of buffers of about `STEP_BYTES` each; a large batch is one run."""
    step: list[Buffer] = []
    start = 0
    for batch in batches:
        step += builder.add(batch)
        if builder.offset - start >= STEP_BYTES:
            yield step
            step = []
            start = builder.offset
    yield step + builder.finish()[1]


class _Builder:
    """Takes batches in, gives the file's bytes out, and ends up with the index. Pure."""

    def __init__(self, *, generation: int, serial: int) -> None:
        self._generation = generation
        self._serial = serial
        self._columns = {name: array(kind) for name, kind in _COLUMNS}
        self._add_entry = [column.append for column in self._columns.values()]
        self._seqs_of: dict[str, list[int]] = {}
        self._next_seq = 0
        self._last_ts = -(1 << 63)
        self._index: SegmentIndex | None = None
        #: Where the next batch begins; the header is given out with the first one.
        self.offset = 0

    def __repr__(self) -> str:
        return f"<_Builder of {self._generation}: {len(self._columns['offsets'])} batches, {self.offset} B>"

    @property
    def name(self) -> str:
        first_seq = self._columns["first_seqs"][0]
        return segment_name(generation=self._generation, first_seq=first_seq, serial=self._serial)

    def index(self) -> SegmentIndex:
        assert self._index is not None, "finish comes first"
        return self._index

    def add(self, batch: Batch) -> list[Buffer]:
        assert batch.count > 0 and batch.first_seq >= self._next_seq, "ascending"
        assert self._last_ts <= batch.first_ts <= batch.last_ts, "ascending"
        buffers: list[Buffer] = []
        if self.offset == 0:
            buffers.append(_header(self._generation, self._serial, batch.first_seq))
            self.offset = HEADER_BYTES
        columns, blob = batch.to_parts()
        length = len(columns) + len(blob)
        padding = _PADDING[length & 7]
        if length <= _JOIN_BYTES_MAX:
            body = b"".join((columns, blob, padding))
            buffers.append(body)
            checksum = xxh3_64_intdigest(body, self._generation)
        else:
            parts = (columns, blob, padding)
            buffers += parts
            checksum = _checksum(parts, self._generation)
        size = len(blob) - (batch.count - 1)
        entry = (batch.first_seq, self.offset, checksum, batch.first_ts, batch.last_ts)
        for add, value in zip(self._add_entry, (*entry, length, batch.count, size), strict=True):
            add(value)
        _take_tags(batch, self._seqs_of)
        self.offset += length + len(padding)
        self._next_seq = batch.first_seq + batch.count
        self._last_ts = batch.last_ts
        return buffers

    def finish(self) -> tuple[SegmentIndex, list[Buffer]]:
        """The index, and the bytes that follow the last batch."""
        assert self.offset > 0, "a segment holds a batch at least"
        generation = self._generation
        columns = [column.tobytes() for column in self._columns.values()]
        index_bytes = sum(map(len, columns))
        blocks, directory = _encode_tags(self._seqs_of, self.offset + index_bytes, generation)
        end = directory.offset + directory.length
        index = SegmentIndex(
            generation=generation,
            serial=self._serial,
            first_seq=self._columns["first_seqs"][0],
            last_seq=self._next_seq - 1,
            records=sum(self._columns["counts"]),
            record_bytes=sum(self._columns["sizes"]),
            file_bytes=end + FOOTER_BYTES,
            directory=directory,
            # A copy is as long as it needs to be; an array that grew has room to spare.
            **{name: column[:] for name, column in self._columns.items()},
        )
        self._index = index
        return index, [*columns, *blocks, _footer(index, _checksum(columns, generation))]


def _take_tags(batch: Batch, seqs_of: dict[str, list[int]]) -> None:
    tags = batch.tag_list()
    if tags is not None:
        for seq, tag in enumerate(tags, batch.first_seq):
            if tag:
                try:
                    seqs_of[tag].append(seq)
                except KeyError:
                    seqs_of[tag] = [seq]


def _checksum(parts: Sequence[Buffer], seed: int) -> int:
    checksum = xxh3_64(seed=seed)
    for part in parts:
        checksum.update(part)
    return int(checksum.intdigest())


def _header(generation: int, serial: int, first_seq: int) -> bytes:
    head = _HEADER.pack(_HEADER_MAGIC, FORMAT_VERSION, 0, generation, serial, first_seq)
    return head + _U64.pack(xxh3_64_intdigest(head, generation))


def _footer(index: SegmentIndex, index_checksum: int) -> bytes:
    directory = index.directory
    body = _FOOTER.pack(
        _FOOTER_MAGIC,
        FORMAT_VERSION,
        len(index),
        index.last_seq,
        index.records,
        index.record_bytes,
        index.batches_end,
        index_checksum,
        directory.offset,
        directory.length,
        directory.checksum,
        directory.blocks,
        directory.tags,
        index.file_bytes,
    )
    return body + _U64.pack(xxh3_64_intdigest(body, index.generation))


def _encode_tags(
    seqs_of: dict[str, list[int]], offset: int, generation: int
) -> tuple[list[bytes], TagDirectory]:
    """The tag blocks and the directory behind them, as they stand in the file from `offset` on."""
    blocks: list[bytes] = []
    offsets, checksums = array("Q"), array("Q")
    lengths, name_ends = array("I"), array("I")
    firsts = b""
    for first, block in _encode_blocks(seqs_of):
        padded = block + _PADDING[len(block) & 7]
        blocks.append(padded)
        offsets.append(offset)
        checksums.append(xxh3_64_intdigest(padded, generation))
        lengths.append(len(block))
        firsts += first
        name_ends.append(len(firsts))
        offset += len(padded)
    directory = b"".join((offsets, checksums, lengths, name_ends, firsts))
    checksum = xxh3_64_intdigest(directory, generation)
    return [*blocks, directory], TagDirectory(offset, len(directory), checksum, len(blocks), len(seqs_of))


def _encode_blocks(seqs_of: dict[str, list[int]]) -> Iterator[tuple[bytes, bytes]]:
    """(first name, block) in order. A tag whose posting alone is larger than a block has one to itself."""
    names: list[bytes] = []
    postings: list[bytes] = []
    kinds = bytearray()
    block_bytes = 0
    for tag in sorted(seqs_of):  # by code point, which is the order of the UTF-8 bytes too
        name = tag.encode()
        kind, posting = _encode_posting(seqs_of[tag])
        entry_bytes = len(name) + len(posting) + 9
        if names and block_bytes + entry_bytes > TAG_BLOCK_BYTES:
            yield names[0], _encode_block(names, kinds, postings)
            names, postings, kinds, block_bytes = [], [], bytearray(), 0
        names.append(name)
        postings.append(posting)
        kinds.append(kind)
        block_bytes += entry_bytes
    if names:
        yield names[0], _encode_block(names, kinds, postings)


def _encode_block(names: list[bytes], kinds: bytearray, postings: list[bytes]) -> bytes:
    ends = (_ends(names), _ends(postings))
    return b"".join((_U32.pack(len(names)), *ends, kinds, *names, *postings))


def _encode_posting(seqs: list[int]) -> tuple[int, bytes]:
    """Whichever is smaller. A bitmap has 30 bytes at least, so up to three seqs it need not be tried."""
    plain = array("Q", seqs).tobytes()
    if len(seqs) > 3:
        bitmap = BitMap64(seqs)
        bitmap.run_optimize()
        packed: bytes = bitmap.serialize()
        if len(packed) < len(plain):
            return _BITMAP, packed
    return _SEQS, plain


def _ends(parts: list[bytes]) -> bytes:
    ends = array("I")
    end = 0
    for part in parts:
        end += len(part)
        ends.append(end)
    return ends.tobytes()


# ---------------------------------------------------------------------------------------------------
# Reading


class Source(Protocol):
    """Where the bytes of one segment can be had. Any thread may ask; what fails, raises."""

    @property
    def name(self) -> str:
        """For messages, and it must end in the segment's own name."""

    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Short only at the end."""


class FileSource:
    """A segment on the disk. It holds nothing open: a read opens and closes, which costs a few µs."""

    __slots__ = ("_disk", "name")

    def __init__(self, disk: DiskLike, path: str) -> None:
        self._disk = disk
        self.name = path

    def __repr__(self) -> str:
        return f"<FileSource {self.name}>"

    def size(self) -> int:
        return self._disk.size(self.name)

    def read(self, offset: int, length: int) -> bytes:
        handle = self._disk.open(self.name, writable=False)
        try:
            return self._disk.pread(handle, length, offset)
        finally:
            self._disk.close(handle)


def open_segment(source: Source) -> SegmentIndex:
    """The index, as the file has it. Reads header, footer and batch index, and no batch."""
    named = _parse_name(source.name)
    if named is None:
        raise Corrupt(source.name, 0, "the name is not that of a segment")
    generation, first_seq, serial = named
    size = source.size()
    if size < HEADER_BYTES + FOOTER_BYTES:
        raise Corrupt(source.name, size, f"the file ends here; no segment is as short as {size} bytes")
    _check_header(source, named)
    at = size - FOOTER_BYTES
    body = _read_sealed(source, at, FOOTER_BYTES, generation, "footer")
    (magic, version, batches, last_seq, records, record_bytes, index_offset, index_checksum, *rest) = (
        _FOOTER.unpack(body)
    )
    directory_offset, directory_bytes, directory_checksum, tag_blocks, tags, file_bytes = rest
    if magic != _FOOTER_MAGIC or version != FORMAT_VERSION or file_bytes != size:
        raise Corrupt(source.name, at, f"the footer is not that of a segment of {size} bytes")
    content = _read(source, index_offset, batches * _INDEX_ENTRY_BYTES)
    if xxh3_64_intdigest(content, generation) != index_checksum:
        raise Corrupt(source.name, index_offset, "the batch index does not match its checksum")
    index = SegmentIndex(
        generation=generation,
        serial=serial,
        first_seq=first_seq,
        last_seq=last_seq,
        records=records,
        record_bytes=record_bytes,
        file_bytes=size,
        directory=TagDirectory(
            directory_offset, directory_bytes, directory_checksum, blocks=tag_blocks, tags=tags
        ),
        **_decode_columns(content, batches),
    )
    if not _is_coherent(index, index_offset):
        raise Corrupt(source.name, index_offset, "header, batch index and footer contradict each other")
    return index


def read_batches(
    source: Source, index: SegmentIndex, first_at: int, last_at: int, *, bytes_max: int = STEP_BYTES
) -> list[Batch]:
    """Batches first_at..last_at (indexes, both included), or as many of them as fit into `bytes_max` bytes
    of the file, but one at least. Neighbours are read together."""
    assert 0 <= first_at <= last_at < len(index)
    last_at = _last_within(index.offsets, index.lengths, first_at, last_at, bytes_max)
    places = _Places(index.offsets, index.lengths, index.checksums)
    pieces = _pieces(source, index.generation, "batch", places, first_at, last_at)
    return [_decode_batch(source, index, at, piece) for at, piece in enumerate(pieces, first_at)]


def find_tags(source: Source, index: SegmentIndex, match: Match) -> BitMap64:
    """The seqs of all records whose tag the match accepts. Reads of the tag index what it needs, no batch."""
    found = BitMap64()
    # A text that is not UTF-8 is in no block, and the empty tag is no tag.
    text = match.text.encode("utf-8", "surrogatepass")
    if index.directory.blocks == 0 or not (text or match.is_prefix):
        return found
    blocks = _Blocks(source, index)
    first_at = max(0, bisect_right(blocks.firsts, text) - 1)
    last_at = max(first_at, blocks.firsts.end_of_prefix(text) - 1) if match.is_prefix else first_at
    for block in blocks.read(first_at, last_at):
        first = bisect_left(block.names, text)
        if match.is_prefix:
            block.add_to(found, first, block.names.end_of_prefix(text, first))
        elif first < len(block.names) and block.names[first] == text:
            block.add_to(found, first, first + 1)
    return found


def _check_header(source: Source, named: _Named) -> None:
    head = _read_sealed(source, 0, HEADER_BYTES, named.generation, "header")
    magic, version, _, generation, serial, first_seq = _HEADER.unpack(head)
    if magic != _HEADER_MAGIC:
        raise Corrupt(source.name, 0, "the header is not that of a segment")
    if version != FORMAT_VERSION:
        raise Corrupt(
            source.name, 0, f"the segment is of format {version}, this server reads {FORMAT_VERSION}"
        )
    if _Named(generation, first_seq, serial) != named:
        found = segment_name(generation=generation, first_seq=first_seq, serial=serial)
        raise Corrupt(source.name, 0, f"the header is that of {found}")


def _is_coherent(index: SegmentIndex, index_offset: int) -> bool:
    """Whether the parts, each of them unharmed, are of one file. `verify_segment` looks much closer."""
    return (
        len(index) > 0
        and index.first_seq == index.first_seqs[0]
        and index.last_seq == index.first_seqs[-1] + index.counts[-1] - 1
        and index.records == sum(index.counts)
        and index.record_bytes == sum(index.sizes)
        and index.batches_end == index_offset
        and index.directory.offset >= index_offset + len(index) * _INDEX_ENTRY_BYTES
        and index.directory.offset + index.directory.length + FOOTER_BYTES == index.file_bytes
    )


def _decode_columns(content: bytes, count: int) -> dict[str, array[int]]:
    columns = {}
    view = memoryview(content)
    for name, kind in _COLUMNS:
        column = columns[name] = array(kind)
        column.frombytes(view[: count * column.itemsize])
        view = view[count * column.itemsize :]
    return columns


def _decode_batch(source: Source, index: SegmentIndex, at: int, piece: memoryview) -> Batch:
    try:
        batch = Batch.from_bytes(piece)
    except (AssertionError, ValueError, struct.error) as error:
        # Our own mistake, since the checksum is good; still it is told with its place.
        raise Corrupt(source.name, index.offsets[at], f"the batch cannot be decoded: {error}") from error
    if batch.first_seq != index.first_seqs[at] or batch.count != index.counts[at]:
        reason = f"here is the batch of seqs {batch.first_seq}..{batch.last_seq}, the index has another one"
        raise Corrupt(source.name, index.offsets[at], reason)
    return batch


class _Places(NamedTuple):
    """Of batches or tag blocks that lie one behind the other."""

    offsets: array[int]
    lengths: array[int]
    checksums: array[int]


def _pieces(
    source: Source, generation: int, what: str, places: _Places, first: int, last: int
) -> Iterator[memoryview]:
    """Batches or tag blocks first..last, each verified, in as few reads as `STEP_BYTES` allows."""
    offsets, lengths, checksums = places
    while first <= last:
        until = _last_within(offsets, lengths, first, last, STEP_BYTES)
        start = offsets[first]
        content = memoryview(_read(source, start, offsets[until] + _padded(lengths[until]) - start))
        for at in range(first, until + 1):
            offset = offsets[at] - start
            length = lengths[at]
            if xxh3_64_intdigest(content[offset : offset + _padded(length)], generation) != checksums[at]:
                raise Corrupt(source.name, offsets[at], f"the {what} does not match its checksum")
            yield content[offset : offset + length]
        first = until + 1


def _last_within(offsets: array[int], lengths: array[int], first: int, last: int, bytes_max: int) -> int:
    """The last of first..last such that first up to it have at most `bytes_max` bytes; `first` at least."""
    end_max = offsets[first] + bytes_max
    at = bisect_right(offsets, end_max, first, last + 1) - 1
    return at - 1 if at > first and offsets[at] + _padded(lengths[at]) > end_max else at


def _read(source: Source, offset: int, length: int) -> bytes:
    content = source.read(offset, length)
    if len(content) != length:
        reason = f"the file ends here, {length - len(content)} bytes are missing"
        raise Corrupt(source.name, offset + len(content), reason)
    return content


def _read_sealed(source: Source, offset: int, length: int, generation: int, what: str) -> bytes:
    """A header or footer without its checksum, which stands at its end."""
    content = _read(source, offset, length)
    body = content[: -_U64.size]
    if xxh3_64_intdigest(body, generation) != _U64.unpack_from(content, len(body))[0]:
        raise Corrupt(source.name, offset, f"the {what} does not match its checksum")
    return body


class _Names(Sequence[bytes]):
    """Ascending names that lie one behind the other; only those that are looked at are cut out."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, blob: memoryview, ends: array[int]) -> None:
        self._blob = bytes(blob)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> bytes:  # type: ignore[override]
        return self._blob[self._ends[at - 1] if at else 0 : self._ends[at]]

    def end_of_prefix(self, prefix: bytes, first: int = 0) -> int:
        """The first index at or behind `first` whose name is greater than all that start with `prefix`."""
        return bisect_left(self, True, first, key=lambda name: name > prefix and not name.startswith(prefix))


class _Blocks:
    """The tag directory, read and verified: which block begins with which name."""

    def __init__(self, source: Source, index: SegmentIndex) -> None:
        where = index.directory
        content = _read(source, where.offset, where.length)
        if xxh3_64_intdigest(content, index.generation) != where.checksum:
            raise Corrupt(source.name, where.offset, "the tag directory does not match its checksum")
        view = memoryview(content)
        self._source = source
        self._generation = index.generation
        self.places = _Places(
            offsets=_column("Q", view, 0, where.blocks),
            checksums=_column("Q", view, 8 * where.blocks, where.blocks),
            lengths=_column("I", view, 16 * where.blocks, where.blocks),
        )
        name_ends = _column("I", view, 20 * where.blocks, where.blocks)
        self.firsts = _Names(view[_DIRECTORY_ENTRY_BYTES * where.blocks :], name_ends)

    def read(self, first_at: int, last_at: int) -> Iterator[_Block]:
        return map(
            _Block, _pieces(self._source, self._generation, "tag block", self.places, first_at, last_at)
        )


class _Block:
    """A tag block that was verified."""

    __slots__ = ("_kinds", "_posting_ends", "_postings", "names")

    def __init__(self, content: memoryview) -> None:
        (count,) = _U32.unpack_from(content)
        name_ends = _column("I", content, 4, count)
        self._posting_ends = _column("I", content, 4 + 4 * count, count)
        names_at = 4 + 9 * count
        self._kinds = bytes(content[4 + 8 * count : names_at])
        self.names = _Names(content[names_at : names_at + name_ends[-1]], name_ends)
        self._postings = content[names_at + name_ends[-1] :]

    def add_to(self, found: BitMap64, first: int, end: int) -> None:
        """Add the seqs of tags first..end-1. Those of kind 0 that stand together are taken together."""
        while first < end:
            if self._kinds[first] == _BITMAP:
                until = first + 1
                found |= BitMap64.deserialize(bytes(self._posting(first, until)))
            else:
                until = self._kinds.find(_BITMAP, first, end)
                until = until if until >= 0 else end
                posting = self._posting(first, until)
                found.update(_column("Q", posting, 0, len(posting) // 8))
            first = until

    def _posting(self, first: int, end: int) -> memoryview:
        return self._postings[self._posting_ends[first - 1] if first else 0 : self._posting_ends[end - 1]]


def _column(kind: str, content: memoryview, offset: int, count: int) -> array[int]:
    column = array(kind)
    column.frombytes(content[offset : offset + count * column.itemsize])
    return column


# ---------------------------------------------------------------------------------------------------
# Verifying


def verify_segment(source: Source) -> Iterator[Corrupt]:
    """Every problem that there is, none when the segment is whole. Reads all of it, in large steps.

    A header, footer or batch index that is damaged hides the rest, and is the only problem told.
    """
    source = _Ahead(source)
    try:
        index = open_segment(source)
    except Corrupt as damage:
        yield damage
        return
    problems = list(_verify_columns(source.name, index))
    seqs_of: dict[str, list[int]] = {}
    for at in range(len(index)):
        try:
            (batch,) = read_batches(source, index, at, at)
        except Corrupt as damage:
            problems.append(damage)
            continue
        problems += _verify_batch(source.name, index, at, batch)
        _take_tags(batch, seqs_of)
    yield from problems
    # What the tags should be is known only if every batch could be read.
    yield from _verify_tags(source, index, None if problems else seqs_of)


def _verify_columns(name: str, index: SegmentIndex) -> Iterator[Corrupt]:
    """Whether the batches, as the index has them, fill the file and are ascending."""
    offset, next_seq, last_ts = HEADER_BYTES, 0, -(1 << 63)
    for at in range(len(index)):
        if index.offsets[at] != offset:
            yield Corrupt(name, index.offsets[at], f"the index has a batch here, it should be at {offset}")
        if index.first_seqs[at] < next_seq or index.counts[at] == 0:
            reason = f"seq {index.first_seqs[at]} comes after seq {next_seq - 1}"
            yield Corrupt(name, index.offsets[at], f"the batches are not in order: {reason}")
        if not last_ts <= index.first_times[at] <= index.last_times[at]:
            yield Corrupt(name, index.offsets[at], "the times of the batches are not in order")
        offset = index.offsets[at] + _padded(index.lengths[at])
        next_seq = index.first_seqs[at] + index.counts[at]
        last_ts = index.last_times[at]


def _verify_batch(name: str, index: SegmentIndex, at: int, batch: Batch) -> Iterator[Corrupt]:
    """Whether a batch is what the index says of it. Its seqs were compared when it was read."""
    said = (index.first_times[at], index.last_times[at], index.sizes[at])
    if said != (batch.first_ts, batch.last_ts, batch.size(0, batch.count - 1)):
        yield Corrupt(name, index.offsets[at], "times or size of the batch are not what the index says")
    tags = batch.tag_list()
    if tags is not None and len(tags) != batch.count:
        yield Corrupt(name, index.offsets[at], f"{batch.count} records of the batch have {len(tags)} tags")


def _verify_tags(
    source: Source, index: SegmentIndex, seqs_of: dict[str, list[int]] | None
) -> Iterator[Corrupt]:
    """Whether every tag block is unharmed and, if `seqs_of` is given, says the same as the batches."""
    try:
        blocks = _Blocks(source, index)
    except Corrupt as damage:
        yield damage
        return
    offset = index.batches_end + len(index) * _INDEX_ENTRY_BYTES
    listed = 0
    last = b""
    for at in range(index.directory.blocks):
        if blocks.places.offsets[at] != offset:
            yield Corrupt(source.name, offset, "the next tag block is not here")
        offset = blocks.places.offsets[at] + _padded(blocks.places.lengths[at])
        try:
            (block,) = blocks.read(at, at)
        except Corrupt as damage:
            yield damage
            seqs_of = None
            continue
        if block.names[0] != blocks.firsts[at]:
            yield Corrupt(source.name, blocks.places.offsets[at], "the directory has another first name")
        for number, name in enumerate(block.names):
            if not last < name:
                yield Corrupt(source.name, blocks.places.offsets[at], f"tag {name!r} comes after {last!r}")
            last = name
            found = BitMap64()
            block.add_to(found, number, number + 1)
            if seqs_of is not None and found != BitMap64(seqs_of.get(str(name, "utf-8"), ())):
                yield Corrupt(
                    source.name, blocks.places.offsets[at], f"the seqs of tag {name!r} are not right"
                )
        listed += len(block.names)
    if offset != index.directory.offset:
        yield Corrupt(source.name, offset, "the tag directory does not follow here")
    if seqs_of is not None and not listed == index.directory.tags == len(seqs_of):
        reason = (
            f"{listed} tags are listed, the footer has {index.directory.tags}, the batches {len(seqs_of)}"
        )
        yield Corrupt(source.name, index.directory.offset, reason)


class _Ahead:
    """A source that reads a large step at a time, for one who goes through it from start to end."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = 0
        self._step = b""

    @property
    def name(self) -> str:
        return self._source.name

    def size(self) -> int:
        return self._source.size()

    def read(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if not 0 <= at <= at + length <= len(self._step):
            self._step = self._source.read(offset, max(length, STEP_BYTES))
            self._start = offset
            at = 0
        return self._step[at : at + length]
