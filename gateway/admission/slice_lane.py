"""Lets one slice of expensive input be processed in each turn of the event loop.

A connection that has sent more than one slice of frames (`frame_budget.py`) waits here before each further
slice, in order of arrival. So all such connections together process one slice a turn, however many they are,
and a request of another client waits for one slice and not for all of them.

The lock is not held while a slice is processed: a client that does not read its answers delays no other.

Bounds: one waiting task for each connection, and the front bounds those.
"""

from __future__ import annotations

import trio


class SliceLane:
    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.Lock()

    def __repr__(self) -> str:
        return f"<SliceLane {self._lock.statistics().tasks_waiting} waiting>"

    async def wait_turn(self) -> None:
        async with self._lock:  # fair: tasks get it in order of arrival
            await trio.lowlevel.checkpoint()
