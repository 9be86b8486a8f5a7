"""Goal: a full disk stops writes and nothing else, loses nothing that was acked, and is over when it is over.

Method: a real server on a small disk that the test fills and empties. Two watermarks, the last byte, a shard
that is killed, a server that is started: all on one server, one after the other, because each takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.testing import Server, running_server
from tests.support.crashing import eventually
from tests.support.small_disk import SmallDisk, small_disk


class Caller:
    """Plain HTTP to a server, with the statuses as they come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.headers: dict[str, str] = {}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self._url}{path}", data, method=method)
        for name, value in {"content-type": "application/json", **named}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, text, found = error.code, error.read(), error.headers
        self.headers = {name.lower(): value for name, value in found.items()}
        return status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def append(self, box: str, *records: Any) -> int:
        return self("POST", f"/v0/boxes/{box}", {"records": [{"data": each} for each in records]})[0]

    def count(self, box: str) -> int:
        status, page = self("POST", f"/v0/boxes/{box}/diff", {"limit": 10_000, "max_bytes": 8 << 20})
        assert status == 200, page
        return len(page["records"])

    def level(self) -> str:
        return str(self("GET", "/v0/status")[1]["disk"]["level"])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("full") / "disk") as disk:
        yield disk


@pytest.fixture(scope="module")
def running(disk: SmallDisk) -> Iterator[list[Server]]:
    """The server; a test may put another in its place."""
    with running_server(disk.path / "data", shards=1, wal_file_bytes="4MiB", **disk.settings) as server:
        api = Caller(server.url)
        assert api("PUT", "/v0/boxes/jobs", {"type": "queue"})[0] == 201
        assert api("PUT", "/v0/boxes/quick", {"durability": "memory"})[0] == 201
        assert (api.append("log", 1, 2, 3), api.append("jobs", 1, 2, 3)) == (201, 200)
        assert api("PUT", "/v0/boxes/log/groups/g", {"cursor": 0})[0] in (200, 201)
        assert api("POST", "/v1/basins", {"basin": "a-basin-of-s2"})[0] == 201
        assert api("POST", "/v1/streams", {"stream": "s"}, s2_basin="a-basin-of-s2")[0] == 201
        yield [server]


def test_below_the_low_watermark_adding_is_refused_and_all_else_goes_on(
    disk: SmallDisk, running: list[Server]
) -> None:
    server, api = running[0], Caller(running[0].url)
    pids = server.shard_pids()
    claimed = api("POST", "/v0/boxes/jobs/claim", {"node": "w", "max": 2, "lease_ms": 60_000})[1]
    seqs = [job["$seq"] for job in claimed["claimed"]]
    disk.fill_below_low()
    eventually(lambda: api.level() == "low")
    try:
        status, answer = api("POST", "/v0/boxes/log", {"records": [{"data": 4}]})
        assert (status, answer["error"]["code"], api.headers["retry-after"]) == (507, "disk_full", "5")
        assert api("PUT", "/v0/boxes/new", {})[0] == 507
        assert api("PUT", "/v0/boxes/log/groups/new", {"cursor": 0})[0] == 507
        assert api("PUT", "/v0/routers/r", {"source": "log", "dest": "quick"})[0] == 507
        records = {"records": [{"body": "x"}]}
        status, answer = api("POST", "/v1/streams/s/records", records, s2_basin="a-basin-of-s2")
        assert (status, answer["code"], api.headers["retry-after"]) == (502, "hot_server", "5")
        trim = {"records": [{"headers": [["", "trim"]], "body": "AAAAAAAAAAA="}]}
        headers = {"s2_basin": "a-basin-of-s2", "s2_format": "base64"}
        trim["records"][0]["headers"] = [["", "dHJpbQ=="]]  # type: ignore[index]
        assert api("POST", "/v1/streams/s/records", trim, **headers)[0] == 200

        assert api.count("log") == 3
        assert api("POST", "/v0/boxes/jobs/ack", {"node": "w", "seqs": seqs[:1]})[0] == 200
        assert api("POST", "/v0/boxes/jobs/nack", {"node": "w", "seqs": seqs[1:]})[0] == 200
        assert api("POST", "/v0/boxes/jobs/claim", {"node": "w"})[0] == 200
        assert api("PUT", "/v0/boxes/log/groups/g", {"cursor": 1})[0] == 200
        assert api("PUT", "/v0/boxes/log", {"cap_records": 1000})[0] == 200
        assert api("POST", "/v0/boxes/log/delete", {"before_seq": 2})[0] == 200
        assert api.append("quick", 1) == 200  # into memory
        status, ready = api("GET", "/v0/ready")
        assert (status, ready["disk"]) == (200, "low")
        metrics = api("GET", "/v0/metrics")[1]
        assert 'streams_disk_level{shard="0"} 1' in metrics
    finally:
        disk.empty()
    eventually(lambda: api.append("log", 4) == 200)
    assert api("GET", "/v0/ready")[1]["disk"] == "ok"
    assert server.shard_pids() == pids
    log = server.log_text()
    assert log.count("the disk is nearly full") == log.count("the disk has space again") == 1


def test_below_the_full_watermark_reads_go_on_and_nothing_else(
    disk: SmallDisk, running: list[Server]
) -> None:
    server, api = running[0], Caller(running[0].url)
    pids = server.shard_pids()
    disk.fill_below_full()
    eventually(lambda: api.level() == "full")
    try:
        refused = [
            api("POST", "/v0/boxes/log", {"records": [{"data": 4}]}),
            api("POST", "/v0/boxes/log/delete", {"before_seq": 2}),
            api("POST", "/v0/boxes/jobs/claim", {"node": "w", "wait_ms": 0}),
            api("DELETE", "/v0/boxes/jobs"),
        ]
        assert [(status, answer["error"]["code"]) for status, answer in refused] == [(507, "disk_full")] * 4
        assert api.count("log") == 3 and api.append("quick", 2) == 200
        assert api("GET", "/v0/ready")[0] == 200
    finally:
        disk.empty()
    eventually(lambda: api.append("log", 5) == 200)
    assert server.shard_pids() == pids


def test_a_disk_that_fills_to_the_last_byte_under_writers_loses_no_ack_and_ends_no_shard(
    disk: SmallDisk, running: list[Server]
) -> None:
    server, api = running[0], Caller(running[0].url)
    pids = server.shard_pids()
    acked = 0
    statuses: set[int] = set()
    is_over = threading.Event()

    def write() -> None:
        nonlocal acked
        caller = Caller(server.url)
        while not is_over.is_set():
            status = caller.append("busy", "x" * 20_000)
            statuses.add(status)
            acked += status < 300

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: acked > 20)
        disk.fill_whole()
        eventually(lambda: 507 in statuses)
        assert api.count("log") == 4
    finally:
        is_over.set()
        disk.empty()
    writer.join()
    assert statuses == {201, 200, 507}
    eventually(lambda: api.append("busy", "last") == 200)
    assert api.count("busy") == acked + 1
    assert server.shard_pids() == pids


def test_a_shard_that_dies_on_a_full_disk_comes_back_and_serves_reads(
    disk: SmallDisk, running: list[Server]
) -> None:
    server, api = running[0], Caller(running[0].url)
    before = server.shard_pids()
    disk.fill_whole()
    try:
        eventually(lambda: api.level() == "full")
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: api("GET", "/v0/ready")[0] == 200 and api.level() == "full")
        assert api.count("log") == 4
        assert api.append("log", 6) == 507
    finally:
        disk.empty()
    eventually(lambda: api.append("log", 6) == 200)
    assert server.log_text().count("ended unexpectedly") <= 1


def test_a_server_that_is_started_on_a_full_disk_serves_reads(
    disk: SmallDisk, running: list[Server], tmp_path: Path
) -> None:
    running[0].kill()
    disk.fill_whole()
    with running_server(disk.path / "data", shards=1, wal_file_bytes="4MiB", **disk.settings) as server:
        api = Caller(server.url)
        assert api.count("log") == 5
        assert api.append("log", 7) == 507
        disk.empty()
        eventually(lambda: api.append("log", 7) == 200)
        assert api.count("log") == 6
