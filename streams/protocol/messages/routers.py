"""Routers: definition, commands and replies of the registry (v0 §6).

A router is registered on shard 0, which gives it a number, and has an endpoint at each of its two boxes. Name
and number make its **origin** (`forwards.py`), so a router created again under an old name is another one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams.protocol.model.matches import Match


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A router's definition, as the source's shard needs it to send copies."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Match | None = None
    allow_cycle: bool = False
    #: Grows with every change of the definition, so that an older one never replaces a newer one.
    revision: int = 0

    def to_fields(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["revision"]
        fields["filter"] = self.filter.to_list() if self.filter is not None else None
        return fields


class RegisteredRouter(msgspec.Struct, frozen=True, kw_only=True):
    """A router as the registry stores it."""

    name: str
    number: int
    route: Route
    #: The first seq to copy, until both endpoints are attached; None is the head.
    from_seq: int | None = None
    is_tied: bool = False

    @property
    def origin(self) -> str:
        return origin_of(self.name, self.number)

    def to_fields(self) -> dict[str, Any]:
        return {"router": self.name, **self.route.to_fields()}


def origin_of(name: str, number: int) -> str:
    """Return the origin of a router. No name contains `#`, so origins of other kinds never look alike."""
    return f"{name}#{number}"


def router_of(origin: str) -> tuple[str, int] | None:
    """Return name and number of the router of an origin; None when the origin is not a router's."""
    name, mark, number = origin.rpartition("#")
    return (name, int(number)) if mark else None


# ---------------------------------------------------------------------------------------------------
# Commands and replies of the registry


class PutRouter(msgspec.Struct, frozen=True, tag=True):
    name: str
    route: Route
    from_seq: int | None = None
    #: The key whose limits count, if it has some.
    account: str = ""


class SettleRouter(msgspec.Struct, frozen=True, tag=True):
    """Notes that both endpoints of this revision are attached."""

    name: str
    number: int
    revision: int


class DropRouter(msgspec.Struct, frozen=True, tag=True):
    """Removes the router of this name and number; another one of that name stays."""

    name: str
    number: int


class GetRouter(msgspec.Struct, frozen=True, tag=True):
    name: str


class ListRouters(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    prefix: str = ""
    source: str = ""
    dest: str = ""
    after: str = ""
    limit: int = 100
    #: The caller's version of the registry: the reply is short when nothing has changed since. -1 = none.
    version: int = -1


class PutRouterResult(msgspec.Struct, array_like=True, frozen=True):
    router: RegisteredRouter
    created: bool
    #: The router that had this name with other endpoints until now.
    previous: RegisteredRouter | None


class GetRouterResult(msgspec.Struct, array_like=True, frozen=True):
    router: RegisteredRouter | None


class ListRoutersResult(msgspec.Struct, array_like=True, frozen=True):
    version: int
    is_same: bool
    routers: list[RegisteredRouter]
    more: bool


Command = PutRouter | SettleRouter | DropRouter | GetRouter | ListRouters
Reply = PutRouterResult | GetRouterResult | ListRoutersResult
REPLIES: tuple[type[msgspec.Struct], ...] = (PutRouterResult, GetRouterResult, ListRoutersResult)
