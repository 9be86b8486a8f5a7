"""Loads the payloads that a read of sealed records is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shard.core.boxes.sealed import NotLoaded
from shard.storage.segments.store import Name, SegmentStore

T = TypeVar("T")


def load_missing(store: SegmentStore, read: Callable[[], T]) -> T:
    """Call `read`, load the payload that it is missing, and repeat until nothing is missing."""
    while True:
        try:
            return read()
        except NotLoaded as missing:
            segment, at = missing.segment, missing.at
            segment.load(at, store.read(Name.of(segment), at, bytes_max=1)[0])
