"""Goal: `streams backup` of a server that is being written to, and `streams restore`, bring back what was
there, box by box as of one moment; what is asked wrongly is refused by name and next step.

Method: real servers and the real command line; writers that count; a folder and an S3 server as targets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from xxhash import xxh3_64_hexdigest

from streams.testing import running_server
from tests.support.crashing import Client, Writer, eventually
from tests.support.objectstore import ObjectServer
from tests.support.sealed import wait_for_segments

SMALL = {"segment_max_events": 30, "snapshot_interval_ms": 300, "wal_file_bytes": 65536}


def streams(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    command = [sys.executable, "-P", "-m", "streams", *arguments]
    return subprocess.run(command, env=kept | environ, text=True, capture_output=True, timeout=120)


def done(*arguments: str, **environ: str) -> dict[str, Any]:
    ran = streams(*arguments, "--json", **environ)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_a_backup_of_a_busy_server_is_one_moment_of_each_box(tmp_path: Path, target: Path) -> None:
    deep = tmp_path / ("deeper-than-the-path-of-a-socket-can-be-long-" * 3)
    with running_server(deep, shards=2, **SMALL) as server:
        client = Client(server.port)
        for number in range(6):
            client.put(f"box-{number}", durability="fsync" if number % 2 else "disk")
        client.put("fleeting", durability="memory")
        client.append("fleeting", "gone with the process")
        writers = [Writer(f"writer-{at}", server.port, f"box-{at}") for at in range(6)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.wait_for_acks(60)
        wait_for_segments(server.data_dir, 1)
        acked = {writer.box: len(writer.acked) for writer in writers}
        taken = done("backup", str(target), "--data-dir", str(server.data_dir))
        for writer in writers:
            writer.wait_for_acks(5)
        ended = {writer.box: len(writer.acked) for writer in writers}
        again = done("backup", str(target), "--data-dir", str(server.data_dir))
        for writer in writers:
            writer.stop()
        assert streams("doctor", "--url", server.url).returncode == 0
        assert (taken["online"], taken["boxes"], taken["shards"]) == (True, 7, 2)
        assert taken["segments"] > 0 and again["copied_segments"] < again["segments"]
        assert not list(server.data_dir.glob("shard-*/export"))
        generations = {box: client.ok("GET", f"/v0/boxes/{box}")["generation"] for box in acked}
    restored = done(
        "restore", str(target), "--data-dir", str(tmp_path / "back"), "--backup", taken["id"], "--shards", "3"
    )
    assert (restored["id"], restored["boxes"]) == (taken["id"], 7)
    with running_server(tmp_path / "back", **SMALL) as server:
        client = Client(server.port)
        assert len(server.shard_pids()) == 3
        for writer in writers:
            records, tombstones, head_seq = client.read_all(writer.box)
            assert tombstones == [] and list(records) == list(range(1, head_seq + 1))
            assert [data["number"] for data in records.values()] == list(range(head_seq))
            assert acked[writer.box] <= head_seq <= ended[writer.box] + 1
            assert client.ok("GET", f"/v0/boxes/{writer.box}")["generation"] == generations[writer.box]
            assert client.append(writer.box, "on")["first_seq"] == head_seq + 1
        assert client.ok("GET", "/v0/boxes/fleeting")["head_seq"] == 0


def test_a_stopped_server_is_backed_up_pruned_listed_and_restored_to_a_time(
    tmp_path: Path, target: Path
) -> None:
    data = str(tmp_path / "data")
    with running_server(data, shards=2, **SMALL) as server:
        client = Client(server.port)
        client.append("box", *range(40), config={"durability": "fsync"})
        client.ok("POST", "/v0/boxes/box/delete", {"before_seq": 5})
        client.ok("PUT", "/v0/boxes/box/fence", {"token": "mine"})
        until_ms = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 <= until_ms:
            pass
        client.append("box", *range(40), fencing_token="mine")
        client.append("late", 1)
    for _ in range(3):
        last = done("backup", str(target), "--data-dir", data, "--keep", "2")
    assert last["online"] is False and len(last["pruned"]) == 1
    listed = [json.loads(line) for line in streams("backup", str(target), "--list").stdout.splitlines()]
    assert len(listed) == 2 and listed[-1] == {
        key: last[key] for key in ("id", "taken_ms", "boxes", "shards", "segments", "bytes")
    }

    found = done("restore", str(target), "--data-dir", str(tmp_path / "back"), "--until", str(until_ms))
    assert (found["cut_records"], found["cut_boxes"]) == (41, 1)
    with running_server(tmp_path / "back", **SMALL) as server:
        client = Client(server.port)
        records, tombstones, head_seq = client.read_all("box")
        assert (list(records), tombstones, head_seq) == (list(range(5, 41)), [], 40)
        assert client.send("GET", "/v0/boxes/late").code == "box_not_found"
        assert client.append("box", "on", fencing_token="mine")["first_seq"] == 41


def test_an_object_store_takes_and_gives_backups(tmp_path: Path) -> None:
    store = ObjectServer()
    try:
        environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        url = f"s3://{store.new_bucket()}/streams"
        cold = {"cold_dir": f"{url}-cold", "hot_retain_segments": 0, "upkeep_bytes_per_s": 0}
        with running_server(tmp_path / "data", shards=2, environ=environ, **cold, **SMALL) as server:
            client = Client(server.port)
            client.append("box", *range(100), config={"durability": "fsync"})
            before = client.read_all("box")
            data = str(server.data_dir)
            # Of what is here and of what has moved to the server's own object store: from one to another.
            eventually(lambda: any(server.data_dir.glob("shard-*/segments/*/*.stub")))
            eventually(lambda: not list(server.data_dir.glob("shard-*/segments/*/*.seg")))
            taken = done("backup", url, "--data-dir", data, **environ)
            assert taken["segments"] == taken["copied_segments"] == 1
            assert done("verify", "--data-dir", data, "--cold", **environ)["segment_bytes"] > 0
            again = done("backup", url, "--data-dir", data, "--keep", "1", **environ)
            assert again["pruned"] == [taken["id"]]
        done("restore", url, "--data-dir", str(tmp_path / "back"), **environ)
        with running_server(tmp_path / "back", **SMALL) as server:
            assert Client(server.port).read_all("box") == before
        store.close()
        refused = streams("backup", url, "--list", **environ)
        assert refused.returncode == 3 and "cannot be used now" in refused.stderr
        looked = streams("verify", "--data-dir", data, "--cold-dir", f"{url}-cold", "--cold", **environ)
        assert looked.returncode == 3 and "Repeat the command" in looked.stderr
        assert json.loads(looked.stdout)["unread"]
    finally:
        store.close()


def test_what_cannot_be_done_is_refused_with_the_next_step(tmp_path: Path, target: Path) -> None:
    def refused(*arguments: str) -> str:
        ran = streams(*arguments)
        assert ran.returncode == 2, ran
        return ran.stderr

    data = str(tmp_path / "data")
    assert "is not a data directory" in refused("backup", str(target), "--data-dir", data)
    assert not (tmp_path / "data").exists()
    assert "cannot be the backup target" in refused("backup", str(tmp_path / "no"), "--data-dir", data)
    assert "it contains no backup" in refused("restore", str(target), "--data-dir", data)
    assert "is not a time" in refused("restore", str(target), "--until", "yesterday")
    with running_server(data, shards=1) as server:
        Client(server.port).append("box", 1)
        id = done("backup", str(target), "--data-dir", data)["id"]
        busy = streams("restore", str(target), "--data-dir", data)
        assert busy.returncode == 3 and f"in use by process {server.pid}" in busy.stderr
    assert "is not empty" in refused("restore", str(target), "--data-dir", data)
    assert "is not empty" in refused("restore", str(target), "--data-dir", str(target))
    assert sorted(found.name for found in target.iterdir()) == ["backup-shards", "backups"]
    assert f"the existing ones are {id}" in refused(
        "restore", str(target), "--backup", "x", "--data-dir", str(tmp_path / "b")
    )
    (manifest,) = (target / "backups").glob("*.json")
    content = bytearray(manifest.read_bytes())
    content[20] ^= 1
    manifest.write_bytes(bytes(content))
    assert "does not match its checksum" in refused("restore", str(target), "--data-dir", str(tmp_path / "b"))
    # One that is damaged costs the others nothing: a new one is taken and listed beside it.
    assert f"backups/{id}.json" in refused("backup", str(target), "--data-dir", data, "--keep", "2")
    listed = streams("backup", str(target), "--list", "--json")
    assert listed.returncode == 6 and f"backups/{id}.json cannot be restored" in listed.stderr
    assert len(listed.stdout.splitlines()) == 1


def test_a_restore_that_was_cut_short_is_not_served_and_can_be_repeated(tmp_path: Path, target: Path) -> None:
    with running_server(tmp_path / "data", shards=1, **SMALL) as server:
        client = Client(server.port)
        client.append("box", *range(50), config={"durability": "fsync"})
        before = client.read_all("box")
        wait_for_segments(server.data_dir, 1)
        done("backup", str(target), "--data-dir", str(server.data_dir))
    (segment,) = (target / "backup-segments").glob("*/*.seg")
    aside = segment.rename(target / "aside")
    back = str(tmp_path / "back")
    failed = streams("restore", str(target), "--data-dir", back)
    assert failed.returncode == 2 and "the object does not exist" in failed.stderr
    served = streams("serve", "--data-dir", back, "--port", "0")
    assert served.returncode == 2 and "run the same `streams restore` again" in served.stderr
    aside.rename(segment)
    done("restore", str(target), "--data-dir", back)
    with running_server(back, **SMALL) as server:
        assert Client(server.port).read_all("box") == before


def test_a_backup_from_a_stranger_is_refused_by_the_command_and_writes_nothing(
    tmp_path: Path, target: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "pub").write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    with running_server(tmp_path / "data", shards=1) as server:
        Client(server.port).append("box", 1)
        data = str(server.data_dir)
        signed = done("backup", str(target), "--data-dir", data, "--sign-key", str(tmp_path / "key"))
        plain = done("backup", str(target), "--data-dir", data)
    assert (signed["signed"], plain["signed"]) == (True, False)
    verified = ("restore", str(target), "--verify-key", str(tmp_path / "pub"), "--data-dir")
    refused = streams(*verified, str(tmp_path / "back"))
    assert refused.returncode == 2 and f"backup {plain['id']} is not signed" in refused.stderr
    refused = streams("restore", str(target), "--verify-key", str(tmp_path / "key"))
    assert refused.returncode == 2 and "is not a public ed25519 key" in refused.stderr
    manifest = target / "backups" / f"{plain['id']}.json"
    fields = json.loads(manifest.read_bytes().splitlines()[0])
    files = fields["shards"][0]["files"]
    files["../../outside"] = next(iter(files.values()))
    line = json.dumps(fields).encode()
    manifest.write_bytes(line + b"\n" + xxh3_64_hexdigest(line).encode() + b"\n")
    refused = streams("restore", str(target), "--data-dir", str(tmp_path / "back"))
    assert refused.returncode == 2 and "is not the name of a file in a backup" in refused.stderr
    assert not (tmp_path / "back").exists() and not list(tmp_path.rglob("outside"))
    assert done(*verified, str(tmp_path / "back"), "--backup", signed["id"])["records"] == 1
