"""An engine whose object boxes go to a store that can be made to fail; what is put back from the store alone.

`FaultyStore` stands before a real store, folder or S3. Writing operations are numbered, so that a test can
say at which of them the power goes: before it took effect, or after. From then on nothing gets through.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from shard.core.machine import Machine
from shard.engine.engine import Engine
from shard.engine.object_uploader import UploadTarget
from shard.offline.restore import RestoreResult
from shard.offline.restore_objects import ObjectRestoreJob, ObjectRestoreResult, find_chains
from shard.storage.cold import ColdStore, ColdUnavailable
from shard.storage.files import Buffer, Disk
from shard.storage.segments.store import SegmentStore
from shard.transfer.shard_folders import read_shard
from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Command
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.slots import SLOTS
from tests.support.engine_desk import PATIENCE_S, EngineDesk, Ticket, recovered_engine
from tests.support.machines import columns

T = TypeVar("T")


class FaultyStore:
    def __init__(self, inner: ColdStore) -> None:
        self.inner = inner
        #: Writing operations so far.
        self.writes = 0
        #: Numbers of writing operations that fail: True if they take effect all the same.
        self.failing: dict[int, bool] = {}
        #: While it is set, every operation fails.
        self.is_away = threading.Event()
        #: The power goes at this writing operation, after it took effect or before.
        self.dies_at = 0
        self.dies_after = False
        self.died = threading.Event()
        self._busy = 0
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<FaultyStore {self.writes} writes, {'dead' if self.died.is_set() else 'alive'}>"

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        self._write(name, lambda: self.inner.put(name, source, size=size, checksum=checksum))

    def create(self, name: str, content: bytes) -> bool:
        return self._do(name, lambda: self.inner.create(name, content))

    def delete(self, name: str) -> None:
        self._write(name, lambda: self.inner.delete(name))

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        self._do(name, lambda: self.inner.verify(name, size=size, checksum=checksum))

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._do(name, lambda: self.inner.read(name, offset, length))

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._do(name, lambda: self.inner.read_many(name, ranges))

    def size(self, name: str) -> int | None:
        return self._do(name, lambda: self.inner.size(name))

    def names(self, prefix: str = "") -> Iterator[str]:
        return iter(self._do(prefix, lambda: list(self.inner.names(prefix))))

    def wait_idle(self) -> None:
        """Until nothing is on its way any more."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._busy, PATIENCE_S)

    def _do(self, name: str, work: Callable[[], T]) -> T:
        with self._changed:
            if self.is_away.is_set() or self.died.is_set():
                raise ColdUnavailable(name, "a test says so")
            self._busy += 1
        try:
            return work()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _write(self, name: str, work: Callable[[], None]) -> None:
        with self._changed:
            self.writes += 1
            number = self.writes
        if number == self.dies_at and not self.dies_after:
            self.died.set()
        takes_effect = self.failing.get(number, True)
        if takes_effect:
            self._do(name, work)
        if number == self.dies_at:
            self.died.set()
        if number in self.failing or number == self.dies_at:
            raise ColdUnavailable(name, "a test says so")


class Life(EngineDesk):
    """One life of a shard with object boxes."""

    def __init__(self, engine: Engine, machine: Machine) -> None:
        super().__init__(engine)
        self.machine = machine

    async def ask(self, command: Command) -> Any:
        """The reply; raises what it is refused with."""
        reply = await self.send(command).reply()
        if isinstance(reply, StreamsError):
            raise reply
        return reply

    async def put(self, box: str = "b", **config: Any) -> Any:
        return await self.ask(commands.PutBox(box, BoxPatch(**{"durability": "object", **config})))

    def write(self, *records: Any, box: str = "b", **more: Any) -> Ticket:
        return self.send(commands.Append(box=box, columns=columns(*records), **more))

    async def append(self, *records: Any, box: str = "b", **more: Any) -> Any:
        return await self.ask(commands.Append(box=box, columns=columns(*records), **more))


@asynccontextmanager
async def living(
    directory: Path,
    store: ColdStore | None,
    *,
    stops: bool = True,
    server: str = "1",
    machine: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **place: Any,
) -> AsyncIterator[Life]:
    """A life on this folder. It ends in order, or as a process does that is killed."""
    disk = Disk()
    disk.mkdir(str(directory))
    segments = SegmentStore(disk, f"{directory}/segments", store)
    made = Machine(has_store=store is not None, **(machine or {}))
    where = None
    if store is not None:
        slots = [(0, SLOTS, 0)]
        more = {"flush_ms": 1, "slots": slots, "shard": 0, **place}
        where = UploadTarget(store, server=server, folder=f"{directory}/object-base", **more)
    engine = recovered_engine(
        directory,
        disk,
        made,
        segments,
        settings={"upkeep_bytes_per_s": 0, "snapshot_interval_ms": 10**8, **(settings or {})},
        now_ms=lambda: 1_000_000,
        upload_target=where,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: engine.run(boot_id="boot", task_status=task_status))
        try:
            yield Life(engine, made)
        finally:
            nursery.cancel_scope.cancel()
    assert engine.failure is None, engine.failure
    if stops:
        await engine.stop()
    else:
        engine._fetcher.stop()
        await trio.to_thread.run_sync(engine._committer.stop)
    if isinstance(store, FaultyStore):
        await trio.to_thread.run_sync(store.wait_idle)


def put_back(store: ColdStore, directory: Path) -> tuple[Machine, ObjectRestoreResult]:
    """What `streams restore` makes of a store alone, as the machine of a shard that has all slots."""
    disk = Disk()
    directory.mkdir()
    told = find_chains(store, disk)
    if not told:  # nothing was ever there
        return Machine(), ObjectRestoreResult(RestoreResult(0, 0, 0, 0), 0, 0, 0)
    found = ObjectRestoreJob(
        disk,
        store,
        told,
        data_dir=str(directory),
        folders=["shard-00"],
        slots=[0] * SLOTS,
        boot_id="boot",
        now_ms=2_000_000,
    ).restore()
    machine = read_shard(disk, f"{directory}/shard-00")
    machine.check()
    return machine, found
