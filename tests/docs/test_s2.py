"""The how-to of the S2 API runs as it is written: each program of the page against one real server.

Method: a block says of which file it is (```python snapshots.py); blocks of one file are one program. It is
run as a reader would run it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing import Server, running_server
from tests.support.s2_typescript import installed

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "s2.md"


def program(name: str) -> str:
    blocks = re.findall(rf"```\w+ {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks, f"the page has no {name}"
    return "\n\n".join(blocks)


def run(command: str, path: Path, server: Server) -> list[str]:
    environ = {**os.environ, "STREAMS_URL": server.url}
    ran = subprocess.run([command, str(path)], env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=2) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("first_steps.py", ["0 2 [b'one', b'two']"]),
        (
            "snapshots.py",
            [
                "next is 6",
                "single record: 110",
                "a frame that was not finished: 1234",
                "framed: 11234",
                "external: 68",
            ],
        ),
    ],
)
def test_the_programs_of_the_page_do_as_it_says(
    server: Server, tmp_path: Path, name: str, expected: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(program(name))
    assert run(sys.executable, path, server) == expected


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here")
def test_the_program_for_node_does_too(server: Server) -> None:
    path = installed() / "first_steps.mjs"
    path.write_text(program(path.name))
    assert run("node", path, server) == ["0 2 [ 'one', 'two' ]"]
