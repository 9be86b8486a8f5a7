"""Goal: the bytes of all boxes stay within the limit, and what is deleted soon counts no more (§12)."""

from __future__ import annotations

import pytest

from shard.core.machine import Machine
from streams.protocol.errors import Throttled
from streams.protocol.messages import commands
from tests.support import machines
from tests.support.machines import Driver, Shelf, patch


@pytest.fixture
def driver() -> Driver:
    machines.SHELF = Shelf()
    return Driver(Machine(bytes_max=1000))


def write(driver: Driver, box: str = "b", size: int = 300) -> int:
    driver.append("x" * size, box=box)
    return driver.state(box).bytes


def test_a_write_over_the_limit_is_refused_and_changes_nothing(driver: Driver) -> None:
    for box in ("a", "b"):
        write(driver, box)
    write(driver, "c", size=200)
    logged = len(driver.log)
    for box in ("a", "new"):
        with pytest.raises(Throttled) as caught:
            write(driver, box)
        assert caught.value.detail == {"limit": "total_bytes"}
    assert len(driver.log) == logged
    assert write(driver, "a", size=10) > 0
    assert "of 1000 B" in repr(driver.machine.quota)


def test_what_is_deleted_makes_room_a_tenth_of_a_second_later(driver: Driver) -> None:
    for box in ("a", "b", "c"):
        write(driver, box)
    driver.ask(commands.DeleteBox("a"))
    with pytest.raises(Throttled):
        write(driver)
    driver.now_ms += 100
    assert write(driver) > 0


def test_what_a_cap_evicts_does_not_fill_the_shard_for_ever(driver: Driver) -> None:
    driver.ask(commands.PutBox("b", patch(cap_records=1)))
    for _ in range(50):
        driver.now_ms += 500
        write(driver)
    assert driver.state().count == 1


def test_without_a_limit_nothing_is_summed() -> None:
    assert Driver().machine.quota is None
