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
from streams.protocol.messages import replies
from streams.protocol.messages.bodies import NewRecord
from streams.protocol.messages.replies import Job as Job
from streams.protocol.messages.replies import Record as Record
from streams.protocol.messages.replies import RecordPage
from streams.protocol.messages.watch_events import BoxDeleted as BoxDeleted
from streams.protocol.messages.watch_events import CaughtUp as CaughtUp
from streams.protocol.messages.watch_events import RecordsEvent

T = TypeVar("T")


class Entry(NewRecord, frozen=True, omit_defaults=True):
    """A record to append: any JSON value, and optionally a tag to find it by, the node that wrote it, a few
    facts beside it (`meta`), and your own time for it. `msgspec.Raw` as data goes out as it is. Of a job also
    the key of its order, its priority (0 to 9), and when it can be claimed: after a delay, or at a time."""


#: The fields of an entry that are JSON as they are, with their defaults.
_FACTS = tuple(
    (field.name, b',"%b":' % field.name.encode(), field.default)
    for field in msgspec.structs.fields(Entry)
    if field.name not in ("data", "meta")
)


class RawRecord(Record, frozen=True):
    """A record with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class Tombstone(replies.Tombstone, frozen=True, kw_only=True):
    """Records that you would have been shown and that are lost: to a cap (`cap`), an age (`ttl`), both
    (`mixed`), a box made anew (`recreated`), a crash (`crash`), or before a router copied them
    (`source_trim`). A watch does not estimate how many you missed."""

    missed_estimate: int | None = None  # type: ignore[assignment]


class Page(RecordPage, frozen=True, kw_only=True):
    """One answer to a read. `next_from_seq` is where to go on; `caught_up` says that there is no more now."""

    tombstone: Tombstone | None = None


class RawPage(RecordPage, frozen=True, kw_only=True):
    """A page with records as the bytes that came, digits of numbers and all."""

    records: list[msgspec.Raw]  # type: ignore[assignment]
    tombstone: msgspec.Raw


class RawRecordsEvent(RecordsEvent, frozen=True):
    """An event with records as the bytes that came, digits of numbers and all."""

    records: list[RawRecord]  # type: ignore[assignment]


class DataOf(msgspec.Struct, frozen=True):
    """Of a record, its data as the bytes that came."""

    data: msgspec.Raw


class RawJob(Job, frozen=True):
    """A job with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class RawClaimReply(replies.ClaimReply, frozen=True):
    claimed: list[RawJob]  # type: ignore[assignment]


def decode(body: bytes, kind: type[T]) -> T:
    """An answer as this type. Numbers that no float holds, such as 1e400, become infinite."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "Number out of range" not in str(error):
            raise
        return msgspec.convert(json.loads(body), type=kind)


def encode_entry(entry: Entry | Any, default_node: str | None = None) -> bytes:
    """An entry as JSON; anything else counts as the data of one. `NotJson` for what JSON cannot hold."""
    if not isinstance(entry, Entry):
        if default_node is None:
            return b'{"data":' + encode_json(entry) + b"}"
        entry = Entry(entry, node=default_node)
    elif default_node is not None and entry.node is None:
        entry = msgspec.structs.replace(entry, node=default_node)
    record = b'{"data":%b' % encode_json(entry.data)
    if entry.meta is not None:
        record += b',"meta":%b' % encode_json(entry.meta, "meta")
    for name, start, default in _FACTS:
        value = getattr(entry, name)
        if value != default:
            record += start + msgspec.json.encode(value)
    return record + b"}"


def encode_entries(entries: Iterable[Entry | Any], default_node: str | None = None) -> list[bytes]:
    """Entries as JSON, for one write. One that names no node is of `default_node`."""
    records: list[bytes] = []
    try:
        for entry in entries:
            records.append(encode_entry(entry, default_node))
    except NotJson as error:
        raise error.inside(f"records[{len(records)}]") from None
    return records


def append_body(records: list[bytes], key: str, fields: Mapping[str, Any] | None = None) -> bytes:
    """The body of a write, out of records that are JSON already."""
    more = b"".join(
        b',"%b":%b' % (name.encode(), msgspec.json.encode(value)) for name, value in (fields or {}).items()
    )
    return b'{"records":[%b],"idempotency_key":%b%b}' % (b",".join(records), msgspec.json.encode(key), more)
