"""Routers: what one says, how a request for one is understood, how it is shown (v0-api §6).

A router is registered in one place (shard 0), where it gets a number, and tied to its two boxes, wherever
they are. Name and number make its **origin** (`forwards.py`), so a router made again under an old name is
another one.
"""

from __future__ import annotations


def origin_of(router: str, number: int) -> str:
    """`#` stands in no name, so an origin is never mistaken for one of another kind."""
    return f"{router}#{number}"


def router_of(origin: str) -> tuple[str, int] | None:
    """The router that an origin belongs to; None when it is not a router's."""
    name, mark, number = origin.rpartition("#")
    return (name, int(number)) if mark else None
