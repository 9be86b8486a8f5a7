"""Takes snapshots, and releases log files and segments that are not needed any more.

    due: `snapshot_wal_bytes` were written, or `snapshot_interval_ms` have passed
      capture box by box, between turns ─► wait until it is durable in the log ─► write it, in a thread
        ─► log files that neither of the two newest snapshots needs are released
        ─► segments that neither of them names are dropped (`upkeep.py`)

A quiet shard, whose last snapshot was due by time, frees its whole log except the newest file, and returns
free memory to the system.

A crash leaves a `.tmp` file, which the next snapshot drops, or a snapshot whose old log files still exist,
which the next one releases. The log is complete from the older of the two snapshots on.

A full disk is no failure: the snapshot is retried, and the log is retained until one is written. If the disk
fails for another reason, it cannot be trusted with the log either: the shard ends.

Invariants
- SNAPSHOT_DURABLE: a snapshot is written only of changes that are durable in the log.
- NEWEST_STAYS: the newest log file is never released.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio

from shard.core.machine import Machine, Outcome
from shard.core.snapshot_facts import ShardState
from shard.engine.committer import Committer
from shard.engine.settings import EngineSettings
from shard.engine.upkeep import Upkeep
from shard.storage import frames
from shard.storage.files import NO_SPACE
from shard.storage.retention import Retention, names_in
from shard.storage.segments.store import Name
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams import process

log = structlog.get_logger()

#: Log that is retained for unsealed batches although a snapshot covers it: this many times
#: `snapshot_wal_bytes`. Older batches are sealed, or logged again.
_PINNED_FACTOR = 2
_PINNED_FILES_MIN = 4

#: A quiet shard frees its whole log except the newest file, if the log is this many times larger than the
#: batches that must be sealed or logged again for it. So that costs at most an eighth of the written bytes.
_QUIET_FACTOR = 8

#: Memory is returned only if less than this was logged since the last snapshot: returning it blocks the shard
#: for 0.1 s per gigabyte.
_QUIET_BYTES = 8 << 20

#: Boxes that a snapshot captures in one step, a quarter of a millisecond, and the pause between two steps. A
#: hundred thousand boxes take about fourteen seconds.
_BOXES, _REST_S = 32, 0.004

#: How long to wait on a full disk before a snapshot is retried.
_FULL_PAUSE_S = 5.0


class SnapshotKeeper:
    def __init__(
        self,
        machine: Machine,
        files: tuple[Wal, Snapshots],
        committer: Committer,
        upkeep: Upkeep,
        settings: EngineSettings,
        *,
        needs_lsn: int,
        now_ms: Callable[[], int],
        wait_durable: Callable[[int], Awaitable[bool]],
        log_outcome: Callable[[Outcome], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`needs_lsn`: the first lsn that the snapshot of the last recovery needs."""
        self._machine = machine
        self._wal, self._snapshots = files
        self._committer = committer
        self._upkeep = upkeep
        self._settings = settings
        self._now_ms = now_ms
        self._wait_durable = wait_durable
        self._log_outcome = log_outcome
        self._on_failed = on_failed
        self._retention = Retention(needs_lsn)
        self._wal.must_retain = self._retention.needs_frames
        self._memory = process.MemoryReturn()
        self._due_event = trio.Event()
        self._bytes_taken = 0
        #: The lsn of the newest snapshot, or of the one in progress.
        self.lsn_taken = 0
        #: When the state of the newest snapshot was captured; at first, when this object was created.
        self._taken_s = trio.current_time()
        #: True while the disk has no space for a snapshot.
        self._lacks_space = False
        #: True if time made the last snapshot due, and not the bytes written since the one before.
        self._is_quiet = False

    def __repr__(self) -> str:
        return f"<SnapshotKeeper, last of lsn {self.lsn_taken}>"

    @property
    def age_s(self) -> float:
        """Seconds since the newest snapshot; 0 if it contains all changes of the log."""
        if self._machine.lsn == self.lsn_taken:
            return 0.0
        return round(trio.current_time() - self._taken_s, 3)

    @property
    def _bytes_since(self) -> int:
        return self._wal.bytes_written - self._bytes_taken

    def on_durable(self) -> None:
        """Start a snapshot if the log has grown enough."""
        if self._bytes_since >= self._settings.snapshot_wal_bytes:
            self._due_event.set()

    async def run(self) -> None:
        while True:
            with trio.move_on_after(self._settings.snapshot_interval_ms / 1000) as waiting:
                await self._due_event.wait()
            self._is_quiet = waiting.cancelled_caught
            await self._return_memory()
            self._upkeep.wake()  # a quiet shard frees more of its log
            self._due_event = trio.Event()
            if self._machine.lsn == self.lsn_taken:
                if self._retention.is_settled(self._wal.files()[:-1]):
                    # Nothing has changed, and no file waits until the older snapshot is dropped.
                    if self._upkeep.must_sweep_again:
                        self.sweep()
                    continue
                # Another snapshot of this lsn would replace the newest one, and the older one would stay
                # although the segments that it names are dropped. So log a change first.
                self._log_outcome(self._machine.rest(self._now_ms()))
            try:
                if not await self.try_to_take():
                    await trio.sleep(_FULL_PAUSE_S)
                    self._due_event.set()
            except OSError as error:  # a disk that cannot keep a snapshot cannot be trusted with the log
                self._on_failed(error)
                return

    async def _return_memory(self) -> None:
        """Return free memory to the system after a burst."""
        if self._is_quiet and self._bytes_since < _QUIET_BYTES and self._memory.is_worth_it:
            returned_bytes = await trio.to_thread.run_sync(self._memory.run)
            log.info("returned free memory to the system", mebibytes=returned_bytes >> 20)

    async def try_to_take(self, *, rest_s: float = _REST_S) -> bool:
        """Take a snapshot. Return False if the disk has no space for it; then the log is retained."""
        before = self._bytes_taken, self.lsn_taken
        try:
            await self.take(rest_s=rest_s)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._bytes_taken, self.lsn_taken = before
            if not self._lacks_space:
                log.error(
                    "the disk is full: cannot write a snapshot, retrying; free disk space", error=str(error)
                )
            self._lacks_space = True
            return False
        self._lacks_space = False
        return True

    async def take(self, *, rest_s: float = _REST_S) -> None:
        """Capture the state, wait until it is durable in the log, write it, then release old files."""
        self._bytes_taken = self._wal.bytes_written
        taken_s = trio.current_time()
        capture = self._machine.begin_snapshot()
        self.lsn_taken = capture.lsn
        try:
            while capture.step(_BOXES):  # noqa: ASYNC110 (it waits for no condition; it lets other tasks run)
                await trio.sleep(rest_s)
        finally:
            self._machine.end_snapshot(capture)
        state = capture.state()
        if not await self._wait_durable(state.lsn):
            return
        assert state.lsn <= self._machine.durable_lsn, "SNAPSHOT_DURABLE"
        segment_names = await trio.to_thread.run_sync(self._write, state, rest_s)
        self._taken_s = taken_s
        self._retention.note_snapshot(state.needs_lsn, segment_names, state.held)
        self._release()

    def _write(self, state: ShardState, rest_s: float) -> set[Name]:
        self._snapshots.write(state.lsn, frames.encode_state(state, partial(time.sleep, rest_s)))
        return names_in(state)

    def _release(self) -> None:
        for file in self._wal.retained_files():
            if not self._retention.needs_frames(file.first_lsn, file.last_lsn):
                self._committer.files.drop_retained(file.number)
        self.sweep()
        *older, newest = self._wal.files()
        through = self._retention.last_unneeded(older)
        assert through < newest.number, "NEWEST_STAYS"
        if through:
            self._committer.files.release(through)

    def sweep(self) -> None:
        """Let upkeep drop segments that neither a snapshot nor the machine names."""
        segment_names = self._retention.named_segments()
        if segment_names is not None:
            self._upkeep.sweep(segment_names)
        self._upkeep.wake()  # files that are no longer pinned may be dropped

    def pinned_lsn(self) -> int:
        """Return the lsn up to which the log should be freed: upkeep seals older batches or logs them
        again."""
        settings, files = self._settings, self._wal.files()
        older = files[:-1]
        if (
            self._is_quiet
            and _QUIET_FACTOR * self._machine.unsealed_boxes.bytes < len(older) * settings.wal_file_bytes
        ):
            return older[-1].last_lsn
        file_count = _PINNED_FACTOR * settings.snapshot_wal_bytes // settings.wal_file_bytes
        files = files[: -max(_PINNED_FILES_MIN, file_count)]
        return files[-1].last_lsn if files else 0
