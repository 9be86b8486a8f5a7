"""Sealed segments: batches of one box in one file that is written once, read at random, and dropped whole.

    segments/7/00000000000000000001-000000000012.seg    box generation 7, from seq 1 on, segment serial 12
    segments/7/00000000000000004711-000000000013.stub   the index of a segment in the cold store
    segments/7/00000000000000004711-000000000015.tmp    being written, or left by a crash (also .stub.tmp)

    segment     header · batch · batch · … · batch index · tag block · … · tag directory · footer
    stub        header · batch index · footer

    batch       the bytes of `Batch.to_parts`, then zeros up to a multiple of eight

Every batch begins at a multiple of eight. Every checksum is seeded with the generation. The checksum of a
batch or tag block also covers its zeros.

index         names, header, batch index and footer
tags          finds tags: by tag_columns in version 2, which tag_writer builds, by sorted_tags in version 1;
              tag_records has what they share
writer        makes a segment or a stub durable
reader        reads batches, verifies a whole file
store         all segments of a shard: locates them and reads from them
small_steps   sorts and copies without blocking the event loop

All reads go through `storage/sources.py`, from this disk or the cold store. Import segments and stubs from
this package; import `store` by itself, because it knows the core.
"""

from shard.storage.segments.index import (
    FORMAT_VERSION,
    SegmentIndex,
    list_segments,
    list_stubs,
    open_segment,
    open_stub,
    remove_leftovers,
    remove_segment,
    segment_name,
    stub_name,
)
from shard.storage.segments.reader import read_batches, verified_bytes, verify_segment, verify_stub
from shard.storage.segments.tags import TagDirectory, TaggedRecords, find_tags, walk_tags
from shard.storage.segments.writer import (
    build_index,
    copy_segment,
    layout,
    no_pause,
    write_segment,
    write_stub,
)
from shard.storage.sources import FileSource, Source

__all__ = [
    "FORMAT_VERSION",
    "FileSource",
    "SegmentIndex",
    "Source",
    "TagDirectory",
    "TaggedRecords",
    "build_index",
    "copy_segment",
    "find_tags",
    "layout",
    "list_segments",
    "list_stubs",
    "no_pause",
    "open_segment",
    "open_stub",
    "read_batches",
    "remove_leftovers",
    "remove_segment",
    "segment_name",
    "stub_name",
    "verified_bytes",
    "verify_segment",
    "verify_stub",
    "walk_tags",
    "write_segment",
    "write_stub",
]
