"""Goal: each due time of a schedule has one record through kill -9, another number of shards and a restore.

Method: a real server with a schedule of 300 ms that catches everything up. It is killed, started with other
numbers of shards, and restored from a backup; the due times of its records have neither gaps nor repeats.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from streams.testing import running_server
from tests.support.crashing import Client, eventually

#: A thousand of them are caught up: five minutes, more than the slowest restart.
EVERY_MS = 300


def due_times(client: Client, box: str) -> list[int]:
    page = client.ok("POST", f"/v0/boxes/{box}/diff", {"limit": 1000})
    return [record["meta"]["$due_ts"] for record in page["records"]]


def wait_for_records(client: Client, box: str, count: int) -> None:
    eventually(lambda: client.ok("GET", f"/v0/boxes/{box}?touch=false")["count"] >= count)


def streams(*arguments: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    command = [sys.executable, "-P", "-m", "streams", *arguments]
    ran = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_due_times_have_one_record_each_whatever_is_killed_moved_or_restored(tmp_path: Path) -> None:
    data_dir, backup, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    backup.mkdir()
    boxes = ("disk", "fsync")
    with running_server(data_dir, shards=2) as server:
        client = Client(server.port)
        for box in boxes:
            client.put(box, durability=box)
            body = {"box": box, "record": {"data": box}, "every_ms": EVERY_MS, "catch_up": "all"}
            client.ok("PUT", f"/v0/schedules/every-{box}", body)
            wait_for_records(client, box, 3)
        streams("backup", str(backup), "--data-dir", str(data_dir))
        server.kill()
    streams("restore", str(backup), "--data-dir", str(restored), "--shards", "1")
    for folder, shards in ((data_dir, 3), (data_dir, 1), (restored, 2)):
        with running_server(folder, shards=shards) as server:
            client = Client(server.port)
            for box in boxes:
                wait_for_records(client, box, client.ok("GET", f"/v0/boxes/{box}")["count"] + 3)
                dues = due_times(client, box)
                assert dues == list(range(dues[0], dues[-1] + 1, EVERY_MS))
                state = client.ok("GET", f"/v0/schedules/every-{box}")
                assert state["box"] == box and state["fired_total"] >= len(dues)
