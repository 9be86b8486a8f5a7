"""Counts the connections that a front closes or refuses, by reason, and logs them.

Under attack there are thousands a second. The log gets one line for each reason every `LOG_EVERY_S` seconds,
with the number of connections since the last line.

Bounds: the reasons are the ones below.
"""

from __future__ import annotations

from math import inf
from typing import Final, Literal

import structlog
import trio

log = structlog.get_logger("gateway.front")

Reason = Literal["http2_frames", "socket_frames", "no_key", "address", "address_limit", "idle"]

#: The log message for each reason.
REASONS: Final[dict[Reason, str]] = {
    "http2_frames": "closed HTTP/2 connections that sent too many frames for the requests they made",
    "socket_frames": "closed WebSockets that sent too many small frames for the commands they sent",
    "no_key": "all connections are in use: closed idle ones that had not shown a valid key for new ones",
    "address": "closed idle connections of an address with too many that had not shown a valid key",
    "address_limit": "refused connections of an address that has STREAMS_MAX_CONNECTIONS_PER_ADDRESS of them",
    "idle": "all connections are in use: closed idle ones with a valid key for new ones; "
    "raise STREAMS_MAX_CONNECTIONS",
}

LOG_EVERY_S: Final = 10.0


class CloseCounters:
    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        #: By reason: the time of the last log line, and the count at that time.
        self._last_lines: dict[str, tuple[float, int]] = dict.fromkeys(REASONS, (-inf, 0))
        self._full_logged_s = -inf

    def __repr__(self) -> str:
        return f"<CloseCounters {self.counts}>"

    def count(self, reason: Reason, address: str) -> None:
        """Count one connection. `address` is the address of its client."""
        self.counts[reason] += 1
        logged_s, logged_count = self._last_lines[reason]
        now_s = trio.current_time()
        if now_s >= logged_s + LOG_EVERY_S:
            self._last_lines[reason] = now_s, self.counts[reason]
            log.warning(REASONS[reason], connections=self.counts[reason] - logged_count, last_address=address)

    def warn_full(self, connections: int) -> None:
        """Log that new connections wait in the kernel's queue because no open one can be closed."""
        now_s = trio.current_time()
        if now_s >= self._full_logged_s + LOG_EVERY_S:
            self._full_logged_s = now_s
            log.warning(
                "all connections are in use: new ones wait until one ends; raise STREAMS_MAX_CONNECTIONS",
                open=connections,
            )
