"""The status of the server as one object, from the reports of all processes (v0 §13). Pure."""

from __future__ import annotations

from typing import Any

from gateway.shards.process_states import REASONS, ProcessState
from gateway.telemetry.checks import checks_of
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.reports import GatewayReport, PressureReport, ProcessReport, ShardReport

_PRESSURE = ("none", "pacing", "throttling")
_DISK = ("ok", "low", "full")


def status_of(reports: Reports, *, shows_detail: bool = True) -> dict[str, Any]:
    """Describe the server. `shows_detail` includes the last messages of processes, which may name files."""
    shards = {shard.shard: shard for shard in reports.shards}
    gateways = {gateway.gateway: gateway for gateway in reports.gateways}
    shard_reports = reports.shards
    everyone: list[ShardReport | GatewayReport] = [*shard_reports, *reports.gateways]
    return {
        "status": _word(reports),
        "version": reports.version,
        "pressure": _PRESSURE[max(each.pressure.level for each in everyone)],
        "boxes": sum(sum(shard.totals.boxes.values()) for shard in shard_reports),
        "records": sum(shard.totals.records for shard in shard_reports),
        "bytes": sum(shard.totals.bytes for shard in shard_reports),
        "queues": _queues(shard_reports),
        "routers": _routers(shard_reports),
        "sse_connections": sum(gateway.sse_connections for gateway in reports.gateways),
        "watch_sessions": sum(shard.watch_sessions for shard in shard_reports),
        "resident_bytes": sum(each.process.resident_bytes for each in everyone),
        "disk": {
            "bytes": reports.disk_bytes,
            "free_bytes": reports.disk_free_bytes,
            "level": _DISK[max((shard.disk.level for shard in shard_reports), default=0)],
            "low_bytes": max((shard.disk.low_bytes for shard in shard_reports), default=0),
            "full_bytes": max((shard.disk.full_bytes for shard in shard_reports), default=0),
        },
        "checks": [check.facts() for check in checks_of(reports, shows_detail=shows_detail)],
        "shards": [
            _shard(at, shards.get(at)) | _why(reports.processes.shards.get(at), shows_detail)
            for at in range(reports.shards_total)
        ],
        "gateways": [
            _gateway(at, gateways.get(at)) | _why(reports.processes.gateways.get(at), shows_detail)
            for at in range(reports.gateways_total)
        ],
    }


def _queues(shards: list[ShardReport]) -> dict[str, Any]:
    jobs = [shard.totals.jobs for shard in shards]
    return {
        "queues": sum(shard.totals.queues for shard in shards),
        "ready": sum(each.ready for each in jobs),
        "in_flight": sum(each.in_flight for each in jobs),
        "delayed": sum(each.delayed for each in jobs),
        "dead_lettered": sum(each.dead_lettered for each in jobs),
        "oldest_s": max((each.oldest_s for each in jobs), default=0.0),
    }


def _routers(shards: list[ShardReport]) -> dict[str, Any]:
    totals = [shard.totals for shard in shards]
    return {
        "routers": sum(each.routers for each in totals),
        "blocked_routers": sum(each.routers_blocked for each in totals),
        "lag": sum(each.router_lag for each in totals),
        "lag_s": max((each.router_lag_s for each in totals), default=0.0),
    }


def _word(reports: Reports) -> str:
    """Return "degraded" if a process does not answer, "replaying" if a shard replays its log, else
    "ready"."""
    if len(reports.shards) < reports.shards_total or len(reports.gateways) < reports.gateways_total:
        return "degraded"
    return "ready" if all(shard.ready for shard in reports.shards) else "replaying"


def _shard(at: int, report: ShardReport | None) -> dict[str, Any]:
    if report is None:
        return {"shard": at, "status": "away"}
    return {
        "shard": at,
        "status": "ready" if report.ready else "replaying",
        "replay_progress": report.replay_progress,
        **_process(report.process, report.pressure),
        "boxes": sum(report.totals.boxes.values()),
        "records": report.totals.records,
        "bytes": report.totals.bytes,
        "disk": _DISK[report.disk.level],
        "wal_queue_bytes": report.wal.queue_bytes,
        "unsynced_frames": report.wal.unsynced_frames,
        "segments": report.totals.segments,
        "snapshot_age_s": round(report.snapshot_age_s, 1),
        "unsealed_bytes": report.unsealed_bytes,
        "cache_bytes": report.cache_bytes,
        "objects_backlog_bytes": report.objects.backlog_bytes,
        "waiting_reads": report.waiting_reads,
        "waiting_claims": report.waiting_claims,
    }


def _gateway(at: int, report: GatewayReport | None) -> dict[str, Any]:
    if report is None:
        return {"gateway": at, "status": "away"}
    return {
        "gateway": at,
        "status": "ready",
        **_process(report.process, report.pressure),
        "connections": report.connections,
        "sse_connections": report.sse_connections,
        "in_flight": sum(report.in_flight),
        "body_bytes": report.budgets["bodies"].bytes,
        "answer_bytes": report.budgets["answers"].bytes,
    }


def _why(state: ProcessState | None, shows_detail: bool) -> dict[str, Any]:
    """Return why a process does not serve, what to do about it, and how often it was restarted."""
    if state is None:
        return {}
    facts: dict[str, Any] = {"restarts": state.restarts}
    if state.reason in REASONS:
        facts |= {"reason": state.reason, "next_step": REASONS[state.reason][1]}
        if shows_detail and state.detail:
            facts["detail"] = state.detail
    return facts


def _process(process: ProcessReport, pressure: PressureReport) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "uptime_ms": int(process.uptime_s * 1000),
        "resident_bytes": process.resident_bytes,
        "cpu_ms": int(process.cpu_s * 1000),
        "open_files": process.open_files,
        "open_files_max": process.open_files_max,
        "memory_limit_bytes": process.memory_limit_bytes,
        "lag_ms": round(pressure.lag_s * 1000, 3),
        "pressure": _PRESSURE[pressure.level],
    }
