"""A shard's time: it never goes back, never jumps, and follows the system clock at a bounded rate. Pure.

    shard time = system clock at the start + monotonic time since, corrected by at most a tenth of what passes

Leases, delays, idempotency windows, TTLs and `$ts` all live in this one time, so that a system clock that is
set forward ends none of them early, and one that is set back makes none of them hang. While a correction is
under way, a second of shard time lasts 0.9 to 1.1 seconds.

Readings are arguments. The monotonic clock may count the time that the machine was suspended, or not; what it
does not count looks like a step of the system clock.

Invariant
- FORWARD: `now_ms` of a later monotonic reading is not smaller.
"""

from __future__ import annotations

#: A correction takes this many times as long as the step that it makes good.
SLEW = 10

#: Differences below this are reading noise and are left alone.
_NOISE_NS = 2_000_000


class Clock:
    __slots__ = ("_behind_ns", "_offset_ns", "_since_ns")

    def __init__(self, *, wall_ns: int, monotonic_ns: int) -> None:
        #: Shard time minus monotonic time, at `_since_ns`.
        self._offset_ns = wall_ns - monotonic_ns
        self._since_ns = monotonic_ns
        #: The correction to make from `_since_ns` on: positive when shard time is behind the system clock.
        self._behind_ns = 0

    def __repr__(self) -> str:
        return f"<Clock {self._behind_ns / 1e9:+.3f} s behind>"

    def now_ms(self, monotonic_ns: int) -> int:
        if not self._behind_ns:
            return (monotonic_ns + self._offset_ns) // 1_000_000
        return (monotonic_ns + self._offset_ns + self._correction_ns(monotonic_ns)) // 1_000_000

    def _correction_ns(self, monotonic_ns: int) -> int:
        """The part of the correction that has been made by now."""
        slew_ns = (monotonic_ns - self._since_ns) // SLEW
        return min(slew_ns, self._behind_ns) if self._behind_ns > 0 else max(-slew_ns, self._behind_ns)

    def observe(self, *, wall_ns: int, monotonic_ns: int) -> int:
        """Compares shard time with the system clock and corrects it from now on. Returns how many ns shard
        time is behind; negative when it is ahead."""
        self._offset_ns += self._correction_ns(monotonic_ns)
        self._since_ns = monotonic_ns
        behind_ns = wall_ns - (monotonic_ns + self._offset_ns)
        self._behind_ns = behind_ns if abs(behind_ns) >= _NOISE_NS else 0
        return self._behind_ns
