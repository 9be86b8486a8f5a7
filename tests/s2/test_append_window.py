"""Goal: appends that are on their way have a bound, are let in in the order of coming, and lose no permit,
whatever happens to waiting sessions."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from gateway.s2.append_window import AppendWindow


async def enter(window: AppendWindow, size: int, entered: list[int]) -> None:
    await window.enter(size)
    entered.append(size)


async def test_a_large_batch_is_not_passed_by_small_ones() -> None:
    window, entered = AppendWindow(10), list[int]()
    await window.enter(6)
    async with trio.open_nursery() as nursery:
        for size in (8, 1, 2):
            nursery.start_soon(enter, window, size, entered)
            await wait_all_tasks_blocked()
        assert entered == []
        window.leave(6)
        await wait_all_tasks_blocked()
        assert sorted(entered) == [1, 8]  # both in the same moment
        window.leave(8)
    assert sorted(entered) == [1, 2, 8]
    assert sum(window.report().permit.counts) == 4


async def test_who_gives_up_waiting_stands_in_nobodys_way() -> None:
    window, entered = AppendWindow(10), list[int]()
    await window.enter(6)
    async with trio.open_nursery() as nursery:
        large = trio.CancelScope()

        async def give_up() -> None:
            with large:
                await window.enter(8)

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        nursery.start_soon(enter, window, 4, entered)
        await wait_all_tasks_blocked()
        assert entered == []
        large.cancel()
    assert entered == [4]


async def test_a_permit_that_comes_too_late_is_given_back() -> None:
    window, entered = AppendWindow(10), list[int]()
    await window.enter(10)
    async with trio.open_nursery() as nursery:
        late = trio.CancelScope()

        async def give_up() -> None:
            with late:
                await enter(window, 10, entered)

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        late.cancel()
        window.leave(10)  # lets it in, but it is on its way out already
    assert entered == []
    with trio.fail_after(60):
        await window.enter(10)
