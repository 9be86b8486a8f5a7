"""Goal: a schedule appends one record for each due time that counts (v0 §22).

Method: one machine on a clock of the test; restarts from its log and from snapshots.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.core.schedules.handlers import RECORD_BYTES_MAX, TICK_SCHEDULES_MAX
from shard.core.schedules.schedule import CATCH_UP_MAX
from shard.engine.time_zones import find_zone
from streams.protocol.errors import BoxNotFound, InvalidRequest, ScheduleNotFound, Throttled
from streams.protocol.messages import commands, schedules
from streams.protocol.messages.schedules import ScheduleSpec, ScheduleState
from tests.support.machines import Driver, decoded, records_of

#: 2023-11-14 22:13:20 UTC.
START = 1_700_000_000_000
SECOND, MINUTE = 1_000, 60_000


def new_machine() -> Machine:
    return Machine(schedules_max=40, find_zone=find_zone)


@pytest.fixture
def driver() -> Driver:
    found = Driver(now_ms=START, make=new_machine)
    found.start("boot")
    found.put(durability="fsync")
    return found


def put(driver: Driver, name: str = "s", box: str = "b", others: int = 0, **fields: Any) -> Any:
    if "cron" not in fields:
        fields.setdefault("every_ms", SECOND)
    spec = ScheduleSpec(record=fields.pop("record", b'{"data":1}'), **fields)
    return driver.ask(schedules.PutSchedule(box, name, spec, others))


def find(driver: Driver, name: str = "s") -> ScheduleState:
    reply = driver.ask(schedules.FindSchedule(name))
    assert isinstance(reply, schedules.FindScheduleReply) and reply.schedule is not None
    return reply.schedule


def settle(driver: Driver, now_ms: int | None = None) -> None:
    """Ticks until nothing is due."""
    if now_ms is not None:
        driver.now_ms = now_ms
    while (at := driver.machine.schedules.next_ms()) is not None and at <= driver.now_ms:
        driver.tick()
        driver.sync()


def fired(driver: Driver, box: str = "b") -> list[int]:
    """The due times of the records, relative to the start, in the order of the records."""
    records = records_of(driver.read(box=box, limit=1_000, max_bytes=1 << 30))
    return [record["meta"]["$due_ts"] - START for record in records]


def test_each_due_time_appends_one_record_with_its_name_and_time(driver: Driver) -> None:
    reply = put(driver, record=b'{"data":{"a": 1},"tag":"t","node":"n","meta":{"k":"v"}}')
    assert reply.created and reply.next_due == START + SECOND and reply.state == "active"
    assert driver.machine.next_deadline_ms() == START + SECOND
    settle(driver, START + SECOND - 1)
    assert driver.state().count == 0
    for at in (1_000, 1_500, 2_000, 3_010):
        settle(driver, START + at)
    assert fired(driver) == [1_000, 2_000, 3_000]
    (first, *_) = records_of(driver.read(include_tags=True))
    assert first["data"] == {"a": 1} and first["$tag"] == "t" and first["$node"] == "n"
    assert first["meta"] == {"k": "v", "$schedule": "s", "$due_ts": START + SECOND}
    state = find(driver)
    assert (state.last_due, state.next_due, state.fired_total) == (START + 3_000, START + 4_000, 3)


def test_a_cron_schedule_follows_its_time_zone(driver: Driver) -> None:
    reply = put(driver, cron="0 9 * * *", time_zone="Asia/Tokyo")
    assert reply.next_due == 1_700_006_400_000  # 00:00 UTC
    assert put(driver, cron="0 9 * * *").next_due == 1_700_038_800_000


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"cron": "* * *"}, "cron: '\\* \\* \\*': has 3 fields"),
        ({"cron": "0 0 30 2 *"}, "matches no date"),
        ({"cron": "@daily", "time_zone": "Mars/Base"}, "time_zone: 'Mars/Base'"),
    ],
)
def test_an_invalid_definition_is_refused_and_changes_nothing(
    driver: Driver, fields: dict[str, Any], complaint: str
) -> None:
    lsn = driver.machine.lsn
    with pytest.raises(InvalidRequest, match=complaint):
        put(driver, **fields)
    with pytest.raises(BoxNotFound):
        put(driver, box="absent")
    assert driver.machine.lsn == lsn


def test_limits_are_those_of_the_server(driver: Driver) -> None:
    put(driver)
    with pytest.raises(Throttled, match="40 schedules already"):
        put(driver, "t", others=39)
    put(driver, others=39)  # it exists
    with pytest.raises(Throttled, match="keep large data in a box"):
        put(driver, "t", record=b'{"data":"%b"}' % (b"x" * RECORD_BYTES_MAX))


def test_a_schedule_keeps_its_box(driver: Driver) -> None:
    put(driver)
    driver.put("other")
    with pytest.raises(InvalidRequest, match="appends to box b; delete it first"):
        put(driver, box="other")


def test_a_change_keeps_the_rhythm_unless_it_changes_it(driver: Driver) -> None:
    put(driver)
    settle(driver, START + 1_200)
    lsn = driver.machine.lsn
    assert not put(driver).created and driver.machine.lsn == lsn  # the same again
    assert put(driver, record=b'{"data":2}').next_due == START + 2_000
    assert put(driver, record=b'{"data":2}', end_ts=START + 1_500).state == "ended"
    assert put(driver, every_ms=700).next_due == START + 1_900
    assert find(driver).fired_total == 1


def test_a_paused_schedule_misses_its_due_times(driver: Driver) -> None:
    put(driver)
    settle(driver, START + 1_000)
    paused = put(driver, is_paused=True)
    assert (paused.state, paused.next_due) == ("paused", None)
    settle(driver, START + 5_500)
    assert put(driver).next_due == START + 6_000
    settle(driver, START + 6_000)
    assert fired(driver) == [1_000, 6_000]


def test_a_schedule_ends(driver: Driver) -> None:
    put(driver, end_ts=START + 2_000)
    for at in range(500, 5_000, 500):
        settle(driver, START + at)
    assert fired(driver) == [1_000, 2_000]
    assert find(driver).state == "ended" and driver.machine.schedules.next_ms() is None


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [("one", [60, 600, 660]), ("none", [60, 660]), ("all", [*range(60, 661, 60)])],
)
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_catch_up_decides_about_due_times_missed_during_downtime(
    driver: Driver, catch_up: str, expected: list[int], with_snapshot: bool
) -> None:
    put(driver, every_ms=MINUTE, catch_up=catch_up)
    settle(driver, START + MINUTE)
    other = driver.reborn(state=driver.machine.snapshot() if with_snapshot else None)
    other.now_ms = START + 10 * MINUTE + 1
    other.start("boot")
    settle(other)
    settle(other, START + 11 * MINUTE)
    assert fired(other) == [at * SECOND for at in expected]
    assert find(other).fired_total == len(expected)


def test_catching_up_is_bounded(driver: Driver) -> None:
    put(driver, catch_up="all")
    settle(driver, START + 1_500 * SECOND)
    assert fired(driver)[:1] == [501 * SECOND] and driver.state().count == CATCH_UP_MAX
    assert find(driver).fired_total == CATCH_UP_MAX


def test_a_busy_server_misses_nothing(driver: Driver) -> None:
    """A tick that is late by less than ten seconds fires all due times, whatever `catch_up` says."""
    put(driver, catch_up="none", every_ms=100)
    settle(driver, START + 3_050)
    assert fired(driver) == [*range(100, 3_001, 100)]


def test_a_clock_that_is_set_forward_makes_due_and_back_makes_wait(driver: Driver) -> None:
    machine = driver.machine
    put(driver, every_ms=MINUTE)
    machine.wall_ahead_ms = 10 * MINUTE + 30 * SECOND
    assert machine.next_deadline_ms() == START - 9 * MINUTE - 30 * SECOND
    settle(driver)
    assert fired(driver) == [10 * MINUTE]  # as after downtime: the last one
    machine.wall_ahead_ms = 0
    settle(driver, START + 5 * MINUTE)
    settle(driver, START + 10 * MINUTE)
    assert fired(driver) == [10 * MINUTE]  # no due time counts twice
    settle(driver, START + 11 * MINUTE)
    assert fired(driver) == [10 * MINUTE, 11 * MINUTE]


def test_a_full_box_blocks_its_schedule_until_it_has_room(driver: Driver) -> None:
    driver.put("f", cap_records=2, discard="reject", durability="disk")
    put(driver, box="f", catch_up="all")
    settle(driver, START + 3_000)
    assert fired(driver, "f") == [1_000, 2_000]  # a batch of three does not fit, and two do
    state = find(driver)
    assert state.state == "blocked" and str(state.last_error).startswith("box_full: ")
    assert driver.machine.schedules.totals(driver.now_ms)._replace(lag_ms=0) == (1, 1, 0)
    driver.delete(2, box="f")
    settle(driver, START + 3_500)
    assert driver.state("f").count == 1, "it waits before it tries again"
    settle(driver, START + 4_000)
    assert fired(driver, "f") == [2_000, 3_000]
    settle(driver, START + 60_000)
    assert find(driver).state == "blocked"
    driver.delete(100, box="f")
    settle(driver, START + 95_000)
    assert fired(driver, "f")[:1] == [4_000]


def test_a_blocked_schedule_that_catches_up_nothing_keeps_its_last_due_time(driver: Driver) -> None:
    driver.put("f", cap_records=1, discard="reject")
    driver.append("full", box="f")
    put(driver, box="f", catch_up="none", every_ms=MINUTE)
    settle(driver, START + MINUTE)
    settle(driver, START + MINUTE + 30 * SECOND)
    assert find(driver).state == "blocked"
    driver.delete(2, box="f")
    settle(driver, START + MINUTE + 59 * SECOND)
    assert fired(driver, "f") == [MINUTE]


def test_a_fenced_box_and_a_full_disk_block_too(driver: Driver) -> None:
    put(driver)
    driver.now_ms = START + SECOND
    driver.keep(driver.machine.tick(driver.now_ms, has_space=False))
    assert str(find(driver).last_error).startswith("disk_full: ")
    driver.ask(commands.SetFence("b", "token"))
    settle(driver, START + 2_000)
    assert str(find(driver).last_error).startswith("fencing_token_mismatch: ")
    assert driver.state().count == 0


def test_a_quota_blocks_too() -> None:
    driver = Driver(Machine(bytes_max=10), now_ms=START)
    driver.start("boot")
    driver.put()
    put(driver)
    settle(driver, START + SECOND)
    assert str(find(driver).last_error).startswith("throttled: ")


def test_a_run_appends_now_and_once_for_each_key(driver: Driver) -> None:
    put(driver)
    driver.now_ms += 10
    first = driver.ask(schedules.RunSchedule("b", "s", "key"))
    again = driver.ask(schedules.RunSchedule("b", "s", "key"))
    other = driver.ask(schedules.RunSchedule("b", "s"))
    assert (first.seq, first.deduped) == (1, False)
    assert (again.seq, again.deduped) == (1, True)
    assert (other.seq, other.deduped) == (2, False)
    assert fired(driver) == [10, 10]
    state = find(driver)
    assert (state.fired_total, state.last_due, state.next_due) == (2, None, START + SECOND)
    reborn = driver.reborn()
    reborn.start("boot")
    assert reborn.ask(schedules.RunSchedule("b", "s", "key")).deduped
    with pytest.raises(ScheduleNotFound):
        driver.ask(schedules.RunSchedule("b", "absent"))


def test_a_deleted_schedule_is_gone(driver: Driver) -> None:
    put(driver)
    created_ts = find(driver).created_ts
    assert not driver.ask(schedules.DropSchedule("b", "s", created_ts + 1)).deleted
    assert driver.ask(schedules.DropSchedule("b", "s", created_ts)).deleted
    assert not driver.ask(schedules.DropSchedule("b", "s")).deleted
    assert not driver.ask(schedules.DropSchedule("absent", "s")).deleted
    reply = driver.ask(schedules.FindSchedule("s"))
    assert (reply.count, reply.schedule) == (0, None)
    settle(driver, START + SECOND)
    assert driver.state().count == 0 and driver.machine.next_deadline_ms() is None


def test_deleting_a_box_deletes_its_schedules(driver: Driver) -> None:
    put(driver, "t")
    put(driver, "s")
    assert driver.ask(commands.DeleteBox("b")).schedules_removed == ["s", "t"]
    assert driver.ask(schedules.FindSchedule("s")).count == 0
    driver.put()
    settle(driver, START + SECOND)
    assert driver.state().count == 0
    put(driver, "s")  # the name is free


def test_a_schedule_of_a_memory_box_survives_a_restart_and_repeats_nothing(driver: Driver) -> None:
    driver.put("m", durability="memory")
    put(driver, box="m", every_ms=MINUTE)
    settle(driver, START + MINUTE)
    assert fired(driver, "m") == [MINUTE]
    for state in (None, driver.machine.snapshot()):
        other = driver.reborn(state=state)
        other.start("boot")
        settle(other)
        assert other.state("m").count == 0 and find(other).fired_total == 1
        settle(other, START + 2 * MINUTE)
        assert fired(other, "m") == [2 * MINUTE]
        put(other, "t", box="m")
        other.put("m", durability="disk")
        third = other.reborn()
        third.start("boot")
        settle(third, START + 3 * MINUTE)
        assert 3 * MINUTE in fired(third, "m")


def test_the_list_has_pages_by_name_and_by_box(driver: Driver) -> None:
    driver.put("c")
    for name in ("x1", "a2", "a1"):
        put(driver, name)
    put(driver, "a3", box="c")
    page = driver.ask(schedules.ListSchedules(prefix="a", limit=2))
    assert [each.schedule for each in page.schedules] == ["a1", "a2"] and page.more
    page = driver.ask(schedules.ListSchedules(prefix="a", after="a2"))
    assert [each.schedule for each in page.schedules] == ["a3"] and not page.more
    page = driver.ask(schedules.ListSchedules(box="b"))
    assert [each.schedule for each in page.schedules] == ["a1", "a2", "x1"]


def test_one_tick_looks_at_a_bounded_number_of_schedules(driver: Driver) -> None:
    for at in range(TICK_SCHEDULES_MAX + 3):
        put(driver, f"s{at}")
    driver.now_ms += SECOND
    assert len(driver.tick().changes) == TICK_SCHEDULES_MAX
    assert driver.machine.next_deadline_ms() == driver.now_ms
    settle(driver)
    assert driver.state().count == TICK_SCHEDULES_MAX + 3


def test_an_append_that_needs_a_sealed_payload_waits_for_it(driver: Driver) -> None:
    driver.put("e", cap_records=3, durability="fsync")
    driver.append(*"abc", box="e")
    driver.seal("e")
    put(driver, box="e")
    driver.forget()
    driver.now_ms += SECOND
    assert driver.tick().needs and find(driver).state == "active"
    settle(driver, START + 1_500)
    assert driver.seqs(box="e") == [2, 3, 4]


def test_a_log_that_lost_a_definition_keeps_the_records(driver: Driver) -> None:
    put(driver)
    settle(driver, START + SECOND)
    kept = [frame for frame in driver.log if frame.kind != 80]
    machine = new_machine()
    for lsn, frame in enumerate(kept, 1):
        machine.apply(decoded(frame), lsn)
    box: Box = machine.boxes["b"]
    assert box.log.count == 1 and not box.schedules
    for change in (
        changes.ScheduleDropped(box.generation, "s"),
        changes.ScheduleAdvanced(box.generation, "s", 1),
    ):
        with pytest.raises(DoesNotApply):
            machine.apply(change, machine.lsn + 1)


def test_a_zone_that_is_gone_blocks_its_schedules(driver: Driver) -> None:
    put(driver, cron="* * * * *", time_zone="Europe/Berlin")
    driver.make = Machine  # it knows UTC alone
    other = driver.reborn()
    other.start("boot")
    settle(other, START + MINUTE)
    assert "Europe/Berlin" in str(find(other).last_error)
