"""`streams status` and `streams doctor`: how a server is, and what is wrong with it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from streams import __version__
from streams.cli import output
from streams.cli.verbs import Target, connected, example

if TYPE_CHECKING:
    from streams.client._sync.client import Client
    from streams.client.answers import ProcessStatus


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
    processes = [_process(each) for each in (*found.shards, *found.gateways)]
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
        "disk_free_bytes": found.disk.free_bytes,
        "round_trip_ms": round(took_ms, 2),
    }
    if output.is_for_people(target.as_json):
        output.show_facts(facts, as_json=False)
        output.show_rows(tuple(processes[0]), processes, as_json=False)
    else:
        output.show_facts({**facts, "processes": processes}, as_json=True)
    if found.status != "ready":
        raise output.Occupied(
            f"{client.url} is {found.status}: some of its processes do not serve; `streams doctor` says which"
        )


def _process(found: ProcessStatus) -> dict[str, Any]:
    is_shard = found.shard is not None
    return {
        "process": f"shard-{found.shard:02d}" if is_shard else f"gateway-{found.gateway}",
        "status": found.status,
        "pid": str(found.pid) if found.pid else None,
        "uptime_s": found.uptime_ms // 1000,
        "pressure": found.pressure,
        "lag_ms": found.lag_ms,
        "resident_bytes": found.resident_bytes,
        "cpu_s": round(found.cpu_ms / 1000, 1),
        "boxes": found.boxes if is_shard else None,
        "connections": None if is_shard else found.connections,
    }


@example("streams doctor")
@click.command("doctor")
@connected
def doctor(target: Target) -> None:
    """Check everything between this command and the server's shards; each finding says the next step.

    Nothing is changed. Exit code 0 when all is well, 3 when something is not.
    """
    rows: list[dict[str, Any]] = []
    context = target.resolved()
    with target.client() as client:
        for name, check in _CHECKS:
            row = _checked(name, check, client)
            rows.append(row)
            if row["result"] == "wrong" and name == "address":
                break  # nothing else can be asked
    output.show_rows(("check", "result", "found", "next"), rows, as_json=target.as_json)
    wrong = [row for row in rows if row["result"] == "wrong"]
    if wrong:
        raise output.Occupied(
            f"{context.url}: {len(wrong)} of {len(rows)} checks found something wrong, "
            f"first: {wrong[0]['found']}"
        )


def _checked(name: str, check: Callable[[Client], tuple[bool, str, str]], client: Client) -> dict[str, Any]:
    from streams.protocol.errors import StreamsError

    try:
        is_well, found, step = check(client)
    except StreamsError as error:
        is_well, found, step = False, error.message, output.NEXT_STEPS.get(error.code, "")
    return {
        "check": name,
        "result": "well" if is_well else "wrong",
        "found": found,
        "next": "" if is_well else step,
    }


def _address(client: Client) -> tuple[bool, str, str]:
    return True, f"{client.url} answers, version {client.health().version}", ""


def _version(client: Client) -> tuple[bool, str, str]:
    version = client.health().version
    step = "install the same version on both sides, at least up to the second number"
    return version.split(".")[:2] == __version__.split(".")[:2], f"server {version}, here {__version__}", step


def _ready(client: Client) -> tuple[bool, str, str]:
    ready = client.ready()
    return True, f"{ready.shards} shards serve {ready.boxes} boxes", ""


def _round_trip(client: Client) -> tuple[bool, str, str]:
    times = []
    for _ in range(10):
        began_s = time.monotonic()
        client.health()
        times.append((time.monotonic() - began_s) * 1000)
    middle = sorted(times)[5]
    return (
        middle < 100,
        f"{middle:.1f} ms there and back",
        "look at the network, or at the load of the server",
    )


def _listing(client: Client) -> tuple[bool, str, str]:
    first = next(iter(client.boxes(page_size=1)), None)
    return True, "boxes can be listed" if first is not None else "there is no box yet", ""


def _sockets(client: Client) -> tuple[bool, str, str]:
    """Only where the shards' sockets are on this machine, for direct writers."""
    from gateway.sockets import connectable_path

    here = [path for path in client.placement().sockets if os.path.exists(path)]
    if not here:
        return True, "the shards are on another machine; direct writers do not work from here", ""
    refused = []
    for path in here:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            try:
                with connectable_path(path) as short:
                    sock.connect(short)
            except OSError as error:
                refused.append(f"{path}: {error.strerror}")
    return (
        not refused,
        "; ".join(refused) or f"{len(here)} sockets of shards answer",
        "run as the server's user",
    )


_CHECKS: tuple[tuple[str, Callable[[Client], tuple[bool, str, str]]], ...] = (
    ("address", _address),
    ("version", _version),
    ("shards", _ready),
    ("round trip", _round_trip),
    ("boxes", _listing),
    ("direct", _sockets),
)
