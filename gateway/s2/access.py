"""What an address of `/v1` asks of a key, when the server has keys (v0-api §11, s2-v1 §2): the token of an
SDK is one of our keys.

A stream is within a key's prefixes by its qualified name, `basin/stream`. What shows or changes a whole basin
takes a key whose prefixes cover everything in it.
"""

from __future__ import annotations

from gateway.auth import Guard
from gateway.http import Request
from gateway.s2 import fields
from gateway.s2.messages import Input
from streams.protocol.access import ADMIN, DELETE, READ, WRITE, Grant
from streams.protocol.errors import Forbidden
from streams.protocol.keys import Key
from streams.protocol.streams import box_of

_SCOPES = {"GET": READ, "HEAD": READ, "POST": ADMIN, "PUT": ADMIN, "PATCH": ADMIN, "DELETE": DELETE}


def admitted(guard: Guard, request: Request, segments: list[str]) -> Key:
    """Whose request this is. Raises `Unauthorized` or `Forbidden`."""
    key = request.key = guard.identify(request, takes_token=False)
    is_append = request.method == "POST" and segments[2:] == ["records"]
    key.grant.require(WRITE if is_append else _SCOPES.get(request.method, ADMIN))
    match segments:
        case ["streams", stream, *_] if stream:
            key.grant.require_name(box_of(fields.basin_of(request.headers), stream), "stream")
        case ["streams"]:
            _require_basin(key.grant, fields.basin_of(request.headers))
        case ["basins", basin] if basin:
            _require_basin(key.grant, basin)
        case _:
            if key.grant.prefixes:
                raise Forbidden("prefixes: this shows all basins, and the key is for some names only")
    return key


def check_input(request_key: Key | None, given: Input) -> None:
    """A trim command deletes records."""
    if request_key is not None and given.trims:
        request_key.grant.require(DELETE)


def _require_basin(grant: Grant, basin: str) -> None:
    grant.require_name(box_of(basin, ""), "basin")
