"""A user's own test gets a server and a client in one line: the name of the fixture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

THEIRS = """
def test_one(streams_client):
    streams_client.box("orders").append({"item": "tea"})
    assert [record.data for record in streams_client.box("orders").read()] == [{"item": "tea"}]

def test_each_begins_with_nothing(streams_client, streams_server):
    assert list(streams_client.boxes()) == []
    assert streams_server.url == streams_client.url
"""


def test_the_fixtures_are_there_for_everybody(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr
