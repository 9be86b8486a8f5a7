"""Goal: a server started with another number of shards serves every record as before, once, and nothing that
was deleted; whatever kills the move, the next start does it.

Method: real servers. Boxes of every class, sealed and not, with deletes, evictions, a fence, keys and a tag
index, are read before and after; moves are killed when the files say that they are under way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.supervise.manifest import Manifest
from streams.testing import running_server
from tests.support.crashing import Client, eventually

#: Small, so that boxes are sealed and some unsealed records stay.
SMALL = {"segment_max_events": 40, "snapshot_interval_ms": 300, "wal_file_bytes": 65536}
CLASSES = ("fsync", "disk", "memory")
BOXES = [f"{kind}-{number}" for kind in CLASSES for number in range(7)]
STORED = [box for box in BOXES if not box.startswith("memory")]


def fill(client: Client) -> None:
    for box in BOXES:
        config = {"durability": box.partition("-")[0], "idempotency_window_ms": 3_600_000}
        for numbers in (range(45), range(45, 50)):
            records = [
                {"data": {"box": box, "number": number}, "tag": f"t-{number % 3}"} for number in numbers
            ]
            client.ok("POST", f"/v0/boxes/{box}", {"records": records, "config": config})
    for kind in CLASSES:
        client.ok("POST", f"/v0/boxes/{kind}-1/delete", {"match": "t-1"})
        client.ok("POST", f"/v0/boxes/{kind}-2/delete", {"before_seq": 17})
        client.put(f"{kind}-3", cap_records=7)
        client.ok("PUT", f"/v0/boxes/{kind}-4/fence", {"token": "mine"})
        client.ok(
            "POST",
            f"/v0/boxes/{kind}-5",
            {"records": [{"data": "once"}], "idempotency_key": "once"},
        )
    client.put("not-again", auto_create=False)
    client.ok("DELETE", "/v0/boxes/not-again")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The data of two shards, and what they served."""
    data_dir = tmp_path_factory.mktemp("filled") / "data"
    with running_server(data_dir, shards=2, **SMALL) as server:
        client = Client(server.port)
        fill(client)
        eventually(lambda: len(list(data_dir.glob("shard-*/segments/*"))) >= len(STORED) // 2)
        return data_dir, served(client, STORED)


@pytest.fixture
def before(filled: tuple[Path, dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A copy of it in `tmp_path`."""
    shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True)
    return filled[1]


def served(client: Client, boxes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for box in boxes:
        state = client.ok("GET", f"/v0/boxes/{box}?touch=false")
        for passing in ("performance", "effective_priority", "last_read_ts"):
            del state[passing]
        found[box] = (state, client.read_all(box))
    return found


def check_goes_on(client: Client, *, tagged: int) -> None:
    for kind in ("fsync", "disk"):
        refused = client.send("POST", f"/v0/boxes/{kind}-4", {"records": [{"data": 1}]})
        assert refused.code == "fencing_token_mismatch"
        again = client.ok(
            "POST", f"/v0/boxes/{kind}-5", {"records": [{"data": "once"}], "idempotency_key": "once"}
        )
        assert again["deduped"]
        gone = client.ok("POST", f"/v0/boxes/{kind}-6/delete", {"match": "t-2"})
        assert gone["deleted"] == tagged, "the tag index came along"
    refused = client.send("POST", "/v0/boxes/not-again", {"records": [{"data": 1}]})
    assert refused.code == "box_not_found"


def stored_files(data_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in data_dir.glob("shard-*/**/*") if path.is_file()}


def folders_of(data_dir: Path) -> list[str]:
    return sorted(path.name for path in data_dir.glob("shard-*"))


def test_boxes_are_served_as_before_by_another_number_of_shards(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    for shards, kill, tagged in ((3, True, 16), (1, False, 0)):
        with running_server(tmp_path, shards=shards, **SMALL) as server:
            client = Client(server.port)
            assert served(client, STORED) == before
            for box in set(BOXES) - set(STORED):
                state = client.ok("GET", f"/v0/boxes/{box}")
                assert (state["head_seq"], state["config"]["durability"]) == (0, "memory")
            check_goes_on(client, tagged=tagged)
            before = served(client, STORED)
            placement = client.ok("GET", "/v0/placement")
            manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
            assert placement["shards"] == shards == len(folders_of(tmp_path))
            assert folders_of(tmp_path) == list(manifest.directories) and manifest.is_settled
            assert (tmp_path / "manifest.copy.json").read_bytes() == manifest.encode()
            if kill:
                server.kill()
    with running_server(tmp_path, **SMALL) as server:  # without a wish it stays as it is
        assert served(Client(server.port), STORED) == before
        assert len(server.shard_pids()) == 1


def have_the_same_head(client: Client, *boxes: str) -> bool:
    return len({client.ok("GET", f"/v0/boxes/{box}")["head_seq"] for box in boxes}) == 1


def test_routers_queues_and_groups_come_along(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=2, **SMALL) as server:
        client = Client(server.port)
        client.ok("PUT", "/v0/routers/copies", {"source": "from", "dest": "to"})
        client.ok("POST", "/v0/boxes/from", {"records": [{"data": number} for number in range(20)]})
        eventually(lambda: client.ok("GET", "/v0/boxes/to")["head_seq"] == 20)
        client.put("jobs", type="queue", durability="fsync", leases_durable=True, lease_ms=600_000)
        client.ok("POST", "/v0/boxes/jobs", {"records": [{"data": number} for number in range(5)]})
        held = client.ok("POST", "/v0/boxes/jobs/claim", {"node": "worker", "max": 2})["claimed"]
        client.ok("PUT", "/v0/boxes/to/groups/readers", {"cursor": 7})
    for shards in (3, 1):
        with running_server(tmp_path, shards=shards, **SMALL) as server:
            client = Client(server.port)
            client.ok("POST", "/v0/boxes/from", {"records": [{"data": f"by {shards}"}]})
            eventually(partial(have_the_same_head, client, "from", "to"))
            copies, records = client.read_all("to")[0], client.read_all("from")[0]
            assert list(copies.values()) == list(records.values()), "each once, in order"
            queue = client.ok("GET", "/v0/boxes/jobs")["queue"]
            assert (queue["ready"], queue["in_flight"]) == (3, 2)
            assert client.ok("GET", "/v0/boxes/to/groups/readers")["cursor"] == 7
    with running_server(tmp_path, **SMALL) as server:
        acked = {"node": "worker", "seqs": [job["$seq"] for job in held]}
        acked["lease_ids"] = [job["lease_id"] for job in held]
        assert Client(server.port).ok("POST", "/v0/boxes/jobs/ack", acked)["acked"] == 2


def start(data_dir: Path, shards: int) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    settings = {"STREAMS_SHARDS": str(shards), "STREAMS_PORT": "0", "STREAMS_DATA_DIR": str(data_dir)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "streams", "serve"],
        env=kept | settings,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def is_building(data_dir: Path) -> bool:
    return b'"building":["shard' in (data_dir / "manifest.json").read_bytes()


def has_built(data_dir: Path) -> bool:
    return any(data_dir.glob("shard-*-v2/snapshot/*.snap"))


def is_committed(data_dir: Path) -> bool:
    return b'"shard-00-v2"],"building":[]' in (data_dir / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("stage", "whole_tree"), [(is_building, False), (has_built, True), (is_committed, False)]
)
def test_a_move_that_is_killed_is_done_by_the_next_start(
    tmp_path: Path, before: dict[str, Any], stage: Callable[[Path], bool], whole_tree: bool
) -> None:
    moving = start(tmp_path, 1)
    eventually(lambda: stage(tmp_path))
    if whole_tree:
        os.killpg(moving.pid, signal.SIGKILL)
    else:
        moving.kill()
    moving.wait()
    with running_server(tmp_path, shards=1, **SMALL) as server:
        assert served(Client(server.port), STORED) == before
        manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
        assert manifest.is_settled and folders_of(tmp_path) == list(manifest.directories)


def test_a_damaged_shard_is_not_moved_and_nothing_is_changed(tmp_path: Path, before: dict[str, Any]) -> None:
    path = min(tmp_path.glob("shard-01/wal/*.wal"))
    content = bytearray(path.read_bytes())
    content[4096 + 40] ^= 1
    path.write_bytes(bytes(content))
    files = stored_files(tmp_path)
    manifest = (tmp_path / "manifest.json").read_bytes()
    moving = subprocess.run(
        [sys.executable, "-P", "-m", "streams", "serve", "--shards", "3", "--port", "0"],
        env={**os.environ, "STREAMS_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert moving.returncode == 2
    assert ".wal is damaged at byte" in moving.stderr and "streams repair" in moving.stderr
    assert stored_files(tmp_path) == files
    assert (tmp_path / "manifest.json").read_bytes() == manifest
    assert json.loads(manifest)["shards"] == 2
