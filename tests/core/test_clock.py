"""Goal: a shard's time never jumps and never goes back, whatever the system clock does, and follows it.

Method: virtual readings. Times are in seconds here; the clock takes nanoseconds.
"""

from __future__ import annotations

import random

import pytest

from shard.core.clock import SLEW, Clock

S = 1_000_000_000
HOUR, DAY = 3600, 86_400
#: The system clock at the start of every test.
EPOCH = 1_700_000_000


class World:
    """A clock with a system clock that can be set."""

    def __init__(self) -> None:
        self.mono_s = 50.0
        self.step_s = 0.0
        self.clock = Clock(wall_ns=EPOCH * S, monotonic_ns=round(self.mono_s * S))

    @property
    def wall_ns(self) -> int:
        return round((EPOCH + self.mono_s - 50 + self.step_s) * S)

    def run(self, seconds: float, every_s: float = 1.0) -> None:
        """Lets time pass, with a comparison every so often."""
        end_s = self.mono_s + seconds
        while self.mono_s < end_s:
            self.observe()
            self.mono_s = min(end_s, self.mono_s + every_s)
        self.observe()

    def observe(self) -> float:
        return self.clock.observe(wall_ns=self.wall_ns, monotonic_ns=round(self.mono_s * S)) / S

    @property
    def now_s(self) -> float:
        """Seconds since the start, in the shard's time."""
        return self.clock.now_ms(round(self.mono_s * S)) / 1000 - EPOCH


@pytest.fixture
def world() -> World:
    return World()


def test_it_begins_with_the_system_clock_and_goes_on_with_the_monotonic_one(world: World) -> None:
    assert world.now_s == 0
    world.run(1000)
    assert world.now_s == 1000
    assert repr(world.clock) == "<Clock +0.000 s behind>"


@pytest.mark.parametrize("step_s", [DAY, -HOUR, HOUR, -DAY])
def test_a_step_changes_the_length_of_a_second_by_a_tenth_at_most(world: World, step_s: int) -> None:
    world.step_s = step_s
    world.run(30)
    assert world.now_s == pytest.approx(33 if step_s > 0 else 27, abs=0.01)


@pytest.mark.parametrize("step_s", [60, -60])
def test_it_agrees_with_the_system_clock_again_after_ten_times_the_step(world: World, step_s: int) -> None:
    world.step_s = step_s
    world.run(SLEW * 60 - 5)
    assert world.now_s != pytest.approx(world.mono_s - 50 + step_s, abs=0.1)
    world.run(10)
    assert world.now_s == pytest.approx(world.mono_s - 50 + step_s, abs=0.003)
    before = world.now_s
    world.run(100)
    assert world.now_s == pytest.approx(before + 100, abs=0.003)


def test_a_step_that_is_taken_back_leaves_little_behind(world: World) -> None:
    world.step_s = DAY
    world.run(60)
    world.step_s = 0
    assert world.now_s == pytest.approx(66, abs=0.01)
    world.run(70)
    assert world.now_s == pytest.approx(130, abs=0.003)


def test_a_comparison_that_comes_late_does_not_overshoot(world: World) -> None:
    world.step_s = 0.5
    world.observe()
    world.mono_s += 1000
    assert world.now_s == pytest.approx(1000.5, abs=0.001)
    world.step_s = -0.5
    world.observe()
    world.mono_s += 1000
    assert world.now_s == pytest.approx(1999.5, abs=0.001)


def test_noise_of_readings_is_left_alone(world: World) -> None:
    world.step_s = 0.0019
    assert world.observe() == 0
    world.run(10)
    assert world.now_s == 10


def test_it_never_goes_back_and_never_runs_more_than_a_tenth_fast_or_slow(world: World) -> None:
    rng = random.Random(18)
    last_mono_s, last_s = world.mono_s, world.now_s
    for _ in range(3000):
        if rng.random() < 0.05:
            world.step_s += rng.choice([-1, 1]) * rng.choice([0.01, 1, HOUR, DAY])
        if rng.random() < 0.5:
            world.observe()
        world.mono_s += rng.choice([0, 0.0001, 0.01, 1, 60])
        passed_s, real_s = world.now_s - last_s, world.mono_s - last_mono_s
        assert 0.9 * real_s - 0.002 <= passed_s <= 1.1 * real_s + 0.002
        last_mono_s, last_s = world.mono_s, world.now_s
