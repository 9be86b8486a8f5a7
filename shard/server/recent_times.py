"""The times of the last moments, out of a histogram that counts since the start.

    mark ── 10 s ── mark ── now        counts() has what came since the mark before the last: 10 to 20 s

A backup compares with it what clients see while it runs.
"""

from __future__ import annotations

from streams.protocol.telemetry.histogram import Histogram

#: Between two marks.
WINDOW_S = 10.0


class RecentTimes:
    def __init__(self, times: Histogram) -> None:
        self._times = times
        self._earlier = self._mark = times.facts().counts
        self._marked_s = 0.0

    def __repr__(self) -> str:
        return f"<RecentTimes {sum(self.counts())} of {self._times!r}>"

    def update(self, now_s: float) -> None:
        """Set a mark if it is time for one. To be called now and then."""
        if now_s - self._marked_s >= WINDOW_S:
            self._earlier, self._mark, self._marked_s = self._mark, self._times.facts().counts, now_s

    def counts(self) -> list[int]:
        """Return how many times there were in each bucket lately."""
        return [now - before for now, before in zip(self._times.facts().counts, self._earlier, strict=True)]
