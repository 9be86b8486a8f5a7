"""`/work`: a stream of jobs, leased to the connection that reads it (v0 §8).

The shard claims and words the events; a stream is a loop of claims that wait. It keeps no more than the one
answer that is on its way: the next claim is made when the peer has taken the last, so a peer that does not
read is given nothing.

However a stream ends, the shard is told and frees what the stream held. If this process dies, the link to the
shard closes and says the same.
"""

from __future__ import annotations

import itertools
import time

import orjson
import trio

from gateway.admission.limits import Slot
from gateway.admission.memory import owner_of
from gateway.requests import sse
from gateway.requests.errors import RETRY_AFTER_S, STATUS_OF
from gateway.requests.request import ClientStalled, Response, Sink
from gateway.requests.unsent_charge import UnsentCharge
from gateway.shards.dispatch import Dispatch
from gateway.watch.service import Watch
from streams.protocol import wire
from streams.protocol.access.keys import Key
from streams.protocol.errors import StreamsError

#: A claim of a stream waits this long; a comment is sent when it found nothing, so that the line stays open.
HEARTBEAT_MS = 15_000
#: A peer that has taken nothing for this long is gone, and so are its leases.
_STALL_S = 30.0
#: For telling the shard that a stream has ended.
_END_S = 2.0


class JobStreams:
    """The open `/work` streams of a gateway. They count as event streams do (v0 §12)."""

    def __init__(self, dispatch: Dispatch, draining: trio.Event, watch: Watch) -> None:
        self._dispatch = dispatch
        self._draining = draining
        self._watch = watch
        self._numbers = itertools.count(1)

    async def open(self, box: str, query: str, key: Key | None = None) -> Response:
        """A stream that has leased nothing yet. Raises what is wrong with the request or the box."""
        slot = self._watch.take_slot(key)
        number = next(self._numbers)
        stream = _JobStream(self._dispatch, self._draining, slot, box, query, number, owner_of(key))
        try:
            await stream.end()  # ends nothing yet: it makes the shard check the box and the query
        except BaseException:
            slot.give()
            raise
        return sse.response(stream)


class _JobStream:
    def __init__(
        self,
        dispatch: Dispatch,
        draining: trio.Event,
        slot: Slot,
        box: str,
        query: str,
        number: int,
        owner: str,
    ) -> None:
        self._dispatch = dispatch
        self._owner = owner
        self._slot = slot
        self._draining = draining
        self._box = box
        self._query = f"{query}&stream={number}" if query else f"stream={number}"

    def __repr__(self) -> str:
        return f"<Work of {self._box}, {self._query}>"

    async def run(self, sink: Sink) -> None:
        sink.put(sse.opening())
        stalled: ClientStalled | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_draining, nursery.cancel_scope)
                self._slot.on_revoked(nursery.cancel_scope.cancel)
                unread = UnsentCharge(self._dispatch.answers, self._owner, sink)
                try:
                    await self._keep_pushing(sink, unread)
                except ClientStalled as error:  # kept, for a nursery would wrap it
                    stalled = error
                finally:
                    unread.close()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
                try:
                    await self.end()
                except StreamsError:
                    pass  # the box or the shard is gone, and with it all leases of this stream
        if stalled is not None:
            raise stalled

    def close(self) -> None:
        """Whatever was leased was leased in `run`, which has seen to it."""
        self._slot.give()

    async def end(self) -> None:
        await self._dispatch.to_owner(wire.OP_WORK_END, wire.RequestHead(self._box, self._query), b"")

    async def _keep_pushing(self, sink: Sink, unread: UnsentCharge) -> None:
        head = wire.RequestHead(self._box, f"{self._query}&wait_ms={HEARTBEAT_MS}")
        while True:
            try:
                answer = await self._dispatch.to_owner(wire.OP_WORK, head, b"")
            except StreamsError as error:
                sink.put(_failed(error))
                return
            sink.put(answer.body or sse.heartbeat(time.time_ns() // 1_000_000))
            unread.settle()
            await unread.wait_sent(_STALL_S)

    async def _end_when_draining(self, scope: trio.CancelScope) -> None:
        await self._draining.wait()
        scope.cancel()


def _failed(error: StreamsError) -> bytes:
    """The last event of a stream. A worker connects again, unless the box is gone."""
    told: dict[str, object] = {"code": STATUS_OF[error.code], "error": error.message}
    if error.code in RETRY_AFTER_S:
        told["retry_after_ms"] = RETRY_AFTER_S[error.code] * 1000
    return sse.event(b"error", orjson.dumps(told))
