"""One server with two shards for all tests of the S2 API, a thin client, and a basin for each test."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from streams.testing import Server, running_server

_numbers = itertools.count(1)


class Client:
    """`/v1` of a server, as one basin sees it."""

    def __init__(self, url: str, basin: str) -> None:
        self.url = url
        self.basin = basin
        self.port = httpx2.URL(url).port or 0
        self.http = httpx2.Client(base_url=url, timeout=60, trust_env=False)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        """`s2_format="base64"` is a header. A body that is not bytes is sent as JSON."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given.setdefault("s2-basin", self.basin)
        content = None
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            given.setdefault("content-type", "application/json")
        return self.http.request(method, "/v1" + path, content=content, headers=given)

    def create(self, **config: Any) -> None:
        answer = self.call("POST", "/basins", {"basin": self.basin, "config": config})
        assert answer.status_code == 201, answer.text

    def stream(self, name: str = "s", **config: Any) -> None:
        answer = self.call("POST", "/streams", {"stream": name, "config": config})
        assert answer.status_code == 201, answer.text

    def append(self, *bodies: str, stream: str = "s", **fields: Any) -> dict[str, Any]:
        given = {"records": [{"body": body} for body in bodies], **fields}
        answer = self.call("POST", f"/streams/{stream}/records", given)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def bodies(self, query: str = "seq_num=0", stream: str = "s") -> list[str]:
        answer = self.call("GET", f"/streams/{stream}/records?{query}")
        assert answer.status_code == 200, answer.text
        return [record.get("body", "") for record in answer.json()["records"]]

    def tail(self, stream: str = "s") -> int:
        answer = self.call("GET", f"/streams/{stream}/records/tail")
        assert answer.status_code == 200, answer.text
        return int(answer.json()["tail"]["seq_num"])

    def until(self, status: int, method: str, path: str, body: Any = None) -> httpx2.Response:
        """Asks until the answer has this status: what is eventual has no event to wait for."""
        deadline = time.monotonic() + 60
        while (answer := self.call(method, path, body)).status_code != status:
            assert time.monotonic() < deadline, answer.text
        return answer

    def on(self, server: Server) -> Client:
        """A client of this basin on another server, or on this one after a restart."""
        return Client(server.url, self.basin)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    # Other tests keep the machine busy, and a session is not to be refused for that.
    with running_server(shards=2, throttle_lag_ms=60_000) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, f"basin-{next(_numbers):08}")


@pytest.fixture(scope="session")
def shared(server: Server) -> Client:
    """A basin with a stream `s` for those who change nothing in it."""
    client = Client(server.url, "shared-basin")
    client.create()
    client.stream()
    return client


@pytest.fixture
def basin(client: Client) -> Client:
    client.create()
    return client
