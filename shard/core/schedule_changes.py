"""The changes of schedules and the facts of schedules in
snapshots: a part of `changes.py`, which has the rules."""

from __future__ import annotations

import msgspec

from streams.protocol.messages.schedules import ScheduleSpec


class ScheduleSet(msgspec.Struct, frozen=True):
    """The schedule of this name has this definition now. One that exists keeps its counters."""

    generation: int
    schedule: str
    spec: ScheduleSpec
    #: The first due time; 0 = none.
    next_due_ms: int
    #: Where the intervals of `every_ms` begin.
    anchor_ms: int
    at_ms: int


class ScheduleAdvanced(msgspec.Struct, frozen=True):
    """The next due time of a schedule without an append: due times before it do not count. Or, for a box in
    memory, whose appends are not logged: its due times up to `due_ms` have `fired_count` records."""

    generation: int
    schedule: str
    next_due_ms: int
    due_ms: int = 0
    fired_count: int = 0
    at_ms: int = 0


class ScheduleDropped(msgspec.Struct, frozen=True):
    generation: int
    schedule: str


class ScheduleFacts(msgspec.Struct, array_like=True, gc=False):
    schedule: str
    spec: ScheduleSpec
    created_ms: int
    anchor_ms: int
    next_due_ms: int
    last_due_ms: int
    fired_total: int
