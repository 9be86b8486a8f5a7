"""Goal: each due time of a schedule that counts has one record, through crashes, clock steps and refusals.

Method: random histories on a clock of the test. At the end the box accepts records and the clock is right.
With `catch_up: "all"` the records are exactly the due times since the schedule was made; otherwise no due
time has two records, and the last one has one.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shard.core.machine import Machine
from shard.engine.time_zones import find_zone
from streams.protocol.messages import commands, schedules
from streams.protocol.messages.schedules import ScheduleSpec
from tests.support.machines import Driver, records_of, sampled

START = 1_700_000_000_000
MINUTE = 60_000


def new_machine() -> Machine:
    return Machine(find_zone=find_zone)


def ticked(driver: Driver) -> None:
    for _ in range(40):
        at = driver.machine.schedules.next_ms()
        if at is None or at > driver.now_ms:
            return
        driver.tick()
    raise AssertionError("it never settles")


def due_times(driver: Driver) -> list[int]:
    records = records_of(driver.read(limit=1000, max_bytes=1 << 30))
    return [record["meta"]["$due_ts"] for record in records if "meta" in record]


@given(st.randoms(use_true_random=False), st.sampled_from(["all", "one", "none"]), st.booleans())
@sampled(60)
def test_every_due_time_that_counts_has_one_record(rng: random.Random, catch_up: str, by_cron: bool) -> None:
    driver = Driver(now_ms=START, make=new_machine)
    driver.start("boot")
    driver.put(durability="fsync")
    rhythm = {"cron": "* * * * *"} if by_cron else {"every_ms": MINUTE}
    spec = ScheduleSpec(record=b'{"data":0}', catch_up=catch_up, **rhythm)  # type: ignore[arg-type]
    driver.ask(schedules.PutSchedule("b", "s", spec))
    first = driver.ask(schedules.FindSchedule("s")).schedule.next_due
    latest = driver.now_ms
    for _ in range(rng.randrange(1, 25)):
        kind = rng.randrange(7)
        if kind < 3:
            driver.now_ms += rng.choice((7, 5_000, MINUTE, 3 * MINUTE + 1))
        elif kind == 3:
            driver.machine.wall_ahead_ms = rng.choice((0, 0, -10 * MINUTE, 7 * MINUTE))
        elif kind == 4:
            driver.ask(commands.SetFence("b", rng.choice(("", "fenced"))))
        elif kind == 5:
            ticked(driver)
            latest = max(latest, driver.machine.wall_ms(driver.now_ms))
            if rng.random() < 0.5:
                driver.sync()
        else:
            state = driver.machine.snapshot() if rng.random() < 0.5 else None
            upto = None if state is not None else rng.randint(driver.machine.durable_lsn, driver.machine.lsn)
            ahead_ms = driver.machine.wall_ahead_ms
            driver = driver.reborn(upto, state)
            driver.now_ms += ahead_ms  # a restart adopts the system clock
            driver.start("boot")
    driver.machine.wall_ahead_ms = 0
    driver.now_ms = max(driver.now_ms, latest) + MINUTE
    driver.ask(commands.SetFence("b", ""))
    for _ in range(3):  # blocked ones try again
        driver.now_ms += 30_000
        ticked(driver)
        driver.sync()
    found = due_times(driver)
    assert len(set(found)) == len(found) and found == sorted(found)
    expected = list(range(first, driver.now_ms + 1, MINUTE))
    if catch_up == "all":
        assert found == expected
    else:
        assert set(found) <= set(expected)
        assert catch_up == "none" or found[-1] == expected[-1]
    assert driver.ask(schedules.FindSchedule("s")).schedule.fired_total == len(found)
