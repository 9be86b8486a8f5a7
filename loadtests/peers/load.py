"""The load generator with the protocol of a peer.

`PeerLoad` has one write or page in flight on each connection. `DeliverLoad` sends one record at a time from a
writer to a waiting reader.
"""

from __future__ import annotations

import socket
from itertools import cycle, islice
from time import monotonic_ns
from typing import Any

from loadtests.generator import HttpLoad, LoadFailed, Tally
from loadtests.peers.kafka import Kafka
from loadtests.peers.wires import Amqp, Confirms, Nats, Postgres, Redis, records, resp, until

_RECEIVE = 256 * 1024


def wire_of(plan: dict[str, Any]) -> Any:
    port, setting = plan["port"], plan["setting"]
    if plan["peer"] in ("redis", "valkey"):
        return Redis(port, setting)
    if plan["peer"] == "kafka":
        return Kafka(port)
    if plan["peer"] == "nats":
        return Nats(port)
    return Amqp(port, setting) if plan["peer"] == "rabbitmq" else Postgres(port, setting)


class PeerLoad(HttpLoad):
    """Loads a peer with appends or reads, as `send` in the plan says."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._wire = wire_of(plan)
        self._counts: dict[int, Any] = {}
        super().__init__(plan)

    def _open(self, plan: dict[str, Any]) -> socket.socket:
        sock: socket.socket = self._wire.connect(plan["boxes"])
        is_read = plan["send"] == "read"
        self._counts[sock.fileno()] = self._wire.read_count() if is_read else self._wire.count(plan["batch"])
        return sock

    def _steps_of(self, plan: dict[str, Any], index: int, count: int) -> Any:
        if plan["send"] == "read":
            steps = self._wire.reads(plan["boxes"], plan["box_records"], plan["limit"])
        else:
            steps = self._wire.appends(plan["boxes"], plan["batch"], plan["record_bytes"])
        return islice(cycle(steps), len(steps) * index // count, None)

    def _send_next(self, connection: Any) -> None:
        busy = self._busy
        super()._send_next(connection)
        if self._busy > busy:
            self._counts[connection.sock.fileno()].expect(connection.records)

    def _receive(self, connection: Any) -> None:
        try:
            got = connection.sock.recv_into(connection.buffer)
        except BlockingIOError:
            return
        if not got:
            raise LoadFailed("the server closed a connection")
        count = self._counts[connection.sock.fileno()]
        count.feed(bytes(memoryview(connection.buffer)[:got]))
        if count.missing > 0:
            return
        if count.missing < 0:
            raise LoadFailed(
                f"the response has more records than requested: {bytes(connection.buffer[:got])[-200:]!r}"
            )
        self._busy -= 1
        self._on_answer(connection, monotonic_ns())
        self._send_next(connection)


class DeliverLoad:
    """Measures one record at a time, from the first byte of its write until the reader has it.

    The next write follows when the response to this one is there, too.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._tally = Tally(plan)
        self._wire = wire_of(plan)
        [self._box] = plan["boxes"]
        [(self._tag, self._data)] = records(0, 1, plan["record_bytes"])
        self._writer = self._wire.connect(plan["boxes"])
        # Build the request before the next connection: NATS replies to the inbox of the last one.
        [step] = self._wire.appends(plan["boxes"], 1, plan["record_bytes"])
        self._request, self._count = step.request, self._wire.count(1)
        self._reader = self._wire.connect()
        self._once = getattr(self, f"_once_{plan['peer']}")
        getattr(self, f"_begin_{plan['peer']}", lambda: None)()

    def run(self) -> dict[str, Any]:
        tally = self._tally
        while not tally.is_over and tally.may_send(len(self._request)):
            took_ns = self._once()
            self._count.expect(1)
            until(self._writer, self._count)
            tally.add_answer(monotonic_ns(), took_ns, 1)
        tally.end(monotonic_ns())
        return tally.result()

    def _wait_for(self, marker: bytes) -> bytes:
        received_bytes = b""
        while marker not in received_bytes:
            data = self._reader.recv(_RECEIVE)
            if not data:
                raise LoadFailed("the server closed the reader")
            received_bytes += data
        return received_bytes

    def _delivery_ns(self, marker: bytes) -> int:
        sent_ns = monotonic_ns()
        self._writer.sendall(self._request)
        self._wait_for(marker)
        return monotonic_ns() - sent_ns

    # Redis: the reader blocks in XREAD.

    _last_id = b"0"

    def _once_redis(self) -> int:
        self._reader.sendall(resp("XREAD", "BLOCK", "30000", "STREAMS", self._box, self._last_id))
        sent_ns = monotonic_ns()
        self._writer.sendall(self._request)
        reply = self._wait_for(self._data.encode() + b"\r\n")
        took_ns = monotonic_ns() - sent_ns
        # *1 *2 $ box *1 *2 $ id …: the id is the fourth line after the name of the box.
        self._last_id = reply.split(b"\r\n")[7]
        return took_ns

    _once_valkey = _once_redis

    # JetStream: a consumer that pushes to the reader's inbox.

    def _begin_nats(self) -> None:
        self._reader.sendall(b"SUB push.bench 2\r\n")
        config = {"deliver_subject": "push.bench", "ack_policy": "none", "deliver_policy": "all"}
        body = {"stream_name": self._box, "config": config}
        self._wire.call(self._reader, f"$JS.API.CONSUMER.CREATE.{self._box}", body)

    def _once_nats(self) -> int:
        return self._delivery_ns(self._data.encode())

    # RabbitMQ: a consumer of the queue, without acks.

    def _begin_rabbitmq(self) -> None:
        self._reader.sendall(Amqp.consume(self._box))
        self._wire.wait(self._reader, Confirms(), 60, 21)

    def _once_rabbitmq(self) -> int:
        return self._delivery_ns(self._data.encode())

    # PostgreSQL: the write notifies, and the reader selects the new rows.

    _last_seq = 0

    def _begin_postgresql(self) -> None:
        self._reader.sendall(Postgres.query(f'LISTEN "{self._box}"'))
        self._wait_for(Postgres.READY)
        insert = f"INSERT INTO \"{self._box}\" (tag, data) VALUES ('{self._tag}', '{self._data}')"
        self._request = Postgres.query(f'{insert}; NOTIFY "{self._box}"')

    def _once_postgresql(self) -> int:
        sent_ns = monotonic_ns()
        self._writer.sendall(self._request)
        self._wait_for(self._box.encode() + b"\x00")
        after = f"WHERE seq > {self._last_seq} ORDER BY seq LIMIT 1000"
        select = f'SELECT seq, ts, tag, data FROM "{self._box}" {after}'
        self._reader.sendall(Postgres.query(select))
        self._wait_for(Postgres.READY)
        self._last_seq += 1
        return monotonic_ns() - sent_ns
