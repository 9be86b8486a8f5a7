"""`make overload`: twice the load that the machine can take for a minute, and what becomes of the server.

    measure what it can take ──► idle ──► twice that for --seconds ──► how soon it is as before ──► idle

Eight boxes of low priority are flooded with batches of 100. Beside them one writer appends fifty records a
second to a box of high priority, skipping the throttle as such a writer should, and a watcher of that box
notes when each event comes. It is idle for as long as it is overloaded, half before and half after: the
slowest hundredth of a few seconds says little of a minute. Every line of the table has its bound; the exit
code is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, NamedTuple

from gateway.turns import PRESSED_S
from loadtests import machine
from loadtests.bench import setting_of
from loadtests.children import result_of, start
from loadtests.generator import http_request
from loadtests.rows import CaseFailed, call
from streams.testing import Server, running_server

BATCH, LOW_BOXES = 100, 8
#: Closed loop: enough to have the server always busy. Open loop: as many as may wait for an answer.
CLOSED_CONNECTIONS, OPEN_CONNECTIONS = 32, 768
CACHE_BYTES = 32 << 20
#: Per shard twice the cache (unsealed and sealed), what a group is made of, and the allocator's share of all
#: that; and as much again for the bodies that the gateway holds.
GROWTH_BYTES_MAX = 512 << 20
RECOVERED_S_MAX = 2.0
P99_RATIO_MAX = 3.0
EVERY_S = 0.02


class Probe:
    """One writer and one watcher of a box: how long until an append is seen."""

    def __init__(self, server: Server, box: str) -> None:
        self._port, self._box = server.port, box
        self._is_over = threading.Event()
        self._sent_s: dict[int, float] = {}
        self._arrived_s: dict[int, float] = {}
        self.failure = ""
        self._watcher = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        head = f"GET /v0/boxes/{box}/watch?tail=true HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        self._watcher.sendall(head.encode())
        while b"caught-up" not in self._watcher.recv(65536):
            pass
        self._threads = [threading.Thread(target=each) for each in (self._write, self._watch)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        writer = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = 0
        with writer:
            due_s = monotonic()
            while not self._is_over.wait(max(0.0, due_s - monotonic())):
                due_s = max(due_s + EVERY_S, monotonic())
                number += 1
                body = b'{"records":[{"data":"probe-%d-"}],"disable_backpressure":true}' % number
                self._sent_s[number] = monotonic()
                writer.sendall(http_request(f"/v0/boxes/{self._box}", body))
                answer = writer.recv(65536)
                if answer[9:12] not in (b"200", b"201"):
                    self.failure = self.failure or answer[:300].decode(errors="replace")

    def _watch(self) -> None:
        text = b""
        while not self._is_over.is_set() or len(self._arrived_s) < len(self._sent_s):
            try:
                piece = self._watcher.recv(65536)
            except TimeoutError:
                break
            now_s = monotonic()
            if not piece:
                break
            text += piece
            while (at := text.find(b"probe-")) >= 0 and (end := text.find(b"-", at + 6)) >= 0:
                self._arrived_s[int(text[at + 6 : end])] = now_s
                text = text[end:]
            text = text[-64:]

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        self._watcher.close()

    def between(self, began_s: float, ended_s: float) -> list[float]:
        """Of appends sent in that time, in ms, least first; one that never came counts as a minute."""
        return sorted(
            1000 * (self._arrived_s.get(number, sent_s + 60) - sent_s)
            for number, sent_s in list(self._sent_s.items())
            if began_s <= sent_s < ended_s
        )


def share(latencies: list[float], part: float) -> float:
    return latencies[min(len(latencies) - 1, int(len(latencies) * part))]


def flood(server: Server, *, rate: float, seconds: float, connections: int) -> subprocess.Popen[str]:
    plan = {
        "port": server.port,
        "boxes": [f"low-{number}" for number in range(LOW_BOXES)],
        "batch": BATCH,
        "rate": rate,
        "seconds": seconds,
        "connections": connections,
    }
    return start("loadtests.flood", plan)


def metric(server: Server, name: str) -> float:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        text = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


@contextmanager
def watched_memory(server: Server) -> Iterator[list[int]]:
    """Resident bytes of all processes, now and again until the end."""
    pids = [*server.shard_pids().values(), *server.gateway_pids().values()]
    found = [sum(map(machine.resident_bytes, pids))]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.5):
            found.append(sum(map(machine.resident_bytes, pids)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def recovered_s(server: Server) -> float:
    """Until an ordinary append is taken at once and nobody feels pressure."""
    began_s = monotonic()
    while monotonic() - began_s < 60:
        status = call(server, "GET", "/v0/status")
        if status["pressure"] == "none":
            sent_s = monotonic()
            try:
                answer = call(server, "POST", "/v0/boxes/after", {"records": [{"data": 1}]})
            except CaseFailed as error:
                if " was answered 429" not in str(error):
                    raise
                sleep(0.02)  # refused: not yet
                continue
            if "throttle_wait_ms" not in answer["performance"] and monotonic() - sent_s < 0.25:
                return monotonic() - began_s
        sleep(0.02)
    return 60.0


class Run(NamedTuple):
    """All that was measured."""

    #: Appends a second that it takes.
    capacity: float
    flood: dict[str, Any]
    #: Milliseconds from append to event of the high-priority box, least first.
    idle_ms: list[float]
    busy_ms: list[float]
    grown_bytes: int
    paced: float
    lost: int
    recovered_s: float


def run(server: Server, seconds: float) -> Run:
    for number in range(LOW_BOXES):
        call(server, "PUT", f"/v0/boxes/low-{number}", {"priority": -500, "cap_records": 200_000})
    call(server, "PUT", "/v0/boxes/high", {"priority": 1000})
    taken = result_of(flood(server, rate=0, seconds=min(4.0, seconds), connections=CLOSED_CONNECTIONS))
    capacity = taken["taken"] / taken["seconds"]
    sleep(1)
    high = Probe(server, "high")
    try:
        idle_s = max(2.0, seconds / 2)
        before_s = monotonic()
        sleep(idle_s)
        with watched_memory(server) as memory:
            process = flood(server, rate=2 * capacity, seconds=seconds, connections=OPEN_CONNECTIONS)
            sleep(1)  # it is under way
            busy_from_s = monotonic()
            found = result_of(process)
            after_s = recovered_s(server)
        sleep(PRESSED_S)  # as long as it expects the flood to come back
        again_s = monotonic()
        sleep(idle_s)
    finally:
        high.stop()
    if high.failure:
        raise SystemExit(f"the high-priority writer was refused: {high.failure}")
    stored = [call(server, "GET", f"/v0/boxes/low-{n}/tail")["head_seq"] for n in range(LOW_BOXES)]
    return Run(
        capacity=capacity,
        flood=found,
        idle_ms=sorted(high.between(before_s, before_s + idle_s) + high.between(again_s, again_s + idle_s)),
        busy_ms=high.between(busy_from_s, busy_from_s + seconds - 2),
        grown_bytes=max(memory) - memory[0],
        paced=metric(server, "streams_paced_total"),
        lost=(taken["taken"] + found["taken"]) * BATCH - sum(stored),
        recovered_s=after_s,
    )


def rows_of(found: Run) -> list[tuple[str, str, str, bool]]:
    """What is promised, what was found, the bound, and whether it holds."""
    ratio = share(found.busy_ms, 0.99) / share(found.idle_ms, 0.99)
    refused, badly = found.flood["refused"], found.flood["refused_badly"]
    failed = found.flood["failed"] + found.flood["unanswered"]
    grown, grown_max = found.grown_bytes, GROWTH_BYTES_MAX
    after_s, after_s_max = found.recovered_s, RECOVERED_S_MAX
    return [
        ("memory grows by", f"{grown >> 20} MiB", f"{grown_max >> 20} MiB", grown <= grown_max),
        ("high priority, p99 against idle", f"{ratio:.1f}x", f"{P99_RATIO_MAX:g}x", ratio <= P99_RATIO_MAX),
        ("appends and deliveries that took turns", f"{found.paced:,.0f}", "over 0", found.paced > 0),
        ("writers answered 429", f"{refused:,}", "over 0", refused > 0),
        ("of those, without a time to come back", f"{badly:,}", "0", badly == 0),
        ("other failures, or no answer", f"{failed:,}", "0", failed == 0),
        ("acked records that are not there", f"{found.lost:,}", "0", found.lost == 0),
        ("back to normal after", f"{after_s:.2f} s", f"{after_s_max:g} s", after_s <= after_s_max),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtests.overload", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is overloaded (default 60)")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of the server"
    )
    asked = parser.parse_args()
    seconds, settings = asked.seconds, dict(setting_of(text) for text in asked.set)
    with running_server(**machine.AS_SERVED | {"shards": 2, "cache_bytes": CACHE_BYTES} | settings) as server:
        found = run(server, seconds)
    flooded = found.flood
    print(
        f"takes {found.capacity:,.0f} appends/s of {BATCH}, was offered {2 * found.capacity:,.0f}/s for "
        f"{seconds:g} s: took {flooded['taken']:,} (p99 {flooded['p99_ms']:.0f} ms), refused "
        f"{flooded['refused']:,}; {flooded['given_up']:,} were never sent. {flooded['first_failure']}"
    )
    for name, times in (("idle", found.idle_ms), ("under load", found.busy_ms)):
        print(f"high priority, {name}: p50 {share(times, 0.5):.1f} ms, p99 {share(times, 0.99):.1f} ms")
    rows = rows_of(found)
    width = max(len(name) for name, *_ in rows)
    for name, figure, bound, holds in rows:
        print(f"{name:<{width}}  {figure:>12}  bound {bound:<8}  {'holds' if holds else 'MISSED'}")
    return 0 if all(holds for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
