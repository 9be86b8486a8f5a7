"""Goal: where the server has keys, the S2 API asks for them, with its own errors (s2-v1 §5, v0-api §11).

Method: one server with keys of different scopes and names; every address with every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from streams.testing import Server, running_server

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
        self._http = httpx2.Client(base_url=f"{server.url}/v1")

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
    answer = httpx2.request("OPTIONS", f"{server.url}/v1/basins", headers={"origin": "https://example.com"})
    assert answer.status_code == 204 and "access-control-allow-origin" in answer.headers
