"""Holds moves between boxes while a backup captures the shards one after the other.

A dead letter or a requeued job moves from one box to another. If the destination were captured before it
arrived, and the source after it left, the backup would have it in neither. So a backup first makes all shards
hold moves, then captures each of them, and then releases the hold:

    hold, on all shards ──► capture, one by one ──► release, on all shards
      no move leaves, and moved records stay in their source too, until the release

A hold is not logged: it ends with the process, and with its lease if it is not renewed. Routers are not held:
both boxes of a router keep their records, and a restore compares them (`offline/reconcile.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from shard.core.machine import Machine
from shard.core.outcome import Outcome

log = structlog.get_logger()


class MoveHold:
    """The hold of at most one backup."""

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
        #: The id of the backup that holds moves; "" if none does.
        self._id = ""
        self._wake_up = trio.Event()

    def __repr__(self) -> str:
        return f"<MoveHold {self._id or 'none'}>"

    def begin(self, id: str) -> bool:
        """Hold moves for this backup. Returns False if another backup holds them."""
        if self._id not in ("", id):
            return False
        self._id = id
        self._machine.moves.pause()
        self._wake_up.set()
        return True

    def renew(self, id: str) -> None:
        if id == self._id:
            self._wake_up.set()

    def end(self, id: str) -> None:
        """Release the hold, if this backup has it."""
        if self._id and id == self._id:
            self._id = ""
            self._log_outcome(self._machine.let_moves_go(self._now_ms()))
            self._wake_up.set()

    async def run(self) -> None:
        """End a hold that was not renewed in time."""
        while True:
            await self._wake_up.wait()
            while self._id:
                self._wake_up = trio.Event()
                with trio.move_on_after(self._lease_s) as lease:
                    await self._wake_up.wait()
                if lease.cancelled_caught:
                    log.warning(
                        "a backup did not renew its hold on dead letters; they move again", id=self._id
                    )
                    self.end(self._id)
            self._wake_up = trio.Event()
