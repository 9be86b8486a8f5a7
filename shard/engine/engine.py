"""Joins the machine to the disk: the only caller of `machine`, in one trio task's thread, without a lock.

    submit ─► machine.handle ─► changes ─► committer ─► log
                   │                           │
                 reply ── waits for its lsn ◄──┴── logged(lsn), durable(lsn)

A reply that waits is parked under its lsn and goes out when the committer reports it. A read that has
nothing yet is parked under its box and asked again when the box shows more, or when its time is up. A command
that needs what is not in memory is handled again when the fetcher has brought it in; later writes to its box
wait for it, so that writes keep their order.

Rules of the file
- Nothing here decides what a command means; nothing here touches a file but through the committer and the
  snapshot thread.
- When the committer fails, the shard ends: nothing is answered any more, because nothing is known any more.

A page is produced only while its connection has room for it (`replies.py`): a read that has waited, or that
the fetcher has served, is deferred otherwise and asked again when there is room (`serve_deferred`).

On a full disk commands are refused before they are handled (`disk_space.py`). What is done beside them waits:
a snapshot and a segment are tried again, and time stands still while the log itself has no room.

Bounds: parked replies and reads are at most as many as requests in flight, which the links and fronts bound;
what is left of reads that are over is dropped when it is more than the reads that wait (`_drop_stale`).
The backlog of the committer and the unsealed batches are bounded by `is_congested`: servers stop reading
while it lasts. What is urgent is let in beyond that, up to half as much again.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import structlog
import trio

from shard.core.boxes.priority import HELD_UP_TO, Pacing
from shard.core.boxes.upkeep import HotPolicy, SealPolicy
from shard.core.changes import ShardState
from shard.core.machine import Machine, Missing, Outcome
from shard.core.queues.jobs import PASS_JOBS_MAX
from shard.core.transactions.unrendered import NotRendered
from shard.engine.cache import PayloadCache
from shard.engine.committer import APPEND_NOW_BYTES_MAX, CommitFailed, Committer, CommitterStatistics
from shard.engine.disk_space import LOOK_S, LOOK_SHORT_S, DiskSpace, Level
from shard.engine.fetcher import READ_BYTES, Brought, Done, Fetcher, is_in_cold_store
from shard.engine.upkeep import Upkeep
from shard.engine.waiting import Waiting, WaitingClaims
from shard.engine.waiting_reads import WaitingRead, WaitingReads
from shard.recovery.commit_renderer import CommitRenderer, chunk_reader
from shard.storage import frames
from shard.storage.faults import Faults
from shard.storage.files import NO_SPACE, Corrupt, DiskLike, parent_of
from shard.storage.retention import Retention, names_in
from shard.storage.snapshot import Snapshots
from shard.storage.store import Name, SegmentStore
from shard.storage.wal import FrameParts, Wal
from shard.transfer.exports import Exports
from streams import process
from streams.protocol.errors import StreamsError, Throttled
from streams.protocol.messages.bulk import Locate, States, TxnCommit
from streams.protocol.messages.commands import (
    Command,
    Diff,
    Follow,
    GetRecord,
    GetState,
    GetTail,
    ListBoxes,
    Reply,
)
from streams.protocol.messages.forwards import Collect
from streams.protocol.messages.queues import (
    AwaitMoves,
    Claim,
    Claimed,
    ClaimedTogether,
    ClaimTogether,
    ReleaseHolder,
)
from streams.protocol.messages.streams import AppendStream
from streams.protocol.telemetry.histogram import Histogram
from streams.protocol.telemetry.reports import ObjectsReport

if TYPE_CHECKING:
    from shard.engine.uploads import Place, Uploads

log = structlog.get_logger()

#: Bytes handed to the committer and not yet in the file. At 500 MB/s this is about a tenth of a second.
_CONGESTED_BYTES = 48 * 1024 * 1024
_RELIEVED_BYTES = 16 * 1024 * 1024

#: Unsealed batches may take this much more memory than they should before writers are held up.
_UNSEALED_FACTOR = 2

#: Both may be exceeded this much by what is urgent, so that it need not wait for what is not.
_URGENT_FACTOR = 1.5

#: Log that is kept although a snapshot covers it, for batches that are not sealed: this many times what makes
#: a snapshot due. Beyond it they are sealed, or written to the log again.
_PINNED_FACTOR = 2
_PINNED_FILES_MIN = 4

#: A quiet shard has its whole log freed, but for the newest file, if that is this many times what must be
#: sealed or written to the log again for it: so that costs at most an eighth of what was written.
_QUIET_FACTOR = 8

#: A shard that has logged less than this since its last snapshot may be slow for a moment: 0.1 s for each
#: gigabyte of memory that it gives back.
_QUIET_BYTES = 8 << 20

#: Boxes that a snapshot takes in one step, a quarter of a millisecond, and how long others have in between. A
#: hundred thousand boxes take about fourteen seconds in this way.
_SNAPSHOT_BOXES, _SNAPSHOT_REST_S = 32, 0.004

_READS = (Diff, GetRecord, GetState, GetTail, ListBoxes, Collect, Locate, States)

#: Bytes that reads may ask of the fetcher at a time, from this disk and from the cold store each: what they
#: hold until they are answered. Further reads are deferred.
_FETCH_BYTES_MAX = 64 << 20

#: What a commit takes of the disk, in bytes that it holds: rows are written to the log as they are rendered,
#: and then into segments.
_RENDERED_FACTOR = 2

#: A read whose time is up and whose connection has no room is looked at again after this.
_NO_ROOM_S = 0.1

#: Said to a claim whose time is up and whose connection has no room.
_NO_ROOM = "earlier answers of this connection are not read yet; read them, then claim again"

#: How long to wait for space on a full disk before a snapshot is tried again.
_FULL_PAUSE_S = 5.0

#: The longest the shard goes without looking at its clock.
_TICK_S_MAX = 1.0


class Ticket(Protocol):
    """Whoever waits for a reply."""

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None: ...


#: A reply on hold: the lsn it waits for, and who gets it.
_Parked = tuple[int, Ticket, Reply | StreamsError]
_lsn_of = itemgetter(0)


class EngineSettings(NamedTuple):
    sync_interval_ms: int = 50
    snapshot_wal_bytes: int = 256 << 20
    snapshot_interval_ms: int = 60_000
    seal: SealPolicy = SealPolicy(10_000, 64 << 20, 3_600_000)
    hot: HotPolicy = HotPolicy(4, 0)
    cache_bytes: int = 256 << 20
    upkeep_bytes_per_s: int = 16 << 20
    wal_file_bytes: int = 64 << 20
    disk_low_bytes: int = 0
    disk_full_bytes: int = 0


_Read = WaitingRead[Ticket]


class _Served(NamedTuple):
    """What a pass over claims that wait came to."""

    #: True if each of them has an answer.
    is_for_all: bool
    jobs: int


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
        place: Place | None = None,
        observe_clock: Callable[[], None] = lambda: None,
        faults: Faults | None = None,
    ) -> None:
        """`now_ms` reads the time of the core, and `observe_clock`, called about once a second, has it follow
        the system clock (`timekeeper.py`). `place` is where object boxes are kept beside this disk, if there
        is such a place."""
        self.machine = machine
        self._wal = wal
        self._snapshots = snapshots
        self._now_ms = now_ms
        self._observe_clock = observe_clock
        self._settings = settings
        self._token = trio.lowlevel.current_trio_token()
        self._committer = Committer(
            wal,
            post=self._token.run_sync_soon,
            on_logged=self._on_logged,
            on_durable=self._on_durable,
            on_failed=self._on_failed,
            on_space=self._on_space,
            sync_interval_ms=settings.sync_interval_ms,
        )
        self.disk_space = DiskSpace(
            disk,
            parent_of(export_folder),
            low_bytes=settings.disk_low_bytes,
            full_bytes=settings.disk_full_bytes,
        )
        self._space_changed = trio.Event()
        self._cache = PayloadCache(settings.cache_bytes)
        self.faults = faults or Faults()
        read_chunk = chunk_reader(wal)
        self._fetcher = Fetcher(
            machine,
            store,
            self._cache,
            read_chunk=read_chunk,
            post=self._token.run_sync_soon,
            on_failed=self._on_failed,
            faults=self.faults,
        )
        self._renderer = CommitRenderer(
            machine,
            read_chunk,
            log_outcome=self._log_upkeep,
            wait_durable=self.wait_durable,
            is_blocked=self._is_log_blocked,
            is_pressed=lambda: self._upkeep.is_pressed,
            on_rendered=self._on_rendered,
        )
        #: Writes to a box of which one waits for the fetcher, in the order in which they came.
        self._behind: dict[str, deque[tuple[Command, Ticket]]] = {}
        self._upkeep = Upkeep(
            machine,
            store,
            self._cache,
            settings.seal,
            settings.hot,
            now_ms=now_ms,
            log_outcome=self._log_upkeep,
            wait_durable=self.wait_durable,
            pinned_lsn=self._pinned_lsn,
            unsealed_bytes_max=settings.cache_bytes,
            bytes_per_s=settings.upkeep_bytes_per_s,
            is_disk_full=lambda: self.disk_space.level == Level.FULL,
            faults=self.faults,
        )
        self.exports = Exports(
            machine,
            disk,
            export_folder,
            now_ms=now_ms,
            wait_durable=self.wait_durable,
            wait_rendered=self._renderer.wait_idle,
            pins=self._upkeep.pins,
            on_unpinned=self._sweep,
            log_outcome=self._log_moves,
            file_bytes=settings.wal_file_bytes,
            bytes_per_s=settings.upkeep_bytes_per_s,
        )
        self._uploads: Uploads | None = None
        if place is not None:
            from shard.engine.uploads import Uploads  # brings obstore along, which takes a while to import

            self._uploads = Uploads(
                machine,
                place,
                disk,
                store,
                now_ms=now_ms,
                wait_durable=self.wait_durable,
                on_uploaded=self._on_uploaded,
                pins=self._upkeep.pinned_for_base,
                on_unpinned=self._sweep,
                file_bytes=settings.wal_file_bytes,
            )
        #: Frames of this wake-up that the committer does not have yet, and what their waiters need.
        self._staged: list[FrameParts] = []
        self._staged_sync = False
        self._staged_logged_matters = False
        #: In the order of the lsns they wait for, and of their coming.
        self._until_logged: deque[_Parked] = deque()
        self._until_durable: deque[_Parked] = deque()
        self._until_uploaded: deque[_Parked] = deque()
        self._reads: WaitingReads[Ticket] = WaitingReads()
        self._claims: WaitingClaims[Ticket] = WaitingClaims()
        self._holders = itertools.count(1)
        #: Boxes with strong reads that wait for the disk: the lsn after which to ask again.
        self._strong: dict[str, int] = {}
        self._fsync_ms = 0.0
        self._wal_append_ms = 0.0
        self._relieved = trio.Event()
        self._relieved.set()
        self._timer_changed = trio.Event()
        #: When the next tick comes: on trio's clock, and in the time of the core.
        self._timer_at_s = 0.0
        self._timer_at_ms = 0
        self._durable_changed = trio.Event()
        self.failure: BaseException | None = None
        self.failed = trio.Event()
        #: Called after replies were handed out, so that servers can send them together.
        self.after_answers: Callable[[], None] = lambda: None
        #: True if a page may be produced for a ticket. The server has its own.
        self.has_room: Callable[[Ticket], bool] = _always
        #: Boxes whose reads and claims have something to get, and no room for it.
        self._deferred_boxes: dict[str, None] = {}
        #: Reads that were served by the fetcher and found no room.
        self._deferred_reads: deque[tuple[Command, Ticket]] = deque()
        #: By "is it in the cold store": what reads have asked of the fetcher, and those that may not yet.
        self._fetching_bytes = [0, 0]
        self._until_fetched: tuple[deque[tuple[Command, Ticket]], ...] = (deque(), deque())
        self._snapshot_wanted = trio.Event()
        self._bytes_at_snapshot = 0
        self._lsn_at_snapshot = 0
        #: When the state was taken that the newest snapshot has; at first, when this life began.
        self._snapshot_taken_s = trio.current_time()
        self._lacks_snapshot = False
        self._retention = Retention(needs_lsn)
        wal.keeps = self._retention.keeps
        #: True if time made the last snapshot due, and not the bytes written since the one before.
        self._is_quiet = False
        self._memory = process.MemoryReturn()
        #: Whether low-priority delivery is paced. Set by whoever measures (`pressure.py`).
        self.paces = False
        self.paced_total = 0
        self._pacing = Pacing()

    def __repr__(self) -> str:
        parked = len(self._until_logged) + len(self._until_durable) + len(self._until_uploaded)
        return f"<Engine {self.machine!r}, {parked} replies parked>"

    # -- life

    async def run(
        self,
        *,
        boot_id: str,
        cache_survived: bool = True,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Starts the committer and a life of the shard; then keeps time and takes snapshots."""
        self._committer.start()
        self._fetcher.start()
        await trio.to_thread.run_sync(self.disk_space.look)
        now_ms = self._now_ms()
        if now_ms < self.machine.last_ms:
            log.warning(
                "the system clock is behind the last change in the log; leases and delays keep what was left "
                "of them, and new records are not given times before those of the records before them",
                behind_s=(self.machine.last_ms - now_ms) / 1000,
            )
        outcome = self.machine.start(boot_id=boot_id, now_ms=now_ms, cache_survived=cache_survived)
        self._log(outcome, sync=True)
        self.flush()
        if not await self._wait_started(outcome.waits_for_lsn):
            task_status.started()
            return
        self._judge_space()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_looking_for_space)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._keep_snapshots)
            nursery.start_soon(self._keep_segments)
            nursery.start_soon(self._keep_rendering)
            self._renderer.wake()
            nursery.start_soon(self.exports.run)
            if self._uploads is not None:
                nursery.start_soon(self._uploads.run)
            task_status.started()

    async def stop(self) -> None:
        """Ends the life in order: the last change, a snapshot, the log closed. On a full disk it ends without
        what has no room: the next life finds the log, as after a crash."""
        if self._committer.is_stuck:
            self._fetcher.stop()
            try:
                await trio.to_thread.run_sync(self._committer.stop)
            except CommitFailed as error:
                log.warning("stopped on a full disk; commands that waited are lost", error=str(error))
            return
        if self._uploads is not None and await self.wait_durable(self.machine.lsn):
            await self._uploads.finish()
        outcome = self.machine.stop(self._now_ms())
        self._log(outcome, sync=True)
        self.flush()
        if await self._wait_started(outcome.waits_for_lsn) and not self._committer.is_stuck:
            await self._try_snapshot(rest_s=0.0)
        self._fetcher.stop()
        await trio.to_thread.run_sync(self._committer.stop)

    def statistics(self) -> CommitterStatistics:
        return self._committer.statistics()

    def log_progress(self) -> tuple[bool, int]:
        """Return whether the log's threads have work, and a count that grows whenever they finish some."""
        return self._committer.is_working, self._committer.work_done

    def objects_report(self) -> ObjectsReport:
        return ObjectsReport() if self._uploads is None else self._uploads.report()

    @property
    def snapshot_age_s(self) -> float:
        """How long the log has had changes that no snapshot has; 0 if it has none."""
        if self.machine.lsn == self._lsn_at_snapshot:
            return 0.0
        return round(trio.current_time() - self._snapshot_taken_s, 3)

    @property
    def fsync_times(self) -> Histogram:
        return self._committer.fsync_times

    @property
    def waiting_reads(self) -> int:
        return len(self._reads)

    @property
    def waiting_claims(self) -> int:
        return len(self._claims)

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    # -- commands

    @property
    def backlog_bytes(self) -> int:
        """What the log has yet to write."""
        return self._committer.backlog_bytes

    @property
    def is_congested(self) -> bool:
        return self._is_over(1.0)

    def _is_over(self, factor: float) -> bool:
        if self._committer.is_stuck:
            return False  # writes are refused, and reads must not wait for the disk to have space
        return (
            self._committer.backlog_bytes > factor * _CONGESTED_BYTES
            or self.machine.unsealed.bytes > factor * _UNSEALED_FACTOR * self._settings.cache_bytes
        )

    async def wait_relieved(self, *, is_urgent: bool = False) -> None:
        if self._is_over(_URGENT_FACTOR if is_urgent else 1.0):
            self._relieved = trio.Event() if self._relieved.is_set() else self._relieved
            await self._relieved.wait()

    def submit(self, command: Command, ticket: Ticket) -> None:
        """Handles a command. The ticket is answered now or when the reply's promise is kept. Whoever submits
        calls `flush` when it has no more for now."""
        if self.disk_space.level:
            full = self.disk_space.refusal(command, self.machine.boxes.get(_box_of(command)))
            if full is not None:
                self._refuse(command, ticket, full)
                return
        if type(command) is TxnCommit:
            epoch = self.machine.txns.find(command.txn.writer, command.txn.epoch)
            full = None if epoch is None else self.disk_space.lacks(_RENDERED_FACTOR * epoch.bytes)
            if full is not None:
                self._refuse(command, ticket, full)
                return
        if self._behind and not isinstance(command, _READS) and _box_of(command) in self._behind:
            self._behind[_box_of(command)].append((command, ticket))
            return
        if self.machine.uploading.is_on and not isinstance(command, _READS):
            refusal = self.machine.uploading.refuses(command)
            if refusal is not None:
                self._refuse(command, ticket, refusal)
                return
        self._handle(command, ticket, [])

    def _refuse(self, command: Command, ticket: Ticket, why: StreamsError) -> None:
        """Answers a command that is not handled. Inputs of its session that are on their way fail too."""
        if isinstance(command, AppendStream) and command.chain:
            self.machine.streams.break_chain(command.chain)
        ticket.answer(why, 0.0, 0.0)

    def _handle(self, command: Command, ticket: Ticket, held: Brought) -> None:
        """`held`: what was fetched for this command so far."""
        now_ms = self._now_ms()
        if held:
            self._cache.add_all(held)
        outcome = self.machine.handle(command, now_ms)
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable)
        if outcome.needs:
            self._fetch(command, ticket, outcome.needs[0], held)
        elif outcome.reply is None:
            if isinstance(command, Claim):
                window_ms = outcome.not_before_ms - now_ms if outcome.not_before_ms else 0
                self._claims.add(command, ticket, now_ms=_wait_ms(), window_ms=window_ms)
            else:
                assert isinstance(command, (Diff, Collect, AwaitMoves))
                deadline_s = trio.current_time() + command.wait_ms / 1000
                self._park_read(WaitingRead(command, ticket, deadline_s))
        else:
            self._settle(outcome, outcome.reply, ticket)
        if outcome.wakes:
            self._wake(outcome.wakes)

    def new_holder(self) -> int:
        """A number for a connection that leases end with. Unlike any other in this life of the shard."""
        return next(self._holders)

    def release(self, box: str, holder: int, ticket: Ticket) -> None:
        """A connection that held jobs is gone, or says that it is done."""
        self._claims.drop(box, holder)
        self.submit(ReleaseHolder(box, holder), ticket)

    def forget(self, ticket: Ticket) -> bool:
        """Whoever asked does not wait for the answer any more: a read is not asked again, and a claim is
        given nothing. Whether it was waiting; if not, it is answered, or about to be."""
        read = self._reads.find(ticket)
        if read is not None:
            self._reads.end(read)
            return True
        return self._claims.forget(ticket)

    def waits(self, ticket: Ticket) -> bool:
        """Return True while a read waits for a record, or a claim for a job."""
        return ticket in self._reads or self._claims.waits(ticket)

    # -- commands that need what is not in memory

    def _fetch(self, command: Command, ticket: Ticket, missing: Missing, held: Brought) -> None:
        if isinstance(command, _READS) and isinstance(missing, NotRendered):
            done: Done = partial(self._rendered_again, command, ticket, held)
        elif isinstance(command, _READS):
            is_cold = is_in_cold_store(missing)
            wanted = max(READ_BYTES, command.max_bytes if isinstance(command, Diff) else 0)
            if self._fetching_bytes[is_cold] >= _FETCH_BYTES_MAX:
                self._until_fetched[is_cold].append((command, ticket))
                return
            self._fetching_bytes[is_cold] += wanted
            done = partial(self._read_again, command, ticket, held, is_cold, wanted)
        else:
            self._behind.setdefault(_box_of(command), deque())
            done = partial(self._write_again, command, ticket, held)
        self._bring_in(missing, command.max_bytes if isinstance(command, Diff) else 0, done)

    def _bring_in(self, missing: Missing, bytes_wanted: int, done: Done) -> None:
        self._fetcher.fetch(missing, max(READ_BYTES, bytes_wanted), done)

    def _again(
        self, command: Command, ticket: Ticket, held: Brought, error: StreamsError | None, brought: Brought
    ) -> None:
        if error is not None:
            self.machine.give_up(command)
            ticket.answer(error, 0.0, 0.0)
        else:
            self._handle(command, ticket, held + brought)

    def _rendered_again(
        self, command: Command, ticket: Ticket, held: Brought, error: StreamsError | None, brought: Brought
    ) -> None:
        """More rows are rendered of those that a read wants. It waited for no fetch, so it counts as none."""
        if error is None and not self.has_room(ticket):
            self._deferred_reads.append((command, ticket))
        else:
            self._again(command, ticket, held, error, brought)
        self._after_report([])

    def _read_again(
        self,
        command: Command,
        ticket: Ticket,
        held: Brought,
        is_cold: bool,
        wanted: int,
        error: StreamsError | None,
        brought: Brought,
    ) -> None:
        self._fetching_bytes[is_cold] -= wanted
        if error is None and not self.has_room(ticket):
            self._deferred_reads.append((command, ticket))
        else:
            self._again(command, ticket, held, error, brought)
        waiting = self._until_fetched[is_cold]
        while waiting and self._fetching_bytes[is_cold] < _FETCH_BYTES_MAX:
            self._handle_if_room(*waiting.popleft())
        self._after_report([])

    def _write_again(
        self, command: Command, ticket: Ticket, held: Brought, error: StreamsError | None, brought: Brought
    ) -> None:
        box = _box_of(command)
        behind = self._behind.pop(box)
        self._again(command, ticket, held, error, brought)
        while behind and box not in self._behind:
            self.submit(*behind.popleft())
        if behind:  # one of them has to wait in its turn, and the rest stays behind it
            self._behind[box].extend(behind)
        self._after_report([])

    # -- answers that have no room

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred_boxes or self._deferred_reads)

    def serve_deferred(self) -> None:
        """Asks again for what had no room. Some of it may have none now."""
        boxes, self._deferred_boxes = self._deferred_boxes, {}
        for box in boxes:
            if self._claims:
                self._wake_claims(box)
            self._wake_reads(box)
        for _ in range(len(self._deferred_reads)):
            self._handle_if_room(*self._deferred_reads.popleft())
        self._after_report([])

    def _handle_if_room(self, command: Command, ticket: Ticket) -> None:
        if self.has_room(ticket):
            self._handle(command, ticket, [])
        else:
            self._deferred_reads.append((command, ticket))

    def _settle(self, outcome: Outcome, reply: Reply | StreamsError, ticket: Ticket) -> None:
        lsn = outcome.waits_for_lsn
        if not lsn:
            ticket.answer(reply, 0.0, 0.0)
            return
        parked = self._until_durable if outcome.until_durable else self._until_logged
        if outcome.until_uploaded:
            refusal = self.machine.uploading.stuck()
            if refusal is not None:  # what it rests on will not be there soon; a write was told so before
                ticket.answer(refusal, 0.0, 0.0)
                return
            parked = self._until_uploaded
        if not parked or parked[-1][0] <= lsn:
            parked.append((lsn, ticket, reply))
        else:  # it rests on something older than the last write of another
            parked.insert(bisect_right(parked, lsn, key=_lsn_of), (lsn, ticket, reply))

    def _log(self, outcome: Outcome, *, sync: bool) -> None:
        """Notes changes for the log; they leave with the next `flush`. Afterthoughts, which may be a hundred
        times what they follow, are kept apart from it: its sync has none of them to write."""
        for lsn, change in outcome.changes:
            if outcome.afterthoughts and lsn == outcome.waits_for_lsn + 1:
                self._staged_sync = self._staged_sync or sync
                self._submit_staged()
                self._committer.part()
                sync = False
            self._staged.append(frames.encode(lsn, change))
        self._staged_sync = self._staged_sync or sync
        if not outcome.until_durable or self.machine.shows_when_logged:
            self._staged_logged_matters = True

    def leaves_to_thread(self, size: int) -> bool:
        """Whether the next `flush`, of commands of about this size, is likely to go through the committer's
        thread. What is logged of a write is somewhat longer than its body."""
        return self._staged_sync or size > APPEND_NOW_BYTES_MAX * 3 // 4

    def flush(self) -> None:
        """Logs what one wake-up has staged: a little of it at once, more through the committer's thread.
        Claims that this wakes may stage more, which is logged too."""
        self._mind_time()
        has_logged = False
        while self._staged:
            if self._staged_sync or not self._committer.append_now(self._staged):
                self._submit_staged()
                break
            logged_lsn = self._staged[-1][2]
            self._staged, self._staged_logged_matters = [], False
            self._note_logged(logged_lsn, self._committer.append_ms_last)
            self._mind_time()
            has_logged = True
        if has_logged:
            self._send_answers()

    def _submit_staged(self) -> None:
        staged, sync, logged_matters = self._staged, self._staged_sync, self._staged_logged_matters
        self._staged = []
        self._staged_sync = self._staged_logged_matters = False
        self._committer.submit(staged, sync=sync, logged_matters=logged_matters)

    # -- reports of the committer, in this thread

    def _on_logged(self, lsn: int, wal_append_ms: float) -> None:
        self._note_logged(lsn, wal_append_ms)
        self._after_report([])

    def _note_logged(self, lsn: int, wal_append_ms: float) -> None:
        self._wal_append_ms = wal_append_ms
        woken = self.machine.logged(lsn)
        self._release(self._until_logged, lsn, 0.0)
        self._wake_all(woken)

    def _on_durable(self, lsn: int, fsync_ms: float) -> None:
        self._fsync_ms = fsync_ms
        self._wal_append_ms = self._committer.append_ms_last
        woken = self.machine.durable(lsn)
        if self._strong:
            woken = woken + self._strong_due(lsn)
        self._release(self._until_logged, lsn, 0.0)
        self._release(self._until_durable, lsn, fsync_ms)
        if self.machine.txns.commits:
            self._renderer.wake()
        if self._until_uploaded:  # some rest on what need not be uploaded after all
            self._release(self._until_uploaded, self.machine.uploading.position, fsync_ms)
        if self._uploads is not None and self.machine.uploading.is_on:
            self._uploads.wake()
        self._after_report(woken)
        self._upkeep.wake()
        self._durable_changed.set()
        self._durable_changed = trio.Event()
        if self._wal.bytes_written - self._bytes_at_snapshot >= self._settings.snapshot_wal_bytes:
            self._snapshot_wanted.set()

    def _on_uploaded(self, outcome: Outcome) -> None:
        """More of what must be in the object store is there."""
        self._log(outcome, sync=False)
        self._release(self._until_uploaded, self.machine.uploading.position, self._fsync_ms)
        self._after_report(list(outcome.wakes))
        self._upkeep.wake()

    def _on_failed(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()

    def _release(self, parked: deque[_Parked], lsn: int, fsync_ms: float) -> None:
        wal_append_ms = self._wal_append_ms
        while parked and parked[0][0] <= lsn:
            _, ticket, reply = parked.popleft()
            ticket.answer(reply, fsync_ms, wal_append_ms)

    def _after_report(self, woken: list[str]) -> None:
        self._wake_all(woken)
        self.flush()
        self._send_answers()

    def _wake_all(self, woken: list[str]) -> None:
        if woken and (self._reads or self._claims):
            self._wake(woken)

    def _send_answers(self) -> None:
        if (
            not self._relieved.is_set()
            and self._committer.backlog_bytes < _RELIEVED_BYTES
            and not self.is_congested
        ):
            self._relieved.set()
        self.after_answers()

    # -- reads that wait

    def _park_read(self, read: _Read) -> None:
        self._reads.add(read)
        self._note_strong([read])
        if read.deadline_s < self._timer_at_s:
            self._timer_changed.set()

    def _wake(self, boxes: list[str] | tuple[str, ...]) -> None:
        for box in dict.fromkeys(boxes):
            if self._claims:
                self._wake_claims(box)
            if self._reads.has(box) and not (self.paces and self._hold_back(box)):
                self._wake_reads(box)

    def _wake_reads(self, box: str) -> None:
        waiting = self._reads.take(box)
        still = [read for read in waiting if not self._try_read(read, read.command, [])]
        if still:
            self._reads.put_back(box, still)
            self._note_strong(still)

    # -- delivery under pressure (v0 §9)

    def _hold_back(self, name: str) -> bool:
        """Whether the readers of this box are told later, in the order of priorities."""
        box = self.machine.boxes.get(name)
        if box is None or box.effective_priority(self._now_ms()) > HELD_UP_TO:
            return False
        self._pacing.hold(name, self._now_ms())
        self.paced_total += 1
        return True

    @property
    def held_back(self) -> int:
        """Boxes whose readers are."""
        return len(self._pacing)

    def release_held(self, count: int) -> None:
        now_ms = self._now_ms()
        boxes = self.machine.boxes

        def base_of(name: str) -> float:
            return float(boxes[name].effective_priority(now_ms)) if name in boxes else 0.0

        for name in self._pacing.release(count, now_ms, base_of):
            self._wake_reads(name)
        self._after_report([])

    def _note_strong(self, reads: list[_Read]) -> None:
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

    def _try_read(self, read: _Read, command: Diff | Collect | AwaitMoves, held: Brought) -> bool:
        """Whether the read is over, or waits for the fetcher."""
        if read.done:
            return True
        if not self.has_room(read.ticket):
            self._deferred_boxes[command.box] = None
            return False
        if held:
            self._cache.add_all(held)
        outcome = self.machine.handle(command, self._now_ms())
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable)
        if outcome.needs:
            done = partial(self._read_on, read, command, held)
            bytes_wanted = command.max_bytes if isinstance(command, Diff) else 0
            self._bring_in(outcome.needs[0], bytes_wanted, done)
            return True
        if outcome.reply is None:
            return False
        self._reads.end(read)
        self._settle(outcome, outcome.reply, read.ticket)
        return True

    def _read_on(
        self,
        read: _Read,
        command: Diff | Collect | AwaitMoves,
        held: Brought,
        error: StreamsError | None,
        brought: Brought,
    ) -> None:
        """A read that waited for more has what it needs of it."""
        if read.done:
            pass  # nobody waits for it any more
        elif error is not None:
            self._reads.end(read)
            read.ticket.answer(error, 0.0, 0.0)
        elif not self._try_read(read, command, held + brought):  # what there was is gone again
            self._reads.put_back(command.box, [read])
        self._after_report([])

    # -- claims that wait

    def _wake_claims(self, box: str) -> None:
        """Serves those that wait for jobs of this box, in their order, until one of them gets none. When they
        have got as many jobs as one pass gives out, others come first."""
        jobs = 0
        while self.disk_space.level != Level.FULL:  # else they wait on; a lease must be logged
            waiting = self._claims.woken(box, _wait_ms(), self.has_room)
            if self._claims.were_passed_over:
                self._deferred_boxes[box] = None
            if not waiting:
                return
            served = self._serve(box, waiting, is_over=False)
            jobs += served.jobs
            if jobs >= PASS_JOBS_MAX:
                self._token.run_sync_soon(self._serve_more, box)
                return
            if not served.is_for_all:
                return

    def _serve_more(self, box: str) -> None:
        self._wake_claims(box)
        self._after_report([])

    def _serve(
        self, box: str, waiting: list[Waiting[Ticket]], *, is_over: bool, held: Brought | None = None
    ) -> _Served:
        """Asks for all of them in one pass. Those that get no answer wait on."""
        if held:
            self._cache.add_all(held)
        together = ClaimTogether(box=box, claims=tuple(each.claim for each in waiting), is_over=is_over)
        outcome = self.machine.handle(together, self._now_ms())
        if outcome.changes:
            self._log(outcome, sync=outcome.until_durable)
        if outcome.needs:
            done = partial(self._serve_again, box, waiting, is_over, held or [])
            self._bring_in(outcome.needs[0], 0, done)
            return _Served(False, 0)
        reply = outcome.reply
        assert reply is not None, "a pass is always answered"
        answers = reply.answers if isinstance(reply, ClaimedTogether) else [reply] * len(waiting)
        answered = [
            (each, answer) for each, answer in zip(waiting, answers, strict=True) if answer is not None
        ]
        self._claims.done(box, [each for each, _ in answered])
        for each, answer in answered:
            self._settle(outcome, answer, each.ticket)
        if outcome.wakes:
            self._wake(outcome.wakes)
        jobs = sum(len(answer.jobs) for _, answer in answered if isinstance(answer, Claimed))
        return _Served(len(answered) == len(waiting), jobs)

    def _serve_again(
        self,
        box: str,
        waiting: list[Waiting[Ticket]],
        is_over: bool,
        held: Brought,
        error: StreamsError | None,
        brought: Brought,
    ) -> None:
        """What a pass needed is there, or is not to be had."""
        waiting = [each for each in waiting if not each.is_done]
        if waiting and error is not None:
            self._claims.done(box, waiting)
            for each in waiting:
                each.ticket.answer(error, 0.0, 0.0)
        elif waiting:
            served = self._serve(box, waiting, is_over=is_over, held=held + brought)
            if not is_over and (served.is_for_all or served.jobs >= PASS_JOBS_MAX):
                self._wake_claims(box)
        self._after_report([])

    # -- time

    def _mind_time(self) -> None:
        """What has been done may need a tick sooner than the next one is to come."""
        deadline_ms = self._next_deadline_ms()
        if deadline_ms is not None and deadline_ms < self._timer_at_ms:
            self._timer_changed.set()
        if self._claims:
            due_ms = self._claims.next_ms()
            if due_ms is not None and due_ms < self._timer_at_s * 1000:
                self._timer_changed.set()

    async def _keep_time(self) -> None:
        while True:
            self._observe_clock()
            now_ms, now_s = self._now_ms(), trio.current_time()
            self._tick(now_ms, now_s)
            self.flush()
            self.after_answers()
            next_s = now_s + _TICK_S_MAX
            deadline_ms = self._next_deadline_ms()
            if deadline_ms is not None:
                next_s = min(next_s, now_s + (deadline_ms - now_ms) / 1000)
            if (read_s := self._reads.next_s) is not None:
                next_s = min(next_s, read_s)
            claims_ms = self._claims.next_ms()
            if claims_ms is not None:
                next_s = min(next_s, claims_ms / 1000)
            self._timer_at_s = next_s
            self._timer_at_ms = now_ms + round(1000 * (next_s - now_s))
            self._timer_changed = trio.Event()
            with trio.move_on_after(max(0.001, next_s - now_s)):
                await self._timer_changed.wait()

    def _next_deadline_ms(self) -> int | None:
        """When the machine wants to be called; not while the log has no room for what comes of it."""
        return None if self._committer.is_stuck else self.machine.next_deadline_ms()

    def _tick(self, now_ms: int, now_s: float) -> None:
        outcome = Outcome([], None) if self._committer.is_stuck else self.machine.tick(now_ms)
        if outcome.changes:
            self._log(outcome, sync=False)
        if outcome.wakes:
            self._wake(outcome.wakes)
        for missing in outcome.needs:  # the next tick will find it
            self._bring_in(missing, 0, _ignore)
        while (due := self._claims.due(int(now_s * 1000), self.has_room)) is not None:
            if self._claims.were_passed_over:
                self._deferred_boxes[due[0]] = None
            if due[2] and not self.has_room(due[1][0].ticket):
                self._claims.done(due[0], due[1])
                due[1][0].ticket.answer(Throttled(_NO_ROOM), 0.0, 0.0)
            elif self.disk_space.level == Level.FULL:  # a lease must be logged; others wait on
                if due[2]:
                    self._claims.done(due[0], due[1])
                    due[1][0].ticket.answer(self.disk_space.full(), 0.0, 0.0)
            elif due[1]:
                self._serve(due[0], due[1], is_over=due[2])
        for read in self._reads.due(now_s):
            if not self.has_room(read.ticket):
                self._deferred_boxes[read.command.box] = None
                self._reads.set_deadline(read, now_s + _NO_ROOM_S)
            else:
                self._try_read(read, msgspec.structs.replace(read.command, wait_ms=0), [])
                self._reads.drop(read)

    # -- the disk's space

    def _on_space(self) -> None:
        """The log has met the end of the disk's space, or has space again."""
        self._judge_space()
        self._space_changed.set()

    def _judge_space(self) -> None:
        was_full = self.disk_space.level == Level.FULL
        has_changed = self.disk_space.judge(
            lacks_spare=self._committer.lacks_spare,
            is_stuck=self._committer.is_stuck,
            room_bytes=lambda: self._committer.room_bytes,
            file_bytes=self._settings.wal_file_bytes,
        )
        if has_changed:
            self._upkeep.wake()
        if self.disk_space.level == Level.FULL:  # rows of commits are not rendered until there is space
            self._fetcher.rendered(self._fetcher.unrendered(), self.disk_space.full())
        if has_changed and was_full:
            self._timer_changed.set()
            self._wake(self._claims.boxes())
            self._after_report([])

    async def _keep_looking_for_space(self) -> None:
        while True:
            with trio.move_on_after(LOOK_SHORT_S if self.disk_space.is_short else LOOK_S):
                await self._space_changed.wait()
            self._space_changed = trio.Event()
            await trio.to_thread.run_sync(self.disk_space.look)
            if self._committer.lacks_spare and self.disk_space.may_allocate:
                self._committer.prepare()
            self._judge_space()

    async def _wait_started(self, lsn: int) -> bool:
        """Waits until this is durable, or known to have to wait for space. False when the log has failed."""
        while self.machine.durable_lsn < lsn and self.failure is None and not self._committer.is_stuck:
            async with trio.open_nursery() as nursery:
                for event in (self._durable_changed, self.failed, self._space_changed):
                    nursery.start_soon(_first_of, event, nursery.cancel_scope)
        return self.failure is None

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
            with trio.move_on_after(self._settings.snapshot_interval_ms / 1000) as waiting:
                await self._snapshot_wanted.wait()
            self._is_quiet = waiting.cancelled_caught
            await self._return_memory()
            self._upkeep.wake()  # a quiet shard frees more of its log
            self._snapshot_wanted = trio.Event()
            if self.machine.lsn == self._lsn_at_snapshot:
                if self._retention.is_settled(self._wal.files()[:-1]):
                    # Nothing has changed, and no file waits for the older snapshot to go.
                    if self._upkeep.must_sweep_again:
                        self._sweep()
                    continue
                # A second one of this lsn would take the place of the first, and the older one would stay:
                # without the segments that it names.
                self._log_upkeep(self.machine.rest(self._now_ms()))
            try:
                if not await self._try_snapshot():
                    await trio.sleep(_FULL_PAUSE_S)
                    self._snapshot_wanted.set()
            except OSError as error:  # a disk that cannot keep a snapshot cannot be trusted with the log
                self._on_failed(error)
                return

    async def _return_memory(self) -> None:
        """After a burst, gives free memory back to the system."""
        written_bytes = self._wal.bytes_written - self._bytes_at_snapshot
        if self._is_quiet and written_bytes < _QUIET_BYTES and self._memory.is_worth_it:
            returned_bytes = await trio.to_thread.run_sync(self._memory.run)
            log.info("gave free memory back to the system", mebibytes=returned_bytes >> 20)

    async def _try_snapshot(self, *, rest_s: float = _SNAPSHOT_REST_S) -> bool:
        """Takes a snapshot. False if the disk has no space for it; the log is kept until one has some."""
        before = self._bytes_at_snapshot, self._lsn_at_snapshot
        try:
            await self._take_snapshot(rest_s=rest_s)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._bytes_at_snapshot, self._lsn_at_snapshot = before
            if not self._lacks_snapshot:
                log.error("the disk is full: a snapshot cannot be written; trying on", error=str(error))
            self._lacks_snapshot = True
            return False
        self._lacks_snapshot = False
        return True

    async def _take_snapshot(self, *, rest_s: float = _SNAPSHOT_REST_S) -> None:
        """State now, on disk once all of it is durable in the log; then old files may go."""
        self._bytes_at_snapshot = self._wal.bytes_written
        taken_s = trio.current_time()
        capture = self.machine.begin_snapshot()
        self._lsn_at_snapshot = capture.lsn
        try:
            while capture.step(_SNAPSHOT_BOXES):  # noqa: ASYNC110 (it waits for nothing, it leaves room)
                await trio.sleep(rest_s)
        finally:
            self.machine.end_snapshot(capture)
        state = capture.state()
        if not await self.wait_durable(state.lsn):
            return
        named = await trio.to_thread.run_sync(self._write_snapshot, state, rest_s)
        self._snapshot_taken_s = taken_s
        self._retention.written(state.needs_lsn, named, state.held)
        for kept in self._wal.kept_files():
            if not self._retention.keeps(kept.first_lsn, kept.last_lsn):
                self._committer.drop_kept(kept.number)
        self._sweep()
        through = self._retention.released(self._wal.files()[:-1])
        if through:
            self._committer.release(through)

    def _sweep(self) -> None:
        named = self._retention.named()
        if named is not None:
            self._upkeep.sweep(named)
        self._upkeep.wake()  # files that were pinned may go, whatever is named

    # -- segments

    async def _keep_segments(self) -> None:
        try:
            await self._upkeep.run()
        except OSError as error:  # the same disk as the log's
            self._on_failed(error)

    # -- commits

    async def _keep_rendering(self) -> None:
        try:
            await self._renderer.run()
        except (OSError, Corrupt) as error:  # what it reads is in the log
            self._on_failed(error)

    def _is_log_blocked(self) -> bool:
        return self.disk_space.level == Level.FULL or self._committer.backlog_bytes > _RELIEVED_BYTES

    def _on_rendered(self, generations: Iterable[int]) -> None:
        self._fetcher.rendered(generations)

    def _log_upkeep(self, outcome: Outcome) -> None:
        self._log(outcome, sync=False)
        self.flush()
        if not self._relieved.is_set():
            self._after_report([])

    def _log_moves(self, outcome: Outcome) -> None:
        """Moves that a backup has held go on."""
        self._log(outcome, sync=False)
        self.flush()
        self._after_report(list(outcome.wakes))

    def _pinned_lsn(self) -> int:
        """Log up to here should not be needed any more."""
        settings, files = self._settings, self._wal.files()
        older = files[:-1]
        if (
            self._is_quiet
            and _QUIET_FACTOR * self.machine.unsealed.bytes < len(older) * settings.wal_file_bytes
        ):
            return older[-1].last_lsn
        kept = _PINNED_FACTOR * settings.snapshot_wal_bytes // settings.wal_file_bytes
        files = files[: -max(_PINNED_FILES_MIN, kept)]
        return files[-1].last_lsn if files else 0

    def _write_snapshot(self, state: ShardState, rest_s: float) -> set[Name]:
        self._snapshots.write(state.lsn, frames.encode_state(state, partial(time.sleep, rest_s)))
        return names_in(state)


def _wait_ms() -> int:
    """Trio's clock in milliseconds, rounded up: the time of claims that wait."""
    return int(trio.current_time() * 1000) + 1


def _box_of(command: Command) -> str:
    """The box that a command is about; none for those about all of a shard."""
    return getattr(command, "box", "")


def _always(ticket: Ticket) -> bool:
    return True


def _ignore(error: StreamsError | None, brought: Brought) -> None:
    """For what is fetched ahead of need: whoever needs it will be told."""


async def _first_of(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
