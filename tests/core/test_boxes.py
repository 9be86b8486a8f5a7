"""Goal: boxes are created, changed, listed and deleted as asked; each life of a name has its number (§2)."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from shard.core.snapshot_facts import BoxFacts
from streams.protocol.errors import BoxExistsIncompatible, BoxNotEmpty, InvalidRequest
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Match, Tombstone
from streams.protocol.messages.replies import QueueTotals
from tests.support.machines import Driver, patch


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_put_creates_then_merges(driver: Driver) -> None:
    assert driver.put(cap_records=5).created
    changed = driver.put(ttl_ms=7)
    assert not changed.created
    assert (changed.config.cap_records, changed.config.ttl_ms) == (5, 7)


def test_a_put_that_changes_nothing_logs_nothing(driver: Driver) -> None:
    driver.put(cap_records=5)
    outcome = driver.do(commands.PutBox("b", patch(cap_records=5)))
    assert outcome.changes == [] and outcome.waits_for_lsn == 0


def test_a_box_cannot_become_something_else(driver: Driver) -> None:
    driver.put()
    with pytest.raises(BoxExistsIncompatible):
        driver.put(type="queue")
    with pytest.raises(InvalidRequest):
        driver.put(dead_letter="b")


def test_tightening_a_cap_or_ttl_is_an_eviction_of_what_is_stored(driver: Driver) -> None:
    driver.append(1, 2, 3, 4)
    driver.put(cap_records=3)
    assert driver.read().tombstone == Tombstone(1, 1, "cap", 1, 2, 4)
    driver.now_ms += 10
    driver.append(5)
    driver.put(ttl_ms=5)
    assert driver.read().tombstone == Tombstone(1, 4, "mixed", 4, 5, 5)
    driver.put(cap_bytes=1)
    assert driver.read(4).tombstone == Tombstone(5, 5, "cap", 1, 6, 5)


def test_what_has_expired_stays_expired_when_the_ttl_is_raised(driver: Driver) -> None:
    """Failed before: records that nobody had looked at since they expired came back to life."""
    driver.put(ttl_ms=10)
    driver.append(1)
    driver.now_ms += 11
    driver.put(ttl_ms=0)
    assert driver.read().tombstone == Tombstone(1, 1, "ttl", 1, 2, 1)


def test_a_state_is_exact(driver: Driver) -> None:
    driver.put()
    empty = driver.state()
    assert (empty.head_seq, empty.earliest_seq, empty.next_seq, empty.count, empty.bytes) == (0, 1, 1, 0, 0)
    assert (empty.last_write_ts, empty.last_read_ts, empty.type, empty.queue) == (None, None, "log", None)
    driver.append("é", 2)
    driver.delete(2)
    state = driver.state()
    assert (state.head_seq, state.earliest_seq, state.next_seq, state.count) == (2, 2, 3, 1)
    assert state.bytes == len(b'{"$seq":2,"$ts":1000,"data":2}')
    assert state.last_write_ts == 1000


def test_looking_touches_the_box_unless_told_not_to(driver: Driver) -> None:
    driver.put()
    assert driver.ask(commands.GetState("b", False)).last_read_ts is None
    assert driver.ask(commands.GetState("b", True)).last_read_ts == 1000
    driver.now_ms += 5
    driver.read()
    assert driver.ask(commands.GetState("b", False)).last_read_ts == 1005


def test_priority_is_given_or_follows_how_recently_the_box_was_read(driver: Driver) -> None:
    driver.put()
    assert driver.state().effective_priority == 0.0
    driver.read()
    assert driver.state().effective_priority == 500.0
    driver.now_ms += 30_000
    assert driver.state().effective_priority == 250.0
    driver.now_ms += 270_000
    assert driver.state().effective_priority == 0.0
    driver.now_ms = 0
    assert driver.state().effective_priority == 500.0, "a clock that goes back counts as just now"
    driver.put(auto_priority=False)
    assert driver.state().effective_priority == 0.0
    driver.put(priority=-7)
    assert driver.state().effective_priority == -7.0


def test_a_queue_says_how_much_is_ready(driver: Driver) -> None:
    driver.put(type="queue")
    driver.append(1, 2)
    assert driver.state().queue == QueueTotals(2, 0, 0, 0)


def test_boxes_are_listed_by_name_page_by_page(driver: Driver) -> None:
    for box in ("b", "a", "c", "ab"):
        driver.append(1, box=box)
    page = driver.ask(commands.ListBoxes("", "", 3))
    assert ([box.box for box in page.boxes], page.more) == (["a", "ab", "b"], True)
    rest = driver.ask(commands.ListBoxes("", "b", 3))
    assert ([box.box for box in rest.boxes], rest.more) == (["c"], False)
    some = driver.ask(commands.ListBoxes("a", "", 100))
    assert [box.box for box in some.boxes] == ["a", "ab"]
    assert msgspec.structs.asdict(some.boxes[0]) == {
        "box": "a",
        "type": "log",
        "head_seq": 1,
        "earliest_seq": 1,
        "count": 1,
        "bytes": len(b'{"$seq":1,"$ts":1000,"data":1}'),
        "durable": False,
        "durability": "disk",
        "effective_priority": 0.0,
        "last_write_ts": 1000,
        "lag": 0,
        "rate": 0.0,
        "queue": None,
    }


def test_deleting_a_box_takes_everything_and_seqs_restart(driver: Driver) -> None:
    driver.append({"data": 1, "tag": "t"}, idempotency_key="k")
    driver.ask(commands.SetFence("b", "t"))
    assert driver.ask(commands.DeleteBox("b")) == commands.DeleteBoxReply("b", True, [], [])
    assert driver.ask(commands.DeleteBox("b")) == commands.DeleteBoxReply("b", False, [], [])
    again = driver.append(1, idempotency_key="k")
    assert again.created and again.first_seq == 1
    assert driver.ask(commands.DeleteRecords("b", None, Match("t"))).deleted == 0


def test_a_box_may_be_deleted_only_if_it_is_empty(driver: Driver) -> None:
    driver.put(ttl_ms=10)
    driver.append(1)
    with pytest.raises(BoxNotEmpty) as caught:
        driver.ask(commands.DeleteBox("b", if_empty=True))
    assert caught.value.detail == {"count": 1}
    driver.now_ms += 11
    assert driver.ask(commands.DeleteBox("b", if_empty=True)).deleted


def test_no_two_boxes_ever_have_the_same_generation(driver: Driver) -> None:
    seen = set()
    for _ in range(4):
        for box in ("a", "b"):
            driver.append(1, box=box)
            seen.add(driver.state(box).generation)
        driver.ask(commands.DeleteBox("a"))
        driver.ask(commands.DeleteBox("b"))
        driver.now_ms -= 100
    assert len(seen) == 8
    driver.now_ms = 50_000
    driver.append(1, box="a")
    assert driver.state("a").generation == 50_000 * 1024, "a clock that moved on is followed"


def test_deletes_answer_with_what_is_left(driver: Driver) -> None:
    driver.append(1, {"data": 2, "tag": "t"}, 3)
    size = len(b'{"$seq":1,"$ts":1000,"data":1}')
    assert driver.delete(tag="t") == commands.DeleteRecordsReply("b", 1, 1, 3, 2, 2 * size)
    assert driver.delete(2**64 - 1) == commands.DeleteRecordsReply("b", 2, 4, 3, 0, 0)
    assert driver.do(commands.DeleteRecords("b", 99)).changes == []
    assert driver.do(commands.DeleteRecords("b", 0)).changes == []


def test_a_machine_and_its_boxes_say_what_they_are(driver: Driver) -> None:
    driver.append(1, 2, idempotency_key="k")
    assert repr(driver.machine) == "<Machine 1 boxes, lsn 2/2/2>"
    assert repr(driver.machine.boxes["b"]) == "<Box b g1024000 disk <BoxLog 1..2..2, 2 live>>"
    statistics = driver.machine.statistics()
    assert (statistics["boxes"], statistics["records"], statistics["idempotency_keys"]) == (1, 2, 1)
    assert isinstance(driver.machine.boxes["b"].facts(), BoxFacts)


def test_a_small_box_takes_less_than_2500_bytes_of_memory() -> None:
    driver = Driver()
    driver.append("x", box="first")  # what is made once is made by now
    tracemalloc.start()
    try:
        for number in range(500):
            driver.machine.handle(driver.write("x", box=f"box-{number}"), driver.now_ms)
            driver.machine.on_durable(driver.machine.lsn)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 500 * 2_500
