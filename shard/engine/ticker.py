"""Calls the engine at the next deadline of the machine, of a read or of a claim.

After each turn the engine checks whether a deadline is before the next tick (`check_deadlines`). A tick comes
at least every `_TICK_S_MAX` seconds, and then the system clock is observed too (`timekeeper.py`).

Two clocks: deadlines of the machine are in the time of the core, in milliseconds, which may jump. Deadlines
of reads and claims are on trio's clock, which is monotonic.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from shard.engine.replies import Ticket
from shard.engine.waiting_claims import WaitingClaims
from shard.engine.waiting_reads import WaitingReads

#: The longest time between two ticks.
_TICK_S_MAX = 1.0


class Ticker:
    def __init__(
        self,
        now_ms: Callable[[], int],
        next_deadline_ms: Callable[[], int | None],
        observe_clock: Callable[[], None],
        tick: Callable[[int, float], None],
    ) -> None:
        """`next_deadline_ms` returns when the machine needs a tick."""
        self._now_ms = now_ms
        self._next_deadline_ms = next_deadline_ms
        self._observe_clock = observe_clock
        self._tick = tick
        self._wake_event = trio.Event()
        #: The time of the next tick: on trio's clock, and in the time of the core.
        self._at_s = 0.0
        self._at_ms = 0

    def __repr__(self) -> str:
        return f"<Ticker, next at {self._at_ms} ms>"

    def wake(self) -> None:
        """Tick now."""
        self._wake_event.set()

    def tick_by(self, deadline_s: float) -> None:
        if deadline_s < self._at_s:
            self._wake_event.set()

    def check_deadlines(self, claims: WaitingClaims[Ticket]) -> None:
        """Tick earlier if the last turn has set a deadline before the next tick."""
        deadline_ms = self._next_deadline_ms()
        if deadline_ms is not None and deadline_ms < self._at_ms:
            self._wake_event.set()
        if claims:
            due_ms = claims.next_ms()
            if due_ms is not None and due_ms < self._at_s * 1000:
                self._wake_event.set()

    async def run(self, reads: WaitingReads[Ticket], claims: WaitingClaims[Ticket]) -> None:
        while True:
            self._observe_clock()
            now_ms, now_s = self._now_ms(), trio.current_time()
            self._tick(now_ms, now_s)
            next_s = now_s + _TICK_S_MAX
            deadline_ms = self._next_deadline_ms()
            if deadline_ms is not None:
                next_s = min(next_s, now_s + (deadline_ms - now_ms) / 1000)
            if (read_s := reads.next_s) is not None:
                next_s = min(next_s, read_s)
            claims_ms = claims.next_ms()
            if claims_ms is not None:
                next_s = min(next_s, claims_ms / 1000)
            self._at_s = next_s
            self._at_ms = now_ms + round(1000 * (next_s - now_s))
            self._wake_event = trio.Event()
            with trio.move_on_after(max(0.001, next_s - now_s)):
                await self._wake_event.wait()
