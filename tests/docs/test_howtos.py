"""The commands of how-to pages work as typed.

Method: bash gets the ```sh blocks of a page against a real server. Only addresses, folders and the editor are
replaced. Every `curl` must be answered with success.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.client._sync.client import Client
from streams.testing import Server, running_server
from tests.support.crashing import eventually

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
#: Says on stderr how each request was answered.
CURL = "curl() { command curl -sS -w '%{stderr}%{http_code}\\n' \"$@\"; }\n"


def run(script: str, server: Server, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    given = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder),
        "STREAMS_DATA_DIR": str(server.data_dir),
        **environ,
    }
    script = re.sub(r"(http://)?(localhost|server):4000", server.url, script)
    command = ["bash", "-euo", "pipefail", "-c", CURL + script]
    ran = subprocess.run(command, cwd=folder, env=kept | given, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, script + ran.stdout + ran.stderr
    return ran


def statuses(ran: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in ran.stderr.splitlines() if re.fullmatch(r"\d{3}", line)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as found:
        yield found


def test_sharing_jobs_and_committing_groups_work_as_typed(server: Server, tmp_path: Path) -> None:
    page = (HOWTO / "share-jobs.md").read_text()
    blocks = BLOCK.findall(page)
    assert len(blocks) == 7
    found = statuses(run("".join(blocks[:2]), server, tmp_path))
    with Client(server.url) as client:
        queue = client.queue("jobs")
        for _ in range(5):  # the other job fails too often, and becomes a dead letter
            queue.nack("worker-2", queue.claim("worker-2"))
        assert queue.claim("worker-2") == []
        eventually(client.box("jobs.dead").exists)
    found += statuses(run("".join(blocks[2:]), server, tmp_path))
    assert len(found) == "".join(blocks).count("curl ")
    assert all(status in ("200", "201") for status in found), found
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with Client(server.url) as client:
        assert client.queue("payments").config().type == "queue"
        client.queue("payments").append({"charge": 2_000, "order": 8}, ordering_key="customer-1")
        exec(program.replace("http://localhost:4000", server.url), {})
        cancelled, shipments = client.box("orders.cancelled"), client.box("shipments")
        eventually(lambda: cancelled.exists() and shipments.exists())
        assert [each.data for each in cancelled.read()] == [{"charge": 2_000, "order": 8}]
        assert [each.data for each in shipments.read()] == [{"order": 7}]
        assert [each.data for each in client.box("orders.log").read()] == ["order 7 accepted"]
    (stream,) = re.findall(r"`curl -N '(localhost:4000[^']*)'`", page)
    ran = run(f"curl -N -m 1 '{stream}' || true", server, tmp_path)
    assert "event: job" in ran.stdout and statuses(ran) == ["200"]


def test_schedules_work_as_typed(server: Server, tmp_path: Path) -> None:
    page = (HOWTO / "schedules.md").read_text()
    blocks = BLOCK.findall(page)
    assert len(blocks) == 3
    ran = run("".join(blocks), server, tmp_path)
    assert statuses(ran) == ["201", "201", "200", "200", "200"]
    assert '"$schedule":"daily-report"' in ran.stdout
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program.replace("http://localhost:4000", server.url), {})
    with Client(server.url) as client:
        assert [each.schedule for each in client.schedules.list()] == ["daily-report", "hourly"]


def test_keys_are_written_used_and_rotated_as_typed(server: Server, tmp_path: Path) -> None:
    page = (HOWTO / "keys.md").read_text()
    written, used, rotated, direct = BLOCK.findall(page)
    (example,) = re.findall(r"```\n(# who.*?)```", page, re.DOTALL)
    (tmp_path / "example").write_text(example)
    keys = tmp_path / "keys"

    def here(block: str) -> str:
        """What would serve shows its settings instead."""
        return block.replace("/etc/streams/keys", str(keys)).replace("streams serve", "streams config")

    run(here(written), server, tmp_path, EDITOR=f"cp {tmp_path / 'example'}")
    assert run(here(direct), server, tmp_path).stdout.count(str(keys)) == 1
    assert keys.stat().st_mode & 0o777 == 0o600
    secrets = re.findall(r"^([^:#\s]+)", example, re.MULTILINE)
    with running_server(shards=1, api_keys_file=keys) as guarded:
        assert statuses(run(used, guarded, tmp_path, KEY=secrets[-1])) == ["200"]
        keys.write_text(example + "N3w1-example-operator\n")
        run(rotated, guarded, tmp_path)
        eventually(lambda: "keys reloaded" in guarded.log_text())
        curl = next(line for line in used.splitlines() if line.startswith("curl"))
        assert statuses(run(curl, guarded, tmp_path, KEY="N3w1-example-operator")) == ["200"]
