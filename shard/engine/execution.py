"""Passes a command to the machine, stages its changes for the log, and fetches payloads that it lacks.

Every part of the engine in which commands wait uses this to handle them again: waiting reads and claims, and
commands that need data from disk.
"""

from __future__ import annotations

from collections.abc import Callable

from shard.core.machine import Machine, Missing, Outcome
from shard.engine.cache import PayloadCache
from shard.engine.fetcher import READ_BYTES, FetchedPayloads, Fetcher, OnFetched
from shard.engine.replies import ParkedReplies
from shard.engine.staging import Staging
from streams.protocol.messages.commands import Command, ReadBox


class Execution:
    def __init__(
        self,
        machine: Machine,
        cache: PayloadCache,
        fetcher: Fetcher,
        staging: Staging,
        replies: ParkedReplies,
        now_ms: Callable[[], int],
        wall_ahead_ms: Callable[[int], int] = lambda now_ms: 0,
    ) -> None:
        self.machine = machine
        self.now_ms = now_ms
        self._wall_ahead_ms = wall_ahead_ms
        self.send_when_ready = replies.send_when_ready
        self._cache = cache
        self._fetcher = fetcher
        self._log = staging.log

    def __repr__(self) -> str:
        return f"<Execution on {self.machine!r}>"

    def handle(self, command: Command, payloads: FetchedPayloads, now_ms: int) -> Outcome:
        """Handle a command. `payloads` are those fetched for it so far: the cache may have evicted them."""
        if payloads:
            self._cache.add_all(payloads)
        self.pass_wall_clock(now_ms)
        outcome = self.machine.handle(command, now_ms)
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable and not outcome.is_patient)
        return outcome

    def pass_wall_clock(self, now_ms: int) -> None:
        """Tell the machine how far the system clock is ahead of `now_ms`."""
        self.machine.wall_ahead_ms = self._wall_ahead_ms(now_ms)

    def fetch(self, missing: Missing, command: Command | None, on_fetched: OnFetched) -> None:
        """Fetch data that is not in memory; `on_fetched` is called in this thread."""
        page_bytes = command.max_bytes if isinstance(command, ReadBox) else 0
        self._fetcher.fetch(missing, max(READ_BYTES, page_bytes), on_fetched)
