"""Counts operations and bytes of `/v1` by basin and minute (s2 §17).

Pure: time is an argument. `usage_history.py` saves the counts in a box.

    count_* ─► current minute ─► `roll_over` ─► unsaved minutes ─► saved in the box, then `mark_saved`

Limits: `BASINS_MAX` basins per minute, the others together as `OTHERS`; `MINUTES_MAX` unsaved minutes, after
which a new one replaces the oldest.
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

#: Row names that are no basins: basin names have at least 8 characters.
ACCOUNT, OTHERS = "account", "others"
#: Counters of bytes, beside those of operations.
APPEND_BYTES, READ_BYTES = "append-bytes", "read-bytes"

#: About 100 bytes per basin: a full minute has 25 KB.
BASINS_MAX = 256
#: Buffers one hour while the history box cannot be written.
MINUTES_MAX = 60

#: At most a terabyte per minute: the sum over a full history box is still exact in JSON.
_Count = Annotated[int, Meta(ge=0, le=2**40)]

#: Basin -> counter name -> count.
Rows = dict[str, dict[str, int]]


class Minute(msgspec.Struct, frozen=True):
    #: Unique within the process, whatever its clock does.
    number: int
    at_s: int
    rows: Rows


class UsageEntry(msgspec.Struct, frozen=True):
    """The counts of one basin in one minute: the `data` of a history record."""

    #: Start of the minute, in seconds since 1970.
    minute: int
    #: The process that counted, and the number of the minute in it.
    writer: str
    number: int
    counts: dict[str, _Count]


class UsageCounters:
    """Counts operations and bytes: one addition per request or batch, never per record."""

    def __init__(self, now_s: int, basins_max: int = BASINS_MAX, minutes_max: int = MINUTES_MAX) -> None:
        self._basins_max = self._basins_left = basins_max
        self._minutes_max = minutes_max
        self._number = 0
        self._at_s = _minute_of(now_s)
        self._rows: Rows = {}
        #: Finished minutes that are not saved yet, oldest first.
        self.unsaved_minutes: deque[Minute] = deque()
        #: Number of minutes that were dropped because the buffer was full.
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

    def count_read(self, basin: str, size: int) -> None:
        self._count_batch(basin, "read", READ_BYTES, size)

    def _count_batch(self, basin: str, operation: str, bytes_name: str, size: int) -> None:
        row = self._row(basin)
        row[operation] = row.get(operation, 0) + 1
        row[bytes_name] = row.get(bytes_name, 0) + size

    def _row(self, basin: str) -> dict[str, int]:
        row = self._rows.get(basin)
        if row is None:
            if basin != ACCOUNT:  # the account row does not count against the limit
                if self._basins_left:
                    self._basins_left -= 1
                else:
                    basin = OTHERS
            row = self._rows.setdefault(basin, {})
        return row

    # -- minutes

    def roll_over(self, now_s: int) -> None:
        """Finish the current minute if the clock is in another one."""
        at_s = _minute_of(now_s)
        if at_s != self._at_s:
            self.end()
            self._at_s = at_s

    def end(self) -> None:
        """Finish the current minute now. A minute without counts is not saved."""
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
        """Remove a saved minute from the buffer, if it has not been dropped meanwhile."""
        if minute in self.unsaved_minutes:
            self.unsaved_minutes.remove(minute)

    def snapshot_unsaved(self) -> list[Minute]:
        """Return a copy of all minutes that are not in the history, the current one last."""
        rows = {basin: dict(row) for basin, row in self._rows.items()}
        return [*self.unsaved_minutes, Minute(self._number, self._at_s, rows)]


class Sums:
    """Sums of counters over a time range, by interval."""

    def __init__(self, names: Iterable[str], start_s: int, end_s: int, interval_s: int) -> None:
        #: The first and the last minute of the range, inclusive.
        self.first_s, self.last_s = _minute_of(start_s), _minute_of(end_s)
        self._interval_s = interval_s
        #: Counter name -> start of the interval -> sum.
        self._points: dict[str, dict[int, int]] = {name: {} for name in names}

    def add(self, at_s: int, counts: dict[str, int]) -> None:
        if self.first_s <= at_s <= self.last_s:
            begins_s = at_s - at_s % self._interval_s
            for name, points in self._points.items():
                if name in counts:
                    points[begins_s] = points.get(begins_s, 0) + counts[name]

    def points(self, name: str) -> list[tuple[int, int]]:
        """Return the sums of one counter in time order. Empty intervals are omitted."""
        return sorted(self._points[name].items())


def _minute_of(now_s: int) -> int:
    return now_s - now_s % _MINUTE_S
