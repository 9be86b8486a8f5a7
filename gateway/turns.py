"""How many requests begin in one round of the event loop, so that no round is long.

Trio runs all that is ready before it looks again for what has come. With some hundred clients that all send
at once, a round is tens of milliseconds, and whatever comes meanwhile waits for all of it: an event on its
way to a watcher as much as an urgent append. So a round begins only so many requests, and the rest of them
wait in the kernel, first come, first served.

    ready ──► a turn left? ──yes──► read and served
                 └──no──► urgent? ──yes──► read and served
                              └──no──► waits for a later round

Bounds: who waits is a connection, and the front bounds those. Nothing of a request is read before its turn.
"""

from __future__ import annotations

from collections import deque

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

#: A request is about a tenth of a millisecond of work at most, so a round is a few milliseconds.
#: Under pressure it is well under one; what a round costs by itself is a tenth of that then.
PER_ROUND, PER_ROUND_PRESSED = 64, 8


class Turns:
    __slots__ = ("_giver", "_left", "_waiting", "_were_many", "per_round")

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self.per_round = per_round
        self._left = per_round
        self._waiting: deque[Task] = deque()
        #: Whether more than a whole round has waited since that was last asked.
        self._were_many = False
        self._giver: Task | None = None

    def __repr__(self) -> str:
        return f"<Turns {self._left} left, {len(self._waiting)} waiting>"

    def try_take(self) -> bool:
        """Whether a request may begin at once."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._wake_giver()
            return True
        return False

    async def take(self) -> None:
        """Waits for a turn."""
        task = current_task()
        self._waiting.append(task)
        if len(self._waiting) > PER_ROUND:
            self._were_many = True

        def abort(_: object) -> Abort:
            self._waiting.remove(task)
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def sample(self, *, is_pressed: bool) -> None:
        """Rounds are short while somebody is pressed, and while more wait for their turn than a long one
        would serve: short rounds are what keeps the pressure from being felt."""
        is_pressed = is_pressed or self._were_many
        self._were_many = len(self._waiting) > PER_ROUND
        self.per_round = PER_ROUND_PRESSED if is_pressed else PER_ROUND

    def _wake_giver(self) -> None:
        if self._giver is not None:
            giver, self._giver = self._giver, None
            reschedule(giver)

    async def run(self) -> None:
        """Gives turns, once a round while they are wanted; it sleeps while they are not."""
        waiting = self._waiting
        while True:
            while waiting:
                for _ in range(min(self.per_round, len(waiting))):
                    reschedule(waiting.popleft())
                await trio.lowlevel.checkpoint()
            self._left = self.per_round
            self._giver = current_task()
            await wait_task_rescheduled(self._stop)

    def _stop(self, _: object) -> Abort:
        self._giver = None
        return Abort.SUCCEEDED
