"""`streams doctor`: checks everything between this command and the server's shards, and says what to do.

Each check has a deadline of its own and its row is shown as soon as it is known, so a part that hangs costs
seconds and hides nothing. Results: `ok`, `wrong` (with the next step), `unknown` (the key may not ask).

Bounds: one thread a check; `CHECK_S` for each.
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
    from streams.client.answers import ProcessStatus, Status

#: More than a server takes to find out that one of its shards hangs.
CHECK_S: Final = 8.0
#: Free space below which a disk is worth a word, whatever its size: two log files and a segment.
DISK_FREE_BYTES: Final = 512 << 20
DISK_FREE_SHARE: Final = 0.05
#: Of descriptors, and of the memory that the processes may have.
USED_SHARE_MAX: Final = 0.9
#: A process that was started again so lately is worth a word.
RESTART_LATELY_MS: Final = 15 * 60 * 1000
ROUND_TRIP_MS_MAX: Final = 100.0


class Finding(NamedTuple):
    is_ok: bool
    found: str
    next: str = ""


class Server:
    """The server that is checked: a client for one check, and the status that all checks share."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._status: Status | None = None

    def status(self, client: Client) -> Status:
        if self._status is None:
            self._status = client.status()
        return self._status


Check = Callable[["Client", Server], Finding]


class Failed(click.ClickException):
    """Some check found something wrong. The rows have said what."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"streams: {self.message}", err=True, file=file)


@example("streams doctor")
@click.command("doctor")
@connected
def doctor(target: Target) -> None:
    """Check the server from address to shards and disks; each finding says the next step.

    Nothing is changed. Exit code 0 when all is ok, 1 when something is wrong.
    """
    rows: list[dict[str, Any]] = []
    for row in _rows(target):
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


def _rows(target: Target) -> Iterator[dict[str, Any]]:
    server = Server(target)
    for name, check in _CHECKS:
        row = _checked(name, check, server)
        yield row
        if row["result"] == "wrong" and name == "address":
            return  # nothing else can be asked


def _checked(name: str, check: Check, server: Server) -> dict[str, Any]:
    """Run a check on a thread of its own, with a client of its own: one that hangs is left behind."""
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_outcome(check, server)), daemon=True).start()
    try:
        return {"check": name, **answers.get(timeout=CHECK_S)}
    except queue.Empty:
        found = f"no answer within {CHECK_S:g} s"
        step = "a process of the server may hang: look at its log for `no heartbeat`, and at its disk"
        return {"check": name, "result": "wrong", "found": found, "next": step}


def _outcome(check: Check, server: Server) -> dict[str, Any]:
    from streams.protocol.errors import StreamsError

    try:
        with server.target.client(retry_s=0.0) as client:
            finding = check(client, server)
    except StreamsError as error:
        if error.code == "forbidden":
            return {"result": "unknown", "found": error.message, "next": output.NEXT_STEPS["forbidden"]}
        step = str(error.detail.get("next_step") or output.NEXT_STEPS.get(error.code, ""))
        finding = Finding(False, error.message, step)
    result = "ok" if finding.is_ok else "wrong"
    return {"result": result, "found": finding.found, "next": "" if finding.is_ok else finding.next}


# -- the checks, in the order in which one thing depends on another


def _address(client: Client, server: Server) -> Finding:
    return Finding(True, f"{client.url} answers, version {client.health().version}")


def _version(client: Client, server: Server) -> Finding:
    version = client.health().version
    step = "install the same version on both sides, at least up to the second number"
    is_same = version.split(".")[:2] == __version__.split(".")[:2]
    return Finding(is_same, f"server {version}, here {__version__}", step)


def _processes(client: Client, server: Server) -> Finding:
    """Every shard and gateway serves; if not, why the supervisor says it does not."""
    status = server.status(client)
    everyone = [*status.shards, *status.gateways]
    away = [each for each in everyone if each.status != "ready"]
    if not away:
        return Finding(True, f"{len(status.shards)} shards and {len(status.gateways)} gateways serve")
    said = "; ".join(f"{_name(each)} is {each.status}{_why(each)}" for each in away)
    steps = list(dict.fromkeys(each.next_step for each in away if each.next_step))
    return Finding(False, said, "; ".join(steps) or output.NEXT_STEPS["not_ready"])


def _restarts(client: Client, server: Server) -> Finding:
    """A process that ends and is started again, over and over, may be ready at the moment of a look."""
    status = server.status(client)
    restarted = [each for each in (*status.shards, *status.gateways) if each.restarts]
    said = "; ".join(
        f"{_name(each)} was restarted: "
        + ", ".join(f"{reason} {count} times" for reason, count in sorted(each.restarts.items()))
        for each in restarted
    )
    lately = [each for each in restarted if each.uptime_ms < RESTART_LATELY_MS]
    step = "look at the server's log for `ended unexpectedly` and `hangs`; it has the cause of each"
    return Finding(not lately, said or "no process was restarted", step)


def _disk(client: Client, server: Server) -> Finding:
    disk = server.status(client).disk
    share = disk.free_bytes / disk.bytes if disk.bytes else 1.0
    is_ok = disk.free_bytes >= DISK_FREE_BYTES and share >= DISK_FREE_SHARE and disk.level == "ok"
    found = f"{disk.free_bytes / 2**30:.1f} GiB free, {share:.0%} of the data directory's file system"
    if disk.level != "ok":
        refused = "what adds data is" if disk.level == "low" else "all writes are"
        found = f"{found}; {refused} refused with 507"
    step = "free space, delete or trim boxes, or move old segments away with STREAMS_COLD_DIR"
    return Finding(is_ok, found, step)


def _memory(client: Client, server: Server) -> Finding:
    status = server.status(client)
    used, limit = status.resident_bytes, _limit_of(status)
    found = f"{used / 2**20:.0f} MiB used"
    if not limit:
        return Finding(True, found)
    step = "give the server more memory, or lower STREAMS_CACHE_BYTES"
    return Finding(
        used < USED_SHARE_MAX * limit, f"{found} of {limit / 2**20:.0f} MiB that it may have", step
    )


def _limit_of(status: Status) -> int:
    return max((each.memory_limit_bytes for each in (*status.shards, *status.gateways)), default=0)


def _descriptors(client: Client, server: Server) -> Finding:
    status = server.status(client)
    everyone = [each for each in (*status.shards, *status.gateways) if each.open_files_max]
    if not everyone:
        return Finding(True, "not known")
    worst = max(everyone, key=lambda each: each.open_files / each.open_files_max)
    step = "raise the limit of open files (LimitNOFILE of the unit, `ulimit -n`)"
    is_ok = worst.open_files < USED_SHARE_MAX * worst.open_files_max
    return Finding(is_ok, f"{_name(worst)} has {worst.open_files} of {worst.open_files_max} open files", step)


def _ready(client: Client, server: Server) -> Finding:
    ready = client.ready()
    return Finding(True, f"{ready.shards} shards serve {ready.boxes} boxes")


def _round_trip(client: Client, server: Server) -> Finding:
    times = []
    for _ in range(10):
        began_s = time.monotonic()
        client.health()
        times.append((time.monotonic() - began_s) * 1000)
    middle = sorted(times)[5]
    step = "look at the network, or at the load of the server"
    return Finding(middle < ROUND_TRIP_MS_MAX, f"{middle:.1f} ms there and back", step)


def _listing(client: Client, server: Server) -> Finding:
    first = next(iter(client.boxes(page_size=1)), None)
    return Finding(True, "boxes can be listed" if first is not None else "there is no box yet")


def _sockets(client: Client, server: Server) -> Finding:
    """Only where the shards' sockets are on this machine, for direct writers."""
    from gateway.sockets import connectable_path

    here = [path for path in client.placement().sockets if os.path.exists(path)]
    if not here:
        return Finding(True, "the shards are on another machine; direct writers do not work from here")
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
    return Finding(not refused, found, "run as the server's user")


def _name(process: ProcessStatus) -> str:
    return f"shard-{process.shard:02d}" if process.shard is not None else f"gateway-{process.gateway}"


def _why(process: ProcessStatus) -> str:
    said = ", ".join(part for part in (process.reason, process.detail) if part)
    return f" ({said})" if said else ""


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("address", _address),
    ("version", _version),
    ("processes", _processes),
    ("restarts", _restarts),
    ("shards", _ready),
    ("disk", _disk),
    ("memory", _memory),
    ("descriptors", _descriptors),
    ("round trip", _round_trip),
    ("boxes", _listing),
    ("direct", _sockets),
)
