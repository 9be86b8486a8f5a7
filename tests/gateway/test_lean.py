"""Goal: a server starts without what it may never use. Method: a new interpreter says what it has loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gateway.edge_harness import Recorder, head_and, running_front, talk

SAY = "import sys, {0}.__main__, structlog; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize("process", ["shard", "gateway"])
def test_a_process_loads_neither_what_shows_colours_nor_what_few_clients_need(process: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SAY.format(process)], capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert {process, "trio", "structlog"} <= loaded
    assert not loaded & {"rich", "quart", "flask", "hypercorn", "h2", "obstore", "pyspark"}


def test_who_wants_rich_still_gets_it() -> None:
    asked = "import shard, sys; assert 'rich' not in sys.modules; import rich.traceback"
    assert subprocess.run([sys.executable, "-c", asked]).returncode == 0


async def test_plain_requests_do_not_load_hypercorn() -> None:
    async with running_front(Recorder()) as running:
        assert (await talk(running, head_and(line="GET / HTTP/1.1"))).startswith(b"HTTP/1.1 200")
        assert running.front._hypercorn is None
