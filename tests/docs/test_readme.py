"""The program and every line of the walk of the README work as typed, and answer what the README shows.

Method: blocks marked ```sh walk are run by bash, in order, against a real server whose port takes the place
of 4000. The ```json block after one shows the fields that matter: each must be in the answer, as shown.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from streams.testing import running_server
from tests.support import readme_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STEP = re.compile(r"```sh walk\n(.*?)```\n```json\n(.*?)```", re.DOTALL)


def check_shown(shown: Any, real: Any, where: str) -> None:
    """What is shown is there. Objects may have more fields than shown; lists have exactly what is shown."""
    if isinstance(shown, dict):
        assert isinstance(real, dict), f"{where}: {real!r} is no object"
        for key, value in shown.items():
            assert key in real, f"{where}: no {key!r} in {real!r}"
            check_shown(value, real[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert isinstance(real, list) and len(shown) == len(real), f"{where}: {real!r} is not {shown!r}"
        for index, value in enumerate(shown):
            check_shown(value, real[index], f"{where}[{index}]")
    else:
        assert shown == real, f"{where}: the README shows {shown!r}, the server answers {real!r}"


def test_each_step_of_the_walk_answers_what_is_shown() -> None:
    steps = STEP.findall(README)
    assert len(steps) == README.count("```sh walk") >= 7
    with running_server(shards=2) as server:
        for command, shown in steps:
            typed = command.replace("localhost:4000", f"127.0.0.1:{server.port}")
            ran = subprocess.run(["bash", "-euo", "pipefail", "-c", typed], capture_output=True, text=True)
            assert ran.returncode == 0, f"{command}\n{ran.stderr}"
            check_shown(json.loads(shown), json.loads(ran.stdout), where=command.strip())


def test_the_program_prints_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.DOTALL)
    with running_server(shards=2) as server, contextlib.redirect_stdout(io.StringIO()) as printed:
        monkeypatch.setenv("STREAMS_URL", server.url)
        exec(compile(program, "README.md", "exec"), {})
    assert printed.getvalue() == shown


def test_its_numbers_and_its_table_are_those_of_their_pages() -> None:
    assert readme_page.page(README) == README, "run `make docs`"


def test_no_step_needs_a_header() -> None:
    assert not re.search(r"curl[^\n]* (-H|--header)", README)


def test_pages_it_points_to_exist() -> None:
    for page in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / page).exists(), page


def test_the_readme_of_the_package_has_no_link_that_a_package_index_cannot_follow() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = README
    for each in settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert re.findall(r"\]\((?!https?:)", text) == [] and "First steps with the" in text


def test_make_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`?make ([a-z]+)\b", README):
        assert target in targets, target
