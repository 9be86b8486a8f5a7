"""Goal: an export is the state of one moment, held still for as long as somebody asks for it and no longer.

Method: `Exports` over a real machine and a real disk, with trio's own clock where time matters.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from shard.storage.files import Disk, DiskLike
from shard.storage.retention import Pins
from shard.storage.segments.store import Name, SegmentStore
from shard.transfer.exports import LEASE_S, Exports
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands
from tests.support import machines
from tests.support.faultdisk import FaultDisk
from tests.support.folders import FILE_BYTES, contents, contents_of
from tests.support.machines import Driver

Answered = dict[str, object] | StreamsError


class Rig:
    def __init__(self, disk: DiskLike, root: str, *, is_durable: bool = True) -> None:
        self.disk, self.folder = disk, f"{root}/export"
        self.driver = Driver()
        for _ in range(2):
            self.driver.append(*"abc")
            self.driver.seal()
        self.driver.append("tail")
        self.pins = Pins()
        self.unpinned = 0
        self._released = trio.Event()
        self.is_durable = is_durable
        self.exports = Exports(
            self.driver.machine,
            disk,
            self.folder,
            now_ms=lambda: 77,
            wait_durable=self.wait_durable,
            wait_rendered=trio.lowlevel.checkpoint,
            pins=self.pins,
            on_unpinned=self.note_unpinned,
            log_outcome=self.driver.keep,
            file_bytes=FILE_BYTES,
            bytes_per_s=1 << 30,
        )

    async def wait_durable(self, lsn: int) -> bool:
        await trio.lowlevel.checkpoint()
        return self.is_durable

    def note_unpinned(self) -> None:
        self.unpinned += 1
        self._released.set()
        self._released = trio.Event()

    async def released(self) -> None:
        """Blocks until the export that is under way is over."""
        if self.exports._id:
            await self._released.wait()
        assert not self.pins.names and not self.pins.is_all

    async def ask(self, op: int, id: str, body: bytes | None = None) -> Answered:
        answers: list[Answered] = []
        came = trio.Event()

        def answer(found: Answered) -> None:
            answers.append(found)
            came.set()

        self.exports.ask(op, msgspec.json.encode({"id": id}) if body is None else body, answer)
        await came.wait()
        (found,) = answers
        return found

    async def refusal(self, op: int, id: str, body: bytes | None = None) -> str:
        found = await self.ask(op, id, body)
        assert isinstance(found, StreamsError), found
        return found.code


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.exports.run)
        yield rig
        nursery.cancel_scope.cancel()


async def test_an_export_is_the_state_of_its_moment_and_pins_its_segments(tmp_path: Path) -> None:
    disk = Disk()
    async with running(Rig(disk, str(tmp_path))) as rig:
        driver = rig.driver
        machines.SHELF.store(disk, f"{tmp_path}/segments")
        before = contents_of(driver.machine, SegmentStore(disk, f"{tmp_path}/segments"))
        found = await rig.ask(wire.OP_EXPORT, "one")
        assert isinstance(found, dict)
        assert (found["folder"], found["lsn"], found["taken_ms"]) == (rig.folder, driver.machine.lsn, 77)
        assert (found["boxes"], found["segments"]) == (1, 2)
        assert rig.pins.names == set(map(Name.of, driver.machine.segments()))
        driver.append("later")
        driver.delete(before_seq=5)
        # Segments stand elsewhere; here they are put where a folder that is whole has them.
        machines.SHELF.store(disk, f"{rig.folder}/segments")
        assert contents(disk, rig.folder) == before
        assert await rig.ask(wire.OP_EXPORT, "one") == found, "the same id is told the same"
        assert await rig.ask(wire.OP_EXPORT_END, "one") == {"id": "one"}
        assert not disk.exists(rig.folder) and rig.unpinned == 1, "it is over when its end is answered"
        again = await rig.ask(wire.OP_EXPORT, "two")
        assert isinstance(again, dict) and again["lsn"] == driver.machine.lsn


async def test_what_happens_while_an_export_is_taken_is_not_in_it(tmp_path: Path) -> None:
    disk = Disk()
    async with running(Rig(disk, str(tmp_path))) as rig, trio.open_nursery() as nursery:
        driver = rig.driver
        for number in range(100):
            driver.append(number, box=f"box-{number}")
        machines.SHELF.store(disk, f"{tmp_path}/segments")
        before = contents_of(driver.machine, SegmentStore(disk, f"{tmp_path}/segments"))
        names = set(map(Name.of, driver.machine.segments()))
        nursery.start_soon(rig.ask, wire.OP_EXPORT, "one")
        while not driver.machine._captures:
            await trio.lowlevel.checkpoint()
        assert rig.pins.is_all, "nothing is dropped while it is not known what is read"
        driver.append("later")
        driver.delete(before_seq=5)
        for number in range(0, 100, 2):
            driver.append("later", box=f"box-{number}")
            driver.ask(commands.DeleteBox(f"box-{number + 1}"))
        found = await rig.ask(wire.OP_EXPORT, "one")
        assert isinstance(found, dict) and found["boxes"] == 101 and found["lsn"] < driver.machine.lsn
        assert rig.pins.names == names and not rig.pins.is_all and not driver.machine._captures
        machines.SHELF.store(disk, f"{rig.folder}/segments")
        assert contents(disk, rig.folder) == before


async def test_one_export_at_a_time_and_questions_that_make_no_sense(tmp_path: Path) -> None:
    async with running(Rig(Disk(), str(tmp_path))) as rig:
        assert await rig.refusal(wire.OP_EXPORT_RENEW, "one") == "not_found"
        assert await rig.refusal(wire.OP_EXPORT_END, "one") == "not_found"
        assert await rig.refusal(wire.OP_EXPORT, "") == "invalid_request"
        assert await rig.refusal(wire.OP_EXPORT, "", b"{") == "invalid_request"
        assert await rig.refusal(wire.OP_EXPORT, "", b'{"id": "x", "more": 1}') == "invalid_request"
        assert isinstance(await rig.ask(wire.OP_EXPORT, "one"), dict)
        assert await rig.refusal(wire.OP_EXPORT, "two") == "throttled"
        assert await rig.ask(wire.OP_EXPORT_RENEW, "one") == {"id": "one"}
        rig.exports.ask(wire.OP_EXPORT_END, b'{"id": "one"}', lambda found: None)
        # It is not over before its folder is gone.
        assert await rig.refusal(wire.OP_EXPORT, "one") == "throttled"
        assert await rig.refusal(wire.OP_EXPORT, "two") == "throttled"
        assert await rig.refusal(wire.OP_EXPORT_RENEW, "one") == "not_found"
        assert await rig.ask(wire.OP_EXPORT_END, "one") == {"id": "one"}, "a second end waits for the same"
        assert isinstance(await rig.ask(wire.OP_EXPORT, "two"), dict)


async def test_an_export_begins_at_once_after_the_end_or_the_failure_of_another_is_answered() -> None:
    disk = FaultDisk("/data")
    async with running(Rig(disk, "/data")) as rig:
        for number in range(20):
            assert isinstance(await rig.ask(wire.OP_EXPORT, f"{number}"), dict)
            assert await rig.ask(wire.OP_EXPORT_END, f"{number}") == {"id": f"{number}"}
        disk.fail_next("pwritev", OSError(errno.ENOSPC, "no space left"))
        assert await rig.refusal(wire.OP_EXPORT, "fails") == "throttled"
        assert isinstance(await rig.ask(wire.OP_EXPORT, "next"), dict)


async def test_an_export_that_ends_before_it_is_taken_is_answered_and_over(tmp_path: Path) -> None:
    async with running(Rig(Disk(), str(tmp_path))) as rig:
        begun: list[Answered] = []
        rig.exports.ask(wire.OP_EXPORT, b'{"id": "one"}', begun.append)
        with trio.fail_after(30):
            assert await rig.ask(wire.OP_EXPORT_END, "one") == {"id": "one"}
        assert len(begun) == 1 and not rig.pins.names and not rig.disk.exists(rig.folder)
        assert isinstance(await rig.ask(wire.OP_EXPORT, "two"), dict)


async def test_an_export_that_nobody_renews_is_given_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(Rig(Disk(), str(tmp_path))) as rig:
        await rig.ask(wire.OP_EXPORT, "one")
        for _ in range(5):
            await trio.sleep(50)
            assert await rig.ask(wire.OP_EXPORT_RENEW, "one") == {"id": "one"}
        assert rig.pins.names
        await trio.sleep(61)
        await rig.released()
        assert await rig.refusal(wire.OP_EXPORT_RENEW, "one") == "not_found"
        assert not rig.disk.exists(rig.folder)


async def test_a_disk_that_cannot_take_an_export_fails_it_and_nothing_else() -> None:
    disk = FaultDisk("/data")
    async with running(Rig(disk, "/data")) as rig:
        disk.fail_next("pwritev", OSError(errno.ENOSPC, "no space left"))
        assert await rig.refusal(wire.OP_EXPORT, "one") == "throttled"
        assert not disk.exists(rig.folder)
        assert isinstance(await rig.ask(wire.OP_EXPORT, "two"), dict)
        disk.fail_next("rmdir", OSError(errno.EIO, "cannot"))
        await rig.ask(wire.OP_EXPORT_END, "two")
        assert isinstance(await rig.ask(wire.OP_EXPORT, "three"), dict), "what was left is written over"


async def test_a_log_that_fails_meanwhile_fails_the_export(tmp_path: Path) -> None:
    async with running(Rig(Disk(), str(tmp_path), is_durable=False)) as rig:
        assert await rig.refusal(wire.OP_EXPORT, "one") == "shutting_down"
        assert not rig.pins.names and not rig.pins.is_all


@pytest.mark.parametrize("rate", [0, 1 << 20])
def test_an_export_is_written_no_faster_than_it_may(
    tmp_path: Path, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> Rig:
        return Rig(Disk(), str(tmp_path))

    rig = trio.run(main)
    slept: list[float] = []
    monkeypatch.setattr("shard.transfer.exports.time.sleep", slept.append)
    rig.exports._bytes_per_s = rate
    rig.exports._pause(1 << 20)
    assert slept == ([1.0] if rate else [])


# -- moves that a backup holds


def hold(id: str, *, holds: bool = True) -> bytes:
    return msgspec.json.encode({"id": id, "holds_moves": holds})


async def test_moves_are_held_from_the_first_capture_to_the_last(tmp_path: Path) -> None:
    async with running(Rig(Disk(), str(tmp_path))) as rig:
        outboxes = rig.driver.machine.forwarding.outboxes
        assert await rig.ask(wire.OP_EXPORT, "x", hold("x")) == {"id": "x"}
        assert await rig.ask(wire.OP_EXPORT, "x", hold("x")) == {"id": "x"}
        assert outboxes.are_moves_paused and repr(rig.exports._hold) == "<MoveHold x>"
        assert await rig.refusal(wire.OP_EXPORT, "y", hold("y")) == "throttled"
        assert await rig.refusal(wire.OP_EXPORT_RENEW, "x") == "not_found", "there is a hold only"
        assert isinstance(await rig.ask(wire.OP_EXPORT, "x"), dict)
        assert outboxes.are_moves_paused
        assert await rig.ask(wire.OP_EXPORT_RENEW, "x", hold("x", holds=False)) == {"id": "x"}
        assert not outboxes.are_moves_paused
        assert await rig.ask(wire.OP_EXPORT_END, "x") == {"id": "x"}


async def test_a_hold_ends_with_its_export_or_when_nobody_renews_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(Rig(Disk(), str(tmp_path))) as rig:
        outboxes = rig.driver.machine.forwarding.outboxes
        await rig.ask(wire.OP_EXPORT, "x", hold("x"))
        assert await rig.refusal(wire.OP_EXPORT_END, "x") == "not_found" and not outboxes.are_moves_paused
        await rig.ask(wire.OP_EXPORT, "y", hold("y"))
        await trio.sleep(LEASE_S - 1)
        await rig.ask(wire.OP_EXPORT_RENEW, "y")
        await trio.sleep(LEASE_S - 1)
        assert outboxes.are_moves_paused
        await trio.sleep(2)
        assert not outboxes.are_moves_paused
        assert await rig.ask(wire.OP_EXPORT, "z", hold("z")) == {"id": "z"}
