"""Sorted listings (§26): one ordering for all pages, taken in steps, kept for a while."""

from __future__ import annotations

import pytest

from shard.core.boxes import box_ordering
from shard.core.boxes.box_ordering import KEPT_MAX, KEPT_MS, STEP_BOXES
from streams.protocol.messages import commands
from streams.protocol.messages.queues import CommitGroup
from tests.support.machines import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()


def listed(driver: Driver, **fields: object) -> commands.ListBoxesResult:
    fields.setdefault("listing", "l")
    page = driver.ask(commands.ListSortedBoxes(**fields))  # type: ignore[arg-type]
    assert isinstance(page, commands.ListBoxesResult)
    return page


def names(page: commands.ListBoxesResult) -> list[str]:
    return [box.box for box in page.boxes]


def test_boxes_are_sorted_by_each_number_and_equal_ones_by_name(driver: Driver) -> None:
    """§26"""
    for box, count in (("a", 1), ("b", 3), ("c", 1), ("d", 2)):
        driver.append(*range(count), box=box)
    driver.now_ms += 5
    driver.append("x" * 100, box="c")
    assert names(listed(driver, listing="1", sort="count", is_descending=True)) == ["b", "c", "d", "a"]
    assert names(listed(driver, listing="2", sort="count")) == ["a", "c", "d", "b"]
    assert names(listed(driver, listing="3", sort="bytes", is_descending=True))[0] == "c"
    assert names(listed(driver, listing="4", sort="last_write", is_descending=True))[0] == "c"
    assert names(listed(driver, listing="5", is_descending=True)) == ["d", "c", "b", "a"]


def test_the_fullest_queue_and_the_slowest_reader_come_first(driver: Driver) -> None:
    """§26"""
    driver.put(type="queue", box="jobs")
    driver.append(1, 2, box="jobs")
    driver.append(1, 2, 3, box="log")
    driver.ask(CommitGroup("log", "g", 1))
    by_ready = listed(driver, listing="1", sort="ready", is_descending=True)
    assert by_ready.boxes[0].box == "jobs" and by_ready.boxes[0].queue is not None
    by_lag = listed(driver, listing="2", sort="lag", is_descending=True)
    assert (by_lag.boxes[0].box, by_lag.boxes[0].lag) == ("log", 2)


def test_filters_apply_before_the_count(driver: Driver) -> None:
    """§26"""
    driver.put(type="queue", box="p.jobs")
    for box in ("p.log", "q.log", "q.other"):
        driver.append(1, box=box)
    assert listed(driver, listing="1", text="log").total == 2
    assert names(listed(driver, listing="2", kind="queue")) == ["p.jobs"]
    assert names(listed(driver, listing="3", prefixes=("q.",), text="oth")) == ["q.other"]
    assert names(listed(driver, listing="4", prefixes=("p.", "q.o"))) == ["p.jobs", "p.log", "q.other"]
    assert listed(driver, listing="5", durability="memory").total == 0


def test_pages_follow_the_ordering_of_the_first_page_and_skip_deleted_boxes(driver: Driver) -> None:
    """§26"""
    for at in range(10):
        driver.append(*range(at + 1), box=f"b{at}")
    first = listed(driver, sort="count", is_descending=True, limit=3)
    assert names(first) == ["b9", "b8", "b7"] and first.more
    driver.append(*range(50), box="b0")
    driver.ask(commands.DeleteBox("b6"))
    rest = listed(driver, sort="count", is_descending=True, limit=100, offset=first.offsets[-1])
    assert names(rest) == ["b5", "b4", "b3", "b2", "b1", "b0"] and not rest.more
    assert rest.keys == sorted(rest.keys)


def test_an_ordering_that_was_dropped_or_has_another_filter_is_unknown(driver: Driver) -> None:
    """§26"""
    driver.append(1, box="a")
    driver.append(1, box="b")
    listed(driver, sort="count", limit=1)
    assert listed(driver, sort="bytes", limit=1, offset=1).is_unknown
    assert not listed(driver, sort="count", limit=1, offset=1).is_unknown
    driver.now_ms += KEPT_MS + 1
    listed(driver, listing="other", sort="count")
    assert listed(driver, sort="count", limit=1, offset=1).is_unknown
    for at in range(KEPT_MAX + 1):
        listed(driver, listing=f"n{at}", sort="count")
    assert listed(driver, listing="n0", sort="count", offset=1).is_unknown
    assert not listed(driver, listing="n1", sort="count", offset=1).is_unknown


def test_the_names_of_all_orderings_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_ordering, "NAMES_MAX", 3)
    for box in ("a", "b"):
        driver.append(1, box=box)
    for listing in ("1", "2", "3"):
        listed(driver, listing=listing, sort="count")
    assert listed(driver, listing="1", sort="count", offset=1).is_unknown
    assert not listed(driver, listing="3", sort="count", offset=1).is_unknown


def test_an_ordering_is_taken_in_steps(driver: Driver) -> None:
    """§26: no turn of the shard walks all boxes."""
    many = 2 * STEP_BOXES + 1
    for at in range(many):
        driver.machine.handle(commands.PutBox(f"b{at:05d}", commands.BoxPatch()), driver.now_ms)
    command = commands.ListSortedBoxes(listing="l", sort="count", is_descending=True, limit=2)
    steps = 0
    while driver.machine.handle(command, driver.now_ms).needs:
        steps += 1
    assert steps == 3
    outcome = driver.machine.handle(command, driver.now_ms)
    assert isinstance(outcome.reply, commands.ListBoxesResult) and outcome.reply.total == many
    assert names(outcome.reply) == ["b00000", "b00001"]


def test_boxes_are_sorted_by_rate(driver: Driver) -> None:
    """§26"""
    for box in ("a", "b"):
        driver.append(1, box=box)
    listed(driver, listing="1", sort="rate", is_descending=True)
    driver.now_ms += 10_000
    driver.append(*range(20), box="b")
    page = listed(driver, listing="2", sort="rate", is_descending=True)
    assert names(page) == ["b", "a"] and page.boxes[0].rate == 2.0
    assert listed(driver, listing="3", sort="rate", is_descending=True).boxes[0].rate == 2.0
    driver.now_ms += 100_000
    assert listed(driver, listing="4", sort="name").boxes[1].rate == 0.0, "an old window says nothing"
