"""Buffers a live response in a queue for the task that sends it.

Limit: the producer checks `unsent_bytes` before each `put`.
"""

from __future__ import annotations

from collections import deque

import trio

from gateway.requests.request import ClientStalled, ReadProgress


class QueuedSink:
    """A `Sink` with a separate sender: it takes pieces with `next`, sends them, and calls `note_sent`."""

    __slots__ = ("_has_more", "_progress", "_unsent", "charge", "unsent_bytes")

    def __init__(self) -> None:
        self._unsent: deque[bytes] = deque()
        #: Bytes in the queue, and bytes that the sender has taken and not sent yet.
        self.unsent_bytes = 0
        self.charge: ReadProgress | None = None
        self._has_more = trio.Event()
        self._progress = trio.Event()

    def __repr__(self) -> str:
        return f"<QueuedSink {self.unsent_bytes} B unsent>"

    def put(self, data: bytes) -> None:
        if data:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
            self._has_more.set()

    async def next(self) -> bytes:
        """Take the next piece; wait only if the queue is empty."""
        while not self._unsent:
            self._has_more = trio.Event()
            await self._has_more.wait()
        return self._unsent.popleft()

    async def next_all(self) -> bytes:
        """Take all queued pieces as one; wait only if the queue is empty."""
        first = await self.next()
        if not self._unsent:
            return first
        parts = [first, *self._unsent]
        self._unsent.clear()
        return b"".join(parts)

    def note_sent(self, count: int) -> None:
        self.unsent_bytes -= count
        if self.charge is not None:
            self.charge.note_progress(count)
        self._progress.set()
        self._progress = trio.Event()

    async def wait_sent(self, stall_s: float) -> None:
        if not self.unsent_bytes:
            await trio.lowlevel.checkpoint()
        while self.unsent_bytes:
            with trio.move_on_after(stall_s) as scope:
                await self._progress.wait()
            if scope.cancelled_caught:
                raise ClientStalled
