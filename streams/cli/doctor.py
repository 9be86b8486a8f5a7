"""`streams doctor`: checks everything between this command and the server's shards, with next steps.

The server checks itself (`telemetry/checks.py`): its processes, disk, cold store, clock, keys, memory,
descriptors and backups. One request returns those rows. The other checks cover what only a client can see:
address, version, round trip, listing, and the shards' sockets.

Each check has its own deadline, and its rows are shown as soon as they arrive, so a part that hangs costs
seconds and hides nothing. Results: `ok`, `wrong` (with the next step), `unknown` (the key lacks the scope).

Bounds: one thread per check; `--timeout` for each.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from streams import __version__
from streams.cli import output
from streams.cli.verbs import ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.client._sync.client import Client

#: Longer than a server takes to detect that one of its shards hangs.
CHECK_S: Final = 8.0
ROUND_TRIP_MS_MAX: Final = 100.0


class Finding(NamedTuple):
    is_ok: bool
    summary: str
    next: str = ""
    #: The name of the row, if it differs from the name of the check.
    check: str = ""


#: One check: it calls the server and returns its findings.
Check = Callable[["Client"], list[Finding]]


class ChecksFailed(click.ClickException):
    """At least one check found a problem. The rows printed before describe it."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"streams: {self.message}", err=True, file=file)


@example("streams doctor")
@click.command("doctor")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1, max=600.0),
    default=CHECK_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each check.",
)
@server_options
def doctor(target: ServerTarget, timeout_s: float) -> None:
    """Check the server, from its address to its shards and disks, and print the next step for each problem.

    Changes nothing. Exit code 0 if everything is ok, 1 if something is wrong.
    """
    rows: list[dict[str, Any]] = []
    for row in _rows(target, timeout_s):
        rows.append(row)
        if output.is_for_people(target.as_json):
            click.echo(f"{row['result']:<8} {row['check']:<13} {row['found']}")
            if row["next"]:
                click.echo(f"{'':<8} {'':<13} next: {row['next']}")
        else:
            output.print_line(row)
    wrong = [row for row in rows if row["result"] == "wrong"]
    if wrong:
        url = target.resolve().url
        raise ChecksFailed(
            f"{url}: {len(wrong)} of {len(rows)} checks found a problem; the first: {wrong[0]['found']}"
        )


def _rows(target: ServerTarget, timeout_s: float) -> Iterator[dict[str, Any]]:
    for name, check in _CHECKS:
        rows = _run_check(name, check, target, timeout_s)
        yield from rows
        if name == "address" and rows[0]["result"] == "wrong":
            return  # every other check would fail in this way


def _run_check(name: str, check: Check, target: ServerTarget, timeout_s: float) -> list[dict[str, Any]]:
    """Run a check on its own thread with its own client, and abandon it after `timeout_s`."""
    answers: queue.SimpleQueue[list[Finding] | dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_call_check(check, target)), daemon=True).start()
    try:
        findings = answers.get(timeout=timeout_s)
    except queue.Empty:
        step = "a server process may be hung: look for `no heartbeat` in its log, and check its disk"
        findings = [Finding(False, f"no answer within {timeout_s:g} s", step)]
    if isinstance(findings, dict):
        return [{"check": name, **findings}]
    return [_row(finding.check or name, finding) for finding in findings]


def _call_check(check: Check, target: ServerTarget) -> list[Finding] | dict[str, Any]:
    from streams.protocol.errors import StreamsError

    try:
        with target.client(retry_s=0.0) as client:
            return check(client)
    except StreamsError as error:
        if error.code == "forbidden":
            return {"result": "unknown", "found": error.message, "next": output.NEXT_STEPS["forbidden"]}
        step = str(error.detail.get("next_step") or output.NEXT_STEPS.get(error.code, ""))
        return [Finding(False, error.message, step)]


def _row(name: str, finding: Finding) -> dict[str, Any]:
    result = "ok" if finding.is_ok else "wrong"
    return {
        "check": name,
        "result": result,
        "found": finding.summary,
        "next": "" if finding.is_ok else finding.next,
    }


# -- the checks, each after the ones that it depends on


def _address(client: Client) -> list[Finding]:
    return [Finding(True, f"{client.url} answers, version {client.health().version}")]


def _version(client: Client) -> list[Finding]:
    version = client.health().version
    step = "install the same minor version on the client and on the server"
    is_same = version.split(".")[:2] == __version__.split(".")[:2]
    return [Finding(is_same, f"server {version}, this command {__version__}", step)]


def _server(client: Client) -> list[Finding]:
    """Return the results of the server's own checks, one finding each."""
    return [
        Finding(each.result == "ok", each.found, each.next_step, each.check)
        for each in client.status().checks
    ]


def _ready(client: Client) -> list[Finding]:
    ready = client.ready()
    return [Finding(True, f"{ready.shards} shards serve {ready.boxes} boxes")]


def _round_trip(client: Client) -> list[Finding]:
    times = []
    for _ in range(10):
        began_s = time.monotonic()
        client.health()
        times.append((time.monotonic() - began_s) * 1000)
    middle = sorted(times)[5]
    step = "check the network and the load of the server"
    return [Finding(middle < ROUND_TRIP_MS_MAX, f"median round trip {middle:.1f} ms", step)]


def _listing(client: Client) -> list[Finding]:
    first = next(iter(client.boxes(page_size=1)), None)
    return [Finding(True, "boxes can be listed" if first is not None else "the server has no boxes yet")]


def _sockets(client: Client) -> list[Finding]:
    """Connect to the shards' sockets, which direct writers use, if they are on this machine."""
    from gateway.shards.unix_sockets import connectable_path

    here = [path for path in client.placement().sockets if os.path.exists(path)]
    if not here:
        return [Finding(True, "the shards are on another machine; direct writers cannot run here")]
    failures = []
    for path in here:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            try:
                with connectable_path(path) as short:
                    sock.connect(short)
            except OSError as error:
                failures.append(f"{path}: {error.strerror}")
    summary = "; ".join(failures) or f"all {len(here)} shard sockets accept connections"
    return [Finding(not failures, summary, "run direct writers as the server's user")]


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("address", _address),
    ("version", _version),
    ("server", _server),
    ("shards", _ready),
    ("round trip", _round_trip),
    ("boxes", _listing),
    ("direct", _sockets),
)
