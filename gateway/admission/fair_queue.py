"""A queue that gives each owner an equal share, however many items an owner has in it.

Items of one owner leave in order of arrival. Every item has a cost. Between owners, the owner goes first
whose total cost will be smallest after its item (self-clocked fair queueing). So small items go before large
ones, and after a large item an owner waits until the total costs of the others have caught up. An owner
without items collects no credit: its next item counts from the total cost of the owner that was served last.

    push(owner, item, cost)        appends to the items of that owner
    pop() -> item                  removes the first item of the owner with the smallest tag

Cost: a push and a pop take about a microsecond each, whether 1 or 10,000 owners wait.

Bounds: one queue for each owner that waits; `_TAGS_MAX` tags of owners that do not wait.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

_T = TypeVar("_T")

#: How many tags of owners without items are kept. Above that, all of these tags are dropped.
_TAGS_MAX = 4096


class FairQueue(Generic[_T]):
    __slots__ = ("_clock", "_count", "_heap", "_items", "_numbers", "_tags")

    def __init__(self) -> None:
        #: By owner: its items with their costs. An empty one is removed when its heap entry is the first.
        self._items: dict[str, OrderedDict[_T, float]] = {}
        #: By owner: its total cost including its first item or, if it has none, its last one.
        self._tags: dict[str, float] = {}
        #: One entry for each owner in `_items`: (tag, order of arrival, owner).
        self._heap: list[tuple[float, int, str]] = []
        #: The tag of the item that was served last.
        self._clock = 0.0
        self._count = 0
        self._numbers = count()

    def __repr__(self) -> str:
        return f"<FairQueue {self._count} items of {len(self._items)} owners>"

    def __len__(self) -> int:
        return self._count

    @property
    def owners(self) -> int:
        """How many owners have a queue, which may have become empty."""
        return len(self._items)

    def push(self, owner: str, item: _T, cost: float) -> None:
        items = self._items.get(owner)
        if items is None:
            items = self._items[owner] = OrderedDict()
            tag = self._tags[owner] = max(self._tags.get(owner, 0.0), self._clock) + cost
            heappush(self._heap, (tag, next(self._numbers), owner))
            if len(self._tags) > _TAGS_MAX + len(self._items):
                self._tags = {each: self._tags[each] for each in self._items}
        items[item] = cost
        self._count += 1

    def peek(self) -> _T:
        """Return the item that `pop` would return. The queue must not be empty."""
        self._drop_empty_owners()
        return next(iter(self._items[self._heap[0][2]]))

    def pop(self) -> _T:
        """Remove the next item. The queue must not be empty."""
        self._drop_empty_owners()
        tag, number, owner = heappop(self._heap)
        items = self._items[owner]
        item, _ = items.popitem(last=False)
        self._count -= 1
        self._clock = tag
        if items:
            tag = self._tags[owner] = tag + next(iter(items.values()))
            heappush(self._heap, (tag, number, owner))
        else:
            del self._items[owner]
        return item

    def has(self, owner: str, item: _T) -> bool:
        """Return True if an item waits here."""
        return item in self._items.get(owner, ())

    def remove(self, owner: str, item: _T) -> None:
        """Remove an item that has not been popped."""
        del self._items[owner][item]
        self._count -= 1

    def _drop_empty_owners(self) -> None:
        assert self._count, "the queue is empty"
        while not self._items[self._heap[0][2]]:
            del self._items[heappop(self._heap)[2]]
