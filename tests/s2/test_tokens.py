"""Goal: an access token allows what its scope says and nothing else, wherever it is presented (s2 §17)."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.requests.request import Request
from gateway.requests.s2_errors import S2Error
from gateway.s2.permits import OPERATIONS, Authenticator, KeyPermit, digest_of
from gateway.s2.tokens import _Operation
from streams.protocol.errors import NotReady
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import AccessToken
from streams.testing import Server
from tests.s2.conftest import Client


class As:
    """A client of the basin that sends a token."""

    def __init__(self, client: Client, token: str) -> None:
        self._client = client
        self.secret = token

    def __call__(self, method: str, path: str, body: Any = None) -> int:
        answer = self._client.call(method, path, body, authorization=f"Bearer {self.secret}")
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


def listed(client: Client, token: As, path: str) -> tuple[list[str], bool]:
    """The names on a page of a list, and whether there are more."""
    answer = client.call("GET", path, authorization=f"Bearer {token.secret}").json()
    kind = path.partition("?")[0].removeprefix("/").replace("-", "_")
    return [each.get("name") or each["id"] for each in answer[kind]], answer["has_more"]


TOKEN_OPS = ["issue-access-token", "list-access-tokens", "revoke-access-token"]


def test_a_token_lists_and_revokes_only_the_tokens_in_its_scope(basin: Client) -> None:
    id = f"{basin.basin}-"
    for other in ("a", "team", "team-1", "team-2", "z"):
        issue(basin, id + other, ops=["read"])
    team = issue(basin, f"{id}boss", ops=TOKEN_OPS, access_tokens={"prefix": f"{id}team-"})
    one = issue(basin, f"{id}clerk", ops=TOKEN_OPS, access_tokens={"exact": f"{id}team"})
    none = issue(basin, f"{id}guest", ops=TOKEN_OPS)
    both = [f"{id}team-1", f"{id}team-2"]
    for query in ("", "?prefix=", f"?prefix={id}", f"?prefix={id}team-", f"?start_after={id}a"):
        assert listed(basin, team, f"/access-tokens{query}") == (both, False), query
    assert listed(basin, team, "/access-tokens?limit=1") == (both[:1], True)
    assert listed(basin, team, f"/access-tokens?limit=1&start_after={both[0]}") == (both[1:], False)
    assert listed(basin, team, f"/access-tokens?prefix={both[1]}") == (both[1:], False)
    assert listed(basin, team, f"/access-tokens?prefix={id}z") == ([], False)
    assert listed(basin, one, "/access-tokens?limit=1") == ([f"{id}team"], False)
    assert listed(basin, one, f"/access-tokens?prefix={id}team-") == ([], False)
    assert listed(basin, none, "/access-tokens") == ([], False)
    for token, other in ((team, "a"), (team, "team"), (team, "boss"), (one, "team-1"), (none, "guest")):
        assert token("DELETE", f"/access-tokens/{id}{other}") == 403, other
    assert team("DELETE", f"/access-tokens/{id}nobody") == 403, "it says which ids are taken"
    assert team("DELETE", f"/access-tokens/{id}team-1") == 204
    assert one("DELETE", f"/access-tokens/{id}team") == 204


def test_a_token_expires_no_later_than_the_token_that_issued_it(basin: Client) -> None:
    id = f"{basin.basin}-"
    end = "2100-01-01T00:00:00.000000Z"
    own = issue(
        basin, f"{id}i", ops=["issue-access-token", "read"], access_tokens={"prefix": id}, expires_at=end
    )
    scope = {"ops": ["read"]}
    for late in ("2100-01-01T00:00:01Z", "9999-12-31T00:00:00Z"):
        body = {"id": f"{id}late", "scope": scope, "expires_at": late}
        assert own("POST", "/access-tokens", body) == 403
    sooner = "2099-01-01T00:00:00.000000Z"
    assert own("POST", "/access-tokens", {"id": f"{id}default", "scope": scope}) == 201
    assert own("POST", "/access-tokens", {"id": f"{id}same", "scope": scope, "expires_at": end}) == 201
    assert own("POST", "/access-tokens", {"id": f"{id}sooner", "scope": scope, "expires_at": sooner}) == 201
    answer = basin.call("GET", f"/access-tokens?prefix={id}").json()["access_tokens"]
    ends = {token["id"].removeprefix(id): token["expires_at"] for token in answer}
    assert ends == {"i": end, "default": end, "same": end, "sooner": sooner}


def test_a_token_that_may_create_does_not_thereby_reconfigure(basin: Client) -> None:
    """`PUT` replaces the config of a stream or basin that exists."""
    basin.stream("a", retention_policy={"age": 1000})
    creator = issue(basin, f"{basin.basin}-c", ops=["create-stream", "create-basin"])
    config = {"retention_policy": {"age": 1000}}
    assert creator("PUT", "/streams/a", config) == 200
    assert creator("PUT", "/streams/b", config) == 201
    for body in ({"retention_policy": {"age": 1}}, {}, None):
        assert creator("PUT", "/streams/a", body) == 403
    assert creator("PUT", f"/basins/{basin.basin}", {"config": {"create_stream_on_append": True}}) == 403
    assert creator("PUT", f"/basins/{basin.basin}") == 200
    kept = basin.call("GET", "/streams/a").json()["retention_policy"]
    assert kept == {"age": 1000}
    ops = ["create-stream", "reconfigure-stream"]
    assert issue(basin, f"{basin.basin}-e", ops=ops)("PUT", "/streams/a", {}) == 200


def test_lists_are_paged_within_the_names_of_the_token(basin: Client) -> None:
    """A page is full of names in scope: neither names nor `has_more` speak of others."""
    for name in ("a", "b", "c/1", "c/2", "d"):
        basin.stream(name)
    ops = ["list-streams", "list-basins"]
    part = issue(basin, f"{basin.basin}-l", ops=ops, streams={"prefix": "c/"})
    one = issue(basin, f"{basin.basin}-m", ops=ops, streams={"exact": "c"}, basins={"exact": basin.basin})
    assert listed(basin, part, "/streams?limit=1") == (["c/1"], True)
    assert listed(basin, part, "/streams?limit=1&start_after=c/1") == (["c/2"], False)
    assert listed(basin, part, "/streams?prefix=d") == ([], False)
    assert listed(basin, one, "/streams?limit=1") == ([], False)
    assert listed(basin, one, "/basins?limit=1") == ([basin.basin], False)


def test_the_operations_of_the_account_are_shown_to_tokens_for_all_basins_only(basin: Client) -> None:
    path = "/metrics?set=account-ops&start=0&end=60"
    for number, (basins, status) in enumerate(
        (({"prefix": ""}, 200), ({"exact": basin.basin}, 403), ({"prefix": "b"}, 403))
    ):
        token = issue(basin, f"{basin.basin}-{number}", ops=["account-metrics"], basins=basins)
        assert token("GET", path) == status, basins


def test_a_token_ends_when_it_is_revoked_or_has_expired(basin: Client) -> None:
    basin.stream()
    id = f"{basin.basin}-e"
    token = issue(basin, id, ops=["check-tail"], expires_at="2100-01-01T00:00:00Z")
    assert token("GET", "/streams/s/records/tail") == 200
    (listed,) = basin.call("GET", f"/access-tokens?prefix={id}").json()["access_tokens"]
    assert listed == {
        "id": id,
        "scope": {
            "basins": {"exact": basin.basin},
            "streams": {"prefix": ""},
            "access_tokens": None,
            "op_groups": {name: {"read": False, "write": False} for name in ("account", "basin", "stream")},
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


class _Register:
    """A register that knows one token and is then out of reach."""

    def __init__(self, token: AccessToken) -> None:
        self.token = token
        self.is_away = False

    async def call_shard(self, shard: int, command: object, reply: object) -> s2.FindTokenReply:
        if self.is_away:
            raise NotReady("shard 0 is starting")
        return s2.FindTokenReply(self.token)


async def test_a_token_expires_while_its_register_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("gateway.s2.permits.time.time", lambda: now_s)
    monkeypatch.setattr("gateway.s2.permits.time.monotonic", lambda: now_s)
    token = AccessToken(id="a", digest=digest_of("secret"), ops=("read",), expires_ms=2_000_000)
    register = _Register(token)
    authenticator = Authenticator(register)
    request = Request("GET", "/v1/streams", "", {"authorization": "Bearer secret"}, b"")
    assert (await authenticator.permit(request)).allows("read")
    register.is_away = True
    now_s = 1999.0
    assert (await authenticator.permit(request)).allows("read")
    assert await authenticator.is_still_valid(token)
    now_s = 2000.0
    assert not await authenticator.is_still_valid(token)
    with pytest.raises(S2Error, match="has expired"):
        await authenticator.permit(request)


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
