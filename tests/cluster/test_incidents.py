"""What an on-call engineer sees in an incident, and that the next step that is printed is the one that works.

Method: a real server, one thing broken in it as a machine would break it. The test looks at everything that
an engineer would look at: the readiness probe, the status, `streams status` and `streams doctor`, the log,
the metrics, the answer to a client, and the alerts that fire for these metrics (by promtool, where it can be
had). Then it takes the printed step, and nothing is wrong any more.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from streams.testing import Server, running_server
from tests.cluster.test_damage import flip, serve
from tests.cluster.test_segments import sealed, segments_of, serving
from tests.support import debian, promtool
from tests.support.crashing import Client, eventually
from tests.support.small_disk import small_disk

#: A machine that is busy with other tests must not look like one that hangs.
HANG_MS = 4000
ADMIN, READER = "admin-key-0123456789", "reader-key-0123456789"
RUNBOOK = Path(__file__).parents[2] / "docs" / "howto" / "runbook.md"


def ask(
    server: Server, method: str, path: str, body: Any = None, key: str = "", as_text: bool = False
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(server.url + path, data, headers, method=method)
    try:
        with urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except HTTPError as error:
        status, text = error.code, error.read()
    return status, text.decode() if as_text else json.loads(text)


def append(server: Server, box: str, *values: Any, key: str = "", **config: Any) -> int:
    body = {"records": [{"data": value} for value in values], **({"config": config} if config else {})}
    return ask(server, "POST", f"/v0/boxes/{box}", body, key)[0]


def until(holds: Callable[[], Any]) -> Any:
    """Ask until it holds. The time limit of the test is what ends it otherwise."""
    while not (found := holds()):
        pass
    return found


def logged(server: Server, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith(event)]


def streams(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "streams", *words]
    environment = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


class Look(NamedTuple):
    """Everything that an engineer looks at."""

    ready: tuple[int, dict[str, Any]]
    #: The rows of `/v0/status` and of `streams doctor`, by check.
    checks: dict[str, dict[str, Any]]
    status: dict[str, Any]
    doctor_code: int
    doctor: dict[str, dict[str, Any]]
    metrics: promtool.Series

    @property
    def wrong(self) -> set[str]:
        """The checks of the server that are wrong, on which status and doctor agree."""
        rows = {name for name, row in self.checks.items() if row["result"] == "wrong"}
        assert rows == {name for name in self.checks if self.doctor[name]["result"] == "wrong"}
        assert self.doctor_code == int(any(row["result"] == "wrong" for row in self.doctor.values()))
        for name in rows:
            assert self.checks[name]["next_step"] == self.doctor[name]["next"] != ""
        return rows

    def value(self, name: str, **labels: str) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            value
            for series, value in self.metrics.items()
            if series.partition("{")[0] == name and all(each in series for each in wanted)
        ]
        assert found, f"{name} {labels} is not among the metrics"
        return sum(found)


def metrics_of(server: Server, key: str = "") -> promtool.Series:
    return promtool.series_of(ask(server, "GET", "/v0/metrics", key=key, as_text=True)[1])


def look(server: Server, key: str = "") -> Look:
    status = ask(server, "GET", "/v0/status", key=key)[1]
    # A machine that is busy with other tests answers late.
    ran = streams("doctor", "--json", "--timeout", "60", "--url", server.url, STREAMS_KEY=key)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return Look(
        ready=ask(server, "GET", "/v0/ready", key=key),
        checks={row["check"]: row for row in status["checks"]},
        status=status,
        doctor_code=ran.returncode,
        doctor={row["check"]: row for row in rows},
        metrics=metrics_of(server, key),
    )


def wrong_now(server: Server, key: str = "") -> set[str]:
    checks = ask(server, "GET", "/v0/status", key=key)[1]["checks"]
    return {row["check"] for row in checks if row["result"] == "wrong"}


def assert_fires(before: promtool.Series, during: promtool.Series, folder: Path, *alerts: str) -> None:
    """The metrics of a server that is well, then those of the incident, fire these alerts."""
    try:
        promtool.program("promtool")
    except debian.NotInstalled as error:
        warnings.warn(f"alerts are not looked at: {error}", stacklevel=2)
        return
    fired = promtool.firing({"server": (before, during)}, folder)["server"]
    assert set(alerts) <= fired, fired
    # A machine that runs tests may be short of disk or memory by itself.
    assert fired - set(alerts) <= {"StreamsRestarts", "StreamsDiskFillsUp", "StreamsUnderPressure"}, fired


def runbook(alert: str, block: str = "sh") -> str:
    """The commands of a section."""
    (section,) = re.findall(rf"^## {alert}\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.DOTALL | re.MULTILINE)
    return "".join(re.findall(rf"^```{block}\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


def follow(alert: str, block: str, data_dir: Path) -> None:
    """Run the commands of the runbook as they are."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "STREAMS_DATA_DIR": str(data_dir)}
    script = ["bash", "-euo", "pipefail", "-c", runbook(alert, block)]
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_hung_process_is_named_and_restarted_and_requests_to_it_fail_meanwhile(tmp_path: Path) -> None:
    """SIGSTOP simulates a disk that hangs: the process is there, its sockets are open, nothing moves."""
    with running_server(tmp_path / "data", shards=1, gateways=2, hang_ms=HANG_MS) as server:
        assert append(server, "orders", 1) == 201
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
        until(lambda: ask(server, "GET", "/v0/status")[1]["status"] == "ready")
        assert server.shard_pids()[0] != hung
        killed = {line["child"] for line in logged(server, "process hangs: killing")}
        assert killed == {"shard-00", "gateway-1"}
        assert ask(server, "GET", "/v0/boxes/orders/tail")[1]["head_seq"] >= 1
        status = ask(server, "GET", "/v0/status")[1]
        (row,) = [row for row in status["checks"] if row["check"] == "restarts"]
        assert row["result"] == "wrong" and "shard-00 was restarted: hung" in row["found"]
        assert metrics_of(server)['streams_restarts_total{process="shard-00",reason="hung"}'] >= 1


def test_doctor_names_a_hung_shard_and_ends(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=2, hang_ms="60s") as server:
        before = metrics_of(server)
        hung = server.shard_pids()[1]
        os.kill(hung, signal.SIGSTOP)
        try:
            until(lambda: logged(server, "no heartbeat"))
            found = look(server)
            shown = streams("status", "--url", server.url)
        finally:
            os.kill(hung, signal.SIGCONT)
        assert found.wrong == {"processes"} and found.ready[0] == 503
        assert "shard-01 is away (silent" in found.doctor["processes"]["found"]
        assert "STREAMS_HANG_MS" in found.doctor["processes"]["next"]
        assert shown.returncode == 3 and "STREAMS_HANG_MS" in shown.stdout
        assert found.value("streams_process_down", process="shard-01", reason="silent") == 1
        assert_fires(before, found.metrics, tmp_path, "StreamsHung", "StreamsShardAway")
        # The next step that is printed is to wait: here the disk comes back.
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        assert wrong_now(server) == set()
        assert logged(server, "process sends heartbeats again")


def test_a_crash_loop_shows_although_the_shard_is_ready_at_each_look(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1) as server:
        assert append(server, "orders", 1, durability="fsync") == 201
        before = metrics_of(server)
        for _ in range(3):  # as the kernel does when memory is short
            pid = until(lambda: server.shard_pids().get(0))
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: server.shard_pids().get(0) not in (None, pid))
            until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        found = look(server)
        assert found.ready[0] == 200 and found.status["status"] == "ready"
        assert found.wrong == {"restarts"}
        assert "shard-00 was restarted: crashed 3 times" in found.checks["restarts"]["found"]
        assert found.value("streams_restarts_total", process="shard-00", reason="crashed") == 3
        assert_fires(before, found.metrics, tmp_path, "StreamsCrashLoop")
        # The next step is to look for this line, which has the cause.
        assert "`ended unexpectedly`" in found.checks["restarts"]["next_step"]
        causes = [line["cause"] for line in logged(server, "process ended unexpectedly")]
        assert causes == ["SIGKILL"] * 3
        assert ask(server, "GET", "/v0/boxes/orders")[1]["count"] == 1


def test_a_full_disk_is_named_and_freeing_space_ends_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        data_dir = disk.path / "data"
        with running_server(data_dir, shards=1, wal_file_bytes="4MiB", **disk.settings) as server:
            assert append(server, "orders", 1) == 201
            before = metrics_of(server)
            disk.fill_below_low()
            eventually(lambda: ask(server, "GET", "/v0/ready")[1].get("disk") == "low")
            found = look(server)
            assert append(server, "orders", 2) == 507
            assert found.wrong == {"disk"} and "refused with 507" in found.checks["disk"]["found"]
            assert (found.ready[0], found.ready[1]["disk"], found.status["disk"]["level"]) == (
                200,
                "low",
                "low",
            )
            assert found.value("streams_disk_level", shard="0") == 1
            assert logged(server, "the disk is nearly full")
            assert_fires(before, found.metrics, tmp_path, "StreamsDiskFull")
            assert found.checks["disk"]["next_step"].startswith("free space")
            disk.empty()
            eventually(lambda: append(server, "orders", 2) == 200)
            assert "507" not in ask(server, "GET", "/v0/status")[1]["checks"][2]["found"]


def test_a_cold_store_that_is_away_is_named_and_all_is_well_when_it_is_back(tmp_path: Path) -> None:
    cold, lost = tmp_path / "cold", tmp_path / "lost mount"
    cold.mkdir()
    settings = {"cold_dir": str(cold), "hot_retain_segments": 1, "segment_max_bytes": "1KiB"}
    data_dir = tmp_path / "data"
    with serving(data_dir, cache_bytes="64KiB", **settings) as server:
        for at in range(4):
            assert append(server, "orders", *[[at, each, "x" * 200] for each in range(5)]) in (200, 201)
        eventually(lambda: len(segments_of(data_dir, ".stub")) >= 2)
        eventually(lambda: len(segments_of(data_dir)) <= 2)
        os.kill(server.shard_pids()[0], signal.SIGKILL)  # what it has in memory would do without
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        before = metrics_of(server)
        cold.rename(lost)
        status, body = ask(server, "POST", "/v0/boxes/orders/diff", {"limit": 5})
        assert (status, body["error"]["code"]) == (503, "cold_store_unavailable")
        assert str(tmp_path) not in json.dumps(body), "clients are shown no path of the server"
        found = look(server)
        assert found.wrong == {"cold store", "restarts"} and found.ready[0] == 200
        assert "STREAMS_COLD_DIR" in found.checks["cold store"]["next_step"]
        assert found.value("streams_cold_store_failures_total", operation="read") >= 1
        assert found.value("streams_cold_store_failing_seconds", shard="0") > 0
        assert logged(server, "cannot read from the cold store")
        later = found.metrics | {'streams_cold_store_failing_seconds{shard="0"}': 90.0}
        assert_fires(before, later, tmp_path, "StreamsColdStoreAway")
        # A shard that has to start without it cannot.
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        until(lambda: ask(server, "GET", "/v0/status")[1]["shards"][0].get("reason") == "cold_store")
        assert str(cold) in ask(server, "GET", "/v0/status")[1]["shards"][0]["detail"]
        until(lambda: sum(ask(server, "GET", "/v0/status")[1]["shards"][0]["restarts"].values()) >= 5)
        found = look(server)
        assert found.wrong >= {"processes"} and "STREAMS_COLD_DIR" in found.doctor["processes"]["next"]
        detail = found.ready[1]["error"]["detail"]
        assert found.ready[0] == 503 and "STREAMS_COLD_DIR" in detail["shards"][0]["next_step"]
        status, body = ask(server, "GET", "/v0/boxes/orders")
        assert (status, body["error"]["detail"]["reason"]) == (503, "cold_store")
        assert str(cold) not in json.dumps(body), "clients are shown no path of the server"
        assert found.value("streams_process_down", process="shard-00", reason="cold_store") == 1
        alerts = ("StreamsColdStoreAway", "StreamsShardAway", "StreamsCrashLoop")
        assert_fires(before, found.metrics, tmp_path, *alerts)
        lost.rename(cold)
        until(lambda: ask(server, "GET", "/v0/ready")[0] == 200)
        page = ask(server, "POST", "/v0/boxes/orders/diff", {"limit": 100})[1]
        assert [record["$seq"] for record in page["records"]] == list(range(1, 21))
        assert wrong_now(server) == {"restarts"}
        assert "Traceback" not in server.log_text()


def test_a_damaged_log_is_named_and_the_printed_steps_bring_the_shard_back(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running_server(data_dir, shards=1) as server:
        for text in ("first", "the one in the middle", "last"):
            assert append(server, "orders", text, durability="fsync") in (200, 201)
        before = metrics_of(server)
        server.kill()
    (path,) = (data_dir / "shard-00" / "wal").glob("*.wal")
    flip(path, path.read_bytes().index(b"the one in the middle"))
    with running_server(data_dir) as server:
        found = look(server)
        status, body = found.ready
        assert status == 503 and "damaged" in body["error"]["message"]
        status, body = ask(server, "GET", "/v0/boxes/orders")
        assert (status, body["error"]["detail"]["reason"]) == (503, "damaged")
        assert str(path) not in json.dumps(body), "clients are shown no path of the server"
        assert found.wrong == {"processes"}
        for check in ("processes", "shards"):
            step = found.doctor[check]["next"]
            assert "`streams repair`" in step and "wait" not in step, check
        assert str(path) in found.doctor["processes"]["found"]
        assert found.value("streams_process_down", process="shard-00", reason="damaged") == 1
        assert logged(server, "shard stopped: its data is damaged")
        assert_fires(before, found.metrics, tmp_path, "StreamsDamage", "StreamsShardAway")
    follow("StreamsDamage", "sh-stopped", data_dir)
    with running_server(data_dir) as server:
        assert wrong_now(server) == set()
        assert ask(server, "POST", "/v0/boxes/orders/diff", {})[1]["records"][0]["data"] == "first"


def test_a_damaged_segment_is_named_and_the_printed_steps_make_the_box_readable(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    sealed(data_dir, 3, "orders")
    damaged = segments_of(data_dir)[1]
    flip(damaged, 150)
    with serving(data_dir) as server:
        before = metrics_of(server)
        status, body = ask(server, "POST", "/v0/boxes/orders/diff", {"limit": 100})
        assert (status, body["error"]["code"]) == (503, "data_damaged")
        found = look(server)
        assert found.ready[0] == 200 and found.wrong == {"damage"}
        assert (
            str(damaged) in found.doctor["damage"]["found"]
            and "box orders" in found.doctor["damage"]["found"]
        )
        assert "`streams repair`" in found.doctor["damage"]["next"]
        assert found.value("streams_damaged_files", shard="0", kind="segment") == 1
        assert found.value("streams_damage_total", shard="0", kind="segment") >= 1
        assert logged(server, "a segment is damaged and cannot be read")[0]["path"] == str(damaged)
        assert_fires(before, found.metrics, tmp_path, "StreamsDamage")
    follow("StreamsDamage", "sh-stopped", data_dir)
    with serving(data_dir) as server:
        records, tombstones, _ = Client(server.port).read_all("orders")
        assert list(records) == [*range(1, 6), *range(11, 16)] and len(tombstones) == 1
        assert wrong_now(server) == set()


def test_a_clock_that_was_set_is_named_and_a_restart_takes_the_new_time(tmp_path: Path) -> None:
    """The clock of a machine that runs tests is not ours to set: the server's processes read another one."""
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "real = time.time_ns\n"
        f"time.time_ns = lambda: real() + 1_000_000_000 * int(open({str(ahead)!r}).read() or 0)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    with running_server(tmp_path / "data", environ=environ, shards=1) as server:
        assert append(server, "orders", 1) == 201
        before = metrics_of(server)
        ahead.write_text("3600")
        until(lambda: logged(server, "the system clock was set"))
        found = look(server)
        assert found.ready[0] == 200 and found.wrong == {"clock"}
        assert "ahead of the time of the shards" in found.checks["clock"]["found"]
        assert found.value("streams_clock_ahead_seconds", shard="0") > 3000
        assert found.value("streams_clock_steps_total", shard="0") == 1
        assert_fires(before, found.metrics, tmp_path, "StreamsClockSet")
        assert "restart the server" in found.checks["clock"]["next_step"]
    with running_server(tmp_path / "data", environ=environ) as server:
        assert wrong_now(server) == set()
        assert append(server, "orders", 2) == 200
        records = ask(server, "POST", "/v0/boxes/orders/diff", {})[1]["records"]
        assert records[1]["$ts"] - records[0]["$ts"] >= 3_600_000


def test_keys_that_cannot_be_read_are_named_and_a_reload_takes_them_when_they_can(tmp_path: Path) -> None:
    keys, aside = tmp_path / "keys", tmp_path / "aside"
    keys.write_text(f"{ADMIN}\n{READER}:read\n")
    keys.chmod(0o600)
    with running_server(tmp_path / "data", shards=1, api_keys_file=keys) as server:
        before = metrics_of(server, ADMIN)
        assert wrong_now(server, ADMIN) == set()
        keys.rename(aside)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: logged(server, "the key file cannot be read"))
        found = look(server, ADMIN)
        assert found.ready[0] == 200 and found.wrong == {"keys"}
        assert str(keys) in found.checks["keys"]["found"] and "SIGHUP" in found.checks["keys"]["next_step"]
        shown = ask(server, "GET", "/v0/status", key=READER)[1]["checks"]
        assert [row["check"] for row in shown if row["result"] == "wrong"] == ["keys"]
        assert str(tmp_path) not in json.dumps(shown), "paths are for operators"
        assert found.value("streams_keys_file_readable") == 0
        assert_fires(before, found.metrics, tmp_path, "StreamsKeysUnreadable")
        # The row warns of a restart: a server does not start without its keys.
        refused = serve(STREAMS_DATA_DIR=str(tmp_path / "other"), STREAMS_API_KEYS_FILE=str(keys))
        assert refused.returncode == 2 and str(keys) in refused.stderr
        aside.rename(keys)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: logged(server, "the key file can be read again"))
        assert wrong_now(server, ADMIN) == set()
