"""Runs the steps that copy records between two boxes of this shard (`core/routers/local_copies.py`).

    a turn:  commands ─► early step ─► write of the log ─► replies ─► (posted) step ─► write ─► …
                         └ in the same group as the records that it copies

An early step is short, because the replies of its turn wait for it. Longer steps run after the replies, one
for each pass of the event loop, so that commands get their turns in between.

Two conditions stop the copies. While the log or the memory is close to its limit, they wait: clients come
first. While the disk is nearly full, they go through the relay, so that one place refuses them
(`disk_space.py`); there is no space to gain by being fast. Copies that have arrived are confirmed anyway.

Bounds: one step is posted at a time, and one payload is fetched at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shard.core.machine import Machine
from shard.core.outcome import Outcome
from shard.engine.disk_space import DiskSpace
from shard.engine.execution import Execution
from shard.engine.fetcher import FetchedPayloads
from shard.engine.pressure import Backpressure
from shard.engine.staging import Staging
from streams.protocol.errors import StreamsError
from streams.protocol.messages.forwards import RELAY

#: Copies wait above this part of the limits at which clients wait.
_PRESSURE_PART = 0.5


class LocalCopier:
    def __init__(
        self,
        machine: Machine,
        execution: Execution,
        staging: Staging,
        backpressure: Backpressure,
        disk_space: DiskSpace,
        *,
        wake: Callable[[Collection[str]], None],
        post: Callable[..., object],
        end_turn: Callable[[], None],
    ) -> None:
        """`wake` serves the reads and claims that wait in boxes, `post` runs a callback after the other tasks
        of the event loop, `end_turn` flushes the log and sends answers."""
        self._copies = machine.local_copies
        self._outboxes = machine.forwarding.outboxes
        self._execution = execution
        self._staging = staging
        self._backpressure = backpressure
        self._disk_space = disk_space
        self._wake = wake
        self._post = post
        self._end_turn = end_turn
        #: True while the shard serves: no copy is logged before its start or after its end.
        self.is_on = False
        self._is_posted = False

    def __repr__(self) -> str:
        return f"<LocalCopier {self._copies!r}>"

    def copy_early(self) -> bool:
        """Copy records of this turn before it is written. Return True if readers were served."""
        if not self._copies.is_due:
            return False
        if self._may_copy():
            return self._step(is_early=True)
        if self.is_on and self._copies.can_confirm:
            return self._stage(self._copies.confirm(self._execution.now_ms()))
        return False

    def post_next(self) -> None:
        """Post the next step if there is any left to do."""
        if self._copies.is_due and not self._is_posted and self._may_copy():
            self._is_posted = True
            self._post(self._run_posted)

    def _may_copy(self) -> bool:
        if not self.is_on or self._backpressure.exceeds(_PRESSURE_PART):
            return False
        if self._disk_space.level:
            if self._outboxes.release_local():
                self._wake((RELAY,))
            return False
        return True

    def _run_posted(self) -> None:
        self._is_posted = False
        if self._may_copy():
            self._step(is_early=False)
            self._end_turn()

    def _step(self, *, is_early: bool) -> bool:
        return self._stage(self._copies.step(self._execution.now_ms(), is_early=is_early))

    def _stage(self, outcome: Outcome) -> bool:
        """Log the changes of a step, and start its fetches. Return True if readers were served."""
        if outcome.changes:
            self._staging.log(outcome, sync=outcome.until_durable)
        for missing in outcome.needs:
            self._execution.fetch(missing, None, self._on_fetched)
        if outcome.wakes:
            self._wake(outcome.wakes)
        return bool(outcome.wakes)

    def _on_fetched(self, error: StreamsError | None, payloads: FetchedPayloads) -> None:
        self._copies.resume(error, self._execution.now_ms())
        self._run_posted()
