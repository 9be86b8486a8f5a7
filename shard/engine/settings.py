"""Settings of one engine, with the defaults that tests use."""

from __future__ import annotations

from typing import NamedTuple

from shard.core.boxes.upkeep import HotPolicy, SealPolicy


class EngineSettings(NamedTuple):
    sync_interval_ms: int = 50
    snapshot_wal_bytes: int = 256 << 20
    snapshot_interval_ms: int = 60_000
    seal: SealPolicy = SealPolicy(records=10_000, bytes=64 << 20, age_ms=3_600_000)
    hot: HotPolicy = HotPolicy(segments=4, bytes=0)
    cache_bytes: int = 256 << 20
    upkeep_bytes_per_s: int = 16 << 20
    wal_file_bytes: int = 64 << 20
    disk_low_bytes: int = 0
    disk_full_bytes: int = 0
