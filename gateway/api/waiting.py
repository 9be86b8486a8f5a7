"""Questions that a shard may take its time to answer: a diff or a claim with `wait_ms` (v0-api §4.6, §8)."""

from __future__ import annotations

import trio

from gateway.dispatch import Dispatch
from gateway.http import Buffer, Request
from streams.protocol import wire
from streams.protocol.errors import OutcomeUnknown, StreamsError

_WAITS = b"wait_ms"


async def ask(
    dispatch: Dispatch, op: int, request: Request, head: wire.RequestHead, body: Buffer
) -> wire.Message:
    """The owner's answer. Where the body asks to wait, only for as long as whoever asked is there: the shard
    is told, and gives no job to a worker that has gone."""
    watch_peer = request.watch_peer
    if watch_peer is None or op not in wire.WAITING_OPS or _WAITS not in body:
        return await dispatch.to_owner(op, head, body)
    answer: wire.Message | None = None
    refusal: StreamsError = OutcomeUnknown("the client went away while it waited", outcome="unknown")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_peer, nursery.cancel_scope)
        try:
            answer = await dispatch.to_owner(op, head, body)
        except StreamsError as error:  # kept, for a nursery would wrap it
            refusal = error
        nursery.cancel_scope.cancel()
    if answer is None:
        raise refusal
    return answer
