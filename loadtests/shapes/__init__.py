"""Number of users over the time of a run. Pure; the modules beside this one pass it to locust.

Each function returns the number of users at a moment, and how many may start or stop in a second; None ends
the run.
"""

from __future__ import annotations

#: A spike is this many times the ordinary load, and lasts this share of the run.
SPIKE_TIMES, SPIKE_SHARE = 4, 0.2
RAMP_STEPS = 8


def ramp(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    """Increase in equal steps; the last step has all users."""
    if at_s >= seconds:
        return None
    step = min(RAMP_STEPS, int(at_s / seconds * RAMP_STEPS) + 1)
    return max(1, users * step // RAMP_STEPS), float(users)


def spike(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    """A quarter of the users, but all of them for a fifth of the run in its middle."""
    if at_s >= seconds:
        return None
    is_high = abs(at_s / seconds - 0.5) <= SPIKE_SHARE / 2
    return users if is_high else max(1, users // SPIKE_TIMES), float(users)


def steady(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    return (users, float(users)) if at_s < seconds else None
