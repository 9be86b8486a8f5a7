"""How fast `streams backup` and `streams verify` go: the rule, by a clock that only sleeps move."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from streams.cli.pacing import AUTO, LEAST_BYTES_PER_S, MOST_BYTES_PER_S, UNLIMITED, CopyThrottle, Pace, Rate
from streams.cli.pacing import ShardWatch as Watch
from streams.progress import ByteLines
from streams.protocol.telemetry.histogram import TIMES_S, Histogram, quantile

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def copied_in(
    seconds: float, pace: Pace, clock: Clock, is_pressed: Callable[[], bool] | None, piece: int = MIB
) -> int:
    """Bytes that go by in so many seconds, if they take no time themselves."""
    copying = CopyThrottle(pace, is_pressed=is_pressed, clock=lambda: clock.now_s, sleep=clock.sleep)
    end_s, size = clock.now_s + seconds, 0
    while clock.now_s < end_s:
        copying.pause(piece)
        size += piece
    return size


def test_a_fixed_rate_is_kept() -> None:
    assert copied_in(60, Pace(10 * MIB), Clock(), None) == pytest.approx(600 * MIB, rel=0.01)


def test_without_a_pace_nothing_sleeps() -> None:
    clock = Clock()
    copying = CopyThrottle(None, clock=lambda: clock.now_s, sleep=clock.sleep)
    for _ in range(1_000):
        copying.pause(MIB)
    assert clock.now_s == 0.0


def test_a_server_whose_clients_notice_nothing_is_read_ever_faster_up_to_a_bound() -> None:
    clock, pace = Clock(), Pace(16 * MIB)
    assert copied_in(10, pace, clock, lambda: False) > 10 * 160 * MIB, "ten times the usual rate"
    copied_in(60, pace, clock, lambda: False, piece=64 * MIB)
    assert pace.bytes_per_s == MOST_BYTES_PER_S


def test_a_server_that_is_always_pressed_is_read_slowly_and_to_the_end() -> None:
    pace = Pace(16 * MIB)
    size = copied_in(60, pace, Clock(), lambda: True)
    assert pace.bytes_per_s == LEAST_BYTES_PER_S
    assert size == pytest.approx(60 * LEAST_BYTES_PER_S, rel=0.1)


def test_the_rate_settles_below_what_clients_notice() -> None:
    clock, pace = Clock(), Pace(16 * MIB)
    copied_in(10, pace, clock, lambda: pace.bytes_per_s > 200 * MIB)
    size = copied_in(60, pace, clock, lambda: pace.bytes_per_s > 200 * MIB)
    assert 100 * MIB < size / 60 < 200 * MIB


def test_shards_are_asked_four_times_a_second_at_most() -> None:
    asked = []
    copied_in(10, Pace(16 * MIB), Clock(), lambda: bool(asked.append(1)), piece=64 * 1024)
    assert 30 <= len(asked) <= 40


def acks(*times_s: float) -> list[int]:
    histogram = Histogram()
    for time_s in times_s:
        histogram.observe(time_s)
    return list(histogram.facts().counts)


def test_acks_that_take_twice_as_long_as_before_are_noticed() -> None:
    watch = Watch(acks(*[0.0009] * 1_000))
    assert 0.0009 < watch.limit_s <= 0.002
    total = [0] * (len(TIMES_S) + 1)

    def after(*times_s: float) -> bool:
        for at, count in enumerate(acks(*times_s)):
            total[at] += count
        return watch.is_pressed({"acks": list(total), "level": 0})

    assert not after(), "what came before the first answer is not ours"
    assert not after(*[0.0009] * 100)
    assert after(*[0.0009] * 95, *[0.02] * 5)
    assert not after(*[0.0009] * 100), "only what is new counts"
    assert not after(*[0.02] * 10), "too few to tell"
    assert after(*[0.02] * 50), "by now they are enough"


def test_a_shard_under_pressure_counts_whatever_its_acks_say() -> None:
    watch = Watch(acks())
    assert watch.limit_s == 0.01, "nothing was written before: it is not known what is usual"
    assert watch.is_pressed({"acks": acks(), "level": 1})


def test_quantiles_lie_within_their_buckets() -> None:
    assert quantile(acks(), 0.99) == 0.0
    assert quantile(acks(*[0.003] * 100), 0.99) == pytest.approx(0.0025 + 0.99 * 0.0025)
    assert 0.01 < quantile(acks(*[0.001] * 98, 0.02, 0.02), 0.99) <= 0.025
    assert quantile(acks(99.0), 0.99) > TIMES_S[-1]


@pytest.mark.parametrize(
    ("text", "rate"), [("auto", AUTO), ("max", UNLIMITED), ("64MiB", 64 * MIB), ("1000", 1000)]
)
def test_rates_are_written_as_sizes(text: str, rate: int) -> None:
    assert Rate().convert(text, None, None) == rate


@pytest.mark.parametrize("text", ["fast", "0", "-1", "1 parsec", ""])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not auto, max, or a size"):
        Rate().convert(text, None, None)


def test_a_log_is_told_bytes_rate_and_time_left_now_and_then() -> None:
    lines = ByteLines("backup", every_s=30)
    assert lines.line(0, 3_000 * MIB, 100.0) == ""
    assert lines.line(100 * MIB, 3_000 * MIB, 129.0) == ""
    told = "backup: 300 of 3000 MiB, 10.0 MiB/s, 0:04:30 left"
    assert lines.line(300 * MIB, 3_000 * MIB, 130.0) == told
    assert lines.line(310 * MIB, 3_000 * MIB, 131.0) == ""
    assert lines.line(300 * MIB, 3_000 * MIB, 160.0).endswith("no progress for 30 s")
