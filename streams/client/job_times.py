"""Delays and times of jobs, as the API takes them: milliseconds."""

from __future__ import annotations

from datetime import datetime, timedelta


def millis_of(delay: float | timedelta | None) -> int | None:
    """A delay in seconds, or a timedelta, in milliseconds."""
    if delay is None:
        return None
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    return max(0, round(seconds * 1000))


def epoch_ms_of(time: int | datetime | None) -> int | None:
    """Epoch milliseconds of a datetime; without a time zone it is local time."""
    return round(time.timestamp() * 1000) if isinstance(time, datetime) else time
