"""A fair queue gives each owner the same share of the cost, whatever and however much each of them queues.

Method: the queue is driven by hand, and in random order by Hypothesis.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_queue import _TAGS_MAX, FairQueue


def filled(*lines: tuple[str, int, float]) -> FairQueue[tuple[str, int]]:
    """A queue with so many items of a cost of each owner, those of the first owner first."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for owner, count, cost in lines:
        for number in range(count):
            queue.push(owner, (owner, number), cost)
    return queue


def test_an_owner_with_one_item_does_not_wait_for_a_thousand_of_another() -> None:
    queue = filled(("many", 1000, 1.0), ("one", 1, 1.0))
    assert ("one", 0) in [queue.pop() for _ in range(2)]


def test_items_of_one_owner_leave_in_the_order_of_arrival() -> None:
    queue = filled(("a", 5, 3.0), ("b", 5, 1.0))
    popped = [queue.pop() for _ in range(10)]
    for owner in "ab":
        assert [number for each, number in popped if each == owner] == list(range(5))


def test_an_owner_of_large_items_gets_fewer_of_them() -> None:
    queue = filled(("pages", 100, 8.0), ("small", 800, 1.0))
    popped = Counter(queue.pop()[0] for _ in range(450))
    assert abs(8 * popped["pages"] - popped["small"]) <= 8


def test_an_owner_that_was_away_has_saved_up_nothing() -> None:
    queue = filled(("busy", 500, 1.0))
    for _ in range(400):
        queue.pop()
    for number in range(100):
        queue.push("back", ("back", number), 1.0)
    popped = Counter(queue.pop()[0] for _ in range(100))
    assert abs(popped["busy"] - popped["back"]) <= 1


def test_an_owner_gains_nothing_by_leaving_and_coming_back() -> None:
    """It queues one item at a time, the other one has a long line."""
    queue = filled(("line", 300, 1.0))
    popped: Counter[str] = Counter()
    for number in range(200):
        if not any(owner == "single" for owner in queue._items):
            queue.push("single", ("single", number), 3.0)
        popped[queue.pop()[0]] += 1
    assert abs(3 * popped["single"] - popped["line"]) <= 4


def test_what_is_remembered_of_owners_that_are_gone_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(3 * _TAGS_MAX):
        queue.push(f"owner-{number}", number, 1e9)
        assert queue.pop() == number
        assert len(queue._tags) <= _TAGS_MAX + 1


@given(st.data())
def test_every_item_leaves_once_and_no_owner_is_ahead_by_more_than_an_item(data: st.DataObject) -> None:
    queue: FairQueue[int] = FairQueue()
    costs: dict[int, tuple[str, int]] = {}
    waiting: dict[str, list[int]] = {}
    #: Cost served to each owner since all of them have waited without a break.
    served: Counter[str] = Counter()
    number = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(("push", "push", "pop", "remove")))
        owners = sorted(owner for owner, items in waiting.items() if items)
        if action == "push" or not owners:
            owner = data.draw(st.sampled_from("abc"))
            number += 1
            costs[number] = (owner, data.draw(st.integers(1, 10)))
            if not waiting.get(owner):
                served.clear()  # one more shares from here on
            waiting.setdefault(owner, []).append(number)
            queue.push(owner, number, costs[number][1])
        elif action == "pop":
            expected = queue.peek()
            item = queue.pop()
            assert item == expected
            owner, cost = costs[item]
            assert waiting[owner].pop(0) == item, "first come, first served"
            served[owner] += cost
            rivals = [each for each in owners if waiting[each] or each == owner]
            assert all(served[owner] - cost <= served[each] + 10 + 10 for each in rivals)
        else:
            owner = data.draw(st.sampled_from(owners))
            item = data.draw(st.sampled_from(waiting[owner]))
            waiting[owner].remove(item)
            queue.remove(owner, item)
            served.clear()
        assert len(queue) == sum(map(len, waiting.values()))
    left = [queue.pop() for _ in range(len(queue))]
    assert sorted(left) == sorted(item for items in waiting.values() for item in items)
