"""Builds the tag index of a segment. `tag_columns.py` describes its layout and reads it.

Bounds: the tags, 4 bytes per record and up to 4 bytes per tag of the segment that is being written. A block
ends at `TAG_BLOCK_BYTES`, unless one batch alone has more.

Invariants:
  BATCHES_RISE   batches rise inside a block and from block to block.
  FILTER_WHOLE   each tag of a block has its hash in the filter, and is between the least and the greatest.
  DIRECTORY_EVEN the directory has one entry per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator

from xxhash import xxh3_64_intdigest, xxh32_intdigest

from shard.storage.segments.tag_columns import BATCH_ENTRY_BYTES, BLOCK_HEAD
from shard.storage.segments.tag_records import TagDirectory
from shard.storage.sources import PADDING
from streams.protocol.model.records import Batch

#: A lookup that passes the filter reads one block. 64 KiB hold about 4,000 records, whose tags take half a
#: millisecond to hash: the steps of the writing thread stay short.
TAG_BLOCK_BYTES = 64 << 10
#: The most tags that one call into C gets (`small_steps.py`), of a batch that is larger than a block.
_HASHED_MAX = 8192


class TagIndexBuilder:
    """Builds a tag index from batches. Pure."""

    VERSION = 2

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._hashes = array("I")
        self._hash_ends = array("I")
        self._least_ends = array("I")
        self._greatest_ends = array("I")
        self._ranges: list[bytes] = []
        self._ranges_bytes = 0
        self._begin_block()

    def __repr__(self) -> str:
        return f"<TagIndexBuilder {len(self._blocks)} blocks, {len(self._hashes)} hashes>"

    def _begin_block(self) -> None:
        self._positions = array("I")
        self._tag_ends = array("I")
        self._strides = array("I")
        self._end_counts = array("I")
        self._ends: list[array[int]] = []
        self._end_count = 0
        self._tags: list[bytes] = []
        self._tags_bytes = 0

    def add(self, at: int, batch: Batch) -> None:
        """Add a batch that has tags; `at` is its position in the segment."""
        assert batch.tags is not None
        assert not self._positions or at > self._positions[-1], "BATCHES_RISE"
        self._positions.append(at)
        self._strides.append(batch.stride)
        self._tags.append(batch.tags)
        self._tags_bytes += len(batch.tags) + 1
        self._tag_ends.append(self._tags_bytes)
        if batch.ends is not None:
            self._ends.append(batch.ends)
            self._end_count += len(batch.ends)
        self._end_counts.append(self._end_count)
        if self._tags_bytes + 4 * self._end_count + BATCH_ENTRY_BYTES * len(self._tags) >= TAG_BLOCK_BYTES:
            self._end_block()

    def _end_block(self) -> None:
        tags = b"\0".join(self._tags)
        self._add_filter(tags)
        self._blocks.append(
            b"".join(
                (
                    BLOCK_HEAD.pack(len(self._positions)),
                    self._positions,
                    self._tag_ends,
                    self._strides,
                    self._end_counts,
                    *self._ends,
                    b"\0",
                    tags,
                    b"\0",
                )
            )
        )
        self._begin_block()

    def _add_filter(self, tags: bytes) -> None:
        """Add the hashes of the tags and their range. Every step over tags is a call into C."""
        names = tags.split(b"\0")
        least = greatest = b""
        for at in range(0, len(names), _HASHED_MAX):
            distinct = dict.fromkeys(names[at : at + _HASHED_MAX])  # in order, unlike a set
            distinct.pop(b"", None)
            if distinct:
                self._hashes.extend(array("I", map(xxh32_intdigest, distinct)))
                least = min(least or min(distinct), min(distinct))
                greatest = max(greatest, max(distinct))
        assert least <= greatest, "FILTER_WHOLE"
        self._hash_ends.append(len(self._hashes))
        self._ranges += (least, greatest)
        self._least_ends.append(self._ranges_bytes + len(least))
        self._ranges_bytes += len(least) + len(greatest)
        self._greatest_ends.append(self._ranges_bytes)

    def encode(self, offset: int, generation: int) -> Generator[bytes, None, TagDirectory]:
        """Yield the tag blocks, then the directory, for the file from `offset` on; return the directory's
        position."""
        if self._positions:
            self._end_block()
        offsets, checksums, lengths = array("Q"), array("Q"), array("I")
        for block in self._blocks:
            content = block + PADDING[len(block) & 7]
            offsets.append(offset)
            checksums.append(xxh3_64_intdigest(content, generation))
            lengths.append(len(block))
            offset += len(content)
            yield content
        ends = (self._hash_ends, self._least_ends, self._greatest_ends)
        assert all(len(column) == len(offsets) for column in ends), "DIRECTORY_EVEN"
        directory = b"".join((offsets, checksums, lengths, *ends, self._hashes, *self._ranges))
        checksum = xxh3_64_intdigest(directory, generation)
        if directory:
            yield directory
        return TagDirectory(offset, len(directory), checksum, len(offsets), len(self._hashes))
