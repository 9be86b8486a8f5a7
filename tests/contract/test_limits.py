"""The limits of a write (§3) and of a body (§0.2): the last size that fits, the first that does not.

Method: the defaults on the ordinary server where that is cheap; the rest on servers started with small limits
(`SMALL_LIMITS` in conftest): 64 KiB a body, 20 records a write, 4 KiB a record, 512 bytes of meta, tags of 16
and nodes of 8 bytes.
"""

import gzip
import json

import pytest
import zstandard

from tests.contract.conftest import COMBOS, Api

BODY, BATCH, RECORD, META, TAG, NODE = 65_536, 20, 4096, 512, 16, 8


def padded(size):
    """An append of exactly `size` bytes that is otherwise small (whitespace weighs nothing in a record)."""
    body = b'{"records":[{"data":1}]}'
    return body + b" " * (size - len(body))


def text_of(size):
    """A JSON string that is `size` bytes long with its quotes."""
    return '"' + "x" * (size - 2) + '"'


# -- the body -------------------------------------------------------------------------------------------


def test_a_body_of_exactly_the_limit_fits(limited, box):
    """§3"""
    assert limited.ok(limited.post(box, padded(BODY)), 201)["seqs"] == [1]


def test_a_body_over_the_limit_is_413_and_writes_nothing(limited, box):
    """§0.6 payload_too_large"""
    limited.refused(limited.post(box, padded(BODY + 1)), 413, "payload_too_large")
    assert not limited.exists(box)


def test_size_is_decided_before_parsing(limited, box):
    """§0.6: what is too large is not even looked at."""
    limited.refused(limited.post(box, b"\xff" * (BODY + 1)), 413, "payload_too_large")


@pytest.mark.parametrize(
    "tail, method", [("", "PUT"), ("/diff", "POST"), ("/delete", "POST"), ("/fence", "PUT")]
)
def test_every_call_with_a_body_has_the_limit(limited, box, tail, method):
    """§3"""
    limited.put(box)
    body = b"{}" + b" " * (BODY - 1)
    limited.refused(limited.send(method, f"/v0/boxes/{box}{tail}", body), 413, "payload_too_large")


def chunks(body, size=4000):
    return (body[at : at + size] for at in range(0, len(body), size))


def test_a_body_of_unannounced_length_is_counted_as_it_comes(limited, box):
    """§0.2: chunked on HTTP/1.1, no content-length on HTTP/2."""
    assert limited.ok(limited.post(box, chunks(padded(BODY))), 201)["seqs"] == [1]
    limited.refused(limited.post(box, chunks(padded(BODY + 1))), 413, "payload_too_large")
    assert limited.state(box)["head_seq"] == 1


def compressed(encoding, body):
    return gzip.compress(body) if encoding == "gzip" else zstandard.compress(body)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_the_limit_is_on_the_body_after_decompression(limited, box, encoding):
    """§0.2"""
    headers = {"Content-Encoding": encoding}
    fits = compressed(encoding, padded(BODY))
    assert limited.ok(limited.post(box, fits, headers=headers), 201)["seqs"] == [1]
    over = compressed(encoding, padded(BODY + 1))
    assert len(over) < 1000
    limited.refused(limited.post(box, over, headers=headers), 413, "payload_too_large")
    assert limited.state(box)["head_seq"] == 1


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_413_and_the_server_lives(limited, box, encoding):
    """§0.2: thirty megabytes in thirty kilobytes."""
    bomb = compressed(encoding, b" " * 30_000_000)
    assert len(bomb) < BODY
    limited.refused(limited.post(box, bomb, headers={"Content-Encoding": encoding}), 413, "payload_too_large")
    assert limited.append(box, 1)["seqs"] == [1]


def test_the_default_limit_of_a_body_holds_against_a_bomb(api, box):
    """§3: 64 MiB."""
    bomb = zstandard.compress(b" " * (64 * 1_048_576 + 1))
    api.refused(api.post(box, bomb, headers={"Content-Encoding": "zstd"}), 413, "payload_too_large")
    assert not api.exists(box)


def test_a_large_body_under_the_default_limit_is_fine(api, box):
    """§3"""
    api.put(box, durability="memory")
    assert api.append(box, *["x" * 100_000] * 20, params={"return_seqs": "false"})["last_seq"] == 20


# -- records per write ----------------------------------------------------------------------------------


def test_a_batch_of_exactly_the_limit_fits_and_one_more_does_not(limited, box):
    """§3 batch_too_large"""
    assert limited.append(box, *range(BATCH))["count"] == BATCH
    with limited.unchanged(box):
        body = {"records": [{"data": n} for n in range(BATCH + 1)]}
        limited.refused(limited.post(box, body), 400, "batch_too_large")


def test_ndjson_has_the_same_limit(limited, box):
    """§3"""
    lines = '{"data":1}\n' * BATCH
    assert limited.ok(limited.post(box, lines, content_type="application/x-ndjson"), 201)["count"] == BATCH
    response = limited.post(box, lines + '{"data":1}', content_type="application/x-ndjson")
    limited.refused(response, 400, "batch_too_large")


def test_ten_thousand_records_is_the_default_limit(api, box):
    """§3"""
    api.put(box, durability="memory")
    answer = api.append(box, *range(10_000))
    assert (answer["count"], answer["last_seq"], len(answer["seqs"])) == (10_000, 10_000, 10_000)
    response = api.post(box, {"records": [{"data": 0}] * 10_001})
    api.refused(response, 400, "batch_too_large")
    assert api.state(box)["head_seq"] == 10_000


# -- one record -----------------------------------------------------------------------------------------


def test_data_of_exactly_the_limit_fits_and_one_byte_more_does_not(limited, box):
    """§3 record_too_large"""
    limited.ok(limited.post(box, f'{{"records":[{{"data":{text_of(RECORD)}}}]}}'), 201)
    with limited.unchanged(box):
        response = limited.post(box, f'{{"records":[{{"data":1}},{{"data":{text_of(RECORD + 1)}}}]}}')
        limited.refused(response, 400, "record_too_large")


def test_data_is_measured_in_bytes_of_utf8(limited, box):
    """§3"""
    fits = '"' + "é" * ((RECORD - 2) // 2) + '"'
    limited.ok(limited.post(box, f'{{"records":[{{"data":{fits}}}]}}'), 201)
    over = '"' + "é" * (RECORD // 2) + '"'
    limited.refused(limited.post(box, f'{{"records":[{{"data":{over}}}]}}'), 400, "record_too_large")


def test_data_and_meta_count_together(limited, box):
    """§3"""
    meta = '{"k":"' + "m" * 92 + '"}'
    fits = f'{{"records":[{{"data":{text_of(RECORD - len(meta))},"meta":{meta}}}]}}'
    limited.ok(limited.post(box, fits), 201)
    over = f'{{"records":[{{"data":{text_of(RECORD - len(meta) + 1)},"meta":{meta}}}]}}'
    limited.refused(limited.post(box, over), 400, "record_too_large")
    assert limited.state(box)["head_seq"] == 1


def test_one_mebibyte_is_the_default_limit_of_a_record(api, box):
    """§3"""
    api.ok(api.post(box, f'{{"records":[{{"data":{text_of(1_048_576)}}}]}}'), 201)
    response = api.post(box, f'{{"records":[{{"data":{text_of(1_048_577)}}}]}}')
    api.refused(response, 400, "record_too_large")
    assert api.state(box)["head_seq"] == 1


# -- meta, tag, node ------------------------------------------------------------------------------------


def meta_of(size):
    return {"k": "m" * (size - len('{"k":""}'))}


@pytest.mark.parametrize("server, size", [("limited", META), ("api", 16 * 1024)])
def test_meta_of_exactly_the_limit_fits_and_one_byte_more_does_not(request, box, server, size, combo):
    """§3 (Whether too much meta is invalid_request or record_too_large is not said.)"""
    api = request.getfixturevalue(server)

    def body(size):
        return json.dumps({"records": [{"data": 1, "meta": meta_of(size)}]}, separators=(",", ":"))

    api.ok(api.post(box, body(size)), 201)
    response = api.post(box, body(size + 1))
    code = json.loads(response.text)["error"]["code"]
    assert code in ("invalid_request", "record_too_large")
    api.refused(response, 400, code, "meta")
    assert api.state(box)["head_seq"] == 1


def test_meta_has_at_most_64_keys(api, box):
    """§3: of its own; what is inside a value is the value's business."""
    api.append(box, records=[{"data": 1, "meta": {f"k{n}": n for n in range(64)}}])
    response = api.post(box, {"records": [{"data": 1, "meta": {f"k{n}": n for n in range(65)}}]})
    api.refused(response, 400, "invalid_request", "meta")
    api.append(box, records=[{"data": 1, "meta": {"one": {f"k{n}": n for n in range(100)}}}])
    assert api.state(box)["head_seq"] == 2


@pytest.mark.parametrize("member, server, size", [
    ("tag", "api", 256), ("node", "api", 128), ("tag", "limited", TAG), ("node", "limited", NODE),
])  # fmt: skip
def test_a_tag_and_a_node_are_limited_in_bytes(request, box, member, server, size, combo):
    """§3: bytes, not characters."""
    api = request.getfixturevalue(server)
    for fits in ("x" * size, "é" * (size // 2), "😀" * (size // 4)):
        api.append(box, records=[{"data": 1, member: fits}])
    for over in ("x" * (size + 1), "é" * (size // 2) + "x", "😀" * (size // 4 + 1)):
        response = api.post(box, {"records": [{"data": 1, member: over}]})
        api.refused(response, 400, "invalid_request", member)
    assert api.state(box)["head_seq"] == 3


def test_the_default_node_of_a_write_has_the_same_limit(limited, box):
    """§3"""
    limited.append(box, 1, node="n" * NODE)
    response = limited.post(box, {"records": [{"data": 1}], "node": "n" * (NODE + 1)})
    limited.refused(response, 400, "invalid_request", "node")
    assert limited.state(box)["head_seq"] == 1


# -- how many there may be (§12); routers, sessions, streams and bytes have theirs where they are tested


def test_too_many_boxes_are_throttled_and_a_known_one_is_not(fleet, box):
    """§12: re-PUT of something that exists always works, and a refused request changes nothing."""
    server = fleet("edge", max_boxes=4)
    with COMBOS[0].client(server.url) as client:
        api = Api(client, server, COMBOS[0])
        made, refused = [], None
        for number in range(40):  # each shard has its share of the limit
            name = f"{box}.{number}"
            if api.send("PUT", f"/v0/boxes/{name}", {}).status_code == 201:
                made.append(name)
            else:
                refused = name
        assert len(made) == 4 and refused is not None
        body = {"records": [{"data": 1}]}
        for method in ("PUT", "POST"):
            response = api.send(method, f"/v0/boxes/{refused}", {} if method == "PUT" else body)
            assert api.refused(response, 429, "throttled")["detail"]["limit"] == "boxes"
            assert int(response.headers["retry-after"]) >= 1
        assert not api.exists(refused)
        for name in made:
            assert api.send("PUT", f"/v0/boxes/{name}", {"cap_records": 9}).status_code == 200
            assert api.send("POST", f"/v0/boxes/{name}", body).status_code == 200
            assert api.send("DELETE", f"/v0/boxes/{name}").status_code == 200
        assert api.send("POST", f"/v0/boxes/{refused}", body).status_code == 201
