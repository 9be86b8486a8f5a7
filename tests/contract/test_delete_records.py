"""Deleting records (§5): what was asked for goes, at once, for good and in silence.

Method: delete by each form of the grammar and look through every call that could still show a record.
"""

import json

import pytest


def filled(api, box, tags):
    """One record a tag; `None` is an untagged record. The data is the seq."""
    records = [{"data": seq, **({"tag": tag} if tag else {})} for seq, tag in enumerate(tags, 1)]
    api.append(box, records=records)


def test_before_seq_deletes_everything_below_and_answers_the_new_state(api, box):
    """§5"""
    filled(api, box, [None] * 5)
    answer = api.delete(box, before_seq=4)
    assert (answer["box"], answer["deleted"]) == (box, 3)
    assert (answer["earliest_seq"], answer["head_seq"], answer["count"]) == (4, 5, 2)
    state = api.state(box)
    for field in ("earliest_seq", "head_seq", "count", "bytes"):
        assert answer[field] == state[field]
    assert api.seqs(box) == [4, 5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("before_seq", [0, 1])
def test_below_the_first_record_there_is_nothing_to_delete(api, box, before_seq):
    """§5"""
    filled(api, box, [None, None])
    with api.unchanged(box):
        assert api.delete(box, before_seq=before_seq)["deleted"] == 0


def test_everything_can_be_deleted_and_seqs_go_on(api, box):
    """§5, §2.2: earliest_seq is head_seq + 1 when there is none."""
    filled(api, box, [None] * 3)
    answer = api.delete(box, before_seq=4)
    assert (answer["deleted"], answer["count"], answer["bytes"]) == (3, 0, 0)
    assert (answer["earliest_seq"], answer["head_seq"]) == (4, 3)
    read = api.diff(box)
    assert (read["records"], read["next_from_seq"], read["caught_up"]) == ([], 3, True)
    assert read.get("tombstone") is None
    assert api.append(box, "next")["seqs"] == [4]


def test_a_delete_is_of_its_moment_and_takes_nothing_written_later(api, box):
    """§5: point-in-time."""
    filled(api, box, [None, None])
    assert api.delete(box, before_seq=1000)["deleted"] == 2
    api.append(box, "later")
    assert api.seqs(box) == [3]
    filled(api, f"{box}.m", ["x", "x"])
    assert api.delete(f"{box}.m", match="x")["deleted"] == 2
    api.append(f"{box}.m", records=[{"data": "later", "tag": "x"}])
    assert api.data(f"{box}.m") == ["later"]


def test_deleting_again_deletes_nothing(api, box):
    """§5: `deleted` counts what this call removed."""
    filled(api, box, ["x", "y", "x"])
    assert api.delete(box, match="x")["deleted"] == 2
    assert api.delete(box, match="x")["deleted"] == 0
    assert api.delete(box, before_seq=4)["deleted"] == 1
    assert api.delete(box, before_seq=4)["deleted"] == 0


TAGS = ["a", "ab", "abc", "b", "A", "a.b", "a*", None, "é1", "é2", "a", "a\U0001f600", "a\x7f"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "match, gone",
    [
        (["tag", "Eq", "a"], [1, 11]),
        ("a", [1, 11]),
        ("ab", [2]),
        ("a*", [7]),
        (["tag", "Eq", "a*"], [7]),
        (["tag", "Glob", "a*"], [1, 2, 3, 6, 7, 11, 12, 13]),
        (["tag", "Glob", "ab*"], [2, 3]),
        (["tag", "Glob", "a.*"], [6]),
        (["tag", "Glob", "é*"], [9, 10]),
        (["tag", "Glob", "nope*"], []),
        ("nope", []),
        (["tag", "Eq", "nope"], []),
    ],
    ids=json.dumps,
)
def test_match_deletes_by_tag_and_untagged_records_never_match(api, box, match, gone):
    """§5"""
    filled(api, box, TAGS)
    answer = api.delete(box, match=match)
    left = [seq for seq in range(1, len(TAGS) + 1) if seq not in gone]
    assert (answer["deleted"], answer["count"]) == (len(gone), len(left))
    assert api.seqs(box) == left
    assert api.state(box)["bytes"] == sum(len(raw.encode()) for raw in api.raw_records(box))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "match, before_seq, gone",
    [
        ("x", 4, [1, 3]),
        ("x", 1, []),
        ("x", 100, [1, 3, 5]),
        (["tag", "Glob", "x*"], 3, [1, 2]),
        (["tag", "Glob", "x*"], 6, [1, 2, 3, 5]),
    ],
)
def test_match_and_before_seq_are_anded(api, box, match, before_seq, gone):
    """§5"""
    filled(api, box, ["x", "xy", "x", None, "x", "y"])
    assert api.delete(box, match=match, before_seq=before_seq)["deleted"] == len(gone)
    assert api.seqs(box) == [seq for seq in range(1, 7) if seq not in gone]


def test_earliest_seq_moves_only_over_a_run_of_deleted_records(api, box):
    """§4.2"""
    filled(api, box, ["x", "y", "x", "x", "y"])
    assert api.delete(box, match="y")["earliest_seq"] == 1
    assert api.delete(box, before_seq=2)["earliest_seq"] == 3
    assert api.delete(box, match="x")["earliest_seq"] == 6


@pytest.mark.parametrize("body", [{}, None, {"match": None}], ids=json.dumps)
def test_a_delete_of_nothing_in_particular_is_refused(api, box, body):
    """§5: neither is 400 (an empty body is `{}`)."""
    filled(api, box, ["x"])
    with api.unchanged(box):
        api.refused(api.post_delete(box, body), 400, "invalid_request")


BAD = [
    ("match", []), ("match", ["tag"]), ("match", ["tag", "Eq"]), ("match", ["tag", "Eq", "a", "b"]),
    ("match", ["tag", "Eq", 5]), ("match", ["tag", "Eq", None]), ("match", ["tag", "Glob", 5]),
    ("match", ["node", "Eq", "a"]), ("match", ["Tag", "Eq", "a"]), ("match", ["tag", "Ne", "a"]),
    ("match", ["tag", "eq", "a"]), ("match", ["tag", "glob", "a*"]), ("match", ["tag", "Regex", "a.*"]),
    ("match", ["tag", "Glob", "*a"]), ("match", ["tag", "Glob", "a*b"]), ("match", ["tag", "Glob", "*a*"]),
    ("match", ["tag", "Glob", "a**"]), ("match", ["tag", "Glob", "**"]), ("match", ["tag", "Glob", "abc"]),
    ("match", ["tag", "Glob", ""]), ("match", [["tag", "Eq", "a"]]), ("match", ["And", ["tag", "Eq", "a"]]),
    ("match", 5), ("match", True), ("match", {"tag": "a"}), ("match", {}),
    ("before_seq", -1), ("before_seq", 1.5), ("before_seq", "2"), ("before_seq", True), ("before_seq",
    2**64),
    ("before_seq", [2]),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("field, value", BAD, ids=lambda value: json.dumps(value))
def test_a_filter_outside_the_grammar_is_refused_by_name_and_deletes_nothing(api, box, field, value):
    """§5"""
    filled(api, box, ["a", "ab", None])
    with api.unchanged(box):
        api.refused(api.post_delete(box, {field: value}), 400, "invalid_request", field)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "match", [["tag", "Glob", "a*b"], ["tag", "Ne", "a"], ["node", "Eq", "a"], 5], ids=json.dumps
)
def test_a_bad_filter_next_to_a_good_before_seq_deletes_nothing(api, box, match):
    """§5"""
    filled(api, box, ["a", "b"])
    with api.unchanged(box):
        api.refused(api.post_delete(box, {"before_seq": 2, "match": match}), 400, "invalid_request", "match")


def test_a_deleted_record_is_gone_for_every_reader_at_once(api, box):
    """§5: whatever the way to ask."""
    api.put(box, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": n, "tag": "x" if n == 2 else "y", "ts": n * 1000} for n in (1, 2, 3)])
    api.delete(box, match="x")
    assert api.seqs(box) == [1, 3]
    assert api.seqs(box, from_seq=1) == [3]
    assert api.seqs(box, from_ts=2000) == [3]
    assert api.seqs(box, match="x") == []
    assert api.seqs(box, match=["tag", "Glob", "x*"]) == []
    api.refused(api.get_record(box, 2), 404, "not_found")
    assert api.state(box)["count"] == 2
    assert api.boxes(prefix=box)["boxes"][0]["count"] == 2


@pytest.mark.exhaustive
def test_the_tag_of_a_deleted_record_can_be_used_again(api, box):
    """§5"""
    filled(api, box, ["x"])
    api.delete(box, match="x")
    filled(api, box, ["x"])
    assert api.seqs(box, match="x") == [2]
    assert api.delete(box, match="x")["deleted"] == 1


def test_evicted_records_are_not_there_to_be_deleted(api, box):
    """§5, §4.2: `deleted` counts live records, and the tag index forgets with the box."""
    api.put(box, cap_records=2)
    for _ in range(4):
        api.append(box, records=[{"data": 1, "tag": "x"}])
    assert api.delete(box, match="x")["deleted"] == 2
    assert api.diff(box)["tombstone"]["reason"] == "cap"


@pytest.mark.exhaustive
def test_deletes_and_evictions_taken_in_turns_keep_their_own_books(api, box):
    """§4.2, §5: only what the cap took is missed."""
    api.put(box, cap_records=4)
    filled(api, box, ["x", "y", "x", "y"])
    api.delete(box, match="x")
    for number in (5, 6):
        api.append(box, number)
    assert api.seqs(box) == [2, 4, 5, 6]
    assert api.diff(box).get("tombstone") is None
    api.append(box, 7)
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [4, 5, 6, 7]
    assert (answer["tombstone"]["gap_from"], answer["tombstone"]["gap_to"]) == (1, 3)
    assert answer["tombstone"]["reason"] == "cap"
    api.delete(box, before_seq=7)
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [7]
    assert (answer["tombstone"]["gap_from"], answer["tombstone"]["gap_to"]) == (1, 6)


@pytest.mark.exhaustive
def test_many_tags_are_deleted_by_prefix_exactly(api, box):
    """§5: prefix is a range of the tag index, with neighbours on both sides."""
    tags = [f"{group}/{number:03}" for number in range(100) for group in ("a", "b", "b0", "c")]
    filled(api, box, tags)
    assert api.delete(box, match=["tag", "Glob", "b/*"])["deleted"] == 100
    assert api.delete(box, match=["tag", "Glob", "b/*"])["deleted"] == 0
    records, _ = api.read_all(box, include_tags=True)
    assert [record["$tag"] for record in records] == [tag for tag in tags if not tag.startswith("b/")]


@pytest.mark.exhaustive
def test_a_waiting_reader_is_not_woken_by_a_delete(api, box):
    """§5, §4.6: a delete delivers nothing."""
    filled(api, box, ["x", "x"])
    poll = api.in_background(lambda other: other.diff(box, from_seq=2, wait_ms=150))
    api.delete(box, match="x")
    answer, seconds = poll()
    assert (answer["records"], answer["next_from_seq"]) == ([], 2)
    assert answer.get("tombstone") is None
    assert seconds >= 0.14
