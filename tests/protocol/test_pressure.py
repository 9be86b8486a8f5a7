"""From samples to a level and a limit (v0 §9): no hiccup counts, a standing queue does, and it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.telemetry.pressure import (
    LIMIT_MAX,
    LIMIT_MIN,
    NONE,
    PACING,
    THROTTLING,
    WINDOW,
    Gauge,
    Limit,
    Thresholds,
    own_lag_ms,
    retry_after_ms,
)

LIMITS = Thresholds(pace_lag_ms=10, throttle_lag_ms=100, pace_queue_bytes=1000, throttle_queue_bytes=5000)
samples = st.lists(st.tuples(st.floats(0, 300), st.integers(0, 10_000)), max_size=60)


def level_of(lag_ms: float, queue_bytes: int) -> int:
    if lag_ms >= 100 or queue_bytes >= 5000:
        return THROTTLING
    return PACING if lag_ms >= 10 or queue_bytes >= 1000 else NONE


@given(samples)
def test_the_level_stays_within_what_its_window_has_seen(taken: list[tuple[float, int]]) -> None:
    gauge = Gauge(LIMITS)
    seen = [NONE] * WINDOW
    for lag_ms, queue_bytes in taken:
        before = gauge.level
        gauge.sample(lag_ms, queue_bytes)
        seen = [*seen[1:], level_of(lag_ms, queue_bytes)]
        assert min(seen) <= gauge.level <= max(seen)
        assert gauge.level == before or not min(seen) <= before <= max(seen), "it moves only when it must"
        assert gauge.lag_ms == lag_ms


@given(samples, st.sampled_from([(0.0, 0, NONE), (50.0, 0, PACING), (0.0, 9000, THROTTLING)]))
def test_after_one_window_of_the_same_the_level_is_that(
    before: list[tuple[float, int]], then: tuple[float, int, int]
) -> None:
    gauge = Gauge(LIMITS)
    for each in before:
        gauge.sample(*each)
    for _ in range(WINDOW):
        gauge.sample(then[0], then[1])
    assert gauge.level == then[2]


def test_one_hiccup_is_no_pressure() -> None:
    gauge = Gauge(LIMITS)
    for _ in range(WINDOW - 1):
        gauge.sample(10_000.0)
    gauge.sample(0.0)
    assert gauge.level == NONE and "level 0" in repr(gauge)


def test_a_threshold_of_nothing_is_always_met() -> None:
    assert Gauge(Thresholds(pace_lag_ms=0)).level == PACING
    assert Gauge(Thresholds(throttle_lag_ms=0)).level == THROTTLING


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), max_size=200))
def test_a_limit_keeps_its_bounds_and_shrinks_only_under_pressure(taken: list[tuple[float, int]]) -> None:
    limit = Limit(LIMITS)
    for lag_ms, in_use in taken:
        before = limit.value
        limit.sample(lag_ms, in_use)
        assert LIMIT_MIN <= limit.value <= LIMIT_MAX
        assert limit.value >= before if lag_ms < 10 else limit.value <= before


def test_a_limit_gives_way_within_a_second_and_is_gone_within_two() -> None:
    """§9: forty samples are a second."""
    limit = Limit(LIMITS)
    for _ in range(40):
        limit.sample(50.0, limit.value if limit.value < 256 else 256)
    assert limit.value == LIMIT_MIN
    for _ in range(80):
        limit.sample(0.0, 8)
    assert limit.value == LIMIT_MAX and str(LIMIT_MAX) in repr(limit)


@given(st.floats(-1, 1e6), st.floats(0, 1e6))
def test_lag_is_own_lag_as_far_as_the_process_was_at_work(late_s: float, cpu_s: float) -> None:
    assert 0 <= own_lag_ms(late_s, cpu_s) <= 1000 * cpu_s
    assert own_lag_ms(late_s, 1e9) == 1000 * max(0.0, late_s)
    assert own_lag_ms(late_s, 0.0) == 0


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_who_is_refused_later_is_not_asked_to_wait_less(first: float, second: float) -> None:
    less, more = sorted((first, second))
    assert 100 <= retry_after_ms(less) <= retry_after_ms(more) <= 5000
