"""The shapes of `/v0` answers, for the OpenAPI document (v0 §2-§13). Pure, and never on a hot path.

Answers are worded by hand where it counts (`requests.py`), so their shapes stand here once more, and a test
holds what a server really answers against them. Bodies of requests are described by the very structs that
read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streams.protocol.messages.commands import Tombstone
from streams.protocol.messages.queue_requests import RequeueBody
from streams.protocol.messages.queue_requests import _AckBody as AckBody
from streams.protocol.messages.queue_requests import _ClaimBody as ClaimBody
from streams.protocol.messages.queue_requests import _CommitBody as CommitBody
from streams.protocol.messages.queue_requests import _ExtendBody as ExtendBody
from streams.protocol.messages.queue_requests import _NackBody as NackBody
from streams.protocol.messages.requests import _DeleteBody as DeleteBody
from streams.protocol.messages.requests import _DiffBody as DiffBody
from streams.protocol.messages.requests import _FenceBody as FenceBody
from streams.protocol.messages.requests import _RouterBody as RouterBody
from streams.protocol.model.boxes import NON_NEGATIVE_MAX, BoxConfig, BoxPatch
from streams.protocol.model.names import BOX_NAME_PATTERN, ROUTER_NAME_PATTERN
from streams.protocol.wire.appends import _AppendOptions

__all__ = [
    "AckBody", "BoxPatch", "ClaimBody", "CommitBody", "DeleteBody", "DiffBody", "ExtendBody", "FenceBody",
    "NackBody", "RequeueBody", "RouterBody",
]  # fmt: skip

Seq = Annotated[int, Meta(ge=0)]
Millis = Annotated[int, Meta(ge=0)]
Box = Annotated[str, Meta(pattern=f"^{BOX_NAME_PATTERN}$")]
Group = Annotated[str, Meta(pattern=f"^{BOX_NAME_PATTERN}$")]
Router = Annotated[str, Meta(pattern=f"^{ROUTER_NAME_PATTERN}$")]
Durability = Literal["memory", "disk", "fsync", "object"]
Kind = Literal["log", "queue"]
Pressure = Literal["none", "pacing", "throttling"]


class NewRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A record as a writer sends it (§3). Its values are never decoded, so the reader of it knows no more of
    them than that they are there."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None
    ts: Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)] | None = None


class AppendBody(_AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: Annotated[list[NewRecord], Meta(min_length=1)]


class WatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to watch (§7.1); a gateway reads it with a struct of its own."""

    boxes: Annotated[dict[Box, WatchStart], Meta(min_length=1, max_length=256)]
    node: str | list[str] | None = None
    limit: Seq = 256
    max_batch_bytes: Seq = 262_144
    heartbeat_ms: Seq = 15_000
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"
    cursor: str | dict[str, int] | None = None


class WatchStart(msgspec.Struct, forbid_unknown_fields=True):
    from_seq: Seq | None = None
    tail: bool = False


class Performance(msgspec.Struct):
    """What the answer cost (§0.7)."""

    server_total_ms: float
    fsync_ms: float | UnsetType = UNSET
    wal_append_ms: float | UnsetType = UNSET
    records_scanned: int | UnsetType = UNSET
    throttle_wait_ms: float | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    performance: Performance


class Config(BoxConfig, kw_only=True, frozen=True):
    """A box's full, resolved config (§1)."""

    durable: bool


class BoxPut(Answer, kw_only=True):
    box: Box
    created: bool
    config: Config


class QueueTotals(msgspec.Struct):
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int


class BoxState(Answer, kw_only=True):
    box: Box
    type: Kind
    head_seq: Seq
    earliest_seq: Seq
    next_seq: Seq
    generation: Seq
    count: Seq
    bytes: Seq
    config: Config
    effective_priority: float
    last_write_ts: Millis | None
    last_read_ts: Millis | None
    fencing_token: str | UnsetType = UNSET
    queue: QueueTotals | UnsetType = UNSET


class ListedBox(msgspec.Struct):
    box: Box
    type: Kind
    head_seq: Seq
    earliest_seq: Seq
    count: Seq
    bytes: Seq
    durable: bool
    durability: Durability
    effective_priority: float


class BoxPage(Answer, kw_only=True):
    boxes: list[ListedBox]
    next_cursor: str | UnsetType = UNSET


class BoxGone(Answer, kw_only=True):
    box: Box
    deleted: bool
    routers_removed: list[Router]


class Appended(Answer, kw_only=True):
    box: Box
    first_seq: Seq
    last_seq: Seq
    seqs: list[Seq] | UnsetType = UNSET
    head_seq: Seq
    count: Seq
    created: bool
    deduped: bool


_SIGILS = {"seq": "$seq", "ts": "$ts", "node": "$node", "tag": "$tag"}


class Record(msgspec.Struct, kw_only=True, rename=_SIGILS):
    """A record as it is read back (§0.5). `data` is left out only where the request asked for that."""

    seq: Seq
    ts: Millis
    node: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET
    data: Any = UNSET


#: What a read ignored.
Warnings = Annotated[list[str], Meta(max_length=8)]
#: Bodies whose unknown fields are ignored, unless the request prefers strict handling.
TOLERANT_BODIES = frozenset(("DiffBody", "ClaimBody", "WatchBody"))


class Diff(Answer, kw_only=True):
    box: Box
    records: list[Record]
    next_from_seq: Seq
    generation: Seq
    head_seq: Seq
    earliest_seq: Seq
    caught_up: bool
    tombstone: Tombstone | None
    lag: Seq
    warnings: Warnings | UnsetType = UNSET


class OneRecord(Answer, kw_only=True):
    box: Box
    record: Record


class Tail(Answer, kw_only=True):
    box: Box
    head_seq: Seq
    next_seq: Seq
    last_ts: Millis | None


class RecordsDeleted(Answer, kw_only=True):
    box: Box
    deleted: Seq
    earliest_seq: Seq
    head_seq: Seq
    count: Seq
    bytes: Seq


class FenceSet(Answer, kw_only=True):
    box: Box
    token: str


class Job(Record, kw_only=True, rename=_SIGILS):
    lease_id: str
    deadline: Millis
    deliveries: Annotated[int, Meta(ge=1)]


class Claimed(Answer, kw_only=True):
    box: Box
    claimed: list[Job]
    count: Seq
    ready: Seq
    warnings: Warnings | UnsetType = UNSET


class Acked(Answer, kw_only=True):
    box: Box
    acked: Seq
    skipped: list[Seq]
    ready: Seq
    in_flight: Seq


class Nacked(Answer, kw_only=True):
    box: Box
    nacked: Seq
    skipped: list[Seq]
    ready: Seq
    in_flight: Seq


class Extended(Answer, kw_only=True):
    box: Box
    extended: Seq
    skipped: list[Seq]
    deadlines: dict[str, Millis]


class Requeued(Answer, kw_only=True, rename={"from_box": "from"}):
    box: Box
    from_box: Box
    requeued: Seq
    pending: Seq


class GroupState(msgspec.Struct, kw_only=True):
    box: Box
    group: Group
    cursor: Seq
    lag: Seq
    updated_ts: Millis


class GroupShown(Answer, kw_only=True):
    box: Box
    group: Group
    cursor: Seq
    lag: Seq
    updated_ts: Millis


class GroupPut(GroupShown, kw_only=True):
    created: bool


class GroupPage(Answer, kw_only=True):
    box: Box
    groups: list[GroupState]
    next_cursor: str | UnsetType = UNSET


class GroupGone(Answer, kw_only=True):
    box: Box
    group: Group
    deleted: bool


class RouterShown(msgspec.Struct, kw_only=True):
    router: Router
    source: Box
    dest: Box
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: list[str] | None
    allow_cycle: bool


class RouterPut(RouterShown, kw_only=True):
    created: bool
    performance: Performance


class RouterState(RouterShown, kw_only=True):
    performance: Performance
    forwarded_total: Seq
    position: Seq
    lag: Seq
    state: Literal["ok", "blocked"]
    last_error: str | None


class RouterPage(Answer, kw_only=True):
    routers: list[RouterShown]
    next_cursor: str | UnsetType = UNSET


class RouterGone(Answer, kw_only=True):
    router: Router
    deleted: bool


class WatchedBox(msgspec.Struct):
    from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq


class WatchMade(Answer, kw_only=True):
    wid: str
    stream_url: str
    session_ttl_ms: Millis
    boxes: dict[str, WatchedBox]
    warnings: Warnings | UnsetType = UNSET


class Placement(Answer, kw_only=True):
    """Which shard owns which slots, as runs (start, end, shard), and where each shard listens."""

    shards: int
    slots: list[tuple[int, int, int]]
    version: int
    #: Paths of the shards' Unix sockets; empty texts for a key with prefixes, or without read and write.
    sockets: list[str]
    addresses: list[str]


class LimitUse(msgspec.Struct, kw_only=True):
    """`used` is null while a shard does not say."""

    limit: Seq
    used: Seq | None


class KeyFacts(msgspec.Struct, kw_only=True):
    """A key by its id, never a secret. Limits that it does not have are left out."""

    id: str
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class WhoAmI(Answer, kw_only=True):
    """The key of the request; `id` is null where no keys are asked for."""

    id: str | None
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class Health(Answer, kw_only=True):
    status: Literal["ok"]
    version: str
    uptime_ms: Millis


#: low: commands that add data are answered 507; full: all that write are.
DiskLevel = Literal["ok", "low", "full"]


class Ready(Answer, kw_only=True):
    status: Literal["ready"]
    wal_replay_complete: bool
    boxes: Seq
    shards: Seq
    disk: DiskLevel


class ProcessStatus(msgspec.Struct, kw_only=True):
    """A process of the server. One that does not answer has no more than its number and `away`."""

    pid: Seq | UnsetType = UNSET
    uptime_ms: Millis | UnsetType = UNSET
    resident_bytes: Seq | UnsetType = UNSET
    cpu_ms: Millis | UnsetType = UNSET
    open_files: Seq | UnsetType = UNSET
    open_files_max: Seq | UnsetType = UNSET
    memory_limit_bytes: Seq | UnsetType = UNSET
    lag_ms: float | UnsetType = UNSET
    pressure: Pressure | UnsetType = UNSET
    #: Times the supervisor started it again, by reason.
    restarts: dict[str, Seq] | UnsetType = UNSET
    #: Why it does not serve, and what an operator does next.
    reason: str | UnsetType = UNSET
    next_step: str | UnsetType = UNSET
    #: What it said last; for keys with the scope admin.
    detail: str | UnsetType = UNSET


class ShardStatus(ProcessStatus, kw_only=True):
    shard: Seq
    status: Literal["ready", "replaying", "away"]
    replay_progress: float | UnsetType = UNSET
    boxes: Seq | UnsetType = UNSET
    records: Seq | UnsetType = UNSET
    bytes: Seq | UnsetType = UNSET
    disk: DiskLevel | UnsetType = UNSET
    wal_queue_bytes: Seq | UnsetType = UNSET
    unsynced_frames: Seq | UnsetType = UNSET
    waiting_reads: Seq | UnsetType = UNSET


class GatewayStatus(ProcessStatus, kw_only=True):
    gateway: Seq
    status: Literal["ready", "away"]
    connections: Seq | UnsetType = UNSET
    sse_connections: Seq | UnsetType = UNSET
    in_flight: Seq | UnsetType = UNSET
    #: Bodies of requests in memory, and large answers that are asked for or in memory.
    body_bytes: Seq | UnsetType = UNSET
    answer_bytes: Seq | UnsetType = UNSET


class DiskStatus(msgspec.Struct):
    bytes: Seq
    free_bytes: Seq
    level: DiskLevel
    #: The watermarks of free space below which the level is low, and full.
    low_bytes: Seq
    full_bytes: Seq


class StatusCheck(msgspec.Struct):
    """One thing that the server checks of itself."""

    check: str
    result: Literal["ok", "wrong"]
    found: str
    #: What an operator does about it, if it is wrong.
    next_step: str | UnsetType = UNSET


class Status(Answer, kw_only=True):
    status: Literal["ready", "replaying", "degraded"]
    version: str
    pressure: Pressure
    boxes: Seq
    records: Seq
    bytes: Seq
    sse_connections: Seq
    watch_sessions: Seq
    resident_bytes: Seq
    disk: DiskStatus
    checks: list[StatusCheck]
    shards: list[ShardStatus]
    gateways: list[GatewayStatus]
    #: For keys with scope admin, and where no keys are asked for; else empty.
    keys: list[KeyFacts]


class MetricBucket(msgspec.Struct):
    le: float
    count: Seq


class MetricSample(msgspec.Struct, kw_only=True):
    """`value` of a counter or a gauge; the rest of a histogram."""

    labels: dict[str, Any]
    value: float | UnsetType = UNSET
    count: Seq | UnsetType = UNSET
    sum: float | UnsetType = UNSET
    buckets: list[MetricBucket] | UnsetType = UNSET


class Metric(msgspec.Struct):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: list[MetricSample]


class Metrics(Answer, kw_only=True):
    metrics: list[Metric]


def component_of(kind: type[Any]) -> str:
    """What a type is called in the document."""
    return kind.__name__.lstrip("_")
