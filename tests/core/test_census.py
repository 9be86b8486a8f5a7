"""The census counts every box once, in steps of any size, and tells the first ones by name."""

from __future__ import annotations

import pytest

from shard.core.census import Census
from streams.protocol import commands
from tests.support.carrying import tie
from tests.support.machines import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def counted(driver: Driver, *, step: int, rows_max: int) -> Census:
    census = Census(driver.machine, rows_max)
    while census.step(step):
        pass
    return census


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_every_box_is_counted_once_in_steps_of_any_size(driver: Driver, step: int) -> None:
    for name, durability in (("a", "memory"), ("b", "disk"), ("c", "fsync"), ("d", "disk")):
        driver.put(name, durability=durability)
        driver.append(1, 2, box=name)
    driver.sync()
    census = counted(driver, step=step, rows_max=10)
    assert census.totals.boxes == {"memory": 1, "disk": 2, "fsync": 1, "object": 0}
    assert census.totals.records == 8 and census.totals.bytes > 0
    assert [row.box for row in census.boxes] == ["a", "b", "c", "d"]
    assert [row.records for row in census.boxes] == [2, 2, 2, 2]
    assert not census.has_more


def test_the_first_boxes_by_name_are_told_one_by_one(driver: Driver) -> None:
    for name in ("d", "b", "c", "a"):
        driver.put(name)
    census = counted(driver, step=3, rows_max=2)
    assert [row.box for row in census.boxes] == ["a", "b"]
    assert census.has_more and sum(census.totals.boxes.values()) == 4


def test_a_box_that_comes_or_goes_meanwhile_is_counted_once_at_most(driver: Driver) -> None:
    for name in ("a", "b", "c"):
        driver.put(name)
    census = Census(driver.machine, 10)
    assert census.step(1)
    driver.do(commands.DeleteBox("a"))
    driver.do(commands.DeleteBox("c"))
    driver.put("d")
    while census.step(1):
        pass
    assert [row.box for row in census.boxes] == ["a", "b", "d"]


def test_a_queue_is_told_with_its_jobs(driver: Driver) -> None:
    driver.put("q", type="queue")
    driver.append(1, 2, 3, box="q")
    driver.sync()
    census = counted(driver, step=10, rows_max=10)
    assert census.totals.queues == 1 and census.totals.jobs.ready == 3
    assert census.boxes[0].queue == census.totals.jobs


def test_routers_are_told_where_their_source_is(driver: Driver) -> None:
    for name in ("from", "to"):
        driver.put(name)
    driver.append(1, 2, 3, box="from")
    driver.sync()
    tie(driver, driver, origin="first#1")
    tie(driver, driver, origin="second#2")
    census = counted(driver, step=10, rows_max=1)
    assert (census.totals.routers, census.totals.router_lag, census.totals.routers_blocked) == (2, 6, 0)
    assert [(row.router, row.lag, row.forwarded, row.is_blocked) for row in census.routers] == [
        ("first", 3, 0, False)
    ]
    assert census.has_more
    assert "2 boxes" in repr(census)
