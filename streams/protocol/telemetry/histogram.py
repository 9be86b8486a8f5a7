"""Counts of measured times in fixed buckets, as Prometheus keeps them. Pure.

Bounds are fixed so that histograms of many processes, and of one process before and after a restart, can be
added up. One observation costs about a quarter of a microsecond, so it is made once a batch, group or page,
never once a record; those that are alike are made as one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

#: Seconds. From what a page cache takes to what makes a client give up; about three to a power of ten.
TIMES_S = (
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


def quantile(counts: Sequence[int], part: float, bounds: Sequence[float] = TIMES_S) -> float:
    """Return the time that this part of the observations is at most, as if each bucket were evenly filled; 0
    if there are none. Values beyond the last bound count as twice that bound."""
    rank = part * sum(counts)
    edges = (0.0, *bounds, 2 * bounds[-1])
    before = 0
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        if count and before + count >= rank:
            return low + (high - low) * max(0.0, rank - before) / count
        before += count
    return 0.0


class HistogramFacts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram as it is sent: observations in each bucket (not cumulative; the last has no bound), and
    their sum."""

    counts: tuple[int, ...] = (0,) * (len(TIMES_S) + 1)
    sum: float = 0.0


class Histogram:
    """Written by one thread; another may read it at any time and is at most one observation behind."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = TIMES_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def __repr__(self) -> str:
        return f"<Histogram {sum(self._counts)} observations, sum {self._sum:g}>"

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def is_used(self) -> bool:
        return any(self._counts)

    def facts(self) -> HistogramFacts:
        return HistogramFacts(tuple(self._counts), self._sum)
