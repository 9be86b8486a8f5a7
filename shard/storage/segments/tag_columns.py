"""Reads the tag index of a segment of version 2: the tag columns of its batches, behind a filter.

    tag block · tag block · … · tag directory

    tag block   0         4   8
                | batches | 0 |
                columns with an entry per batch, only of batches with tags: position in the segment u32 ·
                end of its tags u32 · stride u32 · number of its ends u32; then
                ends u32 of all batches, as each batch has them · NUL, and for each batch its tags as it has
                them (UTF-8, joined with NUL) and NUL; then zeros up to a multiple of eight
    directory   columns with an entry per tag block: offset u64 · xxh3_64 u64 · length u32 · hashes up to and
                with it u32 · end of its least tag u32 · end of its greatest tag u32; then
                the xxh32 of each tag of each block u32, in any order · for each block its least and its
                greatest tag

An exact tag costs one read (the directory), and one more for each block in which the filter finds its hash. A
prefix costs the directory and the blocks whose range includes it. The search inside a block is one call into
C, and only batches that have the tag are taken apart. No record is read: the ends tell how many bytes a
delete by tag removes.

Writing such an index costs 60 ns per record with few tags and 150 ns if every tag is different. The sorted
index of version 1 costs 300 to 2,000 ns.

Rules of the file:
  1. Bytes are verified on every read, before they are used.
  2. The filter only rules out blocks: a tag is compared byte for byte before its record counts.

Invariants:
  BATCHES_RISE   batches rise inside a block and from block to block, and so do the seqs of every match.
  FILTER_WHOLE   each tag of a block has its hash in the filter, and is between the least and the greatest.

`tag_writer.py` asserts these. Stored bytes that break one are `Corrupt`; `verify_tags` finds them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from xxhash import xxh32_intdigest

from shard.storage.files import Corrupt
from shard.storage.segments.tag_records import HasTags, TaggedBatch, TaggedRecords, no_records
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

BLOCK_HEAD = struct.Struct("<I4x")
BATCH_ENTRY_BYTES = 16
_BLOCK_ENTRY_BYTES = 32


def find_tags(source: Source, index: HasTags, text: bytes, *, is_prefix: bool) -> TaggedRecords:
    """Return all records whose tag matches. Reads the directory and the blocks that may have the tag."""
    blocks = TagBlocks(source, index)
    matches = no_records()
    needle = b"\0" + text if is_prefix else b"\0" + text + b"\0"
    for block in blocks.read(blocks.with_prefix(text) if is_prefix else blocks.with_tag(text)):
        for batch in block.batches_with(needle):
            batch.find(text, is_prefix=is_prefix, matches=matches)
    return matches


def walk_batches(source: Source, index: HasTags) -> Iterator[TaggedBatch]:
    """Yield the tag columns of all batches that have tags."""
    for block in TagBlocks(source, index).read(range(index.directory.blocks)):
        for number in range(len(block)):
            yield block.batch(number)


class TagBlocks:
    """The verified tag directory: the position and the filter of each block."""

    def __init__(self, source: Source, index: HasTags) -> None:
        offset, length, checksum, count, _ = index.directory
        self._source = source
        self._index = index
        self.content = content = read_verified(
            source, offset, length, checksum=checksum, seed=index.generation, label="tag directory"
        )
        view = memoryview(content)
        self.piece_table = PieceTable(
            offsets=column_of("Q", view, 0, count),
            checksums=column_of("Q", view, 8 * count, count),
            lengths=column_of("I", view, 16 * count, count),
        )
        self._hash_ends = column_of("I", view, 20 * count, count)
        self._least_ends = column_of("I", view, 24 * count, count)
        self._greatest_ends = column_of("I", view, 28 * count, count)
        self._hashes_at = _BLOCK_ENTRY_BYTES * count
        self._names_at = self._hashes_at + 4 * (self._hash_ends[-1] if count else 0)

    def with_tag(self, tag: bytes) -> list[int]:
        """Return the blocks in which the filter finds a tag."""
        needle = xxh32_intdigest(tag).to_bytes(4, "little")
        numbers: list[int] = []
        at = self._hashes_at
        while (at := self.content.find(needle, at, self._names_at)) >= 0:
            position = at - self._hashes_at
            if position % 4:  # the end of one hash and the beginning of the next
                at += 1
                continue
            number = bisect_right(self._hash_ends, position // 4)
            numbers.append(number)
            at = self._hashes_at + 4 * self._hash_ends[number]
        return numbers

    def with_prefix(self, prefix: bytes) -> list[int]:
        """Return the blocks whose range of tags includes a prefix."""
        length = len(prefix)
        ranges = enumerate(map(self.range_of, range(len(self._hash_ends))))
        return [
            number for number, (least, greatest) in ranges if least[:length] <= prefix <= greatest[:length]
        ]

    def range_of(self, number: int) -> tuple[bytes, bytes]:
        """Return the least and the greatest tag of a block."""
        start = self._names_at + (self._greatest_ends[number - 1] if number else 0)
        middle = self._names_at + self._least_ends[number]
        return self.content[start:middle], self.content[middle : self._names_at + self._greatest_ends[number]]

    def hashes_of(self, number: int) -> set[int]:
        start = self._hash_ends[number - 1] if number else 0
        count = self._hash_ends[number] - start
        return set(column_of("I", memoryview(self.content), self._hashes_at + 4 * start, count))

    def read(self, numbers: Sequence[int]) -> Iterator[TagBlock]:
        """Yield blocks, neighbours in one read."""
        start = 0
        for at in range(1, len(numbers) + 1):
            if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
                pieces = read_pieces(
                    self._source,
                    self.piece_table,
                    numbers[start],
                    numbers[at - 1],
                    seed=self._index.generation,
                    label="tag block",
                )
                for piece in pieces:
                    yield TagBlock(piece, self._index)
                start = at

    def runs(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield all blocks, many at a time, as `read_runs` does."""
        last = len(self._hash_ends) - 1
        seed = self._index.generation
        return read_runs(
            self._source, self.piece_table, 0, last, bytes_max=READ_BYTES, seed=seed, label="tag block"
        )


class TagBlock:
    """A verified tag block. Methods refer to a batch by its position in the block."""

    __slots__ = ("_ends", "_index", "_stored_ends", "_strides", "_tag_ends", "_tags", "positions")

    def __init__(self, content: memoryview, index: HasTags) -> None:
        (count,) = BLOCK_HEAD.unpack_from(content)
        at = BLOCK_HEAD.size
        self._index = index
        self.positions = column_of("I", content, at, count)
        self._tag_ends = column_of("I", content, at + 4 * count, count)
        self._strides = column_of("I", content, at + 8 * count, count)
        self._ends = column_of("I", content, at + 12 * count, count)
        at += BATCH_ENTRY_BYTES * count
        tags_at = len(content) - self._tag_ends[-1] - 1
        self._stored_ends = content[at:tags_at]
        self._tags = bytes(content[tags_at:])

    def __len__(self) -> int:
        return len(self.positions)

    def batches_with(self, needle: bytes) -> Iterator[TaggedBatch]:
        """Yield the batches in whose tags these bytes occur. NUL begins and ends each tag."""
        at = 0
        while (at := self._tags.find(needle, at)) >= 0:
            number = bisect_right(self._tag_ends, at)
            if number == len(self):  # the NUL after the last tag
                return
            yield self.batch(number)
            at = self._tag_ends[number]

    def batch(self, number: int) -> TaggedBatch:
        position = self.positions[number]
        start = self._tag_ends[number - 1] if number else 0
        ends_before = self._ends[number - 1] if number else 0
        ends_count = self._ends[number] - ends_before
        return TaggedBatch(
            position,
            self._index.first_seqs[position],
            self._tags[start + 1 : self._tag_ends[number]],
            column_of("I", self._stored_ends, 4 * ends_before, ends_count),
            self._strides[number],
            self._index.sizes[position],
        )


# ---------------------------------------------------------------------------------------------------
# Verifying


def verify_tags(
    source: Source, index: HasTags, *, offset: int, expected_batches: Sequence[TaggedBatch] | None
) -> Iterator[Corrupt]:
    """Yield every problem of the tag index. The first block should be at `offset`.

    With `expected_batches`, the index must have exactly these batches.
    """
    if not index.directory.blocks:
        if expected_batches:
            yield Corrupt(
                source.name, offset, f"{len(expected_batches)} batches have tags, and none is listed"
            )
        return
    try:
        blocks = TagBlocks(source, index)
    except Corrupt as damage:
        yield damage
        return
    batches: list[TaggedBatch] = []
    for number in range(index.directory.blocks):
        if blocks.piece_table.offsets[number] != offset:
            yield Corrupt(source.name, offset, "the next tag block is not here")
        offset = blocks.piece_table.offsets[number]
        try:
            (block,) = blocks.read([number])
        except Corrupt as damage:
            yield damage
            expected_batches = None
        else:
            here = [block.batch(at) for at in range(len(block))]
            for reason in _find_problems(blocks, number, here):
                yield Corrupt(source.name, offset, reason)
            batches += here
        offset += padded_length(blocks.piece_table.lengths[number])
    if offset != index.directory.offset:
        yield Corrupt(source.name, offset, "the tag directory does not follow here")
    if expected_batches is not None and batches != list(expected_batches):
        reason = f"the tags of {len(batches)} batches are listed, and are not those of the batches"
        yield Corrupt(source.name, index.directory.offset, reason)


def _find_problems(blocks: TagBlocks, number: int, batches: list[TaggedBatch]) -> Iterator[str]:
    """Yield every problem of the filter of a block."""
    names = {name for batch in batches for name in batch.names() if name}
    if set(map(xxh32_intdigest, names)) != blocks.hashes_of(number):
        yield "the filter of a tag block has other hashes than its tags"
    if (min(names, default=b""), max(names, default=b"")) != blocks.range_of(number):
        yield "the filter of a tag block has another range than its tags"
