"""Goal: a delete by tag is all or nothing, whatever it finds and whatever happens meanwhile.

Method: budgets of a few records, so that every delete takes many steps; between the steps others read, write,
delete, seal, rewrite and take snapshots. The log is cut at every place, as a crash would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import box_log as log_module
from shard.core.boxes import deletion
from shard.core.boxes.sealed import TagsNotLoaded
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.boxes.upkeep import SealPolicy
from shard.core.outcome import Outcome
from streams.protocol.errors import BoxNotFound
from streams.protocol.messages import bulk, commands, queues
from streams.protocol.payloads.packed import pack
from tests.support import machines
from tests.support.machines import Driver, facts_of, live_texts, put_of, sampled

PREFIX = commands.Match("t-", is_prefix=True)


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOOKUP_RECORDS", "STEP_BATCHES", "STEP_RECORDS", "STEP_UNSEALED"):
            patch.setattr(deletion, name, 3)
        patch.setattr(log_module, "SETTLE_BATCHES", 2)
        yield


def filled(batches: int = 20, sealed: tuple[int, ...] = (4, 9, 14), **config: object) -> Driver:
    """Batches of three records, the first and the last of which match; some are sealed."""
    driver = Driver()
    driver.put(**config)
    for number in range(batches):
        driver.append({"data": number, "tag": "t-1"}, {"data": number, "tag": "u"}, {"data": 0, "tag": "t-2"})
        if number in sealed:
            driver.seal()
    return driver


def stepped(
    driver: Driver, command: commands.DeleteRecords, between: Callable[[int], object] = lambda step: None
) -> tuple[Outcome, int]:
    """Handles a delete, and does something else after each step. Returns the last outcome and the steps."""
    for step in range(1, 1000):
        outcome = driver.keep(driver.machine.handle(command, driver.now_ms))
        if not outcome.needs:
            driver.sync()
            return outcome, step
        assert outcome.reply is None
        machines.SHELF.load(outcome.needs[0], driver.machine)
        between(step)
    raise AssertionError("the delete never ends")


def all_seqs(driver: Driver) -> list[int]:
    return sorted(live_texts(driver.machine, "b"))


def size_of(driver: Driver, seqs: list[int]) -> int:
    log = driver.machine.boxes["b"].log
    spans = [(seq, log.span_at(seq)) for seq in seqs]
    return sum(span.size(seq - span.first_seq, seq - span.first_seq) for seq, span in spans if span)


def test_a_delete_by_tag_is_one_change_and_readers_see_all_of_it_or_nothing() -> None:
    driver = filled()
    before, after = all_seqs(driver), list(range(2, 61, 3))
    seen = []
    first_lsn = driver.machine.lsn

    def look(step: int) -> None:
        driver.sync()
        seen.append(driver.seqs(limit=1000))
        assert driver.state().count == len(seen[-1])

    outcome, steps = stepped(driver, commands.DeleteRecords("b", None, PREFIX), look)
    assert isinstance(outcome.reply, commands.DeleteRecordsReply) and outcome.reply.deleted == 40
    assert steps > 12 and before in seen and after in seen and all(found in (before, after) for found in seen)
    made = [machines.decoded(frame) for frame in driver.log[first_lsn:]]
    assert [type(change) for change in made] == [changes.RecordsDeleted]
    for lsn in range(first_lsn, driver.machine.lsn + 1):
        assert all_seqs(driver.reborn(lsn)) == (before if lsn == first_lsn else after)
    assert facts_of(driver.reborn().machine) == facts_of(driver.machine)


def test_a_delete_by_tag_takes_what_matched_when_it_began() -> None:
    driver = filled()

    def write(step: int) -> None:
        """A transaction does not wait for the delete, as appends do; nor does sealing."""
        if step % 5 == 0:
            put = put_of(bulk.Txn("w", step, "q"), "p", 0, pack(["b"], [1], [b"1"], tag=[b"t-1"]))
            driver.ask(put)
            driver.ask(bulk.TxnCommit(put.txn, [("p", 1)]))
        if step in (7, 20):
            driver.seal()

    outcome, steps = stepped(driver, commands.DeleteRecords("b", None, PREFIX), write)
    assert isinstance(outcome.reply, commands.DeleteRecordsReply) and outcome.reply.deleted == 40
    assert all_seqs(driver) == [*range(2, 61, 3), *range(61, 61 + (steps - 1) // 5)]


def test_a_delete_by_tag_ends_where_it_was_told_to() -> None:
    driver = Driver()
    for number in range(12):
        driver.append({"data": number, "tag": "t"})
        driver.seal()
    assert driver.delete(8, "t").deleted == 7
    assert driver.delete(8, "t").deleted == 0
    assert driver.seqs() == [8, 9, 10, 11, 12]
    assert driver.delete(tag="t").deleted == 5
    assert driver.state().count == 0


def test_what_others_delete_meanwhile_is_not_counted_twice() -> None:
    driver = filled()

    def delete(step: int) -> None:
        if step == 12:  # as compaction does: some of it sealed, some of it not
            box = driver.machine.boxes["b"]
            gone = box.plan_deletes(BitMap64([1, 4, 5, 31, 58]), SizedSeqs.of({}), driver.now_ms)
            driver.commit(gone)
        elif step == 14:
            driver.commit(driver.machine.boxes["b"].plan_eviction(10, "ttl", driver.now_ms))

    outcome, _ = stepped(driver, commands.DeleteRecords("b", None, PREFIX), delete)
    assert isinstance(outcome.reply, commands.DeleteRecordsReply) and outcome.reply.deleted == 40 - 6 - 2
    assert all_seqs(driver) == list(range(11, 61, 3))


def test_a_segment_that_changes_all_the_time_does_not_put_the_delete_off_for_ever() -> None:
    driver = filled(batches=300, sealed=tuple(range(99, 300, 100)))

    def trim(step: int) -> None:
        if driver.machine.boxes["b"].volatile.deletion is not None:
            driver.commit(driver.machine.boxes["b"].plan_eviction(step + 1, "ttl", driver.now_ms))

    _, steps = stepped(driver, commands.DeleteRecords("b", None, PREFIX), trim)
    assert steps < 20 and all(seq % 3 == 2 for seq in all_seqs(driver))


def test_a_delete_that_cannot_be_finished_has_deleted_nothing_and_keeps_nothing() -> None:
    driver = filled()
    before = all_seqs(driver)
    command = commands.DeleteRecords("b", None, PREFIX)
    for _ in range(6):
        outcome = driver.keep(driver.machine.handle(command, driver.now_ms))
        machines.SHELF.load(outcome.needs[0], driver.machine)
    driver.machine.give_up(commands.DeleteRecords("b", None, PREFIX))
    assert driver.machine.boxes["b"].volatile.deletion is not None, "another delete is under way"
    driver.machine.give_up(command)
    box = driver.machine.boxes["b"]
    assert box.volatile.deletion is None and not box.volatile.tag_lookups and all_seqs(driver) == before
    assert driver.delete(tag="t-*").deleted == 40


def test_a_box_that_is_gone_when_the_delete_goes_on_is_not_found() -> None:
    driver = filled()
    command = commands.DeleteRecords("b", None, PREFIX)
    outcome = driver.keep(driver.machine.handle(command, driver.now_ms))
    assert isinstance(outcome.needs[0], TagsNotLoaded)
    driver.commit(changes.BoxDeleted(driver.machine.boxes["b"].generation))
    driver.machine.give_up(command)
    assert isinstance(driver.do(command).reply, BoxNotFound)
    driver.append({"data": 1, "tag": "t-"})
    assert stepped(driver, command)[0].reply == commands.DeleteRecordsReply("b", 1, 2, 1, 0, 0)


@pytest.mark.parametrize("into", ["memory", "fsync"])
def test_a_delete_goes_on_in_a_box_whose_class_has_changed(into: str) -> None:
    driver = filled()

    def change(step: int) -> None:
        if step == 10:
            driver.put(durability=into)

    outcome, _ = stepped(driver, commands.DeleteRecords("b", None, PREFIX), change)
    assert isinstance(outcome.reply, commands.DeleteRecordsReply) and outcome.reply.deleted == 40
    assert driver.seqs(limit=1000) == list(range(2, 61, 3))


def test_a_leased_job_that_matches_is_gone_with_the_others() -> None:
    driver = filled(type="queue")

    def claim(step: int) -> None:
        if step == 10:
            driver.ask(queues.Claim(box="b", node="w", max=5))

    outcome, _ = stepped(driver, commands.DeleteRecords("b", None, PREFIX), claim)
    queue = driver.machine.boxes["b"].queue
    assert queue is not None and queue.in_flight == 2 and sorted(queue.jobs) == [2, 5]
    assert isinstance(outcome.reply, commands.DeleteRecordsReply) and outcome.reply.count == 20


def test_a_snapshot_between_the_change_and_its_last_step_has_all_of_the_delete() -> None:
    driver = filled(batches=40, sealed=(9, 19, 29))
    driver.append("keep")
    command = commands.DeleteRecords("b", None, PREFIX)
    made: list[tuple[int, changes.Change]] = []
    while not made:  # without the checks of the driver, which work everything out
        outcome = driver.machine.handle(command, driver.now_ms)
        made += outcome.changes
        machines.SHELF.load(outcome.needs[0], driver.machine)
    log = driver.machine.boxes["b"].log
    assert len(log._unsettled_segments) > 1, "something is left for later"
    capture = driver.machine.begin_snapshot()
    steps = 0
    while capture.step(32):
        steps += 1
    driver.machine.end_snapshot(capture)
    assert steps == 2 and log.is_settled
    driver.keep(Outcome(made, None))
    again = driver.reborn(state=capture.state())
    assert all_seqs(again) == all_seqs(driver) == [*range(2, 121, 3), 121]
    assert facts_of(again.machine) == facts_of(driver.machine)


def test_what_is_left_for_later_is_worked_out_where_it_is_needed() -> None:
    driver = filled(batches=40, sealed=(9, 19, 29, 39))
    machine, box = driver.machine, driver.machine.boxes["b"]
    command = commands.DeleteRecords("b", None, commands.Match("t-1"))
    while box.log.count == 120:  # without the checks of the driver, which work everything out
        outcome = machine.handle(command, driver.now_ms)
        machines.SHELF.load(outcome.needs[0], machine)
    _, second, third, fourth = box.log.segments
    assert [bool(segment._later) for segment in box.log.segments] == [False, True, True, True]
    count, size = box.log.live_before(47)
    assert not second._later
    assert third._later and third.count == 20
    live = [seq for seq in range(1, 47) if seq % 3 != 1]
    assert (count, size) == (30, size_of(driver, live))
    machine.apply(box.plan_trim(83, driver.now_ms), machine.lsn + 1)
    assert box.log.segments == [third, fourth] and not third._later and third.count == 6
    machine.check()


@given(seed=st.integers(0, 2**32))
@sampled(60)
def test_a_delete_by_tag_is_exact_whatever_happens_meanwhile(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver()
    kind: dict[str, object] = rng.choice(({}, {"type": "queue", "leases_durable": True}))
    driver.put(durability=rng.choice(("disk", "fsync", "memory")), **kind)
    tags = ("t-1", "t-2", "u", None)
    for _ in range(rng.randint(1, 30)):
        driver.append(*({"data": 1, "tag": rng.choice(tags)} for _ in range(rng.choice((1, 2, 5)))))
        if rng.random() < 0.3:
            driver.seal(batches=rng.choice((1, 3, 100)))
    box = driver.machine.boxes["b"]
    tagged = {
        seq
        for span in box.log.spans()
        for seq, tag in enumerate(machines.payload_of(span).tag_list() or (), span.first_seq)
        if tag.startswith("t-")
    }
    before_seq = rng.choice((None, rng.randint(1, box.log.head_seq + 2)))
    wanted = {seq for seq in tagged if before_seq is None or seq < before_seq}
    deleted_by_others: set[int] = set()

    def disturb(step: int) -> None:
        live = set(all_seqs(driver))
        kind = rng.randrange(7)
        if (
            kind == 0
            and live
            and box.volatile.deletion is not None
            and box.volatile.deletion.deleted_count is None
        ):
            gone = BitMap64(rng.sample(sorted(live), min(len(live), rng.randint(1, 4))))
            change = box.plan_deletes(gone, SizedSeqs.of({}), driver.now_ms)
            driver.keep(driver.machine.upkeep(change))
            deleted_by_others.update(gone)
        elif kind == 1:
            driver.seal(batches=rng.choice((1, 3)))
        elif kind == 2:
            driver.rewrite(SealPolicy(rng.choice((4, 20)), 100_000, 1))
        elif kind == 3:
            driver.forget()
            machines.SHELF.load_all(driver.machine, box.generation)
        elif kind == 4 and box.queue is not None:
            driver.ask(queues.Claim(box="b", node="w", max=2))
        elif kind == 5:
            driver.machine.snapshot()

    machines.SHELF.load_all(driver.machine, box.generation)
    before = set(all_seqs(driver))
    command = commands.DeleteRecords("b", before_seq, PREFIX)
    outcome, _ = stepped(driver, command, disturb)
    assert isinstance(outcome.reply, commands.DeleteRecordsReply)
    assert outcome.reply.deleted == len((wanted & before) - deleted_by_others)
    assert set(all_seqs(driver)) == before - wanted - deleted_by_others
    if not box.is_memory:
        assert facts_of(driver.reborn().machine) == facts_of(driver.machine)
        assert facts_of(driver.reborn(state=driver.machine.snapshot()).machine) == facts_of(driver.machine)
