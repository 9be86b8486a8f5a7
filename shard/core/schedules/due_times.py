"""The due times of a schedule, as epoch milliseconds. Pure: time zones are arguments.

Daylight saving (v0 §22): a local time that does not exist is due at the next instant that does, and a local
time that occurs twice is due at its first occurrence only. Two local times with the same instant are one due
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Protocol

from shard.core.schedules.cron import Cron

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_EPOCH = datetime(1970, 1, 1)
_MILLISECOND = timedelta(milliseconds=1)
_HOUR_MS = 3_600_000


class DueTimes(Protocol):
    """An endless, growing sequence of instants."""

    def next_after(self, after_ms: int) -> int | None:
        """Return the first due time after this instant; None if there is none."""

    def last_between(self, first_ms: int, upto_ms: int, count: int) -> list[int]:
        """Return the last due times from `first_ms`, itself a due time, to `upto_ms`: at most `count`."""


class IntervalTimes:
    """Due times at a fixed interval after `anchor_ms`."""

    def __init__(self, anchor_ms: int, every_ms: int) -> None:
        self._anchor_ms = anchor_ms
        self._every_ms = every_ms

    def next_after(self, after_ms: int) -> int | None:
        steps = max(0, (after_ms - self._anchor_ms) // self._every_ms)
        return self._anchor_ms + (steps + 1) * self._every_ms

    def last_between(self, first_ms: int, upto_ms: int, count: int) -> list[int]:
        steps = (upto_ms - first_ms) // self._every_ms
        last_ms = first_ms + steps * self._every_ms
        return [last_ms - at * self._every_ms for at in range(min(count, steps + 1) - 1, -1, -1)]


class CronTimes:
    """Due times of a cron expression in a time zone."""

    def __init__(self, cron: Cron, zone: tzinfo) -> None:
        self._cron = cron
        self._zone = zone

    def next_after(self, after_ms: int) -> int | None:
        """Local times of the second pass through a repeated hour are skipped: they were due in the first."""
        local: datetime | None = (_EPOCH + after_ms * _MILLISECOND).astimezone(self._zone)
        assert local is not None
        local = local.replace(tzinfo=None)
        while True:
            local = self._cron.next_after(local)
            if local is None:
                return None
            due_ms = instant_of(local, self._zone)
            if due_ms > after_ms:
                return due_ms

    def last_between(self, first_ms: int, upto_ms: int, count: int) -> list[int]:
        """Search backwards in windows that double, so that years of downtime cost no more than a day."""
        window_ms = _HOUR_MS
        while True:
            start_ms = max(first_ms, upto_ms - window_ms)
            dues = list(self._walk(start_ms - 1, upto_ms))
            if start_ms == first_ms and dues[:1] != [first_ms]:
                dues.insert(0, first_ms)  # it was logged, and the rules of the zone have changed since
            if len(dues) >= count or start_ms == first_ms:
                return dues[-count:]
            window_ms *= 2

    def _walk(self, after_ms: int, upto_ms: int) -> Iterator[int]:
        due_ms = self.next_after(after_ms)
        while due_ms is not None and due_ms <= upto_ms:
            yield due_ms
            due_ms = self.next_after(due_ms)


def instant_of(local: datetime, zone: tzinfo) -> int:
    """Return the instant of a local time: the first one if it occurs twice, the next valid one if it does not
    exist."""
    offset, later_offset = zone.utcoffset(local), zone.utcoffset(local.replace(fold=1))
    assert offset is not None and later_offset is not None
    at_ms = (local - offset - _LOCAL_EPOCH) // _MILLISECOND
    if later_offset <= offset:  # it exists; if the two differ it occurs twice, and this is the first time
        return at_ms
    # The local time is in a gap, which ends at the transition: the first instant with the later offset.
    low_ms, high_ms = (local - later_offset - _LOCAL_EPOCH) // _MILLISECOND, at_ms
    while high_ms - low_ms > 1:
        middle_ms = (low_ms + high_ms) // 2
        if (_EPOCH + middle_ms * _MILLISECOND).astimezone(zone).utcoffset() == later_offset:
            high_ms = middle_ms
        else:
            low_ms = middle_ms
    return high_ms
