"""Sealed segments: batches of one box in one file that is written once, read at random, and dropped whole.

    segments/7/00000000000000000001-000000000012.seg    box generation 7, from seq 1 on, segment serial 12
    segments/7/00000000000000004711-000000000013.stub   what must be known of one that is kept elsewhere
    segments/7/00000000000000004711-000000000015.tmp    being written, or left by a crash (also .stub.tmp)

    segment     header · batch · batch · … · batch index · tag block · … · tag directory · footer
    stub        header · batch index · footer

    batch       the bytes of `Batch.to_parts`, then zeros up to a multiple of eight
    `segmentindex` has names, header, batch index and footer, `tagindex` tag blocks and directory,
    `sources` how any of it is read. This file writes, copies, reads and verifies the whole, and is the
    one to import from.

Every batch begins at a multiple of eight. Every checksum is seeded with the generation; that of a batch or
tag block covers its zeros too.

Rules of the file:
  1. A segment or stub appears by rename, after its bytes are durable. So a bad one is damage, never a crash.
  2. Bytes are verified before anything in them is believed, and again whenever they are read.
  3. Reading needs a `Source` and nothing else, keeps no state, and may be done from any thread.
  4. A payload is never copied on its way to the file, unless it is so small that a copy is cheaper than one
     more buffer.
  5. Writing goes by steps, each of them so small that whoever shares disk and interpreter with it hardly
     waits. `pause` is called after each, in the thread that writes, with the bytes of the step: to sleep
     there bounds the rate, to raise there ends the write as any failure does.

Invariants:
  ascending      seqs rise from batch to batch (there may be holes), times never fall.
  every-byte     no byte of the file is without a checksum: a flipped bit is found by whoever reads it.
  from-batches   all of the file, and so its index, follows from generation, serial and batches alone:
                 `build_index` gives without a disk the index that `write_segment` writes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from xxhash import xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, DiskLike, parent_of
from shard.storage.segmentindex import (
    COLUMNS,
    FOOTER_BYTES,
    FORMAT_VERSION,
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    SEGMENT,
    STUB,
    SegmentIndex,
    encode_columns,
    encode_footer,
    encode_header,
    list_segments,
    list_stubs,
    open_segment,
    open_stub,
    remove_leftovers,
    remove_segment,
    segment_name,
    stub_name,
)
from shard.storage.sources import (
    PADDING,
    READ_BYTES,
    FileSource,
    ReadAhead,
    Source,
    checksum_of,
    padded,
    read_pieces,
    read_runs,
)
from shard.storage.tagindex import (
    TagDirectory,
    Tagged,
    TagIndexBuilder,
    find_tags,
    read_tag_index,
    verify_tags,
    walk_tags,
)
from streams.protocol.model.records import Batch

__all__ = [
    "FORMAT_VERSION",
    "FileSource",
    "SegmentIndex",
    "Source",
    "TagDirectory",
    "Tagged",
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

#: A step is over when it has this many bytes or this many batches; a batch that is larger is one step. To
#: take in a batch costs some 4 µs, a tagged record 0.3, so a step is a millisecond of work or two.
STEP_BYTES = 256 << 10
STEP_BATCHES = 256
#: After this much the file is synced, so that a commit of the log never queues behind a whole segment. Beside
#: a write at full speed a commit took 0.6 ms in the median with 1 MiB, 2.9 with 4, and the write as long.
SYNC_BYTES = 1 << 20
#: Batches up to this size are joined into one buffer: the copy costs less than two more buffers do.
_JOIN_BYTES_MAX = 4096


def no_pause(written_bytes: int) -> None:
    """For those who may write as fast as they can."""


def build_index(*, generation: int, serial: int, batches: Iterable[Batch]) -> SegmentIndex:
    """The index of a segment of these batches, without writing it: see from-batches.

    It costs what writing costs but for the disk: every payload is hashed, every tag indexed.
    """
    builder = _Builder(generation=generation, serial=serial)
    for batch in batches:
        builder.add(batch)
    for _ in builder.finish():
        pass
    return builder.index()


def layout(batches: Iterable[Batch]) -> array[int]:
    """Where each batch will begin in the file."""
    offsets = array("Q")
    offset = HEADER_BYTES
    for batch in batches:
        offsets.append(offset)
        offset += padded(sum(map(len, batch.to_parts())))
    return offsets


# ---------------------------------------------------------------------------------------------------
# Writing


def write_segment(
    disk: DiskLike,
    directory: str,
    *,
    generation: int,
    serial: int,
    batches: Iterable[Batch],
    pause: Callable[[int], None] = no_pause,
) -> SegmentIndex:
    """Make a segment durable under its name. A write that fails leaves no segment and raises what came.

    Batches are taken one by one and let go of, so they may come from a generator; one at least must come.
    """
    builder = _Builder(generation=generation, serial=serial)
    steps = _steps(builder, batches)
    first = next(steps)  # before anything is created: the name is known only with the first batch
    _write_file(disk, f"{directory}/{builder.name}", chain((first,), steps), pause)
    return builder.index()


def _write_file(
    disk: DiskLike, path: str, steps: Iterable[list[Buffer]], pause: Callable[[int], None]
) -> None:
    """Make a file durable in a directory of a directory, or raise what came and leave things as they were."""
    folder = parent_of(path)
    directory = parent_of(folder)
    disk.mkdir(directory)
    disk.fsync_dir(parent_of(directory))
    disk.mkdir(folder)
    disk.fsync_dir(directory)
    is_new = not disk.exists(path)
    made = path.removesuffix(SEGMENT.suffix) + ".tmp"
    handle = disk.create(made)
    try:
        try:
            offset = synced = 0
            for step in steps:
                if offset - synced >= SYNC_BYTES:
                    disk.fdatasync(handle)
                    synced = offset
                written = disk.pwritev(handle, step, offset)
                offset += written
                pause(written)
            disk.fsync(handle)
        finally:
            disk.close(handle)
        disk.rename(made, path)
        made = path
        disk.fsync_dir(folder)
    except BaseException:
        # Nobody knows of this file yet, unless it took the place of one that is the same and that somebody
        # may know. What cannot be removed now is found by whoever lists the directory.
        if made != path or is_new:
            with suppress(OSError):
                disk.unlink(made)
        raise


def _steps(builder: _Builder, batches: Iterable[Batch]) -> Iterator[list[Buffer]]:
    """The whole file in order, in runs of buffers."""
    step: list[Buffer] = []
    start = count = 0
    for batch in batches:
        step += builder.add(batch)
        count += 1
        if builder.offset - start >= STEP_BYTES or count == STEP_BATCHES:
            yield step
            step = []
            start, count = builder.offset, 0
    if step:
        yield step
    given = builder.offset
    for buffer in builder.finish():
        given += len(buffer)
        yield [buffer]
    assert given == builder.index().file_bytes, "from-batches"


def copy_segment(
    disk: DiskLike, directory: str, source: Source, *, pause: Callable[[int], None] = no_pause
) -> SegmentIndex:
    """Make a segment that is elsewhere durable here, every byte of it verified on its way.

    It fails as `write_segment` does, and with `Corrupt` if what the source has is damaged.
    """
    index = open_segment(source)
    _write_file(disk, f"{directory}/{index.name}", verified_bytes(source, index), pause)
    return index


def verified_bytes(source: Source, index: SegmentIndex) -> Iterator[list[Buffer]]:
    """All bytes of a segment in steps, each verified before it is given out.

    Header, batch index and footer are made anew from what was verified: that gives the same bytes.
    """
    for problem in _verify_columns(source.name, index):
        raise problem
    yield [encode_header(SEGMENT, index.generation, index.serial, index.first_seq)]
    batches = (source, index.places, 0, len(index) - 1)
    for _, _, content in read_runs(*batches, bytes_max=READ_BYTES, seed=index.generation, what="batch"):
        yield from _by_steps(content)
    columns = encode_columns(index)
    yield [columns]
    for content in read_tag_index(source, index, offset=index.batches_end + len(columns)):
        yield from _by_steps(content)
    yield [encode_footer(index, columns)]


def _by_steps(content: memoryview) -> Iterator[list[Buffer]]:
    for at in range(0, len(content), STEP_BYTES):
        yield [content[at : at + STEP_BYTES]]


def write_stub(disk: DiskLike, directory: str, index: SegmentIndex) -> None:
    """Make the stub of a segment durable, beside where the segment is or was. It fails as `write_segment`
    does; to write it again is harmless."""
    columns = encode_columns(index)
    header = encode_header(STUB, index.generation, index.serial, index.first_seq)
    step: list[Buffer] = [header, columns, encode_footer(index, columns)]
    _write_file(disk, f"{directory}/{index.stub_name}", [step], no_pause)


class _Builder:
    """Takes batches in, gives the file's bytes out, and ends up with the index. Pure."""

    def __init__(self, *, generation: int, serial: int) -> None:
        self._generation = generation
        self._serial = serial
        self._columns = {name: array(kind) for name, kind in COLUMNS}
        (
            self._add_first_seq,
            self._add_offset,
            self._add_checksum,
            self._add_first_time,
            self._add_last_time,
            self._add_length,
            self._add_count,
            self._add_size,
        ) = [column.append for column in self._columns.values()]
        self._tags = TagIndexBuilder()
        self._records = 0
        self._record_bytes = 0
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
            buffers.append(encode_header(SEGMENT, self._generation, self._serial, batch.first_seq))
            self.offset = HEADER_BYTES
        columns, blob = batch.to_parts()
        length = len(columns) + len(blob)
        padding = PADDING[length & 7]
        if length <= _JOIN_BYTES_MAX:
            body = b"".join((columns, blob, padding))
            buffers.append(body)
            checksum = xxh3_64_intdigest(body, self._generation)
        else:
            parts = (columns, blob, padding)
            buffers += parts
            checksum = checksum_of(parts, self._generation)
        size = len(blob) - (batch.count - 1)
        self._add_first_seq(batch.first_seq)
        self._add_offset(self.offset)
        self._add_checksum(checksum)
        self._add_first_time(batch.first_ts)
        self._add_last_time(batch.last_ts)
        self._add_length(length)
        self._add_count(batch.count)
        self._add_size(size)
        if batch.tags is not None:
            self._tags.take(batch)
        self._records += batch.count
        self._record_bytes += size
        self.offset += length + len(padding)
        self._next_seq = batch.first_seq + batch.count
        self._last_ts = batch.last_ts
        return buffers

    def finish(self) -> Iterator[bytes]:
        """The bytes that follow the last batch. When they have all been taken, `index` is known."""
        assert self.offset > 0, "a segment holds a batch at least"
        columns = b"".join(self._columns.values())
        yield columns
        directory = yield from self._tags.encode(self.offset + len(columns), self._generation)
        self._index = SegmentIndex(
            generation=self._generation,
            serial=self._serial,
            first_seq=self._columns["first_seqs"][0],
            last_seq=self._next_seq - 1,
            records=self._records,
            record_bytes=self._record_bytes,
            file_bytes=directory.offset + directory.length + FOOTER_BYTES,
            directory=directory,
            # A copy is as long as it needs to be; an array that grew has room to spare.
            **{name: column[:] for name, column in self._columns.items()},
        )
        yield encode_footer(self._index, columns)


# ---------------------------------------------------------------------------------------------------
# Reading


def read_batches(
    source: Source, index: SegmentIndex, first_at: int, last_at: int, *, bytes_max: int = READ_BYTES
) -> list[Batch]:
    """Batches first_at..last_at (indexes, both included), or as many of them as fit into `bytes_max` bytes
    of the file, but one at least. Neighbours are read together."""
    assert 0 <= first_at <= last_at < len(index)
    places = index.places
    last_at = places.last_within(first_at, last_at, bytes_max)
    pieces = read_pieces(source, places, first_at, last_at, seed=index.generation, what="batch")
    return [_decode_batch(source, index, at, piece) for at, piece in enumerate(pieces, first_at)]


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


# ---------------------------------------------------------------------------------------------------
# Verifying


def verify_segment(source: Source) -> Iterator[Corrupt]:
    """Every problem that there is, none when the segment is whole. Reads all of it, in large steps.

    A header, footer or batch index that is damaged hides the rest, and is the only problem told.
    """
    source = ReadAhead(source)
    try:
        index = open_segment(source)
    except Corrupt as damage:
        yield damage
        return
    problems = list(_verify_columns(source.name, index))
    tags = TagIndexBuilder()
    for at in range(len(index)):
        try:
            (batch,) = read_batches(source, index, at, at)
        except Corrupt as damage:
            problems.append(damage)
            continue
        problems += _verify_batch(source.name, index, at, batch)
        if not problems:
            tags.take(batch)
    yield from problems
    # What the tags should be is known only if every batch could be read.
    at = index.batches_end + len(index) * INDEX_ENTRY_BYTES
    yield from verify_tags(source, index, offset=at, expected=None if problems else tags.tagged())


def verify_stub(source: Source) -> Iterator[Corrupt]:
    """Every problem that there is, none when the stub is whole."""
    try:
        index = open_stub(source)
    except Corrupt as damage:
        yield damage
        return
    yield from _verify_columns(source.name, index)


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
        offset = index.offsets[at] + padded(index.lengths[at])
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
