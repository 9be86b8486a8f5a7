"""Times of the last moments: 10 to 20 seconds of them, whatever came before."""

from __future__ import annotations

from shard.server.recent_times import WINDOW_S, RecentTimes
from streams.protocol.telemetry.histogram import Histogram


def test_times_are_recent_for_one_to_two_windows() -> None:
    times = Histogram()
    times.observe(0.1)
    recent = RecentTimes(times)
    assert sum(recent.counts()) == 0, "what was there before is not recent"
    recent.update(100.0)
    times.observe(0.1)
    times.observe(0.002)
    assert sum(recent.counts()) == 2
    recent.update(100.0 + WINDOW_S - 0.1)
    times.observe(0.002)
    assert sum(recent.counts()) == 3
    recent.update(100.0 + WINDOW_S)
    assert sum(recent.counts()) == 3
    recent.update(100.0 + 2 * WINDOW_S)
    assert sum(recent.counts()) == 0
    times.observe(0.002)
    assert [count for count in recent.counts() if count] == [1]
