"""Goal: copies between two boxes of one shard: when they are logged, seen and confirmed (v0 §6.1).

Method: one machine with its log; the test takes the steps that the engine takes.
"""

from __future__ import annotations

import pytest

from shard.core import changes
from shard.core.machine import Machine
from shard.core.routers import local_copies
from shard.core.routers.outbox import Outbox
from streams.protocol.errors import DataDamaged
from streams.protocol.messages import commands, forwards
from tests.support.carrying import ORIGIN, collect, copies, tie
from tests.support.jobs import QueueDriver
from tests.support.machines import Driver


@pytest.fixture
def shard() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def outbox_of(driver: Driver, box: str = "from", origin: str = ORIGIN) -> Outbox:
    return driver.machine.boxes[box].outboxes[origin]


def visible(driver: Driver, box: str) -> int:
    return driver.machine.boxes[box].log.visible_seq


def routed(driver: Driver, source: str, dest: str, **config: object) -> None:
    """Two boxes of these classes and a router between them. A first record has made reservations durable."""
    driver.put("from", durability=source)
    driver.put("to", durability=dest, **config)
    tie(driver, driver)
    driver.append(0, box="from")
    driver.copy_all_locally()


SAME_GROUP = [("disk", "disk"), ("fsync", "fsync")]


@pytest.mark.parametrize(("source", "dest"), SAME_GROUP)
def test_a_copy_is_logged_in_the_group_of_its_record_if_both_wait_for_the_same_stage(
    shard: Driver, source: str, dest: str
) -> None:
    routed(shard, source, dest)
    outcome = shard.do(shard.write(1, box="from"))
    step = shard.copy_locally(is_early=True)
    assert [type(change) for _, change in step.changes][:1] == [changes.BatchForwarded]
    assert step.changes[0][0] == outcome.waits_for_lsn + 1
    assert step.until_durable == (dest == "fsync"), "it asks for no sync that its record does not need"
    assert (visible(shard, "from"), visible(shard, "to")) == (1, 1)
    shard.sync() if source == "fsync" else shard.logged()
    assert (visible(shard, "from"), visible(shard, "to")) == (2, 2)
    assert not shard.machine.local_copies.is_due, "nothing is looked at twice"


@pytest.mark.parametrize(
    ("source", "dest"), [("disk", "fsync"), ("disk", "memory"), ("fsync", "disk"), ("fsync", "memory")]
)
def test_a_copy_follows_when_its_record_is_visible_if_the_stages_differ(
    shard: Driver, source: str, dest: str
) -> None:
    routed(shard, source, dest)
    shard.do(shard.write(1, box="from"))
    assert not shard.copy_locally(is_early=True).changes and shard.machine.boxes["to"].log.head_seq == 1
    if source == "fsync":
        shard.logged()
        assert not shard.machine.local_copies.is_due
    shard.sync() if source == "fsync" else shard.logged()
    step = shard.copy_locally()
    assert step.until_durable == (dest == "fsync")
    assert ("to" in step.wakes) == (dest == "memory")
    shard.sync()
    assert copies(shard) == [0, 1]


def test_a_copy_of_a_memory_record_is_made_at_once(shard: Driver) -> None:
    routed(shard, "memory", "memory")
    outcome = shard.do(shard.write(1, box="from"))
    assert not outcome.changes and "" not in outcome.wakes, "the relay has nothing to collect"
    step = shard.copy_locally(is_early=True)
    assert not step.changes and step.wakes == ("to",) and visible(shard, "to") == 2


def test_a_record_above_the_durable_ceiling_is_not_copied_before_readers_see_it(shard: Driver) -> None:
    shard.put("from", durability="disk")
    shard.put("to", durability="disk")
    tie(shard, shard)
    shard.append("below", box="from")
    shard.copy_all_locally()
    box = shard.machine.boxes["from"]
    box.volatile.reserved_durable_seq = box.log.head_seq  # the next reservation is not durable yet
    shard.do(shard.write("above", box="from"))
    shard.copy_locally(is_early=True)
    shard.logged()
    assert shard.machine.boxes["to"].log.head_seq == 1
    shard.copy_all_locally()
    assert copies(shard) == ["below", "above"]


def test_the_relay_gets_nothing_that_is_copied_inside_the_shard(shard: Driver) -> None:
    routed(shard, "fsync", "fsync")
    shard.append(1, box="from")
    assert collect(shard) == []
    shard.copy_all_locally()
    assert copies(shard) == [0, 1] and collect(shard) == []


def test_forwarded_total_counts_a_copy_that_readers_can_see_and_no_other(shard: Driver) -> None:
    routed(shard, "fsync", "fsync")
    shard.do(shard.write(1, box="from"))
    shard.copy_locally(is_early=True)
    outcome = shard.do(forwards.GetOutbox("from", ORIGIN))
    assert isinstance(outcome.reply, forwards.OutboxState) and outcome.reply.forwarded_total == 2
    assert outcome.until_durable and outcome.waits_for_lsn == shard.machine.boxes["to"].last_lsn
    assert (outcome.reply.position, outcome.reply.lag) == (1, 0), "in seqs that readers of the source see"
    shard.sync()
    reply = shard.ask(forwards.GetOutbox("from", ORIGIN))
    assert (reply.forwarded_total, reply.position, reply.lag) == (2, 2, 0)


def test_a_chain_is_copied_in_one_step_and_a_cycle_ends(shard: Driver) -> None:
    for name in ("from", "to", "end"):
        shard.put(name, durability="fsync")
    tie(shard, shard)
    tie(shard, shard, source="to", dest="end", origin="chain#2")
    tie(shard, shard, source="end", dest="from", origin="cycle#3")
    shard.do(shard.write("x", box="from"))
    shard.copy_locally(is_early=True)
    assert shard.machine.boxes["end"].log.head_seq >= 1
    shard.copy_all_locally()
    assert len(copies(shard, "from")) + len(copies(shard)) + len(copies(shard, "end")) == 17


def test_an_early_step_leaves_a_large_backlog_and_many_outboxes_for_later(shard: Driver) -> None:
    shard.put("from", durability="fsync")
    dests = [f"to-{number}" for number in range(local_copies.EARLY_BATCHES_MAX + 2)]
    for number, dest in enumerate(dests):
        shard.put(dest, durability="fsync")
        tie(shard, shard, dest=dest, origin=f"fan#{number}")
    shard.do(shard.write(1, box="from"))
    step = shard.copy_locally(is_early=True)
    batches = [change for _, change in step.changes if type(change) is changes.BatchForwarded]
    assert len(batches) == local_copies.EARLY_BATCHES_MAX and shard.machine.local_copies.is_due
    shard.copy_all_locally()
    shard.append(*range(local_copies.EARLY_RECORDS_MAX + 1), box="from")
    assert not shard.copy_locally(is_early=True).changes and shard.machine.local_copies.is_due
    shard.copy_all_locally()
    assert all(len(copies(shard, dest)) == local_copies.EARLY_RECORDS_MAX + 2 for dest in dests)


def test_a_step_ends_at_its_bounds_and_goes_on_with_the_next(
    shard: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copies, "STEP_BYTES_MAX", 1)
    shard.put("from", durability="fsync")
    for number in range(3):
        shard.put(f"to-{number}", durability="fsync")
        tie(shard, shard, dest=f"to-{number}", origin=f"fan#{number}")
    shard.append("x", box="from")
    for left in (2, 1, 0):
        shard.copy_locally()
        assert len(shard.machine.forwarding.outboxes.local) == left


def test_a_filter_skips_records_without_a_change(shard: Driver) -> None:
    shard.put("from", durability="fsync")
    shard.put("to", durability="fsync")
    tie(shard, shard, filter=commands.Match("wanted"))
    shard.do(shard.write({"data": 1, "tag": "other"}, box="from"))
    assert not shard.copy_locally(is_early=True).changes
    shard.sync()
    assert shard.ask(forwards.GetOutbox("from", ORIGIN)).position == 1


def test_a_full_box_blocks_its_router_and_gets_every_record_in_the_end(shard: Driver) -> None:
    routed(shard, "fsync", "fsync", cap_records=2, discard="reject")
    shard.append(1, 2, 3, box="from")
    shard.copy_all_locally()
    state = shard.ask(forwards.GetOutbox("from", ORIGIN))
    assert state.is_blocked and state.last_error.startswith("box_full") and copies(shard) == [0, 1]
    shard.ask(commands.DeleteRecords("to", 3))
    shard.now_ms += 5_000
    shard.tick()
    shard.copy_all_locally()
    assert copies(shard) == [2, 3] and not shard.ask(forwards.GetOutbox("from", ORIGIN)).is_blocked


def test_an_outbox_whose_destination_is_gone_goes_to_the_relay(shard: Driver) -> None:
    routed(shard, "fsync", "fsync")
    shard.append(1, box="from")
    assert outbox_of(shard).is_local
    shard.ask(commands.DeleteBox("to"))
    assert "" in shard.copy_locally().wakes
    assert [given.parcel.dest for given in collect(shard)] == ["to"]


def test_batches_of_the_relay_are_answered_before_the_shard_copies_itself(shard: Driver) -> None:
    """A full disk: the relay takes what the shard would copy (`shard/engine/local_copies.py`)."""
    routed(shard, "fsync", "fsync")
    shard.append(1, box="from")
    outboxes = shard.machine.forwarding.outboxes
    assert outboxes.release_local() and not outboxes.release_local()
    (given,) = collect(shard)
    shard.append(2, box="from")
    assert not outboxes.local and collect(shard) == [], "two ways would overtake each other"
    shard.do(given.refused("disk_full"))
    shard.now_ms += 5_000
    shard.tick()
    shard.copy_all_locally()
    assert copies(shard) == [0, 1, 2]


def test_a_payload_that_cannot_be_read_blocks_its_router_alone(shard: Driver) -> None:
    routed(shard, "fsync", "fsync")
    shard.put("healthy", durability="fsync")
    shard.put("mirror", durability="fsync")
    tie(shard, shard, source="healthy", dest="mirror", origin="other#2")
    shard.append("sealed", box="from")
    shard.seal("from")
    box = shard.machine.boxes["from"]
    for segment in box.log.segments:
        for at in range(len(segment)):
            segment.forget(at)
    shard.append("fine", box="healthy")
    step = shard.machine.local_copies.step(shard.now_ms, is_early=False)
    shard.keep(step)
    shard.sync()
    assert len(step.needs) == 1 and copies(shard, "mirror") == ["fine"], "others do not wait for it"
    shard.machine.local_copies.resume(DataDamaged("a segment is damaged"), shard.now_ms)
    state = shard.ask(forwards.GetOutbox("from", ORIGIN))
    assert state.is_blocked and state.last_error.startswith("data_damaged")
    shard.now_ms += 5_000
    shard.tick()
    shard.copy_all_locally()
    assert copies(shard) == [0, "sealed"]


def test_dead_letters_move_inside_the_shard_and_leave_their_queue() -> None:
    driver = QueueDriver()
    driver.start("boot")
    driver.put(type="queue", durability="fsync", max_deliveries=1, dead_letter="dead")
    driver.put("dead", durability="fsync")
    driver.append("poison")
    assert len(driver.claim()) == 1
    driver.nack(1)
    assert driver.claim() == []
    outcome = driver.copy_locally()
    assert [type(change) for _, change in outcome.changes] == [changes.BatchForwarded, changes.MovesDone]
    assert outcome.wakes == ("b",), "a requeue may wait until records have left"
    driver.sync()
    assert copies(driver, "dead") == ["poison"] and copies(driver, "b") == []


def test_a_copy_into_an_object_box_is_confirmed_when_it_is_stored() -> None:
    driver = Driver(make=lambda: Machine(has_store=True))
    driver.start("boot")
    routed_with_store(driver)
    driver.append(1, box="from")
    driver.copy_locally()
    driver.sync()
    outbox = outbox_of(driver)
    assert outbox.in_flight and not driver.machine.local_copies.is_due
    driver.keep(driver.machine.uploading.on_upload("chain", driver.machine.lsn, is_base=True))
    assert driver.machine.local_copies.is_due
    driver.copy_locally()
    assert not outbox.in_flight and outbox.total == 1 and visible(driver, "to") == 1


def test_a_store_that_takes_nothing_blocks_the_router() -> None:
    driver = Driver(make=lambda: Machine(has_store=True))
    driver.start("boot")
    routed_with_store(driver)
    driver.machine.uploading.refusal = "down"
    driver.append(1, box="from")
    driver.copy_locally()
    assert outbox_of(driver).failures and not outbox_of(driver).in_flight


def routed_with_store(driver: Driver) -> None:
    driver.put("from", durability="fsync")
    driver.put("to", durability="object")
    tie(driver, driver)
    driver.keep(driver.machine.uploading.on_upload("chain", driver.machine.lsn, is_base=True))


def test_it_says_what_it_is(shard: Driver) -> None:
    assert repr(shard.machine.local_copies) == "<LocalCopies 0 outboxes wait>"
