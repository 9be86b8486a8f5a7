"""Goal: sealed records of a real server are served exactly, whole or not at all, wherever they are kept, and
the disk gets back what deletes have freed.

Method: a server with segments of a few records. Files are damaged while it is stopped; the cold store is a
real S3 server behind a proxy that hangs, fails and vanishes. What is awaited is looked for, never slept for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shard.storage.files import Disk
from shard.storage.segments import FileSource, open_segment
from streams.testing import Server, running_server
from tests.cluster.test_damage import flip, log_lines
from tests.support.crashing import Answer, Client, eventually

if TYPE_CHECKING:
    from tests.support.objectstore import Bucket

pytest_plugins = ["tests.support.objectstore"]

#: Records of a write, which is so large that it makes a segment of its own.
PART = 5
PAD = "x" * 200


def serving(data_dir: Path, **settings: object) -> Any:
    few = {"shards": 1, "segment_max_bytes": "1KiB", "cache_bytes": "64KiB", "upkeep_bytes_per_s": 0}
    return running_server(data_dir, **{**few, **settings})


def fill(client: Client, box: str, writes: int) -> None:
    for number in range(writes):
        records = [{"data": [number, at, PAD], "tag": f"tag-{at}"} for at in range(PART)]
        client.ok("POST", f"/v0/boxes/{box}", {"records": records, "config": {"durability": "fsync"}})


def segments_of(data_dir: Path, suffix: str = ".seg") -> list[Path]:
    return sorted(data_dir.glob(f"shard-*/segments/*/*{suffix}"))


def sealed(data_dir: Path, writes: int, *boxes: str) -> None:
    """A life of a server that sealed all that was written."""
    with serving(data_dir) as server:
        for box in boxes:
            fill(Client(server.port), box, writes)
        eventually(lambda: len(segments_of(data_dir)) == writes * len(boxes))


def read(server: Server, box: str, from_seq: int, limit: int = PART) -> Answer:
    return Client(server.port).send("POST", f"/v0/boxes/{box}/diff", {"from_seq": from_seq, "limit": limit})


def seqs(answer: Answer) -> list[int]:
    assert answer.status == 200, answer
    return [record["$seq"] for record in answer.body["records"]]


# -- damage


def test_a_read_that_needs_a_damaged_part_of_a_segment_is_refused_and_the_rest_is_served(
    tmp_path: Path,
) -> None:
    sealed(tmp_path, 4, "damaged", "whole")
    damaged = segments_of(tmp_path)[1]  # by generation, then by seq: the second of the first box
    flip(damaged, 150)
    with serving(tmp_path) as server:
        client = Client(server.port)
        assert seqs(read(server, "damaged", 0)) == [1, 2, 3, 4, 5]
        for path, body in (("diff", {"from_seq": 5}), ("diff", {"from_seq": 0, "limit": 6})):
            refused = client.send("POST", f"/v0/boxes/damaged/{path}", body)
            assert (refused.status, refused.code) == (503, "data_damaged")
            for fact in ("'damaged'", "streams doctor", "streams verify", "streams repair"):
                assert fact in refused.body["error"]["message"]
            assert str(tmp_path) not in str(refused.body), "clients are shown no path of the server"
            assert refused.headers["retry-after"]
        assert client.send("GET", "/v0/boxes/damaged/records/7").code == "data_damaged"
        assert seqs(read(server, "damaged", 10, 100)) == list(range(11, 21))
        assert list(client.read_all("whole")[0]) == list(range(1, 21))
        assert client.append("damaged", "on")["first_seq"] == 21
        assert client.ok("GET", "/v0/boxes/damaged")["count"] == 21
        assert client.send("GET", "/v0/ready").status == 200
        # Trimming past the damage needs nothing of what is damaged, and the box is whole again.
        assert client.ok("POST", "/v0/boxes/damaged/delete", {"before_seq": 11})["deleted"] == 10
        assert list(client.read_all("damaged")[0]) == list(range(11, 22))


def test_a_delete_that_needs_a_damaged_tag_index_deletes_nothing(tmp_path: Path) -> None:
    sealed(tmp_path, 2, "box")
    damaged = segments_of(tmp_path)[0]
    flip(damaged, damaged.read_bytes().rindex(b"tag-0"))
    with serving(tmp_path) as server:
        client = Client(server.port)
        refused = client.send("POST", "/v0/boxes/box/delete", {"match": "tag-0"})
        assert (refused.status, refused.code) == (503, "data_damaged")
        (told, *_) = log_lines(server.log_text(), "a segment is damaged and cannot be read")
        assert (told["path"], told["box"]) == (str(damaged), "box")
        assert list(client.read_all("box")[0]) == list(range(1, 11))


@pytest.mark.parametrize("place", ["index", "footer"])
def test_a_shard_does_not_start_on_a_segment_whose_index_is_damaged(tmp_path: Path, place: str) -> None:
    sealed(tmp_path, 1, "box")
    (damaged,) = segments_of(tmp_path)
    index = open_segment(FileSource(Disk(), str(damaged)))
    flip(damaged, {"index": index.batches_end + 4, "footer": index.file_bytes - 30}[place])
    with serving(tmp_path) as server:
        (told,) = log_lines(server.log_text(), "shard stopped: its data is damaged")
        assert str(damaged) in told["why"] and "streams verify" in told["why"]
        assert read(server, "box", 0).code == "shard_unavailable"


# -- space


def disk_bytes(data_dir: Path) -> int:
    total = 0
    for folder, _, names in os.walk(data_dir):  # a folder that went meanwhile is passed over
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


@pytest.mark.parametrize("how", ["tags", "box"])
def test_the_disk_gets_back_what_deletes_have_freed(tmp_path: Path, how: str) -> None:
    small = {
        "segment_max_events": 200,
        "segment_max_bytes": "180KiB",
        "wal_file_bytes": "256KiB",
        "snapshot_wal_bytes": "512KiB",
        "snapshot_interval_ms": 100,
    }
    with serving(tmp_path, **small) as server:
        client = Client(server.port)
        client.put("stays", durability="fsync")
        client.append("stays", "here")
        for _ in range(40):
            records = [{"data": "x" * 900, "tag": f"{at % 10}"} for at in range(100)]
            client.ok("POST", "/v0/boxes/box", {"records": records, "config": {"durability": "fsync"}})
        eventually(lambda: len(segments_of(tmp_path)) >= 20)
        full = disk_bytes(tmp_path)
        if how == "tags":
            for tag in range(1, 10):
                client.ok("POST", "/v0/boxes/box/delete", {"match": str(tag)})
        else:
            client.ok("DELETE", "/v0/boxes/box")
        left = {"tags": 400, "box": 0}[how] * 1_000
        # The log keeps a few files, of which the next is made ready ahead.
        allowed = 2 * left + 8 * 256 * 1024
        eventually(lambda: disk_bytes(tmp_path) <= allowed)
        print(f"{how}: {full} bytes on disk before, {disk_bytes(tmp_path)} after, {left} live")
        assert full > 3_600_000
        assert list(client.read_all("stays")[0].values()) == ["here"]
        if how == "tags":
            assert len(client.read_all("box")[0]) == 400


# -- the cold store


def cold_segments(bucket: Bucket) -> list[str]:
    return [key for key in bucket.server.keys(bucket.name) if "/segments-" in key]


def moved(bucket: Bucket, data_dir: Path, segments: int) -> None:
    """Until so many segments are in the bucket and nowhere else."""
    eventually(lambda: len(segments_of(data_dir, ".stub")) == segments)
    eventually(lambda: not {path.stem for path in segments_of(data_dir)} & stubs_of(data_dir))
    assert len(cold_segments(bucket)) == segments


def stubs_of(data_dir: Path) -> set[str]:
    return {path.stem for path in segments_of(data_dir, ".stub")}


class Reader(threading.Thread):
    """Reads a box from the start, once."""

    def __init__(self, server: Server, box: str) -> None:
        super().__init__(daemon=True)
        self._server, self._box = server, box
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = read(self._server, self._box, 0)

    def wait(self) -> Answer:
        self.join(60)
        assert self.answer is not None
        return self.answer


def test_records_in_a_cold_store_are_read_from_there_and_nobody_else_waits_for_it(
    tmp_path: Path, bucket: Bucket
) -> None:
    cold = {"cold_dir": bucket.url, "hot_retain_segments": 1}
    with serving(tmp_path, **cold) as server:
        fill(Client(server.port), "box", 5)
        moved(bucket, tmp_path, 4)
    with serving(tmp_path, **cold) as server:
        client = Client(server.port)
        bucket.proxy.hang(method="GET")
        asked = len(bucket.proxy.requests)
        waiting = Reader(server, "box")
        eventually(lambda: len(bucket.proxy.requests) > asked)
        # It hangs. Writers, readers of what is here, and those who wait for more do not notice.
        assert client.append("box", "new")["first_seq"] == 26
        assert seqs(read(server, "box", 20, 100)) == [21, 22, 23, 24, 25, 26]
        polls = Poll(server, "box", 26)
        client.append("box", "newer")
        assert polls.wait() == [27]
        assert client.ok("GET", "/v0/boxes/box")["count"] == 27
        assert waiting.is_alive(), "the reader of cold records is still waiting"
        bucket.proxy.heal()
        assert seqs(waiting.wait()) == [1, 2, 3, 4, 5]
        assert list(client.read_all("box")[0]) == list(range(1, 28))


class Poll(threading.Thread):
    """A long poll for what comes after a seq."""

    def __init__(self, server: Server, box: str, from_seq: int) -> None:
        super().__init__(daemon=True)
        self._send: Callable[[], Answer] = lambda: Client(server.port).send(
            "POST", f"/v0/boxes/{box}/diff", {"from_seq": from_seq, "wait_ms": 20_000}
        )
        self.seqs: list[int] = []
        self.start()

    def run(self) -> None:
        self.seqs = seqs(self._send())

    def wait(self) -> list[int]:
        self.join(60)
        return self.seqs


def test_a_cold_store_that_fails_or_is_gone_refuses_cold_reads_and_never_shows_a_gap(
    tmp_path: Path, bucket: Bucket
) -> None:
    cold = {"cold_dir": bucket.url, "hot_retain_segments": 1}
    with serving(tmp_path, **cold) as server:
        fill(Client(server.port), "box", 3)
        moved(bucket, tmp_path, 2)
    # A server starts without its cold store: stubs say what is there.
    bucket.proxy.vanish()
    with serving(tmp_path, **cold) as server:
        client = Client(server.port)
        state = client.ok("GET", "/v0/boxes/box")
        assert (state["count"], state["earliest_seq"]) == (15, 1)
        gone = read(server, "box", 0)
        assert (gone.status, gone.code) == (503, "cold_store_unavailable")
        assert gone.headers["retry-after"] and "nothing is lost" in gone.body["error"]["message"]
        assert seqs(read(server, "box", 10)) == [11, 12, 13, 14, 15]
        bucket.proxy.heal()
        bucket.proxy.answer(403)
        assert read(server, "box", 3).code == "cold_store_unavailable"
        # New segments pile up here meanwhile, and writers go on.
        fill(client, "box", 2)
        eventually(lambda: len(segments_of(tmp_path)) == 3)
        bucket.proxy.heal()
        assert list(client.read_all("box")[0]) == list(range(1, 26))


def test_a_copy_in_the_cold_store_that_was_damaged_is_never_served(tmp_path: Path, bucket: Bucket) -> None:
    cold = {"cold_dir": bucket.url, "hot_retain_segments": 0}
    with serving(tmp_path, **cold) as server:
        fill(Client(server.port), "box", 2)
        moved(bucket, tmp_path, 2)
    first, _ = sorted(cold_segments(bucket))
    content = bytearray(bucket.server.get(bucket.name, first))
    content[150] ^= 1
    bucket.server.put(bucket.name, first, bytes(content))
    with serving(tmp_path, **cold) as server:
        refused = read(server, "box", 0)
        assert (refused.status, refused.code) == (503, "data_damaged")
        (told,) = log_lines(server.log_text(), "a segment is damaged and cannot be read")
        assert told["path"] == first.removeprefix("some/prefix/")
        assert seqs(read(server, "box", 5)) == [6, 7, 8, 9, 10]


def test_deleted_records_leave_the_cold_store_too(tmp_path: Path, bucket: Bucket) -> None:
    often = {"cold_dir": bucket.url, "hot_retain_segments": 0, "snapshot_interval_ms": 100}
    with serving(tmp_path, **often) as server:
        client = Client(server.port)
        fill(client, "box", 3)
        fill(client, "stays", 1)
        eventually(lambda: len(cold_segments(bucket)) == 4)
        client.ok("DELETE", "/v0/boxes/box")
        client.append("stays", "something new, so that there is a snapshot")
        eventually(lambda: len(cold_segments(bucket)) == 1)
        assert list(client.read_all("stays")[0]) == [1, 2, 3, 4, 5, 6]
