"""Limits of a key on a running server (v0 §12): no key takes what others need, and each sees its use.

Method: one real server with two shards that share a small limit of boxes, and a keys file with limits. What a
shard does alone is in `tests/core/test_usage.py`; here it is what takes the processes together. A shard hears
within about a second what a key uses in others, so a test waits for that and then expects it exactly.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streams import Client
from streams.client.retry import Retry
from streams.direct import ShardWriter
from streams.protocol.errors import Throttled
from streams.testing import Server, running_server
from tests.support.commands import in_process
from tests.support.crashing import eventually
from tests.support.sockets import WebSocket

WHOLE, GREEDY, MODEST, SLOW, TENANT, DEFAULT = (
    f"secret-of-the-{who}-key-0123456789"
    for who in ("whole", "greedy", "modest", "slow", "tenant", "default")
)
HURRY = Retry(total_s=0.0)
BOXES = 10

KEYS = f"""
{WHOLE} id=operator
{GREEDY}::a. id=greedy boxes={BOXES} stored_bytes=1MiB
{MODEST}::b. id=modest boxes=5
{SLOW}:r:c. id=slow requests_per_s=1
{TENANT}::tenant-a|d. id=tenant boxes=4 routers=1 groups=1 sessions=2 idempotency_keys=1
{DEFAULT}::e. id=default
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[Server]:
    with running_server(
        shards=2,
        max_boxes=60,
        max_routers_per_key=7,
        api_keys_file=keys,
        shard_host="127.0.0.1",
        shard_port=0,
    ) as found:
        yield found


class Api:
    def __init__(self, server: Server, secret: str) -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        self._http = httpx2.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return self._http.request(method, path, json=body, headers=headers)

    def limit_of(self, method: str, path: str, body: Any = None) -> str:
        """The limit that a request is refused for; empty when it is not."""
        answer = self.send(method, path, body)
        if answer.status_code < 300:
            return ""
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1, answer.text
        error = json.loads(answer.text)["error"]
        assert error["code"] == "throttled" and " or have its limit raised" in error["message"]
        return str(error["detail"]["limit"])

    def whoami(self) -> dict[str, Any]:
        answer = self.send("GET", "/v0/whoami")
        assert answer.status_code == 200
        found: dict[str, Any] = json.loads(answer.text)
        return found

    def used(self, name: str) -> int:
        return int(self.whoami()["limits"][name]["used"])


@pytest.fixture(scope="module")
def full(server: Server) -> Server:
    """The server on which `modest` has all its boxes, and every shard has heard of that."""
    with Api(server, MODEST) as modest:
        for number in range(1, 6):
            assert modest.send("PUT", f"/v0/boxes/b.{number}", {}).status_code in (200, 201)
        more = [f"/v0/boxes/b.more.{number}" for number in range(12)]

        def are_refused() -> bool:
            limits = {modest.limit_of("PUT", path, {}) for path in more}
            for path in more:
                modest.send("DELETE", path)
            return limits == {"boxes_per_key"}

        eventually(are_refused)
    return server


def test_one_key_cannot_take_all_boxes_of_a_server(server: Server) -> None:
    with Api(server, GREEDY) as greedy, Api(server, MODEST) as modest:
        names = [f"a.{number}" for number in range(80)]
        limits = [greedy.limit_of("PUT", f"/v0/boxes/{name}", {}) for name in names]
        made = [name for name, limit in zip(names, limits, strict=True) if not limit]
        assert set(limits) == {"", "boxes_per_key"}
        # Each shard refuses what is too much by itself, so two can exceed a limit at most twofold.
        assert BOXES <= len(made) <= 2 * BOXES and greedy.used("boxes") == len(made)
        assert modest.limit_of("PUT", "/v0/boxes/b.1", {}) == ""  # there is room for others
        refused = next(name for name in names if name not in made)
        eventually(lambda: greedy.limit_of("PUT", f"/v0/boxes/{refused}", {}) == "boxes_per_key")
        for name in made[1:]:
            assert greedy.send("DELETE", f"/v0/boxes/{name}").status_code == 200
        eventually(lambda: greedy.limit_of("POST", f"/v0/boxes/{refused}", {"records": [{"data": 1}]}) == "")
        assert greedy.used("boxes") == 2 and greedy.used("stored_bytes") > 0
        large = {"records": [{"data": "x" * 600_000}] * 2}
        assert greedy.limit_of("POST", f"/v0/boxes/{refused}", large) == "stored_bytes_per_key"
        for name in (made[0], refused):
            greedy.send("DELETE", f"/v0/boxes/{name}")


def test_what_a_key_uses_in_one_shard_counts_in_the_others(full: Server) -> None:
    """The last box that fits is refused by every shard, once each has heard of the others."""
    with Api(full, MODEST) as modest:
        assert modest.used("boxes") == 5
        limits = {modest.limit_of("PUT", f"/v0/boxes/b.other.{number}", {}) for number in range(12)}
        assert limits == {"boxes_per_key"}


def test_each_limit_is_enforced_over_http(server: Server) -> None:
    with Api(server, TENANT) as tenant:
        for box in ("d.1", "d.2"):
            assert tenant.limit_of("POST", f"/v0/boxes/{box}", {"records": [{"data": 1}]}) == ""
        assert tenant.limit_of("PUT", "/v0/boxes/d.1/groups/g1", {"cursor": 1}) == ""
        assert tenant.limit_of("PUT", "/v0/boxes/d.1/groups/g2", {"cursor": 1}) == "groups_per_key"
        keyed = {"records": [{"data": 1}], "idempotency_key": "k1"}
        assert tenant.limit_of("POST", "/v0/boxes/d.1", keyed) == ""
        assert tenant.limit_of("POST", "/v0/boxes/d.1", keyed) == ""
        limit = tenant.limit_of("POST", "/v0/boxes/d.1", {**keyed, "idempotency_key": "k2"})
        assert limit == "idempotency_keys_per_key"
        router = {"source": "d.1", "dest": "d.2"}
        assert tenant.limit_of("PUT", "/v0/routers/d.r1", router) == ""
        assert tenant.limit_of("PUT", "/v0/routers/d.r2", router) == "routers_per_key"
        assert tenant.send("DELETE", "/v0/routers/d.r1").status_code == 200
        # Sessions go to shards in turn, so each of the two may admit as many as the limit.
        watch = {"boxes": {"d.1": {}}}
        limits = [tenant.limit_of("POST", "/v0/watch", watch) for _ in range(5)]
        assert limits[-1] == "sessions_per_key" and limits.count("") >= 2
        assert tenant.used("sessions") == limits.count("")


def test_streams_of_the_s2_api_are_held_to_the_limits_of_their_key(server: Server) -> None:
    with Api(server, TENANT) as tenant:
        for box in ("d.1", "d.2"):
            assert tenant.send("PUT", f"/v0/boxes/{box}", {}).status_code in (200, 201)
        made = [tenant.send("POST", "/v1/basins", {"basin": f"tenant-a{n}"}).status_code for n in range(5)]
        assert made[0] == 201 and made[-1] == 429 and set(made) == {201, 429}
        headers = {"s2-basin": "tenant-a0"}

        def is_refused() -> bool:
            answer = tenant.send("POST", "/v1/streams", {"stream": "one-more"}, **headers)
            return answer.status_code == 429

        eventually(is_refused)
        assert "one-more" not in tenant.send("GET", "/v1/streams", **headers).text


def test_requests_of_a_key_are_limited_by_the_second(server: Server) -> None:
    with Api(server, SLOW) as slow, Api(server, MODEST) as modest:
        limits = {slow.limit_of("GET", "/v0/boxes") for _ in range(3)}
        for _ in range(200):
            if "requests_per_s_per_key" in limits:
                break
            limits.add(slow.limit_of("GET", "/v0/boxes"))
        assert "requests_per_s_per_key" in limits
        assert {modest.limit_of("GET", "/v0/boxes") for _ in range(5)} == {""}


def test_commands_over_a_socket_are_held_to_the_limits_of_the_key(full: Server) -> None:
    with WebSocket(full.port, authorization=f"Bearer {MODEST}") as socket:
        socket.send({"op": "publish", "box": "b.beyond", "records": [{"data": 1}]})
        told = socket.receive()
        assert told["code"] == "throttled" and told["detail"]["limit"] == "boxes_per_key"


def test_peers_over_tcp_are_held_to_the_limits_of_their_key(full: Server) -> None:
    with ShardWriter(full.url, key=MODEST, over_tcp=True, retry=HURRY) as writer:
        assert writer.append("b.1", [1]).last_seq >= 1
        for number in range(4):  # columns, and a box alone
            with pytest.raises(Throttled, match="boxes"):
                writer.append(f"b.tcp.{number}", [1])


def test_whoami_shows_a_key_its_id_scopes_prefixes_limits_and_use_and_no_secret(full: Server) -> None:
    with Api(full, SLOW) as slow:
        eventually(lambda: slow.send("GET", "/v0/whoami").status_code == 200)
    with Client(full.url, key=MODEST) as client:
        found = client.whoami()
    assert (found.id, found.prefixes) == ("modest", ["b."])
    assert found.scopes == ["read", "write", "delete", "admin"]
    assert (found.limits["boxes"].used, found.limits["boxes"].limit) == (5, 5)
    assert found.limits["routers"].limit == 7  # a default of the server, for keys with prefixes
    with Client(full.url, key=WHOLE) as client:
        assert (client.whoami().id, client.whoami().limits) == ("operator", {})
    shown = in_process(["whoami", "--url", full.url, "--key", MODEST, "--json"], os.environ, Path.cwd())
    assert json.loads(shown.stdout)["limits"]["boxes"] == {"limit": 5, "used": 5}


def test_status_shows_admins_all_keys_and_no_secret(full: Server) -> None:
    with Api(full, WHOLE) as whole:
        text = whole.send("GET", "/v0/status").text
    rows = {row["id"]: row for row in json.loads(text)["keys"]}
    assert rows.keys() == {"operator", "greedy", "modest", "slow", "tenant", "default"}
    assert rows["modest"]["limits"]["boxes"] == {"limit": 5, "used": 5}
    assert rows["operator"]["limits"] == {} and rows["slow"]["limits"]["requests_per_s"]["limit"] == 1
    for secret in (WHOLE, GREEDY, MODEST, SLOW, TENANT, DEFAULT):
        assert secret not in text


def test_limits_that_are_changed_count_after_a_reload(full: Server, keys: Path) -> None:
    with Api(full, MODEST) as modest:
        eventually(lambda: modest.limit_of("PUT", "/v0/boxes/b.new", {}) == "boxes_per_key")
        keys.write_text(KEYS.replace("id=modest boxes=5", "id=modest boxes=6"))
        os.kill(full.pid, signal.SIGHUP)
        eventually(lambda: modest.limit_of("PUT", "/v0/boxes/b.new", {}) == "")
        assert modest.used("boxes") == 6
        modest.send("DELETE", "/v0/boxes/b.new")
