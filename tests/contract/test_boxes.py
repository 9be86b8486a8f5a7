"""Boxes as things: made, configured, described, listed, deleted (§0.4, §1, §2).

Method: every promise of the config table and of the four box calls, asked over HTTP.
"""

import json

import pytest

DEFAULTS = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durability": "disk",
    "durable": False,
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "timestamping": {"mode": "arrival", "uncapped": False},
    "delete_on_empty_ms": 0,
    "compact": "none",
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
    "paused": False,
    "rate_per_s": 0,
    "retry_backoff": None,
    "key_concurrency": 0,
    "fair": False,
}


# -- names (§0.4) ---------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["{}", "A{}", "0{}", "a.b_c:d-e.{}", "a..{}", "a-{}-", "con.{}", "a:{}:", "{}.json"]
)
def test_a_legal_name_makes_a_box(api, box, name):
    """§0.4"""
    name = name.format(box[-12:])
    assert api.put(name)["box"] == name
    assert api.state(name)["box"] == name


def test_a_name_may_be_one_letter_or_255_long_and_not_one_longer(api, box):
    """§0.4"""
    longest = (box + "x" * 255)[:255]
    assert api.put(longest)["box"] == longest
    api.append(longest, 1)
    assert api.put("z")["box"] == "z"
    api.refused(api.send("PUT", f"/v0/boxes/{longest}x", {}), 400, "invalid_request")


ILLEGAL = [
    ".a", "_a", "-a", ":a", "%2E%2E", "%2E", "a%20b", "%20a", "a%0A", "a%0D%0A", "a%00", "%C3%A9",
    "a%C3%A9", "a%FF",
    "a%3Eb", "a%25", "a$", "a@b", "a+b", "a*", "a~b", "a%5Cb", "a%22", "a%3Fb", "a%23b", "a,b", "a;b",
    "a=b",
    "a%F0%9F%98%80", "a%EF%BC%8Fb",
]  # fmt: skip


EVERY_CALL = [
    ("PUT", "", {}),
    ("GET", "", None),
    ("DELETE", "", None),
    ("POST", "", {"records": [{"data": 1}]}),
    ("POST", "/diff", {}),
    ("POST", "/delete", {"before_seq": 1}),
    ("PUT", "/fence", {"token": "t"}),
    ("GET", "/records/1", None),
    ("GET", "/tail", None),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_name_is_refused_by_every_call(api, name):
    """§0.4: anything else is 400 invalid_request."""
    for method, tail, body in EVERY_CALL:
        api.refused(api.send(method, f"/v0/boxes/{name}{tail}", body), 400, "invalid_request")


@pytest.mark.parametrize("name", ["a%20b", "a%0A", "%2E%2E", "a%3Eb", "%C3%A9"])
def test_an_illegal_name_is_refused_through_every_front(api, name):
    """§0.4"""
    api.refused(api.send("PUT", f"/v0/boxes/{name}", {}), 400, "invalid_request")
    api.refused(api.send("DELETE", f"/v0/boxes/{name}"), 400, "invalid_request")


@pytest.mark.parametrize("name", ["a%2Fb", "a%2F..%2Fb", "%2Fetc%2Fpasswd", "..%2F..%2Fx"])
def test_an_encoded_slash_never_makes_a_box(api, name):
    """§0.4: a name never becomes a path. (Whether it is an illegal name or an unknown route is not said.)"""
    response = api.send("PUT", f"/v0/boxes/{name}", {})
    assert response.status_code in (400, 404)
    api.refused(
        response, response.status_code, {400: "invalid_request", 404: "not_found"}[response.status_code]
    )


def test_a_percent_encoded_legal_name_is_the_same_box(api, box):
    """§0.4"""
    api.put(f"x:{box}")
    encoded = f"%78%3A{box}".replace("-", "%2D").replace(".", "%2e")
    assert api.state(encoded)["box"] == f"x:{box}"
    assert api.append(encoded, 1)["box"] == f"x:{box}"
    assert api.data(f"x:{box}") == [1]


def test_names_are_case_sensitive(api, box):
    """§0.4"""
    api.append(box, "lower")
    api.append(box.upper(), "upper")
    assert api.data(box) == ["lower"]
    assert api.data(box.upper()) == ["upper"]


# -- create and reconfigure (§1, §2.1) ------------------------------------------------------------------


def test_put_creates_with_the_defaults_and_answers_the_whole_config(api, box):
    """§1, §2.1"""
    response = api.send("PUT", f"/v0/boxes/{box}", {})
    answer = api.ok(response, 201)
    assert answer["box"] == box
    assert answer["created"] is True
    assert {key: answer["config"].get(key, "absent") for key in DEFAULTS} == DEFAULTS


def test_put_again_answers_200_and_is_not_a_creation(api, box):
    """§2.1"""
    api.put(box, cap_records=5)
    answer = api.ok(api.send("PUT", f"/v0/boxes/{box}", {}), 200)
    assert answer["created"] is False
    assert answer["config"]["cap_records"] == 5


def test_put_merges_over_what_is_there(api, box):
    """§1"""
    api.put(box, ttl_ms=1_000_000, cap_records=7, discard="reject")
    answer = api.put(box, cap_records=9)
    assert answer["config"] == {**DEFAULTS, "ttl_ms": 1_000_000, "cap_records": 9, "discard": "reject"}
    assert api.state(box)["config"] == answer["config"]


def test_put_keeps_records_and_generation(api, box):
    """§2.1: reconfiguring is not recreating."""
    api.append(box, 1, 2)
    before = api.state(box)
    api.put(box, cap_records=100)
    after = api.state(box)
    assert after["generation"] == before["generation"]
    assert api.data(box) == [1, 2]


ACCEPTED = [
    ("type", "queue", "queue"),
    ("ttl_ms", 86_400_000, 86_400_000),
    ("cap_records", 1, 1),
    ("cap_bytes", 1 << 40, 1 << 40),
    ("discard", "reject", "reject"),
    ("durability", "memory", "memory"),
    ("durability", "disk", "disk"),
    ("durability", "fsync", "fsync"),
    ("priority", 0, 0),
    ("priority", -1000, -1000),
    ("priority", 1000, 1000),
    ("priority", 1001, 1000),
    ("priority", -5000, -1000),
    ("priority", None, None),
    ("auto_priority", False, False),
    ("auto_create", False, False),
    ("idempotency_window_ms", 1, 1),
    ("dedupe_node", False, False),
    (
        "timestamping",
        {"mode": "client-prefer", "uncapped": True},
        {"mode": "client-prefer", "uncapped": True},
    ),
    ("timestamping", {"mode": "client-require"}, {"mode": "client-require", "uncapped": False}),
    ("timestamping", {"uncapped": True}, {"mode": "arrival", "uncapped": True}),
    ("delete_on_empty_ms", 86_400_000, 86_400_000),
    ("compact", "tag", "tag"),
    ("compact", "none", "none"),
    ("lease_ms", 100, 100),
    ("lease_ms", 99, 100),
    ("lease_ms", 0, 100),
    ("lease_ms", 86_400_000, 86_400_000),
    ("lease_ms", 86_400_001, 86_400_000),
    ("claim_jitter_ms", 5000, 5000),
    ("claim_jitter_ms", 5001, 5000),
    ("max_deliveries", 3, 3),
    ("dead_letter", "some.other-box", "some.other-box"),
    ("dead_letter", None, None),
    ("leases_durable", True, True),
    ("paused", True, True),
    ("rate_per_s", 0.5, 0.5),
    ("rate_per_s", 1_000_000, 1_000_000),
    ("retry_backoff", None, None),
    ("retry_backoff", {}, {"initial_ms": 1000, "factor": 2, "max_ms": 3_600_000, "jitter": 0.2}),
    ("key_concurrency", 1, 1),
    ("fair", True, True),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("field, sent, resolved", ACCEPTED)
def test_a_config_value_is_taken_clamped_and_shown_resolved(api, box, field, sent, resolved):
    """§1"""
    expected = {**DEFAULTS, field: resolved}
    expected["durable"] = expected["durability"] == "fsync"
    assert api.put(box, **{field: sent})["config"] == expected
    assert api.state(box)["config"] == expected


REFUSED = [
    ("type", "stack"), ("type", 1), ("type", "Log"),
    ("ttl_ms", -1), ("ttl_ms", 1.5), ("ttl_ms", "1000"), ("ttl_ms", True), ("ttl_ms", 10**30), ("ttl_ms",
    [1]),
    ("cap_records", -1), ("cap_records", "10"), ("cap_records", 0.5),
    ("cap_bytes", -1), ("cap_bytes", {}),
    ("discard", "new"), ("discard", True),
    ("durability", "paper"), ("durability", True), ("durability", "FSYNC"),
    ("durable", "yes"), ("durable", 1),
    ("priority", "high"), ("priority", 1.5), ("priority", True),
    ("auto_priority", "true"), ("auto_priority", 1),
    ("auto_create", 0), ("auto_create", "no"),
    ("idempotency_window_ms", -1), ("idempotency_window_ms", "2m"),
    ("dedupe_node", "false"),
    ("timestamping", "arrival"), ("timestamping", {"mode": "server"}), ("timestamping", {"uncapped": "no"}),
    ("timestamping", []),
    ("delete_on_empty_ms", -1), ("delete_on_empty_ms", "never"),
    ("compact", "node"), ("compact", False),
    ("lease_ms", "30s"), ("lease_ms", 1.5),
    ("claim_jitter_ms", "1"),
    ("max_deliveries", -1), ("max_deliveries", "3"),
    ("dead_letter", 5), ("dead_letter", "not a name"), ("dead_letter", ".x"),
    ("leases_durable", "yes"),
    ("retry_backoff", 5), ("retry_backoff", {"jitter": 2}), ("retry_backoff", {"max": 1}),
    ("key_concurrency", -1), ("fair", 1),
    ("paused", 1), ("rate_per_s", -1), ("rate_per_s", "1"), ("rate_per_s", 1_000_001),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("field, value", REFUSED)
def test_a_bad_config_value_is_refused_by_name_and_makes_nothing(api, box, field, value):
    """§1, §0.6: the message names the field."""
    api.refused(api.send("PUT", f"/v0/boxes/{box}", {field: value}), 400, "invalid_request", field)
    assert not api.exists(box)


@pytest.mark.exhaustive
@pytest.mark.parametrize("field, value", REFUSED)
def test_a_bad_config_value_inside_an_append_is_refused_too(api, box, field, value):
    """§1, §3: `config` is the same object."""
    body = {"records": [{"data": 1}], "config": {field: value}}
    api.refused(api.post(box, body), 400, "invalid_request", field)
    assert not api.exists(box)


def test_a_bad_config_value_changes_nothing_of_an_existing_box(api, box):
    """§1: a PUT is taken whole or not at all."""
    api.put(box, cap_records=4)
    api.append(box, 1)
    with api.unchanged(box):
        api.refused(
            api.send("PUT", f"/v0/boxes/{box}", {"cap_records": 9, "ttl_ms": -1}),
            400,
            "invalid_request",
            "ttl_ms",
        )


def test_the_dead_letter_box_must_be_another_box(api, box):
    """§1"""
    response = api.send("PUT", f"/v0/boxes/{box}", {"type": "queue", "dead_letter": box})
    api.refused(response, 400, "invalid_request", "dead_letter")
    assert not api.exists(box)


@pytest.mark.parametrize("first, then", [("log", "queue"), ("queue", "log")])
def test_the_type_of_a_box_never_changes(api, box, first, then):
    """§1: 409 box_exists_incompatible."""
    api.put(box, type=first)
    with api.unchanged(box):
        api.refused(
            api.send("PUT", f"/v0/boxes/{box}", {"type": then, "cap_records": 3}),
            409,
            "box_exists_incompatible",
        )
    assert api.put(box, type=first)["created"] is False
    assert api.put(box)["config"]["type"] == first


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sent, durability",
    [
        ({"durable": True}, "fsync"),
        ({"durable": False}, "disk"),
        ({"durable": True, "durability": "disk"}, "disk"),
        ({"durable": False, "durability": "fsync"}, "fsync"),
        ({"durable": True, "durability": "memory"}, "memory"),
    ],
)
def test_durable_is_an_alias_that_gives_way_to_durability(api, box, sent, durability):
    """§1"""
    config = api.put(box, **sent)["config"]
    assert config["durability"] == durability
    assert config["durable"] is (durability == "fsync")


def test_the_class_of_a_box_can_be_raised_and_lowered_in_place(api, box):
    """§1.1 (disk and fsync)"""
    api.append(box, 1)
    assert api.put(box, durability="fsync")["config"]["durable"] is True
    api.append(box, 2)
    assert api.put(box, durable=False)["config"]["durability"] == "disk"
    api.append(box, 3)
    assert api.data(box) == [1, 2, 3]


def test_a_cleared_priority_is_null_again(api, box):
    """§1"""
    assert api.put(box, priority=5)["config"]["priority"] == 5
    assert api.put(box, ttl_ms=0)["config"]["priority"] == 5
    assert api.put(box, priority=None)["config"]["priority"] is None


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_every_durability_class_writes_and_reads_alike(api, box, durability):
    """§1.1: only an fsync box's ack waits for an fsync."""
    api.put(box, durability=durability)
    answer = api.append(box, "a", "b")
    assert answer["seqs"] == [1, 2]
    if durability == "fsync":
        assert answer["performance"]["fsync_ms"] >= 0
    else:
        assert answer["performance"].get("fsync_ms", 0) == 0
    api.delete(box, before_seq=2)
    assert api.data(box) == ["b"]
    assert api.state(box)["count"] == 1


def test_tightening_a_cap_evicts_what_is_stored_and_tombstones_it(api, box):
    """§2.1"""
    api.append(box, *range(1, 6))
    api.put(box, cap_records=2)
    answer = api.diff(box)
    assert [record["data"] for record in answer["records"]] == [4, 5]
    assert answer["tombstone"]["reason"] == "cap"
    assert (answer["tombstone"]["gap_from"], answer["tombstone"]["gap_to"]) == (1, 3)
    assert api.state(box)["count"] == 2


@pytest.mark.exhaustive
def test_tightening_a_byte_cap_evicts_just_enough(api, box):
    """§2.1"""
    api.append(box, *["x" * 100] * 5)
    each = api.state(box)["bytes"] // 5
    api.put(box, cap_bytes=each * 3)
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [3, 4, 5]
    assert answer["tombstone"]["reason"] == "cap"
    assert api.state(box)["bytes"] <= each * 3


def test_tightening_the_ttl_expires_what_is_stored_and_tombstones_it(api, box):
    """§2.1"""
    api.put(box, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": "old", "ts": 1000}, {"data": "new"}])
    assert api.data(box) == ["old", "new"]
    api.put(box, ttl_ms=3_600_000)
    answer = api.diff(box)
    assert [record["data"] for record in answer["records"]] == ["new"]
    assert answer["tombstone"]["reason"] == "ttl"
    assert (answer["tombstone"]["gap_from"], answer["tombstone"]["gap_to"]) == (1, 1)


@pytest.mark.exhaustive
def test_loosening_a_cap_brings_nothing_back(api, box):
    """§2.1, §4.2: the floors never go down."""
    api.append(box, 1, 2, 3)
    api.put(box, cap_records=1)
    api.put(box, cap_records=0)
    assert api.data(box) == [3]
    assert api.diff(box)["tombstone"]["reason"] == "cap"


# -- state (§2.2) ---------------------------------------------------------------------------------------


def test_a_new_box_is_described_as_empty(api, box):
    """§2.2"""
    api.put(box)
    state = api.state(box)
    assert state["box"] == box
    assert state["type"] == "log"
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"]) == (0, 1, 1)
    assert (state["count"], state["bytes"]) == (0, 0)
    assert isinstance(state["generation"], int)
    assert isinstance(state["effective_priority"], int | float)
    assert state["last_write_ts"] is None
    assert state["last_read_ts"] is None
    assert "fencing_token" not in state
    assert "queue" not in state


def test_the_state_follows_writes_and_deletes(api, box):
    """§2.2"""
    api.append(box, 1, 2, 3)
    state = api.state(box)
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"], state["count"]) == (3, 1, 4, 3)
    assert isinstance(state["last_write_ts"], int) and state["last_write_ts"] > 1_600_000_000_000
    api.delete(box, before_seq=3)
    state = api.state(box)
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"], state["count"]) == (3, 3, 4, 1)
    api.delete(box, before_seq=4)
    state = api.state(box)
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"], state["count"]) == (3, 4, 4, 0)
    assert state["bytes"] == 0


def test_a_queue_is_described_with_its_counters(api, box):
    """§2.2"""
    api.put(box, type="queue")
    state = api.state(box)
    assert state["type"] == "queue"
    assert state["queue"] == {
        "ready": 0,
        "in_flight": 0,
        "delayed": 0,
        "dead_lettered": 0,
        "outputs_pending": 0,
    }
    api.append(box, "job")
    assert api.state(box)["queue"]["ready"] == 1


def test_bytes_are_the_records_as_a_reader_gets_them(api, box):
    """§2.2: `bytes` is exact: the JSON of each record in a default read (which leaves the tag out)."""
    api.append(
        box,
        records=[
            {"data": 1},
            {"data": {"a": [1, 2, {"b": None}]}, "node": "n-1"},
            {"data": "€uro 😀", "meta": {"k": "v", "n": 1}, "tag": "t"},
        ],
    )
    raws = api.raw_records(box)
    assert api.state(box)["bytes"] == sum(len(raw.encode()) for raw in raws)
    api.delete(box, before_seq=2)
    assert api.state(box)["bytes"] == sum(len(raw.encode()) for raw in raws[1:])


def test_touch_false_leaves_the_recency_clock_alone(api, box):
    """§2.2"""
    api.put(box)
    api.state(box, touch="false")
    assert api.state(box, touch="false")["last_read_ts"] is None
    api.ok(api.send("GET", f"/v0/boxes/{box}"))
    assert isinstance(api.state(box, touch="false")["last_read_ts"], int)


def test_a_diff_is_a_read_for_the_recency_clock(api, box):
    """§2.2, §9"""
    api.put(box)
    api.diff(box)
    assert isinstance(api.state(box)["last_read_ts"], int)


def test_touch_must_be_true_or_false(api, box):
    """§2.2"""
    api.put(box)
    api.refused(
        api.send("GET", f"/v0/boxes/{box}", params={"touch": "banana"}), 400, "invalid_request", "touch"
    )


@pytest.mark.parametrize(
    "method, tail, body",
    [
        ("GET", "", None),
        ("POST", "/diff", {}),
        ("POST", "/diff", {"wait_ms": 20_000}),
        ("POST", "/delete", {"before_seq": 1}),
        ("PUT", "/fence", {"token": "t"}),
        ("GET", "/records/1", None),
        ("GET", "/tail", None),
        ("POST", "", {"records": [{"data": 1}], "create": False}),
    ],
)
def test_an_absent_box_is_404_and_asking_never_creates_it(api, box, method, tail, body):
    """§2.2, §4: never creates."""
    api.refused(api.send(method, f"/v0/boxes/{box}{tail}", body), 404, "box_not_found", box)
    assert not api.exists(box)
    assert api.boxes(prefix=box)["boxes"] == []


# -- list (§2.3) ----------------------------------------------------------------------------------------


def test_a_listed_box_shows_its_summary(api, box):
    """§2.3"""
    api.put(box, durability="fsync", cap_records=2)
    api.append(box, 1)
    api.append(box, 2)
    api.append(box, 3)
    answer = api.boxes(prefix=box)
    assert "next_cursor" not in answer
    (listed,) = answer["boxes"]
    state = api.state(box)
    for field in ("box", "type", "head_seq", "earliest_seq", "count", "bytes"):
        assert listed[field] == state[field]
    assert (listed["head_seq"], listed["earliest_seq"], listed["count"]) == (3, 2, 2)
    assert listed["durability"] == "fsync"
    assert listed["durable"] is True
    assert isinstance(listed["effective_priority"], int | float)


def pages(api, **params):
    """The names of every page, following `next_cursor`."""
    found, cursor = [], {}
    while True:
        answer = api.boxes(**params, **cursor)
        found.append([listed["box"] for listed in answer["boxes"]])
        if "next_cursor" not in answer:
            return found
        assert isinstance(answer["next_cursor"], str)
        cursor = {"cursor": answer["next_cursor"]}


def joined(found):
    return [name for page in found for name in page]


def test_the_list_is_sorted_by_name_over_all_shards(api, box):
    """§2.3: two shards serve this; sixteen names fall on both, and come back as one sorted list."""
    endings = ["0", "9", "A", "Z", "a", "z", ".a", ":a", "-a", "_a", "a.b", "a:b", "a-b", "a_b", "aa", "B"]
    names = [f"{box}{ending}" for ending in endings]
    for name in reversed(names):
        api.put(name, durability="memory")
    assert api.ok(api.send("GET", "/v0/ready"))["shards"] == 2
    assert pages(api, prefix=box) == [sorted(names)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "page_size, sizes", [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (6, [6]), (1000, [6])]
)
def test_paging_gives_every_box_once_and_a_cursor_only_when_there_is_more(api, box, page_size, sizes):
    """§2.3"""
    names = [f"{box}.{number}" for number in range(6)]
    for name in names:
        api.put(name, durability="memory")
    found = pages(api, prefix=f"{box}.", page_size=page_size)
    assert [len(page) for page in found] == sizes
    assert joined(found) == names


def test_the_list_pages_and_refuses_through_every_front(api, box):
    """§2.3"""
    for number in range(3):
        api.put(f"{box}.{number}", durability="memory")
    assert pages(api, prefix=box, page_size=2) == [[f"{box}.0", f"{box}.1"], [f"{box}.2"]]
    for field, value in [("cursor", "bogus"), ("page_size", "0"), ("page_size", "x")]:
        api.refused(api.send("GET", "/v0/boxes", params={field: value}), 400, "invalid_request", field)


def test_paging_goes_on_when_the_box_at_the_cursor_is_gone(api, box):
    """§2.3: a cursor is a place in the order of names, not a box."""
    for number in range(6):
        api.put(f"{box}.{number}", durability="memory")
    first = api.boxes(prefix=box, page_size=3)
    api.drop(f"{box}.2")
    api.drop(f"{box}.3")
    rest = api.boxes(prefix=box, page_size=3, cursor=first["next_cursor"])
    assert [listed["box"] for listed in rest["boxes"]] == [f"{box}.4", f"{box}.5"]


@pytest.mark.exhaustive
def test_a_page_holds_a_hundred_boxes_unless_asked_otherwise(api, box):
    """§2.3"""
    names = [f"{box}.{number:03}" for number in range(101)]
    for name in names:
        api.put(name, durability="memory")
    assert [len(page) for page in pages(api, prefix=box)] == [100, 1]
    assert joined(pages(api, prefix=box, page_size=7)) == names


def test_a_prefix_is_literal_and_case_sensitive(api, box):
    """§2.3"""
    api.put(f"{box}.a")
    api.put(f"{box}-a")
    assert [listed["box"] for listed in api.boxes(prefix=f"{box}.")["boxes"]] == [f"{box}.a"]
    assert api.boxes(prefix=f"{box.upper()}.")["boxes"] == []
    assert api.boxes(prefix=f"{box}.ab")["boxes"] == []


def test_without_a_prefix_every_box_is_listed(api, box):
    """§2.3"""
    api.put(f"0-{box}")
    assert f"0-{box}" in joined(pages(api, page_size=1000))


@pytest.mark.exhaustive
@pytest.mark.parametrize("cursor", ["!", "bogus", "%00", "e30=", "null", "😀"])
def test_a_bad_cursor_is_refused(api, box, cursor):
    """§2.3"""
    api.refused(
        api.send("GET", "/v0/boxes", params={"prefix": box, "cursor": cursor}),
        400,
        "invalid_request",
        "cursor",
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("page_size", ["0", "-1", "x", "1.5", "1e2"])
def test_a_bad_page_size_is_refused(api, page_size):
    """§2.3"""
    api.refused(
        api.send("GET", "/v0/boxes", params={"page_size": page_size}), 400, "invalid_request", "page_size"
    )


def test_a_page_never_holds_more_than_a_thousand(api, box):
    """§2.3: max 1000. (Whether more is clamped or refused is not said.)"""
    for page_size in (1001, 10**30):
        response = api.send("GET", "/v0/boxes", params={"prefix": box, "page_size": page_size})
        if response.status_code == 400:
            api.refused(response, 400, "invalid_request", "page_size")
        else:
            assert len(api.ok(response)["boxes"]) <= 1000


# -- delete a box (§2.4) --------------------------------------------------------------------------------


def test_deleting_a_box_takes_its_records(api, box):
    """§2.4"""
    api.append(box, 1, 2)
    answer = api.drop(box)
    assert answer["deleted"] is True
    assert answer["routers_removed"] == []
    assert not api.exists(box)
    assert api.boxes(prefix=box)["boxes"] == []
    api.refused(api.get_record(box, 1), 404, "box_not_found")


def test_deleting_an_absent_box_is_no_error(api, box):
    """§2.4"""
    answer = api.drop(box)
    assert answer["deleted"] is False
    assert answer["routers_removed"] == []
    assert api.drop(box, if_empty="true")["deleted"] is False


def test_if_empty_protects_a_box_that_has_live_records(api, box):
    """§2.4, §0.6: 409 box_not_empty."""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send("DELETE", f"/v0/boxes/{box}", params={"if_empty": "true"})
        api.refused(response, 409, "box_not_empty")
    api.delete(box, before_seq=2)
    assert api.drop(box, if_empty="true")["deleted"] is True
    assert not api.exists(box)


def test_if_empty_false_is_the_default(api, box):
    """§2.4"""
    api.append(box, 1)
    assert api.drop(box, if_empty="false")["deleted"] is True


def test_if_empty_must_be_true_or_false(api, box):
    """§2.4"""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send("DELETE", f"/v0/boxes/{box}", params={"if_empty": "maybe"})
        api.refused(response, 400, "invalid_request", "if_empty")


def test_a_box_whose_records_all_expired_is_empty(api, box):
    """§2.4, §2.2: emptiness is about live records."""
    api.put(box, ttl_ms=60_000, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": 1, "ts": 1000}])
    assert api.state(box)["count"] == 0
    assert api.drop(box, if_empty="true")["deleted"] is True


def test_a_box_made_again_is_a_new_box(api, box):
    """§2.4: seqs restart at 1; config, dedupe state, tags and fence are gone; the generation is new."""
    api.put(box, cap_records=50)
    api.append(box, records=[{"data": "old", "tag": "t"}] * 3, idempotency_key="k")
    api.fence(box, "token")
    generation = api.state(box)["generation"]
    api.drop(box)

    answer = api.append(box, "new", idempotency_key="k")
    assert (answer["created"], answer["deduped"], answer["seqs"]) == (True, False, [1])
    state = api.state(box)
    assert state["generation"] != generation
    assert state["config"] == DEFAULTS
    assert "fencing_token" not in state
    assert api.delete(box, match="t")["deleted"] == 0
    assert api.data(box) == ["new"]


@pytest.mark.exhaustive
def test_every_life_of_a_box_has_its_own_generation(api, box):
    """§2.2"""
    generations = []
    for _ in range(4):
        api.put(box)
        generations.append(api.state(box)["generation"])
        api.drop(box)
    assert len(set(generations)) == 4


def test_a_box_with_auto_create_off_is_not_made_again_by_a_write(api, box):
    """§1: `auto_create` false, then deleted: a plain write is 404, an explicit `create` or a PUT makes it."""
    api.put(box, auto_create=False)
    api.append(box, 1)
    api.drop(box)
    api.refused(api.post(box, {"records": [{"data": 2}]}), 404, "box_not_found", box)
    assert not api.exists(box)
    assert api.append(box, 3, create=True)["created"] is True
    assert api.data(box) == [3]


def test_put_makes_a_box_again_whatever_auto_create_said(api, box):
    """§1, §2.1"""
    api.put(box, auto_create=False)
    api.drop(box)
    assert api.put(box)["created"] is True


def test_the_config_survives_a_json_round_trip(api, box):
    """§1: what a GET shows can be PUT back."""
    api.put(box, cap_records=3, priority=9, dead_letter="some.box", timestamping={"mode": "client-prefer"})
    config = api.state(box)["config"]
    other = f"{box}.copy"
    assert api.put(other, **json.loads(json.dumps(config)))["config"] == config
