"""`/work` (§8): jobs pushed to a connection that holds them, and frees them by going away.

Method: a real stream over every front; events are waited for, never time.
"""

import contextlib

import pytest

from tests.support.sse import Parser


class Work:
    """An open stream of jobs."""

    def __init__(self, response):
        self.response = response
        self.parser = Parser()
        self._pieces = response.iter_raw()
        self._events = []

    def next(self):
        while not self._events:
            self._events = self.parser.feed(next(self._pieces))
        return self._events.pop(0)

    def jobs(self, count):
        found = [self.next() for _ in range(count)]
        assert {event.name for event in found} == {"job"}
        return found


@contextlib.contextmanager
def working(api, box, **params):
    headers = {"accept": "text/event-stream"}
    with api.another() as other:
        path = f"/v0/boxes/{box}/work"
        with other.client.stream("GET", path, params=params, headers=headers) as response:
            assert response.status_code == 200
            yield Work(response)


def in_flight(api, box):
    return api.state(box)["queue"]["in_flight"]


def test_a_stream_pushes_jobs_as_events(api, box):
    """§8: SSE `event: job`, `id: seq`."""
    api.put(box, type="queue")
    api.append(box, records=[{"data": {"n": 1}, "tag": "t", "meta": {"m": 1}}, {"data": 2}])
    with working(api, box, node="w", max=2, lease_ms=60_000) as work:
        headers = work.response.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
        first, second = work.jobs(2)
        assert work.parser.retry_ms == 2000
        assert (first.id, second.id) == ("1", "2")
        job = first.json
        assert (job["box"], job["$seq"], job["$tag"], job["meta"], job["data"]) == (
            box,
            1,
            "t",
            {"m": 1},
            {"n": 1},
        )
        assert job["deliveries"] == 1 and job["lease_id"] and job["deadline"] > job["$ts"]
        assert api.ack(box, 1, lease_ids=[job["lease_id"]])["acked"] == 1


def test_a_stream_reports_a_pause_and_goes_on_when_the_queue_resumes(api, box):
    """§23: `paused` and `resumed` events; the stream stays open, and leased jobs can be settled."""
    api.put(box, type="queue")
    api.append(box, 1, 2)
    with working(api, box, node="w", max=1) as work:
        (first,) = work.jobs(1)
        assert api.ok(api.call_queue(box, "pause"))["paused"] is True
        event = work.next()
        assert (event.name, event.json) == ("paused", {"box": box})
        assert api.ack(box, 1, lease_ids=[first.json["lease_id"]])["acked"] == 1
        assert api.ok(api.call_queue(box, "resume"))["paused"] is False
        assert work.next().name == "resumed"
        assert work.next().id == "2"


def test_a_stream_holds_no_more_than_its_max_and_gets_more_for_what_it_settles(api, box):
    """§8: keeps <= max leased to this connection."""
    api.put(box, type="queue")
    api.append(box, *range(1, 6))
    with working(api, box, node="w", max=2) as work:
        assert [event.id for event in work.jobs(2)] == ["1", "2"]
        assert in_flight(api, box) == 2
        api.ack(box, 1)
        assert work.next().id == "3"
        api.nack(box, 2, delay_ms=60_000)
        assert work.next().id == "4"
        assert in_flight(api, box) == 2


def test_a_stream_waits_for_jobs(api, box):
    """§8"""
    api.put(box, type="queue")
    with working(api, box, node="w") as work:
        api.append(box, 1)
        assert work.next().id == "1"


def test_closing_a_stream_frees_its_jobs_at_once(api, box):
    """§8: a lease of a day does not keep them."""
    api.put(box, type="queue", lease_ms=86_400_000)
    api.append(box, 1, 2)
    with working(api, box, node="w", max=2) as work:
        work.jobs(2)
        waiting = api.in_background(lambda other: other.claim(box, "x", max=2, wait_ms=30_000))
    answer, seconds = waiting()
    assert answer["count"] in (1, 2) and seconds < 25
    assert {job["deliveries"] for job in answer["claimed"]} == {2}


def test_a_stream_shares_with_workers_that_claim(api, box):
    """§8"""
    api.put(box, type="queue")
    api.append(box, 1, 2)
    with working(api, box, node="w") as work:
        assert work.next().id == "1"
        assert [job["$seq"] for job in api.claim(box, "x")["claimed"]] == [2]


def test_a_stream_ends_with_an_error_when_its_box_is_deleted(api, box):
    """§2.4, §7.2: error {code, error}."""
    api.put(box, type="queue")
    with working(api, box, node="w") as work:
        api.append(box, 1)
        work.jobs(1)
        api.drop(box)
        event = work.next()
        assert event.name == "error" and event.json["code"] == 404 and event.json["error"]
        with pytest.raises(StopIteration):
            work.next()


def test_line_breaks_in_data_do_not_break_an_event(api, box):
    """§8"""
    api.put(box, type="queue")
    text = '{"records": [{"data": {"a":\n1,\r\n"b": "\\n"}}]}'
    api.ok(api.client.post(f"/v0/boxes/{box}", content=text, headers={"content-type": "application/json"}))
    with working(api, box, node="w") as work:
        assert work.next().json["data"] == {"a": 1, "b": "\n"}


def test_a_bad_stream_is_refused_before_it_begins(api, box):
    """§0.6, §7.2, §8"""
    api.put(box, type="queue")
    api.append(box, 1)
    path = f"/v0/boxes/{box}/work"
    for params, field in (
        ({}, "node"),
        ({"node": ""}, "node"),
        ({"node": "w", "max": 0}, "max"),
        ({"node": "w", "lease_ms": "x"}, "lease_ms"),
        ({"node": "w", "limit": 1}, "limit"),
    ):
        api.refused(api.send("GET", path, params=params), 400, "invalid_request", field)
    response = api.client.get(path, params={"node": "w"}, headers={"accept": "application/json"})
    api.refused(response, 406, "not_acceptable")
    api.append(f"{box}.log", 1)
    api.refused(api.send("GET", f"/v0/boxes/{box}.log/work", params={"node": "w"}), 409, "not_a_queue")
    api.refused(api.send("GET", f"/v0/boxes/{box}.none/work", params={"node": "w"}), 404, "box_not_found")
    assert in_flight(api, box) == 0


def test_a_head_of_a_stream_leases_nothing(api, box):
    """§0.1"""
    api.put(box, type="queue")
    api.append(box, 1)
    response = api.client.head(f"/v0/boxes/{box}/work", params={"node": "w"})
    assert (response.status_code, response.content) == (200, b"")
    assert api.claim(box)["count"] == 1
