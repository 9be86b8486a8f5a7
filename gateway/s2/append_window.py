"""Bounds the bytes of S2 appends in flight to shards, and measures their latency.

Every append needs a permit for its bytes before it is sent, and returns it when the reply arrives. Permits
are granted first come, first served, so a large batch does not starve.

Limit: `_BYTES_MAX` in flight over all sessions. A session waits for its permit before it reads more.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import trio

from gateway.admission.waiter import Waiter
from streams.protocol.telemetry.histogram import Histogram
from streams.protocol.telemetry.reports import S2_BATCH_BYTES, S2_BATCH_RECORDS, S2_TIMES_S, S2Report

#: A batch is in memory about three times: as received, as sent, and in the buffer of the link.
_BYTES_MAX = 64 * 1024 * 1024


class AppendWindow:
    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_left = bytes_max
        self._waiting: deque[Waiter] = deque()
        self._permit_times = Histogram(S2_TIMES_S)
        self._ack_times = Histogram(S2_TIMES_S)
        self._records = Histogram(S2_BATCH_RECORDS)
        self._bytes = Histogram(S2_BATCH_BYTES)

    def __repr__(self) -> str:
        return f"<AppendWindow {self._bytes_left} B left, {len(self._waiting)} waiting>"

    async def enter(self, size: int) -> None:
        """Wait for a permit of `size` bytes. The caller must call `leave` afterwards."""
        since_s = trio.current_time()
        if self._waiting or size > self._bytes_left:
            waiter = Waiter(size)
            self._waiting.append(waiter)
            await waiter.wait(partial(self._withdraw, waiter))
        else:
            self._bytes_left -= size
        self._permit_times.observe(trio.current_time() - since_s)

    def leave(self, size: int) -> None:
        self._bytes_left += size
        self._grant_waiting()

    def _withdraw(self, waiter: Waiter) -> None:
        self._waiting.remove(waiter)
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        while self._waiting and self._waiting[0].size <= self._bytes_left:
            waiter = self._waiting.popleft()
            self._bytes_left -= waiter.size
            waiter.grant()

    def observe_ack(self, *, records: int, size: int, took_s: float) -> None:
        self._ack_times.observe(took_s)
        self._records.observe(records)
        self._bytes.observe(size)

    def report(self) -> S2Report:
        return S2Report(
            permit=self._permit_times.facts(),
            ack=self._ack_times.facts(),
            records=self._records.facts(),
            bytes=self._bytes.facts(),
        )
