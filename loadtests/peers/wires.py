"""The protocols of peers as bytes: the start of a connection, a write of many records, a page, a response.

Each uses the fastest way of its own documentation: Redis pipelines XADD, JetStream publishes without waiting
for each ack, RabbitMQ uses publisher confirms, PostgreSQL uses COPY for batches and a prepared INSERT for
single records. Requests are built before the clock starts and responses are only counted, as for streams.

A record is the record of our own rows: about 110 bytes with its tag. Each box is a stream, a queue or a
table.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

from loadtests.generator import LoadFailed, Step, record_text

TIMEOUT_S: Final = 30.0
_RECEIVE: Final = 64 * 1024


def records(seed: int, count: int, record_bytes: int) -> list[tuple[str, str]]:
    """Return (tag, data) of this many records."""
    dice = random.Random(seed)
    tagged_records = []
    for _ in range(count):
        text = record_text(dice, record_bytes=record_bytes)
        data, _, tag = text.rpartition(',"tag":"')
        tagged_records.append((tag[:-2], data.removeprefix('{"data":')))
    return tagged_records


class Count:
    """Counts a marker in a stream of bytes, across chunks, and knows how many are still missing."""

    def __init__(self, marker: bytes, *, each: int = 1, error: bytes = b"") -> None:
        self._marker, self._each, self._error = marker, each, error
        self._rest = b""
        self.missing = 0

    def expect(self, records: int) -> None:
        self.missing += records * self._each

    def feed(self, data: bytes) -> None:
        text = self._rest + data
        if self._error and self._error in text:
            raise LoadFailed(f"an error: {text[text.find(self._error) :][:200]!r}")
        self.missing -= text.count(self._marker)
        keep = len(self._marker) - 1
        # The end of a counted marker must not start another one.
        self._rest = text[-keep:] if keep and not text.endswith(self._marker) else b""


class Wire(Protocol):
    """One peer. `prepare` and `remove` are called once; for each connection `connect`, then what it sends."""

    def prepare(self, boxes: list[str]) -> None: ...
    def remove(self, boxes: list[str]) -> None: ...
    def connect(self, boxes: list[str]) -> socket.socket: ...
    def appends(self, boxes: list[str], batch: int, record_bytes: int) -> list[Step]: ...
    def count(self, batch: int) -> Any: ...


def dial(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def until(sock: socket.socket, count: Any) -> None:
    while count.missing > 0:
        data = sock.recv(_RECEIVE)
        if not data:
            raise LoadFailed("the server closed a connection")
        count.feed(data)


# ---------------------------------------------------------------------------------------------------
# Redis Streams


def resp(*words: str | bytes) -> bytes:
    texts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)


class Redis:
    """`appendfsync` is `everysec` or `always`."""

    LINES_OF_XADD = 2
    #: Of a record in the answer to XRANGE: its head, its id, the head of its fields, two names, two values.
    LINES_OF_RECORD = 12

    def __init__(self, port: int, appendfsync: str) -> None:
        self._port, self._appendfsync = port, appendfsync

    def connect(self, boxes: list[str] | None = None) -> socket.socket:
        return dial(self._port)

    def call(self, *words: str) -> None:
        with self.connect() as sock:
            sock.sendall(resp(*words))
            count = Count(b"\n", error=b"-ERR")
            count.expect(1)
            until(sock, count)

    def prepare(self, boxes: list[str]) -> None:
        self.call("CONFIG", "SET", "appendfsync", self._appendfsync)
        self.remove(boxes)

    def remove(self, boxes: list[str]) -> None:
        self.call("DEL", *boxes)

    def appends(self, boxes: list[str], batch: int, record_bytes: int) -> list[Step]:
        return [
            Step(
                b"".join(
                    resp("XADD", box, "*", "tag", tag, "data", data)
                    for tag, data in records(seed, batch, record_bytes)
                ),
                batch,
            )
            for seed, box in enumerate(boxes)
        ]

    def count(self, batch: int) -> Count:
        return Count(b"\n", each=self.LINES_OF_XADD, error=b"-ERR")

    def fill(self, boxes: list[str], each: int, record_bytes: int) -> None:
        """Records whose ids are 1-1, 1-2 …"""
        with self.connect() as sock:
            for box in boxes:
                for first in range(1, each, 1000):
                    lines = records(first, 1000, record_bytes)
                    sock.sendall(
                        b"".join(
                            resp("XADD", box, f"1-{number}", "tag", tag, "data", data)
                            for number, (tag, data) in enumerate(lines, first)
                        )
                    )
                    count = self.count(1000)
                    count.expect(1000)
                    until(sock, count)

    def reads(self, boxes: list[str], each: int, limit: int) -> list[Step]:
        return [
            Step(resp("XRANGE", box, f"1-{first}", "+", "COUNT", str(limit)), limit)
            for box in boxes
            for first in range(1, each, limit)
        ]

    def read_count(self) -> Count:
        # And one more line for the head of the whole answer.
        return _Page(b"\n", each=self.LINES_OF_RECORD, error=b"-ERR")


class _Page(Count):
    def expect(self, records: int) -> None:
        super().expect(records)
        self.missing += 1


# ---------------------------------------------------------------------------------------------------
# NATS JetStream


class Nats:
    """One stream a box, in files. Acks come to an inbox of the connection's own."""

    def __init__(self, port: int) -> None:
        self._port = port

    def connect(self, boxes: list[str] | None = None) -> socket.socket:
        sock = dial(self._port)
        #: Of the newest connection: what it sends is made right after it.
        self.inbox = b"_INBOX.%x" % random.getrandbits(64)
        sock.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nPING\r\n' % self.inbox)
        count = Count(b"PONG\r\n", error=b"-ERR")
        count.expect(1)
        until(sock, count)
        return sock

    def call(self, sock: socket.socket, subject: str, body: Any) -> None:
        text = json.dumps(body).encode()
        sock.sendall(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), self.inbox, len(text), text))
        count = Count(b"}\r\n", error=b'"error"')
        count.expect(1)
        until(sock, count)

    def prepare(self, boxes: list[str]) -> None:
        with self.connect() as sock:
            for box in boxes:
                config = {"name": box, "subjects": [f"to.{box}"], "storage": "file", "num_replicas": 1}
                self.call(sock, f"$JS.API.STREAM.CREATE.{box}", config)

    def remove(self, boxes: list[str]) -> None:
        with self.connect() as sock:
            for box in boxes:
                self.call(sock, f"$JS.API.STREAM.DELETE.{box}", {})

    def appends(self, boxes: list[str], batch: int, record_bytes: int) -> list[Step]:
        steps = []
        for seed, box in enumerate(boxes):
            texts = [
                f'{{"data":{data},"tag":"{tag}"}}'.encode()
                for tag, data in records(seed, batch, record_bytes)
            ]
            head = b"PUB to.%b %b" % (box.encode(), self.inbox)
            steps.append(
                Step(b"".join(b"%b %d\r\n%b\r\n" % (head, len(text), text) for text in texts), batch)
            )
        return steps

    def count(self, batch: int) -> Count:
        return Count(b'"seq":', error=b'"error"')

    def fill(self, boxes: list[str], each: int, record_bytes: int) -> None:
        with self.connect() as sock:
            for box in boxes:
                [step] = self.appends([box], 1000, record_bytes)
                for _ in range(each // 1000):
                    sock.sendall(step.request)
                    count = self.count(1000)
                    count.expect(1000)
                    until(sock, count)

    #: A consumer reads its stream once, so each connection creates this many consumers for each box.
    PASSES = 6

    def reads(self, boxes: list[str], each: int, limit: int) -> list[Step]:
        ask = b'{"batch":%d,"no_wait":true}' % limit
        steps = []
        with dial(self._port) as sock:
            inbox = b"_INBOX.%x" % random.getrandbits(64)
            sock.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\n' % inbox)
            for _ in range(self.PASSES):
                for box in boxes:
                    name = f"r{random.getrandbits(64):x}"
                    config = {
                        "stream_name": box,
                        "config": {
                            "durable_name": name,
                            "ack_policy": "none",
                            "deliver_policy": "all",
                            "max_waiting": 512,
                        },
                    }
                    text = json.dumps(config).encode()
                    subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{box}.{name}".encode()
                    sock.sendall(b"PUB %b %b %d\r\n%b\r\n" % (subject, inbox, len(text), text))
                    count = Count(b"}\r\n", error=b'"error":')
                    count.expect(1)
                    until(sock, count)
                    subject = f"$JS.API.CONSUMER.MSG.NEXT.{box}.{name}".encode()
                    request = b"PUB %b %b %d\r\n%b\r\n" % (subject, self.inbox, len(ask), ask)
                    steps += [Step(request, limit)] * (each // limit)
        return steps

    def read_count(self) -> Count:
        return Count(b'"tag":"', error=b"NATS/1.0 4")


# ---------------------------------------------------------------------------------------------------
# RabbitMQ, AMQP 0-9-1

_FRAME = struct.Struct(">BHI")
_END = b"\xce"
_PERSISTENT = 2


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, channel, len(payload)) + payload + _END


def _method(channel: int, class_id: int, method_id: int, arguments: bytes) -> bytes:
    return _frame(1, channel, struct.pack(">HH", class_id, method_id) + arguments)


class Confirms:
    """Reads frames; counts records confirmed, one by one or up to a number."""

    def __init__(self) -> None:
        self._buffer = b""
        self._next = 1
        self._out: set[int] = set()

    @property
    def missing(self) -> int:
        return len(self._out)

    def expect(self, records: int) -> None:
        self._out.update(range(self._next, self._next + records))
        self._next += records

    def feed(self, data: bytes) -> None:
        for _, payload in self.frames(data):
            class_id, method_id = struct.unpack_from(">HH", payload)
            if (class_id, method_id) == (60, 80):
                tag, is_multiple = struct.unpack_from(">QB", payload, 4)
                if is_multiple:
                    self._out = {each for each in self._out if each > tag}
                else:
                    self._out.discard(tag)
            elif (class_id, method_id) in ((60, 120), (20, 40), (10, 50)):
                raise LoadFailed(f"refused: {payload[:200]!r}")

    def frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Kind and payload of each whole frame; heartbeats are passed over."""
        buffer, at = self._buffer + data, 0
        while len(buffer) - at >= _FRAME.size:
            kind, _, size = _FRAME.unpack_from(buffer, at)
            if len(buffer) - at < _FRAME.size + size + 1:
                break
            begin = at + _FRAME.size
            at = begin + size + 1
            if kind != 8:
                yield kind, buffer[begin : begin + size]
        self._buffer = buffer[at:]


def amqp_prefetch(count: int) -> bytes:
    return _method(1, 60, 10, struct.pack(">IHB", 0, count, 0))


def amqp_ack(tag: int) -> bytes:
    """The ack of a delivery and of all before it."""
    return _method(1, 60, 80, struct.pack(">QB", tag, 1))


class Amqp:
    """A queue a box, `quorum` or `stream`, messages persistent, every one confirmed."""

    def __init__(self, port: int, queue_type: str) -> None:
        self._port, self._type = port, queue_type

    def connect(self, boxes: list[str] | None = None) -> socket.socket:
        sock = dial(self._port)
        sock.sendall(b"AMQP\x00\x00\x09\x01")
        answers = Confirms()
        self.wait(sock, answers, 10, 10)
        login = _long(b"") + _short("PLAIN") + _long(b"\x00guest\x00guest") + _short("en_US")
        sock.sendall(_method(0, 10, 11, login))
        tune = self.wait(sock, answers, 10, 30)
        sock.sendall(_method(0, 10, 31, tune[4:10] + b"\x00\x00"))
        sock.sendall(_method(0, 10, 40, _short("/") + b"\x00\x00"))
        self.wait(sock, answers, 10, 41)
        sock.sendall(_method(1, 20, 10, b"\x00"))
        self.wait(sock, answers, 20, 11)
        sock.sendall(_method(1, 85, 10, b"\x00"))
        self.wait(sock, answers, 85, 11)
        return sock

    def wait(self, sock: socket.socket, answers: Confirms, class_id: int, method_id: int) -> bytes:
        """The payload of the next frame, which must be of that method."""
        while True:
            for _, payload in answers.frames(sock.recv(_RECEIVE)):
                if struct.unpack_from(">HH", payload) != (class_id, method_id):
                    raise LoadFailed(f"{payload[:200]!r} instead of {class_id}.{method_id}")
                return payload

    def declare(self, sock: socket.socket, box: str) -> None:
        table = _short("x-queue-type") + b"S" + _long(self._type.encode())
        sock.sendall(_method(1, 50, 10, b"\x00\x00" + _short(box) + b"\x02" + _long(table)))
        self.wait(sock, Confirms(), 50, 11)

    def prepare(self, boxes: list[str]) -> None:
        with self.connect() as sock:
            for box in boxes:
                self.declare(sock, box)

    def remove(self, boxes: list[str]) -> None:
        with self.connect() as sock:
            for box in boxes:
                sock.sendall(_method(1, 50, 40, b"\x00\x00" + _short(box) + b"\x00"))
                self.wait(sock, Confirms(), 50, 41)

    @staticmethod
    def publish(box: str, text: bytes) -> bytes:
        head = struct.pack(">HHQHB", 60, 0, len(text), 1 << 12, _PERSISTENT)
        to = _method(1, 60, 40, b"\x00\x00" + _short("") + _short(box) + b"\x00")
        return to + _frame(2, 1, head) + _frame(3, 1, text)

    @staticmethod
    def consume(box: str) -> bytes:
        return _method(1, 60, 20, b"\x00\x00" + _short(box) + _short("c") + b"\x02" + _long(b""))

    @staticmethod
    def consume_with_acks(box: str) -> bytes:
        return _method(1, 60, 20, b"\x00\x00" + _short(box) + _short("w") + b"\x00" + _long(b""))

    def appends(self, boxes: list[str], batch: int, record_bytes: int) -> list[Step]:
        return [
            Step(
                b"".join(
                    self.publish(box, f'{{"data":{data},"tag":"{tag}"}}'.encode())
                    for tag, data in records(seed, batch, record_bytes)
                ),
                batch,
            )
            for seed, box in enumerate(boxes)
        ]

    def count(self, batch: int) -> Confirms:
        return Confirms()


# ---------------------------------------------------------------------------------------------------
# PostgreSQL, protocol 3


def _message(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack(">I", len(payload) + 4) + payload


def _text(value: str) -> bytes:
    return struct.pack(">I", len(value.encode())) + value.encode()


class Postgres:
    """A table a box. `synchronous_commit` is `on` or `off`."""

    READY = b"Z\x00\x00\x00\x05I"
    READY_IN_TRANSACTION = b"Z\x00\x00\x00\x05T"

    def __init__(self, port: int, synchronous_commit: str) -> None:
        self._port, self._commit = port, synchronous_commit

    def connect(self, boxes: list[str] | None = None) -> socket.socket:
        sock = dial(self._port)
        words = ["user", "streams", "database", "postgres"]
        words += ["options", f"-c synchronous_commit={self._commit}"]
        payload = struct.pack(">I", 196608) + b"".join(word.encode() + b"\x00" for word in words) + b"\x00"
        sock.sendall(struct.pack(">I", len(payload) + 4) + payload)
        self._ready(sock)
        for box in boxes or ():
            parse = b'%b\x00INSERT INTO "%b" (tag, data) VALUES ($1, $2)\x00\x00\x00'
            sock.sendall(_message(b"P", parse % (box.encode(), box.encode())) + _message(b"S", b""))
            self._ready(sock)
        return sock

    def _ready(self, sock: socket.socket) -> None:
        count = self.count(1)
        count.expect(1)
        until(sock, count)

    def call(self, *statements: str) -> None:
        with self.connect() as sock:
            for statement in statements:
                sock.sendall(self.query(statement))
                self._ready(sock)

    @staticmethod
    def query(statement: str) -> bytes:
        return _message(b"Q", statement.encode() + b"\x00")

    def prepare(self, boxes: list[str]) -> None:
        columns = (
            "seq bigserial PRIMARY KEY, ts timestamptz NOT NULL DEFAULT now(), tag text, data json NOT NULL"
        )
        self.call(*(f'CREATE TABLE "{box}" ({columns})' for box in boxes))

    def remove(self, boxes: list[str]) -> None:
        self.call(*(f'DROP TABLE IF EXISTS "{box}"' for box in boxes))

    def appends(self, boxes: list[str], batch: int, record_bytes: int) -> list[Step]:
        make = self.copy if batch > 1 else self.insert
        return [Step(make(box, records(seed, batch, record_bytes)), batch) for seed, box in enumerate(boxes)]

    @staticmethod
    def copy(box: str, lines: list[tuple[str, str]]) -> bytes:
        rows = "".join(f"{tag}\t{data}\n" for tag, data in lines).encode()
        begin = Postgres.query(f'COPY "{box}" (tag, data) FROM STDIN')
        return begin + _message(b"d", rows) + _message(b"c", b"")

    @staticmethod
    def insert(box: str, lines: list[tuple[str, str]]) -> bytes:
        """By the statement that every connection has prepared under the name of the box."""
        [(tag, data)] = lines
        bind = b"\x00%b\x00\x00\x00\x00\x02" % box.encode() + _text(tag) + _text(data) + b"\x00\x00"
        return _message(b"B", bind) + _message(b"E", b"\x00\x00\x00\x00\x00") + _message(b"S", b"")

    def count(self, batch: int) -> Count:
        return _Whole(self.READY, error=b"SERROR\x00")

    def fill(self, boxes: list[str], each: int, record_bytes: int) -> None:
        with self.connect() as sock:
            for box in boxes:
                for first in range(0, each, 1000):
                    sock.sendall(self.copy(box, records(first, 1000, record_bytes)))
                    self._ready(sock)
        self.call(*(f'VACUUM ANALYZE "{box}"' for box in boxes))

    def reads(self, boxes: list[str], each: int, limit: int) -> list[Step]:
        select = 'SELECT seq, ts, tag, data FROM "{}" WHERE seq > {} ORDER BY seq LIMIT {}'
        return [
            Step(self.query(select.format(box, after, limit)), limit)
            for box in boxes
            for after in range(0, each, limit)
        ]

    def read_count(self) -> Count:
        return _Whole(self.READY, error=b"SERROR\x00")


class _Whole(Count):
    """One answer, however many records it is for."""

    def expect(self, records: int) -> None:
        self.missing += 1
