"""What the server says, as types (v0 §2 to §10), and what you append, as `Entry`.

Times are integer milliseconds since 1970. Fields that this version does not know are passed over, so a newer
server can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import field

from streams.client.errors import NotJson
from streams.client.json_values import encode_json
from streams.protocol.model.boxes import BoxConfig

T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record to append: any JSON value, and optionally a tag to find it by, the node that wrote it, a few
    facts beside it (`meta`), and your own time for it. `msgspec.Raw` as data goes out as it is."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None
    ts: int | None = None


class Record(msgspec.Struct, frozen=True):
    """A record as it was read."""

    seq: int = field(name="$seq")
    ts: int = field(name="$ts")
    data: Any = None
    tag: str | None = field(name="$tag", default=None)
    node: str | None = field(name="$node", default=None)
    meta: dict[str, Any] = {}


class RawRecord(Record, frozen=True):
    """The same with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = {}


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


class Page(msgspec.Struct, frozen=True):
    """One answer to a read. `next_from_seq` is where to go on; `caught_up` says that there is no more now."""

    box: str
    records: list[Record]
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    lag: int
    tombstone: Tombstone | None = None


class OneRecord(msgspec.Struct, frozen=True):
    record: Record


class RawPage(msgspec.Struct, frozen=True):
    """The same with records as the bytes that came, digits of numbers and all."""

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


class Appended(msgspec.Struct, frozen=True):
    """What became of a write: its records have the seqs from `first_seq` to `last_seq`. `deduped` says that
    an earlier attempt with the same key had written them."""

    box: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool


class QueueCounts(msgspec.Struct, frozen=True):
    ready: int = 0
    in_flight: int = 0
    delayed: int = 0
    dead_lettered: int = 0


class BoxState(msgspec.Struct, frozen=True):
    box: str
    type: str
    head_seq: int
    earliest_seq: int
    next_seq: int
    generation: int
    count: int
    bytes: int
    config: BoxConfig
    effective_priority: float = 0
    last_write_ts: int | None = None
    last_read_ts: int | None = None
    fencing_token: str | None = None
    queue: QueueCounts | None = None


class BoxPut(msgspec.Struct, frozen=True):
    box: str
    created: bool
    config: BoxConfig


class BoxSummary(msgspec.Struct, frozen=True):
    """A box as a list shows it."""

    box: str
    type: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    durability: str
    effective_priority: float = 0


class BoxPage(msgspec.Struct, frozen=True):
    boxes: list[BoxSummary]
    next_cursor: str | None = None


class BoxDropped(msgspec.Struct, frozen=True):
    deleted: bool
    routers_removed: list[str] = []


class Deleted(msgspec.Struct, frozen=True):
    box: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Position(msgspec.Struct, frozen=True):
    """Where a box is: `last_ts` is the time of its last record."""

    head_seq: int
    next_seq: int
    last_ts: int | None = None


class Group(msgspec.Struct, frozen=True):
    group: str
    cursor: int
    lag: int = 0
    updated_ts: int | None = None


class GroupPage(msgspec.Struct, frozen=True):
    groups: list[Group]
    next_cursor: str | None = None


class GroupDropped(msgspec.Struct, frozen=True):
    deleted: bool


class Router(msgspec.Struct, frozen=True):
    """A router's definition. What follows `created` is known of one that was asked for by name."""

    router: str
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Any = None
    allow_cycle: bool = False
    created: bool = False
    forwarded_total: int | None = None
    position: int | None = None
    lag: int | None = None
    state: str | None = None
    last_error: str | None = None


class RouterPage(msgspec.Struct, frozen=True):
    routers: list[Router]
    next_cursor: str | None = None


class RouterDropped(msgspec.Struct, frozen=True):
    deleted: bool


class Job(msgspec.Struct, frozen=True):
    """A job under a lease: yours until `deadline`, unless you extend it. `lease_id` proves that it is."""

    seq: int = field(name="$seq")
    ts: int = field(name="$ts")
    lease_id: str
    deadline: int
    deliveries: int
    data: Any = None
    tag: str | None = field(name="$tag", default=None)
    node: str | None = field(name="$node", default=None)
    meta: dict[str, Any] = {}


class RawJob(Job, frozen=True):
    """The same with data and meta as the bytes that came, digits of numbers and all."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    meta: dict[str, msgspec.Raw] = {}


class Claimed(msgspec.Struct, frozen=True):
    claimed: list[Job]
    count: int
    ready: int


class RawClaimed(msgspec.Struct, frozen=True):
    claimed: list[RawJob]


class Settled(msgspec.Struct, frozen=True):
    """What an ack, a nack or an extension did. `skipped` are seqs that are not yours any more."""

    skipped: list[int]
    acked: int = 0
    nacked: int = 0
    extended: int = 0
    ready: int = 0
    in_flight: int = 0
    deadlines: dict[str, int] = {}


class Requeued(msgspec.Struct, frozen=True):
    requeued: int = 0


class Health(msgspec.Struct, frozen=True):
    status: str
    version: str
    uptime_ms: int


class Ready(msgspec.Struct, frozen=True):
    status: str
    boxes: int
    shards: int


class Disk(msgspec.Struct, frozen=True):
    bytes: int
    free_bytes: int
    #: `low`: what adds data is refused; `full`: all that writes is.
    level: str = "ok"


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard or a gateway; of one that does not answer, only that it is away."""

    status: str
    shard: int | None = None
    gateway: int | None = None
    pid: int | None = None
    uptime_ms: int = 0
    resident_bytes: int = 0
    cpu_ms: int = 0
    open_files: int = 0
    open_files_max: int = 0
    memory_limit_bytes: int = 0
    lag_ms: float = 0.0
    pressure: str = "none"
    boxes: int = 0
    records: int = 0
    connections: int = 0
    sse_connections: int = 0
    wal_queue_bytes: int = 0
    replay_progress: float = 1.0
    #: Times it was started again, by reason; why it does not serve now, and what to do about it.
    restarts: dict[str, int] = {}
    reason: str = ""
    next_step: str = ""
    detail: str = ""


class LimitUse(msgspec.Struct, frozen=True):
    """A limit of a key, and what is used of it; None while a shard does not say."""

    limit: int
    used: int | None


class KeyFacts(msgspec.Struct, frozen=True):
    """A key by its id. Limits that it does not have are left out."""

    id: str
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class StatusCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the server checks of itself: `result` is ok or wrong."""

    check: str
    result: str
    found: str
    next_step: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is ready, replaying or degraded; `pressure` none, pacing or throttling."""

    status: str
    version: str
    pressure: str
    boxes: int
    records: int
    bytes: int
    sse_connections: int
    watch_sessions: int
    resident_bytes: int
    disk: Disk
    shards: list[ProcessStatus]
    gateways: list[ProcessStatus]
    checks: list[StatusCheck] = []
    #: For a key with scope admin: all keys, their limits and what they use of them.
    keys: list[KeyFacts] = []


class WhoAmI(msgspec.Struct, frozen=True):
    """The key of a client. `id` is None where the server asks for no keys."""

    id: str | None
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class Placement(msgspec.Struct, frozen=True):
    """Which shard owns which slots, and where the shards listen."""

    shards: int
    slots: list[tuple[int, int, int]]
    version: int
    #: Paths of the shards' Unix sockets; empty texts for a key with prefixes, or without read and write.
    sockets: list[str] = []
    #: host:port of each shard for other machines; empty when it listens on this one alone.
    addresses: list[str] = []


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
    for name in ("tag", "node", "ts"):
        value = getattr(entry, name)
        if value is not None:
            record += b',"%b":%b' % (name.encode(), msgspec.json.encode(value))
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
