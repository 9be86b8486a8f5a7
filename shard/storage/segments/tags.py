"""Finds, walks, copies and verifies the tags of a segment, whichever version its tag index has.

    version 1   `sorted_tags.py`    names in order, each with its seqs and sizes
    version 2   `tag_columns.py`    the tag columns of the batches, behind a filter of hashes

Segments of version 1 are read and no longer written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from shard.storage.files import Corrupt
from shard.storage.segments import sorted_tags, tag_columns
from shard.storage.segments.tag_records import (
    HasTags,
    TagDirectory,
    TaggedBatch,
    TaggedRecords,
    group_by_tag,
    no_records,
    text_of,
)
from shard.storage.sources import Source
from streams.protocol.messages.commands import Match

__all__ = [
    "VERSIONS",
    "HasTags",
    "TagDirectory",
    "TaggedRecords",
    "find_tags",
    "read_tag_index",
    "verify_tags",
    "walk_tags",
]

#: The versions of a segment that can be read; they differ in the tag index only.
VERSIONS = (1, 2)


class HasVersion(HasTags, Protocol):
    @property
    def version(self) -> int: ...


def find_tags(source: Source, index: HasVersion, match: Match) -> TaggedRecords:
    """Return all records whose tag matches. Reads only the needed part of the tag index, and no batch."""
    text = text_of(match)
    if index.directory.blocks == 0 or not (text or match.is_prefix):  # an empty tag is no tag
        return no_records()
    if index.version == 1:
        return sorted_tags.find_tags(source, index, text, is_prefix=match.is_prefix)
    return tag_columns.find_tags(source, index, text, is_prefix=match.is_prefix)


def walk_tags(source: Source, index: HasVersion) -> Iterator[tuple[str, array[int], array[int]]]:
    """Yield every tag with seqs and sizes of its records."""
    if not index.directory.blocks:
        return
    if index.version == 1:
        yield from sorted_tags.walk_tags(source, index)
    else:
        for tag, records in group_by_tag(tag_columns.walk_batches(source, index)).items():
            yield tag, *records


def read_tag_index(source: Source, index: HasVersion, *, offset: int) -> Iterator[memoryview]:
    """Yield all bytes of the tag index, which begins at `offset`, verified, for a copy."""
    directory: sorted_tags.SortedBlocks | tag_columns.TagBlocks
    if index.version == 1:
        directory = sorted_tags.SortedBlocks(source, index)
    else:
        directory = tag_columns.TagBlocks(source, index)
    for first, last, content in directory.runs():
        if directory.piece_table.offsets[first] != offset:
            raise Corrupt(source.name, offset, "the next tag block is not here")
        offset = directory.piece_table.end(last)
        yield content
    if offset != index.directory.offset:
        raise Corrupt(source.name, offset, "the tag directory does not follow here")
    yield memoryview(directory.content)


def verify_tags(
    source: Source, index: HasVersion, *, offset: int, expected_batches: Sequence[TaggedBatch] | None
) -> Iterator[Corrupt]:
    """Yield every problem of the tag index. The first block should be at `offset`.

    With `expected_batches`, the index must have the tags of these batches.
    """
    if index.version == 1:
        expected_tags = None if expected_batches is None else group_by_tag(expected_batches)
        return sorted_tags.verify_tags(source, index, offset=offset, expected_tags=expected_tags)
    return tag_columns.verify_tags(source, index, offset=offset, expected_batches=expected_batches)
