"""Keyword arguments of the client, as types: a type checker finds an error before the server does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from streams.client.retry import Retry
from streams.protocol.model.boxes import Durability


class Times(TypedDict, total=False):
    """How the time of a record is chosen: arrival or the client's."""

    mode: Literal["arrival", "client-prefer", "client-require"]
    uncapped: bool


class Backoff(TypedDict, total=False):
    """How long a job waits after a failed delivery."""

    initial_ms: int
    factor: float
    max_ms: int
    jitter: float


class BoxSettings(TypedDict, total=False):
    """Settings of a box; one that is left out stays as it is, or is the default."""

    type: Literal["log", "queue"]
    ttl_ms: int
    cap_records: int
    cap_bytes: int
    discard: Literal["old", "reject"]
    durability: Durability
    durable: bool
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: int
    dedupe_node: bool
    timestamping: Times
    delete_on_empty_ms: int
    compact: Literal["none", "tag"]
    lease_ms: int
    claim_jitter_ms: int
    max_deliveries: int
    dead_letter: str | None
    leases_durable: bool
    paused: bool
    rate_per_s: float
    retry_backoff: Backoff | None
    key_concurrency: int
    fair: bool


class WriteFields(TypedDict, total=False):
    """Options of an append besides its records."""

    match_seq: int | None
    fencing_token: str | None
    trim_before_seq: int | None
    create: bool | None
    config: BoxSettings | Mapping[str, Any] | None
    disable_backpressure: bool


class WriteOptions(WriteFields, total=False):
    idempotency_key: str | None
    retry: Retry | None


class ReadOptions(TypedDict, total=False):
    """Where a reader begins if not after a seq, what it yields, and how large its pages are."""

    from_ts: int | None
    group: str | None
    match: str | list[str] | None
    node: str | list[str] | None
    include_tags: bool
    include_meta: bool
    include_data: bool
    page_records: int


class ProducerBounds(TypedDict, total=False):
    batch_records: int
    batch_bytes: int
    linger_ms: float
    held_records: int
    held_bytes: int
