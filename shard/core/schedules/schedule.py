"""One schedule: its definition, its progress, and the records of its due times.

`handlers.py` decides when it appends. Its logged state changes only when a change is applied; the state of
retries is volatile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import UTC, tzinfo
from typing import NamedTuple

import msgspec
from msgspec import Raw

from shard.core import changes
from shard.core.schedule_changes import ScheduleFacts
from shard.core.schedules.cron import parse_cron
from shard.core.schedules.due_times import CronTimes, DueTimes, IntervalTimes
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.commands import Append
from streams.protocol.messages.schedules import EVERY_MS_MIN, ScheduleSpec
from streams.protocol.model.names import quote
from streams.protocol.payloads.appends import RecordLimits, parse_append

#: Due times missed during downtime that still count with `catch_up: "all"`.
CATCH_UP_MAX = 1000

#: Due times whose records are appended in one change: a few milliseconds.
FIRE_MAX = 100

#: A due time is missed if it is later than this, or if the server did not run then. More than the pauses of
#: a busy server.
ON_TIME_MS = 10_000

#: More due times than can be on time, at the shortest interval.
_RECENT_MAX = ON_TIME_MS // EVERY_MS_MIN + 2

#: Pause before the first retry after a refusal, and the longest one.
_RETRY_MS_MIN, _RETRY_MS_MAX = 1_000, 30_000

#: Names of the metadata that a schedule adds.
NAME, DUE = "$schedule", "$due_ts"

#: The record was checked when the schedule was set. Limits that have changed since do not stop it.
_ANY_SIZE = RecordLimits(CATCH_UP_MAX, 1 << 62, 1 << 62, 1 << 62, 1 << 62, 1 << 62)

#: Returns the time zone of an IANA name, or None if it is not known.
ZoneFinder = Callable[[str], tzinfo | None]

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.encode


def find_utc(name: str) -> tzinfo | None:
    """A `ZoneFinder` that knows no other zone."""
    return UTC if name == "UTC" else None


class DuePlan(NamedTuple):
    """The due times whose records are to be appended now, and the one after them; 0 = none."""

    due_ms: Sequence[int]
    next_due_ms: int


class Schedule:
    __slots__ = (
        "anchor_ms",
        "created_ms",
        "failures",
        "fired_total",
        "last_due_ms",
        "last_error",
        "lsn",
        "name",
        "next_due_ms",
        "retry_at_ms",
        "spec",
    )

    def __init__(self, facts: ScheduleFacts) -> None:
        self.name = facts.schedule
        self.spec = facts.spec
        self.created_ms = facts.created_ms
        self.anchor_ms = facts.anchor_ms
        #: 0 = nothing is due any more.
        self.next_due_ms = facts.next_due_ms
        self.last_due_ms = facts.last_due_ms
        self.fired_total = facts.fired_total
        #: The last change of this schedule.
        self.lsn = 0
        # Volatile: refusals of the box since its last record, and when to try again.
        self.failures = 0
        self.retry_at_ms = 0
        self.last_error = ""

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.fired_total} records, next due {self.next_due_ms}>"

    @property
    def state(self) -> str:
        if self.spec.is_paused:
            return "paused"
        if not self.next_due_ms:
            return "ended"
        return "blocked" if self.failures else "active"

    @property
    def due_ms(self) -> int:
        """When the schedule must be looked at, on the system clock; 0 = never."""
        return (
            0 if self.spec.is_paused else max(self.next_due_ms, self.retry_at_ms) if self.next_due_ms else 0
        )

    def facts(self) -> ScheduleFacts:
        return ScheduleFacts(
            self.name,
            self.spec,
            self.created_ms,
            self.anchor_ms,
            self.next_due_ms,
            self.last_due_ms,
            self.fired_total,
        )

    # -- deciding

    def plan(self, now_ms: int, started_ms: int, find_zone: ZoneFinder) -> DuePlan:
        """Return the due times that count now, the oldest first. `started_ms`: the start of this process.

        Due times that are on time all count. Of those that were missed, `catch_up` decides. While the box
        refuses records, `none` keeps the last one: it was tried on time."""
        spec = self.spec
        times = due_times_of(spec, self.anchor_ms, find_zone)
        upto_ms = min(now_ms, spec.end_ts) if spec.end_ts else now_ms
        dues = times.last_between(
            self.next_due_ms, upto_ms, CATCH_UP_MAX if spec.catch_up == "all" else _RECENT_MAX
        )
        if spec.catch_up != "all":
            at = bisect_left(dues, max(started_ms, now_ms - ON_TIME_MS))
            keeps_last = spec.catch_up == "one" or self.failures > 0
            dues = dues[max(0, at - 1) if keeps_last else at :]
        dues = dues[:FIRE_MAX]
        return DuePlan(dues, next_due_of(spec, times, dues[-1] if dues else upto_ms))

    def to_append(self, box: str, dues: Sequence[int], key: str | None = None) -> Append:
        """Return the append of one record for each due time."""
        fields = _decode_fields(self.spec.record)
        meta = fields.get("meta", Raw(b"null"))
        metas = {} if bytes(meta) == b"null" else _decode_fields(meta)
        metas[NAME] = Raw(_encode(self.name))
        texts = []
        for due in dues:
            metas[DUE] = Raw(b"%d" % due)
            fields["meta"] = Raw(_encode(metas))
            texts.append(_encode(fields))
        columns = parse_append(b'{"records":[%b]}' % b",".join(texts), _ANY_SIZE).columns
        return Append(box=box, columns=columns, idempotency_key=key, create=False)

    def note_refusal(self, message: str, now_ms: int) -> None:
        """The box has refused a record: try again later."""
        self.retry_at_ms = now_ms + min(_RETRY_MS_MIN << min(self.failures, 10), _RETRY_MS_MAX)
        self.failures += 1
        self.last_error = message

    # -- applying

    def apply_set(self, change: changes.ScheduleSet, lsn: int) -> None:
        self.spec = change.spec
        self.anchor_ms = change.anchor_ms
        self.next_due_ms = change.next_due_ms
        self._note_change(lsn)

    def apply_progress(self, due_ms: int, next_due_ms: int, fired_count: int, lsn: int) -> None:
        self.last_due_ms = max(self.last_due_ms, due_ms)
        self.next_due_ms = next_due_ms
        self.fired_total += fired_count
        self._note_change(lsn)

    def _note_change(self, lsn: int) -> None:
        self.lsn = max(self.lsn, lsn)
        self.failures = self.retry_at_ms = 0
        self.last_error = ""


def due_times_of(spec: ScheduleSpec, anchor_ms: int, find_zone: ZoneFinder) -> DueTimes:
    """Return the due times of a definition. Raises `InvalidRequest` if it has an error."""
    if spec.every_ms:
        return IntervalTimes(anchor_ms, spec.every_ms)
    try:
        cron = parse_cron(spec.cron)
    except ValueError as error:
        raise InvalidRequest(f"cron: {quote(spec.cron)}: {error}", field="cron") from None
    zone = find_zone(spec.time_zone)
    if zone is None:
        raise InvalidRequest(
            f"time_zone: {quote(spec.time_zone)} is not the name of a time zone, as Europe/Berlin or UTC are",
            field="time_zone",
        )
    return CronTimes(cron, zone)


def next_due_of(spec: ScheduleSpec, times: DueTimes, after_ms: int) -> int:
    """Return the first due time after this instant; 0 if there is none before the end of the schedule."""
    due_ms = times.next_after(after_ms)
    return 0 if due_ms is None or (spec.end_ts and due_ms > spec.end_ts) else due_ms


#: The schedules of a box that has none: shared, because most boxes have none.
NO_SCHEDULES: dict[str, Schedule] = {}
