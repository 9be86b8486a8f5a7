"""Groups (§10): cursors that the server keeps, as durable as a write.

Method: commit, look, read; and every way in which two readers of one group can meet.
"""

import pytest


def test_a_group_remembers_its_place(api, box):
    """§10: PUT commits, GET shows cursor, lag and updated_ts."""
    api.append(box, *range(5))
    made = api.commit(box, "billing", 2)
    assert (made["box"], made["group"], made["cursor"], made["lag"], made["created"]) == (
        box,
        "billing",
        2,
        3,
        True,
    )
    shown = api.group(box, "billing")
    assert (shown["cursor"], shown["lag"], shown["updated_ts"]) == (2, 3, made["updated_ts"])
    later = api.commit(box, "billing", 5)
    assert (later["cursor"], later["lag"], later["created"]) == (5, 0, False)
    assert later["updated_ts"] >= made["updated_ts"]


def test_creating_answers_201_and_committing_200(api, box):
    """§10, like every other PUT."""
    api.append(box, 1)
    assert api.put_group(box, "g", cursor=0).status_code == 201
    assert api.put_group(box, "g", cursor=1).status_code == 200


def test_diff_reads_from_the_cursor_of_a_group(api, box):
    """§10: `group` in place of `from_seq`; reading commits nothing."""
    api.append(box, *range(1, 6))
    api.commit(box, "g", 3)
    answer = api.diff(box, group="g")
    assert [record["data"] for record in answer["records"]] == [4, 5]
    assert api.group(box, "g")["cursor"] == 3
    assert api.diff(box, group="g", limit=1)["next_from_seq"] == 4


def test_a_group_can_wait_for_more(api, box):
    """§4.6, §10"""
    api.append(box, 1)
    api.commit(box, "g", 1)
    waiting = api.in_background(lambda other: other.diff(box, group="g", wait_ms=30_000))
    api.append(box, 2)
    answer, seconds = waiting()
    assert [record["data"] for record in answer["records"]] == [2] and seconds < 25


def test_a_conditional_commit_loses_against_a_faster_one(api, box):
    """§10: 412 seq_mismatch when if_cursor differs; a group that is not there is at 0."""
    api.append(box, *range(5))
    api.commit(box, "g", 2, if_cursor=0)
    error = api.refused(api.put_group(box, "g", cursor=3, if_cursor=0), 412, "seq_mismatch", "if_cursor")
    assert error["detail"]["cursor"] == 2
    assert api.group(box, "g")["cursor"] == 2
    api.commit(box, "g", 3, if_cursor=2)
    api.refused(api.put_group(box, "new", cursor=1, if_cursor=1), 412, "seq_mismatch")
    api.refused(api.send("GET", f"/v0/boxes/{box}/groups/new"), 404, "group_not_found")


def test_a_group_can_go_back(api, box):
    """§10: a reader that wants to read again commits an earlier cursor."""
    api.append(box, 1, 2)
    api.commit(box, "g", 2)
    api.commit(box, "g", 0)
    assert [record["data"] for record in api.diff(box, group="g")["records"]] == [1, 2]


def test_groups_do_not_know_each_other(api, box):
    """§10"""
    api.append(box, 1, 2, 3)
    api.commit(box, "a", 1)
    api.commit(box, "b", 3)
    assert (api.group(box, "a")["cursor"], api.group(box, "b")["cursor"]) == (1, 3)


def test_groups_are_listed_by_name_page_by_page(api, box):
    """§10: list."""
    api.append(box, 1)
    for name in ("b", "a", "c.1", "c.2"):
        api.commit(box, name, 1)
    answer = api.groups(box)
    assert answer["box"] == box and "next_cursor" not in answer
    assert [(group["group"], group["cursor"], group["lag"]) for group in answer["groups"]] == [
        ("a", 1, 0),
        ("b", 1, 0),
        ("c.1", 1, 0),
        ("c.2", 1, 0),
    ]
    first = api.groups(box, page_size=3)
    rest = api.groups(box, page_size=3, cursor=first["next_cursor"])
    assert [group["group"] for group in first["groups"] + rest["groups"]] == ["a", "b", "c.1", "c.2"]
    assert [group["group"] for group in api.groups(box, prefix="c.")["groups"]] == ["c.1", "c.2"]


def test_a_deleted_group_is_gone(api, box):
    """§10: DELETE."""
    api.append(box, 1)
    api.commit(box, "g", 1)
    for was_there in (True, False):
        answer = api.ok(api.send("DELETE", f"/v0/boxes/{box}/groups/g"))
        assert (answer["box"], answer["group"], answer["deleted"]) == (box, "g", was_there)
    api.refused(api.send("GET", f"/v0/boxes/{box}/groups/g"), 404, "group_not_found", "g")
    api.refused(api.post_diff(box, {"group": "g"}), 404, "group_not_found", "g")
    assert api.groups(box)["groups"] == []


def test_groups_end_with_their_box(api, box):
    """§2.4"""
    api.append(box, 1)
    api.commit(box, "g", 1)
    api.drop(box)
    api.append(box, 1)
    assert api.groups(box)["groups"] == []


def test_a_group_below_the_floor_is_told_of_the_loss(api, box):
    """§10, §4.3"""
    api.put(box, cap_records=2)
    api.append(box, 1)
    api.commit(box, "g", 0)
    api.append(box, 2, 3)
    answer = api.diff(box, group="g")
    assert (answer["tombstone"]["reason"], answer["tombstone"]["gap_to"]) == ("cap", 1)
    assert [record["data"] for record in answer["records"]] == [2, 3]


def test_a_queue_has_groups_too(api, box):
    """§8: all of it works on a queue."""
    api.put(box, type="queue")
    api.append(box, 1, 2)
    api.commit(box, "g", 1)
    assert [record["data"] for record in api.diff(box, group="g")["records"]] == [2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "body, field",
    [
        ({}, "cursor"),
        ({"cursor": -1}, "cursor"),
        ({"cursor": "1"}, "cursor"),
        ({"cursor": 2}, "cursor"),
        ({"cursor": 2**64}, "cursor"),
        ({"cursor": 1, "if_cursor": -1}, "if_cursor"),
        ({"cursor": 1, "if": 1}, "if"),
    ],
)
def test_a_bad_commit_names_its_field_and_changes_nothing(api, box, body, field):
    """§0.6: a cursor beyond the head was never read."""
    api.append(box, 1)
    api.refused(api.put_group(box, "g", **body), 400, "invalid_request", field)
    assert api.groups(box)["groups"] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["-x", "a%20b", "%ff", "x" * 256, "a%2Fb"])
def test_names_of_groups_are_like_those_of_boxes(api, box, group):
    """§0.4"""
    api.append(box, 1)
    api.refused(api.put_group(box, group, cursor=0), 400, "invalid_request", "group")


@pytest.mark.exhaustive
def test_a_group_stands_in_place_of_another_start(api, box):
    """§10: in place of from_seq."""
    api.append(box, 1)
    api.commit(box, "g", 0)
    api.refused(api.post_diff(box, {"group": "g", "from_seq": 0}), 400, "invalid_request", "group")
    api.refused(api.post_diff(box, {"group": "g", "from_ts": 0}), 400, "invalid_request", "group")
    api.refused(api.post_diff(box, {"group": ""}), 400, "invalid_request", "group")


@pytest.mark.exhaustive
def test_groups_need_a_box(api, box):
    """§0.6"""
    api.refused(api.put_group(box, "g", cursor=0), 404, "box_not_found")
    api.refused(api.send("GET", f"/v0/boxes/{box}/groups"), 404, "box_not_found")
    api.refused(api.send("DELETE", f"/v0/boxes/{box}/groups/g"), 404, "box_not_found")
    api.append(box, 1)
    api.refused(
        api.send("GET", f"/v0/boxes/{box}/groups", params={"cursor": "?"}), 400, "invalid_request", "cursor"
    )
    api.refused(api.send("GET", f"/v0/boxes/{box}/groups/a/b"), 404, "not_found")
    api.refused(api.send("GET", f"/v0/boxes/{box}/groups/a", params={"x": 1}), 400, "invalid_request")
    api.refused(api.send("POST", f"/v0/boxes/{box}/groups/a", {}), 405, "method_not_allowed")
