"""Goal: where the server has keys, the S2 API asks for them, with its own errors (s2 §5, v0 §11).

Method: one server with keys of different scopes and names, one with a key for each scope; every address with
every key, and what a key may hold at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import trio

from gateway.requests.request import Request
from gateway.s2.endpoints import S2
from gateway.s2.permits import Permit
from gateway.shards.dispatch import Dispatch
from gateway.shards.placement import even
from gateway.watch.service import Watch
from streams.protocol.access.grants import SCOPES
from streams.testing import Server, running_server
from tests.support.crashing import eventually
from tests.support.duplex import Duplex

BASIN = "orders-basin"
KEYS = {
    "root": "root-secret",
    "reader": "reader-secret:r",
    "writer": "writer-secret:rw",
    "eraser": "eraser-secret:rwd",
    "mine": f"mine-secret:rwda:{BASIN}/mine",
    "basin": f"basin-secret:rwda:{BASIN}/",
}
STREAMS = f"/streams?basin={BASIN}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1, api_keys=",".join(KEYS.values())) as found:
        yield found


class Caller:
    def __init__(self, server: Server) -> None:
        self._http = httpx2.Client(base_url=f"{server.url}/v1", timeout=60, trust_env=False)

    def __call__(self, key: str | None, method: str, path: str, body: Any = None) -> tuple[int, str]:
        headers = {"s2-basin": BASIN}
        if key is not None:
            secret = KEYS[key].partition(":")[0] if key in KEYS else key
            headers["authorization"] = f"Bearer {secret}"
        answer = self._http.request(method, path, json=body, headers=headers)
        code = answer.json().get("code", "") if answer.status_code >= 400 else ""
        return answer.status_code, code


@pytest.fixture(scope="module")
def call(server: Server) -> Caller:
    found = Caller(server)
    assert found("root", "POST", "/basins", {"basin": BASIN})[0] == 201
    for stream in ("mine", "yours"):
        assert found("root", "POST", "/streams", {"stream": stream})[0] == 201
    return found


APPEND: dict[str, Any] = {"records": [{"body": "x"}]}
TRIM: dict[str, Any] = {"records": [{"headers": [["", "trim"]], "body": "\0" * 8}]}

#: Method, address, body, and who may.
CASES: list[tuple[str, str, Any, set[str]]] = [
    ("GET", "/basins", None, {"root", "reader", "writer", "eraser"}),
    ("GET", f"/basins/{BASIN}", None, {"root", "reader", "writer", "eraser", "basin"}),
    ("PATCH", f"/basins/{BASIN}", {}, {"root", "basin"}),
    ("GET", "/streams", None, {"root", "reader", "writer", "eraser", "basin"}),
    ("GET", "/streams/mine", None, set(KEYS)),
    ("GET", "/streams/yours", None, set(KEYS) - {"mine"}),
    ("PATCH", "/streams/mine", {}, {"root", "mine", "basin"}),
    ("PUT", "/streams/mine", {}, {"root", "mine", "basin"}),
    ("GET", "/streams/mine/records/tail", None, set(KEYS)),
    ("POST", "/streams/mine/records", APPEND, set(KEYS) - {"reader"}),
    ("POST", "/streams/yours/records", APPEND, set(KEYS) - {"reader", "mine"}),
    ("POST", "/streams/mine/records", TRIM, {"root", "eraser", "mine", "basin"}),
    ("GET", "/streams/mine/records?seq_num=0&clamp=true", None, set(KEYS)),
]


@pytest.mark.parametrize(("method", "path", "body", "allowed"), CASES)
def test_each_address_takes_the_keys_that_it_should(
    call: Caller, method: str, path: str, body: Any, allowed: set[str]
) -> None:
    assert call(None, method, path, body) == (401, "authn")
    assert call("somebody", method, path, body) == (401, "authn")
    for key in KEYS:
        status, code = call(key, method, path, body)
        if key in allowed:
            assert status < 300, (key, status, code)
        else:
            assert (status, code) == (403, "permission_denied"), key


def test_a_browser_may_ask_what_it_may_send_without_a_key(server: Server) -> None:
    answer = httpx2.request(
        "OPTIONS", f"{server.url}/v1/basins", headers={"origin": "https://example.com"}, timeout=60
    )
    assert answer.status_code == 204 and "access-control-allow-origin" in answer.headers


def test_a_session_without_a_key_is_refused_before_its_body_is_read(server: Server) -> None:
    headers = {"content-type": "s2s/proto", "s2-basin": BASIN}
    with Duplex(server.port, "/v1/streams/mine/records", headers) as connection:
        assert json.loads(connection.answered())["code"] == "authn"
        assert connection.status == 401
        assert connection.closed()


def test_any_page_may_use_a_server_that_asks_for_keys(server: Server) -> None:
    """It proves itself by a key that it was given, never by a cookie."""
    origin = {"origin": "https://example.com"}
    for headers in (origin, {**origin, "authorization": "Bearer root-secret"}):
        answer = httpx2.get(f"{server.url}/v1/basins", headers=headers, trust_env=False, timeout=60)
        assert answer.headers["access-control-allow-origin"] == "https://example.com"


# -- every address


#: Every address of the API with a good body for it, and the scopes of a key that it takes (s2 §17).
ADDRESSES: list[tuple[str, str, Any, set[str]]] = [
    ("GET", "/basins", None, {"read"}),
    ("POST", "/basins", {"basin": "another-basin"}, {"admin"}),
    ("GET", f"/basins/{BASIN}", None, {"read"}),
    ("PUT", f"/basins/{BASIN}", {}, {"admin"}),
    ("PATCH", f"/basins/{BASIN}", {}, {"admin"}),
    ("DELETE", "/basins/nowhere-basin", None, {"delete"}),
    ("GET", "/streams", None, {"read"}),
    ("POST", "/streams", {"stream": "made"}, {"admin"}),
    ("GET", "/streams/mine", None, {"read"}),
    ("PUT", "/streams/mine", {}, {"admin"}),
    ("PATCH", "/streams/mine", {}, {"admin"}),
    ("DELETE", "/streams/nothing", None, {"delete"}),
    ("GET", "/streams/mine/records?seq_num=0&clamp=true", None, {"read"}),
    ("POST", "/streams/mine/records", APPEND, {"write"}),
    ("POST", "/streams/mine/records", TRIM, {"write", "delete"}),
    ("GET", "/streams/mine/records/tail", None, {"read"}),
    ("GET", "/access-tokens", None, {"admin"}),
    ("POST", "/access-tokens", {"id": "t", "scope": {"ops": ["create-basin"]}}, {"admin"}),
    ("DELETE", "/access-tokens/none", None, {"admin"}),
    ("GET", "/metrics?set=active-basins&start=0&end=1", None, {"read"}),
    ("GET", f"/metrics/{BASIN}?set=storage&start=0&end=1", None, {"read"}),
    ("GET", f"/metrics/{BASIN}/mine?set=storage&start=0&end=1", None, {"read"}),
]


def template(shape: list[str]) -> str:
    first, *rest = shape
    rest[:1] = ["{}"] * len(rest[:1])
    return "/".join([first, *(rest if first == "streams" else ["{}"] * len(rest))])


def test_every_address_is_in_the_table() -> None:
    """A method that is added to the API and not to the table above is missed here."""
    names = {"basins": BASIN, "streams": "mine", "access-tokens": "t", "metrics": BASIN}
    shapes = [
        *([name] for name in names),
        *([name, value] for name, value in names.items()),
        *([name, value, last] for name, value in names.items() for last in ("records", "mine", *names)),
        *([name, value, "records", last] for name, value in names.items() for last in ("tail", "mine")),
    ]
    dispatch, draining = Dispatch(even(1), []), trio.Event()
    watch = Watch(dispatch, connections_max=0, node_bytes_max=128)
    api = S2(dispatch, draining, drain_s=0, watch=watch)
    request = Request("GET", "/", "", {})
    known = {(method, template(each)) for each in shapes for method in api._handlers(request, Permit(), each)}
    told = [(method, path.partition("?")[0].strip("/").split("/")) for method, path, *_ in ADDRESSES]
    assert known == {(method, template(shape)) for method, shape in told}


@pytest.fixture(scope="module")
def scoped() -> Iterator[Server]:
    """A server with a key for each scope alone, and little room for each of them."""
    keys = [f"only-{scope}-secret:{scope}" for scope in SCOPES]
    limits: dict[str, Any] = {"max_inflight_per_key": 1, "max_sse_connections_per_key": 1}
    with running_server(shards=1, api_keys=",".join(["root-secret", *keys]), **limits) as found:
        call = Caller(found)
        assert call("root", "POST", "/basins", {"basin": BASIN})[0] == 201
        assert call("root", "POST", "/streams", {"stream": "mine"})[0] == 201
        yield found


@pytest.mark.parametrize(
    ("method", "path", "body", "scopes"), ADDRESSES, ids=[" ".join(row[:2]) for row in ADDRESSES]
)
def test_each_address_takes_exactly_its_scopes(
    scoped: Server, method: str, path: str, body: Any, scopes: set[str]
) -> None:
    call = Caller(scoped)
    for scope in SCOPES:
        status, code = call(f"only-{scope}-secret", method, path, body)
        if scopes == {scope}:
            assert status not in (401, 403, 429) and status < 500, (scope, status, code)
        else:
            assert (status, code) == (403, "permission_denied"), scope
    assert call("root", method, path, body)[0] not in (401, 403, 429, 500)


def test_a_key_gives_away_no_more_than_it_has(scoped: Server) -> None:
    """A token of an admin's key would else read what the key may not."""
    call = Caller(scoped)
    wide = {"id": "wide", "scope": {"op_groups": {"stream": {"read": True, "write": True}}}}
    assert call("only-admin-secret", "POST", "/access-tokens", wide) == (403, "permission_denied")
    assert call("root", "POST", "/access-tokens", wide)[0] == 201


# -- limits (v0 §12)


def reading(server: Server, secret: str, wait_s: int | None = None) -> httpx2.Request:
    more = "" if wait_s is None else f"&wait={wait_s}&count=1000000"
    headers = {"s2-basin": BASIN, "authorization": f"Bearer {secret}"}
    if wait_s is None:
        headers["accept"] = "text/event-stream"
    url = f"{server.url}/v1/streams/mine/records?tail_offset=0&clamp=true{more}"
    return httpx2.Request("GET", url, headers=headers)


def refusal(server: Server, secret: str) -> str | None:
    """What a key is told that has as many streams open as it may; None when it may open one more."""
    with httpx2.Client(timeout=60, trust_env=False) as http:
        answer = http.send(reading(server, secret), stream=True)
        if answer.status_code == 200:
            answer.close()
            return None
        answer.read()
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1
    code: str = answer.json()["code"]
    return code


def test_sessions_count_as_open_streams_of_their_key(scoped: Server) -> None:
    mine = "only-read-secret"
    watch = {"authorization": f"Bearer {mine}"}
    with httpx2.Client(timeout=60, trust_env=False) as http:
        open_one = http.send(reading(scoped, mine), stream=True)
        assert open_one.status_code == 200
        assert refusal(scoped, mine) == "rate_limited"
        answer = http.get(f"{scoped.url}/v0/boxes/none/watch", headers=watch)
        assert answer.status_code in (404, 429)
        assert refusal(scoped, "root-secret") is None
        open_one.close()
    eventually(lambda: refusal(scoped, mine) is None)


def test_a_session_ends_with_its_token(scoped: Server) -> None:
    call = Caller(scoped)
    http = httpx2.Client(timeout=60, trust_env=False)
    scope = {"ops": ["read"], "basins": {"prefix": ""}, "streams": {"prefix": ""}}
    headers = {"authorization": "Bearer root-secret"}
    issued = http.post(
        f"{scoped.url}/v1/access-tokens", json={"id": "brief", "scope": scope}, headers=headers
    )
    secret = issued.json()["access_token"]
    answer = http.send(reading(scoped, secret), stream=True)
    assert answer.status_code == 200
    assert call("root", "DELETE", "/access-tokens/brief")[0] == 204
    told = b"".join(answer.iter_raw())  # ends, which is the point
    assert b"no longer valid" in told
    http.close()


def test_requests_in_flight_are_counted_for_each_key(scoped: Server) -> None:
    call = Caller(scoped)
    outcome: list[int] = []

    def wait() -> None:
        with httpx2.Client(timeout=90, trust_env=False) as http:
            while True:  # the question below may have taken the place for a moment
                status = http.send(reading(scoped, "only-read-secret", wait_s=60)).status_code
                if status != 429:
                    outcome.append(status)
                    return

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()

    def refused() -> bool:
        return call("only-read-secret", "GET", "/streams/mine") == (429, "rate_limited")

    eventually(refused)
    assert call("root", "GET", "/streams/mine")[0] == 200
    eventually(lambda: (call("root", "POST", "/streams/mine/records", APPEND), not waiting.is_alive())[1])
    waiting.join(90)
    assert outcome == [200] and not refused()
