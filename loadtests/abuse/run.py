"""Runs attacks and well-behaved clients against one server, and reads its processes meanwhile.

The server asks for keys. The well-behaved clients and the attackers are two tenants: each has a key for names
with its own prefix. Some attacks use no key at all.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtests import machine
from loadtests.children import result_of, start
from streams.testing import Server, running_server

GOOD_KEY: Final = "well-behaved-tenant-0123456789"
EVIL_WRITER: Final = "attacking-tenant-w-0123456789"
EVIL_READER: Final = "attacking-tenant-r-0123456789"
#: What an operator lets each key of the attacking tenant have; the well-behaved one has the defaults.
EVIL_BOXES, EVIL_BYTES, EVIL_REQUESTS_PER_S = 500, "64MiB", 200
KEYS: Final = (
    f"{GOOD_KEY}:rwda:good.",
    f"{EVIL_WRITER}:rwda:evil. id=evil-writer boxes={EVIL_BOXES} stored_bytes={EVIL_BYTES} "
    f"requests_per_s={EVIL_REQUESTS_PER_S}",
    f"{EVIL_READER}:r:evil. id=evil-reader requests_per_s={EVIL_REQUESTS_PER_S}",
)
#: As many as the pool of a small service has. Each has one request at a time, so few connections would turn
#: a higher latency into a lower throughput (4 of them, all attacks at once: 38 % where 16 get 81 %).
CONNECTIONS: Final = 16
#: Rounds of six requests that the well-behaved clients begin each second: about a quarter of what this server
#: and these clients do on two quiet cores, so that an attack shows by what it takes and not by sharing what a
#: closed loop would use up.
RATE: Final = 100.0
_BIG_BATCHES, _BIG_RECORDS, _BIG_RECORD_BYTES = 20, 1000, 1000
_LOOK_S = 0.1


class Clients(NamedTuple):
    """What the well-behaved clients saw."""

    rounds_per_s: float
    statuses: dict[int, int]
    failures: int
    first_failures: list[str]
    latencies_ms: list[float]

    def percentile_ms(self, part: float) -> float:
        return self.latencies_ms[min(len(self.latencies_ms) - 1, int(len(self.latencies_ms) * part))]


class Attacked(NamedTuple):
    clients: Clients
    #: By attack: what it counted, and the CPU seconds it used.
    attacks: dict[str, dict[str, Any]]
    #: By process (`gateway-0`, `shard-1`): the most resident memory while the attack ran.
    peak_bytes: dict[str, int]
    #: Processes whose pid is another one afterwards.
    restarted: list[str]
    #: CPU seconds of the server's processes.
    server_cpu_s: float


@contextmanager
def attacked_server(tmp_path: Path | None = None, **settings: object) -> Iterator[Server]:
    """A server with both tenants' keys, and the large box that the attackers read."""
    given: dict[str, Any] = {"shards": 2, "api_keys": ",".join(KEYS), **settings}
    with running_server(tmp_path, **given) as server:
        records = [{"data": "x" * _BIG_RECORD_BYTES}] * _BIG_RECORDS
        for _ in range(_BIG_BATCHES):
            post(server, "/v0/boxes/evil.big?return_seqs=false", {"records": records}, key=EVIL_WRITER)
        yield server


def post(server: Server, path: str, body: Any, *, key: str) -> dict[str, Any]:
    from urllib.request import Request, urlopen

    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(server.url + path, json.dumps(body).encode(), headers), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def run_clients(server: Server, seconds: float) -> Clients:
    return _clients_of(_start_clients(server, seconds))


def run_attacks(server: Server, names: Sequence[str], seconds: float, *, scale: float = 1.0) -> Attacked:
    """All of `names` at once, beside the well-behaved clients."""
    before = processes_of(server)
    cpu_before_s = _cpu_s(before)
    plan = {
        "port": server.port,
        "seconds": seconds,
        "scale": scale,
        "keys": {"writer": EVIL_WRITER, "reader": EVIL_READER},
    }
    with _watched_memory(before) as peaks:
        attacks = {name: start("loadtests.abuse.attacks", plan, name) for name in names}
        clients = _clients_of(_start_clients(server, seconds))
        results = {name: result_of(process) for name, process in attacks.items()}
    after = processes_of(server)
    restarted = [name for name, pid in before.items() if after.get(name) != pid]
    server_cpu_s = 0.0 if restarted else _cpu_s(before) - cpu_before_s
    return Attacked(clients, results, peaks, restarted, server_cpu_s)


def processes_of(server: Server) -> dict[str, int]:
    return {f"shard-{number}": pid for number, pid in server.shard_pids().items()} | {
        f"gateway-{number}": pid for number, pid in server.gateway_pids().items()
    }


def _start_clients(server: Server, seconds: float) -> subprocess.Popen[str]:
    plan = {
        "port": server.port,
        "seconds": seconds,
        "key": GOOD_KEY,
        "prefix": "good.",
        "connections": CONNECTIONS,
        "rate": RATE,
    }
    return start("loadtests.abuse.clients", plan)


def _clients_of(process: subprocess.Popen[str]) -> Clients:
    found = result_of(process)
    return Clients(
        rounds_per_s=found["rounds"] / found["seconds"],
        statuses={int(status): count for status, count in found["statuses"].items()},
        failures=found["failures"],
        first_failures=found["first_failures"],
        latencies_ms=found["latencies_ms"],
    )


@contextmanager
def _watched_memory(processes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Peaks of resident memory by process, read ten times a second. (The kernel's own high-water mark may be
    from before.)"""
    peaks = dict.fromkeys(processes, 0)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            for name, pid in processes.items():
                try:
                    peaks[name] = max(peaks[name], machine.resident_bytes(pid))
                except OSError:
                    pass  # it has ended: `restarted` says so

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _cpu_s(processes: dict[str, int]) -> float:
    return sum(map(machine.process_cpu_s, processes.values()))
