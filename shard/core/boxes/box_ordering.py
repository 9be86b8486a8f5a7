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
from collections.abc import Iterator
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
        is_first = start != self._after or not start
        names = list(islice(boxes.irange(minimum=start, inclusive=(is_first, True)), STEP_BOXES))
        is_last = len(names) < STEP_BOXES
        if prefix and names and not names[-1].startswith(prefix):
            names = [name for name in names if name.startswith(prefix)]
            is_last = True
        if names:
            self._after = names[-1]
        if command.text:
            names = [name for name in names if command.text in name]
        chunk = [boxes[name] for name in names]
        if command.kind or command.durability:
            chunk = [
                box
                for box in chunk
                if command.kind in ("", box.config.type) and command.durability in ("", box.config.durability)
            ]
            names = [box.name for box in chunk]
        self._add(names, self._keys_of(chunk))
        if not is_last:
            return
        self._prefixes.pop()
        self._after = ""
        if self.is_complete:
            if self._walk is not None and command.prefixes == ("",) and not filter_is_set(command):
                self._rates.end(self._walk)
            self._walk = None
            self._merge = heapq.merge(
                *(zip(keys, repeat(at), names, strict=False) for at, (keys, names) in enumerate(self._chunks))
            )

    def _keys_of(self, chunk: list[Box]) -> list[float]:
        """Return the numbers to sort by: one expression a box, because this is most of the cost of a walk."""
        sort, walk = self._command.sort, self._walk
        if walk is not None:
            return [walk.rate_of(box.generation, box.log.visible_seq) for box in chunk]
        if sort == "count":
            return [box.log.count for box in chunk]
        if sort == "bytes":
            return [box.log.bytes for box in chunk]
        if sort == "last_write":
            return [box.log.visible_ts for box in chunk]
        if sort == "ready":
            return [-1 if box.queue is None else box.queue.ready(box.log.count) for box in chunk]
        if sort == "lag":
            return [lag_of(box) if box.outboxes or len(box.groups) else 0 for box in chunk]
        return [0] * len(chunk)

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
