"""Reads the tag index of a segment of version 1: for every tag, in order, the seqs and sizes of its records.

    tag block · tag block · … · tag directory

    tag block   0      4         8       9   12
                | tags | bitmaps | width | 0 |
                columns: end of each name u32 · records up to and with each tag u32
                for each bitmap: which tag it is of u32; then the end of each bitmap u32
                names (UTF-8, ascending) · bitmaps (64-bit roaring, of seqs) ·
                seqs u64 of the tags without a bitmap, ascending in each ·
                sizes of all records in the order of tags and seqs, `width` (1, 2 or 4) bytes each,
                then zeros up to a multiple of eight
    directory   columns with an entry per tag block:
                offset u64 · xxh3_64 u64 · length u32 · end of its first name u32; then those names

An exact tag costs two reads (directory, one block), a prefix the directory and the blocks that it spans.
Neither reads a record: the sizes tell how many bytes a delete by tag removes.

Rules of the file:
  1. Bytes are verified on every read, before they are used.
  2. A record has at most one tag, so no seq is under two tags, and merging the seqs of several tags needs
     no deduplication.
  3. No call into C gets more than a few thousand entries (`small_steps.py`).

Invariants:
  NAMES_RISE     names rise inside a block and from block to block, and the directory has the first of each.
  SEQS_RISE      the seqs of a tag rise, and each has one size.

Stored bytes that break one are `Corrupt`; `verify_tags` finds them.
`tests/support/sorted_tag_writer.py` writes
such an index, for tests.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from pyroaring import BitMap64

from shard.storage.files import Corrupt
from shard.storage.segments.small_steps import chunks, convert, sorted_runs
from shard.storage.segments.tag_records import HasTags, TaggedRecords, no_records
from shard.storage.sources import (
    READ_BYTES,
    PieceTable,
    Source,
    column_of,
    padded_length,
    read_pieces,
    read_runs,
    read_verified,
)

BLOCK_HEAD = struct.Struct("<IIB3x")
_DIRECTORY_ENTRY_BYTES = 24
_WIDTHS = {1: "B", 2: "H", 4: "I"}


# ---------------------------------------------------------------------------------------------------
# Reading


def find_tags(source: Source, index: HasTags, text: bytes, *, is_prefix: bool) -> TaggedRecords:
    """Return all records whose tag matches. Reads the directory and the blocks that the match spans."""
    blocks = SortedBlocks(source, index)
    first_at = max(0, bisect_right(blocks.firsts, text) - 1)
    if not is_prefix:
        (block,) = blocks.read(first_at, first_at)
        first = bisect_left(block.names, text)
        return block.records_of(first, first + block.names.has_at(first, text))
    parts: list[TaggedRecords] = []
    tags = 0
    for block in blocks.read(first_at, max(first_at, blocks.firsts.end_of_prefix(text) - 1)):
        first = bisect_left(block.names, text)
        end = block.names.end_of_prefix(text, first)
        parts.append(block.records_of(first, end))
        tags += end - first
    # The seqs of a single tag are in order already.
    return _merge(parts) if tags > 1 else max(parts, key=lambda records: len(records.seqs))


def walk_tags(source: Source, index: HasTags) -> Iterator[tuple[str, array[int], array[int]]]:
    """Yield every tag in order, with seqs and sizes of its records. Reads and verifies block by block."""
    for block in SortedBlocks(source, index).read(0, index.directory.blocks - 1):
        for name, records in block.each():
            yield str(name, "utf-8"), *records


def _merge(parts: list[TaggedRecords]) -> TaggedRecords:
    size_of: dict[int, int] = {}
    for seqs, sizes in parts:
        for some_seqs, some_sizes in zip(chunks(seqs), chunks(sizes), strict=True):
            size_of.update(zip(some_seqs, some_sizes, strict=True))
    records = no_records()
    for run in sorted_runs(size_of):
        records.seqs.fromlist(run)
        records.sizes.extend(map(size_of.__getitem__, run))
    return records


class _Names(Sequence[bytes]):
    """Ascending names in one buffer; a name is sliced out only when it is read."""

    __slots__ = ("_blob", "_ends")

    def __init__(self, blob: memoryview, ends: array[int]) -> None:
        self._blob = bytes(blob)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> bytes:  # type: ignore[override]
        return self._blob[self._ends[at - 1] if at else 0 : self._ends[at]]

    def has_at(self, at: int, name: bytes) -> bool:
        return at < len(self) and self[at] == name

    def end_of_prefix(self, prefix: bytes, first: int = 0) -> int:
        """Return the first index from `first` on whose name sorts after all names with this prefix."""
        return bisect_left(self, True, first, key=lambda name: name > prefix and not name.startswith(prefix))


class SortedBlocks:
    """The verified tag directory: the position and the first name of each block."""

    def __init__(self, source: Source, index: HasTags) -> None:
        offset, length, checksum, blocks, _ = index.directory
        self._source = source
        self._generation = index.generation
        content = read_verified(
            source, offset, length, checksum=checksum, seed=index.generation, label="tag directory"
        )
        view = memoryview(content)
        self.content = content
        self.piece_table = PieceTable(
            offsets=column_of("Q", view, 0, blocks),
            checksums=column_of("Q", view, 8 * blocks, blocks),
            lengths=column_of("I", view, 16 * blocks, blocks),
        )
        self.firsts = _Names(
            view[_DIRECTORY_ENTRY_BYTES * blocks :], column_of("I", view, 20 * blocks, blocks)
        )

    def read(self, first_at: int, last_at: int) -> Iterator[_Block]:
        pieces = read_pieces(
            self._source, self.piece_table, first_at, last_at, seed=self._generation, label="tag block"
        )
        return map(_Block, pieces)

    def runs(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield all blocks, many at a time, as `read_runs` does."""
        last = len(self.firsts) - 1
        return read_runs(
            self._source,
            self.piece_table,
            0,
            last,
            bytes_max=READ_BYTES,
            seed=self._generation,
            label="tag block",
        )


class _Block:
    """A verified tag block. Methods refer to a tag by its position."""

    __slots__ = (
        "_bitmap_ends",
        "_bitmap_tags",
        "_bitmaps",
        "_bitmaps_records",
        "_record_ends",
        "_seqs",
        "_sizes",
        "_width",
        "names",
    )

    def __init__(self, content: memoryview) -> None:
        tags, bitmaps, self._width = BLOCK_HEAD.unpack_from(content)
        at = BLOCK_HEAD.size
        name_ends = column_of("I", content, at, tags)
        self._record_ends = column_of("I", content, at + 4 * tags, tags)
        at += 8 * tags
        self._bitmap_tags = column_of("I", content, at, bitmaps)
        self._bitmap_ends = column_of("I", content, at + 4 * bitmaps, bitmaps)
        at += 8 * bitmaps
        self.names = _Names(content[at : at + name_ends[-1]], name_ends)
        at += name_ends[-1]
        self._bitmaps = content[at : at + (self._bitmap_ends[-1] if bitmaps else 0)]
        at += len(self._bitmaps)
        sizes_at = len(content) - self._width * self._record_ends[-1]
        self._seqs = content[at:sizes_at]
        self._sizes = content[sizes_at:]
        #: Number of records in the bitmaps before each, and in all of them.
        self._bitmaps_records = list(
            accumulate((self._start(tag + 1) - self._start(tag) for tag in self._bitmap_tags), initial=0)
        )

    def records_of(self, first: int, end: int) -> TaggedRecords:
        """Return the records of tags first..end-1, tag after tag."""
        start, stop = self._start(first), self._start(end)
        sizes = column_of(_WIDTHS[self._width], self._sizes, self._width * start, stop - start)
        return TaggedRecords(self._seqs_of(first, end), sizes if self._width == 4 else convert(sizes, "I"))

    def each(self) -> Iterator[tuple[bytes, TaggedRecords]]:
        """Yield every name with its records."""
        seqs, sizes = self.records_of(0, len(self.names))
        start = 0
        for name, end in zip(self.names, self._record_ends, strict=True):
            yield name, TaggedRecords(seqs[start:end], sizes[start:end])
            start = end

    def _start(self, tag: int) -> int:
        """Return the number of records before those of `tag`."""
        return self._record_ends[tag - 1] if tag else 0

    def _seqs_of(self, first: int, end: int) -> array[int]:
        """Return the seqs of tags first..end-1. Tags between two bitmaps are read together."""
        seqs = array("Q")
        bitmaps_end = bisect_left(self._bitmap_tags, end)
        for at in range(bisect_left(self._bitmap_tags, first), bitmaps_end):
            tag = self._bitmap_tags[at]
            seqs.frombytes(self._plain(first, tag, at))
            seqs.extend(self._bitmap(at))
            first = tag + 1
        seqs.frombytes(self._plain(first, end, bitmaps_end))
        return seqs

    def _plain(self, first: int, end: int, bitmaps: int) -> memoryview:
        """Return the seqs of tags first..end-1, none of which has a bitmap, after this many bitmaps."""
        elsewhere = self._bitmaps_records[bitmaps]
        return self._seqs[8 * (self._start(first) - elsewhere) : 8 * (self._start(end) - elsewhere)]

    def _bitmap(self, at: int) -> array[int]:
        content = self._bitmaps[self._bitmap_ends[at - 1] if at else 0 : self._bitmap_ends[at]]
        seqs: array[int] = BitMap64.deserialize(bytes(content)).to_array()
        return seqs


# ---------------------------------------------------------------------------------------------------
# Verifying


def verify_tags(
    source: Source, index: HasTags, *, offset: int, expected_tags: dict[str, TaggedRecords] | None
) -> Iterator[Corrupt]:
    """Yield every problem of the tag index. The first block should be at `offset`.

    With `expected_tags`, each tag must have these records.
    """
    try:
        blocks = SortedBlocks(source, index)
    except Corrupt as damage:
        yield damage
        return
    tag_count = 0
    last = b""
    for at in range(index.directory.blocks):
        if blocks.piece_table.offsets[at] != offset:
            yield Corrupt(source.name, offset, "the next tag block is not here")
        offset = blocks.piece_table.offsets[at]
        try:
            (block,) = blocks.read(at, at)
        except Corrupt as damage:
            yield damage
            expected_tags = None
        else:
            for reason in _find_problems(block, blocks.firsts[at], last, expected_tags):
                yield Corrupt(source.name, offset, reason)
            tag_count += len(block.names)
            last = block.names[len(block.names) - 1]
        offset += padded_length(blocks.piece_table.lengths[at])
    if offset != index.directory.offset:
        yield Corrupt(source.name, offset, "the tag directory does not follow here")
    tags = index.directory.tags
    if expected_tags is not None and not tag_count == tags == len(expected_tags):
        reason = f"{tag_count} tags are listed, the footer has {tags}, the batches {len(expected_tags)}"
        yield Corrupt(source.name, index.directory.offset, reason)


def _find_problems(
    block: _Block, first: bytes, last: bytes, expected_tags: dict[str, TaggedRecords] | None
) -> Iterator[str]:
    """Yield every problem of a block. The directory says that it begins with `first`; the block before ended
    with `last`."""
    if block.names[0] != first:
        yield "the directory has another first name"
    for name, records in block.each():
        if not last < name:
            yield f"tag {name!r} comes after {last!r}"
        last = name
        if expected_tags is not None and records != expected_tags.get(str(name, "utf-8")):
            yield f"seqs or sizes of tag {name!r} are not right"
