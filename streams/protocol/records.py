"""Records as bytes: how a write is read, how a batch is stored, how a reader gets it.

This is the only file that knows what a stored batch looks like inside. One append is one batch, and a
batch keeps its records as one blob in the very form a reader gets by default:

    {"$seq":7,"$ts":1700000000000,"$node":"n","meta":{…},"data":…},{"$seq":8,…}
    └──────────────── record 0, end(0) ───────────────────────────┘^ comma

so a read is a slice. Offsets are kept as one column, tags and nodes as columns of their own that are absent
when nobody used them. `data` and `meta` are checked once as JSON and kept as the bytes that came; they are
never decoded into objects on the way in or out.

Rules of the file
- Work per batch, not per record: columns, `join` and table look-ups. Loops over records only where a
  batch is irregular (own timestamps, mixed nodes, metas) or a reader asks for another form.
- `Batch.encoding` says what the blob is. Everything that depends on it is a method of `Batch`.

Invariants
- ENDS: `end(i)` never decreases, `end(count - 1) == len(blob)`.
- SEQS: record i of a batch has seq `first_seq + i`.
- TIMES: `$ts` never decreases inside a batch or from batch to batch.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from streams.protocol.boxes import NON_NEGATIVE_MAX, BoxPatch
from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from streams.protocol.names import IDEMPOTENCY_KEY_CHARS_MAX, check_text, shown

JSON = 1
SEQ_MAX = 2**64 - 1

_Seq = Annotated[int, Meta(ge=0)]
_Millis = Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)]


class RecordLimits(msgspec.Struct, frozen=True):
    batch_records_max: int = 10_000
    record_bytes_max: int = 1024 * 1024
    meta_bytes_max: int = 16 * 1024
    meta_keys_max: int = 64
    tag_bytes_max: int = 256
    node_bytes_max: int = 128


# ---------------------------------------------------------------------------------------------------
# Reading a write


#: A union with Raw cannot be decoded, so an absent raw value is an empty one.
_ABSENT = Raw(b"")
_NULL = Raw(b"null")


#: The longest tag that the lean decoder takes. It checks for nothing, so that nobody has to look again.
_LEAN_TAG_CHARS = 128


class _LeanRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    data: Raw
    tag: Annotated[str, Meta(max_length=_LEAN_TAG_CHARS)] | None = None


class _FullRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = _ABSENT
    ts: _Millis | None = None


class _AppendOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: BoxPatch | None = None
    disable_backpressure: bool = False
    match_seq: _Seq | None = None
    fencing_token: str | None = None
    trim_before_seq: _Seq | None = None


class _LeanAppend(_AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: list[_LeanRecord]


class _FullAppend(_AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: list[_FullRecord]


class _Lines(msgspec.Struct):
    records: list[_FullRecord]


# Most writes use only `data` and `tag`; a struct of two fields decodes a fifth faster than one of five. A
# write with more fails the lean decoder at its first such record and is decoded again by the full one.
_decode_lean = msgspec.json.Decoder(_LeanAppend).decode
_decode_full = msgspec.json.Decoder(_FullAppend).decode
_decode_lines = msgspec.json.Decoder(_FullRecord).decode_lines
_decode_lines_as_list = msgspec.json.Decoder(_Lines).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


class Columns(msgspec.Struct, gc=False):
    """The records of one write, by column. A column is None when no record uses it."""

    datas: list[Raw]
    #: Joined with NUL, as a batch keeps them.
    tags: bytes | None = None
    nodes: list[str | None] | None = None
    metas: list[Raw | None] | None = None
    times: list[int | None] | None = None

    @property
    def count(self) -> int:
        return len(self.datas)


class ParsedAppend(msgspec.Struct, kw_only=True):
    columns: Columns
    idempotency_key: str | None = None
    create: bool | None = None
    config: BoxPatch | None = None
    disable_backpressure: bool = False
    match_seq: int | None = None
    fencing_token: str | None = None
    trim_before_seq: int | None = None


def decode_json(decode: Any, body: bytes) -> Any:
    """`decode(body)` with every failure turned into one that names the place."""
    try:
        if not body.isascii():
            str(body, "utf-8")  # raw values are passed over unchecked otherwise
        return decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"body: not valid UTF-8 at byte {error.start}") from None
    except msgspec.ValidationError as error:
        raise _named(str(error), body) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("body: JSON nested too deeply") from None


def _named(text: str, body: bytes) -> InvalidRequest:
    """msgspec says "… - at `$.records[0].tag`"; we say "records[0].tag: …, got 7"."""
    what, _, where = text.partition(" - at `$")
    place = where.rstrip("`").lstrip(".")
    if what.startswith("Expected "):
        try:
            value = msgspec.json.decode(body)
            for key, index in _STEP.findall(place):
                value = value[int(index)] if index else value[key]
            what = f"{what.partition(', got')[0]}, got {shown(str(msgspec.json.encode(value), 'utf-8'))}"
        except (LookupError, TypeError, ValueError, RecursionError):
            pass  # the place could not be found again; the rest of the message stands
    field = place or _UNKNOWN_FIELD.sub(r"\1", what) if "unknown field" in what or place else "body"
    return InvalidRequest(f"{place or 'body'}: {what}", field=field)


_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN_FIELD = re.compile(r".*unknown field `(.*)`.*")


def parse_append(body: bytes, limits: RecordLimits) -> ParsedAppend:
    """A JSON append body (v0-api §3)."""
    request: Any
    body = body or b"{}"
    tag_chars_max: int | None = _LEAN_TAG_CHARS
    try:
        if not body.isascii():
            str(body, "utf-8")
        request = _decode_lean(body)
        records = request.records
        columns = Columns([record.data for record in records])
        tags = [record.tag for record in records]
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        request = decode_json(_decode_full, body)
        columns = _full_columns(request.records)
        tags = [record.tag for record in request.records]
        tag_chars_max = None
    _check_columns(columns, tags, len(body), request.node, limits, tag_chars_max)
    key = request.idempotency_key
    if key is not None:
        check_idempotency_key(key)
    if request.match_seq is not None:
        check_seq(request.match_seq, "match_seq")
    if request.trim_before_seq is not None:
        check_seq(request.trim_before_seq, "trim_before_seq")
    return ParsedAppend(
        columns=columns,
        idempotency_key=key,
        create=request.create,
        config=request.config,
        disable_backpressure=request.disable_backpressure,
        match_seq=request.match_seq,
        fencing_token=request.fencing_token,
        trim_before_seq=request.trim_before_seq,
    )


def parse_append_lines(body: bytes, node: str | None, limits: RecordLimits) -> Columns:
    """An NDJSON append body: one record object a line; blank lines are passed over."""
    lines = [line for line in body.splitlines() if line.strip()]
    try:
        if not body.isascii():
            str(body, "utf-8")
        records = _decode_lines(body)
    except (ValueError, RecursionError):
        # As one list it is decoded again for an error that names the record, and for nothing else.
        decode_json(_decode_lines_as_list, b'{"records":[%b]}' % b",".join(lines))
        raise InvalidRequest("body: every line must hold one JSON object") from None
    if len(records) != len(lines):
        raise InvalidRequest(
            f"records: {len(lines)} lines hold {len(records)} records; one a line is expected"
        )
    columns = _full_columns(records)
    _check_columns(columns, [record.tag for record in records], len(body), node, limits)
    return columns


def check_seq(value: int, field: str) -> int:
    if value > SEQ_MAX:
        raise InvalidRequest(f"{field}: {value} is larger than a seq can be", field=field)
    return value


def check_idempotency_key(key: str) -> str:
    if not key or len(key) > IDEMPOTENCY_KEY_CHARS_MAX:
        raise InvalidRequest(
            f"idempotency_key: must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters, has {len(key)}",
            field="idempotency_key",
        )
    return key


def _full_columns(records: list[_FullRecord]) -> Columns:
    return Columns(
        [record.data for record in records],
        None,
        [record.node for record in records],
        [None if len(record.meta) == 0 or record.meta == _NULL else record.meta for record in records],
        [record.ts for record in records],
    )


def _check_columns(
    columns: Columns,
    tags: list[str | None],
    body_bytes: int,
    node: str | None,
    limits: RecordLimits,
    tag_chars_max: int | None = None,
) -> None:
    """Enforces the limits, drops columns nobody used, joins the tags, and fills in the write's own node."""
    count = len(columns.datas)
    if count == 0:
        raise InvalidRequest("records: must hold at least one record", field="records")
    if count > limits.batch_records_max:
        raise BatchTooLarge(
            f"records: {count} records in one write, at most {limits.batch_records_max} are allowed; "
            "split the write",
            limit=limits.batch_records_max,
        )
    columns.metas = _used(columns.metas)
    columns.times = _used(columns.times)
    columns.tags = _joined_texts(tags, "tag", limits.tag_bytes_max, tag_chars_max)
    if columns.nodes is not None and not _joined_texts(columns.nodes, "node", limits.node_bytes_max):
        columns.nodes = None
    if node:
        check_text(node, "node", bytes_max=limits.node_bytes_max)
        columns.nodes = [own or node for own in columns.nodes] if columns.nodes else [node] * count
    if columns.metas is not None:
        for index, meta in enumerate(columns.metas):
            if meta is not None:
                _check_meta(index, meta, limits)
    # No record can be over the limit when the whole body is within it.
    if body_bytes > limits.record_bytes_max:
        metas = columns.metas or [None] * count
        for index, (data, meta) in enumerate(zip(columns.datas, metas, strict=True)):
            size = len(data) + (len(meta) if meta is not None else 0)
            if size > limits.record_bytes_max:
                raise RecordTooLarge(
                    f"records[{index}]: data and meta have {size} bytes, at most {limits.record_bytes_max} "
                    "are allowed",
                    index=index,
                    limit=limits.record_bytes_max,
                )


def _used(column: list[Any] | None) -> list[Any] | None:
    if column is None or column.count(None) == len(column):
        return None
    return column


def _joined_texts(
    column: list[str | None], field: str, bytes_max: int, chars_max: int | None = None
) -> bytes | None:
    """Tags or nodes joined with NUL, "" where a record has none; None when no record has one. `chars_max` is
    how long the longest can be, where that is known."""
    count = len(column)
    try:
        joined = "\0".join(column)  # type: ignore[arg-type]
    except TypeError:  # some have none
        joined = "\0".join([text or "" for text in column])
    if len(joined) < count:  # nothing but separators
        return None
    # One look at the joined text clears the ordinary write; only a suspicious one is gone through.
    if chars_max is None or chars_max > bytes_max:
        chars_max = len(joined) if count == 1 else max(map(len, filter(None, column)))
    if not joined.isascii() or joined.count("\0") != count - 1 or chars_max > bytes_max:
        for index, text in enumerate(column):
            if text:
                check_text(text, f"records[{index}].{field}", bytes_max=bytes_max)
    return joined.encode()


def _check_meta(index: int, meta: Raw, limits: RecordLimits) -> None:
    field = f"records[{index}].meta"
    if len(meta) > limits.meta_bytes_max:
        raise RecordTooLarge(
            f"{field}: has {len(meta)} bytes, at most {limits.meta_bytes_max} are allowed", field=field
        )
    if bytes(memoryview(meta)[:1]) != b"{":
        raise InvalidRequest(
            f"{field}: must be a JSON object, got {shown(str(bytes(meta), 'utf-8'))}", field=field
        )
    keys = len(_decode_object(meta))
    if keys > limits.meta_keys_max:
        raise InvalidRequest(
            f"{field}: has {keys} keys, at most {limits.meta_keys_max} are allowed", field=field
        )


# ---------------------------------------------------------------------------------------------------
# The stored batch

_HEAD = struct.Struct("<BBHIQqqIIII")
_STRIDE_MAX = 0xFFFF
_COMMA = b","


class Batch:
    """The records of one append, rendered. Immutable but for the owner's notes at the end of the slots."""

    __slots__ = (
        "blob",
        "count",
        "dead",
        "dead_bytes",
        "encoding",
        "ends",
        "first_seq",
        "first_ts",
        "last_ts",
        "lsn",
        "nodes",
        "stride",
        "tags",
        "times",
    )

    def __init__(
        self,
        *,
        encoding: int,
        first_seq: int,
        count: int,
        first_ts: int,
        last_ts: int,
        times: array[int] | None,
        ends: array[int] | None,
        stride: int,
        tags: bytes | None,
        nodes: bytes | None,
        blob: bytes,
    ) -> None:
        self.encoding = encoding
        self.first_seq = first_seq
        self.count = count
        self.first_ts = first_ts
        self.last_ts = last_ts
        #: `$ts` of each record, or None when all have `first_ts`.
        self.times = times
        #: Running total of the bytes that differ from record to record; see `end`. None for one record.
        self.ends = ends
        #: Bytes that every record adds besides those, its comma included.
        self.stride = stride
        #: Tags joined with NUL, "" where a record has none; None when no record has one.
        self.tags = tags
        #: Nodes likewise; a single value without NUL stands for all records.
        self.nodes = nodes
        self.blob = blob
        # The owner's notes: where the batch is logged, and how much of it no reader can get any more.
        self.lsn = 0
        self.dead = 0
        self.dead_bytes = 0

    def __repr__(self) -> str:
        return f"<Batch {self.first_seq}..{self.last_seq} {len(self.blob)} B, {self.dead} dead>"

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def live_bytes(self) -> int:
        """Bytes of the records that are not dead, commas not counted."""
        return len(self.blob) - (self.count - 1) - self.dead_bytes

    def start(self, index: int) -> int:
        if index == 0:
            return 0
        assert self.ends is not None
        return self.ends[index - 1] + index * self.stride

    def end(self, index: int) -> int:
        if self.ends is None:
            return len(self.blob)
        return self.ends[index] + (index + 1) * self.stride - 1

    def size(self, first: int, last: int) -> int:
        """Bytes of records first..last (indexes, both included), commas not counted."""
        return self.end(last) - self.start(first) - (last - first)

    def text(self, first: int, last: int) -> bytes | memoryview:
        """Records first..last as a reader gets them by default, commas between."""
        if first == 0 and last == self.count - 1:
            return self.blob
        return memoryview(self.blob)[self.start(first) : self.end(last)]

    def index_within_bytes(self, first: int, last: int, bytes_max: int) -> int:
        """The last index <= `last` whose records first..index fit into `bytes_max`, or first - 1."""
        limit = self.start(first) + bytes_max
        if self.end(last) <= limit:
            return last
        return bisect_right(range(self.count), limit, first, last + 1, key=self.end) - 1

    def index_from_size(self, first: int, bytes_wanted: int) -> int:
        """The smallest index such that records first..index have at least `bytes_wanted` bytes."""
        low, high = first, self.count - 1
        while low < high:
            middle = (low + high) // 2
            if self.size(first, middle) >= bytes_wanted:
                high = middle
            else:
                low = middle + 1
        return low

    def ts(self, index: int) -> int:
        return self.first_ts if self.times is None else self.times[index]

    def index_from_ts(self, ts: int) -> int:
        """The first index whose `$ts` is at least `ts`; `count` when there is none."""
        if self.times is None:
            return 0 if self.first_ts >= ts else self.count
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.times[middle] < ts:
                low = middle + 1
            else:
                high = middle
        return low

    def tag_list(self) -> list[str] | None:
        return None if self.tags is None else str(self.tags, "utf-8").split("\0")

    def node_list(self) -> list[str] | None:
        """A node for each record, or one for all of them, or None."""
        return None if self.nodes is None else str(self.nodes, "utf-8").split("\0")

    def text_as(self, first: int, last: int, *, tags: bool, meta: bool, data: bool) -> bytes | memoryview:
        """Records first..last in another form than the default one."""
        if meta and data and not (tags and self.tags is not None):
            return self.text(first, last)
        tag_of = self.tag_list() if tags else None
        parts: list[bytes] = []
        for index, record in enumerate(_stored(b"[" + self.text(first, last) + b"]"), first):
            part = b'{"$seq":%d,"$ts":%d' % (record.seq, record.ts)
            if len(record.node):
                part += b',"$node":%b' % record.node
            if tag_of is not None and tag_of[index]:
                part += b',"$tag":%b' % msgspec.json.encode(tag_of[index])
            if meta and len(record.meta):
                part += b',"meta":%b' % record.meta
            if data:
                part += b',"data":%b' % record.data
            parts.append(part + b"}")
        return _COMMA.join(parts)

    # -- bytes of a whole batch, for the log and for bulk readers

    def to_parts(self) -> list[bytes]:
        ends = self.ends.tobytes() if self.ends is not None else b""
        times = self.times.tobytes() if self.times is not None else b""
        tags = self.tags or b""
        nodes = self.nodes or b""
        head = _HEAD.pack(
            self.encoding,
            0,
            self.stride,
            self.count,
            self.first_seq,
            self.first_ts,
            self.last_ts,
            len(ends),
            len(times),
            len(tags),
            len(nodes),
        )
        return [head + ends + times + tags + nodes, self.blob]

    @classmethod
    def from_bytes(cls, content: memoryview) -> Batch:
        (encoding, _, stride, count, first_seq, first_ts, last_ts, ends_n, times_n, tags_n, nodes_n) = (
            _HEAD.unpack_from(content)
        )
        at = _HEAD.size
        ends: array[int] | None = None
        times: array[int] | None = None
        if ends_n:
            ends = array("I")
            ends.frombytes(content[at : at + ends_n])
        at += ends_n
        if times_n:
            times = array("q")
            times.frombytes(content[at : at + times_n])
        at += times_n
        tags = bytes(content[at : at + tags_n]) if tags_n else None
        at += tags_n
        nodes = bytes(content[at : at + nodes_n]) if nodes_n else None
        at += nodes_n
        batch = cls(
            encoding=encoding,
            first_seq=first_seq,
            count=count,
            first_ts=first_ts,
            last_ts=last_ts,
            times=times,
            ends=ends,
            stride=stride,
            tags=tags,
            nodes=nodes,
            blob=bytes(content[at:]),
        )
        assert batch.end(count - 1) == len(batch.blob), "ENDS"
        return batch


class _StoredRecord(msgspec.Struct, gc=False):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: Raw
    node: Raw = msgspec.field(name="$node", default=_ABSENT)
    meta: Raw = _ABSENT


_decode_stored = msgspec.json.Decoder(list[_StoredRecord]).decode


def _stored(text: bytes) -> list[_StoredRecord]:
    """The records of a batch, taken apart. What was nested just deep enough to be taken in must be read too,
    from however deep a stack."""
    try:
        return _decode_stored(text)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(2 * limit)
        try:
            return _decode_stored(text)
        finally:
            sys.setrecursionlimit(limit)


# ---------------------------------------------------------------------------------------------------
# Rendering

_LOW_DIGITS = 4
_LOW_COUNT = 10**_LOW_DIGITS
_PADDED = [b"%04d" % number for number in range(_LOW_COUNT)]
_PLAIN = [b"%d" % number for number in range(_LOW_COUNT)]


def resolve_times(
    times: list[int | None] | None, count: int, *, now_ms: int, not_before: int, mode: str, uncapped: bool
) -> int | array[int]:
    """The `$ts` of a write's records: one number when they all share it.

    Times never go back: not inside a box (`not_before` is its last one) and not inside a write.
    """
    arrival = max(now_ms, not_before)
    if mode == "arrival" or (times is None and mode == "client-prefer"):
        return arrival
    if times is None or (mode == "client-require" and None in times):
        index = 0 if times is None else times.index(None)
        raise InvalidRequest(f"records[{index}].ts: this box requires a client timestamp", field="ts")
    latest = not_before
    resolved = array("q")
    for ts in times:
        wanted = now_ms if ts is None else ts if uncapped else min(ts, now_ms)
        latest = max(latest, wanted)
        resolved.append(latest)
    return resolved[0] if resolved[0] == resolved[-1] else resolved


def render(columns: Columns, *, first_seq: int, times: int | array[int]) -> Batch:
    """The batch that these records become at this place."""
    count = len(columns.datas)
    uniform_ts = times if isinstance(times, int) else None
    nodes = _joined_nodes(columns.nodes)
    one_node = nodes if nodes is not None and b"\0" not in nodes else None
    regular = uniform_ts is not None and columns.metas is None and (nodes is None or one_node is not None)
    ends: array[int] | None
    if count == 1:
        if regular and nodes is None:
            blob = b'{"$seq":%d,"$ts":%d,"data":%b}' % (first_seq, uniform_ts or 0, columns.datas[0])
        else:
            blob = b'{"$seq":%d%b%b}' % (first_seq, _middles(columns, times, one_node)[0], columns.datas[0])
        ends, stride = None, 1
    elif regular:
        middle = _middle(uniform_ts or 0, one_node, None)
        blob = _joined_records(first_seq, [middle] * count, columns.datas)
        stride = len(b'{"$seq":') + len(str(first_seq)) + len(middle) + len(b"},")
        if len(str(first_seq)) == len(str(first_seq + count - 1)) and stride <= _STRIDE_MAX:
            ends = array("I", accumulate(map(len, columns.datas)))
        else:
            ends, stride = _explicit_ends(first_seq, [len(middle)] * count, columns.datas)
    else:
        middles = _middles(columns, times, None)
        blob = _joined_records(first_seq, middles, columns.datas)
        ends, stride = _explicit_ends(first_seq, list(map(len, middles)), columns.datas)
    return Batch(
        encoding=JSON,
        first_seq=first_seq,
        count=count,
        first_ts=times if isinstance(times, int) else times[0],
        last_ts=times if isinstance(times, int) else times[-1],
        times=None if isinstance(times, int) else times,
        ends=ends,
        stride=stride,
        tags=columns.tags,
        nodes=nodes,
        blob=blob,
    )


def _joined_nodes(column: list[str | None] | None) -> bytes | None:
    """Nodes as a batch keeps them: one value when all are the same."""
    if column is None:
        return None
    if column.count(column[0]) == len(column):
        return (column[0] or "").encode() or None
    if None in column:
        return "\0".join(text or "" for text in column).encode()
    return "\0".join(column).encode()  # type: ignore[arg-type]


def _middle(ts: int, node: bytes | None, meta: Raw | None) -> bytes:
    """Everything of a record between its seq and its data."""
    text = b',"$ts":%d' % ts
    if node:
        text += b',"$node":%b' % msgspec.json.encode(str(node, "utf-8"))
    if meta is not None:
        text += b',"meta":%b' % meta
    return text + b',"data":'


def _middles(columns: Columns, times: int | array[int], one_node: bytes | None) -> list[bytes]:
    count = len(columns.datas)
    nodes: Sequence[str | None] = columns.nodes or [None] * count
    metas: Sequence[Raw | None] = columns.metas or [None] * count
    every: Sequence[int] = [times] * count if isinstance(times, int) else times
    return [
        _middle(ts, one_node or (node.encode() if node else None), meta)
        for ts, node, meta in zip(every, nodes, metas, strict=True)
    ]


def _joined_records(first_seq: int, middles: list[bytes], datas: list[Raw]) -> bytes:
    """Four columns interleaved and joined once: opening with the high digits, low digits, middle, data."""
    count = len(datas)
    openings: list[bytes] = []
    lows: list[bytes] = []
    seq = first_seq
    while len(lows) < count:
        high, low = divmod(seq, _LOW_COUNT)
        run = min(count - len(lows), _LOW_COUNT - low)
        openings += [b'},{"$seq":%d' % high if high else b'},{"$seq":'] * run
        lows += (_PADDED if high else _PLAIN)[low : low + run]
        seq += run
    openings[0] = openings[0][2:]
    parts: list[Any] = [b"}"] * (4 * count + 1)
    parts[0:-1:4] = openings
    parts[1::4] = lows
    parts[2::4] = middles
    parts[3::4] = datas
    return b"".join(parts)


def _explicit_ends(first_seq: int, middle_lengths: list[int], datas: list[Raw]) -> tuple[array[int], int]:
    """Ends for a batch whose records differ in more than their data."""
    fixed = len(b'{"$seq":}')
    lengths = [
        fixed + len(str(seq)) + middle + len(data)
        for seq, (middle, data) in enumerate(zip(middle_lengths, datas, strict=True), first_seq)
    ]
    return array("I", accumulate(lengths)), 1
