"""Routers: records copied from box to box, on any shard, once and in order (§6, and the cascade of §2.4).

Method: every promise of the section over HTTP, waiting with long polls on the destination.
"""

import time
from urllib.parse import quote

import pytest

DEFAULTS = {
    "preserve_node": True,
    "preserve_tag": True,
    "create_dest": True,
    "filter": None,
    "allow_cycle": False,
}


# -- what the tests ask again and again -----------------------------------------------------------------


def put(api, name, **body):
    return api.send("PUT", f"/v0/routers/{quote(name, safe='')}", body)


def made(api, name, **body):
    return api.ok(put(api, name, **body), 200, 201)


def get(api, name):
    return api.ok(api.send("GET", f"/v0/routers/{quote(name, safe='')}"))


def drop(api, name):
    return api.ok(api.send("DELETE", f"/v0/routers/{quote(name, safe='')}"))


def listed(api, **params):
    return api.ok(api.send("GET", "/v0/routers", params=params))


def names(api, **params):
    return [router["router"] for router in listed(api, **params)["routers"]]


def arrived(api, box, count, **options):
    """The records of a box, once it has so many. Waits in the server."""
    found, cursor, deadline = [], 0, time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} came"
        answer = api.diff(box, from_seq=cursor, wait_ms=5_000, limit=1000, **options)
        found += answer["records"]
        cursor = answer["next_from_seq"]
    return found


def data_of(records):
    return [record["data"] for record in records]


def boxes(box, *letters):
    """Names that a hash spreads over the shards."""
    return [f"{box}.{letter}" for letter in letters]


# -- making one (§6.1) ----------------------------------------------------------------------------------


def test_a_router_is_made_once_and_shown_in_full(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    response = put(api, f"{box}->x", source=a, dest=b)
    assert response.status_code == 201
    answer = api.ok(response, 201)
    assert answer.pop("performance")
    assert answer == {"router": f"{box}->x", "source": a, "dest": b, **DEFAULTS, "created": True}
    again = put(api, f"{box}->x", source=a, dest=b)
    assert again.status_code == 200 and again.json()["created"] is False


def test_missing_boxes_are_made(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    assert api.exists(a) and api.exists(b)


def test_without_create_dest_a_missing_destination_is_not_found_and_nothing_is_made(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    api.refused(put(api, box, source=a, dest=b, create_dest=False), 404, "box_not_found", b)
    assert not api.exists(a) and not api.exists(b) and names(api, prefix=box) == []
    api.put(b)
    assert made(api, box, source=a, dest=b, create_dest=False)["create_dest"] is False
    api.append(a, 1)
    assert data_of(arrived(api, b, 1)) == [1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "mention"),
    [
        ({"dest": "b"}, "source"),
        ({"source": "a"}, "dest"),
        ({"source": "a", "dest": "a"}, "dest"),
        ({"source": "no good", "dest": "b"}, "source"),
        ({"source": "a", "dest": ""}, "dest"),
        ({"source": "a", "dest": "b", "filter": ["tag", "Like", "x"]}, "filter"),
        ({"source": "a", "dest": "b", "filter": ["tag", "Glob", "x*y"]}, "filter"),
        ({"source": "a", "dest": "b", "filter": ""}, "filter"),
        ({"source": "a", "dest": "b", "from_seq": -1}, "from_seq"),
        ({"source": "a", "dest": "b", "from_seq": 2**64}, "from_seq"),
        ({"source": "a", "dest": "b", "preserve_tag": "yes"}, "preserve_tag"),
        ({"source": "a", "dest": "b", "preserve_tags": True}, "preserve_tags"),
        ({"source": 7, "dest": "b"}, "source"),
        ([], "object"),
    ],
)
def test_a_bad_request_names_the_field_and_makes_nothing(api, box, body, mention):
    """§6.1, §0.9"""
    response = api.send("PUT", f"/v0/routers/{box}", body)
    api.refused(response, 400, "invalid_request", mention)
    assert names(api, prefix=box) == []


@pytest.mark.exhaustive
def test_names_of_routers_may_hold_an_arrow_and_are_checked(api, box):
    """§0.4"""
    a, b = boxes(box, "a", "b")
    for name in (f"{box}->x", f"{box}>", f"{box}:._-"):
        assert made(api, name, source=a, dest=b)["router"] == name
        assert get(api, name)["router"] == name
    for name in (">x", "no good", "x/y", "é", "x" * 256):
        api.refused(put(api, name, source=a, dest=b), 400, "invalid_request", "router")
    assert api.send("GET", "/v0/routers/").status_code == 404
    api.refused(api.send("GET", f"/v0/routers/{box}", params={"x": "1"}), 400, "invalid_request", "query")
    api.refused(api.send("POST", f"/v0/routers/{box}", {}), 405, "method_not_allowed")


def test_a_body_must_be_json(api, box):
    """§0.2"""
    response = api.send("PUT", f"/v0/routers/{box}", "{}", content_type="text/plain")
    api.refused(response, 415, "unsupported_media_type")


# -- cycles (§6.1) --------------------------------------------------------------------------------------


def test_a_cycle_is_refused_and_shown(api, box):
    """§6.1"""
    a, b, c = boxes(box, "a", "b", "c")
    made(api, f"{box}.1", source=a, dest=b)
    error = api.refused(put(api, f"{box}.2", source=b, dest=a), 409, "router_cycle")
    assert error["detail"]["cycle"] == [b, a, b]
    made(api, f"{box}.2", source=b, dest=c)
    error = api.refused(put(api, f"{box}.3", source=c, dest=a), 409, "router_cycle")
    assert error["detail"]["cycle"] == [c, a, b, c]
    assert names(api, prefix=box) == [f"{box}.1", f"{box}.2"]


def test_a_refused_cycle_makes_no_box(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    made(api, f"{box}.1", source=a, dest=b)
    api.refused(put(api, f"{box}.2", source=b, dest=a), 409, "router_cycle")
    drop(api, f"{box}.1")
    made(api, f"{box}.2", source=b, dest=a)


def test_an_allowed_cycle_stops_after_16_hops(api, box):
    """§6.1: the record and 16 copies of it."""
    a, b = boxes(box, "a", "b")
    made(api, f"{box}.1", source=a, dest=b)
    made(api, f"{box}.2", source=b, dest=a, allow_cycle=True)
    api.append(a, "ping")
    assert data_of(arrived(api, a, 9)) == ["ping"] * 9
    assert data_of(arrived(api, b, 8)) == ["ping"] * 8
    api.until(lambda: get(api, f"{box}.1")["lag"] == get(api, f"{box}.2")["lag"] == 0, f"{box}.quiet")
    assert (api.state(a)["head_seq"], api.state(b)["head_seq"]) == (9, 8)


def test_a_router_cannot_be_made_to_forbid_the_cycle_it_is_in(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    made(api, f"{box}.1", source=a, dest=b)
    made(api, f"{box}.2", source=b, dest=a, allow_cycle=True)
    api.refused(put(api, f"{box}.2", source=b, dest=a), 409, "router_cycle")
    assert get(api, f"{box}.2")["allow_cycle"] is True


# -- copying (§6.1) -------------------------------------------------------------------------------------


def test_what_is_appended_after_it_was_made_is_copied_in_order(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    api.append(a, "before")
    made(api, box, source=a, dest=b)
    for number in range(20):
        api.append(a, number, f"{number}!")
    expected = [each for number in range(20) for each in (number, f"{number}!")]
    assert data_of(arrived(api, b, 40)) == expected


def test_from_seq_starts_earlier(api, box):
    """§6.1"""
    a, b, c = boxes(box, "a", "b", "c")
    api.append(a, 1, 2, 3)
    made(api, f"{box}.all", source=a, dest=b, from_seq=0)
    made(api, f"{box}.some", source=a, dest=c, from_seq=2)
    api.append(a, 4)
    assert data_of(arrived(api, b, 4)) == [1, 2, 3, 4]
    assert data_of(arrived(api, c, 2)) == [3, 4]


def test_a_start_beyond_the_head_is_the_head(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    api.append(a, 1)
    made(api, box, source=a, dest=b, from_seq=1000)
    api.append(a, 2)
    assert data_of(arrived(api, b, 1)) == [2]


def test_everything_of_a_record_rides_along_but_its_seq_and_time(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    api.append(b, "first")
    made(api, box, source=a, dest=b)
    records = [
        {"data": {"x": 1.0, "big": 12345678901234567890}, "tag": "t1", "node": "n1", "meta": {"m": [1]}},
        {"data": None, "tag": "t2"},
        {"data": "plain"},
        {"data": [], "node": "n2"},
    ]
    api.append(a, records=records)
    copies = arrived(api, b, 5, include_tags=True)[1:]
    for record, copy in zip(records, copies, strict=True):
        assert copy["data"] == record["data"]
        assert copy.get("$tag") == record.get("tag")
        assert copy.get("$node") == record.get("node")
        assert copy.get("meta") == record.get("meta")
    assert [copy["$seq"] for copy in copies] == [2, 3, 4, 5]
    assert api.raw_data(b)[1] == '{"x": 1.0, "big": 12345678901234567890}'


def test_nodes_and_tags_are_left_behind_when_asked(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b, preserve_node=False, preserve_tag=False)
    api.append(a, records=[{"data": 1, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": 2, "node": "o"}])
    copies = arrived(api, b, 2, include_tags=True)
    assert copies[0]["meta"] == {"m": 1}
    assert not any("$tag" in copy or "$node" in copy for copy in copies)
    assert api.delete(b, match="t")["deleted"] == 0


@pytest.mark.parametrize(
    ("match", "expected", "shown"),
    [
        ("u-1", [1, 4], ["tag", "Eq", "u-1"]),
        (["tag", "Glob", "u-*"], [1, 2, 4], ["tag", "Glob", "u-*"]),
    ],
)
def test_a_filter_lets_through_what_matches(api, box, match, expected, shown):
    """§6.1, the grammar of §5; untagged records never match."""
    a, b = boxes(box, "a", "b")
    assert made(api, box, source=a, dest=b, filter=match)["filter"] == shown
    api.append(
        a,
        records=[
            {"data": 1, "tag": "u-1"},
            {"data": 2, "tag": "u-2"},
            {"data": 3},
            {"data": 4, "tag": "u-1"},
            {"data": 5, "tag": "v"},
        ],
    )
    assert data_of(arrived(api, b, len(expected))) == expected
    state = api.until(lambda: (found := get(api, box))["lag"] == 0 and found, f"{box}.quiet")
    assert (state["position"], state["forwarded_total"]) == (5, len(expected))
    assert api.state(b)["head_seq"] == len(expected)


def test_another_filter_takes_over_where_the_last_one_stood(api, box):
    """§6.1: a PUT with the same ends changes the router and copies nothing twice."""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b, filter="x")
    api.append(a, records=[{"data": 1, "tag": "x"}, {"data": 2, "tag": "y"}])
    arrived(api, b, 1)
    api.until(lambda: get(api, box)["lag"] == 0, f"{box}.quiet")
    assert put(api, box, source=a, dest=b, filter="y", from_seq=0).status_code == 200
    api.append(a, records=[{"data": 3, "tag": "x"}, {"data": 4, "tag": "y"}])
    assert data_of(arrived(api, b, 2)) == [1, 4]


def test_other_ends_make_another_router_under_the_name(api, box):
    """§6.1"""
    a, b, c = boxes(box, "a", "b", "c")
    made(api, box, source=a, dest=b)
    api.append(a, 1)
    arrived(api, b, 1)
    assert made(api, box, source=a, dest=c)["created"] is False
    api.append(a, 2)
    assert data_of(arrived(api, c, 1)) == [2]
    assert api.state(b)["head_seq"] == 1
    api.until(lambda: get(api, box)["forwarded_total"] == 1, f"{box}.quiet")


def test_fan_in_fan_out_and_chains(api, box):
    """§6.1"""
    a, b, c, d, e = boxes(box, "a", "b", "c", "d", "e")
    for source, dest in ((a, c), (b, c), (c, d), (c, e)):
        made(api, f"{source}->{dest}", source=source, dest=dest)
    for number in range(10):
        api.append(a, ["a", number])
        api.append(b, ["b", number])
    for box_name in (c, d, e):
        copies = data_of(arrived(api, box_name, 20))
        for letter in "ab":
            assert [number for name, number in copies if name == letter] == list(range(10))
    assert data_of(arrived(api, d, 20)) == data_of(arrived(api, e, 20)) == data_of(arrived(api, c, 20))


def test_deletes_do_not_propagate_and_copies_outlive_their_source(api, box):
    """§6.1, §6.4"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    api.append(a, 1, 2)
    arrived(api, b, 2)
    api.delete(a, before_seq=3)
    assert api.data(b) == [1, 2]
    assert drop(api, box)["deleted"] is True
    assert api.data(b) == [1, 2]


def test_what_was_deleted_before_it_was_copied_is_passed_over_in_silence(api, box):
    """§4.3, §6.1"""
    a, b = boxes(box, "a", "b")
    api.append(a, 1, 2, 3)
    api.delete(a, before_seq=3)
    made(api, box, source=a, dest=b, from_seq=0)
    assert data_of(arrived(api, b, 1)) == [3]
    assert api.read_all(b)[1] == []


def test_what_the_source_lost_before_it_was_copied_is_told(api, box):
    """§4.3, §6.1: `source_trim`"""
    a, b = boxes(box, "a", "b")
    api.put(a, cap_records=2)
    api.append(b, "old")
    for number in range(5):
        api.append(a, number)
    made(api, box, source=a, dest=b, from_seq=0)
    arrived(api, b, 3)
    records, tombstones = api.read_all(b)
    assert data_of(records) == ["old", 3, 4]
    (tombstone,) = tombstones
    assert tombstone["reason"] == "source_trim" and tombstone["missed_estimate"] == 3
    assert (tombstone["gap_from"], tombstone["gap_to"]) == (2, 2)
    assert api.state(b)["count"] == 3
    caught_up = api.diff(b, from_seq=api.state(b)["head_seq"])
    assert caught_up["tombstone"] is None and caught_up["caught_up"]


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_copies_follow_the_class_of_the_destination(api, box, durability):
    """§1.1, §6.1"""
    a, b, c = boxes(box, "a", "b", "c")
    api.put(b, durability=durability)
    api.put(a, durability="memory" if durability == "fsync" else "fsync")
    made(api, f"{box}.1", source=a, dest=b)
    made(api, f"{box}.2", source=b, dest=c)
    for number in range(5):
        api.append(a, number)
    assert data_of(arrived(api, b, 5)) == data_of(arrived(api, c, 5)) == [0, 1, 2, 3, 4]


def test_copies_into_a_box_that_wants_client_times_are_timed_on_arrival(api, box):
    """§6.1: copies get the destination's own $ts."""
    a, b = boxes(box, "a", "b")
    api.put(b, timestamping={"mode": "client-require"})
    made(api, box, source=a, dest=b)
    api.append(a, 1)
    (copy,) = arrived(api, b, 1)
    assert abs(copy["$ts"] - time.time() * 1000) < 60_000


# -- a destination that does not take it (§6.1) ---------------------------------------------------------


def test_a_full_destination_blocks_its_own_router_only_and_loses_nothing(api, box):
    """§6.1"""
    a, b, c = boxes(box, "a", "b", "c")
    api.put(b, cap_records=3, discard="reject")
    made(api, f"{box}.full", source=a, dest=b)
    made(api, f"{box}.free", source=a, dest=c)
    api.append(a, *range(10))
    assert data_of(arrived(api, c, 10)) == list(range(10))
    assert data_of(arrived(api, b, 3)) == [0, 1, 2]
    blocked = api.until(
        lambda: (found := get(api, f"{box}.full"))["state"] == "blocked" and found["lag"] == 7 and found,
        f"{box}.quiet",
    )
    assert "box_full" in blocked["last_error"]
    assert (blocked["forwarded_total"], blocked["position"], blocked["lag"]) == (3, 3, 7)
    assert get(api, f"{box}.free")["state"] == "ok"
    seen = []
    while len(seen) < 10:
        records = arrived(api, b, 1)
        seen += data_of(records)
        api.delete(b, before_seq=records[-1]["$seq"] + 1)
    assert seen == list(range(10))
    state = api.until(lambda: (found := get(api, f"{box}.full"))["lag"] == 0 and found, f"{box}.quiet")
    assert (state["state"], state["last_error"], state["forwarded_total"]) == ("ok", None, 10)


def test_a_destination_that_evicts_takes_parcels_larger_than_itself(api, box):
    """§6.1"""
    a, b = boxes(box, "a", "b")
    api.put(b, cap_records=2)
    api.append(a, *range(30))
    made(api, box, source=a, dest=b, from_seq=0)
    api.until(lambda: get(api, box)["forwarded_total"] == 30, f"{box}.quiet")
    assert api.data(b) == [28, 29]


def test_a_fence_holds_copies_back_until_it_is_gone(api, box):
    """§3: only the holder of the token writes."""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    api.fence(b, "mine")
    api.append(a, 1)
    api.until(lambda: "fencing_token" in (get(api, box)["last_error"] or ""), f"{box}.quiet")
    api.fence(b, "")
    assert data_of(arrived(api, b, 1)) == [1]


# -- asking and ending (§6.2, §6.3, §6.4) ---------------------------------------------------------------


def test_a_router_says_how_far_it_is(api, box):
    """§6.2"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    fresh = get(api, box)
    fresh.pop("performance")
    expected = {"router": box, "source": a, "dest": b, **DEFAULTS}
    progress = {"forwarded_total": 0, "position": 0, "lag": 0, "state": "ok", "last_error": None}
    assert fresh == {**expected, **progress}
    api.append(a, 1, 2, 3)
    arrived(api, b, 3)
    state = api.until(lambda: (found := get(api, box))["lag"] == 0 and found, f"{box}.quiet")
    assert (state["forwarded_total"], state["position"]) == (3, 3)


def test_an_unknown_router_is_not_found_and_its_deletion_deletes_nothing(api, box):
    """§6.2, §6.4"""
    api.refused(api.send("GET", f"/v0/routers/{box}"), 404, "router_not_found", box)
    answer = drop(api, box)
    assert (answer["router"], answer["deleted"]) == (box, False)


def test_a_deleted_router_copies_no_more(api, box):
    """§6.4"""
    a, b, c = boxes(box, "a", "b", "c")
    made(api, f"{box}.1", source=a, dest=b)
    made(api, f"{box}.2", source=a, dest=c)
    api.append(a, 1)
    arrived(api, b, 1)
    assert drop(api, f"{box}.1")["deleted"] is True
    api.append(a, 2)
    assert data_of(arrived(api, c, 2)) == [1, 2]
    assert api.data(b) == [1]
    assert names(api, prefix=box) == [f"{box}.2"]


def test_a_router_made_again_starts_at_the_head(api, box):
    """§6.1, §6.4"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    api.append(a, 1)
    arrived(api, b, 1)
    drop(api, box)
    api.append(a, 2)
    assert made(api, box, source=a, dest=b)["created"] is True
    api.append(a, 3)
    assert data_of(arrived(api, b, 2)) == [1, 3]
    api.until(lambda: get(api, box)["forwarded_total"] == 1, f"{box}.quiet")


def test_lists_are_sorted_filtered_and_paged(api, box):
    """§6.3"""
    a, b, c = boxes(box, "a", "b", "c")
    for number, (source, dest) in enumerate([(a, b), (a, c), (b, c), (a, b), (b, c)]):
        made(api, f"{box}.{number}", source=source, dest=dest)
    every = [f"{box}.{number}" for number in range(5)]
    assert names(api, prefix=box) == every
    assert names(api, prefix=box, source=a) == [every[0], every[1], every[3]]
    assert names(api, dest=c) == [every[1], every[2], every[4]]
    assert names(api, source=b, dest=c, prefix=f"{box}.4") == [every[4]]
    first = listed(api, prefix=box, page_size=2)
    assert [set(router) for router in first["routers"]] == [{"router", "source", "dest", *DEFAULTS}] * 2
    found, cursor = names_in(first), first["next_cursor"]
    while cursor is not None:
        page = listed(api, prefix=box, page_size=2, cursor=cursor)
        found += names_in(page)
        cursor = page.get("next_cursor")
    assert found == every
    exact = listed(api, prefix=box, page_size=5)
    assert names_in(exact) == every and "next_cursor" not in exact


def names_in(page):
    return [router["router"] for router in page["routers"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("params", "mention"),
    [
        ({"cursor": "!"}, "cursor"),
        ({"page_size": "0"}, "page_size"),
        ({"page_size": "1001"}, "page_size"),
        ({"source": "no good"}, "source"),
        ({"dest": "é"}, "dest"),
        ({"from": "x"}, "from"),
    ],
)
def test_a_bad_list_request_names_the_parameter(api, params, mention):
    """§6.3, §0.9"""
    api.refused(api.send("GET", "/v0/routers", params=params), 400, "invalid_request", mention)


def test_too_many_routers_are_throttled_and_a_known_one_is_not(fleet, combo, box):
    """§12"""
    from tests.contract.conftest import Api

    server = fleet(combo.front, max_routers=2)
    with combo.client(server.url) as client:
        api = Api(client, server, combo)
        a, b, c = boxes(box, "a", "b", "c")
        for name in names(api):
            drop(api, name)
        made(api, f"{box}.1", source=a, dest=b)
        made(api, f"{box}.2", source=a, dest=c)
        error = api.refused(put(api, f"{box}.3", source=b, dest=c), 429, "throttled")
        assert error["detail"]["limit"] == "routers"
        assert put(api, f"{box}.2", source=a, dest=c, filter="x").status_code == 200
        drop(api, f"{box}.1")
        assert put(api, f"{box}.3", source=b, dest=c).status_code == 201


# -- boxes that are deleted (§2.4) ----------------------------------------------------------------------


def test_deleting_a_box_takes_every_router_that_touches_it(api, box):
    """§2.4"""
    a, b, c = boxes(box, "a", "b", "c")
    made(api, f"{box}.z", source=a, dest=b)
    made(api, f"{box}.y", source=b, dest=c)
    made(api, f"{box}.x", source=a, dest=c)
    answer = api.drop(b)
    assert (answer["deleted"], answer["routers_removed"]) == (True, [f"{box}.y", f"{box}.z"])
    assert names(api, prefix=box) == [f"{box}.x"]
    api.append(a, 1)
    assert data_of(arrived(api, c, 1)) == [1]
    assert not api.exists(b), "copies do not bring a deleted box back"
    assert api.drop(b)["routers_removed"] == []


def test_a_box_that_is_not_deleted_keeps_its_routers(api, box):
    """§2.4: `if_empty`"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    api.append(a, 1)
    arrived(api, b, 1)
    api.refused(api.send("DELETE", f"/v0/boxes/{b}", params={"if_empty": "true"}), 409, "box_not_empty")
    api.append(a, 2)
    assert data_of(arrived(api, b, 2)) == [1, 2]


def test_a_box_that_goes_by_itself_takes_its_routers_too(api, box):
    """§1 `delete_on_empty_ms`, §2.4"""
    a, b = boxes(box, "a", "b")
    made(api, box, source=a, dest=b)
    api.put(b, delete_on_empty_ms=1)
    api.until(lambda: not api.exists(b), f"{box}.quiet")
    api.until(lambda: names(api, prefix=box) == [], f"{box}.quiet")
    api.append(a, 1)
    assert not api.exists(b)
