"""Orders the delivery to boxes under pressure (v0 §9). Pure; time is an argument.

    P = the manual priority, or the recency bonus, + the waiting bonus

P orders delivery. It never changes the order of records, what is kept, or who sees it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

#: The bonus for consumption just now, its half-life, and the age at which it is 0.
RECENCY_WEIGHT, RECENCY_HALF_LIFE_MS, RECENCY_END_MS = 500.0, 30_000, 300_000
#: The bonus for waiting, and the time after which it stops growing.
WAITING_PER_MS, WAITING_MS_MAX = 0.1, 10_000

#: A box above this is never held back. Only a manual priority gets there: consumption alone does not.
HELD_UP_TO = RECENCY_WEIGHT


def base(manual: int | None, *, is_automatic: bool, last_read_ms: int | None, now_ms: int) -> float:
    """P of a box whose readers have not waited."""
    if manual is not None:
        return float(manual)
    if not is_automatic or last_read_ms is None:
        return 0.0
    idle_ms = max(0, now_ms - last_read_ms)
    if idle_ms >= RECENCY_END_MS:
        return 0.0
    return round(RECENCY_WEIGHT * float(2.0 ** (-idle_ms / RECENCY_HALF_LIFE_MS)), 3)


def after_waiting(base_priority: float, waited_ms: int) -> float:
    return base_priority + WAITING_PER_MS * min(max(0, waited_ms), WAITING_MS_MAX)


class Pacing:
    """Boxes whose readers have new records but must wait for their turn.

    Bound: boxes with readers that wait, which links and fronts bound.
    """

    def __init__(self) -> None:
        #: Since when.
        self._pending_pages: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Pacing {len(self._pending_pages)} held>"

    def __len__(self) -> int:
        return len(self._pending_pages)

    def hold(self, box: str, now_ms: int) -> None:
        """One that is held already goes on waiting."""
        self._pending_pages.setdefault(box, now_ms)

    def release(self, count: int, now_ms: int, base_of: Callable[[str], float]) -> list[str]:
        """Return the `count` boxes with the highest P now; among equals the longest wait is first."""

        def rank(item: tuple[str, int]) -> tuple[float, int]:
            box, since_ms = item
            return after_waiting(base_of(box), now_ms - since_ms), -since_ms

        if len(self._pending_pages) <= count:
            boxes = sorted(self._pending_pages.items(), key=rank, reverse=True)
        else:
            boxes = heapq.nlargest(count, self._pending_pages.items(), key=rank)
        for box, _ in boxes:
            del self._pending_pages[box]
        return [box for box, _ in boxes]
