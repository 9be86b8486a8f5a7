"""Workers of a queue at a peer: each connection claims some jobs, acks them, and claims again.

Like `loadtests/workers.py`, which does the same with ours. A job counts when its ack is answered, except at
RabbitMQ, which answers no ack: there it counts when it is delivered. A worker that finds no job ends the
measurement.
"""

from __future__ import annotations

import re
import socket
import struct
from time import monotonic_ns
from typing import Any, Protocol

from loadtests.generator import HttpLoad, LoadFailed, Step
from loadtests.peers.load import wire_of
from loadtests.peers.wires import Confirms, Nats, Postgres, amqp_ack, amqp_prefetch, resp, until

GROUP = "workers"


class Worker(Protocol):
    """The two requests of one worker, and the ends of their answers. `jobs` are those that it has claimed."""

    jobs: list[bytes]

    def claim(self) -> bytes: ...
    def ack(self) -> bytes: ...
    def is_claimed(self, text: bytes) -> bool: ...
    def is_acked(self, text: bytes) -> bool: ...


class RedisWorker:
    _ids = re.compile(rb"\r\n\*2\r\n\$\d+\r\n(\d+-\d+)\r\n\*4\r\n").findall
    _LINES_OF_JOB, _LINES_OF_HEAD = 12, 5

    def __init__(self, box: str, number: int, batch: int) -> None:
        self._box = box
        words = ("XREADGROUP", "GROUP", GROUP, f"w{number}", "COUNT", str(batch), "STREAMS", box, ">")
        self._claim = resp(*words)
        self.jobs: list[bytes] = []

    def claim(self) -> bytes:
        return self._claim

    def ack(self) -> bytes:
        # The client deletes an acked job, as ours is deleted: both commands go together.
        return resp("XACK", self._box, GROUP, *self.jobs) + resp("XDEL", self._box, *self.jobs)

    def is_claimed(self, text: bytes) -> bool:
        if text == b"*-1\r\n":
            return True
        self.jobs = self._ids(text)
        lines = self._LINES_OF_HEAD + self._LINES_OF_JOB * len(self.jobs)
        return (
            bool(self.jobs)
            and text.count(b"\n") == lines
            and _count_after(text, b"\r\n*", 2) == len(self.jobs)
        )

    def is_acked(self, text: bytes) -> bool:
        return text.count(b"\n") == 2


def _count_after(text: bytes, marker: bytes, times: int) -> int:
    """Return the number behind the marker where it comes for this time."""
    at = 0
    for _ in range(times):
        at = text.index(marker, at) + len(marker)
    return int(text[at : text.index(b"\r", at)])


class PostgresWorker:
    """A claim locks rows that no other worker has locked, and an ack deletes them: one transaction a job."""

    def __init__(self, box: str, number: int, batch: int) -> None:
        self._box = box
        select = f'SELECT seq, tag, data FROM "{box}" ORDER BY seq FOR UPDATE SKIP LOCKED LIMIT {batch}'
        self._claim = Postgres.query(f"BEGIN; {select}")
        self.jobs: list[bytes] = []

    def claim(self) -> bytes:
        return self._claim

    def ack(self) -> bytes:
        seqs = ",".join(str(seq, "ascii") for seq in self.jobs)
        return Postgres.query(f'DELETE FROM "{self._box}" WHERE seq IN ({seqs}); COMMIT')

    def is_claimed(self, text: bytes) -> bool:
        if not text.endswith(Postgres.READY_IN_TRANSACTION):
            return False
        self.jobs = list(_first_columns(text))
        return True

    def is_acked(self, text: bytes) -> bool:
        return text.endswith(Postgres.READY)


def _first_columns(text: bytes) -> list[bytes]:
    """Return the first column of each row of an answer of PostgreSQL."""
    columns: list[bytes] = []
    at = 0
    while at < len(text):
        kind, size = text[at : at + 1], struct.unpack_from(">I", text, at + 1)[0]
        if kind == b"D":
            length = struct.unpack_from(">I", text, at + 7)[0]
            columns.append(text[at + 11 : at + 11 + length])
        elif kind == b"E":
            raise LoadFailed(f"an error: {text[at : at + size][:200]!r}")
        at += size + 1
    return columns


class NatsWorker:
    """A pull consumer with explicit acks; the server answers each ack."""

    _subjects = re.compile(rb"MSG [^ ]+ 1 (\$JS\.ACK\.[^ ]+) \d+\r\n").findall

    def __init__(self, box: str, inbox: bytes, batch: int) -> None:
        ask = b'{"batch":%d,"no_wait":true}' % batch
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{box}.{GROUP}".encode()
        self._batch, self._inbox = batch, inbox
        self._claim = b"PUB %b %b %d\r\n%b\r\n" % (subject, inbox, len(ask), ask)
        self.jobs: list[bytes] = []

    def claim(self) -> bytes:
        return self._claim

    def ack(self) -> bytes:
        return b"".join([b"PUB %b %b 4\r\n+ACK\r\n" % (job, self._inbox) for job in self.jobs])

    def is_claimed(self, text: bytes) -> bool:
        if b"NATS/1.0 4" in text:
            return True
        self.jobs = self._subjects(text)
        return (
            len(self.jobs) == self._batch and text.count(b'"tag":"') == self._batch and text.endswith(b"\r\n")
        )

    def is_acked(self, text: bytes) -> bool:
        return text.count(b"MSG ") == len(self.jobs) and text.endswith(b"0\r\n\r\n")


class RabbitWorker:
    """A consumer that gets no more jobs than it has not acked. An ack has no answer: the next jobs are it."""

    def __init__(self, batch: int) -> None:
        self._batch, self._tag = batch, 0
        self._frames = Confirms()
        self._seen_bytes = 0
        self.jobs: list[bytes] = []

    def claim(self) -> bytes:
        ack = amqp_ack(self._tag) if self._tag else b""
        self.jobs, self._frames, self._seen_bytes = [], Confirms(), 0
        return ack

    def ack(self) -> bytes:
        raise AssertionError("an ack goes with the next claim")

    def is_claimed(self, text: bytes) -> bool:
        for kind, payload in self._frames.frames(text[self._seen_bytes :]):
            if kind == 1:
                class_id, method_id = struct.unpack_from(">HH", payload)
                if (class_id, method_id) == (60, 21):  # the consumer was accepted
                    continue
                if (class_id, method_id) != (60, 60):
                    raise LoadFailed(f"{payload[:200]!r} instead of a delivery")
                (self._tag,) = struct.unpack_from(">Q", payload, 5 + payload[4])
            elif kind == 3:
                self.jobs.append(b"")
        self._seen_bytes = len(text)
        return len(self.jobs) == self._batch

    def is_acked(self, text: bytes) -> bool:
        raise AssertionError("an ack goes with the next claim")


class _Steps:
    """The next request of a worker; the load looks at nothing but `Step`."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.is_acking = False

    def __next__(self) -> Step:
        worker = self.worker
        self.is_acking = bool(worker.jobs) and not isinstance(worker, RabbitWorker)
        return Step(worker.ack(), len(worker.jobs)) if self.is_acking else Step(worker.claim(), 0)


class JobLoad(HttpLoad):
    """Connections to a peer, a worker on each."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._wire = wire_of(plan)
        super().__init__(plan)

    def _open(self, plan: dict[str, Any]) -> socket.socket:
        sock: socket.socket = self._wire.connect()
        if plan["peer"] == "rabbitmq":
            sock.sendall(amqp_prefetch(plan["batch"]))
            self._wire.wait(sock, Confirms(), 60, 11)
            sock.sendall(self._wire.consume_with_acks(plan["boxes"][0]))
        return sock

    def _steps_of(self, plan: dict[str, Any], index: int, count: int) -> _Steps:
        [box] = plan["boxes"]
        batch = plan["batch"]
        if plan["peer"] in ("redis", "valkey"):
            return _Steps(RedisWorker(box, index, batch))
        if plan["peer"] == "nats":
            return _Steps(NatsWorker(box, self._wire.inbox, batch))
        return _Steps(
            PostgresWorker(box, index, batch) if plan["peer"] == "postgresql" else RabbitWorker(batch)
        )

    def _receive(self, connection: Any) -> None:
        try:
            got = connection.sock.recv(256 * 1024)
        except BlockingIOError:
            return
        if not got:
            raise LoadFailed("the server closed a connection")
        connection.rest_text = text = connection.rest_text + got
        steps = connection.steps
        worker = steps.worker
        if b"\r\n-" in text or text.startswith(b"-"):
            raise LoadFailed(f"an error: {text[:200]!r}")
        if not (worker.is_acked(text) if steps.is_acking else worker.is_claimed(text)):
            return
        connection.rest_text = b""
        self._busy -= 1
        now_ns = monotonic_ns()
        if steps.is_acking:
            self._tally.add_untimed_answer(now_ns, connection.records)
            worker.jobs = []
        else:
            if not worker.jobs:
                self._tally.end(now_ns)
            delivered = len(worker.jobs) if isinstance(worker, RabbitWorker) else 0
            self._tally.add_answer(now_ns, now_ns - connection.sent_ns, delivered)
        self._send_next(connection)


def fill(wire: Any, box: str, count: int, record_bytes: int) -> None:
    """Append the jobs in batches of 1000, each acked."""
    with wire.connect([box] if isinstance(wire, Postgres) else []) as sock:
        [step] = wire.appends([box], 1000, record_bytes)
        waiting = wire.count(1000)
        for _ in range(max(1, count // 1000)):
            sock.sendall(step.request)
            waiting.expect(1000)
            until(sock, waiting)


def begin(wire: Any, box: str) -> None:
    """Create the group of workers, where a peer has one."""
    if isinstance(wire, Nats):
        with wire.connect() as sock:
            config = {"durable_name": GROUP, "ack_policy": "explicit", "max_ack_pending": 100_000}
            subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{box}.{GROUP}"
            wire.call(sock, subject, {"stream_name": box, "config": config})
    elif hasattr(wire, "_appendfsync"):
        wire.call("XGROUP", "CREATE", box, GROUP, "0", "MKSTREAM")
