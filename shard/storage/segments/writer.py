"""Writes a segment or a stub: takes batches, makes one durable file.

Rules of the file:
  1. A segment or stub appears by rename, after its bytes are durable. So a bad one is damage, never a crash.
  2. A payload is never copied before it is written, unless it is so small that a copy is cheaper than one
     more buffer.
  3. Writing goes in small steps, so that other users of disk and interpreter hardly wait. After each step the
     writing thread calls `pause` with the bytes of the step: sleeping there bounds the rate, raising there
     ends the write like any failure.

Invariants:
  ASCENDING      seqs rise from batch to batch (there may be holes), times never fall.
  FROM_BATCHES   generation, serial and batches determine every byte of the file, and so its index:
                 `build_index` returns without a disk the index that `write_segment` writes.
  ALIGNED        every batch begins at a multiple of eight.
  COLUMNS_EVEN   each column of the batch index has one entry per batch.
  WRITTEN_WHOLE  a file is as long as its index says.
  FINISHED       the index of a segment is known after its last byte was yielded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from xxhash import xxh3_64_intdigest

from shard.storage.files import Buffer, DiskLike, parent_of
from shard.storage.segments import small_steps
from shard.storage.segments.index import (
    COLUMNS,
    FOOTER_BYTES,
    HEADER_BYTES,
    SEGMENT,
    STUB,
    SegmentIndex,
    encode_columns,
    encode_footer,
    encode_header,
    open_segment,
    segment_name,
)
from shard.storage.segments.reader import verified_bytes
from shard.storage.segments.tag_writer import TagIndexBuilder
from shard.storage.sources import PADDING, Source, checksum_of, padded_length
from streams.protocol.model.records import Batch

#: A step ends at `STEP_BYTES` or this many batches. A batch costs about 4 µs and a tagged record 0.1 µs, so a
#: step takes one or two milliseconds.
STEP_BATCHES = 256
#: Bytes between syncs of the file, so that a commit of the log never waits for a whole segment. Beside a
#: write at full speed a commit took 0.6 ms (median) with 1 MiB, 2.9 ms with 4; the write took equally long.
SYNC_BYTES = 1 << 20
#: Batches up to this size are joined into one buffer: the copy costs less than two more buffers do.
_JOIN_BYTES_MAX = 4096


def no_pause(written_bytes: int) -> None:
    """A pause for writes without a rate limit."""


def build_index(*, generation: int, serial: int, batches: Iterable[Batch]) -> SegmentIndex:
    """Return the index of a segment of these batches, without writing it: see FROM_BATCHES.

    It costs as much as writing except for the disk: every payload is hashed, every tag indexed.
    """
    builder = _Builder(generation=generation, serial=serial)
    for batch in batches:
        builder.add(batch)
    for _ in builder.finish():
        pass
    return builder.index()


def layout(batches: Iterable[Batch]) -> array[int]:
    """Return the offset of each batch in the file."""
    offsets = array("Q")
    offset = HEADER_BYTES
    for batch in batches:
        offsets.append(offset)
        offset += padded_length(sum(map(len, batch.to_parts())))
    return offsets


def write_segment(
    disk: DiskLike,
    directory: str,
    *,
    generation: int,
    serial: int,
    batches: Iterable[Batch],
    pause: Callable[[int], None] = no_pause,
) -> SegmentIndex:
    """Make a segment durable under its name. A failed write leaves no segment and raises.

    Batches are taken one by one and released, so they may come from a generator. There must be at least one.
    """
    builder = _Builder(generation=generation, serial=serial)
    steps = _steps(builder, batches)
    first = next(steps)  # before anything is created: the name depends on the first batch
    size = _write_file(disk, f"{directory}/{builder.name}", chain((first,), steps), pause)
    assert size == builder.index().file_bytes, "WRITTEN_WHOLE"
    return builder.index()


def _write_file(
    disk: DiskLike, path: str, steps: Iterable[list[Buffer]], pause: Callable[[int], None]
) -> int:
    """Make a file durable, create its two parent directories, and return its size. A failure leaves no
    file."""
    folder = parent_of(path)
    directory = parent_of(folder)
    disk.mkdir(directory)
    disk.fsync_dir(parent_of(directory))
    disk.mkdir(folder)
    disk.fsync_dir(directory)
    is_new = not disk.exists(path)
    current_path = path.removesuffix(SEGMENT.suffix) + ".tmp"
    handle = disk.create(current_path)
    try:
        try:
            offset = synced_offset = 0
            for step in steps:
                if offset - synced_offset >= SYNC_BYTES:
                    disk.fdatasync(handle)
                    synced_offset = offset
                step_bytes = disk.pwritev(handle, step, offset)
                offset += step_bytes
                pause(step_bytes)
            disk.fsync(handle)
        finally:
            disk.close(handle)
        disk.rename(current_path, path)
        current_path = path
        disk.fsync_dir(folder)
    except BaseException:
        # Nothing refers to this file yet, unless it replaced an identical one. A file that cannot be removed
        # now is found by the next listing of the directory.
        if current_path != path or is_new:
            with suppress(OSError):
                disk.unlink(current_path)
        raise
    return offset


def _steps(builder: _Builder, batches: Iterable[Batch]) -> Iterator[list[Buffer]]:
    """Yield the whole file in order, in runs of buffers."""
    step: list[Buffer] = []
    start = count = 0
    for batch in batches:
        step += builder.add(batch)
        count += 1
        if builder.offset - start >= small_steps.STEP_BYTES or count == STEP_BATCHES:
            yield step
            step = []
            start, count = builder.offset, 0
    if step:
        yield step
    offset = builder.offset
    for buffer in builder.finish():
        offset += len(buffer)
        yield [buffer]
    assert offset == builder.index().file_bytes, "FROM_BATCHES"


def copy_segment(
    disk: DiskLike, directory: str, source: Source, *, pause: Callable[[int], None] = no_pause
) -> SegmentIndex:
    """Copy a segment from a source to this disk durably, and verify every byte.

    It fails like `write_segment`, and with `Corrupt` if the source is damaged.
    """
    index = open_segment(source)
    size = _write_file(disk, f"{directory}/{index.name}", verified_bytes(source, index), pause)
    assert size == index.file_bytes, "WRITTEN_WHOLE"
    return index


def write_stub(disk: DiskLike, directory: str, index: SegmentIndex) -> None:
    """Make the stub of a segment durable. It fails like `write_segment`; writing it again is harmless."""
    columns = encode_columns(index)
    header = encode_header(STUB, index.generation, index.serial, index.first_seq, version=index.version)
    step: list[Buffer] = [header, columns, encode_footer(index, columns)]
    size = _write_file(disk, f"{directory}/{index.stub_name}", [step], no_pause)
    assert size == HEADER_BYTES + len(columns) + FOOTER_BYTES, "WRITTEN_WHOLE"


class _Builder:
    """Turns batches into the bytes of a file, and builds the index. Pure."""

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
        #: Offset of the next batch. The header is emitted with the first one.
        self.offset = 0

    def __repr__(self) -> str:
        return f"<_Builder of {self._generation}: {len(self._columns['offsets'])} batches, {self.offset} B>"

    @property
    def name(self) -> str:
        first_seq = self._columns["first_seqs"][0]
        return segment_name(generation=self._generation, first_seq=first_seq, serial=self._serial)

    def index(self) -> SegmentIndex:
        assert self._index is not None, "FINISHED"
        return self._index

    def _encode_header(self, first_seq: int) -> bytes:
        version = self._tags.VERSION
        return encode_header(SEGMENT, self._generation, self._serial, first_seq, version=version)

    def add(self, batch: Batch) -> list[Buffer]:
        assert batch.count > 0 and batch.first_seq >= self._next_seq, "ASCENDING"
        assert self._last_ts <= batch.first_ts <= batch.last_ts, "ASCENDING"
        buffers: list[Buffer] = []
        if self.offset == 0:
            buffers.append(self._encode_header(batch.first_seq))
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
            self._tags.add(len(self._columns["first_seqs"]) - 1, batch)
        self._records += batch.count
        self._record_bytes += size
        self.offset += length + len(padding)
        self._next_seq = batch.first_seq + batch.count
        self._last_ts = batch.last_ts
        return buffers

    def finish(self) -> Iterator[bytes]:
        """Yield the bytes after the last batch. After the last of them `index` is known."""
        assert self.offset > 0, "FINISHED: a segment holds a batch at least"
        batches = len(self._columns["first_seqs"])
        assert all(len(column) == batches for column in self._columns.values()), "COLUMNS_EVEN"
        assert self.offset % 8 == 0, "ALIGNED"
        columns = b"".join(self._columns.values())
        yield columns
        directory = yield from self._tags.encode(self.offset + len(columns), self._generation)
        self._index = SegmentIndex(
            version=self._tags.VERSION,
            generation=self._generation,
            serial=self._serial,
            first_seq=self._columns["first_seqs"][0],
            last_seq=self._next_seq - 1,
            records=self._records,
            record_bytes=self._record_bytes,
            file_bytes=directory.offset + directory.length + FOOTER_BYTES,
            directory=directory,
            # Copies have no spare capacity, unlike arrays that grew.
            **{name: column[:] for name, column in self._columns.items()},
        )
        yield encode_footer(self._index, columns)
