"""Bounds the memory that request bodies and answers take in a gateway, with a share for each owner.

A gateway has one `MemoryBudget` for bodies and one for answers. Every body or page that can be large has a
`Charge`: it grows before memory is allocated, and gives all of it back when the memory is free again.

An **owner** is a key; or `STRANGERS`, all clients that have not shown a key; or, on a server without keys,
`EVERYONE`.

    owner        may hold
    a key        at most as many bytes as are then still free: one key half of the budget, two keys a third
                 each, n keys 1/(n+1) each. So there is always room for one more owner
    STRANGERS    a sixteenth of the budget: a stranger's body is never waited for
    EVERYONE     the whole budget

**Stalled clients.** A charge that waits for its client says when bytes have moved (`moved`). When somebody
finds no room, charges that have moved fewer than `PROGRESS_BYTES` for `STALLED_S` are ended: those of the
same owner first, then those of the owners that hold most, never those of an owner that holds less. Of one
owner, the charge that has been still for the longest is the first.

Bounds: one entry for each owner that holds something; `WAITING_MAX` tasks wait for room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import trio

from streams.protocol.errors import Throttled
from streams.protocol.reports import BudgetReport

#: No key has such an id: a NUL is in none.
EVERYONE: Final = "\0everyone"
STRANGERS: Final = "\0strangers"

#: The part of a budget that all clients without a key have together.
_STRANGERS_PART: Final = 16
#: A client that moves less than this in `STALLED_S` counts as stalled. It is the rate below which a front
#: gives up a body or an answer in any case, only sooner.
PROGRESS_BYTES: Final = 64 * 1024
STALLED_S: Final = 1.0
#: Tasks that wait for room in one budget; the next one is refused at once.
WAITING_MAX: Final = 1024

OwnerKind = Literal["key", "stranger", "everyone"]


def kind_of(owner: str) -> OwnerKind:
    return "everyone" if owner == EVERYONE else "stranger" if owner == STRANGERS else "key"


class Charge:
    """Bytes of one request or answer that count against the budget of their owner."""

    __slots__ = ("_budget", "_end", "_moved_bytes", "_moved_s", "is_ended", "owner", "size")

    def __init__(self, budget: MemoryBudget, owner: str) -> None:
        self.owner = owner
        self.size = 0
        #: True when the budget has taken the memory back because the client had stalled.
        self.is_ended = False
        self._budget = budget
        self._end: Callable[[], None] | None = None
        self._moved_bytes = 0
        self._moved_s = 0.0

    def __repr__(self) -> str:
        return f"<Charge {self.size} B of {kind_of(self.owner)}{', ended' * self.is_ended}>"

    def grow(self, count: int) -> None:
        """Raises `Throttled` when there is no room, and when this charge has been ended."""
        if not self.try_grow(count):
            raise self._budget.refusal(self.owner, is_stalled=self.is_ended)

    def try_grow(self, count: int) -> bool:
        """Return True if there was room."""
        if self.is_ended or not self._budget.try_take(self.owner, count):
            return False
        self.size += count
        return True

    def force(self, count: int) -> None:
        """Grows without asking: for bytes that exist already and cannot be refused any more."""
        if not self.is_ended:
            self._budget.take_anyway(self.owner, count)
            self.size += count

    def shrink_to(self, size: int) -> None:
        if size < self.size:
            self._budget.give(self.owner, self.size - size)
            self.size = size

    def assign(self, owner: str) -> None:
        """Moves the bytes to another owner. Raises `Throttled` when that one has no room."""
        if owner != self.owner:
            size = self.size
            self.shrink_to(0)
            self.owner = owner
            self.grow(size)

    def watch(self, end: Callable[[], None]) -> None:
        """From now on these bytes wait for a client. `end` disconnects it; it must not wait."""
        self._end = end
        self._moved_s = trio.current_time()
        self._moved_bytes = 0
        self._budget.watched[self] = None

    def moved(self, count: int) -> None:
        """The client has sent or taken so many bytes."""
        self._moved_bytes += count
        if self._moved_bytes >= PROGRESS_BYTES and self in self._budget.watched:
            self._moved_bytes = 0
            self._moved_s = trio.current_time()
            del self._budget.watched[self]
            self._budget.watched[self] = None

    def unwatch(self) -> None:
        """The client has sent or taken all."""
        self._budget.watched.pop(self, None)

    def is_stalled(self, now_s: float) -> bool:
        return now_s - self._moved_s >= STALLED_S

    def end(self) -> None:
        """Takes the memory from a client that has stalled."""
        end, self._end = self._end, None
        self.close()
        self.is_ended = True
        if end is not None:
            end()

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        self._budget.watched.pop(self, None)
        self.shrink_to(0)


class MemoryBudget:
    def __init__(self, bytes_max: int, *, limit: str, what: str) -> None:
        """`limit` names the budget in refusals; `what` says what it holds."""
        self.bytes_max = bytes_max
        self.bytes_used = 0
        #: Refusals and ended charges by kind of owner. Metrics only: no decision depends on them.
        self.refused: dict[str, int] = {"key": 0, "stranger": 0, "everyone": 0}
        self.stalled: dict[str, int] = {"key": 0, "stranger": 0, "everyone": 0}
        #: Charges that wait for their clients, the one that has been still for the longest first.
        self.watched: dict[Charge, None] = {}
        self._limit = limit
        self._what = what
        self._by_owner: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<MemoryBudget {self._limit}: {self.bytes_used} of {self.bytes_max} B>"

    def open(self, owner: str) -> Charge:
        return Charge(self, owner)

    def held_by(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def try_take(self, owner: str, count: int) -> bool:
        """Return True if the bytes are taken; stalled clients are ended where that makes the room."""
        if not self._fits(owner, count):
            self._end_stalled(owner, count)
            if not self._fits(owner, count):
                return False
        self.take_anyway(owner, count)
        return True

    def take_anyway(self, owner: str, count: int) -> None:
        self.bytes_used += count
        self._by_owner[owner] = self._by_owner.get(owner, 0) + count

    def give(self, owner: str, count: int) -> None:
        left = self._by_owner[owner] - count
        if left:
            self._by_owner[owner] = left
        else:
            del self._by_owner[owner]
        self.bytes_used -= count
        assert left >= 0, "a charge gives back what it took"

    def report(self) -> BudgetReport:
        return BudgetReport(bytes=self.bytes_used, refused=self.refused, stalled=self.stalled)

    def refusal(self, owner: str, *, is_stalled: bool = False) -> Throttled:
        kind = kind_of(owner)
        self.refused[kind] += 1
        if is_stalled:
            message = f"{self._what} stalled for {STALLED_S:g} s while others needed the memory; try again"
        elif kind == "key":
            message = (
                f"{self._what} of this key would exceed its share of {self.bytes_max} bytes "
                f"(it holds {self.held_by(owner)}, {self.bytes_max - self.bytes_used} are free); try again"
            )
        elif kind == "stranger":
            message = f"{self._what} of clients without a key take too much memory; send a key or try again"
        else:
            message = f"{self._what} in flight would exceed {self.bytes_max} bytes; try again"
        return Throttled(message, limit=self._limit)

    def _fits(self, owner: str, count: int) -> bool:
        free = self.bytes_max - self.bytes_used - count
        if free < 0:
            return False
        if owner == EVERYONE:
            return True
        held = self._by_owner.get(owner, 0) + count
        if owner == STRANGERS:
            return held <= self.bytes_max // _STRANGERS_PART
        return held <= free

    def _end_stalled(self, owner: str, count: int) -> None:
        """Ends stalled clients until the bytes fit: of this owner first, then of those that hold most."""
        now_s = trio.current_time()
        stalled: list[Charge] = []
        for charge in self.watched:
            if not charge.is_stalled(now_s):
                break  # the others have moved later
            if charge.size:
                stalled.append(charge)
        # The sort is stable: among those of one owner, the oldest comes first.
        stalled.sort(key=lambda charge: (charge.owner != owner, -self.held_by(charge.owner)))
        for charge in stalled:
            if charge.owner != owner and self.held_by(charge.owner) <= self.held_by(owner):
                continue
            self.stalled[kind_of(charge.owner)] += 1
            charge.end()
            if self._fits(owner, count):
                return
