"""The shard's background work: seals, keeps old log free, writes segments anew, drops files nobody names.

    plan (core/upkeep.py) ──► files, in a thread ──► the change, if what it rests on still stands

One piece of work at a time, and no faster than `bytes_per_s`, so that writers and readers hardly notice; when
unsealed batches take more memory than they should, as fast as it goes.

What a crash leaves: a segment that no change names. It is dropped like every file that neither the machine
nor one of the two snapshots names; until then its number may be given again, and its file is written over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

import structlog
import trio
import trio.lowlevel

from shard.cache import PayloadCache
from shard.compaction import find_superseded, survey
from shard.core import changes
from shard.core.box import Box
from shard.core.machine import Machine, Made, Outcome
from shard.core.sealed import Segment
from shard.core.upkeep import (
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
from shard.storage.store import Name, SegmentStore, Unreachable
from streams.protocol.records import Batch

log = structlog.get_logger()

#: How long a cold store that did not answer is left alone.
_COLD_PAUSE_S = 30.0

#: How often to look when there was nothing to do.
_PAUSE_S = 0.25

#: Payloads stay in memory when a segment is sealed, unless they are so many that counting them takes long.
_BATCHES_KEPT_MAX = 256


class Logger(Protocol):
    def __call__(self, outcome: Outcome) -> None:
        """Notes changes of the machine for the log, and hands them over."""


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
        log_outcome: Logger,
        wait_durable: Callable[[int], Awaitable[bool]],
        pinned_lsn: Callable[[], int],
        unsealed_bytes_max: int,
        bytes_per_s: int,
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
        self.sealed = 0
        self.kept = 0
        self.rewritten = 0
        self.compacted = 0
        self.moved = 0
        self._cold_again_at = 0.0
        self._named: set[Name] | None = None
        #: Segments that somebody is reading: they stay although nobody names them any more.
        self.pinned: set[Name] = set()

    def __repr__(self) -> str:
        return f"<Upkeep {self.sealed} sealed, {self.rewritten} rewritten, {self.kept} batches kept>"

    @property
    def is_pressed(self) -> bool:
        return self._machine.unsealed_bytes > self._unsealed_bytes_max

    def sweep(self, named: set[Name]) -> None:
        """Files that neither these nor the machine names may go."""
        self._named = named

    async def run(self) -> None:
        while True:
            if not await self.step():
                await trio.sleep(_PAUSE_S)

    async def step(self) -> bool:
        """Does the next piece of work; whether there was any."""
        if self._named is not None:
            # Between two pieces of work there is no segment that is written and not named yet.
            named = self._named | self.pinned | set(map(Name.of, self._machine.segments()))
            self._named = None
            try:
                await trio.to_thread.run_sync(self._store.remove_unnamed, named)
            except Unreachable as trouble:
                log.warning("segments could not be dropped from the cold store yet", reason=str(trouble))
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
            self._keep(plan)
            await trio.lowlevel.checkpoint()
            return True
        box = plan_compaction(self._machine, now_ms=self._now_ms())
        if box is not None:
            await self._compact(box)
            return True
        rewrite = plan_rewrite(self._machine, self._policy)
        if rewrite is not None:
            await self._rewrite(rewrite)
            return True
        if self._store.has_cold and trio.current_time() >= self._cold_again_at:
            move = plan_move(self._machine, self._hot)
            if move is not None:
                await self._move(*move)
                return True
        return False

    # -- the pieces

    async def _seal(self, plan: ToSeal) -> None:
        generation = plan.box.generation
        segment = await self._write(generation, plan.serial, plan.batches)
        if self._machine.generations.get(generation) is plan.box:
            self._commit(changes.SegmentSealed(generation, plan.serial, segment.to_bytes()))
            self.sealed += 1
            self._keep_payloads(plan)
        await self._rest(segment.total_bytes)

    def _keep_payloads(self, plan: ToSeal) -> None:
        sealed = plan.box.log.segments
        if sealed and sealed[-1].serial == plan.serial and len(plan.batches) <= _BATCHES_KEPT_MAX:
            for at, batch in enumerate(plan.batches):
                if at >= sealed[-1].front:
                    self._cache.add(sealed[-1], at, batch)
            self._cache.shrink()

    def _keep(self, plan: ToKeep) -> None:
        made: Made = []
        for batch in plan.batches:
            self._stage(changes.BatchKept(plan.box.generation, batch), made)
        self._log_outcome(Outcome(made, None))
        self.kept += len(plan.batches)

    async def _rewrite(self, plan: ToRewrite) -> None:
        generation = plan.box.generation
        segment = await self._write(generation, plan.serial, self._live(plan))
        if plan.still_stands(self._machine):
            serials = [part.segment.serial for part in plan.parts]
            columns = segment.to_bytes()
            self._commit(changes.SegmentsReplaced(generation, serials, plan.serial, columns))
            self.rewritten += len(serials)
        await self._rest(segment.total_bytes)

    def _live(self, plan: ToRewrite) -> Iterator[Batch]:
        """What is live in the segments, read from their files."""
        for part in plan.parts:
            for at, batch in enumerate(self._store.read_all(Name.of(part.segment))):
                runs = part.runs.get(at)
                if runs is None:
                    yield batch
                else:
                    for first, last in runs:
                        yield batch.part(first, last)

    async def _compact(self, box: Box) -> None:
        """Deletes what newer records with the same tag have superseded."""
        given = survey(box, durable_lsn=self._machine.durable_lsn)
        box.compacted_seq = max(
            (given.tail[-1].last_seq if given.tail else 0), box.log.sealed_seq, box.compacted_seq
        )
        found = find_superseded(given, self._store)
        while True:
            try:
                superseded = await trio.to_thread.run_sync(next, found, None)
            except Unreachable as trouble:  # a part of the box is in a store that does not answer
                log.warning("a box could not be compacted", box=box.name, reason=str(trouble))
                self._machine.compactable.pop(box.generation, None)
                return
            if superseded is None or self._machine.generations.get(box.generation) is not box:
                return
            change = box.plan_deletes(superseded.seqs, superseded.size_of, self._now_ms())
            if change.seqs:
                self._commit(change)
                self.compacted += len(change.seqs)

    async def _move(self, box: Box, segment: Segment) -> None:
        """A copy in the cold store, proven; then the machine's word, durable; then the file here goes."""
        name = Name.of(segment)
        try:
            await trio.to_thread.run_sync(self._store.copy_to_cold, name)
        except Unreachable as trouble:
            self._cold_again_at = trio.current_time() + _COLD_PAUSE_S
            log.warning("the cold store cannot take segments now", reason=str(trouble))
            return
        if self._machine.generations.get(box.generation) is not box or segment not in box.log.segments:
            return  # dead by now; it is dropped with its stub and its copy
        self._commit(changes.SegmentMoved(box.generation, segment.serial))
        if await self._wait_durable(self._machine.lsn):
            await trio.to_thread.run_sync(self._store.drop_hot, name)
            self.moved += 1
        await self._rest(segment.total_bytes)

    async def _write(self, generation: int, serial: int, batches: Iterable[Batch]) -> Segment:
        return await trio.to_thread.run_sync(self._store.write, generation, serial, batches)

    def _commit(self, change: changes.Change) -> None:
        made: Made = []
        self._stage(change, made)
        self._log_outcome(Outcome(made, None))

    def _stage(self, change: changes.Change, made: Made) -> None:
        lsn = self._machine.lsn + 1
        self._machine.apply(change, lsn)
        made.append((lsn, change))

    async def _rest(self, written_bytes: int) -> None:
        if self._bytes_per_s and not self.is_pressed:
            await trio.sleep(written_bytes / self._bytes_per_s)
        else:
            await trio.lowlevel.checkpoint()
