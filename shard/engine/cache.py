"""Caches payloads of sealed batches, bounded in bytes.

Eviction is second chance (CLOCK): the oldest payload goes first, unless it was used since it was loaded or
last inspected. So a cache hit moves nothing, and one long scan of old data does not evict payloads that many
readers use.
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
        """Load a payload, unless the segment has it already."""
        if segment.cached_payload(at) is None:
            segment.load(at, batch)
            self.count(segment, at, batch)

    def add_all(self, payloads: Iterable[tuple[Segment, int, Batch]]) -> None:
        for segment, at, batch in payloads:
            self.add(segment, at, batch)

    def count(self, segment: Segment, at: int, batch: Batch) -> None:
        """Count a payload that the segment holds already."""
        size = batch.bytes_in_memory
        self._entries.append((segment, at, size))
        self.bytes += size

    def shrink(self) -> None:
        """Evict payloads until the rest fits."""
        entries = self._entries
        second_chances = len(entries)  # at most one per payload and call
        while self.bytes > self.bytes_max:
            segment, at, size = entries.popleft()
            if second_chances > 0 and segment.was_used(at):
                entries.append((segment, at, size))
            else:
                segment.forget(at)
                self.bytes -= size
            second_chances -= 1
