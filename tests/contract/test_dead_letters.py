"""Dead letters (§8): a job that was delivered too often moves to its box, on any shard, and can come back.

Method: jobs are worn out by nacks; long polls wait for what moves. Two shards, so that boxes often lie apart.
"""

import pytest


def worn_out(api, box, *seqs, times=2):
    for _ in range(times):
        answer = api.claim(box, max=len(seqs))
        assert [job["$seq"] for job in answer["claimed"]] == list(seqs)
        api.nack(box, *seqs)


def letters_of(api, box, count):
    """The dead letters, as soon as there are so many."""

    def look():
        if not api.exists(box):
            return None
        records = api.diff(box, include_tags=True)["records"]
        return records if len(records) >= count else None

    return api.until(look, f"{box}.quiet")


@pytest.fixture(params=range(2))
def dead(request, box):
    """Two names for the dead letter box: they fall onto shards as they may."""
    return f"{box}.dead{request.param}"


def test_a_job_delivered_too_often_moves_with_all_that_belongs_to_it(api, box, dead):
    """§8, §21: meta.$dead_letter_from, _deliveries, _src_seq, _node, _ts; then it is deleted."""
    api.put(box, type="queue", max_deliveries=2, dead_letter=dead)
    api.append(box, records=[{"data": {"n": 1}, "tag": "t", "meta": {"trace": 9}}, {"data": 2}])
    worn_out(api, box, 1, 2)
    assert api.claim(box, max=2)["count"] == 0
    first, second = letters_of(api, dead, 2)
    assert (first["data"], first["$tag"]) == ({"n": 1}, "t")
    assert first["meta"] == {
        "trace": 9,
        "$dead_letter_from": box,
        "$dead_letter_deliveries": 2,
        "$dead_letter_src_seq": 1,
        "$dead_letter_node": "w",
        "$dead_letter_ts": first["meta"]["$dead_letter_ts"],
    }
    assert 0 <= first["$ts"] - first["meta"]["$dead_letter_ts"] < 60_000
    assert second["meta"]["$dead_letter_src_seq"] == 2

    def moved():
        state = api.state(box)
        return state if state["queue"]["dead_lettered"] == 2 else None

    state = api.until(moved, f"{box}.quiet")
    assert (state["count"], state["queue"]["ready"], state["queue"]["delayed"]) == (0, 0, 0)
    assert len(letters_of(api, dead, 2)) == 2, "once each"


def test_a_claim_that_waits_moves_what_is_in_its_way(api, box, dead):
    """§8: also where nothing is logged, so that nothing else would tell the carrier."""
    api.put(box, type="queue", durability="memory", max_deliveries=1, dead_letter=dead, lease_ms=100)
    api.append(box, 1)
    api.claim(box)
    waiting = api.in_background(lambda other: other.claim(box, wait_ms=20_000))
    assert [letter["data"] for letter in letters_of(api, dead, 1)] == [1]
    api.append(box, 2)
    assert waiting()[0]["claimed"][0]["data"] == 2


def test_without_a_dead_letter_box_a_job_is_redelivered_for_ever(api, box):
    """§8"""
    api.put(box, type="queue", max_deliveries=1)
    api.append(box, 1)
    worn_out(api, box, 1, times=4)
    assert api.claim(box)["claimed"][0]["deliveries"] == 5


def test_a_box_is_not_its_own_dead_letter_box(api, box):
    """§1"""
    api.refused(
        api.send("PUT", f"/v0/boxes/{box}", {"type": "queue", "dead_letter": box}),
        400,
        "invalid_request",
        "dead_letter",
    )


def test_dead_letters_go_back_into_their_queue(api, box, dead):
    """§8: requeue."""
    api.put(box, type="queue", max_deliveries=1, dead_letter=dead)
    api.append(box, records=[{"data": n, "meta": {"m": n}} for n in (1, 2, 3)])
    worn_out(api, box, 1, 2, 3, times=1)
    api.claim(box, max=3)
    letters_of(api, dead, 3)
    api.append(dead, "not a letter of any queue")
    answer = api.ok(api.call_queue(box, "requeue", **{"from": dead, "max": 2}))
    assert (answer["box"], answer["from"], answer["requeued"], answer["pending"]) == (box, dead, 2, 0)
    jobs = api.claim(box, max=9)["claimed"]
    assert [(job["data"], job["meta"], job["deliveries"]) for job in jobs] == [
        (1, {"m": 1}, 1),
        (2, {"m": 2}, 1),
    ]
    assert api.ok(api.call_queue(box, "requeue", **{"from": dead}))["requeued"] == 1
    assert api.data(dead) == ["not a letter of any queue"]
    assert api.ok(api.call_queue(box, "requeue", **{"from": dead}))["requeued"] == 0


@pytest.mark.exhaustive
def test_a_requeue_that_cannot_be_names_why(api, box):
    """§0.6, §8"""
    api.put(box, type="queue")
    api.append(f"{box}.log", 1)
    refuse = api.refused
    refuse(api.call_queue(box, "requeue"), 400, "invalid_request", "from")
    refuse(api.call_queue(box, "requeue", **{"from": "-"}), 400, "invalid_request", "from")
    refuse(api.call_queue(box, "requeue", **{"from": box}), 400, "invalid_request", "from")
    refuse(api.call_queue(box, "requeue", **{"from": f"{box}.log", "max": 0}), 400, "invalid_request", "max")
    refuse(api.call_queue(box, "requeue", **{"from": f"{box}.log", "x": 0}), 400, "invalid_request", "x")
    refuse(api.call_queue(box, "requeue", **{"from": f"{box}.none"}), 404, "box_not_found")
    refuse(api.call_queue(f"{box}.none", "requeue", **{"from": f"{box}.log"}), 404, "box_not_found")
    refuse(api.call_queue(f"{box}.log", "requeue", **{"from": box}), 409, "not_a_queue")
