"""Measures a writer beside thousands of idle watchers and hundreds that never read (`p99-crowd`).

Idle watchers follow a box without writes. Slow watchers request a box of ten megabytes from its start and
never read: the kernel buffers some of it, and their gateway as much as its limit allows.
"""

from __future__ import annotations

import http.client
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from time import monotonic, sleep

from loadtests.generator import append_body
from loadtests.rows import Bench, Case, CaseFailed, Row, beside, call
from streams.testing import Server

IDLE, SLOW = 5000, 500
_BATCHES, _BATCH_RECORDS = 20, 5000
_OPEN_S_MAX = 120


@contextmanager
def crowd(bench: Bench) -> Iterator[None]:
    server = bench.server()
    idle, slow = (IDLE, SLOW) if not bench.sizes.is_quick else (50, 5)
    _allow_files(idle + slow + 256)
    call(server, "PUT", "/v0/boxes/crowd-idle", {})
    body = append_body(1, _BATCH_RECORDS, record_bytes=110)
    for _ in range(_BATCHES):
        call_raw(server, "/v0/boxes/crowd-slow?return_seqs=false", body)
    with ExitStack() as stack:
        for _ in range(idle):
            stack.enter_context(closing(_watcher(server, "crowd-idle", "tail=true")))
        for _ in range(slow):
            stack.enter_context(closing(_watcher(server, "crowd-slow", "from_seq=0", receive_bytes=4096)))
        until_s = monotonic() + _OPEN_S_MAX
        while watching(server) < idle + slow:
            if monotonic() > until_s:
                raise CaseFailed(f"{watching(server)} of {idle + slow} watchers connected")
            sleep(0.1)
        yield
        (server.data_dir.parent / f"crowd-{watching(server)}").touch()


def watching(server: Server) -> int:
    return int(call(server, "GET", "/v0/status")["sse_connections"])


def crowd_was_there(server: Server) -> int:
    """Return how many watchers were connected at the end."""
    return max((int(path.name[6:]) for path in server.data_dir.parent.glob("crowd-*")), default=0)


def call_raw(server: Server, path: str, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    if answer.status >= 300:
        raise CaseFailed(f"POST {path} was answered {answer.status}: {content[:400]!r}")


def _watcher(server: Server, box: str, query: str, *, receive_bytes: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(f"GET /v0/boxes/{box}/watch?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return sock


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


CROWD_CASES = (
    Case(
        (
            Row(
                "p99-crowd",
                "single appends, p99 beside 5,000 idle and 500 slow watchers",
                "times",
                2.0,
                1.3,
                True,
            ),
        ),
        beside,
        {"settings": {}, "during": crowd, "proof": crowd_was_there, "what": "watcher was there at the end"},
    ),
)
