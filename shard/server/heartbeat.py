"""Sends the supervisor a heartbeat once a second, as long as the event loop and the log's threads make
progress.

The task runs in the event loop, so a heartbeat proves that the loop runs. No heartbeat is sent if the log's
threads had work at the last check and have finished none of it since: so a disk that hangs stops them too.

The supervisor restarts a shard that is silent for `STREAMS_HANG_MS`.

Bounds: the pipe is written without waiting. If the supervisor does not read, heartbeats are lost; the shard
never blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

#: Time between two heartbeats. The supervisor measures silence in seconds.
BEAT_S = 1.0

#: Returns whether the log's threads have work, and a count that grows whenever they finish some.
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
