"""The process tree of a server: start, watch, restart with backoff, drain. Serves no HTTP and owns no data.

It owns the lock on the data directory, every listening socket and every child, and nothing else. Children are
fresh interpreters, never forks of this one. Each is told, by arguments, descriptors and signals only:

    arguments   --index N --listen-fd F (one or more) --parent-fd P --ready-fd R
                --placement JSON; shards also: --directory NAME --server ID, and --after-failure when the last
                one could not write or sync its log; gateways also: --sockets JSON
                --addresses JSON
                with keys on, also: --keys-file PATH (`key_file.py`)
    environment STREAMS_CHILD_CONFIG: the whole `Config` as JSON (it would make `ps` unreadable)
    lock        the descriptor of LOCK is inherited and simply stays open
    parent-fd   end of file on it means that we are gone: stop as on SIGTERM
    ready-fd    lines from the child: `progress 0.42` while replaying, `ready` once, then `beat` every second
                while it moves (`shard/server/heartbeat.py`), `error <why>` at the end
    SIGTERM     gateway: stop accepting, finish what is under way, exit 0; shard: final snapshot, exit 0
    SIGINT      ignored by children: a terminal sends it to all of us, and only the supervisor decides
    SIGHUP      read the keys file again; sent when it has changed, and never before `ready`
    exit code   3 from a shard: its data is damaged, a restart cannot help; anything else: restarted

A child that has sent a beat and is then silent for STREAMS_HANG_MS hangs: it is killed and started again.
Silence is counted while this process runs itself, so a paused machine, or a paused supervisor, kills nobody.

Listening sockets stay open here, so connections queue while a child restarts. They close when we stop, and a
shard's when it is given up: a client must not wait for an answer that will never come.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import msgspec
import orjson
import structlog
import trio

from gateway.shards.process_states import FILE_NAME, REASONS, ProcessState, ProcessStates
from gateway.shards.unix_sockets import address_of, listen_tcp, listen_unix, url_of
from gateway.supervise.data_dir import CannotServe, DataDir, write_atomically
from gateway.supervise.key_file import KeyFile, read_keys
from gateway.supervise.manifest import Manifest
from gateway.supervise.reports import lines
from gateway.supervise.resharding import reshard
from streams import logs
from streams.config import (
    CHILD_CONFIG_VARIABLE,
    COLD_STORE_FAILED,
    KILLED_AT_THE_END,
    READY_FD_VARIABLE,
    SETTINGS,
    SHARDS_MAX,
    Config,
    check_may_serve,
    is_loopback,
    refusal_to_serve_openly,
)

EXIT_FAILED: Final = 1
EXIT_CORRUPT: Final = 3

#: A crash is answered at once and a crash loop is slow enough to be harmless and quick enough to heal.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
HEALTHY_S: Final = 30.0

#: A child that failed so often in a row without once being ready is tried again for ever, since a full disk
#: may be cleared, but a test that waits for us is told.
HOPELESS_FAILURES: Final = 5

#: How long children of a killed server may take to notice and end before we say that the directory is in use.
ORPHANS_WAIT_S: Final = 15.0
LOCK_POLL_S: Final = 0.05

#: How long a start waits for the cold store to say whose it is.
CLAIM_WAIT_S: Final = 5.0

#: A gateway ends by itself after `drain_ms`; this much later it does not count on it any more.
DRAIN_MARGIN_S: Final = 1.0
SNAPSHOT_WAIT_S: Final = 60.0
STILL_WAITING_EVERY_S: Final = 5.0

#: How often the supervisor looks for silent children, and what one look adds to their silence: if it was
#: itself stopped for an hour, nobody was silent for an hour.
LOOK_FOR_HANGS_S: Final = 1.0
#: Silence that is worth a warning, and a word in the status: five missed beats.
SILENT_S: Final = 5.0
PROGRESS_EVERY_S: Final = 2.0

#: How often to look whether the file of keys can still be read: a server that cannot would not start again.
LOOK_AT_KEYS_S: Final = 10.0

log: Any = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Commands:
    """How to start a child; its arguments are added. `-P` keeps a `shard/` in the current directory out."""

    shard: Sequence[str] = (sys.executable, "-P", "-m", "shard")
    gateway: Sequence[str] = (sys.executable, "-P", "-m", "gateway")
    reshard: Sequence[str] = (sys.executable, "-P", "-m", "shard.offline.reshard")
    claim_cold: Sequence[str] = (sys.executable, "-P", "-m", "shard.offline.claim_cold")


@dataclass(slots=True, eq=False)
class Child:
    """One place in the tree and whoever fills it now."""

    kind: Literal["shard", "gateway"]
    index: int
    command: Sequence[str]
    listeners: Sequence[socket.socket]
    #: Of a shard: its folder in the data directory.
    folder: str = ""
    process: trio.Process | None = None
    ready_at: float | None = None
    #: Which keys it was started with, or told of since.
    keys_version: int = 0
    reason: str = ""
    #: Whether it was killed because it was silent for too long.
    is_hung: bool = False
    #: Whether it has sent a heartbeat, and seconds since the last one.
    has_beaten: bool = False
    silent_s: float = 0.0
    #: Why it does not serve, and how often it was started again by reason (`process_states.REASONS`).
    why: str = "starting"
    restarts: dict[str, int] = field(default_factory=dict)
    gave_up: bool = False
    #: True from a write or a sync that failed until a process of this child is ready again.
    has_failed: bool = False
    settled: trio.Event = field(default_factory=trio.Event)
    stop_wanted: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        return f"shard-{self.index:02d}" if self.kind == "shard" else f"gateway-{self.index}"

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else None
        state = (
            "ended" if self.ended.is_set() else "ready" if self.ready_at else "starting" if pid else "waiting"
        )
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
        """Ask it to end, and see to it that it is not started again."""
        self.stop_wanted.set()
        self.signal(signal.SIGTERM)


class Supervisor:
    """A whole server. `run` returns when it was told to stop and everything has ended."""

    def __init__(
        self, config: Config, *, commands: Commands | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.config = config
        self._commands = commands or Commands()
        self._environ = environ
        self._shards: list[Child] = []
        self._gateways: list[Child] = []
        self._stop = trio.Event()
        self._hurry = trio.Event()
        self._lock_fd = -1
        self._keys: KeyFile | None = None
        self._keys_problem = ""
        self._starter_fd = int(environ[READY_FD_VARIABLE]) if environ.get(READY_FD_VARIABLE) else None
        self._url = ""
        self._port = 0

    def __repr__(self) -> str:
        return f"<Supervisor {self._url or self.config.data_dir} {self._shards + self._gateways}>"

    async def run(self, *, announce: Callable[[Supervisor], None] = lambda _: None) -> None:
        """Raises `CannotServe` or `ConfigError` before anything was started."""
        check_may_serve(self.config)
        ring = read_keys(self.config)
        with ExitStack() as stack:
            directory = stack.enter_context(closing(DataDir(self.config.data_dir.absolute())))
            await _lock(directory)
            if directory.mode_for_others:
                log.warning(
                    "other users can access the data directory; chmod 0700 it",
                    path=str(directory.path),
                    mode=f"{0o700 | directory.mode_for_others:04o}",
                )
            directory.describe_holder(url="", now_ms=_now_ms())
            self._lock_fd = directory.lock_fd
            manifest = await self._open(directory)
            listeners = [stack.enter_context(closing(listener)) for listener in self._bind()]
            self._port = listeners[0].getsockname()[1]
            self._url = url_of(self.config.host, self._port)
            directory.describe_holder(url=self._url, now_ms=_now_ms())
            self.config = replace(
                self.config,
                data_dir=directory.path,
                shards=manifest.shards,
                port=self._port,
                log_format=logs.resolved_format(self.config.log_format),
            )
            self._make_run_dir()
            stack.callback(self._empty_run_dir)
            if ring is not None:
                self._keys = KeyFile(self.config, ring)
            unix = self._listen_for_gateways(stack)
            self._plan(manifest, listeners, unix, self._listen_for_peers(stack))
            announce(self)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                await self._serve(listeners, signals)

    @property
    def url(self) -> str:
        return self._url

    # What exists before the first child does.

    async def _open(self, directory: DataDir) -> Manifest:
        """The manifest, with as many shards as are wanted."""
        wanted = self.config.shards
        manifest = directory.open(shards_default=wanted or _cpu_count(), now_ms=_now_ms())
        if self.config.cold_dir:
            await self._claim_cold(directory, manifest)
        if wanted in (0, manifest.shards):
            return manifest
        return await reshard(
            directory,
            manifest,
            wanted,
            command=self._commands.reshard,
            environ=self._child_environment(),
            wal_file_bytes=self.config.wal_file_bytes,
        )

    async def _claim_cold(self, directory: DataDir, manifest: Manifest) -> None:
        """Claim the cold store, or raise `CannotServe`. One that does not answer is not waited for: a shard
        looks again before it changes anything there."""
        command = [
            *self._commands.claim_cold,
            *("--server", manifest.server),
            *("--data-dir", str(directory.path)),
        ]
        found: dict[str, str] = {"away": f"no answer within {CLAIM_WAIT_S:.0f} s"}
        with trio.move_on_after(CLAIM_WAIT_S):
            claimed = await trio.run_process(
                command, capture_stdout=True, env=self._child_environment(), check=False
            )
            if claimed.returncode != 0:
                raise CannotServe(
                    f"the cold store {self.config.cold_dir} could not be claimed: the process that does it "
                    f"ended with {_how_it_ended(claimed.returncode)}; its message is above"
                )
            found = orjson.loads(claimed.stdout)
        if "refused" in found:
            raise CannotServe(found["refused"])
        if "away" in found:
            log.warning(
                "the cold store does not answer; shards check its owner before they change anything there",
                cold_dir=self.config.cold_dir,
                error=found["away"],
            )

    def _bind(self) -> list[socket.socket]:
        address = f"{self.config.host}:{self.config.port}"
        try:
            listeners = listen_tcp(self.config.host, self.config.port)
        except socket.gaierror as error:
            raise CannotServe(
                f"STREAMS_HOST is {self.config.host}, which is no address of this machine ({error.strerror})"
            ) from error
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "another program does" if in_use else os.strerror(error.errno or 0)
            raise CannotServe(
                f"cannot listen on {address}: {why}. Choose another address with STREAMS_HOST, or another "
                "port with STREAMS_PORT or --port (0 picks a free one)"
            ) from error
        bound = [listener.getsockname()[0] for listener in listeners]
        if not (self.config.has_keys or self.config.allow_insecure_no_auth or all(map(is_loopback, bound))):
            for listener in listeners:
                listener.close()
            raise CannotServe(refusal_to_serve_openly(f"{self.config.host} ({', '.join(bound)})"))
        return listeners

    def _listen_for_gateways(self, stack: ExitStack) -> list[socket.socket]:
        """The shards' sockets are ours, so that a link made while a shard restarts waits for it."""
        paths = [self.config.shard_socket(index) for index in range(self.config.shards)]
        return [stack.enter_context(closing(listen_unix(path))) for path in paths]

    def _listen_for_peers(self, stack: ExitStack) -> list[list[socket.socket]]:
        """For each shard its TCP sockets, all on one port; none unless they are asked for."""
        host, first = self.config.shard_host, self.config.shard_port
        if not host:
            return [[] for _ in range(self.config.shards)]
        found: list[list[socket.socket]] = []
        for index in range(self.config.shards):
            try:
                listeners = listen_tcp(host, first + index if first else 0)
            except OSError as error:
                port = f" port {first + index}" if first else ""
                raise CannotServe(
                    f"cannot listen for clients of shard {index} on {host}{port}: {error.strerror or error}. "
                    "Choose another address with STREAMS_SHARD_HOST or STREAMS_SHARD_PORT"
                ) from error
            found.append([stack.enter_context(closing(listener)) for listener in listeners])
        return found

    def _plan(
        self,
        manifest: Manifest,
        listeners: list[socket.socket],
        unix: list[socket.socket],
        tcp: list[list[socket.socket]],
    ) -> None:
        placement = manifest.placement
        keys = () if self._keys is None else ("--keys-file", str(self._keys.path))
        known = ("--placement", placement.to_json(), "--server", manifest.server)
        shard = (*self._commands.shard, *keys, *known)
        addresses: list[str] = []
        if self.config.shard_host:
            addresses = [address_of(self.config.shard_host, each[0].getsockname()[1]) for each in tcp]
        self._shards = [
            Child("shard", index, (*shard, "--directory", folder), [listener, *more], folder=folder)
            for index, (listener, more, folder) in enumerate(
                zip(unix, tcp, manifest.directories, strict=True)
            )
        ]
        paths = [str(self.config.shard_socket(index)) for index in range(placement.shards)]
        more = (
            *("--placement", placement.to_json()),
            *("--sockets", orjson.dumps(paths).decode()),
            *("--addresses", orjson.dumps(addresses).decode()),
            *keys,
        )
        self._gateways = [
            Child("gateway", index, (*self._commands.gateway, *more), listeners)
            for index in range(self.config.gateways)
        ]

    def _make_run_dir(self) -> None:
        self.config.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.config.run_dir.chmod(0o700)
        self._empty_run_dir()

    def _empty_run_dir(self) -> None:
        for path in self.config.run_dir.iterdir():
            if path.suffix in (".sock", ".json", ".new"):
                path.unlink(missing_ok=True)

    # The life of the tree.

    async def _serve(self, listeners: list[socket.socket], signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._obey, signals)
            for child in self._shards + self._gateways:
                nursery.start_soon(self._keep_running, child)
            nursery.start_soon(self._announce_ready)
            nursery.start_soon(self._look_for_hangs)
            nursery.start_soon(self._keep_looking_at_keys)
            await self._stop.wait()
            log.info("stopping", waiting_for="requests under way", at_most_ms=self.config.drain_ms)
            for listener in listeners:
                listener.close()
            await self._end(self._gateways, within_s=self.config.drain_ms / 1000 + DRAIN_MARGIN_S)
            await self._end(self._shards, within_s=SNAPSHOT_WAIT_S)
            nursery.cancel_scope.cancel()
        log.info("stopped")

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload_keys()
            elif not self._stop.is_set():
                self._stop.set()
            elif number == signal.SIGINT:
                self._hurry.set()

    def _reload_keys(self) -> None:
        """What was wrong with the new keys is in the log; then the old ones stay good."""
        if self._keys is None:
            return
        if self._keys.reload():
            for child in self._shards + self._gateways:
                self._tell_of_keys(child)
        self._note_keys(self._keys.problem())

    async def _keep_looking_at_keys(self) -> None:
        while self._keys is not None:
            await trio.sleep(LOOK_AT_KEYS_S)
            # In a thread: the file may be on a mount that hangs.
            self._note_keys(await trio.to_thread.run_sync(self._keys.problem, abandon_on_cancel=True))

    def _note_keys(self, problem: str) -> None:
        if problem == self._keys_problem:
            return
        self._keys_problem = problem
        if problem:
            log.error("the file of keys cannot be read: the server would not start again", error=problem)
        else:
            log.info("the file of keys can be read again")
        self._publish_states()

    def _tell_of_keys(self, child: Child) -> None:
        """One that is starting may have read the old ones; it is told when it is ready, and able to hear."""
        if self._keys is None or child.ready_at is None or child.keys_version == self._keys.version:
            return
        child.keys_version = self._keys.version
        child.signal(signal.SIGHUP)

    async def _announce_ready(self) -> None:
        for child in self._shards + self._gateways:
            await child.settled.wait()
        if self._stop.is_set():
            return
        missing = [child.name for child in self._shards if child.gave_up]
        facts = {
            "pid": os.getpid(),
            "url": self._url,
            "port": self._port,
            "shards": self.config.shards,
            "ready": True,
        }
        self._publish("server.json", facts)
        if missing:
            log.warning("ready, but not whole", url=self._url, missing=missing)
        else:
            log.info("ready", url=self._url)
        self._tell_starter(facts)

    def _tell_starter(self, facts: dict[str, Any]) -> None:
        """One line for whoever started us and waits, if anyone does (`streams.testing`)."""
        if self._starter_fd is None:
            return
        try:
            os.write(self._starter_fd, orjson.dumps(facts) + b"\n")
        except BrokenPipeError:
            log.debug("nobody waits for us any more")
        os.close(self._starter_fd)
        self._starter_fd = None

    async def _end(self, children: list[Child], *, within_s: float) -> None:
        """SIGTERM, wait, SIGKILL. Another SIGINT cuts the wait: a kill loses no more than a crash does."""
        self._hurry = trio.Event()
        for child in children:
            child.stop()
        with trio.move_on_after(within_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_what_we_wait_for, children)
                nursery.start_soon(_cancel_when, self._hurry, nursery.cancel_scope)
                for child in children:
                    await child.ended.wait()
                nursery.cancel_scope.cancel()
        for child in children:
            if not child.ended.is_set():
                log.warning(KILLED_AT_THE_END, child=child.name)
                child.signal(signal.SIGKILL)
        for child in children:
            await child.ended.wait()

    async def _say_what_we_wait_for(self, children: list[Child]) -> None:
        while True:
            await trio.sleep(STILL_WAITING_EVERY_S)
            late = [child.name for child in children if not child.ended.is_set()]
            doing = "their final snapshot" if children is self._shards else "requests under way"
            log.info("still waiting", waiting_for=doing, children=late, hint="press Ctrl-C to wait no longer")

    # The life of one child.

    async def _keep_running(self, child: Child) -> None:
        backoff_s = BACKOFF_FIRST_S
        failures = 0
        while not child.stop_wanted.is_set():
            code = await self._one_life(child)
            if child.stop_wanted.is_set():
                break
            if code == EXIT_CORRUPT and child.kind == "shard":
                child.gave_up = True
                self._explain(child, "damaged")
                for listener in child.listeners:
                    listener.close()
                log.error(
                    "shard stopped: its data is damaged, and its boxes are not served",
                    child=child.name,
                    why=child.reason or "it did not say",
                    next_step="stop the server, then run `streams verify` and `streams repair`, or put a "
                    f"backup of {self.config.data_dir / child.folder} in place",
                )
                break
            why = _reason_of(child, code)
            child.reason = child.reason or _how_it_ended(code)
            child.restarts[why] = child.restarts.get(why, 0) + 1
            child.has_failed = child.has_failed or why == "log_failed"
            self._explain(child, why)
            if child.ready_at is not None and trio.current_time() - child.ready_at >= HEALTHY_S:
                backoff_s = BACKOFF_FIRST_S
            log.warning(
                "ended unexpectedly; starting it again",
                child=child.name,
                cause=child.reason,
                after_ms=int(backoff_s * 1000),
            )
            failures = failures + 1 if child.ready_at is None else 0
            if failures == HOPELESS_FAILURES:
                self._tell_starter({"ready": False, "child": child.name})
            with trio.move_on_after(backoff_s):
                await child.stop_wanted.wait()
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        child.settled.set()
        child.ended.set()

    async def _one_life(self, child: Child) -> int:
        """Start it, listen to it, and return its exit code; a signal is negative, as in `subprocess`."""
        child.ready_at, child.reason = None, ""
        child.is_hung = child.has_beaten = False
        child.silent_s = 0.0
        child.keys_version = 0 if self._keys is None else self._keys.version
        ours, theirs = os.pipe(), os.pipe()
        (report_fd, their_report_fd), (their_parent_fd, parent_fd) = ours, theirs
        try:
            child.process = await self._spawn(child, ready_fd=their_report_fd, parent_fd=their_parent_fd)
        except OSError as error:
            child.reason = f"it could not be started: {error}"
            for descriptor in (report_fd, parent_fd):
                os.close(descriptor)
            return -1
        finally:
            for descriptor in (their_report_fd, their_parent_fd):
                os.close(descriptor)
        self._write_pids()
        if child.why == "":
            self._explain(child, "starting")
        log.debug("started", child=child.name, pid=child.process.pid)
        try:
            if child.stop_wanted.is_set():
                child.stop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen_to, child, trio.lowlevel.FdStream(report_fd))
                code: int = await child.process.wait()
                # What it said last is in the pipe; nobody else should hold the other end, but if one does:
                nursery.cancel_scope.deadline = trio.current_time() + 1
        finally:
            os.close(parent_fd)
        child.process = None
        self._write_pids()
        return code

    async def _spawn(self, child: Child, *, ready_fd: int, parent_fd: int) -> trio.Process:
        listen_fds = [listener.fileno() for listener in child.listeners]
        listening = [text for fd in listen_fds for text in ("--listen-fd", str(fd))]
        numbers = ["--index", str(child.index), "--parent-fd", str(parent_fd), "--ready-fd", str(ready_fd)]
        if child.has_failed:
            numbers.append("--after-failure")
        spawn = partial(
            trio.lowlevel.open_process,
            [*child.command, *numbers, *listening],
            stdin=subprocess.DEVNULL,
            pass_fds=(*listen_fds, self._lock_fd, parent_fd, ready_fd),
            env=self._child_environment(),
        )
        return await spawn()

    def _child_environment(self) -> dict[str, str]:
        """Ours without the settings: they are all in the config, and a shard has no business with keys."""
        dropped = {setting.variable for setting in SETTINGS} | {READY_FD_VARIABLE}
        kept = {name: value for name, value in self._environ.items() if name not in dropped}
        return {**kept, CHILD_CONFIG_VARIABLE: self.config.to_json()}

    async def _listen_to(self, child: Child, reports: trio.lowlevel.FdStream) -> None:
        shown_at = trio.current_time()
        async with reports:
            async for line in lines(reports):
                word, _, rest = line.partition(" ")
                if word == "ready":
                    child.ready_at = trio.current_time()
                    child.has_failed = False
                    child.settled.set()
                    self._explain(child, "")
                    self._tell_of_keys(child)
                    log.debug("ready", child=child.name)
                elif word == "beat":
                    child.has_beaten = True
                    child.silent_s = 0.0
                    if child.why == "silent":
                        log.warning("sends heartbeats again", child=child.name)
                        self._explain(child, "")
                elif word == "error":
                    child.reason = rest
                elif word == "progress" and trio.current_time() - shown_at >= PROGRESS_EVERY_S:
                    shown_at = trio.current_time()
                    log.info("replaying its log", child=child.name, percent=int(float(rest) * 100))

    async def _look_for_hangs(self) -> None:
        while True:
            await trio.sleep(LOOK_FOR_HANGS_S)
            for child in self._shards + self._gateways:
                if child.has_beaten and child.process is not None and not child.stop_wanted.is_set():
                    self._count_silence(child)

    def _count_silence(self, child: Child) -> None:
        """Warn of a child that is silent, and end one that has been for STREAMS_HANG_MS."""
        child.silent_s += LOOK_FOR_HANGS_S
        hang_s = self.config.hang_ms / 1000
        if child.silent_s >= min(SILENT_S, hang_s or SILENT_S) and child.why == "":
            self._explain(child, "silent")
            log.warning(
                "no heartbeat: it may hang",
                child=child.name,
                silent_s=round(child.silent_s, 1),
                restarted_after_s=hang_s or "never",
            )
        if hang_s and child.silent_s >= hang_s and not child.is_hung:
            child.is_hung = True
            child.reason = f"no heartbeat for {child.silent_s:.0f} s"
            log.error(
                "hangs: it is killed and started again",
                child=child.name,
                silent_s=round(child.silent_s, 1),
                next_step=REASONS["hung"][1],
            )
            child.signal(signal.SIGKILL)

    def _explain(self, child: Child, why: str) -> None:
        """Publish why a child does not serve; empty when it does."""
        child.why = why
        self._publish_states()

    def _publish_states(self) -> None:
        states = ProcessStates(
            shards={each.index: each.state() for each in self._shards},
            gateways={each.index: each.state() for each in self._gateways},
            keys_problem=self._keys_problem,
        )
        self._publish(FILE_NAME, msgspec.to_builtins(states, str_keys=True))

    def _write_pids(self) -> None:
        def pids(children: list[Child]) -> dict[str, int]:
            return {str(child.index): child.process.pid for child in children if child.process is not None}

        found: dict[str, Any] = {
            "supervisor": os.getpid(),
            "shards": pids(self._shards),
            "gateways": pids(self._gateways),
        }
        self._publish("pids.json", found)

    def _publish(self, name: str, facts: dict[str, Any]) -> None:
        """A file for people and tools to look at. A full disk must not take a serving tree down for it."""
        try:
            write_atomically(self.config.run_dir / name, facts)
        except OSError as error:
            log.warning("a status file could not be written", name=name, error=str(error))


async def _lock(directory: DataDir) -> None:
    """The lock, or `CannotServe`. Children of a killed server are waited for; a running server is not."""
    waited = False
    with trio.move_on_after(ORPHANS_WAIT_S):
        while not directory.try_lock():
            holder = directory.holder()
            if holder.is_alive():
                raise CannotServe(
                    f"{directory.path} is in use by {holder}. Use that server, stop it, or choose another "
                    "directory with STREAMS_DATA_DIR"
                )
            if not waited:
                log.info("waiting for processes of an earlier server to end", data_dir=str(directory.path))
            waited = True
            await trio.sleep(LOCK_POLL_S)
        return
    raise CannotServe(
        f"{directory.path} is still in use, by {directory.holder()} or by processes it started, which have "
        f"not ended within {ORPHANS_WAIT_S:.0f} s. Try again in a moment, or look for them with "
        f"`fuser {directory.path / 'LOCK'}`"
    )


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _reason_of(child: Child, code: int) -> str:
    """Return the key of `process_states.REASONS` for a child that has ended and is started again."""
    if child.is_hung:
        return "hung"
    if child.reason.startswith("it could not be started"):
        return "not_started"
    if child.reason.startswith(COLD_STORE_FAILED):
        return "cold_store"
    if code == EXIT_FAILED and child.kind == "shard" and child.reason:
        return "log_failed"
    return "crashed"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _cpu_count() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, SHARDS_MAX)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
