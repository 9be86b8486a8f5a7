"""What operators see and do before they do it (§31): lists of jobs, dry runs, requeue by seq and by tag.

Method: jobs in every state; dead letters of several tags.
"""

import pytest

from tests.contract.test_dead_letters import letters_of
from tests.contract.test_queues import filled

LEASED = {"seq", "deliveries", "node", "lease_id", "deadline", "first_ts"}


def jobs(api, box, **params):
    answer = api.ok(api.send("GET", f"/v0/boxes/{box}/leases", params=params))
    assert answer["box"] == box and answer["state"] == params.get("state", "leased")
    return answer["jobs"], answer.get("next_cursor")


def test_jobs_are_listed_by_state(api, box):
    filled(api, box, 3)
    api.append(
        box, records=[{"data": 4, "delay_ms": 60_000}, {"data": 5, "ordering_key": "k", "job_priority": 2}]
    )
    lease = api.claim(box, node="one", max=1)["claimed"][0]
    api.claim(box, node="two", max=2)
    api.nack(box, 1, 2, node="two", delay_ms=60_000, error="bad")
    (five,), cursor = jobs(api, box)
    assert cursor is None and set(five) >= LEASED
    assert (five["seq"], five["node"], five["lease_id"], five["deadline"], five["deliveries"]) == (
        5, "one", lease["lease_id"], lease["deadline"], 1
    )  # fmt: skip
    assert (five["ordering_key"], five["job_priority"]) == ("k", 2)
    delayed, _ = jobs(api, box, state="delayed")
    assert [job["seq"] for job in delayed] == [1, 2, 4]
    assert (delayed[0]["last_node"], delayed[0]["last_error"], delayed[0]["deliveries"]) == ("two", "bad", 1)
    assert all(job["due_ts"] > five["first_ts"] for job in delayed)
    assert jobs(api, box, state="ready") == ([{"seq": 3, "deliveries": 0}], None)


def test_a_list_of_jobs_is_paged(api, box):
    filled(api, box, 7)
    api.claim(box, max=7)
    api.ack(box, 3)
    found, cursor = [], "0"
    while cursor is not None:
        page, cursor = jobs(api, box, page_size=2, cursor=cursor)
        assert len(page) <= 2
        found += [job["seq"] for job in page]
    assert found == [1, 2, 4, 5, 6, 7]


@pytest.mark.exhaustive
def test_a_wrong_list_of_jobs_is_refused(api, box):
    path = f"/v0/boxes/{box}/leases"
    api.refused(api.send("GET", path), 404, "box_not_found")
    api.put(box)
    api.refused(api.send("GET", path, params={"state": "gone"}), 409, "not_a_queue")
    api.put(f"{box}.q", type="queue")
    path = f"/v0/boxes/{box}.q/leases"
    for name, value in (("state", "gone"), ("cursor", "x"), ("page_size", "0"), ("colour", "red")):
        api.refused(api.send("GET", path, params={name: value}), 400, "invalid_request", name)


def test_a_dry_run_of_a_delete_counts(api, box):
    api.append(box, records=[{"data": n, "tag": "ab"[n % 2]} for n in range(6)])
    for fields, count in (({"match": "a"}, 3), ({"before_seq": 5}, 4), ({"match": "a", "before_seq": 3}, 1)):
        with api.unchanged(box):
            answer = api.delete(box, dry_run=True, **fields)
        assert (answer["deleted"], answer["dry_run"], answer["count"]) == (count, True, 6)
    answer = api.delete(box, match="a")
    assert answer["deleted"] == 3 and "dry_run" not in answer


def test_dead_letters_are_requeued_by_seq_and_by_tag(api, box):
    dead = f"{box}.dead"
    api.put(box, type="queue", max_deliveries=1, dead_letter=dead)
    api.append(box, records=[{"data": n, "tag": "ab"[n % 2]} for n in range(6)])
    api.claim(box, max=6)
    api.nack(box, 1, 2, 3, 4, 5, 6)
    api.claim(box)
    letters_of(api, dead, 6)

    def requeue(**fields):
        return api.ok(api.call_queue(box, "requeue", **{"from": dead, **fields}))

    with api.unchanged(dead):
        counted = [
            requeue(dry_run=True, **fields)
            for fields in ({}, {"max": 2}, {"match": "a"}, {"seqs": [2, 2, 99]}, {"match": "a", "max": 1})
        ]
    assert [answer["requeued"] for answer in counted] == [6, 2, 3, 1, 1]
    assert all(answer["dry_run"] and answer["pending"] == 0 for answer in counted)
    answer = requeue(seqs=[2, 5])
    assert (answer["requeued"], answer["pending"]) == (2, 0) and "dry_run" not in answer
    assert api.seqs(dead) == [1, 3, 4, 6]
    assert requeue(match="a")["requeued"] == 2
    assert api.seqs(dead) == [4, 6]
    assert sorted(job["data"] for job in api.claim(box, max=9)["claimed"]) == [0, 1, 2, 4]


@pytest.mark.exhaustive
def test_a_requeue_by_both_is_refused(api, box):
    api.put(box, type="queue")
    api.put(f"{box}.dead")
    for fields in ({"seqs": [1], "match": "a"}, {"seqs": []}, {"seqs": list(range(1001))}, {"match": 7}):
        response = api.call_queue(box, "requeue", **{"from": f"{box}.dead", **fields})
        api.refused(response, 400, "invalid_request")
