"""The tutorial pastes through: all its blocks in one shell, in order, print what it shows.

Method: bash gets the text of every ```sh block but the installation, in one go, with a line of ours after
each so that the output can be told apart. Environment variables name a free port; the text is not changed.
What is shown after a block must have been printed: each line of ```json as an object with at least these
fields, ```text as it is.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import check_shown

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorial").glob("*.md"))
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:```(json|text)\n(.*?)```)?", re.DOTALL)
MARK = "--- end of block ---"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tutorial_pastes_through(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```sh\n") >= 8
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    environ = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STREAMS_PORT": str(port),
        "STREAMS_URL": f"http://127.0.0.1:{port}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    script = "set -e -m\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(
        f"{typed}echo '{MARK}'\n" for typed, _, _ in blocks
    )
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    printed = ran.stdout.split(f"{MARK}\n")
    assert len(printed) == len(blocks) + 1
    for (typed, kind, shown), real in zip(blocks, printed, strict=False):
        if kind == "json":
            lines = [json.loads(line) for line in real.splitlines()]
            check_shown([json.loads(line) for line in shown.splitlines()], lines, where=typed.strip())
        elif kind == "text":
            assert real == shown, typed
    assert not (tmp_path / "streams-tutorial").exists()


def test_pages_it_points_to_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
