"""One server for all tests of brokers, and workers of the frameworks as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import streams
from streams.testing import Server, running_server

ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 30
#: How long a test waits for what a task does. It ends as soon as it is done.
_WAIT_S = 30.0


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    # Other tests keep the machine busy, and nothing is to be refused for that.
    with running_server(shards=1, throttle_lag_ms=60_000) as found:
        os.environ["TEST_STREAMS_URL"] = found.url
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[streams.Client]:
    with streams.Client(server.url) as found:
        yield found


@contextmanager
def running_worker(*words: str, folder: Path = ROOT, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process of a framework. It must end well when it is asked to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=environment)
    try:
        yield process
        process.terminate()
        assert process.wait(_STOP_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class Notes:
    """What tasks have written into the box `done` since the test began."""

    def __init__(self, client: streams.Client) -> None:
        self._box = client.box("done")
        self._box.create()
        self._seq = self._box.position().head_seq
        self.items: list[dict[str, Any]] = []

    def wait(self, is_enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Read notes until there are enough of them."""
        deadline = time.monotonic() + _WAIT_S
        while not is_enough(self.items):
            assert time.monotonic() < deadline, self.items
            page = self._box.page(self._seq, wait_ms=1000)
            self._seq = page.next_from_seq
            self.items += [record.data for record in page.records]
        return self.items

    def named(self, *names: str) -> list[dict[str, Any]]:
        """Wait until the last of these tasks was noted as often as it is named; return all notes of them."""
        last = names[-1]
        self.wait(lambda items: sum(item["task"] == last for item in items) >= names.count(last))
        return [item for item in self.items if item["task"] in names]


@pytest.fixture
def notes(client: streams.Client) -> Notes:
    return Notes(client)
