"""Requests per second of a key: a token bucket for each key that has such a limit (v0 §12). Pure.

A process admits its share of the limit: a key's requests spread over the processes that serve it. A bucket
holds what a second brings, so a key that was quiet may send that much at once.

Requests that are refused one after the other are each given a later time to come back, as far apart as the
limit says: a hundred clients of one key that all came back for the next token would be refused again.

Bounds: a bucket for each key with the limit that has sent something; at `BUCKETS_MAX` all start full again.
"""

from __future__ import annotations

from streams.protocol.access.key_limits import limit_exceeded_error
from streams.protocol.access.keys import KEYS_MAX, Key

#: More than there are keys at a time. Ids that a reload took away may be among them.
BUCKETS_MAX = 2 * KEYS_MAX
#: The latest time to come back that is given out: by then a bucket is full again.
_BACK_S_MAX = 1.0


class _Bucket:
    __slots__ = ("back_s", "tokens", "updated_s")

    def __init__(self, tokens: float, updated_s: float) -> None:
        self.tokens = tokens
        self.updated_s = updated_s
        #: The latest time to come back that was given out.
        self.back_s = 0.0

    def next_back_s(self, rate: float, now_s: float) -> float:
        """How many seconds from now a request that is refused should come back."""
        next_s = max(now_s + (1.0 - self.tokens) / rate, self.back_s + 1.0 / rate)
        if next_s <= now_s + max(_BACK_S_MAX, 1.0 / rate):
            self.back_s = next_s
        return self.back_s - now_s


class RequestRates:
    def __init__(self, processes: int = 1) -> None:
        """`processes` share the limit of a key evenly."""
        self._processes = processes
        self._buckets: dict[str, _Bucket] = {}

    def __repr__(self) -> str:
        return f"<RequestRates of {len(self._buckets)} keys>"

    def take(self, key: Key, now_s: float) -> None:
        """Counts a request. Raises `Throttled` when the key has sent too many."""
        limit = key.limits.requests_per_s
        if not limit:
            return
        rate = limit / self._processes
        bucket = self._bucket(key.id, rate, now_s)
        if bucket.tokens < 1.0:
            error = limit_exceeded_error("requests_per_s", in_use=limit, limit=limit)
            error.detail["retry_after_ms"] = 1 + int(1000 * bucket.next_back_s(rate, now_s))
            raise error
        bucket.tokens -= 1.0

    def reserve(self, key: Key, now_s: float) -> float:
        """Counts a request that may wait. Returns how many seconds it has to."""
        limit = key.limits.requests_per_s
        if not limit:
            return 0.0
        rate = limit / self._processes
        bucket = self._bucket(key.id, rate, now_s)
        bucket.tokens -= 1.0
        return max(0.0, -bucket.tokens / rate)

    def in_use(self, key: Key, now_s: float) -> int:
        """About how many requests of the last second count, if all processes get as many as this one."""
        limit = key.limits.requests_per_s
        rate = limit / self._processes
        bucket = self._buckets.get(key.id)
        if not rate or bucket is None:
            return 0
        full = max(1.0, rate)
        tokens = self._bucket(key.id, rate, now_s).tokens
        return min(limit, round(limit * (full - tokens) / full))

    def _bucket(self, id: str, rate: float, now_s: float) -> _Bucket:
        full = max(1.0, rate)
        bucket = self._buckets.get(id)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                self._buckets.clear()
            bucket = self._buckets[id] = _Bucket(full, now_s)
        else:
            bucket.tokens = min(full, bucket.tokens + (now_s - bucket.updated_s) * rate)
            bucket.updated_s = now_s
        return bucket
