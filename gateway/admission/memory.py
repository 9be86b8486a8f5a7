"""Bounds the memory of request bodies and answers in a gateway, with a share for each owner.

A gateway has one `MemoryBudget` for bodies and one for answers. Every body or page that can be large has a
`Charge`: it grows before memory is allocated, and gives all of it back when the memory is free again.

An **owner** is a key; or `STRANGERS`, all clients that have not shown a key; or, on a server without keys,
`EVERYONE`.

    owner        may hold
    a key        at most as many bytes as are then still free: one key half of the budget, two keys a third
                 each, n keys 1/(n+1) each. So there is always room for one more owner
    STRANGERS    a sixteenth of the budget, together
    EVERYONE     the whole budget

**Stalled clients.** A charge that waits for its client counts the bytes that the client sends or reads
(`note_progress`). When an owner finds no room, the budget ends charges with less than `PROGRESS_BYTES` of
progress in `STALLED_S`: first those of the same owner, then those of the owners with the most bytes, never
those of an owner with fewer bytes. Within one owner, the charge without progress for longest comes first.

**Waiting for room.** A body that finds no room is refused at once. A request for a page waits (`take`): in
order of arrival for each owner, and owners take turns. After `WAIT_S_MAX` it is refused.

**Forced bytes** (`Charge.force`) belong to answers that can no longer be refused, for example the answer to a
long poll. They may exceed the budget. The budget then reports that it is full (`on_full`) until a quarter of
it is free again; meanwhile the shards produce no pages for this gateway.

Bounds: one entry for each owner with charges; `WAITING_MAX` tasks wait for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import trio

from gateway.admission import inline
from gateway.admission.waiter import Waiter
from streams.protocol.access.keys import Key
from streams.protocol.errors import Throttled
from streams.protocol.telemetry.reports import BudgetReport

#: Not the id of any key: ids contain no NUL.
EVERYONE: Final = "\0everyone"
STRANGERS: Final = "\0strangers"

#: All clients without a key together get one part in this many.
_STRANGERS_PART: Final = 16
#: A client with less progress than this in `STALLED_S` counts as stalled. Below this rate a front gives up a
#: body or an answer in any case, only later.
PROGRESS_BYTES: Final = 64 * 1024
STALLED_S: Final = 1.0
#: How many tasks may wait for room in one budget, and for how long; the next one is refused at once. A
#: gateway has as many connections, and a waiting task holds a kilobyte.
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
    """The bytes of one request or answer, counted against the budget of their owner."""

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
        #: True once the budget has taken the memory back because the client stalled.
        self.is_ended = False
        #: True if it has forced bytes.
        self.is_forced = False
        self._budget = budget
        self._end: Callable[[], None] | None = None
        self._moved_bytes = 0
        self._moved_s = self._since_s = 0.0

    def __repr__(self) -> str:
        return f"<Charge {self.size} B of {kind_of(self.owner)}{', ended' * self.is_ended}>"

    def grow(self, count: int) -> None:
        """Add bytes. Raises `Throttled` if there is no room or if this charge has been ended."""
        if not self.try_grow(count):
            raise self._budget.refusal(self.owner, is_stalled=self.is_ended)

    def try_grow(self, count: int) -> bool:
        """Add bytes if there is room. Returns True if there was."""
        if self.is_ended or not self._budget.try_take(self.owner, count):
            return False
        self.size += count
        return True

    def force(self, count: int) -> None:
        """Add bytes even if there is no room: for bytes that already exist and can no longer be refused."""
        if not self.is_ended:
            self.is_forced = True
            self._budget.take_anyway(self.owner, count)
            self.size += count

    def shrink_to(self, size: int) -> None:
        if size < self.size:
            self._budget.give(self.owner, self.size - size)
            self.size = size

    def assign(self, owner: str) -> None:
        """Move the bytes to another owner. Raises `Throttled` if that owner has no room."""
        if owner != self.owner:
            size = self.size
            self.shrink_to(0)
            self.owner = owner
            self.grow(size)

    def watch(self, end: Callable[[], None]) -> None:
        """Note that these bytes now wait for a client. `end` disconnects the client; it must not block."""
        self._end = end
        self._moved_s = self._since_s = trio.current_time()
        self._moved_bytes = 0
        self._budget.watched_charges[self] = None

    def note_progress(self, count: int) -> None:
        """Note that the client has sent or read `count` bytes."""
        self._moved_bytes += count
        if self._moved_bytes >= PROGRESS_BYTES and self in self._budget.watched_charges:
            self._moved_bytes = 0
            self._moved_s = trio.current_time()
            del self._budget.watched_charges[self]
            self._budget.watched_charges[self] = None

    def unwatch(self) -> None:
        """Note that these bytes no longer wait for a client."""
        self._budget.watched_charges.pop(self, None)

    def is_stalled(self, now_s: float) -> bool:
        return now_s - self._moved_s >= STALLED_S

    def is_slow(self, now_s: float) -> bool:
        """Return True for forced bytes that have waited for their client for `STALLED_S`, with any
        progress."""
        return self.is_forced and now_s - self._since_s >= STALLED_S

    def end(self) -> None:
        """Take the memory back from a stalled client."""
        end, self._end = self._end, None
        self.close()
        self.is_ended = True
        if end is not None:
            end()

    def close(self) -> None:
        """Give all bytes back. May be called twice."""
        self._budget.watched_charges.pop(self, None)
        self.shrink_to(0)

    def __del__(self) -> None:
        """Give the bytes back even if a bug lost the charge without closing it."""
        self.shrink_to(0)


def _ignore(is_full: bool) -> None:
    """Do nothing: the default of `MemoryBudget.on_full`."""


class MemoryBudget:
    def __init__(self, bytes_max: int, *, limit: str, what: str) -> None:
        """`limit` names the budget in refusals; `what` says what it holds."""
        self.bytes_max = bytes_max
        self.bytes_used = 0
        #: Refusals and ended charges by kind of owner. Metrics only: no decision depends on them.
        self.refusal_counts: dict[str, int] = {"key": 0, "stranger": 0, "everyone": 0}
        self.stall_counts: dict[str, int] = {"key": 0, "stranger": 0, "everyone": 0}
        #: Charges that wait for their clients. The one without progress for longest comes first.
        self.watched_charges: dict[Charge, None] = {}
        #: Called with True when the budget is exceeded, and with False when a quarter of it is free again.
        self.on_full: Callable[[bool], None] = _ignore
        self.is_full = False
        self._limit = limit
        self._what = what
        self._by_owner: dict[str, int] = {}
        #: Tasks that wait for room, by owner. The owner whose turn is next comes first.
        self._waiting: dict[str, deque[Waiter]] = {}
        self._waiting_count = 0
        #: True while the first waiting task waits for room in the whole budget, not in its owner's share.
        self._is_short = False
        self._is_letting_in = False

    def __repr__(self) -> str:
        return f"<MemoryBudget {self._limit}: {self.bytes_used} of {self.bytes_max} B>"

    def open(self, owner: str) -> Charge:
        return Charge(self, owner)

    def held_by(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def try_take(self, owner: str, count: int) -> bool:
        """Take bytes if there is room, after ending stalled clients if necessary. Returns True if it did."""
        if not self._fits(owner, count):
            self._end_stalled(owner, count)
            if not self._fits(owner, count):
                return False
        self.take_anyway(owner, count)
        return True

    def take_anyway(self, owner: str, count: int) -> None:
        if not count:
            return  # no entry for an owner without bytes
        self.bytes_used += count
        self._by_owner[owner] = self._by_owner.get(owner, 0) + count
        if self.bytes_used > self.bytes_max and not self.is_full:
            self.is_full = True
            self.on_full(True)

    async def take(self, owner: str, count: int) -> None:
        """Take bytes, and wait for room in a fair order if necessary. Raises `Throttled`."""
        if self._take_unless_others_wait(owner, count):
            return
        if inline.current_run is not None:
            await inline.need_task()
            if self._take_unless_others_wait(owner, count):
                return
        if self._waiting_count >= WAITING_MAX:
            raise self.refusal(owner)
        waiter = Waiter(count)
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._waiting_count += 1
        if not await waiter.wait(partial(self._withdraw, owner, waiter), WAIT_S_MAX):
            raise self.refusal(owner)

    def _take_unless_others_wait(self, owner: str, count: int) -> bool:
        waiting = self._waiting
        must_queue = bool(waiting) and (self._is_short or owner in waiting)
        return not must_queue and self.try_take(owner, count)

    def _withdraw(self, owner: str, waiter: Waiter) -> None:
        line = self._waiting[owner]
        line.remove(waiter)
        self._waiting_count -= 1
        if not line:
            del self._waiting[owner]
        self._let_in()

    def charge(self, owner: str, reserved_bytes: int, size: int) -> Charge | None:
        """Return the charge of an answer of `size` bytes for which `reserved_bytes` were taken before.
        Returns None for a small answer, after giving its bytes back."""
        if size <= SMALL_ANSWER_BYTES:
            if reserved_bytes:
                self.give(owner, reserved_bytes)
            return None
        charge = Charge(self, owner)
        charge.size = reserved_bytes
        if size > reserved_bytes:
            charge.force(size - reserved_bytes)
        else:
            charge.shrink_to(size)
        return charge

    async def run(self) -> None:
        """End stalled clients while tasks wait for room: here or, while the budget is full, in the shards."""
        while True:
            await trio.sleep(_LOOK_S)
            if self._waiting:
                self._let_in(ends_stalled=True)
            if self.is_full:
                self._relieve()

    def _relieve(self) -> None:
        now_s = trio.current_time()
        charges = [charge for charge in self.watched_charges if charge.size and charge.is_stalled(now_s)]
        charges.sort(key=lambda charge: -self.held_by(charge.owner))
        # A key with more than half of the budget exceeds its share: its long polls have forced bytes.
        charges += [
            charge
            for charge in self.watched_charges
            if charge.size
            and charge.is_slow(now_s)
            and kind_of(charge.owner) == "key"
            and self.held_by(charge.owner) > self.bytes_max // 2
        ]
        for charge in charges:
            if not self.is_full:
                return
            if not charge.is_ended:
                self.stall_counts[kind_of(charge.owner)] += 1
                charge.end()

    def _let_in(self, *, ends_stalled: bool = False) -> None:
        """Give room to waiting tasks, one of each owner in turn."""
        if self._is_letting_in:
            return  # a nested call: a stalled client was ended and gives its bytes back
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
                if self._is_short:  # It stays first, so that smaller requests cannot starve it.
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
        remaining = self._by_owner[owner] - count
        if remaining:
            self._by_owner[owner] = remaining
        else:
            del self._by_owner[owner]
        self.bytes_used -= count
        assert remaining >= 0, "a charge gives back what it took"
        if self.is_full and self.bytes_used <= self.bytes_max * 3 // 4:
            self.is_full = False
            self.on_full(False)
        if self._waiting:
            self._let_in()

    def report(self) -> BudgetReport:
        return BudgetReport(bytes=self.bytes_used, refused=self.refusal_counts, stalled=self.stall_counts)

    def refusal(self, owner: str, *, is_stalled: bool = False) -> Throttled:
        kind = kind_of(owner)
        self.refusal_counts[kind] += 1
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
        owner_bytes = self._by_owner.get(owner, 0) + count
        if owner == STRANGERS:
            return owner_bytes <= self.bytes_max // _STRANGERS_PART
        return owner_bytes <= free

    def _end_stalled(self, owner: str, count: int) -> None:
        """End stalled clients until the bytes fit: first those of this owner, then those with the most
        bytes."""
        now_s = trio.current_time()
        charges: list[Charge] = []
        for charge in self.watched_charges:
            if not charge.is_stalled(now_s):
                break  # the others have had later progress
            if charge.size:
                charges.append(charge)
        # The sort is stable: among those of one owner, the oldest comes first.
        charges.sort(key=lambda charge: (charge.owner != owner, -self.held_by(charge.owner)))
        for charge in charges:
            if charge.owner != owner and self.held_by(charge.owner) <= self.held_by(owner):
                continue
            self.stall_counts[kind_of(charge.owner)] += 1
            charge.end()
            if self._fits(owner, count):
                return


def answer_budget(bytes_max: int = ANSWER_BYTES_MAX) -> MemoryBudget:
    """Return the budget of all answers of a gateway that the kernel has not accepted yet."""
    return MemoryBudget(bytes_max, limit="answer_bytes", what="answers that are not read yet")
