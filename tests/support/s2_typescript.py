"""The official TypeScript SDK of S2, from npm, for the tests that run programs with it."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

PACKAGE = "@s2-dev/streamstore@0.27.0"
_FOLDER = Path(__file__).parents[2] / "build" / "s2-typescript"


def installed() -> Path:
    """The folder in which it is; installed there once, by the first process that needs it."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_FOLDER / "node_modules" / "@s2-dev").exists():
            command = ["npm", "install", "--no-save", "--ignore-scripts", "--prefix", str(_FOLDER), PACKAGE]
            subprocess.run(command, check=True, capture_output=True, cwd=_FOLDER)
    return _FOLDER
