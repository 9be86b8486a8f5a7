"""Counts the times of the last 10 to 20 seconds, from a histogram that counts since the start.

    sample ─ 10 s ─ sample ─ now       counts() has all times since the sample before the last one

A backup reads it to see how much it slows clients down.
"""

from __future__ import annotations

from streams.protocol.telemetry.histogram import Histogram

#: Time between two samples.
WINDOW_S = 10.0


class RecentTimes:
    def __init__(self, times: Histogram) -> None:
        self._times = times
        self._earlier = self._latest = times.facts().counts
        self._checked_s = 0.0

    def __repr__(self) -> str:
        return f"<RecentTimes {sum(self.counts())} of {self._times!r}>"

    def update(self, now_s: float) -> None:
        """Take a sample if `WINDOW_S` have passed since the last one. Called by the pressure loop."""
        if now_s - self._checked_s >= WINDOW_S:
            self._earlier, self._latest, self._checked_s = self._latest, self._times.facts().counts, now_s

    def counts(self) -> list[int]:
        """Return the count of each bucket since the sample before the last one."""
        return [now - before for now, before in zip(self._times.facts().counts, self._earlier, strict=True)]
