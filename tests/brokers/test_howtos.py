"""The pages about brokers work as typed: the app, a worker, and the program that sends tasks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import streams
from streams.testing import Server
from tests.brokers.conftest import ROOT, running_worker
from tests.docs.test_howtos import BLOCK, run, statuses
from tests.support.crashing import eventually

_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def write_app(page: str, server: Server, folder: Path) -> str:
    """Write the app of a page into a folder, and return the program that sends tasks."""
    text = (ROOT / "docs" / "howto" / page).read_text().replace("localhost:4000", f"127.0.0.1:{server.port}")
    app, program = _PYTHON.findall(text)
    (name,) = re.findall(r"\A# (\w+\.py)$", app, re.MULTILINE)
    (folder / name).write_text(app)
    (folder / "send.py").write_text(program)
    return text


def send(folder: Path) -> str:
    ran = subprocess.run([sys.executable, "send.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_celery_app_moves_as_typed(server: Server, client: streams.Client, tmp_path: Path) -> None:
    client.queue("celery.celery").drop()
    text = write_app("celery.md", server, tmp_path)
    with running_worker("celery", "-A", "shop", "worker", "--pool", "solo", folder=tmp_path):
        assert send(tmp_path) == "order-1: 19.99\n"
    ran = run("".join(BLOCK.findall(text)), server, tmp_path)
    assert statuses(ran) == ["200", "200"]
    assert '"delayed":1' in ran.stdout and '"deleted":1' in ran.stdout


def test_dramatiq_works_as_typed(server: Server, client: streams.Client, tmp_path: Path) -> None:
    client.queue("dramatiq.default").drop()
    write_app("dramatiq.md", server, tmp_path)
    with running_worker("dramatiq", "mails", "--processes", "1", "--threads", "1", folder=tmp_path):
        send(tmp_path)
        eventually(lambda: (tmp_path / "sent.txt").exists() and (tmp_path / "sent.txt").read_text())
    assert (tmp_path / "sent.txt").read_text() == "ann@example.com\n"
    counts = client.queue("dramatiq.default").state().queue
    assert counts is not None and counts.delayed == 1


def test_taskiq_works_as_typed(server: Server, client: streams.Client, tmp_path: Path) -> None:
    write_app("taskiq.md", server, tmp_path)
    with running_worker("taskiq", "worker", "mails:broker", "--workers", "1", folder=tmp_path):
        send(tmp_path)
        eventually(lambda: (tmp_path / "sent.txt").exists() and (tmp_path / "sent.txt").read_text())
    assert (tmp_path / "sent.txt").read_text() == "ann@example.com\n"
    counts = client.queue("taskiq.mails").state().queue
    assert counts is not None and counts.delayed == 1
