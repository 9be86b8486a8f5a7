"""`streams inspect` tells what a server has written, file by file, whole or damaged.

Method: a real server writes, seals and stops; its files are read, then one byte of each is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import streams
from streams.testing import Server, running_server
from tests.support.commands import Ran, in_process


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("inspected") / "data"
    settings = {"shards": 1, "segment_max_events": 100, "segment_max_bytes": 65536}
    with running_server(folder, **settings) as server, streams.Client(server.url) as client:
        for _ in range(8):
            client.box("orders").append_batch([{"item": n, "text": "x" * 300} for n in range(100)])
        client.box("notes").append("a secret")
        [seal] = list(folder.glob("shard-*"))
        while not list(seal.glob("segments/*/*.seg")):
            client.box("orders").append_batch([{"text": "x" * 300} for _ in range(100)])
    yield folder


def looked_at(path: Path, *words: str) -> Ran:
    return in_process(
        ["inspect", str(path), *words], dict(os.environ), path if path.is_dir() else path.parent
    )


def rows_of(path: Path, *words: str) -> list[dict[str, object]]:
    ran = looked_at(path, *words)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def one(data_dir: Path, pattern: str) -> Path:
    return sorted(data_dir.glob(pattern))[-1]


def test_a_folder_is_listed_by_kind(data_dir: Path) -> None:
    kinds = {str(row["kind"]) for row in rows_of(data_dir)}
    assert kinds == {"log", "segment", "snapshot", "manifest"}


def test_a_log_is_told_change_by_change_without_payloads(data_dir: Path) -> None:
    rows = [row for path in sorted(data_dir.glob("shard-*/wal/*.wal")) for row in rows_of(path)]
    assert {"box created", "batch appended", "segment sealed", "shard stopped"} <= {
        row["change"] for row in rows
    }
    (note,) = [row for row in rows if row.get("box") == "notes" and row["change"] == "batch appended"]
    assert note["batch"] == {"first_seq": 1, "records": 1, "bytes": note["batch"]["bytes"]}  # type: ignore[index]
    assert "secret" not in str(rows)
    lsns = [row["lsn"] for row in rows]
    assert lsns == sorted(lsns, key=int)  # type: ignore[arg-type]


@contextmanager
def full_log(folder: Path) -> Iterator[tuple[Server, list[Path]]]:
    """A server that writes the second file of its log, and both files."""
    with (
        running_server(folder, shards=1, wal_file_bytes=65536) as server,
        streams.Client(server.url) as client,
    ):
        while len(found := sorted(folder.glob("shard-*/wal/*.wal"))) < 2:
            client.box("notes").append("x" * 5000)
        client.box("notes").append("the last")
        yield server, found


def test_a_log_that_is_written_and_one_that_is_full_are_whole(tmp_path: Path) -> None:
    with full_log(tmp_path) as (_, (full, written)):
        assert rows_of(full)[0]["change"] == "shard started"
        assert rows_of(written)[-1]["change"] == "batch appended"


def test_a_full_log_that_has_lost_its_end_says_so(tmp_path: Path) -> None:
    with full_log(tmp_path) as (server, (full, _)):
        last = rows_of(full)[-1]
        with open(full, "r+b") as file:
            file.seek(int(str(last["offset"])))
            file.write(bytes(1 << 16))
        ran = looked_at(full)
        problem = json.loads(ran.stdout.splitlines()[-1])
        server.kill()  # what it holds is damaged now, and is not to be stopped in order
    assert ran.returncode == 6 and problem == {
        "offset": last["offset"],
        "problem": "no valid frame begins here",
    }


def test_a_segment_is_told_batch_by_batch_and_record_by_record(data_dir: Path) -> None:
    path = one(data_dir, "shard-*/segments/*/*.seg")
    batches = rows_of(path)
    records = rows_of(path, "--records")
    assert sum(int(str(row["records"])) for row in batches) == len(records)
    assert records[0]["$seq"] == batches[0]["first_seq"] and "data" in records[0]


def test_a_snapshot_is_told_box_by_box(data_dir: Path) -> None:
    rows = {row["box"]: row for row in rows_of(one(data_dir, "shard-*/snapshot/*.snap"))}
    assert rows["notes"]["records"] == 1 and rows["orders"]["segments"]


def test_the_manifest_says_who_has_the_slots(data_dir: Path) -> None:
    (facts,) = rows_of(data_dir / "manifest.json")
    assert facts["slots_of_shard"] == {"0": 4096}


@pytest.mark.parametrize(
    "pattern", ["shard-*/wal/*.wal", "shard-*/segments/*/*.seg", "shard-*/snapshot/*.snap", "manifest.json"]
)
def test_damage_is_told_and_has_its_exit_code(data_dir: Path, pattern: str, tmp_path: Path) -> None:
    path = one(data_dir, pattern) if "wal" not in pattern else sorted(data_dir.glob(pattern))[0]
    content = bytearray(path.read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 0xFF
    damaged = tmp_path / path.parent.name / path.name
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(content)
    ran = looked_at(damaged, "--json")
    records = looked_at(damaged, "--records") if path.suffix == ".seg" else ran
    problems = [json.loads(line) for line in (ran.stdout + records.stdout).splitlines() if b"problem" in line]
    assert problems and records.returncode == 6


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gone.wal", (), "does not exist"),
        ("notes.txt", (), "is not a log"),
        ("seven.wal", (), "must be its number"),
        ("seven.snap", (), "named like a snapshot"),
        ("1.wal", ("--records",), "works only with segments"),
    ],
)
def test_what_is_no_file_of_a_server_is_refused(
    name: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    if "gone" not in name:
        (tmp_path / name).write_bytes(b"hello")
    ran = looked_at(tmp_path / name, *words)
    assert message in (ran.stdout + ran.stderr).decode() and ran.returncode in (2, 6)


def test_an_empty_folder_has_nothing_to_show(tmp_path: Path) -> None:
    assert looked_at(tmp_path).returncode == 5
