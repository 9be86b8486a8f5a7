"""Whether a failed request is repeated, and after which pause. Pure: time spent and luck are arguments.

Refused    never: the same request would be refused again
Busy       yes, nothing happened
Uncertain  only a request that may be repeated: a read, or one that has the same effect twice. Appends are
           among them, because they carry an idempotency key
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from streams.client.errors import Unreachable
from streams.protocol.errors import Busy, StreamsError, Uncertain

#: Limits on how much there is of something. Waiting does not make room there; deleting does.
_LIMITS_OF_STOCK = frozenset({"boxes", "routers", "total_bytes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to try, and how often. Pauses double from `pause_s_first` to `pause_s_max`, less up to half by
    chance, so that many clients do not come back at the same moment.

    total_s        give up when an attempt could only start after this long. A server that is started again is
                   back well within it. It must stay below the box's `idempotency_window_ms`, or the repeat
                   of an append could come after its key was forgotten
    unreachable_s  the same while nothing listens at the address; None = as `total_s`
    """

    total_s: float = 30.0
    unreachable_s: float | None = None
    pause_s_first: float = 0.05
    pause_s_max: float = 2.0

    def pause_s(
        self, error: StreamsError, *, attempt: int, spent_s: float, is_repeatable: bool, luck: float
    ) -> float | None:
        """How long to wait before the next attempt; None when there is none. `attempt` counts from 0, `luck`
        is from 0 to 1."""
        if not self._may_repeat(error, is_repeatable):
            return None
        backoff_s = self.pause_s_first * 2 ** min(attempt, 30)
        pause_s = min(backoff_s, self.pause_s_max) * (1 - luck / 2)
        asked_ms = error.detail.get("retry_after_ms")
        if isinstance(asked_ms, int):
            pause_s = max(pause_s, asked_ms / 1000)
        total_s = self.total_s
        if isinstance(error, Unreachable) and self.unreachable_s is not None:
            total_s = self.unreachable_s
        return pause_s if spent_s + pause_s <= total_s else None

    @staticmethod
    def _may_repeat(error: StreamsError, is_repeatable: bool) -> bool:
        if isinstance(error, Busy):
            return error.detail.get("limit") not in _LIMITS_OF_STOCK
        return isinstance(error, Uncertain) and is_repeatable


#: For readers and workers, which have nothing better to do than to wait for their server.
FOREVER = Retry(total_s=inf)
NEVER = Retry(total_s=-1.0)
