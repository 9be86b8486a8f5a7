"""Memory budgets: no owner can take all, and a stalled client gives way (`gateway/memory.py`)."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gateway.memory import EVERYONE, PROGRESS_BYTES, STALLED_S, STRANGERS, Charge, MemoryBudget
from streams.protocol.errors import Throttled


def budget_of(bytes_max: int) -> MemoryBudget:
    return MemoryBudget(bytes_max, limit="body_bytes_in_flight", what="the bodies of requests")


def most_of(budget: MemoryBudget, owner: str, step: int = 1) -> int:
    """Takes all that an owner can get."""
    charge = budget.open(owner)
    while charge.try_grow(step):
        pass
    return charge.size


async def test_n_greedy_keys_leave_room_for_one_more():
    budget = budget_of(1200)
    assert most_of(budget, "one") == 600
    assert most_of(budget, "two") == 300
    assert most_of(budget, "three") == 150
    assert most_of(budget, "four") > 0
    assert most_of(budget, "one") == 0


async def test_an_owner_gets_its_room_back_when_another_gives_its_own():
    budget = budget_of(1200)
    first, second = budget.open("one"), budget.open("two")
    first.grow(600)
    second.grow(300)
    with pytest.raises(Throttled) as caught:
        second.grow(300)
    assert caught.value.detail == {"limit": "body_bytes_in_flight"}
    assert budget.refused == {"key": 1, "stranger": 0, "everyone": 0}
    first.close()
    first.close()  # does nothing
    second.grow(300)
    assert (budget.bytes_used, second.size) == (600, 600)


async def test_clients_without_a_key_share_a_sixteenth_and_an_open_server_is_one_owner():
    budget = budget_of(1600)
    assert most_of(budget, STRANGERS) == 100
    assert most_of(budget_of(1600), EVERYONE) == 1600


async def test_bytes_that_change_their_owner_count_for_the_new_one():
    budget = budget_of(1600)
    charge = budget.open(STRANGERS)
    charge.grow(100)
    charge.assign("one")
    assert (budget.held_by(STRANGERS), budget.held_by("one")) == (0, 100)
    assert most_of(budget, "two", 10) == 750
    second = budget.open(STRANGERS)
    second.grow(100)
    with pytest.raises(Throttled):
        second.assign("two")
    assert second.size == 0


def watched(budget: MemoryBudget, owner: str, size: int, ended: list[Charge]) -> Charge:
    charge = budget.open(owner)
    charge.grow(size)
    charge.watch(lambda: ended.append(charge))
    return charge


async def test_stalled_clients_are_ended_oldest_first_and_only_when_there_is_no_room(autojump_clock):
    budget, ended = budget_of(1000), []
    charges = [watched(budget, EVERYONE, 300, ended) for _ in range(3)]
    await trio.sleep(STALLED_S)
    charges[0].moved(PROGRESS_BYTES)
    budget.open(EVERYONE).grow(100)
    assert not ended
    budget.open(EVERYONE).grow(200)
    assert ended == [charges[1]] and charges[1].is_ended
    assert budget.stalled == {"key": 0, "stranger": 0, "everyone": 1}
    with pytest.raises(Throttled, match="stalled"):
        charges[1].grow(1)
    with pytest.raises(Throttled):  # what has moved is not stalled
        budget.open(EVERYONE).grow(900)
    assert ended == [charges[1], charges[2]]


async def test_a_stalled_client_of_a_small_owner_does_not_give_way_to_a_large_one(autojump_clock):
    budget, ended = budget_of(1000), []
    small = watched(budget, "small", 100, ended)
    large = watched(budget, "large", 400, ended)
    await trio.sleep(STALLED_S)
    budget.open("large").grow(400)
    assert ended == [large]
    with pytest.raises(Throttled):
        budget.open("large").grow(400)
    assert not small.is_ended
    large = watched(budget, "large", 50, ended)
    await trio.sleep(STALLED_S)
    budget.open("other").grow(240)
    assert ended[-1] is large and not small.is_ended
