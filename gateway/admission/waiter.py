"""A task, or a coroutine that runs inline (`inline.py`), that waits in a queue for a grant: a turn, bytes, a
place in flight.

The queue belongs to the caller, which decides the order and grants. A task gets either a grant or the end of
its wait, never both. A task with a grant returns from `wait`, even if it is cancelled at the same moment, and
must give the grant back later. A task that is cancelled or times out is withdrawn from the queue before
anything else runs, and has nothing to give back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import outcome
import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from gateway.admission import inline


class Waiter:
    __slots__ = ("_task", "size")

    def __init__(self, size: int) -> None:
        """`size` is the amount that the current task or inline coroutine waits for."""
        self._task: Task | inline.InlineCoroutine[object] = inline.current_run or current_task()
        self.size = size

    def __repr__(self) -> str:
        return f"<Waiter for {self.size}>"

    async def wait(self, withdraw: Callable[[], None], wait_s_max: float = inf) -> bool:
        """Wait for the grant. Returns False if the time is over first. `withdraw` takes the waiter out of its
        queue; it must not raise. Inline, it has no time limit."""
        if isinstance(self._task, inline.InlineCoroutine):
            try:
                await inline.suspend()
            except trio.Cancelled:
                withdraw()
                raise
            return True

        def abort(_: object) -> Abort:
            withdraw()
            return Abort.SUCCEEDED

        if wait_s_max == inf:
            await wait_task_rescheduled(abort)
            return True
        with trio.move_on_after(wait_s_max) as scope:
            await wait_task_rescheduled(abort)
        return not scope.cancelled_caught

    def grant(self) -> None:
        """Let the task continue. The caller has taken the waiter out of its queue."""
        if isinstance(self._task, inline.InlineCoroutine):
            self._task.resume()
        else:
            reschedule(self._task)

    def fail(self, error: Exception) -> None:
        """Make `wait` raise an error."""
        if isinstance(self._task, inline.InlineCoroutine):
            self._task.fail(error)
        else:
            reschedule(self._task, outcome.Error(error))
