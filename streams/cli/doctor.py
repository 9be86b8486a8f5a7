"""`streams doctor`: checks everything between this command and the server's shards, and says what to do.

The server checks itself (`telemetry/checks.py`): its processes, disk, cold store, clock, keys, memory,
descriptors and backups. Those rows come from one question, and the rows around them are what only a client
can see.

Each question has a deadline of its own and its rows are shown as soon as they are known, so a part that hangs
costs seconds and hides nothing. Results: `ok`, `wrong` (with the next step), `unknown` (the key may not ask).

Bounds: one thread a question; `--timeout` for each.
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
from streams.cli.verbs import Target, connected, example

if TYPE_CHECKING:
    from streams.client._sync.client import Client

#: More than a server takes to find out that one of its shards hangs.
CHECK_S: Final = 8.0
ROUND_TRIP_MS_MAX: Final = 100.0


class Finding(NamedTuple):
    is_ok: bool
    found: str
    next: str = ""
    #: The name of the row, if it is not that of the question.
    check: str = ""


#: One question to a server, and the rows that answer it.
Check = Callable[["Client"], list[Finding]]


class Failed(click.ClickException):
    """Some check found something wrong. The rows have said what."""

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
    help="How long to wait for each answer.",
)
@connected
def doctor(target: Target, timeout_s: float) -> None:
    """Check the server from address to shards and disks; each finding says the next step.

    Nothing is changed. Exit code 0 when all is ok, 1 when something is wrong.
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
        url = target.resolved().url
        raise Failed(f"{url}: {len(wrong)} of {len(rows)} checks found something wrong: {wrong[0]['found']}")


def _rows(target: Target, timeout_s: float) -> Iterator[dict[str, Any]]:
    for name, check in _CHECKS:
        rows = _checked(name, check, target, timeout_s)
        yield from rows
        if name == "address" and rows[0]["result"] == "wrong":
            return  # nothing else can be asked


def _checked(name: str, check: Check, target: Target, timeout_s: float) -> list[dict[str, Any]]:
    """Run a check on a thread of its own, with a client of its own: one that hangs is left behind."""
    answers: queue.SimpleQueue[list[Finding] | dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_outcome(check, target)), daemon=True).start()
    try:
        found = answers.get(timeout=timeout_s)
    except queue.Empty:
        step = "a process of the server may hang: look at its log for `no heartbeat`, and at its disk"
        found = [Finding(False, f"no answer within {timeout_s:g} s", step)]
    if isinstance(found, dict):
        return [{"check": name, **found}]
    return [_row(each.check or name, each) for each in found]


def _outcome(check: Check, target: Target) -> list[Finding] | dict[str, Any]:
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
        "found": finding.found,
        "next": "" if finding.is_ok else finding.next,
    }


# -- the checks, in the order in which one thing depends on another


def _address(client: Client) -> list[Finding]:
    return [Finding(True, f"{client.url} answers, version {client.health().version}")]


def _version(client: Client) -> list[Finding]:
    version = client.health().version
    step = "install the same version on both sides, at least up to the second number"
    is_same = version.split(".")[:2] == __version__.split(".")[:2]
    return [Finding(is_same, f"server {version}, here {__version__}", step)]


def _server(client: Client) -> list[Finding]:
    """What the server finds when it checks itself, a row for each thing."""
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
    step = "look at the network, or at the load of the server"
    return [Finding(middle < ROUND_TRIP_MS_MAX, f"{middle:.1f} ms there and back", step)]


def _listing(client: Client) -> list[Finding]:
    first = next(iter(client.boxes(page_size=1)), None)
    return [Finding(True, "boxes can be listed" if first is not None else "there is no box yet")]


def _sockets(client: Client) -> list[Finding]:
    """Only where the shards' sockets are on this machine, for direct writers."""
    from gateway.shards.unix_sockets import connectable_path

    here = [path for path in client.placement().sockets if os.path.exists(path)]
    if not here:
        return [Finding(True, "the shards are on another machine; direct writers do not work from here")]
    refused = []
    for path in here:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            try:
                with connectable_path(path) as short:
                    sock.connect(short)
            except OSError as error:
                refused.append(f"{path}: {error.strerror}")
    found = "; ".join(refused) or f"{len(here)} sockets of shards answer"
    return [Finding(not refused, found, "run as the server's user")]


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("address", _address),
    ("version", _version),
    ("server", _server),
    ("shards", _ready),
    ("round trip", _round_trip),
    ("boxes", _listing),
    ("direct", _sockets),
)
