"""Renders the records of a write as a batch, and reads records out of stored batches.

Only this file knows the layout of a stored batch. One append is one batch. It has its records as one blob, in
the form that a reader gets by default:

    {"$seq":7,"$ts":1700000000000,"$node":"n","meta":{…},"data":…},{"$seq":8,…}
    └──────────────── record 0, end(0) ───────────────────────────┘^ comma

so a read is a slice (of binary records too: `binary_records.py`). Offsets are one column. Tags and nodes are
columns that are absent if no record has any. `data` and `meta` are checked once as JSON and never decoded.

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

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec
from msgspec import Raw

from streams.protocol.errors import InvalidRequest
from streams.protocol.model import binary_records
from streams.protocol.model.job_fields import JobFields
from streams.protocol.model.stored_records import ABSENT as ABSENT
from streams.protocol.model.stored_records import decode_records
from streams.protocol.model.stored_records import metas_of as metas_of
from streams.protocol.model.stored_records import split_columns as split_columns
from streams.protocol.model.stored_records import with_meta as with_meta

#: The encoding of a blob: records as JSON, or binary records (`binary_records.py`).
JSON = 1
BINARY = 2
#: Only on disk: JSON with job fields after the nodes. In memory the encoding is JSON.
_JSON_WITH_JOB_FIELDS = 3


class Columns(msgspec.Struct, gc=False):
    """The records of one write, as columns. A column that no record uses is None."""

    datas: list[Raw]
    #: Joined with NUL, as in a batch.
    tags: bytes | None = None
    nodes: list[str | None] | None = None
    metas: list[Raw | None] | None = None
    times: list[int | None] | None = None
    job_fields: JobFields | None = None
    #: For each record, the delay from the write to its delivery.
    delays_ms: list[int | None] | None = None
    #: Running total of the lengths of `datas`, if the parser has computed it.
    ends: array[int] | None = None

    @property
    def count(self) -> int:
        return len(self.datas)


# ---------------------------------------------------------------------------------------------------
# The stored batch

_HEAD = struct.Struct("<BBHIQqqIIII")
_STRIDE_MAX = 0xFFFF
_COMMA = b","

#: Overhead in bytes, measured with tracemalloc, without contents: of a batch with its numbers and the header
#: of its blob, of an array with its spare room, of a bytes object.
_OBJECT_BYTES = 300
_ARRAY_BYTES = 96
_TEXT_BYTES = 33


class Batch:
    """The rendered records of one append. Immutable, except `lsn`, `dead`, `dead_bytes` (set by the box)."""

    __slots__ = (
        "blob",
        "count",
        "dead",
        "dead_bytes",
        "encoding",
        "ends",
        "first_seq",
        "first_ts",
        "hops",
        "job_fields",
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
        times: array[int] | None = None,
        ends: array[int] | None = None,
        stride: int = 0,
        tags: bytes | None = None,
        nodes: bytes | None = None,
        blob: bytes = b"",
        hops: int = 0,
    ) -> None:
        self.encoding = encoding
        self.first_seq = first_seq
        self.count = count
        self.first_ts = first_ts
        self.last_ts = last_ts
        #: `$ts` of each record; None if all records have `first_ts`.
        self.times = times
        #: Running total of record sizes without `stride`; see `end`. None for a batch of one record.
        self.ends = ends
        #: Further bytes that each record has, including its comma: the same number for all records.
        self.stride = stride
        #: Tags joined with NUL, "" for a record without a tag; None if no record has a tag.
        self.tags = tags
        #: Nodes likewise; a single value without NUL applies to all records.
        self.nodes = nodes
        self.blob = blob
        #: How many routers have copied these records; 0 if a client wrote them to this box.
        self.hops = hops
        self.job_fields: JobFields | None = None
        # Set by the box: the lsn of the batch, and the count and size of its dead records.
        self.lsn = 0
        self.dead = 0
        self.dead_bytes = 0

    def __repr__(self) -> str:
        return f"<Batch {self.first_seq}..{self.last_seq} {len(self.blob)} B, {self.dead} dead>"

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def payload(self) -> Batch:
        """The batch itself: its bytes are in memory. A sealed batch has them on disk."""
        return self

    def kill(self, count: int, size: int) -> None:
        """Count `count` more records, of `size` bytes, as dead."""
        self.dead += count
        self.dead_bytes += size

    @property
    def live_bytes(self) -> int:
        """The size of the records that are not dead, without commas."""
        return len(self.blob) - (self.count - 1) - self.dead_bytes

    @property
    def bytes_in_memory(self) -> int:
        """The memory that the batch takes, objects included, within 10 % of the allocator's figure."""
        cost = _OBJECT_BYTES + len(self.blob)
        if self.ends is not None:
            cost += _ARRAY_BYTES + 4 * len(self.ends)
        if self.times is not None:
            cost += _ARRAY_BYTES + 8 * len(self.times)
        if self.tags is not None:
            cost += _TEXT_BYTES + len(self.tags)
        if self.nodes is not None:
            cost += _TEXT_BYTES + len(self.nodes)
        if self.job_fields is not None:
            cost += _ARRAY_BYTES + len(self.job_fields.to_bytes())
        return cost

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
        """Return the size of records first..last (indexes, both included), without commas."""
        return self.end(last) - self.start(first) - (last - first)

    def sizes(self) -> list[int]:
        """Return the size of each record, without its comma."""
        if self.ends is None:
            return [len(self.blob)]
        constant_bytes = self.stride - 1
        starts = chain((0,), self.ends)
        return [end - start + constant_bytes for start, end in zip(starts, self.ends, strict=False)]

    def text(self, first: int, last: int) -> bytes | memoryview:
        """Return records first..last as a reader gets them by default, with separators between them."""
        if first == 0 and last == self.count - 1:
            return self.blob
        return memoryview(self.blob)[self.start(first) : self.end(last)]

    def index_within_bytes(self, first: int, last: int, bytes_max: int) -> int:
        """Return the last index <= `last` for which records first..index fit into `bytes_max`, or first -
        1."""
        limit = self.start(first) + bytes_max
        if self.end(last) <= limit:
            return last
        return bisect_right(range(self.count), limit, first, last + 1, key=self.end) - 1

    def index_from_size(self, first: int, bytes_wanted: int) -> int:
        """Return the smallest index for which records first..index have at least `bytes_wanted` bytes."""
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

    ts_at_least = ts

    def index_from_ts(self, ts: int) -> int:
        """Return the first index whose `$ts` is at least `ts`; `count` if there is none."""
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
        """Return the node of each record, or a single node for all records; None if there is none."""
        return None if self.nodes is None else str(self.nodes, "utf-8").split("\0")

    def tags_of(self, first: int, last: int) -> bytes:
        """Return the tags of records first..last, joined with NUL as in the column."""
        if self.tags is None:
            return b"\0" * (last - first)
        if first == 0 and last == self.count - 1:
            return self.tags
        return b"\0".join(self.tags.split(b"\0")[first : last + 1])

    def text_as(self, first: int, last: int, *, tags: bool, meta: bool, data: bool) -> bytes | memoryview:
        """Return records first..last as JSON with the selected fields."""
        if self.encoding == BINARY:
            return binary_records.render_json(bytes(self.text(first, last)), meta=meta, data=data)
        fields = self.job_fields if tags else None
        if meta and data and fields is None and not (tags and self.tags is not None):
            return self.text(first, last)
        tag_of = self.tag_list() if tags else None
        parts: list[bytes] = []
        for index, record in enumerate(decode_records(b"[" + self.text(first, last) + b"]"), first):
            part = b'{"$seq":%d,"$ts":%d' % (record.seq, record.ts)
            if len(record.node):
                part += b',"$node":%b' % record.node
            if tag_of is not None and tag_of[index]:
                part += b',"$tag":%b' % msgspec.json.encode(tag_of[index])
            if fields is not None:
                part += fields.texts(index)
            if meta and len(record.meta):
                part += b',"meta":%b' % record.meta
            if data:
                part += b',"data":%b' % record.data
            parts.append(part + b"}")
        return _COMMA.join(parts)

    def plain_runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Divide records first..last into runs in which only seq and data differ, so that a caller can find
        the data without decoding: (first, last, bytes before the data). Empty for batches that need
        decoding."""
        irregular = (
            self.count == 1 or self.times is not None or (self.nodes is not None and b"\0" in self.nodes)
        )
        if self.encoding == BINARY or irregular or (self.stride == 1 and b'"meta":' in self.blob):
            return []
        fixed_bytes = len(b'{"$seq":') + len(_middle(self.first_ts, self.nodes, None))
        runs: list[tuple[int, int, int]] = []
        while first <= last:  # a run ends where the seqs get one more digit
            digits = len(str(self.first_seq + first))
            end = min(last, 10**digits - 1 - self.first_seq)
            runs.append((first, end, fixed_bytes + digits))
            first = end + 1
        return runs

    def part(self, first: int, last: int) -> Batch:
        """Return a new batch with records first..last (indexes, both included), byte for byte the same.

        Columns that none of these records uses are absent. `lsn`, `dead` and `dead_bytes` are not copied. A
        part with all records shares the blob.
        """
        assert 0 <= first <= last < self.count
        ends, times = self.ends, self.times
        if ends is not None:
            before = ends[first - 1] if first else 0
            ends = array("I", map((-before).__add__, ends[first : last + 1])) if first < last else None
        if times is not None:
            times = times[first : last + 1] if times[first] != times[last] else None
        part = Batch(
            encoding=self.encoding,
            first_seq=self.first_seq + first,
            count=last - first + 1,
            first_ts=self.ts(first),
            last_ts=self.ts(last),
            times=times,
            ends=ends,
            stride=self.stride if ends is not None else 1,
            tags=_part_of_tags(self.tags, first, last),
            nodes=_part_of_nodes(self.nodes, first, last),
            blob=bytes(self.text(first, last)),
            hops=self.hops,
        )
        part.job_fields = None if self.job_fields is None else self.job_fields.part(first, last)
        return part

    # -- bytes of a whole batch, for the log and for bulk readers

    def to_parts(self) -> list[bytes]:
        ends = self.ends.tobytes() if self.ends is not None else b""
        times = self.times.tobytes() if self.times is not None else b""
        tags = self.tags or b""
        nodes = self.nodes or b""
        fields = b"" if self.job_fields is None else self.job_fields.to_bytes()
        head = _HEAD.pack(
            _JSON_WITH_JOB_FIELDS if fields else self.encoding,
            self.hops,
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
        return [head + ends + times + tags + nodes + fields, self.blob]

    @classmethod
    def peek(cls, content: memoryview) -> tuple[int, int, bool]:
        """Return (first seq, number of records, True if other bytes confirm this number) of a damaged batch.
        Raises `struct.error` if it is too short for a batch."""
        _, _, _, count, first_seq, _, _, ends_n, *_ = _HEAD.unpack_from(content)
        if count > 0 and ends_n == 4 * count:
            return first_seq, count, True
        try:
            return first_seq, count, cls.from_bytes(content).count > 0
        except (AssertionError, ValueError, IndexError):
            return first_seq, count, False

    @classmethod
    def from_bytes(cls, content: memoryview) -> Batch:
        (encoding, hops, stride, count, first_seq, first_ts, last_ts, ends_n, times_n, tags_n, nodes_n) = (
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
        fields: JobFields | None = None
        if encoding == _JSON_WITH_JOB_FIELDS:
            fields, length = JobFields.from_bytes(content[at:])
            encoding, at = JSON, at + length
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
            hops=hops,
        )
        batch.job_fields = fields
        assert batch.end(count - 1) == len(batch.blob), "ENDS"
        return batch


def _part_of_tags(tags: bytes | None, first: int, last: int) -> bytes | None:
    if tags is None:
        return None
    part = tags.split(b"\0")[first : last + 1]
    return b"\0".join(part) if any(part) else None


def _part_of_nodes(nodes: bytes | None, first: int, last: int) -> bytes | None:
    if nodes is None or b"\0" not in nodes:
        return nodes
    part = nodes.split(b"\0")[first : last + 1]
    return (part[0] or None) if part.count(part[0]) == len(part) else b"\0".join(part)


def columns_of(text: bytes, *, tags: bytes | None, keep_nodes: bool) -> Columns:
    """Convert stored records to the columns of a write to another box. `data` and `meta` are copied byte for
    byte."""
    records = decode_records(b"[" + text + b"]")
    metas: list[Raw | None] = [record.meta if len(record.meta) else None for record in records]
    nodes: list[str | None] | None = None
    if keep_nodes:
        raws = [bytes(record.node) for record in records]
        names = {raw: msgspec.json.decode(raw) if raw else None for raw in set(raws)}
        if len(names) > 1 or None not in names.values():
            nodes = [names[raw] for raw in raws]
    return Columns(
        datas=[record.data for record in records],
        tags=tags,
        nodes=nodes,
        metas=metas if metas.count(None) < len(metas) else None,
    )


# ---------------------------------------------------------------------------------------------------
# Rendering

_LOW_DIGITS = 4
_LOW_COUNT = 10**_LOW_DIGITS
_PADDED = [b"%04d" % number for number in range(_LOW_COUNT)]
_PLAIN = [b"%d" % number for number in range(_LOW_COUNT)]


def resolve_times(
    times: list[int | None] | None,
    count: int,
    *,
    now_ms: int,
    not_before: int,
    mode: str,
    allow_future: bool,
    field: str = "ts",
) -> int | array[int]:
    """Return the `$ts` of the records of a write: one number if all are equal. `field` is its name in errors.

    Times never go back, neither in a box (`not_before` is the last one of the box) nor within a write.
    """
    arrival = max(now_ms, not_before)
    if mode == "arrival" or (times is None and mode == "client-prefer"):
        return arrival
    if times is None or (mode == "client-require" and None in times):
        index = 0 if times is None else times.index(None)
        raise InvalidRequest(
            f"records[{index}].{field}: missing; the timestamping mode is client-require", field=field
        )
    latest = not_before
    timestamps = array("q")
    for ts in times:
        candidate = now_ms if ts is None else ts if allow_future else min(ts, now_ms)
        latest = max(latest, candidate)
        timestamps.append(latest)
    return timestamps[0] if timestamps[0] == timestamps[-1] else timestamps


def render(columns: Columns, *, first_seq: int, times: int | array[int]) -> Batch:
    """Render records as the batch that starts at `first_seq`; the caller adds job fields."""
    count = len(columns.datas)
    uniform_ts = times if isinstance(times, int) else None
    if count == 1 and uniform_ts is not None and columns.nodes is None and columns.metas is None:
        return _render_one(columns, first_seq, uniform_ts)
    nodes = _joined_nodes(columns.nodes)
    one_node = nodes if nodes is not None and b"\0" not in nodes else None
    regular = uniform_ts is not None and columns.metas is None and (nodes is None or one_node is not None)
    ends: array[int] | None
    if count == 1:
        blob = b'{"$seq":%d%b%b}' % (first_seq, _middles(columns, times, one_node)[0], columns.datas[0])
        ends, stride = None, 1
    elif regular:
        middle = _middle(uniform_ts or 0, one_node, None)
        blob = _joined_records(first_seq, [middle] * count, columns.datas)
        stride = len(b'{"$seq":') + len(str(first_seq)) + len(middle) + len(b"},")
        if len(str(first_seq)) == len(str(first_seq + count - 1)) and stride <= _STRIDE_MAX:
            # From a list, because building an array from an iterator costs twice as much.
            ends = columns.ends or array("I", list(accumulate(map(len, columns.datas))))
        else:
            ends, stride = _ends_over_digits(first_seq, len(middle), columns.datas), 1
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


def _render_one(columns: Columns, first_seq: int, ts: int) -> Batch:
    """Render one record without node and meta: the most common append."""
    return Batch(
        encoding=JSON,
        first_seq=first_seq,
        count=1,
        first_ts=ts,
        last_ts=ts,
        times=None,
        ends=None,
        stride=1,
        tags=columns.tags,
        nodes=None,
        blob=b'{"$seq":%d,"$ts":%d,"data":%b}' % (first_seq, ts, columns.datas[0]),
    )


def render_binary(tails: Sequence[bytes], *, first_seq: int, times: int | array[int]) -> Batch:
    """Render binary records with these tails as the batch that starts at `first_seq`."""
    blob, ends = binary_records.join_records(tails, first_seq=first_seq, times=times)
    return Batch(
        encoding=BINARY,
        first_seq=first_seq,
        count=len(tails),
        first_ts=times if isinstance(times, int) else times[0],
        last_ts=times if isinstance(times, int) else times[-1],
        times=None if isinstance(times, int) else times,
        ends=ends if len(tails) > 1 else None,
        stride=1,
        tags=None,
        nodes=None,
        blob=blob,
    )


def _joined_nodes(column: list[str | None] | None) -> bytes | None:
    """Return the nodes as a batch stores them: one value if all are the same."""
    if column is None:
        return None
    if column.count(column[0]) == len(column):
        return (column[0] or "").encode() or None
    if None in column:
        return "\0".join(text or "" for text in column).encode()
    return "\0".join(column).encode()  # type: ignore[arg-type]


def _middle(ts: int, node: bytes | None, meta: Raw | None) -> bytes:
    """Render the part of a record between its seq and its data."""
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
    """Join the records, each of four parts: opening with high digits of the seq, low digits, middle, data."""
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


def _ends_over_digits(first_seq: int, middle: int, datas: list[Raw]) -> array[int]:
    """Compute `ends` for a batch whose records differ only in their data and in the digits of their seqs."""
    lengths: list[int] = []
    at, count = 0, len(datas)
    while at < count:
        digits = len(str(first_seq + at))
        end = min(count, 10**digits - first_seq)
        fixed_bytes = len(b'{"$seq":}') + digits + middle
        lengths += map(fixed_bytes.__add__, map(len, datas[at:end]))
        at = end
    return array("I", list(accumulate(lengths)))


def _explicit_ends(first_seq: int, middle_lengths: list[int], datas: list[Raw]) -> tuple[array[int], int]:
    """Compute `ends` for a batch whose records also differ in other fields."""
    fixed_bytes = len(b'{"$seq":}')
    lengths = [
        fixed_bytes + len(str(seq)) + middle + len(data)
        for seq, (middle, data) in enumerate(zip(middle_lengths, datas, strict=True), first_seq)
    ]
    return array("I", list(accumulate(lengths))), 1
