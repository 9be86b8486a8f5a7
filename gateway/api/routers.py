"""Handlers for routers (v0 §6): parse the request, call the reconciler, shape the response."""

from __future__ import annotations

import msgspec

from gateway.api.responses import from_reply
from gateway.requests.content import check_content_type, control_body
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import cursor_of, name_of
from gateway.shards.router_reconciler import RouterReconciler
from streams.protocol.access.grants import Grant
from streams.protocol.errors import RouterCycle, RouterNotFound
from streams.protocol.messages import replies, requests
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.messages.query import Query
from streams.protocol.messages.replies import DeleteRouterReply, PutRouterReply, RouterPage, RouterState
from streams.protocol.messages.routers import ListRouters, RegisteredRouter, Route
from streams.protocol.model.names import check_box_name, check_router_name


class RouterApi:
    def __init__(self, reconciler: RouterReconciler, body_bytes_max: int) -> None:
        self._reconciler = reconciler
        self._body_bytes_max = body_bytes_max

    async def put(self, request: Request, name: str) -> Response:
        _no_query(request)
        check_content_type(request, allow_ndjson=False)
        check_router_name(name)
        body = await control_body(request, self._body_bytes_max)
        route, from_seq = requests.parse_router(body)
        _check_ends(request, route)
        if request.grant is not None and request.grant.prefixes:
            existing = await self._reconciler.get(name)
            if existing is not None:  # the request would replace it
                _check_ends(request, existing.route)
        try:
            put = await self._reconciler.put(name, route, from_seq, request.account)
        except RouterCycle as error:
            grant = request.grant
            if grant is None or all(map(grant.covers, error.detail.get("cycle", ()))):
                raise
            raise RouterCycle(
                "the router would close a cycle through boxes that this key may not see"
            ) from None
        reply = PutRouterReply(**put.router.to_fields(), created=put.created)
        return from_reply(request, reply, 201 if put.created else 200)

    async def get(self, request: Request, name: str) -> Response:
        _no_query(request)
        router = await self._reconciler.get(check_router_name(name))
        if router is None:
            raise RouterNotFound(f"router {name!r} does not exist", router=name)
        _check_ends(request, router.route)
        state = await self._reconciler.state(router)
        last_error = (
            state.last_error if state.is_tied else "its boxes are not attached yet; the server retries"
        )
        reply = RouterState(
            **router.to_fields(),
            forwarded_total=state.forwarded_total,
            position=state.position,
            lag=state.lag,
            state="blocked" if state.is_blocked or not state.is_tied else "ok",
            last_error=last_error or None,
        )
        return from_reply(request, reply)

    async def delete(self, request: Request, name: str) -> Response:
        _no_query(request)
        router = await self._reconciler.get(check_router_name(name))
        if router is not None:
            _check_ends(request, router.route)
            await self._reconciler.drop(router)
        return from_reply(request, DeleteRouterReply(name, router is not None))

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
        query.reject_unknown()
        routers, more = await _page(self._reconciler, question, request.grant)
        descriptions = [replies.Router(**router.to_fields()) for router in routers]
        return from_reply(request, RouterPage(descriptions, cursor_of(routers[-1].name) if more else None))


async def _page(
    reconciler: RouterReconciler, question: ListRouters, grant: Grant | None
) -> tuple[list[RegisteredRouter], bool]:
    """Return one page of the routers that a key may see, and True if there are more.

    For a key with prefixes, any number of register pages may be needed to fill one page. That is acceptable:
    routers are few (STREAMS_MAX_ROUTERS).
    """
    if grant is None or not grant.prefixes:
        page = await reconciler.page(question)
        return page.routers, page.more
    routers: list[RegisteredRouter] = []
    for prefix in grant.within(question.prefix):
        page_request = msgspec.structs.replace(question, prefix=prefix, limit=PAGE_SIZE_MAX)
        while len(routers) <= question.limit:
            page = await reconciler.page(page_request)
            routers += [each for each in page.routers if _is_covered(grant, each.route)]
            if not page.more:
                break
            page_request = msgspec.structs.replace(page_request, after=page.routers[-1].name)
    return routers[: question.limit], len(routers) > question.limit


def _is_covered(grant: Grant, route: Route) -> bool:
    return grant.covers(route.source) and grant.covers(route.dest)


def _check_ends(request: Request, route: Route) -> None:
    request.require_name(route.source, "source")
    request.require_name(route.dest, "dest")


def _no_query(request: Request) -> None:
    Query(request.query).reject_unknown()
