"""Programs from Debian's packages, for tests that need one which this machine does not have.

`apt-get` refuses to run beside another, and tests run in several processes: one of ours at a time, and
whoever else holds the lock of the packages is waited for.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_LOCK = Path(tempfile.gettempdir()) / f"streams-tests-apt-{os.geteuid()}.lock"
_OPTIONS = ("-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3")


class NotInstalled(Exception):
    """What `apt-get` said."""


def download(*packages: str, folder: Path) -> None:
    """Leaves the packages as files in a folder; needs no rights, if the lists of packages are there."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _run("download", *packages, folder=folder)
        except NotInstalled:
            _run("update", is_root=True)
            _run("download", *packages, folder=folder)


def install(*packages: str) -> None:
    """Raises `NotInstalled`."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run("update", is_root=True)
        _run("install", "-y", "--no-install-recommends", *packages, is_root=True)


def _run(*arguments: str, folder: Path | None = None, is_root: bool = False) -> None:
    command = ["apt-get", *_OPTIONS, *arguments]
    if is_root and os.geteuid() and shutil.which("sudo"):
        command = ["sudo", "-n", *command]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise NotInstalled("there is no apt-get here") from None
    if ran.returncode:
        raise NotInstalled(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")
