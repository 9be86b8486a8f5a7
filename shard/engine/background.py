"""Runs the background tasks of a shard: each waits for the log, works in a thread, and logs the result.

    renderer    writes the rows of commits into boxes         recovery/commit_renderer.py
    upkeep      seals, compacts, moves, drops segments        upkeep.py
    snapshots   writes the state to disk, releases old log    snapshots.py
    exports     pins a consistent state for a backup          transfer/exports.py
    uploader    copies changes of object boxes to the store   object_uploader.py; only with an object store

They share the machine with the commands, in one thread: each takes small steps between turns. They log
through `Ports.log_outcome` and never answer a client.

They use the disk of the log. So if it fails in one of them, the shard ends (`on_failed`). A full disk is no
failure: the tasks wait for space.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import trio

from shard.core.machine import Machine, Outcome
from shard.core.outcome import OutcomeLogger
from shard.engine.cache import PayloadCache
from shard.engine.committer import Committer
from shard.engine.object_uploader import ObjectUploader, UploadTarget
from shard.engine.settings import EngineSettings
from shard.engine.snapshots import SnapshotKeeper
from shard.engine.upkeep import Upkeep
from shard.recovery.commit_renderer import CommitRenderer, chunk_reader
from shard.storage.faults import Faults
from shard.storage.files import Corrupt, DiskLike
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from shard.transfer.exports import Exports


class ShardFiles(NamedTuple):
    """The files and stores of a shard."""

    disk: DiskLike
    wal: Wal
    snapshots: Snapshots
    store: SegmentStore
    export_folder: str
    #: The object store that gets a copy of object boxes, if the server has one.
    upload_target: UploadTarget | None


class Ports(NamedTuple):
    """The callbacks and facts of the engine that the tasks use."""

    now_ms: Callable[[], int]
    #: True when an lsn is durable, False if the log failed first.
    wait_durable: Callable[[int], Awaitable[bool]]
    log_outcome: OutcomeLogger
    #: Logs moves that an export has delayed, and wakes the readers of their boxes.
    log_moves: OutcomeLogger
    on_uploaded: Callable[[Outcome], None]
    on_rendered: Callable[[Iterable[int]], None]
    on_failed: Callable[[BaseException], None]
    is_disk_full: Callable[[], bool]
    is_log_blocked: Callable[[], bool]
    #: The first lsn that the snapshot of the last recovery needs.
    needs_lsn: int
    faults: Faults


class Background:
    def __init__(
        self,
        machine: Machine,
        files: ShardFiles,
        committer: Committer,
        cache: PayloadCache,
        settings: EngineSettings,
        ports: Ports,
    ) -> None:
        self._machine = machine
        self._on_failed = ports.on_failed
        self.renderer = CommitRenderer(
            machine,
            chunk_reader(files.wal),
            log_outcome=ports.log_outcome,
            wait_durable=ports.wait_durable,
            is_blocked=ports.is_log_blocked,
            is_pressed=lambda: self.upkeep.is_pressed,
            on_rendered=ports.on_rendered,
        )
        self.upkeep = Upkeep(
            machine,
            files.store,
            cache,
            settings.seal,
            settings.hot,
            now_ms=ports.now_ms,
            log_outcome=ports.log_outcome,
            wait_durable=ports.wait_durable,
            pinned_lsn=lambda: self.snapshots.pinned_lsn(),
            unsealed_bytes_max=settings.cache_bytes,
            bytes_per_s=settings.upkeep_bytes_per_s,
            is_disk_full=ports.is_disk_full,
            faults=ports.faults,
        )
        self.snapshots = SnapshotKeeper(
            machine,
            (files.wal, files.snapshots),
            committer,
            self.upkeep,
            settings,
            needs_lsn=ports.needs_lsn,
            now_ms=ports.now_ms,
            wait_durable=ports.wait_durable,
            log_outcome=ports.log_outcome,
            on_failed=ports.on_failed,
        )
        self.exports = self._new_exports(files, settings, ports)
        self.uploader = (
            self._new_uploader(files.upload_target, files, settings, ports) if files.upload_target else None
        )

    def __repr__(self) -> str:
        return f"<Background {self.renderer!r}, {self.upkeep!r}, {self.snapshots!r}>"

    def _new_exports(self, files: ShardFiles, settings: EngineSettings, ports: Ports) -> Exports:
        return Exports(
            self._machine,
            files.disk,
            files.export_folder,
            now_ms=ports.now_ms,
            wait_durable=ports.wait_durable,
            wait_rendered=self.renderer.wait_idle,
            pins=self.upkeep.pins,
            on_unpinned=self.snapshots.sweep,
            log_outcome=ports.log_moves,
            file_bytes=settings.wal_file_bytes,
            bytes_per_s=settings.upkeep_bytes_per_s,
        )

    def _new_uploader(
        self, target: UploadTarget, files: ShardFiles, settings: EngineSettings, ports: Ports
    ) -> ObjectUploader:
        return ObjectUploader(
            self._machine,
            target,
            files.disk,
            files.store,
            now_ms=ports.now_ms,
            wait_durable=ports.wait_durable,
            on_uploaded=ports.on_uploaded,
            pins=self.upkeep.pinned_for_base,
            on_unpinned=self.snapshots.sweep,
            file_bytes=settings.wal_file_bytes,
        )

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.snapshots.run)
        nursery.start_soon(self._run_upkeep)
        nursery.start_soon(self._run_renderer)
        self.renderer.wake()
        nursery.start_soon(self.exports.run)
        if self.uploader is not None:
            nursery.start_soon(self.uploader.run)

    def on_durable(self) -> None:
        """Wake the tasks: more of the log is durable."""
        if self._machine.txns.commits:
            self.renderer.wake()
        if self.uploader is not None and self._machine.uploading.is_on:
            self.uploader.wake()
        self.upkeep.wake()
        self.snapshots.on_durable()

    async def _run_upkeep(self) -> None:
        try:
            await self.upkeep.run()
        except OSError as error:  # the disk of the log has failed
            self._on_failed(error)

    async def _run_renderer(self) -> None:
        try:
            await self.renderer.run()
        except (OSError, Corrupt) as error:  # it reads the log
            self._on_failed(error)
