"""Goal: what an object box tells waits for the store, no more and no less; what is put there is what concerns
such boxes, and wherever that cannot be said change by change, a base is asked for.

Method: a machine is driven by hand: durable, then moved, as the engine would report them.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core import changes
from shard.core.machine import Machine
from streams.protocol.errors import InvalidRequest, Throttled
from streams.protocol.messages import bulk, commands, queues
from streams.protocol.payloads.packed import pack
from tests.support.machines import Driver, patch, put_of, seqs_of

CHAIN = "00000001-000-1"


class WithStore(Driver):
    def __init__(self, **machine: Any) -> None:
        super().__init__(make=lambda: Machine(has_store=True, **machine))

    def move(self, lsn: int | None = None, *, is_base: bool = True) -> tuple[str, ...]:
        """Everything up to here is durable and in the store."""
        self.sync()
        lsn = self.machine.lsn if lsn is None else lsn
        return self.keep(self.machine.uploading.on_upload(CHAIN, lsn, is_base=is_base)).wakes


@pytest.fixture
def driver() -> WithStore:
    """A box of class object with a record, all of it in the store; and a disk box."""
    driver = WithStore()
    driver.put(durability="object")
    driver.append("first")
    driver.put("here", durability="fsync")
    driver.move()
    return driver


def told(outcome: Any) -> tuple[int, bool]:
    return outcome.waits_for_lsn, outcome.until_uploaded


def shipped(driver: Driver) -> list[str]:
    driver.sync()
    return [type(each.change).__name__ for each in driver.machine.uploading.group(1 << 30)]


def test_an_object_write_is_answered_and_seen_when_it_is_in_the_store(driver: WithStore) -> None:
    outcome = driver.do(driver.write("second"))
    assert told(outcome) == (driver.machine.lsn, True) and outcome.until_durable
    assert driver.sync() == [] and driver.machine.boxes["b"].log.visible_seq == 1
    assert driver.move(is_base=False) == ("b",) and driver.machine.boxes["b"].log.visible_seq == 2


def test_what_rests_on_it_waits_and_nothing_else_does(driver: WithStore) -> None:
    driver.do(driver.write("second", idempotency_key="k"))
    lsn = driver.machine.lsn
    driver.sync()
    assert told(driver.do(driver.write("second", idempotency_key="k"))) == (lsn, True)
    assert told(driver.do(driver.write("x", match_seq=1))) == (lsn, True), "a refusal rests on it too"
    read = driver.do(commands.ReadBox(box="b"))
    assert told(read) == (0, False) and seqs_of(read.reply) == [1]  # type: ignore[arg-type]
    driver.do(commands.DeleteRecords("b", 2))
    driver.sync()
    assert told(driver.do(commands.ReadBox(box="b"))) == (driver.machine.lsn, True), "a read shows the floor"
    assert driver.do(commands.ListBoxes("", "", 10)).waits_for_lsn == 0, "a list does not wait for the store"
    assert told(driver.do(commands.GetState("here", False))) == (0, False)


def test_what_need_not_be_there_holds_up_nobody(driver: WithStore) -> None:
    driver.append("local", box="here")
    driver.relog()
    driver.sync()
    assert driver.machine.uploading.position == driver.machine.durable_lsn == driver.machine.lsn
    assert shipped(driver) == []


def test_only_what_concerns_object_boxes_is_shipped(driver: WithStore) -> None:
    driver.append("x")
    driver.append("y", box="here")
    driver.delete(2)
    driver.seal()
    driver.ask(queues.CommitGroup("b", "g", 1))
    driver.ask(commands.SetFence("b", "t"))
    driver.put("c", durability="object")
    driver.ask(commands.DeleteBox("c", False))
    assert shipped(driver) == [
        "BatchAppended", "RecordsDeleted", "GroupCommitted", "TokenFenced", "BoxCreated", "BoxDeleted",
    ]  # fmt: skip


def test_a_commit_is_shipped_as_what_it_made_and_its_mark(driver: WithStore) -> None:
    txn = bulk.Txn("w", 1, "q")
    driver.ask(put_of(txn, "p", 0, pack(["b", "here"], [2, 1], [b"1", b"2", b"3"])))
    assert shipped(driver) == []
    outcome = driver.do(bulk.TxnCommit(txn, [("p", 1)]))
    assert outcome.until_uploaded
    driver.sync()
    group = driver.machine.uploading.group(1)
    assert [type(each.change) for each in group] == [changes.BatchAppended, changes.TxnCommitted]
    assert len({each.lsn for each in group}) == 1, "one fact, in one object however small that should be"
    again = driver.do(bulk.TxnCommit(txn, [("p", 1)]))
    assert told(again)[1] and told(again)[0] == group[0].lsn, "a repeat rests on the mark"
    driver.move(is_base=False)
    assert told(driver.do(bulk.TxnCommit(txn, [("p", 1)])))[0] == 0


def test_a_box_that_enters_the_class_needs_a_base(driver: WithStore) -> None:
    outcome = driver.do(commands.PutBox("here", patch(durability="object")))
    entered = driver.machine.lsn
    assert told(outcome) == (entered, True) and driver.machine.uploading.needs_base_lsn == entered
    driver.do(driver.write("x"))
    driver.sync()
    assert driver.machine.uploading.group(1 << 30) == [] and driver.machine.uploading.has_work
    assert driver.machine.uploading.position == entered - 1
    driver.move()
    assert not driver.machine.uploading.needs_base_lsn
    assert driver.machine.boxes["b"].log.visible_seq == 2
    left = driver.do(commands.PutBox("here", patch(durability="fsync")))
    assert told(left) == (driver.machine.lsn, True), "else the store would bring it back as it was"


def test_without_a_store_the_class_is_refused() -> None:
    driver = Driver()
    for command in (
        commands.PutBox("b", patch(durability="object")),
        driver.write("x", config=patch(durability="object")),
    ):
        with pytest.raises(InvalidRequest, match="STREAMS_COLD_DIR"):
            driver.ask(command)


def test_too_much_on_its_way_is_refused_and_far_too_much_needs_a_base() -> None:
    driver = WithStore(backlog_bytes_max=1_000)
    driver.put(durability="object", ttl_ms=10)
    driver.move()
    uploads = driver.machine.uploading
    while not isinstance(uploads.refuses(driver.write("x")), Throttled):
        driver.append("x")
    assert uploads.refuses(driver.write("x", box="other")) is None
    while not uploads.needs_base_lsn:  # what is not asked of anybody goes on
        driver.append("x")
    assert uploads.pending_bytes == 0 and uploads.position < uploads.needs_base_lsn
    driver.move()
    assert uploads.refuses(driver.write("x")) is None and uploads.position == driver.machine.durable_lsn


def test_a_restart_knows_what_is_yet_to_be_put_there(driver: WithStore) -> None:
    driver.do(driver.write("second"))
    driver.sync()
    driver.move(is_base=False)
    driver.do(driver.write("third"))
    driver.sync()
    other = driver.reborn()
    other.start("boot")
    assert other.machine.boxes["b"].log.visible_seq == 2
    assert [each.lsn for each in other.machine.uploading.group(1 << 30)] == [driver.machine.lsn]
    other.keep(other.machine.uploading.on_upload(CHAIN, driver.machine.lsn, is_base=False))
    assert other.machine.boxes["b"].log.visible_seq == 3


def test_a_snapshot_of_what_was_on_its_way_needs_a_base(driver: WithStore) -> None:
    driver.do(driver.write("second"))
    driver.sync()
    state = driver.machine.snapshot()
    other = driver.reborn(state=state)
    other.start("boot")
    assert other.machine.uploading.needs_base_lsn and other.machine.boxes["b"].log.visible_seq == 1
    assert told(other.do(commands.GetState("b", False))) == (state.lsn, True)
    lsn = other.machine.lsn
    other.sync()
    other.keep(other.machine.uploading.on_upload(CHAIN, lsn, is_base=True))
    assert other.machine.boxes["b"].log.visible_seq == 2
