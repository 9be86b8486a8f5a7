"""What is logged (v0 §0.8): one JSON line an event, with its request id, and nothing that is secret.

Method: a server that logs everything it can, every line it has written read back.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from streams.testing import Server, running_server

SECRET = "a-payload-nobody-may-see"


@pytest.fixture(scope="module")
def talkative() -> Iterator[Server]:
    with running_server(shards=1, log="debug") as found:
        yield found


def lines_of(server: Server) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
    for line in found:
        assert {"event", "level", "timestamp", "process"} <= line.keys()
    return found


def test_a_request_is_logged_under_its_id_and_that_id_is_answered(talkative: Server) -> None:
    with httpx2.Client(base_url=talkative.url, trust_env=False, timeout=60) as client:
        given = client.get("/v0/boxes/none", headers={"x-request-id": "order-66"})
        made = client.get("/v0/health")
    assert given.headers["x-request-id"] == "order-66"
    logged = {line["request_id"]: line for line in lines_of(talkative) if "request_id" in line}
    line = logged["order-66"]
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v0/boxes/none", 404)
    assert line["process"] == "gateway-0" and line["level"] == "debug" and line["took_ms"] >= 0
    assert logged[made.headers["x-request-id"]]["path"] == "/v0/health"


def test_no_line_has_a_payload_a_query_a_key_or_the_name_of_a_session(talkative: Server) -> None:
    with httpx2.Client(base_url=talkative.url, trust_env=False, timeout=60) as client:
        headers = {"authorization": f"Bearer {SECRET}", "idempotency-key": SECRET}
        body = {"records": [{"data": SECRET, "tag": SECRET, "meta": {"m": SECRET}}]}
        assert client.post("/v0/boxes/b", json=body, headers=headers).is_success
        assert client.post("/v0/boxes/b", content=b'{"records":[{"data":"%b"' % SECRET.encode()).is_error
        client.get(f"/v0/boxes/b?token={SECRET}")
        client.post("/v0/boxes/b/diff", json={"match": SECRET})
        wid = client.post("/v0/watch", json={"boxes": {"b": {"from_seq": 0}}}).json()["wid"]
        with client.stream("GET", f"/v0/watch/{wid}") as stream:
            assert any(SECRET in line for line in stream.iter_lines())
    text = talkative.log_text()
    assert SECRET not in text and wid not in text
    assert [line for line in lines_of(talkative) if line.get("path", "").startswith("/v0/watch/")]


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_a_bug_is_logged_with_its_place_and_without_what_it_was_about(log_format: str) -> None:
    """Method: the logger alone, told of a request that failed. The values of variables must not appear."""
    code = f"""
from gateway.http.edge_rules import bug_response
from gateway.requests.request import Request
from streams import logs

def fail(body):
    raise RuntimeError("a bug")

logs.setup("info", {log_format!r}, process="gateway-0")
headers = {{"authorization": "Bearer {SECRET}"}}
request = Request("GET", "/v0/watch/wid_{SECRET}", "token={SECRET}", headers, b"{SECRET}")
try:
    fail(request.body)
except RuntimeError as error:
    bug_response(request, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert (
        "request failed because of a bug" in done.stderr
        and "in fail" in done.stderr
        and "a bug" in done.stderr
    )
    assert SECRET not in done.stderr


def test_a_person_at_a_terminal_gets_lines_to_read() -> None:
    """Method: the logger alone, with a terminal for its standard error."""
    ours, theirs = pty.openpty()
    code = "from streams import logs; import structlog; logs.setup('info','auto',process='shard-07');"
    code += "structlog.get_logger().info('ready', url='http://x')"
    try:
        subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, timeout=60)
        assert select.select([ours], [], [], 10)[0]
        text = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "ready" in text and "shard-07" in text and not text.startswith("{")
