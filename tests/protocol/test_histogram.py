"""A histogram puts each observation into the first bucket that holds it, as Prometheus counts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.telemetry.histogram import TIMES_S, Histogram, HistogramFacts


@given(st.lists(st.floats(0, 20), max_size=50))
def test_each_observation_is_in_the_first_bucket_whose_bound_is_not_below_it(values: list[float]) -> None:
    times = Histogram()
    for value in values[:3]:
        times.observe(value)
    for value in values[3:]:
        times.observe(value, 1)
    twice = Histogram()
    for value in values:
        twice.observe(value, 2)
    facts = times.facts()
    for at, bound in enumerate(TIMES_S):
        assert sum(facts.counts[: at + 1]) == sum(value <= bound for value in values)
    assert sum(facts.counts) == len(values)
    assert twice.facts().counts == tuple(2 * count for count in facts.counts)
    assert abs(facts.sum - sum(values)) < 1e-6
    assert f"{len(values)} observations" in repr(times)


def test_nothing_observed_is_what_a_report_says_when_it_says_nothing() -> None:
    assert Histogram().facts() == HistogramFacts()
    assert list(TIMES_S) == sorted(set(TIMES_S))
