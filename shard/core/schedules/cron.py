"""Parses cron expressions and finds the next local time that matches. Pure; knows no time zone.

Five fields: minute, hour, day of month, month, day of week. A field is `*`, a number, a name (`jan`, `mon`),
a range `a-b`, any of them with a step `/n`, or a list of these. `a/n` means from `a` to the end. Sunday is 0
or 7. As in Vixie cron, a day matches if either of the two day fields matches, unless one of them begins with
`*`: then both must.

Bounds: a search ends after `_YEARS_MAX` years, about 3,300 steps. 29 February is at most eight years away.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta
from typing import NamedTuple

_SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_YEARS_MAX = 9

#: Longer expressions are rejected: every list that makes sense is shorter.
CRON_CHARS_MAX = 256

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class _Field(NamedTuple):
    title: str
    low: int
    high: int
    names: dict[str, int]


_FIELDS = (
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of month", 1, 31, {}),
    _Field("month", 1, 12, {name: at for at, name in enumerate(_MONTHS, 1)}),
    _Field("day of week", 0, 7, {name: at for at, name in enumerate(_WEEKDAYS)}),
)


class Cron(NamedTuple):
    """A parsed expression: the values of each field, sorted."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    #: 0 is Sunday.
    weekdays: frozenset[int]
    #: True if a day must match both day fields, because one of them begins with `*`.
    needs_both_days: bool

    def next_after(self, local: datetime) -> datetime | None:
        """Return the first matching minute after a local time without zone; None if there is none."""
        at = local.replace(second=0, microsecond=0) + _MINUTE
        last_year = min(at.year + _YEARS_MAX, 9998)
        while at.year <= last_year:
            if at.month not in self.months:
                at = (at.replace(day=1, hour=0, minute=0) + 31 * _DAY).replace(day=1)
                continue
            hour = _next_of(self.hours, at.hour) if self._matches_day(at) else None
            if hour is None:
                at = at.replace(hour=0, minute=0) + _DAY
                continue
            if hour > at.hour:
                return at.replace(hour=hour, minute=self.minutes[0])
            minute = _next_of(self.minutes, at.minute)
            if minute is not None:
                return at.replace(minute=minute)
            at = at.replace(minute=0) + _HOUR
        return None

    def _matches_day(self, at: datetime) -> bool:
        in_month, in_week = at.day in self.days, at.isoweekday() % 7 in self.weekdays
        return in_month and in_week if self.needs_both_days else in_month or in_week


def parse_cron(text: str) -> Cron:
    """Parse an expression. Raises `ValueError` with the field and the value that is wrong."""
    if len(text) > CRON_CHARS_MAX:
        raise ValueError(f"has {len(text)} characters, at most {CRON_CHARS_MAX} are allowed")
    fields = _SHORTHANDS.get(text.strip().lower(), text).split()
    if len(fields) != len(_FIELDS):
        raise ValueError(
            f"has {len(fields)} fields; give five (minute, hour, day of month, month, day of week) or one of "
            f"{', '.join(_SHORTHANDS)}"
        )
    values = [_parse_field(text, field) for text, field in zip(fields, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = values
    return Cron(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(weekday % 7 for weekday in weekdays),
        fields[2].startswith("*") or fields[4].startswith("*"),
    )


def _parse_field(text: str, field: _Field) -> set[int]:
    values: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = 1
        if slash:
            step = _number(step_text) or 0
            if not 1 <= step <= field.high:
                raise ValueError(f"{field.title}: {part!r} has no valid step; write */n with n from 1 on")
        if span == "*":
            low, high = field.low, field.high
        else:
            first, dash, last = span.partition("-")
            low = high = _value(first, part, field)
            if dash:
                high = _value(last, part, field)
            elif slash:
                high = field.high
        if low > high:
            raise ValueError(f"{field.title}: {part!r} is a range that ends before it begins")
        values.update(range(low, high + 1, step))
    return values


def _value(text: str, part: str, field: _Field) -> int:
    number = field.names.get(text.lower(), _number(text))
    if number is None or not field.low <= number <= field.high:
        names = f" or a name such as {next(iter(field.names))!r}" if field.names else ""
        raise ValueError(f"{field.title}: {part!r} is not a number from {field.low} to {field.high}{names}")
    return number


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else None


def _next_of(values: tuple[int, ...], low: int) -> int | None:
    at = bisect_left(values, low)
    return values[at] if at < len(values) else None
