"""Lets tasks wait until an lsn is durable, or until the log has failed.

Snapshots, uploads, exports and upkeep wait here before they act on a change: a file may be dropped, and
another server may see a change, only when the change is durable.

When the log fails, the shard ends. It answers no more requests, because it does not know which writes are
durable.
"""

from __future__ import annotations

import trio

from shard.core.machine import Machine


class DurableWaits:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        #: Set and replaced each time that more is durable.
        self.advance_event = trio.Event()
        self.failure: BaseException | None = None
        self.failure_event = trio.Event()

    def __repr__(self) -> str:
        return f"<DurableWaits lsn {self._machine.durable_lsn}, failure {self.failure!r}>"

    def advance(self) -> None:
        """Wake the tasks that wait: more is durable."""
        self.advance_event.set()
        self.advance_event = trio.Event()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.failure_event.set()

    async def wait(self, lsn: int) -> bool:
        """Return True when this lsn is durable, False if the log failed first: then the shard must end."""
        while self._machine.durable_lsn < lsn and self.failure is None:
            await wait_for_any(self.advance_event, self.failure_event)
        return self.failure is None


async def wait_for_any(*events: trio.Event) -> None:
    async with trio.open_nursery() as nursery:
        for event in events:
            nursery.start_soon(_end_with, event, nursery.cancel_scope)


async def _end_with(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
