"""Payloads of sealed batches that are in memory, bounded in bytes.

The oldest is forgotten first, unless it was used since it came or was last spared (a second chance): nothing
has to be moved when a payload is used, and one long read through old data does not push out what many use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shard.core.boxes.sealed import Segment
from streams.protocol.model.records import Batch


class PayloadCache:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._entries: deque[tuple[Segment, int, int]] = deque()

    def __repr__(self) -> str:
        return f"<PayloadCache {len(self._entries)} batches, {self.bytes} of {self.bytes_max} B>"

    def add(self, segment: Segment, at: int, batch: Batch) -> None:
        """Loads a payload; one that is there already stays."""
        if segment.loaded(at) is None:
            segment.load(at, batch)
            self.count(segment, at, batch)

    def add_all(self, payloads: Iterable[tuple[Segment, int, Batch]]) -> None:
        for segment, at, batch in payloads:
            self.add(segment, at, batch)

    def count(self, segment: Segment, at: int, batch: Batch) -> None:
        """Counts a payload that was loaded by others."""
        size = batch.bytes_in_memory
        self._entries.append((segment, at, size))
        self.bytes += size

    def shrink(self) -> None:
        """Forgets payloads until the rest fits."""
        entries = self._entries
        second_chances = len(entries)  # nobody gets a third chance in one go
        while self.bytes > self.bytes_max:
            segment, at, size = entries.popleft()
            if second_chances > 0 and segment.was_used(at):
                entries.append((segment, at, size))
            else:
                segment.forget(at)
                self.bytes -= size
            second_chances -= 1
