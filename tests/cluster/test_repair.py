"""Goal: `streams verify` says of a server's data, running or stopped, what is damaged and where; `streams
repair` makes it whole, asks first, keeps the damaged files, and readers see what is lost.

Method: real servers and the real command line; bytes of every kind of file are changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.testing import running_server
from tests.support.crashing import Client, box_on, eventually
from tests.support.sealed import wait_for_segments

SMALL = {"segment_max_events": 30, "snapshot_interval_ms": 300, "wal_file_bytes": 65536}
FIRST, SECOND = box_on(0, 2, "box"), box_on(1, 2, "box")


def streams(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    command = [sys.executable, "-P", "-m", "streams", *arguments]
    return subprocess.run(command, env=kept, input=answer, text=True, capture_output=True, timeout=120)


def verified(data_dir: Path) -> tuple[int, dict[str, Any]]:
    ran = streams("verify", "--data-dir", str(data_dir), "--json")
    assert ran.returncode in (0, 6), ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two boxes on two shards, each with a segment and a tail, stopped in order."""
    data_dir = tmp_path_factory.mktemp("filled") / "data"
    with running_server(data_dir, shards=2, **SMALL) as server:
        client = Client(server.port)
        for box in (FIRST, SECOND):
            client.put(box, durability="fsync")
            for start in range(0, 30, 10):
                client.append(box, *(f"{box} record {number}" for number in range(start, start + 10)))
        wait_for_segments(data_dir, 2)
        for box in (FIRST, SECOND):
            client.append(box, f"{box} tail")
        code, found = verified(data_dir)
        assert (code, found["problems"], found["online"]) == (0, [], True)
        assert (found["shards"], found["boxes"], found["records"], found["segments"]) == (2, 2, 62, 2)
        assert not list(data_dir.glob("shard-*/export"))
    code, found = verified(data_dir)
    assert (code, found["problems"], found["online"]) == (0, [], False)
    return data_dir


@pytest.fixture
def data_dir(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "data")
    return tmp_path / "data"


def test_a_damaged_segment_is_told_repaired_and_its_records_are_a_tombstone(data_dir: Path) -> None:
    (path,) = (data_dir / "shard-00" / "segments").glob("*/*.seg")
    flip(path, path.read_bytes().index(f"{FIRST} record 13".encode()))
    code, found = verified(data_dir)
    (problem,) = found["problems"]
    assert code == 6 and problem["path"] == str(path) and problem["offset"] > 0
    shown = streams("verify", "--data-dir", str(data_dir))
    assert shown.returncode == 6 and str(path) in shown.stdout and "streams repair" in shown.stderr

    with running_server(data_dir, **SMALL) as server:
        refused = Client(server.port).send("POST", f"/v0/boxes/{FIRST}/diff", {"limit": 1000})
        message = refused.body["error"]["message"]
        assert refused.code == "data_damaged" and FIRST in message and str(data_dir) not in message
        assert verified(data_dir)[1]["problems"] == [problem], "the same while it runs"
        busy = streams("repair", "--data-dir", str(data_dir))
        assert busy.returncode == 3 and "stop that server first" in busy.stderr

    before = {each: each.read_bytes() for each in data_dir.glob("shard-*/**/*") if each.is_file()}
    unasked = streams("repair", "--data-dir", str(data_dir), "--json")
    assert (unasked.returncode, unasked.stdout) == (2, "")
    assert "11..20" in unasked.stderr and "add --yes" in unasked.stderr
    declined = streams("repair", "--data-dir", str(data_dir), answer="n\n")
    assert (
        declined.returncode == 2 and "11..20" in declined.stderr and "nothing was changed" in declined.stderr
    )
    assert {each: each.read_bytes() for each in data_dir.glob("shard-*/**/*") if each.is_file()} == before

    agreed = streams("repair", "--data-dir", str(data_dir), answer="y\n")
    (loss,) = json.loads(agreed.stdout)["losses"]
    assert (agreed.returncode, loss["first_seq"], loss["last_seq"]) == (0, 11, 20)
    (aside,) = data_dir.glob("damaged-*")
    assert (aside / path.relative_to(data_dir)).read_bytes() == before[path]
    assert verified(data_dir)[0] == 0
    with running_server(data_dir, **SMALL) as server:
        client = Client(server.port)
        records, (tombstone,), head_seq = client.read_all(FIRST)
        assert sorted(records) == [*range(1, 11), *range(21, 32)] and head_seq == 31
        assert (tombstone["gap_from"], tombstone["gap_to"], tombstone["reason"]) == (11, 20, "crash")
        assert len(client.read_all(SECOND)[0]) == 31
        assert client.append(FIRST, "on")["first_seq"] == 32


def test_a_damaged_log_is_repaired_and_the_shard_serves_again(data_dir: Path) -> None:
    path = next(
        each for each in (data_dir / "shard-01" / "wal").glob("*.wal") if b" tail" in each.read_bytes()
    )
    flip(path, path.read_bytes().rindex(f"{SECOND} tail".encode()))
    code, found = verified(data_dir)
    assert code == 6 and [each["path"] for each in found["problems"]] == [str(path)]
    ran = streams("repair", "--data-dir", str(data_dir), "--yes", "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [(loss["box"], loss["first_seq"], loss["last_seq"]) for loss in told["losses"]] == [
        (SECOND, 31, 31)
    ]
    assert Path(told["aside"]).is_dir()
    with running_server(data_dir, **SMALL) as server:
        client = Client(server.port)
        records, (tombstone,), head_seq = client.read_all(SECOND)
        assert (len(records), tombstone["gap_from"], tombstone["gap_to"], head_seq) == (30, 31, 31, 31)
        assert client.append(SECOND, "on")["first_seq"] == 32
    again = streams("repair", "--data-dir", str(data_dir))
    found = json.loads(again.stdout)
    assert (again.returncode, found["manifest"], found["shards"], found["aside"]) == (0, [], [], "")


def test_a_repaired_shard_goes_on_copying_though_the_destination_knows_more_than_it_does(
    tmp_path: Path,
) -> None:
    """Its folder is an old copy. What it gives out next must not count as a repeat."""
    data_dir, old = tmp_path / "data", tmp_path / "old"

    def write(client: Client, data: str, copies: int) -> None:
        client.append(FIRST, *(f"{data} {number}" for number in range(10)))
        eventually(lambda: len(client.read_all(SECOND)[0]) == copies or None)

    with running_server(data_dir, shards=2, **SMALL) as server:
        client = Client(server.port)
        for box in (FIRST, SECOND):
            client.put(box, durability="fsync")
        assert client.send("PUT", "/v0/routers/copy", {"source": FIRST, "dest": SECOND}).status < 300
        write(client, "kept", 10)
    shutil.copytree(data_dir / "shard-00", old)
    with running_server(data_dir, **SMALL) as server:
        write(Client(server.port), "lost", 20)
    shutil.rmtree(data_dir / "shard-00")
    shutil.copytree(old, data_dir / "shard-00")
    newest = max((data_dir / "shard-00" / "snapshot").glob("*.snap"))
    flip(newest, newest.stat().st_size // 2)
    ran = streams("repair", "--data-dir", str(data_dir), "--yes", "--json")
    assert ran.returncode == 0, ran.stderr
    notes = [note for shard in json.loads(ran.stdout)["shards"] for note in shard["notes"]]
    assert "its references to other shards were corrected" in notes
    assert verified(data_dir)[0] == 0
    with running_server(data_dir, **SMALL) as server:
        client = Client(server.port)
        assert client.append(FIRST, "new")["first_seq"] > 20
        eventually(lambda: len(client.read_all(SECOND)[0]) == 21 or None)
        records, tombstones, _ = client.read_all(FIRST)
        assert len(records) == 11 and tombstones


def test_a_damaged_manifest_is_put_back_from_its_copy(data_dir: Path) -> None:
    manifest = data_dir / "manifest.json"
    whole = manifest.read_bytes()
    flip(manifest, 30)
    served = streams("serve", "--data-dir", str(data_dir), "--port", "0")
    assert served.returncode == 2 and "streams repair" in served.stderr and "at byte" in served.stderr
    code, found = verified(data_dir)
    assert code == 6 and [each["path"] for each in found["problems"]] == [str(manifest)]
    assert found["boxes"] == 2, "the copy says what the folders are"
    ran = streams("repair", "--data-dir", str(data_dir))
    assert ran.returncode == 0 and [each["path"] for each in json.loads(ran.stdout)["manifest"]] == [
        str(manifest)
    ]
    assert manifest.read_bytes() == whole
    (aside,) = data_dir.glob("damaged-*")
    assert (aside / "manifest.json").read_bytes() != whole
    manifest.unlink()
    assert streams("repair", "--data-dir", str(data_dir)).returncode == 0
    assert manifest.read_bytes() == whole
    for path in (manifest, data_dir / "manifest.copy.json"):
        flip(path, 30)
    refused = streams("repair", "--data-dir", str(data_dir))
    assert refused.returncode == 2 and "streams restore" in refused.stderr


def test_what_cannot_be_repaired_is_refused_and_left_as_it_is(data_dir: Path) -> None:
    for path in (data_dir / "shard-00" / "snapshot").glob("*.snap"):
        flip(path, 60)
    for path in (data_dir / "shard-00" / "wal").glob("*.wal"):
        path.unlink()
    before = {
        each: each.read_bytes() for each in data_dir.glob("**/*") if each.is_file() and each.name != "LOCK"
    }
    refused = streams("repair", "--data-dir", str(data_dir), "--yes")
    assert refused.returncode == 2 and "streams restore" in refused.stderr
    after = {
        each: each.read_bytes() for each in data_dir.glob("**/*") if each.is_file() and each.name != "LOCK"
    }
    assert after == before
    nowhere = streams("repair", "--data-dir", str(data_dir / "nowhere"))
    assert nowhere.returncode == 2 and "does not exist" in nowhere.stderr


def test_what_is_no_data_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    refused = streams("repair", "--data-dir", str(tmp_path))
    assert refused.returncode == 2 and "is not a data directory" in refused.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_records_that_are_whole_in_the_cold_store_are_not_given_up(tmp_path: Path) -> None:
    """The stub of one segment there is damaged, and a batch of another segment."""
    data_dir, cold = tmp_path / "data", tmp_path / "cold"
    cold.mkdir()
    flags = ("--data-dir", str(data_dir), "--cold-dir", str(cold))
    settings = {**SMALL, "shards": 1, "segment_max_events": 10, "cold_dir": str(cold)}
    with running_server(data_dir, **settings, hot_retain_segments=0) as server:
        client = Client(server.port)
        client.put("box", durability="fsync")

        def cold_with(number: int) -> Path | None:
            found = (path for path in cold.glob("segments-*/*/*.seg") if has(path, number))
            return next(found, None)

        def has(path: Path, number: int) -> bool:
            return f'"record {number}"'.encode() in path.read_bytes()

        for first in range(1, 31, 5):
            client.append("box", *(f"record {number}" for number in range(first, first + 5)))
            if first == 6:
                eventually(lambda: cold_with(3))
        copy = eventually(lambda: cold_with(17))
        eventually(lambda: not list(data_dir.glob("shard-*/segments/*/*.seg")))
    stub = min(data_dir.glob("shard-00/segments/*/*.stub"))
    assert stub.stem != copy.stem
    flip(stub, 100)
    flip(copy, copy.read_bytes().index(b"record 17"))

    looked = streams("verify", *flags, "--cold", "--json")
    assert looked.returncode == 6 and "Traceback" not in looked.stderr
    problems = {each["path"] for each in json.loads(looked.stdout)["problems"]}
    assert problems == {str(stub), str(copy.relative_to(cold))}
    unread = streams("repair", "--data-dir", str(data_dir), "--yes")
    assert unread.returncode == 3 and "--no-cold" in unread.stderr and "STREAMS_COLD_DIR" in unread.stderr
    unproven = streams("repair", "--data-dir", str(data_dir), "--no-cold", "--yes")
    assert unproven.returncode == 2 and "--cold-dir" in unproven.stderr

    ran = streams("repair", *flags, "--yes", "--json")
    assert ran.returncode == 0, ran.stderr
    (loss,) = json.loads(ran.stdout)["losses"]
    assert (loss["box"], loss["first_seq"], loss["last_seq"]) == ("box", 16, 20)
    again = streams("verify", *flags, "--cold", "--json")
    assert (again.returncode, json.loads(again.stdout)["records"]) == (0, 25)
    with running_server(data_dir, **settings) as server:
        records, (tombstone,), _ = Client(server.port).read_all("box")
        assert sorted(records) == [*range(1, 16), *range(21, 31)]
        assert (tombstone["gap_from"], tombstone["gap_to"]) == (16, 20)
        eventually(lambda: not copy.exists())  # the rest of it is here
