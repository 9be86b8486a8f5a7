"""Every limit that a request passes on its way through a server, in order.

The table is the list that operators read (`docs/explanation/pressure.md` is generated from it) and that tests
check against the code: the enforcing class or function, the error, the settings and the metrics must exist,
and every limit that an error names must have a row. Limits of shards are rows as well; they name their
modules as text, because a gateway imports nothing of a shard.

The table enforces nothing. Each limit is enforced by its `enforced_by`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

#: The effect on a request that reaches the limit. If there are two, the first one happens first.
Effect = Literal["delays", "refuses", "disconnects"]

_REQUESTS: Final = ("streams_http_requests_total",)


class RequestLimit(NamedTuple):
    #: The bounded quantity.
    bounds: str
    #: Its value if no setting defines it. The defaults of settings are in `streams/config/table.py`.
    value: str
    #: `module:name` of the classes or functions that enforce it.
    enforced_by: tuple[str, ...]
    effects: tuple[Effect, ...]
    #: Codes of the errors that answer the request. Their statuses are in `gateway/requests/errors.py`.
    errors: tuple[str, ...] = ()
    #: The effect before the error, or instead of it.
    note: str = ""
    #: `detail.limit` of the error.
    names: tuple[str, ...] = ()
    #: Settings that change it. `..._PER_KEY` are for keys without a limit of their own in the keys file.
    settings: tuple[str, ...] = ()
    metrics: tuple[str, ...] = _REQUESTS


REQUEST_LIMITS: Final = (
    RequestLimit(
        "connections of a gateway, of an address",
        "",
        (
            "gateway.admission.connection_table:ConnectionTable",
            "gateway.http.edge_rules:no_free_connection_error",
        ),
        ("disconnects", "refuses"),
        ("throttled",),
        note="an idle connection is closed for a new one; if no connection is idle, a new stream is refused",
        names=("connections",),
        settings=("STREAMS_MAX_CONNECTIONS", "STREAMS_MAX_CONNECTIONS_PER_ADDRESS"),
        metrics=("streams_http_connections_closed_total",),
    ),
    RequestLimit(
        "frame budget of an HTTP/2 or WebSocket connection",
        "500, 4,000 with a key",
        ("gateway.admission.frame_budget:FrameBudget",),
        ("disconnects",),
        note="the connection is closed",
        metrics=("streams_http_connections_closed_total",),
    ),
    RequestLimit(
        "the request scheduler",
        "64 requests a turn",
        ("gateway.admission.request_scheduler:RequestScheduler",),
        ("delays",),
        note="waits",
        metrics=("streams_pressure_level",),
    ),
    RequestLimit(
        "head, target, headers",
        "64 KiB, 16 KiB, 128; 10 s",
        ("gateway.http.h1:parse_head_untrusted", "gateway.http.edge_rules:check_url_length"),
        ("refuses",),
        ("invalid_request",),
    ),
    RequestLimit(
        "a valid key",
        "",
        ("gateway.access.auth:Guard",),
        ("refuses",),
        ("unauthorized", "forbidden"),
        settings=("STREAMS_API_KEYS", "STREAMS_API_KEYS_FILE"),
    ),
    RequestLimit(
        "size and speed of a body",
        "30 s, plus 1 s for each 64 KiB",
        ("gateway.http.edge_rules:check_body_length", "gateway.requests.content:decompress_body"),
        ("refuses",),
        ("payload_too_large", "invalid_request"),
        settings=("STREAMS_MAX_BODY_BYTES",),
    ),
    RequestLimit(
        "memory of bodies, by owner",
        "512 MiB",
        ("gateway.http.edge_rules:body_budget", "gateway.admission.memory:MemoryBudget"),
        ("refuses",),
        ("throttled",),
        names=("body_bytes_in_flight",),
        metrics=("streams_memory_refused_total",),
    ),
    RequestLimit(
        "requests a second of a key",
        "",
        ("streams.protocol.access.rates:RequestRates",),
        ("refuses",),
        ("throttled",),
        names=("requests_per_s_per_key",),
        settings=("STREAMS_MAX_REQUESTS_PER_S_PER_KEY",),
    ),
    RequestLimit(
        "requests in flight of a key",
        "",
        ("gateway.admission.limits:InFlight",),
        ("refuses",),
        ("throttled",),
        names=("inflight_per_key",),
        settings=("STREAMS_MAX_INFLIGHT_PER_KEY",),
    ),
    RequestLimit(
        "open event streams, WebSockets and S2 sessions, of a key",
        "",
        ("gateway.admission.limits:StreamSlots",),
        ("refuses",),
        ("throttled",),
        names=("sse_connections", "sse_connections_per_key", "sessions_per_key"),
        settings=(
            "STREAMS_MAX_SSE_CONNECTIONS",
            "STREAMS_MAX_SSE_CONNECTIONS_PER_KEY",
            "STREAMS_MAX_SESSIONS_PER_KEY",
        ),
        metrics=("streams_sse_connections",),
    ),
    RequestLimit(
        "boxes of a watch, of a WebSocket",
        "256",
        ("gateway.watch.plan:plan_of_body", "gateway.api.websockets:WebSocketConnection"),
        ("refuses",),
        ("invalid_request",),
    ),
    RequestLimit(
        "memory of answers, by owner",
        "256 MiB",
        ("gateway.admission.memory:answer_budget", "gateway.admission.memory:MemoryBudget"),
        ("delays", "refuses"),
        ("throttled",),
        note="waits 5 s",
        names=("answer_bytes",),
        metrics=("streams_memory_refused_total",),
    ),
    RequestLimit(
        "append limiter, page window (large answers)",
        "64 to 4,096 appends and 4 MiB; 2 MiB of answers; by lag",
        ("gateway.admission.append_limiter:AppendLimiter", "gateway.admission.append_limiter:PageWindow"),
        ("delays", "refuses"),
        ("throttled",),
        note="waits 5 s",
        settings=("STREAMS_PACE_LAG_MS",),
        metrics=("streams_paced_total", "streams_throttled_total"),
    ),
    RequestLimit(
        "inputs of S2 append sessions in flight",
        "64 and 8 MiB of a session, 64 MiB of all",
        ("gateway.s2.append_session:AppendSession", "gateway.s2.append_window:AppendWindow"),
        ("delays",),
        note="the session stops reading",
        metrics=("s2_append_permit_latency_seconds",),
    ),
    RequestLimit(
        "requests in flight on a link",
        "20,000",
        ("gateway.shards.links:Link",),
        ("refuses",),
        ("throttled",),
        names=("in_flight",),
        metrics=("streams_requests_in_flight",),
    ),
    RequestLimit(
        "a shard that is down or hangs",
        "5 s of silence",
        ("gateway.shards.links:Link",),
        ("refuses",),
        ("shard_unavailable",),
        metrics=("streams_shard_up",),
    ),
    RequestLimit(
        "connections over TCP to a shard, of a key, without a key",
        "1,024, 768, 256",
        ("shard.server.peers:Peers",),
        ("refuses", "disconnects"),
        ("throttled",),
        note="the oldest one without a key is closed for a new one; one with a key is refused",
        metrics=(),
    ),
    RequestLimit(
        "the shard's log and sealing",
        "48 MiB of log, twice the cache",
        ("shard.engine.pressure:Backpressure",),
        ("delays",),
        note="waits: the shard stops reading",
        settings=("STREAMS_CACHE_BYTES",),
        metrics=("streams_wal_queue_bytes", "streams_unsealed_bytes"),
    ),
    RequestLimit(
        "room for unsent answers of the shard",
        "128 MiB for gateways; 20,000 requests and 16 MiB of them wait on a link",
        (
            "shard.server.answer_pool:AnswerPool",
            "shard.server.connection:Connection",
            "shard.server.deferred_pages:DeferredPages",
            "shard.engine.waiting_claims:ClaimDelivery",
        ),
        ("delays", "refuses"),
        ("throttled",),
        note="a request for a page waits in the shard",
        metrics=(),
    ),
    RequestLimit(
        "pressure of the shard (appends)",
        "",
        ("shard.server.pressure:ShardPressure",),
        ("refuses",),
        ("throttled",),
        settings=("STREAMS_THROTTLE_LAG_MS", "STREAMS_THROTTLE_QUEUE_BYTES"),
        metrics=("streams_throttled_total",),
    ),
    RequestLimit(
        "records and sizes of a write",
        "",
        (
            "streams.protocol.payloads.appends:RecordLimits",
            "streams.protocol.payloads.packed:unpack",
        ),
        ("refuses",),
        ("batch_too_large", "record_too_large", "invalid_request"),
        settings=(
            "STREAMS_MAX_BATCH_RECORDS",
            "STREAMS_MAX_RECORD_BYTES",
            "STREAMS_MAX_META_BYTES",
            "STREAMS_MAX_TAG_BYTES",
            "STREAMS_MAX_NODE_BYTES",
        ),
    ),
    RequestLimit(
        "seqs of a request, jobs of a claim, outputs of an ack",
        "1,000 seqs; a claim gets at most 1,000 jobs and 8 MiB; 8 boxes, 1,000 records, 8 MiB of outputs",
        (
            "streams.protocol.messages.queue_requests:_check_settled",
            "shard.core.queues.jobs:Jobs",
            "gateway.api.acks:may_have_outputs",
        ),
        ("refuses",),
        ("invalid_request", "payload_too_large"),
    ),
    RequestLimit(
        "outputs of acks that wait for their boxes",
        "16 MiB of a queue, 64 MiB of a shard",
        ("shard.core.queues.outputs:OutputHandlers",),
        ("refuses",),
        ("throttled",),
        names=("outputs_pending",),
    ),
    RequestLimit(
        "free disk space",
        "",
        ("shard.engine.disk_space:DiskSpace",),
        ("refuses",),
        ("disk_full",),
        settings=("STREAMS_DISK_LOW_BYTES", "STREAMS_DISK_FULL_BYTES"),
        metrics=("streams_disk_refused_total",),
    ),
    RequestLimit(
        "writes that wait for the object store",
        "",
        ("shard.core.objects.replication:Uploading",),
        ("refuses",),
        ("throttled",),
        names=("object_backlog",),
        settings=("STREAMS_OBJECT_BACKLOG_BYTES",),
        metrics=("streams_object_backlog_bytes",),
    ),
    RequestLimit(
        "boxes, routers and more that a server stores",
        "for a box: 10,000 groups and origins; for a shard: a million idempotency keys, 100,000 writers, "
        "64 MiB of records of schedules, 256 MiB of watch sessions",
        (
            "shard.core.context:Context",
            "shard.core.boxes.group_handlers:GroupHandlers",
            "shard.core.boxes.handlers:BoxHandlers",
            "shard.core.limits.quota:Quota",
            "shard.core.routers.copy_sources:check_room",
            "shard.core.routers.registry:Routers",
            "shard.core.s2.basins:Basins",
            "shard.core.schedules.handlers:ScheduleHandlers",
            "shard.core.s2.tokens:Tokens",
            "shard.core.transactions.commit_handlers:CommitHandlers",
            "shard.core.transactions.handlers:TransactionHandlers",
            "shard.core.transactions.writers:Writers",
            "shard.core.watch.sessions:Sessions",
        ),
        ("refuses",),
        ("throttled",),
        names=(
            "boxes",
            "routers",
            "schedules",
            "groups",
            "origins",
            "watch_sessions",
            "idempotency_keys",
            "txn_bytes",
            "txn_writers",
            "total_bytes",
            "basins",
            "access_tokens",
        ),
        settings=(
            "STREAMS_MAX_BOXES",
            "STREAMS_MAX_ROUTERS",
            "STREAMS_MAX_SCHEDULES",
            "STREAMS_MAX_WATCH_SESSIONS",
            "STREAMS_TXN_BYTES",
            "STREAMS_MAX_TOTAL_BYTES",
        ),
    ),
    RequestLimit(
        "boxes, routers and more that a key stores",
        "",
        ("shard.core.limits.usage:Usage", "streams.protocol.access.key_limits:limit_exceeded_error"),
        ("refuses",),
        ("throttled",),
        names=(
            "boxes_per_key",
            "routers_per_key",
            "groups_per_key",
            "sessions_per_key",
            "idempotency_keys_per_key",
            "txn_bytes_per_key",
            "stored_bytes_per_key",
        ),
        settings=(
            "STREAMS_MAX_BOXES_PER_KEY",
            "STREAMS_MAX_ROUTERS_PER_KEY",
            "STREAMS_MAX_GROUPS_PER_KEY",
            "STREAMS_MAX_SESSIONS_PER_KEY",
            "STREAMS_MAX_IDEMPOTENCY_KEYS_PER_KEY",
            "STREAMS_MAX_TXN_BYTES_PER_KEY",
            "STREAMS_MAX_STORED_BYTES_PER_KEY",
        ),
    ),
    RequestLimit(
        "records and bytes of a box",
        "`cap_records`, `cap_bytes` of a box with `discard` `reject`; no record exceeds `cap_bytes`",
        ("shard.core.boxes.box:Box",),
        ("refuses",),
        ("box_full", "record_too_large"),
    ),
    RequestLimit(
        "deliveries of a queue",
        "`rate_per_s`, `key_concurrency` of the box; none while it is paused",
        ("shard.core.queues.delivery_rate:DeliveryRate", "shard.core.queues.lines:Lines"),
        ("delays",),
        note="a claim gets fewer jobs, or waits",
        metrics=("streams_queue_ready",),
    ),
    RequestLimit(
        "payloads that are fetched for reads, from the disk, from the cold store",
        "64 MiB each",
        ("shard.engine.refetch:Refetch",),
        ("delays",),
        note="the read waits in the shard",
        metrics=(),
    ),
)
