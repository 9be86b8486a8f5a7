"""Append (§3): atomic, contiguous, conditional, repeatable.

Method: every field of the body alone and in the combinations the contract promises; after each refusal, that
nothing changed.
"""

import json

import pytest
import trio

# -- the plain write ------------------------------------------------------------------------------------


def test_the_first_write_creates_the_box_and_starts_at_seq_one(api, box):
    """§3, §0.3"""
    answer = api.ok(api.post(box, {"records": [{"data": "a"}, {"data": "b"}]}), 201)
    assert answer["box"] == box
    assert (answer["first_seq"], answer["last_seq"], answer["seqs"]) == (1, 2, [1, 2])
    assert (answer["head_seq"], answer["count"]) == (2, 2)
    assert answer["created"] is True
    assert answer["deduped"] is False


def test_later_writes_answer_200_and_go_on_from_the_head(api, box):
    """§3"""
    api.append(box, 1, 2)
    answer = api.ok(api.post(box, {"records": [{"data": 3}, {"data": 4}, {"data": 5}]}), 200)
    assert (answer["first_seq"], answer["last_seq"], answer["seqs"]) == (3, 5, [3, 4, 5])
    assert (answer["head_seq"], answer["count"], answer["created"]) == (5, 3, False)
    assert api.data(box) == [1, 2, 3, 4, 5]


def test_return_seqs_false_leaves_the_list_out(api, box):
    """§3"""
    answer = api.append(box, 1, 2, 3, params={"return_seqs": "false"})
    assert "seqs" not in answer
    assert (answer["first_seq"], answer["last_seq"], answer["count"], answer["head_seq"]) == (1, 3, 3, 3)
    assert api.append(box, 4, params={"return_seqs": "true"})["seqs"] == [4]


def test_return_seqs_must_be_true_or_false(api, box):
    """§3"""
    response = api.post(box, {"records": [{"data": 1}]}, params={"return_seqs": "perhaps"})
    api.refused(response, 400, "invalid_request", "return_seqs")
    assert not api.exists(box)


def test_a_record_comes_back_with_what_it_was_given_and_nothing_null(api, box):
    """§0.5"""
    api.append(
        box,
        records=[
            {"data": {"x": 1}, "tag": "t", "node": "n", "meta": {"k": [1]}},
            {"data": None},
        ],
    )
    full, bare = api.diff(box, include_tags=True)["records"]
    assert set(full) == {"$seq", "$ts", "$node", "$tag", "meta", "data"}
    assert (full["$seq"], full["$node"], full["$tag"], full["meta"]) == (1, "n", "t", {"k": [1]})
    assert full["data"] == {"x": 1}
    assert set(bare) == {"$seq", "$ts", "data"}
    assert bare["data"] is None


def test_the_default_node_is_for_records_without_one(api, box):
    """§3; an empty node counts as absent, so it takes the default too."""
    api.append(box, node="d", records=[{"data": 1}, {"data": 2, "node": "own"}, {"data": 3, "node": ""}])
    assert [record["$node"] for record in api.diff(box)["records"]] == ["d", "own", "d"]


def test_an_empty_tag_or_node_counts_as_absent(api, box):
    """§0.5"""
    api.append(box, node="", records=[{"data": 1, "tag": "", "node": ""}, {"data": 2}])
    for record in api.diff(box, include_tags=True)["records"]:
        assert set(record) == {"$seq", "$ts", "data"}


def test_two_boxes_count_apart(api, box):
    """§3"""
    api.append(box, 1, 2, 3)
    assert api.append(f"{box}.other", "x")["seqs"] == [1]
    assert api.append(box, 4)["seqs"] == [4]


async def at_once(api, box, bodies):
    """Post them all at the same time: many connections on HTTP/1.1, one on HTTP/2. The answers, in order."""
    answers = [None] * len(bodies)

    async with api.combo.async_client(api.server.url) as client, trio.open_nursery() as nursery:

        async def post(number):
            answers[number] = await client.post(f"/v0/boxes/{box}", json=bodies[number])

        for number in range(len(bodies)):
            nursery.start_soon(post, number)
    return answers


async def test_concurrent_writers_get_contiguous_seqs_that_nobody_shares(api, box):
    """§3: each write is atomic, also beside other writers."""
    writes = [[f"{number}.{part}" for part in range(3)] for number in range(40)]
    bodies = [{"records": [{"data": data} for data in write]} for write in writes]
    answers = [api.ok(response, 200, 201) for response in await at_once(api, box, bodies)]
    assert sorted(seq for answer in answers for seq in answer["seqs"]) == list(range(1, 121))
    assert sum(answer["created"] for answer in answers) == 1
    by_seq = {record["$seq"]: record["data"] for record in api.diff(box)["records"]}
    for write, answer in zip(writes, answers, strict=True):
        first = answer["first_seq"]
        assert answer["seqs"] == [first, first + 1, first + 2]
        assert [by_seq[seq] for seq in answer["seqs"]] == write


# -- what is not a write --------------------------------------------------------------------------------

BAD_BODIES = [
    ({}, "records"),
    ({"records": []}, "records"),
    ({"records": {}}, "records"),
    ({"records": "x"}, "records"),
    ({"records": None}, "records"),
    ({"records": [1]}, ""),
    ({"records": [None]}, ""),
    ({"records": [[]]}, ""),
    ({"records": ["data"]}, ""),
    ({"records": [{}]}, "data"),
    ({"records": [{"tag": "t"}]}, "data"),
    ({"records": [{"data": 1, "tag": 5}]}, "tag"),
    ({"records": [{"data": 1, "tag": ["t"]}]}, "tag"),
    ({"records": [{"data": 1, "node": 5}]}, "node"),
    ({"records": [{"data": 1, "node": {}}]}, "node"),
    ({"records": [{"data": 1, "meta": []}]}, "meta"),
    ({"records": [{"data": 1, "meta": "m"}]}, "meta"),
    ({"records": [{"data": 1, "meta": 1}]}, "meta"),
    ({"records": [{"data": 1, "meta": True}]}, "meta"),
    ({"records": [{"data": 1, "ts": "now"}]}, "ts"),
    ({"records": [{"data": 1, "ts": 1.5}]}, "ts"),
    ({"records": [{"data": 1, "ts": -1}]}, "ts"),
    ({"records": [{"data": 1, "ts": True}]}, "ts"),
    ({"records": [{"data": 1, "ts": 10**30}]}, "ts"),
    ({"records": [{"data": 1, "tag": "a\0b"}]}, "tag"),
    ({"records": [{"data": 1, "node": "\0"}]}, "node"),
    ({"records": [{"data": 1}], "node": "a\0"}, "node"),
    ({"records": [{"data": 1}], "node": 5}, "node"),
    ({"records": [{"data": 1}], "node": ["n"]}, "node"),
    ({"records": [{"data": 1}], "idempotency_key": 5}, "idempotency_key"),
    ({"records": [{"data": 1}], "idempotency_key": "k" * 257}, "idempotency_key"),
    ({"records": [{"data": 1}], "create": "yes"}, "create"),
    ({"records": [{"data": 1}], "create": 1}, "create"),
    ({"records": [{"data": 1}], "config": []}, "config"),
    ({"records": [{"data": 1}], "config": "log"}, "config"),
    ({"records": [{"data": 1}], "disable_backpressure": "yes"}, "disable_backpressure"),
    ({"records": [{"data": 1}], "match_seq": -1}, "match_seq"),
    ({"records": [{"data": 1}], "match_seq": "1"}, "match_seq"),
    ({"records": [{"data": 1}], "match_seq": 1.5}, "match_seq"),
    ({"records": [{"data": 1}], "match_seq": True}, "match_seq"),
    ({"records": [{"data": 1}], "match_seq": 2**64}, "match_seq"),
    ({"records": [{"data": 1}], "fencing_token": 7}, "fencing_token"),
    ({"records": [{"data": 1}], "trim_before_seq": -1}, "trim_before_seq"),
    ({"records": [{"data": 1}], "trim_before_seq": "1"}, "trim_before_seq"),
    ({"records": [{"data": 1}], "trim_before_seq": 2**64}, "trim_before_seq"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("body, field", BAD_BODIES, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_body_is_refused_by_name_and_creates_nothing(api, box, body, field):
    """§3, §0.6"""
    api.refused(api.post(box, body), 400, "invalid_request", field)
    assert not api.exists(box)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"data": 1, "tag": 5},
        {"data": 1, "meta": []},
        {"data": 1, "tag": "x" * 257},
        {"data": 1, "oops": 1},
        7,
    ],
    ids=json.dumps,
)
def test_one_bad_record_among_good_ones_and_none_is_written(api, box, bad):
    """§3: atomic, wherever the bad one stands."""
    api.append(box, "before")
    good = {"data": "good"}
    with api.unchanged(box):
        for records in ([bad, good, good], [good, bad, good], [good, good, bad]):
            api.refused(api.post(box, {"records": records}), 400, "invalid_request")
    assert api.append(box, "after")["seqs"] == [2]


# -- create and config ----------------------------------------------------------------------------------


def test_create_false_is_404_for_an_absent_box_and_nothing_for_a_present_one(api, box):
    """§3"""
    api.refused(api.post(box, {"records": [{"data": 1}], "create": False}), 404, "box_not_found", box)
    assert not api.exists(box)
    api.put(box)
    assert api.append(box, 1, create=False)["created"] is False


def test_config_in_an_append_is_used_when_the_write_creates_the_box(api, box):
    """§3"""
    config = {"cap_records": 7, "durability": "fsync", "timestamping": {"mode": "client-prefer"}}
    assert api.append(box, 1, config=config)["created"] is True
    resolved = api.state(box)["config"]
    assert resolved["cap_records"] == 7
    assert resolved["durability"] == "fsync"
    assert resolved["timestamping"] == {"mode": "client-prefer", "uncapped": False}


def test_config_in_an_append_is_ignored_when_the_box_is_there(api, box):
    """§3: used only if this write creates the box, even when it contradicts the box."""
    api.put(box, cap_records=5)
    before = api.state(box)["config"]
    api.append(box, 1, config={"cap_records": 1, "type": "queue", "ttl_ms": 1})
    assert api.state(box)["config"] == before


def test_the_config_of_an_append_rules_that_same_write(api, box):
    """§3: a cap that the creating write is bigger than refuses it, and the box is not made."""
    body = {"records": [{"data": 1}, {"data": 2}], "config": {"cap_records": 1}}
    api.refused(api.post(box, body), 400, "record_too_large")
    assert not api.exists(box)


def test_disable_backpressure_is_taken(api, box):
    """§3"""
    assert api.append(box, 1, disable_backpressure=True)["seqs"] == [1]
    assert api.append(box, 2, disable_backpressure=False)["seqs"] == [2]


# -- idempotency ----------------------------------------------------------------------------------------


def test_a_repeated_key_answers_the_original_seqs_and_appends_nothing(api, box):
    """§3"""
    first = api.append(box, 1, 2, idempotency_key="k")
    assert first["deduped"] is False
    api.append(box, 3)
    with api.unchanged(box):
        again = api.ok(api.post(box, {"records": [{"data": 1}, {"data": 2}], "idempotency_key": "k"}), 200)
    assert again["deduped"] is True
    assert (again["first_seq"], again["last_seq"], again["seqs"]) == (1, 2, [1, 2])
    assert again["count"] == 2


def test_the_key_is_the_identity_and_the_body_of_a_repeat_is_not_compared(api, box):
    """§3"""
    api.append(box, "one", idempotency_key="k")
    again = api.append(box, "another", "body", "altogether", idempotency_key="k")
    assert (again["deduped"], again["seqs"], again["count"]) == (True, [1], 1)
    assert api.data(box) == ["one"]


def test_return_seqs_false_holds_for_a_repeat_too(api, box):
    """§3"""
    api.append(box, 1, 2, idempotency_key="k")
    again = api.append(box, 1, 2, idempotency_key="k", params={"return_seqs": "false"})
    assert "seqs" not in again
    assert (again["first_seq"], again["last_seq"], again["deduped"]) == (1, 2, True)


def test_the_key_may_come_in_the_header(api, box):
    """§3"""
    api.append(box, 1, headers={"Idempotency-Key": "h"})
    assert api.append(box, 1, headers={"idempotency-key": "h"})["deduped"] is True
    assert api.append(box, 1, idempotency_key="h")["deduped"] is True
    assert api.data(box) == [1]


def test_the_key_in_the_body_wins_over_the_header(api, box):
    """§3"""
    api.append(box, 1, idempotency_key="body", headers={"Idempotency-Key": "header"})
    assert api.append(box, 2, headers={"Idempotency-Key": "header"})["deduped"] is False
    assert api.append(box, 3, idempotency_key="body", headers={"Idempotency-Key": "header"})["seqs"] == [1]
    assert api.data(box) == [1, 2]


def test_a_key_belongs_to_its_box(api, box):
    """§3"""
    api.append(box, 1, idempotency_key="k")
    assert api.append(f"{box}.other", 1, idempotency_key="k")["deduped"] is False


@pytest.mark.exhaustive
def test_keys_are_exact(api, box):
    """§3"""
    for key in ("k", "K", "k ", " k", "é", "e\u0301"):
        assert api.append(box, key, idempotency_key=key)["deduped"] is False
    assert len(api.data(box)) == 6


def test_a_key_may_be_256_characters(api, box):
    """§3: characters, not bytes."""
    for key in ("k" * 256, "😀" * 256):
        assert api.append(box, 1, idempotency_key=key)["deduped"] is False
        assert api.append(box, 1, idempotency_key=key)["deduped"] is True
    body = {"records": [{"data": 1}], "idempotency_key": "k" * 257}
    api.refused(api.post(box, body), 400, "invalid_request", "idempotency_key")


def test_a_key_of_257_in_the_header_is_refused(api, box):
    """§3"""
    response = api.post(box, {"records": [{"data": 1}]}, headers={"Idempotency-Key": "k" * 257})
    api.refused(response, 400, "invalid_request")
    assert not api.exists(box)


def test_a_refused_write_does_not_use_up_its_key(api, box):
    """§3: only a write that happened is remembered."""
    api.append(box, 1)
    body = {"records": [{"data": 2}], "idempotency_key": "k", "match_seq": 9}
    api.refused(api.post(box, body), 412, "seq_mismatch")
    answer = api.append(box, 2, idempotency_key="k", match_seq=2)
    assert (answer["deduped"], answer["seqs"]) == (False, [2])


def test_a_retry_of_a_conditional_write_is_a_repeat_not_a_mismatch(api, box):
    """§3: a client that lost the answer sends the same request again and learns the original seqs."""
    request = {"records": [{"data": 1}], "idempotency_key": "k", "match_seq": 1}
    api.ok(api.post(box, request), 201)
    again = api.ok(api.post(box, request), 200)
    assert (again["deduped"], again["seqs"]) == (True, [1])


def test_a_key_is_remembered_after_its_records_are_deleted(api, box):
    """§3: the window decides, not retention."""
    api.append(box, 1, idempotency_key="k")
    api.delete(box, before_seq=2)
    again = api.append(box, 1, idempotency_key="k")
    assert (again["deduped"], again["seqs"]) == (True, [1])
    assert api.data(box) == []


def test_a_key_is_forgotten_after_the_window(api, box):
    """§1 idempotency_window_ms, §3"""
    api.put(box, idempotency_window_ms=1)
    api.append(box, 1, idempotency_key="k")
    api.let_time_pass(30, f"{box}.quiet")
    answer = api.append(box, 2, idempotency_key="k")
    assert (answer["deduped"], answer["seqs"]) == (False, [2])


# -- match_seq ------------------------------------------------------------------------------------------


def test_match_seq_appends_only_at_exactly_that_place(api, box):
    """§3"""
    assert api.append(box, 1, 2, match_seq=1)["seqs"] == [1, 2]
    assert api.append(box, 3, match_seq=3)["seqs"] == [3]
    for wrong in (1, 3, 5, 2**64 - 1):
        with api.unchanged(box):
            error = api.refused(
                api.post(box, {"records": [{"data": "x"}], "match_seq": wrong}), 412, "seq_mismatch"
            )
        assert error["detail"]["next_seq"] == 4


def test_a_seq_mismatch_does_not_create_the_box(api, box):
    """§3: nothing is written; the next seq of an absent box is 1."""
    error = api.refused(api.post(box, {"records": [{"data": 1}], "match_seq": 2}), 412, "seq_mismatch")
    assert error["detail"]["next_seq"] == 1
    assert not api.exists(box)


@pytest.mark.exhaustive
def test_match_seq_counts_deleted_records(api, box):
    """§3: seqs are never given again."""
    api.append(box, 1, 2)
    api.delete(box, before_seq=3)
    assert api.append(box, 3, match_seq=3)["seqs"] == [3]


async def test_of_racing_conditional_writers_exactly_one_wins(api, box):
    """§3"""
    api.put(box)
    responses = await at_once(api, box, [{"records": [{"data": 1}], "match_seq": 1}] * 12)
    assert sorted(response.status_code for response in responses) == [200] + [412] * 11
    assert api.seqs(box) == [1]


async def test_of_racing_repeats_exactly_one_appends(api, box):
    """§3: an impatient client that sends the same key at once many times has written once."""
    responses = await at_once(api, box, [{"records": [{"data": 1}], "idempotency_key": "k"}] * 12)
    answers = [api.ok(response, 200, 201) for response in responses]
    assert sorted(answer["deduped"] for answer in answers) == [False] + [True] * 11
    assert all(answer["seqs"] == [1] for answer in answers)
    assert api.seqs(box) == [1]


# -- fencing --------------------------------------------------------------------------------------------


def test_a_set_fence_admits_only_its_token(api, box):
    """§3"""
    api.append(box, 1)
    api.fence(box, "alpha")
    assert api.state(box)["fencing_token"] == "alpha"
    assert api.append(box, 2, fencing_token="alpha")["seqs"] == [2]
    for wrong in ({}, {"fencing_token": "beta"}, {"fencing_token": "Alpha"}, {"fencing_token": ""}):
        with api.unchanged(box):
            response = api.post(box, {"records": [{"data": "x"}], **wrong})
            api.refused(response, 412, "fencing_token_mismatch")


def test_a_token_is_harmless_where_there_is_no_fence(api, box):
    """§3: it must equal the box's token when the box has one."""
    assert api.append(box, 1, fencing_token="whatever")["seqs"] == [1]
    assert "fencing_token" not in api.state(box)


def test_an_empty_token_clears_the_fence(api, box):
    """§3"""
    api.put(box)
    api.fence(box, "alpha")
    api.fence(box, "")
    assert "fencing_token" not in api.state(box)
    assert api.append(box, 1)["seqs"] == [1]


def test_if_token_guards_the_change_of_a_fence(api, box):
    """§3"""
    api.put(box)
    api.fence(box, "alpha")
    response = api.put_fence(box, {"token": "beta", "if_token": "wrong"})
    api.refused(response, 412, "fencing_token_mismatch")
    assert api.state(box)["fencing_token"] == "alpha"
    api.fence(box, "beta", if_token="alpha")
    assert api.state(box)["fencing_token"] == "beta"
    api.fence(box, "", if_token="beta")
    assert "fencing_token" not in api.state(box)


def test_an_empty_if_token_means_no_fence_yet(api, box):
    """§3: empty is no token, in `if_token` as in `token`."""
    api.put(box)
    api.fence(box, "alpha", if_token="")
    api.refused(api.put_fence(box, {"token": "beta", "if_token": ""}), 412, "fencing_token_mismatch")
    assert api.state(box)["fencing_token"] == "alpha"


@pytest.mark.exhaustive
def test_if_token_on_a_box_without_a_fence_is_a_mismatch(api, box):
    """§3"""
    api.put(box)
    response = api.put_fence(box, {"token": "beta", "if_token": "alpha"})
    api.refused(response, 412, "fencing_token_mismatch")
    assert "fencing_token" not in api.state(box)


@pytest.mark.exhaustive
def test_a_fence_replaces_the_last_one_when_unguarded(api, box):
    """§3"""
    api.put(box)
    api.fence(box, "alpha")
    api.fence(box, "beta")
    assert api.append(box, 1, fencing_token="beta")["seqs"] == [1]


def test_a_token_is_at_most_48_bytes(api, box):
    """§3: bytes, not characters."""
    api.put(box)
    for token in ("t" * 48, "é" * 24):
        api.fence(box, token)
        assert api.state(box)["fencing_token"] == token
    for token in ("t" * 49, "é" * 24 + "x"):
        api.refused(api.put_fence(box, {"token": token}), 400, "invalid_request", "token")
    assert api.state(box)["fencing_token"] == "é" * 24


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "body",
    [{}, {"if_token": "a"}, {"token": 5}, {"token": ["a"]}, {"token": "a", "if_token": 5}],
    ids=json.dumps,
)
def test_a_bad_fence_is_refused(api, box, body):
    """§3"""
    api.put(box)
    api.refused(api.put_fence(box, body), 400, "invalid_request", "token")
    assert "fencing_token" not in api.state(box)


def test_fencing_adds_no_record(api, box):
    """§3"""
    api.append(box, 1)
    api.fence(box, "alpha")
    state = api.state(box)
    assert (state["head_seq"], state["count"]) == (1, 1)


# -- trim_before_seq ------------------------------------------------------------------------------------


def test_trim_deletes_everything_below_in_the_same_commit_and_silently(api, box):
    """§3"""
    api.append(box, 1, 2, 3, 4)
    answer = api.append(box, 5, trim_before_seq=4)
    assert answer["seqs"] == [5]
    read = api.diff(box)
    assert [record["data"] for record in read["records"]] == [4, 5]
    assert read.get("tombstone") is None
    assert read["earliest_seq"] == 4
    assert api.state(box)["count"] == 2


def test_an_in_stream_snapshot_is_one_conditional_write(api, box):
    """§3: match_seq with trim_before_seq at the first new seq leaves only the snapshot."""
    api.append(box, 1, 2, 3)
    answer = api.append(box, "snapshot", match_seq=4, trim_before_seq=4)
    assert answer["seqs"] == [4]
    read = api.diff(box)
    assert [record["data"] for record in read["records"]] == ["snapshot"]
    assert (read["earliest_seq"], read["head_seq"], read.get("tombstone")) == (4, 4, None)


def test_a_snapshot_that_lost_the_race_trims_nothing(api, box):
    """§3: atomic."""
    api.append(box, 1, 2, 3)
    body = {"records": [{"data": "snapshot"}], "match_seq": 3, "trim_before_seq": 3}
    with api.unchanged(box):
        error = api.refused(api.post(box, body), 412, "seq_mismatch")
    assert error["detail"]["next_seq"] == 4


def test_trim_may_not_reach_into_the_records_it_comes_with(api, box):
    """§3: at most the first new seq."""
    api.append(box, 1, 2)
    with api.unchanged(box):
        body = {"records": [{"data": 3}, {"data": 4}], "trim_before_seq": 4}
        api.refused(api.post(box, body), 400, "invalid_request", "trim_before_seq")
    api.append(box, 3, 4, trim_before_seq=3)
    assert api.data(box) == [3, 4]


@pytest.mark.exhaustive
def test_trim_below_the_first_live_record_is_nothing(api, box):
    """§3"""
    api.append(box, 1, 2, 3)
    api.delete(box, before_seq=3)
    api.append(box, 4, trim_before_seq=1)
    api.append(box, 5, trim_before_seq=0)
    assert api.data(box) == [3, 4, 5]


def test_trim_makes_room_in_a_full_box_that_rejects(api, box):
    """§3: one commit, so the space it frees is there for the records it brings."""
    api.put(box, cap_records=2, discard="reject")
    api.append(box, 1, 2)
    assert api.append(box, 3, trim_before_seq=2)["seqs"] == [3]
    assert api.data(box) == [2, 3]


# -- caps on the way in ---------------------------------------------------------------------------------


def test_a_full_box_that_rejects_answers_422_and_takes_nothing(api, box):
    """§1 discard, §0.6"""
    api.put(box, cap_records=2, discard="reject")
    api.append(box, 1)
    with api.unchanged(box):
        api.refused(api.post(box, {"records": [{"data": 2}, {"data": 3}]}), 422, "box_full")
    api.append(box, 2)
    with api.unchanged(box):
        api.refused(api.post(box, {"records": [{"data": 3}]}), 422, "box_full")
    api.delete(box, before_seq=2)
    assert api.append(box, 3)["seqs"] == [3]


def test_a_box_full_by_bytes_rejects_too(api, box):
    """§1"""
    api.append(f"{box}.scale", "x" * 200)
    each = api.state(f"{box}.scale")["bytes"]
    api.put(box, cap_bytes=each * 2 + each // 2, discard="reject")
    api.append(box, "x" * 200)
    api.append(box, "x" * 200)
    with api.unchanged(box):
        api.refused(api.post(box, {"records": [{"data": "x" * 200}]}), 422, "box_full")


def test_expired_records_do_not_fill_a_box(api, box):
    """§1: the cap is on what is retained; count is of live records."""
    api.put(box, cap_records=1, discard="reject", ttl_ms=60_000, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": "expired", "ts": 1000}])
    assert api.append(box, "fresh")["seqs"] == [2]
    assert api.data(box) == ["fresh"]


@pytest.mark.parametrize("discard", ["old", "reject"])
def test_a_write_of_more_records_than_the_whole_cap_is_400(api, box, discard):
    """§3: record_too_large, not 422, and nothing is evicted for it."""
    api.put(box, cap_records=3, discard=discard)
    api.append(box, 1)
    with api.unchanged(box):
        api.refused(api.post(box, {"records": [{"data": n} for n in range(4)]}), 400, "record_too_large")
    api.delete(box, before_seq=2)
    assert api.append(box, 1, 2, 3)["seqs"] == [2, 3, 4]


@pytest.mark.parametrize("discard", ["old", "reject"])
def test_a_write_of_more_bytes_than_the_whole_cap_is_400(api, box, discard):
    """§3"""
    api.put(box, cap_bytes=500, discard=discard)
    api.append(box, 1)
    with api.unchanged(box):
        api.refused(api.post(box, {"records": [{"data": "x" * 600}]}), 400, "record_too_large")
        records = [{"data": "x" * 200}] * 3
        api.refused(api.post(box, {"records": records}), 400, "record_too_large")


# -- ndjson ---------------------------------------------------------------------------------------------

NDJSON = "application/x-ndjson"


@pytest.mark.parametrize("end", ["", "\n"], ids=["open end", "closed end"])
def test_ndjson_is_one_record_a_line(api, box, end):
    """§3"""
    lines = (
        '{"data": 1, "tag": "t"}\n{"data": {"a": "b"}, "node": "n", "meta": {"k": 1}}\n{"data": null}' + end
    )
    answer = api.ok(api.post(box, lines, content_type=NDJSON), 201)
    assert answer["seqs"] == [1, 2, 3]
    first, second, third = api.diff(box, include_tags=True)["records"]
    assert (first["data"], first["$tag"]) == (1, "t")
    assert (second["data"], second["$node"], second["meta"]) == ({"a": "b"}, "n", {"k": 1})
    assert third["data"] is None


def test_ndjson_lines_may_end_in_crlf(api, box):
    """§3: a carriage return is JSON whitespace."""
    api.ok(api.post(box, '{"data": 1}\r\n{"data": 2}\r\n', content_type=f"{NDJSON}; charset=utf-8"), 201)
    assert api.data(box) == [1, 2]


def test_ndjson_takes_the_other_fields_from_the_query(api, box):
    """§3"""

    def send(**params):
        return api.post(box, '{"data": 1}\n{"data": 2, "node": "own"}', content_type=NDJSON, params=params)

    api.refused(send(create="false"), 404, "box_not_found")
    assert not api.exists(box)
    assert "seqs" not in api.ok(send(return_seqs="false", node="d", match_seq=1), 201)
    assert [record["$node"] for record in api.diff(box)["records"]] == ["d", "own"]
    assert api.ok(send(idempotency_key="k"))["deduped"] is False
    assert api.ok(send(idempotency_key="k"))["deduped"] is True
    assert api.refused(send(match_seq=1), 412, "seq_mismatch")["detail"]["next_seq"] == 5
    api.fence(box, "t")
    api.refused(send(), 412, "fencing_token_mismatch")
    assert api.ok(send(fencing_token="t", trim_before_seq=5))["seqs"] == [5, 6]
    assert api.seqs(box) == [5, 6]
    assert api.ok(send(fencing_token="t", disable_backpressure="true"))["seqs"] == [7, 8]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lines",
    [
        '{"data": 1}\n{"data": }',
        '{"data": 1}\n[1]',
        '{"data": 1}\n7',
        '{"data": 1}\n{}',
        '{"data": 1} {"data": 2}',
        '[{"data": 1}]',
        '{"data":\n1}',
        '{"data": 1}\n{"data": 2, "tga": "t"}',
        '{"data": 1}\n{"data": "\\ud800"}',
        "",
        "\n",
    ],
)
def test_a_bad_line_of_ndjson_refuses_them_all(api, box, lines):
    """§3: atomic."""
    api.refused(api.post(box, lines, content_type=NDJSON), 400, "invalid_request")
    assert not api.exists(box)


def test_ndjson_is_only_for_append(api, box):
    """§0.2, §3"""
    api.put(box)
    for response in (
        api.send("PUT", f"/v0/boxes/{box}", "{}", content_type=NDJSON),
        api.post_diff(box, "{}", content_type=NDJSON),
        api.post_delete(box, '{"before_seq": 1}', content_type=NDJSON),
    ):
        api.refused(response, 415, "unsupported_media_type")
