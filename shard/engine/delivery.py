"""Handles waiting commands again when their condition is met.

    handled, and ─► needs something from disk ─► `Refetch`         until it is fetched
                 ─► is a read and finds none ──► `ReadDelivery`    until its box has a record, or its deadline
                 ─► is a claim and gets none ──► `ClaimDelivery`   until a job comes, or its deadline
                 ─► has no room for its page ──► `DeferredAnswers` until its connection has room

Each of them owns its queue and its bound. This file dispatches the events that concern all of them: a box may
have more records or jobs (`wake`), a client has disconnected (`forget`), a connection has room again
(`serve_deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shard.core.machine import Outcome
from shard.engine.disk_space import DiskSpace
from shard.engine.execution import Execution
from shard.engine.fetcher import FetchedPayloads
from shard.engine.refetch import Refetch
from shard.engine.replies import DeferredAnswers, Ticket
from shard.engine.ticker import Ticker
from shard.engine.waiting_claims import ClaimDelivery
from shard.engine.waiting_reads import ReadDelivery
from streams.protocol.messages.commands import Command, ReadBox
from streams.protocol.messages.forwards import Collect
from streams.protocol.messages.queues import AwaitMoves, Claim


class Delivery:
    def __init__(
        self,
        execution: Execution,
        disk_space: DiskSpace,
        ticker: Ticker,
        *,
        handle: Callable[[Command, Ticket, FetchedPayloads], None],
        submit: Callable[[Command, Ticket], None],
        end_turn: Callable[[], None],
        post: Callable[..., object],
    ) -> None:
        """`handle` handles a command, `submit` does so with all checks of a new one, `end_turn` flushes the
        log and sends answers, `post` runs a callback after the other tasks of the event loop."""
        self._end_turn = end_turn
        self.deferred_answers = DeferredAnswers()
        self.refetch = Refetch(
            execution, self.deferred_answers, handle=handle, submit=submit, end_turn=end_turn
        )
        self.reads = ReadDelivery(
            execution, self.deferred_answers, on_deadline=ticker.tick_by, end_turn=end_turn
        )
        self.claims = ClaimDelivery(
            execution, self.deferred_answers, disk_space, post=post, wake=self.wake, end_turn=end_turn
        )

    def __repr__(self) -> str:
        return f"<Delivery {self.reads!r}, {self.claims!r}, {self.refetch!r}>"

    def park(self, command: Command, ticket: Ticket, outcome: Outcome, now_ms: int) -> None:
        """Park a read that found no record, or a claim that got no job."""
        if isinstance(command, Claim):
            window_ms = outcome.not_before_ms - now_ms if outcome.not_before_ms else 0
            self.claims.park(command, ticket, window_ms)
        else:
            assert isinstance(command, (ReadBox, Collect, AwaitMoves))
            self.reads.park(command, ticket)

    def wake(self, boxes: Iterable[str]) -> None:
        """Serve the waiting claims and reads of these boxes, which may have more records or jobs."""
        claims, reads = self.claims, self.reads
        for box in dict.fromkeys(boxes):
            if claims.waiting:
                claims.wake(box)
            reads.wake(box)

    def serve_due(self, now_s: float) -> None:
        """Serve reads and claims whose deadline or window has ended."""
        self.claims.serve_due(now_s)
        self.reads.serve_due(now_s)

    def serve_deferred(self) -> None:
        """Serve deferred reads and claims again. Those that still have no room are deferred again."""
        for box in self.deferred_answers.take_boxes():
            if self.claims.waiting:
                self.claims.wake(box)
            self.reads.serve(box)
        for command, ticket in self.deferred_answers.take_reads():
            self.refetch.handle_if_room(command, ticket)
        self._end_turn()

    def forget(self, ticket: Ticket) -> bool:
        """Drop a waiting read or claim that its client has cancelled. Return False if it does not wait: then
        it is answered, or about to be."""
        return self.reads.forget(ticket) or self.claims.waiting.forget(ticket)

    def waits(self, ticket: Ticket) -> bool:
        """Return True while a read waits for a record, or a claim for a job."""
        return ticket in self.reads.waiting or self.claims.waiting.waits(ticket)
