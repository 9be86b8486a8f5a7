"""Goal: an ack of the S2 API outlives kill -9 of everything, and so does all that a stream is; what is to go
by time goes (s2 §11, §15).

Method: real servers on one folder, killed at once; another number of shards in the next life.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import httpx2

from streams.testing import running_server
from tests.s2.conftest import Client
from tests.support.crashing import eventually

STREAMS = ["one", "two/with a slash", "three"]
ACKS = 30


def write_until_cut(client: Client, stream: str, acked: list[str], enough: threading.Barrier) -> None:
    """One batch after the other, until the server is gone."""
    number = 0
    while True:
        body = f"{stream}-{number}"
        try:
            client.append(body, f"{body}'", stream=quote(stream, safe=""))
        except (httpx2.HTTPError, AssertionError):
            return
        acked.append(body)
        number += 1
        if number == ACKS:
            enough.wait(60)


def test_what_was_acked_is_there_after_everything_was_killed(tmp_path: Path) -> None:
    acked: dict[str, list[str]] = {stream: [] for stream in STREAMS}
    with running_server(tmp_path, shards=2) as server:
        client = Client(server.url, "lasting-basin")
        made = {"basin": client.basin, "config": {"create_stream_on_append": True}}
        client.call("POST", "/basins", made, s2_request_token="token")
        client.stream("fenced", timestamping={"mode": "arrival"})
        fence = {"records": [{"headers": [["", "fence"]], "body": "mine"}]}
        client.call("POST", "/streams/fenced/records", fence)
        enough = threading.Barrier(len(STREAMS) + 1)
        writers = [
            threading.Thread(target=write_until_cut, args=(client.on(server), stream, acked[stream], enough))
            for stream in STREAMS
        ]
        for writer in writers:
            writer.start()
        enough.wait(60)
        server.kill()
        for writer in writers:
            writer.join(60)
    for shards in (3, 1):
        with running_server(tmp_path, shards=shards) as server:
            again = client.on(server)
            for stream, wanted in acked.items():
                assert len(wanted) >= ACKS
                found: list[str] = []
                name = quote(stream, safe="")
                while len(found) < again.tail(name):
                    found += again.bodies(f"seq_num={len(found)}", name)
                assert [body for body in found if not body.endswith("'")][: len(wanted)] == wanted
                # At most the one batch that was on its way is there besides, and whole.
                assert len(found) in (2 * len(wanted), 2 * len(wanted) + 2)
            repeat = again.call("POST", "/basins", made, s2_request_token="token")
            assert (repeat.status_code, repeat.headers["s2-provision-result"]) == (201, "noop")
            wrong = {"records": [{}], "fencing_token": ""}
            refused = again.call("POST", "/streams/fenced/records", wrong)
            assert refused.json() == {"fencing_token_mismatch": "mine"}
            assert again.call("GET", "/streams/fenced").json()["timestamping"]["mode"] == "arrival"
            listed = again.call("GET", "/streams").json()["streams"]
            assert [each["name"] for each in listed] == sorted([*STREAMS, "fenced"])


def test_records_and_empty_streams_go_when_their_time_has_come(basin: Client) -> None:
    basin.stream(retention_policy={"age": 1}, delete_on_empty={"min_age_secs": 1})
    basin.stream("kept", retention_policy={"infinite": {}})
    basin.append("a", "b")
    basin.append("a", stream="kept")
    trim = {"records": [{"headers": [["", "trim"]], "body": "\0\0\0\0\0\0\0\1"}]}
    basin.call("POST", "/streams/kept/records", trim)
    basin.until(404, "GET", "/streams/s/records/tail")
    # The trim leaves the command alone, so that nothing is found of the time before it.
    before = "/streams/kept/records?seq_num=0&count=1"
    deadline = time.monotonic() + 60
    while basin.call("GET", before).json()["records"][0]["seq_num"] == 0:
        assert time.monotonic() < deadline
    assert basin.tail("kept") == 2


def test_streams_are_sealed_moved_backed_up_and_restored_like_boxes(tmp_path: Path) -> None:
    """A segment for each batch, and none stays hot: the stream is in the cold folder."""
    data, cold, copy = (tmp_path / name for name in ("data", "cold", "copy"))
    cold.mkdir()
    copy.mkdir()
    settings = {
        "shards": 2,
        "segment_max_bytes": "1KiB",
        "cache_bytes": "64KiB",
        "upkeep_bytes_per_s": 0,
        "hot_retain_segments": 0,
        "cold_dir": cold,
    }
    wanted = [f"record {number}" + "." * 200 for number in range(100)]
    with running_server(data, **settings) as server:
        client = Client(server.url, "moving-basin")
        client.create()
        client.stream()
        scope = {"basins": {"prefix": ""}, "streams": {"prefix": ""}, "ops": ["read"]}
        token = client.call("POST", "/access-tokens", {"id": "t", "scope": scope}).json()["access_token"]
        for at in range(0, 100, 10):
            client.append(*wanted[at : at + 10])
        eventually(lambda: len(list(data.glob("shard-*/segments/*/*.stub"))) >= 5)
        assert client.bodies() == wanted
        ran = subprocess.run(
            [sys.executable, "-m", "streams", "backup", str(copy)],
            env={**os.environ, "STREAMS_DATA_DIR": str(data), "STREAMS_COLD_DIR": str(cold)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
    restored = tmp_path / "restored"
    ran = subprocess.run(
        [sys.executable, "-m", "streams", "restore", str(copy), "--data-dir", str(restored), "--shards", "3"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    with running_server(restored, shards=3) as server:
        again = client.on(server)
        assert again.bodies() == wanted
        assert again.append("one more")["start"]["seq_num"] == 100
        late = again.call("GET", "/streams/s/records?tail_offset=1", authorization=f"Bearer {token}")
        assert late.json()["records"][0]["body"] == "one more"
        refused = again.call("GET", "/streams/s/records/tail", authorization=f"Bearer {token}")
        assert refused.status_code == 403
