"""The delivery rate of one queue (`rate_per_s`, v0 §23). Pure.

A token bucket that holds one second of deliveries, and at least one. It is volatile: a start of the shard
begins with a full bucket.

    paid_until_ms     deliveries so far are paid for up to here; one delivery costs 1000 / rate ms
    now ◄── burst ──► paid_until_ms may run ahead of the clock by the burst
"""

from __future__ import annotations

#: A queue that waits for its rate is looked at again after at least so long: few wake-ups at high rates.
_PAUSE_MS_MIN = 10


class DeliveryRate:
    __slots__ = ("_paid_until_ms", "resume_ms")

    def __init__(self) -> None:
        self._paid_until_ms = 0.0
        #: When a claim that the rate has cut short may get more; 0 = none was.
        self.resume_ms = 0

    def __repr__(self) -> str:
        return f"<DeliveryRate paid until {self._paid_until_ms:.0f}, resumes {self.resume_ms}>"

    def limit(self, per_s: float, now_ms: int) -> int:
        """Return how many jobs may be delivered now."""
        cost_ms = 1000 / per_s
        burst_ms = max(1000.0, cost_ms)
        return int((now_ms + burst_ms - max(self._paid_until_ms, now_ms)) / cost_ms + 1e-9)

    def pay(self, count: int, per_s: float, now_ms: int) -> None:
        """Count deliveries."""
        self._paid_until_ms = max(self._paid_until_ms, now_ms) + count * 1000 / per_s

    def wait(self, per_s: float, now_ms: int) -> None:
        """Note that a claim wants more than the rate allows: it goes on at `resume_ms`."""
        cost_ms = 1000 / per_s
        ahead_ms = max(self._paid_until_ms, now_ms) + cost_ms - max(1000.0, cost_ms)
        self.resume_ms = max(now_ms + _PAUSE_MS_MIN, int(ahead_ms) + 1)

    def rewind(self, ms: int) -> None:
        """Shift all times back by `ms`, with the clock."""
        self._paid_until_ms -= ms
        self.resume_ms = max(0, self.resume_ms - ms)
