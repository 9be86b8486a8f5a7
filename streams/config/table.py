"""The table of settings: each field of `Config` is a setting with its default, kind and help.

A child process gets its parent's finished `Config` as JSON, so no two processes can read it differently.
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

#: A frame's length is a u32 in the log and on the wire; a quarter of that leaves room for what wraps it.
_FRAME_BYTES_MAX: Final = 1 << 30


def _setting(kind: Kind, default: Any, help: str, **more: Any) -> Any:
    """A field of `Config`; its metadata is the rest of its row."""
    return dataclasses.field(
        default=default, repr=kind != "secret", metadata={"kind": kind, "help": help, **more}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a server, checked. Field order is the order of `--help` and of the docs."""

    host: str = _setting(
        "text",
        "127.0.0.1",
        "Address to listen on: a name or an IP address, with a port if you like (0.0.0.0:8080, [::1]:8080).",
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
        "Number of shard processes; 0 is what the data directory was made with, or one per CPU if it is new.",
        most=SHARDS_MAX,
        default_shown="one per CPU",
    )
    gateways: int = _setting("count", 1, "Number of gateway processes sharing the port.", least=1, most=64)
    front: str = _setting(
        "choice",
        "edge",
        "What answers HTTP: edge is our fast HTTP/1.1 with Hypercorn behind it, hypercorn serves everything.",
        choices=("edge", "hypercorn"),
    )
    log: str = _setting(
        "choice", "info", "Least important log line to write.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "choice",
        "auto",
        "How log lines are written; auto is human on a terminal and json elsewhere.",
        choices=("auto", "json", "human"),
    )
    sync_interval_ms: int = _setting(
        "ms", 50, "Longest time a write to a disk box stays unsynced.", least=1, most=60_000
    )
    wal_file_bytes: int = _setting(
        "bytes",
        64 << 20,
        "Size at which a log file is closed and the next begun.",
        least=4096,
        most=_FRAME_BYTES_MAX,
    )
    snapshot_wal_bytes: int = _setting(
        "bytes",
        256 << 20,
        "A shard takes a snapshot after this much log; it bounds how much is replayed on start.",
        least=4096,
        most=1 << 40,
    )
    snapshot_interval_ms: int = _setting(
        "ms",
        60_000,
        "A shard in which anything changed takes a snapshot this long after the last one.",
        least=100,
        most=86_400_000,
    )
    segment_max_events: int = _setting(
        "count",
        10_000,
        "A box with this many unsealed records has them moved from the log into a segment file.",
        least=1,
        most=10**9,
    )
    segment_max_bytes: int = _setting(
        "bytes",
        64 << 20,
        "The same by size; a segment file holds no more than about this.",
        least=1024,
        most=_FRAME_BYTES_MAX,
    )
    segment_max_age_ms: int = _setting(
        "ms",
        3_600_000,
        "The same by age, for boxes with 64 KiB or more unsealed; smaller ones wait for more.",
        least=100,
        most=30 * 86_400_000,
    )
    cache_bytes: int = _setting(
        "bytes",
        256 << 20,
        "Memory of each shard for records that are in segment files; and about as much for unsealed ones.",
        least=64 << 10,
        most=1 << 44,
    )
    txn_bytes: int = _setting(
        "bytes",
        128 << 20,
        "Memory that each shard has to keep account of rows that are held for transactions. The rows are on "
        "the disk.",
        least=64 << 10,
        most=1 << 40,
    )
    txn_ttl_ms: int = _setting(
        "ms",
        3_600_000,
        "What is held for a transaction is dropped when nothing was put to it for this long.",
        least=1_000,
        most=30 * 86_400_000,
    )
    cold_dir: str = _setting(
        "text",
        "",
        "Where older segments go: a folder, or an object store (s3://, gs://, az://). Keys for it come from "
        "the environment.",
        default_shown="unset",
    )
    object_flush_ms: int = _setting(
        "ms",
        50,
        "Writes to boxes of class object are put into the cold store in groups, one each so long; they are "
        "answered when their group is there.",
        least=1,
        most=60_000,
    )
    object_backlog_bytes: int = _setting(
        "bytes",
        64 << 20,
        "What may wait for the cold store, in each shard, before further writes to boxes of class object are "
        "refused (try again later); no more than STREAMS_CACHE_BYTES.",
        least=64 << 10,
        most=1 << 40,
    )
    s2_durability: str = _setting(
        "choice",
        "fsync",
        "Class of the streams that the S2 API makes: fsync, or object, which needs a cold store.",
        choices=("fsync", "object"),
    )
    hot_retain_segments: int = _setting(
        "count",
        4,
        "Newest segments of each box that stay on this disk when there is a cold store.",
        most=10**9,
    )
    hot_retain_bytes: int = _setting(
        "bytes", 0, "And at least this much of each box stays here.", most=1 << 50
    )
    upkeep_bytes_per_s: int = _setting(
        "bytes",
        16 << 20,
        "How fast each shard seals and rewrites segments while there is no hurry; 0 is no limit.",
        most=1 << 40,
    )
    disk_low_bytes: int = _setting(
        "bytes",
        0,
        "Below this much free space of the data directory's disk, what adds data is refused (507 disk_full); "
        "0 is 1 GiB, or a twentieth of the disk if that is less.",
        most=1 << 60,
        default_shown="1GiB or 5 %",
    )
    disk_full_bytes: int = _setting(
        "bytes",
        0,
        "Below this much, all that must be written is refused; 0 is 256 MiB, or an eightieth of the disk if "
        "that is less.",
        most=1 << 60,
        default_shown="256MiB or 1.25 %",
    )
    shard_host: str = _setting(
        "text",
        "",
        "Address on which shards listen for clients on other machines that write to them directly; it needs "
        "keys.",
        default_shown="unset",
    )
    shard_port: int = _setting(
        "count",
        4100,
        "Port of shard 0 there; the others follow. 0 picks free ones.",
        most=65535 - SHARDS_MAX,
    )
    drain_ms: int = _setting(
        "ms", 10_000, "How long requests under way may take to finish when the server stops.", most=600_000
    )
    hang_ms: int = _setting(
        "ms",
        30_000,
        "Restart a shard or gateway that has sent no heartbeat for this long: its event loop or its log does "
        "not move. 0 never does.",
        most=3_600_000,
    )
    api_keys: str = _setting(
        "secret",
        "",
        "Keys that clients must present, comma-separated: secret[:scopes[:prefixes]] [id=NAME] "
        "[LIMIT=NUMBER], such as s3cret:read+write:orders.|audit. id=orders boxes=1000 (all of them).",
        default_shown="unset",
    )
    api_keys_file: str = _setting(
        "text",
        "",
        "File with such keys, one a line; read again on SIGHUP. Keys of both are good.",
        default_shown="unset",
    )
    allow_insecure_no_auth: bool = _setting(
        "flag", False, "Serve without keys on an address that other machines can reach."
    )
    allowed_hosts: str = _setting(
        "text",
        "",
        "Names, comma-separated, by which clients may reach a server without keys, besides localhost and the "
        "address it is bound to; requests with another Host are answered 403.",
        default_shown="unset",
    )
    cors_origins: str = _setting(
        "text",
        "",
        "Origins, comma-separated, such as https://app.example.com, whose pages may use /v0 from a browser.",
        default_shown="unset",
    )
    probe_auth: bool = _setting("flag", False, "Whether health and readiness probes need a key too.")
    max_batch_records: int = _setting("count", 10_000, "Records in one write.", least=1, most=1_000_000)
    max_record_bytes: int = _setting(
        "bytes", 1 << 20, "Size of data and meta of one record.", least=1, most=_FRAME_BYTES_MAX
    )
    max_body_bytes: int = _setting(
        "bytes", 64 << 20, "Size of a request body, after decompression.", least=1024, most=_FRAME_BYTES_MAX
    )
    max_meta_bytes: int = _setting("bytes", 16_384, "Size of the meta of one record.", most=_FRAME_BYTES_MAX)
    max_tag_bytes: int = _setting("bytes", 256, "Size of a tag.", least=1, most=65_535)
    max_node_bytes: int = _setting("bytes", 128, "Size of a node name.", least=1, most=65_535)
    max_boxes: int = _setting("count", 100_000, "Boxes on this server; 0 is no limit.", most=10**12)
    max_routers: int = _setting("count", 10_000, "Routers on this server; 0 is no limit.", most=10**9)
    max_watch_sessions: int = _setting(
        "count", 10_000, "Watch sessions on this server; 0 is no limit.", most=10**9
    )
    max_connections: int = _setting(
        "count",
        10_000,
        "HTTP connections of each gateway. Lowered at start to what the limit of open files allows.",
        least=16,
        most=1_000_000,
    )
    max_connections_per_address: int = _setting(
        "count",
        0,
        "HTTP connections of one client address (IPv6: of one /64) at each gateway; 0 is no limit. Behind a "
        "proxy, all clients have the address of the proxy: leave it 0 there.",
        most=1_000_000,
    )
    max_sse_connections: int = _setting(
        "count",
        10_000,
        "Open event streams, WebSockets and S2 sessions, shared evenly by the gateways; 0 is no limit.",
        most=10**9,
    )

    max_sse_connections_per_key: int = _setting(
        "count", 1000, "The same for each key; 0 is no limit.", most=10**9
    )
    max_total_bytes: int = _setting(
        "bytes",
        0,
        "Live records on this server, shared evenly by its shards; 0 is no limit.",
        most=1 << 50,
    )
    max_inflight_per_key: int = _setting(
        "count",
        1000,
        "Requests of one key under way at a time, shared evenly by the gateways; 0 is no limit.",
        most=10**9,
    )
    max_boxes_per_key: int = _setting(
        "count",
        25_000,
        "Boxes under the prefixes of one key. This and the next seven are for keys with prefixes; a key may "
        "have its own limit in the keys file. 0 is no limit.",
        most=10**12,
    )
    max_routers_per_key: int = _setting("count", 2_500, "Routers of one key; 0 is no limit.", most=10**9)
    max_groups_per_key: int = _setting(
        "count", 100_000, "Groups in the boxes of one key; 0 is no limit.", most=10**12
    )
    max_sessions_per_key: int = _setting(
        "count",
        2_500,
        "Watch sessions of one key, and as many S2 sessions; 0 is no limit.",
        most=10**9,
    )
    max_idempotency_keys_per_key: int = _setting(
        "count",
        250_000,
        "Idempotency keys remembered in the boxes of one key; 0 is no limit.",
        most=10**12,
    )
    max_txn_bytes_per_key: int = _setting(
        "bytes",
        64 << 30,
        "What is held on the disk for the open transactions of one key, on all shards; 0 is no limit.",
        most=1 << 50,
    )
    max_stored_bytes_per_key: int = _setting(
        "bytes", 0, "Live records in the boxes of one key; 0 is no limit.", most=1 << 50
    )
    max_requests_per_s_per_key: int = _setting(
        "count",
        0,
        "Requests of one key in a second, shared evenly by the gateways; 0 is no limit.",
        most=10**9,
    )
    pace_lag_ms: int = _setting(
        "ms",
        10,
        "First threshold: when what is ready waits this long for its turn, low-priority delivery is paced "
        "and appends take turns.",
        most=60_000,
    )
    throttle_lag_ms: int = _setting(
        "ms", 250, "Second threshold: when it waits this long, appends are answered 429.", most=60_000
    )
    pace_queue_bytes: int = _setting(
        "bytes", 16 << 20, "First threshold by what a shard's log has yet to write.", most=1 << 30
    )
    throttle_queue_bytes: int = _setting(
        "bytes", 32 << 20, "Second threshold by what a shard's log has yet to write.", most=1 << 30
    )
    metrics_boxes: int = _setting(
        "count",
        1000,
        "Boxes, and routers, that the metrics show one by one, the largest; of others only totals are shown.",
        most=100_000,
    )

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.api_keys_file)

    def to_json(self) -> str:
        """All but secrets, which no child needs."""
        values = {s.name: getattr(self, s.name) for s in SETTINGS if s.kind != "secret"}
        return orjson.dumps(values, default=str).decode()

    @classmethod
    def from_json(cls, text: str) -> Config:
        """What `to_json` wrote in another process of the same server; not for foreign text."""
        values = orjson.loads(text)
        return cls(**{**values, "data_dir": Path(values["data_dir"])})

    @property
    def key_limits(self) -> Limits:
        """The limits of a key with prefixes that has none of its own."""
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
        """From which pressure on what is done about it."""
        return Thresholds(
            self.pace_lag_ms, self.throttle_lag_ms, self.pace_queue_bytes, self.throttle_queue_bytes
        )

    @property
    def run_dir(self) -> Path:
        """Sockets and status files of the running server; nothing here outlives it."""
        return self.data_dir / "run"

    def shard_socket(self, index: int) -> Path:
        return self.run_dir / f"shard-{index:02d}.sock"


def _rows() -> tuple[Setting, ...]:
    return tuple(
        Setting(name=field.name, default=field.default, **field.metadata)
        for field in dataclasses.fields(Config)
    )


SETTINGS: Final[tuple[Setting, ...]] = _rows()
