"""How many users there are as time goes on. Pure; the modules beside this one hand it to locust.

Each answers the number of users and how many may come or go a second, for a moment of the run; None ends it.
"""

from __future__ import annotations

#: A spike is this many times the ordinary load, and lasts this share of the run.
SPIKE_TIMES, SPIKE_SHARE = 4, 0.2
RAMP_STEPS = 8


def ramp(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    """Up in equal steps, all the users for the last one."""
    if at_s >= seconds:
        return None
    step = min(RAMP_STEPS, int(at_s / seconds * RAMP_STEPS) + 1)
    return max(1, users * step // RAMP_STEPS), float(users)


def spike(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    """A quarter of the users, all of them for a fifth of the run in its middle, a quarter again."""
    if at_s >= seconds:
        return None
    is_high = abs(at_s / seconds - 0.5) <= SPIKE_SHARE / 2
    return users if is_high else max(1, users // SPIKE_TIMES), float(users)


def steady(at_s: float, *, users: int, seconds: float) -> tuple[int, float] | None:
    return (users, float(users)) if at_s < seconds else None
