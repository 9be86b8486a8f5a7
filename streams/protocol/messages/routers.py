"""Routers: what one says, how a request for one is understood, how it is shown (v0 §6).

A router is registered in one place (shard 0), where it gets a number, and tied to its two boxes, wherever
they are. Name and number make its **origin** (`forwards.py`), so a router made again under an old name is
another one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams.protocol.model.matches import Match


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A router's definition: all that the source's shard must know to send its copies."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Match | None = None
    allow_cycle: bool = False
    #: Grows with every change of the definition, so that an older one never replaces a newer one.
    revision: int = 0

    def shown(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["revision"]
        fields["filter"] = self.filter.shown() if self.filter is not None else None
        return fields


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it is registered."""

    name: str
    number: int
    route: Route
    #: Where copying starts, until both ends are tied; None is at the head.
    from_seq: int | None = None
    is_tied: bool = False

    @property
    def origin(self) -> str:
        return origin_of(self.name, self.number)

    def shown(self) -> dict[str, Any]:
        return {"router": self.name, **self.route.shown()}


def origin_of(name: str, number: int) -> str:
    """`#` stands in no name, so an origin is never mistaken for one of another kind."""
    return f"{name}#{number}"


def router_of(origin: str) -> tuple[str, int] | None:
    """The router that an origin belongs to; None when it is not a router's."""
    name, mark, number = origin.rpartition("#")
    return (name, int(number)) if mark else None


# ---------------------------------------------------------------------------------------------------
# What the register is asked, and what it answers


class PutRouter(msgspec.Struct, frozen=True, tag=True):
    name: str
    route: Route
    from_seq: int | None = None
    #: The key whose limits count, if it has some.
    account: str = ""


class SettleRouter(msgspec.Struct, frozen=True, tag=True):
    """Both ends of this revision are tied."""

    name: str
    number: int
    revision: int


class DropRouter(msgspec.Struct, frozen=True, tag=True):
    """Forgets the router of this name and number; another one of that name stays."""

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
    #: Of the register as the asker has it: the answer is short when it has not changed since. -1 = has none.
    version: int = -1


class PutRouterResult(msgspec.Struct, array_like=True, frozen=True):
    router: Router
    created: bool
    #: The router that had this name and other ends until now.
    replaced: Router | None


class GetRouterResult(msgspec.Struct, array_like=True, frozen=True):
    router: Router | None


class RouterPage(msgspec.Struct, array_like=True, frozen=True):
    version: int
    is_same: bool
    routers: list[Router]
    more: bool


Command = PutRouter | SettleRouter | DropRouter | GetRouter | ListRouters
Reply = PutRouterResult | GetRouterResult | RouterPage
REPLIES: tuple[type[msgspec.Struct], ...] = (PutRouterResult, GetRouterResult, RouterPage)
