"""The load generator, in a separate process: `python -m loadtests.generator < plan.json > result.json`.

It shares the cores with the server that it measures, so it does little: requests are built before the clock
starts, one epoll loop moves the bytes of all connections, and a response is parsed only as far as its status
and its end. The first response of every connection, and then one in `SAMPLE_EVERY`, is parsed in full as
JSON.

    plan       kind "http", "wire" or "watch", target, connections or messages in flight, requests
    warm-up    requests of the first `warm_up_s` are not counted
    measured   from the first response after that for `seconds`, or until `requests_max` or `bytes_max`
    drain      waits for outstanding responses, which are not counted

Closed loop: a connection sends its next request after the response. Only loopback and Unix sockets.

Bounds: at most `CONNECTIONS_MAX` connections, `SECONDS_MAX` seconds, `bytes_max` bytes sent, `LATENCIES_MAX`
latencies kept.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import select
import socket
import sys
from array import array
from collections import deque
from itertools import cycle, islice
from time import monotonic_ns
from typing import Any, NamedTuple

CONNECTIONS_MAX = 1024
SECONDS_MAX = 600.0
LATENCIES_MAX = 8_000_000
SAMPLE_EVERY = 1000
#: Longest wait for outstanding responses at the end, and longest time without a response before a failure.
DRAIN_S, SILENCE_S = 10.0, 30.0
_ANSWER_BYTES = 64 * 1024
#: The end of a `diff` response, which has its next seq, is in this many last bytes.
_TAIL_BYTES = 512

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_TICKS_S = os.sysconf("SC_CLK_TCK")
_content_length = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE).search


class LoadFailed(Exception):
    """The server did not respond as the plan expects."""


class Step(NamedTuple):
    """A request, its number of records, and a text that the end of its response must contain."""

    request: bytes
    records: int
    marker: bytes = b""


# ---------------------------------------------------------------------------------------------------
# Requests


def record_text(dice: random.Random, *, record_bytes: int = 0, data_bytes: int = 0) -> str:
    """Return one record of a request: a small event with a tag, of exactly this size."""
    data, tag = record_parts(dice, record_bytes=record_bytes, data_bytes=data_bytes)
    return f'{{"data":{data},"tag":"{tag}"}}'


def record_parts(dice: random.Random, *, record_bytes: int = 0, data_bytes: int = 0) -> tuple[str, str]:
    """Return `data` and tag of one record of this size."""
    user = dice.randrange(1000)
    data = (
        f'{{"user":{user},"path":"/v1/items/{dice.randrange(100_000)}"'
        f',"status":{dice.choice((200, 201, 404))},"took_ms":{dice.randrange(10_000) / 10},"note":"'
    )
    tag = f"user-{user}"
    around = len(tag) + len('{"data":,"tag":""}')
    room = data_bytes - len(data) if data_bytes else record_bytes - len(data) - around
    note = f"{dice.getrandbits(256):064x}" * max(2, room // 64 + 1)
    return f'{data}{note[: max(0, room - 2)]}"}}', tag


def append_body(seed: int, batch: int, *, record_bytes: int = 0, data_bytes: int = 0) -> bytes:
    dice = random.Random(seed)
    texts = (record_text(dice, record_bytes=record_bytes, data_bytes=data_bytes) for _ in range(batch))
    return ('{"records":[' + ",".join(texts) + "]}").encode()


def columns_message(box: str, seed: int, batch: int, **sizes: int) -> tuple[bytes, bytes]:
    """Return head and body of a message to a shard: the records of `append_body` as packed columns."""
    from streams.protocol import wire
    from streams.protocol.payloads.packed import pack

    dice = random.Random(seed)
    rows = [record_parts(dice, **sizes) for _ in range(batch)]
    columns = pack([box], [batch], [data.encode() for data, _ in rows], tag=[tag.encode() for _, tag in rows])
    return wire.head_encoder.encode(columns.head()), b"".join(columns.buffers())


def http_request(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def append_steps(plan: dict[str, Any]) -> list[Step]:
    """Return one request for each box; connections cycle through them."""
    query = "?" + plan["query"] if plan.get("query") else ""
    return [
        Step(
            http_request(
                f"/v0/boxes/{box}{query}",
                append_body(seed, plan["batch"], record_bytes=plan["record_bytes"]),
            ),
            plan["batch"],
        )
        for seed, box in enumerate(plan["boxes"])
    ]


def diff_steps(plan: dict[str, Any]) -> list[Step]:
    """Return requests for all pages of all boxes. Each box has `box_records` records and no holes."""
    limit = plan["limit"]
    return [
        Step(
            http_request(f"/v0/boxes/{box}/diff", b'{"from_seq":%d,"limit":%d}' % (from_seq, limit)),
            limit,
            b'"next_from_seq":%d,' % (from_seq + limit),
        )
        for box in plan["boxes"]
        for from_seq in range(0, plan["box_records"], limit)
    ]


# ---------------------------------------------------------------------------------------------------
# Counters


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of these processes so far, all threads, to 10 ms."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_S


def with_descendants(pids: list[int]) -> list[int]:
    """Return these processes and all that they, or their children, have started and that still run."""
    found = list(pids)
    for pid in found:
        try:
            with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            continue
    return found


def machine_cpu_s() -> float:
    """Return the CPU time of all processes of this machine so far."""
    with open("/proc/stat", "rb") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS_S


class Tally:
    """Counts and latencies of the measured time, and when it begins and ends."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.warm_up_ns = int(plan.get("warm_up_s", 0.0) * 1e9)
        self.measured_ns = int(min(plan["seconds"], SECONDS_MAX) * 1e9)
        self.requests_max = plan.get("requests_max") or 1 << 62
        self.bytes_max = plan.get("bytes_max") or 1 << 62
        self.processes: dict[str, list[int]] = {**plan.get("pids", {}), "generator": [os.getpid()]}
        #: The same with all their descendants, of servers that have a process for each connection.
        self.trees: dict[str, list[int]] = plan.get("trees", {})
        self.latencies = array("Q")
        self.requests = self.records = self.failures = self.sample_count = 0
        self.sent_requests = self.sent_bytes = 0
        self.first_failure = ""
        self.is_counting = self.is_over = False
        self.begun_ns = monotonic_ns()
        self.counting_ns = self.ended_ns = 0
        self._cpu: dict[str, float] = {}

    def _cpu_now(self) -> dict[str, float]:
        cpu = {name: cpu_s(pids) for name, pids in self.processes.items()}
        cpu |= {name: cpu_s(with_descendants(pids)) for name, pids in self.trees.items()}
        return cpu | {"machine": machine_cpu_s()}

    def add_answer(self, now_ns: int, latency_ns: int, records: int) -> None:
        if self.is_counting:
            self.requests += 1
            self.records += records
            if len(self.latencies) < LATENCIES_MAX:
                self.latencies.append(latency_ns)
            if now_ns - self.counting_ns >= self.measured_ns:
                self.end(now_ns)
        elif not self.is_over and now_ns - self.begun_ns >= self.warm_up_ns:
            self._cpu = self._cpu_now()
            self.is_counting = True
            self.counting_ns = monotonic_ns()

    def add_untimed_answer(self, now_ns: int, records: int) -> None:
        """Count a response without its latency."""
        if self.is_counting:
            self.requests += 1
            self.records += records

    def end(self, now_ns: int) -> None:
        if not self.is_over:
            self.is_over = True
            if self.is_counting:
                self.is_counting = False
                self.ended_ns = now_ns
                before, self._cpu = self._cpu, self._cpu_now()
                self._cpu = {name: seconds - before[name] for name, seconds in self._cpu.items()}

    def may_send(self, size: int) -> bool:
        if self.is_over:
            return False
        if self.sent_requests >= self.requests_max or self.sent_bytes + size > self.bytes_max:
            return False
        self.sent_requests += 1
        self.sent_bytes += size
        return True

    def add_failure(self, what: bytes) -> None:
        self.failures += 1
        if not self.first_failure:
            self.first_failure = what[:400].decode(errors="replace")

    def result(self) -> dict[str, Any]:
        seconds = (self.ended_ns - self.counting_ns) / 1e9 if self.ended_ns else 0.0
        cpu = dict(self._cpu)
        machine = cpu.pop("machine", 0.0)
        cpu["others"] = max(0.0, machine - sum(cpu.values()))
        return {
            "seconds": round(seconds, 3),
            "requests": self.requests,
            "records": self.records,
            "requests_per_s": round(self.requests / seconds, 1) if seconds else 0.0,
            "records_per_s": round(self.records / seconds, 1) if seconds else 0.0,
            "latency_ms": percentiles(self.latencies),
            "failures": self.failures,
            "first_failure": self.first_failure,
            "sampled": self.sample_count,
            "sent_bytes": self.sent_bytes,
            #: Cores in use by each during the measured time.
            "cores": {name: round(seconds_used / seconds, 3) for name, seconds_used in cpu.items()}
            if seconds
            else {},
            "cpu_us_per_request": {
                name: round(seconds_used / self.requests * 1e6, 1)
                for name, seconds_used in cpu.items()
                if name != "others" and self.requests
            },
        }


def percentiles(latencies_ns: array[int]) -> dict[str, float]:
    if not latencies_ns:
        return {}
    sorted_ns = sorted(latencies_ns)
    last = len(sorted_ns) - 1
    return {
        name: round(sorted_ns[round(last * share)] / 1e6, 4)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
    }


# ---------------------------------------------------------------------------------------------------
# HTTP


class _Connection:
    __slots__ = (
        *("answers", "buffer", "have", "marker", "need", "records", "rest", "rest_text", "sent_ns", "sock"),
        "steps",
    )

    def __init__(self, sock: socket.socket, steps: Any) -> None:
        self.sock = sock
        self.rest_text = b""
        self.steps = steps
        self.buffer = bytearray(_ANSWER_BYTES)
        self.have = self.need = self.answers = self.records = self.sent_ns = 0
        self.marker = b""
        self.rest: memoryview | None = None


class HttpLoad:
    """Keep-alive connections, one request in flight on each."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._steps: list[Step] = []
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._busy = 0
        count = min(plan["connections"], CONNECTIONS_MAX)
        for index in range(count):
            sock = self._open(plan)
            sock.setblocking(False)
            self._connections[sock.fileno()] = _Connection(sock, self._steps_of(plan, index, count))
            self._epoll.register(sock, _IN)
        self._tally = Tally(plan)

    def _open(self, plan: dict[str, Any]) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", plan["port"]), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _steps_of(self, plan: dict[str, Any], index: int, count: int) -> Any:
        """Return the requests of one connection: all cycle through the same list, from different starts."""
        steps = self._steps = self._steps or (
            diff_steps(plan) if plan["send"] == "diff" else append_steps(plan)
        )
        start = len(steps) * index // count if plan["send"] == "diff" else index % len(steps)
        return islice(cycle(steps), start, None)

    def run(self) -> dict[str, Any]:
        tally, connections = self._tally, self._connections
        for connection in connections.values():
            self._send_next(connection)
        poll, answer_s = self._epoll.poll, SILENCE_S
        while self._busy:
            events = poll(answer_s)
            if not events:
                if tally.is_over:
                    break
                raise LoadFailed(f"no answer for {SILENCE_S:.0f} s")
            for fd, mask in events:
                connection = connections[fd]
                if connection.rest is not None and mask & _OUT:
                    self._send_rest(connection)
                if mask & ~_OUT:
                    self._receive(connection)
            if tally.is_over:
                answer_s = DRAIN_S
        tally.end(monotonic_ns())
        return tally.result()

    def _send_next(self, connection: _Connection) -> None:
        request, connection.records, connection.marker = next(connection.steps)
        if not self._tally.may_send(len(request)):
            return
        self._busy += 1
        connection.sent_ns = monotonic_ns()
        try:
            sent_bytes = connection.sock.send(request)
        except BlockingIOError:
            sent_bytes = 0
        if sent_bytes < len(request):
            connection.rest = memoryview(request)[sent_bytes:]
            self._epoll.modify(connection.sock, _IN | _OUT)

    def _send_rest(self, connection: _Connection) -> None:
        rest = connection.rest
        assert rest is not None
        try:
            sent_bytes = connection.sock.send(rest)
        except BlockingIOError:
            return
        if sent_bytes < len(rest):
            connection.rest = rest[sent_bytes:]
        else:
            connection.rest = None
            self._epoll.modify(connection.sock, _IN)

    def _receive(self, connection: _Connection) -> None:
        buffer, have = connection.buffer, connection.have
        try:
            if have:
                got = connection.sock.recv_into(memoryview(buffer)[have:])
            else:
                got = connection.sock.recv_into(buffer)
        except BlockingIOError:
            return
        if not got:
            raise LoadFailed(f"the server closed a connection; it had sent {bytes(buffer[:have])[:400]!r}")
        have += got
        need = connection.need
        if not need:
            need = self._length(connection, have)
        if not need or have < need:
            connection.have, connection.need = have, need
            return
        if have > need:
            raise LoadFailed(f"{have - need} bytes more than the answer: {bytes(buffer[:have])[:400]!r}")
        now_ns = monotonic_ns()
        connection.have = connection.need = 0
        self._busy -= 1
        self._check(connection, need)
        self._on_answer(connection, now_ns)
        self._send_next(connection)

    def _on_answer(self, connection: _Connection, now_ns: int) -> None:
        self._tally.add_answer(now_ns, now_ns - connection.sent_ns, connection.records)

    def _length(self, connection: _Connection, have: int) -> int:
        """Return the size of the whole response, or 0 while its head is not complete."""
        buffer = connection.buffer
        end = buffer.find(b"\r\n\r\n", 0, have)
        if end < 0:
            return 0
        at = buffer.find(b"ength: ", 0, end) + 7  # of content-length, in any case
        need = end + 4 + int(buffer[at : buffer.find(b"\r", at, end + 2)])
        if not connection.answers:
            length = _content_length(bytes(buffer[: end + 2]))
            if length is None or need != end + 4 + int(length[1]):
                raise LoadFailed(f"cannot read the head {bytes(buffer[:end])!r}")
        if need > len(buffer):
            buffer.extend(bytes(need - len(buffer)))
        return need

    def _check(self, connection: _Connection, size: int) -> None:
        buffer = connection.buffer
        connection.answers += 1
        if not buffer.startswith(b"HTTP/1.1 2"):
            connection.records = 0
            self._tally.add_failure(bytes(buffer[:size]))
            return
        marker = connection.marker
        if marker and buffer.find(marker, max(0, size - _TAIL_BYTES), size) < 0:
            connection.records = 0
            self._tally.add_failure(bytes(buffer[max(0, size - _TAIL_BYTES) : size]))
            return
        if connection.answers % SAMPLE_EVERY == 1:
            self._tally.sample_count += 1
            answer = json.loads(buffer[buffer.find(b"\r\n\r\n") + 4 : size])
            count = len(answer["records"]) if marker else answer["count"]
            if count != connection.records:
                self._tally.add_failure(f"{count} records instead of {connection.records}".encode())


# ---------------------------------------------------------------------------------------------------
# The shard wire


class _Pipe:
    """One connection to a shard, with messages in flight."""

    def __init__(self, path: str, boxes: list[str], plan: dict[str, Any]) -> None:
        from streams.protocol import wire

        self.wire = wire
        self.sock = connect_unix(path)
        self.receiver = wire.Receiver()
        self.unsent: deque[bytes | memoryview] = deque()
        self.sent_ns: dict[int, int] = {}
        self.ids = 0
        self.is_blocked = False
        sizes = {name: plan.get(name, 0) for name in ("record_bytes", "data_bytes")}
        encode = wire.head_encoder.encode
        if plan.get("encoding") == "columns":
            self.op = wire.OP_PUT_COLUMNS
            requests = [columns_message(box, seed, plan["batch"], **sizes) for seed, box in enumerate(boxes)]
        else:
            self.op = wire.OP_APPEND
            requests = [
                (
                    encode(wire.RequestHead(box, plan.get("query", ""))),
                    append_body(seed, plan["batch"], **sizes),
                )
                for seed, box in enumerate(boxes)
            ]
        self.requests = cycle(requests)

    def acked_count(self, body: bytes) -> int:
        """Return the number of records that a reply confirms."""
        if self.op == self.wire.OP_APPEND:
            count: int = json.loads(body)["count"]
            return count
        from msgspec import msgpack

        from streams.protocol.messages.bulk import PutColumnsReply

        (result,) = msgpack.decode(body, type=PutColumnsReply).results
        return int(result.last_seq - result.first_seq + 1)


def connect_unix(path: str) -> socket.socket:
    """Return a connected non-blocking socket. Paths over 107 bytes go through the folder's descriptor."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        sock.connect(path if len(path) < 108 else f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    sock.setblocking(False)
    return sock


class WireLoad:
    """One connection to each shard of the plan, with `in_flight` messages on each."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._pipes = [_Pipe(path, boxes, plan) for path, boxes in plan["shards"]]
        self._batch = plan["batch"]
        self._in_flight = plan["in_flight"]
        self._epoll = select.epoll()
        self._by_fd = {pipe.sock.fileno(): pipe for pipe in self._pipes}
        for pipe in self._pipes:
            self._epoll.register(pipe.sock, _IN)
        self._tally = Tally(plan)

    def run(self) -> dict[str, Any]:
        tally = self._tally
        for pipe in self._pipes:
            self._fill(pipe)
        answer_s = SILENCE_S
        while any(pipe.sent_ns for pipe in self._pipes):
            events = self._epoll.poll(answer_s)
            if not events:
                if tally.is_over:
                    break
                raise LoadFailed(f"no answer for {SILENCE_S:.0f} s")
            for fd, mask in events:
                pipe = self._by_fd[fd]
                if mask & ~_OUT:
                    self._receive(pipe)
                self._fill(pipe)
            if tally.is_over:
                answer_s = DRAIN_S
        tally.end(monotonic_ns())
        return tally.result()

    def _fill(self, pipe: _Pipe) -> None:
        """Send new messages until `in_flight` are outstanding, in one system call if possible."""
        wire, unsent = pipe.wire, pipe.unsent
        while len(pipe.sent_ns) < self._in_flight:
            head, body = next(pipe.requests)
            if not self._tally.may_send(len(body)):
                break
            pipe.ids += 1
            unsent.append(wire.frame(wire.REQUEST, 0, pipe.op, pipe.ids, head, len(body)))
            unsent.append(body)
            pipe.sent_ns[pipe.ids] = monotonic_ns()
        while unsent:
            try:
                sent_bytes = pipe.sock.sendmsg(list(islice(unsent, 512)))
            except BlockingIOError:
                break
            while unsent and sent_bytes >= len(unsent[0]):
                sent_bytes -= len(unsent.popleft())
            if sent_bytes:
                unsent[0] = memoryview(unsent[0])[sent_bytes:]
        if bool(unsent) != pipe.is_blocked:
            pipe.is_blocked = bool(unsent)
            self._epoll.modify(pipe.sock, _IN | _OUT if unsent else _IN)

    def _receive(self, pipe: _Pipe) -> None:
        try:
            got = pipe.sock.recv_into(pipe.receiver.space())
        except BlockingIOError:
            return
        if not got:
            raise LoadFailed("the shard closed the connection")
        tally = self._tally
        for message in pipe.receiver.parse(got):
            now_ns = monotonic_ns()
            sent_ns = pipe.sent_ns.pop(message.id)
            if message.flags & pipe.wire.FAILED:
                tally.add_failure(message.body)
                continue
            tally.add_answer(now_ns, now_ns - sent_ns, self._batch)
            if message.id % SAMPLE_EVERY == 1:
                tally.sample_count += 1
                if pipe.acked_count(message.body) != self._batch:
                    tally.add_failure(message.body)


def load_of(plan: dict[str, Any]) -> Any:
    if plan["kind"] == "watch":
        from loadtests.watching import WatchLoad

        return WatchLoad(plan)
    if plan["kind"] == "workers":
        from loadtests.workers import WorkLoad

        return WorkLoad(plan)
    if plan["kind"] == "actors":
        from loadtests.actors import ActorLoad

        return ActorLoad(plan)
    if plan["kind"] == "peer":
        from loadtests.peers.load import PeerLoad

        return PeerLoad(plan)
    if plan["kind"] == "jobs":
        from loadtests.peers.jobs import JobLoad

        return JobLoad(plan)
    if plan["kind"] == "kafka":
        from loadtests.peers.kafka import KafkaLoad

        return KafkaLoad(plan)
    if plan["kind"] == "deliver":
        from loadtests.peers.load import DeliverLoad

        return DeliverLoad(plan)
    return HttpLoad(plan) if plan["kind"] == "http" else WireLoad(plan)


def main() -> int:
    plan = json.load(sys.stdin)
    gc.disable()
    try:
        load = load_of(plan)
        gc.freeze()
        result = load.run()
    except (LoadFailed, OSError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    # Import by name: `LoadFailed` must be the class that other modules raise.
    from loadtests import generator

    sys.exit(generator.main())
