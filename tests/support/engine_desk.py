"""An engine in this process, and those who ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from shard.core.machine import Machine
from shard.engine.engine import Engine
from shard.engine.settings import EngineSettings
from shard.recovery.recovery import RecoverySummary, recover
from shard.storage.files import DiskLike
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Command, Reply

#: An answer that takes this long is not late, it is missing.
PATIENCE_S = 60.0


def recovered_engine(
    folder: object,
    disk: DiskLike,
    machine: Machine,
    store: SegmentStore,
    *,
    settings: dict[str, Any],
    now_ms: Callable[[], int],
    wal_options: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    """An engine over what is in this folder, as a start of the shard makes it."""
    wal = Wal(disk, f"{folder}/wal", **{"file_bytes": 1 << 20, **(wal_options or {})})
    snapshots = Snapshots(disk, f"{folder}/snapshot")
    *_, found = recover(machine, wal, snapshots, store.open)
    assert isinstance(found, RecoverySummary)
    return Engine(
        machine,
        wal,
        snapshots,
        store,
        now_ms=now_ms,
        settings=EngineSettings(**settings),
        disk=disk,
        export_folder=f"{folder}/export",
        needs_lsn=found.needs_lsn,
        **more,
    )


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for what tells nobody when it happens."""
    with trio.fail_after(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 (there is no event to wait for)
            await trio.sleep(0.002)


class Ticket:
    """Waits for a reply. `order` is shared, so that it shows which ticket was answered first."""

    def __init__(self, order: list[Ticket]) -> None:
        self._order = order
        self._came = trio.Event()
        self.found: Reply | StreamsError | None = None

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        assert self.found is None, "answered twice"
        self.found = reply
        self._order.append(self)
        self._came.set()

    @property
    def is_answered(self) -> bool:
        return self.found is not None

    async def reply(self) -> Any:
        with trio.fail_after(PATIENCE_S):
            await self._came.wait()
        return self.found


class EngineDesk:
    """Hands commands to an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.order: list[Ticket] = []

    def send(self, command: Command) -> Ticket:
        ticket = Ticket(self.order)
        self.engine.submit(command, ticket)
        self.engine.flush()
        return ticket

    async def ask(self, command: Command) -> Any:
        return await self.send(command).reply()

    async def until(self, is_so: Callable[[], bool]) -> None:
        await until(is_so)
