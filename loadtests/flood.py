"""Many clients that offer more load than the server can take: `python -m loadtests.flood < plan.json >
result.json`.

Each client has one connection and one request in flight. Open loop: requests become due at a fixed rate,
independent of earlier ones. A due request goes to the next free client; while no client is free, it waits
here. After a 429 a client waits as long as the response says and sends the request again. With a rate of 0 it
is a closed loop: every client sends as soon as it may.

`behind` in the result shows whether this process was the limit: the share of the time in which a request was
due, a client was free, and this process had not sent it for 20 ms.

Bounds: `connections` connections, `seconds` seconds, responses of at most 64 KiB.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import resource
import select
import socket
import sys
from collections import deque
from time import monotonic
from typing import Any

from loadtests.generator import append_body, http_request

_DRAIN_S = 30.0
#: The process is behind if an iteration takes longer than this while a request is due.
_BEHIND_S = 0.02
_HELLO = b"GET /v0/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_retry_after = re.compile(rb'"retry_after_ms":(\d+)').search


class Flood:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._rate = float(plan["rate"])
        self._seconds = float(plan["seconds"])
        body = append_body(7, plan["batch"], record_bytes=110)
        self._requests = [http_request(f"/v0/boxes/{box}?return_seqs=false", body) for box in plan["boxes"]]
        self._epoll = select.epoll()
        self._free: deque[socket.socket] = deque()
        #: Descriptor -> client, time of the first send of its request, and number of its box.
        self._busy: dict[int, tuple[socket.socket, float, int]] = {}
        #: Clients that got a 429: (time of the retry, descriptor).
        self._resting: list[tuple[float, int]] = []
        for _ in range(plan["connections"]):
            sock = socket.create_connection(("127.0.0.1", plan["port"]))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A gateway limits connections of one address that have not sent a request.
            sock.sendall(_HELLO)
            sock.recv(65536)
            self._epoll.register(sock, select.EPOLLIN)
            self._free.append(sock)
        self._next_box = 0
        self.taken_counts = [0] * len(plan["boxes"])
        self.taken_late = self.begun_count = self.sent_count = self.refused_count = (
            self.refused_without_retry
        ) = self.failed_count = 0
        self.first_failure = ""
        self.latencies_s: list[float] = []
        self._is_over = False

    def run(self) -> dict[str, Any]:
        began_s = last_s = monotonic()
        behind_s = 0.0
        while (now_s := monotonic()) - began_s < self._seconds:
            if now_s - last_s > _BEHIND_S and self._free and self._is_due(last_s - began_s):
                behind_s += now_s - last_s
            last_s = now_s
            while self._resting and self._resting[0][0] <= now_s:
                self._send_again(heapq.heappop(self._resting)[1])
            while self._free and self._is_due(now_s - began_s):
                self._send(now_s)
            self._receive(0.005 if self._free or self._resting else 0.05)
        took_s = monotonic() - began_s
        taken_count = sum(self.taken_counts)
        self._is_over = True
        until_s = monotonic() + _DRAIN_S
        while len(self._busy) > len(self._resting) and monotonic() < until_s:
            self._receive(0.05)
        self.latencies_s.sort()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": took_s,
            "taken": taken_count,
            "taken_in_all": sum(self.taken_counts),
            "offered": int(took_s * self._rate) if self._rate else self.begun_count,
            "begun": self.begun_count,
            "sent": self.sent_count,
            "refused": self.refused_count,
            "refused_badly": self.refused_without_retry,
            "failed": self.failed_count,
            "unanswered": len(self._busy) - len(self._resting),
            "first_failure": self.first_failure,
            "behind": behind_s / took_s,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "p50_ms": 1000 * share(self.latencies_s, 0.5),
            "p99_ms": 1000 * share(self.latencies_s, 0.99),
        }

    def _is_due(self, spent_s: float) -> bool:
        return not self._rate or self.begun_count < spent_s * self._rate

    def _send(self, now_s: float) -> None:
        sock = self._free.popleft()
        box = self._next_box = (self._next_box + 1) % len(self._requests)
        self._busy[sock.fileno()] = (sock, now_s, box)
        self.begun_count += 1
        self._send_again(sock.fileno())

    def _send_again(self, fd: int) -> None:
        sock, _, box = self._busy[fd]
        self.sent_count += 1
        sock.sendall(self._requests[box])

    def _receive(self, wait_s: float) -> None:
        for fd, _ in self._epoll.poll(wait_s):
            sock, first_s, box = self._busy[fd]
            answer = sock.recv(65536)
            status = answer[9:12]
            if status == b"429":
                self._rest(fd, answer)
                continue
            if status in (b"200", b"201"):
                self.taken_counts[box] += 1
                self.latencies_s.append(monotonic() - first_s)
            else:
                self.failed_count += 1
                self.first_failure = self.first_failure or answer[:300].decode(errors="replace")
            del self._busy[fd]
            self._free.append(sock)

    def _rest(self, fd: int, answer: bytes) -> None:
        self.refused_count += 1
        wait_ms = _retry_after(answer)
        if b"\r\nretry-after: " not in answer or wait_ms is None:
            self.refused_without_retry += 1
        heapq.heappush(self._resting, (monotonic() + (int(wait_ms[1]) if wait_ms else 1000) / 1000, fd))


def share(sorted_values: list[float], part: float) -> float:
    return sorted_values[int(len(sorted_values) * part)] if sorted_values else 0.0


def main() -> None:
    # Simulates another machine: the server has priority.
    os.nice(5)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = json.loads(sys.stdin.read())
    json.dump(Flood(plan).run(), sys.stdout)


if __name__ == "__main__":
    main()
