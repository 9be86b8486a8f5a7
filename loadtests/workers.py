"""Workers of a queue as load: each connection claims some jobs, acks them, and claims again.

A job counts when its ack succeeds. Latencies are those of the claims. A worker that finds the queue empty
ends the measurement, because later figures would include waits.
"""

from __future__ import annotations

import re
from typing import Any

from loadtests.generator import HttpLoad, Step, http_request

_seqs_of = re.compile(rb'"\$seq":(\d+),').findall


class Worker:
    """The requests of one connection: a worker of one queue."""

    def __init__(self, box: str, number: int, batch: int) -> None:
        self._path = f"/v0/boxes/{box}"
        self._node = b"w%d" % number
        self._claim = http_request(f"{self._path}/claim", b'{"node":"%b","max":%d}' % (self._node, batch))
        #: Claimed jobs; empty before a claim.
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

    def _on_answer(self, connection: Any, now_ns: int) -> None:
        worker = connection.steps
        if worker.is_acking:
            worker.seqs = []
            self._tally.add_untimed_answer(now_ns, connection.records)
        else:
            if not worker.seqs:
                self._tally.end(now_ns)
            super()._on_answer(connection, now_ns)

    def _check(self, connection: Any, size: int) -> None:
        buffer, worker = connection.buffer, connection.steps
        connection.answers += 1
        if not buffer.startswith(b"HTTP/1.1 2"):
            connection.records = 0
            self._tally.add_failure(bytes(buffer[:size]))
        elif not worker.is_acking:
            worker.seqs = _seqs_of(buffer, 0, size)
        elif buffer.find(b'"skipped":[],', 0, size) < 0:
            self._tally.add_failure(bytes(buffer[:size]))
