"""When idempotency keys lapse: which box has the keys that lapse next, and the bounded steps that drop them.

A key that has lapsed counts for nothing (`Box.known_key`), so to drop it is no change and is not logged: a
replayed log may have more lapsed keys than the machine that wrote it, until the next ticks drop them too.

    append ─► the box's first key: (lapse time of its oldest key, generation) into a heap
    tick   ─► boxes whose oldest key lapsed `SLACK_MS` ago: their lapsed keys go, and they are put back in
    a keyed write at the limit ─► the same at once, without the slack

Appends drop lapsed keys of their own box too, so an entry of the heap may be earlier than the truth. It is
corrected when its time comes.

Bounds: one entry of the heap for each box with keys, and one for each shorter window that a box was given.
One step looks at `STEP_BOXES` boxes and drops `STEP_KEYS` keys: about a millisecond.

Invariant
- WATCHED: every box with keys has an entry that is not later than the lapse of its oldest key.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from shard.core.boxes.box import Box

STEP_BOXES, STEP_KEYS = 256, 2_000

#: A tick leaves lapsed keys alone for this long, so that a box that is written to all the time is looked at
#: once in this time and not at every lapse of a key. 100,000 such boxes cost 2 % of a shard's time.
SLACK_MS = 10_000


class KeyExpiry:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        #: By generation: the entry that counts.
        self._lapse_of: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<KeyExpiry of {len(self._lapse_of)} boxes>"

    def watch(self, box: Box) -> None:
        """Notes when the oldest key of a box lapses, unless an earlier time is noted."""
        when = box.key_lapse_ms()
        if when is not None and self._lapse_of.get(box.generation, when + 1) > when:
            self._lapse_of[box.generation] = when
            heapq.heappush(self._heap, (when, box.generation))

    def forget(self, generation: int) -> None:
        """The box is gone, and its keys with it."""
        self._lapse_of.pop(generation, None)

    def next_ms(self) -> int | None:
        """When a tick should drop keys."""
        heap = self._heap
        while heap:
            when, generation = heap[0]
            if self._lapse_of.get(generation) == when:
                return when + SLACK_MS
            heapq.heappop(heap)
        return None

    def step(
        self,
        boxes: Mapping[int, Box],
        now_ms: int,
        on_dropped: Callable[[int], None],
        *,
        slack_ms: int = SLACK_MS,
    ) -> int:
        """Drops keys that have lapsed, a bounded number of them. Returns how many. `on_dropped` gets the
        generation of each box that has fewer now."""
        total = 0
        for _ in range(STEP_BOXES):
            due_ms = self.next_ms()
            if due_ms is None or due_ms - SLACK_MS + slack_ms > now_ms or total >= STEP_KEYS:
                break
            _, generation = heapq.heappop(self._heap)
            del self._lapse_of[generation]
            box = boxes[generation]
            count = box.drop_lapsed_keys(now_ms, STEP_KEYS - total)
            if count:
                total += count
                on_dropped(generation)
            self.watch(box)
        return total

    def check(self, boxes: Iterable[Box]) -> None:
        """Asserts the invariant named above. For tests."""
        for box in boxes:
            when = box.key_lapse_ms()
            assert when is None or self._lapse_of[box.generation] <= when, "WATCHED"
