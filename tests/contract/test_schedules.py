"""Schedules: records appended when they are due (§22).

Method: every promise of the section over HTTP. Tests wait in the server for records.
"""

import time

import pytest


def put(api, name, **body):
    return api.send("PUT", f"/v0/schedules/{name}", {"record": {"data": 1}, **body})


def created(api, name, **body):
    return api.ok(put(api, name, **body), 201)


def get(api, name):
    return api.ok(api.send("GET", f"/v0/schedules/{name}"))


def names(api, **params):
    return [each["schedule"] for each in api.ok(api.send("GET", "/v0/schedules", params=params))["schedules"]]


def arrived(api, box, count):
    """The first records of a box, once it has so many. Waits in the server."""
    found, deadline = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} came"
        found += api.diff(box, from_seq=len(found), wait_ms=5_000, include_tags=True)["records"]
    return found[:count]


def test_a_schedule_appends_a_record_at_each_of_its_due_times(api, box):
    """§22"""
    api.put(box)
    record = {"data": {"a": 1.0}, "tag": "t", "node": "n", "meta": {"k": "v"}}
    answer = created(api, box, box=box, record=record, every_ms=100)
    assert answer.pop("performance")
    first_due = answer.pop("next_due")
    assert first_due == answer.pop("created_ts") + 100
    assert answer == {
        "schedule": box,
        "box": box,
        "record": record,
        "cron": None,
        "every_ms": 100,
        "time_zone": "UTC",
        "paused": False,
        "end_ts": None,
        "catch_up": "one",
        "last_due": None,
        "fired_total": 0,
        "state": "active",
        "last_error": None,
        "created": True,
    }
    records = arrived(api, box, 3)
    assert [each["meta"]["$due_ts"] for each in records] == [first_due, first_due + 100, first_due + 200]
    assert all(each["$ts"] >= each["meta"]["$due_ts"] for each in records)
    assert {each["meta"]["$schedule"] for each in records} == {box}
    assert (records[0]["data"], records[0]["$tag"], records[0]["$node"]) == ({"a": 1.0}, "t", "n")
    assert get(api, box)["fired_total"] >= 3 and get(api, box)["last_due"] >= first_due + 200
    assert put(api, box, box=box, record=record, every_ms=100, paused=True).json()["state"] == "paused"
    assert get(api, box)["next_due"] is None


def test_a_cron_schedule_shows_its_next_due_time(api, box):
    """§22"""
    api.put(box)
    answer = created(api, box, box=box, cron="0 9 1 jan *", time_zone="Asia/Tokyo")
    next_due = time.gmtime(answer["next_due"] / 1000)
    assert (next_due.tm_mon, next_due.tm_mday, next_due.tm_hour, next_due.tm_min) == (1, 1, 0, 0)
    again = put(api, box, box=box, cron="0 9 1 jan *", time_zone="Asia/Tokyo")
    assert again.status_code == 200 and again.json()["created"] is False
    ended = put(api, box, box=box, cron="0 9 1 jan *", time_zone="Asia/Tokyo", end_ts=answer["next_due"] - 1)
    assert ended.json()["state"] == "ended" and ended.json()["next_due"] is None


@pytest.mark.parametrize(
    ("body", "mention"),
    [
        ({}, "cron"),
        ({"cron": "@daily", "every_ms": 100}, "cron"),
        ({"cron": "* * * *"}, "cron"),
        ({"cron": ""}, "cron"),
        ({"cron": "61 * * * *"}, "minute"),
        ({"cron": "0 0 31 feb *"}, "cron"),
        ({"every_ms": 99}, "every_ms"),
        ({"every_ms": 100, "catch_up": "some"}, "catch_up"),
        ({"cron": "@daily", "time_zone": "Mars/Base"}, "time_zone"),
        ({"every_ms": 100, "record": {"tag": "t"}}, "record"),
        ({"every_ms": 100, "record": {"data": 1, "tag": "x" * 999}}, "record.tag"),
        ({"every_ms": 100, "typo": 1}, "typo"),
        ({"every_ms": 100, "box": "no good"}, "box"),
    ],
)
def test_a_definition_with_an_error_is_refused_by_its_field(api, box, body, mention):
    """§22"""
    api.put(box)
    api.refused(put(api, box, **{"box": box, **body}), 400, "invalid_request", mention)
    assert names(api, prefix=box) == []


def test_a_schedule_needs_a_box_and_keeps_it(api, box):
    """§22"""
    api.refused(put(api, box, box=box, every_ms=60_000), 404, "box_not_found", box)
    other = f"{box}.other"
    api.put(box), api.put(other)
    created(api, box, box=box, every_ms=60_000)
    api.refused(put(api, box, box=other, every_ms=60_000), 400, "invalid_request", "box")
    api.refused(api.send("PUT", "/v0/schedules/no%20good", {}), 400, "invalid_request", "schedule")


def test_schedules_are_found_listed_and_deleted_by_name_on_every_shard(api, box):
    """§22"""
    for letter in "abcd":
        api.put(f"{box}.{letter}")
        created(api, f"{box}.s{letter}", box=f"{box}.{letter}", every_ms=60_000)
    assert names(api, prefix=box) == [f"{box}.s{letter}" for letter in "abcd"]
    assert names(api, prefix=box, box=f"{box}.c") == [f"{box}.sc"]
    page = api.ok(api.send("GET", "/v0/schedules", params={"prefix": box, "page_size": 3}))
    assert len(page["schedules"]) == 3
    assert names(api, prefix=box, cursor=page["next_cursor"]) == [f"{box}.sd"]
    assert [get(api, f"{box}.s{letter}")["box"] for letter in "abcd"] == [
        f"{box}.{letter}" for letter in "abcd"
    ]
    assert api.ok(api.send("DELETE", f"/v0/schedules/{box}.sb"))["deleted"] is True
    assert api.ok(api.send("DELETE", f"/v0/schedules/{box}.sb"))["deleted"] is False
    api.refused(api.send("GET", f"/v0/schedules/{box}.sb"), 404, "schedule_not_found", f"{box}.sb")
    gone = api.ok(api.send("DELETE", f"/v0/boxes/{box}.a"))
    assert gone["schedules_removed"] == [f"{box}.sa"] and gone["routers_removed"] == []
    assert names(api, prefix=box) == [f"{box}.sc", f"{box}.sd"]


def test_a_run_appends_at_once_and_once_for_each_key(api, box):
    """§22"""
    api.put(box)
    created(api, box, box=box, cron="@monthly")
    key = {"Idempotency-Key": "k"}
    first = api.ok(api.send("POST", f"/v0/schedules/{box}/run", headers=key))
    assert (first["schedule"], first["box"], first["seq"], first["deduped"]) == (box, box, 1, False)
    again = api.ok(api.send("POST", f"/v0/schedules/{box}/run", headers=key))
    assert (again["seq"], again["deduped"]) == (1, True)
    assert api.ok(api.send("POST", f"/v0/schedules/{box}/run"))["seq"] == 2
    assert get(api, box)["fired_total"] == 2 and get(api, box)["last_due"] is None
    api.refused(api.send("POST", f"/v0/schedules/{box}.no/run"), 404, "schedule_not_found", box)


def test_a_full_box_blocks_its_schedule_and_says_why(api, box):
    """§22"""
    api.put(box, cap_records=1, discard="reject")
    created(api, box, box=box, every_ms=100)
    arrived(api, box, 1)
    deadline = time.monotonic() + 20
    while (state := get(api, box))["state"] != "blocked":
        assert time.monotonic() < deadline, state
    assert state["last_error"].startswith("box_full: ") and state["fired_total"] == 1
    first = state["last_due"]
    api.ok(api.send("POST", f"/v0/boxes/{box}/delete", {"before_seq": 2}))
    (record,) = api.diff(box, from_seq=1, wait_ms=20_000)["records"]
    assert record["meta"]["$due_ts"] > first
