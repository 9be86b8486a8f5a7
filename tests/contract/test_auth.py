"""Keys (§11): every address of the server, against every set of scopes, with names inside and outside the
key's prefixes, in the path and in the body.

Method: the addresses are those that a gateway answers (`Api.routes`), and what is expected of each is its
rule in `access/rules.py`, held against the contract's own table below. A new address without a rule stops
the gateway of these tests from starting; one with a rule the contract does not know fails here. A request
is refused before it is understood, so most are sent with an empty body: whatever else is wrong with them, it
must not be 401 or 403 for a key that suffices.
"""

import contextlib
import functools
import json
import socket
from pathlib import Path

import pytest
import trio

from gateway.access.rules import RULES, route_of
from gateway.api.routes import Api as GatewayApi
from gateway.s2.endpoints import S2
from gateway.shards.dispatch import Dispatch
from gateway.shards.placement import even
from gateway.telemetry.collector import Collector
from gateway.watch.service import Watch
from streams.protocol.access.grants import ADMIN, ALL, DELETE, READ, SCOPES, WRITE, words
from tests.contract.conftest import COMBOS, Api
from tests.support.crashing import eventually
from tests.support.sockets import Refused, WebSocket

SUBSETS = range(1, ALL + 1)
IN, ALSO_IN, OUT = "in.x", "also:in", "out.x"


def secret(scopes, *, confined=False):
    return f"secret-of-{scopes}-{'confined' if confined else 'free'}-0123456789"


KEYS = ",".join(
    [f"{secret(scopes)}:{'+'.join(words(scopes))}" for scopes in SUBSETS]
    + [f"{secret(scopes, confined=True)}:{'+'.join(words(scopes))}:in.|also:" for scopes in SUBSETS]
)
FREE, CONFINED = secret(ALL), secret(ALL, confined=True)

#: §11, as it stands there, with what the contract leaves open: requeue is a claim and an append in one, an
#: append that trims deletes records, the map of shards and the socket take any key.
CONTRACT = {
    READ: """
        GET /v0/boxes/{box}                 GET /v0/boxes/{box}/tail        GET /v0/boxes/{box}/records/{seq}
        GET /v0/boxes/{box}/groups          GET /v0/boxes/{box}/groups/{group}
        GET /v0/boxes/{box}/watch           GET /v0/boxes                   GET /v0/routers
        GET /v0/routers/{router}            POST /v0/boxes/{box}/diff       POST /v0/watch
        GET /v0/watch/{wid}                 GET /v0/metrics                 GET /metrics
        GET /v0/status                      GET /v0/history                 GET /v0/schedules
        GET /v0/schedules/{schedule}        GET /v0/boxes/{box}/leases
    """,
    WRITE: """
        POST /v0/boxes/{box}                POST /v0/boxes/{box}/ack        POST /v0/boxes/{box}/nack
        POST /v0/boxes/{box}/extend         PUT /v0/boxes/{box}/groups/{group}
        PUT /v0/boxes/{box}/fence           POST /v0/boxes/{box}/reschedule
        POST /v0/boxes/{box}/reprioritize
    """,
    READ | WRITE: """
        POST /v0/boxes/{box}/claim          GET /v0/boxes/{box}/work        POST /v0/boxes/{box}/requeue
    """,
    DELETE: """
        DELETE /v0/boxes/{box}              DELETE /v0/routers/{router}
        DELETE /v0/boxes/{box}/groups/{group}                               POST /v0/boxes/{box}/delete
    """,
    ADMIN: """
        PUT /v0/boxes/{box}                 PUT /v0/routers/{router}
        POST /v0/boxes/{box}/pause          POST /v0/boxes/{box}/resume
        PUT /v0/schedules/{schedule}        DELETE /v0/schedules/{schedule}
        POST /v0/schedules/{schedule}/run   GET /v0/settings
    """,
    0: """
        GET /v0/ws                          GET /v0/placement               GET /v0/whoami
    """,
    None: """
        GET /v0/health      GET /health     GET /healthz    GET /ping       GET /v0/ready   GET /readyz
        GET /v0/openapi.json                GET /docs       GET /           GET /console/{file}
        GET /docs/guide/{file}
    """,
}
SCOPES_OF = {
    f"{method} {path}": scopes
    for scopes, text in CONTRACT.items()
    for method, path in zip(text.split()[::2], text.split()[1::2], strict=True)
}

#: A good body for each address whose body names boxes; `BOX` is replaced by the name under test.
BODIES = {
    ("PUT /v0/boxes/{box}", "dead_letter"): {"type": "queue", "dead_letter": "BOX"},
    ("POST /v0/boxes/{box}", "config.dead_letter"): {
        "records": [{"data": 1}],
        "config": {"type": "queue", "dead_letter": "BOX"},
    },
    ("POST /v0/boxes/{box}/requeue", "from"): {"from": "BOX"},
    ("POST /v0/boxes/{box}/ack", "outputs"): {
        "node": "w",
        "seqs": [1],
        "idempotency_key": "k",
        "outputs": {"BOX": {"records": [{"data": 1}]}},
    },
    ("PUT /v0/routers/{router}", "source"): {"source": "BOX", "dest": "in.other"},
    ("PUT /v0/routers/{router}", "dest"): {"source": "in.other", "dest": "BOX"},
    ("PUT /v0/schedules/{schedule}", "box"): {"box": "BOX", "record": {"data": 1}, "cron": "@daily"},
    ("POST /v0/watch", "boxes.*"): {"boxes": {"in.other": {}, "BOX": {}}},
}


@functools.cache
def routes():
    dispatch, draining = Dispatch(even(1), []), trio.Event()
    watch = Watch(dispatch, connections_max=0, node_bytes_max=128)
    collector = Collector(
        dispatch,
        here=lambda: pytest.fail("nobody is asked"),
        others=[],
        version="",
        data_dir=Path("."),
        rows_max=0,
    )
    return GatewayApi(
        dispatch,
        body_bytes_max=1,
        version="",
        sockets=(),
        draining=draining,
        watch=watch,
        collector=collector,
        s2=S2(dispatch, draining, drain_s=0, watch=watch),
    ).routes


def address(route, name=IN):
    method, _, template = route.partition(" ")
    for parameter in ("box", "router", "schedule"):
        template = template.replace(f"{{{parameter}}}", name)
    return method, template.replace("{seq}", "1").replace("{group}", "g").replace(
        "{wid}", "wid_none"
    ).replace("{file}", "app.js")


@pytest.fixture
def locked(fleet, combo):
    """A server that asks for keys, and says in its log all that it ever says."""
    server = fleet(combo.front, api_keys=KEYS, log="debug")
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


@pytest.fixture(params=["edge", "hypercorn"])
def locked_h1(request, fleet):
    """A client that speaks HTTP/1.1 only."""
    combo = next(combo for combo in COMBOS if combo.front == request.param and combo.protocol == "h1")
    server = fleet(combo.front, api_keys=KEYS, log="debug")
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def status_of(api, route, key=None, *, name=IN, body=None, params=None, headers=None, error=None):
    """The status of one request; a stream is closed as soon as it has one."""
    method, path = address(route, name)
    sent = {**({} if key is None else bearer(key)), **(headers or {})}
    content = None
    if body is not None or method in ("PUT", "POST"):
        sent.setdefault("Content-Type", "application/json")
        content = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
    with api.client.stream(method, path, content=content, params=params, headers=sent) as answer:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return answer.status_code
        text = answer.read()
        if answer.status_code in (401, 403):
            found = json.loads(text)["error"]
            assert found["code"] == {401: "unauthorized", 403: "forbidden"}[answer.status_code]
            assert "secret-of" not in text.decode() and KEYS not in text.decode()
            if error is not None:
                error.append(found)
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
        return answer.status_code


# -- the table ------------------------------------------------------------------------------------------


def test_every_address_has_a_rule_and_every_rule_an_address():
    """§11"""
    assert sorted(routes()) == sorted(RULES)


def test_the_rules_are_those_of_the_contract():
    """§11, the table"""
    assert SCOPES_OF.keys() == RULES.keys(), "the contract's table does not know an address, or the other way"
    for route, scopes in SCOPES_OF.items():
        rule = RULES[route]
        if scopes is None:
            assert rule.is_probe or rule.is_open, route
        else:
            assert (rule.scopes, rule.is_open, rule.is_probe) == (scopes, False, False), route
        if "{box}" in route or "{router}" in route:
            assert rule.has_name_in_path, route


@pytest.mark.exhaustive
def test_socket_paths_are_shown_to_keys_that_may_use_them(locked):
    """A Unix socket holds nobody to prefixes; every key may know which shard has which slots."""
    for scopes in SUBSETS:
        for confined in (False, True):
            key = secret(scopes, confined=confined)
            found = locked.ok(locked.send("GET", "/v0/placement", headers=bearer(key)))
            assert (len(found["sockets"]), found["shards"]) == (2, 2) and found["slots"]
            shows = bool(scopes & (READ | WRITE)) and not confined
            assert all(path.endswith(".sock") if shows else path == "" for path in found["sockets"]), key


def test_an_address_without_a_rule_stops_the_gateway():
    with pytest.raises(LookupError, match="has no rule"):
        route_of("GET", "/v0/boxes/{box}/nobody-thought-of-it")


# -- who are you ----------------------------------------------------------------------------------------


def test_no_address_answers_a_stranger(locked):
    """§11: no key, a wrong key, half a header; probes alone are open (§13)."""
    wrong = [{}, bearer("x" * 40), {"Authorization": f"Basic {FREE}"}, {"Authorization": "Bearer"}]
    for route in routes():
        is_probe = SCOPES_OF[route] is None
        with locked.another() as stranger:  # a connection of its own: strangers may send few frames on one
            for headers in wrong:
                assert (status_of(stranger, route, headers=headers) == 401) != is_probe, (route, headers)


def test_what_is_nowhere_is_not_told_to_a_stranger(locked):
    """§11"""
    for method, path in [("GET", "/v0/nothing"), ("PATCH", "/v0/boxes/in.x"), ("GET", "/v0/boxes/%ff")]:
        locked.refused(locked.send(method, path), 401, "unauthorized")
    locked.refused(locked.send("GET", "/v0/nothing", headers=bearer(FREE)), 404, "not_found")
    locked.refused(locked.send("PATCH", "/v0/boxes/in.x", headers=bearer(FREE)), 405, "method_not_allowed")


def test_the_scheme_is_read_in_any_case_and_head_is_a_get(locked):
    """§11"""
    response = locked.send("HEAD", "/v0/boxes", headers={"Authorization": f"bEaReR   {secret(READ)}"})
    assert response.status_code == 200
    assert locked.send("HEAD", "/v0/boxes", headers=bearer(secret(WRITE))).status_code == 403


def test_two_authorizations_are_none(locked):
    """§11"""
    headers = [("Authorization", f"Bearer {FREE}"), ("Authorization", f"Bearer {FREE}")]
    assert locked.client.get("/v0/boxes", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/v0/boxes/in.body", "/v1/streams/in.body/records"])
@pytest.mark.parametrize("sent", [0, 300_000], ids=["nothing of it has come", "some of it has come"])
def test_a_body_of_a_stranger_is_not_waited_for(locked_h1, path, sent):
    """§11: what is too much for one read is refused before it is all there, in the form of its API."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n"
    for authorization in ("", f"Authorization: Bearer {FREE}x\r\n"):
        with socket.create_connection(("127.0.0.1", locked_h1.server.port), 30) as connection:
            connection.sendall(f"{head}{authorization}\r\n".encode() + b" " * sent)
            answer = b""
            while b"}" not in answer:
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"x-request-id: " in answer
            assert (b'"performance"' in answer) == path.startswith("/v0")


@pytest.mark.parametrize("path", ["/v0/boxes/in.body", "/v1/streams/in.body/records"])
def test_eight_silent_connections_keep_nobody_from_sending_a_body(locked_h1, path):
    """They declare 64 MiB each, as much as a gateway holds of all bodies, and send none of it."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", locked_h1.server.port), 30))
            length = f"Content-Length: {64 << 20}\r\nAuthorization: Bearer {FREE}\r\n"
            silent.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n".encode())
        for size in (10, 1_000_000):
            body = json.dumps({"records": [{"data": "x" * size}], "create": True})
            status = status_of(locked_h1, "POST /v0/boxes/{box}", FREE, body=body.encode())
            assert status in (200, 201)


# -- scopes ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("scopes", SUBSETS, ids=lambda scopes: "+".join(words(scopes)))
def test_an_address_answers_exactly_the_keys_with_its_scopes(locked, scopes):
    """§11: all addresses x all sets of scopes."""
    for route in routes():
        needed = SCOPES_OF[route]
        told = []
        status = status_of(locked, route, secret(scopes), error=told)
        if needed is None or needed & ~scopes == 0:
            assert status not in (401, 403), route
        else:
            assert status == 403, route
            assert told[0]["detail"]["missing"] == words(needed & ~scopes)


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_each_front_asks_for_scopes(locked, scope):
    """§11, over every way to reach the server."""
    for route in routes():
        needed = SCOPES_OF[route]
        suffices = needed is None or needed & ~scope == 0
        assert (status_of(locked, route, secret(scope)) != 403) == suffices, route


@pytest.mark.parametrize("route", [route for route, rule in RULES.items() if rule.scopes_body])
def test_what_a_body_asks_for_takes_its_own_scope(locked, box, route):
    """§11: a config inside an append is admin; a trim deletes."""
    values = {"config": {"cap_records": 7}, "trim_before_seq": 0}
    for field, scope in RULES[route].scopes_body:
        body = {"records": [{"data": 1}], field: values[field]}
        name = f"in.{box}.{field}"
        for key in (secret(RULES[route].scopes), secret(ALL & ~scope)):
            assert status_of(locked, route, key, name=name, body=body) == 403
            lines = {"Content-Type": "application/x-ndjson"}
            params = {field: json.dumps(values[field])}
            sent = {"name": name, "body": b'{"data":1}', "params": params, "headers": lines}
            assert status_of(locked, route, key, **sent) == 403
        assert status_of(locked, "GET /v0/boxes/{box}", FREE, name=name) == 404, "it was written"
        assert status_of(locked, route, secret(RULES[route].scopes | scope), name=name, body=body) == 201


# -- prefixes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [route for route, rule in RULES.items() if rule.has_name_in_path])
def test_a_name_in_the_path_must_be_within_the_prefixes(locked, route):
    """§11"""
    for name in (OUT, "in", "In.x", "xin.x", "ou%74.x"):
        assert status_of(locked, route, CONFINED, name=name) == 403, name
    for name in (IN, ALSO_IN, "%69n.x"):
        assert status_of(locked, route, CONFINED, name=name) not in (401, 403), name
    assert status_of(locked, route, FREE, name=OUT) not in (401, 403)


@pytest.mark.parametrize(
    ("route", "field"), [(route, field) for route, rule in RULES.items() for field in rule.names_body]
)
def test_a_name_in_the_body_must_be_within_the_prefixes(locked, box, route, field):
    """§11: watch boxes, router ends, dead_letter, where a requeue takes from."""

    def body(name):
        return json.dumps(BODIES[route, field]).replace("BOX", name).encode()

    name = f"in.{box}.{field.replace('*', 'all')}"
    told = []
    assert status_of(locked, route, CONFINED, name=name, body=body(OUT), error=told) == 403
    assert told[0]["detail"]["field"].split(".")[0] == field.split(".")[0]
    assert status_of(locked, route, CONFINED, name=name, body=body(f"in.{box}.named")) not in (401, 403)
    assert status_of(locked, route, FREE, name=f"{name}.2", body=body(f"out.{box}")) not in (401, 403)


def test_compressing_a_body_hides_no_name(locked, box):
    """§11, §0.2"""
    import gzip

    body = gzip.compress(json.dumps({"source": "in.a", "dest": OUT}).encode())
    sent = {"name": f"in.{box}", "body": body, "headers": {"Content-Encoding": "gzip"}}
    assert status_of(locked, "PUT /v0/routers/{router}", CONFINED, **sent) == 403


def test_a_name_twice_in_a_body_hides_nothing(locked, box):
    """§11: what is checked is what is used."""
    for ends in (f'"dest":"in.b","dest":"{OUT}"', f'"dest":"{OUT}","dest":"in.b"'):
        body = f'{{"source":"in.a",{ends}}}'.encode()
        status = status_of(locked, "PUT /v0/routers/{router}", CONFINED, name=f"in.{box}", body=body)
        made = locked.send("GET", f"/v0/routers/in.{box}", headers=bearer(FREE))
        assert status == 403 or made.json()["dest"] == "in.b"


def named(response, what):
    assert response.status_code == 200, response.text
    return [each[what] for each in response.json()[{"box": "boxes", "router": "routers"}[what]]]


def test_lists_show_what_is_within_the_prefixes_page_by_page(locked, box):
    """§11, §2.3, §6.3"""
    tail = box[-12:]
    inside = sorted(f"{start}.{tail}.{n}" for start in ("in", "also:in") for n in range(3))
    for name in (*inside, f"out.{tail}", f"in2.{tail}"):
        assert locked.send("PUT", f"/v0/boxes/{name}", {}, headers=bearer(FREE)).status_code == 201
    found, cursor = [], None
    while cursor or not found:
        params = {"page_size": 2, **({"cursor": cursor} if cursor else {})}
        response = locked.send("GET", "/v0/boxes", params=params, headers=bearer(CONFINED))
        found += named(response, "box")
        cursor = response.json().get("next_cursor")
    assert found == sorted(found) and all(name.startswith(("in.", "also:")) for name in found)
    assert [name for name in found if tail in name] == inside
    for prefix, expected in [
        ("in.", inside[3:]),
        (f"also:in.{tail}.1", [inside[1]]),
        ("out", []),
        ("i", inside[3:]),
    ]:
        response = locked.send(
            "GET", "/v0/boxes", params={"prefix": prefix, "page_size": 1000}, headers=bearer(CONFINED)
        )
        assert [name for name in named(response, "box") if tail in name] == expected


def test_routers_show_only_where_name_and_both_ends_are_within_the_prefixes(locked, box):
    """§11, §6"""
    tail = box[-12:]
    ends = {
        f"in.{tail}.good": (f"in.{tail}.a", f"in.{tail}.b"),
        f"in.{tail}.leads-out": (f"in.{tail}.a", f"out.{tail}.b"),
        f"in.{tail}.comes-in": (f"out.{tail}.a", f"in.{tail}.b"),
        f"out.{tail}.name": (f"in.{tail}.a", f"in.{tail}.b"),
    }
    for router, (source, dest) in ends.items():
        response = locked.send(
            "PUT", f"/v0/routers/{router}", {"source": source, "dest": dest}, headers=bearer(FREE)
        )
        assert response.status_code == 201, response.text
    response = locked.send("GET", "/v0/routers", params={"page_size": 1}, headers=bearer(CONFINED))
    shown = named(response, "router")
    while "next_cursor" in response.json():
        params = {"page_size": 1, "cursor": response.json()["next_cursor"]}
        response = locked.send("GET", "/v0/routers", params=params, headers=bearer(CONFINED))
        shown += named(response, "router")
    assert [name for name in shown if tail in name] == [f"in.{tail}.good"]
    for router in ends:
        allowed = router.endswith("good")
        for method in ("GET", "DELETE"):
            response = locked.send(method, f"/v0/routers/{router}", headers=bearer(CONFINED))
            assert (response.status_code == 200) == allowed, (method, router)
            assert allowed or response.status_code == 403
    over = {"source": f"in.{tail}.a", "dest": f"in.{tail}.c"}
    response = locked.send("PUT", f"/v0/routers/in.{tail}.leads-out", over, headers=bearer(CONFINED))
    locked.refused(response, 403, "forbidden", "dest")
    gone = locked.send("DELETE", f"/v0/boxes/in.{tail}.a", headers=bearer(CONFINED)).json()
    assert gone["routers_removed"] == [f"in.{tail}.leads-out"]  # not the one whose name is outside


def test_a_cycle_names_no_box_outside_the_prefixes(locked, box):
    """§11, §6.1"""
    tail = box[-12:]
    inside, outside = [f"in.{tail}.{n}" for n in range(2)], f"out.{tail}"
    for source, dest in [(inside[0], outside), (outside, inside[1])]:
        body = {"source": source, "dest": dest}
        made = locked.send("PUT", f"/v0/routers/{source}->{dest}", body, headers=bearer(FREE))
        assert made.status_code == 201, made.text
    closing = {"source": inside[1], "dest": inside[0]}
    response = locked.send("PUT", f"/v0/routers/in.{tail}", closing, headers=bearer(CONFINED))
    assert "detail" not in locked.refused(response, 409, "router_cycle") and outside not in response.text
    response = locked.send("PUT", f"/v0/routers/in.{tail}", closing, headers=bearer(FREE))
    assert outside in locked.refused(response, 409, "router_cycle")["detail"]["cycle"]


# -- streams and sockets --------------------------------------------------------------------------------


def test_a_token_in_the_query_opens_event_streams_and_nothing_else(locked):
    """§11"""
    for route in routes():
        rule = RULES[route]
        status = status_of(locked, route, params={"token": FREE})
        if rule.takes_token:
            assert status not in (401, 403), route
            assert status_of(locked, route, params={"token": FREE + "x"}) == 401, route
            assert status_of(locked, route, params={"token": secret(DELETE)}) == 403, route
        elif SCOPES_OF[route] is not None:
            assert status == 401, route
            assert status_of(locked, route, FREE, params={"token": FREE}) == 400, route


def test_a_session_opens_for_the_key_that_made_it_and_no_other(locked, box):
    """§11, §7.2; the stream that is open does not notice that others have tried."""
    name = f"in.{box}"
    locked.send("PUT", f"/v0/boxes/{name}", {}, headers=bearer(FREE))
    made = locked.send("POST", "/v0/watch", {"boxes": {name: {}}}, headers=bearer(secret(READ)))
    url = locked.ok(made)["stream_url"]
    for other in (FREE, CONFINED):
        locked.refused(locked.send("GET", url, headers=bearer(other)), 403, "forbidden")
    with locked.events(url, params={"token": secret(READ)}) as events:
        assert events.next().name == "caught-up"
        for other in (FREE, CONFINED):
            locked.refused(locked.send("GET", url, headers=bearer(other)), 403, "forbidden")
        locked.send("POST", f"/v0/boxes/{name}", {"records": [{"data": 1}]}, headers=bearer(FREE))
        assert events.records(1)[0]["data"] == 1


def test_a_socket_asks_for_a_key_and_for_scopes_command_by_command(locked_h1, box):
    """§7.5, §11"""

    def socket_of(key):
        return WebSocket(locked_h1.server.port, **({} if key is None else bearer(key)))

    for key in (None, "x" * 30):
        with pytest.raises(Refused) as caught:
            socket_of(key)
        assert (caught.value.status, caught.value.error["code"]) == (401, "unauthorized")
    inside, publish = f"in.{box}", {"op": "publish", "records": [{"data": 1}]}
    configured = {**publish, "config": {"cap_records": 3}}

    def code(socket, message):
        answer = socket.ask(message)
        return answer["code"] if answer["op"] == "error" else answer["op"]

    with socket_of(secret(WRITE, confined=True)) as writer:
        assert code(writer, {**publish, "box": f"out.{box}"}) == "forbidden"
        assert code(writer, {**configured, "box": inside}) == "forbidden"
        assert code(writer, {**publish, "box": inside, "trim_before_seq": 0}) == "forbidden"
        assert code(writer, {**publish, "box": inside}) == "ack"
        assert code(writer, {"op": "subscribe", "box": inside}) == "forbidden"
    with socket_of(secret(READ, confined=True)) as reader:
        assert code(reader, {**publish, "box": inside}) == "forbidden"
        assert code(reader, {"op": "subscribe", "box": f"out.{box}"}) == "forbidden"
        assert code(reader, {"op": "subscribe", "boxes": {inside: {}, f"out.{box}": {}}}) == "forbidden"
        assert code(reader, {"op": "subscribe", "box": inside}) == "subscribed"


# -- the log --------------------------------------------------------------------------------------------


def test_no_key_token_or_payload_reaches_the_log(locked_h1):
    """§11: at the chattiest level, through all that goes well and wrong, here and in the tests before."""
    payload = "the-payload-of-a-record"
    body = {"records": [{"data": payload, "tag": payload}], "node": payload, "match": payload}
    for route in routes():
        for key in (None, FREE):
            status_of(locked_h1, route, key, body=body)
        status_of(locked_h1, route, FREE, body=payload.encode())
        status_of(locked_h1, route, params={"token": FREE, payload: payload})
    assert locked_h1.send("GET", "/v0/boxes", headers=bearer(FREE)).status_code == 200
    log = locked_h1.server.log_text()
    assert "secret-of" not in log and payload not in log


# -- limits for each key (§12) --------------------------------------------------------------------------

TOTAL = 40_000  # bytes, of which each of two shards has half


@pytest.fixture
def narrow(fleet):
    """A server on which little is allowed to each key, and nothing to strangers."""
    server = fleet(
        "edge",
        api_keys=KEYS,
        probe_auth=True,
        max_inflight_per_key=2,
        max_sse_connections_per_key=2,
        max_total_bytes=TOTAL,
    )
    with COMBOS[0].client(server.url) as client:
        yield Api(client, server, COMBOS[0])


def limit_of(api, response):
    assert int(response.headers["retry-after"]) >= 1
    return api.refused(response, 429, "throttled")["detail"]["limit"]


def test_probes_can_be_closed_too(narrow):
    """§13"""
    for path in ("/v0/health", "/health", "/healthz", "/ping", "/v0/ready", "/readyz"):
        assert narrow.send("GET", path).status_code == 401
        assert narrow.send("GET", path, headers=bearer(secret(DELETE))).status_code == 200


def test_requests_in_flight_are_limited_for_each_key(narrow, box):
    """§12: slots free when the request ends."""
    mine, other = bearer(secret(READ)), bearer(FREE)
    names = [f"{box}.{n}" for n in range(2)]
    for name in names:
        narrow.send("PUT", f"/v0/boxes/{name}", {}, headers=other)

    def wait_at(name):
        def ask(api):
            while True:  # the question below may have taken a slot for a moment
                response = api.post_diff(name, {"wait_ms": 30_000}, headers=mine)
                if response.status_code != 429:
                    return response

        return narrow.in_background(ask)

    waits = [wait_at(name) for name in names]

    def refused():
        response = narrow.send("GET", f"/v0/boxes/{names[0]}", headers=mine)
        return None if response.status_code == 200 else limit_of(narrow, response)

    assert eventually(refused) == "inflight_per_key"
    assert narrow.send("GET", "/v0/boxes", headers=other).status_code == 200
    narrow.send("POST", f"/v0/boxes/{names[0]}", {"records": [{"data": 1}]}, headers=other)
    assert waits[0]()[0].status_code == 200
    assert refused() is None
    narrow.send("POST", f"/v0/boxes/{names[1]}", {"records": [{"data": 1}]}, headers=other)
    assert waits[1]()[0].status_code == 200


@pytest.mark.parametrize(
    ("first", "second", "scopes"),
    [("work", "work", READ | WRITE), ("work", "watch", READ | WRITE | DELETE), ("watch", "watch", READ)],
)
def test_streams_of_a_key_are_limited_and_work_counts_as_one(narrow, box, first, second, scopes):
    """§12: slots free when the stream ends, however it ends."""
    mine = bearer(secret(scopes))
    narrow.send("PUT", f"/v0/boxes/{box}", {"type": "queue"}, headers=bearer(FREE))
    paths = {"work": f"/v0/boxes/{box}/work?node=n", "watch": f"/v0/boxes/{box}/watch"}
    for _ in range(3):  # what does not open holds no slot
        assert narrow.send("GET", f"/v0/boxes/{box}.none/{first}?node=n", headers=mine).status_code == 404
        assert narrow.send("GET", f"{paths[first]}&what=is-this", headers=mine).status_code in (400, 404)
        assert narrow.send("HEAD", paths["watch"], headers=mine).status_code == 200
    with opened(narrow, paths[first], mine) as one, opened(narrow, paths[second], mine) as two:
        assert (one, two) == (200, 200)
        for third in {first, second}:
            response = narrow.send("GET", paths[third], headers=mine)
            assert limit_of(narrow, response) == "sse_connections_per_key"
        with opened(narrow, paths["watch"], bearer(FREE)) as others:
            assert others == 200
    # The server learns of a closed connection a moment later.
    eventually(lambda: free_again(narrow, paths[first], mine))


@contextlib.contextmanager
def opened(api, path, headers):
    with COMBOS[0].client(api.server.url) as client, client.stream("GET", path, headers=headers) as answer:
        yield answer.status_code


def free_again(api, path, headers):
    with opened(api, path, headers) as one, opened(api, path, headers) as two:
        return (one, two) == (200, 200)


def test_the_bytes_of_all_boxes_are_limited_and_come_back_with_a_delete(narrow, box):
    """§12"""
    headers = bearer(FREE)
    body = {"records": [{"data": "x" * 4000}]}

    def write():
        return narrow.send("POST", f"/v0/boxes/{box}", body, headers=headers)

    written = 0
    while (response := write()).status_code in (200, 201):
        written += 1
        assert written <= TOTAL // 4000
    assert limit_of(narrow, response) == "total_bytes"
    assert written >= 4
    assert narrow.send("DELETE", f"/v0/boxes/{box}", headers=headers).status_code == 200
    eventually(lambda: write().status_code in (200, 201))
    narrow.send("DELETE", f"/v0/boxes/{box}", headers=headers)
