"""`streams status`: how a server is, and each of its processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from streams.cli import output
from streams.cli.verbs import Target, connected, example

if TYPE_CHECKING:
    from streams.protocol.messages.server_replies import GatewayStatus, ShardStatus


@example("streams status")
@click.command("status")
@connected
def status(target: Target) -> None:
    """Show the server's address, version, pressure, what it holds, and each of its processes.

    Exit code 3 when some of it does not serve.
    """
    with target.client() as client:
        began_s = time.monotonic()
        client.health()
        took_ms = (time.monotonic() - began_s) * 1000
        found = client.status()
    processes = [
        *(_process(f"shard-{each.shard:02d}", each, boxes=each.boxes) for each in found.shards),
        *(_process(f"gateway-{each.gateway}", each, connections=each.connections) for each in found.gateways),
    ]
    facts = {
        "url": client.url,
        "status": found.status,
        "version": found.version,
        "pressure": found.pressure,
        "shards": len(found.shards),
        "gateways": len(found.gateways),
        "boxes": found.boxes,
        "records": found.records,
        "bytes": found.bytes,
        "sse_connections": found.sse_connections,
        "watch_sessions": found.watch_sessions,
        "resident_bytes": found.resident_bytes,
        "disk": found.disk.level,
        "disk_free_bytes": found.disk.free_bytes,
        "round_trip_ms": round(took_ms, 2),
    }
    if output.is_for_people(target.as_json):
        output.show_facts(facts, as_json=False)
        output.show_rows(tuple(processes[0]), processes, as_json=False)
        for each in found.checks:
            if each.result != "ok":
                click.echo(f"{each.check}: {each.found}\n  next: {each.next_step}")
    else:
        checks = msgspec.to_builtins(found.checks)
        output.show_facts({**facts, "processes": processes, "checks": checks}, as_json=True)
    if found.status != "ready":
        raise output.Occupied(
            f"{client.url} is {found.status}: some of its processes do not serve; `streams doctor` says which"
        )


def _process(
    name: str, found: ShardStatus | GatewayStatus, *, boxes: int | None = None, connections: int | None = None
) -> dict[str, Any]:
    return {
        "process": name,
        "status": found.status,
        "reason": found.reason or None,
        "pid": str(found.pid) if found.pid else None,
        "uptime_s": found.uptime_ms // 1000,
        "pressure": found.pressure,
        "lag_ms": found.lag_ms,
        "resident_bytes": found.resident_bytes,
        "cpu_s": round(found.cpu_ms / 1000, 1),
        "boxes": boxes,
        "connections": connections,
        "restarts": sum(found.restarts.values()),
    }


@example("streams whoami", "streams whoami --json")
@click.command("whoami")
@connected
def whoami(target: Target) -> None:
    """Show the key that this command uses: its id, scopes, prefixes, limits, and what it uses of them."""
    with target.client() as client:
        found = client.whoami()
    facts: dict[str, Any] = {"url": client.url, "id": found.id}
    if output.is_for_people(target.as_json):
        prefixes = " ".join(found.prefixes) or "every name"
        output.show_facts({**facts, "scopes": " ".join(found.scopes), "prefixes": prefixes}, as_json=False)
        rows = [{"limit": name, "used": each.used, "of": each.limit} for name, each in found.limits.items()]
        if rows:
            output.show_rows(("limit", "used", "of"), rows, as_json=False)
        return
    limits = {name: {"limit": each.limit, "used": each.used} for name, each in found.limits.items()}
    lists = {"scopes": found.scopes, "prefixes": found.prefixes, "limits": limits}
    output.show_facts({**facts, **lists}, as_json=True)
