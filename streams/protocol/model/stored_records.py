"""Decodes stored records, as `Batch.text` returns them. `data` and `meta` are not decoded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

#: A union with Raw cannot be decoded, so an absent raw value is an empty one.
ABSENT = Raw(b"")

_COMMA = b","


class _StoredRecord(msgspec.Struct, gc=False):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: Raw
    node: Raw = msgspec.field(name="$node", default=ABSENT)
    meta: Raw = ABSENT


_decode_stored = msgspec.json.Decoder(list[_StoredRecord]).decode


def decode_records(text: bytes) -> list[_StoredRecord]:
    """Decode the records of a batch. A value nested as deep as an append allows must decode here too, even
    from a deeper stack; so the recursion limit is doubled if needed."""
    try:
        return _decode_stored(text)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(2 * limit)
        try:
            return _decode_stored(text)
        finally:
            sys.setrecursionlimit(limit)


class RecordColumns(NamedTuple):
    """Stored records by column. Absent metas and nodes are empty."""

    seqs: list[int]
    times: list[int]
    datas: list[Raw]
    nodes: list[str]
    metas: list[Raw]


def split_columns(texts: Sequence[bytes | memoryview]) -> RecordColumns:
    """Decode texts that `Batch.text` has returned, each with some records, into columns."""
    records = decode_records(b"[" + _COMMA.join(texts) + b"]")
    raws = [bytes(record.node) for record in records]
    names = {raw: msgspec.json.decode(raw) if raw else "" for raw in set(raws)}
    return RecordColumns(
        [record.seq for record in records],
        [record.ts for record in records],
        [record.data for record in records],
        [names[raw] for raw in raws],
        [record.meta for record in records],
    )


_decode_meta = msgspec.json.Decoder(dict[str, Raw]).decode


def metas_of(text: bytes | memoryview) -> list[dict[str, Raw]]:
    """Return `meta` of each record; its values are not decoded."""
    return [
        _decode_meta(record.meta) if len(record.meta) else {} for record in decode_records(b"[" + text + b"]")
    ]


def with_meta(text: bytes, fields: dict[str, bytes], *, without: Sequence[str] = ()) -> bytes:
    """Return the text of one record with `fields` added to its `meta`, and the fields `without` removed."""
    (record,) = decode_records(b"[" + text + b"]")
    meta: dict[str, Raw] = _decode_meta(record.meta) if len(record.meta) else {}
    meta = {name: value for name, value in meta.items() if name not in without}
    meta |= {name: Raw(value) for name, value in fields.items()}
    parts = [b'{"$seq":%d,"$ts":%d' % (record.seq, record.ts)]
    if len(record.node):
        parts.append(b'"$node":%b' % record.node)
    if meta:
        parts.append(b'"meta":%b' % msgspec.json.encode(meta))
    return b",".join([*parts, b'"data":%b}' % record.data])
