"""Maintains the files of boxes: seals batches, frees old log, rewrites and compacts segments, drops unused
files.

    plan (core/boxes/upkeep.py) ──► files, in a thread ──► the change is logged, if its plan is still valid

On a full disk only work that frees space is done: unused files are dropped, and segments move to the cold
store. Work for which there is no space is retried later.

One job runs at a time, and no faster than `bytes_per_s`, so that writers and readers hardly notice. While
unsealed batches exceed their memory limit, jobs run at full speed.

A crash leaves a segment that no change names. It is dropped like every file that neither the machine nor one
of the two snapshots names. Until then its number may be reused, and its file overwritten.

Rules of the file
- A file is dropped only when the change that made it unnecessary is durable: until then a crash could restore
a
  machine that needs it.
- A damaged segment is left as it is, and reported; the rest of the shard goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import Any, Protocol

import structlog
import trio

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.boxes.upkeep import (
    HotPolicy,
    SealPolicy,
    ToKeep,
    ToRewrite,
    ToSeal,
    plan_compaction,
    plan_move,
    plan_rewrite,
    plan_seal,
)
from shard.core.machine import LogEntries, Machine, Outcome
from shard.core.outcome import OutcomeLogger
from shard.engine.cache import PayloadCache
from shard.engine.compaction import copy_input, find_superseded
from shard.storage.faults import Faults
from shard.storage.files import NO_SPACE, Corrupt
from shard.storage.retention import Pins
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore
from streams.protocol.model.records import Batch

log = structlog.get_logger()

#: Pause after the cold store did not answer.
_COLD_PAUSE_S = 30.0

#: How long to wait for space on a full disk.
_FULL_PAUSE_S = 5.0

#: The shortest and the longest pause between two checks that find no work. In between, a check follows a
#: change of the shard (`wake`), or the moment when a box is due by its age.
_PAUSE_S, _PAUSE_S_MAX = 0.25, 60.0

#: How often to check while boxes wait to be quiet enough for compaction.
_COMPACTION_PAUSE_S = 1.0

#: A pause between two jobs is checked this often: meanwhile writers may exceed the limit of unsealed memory.
_PACE_STEP_S = 0.02

#: Boxes that a sweep visits in one step, a fraction of a millisecond, and the pause between two steps.
_SWEEP_BOXES, _SWEEP_REST_S = 256, 0.001

#: Payloads stay in memory when a segment is sealed, unless there are more than this: counting them takes
#: long.
_BATCHES_KEPT_MAX = 256


class InThread(Protocol):
    def __call__(self, work: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run work that waits for a disk or a network, and return its result."""


def _in_thread(work: Callable[..., Any], *args: Any) -> Awaitable[Any]:
    return trio.to_thread.run_sync(work, *args)


class Upkeep:
    def __init__(
        self,
        machine: Machine,
        store: SegmentStore,
        cache: PayloadCache,
        policy: SealPolicy,
        hot: HotPolicy,
        *,
        now_ms: Callable[[], int],
        log_outcome: OutcomeLogger,
        wait_durable: Callable[[int], Awaitable[bool]],
        pinned_lsn: Callable[[], int],
        unsealed_bytes_max: int,
        bytes_per_s: int,
        is_disk_full: Callable[[], bool] = lambda: False,
        faults: Faults | None = None,
        in_thread: InThread = _in_thread,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        self._machine = machine
        self._store = store
        self._cache = cache
        self._policy = policy
        self._hot = hot
        self._wait_durable = wait_durable
        self._now_ms = now_ms
        self._log_outcome = log_outcome
        self._pinned_lsn = pinned_lsn
        self._unsealed_bytes_max = unsealed_bytes_max
        self._bytes_per_s = bytes_per_s
        self._is_disk_full = is_disk_full
        self._faults = faults or Faults()
        self._lacks_space = False
        self._in_thread = in_thread
        self._sleep = sleep
        self.segments_sealed = 0
        self.batches_logged_again = 0
        self.segments_rewritten = 0
        self.records_compacted = 0
        self.segments_moved = 0
        self._cold_again_at = 0.0
        self._snapshot_names: set[Name] | None = None
        #: True if the last sweep could not delete copies in the cold store: another sweep is needed.
        self.must_sweep_again = False
        #: Set by every event after which there may be work.
        self._wake_event = trio.Event()
        self.pins = Pins()
        #: Segments of a base that is being uploaded to the object store: they are not dropped either.
        self.pinned_for_base: set[Name] = set()

    def __repr__(self) -> str:
        return f"<Upkeep {self.segments_sealed} segments sealed, {self.segments_rewritten} rewritten>"

    @property
    def is_pressed(self) -> bool:
        return self._machine.unsealed_boxes.bytes > self._unsealed_bytes_max

    def sweep(self, snapshot_names: set[Name]) -> None:
        """Drop files that neither these snapshot names nor the machine contain, with the next step."""
        self._snapshot_names = snapshot_names
        self.wake()

    def wake(self) -> None:
        """Check for work: more of the log is durable, the disk has space again, or files may be dropped."""
        self._wake_event.set()

    async def run(self) -> None:
        while True:
            self._wake_event = trio.Event()  # before the check, so that no event during it is lost
            try:
                if not await self.step():
                    await self._sleep(_PAUSE_S)
                    with trio.move_on_after(self._longest_pause_s() - _PAUSE_S):
                        await self._wake_event.wait()
                else:
                    self._lacks_space = False
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise  # the disk of the log has failed
                if not self._lacks_space:
                    log.error(
                        "the disk is full: cannot write segments, retrying; free disk space", error=str(error)
                    )
                self._lacks_space = True
                await self._sleep(_FULL_PAUSE_S)

    def _longest_pause_s(self) -> float:
        """Return how long to wait if no event comes."""
        machine, now_ms = self._machine, self._now_ms()
        pause_s = _PAUSE_S_MAX
        oldest_ms = machine.unsealed_boxes.oldest_ms()
        if oldest_ms is not None:
            pause_s = min(pause_s, (oldest_ms + self._policy.age_ms - now_ms) / 1000)
        if machine.compactable:
            pause_s = min(pause_s, _COMPACTION_PAUSE_S)
        if machine.movable and self._store.has_cold:
            pause_s = min(pause_s, self._cold_again_at - monotonic())
        return max(_PAUSE_S, pause_s)

    async def step(self) -> bool:
        """Run the next job. Return True if there was one."""
        if self._snapshot_names is not None and not self.pins.is_all:
            await self._sweep()
        if self._is_disk_full():
            return await self._step_to_cold()
        outcome = self._machine.keep_held(self._pinned_lsn())
        if outcome is not None:
            self._log_outcome(outcome)
            await self._sleep(0)
            return True
        plan = plan_seal(
            self._machine,
            self._policy,
            now_ms=self._now_ms(),
            pinned_lsn=self._pinned_lsn(),
            is_pressed=self.is_pressed,
        )
        if isinstance(plan, ToSeal):
            await self._seal(plan)
            return True
        if isinstance(plan, ToKeep):
            self._log_again(plan)
            await self._sleep(0)
            return True
        box = plan_compaction(self._machine, now_ms=self._now_ms())
        if box is not None:
            await self._compact(box)
            return True
        rewrite = plan_rewrite(self._machine, self._policy)
        if rewrite is not None:
            await self._rewrite(rewrite)
            return True
        return await self._step_to_cold()

    async def _step_to_cold(self) -> bool:
        """Move a segment to the cold store, if one is due. Return True if one was."""
        if self._store.has_cold and monotonic() >= self._cold_again_at:
            move = plan_move(self._machine, self._hot)
            if move is not None:
                await self._move(*move)
                return True
        return False

    # -- the jobs

    async def _sweep(self) -> None:
        """Drop files that neither the machine nor a snapshot names. It runs between two jobs, so no segment
        is written and not named yet."""
        assert self._snapshot_names is not None
        snapshot_names, self._snapshot_names = self._snapshot_names, None
        needed_names = snapshot_names | self.pinned_for_base
        cold: set[Name] = set()
        # During this loop other tasks only remove segments, so it sees all segments that exist at its end.
        for number, box in enumerate(list(self._machine.generations.values()), 1):
            for segment in box.log.segments:
                needed_names.add(Name.of(segment))
                if segment.is_cold:
                    cold.add(Name.of(segment))
            if number % _SWEEP_BOXES == 0:
                await self._sleep(_SWEEP_REST_S)
        # After a crash the machine may name a removed segment again, until the removal is durable.
        if not await self._wait_durable(self._machine.lsn):
            return
        if self.pins.is_all:  # pinned since this began: a reader may use segments that the loop did not see
            self._snapshot_names = self._snapshot_names or snapshot_names
            return
        needed_names |= self.pins.names | self.pinned_for_base
        try:
            await self._in_thread(self._store.remove_unnamed, needed_names, cold)
            self.must_sweep_again = False
        except ColdStoreUnreachable as error:
            self.must_sweep_again = True
            log.warning("cannot delete segments in the cold store, retrying later", reason=str(error))

    async def _seal(self, plan: ToSeal) -> None:
        generation = plan.box.generation
        segment = await self._write(generation, plan.serial, plan.batches)
        if self._is_stored(plan.box):
            self._commit(changes.SegmentSealed(generation, plan.serial, segment.to_bytes()))
            self.segments_sealed += 1
            self._keep_payloads(plan)
        await self._pace(segment.total_bytes)

    def _keep_payloads(self, plan: ToSeal) -> None:
        segments = plan.box.log.segments
        if segments and segments[-1].serial == plan.serial and len(plan.batches) <= _BATCHES_KEPT_MAX:
            for at, batch in enumerate(plan.batches):
                if at >= segments[-1].front:
                    self._cache.add(segments[-1], at, batch)
            self._cache.shrink()

    def _is_stored(self, box: Box) -> bool:
        """Return True if a box still exists and is no memory box, of which nothing is logged."""
        return self._machine.generations.get(box.generation) is box and not box.is_memory

    def _log_again(self, plan: ToKeep) -> None:
        applied_changes: LogEntries = []
        for batch in plan.batches:
            applied_changes += self._machine.upkeep(changes.BatchKept(plan.box.generation, batch)).changes
        self._log_outcome(Outcome(applied_changes, None))
        self.batches_logged_again += len(plan.batches)

    async def _rewrite(self, plan: ToRewrite) -> None:
        generation = plan.box.generation
        try:
            segment = await self._write(generation, plan.serial, self._live_batches(plan))
        except Corrupt as damage:
            self._skip_damaged(plan.box, damage)
            return
        if plan.still_stands(self._machine):
            serials = [part.segment.serial for part in plan.parts]
            columns = segment.to_bytes()
            self._commit(changes.SegmentsReplaced(generation, serials, plan.serial, columns))
            self.segments_rewritten += len(serials)
        await self._pace(segment.total_bytes)

    def _live_batches(self, plan: ToRewrite) -> Iterator[Batch]:
        """Yield the live records of the segments, read from their files."""
        for part in plan.parts:
            for at, batch in enumerate(self._store.read_all(Name.of(part.segment))):
                runs = part.runs.get(at)
                if runs is None:
                    yield batch
                else:
                    for first, last in runs:
                        yield batch.part(first, last)

    async def _compact(self, box: Box) -> None:
        """Delete records that newer records with the same tag have superseded."""
        source = copy_input(box, durable_lsn=self._machine.durable_lsn)
        before, box.volatile.compacted_seq = (
            box.volatile.compacted_seq,
            max(source.upto_seq, box.volatile.compacted_seq),
        )
        chunks = find_superseded(source, self._store)
        while True:
            try:
                chunk = await self._in_thread(next, chunks, None)
            except ColdStoreUnreachable as error:  # a part of the box is in a cold store that does not answer
                log.warning(
                    "cannot compact a box: the cold store does not answer", box=box.name, reason=str(error)
                )
                self._machine.compactable.pop(box.generation, None)
                box.volatile.compacted_seq = before
                return
            except Corrupt as damage:
                self._skip_damaged(box, damage)
                box.volatile.compacted_seq = before
                return
            if chunk is None or self._machine.generations.get(box.generation) is not box:
                return
            change = box.plan_deletes(chunk.seqs, chunk.sizes, self._now_ms())
            if change.seqs:
                self._commit(change)
                self.records_compacted += len(change.seqs)

    async def _move(self, box: Box, segment: Segment) -> None:
        """Move a segment to the cold store: copy and verify it, log the change durably, drop the local
        file."""
        name = Name.of(segment)
        try:
            await self._in_thread(self._store.copy_to_cold, name)
        except ColdStoreUnreachable as error:
            self._cold_again_at = monotonic() + _COLD_PAUSE_S
            log.warning("cannot copy segments to the cold store, retrying later", reason=str(error))
            return
        except Corrupt as damage:
            self._skip_damaged(box, damage)
            return
        if not self._is_stored(box) or segment not in box.log.segments:
            return  # deleted meanwhile; the next sweep drops its stub and its copy
        self._commit(changes.SegmentMoved(box.generation, segment.serial))
        if await self._wait_durable(self._machine.lsn):
            await self._in_thread(self._store.remove_local, name)
            self.segments_moved += 1
        await self._pace(segment.total_bytes)

    def _skip_damaged(self, box: Box, damage: Corrupt) -> None:
        """Report a damaged segment, and skip its box until it changes. Readers of damaged records get an
        error."""
        log.error(
            "a segment is damaged; run `streams doctor`", box=box.name, path=damage.path, reason=str(damage)
        )
        self._faults.note_damage("segment", damage.path, damage.reason, box.name)
        machine = self._machine
        for waiting in (machine.boxes_with_dead_records, machine.compactable, machine.movable):
            waiting.pop(box.generation, None)

    async def _write(self, generation: int, serial: int, batches: Iterable[Batch]) -> Segment:
        segment: Segment = await self._in_thread(self._store.write, generation, serial, batches)
        return segment

    def _commit(self, change: changes.UpkeepChange) -> None:
        self._log_outcome(self._machine.upkeep(change))

    async def _pace(self, written_bytes: int) -> None:
        """Pause after a job, so that jobs write at most `bytes_per_s`. The pause ends early if unsealed
        batches exceed their limit: otherwise nothing would be sealed until writers are blocked."""
        pause_s = written_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        await self._sleep(0)
        while pause_s > 0 and not self.is_pressed:
            step_s = min(pause_s, _PACE_STEP_S)
            await self._sleep(step_s)
            pause_s -= step_s
