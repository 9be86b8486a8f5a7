"""Charges the unsent bytes of live responses to the budget of answers (`gateway/admission/memory.py`).

Event streams, WebSockets, job streams and S2 sessions each have at most one page in flight. The budget bounds
the total, and the total of each key.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from gateway.admission.memory import SMALL_ANSWER_BYTES, Charge, MemoryBudget
from gateway.requests.request import ClientStalled, Sink


class SharedCharge:
    """A charge for bytes that several clients have not read yet: one copy in memory, charged once."""

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
    """One client's reference to a `SharedCharge`, with the interface of a `Charge`."""

    __slots__ = ("_end", "_shared_charge")

    def __init__(self, shared_charge: SharedCharge) -> None:
        self._shared_charge = shared_charge
        self._end: Callable[[], None] | None = None

    def watch(self, end: Callable[[], None]) -> None:
        self._end = end
        self._shared_charge.watch()

    def note_progress(self, count: int) -> None:
        self._shared_charge.note_progress(count)

    def end(self) -> None:
        if self._end is not None:
            self._end()

    def close(self) -> None:
        self._shared_charge.release(self)


class UnsentCharge:
    """The charge for the unsent bytes of one live response.

    For each page, the producer calls `reserve`, puts the page into the sink, calls `settle` to charge the
    unsent bytes, and calls `wait_sent` before the next page.
    """

    __slots__ = ("_answers", "_charge", "_owner", "_reserved_bytes", "_sink")

    def __init__(self, answers: MemoryBudget, owner: str, sink: Sink) -> None:
        self._answers = answers
        self._owner = owner
        self._sink = sink
        self._reserved_bytes = 0
        self._charge: Charge | _Hold | None = None

    async def reserve(self, count: int) -> None:
        """Wait for memory for a page. Raises `Throttled`."""
        if count > SMALL_ANSWER_BYTES:
            await self._answers.take(self._owner, count)
            self._reserved_bytes += count

    def try_reserve(self, count: int) -> bool:
        """Reserve memory for a page without waiting. Return True on success."""
        if count > SMALL_ANSWER_BYTES:
            if not self._answers.try_take(self._owner, count):
                return False
            self._reserved_bytes += count
        return True

    def settle(self) -> None:
        """Convert the reservation into a charge for the unsent bytes."""
        reserved_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if self._charge is not None:
            self._charge.close()
        self._charge = self._answers.charge(self._owner, reserved_bytes, self._sink.unsent_bytes)

    def share(self, shared_charge: SharedCharge | None, size: int) -> SharedCharge | None:
        """Charge a page that all followers of a feed share: the first client charges it for all."""
        if self._sink.unsent_bytes <= SMALL_ANSWER_BYTES:
            return shared_charge
        if shared_charge is None or not shared_charge.is_open:
            charge = self._answers.charge(self._owner, 0, size)
            if charge is None:
                return None
            shared_charge = SharedCharge(charge)
        hold = shared_charge.hold()  # before the old charge closes: it may be for this page
        if self._charge is not None:
            self._charge.close()
        self._charge = hold
        return shared_charge

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
        """Release the charge: every byte is sent."""
        charge, self._charge = self._charge, None
        if charge is not None:
            charge.close()

    def close(self) -> None:
        self.clear()
        reserved_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if reserved_bytes:
            self._answers.give(self._owner, reserved_bytes)
