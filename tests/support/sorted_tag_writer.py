"""Builds the tag index of a segment of version 1, which the server reads and no longer writes
(`shard/storage/segments/sorted_tags.py`).

Bounds: 16 bytes in memory per tagged record of the segment that is being written. A block has at most
`TAG_BLOCK_BYTES`, unless one tag alone needs more.

Invariants:
  NAMES_RISE     names rise inside a block and from block to block, and the directory has the first of each.
  ONE_SIZE_EACH  each seq of a tag has one size.
  DIRECTORY_EVEN the directory has one entry per block.
  BLOCK_BYTES    a block is no longer than the estimate from when its tags were added.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain

from pyroaring import BitMap64
from xxhash import xxh3_64_intdigest

from shard.storage.segments.small_steps import chunks, convert, sorted_runs
from shard.storage.segments.sorted_tags import BLOCK_HEAD
from shard.storage.segments.tag_records import TagDirectory
from shard.storage.sources import PADDING
from streams.protocol.model.records import Batch

#: A lookup of one tag reads one block. 16 KiB hold about 500 tags with one record each.
TAG_BLOCK_BYTES = 16 << 10
#: A bitmap has at least 30 bytes, so up to this many seqs are always stored plain.
_PLAIN_SEQS = 3


class SortedTagBuilder:
    """Builds a tag index from batches. Pure."""

    VERSION = 1

    def __init__(self) -> None:
        # Seq and size of each record, alternating. An array needs 8 bytes per entry and no objects, and the
        # garbage collector skips it: there may be as many arrays as records.
        self._entries_of: defaultdict[str, array[int]] = defaultdict(partial(array, "Q"))

    def __repr__(self) -> str:
        return f"<SortedTagBuilder {len(self._entries_of)} tags>"

    def add(self, at: int, batch: Batch) -> None:
        assert batch.tags is not None
        if batch.count == 1:
            entries = self._entries_of[str(batch.tags, "utf-8")]
            entries.append(batch.first_seq)
            entries.append(len(batch.blob))
            return
        tags = str(batch.tags, "utf-8").split("\0")
        entries_of = self._entries_of
        seqs = range(batch.first_seq, batch.first_seq + batch.count)
        for tag, seq, size in zip(tags, seqs, batch.sizes(), strict=True):
            if tag:
                entries = entries_of[tag]
                entries.append(seq)
                entries.append(size)

    def encode(self, offset: int, generation: int) -> Generator[bytes, None, TagDirectory]:
        """Yield the tag blocks, then the directory, for the file from `offset` on; return the directory's
        position."""
        offsets, checksums = array("Q"), array("Q")
        lengths, name_ends = array("I"), array("I")
        firsts = bytearray()
        for first, block in _encode_blocks(self._entries_of):
            content = block + PADDING[len(block) & 7]
            offsets.append(offset)
            checksums.append(xxh3_64_intdigest(content, generation))
            lengths.append(len(block))
            firsts += first
            name_ends.append(len(firsts))
            offset += len(content)
            yield content
        assert len(offsets) == len(checksums) == len(lengths) == len(name_ends), "DIRECTORY_EVEN"
        directory = b"".join((offsets, checksums, lengths, name_ends, firsts))
        checksum = xxh3_64_intdigest(directory, generation)
        if directory:
            yield directory
        return TagDirectory(offset, len(directory), checksum, len(offsets), len(self._entries_of))


def _encode_blocks(entries_of: Mapping[str, array[int]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (first name, block) in order. A tag whose records fill more than a block gets its own block."""
    block = _BlockBuilder()
    for tag in chain.from_iterable(sorted_runs(entries_of)):  # code point order is also UTF-8 byte order
        name = tag.encode()
        entries = entries_of[tag]
        seqs, sizes = entries[::2], entries[1::2]
        bitmap = _bitmap_if_smaller(seqs) if len(seqs) > _PLAIN_SEQS else None
        entry_bytes = len(name) + 4 * len(sizes) + (8 * len(seqs) + 8 if bitmap is None else len(bitmap) + 16)
        if block.names and block.bytes_max + entry_bytes > TAG_BLOCK_BYTES:
            assert block.names[0] <= block.names[-1] < name, "NAMES_RISE"
            yield block.names[0], block.encode()
            block = _BlockBuilder()
        block.add(name, seqs, sizes, bitmap, entry_bytes)
    if block.names:
        yield block.names[0], block.encode()


class _BlockBuilder:
    def __init__(self) -> None:
        self.names: list[bytes] = []
        #: Upper bound of the block's length: sizes are counted with four bytes.
        self.bytes_max = BLOCK_HEAD.size
        self._record_ends = array("I")
        self._bitmap_tags = array("I")
        self._bitmaps: list[bytes] = []
        self._seqs = array("Q")
        self._sizes = array("Q")

    def add(
        self, name: bytes, seqs: array[int], sizes: array[int], bitmap: bytes | None, entry_bytes: int
    ) -> None:
        if bitmap is None:
            self._seqs.extend(seqs)
        else:
            self._bitmap_tags.append(len(self.names))
            self._bitmaps.append(bitmap)
        self._sizes.extend(sizes)
        self._record_ends.append(len(self._sizes))
        self.names.append(name)
        self.bytes_max += entry_bytes

    def encode(self) -> bytes:
        sizes = _narrow(self._sizes)
        assert len(self._record_ends) == len(self.names), "ONE_SIZE_EACH"
        assert self._record_ends[-1] == len(self._sizes), "ONE_SIZE_EACH"
        block = b"".join(
            (
                BLOCK_HEAD.pack(len(self.names), len(self._bitmaps), sizes.itemsize),
                array("I", accumulate(map(len, self.names))),
                self._record_ends,
                self._bitmap_tags,
                array("I", accumulate(map(len, self._bitmaps))),
                *self.names,
                *self._bitmaps,
                self._seqs,
                sizes,
            )
        )
        assert len(block) <= self.bytes_max, "BLOCK_BYTES"
        return block


def _bitmap_if_smaller(seqs: array[int]) -> bytes | None:
    bitmap = BitMap64()
    for part in chunks(seqs):
        bitmap.update(part)
    bitmap.run_optimize()
    content: bytes = bitmap.serialize()
    return content if len(content) < 8 * len(seqs) else None


def _narrow(sizes: array[int]) -> array[int]:
    """Return the sizes with as few bytes per number as the largest of them needs."""
    for kind in ("B", "H"):
        with suppress(OverflowError):
            return convert(sizes, kind)
    return convert(sizes, "I")
