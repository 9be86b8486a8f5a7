"""Writers who do not care whether the server keeps up: `python -m loadtests.flood < plan.json > result.json`.

Open loop: requests are due at a fixed rate, whatever became of those before. A request that is due goes out
on the next free connection; with none free it waits, and what waits for longer than a second is given up
unsent. What is refused is not repeated: a client that repeats would offer more the less is taken. With a rate
of 0 it is a closed loop, which finds out what the server can take.

Bounds: `connections` connections, `seconds` seconds, answers of at most 64 KiB.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import deque
from time import monotonic
from typing import Any

from loadtests.generator import append_body, http_request

_GIVEN_UP_S = 1.0
_DRAIN_S = 30.0


class Flood:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._rate = float(plan["rate"])
        self._seconds = float(plan["seconds"])
        body = append_body(7, plan["batch"], record_bytes=110)
        self._requests = [http_request(f"/v0/boxes/{box}?return_seqs=false", body) for box in plan["boxes"]]
        self._epoll = select.epoll()
        self._free: deque[socket.socket] = deque()
        self._busy: dict[int, tuple[socket.socket, float]] = {}
        self._boxes: dict[int, int] = {}
        for _ in range(plan["connections"]):
            sock = socket.create_connection(("127.0.0.1", plan["port"]))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(sock, select.EPOLLIN)
            self._free.append(sock)
        self._next_box = 0
        self.taken = [0] * len(plan["boxes"])
        self.refused = self.refused_badly = self.failed = self.given_up = 0
        self.first_failure = ""
        self.latencies_s: list[float] = []

    def run(self) -> dict[str, Any]:
        began_s = monotonic()
        due_s = began_s
        step_s = 1 / self._rate if self._rate else 0.0
        while (now_s := monotonic()) - began_s < self._seconds:
            while self._free and due_s <= now_s:
                self._send(now_s)
                due_s += step_s
            if now_s - due_s > _GIVEN_UP_S and step_s:
                missed = int((now_s - due_s) / step_s)
                self.given_up += missed
                due_s += missed * step_s
            wait_s = max(0.0, due_s - now_s) if self._free else 1.0
            self._receive(min(wait_s, 0.05))
        took_s = monotonic() - began_s
        until_s = monotonic() + _DRAIN_S
        while self._busy and monotonic() < until_s:
            self._receive(0.05)
        self.latencies_s.sort()
        return {
            "seconds": took_s,
            "taken": sum(self.taken),
            "taken_by_box": self.taken,
            "refused": self.refused,
            "refused_badly": self.refused_badly,
            "failed": self.failed,
            "unanswered": len(self._busy),
            "first_failure": self.first_failure,
            "given_up": self.given_up,
            "p99_ms": 1000 * self.latencies_s[int(len(self.latencies_s) * 0.99)] if self.latencies_s else 0.0,
        }

    def _send(self, now_s: float) -> None:
        sock = self._free.popleft()
        box = self._next_box = (self._next_box + 1) % len(self._requests)
        sock.sendall(self._requests[box])
        self._busy[sock.fileno()] = (sock, now_s)
        self._boxes[sock.fileno()] = box

    def _receive(self, wait_s: float) -> None:
        for fd, _ in self._epoll.poll(wait_s):
            sock, sent_s = self._busy.pop(fd)
            answer = sock.recv(65536)
            self._count(fd, answer, monotonic() - sent_s)
            self._free.append(sock)

    def _count(self, fd: int, answer: bytes, took_s: float) -> None:
        status = answer[9:12]
        if status in (b"200", b"201"):
            self.taken[self._boxes[fd]] += 1
            self.latencies_s.append(took_s)
        elif status == b"429":
            self.refused += 1
            if b"\r\nretry-after: " not in answer or b'"retry_after_ms":' not in answer:
                self.refused_badly += 1
        else:
            self.failed += 1
            self.first_failure = self.first_failure or answer[:300].decode(errors="replace")


def main() -> None:
    # As if it ran on another machine, as far as that goes: the server is served first.
    os.nice(5)
    plan = json.loads(sys.stdin.read())
    json.dump(Flood(plan).run(), sys.stdout)


if __name__ == "__main__":
    main()
