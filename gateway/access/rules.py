"""The table of access rules (v0 §11): the scopes that each route requires, and where it names boxes.

`Api` looks up every route at startup, so a route without a rule stops the gateway from starting. The path is
checked before the handler is called. Names in a body are checked by the code that parses it, handler or
shard, on the value that it uses; the rule lists these fields, and a test covers all of them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from streams.protocol.access.grants import ADMIN, DELETE, READ, WRITE, Grant
from streams.protocol.errors import Forbidden


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    scopes: int = 0
    #: Needs no key.
    is_open: bool = False
    #: A probe: needs no key unless STREAMS_PROBE_AUTH is set.
    is_probe: bool = False
    #: On a server without keys, accepts every host name and origin.
    accepts_any_origin: bool = False
    #: An event stream: browsers cannot send headers with it, so its key may be in `?token=`.
    takes_token: bool = False
    #: Shows data of all boxes, so keys with prefixes are rejected.
    shows_all_boxes: bool = False
    #: The first parameter of the path is a name that must be within the key's prefixes.
    has_name_in_path: bool = False
    #: Fields of the body that name boxes; `*` means the keys of an object.
    names_body: tuple[str, ...] = ()
    #: Fields of the body (of the query for NDJSON) that need scopes beyond `scopes`.
    scopes_body: tuple[tuple[str, int], ...] = ()
    #: The response omits names outside the key's prefixes.
    is_filtered: bool = False
    #: The session belongs to the key that created it.
    is_bound_to_key: bool = False

    def check(self, grant: Grant, name: str) -> None:
        """Raise `Forbidden` if the grant does not allow the route. `name` is the first path parameter."""
        grant.require(self.scopes)
        if self.has_name_in_path:
            grant.require_name(name, "name")
        elif self.shows_all_boxes and grant.prefixes:
            raise Forbidden(
                "prefixes: this route shows all boxes; use a key without prefixes", field="prefixes"
            )


_OPEN = Rule(is_open=True)
_PROBE = Rule(is_probe=True, accepts_any_origin=True)
_ANY = Rule()


def _box(scopes: int, **more: object) -> Rule:
    return msgspec.structs.replace(Rule(scopes=scopes, has_name_in_path=True), **more)


_ROUTER_ENDS = ("source", "dest")

RULES: Final[dict[str, Rule]] = {
    "PUT /v0/boxes/{box}": _box(ADMIN, names_body=("dead_letter",)),
    "GET /v0/boxes/{box}": _box(READ),
    "DELETE /v0/boxes/{box}": _box(DELETE, is_filtered=True),
    "POST /v0/boxes/{box}": _box(
        WRITE,
        names_body=("config.dead_letter",),
        scopes_body=(("config", ADMIN), ("trim_before_seq", DELETE)),
    ),
    "POST /v0/boxes/{box}/diff": _box(READ),
    "POST /v0/boxes/{box}/delete": _box(DELETE),
    "GET /v0/boxes/{box}/tail": _box(READ),
    "PUT /v0/boxes/{box}/fence": _box(WRITE),
    "GET /v0/boxes/{box}/records/{seq}": _box(READ),
    "POST /v0/boxes/{box}/claim": _box(READ | WRITE),
    "POST /v0/boxes/{box}/ack": _box(WRITE, names_body=("outputs",)),
    "POST /v0/boxes/{box}/nack": _box(WRITE),
    "POST /v0/boxes/{box}/extend": _box(WRITE),
    "POST /v0/boxes/{box}/reschedule": _box(WRITE),
    "POST /v0/boxes/{box}/reprioritize": _box(WRITE),
    "POST /v0/boxes/{box}/pause": _box(ADMIN),
    "POST /v0/boxes/{box}/resume": _box(ADMIN),
    "GET /v0/boxes/{box}/leases": _box(READ),
    "GET /v0/boxes/{box}/work": _box(READ | WRITE, takes_token=True),
    # It moves records between boxes, like a worker that acks jobs and appends records.
    "POST /v0/boxes/{box}/requeue": _box(READ | WRITE, names_body=("from",)),
    "GET /v0/boxes/{box}/groups": _box(READ),
    "PUT /v0/boxes/{box}/groups/{group}": _box(WRITE),
    "GET /v0/boxes/{box}/groups/{group}": _box(READ),
    "DELETE /v0/boxes/{box}/groups/{group}": _box(DELETE),
    "GET /v0/boxes/{box}/watch": _box(READ, takes_token=True),
    "GET /v0/boxes": Rule(scopes=READ, is_filtered=True),
    "PUT /v0/routers/{router}": _box(ADMIN, names_body=_ROUTER_ENDS),
    "GET /v0/routers/{router}": _box(READ),
    "DELETE /v0/routers/{router}": _box(DELETE),
    "GET /v0/routers": Rule(scopes=READ, is_filtered=True),
    "PUT /v0/schedules/{schedule}": _box(ADMIN, names_body=("box",)),
    "GET /v0/schedules/{schedule}": _box(READ),
    "DELETE /v0/schedules/{schedule}": _box(ADMIN),
    "POST /v0/schedules/{schedule}/run": _box(ADMIN),
    "GET /v0/schedules": Rule(scopes=READ, is_filtered=True),
    "POST /v0/watch": Rule(scopes=READ, names_body=("boxes.*",)),
    "GET /v0/watch/{wid}": Rule(scopes=READ, takes_token=True, is_bound_to_key=True),
    # Each command on the WebSocket is checked separately (`api/websockets.py`).
    "GET /v0/ws": _ANY,
    "GET /v0/whoami": _ANY,
    # Clients that connect to shards directly need the map, whatever their key allows.
    "GET /v0/placement": _ANY,
    # Prometheus may use any host name for the server.
    "GET /v0/metrics": Rule(scopes=READ, shows_all_boxes=True, accepts_any_origin=True),
    "GET /metrics": Rule(scopes=READ, shows_all_boxes=True, accepts_any_origin=True),
    "GET /v0/status": Rule(scopes=READ, shows_all_boxes=True),
    "GET /v0/history": Rule(scopes=READ, shows_all_boxes=True),
    "GET /v0/settings": Rule(scopes=ADMIN, shows_all_boxes=True),
    # They describe the API and contain no data of the server.
    "GET /v0/openapi.json": _OPEN,
    "GET /docs": _OPEN,
    # The console is static and sends requests with the key that the user enters.
    "GET /": _OPEN,
    "GET /console/{file}": _OPEN,
    "GET /docs/guide/{file}": _OPEN,
    "GET /v0/health": _PROBE,
    "GET /health": _PROBE,
    "GET /healthz": _PROBE,
    "GET /v0/ready": _PROBE,
    "GET /readyz": _PROBE,
    "GET /ping": _PROBE,
}

_parameter = re.compile(r"\{[^}]*\}")
_BY_SHAPE: Final = {_parameter.sub("{}", route): route for route in RULES}


def route_of(method: str, template: str) -> str:
    """Return the route's key in `RULES`, whatever names `template` has for its parameters."""
    route = _BY_SHAPE.get(_parameter.sub("{}", f"{method} {template}"))
    if route is None:
        raise LookupError(f"{method} {template} has no rule in gateway/access/rules.py; add one")
    return route
