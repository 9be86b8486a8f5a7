"""Memory budgets: no owner can take all, and a stalled client gives way (`gateway/admission/memory.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from gateway.admission.memory import (
    EVERYONE,
    PROGRESS_BYTES,
    STALLED_S,
    STRANGERS,
    Charge,
    MemoryBudget,
    answer_budget,
)
from gateway.api.long_polls import page_bytes_max
from gateway.requests.queued_sink import QueuedSink
from gateway.requests.unsent_charge import SharedCharge, UnsentCharge
from streams.protocol import wire
from streams.protocol.errors import Throttled


def budget_of(bytes_max: int) -> MemoryBudget:
    return MemoryBudget(bytes_max, limit="body_bytes_in_flight", what="the bodies of requests")


@pytest.fixture
def kept() -> list[Charge]:
    """Keeps charges: one that nobody has any more gives its bytes back."""
    return []


def most_of(budget: MemoryBudget, owner: str, kept: list[Charge], step: int = 1) -> int:
    """Takes all that an owner can get."""
    charge = budget.open(owner)
    while charge.try_grow(step):
        pass
    kept.append(charge)
    return charge.size


def hold(budget: MemoryBudget, owner: str, size: int, kept: list[Charge]) -> None:
    charge = budget.open(owner)
    charge.grow(size)
    kept.append(charge)


async def test_n_greedy_keys_leave_room_for_one_more(kept):
    budget = budget_of(1200)
    assert most_of(budget, "one", kept) == 600
    assert most_of(budget, "two", kept) == 300
    assert most_of(budget, "three", kept) == 150
    assert most_of(budget, "four", kept) > 0
    assert most_of(budget, "one", kept) == 0


async def test_an_owner_gets_its_room_back_when_another_gives_its_own():
    budget = budget_of(1200)
    first, second = budget.open("one"), budget.open("two")
    first.grow(600)
    second.grow(300)
    with pytest.raises(Throttled) as caught:
        second.grow(300)
    assert caught.value.detail == {"limit": "body_bytes_in_flight"}
    assert budget.refusal_counts == {"key": 1, "stranger": 0, "everyone": 0}
    first.close()
    first.close()  # does nothing
    second.grow(300)
    assert (budget.bytes_used, second.size) == (600, 600)


async def test_clients_without_a_key_share_a_sixteenth_and_an_open_server_is_one_owner(kept):
    budget = budget_of(1600)
    assert most_of(budget, STRANGERS, kept) == 100
    assert most_of(budget_of(1600), EVERYONE, kept) == 1600


async def test_bytes_that_change_their_owner_count_for_the_new_one(kept):
    budget = budget_of(1600)
    charge = budget.open(STRANGERS)
    charge.grow(100)
    charge.assign("one")
    assert (budget.held_by(STRANGERS), budget.held_by("one")) == (0, 100)
    assert most_of(budget, "two", kept, 10) == 750
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


async def test_stalled_clients_are_ended_oldest_first_and_only_when_there_is_no_room(kept, autojump_clock):
    budget, ended = budget_of(1000), []
    charges = [watched(budget, EVERYONE, 300, ended) for _ in range(3)]
    await trio.sleep(STALLED_S)
    charges[0].note_progress(PROGRESS_BYTES)
    hold(budget, EVERYONE, 100, kept)
    assert not ended
    hold(budget, EVERYONE, 200, kept)
    assert ended == [charges[1]] and charges[1].is_ended
    assert budget.stall_counts == {"key": 0, "stranger": 0, "everyone": 1}
    with pytest.raises(Throttled, match="stalled"):
        charges[1].grow(1)
    with pytest.raises(Throttled):  # what has moved is not stalled
        hold(budget, EVERYONE, 900, kept)
    assert ended == [charges[1], charges[2]]


async def test_a_stalled_client_of_a_small_owner_does_not_give_way_to_a_large_one(kept, autojump_clock):
    budget, ended = budget_of(1000), []
    small = watched(budget, "small", 100, ended)
    large = watched(budget, "large", 400, ended)
    await trio.sleep(STALLED_S)
    hold(budget, "large", 400, kept)
    assert ended == [large]
    with pytest.raises(Throttled):
        hold(budget, "large", 400, kept)
    assert not small.is_ended
    large = watched(budget, "large", 50, ended)
    await trio.sleep(STALLED_S)
    hold(budget, "other", 240, kept)
    assert ended[-1] is large and not small.is_ended


# Answers: tasks wait for room.


@pytest.fixture
async def answers(autojump_clock) -> AsyncIterator[MemoryBudget]:
    budget = answer_budget(1_000_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.run)
        yield budget
        nursery.cancel_scope.cancel()


async def test_a_page_waits_for_room_and_owners_take_turns(answers: MemoryBudget):
    came: list[str] = []

    async def ask(owner: str) -> None:
        await answers.take(owner, 300_000)
        came.append(owner)

    async with trio.open_nursery() as nursery:
        await answers.take("one", 300_000)
        await answers.take("two", 300_000)
        for owner in ("one", "one", "two", "three"):
            nursery.start_soon(ask, owner)
            await trio.testing.wait_all_tasks_blocked()
        assert came == []
        for _ in range(4):
            answers.give(next(owner for owner in ("one", "two") if answers.held_by(owner)), 300_000)
            await trio.testing.wait_all_tasks_blocked()
    assert came[:3] != ["one", "one", "two"] and sorted(came) == ["one", "one", "three", "two"]


async def test_a_page_that_finds_no_room_in_time_is_refused_and_leaves_nothing_behind(answers: MemoryBudget):
    await answers.take(EVERYONE, 900_000)
    with pytest.raises(Throttled) as caught:
        await answers.take(EVERYONE, 200_000)
    assert caught.value.detail == {"limit": "answer_bytes"} and answers.bytes_used == 900_000
    answers.give(EVERYONE, 900_000)
    await answers.take(EVERYONE, 1_000_000)


async def test_a_client_that_does_not_read_gives_way_to_one_that_waits(answers: MemoryBudget):
    ended: list[Charge] = []
    held = watched(answers, EVERYONE, 900_000, ended)
    await answers.take(EVERYONE, 200_000)
    assert ended == [held] and answers.bytes_used == 200_000


async def test_a_small_answer_is_not_charged_and_a_large_one_by_its_size(answers: MemoryBudget):
    await answers.take(EVERYONE, 500_000)
    assert answers.charge(EVERYONE, 500_000, 1000) is None and answers.bytes_used == 0
    await answers.take(EVERYONE, 500_000)
    charge = answers.charge(EVERYONE, 500_000, 20_000)
    assert charge is not None and answers.bytes_used == 20_000
    charge.close()


async def test_answers_that_nobody_asked_room_for_stop_the_shards_until_they_are_read(answers: MemoryBudget):
    told: list[bool] = []
    answers.on_full = told.append
    ended: list[Charge] = []
    reading = answers.charge("one", 0, 700_000)
    assert reading is not None and told == []
    stalled = answers.charge("two", 0, 400_000)
    assert stalled is not None and told == [True]
    stalled.watch(lambda: ended.append(stalled))
    await trio.sleep(STALLED_S + 1)
    assert ended == [stalled] and told == [True, False]


async def test_bytes_that_many_clients_share_are_charged_once_until_the_last_has_them(answers: MemoryBudget):
    sinks = [QueuedSink() for _ in range(3)]
    unread = [UnsentCharge(answers, EVERYONE, sink) for sink in sinks]
    shared: SharedCharge | None = None
    for sink, each in zip(sinks, unread, strict=True):
        sink.put(bytes(100_000))
        shared = each.share(shared, 100_000)
    assert answers.bytes_used == 100_000
    async with trio.open_nursery() as nursery:
        for sink, each in zip(sinks, unread, strict=True):
            assert answers.bytes_used == 100_000
            nursery.start_soon(each.wait_sent, 10)
            await trio.testing.wait_all_tasks_blocked()
            sink.note_sent(100_000)
            await trio.testing.wait_all_tasks_blocked()
    assert answers.bytes_used == 0


async def test_what_a_page_can_bring_is_read_off_its_question():
    for body, most in [
        (b"", 1 << 20),
        (b'{"max_bytes":0}', 1 << 20),
        (b'{"max_bytes": 5000}', 5000),
        (b'{"max_bytes":5000,"max_bytes" : 6000}', 6000),
        (b'{"max\\u005fbytes":8000000}', 8 << 20),
        (b'{"max_bytes":99999999999}', 8 << 20),
    ]:
        assert page_bytes_max(wire.OP_DIFF, body) == most
    assert page_bytes_max(wire.OP_CLAIM, b'{"node":"a"}') == 1 << 20
    assert page_bytes_max(wire.OP_CLAIM, b'{"node":"a","max":100}') == 8 << 20
