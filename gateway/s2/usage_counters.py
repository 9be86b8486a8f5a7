"""What was done over `/v1`, counted by basin and operation, a minute at a time (s2 §17). Pure: time is an
argument, and `usage_history.py` keeps what is counted here.

    did, appended, read ─► the minute under way ─► `turn` ─► waiting ─► kept in the box, then `settle`

Bounds: `BASINS_MAX` basins a minute, and all others together as `OTHERS`; `MINUTES_MAX` minutes that wait to
be kept, and the oldest is given up for a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

#: Length of an interval in seconds, by its name.
INTERVALS_S: Final = {"minute": 60, "hour": 3600, "day": 24 * 3600}
_MINUTE_S: Final = INTERVALS_S["minute"]

#: In place of a basin. Names of basins have 8 characters at least.
ACCOUNT, OTHERS = "account", "others"
#: Counted beside operations.
APPEND_BYTES, READ_BYTES = "append-bytes", "read-bytes"

#: Some 100 bytes each, so a full minute is 25 KB.
BASINS_MAX = 256
#: An hour in which the box of the history cannot be written to.
MINUTES_MAX = 60

#: A terabyte in a minute. The sum of all that the box has room for is a number that JSON can hold.
_Count = Annotated[int, Meta(ge=0, le=2**40)]

#: Basin -> what was counted -> how often, or how many bytes.
Rows = dict[str, dict[str, int]]


class Minute(msgspec.Struct, frozen=True):
    #: No two of one process have the same, whatever the clock does.
    number: int
    at_s: int
    rows: Rows


class Entry(msgspec.Struct, frozen=True):
    """What the history has of one basin and one minute: the `data` of a record."""

    #: Where the minute begins, in seconds since 1970.
    minute: int
    #: The process that counted, and which of its minutes it is.
    writer: str
    number: int
    counts: dict[str, _Count]


class UsageCounters:
    """Counts. One addition a request or batch, never one a record."""

    def __init__(self, now_s: int, basins_max: int = BASINS_MAX, minutes_max: int = MINUTES_MAX) -> None:
        self._basins_max = self._basins_left = basins_max
        self._minutes_max = minutes_max
        self._number = 0
        self._at_s = _minute_of(now_s)
        self._rows: Rows = {}
        #: Minutes that are over and not kept yet, oldest first.
        self.unsaved_minutes: deque[Minute] = deque()
        #: Minutes that were given up.
        self.minutes_lost = 0

    def __repr__(self) -> str:
        minutes = f"{len(self.unsaved_minutes)} unsaved minutes, {self.minutes_lost} lost"
        return f"<UsageCounters {len(self._rows)} basins, {minutes}>"

    # -- counting

    def count_operation(self, operation: str, basin: str) -> None:
        row = self._row(basin)
        row[operation] = row.get(operation, 0) + 1

    def count_append(self, basin: str, size: int) -> None:
        self._count_batch(basin, "append", APPEND_BYTES, size)

    def read(self, basin: str, size: int) -> None:
        self._count_batch(basin, "read", READ_BYTES, size)

    def _count_batch(self, basin: str, operation: str, bytes_name: str, size: int) -> None:
        row = self._row(basin)
        row[operation] = row.get(operation, 0) + 1
        row[bytes_name] = row.get(bytes_name, 0) + size

    def _row(self, basin: str) -> dict[str, int]:
        row = self._rows.get(basin)
        if row is None:
            if basin != ACCOUNT:  # which has room whatever the basins take
                if self._basins_left:
                    self._basins_left -= 1
                else:
                    basin = OTHERS
            row = self._rows.setdefault(basin, {})
        return row

    # -- minutes

    def roll_over(self, now_s: int) -> None:
        """Ends the minute under way if it is another one by now."""
        at_s = _minute_of(now_s)
        if at_s != self._at_s:
            self.end()
            self._at_s = at_s

    def end(self) -> None:
        """Ends the minute under way, over or not. One in which nothing was done leaves nothing."""
        if not self._rows:
            return
        if len(self.unsaved_minutes) >= self._minutes_max:
            self.unsaved_minutes.popleft()
            self.minutes_lost += 1
        self.unsaved_minutes.append(Minute(self._number, self._at_s, self._rows))
        self._number += 1
        self._rows = {}
        self._basins_left = self._basins_max

    def mark_saved(self, minute: Minute) -> None:
        """It is kept; it may have been given up meanwhile."""
        if minute in self.unsaved_minutes:
            self.unsaved_minutes.remove(minute)

    def snapshot_unsaved(self) -> list[Minute]:
        """What the history does not have, as it is now."""
        rows = {basin: dict(row) for basin, row in self._rows.items()}
        return [*self.unsaved_minutes, Minute(self._number, self._at_s, rows)]


class Sums:
    """Counts of a range of time, by interval."""

    def __init__(self, names: Iterable[str], start_s: int, end_s: int, interval_s: int) -> None:
        #: The minutes that the range touches, both of these among them.
        self.first_s, self.last_s = _minute_of(start_s), _minute_of(end_s)
        self._interval_s = interval_s
        #: What was counted -> where an interval begins -> the sum.
        self._points: dict[str, dict[int, int]] = {name: {} for name in names}

    def add(self, at_s: int, counts: dict[str, int]) -> None:
        if self.first_s <= at_s <= self.last_s:
            begins_s = at_s - at_s % self._interval_s
            for name, points in self._points.items():
                if name in counts:
                    points[begins_s] = points.get(begins_s, 0) + counts[name]

    def points(self, name: str) -> list[tuple[int, int]]:
        """In order of time. An interval without any is left out."""
        return sorted(self._points[name].items())


def _minute_of(now_s: int) -> int:
    return now_s - now_s % _MINUTE_S
