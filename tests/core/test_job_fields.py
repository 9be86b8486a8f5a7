"""Goal: delayed jobs, priorities, keys and backoff do what §21 and §23 say, and survive crashes and sealing.

Method: the machine alone, with both clocks in the test's hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from shard.core.queues import backoff
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import commands, queues
from streams.protocol.model.boxes import RetryBackoff
from streams.protocol.model.job_fields import JobFields, fields_of, join
from streams.protocol.model.records import Batch
from tests.support.jobs import QueueDriver
from tests.support.machines import facts_of, recovered


@pytest.fixture
def driver() -> QueueDriver:
    driver = QueueDriver(now_ms=1_000_000)
    driver.start("this-boot")
    driver.put(type="queue", durability="fsync", lease_ms=1000)
    return driver


def seqs_of(jobs: list[dict[str, Any]]) -> list[int]:
    return [job["$seq"] for job in jobs]


def job(data: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"data": data, **fields}


def next_life(driver: QueueDriver, *, is_orderly: bool) -> QueueDriver:
    other = driver.after_restart() if is_orderly else driver.after_kill()
    other.machine.wall_ahead_ms = driver.machine.wall_ahead_ms
    assert facts_of(recovered(other.log)) == facts_of(other.machine)
    return other


# -- time


def test_a_delayed_job_is_live_and_counted_and_claimable_at_its_time_and_not_before(
    driver: QueueDriver,
) -> None:
    driver.append(job(delay_ms=500), job(deliver_at=1_000_300), job())
    assert driver.totals() == (1, 0, 2) and driver.seqs() == [1, 2, 3]
    assert seqs_of(driver.claim(max=9)) == [3]
    driver.now_ms += 299
    assert driver.claim(max=9) == []
    driver.now_ms += 1
    (found,) = driver.claim(max=9)
    assert (found["$seq"], found["$deliver_at"]) == (2, 1_000_300)
    driver.now_ms += 200
    assert seqs_of(driver.claim(max=9)) == [1]


def test_a_waiting_claim_is_woken_when_the_time_of_a_job_has_come(driver: QueueDriver) -> None:
    driver.append(job(delay_ms=500))
    claim = queues.Claim(box="b", node="w", wait_ms=9_000)
    assert driver.do(claim).reply is None
    assert driver.machine.next_deadline_ms() == 1_000_500
    driver.now_ms = 1_000_500
    assert "b" in driver.tick().wakes
    assert seqs_of(driver.claim()) == [1]


@pytest.mark.parametrize("is_orderly", [True, False])
def test_delays_hold_over_a_restart(driver: QueueDriver, is_orderly: bool) -> None:
    driver.append(job(delay_ms=500), job(delay_ms=100))
    driver.seal()
    driver = next_life(driver, is_orderly=is_orderly)
    assert driver.claim(max=9) == []
    driver.now_ms += 100
    assert seqs_of(driver.claim(max=9)) == [2]
    driver = next_life(driver, is_orderly=is_orderly)
    driver.now_ms += 2_000
    assert seqs_of(driver.claim(max=9)) == [1, 2]


def test_steps_of_the_system_clock_move_delayed_jobs_and_no_leases(driver: QueueDriver) -> None:
    driver.append(job(delay_ms=500), job())
    assert seqs_of(driver.claim()) == [2]
    driver.machine.wall_ahead_ms = -10_000  # the system clock is set back
    driver.now_ms += 900
    assert driver.claim() == [] and driver.totals() == (0, 1, 1)
    driver.machine.wall_ahead_ms = 3_600_000  # and forward
    assert "b" in driver.tick().wakes
    assert driver.totals() == (1, 1, 0) and seqs_of(driver.claim()) == [1]


def test_a_time_of_the_past_is_none_and_one_too_far_ahead_is_refused(driver: QueueDriver) -> None:
    driver.append(job(deliver_at=5), job(delay_ms=0))
    assert seqs_of(driver.claim(max=9)) == [1, 2]
    for fields in ({"delay_ms": 10**12}, {"deliver_at": 10**13}, {"delay_ms": 5, "deliver_at": 2_000_000}):
        with pytest.raises(InvalidRequest):
            driver.append(job(**fields))


def test_a_log_refuses_times_and_keeps_keys(driver: QueueDriver) -> None:
    driver.put("log")
    with pytest.raises(InvalidRequest, match="log is a log"):
        driver.append(job(delay_ms=1), box="log")
    driver.append(job(ordering_key="k", job_priority=3), box="log")
    record = json.loads(driver.ask(commands.GetRecord("log", 1)).record)
    assert (record["$ordering_key"], record["$job_priority"]) == ("k", 3)


def test_the_ttl_of_a_delayed_job_counts_from_its_time(driver: QueueDriver) -> None:
    driver.put(ttl_ms=1_000)
    driver.append(job("now"), job("later", delay_ms=5_000))
    driver.now_ms += 1_500
    driver.tick()
    assert driver.seqs() == [2]
    driver.now_ms += 4_000
    driver.tick()
    assert seqs_of(driver.claim()) == [2]
    driver.now_ms += 1_000
    driver.tick()
    assert driver.seqs() == []


def test_a_cap_evicts_delayed_jobs_by_seq(driver: QueueDriver) -> None:
    driver.put(cap_records=2)
    driver.append(job(delay_ms=100, ordering_key="k"), job())
    driver.append(job())
    driver.now_ms += 100
    assert seqs_of(driver.claim(max=9)) == [2, 3]


def test_waiting_jobs_are_rescheduled_and_leased_ones_are_not(driver: QueueDriver) -> None:
    driver.append(job(tag="a"), job(tag="a"), job(tag="b", delay_ms=9_000))
    driver.claim()
    reply = driver.ask(queues.Reschedule(box="b", match=commands.Match("a"), delay_ms=300))
    assert (reply.rescheduled, reply.deliver_at, reply.more) == (1, 1_000_300, False)
    reply = driver.ask(queues.Reschedule(box="b", seqs=(1, 3, 9), deliver_at=1_000_100))
    assert (reply.rescheduled, reply.skipped) == (1, [1, 9])
    driver = next_life(driver, is_orderly=True)
    driver.now_ms += 100
    assert seqs_of(driver.claim(max=9)) == [3]
    driver.now_ms += 200
    assert seqs_of(driver.claim(max=9)) == [2]
    driver.append(job(delay_ms=50_000))
    driver.ask(queues.Reschedule(box="b", seqs=(4,), deliver_at=0))
    assert seqs_of(driver.claim()) == [4]


# -- errors and backoff


def test_a_nack_keeps_its_error_for_the_next_worker_and_for_the_dead_letter(driver: QueueDriver) -> None:
    driver.put("dead")
    driver.put(max_deliveries=2, dead_letter="dead")
    driver.append(job(ordering_key="k", job_priority=2, delay_ms=1))
    driver.now_ms += 1
    (first,) = driver.claim("w1")
    assert not {"first_ts", "last_node", "last_error"} & first.keys()
    driver.nack(1, node="w1", error="boom")
    driver = next_life(driver, is_orderly=False)
    (second,) = driver.claim("w2")
    assert (second["first_ts"], second["last_node"], second["last_error"]) == (1_000_001, "w1", "boom")
    driver.now_ms += 1_000  # the lease expires, which is no error of its own
    assert driver.claim() == []
    (move,) = driver.machine.boxes["b"].moves["dead", True].moves.values()
    assert (move.error, move.node, move.at_ms) == ("boom", "w2", driver.now_ms)
    load = driver.machine.boxes["b"].moves["dead", True].next_records(0, 10)
    meta = json.loads(load.text)["meta"]
    assert (meta["$dead_letter_error"], meta["$dead_letter_node"]) == ("boom", "w2")
    assert meta["$dead_letter_ts"] == driver.now_ms
    assert load.job_fields is not None
    assert JobFields.from_bytes(load.job_fields)[0] == JobFields(b"k", b"\2", None)
    other = driver.after_kill()
    assert other.machine.boxes["b"].moves["dead", True].moves[1] == move


def test_backoff_delays_nacks_and_expired_leases_and_no_orderly_end(driver: QueueDriver) -> None:
    driver.put(retry_backoff={"initial_ms": 400, "jitter": 0})
    driver.append(1)
    driver.claim()
    driver.nack(1)
    assert driver.totals() == (0, 0, 1)
    driver.now_ms += 400
    assert len(driver.claim()) == 1
    driver.now_ms += 1_000
    assert driver.claim() == [] and driver.totals() == (0, 0, 1)
    driver.now_ms += 799
    assert driver.claim() == []
    driver.now_ms += 1
    assert len(driver.claim(holder=7)) == 1
    driver.ask(queues.ReleaseHolder("b", 7))
    assert len(driver.claim()) == 1
    driver.nack(1, delay_ms=0)
    assert len(driver.claim()) == 1


def test_a_change_of_the_backoff_holds_for_jobs_that_wait(driver: QueueDriver) -> None:
    driver.put(retry_backoff={"initial_ms": 40_000, "jitter": 0})
    driver.append(1)
    driver.claim()
    driver.now_ms += 1_000
    assert driver.claim() == []
    driver.put(retry_backoff={"initial_ms": 10, "jitter": 0})
    driver.now_ms += 10
    assert len(driver.claim()) == 1
    driver.put(retry_backoff=None)
    driver.now_ms += 1_000
    assert len(driver.claim()) == 1


def test_backoff_grows_to_its_maximum_and_jitter_stays_within_its_share() -> None:
    plain = RetryBackoff(initial_ms=1000, factor=2, max_ms=60_000, jitter=0)
    assert [backoff.delay_ms(plain, 1, n) for n in (1, 2, 3, 7, 500)] == [1000, 2000, 4000, 60_000, 60_000]
    spread = RetryBackoff(initial_ms=1000, jitter=0.2)
    delays = {backoff.delay_ms(spread, seq, 1) for seq in range(500)}
    assert min(delays) >= 800 and max(delays) <= 1200 and len(delays) > 100
    assert backoff.delay_ms(spread, 7, 3) == backoff.delay_ms(spread, 7, 3)


# -- priority, keys, fairness


def test_higher_priorities_go_first_and_returned_jobs_inside_their_priority(driver: QueueDriver) -> None:
    driver.append(job(), job(job_priority=5), job(job_priority=9), job(job_priority=5), job())
    assert seqs_of(driver.claim(max=2)) == [3, 2]
    driver.nack(2)
    assert seqs_of(driver.claim(max=9)) == [2, 4, 1, 5]


def test_jobs_are_reprioritized_by_seq_and_by_tag(driver: QueueDriver) -> None:
    driver.append(job(), job(), job(tag="vip-1"), job(job_priority=9))
    assert driver.ask(queues.Reprioritize(box="b", seqs=(2,), job_priority=3)).reprioritized == 1
    match = commands.Match("vip-", is_prefix=True)
    assert driver.ask(queues.Reprioritize(box="b", match=match, job_priority=7)).reprioritized == 1
    driver.ask(queues.Reprioritize(box="b", seqs=(4,), job_priority=0))
    driver = next_life(driver, is_orderly=False)
    driver.seal()
    assert seqs_of(driver.claim(max=9)) == [3, 2, 1, 4]


def test_at_concurrency_one_a_key_is_leased_once_and_in_order(driver: QueueDriver) -> None:
    driver.put(key_concurrency=1, lease_ms=60_000)
    keyed = [
        job(ordering_key="a"),
        job(ordering_key="a", job_priority=9),
        job(ordering_key="b"),
        job(),
        job(),
    ]
    driver.append(*keyed)
    assert seqs_of(driver.claim(max=9)) == [1, 3, 4, 5]
    driver.nack(1, delay_ms=500)
    assert driver.claim(max=9) == []  # its return blocks the key
    driver.now_ms += 500
    assert seqs_of(driver.claim(max=9)) == [1]
    outcome = driver.do(queues.Ack(box="b", node="w", seqs=[1]))
    assert outcome.wakes == ("b",)
    driver.sync()
    assert seqs_of(driver.claim(max=9)) == [2]


def test_a_delayed_job_that_was_never_delivered_does_not_block_its_key(driver: QueueDriver) -> None:
    driver.put(key_concurrency=1)
    driver.append(job(ordering_key="a", delay_ms=500), job(ordering_key="a"))
    assert seqs_of(driver.claim(max=9)) == [2]
    driver.ack(2)
    driver.now_ms += 500
    assert seqs_of(driver.claim(max=9)) == [1]


def test_a_key_gets_as_many_leases_as_its_concurrency(driver: QueueDriver) -> None:
    driver.put(key_concurrency=2)
    driver.append(*[job(ordering_key="a") for _ in range(5)], job(ordering_key="b"))
    assert seqs_of(driver.claim(max=9)) == [1, 2, 6]
    driver.put(key_concurrency=0)
    assert seqs_of(driver.claim(max=9)) == [3, 4, 5]


def test_a_fair_queue_rotates_over_keys_and_plain_jobs_are_one_of_them(driver: QueueDriver) -> None:
    driver.append(*[job(ordering_key="noisy") for _ in range(50)])
    driver.append(*[job(ordering_key="quiet") for _ in range(3)], job(), job())
    driver.put(fair=True)
    owners = [one.get("$ordering_key", "") for one in driver.claim(max=8)]
    assert sorted(owners[:3]) == ["", "noisy", "quiet"] and sorted(owners[3:6]) == ["", "noisy", "quiet"]
    assert sorted(owners[6:]) == ["noisy", "quiet"]
    alone = [one.get("$ordering_key", "") for _ in range(4) for one in driver.claim()]
    assert alone == ["noisy"] * 4
    driver.append(job(ordering_key="quiet"))
    assert "quiet" in [one.get("$ordering_key", "") for _ in range(2) for one in driver.claim()]


def test_dead_letters_of_keys_make_way_in_the_same_claim(driver: QueueDriver) -> None:
    driver.put("dead")
    driver.put(max_deliveries=1, dead_letter="dead", key_concurrency=1)
    driver.append(job(ordering_key="a"), job(ordering_key="a"), job())
    assert seqs_of(driver.claim(max=2)) == [1, 3]
    driver.nack(1, 3)
    assert seqs_of(driver.claim(max=9)) == [2]
    assert driver.totals() == (0, 1, 2)


# -- bytes


def test_a_batch_with_job_fields_is_read_back_and_one_without_has_its_old_bytes(driver: QueueDriver) -> None:
    driver.append(job(), job(ordering_key="k"), job(job_priority=1, delay_ms=5))
    (batch,) = driver.machine.boxes["b"].log.tail
    assert isinstance(batch, Batch)
    content = b"".join(batch.to_parts())
    assert content[0] == 3
    again = Batch.from_bytes(memoryview(content))
    assert again.job_fields == batch.job_fields and b"".join(again.to_parts()) == content
    assert batch.part(0, 0).job_fields is None and b"".join(batch.part(0, 0).to_parts())[0] == 1
    part = batch.part(1, 2).job_fields
    assert part is not None and list(part.rows(2)) == [(0, "k", 0, 0), (1, "", 1, 1_000_005)]
    assert again.bytes_in_memory > again.part(0, 0).bytes_in_memory


def test_job_fields_are_joined_over_runs() -> None:
    keys = fields_of(b"a\0", None, None)
    assert join([(None, 2), (keys, 2)]) == JobFields(b"\0\0a\0", None, None)
    assert join([(None, 2), (None, 1)]) is None
    assert fields_of(b"\0", b"\0\0", None) is None
