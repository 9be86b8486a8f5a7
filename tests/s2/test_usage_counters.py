"""Goal: what is done over `/v1` is counted once, by basin and minute, within bounds, and summed as it was
asked for (s2 §17); what was kept is counted once too, whatever becomes of the answer to it.

Method: counting and summing without a server, at times of our own; the history over shards without processes.
"""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.s2.usage_counters import (
    ACCOUNT,
    APPEND_BYTES,
    BASINS_MAX,
    INTERVALS_S,
    MINUTES_MAX,
    OTHERS,
    READ_BYTES,
    Sums,
    UsageCounters,
)
from gateway.s2.usage_history import BOX, UsageHistory
from tests.support.memory_shards import MemoryLink, MemoryShard, dispatch_to

#: The begin of a day.
DAY_S = 20_000 * INTERVALS_S["day"]


# -- counting


def test_operations_and_bytes_are_counted_by_basin_and_minute() -> None:
    counters = UsageCounters(DAY_S + 59)
    counters.count_append("basin-one", 10)
    counters.count_append("basin-one", 5)
    counters.count_read("basin-two", 7)
    counters.count_operation("list-streams", "basin-two")
    counters.count_operation("list-basins", ACCOUNT)
    counters.roll_over(DAY_S + 59)
    assert not counters.unsaved_minutes
    counters.roll_over(DAY_S + 60)
    counters.count_read("basin-two", 1)
    (first, under_way) = counters.snapshot_unsaved()
    assert (first.number, first.at_s) == (0, DAY_S)
    assert first.rows == {
        "basin-one": {"append": 2, APPEND_BYTES: 15},
        "basin-two": {"read": 1, READ_BYTES: 7, "list-streams": 1},
        ACCOUNT: {"list-basins": 1},
    }
    assert (under_way.number, under_way.at_s) == (1, DAY_S + 60)
    assert under_way.rows == {"basin-two": {"read": 1, READ_BYTES: 1}}
    counters.mark_saved(first)
    assert not counters.unsaved_minutes


def test_a_minute_without_anything_leaves_nothing() -> None:
    counters = UsageCounters(DAY_S)
    counters.roll_over(DAY_S + 60)
    counters.roll_over(DAY_S + 120)
    counters.end()
    assert not counters.unsaved_minutes


def test_what_is_told_of_the_minute_under_way_does_not_change() -> None:
    counters = UsageCounters(DAY_S)
    counters.count_append("basin-one", 1)
    (told,) = counters.snapshot_unsaved()
    counters.count_append("basin-one", 1)
    assert told.rows["basin-one"]["append"] == 1


def test_basins_beyond_the_bound_are_counted_together_and_the_account_by_itself() -> None:
    counters = UsageCounters(DAY_S)
    for number in range(BASINS_MAX + 3):
        counters.count_append(f"basin-{number}", 2)
    counters.count_append("basin-0", 2)
    counters.count_operation("list-basins", ACCOUNT)
    counters.end()
    rows = counters.unsaved_minutes[0].rows
    assert len(rows) == BASINS_MAX + 2
    assert rows["basin-0"]["append"] == 2
    assert rows[OTHERS] == {"append": 3, APPEND_BYTES: 6}
    assert rows[ACCOUNT] == {"list-basins": 1}
    # The next minute has room again.
    counters.count_append(f"basin-{BASINS_MAX}", 2)
    assert f"basin-{BASINS_MAX}" in counters.snapshot_unsaved()[-1].rows


def test_the_oldest_minute_is_given_up_when_too_many_wait() -> None:
    counters = UsageCounters(DAY_S)
    for minute in range(MINUTES_MAX + 2):
        counters.count_append("basin-one", 1)
        counters.roll_over(DAY_S + 60 * (minute + 1))
    assert (len(counters.unsaved_minutes), counters.minutes_lost) == (MINUTES_MAX, 2)
    assert counters.unsaved_minutes[0].at_s == DAY_S + 120


def test_a_clock_that_goes_back_makes_another_minute_of_the_same_time() -> None:
    counters = UsageCounters(DAY_S)
    for now_s in (DAY_S + 60, DAY_S, DAY_S + 60):
        counters.count_append("basin-one", 1)
        counters.roll_over(now_s)
    assert [(each.number, each.at_s) for each in counters.unsaved_minutes] == [
        (0, DAY_S),
        (1, DAY_S + 60),
        (2, DAY_S),
    ]


# -- summing


@pytest.mark.parametrize("interval", INTERVALS_S)
def test_points_are_sums_by_interval_in_order(interval: str) -> None:
    length_s = INTERVALS_S[interval]
    sums = Sums(["read"], DAY_S, DAY_S + 2 * length_s, length_s)
    for at_s in (DAY_S + length_s, DAY_S + length_s - 60, DAY_S, DAY_S + 2 * length_s):
        sums.add(at_s, {"read": 1, "append": 9})
    expected = [DAY_S, DAY_S + length_s, DAY_S + 2 * length_s]
    points = sums.points("read")
    assert [at_s for at_s, _ in points] == expected
    assert sum(count for _, count in points) == 4
    assert points[0][1] == 2


def test_minutes_that_a_range_touches_are_in_it_and_others_are_not() -> None:
    sums = Sums(["read"], DAY_S + 61, DAY_S + 121, 60)
    for minute in range(5):
        sums.add(DAY_S + 60 * minute, {"read": 1})
    assert sums.points("read") == [(DAY_S + 60, 1), (DAY_S + 120, 1)]


# -- keeping


class Gateway:
    def __init__(self, shard: MemoryShard, now_s: int = DAY_S) -> None:
        dispatch = dispatch_to([shard])
        (self.link,) = dispatch.links
        self.history = UsageHistory(dispatch, now_s)

    async def total(self, basin: str = "basin-one", start_s: int = DAY_S, end_s: int = DAY_S + 86_400) -> int:
        sums = Sums(["append"], start_s, end_s, 60)
        await self.history.add_to(sums, basin)
        return sum(count for _, count in sums.points("append"))


async def keep(gateway: Gateway, shard: MemoryShard, now_s: int, *, cut: bool = False) -> None:
    """One round of keeping; the link is cut after the write and before its answer if that is asked for."""
    shard.driver.now_ms = now_s * 1000
    assert isinstance(gateway.link, MemoryLink)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.history.save, now_s)
        await wait_all_tasks_blocked()
        if cut:
            gateway.link.cut()
        shard.logged()
        shard.sync()
    gateway.link.is_up = True


async def test_any_gateway_tells_what_was_kept_and_its_own_minute_under_way() -> None:
    shard = MemoryShard()
    one, two = Gateway(shard), Gateway(shard)
    assert await one.total() == 0
    one.history.counters.count_append("basin-one", 1)
    two.history.counters.count_append("basin-one", 1)
    two.history.counters.count_append("basin-two", 1)
    assert (await one.total(), await two.total()) == (1, 1)
    await keep(one, shard, DAY_S + 60)
    assert (await one.total(), await two.total()) == (1, 2)
    await keep(two, shard, DAY_S + 61)
    one.history.counters.count_append("basin-one", 1)
    assert (await one.total(), await two.total()) == (3, 2)
    assert await Gateway(shard).total("basin-two") == 1
    assert await one.total(start_s=DAY_S + 60) == 1


async def test_a_minute_whose_answer_is_lost_is_counted_once() -> None:
    shard = MemoryShard()
    gateway = Gateway(shard)
    gateway.history.counters.count_append("basin-one", 1)
    await keep(gateway, shard, DAY_S + 60, cut=True)
    assert len(gateway.history.counters.unsaved_minutes) == 1
    assert shard.driver.state(BOX).head_seq == 1
    assert (await gateway.total(), await Gateway(shard).total()) == (1, 1)
    await keep(gateway, shard, DAY_S + MINUTES_MAX * 60)
    assert not gateway.history.counters.unsaved_minutes
    assert shard.driver.state(BOX).head_seq == 1
    assert (await gateway.total(), await Gateway(shard).total()) == (1, 1)


async def test_records_of_others_in_the_box_are_passed_over_and_pages_are_all_read() -> None:
    shard = MemoryShard()
    gateway = Gateway(shard)
    shard.driver.now_ms = DAY_S * 1000
    ours = {"minute": DAY_S, "writer": "w", "number": 1, "counts": {"append": 1}}
    forged = [[math.pi], {**ours, "counts": {"append": -1}}, {**ours, "counts": {"append": 2**60}}]
    batch = [{"data": data, "tag": "basin-one"} for data in (ours, *forged)]
    shard.driver.append(*batch * 1200, box=BOX)
    shard.logged()
    shard.sync()
    assert await gateway.total() == 1200
