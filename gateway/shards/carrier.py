"""Carries parcels from shard to shard: asks each what it has, brings it where it belongs, says how it went.

One task a shard asks, one short task a parcel brings it. The order of an origin's parcels is the order in
which they were given out: each goes onto the link of its destination before the shard is asked again. If
that ever failed, the destination would not take what does not fit, and the source would plan again.

It keeps nothing. Whatever is on the way when it or its link dies is given out anew to the next one, which has
another number, and the destination knows what it has already. One gateway runs it (the first); should a
second one ever do so too, they would get in each other's way and nothing worse.

Bounds: the shards bound what is out, `BYTES_OUT_MAX` each (`shard/core/routers/outbox.py`).
"""

from __future__ import annotations

import itertools
import os

import structlog
import trio

from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import Carried, Collect, Parcel

log = structlog.get_logger()

#: A shard is asked again after this long, so that a lost question is found out.
_WAIT_MS = 20_000
_PAUSE_S = 0.05


class Carrier:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        #: A carrier of its own for every life of a link: whoever asked over an earlier one gets nothing more.
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "big") << 12)
        self._carrying = 0

    def __repr__(self) -> str:
        return f"<Carrier, {self._carrying} parcels on the way>"

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for link in self._dispatch.links:
                nursery.start_soon(self._serve, link, nursery)

    async def _serve(self, link: Link, nursery: trio.Nursery) -> None:
        question = b""
        while True:
            question = question or forwards.encode(Collect(next(self._numbers), _WAIT_MS))
            try:
                answer = await link.call(wire.OP_COLLECT, question, b"")
            except StreamsError as error:  # the shard is away, or not ready yet
                log.debug("nothing collected", shard=link.shard, error=error.code)
                question = b""
                await trio.sleep(_PAUSE_S)
                continue
            given = forwards.decode_parcels(answer.body)
            for parcel in given.parcels:
                nursery.start_soon(self._bring, link, given.shard_life, parcel)

    async def _bring(self, source: Link, shard_life: int, parcel: Parcel) -> None:
        self._carrying += 1
        try:
            carried = forwards.encode(await self._delivered(shard_life, parcel))
            while True:
                try:
                    await source.call(wire.OP_CARRIED, carried, b"")
                    return
                except StreamsError as error:
                    log.debug("an answer was not delivered", origin=parcel.origin, error=error.code)
                if not source.is_up:  # the question was lost with the link too, and is asked anew
                    return
                await trio.sleep(_PAUSE_S)
        finally:
            self._carrying -= 1

    async def _delivered(self, shard_life: int, parcel: Parcel) -> Carried:
        link = self._dispatch.links[self._dispatch.placement.shard_of(parcel.dest)]
        try:
            answer = await link.call(wire.OP_FORWARD, parcel.head, parcel.text)
        except StreamsError as error:
            return Carried(shard_life, parcel.number, None, error.code, error.message)
        return Carried(shard_life, parcel.number, forwards.decode_forwarded(answer.body))
