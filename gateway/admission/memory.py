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

**Stalled clients.** A charge that waits for its client notes each byte that moves (`note_progress`). When an
owner finds no room, charges that moved fewer than `PROGRESS_BYTES` in `STALLED_S` are ended: those of the
same owner first, then those of the owners that hold most, never those of an owner that holds less. Of one
owner, the charge that has been still for the longest is the first.

**Waiting for room.** A body that finds no room is refused at once; a request for a page waits (`take`), first
come, first served for each owner, and owners take turns. After `WAIT_S_MAX` it is refused.

**Bytes that nobody asked for room** (`Charge.force`) are answers that cannot be refused any more: what a long
poll brings in the end, for one. They are counted, and a budget that is exceeded says so (`on_full`) until a
quarter of it is free again: meanwhile the shards produce no pages for this gateway.

Bounds: one entry for each owner that holds something; `WAITING_MAX` tasks wait for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import trio

from gateway.admission.waiter import Waiter
from streams.protocol.access.keys import Key
from streams.protocol.errors import Throttled
from streams.protocol.telemetry.reports import BudgetReport

#: No key has such an id: a NUL is in none.
EVERYONE: Final = "\0everyone"
STRANGERS: Final = "\0strangers"

#: The part of a budget that all clients without a key have together.
_STRANGERS_PART: Final = 16
#: A client that moves less than this in `STALLED_S` counts as stalled. It is the rate below which a front
#: gives up a body or an answer in any case, only sooner.
PROGRESS_BYTES: Final = 64 * 1024
STALLED_S: Final = 1.0
#: Tasks that wait for room in one budget, and for how long; the next one is refused at once. A gateway has
#: as many connections, and one that waits holds a kilobyte.
WAITING_MAX: Final = 10_000
WAIT_S_MAX: Final = 5.0
#: How often a budget that has too little room looks for stalled clients.
_LOOK_S: Final = 0.25
#: A page or an answer up to this size is not charged: on all 10,000 connections together they are 160 MB.
SMALL_ANSWER_BYTES: Final = 16 * 1024
#: Four pages of 8 MiB each for eight readers, or 128 of the default size for each of two keys.
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024

OwnerKind = Literal["key", "stranger", "everyone"]


def owner_of(key: Key | None) -> str:
    return EVERYONE if key is None else key.id


def kind_of(owner: str) -> OwnerKind:
    return "everyone" if owner == EVERYONE else "stranger" if owner == STRANGERS else "key"


class Charge:
    """Bytes of one request or answer that count against the budget of their owner."""

    __slots__ = (
        "_budget",
        "_end",
        "_moved_bytes",
        "_moved_s",
        "_since_s",
        "is_ended",
        "is_forced",
        "owner",
        "size",
    )

    def __init__(self, budget: MemoryBudget, owner: str) -> None:
        self.owner = owner
        self.size = 0
        #: True when the budget has taken the memory back because the client had stalled.
        self.is_ended = False
        #: True when its bytes were taken without asking for room.
        self.is_forced = False
        self._budget = budget
        self._end: Callable[[], None] | None = None
        self._moved_bytes = 0
        self._moved_s = self._since_s = 0.0

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
            self.is_forced = True
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
        self._moved_s = self._since_s = trio.current_time()
        self._moved_bytes = 0
        self._budget.watched[self] = None

    def note_progress(self, count: int) -> None:
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

    def is_slow(self, now_s: float) -> bool:
        """True if it is forced, and has had its time however much has moved."""
        return self.is_forced and now_s - self._since_s >= STALLED_S

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

    def __del__(self) -> None:
        """A charge that a bug has lost does not take its room with it."""
        self.shrink_to(0)


def _ignore(is_full: bool) -> None:
    """For a budget of which nobody wants to know whether it is full."""


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
        #: Called with True when more than the budget is in use, with False when a quarter is free again.
        self.on_full: Callable[[bool], None] = _ignore
        self.is_full = False
        self._limit = limit
        self._what = what
        self._by_owner: dict[str, int] = {}
        #: Tasks that wait for room, by owner; the owner whose turn is next stands first.
        self._waiting: dict[str, deque[Waiter]] = {}
        self._waiting_count = 0
        #: True while the first in line waits for the others, not for its own share.
        self._is_short = False
        self._is_letting_in = False

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
        if not count:
            return  # there is an entry for each owner that holds something, and for no other
        self.bytes_used += count
        self._by_owner[owner] = self._by_owner.get(owner, 0) + count
        if self.bytes_used > self.bytes_max and not self.is_full:
            self.is_full = True
            self.on_full(True)

    async def take(self, owner: str, count: int) -> None:
        """Takes bytes, waiting for room in a fair order. Raises `Throttled`. It waits only if it must."""
        waiting = self._waiting
        must_queue = bool(waiting) and (self._is_short or owner in waiting)
        if not must_queue and self.try_take(owner, count):
            return
        if self._waiting_count >= WAITING_MAX:
            raise self.refusal(owner)
        waiter = Waiter(count)
        waiting.setdefault(owner, deque()).append(waiter)
        self._waiting_count += 1
        if not await waiter.wait(partial(self._withdraw, owner, waiter), WAIT_S_MAX):
            raise self.refusal(owner)

    def _withdraw(self, owner: str, waiter: Waiter) -> None:
        line = self._waiting[owner]
        line.remove(waiter)
        self._waiting_count -= 1
        if not line:
            del self._waiting[owner]
        self._let_in()

    def charge(self, owner: str, taken: int, size: int) -> Charge | None:
        """The charge of an answer of `size` bytes for which `taken` were taken; None if it is small."""
        if size <= SMALL_ANSWER_BYTES:
            if taken:
                self.give(owner, taken)
            return None
        charge = Charge(self, owner)
        charge.size = taken
        if size > taken:
            charge.force(size - taken)
        else:
            charge.shrink_to(size)
        return charge

    async def run(self) -> None:
        """Ends stalled clients for as long as tasks wait for room, here or, while the budget is full, in the
        shards."""
        while True:
            await trio.sleep(_LOOK_S)
            if self._waiting:
                self._let_in(ends_stalled=True)
            if self.is_full:
                self._relieve()

    def _relieve(self) -> None:
        now_s = trio.current_time()
        found = [charge for charge in self.watched if charge.size and charge.is_stalled(now_s)]
        found.sort(key=lambda charge: -self.held_by(charge.owner))
        # A key that holds more than half has more than its share: its long polls have brought that.
        found += [
            charge
            for charge in self.watched
            if charge.size
            and charge.is_slow(now_s)
            and kind_of(charge.owner) == "key"
            and self.held_by(charge.owner) > self.bytes_max // 2
        ]
        for charge in found:
            if not self.is_full:
                return
            if not charge.is_ended:
                self.stalled[kind_of(charge.owner)] += 1
                charge.end()

    def _let_in(self, *, ends_stalled: bool = False) -> None:
        """Gives room to tasks that wait, one of each owner in turn."""
        if self._is_letting_in:
            return  # a stalled client that is ended gives its bytes back
        self._is_letting_in = True
        waiting = self._waiting
        has_moved = True
        while has_moved and waiting:
            has_moved = self._is_short = False
            for owner in list(waiting):
                line = waiting.get(owner)
                if line is None:
                    continue
                waiter, count = line[0], line[0].size
                has_taken = (self.try_take if ends_stalled else self._take_if_fits)(owner, count)
                if not line or line[0] is not waiter:  # it was ended as a stalled client, and withdrawn
                    has_moved = True
                    if has_taken:
                        self.give(owner, count)
                    continue
                del waiting[owner]
                if has_taken:
                    line.popleft()
                    self._waiting_count -= 1
                    has_moved = True
                    waiter.grant()
                elif self.bytes_max - self.bytes_used < count:
                    self._is_short = True
                if self._is_short:  # It stays the first: smaller ones must not pass it by for ever.
                    others = list(waiting.items())
                    waiting.clear()
                    waiting[owner] = line
                    waiting.update(others)
                    break
                if line:
                    waiting[owner] = line
            if self._is_short:
                break
        self._is_letting_in = False

    def _take_if_fits(self, owner: str, count: int) -> bool:
        if self._fits(owner, count):
            self.take_anyway(owner, count)
            return True
        return False

    def give(self, owner: str, count: int) -> None:
        if not count:
            return
        left = self._by_owner[owner] - count
        if left:
            self._by_owner[owner] = left
        else:
            del self._by_owner[owner]
        self.bytes_used -= count
        assert left >= 0, "a charge gives back what it took"
        if self.is_full and self.bytes_used <= self.bytes_max * 3 // 4:
            self.is_full = False
            self.on_full(False)
        if self._waiting:
            self._let_in()

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


def answer_budget(bytes_max: int = ANSWER_BYTES_MAX) -> MemoryBudget:
    """The budget of all answers of a gateway that are produced and not with the kernel yet."""
    return MemoryBudget(bytes_max, limit="answer_bytes", what="answers that are not read yet")
