"""Charges what live answers have put into their sinks and their clients have not taken yet.

Event streams, WebSockets, streams of jobs and S2 sessions each have one page on its way at most. All of them
together, and those of each key, are held to the budget of answers (`gateway/admission/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from gateway.admission.memory import SMALL_ANSWER_BYTES, Charge, MemoryBudget
from gateway.requests.request import ClientStalled, Sink


class SharedCharge:
    """Bytes that several clients have yet to take: there is one copy of them, and it is charged once."""

    __slots__ = ("_charge", "_holds")

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._holds: dict[_Hold, None] = {}

    def hold(self) -> _Hold:
        hold = _Hold(self)
        self._holds[hold] = None
        return hold

    @property
    def is_open(self) -> bool:
        return bool(self._holds)

    def watch(self) -> None:
        self._charge.watch(self._end_all)

    def note_progress(self, count: int) -> None:
        self._charge.note_progress(count)

    def release(self, hold: _Hold) -> None:
        self._holds.pop(hold, None)
        if not self._holds:
            self._charge.close()

    def _end_all(self) -> None:
        for hold in list(self._holds):
            hold.end()


class _Hold:
    """The part of one client in a `SharedCharge`; it behaves as a `Charge` does."""

    __slots__ = ("_end", "_shared")

    def __init__(self, shared: SharedCharge) -> None:
        self._shared = shared
        self._end: Callable[[], None] | None = None

    def watch(self, end: Callable[[], None]) -> None:
        self._end = end
        self._shared.watch()

    def note_progress(self, count: int) -> None:
        self._shared.note_progress(count)

    def end(self) -> None:
        if self._end is not None:
            self._end()

    def close(self) -> None:
        self._shared.release(self)


class UnsentCharge:
    """What a live answer has put into its sink and its client has not taken yet.

    The owner of the answer reserves room for a page, puts it, settles what is left of it, and waits until it
    is sent before the next page.
    """

    __slots__ = ("_answers", "_charge", "_owner", "_sink", "_taken")

    def __init__(self, answers: MemoryBudget, owner: str, sink: Sink) -> None:
        self._answers = answers
        self._owner = owner
        self._sink = sink
        self._taken = 0
        self._charge: Charge | _Hold | None = None

    async def reserve(self, count: int) -> None:
        """Waits for the room of a page. Raises `Throttled`."""
        if count > SMALL_ANSWER_BYTES:
            await self._answers.take(self._owner, count)
            self._taken += count

    def try_reserve(self, count: int) -> bool:
        """Return True if there was room for a page without waiting."""
        if count > SMALL_ANSWER_BYTES:
            if not self._answers.try_take(self._owner, count):
                return False
            self._taken += count
        return True

    def settle(self) -> None:
        """Charges what is unsent; a reservation ends with that."""
        taken, self._taken = self._taken, 0
        if self._charge is not None:
            self._charge.close()
        self._charge = self._answers.charge(self._owner, taken, self._sink.unsent_bytes)

    def share(self, shared: SharedCharge | None, size: int) -> SharedCharge | None:
        """The same for a page of which all who follow a feed have the same copy, charged by the first."""
        if self._sink.unsent_bytes <= SMALL_ANSWER_BYTES:
            return shared
        if shared is None or not shared.is_open:
            charge = self._answers.charge(self._owner, 0, size)
            if charge is None:
                return None
            shared = SharedCharge(charge)
        hold = shared.hold()  # before the other one is let go, which may be the same page's
        if self._charge is not None:
            self._charge.close()
        self._charge = hold
        return shared

    async def wait_sent(self, stall_s: float) -> None:
        """Wait until every byte is sent. Reservations stay.

        Raises `ClientStalled` after `stall_s` without progress, or sooner if another owner needs the memory.
        """
        charge = self._charge
        if charge is None:
            await self._sink.wait_sent(stall_s)
            return
        with trio.CancelScope() as scope:
            charge.watch(scope.cancel)
            self._sink.charge = charge
            try:
                await self._sink.wait_sent(stall_s)
            finally:
                self._sink.charge = None
        self.clear()
        if scope.cancelled_caught:
            raise ClientStalled

    def clear(self) -> None:
        """All has been sent meanwhile."""
        charge, self._charge = self._charge, None
        if charge is not None:
            charge.close()

    def close(self) -> None:
        self.clear()
        taken, self._taken = self._taken, 0
        if taken:
            self._answers.give(self._owner, taken)
