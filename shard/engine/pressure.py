"""Applies backpressure when the log or the memory cannot keep up, and tracks the free space of the disk.

`Backpressure`: servers stop reading while the committer has more than `_BACKLOG_BYTES_MAX` to write, or while
unsealed batches take twice their memory limit. The limits of urgent commands are higher by half. Servers
resume when the committer has less than `RESUME_BYTES` to write.

`SpaceWatch`: measures the free space of the disk, and follows the log, which runs out of space first. Both
determine the level (`disk_space.py`). On a full disk commands are refused before they are handled. Background
tasks wait: snapshots and segments are retried, and the machine gets no ticks while the log has no space.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from shard.core.boxes.unsealed import UnsealedBoxes
from shard.engine.committer import Committer
from shard.engine.disk_space import MEASURE_S, MEASURE_SHORT_S, DiskSpace, Level
from shard.engine.fetcher import Fetcher
from shard.engine.upkeep import Upkeep

#: Bytes submitted to the committer and not yet written. At 500 MB/s this is about a tenth of a second.
_BACKLOG_BYTES_MAX = 48 * 1024 * 1024
RESUME_BYTES = 16 * 1024 * 1024

#: Unsealed batches may take this many times `cache_bytes` before writers are blocked.
_UNSEALED_FACTOR = 2

#: Urgent commands may exceed both limits by this factor, so that they do not wait for others.
_URGENT_FACTOR = 1.5


class Backpressure:
    def __init__(self, committer: Committer, unsealed_batches: UnsealedBoxes, cache_bytes: int) -> None:
        self._committer = committer
        self._unsealed_batches = unsealed_batches
        self._unsealed_bytes_max = _UNSEALED_FACTOR * cache_bytes
        self._resume_event = trio.Event()
        #: True while a server waits.
        self.is_blocking = False

    def __repr__(self) -> str:
        state = "blocking" if self.is_blocking else "open"
        return f"<Backpressure {state}, {self._committer.backlog_bytes} B to write>"

    def exceeds(self, factor: float = 1.0) -> bool:
        """Return True if the backlog or the unsealed memory exceeds its limit times `factor`."""
        if self._committer.waits_for_space:
            return False  # writes are refused, and reads must not wait for the disk to have space
        return (
            self._committer.backlog_bytes > factor * _BACKLOG_BYTES_MAX
            or self._unsealed_batches.bytes > factor * self._unsealed_bytes_max
        )

    async def wait(self, *, is_urgent: bool) -> None:
        """Wait while a limit is exceeded."""
        if self.exceeds(_URGENT_FACTOR if is_urgent else 1.0):
            if not self.is_blocking:
                self.is_blocking, self._resume_event = True, trio.Event()
            await self._resume_event.wait()

    def resume_if_drained(self) -> None:
        """Resume the servers if the backlog is short again. Call it while `is_blocking`."""
        if self._committer.backlog_bytes < RESUME_BYTES and not self.exceeds():
            self.is_blocking = False
            self._resume_event.set()


class SpaceWatch:
    def __init__(
        self,
        disk_space: DiskSpace,
        committer: Committer,
        fetcher: Fetcher,
        upkeep: Upkeep,
        *,
        file_bytes: int,
        on_space_again: Callable[[], None],
    ) -> None:
        """`on_space_again` is called when a full disk has space again."""
        self._disk_space = disk_space
        self._committer = committer
        self._fetcher = fetcher
        self._upkeep = upkeep
        self._file_bytes = file_bytes
        self._on_space_again = on_space_again
        #: Set when the log has run out of space, or has space again.
        self.change_event = trio.Event()

    def __repr__(self) -> str:
        return f"<SpaceWatch {self._disk_space!r}>"

    @property
    def is_log_blocked(self) -> bool:
        """True while the renderer must not log rows of commits."""
        return self._disk_space.level == Level.FULL or self._committer.backlog_bytes > RESUME_BYTES

    def on_log_space(self) -> None:
        """Update the level: the log has run out of space, or has space again."""
        self.update_level()
        self.change_event.set()

    def update_level(self) -> None:
        """Compute the level again, and act on a change."""
        was_full = self._disk_space.level == Level.FULL
        has_changed = self._disk_space.update_level(
            lacks_next_file=self._committer.files.lacks_next_file,
            waits_for_space=self._committer.waits_for_space,
            room_bytes=lambda: self._committer.room_bytes,
            file_bytes=self._file_bytes,
        )
        if has_changed:
            self._upkeep.wake()
        if self._disk_space.level == Level.FULL:  # no rows are rendered until there is space
            self._fetcher.on_rendered(self._fetcher.generations_waiting(), self._disk_space.full_refusal())
        if has_changed and was_full:
            self._on_space_again()

    async def measure(self) -> None:
        await trio.to_thread.run_sync(self._disk_space.measure)

    async def run(self) -> None:
        while True:
            with trio.move_on_after(MEASURE_SHORT_S if self._disk_space.is_short else MEASURE_S):
                await self.change_event.wait()
            self.change_event = trio.Event()
            await self.measure()
            if self._committer.files.lacks_next_file and self._disk_space.may_allocate:
                self._committer.files.prepare()
            self.update_level()
