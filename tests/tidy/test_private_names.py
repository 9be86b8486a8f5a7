"""No module uses private names of another one. The exceptions, in `pyproject.toml`, may only shrink."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS_MAX = 6


def test_every_exception_for_private_names_is_still_needed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "SLF001" in settings["select"]
    excepted = {path for path, rules in settings["per-file-ignores"].items() if "SLF001" in rules}
    excepted.remove("tests/**")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "SLF001", "--output-format"]
    found = subprocess.run(
        [*command, "json", "gateway", "shard", "streams", "loadtests"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    using = {str(Path(each["filename"]).relative_to(ROOT)) for each in json.loads(found.stdout)}
    assert excepted == using, "take a file off the list when it uses no private name any more"
    assert len(excepted) <= EXCEPTIONS_MAX, "give what is needed a public name instead"
