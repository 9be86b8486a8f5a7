"""Sorts and copies many numbers or names in short steps, so that other threads can run in between.

Segments are written and read in threads beside an event loop that must not wait. The interpreter can switch
threads in a Python loop but not inside a call into C, so no such call gets more than a few thousand entries.
Sorting costs about 0.5 µs per name, so a sort of 2,000 takes a millisecond; copying costs about 20 ns per
number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TypeVar

#: Bytes of one step of writing or copying; a larger batch is one step.
STEP_BYTES = 256 << 10

#: The most entries of one call into C: of a sort, and of a copy.
SORT_MAX = 2000
COPY_MAX = 20_000

T = TypeVar("T", int, str)


def chunks(numbers: array[int]) -> Iterator[array[int]]:
    for at in range(0, len(numbers), COPY_MAX):
        yield numbers[at : at + COPY_MAX]


def convert(numbers: array[int], kind: str) -> array[int]:
    """Return the numbers in an array of another type; `OverflowError` if one does not fit."""
    result = array(kind)
    for some in chunks(numbers):
        result.fromlist(some.tolist())
    return result


def sorted_runs(items: Collection[T]) -> Iterator[list[T]]:
    """Return the sorted items in runs that are sorted one by one.

    Sorting half a million names at once would take a third of a second and block all other threads.
    """
    if len(items) <= SORT_MAX:
        return iter([sorted(items)])
    # Take a sample of the items, and from it one bound per thousand items. With eight or more samples per
    # bound the lists have about equal lengths. The order is right in any case.
    sample = sorted(islice(items, 0, None, -(-len(items) // (2 * SORT_MAX))))
    bounds = sample[:: max(1, len(sample) * (SORT_MAX // 2) // len(items))]
    between: list[list[T]] = [[] for _ in range(len(bounds) + 1)]
    for item in items:
        between[bisect_right(bounds, item)].append(item)
    return map(sorted, between)
