"""Goal: a task that waits gets what it is granted, or leaves its queue; never both, and never neither."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import trio
import trio.testing

from gateway.admission.memory import STALLED_S, MemoryBudget
from gateway.admission.waiter import Waiter


async def test_a_granted_task_keeps_what_it_got_though_it_is_cancelled_in_the_same_moment() -> None:
    queue: deque[Waiter] = deque()
    results: list[bool] = []

    async def wait() -> None:
        waiter = Waiter(1)
        queue.append(waiter)
        results.append(await waiter.wait(partial(queue.remove, waiter)))
        await trio.lowlevel.checkpoint()
        results.append(False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        queue.popleft().grant()
        nursery.cancel_scope.cancel()
    assert results == [True], "it is cancelled at its next checkpoint"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_task_that_gives_up_is_withdrawn(
    is_cancelled: bool, autojump_clock: trio.testing.MockClock
) -> None:
    queue: deque[Waiter] = deque()
    results: list[bool] = []

    async def wait() -> None:
        waiter = Waiter(1)
        queue.append(waiter)
        results.append(await waiter.wait(partial(queue.remove, waiter), 5))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if is_cancelled:
            nursery.cancel_scope.cancel()
            assert not queue, "before it has run"
    assert not queue
    assert results == ([] if is_cancelled else [False])


async def test_a_failed_wait_raises() -> None:
    waiters: list[Waiter] = []

    async def wait() -> None:
        waiters.append(Waiter(1))
        with pytest.raises(trio.ClosedResourceError):
            await waiters[0].wait(waiters.clear)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        waiters[0].fail(trio.ClosedResourceError())


async def test_a_stalled_client_that_waits_for_more_room_leaves_the_queue_when_it_is_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its end cancels the task while room is being given out."""
    budget = MemoryBudget(100, limit="answer_bytes", what="answers")
    scope = trio.CancelScope()

    async def stalled() -> None:
        charge = budget.open("slow")
        charge.force(90)
        charge.watch(scope.cancel)
        with scope:
            await budget.take("slow", 60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stalled)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(budget.take, "quick", 40)
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(STALLED_S)
        budget._let_in(ends_stalled=True)
        await trio.testing.wait_all_tasks_blocked()
        assert scope.cancelled_caught
    assert (budget.held_by("slow"), budget.held_by("quick"), budget.bytes_used) == (0, 40, 40)
    assert not budget._waiting and budget._waiting_count == 0
