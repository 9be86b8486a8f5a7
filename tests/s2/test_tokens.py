"""Goal: an access token allows what its scope says and nothing else, wherever it is presented (s2-v1 §17)."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.s2.access import OPERATIONS, KeyPermit
from gateway.s2.tokens import _Operation
from streams.testing import Server
from tests.s2.conftest import Client


class As:
    """The same basin, asked with a token."""

    def __init__(self, client: Client, token: str) -> None:
        self._client = client
        self._token = token

    def __call__(self, method: str, path: str, body: Any = None) -> int:
        answer = self._client.call(method, path, body, authorization=f"Bearer {self._token}")
        return int(answer.status_code)


def issue(client: Client, id: str, **fields: Any) -> As:
    fields.setdefault("basins", {"exact": client.basin})
    fields.setdefault("streams", {"prefix": ""})
    more = {name: fields.pop(name) for name in ("auto_prefix_streams", "expires_at") if name in fields}
    answer = client.call("POST", "/access-tokens", {"id": id, "scope": fields, **more})
    assert answer.status_code == 201, answer.text
    return As(client, answer.json()["access_token"])


RECORD = {"records": [{"body": "x"}]}
FENCE = {"records": [{"headers": [["", "fence"]], "body": "x"}]}
TRIM = {"records": [{"headers": [["", "trim"]], "body": "\0" * 8}]}


def test_every_operation_has_a_name_a_group_and_a_scope_of_ours() -> None:
    assert set(OPERATIONS) == set(_Operation.__args__)  # type: ignore[attr-defined]
    assert len(OPERATIONS) == 24
    assert {scope for _, _, scope in OPERATIONS.values()} == {"read", "write", "delete", "admin"}


def test_a_token_allows_its_operations_on_its_names_and_nothing_else(basin: Client) -> None:
    basin.stream("a/1")
    basin.stream("b/1")
    writer = issue(basin, f"{basin.basin}-w", streams={"prefix": "a/"}, ops=["append", "fence"])
    assert writer("POST", "/streams/a%2F1/records", RECORD) == 200
    assert writer("POST", "/streams/a%2F1/records", FENCE) == 200
    for method, path, body in (
        ("POST", "/streams/a%2F1/records", TRIM),
        ("POST", "/streams/b%2F1/records", RECORD),
        ("GET", "/streams/a%2F1/records?seq_num=0", None),
        ("GET", "/streams/a%2F1/records/tail", None),
        ("GET", "/streams/a%2F1", None),
        ("DELETE", "/streams/a%2F1", None),
        ("PATCH", "/streams/a%2F1", {}),
        ("PUT", "/streams/a%2F2", None),
        ("POST", "/streams", {"stream": "a/2"}),
        ("GET", "/streams", None),
        ("GET", "/basins", None),
        ("POST", "/basins", {"basin": "another-basin"}),
        ("PUT", f"/basins/{basin.basin}", None),
        ("GET", f"/basins/{basin.basin}", None),
        ("PATCH", f"/basins/{basin.basin}", {}),
        ("DELETE", f"/basins/{basin.basin}", None),
        ("GET", "/access-tokens", None),
        ("DELETE", f"/access-tokens/{basin.basin}-w", None),
        ("POST", "/access-tokens", {"id": "x", "scope": {"ops": ["append"]}}),
    ):
        assert writer(method, path, body) == 403, (method, path)


def test_groups_stand_for_their_operations(basin: Client) -> None:
    basin.stream()
    reader = issue(basin, f"{basin.basin}-r", op_groups={"stream": {"read": True}, "basin": {"read": True}})
    assert reader("GET", "/streams/s/records/tail") == 200
    assert reader("GET", "/streams/s") == 200
    assert reader("GET", "/streams") == 200
    assert reader("POST", "/streams/s/records", RECORD) == 403
    assert reader("DELETE", "/streams/s") == 403
    assert reader("GET", "/basins") == 403


def test_lists_show_what_the_token_may_see_and_a_prefix_is_put_on_and_taken_off(basin: Client) -> None:
    ops = ["create-stream", "list-streams", "append", "read", "list-basins", "delete-stream"]
    answer = basin.call(
        "POST",
        "/access-tokens",
        {
            "id": f"{basin.basin}-p",
            "auto_prefix_streams": True,
            "scope": {"basins": {"exact": basin.basin}, "streams": {"prefix": "tenant/"}, "ops": ops},
        },
    )
    basin.stream("other")
    headers = {"authorization": f"Bearer {answer.json()['access_token']}"}
    made = basin.call("POST", "/streams", {"stream": "mine"}, **headers)
    assert made.json()["name"] == "mine"
    assert basin.call("POST", "/streams/mine/records", RECORD, **headers).status_code == 200
    for path in ("/streams", "/streams?prefix=mi", "/streams?start_after=a"):
        listed = basin.call("GET", path, **headers).json()
        assert [stream["name"] for stream in listed["streams"]] == ["mine"]
    whole = basin.call("GET", "/streams").json()["streams"]
    assert [stream["name"] for stream in whole] == ["other", "tenant/mine"]
    assert [each["name"] for each in basin.call("GET", "/basins", **headers).json()["basins"]] == [
        basin.basin
    ]
    assert basin.tail("tenant%2Fmine") == 1


def test_nobody_gives_away_more_than_they_have(basin: Client) -> None:
    id = f"{basin.basin}-"
    own = issue(basin, f"{id}i", ops=["issue-access-token", "read"], access_tokens={"prefix": id})
    scope = {"basins": {"exact": basin.basin}, "streams": {"prefix": "x"}, "ops": ["read"]}
    assert own("POST", "/access-tokens", {"id": f"{id}j", "scope": scope}) == 201
    for wider in (
        {**scope, "ops": ["read", "append"]},
        {**scope, "basins": {"prefix": ""}},
        {**scope, "access_tokens": {"prefix": ""}},
    ):
        assert own("POST", "/access-tokens", {"id": f"{id}k", "scope": wider}) == 403
    assert own("POST", "/access-tokens", {"id": "outside", "scope": scope}) == 403


def test_a_token_ends_when_it_is_revoked_or_has_expired(basin: Client) -> None:
    basin.stream()
    id = f"{basin.basin}-e"
    token = issue(basin, id, ops=["check-tail"], expires_at="2100-01-01T00:00:00Z")
    assert token("GET", "/streams/s/records/tail") == 200
    (listed,) = basin.call("GET", f"/access-tokens?prefix={id}").json()["access_tokens"]
    assert listed == {
        "id": id,
        "scope": {
            "basins": {"exact": basin.basin, "prefix": None},
            "streams": {"exact": None, "prefix": ""},
            "access_tokens": None,
            "op_groups": None,
            "ops": ["check-tail"],
        },
        "auto_prefix_streams": False,
        "expires_at": "2100-01-01T00:00:00.000000Z",
    }
    duplicate = basin.call("POST", "/access-tokens", {"id": id, "scope": {"ops": ["read"]}})
    assert (duplicate.status_code, duplicate.json()["code"]) == (409, "resource_already_exists")
    assert basin.call("DELETE", f"/access-tokens/{id}").status_code == 204
    gone = basin.call("DELETE", f"/access-tokens/{id}")
    assert (gone.status_code, gone.json()["code"]) == (404, "access_token_not_found")
    late = issue(basin, f"{id}2", ops=["check-tail"], expires_at="2000-01-01T00:00:00Z")
    assert late("GET", "/streams/s/records/tail") == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "x", "scope": {}}, 422),
        ({"id": "x", "scope": {"ops": ["read"]}, "auto_prefix_streams": True}, 422),
        (
            {"id": "x", "scope": {"ops": ["read"], "streams": {"exact": "s"}}, "auto_prefix_streams": True},
            422,
        ),
        ({"id": "", "scope": {"ops": ["read"]}}, 400),
        ({"id": "x" * 97, "scope": {"ops": ["read"]}}, 400),
        ({"id": "x", "scope": {"ops": ["explode"]}}, 400),
        ({"id": "x", "scope": {"ops": ["read"], "basins": {}}}, 400),
        ({"id": "x", "scope": {"ops": ["read"]}, "expires_at": "soon"}, 400),
        ({"id": "x"}, 400),
    ],
)
def test_a_token_that_makes_no_sense_is_not_issued(shared: Client, body: dict[str, Any], status: int) -> None:
    assert shared.call("POST", "/access-tokens", body).status_code == status
    assert shared.call("GET", "/access-tokens?prefix=x").json()["access_tokens"] == []


def test_a_secret_is_nowhere_in_the_log(basin: Client, server: Server) -> None:
    scope = {"ops": ["read"]}
    secret = basin.call("POST", "/access-tokens", {"id": f"{basin.basin}-s", "scope": scope}).json()
    stored = b"".join(path.read_bytes() for path in server.data_dir.rglob("*.wal"))
    assert f"{basin.basin}-s".encode() in stored
    assert secret["access_token"].encode() not in stored


class _Key:
    """A key of ours that may read and write under `orders-a`."""

    def allows(self, scope: str, name: str) -> bool:
        return scope in ("read", "write") and name.startswith("orders-a")


def test_a_key_of_the_server_is_held_to_its_scopes_and_prefixes() -> None:
    permit = KeyPermit(_Key())
    assert permit.allows("append", "orders-a1", "s") and permit.allows("read", "orders-a1", "s")
    assert not permit.allows("trim", "orders-a1", "s")
    assert not permit.allows("append", "orders-b1", "s")
    assert not permit.allows("create-basin", "orders-a1")
    assert not permit.allows("list-basins")
    assert permit.sees_basin("orders-a1") and not permit.sees_basin("orders-b1")
    assert permit.sees_stream("orders-a1", "s") and not permit.sees_stream("orders-b1", "s")
