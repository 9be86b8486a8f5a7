"""When background work is looked for: after a change, at a time that is due, and not otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from shard.core.boxes.upkeep import HotPolicy, SealPolicy
from shard.core.machine import Outcome
from shard.engine.cache import PayloadCache
from shard.engine.upkeep import Upkeep
from shard.storage.files import Disk
from shard.storage.segments.store import SegmentStore
from tests.support.machines import Driver

AGE_MS = 3_600_000


class _CountingUpkeep(Upkeep):
    """Counts its looks for work."""

    looks = 0

    async def step(self) -> bool:
        self.looks += 1
        return await super().step()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def upkeep(driver: Driver, tmp_path: Path) -> _CountingUpkeep:
    async def is_durable(lsn: int) -> bool:
        return True

    def keep(outcome: Outcome) -> None:
        driver.keep(outcome)
        driver.sync()

    def now_ms() -> int:
        return driver.now_ms + int(1000 * trio.current_time())

    return _CountingUpkeep(
        driver.machine,
        SegmentStore(Disk(), str(tmp_path / "segments")),
        PayloadCache(1 << 20),
        SealPolicy(10_000, 1 << 26, AGE_MS),
        HotPolicy(4, 0),
        now_ms=now_ms,
        log_outcome=keep,
        wait_durable=is_durable,
        pinned_lsn=lambda: 0,
        unsealed_bytes_max=1 << 26,
        bytes_per_s=0,
    )


async def test_an_idle_shard_looks_for_work_once_a_minute(
    driver: Driver, upkeep: _CountingUpkeep, autojump_clock: MockClock
) -> None:
    for number in range(20):
        driver.append("x", box=f"box-{number}")
    with trio.move_on_after(7_200):
        await upkeep.run()
    assert upkeep.looks <= 121


async def test_a_change_is_looked_at_within_a_moment(
    upkeep: _CountingUpkeep, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(upkeep.run)
    await trio.sleep(30.1)
    before = upkeep.looks
    upkeep.wake()
    await trio.sleep(0.3)
    assert upkeep.looks == before + 1
    for _ in range(1_000):
        upkeep.wake()
        await trio.sleep(0.001)
    assert upkeep.looks <= before + 6, "four looks a second at most, however much happens"


async def test_a_box_is_sealed_when_it_is_old_enough_though_nothing_happens(
    driver: Driver, upkeep: _CountingUpkeep, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    driver.append("x" * 70_000)
    driver.sync()
    nursery.start_soon(upkeep.run)
    await trio.sleep(AGE_MS / 1000 - 0.5)
    assert upkeep.segments_sealed == 0
    await trio.sleep(1)
    while not upkeep.segments_sealed:  # a thread writes the file
        await trio.to_thread.run_sync(lambda: None)
    assert len(driver.machine.boxes["b"].log.segments) == 1


async def test_the_pause_after_a_job_ends_when_unsealed_batches_exceed_their_limit(
    driver: Driver, upkeep: _CountingUpkeep, autojump_clock: MockClock
) -> None:
    upkeep._bytes_per_s, upkeep._unsealed_bytes_max = 1, 100
    began_s = trio.current_time()

    async def append_later() -> None:
        await trio.sleep(10)
        driver.append("x" * 200)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append_later)
        await upkeep._pace(3600)
        assert trio.current_time() - began_s == pytest.approx(10, abs=0.1)


async def test_the_pause_after_a_job_lasts_as_long_as_the_rate_asks(
    upkeep: _CountingUpkeep, autojump_clock: MockClock
) -> None:
    upkeep._bytes_per_s = 1000
    began_s = trio.current_time()
    await upkeep._pace(2500)
    assert trio.current_time() - began_s == pytest.approx(2.5)
