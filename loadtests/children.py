"""Starts load in separate processes: modules that read a plan as JSON and write a result as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtests.rows import ROOT


def start(module: str, plan: dict[str, Any], *words: str, log: Path | None = None) -> subprocess.Popen[str]:
    """Start a module with a plan on its standard input.

    With `log`, its output goes to this file, and it has its own session, by which its orphans can be found.
    """
    with ExitStack() as stack:
        out = stack.enter_context(open(log, "wb")) if log is not None else subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT if log is not None else None,
            text=True,
            start_new_session=log is not None,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(plan))
    process.stdin.close()
    return process


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait(60) != 0:
        raise SystemExit(f"{process.args!r} failed with exit code {process.returncode}")
    result: dict[str, Any] = json.loads(text)
    return result
