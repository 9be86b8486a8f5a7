"""Goal: no reply goes before the promise of its class is kept: staged, logged, durable, visible (§1.1).

Method: writes are staged and then `logged` and `durable` are reported by hand, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core import context as context_module
from streams.protocol.errors import BoxNotFound, NotFound, SeqMismatch
from streams.protocol.messages import commands
from tests.support.machines import Driver, patch


def settled(durability: str) -> Driver:
    """A box of this class with one record, everything durable."""
    driver = Driver()
    driver.put(durability=durability)
    driver.append("first")
    return driver


def told(outcome: Any) -> tuple[int, bool]:
    return outcome.waits_for_lsn, outcome.until_durable


def visible(driver: Driver, box: str = "b") -> int:
    return driver.machine.boxes[box].log.visible_seq


def test_a_memory_write_is_answered_and_seen_at_once() -> None:
    driver = settled("memory")
    outcome = driver.do(driver.write(2))
    assert told(outcome) == (0, False) and outcome.changes == [] and outcome.wakes == ("b",)
    assert visible(driver) == 2
    assert driver.do(commands.DeleteRecords("b", 2)).waits_for_lsn == 0
    assert driver.do(commands.SetFence("b", "t")).waits_for_lsn == 0
    assert driver.machine.on_logged(driver.machine.lsn) == []


def test_a_memory_write_that_creates_its_box_waits_for_the_box() -> None:
    driver = Driver()
    outcome = driver.do(driver.write(1, config=patch(durability="memory")))
    assert told(outcome) == (1, True) and outcome.wakes == ("b",)


def test_a_disk_write_is_answered_and_seen_when_it_is_logged() -> None:
    driver = settled("disk")
    outcome = driver.do(driver.write(2))
    assert told(outcome) == (driver.machine.lsn, False) and outcome.wakes == ()
    assert visible(driver) == 1
    assert driver.logged() == ["b"]
    assert visible(driver) == 2
    assert driver.sync() == []


def test_a_disk_write_is_seen_when_it_is_durable_even_if_nobody_said_it_was_logged() -> None:
    driver = settled("disk")
    driver.do(driver.write(2))
    assert driver.sync() == ["b"] and visible(driver) == 2


def test_an_fsync_write_is_answered_and_seen_when_it_is_durable() -> None:
    driver = settled("fsync")
    outcome = driver.do(driver.write(2))
    assert told(outcome) == (driver.machine.lsn, True)
    assert driver.logged() == [] and visible(driver) == 1
    assert driver.sync() == ["b"] and visible(driver) == 2


def test_reports_may_come_late_and_twice() -> None:
    driver = settled("disk")
    driver.do(driver.write(2))
    driver.do(driver.write(3))
    lsn = driver.machine.lsn
    assert driver.logged(lsn - 1) == ["b"] and visible(driver) == 2
    assert driver.logged(lsn - 1) == [] and driver.logged(1) == []
    assert driver.machine.logged_lsn == lsn - 1
    assert driver.sync(lsn) == ["b"] and driver.sync(1) == []
    assert driver.machine.durable_lsn == lsn


@pytest.mark.parametrize(("durability", "until_durable"), [("disk", False), ("fsync", True)])
def test_readers_see_nothing_of_what_is_staged(durability: str, until_durable: bool) -> None:
    driver = settled(durability)
    driver.now_ms += 50
    driver.do(driver.write(2, 3))
    state = driver.do(commands.GetState("b", False)).reply
    assert isinstance(state, commands.BoxState)
    assert (state.head_seq, state.next_seq, state.count, state.last_write_ts) == (1, 2, 1, 1000)
    tail = driver.do(commands.GetTail("b"))
    assert tail.reply == commands.Tail("b", 1, 2, 1000) and told(tail) == (0, False)
    read = driver.do(commands.ReadBox(box="b")).reply
    assert isinstance(read, commands.DiffResult) and read.next_from_seq == read.head_seq == 1
    page = driver.do(commands.ListBoxes()).reply
    assert isinstance(page, commands.ListBoxesResult) and page.boxes[0].count == 1
    missing = driver.do(commands.GetRecord("b", 2))
    assert isinstance(missing.reply, NotFound)
    assert told(missing) == (driver.machine.lsn, until_durable)


def test_the_first_staged_write_leaves_no_trace_of_its_time() -> None:
    """Failed before: the time of the last write was that of a record nobody could have yet."""
    driver = Driver()
    driver.put(durability="fsync")
    driver.do(driver.write(1))
    assert driver.do(commands.GetTail("b")).reply == commands.Tail("b", 0, 1, None)
    driver.sync()
    driver.delete(9)
    driver.now_ms += 10
    driver.do(driver.write(2))
    assert driver.do(commands.GetTail("b")).reply == commands.Tail("b", 1, 2, 1000)


@pytest.mark.parametrize(("durability", "until_durable"), [("disk", False), ("fsync", True)])
def test_a_read_of_staged_losses_waits_for_them(durability: str, until_durable: bool) -> None:
    driver = settled(durability)
    deletion = driver.do(commands.DeleteRecords("b", 2))
    waits = (driver.machine.lsn, until_durable)
    assert told(deletion) == waits
    for command in (commands.ReadBox(box="b"), commands.GetState("b"), commands.GetTail("b")):
        assert told(driver.do(command)) == waits
    assert told(driver.do(commands.ListBoxes()))[0] == driver.machine.lsn
    assert told(driver.do(commands.DeleteRecords("b", 2))) == waits, "a repeat waits for the same"
    driver.sync()
    assert told(driver.do(commands.ReadBox(box="b"))) == (0, False)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_read_of_a_staged_config_or_fence_waits_for_it(durability: str) -> None:
    """Failed before: a state showed a config and a fence that could still vanish."""
    driver = settled(durability)
    driver.do(commands.PutBox("b", patch(cap_records=7)))
    assert driver.do(commands.GetState("b")).waits_for_lsn == driver.machine.lsn
    driver.sync()
    driver.do(commands.SetFence("b", "t"))
    assert driver.do(commands.GetState("b")).waits_for_lsn == driver.machine.lsn


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_put_that_repeats_a_staged_one_waits_for_it(durability: str) -> None:
    """Failed before: the repeat was answered before the box it told of was on the disk."""
    driver = Driver()
    first = driver.do(commands.PutBox("b", patch(durability=durability)))
    again = driver.do(commands.PutBox("b", patch(durability=durability)))
    assert told(first) == told(again) == (1, True)
    driver.logged()
    assert told(driver.do(commands.PutBox("b", patch()))) == (1, True)


def test_a_refusal_waits_for_what_it_rests_on() -> None:
    driver = settled("fsync")
    driver.do(driver.write(2))
    outcome = driver.do(driver.write(3, match_seq=2))
    assert isinstance(outcome.reply, SeqMismatch)
    assert told(outcome) == (driver.machine.lsn, True)
    driver.sync()
    assert told(driver.do(driver.write(3, match_seq=2))) == (0, False)


def test_an_answer_that_a_box_is_gone_waits_for_its_deletion() -> None:
    """Failed before: a repeated DELETE and a listing reported a deletion that could still vanish."""
    driver = settled("disk")
    assert told(driver.do(commands.DeleteBox("b"))) == (driver.machine.lsn, True)
    for command in (commands.GetState("b"), commands.DeleteBox("b"), commands.ListBoxes()):
        assert told(driver.do(command)) == (driver.machine.lsn, True)
    driver.sync()
    outcome = driver.do(commands.GetState("b"))
    assert isinstance(outcome.reply, BoxNotFound) and outcome.waits_for_lsn == 0


@pytest.mark.parametrize(("durability", "until_durable"), [("disk", False), ("fsync", True)])
def test_a_repeated_key_waits_for_the_first_write(durability: str, until_durable: bool) -> None:
    driver = settled(durability)
    driver.do(driver.write(2, idempotency_key="k"))
    again = driver.do(driver.write(2, idempotency_key="k"))
    assert isinstance(again.reply, commands.AppendResult) and again.reply.deduped
    assert again.reply.head_seq == 2
    assert told(again) == (driver.machine.lsn, until_durable)


def test_a_repeated_key_waits_for_the_disk_when_the_first_write_does() -> None:
    """Failed before: the repeat was acked when logged, though its seq could still be given to another."""
    driver = Driver()
    driver.do(driver.write(1, idempotency_key="k"))
    driver.logged()
    assert told(driver.do(driver.write(1, idempotency_key="k"))) == (driver.machine.lsn, True)


# -- changing the class


def test_the_class_of_a_stored_box_changes_in_place() -> None:
    driver = settled("disk")
    driver.do(driver.write("as disk"))
    driver.do(commands.PutBox("b", patch(durability="fsync")))
    outcome = driver.do(driver.write("as fsync"))
    assert outcome.until_durable
    assert driver.logged() == ["b"] and visible(driver) == 2
    assert driver.sync() == ["b"] and visible(driver) == 3
    driver.put(durability="disk")
    assert not driver.do(driver.write("as disk again")).until_durable


def test_writes_of_one_box_become_visible_in_order_through_a_change_of_class() -> None:
    driver = settled("fsync")
    driver.do(driver.write("as fsync"))
    driver.do(commands.PutBox("b", patch(durability="disk")))
    outcome = driver.do(driver.write("as disk"))
    assert outcome.until_durable, "its ceiling is not durable yet, and it must not overtake"
    assert driver.logged() == []
    driver.sync()
    assert visible(driver) == 3


def test_an_old_reservation_does_not_protect_a_box_that_was_fsync_in_between() -> None:
    """Failed before: acked when logged, but a power cut would bring back an fsync box that reuses the seq."""
    driver = settled("disk")
    driver.put(durability="fsync")
    driver.do(commands.PutBox("b", patch(durability="disk")))
    assert driver.do(driver.write(2)).until_durable
    driver.sync()
    assert not driver.do(driver.write(3)).until_durable


def test_a_fence_set_in_memory_is_logged_when_the_box_becomes_stored() -> None:
    """Failed before: the fence was gone after a restart, and the replaced writer could write again."""
    driver = Driver()
    driver.put(durability="memory")
    driver.ask(commands.SetFence("b", "t"))
    driver.put(durability="fsync")
    assert driver.reborn().state().fencing_token == "t"


# -- the ceiling of disk boxes


def test_a_disk_write_waits_for_the_disk_until_its_seqs_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "RESERVE_SEQS", 8)
    driver = Driver()
    assert driver.do(driver.write(1)).until_durable, "the box itself is not durable"
    assert driver.do(driver.write(2)).until_durable, "nor may the next write overtake"
    driver.sync()
    assert not driver.do(driver.write(3, 4)).until_durable
    outcome = driver.do(driver.write(5, 6))
    assert [type(change).__name__ for _, change in outcome.changes] == ["SeqsReserved", "BatchAppended"]
    assert not outcome.until_durable, "the old reservation still covers it"
    big = driver.do(driver.write(*range(10)))
    assert big.until_durable, "no durable reservation covers it"
    driver.logged()
    assert visible(driver) == 6
    driver.sync()
    assert visible(driver) == 16
