"""The memory of a gateway is bounded, whatever its clients send and do not take."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import zstandard

from streams.testing import Server, running_server
from tests.support.crashing import eventually

MIB = 1024 * 1024
GREEDY, MODEST = "a-greedy-key-0123456789", "a-modest-key-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1, gateways=1, api_keys=f"{GREEDY},{MODEST}") as found:
        yield found


def client_of(server: Server, key: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=server.url, trust_env=False, timeout=60, headers=headers)


@contextlib.contextmanager
def bounded(server: Server, gateway_mib: int, shard_mib: int) -> Iterator[None]:
    """Looks at the most memory that the gateway and the shard have meanwhile."""
    with client_of(server, MODEST) as client:
        status = client.get("/v0/status").json()
    pids = [each["pid"] for each in (*status["gateways"], *status["shards"])]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from now on
    yield
    found = [re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    gateway, shard = (int(each[1]) // 1024 for each in found if each is not None)
    assert gateway < gateway_mib and shard < shard_mib, (gateway, shard)


def test_compressed_bodies_take_no_more_memory_than_the_budget_of_bodies(server: Server) -> None:
    """16 of 6 KB become a gigabyte, and the budget is 512 MiB, of which one key has half."""
    body = zstandard.compress(b"]" * 64 * MIB)  # what the shard sees at its first byte
    head = "POST /v0/boxes/zipped HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {GREEDY}\r\nContent-Encoding: zstd\r\nContent-Length: {len(body)}\r\n\r\n"

    def append(_: int) -> int:
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(head.encode() + body)
            return int(connection.recv(4096).split()[1])

    with bounded(server, 800, 800), ThreadPoolExecutor(16) as pool:
        answered = set(pool.map(append, range(16)))
    assert answered == {400, 429}


@pytest.fixture(scope="module")
def pages(server: Server) -> str:
    """A box with 8 MiB in it."""
    with client_of(server, MODEST) as client:
        client.put("/v0/boxes/pages", json={"durability": "memory"})
        append_page(client, "pages")
    return "pages"


def append_page(client: httpx2.Client, box: str) -> None:
    answer = client.post(f"/v0/boxes/{box}", json={"records": [{"data": "x" * 100_000}] * 80})
    assert answer.status_code == 200


def ask_for_page(server: Server, box: str, body: str) -> socket.socket:
    """A client that asks for a large page and reads nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"POST /v0/boxes/{box}/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {GREEDY}\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("wait_ms", [0, 20_000], ids=["there", "to come"])
def test_readers_that_do_not_read_take_bounded_memory_and_leave_room_for_another_key(
    server: Server, pages: str, wait_ms: int
) -> None:
    """150 of them ask for 8 MiB each, 1.2 GB together, and the budget is 256 MiB."""
    from_seq = 80 if wait_ms else 0
    body = f'{{"from_seq":{from_seq},"limit":1000,"max_bytes":{8 * MIB},"wait_ms":{wait_ms}}}'
    with bounded(server, 600, 400), contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(ask_for_page(server, pages, body))
        client = stack.enter_context(client_of(server, MODEST))
        if wait_ms:  # the pages come when all of them wait
            eventually(lambda: waiting_reads(client) >= 150)
            append_page(client, pages)
        read = client.post(f"/v0/boxes/{pages}/diff", json={"limit": 1000, "max_bytes": 8 * MIB})
        assert read.status_code == 200 and len(read.json()["records"]) >= 80
        assert client.post("/v0/boxes/small", json={"records": [{"data": 1}]}).status_code in (200, 201)


def waiting_reads(client: httpx2.Client) -> int:
    return int(client.get("/v0/status").json()["shards"][0]["waiting_reads"])
