"""A snapshot of the machine, taken in small steps while the machine handles commands.

    begin ─► step ─► step ─► … ─► state          boxes are taken one after the other, a few in each step
               ▲ before(change)                  a box is taken before a change alters it

The result is the state at the lsn of `begin`, however long the capture takes. No command waits longer than
one step; all of a hundred thousand boxes in one step would take half a second. A capture can include the
unsealed batches: they never change, so it copies only the list of them. It also copies only the list of jobs
of a large queue, and encodes the jobs in further steps.

Rules of the file
- `Machine.apply` calls `before` for every change while a capture is under way.
- A change alters only the box of its `generation`. A commit is the exception: it names the boxes it alters.
  State that belongs to no box is taken at `begin`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shard.core.boxes.box import Box
from shard.core.changes import Change, JobEntry, TxnCommitted
from shard.core.queues.job import QueueCopy
from shard.core.snapshot_facts import BoxFacts, ShardState
from streams.protocol.model.records import Batch


class Capture:
    def __init__(self, state: ShardState, boxes: Mapping[int, Box], *, with_batches: bool = False) -> None:
        """`state` has everything but the boxes."""
        self._state = state
        self._pending_boxes = dict(boxes)
        self._with_batches = with_batches
        #: Large queues that are copied, with the facts of their boxes and the entries worked out so far.
        self._queues: list[tuple[BoxFacts, QueueCopy, list[JobEntry]]] = []
        #: By generation, and in the order in which the facts of a box name them.
        self.tails: dict[int, list[Batch]] = {}

    def __repr__(self) -> str:
        return f"<Capture at lsn {self.lsn}, {len(self._pending_boxes)} boxes left>"

    @property
    def lsn(self) -> int:
        return self._state.lsn

    def before(self, change: Change, lsn: int = 0) -> None:
        """Takes a box before a change alters it, unless it was taken, or created, since `begin`."""
        if isinstance(change, TxnCommitted):
            generations = [part.generation for part in change.parts]
        else:
            generations = [getattr(change, "generation", 0)]
        for generation in generations:
            box = self._pending_boxes.pop(generation, None)
            if box is not None:
                self._take(box)

    def step(self, boxes_max: int) -> bool:
        """Takes some boxes. Returns True if any remain. If a large delete of a box is not settled yet, one
        step settles it before the box is taken."""
        if self._queues:
            self._work_out_jobs()
            return bool(self._pending_boxes or self._queues)
        for _ in range(min(boxes_max, len(self._pending_boxes))):
            generation, box = self._pending_boxes.popitem()
            if box.log.settle_deletes():
                self._pending_boxes[generation] = box
                break
            self._take(box)
            if self._queues:
                break
        return bool(self._pending_boxes or self._queues)

    def _work_out_jobs(self) -> None:
        facts, copy, entries = self._queues[-1]
        entries += copy.take_some()
        if not copy.jobs:
            facts.queue = copy.facts_with(entries)
            self._queues.pop()

    def _take(self, box: Box) -> None:
        leases_kept = self._state.stopped_clean
        jobs = box.copied_queue(leases_kept=leases_kept)
        facts: BoxFacts = box.facts(leases_kept=leases_kept, with_queue=jobs is None)
        self._state.boxes.append(facts)
        if jobs is not None:
            self._queues.append((facts, jobs, []))
        assert not (self._with_batches and facts.unrendered), "rows of commits are rendered first"
        if self._with_batches and facts.batches:
            self.tails[box.generation] = box.log.tail.copy()
        oldest_lsn = 0 if box.is_memory else box.log.tail.oldest_lsn
        if oldest_lsn:
            self._state.needs_lsn = min(self._state.needs_lsn, oldest_lsn)

    def state(self) -> ShardState:
        """The snapshot, when all boxes are taken."""
        assert not (self._pending_boxes or self._queues), "some boxes are yet to be taken"
        return self._state
