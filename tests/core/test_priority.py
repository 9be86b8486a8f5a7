"""The order of delivery under pressure (v0 §9): the formula, and that nobody is passed over for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shard.core.boxes.priority import Pacing, after_waiting, base

times_ms = st.integers(0, 10**13)
priorities = st.none() | st.integers(-1000, 1000)


@given(priorities, st.booleans(), st.none() | times_ms, times_ms)
def test_the_priority_is_the_manual_one_or_what_consumption_is_worth(
    manual: int | None, is_automatic: bool, last_read_ms: int | None, now_ms: int
) -> None:
    found = base(manual, is_automatic=is_automatic, last_read_ms=last_read_ms, now_ms=now_ms)
    if manual is not None:
        assert found == manual
    elif not is_automatic or last_read_ms is None:
        assert found == 0
    else:
        idle_s = max(0, now_ms - last_read_ms) / 1000
        assert found == (0 if idle_s >= 300 else round(500 * 2 ** (-idle_s / 30), 3))
        assert 0 <= found <= 500


@given(st.integers(0, 400_000), st.integers(0, 400_000))
def test_consumption_is_worth_less_the_longer_ago_it_was(first_ms: int, second_ms: int) -> None:
    sooner, later = sorted((first_ms, second_ms))

    def worth(idle_ms: int) -> float:
        return base(None, is_automatic=True, last_read_ms=0, now_ms=idle_ms)

    assert worth(sooner) >= worth(later)


@given(st.floats(-1000, 1000), st.integers(-5, 100_000))
def test_waiting_is_worth_a_hundred_a_second_for_ten_seconds(start: float, waited_ms: int) -> None:
    assert after_waiting(start, waited_ms) == start + min(max(0, waited_ms), 10_000) * 0.1
    assert start <= after_waiting(start, waited_ms) <= start + 1000


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1), st.tuples(st.integers(-1000, 1000), st.integers(0, 20_000))
    )
)
def test_each_round_serves_the_highest_and_all_are_served_once(boxes: dict[str, tuple[int, int]]) -> None:
    pacing = Pacing()
    now_ms = 20_000
    for box, (_, since_ms) in boxes.items():
        pacing.hold(box, since_ms)
        pacing.hold(box, now_ms)  # it goes on waiting since it began to
    served: list[str] = []
    while len(pacing):
        released = pacing.release(2, now_ms, lambda box: float(boxes[box][0]))
        assert 1 <= len(released) <= 2
        served += released
    assert sorted(served) == sorted(boxes)
    worth = [after_waiting(boxes[box][0], now_ms - boxes[box][1]) for box in served]
    assert worth == sorted(worth, reverse=True)


def test_the_least_of_all_overtakes_by_waiting() -> None:
    pacing = Pacing()
    order = {"least": -400.0, "most": 500.0}
    pacing.hold("least", 0)
    pacing.hold("most", 0)
    rounds = 0
    while "least" not in pacing.release(1, rounds * 25, order.__getitem__):
        rounds += 1
        pacing.hold("most", rounds * 25)  # there is always something for the other
    assert 9_000 <= rounds * 25 < 10_000, "900 points at 100 a second"
    assert "0 held" in repr(Pacing())
