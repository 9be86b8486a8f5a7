"""Read (§4): cursors, floors, tombstones, filters, the long poll, and the two small reads of §4.7.

Method: the gap arithmetic is checked against boxes whose losses are arranged by count or by client timestamp,
never by waiting; time is only let pass inside the server, by long polls.
"""

import json

import pytest
import trio

LONG_MS = 30_000  # a wait nobody should sit through
SOON_S = 25.0  # below it, and far above any healthy answer, on a slow machine too


def no_tombstone(answer):
    return answer.get("tombstone") is None


def gap(answer):
    tombstone = answer["tombstone"]
    return tombstone["gap_from"], tombstone["gap_to"], tombstone["reason"], tombstone["missed_estimate"]


# -- the plain read -------------------------------------------------------------------------------------


def test_a_read_from_the_beginning_answers_every_field(api, box):
    """§4"""
    api.append(box, "a", "b")
    answer = api.diff(box)
    assert answer["box"] == box
    assert [(record["$seq"], record["data"]) for record in answer["records"]] == [(1, "a"), (2, "b")]
    assert (answer["next_from_seq"], answer["head_seq"], answer["earliest_seq"]) == (2, 2, 1)
    assert (answer["caught_up"], answer["lag"]) == (True, 0)
    assert answer["generation"] == api.state(box)["generation"]
    assert no_tombstone(answer)
    assert isinstance(answer["performance"]["records_scanned"], int)


def test_an_empty_box_reads_as_caught_up_at_zero(api, box):
    """§4, §0.3: 0 means nothing yet."""
    api.put(box)
    answer = api.diff(box)
    assert answer["records"] == []
    assert (answer["next_from_seq"], answer["head_seq"], answer["earliest_seq"]) == (0, 0, 1)
    assert (answer["caught_up"], answer["lag"]) == (True, 0)
    assert no_tombstone(answer)


def test_from_seq_is_exclusive(api, box):
    """§4"""
    api.append(box, *range(1, 6))
    assert api.seqs(box, from_seq=0) == [1, 2, 3, 4, 5]
    assert api.seqs(box, from_seq=3) == [4, 5]
    answer = api.diff(box, from_seq=5)
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"]) == ([], 5, True)


def test_the_cursor_walks_a_box_in_steps_and_says_what_is_left(api, box):
    """§4.1"""
    api.append(box, *range(1, 6))
    steps, from_seq = [], 0
    for _ in range(3):
        answer = api.diff(box, from_seq=from_seq, limit=2)
        from_seq = answer["next_from_seq"]
        steps.append((len(answer["records"]), from_seq, answer["lag"], answer["caught_up"]))
    assert steps == [(2, 2, 3, False), (2, 4, 1, False), (1, 5, 0, True)]


def test_a_full_page_that_reaches_the_head_is_caught_up(api, box):
    """§4.1: caught_up is about the cursor, not about a short page."""
    api.append(box, 1, 2)
    assert api.diff(box, limit=2)["caught_up"] is True


def test_a_cursor_skips_what_was_deleted_and_still_arrives(api, box):
    """§4.1"""
    api.append(box, records=[{"data": n, "tag": "x" if n in (2, 3, 5) else "y"} for n in range(1, 6)])
    api.delete(box, match="x")
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [1, 4]
    assert (answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (5, True, 0)
    assert no_tombstone(answer)


def test_reading_does_not_consume(api, box):
    """§4"""
    api.append(box, 1, 2)
    assert api.data(box) == api.data(box) == [1, 2]


@pytest.mark.exhaustive
def test_records_arrive_in_order_with_seqs_and_times_that_never_go_back(api, box):
    """§3, §1"""
    for start in range(0, 30, 3):
        api.append(box, start, start + 1, start + 2)
    records = api.diff(box)["records"]
    assert [record["$seq"] for record in records] == list(range(1, 31))
    assert [record["data"] for record in records] == list(range(30))
    times = [record["$ts"] for record in records]
    assert times == sorted(times)
    assert all(isinstance(time, int) for time in times)


# -- options --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "limit, size", [(None, 256), (0, 256), (1, 1), (1000, 1000), (1001, 1000), (2**40, 1000)]
)
def test_limit_has_a_default_and_a_ceiling(api, box, limit, size):
    """§4: 256; clamped to 1000; 0 = default."""
    api.put(box, durability="memory")
    api.append(box, *range(1100), params={"return_seqs": "false"})
    options = {} if limit is None else {"limit": limit}
    answer = api.diff(box, **options)
    assert len(answer["records"]) == size
    assert (answer["next_from_seq"], answer["lag"], answer["caught_up"]) == (size, 1100 - size, False)


def test_max_bytes_stops_before_the_record_that_would_not_fit(api, box):
    """§4"""
    api.append(box, *["x" * 500] * 4)
    each = api.state(box)["bytes"] // 4
    assert api.seqs(box, max_bytes=each * 2 + each // 2) == [1, 2]
    assert api.diff(box, max_bytes=each * 2 + each // 2)["next_from_seq"] == 2


def test_at_least_one_record_is_returned_however_small_max_bytes_is(api, box):
    """§4"""
    api.append(box, "x" * 500, "y" * 500)
    records, _ = api.read_all(box, max_bytes=1)
    assert [record["$seq"] for record in records] == [1, 2]
    assert api.seqs(box, max_bytes=1) == [1]


def test_max_bytes_is_one_mebibyte_by_default(api, box):
    """§4"""
    api.put(box, durability="memory")
    for _ in range(3):
        api.append(box, "x" * 600_000)
    assert api.seqs(box) == [1]
    assert api.seqs(box, max_bytes=1_500_000) == [1, 2]


@pytest.mark.exhaustive
def test_max_bytes_is_clamped_to_eight_mebibytes(api, box):
    """§4"""
    api.put(box, durability="memory")
    for _ in range(10):
        api.append(box, "x" * 1_000_000)
    assert len(api.seqs(box, max_bytes=2**40)) == 8


def test_tags_are_left_out_unless_asked_for(api, box):
    """§4 include_tags"""
    api.append(box, records=[{"data": 1, "tag": "t"}, {"data": 2}])
    assert [record.get("$tag") for record in api.diff(box)["records"]] == [None, None]
    assert "$tag" not in api.diff(box, include_tags=False)["records"][0]
    tagged, untagged = api.diff(box, include_tags=True)["records"]
    assert tagged["$tag"] == "t"
    assert "$tag" not in untagged


def test_meta_is_there_unless_declined(api, box):
    """§4 include_meta"""
    api.append(box, records=[{"data": 1, "meta": {"k": "v"}}])
    assert api.diff(box)["records"][0]["meta"] == {"k": "v"}
    (record,) = api.diff(box, include_meta=False)["records"]
    assert set(record) == {"$seq", "$ts", "data"}


def test_data_is_there_unless_declined(api, box):
    """§4 include_data"""
    api.append(box, records=[{"data": "big", "node": "n", "meta": {"k": 1}, "tag": "t"}])
    (record,) = api.diff(box, include_data=False)["records"]
    assert set(record) == {"$seq", "$ts", "$node", "meta"}
    (record,) = api.diff(box, include_data=False, include_meta=False, include_tags=True)["records"]
    assert set(record) == {"$seq", "$ts", "$node", "$tag"}


BAD_OPTIONS = [
    ("from_seq", -1), ("from_seq", 1.5), ("from_seq", "1"), ("from_seq", True), ("from_seq", 2**64),
    ("from_seq", [0]),
    ("limit", -1), ("limit", "10"), ("limit", 2.5), ("limit", True),
    ("max_bytes", -1), ("max_bytes", "1k"), ("max_bytes", False),
    ("node", 5), ("node", {}), ("node", [5]), ("node", ["a", ["b"]]), ("node", True),
    ("include_tags", 1), ("include_tags", "true"), ("include_meta", "no"), ("include_data", 0),
    ("wait_ms", -1), ("wait_ms", "1s"), ("wait_ms", 0.5), ("wait_ms", True),
    ("from_ts", -1), ("from_ts", "today"), ("from_ts", 1.5),
    ("generation", "x"), ("generation", -1), ("generation", [1]),
    ("match", 5), ("match", {}), ("match", []), ("match", ["tag"]), ("match", ["tag", "Eq"]),
    ("match", ["tag", "Eq", 5]), ("match", ["tag", "Eq", "a", "b"]), ("match", ["node", "Eq", "a"]),
    ("match", ["tag", "Ne", "a"]), ("match", ["tag", "eq", "a"]), ("match", ["tag", "Glob", "*a"]),
    ("match", ["tag", "Glob", "a*b"]), ("match", ["tag", "Glob", "a**"]), ("match", ["tag", "Glob",
    "a*b*"]),
    ("match", ["tag", "Glob", "abc"]), ("match", [["tag", "Eq", "a"]]), ("match", True),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("field, value", BAD_OPTIONS, ids=lambda value: json.dumps(value))
def test_a_bad_option_is_refused_by_name(api, box, field, value):
    """§4, §0.6"""
    api.append(box, 1)
    api.refused(api.post_diff(box, {field: value}), 400, "invalid_request", field)


def test_an_absurd_wait_is_clamped_not_refused(api, box):
    """§4: wait_ms clamped to 30000 (there is something to deliver, so nobody waits)."""
    api.append(box, 1)
    assert api.data(box, wait_ms=2**40) == [1]


# -- from_ts --------------------------------------------------------------------------------------------


def test_from_ts_starts_at_the_first_record_not_older(api, box):
    """§4"""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": ts, "ts": ts} for ts in (1000, 2000, 2000, 3000)])
    for from_ts, seqs in [
        (0, [1, 2, 3, 4]),
        (1000, [1, 2, 3, 4]),
        (1001, [2, 3, 4]),
        (2000, [2, 3, 4]),
        (2001, [4]),
    ]:
        answer = api.diff(box, from_ts=from_ts)
        assert [record["$seq"] for record in answer["records"]] == seqs
        assert (answer["next_from_seq"], answer["caught_up"]) == (4, True)
        assert no_tombstone(answer)


def test_from_ts_after_everything_is_caught_up_at_the_head(api, box):
    """§4"""
    api.append(box, 1, 2)
    answer = api.diff(box, from_ts=2**50)
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (
        [],
        2,
        True,
        0,
    )


def test_from_ts_pages_on_with_the_cursor_it_answers(api, box):
    """§4, §4.1"""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": n, "ts": n * 1000} for n in range(1, 7)])
    answer = api.diff(box, from_ts=3000, limit=2)
    assert [record["$seq"] for record in answer["records"]] == [3, 4]
    assert (answer["next_from_seq"], answer["lag"]) == (4, 2)
    assert api.seqs(box, from_seq=answer["next_from_seq"]) == [5, 6]


@pytest.mark.parametrize("from_seq", [0, 1])
def test_from_ts_and_from_seq_exclude_each_other(api, box, from_seq):
    """§4: with from_ts, from_seq must be absent."""
    api.append(box, 1)
    api.refused(api.post_diff(box, {"from_ts": 1, "from_seq": from_seq}), 400, "invalid_request", "from_")


@pytest.mark.exhaustive
def test_from_ts_works_on_an_empty_box(api, box):
    """§4"""
    api.put(box)
    answer = api.diff(box, from_ts=1)
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"]) == ([], 0, True)


# -- match ----------------------------------------------------------------------------------------------

TAGS = ["a", "ab", "abc", "b", "A", "a.b", "a*", None, "é1", "é2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "match, tags",
    [
        (["tag", "Eq", "a"], ["a"]),
        ("a", ["a"]),
        ("ab", ["ab"]),
        (["tag", "Eq", "a*"], ["a*"]),
        ("a*", ["a*"]),
        (["tag", "Glob", "a*"], ["a", "ab", "abc", "a.b", "a*"]),
        (["tag", "Glob", "ab*"], ["ab", "abc"]),
        (["tag", "Glob", "a.*"], ["a.b"]),
        (["tag", "Glob", "é*"], ["é1", "é2"]),
        (["tag", "Glob", "zz*"], []),
        ("nothing", []),
    ],
    ids=json.dumps,
)
def test_match_filters_by_tag_and_still_moves_the_cursor(api, box, match, tags):
    """§4 match, §5 grammar, §4.1. Untagged records never match."""
    api.append(box, records=[{"data": tag, **({"tag": tag} if tag else {})} for tag in TAGS])
    answer = api.diff(box, match=match)
    assert [record["data"] for record in answer["records"]] == tags
    assert (answer["next_from_seq"], answer["caught_up"]) == (len(TAGS), True)
    assert all("$tag" not in record for record in answer["records"])
    assert no_tombstone(answer)


@pytest.mark.parametrize("match", [["tag", "Ne", "a"], ["tag", "Glob", "a*b"], ["tag"], 5], ids=json.dumps)
def test_a_match_outside_the_grammar_is_refused(api, box, match):
    """§4, §5"""
    api.append(box, 1)
    api.refused(api.post_diff(box, {"match": match}), 400, "invalid_request", "match")


def test_match_with_limit_finds_every_match_by_following_the_cursor(api, box):
    """§4.1"""
    api.append(box, records=[{"data": n, "tag": "hit" if n % 7 == 0 else "miss"} for n in range(1, 51)])
    records, tombstones = api.read_all(box, match="hit", limit=2)
    assert [record["data"] for record in records] == [7, 14, 21, 28, 35, 42, 49]
    assert tombstones == []


# -- own-node filter (§4.5) -----------------------------------------------------------------------------


def written_by(api, box, *nodes, **config):
    api.put(box, **config)
    api.append(box, records=[{"data": node, **({"node": node} if node else {})} for node in nodes])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "node, left",
    [
        ("n1", ["n2", "N1", "n10", None]),
        (["n1"], ["n2", "N1", "n10", None]),
        (["n1", "n2"], ["N1", "n10", None]),
        (["n1", "n2", "N1", "n10"], [None]),
        ([], ["n1", "n2", "N1", "n10", None]),
        ("absent", ["n1", "n2", "N1", "n10", None]),
        ("n", ["n1", "n2", "N1", "n10", None]),
    ],
    ids=json.dumps,
)
def test_own_records_are_left_out_silently_and_byte_exact(api, box, node, left):
    """§4.5"""
    written_by(api, box, "n1", "n2", "N1", "n10", None)
    answer = api.diff(box, node=node)
    assert [record["data"] for record in answer["records"]] == left
    assert (answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (5, True, 0)
    assert no_tombstone(answer)


@pytest.mark.exhaustive
def test_unicode_nodes_are_compared_as_bytes_not_as_looks(api, box):
    """§4.5"""
    written_by(api, box, "é", "e\u0301")
    assert api.data(box, node="é") == ["e\u0301"]
    assert api.data(box, node=["é", "e\u0301"]) == []


def test_a_page_of_only_own_records_advances_the_cursor(api, box):
    """§4.1: records skipped for any reason still advance it."""
    written_by(api, box, *["me"] * 10, "you", *["me"] * 10)
    records, tombstones = api.read_all(box, node="me", limit=3)
    assert [record["data"] for record in records] == ["you"]
    assert tombstones == []


def test_dedupe_node_off_shows_own_records(api, box):
    """§4.5, §1"""
    written_by(api, box, "me", "you", dedupe_node=False)
    assert api.data(box, node="me") == ["me", "you"]
    api.put(box, dedupe_node=True)
    assert api.data(box, node="me") == ["you"]


def test_node_and_match_filter_together(api, box):
    """§4, §4.5"""
    api.append(box, records=[{"data": f"{n}{t}", "node": n, "tag": t} for n in "ab" for t in "xy"])
    assert api.data(box, node="a", match="x") == ["bx"]


# -- two floors and the tombstone (§4.2, §4.3) ----------------------------------------------------------


def test_eviction_by_cap_leaves_a_tombstone_with_the_whole_arithmetic(api, box):
    """§4.3"""
    api.put(box, cap_records=3)
    for number in range(1, 6):
        api.append(box, number)
    answer = api.diff(box)
    assert answer["tombstone"] == {
        "gap_from": 1,
        "gap_to": 2,
        "reason": "cap",
        "missed_estimate": 2,
        "earliest_seq": 3,
        "head_seq": 5,
    }
    assert [record["$seq"] for record in answer["records"]] == [3, 4, 5]
    assert (answer["earliest_seq"], answer["head_seq"], answer["next_from_seq"]) == (3, 5, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "from_seq, expected",
    [(0, (1, 4, "cap", 4)), (1, (2, 4, "cap", 3)), (3, (4, 4, "cap", 1)), (4, None), (5, None), (7, None)],
)
def test_only_a_cursor_below_the_evict_floor_sees_the_tombstone(api, box, from_seq, expected):
    """§4.3: when from_seq + 1 < evict_floor (here 5)."""
    api.put(box, cap_records=3)
    for number in range(1, 8):
        api.append(box, number)
    answer = api.diff(box, from_seq=from_seq)
    if expected is None:
        assert no_tombstone(answer)
    else:
        assert gap(answer) == expected
    assert [record["$seq"] for record in answer["records"]] == list(range(max(5, from_seq + 1), 8))


@pytest.mark.exhaustive
def test_a_batch_may_evict_several_at_once(api, box):
    """§1 cap_records, §4.3"""
    api.put(box, cap_records=3)
    api.append(box, 1, 2, 3)
    api.append(box, 4, 5)
    answer = api.diff(box)
    assert gap(answer) == (1, 2, "cap", 2)
    assert [record["data"] for record in answer["records"]] == [3, 4, 5]


def test_eviction_by_bytes_is_a_cap_too(api, box):
    """§1 cap_bytes, §4.3"""
    api.append(f"{box}.scale", "x" * 300)
    each = api.state(f"{box}.scale")["bytes"]
    api.put(box, cap_bytes=each * 2 + each // 2)
    for _ in range(4):
        api.append(box, "x" * 300)
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [3, 4]
    assert gap(answer) == (1, 2, "cap", 2)
    assert api.state(box)["bytes"] <= each * 2 + each // 2


@pytest.mark.exhaustive
def test_whichever_cap_is_hit_first_rules(api, box):
    """§1"""
    api.put(box, cap_records=2, cap_bytes=1_000_000)
    for number in range(3):
        api.append(box, number)
    assert api.seqs(box) == [2, 3]
    api.append(f"{box}.scale", "x" * 300)
    api.put(f"{box}.b", cap_records=1000, cap_bytes=api.state(f"{box}.scale")["bytes"] + 50)
    for _ in range(3):
        api.append(f"{box}.b", "x" * 300)
    assert api.seqs(f"{box}.b") == [3]


def test_expiry_leaves_a_tombstone_that_says_ttl(api, box):
    """§4.3"""
    api.put(box, ttl_ms=3_600_000, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": 1, "ts": 1000}, {"data": 2, "ts": 2000}, {"data": 3}])
    answer = api.diff(box)
    assert gap(answer) == (1, 2, "ttl", 2)
    assert [record["data"] for record in answer["records"]] == [3]
    assert answer["earliest_seq"] == 3
    assert no_tombstone(api.diff(box, from_seq=2))


def test_a_box_whose_records_all_expired_tells_and_catches_up(api, box):
    """§4.3, §4.1"""
    api.put(box, ttl_ms=3_600_000, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": n, "ts": 1000} for n in range(3)])
    answer = api.diff(box)
    assert answer["records"] == []
    assert gap(answer) == (1, 3, "ttl", 3)
    assert (answer["earliest_seq"], answer["next_from_seq"], answer["caught_up"]) == (4, 3, True)
    assert no_tombstone(api.diff(box, from_seq=3))
    state = api.state(box)
    assert (state["count"], state["bytes"], state["earliest_seq"], state["head_seq"]) == (0, 0, 4, 3)


def test_a_record_expires_while_it_lies_there(api, box):
    """§1 ttl_ms: by the clock, without a write to push it out."""
    api.put(box, ttl_ms=1)
    api.append(box, "brief")
    api.until(lambda: api.state(box)["count"] == 0, f"{box}.quiet")
    answer = api.diff(box)
    assert (answer["records"], gap(answer)) == ([], (1, 1, "ttl", 1))
    api.refused(api.get_record(box, 1), 404, "not_found")


def test_cap_and_ttl_in_one_gap_are_mixed(api, box):
    """§4.3"""
    api.put(box, cap_records=2, timestamping={"mode": "client-prefer"})
    for number in range(1, 4):
        api.append(box, records=[{"data": number, "ts": number * 1000}])
    api.append(box, "fresh")
    api.put(box, ttl_ms=3_600_000)
    answer = api.diff(box)
    assert gap(answer) == (1, 3, "mixed", 3)
    assert [record["data"] for record in answer["records"]] == ["fresh"]


def test_delete_is_silent_but_eviction_leaves_a_tombstone(api, box):
    """§4.3: loss you did not ask for always shows; removal you asked for never does."""
    api.put(box, cap_records=3)
    for number in range(1, 4):
        api.append(box, number)
    api.delete(box, before_seq=3)
    deleted = api.diff(box)
    assert no_tombstone(deleted)
    assert ([r["$seq"] for r in deleted["records"]], deleted["earliest_seq"]) == ([3], 3)
    for number in range(4, 7):
        api.append(box, number)
    evicted = api.diff(box)
    assert gap(evicted) == (1, 3, "cap", 3)
    assert [record["$seq"] for record in evicted["records"]] == [4, 5, 6]


def test_the_gap_reaches_to_the_first_live_record_but_only_evictions_count_as_missed(api, box):
    """§4.2, §4.3: evicted to 3, then deleted to 5. missed_estimate counts up to the evict floor."""
    api.put(box, cap_records=3)
    for number in range(1, 6):
        api.append(box, number)
    api.delete(box, before_seq=5)
    answer = api.diff(box)
    assert gap(answer) == (1, 4, "cap", 2)
    assert answer["tombstone"]["earliest_seq"] == answer["earliest_seq"] == 5
    assert gap(api.diff(box, from_seq=1)) == (2, 4, "cap", 1)
    silent = api.diff(box, from_seq=2)
    assert no_tombstone(silent)
    assert [record["$seq"] for record in silent["records"]] == [5]


@pytest.mark.exhaustive
def test_deleting_the_oldest_makes_room_so_nothing_is_evicted(api, box):
    """§4.2: evict_floor moves only when live records are lost."""
    api.put(box, cap_records=3)
    api.append(box, 1, 2, 3)
    api.delete(box, before_seq=4)
    api.append(box, 4, 5, 6)
    answer = api.diff(box)
    assert no_tombstone(answer)
    assert [record["$seq"] for record in answer["records"]] == [4, 5, 6]


@pytest.mark.exhaustive
def test_expiry_of_what_was_already_deleted_is_no_loss(api, box):
    """§4.2"""
    api.put(box, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": 1, "ts": 1000}, {"data": 2, "ts": 2000}, {"data": 3}])
    api.delete(box, before_seq=3)
    api.put(box, ttl_ms=3_600_000)
    answer = api.diff(box)
    assert no_tombstone(answer)
    assert [record["data"] for record in answer["records"]] == [3]


@pytest.mark.exhaustive
def test_holes_made_by_deletes_do_not_count_towards_a_cap(api, box):
    """§1, §4.2: the cap is on live records."""
    api.put(box, cap_records=3)
    api.append(box, records=[{"data": n, "tag": f"t{n}"} for n in (1, 2, 3)])
    api.delete(box, match="t2")
    api.append(box, 4)
    answer = api.diff(box)
    assert no_tombstone(answer)
    assert [record["$seq"] for record in answer["records"]] == [1, 3, 4]
    api.append(box, 5)
    answer = api.diff(box)
    assert [record["$seq"] for record in answer["records"]] == [3, 4, 5]
    assert answer["tombstone"]["reason"] == "cap"
    assert answer["tombstone"]["gap_from"] == 1
    assert answer["tombstone"]["gap_to"] == 2


@pytest.mark.exhaustive
def test_the_floors_only_rise(api, box):
    """§4.2: monotonic until the box is recreated."""
    api.put(box, cap_records=4)
    seen = []
    for number in range(1, 30):
        api.append(box, records=[{"data": number, "tag": str(number % 3)}])
        if number % 7 == 0:
            api.delete(box, match="1")
        if number % 11 == 0:
            api.delete(box, before_seq=number - 1)
        answer = api.diff(box)
        floor = answer["tombstone"]["missed_estimate"] + 1 if answer.get("tombstone") else 1
        assert floor <= answer["earliest_seq"] <= answer["head_seq"] + 1
        seen.append((floor, answer["earliest_seq"]))
    assert [floor for floor, _ in seen] == sorted(floor for floor, _ in seen)
    assert [earliest for _, earliest in seen] == sorted(earliest for _, earliest in seen)


@pytest.mark.exhaustive
def test_a_reader_in_steps_meets_one_tombstone_and_misses_nothing_live(api, box):
    """§4.3: at most one per answer, and the cursor passes it."""
    api.put(box, cap_records=5)
    for number in range(1, 13):
        api.append(box, number)
    records, tombstones = api.read_all(box, limit=2)
    assert [record["data"] for record in records] == [8, 9, 10, 11, 12]
    assert len(tombstones) == 1


def test_a_filter_does_not_hide_a_tombstone(api, box):
    """§4.3: loss always shows, though every record that is left is the reader's own."""
    api.put(box, cap_records=1)
    api.append(box, 1, node="me")
    api.append(box, 2, node="me")
    answer = api.diff(box, node="me")
    assert answer["records"] == []
    assert gap(answer) == (1, 1, "cap", 1)


# -- recreated (§4.4) -----------------------------------------------------------------------------------


def test_a_cursor_beyond_the_head_learns_that_the_box_was_made_again(api, box):
    """§4.4"""
    api.append(box, *range(10))
    api.drop(box)
    api.append(box, "a", "b")
    answer = api.diff(box, from_seq=10)
    tombstone = answer["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 2)
    assert [record["data"] for record in answer["records"]] == ["a", "b"]
    assert (answer["next_from_seq"], answer["caught_up"]) == (2, True)


def test_a_cursor_of_an_earlier_life_is_known_by_its_generation(api, box):
    """§4.4: although the new life has grown past the cursor."""
    api.append(box, 1, 2, 3)
    stale = api.diff(box)
    api.drop(box)
    api.append(box, "a", "b", "c", "d")
    answer = api.diff(box, from_seq=stale["next_from_seq"], generation=stale["generation"])
    tombstone = answer["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 4)
    assert [record["data"] for record in answer["records"]] == ["a", "b", "c", "d"]
    again = api.diff(box, from_seq=answer["next_from_seq"], generation=answer["generation"])
    assert no_tombstone(again)


def test_the_right_generation_is_no_news(api, box):
    """§4.4"""
    api.append(box, 1, 2)
    generation = api.state(box)["generation"]
    answer = api.diff(box, from_seq=1, generation=generation)
    assert no_tombstone(answer)
    assert [record["data"] for record in answer["records"]] == [2]


@pytest.mark.exhaustive
def test_any_cursor_beyond_the_head_counts_as_recreated(api, box):
    """§4.4: a box cannot tell an earlier life from an invented cursor."""
    api.append(box, 1)
    for from_seq in (2, 2**53, 2**64 - 1):
        answer = api.diff(box, from_seq=from_seq)
        assert answer["tombstone"]["reason"] == "recreated"
        assert [record["data"] for record in answer["records"]] == [1]


def test_a_stale_cursor_on_an_empty_new_box_starts_over_at_zero(api, box):
    """§4.4"""
    api.append(box, 1, 2, 3)
    api.drop(box)
    api.put(box)
    answer = api.diff(box, from_seq=3)
    tombstone = answer["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 0)
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"]) == ([], 0, True)


@pytest.mark.exhaustive
def test_recreated_is_the_one_tombstone_when_the_new_box_has_evicted_too(api, box):
    """§4.3, §4.4: at most one per answer; the read goes on from the first live record."""
    api.append(box, *range(10))
    generation = api.state(box)["generation"]
    api.drop(box)
    api.put(box, cap_records=2)
    for number in range(1, 5):
        api.append(box, number)
    for cursor in ({"from_seq": 10}, {"from_seq": 1, "generation": generation}):
        answer = api.diff(box, **cursor)
        tombstone = answer["tombstone"]
        assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 4)
        assert [record["data"] for record in answer["records"]] == [3, 4]


# -- long poll (§4.6) -----------------------------------------------------------------------------------


def test_a_long_poll_is_woken_by_the_append(api, box):
    """§4.6"""
    api.append(box, 1)
    poll = api.in_background(lambda other: other.diff(box, from_seq=1, wait_ms=LONG_MS))
    api.let_time_pass(50, f"{box}.quiet")
    api.append(box, 2)
    answer, seconds = poll()
    assert [record["data"] for record in answer["records"]] == [2]
    assert (answer["next_from_seq"], answer["caught_up"]) == (2, True)
    assert seconds < SOON_S


def test_a_long_poll_with_something_to_deliver_answers_at_once(api, box):
    """§4.6"""
    api.append(box, 1)
    answer, seconds = api.in_background(lambda other: other.diff(box, wait_ms=LONG_MS))()
    assert [record["data"] for record in answer["records"]] == [1]
    assert seconds < SOON_S


def test_a_long_poll_that_times_out_answers_an_ordinary_empty_read(api, box):
    """§4.6"""
    api.append(box, 1)
    answer, seconds = api.in_background(lambda other: other.diff(box, from_seq=1, wait_ms=60))()
    assert answer["records"] == []
    assert (answer["next_from_seq"], answer["caught_up"], answer["lag"]) == (1, True, 0)
    assert no_tombstone(answer)
    assert seconds >= 0.055


def test_a_long_poll_waits_on_an_empty_box_too(api, box):
    """§4.6"""
    api.put(box)
    poll = api.in_background(lambda other: other.diff(box, wait_ms=LONG_MS))
    api.let_time_pass(50, f"{box}.quiet")
    api.append(box, "first")
    answer, seconds = poll()
    assert [record["data"] for record in answer["records"]] == ["first"]
    assert seconds < SOON_S


@pytest.mark.parametrize(
    "options, ignored",
    [({"node": "me"}, {"node": "me"}), ({"match": "wanted"}, {"tag": "other"})],
    ids=json.dumps,
)
def test_a_long_poll_sleeps_through_what_its_filter_leaves_out(api, box, options, ignored):
    """§4.6: it waits while nothing is deliverable; what is left out is not."""
    api.put(box)
    poll = api.in_background(lambda other: other.diff(box, wait_ms=LONG_MS, **options))
    api.let_time_pass(50, f"{box}.quiet")
    api.append(box, records=[{"data": "ignored", **ignored}])
    api.let_time_pass(50, f"{box}.quiet")
    api.append(box, records=[{"data": "deliverable", "node": "you", "tag": "wanted"}])
    answer, seconds = poll()
    assert [record["data"] for record in answer["records"]] == ["deliverable"]
    assert answer["next_from_seq"] == 2
    assert seconds < SOON_S


def test_a_long_poll_over_only_own_records_moves_the_cursor_when_it_times_out(api, box):
    """§4.1, §4.6"""
    api.append(box, 1, 2, node="me")
    answer = api.diff(box, node="me", wait_ms=40)
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"]) == ([], 2, True)


def test_a_tombstone_is_worth_answering_a_long_poll_for(api, box):
    """§4.3, §4.6: loss always shows, and at once."""
    api.put(box, ttl_ms=3_600_000, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": 1, "ts": 1000}])
    answer, seconds = api.in_background(lambda other: other.diff(box, wait_ms=LONG_MS))()
    assert (answer["records"], gap(answer)) == ([], (1, 1, "ttl", 1))
    assert seconds < SOON_S


@pytest.mark.exhaustive
def test_one_append_wakes_every_poller(api, box):
    """§4.6"""
    api.put(box)
    polls = [api.in_background(lambda other: other.diff(box, wait_ms=LONG_MS)) for _ in range(5)]
    api.let_time_pass(50, f"{box}.quiet")
    api.append(box, "news")
    for poll in polls:
        answer, seconds = poll()
        assert [record["data"] for record in answer["records"]] == ["news"]
        assert seconds < SOON_S


@pytest.mark.exhaustive
def test_a_poller_of_another_box_is_not_woken(api, box):
    """§4.6"""
    api.put(box)
    poll = api.in_background(lambda other: other.diff(box, wait_ms=150))
    api.append(f"{box}.other", 1)
    answer, seconds = poll()
    assert answer["records"] == []
    assert seconds >= 0.14


async def test_a_waiting_poll_holds_up_nobody_on_the_same_client(api, box):
    """§4.6: on HTTP/2 the poll and everything else share one connection."""
    api.put(box)
    polled = []

    async with api.combo.async_client(api.server.url) as client:

        async def poll():
            polled.append(await client.post(f"/v0/boxes/{box}/diff", json={"wait_ms": LONG_MS}))

        with trio.fail_after(SOON_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poll)
                await client.post(f"/v0/boxes/{box}/diff", json={"wait_ms": 30})
                assert polled == []
                await client.post(f"/v0/boxes/{box}", json={"records": [{"data": "through"}]})
    assert [record["data"] for record in api.ok(polled[0])["records"]] == ["through"]


# -- one record, and the tail (§4.7) --------------------------------------------------------------------


def test_one_record_by_its_seq(api, box):
    """§4.7"""
    api.append(box, records=[{"data": "a"}, {"data": {"b": 1}, "node": "n", "meta": {"k": 1}}])
    record = api.record(box, 2)
    assert (record["$seq"], record["data"], record["$node"], record["meta"]) == (2, {"b": 1}, "n", {"k": 1})
    assert record["$ts"] == api.diff(box)["records"][1]["$ts"]
    assert "$node" not in api.record(box, 1)
    assert "meta" not in api.record(box, 1)


def test_a_record_that_is_gone_or_not_yet_there_is_not_found(api, box):
    """§4.7"""
    api.put(box, cap_records=3)
    for number in range(1, 5):
        api.append(box, records=[{"data": number, "tag": str(number)}])
    api.delete(box, match="3")
    for evicted, deleted, future, none in [(1, 3, 5, 0)]:
        for seq in (evicted, deleted, future, none, 2**64 - 1):
            api.refused(api.get_record(box, seq), 404, "not_found")
    assert api.record(box, 2)["data"] == 2
    assert api.record(box, 4)["data"] == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("seq", ["x", "-1", "1.5", "1x", "%20", "0x1", "1e2"])
def test_a_seq_that_is_no_number_is_refused(api, box, seq):
    """§4.7, §0.3"""
    api.append(box, 1)
    api.refused(api.get_record(box, seq), 400, "invalid_request")


def test_the_tail_says_where_the_next_record_goes(api, box):
    """§4.7"""
    api.put(box)
    empty = api.tail(box)
    assert (empty["head_seq"], empty["next_seq"], empty["last_ts"]) == (0, 1, None)
    api.append(box, 1, 2)
    tail = api.tail(box)
    assert (tail["head_seq"], tail["next_seq"]) == (2, 3)
    assert tail["last_ts"] == api.diff(box)["records"][-1]["$ts"]
    api.delete(box, before_seq=3)
    assert (api.tail(box)["head_seq"], api.tail(box)["next_seq"]) == (2, 3)
