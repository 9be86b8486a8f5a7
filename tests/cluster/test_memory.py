"""The memory of a gateway is bounded, whatever its clients send and do not take."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import zstandard

from streams.testing import Server, running_server

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1, gateways=1) as found:
        yield found


def peak_mib(server: Server) -> int:
    """The most memory that the gateway has had so far."""
    status = httpx2.get(f"{server.url}/v0/status", trust_env=False).json()
    [gateway] = status["gateways"]
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway['pid']}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def test_compressed_bodies_take_no_more_memory_than_the_budget_of_bodies(server: Server) -> None:
    """16 of 6 KB become a gigabyte, and the budget is 512 MiB."""
    body = zstandard.compress(b"]" * 64 * MIB)  # what the shard sees at its first byte
    head = "POST /v0/boxes/zipped HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Encoding: zstd\r\nContent-Length: {len(body)}\r\n\r\n"

    def append(_: int) -> int:
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(head.encode() + body)
            return int(connection.recv(4096).split()[1])

    with ThreadPoolExecutor(16) as pool:
        answered = set(pool.map(append, range(16)))
    assert answered == {400, 429}
    assert peak_mib(server) < 800
