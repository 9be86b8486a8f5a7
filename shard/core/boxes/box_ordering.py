"""The order of the boxes in one sorted listing, built a few boxes at a time (v0 §26). Volatile.

    walk by name, in steps ──► sorted chunks ──► merged from the front, as far as pages are read

Each step sorts its own chunk, so no step sorts all boxes. A page merges the chunks only as far as it needs.
The keys are those of the walk: pages of one listing agree with one another, also while records are written.

Bounds: an ordering has 16 bytes a box. `BoxOrderings` keeps at most `KEPT_MAX` orderings and `NAMES_MAX`
names, each for `KEPT_MS` after its last use; the least recently used goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Final

from sortedcontainers import SortedDict

from shard.core.boxes.box import Box
from shard.core.boxes.box_rates import BoxRates, RateWalk
from shard.core.routers.router_outbox import RouterOutbox
from streams.protocol.messages.commands import ListSortedBoxes

#: How long an ordering is kept after its last use.
KEPT_MS: Final = 60_000
KEPT_MAX: Final = 16
NAMES_MAX: Final = 2_000_000
#: Boxes that one step walks: less than a millisecond.
STEP_BOXES: Final = 1024
_GROUPS_A_UNIT: Final = 16


def lag_of(box: Box) -> int:
    """Return the records that the slowest group or outgoing router of a box has yet to get."""
    lag = 0
    for outbox in box.outboxes.values():
        assert isinstance(outbox, RouterOutbox), "moves of jobs are kept elsewhere"
        lag = max(lag, outbox.lag)
    if len(box.groups):
        least = min(group.cursor for _, group in box.groups.items())
        lag = max(lag, box.log.visible_seq - least)
    return lag


def _ready(box: Box) -> int:
    return -1 if box.queue is None else box.queue.ready(box.log.count)


_KEYS: Final[dict[str, Callable[[Box], int]]] = {
    "name": lambda box: 0,
    "count": lambda box: box.log.count,
    "bytes": lambda box: box.log.bytes,
    "last_write": lambda box: box.log.visible_ts,
    "ready": _ready,
    "lag": lag_of,
}


class BoxOrdering:
    def __init__(self, command: ListSortedBoxes, rates: BoxRates, now_ms: int) -> None:
        self.filter = filter_of(command)
        self.last_used_ms = now_ms
        self._command = command
        self._prefixes = list(reversed(command.prefixes))
        self._rates = rates
        self._walk: RateWalk | None = rates.begin(now_ms) if command.sort == "rate" else None
        self._after = ""
        self._chunks: list[tuple[array[float], list[str]]] = []
        self._merge: Iterator[tuple[float, int, str]] | None = None
        #: Names and keys in order, as far as pages were read.
        self._names: list[str] = []
        self._keys = array("d")
        self.total = 0

    def __repr__(self) -> str:
        return f"<BoxOrdering by {self._command.sort}, {self.total} boxes, {len(self._names)} merged>"

    @property
    def is_complete(self) -> bool:
        return not self._prefixes

    def step(self, boxes: SortedDict[str, Box]) -> None:
        """Walk the next boxes."""
        command, prefix = self._command, self._prefixes[-1]
        start = max(prefix, self._after)
        names: list[str] = []
        keys: list[float] = []
        units = STEP_BOXES
        for name in boxes.irange(minimum=start, inclusive=(start != self._after or not start, True)):
            if not name.startswith(prefix):
                break
            if units <= 0:
                self._add(names, keys)
                return
            self._after = name
            units -= 1
            box = boxes[name]
            if (
                (command.text and command.text not in name)
                or (command.kind and box.config.type != command.kind)
                or (command.durability and box.config.durability != command.durability)
            ):
                continue
            units -= len(box.groups) // _GROUPS_A_UNIT
            names.append(name)
            keys.append(self._key(box))
        self._add(names, keys)
        self._prefixes.pop()
        self._after = ""
        if self.is_complete:
            if self._walk is not None and command.prefixes == ("",) and not filter_is_set(command):
                self._rates.end(self._walk)
            self._walk = None
            self._merge = heapq.merge(
                *(zip(keys, repeat(at), names, strict=False) for at, (keys, names) in enumerate(self._chunks))
            )

    def _key(self, box: Box) -> float:
        if self._walk is not None:
            return self._walk.rate_of(box.generation, box.log.visible_seq)
        return _KEYS[self._command.sort](box)

    def _add(self, names: list[str], keys: list[float]) -> None:
        """Sort a chunk. Boxes with equal keys stay in the order of their names."""
        if not names:
            return
        command = self._command
        if command.sort == "name":
            if command.is_descending:
                names.reverse()
                self._chunks.insert(0, (array("d", keys), names))
            else:
                self._chunks.append((array("d", keys), names))
        else:
            if command.is_descending:
                keys = [-key for key in keys]
            order = sorted(range(len(keys)), key=keys.__getitem__)
            self._chunks.append((array("d", [keys[at] for at in order]), [names[at] for at in order]))
        self.total += len(names)

    def entries(self, offset: int) -> Iterator[tuple[int, float, str]]:
        """Iterate over position, key and name of the boxes from a position on."""
        assert self._merge is not None
        while True:
            if offset >= len(self._names):
                for key, _, name in islice(self._merge, offset + 64 - len(self._names)):
                    self._keys.append(key)
                    self._names.append(name)
            if offset >= len(self._names):
                return
            yield offset, self._keys[offset], self._names[offset]
            offset += 1


def filter_of(command: ListSortedBoxes) -> tuple[object, ...]:
    return (
        command.prefixes,
        command.kind,
        command.durability,
        command.text,
        command.sort,
        command.is_descending,
    )


def filter_is_set(command: ListSortedBoxes) -> bool:
    return bool(command.kind or command.durability or command.text)


class BoxOrderings:
    """The orderings of a shard that pages may still be asked of, the least recently used first."""

    def __init__(self, rates: BoxRates) -> None:
        self._rates = rates
        self._orderings: OrderedDict[str, BoxOrdering] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BoxOrderings {list(self._orderings.values())}>"

    def __len__(self) -> int:
        return len(self._orderings)

    def find(self, command: ListSortedBoxes, now_ms: int) -> BoxOrdering | None:
        """Return the ordering of a listing: a new one for a first page, None if it was dropped."""
        ordering = self._orderings.get(command.listing)
        if ordering is not None and ordering.filter == filter_of(command):
            ordering.last_used_ms = now_ms
            self._orderings.move_to_end(command.listing)
            return ordering
        if command.offset:
            return None
        ordering = self._orderings[command.listing] = BoxOrdering(command, self._rates, now_ms)
        self._orderings.move_to_end(command.listing)
        self.drop_old(now_ms)
        return ordering

    def drop_old(self, now_ms: int) -> None:
        orderings = list(self._orderings.items())
        names = sum(ordering.total for _, ordering in orderings)
        for listing, ordering in orderings[:-1]:
            is_old = now_ms - ordering.last_used_ms > KEPT_MS
            if is_old or len(self._orderings) > KEPT_MAX or names > NAMES_MAX:
                names -= ordering.total
                del self._orderings[listing]
