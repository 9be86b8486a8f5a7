"""Sends a command to the shard that owns its box, or to every shard and merges the answers. No HTTP here.

Every request of a gateway to a shard goes through here, or directly over one of its links:

    to_owner   one command to the owner of its box (`placement.py`), over one of its links (`links.py`)
    append     one append to its owner, after a wait in the append limiter (`admission/append_limiter.py`)
    to_all     one command to every shard; returns each answer or error, so that no shard is missing silently

Three links to each shard: `links` for most requests, `urgent` for requests that must not wait behind the
appends of others (urgent appends, live reads of `gateway/watch/feeds.py`), `bulk` for requests with large
answers.

Bounds: `answers` bounds the memory of answers in this gateway. While it is full, shards produce no pages for
this gateway. `append_limiters` and `page_windows` bound the appends and pages in flight to one shard.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from math import inf
from typing import Any
from urllib.parse import urlencode

import msgspec
import orjson
import trio

from gateway.admission.append_limiter import AppendLimiter, PageWindow
from gateway.admission.memory import EVERYONE, answer_budget
from gateway.requests.request import Buffer
from gateway.shards.links import Link
from gateway.shards.placement import Placement
from gateway.shards.process_states import REASONS
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, ShardUnavailable, StreamsError
from streams.protocol.messages import queues
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.messages.query import Query
from streams.protocol.messages.replies import GroupPage
from streams.protocol.model.names import quote
from streams.protocol.telemetry.pressure import Thresholds

_encode_head = wire.head_encoder.encode
_decode_groups = msgspec.json.Decoder(queues.ListGroupsResult).decode

#: How long a readiness probe waits for a shard: orchestrators give up after a second or two.
_DESCRIBE_S = 1.0
#: Fields of an error that explain why a shard does not answer.
_EXPLAINING = frozenset(("reason", "next_step"))
_UNANSWERED = {"reason": "silent", "next_step": REASONS["silent"][1]}


class Dispatch:
    def __init__(
        self,
        placement: Placement,
        links: list[Link],
        thresholds: Thresholds | None = None,
        urgent: list[Link] | None = None,
        bulk: list[Link] | None = None,
    ) -> None:
        self.placement = placement
        self.links = links
        #: By shard too: for requests that must not wait behind the appends of others.
        self.urgent = urgent or links
        #: By shard too: for requests with large answers, so that other answers do not wait behind them.
        self.bulk = bulk or links
        #: Memory budget of answers. While it is exceeded, shards produce no pages for this gateway.
        self.answers = answer_budget()
        self.answers.on_full = self._hold_pages
        #: By shard: appends and requests for pages wait here while too many are in flight.
        self.append_limiters = [AppendLimiter(thresholds or Thresholds()) for _ in links]
        self.page_windows = [PageWindow() for _ in links]

    def __repr__(self) -> str:
        return f"<Dispatch {self.placement!r}, {sum(link.is_up for link in self.links)} links up>"

    def _hold_pages(self, is_full: bool) -> None:
        for link in {*self.links, *self.urgent, *self.bulk}:
            link.hold_pages(is_full)

    async def to_owner(
        self, op: int, head: wire.RequestHead, body: Buffer, *, is_bulk: bool = False
    ) -> wire.Message:
        links = self.bulk if is_bulk else self.links
        return await links[self.placement.shard_of(head.box)].call(op, _encode_head(head), body)

    async def append(
        self,
        head: wire.RequestHead,
        body: Buffer,
        waited_s: float = 0.0,
        *,
        owner: str = EVERYONE,
        is_urgent: bool = False,
    ) -> tuple[wire.Message, float]:
        """Send an append when its owner's turn has come. Returns the answer and how many seconds the append
        has waited, including the `waited_s` of the caller."""
        shard = self.placement.shard_of(head.box)
        limiter = self.append_limiters[shard]
        size = len(body)
        waited_s += await limiter.enter(owner, size, is_urgent=is_urgent)
        try:
            link = (self.urgent if is_urgent else self.links)[shard]
            return await link.call(wire.OP_APPEND, _encode_head(head), body), waited_s
        finally:
            if is_urgent:
                limiter.leave_urgent(size)
            else:
                limiter.leave(size)

    async def to_all(
        self, op: int, head: wire.RequestHead, within_s: float = inf
    ) -> list[wire.Message | StreamsError]:
        """Send a command to every shard. Returns the answer or the error of each, in the order of the
        shards."""
        answers: list[wire.Message | StreamsError] = [
            ShardUnavailable(f"shard {at} did not answer in time", shard=at, **_UNANSWERED)
            for at in range(len(self.links))
        ]
        head_bytes = _encode_head(head)

        async def ask(at: int, link: Link) -> None:
            try:
                answers[at] = await link.call(op, head_bytes, b"")
            except StreamsError as error:
                answers[at] = error

        with trio.move_on_after(within_s):
            async with trio.open_nursery() as nursery:
                for at, link in enumerate(self.links):
                    nursery.start_soon(ask, at, link)
        return answers

    async def list_groups(self, box: str, query: str) -> GroupPage:
        """Return one page of a box's groups, sorted by name (v0 §10)."""
        params = Query(query)
        size = params.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT
        each = {
            "prefix": params.text("prefix") or "",
            "after": name_of(params.text("cursor")),
            "page_size": size,
        }
        params.reject_unknown()
        answer = await self.to_owner(wire.OP_LIST_GROUPS, wire.RequestHead(box, urlencode(each)), b"")
        page = _decode_groups(answer.body)
        return GroupPage(box, page.groups, cursor_of(page.groups[-1].group) if page.more else None)

    async def describe(self) -> list[dict[str, Any]]:
        """Return the state of each shard. One that does not answer within `_DESCRIBE_S` is not reachable."""
        states: list[dict[str, Any]] = []
        for shard, answer in enumerate(await self.to_all(wire.OP_STATS, wire.RequestHead(), _DESCRIBE_S)):
            if isinstance(answer, StreamsError):
                why = {name: text for name, text in answer.detail.items() if name in _EXPLAINING}
                states.append({"shard": shard, "ready": False, "reachable": False, **why})
            else:
                states.append({**orjson.loads(answer.body), "reachable": True})
        return states


def cursor_of(name: str) -> str:
    return urlsafe_b64encode(orjson.dumps([name])).decode().rstrip("=")


def name_of(cursor: str | None) -> str:
    if cursor is None:
        return ""
    try:
        (name,) = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if isinstance(name, str):
            return name
    except ValueError:
        pass
    raise InvalidRequest(f"cursor: {quote(cursor)} is not a cursor this server gave", field="cursor")
