"""Decodes lists of boxes (v0 §2.3, §26). A gateway asks each shard for one page."""

from __future__ import annotations

import orjson

from streams.protocol import wire
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Command
from streams.protocol.messages.query import Query
from streams.protocol.payloads.appends import RecordLimits

PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000


def decode(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    """Return the command of a page. `after` is the last name of the page before, not the client's cursor."""
    query = Query(head.query)
    listing = query.text("listing")
    size = query.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT
    if listing is None:
        command: Command = commands.ListBoxes(query.text("prefix") or "", query.text("after") or "", size)
    else:
        command = commands.ListSortedBoxes(
            listing=listing,
            offset=query.number("offset") or 0,
            limit=size,
            prefixes=tuple(orjson.loads(query.text("prefixes") or '[""]')),
            kind=query.text("kind") or "",
            durability=query.text("durability") or "",
            text=query.text("q") or "",
            sort=query.text("sort") or "name",
            is_descending=query.text("order") == "desc",
        )
    query.reject_unknown()
    return command
