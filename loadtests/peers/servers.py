"""Starts and stops a peer: on a free loopback port, with its data in a folder beside ours.

The only settings are folders, ports, durability and memory. Processes are stopped by the ids they were
started with.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtests.peers.install import KAFKA_VERSION, environment, find, find_kafka
from loadtests.peers.kafka import format_storage

START_S: Final = 60.0


class NotInstalled(Exception):
    """A program is not installed. The message is one line that names it."""


@dataclass(frozen=True)
class Running:
    port: int
    version: str
    #: Its process, whose descendants belong to it too.
    pid: int = 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _require(program: str) -> str:
    path = find(program)
    if not path:
        raise NotInstalled(f"{program} is not installed; try `make peers`")
    return path


def _version(words: list[str]) -> str:
    ran = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=START_S)
    match = re.search(r"\d+\.\d+(\.\d+)?", ran.stdout + ran.stderr)
    return match[0] if match else "unknown"


@contextmanager
def _process(
    words: list[str], port: int, folder: Path, *, more: dict[str, str] | None = None, user: str | None = None
) -> Iterator[int]:
    """Run a process and wait until it accepts connections; yields its pid. At the end terminate it, and kill
    it if needed."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            words,
            env=environment() | (more or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            **_as(user),
        )
    try:
        deadline = time.monotonic() + START_S
        while not _takes_connections(port):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (folder / "log").read_text(errors="replace")[-2000:]
                raise OSError(f"{words[0]} did not start:\n{tail}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def redis(folder: Path, name: str = "redis-server") -> Iterator[Running]:
    """Run Redis, or Valkey, which takes the same settings. Each measurement sets `appendfsync`."""
    program, port = _require(name), free_port()
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    words += ["--appendonly", "yes", "--save", "", "--auto-aof-rewrite-percentage", "0"]
    with _process(words, port, folder) as pid:
        yield Running(port, _version([program, "--version"]), pid)


def valkey(folder: Path) -> AbstractContextManager[Running]:
    return redis(folder, "valkey-server")


@contextmanager
def nats(folder: Path) -> Iterator[Running]:
    program, port = _require("nats-server"), free_port()
    words = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    with _process(words, port, folder) as pid:
        yield Running(port, _version([program, "--version"]), pid)


@contextmanager
def kafka(folder: Path) -> Iterator[Running]:
    """Run Kafka without ZooKeeper, broker and controller in one process."""
    if find_kafka() is None:
        raise NotInstalled("kafka is not installed; try `make peers`")
    port = free_port()
    with _process(format_storage(folder, port, free_port()), port, folder) as pid:
        yield Running(port, KAFKA_VERSION, pid)


@contextmanager
def rabbitmq(folder: Path) -> Iterator[Running]:
    """Run RabbitMQ with a private epmd, so that it does not use or leave a shared one."""
    program, epmd = _require("rabbitmq-server"), _require("epmd")
    port, names, distribution = free_port(), free_port(), free_port()
    (folder / "home").mkdir()
    (folder / "enabled_plugins").write_text("[].\n")
    (folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\n")
    more = {
        "HOME": str(folder / "home"),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log-files"),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
    }
    match = re.search(r"rabbitmq_server-([\d.]+)", os.path.realpath(program))
    with ExitStack() as stack:
        (folder / "epmd").mkdir()
        words = [epmd, "-port", str(names), "-address", "127.0.0.1"]
        stack.enter_context(_process(words, names, folder / "epmd"))
        pid = stack.enter_context(_process([program], port, folder, more=more))
        yield Running(port, match[1] if match else "unknown", pid)


@contextmanager
def postgresql(folder: Path) -> Iterator[Running]:
    """Run PostgreSQL. It refuses to run as root, so root runs it as another user."""
    program, initdb, port = _require("postgres"), _require("initdb"), free_port()
    user = _ordinary_user() if os.geteuid() == 0 else None
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        _allow_traversal(folder)
    words = [initdb, "-D", str(folder / "data"), "-U", "streams", "-A", "trust", "-E", "UTF8", "--no-locale"]
    process = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=START_S, **_as(user))
    if process.returncode != 0:
        raise OSError(f"initdb failed:\n{process.stderr[-2000:]}")
    words = [program, "-D", str(folder / "data"), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1"]
    words += ["-c", "max_connections=200", "-c", "max_wal_size=8GB", "-c", "shared_buffers=1GB"]
    with _process(words, port, folder, user=user) as pid:
        yield Running(port, _version([program, "--version"]), pid)


def _as(user: str | None) -> dict[str, Any]:
    """Return arguments for subprocess: this user, and none of our groups."""
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


def _ordinary_user() -> str:
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
            return name
        except KeyError:
            continue
    raise NotInstalled("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _allow_traversal(folder: Path) -> None:
    """Let another user traverse the parent folders that belong to us."""
    for each in folder.parents:
        status = each.stat()
        if not status.st_mode & 0o001 and status.st_uid == os.geteuid():
            if each == Path.home():
                raise NotInstalled(
                    f"PostgreSQL's user may not traverse {each}; choose another folder with --data-dir"
                )
            each.chmod(status.st_mode | 0o001)


SERVERS: Final[dict[str, Callable[[Path], AbstractContextManager[Running]]]] = {
    "redis": redis,
    "valkey": valkey,
    "nats": nats,
    "kafka": kafka,
    "rabbitmq": rabbitmq,
    "postgresql": postgresql,
}


@contextmanager
def running_peer(name: str, parent: Path) -> Iterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        with SERVERS[name](folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)
