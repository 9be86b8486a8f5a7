"""`Entry`, the record to append, and replies that only a client decodes; `protocol/messages` has the others.

Times are integer milliseconds since 1970. Fields that this version does not know are passed over, so a newer
server can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from streams.client.errors import NotJson
from streams.client.json_values import encode_json
from streams.protocol.messages.replies import Job as Job
from streams.protocol.messages.replies import Record as Record
from streams.protocol.messages.replies import RecordPage

T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record to append: any JSON value, and optionally a tag to find it by, the node that wrote it, a few
    facts beside it (`meta`), and your own time for it. `msgspec.Raw` as data goes out as it is."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None
    ts: int | None = None
    #: Of a job: key of its order, priority 0 to 9, and when it can be claimed: after a delay, or at a time.
    ordering_key: str | None = None
    job_priority: int = 0
    delay_ms: int | None = None
    deliver_at: int | None = None


class RawRecord(Record, frozen=True):
    """A record with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class Tombstone(msgspec.Struct, frozen=True):
    """Records that you would have been shown and that are lost: to a cap (`cap`), an age (`ttl`), both
    (`mixed`), a box made anew (`recreated`), a crash (`crash`), or before a router copied them
    (`source_trim`)."""

    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int
    head_seq: int
    missed_estimate: int | None = None


class CaughtUp(msgspec.Struct, frozen=True):
    """A watch has shown all there was of a box and is live from here."""

    box: str
    head_seq: int


class BoxDeleted(msgspec.Struct, frozen=True):
    box: str
    head_seq: int
    reason: str = ""


class Page(RecordPage, frozen=True, kw_only=True):
    """One answer to a read. `next_from_seq` is where to go on; `caught_up` says that there is no more now."""

    tombstone: Tombstone | None = None


class RawPage(msgspec.Struct, frozen=True):
    """A page with records as the bytes that came, digits of numbers and all."""

    records: list[msgspec.Raw]
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    tombstone: msgspec.Raw


class DataOf(msgspec.Struct, frozen=True):
    """Of a record, its data as the bytes that came."""

    data: msgspec.Raw


class RawJob(Job, frozen=True):
    """A job with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class RawClaimReply(msgspec.Struct, frozen=True):
    claimed: list[RawJob]


def decode(body: bytes, kind: type[T]) -> T:
    """An answer as this type. Numbers that no float holds, such as 1e400, become infinite."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "Number out of range" not in str(error):
            raise
        return msgspec.convert(json.loads(body), type=kind)


def encode_entry(entry: Entry | Any) -> bytes:
    """An entry as JSON; anything else counts as the data of one. `NotJson` for what JSON cannot hold."""
    if not isinstance(entry, Entry):
        return b'{"data":' + encode_json(entry) + b"}"
    record = b'{"data":%b' % encode_json(entry.data)
    if entry.meta is not None:
        record += b',"meta":%b' % encode_json(entry.meta, "meta")
    for name in ("tag", "node", "ts", "ordering_key", "delay_ms", "deliver_at"):
        value = getattr(entry, name)
        if value is not None:
            record += b',"%b":%b' % (name.encode(), msgspec.json.encode(value))
    if entry.job_priority:
        record += b',"job_priority":%d' % entry.job_priority
    return record + b"}"


def encode_entries(entries: Iterable[Entry | Any]) -> list[bytes]:
    """Entries as JSON, for one write."""
    records: list[bytes] = []
    try:
        for entry in entries:
            records.append(encode_entry(entry))
    except NotJson as error:
        raise error.inside(f"records[{len(records)}]") from None
    return records


def append_body(records: list[bytes], key: str, fields: Mapping[str, Any] | None = None) -> bytes:
    """The body of a write, out of records that are JSON already."""
    more = b"".join(
        b',"%b":%b' % (name.encode(), msgspec.json.encode(value)) for name, value in (fields or {}).items()
    )
    return b'{"records":[%b],"idempotency_key":%b%b}' % (b",".join(records), msgspec.json.encode(key), more)
