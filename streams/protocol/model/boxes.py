"""A box's config: its fields, their defaults and bounds, and which of them may change later (v0 §1).

Nothing is enforced here; `shard/core/boxes/box.py` does that. A config is immutable: a change makes
a new one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streams.protocol.errors import BoxExistsIncompatible, InvalidRequest
from streams.protocol.model.names import BoxName, check_box_name

Kind = Literal["log", "queue", "stream"]
Durability = Literal["memory", "disk", "fsync", "object"]
#: How a schedule treats due times that have passed.
CatchUp = Literal["one", "all", "none"]
#: Classes whose acknowledged records survive a power loss (`durable: true`).
DURABLE = ("fsync", "object")
#: The longest delay after a failed delivery: a day.
DELAY_MS_MAX = 86_400_000
#: Deliveries per second that `rate_per_s` can limit a queue to.
RATE_MAX = 1_000_000
NON_NEGATIVE_MAX = 2**53 - 1  # the largest integer every JSON reader keeps exact

_Count = Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)]


class Timestamping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["arrival", "client-prefer", "client-require"] = "arrival"
    uncapped: bool = False


class RetryBackoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a job waits after a failed delivery."""

    initial_ms: int = 1000
    factor: float = 2
    max_ms: int = 3_600_000
    jitter: float = 0.2


class BoxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The full, resolved config. Field order is the order in which answers show it."""

    #: A stream is made by the S2 API and by nothing else: requests cannot ask for one.
    type: Kind = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Literal["old", "reject"] = "old"
    durability: Durability = "disk"
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    timestamping: Timestamping = Timestamping()
    delete_on_empty_ms: int = 0
    compact: Literal["none", "tag"] = "none"
    lease_ms: int = 30_000
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False
    #: Claims get no jobs.
    paused: bool = False
    #: Deliveries per second; 0 = no limit.
    rate_per_s: float = 0
    #: None = a failed job is ready at once.
    retry_backoff: RetryBackoff | None = None
    #: Jobs of one `ordering_key` that are leased at a time; 0 = no limit.
    key_concurrency: int = 0
    #: Claims rotate over the keys.
    fair: bool = False

    def to_fields(self) -> dict[str, Any]:
        """The config as answers show it: with `durable`, the boolean alias of `durability`."""
        fields = msgspec.structs.asdict(self)
        fields["timestamping"] = msgspec.structs.asdict(self.timestamping)
        if self.retry_backoff is not None:
            fields["retry_backoff"] = msgspec.structs.asdict(self.retry_backoff)
        fields["durable"] = self.durability in DURABLE
        return fields


class TimestampingPatch(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["arrival", "client-prefer", "client-require"] | UnsetType = UNSET
    uncapped: bool | UnsetType = UNSET


class BoxPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The config fields of a request. An absent field stays as it is."""

    type: Literal["log", "queue"] | UnsetType = UNSET
    ttl_ms: _Count | UnsetType = UNSET
    cap_records: _Count | UnsetType = UNSET
    cap_bytes: _Count | UnsetType = UNSET
    discard: Literal["old", "reject"] | UnsetType = UNSET
    durability: Durability | UnsetType = UNSET
    durable: bool | UnsetType = UNSET
    priority: int | UnsetType | None = UNSET
    auto_priority: bool | UnsetType = UNSET
    auto_create: bool | UnsetType = UNSET
    idempotency_window_ms: _Count | UnsetType = UNSET
    dedupe_node: bool | UnsetType = UNSET
    timestamping: TimestampingPatch | UnsetType = UNSET
    delete_on_empty_ms: _Count | UnsetType = UNSET
    compact: Literal["none", "tag"] | UnsetType = UNSET
    lease_ms: _Count | UnsetType = UNSET
    claim_jitter_ms: _Count | UnsetType = UNSET
    max_deliveries: _Count | UnsetType = UNSET
    dead_letter: BoxName | UnsetType | None = UNSET
    leases_durable: bool | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    rate_per_s: Annotated[float, Meta(ge=0, le=RATE_MAX)] | UnsetType = UNSET
    retry_backoff: RetryBackoff | UnsetType | None = UNSET
    key_concurrency: _Count | UnsetType = UNSET
    fair: bool | UnsetType = UNSET


#: Values outside these bounds are clamped, not refused (v0 §1).
_CLAMPED = {"priority": (-1000, 1000), "lease_ms": (100, 86_400_000), "claim_jitter_ms": (0, 5000)}
#: Fields that a box keeps for life.
_IMMUTABLE = ("type",)


def merge(config: BoxConfig, patch: BoxPatch, *, box: str, exists: bool) -> BoxConfig:
    """`patch` over `config`. Raises when the result is not a legal config of `box`."""
    fields: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(patch).items() if value is not UNSET
    }
    durable = fields.pop("durable", None)
    if durable is not None and "durability" not in fields:
        if not durable:
            fields["durability"] = "disk"
        elif config.durability not in DURABLE:  # a stronger class stays
            fields["durability"] = "fsync"
    for name, (low, high) in _CLAMPED.items():
        if fields.get(name) is not None:
            fields[name] = min(max(fields[name], low), high)
    if "timestamping" in fields:
        partial = {k: v for k, v in msgspec.structs.asdict(fields["timestamping"]).items() if v is not UNSET}
        fields["timestamping"] = msgspec.structs.replace(config.timestamping, **partial)
    if fields.get("dead_letter") is not None:
        check_box_name(fields["dead_letter"], "dead_letter")
        if fields["dead_letter"] == box:
            raise InvalidRequest(
                f"dead_letter: a box cannot be its own dead letter box ({box})", field="dead_letter"
            )
    if fields.get("retry_backoff") is not None:
        _check_backoff(fields["retry_backoff"])
    if exists:
        for name in _IMMUTABLE:
            if name in fields and fields[name] != getattr(config, name):
                raise BoxExistsIncompatible(
                    f"{name}: {box} is a {getattr(config, name)} and cannot become a {fields[name]}; "
                    "delete it first or use another name",
                    field=name,
                )
    return msgspec.structs.replace(config, **fields)


def _check_backoff(backoff: RetryBackoff) -> None:
    bounds = {
        "initial_ms": (0, DELAY_MS_MAX),
        "factor": (1, 100),
        "max_ms": (0, DELAY_MS_MAX),
        "jitter": (0, 1),
    }
    for name, (low, high) in bounds.items():
        value = getattr(backoff, name)
        if not low <= value <= high:
            raise InvalidRequest(
                f"retry_backoff.{name}: {value} is not from {low} to {high}", field="retry_backoff"
            )
