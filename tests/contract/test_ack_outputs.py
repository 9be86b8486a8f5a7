"""Ack with outputs (§24): jobs are acked and outputs appear in other boxes once each, or nothing changes.

Method: two shards, so that boxes lie apart as their names fall. Long polls wait for what is on its way.
"""

import pytest

from tests.contract.test_queues import filled, seqs_of


@pytest.fixture(params=range(2))
def done(request, box):
    """Two names for the box of the outputs: they fall onto shards as they may."""
    return f"{box}.done{request.param}"


def data_of(api, box, count):
    """The data of a box, as soon as it has so many records."""

    def look():
        found = api.data(box) if api.exists(box) else []
        return found if len(found) >= count else None

    return api.until(look, f"{box}.quiet")


def acked(api, box, *seqs, outputs, key="k", **more):
    return api.ack(box, *seqs, outputs=outputs, idempotency_key=key, **more)


def test_outputs_of_an_ack_appear_in_their_boxes(api, box, done):
    filled(api, box, 3)
    lease_ids = [job["lease_id"] for job in api.claim(box, max=2)["claimed"]]
    outputs = {
        done: {"records": [{"data": {"n": 1.0}, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": 2}]},
        f"{done}.more": {"records": [{"data": "x"}]},
    }
    answer = acked(api, box, 1, 2, outputs=outputs, lease_ids=lease_ids)
    del answer["performance"]
    assert answer == {
        "box": box, "acked": 2, "skipped": [], "ready": 1, "in_flight": 0, "deduped": False
    }  # fmt: skip
    assert data_of(api, done, 2) == [{"n": 1.0}, 2] and data_of(api, f"{done}.more", 1) == ["x"]
    first = api.diff(done, include_tags=True)["records"][0]
    assert (first["$tag"], first["$node"], first["meta"]) == ("t", "n", {"m": 1})

    def delivered():
        state = api.state(box)
        return state if state["queue"]["outputs_pending"] == 0 else None

    assert api.until(delivered, f"{box}.quiet")["count"] == 1
    repeat = acked(api, box, 1, 2, outputs=outputs, lease_ids=lease_ids)
    assert (repeat["acked"], repeat["skipped"], repeat["deduped"]) == (2, [], True)
    assert data_of(api, done, 2) == [{"n": 1.0}, 2]


def test_the_key_may_be_a_header(api, box, done):
    filled(api, box, 1)
    api.claim(box)
    body = {"node": "w", "seqs": [1], "outputs": {done: {"records": [{"data": 1}]}}}
    for deduped in (False, True):
        response = api.send("POST", f"/v0/boxes/{box}/ack", body, headers={"Idempotency-Key": "k"})
        assert api.ok(response)["deduped"] is deduped
    assert data_of(api, done, 1) == [1]


def test_a_job_of_someone_else_changes_nothing(api, box, done):
    filled(api, box, 2)
    api.claim(box, max=2)
    api.ack(box, 2)
    with api.unchanged(box):
        response = api.call_queue(
            box, "ack", node="w", seqs=[1, 2], idempotency_key="k", outputs={done: {"records": [{"data": 1}]}}
        )
        error = api.refused(response, 409, "lease_lost", box)
    assert error["detail"]["skipped"] == [2]
    assert not api.exists(done)
    assert acked(api, box, 1, outputs={done: {"records": [{"data": 1}]}}, key="k")["acked"] == 1


def test_a_full_box_holds_its_outputs_back(api, box, done):
    filled(api, box, 1)
    api.put(done, cap_records=1, discard="reject")
    api.append(done, "old")
    api.claim(box)
    acked(api, box, 1, outputs={done: {"records": [{"data": "new"}]}})

    def held_back():
        queue = api.state(box)["queue"]
        return queue if queue.get("outputs_error") else None

    queue = api.until(held_back, f"{box}.quiet")
    assert queue["outputs_pending"] == 1 and queue["outputs_error"].startswith("box_full: ")
    api.delete(done, before_seq=2)
    assert data_of(api, done, 1) == ["new"]


def test_outputs_into_a_queue_are_jobs(api, box, done):
    """Also into the same queue: the next step of a saga."""
    filled(api, box, 1)
    api.put(done, type="queue")
    api.claim(box)
    fields = {"job_priority": 3, "ordering_key": "k"}
    outputs = {
        done: {"records": [{"data": "now", **fields}, {"data": "later", "delay_ms": 60_000}]},
        box: {"records": [{"data": "next"}]},
    }
    acked(api, box, 1, outputs=outputs)
    (job,) = api.claim(done, wait_ms=30_000, max=2)["claimed"]
    assert (job["data"], job["$job_priority"], job["$ordering_key"]) == ("now", 3, "k")
    assert api.state(done)["queue"]["delayed"] == 1
    assert seqs_of(api.claim(box, wait_ms=30_000)) == [2]


ONE = {"records": [{"data": 1}]}


@pytest.mark.parametrize("query", ["only_repeats=true", "logs=d"])
def test_a_request_has_no_parameters(api, box, query):
    """These two are between the processes of the server."""
    filled(api, box, 1)
    api.claim(box)
    body = {"node": "w", "seqs": [1], "idempotency_key": "k", "outputs": {f"{box}.d": ONE}}
    with api.unchanged(box):
        response = api.send("POST", f"/v0/boxes/{box}/ack?{query}", body)
        api.refused(response, 400, "invalid_request", query.partition("=")[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        ({"outputs": {"d": ONE}, "idempotency_key": None}, "idempotency_key"),
        ({"outputs": {}}, "outputs"),
        ({"outputs": {f"d{n}": ONE for n in range(9)}}, "outputs"),
        ({"outputs": {"d": {"records": []}}}, "outputs.d.records"),
        ({"outputs": {"d": {"records": [{"data": 1}] * 1001}}}, "1000"),
        ({"outputs": {"d": {"records": [{"data": 1, "ts": 5}]}}}, "ts"),
        ({"outputs": {"d": {"records": [{"data": 1, "delay_ms": 5}]}}}, "is a log"),
        ({"outputs": {"d": {"records": [{"data": 1, "tga": "t"}]}}}, "tga"),
        ({"outputs": {"d": {"record": []}}}, "record"),
        ({"outputs": {"a b": ONE}}, "outputs"),
        ({"outputs": {"d": ONE}, "seqs": [1, 1]}, "seqs"),
        ({"output": {"d": ONE}}, "output"),
        ({"idempotency_key": "k"}, "idempotency_key"),
    ],
)
def test_a_wrong_ack_with_outputs_changes_nothing(api, box, fields, mentions):
    filled(api, box, 1)
    api.claim(box)
    if "d" in fields.get("outputs", {}):
        fields = fields | {"outputs": {f"{box}.d": fields["outputs"]["d"]}}
        mentions = mentions.replace("outputs.d.", f"outputs.{box}.d.")
    body = {"node": "w", "seqs": [1], "idempotency_key": "k", **fields}
    with api.unchanged(box):
        api.refused(api.call_queue(box, "ack", **body), 400, "invalid_request", mentions)
    assert api.ack(box, 1)["acked"] == 1


@pytest.mark.exhaustive
def test_a_box_that_can_never_take_them_is_said_before(api, box):
    filled(api, box, 1)
    api.claim(box)
    api.put(f"{box}.ram", durability="memory")
    api.put(f"{box}.small", cap_bytes=20)
    api.put(f"{box}.gone", auto_create=False)
    api.drop(f"{box}.gone")
    api.put(f"{box}.fenced")
    api.fence(f"{box}.fenced", "token")
    for name, status, code in (
        ("ram", 400, "invalid_request"),
        ("small", 400, "record_too_large"),
        ("gone", 404, "box_not_found"),
        ("fenced", 412, "fencing_token_mismatch"),
    ):
        outputs = {f"{box}.{name}": {"records": [{"data": "x" * 100}]}}
        with api.unchanged(box):
            response = api.call_queue(box, "ack", node="w", seqs=[1], idempotency_key="k", outputs=outputs)
            api.refused(response, status, code)
    outputs = {f"{box}.later": ONE}
    assert acked(api, box, 1, outputs=outputs)["acked"] == 1
    api.put(f"{box}.later", durability="memory")
    assert acked(api, box, 1, outputs=outputs)["deduped"], "a repeat answers the same"


@pytest.mark.exhaustive
def test_the_queue_is_looked_at_first(api, box):
    body = {"node": "w", "seqs": [1], "outputs": 7}
    api.refused(api.call_queue(box, "ack", **body), 404, "box_not_found")
    api.put(box)
    api.refused(api.call_queue(box, "ack", **body), 409, "not_a_queue")
    body = {"node": "w", "seqs": [1], "idempotency_key": "k", "outputs": {f"{box}.d": ONE}}
    api.refused(api.call_queue(box, "ack", **body), 409, "not_a_queue")
