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
from tests.support.s2_suites import s2_command
from tests.support.s2_typescript import installed

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "s2.md"


def program(name: str) -> str:
    blocks = re.findall(rf"```\w+ {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks, f"the page has no {name}"
    return "\n\n".join(blocks)


def run(command: str, path: Path, server: Server, **variables: str) -> list[str]:
    environ = {**os.environ, "STREAMS_URL": server.url, **variables}
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


@pytest.mark.skipif(s2_command() is None, reason="the s2 command is not here; make suites builds it")
def test_the_lines_for_the_s2_command_do_too(server: Server, tmp_path: Path) -> None:
    found = s2_command()
    assert found is not None
    path = tmp_path / "first_steps.sh"
    path.write_text("set -e\n" + program(path.name))
    *_, first, second, tail = run(
        "sh", path, server, PATH=f"{found.parent}:{os.environ['PATH']}", HOME=str(tmp_path)
    )
    assert (first, second) == ("one", "two")
    assert tail.startswith("2 @ ")
