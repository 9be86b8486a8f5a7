"""A real server for your tests: on a free port, in its own processes, torn down at the end.

    with running_server() as server:
        httpx.post(f"{server.url}/v0/boxes/jobs", json={"records": [{"data": 1}]})

Plain blocking code and the standard library only, so that it works under any test runner and any event loop.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from streams.config import CHILD_KILLED_AT_STOP, READY_FD_VARIABLE, SETTINGS

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 90.0

_COMMAND: Final = (sys.executable, "-P", "-m", "streams", "serve")

#: Settings that differ from the defaults. A shard fills its next log file with zeros at the start; with the
#: usual 64 MiB a server that runs for a second spends a tenth of its time on that.
_SETTINGS: Final[Mapping[str, object]] = {"port": 0, "log_format": "json", "wal_file_bytes": "4MiB"}


class ServerFailed(AssertionError):
    """The server did not start, or did not stop well. The message ends with what it logged."""


@dataclass(eq=False)
class Server:
    """A running server, with methods to stop and kill it."""

    url: str
    port: int
    data_dir: Path
    process: subprocess.Popen[bytes]
    _log: IO[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """Of the supervisor, the parent of all others."""
        return self.process.pid

    def shard_pids(self) -> dict[int, int]:
        """Shard number -> process, for those that run right now."""
        return self._pids("shards")

    def gateway_pids(self) -> dict[int, int]:
        return self._pids("gateways")

    def _pids(self, kind: str) -> dict[int, int]:
        pids = json.loads((self.data_dir / "run" / "pids.json").read_bytes())
        return {int(index): pid for index, pid in pids[kind].items()}

    def log_text(self) -> str:
        """Everything all its processes have logged so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def terminate(self) -> int:
        """Stop it as an operator would, and return its exit code."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerFailed(f"the server did not stop\n{self.log_text()}") from error

    def kill(self) -> None:
        """kill -9 of all its processes, the supervisor first so that it restarts none. Returns when all are
        gone, which the kernel says by giving us the lock that each of them held."""
        children = [*self.gateway_pids().values(), *self.shard_pids().values()]
        self.process.kill()
        self.process.wait()
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Block until no process of the server is left, however they end."""
        with open(self.data_dir / "LOCK", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


@contextmanager
def running_server(
    data_dir: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = _COMMAND,
    **settings: object,
) -> Iterator[Server]:
    """A server that is ready. `settings` are those of `streams config`: `running_server(shards=2, port=0)`.

    The port is a free one unless given, and log files are small; a setting that is "" has the default of any
    other server. Without `data_dir` the data lives and dies with the block. Settings in your own environment
    are not used; `environ` adds variables. Leaving the block stops the server, and fails if that does not go
    well, unless the block has stopped or killed it before.
    """
    folder = Path(data_dir) if data_dir is not None else Path(tempfile.mkdtemp(prefix="streams-"))
    try:
        with tempfile.TemporaryFile(prefix="streams-log-") as log:
            server = _start(
                folder.absolute(), log, command, {**_environment(folder, settings), **(environ or {})}
            )
            try:
                yield server
            except BaseException:
                if server.process.poll() is None:
                    server.kill()
                raise
            if server.process.poll() is None:
                if server.terminate() != 0:
                    raise ServerFailed(
                        f"the server ended with {server.process.returncode}\n{server.log_text()}"
                    )
                if CHILD_KILLED_AT_STOP in server.log_text():
                    # It loses nothing, for that is what a crash would do. But it is not as it should be.
                    warnings.warn(
                        f"processes of the server had to be killed\n{server.log_text()}", stacklevel=3
                    )
    finally:
        if data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    settings_by_name = {setting.name: setting for setting in SETTINGS}
    unknown = settings.keys() - settings_by_name.keys()
    if unknown:
        raise TypeError(f"no such setting: {', '.join(sorted(unknown))}")
    ours = {setting.variable for setting in SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    values = {**_SETTINGS, **settings, "data_dir": folder.absolute()}
    return environment | {settings_by_name[name].variable: str(value) for name, value in values.items()}


def _start(folder: Path, log: IO[bytes], command: Sequence[str], environment: dict[str, str]) -> Server:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writer,),
            env={**environment, READY_FD_VARIABLE: str(writer)},
        )
    finally:
        os.close(writer)
    with open(reader, "rb", buffering=0) as ready:
        facts = _first_line(ready, deadline=time.monotonic() + START_TIMEOUT_S)
    if not facts.get("ready"):
        exit_code = process.poll()
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        text = os.pread(log.fileno(), 1 << 24, 0).decode(errors="replace")
        why = f"{facts['child']} keeps failing" if facts else f"exit code {exit_code}"
        raise ServerFailed(f"the server did not become ready: {why}\n{text}")
    return Server(facts["url"], facts["port"], folder, process, log)


def _first_line(pipe: IO[bytes], *, deadline: float) -> dict[str, Any]:
    """Return the line that the supervisor writes when all is ready; empty when it ended first or took too
    long."""
    text = b""
    while not text.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        piece = pipe.read(4096) if readable else b""
        if not piece:
            return {}
        text += piece
    facts: dict[str, Any] = json.loads(text)
    return facts
