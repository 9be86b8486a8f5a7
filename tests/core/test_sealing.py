"""Goal: nobody can tell a sealed record from one in memory, after any request, eviction, delete or restart.

Method: `Driver.seal` moves batches into segments whose payloads are then not in memory; every answer is
compared with that of a twin which was never sealed. The random histories of `tests/model` do the same at
large; here stands each case by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes.sealed import NotLoaded, Segment
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.boxes.upkeep import (
    HotPolicy,
    SealPolicy,
    ToKeep,
    ToSeal,
    plan_compaction,
    plan_move,
    plan_rewrite,
    plan_seal,
)
from shard.engine.compaction import copy_input
from streams.protocol.messages import commands, queues
from tests.support import machines
from tests.support.machines import Driver, facts_of

POLICY = SealPolicy(records=10, bytes=100_000, age_ms=1_000)


def filled(batches: int = 6, size: int = 3, **config: Any) -> Driver:
    driver = Driver()
    driver.put(durability="fsync", **config)
    for batch in range(batches):
        driver.append(
            *({"data": [batch, at], "tag": f"t{at}"} for at in range(size)),
        )
        driver.now_ms += 10
    return driver


def sealed(driver: Driver) -> Driver:
    assert driver.seal()
    driver.forget()
    return driver


@pytest.fixture
def driver() -> Driver:
    return sealed(filled())


def test_a_payload_that_is_not_in_memory_is_asked_for_and_nothing_is_done(driver: Driver) -> None:
    outcome = driver.machine.handle(commands.ReadBox(box="b", from_seq=4), driver.now_ms)
    assert outcome.reply is None and outcome.changes == []
    (missing,) = outcome.needs
    assert isinstance(missing, NotLoaded) and missing.segment.first_seqs[missing.at] == 4
    assert driver.seqs(4, limit=4) == [5, 6, 7, 8]


def test_a_list_does_not_wait_for_payloads() -> None:
    driver = Driver()
    driver.put(durability="fsync", ttl_ms=100, timestamping={"mode": "client-prefer"})
    driver.append({"data": 1, "ts": 950}, {"data": 2, "ts": 1_000})
    sealed(driver)
    driver.now_ms = 1_060
    (listed,) = driver.ask(commands.ListBoxes()).boxes
    assert listed.count == 2


def test_sealed_records_are_read_like_others() -> None:
    plain, other = filled(), sealed(filled())
    for from_seq in range(20):
        for limit in (1, 4, 100):
            assert other.read(from_seq, limit=limit) == plain.read(from_seq, limit=limit)
    for ts in range(990, 1100, 5):
        command = commands.ReadBox(box="b", from_ts=ts, include_tags=True)
        assert other.ask(command) == plain.ask(command)
    for seq in (1, 7, 18):
        assert other.ask(commands.GetRecord("b", seq)) == plain.ask(commands.GetRecord("b", seq))
    match = commands.Match("t1")
    assert other.read(0, match=match) == plain.read(0, match=match)
    assert other.state().count == 18 and other.state().bytes == plain.state().bytes


@pytest.mark.parametrize("before", range(1, 20))
def test_trims_cut_through_sealed_batches(before: int) -> None:
    plain, other = filled(), sealed(filled())
    assert other.delete(before) == plain.delete(before)
    assert other.read(0) == plain.read(0)
    assert facts_of(other.reborn().machine) == facts_of(other.machine)


@pytest.mark.parametrize("tag", ["t0", "t1", "t*", "none", "t"])
@pytest.mark.parametrize("before", [None, 5, 12])
def test_deletes_by_tag_look_into_segments(tag: str, before: int | None) -> None:
    plain, other = filled(), sealed(filled())
    for each in (plain, other):
        each.append({"data": "tail", "tag": "t0"}, {"data": "tail", "tag": "t1"})
    assert other.delete(before, tag) == plain.delete(before, tag)
    assert other.read(0) == plain.read(0)
    assert other.delete(before, tag).deleted == 0
    assert facts_of(other.reborn().machine) == facts_of(other.machine)


@pytest.mark.parametrize("cap", range(1, 18, 2))
@pytest.mark.parametrize("by", ["cap_records", "cap_bytes"])
def test_a_cap_that_is_tightened_evicts_sealed_records(cap: int, by: str) -> None:
    plain, other = filled(), sealed(filled())
    value = cap if by == "cap_records" else cap * 40
    for each in (plain, other):
        each.put(**{by: value})
        each.append("new")
    assert other.read(0) == plain.read(0)
    assert other.state() == plain.state()


def test_sealed_records_expire_one_by_one_when_they_have_times_of_their_own() -> None:
    drivers = []
    for seals in (False, True):
        driver = Driver()
        driver.put(durability="fsync", ttl_ms=100, timestamping={"mode": "client-prefer"})
        driver.append(*({"data": at, "ts": 900 + 10 * at} for at in range(10)))
        if seals:
            sealed(driver)
        drivers.append(driver)
    for now_ms in range(1_000, 1_200, 7):
        for driver in drivers:
            driver.now_ms = now_ms
            for _ in range(3):  # a tick that needs a payload is done at the next one
                driver.tick()
                driver.now_ms += 100 if driver.machine.next_deadline_ms() == driver.now_ms + 100 else 0
            driver.now_ms = now_ms
        assert drivers[1].read(0) == drivers[0].read(0)


def test_a_tick_that_needs_a_payload_says_so_and_is_done_at_the_next_one() -> None:
    driver = Driver()
    driver.put(durability="fsync", ttl_ms=100, timestamping={"mode": "client-prefer"})
    driver.append({"data": 1, "ts": 950}, {"data": 2, "ts": 990})
    sealed(driver)
    driver.now_ms = 1_060
    outcome = driver.machine.tick(driver.now_ms)
    assert outcome.needs and not outcome.changes
    machines.SHELF.load(outcome.needs[0], driver.machine)
    driver.now_ms = driver.machine.next_deadline_ms() or 0
    assert isinstance(driver.tick().changes[0][1], changes.RecordsEvicted)


def test_a_segment_with_nothing_live_is_gone_from_memory(driver: Driver) -> None:
    driver.append(*({"data": at, "tag": "u"} for at in range(5)))
    driver.seal()
    assert len(driver.machine.boxes["b"].log.segments) == 2
    driver.delete(tag="u")
    assert [segment.last_seq for segment in driver.machine.segments()] == [18]
    driver.delete(19)
    assert list(driver.machine.segments()) == []
    assert driver.append("after").first_seq == 24


def test_a_dead_begin_of_a_later_segment_is_still_known_after_two_restarts() -> None:
    driver = Driver()
    driver.append("first")
    driver.seal()
    driver.append({"data": "second", "tag": "x"})
    driver.append("third")
    driver.seal()
    driver.delete(tag="x")
    state = driver.machine.snapshot()
    for _ in range(3):
        driver = driver.reborn(state=state)
        assert driver.seqs() == [1, 3]
        state = driver.machine.snapshot()


def sealed_while_records_die() -> tuple[Driver, changes.SegmentSealed]:
    """The change that puts a segment in the place of all batches, some of which have died meanwhile."""
    driver = filled()
    box = driver.machine.boxes["b"]
    batches = box.log.sealable(durable_lsn=driver.machine.durable_lsn, bytes_max=1 << 30)
    segment = machines.SHELF.write(box.generation, 1, batches)
    driver.delete(5)
    driver.delete(tag="t1")
    return driver, changes.SegmentSealed(box.generation, 1, segment.to_bytes())


def test_what_dies_while_a_segment_is_written_is_dead_in_it() -> None:
    driver, sealed = sealed_while_records_die()
    driver.delete(tag="t0")
    driver.delete(tag="t2")  # by now every batch is dead
    driver.commit(sealed)
    assert driver.read(0).records == b"" and list(driver.machine.segments()) == []
    assert facts_of(driver.reborn().machine) == facts_of(driver.machine)


def test_what_dies_partly_while_a_segment_is_written_is_dead_in_part() -> None:
    driver, sealed = sealed_while_records_die()
    driver.delete(10)
    driver.commit(sealed)
    assert driver.seqs() == [10, 12, 13, 15, 16, 18]
    assert facts_of(driver.reborn().machine) == facts_of(driver.machine)


def test_batches_that_are_staged_or_not_visible_are_not_sealed() -> None:
    driver = filled(batches=2)
    driver.do(driver.write("staged"))
    assert plan_seal(driver.machine, POLICY, now_ms=0, is_pressed=True) is not None
    driver.seal()
    assert driver.machine.boxes["b"].log.sealed_seq == 6
    assert plan_seal(driver.machine, POLICY, now_ms=0, is_pressed=True) is None
    driver.sync()
    assert driver.seqs(6) == [7]


# -- what is due


def test_batches_to_seal_are_found_by_search_as_they_are_one_by_one() -> None:
    """A search needs batches in order; a batch that was logged again is out of order."""
    tail = filled(batches=6, size=3).machine.boxes["b"].log.tail
    lsns = [batch.lsn for batch in tail]
    seqs = range(tail.batches[-1].last_seq + 2)
    cases = [(seq, lsn, size) for seq in seqs for lsn in (0, *lsns) for size in (1, 200, 1 << 20)]
    by_search = [tail.sealable(*case) for case in cases]
    assert max(map(len, by_search)) == 6 and min(map(len, by_search)) == 0
    tail.relog(5, lsns[5])
    assert [tail.sealable(*case) for case in cases] == by_search


def test_a_box_is_sealed_by_records_bytes_or_age() -> None:
    machine = filled(batches=2).machine
    machine.due_records = 7
    assert plan_seal(machine, SealPolicy(7, 1 << 30, 10**9), now_ms=2_000) is None
    driver = Driver(machine, 2_000)
    driver.log = [machines.Frame(0, 0, 0, b"")] * machine.lsn
    driver.append("seventh")
    plan = plan_seal(machine, SealPolicy(7, 1 << 30, 10**9), now_ms=2_000)
    assert isinstance(plan, ToSeal) and len(plan.batches) == 3 and plan.serial == 1
    assert plan_seal(machine, SealPolicy(8, 1 << 30, 10**9), now_ms=2_000) is None
    machine.due_bytes = 1_500
    driver.append("x" * 1_000)
    assert isinstance(plan_seal(machine, SealPolicy(99, 1_500, 10**9), now_ms=2_000), ToSeal)


def test_a_segment_takes_no_more_bytes_than_it_should_but_one_batch() -> None:
    driver = Driver()
    for _ in range(3):
        driver.append("x" * 1_000)
    log = driver.machine.boxes["b"].log
    assert len(log.sealable(durable_lsn=driver.machine.lsn, bytes_max=10)) == 1
    assert len(log.sealable(durable_lsn=driver.machine.lsn, bytes_max=2_500)) == 2


def test_old_boxes_are_sealed_when_they_are_worth_a_file() -> None:
    driver = Driver()
    driver.append("small", box="small")
    driver.append("x" * 70_000, box="large")
    assert plan_seal(driver.machine, POLICY, now_ms=driver.now_ms + 999) is None
    plan = plan_seal(driver.machine, POLICY, now_ms=driver.now_ms + 1_000)
    assert isinstance(plan, ToSeal) and plan.box.name == "large"
    driver.seal("large")
    assert plan_seal(driver.machine, POLICY, now_ms=driver.now_ms + 10**9) is None
    driver.append("x" * 70_000, box="small")
    plan = plan_seal(driver.machine, POLICY, now_ms=driver.now_ms + 1_000)
    assert isinstance(plan, ToSeal) and plan.box.name == "small", "by now it is worth a file"


def _calls(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls."""
    count = 0

    def on_event(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_look_for_boxes_to_seal_takes_as_long_with_many_boxes_as_with_few() -> None:
    driver = Driver()
    calls: list[int] = []
    for number in range(300):
        driver.append("x", box=f"box-{number}")
        if number in (9, 299):
            calls.append(_calls(lambda: plan_seal(driver.machine, POLICY, now_ms=driver.now_ms + 10**9)))
    assert calls[0] == calls[1], "boxes were looked at that are not due"


def test_boxes_are_sealed_for_their_part_of_the_log_oldest_first_also_when_some_have_left() -> None:
    driver = Driver()
    for number in range(40):
        driver.append("x", box=f"box-{number:02}")
    for number in range(0, 40, 2):
        driver.ask(commands.DeleteBox(f"box-{number:02}"))
    pinned = driver.machine.lsn
    freed = []
    while (plan := plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, pinned_lsn=pinned)) is not None:
        assert isinstance(plan, ToKeep)
        freed.append(plan.box.name)
        driver.relog(plan.box.name)
        driver.sync()
        driver.machine.check()
    assert freed == [f"box-{number:02}" for number in range(1, 40, 2)]


def test_queues_of_unsealed_boxes_do_not_grow_with_boxes_that_have_left() -> None:
    driver = Driver()
    for number in range(3_000):
        driver.append("x", box=f"box-{number}")
        driver.ask(commands.DeleteBox(f"box-{number}"))
    assert len(driver.machine.unsealed_boxes._by_lsn._heap) <= 1_025
    driver.machine.check()


def test_log_that_should_go_is_freed_by_keeping_small_boxes_and_sealing_large_ones() -> None:
    driver = Driver()
    driver.append("small", box="small")
    driver.append("x" * 70_000, box="large")
    pinned = driver.machine.lsn
    plan = plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, pinned_lsn=pinned)
    assert isinstance(plan, ToKeep) and plan.box.name == "small"
    driver.relog("small")
    plan = plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, pinned_lsn=pinned)
    assert isinstance(plan, ToSeal) and plan.box.name == "large"
    driver.sync()
    driver.seal("large")
    assert plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, pinned_lsn=pinned) is None
    assert driver.machine.snapshot().needs_lsn > pinned
    state = driver.machine.snapshot()
    assert facts_of(driver.reborn(state=state).machine) == facts_of(driver.machine)


def test_under_pressure_small_boxes_are_sealed_too_and_staged_ones_are_left() -> None:
    driver = Driver()
    driver.append("small", box="small")
    plan = plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, is_pressed=True)
    assert isinstance(plan, ToSeal) and plan.box.name == "small"
    driver.do(driver.write("staged", box="small"))
    pinned = driver.machine.lsn
    assert plan_seal(driver.machine, POLICY, now_ms=driver.now_ms, pinned_lsn=pinned) is None


def test_a_box_that_is_no_longer_due_is_passed_over() -> None:
    driver = filled(batches=4)
    driver.machine.due_records = 10
    driver.append("x")
    assert driver.machine.due
    driver.delete(13)
    assert plan_seal(driver.machine, POLICY, now_ms=0) is None and not driver.machine.due


# -- rewriting


def test_a_segment_a_third_dead_is_written_anew_without_its_dead(driver: Driver) -> None:
    assert plan_rewrite(driver.machine, POLICY) is None, "nothing is dead"
    driver.delete(tag="t1")
    before = driver.read(0)
    assert driver.rewrite(POLICY)
    (segment,) = driver.machine.segments()
    assert segment.total_count == segment.count == 12 and segment.serial == 2
    driver.forget()
    assert driver.read(0) == before
    assert not driver.rewrite(POLICY)
    assert facts_of(driver.reborn().machine) == facts_of(driver.machine)
    assert not driver.machine.boxes["b"].log.deleted_seqs


def test_a_segment_cut_by_a_floor_is_written_anew(driver: Driver) -> None:
    driver.delete(9)
    before = driver.read(0)
    assert driver.rewrite(POLICY)
    driver.forget()
    assert driver.read(0) == before
    (segment,) = driver.machine.segments()
    assert segment.first_seq == 9 and segment.front == 0


def test_small_neighbours_become_one_when_there_are_enough_of_them() -> None:
    driver = Driver()
    policy = SealPolicy(100, 100_000, 1)
    for number in range(4):
        driver.append(number, number)
        driver.seal()
        assert driver.rewrite(policy) is (number == 3)
    (segment,) = driver.machine.segments()
    assert segment.total_count == 8 and len(segment) == 4
    assert driver.seqs() == list(range(1, 9))


def test_neighbours_are_joined_only_while_they_fit() -> None:
    driver = Driver()
    for number in range(9):
        driver.append(*[number] * 2)
        driver.seal()
    assert driver.rewrite(SealPolicy(10, 100_000, 1))
    assert [segment.count for segment in driver.machine.segments()] == [10, 2, 2, 2, 2]
    assert driver.rewrite(SealPolicy(10, 100_000, 1))
    assert [segment.count for segment in driver.machine.segments()] == [10, 8]


def test_a_rewrite_is_given_up_when_something_dies_meanwhile(driver: Driver) -> None:
    driver.delete(tag="t1")
    plan = plan_rewrite(driver.machine, POLICY)
    assert plan is not None and plan.still_stands(driver.machine)
    driver.delete(4)
    assert not plan.still_stands(driver.machine)
    plan = plan_rewrite(driver.machine, POLICY)
    assert plan is not None and plan.still_stands(driver.machine)
    driver.ask(commands.DeleteBox("b"))
    assert not plan.still_stands(driver.machine)


# -- cold


def test_the_oldest_segments_of_a_box_are_moved_first_and_the_newest_stay() -> None:
    driver = Driver()
    for _ in range(4):
        driver.append("x" * 50, "y" * 50)
        driver.seal()
    for expected in (1, 2):
        found = plan_move(driver.machine, HotPolicy(2, 0))
        assert found is not None and found[1].serial == expected
        driver.commit(changes.SegmentMoved(found[0].generation, found[1].serial))
    assert plan_move(driver.machine, HotPolicy(2, 0)) is None and not driver.machine.movable
    assert [segment.is_cold for segment in driver.machine.segments()] == [True, True, False, False]
    again = driver.reborn(state=driver.machine.snapshot()).machine
    assert facts_of(again) == facts_of(driver.machine)


def test_bytes_to_be_kept_here_keep_segments_here() -> None:
    driver = Driver()
    for _ in range(4):
        driver.append("x" * 1_000)
        driver.seal()
    assert plan_move(driver.machine, HotPolicy(1, 10_000)) is None
    driver.append("x" * 1_000)
    driver.seal()
    assert plan_move(driver.machine, HotPolicy(1, 2_000)) is not None


def test_a_cold_segment_is_not_written_anew(driver: Driver) -> None:
    driver.commit(changes.SegmentMoved(driver.machine.boxes["b"].generation, 1))
    driver.delete(tag="t1")
    driver.delete(9)
    assert not driver.rewrite(POLICY)


# -- compaction


def test_a_box_is_compacted_when_half_of_it_is_new_or_it_is_quiet() -> None:
    driver = Driver()
    driver.put(compact="tag")
    driver.append(*({"data": at, "tag": "t"} for at in range(10)))
    box = driver.machine.boxes["b"]
    assert plan_compaction(driver.machine, now_ms=driver.now_ms) is box
    box.volatile.compacted_seq = 8
    assert plan_compaction(driver.machine, now_ms=driver.now_ms) is None
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is box
    box.volatile.compacted_seq = 10
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is None
    assert not driver.machine.compactable
    driver.append("x")
    driver.put(compact="none")
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is None
    driver.put(compact="tag")
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is box


def test_a_box_whose_new_record_is_on_its_way_is_not_forgotten_by_compaction() -> None:
    driver = Driver()
    driver.put(compact="tag")
    driver.append(*({"data": at, "tag": "t"} for at in range(4)))
    box = driver.machine.boxes["b"]
    driver.machine.handle(driver.write({"data": 4, "tag": "t"}), driver.now_ms)
    box.volatile.compacted_seq = box.log.visible_seq  # compaction went by when only four could be seen
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is None
    driver.machine.on_durable(driver.machine.lsn)
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is box


def test_a_box_whose_last_record_is_deleted_or_lost_is_compacted_once() -> None:
    driver = Driver()
    driver.put(compact="tag")
    driver.append(*({"data": at, "tag": "t"} for at in range(4)))
    driver.append({"data": "last", "tag": "u"})
    driver.delete(tag="u")
    driver.sync()
    box = driver.machine.boxes["b"]
    quiet_ms = driver.now_ms + 10_000
    assert plan_compaction(driver.machine, now_ms=quiet_ms) is box
    source = copy_input(box, durable_lsn=driver.machine.durable_lsn)
    assert source.upto_seq == 5 and source.tail[-1].last_seq == 4
    box.volatile.compacted_seq = source.upto_seq
    assert plan_compaction(driver.machine, now_ms=quiet_ms) is None and not driver.machine.compactable


def test_a_box_whose_new_record_is_visible_and_not_durable_is_not_compacted_again_and_again() -> None:
    driver = Driver()
    driver.put(compact="tag", durability="disk")
    driver.append(*({"data": at, "tag": "t"} for at in range(4)))
    driver.sync()
    driver.do(driver.write({"data": 4, "tag": "t"}))
    driver.logged()
    box = driver.machine.boxes["b"]
    assert box.log.visible_seq == 5
    source = copy_input(box, durable_lsn=driver.machine.durable_lsn)
    assert source.upto_seq == 4
    box.volatile.compacted_seq = source.upto_seq
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is None
    driver.sync()
    assert plan_compaction(driver.machine, now_ms=driver.now_ms + 10_000) is box


# -- changing the class in place


@pytest.mark.parametrize("seals", [False, True])
@pytest.mark.parametrize("target", ["disk", "fsync"])
def test_a_memory_box_can_be_stored_with_all_it_holds(target: str, seals: bool) -> None:
    driver = Driver()
    driver.put(durability="fsync" if seals else "memory")
    driver.append(1, {"data": 2, "tag": "t"}, 3)
    if seals:
        sealed(driver)
        driver.put(durability="memory")
    driver.append(4, idempotency_key="k")
    driver.append(5, 6)
    driver.delete(2)
    driver.delete(tag="t")
    driver.ask(commands.SetFence("b", "f"))
    before = driver.read(0)
    driver.put(durability=target)
    assert driver.read(0) == before
    for again in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        again.start("boot")
        assert again.read(0) == before
        assert again.append(9, fencing_token="f", idempotency_key="k").deduped
        assert again.append(9, fencing_token="f").first_seq == 7


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_a_change_to_stored_that_is_cut_off_leaves_an_empty_memory_box(kind: str) -> None:
    driver = Driver()
    driver.put(durability="memory", type=kind)
    driver.append(1)
    driver.append(2)
    if kind == "queue":
        for _ in range(2):  # the log hears of deliveries from the second on
            driver.ask(queues.Claim(box="b", node="w", max=2))
            driver.ask(queues.Nack(box="b", node="w", seqs=[1, 2]))
    start = driver.machine.lsn
    driver.put(durability="fsync")
    for lsn in range(start, driver.machine.lsn):
        again = Driver(machines.replayed(driver.log[:lsn]))
        again.log = driver.log[:lsn]
        again.machine.check()
        again.start("boot")
        assert again.state().config.durability == "memory" and again.state().head_seq == 0
    assert driver.reborn().seqs() == [1, 2]


def test_a_stored_box_can_go_to_memory_and_is_empty_after_a_restart() -> None:
    driver = Driver()
    driver.put(durability="fsync")
    driver.do(driver.write("staged"))
    driver.do(commands.PutBox("b", machines.patch(durability="memory")))
    driver.do(driver.write("in memory"))
    assert driver.seqs() == [1, 2] and not driver.machine.unsealed_boxes
    again = driver.reborn()
    again.start("boot")
    assert again.state().head_seq == 0 and again.state().config.durability == "memory"


def test_segments_and_batches_say_what_they_are(driver: Driver) -> None:
    (segment,) = driver.machine.segments()
    assert "18 live, 0 of 6 batches loaded" in repr(segment)
    assert "1..3 of" in repr(segment.batch(0))
    assert isinstance(segment, Segment) and len(segment.to_bytes()) == 32 * 6
    assert "6 batches" in repr(filled().machine.boxes["b"].log.tail)


def test_a_batch_that_is_dead_inside_a_later_segment_stays_dead_from_restart_to_restart() -> None:
    driver = sealed(filled(batches=2))
    driver.append({"data": "dead", "tag": "other"})
    driver.append({"data": "alive", "tag": "t9"})
    assert driver.seal()
    driver.delete(tag="other")
    expected = driver.read(0)
    for _ in range(3):
        driver = driver.reborn(state=driver.machine.snapshot())
        assert driver.read(0) == expected
        assert driver.state().count == 7


# -- what dies in segments, and around them


def by_batch(*tags: str, size: int = 3, **config: Any) -> Driver:
    """A batch for each tag."""
    driver = Driver()
    driver.put(durability="fsync", **config)
    for tag in tags:
        driver.append(*({"data": at, "tag": tag} for at in range(size)))
        driver.now_ms += 10
    return driver


def test_a_batch_with_nothing_live_is_not_sealed() -> None:
    driver = by_batch("a", "b", "c")
    driver.delete(tag="b")
    sealed(driver)
    (segment,) = driver.machine.segments()
    assert list(segment.first_seqs) == [1, 7]
    assert driver.seqs() == [1, 2, 3, 7, 8, 9]
    assert facts_of(driver.reborn(state=driver.machine.snapshot()).machine) == facts_of(driver.machine)


def test_a_batch_that_dies_while_its_neighbours_are_sealed_is_dead_and_they_are_not() -> None:
    driver = by_batch("a", "b", "c")
    box = driver.machine.boxes["b"]
    segment = machines.SHELF.write(box.generation, 1, list(box.log.tail))
    driver.delete(tag="b")
    driver.commit(changes.SegmentSealed(box.generation, 1, segment.to_bytes()))
    driver.forget()
    assert driver.seqs() == [1, 2, 3, 7, 8, 9]
    assert facts_of(driver.reborn().machine) == facts_of(driver.machine)


def test_a_trim_up_to_where_all_is_dead_takes_the_segment_with_it() -> None:
    driver = sealed(by_batch("a", "b"))
    driver.append("tail")
    driver.delete(tag="b")
    driver.delete(4)
    assert list(driver.machine.segments()) == [] and driver.seqs() == [7]


def test_an_eviction_past_a_dead_batch_says_how_new_the_newest_lost_record_was() -> None:
    driver = sealed(by_batch("a", "b"))
    driver.append({"data": 1, "tag": "c"}, {"data": 2, "tag": "c"})
    driver.append("d")
    sealed(driver)
    driver.delete(tag="c")
    driver.put(cap_records=1)
    assert driver.seqs() == [9]
    assert driver.machine.boxes["b"].log.evicted_ts == 1_010


@pytest.mark.parametrize("by", ["cap_records", "cap_bytes"])
@pytest.mark.parametrize("left", range(1, 12))
def test_a_cap_passes_over_whole_segments(by: str, left: int) -> None:
    plain, other = Driver(), Driver()
    for driver, seals in ((plain, False), (other, True)):
        driver.put(durability="fsync")
        for at in range(4):
            driver.append(at, at, at)
            if seals:
                sealed(driver)
        size = driver.state().bytes // 12
        driver.put(**{by: left if by == "cap_records" else left * size})
    assert by == "cap_bytes" or len(other.seqs()) == left
    assert other.read(0) == plain.read(0) and other.state() == plain.state()


def test_a_write_that_trims_and_is_over_the_cap_evicts_what_the_trim_has_left() -> None:
    plain, other = Driver(), Driver()
    for driver, seals in ((plain, False), (other, True)):
        driver.put(durability="fsync", cap_records=12)
        for _ in range(4):
            driver.append(1, 2, 3)
        if seals:
            sealed(driver)
        driver.append(*range(8), trim_before_seq=3)
        driver.append(*range(11), trim_before_seq=12)
    assert other.read(0) == plain.read(0) and other.state() == plain.state()
    assert other.state().count == 12


def test_a_payload_is_noted_as_used_until_somebody_asks(driver: Driver) -> None:
    driver.read(0, limit=1)
    (segment,) = driver.machine.segments()
    assert segment.was_used(0) and not segment.was_used(0) and not segment.was_used(1)


def test_boxes_in_memory_are_left_alone_by_upkeep() -> None:
    driver = sealed(filled(batches=4))
    driver.append(*({"data": at, "tag": "t0"} for at in range(20)))
    driver.machine.due_records = 10
    driver.append("due")
    driver.put(durability="memory")
    driver.delete(tag="t0")
    machine = driver.machine
    assert plan_rewrite(machine, POLICY) is None
    assert plan_move(machine, HotPolicy(0, 0)) is None
    assert plan_seal(machine, POLICY, now_ms=10**9, is_pressed=True) is None
    assert machine.due == {}


def test_a_rewrite_is_given_up_when_the_box_went_to_memory_meanwhile(driver: Driver) -> None:
    driver.delete(tag="t0")
    plan = plan_rewrite(driver.machine, POLICY)
    assert plan is not None and plan.still_stands(driver.machine)
    driver.put(durability="memory")
    assert not plan.still_stands(driver.machine)


def test_what_upkeep_does_to_a_box_in_memory_is_not_logged() -> None:
    driver = Driver()
    driver.put(durability="memory")
    driver.append({"data": 1, "tag": "t"}, {"data": 2, "tag": "t"})
    box = driver.machine.boxes["b"]
    change = box.plan_deletes(BitMap64([1]), SizedSeqs.of({}), driver.now_ms)
    assert driver.machine.upkeep(change).changes == []
    assert driver.seqs() == [2]
    assert driver.reborn().machine.boxes["b"].log.count == 0


def test_a_restart_leaves_no_work_to_do_for_boxes_that_begin_anew() -> None:
    driver = sealed(filled(compact="tag"))
    driver.machine.due_records = 1
    driver.append("due")
    driver.put(durability="memory")
    driver.start("another life")
    machine = driver.machine
    assert machine.due == machine.boxes_with_dead_records == machine.movable == machine.compactable == {}


def test_a_look_for_work_ends_after_so_many_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for box in ("one", "two"):
        driver.put(box, durability="fsync")
        driver.append("x", box=box)
        driver.seal(box)
    monkeypatch.setattr("shard.core.boxes.upkeep._LOOK_MAX", 1)
    for _ in range(2):
        assert plan_rewrite(driver.machine, POLICY) is None
        assert plan_move(driver.machine, HotPolicy(4, 0)) is None
    assert driver.machine.boxes_with_dead_records == driver.machine.movable == {}


def test_a_due_box_that_is_still_on_its_way_to_the_disk_is_not_in_the_way_of_others() -> None:
    driver = Driver()
    driver.machine.due_records = 2
    for box in ("staged", "durable"):
        driver.put(box, durability="fsync")
    driver.append(1, box="staged")
    driver.append(1, 2, box="durable")
    driver.delete(2, box="staged")
    driver.do(driver.write(2, 3, box="staged"))
    machine = driver.machine
    machine.due = {box.generation: box for box in (machine.boxes["staged"], machine.boxes["durable"])}
    plan = plan_seal(machine, SealPolicy(2, 1 << 20, 10**9), now_ms=0)
    assert isinstance(plan, ToSeal) and plan.box.name == "durable"


def test_a_dented_segment_that_does_not_fit_to_its_small_neighbour_is_written_anew_alone() -> None:
    driver = Driver()
    driver.put(durability="fsync")
    driver.append("small")
    driver.seal()
    driver.append(*({"data": at, "tag": str(at % 2)} for at in range(14)))
    driver.seal()
    driver.delete(tag="0")
    plan = plan_rewrite(driver.machine, SealPolicy(7, 100_000, 1))
    assert plan is not None and [part.segment.serial for part in plan.parts] == [2]


def test_a_snapshot_of_a_tail_with_a_dead_batch_in_it_brings_back_the_others() -> None:
    driver = by_batch("a", "b", "c")
    driver.delete(tag="b")
    again = driver.reborn(state=driver.machine.snapshot())
    assert again.seqs() == [1, 2, 3, 7, 8, 9] and facts_of(again.machine) == facts_of(driver.machine)


def test_a_memory_box_whose_batches_are_dead_is_stored_without_them() -> None:
    driver = Driver()
    driver.put(durability="memory")
    for tag in ("a", "b", "c"):
        driver.append({"data": tag, "tag": tag})
    driver.delete(tag="b")
    driver.put(durability="fsync")
    assert driver.seqs() == [1, 3] == driver.reborn().seqs()
    again = driver.reborn(state=driver.machine.snapshot())
    assert again.seqs() == [1, 3]


def test_a_box_that_is_compacted_is_looked_at_after_a_restart() -> None:
    driver = filled(compact="tag")
    again = driver.reborn(state=driver.machine.snapshot())
    assert plan_compaction(again.machine, now_ms=driver.now_ms) is again.machine.boxes["b"]


def test_what_a_command_needs_or_is_refused_with_holds_on_to_nothing_else(driver: Driver) -> None:
    """A traceback would hold frames, and they what they looked at, until the garbage is collected."""
    machine = driver.machine
    (missing,) = machine.handle(commands.ReadBox(box="b"), driver.now_ms).needs
    (tags,) = machine.handle(commands.DeleteRecords("b", None, commands.Match("t0")), driver.now_ms).needs
    refusal = machine.handle(commands.GetState("another"), driver.now_ms).reply
    for each in (missing, tags, refusal):
        assert isinstance(each, Exception)
        assert each.__traceback__ is None and each.__context__ is None


def test_a_segment_whose_payloads_are_forgotten_has_no_room_left_for_them(driver: Driver) -> None:
    (segment,) = driver.machine.segments()
    driver.read(0)
    assert sys.getsizeof(segment._payloads) > sys.getsizeof({})
    driver.forget()
    assert sys.getsizeof(segment._payloads) == sys.getsizeof({})
    assert sys.getsizeof(segment._recently_used) == sys.getsizeof(set())
