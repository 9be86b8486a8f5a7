"""Sorts and copies many numbers or names in steps, each of them short.

Segments are written and read in threads beside an event loop that must not wait. The interpreter can take the
lock from a loop but not from a call into C, so no such call gets more than a few thousand entries. Sorting
costs about half a µs for each name, and a sort of 2,000 takes a millisecond; to copy numbers costs some 20 ns
each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TypeVar

#: A step of writing or copying is over when it has this many bytes; a batch that is larger is one step.
STEP_BYTES = 256 << 10

#: What one call into C gets at most.
SORT_MAX = 2000
COPY_MAX = 20_000

T = TypeVar("T", int, str)


def chunks(numbers: array[int]) -> Iterator[array[int]]:
    for at in range(0, len(numbers), COPY_MAX):
        yield numbers[at : at + COPY_MAX]


def convert(numbers: array[int], kind: str) -> array[int]:
    """Numbers with another number of bytes each; `OverflowError` if one needs more."""
    result = array(kind)
    for some in chunks(numbers):
        result.fromlist(some.tolist())
    return result


def sorted_runs(items: Collection[T]) -> Iterator[list[T]]:
    """`sorted`, in runs that are sorted one by one: to sort half a million names in one go would take a
    third of a second, and nothing else would run meanwhile."""
    if len(items) <= SORT_MAX:
        return iter([sorted(items)])
    # Every so many items one is taken as a sample, a bound for each thousand items from it: eight samples
    # a bound and more make the lists in between about even. However uneven they are, the order is right.
    sample = sorted(islice(items, 0, None, -(-len(items) // (2 * SORT_MAX))))
    bounds = sample[:: max(1, len(sample) * (SORT_MAX // 2) // len(items))]
    between: list[list[T]] = [[] for _ in range(len(bounds) + 1)]
    for item in items:
        between[bisect_right(bounds, item)].append(item)
    return map(sorted, between)
