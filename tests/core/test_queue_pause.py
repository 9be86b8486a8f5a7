"""Goal: a paused queue gives out nothing and forgets nothing; a rate bounds deliveries in every second (§23).

Method: the machine alone, with the clock in the test's hand.
"""

from __future__ import annotations

import random

import pytest

from shard.core.queues.delivery_rate import DeliveryRate
from streams.protocol.errors import NotAQueue
from streams.protocol.messages import queues
from streams.protocol.messages.requests import encode_reply
from tests.support.jobs import QueueDriver


@pytest.fixture
def driver() -> QueueDriver:
    driver = QueueDriver()
    driver.start("this-boot")
    driver.put(type="queue", durability="fsync", lease_ms=1000)
    return driver


def claim(**fields: object) -> queues.Claim:
    return queues.Claim(box="b", node="w", **fields)  # type: ignore[arg-type]


# -- pause


def test_a_paused_queue_gives_out_nothing_and_says_so(driver: QueueDriver) -> None:
    driver.append(1, 2)
    assert driver.ask(queues.SetPaused("b", True)) == queues.PauseReply("b", True)
    reply = driver.ask(claim(max=2))
    assert (reply.jobs, reply.ready, reply.paused) == ([], 2, True)
    assert encode_reply(reply) == b'{"box":"b","claimed":[],"count":0,"ready":2,"paused":true}'
    assert driver.ask(queues.SetPaused("b", False)) == queues.PauseReply("b", False)
    reply = driver.ask(claim(max=2))
    assert len(reply.jobs) == 2 and b"paused" not in encode_reply(reply)


def test_leased_jobs_of_a_paused_queue_are_settled_as_ever(driver: QueueDriver) -> None:
    driver.append(1, 2, 3)
    driver.claim(max=3)
    driver.ask(queues.SetPaused("b", True))
    assert driver.ack(1).acked == 1
    assert driver.nack(2).nacked == 1
    assert driver.extend(3, lease_ms=5000).extended == 1
    assert driver.totals() == (1, 1, 0)


def test_a_claim_waits_a_pause_out_and_is_woken_by_the_end_of_it(driver: QueueDriver) -> None:
    driver.append(1)
    assert driver.do(queues.SetPaused("b", True)).wakes == ("b",)
    assert driver.do(claim(wait_ms=100)).reply is None
    assert driver.claim_together(claim(wait_ms=100)) == [None]
    assert driver.do(queues.SetPaused("b", False)).wakes == ("b",)
    (jobs,) = driver.claim_together(claim(wait_ms=100))
    assert jobs is not None and len(jobs) == 1


def test_a_change_of_the_config_pauses_and_wakes_too(driver: QueueDriver) -> None:
    driver.append(1)
    driver.put(paused=True)
    assert driver.ask(claim()).paused and driver.machine.boxes["b"].config.paused
    driver.put(paused=False)
    assert len(driver.claim()) == 1


def test_a_pause_survives_a_crash_and_is_not_repeated_in_the_log(driver: QueueDriver) -> None:
    driver.append(1)
    driver.ask(queues.SetPaused("b", True))
    assert driver.do(queues.SetPaused("b", True)).changes == []
    other = driver.after_kill()
    assert other.ask(claim()).paused
    other.ask(queues.SetPaused("b", False))
    assert len(other.claim()) == 1


def test_a_stream_of_jobs_is_told_once_of_a_pause_and_once_of_its_end(driver: QueueDriver) -> None:
    driver.append(1)
    driver.ask(queues.SetPaused("b", True))
    told = driver.ask(claim(holder=1, wait_ms=100))
    assert encode_reply(told) == b'event: paused\ndata: {"box":"b"}\n\n'
    knows = claim(holder=1, wait_ms=100, knows_paused=True)
    assert driver.do(knows).reply is None
    driver.ask(queues.SetPaused("b", False))
    told = driver.ask(knows)
    assert encode_reply(told) == b'event: resumed\ndata: {"box":"b"}\n\n'
    assert len(driver.claim(holder=1)) == 1


def test_a_stream_of_jobs_is_told_although_the_queue_collects_claims(driver: QueueDriver) -> None:
    driver.put(claim_jitter_ms=50, paused=True)
    assert driver.ask(claim(holder=1, wait_ms=100)).is_pause_event
    assert driver.do(claim(holder=1, wait_ms=100, knows_paused=True)).reply is None


def test_a_log_cannot_be_paused(driver: QueueDriver) -> None:
    driver.put("log")
    with pytest.raises(NotAQueue):
        driver.ask(queues.SetPaused("log", True))


# -- rate


def test_a_rate_allows_a_burst_of_one_second_and_then_its_pace(driver: QueueDriver) -> None:
    driver.put(rate_per_s=10)
    driver.append(*range(40))
    assert len(driver.claim(max=40)) == 10
    assert driver.claim(max=40) == []
    driver.now_ms += 100
    assert len(driver.claim(max=40)) == 1
    driver.now_ms += 10_000
    assert len(driver.claim(max=40)) == 10


def test_a_rate_below_one_allows_one_job_at_a_time(driver: QueueDriver) -> None:
    driver.put(rate_per_s=0.5, lease_ms=100_000)
    driver.append(*range(4))
    assert len(driver.claim(max=4)) == 1
    driver.now_ms += 1_999
    assert driver.claim(max=4) == []
    driver.now_ms += 1
    assert len(driver.claim(max=4)) == 1


def test_a_claim_that_waits_for_the_rate_is_woken_by_it(driver: QueueDriver) -> None:
    driver.put(rate_per_s=2, lease_ms=100_000)
    driver.append(*range(5))
    driver.claim(max=5)
    assert driver.do(claim(wait_ms=5_000)).reply is None
    due_ms = driver.machine.next_deadline_ms()
    assert due_ms is not None and driver.now_ms < due_ms <= driver.now_ms + 501
    driver.now_ms = due_ms
    assert "b" in driver.tick().wakes
    (jobs,) = driver.claim_together(claim(wait_ms=5_000))
    assert jobs is not None and len(jobs) == 1


def test_a_queue_without_waiting_claims_or_jobs_sets_no_timer_for_its_rate(driver: QueueDriver) -> None:
    driver.put(rate_per_s=1)
    driver.append(1)
    driver.claim()
    driver.claim()
    assert driver.machine.boxes["b"].queue is not None
    assert driver.machine.boxes["b"].queue.next_due_ms() == driver.now_ms + 1000  # of the lease


@pytest.mark.parametrize("per_s", [0.3, 1, 7, 1000])
def test_no_window_has_more_deliveries_than_its_rate_and_one_burst(per_s: float) -> None:
    rate, rng, now_ms = DeliveryRate(), random.Random(7), 1_000
    deliveries: list[tuple[int, int]] = []
    for _ in range(2_000):
        now_ms += rng.choice((0, 1, 3, 40, 900))
        count = min(rng.choice((1, 5, 2_000)), rate.limit(per_s, now_ms))
        rate.pay(count, per_s, now_ms)
        deliveries.append((now_ms, count))
    for first in range(0, len(deliveries), 97):
        total = 0
        for at_ms, count in deliveries[first:]:
            total += count
            elapsed_s = (at_ms - deliveries[first][0]) / 1000
            assert total <= elapsed_s * per_s + max(1, per_s) + 1e-6


def test_the_rate_keeps_its_remaining_time_when_the_clock_begins_earlier() -> None:
    rate = DeliveryRate()
    rate.pay(10, 10, 50_000)
    rate.wait(10, 50_000)
    rate.rewind(20_000)
    assert rate.limit(10, 30_000) == 0 and rate.limit(10, 30_100) == 1
    assert 30_000 < rate.resume_ms <= 30_101 and "resumes" in repr(rate)
