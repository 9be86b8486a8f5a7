"""Tells the supervisor once a second that this shard moves: its event loop, and the threads of its log.

The task runs in the event loop, so a beat proves that the loop runs. A beat is left out when the log's
threads had work at the last look and have finished none of it since: a disk that hangs stops the beats too.

The supervisor restarts a shard that is silent for `STREAMS_HANG_MS`.

Bounds: the pipe is written without waiting. A supervisor that reads nothing costs beats, never a stall.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

#: Between two beats. The supervisor counts silence in seconds.
BEAT_S = 1.0

#: Whether the log has work, and how much it has finished so far.
LogProgress = Callable[[], tuple[bool, int]]


class Heartbeat:
    def __init__(self, progress: LogProgress, send: Callable[[], None]) -> None:
        self._progress = progress
        self._send = send
        self._was_working = False
        self._last_count = 0

    def __repr__(self) -> str:
        return f"<Heartbeat, log {'working' if self._was_working else 'idle'}, {self._last_count} done>"

    async def run(self) -> None:
        while True:
            if self.has_progress():
                self._send()
            await trio.sleep(BEAT_S)

    def has_progress(self) -> bool:
        """Return False when the log has had work since the last call and has finished none of it."""
        is_working, count = self._progress()
        is_stuck = is_working and self._was_working and count == self._last_count
        self._was_working, self._last_count = is_working, count
        return not is_stuck
