"""Fetches data from disk for commands that need it, and handles them again.

    handle ─► needs ─► fetcher ─► on_fetched ─► handle again, with all payloads fetched for it so far
                                                    └─► if it needs more, the cycle repeats

A write blocks later writes to its box until it is done, so that writes keep their order. Reads block nothing.

Bounds: reads fetch at most `_FETCH_BYTES_MAX` at a time from this disk, and as much from the cold store;
further reads wait in a queue. At most one write of each box fetches. Waiting commands are requests in flight,
which links and fronts bound.

Invariants
- ONE_WRITE_FETCHES: at most one write to a box waits for the fetcher.
- FETCHED_BYTES: the counted bytes are those of reads in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shard.core.machine import Missing
from shard.core.transactions.unrendered import NotRendered
from shard.engine.execution import Execution
from shard.engine.fetcher import READ_BYTES, FetchedPayloads, OnFetched, is_in_cold_store
from shard.engine.replies import DeferredAnswers, Ticket
from streams.protocol.errors import StreamsError
from streams.protocol.messages.bulk import Locate, States
from streams.protocol.messages.commands import (
    Command,
    GetRecord,
    GetState,
    GetTail,
    ListBoxes,
    ListSortedBoxes,
    ReadBox,
)
from streams.protocol.messages.forwards import Collect

#: Commands that change nothing, and so wait for no other command.
READS = (ReadBox, GetRecord, GetState, GetTail, ListBoxes, ListSortedBoxes, Collect, Locate, States)

#: Bytes that reads may have in flight at the fetcher, from this disk and from the cold store each. They stay
#: in memory until the reads are answered. Further reads are queued.
_FETCH_BYTES_MAX = 64 << 20


def box_of(command: Command) -> str:
    """Return the box of a command; "" for commands that concern the whole shard."""
    return getattr(command, "box", "")


class _Attempt(NamedTuple):
    """A command that waits for a fetch."""

    command: Command
    ticket: Ticket
    #: All that was fetched for it before.
    payloads: FetchedPayloads


class Refetch:
    def __init__(
        self,
        execution: Execution,
        deferred_answers: DeferredAnswers,
        *,
        handle: Callable[[Command, Ticket, FetchedPayloads], None],
        submit: Callable[[Command, Ticket], None],
        end_turn: Callable[[], None],
    ) -> None:
        """`handle` handles a command, `submit` does so with all checks of a new one, and `end_turn` flushes
        the log and sends answers."""
        self._execution = execution
        self._deferred_answers = deferred_answers
        self._handle = handle
        self._submit = submit
        self._end_turn = end_turn
        #: By box with a write that waits for the fetcher: the writes after it, in the order of arrival.
        self.queued_writes: dict[str, deque[tuple[Command, Ticket]]] = {}
        #: For this disk and for the cold store: bytes that reads have in flight, and reads that are queued.
        self._fetching_bytes = [0, 0]
        self._queued_reads: tuple[deque[tuple[Command, Ticket]], ...] = (deque(), deque())

    def __repr__(self) -> str:
        return f"<Refetch {self._fetching_bytes} B in flight, writes to {len(self.queued_writes)} boxes>"

    def queue_write(self, command: Command, ticket: Ticket) -> bool:
        """Queue a write behind an earlier write to its box that waits. Return False if none waits."""
        if isinstance(command, READS) or box_of(command) not in self.queued_writes:
            return False
        self.queued_writes[box_of(command)].append((command, ticket))
        return True

    def fetch(self, command: Command, ticket: Ticket, missing: Missing, payloads: FetchedPayloads) -> None:
        """Fetch data that a command needs, then handle the command again."""
        attempt = _Attempt(command, ticket, payloads)
        if isinstance(command, READS) and isinstance(missing, NotRendered):
            on_fetched: OnFetched = partial(self._retry_after_render, attempt)
        elif isinstance(command, READS):
            is_cold = is_in_cold_store(missing)
            size = max(READ_BYTES, command.max_bytes if isinstance(command, ReadBox) else 0)
            if self._fetching_bytes[is_cold] >= _FETCH_BYTES_MAX:
                self._queued_reads[is_cold].append((command, ticket))
                return
            self._fetching_bytes[is_cold] += size
            on_fetched = partial(self._retry_read, attempt, is_cold, size)
        else:
            assert box_of(command) not in self.queued_writes, "ONE_WRITE_FETCHES"
            self.queued_writes[box_of(command)] = deque()
            on_fetched = partial(self._retry_write, attempt)
        self._execution.fetch(missing, command, on_fetched)

    def handle_if_room(self, command: Command, ticket: Ticket) -> None:
        """Handle a read, or defer it while its connection has no room for a page."""
        if self._deferred_answers.has_room(ticket):
            self._handle(command, ticket, [])
        else:
            self._deferred_answers.add_read(command, ticket)

    def _retry(self, attempt: _Attempt, error: StreamsError | None, more: FetchedPayloads) -> None:
        if error is not None:
            self._execution.machine.give_up(attempt.command)
            attempt.ticket.answer(error, 0.0, 0.0)
        else:
            self._handle(attempt.command, attempt.ticket, attempt.payloads + more)

    def _retry_if_room(self, attempt: _Attempt, error: StreamsError | None, more: FetchedPayloads) -> None:
        if error is None and not self._deferred_answers.has_room(attempt.ticket):
            self._deferred_answers.add_read(attempt.command, attempt.ticket)
        else:
            self._retry(attempt, error, more)

    def _retry_after_render(
        self, attempt: _Attempt, error: StreamsError | None, more: FetchedPayloads
    ) -> None:
        """Retry a read after more rows are rendered. It fetched nothing, so no bytes are counted for it."""
        self._retry_if_room(attempt, error, more)
        self._end_turn()

    def _retry_read(
        self, attempt: _Attempt, is_cold: bool, size: int, error: StreamsError | None, more: FetchedPayloads
    ) -> None:
        self._fetching_bytes[is_cold] -= size
        assert self._fetching_bytes[is_cold] >= 0, "FETCHED_BYTES"
        self._retry_if_room(attempt, error, more)
        waiting = self._queued_reads[is_cold]
        while waiting and self._fetching_bytes[is_cold] < _FETCH_BYTES_MAX:
            self.handle_if_room(*waiting.popleft())
        self._end_turn()

    def _retry_write(self, attempt: _Attempt, error: StreamsError | None, more: FetchedPayloads) -> None:
        box = box_of(attempt.command)
        queue = self.queued_writes.pop(box)
        self._retry(attempt, error, more)
        while queue and box not in self.queued_writes:
            self._submit(*queue.popleft())
        if queue:  # one of them waits for a fetch now; the rest stays queued behind it
            self.queued_writes[box].extend(queue)
        self._end_turn()
