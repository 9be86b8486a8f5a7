"""Routes each request: finds its endpoint, checks host, origin and key, and calls the handler.

Both fronts call `Api.handle`. Routes under a box are the hot ones: they are found with two string operations.
All others are looked up by their whole path.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

import structlog
import trio

from gateway.access.auth import Guard
from gateway.access.key_use import KeyUseExchange
from gateway.access.origins import Origins
from gateway.access.rules import RULES, Rule, route_of
from gateway.admission.inline import need_task
from gateway.api.guide import PREFIX as GUIDE_PREFIX
from gateway.api.reports import ReportPages
from gateway.api.route_table import INLINE_ROUTES, build_route_table
from gateway.api.server_info import ServerInfo
from gateway.api.websockets import WebSockets
from gateway.http.edge_rules import loggable_path, request_id_of
from gateway.requests.content import compress
from gateway.requests.errors import response_for
from gateway.requests.request import S2_PREFIX, Request, Response
from gateway.s2.endpoints import S2
from gateway.shards.dispatch import Dispatch
from gateway.telemetry.collector import Collector
from gateway.telemetry.history import Histories
from gateway.watch.service import Watch
from streams.protocol.errors import InvalidRequest, MethodNotAllowed, NotFound, StreamsError
from streams.protocol.model.names import quote
from streams.protocol.telemetry.histogram import Histogram

log = structlog.get_logger("gateway.access")

AnyHandler = Callable[..., Awaitable[Response]]


class Endpoint(NamedTuple):
    """The handler of a route, the access rule that is checked before it, and its latency histogram."""

    handler: AnyHandler
    rule: Rule
    times: Histogram
    needs_task: bool


#: The metrics label of all S2 requests: the S2 API counts its operations itself.
S2_ROUTE = "/v1"

_API_PREFIX = "/v0/"
_BOX_PREFIX = "/v0/boxes/"
_ROUTER_PREFIX = "/v0/routers/"
_SCHEDULE_PREFIX = "/v0/schedules/"
_WATCH_PREFIX = "/v0/watch/"


class Api:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        body_bytes_max: int,
        version: str,
        sockets: tuple[str, ...],
        addresses: tuple[str, ...] = (),
        draining: trio.Event,
        watch: Watch,
        s2: S2,
        guard: Guard | None = None,
        origins: Origins | None = None,
        collector: Collector | None = None,
        response_counts: dict[int, int] | None = None,
        route_times: dict[str, Histogram] | None = None,
        logs_access: bool = False,
        key_use: KeyUseExchange | None = None,
        histories: Histories | None = None,
        settings: list[dict[str, str]] | None = None,
        guide: str = "",
    ) -> None:
        key_use = key_use or KeyUseExchange(dispatch, watch.slots)
        self._route_times = {} if route_times is None else route_times
        #: The S2 API checks keys, hosts and origins itself and has its own errors (`gateway/s2/permits.py`).
        self._s2_endpoint = Endpoint(
            s2.handle,
            Rule(is_open=True, accepts_any_origin=True),
            self._route_times.setdefault(S2_ROUTE, Histogram()),
            needs_task=True,
        )
        self._s2 = s2
        self.guard = guard
        self._origins = origins or Origins(has_keys=guard is not None)
        #: Every route as "METHOD path", with the names of `gateway/access/rules.py`.
        self.routes: list[str] = []
        #: Number of responses by status.
        self._response_counts = {} if response_counts is None else response_counts
        self._logs_access = logs_access
        self.websockets = WebSockets(watch, dispatch, self._origins, guard)
        where = {"sockets": sockets, "addresses": addresses}
        table = build_route_table(
            dispatch,
            ServerInfo(dispatch, version=version, key_use=key_use, settings=settings, **where),
            body_bytes_max=body_bytes_max,
            version=version,
            draining=draining,
            watch=watch,
            reports=None if collector is None else ReportPages(collector, key_use, guard, histories),
            guide=guide,
        )
        self._box_endpoints = {
            action: self._endpoints(f"{_BOX_PREFIX}{{box}}{_shape(action)}", methods)
            for action, methods in table.box_routes.items()
        }
        self._router_endpoints = self._endpoints(f"{_ROUTER_PREFIX}{{router}}", table.router_routes)
        self._schedule_endpoints = {
            action: self._endpoints(f"{_SCHEDULE_PREFIX}{{schedule}}{_shape(action)}", methods)
            for action, methods in table.schedule_routes.items()
        }
        self._watch_endpoints = self._endpoints(f"{_WATCH_PREFIX}{{wid}}", table.watch_routes)
        self._guide_endpoints = self._endpoints(_template(GUIDE_PREFIX), table.guide_routes)
        self._fixed_endpoints = {
            path: self._endpoints(_template(path), methods) for path, methods in table.fixed_routes.items()
        }

    def _endpoints(self, template: str, methods: Mapping[str, AnyHandler]) -> dict[str, Endpoint]:
        endpoints: dict[str, Endpoint] = {}
        for method, handler in methods.items():
            route = route_of(method, template)
            if route not in self.routes:
                self.routes.append(route)
            times = self._route_times.setdefault(route, Histogram())
            endpoints[method] = Endpoint(handler, RULES[route], times, route not in INLINE_ROUTES)
        return endpoints

    async def admit_body(self, path: str, headers: dict[str, str], query: str) -> str:
        """Authenticate a request before its body is read, and return the owner to charge the body to.

        Fronts call it only on a server with keys.
        """
        assert self.guard is not None
        if path.startswith(S2_PREFIX):  # it has access tokens beside keys
            return await self._s2.admit_body(path, headers, query)
        return self.guard.admit(headers, query).id

    async def handle(self, request: Request) -> Response:
        request_id = request_id_of(request.headers)
        try:
            if request.method == "OPTIONS" and (preflight := self._preflight(request)) is not None:
                response = preflight
            elif self.guard is None:
                response = await self._handle_without_keys(request)
            else:
                response = await self._handle_with_keys(self.guard, request)
        except StreamsError as error:
            spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
            response = response_for(error, server_total_ms=spent_ms)
        status = response.status
        self._response_counts[status] = self._response_counts.get(status, 0) + 1
        if request.times is not None:
            request.times.observe((time.perf_counter_ns() - request.started_ns) / 1e9)
        if self._logs_access:
            self._log_access(request, request_id, status)
        response.headers.append((b"x-request-id", request_id.encode("latin-1")))
        if "origin" in request.headers and not request.path.startswith(S2_PREFIX):
            self._origins.add_cors_headers(request, response)
        if "accept-encoding" in request.headers:
            await compress(request, response)
        return response

    @staticmethod
    def _log_access(request: Request, request_id: str, status: int) -> None:
        """Log a request without its query, headers and session name: each of them can grant access.

        A streamed response is logged when it begins.
        """
        took_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
        log.debug(
            "request",
            request_id=request_id,
            method=request.method,
            path=loggable_path(request.path),
            status=status,
            took_ms=round(took_ms, 3),
            body_bytes=len(request.body),
        )

    def _preflight(self, request: Request) -> Response | None:
        if not request.path.startswith(_API_PREFIX):
            return None
        self._origins.check_host(request.headers)
        return self._origins.preflight(request)

    async def _handle_without_keys(self, request: Request) -> Response:
        origins, headers = self._origins, request.headers
        try:
            endpoint, names = self._find(request)
        except StreamsError:
            origins.check_host(headers)
            origins.check_site(headers)
            raise
        request.times = endpoint.times
        rule = endpoint.rule
        if not rule.accepts_any_origin:
            origins.check_host(headers)
            if not rule.is_open:  # open routes are static pages, which any page may link to
                origins.check_site(headers)
        if endpoint.needs_task:
            await need_task()
        return await endpoint.handler(request, *names)

    async def _handle_with_keys(self, guard: Guard, request: Request) -> Response:
        try:
            endpoint, names = self._find(request)
        except StreamsError:  # without a key, a client must not learn which routes exist
            guard.identify(request, takes_token=False)
            raise
        request.times = endpoint.times
        rule = endpoint.rule
        if endpoint.needs_task:
            await need_task()
        if guard.is_open(rule):
            return await endpoint.handler(request, *names)
        request.key = key = guard.identify(request, takes_token=rule.takes_token)
        rule.check(key.grant, names[0] if names else "")
        if request.charge is not None:
            request.charge.assign(key.id)
        guard.in_flight.take(key)
        try:
            return await endpoint.handler(request, *names)
        finally:
            guard.in_flight.give(key)

    def _find(self, request: Request) -> tuple[Endpoint, tuple[str, ...]]:
        """Return the endpoint of a request and the path parameters of its handler.

        Handlers are called only through an endpoint, so every handler has an access rule.
        """
        path = request.path
        if path.startswith(_BOX_PREFIX):
            name, _, action = path[len(_BOX_PREFIX) :].partition("/")
            if "%" in name:
                name = _decode_segment(name)
            action, slash, rest = action.partition("/")
            methods = self._box_endpoints.get(action + slash)
            if methods is not None and name and bool(rest) == bool(slash) and "/" not in rest:
                return self._pick(methods, request), (name, rest)
        elif path.startswith(_ROUTER_PREFIX) and path != _ROUTER_PREFIX:
            name = _decode_segment(path[len(_ROUTER_PREFIX) :], "router")
            return self._pick(self._router_endpoints, request), (name,)
        elif path.startswith(S2_PREFIX):
            return self._s2_endpoint, ()
        else:
            path_methods = self._fixed_endpoints.get(path)
            if path_methods is not None:
                return self._pick(path_methods, request), ()
            if path.startswith(_SCHEDULE_PREFIX):
                name, _, action = path[len(_SCHEDULE_PREFIX) :].partition("/")
                schedule_methods = self._schedule_endpoints.get(action)
                if name and schedule_methods is not None:
                    return self._pick(schedule_methods, request), (_decode_segment(name, "schedule"),)
            wid = path.removeprefix(_WATCH_PREFIX)
            if wid != path and wid and "/" not in wid:
                return self._pick(self._watch_endpoints, request), (wid,)
            if path.startswith(GUIDE_PREFIX):
                return self._pick(self._guide_endpoints, request), (path[len(GUIDE_PREFIX) :],)
        raise NotFound(f"{quote(path)}: there is no such route; see /docs for all routes", path=path[:256])

    @staticmethod
    def _pick(methods: Mapping[str, Endpoint], request: Request) -> Endpoint:
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allow = sorted({*methods, *(["HEAD"] if "GET" in methods else [])})
            raise MethodNotAllowed(
                f"{request.method[:16]}: not allowed here; use {' or '.join(allow)}", allow=allow
            )
        return handler


def _template(path: str) -> str:
    """Return the route of a fixed path. All files of the console are one route, and all of the guide."""
    if path.startswith(GUIDE_PREFIX.rstrip("/")):
        return f"{GUIDE_PREFIX}{{file}}"
    return "/console/{file}" if path.startswith("/console/") else path


def _shape(action: str) -> str:
    return f"/{action}{{}}" if action.endswith("/") else f"/{action}" if action else ""


def _decode_segment(segment: str, field: str = "box") -> str:
    """Decode the percent-encoding of one path segment.

    The path is split before it is decoded: `%2F` is part of a name.
    """
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        message = f"{field}: {quote(segment)} is not percent-encoded UTF-8"
        raise InvalidRequest(message, field=field) from None
