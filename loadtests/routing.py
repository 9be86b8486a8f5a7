"""Measures routers: the latency of one hop, and the copies a second of a fan-out.

A hop runs from the first byte of an append to the source until a long poll at the destination has its whole
response, as a client sees it. Both ends are plain blocking sockets with prebuilt requests. Rows with `local`
have both boxes on one shard, the others have them on two (chosen by the slots of their names).
"""

from __future__ import annotations

import json
import random
import re
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from time import monotonic, monotonic_ns
from typing import Any, Final

from loadtests.generator import http_request, percentiles, record_text
from loadtests.rows import RECORD_BYTES, Bench, Case, CaseFailed, Measurement, Row, by_shard, call
from streams.testing import Server

FAN_OUT = 8
HOP = "append at a source to its copy at a reader, other shard, "
LOCAL_HOP = "append at a source to its copy at a reader, same shard, "
#: Longest wait for copies after the last write.
CATCH_UP_S = 60.0
_content_length = re.compile(rb"content-length: (\d+)\r\n", re.IGNORECASE).search


class Connection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        self._sock.sendall(request)

    def receive(self) -> bytes:
        """Return the body of the next response, which must be a success."""
        text = b""
        while b"\r\n\r\n" not in text:
            text += self._more()
        head, _, body = text.partition(b"\r\n\r\n")
        length = _content_length(head + b"\r\n")
        if not head.startswith(b"HTTP/1.1 20") or length is None:
            raise CaseFailed(f"a request was answered {text[:400]!r}")
        while len(body) < int(length[1]):
            body += self._more()
        return body

    def _more(self) -> bytes:
        piece = self._sock.recv(65536)
        if not piece:
            raise CaseFailed("the server closed a connection")
        return piece

    def close(self) -> None:
        self._sock.close()


@contextmanager
def routed_boxes(
    server: Server, count: int, durability: str, *, is_local: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Create a source and `count` destinations: all on its shard, or on all shards in turn, beginning with
    another one if there is one."""
    names = [f"routed-{number}" for number in range(16 * (count + 1))]
    groups = [list(boxes) for _, boxes in by_shard(server, names)]
    source = groups[0].pop()
    groups = groups[:1] if is_local else [*groups[1:], groups[0]]
    dests = [name for turn in zip_longest(*groups) for name in turn if name is not None][:count]
    for box in (source, *dests):
        call(server, "PUT", f"/v0/boxes/{box}", {"durability": durability})
    for box in dests:
        call(server, "PUT", f"/v0/routers/{box}", {"source": source, "dest": box})
    try:
        yield source, dests
    finally:
        for box in (source, *dests):
            call(server, "DELETE", f"/v0/boxes/{box}")


def hops(bench: Bench, case: Case) -> Measurement:
    server = bench.server()
    body = ('{"records":[' + record_text(random.Random(1), record_bytes=RECORD_BYTES) + "]}").encode()
    latencies = array("Q")
    durability, is_local = case.plan["durability"], case.plan["is_local"]
    with routed_boxes(server, 1, durability, is_local=is_local) as (source, (dest,)):
        append = http_request(f"/v0/boxes/{source}", body)
        writer, reader = Connection(server.port), Connection(server.port)
        sizes = bench.sizes
        cursor = 0
        began_s = monotonic()
        while monotonic() - began_s < sizes.seconds + sizes.warm_up_s:
            wait = b'{"from_seq":%d,"wait_ms":20000}' % cursor
            reader.send(http_request(f"/v0/boxes/{dest}/diff", wait))
            sent_ns = monotonic_ns()
            writer.send(append)
            writer.receive()
            cursor = json.loads(reader.receive())["next_from_seq"]
            if monotonic() - began_s >= sizes.warm_up_s:
                latencies.append(monotonic_ns() - sent_ns)
        writer.close()
        reader.close()
    latency_ms = percentiles(latencies)
    figures = {row.key: latency_ms[row.key[-3:]] for row in case.rows}
    return Measurement(figures, {"hops": len(latencies), "latency_ms": latency_ms})


def fan_out(bench: Bench, case: Case) -> Measurement:
    """Measure the time from the first append until the last copy is stored."""
    server = bench.server()
    batches = max(1, round(bench.sizes.seconds * 50))
    plan = dict(case.plan)
    is_local = plan.pop("is_local")
    with routed_boxes(server, FAN_OUT, "disk", is_local=is_local) as (source, dests):
        began_s = monotonic()
        result = bench.load(
            server,
            kind="http",
            send="append",
            port=server.port,
            boxes=[source],
            requests_max=batches,
            seconds=60,
            warm_up_s=0,
            **plan,
        )
        written_s = monotonic() - began_s
        head = call(server, "GET", f"/v0/boxes/{source}")["head_seq"]
        for box in dests:
            wait_for(server, box, head)
        seconds = monotonic() - began_s
        copies = head * len(dests)
    result |= {"copies": copies, "copied_s": round(seconds, 3), "written_s": round(written_s, 3)}
    return Measurement({case.rows[0].key: round(copies / seconds, 1)}, result)


def wait_for(server: Server, box: str, head: int) -> None:
    deadline = monotonic() + CATCH_UP_S
    cursor = call(server, "GET", f"/v0/boxes/{box}")["head_seq"]
    while cursor < head:
        if monotonic() > deadline:
            raise CaseFailed(f"{box} has {cursor} of {head} copies after {CATCH_UP_S:.0f} s")
        question: dict[str, Any] = {"from_seq": cursor, "wait_ms": 1000, "limit": 1, "include_data": False}
        call(server, "POST", f"/v0/boxes/{box}/diff", question)
        cursor = call(server, "GET", f"/v0/boxes/{box}")["head_seq"]


def _hops(kind: str, title: str, p50: tuple[float, float] | None, *, durability: str, is_local: bool) -> Case:
    return Case(
        (
            Row(
                f"router-{kind}-{durability}-p50",
                f"{title}{durability}, p50",
                "ms",
                *(p50 or (None, None)),
                True,
            ),
            Row(f"router-{kind}-{durability}-p99", f"{title}{durability}, p99", "ms", less_is_better=True),
        ),
        hops,
        {"durability": durability, "is_local": is_local},
    )


ROUTER_CASES: Final[tuple[Case, ...]] = (
    _hops("local-hop", LOCAL_HOP, (0.5, 0.3), durability="disk", is_local=True),
    _hops("local-hop", LOCAL_HOP, None, durability="fsync", is_local=True),
    _hops("hop", HOP, (1.5, 0.8), durability="disk", is_local=False),
    _hops("hop", HOP, None, durability="fsync", is_local=False),
    Case(
        (
            Row(
                "router-local-fan-out-8", "copies through a fan-out of 8, same shard, batch 1000", "records/s"
            ),
        ),
        fan_out,
        {"batch": 1000, "connections": 4, "is_local": True},
    ),
    Case(
        (Row("router-fan-out-8", "copies through a fan-out of 8, all shards, batch 1000", "records/s"),),
        fan_out,
        {"batch": 1000, "connections": 4, "is_local": False},
    ),
)
