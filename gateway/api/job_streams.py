"""Serves `/work`: a stream of jobs, leased to the connection that reads it (v0 §8).

A stream is a loop of long-polling claims. The shard claims the jobs and formats the events. At most one reply
is in flight per stream: the next claim is sent after the client has read the last one, so a client that does
not read gets no more jobs.

When a stream ends for any reason, the gateway reports it to the shard, which releases the stream's leases. If
the gateway dies, its link to the shard closes and the shard releases them too.
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

#: How long a claim waits in the shard. If no job comes, a comment is sent to keep the connection open.
HEARTBEAT_MS = 15_000
#: A client that reads nothing for this long is disconnected, and its leases are released.
_STALL_S = 30.0
#: First lines of the events of the shard that pause and resume a stream.
_PAUSE_EVENTS = (b"event: paused\n", b"event: resumed\n")
#: Timeout for reporting the end of a stream to the shard.
_END_S = 2.0


class JobStreams:
    """Opens the `/work` streams of a gateway. They count against the limit of event streams (v0 §12)."""

    def __init__(self, dispatch: Dispatch, draining: trio.Event, watch: Watch) -> None:
        self._dispatch = dispatch
        self._draining = draining
        self._watch = watch
        self._numbers = itertools.count(1)

    async def open(self, box: str, query: str, key: Key | None = None) -> Response:
        """Open a stream without leases. Raises if the shard rejects the query or the box."""
        slot = self._watch.take_slot(key)
        number = next(self._numbers)
        stream = _JobStream(self._dispatch, self._draining, slot, box, query, number, owner_of(key))
        try:
            await stream.end()  # ends nothing yet: it makes the shard check the box and the query
        except BaseException:
            slot.give_back()
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
        return f"<JobStream {self._box}, {self._query}>"

    async def run(self, sink: Sink) -> None:
        sink.put(sse.opening())
        stall: ClientStalled | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_draining, nursery.cancel_scope)
                self._slot.on_revoked(nursery.cancel_scope.cancel)
                unsent = UnsentCharge(self._dispatch.answers, self._owner, sink)
                try:
                    await self._keep_pushing(sink, unsent)
                except ClientStalled as error:  # a nursery would wrap it in a group
                    stall = error
                finally:
                    unsent.close()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
                try:
                    await self.end()
                except StreamsError:
                    pass  # the box or the shard is gone, and the leases with it
        if stall is not None:
            raise stall

    def close(self) -> None:
        """Release the slot. `run` has ended the leases already."""
        self._slot.give_back()

    async def end(self) -> None:
        await self._dispatch.to_owner(wire.OP_WORK_END, wire.RequestHead(self._box, self._query), b"")

    async def _keep_pushing(self, sink: Sink, unsent: UnsentCharge) -> None:
        query = f"{self._query}&wait_ms={HEARTBEAT_MS}"
        is_paused = False
        while True:
            head = wire.RequestHead(self._box, f"{query}&paused=true" if is_paused else query)
            try:
                answer = await self._dispatch.to_owner(wire.OP_WORK, head, b"")
            except StreamsError as error:
                sink.put(_error_event(error))
                return
            if answer.body.startswith(_PAUSE_EVENTS):
                is_paused = answer.body.startswith(_PAUSE_EVENTS[0])
            sink.put(answer.body or sse.heartbeat(time.time_ns() // 1_000_000))
            unsent.settle()
            await unsent.wait_sent(_STALL_S)

    async def _end_when_draining(self, scope: trio.CancelScope) -> None:
        await self._draining.wait()
        scope.cancel()


def _error_event(error: StreamsError) -> bytes:
    """Format the last event of a failed stream. Workers reconnect unless the box is gone."""
    fields: dict[str, object] = {"code": STATUS_OF[error.code], "error": error.message}
    if error.code in RETRY_AFTER_S:
        fields["retry_after_ms"] = RETRY_AFTER_S[error.code] * 1000
    return sse.event(b"error", orjson.dumps(fields))
