"""The one table of what each address asks of a key (v0 §11): its scopes, and where it names things.

`Api` looks every route up here when it is built, so a route without a rule stops a gateway from starting.
What a rule says of the path is checked before the handler is called. Names in a body are checked by whoever
reads the body, handler or shard, on the value that is then used; the rule says which there are, and a test
goes through all of them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from streams.protocol.access.grants import ADMIN, DELETE, READ, WRITE, Grant
from streams.protocol.errors import Forbidden


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    scopes: int = 0
    #: Answered without a key.
    is_open: bool = False
    #: A probe: open, unless STREAMS_PROBE_AUTH says otherwise.
    is_probe: bool = False
    #: Answered by whatever name a server without keys is asked, and to pages of every origin.
    is_for_anyone: bool = False
    #: An event stream: a browser cannot send headers with it, so its key may come as `?token=`.
    takes_token: bool = False
    #: Shows what is outside any prefix, so a key that has prefixes is refused.
    is_whole: bool = False
    #: The first parameter of the path is a name that must be within the key's prefixes.
    names_path: bool = False
    #: Fields of the body that name boxes; `*` stands for the keys of an object.
    names_body: tuple[str, ...] = ()
    #: Fields of the body, or of the query where the body is lines, that take more than `scopes`.
    scopes_body: tuple[tuple[str, int], ...] = ()
    #: The answer leaves out what is outside the key's prefixes.
    is_filtered: bool = False
    #: What the address opens belongs to the key that made it.
    is_bound: bool = False

    def check(self, grant: Grant, name: str) -> None:
        """Raises `Forbidden`. `name` is the first parameter of the path."""
        grant.require(self.scopes)
        if self.names_path:
            grant.require_name(name, "name")
        elif self.is_whole and grant.prefixes:
            raise Forbidden("prefixes: this shows all boxes, and the key is for some only", field="prefixes")


_OPEN = Rule(is_open=True)
_PROBE = Rule(is_probe=True, is_for_anyone=True)
_ANY = Rule()


def _box(scopes: int, **more: object) -> Rule:
    return msgspec.structs.replace(Rule(scopes=scopes, names_path=True), **more)


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
    "POST /v0/boxes/{box}/ack": _box(WRITE),
    "POST /v0/boxes/{box}/nack": _box(WRITE),
    "POST /v0/boxes/{box}/extend": _box(WRITE),
    "GET /v0/boxes/{box}/work": _box(READ | WRITE, takes_token=True),
    # It takes records out of one box and puts them into another, as a worker does that acks and appends.
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
    "POST /v0/watch": Rule(scopes=READ, names_body=("boxes.*",)),
    "GET /v0/watch/{wid}": Rule(scopes=READ, takes_token=True, is_bound=True),
    # What a socket asks for is checked command by command (`api/websockets.py`).
    "GET /v0/ws": _ANY,
    "GET /v0/whoami": _ANY,
    # Whoever writes to shards directly needs the map, whatever else the key allows.
    "GET /v0/placement": _ANY,
    # Prometheus asks by whatever name it has for the server.
    "GET /v0/metrics": Rule(scopes=READ, is_whole=True, is_for_anyone=True),
    "GET /metrics": Rule(scopes=READ, is_whole=True, is_for_anyone=True),
    "GET /v0/status": Rule(scopes=READ, is_whole=True),
    # They say what this software is, which everybody may know, and nothing of what is in it.
    "GET /v0/openapi.json": _OPEN,
    "GET /docs": _OPEN,
    # The console is static, and asks with the key that it is given.
    "GET /": _OPEN,
    "GET /console/console.css": _OPEN,
    "GET /console/console.js": _OPEN,
    "GET /console/api.js": _OPEN,
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
    """The address as it is called in `RULES`, whatever `template` calls its parameters."""
    route = _BY_SHAPE.get(_parameter.sub("{}", f"{method} {template}"))
    if route is None:
        raise LookupError(
            f"{method} {template} has no rule in gateway/access/rules.py: say what it asks of a key"
        )
    return route
