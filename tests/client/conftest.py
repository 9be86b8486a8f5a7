"""One server for all tests of the client; each test has boxes of its own."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

import streams
from streams.testing import Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    # Other tests keep the machine busy, and nothing is to be refused for that.
    with running_server(shards=2, throttle_lag_ms=60_000) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[streams.Client]:
    with streams.Client(server.url) as found:
        yield found


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A box that nobody else uses, and that says whose it is."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.removeprefix("test_").lower())
    return f"{words[:60].strip('-')}.{uuid.uuid4().hex[:12]}"
