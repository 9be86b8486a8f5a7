"""How many bytes of live records a shard may hold (v0 §12, STREAMS_MAX_TOTAL_BYTES).

The sum over all boxes is too long to make for every write, and to keep it at every change would cost each of
them. So it is made now and then, and what is written in between is added to it. Nothing is taken off until
the next time, so the sum is never too small for what came by appends; copies of routers and dead letters are
in it from the next time on. Nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from shard.core.boxes.box import Box
from streams.protocol.errors import Throttled

#: The sum is at most this old, and this old before a write that would not fit has it made again. It takes
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
        """Raises `Throttled` when `size` bytes more would be too many; else they count, unless the caller
        only asks."""
        age_ms = abs(now_ms - self._summed_ms)
        if age_ms >= _OLD_MS or (self._sum + size > self._max and age_ms >= _DOUBTFUL_MS):
            self._sum = sum(box.log.bytes for box in boxes)
            self._summed_ms = now_ms
        if self._sum + size > self._max:
            raise Throttled(
                f"{self._sum} bytes are stored here, and {size} more would be over {self._max}; "
                "delete some or raise the limit",
                limit="total_bytes",
            )
        if counts:
            self._sum += size
