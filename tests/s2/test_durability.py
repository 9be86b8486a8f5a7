"""Goal: an ack of the S2 API outlives kill -9 of everything, and so does all that a stream is; what is to go
by time goes (s2-v1 §11, §15).

Method: real servers on one folder, killed at once; another number of shards in the next life.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from urllib.parse import quote

import httpx2

from streams.testing import running_server
from tests.s2.conftest import Client

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
