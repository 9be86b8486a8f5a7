"""Boxes with unsealed batches, and which of them to seal first: by their part of the log, and by their age.

    append, hydration ─► note(box)      in two queues: oldest lsn, and age (only if the tail is worth a file)
    plan_seal         ─► first_by_lsn   boxes that need log up to an lsn
                      ─► first_by_age   boxes whose tails have waited since a time

A look at a queue costs nothing while no box is due, however many boxes there are.

Invariants
- MEMBERS: `boxes` holds exactly the stored boxes with batches in their tails; `bytes` is their cost.
- QUEUED: each of them is in the queue of lsns, and in that of ages if its tail is worth a file, with a number
  that is at most its own.

Bounds: one entry a box in each queue, and as many again of boxes that have left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from shard.core.boxes.box import Box

#: A box with less than this unsealed gets no file for it by age alone, or while there is room in memory.
SMALL_BYTES = 64 * 1024

#: Boxes that cannot be sealed yet and are passed over in one look.
_PASSED_OVER_MAX = 1000

#: Entries of boxes that have left, beyond as many as are there, before they are dropped.
_STALE_MIN = 1024

#: Returns what to do about a box, or None.
Planner = Callable[[Box], Any]


class _Queue:
    """Boxes by a number that only grows while a box is here, the smallest first.

    An entry is corrected when it reaches the front, so a change of a box's number costs nothing.
    """

    def __init__(self, number_of: Callable[[Box], int], belongs: Callable[[Box], bool]) -> None:
        self._number_of = number_of
        self._belongs = belongs
        self._heap: list[tuple[int, int]] = []
        self._members: set[int] = set()

    def __repr__(self) -> str:
        return f"<_Queue of {len(self._heap)}>"

    def add(self, box: Box) -> None:
        if box.generation not in self._members and self._belongs(box):
            self._members.add(box.generation)
            heapq.heappush(self._heap, (self._number_of(box), box.generation))

    def front(self, boxes: dict[int, Box]) -> tuple[int, Box] | None:
        """Return the smallest number and its box, or None if the queue is empty."""
        heap = self._heap
        while heap:
            number, generation = heap[0]
            box = boxes.get(generation)
            if box is None or not self._belongs(box):
                heapq.heappop(heap)
                self._members.remove(generation)
                continue
            actual = self._number_of(box)
            if actual <= number:
                return number, box
            heapq.heapreplace(heap, (actual, generation))
        return None

    def first(self, boxes: dict[int, Box], upto: int, plan: Planner) -> Any:
        """Return the first plan for a box whose number is at most `upto`. Boxes without one are passed over
        and stay."""
        passed_over: list[tuple[int, int]] = []
        candidate = None
        while len(passed_over) < _PASSED_OVER_MAX:
            front = self.front(boxes)
            if front is None or front[0] > upto:
                break
            candidate = plan(front[1])
            if candidate is not None:
                break
            passed_over.append(heapq.heappop(self._heap))
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return candidate

    def drop_stale(self, boxes: dict[int, Box]) -> None:
        if len(self._heap) > 2 * len(boxes) + _STALE_MIN:
            self.rebuild(boxes)

    def rebuild(self, boxes: dict[int, Box]) -> None:
        """Take every number anew."""
        here = [box for box in boxes.values() if self._belongs(box)]
        self._members = {box.generation for box in here}
        self._heap = [(self._number_of(box), box.generation) for box in here]
        heapq.heapify(self._heap)

    def check(self, boxes: dict[int, Box]) -> None:
        entries = {generation: number for number, generation in self._heap}
        assert len(entries) == len(self._heap) and entries.keys() == self._members, "QUEUED"
        for box in boxes.values():
            assert not self._belongs(box) or entries[box.generation] <= self._number_of(box), "QUEUED"


class UnsealedBoxes:
    def __init__(self) -> None:
        self.boxes: dict[int, Box] = {}
        #: Memory that the unsealed batches take.
        self.bytes = 0
        self._by_lsn = _Queue(_oldest_lsn, _always)
        self._by_age = _Queue(_since_ms, is_worth_a_file)

    def __repr__(self) -> str:
        return f"<Unsealed {len(self.boxes)} boxes, {self.bytes} B>"

    def __len__(self) -> int:
        return len(self.boxes)

    def __contains__(self, generation: int) -> bool:
        return generation in self.boxes

    def __iter__(self) -> Iterator[int]:
        return iter(self.boxes)

    def bytes_of(self, box: Box) -> int:
        """Return what a box counts for here, to be handed to the next `note`."""
        return box.log.tail.held_bytes if box.generation in self.boxes else 0

    def note(self, box: Box, bytes_before: int) -> None:
        """Follow a change of a box, which counted for `bytes_before`."""
        tail = box.log.tail
        if not tail.records or box.is_memory:
            self._leave(box, bytes_before)
            return
        self.bytes += tail.held_bytes - bytes_before
        if box.generation not in self.boxes:
            self.boxes[box.generation] = box
            self._by_lsn.add(box)
        if tail.held_bytes >= SMALL_BYTES:
            self._by_age.add(box)

    def forget(self, box: Box) -> None:
        """The box is deleted."""
        self._leave(box, self.bytes_of(box))

    def _leave(self, box: Box, bytes_before: int) -> None:
        self.bytes -= bytes_before
        if self.boxes.pop(box.generation, None) is not None:
            self._by_lsn.drop_stale(self.boxes)
            self._by_age.drop_stale(self.boxes)

    def rewound(self) -> None:
        """Time has begun again at an earlier moment, and the ages of boxes with it."""
        self._by_age.rebuild(self.boxes)

    def first_by_lsn(self, upto_lsn: int, plan: Planner) -> Any:
        """Return the first plan for a box that needs log at or below this lsn."""
        return self._by_lsn.first(self.boxes, upto_lsn, plan)

    def first_by_age(self, upto_ms: int, plan: Planner) -> Any:
        """Return the first plan for a box that is worth a file and has waited since this time."""
        return self._by_age.first(self.boxes, upto_ms, plan)

    def oldest_ms(self) -> int | None:
        """Return since when the box has waited that is worth a file and has waited longest."""
        front = self._by_age.front(self.boxes)
        return None if front is None else front[0]

    def check(self) -> None:
        """Asserts the invariants named above, but for MEMBERS. For tests."""
        assert sum(box.log.tail.held_bytes for box in self.boxes.values()) == self.bytes, "MEMBERS"
        self._by_lsn.check(self.boxes)
        self._by_age.check(self.boxes)


def _oldest_lsn(box: Box) -> int:
    """The first lsn that its batches are in, or that of the commit of rows that are yet to be rendered."""
    tail = box.log.tail
    if not tail.has_unrendered:
        return tail.oldest_lsn
    commits = [rows.commit_lsn for rows in tail.unrendered_rows()]
    return min([*commits, tail.oldest_lsn] if tail.oldest_lsn else commits)


def _since_ms(box: Box) -> int:
    return box.volatile.unsealed_since_ms


def is_worth_a_file(box: Box) -> bool:
    """Return True if a box has enough unsealed to be sealed for its age, or for its part of the log."""
    return box.log.tail.held_bytes >= SMALL_BYTES


def _always(box: Box) -> bool:
    return True
