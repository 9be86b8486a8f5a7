"""Metrics and status (v0 §13)."""

from __future__ import annotations

from typing import Any

import trio

from gateway.access.auth import Guard
from gateway.access.key_use import KeyUse
from gateway.api.responses import from_facts
from gateway.requests.request import NO_STORE, Request, Response
from gateway.telemetry.collector import Collector
from gateway.telemetry.exposition import as_facts, as_text
from gateway.telemetry.server_reports import Reports
from gateway.telemetry.status import status_of
from streams.protocol.access.grants import ADMIN
from streams.protocol.errors import NotAcceptable
from streams.protocol.messages.query import Query

_TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class ReportPages:
    def __init__(self, collector: Collector, key_use: KeyUse, guard: Guard | None = None) -> None:
        self._collector = collector
        self._key_use = key_use
        self._guard = guard

    async def metrics(self, request: Request) -> Response:
        Query(request.query).done()
        is_json = wants_json(request.headers.get("accept", "*/*"))
        reports = await self._collector.gather()
        # A thousand boxes take ten milliseconds to word, which nobody else should wait for.
        if is_json:
            facts = await trio.to_thread.run_sync(as_facts, reports)
            return from_facts(request, {"metrics": facts})
        text = await trio.to_thread.run_sync(as_text, reports)
        response = Response(200, text, content_type=_TEXT_TYPE)
        response.headers.append(NO_STORE)
        return response

    async def status(self, request: Request) -> Response:
        Query(request.query).done()
        shows_detail = request.grant is None or bool(request.grant.scopes & ADMIN)
        reports = await self._collector.gather()
        keys = await self._keys(reports) if shows_detail else []
        return from_facts(request, {**status_of(reports, shows_detail=shows_detail), "keys": keys})

    async def _keys(self, reports: Reports) -> list[dict[str, Any]]:
        """All keys with their limits and what they use of them, never a secret."""
        if self._guard is None:
            return []
        use = [shard.key_use for shard in reports.shards]
        sessions = [gateway.s2_sessions for gateway in reports.gateways]
        return await trio.to_thread.run_sync(self._key_use.shown_all, self._guard.ring, use, sessions)


def wants_json(accept: str) -> bool:
    """Whether JSON is asked for before text. Text is what Prometheus reads, and what `*/*` gets."""
    text = _weight(accept, ("text/plain", "text/*", "*/*"))
    json = _weight(accept, ("application/json", "application/*", "*/*"))
    if not text and not json:
        raise NotAcceptable("accept: metrics are text/plain or application/json", field="accept")
    return json > text


def _weight(accept: str, names: tuple[str, ...]) -> float:
    """How much a type is wanted, by the most exact of its names that is there; 0 is not at all."""
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
