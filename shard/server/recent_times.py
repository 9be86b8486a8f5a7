"""Counts the times of the last 10 to 20 seconds, from a histogram that counts since the start.

    mark ── 10 s ── mark ── now        counts() has all times since the mark before the last one

A backup reads it to see how much it slows clients down.
"""

from __future__ import annotations

from streams.protocol.telemetry.histogram import Histogram

#: Time between two marks.
WINDOW_S = 10.0


class RecentTimes:
    def __init__(self, times: Histogram) -> None:
        self._times = times
        self._earlier = self._mark = times.facts().counts
        self._marked_s = 0.0

    def __repr__(self) -> str:
        return f"<RecentTimes {sum(self.counts())} of {self._times!r}>"

    def update(self, now_s: float) -> None:
        """Set a mark if `WINDOW_S` have passed since the last one. Called by the pressure loop."""
        if now_s - self._marked_s >= WINDOW_S:
            self._earlier, self._mark, self._marked_s = self._mark, self._times.facts().counts, now_s

    def counts(self) -> list[int]:
        """Return the count of each bucket since the mark before the last one."""
        return [now - before for now, before in zip(self._times.facts().counts, self._earlier, strict=True)]
