"""One child of the supervisor: starts its process, watches it, and restarts it.

A child that ends is restarted, after a pause that grows while it fails. A shard whose data is damaged is not
restarted: that cannot help. A child that has sent a heartbeat and is then silent for STREAMS_HANG_MS counts
as hung: it is killed and restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol

import structlog
import trio

from gateway.shards.process_states import REASONS, ProcessState
from gateway.supervise.child_reports import lines
from streams.config import COLD_STORE_FAILED, Config

EXIT_FAILED: Final = 1
EXIT_CORRUPT: Final = 3

#: Restart delays: a first crash is repaired at once, and a crash loop is slow enough to be harmless.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
HEALTHY_S: Final = 30.0

#: After so many failures in a row without becoming ready, the process that started the server and waits is
#: notified. The child is still restarted: the cause may be cured, for example a full disk.
HOPELESS_FAILURES: Final = 5

#: How often the supervisor checks for silent children, and how much silence one check adds. So a pause of the
#: supervisor itself does not count as silence.
HANG_CHECK_S: Final = 1.0
#: Silence that causes a warning and shows in the status: five missed heartbeats.
SILENT_S: Final = 5.0
PROGRESS_EVERY_S: Final = 2.0

log: Any = structlog.get_logger()


class Tree(Protocol):
    """The interface of the supervisor that a child uses."""

    @property
    def config(self) -> Config: ...

    @property
    def lock_fd(self) -> int: ...

    @property
    def keys_version(self) -> int: ...

    def child_environment(self) -> dict[str, str]: ...

    def notify_of_keys(self, child: Child) -> None:
        """Signal a child to read the keys again if they have changed since it read them."""

    def report_hopeless(self, child: Child) -> None:
        """Report that a child has failed `HOPELESS_FAILURES` times in a row."""

    def write_pids(self) -> None: ...

    def publish_states(self) -> None: ...


@dataclass(slots=True, eq=False)
class Child:
    """One shard or gateway of the process tree, and its current process."""

    _tree: Tree
    kind: Literal["shard", "gateway"]
    index: int
    command: Sequence[str]
    listeners: Sequence[socket.socket]
    #: The folder of a shard in the data directory.
    folder: str = ""
    process: trio.Process | None = None
    ready_at: float | None = None
    #: Version of the keys that it has read, or was signalled to read.
    keys_version: int = 0
    reason: str = ""
    #: True if it was killed because it was silent for too long.
    is_hung: bool = False
    #: True once it has sent a heartbeat; and seconds since the last one.
    has_beaten: bool = False
    silent_s: float = 0.0
    #: Why it does not serve, and its restarts by reason (`process_states.REASONS`).
    why: str = "starting"
    restarts: dict[str, int] = field(default_factory=dict)
    gave_up: bool = False
    #: True after a failed write or sync, until a process of this child is ready again.
    has_failed: bool = False
    #: Set when it has been ready once, or has ended for good.
    is_decided: trio.Event = field(default_factory=trio.Event)
    is_stopping: trio.Event = field(default_factory=trio.Event)
    has_ended: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        return f"shard-{self.index:02d}" if self.kind == "shard" else f"gateway-{self.index}"

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else None
        state = "ready" if self.ready_at else "starting" if pid else "waiting"
        if self.has_ended.is_set():
            state = "ended"
        return f"<Child {self.name} pid={pid} {state}>"

    def state(self) -> ProcessState:
        words = {"": "ready", "silent": "silent", "damaged": "stopped", "starting": "starting"}
        return ProcessState(
            state=words.get(self.why, "restarting"),
            pid=self.process.pid if self.process else 0,
            reason=self.why,
            detail=self.reason,
            restarts=self.restarts,
        )

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def stop(self) -> None:
        """Ask it to end, and do not restart it."""
        self.is_stopping.set()
        self.signal(signal.SIGTERM)

    async def keep_running(self) -> None:
        """Start it, and restart it when it ends, until it is stopped or its data is damaged."""
        backoff_s = BACKOFF_FIRST_S
        failures = 0
        while not self.is_stopping.is_set():
            code = await self._run_once()
            if self.is_stopping.is_set():
                break
            if code == EXIT_CORRUPT and self.kind == "shard":
                self.gave_up = True
                self._publish_reason("damaged")
                for listener in self.listeners:
                    listener.close()
                log.error(
                    "shard stopped: its data is damaged, and its boxes are not served",
                    child=self.name,
                    why=self.reason or "it did not say",
                    next_step="stop the server, then run `streams verify` and `streams repair`, or put a "
                    f"backup of {self._tree.config.data_dir / self.folder} in place",
                )
                break
            why = self._reason_of(code)
            self.reason = self.reason or how_it_ended(code)
            self.restarts[why] = self.restarts.get(why, 0) + 1
            self.has_failed = self.has_failed or why == "log_failed"
            self._publish_reason(why)
            if self.ready_at is not None and trio.current_time() - self.ready_at >= HEALTHY_S:
                backoff_s = BACKOFF_FIRST_S
            log.warning(
                "process ended unexpectedly; restarting it",
                child=self.name,
                cause=self.reason,
                after_ms=int(backoff_s * 1000),
            )
            failures = failures + 1 if self.ready_at is None else 0
            if failures == HOPELESS_FAILURES:
                self._tree.report_hopeless(self)
            with trio.move_on_after(backoff_s):
                await self.is_stopping.wait()
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        self.is_decided.set()
        self.has_ended.set()

    async def _run_once(self) -> int:
        """Start it, read its reports, and return its exit code; a signal is negative, as in `subprocess`."""
        self.ready_at, self.reason = None, ""
        self.is_hung = self.has_beaten = False
        self.silent_s = 0.0
        self.keys_version = self._tree.keys_version
        ours, theirs = os.pipe(), os.pipe()
        (report_fd, their_report_fd), (their_parent_fd, parent_fd) = ours, theirs
        try:
            self.process = await self._spawn(ready_fd=their_report_fd, parent_fd=their_parent_fd)
        except OSError as error:
            self.reason = f"it could not be started: {error}"
            for descriptor in (report_fd, parent_fd):
                os.close(descriptor)
            return -1
        finally:
            for descriptor in (their_report_fd, their_parent_fd):
                os.close(descriptor)
        self._tree.write_pids()
        if self.why == "":
            self._publish_reason("starting")
        log.debug("process started", child=self.name, pid=self.process.pid)
        try:
            if self.is_stopping.is_set():
                self.stop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen_to, trio.lowlevel.FdStream(report_fd))
                code: int = await self.process.wait()
                # Read its last lines from the pipe. A time limit, in case another process holds the other
                # end.
                nursery.cancel_scope.deadline = trio.current_time() + 1
        finally:
            os.close(parent_fd)
        self.process = None
        self._tree.write_pids()
        return code

    async def _spawn(self, *, ready_fd: int, parent_fd: int) -> trio.Process:
        listen_fds = [listener.fileno() for listener in self.listeners]
        listening = [text for fd in listen_fds for text in ("--listen-fd", str(fd))]
        numbers = ["--index", str(self.index), "--parent-fd", str(parent_fd), "--ready-fd", str(ready_fd)]
        if self.has_failed:
            numbers.append("--after-failure")
        spawn = partial(
            trio.lowlevel.open_process,
            [*self.command, *numbers, *listening],
            stdin=subprocess.DEVNULL,
            pass_fds=(*listen_fds, self._tree.lock_fd, parent_fd, ready_fd),
            env=self._tree.child_environment(),
        )
        return await spawn()

    async def _listen_to(self, reports: trio.lowlevel.FdStream) -> None:
        shown_at = trio.current_time()
        async with reports:
            async for line in lines(reports):
                word, _, rest = line.partition(" ")
                if word == "ready":
                    self.ready_at = trio.current_time()
                    self.has_failed = False
                    self.is_decided.set()
                    self._publish_reason("")
                    self._tree.notify_of_keys(self)
                    log.debug("process ready", child=self.name)
                elif word == "beat":
                    self.has_beaten = True
                    self.silent_s = 0.0
                    if self.why == "silent":
                        log.warning("process sends heartbeats again", child=self.name)
                        self._publish_reason("")
                elif word == "error":
                    self.reason = rest
                elif word == "progress" and trio.current_time() - shown_at >= PROGRESS_EVERY_S:
                    shown_at = trio.current_time()
                    log.info("shard is replaying its log", child=self.name, percent=int(float(rest) * 100))

    def count_silence(self) -> None:
        """Warn about a silent child, and kill it after STREAMS_HANG_MS of silence."""
        self.silent_s += HANG_CHECK_S
        hang_s = self._tree.config.hang_ms / 1000
        if self.silent_s >= min(SILENT_S, hang_s or SILENT_S) and self.why == "":
            self._publish_reason("silent")
            log.warning(
                "no heartbeat from a process: it may hang",
                child=self.name,
                silent_s=round(self.silent_s, 1),
                restarted_after_s=hang_s or "never",
            )
        if hang_s and self.silent_s >= hang_s and not self.is_hung:
            self.is_hung = True
            self.reason = f"no heartbeat for {self.silent_s:.0f} s"
            log.error(
                "process hangs: killing and restarting it",
                child=self.name,
                silent_s=round(self.silent_s, 1),
                next_step=REASONS["hung"][1],
            )
            self.signal(signal.SIGKILL)

    def _publish_reason(self, why: str) -> None:
        """Publish the reason why it does not serve; empty if it serves."""
        self.why = why
        self._tree.publish_states()

    def _reason_of(self, code: int) -> str:
        """Return the key of `process_states.REASONS` for an exit code after which it is restarted."""
        if self.is_hung:
            return "hung"
        if self.reason.startswith("it could not be started"):
            return "not_started"
        if self.reason.startswith(COLD_STORE_FAILED):
            return "cold_store"
        if code == EXIT_FAILED and self.kind == "shard" and self.reason:
            return "log_failed"
        return "crashed"


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
