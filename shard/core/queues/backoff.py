"""How long a job waits after a failed delivery (`retry_backoff`, v0 §21). Pure.

The delay grows by `factor` with every delivery, up to `max_ms`. Jitter spreads it by a fraction to both
sides. It is a hash of seq and deliveries, so a failure has the same delay live and in a replay.
"""

from __future__ import annotations

from xxhash import xxh64_intdigest

from streams.protocol.model.boxes import RetryBackoff

#: Beyond so many deliveries the delay does not grow: 2**64 ms is more than any `max_ms`.
_STEPS_MAX = 64


def delay_ms(backoff: RetryBackoff, seq: int, deliveries: int) -> int:
    """Return the delay after the delivery number `deliveries` of a job."""
    grown_ms = backoff.initial_ms * backoff.factor ** min(max(deliveries, 1) - 1, _STEPS_MAX)
    fraction = xxh64_intdigest(b"%d %d" % (seq, deliveries)) / 2**64
    spread = 1 + backoff.jitter * (2 * fraction - 1)
    return int(min(min(grown_ms, backoff.max_ms) * spread, backoff.max_ms))
