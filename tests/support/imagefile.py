"""The steps of a Dockerfile, run without a container engine.

Each stage gets a root folder of its own. In a mount namespace (`unshare`) that folder becomes `/`, with the
programs and libraries of this machine in place of the base image's, and each `RUN` happens there. The last
stage is then started as an engine would start it: its root read-only, its volumes writable, as its user.

What differs from a real build: the base image, layers, and the network, which is this machine's.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HOST_FOLDERS = ("usr", "etc", "bin", "lib", "lib64", "sbin")
_OWN_FOLDERS = ("dev", "proc", "tmp", "root", "var/tmp")


@dataclass
class Stage:
    """One `FROM`, and what has become of it."""

    root: Path
    base: str
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def inside(self, path: str) -> Path:
        return self.root / os.path.normpath(os.path.join(self.cwd, path)).lstrip("/")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, the rest of its line), comments and continued lines dealt with."""
    found: list[tuple[str, str]] = []
    whole = ""
    for line in text.splitlines():
        if not whole and (not line.strip() or line.lstrip().startswith("#")):
            continue
        whole += line.rstrip("\\") if line.endswith("\\") else line
        if not line.endswith("\\"):
            word, _, rest = whole.strip().partition(" ")
            found.append((word.upper(), rest.strip()))
            whole = ""
    return found


def resolved(steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The steps from the first `FROM` on, with the defaults of the arguments before it put into `FROM`s."""
    arguments: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for word, rest in steps:
        if word == "ARG" and not found:
            name, _, arguments[name] = rest.partition("=")
            continue
        if word == "FROM":
            for name, value in arguments.items():
                rest = rest.replace(f"${{{name}}}", value)
        found.append((word, rest))
    return found


def build(dockerfile: Path, context: Path, folder: Path) -> Stage:
    """Runs all steps; the last stage."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in resolved(instructions(dockerfile.read_text())):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            root = folder / f"stage-{len(stages)}"
            for each in (*_HOST_FOLDERS, *_OWN_FOLDERS):
                (root / each).mkdir(parents=True)
            stage = stages[name or str(len(stages))] = Stage(root, base)
            continue
        assert stage is not None, "a Dockerfile begins with FROM"
        _step(word, rest, stage, stages, context)
    assert stage is not None
    return stage


def _step(word: str, rest: str, stage: Stage, stages: dict[str, Stage], context: Path) -> None:
    match word:
        case "WORKDIR":
            stage.inside(rest).mkdir(parents=True, exist_ok=True)
            stage.cwd = os.path.normpath(os.path.join(stage.cwd, rest))
        case "ENV":
            name, _, value = rest.partition("=")
            stage.environ[name] = value
        case "USER":
            stage.user = rest
        case "VOLUME":
            stage.volumes.append(rest)
        case "EXPOSE":
            stage.ports.append(int(rest))
        case "STOPSIGNAL":
            stage.stop_signal = rest
        case "HEALTHCHECK":
            stage.health = json.loads(rest.partition(" CMD ")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "CMD":
            stage.command = json.loads(rest)
        case "COPY":
            _copy(rest, stage, stages, context)
        case "RUN":
            started(stage, ["sh", "-ec", rest], is_build=True).check_returncode()
        case _:
            raise AssertionError(f"{word}: what does this do?")


def _copy(rest: str, stage: Stage, stages: dict[str, Stage], context: Path) -> None:
    words = shlex.split(rest)
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    *sources, target = (word for word in words if not word.startswith("--"))
    for source in sources:
        found = stages[flags["from"]].inside(source) if "from" in flags else context / source
        place = stage.inside(target)
        if found.is_dir():
            shutil.copytree(found, place, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(found, place / found.name if target.endswith("/") else place)
        if "chown" in flags and os.geteuid() == 0:
            uid, gid = map(int, flags["chown"].split(":"))
            for path in (place, *place.rglob("*")):
                os.chown(path, uid, gid)


def started(stage: Stage, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in a stage and waits for it."""
    done = subprocess.run(**arguments(stage, command, **how), capture_output=True, text=True, timeout=280)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    return done


def arguments(
    stage: Stage,
    command: list[str],
    *,
    is_build: bool = False,
    as_root: bool = False,
    environ: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What to give to `subprocess` to have a command run in a stage: as its user and with its root read-only,
    unless it is a step of the build."""
    python = Path(sys.base_prefix)
    lines = [f"mkdir -p .{python} root/.cache/pip root/.cache/uv", "mount --bind . .", f"cd {stage.root}"]
    lines += [f"mount --rbind {python} .{python}"]
    lines += [f"[ ! -e /{each} ] || mount --rbind /{each} {each}" for each in _HOST_FOLDERS]
    lines += ["mount --rbind /dev dev", "mount --rbind /proc proc", "mount -t tmpfs -o mode=1777 none tmp"]
    if is_build:  # what was downloaded before need not be again
        caches = Path.home() / ".cache"
        lines += [
            f"[ ! -e {caches}/{each} ] || mount --rbind {caches}/{each} root/.cache/{each}"
            for each in ("pip", "uv")
        ]
    if not is_build:
        lines += [f"mount --bind .{volume} .{volume}" for volume in stage.volumes]
        lines += ["mount -o remount,ro,bind ."]
    is_root = os.geteuid() == 0
    uid, gid = stage.user.split(":")
    keeps_user = is_build or as_root or not is_root
    as_user = [] if keeps_user else [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    given = {**_network_environ(), "HOME": "/root", "PATH": f"{python}/bin:/usr/bin:/bin", **stage.environ}
    given["PATH"] += f":{python}/bin"
    named = [f"{name}={value}" for name, value in {**given, **(environ or {})}.items()]
    inner = ["env", "-i", *named, "sh", "-c", f'cd {stage.cwd} && exec "$@"', "-", *command]
    enter = shlex.join(["chroot", ".", "setpriv", *as_user, *inner])
    unshare = ["unshare", "--mount"] if is_root else ["unshare", "--mount", "--map-root-user"]
    return {
        "args": [*unshare, "sh", "-c", "\n".join(["set -e", f"cd {stage.root}", *lines, f"exec {enter}"])]
    }


def _network_environ() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_", "SSL_CERT_")) and name != "PIP_FIND_LINKS"
    }
