"""Handles the commands and applies the changes of schedules, and appends their records when they are due.

A schedule is stored with its box (`Box.schedules`), so its append is local: the records of due times and the
progress of the schedule are one change, `ScheduleFired`. Whatever is killed, each due time that counts has
one record. Due times are computed here and logged: replay never depends on time zones.

    PutSchedule ─► ScheduleSet: the definition and the first due time
    tick        ─► due ─► the box accepts the records ─► ScheduleFired: records, next due time
                     └──► the box refuses them        ─► volatile: `last_error`, the next attempt

*Time.* Due times are on the system clock: `wall_ms`. When that is set forward, the due times in between are
missed (`schedule.py`); when it is set back, schedules wait until it is there again, and no due time counts
twice.

Invariants
- NAMES: `_generations` has exactly the schedules of all boxes.
- ARMED: each schedule that has something due has one valid entry in the heap, at its time or before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import NotLoaded
from shard.core.context import Context
from shard.core.durability import ReplyKind
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Missing, Outcome, reply_after
from shard.core.schedule_changes import ScheduleFacts
from shard.core.schedules.schedule import NO_SCHEDULES, Schedule, ZoneFinder, due_times_of, next_due_of
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import (
    BoxFull,
    DiskFull,
    InvalidRequest,
    RecordTooLarge,
    ScheduleNotFound,
    StreamsError,
    Throttled,
)
from streams.protocol.messages import schedules as protocol
from streams.protocol.messages.schedules import ScheduleSpec

#: Schedules that one tick looks at: a few milliseconds. The rest are due in the next one, at once.
TICK_SCHEDULES_MAX = 32

#: Retry delay for an append that waits for a payload fetch.
_FETCH_MS = 100

#: Bytes of the records of all schedules of a shard. They are in memory and in every snapshot.
RECORD_BYTES_MAX = 64 << 20


class ScheduleTotals(NamedTuple):
    """Figures for a report."""

    schedules: int
    blocked_count: int
    #: How late the latest schedule is.
    lag_ms: int


class ScheduleHandlers:
    def __init__(self, context: Context, *, schedules_max: int, find_zone: ZoneFinder) -> None:
        self._context = context
        self._max = schedules_max
        self._find_zone = find_zone
        #: By name: the generation of the box that has the schedule.
        self._generations: SortedDict[str, int] = SortedDict()
        self._record_bytes = 0
        #: The start of this process.
        self._started_ms = 0
        #: The last change that removed a schedule: a reply that one does not exist rests on it.
        self._dropped_lsn = 0
        #: (when, name), on the system clock. Valid if `_deadlines` has the same time for its name.
        self._heap: list[tuple[int, str]] = []
        self._deadlines: dict[str, int] = {}
        context.on_check(self.check)
        context.on_snapshot(lambda state: None, self._restore)
        context.on_command(protocol.PutSchedule, self._put)
        context.on_command(protocol.FindSchedule, self._find)
        context.on_command(protocol.ListSchedules, self._list)
        context.on_command(protocol.DropSchedule, self._drop)
        context.on_command(protocol.RunSchedule, self._run)
        context.on_box_change(changes.ScheduleSet, self._apply_set)
        context.on_box_change(changes.ScheduleFired, self._apply_fired, validation.validate_append)
        context.on_box_change(changes.ScheduleAdvanced, self._apply_advance, _require_schedule)
        context.on_box_change(changes.ScheduleDropped, self._apply_drop, _require_schedule)

    def __repr__(self) -> str:
        return f"<ScheduleHandlers {len(self._generations)}, next at {self._heap[:1]}>"

    # -- deciding

    def _put(self, command: protocol.PutSchedule, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.find_box(command.box, now_ms, entries)
        current = box.schedules.get(command.name)
        self._check_put(command, box, current)
        if current is None or current.spec != command.spec:
            context.log(self._plan_set(command, box, current, context.wall_ms(now_ms)), entries)
        schedule = box.schedules[command.name]
        state = self._state_of(box, schedule)
        reply = protocol.PutScheduleReply(**msgspec.structs.asdict(state), created=current is None)
        wait = context.durability.wait_for_config(max(schedule.lsn, box.config_lsn), box.config.durability)
        return reply_after(wait, entries, reply)

    def _check_put(self, command: protocol.PutSchedule, box: Box, current: Schedule | None) -> None:
        if current is None and command.name in self._generations:
            other = self._context.generations[self._generations[command.name]]
            raise InvalidRequest(
                f"box: schedule {command.name} appends to box {other.name}; delete it first, then create it "
                f"for {box.name}",
                field="box",
            )
        count = len(self._generations) + command.others
        if current is None and self._max and count >= self._max:
            raise Throttled(
                f"there are {count} schedules already; delete some or raise STREAMS_MAX_SCHEDULES",
                limit="schedules",
            )
        size = self._record_bytes + len(command.spec.record)
        if size - (0 if current is None else len(current.spec.record)) > RECORD_BYTES_MAX:
            raise Throttled(
                f"the records of the schedules of this shard have {self._record_bytes} bytes already; keep "
                "large data in a box and its place in the record",
                limit="schedules",
            )

    def _plan_set(
        self, command: protocol.PutSchedule, box: Box, current: Schedule | None, now_ms: int
    ) -> changes.ScheduleSet:
        spec = command.spec
        anchor_ms = now_ms
        next_due_ms = 0
        is_same_rhythm = current is not None and _rhythm(current.spec) == _rhythm(spec)
        if is_same_rhythm and current is not None:
            anchor_ms = current.anchor_ms
            next_due_ms = current.next_due_ms
        times = due_times_of(spec, anchor_ms, self._find_zone)
        if times.next_after(now_ms) is None:
            raise InvalidRequest(f"cron: {spec.cron!r} matches no date in the next years", field="cron")
        if spec.is_paused:
            next_due_ms = 0
        elif not next_due_ms or (spec.end_ts and next_due_ms > spec.end_ts):
            next_due_ms = next_due_of(spec, times, now_ms)
        return changes.ScheduleSet(box.generation, command.name, spec, next_due_ms, anchor_ms, now_ms)

    def _find(self, command: protocol.FindSchedule, now_ms: int, entries: LogEntries) -> Outcome:
        count = len(self._generations)
        generation = self._generations.get(command.name)
        if generation is None:
            return self._context.when_registered(
                protocol.FindScheduleReply(count), self._dropped_lsn, entries
            )
        box = self._context.generations[generation]
        schedule = box.schedules[command.name]
        reply = protocol.FindScheduleReply(count, self._state_of(box, schedule))
        return self._context.answer(box, reply, entries, max(schedule.lsn, box.config_lsn))

    def _list(self, command: protocol.ListSchedules, now_ms: int, entries: LogEntries) -> Outcome:
        page: list[protocol.ScheduleState] = []
        positions: list[tuple[Box, int]] = []
        more = False
        for name in self._generations.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                break
            box = self._context.generations[self._generations[name]]
            if name <= command.after or command.box not in ("", box.name):
                continue
            if len(page) == command.limit:
                more = True
                break
            schedule = box.schedules[name]
            page.append(self._state_of(box, schedule))
            positions.append((box, max(schedule.lsn, box.config_lsn)))
        wait = self._context.durability.wait_for_list(positions)
        return reply_after(wait, entries, protocol.ScheduleList(page, more))

    def _drop(self, command: protocol.DropSchedule, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        schedule = None if box is None else box.schedules.get(command.name)
        is_there = schedule is not None and command.created_ts in (0, schedule.created_ms)
        if box is not None and is_there:
            context.log(changes.ScheduleDropped(box.generation, command.name), entries)
        reply = protocol.DeleteScheduleReply(command.name, is_there)
        return context.when_registered(reply, self._dropped_lsn, entries)

    def _run(self, command: protocol.RunSchedule, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.find_box(command.box, now_ms, entries)
        schedule = box.schedules.get(command.name)
        if schedule is None:
            raise ScheduleNotFound(
                f"schedule {command.name} does not exist; it may have been deleted", schedule=command.name
            )
        key = None
        if command.idempotency_key is not None:
            key = f"run of {command.name}: {command.idempotency_key}"
            earlier = box.known_key(key, now_ms)
            if earlier is not None:
                reply = protocol.RunScheduleReply(command.name, box.name, earlier.last_seq, True)
                return context.answer(box, reply, entries, max(earlier.lsn, box.config_lsn))
        outcome = self._append(box, schedule, [context.wall_ms(now_ms)], None, key, now_ms, entries)
        reply = protocol.RunScheduleReply(command.name, box.name, box.log.head_seq, False)
        wait = context.durability.wait_for(ReplyKind.RECORDS, box, box.last_lsn)
        return reply_after(wait, entries, reply, outcome.wakes)

    def _state_of(self, box: Box, schedule: Schedule) -> protocol.ScheduleState:
        spec = schedule.spec
        return protocol.ScheduleState(
            schedule=schedule.name,
            box=box.name,
            record=msgspec.Raw(spec.record),
            cron=spec.cron or None,
            every_ms=spec.every_ms or None,
            time_zone=spec.time_zone,
            paused=spec.is_paused,
            end_ts=spec.end_ts or None,
            catch_up=spec.catch_up,
            created_ts=schedule.created_ms,
            next_due=schedule.next_due_ms or None,
            last_due=schedule.last_due_ms or None,
            fired_total=schedule.fired_total,
            state=schedule.state,
            last_error=schedule.last_error or None,
        )

    # -- appending

    def next_ms(self) -> int | None:
        """When `tick` has something to do, in the time of the shard."""
        while self._heap:
            when, name = self._heap[0]
            if self._deadlines.get(name) == when:
                return when - self._context.wall_ahead_ms
            heapq.heappop(self._heap)
        return None

    def tick(
        self, now_ms: int, entries: LogEntries, wakes: list[str], needs: list[Missing], *, has_space: bool
    ) -> None:
        """Append the records of schedules that are due. Adds names to wake, and missing payloads."""
        wall_ms = self._context.wall_ms(now_ms)
        for _ in range(TICK_SCHEDULES_MAX):
            when = self.next_ms()
            if when is None or when > now_ms:
                break
            _, name = heapq.heappop(self._heap)
            del self._deadlines[name]
            box = self._context.generations[self._generations[name]]
            schedule = box.schedules[name]
            try:
                wakes += self._fire(box, schedule, now_ms, entries, has_space=has_space)
            except NotLoaded as missing:
                needs.append(missing.with_traceback(None))
                schedule.retry_at_ms = wall_ms + _FETCH_MS
            except StreamsError as error:
                schedule.note_refusal(f"{error.code}: {error.message}", wall_ms)
            self._arm(schedule)

    def _fire(
        self, box: Box, schedule: Schedule, now_ms: int, entries: LogEntries, *, has_space: bool
    ) -> tuple[str, ...]:
        """Append the records of the due times that count now. Raises the refusal of the box."""
        context = self._context
        dues, next_due_ms = schedule.plan(context.wall_ms(now_ms), self._started_ms, self._find_zone)
        if not dues:
            if next_due_ms != schedule.next_due_ms:
                change = changes.ScheduleAdvanced(box.generation, schedule.name, next_due_ms, at_ms=now_ms)
                context.log(change, entries)
            return ()
        if not (has_space or box.is_memory):
            raise DiskFull("the disk of this shard is nearly full; free some space")
        count = len(dues)
        while True:
            try:
                later_ms = next_due_ms if count == len(dues) else dues[count]
                return self._append(box, schedule, dues[:count], later_ms, None, now_ms, entries).wakes
            except (BoxFull, RecordTooLarge):  # a box with room for one record must get one
                if count == 1:
                    raise
                count //= 2

    def _append(
        self,
        box: Box,
        schedule: Schedule,
        dues: Sequence[int],
        next_due_ms: int | None,
        key: str | None,
        now_ms: int,
        entries: LogEntries,
    ) -> Outcome:
        """Append one record for each due time. Without `next_due_ms` it is a run by hand."""
        context = self._context
        command = schedule.to_append(box.name, dues, key)
        refusal = context.uploading.refuses(command) if box.is_object else None
        if refusal is not None:
            raise refusal
        context.expire(box, now_ms, entries)
        box.check_conditions(command)
        plan = box.plan_append(command, now_ms, context.wall_ms(now_ms))
        if context.quota is not None:
            context.require_room("", plan.batch.live_bytes, now_ms)
        due_ms = 0 if next_due_ms is None else dues[-1]
        later_ms = schedule.next_due_ms if next_due_ms is None else next_due_ms
        if box.is_memory:  # its records are not logged, the progress of the schedule is
            outcome = context.append_batch(command, box, plan, False, entries)
            progress = changes.ScheduleAdvanced(
                box.generation, schedule.name, later_ms, due_ms, len(dues), now_ms
            )
            context.log(progress, entries)
            return outcome
        change = changes.ScheduleFired(
            **msgspec.structs.asdict(plan), schedule=schedule.name, due_ms=due_ms, next_due_ms=later_ms
        )
        return context.append_batch(command, box, change, False, entries)

    def _arm(self, schedule: Schedule) -> None:
        due_ms = schedule.due_ms
        if not due_ms:
            self._deadlines.pop(schedule.name, None)
        elif self._deadlines.get(schedule.name) != due_ms:
            self._deadlines[schedule.name] = due_ms
            heapq.heappush(self._heap, (due_ms, schedule.name))

    def totals(self, now_ms: int) -> ScheduleTotals:
        blocked_count = lag_ms = 0
        wall_ms = self._context.wall_ms(now_ms)
        for name in self._deadlines:
            schedule = self._context.generations[self._generations[name]].schedules[name]
            blocked_count += schedule.failures > 0
            lag_ms = max(lag_ms, wall_ms - schedule.next_due_ms)
        return ScheduleTotals(len(self._generations), blocked_count, lag_ms)

    # -- applying

    def begin(self, now_ms: int) -> None:
        """A process starts. Due times before now were missed."""
        self._started_ms = now_ms

    def on_box_replaced(self, box: Box) -> None:
        """The box has another generation, or other objects for the same schedules."""
        for schedule in box.schedules.values():
            self._add(box, schedule)

    def on_box_deleted(self, box: Box, lsn: int) -> None:
        for name in box.schedules:
            self._record_bytes -= len(box.schedules[name].spec.record)
            self._forget(name)
            self._dropped_lsn = lsn

    def _add(self, box: Box, schedule: Schedule) -> None:
        self._generations[schedule.name] = box.generation
        self._arm(schedule)

    def _forget(self, name: str) -> None:
        del self._generations[name]
        self._deadlines.pop(name, None)

    def _apply_set(self, change: changes.ScheduleSet, lsn: int) -> None:
        box = self._context.generations[change.generation]
        schedule = box.schedules.get(change.schedule)
        if schedule is None:
            if box.schedules is NO_SCHEDULES:
                box.schedules = {}
            facts = ScheduleFacts(change.schedule, change.spec, change.at_ms, 0, 0, 0, 0)
            schedule = box.schedules[change.schedule] = Schedule(facts)
        else:
            self._record_bytes -= len(schedule.spec.record)
        schedule.apply_set(change, lsn)
        self._record_bytes += len(change.spec.record)
        box.last_lsn = max(box.last_lsn, lsn)
        self._add(box, schedule)

    def _apply_fired(self, change: changes.ScheduleFired, lsn: int) -> None:
        """Apply the append, and the progress of the schedule unless a damaged log has lost it."""
        context = self._context
        context.box_appliers.apply_append(change, lsn)
        schedule = context.generations[change.generation].schedules.get(change.schedule)
        if schedule is not None:
            schedule.apply_progress(change.due_ms, change.next_due_ms, change.batch.count, lsn)
            self._arm(schedule)

    def _apply_advance(self, change: changes.ScheduleAdvanced, lsn: int) -> None:
        box = self._context.generations[change.generation]
        schedule = box.schedules[change.schedule]
        schedule.apply_progress(change.due_ms, change.next_due_ms, change.fired_count, lsn)
        box.last_lsn = max(box.last_lsn, lsn)
        self._arm(schedule)

    def _apply_drop(self, change: changes.ScheduleDropped, lsn: int) -> None:
        box = self._context.generations[change.generation]
        self._record_bytes -= len(box.schedules.pop(change.schedule).spec.record)
        self._forget(change.schedule)
        self._dropped_lsn = lsn
        box.last_lsn = max(box.last_lsn, lsn)

    def _restore(self, state: ShardState) -> None:
        for box in self._context.boxes.values():
            for schedule in box.schedules.values():
                self._record_bytes += len(schedule.spec.record)
                self._add(box, schedule)

    def check(self) -> None:
        """Asserts the invariants named above. For tests."""
        schedules = {
            name: (box.generation, schedule)
            for box in self._context.boxes.values()
            for name, schedule in box.schedules.items()
        }
        assert {name: generation for name, (generation, _) in schedules.items()} == self._generations, "NAMES"
        sizes = [len(schedule.spec.record) for _, schedule in schedules.values()]
        assert sum(sizes) == self._record_bytes, "NAMES"
        due = {name: schedule.due_ms for name, (_, schedule) in schedules.items() if schedule.due_ms}
        assert due == self._deadlines, "ARMED"
        entries = set(self._heap)
        assert all((when, name) in entries for name, when in self._deadlines.items()), "ARMED"


def _rhythm(spec: ScheduleSpec) -> tuple[str, int, str]:
    return spec.cron, spec.every_ms, spec.time_zone


def _require_schedule(change: changes.ScheduleAdvanced | changes.ScheduleDropped, box: Box) -> None:
    if change.schedule not in box.schedules:
        raise DoesNotApply(f"box {box.name} has no schedule {change.schedule}")
