"""The part of the machine that features may use: boxes, the log, replies, timers, limits.

A feature is built with the context and registers its handlers and appliers with it (`kernel.py`).
Features share public methods of the context, and of the features that it names. `machine.py` builds them.

    require, find_box            a box by its name, or the error that says that it does not exist
    log, stage                   apply a change and note it for the log; `stage` does not log memory boxes
    append_batch                 stores records of appends, copies and streams in a box; commits of
                                 transactions do it in `transactions/commit_handlers.py`
    answer, answer_absent, …     replies that are sent when `durability.py` allows it
    arm_timer                    has `tick` look at a box when time changes something in it
    require_room, plan_box       limits of the shard and of keys
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol, TypeVar

from sortedcontainers import SortedDict

from shard.core import changes, features
from shard.core.boxes.box import RESERVE_SEQS, Box
from shard.core.boxes.box_rates import BoxRates
from shard.core.boxes.key_expiry import KeyExpiry
from shard.core.boxes.unsealed import UnsealedBoxes
from shard.core.changes import Change
from shard.core.durability import Durability, ReplyKind, Stage
from shard.core.kernel import DoesNotApply, Kernel
from shard.core.limits.quota import Quota
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.queue import Queue
from shard.core.transactions.unrendered import NotRendered
from streams.protocol.errors import BoxNotFound, InvalidRequest, StreamsError, Throttled
from streams.protocol.messages import commands, forwards
from streams.protocol.messages.commands import Command, Reply
from streams.protocol.messages.s2 import AppendStream
from streams.protocol.model.boxes import BoxConfig, BoxPatch, merge
from streams.protocol.telemetry.reports import TallyReport

#: A disk box without writes for this long returns its reserved seqs, so that after a power cut it does not
#: report a loss that cannot have happened.
RESERVATION_IDLE_MS = 5_000

#: Changes of the system clock below this do not rearm timers.
_AHEAD_MS_NOISE = 5

#: More than the maximum number of shards. With this value, generations stay below 2**53 until the year 2248.
GENERATIONS_PER_MS = 1024


def placeholder(change: changes.BoxCreated) -> Box:
    """Return the box that a write would create, so that the write can be checked against it."""
    return Box(
        name=change.name,
        generation=change.generation,
        config=change.config,
        created_ms=change.at_ms,
        reserved_seq=change.reserved_seq,
    )


class BoxChange(Protocol):
    """A change of one box, which it names by its generation."""

    @property
    def generation(self) -> int: ...


AnyBoxChange = TypeVar("AnyBoxChange", bound=BoxChange)


class Context(Kernel):
    #: Features that other features call. `features.py` has the interface of each.
    box_appliers: features.BoxChanges
    jobs: features.JobRestating
    moves: features.RecordMoving
    forwarding: features.RouterEnds
    routers: features.RouterRegistry
    txns: features.HeldRows
    basins: features.BasinRegistry
    streams: features.StreamExpiry
    sessions: features.WatchSessions
    uploading: features.ObjectUploads
    usage: features.KeyUse
    schedules: features.BoxSchedules

    def __init__(
        self, *, shard: int, boxes_max: int, bytes_max: int, due_records: int, due_bytes: int
    ) -> None:
        super().__init__()
        self.shard = shard
        self.boxes: SortedDict[str, Box] = SortedDict()
        self.generations: dict[int, Box] = {}
        self.last_generation = 0
        self.durability = Durability(on_shown=self._on_shown)
        self.boxes_max = boxes_max
        self.quota = Quota(bytes_max) if bytes_max else None
        #: Stored boxes with batches that are not sealed.
        self.unsealed_boxes = UnsealedBoxes()
        #: Boxes of `unsealed_boxes` with enough records or bytes for a segment.
        self.due: dict[int, Box] = {}
        self.due_records, self.due_bytes = due_records, due_bytes
        #: Boxes with new segments or new dead records: candidates for compaction.
        self.boxes_with_dead_records: dict[int, Box] = {}
        #: Boxes with a new segment: one of their segments may be due for the cold store.
        self.movable: dict[int, Box] = {}
        #: Boxes with `compact: "tag"` that were written to since they were last checked.
        self.compactable: dict[int, Box] = {}
        #: Names of deleted boxes with `auto_create: false`, oldest first.
        self.not_recreated: dict[str, None] = {}
        #: The system clock minus the time of the shard, as last observed (`engine/timekeeper.py`).
        self.wall_ahead_ms = 0
        #: Counters since start. Metrics only: no decision depends on them.
        self.tally = TallyReport()
        #: Records appended per second and box, for reports and to sort lists.
        self.box_rates = BoxRates()
        #: Number of stored idempotency keys.
        self.keys_kept = 0
        self.key_expiry = KeyExpiry()
        #: Queues with jobs that wait for the system clock, and the `wall_ahead_ms` for which their timers are
        #: set.
        self._scheduled_boxes: dict[int, Box] = {}
        self._timers_ahead_ms = 0
        # (time, generation) of the next tick that a box needs. `_deadline_of` tells which entries are
        # current.
        self._deadlines: list[tuple[int, int]] = []
        self._deadline_of: dict[int, int] = {}

    def on_box_change(
        self,
        kind: type[AnyBoxChange],
        apply: Callable[[AnyBoxChange, int], None],
        validate: Callable[[AnyBoxChange, Box], None] | None = None,
    ) -> None:
        """Register the applier of a change of a box. The box must exist; `validate` checks further
        conditions."""
        generations = self.generations

        def validate_box(change: AnyBoxChange) -> None:
            box = generations.get(change.generation)
            if box is None:
                raise DoesNotApply(f"there is no box of generation {change.generation}")
            if validate is not None:
                validate(change, box)

        self.on_change(kind, apply, validate_box)

    def stage(self, change: Change, box: Box, entries: LogEntries) -> int:
        """Apply a change of `box`, and note it for the log unless it is a memory box."""
        if box.is_memory:
            self.apply(change, 0)
            return 0
        return self.log(change, entries)

    def require(self, name: str) -> Box:
        box: Box | None = self.boxes.get(name)
        if box is None:
            raise BoxNotFound(
                f"box {name} does not exist; create it with PUT or by appending to it", box=name
            )
        return box

    def find_box(self, name: str, now_ms: int, entries: LogEntries) -> Box:
        """Return the box, after evicting its expired records."""
        box = self.require(name)
        self.expire(box, now_ms, entries)
        return box

    def expire(self, box: Box, now_ms: int, entries: LogEntries) -> None:
        if box.stream is not None:
            self.streams.expire(box, box.stream, now_ms, entries)
        if box.config.ttl_ms:
            floor = box.floor_for_ttl(now_ms, self.wall_ahead_ms)
            if floor:
                self.stage(box.plan_eviction(floor, "ttl", now_ms), box, entries)

    def wall_ms(self, now_ms: int) -> int:
        """Return the time of the system clock. Never logged as a time of a record or a lease."""
        return now_ms + self.wall_ahead_ms

    def idle_ms(self, box: Box) -> int | None:
        """Return when a disk box may return its reserved seqs; None if it has none."""
        if not box.is_disk or box.reserved_seq <= box.log.head_seq:
            return None
        return box.last_append_ms + RESERVATION_IDLE_MS

    def arm_timer(self, box: Box) -> None:
        """Arm the timer for the next tick that this box needs."""
        due_ms = self._job_due_ms(box.queue, box) if box.queue is not None else None
        if box.stream is not None:
            due_ms = box.stream.due_ms()
        candidates = (box.expiry_ms(), self.idle_ms(box), box.gone_ms(), due_ms)
        times = [when for when in candidates if when is not None]
        if not times:
            return
        self.arm_timer_at(box, min(times))

    def arm_job_timer(self, box: Box, queue: Queue) -> None:
        """Arm the timer for the end of the next lease or delay. A claim changes no other deadline of a
        box."""
        due_ms = self._job_due_ms(queue, box)
        if due_ms is not None:
            self.arm_timer_at(box, due_ms)

    def _job_due_ms(self, queue: Queue, box: Box) -> int | None:
        due_ms, wall_ms = queue.next_due_ms(), queue.next_wall_ms()
        if wall_ms is None:
            self._scheduled_boxes.pop(box.generation, None)
            return due_ms
        self._scheduled_boxes[box.generation] = box
        at_ms = wall_ms - self.wall_ahead_ms
        return at_ms if due_ms is None else min(at_ms, due_ms)

    def follow_system_clock(self) -> None:
        """Arm the timers of jobs that wait for the system clock again, if it was set."""
        if abs(self.wall_ahead_ms - self._timers_ahead_ms) < _AHEAD_MS_NOISE:
            return
        self._timers_ahead_ms = self.wall_ahead_ms
        for generation, box in list(self._scheduled_boxes.items()):
            if generation in self.generations:
                self.arm_timer(box)
            else:
                del self._scheduled_boxes[generation]

    def arm_timer_at(self, box: Box, when: int) -> None:
        if self._deadline_of.get(box.generation, when + 1) > when:
            self._deadline_of[box.generation] = when
            heapq.heappush(self._deadlines, (when, box.generation))

    def next_box_ms(self) -> int | None:
        while self._deadlines:
            when, generation = self._deadlines[0]
            if self._deadline_of.get(generation) == when:
                return when
            heapq.heappop(self._deadlines)
        return None

    def answer(self, box: Box, reply: Reply | StreamsError, entries: LogEntries, lsn: int) -> Outcome:
        """Return a reply that depends on records of this box, up to the change `lsn`."""
        return reply_after(self.durability.wait_for(ReplyKind.RECORDS, box, lsn), entries, reply)

    def when_registered(self, reply: Reply | StreamsError, lsn: int, entries: LogEntries) -> Outcome:
        """Return a reply about a registry (of routers, basins, access tokens), whose last change is `lsn`."""
        return reply_after(self.durability.wait_for_register(lsn), entries, reply)

    def nothing_yet(self, entries: LogEntries, not_before_ms: int = 0) -> Outcome:
        """Return an outcome without a reply: the command waits."""
        return Outcome(entries, None, not_before_ms=not_before_ms)

    def refuse(self, command: Command, error: StreamsError, entries: LogEntries) -> Outcome:
        """Return a refusal. It waits until the box's last change, or its deletion, cannot be lost."""
        box = self.boxes.get(getattr(command, "box", ""))
        if box is not None:
            return self.answer(box, error, entries, box.last_lsn)
        return self.answer_absent(getattr(command, "box", ""), error, entries)

    def answer_absent(self, name: str, reply: Reply | StreamsError, entries: LogEntries) -> Outcome:
        """Return the reply that a box does not exist."""
        return reply_after(self.durability.wait_for_absence(name), entries, reply)

    def require_room(self, account: str, size: int, now_ms: int, *, counts: bool = True) -> None:
        """Raise `Throttled` if `size` more bytes of live records exceed the limit of the shard or of the key.
        With `counts` they are counted from now on; without it this is only a check."""
        if account:
            self.usage.require(account, "stored_bytes", size)
        if self.quota is not None:
            self.quota.check(self.boxes.values(), size, now_ms, counts=counts)

    def on_keys_dropped(self, generation: int) -> None:
        if self.usage.is_on:
            self.usage.recount(generation)

    def plan_generation(self, now_ms: int) -> int:
        """Return the generation of a new box. Raises `Throttled` if the shard has too many boxes."""
        if self.boxes_max and len(self.boxes) >= self.boxes_max:
            raise Throttled(
                f"this shard has {len(self.boxes)} boxes, which is its limit; delete some or raise it",
                limit="boxes",
            )
        return self.next_generation(now_ms)

    def plan_box(self, name: str, patch: BoxPatch | None, now_ms: int) -> changes.BoxCreated:
        generation = self.plan_generation(now_ms)
        config = merge(BoxConfig(), patch or BoxPatch(), box=name, exists=False)
        self.check_class(config, None)
        return changes.BoxCreated(
            generation, name, config, now_ms, RESERVE_SEQS if config.durability == "disk" else 0
        )

    def check_class(self, config: BoxConfig, box: Box | None) -> None:
        if config.durability != "object" or self.uploading.is_enabled or (box is not None and box.is_object):
            return
        raise InvalidRequest(
            "durability: this server has no object store for boxes of class object; give it one with "
            "STREAMS_COLD_DIR",
            field="durability",
        )

    def next_generation(self, now_ms: int) -> int:
        """Return a generation that no box of any shard has had. Modulo `GENERATIONS_PER_MS` it is the number
        of the shard, and it is higher than those of all boxes here, including boxes that moved from other
        shards."""
        after = self.last_generation + 1
        after += (self.shard - after) % GENERATIONS_PER_MS
        return max(now_ms * GENERATIONS_PER_MS + self.shard, after)

    def plan_created(
        self, command: commands.Append | forwards.ForwardHead, now_ms: int
    ) -> tuple[changes.BoxCreated, Box]:
        """Return the box that this write would create, as a placeholder to check the write against."""
        may_create = command.box not in self.not_recreated if command.create is None else command.create
        if not may_create:
            raise BoxNotFound(
                f"box {command.box} does not exist, and this request may not create it; create the box first",
                box=command.box,
            )
        creation = self.plan_box(command.box, command.config, now_ms)
        return creation, placeholder(creation)

    def append_batch(
        self,
        command: commands.Append | forwards.Forward | AppendStream,
        box: Box,
        change: changes.BatchAppended,
        is_new_box: bool,
        entries: LogEntries,
    ) -> Outcome:
        batch = change.batch
        last_seq = batch.last_seq
        if box.log.tail.has_unrendered and box.is_object:  # the object store must get changes in order
            raise NotRendered(box.generation)
        reserves = self.reserve(box, last_seq, entries)
        lsn = self.stage(change, box, entries)
        if reserves:
            self.arm_timer(box)  # for the tick that returns unused seqs
        reply = commands.AppendResult(
            box.name, batch.first_seq, last_seq, last_seq, is_new_box, False, command.return_seqs
        )
        if lsn == 0:
            wakes: tuple[str, ...] = (box.name,)
            if box.outboxes and self.forwarding.note(box):
                wakes = (box.name, forwards.RELAY)
            return self.answer(box, reply, entries, 0)._replace(wakes=wakes)
        stage = self.durability.show_append(box, lsn, last_seq, batch.last_ts)
        if box.outboxes:
            self.forwarding.note_staged(box)
        return Outcome(entries, reply, lsn, stage is not Stage.LOGGED, (), 0, (), stage is Stage.STORED)

    @staticmethod
    def ceiling_above(seq: int) -> int:
        """Return the last seq that a disk box reserves when it has used seqs up to `seq`."""
        return seq + RESERVE_SEQS

    def reserve(self, box: Box, last_seq: int, entries: LogEntries) -> bool:
        """Reserve seqs of a disk box if a write up to `last_seq` needs it. The reservation is logged before
        the write: if recovery finds the write, it also finds the reservation."""
        if last_seq + RESERVE_SEQS // 2 <= box.reserved_seq or not box.is_disk:
            return False
        self.log(changes.SeqsReserved(box.generation, self.ceiling_above(last_seq)), entries)
        return True

    def _on_shown(self, box: Box) -> bool:
        return self.forwarding.note(box)

    def next_due_box(self, now_ms: int) -> Box | None:
        """Remove and return the next box whose timer has expired; None if there is none."""
        self.follow_system_clock()
        when = self.next_box_ms()
        if when is None or when > now_ms:
            return None
        _, generation = heapq.heappop(self._deadlines)
        del self._deadline_of[generation]
        return self.generations[generation]

    def forget_timer(self, generation: int) -> None:
        self._deadline_of.pop(generation, None)

    def check_timers(self) -> None:
        """Assert TIMERS: each box with a timer exists, and its entry is in the heap. For tests."""
        assert self._deadline_of.keys() <= self.generations.keys(), "TIMERS"
        entries = set(self._deadlines)
        assert all((when, each) in entries for each, when in self._deadline_of.items()), "TIMERS"
