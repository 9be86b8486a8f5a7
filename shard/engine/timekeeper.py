"""Reads the clocks of a shard. Only this file does, except for code that measures durations.

`now_ms` is the time of the core (`core/clock.py`). `observe` is called about once a second: it compares this
time with the system clock, and logs when the system clock was set. Waiting requests do not use this time:
they are on trio's clock, which is monotonic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog

from shard.core.clock import SLEW, Clock

log = structlog.get_logger()

#: Steps of the system clock from this size on are logged.
_STEP_NS = 1_000_000_000

#: If two readings are further apart than this, the process was interrupted: the comparison is not valid.
_APART_NS = 1_000_000

#: Includes the time that the computer was suspended, where the system supports it: leases expire meanwhile.
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
        #: How often the system clock was set.
        self.steps = 0

    def __repr__(self) -> str:
        return f"<Timekeeper {self._clock!r}>"

    def now_ms(self) -> int:
        return self._clock.now_ms(self._monotonic_ns())

    def wall_ahead_ms(self, now_ms: int) -> int:
        """Return how far the system clock is ahead of the shard time `now_ms`."""
        return self._wall_ns() // 1_000_000 - now_ms

    @property
    def behind_s(self) -> float:
        """Seconds that shard time is behind the system clock; negative if it is ahead."""
        return self._behind_ns / 1e9

    def observe(self) -> int:
        """Compare shard time with the system clock, and let it follow the system clock from now on. Returns
        how many milliseconds shard time is behind."""
        before_ns = self._monotonic_ns()
        wall_ns = self._wall_ns()
        after_ns = self._monotonic_ns()
        if after_ns - before_ns > _APART_NS:
            return self._behind_ns // 1_000_000
        behind_ns = self._clock.observe(wall_ns=wall_ns, monotonic_ns=after_ns)
        previous_ns, self._behind_ns = self._behind_ns, behind_ns
        # A correction in progress reduces the difference by a tenth of the elapsed time; a larger change is
        # another step.
        if abs(behind_ns) >= _STEP_NS and (
            abs(behind_ns) > abs(previous_ns) + _STEP_NS or (behind_ns > 0) != (previous_ns > 0)
        ):
            self.steps += 1
            log.warning(
                "the system clock was set; shard time follows it slowly (a restart applies it at once)",
                clock_ahead_s=round(behind_ns / 1e9, 3),
                follows_within_s=round(abs(behind_ns) * SLEW / 1e9),
            )
        elif abs(previous_ns) >= _STEP_NS > abs(behind_ns):
            log.info("this shard's time agrees with the system clock again")
        return behind_ns // 1_000_000
