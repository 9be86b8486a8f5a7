"""Runs one shard process: parses arguments, recovers, serves, stops cleanly. Nothing else.

Exit codes: 0 stopped cleanly · 1 the log could not be written, or a bug · 2 bad arguments · 3 damaged data.
SIGTERM, or the death of the supervisor, stops the shard. It ignores SIGINT: the supervisor handles it. On
SIGHUP it reads the keys again.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from shard.core.boxes.upkeep import HotPolicy, SealPolicy
from shard.core.machine import Machine
from shard.engine.committer import CommitFailed
from shard.engine.engine import Engine
from shard.engine.settings import EngineSettings
from shard.engine.time_zones import find_zone
from shard.engine.timekeeper import Timekeeper
from shard.recovery.page_cache import (
    clear_failure,
    evict_page_cache,
    has_failed,
    page_cache_id,
    record_failure,
)
from shard.recovery.recovery import RecoveryProgress, RecoverySummary, recover
from shard.server.heartbeat import Heartbeat
from shard.server.peers import Peers, SlotMap
from shard.server.reporting import Answer, Reporter
from shard.server.server import ShardServer
from shard.storage.faults import Faults
from shard.storage.files import Corrupt, Disk, remove_tree
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams import logs, process
from streams.config import COLD_STORE_FAILED, ChildArgs, Config, ConfigError
from streams.protocol.access.keys import KeyRing
from streams.protocol.payloads.appends import RecordLimits
from streams.protocol.telemetry.reports import ShardReport

if TYPE_CHECKING:
    from shard.engine.object_uploader import UploadTarget
    from shard.storage.cold import ColdStore

log = structlog.get_logger()

EXIT_FAILED, EXIT_REFUSED, EXIT_CORRUPT = 1, 2, 3

#: How long the interpreter lets one thread run while another waits. With the default of 5 ms the commit
#: thread would wait that long for a busy event loop; at 0.5 ms the switch itself is still cheap.
_SWITCH_INTERVAL_S = 0.0005


#: Boxes whose use is counted before other tasks run: a third of a millisecond.
_COUNTED_BOXES = 64


class ColdStoreMissing(Exception):
    """The cold store existed when the server started, and cannot be opened now."""


def limits_of(config: Config) -> RecordLimits:
    return RecordLimits(
        batch_records_max=config.max_batch_records,
        record_bytes_max=config.max_record_bytes,
        meta_bytes_max=config.max_meta_bytes,
        tag_bytes_max=config.max_tag_bytes,
        node_bytes_max=config.max_node_bytes,
    )


def engine_settings(config: Config) -> EngineSettings:
    return EngineSettings(
        sync_interval_ms=config.sync_interval_ms,
        snapshot_wal_bytes=config.snapshot_wal_bytes,
        snapshot_interval_ms=config.snapshot_interval_ms,
        seal=SealPolicy(config.segment_max_events, config.segment_max_bytes, config.segment_max_age_ms),
        hot=HotPolicy(config.hot_retain_segments, config.hot_retain_bytes),
        cache_bytes=config.cache_bytes,
        upkeep_bytes_per_s=config.upkeep_bytes_per_s,
        wal_file_bytes=config.wal_file_bytes,
        disk_low_bytes=config.disk_low_bytes,
        disk_full_bytes=config.disk_full_bytes,
    )


def peers_of(arguments: ChildArgs) -> Peers:
    return Peers(
        shard=arguments.index,
        keys_file=arguments.keys_file,
        placement=arguments.placement,
        body_bytes_max=arguments.config.max_body_bytes,
    )


def open_cold_store(arguments: ChildArgs, disk: Disk, faults: Faults) -> ColdStore | None:
    """Open the cold store of the server. It is written to only while it belongs to this server."""
    config = arguments.config
    if not config.cold_dir:
        return None
    from shard.offline.claim_cold import owner_of  # imports obstore, which is slow
    from shard.storage.cold import ColdConfigError, open_cold
    from shard.storage.cold.fault_recorder import FaultRecordingCold
    from shard.storage.cold.ownership import OwnedCold

    try:
        store = open_cold(config.cold_dir, disk)
    except ColdConfigError as error:
        raise ColdStoreMissing(f"{COLD_STORE_FAILED}: {error}") from None
    owned_store = OwnedCold(store, owner_of(arguments.server, str(config.data_dir)))
    return FaultRecordingCold(owned_store, faults)


def upload_target_of(arguments: ChildArgs, store: ColdStore, folder: str) -> UploadTarget:
    """Return the object store that gets a copy of the boxes of class object."""
    from shard.engine.object_uploader import UploadTarget  # as above

    return UploadTarget(
        store,
        server=arguments.server,
        shard=arguments.index,
        slots=msgspec.json.decode(arguments.placement, type=SlotMap).slots if arguments.placement else [],
        folder=folder,
        flush_ms=arguments.config.object_flush_ms,
    )


def _absolute(location: str) -> str:
    """Return the location of a cold store for processes that may run in another folder."""
    return location if not location or "://" in location else os.path.abspath(location)


class Shard:
    def __init__(self, arguments: ChildArgs) -> None:
        config = arguments.config
        self._arguments = arguments
        self._config = config
        directory = f"{config.data_dir}/{arguments.directory or f'shard-{arguments.index:02d}'}"
        self._directory = directory
        disk = self._disk = Disk()
        self._export_folder = f"{directory}/export"
        disk.mkdir(directory)
        disk.fsync_dir(str(config.data_dir))
        self._has_failed = arguments.is_after_failure or has_failed(disk, directory)
        if self._has_failed:
            log.warning("the previous run ended because the disk failed; reserved seqs are skipped")
            evict_page_cache(f"{directory}/wal")
        # A shard's share of the server's limit, rounded up: boxes spread evenly over slots.
        boxes_max = -(-config.max_boxes // config.shards) if config.max_boxes else 0
        sessions_max = -(-config.max_watch_sessions // config.shards) if config.max_watch_sessions else 0
        self._machine = Machine(
            boxes_max=boxes_max,
            bytes_max=-(-config.max_total_bytes // config.shards),
            routers_max=config.max_routers,
            sessions_max=sessions_max,
            shard=arguments.index,
            due_records=config.segment_max_events,
            due_bytes=config.segment_max_bytes,
            txn_bytes_max=config.txn_bytes,
            txn_ttl_ms=config.txn_ttl_ms,
            has_store=bool(config.cold_dir),
            streams_in_store=config.s2_durability == "object",
            # Pending uploads are unsealed. More than twice the cache of unsealed batches blocks all writers.
            backlog_bytes_max=min(config.object_backlog_bytes, config.cache_bytes),
            schedules_max=config.max_schedules,
            find_zone=find_zone,
        )
        self._wal = Wal(disk, f"{directory}/wal", file_bytes=config.wal_file_bytes, reserves=True)
        self._snapshots = Snapshots(disk, f"{directory}/snapshot")
        self._faults = Faults()
        cold = open_cold_store(arguments, disk, self._faults)
        self._store = SegmentStore(disk, f"{directory}/segments", cold, server=arguments.server)
        self._base_folder = f"{directory}/object-base"
        self._upload_target = (
            upload_target_of(arguments, cold, self._base_folder) if cold is not None else None
        )
        if arguments.ready_fd >= 0:
            os.set_blocking(arguments.ready_fd, False)  # a supervisor that does not read must not block us
        listener, *tcp = [socket.socket(fileno=fd) for fd in arguments.listen_fds]
        self._peers = peers_of(arguments) if tcp else None
        self._server = ShardServer(listener, limits_of(config), config.thresholds, tcp, self._peers)
        self._server.describe = self._describe
        self._ring = KeyRing()
        self._read_keys()
        self._server.find_key = lambda secret: self._ring.find(secret)
        self._server.report = self._report_unready

    def _read_keys(self) -> None:
        """Read the keys that the supervisor has written, as digests. There are none if the server requires
        none."""
        if self._arguments.keys_file:
            self._ring = KeyRing.from_json(Path(self._arguments.keys_file).read_bytes())

    async def _count_use(self) -> None:
        """Count the usage of keys with limits in this shard, a few boxes at a time."""
        usage = self._machine.usage
        usage.set_accounts(self._ring.accounts().values())
        while usage.step(_COUNTED_BOXES):
            await trio.lowlevel.checkpoint()

    def _describe(self) -> dict[str, object]:
        return {
            "shard": self._arguments.index,
            "pid": os.getpid(),
            "ready": self._server.engine is not None,
            "disk": self._server.engine.disk_space.level.name.lower() if self._server.engine else "ok",
            "cold_dir": _absolute(self._config.cold_dir),
            "upkeep_bytes_per_s": self._config.upkeep_bytes_per_s,
            "recent_acks": self._server.recent_acks.counts(),
            "replay_progress": 1.0 if self._server.engine else round(self._server.progress, 4),
            **self._machine.statistics(),
        }

    def _report_unready(self, answer: Answer, *, is_brief: bool = False) -> None:
        progress = round(self._server.progress, 4)
        answer(ShardReport(shard=self._arguments.index, replay_progress=progress, process=process.report()))

    def _notify_supervisor(self, line: str) -> None:
        _write_line(self._arguments.ready_fd, line)

    async def run(self) -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._server.run)
            stopping = trio.Event()
            nursery.start_soon(self._watch_signals, stopping)
            nursery.start_soon(self._watch_parent, stopping)
            try:
                summary = await self._recover(stopping)
            except Corrupt as damage:
                self._notify_supervisor(f"error {damage}")
                log.error(
                    "data is damaged: this shard does not serve",
                    path=damage.path,
                    offset=damage.offset,
                    message=str(damage),
                )
                nursery.cancel_scope.cancel()
                return EXIT_CORRUPT
            if summary is None:  # a stop was requested during the replay; nothing was written
                nursery.cancel_scope.cancel()
                return 0
            code = await self._serve(summary, stopping)
            nursery.cancel_scope.cancel()
            return code
        raise AssertionError("the nursery returns above")

    async def _recover(self, stopping: trio.Event) -> RecoverySummary | None:
        started_s, last_report_s = trio.current_time(), 0.0
        # Recovery makes almost no cyclic garbage, and the collector would walk all boxes again and again.
        # `_serve` collects once and enables it.
        gc.disable()
        for step in recover(self._machine, self._wal, self._snapshots, self._store.open):
            if isinstance(step, RecoveryProgress):
                self._server.progress = step.ratio
                if trio.current_time() - last_report_s > 0.2:
                    last_report_s = trio.current_time()
                    self._notify_supervisor(f"progress {step.ratio:.4f}")
                await trio.lowlevel.checkpoint()
                if stopping.is_set():
                    return None
            else:
                for path in step.skipped_snapshots:
                    log.error("a snapshot is damaged; recovery used an older one", path=path)
                    self._faults.note_damage("snapshot", path, "it does not match its checksum")
                seconds = trio.current_time() - started_s
                log.info(
                    "shard recovered",
                    boxes=len(self._machine.boxes),
                    lsn=step.last_lsn,
                    snapshot_lsn=step.snapshot_lsn,
                    frames=step.frames_applied,
                    mebibytes=round(step.bytes_read / 2**20, 1),
                    seconds=round(seconds, 3),
                )
                return step
        raise AssertionError("recovery ends with a summary")

    async def _serve(self, summary: RecoverySummary, stopping: trio.Event) -> int:
        timekeeper = Timekeeper()
        engine = Engine(
            self._machine,
            self._wal,
            self._snapshots,
            self._store,
            now_ms=timekeeper.now_ms,
            observe_clock=timekeeper.observe,
            wall_ahead_ms=timekeeper.wall_ahead_ms,
            settings=engine_settings(self._config),
            disk=self._disk,
            export_folder=self._export_folder,
            needs_lsn=summary.needs_lsn,
            upload_target=self._upload_target,
            faults=self._faults,
        )
        self._store.remove_leftovers()
        remove_tree(self._disk, self._export_folder)
        remove_tree(self._disk, self._base_folder)
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        gc.enable()
        async with trio.open_nursery() as nursery:
            boot_id, cache_survived = page_cache_id(self._directory), not self._has_failed
            await nursery.start(partial(engine.run, boot_id=boot_id, cache_survived=cache_survived))
            if engine.failure is None:
                clear_failure(self._disk, self._directory)
                await self._count_use()
                reporter = Reporter(
                    self._machine,
                    engine,
                    shard=self._arguments.index,
                    rows_max=self._config.metrics_boxes,
                    times=self._server.times,
                    pressure=self._server.pressure,
                    timekeeper=timekeeper,
                )
                nursery.start_soon(self._server.pressure.run, engine)
                nursery.start_soon(reporter.run)
                self._server.begin(engine)
                self._server.report = reporter.request
                self._notify_supervisor("ready")
                heartbeat = Heartbeat(engine.log_progress, partial(self._notify_supervisor, "beat"))
                nursery.start_soon(heartbeat.run)
            await _wait_for_first(stopping, engine.failure_event)
            nursery.cancel_scope.cancel()
        if engine.failure is None:
            self._server.draining = True
            self._server.engine = None
            self._server.report = self._report_unready
            try:
                await engine.stop()
            except (OSError, CommitFailed) as error:
                return self._end_after_failure(error)
            log.info("shard stopped cleanly", lsn=self._machine.lsn)
            return 0
        return self._end_after_failure(engine.failure)

    def _end_after_failure(self, error: BaseException) -> int:
        self._notify_supervisor(f"error the log could not be written: {error}")
        log.error("the log could not be written; this shard ends", error=repr(error))
        record_failure(self._disk, self._directory)
        return EXIT_FAILED

    async def _watch_signals(self, stopping: trio.Event) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGTERM:
                    stopping.set()
                else:
                    self._read_keys()
                    if self._server.engine is not None:
                        await self._count_use()
                    if self._peers is not None:
                        self._peers.read_keys_again()

    async def _watch_parent(self, stopping: trio.Event) -> None:
        await trio.lowlevel.wait_readable(self._arguments.parent_fd)
        stopping.set()


def _write_line(fd: int, line: str) -> None:
    """Send one line to the supervisor."""
    try:
        os.write(fd, line.replace("\n", " ").encode() + b"\n")
    except OSError:
        pass  # the supervisor is dead; `_watch_parent` stops the shard


async def _wait_for_first(*events: trio.Event) -> None:
    async def watch(event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        for event in events:
            nursery.start_soon(watch, event, nursery.cancel_scope)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes sends it to all its processes
    try:
        arguments = ChildArgs.parse(sys.argv[1:], os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    logs.setup(arguments.config.log, arguments.config.log_format, process=f"shard-{arguments.index:02d}")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    process.raise_descriptor_limit()
    process.time_gc()
    try:
        shard = Shard(arguments)
    except ColdStoreMissing as error:
        log.error("this shard cannot start", error=str(error))
        _write_line(arguments.ready_fd, f"error {error}")
        return EXIT_FAILED
    return trio.run(shard.run)


if __name__ == "__main__":
    process.leave(main())
