"""Runs the process tree of a server: start, watch, restart with backoff, drain. Serves no HTTP, owns no data.

It owns the lock on the data directory, the sockets (`listening_sockets.py`) and the children (`child.py`).
Children are new interpreters, never forks of this one. It controls them only by arguments, descriptors and
signals:

    arguments   --index N --listen-fd F (one or more) --parent-fd P --ready-fd R
                --placement JSON; shards also: --directory NAME --server ID, and --after-failure when the last
                one could not write or sync its log; gateways also: --sockets JSON
                --addresses JSON
                with keys on, also: --keys-file PATH (`key_file.py`)
    environment STREAMS_CHILD_CONFIG: the whole `Config` as JSON (it would make `ps` unreadable)
    lock        the descriptor of LOCK is inherited and stays open
    parent-fd   end of file on it means that the supervisor has ended: stop as on SIGTERM
    ready-fd    lines from the child: `progress 0.42` while replaying, `ready` once, then `beat` every second
                while it makes progress (`shard/server/heartbeat.py`), `error <why>` at the end
    SIGTERM     gateway: stop accepting, finish requests in progress, exit 0; shard: final snapshot, exit 0
    SIGINT      ignored by children: a terminal sends it to all processes, and only the supervisor acts on it
    SIGHUP      read the keys file again; sent when it has changed, and never before `ready`
    exit code   3 from a shard: its data is damaged, a restart cannot help; anything else: restarted

A child that has sent a heartbeat and is then silent for STREAMS_HANG_MS counts as hung: it is killed and
restarted. Silence counts only while this process runs itself, so a paused machine or supervisor kills no
child.

Listening sockets stay open here, so connections queue while a child restarts. They close when the server
stops. A shard's close when it is not restarted any more: a client must not wait for an answer that will never
come."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import orjson
import structlog
import trio

from gateway.requests.guide_archive import BadGuide, GuideArchive
from gateway.shards.process_states import FILE_NAME, ProcessStates
from gateway.shards.unix_sockets import address_of, url_of
from gateway.supervise.child import HANG_CHECK_S, Child
from gateway.supervise.cold_claim import claim_cold_store
from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.key_file import KeyFile, read_keys
from gateway.supervise.listening_sockets import listen_for_clients, listen_for_gateways, listen_for_peers
from gateway.supervise.manifest import Manifest
from gateway.supervise.resharding import reshard
from gateway.supervise.run_dir import RunDir
from streams import logs
from streams.config import (
    CHILD_CONFIG_VARIABLE,
    CHILD_KILLED_AT_STOP,
    READY_FD_VARIABLE,
    SETTINGS,
    SHARDS_MAX,
    Config,
    check_may_serve,
)

#: How long a start waits for children of a killed server to end, before it reports that the directory is in
#: use.
ORPHANS_WAIT_S: Final = 15.0
LOCK_POLL_S: Final = 0.05

#: A gateway ends by itself after `drain_ms`; after this much longer it is killed.
DRAIN_MARGIN_S: Final = 1.0
SNAPSHOT_WAIT_S: Final = 60.0
STILL_WAITING_EVERY_S: Final = 5.0

#: How often the supervisor checks that the key file is readable: without it the server would not start again.
KEYS_CHECK_S: Final = 10.0

log: Any = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands that start children, without arguments. `-P` ignores a `shard/` in the current
    directory."""

    shard: Sequence[str] = (sys.executable, "-P", "-m", "shard")
    gateway: Sequence[str] = (sys.executable, "-P", "-m", "gateway")
    reshard: Sequence[str] = (sys.executable, "-P", "-m", "shard.offline.reshard")
    claim_cold: Sequence[str] = (sys.executable, "-P", "-m", "shard.offline.claim_cold")


class Supervisor:
    """A whole server. `run` returns after a stop signal, when all children have ended."""

    def __init__(
        self,
        config: Config,
        *,
        commands: Commands | None = None,
        environ: Mapping[str, str] = os.environ,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        #: Origin of each setting, by name.
        self._origins = origins or {}
        self._commands = commands or Commands()
        self._environ = environ
        self._shards: list[Child] = []
        self._gateways: list[Child] = []
        self._stop = trio.Event()
        self._skip_wait = trio.Event()
        self.lock_fd = -1
        self._keys: KeyFile | None = None
        self._keys_problem = ""
        self._starter_fd = int(environ[READY_FD_VARIABLE]) if environ.get(READY_FD_VARIABLE) else None
        self._url = ""
        self._port = 0
        self._run_dir = RunDir(config.run_dir)

    def __repr__(self) -> str:
        return f"<Supervisor {self._url or self.config.data_dir} {self._shards + self._gateways}>"

    async def run(self, *, announce: Callable[[Supervisor], None] = lambda _: None) -> None:
        """Run the server until it is stopped. Raises `CannotServe` or `ConfigError` before it starts a
        child."""
        check_may_serve(self.config)
        ring = read_keys(self.config)
        _check_guide(self.config)
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
            self.lock_fd = directory.lock_fd
            manifest = await self._open(directory)
            listeners = [
                stack.enter_context(closing(listener)) for listener in listen_for_clients(self.config)
            ]
            self._port = listeners[0].getsockname()[1]
            self._url = url_of(self.config.host, self._port)
            directory.describe_holder(url=self._url, now_ms=_now_ms())
            self.config = replace(
                self.config,
                data_dir=directory.path,
                shards=manifest.shards,
                port=self._port,
                log_format=logs.resolve_format(self.config.log_format),
            )
            self._run_dir = RunDir(self.config.run_dir)
            self._run_dir.open()
            stack.callback(self._run_dir.close)
            if ring is not None:
                self._keys = KeyFile(self.config, ring)
            unix = listen_for_gateways(self.config, stack)
            self._plan(manifest, listeners, unix, listen_for_peers(self.config, stack))
            announce(self)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                await self._serve(listeners, signals)

    @property
    def url(self) -> str:
        return self._url

    # Before the first child.

    async def _open(self, directory: DataDir) -> Manifest:
        """Return the manifest with the configured number of shards."""
        shards = self.config.shards
        manifest = directory.open(shards_default=shards or _cpu_count(), now_ms=_now_ms())
        if self.config.cold_dir:
            await claim_cold_store(
                directory,
                manifest,
                self.config.cold_dir,
                command=self._commands.claim_cold,
                environ=self.child_environment(),
            )
        if shards in (0, manifest.shards):
            return manifest
        return await reshard(
            directory,
            manifest,
            shards,
            command=self._commands.reshard,
            environ=self.child_environment(),
            wal_file_bytes=self.config.wal_file_bytes,
        )

    def _plan(
        self,
        manifest: Manifest,
        listeners: list[socket.socket],
        unix: list[socket.socket],
        tcp: list[list[socket.socket]],
    ) -> None:
        placement = manifest.placement
        keys = () if self._keys is None else ("--keys-file", str(self._keys.path))
        placement_args = ("--placement", placement.to_json(), "--server", manifest.server)
        shard = (*self._commands.shard, *keys, *placement_args)
        addresses: list[str] = []
        if self.config.shard_host:
            addresses = [address_of(self.config.shard_host, each[0].getsockname()[1]) for each in tcp]
        self._shards = [
            Child(self, "shard", index, (*shard, "--directory", folder), [listener, *more], folder=folder)
            for index, (listener, more, folder) in enumerate(
                zip(unix, tcp, manifest.directories, strict=True)
            )
        ]
        paths = [str(self.config.shard_socket(index)) for index in range(placement.shards)]
        more = (
            *("--placement", placement.to_json()),
            *("--sockets", orjson.dumps(paths).decode()),
            *("--addresses", orjson.dumps(addresses).decode()),
            *("--origins", orjson.dumps(self._origins).decode()),
            *keys,
        )
        self._gateways = [
            Child(self, "gateway", index, (*self._commands.gateway, *more), listeners)
            for index in range(self.config.gateways)
        ]

    # While the children run.

    async def _serve(self, listeners: list[socket.socket], signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handle_signals, signals)
            for child in self._shards + self._gateways:
                nursery.start_soon(child.keep_running)
            nursery.start_soon(self._announce_ready)
            nursery.start_soon(self._check_hangs)
            nursery.start_soon(self._keep_checking_keys)
            await self._stop.wait()
            log.info(
                "server is stopping", waiting_for="requests in progress", at_most_ms=self.config.drain_ms
            )
            for listener in listeners:
                listener.close()
            await self._end(self._gateways, within_s=self.config.drain_ms / 1000 + DRAIN_MARGIN_S)
            await self._end(self._shards, within_s=SNAPSHOT_WAIT_S)
            nursery.cancel_scope.cancel()
        log.info("server stopped")

    async def _handle_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload_keys()
            elif not self._stop.is_set():
                self._stop.set()
            elif number == signal.SIGINT:
                self._skip_wait.set()

    def _reload_keys(self) -> None:
        """Read the keys again and signal the children. On an error, `KeyFile` logs it and keeps the old
        keys."""
        if self._keys is None:
            return
        if self._keys.reload():
            for child in self._shards + self._gateways:
                self.notify_of_keys(child)
        self._note_keys(self._keys.problem())

    async def _keep_checking_keys(self) -> None:
        while self._keys is not None:
            await trio.sleep(KEYS_CHECK_S)
            # In a thread, because the file may be on a mount that hangs.
            self._note_keys(await trio.to_thread.run_sync(self._keys.problem, abandon_on_cancel=True))

    def _note_keys(self, problem: str) -> None:
        if problem == self._keys_problem:
            return
        self._keys_problem = problem
        if problem:
            log.error(
                "the key file cannot be read; the previous keys stay valid, but a restart would fail",
                error=problem,
            )
        else:
            log.info("the key file can be read again")
        self.publish_states()

    @property
    def keys_version(self) -> int:
        return 0 if self._keys is None else self._keys.version

    def notify_of_keys(self, child: Child) -> None:
        """Signal a child to read changed keys. A starting child may have read the old ones: it is signalled
        when it is ready."""
        if self._keys is None or child.ready_at is None or child.keys_version == self._keys.version:
            return
        child.keys_version = self._keys.version
        child.signal(signal.SIGHUP)

    async def _announce_ready(self) -> None:
        for child in self._shards + self._gateways:
            await child.is_decided.wait()
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
        self._run_dir.publish("server.json", facts)
        if missing:
            log.warning(
                "server ready, but some shards do not serve; run `streams doctor`",
                url=self._url,
                missing=missing,
            )
        else:
            log.info("server ready", url=self._url)
        self._notify_starter(facts)

    def _notify_starter(self, facts: dict[str, Any]) -> None:
        """Send one line to the process that started the server and waits, if any (`streams.testing`)."""
        if self._starter_fd is None:
            return
        try:
            os.write(self._starter_fd, orjson.dumps(facts) + b"\n")
        except BrokenPipeError:
            log.debug("the process that started the server no longer waits")
        os.close(self._starter_fd)
        self._starter_fd = None

    async def _end(self, children: list[Child], *, within_s: float) -> None:
        """Stop children: SIGTERM, wait, SIGKILL. Another SIGINT ends the wait: a kill loses no more than a
        crash."""
        self._skip_wait = trio.Event()
        for child in children:
            child.stop()
        with trio.move_on_after(within_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._log_waiting, children)
                nursery.start_soon(_cancel_when, self._skip_wait, nursery.cancel_scope)
                for child in children:
                    await child.has_ended.wait()
                nursery.cancel_scope.cancel()
        for child in children:
            if not child.has_ended.is_set():
                log.warning(CHILD_KILLED_AT_STOP, child=child.name)
                child.signal(signal.SIGKILL)
        for child in children:
            await child.has_ended.wait()

    async def _log_waiting(self, children: list[Child]) -> None:
        while True:
            await trio.sleep(STILL_WAITING_EVERY_S)
            late = [child.name for child in children if not child.has_ended.is_set()]
            reason = "their final snapshot" if children is self._shards else "requests in progress"
            hint = "press Ctrl-C to wait no longer"
            log.info(
                "server is stopping: still waiting for processes",
                waiting_for=reason,
                children=late,
                hint=hint,
            )

    def child_environment(self) -> dict[str, str]:
        """Return our environment without the settings: children get them as one config, and shards must not
        see the keys."""
        settings = {setting.variable for setting in SETTINGS} | {READY_FD_VARIABLE}
        others = {name: value for name, value in self._environ.items() if name not in settings}
        return {**others, CHILD_CONFIG_VARIABLE: self.config.to_json()}

    async def _check_hangs(self) -> None:
        while True:
            await trio.sleep(HANG_CHECK_S)
            for child in self._shards + self._gateways:
                if child.has_beaten and child.process is not None and not child.is_stopping.is_set():
                    child.count_silence()

    def report_hopeless(self, child: Child) -> None:
        self._notify_starter({"ready": False, "child": child.name})

    def publish_states(self) -> None:
        states = ProcessStates(
            shards={each.index: each.state() for each in self._shards},
            gateways={each.index: each.state() for each in self._gateways},
            keys_problem=self._keys_problem,
        )
        self._run_dir.publish(FILE_NAME, msgspec.to_builtins(states, str_keys=True))

    def write_pids(self) -> None:
        def pids(children: list[Child]) -> dict[str, int]:
            return {str(child.index): child.process.pid for child in children if child.process is not None}

        facts: dict[str, Any] = {
            "supervisor": os.getpid(),
            "shards": pids(self._shards),
            "gateways": pids(self._gateways),
        }
        self._run_dir.publish("pids.json", facts)


async def _lock(directory: DataDir) -> None:
    """Lock the directory, or raise `CannotServe`. Waits for children of a killed server, not for a running
    server."""
    has_waited = False
    with trio.move_on_after(ORPHANS_WAIT_S):
        while not directory.try_lock():
            holder = directory.holder()
            if holder.is_alive():
                raise CannotServe(
                    f"{directory.path} is in use by {holder}. Use that server, stop it, or choose another "
                    "directory with STREAMS_DATA_DIR"
                )
            if not has_waited:
                log.info("waiting for processes of an earlier server to end", data_dir=str(directory.path))
            has_waited = True
            await trio.sleep(LOCK_POLL_S)
        return
    raise CannotServe(
        f"{directory.path} is still in use, by {directory.holder()} or by processes it started, which have "
        f"not ended within {ORPHANS_WAIT_S:.0f} s. Try again in a moment, or look for them with "
        f"`fuser {directory.path / 'LOCK'}`"
    )


def _check_guide(config: Config) -> None:
    """Raise `CannotServe` if the archive of the guide cannot be served. Each gateway opens it again."""
    if not config.guide:
        return
    try:
        GuideArchive(config.guide).close()
    except BadGuide as error:
        raise CannotServe(str(error)) from None


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _cpu_count() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, SHARDS_MAX)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
