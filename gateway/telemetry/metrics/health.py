"""Metrics of problems: processes that do not answer, damage, the cold store, keys, backups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.shards.process_states import REASONS, RESTART_REASONS, ProcessState
from gateway.telemetry.metrics.metric import SERVER, SHARDS, Metric, Sample
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.reports import COLD_OPERATIONS, DAMAGE_KINDS


def _states(reports: Reports) -> Iterator[tuple[str, ProcessState]]:
    for index, state in sorted(reports.processes.shards.items()):
        yield f"shard-{index:02d}", state
    for index, state in sorted(reports.processes.gateways.items()):
        yield f"gateway-{index}", state


def _restarts(reports: Reports) -> Iterator[Sample]:
    for name, state in _states(reports):
        for reason in RESTART_REASONS:
            yield (name, reason), state.restarts.get(reason, 0)


def _down(reports: Reports) -> Iterator[Sample]:
    for name, state in _states(reports):
        if state.reason in REASONS:
            yield (name, state.reason), 1


def _damaged_files(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        kinds = [file.kind for file in shard.faults.damaged]
        for kind in DAMAGE_KINDS:
            yield (str(shard.shard), kind), kinds.count(kind)


def _damage_seen(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for kind in DAMAGE_KINDS:
            yield (str(shard.shard), kind), shard.faults.damage_seen.get(kind, 0)


def _cold_failures(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for operation in COLD_OPERATIONS:
            yield (str(shard.shard), operation), shard.faults.cold_failures.get(operation, 0)


def _up(reports: Reports) -> Iterator[Sample]:
    ready = {shard.shard for shard in reports.shards if shard.ready}
    for shard in range(reports.shards_total):
        yield (str(shard),), int(shard in ready)


HEALTH: Final = (
    Metric(
        "streams_info",
        "gauge",
        ("version",),
        "1; its label says which version runs.",
        lambda reports: [((reports.version,), 1)],
    ),
    Metric(
        "streams_shard_up",
        "gauge",
        ("shard",),
        "1 when the shard serves; 0 while it replays, or is away.",
        _up,
    ),
    SHARDS.gauge(
        "streams_shard_replay_ratio",
        "How much of its log a shard has replayed, 0 to 1.",
        lambda s: s.replay_progress,
    ),
    Metric(
        "streams_restarts_total",
        "counter",
        ("process", "reason"),
        "Times the supervisor started a process again, by reason.",
        _restarts,
    ),
    Metric(
        "streams_process_down",
        "gauge",
        ("process", "reason"),
        "1 for each process that does not serve, by reason; there is no series for one that serves.",
        _down,
    ),
    Metric(
        "streams_damaged_files",
        "gauge",
        ("shard", "kind"),
        "Damaged files that a shard has met since it started, by kind; it lists 20 at most.",
        _damaged_files,
    ),
    Metric(
        "streams_damage_total",
        "counter",
        ("shard", "kind"),
        "Times that a shard met damaged data, by kind of file.",
        _damage_seen,
    ),
    Metric(
        "streams_cold_store_failures_total",
        "counter",
        ("shard", "operation"),
        "Calls of the cold store that failed: read, write, delete. They are tried again.",
        _cold_failures,
    ),
    SHARDS.gauge(
        "streams_cold_store_failing_seconds",
        "How long every call of the cold store has failed; 0 when the last one succeeded.",
        lambda s: s.faults.cold_failing_s,
    ),
    SERVER.gauge(
        "streams_keys_file_readable",
        "0 if the key file cannot be read, so that the server could not restart; else 1.",
        lambda reports: int(not reports.processes.keys_problem),
    ),
    Metric(
        "streams_backup_age_seconds",
        "gauge",
        (),
        "Age of the last complete backup; there is no series until one was taken.",
        lambda reports: [] if reports.backup_age_s is None else [((), round(reports.backup_age_s, 1))],
    ),
    SHARDS.gauge(
        "streams_snapshot_age_seconds",
        "How long the log has had changes that no snapshot has; 0 when it has none.",
        lambda s: s.snapshot_age_s,
    ),
)
