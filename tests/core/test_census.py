"""The census counts every box once, in steps of any size, and shows the largest boxes one by one."""

from __future__ import annotations

import pytest

from shard.core.boxes.box_rates import WINDOW_MS, BoxRates
from shard.core.boxes.box_statistics import BoxStatistics
from streams.protocol.messages import commands, queues
from tests.support.carrying import tie
from tests.support.machines import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def counted(driver: Driver, *, step: int, rows_max: int, rates: BoxRates | None = None) -> BoxStatistics:
    census = BoxStatistics(driver.machine, rows_max, now_ms=driver.now_ms, rates=rates or BoxRates())
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


def test_the_boxes_that_are_largest_by_size_lag_and_rate_are_shown_one_by_one(driver: Driver) -> None:
    """A server has a million boxes, and the one that pages people is seldom the first by name."""
    rates = BoxRates()
    for name in ("a", "b", "c", "z-fast", "z-large"):
        driver.put(name)
        driver.append(1, box=name)
    driver.put("z-late", type="queue")
    driver.append(*range(5), box="z-late")
    driver.append("x" * 5000, box="z-large")
    driver.sync()
    assert not any(row.rate for row in counted(driver, step=3, rows_max=10, rates=rates).boxes)
    driver.now_ms += WINDOW_MS
    driver.append(*range(20), box="z-fast")
    driver.sync()
    census = counted(driver, step=3, rows_max=3, rates=rates)
    assert [row.box for row in census.boxes] == ["z-fast", "z-large", "z-late"]
    assert [(row.rate, row.lag) for row in census.boxes] == [(2.0, 0), (0.0, 0), (0.0, 5)]
    assert census.has_more and sum(census.totals.boxes.values()) == 6
    # A second look within the window has the same rates.
    driver.now_ms += 1
    again = counted(driver, step=3, rows_max=3, rates=rates)
    assert [(row.box, row.rate) for row in again.boxes] == [(row.box, row.rate) for row in census.boxes]


@pytest.mark.parametrize("rows_max", [0, 1, 2, 3, 7])
def test_no_more_boxes_routers_and_groups_are_shown_than_are_allowed(driver: Driver, rows_max: int) -> None:
    for at in range(9):
        driver.put(f"box-{at}")
        driver.append(*range(at), 1, box=f"box-{at}")
        driver.do(queues.CommitGroup(f"box-{at}", "group", 0))
    driver.sync()
    census = counted(driver, step=2, rows_max=rows_max)
    assert len(census.boxes) <= rows_max and len(census.groups) == rows_max // 2
    assert census.has_more and census.totals.groups == 9
    assert [row.box for row in census.groups] == [f"box-{at}" for at in range(9 - rows_max // 2, 9)]


def test_lag_is_counted_in_records_and_in_time(driver: Driver) -> None:
    for name in ("from", "to"):
        driver.put(name)
    driver.put("q", type="queue")
    tie(driver, driver, origin="router#1")
    driver.do(queues.CommitGroup("from", "idle", 0))
    driver.append(1, box="from")
    driver.append(1, box="q")
    driver.sync()
    driver.now_ms += 60_000
    driver.append(2, 3, box="from")
    driver.sync()
    driver.do(queues.CommitGroup("from", "halfway", 1))
    driver.now_ms += 5_000
    census = counted(driver, step=10, rows_max=10)
    assert [(row.group, row.lag, row.lag_s) for row in census.groups] == [
        ("halfway", 2, 5.0),
        ("idle", 3, 65.0),
    ]
    assert [(row.router, row.lag, row.lag_s) for row in census.routers] == [("router", 3, 65.0)]
    totals = census.totals
    assert (totals.group_lag_s, totals.router_lag_s, totals.jobs.oldest_s) == (65.0, 65.0, 65.0)
    assert {row.box: row.lag for row in census.boxes} == {"from": 3, "to": 0, "q": 1}
    driver.do(queues.CommitGroup("from", "idle", 3))
    driver.do(queues.CommitGroup("from", "halfway", 3))
    assert counted(driver, step=10, rows_max=10).totals.group_lag_s == 0.0


def test_a_box_with_many_groups_ends_the_step(driver: Driver) -> None:
    for name in ("a", "b"):
        driver.put(name)
    for at in range(100):
        driver.do(queues.CommitGroup("a", f"group-{at}", 0))
    census = BoxStatistics(driver.machine, 10, now_ms=0, rates=BoxRates())
    assert census.step(2)
    assert sum(census.totals.boxes.values()) == 1


def test_a_box_that_comes_or_goes_meanwhile_is_counted_once_at_most(driver: Driver) -> None:
    for name in ("a", "b", "c"):
        driver.put(name)
    census = BoxStatistics(driver.machine, 10, now_ms=driver.now_ms, rates=BoxRates())
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
    assert [(row.router, row.lag, row.forwarded_count, row.is_blocked) for row in census.routers] == [
        ("first", 3, 0, False)
    ]
    assert census.has_more
    assert "2 boxes" in repr(census)
