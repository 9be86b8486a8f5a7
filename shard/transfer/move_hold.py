"""Holds moves between boxes while a backup captures the shards one after the other.

A dead letter, or a requeued job, is in one box after the other. Were the box that it came to captured before
it came, and the box that it left captured after it left, then the backup would have it in neither. So a
backup first tells all shards to hold, then captures each of them, and then lets go:

    hold, on all shards ──► captured, one by one ──► let go, on all shards
      nothing new leaves, and what has arrived elsewhere stays here too, until they let go

A hold is no fact: it ends with the process, and with its lease if nobody renews it. Routers are not held:
both boxes of a router keep what they have, and a restore compares them (`offline/reconcile.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from shard.core.machine import Machine
from shard.core.outcome import Outcome

log = structlog.get_logger()


class MoveHold:
    def __init__(
        self,
        machine: Machine,
        *,
        now_ms: Callable[[], int],
        log_outcome: Callable[[Outcome], None],
        lease_s: float,
    ) -> None:
        self._machine = machine
        self._now_ms = now_ms
        self._log_outcome = log_outcome
        self._lease_s = lease_s
        #: Of the backup that holds; "" = none.
        self._id = ""
        self._wake_up = trio.Event()

    def __repr__(self) -> str:
        return f"<MoveHold {self._id or 'none'}>"

    def begin(self, id: str) -> bool:
        """Hold for this backup. Returns False if another one holds already."""
        if self._id not in ("", id):
            return False
        self._id = id
        self._machine.moves.hold()
        self._wake_up.set()
        return True

    def renew(self, id: str) -> None:
        if id == self._id:
            self._wake_up.set()

    def end(self, id: str) -> None:
        """Let go, if it is this backup that holds."""
        if self._id and id == self._id:
            self._id = ""
            self._log_outcome(self._machine.let_moves_go(self._now_ms()))
            self._wake_up.set()

    async def run(self) -> None:
        """Ends a hold that nobody has renewed in time."""
        while True:
            await self._wake_up.wait()
            while self._id:
                self._wake_up = trio.Event()
                with trio.move_on_after(self._lease_s) as lease:
                    await self._wake_up.wait()
                if lease.cancelled_caught:
                    log.warning("a backup that held dead letters is gone; they move on", id=self._id)
                    self.end(self._id)
            self._wake_up = trio.Event()
