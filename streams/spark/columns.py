"""Arrow batches to packed columns and back, without a loop over records. Pure; needs pyarrow and numpy.

Rules of the file
- Work per batch and per shard, never per record and, where it can be helped, never per box: slicing 5000
  boxes out of a batch costs a hundred times what one sort and one `take` do.
- Columns come out exactly as Spark wants them: `utf8`, `int64`, `timestamp[us, UTC]`.
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
#: Of one message. Two are on the way to each shard at a time, so this bounds a task's memory.
_BYTES_MAX: Final = 8 << 20

TIME: Final = pa.timestamp("us", tz="UTC")
GAP: Final = pa.struct(
    [("from", pa.int64()), ("to", pa.int64()), ("reason", pa.utf8()), ("missed", pa.int64())]
)
#: What a read can give, by name.
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
#: Bytes of a bad value that an error shows.
_SHOWN: Final = 60
_JSON_SPACE: Final = " \t\n\r"
_NOTHING: Final = pa.array([], pa.utf8())


class BadRows(InvalidRequest):
    """Rows cannot be written as they are."""


# -- rows -> the wire


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in parts that fit into one message each."""
    for start in range(0, batch.num_rows, _ROWS_MAX):
        todo = [batch.slice(start, _ROWS_MAX)]
        while todo:
            part = todo.pop()
            if part.nbytes > _BYTES_MAX and part.num_rows > 1:
                half = part.num_rows // 2
                todo += [part.slice(half), part.slice(0, half)]
            else:
                yield part


class Packer:
    """Turns batches into messages, one for each shard that has rows in them."""

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
        #: Names that were checked, with their shards. As many as the job has boxes: strings it holds anyway.
        self._shards: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Packer {self._box or 'by column'}, {len(self._shards)} boxes>"

    def pack(self, batch: pa.RecordBatch) -> list[tuple[int, PackedColumns]]:
        """(shard, its rows). The order of a box's rows is that of the batch."""
        if not batch.num_rows:
            return []
        try:
            return self._pack(batch)
        except pa.ArrowInvalid as error:
            raise _not_utf8(batch, self._box, error) from None

    def _pack(self, batch: pa.RecordBatch) -> list[tuple[int, PackedColumns]]:
        if self._box is not None:
            return [(self._shard(self._box), self._packed(batch, [self._box], [batch.num_rows]))]
        if "box" not in batch.schema.names:
            raise BadRows("there is no column box, and the option box does not say where the rows go")
        encoded = pc.dictionary_encode(_text(batch.column("box")))
        if encoded.null_count:
            raise BadRows("box: is null in some rows; every row needs one, or set the option box")
        names = encoded.dictionary.to_pylist()
        by_shard = sorted(range(len(names)), key=lambda each: (self._shard(names[each]), each))
        ranks = np.empty(len(names), np.min_scalar_type(len(names)))
        ranks[by_shard] = np.arange(len(names))
        ranked = ranks[encoded.indices.to_numpy(zero_copy_only=False)]
        counts = np.bincount(ranked, minlength=len(names)).tolist()
        if len(names) > 1 and not bool((ranked[1:] >= ranked[:-1]).all()):
            # Small integers are sorted by radix: stable and quick. The names are not needed any more.
            batch = batch.drop_columns(["box"]).take(pa.array(np.argsort(ranked, kind="stable")))
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
            yield self._shard(names[first]), self._packed(part, names[first:index], counts[first:index])
            first, row = index, row + rows

    def _shard(self, name: str) -> int:
        shard = self._shards.get(name)
        if shard is None:
            shard = self._shards[name] = self._shard_of(check_box_name(name))
        return shard

    def _packed(self, rows: pa.RecordBatch, names: list[str], counts: list[int]) -> PackedColumns:
        have = set(rows.schema.names)
        data_offsets, data = _values(_json(rows.column("data")), "data", names, counts)
        packed = PackedColumns(
            boxes=names,
            counts=counts,
            data_offsets=data_offsets,
            data=data,
            default_node=self._node,
            create=self._create,
        )
        if "tag" in have:
            packed.tag_offsets, packed.tag = _texts(rows.column("tag"))
        if "node" in have:
            node = _constant(rows.column("node"))
            if node:
                packed.default_node = node
            else:
                packed.node_offsets, packed.node = _texts(rows.column("node"))
        if "meta" in have and rows.column("meta").null_count < rows.num_rows:
            metas = pc.fill_null(_json(_map_text(rows.column("meta"))), "null")
            packed.meta_offsets, packed.meta = _values(metas, "meta", names, counts)
        if "ts" in have and rows.column("ts").null_count < rows.num_rows:
            packed.ts = _millis(rows.column("ts")).tobytes()
        return packed


def _not_utf8(batch: pa.RecordBatch, box: str | None, error: pa.ArrowInvalid) -> BadRows:
    """Which value Arrow could not take for text, looked for one by one: it is called once, for an error."""
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
                start = value[:_SHOWN].decode(errors="backslashreplace")
                return BadRows(f"{name}: is not UTF-8 in a row for {where}: {start!r}")
    return BadRows(str(error))


def _text(column: pa.Array) -> pa.Array:
    """As `utf8`: Spark may use 64-bit offsets, and binary is taken for UTF-8 after a look at it."""
    return column if column.type == pa.utf8() else column.cast(pa.utf8())


def _json(column: pa.Array) -> pa.Array:
    """Without spaces around the values: the shard compares lengths."""
    column = _text(column)
    offsets, values = _buffers(column)
    starts, ends = offsets[:-1], offsets[1:]
    filled = starts < ends
    if not bool(filled.all()):
        starts, ends = starts[filled], ends[filled]
    if len(starts) and (bool((values[starts] <= 32).any()) or bool((values[ends - 1] <= 32).any())):
        return pc.utf8_trim(column, _JSON_SPACE)
    return column


def _map_text(column: pa.Array) -> pa.Array:
    """A map as JSON, one by one: several times slower than text made in the JVM (`prepare`)."""
    if not pa.types.is_map(column.type):
        return column
    found = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    return pa.array(
        [None if each is None else msgspec.json.encode(each).decode() for each in found], pa.utf8()
    )


def _buffers(column: pa.Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Offsets and bytes as they lie there; offsets of a slice do not begin with 0."""
    _, offsets, values = column.buffers()
    found = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return found, np.frombuffer(values or b"", np.uint8)


def _joined(column: pa.Array, between: str) -> Any:
    whole = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
    return pc.binary_join(whole, between)[0].as_buffer()


def _offsets(column: pa.Array) -> bytes:
    found, _ = _buffers(column)
    return bytes((found - found[0]).astype(np.int32, copy=False).data)


def _values(column: pa.Array, what: str, names: list[str], counts: list[int]) -> tuple[Buffer, Buffer]:
    """A column of JSON texts as one array."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        box = names[int(np.searchsorted(np.cumsum(counts), row, side="right"))]
        raise BadRows(f"{what}: is null in a row for {box}; the JSON value null is the text 'null'")
    return _offsets(column), b"".join((b"[", _joined(column, ","), b"]"))


def _texts(column: pa.Array) -> tuple[Buffer, Buffer]:
    if column.null_count == len(column):
        return b"", b""
    column = pc.fill_null(_text(column), "")
    offsets = _offsets(column)
    if not np.frombuffer(offsets, np.int32)[-1]:
        return b"", b""
    return offsets, memoryview(_joined(column, "\0")).cast("B")


def _constant(column: pa.Array) -> str | None:
    """The text that all rows have, if it is one: then it need not be sent with each of them."""
    if column.null_count or not len(column) or column[0] != column[-1]:
        return None
    column = _text(column)
    return str(column[0].as_py()) if pc.all(pc.equal(column, column[0])).as_py() else None


def _millis(column: pa.Array) -> np.ndarray[Any, Any]:
    """Milliseconds since 1970; -1 where there is none."""
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        found = pc.fill_null(column, -1000).to_numpy(zero_copy_only=False) // 1000
    else:
        found = pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return np.asarray(found, np.int64)


# -- the wire -> rows


def batch_of(run: Run, box: str, schema: pa.Schema) -> pa.RecordBatch:
    """The records of a run in the columns of `schema`, which are some of `COLUMNS`."""
    return pa.RecordBatch.from_arrays([_MAKE[name](run, box) for name in schema.names], schema=schema)


def gap_batch(gaps: Sequence[Gap], schema: pa.Schema) -> pa.RecordBatch:
    """A row for each, at the seq of the last record that is missing; before the first one where the last is
    not known."""
    columns: dict[str, list[Any]] = {
        "box": [gap.box for gap in gaps],
        "seq": [gap.first - 1 if gap.last is None else gap.last for gap in gaps],
        "gap": [
            {"from": gap.first, "to": gap.last, "reason": gap.reason, "missed": gap.missed} for gap in gaps
        ],
    }
    nothing = [None] * len(gaps)
    return pa.RecordBatch.from_arrays(
        [pa.array(columns.get(name, nothing), schema.field(name).type) for name in schema.names],
        schema=schema,
    )


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.utf8()), count)


def _strings(offsets: np.ndarray[Any, Any], values: Any, valid: np.ndarray[Any, Any] | None) -> pa.Array:
    """Texts that lie one after the other; those that are not valid are null."""
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


def _split(joined: memoryview) -> pa.Array:
    """Texts that were joined with NUL; an empty one is null."""
    whole = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero(whole == 0)
    offsets = np.empty(len(ends) + 2, np.int64)
    offsets[0], offsets[1:-1], offsets[-1] = 0, ends - np.arange(len(ends)), len(whole) - len(ends)
    return _strings(offsets, whole[whole != 0], np.diff(offsets) > 0)


def _tag(run: Run, box: str) -> pa.Array:
    return _split(run.tags) if run.tags else pa.nulls(run.count, pa.utf8())


def _node(run: Run, box: str) -> pa.Array:
    if run.nodes:
        return _split(run.nodes)
    return _repeated(run.node, run.count) if run.node else pa.nulls(run.count, pa.utf8())


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


_MAKE: Final[dict[str, Callable[[Run, str], pa.Array]]] = {
    "box": lambda run, box: _repeated(box, run.count),
    "seq": _seq,
    "ts": _ts,
    "data": _data,
    "tag": _tag,
    "node": _node,
    "meta": _meta,
    "gap": lambda run, box: pa.nulls(run.count, GAP),
}
