"""Bytes to commands of schedules (v0 §22). `requests.py` calls it.

A gateway puts the name of the schedule into the query. It reads the box out of a PUT's body, and passes the
body on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import schedules
from streams.protocol.messages.bodies import ScheduleBody
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT
from streams.protocol.messages.query import Query
from streams.protocol.messages.schedules import EVERY_MS_MIN, ScheduleCommand, ScheduleSpec
from streams.protocol.model.names import check_box_name, check_schedule_name
from streams.protocol.payloads.appends import (
    RecordLimits,
    check_idempotency_key,
    decode_json,
    parse_append,
)


class _RawBody(ScheduleBody, forbid_unknown_fields=True, kw_only=True):
    """A `ScheduleBody` whose record stays the bytes that came."""

    record: Raw  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_RawBody).decode


def box_of(body: bytes) -> str:
    """Return the box that a PUT names, after a check of all other fields but the record."""
    return _decode_body(body).box


def _decode_body(body: bytes) -> _RawBody:
    request: _RawBody = decode_json(_decode, body or b"{}")
    check_box_name(request.box)
    if (request.cron is None) == (request.every_ms is None):
        raise InvalidRequest("cron, every_ms: give exactly one of them", field="cron")
    if request.every_ms is not None and request.every_ms < EVERY_MS_MIN:
        raise InvalidRequest(
            f"every_ms: {request.every_ms} is too short; at least {EVERY_MS_MIN} is allowed", field="every_ms"
        )
    if request.cron == "":
        raise InvalidRequest("cron: is empty; write five fields, such as 0 9 * * mon-fri", field="cron")
    return request


def _put(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> ScheduleCommand:
    query = Query(head.query)
    name = check_schedule_name(query.text("schedule") or "")
    others = query.number("others") or 0
    query.reject_unknown()
    request = _decode_body(body)
    record = bytes(request.record)
    try:
        parse_append(b'{"records":[%b]}' % record, limits)
    except InvalidRequest as error:
        message = error.message.replace("records[0]", "record")
        raise InvalidRequest(message, field=error.detail.get("field", "record").replace("s[0]", "")) from None
    spec = ScheduleSpec(
        record=record,
        cron=request.cron or "",
        every_ms=request.every_ms or 0,
        time_zone=request.time_zone,
        is_paused=request.paused,
        end_ts=request.end_ts or 0,
        catch_up=request.catch_up,
    )
    return schedules.PutSchedule(request.box, name, spec, others)


def _find(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> ScheduleCommand:
    return schedules.FindSchedule(_name_in(Query(head.query)))


def _list(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> ScheduleCommand:
    query = Query(head.query)
    command = schedules.ListSchedules(
        query.text("prefix") or "",
        query.text("after") or "",
        query.number("page_size", low=1) or PAGE_SIZE_DEFAULT,
        query.text("box") or "",
    )
    query.reject_unknown()
    return command


def _drop(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> ScheduleCommand:
    query = Query(head.query)
    created_ts = query.number("created_ts") or 0
    return schedules.DropSchedule(check_box_name(head.box), _name_in(query), created_ts)


def _run(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> ScheduleCommand:
    key = check_idempotency_key(head.idempotency_key) if head.idempotency_key else None
    return schedules.RunSchedule(check_box_name(head.box), _name_in(Query(head.query)), key)


def _name_in(query: Query) -> str:
    name = check_schedule_name(query.text("schedule") or "")
    query.reject_unknown()
    return name


DECODERS: dict[int, Callable[[wire.RequestHead, bytes, RecordLimits], ScheduleCommand]] = {
    wire.OP_PUT_SCHEDULE: _put,
    wire.OP_FIND_SCHEDULE: _find,
    wire.OP_LIST_SCHEDULES: _list,
    wire.OP_DROP_SCHEDULE: _drop,
    wire.OP_RUN_SCHEDULE: _run,
}

REPLIES: tuple[type[Any], ...] = (
    schedules.PutScheduleReply,
    schedules.FindScheduleReply,
    schedules.ScheduleList,
    schedules.DeleteScheduleReply,
    schedules.RunScheduleReply,
)
