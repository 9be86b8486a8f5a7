"""The supervisor keeps the tree alive, ends it in order, and lets nobody else near the data.

Goal: each promise at the top of `supervise/supervisor.py`. Method: a real supervisor in a real process, over
children that only keep its contract (`stand_in.py`) and tell what happens to them through a fifo. Nothing
sleeps: a test reads the next event, or waits for a process to end or a lock to be free.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from streams.testing import Server, ServerFailed, running_server

from .conftest import STAND_IN, Events

StandIns = Callable[..., AbstractContextManager[Server]]
Environ = Callable[..., dict[str, str]]


def log_lines(server: Server, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith(event)]


def streams(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "streams", *arguments],
        env=kept | environ,
        text=True,
        capture_output=True,
    )


def test_a_server_on_port_zero_says_where_it_is_and_who_runs_it(stand_ins: StandIns) -> None:
    with stand_ins(gateways=2) as server:
        facts = json.loads((server.data_dir / "run" / "server.json").read_bytes())
        assert facts == {
            "pid": server.pid,
            "url": f"http://127.0.0.1:{server.port}",
            "port": server.port,
            "shards": 2,
            "ready": True,
        }
        assert sorted(server.shard_pids()) == [0, 1]
        assert sorted(server.gateway_pids()) == [0, 1]
        socket.create_connection(("127.0.0.1", server.port)).close()
        run = server.data_dir / "run"
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    assert list(run.iterdir()) == []


def test_a_data_directory_with_a_long_path_is_served(tmp_path: Path, stand_in_environ: Environ) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with running_server(deep, command=STAND_IN, environ=stand_in_environ(), shards=1) as server:
        assert (deep / "run" / "shard-00.sock").is_socket()
        assert server.terminate() == 0


def test_gateways_end_before_shards_do(stand_ins: StandIns, events: Events) -> None:
    with stand_ins() as server:
        assert sorted(events.take(3)) == ["gateway-0 started", "shard-00 started", "shard-01 started"]
        assert server.terminate() == 0
        assert events.next() == "gateway-0 SIGTERM"
        assert sorted(events.take(2)) == ["shard-00 SIGTERM", "shard-01 SIGTERM"]


def test_a_crashing_shard_is_started_again_and_each_time_later(stand_ins: StandIns, events: Events) -> None:
    with stand_ins({"shard-01": ["crash", "crash", "crash", "serve"]}) as server:
        assert events.take(6).count("shard-01 started") == 4
        waits = [line["after_ms"] for line in log_lines(server, "process ended unexpectedly")]
        assert waits == [100, 200, 400]


@pytest.mark.parametrize("name", ["shard-00", "gateway-0"])
def test_a_killed_child_is_replaced_and_the_others_are_left_alone(
    stand_ins: StandIns, events: Events, name: str
) -> None:
    with stand_ins() as server:
        events.take(3)
        pids = {"shard-00": server.shard_pids(), "gateway-0": server.gateway_pids()}[name]
        os.kill(pids[0], signal.SIGKILL)
        assert events.next() == f"{name} started"
        assert log_lines(server, "process ended unexpectedly")[0]["cause"] == "SIGKILL"
        # The port kept listening: a connection made in between would have waited, not failed.
        socket.create_connection(("127.0.0.1", server.port)).close()


def test_a_shard_that_ends_by_itself_with_code_zero_is_started_again(
    stand_ins: StandIns, events: Events
) -> None:
    with stand_ins() as server:
        events.take(3)
        os.kill(server.shard_pids()[1], signal.SIGTERM)
        assert events.take(2) == ["shard-01 SIGTERM", "shard-01 started"]


def test_a_shard_with_damaged_data_is_not_started_again_and_the_others_serve(
    stand_ins: StandIns, events: Events
) -> None:
    with stand_ins({"shard-00": ["corrupt"]}) as server:
        assert sorted(events.take(3)) == ["gateway-0 started", "shard-00 started", "shard-01 started"]
        (line,) = log_lines(server, "shard stopped")
        assert line["why"] == "the log is torn at byte 17"
        assert "shard-00" in line["next_step"]
        assert log_lines(server, "server ready, but some shards do not serve")[0]["missing"] == ["shard-00"]
        assert sorted(server.shard_pids()) == [1]
        # Nobody will ever answer there, so a link is refused at once and does not wait.
        with socket.socket(socket.AF_UNIX) as link, pytest.raises(ConnectionRefusedError):
            link.connect(str(server.data_dir / "run" / "shard-00.sock"))
        assert server.terminate() == 0
    assert "shard-00 started" not in events.until("shard-01 SIGTERM")


def test_hangup_reaches_all_children_when_there_are_keys_to_read(stand_ins: StandIns, events: Events) -> None:
    with stand_ins(api_keys="a-secret-of-some-length") as server:
        events.take(3)
        os.kill(server.pid, signal.SIGHUP)
        assert sorted(events.take(3)) == ["gateway-0 SIGHUP", "shard-00 SIGHUP", "shard-01 SIGHUP"]
        assert server.terminate() == 0
        assert events.next() == "gateway-0 SIGTERM"


def test_a_data_directory_that_others_can_enter_is_warned_of(stand_ins: StandIns, tmp_path: Path) -> None:
    with stand_ins() as server:
        assert log_lines(server, "other users can access the data directory") == []
    (tmp_path / "data").chmod(0o755)
    with stand_ins() as server:
        [line] = log_lines(server, "other users can access the data directory")
        assert (line["level"], line["path"], line["mode"]) == ("warning", str(tmp_path / "data"), "0755")


def test_hangup_without_keys_is_nobodys_business(stand_ins: StandIns, events: Events) -> None:
    with stand_ins() as server:
        events.take(3)
        os.kill(server.pid, signal.SIGHUP)
        assert server.terminate() == 0
        assert events.next() == "gateway-0 SIGTERM"


def test_a_server_that_is_stopped_before_it_was_ready_never_says_it_is(
    events: Events, stand_in_environ: Environ, tmp_path: Path
) -> None:
    settings = {"STREAMS_DATA_DIR": str(tmp_path / "data"), "STREAMS_PORT": "0", "STREAMS_SHARDS": "1"}
    environ = os.environ | stand_in_environ({"shard-00": ["mute"]}) | settings
    with subprocess.Popen(STAND_IN, env=environ, stderr=subprocess.PIPE, text=True) as server:
        assert sorted(events.take(2)) == ["gateway-0 started", "shard-00 started"]
        server.terminate()
        _, logged = server.communicate()
    assert server.returncode == 0
    assert [json.loads(line)["event"] for line in logged.splitlines()] == [
        "server is stopping",
        "server stopped",
    ]


def test_a_child_that_does_not_end_in_time_is_killed(stand_ins: StandIns, events: Events) -> None:
    with stand_ins({"gateway-0": ["stubborn"]}, drain_ms=1) as server:
        assert server.terminate() == 0
        assert log_lines(server, "killed")[0]["child"] == "gateway-0"


def test_a_test_is_warned_of_a_server_that_had_to_be_killed_in_part(
    stand_ins: StandIns, events: Events
) -> None:
    with (
        pytest.warns(UserWarning, match=r"had to be killed\n(.|\n)*gateway-0"),
        stand_ins({"gateway-0": ["stubborn"]}, drain_ms=1),
    ):
        pass


def test_a_second_interrupt_waits_no_longer(stand_ins: StandIns, events: Events) -> None:
    with stand_ins({"gateway-0": ["stubborn"], "shard-00": ["stubborn"]}, drain_ms="10m") as server:
        events.take(3)
        os.kill(server.pid, signal.SIGINT)
        assert events.next() == "gateway-0 SIGTERM"
        os.kill(server.pid, signal.SIGINT)
        events.until("shard-00 SIGTERM")
        os.kill(server.pid, signal.SIGINT)
        assert server.wait() == 0


def test_a_second_server_on_the_same_data_is_refused_and_told_who_holds_it(stand_ins: StandIns) -> None:
    with stand_ins() as server:
        refused = streams("serve", "--data-dir", str(server.data_dir), "--port", "0")
        assert refused.returncode == 2
        for fact in (str(server.data_dir), f"process {server.pid}", server.url, "STREAMS_DATA_DIR"):
            assert fact in refused.stderr


def test_when_the_supervisor_is_killed_its_children_end_and_free_the_lock(
    stand_ins: StandIns, events: Events
) -> None:
    with stand_ins() as server:
        events.take(3)
        server.process.kill()
        server.wait_until_gone()
        assert sorted(events.take(3)) == ["gateway-0 orphaned", "shard-00 orphaned", "shard-01 orphaned"]
    with stand_ins() as again:
        assert again.terminate() == 0


def test_a_new_server_waits_for_the_last_child_of_a_killed_one(
    stand_ins: StandIns, events: Events, stand_in_environ: Environ, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    os.mkfifo(release)
    with stand_ins({"shard-00": ["lingering", "serve"]}) as server:
        events.take(3)
        server.process.kill()
        server.process.wait()
        events.until("shard-00 orphaned")
        settings = {
            "STREAMS_DATA_DIR": str(server.data_dir),
            "STREAMS_PORT": "0",
            "STREAMS_LOG_FORMAT": "json",
        }
        with subprocess.Popen(
            STAND_IN, env=os.environ | stand_in_environ() | settings, stderr=subprocess.PIPE, text=True
        ) as successor:
            assert successor.stderr is not None
            assert "waiting for processes of an earlier server" in successor.stderr.readline()
            with open(server.data_dir / "LOCK") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            release.write_text("x")
            events.until("shard-00 started")
            successor.terminate()
            successor.stderr.read()
            assert successor.wait() == 0


def test_kill_leaves_no_process_behind(stand_ins: StandIns) -> None:
    with stand_ins() as server:
        server.kill()
        with open(server.data_dir / "LOCK") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_number_of_shards_comes_from_the_data_once_there_is_some(
    tmp_path: Path, stand_ins: StandIns, stand_in_environ: Environ
) -> None:
    with stand_ins(shards=3) as server:
        manifest = json.loads((server.data_dir / "manifest.json").read_bytes())
        assert (manifest["format"], manifest["shards"], manifest["version"]) == (3, 3, 1)
        assert manifest["slots"] == [[0, 1366, 0], [1366, 2731, 1], [2731, 4096, 2]]
    with running_server(tmp_path / "data", command=STAND_IN, environ=stand_in_environ()) as server:
        assert len(server.shard_pids()) == 3


def test_an_open_address_without_keys_is_refused(tmp_path: Path) -> None:
    refused = streams("serve", "--host", "0.0.0.0", "--data-dir", str(tmp_path))
    assert refused.returncode == 2
    for way_out in ("STREAMS_API_KEYS", "127.0.0.1", "STREAMS_ALLOW_INSECURE_NO_AUTH=1"):
        assert way_out in refused.stderr


def test_a_malformed_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    refused = streams("serve", STREAMS_DATA_DIR=str(tmp_path), STREAMS_API_KEYS="user:hunter2")
    assert refused.returncode == 2
    assert "STREAMS_API_KEYS: entry 1: " in refused.stderr and "hunter2" not in refused.stderr


def test_a_port_in_use_is_refused_by_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = streams("serve", "--port", str(port), "--data-dir", str(tmp_path))
    assert refused.returncode == 2
    assert f"127.0.0.1:{port}" in refused.stderr
    assert "STREAMS_PORT" in refused.stderr


def test_a_child_that_never_comes_up_fails_the_test_that_waits_for_it(stand_ins: StandIns) -> None:
    with pytest.raises(ServerFailed, match="shard-01 keeps failing"), stand_ins({"shard-01": ["crash"]}):
        pass


def test_a_server_that_cannot_start_says_so_to_the_test_that_wanted_it(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="it must be one of"), running_server(tmp_path, log="loud"):
        pass
