"""What an on-call engineer sees in an incident, and that the next step that is printed is the one that works.

Method: a real server, one thing broken in it as a machine would break it, and what the readiness probe, the
status, the answer to a client and the log say of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from streams.testing import Server, running_server
from tests.cluster.test_damage import flip

#: A machine that is busy with other tests must not look like one that hangs.
HANG_MS = 4000


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


def streams(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "streams", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def doctor(server: Server) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code of `streams doctor`, and its rows by check."""
    ran = streams("doctor", "--json", "--url", server.url)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return ran.returncode, {row["check"]: row for row in rows}


def test_a_hung_process_is_named_and_restarted_and_requests_to_it_fail_meanwhile(tmp_path: Path) -> None:
    """SIGSTOP stands for a disk that hangs: the process is there, its sockets are open, nothing moves."""
    with running_server(tmp_path / "data", shards=1, gateways=2, hang_ms=HANG_MS) as server:
        assert ask(server, "POST", "/v0/boxes/orders", {"records": [{"data": 1}]})[0] == 201
        hung, hung_gateway = server.shard_pids()[0], server.gateway_pids()[1]
        for pid in (hung, hung_gateway):
            os.kill(pid, signal.SIGSTOP)
        status, body = ask(server, "GET", "/v0/ready")
        assert status == 503, body
        shard = body["error"]["detail"]["shards"][0]
        assert shard["reason"] == "silent" and "STREAMS_HANG_MS" in shard["next_step"]
        status, body = ask(server, "POST", "/v0/boxes/orders", {"records": [{"data": 2}]})
        assert (status, body["error"]["code"]) == (503, "shard_unavailable")
        until(lambda: server.gateway_pids().get(1) not in (None, hung_gateway))
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        assert server.shard_pids()[0] != hung
        killed = {line["child"] for line in logged(server, "hangs: it is killed")}
        assert killed == {"shard-00", "gateway-1"}
        assert ask(server, "GET", "/v0/boxes/orders/tail")[1]["head_seq"] >= 1
        _, found = ask(server, "GET", "/v0/status")
        assert found["shards"][0]["restarts"] == {"hung": 1}


def test_doctor_names_a_hung_shard_and_ends(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=2, hang_ms="60s") as server:
        hung = server.shard_pids()[1]
        os.kill(hung, signal.SIGSTOP)
        try:
            until(lambda: logged(server, "no heartbeat"))
            code, rows = doctor(server)
        finally:
            os.kill(hung, signal.SIGCONT)
        assert code == 1
        assert rows["processes"]["result"] == "wrong"
        assert "shard-01 is away (silent" in rows["processes"]["found"]
        assert "STREAMS_HANG_MS" in rows["processes"]["next"]
        assert rows["address"]["result"] == rows["disk"]["result"] == "ok"
        # The next step that is printed is to wait: here the disk comes back.
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        assert doctor(server)[0] == 0
        assert logged(server, "sends heartbeats again")


def test_a_shard_without_its_cold_folder_says_so_and_comes_back_with_the_folder(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    with running_server(tmp_path / "data", shards=1, cold_dir=str(cold)) as server:
        assert ask(server, "POST", "/v0/boxes/orders", {"records": [{"data": 1}]})[0] == 201
        cold.rename(tmp_path / "lost mount")
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        # It was killed, so the first reason is another one.
        until(lambda: ask(server, "GET", "/v0/status")[1]["shards"][0].get("reason") == "cold_store")
        assert str(cold) in ask(server, "GET", "/v0/status")[1]["shards"][0]["detail"]
        status, body = ask(server, "GET", "/v0/ready")
        assert status == 503 and "STREAMS_COLD_DIR" in body["error"]["detail"]["shards"][0]["next_step"]
        status, body = ask(server, "GET", "/v0/boxes/orders")
        assert (status, body["error"]["detail"]["reason"]) == (503, "cold_store")
        assert str(cold) not in json.dumps(body), "clients are shown no path of the server"
        code, rows = doctor(server)
        assert code == 1 and "STREAMS_COLD_DIR" in rows["processes"]["next"]
        (tmp_path / "lost mount").rename(cold)
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        assert ask(server, "GET", "/v0/boxes/orders")[1]["count"] == 1
        assert "Traceback" not in server.log_text()


def test_a_damaged_log_is_named_and_the_printed_steps_bring_the_shard_back(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running_server(data_dir, shards=1) as server:
        for text in ("first", "the one in the middle", "last"):
            body = {"records": [{"data": text}], "config": {"durability": "fsync"}}
            assert ask(server, "POST", "/v0/boxes/orders", body)[0] in (200, 201)
        server.kill()
    (path,) = (data_dir / "shard-00" / "wal").glob("*.wal")
    flip(path, path.read_bytes().index(b"the one in the middle"))
    with running_server(data_dir) as server:
        status, body = ask(server, "GET", "/v0/ready")
        assert status == 503 and "damaged" in body["error"]["message"]
        status, body = ask(server, "GET", "/v0/boxes/orders")
        assert (status, body["error"]["detail"]["reason"]) == (503, "damaged")
        code, rows = doctor(server)
        assert code == 1
        for check in ("processes", "shards"):
            assert "`streams repair`" in rows[check]["next"] and "wait" not in rows[check]["next"], check
        assert str(path) in rows["processes"]["found"]
    assert streams("verify", "--data-dir", str(data_dir)).returncode == 6
    repaired = streams("repair", "--data-dir", str(data_dir), "--yes")
    assert repaired.returncode == 0, repaired.stderr
    with running_server(data_dir) as server:
        assert doctor(server)[0] == 0
        assert ask(server, "POST", "/v0/boxes/orders/diff", {})[1]["records"][0]["data"] == "first"
