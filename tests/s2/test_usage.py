"""Goal: the metrics of operations and throughput tell what was done, before an orderly stop and after it
(s2 §17). Method: two lives of a server on one folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from streams.testing import running_server
from tests.s2.conftest import Client
from tests.s2.test_tokens import issue

SETS = ("append-ops", "append-throughput", "read-ops", "read-throughput", "basin-ops")


def series(client: Client, address: str, set: str, interval: str = "day") -> dict[str, int]:
    """Name -> the sum over all that could be of this test."""
    now_s = int(time.time())
    query = f"set={set}&start={now_s - 3 * 86_400}&end={now_s + 200}&interval={interval}"
    answer = client.call("GET", f"/metrics{address}?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, int] = {}
    for value in answer.json()["values"]:
        facts: dict[str, Any] = value["accumulation"]
        assert facts["interval"] == interval
        assert facts["unit"] == ("bytes" if set.endswith("throughput") else "operations")
        found[facts["name"]] = sum(count for _, count in facts["values"])
    return found


def counts(client: Client) -> dict[str, int]:
    found: dict[str, int] = {}
    for set in SETS:
        found.update(series(client, f"/{client.basin}", set))
    return found


def test_what_was_done_is_told_after_a_restart_too(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        client = Client(server.url, "counted-basin")
        other = Client(server.url, "another-basin")
        for each in (client, other):
            each.create()
            each.stream()
        client.append("x" * 100, "y")
        client.append("z")
        client.tail()
        client.bodies()
        other.append("not of the first")
        refused = client.call("POST", "/streams/none/records", {"records": [{}]})
        assert refused.status_code == 404
        session = client.call("GET", "/streams/s/records?seq_num=0&count=3", accept="text/event-stream")
        assert session.status_code == 200 and b"event: batch" in session.content
        first = counts(client)
        assert (first["append"], first["read"], first["check-tail"], first["create-stream"]) == (2, 2, 1, 1)
        assert first["append-throughput"] == 102 + 3 * 8
        assert first["read-throughput"] > 2 * 102
        assert first["basin-metrics"] == len(SETS) - 1
        assert first["list-streams"] == 0
        account = series(client, "", "account-ops", "minute")
        assert (account["create-basin"], account["issue-access-token"]) == (2, 0)
        some = issue(client, "some", basins={"prefix": "counted"}, ops=["account-metrics"])
        every = issue(client, "every", basins={"prefix": ""}, ops=["account-metrics"])
        assert some("GET", "/metrics?set=account-ops&start=1&end=2") == 403
        assert every("GET", "/metrics?set=account-ops&start=1&end=2") == 200
        billed = client.call("GET", "/metrics?set=estimated-billable-usage&start=1&end=2")
        assert billed.json() == {"values": []}
    with running_server(tmp_path) as server:
        again = client.on(server)
        # Asking is an operation too.
        assert counts(again) == {**first, "basin-metrics": 2 * len(SETS) - 1}
        assert series(again, "", "account-ops")["issue-access-token"] == 2
        box = again.http.get("/v0/boxes/s2.usage").json()
        assert (box["config"]["durability"], box["config"]["ttl_ms"]) == ("disk", 32 * 86_400_000)
