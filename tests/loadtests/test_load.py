"""`make load` and `make soak` load a real server, check it meanwhile, and fail when a record goes missing.

Method: the command as a user runs it, for seconds. Its speed is not looked at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from loadtests import load
from loadtests.audit import once
from streams.testing import running_server

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs" / "howto" / "load-test.md").read_text()


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadtests.load", *words, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_soak_with_kills_finds_nothing_wrong_and_writes_one_self_contained_file(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    running = start(out, "soak", "--seconds", "6", "--kill-every", "2.5", "--shards", "2")
    told = running.communicate(timeout=240)[0]
    assert running.returncode == 0, told
    verdict = json.loads(out.with_suffix(".json").read_text())
    assert verdict["is_good"] and verdict["acked"] > 0 and verdict["faults"] == {}
    assert verdict["beside"]["kills"] >= 1 and "gateway_mb" in verdict["beside"]
    text = out.read_text()
    assert "none lost, doubled or reordered" in text and "none lost, doubled or reordered" in told
    assert not re.search(r'<(?:link|script|img)[^>]*(?:src|href)="(?!data:)[^\'"+]', text), "loads something"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


@pytest.mark.slow
def test_a_record_that_vanishes_meanwhile_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with running_server(tmp_path / "data", shards=1) as server:
        running = start(out, "poll", "--users", "4", "--seconds", "4", "--host", server.url)
        deadline = monotonic() + 60
        while not (full := [box for box in boxes(server.url) if box["head_seq"] > 200]):
            assert monotonic() < deadline and running.poll() is None
        # Whoever had read them before: the last check reads the box again, from its start.
        box, head = full[0]["box"], full[0]["head_seq"]
        once(server.url, "POST", f"/v0/boxes/{box}/delete", {"before_seq": head})
        told = running.communicate(timeout=240)[0]
    assert running.returncode == 3, told
    verdict = json.loads(out.with_suffix(".json").read_text())
    assert not verdict["is_good"] and verdict["faults"]["lost"] > 0
    assert f"lost: {box}" in told and "lost: " in out.read_text()


def boxes(url: str) -> list[dict[str, Any]]:
    status, text = once(url, "GET", "/v0/boxes?prefix=load-")
    assert status == 200
    found: list[dict[str, Any]] = json.loads(text)["boxes"]
    return [box for box in found if "copy" not in box["box"] and "jobs" not in box["box"]]


def test_every_scenario_and_shape_is_explained() -> None:
    for name in (*load.SCENARIOS, *load.SHAPES):
        assert f"`{name}`" in HOW_TO


def test_kills_need_a_server_that_is_started_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.arguments(["soak", "--host", "http://127.0.0.1:4000"])
    assert "--kill-every needs a server" in capsys.readouterr().err
    assert load.arguments(["soak", "--kill-every", "0", "--host", "http://x"]).kill_every == 0


def test_memory_is_compared_at_equal_ages_and_without_the_warm_up() -> None:
    beside = load.ServerWatch(None, 30.0)  # type: ignore[arg-type]
    beside.gateway = [(0, 900e6), *((float(at), 100e6 + at * 1e3) for at in range(20, 600, 20))]
    found = beside.result()
    assert found["gateway_mb_per_hour"] == 3.6 and found["gateway_mb_range"][1] < 101
    assert "shard_mb" not in found, "none has lived long enough"


def test_a_slope_of_memory_is_left_out_of_a_short_run() -> None:
    beside = load.ServerWatch(None, 30.0)  # type: ignore[arg-type]
    beside.gateway = [(float(at), 100e6 + at * 1e6) for at in range(0, 20, 2)]
    found = beside.result()
    assert "gateway_mb" in found and "gateway_mb_per_hour" not in found
    verdict = {"acked": 0, "jobs_done": 0, "retried": 0, "faults": {}, "descriptions": [], "beside": found}
    assert load.sentences(verdict)[-1].endswith("too short for a slope.")


def test_the_verdict_is_put_into_sentences() -> None:
    good: dict[str, Any] = {
        "acked": 12000,
        "jobs_done": 3,
        "retried": 4,
        "faults": {},
        "descriptions": [],
        "is_good": True,
    }
    assert load.sentences(good) == [
        "12,000 records and 3 jobs were checked: none lost, doubled or reordered. 4 requests were repeated."
    ]
    bad = good | {"faults": {"lost": 2, "doubled": 0}, "descriptions": ["lost: b"], "is_good": False}
    assert "2 lost" in load.sentences(bad)[0] and load.sentences(bad)[-1] == "lost: b"
