"""Reads the clocks of a shard: the only place that does, but for measuring how long something took.

`now_ms` is the time that the core lives in (`core/clock.py`). `observe` is called about once a second; it
compares this time with the system clock, and logs when that was set. Waits of requests do not use this time
at all: they are on trio's clock, which is monotonic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog

from shard.core.clock import SLEW, Clock

log = structlog.get_logger()

#: Steps of the system clock that are worth a line in the log.
_STEP_NS = 1_000_000_000

#: Two readings that lie further apart than this were interrupted, and say nothing about a step.
_APART_NS = 1_000_000

#: Counts the time that the machine was suspended, where the system can tell: leases run out meanwhile.
_read_monotonic_ns = partial(time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Timekeeper:
    def __init__(
        self,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = _read_monotonic_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._clock = Clock(wall_ns=wall_ns(), monotonic_ns=monotonic_ns())
        #: System clock minus shard time, as of the last comparison.
        self._behind_ns = 0
        #: Times that the system clock was set.
        self.steps = 0

    def __repr__(self) -> str:
        return f"<Timekeeper {self._clock!r}>"

    def now_ms(self) -> int:
        return self._clock.now_ms(self._monotonic_ns())

    @property
    def behind_s(self) -> float:
        """How far shard time is behind the system clock; negative when it is ahead."""
        return self._behind_ns / 1e9

    def observe(self) -> None:
        """Compares shard time with the system clock, which it follows from then on."""
        before_ns = self._monotonic_ns()
        wall_ns = self._wall_ns()
        after_ns = self._monotonic_ns()
        if after_ns - before_ns > _APART_NS:
            return
        behind_ns = self._clock.observe(wall_ns=wall_ns, monotonic_ns=after_ns)
        known_ns, self._behind_ns = self._behind_ns, behind_ns
        # A correction that goes on makes the difference smaller by a tenth of the time since; a larger change
        # is another step.
        if abs(behind_ns) >= _STEP_NS and (
            abs(behind_ns) > abs(known_ns) + _STEP_NS or (behind_ns > 0) != (known_ns > 0)
        ):
            self.steps += 1
            log.warning(
                "the system clock was set; this shard's time follows it slowly, and a restart takes it over",
                clock_ahead_s=round(behind_ns / 1e9, 3),
                follows_within_s=round(abs(behind_ns) * SLEW / 1e9),
            )
        elif abs(known_ns) >= _STEP_NS > abs(behind_ns):
            log.info("this shard's time agrees with the system clock again")
