"""Relays copy batches of routers between shards.

One task per shard long-polls the shard for outgoing batches (`Collect`). One short task per batch sends it to
its destination shard and reports the result to the source shard, which advances its position.

Ordering: a batch is written to the destination's link before the next `Collect` is sent, so the batches of
one source arrive in order. If a batch arrives out of order anyway, the destination rejects it and the source
plans again from the destination's position.

State: none. If the relay or a link dies, the source sends every unacknowledged batch again under a new relay
id, and the destination discards the batches it already has. Only the first gateway runs a relay. Two relays
would slow each other down and break nothing.

Limits: each shard bounds its bytes in flight, `BYTES_IN_FLIGHT_MAX` (`shard/core/routers/outbox.py`).
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
from streams.protocol.messages.forwards import Collect, CopyBatch, ReportDelivery

log = structlog.get_logger()

#: How long a `Collect` waits in the shard. The next one finds out that a reply was lost.
_COLLECT_WAIT_MS = 20_000
_RETRY_PAUSE_S = 0.05


class RouterRelay:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        #: A new relay id for each connection of a link: a shard sends nothing more to earlier ids.
        self._relay_ids = itertools.count(int.from_bytes(os.urandom(6), "big") << 12)
        self._in_flight = 0

    def __repr__(self) -> str:
        return f"<RouterRelay, {self._in_flight} batches in flight>"

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for link in self._dispatch.links:
                nursery.start_soon(self._collect, link, nursery)

    async def _collect(self, link: Link, nursery: trio.Nursery) -> None:
        """Long-poll one shard for outgoing batches, and start a task for each."""
        request = b""
        while True:
            request = request or forwards.encode(Collect(next(self._relay_ids), _COLLECT_WAIT_MS))
            try:
                reply = await link.call(wire.OP_COLLECT, request, b"")
            except StreamsError as error:  # the shard is down, or not ready yet
                log.debug("router relay: collect failed, retrying", shard=link.shard, error=error.code)
                request = b""
                await trio.sleep(_RETRY_PAUSE_S)
                continue
            batches = forwards.decode_collect_reply(reply.body)
            for batch in batches.parcels:
                nursery.start_soon(self._relay, link, batches.shard_life, batch)

    async def _relay(self, source: Link, shard_life: int, batch: CopyBatch) -> None:
        """Deliver one batch and report the result to its source shard."""
        self._in_flight += 1
        try:
            report = forwards.encode(await self._deliver(shard_life, batch))
            while True:
                try:
                    await source.call(wire.OP_REPORT_DELIVERY, report, b"")
                    return
                except StreamsError as error:
                    log.debug(
                        "router relay: report to the source shard failed, retrying",
                        origin=batch.origin,
                        error=error.code,
                    )
                if not source.is_up:  # `_collect` begins again with a new relay id, and gets this batch again
                    return
                await trio.sleep(_RETRY_PAUSE_S)
        finally:
            self._in_flight -= 1

    async def _deliver(self, shard_life: int, batch: CopyBatch) -> ReportDelivery:
        """Send one batch to its destination shard. Returns the report for the source shard."""
        link = self._dispatch.links[self._dispatch.placement.shard_of(batch.dest)]
        try:
            reply = await link.call(wire.OP_FORWARD, batch.head, batch.text)
        except StreamsError as error:
            return ReportDelivery(shard_life, batch.number, None, error.code, error.message)
        return ReportDelivery(shard_life, batch.number, forwards.decode_forward_reply(reply.body))
