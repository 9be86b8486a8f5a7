"""Reading a write: an append body to checked columns (v0 §3). What is stored of them is `model/records.py`'s.

Rules of the file
- A payload is checked as JSON once, here, and never decoded: `data` and `meta` stay the bytes that came.
- The ordinary write is cleared by a few looks at whole columns; records are gone through one by one only when
  something is wrong with them, to say what and where.
- Every complaint names the field and shows the value.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from streams.protocol.model.boxes import NON_NEGATIVE_MAX, BoxPatch
from streams.protocol.model.names import IDEMPOTENCY_KEY_CHARS_MAX, check_text, shown
from streams.protocol.model.records import ABSENT, Columns

SEQ_MAX = 2**64 - 1
MILLIS_MAX = NON_NEGATIVE_MAX

_Seq = Annotated[int, Meta(ge=0)]
_Millis = Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)]


class RecordLimits(msgspec.Struct, frozen=True):
    batch_records_max: int = 10_000
    record_bytes_max: int = 1024 * 1024
    meta_bytes_max: int = 16 * 1024
    meta_keys_max: int = 64
    tag_bytes_max: int = 256
    node_bytes_max: int = 128


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
    meta: Raw = ABSENT
    ts: _Millis | None = None


class AppendOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: BoxPatch | None = None
    disable_backpressure: bool = False
    match_seq: _Seq | None = None
    fencing_token: str | None = None
    trim_before_seq: _Seq | None = None
    return_seqs: bool | None = None


class _LeanAppend(AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: list[_LeanRecord]


class _FullAppend(AppendOptions, forbid_unknown_fields=True, kw_only=True):
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


class ParsedAppend(msgspec.Struct, gc=False):
    columns: Columns
    idempotency_key: str | None = None
    create: bool | None = None
    config: BoxPatch | None = None
    disable_backpressure: bool = False
    match_seq: int | None = None
    fencing_token: str | None = None
    trim_before_seq: int | None = None
    return_seqs: bool | None = None


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
    """A JSON append body (v0 §3)."""
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
    is_plain = tag_chars_max is not None and not request.node and len(body) <= limits.record_bytes_max
    if is_plain and 0 < len(tags) <= limits.batch_records_max:  # then nothing but its tags can be wrong
        columns.tags = _joined_texts(tags, "tag", limits.tag_bytes_max, tag_chars_max)
    else:
        _check_columns(columns, tags, len(body), request.node, limits, tag_chars_max)
    key = request.idempotency_key
    if key is not None:
        check_idempotency_key(key)
    if request.match_seq is not None:
        check_seq(request.match_seq, "match_seq")
    if request.trim_before_seq is not None:
        check_seq(request.trim_before_seq, "trim_before_seq")
    return ParsedAppend(
        columns,
        key,
        request.create,
        request.config,
        request.disable_backpressure,
        request.match_seq,
        request.fencing_token,
        request.trim_before_seq,
        request.return_seqs,
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
                check_meta(index, meta, limits)
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
    if count == 1:
        text = column[0]
        if not text:
            return None
        if len(text) > bytes_max or not text.isascii() or "\0" in text:
            check_text(text, f"records[0].{field}", bytes_max=bytes_max)
        return text.encode()
    try:
        joined = "\0".join(column)  # type: ignore[arg-type]
    except TypeError:  # some have none
        joined = "\0".join([text or "" for text in column])
    if len(joined) < count:  # nothing but separators
        return None
    # One look at the joined text clears the ordinary write; only a suspicious one is gone through.
    if chars_max is None or chars_max > bytes_max:
        chars_max = max(map(len, filter(None, column)))
    if not joined.isascii() or joined.count("\0") != count - 1 or chars_max > bytes_max:
        for index, text in enumerate(column):
            if text:
                check_text(text, f"records[{index}].{field}", bytes_max=bytes_max)
    return joined.encode()


def check_meta(index: int, meta: Raw, limits: RecordLimits, box: str = "") -> None:
    field = f"{box} records[{index}].meta" if box else f"records[{index}].meta"
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
