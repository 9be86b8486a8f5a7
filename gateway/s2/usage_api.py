"""Handlers for metrics of the account, a basin or a stream (s2 §17).

Operations and throughput come from the usage history. Basins and stored bytes are known only for the present:
a range that does not include now has no points for them. Nothing is billed.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.requests.request import Request, Response
from gateway.requests.s2_errors import S2Error
from gateway.s2 import fields
from gateway.s2.control import json_response
from gateway.s2.permits import OPERATIONS, Permit
from gateway.s2.shard_calls import ShardCalls
from gateway.s2.usage_counters import ACCOUNT, APPEND_BYTES, INTERVALS_S, READ_BYTES, Sums
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import box_of

_ACCOUNT = ("active-basins", "account-ops", "estimated-billable-usage")
_BASIN = ("storage", "append-ops", "read-ops", "read-throughput", "append-throughput", "basin-ops")
_STREAM = ("storage",)


def _operations_in_group(group: str) -> tuple[str, ...]:
    return tuple(operation for operation, facts in OPERATIONS.items() if facts[0] == group)


class _CounterSet(msgspec.Struct, frozen=True):
    """A metric set that is computed from the history."""

    #: Series name -> counter name.
    series: dict[str, str]
    unit: str
    #: The default interval.
    interval: str


def _operations(*operations: str, interval: str) -> _CounterSet:
    return _CounterSet({operation: operation for operation in operations}, "operations", interval)


_HISTORY = {
    "account-ops": _operations(*_operations_in_group("account"), interval="hour"),
    "basin-ops": _operations(*_operations_in_group("basin"), "stream-metrics", interval="hour"),
    "append-ops": _operations("append", interval="minute"),
    "read-ops": _operations("read", "check-tail", interval="minute"),
    "append-throughput": _CounterSet({"append-throughput": APPEND_BYTES}, "bytes", "minute"),
    "read-throughput": _CounterSet({"read-throughput": READ_BYTES}, "bytes", "minute"),
}
#: The only intervals of the storage metrics.
_BASIN_STORAGE_INTERVAL, _STREAM_STORAGE_INTERVAL = "hour", "minute"
#: A range may end a little in the future, because clocks differ, and is at most a month long.
_AHEAD_S, _RANGE_S_MAX = 300, 31 * 24 * 3600


class _MetricsQuery:
    def __init__(self, query: str, set_names: tuple[str, ...], now_s: int) -> None:
        parameters = fields.QueryParameters(query)
        self.set = parameters.text("set") or ""
        if self.set not in set_names:
            raise S2Error("bad_query", f"set: must be one of {', '.join(set_names)}")
        self.interval = parameters.text("interval")
        if self.interval is not None and self.interval not in INTERVALS_S:
            raise S2Error("bad_query", f"interval: must be one of {', '.join(INTERVALS_S)}")
        start, end = parameters.number("start", fields.U32_MAX), parameters.number("end", fields.U32_MAX)
        if start is None or end is None:
            raise S2Error("invalid", "start, end: both are required, in seconds")
        if start > end or end > now_s + _AHEAD_S or end - start > _RANGE_S_MAX:
            raise S2Error(
                "invalid",
                f"start, end: must be in order, not in the future, and at most {_RANGE_S_MAX} s apart",
            )
        self.start_s, self.end_s = start, end
        self.includes_now = start <= now_s <= end

    def check_interval(self, only: str) -> None:
        if self.interval not in (None, only):
            raise S2Error("invalid", f"interval: must be {only} for this set")


class UsageApi:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    async def account(self, request: Request, permit: Permit) -> Response:
        query = _MetricsQuery(request.query, _ACCOUNT, int(time.time()))
        permit.check("account-metrics")
        if query.set == "estimated-billable-usage":
            return json_response({"values": []})
        if query.set in _HISTORY:
            if not permit.sees_every_basin:
                raise S2Error(
                    "permission_denied", f"{query.set} covers all basins, and the access token does not"
                )
            return await self._sum_counters(query, ACCOUNT)
        names: list[str] = []
        after, more = "", query.includes_now
        while more:
            page = await self._calls.call_register(s2.ListBasins("", after), s2.BasinPage)
            names += [basin.name for basin in page.basins if not basin.deleted_ms]
            after, more = page.basins[-1].name if page.basins else "", page.more
        visible_names = [name for name in names if permit.sees_basin(name)]
        return json_response({"values": [{"label": {"name": "active-basins", "values": visible_names}}]})

    async def basin(self, request: Request, permit: Permit, basin: str) -> Response:
        fields.basin_name(basin, "bad_path")
        now_s = int(time.time())
        query = _MetricsQuery(request.query, _BASIN, now_s)
        permit.check("basin-metrics", basin)
        await self._calls.basin(basin)
        if query.set in _HISTORY:
            return await self._sum_counters(query, basin)
        query.check_interval(_BASIN_STORAGE_INTERVAL)
        size = 0
        for shard in range(self._calls.shards) if query.includes_now else ():
            after = ""
            while True:
                command = s2.GetUsage(box_of(basin, ""), after)
                usage = await self._calls.call_shard(shard, command, s2.StreamUsage)
                size += usage.bytes
                after = usage.after
                if not after:
                    break
        return _storage(query, now_s, size)

    async def stream(self, request: Request, permit: Permit, basin: str, stream: str) -> Response:
        fields.basin_name(basin, "bad_path")
        stream = fields.stream_name(permit.prefix + stream if stream else "", "bad_path")
        now_s = int(time.time())
        query = _MetricsQuery(request.query, _STREAM, now_s)
        permit.check("stream-metrics", basin, stream)
        query.check_interval(_STREAM_STORAGE_INTERVAL)
        box = box_of(basin, stream)
        await self._calls.call_owner(box, s2.GetStream(box), s2.GetStreamReply)
        usage = await self._calls.call_owner(box, s2.GetUsage(box, "", True), s2.StreamUsage)
        return _storage(query, now_s, usage.bytes)

    async def _sum_counters(self, query: _MetricsQuery, basin: str) -> Response:
        counters = _HISTORY[query.set]
        interval = query.interval or counters.interval
        sums = Sums(counters.series.values(), query.start_s, query.end_s, INTERVALS_S[interval])
        await self._calls.history.add_to(sums, basin)
        values = [
            {"accumulation": {"name": name, "unit": counters.unit, "interval": interval, "values": points}}
            for name, points in ((name, sums.points(what)) for name, what in counters.series.items())
        ]
        return json_response({"values": values})


def _storage(query: _MetricsQuery, now_s: int, size: int) -> Response:
    values: list[Any] = [[now_s, size]] if query.includes_now else []
    return json_response({"values": [{"gauge": {"name": "storage", "unit": "bytes", "values": values}}]})
