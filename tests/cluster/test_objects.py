"""Goal: of boxes of class object, and of S2 streams of that class, nothing that was acked is lost with the
machine: `streams restore` brings all of it back from the bucket alone, and the new server goes on there.

Method: real servers on a real S3-protocol server, through a proxy that fails uploads while they are written
to; everything is killed at once and the data directory is removed.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from streams.testing import running_server
from tests.cluster.test_backup import done, streams
from tests.s2.conftest import Client as S2Client
from tests.s2.test_durability import write_until_cut
from tests.support.crashing import Client, Writer
from tests.support.objectstore import Bucket, bucket, object_server

__all__ = ["bucket", "object_server"]

SMALL = {
    "segment_max_events": 30,
    "snapshot_interval_ms": 300,
    "wal_file_bytes": 65536,
    "object_flush_ms": 5,
}


def serving(data_dir: Path, bucket: Bucket, **settings: Any) -> Any:
    return running_server(
        data_dir, **{"cold_dir": bucket.url, "s2_durability": "object", **SMALL, **settings}
    )


def test_nothing_that_was_acked_is_lost_with_the_machine(tmp_path: Path, bucket: Bucket) -> None:
    acked: list[str] = []
    with serving(tmp_path / "data", bucket, shards=2) as server:
        client = Client(server.port)
        boxes = [f"box-{number}" for number in range(4)]
        for box in boxes:
            client.put(box, durability="object")
        client.put("capped", durability="object", cap_records=5)
        for number in range(20):
            client.append("capped", number)
        client.put("here-only", durability="fsync")
        client.append("here-only", "gone with the machine")
        client.append("box-0", "first", "second", "third", idempotency_key="once")
        client.ok("POST", "/v0/boxes/box-0/delete", {"before_seq": 3})
        client.ok("PUT", "/v0/boxes/capped/fence", {"token": "mine"})
        client.put("deleted", durability="object")
        client.ok("DELETE", "/v0/boxes/deleted")
        basin = S2Client(server.url, "lasting-basin")
        basin.create(create_stream_on_append=True)
        enough = threading.Barrier(2)
        writers = [Writer(f"writer-{box}", server.port, box) for box in boxes]
        to_stream = threading.Thread(
            target=write_until_cut, args=(basin.on(server), "stream", acked, enough), daemon=True
        )
        for writer in (*writers, to_stream):
            writer.start()
        for writer in writers:
            writer.wait_for_acks(10)
        bucket.proxy.answer_500(3, method="PUT")
        bucket.proxy.lose_answer(2, method="PUT")
        for writer in writers:
            writer.wait_for_acks(20)
        enough.wait(120)
        server.kill()
        for writer in writers:
            writer.stop()
        to_stream.join(60)
    shutil.rmtree(tmp_path / "data")
    bucket.proxy.heal()

    found = done("restore", bucket.url, "--data-dir", str(tmp_path / "data"), "--shards", "3")
    assert found["boxes"] == len(boxes) + 2 and found["left_out_objects"] == 0
    refused = streams("serve", "--data-dir", str(tmp_path / "data"), "--cold-dir", bucket.url, "--port", "0")
    assert refused.returncode == 2 and "streams takeover" in refused.stderr, "its old server may be running"
    done("takeover", "--data-dir", str(tmp_path / "data"), "--cold-dir", bucket.url, "--yes")
    with serving(tmp_path / "data", bucket) as server:
        client = Client(server.port)
        for writer in writers:
            records, tombstones, head_seq = client.read_all(writer.box)
            assert tombstones == [] and list(records)[-1] == head_seq
            for number, seq in writer.acked.items():
                assert records[seq]["number"] == number
        assert client.append("box-0", "x", "y", "z", idempotency_key="once")["first_seq"] == 1
        records, tombstones, _ = client.read_all("capped")
        assert list(records.values()) == list(range(15, 20)) and tombstones[0]["reason"] == "cap"
        refused = client.send("POST", "/v0/boxes/capped", {"records": [{"data": 1}]})
        assert refused.code == "fencing_token_mismatch"
        for gone in ("here-only", "deleted"):
            assert client.send("GET", f"/v0/boxes/{gone}").code == "box_not_found"
        bodies = basin.on(server).bodies("seq_num=0&count=1000", stream="stream")
        assert bodies[::2][: len(acked)] == acked
        assert client.append("box-1", "on")["first_seq"] == client.read_all("box-1")[2]
    both = streams("backup", bucket.url, "--data-dir", str(tmp_path / "data"))
    assert both.returncode == 0, both.stderr
    unclear = streams("restore", bucket.url, "--data-dir", str(tmp_path / "other"))
    assert unclear.returncode == 2 and "--what" in unclear.stderr
