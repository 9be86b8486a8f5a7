"""Hands out turns for expensive input, one in each round of the event loop.

A connection that has brought more than one slice of frames (`frame_budget.py`) waits here before each further
one, first come, first served. So all such connections together take one slice of a round, however many they
are, and a request of another client waits for one slice and not for all.

Nothing is processed while the lane is held: a client that does not read its answers delays nobody else.

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
        async with self._lock:  # it is fair: tasks get it in the order in which they came
            await trio.lowlevel.checkpoint()
