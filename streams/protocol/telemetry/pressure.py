"""How hard a process is pressed, from what is measured, and what follows from it (v0 §9). Pure.

    samples ──► Gauge ──► level    0 none · 1 low-priority delivery is paced · 2 appends are refused
            └─► Limit ──► how many appends may be under way at once

A gauge looks at a short window: the level rises when every sample of it is over a threshold, so that one
hiccup means nothing, and falls when none is. A limit is elastic: it gives way at once and comes back bit by
bit, the way TCP finds its window, so that what is admitted can be served without a queue building up.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NONE, PACING, THROTTLING = 0, 1, 2

#: Time between two samples, and samples in a window (`WINDOW`).
SAMPLE_S = 0.025
#: Time between two samples of an idle process.
IDLE_SAMPLE_S = 0.25
WINDOW = 4

#: Bounds of the `Retry-After` of a refused request.
RETRY_AFTER_MS_MIN, RETRY_AFTER_MS_MAX = 100, 5_000

#: Appends in flight to one shard: with fewer a shard would wait for its gateway; and as good as no limit.
LIMIT_MIN, LIMIT_MAX = 64, 4096


class Thresholds(NamedTuple):
    """At and above which a level holds. 0 is always met."""

    pace_lag_ms: int = 10
    throttle_lag_ms: int = 250
    pace_queue_bytes: int = 16 << 20
    throttle_queue_bytes: int = 32 << 20


class _Sample(NamedTuple):
    lag_ms: float
    queue_bytes: int


class Gauge:
    """The pressure level. `level` is an attribute, so that a hot path tests it without a call."""

    __slots__ = ("_thresholds", "_window", "level")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._window: deque[_Sample] = deque([_Sample(0.0, 0)] * WINDOW, maxlen=WINDOW)
        self.level = self._level_of(self._window[0])

    def __repr__(self) -> str:
        return f"<Gauge level {self.level}, lag {self.lag_ms:.1f} ms>"

    @property
    def lag_ms(self) -> float:
        """Of the last sample."""
        return self._window[-1].lag_ms

    def sample(self, lag_ms: float, queue_bytes: int = 0) -> None:
        self._window.append(_Sample(lag_ms, queue_bytes))
        levels = [self._level_of(each) for each in self._window]
        self.level = max(min(levels), min(max(levels), self.level))

    def _level_of(self, sample: _Sample) -> int:
        limits = self._thresholds
        if sample.lag_ms >= limits.throttle_lag_ms or sample.queue_bytes >= limits.throttle_queue_bytes:
            return THROTTLING
        if sample.lag_ms >= limits.pace_lag_ms or sample.queue_bytes >= limits.pace_queue_bytes:
            return PACING
        return NONE


def own_lag_ms(late_s: float, cpu_s: float) -> float:
    """How long what is ready waits because of what this process does: never longer than it was at work. A
    process that is late because others have the processors, or because it was stopped, is not under pressure
    by that: to refuse work would not make it earlier."""
    return 1000 * max(0.0, min(late_s, cpu_s))


def retry_after_ms(waited_ms: float) -> int:
    """Return twice the time that others have waited: by then about half of them have been served."""
    return int(min(max(2 * waited_ms, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX))


class Limit:
    """How many may be under way. Shrinks by a quarter of what is in use once a window; grows by an eighth a
    sample, from the least to twice as much in a fifth of a second."""

    __slots__ = ("_pace_lag_ms", "_rest", "value")

    def __init__(self, thresholds: Thresholds) -> None:
        self._pace_lag_ms = thresholds.pace_lag_ms
        self._rest = 0
        self.value = LIMIT_MAX

    def __repr__(self) -> str:
        return f"<Limit {self.value}>"

    def sample(self, lag_ms: float, in_use: int) -> None:
        if lag_ms < self._pace_lag_ms:
            self._rest = 0
            self.value = min(LIMIT_MAX, self.value + max(1, self.value // 8))
        elif self._rest:  # the last change has yet to take effect
            self._rest -= 1
        else:
            self._rest = WINDOW - 1
            self.value = max(LIMIT_MIN, min(self.value, in_use) * 3 // 4)
