"""The largest of many rows, kept while all are passed by once. Pure.

A shard and a gateway choose by this code, so that the rows of many shards put together are chosen as those of
one shard are. Of equal values the first to come stay, so with rows in the order of their names the same rows
are chosen each time.

Bounds: `rows_max` rows; a row that is not among the largest costs one comparison for each order.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappush, heapreplace
from typing import Generic, TypeVar

from streams.protocol.telemetry.reports import BoxRow

R = TypeVar("R")


class Top(Generic[R]):
    """The `rows_max` rows with the largest values."""

    __slots__ = ("_heap", "_row_count", "_rows_max", "has_more")

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        #: (value, minus its number, name, row): the least first, and of equal ones the last that came.
        self._heap: list[tuple[float, int, str, R]] = []
        self._row_count = 0
        #: True if some row was left out.
        self.has_more = False

    def __repr__(self) -> str:
        return f"<Top {len(self._heap)} of {self._rows_max}>"

    def wants(self, value: float) -> bool:
        """Return True if a row of this value is among the largest so far."""
        heap = self._heap
        if len(heap) < self._rows_max:
            return True
        self.has_more = True
        return bool(heap) and value > heap[0][0]

    def add(self, value: float, name: str, row: R) -> None:
        """Add a row that `wants` has accepted."""
        self._row_count += 1
        entry = (value, -self._row_count, name, row)
        if len(self._heap) < self._rows_max:
            heappush(self._heap, entry)
        else:
            heapreplace(self._heap, entry)

    def rows(self) -> list[R]:
        """Return the rows by name."""
        return [row for _, _, _, row in sorted(self._heap, key=lambda each: each[2])]


class TopBoxes:
    """Boxes by size, by lag and by rate: a third of `rows_max` for each, and all boxes while they fit."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        #: All rows, until there are too many.
        self._all: list[BoxRow] | None = []
        third = rows_max // 3
        self._sizes: Top[BoxRow] = Top(rows_max - 2 * third)
        self._lags: Top[BoxRow] = Top(third)
        self._rates: Top[BoxRow] = Top(third)

    def __repr__(self) -> str:
        return f"<TopBoxes {len(self.rows())} of {self._rows_max}>"

    @property
    def has_more(self) -> bool:
        return self._all is None

    def wants(self, size: int, lag: int, rate: float) -> bool:
        """Return True if a row of these values would be kept, for a caller that can save making it."""
        if self._all is not None:
            return True
        return (
            self._sizes.wants(size)
            or bool(lag and self._lags.wants(lag))
            or bool(rate and self._rates.wants(rate))
        )

    def add(self, row: BoxRow) -> None:
        if self._all is not None:
            if len(self._all) < self._rows_max:
                self._all.append(row)
            else:
                self._all = None
        for top, value in ((self._sizes, row.bytes), (self._lags, row.lag), (self._rates, row.rate)):
            if (value or top is self._sizes) and top.wants(value):
                top.add(value, row.box, row)

    def rows(self) -> list[BoxRow]:
        """Return the rows by name."""
        if self._all is not None:
            return sorted(self._all, key=lambda row: row.box)
        rows = {row.box: row for top in (self._sizes, self._lags, self._rates) for row in top.rows()}
        return [rows[name] for name in sorted(rows)]


def top_of(rows: Iterable[tuple[float, str, R]], rows_max: int) -> tuple[list[R], bool]:
    """Return the rows with the largest values, by name, and True if others were left out."""
    top: Top[R] = Top(rows_max)
    for value, name, row in rows:
        if top.wants(value):
            top.add(value, name, row)
    return top.rows(), top.has_more
