"""Limits the bytes of live records in a shard (v0 §12, STREAMS_MAX_TOTAL_BYTES).

A sum over all boxes is too slow for every write, and updating it at every change would slow each change. So
the shard computes the sum now and then and adds the bytes of each append in between. It subtracts nothing
until the next computation, so the sum is never too small for appends; copies of routers and dead letters are
included from the next computation on. The sum is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from shard.core.boxes.box import Box
from streams.protocol.errors import Throttled

#: Maximum age of the sum, and its age from which a write that does not fit computes it again. That takes
#: about 10 ms for a hundred thousand boxes.
_OLD_MS, _DOUBTFUL_MS = 1000, 100


class Quota:
    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._sum = 0
        self._summed_ms = -_OLD_MS

    def __repr__(self) -> str:
        return f"<Quota {self._sum} of {self._max} B>"

    def check(self, boxes: Iterable[Box], size: int, now_ms: int, *, counts: bool = True) -> None:
        """Raise `Throttled` if `size` more bytes exceed the limit; else add them if `counts`."""
        age_ms = abs(now_ms - self._summed_ms)
        if age_ms >= _OLD_MS or (self._sum + size > self._max and age_ms >= _DOUBTFUL_MS):
            self._sum = sum(box.log.bytes for box in boxes)
            self._summed_ms = now_ms
        if self._sum + size > self._max:
            raise Throttled(
                f"this shard stores {self._sum} bytes, and {size} more would exceed its limit {self._max}; "
                "delete records or raise STREAMS_MAX_TOTAL_BYTES",
                limit="total_bytes",
            )
        if counts:
            self._sum += size
