"""Goal: the operator hears once of a system clock that was set, and once when the shard has followed it."""

from __future__ import annotations

import structlog.testing

from shard.engine.timekeeper import Timekeeper

S = 1_000_000_000


class Readings:
    def __init__(self) -> None:
        self.mono_ns = 7 * S
        self.wall_ahead_ns = 1_700_000_000 * S
        #: What the monotonic clock moves on by with each reading.
        self.pace_ns = 0
        self.keeper = Timekeeper(
            wall_ns=lambda: self.mono_ns + self.wall_ahead_ns, monotonic_ns=self.monotonic
        )

    def monotonic(self) -> int:
        self.mono_ns += self.pace_ns
        return self.mono_ns

    def run(self, seconds: int) -> list[str]:
        """Compares once a second. Returns the levels of the lines that were logged."""
        with structlog.testing.capture_logs() as lines:
            for _ in range(seconds):
                self.keeper.observe()
                self.mono_ns += S
        return [line["log_level"] for line in lines]


def test_a_step_is_logged_once_and_so_is_its_end() -> None:
    readings = Readings()
    assert readings.run(100) == []
    readings.wall_ahead_ns += 60 * S
    assert readings.run(500) == ["warning"]
    assert 9 < readings.keeper.behind_s < 11
    readings.wall_ahead_ns -= 3600 * S
    assert readings.run(10) == ["warning"]
    readings.wall_ahead_ns += 3580 * S
    assert readings.run(200) == ["info"]
    assert readings.keeper.behind_s == 0 and repr(readings.keeper) == "<Timekeeper <Clock +0.000 s behind>>"


def test_a_reading_that_was_interrupted_does_not_look_like_a_step() -> None:
    readings = Readings()
    readings.pace_ns = 5 * S
    assert readings.run(3) == [] and readings.keeper.behind_s == 0


def test_it_reads_the_clocks_of_the_system() -> None:
    keeper = Timekeeper()
    keeper.observe()
    assert keeper.now_ms() <= keeper.now_ms()
