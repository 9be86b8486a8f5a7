"""Workers of a queue as load: each connection claims some jobs, acks them, and claims again.

A job counts when its ack is answered. Latencies are those of the claims alone. A worker that finds the queue
empty ends the measurement: what came after would be the price of waiting.
"""

from __future__ import annotations

import re
from typing import Any

from loadtests.generator import HttpLoad, Step, http_request

_seqs_of = re.compile(rb'"\$seq":(\d+),').findall


class Worker:
    """What one connection sends next. Work of one worker is in one box."""

    def __init__(self, box: str, number: int, batch: int) -> None:
        self._path = f"/v0/boxes/{box}"
        self._node = b"w%d" % number
        self._claim = http_request(f"{self._path}/claim", b'{"node":"%b","max":%d}' % (self._node, batch))
        #: What it holds; empty when it is about to claim.
        self.seqs: list[bytes] = []
        self.is_acking = False

    def __next__(self) -> Step:
        self.is_acking = bool(self.seqs)
        if not self.is_acking:
            return Step(self._claim, 0)
        body = b'{"node":"%b","seqs":[%b]}' % (self._node, b",".join(self.seqs))
        return Step(http_request(f"{self._path}/ack", body), len(self.seqs))


class WorkLoad(HttpLoad):
    """Keep-alive connections, a worker on each."""

    def _steps_of(self, plan: dict[str, Any], index: int, count: int) -> Worker:
        boxes = plan["boxes"]
        return Worker(boxes[index % len(boxes)], index, plan["batch"])

    def _answered(self, connection: Any, now_ns: int) -> None:
        worker = connection.steps
        if worker.is_acking:
            worker.seqs = []
            self._tally.answered_untimed(now_ns, connection.records)
        else:
            if not worker.seqs:
                self._tally.end(now_ns)
            super()._answered(connection, now_ns)

    def _check(self, connection: Any, size: int) -> None:
        buffer, worker = connection.buffer, connection.steps
        connection.answers += 1
        if not buffer.startswith(b"HTTP/1.1 2"):
            connection.records = 0
            self._tally.failed(bytes(buffer[:size]))
        elif not worker.is_acking:
            worker.seqs = _seqs_of(buffer, 0, size)
        elif buffer.find(b'"skipped":[],', 0, size) < 0:
            self._tally.failed(bytes(buffer[:size]))
