"""Schedules: records that the server appends by itself when they are due (v0 §22)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from uuid import uuid4

from streams.protocol.messages import replies
from streams.protocol.model.names import check_schedule_name

if TYPE_CHECKING:
    from streams.client._async.client import AsyncClient

#: Fields of a schedule that its definition does not have.
_PROGRESS = frozenset(
    ("schedule", "created", "created_ts", "next_due", "last_due", "fired_total", "state", "last_error")
)


class AsyncSchedules:
    """The schedules of a server: `client.schedules`.

    await client.schedules.put("report", "jobs", {"kind": "report"}, cron="0 9 * * mon-fri")
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<AsyncSchedules of {self._client!r}>"

    async def put(
        self,
        name: str,
        box: str,
        data: Any,
        *,
        cron: str | None = None,
        every_ms: int | None = None,
        time_zone: str = "UTC",
        catch_up: Literal["one", "all", "none"] = "one",
        paused: bool = False,
        end_ts: int | None = None,
        tag: str | None = None,
        node: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> replies.PutScheduleReply:
        """Append a record with this data to the box whenever the cron expression or the interval is due; give
        one of the two. Changes a schedule that is there."""
        fields = {"data": data, "tag": tag, "node": node, "meta": meta}
        record = {field: value for field, value in fields.items() if field == "data" or value is not None}
        body: dict[str, Any] = {
            "box": box,
            "record": record,
            "time_zone": time_zone,
            "catch_up": catch_up,
            "paused": paused,
        }
        for field, value in (("cron", cron), ("every_ms", every_ms), ("end_ts", end_ts)):
            if value is not None:
                body[field] = value
        return await self._client.call("PUT", _path(name), replies.PutScheduleReply, body)

    async def get(self, name: str) -> replies.GetScheduleReply:
        """Return the definition and progress of a schedule."""
        return await self._client.get(_path(name), replies.GetScheduleReply)

    async def list(self, prefix: str = "", *, box: str = "") -> AsyncIterator[replies.ScheduleState]:
        """All schedules whose name begins so, sorted by name; only those of one box if it is given."""
        params = {"prefix": prefix, "box": box, "page_size": 1000}
        cursor: str | None = ""
        while cursor is not None:
            page = await self._client.get("/v0/schedules", replies.SchedulePage, {**params, "cursor": cursor})
            for schedule in page.schedules:
                yield schedule
            cursor = page.next_cursor

    async def pause(self, name: str) -> replies.PutScheduleReply:
        """Due times do not count until `resume`."""
        return await self._set_paused(name, True)

    async def resume(self, name: str) -> replies.PutScheduleReply:
        """Continue a paused schedule with its next due time."""
        return await self._set_paused(name, False)

    async def _set_paused(self, name: str, paused: bool) -> replies.PutScheduleReply:
        state = await self.get(name)
        fields = {field: getattr(state, field) for field in state.__struct_fields__ if field not in _PROGRESS}
        body = {field: value for field, value in fields.items() if value is not None}
        return await self._client.call(
            "PUT", _path(name), replies.PutScheduleReply, {**body, "paused": paused}
        )

    async def run(self, name: str, *, idempotency_key: str | None = None) -> replies.RunScheduleReply:
        """Append the record now, once, however often the request has to be repeated."""
        headers = {"idempotency-key": idempotency_key or uuid4().hex}
        return await self._client.call(
            "POST", f"{_path(name)}/run", replies.RunScheduleReply, headers=headers
        )

    async def delete(self, name: str) -> bool:
        """Delete a schedule; return True if it existed. Its records stay."""
        return (await self._client.call("DELETE", _path(name), replies.DeleteScheduleReply)).deleted


def _path(name: str) -> str:
    return f"/v0/schedules/{quote(check_schedule_name(name), safe='')}"
