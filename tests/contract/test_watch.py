"""Watch (§7.1-§7.4): sessions, streams, what each frame says, resuming, and the one-step watch.

Method: real streams over both fronts and both protocols. Nothing waits for time: a test reads until the event
it is about has come.
"""

import base64
import json
import re

import pytest

LIVE = {"tail": True}


def seqs(event):
    return [record["$seq"] for record in event["records"]]


# -- sessions (§7.1)


def test_a_session_says_where_it_starts_in_each_box(api, box):
    """§7.1"""
    first, second = f"{box}.a", f"{box}.b"
    api.append(first, 1, 2, 3)
    api.append(second, 1)
    answer = api.watch({first: {"from_seq": 1}, second: {"tail": True}})
    assert re.fullmatch(r"wid_[A-Za-z0-9_-]{22,}", answer["wid"])
    assert answer["stream_url"] == f"/v0/watch/{answer['wid']}"
    assert answer["session_ttl_ms"] == 300_000
    assert answer["boxes"] == {
        first: {"from_seq": 1, "head_seq": 3, "earliest_seq": 1},
        second: {"from_seq": 1, "head_seq": 1, "earliest_seq": 1},
    }


def test_an_unknown_box_is_refused_or_dropped_when_lenient(api, box):
    """§7.1"""
    api.append(box, 1)
    missing = f"{box}.missing"
    body = {"boxes": {box: {}, missing: {}}}
    api.refused(api.send("POST", "/v0/watch", body), 404, "box_not_found", missing)
    answer = api.watch(body["boxes"], params={"lenient": "true"})
    assert list(answer["boxes"]) == [box]
    api.refused(
        api.send("POST", "/v0/watch", {"boxes": {missing: {}}}, params={"lenient": "true"}),
        404,
        "box_not_found",
    )
    assert not api.exists(missing)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "body, field",
    [
        ({}, "boxes"),
        ({"boxes": {}}, "boxes"),
        ({"boxes": {f"b{n}": {} for n in range(257)}}, "boxes"),
        ({"boxes": {"no/name": {}}}, "box"),
        ({"boxes": {"b": {"from_seq": -1}}}, "from_seq"),
        ({"boxes": {"b": {"from_seq": 2**64}}}, "from_seq"),
        ({"boxes": {"b": {"from_seq": 1, "tail": True}}}, "tail"),
        ({"boxes": {"b": {"form_seq": 1}}}, "form_seq"),
        ({"boxes": {"b": {}}, "limit": "x"}, "limit"),
        ({"boxes": {"b": {}}, "node": "n" * 129}, "node"),
        ({"boxes": {"b": {}}, "node": ["n"] * 257}, "node"),
        ({"boxes": {"b": {}}, "consistency": "some"}, "consistency"),
        ({"boxes": {"b": {}}, "cursor": "!"}, "cursor"),
        ({"boxes": {"b": {}}, "cursor": {"b": -1}}, "cursor"),
        ({"boxes": {"b": {}}, "cursor": base64.urlsafe_b64encode(b"[1]").decode()}, "cursor"),
    ],
)
def test_a_bad_session_is_refused_by_the_name_of_its_field(api, body, field):
    """§0.9, §7.1"""
    api.refused(api.send("POST", "/v0/watch", body), 400, "invalid_request", field)


def test_watching_does_not_consume_or_touch(api, box):
    api.append(box, 1)
    api.watch({box: {}})
    assert api.state(box)["last_read_ts"] is None


# -- the stream (§7.2)


def test_a_stream_is_backlog_then_caught_up_then_live(api, box):
    """§7.2"""
    api.append(box, "a", "b")
    with api.events(api.watch({box: {}})["stream_url"]) as events:
        headers = events.answer.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
        backlog, caught_up = events.take("record", "caught-up")
        assert events.retry_ms == 2000
        assert [record["data"] for record in backlog["records"]] == ["a", "b"]
        assert (backlog["box"], backlog["from_seq"], backlog["to_seq"], backlog["head_seq"]) == (box, 0, 2, 2)
        assert caught_up == {"box": box, "head_seq": 2}
        for seq, data in enumerate("cde", 3):
            api.append(box, data)
            [live] = events.take("record")
            assert [(record["$seq"], record["data"]) for record in live["records"]] == [(seq, data)]
            assert (live["from_seq"], live["to_seq"], live["head_seq"]) == (seq - 1, seq, seq)


def test_every_frame_with_data_has_the_cursor_of_the_whole_session(api, box):
    """§7.2: id is base64url of the map, box -> seq."""
    one, two = f"{box}.1", f"{box}.2"
    api.append(one, 1)
    api.append(two, 1, 2)
    with api.events(api.watch({one: LIVE, two: LIVE})["stream_url"]) as events:
        found = [events.next() for _ in range(2)]
        assert {event.name for event in found} == {"caught-up"}
        api.append(one, 2)
        assert events.next().cursors == {one: 2, two: 2}
        api.append(two, 3)
        event = events.next()
        assert event.cursors == {one: 2, two: 3}
        assert re.fullmatch(r"[A-Za-z0-9_-]+", event.id)


def test_many_boxes_on_all_shards_share_one_stream_in_order(api, box):
    """§7.2"""
    names = [f"{box}.{number}" for number in range(12)]
    for name in names:
        api.append(name, 0)
    with api.events(api.watch({name: {} for name in names})["stream_url"]) as events:
        for number in range(1, 6):
            for name in names:
                api.append(name, number)
        found = {name: [] for name in names}
        while any(len(records) < 6 for records in found.values()):
            event = events.next()
            if event.name == "record":
                found[event.json["box"]] += [record["data"] for record in event.json["records"]]
        assert all(records == list(range(6)) for records in found.values())


def test_what_a_reader_may_ask_of_the_records(api, box):
    """§7.1: include_*, node."""
    api.append(box, records=[{"data": 1, "tag": "t", "meta": {"m": 1}}, {"data": 2, "node": "me"}])
    path = api.watch({box: {}}, include_tags=True, node="me")["stream_url"]
    with api.events(path) as events:
        [frame] = events.take("record")
        [record] = frame["records"]
        assert (record["$tag"], record["meta"], record["data"], frame["to_seq"]) == ("t", {"m": 1}, 1, 2)
        events.take("caught-up")
        api.append(box, "mine", node="me")
        api.append(box, "theirs", node="them")
        while True:
            [frame] = events.take("record")
            if frame["records"][-1]["data"] == "theirs":
                break
        assert seqs(frame) == [4]
    path = api.watch({box: {}}, include_data=False, include_meta=False)["stream_url"]
    with api.events(path) as events:
        [frame] = events.take("record")
        assert all(set(record) <= {"$seq", "$ts", "$node"} for record in frame["records"])


def test_a_frame_holds_no_more_than_was_asked(api, box):
    """§7.1: limit, max_batch_bytes."""
    api.append(box, *range(10))
    with api.events(api.watch({box: {}}, limit=4)["stream_url"]) as events:
        frames = events.take("record", "record", "record")
        assert [len(frame["records"]) for frame in frames] == [4, 4, 2]
        assert [frame["from_seq"] for frame in frames] == [0, 4, 8]
        events.take("caught-up")
    with api.events(api.watch({box: {}}, max_batch_bytes=1)["stream_url"]) as events:
        frames = events.take(*["record"] * 10)
        assert [seqs(frame) for frame in frames] == [[seq] for seq in range(1, 11)]


def test_json_with_line_breaks_arrives_as_it_is(api, box):
    """§0.3"""
    api.ok(api.post(box, b'{"records":[{"data":{\n  "a":\r\n [1.0,\n1e400]}}]}'), 201)
    with api.events(f"/v0/boxes/{box}/watch") as events:
        assert re.search(r"\[1\.0,\s+1e400\]", events.next().data)


def test_a_heartbeat_comes_when_nothing_else_does(api, box):
    """§7.2"""
    api.put(box)
    with api.events(api.watch({box: {}}, heartbeat_ms=0)["stream_url"]) as events:  # clamped to 1000
        events.take("caught-up")
        assert re.fullmatch(r"hb [0-9]{13}", events.comment())


# -- loss, deletion, rebirth (§7.2)


def test_loss_found_at_connect_and_loss_on_the_way_are_told_apart(api, box):
    """§7.2, §4.3"""
    api.put(box, cap_records=2)
    api.append(box, *range(1, 3))
    api.append(box, *range(3, 5))
    with api.events(api.watch({box: {}})["stream_url"]) as events:
        gap, frame, _ = events.take("tombstone", "record", "caught-up")
        assert gap == {
            "box": box,
            "reason": "from_seq_too_old",
            "gap_from": 1,
            "gap_to": 2,
            "earliest_seq": 3,
            "head_seq": 4,
        }
        assert (seqs(frame), frame["from_seq"]) == ([3, 4], 2)


def test_deleting_records_is_silent(api, box):
    """§7.2, §5"""
    api.append(box, 1, 2, 3)
    api.delete(box, before_seq=3)
    with api.events(api.watch({box: {}})["stream_url"]) as events:
        [frame, _] = events.take("record", "caught-up")
        assert seqs(frame) == [3]


def test_deleting_a_box_is_told_and_the_rest_of_the_stream_goes_on(api, box):
    """§7.2"""
    gone, stays = f"{box}.gone", f"{box}.stays"
    api.append(gone, 1, 2)
    api.append(stays, 1)
    with api.events(api.watch({gone: LIVE, stays: LIVE})["stream_url"]) as events:
        events.take("caught-up", "caught-up")
        api.drop(gone)
        [deleted] = events.take("box-deleted")
        assert deleted == {"box": gone, "head_seq": 2, "reason": "deleted"}
        api.append(stays, 2)
        assert seqs(*events.take("record")) == [2]
        api.append(gone, "again")
        reborn, frame = events.take("tombstone", "record")
        assert (reborn["box"], reborn["reason"], reborn["gap_from"]) == (gone, "recreated", 1)
        assert [record["data"] for record in frame["records"]] == ["again"]
        api.append(gone, "and again")
        assert seqs(*events.take("record")) == [2]


def test_a_box_reborn_while_nobody_watched_is_told(api, box):
    """§2.4: also when the new box has grown past the old cursor, with a session and without."""
    api.append(box, 1)
    path = api.watch({box: {}})["stream_url"]
    ids = {}
    for address in (path, f"/v0/boxes/{box}/watch"):
        with api.events(address) as events:
            events.take("record", "caught-up")
            api.append(box, "more")
            ids[address] = events.until("record", box=box)[-1].id
    api.drop(box)
    api.append(box, *range(9))
    for address, last in ids.items():
        with api.events(address, last_event_id=last) as events:
            reborn, frame = events.take("tombstone", "record")
            assert reborn["reason"] == "recreated"
            assert seqs(frame) == list(range(1, 10))


# -- resuming (§7.2)


def test_the_session_remembers_where_it_was(api, box):
    """§7.2: without Last-Event-ID the session's own cursors rule."""
    api.append(box, 1)
    path = api.watch({box: {}})["stream_url"]
    with api.events(path) as events:
        events.take("record", "caught-up")
    api.append(box, 2)
    with api.events(path) as events:
        assert seqs(*events.take("record")) == [2]


def test_last_event_id_only_rewinds(api, box):
    """§7.2"""
    api.append(box, 1, 2, 3)
    path = api.watch({box: {}}, limit=1)["stream_url"]
    with api.events(path) as events:
        first = events.next()
        events.take("record", "record", "caught-up")
    with api.events(path, last_event_id=first.id) as events:
        assert [record["$seq"] for record in events.records(2)] == [2, 3]
        events.take("caught-up")
    ahead = base64.urlsafe_b64encode(json.dumps({box: 99}).encode()).decode().rstrip("=")
    with api.events(path, last_event_id=ahead) as events:
        events.take("caught-up")
        api.append(box, 4)
        assert seqs(*events.take("record")) == [4]


def test_a_cursor_starts_a_new_session_where_another_was(api, box):
    """§7.1: cursor, as the id's text or as the map."""
    api.append(box, 1, 2, 3)
    with api.events(api.watch({box: {}}, limit=2)["stream_url"]) as events:
        first = events.next()
    for cursor in (first.id, first.cursors):
        answer = api.watch({box: {}}, cursor=cursor)
        assert answer["boxes"][box]["from_seq"] == 2
        with api.events(answer["stream_url"]) as events:
            assert seqs(*events.take("record")) == [3]


def test_a_second_connection_takes_the_session_over(api, box):
    api.append(box, 1)
    path = api.watch({box: {}})["stream_url"]
    with api.events(path) as old:
        old.take("record", "caught-up")
        with api.events(path) as new:
            new.take("caught-up")
            [last] = old.end()
            assert (last.name, last.json["code"]) == ("error", 410)
            api.append(box, 2)
            assert seqs(*new.take("record")) == [2]


def test_no_such_session(api):
    """§7.2"""
    for wid in ("wid_AAAAAAAAAAAAAAAAAAAAAAAA", "nonsense", "wid_" + "A" * 100):
        api.refused(
            api.send("GET", f"/v0/watch/{wid}", headers={"Accept": "text/event-stream"}), 404, "not_found"
        )


def test_a_stream_is_only_for_those_who_take_events(api, box):
    """§7.2: else 406."""
    api.append(box, 1)
    for path in (api.watch({box: {}})["stream_url"], f"/v0/boxes/{box}/watch"):
        api.refused(
            api.send("GET", path, headers={"Accept": "application/json"}),
            406,
            "not_acceptable",
            "event-stream",
        )
        api.refused(
            api.send("GET", path, headers={"Accept": "text/event-stream", "Last-Event-ID": "?"}),
            400,
            "invalid_request",
            "last-event-id",
        )


def test_methods_of_the_watch_addresses(api, box):
    """§0.6"""
    api.append(box, 1)
    path = api.watch({box: {}})["stream_url"]
    for method, address, allow in (
        ("GET", "/v0/watch", "POST"),
        ("POST", path, "GET"),
        ("DELETE", f"/v0/boxes/{box}/watch", "GET"),
    ):
        response = api.send(method, address)
        api.refused(response, 405, "method_not_allowed")
        assert allow in response.headers["allow"]
    for address in (path, f"/v0/boxes/{box}/watch"):
        response = api.send("HEAD", address, headers={"Accept": "text/event-stream"})
        assert (response.status_code, response.content) == (200, b"")


# -- consistency (§7.1)


def test_strong_readers_get_what_is_on_the_disk(api, box):
    """§7.1"""
    api.put(box, durability="disk")
    with api.events(api.watch({box: {}}, consistency="strong")["stream_url"]) as events:
        events.take("caught-up")
        for number in range(3):
            api.append(box, number)
        assert [record["data"] for record in events.records(3)] == [0, 1, 2]
    api.put(f"{box}.memory", durability="memory")
    response = api.send("POST", "/v0/watch", {"boxes": {f"{box}.memory": {}}, "consistency": "strong"})
    api.refused(response, 400, "invalid_request", "consistency")


# -- one step (§7.4)


def test_one_step_is_a_stream_without_a_session(api, box):
    """§7.4"""
    api.append(box, 1, 2)
    path = f"/v0/boxes/{box}/watch"
    with api.events(path) as events:
        assert seqs(events.take("record", "caught-up")[0]) == [1, 2]
    with api.events(path, params={"from_seq": 1}) as events:
        assert seqs(events.take("record", "caught-up")[0]) == [2]
    with api.events(path, params={"tail": "true", "node": "me"}) as events:
        events.take("caught-up")
        api.append(box, "mine", node="me")
        api.append(box, "yours")
        event = events.until("record", box=box)[-1]
        assert [record["data"] for record in event.json["records"]] == ["yours"]
    with api.events(path, params={"from_seq": 0}, last_event_id=event.id) as events:
        events.take("caught-up")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "query, field",
    [
        ("from_seq=x", "from_seq"),
        ("from_seq=1&tail=true", "tail"),
        ("tail=maybe", "tail"),
        ("seq=1", "seq"),
        ("consistency=weak", "consistency"),
        (f"node={'n' * 129}", "node"),
    ],
)
def test_a_bad_one_step_watch_is_refused_by_name(api, box, query, field):
    """§7.4, §0.9"""
    api.append(box, 1)
    api.refused(api.send("GET", f"/v0/boxes/{box}/watch?{query}"), 400, "invalid_request", field)


def test_a_one_step_watch_of_a_missing_box(api, box):
    """§7.4"""
    api.refused(api.send("GET", f"/v0/boxes/{box}/watch"), 404, "box_not_found", box)


# -- limits (§12)


@pytest.mark.exhaustive
def test_sessions_and_streams_are_limited_and_freed(fleet, combo, box):
    """§12"""
    from tests.contract.conftest import Api

    server = fleet(combo.front, max_watch_sessions=4, max_sse_connections=2)
    with combo.client(server.url) as client:
        api = Api(client, server, combo)
        api.append(box, 1)
        paths = [api.watch({box: {}})["stream_url"] for _ in range(4)]
        response = api.send("POST", "/v0/watch", {"boxes": {box: {}}})
        assert api.refused(response, 429, "throttled")["detail"]["limit"] == "watch_sessions"
        assert "retry-after" in response.headers
        with api.events(paths[0]) as one:
            with api.events(paths[1]) as two:
                one.next(), two.next()
                response = api.send("GET", f"/v0/boxes/{box}/watch")
                assert api.refused(response, 429, "throttled")["detail"]["limit"] == "sse_connections"
            api.until(lambda: _opens(api, paths[2]), f"{box}.quiet")


def _opens(api, path):
    with api.events(path) as events:
        return events.answer.status_code == 200
