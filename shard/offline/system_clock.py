"""The system clock, for tools that work on folders. A serving shard has a `Timekeeper`."""

from __future__ import annotations

import time


def now_ms() -> int:
    return time.time_ns() // 1_000_000
