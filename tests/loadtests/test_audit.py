"""The last look at a server after a load finds what a real server has lost, doubled or made up.

Method: a small load is written by hand to a real server; then somebody deletes, repeats or forges a record
behind its back, as a broken server would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loadtests import audit as auditing
from loadtests.audit import Audit, NoAnswer, once
from streams.testing import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as running:
        yield running


@pytest.fixture
def load(server: Server, request: pytest.FixtureRequest) -> Audit:
    made = Audit(server.url, f"load-{abs(hash(request.node.name))}", boxes=2, queues=1)
    made.prepare("disk")
    for box in (*made.boxes, *made.queues):
        sent = made.ledger.of(box, "a")
        append(made, box, *range(5))
        sent.sent_count = sent.acked_count = 5
    return made


def append(load: Audit, box: str, *numbers: int) -> None:
    records = [{"data": {"p": "a", "n": number, "at": 0}} for number in numbers]
    assert once(load.url, "POST", f"/v0/boxes/{box}", {"records": records})[0] in (200, 201)


def claim(load: Audit, *, max: int, ack: bool) -> None:
    [queue] = load.queues
    jobs = load.jobs[queue]
    answer: Any = load._call("POST", f"/v0/boxes/{queue}/claim", {"node": "w", "max": max})
    for job in answer["claimed"]:
        jobs.on_claim("w", job["data"]["p"], job["data"]["n"])
    if ack:
        seqs = [job["$seq"] for job in answer["claimed"]]
        load._call("POST", f"/v0/boxes/{queue}/ack", {"node": "w", "seqs": seqs})
    for job in answer["claimed"]:
        jobs.on_ack(job["data"]["p"], job["data"]["n"])


def test_all_is_well_when_nothing_happened(load: Audit) -> None:
    claim(load, max=2, ack=True)
    load.finish()
    assert load.verdict() == {
        "boxes": 2,
        "acked": 15,
        "jobs_done": 2,
        "retried": 0,
        "faults": {},
        "descriptions": [],
        "is_good": True,
    }
    load.clean_up()
    assert once(load.url, "GET", f"/v0/boxes/{load.boxes[0]}")[0] == 404


def test_the_last_check_tells_how_far_it_is(load: Audit) -> None:
    told: list[float] = []
    load.finish(told.append)
    assert len(told) >= 4 and told == sorted(told) and told[0] < 1.0 == told[-1]


def test_a_deleted_record_is_lost_and_its_copy_is_not(load: Audit) -> None:
    for box in load.copies:  # let the copy be made first
        load._read_to_end(load.copies[box], 5)
    once(load.url, "POST", f"/v0/boxes/{load.boxes[0]}/delete", {"before_seq": 2})
    load.finish()
    # The seq and the number that should have come first.
    assert load.faults.counts == {"lost": 2} and all(
        load.boxes[0] + ":" in text or "seq 2" in text for text in load.faults.descriptions
    )


def test_an_evicted_record_is_lost(load: Audit) -> None:
    once(load.url, "PUT", f"/v0/boxes/{load.boxes[1]}", {"cap_records": 3})
    load.finish()
    assert load.faults.counts["lost"] >= 2 and "tombstone for seqs 1-2 (cap)" in load.faults.descriptions[0]


def test_a_write_that_was_taken_twice_is_doubled_in_the_box_and_its_copy(load: Audit) -> None:
    append(load, load.boxes[0], 4)
    load.finish()
    assert load.faults.counts == {"doubled": 2}


def test_a_record_that_nobody_sent_is_invented(load: Audit) -> None:
    append(load, load.boxes[1], 5)
    load.finish()
    assert load.faults.counts == {"invented": 1}


def test_an_acked_job_that_is_still_there_has_returned(load: Audit) -> None:
    claim(load, max=1, ack=False)
    load.finish()
    assert load.faults.counts == {"returned": 1}


def test_a_job_that_vanished_unacked_is_lost(load: Audit) -> None:
    once(load.url, "POST", f"/v0/boxes/{load.queues[0]}/delete", {"before_seq": 3})
    load.finish()
    assert load.faults.counts == {"lost": 2}


def test_what_another_process_saw_counts_and_that_of_another_run_does_not(load: Audit) -> None:
    there = Audit(load.url, load.name, boxes=2, queues=1)
    there.ledger.of(load.boxes[1], "z").acked_count = there.ledger.of(load.boxes[1], "z").sent_count = 3
    there.faults.add("doubled", "seen there")
    there.retries = 4
    other = Audit(load.url, "other", boxes=2, queues=1)
    other.faults.add("doubled", "long ago")
    load.absorb(there.report())
    load.absorb(there.report())
    load.absorb(other.report())
    load.finish()
    assert load.faults.counts == {"doubled": 1, "lost": 3} and load.retries == 4


def test_readers_hold_back_deletion_and_new_ones_begin_after_it(load: Audit) -> None:
    box = load.boxes[0]
    assert load.seen_by_all(box) == 0, "nobody keeps it yet"
    keepers = [load.keep() for _ in load.readable]
    assert load.keep() is None and all(keepers)
    for keeper in keepers:
        assert keeper is not None
        keeper.seq = 4
    slow = load.open(load.copies[box])
    assert load.seen_by_all(box) == 0
    slow.seq = 3
    assert load.seen_by_all(box) == 3 and load.seen_by_all(load.boxes[1]) == 4
    load.close(slow)
    assert load.seen_by_all(box) == 4
    load.trim_seqs[box] = 3
    assert load.open(box).seq == 3


def test_a_server_that_is_gone_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "PATIENCE_S", 0.1)
    gone = Audit("http://127.0.0.1:1", "load", boxes=1, queues=0)
    with pytest.raises(NoAnswer, match="refused"):
        gone.prepare("disk")
