"""Converts Arrow batches to packed columns and back, without a loop over records. Pure; needs pyarrow, numpy.

Rules of the file
- Work is per batch and per shard, never per record, and per box only where unavoidable: slicing 5,000 boxes
  out of a batch costs a hundred times as much as one sort and one `take`.
- Columns have exactly the types that Spark expects: `utf8`, `int64`, `timestamp[us, UTC]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streams.direct import Run
from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import check_box_name
from streams.protocol.payloads.packed import Buffer, PackedColumns
from streams.spark.gaps import Gap

#: Records of one box in one message: the limit of an append.
_ROWS_MAX: Final = 10_000
#: Bytes of one message. Two are in flight to each shard, so this bounds the memory of a task.
_BYTES_MAX: Final = 8 << 20

TIME: Final = pa.timestamp("us", tz="UTC")
GAP: Final = pa.struct(
    [("from", pa.int64()), ("to", pa.int64()), ("reason", pa.utf8()), ("missed", pa.int64())]
)
#: Columns of a read, by name.
COLUMNS: Final[dict[str, pa.DataType]] = {
    "box": pa.utf8(),
    "seq": pa.int64(),
    "ts": TIME,
    "data": pa.utf8(),
    "tag": pa.utf8(),
    "node": pa.utf8(),
    "meta": pa.utf8(),
    "gap": GAP,
}
#: An error shows this many bytes of a bad value.
_ERROR_BYTES_MAX: Final = 60
_JSON_SPACE: Final = " \t\n\r"
_NOTHING: Final = pa.array([], pa.utf8())


class BadRows(InvalidRequest):
    """Some rows cannot be written: a value is null, not UTF-8, or not JSON."""


# -- rows -> the wire


def split_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts that fit into one message each."""
    for start in range(0, batch.num_rows, _ROWS_MAX):
        stack = [batch.slice(start, _ROWS_MAX)]
        while stack:
            part = stack.pop()
            if part.nbytes > _BYTES_MAX and part.num_rows > 1:
                half = part.num_rows // 2
                stack += [part.slice(half), part.slice(0, half)]
            else:
                yield part


class Packer:
    """Converts batches to messages, one for each shard that owns rows of the batch."""

    def __init__(
        self,
        shard_of: Callable[[str], int],
        *,
        box: str | None = None,
        default_node: str = "",
        create: bool | None = None,
    ) -> None:
        self._shard_of = shard_of
        self._box = box
        self._node = default_node
        self._create = create
        #: Box name -> shard, for names that passed validation. As many entries as the job has boxes.
        self._shards: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Packer {self._box or 'by column'}, {len(self._shards)} boxes>"

    def pack(self, batch: pa.RecordBatch) -> list[tuple[int, PackedColumns]]:
        """Return (shard, message) pairs. The rows of each box keep the order of the batch."""
        if not batch.num_rows:
            return []
        try:
            return self._pack(batch)
        except pa.ArrowInvalid as error:
            raise _not_utf8(batch, self._box, error) from None

    def _pack(self, batch: pa.RecordBatch) -> list[tuple[int, PackedColumns]]:
        if self._box is not None:
            return [(self._shard(self._box), self._build_message(batch, [self._box], [batch.num_rows]))]
        if "box" not in batch.schema.names:
            raise BadRows("there is no column box; add one, or set the option box for all rows")
        boxes = pc.dictionary_encode(_text(batch.column("box")))
        if boxes.null_count:
            raise BadRows("box: is null in some rows; fill the column, or set the option box for all rows")
        names = boxes.dictionary.to_pylist()
        by_shard = sorted(range(len(names)), key=lambda each: (self._shard(names[each]), each))
        ranks = np.empty(len(names), np.min_scalar_type(len(names)))
        ranks[by_shard] = np.arange(len(names))
        row_ranks = ranks[boxes.indices.to_numpy(zero_copy_only=False)]
        counts = np.bincount(row_ranks, minlength=len(names)).tolist()
        if len(names) > 1 and not bool((row_ranks[1:] >= row_ranks[:-1]).all()):
            # numpy sorts small integers by radix: stable and fast. The box column is not needed from here on.
            batch = batch.drop_columns(["box"]).take(pa.array(np.argsort(row_ranks, kind="stable")))
        return list(self._by_shard(batch, [names[each] for each in by_shard], counts))

    def _by_shard(
        self, batch: pa.RecordBatch, names: list[str], counts: list[int]
    ) -> Iterator[tuple[int, PackedColumns]]:
        first = row = 0
        for index in range(1, len(names) + 1):
            if index < len(names) and self._shard(names[index]) == self._shard(names[first]):
                continue
            rows = sum(counts[first:index])
            part = batch.slice(row, rows)
            yield (
                self._shard(names[first]),
                self._build_message(part, names[first:index], counts[first:index]),
            )
            first, row = index, row + rows

    def _shard(self, name: str) -> int:
        shard = self._shards.get(name)
        if shard is None:
            shard = self._shards[name] = self._shard_of(check_box_name(name))
        return shard

    def _build_message(self, rows: pa.RecordBatch, names: list[str], counts: list[int]) -> PackedColumns:
        columns = set(rows.schema.names)
        data_offsets, data = _values(_json(rows.column("data")), "data", names, counts)
        message = PackedColumns(
            boxes=names,
            counts=counts,
            data_offsets=data_offsets,
            data=data,
            default_node=self._node,
            create=self._create,
        )
        if "tag" in columns:
            message.tag_offsets, message.tag = _texts(rows.column("tag"))
        if "node" in columns:
            node = _constant(rows.column("node"))
            if node:
                message.default_node = node
            else:
                message.node_offsets, message.node = _texts(rows.column("node"))
        if "meta" in columns and rows.column("meta").null_count < rows.num_rows:
            metas = pc.fill_null(_json(_map_text(rows.column("meta"))), "null")
            message.meta_offsets, message.meta = _values(metas, "meta", names, counts)
        if "ts" in columns and rows.column("ts").null_count < rows.num_rows:
            message.ts = _millis(rows.column("ts")).tobytes()
        return message


def _not_utf8(batch: pa.RecordBatch, box: str | None, error: pa.ArrowInvalid) -> BadRows:
    """Return an error that names the first value that is not UTF-8. Slow, and called only for the error."""
    for name in batch.schema.names:
        column = batch.column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
            continue
        for row, value in enumerate(column.cast(pa.binary()).to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError:
                where = box
                if where is None and name != "box":
                    where = batch.column("box").cast(pa.binary())[row].as_py().decode(errors="replace")
                start = value[:_ERROR_BYTES_MAX].decode(errors="backslashreplace")
                return BadRows(f"{name}: is not UTF-8 in a row for {where}: {start!r}")
    return BadRows(str(error))


def _text(column: pa.Array) -> pa.Array:
    """Convert a column to `utf8`: Spark may use 64-bit offsets or binary. Arrow validates the UTF-8."""
    return column if column.type == pa.utf8() else column.cast(pa.utf8())


def _json(column: pa.Array) -> pa.Array:
    """Strip white space around JSON values: the shard compares lengths."""
    column = _text(column)
    offsets, values = _buffers(column)
    starts, ends = offsets[:-1], offsets[1:]
    has_text = starts < ends
    if not bool(has_text.all()):
        starts, ends = starts[has_text], ends[has_text]
    if len(starts) and (bool((values[starts] <= 32).any()) or bool((values[ends - 1] <= 32).any())):
        return pc.utf8_trim(column, _JSON_SPACE)
    return column


def _map_text(column: pa.Array) -> pa.Array:
    """Encode a map column as JSON, value by value: several times slower than in the JVM (`prepare`)."""
    if not pa.types.is_map(column.type):
        return column
    maps = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    return pa.array(
        [None if each is None else msgspec.json.encode(each).decode() for each in maps], pa.utf8()
    )


def _buffers(column: pa.Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the offsets and bytes of a column without a copy. Offsets of a slice do not begin with 0."""
    _, offset_buffer, value_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[column.offset : column.offset + len(column) + 1]
    return offsets, np.frombuffer(value_buffer or b"", np.uint8)


def _join(column: pa.Array, separator: str) -> Any:
    whole = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
    return pc.binary_join(whole, separator)[0].as_buffer()


def _offsets(column: pa.Array) -> bytes:
    offsets, _ = _buffers(column)
    return bytes((offsets - offsets[0]).astype(np.int32, copy=False).data)


def _values(column: pa.Array, column_name: str, names: list[str], counts: list[int]) -> tuple[Buffer, Buffer]:
    """Pack a column of JSON texts as offsets and one JSON array."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        box = names[int(np.searchsorted(np.cumsum(counts), row, side="right"))]
        raise BadRows(
            f"{column_name}: is null in a row for {box}; write the JSON value null as the text 'null'"
        )
    return _offsets(column), b"".join((b"[", _join(column, ","), b"]"))


def _texts(column: pa.Array) -> tuple[Buffer, Buffer]:
    if column.null_count == len(column):
        return b"", b""
    column = pc.fill_null(_text(column), "")
    offsets = _offsets(column)
    if not np.frombuffer(offsets, np.int32)[-1]:
        return b"", b""
    return offsets, memoryview(_join(column, "\0")).cast("B")


def _constant(column: pa.Array) -> str | None:
    """Return the text that all rows share, or None. A shared text is sent once per message."""
    if column.null_count or not len(column) or column[0] != column[-1]:
        return None
    column = _text(column)
    return str(column[0].as_py()) if pc.all(pc.equal(column, column[0])).as_py() else None


def _millis(column: pa.Array) -> np.ndarray[Any, Any]:
    """Convert a column to milliseconds since 1970; null becomes -1."""
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        millis = pc.fill_null(column, -1000).to_numpy(zero_copy_only=False) // 1000
    else:
        millis = pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return np.asarray(millis, np.int64)


# -- the wire -> rows


def run_to_batch(run: Run, box: str, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a run of records to the columns of `schema`, a subset of `COLUMNS`."""
    return pa.RecordBatch.from_arrays(
        [_COLUMN_BUILDERS[name](run, box) for name in schema.names], schema=schema
    )


def gaps_to_batch(gaps: Sequence[Gap], schema: pa.Schema) -> pa.RecordBatch:
    """Convert each gap to a row at the seq of its last lost record.

    A gap without a known end gets the seq before its first lost record.
    """
    columns: dict[str, list[Any]] = {
        "box": [gap.box for gap in gaps],
        "seq": [gap.first - 1 if gap.last is None else gap.last for gap in gaps],
        "gap": [
            {"from": gap.first, "to": gap.last, "reason": gap.reason, "missed": gap.missed_count}
            for gap in gaps
        ],
    }
    nulls = [None] * len(gaps)
    return pa.RecordBatch.from_arrays(
        [pa.array(columns.get(name, nulls), schema.field(name).type) for name in schema.names],
        schema=schema,
    )


def _repeat(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.utf8()), count)


def _strings(offsets: np.ndarray[Any, Any], values: Any, valid: np.ndarray[Any, Any] | None) -> pa.Array:
    """Build a text column from offsets and contiguous bytes; rows that are not valid become null."""
    bits = None
    if valid is not None and not bool(valid.all()):
        bits = pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
    return pa.StringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets.astype(np.int32, copy=False)), pa.py_buffer(values), bits
    )


def _from_ends(ends: memoryview, base: int, stride: int, count: int) -> np.ndarray[Any, Any]:
    offsets = np.zeros(count + 1, np.int64)
    offsets[1:] = np.frombuffer(ends, np.uint32)
    offsets[1:] -= base
    if stride:
        offsets += np.arange(count + 1) * stride
    return offsets


def _data(run: Run, box: str) -> pa.Array:
    offsets = _from_ends(run.ends, run.base, run.stride, run.count)
    entries = _strings(offsets, run.values, None)
    if not run.prefix and not run.suffix:
        return entries
    stop = -run.suffix if run.suffix else None
    return pc.binary_slice(entries.view(pa.binary()), run.prefix, stop).view(pa.utf8())


def _split(text: memoryview) -> pa.Array:
    """Split texts that are joined with NUL; an empty text becomes null."""
    characters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(characters == 0)
    offsets = np.empty(len(ends) + 2, np.int64)
    offsets[0], offsets[1:-1], offsets[-1] = 0, ends - np.arange(len(ends)), len(characters) - len(ends)
    return _strings(offsets, characters[characters != 0], np.diff(offsets) > 0)


def _tag(run: Run, box: str) -> pa.Array:
    return _split(run.tags) if run.tags else pa.nulls(run.count, pa.utf8())


def _node(run: Run, box: str) -> pa.Array:
    if run.nodes:
        return _split(run.nodes)
    return _repeat(run.node, run.count) if run.node else pa.nulls(run.count, pa.utf8())


def _meta(run: Run, box: str) -> pa.Array:
    if not run.meta_ends:
        return pa.nulls(run.count, pa.utf8())
    offsets = _from_ends(run.meta_ends, 0, 0, run.count)
    return _strings(offsets, run.metas, np.diff(offsets) > 0)


def _seq(run: Run, box: str) -> pa.Array:
    if run.seqs:
        return pa.array(np.frombuffer(run.seqs, np.int64))
    return pa.array(np.arange(run.first_seq, run.first_seq + run.count, dtype=np.int64))


def _ts(run: Run, box: str) -> pa.Array:
    if run.times:
        millis = np.frombuffer(run.times, np.int64)
    else:
        millis = np.full(run.count, run.first_ts, np.int64)
    return pa.array(millis * 1000).cast(TIME)


_COLUMN_BUILDERS: Final[dict[str, Callable[[Run, str], pa.Array]]] = {
    "box": lambda run, box: _repeat(box, run.count),
    "seq": _seq,
    "ts": _ts,
    "data": _data,
    "tag": _tag,
    "node": _node,
    "meta": _meta,
    "gap": lambda run, box: pa.nulls(run.count, GAP),
}
