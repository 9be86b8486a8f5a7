"""Schedules: their definition, their commands and the replies of a shard (v0 §22). Frozen, without behaviour.

A schedule is stored with its box. Nothing maps its name to that box: a gateway asks every shard
(`FindSchedule`).
"""

from __future__ import annotations

import msgspec

from streams.protocol.messages.replies import DeleteScheduleReply as DeleteScheduleReply
from streams.protocol.messages.replies import PutScheduleReply as PutScheduleReply
from streams.protocol.messages.replies import RunScheduleReply as RunScheduleReply
from streams.protocol.messages.replies import ScheduleState as ScheduleState

EVERY_MS_MIN = 100


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a schedule. One of `cron` and `every_ms` is set."""

    #: The record as JSON, as in an append.
    record: bytes
    cron: str = ""
    every_ms: int = 0
    time_zone: str = "UTC"
    is_paused: bool = False
    #: Due times after this one do not count; 0 = no end.
    end_ts: int = 0
    catch_up: str = "one"


class PutSchedule(msgspec.Struct, frozen=True):
    box: str
    name: str
    spec: ScheduleSpec
    #: Schedules on other shards, which count for the limit of the server.
    others: int = 0


class FindSchedule(msgspec.Struct, frozen=True):
    """Asks a shard for the schedule of this name, and for the number of its schedules."""

    name: str


class ListSchedules(msgspec.Struct, frozen=True):
    prefix: str = ""
    after: str = ""
    limit: int = 100
    #: Only schedules of this box; empty = all.
    box: str = ""


class DropSchedule(msgspec.Struct, frozen=True):
    box: str
    name: str
    #: Only the schedule that was created then; 0 = any.
    created_ts: int = 0


class RunSchedule(msgspec.Struct, frozen=True):
    box: str
    name: str
    idempotency_key: str | None = None


class FindScheduleReply(msgspec.Struct, frozen=True):
    count: int
    schedule: ScheduleState | None = None


class ScheduleList(msgspec.Struct, frozen=True):
    schedules: list[ScheduleState]
    more: bool


ScheduleCommand = PutSchedule | FindSchedule | ListSchedules | DropSchedule | RunSchedule
ScheduleReply = PutScheduleReply | FindScheduleReply | ScheduleList | DeleteScheduleReply | RunScheduleReply
