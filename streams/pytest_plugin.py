"""Fixtures for your own tests, there as soon as streams is installed:

    def test_orders_are_counted(streams_client):
        streams_client.box("orders").append({"item": "tea"})

The server is real, on a free port, and one for the whole run; each test finds it without any box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from streams.client._sync.client import Client
    from streams.testing import Server


@pytest.fixture(scope="session")
def streams_server() -> Iterator[Server]:
    """A server for the whole run; its data is gone at the end."""
    from streams.testing import running_server

    with running_server(shards=1) as server:
        yield server


@pytest.fixture
def streams_client(streams_server: Server) -> Iterator[Client]:
    """A client of that server. Boxes and routers of earlier tests are deleted first."""
    from streams.client._sync.client import Client

    with Client(streams_server.url) as client:
        for router in list(client.routers()):
            client.drop_router(router.router)
        for box in list(client.boxes()):
            client.box(box.box).drop()
        yield client
