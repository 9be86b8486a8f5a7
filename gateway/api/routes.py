"""Every address of `/v0` and what answers there. One handler for both fronts.

The hot addresses, those under a box, are found with two string operations; the rest by their whole path.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote

import trio

from gateway.api.boxes import Boxes
from gateway.api.groups import Groups
from gateway.api.ops import Ops
from gateway.api.queues import Queues
from gateway.api.records import Records
from gateway.api.routers import Routers
from gateway.api.sockets import Sockets
from gateway.api.watch import Watches
from gateway.content import compress
from gateway.dispatch import Dispatch
from gateway.edge_rules import request_id_of
from gateway.errors import response_for
from gateway.http import Request, Response
from gateway.registrar import Registrar
from gateway.s2.endpoints import PREFIX as S2_PREFIX
from gateway.s2.endpoints import S2
from gateway.watch.service import Watch
from gateway.work import WorkStreams
from streams.protocol.errors import InvalidRequest, MethodNotAllowed, NotFound, StreamsError
from streams.protocol.names import shown

#: A handler of an address under a box: (request, box, the rest of the path after the box).
BoxHandler = Callable[[Request, str, str], Awaitable[Response]]
RouterHandler = Callable[[Request, str], Awaitable[Response]]
PlainHandler = Callable[[Request], Awaitable[Response]]

_H = TypeVar("_H")

_BOX_PREFIX = "/v0/boxes/"
_ROUTER_PREFIX = "/v0/routers/"
_WATCH_PREFIX = "/v0/watch/"


class Api:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        body_bytes_max: int,
        version: str,
        sockets: tuple[str, ...],
        draining: trio.Event,
        watch: Watch,
        s2: S2,
    ) -> None:
        self._s2 = s2
        registrar = Registrar(dispatch)
        boxes = Boxes(dispatch, registrar, body_bytes_max)
        records = Records(dispatch, body_bytes_max)
        routers = Routers(registrar, body_bytes_max)
        self.sockets = Sockets(watch, dispatch)
        self._watches = watches = Watches(watch, body_bytes_max)
        ops = Ops(dispatch, version=version, sockets=sockets)
        work = WorkStreams(dispatch, draining)
        queues = Queues(dispatch, body_bytes_max, work)
        groups = Groups(dispatch, body_bytes_max)
        #: Action after the box's name, with a slash where more must follow -> method -> handler.
        self._under_box: dict[str, dict[str, BoxHandler]] = {
            "": {"PUT": boxes.put, "GET": boxes.state, "DELETE": boxes.delete, "POST": records.append},
            "diff": {"POST": records.diff},
            "delete": {"POST": records.delete},
            "tail": {"GET": records.tail},
            "fence": {"PUT": boxes.fence},
            "records/": {"GET": records.one},
            "claim": {"POST": queues.claim},
            "ack": {"POST": queues.ack},
            "nack": {"POST": queues.nack},
            "extend": {"POST": queues.extend},
            "work": {"GET": queues.work},
            "requeue": {"POST": queues.requeue},
            "groups": {"GET": groups.list},
            "groups/": {"PUT": groups.commit, "GET": groups.state, "DELETE": groups.delete},
            "watch": {"GET": watches.box},
        }
        self._under_routers: dict[str, RouterHandler] = {
            "PUT": routers.put,
            "GET": routers.get,
            "DELETE": routers.delete,
        }
        self._plain: dict[str, dict[str, PlainHandler]] = {
            "/v0/boxes": {"GET": boxes.list},
            "/v0/routers": {"GET": routers.list},
            "/v0/placement": {"GET": ops.placement},
            "/v0/watch": {"POST": watches.create},
            "/v0/ws": {"GET": watches.not_a_socket},
            **{path: {"GET": ops.health} for path in ("/v0/health", "/health", "/healthz", "/ping")},
            **{path: {"GET": ops.ready} for path in ("/v0/ready", "/readyz")},
        }

    async def handle(self, request: Request) -> Response:
        request_id = request_id_of(request.headers)
        try:
            response = await self._answer(request)
        except StreamsError as error:
            spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
            response = response_for(error, server_total_ms=spent_ms)
        response.headers.append((b"x-request-id", request_id.encode("latin-1")))
        if "accept-encoding" in request.headers:
            await compress(request, response)
        return response

    def _answer(self, request: Request) -> Awaitable[Response]:
        path = request.path
        if path.startswith(_BOX_PREFIX):
            name, _, action = path[len(_BOX_PREFIX) :].partition("/")
            if "%" in name:
                name = _decoded(name)
            action, slash, rest = action.partition("/")
            methods = self._under_box.get(action + slash)
            if methods is not None and name and bool(rest) == bool(slash) and "/" not in rest:
                return self._pick(methods, request)(request, name, rest)
        elif path.startswith(_ROUTER_PREFIX) and path != _ROUTER_PREFIX:
            name = path[len(_ROUTER_PREFIX) :]
            return self._pick(self._under_routers, request)(request, _decoded(name, "router"))
        elif path.startswith(S2_PREFIX):
            return self._s2.handle(request)
        else:
            plain = self._plain.get(path)
            if plain is not None:
                return self._pick(plain, request)(request)
            wid = path.removeprefix(_WATCH_PREFIX)
            if wid != path and wid and "/" not in wid:
                return self._pick({"GET": self._watches.open}, request)(request, wid)
        raise NotFound(f"{shown(path)}: there is nothing at this address", path=path[:256])

    @staticmethod
    def _pick(methods: dict[str, _H], request: Request) -> _H:
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allow = sorted({*methods, *(["HEAD"] if "GET" in methods else [])})
            raise MethodNotAllowed(
                f"{request.method[:16]}: not allowed here; use {' or '.join(allow)}", allow=allow
            )
        return handler


def _decoded(segment: str, field: str = "box") -> str:
    """A path segment without its percent-encoding. Split first, then decode: `%2F` is part of a name."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        message = f"{field}: {shown(segment)} is not percent-encoded UTF-8"
        raise InvalidRequest(message, field=field) from None
