"""Relays copy batches of routers between shards.

One task per shard long-polls the shard for outgoing batches (`Collect`), and sends each to its destination
shard. The answer's callback reports the result to the source shard, which advances its position. No batch has
a task of its own, so none waits for one. Copies between two boxes of one shard never come here
(`shard/core/routers/local_copies.py`).

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
from collections import deque

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
        #: Reports that a source shard has not answered. Batches in flight bound them.
        self._failed_reports: deque[tuple[Link, bytes]] = deque()
        self._has_failed = trio.Event()

    def __repr__(self) -> str:
        return f"<RouterRelay, {self._in_flight} batches in flight>"

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._retry_reports)
            for link in self._dispatch.links:
                nursery.start_soon(self._collect, link)

    async def _collect(self, link: Link) -> None:
        """Long-poll one shard for outgoing batches, and send each to its destination shard."""
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
                self._deliver(link, batches.shard_life, batch)

    def _deliver(self, source: Link, shard_life: int, batch: CopyBatch) -> None:
        """Send one batch to its destination shard, whose answer goes to the source shard."""
        self._in_flight += 1

        def report(answer: wire.Message | StreamsError) -> None:
            if isinstance(answer, StreamsError):
                result = ReportDelivery(shard_life, batch.number, None, answer.code, answer.message)
            else:
                result = ReportDelivery(shard_life, batch.number, forwards.decode_forward_reply(answer.body))
            self._report(source, forwards.encode(result))

        dest = self._dispatch.links[self._dispatch.placement.shard_of(batch.dest)]
        try:
            dest.post(wire.OP_FORWARD, batch.head, batch.text, report)
        except StreamsError as error:
            report(error)

    def _report(self, source: Link, report: bytes) -> None:
        """Report the result of a batch to its source shard, again and again until it is answered."""

        def end(answer: wire.Message | StreamsError) -> None:
            # If the link is down, `_collect` begins again with a new relay id, and gets this batch again.
            if isinstance(answer, StreamsError) and source.is_up:
                log.debug(
                    "router relay: report to the source shard failed, retrying",
                    shard=source.shard,
                    error=answer.code,
                )
                self._failed_reports.append((source, report))
                self._has_failed.set()
            else:
                self._in_flight -= 1

        try:
            source.post(wire.OP_REPORT_DELIVERY, report, b"", end)
        except StreamsError as error:
            end(error)

    async def _retry_reports(self) -> None:
        while True:
            await self._has_failed.wait()
            await trio.sleep(_RETRY_PAUSE_S)
            self._has_failed = trio.Event()
            for _ in range(len(self._failed_reports)):
                self._report(*self._failed_reports.popleft())
