"""Bytes of a framework as the data of a record, and back.

A message that is JSON, which is the default of all frameworks, is stored as it is, so that it can be read in
the console. Any other is stored as base64 with `meta.encoding`.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from streams.client.answers import Entry, Job

_BASE64 = {"encoding": "base64"}
_TAG_BYTES_MAX = 256
#: Of an error, the end: that is where a traceback says what went wrong.
_ERROR_CHARS_MAX = 1000


def entry_of(
    message: bytes,
    *,
    tag: str | None = None,
    job_priority: int = 0,
    ordering_key: object = None,
    delay_ms: int | None = None,
    deliver_at: int | None = None,
) -> Entry:
    """A message as a record to append. The tag, the name of a task, is left out if it is too long for one."""
    data: Any = msgspec.Raw(message)
    meta = None
    try:
        msgspec.json.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        data, meta = base64.b64encode(message).decode(), _BASE64
    return Entry(
        data,
        tag=tag if tag and len(tag.encode()) <= _TAG_BYTES_MAX else None,
        meta=meta,
        job_priority=job_priority,
        ordering_key=str(ordering_key) if ordering_key is not None else None,
        delay_ms=max(0, delay_ms) if delay_ms is not None else None,
        deliver_at=max(0, deliver_at) if deliver_at is not None else None,
    )


def message_of(job: Job) -> bytes:
    """The message of a job that was claimed with `raw_data`."""
    raw = bytes(job.data)
    encoding = job.meta.get("encoding")
    if encoding is not None and bytes(encoding) == b'"base64"':
        return base64.b64decode(msgspec.json.decode(raw, type=str))
    return raw


def dead_letter_of(job: Job, box: str, node: str, error: str | None) -> Entry:
    """A rejected job as its dead letter, with the facts that the server gives to its own (v0 §21).

    So it can be requeued: `streams queue requeue`.
    """
    meta = {name: msgspec.json.decode(value) for name, value in job.meta.items()}
    facts = {
        "$dead_letter_from": box,
        "$dead_letter_deliveries": job.deliveries,
        "$dead_letter_src_seq": job.seq,
        "$dead_letter_node": node,
        "$dead_letter_ts": round(time.time() * 1000),
    }
    if error:
        facts["$dead_letter_error"] = error[-_ERROR_CHARS_MAX:]
    return Entry(
        job.data,
        tag=job.tag,
        meta=meta | facts,
        job_priority=job.job_priority,
        ordering_key=job.ordering_key,
    )
