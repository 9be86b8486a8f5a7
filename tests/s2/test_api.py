"""Goal: what the suites of the SDKs do not ask of `/v1` is as the S2 API says too: statuses, shapes, tokens,
the order of refusals, compression, CORS, events that resume, streams as `/v0` sees them.

Method: plain requests to a real server with two shards.
"""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
import time
from typing import Any
from urllib.parse import quote

import pytest
import zstandard

from streams.testing import Server
from tests.s2.conftest import Client

ODD = "a/b c?é#x"
RECORD = {"records": [{"body": "x"}]}
_INVALID = (422, "invalid")


def error_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


# -- basins and streams


def test_a_creation_that_is_repeated_with_its_token_is_answered_again(client: Client) -> None:
    asked = {"basin": client.basin, "config": {"create_stream_on_read": True}}
    first = client.call("POST", "/basins", asked, s2_request_token="t")
    again = client.call("POST", "/basins", asked, s2_request_token="t")
    assert (first.status_code, first.headers["s2-provision-result"]) == (201, "created")
    assert (again.status_code, again.headers["s2-provision-result"]) == (201, "noop")
    assert first.json() == again.json()
    assert error_of(client.call("POST", "/basins", asked, s2_request_token="u")) == (
        409,
        "resource_already_exists",
    )
    assert error_of(client.call("POST", "/basins", asked, s2_request_token="x" * 37)) == (400, "bad_header")
    stream = {"stream": "s", "config": {"retention_policy": {"age": 5}}}
    for result in ("created", "noop"):
        made = client.call("POST", "/streams", stream, s2_request_token="t")
        assert (made.status_code, made.headers["s2-provision-result"]) == (201, result)
    assert client.call("POST", "/streams", {"stream": "s"}, s2_request_token="t").status_code == 409


def test_ensuring_says_what_it_came_to(client: Client) -> None:
    results = []
    for body in (None, None, {"config": {"create_stream_on_append": True}}):
        answer = client.call("PUT", f"/basins/{client.basin}", body)
        results.append((answer.status_code, answer.headers["s2-provision-result"]))
    for body in (None, {}, {"retention_policy": {"age": 5}}):
        answer = client.call("PUT", "/streams/s", body)
        results.append((answer.status_code, answer.headers["s2-provision-result"]))
    assert results == [(201, "created"), (200, "noop"), (200, "updated")] * 2


def test_a_stream_may_have_any_name_and_lists_are_sorted_over_all_shards(basin: Client) -> None:
    names = [f"{letter}/{number}" for letter in "ab" for number in range(6)] + [ODD]
    for name in reversed(names):
        basin.stream(name)
    basin.append("x", stream=quote(ODD, safe=""))
    found: list[str] = []
    while True:
        after = quote(found[-1], safe="") if found else ""
        page = basin.call("GET", f"/streams?limit=5&start_after={after}").json()
        found += [stream["name"] for stream in page["streams"]]
        if not page["has_more"]:
            break
    assert found == sorted(names)
    inside = basin.call("GET", "/streams?prefix=b%2F&start_after=b%2F3").json()
    assert [stream["name"] for stream in inside["streams"]] == ["b/4", "b/5"]


def test_a_deleted_stream_is_seen_as_such_and_can_be_made_again(basin: Client) -> None:
    """How long it is seen is a matter of time, and so of the core's tests; what is seen is not."""
    basin.stream()
    basin.append("old")
    basin.call("POST", "/streams/s/records", {"records": [{"headers": [["", "fence"]], "body": "mine"}]})
    assert basin.call("DELETE", "/streams/s").status_code == 202
    while basin.call("POST", "/streams", {"stream": "s"}).status_code != 201:
        assert basin.call("DELETE", "/streams/s").status_code in (202, 404)
        for listed in basin.call("GET", "/streams").json()["streams"]:
            assert listed["deleted_at"] is not None
        for answer in (
            basin.call("GET", "/streams/s"),
            basin.call("PATCH", "/streams/s", {}),
            basin.call("POST", "/streams/s/records", RECORD),
            basin.call("GET", "/streams/s/records/tail"),
        ):
            assert error_of(answer) in ((409, "stream_deletion_pending"), (404, "stream_not_found"))
    assert basin.tail() == 0
    assert basin.append("new", fencing_token="")["start"]["seq_num"] == 0
    assert basin.bodies() == ["new"]


def test_a_deleted_basin_goes_with_all_its_streams(basin: Client) -> None:
    for number in range(4):
        basin.stream(f"s{number}")
    assert basin.call("DELETE", f"/basins/{basin.basin}").status_code == 202
    while listed := basin.call("GET", f"/basins?prefix={basin.basin}").json()["basins"]:
        assert [(each["state"], each["deleted_at"] is None) for each in listed] == [("deleting", False)]
        assert basin.call("DELETE", f"/basins/{basin.basin}").status_code in (202, 404)
        made = basin.call("POST", "/streams", {"stream": "new"})
        assert error_of(made) in ((409, "basin_deletion_pending"), (404, "basin_not_found"))
    assert error_of(basin.call("GET", f"/basins/{basin.basin}")) == (404, "basin_not_found")
    assert basin.call("GET", "/streams").json() == {"streams": [], "has_more": False}
    basin.create()
    assert error_of(basin.call("GET", "/streams/s1")) == (404, "stream_not_found")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected"),
    [
        ("GET", "/streams", None, {"s2_basin": "Bad"}, (400, "bad_header")),
        ("GET", "/basins/UPPER", None, {}, (400, "bad_path")),
        ("GET", "/streams/%ff", None, {}, (400, "bad_path")),
        ("GET", "/streams/..", None, {}, (404, "")),
        ("GET", f"/streams/{'x' * 513}", None, {}, (400, "bad_path")),
        ("GET", "/streams?limit=-1", None, {}, (400, "bad_query")),
        ("GET", "/streams?limit=1&limit=2", None, {}, (400, "bad_query")),
        ("GET", "/basins?prefix=-x", None, {}, (400, "bad_query")),
        ("GET", f"/streams?prefix={'x' * 513}", None, {}, (400, "bad_query")),
        ("POST", "/basins", {"basin": "short"}, {}, (400, "bad_json")),
        ("POST", "/basins", b"{}", {"content_type": "text/plain"}, (400, "bad_json")),
        ("POST", "/streams", {"stream": ""}, {}, (400, "bad_json")),
        ("POST", "/streams", {"stream": "a\0b"}, {}, (400, "bad_json")),
        ("PUT", "/streams/new", {"retention_policy": {"age": 0}}, {}, (422, "invalid")),
        ("PATCH", "/streams/missing", {}, {}, (404, "stream_not_found")),
        ("DELETE", "/streams/missing", None, {}, (404, "stream_not_found")),
        ("DELETE", "/basins/missing-basin", None, {}, (404, "basin_not_found")),
        ("GET", "/streams/missing", None, {"s2_basin": "missing-basin"}, (404, "stream_not_found")),
        ("PUT", "/streams/new", None, {"s2_basin": "missing-basin"}, (404, "basin_not_found")),
        ("GET", "/streams/missing/records", None, {"s2_basin": "missing-basin"}, (404, "basin_not_found")),
        ("GET", "/streams/missing/records/tail", None, {}, (404, "stream_not_found")),
        ("GET", "/streams/missing/records?seq_num=1&timestamp=2", None, {}, (422, "invalid")),
        ("GET", "/streams/missing/records?timestamp=2&until=2", None, {}, (422, "invalid")),
        ("GET", "/streams/s/records?wait=4294967296", None, {}, (400, "bad_query")),
        ("GET", "/streams/s/records?clamp=yes", None, {}, (400, "bad_query")),
        ("GET", "/streams/s/records?seq_num=0", None, {"s2_format": "hex"}, (400, "bad_header")),
        ("GET", "/streams/s/records", None, {"s2_encryption_key": "x" * 45}, (400, "bad_header")),
        ("GET", "/streams/s/records", None, {"s2_stream_config": "{"}, (400, "bad_header")),
        ("POST", "/streams/missing/records", {"records": []}, {}, (422, "invalid")),
        ("POST", "/streams/missing/records", {"records": [{}]}, {}, (404, "stream_not_found")),
        ("POST", "/streams/s/records", b"\xff", {"content_type": "application/protobuf"}, (400, "bad_proto")),
        ("POST", "/streams/s/records", b"x" * (2 * 1024 * 1024 + 1), {}, (400, "bad_json")),
        ("POST", "/streams/s/records", b"x", {"content_encoding": "br"}, (415, "unsupported_media_type")),
        ("POST", "/streams/s/records", b"x", {"content_encoding": "gzip"}, (400, "bad_json")),
        ("POST", "/basins", {"basin": "in-a-bad-place", "location": "no where"}, {}, (400, "bad_json")),
        ("PUT", "/locations/default", {"name": "local"}, {}, (400, "bad_json")),
        ("PUT", "/locations/default", "aws:us-east-1", {}, (422, "invalid")),
        ("GET", "/metrics?set=active-basins", None, {}, (422, "invalid")),
        ("GET", "/metrics?set=nothing&start=1&end=2", None, {}, (400, "bad_query")),
        ("GET", "/metrics?set=active-basins&start=2&end=1", None, {}, (422, "invalid")),
        ("GET", "/metrics?set=active-basins&start=1&end=4294967295", None, {}, (422, "invalid")),
        ("GET", "/metrics?set=active-basins&start=1&end=2&interval=year", None, {}, (400, "bad_query")),
        ("GET", "/metrics?set=account-ops&start=2&end=1", None, {}, (422, "invalid")),
        ("GET", "/metrics/shared-basin?set=read-ops&start=1", None, {}, (422, "invalid")),
        (
            "GET",
            "/metrics/shared-basin?set=read-ops&start=1&end=2&interval=year",
            None,
            {},
            (400, "bad_query"),
        ),
        ("GET", "/metrics/shared-basin?set=append-ops&start=1&end=2678402", None, {}, (422, "invalid")),
        ("GET", "/metrics/missing-basin?set=append-ops&start=1&end=2", None, {}, (404, "basin_not_found")),
        (
            "GET",
            "/metrics/shared-basin?set=storage&start=1&end=2&interval=minute",
            None,
            {},
            (422, "invalid"),
        ),
        (
            "GET",
            "/metrics/shared-basin/s?set=storage&start=1&end=2&interval=hour",
            None,
            {},
            (422, "invalid"),
        ),
        ("GET", "/metrics/missing-basin?set=storage&start=1&end=2", None, {}, (404, "basin_not_found")),
        ("GET", "/metrics/shared-basin/no?set=storage&start=1&end=2", None, {}, (404, "stream_not_found")),
    ],
)
def test_a_bad_request_is_refused_with_the_code_that_says_why(
    shared: Client, method: str, path: str, body: Any, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    answer = shared.call(method, path, body, **headers)
    assert answer.status_code == expected[0], answer.text
    if expected[1]:
        assert answer.json()["code"] == expected[1]


def test_an_address_that_is_not_there_and_a_method_that_is_not_either(basin: Client) -> None:
    nothing = basin.call("GET", "/nothing")
    assert (nothing.status_code, nothing.content) == (404, b"")
    method = basin.call("DELETE", "/basins")
    assert (method.status_code, method.content, method.headers["allow"]) == (405, b"", "GET, POST")
    assert basin.http.get("/ping").status_code == basin.http.get("/health").status_code == 200


# -- records


def test_the_special_refusals_have_their_own_shapes(basin: Client) -> None:
    basin.stream()
    basin.append("a", "b")
    at = basin.call("POST", "/streams/s/records", {"records": [{}], "match_seq_num": 1})
    assert (at.status_code, at.json()) == (412, {"seq_num_mismatch": 2})
    fence = {"records": [{"headers": [["", "fence"]], "body": "mine"}]}
    assert basin.call("POST", "/streams/s/records", fence).status_code == 200
    token = basin.call("POST", "/streams/s/records", {"records": [{}], "fencing_token": ""})
    assert (token.status_code, token.json()) == (412, {"fencing_token_mismatch": "mine"})
    beyond = basin.call("GET", "/streams/s/records?seq_num=9")
    assert beyond.status_code == 416
    assert beyond.json()["tail"]["seq_num"] == 3


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_bodies_are_compressed_both_ways(basin: Client, encoding: str) -> None:
    basin.stream()
    plain = json.dumps({"records": [{"body": "x" * 5000}]}).encode()
    packed = gzip.compress(plain) if encoding == "gzip" else zstandard.compress(plain)
    answer = basin.call("POST", "/streams/s/records", packed, content_encoding=encoding)
    assert answer.status_code == 200
    found = basin.call("GET", "/streams/s/records?seq_num=0", accept_encoding=encoding)
    assert found.headers["content-encoding"] == encoding
    text = zstandard.ZstdDecompressor().decompressobj().decompress if encoding == "zstd" else bytes
    assert json.loads(text(found.content))["records"][0]["body"] == "x" * 5000


def test_a_stream_is_made_by_whoever_needs_it_where_the_basin_says_so(client: Client) -> None:
    client.create(create_stream_on_append=True, default_stream_config={"storage_class": "standard"})
    assert error_of(client.call("GET", "/streams/a/records/tail")) == (404, "stream_not_found")
    config = json.dumps({"retention_policy": {"age": 77}})
    made = client.call("POST", "/streams/a/records", {"records": [{}]}, s2_stream_config=config)
    assert made.status_code == 200
    found = client.call("GET", "/streams/a").json()
    assert (found["retention_policy"], found["storage_class"]) == ({"age": 77}, "standard")
    other = json.dumps({"retention_policy": {"age": 5}})  # it is there already: this says nothing
    client.call("POST", "/streams/a/records", {"records": [{}]}, s2_stream_config=other)
    assert client.call("GET", "/streams/a").json()["retention_policy"] == {"age": 77}
    client.call("PATCH", f"/basins/{client.basin}", {"create_stream_on_read": True})
    assert client.call("GET", "/streams/b/records/tail").json() == {"tail": {"seq_num": 0, "timestamp": 0}}
    assert client.call("GET", "/streams/c/records").status_code == 416


def test_a_wait_ends_with_the_first_record_or_with_its_time(basin: Client) -> None:
    basin.stream()
    assert basin.bodies("wait=1") == []
    reading = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], headers={'s2-basin': "
            "sys.argv[2]})).read().decode())",
            *(f"{basin.url}/v1/streams/s/records?seq_num=0&wait=60", basin.basin),
        ],
        stdout=subprocess.PIPE,
    )
    basin.append("late")
    found, _ = reading.communicate(timeout=60)
    assert json.loads(found)["records"][0]["body"] == "late"


# -- events


def events(basin: Client, query: str, **headers: str) -> list[tuple[str, str, Any]]:
    """(event, id, data) of a read as events, up to its end."""
    answer = basin.call("GET", f"/streams/s/records?{query}", accept="text/event-stream", **headers)
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    found: list[tuple[str, str, Any]] = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
        found.append((lines.get("event", ""), lines.get("id", ""), data))
    return found


def test_events_say_where_they_are_and_can_be_resumed(basin: Client) -> None:
    basin.stream()
    for body in "abcd":
        basin.append(body)
    (first, done) = events(basin, "seq_num=0&count=3")
    assert (first[0], first[1], done[2]) == ("batch", "2,3,27", "[DONE]")
    assert [record["body"] for record in first[2]["records"]] == ["a", "b", "c"]
    (rest, done) = events(basin, "seq_num=0&count=4", last_event_id="2,3,27")
    assert (rest[1], [record["seq_num"] for record in rest[2]["records"]]) == ("3,4,36", [3])
    assert rest[2]["tail"]["seq_num"] == 4
    assert [each[2] for each in events(basin, "seq_num=0&count=3", last_event_id="2,3,27")] == ["[DONE]"]
    (limited, _) = events(basin, "seq_num=0&bytes=20")
    assert limited[1] == "1,2,18"
    for bad in ("1", "1,2", "1,2,x"):
        answer = basin.call("GET", "/streams/s/records", accept="text/event-stream", last_event_id=bad)
        assert error_of(answer) == (400, "bad_header")


def test_events_at_the_end_of_a_stream_are_signs_of_life(basin: Client) -> None:
    basin.stream()
    basin.append("a")
    batch, ping, done = events(basin, "seq_num=0&wait=1")
    assert (batch[0], ping[0], done[2]) == ("batch", "ping", "[DONE]")
    assert ping[2]["tail"]["seq_num"] == 1 and ping[2]["timestamp"] > 0
    assert [each[2] for each in events(basin, "tail_offset=0&wait=0")] == ["[DONE]"]
    answer = basin.call("GET", "/streams/s/records?count=1", accept="text/event-stream")
    assert answer.status_code == 416


# -- browsers


@pytest.mark.parametrize("origin", ["http://localhost:5173", "http://127.0.0.1", "https://[::1]:8443"])
def test_pages_of_this_machine_may_use_a_server_without_keys(basin: Client, origin: str) -> None:
    asked = {
        "origin": origin,
        "access_control_request_method": "PATCH",
        "access_control_request_headers": "s2-basin, authorization",
    }
    preflight = basin.call("OPTIONS", "/streams/s/records", **asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-methods"] == "PATCH"
    assert preflight.headers["access-control-allow-headers"] == "s2-basin, authorization"
    for path in ("/basins", "/streams/missing"):
        answer = basin.call("GET", path, origin=origin)
        assert answer.headers["access-control-allow-origin"] == origin
        assert "s2-provision-result" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in basin.call("GET", "/basins").headers


def test_a_page_of_another_site_cannot_use_a_server_without_keys(basin: Client) -> None:
    """Whoever visits it would lend it their network; v0 §0.2 says the same of forms."""
    others = ["https://example.com", "http://localhost.example.com", "http://127.0.0.1.nip.io", "null"]
    for origin in [*others, "http://localhost:1@example.com", "https://example.com/http://localhost"]:
        for method in ("OPTIONS", "GET"):
            answer = basin.call(method, "/basins", origin=origin)
            assert not [name for name in answer.headers if name.startswith("access-control")], origin


# -- records under a key

KEY, OTHER_KEY = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


@pytest.mark.parametrize("cipher", ["aes-256-gcm", "aegis-256"])
def test_records_under_a_key_are_nowhere_to_be_read_without_it(
    client: Client, server: Server, cipher: str
) -> None:
    client.create(stream_cipher=cipher)
    client.stream()
    secret = f"a secret of {client.basin}"
    body = {
        "records": [{"headers": [["h", secret]], "body": secret}, {"headers": [["", "fence"]], "body": "t"}]
    }
    assert client.call("GET", "/streams").json()["streams"][0]["cipher"] == cipher
    for key in ("", "bad", base64.b64encode(b"short").decode()):
        headers = {"s2_encryption_key": key} if key else {}
        for answer in (
            client.call("POST", "/streams/s/records", body, **headers),
            client.call("GET", "/streams/s/records?seq_num=0", **headers),
        ):
            assert error_of(answer) == (400, "bad_header")
            assert cipher in answer.json()["message"]
    assert client.tail() == 0
    assert client.call("POST", "/streams/s/records", body, s2_encryption_key=KEY).status_code == 200
    found = client.call("GET", "/streams/s/records?seq_num=0", s2_encryption_key=KEY).json()["records"]
    assert (found[0]["body"], found[0]["headers"], found[1]["body"]) == (secret, [["h", secret]], "t")
    size = 8 + 2 + 1 + 2 * len(secret)
    one = client.call("GET", f"/streams/s/records?seq_num=0&bytes={size}", s2_encryption_key=KEY)
    assert len(one.json()["records"]) == 1  # metered as it is in the open
    wrong = client.call("GET", "/streams/s/records?seq_num=0", s2_encryption_key=OTHER_KEY)
    assert error_of(wrong) == (400, "decryption_failed")
    view = client.http.get(f"/v0/boxes/{client.basin}%2Fs/records/1").text
    assert '"sealed":true' in view and secret not in view
    stored = b"".join(path.read_bytes() for path in server.data_dir.rglob("*.wal"))
    assert client.basin.encode() in stored and secret.encode() not in stored


# -- as the rest of the server sees a stream


def test_a_stream_is_a_box_that_can_only_be_read(basin: Client) -> None:
    basin.stream(ODD)
    basin.append("hi", stream=quote(ODD, safe=""))
    name = f"{basin.basin}/{ODD}"
    path = "/v0/boxes/" + quote(name, safe="")
    listed = basin.http.get("/v0/boxes", params={"prefix": basin.basin}).json()["boxes"]
    assert [(box["box"], box["type"], box["head_seq"]) for box in listed] == [(name, "stream", 1)]
    state = basin.http.get(path).json()
    assert (state["type"], state["config"]["durable"]) == ("stream", True)
    diff = basin.http.post(f"{path}/diff", json={}).json()
    assert [(each["$seq"], base64.b64decode(each["data"])) for each in diff["records"]] == [(1, b"hi")]
    for refused in (
        basin.http.post(path, json={"records": [{"data": 1}]}),
        basin.http.put(path, json={}),
        basin.http.delete(path),
        basin.http.post(f"{path}/delete", json={"before_seq": 2}),
        basin.http.put(f"{path}/fence", json={"token": "x"}),
    ):
        assert refused.status_code == 400
        assert "only read here" in refused.json()["error"]["message"]
    assert basin.tail(quote(ODD, safe="")) == 1


def test_a_stream_can_be_watched_like_any_box(basin: Client) -> None:
    basin.stream()
    basin.append("hi")
    path = f"/v0/boxes/{basin.basin}%2Fs/watch?from_seq=0"
    with basin.http.stream("GET", path, headers={"accept": "text/event-stream"}) as answer:
        lines = answer.iter_lines()
        found = next(line for line in lines if line.startswith("data: ") and '"records"' in line)
        assert json.loads(found[6:])["records"][0]["data"] == base64.b64encode(b"hi").decode()
        basin.append("there")
        found = next(line for line in lines if line.startswith("data: ") and '"records"' in line)
        assert json.loads(found[6:])["records"][0]["data"] == base64.b64encode(b"there").decode()


def test_there_is_one_location_and_every_basin_is_in_it(client: Client) -> None:
    (here,) = client.call("GET", "/locations").json()
    assert (here["name"], here["is_private"]) == ("local", True)
    assert client.call("GET", "/locations/default").json() == here
    assert client.call("PUT", "/locations/default", "local").json() == here
    made = client.call("POST", "/basins", {"basin": client.basin, "location": "aws:us-east-1"})
    assert (made.status_code, made.json()["location"]) == (201, "local")


def test_metrics_are_of_now(basin: Client) -> None:
    for name in ("s", "s-and-more", "t"):
        basin.stream(name)
        basin.append("x" * 100, stream=name)
    now_s = int(time.time())

    def gauge(path: str, start: int, end: int) -> list[list[int]]:
        answer = basin.call("GET", f"/metrics/{basin.basin}{path}?set=storage&start={start}&end={end}")
        assert answer.status_code == 200, answer.text
        (value,) = answer.json()["values"]
        assert (value["gauge"]["name"], value["gauge"]["unit"]) == ("storage", "bytes")
        found: list[list[int]] = value["gauge"]["values"]
        return found

    ((_, one),) = gauge("/s", now_s - 60, now_s + 200)
    ((_, all_of_it),) = gauge("", now_s - 60, now_s + 200)
    assert one > 100 and all_of_it == 3 * one
    assert gauge("", now_s - 60, now_s - 50) == gauge("/s", now_s - 60, now_s - 50) == []
    account = basin.call("GET", f"/metrics?set=active-basins&start={now_s - 9}&end={now_s + 200}").json()
    assert basin.basin in account["values"][0]["label"]["values"]
