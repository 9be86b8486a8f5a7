"""What holds for every call (§0): content types, encodings, errors, `performance`, ids, unknown fields.

Method: each rule on every call it applies to; and one script run through all four ways in, whose answers
must be the same but for clocks.
"""

import gzip
import json
import re
import socket
import zlib

import h2.connection
import h2.events
import pytest
import zstandard

from tests.support.sockets import WebSocket

# method, path after /v0/boxes/{box}, a body that is accepted
BODY_CALLS = [
    ("PUT", "", {"cap_records": 100}),
    ("POST", "", {"records": [{"data": 1}]}),
    ("POST", "/diff", {"limit": 1}),
    ("POST", "/delete", {"before_seq": 1}),
    ("PUT", "/fence", {"token": ""}),
]
every_body_call = pytest.mark.parametrize(
    "method, tail, body", BODY_CALLS, ids=["put", "append", "diff", "delete", "fence"]
)


# -- the transport (§0.1) -------------------------------------------------------------------------------


def test_each_way_in_speaks_its_protocol(api):
    """§0.1: both on the same port."""
    response = api.send("GET", "/v0/health")
    assert response.http_version == {"h1": "HTTP/1.1", "h2c": "HTTP/2"}[api.combo.protocol]


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
def test_http2_is_reached_by_upgrade_too(fleet, front):
    """§0.1: an HTTP/1.1 request that asks for h2c is answered on stream 1 of an HTTP/2 connection."""
    port = fleet(front).port
    http2 = h2.connection.H2Connection()
    settings = http2.initiate_upgrade_connection()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"GET /v0/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: " + settings + b"\r\n\r\n"
        )
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65_536) or pytest.fail(f"closed after {received!r}")
        head, rest = received.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 101 ")
        connection.sendall(http2.data_to_send())
        status, body, ended = None, b"", False
        while not ended:
            for event in http2.receive_data(rest):
                if isinstance(event, h2.events.ResponseReceived):
                    status = {_text(name): _text(value) for name, value in event.headers}[":status"]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    ended = True
            connection.sendall(http2.data_to_send())
            if not ended:
                rest = connection.recv(65_536) or pytest.fail("closed before the stream ended")
    assert status == "200"
    assert json.loads(body)["status"] == "ok"


def _text(value):
    return value if isinstance(value, str) else value.decode()


def test_a_connection_serves_on_after_an_error(api, box):
    """§0.6: a refusal costs the client its request, not its connection."""
    with api.another() as other:
        for _ in range(3):
            other.refused(other.post(box, b"{"), 400, "invalid_request")
            other.refused(other.send("GET", f"/v0/boxes/{box}"), 404, "box_not_found")
            other.refused(other.send("GET", "/v0/nowhere"), 404, "not_found")
        assert other.append(box, 1)["seqs"] == [1]


@pytest.mark.parametrize("kilobytes", [16, 17, 64, 66, 80, 90, 100, 110, 130, 200, 500])
def test_a_body_of_any_size_may_come_first_on_a_connection(api, box, kilobytes):
    """§0.1: the client is still learning the server's HTTP/2 settings while it sends; whatever frame size it
    has been told by then, the server must take."""
    api.append(box, *["x" * 985] * kilobytes, params={"return_seqs": "false"})
    with api.another() as fresh:
        assert fresh.append(box, *["x" * 985] * kilobytes)["count"] == kilobytes


# -- content types (§0.2) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "application/json;charset=UTF-8",
     "Application/JSON",
     "application/vnd.api+json", "application/cloudevents+json; charset=utf-8"],
)  # fmt: skip
@every_body_call
@pytest.mark.exhaustive
def test_json_types_are_read_as_json(api, box, method, tail, body, content_type):
    """§0.2"""
    api.put(box)
    api.ok(api.send(method, f"/v0/boxes/{box}{tail}", body, content_type=content_type))


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/json", "application/xml", "multipart/form-data; boundary=x",
     "application/octet-stream",
     "application/jsonx", "application/x-json", "json", "text/plain; application/json"],
)  # fmt: skip
@every_body_call
@pytest.mark.exhaustive
def test_any_other_type_is_415_and_does_nothing(api, box, method, tail, body, content_type):
    """§0.2"""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send(method, f"/v0/boxes/{box}{tail}", body, content_type=content_type)
        api.refused(response, 415, "unsupported_media_type")


@every_body_call
def test_a_body_without_a_type_is_415(api, box, method, tail, body):
    """§0.2"""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send(method, f"/v0/boxes/{box}{tail}", body, content_type=None)
        assert "content-type" not in response.request.headers
        api.refused(response, 415, "unsupported_media_type")
        response = api.send(method, f"/v0/boxes/{box}{tail}", body, content_type="text/plain")
        api.refused(response, 415, "unsupported_media_type")


FORM = "application/x-www-form-urlencoded"


@every_body_call
def test_what_curl_sends_is_read_as_json(api, box, method, tail, body):
    """§0.2: `curl -d '{...}'` works as people type it."""
    api.put(box)
    headers = {"User-Agent": "curl/8.5.0", "Accept": "*/*"}
    api.ok(api.send(method, f"/v0/boxes/{box}{tail}", body, content_type=FORM, headers=headers))


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
     {"Sec-Fetch-Site": "same-origin"}, {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}],
    ids=json.dumps,
)  # fmt: skip
@every_body_call
@pytest.mark.exhaustive
def test_a_browser_form_is_refused_by_every_call(api, box, method, tail, body, headers):
    """§0.2: no cross-site writes."""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send(method, f"/v0/boxes/{box}{tail}", body, content_type=FORM, headers=headers)
        if headers == {"Sec-Fetch-Site": "same-origin"}:
            api.refused(response, 415, "unsupported_media_type")
        else:
            api.refused(response, 403, "forbidden", "origin")


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_browser_form_is_refused_through_every_front(api, box, header):
    """§0.2"""
    body = {"records": [{"data": 1}]}
    own = {"Origin": f"http://127.0.0.1:{api.server.port}", "Sec-Fetch-Site": "same-origin"}[header]
    response = api.post(box, body, content_type=FORM, headers={header: own})
    api.refused(response, 415, "unsupported_media_type")
    assert not api.exists(box)


def test_a_browser_that_sends_json_is_not_a_form(api, box):
    """§0.2: only the form type is the exception."""
    headers = {"Origin": "https://app.example", "Sec-Fetch-Site": "same-origin"}
    assert api.append(box, 1, headers=headers)["seqs"] == [1]


@pytest.mark.parametrize("content_type", [None, "application/json"])
@pytest.mark.parametrize("content", [None, b""], ids=["no body", "empty body"])
def test_an_empty_body_is_an_empty_object_where_every_field_is_optional(api, box, content, content_type):
    """§0.2"""
    headers = {"Content-Type": content_type} if content_type else {}

    def send(method, tail):
        return api.send(method, f"/v0/boxes/{box}{tail}", content, content_type=None, headers=headers)

    assert api.ok(send("PUT", ""), 201)["created"] is True
    assert api.ok(send("POST", "/diff"))["records"] == []
    api.refused(send("POST", ""), 400, "invalid_request", "records")
    api.refused(send("POST", "/delete"), 400, "invalid_request")
    api.refused(send("PUT", "/fence"), 400, "invalid_request", "token")


def test_whitespace_around_a_body_is_nothing(api, box):
    """§0.1"""
    assert api.ok(api.post(box, b' \r\n\t{"records":[{"data":1}]}\n\n '), 201)["seqs"] == [1]


# -- encodings (§0.2) -----------------------------------------------------------------------------------


def compressed(encoding, body):
    return {"gzip": gzip.compress, "zstd": zstandard.compress, "identity": bytes}[encoding](body)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity"])
@every_body_call
@pytest.mark.exhaustive
def test_a_compressed_request_is_read_by_every_call(api, box, method, tail, body, encoding):
    """§0.2"""
    api.put(box)
    content = compressed(encoding, json.dumps(body).encode())
    headers = {"Content-Encoding": encoding}
    api.ok(api.send(method, f"/v0/boxes/{box}{tail}", content, headers=headers))


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity"])
def test_a_compressed_request_is_read_through_every_front(api, box, encoding):
    """§0.2"""
    content = compressed(encoding, b'{"records":[{"data":"compressed"}]}')
    api.ok(api.post(box, content, headers={"Content-Encoding": encoding}), 201)
    assert api.data(box) == ["compressed"]


def test_zstd_without_a_content_size_in_its_frame_is_read(api, box):
    """§0.2: as a streaming compressor writes it."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    content = compressor.compress(b'{"records":[{"data":1}]}') + compressor.flush()
    assert api.ok(api.post(box, content, headers={"Content-Encoding": "zstd"}), 201)["seqs"] == [1]


def test_compressed_ndjson_is_read(api, box):
    """§0.2, §3"""
    content = gzip.compress(b'{"data":1}\n{"data":2}\n')
    headers = {"Content-Encoding": "gzip"}
    api.ok(api.post(box, content, content_type="application/x-ndjson", headers=headers), 201)
    assert api.data(box) == [1, 2]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_damaged_compressed_body_is_refused(api, box, encoding):
    """§0.6: the client's fault, and said so."""
    whole = compressed(encoding, json.dumps({"records": [{"data": "x" * 1000}]}).encode())
    for damaged in (b'{"records":[{"data":1}]}', whole[:-9], whole[: len(whole) // 2], b"\x00" + whole):
        response = api.post(box, damaged, headers={"Content-Encoding": encoding})
        api.refused(response, 400, "invalid_request")
    assert not api.exists(box)


def test_an_encoding_nobody_promised_is_refused(api, box):
    """§0.2: gzip and zstd."""
    body = b'{"records":[{"data":1}]}'
    for encoding, content in [
        ("br", body),
        ("compress", body),
        ("deflate", zlib.compress(body)),
        ("x", body),
    ]:
        response = api.post(box, content, headers={"Content-Encoding": encoding})
        api.refused(response, 415, "unsupported_media_type")
    assert not api.exists(box)


def raw_diff(api, box, accept_encoding):
    """The answer to a big read before anyone decoded it: (its Content-Encoding, its bytes)."""
    headers = {"Accept-Encoding": accept_encoding, "Content-Type": "application/json"}
    path = f"/v0/boxes/{box}/diff"
    with api.client.stream("POST", path, content=b'{"limit":1000}', headers=headers) as response:
        assert response.status_code == 200
        return response.headers.get("content-encoding"), b"".join(response.iter_raw())


def decoded(encoding, raw):
    if encoding == "gzip":
        return gzip.decompress(raw)
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    return raw


@pytest.mark.parametrize(
    "accepted, chosen",
    [("gzip", "gzip"), ("zstd", "zstd"), ("gzip;q=0", None), ("identity", None), ("br", None),
     ("gzip;q=0, zstd", "zstd"),
     ("zstd;q=0, gzip;q=0.5", "gzip"), ("br, gzip", "gzip")],
)  # fmt: skip
def test_a_large_answer_is_compressed_as_the_client_accepts(api, box, accepted, chosen):
    """§0.2"""
    for start in range(0, 300, 100):
        api.append(box, *[f"record number {number} " * 20 for number in range(start, start + 100)])
    encoding, raw = raw_diff(api, box, accepted)
    assert encoding == chosen or (chosen is None and encoding == "identity")
    answer = json.loads(decoded(encoding, raw))
    assert len(answer["records"]) == 300
    if chosen:
        assert len(raw) < 50_000


def test_an_answer_to_a_client_that_accepts_anything_can_be_decoded(api, box):
    """§0.2"""
    api.append(box, *["x" * 1000] * 50)
    for accepted in ("gzip, deflate, br, zstd", "*", "gzip;q=0.5, zstd;q=0.9", ""):
        encoding, raw = raw_diff(api, box, accepted)
        assert encoding in (None, "identity", "gzip", "zstd")
        assert len(json.loads(decoded(encoding, raw))["records"]) == 50


# -- errors (§0.6), performance (§0.7), request ids (§0.8) ----------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v0/nowhere", "/v0", "/v0/", "/v0/box/x", "/v0/boxes/x/nowhere", "/v0/boxes/x/records",
     "/v0/boxes/x/records/1/2", "/v0/healthy", "/nowhere"],
)  # fmt: skip
def test_an_unknown_route_is_404_not_found(api, path):
    """§0.6: for every method."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        api.refused(api.send(method, path), 404, "not_found")


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("PATCH", "/v0/boxes/x", {"GET", "PUT", "POST", "DELETE"}),
        ("DELETE", "/v0/boxes", {"GET"}),
        ("POST", "/v0/boxes", {"GET"}),
        ("GET", "/v0/boxes/x/diff", {"POST"}),
        ("PUT", "/v0/boxes/x/diff", {"POST"}),
        ("GET", "/v0/boxes/x/delete", {"POST"}),
        ("DELETE", "/v0/boxes/x/delete", {"POST"}),
        ("POST", "/v0/boxes/x/fence", {"PUT"}),
        ("POST", "/v0/boxes/x/tail", {"GET"}),
        ("DELETE", "/v0/boxes/x/records/1", {"GET"}),
    ],
)
def test_a_known_route_with_another_method_is_405_and_says_which_are_allowed(api, method, path, allowed):
    """§0.6"""
    response = api.send(method, path)
    api.refused(response, 405, "method_not_allowed")
    offered = {word.strip() for word in response.headers["allow"].split(",")}
    assert allowed <= offered
    assert offered - allowed <= {"HEAD", "OPTIONS"}


@pytest.mark.parametrize("tail", ["", "/tail", "/records/1"])
def test_head_is_get_without_the_body(api, box, tail):
    """§0.1"""
    absent = api.send("HEAD", f"/v0/boxes/{box}{tail}")
    assert (absent.status_code, absent.content) == (404, b"")
    api.append(box, 1)
    present = api.send("HEAD", f"/v0/boxes/{box}{tail}")
    assert (present.status_code, present.content) == (200, b"")
    assert present.headers["content-type"].split(";")[0] == "application/json"
    assert api.send("HEAD", "/v0/boxes").status_code == 200


def test_the_message_names_the_value_too(api, box):
    """§0.6: names the offending field and value."""
    api.refused(
        api.send("PUT", f"/v0/boxes/{box}", {"discard": "sideways"}),
        400,
        "invalid_request",
        "discard",
        "sideways",
    )
    api.refused(api.send("PUT", f"/v0/boxes/{box}", {"ttl_ms": -77}), 400, "invalid_request", "ttl_ms", "-77")


def test_every_code_of_the_table_in_one_place(api, box):
    """§0.6: what each front must be able to say (413 is in test_limits)."""
    one = {"records": [{"data": 1}]}
    api.refused(api.post(box, {}), 400, "invalid_request")
    api.refused(api.post(box, {"records": [{"data": 1}] * 10_001}), 400, "batch_too_large")
    api.refused(api.post(box, {"records": [{"data": "x" * 1_048_576}]}), 400, "record_too_large")
    api.refused(api.send("GET", f"/v0/boxes/{box}"), 404, "box_not_found")
    api.refused(api.send("GET", "/v0/nowhere"), 404, "not_found")
    api.refused(api.send("PATCH", f"/v0/boxes/{box}"), 405, "method_not_allowed")
    api.refused(api.post(box, one, content_type="text/plain"), 415, "unsupported_media_type")
    api.put(box, cap_records=1, discard="reject")
    api.refused(api.send("PUT", f"/v0/boxes/{box}", {"type": "queue"}), 409, "box_exists_incompatible")
    api.refused(api.post(box, {**one, "match_seq": 2}), 412, "seq_mismatch")
    api.append(box, 1)
    api.refused(api.send("DELETE", f"/v0/boxes/{box}", params={"if_empty": "true"}), 409, "box_not_empty")
    api.refused(api.post(box, one), 422, "box_full")
    api.fence(box, "t")
    api.refused(api.post(box, one), 412, "fencing_token_mismatch")


def test_every_answer_carries_its_performance(api, box):
    """§0.7 (`ok` asserts it; here that each call was asked, and the figures that apply)"""
    assert "server_total_ms" in api.put(box)["performance"]
    appended = api.append(box, 1, 2)["performance"]
    assert appended["server_total_ms"] >= 0
    assert appended.get("fsync_ms", 0) == 0
    read = api.diff(box)["performance"]
    assert read["records_scanned"] >= 2
    for answer in (
        api.state(box),
        api.boxes(prefix=box),
        api.tail(box),
        api.delete(box, before_seq=1),
        api.drop(box),
    ):
        assert "server_total_ms" in answer["performance"]


@pytest.mark.parametrize(
    "request_id", ["abc", "0", "req-1.2_3:4/5", "x" * 64, "7f8e9d4c-0000-4000-8000-000000000000"]
)
def test_a_request_id_is_echoed(api, box, request_id):
    """§0.8: on answers and on errors."""
    headers = {"X-Request-Id": request_id}
    for response in (
        api.send("GET", "/v0/health", headers=headers),
        api.post(box, {"records": [{"data": 1}]}, headers=headers),
        api.post(box, b"{", headers=headers),
        api.send("GET", f"/v0/boxes/{box}.absent", headers=headers),
        api.send("GET", "/v0/nowhere", headers=headers),
        api.send("PATCH", f"/v0/boxes/{box}", headers=headers),
        api.post(box, "x", content_type="text/plain", headers=headers),
    ):
        assert response.headers["x-request-id"] == request_id


def test_a_request_id_is_made_when_there_is_none(api, box):
    """§0.8: and never the same twice."""
    paths = ["/v0/health", "/v0/boxes", f"/v0/boxes/{box}", "/v0/nowhere"] * 5
    made = [api.send("GET", path).headers["x-request-id"] for path in paths]
    assert all(made)
    assert len(set(made)) == len(made)


# -- unknown fields (§0.9) ------------------------------------------------------------------------------


ONE = [{"data": 1}]


@pytest.mark.parametrize(
    "typo, method, tail, body",
    [
        ("tll_ms", "PUT", "", {"tll_ms": 1}),
        ("Cap_Bytes", "PUT", "", {"cap_records": 5, "Cap_Bytes": 5}),
        ("config", "PUT", "", {"config": {"ttl_ms": 5}}),
        ("cappedd", "PUT", "", {"timestamping": {"mode": "arrival", "cappedd": True}}),
        ("recrods", "POST", "", {"records": ONE, "recrods": []}),
        ("fencing_tokne", "POST", "", {"records": ONE, "fencing_tokne": "x"}),
        ("match_sqe", "POST", "", {"records": ONE, "match_sqe": 9}),
        ("return_seqs", "POST", "", {"records": ONE, "return_seqs": "no"}),
        ("tga", "POST", "", {"records": [{"data": 1, "tga": "t"}]}),
        ("$tag", "POST", "", {"records": [{"data": 1}, {"data": 1, "$tag": "t"}]}),
        ("$seq", "POST", "", {"records": [{"data": 1, "$seq": 7}]}),
        ("tll_ms", "POST", "", {"records": ONE, "config": {"tll_ms": 1}}),
        ("mod", "POST", "", {"records": ONE, "config": {"timestamping": {"mod": "arrival"}}}),
        ("befor_seq", "POST", "/delete", {"befor_seq": 1}),
        ("mtach", "POST", "/delete", {"before_seq": 1, "mtach": "x"}),
        ("limit", "POST", "/delete", {"before_seq": 1, "limit": 5}),
        ("tokne", "PUT", "/fence", {"tokne": "x"}),
        ("if_tokne", "PUT", "/fence", {"token": "x", "if_tokne": "x"}),
    ],
    ids=lambda value: json.dumps(value),
)
def test_a_write_with_an_unknown_field_is_refused_by_name_and_nothing_happens(
    api, box, typo, method, tail, body
):
    """§0.9, §20: a typo never turns a condition into none."""
    api.append(box, 1)
    with api.unchanged(box):
        api.refused(api.send(method, f"/v0/boxes/{box}{tail}", body), 400, "invalid_request", typo)


def test_an_append_takes_return_seqs_in_its_body(api, box):
    """§20: as in the query; the body counts."""
    assert api.append(box, 1, return_seqs=True)["seqs"] == [1]
    assert "seqs" not in api.append(box, 2, return_seqs=False)
    assert api.append(box, 3, return_seqs=True, params={"return_seqs": "false"})["seqs"] == [3]
    assert api.append(box, 4, return_seqs=None)["seqs"] == [4]
    with WebSocket(api.server.port) as ws:
        record = {"op": "publish", "box": box, "records": ONE}
        assert "seqs" not in ws.ask(record | {"return_seqs": False})
        assert ws.ask(record | {"return_seqs": True})["seqs"] == [6]


STRICT = {"Prefer": "respond-async, handling=strict"}


def test_a_read_reports_an_unknown_field_and_goes_on(api, box):
    """§20"""
    api.put(box, type="queue")
    api.append(box, 1, 2)
    found = api.diff(box, form_seq=1, limit=1)
    assert [record["$seq"] for record in found["records"]] == [1]
    assert found["warnings"] == ["unknown field 'form_seq' was ignored"]
    claimed = api.claim(box, max=1, leese_ms=5, wait_ms=0)
    assert (claimed["count"], claimed["warnings"]) == (1, ["unknown field 'leese_ms' was ignored"])
    watched = api.watch({box: {}}, limits=5)
    assert watched["warnings"] == ["unknown field 'limits' was ignored"] and watched["wid"]
    for answer in (api.diff(box), api.claim(box), api.watch({box: {}})):
        assert "warnings" not in answer
    names = api.diff(box, **{"\n" * 100: 1}, **{f"x{number}": 1 for number in range(20)})["warnings"]
    assert len(names) == 8 and all("\n" not in name and len(name) <= 200 for name in names)


def test_a_read_is_strict_for_a_client_that_asks_for_it(api, box):
    """§20, RFC 7240"""
    api.put(box, type="queue")
    watch = {"boxes": {box: {}}, "limits": 5}
    for path, body in ((f"/v0/boxes/{box}/diff", {"form_seq": 1}), ("/v0/watch", watch)):
        typo = next(name for name in body if name in ("form_seq", "limits"))
        api.refused(api.send("POST", path, body, headers=STRICT), 400, "invalid_request", typo)
    claim = {"node": "w", "leese_ms": 5}
    refused = api.send("POST", f"/v0/boxes/{box}/claim", claim, headers={"Prefer": 'Handling="strict"'})
    api.refused(refused, 400, "invalid_request", "leese_ms")
    for other in ("handling=lenient", "handling=strictly", "return=minimal"):
        answer = api.send("POST", f"/v0/boxes/{box}/diff", {"form_seq": 1}, headers={"Prefer": other})
        assert api.ok(answer)["warnings"]


def test_what_is_wrong_besides_an_unknown_field_is_not_passed_over(api, box):
    """§20: top-level fields alone are tolerated."""
    api.put(box, type="queue")
    for path, body, named in (
        (f"/v0/boxes/{box}/diff", {"form_seq": 1, "limit": -1}, "limit"),
        (f"/v0/boxes/{box}/claim", {"nod": "w"}, "node"),
        ("/v0/watch", {"boxes": {box: {"form_seq": 1}}}, "form_seq"),
    ):
        api.refused(api.send("POST", path, body), 400, "invalid_request", named)


def test_a_subscription_reports_unknown_fields_unless_its_socket_is_strict(api, box):
    """§20"""
    api.append(box, 1)
    command = {"op": "subscribe", "box": box, "form_seq": 1}
    with WebSocket(api.server.port) as ws:
        assert ws.ask(command)["warnings"] == ["unknown field 'form_seq' was ignored"]
    with WebSocket(api.server.port, Prefer="handling=strict") as ws:
        refused = ws.ask(command)
        assert (refused["op"], refused["code"]) == ("error", "invalid_request")


@pytest.mark.parametrize("action", ["claim", "ack", "nack", "extend"])
def test_the_kind_of_the_box_is_checked_before_the_fields(api, box, action):
    """§20: authentication, names, existence, kind, fields."""
    path = f"/v0/boxes/{box}/{action}"
    for body in ({"nonsense": 1}, "not JSON", {"node": 7}):
        api.refused(api.send("POST", path, body), 404, "box_not_found")
    api.append(box, 1)
    for body in ({"nonsense": 1}, "not JSON", {"node": 7}):
        api.refused(api.send("POST", path, body), 409, "not_a_queue")
    api.refused(
        api.send("POST", f"/v0/boxes/-{box}/{action}", {"nonsense": 1}), 400, "invalid_request", "box"
    )


def test_the_box_is_looked_for_before_the_fields(api, box):
    """§20"""
    other = f"{box}.dead"
    calls = [
        ("POST", f"{box}/diff", {"limit": -1}, 404, 400),
        ("POST", f"{box}/delete", {"befor_seq": 1}, 404, 400),
        ("PUT", f"{box}/fence", {"tokne": 1}, 404, 400),
        ("PUT", f"{box}/groups/g", {"curser": 1}, 404, 400),
        ("GET", f"{box}?tuoch=1", None, 404, 400),
        ("GET", f"{box}/tail?tuoch=1", None, 404, 400),
        ("POST", f"{box}/requeue", {"form": other}, 404, 409),
    ]
    for method, path, body, missing, _ in calls:
        answer = api.send(method, f"/v0/boxes/{path}", body)
        assert answer.status_code == missing, (path, answer.text)
    api.append(box, 1)
    for method, path, body, _, found in calls:
        answer = api.send(method, f"/v0/boxes/{path}", body)
        assert answer.status_code == found, (path, answer.text)
    with api.client.stream("GET", f"/v0/boxes/{box}/work?nod=w") as answer:
        assert answer.status_code == 409
    api.refused(api.send("PUT", f"/v0/boxes/{box}x/groups/-", {"curser": 1}), 400, "invalid_request", "group")


@pytest.mark.parametrize(
    "body",
    [
        {"records": [{"data": 1}], "recrods": []},
        {"records": [{"data": 1, "tga": "t"}]},
        {"records": [{"data": 1}], "config": {"tll_ms": 1}},
    ],
    ids=json.dumps,
)
def test_a_write_with_an_unknown_field_creates_no_box(api, box, body):
    """§0.9"""
    api.refused(api.post(box, body), 400, "invalid_request")
    assert not api.exists(box)


@pytest.mark.parametrize(
    "method, tail, body",
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "", {"records": [{"data": 1}]}),
    ],
)
def test_an_unknown_query_parameter_is_refused_by_name(api, box, method, tail, body):
    """§0.9: a field of a request is a field wherever it stands."""
    api.append(box, 1)
    with api.unchanged(box):
        response = api.send(method, f"/v0/boxes/{box}{tail}", body, params={"tuoch": "false"})
        api.refused(response, 400, "invalid_request", "tuoch")
    api.refused(api.send("GET", "/v0/boxes", params={"pagesize": "5"}), 400, "invalid_request", "pagesize")


# -- the same answers from every front ------------------------------------------------------------------

SCRIPT = [
    ("PUT", "{box}", {"cap_records": 3}),
    ("PUT", "{box}", {"ttl_ms": 0}),
    ("PUT", "{box}", {"ttl_ms": -1}),
    ("PUT", "{box}", {"nope": 1}),
    ("PUT", "{box}", {"type": "queue"}),
    (
        "POST",
        "{box}",
        {"records": [{"data": 1, "tag": "a"}, {"data": [1.0, "é"], "node": "n", "meta": {"k": 1}}]},
    ),
    ("POST", "{box}?return_seqs=false", {"records": [{"data": 2}, {"data": 3}], "idempotency_key": "k"}),
    ("POST", "{box}", {"records": [{"data": 2}], "idempotency_key": "k"}),
    ("POST", "{box}", {"records": [{"data": 4}], "match_seq": 1}),
    ("POST", "{box}", {"records": []}),
    ("POST", "{box}", {"records": [{"data": n} for n in range(4)]}),
    ("POST", "{box}", b"{"),
    ("POST", "{box}/diff", {}),
    ("POST", "{box}/diff", {"from_seq": 2, "limit": 1, "include_tags": True}),
    ("POST", "{box}/diff", {"from_seq": 99}),
    ("POST", "{box}/diff", {"from_seq": "x"}),
    ("PUT", "{box}/fence", {"token": "t"}),
    ("POST", "{box}", {"records": [{"data": 5}]}),
    ("PUT", "{box}/fence", {"token": ""}),
    ("GET", "{box}?touch=false", None),
    ("GET", "{box}/records/3", None),
    ("GET", "{box}/records/1", None),
    ("GET", "{box}/tail", None),
    ("POST", "{box}/delete", {"match": "a"}),
    ("POST", "{box}/delete", {"before_seq": 4}),
    ("POST", "{box}/delete", {}),
    ("DELETE", "{box}?if_empty=true", None),
    ("PATCH", "{box}", None),
    ("GET", "{box}/nowhere", None),
    ("DELETE", "{box}", None),
    ("DELETE", "{box}", None),
    ("GET", "{box}", None),
    ("GET", "bad%20name", None),
]

VOLATILE = {
    "performance",
    "generation",
    "$ts",
    "last_ts",
    "last_write_ts",
    "last_read_ts",
    "effective_priority",
}


def settled(value):
    """The answer without what may differ from run to run."""
    if isinstance(value, dict):
        return {key: settled(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [settled(item) for item in value]
    return value


def test_every_front_and_protocol_gives_the_same_answers(every_api, box):
    """§0.1: one contract, whichever way in."""
    transcripts = []
    for number, api in enumerate(every_api):
        transcript = []
        for method, path, body in SCRIPT:
            response = api.send(method, "/v0/boxes/" + path.format(box=f"{box}.{number}"), body)
            answer = json.loads(response.text.replace(f"{box}.{number}", "BOX"))
            headers = {name: response.headers.get(name) for name in ("content-type", "allow", "retry-after")}
            transcript.append((method, path, response.status_code, headers, settled(answer)))
        transcripts.append(transcript)
    for transcript in transcripts[1:]:
        assert transcript == transcripts[0]


def test_answers_say_they_are_json_in_utf8(api, box):
    """§0.1"""
    for response in (api.send("GET", "/v0/health"), api.send("GET", f"/v0/boxes/{box}")):
        assert re.fullmatch(
            r"application/json(; ?charset=utf-8)?", response.headers["content-type"], re.IGNORECASE
        )
