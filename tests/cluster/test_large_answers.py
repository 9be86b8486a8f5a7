"""Goal: clients that read large pages do not end a shard, whether they take their answers or not.

Method: one real server; plain sockets, so that a client can ask and not read. Memory is the highest that the
kernel has seen of the shard's process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streams import Client
from streams.testing import Server, running_server

PAGE_BYTES = 8 << 20
READERS, SILENT = 16, 100
#: One connection's pages, one pool's, and what the shard holds itself: its records and a page in the making.
MEMORY_MIB_MAX = 400


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as server:
        with Client(server.url) as client:
            for _ in range(18):
                client.box("large").append("x" * (1 << 19))
        yield server


def memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024


def ask_for_page(server: Server) -> socket.socket:
    body = b'{"max_bytes":%d,"limit":1000}' % PAGE_BYTES
    request = (
        b"POST /v0/boxes/large/diff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", server.port), 60)
    sock.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (request, len(body), body))
    return sock


def read_to_the_end(sock: socket.socket) -> bytes:
    with sock:
        start = sock.recv(1 << 16)
        size = len(start)
        while data := sock.recv(1 << 20):
            size += len(data)
    assert size > 7 << 20, start[:300]
    return start


def test_sixteen_readers_of_large_pages_do_not_end_the_shard(server: Server) -> None:
    pids = server.shard_pids()
    for _ in range(2):
        readers = [ask_for_page(server) for _ in range(READERS)]
        with ThreadPoolExecutor(READERS) as threads:
            for start in threads.map(read_to_the_end, readers):
                assert start.startswith(b"HTTP/1.1 200 ")
    assert server.shard_pids() == pids


def test_readers_that_take_nothing_leave_the_memory_of_the_shard_bounded(server: Server) -> None:
    pids = server.shard_pids()
    silent = [ask_for_page(server) for _ in range(SILENT)]
    try:
        with Client(server.url) as client:
            for number in range(20):
                client.box("small").append(number)
        assert memory_mib(pids[0]) < MEMORY_MIB_MAX
        assert server.shard_pids() == pids
    finally:
        for sock in silent:
            sock.close()
