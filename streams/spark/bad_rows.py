"""Separates rows that cannot be written, and describes each as a dead letter. Pure; needs pyarrow.

With `onBadRow=deadletter` a task checks each row before it sends it, because a shard refuses a whole message
for one bad row. The checks are those of a server with default limits.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa

from streams.protocol.errors import StreamsError
from streams.protocol.model.names import check_box_name, check_text
from streams.protocol.payloads.appends import RecordLimits, check_meta

#: Column with the origin of a row, for example a file and a line as JSON. It is part of the dead letter only.
SOURCE: Final = "source"
#: A dead letter has this many bytes of the row's data.
_DATA_BYTES_MAX: Final = 64 << 10
_LIMITS: Final = RecordLimits()
_TEXTS: Final = {"tag": _LIMITS.tag_bytes_max, "node": _LIMITS.node_bytes_max}


def split_bad_rows(batch: pa.RecordBatch, box: str | None) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Return the rows that can be written, and a batch with a dead letter for each of the others, if any.

    A dead letter is a JSON object: `box`, `tag`, `data` (text, at most 64 KiB), `reason`, `source`.
    """
    names = [name for name in batch.schema.names if name in ("box", "data", "meta", *_TEXTS)]
    columns = {name: _values(batch.column(name)) for name in names}
    good: list[int] = []
    letters: list[str] = []
    for row in range(batch.num_rows):
        values = {name: column[row] for name, column in columns.items()}
        if box is not None:
            values["box"] = box
        reason = find_reason(values)
        if reason is None:
            good.append(row)
            continue
        source = batch.column(SOURCE)[row].as_py() if SOURCE in batch.schema.names else None
        letters.append(_dead_letter(values, reason, source))
    if SOURCE in batch.schema.names:
        batch = batch.drop_columns([SOURCE])
    if not letters:
        return batch, None
    return batch.take(pa.array(good, pa.int64())), pa.RecordBatch.from_pydict({"data": letters})


def find_reason(values: dict[str, Any]) -> str | None:
    """Return why a row cannot be written, or None if it can."""
    try:
        box = _text(values.get("box"), "box")
        if box is None:
            return "box: is null"
        check_box_name(box)
        for name, most in _TEXTS.items():
            text = _text(values.get(name), name)
            if text:
                check_text(text, name, bytes_max=most)
        data = _json(values.get("data"), "data")
        if data is None:
            return "data: is null"
        meta = values.get("meta")
        if isinstance(meta, bytes) and meta.strip() not in (b"", b"null"):
            check_meta(0, msgspec.Raw(_json(meta, "meta") or b""), _LIMITS)
        size = len(data) + (len(meta) if isinstance(meta, bytes) else 0)
        if size > _LIMITS.record_bytes_max:
            return f"data and meta have {size} bytes, at most {_LIMITS.record_bytes_max} are allowed"
    except _NotJson as error:
        return str(error)
    except StreamsError as error:
        return error.message
    return None


class _NotJson(Exception):
    """A value is not JSON, or not UTF-8."""


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_map(column.type):  # encoded as JSON later, and valid
        return [None] * len(column)
    return list(column.cast(pa.binary()).to_pylist())


def _text(value: bytes | str | None, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _NotJson(f"{name}: not UTF-8 at byte {error.start}") from None


def _json(value: bytes | None, name: str) -> bytes | None:
    if value is None:
        return None
    _text(value, name)
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _NotJson(f"{name}: not JSON: {error}") from None
    return value.strip()


def _dead_letter(values: dict[str, Any], reason: str, source: str | None) -> str:
    letter: dict[str, Any] = {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value
        for name, value in values.items()
        if name in ("box", "tag")
    }
    data = values.get("data")
    letter["data"] = None if data is None else data[:_DATA_BYTES_MAX].decode(errors="replace")
    letter["reason"] = reason
    if source is not None:
        letter[SOURCE] = msgspec.Raw(source.encode())
    return msgspec.json.encode(letter).decode()
