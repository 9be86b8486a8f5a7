"""Goal: on a full disk a shard refuses what it has no room for, serves the rest, and goes on by itself.

Method: the table of commands against all commands there are; levels from figures; and the real engine over
real files on a disk that says it is full when the test says so.
"""

from __future__ import annotations

import errno
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

import shard.engine.pressure
import shard.engine.snapshots
import shard.engine.upkeep
from shard.core.boxes.upkeep import SealPolicy
from shard.core.machine import Machine
from shard.engine.disk_space import ADDING_COMMANDS, LOGGED_COMMANDS, UNLOGGED_COMMANDS, DiskSpace, Level
from shard.engine.engine import Engine
from shard.engine.log_files import LogFiles
from shard.engine.settings import EngineSettings
from shard.recovery.recovery import RecoverySummary, recover
from shard.storage.files import Disk, Space
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams.protocol.errors import DiskFull, InvalidRequest, StreamsError
from streams.protocol.messages import commands, forwards, queues, s2
from streams.protocol.messages.commands import Command, Reply
from streams.protocol.model.boxes import BoxPatch
from tests.support.faultdisk import FaultDisk
from tests.support.machines import columns, seqs_of

PATIENCE_S = 30.0
MIB = 1 << 20


# -- the rules


def kinds_of(union: Any) -> set[type]:
    members = typing.get_args(union)
    return {union} if not members else set().union(*map(kinds_of, members))


def test_every_command_is_known_to_add_to_be_logged_or_to_be_neither() -> None:
    assert not (
        set(ADDING_COMMANDS) & LOGGED_COMMANDS
        or set(ADDING_COMMANDS) & UNLOGGED_COMMANDS
        or LOGGED_COMMANDS & UNLOGGED_COMMANDS
    )
    assert kinds_of(Command) <= set(ADDING_COMMANDS) | LOGGED_COMMANDS | UNLOGGED_COMMANDS


def test_a_level_begins_at_its_watermark_and_ends_an_eighth_above_it() -> None:
    disk = FaultDisk("/data")
    space = DiskSpace(disk, "/data", low_bytes=800, full_bytes=80)

    def level_at(free: int, **log: Any) -> Level:
        disk.free = free
        space.measure()
        facts = {
            "lacks_next_file": False,
            "waits_for_space": False,
            "room_bytes": lambda: 1000,
            "file_bytes": 4096,
        }
        space.update_level(**{**facts, **log})
        return space.level

    with capture_logs() as logs:
        assert level_at(801) == Level.OK
        assert level_at(799) == level_at(899) == Level.LOW
        assert level_at(79) == level_at(89) == Level.FULL
        assert level_at(91) == Level.LOW and level_at(900) == Level.OK
    assert [each["log_level"] for each in logs] == ["error", "error", "error", "info"]
    # What the log has met counts, whatever the file system says.
    assert level_at(10_000, lacks_next_file=True) == Level.LOW
    assert level_at(10_000, lacks_next_file=True, room_bytes=lambda: 100) == Level.FULL
    assert level_at(10_000, waits_for_space=True) == Level.FULL
    assert level_at(10_000) == Level.OK


def test_a_commit_is_refused_when_the_disk_has_no_room_for_its_rows_to_be_rendered() -> None:
    disk = FaultDisk("/data")
    space = DiskSpace(disk, "/data", low_bytes=800, full_bytes=80)
    disk.free = 1000 * MIB
    space.measure()
    assert space.refusal_for_size(900 * MIB) is None and space.refusal_for_size(MIB) is None
    refused = space.refusal_for_size(1000 * MIB)
    assert isinstance(refused, DiskFull) and "free space" in str(refused)
    assert space.level == Level.OK and space.refusals == 1


def test_watermarks_fit_the_disk_unless_they_are_given() -> None:
    disk = FaultDisk("/data")
    space = DiskSpace(disk, "/data")
    for total, low, full in ((64 * MIB, 64 * MIB // 20, 64 * MIB // 80), (1 << 40, 1 << 30, 256 << 20)):
        disk.total = total
        space.measure()
        assert (space.low_bytes, space.full_bytes) == (low, full)


# -- the engine


class FillableDisk(Disk):
    """A real disk on which nothing can be made while it `is_full`; what it says is free is its own."""

    def __init__(self) -> None:
        self.is_full = False
        self.free = 1 << 40
        self.refusals = 0

    def _check(self) -> None:
        if self.is_full:
            self.refusals += 1
            raise OSError(errno.ENOSPC, "full")

    def create(self, path: str) -> int:
        self._check()
        return super().create(path)

    def allocate(self, handle: int, size: int) -> None:
        self._check()
        super().allocate(handle, size)

    def space(self, path: str) -> Space:
        return Space(self.free, 1 << 41)


class Ticket:
    def __init__(self) -> None:
        self._came = trio.Event()
        self._reply: Reply | StreamsError | None = None

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        self._reply = reply
        self._came.set()

    @property
    def is_answered(self) -> bool:
        return self._reply is not None

    async def reply(self) -> Any:
        with trio.fail_after(PATIENCE_S):
            await self._came.wait()
        return self._reply


class Desk:
    def __init__(self, engine: Engine, disk: FillableDisk, wal: Wal) -> None:
        self.engine = engine
        self.disk = disk
        self.wal = wal

    def send(self, command: Command) -> Ticket:
        ticket = Ticket()
        self.engine.submit(command, ticket)
        self.engine.flush()
        return ticket

    async def ask(self, command: Command) -> Any:
        return await self.send(command).reply()

    async def append(self, box: str, *records: Any) -> Any:
        return await self.ask(commands.Append(box=box, columns=columns(*records)))

    async def until(self, is_so: Any) -> None:
        with trio.fail_after(PATIENCE_S):
            while not is_so():  # noqa: ASYNC110 (there is no event to wait for)
                await trio.sleep(0.002)

    async def at(self, level: Level, *, free: int) -> None:
        self.disk.free = free
        await self.until(lambda: self.engine.disk_space.level == level)


@asynccontextmanager
async def opened(folder: Path, disk: FillableDisk, **settings: Any) -> AsyncIterator[Desk]:
    store = SegmentStore(disk, f"{folder}/segments", None)
    seal = settings.setdefault("seal", SealPolicy(10_000, 1 << 26, 10**12))
    machine = Machine(due_records=seal.records, due_bytes=seal.bytes)
    wal = Wal(disk, f"{folder}/wal", file_bytes=1 << 16, reserves=True)
    snapshots = Snapshots(disk, f"{folder}/snapshot")
    *_, found = recover(machine, wal, snapshots, store.open)
    assert isinstance(found, RecoverySummary)
    engine = Engine(
        machine,
        wal,
        snapshots,
        store,
        now_ms=lambda: 1_000_000,
        settings=EngineSettings(
            **{"wal_file_bytes": 1 << 16, "disk_low_bytes": 800, "disk_full_bytes": 80, **settings}
        ),
        disk=disk,
        export_folder=f"{folder}/export",
        needs_lsn=found.needs_lsn,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: engine.run(boot_id="boot", task_status=task_status))
        yield Desk(engine, disk, wal)
        nursery.cancel_scope.cancel()
    assert engine.failure is None
    await engine.stop()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.engine.pressure, "MEASURE_S", 0.005)
    monkeypatch.setattr(shard.engine.pressure, "MEASURE_SHORT_S", 0.005)
    monkeypatch.setattr(shard.engine.snapshots, "_FULL_PAUSE_S", 0.01)
    monkeypatch.setattr(shard.engine.upkeep, "_FULL_PAUSE_S", 0.01)
    monkeypatch.setattr("shard.engine.committer._FULL_WAIT_S", 0.005)


def copies(origin: str) -> forwards.Forward:
    head = forwards.ForwardHead(box="dead", origin=origin, life=1, after=0, upto=1, count=1, bind=True)
    return forwards.Forward(head, b'{"$seq":1,"$ts":1,"data":1}')


async def test_routers_wait_and_dead_letters_arrive_when_space_is_low(tmp_path: Path) -> None:
    async with opened(tmp_path, FillableDisk()) as desk:
        await desk.append("dead", 1)
        await desk.at(Level.LOW, free=100)
        assert isinstance(await desk.ask(copies("a-router#1")), DiskFull)
        assert isinstance(await desk.ask(copies("dead letters of jobs 1")), forwards.ForwardReply)
        await desk.at(Level.OK, free=1 << 40)
        assert isinstance(await desk.ask(copies("a-router#1")), forwards.ForwardReply)


async def test_inputs_of_a_session_behind_one_that_was_refused_are_refused_too(tmp_path: Path) -> None:
    async with opened(tmp_path, FillableDisk()) as desk:
        spec = s2.Spec()
        await desk.ask(s2.PutStream(box="basin-of-s2/s", basin_number=1, asked=spec, defaults=spec))
        first, second = (
            s2.AppendStream(box="basin-of-s2/s", tails=[b"x"], chain="session") for _ in range(2)
        )
        await desk.at(Level.LOW, free=100)
        assert isinstance(await desk.ask(first), DiskFull)
        await desk.at(Level.OK, free=1 << 40)
        assert isinstance(await desk.ask(second), InvalidRequest)


async def test_claims_that_wait_are_served_when_there_is_space_again(tmp_path: Path) -> None:
    async with opened(tmp_path, FillableDisk()) as desk:
        await desk.ask(commands.PutBox("jobs", BoxPatch(type="queue", durability="memory")))
        waiting, brief = (
            desk.send(queues.Claim(box="jobs", node="w", wait_ms=wait_ms)) for wait_ms in (10**9, 10**6)
        )
        await desk.at(Level.FULL, free=10)
        assert isinstance(await desk.ask(queues.Claim(box="jobs", node="w")), DiskFull)
        assert isinstance(await desk.append("jobs", 1), commands.AppendResult)  # into memory
        desk.engine._tick(1_000_000, trio.current_time() + 10**4)  # when the time of one of them is up
        assert isinstance(await brief.reply(), DiskFull)
        assert not waiting.is_answered
        await desk.at(Level.OK, free=1 << 40)
        assert len((await waiting.reply()).jobs) == 1


async def test_a_snapshot_and_a_segment_that_have_no_space_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.core.boxes.unsealed.SMALL_BYTES", 0)
    monkeypatch.setattr("shard.engine.upkeep._PAUSE_S", 0.002)
    disk = FillableDisk()
    async with opened(tmp_path, disk, snapshot_interval_ms=10, seal=SealPolicy(5, 1 << 20, 10**12)) as desk:
        await desk.append("b", 0)
        await desk.until(lambda: len(list((tmp_path / "snapshot").glob("*.snap"))) > 0)
        disk.is_full = True
        before = disk.refusals
        await desk.append("b", *range(10))  # enough for a segment; the log has its room
        await desk.until(lambda: disk.refusals > before + 10)
        assert desk.engine.failure is None
        assert len(seqs_of(await desk.ask(commands.ReadBox(box="b")))) == 11
        disk.is_full = False
        await desk.until(lambda: desk.engine.machine.boxes["b"].log.segments)


async def test_a_log_that_fills_up_on_a_full_disk_loses_no_ack(tmp_path: Path) -> None:
    """The disk is full between two looks: what is logged takes the room there is, first records, then fences,
    until both are answered 507; then all goes on.

    The thread that makes log files finds the disk full when the first file is; it is waited for there. Were
    the second file full before it had its turn, the last record would be answered when there is room again
    (`test_what_met_a_full_log_is_answered_when_there_is_room`)."""
    disk = FillableDisk()
    async with opened(tmp_path, disk) as desk:
        await desk.append("b", 0)
        await desk.append("c", 0)
        await desk.until(lambda: desk.wal.has_spare)  # so that two files of the log fill up
        disk.is_full = True
        acked, fences = 1, 0
        while isinstance(await desk.append("b", "x" * 1000), commands.AppendResult):
            acked += 1
            if not desk.wal.has_spare:
                await desk.until(lambda: desk.engine.disk_space.level == Level.LOW)
        while isinstance(await desk.ask(commands.SetFence("c", f"{fences:030d}")), commands.SetFenceReply):
            fences += 1  # each another one: a fence that is set already is not logged
        assert isinstance(await desk.append("b", 1), DiskFull)
        assert isinstance(await desk.ask(commands.ReadBox(box="b", limit=1)), commands.DiffResult)
        disk.is_full = False
        await desk.until(lambda: desk.engine.disk_space.level == Level.OK)
        assert isinstance(await desk.append("b", 2), commands.AppendResult)
    async with opened(tmp_path, disk) as desk:
        assert desk.engine.machine.boxes["b"].log.head_seq == acked + 1 > 40
        assert fences > 0


async def test_what_met_a_full_log_is_answered_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log fills up before anyone has seen that there is no next file: what is at hand waits, the rest is
    refused, and nothing is lost or written twice."""
    disk = FillableDisk()
    async with opened(tmp_path, disk) as desk:
        await desk.append("b", 0)
        await desk.until(lambda: desk.wal.has_spare)
        with monkeypatch.context() as patch:
            patch.setattr(LogFiles, "prepare", lambda files: None)  # its thread has no turn
            disk.is_full = True
            sent: list[Ticket] = []
            while not sent or sent[-1].is_answered:
                sent.append(desk.send(commands.Append(box="b", columns=columns("x" * 1000))))
                await desk.until(lambda: sent[-1].is_answered or desk.engine.disk_space.level == Level.FULL)
        assert isinstance(await desk.append("b", 1), DiskFull)
        disk.is_full = False
        assert isinstance(await sent[-1].reply(), commands.AppendResult)
        await desk.until(lambda: desk.engine.disk_space.level == Level.OK)
        assert isinstance(await desk.append("b", 2), commands.AppendResult)
    async with opened(tmp_path, disk) as desk:
        assert desk.engine.machine.boxes["b"].log.head_seq == len(sent) + 2 > 100


async def test_a_start_on_a_disk_without_any_room_serves_reads(tmp_path: Path) -> None:
    disk = FillableDisk()
    async with opened(tmp_path, disk) as desk:
        await desk.append("b", 1, 2, 3)
    for spare in (tmp_path / "wal").glob("*.spare"):
        spare.unlink()
    disk.is_full = True
    async with opened(tmp_path, disk) as desk:
        assert desk.engine.disk_space.level == Level.FULL
        assert len(seqs_of(await desk.ask(commands.ReadBox(box="b")))) == 3
        assert isinstance(await desk.append("b", 4), DiskFull)
        disk.is_full = False
        await desk.until(lambda: desk.engine.disk_space.level == Level.OK)
        assert isinstance(await desk.append("b", 4), commands.AppendResult)
        disk.is_full = True
    disk.is_full = False
    async with opened(tmp_path, disk) as desk:
        assert desk.engine.machine.boxes["b"].log.head_seq == 4
