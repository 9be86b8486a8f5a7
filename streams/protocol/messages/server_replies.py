"""The JSON replies of `/v0` about the server itself: probes, placement, keys, status, metrics.

The rules of `replies.py` hold. Status and metrics are encoded from dicts; their structs describe and decode.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from streams.protocol.messages.replies import Count, Millis, one_of

Pressure = Annotated[str, one_of("none", "pacing", "throttling")]
DiskLevel = Annotated[
    str,
    Meta(
        description="low: requests that add data are answered 507; full: all that write are.",
        extra_json_schema={"enum": ["ok", "low", "full"]},
    ),
]


class Performance(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of a request (§0.7)."""

    server_total_ms: float
    fsync_ms: float | None = None
    wal_append_ms: float | None = None
    records_scanned: int | None = None
    throttle_wait_ms: float | None = None


class Placement(msgspec.Struct, frozen=True):
    """Which shard owns which slots, as runs (start, end, shard), and where each shard listens."""

    shards: int
    slots: list[tuple[int, int, int]]
    version: int
    sockets: Annotated[
        list[str],
        Meta(description="Unix sockets; empty texts for a key with prefixes, or without read and write."),
    ]
    addresses: Annotated[
        list[str],
        Meta(description="host:port for other machines; empty if shards listen on this one alone."),
    ]


class LimitUse(msgspec.Struct, frozen=True):
    """A limit of a key, and what is used of it; `used` is null while a shard does not say."""

    limit: Count
    used: Count | None


class WhoAmI(msgspec.Struct, frozen=True):
    """The key of the request; `id` is null where no keys are asked for. Limits that it lacks are left out."""

    id: str | None
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class KeyFacts(msgspec.Struct, frozen=True):
    """A key by its id, never a secret. Limits that it does not have are left out."""

    id: str
    scopes: list[str]
    prefixes: list[str]
    limits: dict[str, LimitUse]


class History(msgspec.Struct, frozen=True):
    """Numbers of the server by the second; null where a second was not measured."""

    from_ts: Millis
    step_ms: Count
    series: dict[str, list[float | None]]


class SettingFacts(msgspec.Struct, frozen=True, rename={"origin": "from"}):
    """A setting of the server. The value of a secret is hidden."""

    name: str
    variable: str
    value: str
    default: str
    origin: Annotated[str, one_of("default", "environment", "flag")]
    help: str


class Settings(msgspec.Struct, frozen=True):
    settings: list[SettingFacts]


class Health(msgspec.Struct, frozen=True):
    status: Annotated[str, one_of("ok")]
    version: str
    uptime_ms: Millis


class Ready(msgspec.Struct, frozen=True):
    status: Annotated[str, one_of("ready")]
    wal_replay_complete: bool
    boxes: Count
    shards: Count
    disk: DiskLevel


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the server. One that does not answer has no more than its number and `away`."""

    pid: Count | None = None
    uptime_ms: Millis = 0
    resident_bytes: Count = 0
    cpu_ms: Millis = 0
    open_files: Count = 0
    open_files_max: Count = 0
    memory_limit_bytes: Count = 0
    lag_ms: float = 0.0
    pressure: Pressure = "none"
    restarts: Annotated[
        dict[str, Count], Meta(description="Times the supervisor started it again, by reason.")
    ] = {}
    reason: Annotated[str, Meta(description="Why it does not serve.")] = ""
    next_step: Annotated[str, Meta(description="What an operator does about it.")] = ""
    detail: Annotated[str, Meta(description="What it said last; for keys with the scope admin.")] = ""


class ShardStatus(ProcessStatus, frozen=True, kw_only=True):
    shard: Count
    status: Annotated[str, one_of("ready", "replaying", "away")]
    replay_progress: float = 1.0
    boxes: Count = 0
    records: Count = 0
    bytes: Count = 0
    disk: DiskLevel = "ok"
    wal_queue_bytes: Count = 0
    unsynced_frames: Count = 0
    waiting_reads: Count = 0
    waiting_claims: Count = 0
    segments: Count = 0
    snapshot_age_s: Annotated[float, Meta(description="Age of changes that no snapshot has.")] = 0.0
    unsealed_bytes: Count = 0
    cache_bytes: Count = 0
    objects_backlog_bytes: Annotated[Count, Meta(description="Not yet in the object store.")] = 0


class GatewayStatus(ProcessStatus, frozen=True, kw_only=True):
    gateway: Count
    status: Annotated[str, one_of("ready", "away")]
    connections: Count = 0
    sse_connections: Count = 0
    in_flight: Count = 0
    body_bytes: Annotated[Count, Meta(description="Bodies of requests in memory.")] = 0
    answer_bytes: Annotated[Count, Meta(description="Large answers that are asked for or in memory.")] = 0


class DiskStatus(msgspec.Struct, frozen=True):
    """The disk, and the watermarks of free space below which its level is low, and full."""

    bytes: Count
    free_bytes: Count
    level: DiskLevel
    low_bytes: Count
    full_bytes: Count


class StatusCheck(msgspec.Struct, frozen=True):
    """One thing that the server checks of itself."""

    check: str
    result: Annotated[str, one_of("ok", "wrong")]
    found: str
    next_step: Annotated[str, Meta(description="What an operator does about it, if it is wrong.")] = ""


class QueuesStatus(msgspec.Struct, frozen=True):
    """The jobs of all queues; `dead_lettered` counts those ever moved, `oldest_s` is an age."""

    queues: Count
    ready: Count
    in_flight: Count
    delayed: Count
    dead_lettered: Count
    oldest_s: float


class RoutersStatus(msgspec.Struct, frozen=True):
    routers: Count
    blocked_routers: Count
    lag: Count
    lag_s: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    status: Annotated[str, one_of("ready", "replaying", "degraded")]
    version: str
    pressure: Pressure
    boxes: Count
    records: Count
    bytes: Count
    queues: QueuesStatus
    routers: RoutersStatus
    sse_connections: Count
    watch_sessions: Count
    resident_bytes: Count
    disk: DiskStatus
    checks: list[StatusCheck]
    shards: list[ShardStatus]
    gateways: list[GatewayStatus]
    keys: Annotated[
        list[KeyFacts],
        Meta(description="For keys with scope admin, or if no keys are asked for; else empty."),
    ]


class MetricBucket(msgspec.Struct, frozen=True):
    le: float
    count: Count


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """`value` of a counter or a gauge; the rest of a histogram."""

    labels: dict[str, Any]
    value: float | None = None
    count: Count | None = None
    sum: float | None = None
    buckets: list[MetricBucket] = []


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: Annotated[str, one_of("counter", "gauge", "histogram")]
    help: str
    samples: list[MetricSample]


class Metrics(msgspec.Struct, frozen=True):
    metrics: list[Metric]
