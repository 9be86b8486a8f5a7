"""Reads that wait: for a record to come, or for their time to be up.

    a read that finds nothing ──► waits ──► its box shows a record: it is asked again
                                    └─────► its deadline passes: it is asked once more, and answered as it is

What waits here is a `Diff` (`Follow`, `Scan` and `ReadStream` are kinds of it), a `Collect` of the carrier,
which waits under the name `CARRIER` instead of a box, or an `AwaitMoves` of a requeue.

Bounds: one entry for each read that waits; gateways and peers bound those. Entries of reads that are over are
dropped when they are more than half.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from streams.protocol.messages.commands import Diff
from streams.protocol.messages.forwards import Collect
from streams.protocol.messages.queues import AwaitMoves

#: Deadlines of reads that are over, beyond as many as wait, before they are dropped.
_STALE_MIN = 64

AnyTicket = TypeVar("AnyTicket")


class WaitingRead(msgspec.Struct, Generic[AnyTicket], eq=False):
    command: Diff | Collect | AwaitMoves
    ticket: AnyTicket
    #: On trio's clock, as all waits are.
    deadline_s: float
    done: bool = False


class WaitingReads(Generic[AnyTicket]):
    __slots__ = ("_by_box", "_by_ticket", "_deadlines", "_order")

    def __init__(self) -> None:
        #: By box, in the order in which they came. Those that are over stay until they are met or are many.
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
        """Have reads wait on that `take` has taken out."""
        self._by_box.setdefault(box, []).extend(reads)

    def take(self, box: str) -> list[WaitingRead[AnyTicket]]:
        """Take out all reads of a box, to ask them again."""
        return self._by_box.pop(box, [])

    def end(self, read: WaitingRead[AnyTicket]) -> None:
        """Note that a read has its answer, or wants none."""
        assert not read.done, "a read ends once"
        read.done = True
        del self._by_ticket[read.ticket]

    @property
    def next_s(self) -> float | None:
        """When the next read may be due."""
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now_s: float) -> Iterator[WaitingRead[AnyTicket]]:
        """Yield the reads whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            read = heapq.heappop(self._deadlines)[2]
            if not read.done:
                yield read

    def drop(self, read: WaitingRead[AnyTicket]) -> None:
        """Remove a read from the line of its box."""
        waiting = self._by_box.get(read.command.box)
        if waiting is not None:
            waiting[:] = [other for other in waiting if other is not read]
            if not waiting:
                del self._by_box[read.command.box]

    def _drop_stale(self) -> None:
        """Reads are mostly answered long before their time is up, and would be kept until then."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
        heapq.heapify(self._deadlines)
        for box, reads in list(self._by_box.items()):
            reads[:] = [read for read in reads if not read.done]
            if not reads:
                del self._by_box[box]
