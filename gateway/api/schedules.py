"""Handlers for schedules (v0 §22). A schedule is stored with its box.

Nothing maps a name to its box: a handler asks every shard, which costs each of them one lookup in memory. Two
requests that create the same name for two boxes at the same time can both succeed in their shards. So the
handler of a new schedule looks again: whichever looks last sees both, and removes the one that was created
later (`docs/decisions/0010-a-schedule-lives-in-its-box.md`).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec

from gateway.api.responses import from_reply, from_shard
from gateway.requests.content import check_content_type, control_body
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch, cursor_of, name_of
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, ScheduleNotFound, StreamsError
from streams.protocol.messages import schedule_requests
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.messages.query import Query
from streams.protocol.messages.replies import DeleteScheduleReply, SchedulePage, ScheduleState
from streams.protocol.messages.schedules import FindScheduleReply, ScheduleList
from streams.protocol.model.names import check_box_name, check_schedule_name


class _StateWithRaw(ScheduleState, frozen=True, kw_only=True):
    """A schedule whose record passes through as the bytes that it is."""

    record: msgspec.Raw


class _Find(FindScheduleReply, frozen=True):
    schedule: _StateWithRaw | None = None


class _List(ScheduleList, frozen=True):
    schedules: list[_StateWithRaw]  # type: ignore[assignment]


_decode_find = msgspec.json.Decoder(_Find).decode
_decode_list = msgspec.json.Decoder(_List).decode


class ScheduleApi:
    def __init__(self, dispatch: Dispatch, body_bytes_max: int) -> None:
        self._dispatch = dispatch
        self._body_bytes_max = body_bytes_max

    async def put(self, request: Request, name: str) -> Response:
        _no_query(request)
        check_content_type(request, allow_ndjson=False)
        check_schedule_name(name)
        body = await control_body(request, self._body_bytes_max)
        box = schedule_requests.box_of(body)
        request.require_name(box, "box")
        schedules, counts = await self._find_all(name)
        if schedules and schedules[0].box != box:
            raise _in_use(request, schedules[0], box)
        own = self._dispatch.placement.shard_of(box)
        query = urlencode({"schedule": name, "others": sum(counts) - counts[own]})
        answer = await self._dispatch.to_owner(wire.OP_PUT_SCHEDULE, wire.RequestHead(box, query), body)
        if not schedules:
            winner = await self._settle(name)
            if winner is not None and winner.box != box:
                raise _in_use(request, winner, box)
        return from_shard(request, answer)

    async def _settle(self, name: str) -> _StateWithRaw | None:
        """Keep the schedule of this name that was created first, and remove others. Returns it."""
        schedules, _ = await self._find_all(name)
        for later in schedules[1:]:
            await self._drop(later, created_ts=later.created_ts)
        return schedules[0] if schedules else None

    async def get(self, request: Request, name: str) -> Response:
        _no_query(request)
        return from_reply(request, await self._require(request, name))

    async def delete(self, request: Request, name: str) -> Response:
        _no_query(request)
        schedules, _ = await self._find_all(check_schedule_name(name))
        for schedule in schedules:
            request.require_name(schedule.box, "box")
            await self._drop(schedule)
        return from_reply(request, DeleteScheduleReply(name, bool(schedules)))

    async def run(self, request: Request, name: str) -> Response:
        _no_query(request)
        schedule = await self._require(request, name)
        head = wire.RequestHead(
            schedule.box,
            urlencode({"schedule": name}),
            idempotency_key=request.headers.get("idempotency-key", ""),
        )
        return from_shard(request, await self._dispatch.to_owner(wire.OP_RUN_SCHEDULE, head, b""))

    async def _require(self, request: Request, name: str) -> _StateWithRaw:
        """Return the schedule of this name. A shard that does not answer matters only if no other has it."""
        answers = await self._ask_all(check_schedule_name(name))
        for answer in answers:
            if isinstance(answer, _Find) and answer.schedule is not None:
                request.require_name(answer.schedule.box, "box")
                return answer.schedule
        for answer in answers:
            if isinstance(answer, StreamsError):
                raise answer
        raise ScheduleNotFound(
            f"schedule {name} does not exist; create it with PUT /v0/schedules/{name}", schedule=name
        )

    async def _find_all(self, name: str) -> tuple[list[_StateWithRaw], list[int]]:
        """Return the schedules of this name, the first created first, and how many each shard has."""
        schedules: list[_StateWithRaw] = []
        counts: list[int] = []
        for answer in await self._ask_all(name):
            if isinstance(answer, StreamsError):
                raise answer
            counts.append(answer.count)
            if answer.schedule is not None:
                schedules.append(answer.schedule)
        return sorted(schedules, key=lambda schedule: (schedule.created_ts, schedule.box)), counts

    async def _ask_all(self, name: str) -> list[_Find | StreamsError]:
        head = wire.RequestHead(query=urlencode({"schedule": name}))
        answers = await self._dispatch.to_all(wire.OP_FIND_SCHEDULE, head)
        return [
            answer if isinstance(answer, StreamsError) else _decode_find(answer.body) for answer in answers
        ]

    async def _drop(self, schedule: _StateWithRaw, created_ts: int = 0) -> None:
        query = urlencode({"schedule": schedule.schedule, "created_ts": created_ts})
        await self._dispatch.to_owner(wire.OP_DROP_SCHEDULE, wire.RequestHead(schedule.box, query), b"")

    async def list(self, request: Request) -> Response:
        query = Query(request.query)
        box = query.text("box") or ""
        prefix = query.text("prefix") or ""
        size = query.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT
        after = name_of(query.text("cursor"))
        query.reject_unknown()
        if box:
            request.require_name(check_box_name(box), "box")
        grant = request.grant
        schedules: list[Any] = []
        more = False
        for visible in (prefix,) if grant is None else grant.within(prefix):
            each = urlencode({"prefix": visible, "after": after, "page_size": size, "box": box})
            for answer in await self._dispatch.to_all(wire.OP_LIST_SCHEDULES, wire.RequestHead(query=each)):
                if isinstance(answer, StreamsError):
                    raise answer
                page = _decode_list(answer.body)
                schedules += page.schedules
                more = more or page.more
        schedules.sort(key=lambda schedule: schedule.schedule)
        more = more or len(schedules) > size
        schedules = schedules[:size]
        next_cursor = cursor_of(schedules[-1].schedule) if more else None
        if grant is not None:
            schedules = [schedule for schedule in schedules if grant.covers(schedule.box)]
        return from_reply(request, SchedulePage(schedules, next_cursor))


def _in_use(request: Request, schedule: _StateWithRaw, box: str) -> InvalidRequest:
    request.require_name(schedule.box, "box")
    return InvalidRequest(
        f"box: schedule {schedule.schedule} appends to box {schedule.box}; delete it first, then create it "
        f"for {box}",
        field="box",
    )


def _no_query(request: Request) -> None:
    Query(request.query).reject_unknown()
