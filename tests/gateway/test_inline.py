"""A coroutine runs inside the function that resumes it, and in its task only while it needs one."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel
import trio.testing

from gateway.admission import inline
from gateway.admission.append_limiter import BODY_WINDOW_BYTES, AppendLimiter
from gateway.admission.inline import InlineCoroutine, leave_task, need_task, resume_loop, suspend
from gateway.admission.memory import EVERYONE, MemoryBudget
from gateway.admission.waiter import Waiter
from streams.protocol.telemetry.pressure import Thresholds


class Places:
    """Where the steps of a coroutine ran: inline, or in a task."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.runs: list[InlineCoroutine[object]] = []

    def note(self) -> None:
        self.seen.append("task" if inline.current_run is None else "inline")

    async def wait(self) -> object:
        """Suspend inline. `runs[-1]` resumes it."""
        assert inline.current_run is not None
        self.runs.append(inline.current_run)
        return await suspend()


async def test_a_resumed_coroutine_runs_at_once_and_wakes_its_task_only_at_its_end() -> None:
    places, answers = Places(), []

    async def serve() -> str:
        for _ in range(3):
            answers.append(await places.wait())
        return "done"

    async with trio.open_nursery() as nursery:
        results: list[str] = []

        async def own() -> None:
            results.append(await InlineCoroutine(serve()).run())

        nursery.start_soon(own)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            places.runs[-1].resume(number)
            assert answers[-1] == number, "no turn of the event loop was needed"
        assert inline.current_run is None and not results
        await trio.testing.wait_all_tasks_blocked()
        assert results == ["done"]


async def test_it_goes_on_in_its_task_where_it_needs_one_and_leaves_it_again() -> None:
    places = Places()

    async def serve() -> None:
        places.note()
        await need_task()
        places.note()
        await need_task()  # it has one
        await trio.lowlevel.checkpoint()
        places.note()
        await leave_task()
        await leave_task()  # it has left it
        places.note()
        assert await places.wait() == "answer"
        await need_task()
        places.note()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(InlineCoroutine(serve()).run)
        await trio.testing.wait_all_tasks_blocked()
        places.runs[0].resume("answer")
    assert places.seen == ["inline", "task", "task", "inline", "task"]


async def test_its_errors_are_raised_in_its_task_and_not_in_the_function_that_resumed_it() -> None:
    places = Places()

    async def serve() -> None:
        with pytest.raises(KeyError):
            await places.wait()
        await places.wait()

    async with trio.open_nursery() as nursery:

        async def own() -> None:
            with pytest.raises(ValueError, match="of the answer"):
                await InlineCoroutine(serve()).run()

        nursery.start_soon(own)
        await trio.testing.wait_all_tasks_blocked()
        places.runs[0].fail(KeyError())
        places.runs[1].fail(ValueError("of the answer"))


async def test_a_wait_that_only_a_task_can_do_is_an_error_where_it_happens() -> None:
    async def serve() -> str:
        try:
            await trio.sleep(1)
        except inline.NeedsTask:
            return "caught"
        return "slept"

    assert await InlineCoroutine(serve()).run() == "caught"


async def test_it_is_cancelled_with_its_task_where_it_waits() -> None:
    places, steps = Places(), []

    async def serve() -> None:
        try:
            await places.wait()
        except trio.Cancelled:
            steps.append("withdrawn")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(InlineCoroutine(serve()).run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert steps == ["withdrawn"]


async def test_a_waiter_is_granted_or_withdrawn_inline() -> None:
    queue: list[Waiter] = []
    steps: list[str] = []

    async def serve() -> None:
        for _ in range(2):
            waiter = Waiter(1)
            queue.append(waiter)
            await waiter.wait(queue.clear)
            steps.append("granted")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(InlineCoroutine(serve()).run)
        await trio.testing.wait_all_tasks_blocked()
        queue.pop().grant()
        assert steps == ["granted"] and len(queue) == 1
        nursery.cancel_scope.cancel()
    assert not queue


async def test_a_full_limiter_is_waited_for_inline_and_a_full_budget_in_the_task() -> None:
    limiter = AppendLimiter(Thresholds())
    budget = MemoryBudget(100, limit="x", what="x")
    places = Places()
    limiter.go_in(BODY_WINDOW_BYTES)
    budget.take_anyway(EVERYONE, 100)

    async def serve() -> None:
        await limiter.enter("a", 1)
        places.note()
        await leave_task()
        await budget.take(EVERYONE, 1)
        places.note()
        await leave_task()
        await limiter.enter("a", 1)
        await budget.take(EVERYONE, 1)
        places.note()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(InlineCoroutine(serve()).run)
        await trio.testing.wait_all_tasks_blocked()
        limiter.leave(BODY_WINDOW_BYTES)
        await trio.testing.wait_all_tasks_blocked()
        budget.give(EVERYONE, 100)
    assert places.seen == ["inline", "task", "inline"]
    assert limiter.in_flight == 2 and budget.bytes_used == 2


async def test_work_for_the_end_of_a_loop_runs_once_after_the_last_coroutine() -> None:
    steps: list[str] = []

    def flush() -> None:
        steps.append("flushed")

    assert not resume_loop.call_at_end(flush), "there is no loop"
    with resume_loop:
        for number in range(2):
            assert resume_loop.call_at_end(flush)
            steps.append(f"resumed {number}")
    assert steps == ["resumed 0", "resumed 1", "flushed"]
    assert not resume_loop.call_at_end(flush)
