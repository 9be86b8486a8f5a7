"""`/v0/routers` (v0-api §6). Parses, asks the registrar, shapes the answer."""

from __future__ import annotations

from typing import Any

from gateway.api.answers import from_facts
from gateway.content import is_ndjson, uncompressed
from gateway.dispatch import cursor_of, name_of
from gateway.http import Request, Response
from gateway.registrar import Registrar
from streams.protocol import requests
from streams.protocol.errors import InvalidRequest, RouterNotFound
from streams.protocol.names import check_box_name, check_router_name, shown
from streams.protocol.query import Query
from streams.protocol.requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.routers import ListRouters, Router


class Routers:
    def __init__(self, registrar: Registrar, body_bytes_max: int) -> None:
        self._registrar = registrar
        self._body_bytes_max = body_bytes_max

    async def put(self, request: Request, name: str) -> Response:
        _no_query(request)
        is_ndjson(request, allowed=False)
        check_router_name(name)
        body = await uncompressed(request, self._body_bytes_max)
        route, from_seq = requests.parse_router(bytes(body))
        put = await self._registrar.put(name, route, from_seq)
        facts = {**put.router.shown(), "created": put.created}
        return from_facts(request, facts, 201 if put.created else 200)

    async def get(self, request: Request, name: str) -> Response:
        _no_query(request)
        router = await self._registrar.get(check_router_name(name))
        if router is None:
            raise RouterNotFound(f"router {name} does not exist", router=name)
        return from_facts(request, {**router.shown(), **await self._state(router)})

    async def _state(self, router: Router) -> dict[str, Any]:
        state = await self._registrar.state(router)
        last_error = state.last_error if state.is_tied else "its boxes are not tied yet; this is tried again"
        return {
            "forwarded_total": state.forwarded_total,
            "position": state.position,
            "lag": state.lag,
            "state": "blocked" if state.is_blocked or not state.is_tied else "ok",
            "last_error": last_error or None,
        }

    async def delete(self, request: Request, name: str) -> Response:
        _no_query(request)
        router = await self._registrar.get(check_router_name(name))
        if router is not None:
            await self._registrar.drop(router)
        return from_facts(request, {"router": name, "deleted": router is not None})

    async def list(self, request: Request) -> Response:
        query = Query(request.query)
        source, dest = query.text("source") or "", query.text("dest") or ""
        question = ListRouters(
            prefix=query.text("prefix") or "",
            source=check_box_name(source, "source") if source else "",
            dest=check_box_name(dest, "dest") if dest else "",
            limit=query.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT,
            after=name_of(query.text("cursor")),
        )
        query.done()
        page = await self._registrar.page(question)
        facts: dict[str, Any] = {"routers": [router.shown() for router in page.routers]}
        if page.more:
            facts["next_cursor"] = cursor_of(page.routers[-1].name)
        return from_facts(request, facts)


def _no_query(request: Request) -> None:
    if request.query:
        raise InvalidRequest(f"query: {shown(request.query)} is not known here", field="query")
