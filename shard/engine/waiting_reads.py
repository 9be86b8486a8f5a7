"""Queues and serves reads that wait for a record or for their deadline.

    a read that finds no record ──► waits ──► its box shows a record: it is handled again
                                      └─────► its deadline passes: it is handled and answered in any case

`WaitingReads` is the queue; `ReadDelivery` serves it. Under pressure the readers of low-priority boxes are
paced: they are served later, in the order of priorities (v0 §9).

A strong read is answered only with durable records: it is handled again when the current records of its box
are durable, even if the box shows no new record.

Waiting reads are `ReadBox` commands (`Follow`, `Scan` and `ReadStream` are kinds of it), the router relay's
`Collect`, which waits under the name `RELAY` instead of a box, and `AwaitMoves` of a requeue.

Bounds: one entry for each waiting read; gateways and peers bound those. Entries of answered reads are dropped
when they are more than half. Paced boxes are at most as many as boxes with waiting reads.

Invariants
- READ_ENDS_ONCE: a read has one answer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import msgspec
import trio

from shard.core.boxes.priority import HELD_UP_TO, Pacing
from shard.engine.execution import Execution
from shard.engine.fetcher import FetchedPayloads
from shard.engine.replies import DeferredAnswers, Ticket
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Follow, ReadBox
from streams.protocol.messages.forwards import Collect
from streams.protocol.messages.queues import AwaitMoves

#: Deadlines of answered reads, beyond as many as wait, before they are dropped.
_STALE_MIN = 64

#: Retry delay for a read at its deadline whose connection has no room.
_NO_ROOM_S = 0.1

AnyTicket = TypeVar("AnyTicket")


class WaitingRead(msgspec.Struct, Generic[AnyTicket], eq=False):
    command: ReadBox | Collect | AwaitMoves
    ticket: AnyTicket
    #: On trio's clock.
    deadline_s: float
    is_done: bool = False


class WaitingReads(Generic[AnyTicket]):
    __slots__ = ("_by_box", "_by_ticket", "_deadlines", "_order")

    def __init__(self) -> None:
        #: By box, in the order of arrival. Answered reads stay until the box is served or they are many.
        self._by_box: dict[str, list[WaitingRead[AnyTicket]]] = {}
        self._by_ticket: dict[AnyTicket, WaitingRead[AnyTicket]] = {}
        self._deadlines: list[tuple[float, int, WaitingRead[AnyTicket]]] = []
        self._order = itertools.count()

    def __repr__(self) -> str:
        return f"<WaitingReads {len(self)} of {len(self._by_box)} boxes>"

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: AnyTicket) -> bool:
        return ticket in self._by_ticket

    def has(self, box: str) -> bool:
        return box in self._by_box

    def find(self, ticket: AnyTicket) -> WaitingRead[AnyTicket] | None:
        return self._by_ticket.get(ticket)

    def add(self, read: WaitingRead[AnyTicket]) -> None:
        self._by_box.setdefault(read.command.box, []).append(read)
        self._by_ticket[read.ticket] = read
        if len(self._deadlines) > 2 * len(self._by_ticket) + _STALE_MIN:
            self._drop_stale()
        self.set_deadline(read, read.deadline_s)

    def set_deadline(self, read: WaitingRead[AnyTicket], deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, next(self._order), read))

    def put_back(self, box: str, reads: list[WaitingRead[AnyTicket]]) -> None:
        """Put reads back that `take` has removed."""
        self._by_box.setdefault(box, []).extend(reads)

    def take(self, box: str) -> list[WaitingRead[AnyTicket]]:
        """Remove and return all reads of a box, to handle them again."""
        return self._by_box.pop(box, [])

    def end(self, read: WaitingRead[AnyTicket]) -> None:
        """Note that a read is answered or cancelled."""
        assert not read.is_done, "READ_ENDS_ONCE"
        read.is_done = True
        del self._by_ticket[read.ticket]

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, which may be stale."""
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now_s: float) -> Iterator[WaitingRead[AnyTicket]]:
        """Yield the reads at their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            read = heapq.heappop(self._deadlines)[2]
            if not read.is_done:
                yield read

    def drop(self, read: WaitingRead[AnyTicket]) -> None:
        """Remove a read from the queue of its box."""
        waiting = self._by_box.get(read.command.box)
        if waiting is not None:
            waiting[:] = [other for other in waiting if other is not read]
            if not waiting:
                del self._by_box[read.command.box]

    def _drop_stale(self) -> None:
        """Drop entries of answered reads: most are answered long before their deadline."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].is_done]
        heapq.heapify(self._deadlines)
        for box, reads in list(self._by_box.items()):
            reads[:] = [read for read in reads if not read.is_done]
            if not reads:
                del self._by_box[box]


_Read = WaitingRead[Ticket]
_PollCommand = ReadBox | Collect | AwaitMoves


class ReadDelivery:
    def __init__(
        self,
        execution: Execution,
        deferred_answers: DeferredAnswers,
        *,
        on_deadline: Callable[[float], None],
        end_turn: Callable[[], None],
    ) -> None:
        """`on_deadline` schedules a tick for this time, `end_turn` flushes the log and sends answers."""
        self._execution = execution
        self._machine = execution.machine
        self._deferred_answers = deferred_answers
        self._on_deadline = on_deadline
        self._end_turn = end_turn
        self.waiting: WaitingReads[Ticket] = WaitingReads()
        #: By box with strong reads that wait for the disk: the lsn at which to handle them again.
        self._strong: dict[str, int] = {}
        #: True while low-priority delivery is paced. Set by the server, which measures pressure.
        self.is_pacing = False
        self.paced_total = 0
        self._pacing = Pacing()

    def __repr__(self) -> str:
        return f"<ReadDelivery {self.waiting!r}, {self.paced_boxes} boxes paced>"

    def park(self, command: _PollCommand, ticket: Ticket) -> None:
        """Park a read that found no record."""
        read = WaitingRead(command, ticket, trio.current_time() + command.wait_ms / 1000)
        self.waiting.add(read)
        self._note_strong([read])
        self._on_deadline(read.deadline_s)

    def forget(self, ticket: Ticket) -> bool:
        """Remove a read that its client has cancelled. Return False if it does not wait."""
        read = self.waiting.find(ticket)
        if read is None:
            return False
        self.waiting.end(read)
        return True

    def wake(self, box: str) -> None:
        """Serve the readers of a box, which may show more records: now, or later if they are paced."""
        if self.waiting.has(box) and not (self.is_pacing and self._hold_back(box)):
            self.serve(box)

    def serve(self, box: str) -> None:
        waiting = self.waiting.take(box)
        remaining_reads = [read for read in waiting if not self._try(read, read.command, [])]
        if remaining_reads:
            self.waiting.put_back(box, remaining_reads)
            self._note_strong(remaining_reads)

    def serve_due(self, now_s: float) -> None:
        """Answer the reads at their deadline."""
        for read in self.waiting.due(now_s):
            if not self._deferred_answers.has_room(read.ticket):
                self._deferred_answers.add_box(read.command.box)
                self.waiting.set_deadline(read, now_s + _NO_ROOM_S)
            else:
                self._try(read, msgspec.structs.replace(read.command, wait_ms=0), [])
                self.waiting.drop(read)

    # -- strong reads

    def strong_due(self, durable_lsn: int) -> list[str]:
        """Return the boxes whose strong reads can see more records, now that this lsn is durable."""
        if not self._strong:
            return []
        due = [box for box, after in self._strong.items() if after <= durable_lsn]
        for box in due:
            del self._strong[box]
        return due

    def _note_strong(self, reads: list[_Read]) -> None:
        for read in reads:
            if type(read.command) is Follow and read.command.strong:
                box = self._machine.boxes.get(read.command.box)
                if box is not None and box.last_lsn > self._machine.durable_lsn:
                    self._strong.setdefault(box.name, box.last_lsn)

    # -- delivery under pressure (v0 §9)

    def _hold_back(self, name: str) -> bool:
        """Pace the readers of a low-priority box. Return True if they are served later."""
        now_ms = self._execution.now_ms()
        box = self._machine.boxes.get(name)
        if box is None or box.effective_priority(now_ms) > HELD_UP_TO:
            return False
        self._pacing.hold(name, now_ms)
        self.paced_total += 1
        return True

    @property
    def paced_boxes(self) -> int:
        """The number of boxes whose readers are paced."""
        return len(self._pacing)

    def serve_paced(self, count: int) -> None:
        now_ms = self._execution.now_ms()
        boxes = self._machine.boxes

        def base_of(name: str) -> float:
            return float(boxes[name].effective_priority(now_ms)) if name in boxes else 0.0

        for name in self._pacing.release(count, now_ms, base_of):
            self.serve(name)
        self._end_turn()

    # -- one read

    def _try(self, read: _Read, command: _PollCommand, payloads: FetchedPayloads) -> bool:
        """Handle a read again. Return False if it keeps waiting; True if it is answered or waits for a
        fetch."""
        if read.is_done:
            return True
        if not self._deferred_answers.has_room(read.ticket):
            self._deferred_answers.add_box(command.box)
            return False
        outcome = self._execution.handle(command, payloads, self._execution.now_ms())
        if outcome.needs:
            on_fetched = partial(self._try_again, read, command, payloads)
            self._execution.fetch(outcome.needs[0], command, on_fetched)
            return True
        if outcome.reply is None:
            return False
        self.waiting.end(read)
        self._execution.send_when_ready(outcome, outcome.reply, read.ticket)
        return True

    def _try_again(
        self,
        read: _Read,
        command: _PollCommand,
        payloads: FetchedPayloads,
        error: StreamsError | None,
        more: FetchedPayloads,
    ) -> None:
        """Handle a read again after its data was fetched, or answer it with the error of the fetch."""
        if read.is_done:
            pass  # cancelled meanwhile
        elif error is not None:
            self.waiting.end(read)
            read.ticket.answer(error, 0.0, 0.0)
        elif not self._try(read, command, payloads + more):  # the record was deleted meanwhile
            self.waiting.put_back(command.box, [read])
        self._end_turn()
