"""Handlers for metrics and status (v0 §13)."""

from __future__ import annotations

from typing import Any

import trio

from gateway.access.auth import Guard
from gateway.access.key_use import KeyUseExchange
from gateway.api.responses import from_facts, from_reply
from gateway.requests.request import NO_STORE, Request, Response
from gateway.telemetry.collector import Collector
from gateway.telemetry.exposition import as_facts, as_text
from gateway.telemetry.history import SECONDS_MAX, Histories
from gateway.telemetry.server_reports import Reports
from gateway.telemetry.status import status_of
from streams.protocol.access.grants import ADMIN
from streams.protocol.errors import InvalidRequest, NotAcceptable
from streams.protocol.messages.query import Query
from streams.protocol.messages.server_replies import History
from streams.protocol.model.names import quote

_TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class ReportPages:
    def __init__(
        self,
        collector: Collector,
        key_use: KeyUseExchange,
        guard: Guard | None = None,
        histories: Histories | None = None,
    ) -> None:
        self._collector = collector
        self._key_use = key_use
        self._guard = guard
        self._histories = histories

    async def metrics(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        is_json = wants_json(request.headers.get("accept", "*/*"))
        reports = await self._collector.gather()
        # Formatting a thousand boxes takes ten milliseconds: do it outside the event loop.
        if is_json:
            facts = await trio.to_thread.run_sync(as_facts, reports)
            return from_facts(request, {"metrics": facts})
        text = await trio.to_thread.run_sync(as_text, reports)
        response = Response(200, text, content_type=_TEXT_TYPE)
        response.headers.append(NO_STORE)
        return response

    async def status(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        shows_detail = request.grant is None or bool(request.grant.scopes & ADMIN)
        reports = await self._collector.gather()
        keys = await self._keys(reports) if shows_detail else []
        return from_facts(request, {**status_of(reports, shows_detail=shows_detail), "keys": keys})

    async def history(self, request: Request) -> Response:
        """Return time series of the last minutes (`GET /v0/history`)."""
        query = Query(request.query)
        seconds = query.number("seconds", low=1, high=SECONDS_MAX) or SECONDS_MAX
        series = query.text("series")
        query.reject_unknown()
        assert self._histories is not None, "a gateway with reports has a history"
        all_names = set(self._histories.names)
        names = set(filter(None, (series or "").split(","))) or all_names
        unknown = sorted(names - all_names)
        if unknown:
            raise InvalidRequest(
                f"series: {quote(unknown[0])} is not a series; without `series` the answer has all of them",
                field="series",
            )
        history = await self._histories.read(names, seconds)
        return from_reply(request, History((history.end_s - seconds + 1) * 1000, 1000, history.series))

    async def _keys(self, reports: Reports) -> list[dict[str, Any]]:
        """Describe all keys with their limits and usage, without secrets."""
        if self._guard is None:
            return []
        use = [shard.key_use for shard in reports.shards]
        sessions = [gateway.s2_sessions for gateway in reports.gateways]
        return await trio.to_thread.run_sync(self._key_use.describe_all, self._guard.ring, use, sessions)


def wants_json(accept: str) -> bool:
    """Return True if the client prefers JSON to text. Prometheus reads text, and `*/*` gets text."""
    text = _weight(accept, ("text/plain", "text/*", "*/*"))
    json = _weight(accept, ("application/json", "application/*", "*/*"))
    if not text and not json:
        raise NotAcceptable("accept: metrics are available as text/plain or application/json", field="accept")
    return json > text


def _weight(accept: str, names: tuple[str, ...]) -> float:
    """Return the q-value of the first of `names` that the header has; 0 if it has none.

    `names` are ordered from the most specific type to `*/*`.
    """
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        weights[kind] = max(weight, weights.get(kind, 0.0))
    return next((weights[name] for name in names if name in weights), 0.0)
