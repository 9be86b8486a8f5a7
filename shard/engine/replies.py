"""Parks replies until the log has reached their lsn, and defers answers until their connection has room.

    Outcome ─► waits for no lsn        sent now
            ─► until logged ─────────► sent by `on_logged` or `on_durable` of its lsn
            ─► until durable ────────► sent by `on_durable` of its lsn
            ─► until stored ─────────► sent when the object store has its lsn

`core/durability.py` decides which lsn and stage a reply waits for.

A page is produced only while its connection has room for it (`has_room`). A read or a claim that could be
served but has no room is deferred: it is served again when the connection has room.

A crash loses all parked replies. The client of such a reply does not know the outcome of its command: it
repeats the command, and idempotency keys, fences and seqs prevent a second effect.

Bounds: replies and deferred reads are at most as many as requests in flight, which links and fronts bound.
Deferred boxes are at most as many as boxes with reads or claims that wait.

Invariants
- PARKED_ORDER: a queue of parked replies is ordered by lsn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

from shard.core.machine import Outcome
from shard.core.objects.replication import Uploading
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Command, Reply


class Ticket(Protocol):
    """Receives the reply to one command."""

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None: ...


#: A parked reply: the lsn that it waits for, its ticket, and the reply.
_ParkedReply = tuple[int, Ticket, Reply | StreamsError]
_lsn_of = itemgetter(0)


class ParkedReplies:
    def __init__(self, uploading: Uploading) -> None:
        self._uploading = uploading
        #: Ordered by lsn, then by arrival.
        self._until_logged: deque[_ParkedReply] = deque()
        self._until_durable: deque[_ParkedReply] = deque()
        self._until_uploaded: deque[_ParkedReply] = deque()
        #: How long the last sync and the last write of the log took; each reply has both.
        self._fsync_ms = 0.0
        self._wal_append_ms = 0.0

    def __repr__(self) -> str:
        return f"<ParkedReplies {len(self)}>"

    def __len__(self) -> int:
        return len(self._until_logged) + len(self._until_durable) + len(self._until_uploaded)

    def send_when_ready(self, outcome: Outcome, reply: Reply | StreamsError, ticket: Ticket) -> None:
        """Send a reply now, or park it until the log has reached its lsn and stage."""
        lsn = outcome.waits_for_lsn
        if not lsn:
            ticket.answer(reply, 0.0, 0.0)
            return
        queue = self._until_durable if outcome.until_durable else self._until_logged
        if outcome.until_uploaded:
            refusal = self._uploading.refusal_error()
            if refusal is not None:  # the store does not answer, and writes are refused for that already
                ticket.answer(refusal, 0.0, 0.0)
                return
            queue = self._until_uploaded
        if not queue or queue[-1][0] <= lsn:
            queue.append((lsn, ticket, reply))
        else:  # it waits for an older lsn than the last parked reply
            queue.insert(bisect_right(queue, lsn, key=_lsn_of), (lsn, ticket, reply))

    def on_logged(self, lsn: int, wal_append_ms: float) -> None:
        self._wal_append_ms = wal_append_ms
        self._release(self._until_logged, lsn, 0.0)

    def on_durable(self, lsn: int, fsync_ms: float, wal_append_ms: float) -> None:
        self._fsync_ms = fsync_ms
        self._wal_append_ms = wal_append_ms
        self._release(self._until_logged, lsn, 0.0)
        self._release(self._until_durable, lsn, fsync_ms)
        if self._until_uploaded:  # some wait for changes that need no upload
            self.on_uploaded()

    def on_uploaded(self) -> None:
        self._release(self._until_uploaded, self._uploading.position, self._fsync_ms)

    def _release(self, queue: deque[_ParkedReply], lsn: int, fsync_ms: float) -> None:
        wal_append_ms = self._wal_append_ms
        while queue and queue[0][0] <= lsn:
            _, ticket, reply = queue.popleft()
            ticket.answer(reply, fsync_ms, wal_append_ms)

    def check(self) -> None:
        """Assert the named invariants. For tests."""
        for queue in (self._until_logged, self._until_durable, self._until_uploaded):
            lsns = [lsn for lsn, _, _ in queue]
            assert lsns == sorted(lsns), "PARKED_ORDER"


class DeferredAnswers:
    """Reads and claims that could be served but whose connection has no room for a page."""

    def __init__(self) -> None:
        #: Returns True if a page may be produced for a ticket. The server replaces it.
        self.has_room: Callable[[Ticket], bool] = _always
        #: Boxes with such reads and claims among the waiting ones.
        self._boxes: dict[str, None] = {}
        #: Reads that have fetched all data that they need.
        self._reads: deque[tuple[Command, Ticket]] = deque()

    def __repr__(self) -> str:
        return f"<DeferredAnswers of {len(self._boxes)} boxes, {len(self._reads)} reads>"

    def __bool__(self) -> bool:
        return bool(self._boxes or self._reads)

    def add_box(self, box: str) -> None:
        self._boxes[box] = None

    def add_read(self, command: Command, ticket: Ticket) -> None:
        self._reads.append((command, ticket))

    def take_boxes(self) -> dict[str, None]:
        boxes, self._boxes = self._boxes, {}
        return boxes

    def take_reads(self) -> deque[tuple[Command, Ticket]]:
        reads, self._reads = self._reads, deque()
        return reads


def _always(ticket: Ticket) -> bool:
    return True
