"""`make bench` works: every row is measured on a real server and stands in the JSON with its floor and aim.

Method: the benchmark as a user runs it, with tiny sizes. Its figures mean nothing here and are not looked at,
except that there are some.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests import bench, machine, report, rows
from loadtests.generator import append_body, record_text

ROOT = Path(__file__).parents[2]
README = (ROOT / "loadtests" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_row_is_measured_and_reported(tmp_path: Path) -> None:
    """Rows of Spark are measured in tests/spark, which has a JVM already."""
    file = tmp_path / "run.json"
    quick = ["--quick", "--seconds", "0.2", "--set", "shards=1", "--json", str(file), "--rows", "!spark-*"]
    ran = subprocess.run(
        [sys.executable, "-m", "loadtests.bench", *quick, "--data-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = json.loads(file.read_text())
    assert (ROOT / "build" / "bench.json").exists()
    assert run["machine"]["cores"] >= 1 and run["machine"]["filesystem"] != "unknown"
    expected = [row for case in bench.CASES for row in case.rows if not row.key.startswith("spark-")]
    assert [row["key"] for row in run["rows"]] == [row.key for row in expected]
    for row, found in zip(expected, run["rows"], strict=True):
        assert found["error"] == "", found
        if found["skipped"]:  # a peer that is not installed
            assert row.key in ("producer-redis", "producer-nats") and "not installed" in found["skipped"]
            assert found["skipped"] in ran.stdout
            continue
        assert found["figure"] is not None, found
        assert found["floor"] == row.floor and found["aim"] == row.aim
        assert isinstance(found["meets_floor"], bool) == (row.floor is not None)
        assert row.title in ran.stdout
    assert list(tmp_path.iterdir()) == [file], "data is left behind"


def test_every_row_is_explained() -> None:
    for case in bench.CASES:
        for row in case.rows:
            assert f"`{row.key}`" in README


def test_records_have_the_size_and_shape_they_claim() -> None:
    dice = random.Random(7)
    for _ in range(200):
        text = record_text(dice, record_bytes=rows.RECORD_BYTES)
        assert len(text) == rows.RECORD_BYTES and json.loads(text)["tag"]
        data = json.loads(record_text(dice, data_bytes=rows.DATA_BYTES))["data"]
        assert len(json.dumps(data, separators=(",", ":"))) == rows.DATA_BYTES
    assert len(json.loads(append_body(3, 10, record_bytes=rows.RECORD_BYTES))["records"]) == 10


def test_a_busy_machine_and_a_disk_in_ram_are_warned_about() -> None:
    quiet = {
        "cores": 2,
        "cores_used_by_others": 0.0,
        "load_average": [0.0],
        "data_dir": "/x",
        "filesystem": "ext4",
        "speed": 1.0,
    }
    assert machine.warnings_of(quiet) == []
    assert "0.50" in machine.warnings_of(quiet | {"speed": 0.5})[0]
    assert "busy" in machine.warnings_of(quiet | {"cores_used_by_others": 1.0})[0]
    assert "tmpfs" in machine.warnings_of(quiet | {"filesystem": "tmpfs"})[0]


@pytest.mark.parametrize(
    ("better", "figure", "speed", "expected"),
    [
        ("more", 6_000.0, 0.5, "below floor, slow machine"),
        ("more", 4_000.0, 0.5, "BELOW FLOOR"),
        ("more", 9_000.0, 1.0, "BELOW FLOOR"),
        ("less", 15_000.0, 0.5, "below floor, slow machine"),
        ("less", 25_000.0, 0.5, "BELOW FLOOR"),
    ],
)
def test_a_floor_missed_on_a_slow_machine_says_so(
    better: str, figure: float, speed: float, expected: str
) -> None:
    row = {
        "key": "append",
        "figure": figure,
        "floor": 10_000.0,
        "meets_aim": False,
        "meets_floor": False,
        "better": better,
    }
    assert report.verdict(row | {"speed": speed}) == expected


@pytest.mark.parametrize(
    ("better", "figure", "expected"),
    [
        ("more", 6_000.0, "below floor, slow machine"),
        ("more", 4_000.0, "BELOW FLOOR"),
        ("less", 15_000.0, "below floor, slow machine"),
        ("less", 25_000.0, "BELOW FLOOR"),
    ],
)
def test_a_slow_disk_counts_as_the_reference_disk(better: str, figure: float, expected: str) -> None:
    """Half of a request is the sync of a slow disk, which the reference disk does in no time."""
    row = {
        "key": "append-fsync",
        "figure": figure,
        "floor": 10_000.0,
        "meets_aim": False,
        "meets_floor": False,
        "better": better,
        "speed": 1.0,
        "latency_ms": 4.0,
        "sync_ms": 2.0 + machine.REFERENCE_SYNC_MS,
    }
    assert report.verdict(row) == expected
