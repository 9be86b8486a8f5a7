"""Goal: a cron expression is due exactly when it says, across daylight saving (v0 §22).

Method: cases by hand, each error of the grammar, and random expressions against a search minute by minute.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.core.schedules.cron import CRON_CHARS_MAX, parse_cron
from shard.core.schedules.due_times import CronTimes, IntervalTimes
from shard.engine.time_zones import find_zone
from tests.support.machines import sampled

NEW_YORK = ZoneInfo("America/New_York")


def ms(text: str, zone: ZoneInfo | None = None) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=zone or UTC).timestamp() * 1000)


def dues(cron: str, after: str, count: int, zone: ZoneInfo | None = None) -> list[str]:
    """The next due times, as local times with their offsets."""
    times, at = CronTimes(parse_cron(cron), zone or UTC), ms(after, zone)
    found = []
    for _ in range(count):
        due = times.next_after(at)
        assert due is not None
        found.append(datetime.fromtimestamp(due / 1000, zone or UTC).strftime("%m-%d %H:%M%z"))
        at = due
    return found


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("*/20 9-10 * * *", ["11-18 09:00+0000", "11-18 09:20+0000", "11-18 09:40+0000", "11-18 10:00+0000"]),
        ("0 9 * * mon-fri", ["11-18 09:00+0000", "11-19 09:00+0000", "11-20 09:00+0000", "11-23 09:00+0000"]),
        ("5,50/5 0 * * *", ["11-18 00:05+0000", "11-18 00:50+0000", "11-18 00:55+0000", "11-19 00:05+0000"]),
        ("0 0 1 JAN,jul *", ["01-01 00:00+0000", "07-01 00:00+0000", "01-01 00:00+0000", "07-01 00:00+0000"]),
        ("0 0 13 * fri", ["11-20 00:00+0000", "11-27 00:00+0000", "12-04 00:00+0000", "12-11 00:00+0000"]),
        ("0 0 */2 * 1", ["11-23 00:00+0000", "12-07 00:00+0000", "12-21 00:00+0000", "01-11 00:00+0000"]),
        ("0 0 * * 7", ["11-22 00:00+0000", "11-29 00:00+0000", "12-06 00:00+0000", "12-13 00:00+0000"]),
        ("@hourly", ["11-18 00:00+0000", "11-18 01:00+0000", "11-18 02:00+0000", "11-18 03:00+0000"]),
        ("@daily", ["11-18 00:00+0000", "11-19 00:00+0000", "11-20 00:00+0000", "11-21 00:00+0000"]),
        ("@weekly", ["11-22 00:00+0000", "11-29 00:00+0000", "12-06 00:00+0000", "12-13 00:00+0000"]),
        ("@MONTHLY", ["12-01 00:00+0000", "01-01 00:00+0000", "02-01 00:00+0000", "03-01 00:00+0000"]),
        ("0 0 29 2 *", ["02-29 00:00+0000"] * 4),
    ],
)
def test_an_expression_is_due_when_it_says(cron: str, expected: list[str]) -> None:
    assert dues(cron, "2026-11-17 23:59:30", 4) == expected


def test_a_local_time_that_does_not_exist_is_due_at_the_next_instant_that_does() -> None:
    assert dues("30 2 * * *", "2026-03-07 12:00", 2, NEW_YORK) == ["03-08 03:00-0400", "03-09 02:30-0400"]
    expected = ["03-08 01:40-0500", "03-08 03:00-0400", "03-08 03:20-0400"]
    assert dues("*/20 * * * *", "2026-03-08 01:30", 3, NEW_YORK) == expected  # six local times, one instant
    apia = ZoneInfo("Pacific/Apia")  # which has left a whole day out
    assert dues("0 12 30 12 *", "2011-12-29 12:00", 1, apia) == ["12-31 00:00+1400"]


def test_a_local_time_that_occurs_twice_is_due_once() -> None:
    assert dues("30 1 * * *", "2026-10-31 12:00", 2, NEW_YORK) == ["11-01 01:30-0400", "11-02 01:30-0500"]
    expected = ["11-01 01:00-0400", "11-01 01:30-0400", "11-01 02:00-0500"]
    assert dues("*/30 * * * *", "2026-11-01 00:30", 3, NEW_YORK) == expected
    second_pass = ms("2026-11-01 01:00", NEW_YORK) + 3_600_000 + 60_000
    assert CronTimes(parse_cron("*/30 * * * *"), NEW_YORK).next_after(second_pass) == ms(
        "2026-11-01 02:00", NEW_YORK
    )


def test_a_date_that_never_comes_is_found_out() -> None:
    assert CronTimes(parse_cron("0 0 30 2 *"), UTC).next_after(0) is None
    assert CronTimes(parse_cron("0 0 31 4,6 *"), UTC).last_between(5, 10, 3) == [5]


@pytest.mark.parametrize(
    ("cron", "complaint"),
    [
        ("* * * *", "has 4 fields"),
        ("@yearly", "has 1 fields"),
        ("60 * * * *", "minute: '60' is not a number from 0 to 59"),
        ("* * 0 * *", "day of month: '0' is not a number from 1 to 31"),
        ("* * * foo *", "month: 'foo' is not a number from 1 to 12 or a name such as 'jan'"),
        ("* * * * 8", "day of week: '8'"),
        ("5-1 * * * *", "minute: '5-1' is a range that ends before it begins"),
        ("*/0 * * * *", "has no valid step"),
        ("*/x * * * *", "has no valid step"),
        ("-1 * * * *", "is not a number"),
        ("1,,2 * * * *", "is not a number"),
        ("\u0661 * * * *", "is not a number"),
        ("*" * (CRON_CHARS_MAX + 1), "characters"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_field_and_the_value(cron: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", "\\(")):
        parse_cron(cron)


def test_intervals_begin_at_their_anchor() -> None:
    times = IntervalTimes(1_000, 250)
    assert [times.next_after(at) for at in (0, 1_000, 1_249, 1_250)] == [1_250, 1_250, 1_250, 1_500]
    assert times.last_between(1_250, 2_100, 2) == [1_750, 2_000]
    assert times.last_between(1_250, 2_100, 9) == [1_250, 1_500, 1_750, 2_000]


_FIELDS = [
    st.sampled_from(["*", "*/7", "0", "13,30-40/3", "59", "5/20"]),
    st.sampled_from(["*", "2", "1-3", "*/5", "23"]),
    st.sampled_from(["*", "1", "8", "*/9", "29-31"]),
    st.sampled_from(["*", "3", "nov", "*/4"]),
    st.sampled_from(["*", "0", "sun", "mon-fri", "3,7"]),
]


@given(
    st.tuples(*_FIELDS),
    st.sampled_from(["America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]),
    st.integers(ms("2026-03-07 00:00"), ms("2026-03-09 00:00"))
    | st.integers(ms("2026-10-24 00:00"), ms("2026-11-02 00:00")),
)
@sampled(40)
def test_due_times_are_those_of_a_search_minute_by_minute(
    fields: tuple[str, ...], zone_name: str, after_ms: int
) -> None:
    zone = ZoneInfo(zone_name)
    cron = parse_cron(" ".join(fields))
    times = CronTimes(cron, zone)
    upto_ms = after_ms + 6 * 3_600_000
    local = datetime.fromtimestamp(after_ms / 1000, zone).replace(tzinfo=None) - timedelta(hours=4)
    minute = local.replace(second=0, microsecond=0)
    naive: set[int] = set()
    for _ in range(15 * 60):
        if cron.next_after(minute - timedelta(minutes=1)) == minute:
            own = minute.replace(tzinfo=zone)
            instant = own.astimezone(UTC)
            if instant.astimezone(zone).replace(tzinfo=None) != minute:  # a gap: walk to its end
                instant = minute.replace(tzinfo=zone, fold=1).astimezone(UTC)
                before = instant.astimezone(zone).utcoffset()
                while instant.astimezone(zone).utcoffset() == before:
                    instant += timedelta(minutes=1)
                instant = instant.replace(second=0)
            due = round(instant.timestamp() * 1000)
            if after_ms < due <= upto_ms:
                naive.add(due)
        minute += timedelta(minutes=1)
    found = []
    at = times.next_after(after_ms)
    while at is not None and at <= upto_ms:
        found.append(at)
        at = times.next_after(at)
    assert found == sorted(naive)
    if found:
        assert times.last_between(found[0], upto_ms, 3) == found[-3:]


def test_zones_are_found_by_their_iana_names_and_paths_are_not_zones() -> None:
    assert find_zone("Europe/Berlin") is not None and find_zone("UTC") is not None
    for name in ("", "Europe", "Mars/Base", "../../etc/passwd", "/etc/passwd", "a\0b", "posixrules/../UTC"):
        assert find_zone(name) is None, name
