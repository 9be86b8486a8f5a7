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
#: Under pressure while there is something urgent: the requests of a round, the rest until the next one, and
#: for how long after the last that was urgent. With every core busy, what is urgent would wait for one at
#: each step of its way: here, in the shard, and here again. So about half of the time is left to it.
PER_ROUND_URGENT, REST_S, URGENT_S = 4, 0.001, 1.0


class Turns:
    __slots__ = ("_giver", "_left", "_urgent_until_s", "_waiting", "_were_many", "per_round")

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self.per_round = per_round
        self._left = per_round
        self._waiting: deque[Task] = deque()
        #: Whether more than a whole round has waited since that was last asked.
        self._were_many = False
        self._giver: Task | None = None
        self._urgent_until_s = 0.0

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

    async def take(self) -> float:
        """Waits for a turn; how long that took, in seconds."""
        task = current_task()
        since_s = trio.current_time()
        self._waiting.append(task)
        if len(self._waiting) > PER_ROUND:
            self._were_many = True

        def abort(_: object) -> Abort:
            self._waiting.remove(task)
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)
        return trio.current_time() - since_s

    def note_urgent(self) -> None:
        """Something has come that must not wait."""
        self._urgent_until_s = trio.current_time() + URGENT_S

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
                rests = self.per_round == PER_ROUND_PRESSED and trio.current_time() < self._urgent_until_s
                for _ in range(min(PER_ROUND_URGENT if rests else self.per_round, len(waiting))):
                    reschedule(waiting.popleft())
                if rests:
                    await trio.sleep(REST_S)
                else:
                    await trio.lowlevel.checkpoint()
            self._left = self.per_round
            self._giver = current_task()
            await wait_task_rescheduled(self._stop)

    def _stop(self, _: object) -> Abort:
        self._giver = None
        return Abort.SUCCEEDED
