"""Parses the body of an append into checked columns (v0 §3). `model/records.py` stores them.

Rules of the file
- A payload is checked as JSON once, here, and never decoded: `data` and `meta` stay the bytes that came.
- A valid append is checked by a few operations on whole columns. Only when one fails are the records checked
  one by one, to say which is wrong.
- Every error names the field and shows the value.
"""

from __future__ import annotations

import re
from array import array
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from streams.protocol.model.boxes import NON_NEGATIVE_MAX, BoxPatch
from streams.protocol.model.job_fields import fields_of
from streams.protocol.model.names import IDEMPOTENCY_KEY_CHARS_MAX, RESERVED_KEY_PREFIX, check_text, quote
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


#: Bytes of an `ordering_key`, the highest `job_priority`, and how far ahead a job can be: ten years.
ORDERING_KEY_BYTES_MAX = 256
JOB_PRIORITY_MAX = 9
AHEAD_MS_MAX = 10 * 366 * 86_400_000

_NULL = Raw(b"null")

#: The longest tag that the basic decoder takes. It checks this at no cost, so no second check is needed.
_BASIC_TAG_CHARS = 128


class _BasicRecord(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    data: Raw
    tag: Annotated[str, Meta(max_length=_BASIC_TAG_CHARS)] | None = None


class NewRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record as a writer sends it (v0 §3): OpenAPI describes it, `_FullRecord` decodes it, and the client's
    `Entry` encodes it."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None
    ts: _Millis | None = None
    ordering_key: Annotated[str, Meta(extra_json_schema={"maxLength": ORDERING_KEY_BYTES_MAX})] | None = None
    job_priority: Annotated[int, Meta(ge=0, le=JOB_PRIORITY_MAX)] = 0
    delay_ms: _Millis | None = None
    deliver_at: _Millis | None = None


class _FullRecord(NewRecord, frozen=True, gc=False):
    """A `NewRecord` whose data and meta stay the bytes that came."""

    data: Raw
    meta: Raw = ABSENT  # type: ignore[assignment]


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


class _BasicAppend(AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: list[_BasicRecord]


class _FullAppend(AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: list[_FullRecord]


class _Lines(msgspec.Struct):
    records: list[_FullRecord]


# Most writes use only `data` and `tag`; a struct of two fields decodes a fifth faster than one of five. A
# write with more fails the basic decoder at its first such record and is decoded again by the full one.
_decode_basic = msgspec.json.Decoder(_BasicAppend).decode
_decode_full = msgspec.json.Decoder(_FullAppend).decode
_decode_lines = msgspec.json.Decoder(_FullRecord).decode_lines
_decode_lines_as_list = msgspec.json.Decoder(_Lines).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


class ParsedAppend(NamedTuple):
    columns: Columns
    options: AppendOptions


def decode_json(decode: Any, body: bytes) -> Any:
    """`decode(body)` with every failure turned into one that names the place."""
    try:
        if not body.isascii():
            str(body, "utf-8")  # raw values are passed over unchecked otherwise
        return decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"body: not valid UTF-8 at byte {error.start}") from None
    except msgspec.ValidationError as error:
        raise _locate_error(str(error), body) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("body: JSON nested too deeply") from None


def _locate_error(text: str, body: bytes) -> InvalidRequest:
    """msgspec says "… - at `$.records[0].tag`"; we say "records[0].tag: …, got 7"."""
    what, _, where = text.partition(" - at `$")
    place = where.rstrip("`").lstrip(".")
    if what.startswith("Expected "):
        try:
            value = msgspec.json.decode(body)
            for key, index in _STEP.findall(place):
                value = value[int(index)] if index else value[key]
            what = f"{what.partition(', got')[0]}, got {quote(str(msgspec.json.encode(value), 'utf-8'))}"
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
    tag_chars_max: int | None = _BASIC_TAG_CHARS
    try:
        if not body.isascii():
            str(body, "utf-8")
        request = _decode_basic(body)
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
    return ParsedAppend(columns, request)


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
            f"records: {len(lines)} lines hold {len(records)} records; write one record per line"
        )
    columns = _full_columns(records)
    _check_columns(columns, [record.tag for record in records], len(body), node, limits)
    return columns


class OutputRecords(msgspec.Struct, forbid_unknown_fields=True):
    """The outputs of an ack for one box."""

    records: list[_FullRecord]


def parse_output(output: OutputRecords, body_bytes: int, limits: RecordLimits) -> Columns:
    """Check the outputs for one box. They get the time of their arrival, so `ts` is an error."""
    columns = _full_columns(output.records)
    _check_columns(columns, [record.tag for record in output.records], body_bytes, None, limits)
    if columns.times is not None:
        raise InvalidRequest("records: outputs get the time of their arrival; leave ts out", field="ts")
    return columns


def check_seq(value: int, field: str) -> int:
    if value > SEQ_MAX:
        raise InvalidRequest(f"{field}: {value} is larger than the largest possible seq", field=field)
    return value


def check_idempotency_key(key: str) -> str:
    if not key or len(key) > IDEMPOTENCY_KEY_CHARS_MAX:
        raise InvalidRequest(
            f"idempotency_key: must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters, has {len(key)}",
            field="idempotency_key",
        )
    if key.startswith(RESERVED_KEY_PREFIX):
        raise InvalidRequest("idempotency_key: must not begin with a NUL character", field="idempotency_key")
    return key


def _full_columns(records: list[_FullRecord]) -> Columns:
    columns = Columns(
        [record.data for record in records],
        None,
        [record.node for record in records],
        [None if len(record.meta) == 0 or record.meta == _NULL else record.meta for record in records],
        [record.ts for record in records],
    )
    _add_job_fields(columns, records)
    return columns


def _add_job_fields(columns: Columns, records: list[_FullRecord]) -> None:
    """Check the job fields of a write and add those that are used."""
    keys = (
        _joined_texts([record.ordering_key for record in records], "ordering_key", ORDERING_KEY_BYTES_MAX)
        if records
        else None
    )
    times = array("q", [record.deliver_at or 0 for record in records])
    delays_ms = _drop_if_unused([record.delay_ms for record in records])
    if delays_ms is not None:
        for index, (delay_ms, time) in enumerate(zip(delays_ms, times, strict=True)):
            if delay_ms is not None and time:
                raise InvalidRequest(
                    f"records[{index}]: has delay_ms and deliver_at; send one of them", field="delay_ms"
                )
            if delay_ms is not None and delay_ms > AHEAD_MS_MAX:
                raise InvalidRequest(
                    f"records[{index}].delay_ms: {delay_ms} is more than ten years", field="delay_ms"
                )
        columns.delays_ms = delays_ms
    columns.job_fields = fields_of(keys, bytes([record.job_priority for record in records]), times)


def _check_columns(
    columns: Columns,
    tags: list[str | None],
    body_bytes: int,
    node: str | None,
    limits: RecordLimits,
    tag_chars_max: int | None = None,
) -> None:
    """Enforce the limits, drop unused columns, join the tags, and fill in the node of the append."""
    count = len(columns.datas)
    if count == 0:
        raise InvalidRequest("records: must hold at least one record", field="records")
    if count > limits.batch_records_max:
        raise BatchTooLarge(
            f"records: {count} records in one write, at most {limits.batch_records_max} are allowed; "
            "split the write",
            limit=limits.batch_records_max,
        )
    columns.metas = _drop_if_unused(columns.metas)
    columns.times = _drop_if_unused(columns.times)
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


def _drop_if_unused(column: list[Any] | None) -> list[Any] | None:
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
        text_column = "\0".join(column)  # type: ignore[arg-type]
    except TypeError:  # some have none
        text_column = "\0".join([text or "" for text in column])
    if len(text_column) < count:  # nothing but separators
        return None
    # One check of the joined text is enough for most appends; only a suspicious one is checked text by text.
    if chars_max is None or chars_max > bytes_max:
        chars_max = max(map(len, filter(None, column)))
    if not text_column.isascii() or text_column.count("\0") != count - 1 or chars_max > bytes_max:
        for index, text in enumerate(column):
            if text:
                check_text(text, f"records[{index}].{field}", bytes_max=bytes_max)
    return text_column.encode()


def check_meta(index: int, meta: Raw, limits: RecordLimits, box: str = "") -> None:
    field = f"{box} records[{index}].meta" if box else f"records[{index}].meta"
    if len(meta) > limits.meta_bytes_max:
        raise RecordTooLarge(
            f"{field}: has {len(meta)} bytes, at most {limits.meta_bytes_max} are allowed", field=field
        )
    if bytes(memoryview(meta)[:1]) != b"{":
        raise InvalidRequest(
            f"{field}: must be a JSON object, got {quote(str(bytes(meta), 'utf-8'))}", field=field
        )
    keys = len(_decode_object(meta))
    if keys > limits.meta_keys_max:
        raise InvalidRequest(
            f"{field}: has {keys} keys, at most {limits.meta_keys_max} are allowed", field=field
        )
