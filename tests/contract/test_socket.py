"""The WebSocket (§7.5): the same data plane as the HTTP calls, with every answer naming its request.

Method: a real socket through both fronts; what is published is read back over HTTP, and the other way round.
"""

import socket

import httpx2
import pytest

from tests.contract.conftest import COMBOS, Api
from tests.support.sockets import Closed, Refused, WebSocket


@pytest.fixture(params=["edge", "hypercorn"])
def api(request, fleet):
    combo = next(combo for combo in COMBOS if combo.front == request.param and combo.protocol == "h1")
    server = fleet(combo.front)
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


@pytest.fixture
def ws(api):
    with WebSocket(api.server.port) as opened:
        yield opened


def test_publish_behaves_like_append(api, ws, box):
    """§7.5, §3"""
    ack = ws.ask(
        {
            "op": "publish",
            "request_id": "p1",
            "box": box,
            "records": [{"data": 1, "tag": "t"}, {"data": 2}],
            "node": "n",
            "idempotency_key": "k",
            "config": {"cap_records": 5},
        }
    )
    assert (ack["op"], ack["request_id"], ack["box"]) == ("ack", "p1", box)
    assert (ack["first_seq"], ack["last_seq"], ack["seqs"], ack["created"]) == (1, 2, [1, 2], True)
    assert ack["performance"]["fsync_ms"] >= 0
    assert api.state(box)["config"]["cap_records"] == 5
    assert [record["$node"] for record in api.diff(box)["records"]] == ["n", "n"]
    again = ws.ask(
        {"op": "publish", "request_id": 7, "box": box, "records": [{"data": 1}], "idempotency_key": "k"}
    )
    assert (again["request_id"], again["deduped"], again["first_seq"]) == (7, True, 1)
    terse = ws.ask({"op": "publish", "box": box, "records": [{"data": 3}], "return_seqs": False})
    assert "seqs" not in terse and "request_id" not in terse and terse["last_seq"] == 3


def test_a_socket_agrees_to_no_compression(api):
    """A small compressed frame would become a large message that no memory budget has counted."""
    with socket.create_connection(("127.0.0.1", api.server.port), 60) as sock:
        lines = (
            "GET /v0/ws HTTP/1.1",
            f"Host: 127.0.0.1:{api.server.port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits",
        )
        sock.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 101 ") and b"sec-websocket-extensions" not in answer.lower()


def test_published_data_keeps_its_digits(api, ws, box):
    """§0.3"""
    numbers = "[1.0,1e400,12345678901234567890]"
    ws.send(f'{{"op":"publish","box":"{box}","records":[{{"data":{numbers}}}]}}')
    assert ws.receive()["op"] == "ack"
    assert api.raw_data(box) == [numbers]


def test_a_subscription_is_backlog_then_live(api, ws, box):
    """§7.5"""
    api.append(box, "a", "b")
    answer = ws.ask({"op": "subscribe", "request_id": "s1", "box": box, "from_seq": 1})
    assert answer == {
        "op": "subscribed",
        "request_id": "s1",
        "boxes": {box: {"from_seq": 1, "head_seq": 2, "earliest_seq": 1}},
    }
    backlog, caught_up = ws.receive(), ws.receive()
    assert (backlog["op"], backlog["request_id"], backlog["box"]) == ("record", "s1", box)
    assert ([r["data"] for r in backlog["records"]], backlog["to_seq"]) == (["b"], 2)
    assert caught_up == {"op": "caught_up", "request_id": "s1", "box": box, "head_seq": 2}
    api.append(box, "c")
    live = ws.receive()
    assert ([r["data"] for r in live["records"]], live["from_seq"], live["head_seq"]) == (["c"], 2, 3)


def test_one_socket_publishes_and_gets_what_others_publish(api, ws, box):
    """§7.5: node filtering as everywhere."""
    api.put(box)
    ws.ask({"op": "subscribe", "box": box, "tail": True, "node": "me"})
    ws.until("caught_up")
    assert ws.ask({"op": "publish", "box": box, "node": "me", "records": [{"data": "mine"}]})["op"] == "ack"
    with WebSocket(api.server.port) as other:
        other.ask({"op": "publish", "box": box, "node": "them", "records": [{"data": "theirs"}]})
    assert [record["data"] for record in ws.until("record")["records"]] == ["theirs"]


def test_loss_deletion_and_rebirth_are_told(api, ws, box):
    """§7.5, §7.2"""
    api.put(box, cap_records=1)
    api.append(box, 1)
    api.append(box, 2)
    ws.ask({"op": "subscribe", "request_id": "s", "boxes": {box: {}}})
    gap = ws.receive()
    assert (gap["op"], gap["reason"], gap["gap_from"], gap["gap_to"]) == (
        "tombstone",
        "from_seq_too_old",
        1,
        1,
    )
    ws.until("caught_up")
    api.drop(box)
    gone = ws.receive()
    assert gone == {"op": "box_deleted", "request_id": "s", "box": box, "head_seq": 2, "reason": "deleted"}
    api.append(box, "new")
    assert ws.receive()["reason"] == "recreated"
    assert ws.receive()["records"][0]["data"] == "new"


def test_unsubscribing_ends_one_box_and_not_the_others(api, ws, box):
    """§7.5"""
    one, two = f"{box}.1", f"{box}.2"
    api.append(one, 1)
    api.append(two, 1)
    ws.ask({"op": "subscribe", "request_id": "s", "boxes": {one: {"tail": True}, two: {"tail": True}}})
    ws.until("caught_up"), ws.until("caught_up")
    assert ws.ask({"op": "unsubscribe", "request_id": "u", "box": one}) == {
        "op": "ack",
        "request_id": "u",
        "boxes": [one],
    }
    api.append(one, "unheard")
    api.append(two, "heard")
    assert ws.receive()["records"][0]["data"] == "heard"
    again = ws.ask({"op": "subscribe", "box": one, "from_seq": 1})
    assert again["op"] == "subscribed"
    assert ws.until("record")["records"][0]["data"] == "unheard"


def test_a_ping_is_answered(ws):
    """§7.5"""
    assert ws.ask({"op": "ping", "request_id": "x"}) == {"op": "ack", "request_id": "x"}
    assert ws.ask({"op": "ping"}) == {"op": "ack"}
    ws.send_bytes(b'{"op":"ping"}')
    assert ws.receive() == {"op": "ack"}


@pytest.mark.parametrize(
    "message, code, mention",
    [
        ("nonsense", "invalid_request", "JSON"),
        ("[1]", "invalid_request", "object"),
        ('{"op":"pinG"}', "invalid_request", "op"),
        ('{"op":5}', "invalid_request", "op"),
        ("{}", "invalid_request", "op"),
        ('{"op":"ping","request_id":[1]}', "invalid_request", "request_id"),
        ('{"op":"subscribe","box":"no/box"}', "invalid_request", "box"),
        ('{"op":"subscribe","box":"missing.box"}', "box_not_found", "missing.box"),
        ('{"op":"subscribe","box":"a","boxes":{}}', "invalid_request", "box"),
        ('{"op":"subscribe","box":"missing.box","seq":1}', "box_not_found", "missing.box"),
        ('{"op":"subscribe"}', "invalid_request", "boxes"),
        ('{"op":"unsubscribe","box":"never"}', "invalid_request", "never"),
        ('{"op":"unsubscribe","boxes":"never"}', "invalid_request", "boxes"),
        ('{"op":"publish","records":[{"data":1}]}', "invalid_request", "box"),
        ('{"op":"publish","box":"a","records":[]}', "invalid_request", "records"),
        ('{"op":"publish","box":"a","record":[]}', "invalid_request", "record"),
        (
            '{"op":"publish","box":"a","records":[{"data":1}],"return_seqs":1}',
            "invalid_request",
            "return_seqs",
        ),
        ('{"op":"publish","box":"\\ud800","records":[{"data":1}]}', "invalid_request", ""),
        ('{"op":"publish","box":"new.b","create":false,"records":[{"data":1}]}', "box_not_found", "new.b"),
    ],
)
def test_a_bad_command_is_answered_and_the_socket_lives(ws, message, code, mention):
    """§7.5, §0.6"""
    answer = ws.ask(message)
    assert (answer["op"], answer["code"]) == ("error", code), answer
    assert mention in answer["message"]
    assert ws.ask({"op": "ping"}) == {"op": "ack"}


def test_an_error_names_its_request(ws):
    answer = ws.ask({"op": "publish", "request_id": "bad", "box": "a", "records": []})
    assert (answer["request_id"], answer["detail"]["field"]) == ("bad", "records")


def test_a_box_is_subscribed_once(api, ws, box):
    api.put(box)
    ws.ask({"op": "subscribe", "box": box})
    ws.until("caught_up")
    assert ws.ask({"op": "subscribe", "box": box})["code"] == "invalid_request"


def test_a_message_over_the_limit_closes_the_socket(ws):
    ws.send('{"op":"publish","x":"' + "x" * (3 * 1024 * 1024) + '"}')
    with pytest.raises(Closed) as closed:
        ws.receive()
    assert closed.value.code == 1009


def test_pages_of_other_sites_are_refused(api):
    """A browser asks nobody before it opens a socket to another site."""
    with pytest.raises(Refused) as refused:
        WebSocket(api.server.port, Origin="http://evil.example")
    assert (refused.value.status, refused.value.error["code"]) == (403, "forbidden")
    with WebSocket(api.server.port, Origin=f"http://127.0.0.1:{api.server.port}") as ws:
        assert ws.ask({"op": "ping"})["op"] == "ack"


def test_the_address_says_that_it_wants_a_socket(api):
    api.refused(api.send("GET", "/v0/ws"), 400, "invalid_request", "WebSocket")


def test_sockets_count_as_streams(fleet):
    """§12"""
    server = fleet("edge", max_watch_sessions=4, max_sse_connections=2)
    with WebSocket(server.port), WebSocket(server.port), pytest.raises(Refused) as refused:
        WebSocket(server.port)
    assert (refused.value.status, refused.value.error["detail"]["limit"]) == (429, "sse_connections")


def test_a_stopping_server_closes_its_sockets():
    from streams.testing import running_server

    with running_server(shards=1) as server, WebSocket(server.port) as ws:
        httpx2.post(f"{server.url}/v0/boxes/b", json={"records": [{"data": 1}]}, timeout=60)
        ws.ask({"op": "subscribe", "box": "b"})
        ws.until("caught_up")
        server.process.terminate()
        with pytest.raises(Closed):
            while True:
                ws.receive()
        ws.close()
        assert server.wait() == 0
