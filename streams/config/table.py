"""The table of settings: each field of `Config` is a setting with its default, kind and help.

A child process gets its parent's `Config` as JSON, so all processes use identical settings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streams.config.setting import Kind, Setting
from streams.protocol.access.key_limits import Limits
from streams.protocol.telemetry.pressure import Thresholds

#: A shard's number is one byte of the slot map (`gateway/shards/placement.py`).
SHARDS_MAX: Final = 256

#: A frame's length is a u32 in the log and on the wire; a quarter of that leaves room for its envelope.
_FRAME_BYTES_MAX: Final = 1 << 30


def _setting(kind: Kind, default: Any, help: str, **more: Any) -> Any:
    """Define a field of `Config`; its metadata is the rest of its row in the table."""
    return dataclasses.field(
        default=default, repr=kind != "secret", metadata={"kind": kind, "help": help, **more}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a server, parsed and checked. The field order is that of `--help` and the docs."""

    host: str = _setting(
        "text",
        "127.0.0.1",
        "Address to listen on: a name or an IP address, optionally with a port (0.0.0.0:8080, [::1]:8080).",
    )
    port: int = _setting("count", 4000, "Port to listen on; 0 picks a free one.", most=65535)
    data_dir: Path = _setting(  # noqa: RUF009 (a field like the others; the rule wants a known-frozen type)
        "path",
        Path("streams-data"),
        "Directory that holds all data of this server.",
        default_shown="./streams-data",
    )
    shards: int = _setting(
        "count",
        0,
        "Number of shard processes; 0 is the number in the data directory, or one per CPU if it is new.",
        most=SHARDS_MAX,
        default_shown="one per CPU",
    )
    # Measured on two cores with two shards: a second gateway halves single appends, because each gateway gets
    # half as many requests in one turn and pays twice as much CPU for each.
    gateways: int = _setting(
        "count",
        1,
        "Number of gateway processes sharing the port. One is best on two cores, where a second one doubles "
        "the CPU of a request. On more cores, one for every two shards if most requests carry one record or "
        "read pages, one for every four if they carry batches of 1000.",
        least=1,
        most=64,
    )
    front: str = _setting(
        "choice",
        "edge",
        "HTTP front end: edge is a fast HTTP/1.1 front end with Hypercorn behind it; hypercorn serves "
        "everything.",
        choices=("edge", "hypercorn"),
    )
    log: str = _setting(
        "choice", "info", "Lowest log level to write.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "choice",
        "auto",
        "Format of log lines; auto is human on a terminal and json elsewhere.",
        choices=("auto", "json", "human"),
    )
    sync_interval_ms: int = _setting(
        "ms", 50, "Longest time that an append to a box of class disk stays unsynced.", least=1, most=60_000
    )
    wal_file_bytes: int = _setting(
        "bytes",
        64 << 20,
        "Size at which a log file is closed and the next one is started.",
        least=4096,
        most=_FRAME_BYTES_MAX,
    )
    snapshot_wal_bytes: int = _setting(
        "bytes",
        256 << 20,
        "A shard takes a snapshot after this much log, which bounds the replay at start.",
        least=4096,
        most=1 << 40,
    )
    snapshot_interval_ms: int = _setting(
        "ms",
        60_000,
        "A shard with changes takes a snapshot this long after the last one.",
        least=100,
        most=86_400_000,
    )
    segment_max_events: int = _setting(
        "count",
        10_000,
        "Number of unsealed records of a box at which they are moved from the log into a segment file.",
        least=1,
        most=10**9,
    )
    segment_max_bytes: int = _setting(
        "bytes",
        64 << 20,
        "Size of the unsealed records of a box at which they are moved into a segment file; also the "
        "approximate maximum size of a segment file.",
        least=1024,
        most=_FRAME_BYTES_MAX,
    )
    segment_max_age_ms: int = _setting(
        "ms",
        3_600_000,
        "Age of the unsealed records of a box at which they are moved into a segment file, if they have at "
        "least 64 KiB.",
        least=100,
        most=30 * 86_400_000,
    )
    cache_bytes: int = _setting(
        "bytes",
        256 << 20,
        "Memory of each shard for cached records of segment files; about as much again for unsealed records.",
        least=64 << 10,
        most=1 << 44,
    )
    txn_bytes: int = _setting(
        "bytes",
        128 << 20,
        "Memory of each shard for the index of uncommitted transaction rows. The rows themselves are on "
        "disk.",
        least=64 << 10,
        most=1 << 40,
    )
    txn_ttl_ms: int = _setting(
        "ms",
        3_600_000,
        "The rows of an open transaction are deleted if no row was added for this long.",
        least=1_000,
        most=30 * 86_400_000,
    )
    cold_dir: str = _setting(
        "text",
        "",
        "Cold store for older segments: a folder, or an object store (s3://, gs://, az://) with "
        "credentials in the environment.",
        default_shown="unset",
    )
    object_flush_ms: int = _setting(
        "ms",
        50,
        "Appends to boxes of class object are uploaded to the cold store in groups, one per this interval, "
        "and answered when their group is stored.",
        least=1,
        most=60_000,
    )
    object_backlog_bytes: int = _setting(
        "bytes",
        64 << 20,
        "Bytes of each shard that may wait for upload to the cold store. Above it, appends to boxes of class "
        "object are rejected (retry later). At most STREAMS_CACHE_BYTES.",
        least=64 << 10,
        most=1 << 40,
    )
    s2_durability: str = _setting(
        "choice",
        "fsync",
        "Durability class of streams created with the S2 API: fsync, or object, which needs a cold store.",
        choices=("fsync", "object"),
    )
    hot_retain_segments: int = _setting(
        "count",
        4,
        "Number of newest segments per box that stay on the local disk if there is a cold store.",
        most=10**9,
    )
    hot_retain_bytes: int = _setting(
        "bytes", 0, "Minimum size of the newest segments per box that stay on the local disk.", most=1 << 50
    )
    upkeep_bytes_per_s: int = _setting(
        "bytes",
        16 << 20,
        "Rate at which each shard seals and rewrites segments when space and memory suffice; 0 is no limit.",
        most=1 << 40,
    )
    disk_low_bytes: int = _setting(
        "bytes",
        0,
        "Below this much free space on the disk of the data directory, requests that add data are rejected "
        "(507 disk_full); 0 is 1 GiB, or 5 % of the disk if that is less.",
        most=1 << 60,
        default_shown="1GiB or 5 %",
    )
    disk_full_bytes: int = _setting(
        "bytes",
        0,
        "Below this much free space, every request that must write is rejected; 0 is 256 MiB, or 1.25 % of "
        "the disk if that is less.",
        most=1 << 60,
        default_shown="256MiB or 1.25 %",
    )
    shard_host: str = _setting(
        "text",
        "",
        "Address on which shards listen for direct writers on other machines; needs API keys.",
        default_shown="unset",
    )
    shard_port: int = _setting(
        "count",
        4100,
        "Port of shard 0 on STREAMS_SHARD_HOST; the other shards use the following ports. 0 picks free "
        "ports.",
        most=65535 - SHARDS_MAX,
    )
    drain_ms: int = _setting(
        "ms", 10_000, "How long in-flight requests may take to finish when the server stops.", most=600_000
    )
    hang_ms: int = _setting(
        "ms",
        30_000,
        "Restart a shard or gateway that has sent no heartbeat for this long, because its event loop or "
        "its log is stuck; 0 is never.",
        most=3_600_000,
    )
    api_keys: str = _setting(
        "secret",
        "",
        "API keys, comma-separated: secret[:scopes[:prefixes]] [id=NAME] [LIMIT=NUMBER], for example "
        "s3cret:read+write:orders.|audit. id=orders boxes=1000. If set, every client must present one.",
        default_shown="unset",
    )
    api_keys_file: str = _setting(
        "text",
        "",
        "File with API keys, one per line; read again on SIGHUP. Valid in addition to STREAMS_API_KEYS.",
        default_shown="unset",
    )
    allow_insecure_no_auth: bool = _setting(
        "flag", False, "Allow a server without API keys on an address that other machines can reach."
    )
    allowed_hosts: str = _setting(
        "text",
        "",
        "Host names, comma-separated, that a server without API keys accepts besides localhost and its own "
        "address; requests with another Host get 403.",
        default_shown="unset",
    )
    cors_origins: str = _setting(
        "text",
        "",
        "Origins, comma-separated, such as https://app.example.com, whose pages may call /v0 from a browser.",
        default_shown="unset",
    )
    guide: str = _setting(
        "text",
        "",
        "Archive of the documentation site, such as build/site.zip of make site, served at /docs/guide/ to "
        "everyone. Use only an archive that you trust: its scripts have the origin of the console.",
        default_shown="unset",
    )
    probe_auth: bool = _setting("flag", False, "Require an API key for health and readiness probes.")
    max_batch_records: int = _setting(
        "count", 10_000, "Maximum number of records in one append.", least=1, most=1_000_000
    )
    max_record_bytes: int = _setting(
        "bytes", 1 << 20, "Maximum size of data and meta of one record.", least=1, most=_FRAME_BYTES_MAX
    )
    max_body_bytes: int = _setting(
        "bytes",
        64 << 20,
        "Maximum size of a request body, after decompression.",
        least=1024,
        most=_FRAME_BYTES_MAX,
    )
    max_meta_bytes: int = _setting(
        "bytes", 16_384, "Maximum size of the meta of one record.", most=_FRAME_BYTES_MAX
    )
    max_tag_bytes: int = _setting("bytes", 256, "Maximum size of a tag.", least=1, most=65_535)
    max_node_bytes: int = _setting("bytes", 128, "Maximum size of a node name.", least=1, most=65_535)
    max_boxes: int = _setting("count", 100_000, "Maximum number of boxes; 0 is no limit.", most=10**12)
    max_routers: int = _setting("count", 10_000, "Maximum number of routers; 0 is no limit.", most=10**9)
    max_schedules: int = _setting("count", 10_000, "Maximum number of schedules; 0 is no limit.", most=10**9)
    max_watch_sessions: int = _setting(
        "count", 10_000, "Maximum number of watch sessions; 0 is no limit.", most=10**9
    )
    max_connections: int = _setting(
        "count",
        10_000,
        "Maximum number of HTTP connections per gateway. Lowered at start if the limit of open files is "
        "lower.",
        least=16,
        most=1_000_000,
    )
    max_connections_per_address: int = _setting(
        "count",
        0,
        "Maximum number of HTTP connections per client address (IPv6: per /64) and gateway; 0 is no limit. "
        "Leave it 0 behind a proxy: all clients have the address of the proxy.",
        most=1_000_000,
    )
    max_sse_connections: int = _setting(
        "count",
        10_000,
        "Maximum number of event streams, WebSockets and S2 sessions, divided evenly among the gateways; 0 "
        "is no limit.",
        most=10**9,
    )

    max_sse_connections_per_key: int = _setting(
        "count",
        1000,
        "Maximum number of event streams, WebSockets and S2 sessions per key; 0 is no limit.",
        most=10**9,
    )
    max_total_bytes: int = _setting(
        "bytes",
        0,
        "Maximum size of all live records, divided evenly among the shards; 0 is no limit.",
        most=1 << 50,
    )
    max_inflight_per_key: int = _setting(
        "count",
        1000,
        "Maximum number of in-flight requests per key, divided evenly among the gateways; 0 is no limit.",
        most=10**9,
    )
    max_boxes_per_key: int = _setting(
        "count",
        25_000,
        "Maximum number of boxes under the prefixes of one key. This and the next seven settings apply to "
        "keys with prefixes; a key may have its own limit in the keys file. 0 is no limit.",
        most=10**12,
    )
    max_routers_per_key: int = _setting(
        "count", 2_500, "Maximum number of routers per key; 0 is no limit.", most=10**9
    )
    max_groups_per_key: int = _setting(
        "count", 100_000, "Maximum number of groups in the boxes of one key; 0 is no limit.", most=10**12
    )
    max_sessions_per_key: int = _setting(
        "count",
        2_500,
        "Maximum number of watch sessions per key, and of S2 sessions per key; 0 is no limit.",
        most=10**9,
    )
    max_idempotency_keys_per_key: int = _setting(
        "count",
        250_000,
        "Maximum number of remembered idempotency keys in the boxes of one key; 0 is no limit.",
        most=10**12,
    )
    max_txn_bytes_per_key: int = _setting(
        "bytes",
        64 << 30,
        "Maximum size on disk of the open transactions of one key, over all shards; 0 is no limit.",
        most=1 << 50,
    )
    max_stored_bytes_per_key: int = _setting(
        "bytes", 0, "Maximum size of the live records in the boxes of one key; 0 is no limit.", most=1 << 50
    )
    max_requests_per_s_per_key: int = _setting(
        "count",
        0,
        "Maximum number of requests per second and key, divided evenly among the gateways; 0 is no limit.",
        most=10**9,
    )
    pace_lag_ms: int = _setting(
        "ms",
        10,
        "First threshold: when ready tasks wait this long in an event loop, low-priority delivery is "
        "slowed down and appends take turns.",
        most=60_000,
    )
    throttle_lag_ms: int = _setting(
        "ms", 250, "Second threshold: when ready tasks wait this long, appends get 429.", most=60_000
    )
    pace_queue_bytes: int = _setting(
        "bytes",
        16 << 20,
        "First threshold, by the bytes that wait to be written to a shard's log.",
        most=1 << 30,
    )
    throttle_queue_bytes: int = _setting(
        "bytes",
        32 << 20,
        "Second threshold, by the bytes that wait to be written to a shard's log.",
        most=1 << 30,
    )
    metrics_boxes: int = _setting(
        "count",
        1000,
        "Number of boxes, and of routers, that the metrics list individually: the largest ones. The others "
        "are in the totals.",
        most=100_000,
    )

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.api_keys_file)

    def to_json(self) -> str:
        """Encode all settings except secrets, which no child process needs."""
        values = {s.name: getattr(self, s.name) for s in SETTINGS if s.kind != "secret"}
        return orjson.dumps(values, default=str).decode()

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Decode the output of `to_json` from another process of this server. Does not check the values."""
        values = orjson.loads(text)
        return cls(**{**values, "data_dir": Path(values["data_dir"])})

    @property
    def key_limits(self) -> Limits:
        """The default limits of a key with prefixes."""
        return Limits(
            boxes=self.max_boxes_per_key,
            routers=self.max_routers_per_key,
            groups=self.max_groups_per_key,
            sessions=self.max_sessions_per_key,
            idempotency_keys=self.max_idempotency_keys_per_key,
            txn_bytes=self.max_txn_bytes_per_key,
            stored_bytes=self.max_stored_bytes_per_key,
            requests_per_s=self.max_requests_per_s_per_key,
        )

    @property
    def thresholds(self) -> Thresholds:
        """The pressure thresholds for pacing and throttling."""
        return Thresholds(
            self.pace_lag_ms, self.throttle_lag_ms, self.pace_queue_bytes, self.throttle_queue_bytes
        )

    @property
    def run_dir(self) -> Path:
        """Folder for the sockets and status files of the running server; useless after it stops."""
        return self.data_dir / "run"

    def shard_socket(self, index: int) -> Path:
        return self.run_dir / f"shard-{index:02d}.sock"


def _rows() -> tuple[Setting, ...]:
    return tuple(
        Setting(name=field.name, default=field.default, **field.metadata)
        for field in dataclasses.fields(Config)
    )


SETTINGS: Final[tuple[Setting, ...]] = _rows()
