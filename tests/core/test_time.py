"""Goal: the machine says when it wants to be called, and does then what time alone brings about."""

from __future__ import annotations

import pytest

from shard.core import machine as machine_module
from shard.core.changes import RecordsEvicted
from shard.core.machine import Outcome
from shard.core.queues import queue as queue_module
from streams.protocol.messages import commands, queues
from streams.protocol.messages.commands import Tombstone
from tests.support.machines import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.put(ttl_ms=100, durability="fsync")
    return driver


def evictions(driver: Driver) -> list[tuple[int, str]]:
    made = [change for _, change in driver.tick().changes]
    assert all(isinstance(change, RecordsEvicted) for change in made)
    return [(change.before_seq, change.reason) for change in made if isinstance(change, RecordsEvicted)]


def test_nothing_to_do_means_no_deadline(driver: Driver) -> None:
    assert driver.machine.next_deadline_ms() is None
    assert driver.tick().changes == []


def test_records_expire_by_themselves_when_their_time_has_come(driver: Driver) -> None:
    driver.append(1, 2)
    driver.now_ms += 50
    driver.append(3)
    assert driver.machine.next_deadline_ms() == 1101
    driver.now_ms = 1100
    assert evictions(driver) == []
    driver.now_ms = 1101
    assert evictions(driver) == [(3, "ttl")]
    assert driver.machine.next_deadline_ms() == 1151
    driver.now_ms = 2000
    assert evictions(driver) == [(4, "ttl")]
    assert driver.machine.next_deadline_ms() is None
    driver.append(4)
    assert driver.machine.next_deadline_ms() == 2101
    driver.sync()
    assert driver.read().tombstone == Tombstone(1, 3, "ttl", 3, 4, 4)


def test_a_deadline_follows_the_oldest_live_record(driver: Driver) -> None:
    driver.append(1)
    driver.now_ms += 50
    driver.append(2)
    driver.delete(2)
    driver.now_ms = 1101
    assert evictions(driver) == [], "its record was deleted; the deadline was only looked at"
    assert driver.machine.next_deadline_ms() == 1151


def test_a_deadline_is_that_of_the_first_live_record_of_a_write(driver: Driver) -> None:
    driver.put(timestamping={"mode": "client-prefer"})
    driver.append(*({"data": 1, "ts": ts} for ts in (950, 960, 990)))
    driver.delete(2)
    driver.now_ms = 1060
    assert driver.tick().changes == [] and driver.machine.next_deadline_ms() == 1061
    driver.now_ms = 1061
    assert evictions(driver) == [(3, "ttl")]


def test_a_ttl_that_is_set_later_sets_a_deadline(driver: Driver) -> None:
    driver.put("other", durability="fsync")
    driver.append(1, box="other")
    assert driver.machine.next_deadline_ms() is None
    driver.put("other", ttl_ms=7)
    assert driver.machine.next_deadline_ms() == 1008
    driver.put("other", ttl_ms=3)
    assert driver.machine.next_deadline_ms() == 1004
    driver.now_ms = 1008
    assert evictions(driver) == [(2, "ttl")]
    assert driver.machine.next_deadline_ms() is None, "the later entry was out of date"


def test_a_deleted_box_has_no_deadline(driver: Driver) -> None:
    driver.append(1)
    driver.ask(commands.DeleteBox("b"))
    driver.now_ms += 1000
    assert driver.machine.next_deadline_ms() is None
    assert driver.tick().changes == []


def test_a_tick_looks_at_so_many_boxes_and_leaves_the_rest_for_the_next(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "TICK_BOXES_MAX", 2)
    for box in "cdefg":
        driver.put(box, ttl_ms=10, durability="memory")
        driver.append(1, box=box)
    driver.now_ms += 11
    for left in (3, 1, 0):
        driver.tick()
        assert driver.machine.statistics()["records"] == left
    assert driver.machine.next_deadline_ms() is None


def test_client_times_in_the_past_expire_at_once_and_in_the_future_late(driver: Driver) -> None:
    driver.put(timestamping={"mode": "client-prefer", "uncapped": True})
    driver.append({"data": 1, "ts": 5})
    assert driver.machine.next_deadline_ms() == 106
    assert evictions(driver) == [(2, "ttl")]
    driver.append({"data": 2, "ts": 9_000})
    driver.now_ms = 9_100
    assert driver.seqs(1) == [2]
    driver.now_ms = 9_101
    assert driver.seqs(1) == []


def test_deadlines_are_back_after_a_restart(driver: Driver) -> None:
    driver.append(1)
    for state in (None, driver.machine.snapshot()):
        survivor = driver.reborn(state=state)
        survivor.start("boot")
        assert survivor.machine.next_deadline_ms() == 1101


def after(driver: Driver, ms: int) -> Outcome:
    driver.now_ms += ms
    return driver.tick()


def test_a_box_that_has_been_empty_for_long_enough_is_deleted_and_its_readers_are_woken() -> None:
    """v0 §1, `delete_on_empty_ms`: counted from creation or from the end of the last record."""
    driver = Driver()
    driver.put(delete_on_empty_ms=500)
    driver.append(1)
    after(driver, 10_000)
    driver.delete(before_seq=2)
    after(driver, 499)
    assert "b" in driver.machine.boxes
    assert after(driver, 1).wakes == ("b",)
    assert "b" not in driver.machine.boxes
    driver.put("never-written", delete_on_empty_ms=500)
    after(driver, 500)
    assert "never-written" not in driver.machine.boxes


def test_a_record_in_time_saves_an_empty_box() -> None:
    driver = Driver()
    driver.put(delete_on_empty_ms=500)
    after(driver, 400)
    driver.append(1)
    after(driver, 400)
    driver.delete(before_seq=2)
    after(driver, 400)
    assert "b" in driver.machine.boxes


def test_how_long_a_box_has_been_empty_survives_a_restart() -> None:
    driver = Driver()
    driver.put(delete_on_empty_ms=500, durability="fsync")
    driver.append(1)
    driver.delete(before_seq=2)
    driver.now_ms += 300
    reborn = driver.reborn()
    reborn.start("boot")
    after(reborn, 199)
    assert "b" in reborn.machine.boxes
    after(reborn, 1)
    assert "b" not in reborn.machine.boxes


def test_leases_that_end_together_come_back_in_bounded_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine_module, queue_module):
        monkeypatch.setattr(module, "ADVANCE_MAX", 4)
    driver = Driver()
    driver.put("q", type="queue", lease_ms=1000)
    driver.append(*range(10), box="q")
    driver.ask(queues.Claim(box="q", node="n", max=10))
    queue = driver.machine.boxes["q"].queue
    assert queue is not None
    driver.now_ms += 1001
    left = []
    while queue.in_flight:
        assert driver.machine.next_deadline_ms() == 2000
        assert driver.tick().wakes == ("q",)
        left.append(queue.in_flight)
    assert left == [6, 2, 0]
