"""Runs attacks and well-behaved clients against one server, and measures its processes meanwhile.

The server requires keys. The well-behaved clients and the attackers are two tenants, each with keys for one
name prefix. Some attacks use no key.
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
#: Limits of each key of the attacking tenant. The well-behaved tenant has the defaults.
EVIL_BOXES, EVIL_BYTES, EVIL_REQUESTS_PER_S = 500, "64MiB", 200
KEYS: Final = (
    f"{GOOD_KEY}:rwda:good.",
    f"{EVIL_WRITER}:rwda:evil. id=evil-writer boxes={EVIL_BOXES} stored_bytes={EVIL_BYTES} "
    f"requests_per_s={EVIL_REQUESTS_PER_S}",
    f"{EVIL_READER}:r:evil. id=evil-reader requests_per_s={EVIL_REQUESTS_PER_S}",
)
#: The connection pool of a small service. Each connection has one request in flight, so with few connections
#: a higher latency lowers the throughput (all attacks at once: 38 % with 4 connections, 81 % with 16).
CONNECTIONS: Final = 16
#: Rounds of six requests that the well-behaved clients start each second: about a quarter of the capacity of
#: two idle cores, so that the share shows the effect of an attack and not competition for spare capacity.
RATE: Final = 100.0
_BIG_BATCHES, _BIG_RECORDS, _BIG_RECORD_BYTES = 20, 1000, 1000
_LOOK_S = 0.1


class ClientResult(NamedTuple):
    """Results of the well-behaved clients."""

    rounds_per_s: float
    statuses: dict[int, int]
    failures: int
    first_failures: list[str]
    latencies_ms: list[float]

    def percentile_ms(self, part: float) -> float:
        return self.latencies_ms[min(len(self.latencies_ms) - 1, int(len(self.latencies_ms) * part))]


class AttackResult(NamedTuple):
    clients: ClientResult
    #: Attack -> its counters and CPU seconds.
    attacks: dict[str, dict[str, Any]]
    #: Process (`gateway-0`, `shard-1`) -> peak resident memory during the attack.
    peak_bytes: dict[str, int]
    #: Processes that have another pid after the attack.
    restarted_processes: list[str]
    #: CPU seconds of the server's processes.
    server_cpu_s: float


@contextmanager
def attacked_server(tmp_path: Path | None = None, **settings: object) -> Iterator[Server]:
    """Run a server with the keys of both tenants, and the large box that the attackers read."""
    all_settings: dict[str, Any] = {"shards": 2, "api_keys": ",".join(KEYS), **settings}
    with running_server(tmp_path, **all_settings) as server:
        records = [{"data": "x" * _BIG_RECORD_BYTES}] * _BIG_RECORDS
        for _ in range(_BIG_BATCHES):
            post(server, "/v0/boxes/evil.big?return_seqs=false", {"records": records}, key=EVIL_WRITER)
        yield server


def post(server: Server, path: str, body: Any, *, key: str) -> dict[str, Any]:
    from urllib.request import Request, urlopen

    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(server.url + path, json.dumps(body).encode(), headers), timeout=60) as answer:
        reply: dict[str, Any] = json.loads(answer.read())
        return reply


def run_clients(server: Server, seconds: float) -> ClientResult:
    return _client_result(_start_clients(server, seconds))


def run_attacks(server: Server, names: Sequence[str], seconds: float, *, scale: float = 1.0) -> AttackResult:
    """Run all these attacks at once, beside the well-behaved clients."""
    before = processes_of(server)
    cpu_before_s = _cpu_s(before)
    plan = {
        "port": server.port,
        "seconds": seconds,
        "scale": scale,
        "keys": {"writer": EVIL_WRITER, "reader": EVIL_READER},
    }
    with _sample_memory(before) as peaks:
        attacks = {name: start("loadtests.abuse.attacks", plan, name) for name in names}
        clients = _client_result(_start_clients(server, seconds))
        results = {name: result_of(process) for name, process in attacks.items()}
    after = processes_of(server)
    restarted_processes = [name for name, pid in before.items() if after.get(name) != pid]
    server_cpu_s = 0.0 if restarted_processes else _cpu_s(before) - cpu_before_s
    return AttackResult(clients, results, peaks, restarted_processes, server_cpu_s)


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


def _client_result(process: subprocess.Popen[str]) -> ClientResult:
    result = result_of(process)
    return ClientResult(
        rounds_per_s=result["rounds"] / result["seconds"],
        statuses={int(status): count for status, count in result["statuses"].items()},
        failures=result["failures"],
        first_failures=result["first_failures"],
        latencies_ms=result["latencies_ms"],
    )


@contextmanager
def _sample_memory(processes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Record the peak resident memory of each process, sampled ten times a second.

    The kernel's high-water mark would include the time before.
    """
    peaks = dict.fromkeys(processes, 0)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            for name, pid in processes.items():
                try:
                    peaks[name] = max(peaks[name], machine.resident_bytes(pid))
                except OSError:
                    pass  # the process has ended: `restarted_processes` reports it

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _cpu_s(processes: dict[str, int]) -> float:
    return sum(map(machine.process_cpu_s, processes.values()))
