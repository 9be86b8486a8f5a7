"""Packed columns: many records of many boxes in one message, in a form that neither side loops over.

    head     boxes, how many rows each has, and how many bytes each column
    body     data:  offsets · values     tag: offsets · values     node: …     meta: …     ts: numbers

Rows are ordered by box, all rows of a box in a row. Of every column but `ts`

    offsets   int32, one more than there are rows: where the values would begin and end if nothing stood
              between them (so those of an Arrow string column whose slice begins at 0)
    values    data, meta: the values as one JSON array, `[v0,v1,v2]`; `null` where a record has no meta
              tag, node:  the values joined with NUL; nothing where a record has none

so value i of `data` stands at 1 + offsets[i] + i. The array is checked as JSON in one go, and every value
must end where the offsets say: no "value" reaches over its end. Values have no spaces around them.

    ts        int64 each, -1 where a record has none

A column that no record uses is left out: it has 0 bytes in the head. All numbers are little-endian.

Rules of the file
- Work per column and per box. Records are gone through one by one only to say which of them is wrong.
- The result is `Columns`, as from a JSON body; `model/records.py` stores them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
from msgspec import Raw

from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from streams.protocol.model.names import check_box_name, check_text, quote
from streams.protocol.model.records import Columns
from streams.protocol.payloads.appends import MILLIS_MAX, RecordLimits, check_meta

#: Boxes in one message. Each becomes a write of its own; this bounds how long one message holds a shard.
BOXES_MAX = 10_000

Buffer = bytes | bytearray | memoryview

_OFFSET = struct.Struct("<i")

_decode_raws = msgspec.json.Decoder(list[Raw]).decode
_NULL = Raw(b"null")


class PackedHead(msgspec.Struct, array_like=True, gc=False):
    """The head of packed columns. `sizes` are bytes of the values of data, tag, node, meta and ts."""

    boxes: list[str]
    counts: list[int]
    sizes: tuple[int, int, int, int, int]
    #: The node of records that have none of their own.
    node: str = ""
    #: As in a JSON append.
    create: bool | None = None
    idempotency_key: str = ""


class PackedColumns(msgspec.Struct, kw_only=True, gc=False):
    """Rows for boxes of one shard, as buffers. `pack` builds one from plain lists."""

    boxes: list[str]
    counts: list[int]
    data_offsets: Buffer
    data: Buffer
    tag_offsets: Buffer = b""
    tag: Buffer = b""
    node_offsets: Buffer = b""
    node: Buffer = b""
    meta_offsets: Buffer = b""
    meta: Buffer = b""
    ts: Buffer = b""
    #: The node of records that have none of their own.
    default_node: str = ""
    create: bool | None = None

    @property
    def count(self) -> int:
        return sum(self.counts)

    def head(self, idempotency_key: str = "") -> PackedHead:
        sizes = (_size(self.data), _size(self.tag), _size(self.node), _size(self.meta), _size(self.ts))
        return PackedHead(self.boxes, self.counts, sizes, self.default_node, self.create, idempotency_key)

    def buffers(self) -> list[Buffer]:
        """The body, in pieces."""
        pieces = [self.data_offsets, self.data]
        for offsets, values in (
            (self.tag_offsets, self.tag),
            (self.node_offsets, self.node),
            (self.meta_offsets, self.meta),
        ):
            if _size(values):
                pieces += [offsets, values]
        if _size(self.ts):
            pieces.append(self.ts)
        return pieces


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def pack(
    boxes: Sequence[str],
    counts: Sequence[int],
    data: Sequence[bytes],
    *,
    tag: Sequence[bytes] | None = None,
    node: Sequence[bytes] | None = None,
    meta: Sequence[bytes] | None = None,
    ts: Sequence[int] | None = None,
    default_node: str = "",
    create: bool | None = None,
) -> PackedColumns:
    """Packed columns of plain lists. `data` and `meta` are JSON texts (`b""`: no meta), the rest is UTF-8
    (`b""`: none); a time of -1 is none."""
    columns = PackedColumns(
        boxes=list(boxes),
        counts=list(counts),
        data_offsets=_offsets(data),
        data=b"[%b]" % b",".join(data),
        default_node=default_node,
        create=create,
    )
    if tag is not None and any(tag):
        columns.tag_offsets, columns.tag = _offsets(tag), b"\0".join(tag)
    if node is not None and any(node):
        columns.node_offsets, columns.node = _offsets(node), b"\0".join(node)
    if meta is not None and any(meta):
        metas = [value or b"null" for value in meta]
        columns.meta_offsets, columns.meta = _offsets(metas), b"[%b]" % b",".join(metas)
    if ts is not None and any(value >= 0 for value in ts):
        columns.ts = array("q", ts).tobytes()
    return columns


def _offsets(values: Sequence[bytes]) -> bytes:
    return array("i", accumulate(map(len, values), initial=0)).tobytes()


# ---------------------------------------------------------------------------------------------------
# On the shard


class Rows(msgspec.Struct, gc=False):
    """The rows of a message for one box."""

    box: str
    columns: Columns


def unpack(head: PackedHead, body: bytes, limits: RecordLimits) -> list[Rows]:
    """Decode and check a message; return the rows of each box. Raises `InvalidRequest` or `…TooLarge`."""
    _check_boxes(head, limits)
    return _Unpacking(head, body, limits).rows()


def unpack_again(head: PackedHead, body: bytes) -> list[Rows]:
    """Unpack a message that was accepted before, without limits: they may be lower now."""
    return _Unpacking(head, body, _NO_LIMITS).rows()


_NO_LIMITS = RecordLimits(*[2**31] * len(RecordLimits.__struct_fields__))


def _check_boxes(head: PackedHead, limits: RecordLimits) -> None:
    boxes, counts = head.boxes, head.counts
    if not 0 < len(boxes) <= BOXES_MAX:
        raise InvalidRequest(f"boxes: {len(boxes)} boxes in one message, 1 to {BOXES_MAX} are allowed")
    if len(counts) != len(boxes):
        raise InvalidRequest(f"counts: {len(counts)} numbers for {len(boxes)} boxes", field="counts")
    if len(set(boxes)) != len(boxes):
        raise InvalidRequest("boxes: a box is named twice; its rows must stand together", field="boxes")
    for box, count in zip(boxes, counts, strict=True):
        check_box_name(box)
        if count < 1:
            raise InvalidRequest(f"counts: {box} has {count} rows", field="counts")
        if count > limits.batch_records_max:
            raise BatchTooLarge(
                f"counts: {count} records for {box} in one write, at most {limits.batch_records_max} are "
                "allowed; split the write",
                box=box,
                limit=limits.batch_records_max,
            )


class _Unpacking:
    """Decodes one message, column by column and then box by box."""

    def __init__(self, head: PackedHead, body: bytes, limits: RecordLimits) -> None:
        self._head = head
        self._limits = limits
        self._count = sum(head.counts)
        # Values are views into the body; it is not copied.
        self._body = memoryview(body)
        self._at = 0
        data, tag, node, meta, ts = head.sizes
        expected_bytes = ts + sum(4 * (self._count + 1) + size for size in (data, tag, node, meta) if size)
        if min(head.sizes) < 0 or expected_bytes != len(body) or not data or ts not in (0, 8 * self._count):
            raise InvalidRequest(
                f"sizes: {list(head.sizes)} for {self._count} rows are not a body of {len(body)} bytes",
                field="sizes",
            )
        self._datas, self._ends = self._json("data", data)
        self._tags = self._texts(tag)
        self._nodes = self._texts(node)
        self._metas = self._json("meta", meta)[0] if meta else None
        self._times = self._numbers(ts)
        if head.node:
            check_text(head.node, "node", bytes_max=limits.node_bytes_max)

    def rows(self) -> list[Rows]:
        rows: list[Rows] = []
        first = 0
        for box, count in zip(self._head.boxes, self._head.counts, strict=True):
            rows.append(Rows(box, self._columns(box, first, first + count)))
            first += count
        return rows

    # -- columns of the message

    def _take(self, size: int) -> memoryview:
        self._at += size
        return self._body[self._at - size : self._at]

    def _offsets(self) -> array[int]:
        offsets = array("i")
        offsets.frombytes(self._take(4 * (self._count + 1)))
        if offsets[0] != 0:
            raise InvalidRequest(f"offsets: must begin with 0, not {offsets[0]}", field="offsets")
        return offsets

    def _json(self, column: str, size: int) -> tuple[list[Raw], list[int]]:
        """Return the values, and the position after each."""
        offsets = self._offsets()
        text = self._take(size)
        try:
            str(text, "utf-8")  # raw values are passed over unchecked otherwise
            raws = _decode_raws(text)
        except (ValueError, RecursionError):
            raws = []
        # Every value ends where its offset says: then each of them is one value, and whole.
        ends = list(accumulate(map(len, raws)))
        if ends != offsets[1:].tolist():
            raise self._offender(column, offsets, bytes(text))
        return raws, ends

    def _offender(self, column: str, offsets: array[int], text: bytes) -> InvalidRequest:
        """Return the error for the first row that is not one JSON value."""
        for index in range(self._count):
            value = text[1 + offsets[index] + index : 1 + offsets[index + 1] + index]
            try:
                str(value, "utf-8")
                wrong = len(_decode_raws(b"[%b]" % value)[0]) != len(value)
            except (ValueError, RecursionError, IndexError):
                wrong = True
            if wrong:
                return self._wrong(
                    index, column, f"must be exactly one JSON value, got {_quote_bytes(value)}"
                )
        return InvalidRequest(f"{column}: the values are not where the offsets say", field=column)

    def _wrong(self, row: int, column: str, what: str) -> InvalidRequest:
        box, index = self._place(row)
        return InvalidRequest(f"{box} records[{index}].{column}: {what}", box=box, field=column, row=row)

    def _place(self, row: int) -> tuple[str, int]:
        first = 0
        for box, count in zip(self._head.boxes, self._head.counts, strict=True):
            if row < first + count:
                return box, row - first
            first += count
        raise AssertionError("rows are those of the boxes")

    def _texts(self, size: int) -> tuple[array[int], bytes] | None:
        if not size:
            return None
        offsets = self._offsets()
        text = bytes(self._take(size))
        if offsets[-1] + self._count - 1 != size:
            raise InvalidRequest("offsets: do not end where the values do", field="offsets")
        return offsets, text

    def _numbers(self, size: int) -> list[int | None] | None:
        if not size:
            return None
        numbers = array("q")
        numbers.frombytes(self._take(size))
        for number in (min(numbers), max(numbers)):
            if not -1 <= number <= MILLIS_MAX:
                raise self._wrong(numbers.index(number), "ts", f"is out of range, got {number}")
        return [None if number < 0 else number for number in numbers]

    # -- columns of a box

    def _columns(self, box: str, first: int, end: int) -> Columns:
        limits = self._limits
        if end - first == self._count:
            columns = Columns(self._datas, ends=array("I", self._ends))
        else:
            columns = Columns(self._datas[first:end])
        if self._tags is not None:
            columns.tags = self._join_texts(self._tags, first, end, "tag", limits.tag_bytes_max)
        columns.nodes = self._own_nodes(first, end)
        if self._metas is not None:
            columns.metas = self._own_metas(box, first, end)
        if self._times is not None:
            times = self._times[first:end]
            columns.times = None if times.count(None) == len(times) else times
        self._check_sizes(box, columns)
        return columns

    def _join_texts(
        self, column: tuple[array[int], bytes], first: int, end: int, field: str, bytes_max: int
    ) -> bytes | None:
        """Join the texts of a box in their order; None if all are empty."""
        offsets, text = column
        start, stop = offsets[first] + first, offsets[end] + end - 1
        box_text = text[start:stop]
        count = end - first
        if box_text.count(0) != count - 1 or (start and text[start - 1]) or not 0 <= start <= stop:
            raise self._wrong(first, field, "the values of this box are not where the offsets say")
        if len(box_text) < count:  # nothing but separators
            return None
        if not box_text.isascii() or not _all_short(box_text, bytes_max):
            for row, value in enumerate(box_text.split(b"\0"), first):
                self._check_text(row, field, value, bytes_max)
        return box_text

    def _check_text(self, row: int, field: str, value: bytes, bytes_max: int) -> None:
        try:
            text = str(value, "utf-8")
        except UnicodeDecodeError:
            raise self._wrong(row, field, f"is not valid UTF-8, got {_quote_bytes(value)}") from None
        box, index = self._place(row)
        check_text(text, f"{box} records[{index}].{field}", bytes_max=bytes_max)

    def _own_nodes(self, first: int, end: int) -> list[str | None] | None:
        default = self._head.node or None
        box_text = None
        if self._nodes is not None:
            box_text = self._join_texts(self._nodes, first, end, "node", self._limits.node_bytes_max)
        if box_text is None:
            return [default] * (end - first) if default else None
        one = box_text[: box_text.find(b"\0") + 1]
        if one * (end - first - 1) + one[:-1] == box_text and len(one) > 1:  # mostly it is the same for all
            return [str(one[:-1], "utf-8")] * (end - first)
        return [own or default for own in str(box_text, "utf-8").split("\0")]

    def _own_metas(self, box: str, first: int, end: int) -> list[Raw | None] | None:
        assert self._metas is not None
        metas = [None if raw == _NULL else raw for raw in self._metas[first:end]]
        if metas.count(None) == len(metas):
            return None
        for index, meta in enumerate(metas):
            if meta is not None:
                check_meta(index, meta, self._limits, box)
        return metas

    def _check_sizes(self, box: str, columns: Columns) -> None:
        # No record can be over the limit when the whole body is within it.
        most = self._limits.record_bytes_max
        if len(self._body) <= most:
            return
        metas = columns.metas
        if metas is None and max(map(len, columns.datas)) <= most:
            return
        for index, data in enumerate(columns.datas):
            meta = metas[index] if metas is not None else None
            size = len(data) + (len(meta) if meta is not None else 0)
            if size > most:
                raise RecordTooLarge(
                    f"{box} records[{index}]: data and meta have {size} bytes, at most {most} are allowed",
                    box=box,
                    index=index,
                    limit=most,
                )


def _all_short(text: bytes, bytes_max: int) -> bool:
    """Return True if certainly no text is too long: a longer text would fill one of these windows. This takes
    a few nanoseconds per text; measuring each text takes 40."""
    window = max(1, bytes_max // 2)
    return all(text.find(b"\0", at, at + window) >= 0 for at in range(0, len(text) - window + 1, window))


def _quote_bytes(value: bytes) -> str:
    return quote(str(value, "utf-8", "replace"))


def sizes_of(head: PackedHead, body: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield (box, rows, bytes of data) of a message that was checked before, from its offsets alone."""
    first = start = 0
    for box, count in zip(head.boxes, head.counts, strict=True):
        first += count
        (end,) = _OFFSET.unpack_from(body, 4 * first)
        yield box, count, end - start
        start = end


def join_columns(pieces: Sequence[Columns]) -> Columns:
    """Join the rows of several messages for one box into one write."""
    if len(pieces) == 1:
        return pieces[0]
    columns = Columns([raw for piece in pieces for raw in piece.datas])
    if any(piece.tags is not None for piece in pieces):
        columns.tags = b"\0".join(
            [b"\0" * (piece.count - 1) if piece.tags is None else piece.tags for piece in pieces]
        )
    if any(piece.nodes is not None for piece in pieces):
        columns.nodes = [node for piece in pieces for node in piece.nodes or [None] * piece.count]
    if any(piece.metas is not None for piece in pieces):
        columns.metas = [meta for piece in pieces for meta in piece.metas or [None] * piece.count]
    if any(piece.times is not None for piece in pieces):
        columns.times = [time for piece in pieces for time in piece.times or [None] * piece.count]
    return columns
