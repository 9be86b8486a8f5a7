"""Reads batches of a segment, and verifies whole segments and stubs.

Rules of the file:
  1. Bytes are verified on every read, before they are used.
  2. Reading needs only a `Source`, keeps no state, and may run in any thread.

Invariants:
  EVERY_BYTE     every byte of the file is covered by a checksum: a reader finds a flipped bit.
  BATCH_RANGE    batches are addressed by their position in the index, first before last.
  READ_SOME      a read returns at least one batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from shard.storage.files import Buffer, Corrupt
from shard.storage.segments import small_steps
from shard.storage.segments.index import (
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    SEGMENT,
    SegmentIndex,
    encode_columns,
    encode_footer,
    encode_header,
    open_segment,
    open_stub,
)
from shard.storage.segments.tag_records import TaggedBatch
from shard.storage.segments.tags import read_tag_index, verify_tags
from shard.storage.sources import READ_BYTES, ReadAhead, Source, padded_length, read_pieces, read_runs
from streams.protocol.model.records import Batch


def read_batches(
    source: Source, index: SegmentIndex, first_at: int, last_at: int, *, bytes_max: int = READ_BYTES
) -> list[Batch]:
    """Read batches first_at..last_at (positions, both included), as many as fit into `bytes_max` bytes of the
    file, but at least one. Neighbours are read together."""
    assert 0 <= first_at <= last_at < len(index), "BATCH_RANGE"
    table = index.piece_table
    last_at = table.last_within(first_at, last_at, bytes_max)
    pieces = read_pieces(source, table, first_at, last_at, seed=index.generation, label="batch")
    batches = [_decode_batch(source, index, at, piece) for at, piece in enumerate(pieces, first_at)]
    assert len(batches) == last_at - first_at + 1, "READ_SOME"
    return batches


def _decode_batch(source: Source, index: SegmentIndex, at: int, piece: memoryview) -> Batch:
    try:
        batch = Batch.from_bytes(piece)
    except (AssertionError, ValueError, struct.error) as error:
        # The checksum is right, so this is a bug of this server; the error still names the position.
        raise Corrupt(source.name, index.offsets[at], f"the batch cannot be decoded: {error}") from error
    if batch.first_seq != index.first_seqs[at] or batch.count != index.counts[at]:
        reason = f"here is the batch of seqs {batch.first_seq}..{batch.last_seq}, the index has another batch"
        raise Corrupt(source.name, index.offsets[at], reason)
    return batch


def verify_segment(source: Source) -> Iterator[Corrupt]:
    """Yield every problem of a segment, none if it is intact. Reads all of it, in large steps.

    A damaged header, footer or batch index hides the rest, and is the only problem reported.
    """
    source = ReadAhead(source)
    try:
        index = open_segment(source)
    except Corrupt as damage:
        yield damage
        return
    problems = list(_verify_columns(source.name, index))
    tagged_batches: list[TaggedBatch] = []
    for at in range(len(index)):
        try:
            (batch,) = read_batches(source, index, at, at)
        except Corrupt as damage:
            problems.append(damage)
            continue
        problems += _verify_batch(source.name, index, at, batch)
        if not problems and batch.tags is not None:
            tagged_batches.append(TaggedBatch.of(at, batch))
    yield from problems
    # The expected tags are known only if every batch could be read.
    at = index.batches_end + len(index) * INDEX_ENTRY_BYTES
    yield from verify_tags(source, index, offset=at, expected_batches=None if problems else tagged_batches)


def verify_stub(source: Source) -> Iterator[Corrupt]:
    """Yield every problem of a stub, none if it is intact."""
    try:
        index = open_stub(source)
    except Corrupt as damage:
        yield damage
        return
    yield from _verify_columns(source.name, index)


def _verify_columns(name: str, index: SegmentIndex) -> Iterator[Corrupt]:
    """Check that the batches of the index fill the file and are in order."""
    offset, next_seq, last_ts = HEADER_BYTES, 0, -(1 << 63)
    for at in range(len(index)):
        if index.offsets[at] != offset:
            yield Corrupt(
                name, index.offsets[at], f"the index has a batch here, but it should be at {offset}"
            )
        if index.first_seqs[at] < next_seq or index.counts[at] == 0:
            reason = f"seq {index.first_seqs[at]} comes after seq {next_seq - 1}"
            yield Corrupt(name, index.offsets[at], f"the batches are not in order: {reason}")
        if not last_ts <= index.first_times[at] <= index.last_times[at]:
            yield Corrupt(name, index.offsets[at], "the times of the batches are not in order")
        offset = index.offsets[at] + padded_length(index.lengths[at])
        next_seq = index.first_seqs[at] + index.counts[at]
        last_ts = index.last_times[at]


def _verify_batch(name: str, index: SegmentIndex, at: int, batch: Batch) -> Iterator[Corrupt]:
    """Check that a batch matches its index entry. Its seqs were compared when it was read."""
    index_entry = (index.first_times[at], index.last_times[at], index.sizes[at])
    if index_entry != (batch.first_ts, batch.last_ts, batch.size(0, batch.count - 1)):
        yield Corrupt(name, index.offsets[at], "times or size of the batch are not what the index says")
    tags = batch.tag_list()
    if tags is not None and len(tags) != batch.count:
        yield Corrupt(name, index.offsets[at], f"{batch.count} records of the batch have {len(tags)} tags")


# -- copying


def verified_bytes(source: Source, index: SegmentIndex) -> Iterator[list[Buffer]]:
    """Yield all bytes of a segment in steps, each verified first.

    Header, batch index and footer are encoded again from verified data, which gives the same bytes.
    """
    for problem in _verify_columns(source.name, index):
        raise problem
    yield [encode_header(SEGMENT, index.generation, index.serial, index.first_seq, version=index.version)]
    batches = (source, index.piece_table, 0, len(index) - 1)
    for _, _, content in read_runs(*batches, bytes_max=READ_BYTES, seed=index.generation, label="batch"):
        yield from _by_steps(content)
    columns = encode_columns(index)
    yield [columns]
    for content in read_tag_index(source, index, offset=index.batches_end + len(columns)):
        yield from _by_steps(content)
    yield [encode_footer(index, columns)]


def _by_steps(content: memoryview) -> Iterator[list[Buffer]]:
    step_bytes = small_steps.STEP_BYTES
    for at in range(0, len(content), step_bytes):
        yield [content[at : at + step_bytes]]
