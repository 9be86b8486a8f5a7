"""Joins the machine to the disk: the only caller of `machine`, in one trio task's thread, without a lock.

    submit ─► machine.handle ─► changes ─► committer ─► log
                   │                           │
                 reply ── waits for its lsn ◄──┴── logged(lsn), durable(lsn)

A reply that waits is parked under its lsn and goes out when the committer reports it. A read that has
nothing yet is parked under its box and asked again when the box shows more, or when its time is up.

Rules of the file
- Nothing here decides what a command means; nothing here touches a file but through the committer and the
  snapshot thread.
- When the committer fails, the shard ends: nothing is answered any more, because nothing is known any more.

Bounds: parked replies and reads are at most as many as requests in flight, which the links and fronts bound.
The backlog of the committer is bounded by `is_congested`: servers stop reading while it lasts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog
import trio

from shard.committer import Committer, CommitterStatistics
from shard.core.changes import ShardState
from shard.core.machine import Machine, Outcome
from shard.storage import frames
from shard.storage.snapshot import Snapshots
from shard.storage.wal import FrameParts, Wal
from streams.protocol.commands import Command, Diff, Follow, Reply
from streams.protocol.errors import StreamsError

log = structlog.get_logger()

#: Bytes handed to the committer and not yet in the file. At 500 MB/s this is about a tenth of a second.
_CONGESTED_BYTES = 48 * 1024 * 1024
_RELIEVED_BYTES = 16 * 1024 * 1024

#: The longest the shard goes without looking at its clock.
_TICK_S_MAX = 1.0


class Ticket(Protocol):
    """Whoever waits for a reply."""

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None: ...


#: A reply on hold: the lsn it waits for, its age, who gets it.
_Parked = tuple[int, int, Ticket, Reply | StreamsError]


class _WaitingRead(msgspec.Struct, eq=False):
    command: Diff
    ticket: Ticket
    deadline_ms: int
    done: bool = False


class Engine:
    def __init__(
        self,
        machine: Machine,
        wal: Wal,
        snapshots: Snapshots,
        *,
        now_ms: Callable[[], int],
        sync_interval_ms: int,
        snapshot_wal_bytes: int,
        needs_lsn: int = 0,
    ) -> None:
        self.machine = machine
        self._wal = wal
        self._snapshots = snapshots
        self._now_ms = now_ms
        self._snapshot_wal_bytes = snapshot_wal_bytes
        self._token = trio.lowlevel.current_trio_token()
        self._committer = Committer(
            wal,
            post=self._token.run_sync_soon,
            on_logged=self._on_logged,
            on_durable=self._on_durable,
            on_failed=self._on_failed,
            sync_interval_ms=sync_interval_ms,
        )
        #: Frames of this wake-up that the committer does not have yet, and what their waiters need.
        self._staged: list[FrameParts] = []
        self._staged_sync = False
        self._staged_logged_matters = False
        self._order = itertools.count()
        self._until_logged: list[_Parked] = []
        self._until_durable: list[_Parked] = []
        self._reads: dict[str, list[_WaitingRead]] = {}
        self._read_deadlines: list[tuple[int, int, _WaitingRead]] = []
        #: Boxes with strong reads that wait for the disk: the lsn after which to ask again.
        self._strong: dict[str, int] = {}
        self._fsync_ms = 0.0
        self._wal_append_ms = 0.0
        self._relieved = trio.Event()
        self._relieved.set()
        self._timer_changed = trio.Event()
        self._timer_at_ms = 0
        self._durable_changed = trio.Event()
        self.failure: BaseException | None = None
        self.failed = trio.Event()
        #: Called after replies were handed out, so that servers can send them together.
        self.after_answers: Callable[[], None] = lambda: None
        self._snapshot_wanted = trio.Event()
        self._bytes_at_snapshot = 0
        #: For the snapshots on disk, oldest first: the oldest lsn each one needs.
        self._needs = [0, needs_lsn]

    def __repr__(self) -> str:
        parked = len(self._until_logged) + len(self._until_durable)
        return f"<Engine {self.machine!r}, {parked} replies parked>"

    # -- life

    async def run(
        self, *, boot_id: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Starts the committer and a life of the shard; then keeps time and takes snapshots."""
        self._committer.start()
        outcome = self.machine.start(boot_id=boot_id, now_ms=self._now_ms())
        self._log(outcome, sync=True)
        self.flush()
        if not await self.wait_durable(outcome.waits_for_lsn):
            task_status.started()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._keep_snapshots)
            task_status.started()

    async def stop(self) -> None:
        """Ends the life in order: the last change, a snapshot, the log closed."""
        outcome = self.machine.stop(self._now_ms())
        self._log(outcome, sync=True)
        self.flush()
        if await self.wait_durable(outcome.waits_for_lsn):
            await self._take_snapshot()
        await trio.to_thread.run_sync(self._committer.stop)

    def statistics(self) -> CommitterStatistics:
        return self._committer.statistics()

    # -- commands

    @property
    def is_congested(self) -> bool:
        return self._committer.backlog_bytes > _CONGESTED_BYTES

    async def wait_relieved(self) -> None:
        if self.is_congested:
            self._relieved = trio.Event() if self._relieved.is_set() else self._relieved
            await self._relieved.wait()

    def submit(self, command: Command, ticket: Ticket) -> None:
        """Handles a command. The ticket is answered now or when the reply's promise is kept. Whoever submits
        calls `flush` when it has no more for now."""
        now_ms = self._now_ms()
        outcome = self.machine.handle(command, now_ms)
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable)
        if outcome.reply is None:
            assert isinstance(command, Diff)
            self._park_read(_WaitingRead(command, ticket, now_ms + command.wait_ms))
        else:
            self._settle(outcome, outcome.reply, ticket)
        if outcome.wakes:
            self._wake(outcome.wakes)

    def _settle(self, outcome: Outcome, reply: Reply | StreamsError, ticket: Ticket) -> None:
        lsn = outcome.waits_for_lsn
        if not lsn:
            ticket.answer(reply, 0.0, 0.0)
            return
        parked = (lsn, next(self._order), ticket, reply)
        heapq.heappush(self._until_durable if outcome.until_durable else self._until_logged, parked)

    def _log(self, outcome: Outcome, *, sync: bool) -> None:
        """Notes changes for the log; they leave with the next `flush`."""
        for lsn, change in outcome.changes:
            self._staged.append(frames.encode(lsn, change))
        self._staged_sync = self._staged_sync or sync
        self._staged_logged_matters = self._staged_logged_matters or not outcome.until_durable

    def flush(self) -> None:
        """Logs what one wake-up has staged: a little of it at once, more through the committer's thread."""
        if not self._staged:
            return
        staged, sync, logged_matters = self._staged, self._staged_sync, self._staged_logged_matters
        self._staged = []
        self._staged_sync = self._staged_logged_matters = False
        if not sync and self._committer.append_now(staged):
            self._on_logged(staged[-1][2], self._committer.append_ms_last)
        else:
            self._committer.submit(staged, sync=sync, logged_matters=logged_matters)

    # -- reports of the committer, in this thread

    def _on_logged(self, lsn: int, wal_append_ms: float) -> None:
        self._wal_append_ms = wal_append_ms
        woken = self.machine.logged(lsn)
        self._release(self._until_logged, lsn, 0.0)
        self._after_report(woken)

    def _on_durable(self, lsn: int, fsync_ms: float) -> None:
        self._fsync_ms = fsync_ms
        self._wal_append_ms = self._committer.append_ms_last
        woken = self.machine.durable(lsn)
        if self._strong:
            woken = woken + self._strong_due(lsn)
        self._release(self._until_logged, lsn, 0.0)
        self._release(self._until_durable, lsn, fsync_ms)
        self._after_report(woken)
        self._durable_changed.set()
        self._durable_changed = trio.Event()
        if self._wal.bytes_written - self._bytes_at_snapshot >= self._snapshot_wal_bytes:
            self._snapshot_wanted.set()

    def _on_failed(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()

    def _release(self, parked: list[_Parked], lsn: int, fsync_ms: float) -> None:
        while parked and parked[0][0] <= lsn:
            _, _, ticket, reply = heapq.heappop(parked)
            ticket.answer(reply, fsync_ms, self._wal_append_ms)

    def _after_report(self, woken: list[str]) -> None:
        if woken and self._reads:
            self._wake(woken)
        self.flush()
        if not self._relieved.is_set() and self._committer.backlog_bytes < _RELIEVED_BYTES:
            self._relieved.set()
        self.after_answers()

    # -- reads that wait

    def _park_read(self, read: _WaitingRead) -> None:
        self._reads.setdefault(read.command.box, []).append(read)
        self._note_strong([read])
        heapq.heappush(self._read_deadlines, (read.deadline_ms, next(self._order), read))
        if read.deadline_ms < self._timer_at_ms:
            self._timer_changed.set()

    def _wake(self, boxes: list[str] | tuple[str, ...]) -> None:
        for box in dict.fromkeys(boxes):
            waiting = self._reads.pop(box, None)
            if waiting is not None:
                still = [read for read in waiting if not self._try_read(read, read.command)]
                if still:
                    self._reads.setdefault(box, []).extend(still)
                    self._note_strong(still)

    def _note_strong(self, reads: list[_WaitingRead]) -> None:
        """A strong read is asked again when the disk has what its box has now."""
        for read in reads:
            if type(read.command) is Follow and read.command.strong:
                box = self.machine.boxes.get(read.command.box)
                if box is not None and box.last_lsn > self.machine.durable_lsn:
                    self._strong.setdefault(box.name, box.last_lsn)

    def _strong_due(self, lsn: int) -> list[str]:
        due = [box for box, after in self._strong.items() if after <= lsn]
        for box in due:
            del self._strong[box]
        return due

    def _try_read(self, read: _WaitingRead, command: Diff) -> bool:
        """Whether the read is over."""
        if read.done:
            return True
        outcome = self.machine.handle(command, self._now_ms())
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable)
        if outcome.reply is None:
            return False
        read.done = True
        self._settle(outcome, outcome.reply, read.ticket)
        return True

    # -- time

    async def _keep_time(self) -> None:
        while True:
            now_ms = self._now_ms()
            self._tick(now_ms)
            self.flush()
            self.after_answers()
            next_ms = now_ms + int(_TICK_S_MAX * 1000)
            deadline_ms = self.machine.next_deadline_ms()
            if deadline_ms is not None:
                next_ms = min(next_ms, deadline_ms)
            if self._read_deadlines:
                next_ms = min(next_ms, self._read_deadlines[0][0])
            self._timer_at_ms = next_ms
            self._timer_changed = trio.Event()
            with trio.move_on_after(max(0.001, (next_ms - now_ms) / 1000)):
                await self._timer_changed.wait()

    def _tick(self, now_ms: int) -> None:
        outcome = self.machine.tick(now_ms)
        if outcome.changes:
            self._log(outcome, sync=False)
        if outcome.wakes:
            self._wake(outcome.wakes)
        while self._read_deadlines and self._read_deadlines[0][0] <= now_ms:
            _, _, read = heapq.heappop(self._read_deadlines)
            if not read.done:
                self._try_read(read, msgspec.structs.replace(read.command, wait_ms=0))
                waiting = self._reads.get(read.command.box)
                if waiting is not None:
                    waiting[:] = [other for other in waiting if other is not read]
                    if not waiting:
                        del self._reads[read.command.box]

    async def wait_durable(self, lsn: int) -> bool:
        """Whether it came to that; if not, the log has failed and the shard must end."""
        while self.machine.durable_lsn < lsn and self.failure is None:
            changed = self._durable_changed
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_first_of, changed, nursery.cancel_scope)
                nursery.start_soon(_first_of, self.failed, nursery.cancel_scope)
        return self.failure is None

    # -- snapshots

    async def _keep_snapshots(self) -> None:
        while True:
            await self._snapshot_wanted.wait()
            self._snapshot_wanted = trio.Event()
            try:
                await self._take_snapshot()
            except OSError as error:  # a disk that cannot keep a snapshot cannot be trusted with the log
                self._on_failed(error)
                return

    async def _take_snapshot(self) -> None:
        """State now, on disk once all of it is durable in the log; then old log files may go."""
        state = self.machine.snapshot()
        self._bytes_at_snapshot = self._wal.bytes_written
        if not await self.wait_durable(state.lsn):
            return
        await trio.to_thread.run_sync(self._write_snapshot, state)
        self._needs = [self._needs[-1], state.needs_lsn]
        # The older snapshot must stay usable too, should the newer one turn out to be damaged.
        needed_lsn = min(self._needs)
        through = 0
        for file in self._wal.files()[:-1]:
            if file.last_lsn >= needed_lsn:
                break
            through = file.number
        if through:
            self._committer.release(through)

    def _write_snapshot(self, state: ShardState) -> None:
        self._snapshots.write(state.lsn, frames.encode_state(state))


async def _first_of(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
