"""`streams status`: the state of a server and of each of its processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from streams.cli import output
from streams.cli.verbs import ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.protocol.messages.server_replies import GatewayStatus, ShardStatus


@example("streams status")
@click.command("status")
@server_options
def status(target: ServerTarget) -> None:
    """Show the server's address, version, pressure and contents, and the state of each process.

    Exit code 3 if a process does not serve.
    """
    with target.client() as client:
        began_s = time.monotonic()
        client.health()
        took_ms = (time.monotonic() - began_s) * 1000
        server = client.status()
    processes = [
        *(_process(f"shard-{each.shard:02d}", each, boxes=each.boxes) for each in server.shards),
        *(
            _process(f"gateway-{each.gateway}", each, connections=each.connections)
            for each in server.gateways
        ),
    ]
    facts = {
        "url": client.url,
        "status": server.status,
        "version": server.version,
        "pressure": server.pressure,
        "shards": len(server.shards),
        "gateways": len(server.gateways),
        "boxes": server.boxes,
        "records": server.records,
        "bytes": server.bytes,
        "sse_connections": server.sse_connections,
        "watch_sessions": server.watch_sessions,
        "resident_bytes": server.resident_bytes,
        "disk": server.disk.level,
        "disk_free_bytes": server.disk.free_bytes,
        "round_trip_ms": round(took_ms, 2),
    }
    if output.is_for_people(target.as_json):
        output.show_facts(facts, as_json=False)
        output.show_rows(tuple(processes[0]), processes, as_json=False)
        for each in server.checks:
            if each.result != "ok":
                click.echo(f"{each.check}: {each.found}\n  next: {each.next_step}")
    else:
        checks = msgspec.to_builtins(server.checks)
        output.show_facts({**facts, "processes": processes, "checks": checks}, as_json=True)
    if server.status != "ready":
        raise output.BusyRefusal(
            f"{client.url} is {server.status}: at least one process does not serve; run `streams doctor` "
            "for the next step"
        )


def _process(
    name: str,
    process: ShardStatus | GatewayStatus,
    *,
    boxes: int | None = None,
    connections: int | None = None,
) -> dict[str, Any]:
    return {
        "process": name,
        "status": process.status,
        "reason": process.reason or None,
        "pid": str(process.pid) if process.pid else None,
        "uptime_s": process.uptime_ms // 1000,
        "pressure": process.pressure,
        "lag_ms": process.lag_ms,
        "resident_bytes": process.resident_bytes,
        "cpu_s": round(process.cpu_ms / 1000, 1),
        "boxes": boxes,
        "connections": connections,
        "restarts": sum(process.restarts.values()),
    }


@example("streams whoami", "streams whoami --json")
@click.command("whoami")
@server_options
def whoami(target: ServerTarget) -> None:
    """Show the API key that this command uses: its id, scopes, prefixes, limits and usage."""
    with target.client() as client:
        key = client.whoami()
    facts: dict[str, Any] = {"url": client.url, "id": key.id}
    if output.is_for_people(target.as_json):
        prefixes = " ".join(key.prefixes) or "every name"
        output.show_facts({**facts, "scopes": " ".join(key.scopes), "prefixes": prefixes}, as_json=False)
        rows = [{"limit": name, "used": each.used, "of": each.limit} for name, each in key.limits.items()]
        if rows:
            output.show_rows(("limit", "used", "of"), rows, as_json=False)
        return
    limits = {name: {"limit": each.limit, "used": each.used} for name, each in key.limits.items()}
    lists = {"scopes": key.scopes, "prefixes": key.prefixes, "limits": limits}
    output.show_facts({**facts, **lists}, as_json=True)
