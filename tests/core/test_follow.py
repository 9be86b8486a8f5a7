"""Goal: somebody who stays gets the next page as soon as there is one, and a strong reader nothing that could
still vanish (§7)."""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.machine import Outcome
from shard.core.watch.watch_pages import durable_seq
from streams.protocol.errors import BoxNotFound, InvalidRequest
from streams.protocol.messages import commands, requests
from streams.protocol.messages.commands import Follow, FollowResult
from streams.protocol.payloads.appends import RecordLimits
from streams.protocol.wire import OP_FOLLOW, FollowHead, head_encoder
from tests.support.machines import Driver, seqs_of

WAIT_MS = 1_000


@pytest.fixture
def driver() -> Driver:
    return Driver()


def follow(driver: Driver, from_seq: int = 0, **options: Any) -> Outcome:
    return driver.do(Follow(box="b", from_seq=from_seq, wait_ms=WAIT_MS, **options))


def shown(outcome: Outcome) -> list[int]:
    assert isinstance(outcome.reply, FollowResult)
    return seqs_of(outcome.reply)


def test_a_reader_at_the_head_waits_and_one_behind_it_is_answered(driver: Driver) -> None:
    driver.append(1, 2)
    assert follow(driver, 2).reply is None
    assert shown(follow(driver, 1)) == [2]
    driver.append(3)
    assert shown(follow(driver, 2)) == [3]


def test_a_cursor_that_passes_over_hidden_records_is_told_so(driver: Driver) -> None:
    """So that the feed moves on and does not look at them again each time."""
    driver.append(1, node="me")
    outcome = follow(driver, nodes=frozenset({"me"}))
    assert isinstance(outcome.reply, FollowResult)
    assert (outcome.reply.records, outcome.reply.next_from_seq) == (b"", 1)
    assert follow(driver, 1, nodes=frozenset({"me"})).reply is None


def test_without_a_wait_there_is_always_an_answer(driver: Driver) -> None:
    driver.append(1)
    reply = driver.ask(Follow(box="b", from_seq=1))
    assert (reply.records, reply.next_from_seq, reply.head_seq) == (b"", 1, 1)


def test_a_reader_of_another_life_is_told(driver: Driver) -> None:
    driver.append(1, 2)
    generation = driver.machine.boxes["b"].generation
    driver.ask(commands.DeleteBox("b"))
    with pytest.raises(BoxNotFound):
        driver.ask(Follow(box="b", from_seq=1, generation=generation, wait_ms=WAIT_MS))
    assert follow(driver, 1, generation=generation, awaits_box=True).reply is None
    driver.append("new", "er")
    outcome = follow(driver, 1, generation=generation, awaits_box=True)
    assert isinstance(outcome.reply, FollowResult) and outcome.reply.tombstone is not None
    assert (outcome.reply.tombstone.reason, shown(outcome)) == ("recreated", [1, 2])


def test_a_missing_box_is_told_when_the_wait_is_over(driver: Driver) -> None:
    with pytest.raises(BoxNotFound):
        driver.ask(Follow(box="b", awaits_box=True))


def test_deleting_a_box_wakes_those_who_follow_it(driver: Driver) -> None:
    driver.append(1)
    assert driver.do(commands.DeleteBox("b")).wakes == ("b",)


def test_following_counts_as_consuming_only_when_something_is_delivered(driver: Driver) -> None:
    """§9"""
    driver.append(1)
    driver.now_ms += 50
    follow(driver, 1)
    assert driver.state().last_read_ts is None
    follow(driver, 0)
    assert driver.state().last_read_ts == driver.now_ms


# -- strong


def test_a_strong_reader_of_a_disk_box_sees_what_is_on_the_disk(driver: Driver) -> None:
    """§7.1: strong is only what is fsynced, where others see what is written."""
    driver.append(1)
    lsns = []
    for number in (2, 3):
        driver.do(driver.write(number))
        driver.logged()
        lsns.append(driver.machine.lsn)
    assert shown(follow(driver)) == [1, 2, 3]
    assert shown(follow(driver, strong=True)) == [1]
    assert follow(driver, 1, strong=True).reply is None
    driver.sync(lsns[0])
    assert shown(follow(driver, 1, strong=True)) == [2]
    driver.sync()
    assert shown(follow(driver, 1, strong=True)) == [2, 3]


def test_a_strong_reader_who_has_seen_more_waits_for_the_disk(driver: Driver) -> None:
    driver.append(1)
    driver.do(driver.write(2))
    driver.logged()
    generation = driver.machine.boxes["b"].generation
    assert follow(driver, 2, strong=True).reply is None
    assert follow(driver, 2, strong=True, generation=generation).reply is None
    reply = driver.do(Follow(box="b", from_seq=2, strong=True)).reply
    assert isinstance(reply, FollowResult)
    assert (reply.records, reply.next_from_seq, reply.head_seq, reply.tombstone) == (b"", 2, 1, None)
    other = follow(driver, 2, strong=True, generation=generation + 1).reply
    assert isinstance(other, FollowResult) and other.tombstone is not None


def test_a_strong_page_that_rests_on_an_eviction_waits_for_the_disk(driver: Driver) -> None:
    driver.put(cap_records=2)
    driver.append(1, 2)
    driver.do(driver.write(3))
    driver.logged()
    outcome = follow(driver, strong=True)
    assert (outcome.waits_for_lsn, outcome.until_durable) == (driver.machine.lsn, True)
    driver.sync()
    assert follow(driver, strong=True).waits_for_lsn == 0


def test_a_memory_box_has_no_strong_readers(driver: Driver) -> None:
    driver.put(durability="memory")
    with pytest.raises(InvalidRequest) as refused:
        driver.ask(Follow(box="b", strong=True))
    assert refused.value.detail["field"] == "consistency"


def test_batches_that_were_deleted_do_not_hide_what_is_on_the_disk(driver: Driver) -> None:
    driver.append(1)
    driver.append(2)
    driver.append({"data": 3, "tag": "x"})
    driver.delete(tag="x")
    driver.do(driver.write(4))
    driver.logged()
    assert durable_seq(driver.machine.boxes["b"], driver.machine.durable_lsn) == 3
    driver.delete(before_seq=5)
    driver.sync()
    assert durable_seq(driver.machine.boxes["b"], driver.machine.durable_lsn) == 4


# -- on the wire


def test_a_follow_travels_whole() -> None:
    head = FollowHead("b", 7, 8, 9, 10, ("n",), True, False, False, 11, True, True)
    command = requests.decode_command(OP_FOLLOW, head_encoder.encode(head), b"", RecordLimits())
    assert command == Follow(
        box="b",
        from_seq=7,
        generation=8,
        limit=9,
        max_bytes=10,
        nodes=frozenset({"n"}),
        include_tags=True,
        include_meta=False,
        include_data=False,
        wait_ms=11,
        strong=True,
        awaits_box=True,
    )


@pytest.mark.parametrize("head", [b"", b"\xc1", head_encoder.encode(["no/box"]), head_encoder.encode([1])])
def test_a_broken_follow_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidRequest):
        requests.decode_command(OP_FOLLOW, head, b"", RecordLimits())
