"""Goal: a snapshot that is taken in steps is one of the moment it began, whatever happens meanwhile.

Method: the state at the first step is kept; random commands and upkeep go on between the steps; what comes
out is compared with what was kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.core.queues import job as job_module
from shard.core.queues import queue as queue_module
from shard.core.snapshot_facts import ShardState
from streams.protocol.messages import commands
from tests.support.jobs import QueueDriver
from tests.support.machines import Driver, facts_of, random_command, sampled


def as_facts(state: ShardState) -> object:
    boxes = sorted(state.boxes, key=lambda facts: facts.name)
    for facts in boxes:
        if facts.queue is not None:  # of large ones they are in another order
            facts.queue.jobs = sorted(facts.queue.jobs)
    return msgspec.to_builtins(msgspec.structs.replace(state, boxes=boxes), builtin_types=(bytes,))


@pytest.fixture(autouse=True, scope="module")
def few_jobs_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_module, "JOBS_AT_ONCE", 2)
        patch.setattr(job_module, "JOBS_AT_ONCE", 2)
        yield


@sampled(40)
@given(seed=st.integers(0, 2**32))
def test_a_snapshot_taken_in_steps_is_that_of_its_first_moment(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver()
    driver.start("boot")
    for number in range(30):
        driver.do(random_command(rng, driver, number))
        driver.some_upkeep(rng)
        driver.sync()
    expected, before = driver.machine.snapshot(), facts_of(driver.machine)
    log = list(driver.log)
    capture = driver.machine.begin_snapshot()
    for number in range(30, 60):
        driver.do(random_command(rng, driver, number))
        driver.now_ms += rng.randrange(40)
        if rng.random() < 0.3:
            driver.tick()
        driver.sync()
        driver.some_upkeep(rng)
        if rng.random() < 0.1:
            capture.step(1)
    while capture.step(1):
        pass
    driver.machine.end_snapshot(capture)
    assert as_facts(capture.state()) == as_facts(expected)
    again = Driver(driver.machine, driver.now_ms)
    again.log = log
    assert facts_of(again.reborn(expected.lsn, capture.state()).machine) == before


def test_the_jobs_of_a_large_queue_are_taken_in_steps() -> None:
    driver = QueueDriver()
    driver.put(type="queue", durability="fsync", leases_durable=True)
    driver.append(*range(9))
    driver.claim(max=7)
    driver.nack(1, delay_ms=500)
    expected = driver.machine.snapshot()
    capture = driver.machine.begin_snapshot()
    steps = 0
    while capture.step(32):
        steps += 1
        driver.ack(steps + 1)
        driver.claim(max=1)
    driver.machine.end_snapshot(capture)
    assert steps == 4 and as_facts(capture.state()) == as_facts(expected)
    (box,) = capture.state().boxes
    assert box.queue is not None and len(box.queue.jobs) == 7 and box.queue.fresh_seq == 7


def test_boxes_that_are_made_or_deleted_meanwhile_do_not_change_the_snapshot() -> None:
    driver = Driver()
    driver.put("stays", durability="fsync")
    driver.put("goes", durability="fsync")
    capture = driver.machine.begin_snapshot()
    assert repr(capture) == "<Capture at lsn 2, 2 boxes left>"
    driver.put("comes", durability="fsync")
    driver.append("x", box="comes")
    driver.append("x", box="stays")
    driver.do(commands.DeleteBox("goes"))
    assert not capture.step(100)
    driver.machine.end_snapshot(capture)
    assert sorted((facts.name, facts.head_seq) for facts in capture.state().boxes) == [
        ("goes", 0),
        ("stays", 0),
    ]


def test_only_a_whole_snapshot_is_given_out() -> None:
    driver = Driver()
    driver.put()
    capture = driver.machine.begin_snapshot()
    with pytest.raises(AssertionError):
        capture.state()
    driver.machine.end_snapshot(capture)
    assert driver.machine.snapshot().lsn == capture.lsn


def test_two_that_are_taken_at_once_are_each_of_their_own_moment() -> None:
    driver = Driver()
    driver.append("one", "two")
    first = driver.machine.begin_snapshot(with_batches=True)
    driver.append("three")
    second = driver.machine.begin_snapshot(with_batches=True)
    driver.delete(before_seq=3)
    driver.append("four")
    for capture, head_seq, counts in ((first, 2, [2]), (second, 3, [2, 1])):
        assert not capture.step(1)
        driver.machine.end_snapshot(capture)
        (facts,) = capture.state().boxes
        (tail,) = capture.tails.values()
        assert (facts.head_seq, facts.live_count) == (head_seq, head_seq)
        assert [batch.count for batch in tail] == counts and len(facts.batches) == 8 * len(counts)


def test_a_snapshot_needs_the_log_from_the_first_frame_of_any_batch() -> None:
    """Rows of a commit are logged again behind what was appended after them."""
    driver = Driver()
    driver.put("b", durability="fsync")
    driver.append(1, box="b")
    driver.append(2, box="b")
    driver.sync()
    tail = driver.machine.boxes["b"].log.tail
    first, second = tail.batches
    tail.relog(0, second.lsn + 1)
    assert first.lsn > second.lsn
    assert driver.machine.snapshot().needs_lsn == tail.oldest_lsn == second.lsn
