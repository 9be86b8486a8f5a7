"""Runs a shard: hands commands to the machine, its changes to the log, and its replies to the servers.

Theory of operation
-------------------

One thread runs the event loop, and only that thread calls the machine. So there is no lock around the state.

    server ── submit(command, ticket) ──► machine.handle ──► Outcome
              submit …                        │ changes         │ reply
              flush                           ▼                 ▼
                │                          staging           replies, parked under the lsn they wait for
                └────────► write ◄────────────┘                 ▲
                             │                                  │
                             ▼                                  │
                    append_now, or the committer ───────────────┴── on_logged(lsn), on_durable(lsn)

*A turn* is the work of one wake-up of the event loop. The server submits every command that it has read, then
calls `flush` once: the changes of a turn leave in one write. Copies into other boxes of the shard are made
first, so that they leave with their records (`local_copies.py`). If the write is small and no reply waits for
a sync, this thread writes, because two thread switches would cost more. Otherwise the commit thread writes.

*Group commit.* While the commit thread writes one group, the changes of further turns gather in its backlog.
The next group takes all of them: one write and, if a reply waits for durability, one fsync for all. So groups
grow with the load. Frames for which no reply waits are synced `sync_interval_ms` later, by the sync thread,
beside further writes.

*A reply* names the lsn that it depends on, and the stage: logged, durable or stored (`core/durability.py`
decides). It is parked in the order of lsns, and sent when the committer reports that lsn. A reply that
depends on no new change is sent at once.

*Waiting*

    waits                                for                                           in
    a reply                              its lsn                                       replies
    a read that finds nothing            a record in its box, or its deadline          waiting_reads
    a claim that gets no job             a job, the end of a window, or its deadline   waiting_claims
    a command that needs a payload       the fetcher; then it is handled again         refetch
    a write behind such a write          that write: a box keeps the order             refetch
    a page                               room in its connection (`DeferredAnswers`)    replies
    a server                             the committer, if it has much to write        pressure
    a task (snapshot, upload, upkeep)    an lsn to be durable                          durable_waits

*Threads*

    the event loop               this file, its parts, the machine, the servers. It waits for no disk, except
                                 for a write of at most 128 KiB into the page cache (`append_now`)
    wal-commit, -sync, -files    write, sync, make and drop log files (`committer.py`, `log_files.py`)
    segment-read-0 to -5         read segments of this disk and of the cold store (`fetcher.py`)
    workers of trio              write a snapshot or a segment, upload, measure the free space

Threads report with `run_sync_soon`: a report runs in the event loop between two turns, and ends like a turn
(`_end_turn`): staged changes are flushed and answers are sent.

*Crashes*, by moment, and the files that remain

    before the write             nothing of the turn. No reply of it was sent
    in the middle of a write     a torn tail, which recovery cuts off. No reply was sent
    logged, not durable          everything, if only the process died. A power cut may lose it: replies that
                                 promise no more than "logged" may have been sent, and the next run reports
                                 the lost seqs as tombstones
    durable, reply not sent      everything. The client repeats its command, and an idempotency key answers
    while a snapshot is taken    a `.tmp` file. The log is complete from the older snapshot on
    before old log is released   log that a snapshot covers. Recovery skips it; the next snapshot releases it
    while a segment is written   a file that no change names. Upkeep drops it

*Failure.* When the log cannot be written, or an error ends a thread, `failure_event` is set and the shard
ends. It answers no more requests, because it does not know which writes are durable. A full disk is no
failure (`pressure.py`).

*Time* is an argument of every command and tick (`ticker.py`, `timekeeper.py`).

Rules of the file
- Nothing here decides what a command means, or when a reply may go: the core does.
- Nothing here touches a file, except through the parts.
- Every part owns its state and its bound; the engine passes things from one to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog
import trio

from shard.core.machine import Machine, Outcome
from shard.engine.background import Background, Ports, ShardFiles
from shard.engine.cache import PayloadCache
from shard.engine.committer import CommitFailed, Committer, CommitterStatistics
from shard.engine.delivery import Delivery
from shard.engine.disk_space import DiskSpace, Level
from shard.engine.durable_waits import DurableWaits, wait_for_any
from shard.engine.execution import Execution
from shard.engine.fetcher import FetchedPayloads, Fetcher
from shard.engine.local_copies import LocalCopier
from shard.engine.object_uploader import UploadTarget
from shard.engine.pressure import Backpressure, SpaceWatch
from shard.engine.refetch import READS, box_of
from shard.engine.replies import ParkedReplies, Ticket
from shard.engine.settings import EngineSettings
from shard.engine.staging import Staging
from shard.engine.ticker import Ticker
from shard.recovery.commit_renderer import chunk_reader
from shard.storage.faults import Faults
from shard.storage.files import DiskLike, parent_of
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams.protocol.errors import StreamsError
from streams.protocol.messages.bulk import TxnCommit
from streams.protocol.messages.commands import Command
from streams.protocol.messages.queues import ReleaseHolder
from streams.protocol.messages.s2 import AppendStream
from streams.protocol.telemetry.reports import ObjectsReport

log = structlog.get_logger()

#: Bytes that a commit needs on the disk, per byte of its rows: rendered rows are written to the log, and then
#: into segments.
_RENDERED_FACTOR = 2


class Engine:
    def __init__(
        self,
        machine: Machine,
        wal: Wal,
        snapshots: Snapshots,
        store: SegmentStore,
        *,
        now_ms: Callable[[], int],
        settings: EngineSettings,
        disk: DiskLike,
        export_folder: str,
        needs_lsn: int = 0,
        upload_target: UploadTarget | None = None,
        observe_clock: Callable[[], int] = lambda: 0,
        wall_ahead_ms: Callable[[int], int] = lambda now_ms: 0,
        faults: Faults | None = None,
    ) -> None:
        """`now_ms` reads the time of the core. `observe_clock`, called about once a second, makes it follow
        the system clock (`timekeeper.py`) and returns how many milliseconds it is behind. `upload_target` is
        the object store that gets a copy of object boxes, if the server has one."""
        self.machine = machine
        self._wal = wal
        self._now_ms, self._observe_system_clock = now_ms, observe_clock
        self.faults = faults or Faults()
        self._post = trio.lowlevel.current_trio_token().run_sync_soon
        self._waits = DurableWaits(machine)
        self._committer = self._new_committer(settings)
        self._cache = PayloadCache(settings.cache_bytes)
        self._fetcher = self._new_fetcher(store)
        self.disk_space = DiskSpace(
            disk,
            parent_of(export_folder),
            low_bytes=settings.disk_low_bytes,
            full_bytes=settings.disk_full_bytes,
        )
        self.staging = Staging(machine, self._committer)
        self._replies = ParkedReplies(machine.uploading)
        clocks = now_ms, wall_ahead_ms
        self._execution = Execution(machine, self._cache, self._fetcher, self.staging, self._replies, *clocks)
        self._ticker = Ticker(now_ms, self._next_deadline_ms, self._observe_clock, self._tick)
        self.delivery = Delivery(
            self._execution,
            self.disk_space,
            self._ticker,
            handle=self._handle,
            submit=self.submit,
            end_turn=self._end_turn,
            post=self._post,
        )
        self._refetch = self.delivery.refetch
        self.backpressure = Backpressure(self._committer, machine.unsealed_boxes, settings.cache_bytes)
        self._local_copier = self._new_local_copier()
        files = ShardFiles(disk, wal, snapshots, store, export_folder, upload_target)
        self._background = Background(
            machine, files, self._committer, self._cache, settings, self._ports(needs_lsn)
        )
        self._space = SpaceWatch(
            self.disk_space,
            self._committer,
            self._fetcher,
            self._background.upkeep,
            file_bytes=settings.wal_file_bytes,
            on_space_again=self._on_space_again,
        )
        self.exports = self._background.exports
        self.failure_event = self._waits.failure_event
        self.fsync_times = self._committer.fsync_times
        #: Called after replies were given to their tickets, so that servers send them together.
        self.after_answers: Callable[[], None] = lambda: None

    def _new_committer(self, settings: EngineSettings) -> Committer:
        return Committer(
            self._wal,
            post=self._post,
            on_logged=self._on_logged,
            on_durable=self._on_durable,
            on_failed=self._waits.fail,
            on_space=lambda: self._space.on_log_space(),
            sync_interval_ms=settings.sync_interval_ms,
        )

    def _new_fetcher(self, store: SegmentStore) -> Fetcher:
        return Fetcher(
            self.machine,
            store,
            self._cache,
            read_chunk=chunk_reader(self._wal),
            post=self._post,
            on_failed=self._waits.fail,
            faults=self.faults,
        )

    def _new_local_copier(self) -> LocalCopier:
        return LocalCopier(
            self.machine,
            self._execution,
            self.staging,
            self.backpressure,
            self.disk_space,
            wake=self._wake,
            post=self._post,
            end_turn=self._end_turn,
        )

    def _ports(self, needs_lsn: int) -> Ports:
        return Ports(
            now_ms=self._now_ms,
            wait_durable=self._waits.wait,
            log_outcome=self._log_upkeep,
            log_moves=self._log_moves,
            on_uploaded=self._on_uploaded,
            on_rendered=self._fetcher.on_rendered,
            on_failed=self._waits.fail,
            is_disk_full=lambda: self.disk_space.level == Level.FULL,
            is_log_blocked=lambda: self._space.is_log_blocked,
            needs_lsn=needs_lsn,
            faults=self.faults,
        )

    def __repr__(self) -> str:
        return f"<Engine {self.machine!r}, {len(self._replies)} replies parked>"

    # -- start and stop

    async def run(
        self,
        *,
        boot_id: str,
        cache_survived: bool = True,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Start the threads, log the start of the shard, then run the clock and the background tasks."""
        self._committer.start()
        self._fetcher.start()
        await self._space.measure()
        now_ms = self._now_ms()
        if now_ms < self.machine.last_ms:
            log.warning(
                "the system clock is behind the last change in the log; check the clock. Leases and delays "
                "keep their remaining time, and new records get no time before that of earlier records",
                behind_s=(self.machine.last_ms - now_ms) / 1000,
            )
        outcome = self.machine.start(boot_id=boot_id, now_ms=now_ms, cache_survived=cache_survived)
        self.staging.log(outcome, sync=True)
        self.flush()
        if not await self._wait_durable_or_stuck(outcome.waits_for_lsn):
            task_status.started()
            return
        self._space.update_level()
        self._local_copier.is_on = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._space.run)
            nursery.start_soon(self._ticker.run, self.delivery.reads.waiting, self.delivery.claims.waiting)
            self._background.start(nursery)
            task_status.started()

    async def stop(self) -> None:
        """Stop cleanly: log the last change, take a snapshot, close the log. On a full disk the last two
        steps may be missing; the next start recovers from the log, as after a crash."""
        self._local_copier.is_on = False
        if self._committer.waits_for_space:
            self._fetcher.stop()
            try:
                await trio.to_thread.run_sync(self._committer.stop)
            except CommitFailed as error:
                log.warning(
                    "stopped on a full disk; unacknowledged commands that waited for space are lost",
                    error=str(error),
                )
            return
        uploader = self._background.uploader
        if uploader is not None and await self._waits.wait(self.machine.lsn):
            await uploader.finish()
        outcome = self.machine.stop(self._now_ms())
        self.staging.log(outcome, sync=True)
        self.flush()
        if await self._wait_durable_or_stuck(outcome.waits_for_lsn) and not self._committer.waits_for_space:
            await self._background.snapshots.try_to_take(rest_s=0.0)
        self._fetcher.stop()
        await trio.to_thread.run_sync(self._committer.stop)

    async def _wait_durable_or_stuck(self, lsn: int) -> bool:
        """Wait until an lsn is durable, or the log waits for space. Return False if the log has failed."""
        while self.machine.durable_lsn < lsn and self.failure is None and not self._committer.waits_for_space:
            await wait_for_any(self._waits.advance_event, self._waits.failure_event, self._space.change_event)
        return self.failure is None

    @property
    def failure(self) -> BaseException | None:
        return self._waits.failure

    # -- commands

    def submit(self, command: Command, ticket: Ticket) -> None:
        """Handle a command. Its ticket is answered now, or when the log has reached the stage that the reply
        promises. The server calls `flush` after the last command of a turn."""
        refusal: StreamsError | None
        if self.disk_space.level:
            refusal = self.disk_space.refusal(command, self.machine.boxes.get(box_of(command)))
            if refusal is not None:
                self._refuse(command, ticket, refusal)
                return
        if type(command) is TxnCommit:
            epoch = self.machine.txns.find(command.txn.writer, command.txn.epoch)
            refusal = (
                None if epoch is None else self.disk_space.refusal_for_size(_RENDERED_FACTOR * epoch.bytes)
            )
            if refusal is not None:
                self._refuse(command, ticket, refusal)
                return
        if self._refetch.queued_writes and self._refetch.queue_write(command, ticket):
            return
        if self.machine.uploading.is_on and not isinstance(command, READS):
            refusal = self.machine.uploading.refuses(command)
            if refusal is not None:
                self._refuse(command, ticket, refusal)
                return
        self._handle(command, ticket, [])

    def _refuse(self, command: Command, ticket: Ticket, why: StreamsError) -> None:
        """Refuse a command without handling it. Later inputs of its append session fail too."""
        if isinstance(command, AppendStream) and command.chain:
            self.machine.streams.fail_session(command.chain)
        ticket.answer(why, 0.0, 0.0)

    def _handle(self, command: Command, ticket: Ticket, payloads: FetchedPayloads) -> None:
        """Handle a command. `payloads` are those that were fetched for it so far."""
        now_ms = self._now_ms()
        outcome = self._execution.handle(command, payloads, now_ms)
        if outcome.needs:
            self._refetch.fetch(command, ticket, outcome.needs[0], payloads)
        elif outcome.reply is None:
            self.delivery.park(command, ticket, outcome, now_ms)
        else:
            self._replies.send_when_ready(outcome, outcome.reply, ticket)
        if outcome.wakes:
            self.delivery.wake(outcome.wakes)

    def release(self, box: str, holder: int, ticket: Ticket) -> None:
        """Release the jobs of a holder: its connection is lost, or its work stream has ended."""
        self.delivery.claims.waiting.drop(box, holder)
        self.submit(ReleaseHolder(box, holder), ticket)

    # -- the end of a turn

    def flush(self) -> None:
        """Log the staged changes of one turn: few at once, many through the commit thread. This may wake
        claims that stage more changes, which are logged too."""
        has_answers = self._local_copier.copy_early()
        while self.staging.frames:
            logged_lsn = self.staging.write()
            if not logged_lsn:
                break
            self._note_logged(logged_lsn, self._committer.append_ms_last)
            has_answers = True
        self._ticker.check_deadlines(self.delivery.claims.waiting)
        self._local_copier.post_next()
        if has_answers:
            self._send_answers()

    def _end_turn(self) -> None:
        """End a turn that no server ends: a report of a thread, or a tick."""
        self.flush()
        self._send_answers()

    def _send_answers(self) -> None:
        if self.backpressure.is_blocking:
            self.backpressure.resume_if_drained()
        self.after_answers()

    def _wake(self, boxes: Collection[str]) -> None:
        """Serve the reads and claims that wait in boxes with newly visible records. Mostly none wait."""
        if boxes and (self.delivery.reads.waiting or self.delivery.claims.waiting):
            self.delivery.wake(boxes)

    # -- reports, in this thread

    def _on_logged(self, lsn: int, wal_append_ms: float) -> None:
        self._note_logged(lsn, wal_append_ms)
        self._end_turn()

    def _note_logged(self, lsn: int, wal_append_ms: float) -> None:
        boxes = self.machine.on_logged(lsn)
        self._replies.on_logged(lsn, wal_append_ms)
        self._wake(boxes)

    def _on_durable(self, lsn: int, fsync_ms: float) -> None:
        boxes = self.machine.on_durable(lsn) + self.delivery.reads.strong_due(lsn)
        self._replies.on_durable(lsn, fsync_ms, self._committer.append_ms_last)
        self._wake(boxes)
        self._end_turn()
        self._background.on_durable()
        self._waits.advance()

    def _on_uploaded(self, outcome: Outcome) -> None:
        """Send replies and wake readers that waited for the object store."""
        self.staging.log(outcome, sync=False)
        self._replies.on_uploaded()
        self._wake(outcome.wakes)
        self._end_turn()
        self._background.upkeep.wake()

    def _on_space_again(self) -> None:
        self._ticker.wake()
        self.delivery.wake(self.delivery.claims.waiting.boxes())
        self._end_turn()

    def _log_upkeep(self, outcome: Outcome) -> None:
        """Log changes of a background task. No reply waits for them."""
        self.staging.log(outcome, sync=False)
        self.flush()
        if self.backpressure.is_blocking:
            self._end_turn()

    def _log_moves(self, outcome: Outcome) -> None:
        """Log moves that a backup has delayed."""
        self.staging.log(outcome, sync=False)
        self.flush()
        self._wake(outcome.wakes)
        self._end_turn()

    # -- time

    def _next_deadline_ms(self) -> int | None:
        """Return when the machine needs its next tick; None while the log has no space for its changes."""
        return None if self._committer.waits_for_space else self.machine.next_deadline_ms()

    def _observe_clock(self) -> None:
        self.machine.wall_ahead_ms = self._observe_system_clock()

    def _tick(self, now_ms: int, now_s: float) -> None:
        self._execution.pass_wall_clock(now_ms)
        outcome = (
            Outcome([], None)
            if self._committer.waits_for_space
            else self.machine.tick(now_ms, has_space=self.disk_space.level == Level.OK)
        )
        if outcome.changes:
            self.staging.log(outcome, sync=False)
        if outcome.wakes:
            self.delivery.wake(outcome.wakes)
        for missing in outcome.needs:  # the next tick uses it
            self._execution.fetch(missing, None, _ignore)
        self.delivery.serve_due(now_s)
        self._end_turn()

    # -- statistics

    def statistics(self) -> CommitterStatistics:
        return self._committer.statistics()

    def log_progress(self) -> tuple[bool, int]:
        """Return whether the log's threads have work, and a count that grows whenever they finish some."""
        return self._committer.is_working, self._committer.progress_count

    def objects_report(self) -> ObjectsReport:
        uploader = self._background.uploader
        return ObjectsReport() if uploader is None else uploader.report()

    @property
    def snapshot_age_s(self) -> float:
        """How long the log has had changes that no snapshot has; 0 if it has none."""
        return self._background.snapshots.age_s

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the log has yet to write."""
        return self._committer.backlog_bytes


def _ignore(error: StreamsError | None, payloads: FetchedPayloads) -> None:
    """Ignore the result of a prefetch: a command that needs the payload gets the error itself."""
