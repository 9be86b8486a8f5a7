"""The one table of settings, from which environment, flags, `--help`, `streams config` and the docs come.

`Config` is that table: each field is a setting with its default, kind and help. `load` turns an
environment and a mapping of flags into a `Config`, or raises one `ConfigError` that names every bad value
at once. Nothing here reads the environment, a file or the clock by itself: the caller passes them in, and a
child process gets its parent's finished `Config` as JSON, so no two processes can read it differently.

A flag beats the environment, the environment beats the default. An empty value counts as not given.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import orjson

from streams.protocol.access.key_limits import Limits
from streams.protocol.access.keys import MalformedKey, entries_of_list, parse_ring
from streams.protocol.model.units import UNITS, parse_number
from streams.protocol.telemetry.pressure import Thresholds

PREFIX: Final = "STREAMS_"

#: A shard's number is one byte of the slot map (`gateway/shards/placement.py`).
SHARDS_MAX: Final = 256

#: A frame's length is a u32 in the log and on the wire; a quarter of that leaves room for what wraps it.
_FRAME_BYTES_MAX: Final = 1 << 30

#: Variables with our prefix that are not settings: how our own processes and tests talk to each other.
CHILD_CONFIG_VARIABLE: Final = "STREAMS_CHILD_CONFIG"
READY_FD_VARIABLE: Final = "STREAMS_READY_FD"
#: What a supervisor logs of a process that it had to kill when the server was stopped.
KILLED_AT_THE_END: Final = "killed: it did not end in time"

#: How a shard begins the reason for which it cannot start without its cold store.
COLD_STORE_FAILED: Final = "the cold store cannot be opened"
#: Which server the command line talks to.
CLIENT_VARIABLES: Final = ("STREAMS_URL", "STREAMS_KEY", "STREAMS_CONTEXT")
_NOT_SETTINGS: Final = frozenset(
    {CHILD_CONFIG_VARIABLE, READY_FD_VARIABLE, "STREAMS_SWEEP", *CLIENT_VARIABLES}
)

Kind = Literal["text", "path", "count", "bytes", "ms", "flag", "choice", "secret"]
Origin = Literal["default", "environment", "flag"]


class ConfigError(ValueError):
    """Settings that cannot be used. `problems` has one sentence for each, and they are reported together."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table, as everything but the typed field itself needs it."""

    name: str
    kind: Kind
    default: Any
    help: str
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()
    default_shown: str = ""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def legal(self) -> str:
        """What may stand here, as the end of the sentence "it must be ..."."""
        match self.kind:
            case "count":
                return f"a whole number from {self.least} to {self.most}"
            case "bytes":
                return (
                    f"a size from {self.show(self.least)} to {self.show(self.most)} (bytes, or KiB, MB, GiB)"
                )
            case "ms":
                return f"a time from {self.show(self.least)} to {self.show(self.most)} (ms, or s, m, h)"
            case "flag":
                return "true or false (1 or 0, yes or no, on or off)"
            case "choice":
                return "one of " + ", ".join(self.choices)
            case _:
                return "text without NUL characters"

    def parse(self, text: str) -> Any:
        """The value `text` stands for; `ValueError` when it is not legal. `parse(show(value)) == value`."""
        match self.kind:
            case "count" | "bytes" | "ms":
                value = parse_number(text, UNITS[self.kind])
                if not self.least <= value <= self.most:
                    raise ValueError
                return value
            case "flag":
                return _FLAGS[text.lower()]
            case "choice":
                if text.lower() not in self.choices:
                    raise ValueError
                return text.lower()
            case _:
                if "\0" in text:
                    raise ValueError
                return Path(text) if self.kind == "path" else text

    def show(self, value: Any) -> str:
        """How the value is written for people, in a form `parse` takes back. A secret shows only presence."""
        match self.kind:
            case "secret":
                return "(set)" if value else ""
            case "flag":
                return "true" if value else "false"
            case "bytes":
                return _in_units(value, ("GiB", "MiB", "KiB"), UNITS["bytes"])
            case "ms":
                return (
                    _in_units(value, ("h", "m", "s"), UNITS["ms"])
                    if value % 1000 == 0 and value
                    else f"{value}ms"
                )
            case _:
                return str(value)

    def shown_default(self) -> str:
        return self.default_shown or self.show(self.default)


_FLAGS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def _in_units(value: int, names: Sequence[str], units: Mapping[str, int]) -> str:
    for name in names:
        if value and value % units[name.lower()] == 0:
            return f"{value // units[name.lower()]}{name}"
    return str(value)


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
        "told to come later; no more than STREAMS_CACHE_BYTES.",
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


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as it came: its text and where from."""

    text: str
    origin: Origin


def _given(environ: Mapping[str, str], overrides: Mapping[str, object]) -> dict[str, Given]:
    """What was given, by name, the flag before the variable."""
    strange = overrides.keys() - {setting.name for setting in SETTINGS}
    if strange:
        raise ConfigError(f"there is no setting {name!r}{_nearest(name)}" for name in sorted(strange))
    found: dict[str, Given] = {}
    for setting in SETTINGS:
        override = overrides.get(setting.name)
        if override is not None and str(override) != "":
            found[setting.name] = Given(str(override), "flag")
        elif environ.get(setting.variable, "") != "":
            found[setting.name] = Given(environ[setting.variable], "environment")
    _split_host(found)
    return found


def _split_host(found: dict[str, Given]) -> None:
    """A port inside the host is a port given where the host was given; `[::1]` loses its brackets."""
    host = found.get("host")
    if host is None:
        return
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host.text)
    if bracketed is not None:
        name, port = bracketed[1], bracketed[2]
    elif host.text.count(":") == 1:
        name, port = host.text.split(":")
    else:
        return
    found["host"] = Given(name or "127.0.0.1", host.origin)
    if port is None:
        return
    rival = found.get("port")
    if rival is not None and rival.origin == host.origin and rival.text != port:
        raise ConfigError(
            [f"STREAMS_HOST={host.text} and STREAMS_PORT={rival.text} name two ports; give the port once"]
        )
    if rival is None or rival.origin == "environment":
        found["port"] = Given(port, host.origin)


def load(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Config:
    """The settings of a server, or a `ConfigError` naming everything that is wrong with them."""
    given = _given(environ, overrides or {})
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        if setting.name not in given:
            continue
        try:
            values[setting.name] = setting.parse(given[setting.name].text)
        except (ValueError, KeyError):
            text = "(hidden)" if setting.kind == "secret" else repr(given[setting.name].text)
            asked = setting.flag if given[setting.name].origin == "flag" else setting.variable
            problems.append(f"{asked} is {text}; it must be {setting.legal()}")
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def origins(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> dict[str, Origin]:
    """Where each setting's value came from, by name."""
    given = _given(environ, overrides or {})
    return {s.name: given[s.name].origin if s.name in given else "default" for s in SETTINGS}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that carries our prefix and means nothing to us: most are typos."""
    known = {setting.variable for setting in SETTINGS} | _NOT_SETTINGS
    strange = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [f"{name} is not a setting and has no effect{_nearest(name)}" for name in strange]


def _nearest(name: str) -> str:
    names = [s.variable if name.startswith(PREFIX) else s.name for s in SETTINGS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; `streams config` lists them all"


def items_of(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port, brackets and final dot, in lower case."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") == 1:
        name = name.partition(":")[0]
    return name.removesuffix(".")


_host = re.compile(r"\[[0-9A-Fa-f:.]+\](?::[0-9]+)?|[A-Za-z0-9._-]+(?::[0-9]+)?|[0-9A-Fa-f:.]+").fullmatch
_origin = re.compile(r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]+)?").fullmatch


def _bad_names(config: Config) -> list[str]:
    bad = [
        f"STREAMS_ALLOWED_HOSTS: {host!r} is not a host name or address"
        for host in items_of(config.allowed_hosts)
        if _host(host) is None
    ]
    bad += [
        f"STREAMS_CORS_ORIGINS: {origin!r} is not an origin in lower case, such as https://app.example.com "
        "or http://localhost:3000"
        for origin in items_of(config.cors_origins)
        if _origin(origin) is None
    ]
    return bad


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a listener there. A name other than localhost counts as open."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_may_serve(config: Config) -> None:
    """Refuse keys that cannot be read, settings that do not go together, and to serve openly where strangers
    could reach us. The file with keys is not looked at here."""
    if config.api_keys:
        try:
            parse_ring(entries_of_list(config.api_keys))
        except MalformedKey as error:
            raise ConfigError([f"STREAMS_API_KEYS: {error}"]) from None
    bad_names = _bad_names(config)
    if bad_names:
        raise ConfigError(bad_names)
    if config.shard_host and not config.has_keys:
        raise ConfigError(
            [f"STREAMS_SHARD_HOST is {config.shard_host}, and there are no keys; clients of shards need one"]
        )
    if config.s2_durability == "object" and not config.cold_dir:
        raise ConfigError(["STREAMS_S2_DURABILITY is object; it needs a cold store, set STREAMS_COLD_DIR"])
    if not config.has_keys and not is_loopback(config.host) and not config.allow_insecure_no_auth:
        raise ConfigError([refusal_to_serve_openly(config.host)])


def refusal_to_serve_openly(address: str) -> str:
    return (
        f"STREAMS_HOST is {address}, which other machines can reach, and there are no keys. Set keys, or "
        "bind to 127.0.0.1, or set STREAMS_ALLOW_INSECURE_NO_AUTH=1 to serve everyone who can connect"
    )


@dataclass(frozen=True, slots=True)
class ChildArgs:
    """What the supervisor tells a shard or a gateway when it starts one.

    index       which shard or gateway this is
    listen_fds  listening sockets, inherited; of a shard, the first is its Unix socket, the others are TCP
    parent_fd   read end of a pipe; end of file means the supervisor is gone and the child must stop
    ready_fd    write end of a pipe for the lines `progress 0.42`, `ready`, `beat` and `error <message>`
    placement   the slot map as JSON
    sockets     the shards' socket paths by shard number (gateways)
    directory   the folder in the data directory that is the shard's (shards)
    server      names the data directory, for good (shards)
    addresses   the shards' TCP addresses by shard number, if they have some (gateways)
    is_after_failure  its last process ended because a write or a sync failed (shards)
    keys_file   where the keys are, as digests, when keys are asked for; read again on SIGHUP
    """

    config: Config
    index: int
    listen_fds: tuple[int, ...]
    parent_fd: int
    ready_fd: int
    placement: str
    sockets: tuple[str, ...]
    directory: str = ""
    keys_file: str = ""
    addresses: tuple[str, ...] = ()
    server: str = "0"
    is_after_failure: bool = False

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> ChildArgs:
        """Raises `ConfigError` when a person, not a supervisor, started this process."""
        parser = _ChildParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--index", type=int, required=True)
        parser.add_argument("--listen-fd", type=int, action="append", required=True)
        parser.add_argument("--parent-fd", type=int, required=True)
        parser.add_argument("--ready-fd", type=int, required=True)
        parser.add_argument("--directory", default="")
        parser.add_argument("--server", default="0")
        parser.add_argument("--after-failure", action="store_true")
        parser.add_argument("--placement", default="")
        parser.add_argument("--sockets", default="[]")
        parser.add_argument("--addresses", default="[]")
        parser.add_argument("--keys-file", default="")
        known = parser.parse_args(list(argv))
        if CHILD_CONFIG_VARIABLE not in environ:
            raise ConfigError(
                [f"{CHILD_CONFIG_VARIABLE} is not set; this process is started by `streams serve`"]
            )
        return cls(
            config=Config.from_json(environ[CHILD_CONFIG_VARIABLE]),
            index=known.index,
            listen_fds=tuple(known.listen_fd),
            parent_fd=known.parent_fd,
            ready_fd=known.ready_fd,
            directory=known.directory,
            server=known.server,
            is_after_failure=known.after_failure,
            placement=known.placement,
            sockets=tuple(orjson.loads(known.sockets)),
            keys_file=known.keys_file,
            addresses=tuple(orjson.loads(known.addresses)),
        )


class _ChildParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}; this process is started by `streams serve`"])
