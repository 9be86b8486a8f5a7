"""Goal: what is damaged, taken or open to the world is refused by name and next step; the rest serves.

Method: real servers; bytes of a stopped one's files are changed; what a start then says is read from its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.testing import Server, ServerFailed, running_server
from tests.support.crashing import Client, box_on

SHARDS = 2
DAMAGED, WHOLE = box_on(0, SHARDS, "box"), box_on(1, SHARDS, "box")


def filled(data_dir: Path, *texts: str, kill: bool = False) -> None:
    """A life of a server that wrote each text into both boxes and was stopped."""
    with running_server(data_dir, shards=SHARDS) as server:
        client = Client(server.port)
        for text in texts:
            client.append(DAMAGED, text, config={"durability": "fsync"})
            client.append(WHOLE, text, config={"durability": "fsync"})
        if kill:
            server.kill()


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def log_lines(text: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith(event)]


def texts_of(server: Server, box: str) -> list[str]:
    records, tombstones, _ = Client(server.port).read_all(box)
    assert tombstones == []
    return list(records.values())


def serve(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    command = [sys.executable, "-P", "-m", "streams", "serve", *arguments]
    return subprocess.run(command, env=kept | environ, text=True, capture_output=True, timeout=60)


# -- the log


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_damaged_log_stops_its_shard_and_no_other(tmp_path: Path, killed: bool) -> None:
    filled(tmp_path, "first", "the one in the middle", "last", kill=killed)
    (path,) = (tmp_path / "shard-00" / "wal").glob("*.wal")
    before = path.read_bytes()
    at = before.index(b"the one in the middle")
    flip(path, at)
    with running_server(tmp_path) as server:
        client = Client(server.port)
        assert texts_of(server, WHOLE) == ["first", "the one in the middle", "last"]
        client.append(WHOLE, "and on")
        refused = client.send("POST", f"/v0/boxes/{DAMAGED}/diff", {})
        assert (refused.status, refused.code) == (503, "shard_unavailable")
        assert client.send("GET", "/v0/ready").status == 503

        (told,) = log_lines(server.log_text(), "shard stopped: its data is damaged")
        assert told["child"] == "shard-00"
        assert str(path) in told["why"] and str(path.parent.parent) in told["next_step"]
        (found,) = log_lines(server.log_text(), "data is damaged")
        assert found["path"] == str(path)
        # The offset is that of the frame, whose head of 16 bytes and columns stand before the text.
        assert at - 200 < found["offset"] < at
        assert f"at byte {found['offset']}" in told["why"]
        ready = log_lines(server.log_text(), "server ready, but some shards do not serve")[0]
        assert ready["missing"] == ["shard-00"]
        # Exit code 3: it was started once, and not again.
        assert sorted(server.shard_pids()) == [1]
        assert log_lines(server.log_text(), "process ended unexpectedly") == []
        assert server.terminate() == 0
    damaged = bytearray(before)
    damaged[at] ^= 1
    assert path.read_bytes() == bytes(damaged), "nothing was changed by the refusal"
    flip(path, at)
    with running_server(tmp_path) as server:
        assert texts_of(server, DAMAGED) == ["first", "the one in the middle", "last"]
        assert texts_of(server, WHOLE)[-1] == "and on"


def test_a_log_file_that_is_missing_is_named(tmp_path: Path) -> None:
    filled(tmp_path, "first")
    filled(tmp_path, "second")
    first, *_ = sorted((tmp_path / "shard-00" / "wal").glob("*.wal"))
    kept = first.rename(tmp_path / "kept")
    with running_server(tmp_path) as server:
        (told,) = log_lines(server.log_text(), "shard stopped: its data is damaged")
        assert "missing" in told["why"]
        assert texts_of(server, WHOLE) == ["first", "second"]
    kept.rename(first)
    with running_server(tmp_path) as server:
        assert texts_of(server, DAMAGED) == ["first", "second"]


# -- snapshots


def test_a_damaged_newest_snapshot_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    filled(tmp_path, "first")
    filled(tmp_path, "second")
    older, newest = sorted((tmp_path / "shard-00" / "snapshot").glob("*.snap"))
    flip(newest, newest.stat().st_size // 2)
    with running_server(tmp_path) as server:
        (told,) = log_lines(server.log_text(), "a snapshot is damaged; recovery used an older one")
        assert (told["path"], told["process"]) == (str(newest), "shard-00")
        recovered = {line["process"]: line for line in log_lines(server.log_text(), "shard recovered")}
        assert recovered["shard-00"]["snapshot_lsn"] == int(older.stem)
        assert texts_of(server, DAMAGED) == ["first", "second"]
        Client(server.port).append(DAMAGED, "third")
    # The damaged one has made place, and what is kept is whole.
    assert not newest.exists() and len(list(newest.parent.glob("*.snap"))) == 2
    with running_server(tmp_path) as server:
        assert log_lines(server.log_text(), "a damaged snapshot") == []
        assert texts_of(server, DAMAGED) == ["first", "second", "third"]


def test_a_shard_without_a_whole_snapshot_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, "first")
    filled(tmp_path, "second")
    for path in (tmp_path / "shard-00" / "snapshot").glob("*.snap"):
        flip(path, path.stat().st_size // 2)
    with running_server(tmp_path) as server:
        (told,) = log_lines(server.log_text(), "shard stopped: its data is damaged")
        assert "no older snapshot is valid" in told["why"]
        assert texts_of(server, WHOLE) == ["first", "second"]


# -- who may serve


def test_a_second_server_on_the_same_data_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=SHARDS) as server:
        Client(server.port).append(WHOLE, "first")
        refused = serve("--data-dir", str(tmp_path), "--port", "0")
        assert refused.returncode == 2
        for fact in (str(tmp_path), f"process {server.pid}", server.url, "STREAMS_DATA_DIR"):
            assert fact in refused.stderr
        with pytest.raises(ServerFailed, match=f"in use by process {server.pid}"), running_server(tmp_path):
            pass
        assert texts_of(server, WHOLE) == ["first"], "the first one was not disturbed"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]:0"])
def test_an_address_that_others_can_reach_is_refused_without_keys(tmp_path: Path, host: str) -> None:
    refused = serve("--host", host, "--data-dir", str(tmp_path / "data"))
    assert refused.returncode == 2
    for way_out in ("127.0.0.1", "STREAMS_ALLOW_INSECURE_NO_AUTH"):
        assert way_out in refused.stderr
    assert not (tmp_path / "data").exists(), "a refusal leaves nothing behind"
