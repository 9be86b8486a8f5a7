"""Queues (§8): workers share jobs under leases. Nothing is lost, nothing is stuck, a late ack fools nobody.

Method: workers by name, over every way to reach the server. Time passes in the server, by long polls.
"""

import contextlib
import json
import socket
import threading

import pytest

from tests.support.h2c import H2c

QUEUE = {"type": "queue"}


def seqs_of(answer):
    return [job["$seq"] for job in answer["claimed"]]


def lease_ids_of(answer):
    return [job["lease_id"] for job in answer["claimed"]]


def totals(api, box):
    """(ready, in_flight, delayed), which make up the count."""
    state = api.state(box)
    queue = state["queue"]
    assert queue["ready"] + queue["in_flight"] + queue["delayed"] == state["count"]
    return queue["ready"], queue["in_flight"], queue["delayed"]


def filled(api, box, count, **config):
    api.put(box, **QUEUE, **config)
    if count:
        api.append(box, *range(1, count + 1))


# -- claiming


def test_a_claim_leases_the_oldest_jobs_and_says_what_it_leased(api, box):
    """§8: claimed, count, ready."""
    api.put(box, **QUEUE)
    first = {"data": {"n": 1.0}, "tag": "t", "meta": {"m": [1]}, "node": "p"}
    before = api.append(box, records=[first, {"data": None}, {"data": 3}])
    answer = api.claim(box, "w", max=2, lease_ms=5000)
    assert (answer["box"], answer["count"], answer["ready"]) == (box, 2, 1)
    full, bare = answer["claimed"]
    assert (full["$seq"], full["$tag"], full["meta"], full["data"]) == (1, "t", {"m": [1]}, {"n": 1.0})
    assert full["deliveries"] == bare["deliveries"] == 1
    assert full["$ts"] <= full["deadline"] - 5000 and full["deadline"] == bare["deadline"]
    assert isinstance(full["lease_id"], str) and full["lease_id"]
    assert bare["data"] is None and not {"$tag", "meta"} & bare.keys()
    assert api.claim(box)["claimed"][0]["$seq"] == before["last_seq"]
    assert totals(api, box) == (0, 3, 0)


def test_data_of_a_job_is_what_was_written(api, box):
    """§0.3 holds for claims too."""
    api.put(box, **QUEUE)
    text = '{"records": [{"data": {"a": 1.0, "b": 1e400, "c": 123456789012345678901,\n "d": "\\u00e9"}}]}'
    api.ok(
        api.client.post(f"/v0/boxes/{box}", content=text, headers={"content-type": "application/json"}), 200
    )
    response = api.call_queue(box, "claim", node="w")
    api.ok(response)
    assert '{"a": 1.0, "b": 1e400, "c": 123456789012345678901,\n "d": "\\u00e9"}' in response.text


def test_max_defaults_to_one_and_is_clamped_to_a_thousand(api, box):
    """§8"""
    filled(api, box, 1001)
    assert api.claim(box)["count"] == 1
    assert api.claim(box, max=100_000)["count"] == 1000


def test_an_empty_queue_answers_at_once_with_nothing(api, box):
    """§8"""
    filled(api, box, 0)
    answer = api.claim(box, max=5)
    assert (answer["claimed"], answer["count"], answer["ready"]) == ([], 0, 0)


def test_no_job_is_given_to_two_workers(api, box):
    """§8"""
    filled(api, box, 40)
    answers = [api.in_background(lambda other, n=n: other.claim(box, f"w{n}", max=7)) for n in range(6)]
    taken = [seq for answer in answers for seq in seqs_of(answer()[0])]
    assert sorted(taken) == list(range(1, 41))


def test_with_the_window_off_the_first_drains(api, box):
    """§8"""
    filled(api, box, 50)
    assert api.claim(box, "w0", max=100)["count"] == 50
    assert api.claim(box, "w1", max=100)["count"] == 0


def test_claims_inside_the_window_share_the_jobs_evenly(api, box):
    """§8: ten workers and fifty jobs: five each."""
    api.put(box, **QUEUE, claim_jitter_ms=3000)
    api.append(box, *range(50))
    gate = threading.Barrier(10)

    def claim(other, node):
        other.tail(box)  # its connection is open, so that only the claim has to be inside the window
        gate.wait(20)
        return other.claim(box, node, max=50)

    answers = [api.in_background(lambda other, n=n: claim(other, f"w{n}")) for n in range(10)]
    counts = [answer()[0]["count"] for answer in answers]
    assert counts == [5] * 10


def test_a_claim_that_waits_is_served_by_the_next_job(api, box):
    """§8: wait_ms."""
    filled(api, box, 0)
    waiting = api.in_background(lambda other: other.claim(box, wait_ms=30_000))
    api.until(lambda: api.append(box, 1)["last_seq"], f"{box}.quiet")
    answer, seconds = waiting()
    assert answer["count"] == 1 and seconds < 25


def test_a_claim_that_waits_is_served_by_a_job_that_comes_back(api, box):
    """§8: of a nack, of a delay that passes, of a lease that runs out."""
    filled(api, box, 1)
    for give_back in ("nack", "delay", "expiry"):
        lease_ms = 100 if give_back == "expiry" else 60_000
        (job,) = api.claim(box, "w1", lease_ms=lease_ms)["claimed"]
        waiting = api.in_background(lambda other: other.claim(box, "w2", wait_ms=30_000))
        if give_back != "expiry":
            api.nack(box, job["$seq"], node="w1", delay_ms=80 if give_back == "delay" else 0)
        answer, seconds = waiting()
        assert seqs_of(answer) == [1] and seconds < 25
        api.nack(box, 1, node="w2")


def test_a_claim_that_waits_in_vain_answers_when_its_time_is_over(api, box):
    """§8"""
    filled(api, box, 0)
    answer, seconds = api.in_background(lambda other: other.claim(box, wait_ms=300))()
    assert answer["count"] == 0 and 0.3 <= seconds < 25


def test_a_worker_that_leaves_while_it_waits_is_given_nothing(api, box):
    """§8: nothing is stuck. A job that went to it would come back only when its lease is over."""
    filled(api, box, 0, max_deliveries=1)

    def are_waiting(count):
        shards = api.ok(api.send("GET", "/v0/status"))["shards"]
        return sum(shard["waiting_claims"] for shard in shards) == count

    with asking(api, f"/v0/boxes/{box}/claim", {"node": "w1", "wait_ms": 30_000}):
        api.until(lambda: are_waiting(1), f"{box}.quiet")
    api.until(lambda: are_waiting(0), f"{box}.quiet")
    api.append(box, 1)
    (job,) = api.claim(box, "w2")["claimed"]
    assert (job["$seq"], job["deliveries"]) == (1, 1)


@contextlib.contextmanager
def asking(api, path, body):
    """A connection on which this was asked and no answer is read; at the end it is closed."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content))}
    if api.combo.protocol == "h2c":
        with H2c(api.server.port) as connection:
            connection.send(connection.request("POST", path, headers, ends=False), content, ends=True)
            yield
        return
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", api.server.port)) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + content)
        yield


def test_a_claim_that_waits_learns_that_the_box_is_deleted(api, box):
    """§2.4, §8"""
    filled(api, box, 0)
    waiting = api.in_background(lambda other: other.call_queue(box, "claim", node="w", wait_ms=30_000))
    api.let_time_pass(50, f"{box}.quiet")
    api.drop(box)
    response, _ = waiting()
    api.refused(response, 404, "box_not_found")


# -- leases that end


def test_a_lease_that_ran_out_makes_the_job_claimable_and_counts_deliveries(api, box):
    """§8: deliveries."""
    filled(api, box, 2, lease_ms=100)
    assert seqs_of(api.claim(box, "w1", max=2)) == [1, 2]
    again = api.claim(box, "w2", wait_ms=30_000)["claimed"]
    assert [(job["$seq"], job["deliveries"]) for job in again] == [(1, 2)]


def test_jobs_that_came_back_go_before_fresh_ones(api, box):
    """§8"""
    filled(api, box, 4)
    api.claim(box, max=2)
    api.nack(box, 2)
    assert seqs_of(api.claim(box, max=2)) == [2, 3]


def test_nack_gives_back_at_once_or_after_a_delay(api, box):
    """§8: nacked, skipped, ready, in_flight."""
    filled(api, box, 3)
    api.claim(box, max=3)
    answer = api.nack(box, 1, 99)
    assert (answer["box"], answer["nacked"], answer["skipped"]) == (box, 1, [99])
    assert (answer["ready"], answer["in_flight"]) == (1, 2)
    later = api.nack(box, 2, delay_ms=60_000)
    assert (later["nacked"], later["ready"], later["in_flight"]) == (1, 1, 1)
    assert totals(api, box) == (1, 1, 1)
    assert seqs_of(api.claim(box, max=5)) == [1]


def test_extend_moves_the_deadline_from_now(api, box):
    """§8: extended, skipped, deadlines."""
    filled(api, box, 2, lease_ms=60_000)
    (job,) = api.claim(box)["claimed"]
    answer = api.extend(box, 1, 2, lease_ms=600_000)
    assert (answer["box"], answer["extended"], answer["skipped"]) == (box, 1, [2])
    assert list(answer["deadlines"]) == ["1"]
    assert answer["deadlines"]["1"] >= job["deadline"] + 500_000
    short = api.extend(box, 1, lease_ms=100)
    assert short["deadlines"]["1"] < job["deadline"], "extend sets, it does not add"
    assert api.claim(box, "w2", max=2, wait_ms=1)["count"] >= 1


def test_an_extended_job_is_not_given_to_another(api, box):
    """§8"""
    filled(api, box, 1, lease_ms=200)
    api.claim(box)
    api.extend(box, 1, lease_ms=60_000)
    assert api.claim(box, "w2", wait_ms=400)["count"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("given, expected", [(1, 100), (100_000_000, 86_400_000)])
def test_lease_lengths_are_clamped(api, box, given, expected):
    """§1, §8"""
    filled(api, box, 2)
    now = api.state(box)["config"]  # the server's clock is only seen in answers
    assert now["lease_ms"] == 30_000
    short = api.claim(box, lease_ms=60_000)["claimed"][0]["deadline"]
    clamped = api.claim(box, lease_ms=given)["claimed"][0]["deadline"]
    assert abs((clamped - short) - (expected - 60_000)) < 10_000


# -- acks and fences


def test_ack_deletes_the_job_for_good(api, box):
    """§8: acked, skipped, ready, in_flight; ack = permanent delete."""
    filled(api, box, 3)
    api.claim(box, max=2)
    answer = api.ack(box, 1)
    assert (answer["box"], answer["acked"], answer["skipped"]) == (box, 1, [])
    assert (answer["ready"], answer["in_flight"]) == (1, 1)
    assert api.seqs(box) == [2, 3]
    assert api.diff(box)["tombstone"] is None, "asked for, so silent"
    assert (api.ack(box, 1)["acked"], api.ack(box, 1)["skipped"]) == (0, [1])


def test_only_the_holder_may_ack_nack_or_extend(api, box):
    """§8: others are skipped, never an error."""
    filled(api, box, 2)
    api.claim(box, "w1")
    for seq in (1, 2, 77):
        assert api.ack(box, seq, node="w2")["skipped"] == [seq]
        assert api.nack(box, seq, node="w2")["skipped"] == [seq]
        assert api.extend(box, seq, node="w2", lease_ms=1000)["skipped"] == [seq]
    assert totals(api, box) == (1, 1, 0)


def test_a_seq_given_twice_is_settled_once(api, box):
    """§8"""
    filled(api, box, 1)
    api.claim(box)
    answer = api.ack(box, 1, 1)
    assert (answer["acked"], answer["skipped"]) == (1, [1])


def test_a_late_ack_of_a_worker_that_lost_its_lease_changes_nothing(api, box):
    """§8: also when it has the very name of the new holder, if it says which lease it means."""
    filled(api, box, 1)
    old = lease_ids_of(api.claim(box, "w", lease_ms=100))
    new = lease_ids_of(api.claim(box, "w", wait_ms=30_000))
    assert old != new
    with api.unchanged(box):
        assert api.ack(box, 1, lease_ids=old)["skipped"] == [1]
        assert api.nack(box, 1, lease_ids=old)["skipped"] == [1]
        assert api.extend(box, 1, lease_ids=old, lease_ms=1000)["skipped"] == [1]
        assert api.ack(box, 1, node="other")["skipped"] == [1]
    assert api.ack(box, 1, lease_ids=new)["acked"] == 1


def test_a_lease_is_over_at_its_deadline_also_when_nobody_else_took_the_job(api, box):
    """§8: a job is claimable when its lease passed its deadline; then nobody holds it."""
    filled(api, box, 1)
    api.claim(box, lease_ms=100)
    api.until(lambda: totals(api, box) == (1, 0, 0), f"{box}.quiet")
    assert api.ack(box, 1)["skipped"] == [1]
    assert api.extend(box, 1, lease_ms=1000)["skipped"] == [1]


def test_each_lease_has_an_id_of_its_own(api, box):
    """§8"""
    filled(api, box, 6)
    ids = [lease_ids_of(api.claim(box, "w")) for _ in range(3)]
    api.nack(box, 1, 2, 3)
    ids += [lease_ids_of(api.claim(box, "w")) for _ in range(3)]
    assert len({lease_id for (lease_id,) in ids}) == 6


# -- together with the rest of a box


def test_a_queue_is_read_like_a_log_and_reading_leases_nothing(api, box):
    """§8: all of §2-§7 also works on a queue."""
    filled(api, box, 3)
    api.claim(box)
    assert api.data(box) == [1, 2, 3]
    assert api.record(box, 2)["data"] == 2
    assert api.tail(box)["head_seq"] == 3
    assert totals(api, box) == (2, 1, 0)


def test_deleting_and_evicting_takes_jobs_from_workers_too(api, box):
    """§5, §1: a job that is gone is skipped, and counts no more."""
    filled(api, box, 3, cap_records=3)
    api.claim(box, max=2)
    api.delete(box, before_seq=2)
    assert totals(api, box) == (1, 1, 0)
    api.append(box, 4, 5)
    assert totals(api, box) == (3, 0, 0)
    assert api.ack(box, 1, 2)["skipped"] == [1, 2]
    assert seqs_of(api.claim(box, max=9)) == [3, 4, 5]


def test_a_job_older_than_the_ttl_is_not_given_out(api, box):
    """§1: ttl_ms."""
    filled(api, box, 2, ttl_ms=100)
    api.until(lambda: api.state(box)["count"] == 0, f"{box}.quiet")
    assert api.claim(box, max=2)["count"] == 0


def test_the_state_of_a_log_has_no_queue(api, box):
    """§2.2"""
    api.append(box, 1)
    assert "queue" not in api.state(box)
    filled(api, f"{box}.q", 2)
    assert api.state(f"{box}.q")["queue"] == {
        "ready": 2,
        "in_flight": 0,
        "delayed": 0,
        "dead_lettered": 0,
        "outputs_pending": 0,
    }


# -- refusals


def test_every_call_needs_a_queue(api, box):
    """§8: 409 not_a_queue on a log, 404 when absent."""
    api.append(box, 1)
    for action in ("claim", "ack", "nack", "extend"):
        body = {"node": "w"} if action == "claim" else {"node": "w", "seqs": [1]}
        body |= {"lease_ms": 1000} if action == "extend" else {}
        with api.unchanged(box):
            api.refused(api.call_queue(box, action, **body), 409, "not_a_queue", box)
        api.refused(api.call_queue(f"{box}.none", action, **body), 404, "box_not_found")
    assert not api.exists(f"{box}.none"), "nothing here creates a box"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "action, body, field",
    [
        ("claim", {}, "node"),
        ("claim", {"node": ""}, "node"),
        ("claim", {"node": 7}, "node"),
        ("claim", {"node": "n" * 200}, "node"),
        ("claim", {"node": "w", "max": 0}, "max"),
        ("claim", {"node": "w", "max": "5"}, "max"),
        ("claim", {"node": "w", "wait_ms": -1}, "wait_ms"),
        ("claim", {"node": "w", "lease_ms": -1}, "lease_ms"),
        ("ack", {"node": "w"}, "seqs"),
        ("ack", {"node": "w", "seqs": []}, "seqs"),
        ("ack", {"node": "w", "seqs": list(range(1001))}, "seqs"),
        ("ack", {"node": "w", "seqs": [-1]}, "seqs"),
        ("ack", {"node": "w", "seqs": [2**64]}, "seqs[0]"),
        ("ack", {"seqs": [1]}, "node"),
        ("ack", {"node": "w", "seqs": [1, 2], "lease_ids": ["x"]}, "lease_ids"),
        ("ack", {"node": "w", "seqs": [1], "lease_ids": [7]}, "lease_ids"),
        ("nack", {"node": "w", "seqs": [1], "delay_ms": -1}, "delay_ms"),
        ("nack", {"node": "w", "seqs": [1], "delay": 5}, "delay"),
        ("extend", {"node": "w", "seqs": [1]}, "lease_ms"),
        ("extend", {"node": "w", "seqs": [1], "lease_ms": "1"}, "lease_ms"),
    ],
)
def test_a_bad_request_names_its_field_and_changes_nothing(api, box, action, body, field):
    """§0.6, §0.9, §8"""
    filled(api, box, 1)
    with api.unchanged(box):
        api.refused(api.call_queue(box, action, **body), 400, "invalid_request", field)


@pytest.mark.exhaustive
def test_methods_and_queries_are_checked(api, box):
    """§0.6, §0.9"""
    filled(api, box, 1)
    api.refused(api.send("GET", f"/v0/boxes/{box}/claim"), 405, "method_not_allowed")
    api.refused(
        api.send("POST", f"/v0/boxes/{box}/claim", {"node": "w"}, params={"max": 1}), 400, "invalid_request"
    )
    text = json.dumps({"node": "w"})
    response = api.client.post(f"/v0/boxes/{box}/claim", content=text, headers={"content-type": "text/plain"})
    api.refused(response, 415, "unsupported_media_type")


# -- pause and rate


def test_a_paused_queue_gives_nothing_until_it_resumes(api, box):
    """§23: `paused: true`; a claim with `wait_ms` waits it out and wakes on resume."""
    filled(api, box, 2)
    assert api.ok(api.send("POST", f"/v0/boxes/{box}/pause"))["paused"] is True
    assert api.state(box)["config"]["paused"] is True
    answer = api.claim(box)
    assert (answer["claimed"], answer["ready"], answer["paused"]) == ([], 2, True)
    found = []
    with api.another() as other:
        thread = threading.Thread(target=lambda: found.append(other.claim(box, wait_ms=30_000)))
        thread.start()
        assert api.ok(api.call_queue(box, "resume"))["paused"] is False
        thread.join()
    assert seqs_of(found[0]) == [1] and "paused" not in found[0]


def test_pause_and_resume_are_strict_and_for_queues_only(api, box):
    """§20, §23: a log is `409`, a field is `400`."""
    api.put(box)
    api.refused(api.call_queue(box, "pause"), 409, "not_a_queue")
    api.refused(api.call_queue(box, "resume", max=1), 409, "not_a_queue")
    api.refused(api.call_queue(f"{box}-none", "pause"), 404, "box_not_found")
    filled(api, f"{box}-q", 0)
    api.refused(api.call_queue(f"{box}-q", "pause", max=1), 400, "invalid_request", "max")
    api.refused(api.send("POST", f"/v0/boxes/{box}-q/pause?for=1"), 400, "invalid_request")


def test_a_rate_bounds_what_claims_get(api, box):
    """§23: `rate_per_s` with a burst of one second. A waiting claim gets its job when the rate allows it."""
    filled(api, box, 5, rate_per_s=2)
    first = api.claim(box, max=5)
    assert seqs_of(first) == [1, 2] and first["ready"] == 3
    assert seqs_of(api.claim(box, max=5, wait_ms=30_000))[0] == 3
    api.refused(api.send("PUT", f"/v0/boxes/{box}", {"rate_per_s": -1}), 400, "invalid_request", "rate_per_s")


# -- time, errors, order


def test_a_delayed_job_is_visible_and_claimable_at_its_time(api, box):
    """§21: counted in `delayed`, visible to diff; a waiting claim gets it when its time has come."""
    api.put(box, **QUEUE)
    api.append(box, records=[{"data": 1, "delay_ms": 300, "ordering_key": "k", "job_priority": 2}])
    assert totals(api, box) == (0, 0, 1) and api.seqs(box) == [1]
    assert api.claim(box)["claimed"] == []
    (job,) = api.claim(box, wait_ms=30_000)["claimed"]
    assert (job["$ordering_key"], job["$job_priority"]) == ("k", 2)
    assert job["$deliver_at"] >= job["$ts"] + 300 and job["deadline"] >= job["$deliver_at"] + 30_000
    shown = api.diff(box, include_tags=True)["records"][0]
    assert (shown["$ordering_key"], shown["$deliver_at"]) == ("k", job["$deliver_at"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields",
    [
        {"delay_ms": -1}, {"delay_ms": 1, "deliver_at": 9}, {"delay_ms": 10**12}, {"deliver_at": 10**15},
        {"job_priority": 10}, {"job_priority": -1}, {"ordering_key": "x" * 257}, {"ordering_key": 1},
    ],
)  # fmt: skip
def test_bad_job_fields_are_refused_by_name_and_write_nothing(api, box, fields):
    """§21, §23"""
    api.put(box, **QUEUE)
    with api.unchanged(box):
        response = api.post(box, {"records": [{"data": 1}, {"data": 2, **fields}]})
        api.refused(response, 400, "invalid_request", next(iter(fields)))


def test_a_log_takes_no_delays(api, box):
    """§21: on a log box 400."""
    api.put(box)
    api.refused(api.post(box, {"records": [{"data": 1, "delay_ms": 5}]}), 400, "invalid_request", "delay_ms")


def test_an_error_is_kept_cut_and_shown_to_the_next_worker(api, box):
    """§21: `last_error`, `last_node`, `first_ts`; longer than 4 KiB is cut, never refused."""
    filled(api, box, 1)
    first = api.claim(box, "w1")["claimed"][0]
    assert "first_ts" not in first
    api.nack(box, 1, node="w1", error="\u00fc" * 5000)
    second = api.claim(box, "w2")["claimed"][0]
    assert (second["last_node"], second["last_error"]) == ("w1", "\u00fc" * 2048)
    assert first["$ts"] <= second["first_ts"] <= second["deadline"]


def test_a_backoff_delays_a_nack_without_a_delay(api, box):
    """§21: `retry_backoff`; an explicit delay of 0 is at once."""
    filled(api, box, 2, retry_backoff={"initial_ms": 60_000})
    api.claim(box, max=2)
    api.nack(box, 1)
    api.nack(box, 2, delay_ms=0)
    assert totals(api, box) == (1, 0, 1)


def test_waiting_jobs_are_rescheduled_and_reprioritized(api, box):
    """§21, §23: by seqs or match; leased and unknown jobs are skipped."""
    api.put(box, **QUEUE)
    api.append(box, records=[{"data": n, "tag": f"t-{n}"} for n in range(4)])
    assert seqs_of(api.claim(box)) == [1]
    answer = api.ok(api.call_queue(box, "reschedule", seqs=[1, 2, 99], delay_ms=60_000))
    assert (answer["rescheduled"], answer["skipped"]) == (1, [1, 99])
    answer = api.ok(api.call_queue(box, "reprioritize", match=["tag", "Glob", "t-3*"], job_priority=5))
    assert answer["reprioritized"] == 1
    assert seqs_of(api.claim(box, max=9)) == [4, 3]
    api.ok(api.call_queue(box, "reschedule", match="t-1", deliver_at=0))
    assert seqs_of(api.claim(box)) == [2]
    for action, body in (
        ("reschedule", {"delay_ms": 1}),
        ("reschedule", {"seqs": [1], "match": "t", "delay_ms": 1}),
        ("reschedule", {"seqs": [1]}),
        ("reprioritize", {"seqs": [1], "job_priority": 10}),
        ("reprioritize", {"seqs": [], "job_priority": 1}),
    ):
        api.refused(api.call_queue(box, action, **body), 400, "invalid_request")


def test_a_key_is_leased_once_at_a_time_and_in_order(api, box):
    """§23: `key_concurrency` 1."""
    api.put(box, **QUEUE, key_concurrency=1)
    api.append(box, records=[{"data": n, "ordering_key": "ab"[n % 2], "job_priority": n} for n in range(4)])
    answer = api.claim(box, max=9)
    assert seqs_of(answer) == [2, 1] and answer["ready"] == 2
    assert api.claim(box, max=9)["claimed"] == []
    api.ack(box, 2)
    assert seqs_of(api.claim(box, max=9)) == [4]


def test_a_fair_queue_rotates_over_its_keys(api, box):
    """§23: `fair`; jobs without a key count as one key."""
    api.put(box, **QUEUE, fair=True)
    keys = [{"ordering_key": "noisy"}] * 20 + [{"ordering_key": "quiet"}] * 2 + [{}] * 2
    api.append(box, records=[{"data": 1, **key} for key in keys])
    owners = [job.get("$ordering_key") for job in api.claim(box, max=6)["claimed"]]
    assert sorted(map(str, owners)) == ["None", "None", "noisy", "noisy", "quiet", "quiet"]


def test_a_router_keeps_keys_and_priorities_and_drops_times(api, box):
    """§21: router copies drop `deliver_at` and keep `ordering_key` and `job_priority`."""
    api.put(box, **QUEUE)
    api.put(f"{box}-copy", **QUEUE)
    body = {"source": box, "dest": f"{box}-copy"}
    api.ok(api.send("PUT", f"/v0/routers/{box}", body), 200, 201)
    api.append(box, records=[{"data": 1, "delay_ms": 60_000, "ordering_key": "k", "job_priority": 4}])
    (job,) = api.claim(f"{box}-copy", wait_ms=30_000)["claimed"]
    assert (job["$ordering_key"], job["$job_priority"]) == ("k", 4) and "$deliver_at" not in job
