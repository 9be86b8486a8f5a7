"""Goal: what a queue does in the cases that a random history rarely meets (§8), and how much it costs.

Method: the machine alone, with the clock in the test's hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.changes import JobsCounted, JobsLeased, JobsRestated, JobsReturned
from shard.core.queues import job_index
from shard.core.queues import jobs as jobs_module
from shard.core.queues import queue as queue_module
from shard.core.queues.jobs import share_evenly, share_in_order
from streams.protocol.errors import NotAQueue
from streams.protocol.messages import commands, queues
from streams.protocol.messages.requests import encode_reply
from tests.support.jobs import QueueDriver
from tests.support.machines import facts_of


@pytest.fixture
def driver() -> QueueDriver:
    driver = QueueDriver()
    driver.start("boot")
    driver.put(type="queue", durability="fsync", lease_ms=1000)
    return driver


def seqs_of(jobs: list[dict[str, Any]]) -> list[int]:
    return [job["$seq"] for job in jobs]


def queue_of(driver: QueueDriver) -> queue_module.Queue:
    found = driver.machine.boxes["b"].queue
    assert found is not None
    return found


# -- what is given out


def test_a_job_that_could_still_vanish_is_not_given_out(driver: QueueDriver) -> None:
    driver.do(driver.write(1))
    assert driver.machine.handle(queues.Claim(box="b", node="w"), driver.now_ms).reply == queues.ClaimResult(
        "b", [], 0
    )
    driver.sync()
    assert seqs_of(driver.claim()) == [1]


def test_a_claim_without_durable_leases_waits_for_nothing(driver: QueueDriver) -> None:
    driver.append(1, 2)
    driver.claim()
    driver.do(queues.Ack(box="b", node="w", seqs=[1]))
    outcome = driver.do(queues.Claim(box="b", node="w"))
    assert (outcome.waits_for_lsn, outcome.changes) == (0, [])


def test_a_durable_lease_is_told_when_it_is_on_the_disk(driver: QueueDriver) -> None:
    driver.put(leases_durable=True)
    driver.append(1)
    outcome = driver.do(queues.Claim(box="b", node="w"))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    outcome = driver.do(queues.Extend(box="b", node="w", seqs=[1], lease_ms=500))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn


@pytest.mark.parametrize("call", ["ack", "nack", "extend"])
def test_a_skip_waits_for_the_ack_that_it_tells_of(driver: QueueDriver, call: str) -> None:
    driver.append(1)
    driver.claim()
    first = driver.do(queues.Ack(box="b", node="w", seqs=[1]))
    again: dict[str, queues.QueueCommand] = {
        "ack": queues.Ack(box="b", node="w", seqs=[1]),
        "nack": queues.Nack(box="b", node="w", seqs=[1]),
        "extend": queues.Extend(box="b", node="w", seqs=[1], lease_ms=500),
    }
    assert driver.do(again[call]).waits_for_lsn == first.waits_for_lsn > 0


def test_tags_and_texts_of_a_large_batch_are_those_of_the_job(driver: QueueDriver) -> None:
    driver.append({"data": 1, "tag": "é"}, {"data": 2}, {"data": 3, "tag": 'c"'})
    driver.append({"data": 4, "tag": "d"})
    found = [driver.claim()[0] for _ in range(4)]
    assert [(job["data"], job.get("$tag")) for job in found] == [(1, "é"), (2, None), (3, 'c"'), (4, "d")]


def test_a_claim_has_a_size_and_always_one_job(driver: QueueDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "CLAIM_BYTES_MAX", 200)
    driver.append(*["x" * 100] * 3, "y" * 1000)
    assert seqs_of(driver.claim(max=9)) == [1]
    assert seqs_of(driver.claim(max=9)) == [2]
    driver.nack(2)
    two = [queues.Claim(box="b", node=node, max=2) for node in ("w1", "w2")]
    assert [seqs_of(answer or []) for answer in driver.claim_together(*two)] == [[2], [3]]
    assert seqs_of(driver.claim(max=9)) == [4], "what did not fit was passed over by nobody"


def test_one_pass_has_a_limit(driver: QueueDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "PASS_JOBS_MAX", 3)
    driver.append(*range(5))
    assert seqs_of(driver.claim(max=9)) == [1, 2, 3]


# -- sharing


@pytest.mark.parametrize(
    "wanted, available, shares",
    [
        ([50] * 10, 50, [5] * 10),
        ([50] * 10, 52, [5] * 8 + [6] * 2),
        ([1, 100, 100], 9, [1, 4, 4]),
        ([2, 2], 9, [2, 2]),
        ([3, 0, 3], 1, [0, 0, 1]),
        ([4], 0, [0]),
    ],
)
def test_even_shares(wanted: list[int], available: int, shares: list[int]) -> None:
    assert share_evenly(wanted, available) == shares


def test_the_first_drains() -> None:
    assert share_in_order([50, 50, 1], 60) == [50, 10, 0]


def test_ten_claims_of_a_window_get_five_of_fifty_jobs_each(driver: QueueDriver) -> None:
    driver.put(claim_jitter_ms=50)
    driver.append(*range(50))
    first = driver.do(queues.Claim(box="b", node="w0", max=50))
    assert (first.reply, first.not_before_ms) == (None, driver.now_ms + 50)
    claims = [queues.Claim(box="b", node=f"w{n}", max=50) for n in range(10)]
    answers = driver.claim_together(*claims)
    assert [len(answer or []) for answer in answers] == [5] * 10


def test_who_gets_nothing_waits_on_until_its_time_is_over(driver: QueueDriver) -> None:
    driver.append(1)
    waiting = queues.Claim(box="b", node="w", wait_ms=100)
    at_once = queues.Claim(box="b", node="w")
    assert [answer is None for answer in driver.claim_together(waiting, waiting, at_once)] == [
        False,
        True,
        False,
    ]
    assert driver.claim_together(waiting, is_over=True) == [[]]
    assert driver.do(waiting).reply is None


def test_a_connection_in_a_pass_twice_has_room_once(driver: QueueDriver) -> None:
    driver.append(*range(9))
    claim = queues.Claim(box="b", node="w", max=3, holder=1)
    assert [seqs_of(answer or []) for answer in driver.claim_together(claim, claim)] == [[1, 2, 3], []]


# -- connections


def test_a_connection_is_given_more_when_it_has_settled_something(driver: QueueDriver) -> None:
    driver.append(*range(9))
    claim = queues.Claim(box="b", node="w", max=2, holder=7, wait_ms=50)
    driver.ask(claim)
    assert driver.do(claim).reply is None
    assert driver.do(queues.Ack(box="b", node="w", seqs=[1])).wakes == ("b",)
    assert seqs_of(driver.claimed(driver.ask(claim))) == [3]
    assert driver.do(queues.Nack(box="b", node="w", seqs=[2, 3])).wakes == ("b",)
    assert seqs_of(driver.claimed(driver.ask(claim))) == [2, 3], "jobs that came back go first"


def test_jobs_of_a_connection_that_is_gone_can_be_claimed_at_once(driver: QueueDriver) -> None:
    driver.append(1, 2, 3)
    driver.claim(max=2, holder=7)
    driver.claim(holder=8)
    outcome = driver.do(queues.ReleaseHolder("b", 7))
    assert (outcome.reply, outcome.wakes) == (queues.ReleaseHolderReply("b", 2), ("b",))
    assert driver.totals() == (2, 1, 0)
    assert [job["deliveries"] for job in driver.claim(max=9)] == [2, 2]
    assert driver.ask(queues.ReleaseHolder("b", 7)).released == 0


def test_jobs_pushed_are_events_of_one_line_each(driver: QueueDriver) -> None:
    driver.append(1, 2)
    reply = driver.ask(queues.Claim(box="b", node="w", max=2, holder=1))
    events = encode_reply(reply).split(b"\n\n")
    assert events[2] == b"" and len(events) == 3
    assert events[0].startswith(b'event: job\nid: 1\ndata: {"box":"b","$seq":1,')
    assert encode_reply(queues.ClaimResult("b", [(1, b'{"data":\r\n1}')], 0, True)).endswith(
        b'data: {"box":"b","data":  1}\n\n'
    )


# -- time


def test_a_tick_comes_when_a_job_comes_back_and_wakes_who_waits(driver: QueueDriver) -> None:
    driver.append(1, 2)
    driver.claim()
    assert driver.machine.next_deadline_ms() == driver.now_ms + 1000
    driver.claim(lease_ms=100)
    assert driver.machine.next_deadline_ms() == driver.now_ms + 100
    driver.now_ms += 100
    assert driver.tick().wakes == ("b",)
    assert driver.totals() == (1, 1, 0)
    driver.extend(1, lease_ms=2000)
    driver.now_ms += 900
    assert driver.tick().wakes == ()
    assert driver.machine.next_deadline_ms() == driver.now_ms + 1100


def test_very_many_leases_that_end_at_once_are_looked_at_piece_by_piece(
    driver: QueueDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "ADVANCE_MAX", 3)
    driver.append(*range(7))
    driver.claim(max=7)
    driver.now_ms += 1000
    queue = queue_of(driver)
    assert [queue.advance(driver.now_ms, driver.now_ms) for _ in range(4)] == [3, 3, 1, 0]


def test_leases_that_are_extended_for_ever_leave_no_heap_behind(driver: QueueDriver) -> None:
    driver.append(1, 2)
    driver.claim(lease_ms=50_000)
    driver.claim(lease_ms=60_000)
    for _ in range(1000):
        driver.now_ms += 1
        driver.extend(2, lease_ms=60_000)
    assert len(queue_of(driver)._due) < 200
    driver.now_ms += 50_000
    assert driver.totals() == (1, 1, 0)


# -- cost


def test_jobs_that_wait_have_no_entry_and_acked_ones_leave_none(driver: QueueDriver) -> None:
    for start in range(0, 3000, 1000):
        driver.append(*range(start, start + 1000))
    assert queue_of(driver).jobs == {}
    for _ in range(30):
        driver.ack(*seqs_of(driver.claim(max=100)))
    queue = queue_of(driver)
    assert (queue.jobs, queue.in_flight, driver.machine.boxes["b"].log.count) == ({}, 0, 0)
    assert len(queue._due) <= 200


@pytest.mark.parametrize("before_seq", [2, 5, 8, 11, 13])
@pytest.mark.parametrize("rebuilt_min", [1, 1000])
def test_jobs_that_are_deleted_together_leave_every_index(
    driver: QueueDriver, monkeypatch: pytest.MonkeyPatch, before_seq: int, rebuilt_min: int
) -> None:
    monkeypatch.setattr(job_index, "_REBUILD_MIN", rebuilt_min)
    driver.append(*range(12))
    driver.claim(max=12, holder=7)
    driver.nack(1, 4, 5, 8, 10, 11)
    driver.nack(2, 9, delay_ms=100)
    driver.ask(commands.DeleteRecords("b", before_seq, None))  # `Queue.check` compares all indexes
    assert [job["$seq"] for job in driver.claim(max=12)] == [
        seq for seq in (1, 4, 5, 8, 10, 11) if seq >= before_seq
    ]
    driver.now_ms += 101
    assert [job["$seq"] for job in driver.claim(max=12)] == [seq for seq in (2, 9) if seq >= before_seq]
    queue = queue_of(driver)
    assert queue.held_by(7) == [seq for seq in (3, 6, 7, 12) if seq >= before_seq]


def test_what_is_deleted_ahead_is_passed_over_once(driver: QueueDriver) -> None:
    for _ in range(5):
        driver.append(*[{"data": 1, "tag": "x"}] * 200)
    driver.append({"data": "last", "tag": "y"})
    driver.delete(tag="x")
    assert driver.claim()[0]["data"] == "last"
    assert driver.claim() == []
    queue, log = queue_of(driver), driver.machine.boxes["b"].log
    looked: list[int] = []
    real = log.runs
    log_type = type(log)

    class Watched(log_type):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def runs(self, batch: Any, first: int, last: int) -> list[tuple[int, int]]:
            looked.append(batch.first_seq)
            return real(batch, first, last)

    log.__class__ = Watched
    assert queue.pick(log, 5, 0) == ([], []) and looked == []


def test_deletes_in_the_middle_of_a_batch_do_not_hide_what_follows(driver: QueueDriver) -> None:
    driver.append(*[{"data": n, "tag": "x" if n % 200 else ""} for n in range(1000)])
    driver.delete(tag="x")
    assert [job["data"] for job in driver.claim(max=3)] == [0, 200, 400]
    assert [job["data"] for job in driver.claim(max=9)] == [600, 800]


def test_evicting_many_forgets_the_few_that_were_leased(driver: QueueDriver) -> None:
    driver.append(*range(500))
    driver.claim(max=2)
    driver.delete(400)
    assert queue_of(driver).jobs == {}
    driver.claim(max=50)
    driver.delete(410)
    assert sorted(queue_of(driver).jobs) == list(range(410, 450))


# -- what is logged


def kinds(driver: QueueDriver, command: queues.QueueCommand) -> list[type[Any]]:
    outcome = driver.do(command)
    driver.sync()
    return [type(change) for _, change in outcome.changes]


def test_the_log_hears_of_deliveries_from_the_second_on(driver: QueueDriver) -> None:
    claim = queues.Claim(box="b", node="w")
    driver.append(1)
    assert kinds(driver, claim) == []
    assert kinds(driver, queues.Nack(box="b", node="w", seqs=[1])) == [JobsReturned]
    assert kinds(driver, claim) == [JobsCounted]
    assert kinds(driver, queues.Extend(box="b", node="w", seqs=[1], lease_ms=500)) == []
    driver.put(leases_durable=True)
    driver.now_ms += 500
    assert kinds(driver, claim) == [JobsLeased]


def test_after_a_kill_jobs_are_claimable_and_most_deliveries_are_remembered(driver: QueueDriver) -> None:
    driver.append(1, 2)
    driver.claim(max=2)
    driver.nack(1)
    driver.claim()
    again = driver.after_kill()
    assert again.totals() == (2, 0, 0)
    assert [(job["$seq"], job["deliveries"]) for job in again.claim(max=2)] == [(1, 3), (2, 1)]


def test_a_delay_outlives_a_kill(driver: QueueDriver) -> None:
    driver.append(1)
    driver.claim()
    driver.nack(1, delay_ms=700)
    again = driver.after_kill()
    assert again.totals() == (0, 0, 1)
    again.now_ms += 700
    assert seqs_of(again.claim()) == [1]


def test_durable_leases_outlive_a_kill_with_all_that_belongs_to_them(driver: QueueDriver) -> None:
    driver.put(leases_durable=True)
    driver.append(1, 2)
    (job,) = driver.claim()
    driver.claim(node="other", holder=3)
    driver.extend(1, lease_ms=5000)
    again = driver.after_kill()
    assert again.totals() == (1, 1, 0), "but not those of a connection"
    assert again.extend(1, lease_ms=5000, lease_ids=[job["lease_id"]]).extended == 1
    again.now_ms += 5000
    assert [(job["$seq"], job["deliveries"]) for job in again.claim(max=2)] == [(1, 2), (2, 2)]


def test_an_orderly_restart_keeps_leases_in_any_case(
    driver: QueueDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "RESTATE_JOBS_MAX", 2)
    driver.append(*range(6))
    jobs = driver.claim(max=5)
    driver.nack(4, delay_ms=9999)
    again = driver.after_restart()
    assert again.totals() == (1, 4, 1)
    assert again.ack(*[1, 2], lease_ids=[jobs[0]["lease_id"]] * 2).acked == 2
    survivor = again.after_kill()
    assert survivor.totals() == (3, 0, 1), "that was for one restart; a kill frees what is not logged"


def test_a_queue_without_entries_is_the_same_from_a_snapshot_as_from_the_log(driver: QueueDriver) -> None:
    driver.append(*range(3))
    driver.claim(max=2)
    again = driver.after_restart()
    again.ack(1, 2)
    state = again.machine.snapshot()
    again.stop()
    from_log, from_snapshot = again.reborn().machine, again.reborn(state=state).machine
    assert facts_of(from_log) == facts_of(from_snapshot) == facts_of(again.machine)


def test_a_change_of_mind_about_leases_logs_those_that_are_out(driver: QueueDriver) -> None:
    driver.append(1)
    (job,) = driver.claim()
    outcome = driver.do(commands.PutBox("b", _patch(leases_durable=True)))
    assert JobsRestated in [type(change) for _, change in outcome.changes]
    driver.sync()
    again = driver.after_kill()
    assert again.ack(1, lease_ids=[job["lease_id"]]).acked == 1


def test_lease_ids_of_two_lives_differ(driver: QueueDriver) -> None:
    driver.append(1)
    (first,) = driver.claim()
    (second,) = driver.after_kill().claim()
    assert first["lease_id"] != second["lease_id"] and first["lease_id"].startswith("lease_")


# -- odds and ends


def test_a_log_has_no_jobs(driver: QueueDriver) -> None:
    driver.append(1, box="log")
    with pytest.raises(NotAQueue):
        driver.claim(box="log")


def test_a_queue_and_its_parts_say_what_they_are(driver: QueueDriver) -> None:
    driver.append(1, 2, 3)
    driver.claim(max=2)
    driver.nack(1)
    assert repr(queue_of(driver)) == "<Queue 1 in flight, 0 delayed, 1 again>"


def _patch(**fields: Any) -> Any:
    from tests.support.machines import patch

    return patch(**fields)
