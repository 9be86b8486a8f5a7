"""What an on-call engineer sees in an incident, and that the next step that is printed is the one that works.

Method: a real server, one thing broken in it as a machine would break it, and what the readiness probe, the
status, the answer to a client and the log say of it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from streams.testing import Server, running_server

HANG_MS = 2000


def ask(server: Server, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def until(holds: Callable[[], Any]) -> Any:
    """Ask until it holds. The time limit of the test is what ends it otherwise."""
    while not (found := holds()):
        pass
    return found


def logged(server: Server, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith(event)]


def test_a_hung_shard_is_named_and_restarted_and_its_requests_fail_meanwhile(tmp_path: Path) -> None:
    """SIGSTOP stands for a disk that hangs: the process is there, its sockets are open, nothing moves."""
    with running_server(tmp_path / "data", shards=1, hang_ms=HANG_MS) as server:
        assert ask(server, "POST", "/v0/boxes/orders", {"records": [{"data": 1}]})[0] == 201
        hung = server.shard_pids()[0]
        os.kill(hung, signal.SIGSTOP)
        status, body = ask(server, "GET", "/v0/ready")
        assert status == 503, body
        shard = body["error"]["detail"]["shards"][0]
        assert shard["reason"] == "silent" and "STREAMS_HANG_MS" in shard["next_step"]
        status, body = ask(server, "POST", "/v0/boxes/orders", {"records": [{"data": 2}]})
        assert (status, body["error"]["code"]) == (503, "shard_unavailable")
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        assert server.shard_pids()[0] != hung
        assert [line["child"] for line in logged(server, "hangs: it is killed")] == ["shard-00"]
        assert ask(server, "GET", "/v0/boxes/orders/tail")[1]["head_seq"] >= 1
        _, found = ask(server, "GET", "/v0/status")
        assert found["shards"][0]["restarts"] == {"hung": 1}


def test_a_hung_gateway_is_restarted(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1, gateways=2, hang_ms=HANG_MS) as server:
        hung = server.gateway_pids()[1]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: server.gateway_pids().get(1) not in (None, hung))
        assert logged(server, "hangs: it is killed")[0]["child"] == "gateway-1"
        # The connections that the kernel gave to the hung gateway are gone with it; new ones are served.
        assert ask(server, "GET", "/v0/health")[0] == 200


def test_a_server_that_was_paused_as_a_whole_restarts_nobody(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1, hang_ms=HANG_MS) as server:
        before = server.shard_pids(), server.gateway_pids()
        everyone = [server.pid, *before[0].values(), *before[1].values()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        resumed = threading.Event()
        resumed.wait(2 * HANG_MS / 1000)  # the pause itself is what is tested
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        for _ in range(3):
            assert ask(server, "GET", "/v0/ready")[0] == 200
        assert (server.shard_pids(), server.gateway_pids()) == before
