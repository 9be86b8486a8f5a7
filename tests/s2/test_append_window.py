"""Goal: appends that are on their way have a bound, are let in in the order of coming, and lose no permit,
whatever becomes of who waits."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from gateway.s2.append_window import AppendWindow


async def enter(inflight: AppendWindow, size: int, entered: list[int]) -> None:
    await inflight.enter(size)
    entered.append(size)


async def test_a_large_batch_is_not_passed_by_small_ones() -> None:
    inflight, entered = AppendWindow(10), list[int]()
    await inflight.enter(6)
    async with trio.open_nursery() as nursery:
        for size in (8, 1, 2):
            nursery.start_soon(enter, inflight, size, entered)
            await wait_all_tasks_blocked()
        assert entered == []
        inflight.leave(6)
        await wait_all_tasks_blocked()
        assert sorted(entered) == [1, 8]  # both in the same moment
        inflight.leave(8)
    assert sorted(entered) == [1, 2, 8]
    assert sum(inflight.report().permit.counts) == 4


async def test_who_gives_up_waiting_stands_in_nobodys_way() -> None:
    inflight, entered = AppendWindow(10), list[int]()
    await inflight.enter(6)
    async with trio.open_nursery() as nursery:
        large = trio.CancelScope()

        async def give_up() -> None:
            with large:
                await inflight.enter(8)

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        nursery.start_soon(enter, inflight, 4, entered)
        await wait_all_tasks_blocked()
        assert entered == []
        large.cancel()
    assert entered == [4]


async def test_a_permit_that_comes_too_late_is_given_back() -> None:
    inflight, entered = AppendWindow(10), list[int]()
    await inflight.enter(10)
    async with trio.open_nursery() as nursery:
        late = trio.CancelScope()

        async def give_up() -> None:
            with late:
                await enter(inflight, 10, entered)

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        late.cancel()
        inflight.leave(10)  # lets it in, but it is on its way out already
    assert entered == []
    with trio.fail_after(60):
        await inflight.enter(10)
