"""The machine of one shard, `Machine(Context(Kernel))`: all features, their lives, timers and snapshots.

    handle(command, now_ms) ──► Outcome(changes to log, reply, what the reply waits for, boxes to wake)
    apply(change, lsn)      the only code that mutates; handle uses it, recovery replays through it
    on_logged, on_durable   ──► boxes whose readers may see more now; `uploading.on_upload` likewise
    tick(now_ms)            changes that time alone causes (expiry); next_deadline_ms() says when to call

`kernel.py` explains how it works, `context.py` what features may use, `durability.py` when replies go.

Invariants
- NAMES: `boxes` and `generations` hold the same boxes.
- KEYS: `keys_kept` counts the idempotency keys of all boxes.
- CEILING: a disk box shows no seq above those that it has reserved.
- UNSEALED: `unsealed_boxes` holds exactly the stored boxes with batches in their tails.
- UPKEEP: boxes that are candidates of background work exist.
- GENERATIONS: no box has a generation above the last one that was given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.appliers import BoxAppliers
from shard.core.boxes.box import Box
from shard.core.boxes.group_handlers import GroupHandlers
from shard.core.boxes.handlers import BoxHandlers
from shard.core.boxes.listing import BoxListing
from shard.core.boxes.scanning import Scanning
from shard.core.boxes.sealed import NotLoaded, Segment
from shard.core.capture import Capture
from shard.core.context import Context
from shard.core.limits.usage import Usage
from shard.core.objects.replication import Uploading
from shard.core.outcome import LogEntries as LogEntries
from shard.core.outcome import Missing as Missing
from shard.core.outcome import Outcome as Outcome
from shard.core.queues.jobs import Jobs
from shard.core.queues.operations import QueueOperations
from shard.core.queues.outputs import OutputHandlers
from shard.core.queues.queue import ADVANCE_MAX
from shard.core.queues.record_moves import Moves
from shard.core.routers.forwarding import Forwarding
from shard.core.routers.local_copies import LocalCopies
from shard.core.routers.registry import Routers
from shard.core.s2.basins import Basins
from shard.core.s2.streams import Streams
from shard.core.s2.tokens import Tokens
from shard.core.schedules.handlers import ScheduleHandlers
from shard.core.schedules.schedule import ZoneFinder, find_utc
from shard.core.snapshot_facts import SegmentFacts, ShardState
from shard.core.transactions.commit_handlers import CommitHandlers
from shard.core.transactions.commits import Commit
from shard.core.transactions.handlers import TransactionHandlers
from shard.core.transactions.state import Txns
from shard.core.watch.sessions import Sessions
from streams.protocol.messages import forwards
from streams.protocol.messages.commands import Command
from streams.protocol.model.records import Batch
from streams.protocol.telemetry.reports import TallyReport

#: Boxes that one tick examines: half a millisecond of work. The next tick follows at once for the rest, and
#: for jobs beyond `ADVANCE_MAX`. Many boxes return their reserved seqs at the same time, after a burst.
TICK_BOXES_MAX = 64

#: Retry delay for an expiry check that waits for a payload fetch.
FETCH_MS = 100


class RestoreNeeds(NamedTuple):
    """The batches, segments and held rows that a snapshot names but does not contain."""

    #: By the lsn of its append: the box that gets the batch back through `log.hydrate`.
    batches: dict[int, Box]
    #: To be given back through `log.attach`.
    segments: list[tuple[Box, SegmentFacts]]
    #: The lsns of rows that are held for transactions: to be given back through `txns.give_back`.
    held_lsns: set[int]


class Machine(Context):
    box_appliers: BoxAppliers
    jobs: Jobs
    moves: Moves
    forwarding: Forwarding
    routers: Routers
    txns: Txns
    basins: Basins
    streams: Streams
    sessions: Sessions
    uploading: Uploading
    usage: Usage
    schedules: ScheduleHandlers

    def __init__(
        self,
        *,
        boxes_max: int = 0,
        bytes_max: int = 0,
        routers_max: int = 0,
        sessions_max: int = 0,
        shard: int = 0,
        due_records: int = 10_000,
        due_bytes: int = 64 << 20,
        txn_bytes_max: int = 128 << 20,
        txn_ttl_ms: int = 3_600_000,
        has_store: bool = False,
        streams_in_store: bool = False,
        backlog_bytes_max: int = 64 << 20,
        schedules_max: int = 0,
        find_zone: ZoneFinder = find_utc,
    ) -> None:
        super().__init__(
            shard=shard,
            boxes_max=boxes_max,
            bytes_max=bytes_max,
            due_records=due_records,
            due_bytes=due_bytes,
        )
        self.boot_id = ""
        self.stopped_clean = True
        #: Snapshots that are being taken.
        self._captures: list[Capture] = []
        self.on_change(changes.ShardStarted, self._apply_started)
        self.on_change(changes.ShardStopped, self._apply_stopped)
        self.on_change(changes.ShardRested, self._apply_rested)
        self.sessions = Sessions(sessions_max)
        for check in (self.durability.check, self.check_timers, self.sessions.check):
            self.on_check(check)
        self.on_snapshot(self.sessions.take_snapshot, self.sessions.restore)
        #: Usage of keys that have limits.
        self.usage = Usage(self)
        self.box_appliers = BoxAppliers(self)
        BoxHandlers(self)
        BoxListing(self)
        GroupHandlers(self)
        Scanning(self)
        self.forwarding = Forwarding(self)
        self.local_copies = LocalCopies(self, self.forwarding)
        self.routers = Routers(self, routers_max)
        self.jobs = Jobs(self)
        QueueOperations(self, self.jobs)
        OutputHandlers(self, self.jobs)
        self.moves = Moves(self, self.forwarding.outboxes)
        self.txns = Txns(self, bytes_max=txn_bytes_max, ttl_ms=txn_ttl_ms)
        self._transactions = TransactionHandlers(self, self.txns)
        self._commits = CommitHandlers(self, self.txns)
        self.basins = Basins(self)
        self.tokens = Tokens(self)
        self.streams = Streams(self)
        self.schedules = ScheduleHandlers(self, schedules_max=schedules_max, find_zone=find_zone)
        self.uploading = Uploading(
            self, is_enabled=has_store, registers=streams_in_store, backlog_bytes_max=backlog_bytes_max
        )
        self.durability.use_store(self.uploading)

    def __repr__(self) -> str:
        return f"<Machine {len(self.boxes)} boxes, lsn {self.durable_lsn}/{self.logged_lsn}/{self.lsn}>"

    # -- the surface

    def on_logged(self, lsn: int) -> list[str]:
        """Notes that everything up to `lsn` is in the file. Returns the boxes whose readers may see more."""
        return self.durability.on_logged(lsn)

    def on_durable(self, lsn: int) -> list[str]:
        """Notes that everything up to `lsn` is on the disk. Returns the boxes whose readers may see more."""
        names = self.durability.on_durable(lsn)
        if self.moves.on_durable(lsn):
            names.append(forwards.RELAY)
        return names

    @property
    def logged_lsn(self) -> int:
        return self.durability.logged_lsn

    @property
    def durable_lsn(self) -> int:
        return self.durability.durable_lsn

    def next_deadline_ms(self) -> int | None:
        soonest = self.next_box_ms()
        for when in (
            self.forwarding.outboxes.next_retry_ms(),
            self.txns.next_expiry_ms(),
            self.key_expiry.next_ms(),
            self.schedules.next_ms(),
        ):
            if when is not None and (soonest is None or when < soonest):
                soonest = when
        return soonest

    def tick(self, now_ms: int, *, has_space: bool = True) -> Outcome:
        """Make the changes that time alone causes. `has_space`: the disk has room for new records."""
        entries: LogEntries = []
        wakes: list[str] = []
        needs: list[Missing] = []
        jobs_back = 0
        for _ in range(TICK_BOXES_MAX):
            box = self.next_due_box(now_ms)
            if box is None:
                break
            try:
                self.expire(box, now_ms, entries)
            except NotLoaded as missing:
                needs.append(missing.with_traceback(None))
                self.arm_timer_at(box, now_ms + FETCH_MS)
                continue
            back = box.queue.advance(now_ms, now_ms + self.wall_ahead_ms) if box.queue is not None else 0
            if back:
                wakes.append(box.name)
            jobs_back += back
            idle_at = self.idle_ms(box)
            if idle_at is not None and idle_at <= now_ms:
                self.log(changes.SeqsReserved(box.generation, box.log.head_seq), entries)
            gone_at = box.gone_ms()
            if gone_at is not None and gone_at <= now_ms:
                self.log(changes.BoxDeleted(box.generation), entries)
                wakes.append(box.name)
            else:
                self.arm_timer(box)
            if jobs_back >= ADVANCE_MAX:  # more may be due at once; others come first
                break
        self.keys_kept -= self.key_expiry.step(self.generations, now_ms, self.on_keys_dropped)
        self._transactions.tick(now_ms, entries)
        if self.forwarding.outboxes.retry(now_ms):
            wakes.append(forwards.RELAY)
        self.schedules.tick(now_ms, entries, wakes, needs, has_space=has_space)
        return Outcome(entries, None, wakes=tuple(wakes), needs=tuple(needs))

    def start(self, *, boot_id: str, now_ms: int, cache_survived: bool = True) -> Outcome:
        """Starts the shard after recovery, and settles the state that the previous process left. `boot_id`
        names the page cache; `cache_survived` is False if the cache may be lost although the id is equal."""
        entries: LogEntries = []
        if not self.stopped_clean and (self.boot_id != boot_id or not cache_survived):
            # The page cache is gone. Records of disk boxes that were acked but not yet synced may be
            # gone, and their seqs must not be given to others. After a mere process death they are not
            # gone: a disk record is acked when it is in the file, and the file outlives the process.
            for box in list(self.boxes.values()):
                if box.is_disk and box.reserved_seq > box.log.head_seq:
                    loss = changes.SeqsLost(box.generation, box.log.head_seq + 1, box.reserved_seq)
                    self.stage(loss, box, entries)
        self.log(changes.ShardStarted(boot_id, now_ms, max(0, self.last_ms - now_ms)), entries)
        self.tally = TallyReport()
        for box in self.boxes.values():
            self.arm_timer(box)
            self.forwarding.note(box)
            self.moves.note(box)
        self.basins.lsn = self.tokens.lsn = self.lsn
        self.routers.lsn = self.forwarding.endpoints_lsn = self.lsn
        self.forwarding.outboxes.start_lsn = self.lsn
        self.uploading.start()
        return Outcome(entries, None, self.lsn, True)

    def stop(self, now_ms: int) -> Outcome:
        """Stops the shard cleanly."""
        entries: LogEntries = []
        for box in self.boxes.values():
            if box.queue is not None and box.queue.jobs and not (box.is_memory or box.config.leases_durable):
                self.jobs.restate(box, entries)
        self.log(changes.ShardStopped(now_ms), entries)
        return Outcome(entries, None, self.lsn, True)

    def rest(self, now_ms: int) -> Outcome:
        """Logs an empty change, so that the next snapshot gets an lsn of its own on an idle shard."""
        entries: LogEntries = []
        self.log(changes.ShardRested(now_ms), entries)
        return Outcome(entries, None)

    def upkeep(self, change: changes.UpkeepChange) -> Outcome:
        """Makes a change that background work has prepared. A change of a memory box is not logged."""
        entries: LogEntries = []
        self.stage(change, self.generations[change.generation], entries)
        return Outcome(entries, None)

    def give_up(self, command: Command) -> None:
        """Drops the search results of a command that is answered with an error, and not handled again."""
        box = self.boxes.get(getattr(command, "box", ""))
        if box is not None and box.volatile.deletion is not None and box.volatile.deletion.command is command:
            box.end_deletion()

    def let_moves_go(self, now_ms: int) -> Outcome:
        """Ends a hold of moves (`queues/record_moves.py`)."""
        entries: LogEntries = []
        boxes = self.moves.resume(now_ms, entries)
        return Outcome(entries, None, wakes=(forwards.RELAY, *boxes))

    def keep_held(self, pinned_lsn: int) -> Outcome | None:
        """Logs a held chunk of a transaction again, so that it no longer needs the log up to `pinned_lsn`.
        Returns None if there is no such chunk."""
        entries: LogEntries = []
        change = self.txns.to_keep(pinned_lsn)
        if change is None:
            return None
        self.log(change, entries)
        return Outcome(entries, None)

    def keep_rendered(self, commit: Commit, batches: Sequence[tuple[int, Batch]], chunks: int = 0) -> Outcome:
        """Logs rendered batches of a commit and, with `chunks`, that this many more chunks are rendered."""
        entries: LogEntries = []
        self._commits.keep_rendered(commit, batches, entries)
        if chunks:
            self._commits.end_step(commit, chunks, entries)
        return Outcome(entries, None)

    @property
    def shows_when_logged(self) -> bool:
        """True if staged changes become visible to readers when they are logged."""
        return self.durability.shows_when_logged

    # -- applying

    def _apply_started(self, change: changes.ShardStarted, lsn: int) -> None:
        self.boot_id = change.boot_id
        self.last_ms = change.at_ms
        self.txns.rewound(change.at_ms)  # always: their times are in their frames, not in a snapshot
        if change.rewound_ms:
            self._rewind(change.at_ms, change.rewound_ms)
        if not self.stopped_clean:  # the sessions of the last snapshot are older than the crash
            self.sessions.clear()
        self.jobs.begin(lsn)
        self.sessions.begin(change.at_ms)
        self.schedules.begin(change.at_ms)
        for box in self.boxes.values():
            if box.queue is not None:
                box.queue.on_start(leases_kept=self.stopped_clean or box.config.leases_durable)
        self.stopped_clean = False
        for name in [name for name, box in self.boxes.items() if box.is_memory]:
            self._begin_anew(self.boxes[name], change.at_ms)

    def _rewind(self, now_ms: int, ms: int) -> None:
        """Time begins again at `now_ms`, earlier by `ms`."""
        self.sessions.rewound(ms)
        for box in self.boxes.values():
            box.rewound(now_ms, ms)
            self.key_expiry.watch(box)
            self.arm_timer(box)
        self.unsealed_boxes.rewound()

    def _begin_anew(self, old: Box, at_ms: int) -> None:
        """A memory box after a restart: the same name and config, nothing in it, another generation."""
        generation = self.next_generation(at_ms)
        self.last_generation = generation
        box = Box(
            name=old.name, generation=generation, config=old.config, created_ms=old.created_ms, reserved_seq=0
        )
        box.emptied_ms = at_ms
        del self.generations[old.generation]
        self.box_appliers.leave_alone(old.generation)
        self.forget_timer(old.generation)
        self.keys_kept -= len(old.keys)
        self.key_expiry.forget(old.generation)
        self.forwarding.box_reborn(old, box)
        self.moves.close(old)
        self.boxes[old.name] = box
        self.generations[generation] = box
        box.schedules = old.schedules
        self.schedules.on_box_replaced(box)

    def _apply_stopped(self, change: changes.ShardStopped, lsn: int) -> None:
        self.stopped_clean = True

    def _apply_rested(self, change: changes.ShardRested, lsn: int) -> None:
        """Changes nothing: only the lsn of the change matters (`rest`)."""

    # -- recovery: restore a snapshot, give its batches their payload back, then apply the log after it

    def snapshot(self, keep: Callable[[Box], bool] | None = None) -> ShardState:
        """Returns the state at `self.lsn` without payloads, as a copy. With `keep`, only the boxes for which
        it returns True."""
        capture = self._new_capture(keep)
        while capture.step(len(self.boxes)):
            pass
        return capture.state()

    def begin_snapshot(
        self, keep: Callable[[Box], bool] | None = None, *, with_batches: bool = False
    ) -> Capture:
        """Begins a snapshot that is taken in steps. The caller calls `end_snapshot` in every case. A snapshot
        with batches must be complete without the log, so it leaves out rows that are only in the log."""
        capture = self._new_capture(keep, with_batches=with_batches)
        self._captures.append(capture)
        self.before_apply.insert(0, capture.before)
        return capture

    def _new_capture(
        self, keep: Callable[[Box], bool] | None = None, *, with_batches: bool = False
    ) -> Capture:
        state = ShardState(
            lsn=self.lsn,
            needs_lsn=self.lsn + 1,
            boot_id=self.boot_id,
            stopped_clean=self.stopped_clean,
            last_generation=self.last_generation,
            not_recreated=list(self.not_recreated),
            boxes=[],
            at_ms=self.last_ms,
        )
        self.fill_snapshot(state)
        if with_batches:  # it must be complete without the log, which alone has these rows
            state.held, state.commits = [], []
        boxes = self.generations
        if keep is not None:
            boxes = {generation: box for generation, box in boxes.items() if keep(box)}
        return Capture(state, boxes, with_batches=with_batches)

    def end_snapshot(self, capture: Capture) -> None:
        self._captures.remove(capture)
        self.before_apply.remove(capture.before)

    def restore(self, state: ShardState) -> RestoreNeeds:
        """Takes over a snapshot. Returns what must still be read: it is named there but not contained."""
        assert self.lsn == 0 and not self.boxes, "restore comes first"
        self.lsn = state.lsn
        self.boot_id = state.boot_id
        self.stopped_clean = state.stopped_clean
        self.last_generation = state.last_generation
        self.last_ms = state.at_ms
        self.not_recreated = dict.fromkeys(state.not_recreated)
        needs = RestoreNeeds({}, [], set(state.held))
        for facts in state.boxes:
            box = Box.from_facts(facts)
            self.boxes[box.name] = box
            self.generations[box.generation] = box
            self.keys_kept += len(box.keys)
            self.key_expiry.watch(box)
            for lsn in array("Q", facts.batches):
                if lsn:
                    needs.batches[lsn] = box
            needs.segments.extend((box, segment) for segment in facts.segments)
            self.durability.note_reservation(box, state.lsn)
        self.restore_snapshot(state)
        return needs

    def end_hydration(self) -> None:
        """Ends the hydration: all batches of the snapshot are back. Computes what depends on them."""
        for box in self.boxes.values():
            box.log.end_hydration()
            self.box_appliers.note_unsealed(box, 0)
            self.box_appliers.note_dead_records(box)
            self.box_appliers.note_movable(box)
            if box.config.compact == "tag":
                self.compactable[box.generation] = box
            self.arm_timer(box)
        self.txns.finish_restore()

    def segments(self) -> Iterator[Segment]:
        """Every segment of every box of this shard."""
        for box in self.boxes.values():
            yield from box.log.segments

    def end_recovery(self, lsn: int) -> None:
        """Ends the recovery: everything up to `lsn` has been replayed and is on the disk. All records become
        visible, except those of object boxes that are not in the object store yet."""
        self.on_durable(lsn)
        for box in self.boxes.values():
            while box.log.settle_deletes():
                pass
            if not box.is_object:
                box.log.show(box.log.head_seq, box.log.last_ts)

    def check(self) -> None:
        """Asserts the invariants of the machine and of every box. For tests."""
        assert len(self.boxes) == len(self.generations), "NAMES"
        for name, box in self.boxes.items():
            assert box.name == name and self.generations[box.generation] is box, "NAMES"
            box.log.check()
            if box.queue is not None:
                box.queue.check(box.log)
            if box.is_disk:
                assert box.log.visible_seq <= box.reserved_seq, "CEILING"
            if box.stream is not None:
                box.stream.check(box.log.earliest_seq)
        super().check()
        assert self.keys_kept == sum(len(box.keys) for box in self.boxes.values()), "KEYS"
        self.key_expiry.check(self.boxes.values())
        assert self.logged_lsn <= self.lsn, "LSN"
        boxes = [box for box in self.boxes.values() if not box.is_memory and box.log.tail.records]
        assert {box.generation for box in boxes} == set(self.unsealed_boxes), "UNSEALED"
        self.unsealed_boxes.check()
        for candidates in (self.due, self.boxes_with_dead_records, self.movable, self.compactable):
            assert all(self.generations.get(each) is box for each, box in candidates.items()), "UPKEEP"
        assert all(box.generation <= self.last_generation for box in self.boxes.values()), "GENERATIONS"

    def statistics(self) -> dict[str, int]:
        return {
            "boxes": len(self.boxes),
            "records": sum(box.log.count for box in self.boxes.values()),
            "bytes": sum(box.log.bytes for box in self.boxes.values()),
            "idempotency_keys": self.keys_kept,
            "routers": len(self.routers.routers),
            "txn_epochs": len(self.txns.epochs),
            "txn_commits": len(self.txns.commits),
            "txn_bytes": self.txns.bytes,
            "txn_marks": len(self.txns.marks),
            "lsn": self.lsn,
            "durable_lsn": self.durable_lsn,
        }
