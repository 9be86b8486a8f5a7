"""Profiles: stacks are added up, drawn and put into words; a process that cannot be looked at is told.

Method: folded stacks as py-spy writes them, and py-spy itself on a process that is not there.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from loadtests import bench, profile
from loadtests.rows import CaseFailed, Measurement

TEXT = """\
run (trio/run.py:10);handle (shard/core/machine.py:5);parse <&> (streams/p.py:7) 30
run (trio/run.py:12);handle (shard/core/machine.py:9) 50
run (trio/run.py:12);handle (shard/core/machine.py:9) 10
thread (wal-commit) 10
"""


def test_time_is_added_up_by_function_wherever_in_it_the_line_was() -> None:
    found = profile.busiest(profile.fold_stacks(TEXT))
    assert found == [
        ("handle (shard/core/machine.py)", 60, 90),
        ("parse <&> (streams/p.py)", 30, 30),
        ("thread (wal-commit)", 10, 10),
    ]
    assert profile.busiest(profile.fold_stacks(TEXT), count_max=1) == found[:1]


def test_the_graph_is_one_picture_with_a_rectangle_a_function_as_wide_as_its_time() -> None:
    drawn = xml.fromstring(profile.flame("a title", profile.fold_stacks(TEXT)))
    space = "{http://www.w3.org/2000/svg}"
    shapes = {
        group.findtext(f"{space}title"): group.find(f"{space}rect") for group in drawn.iter(f"{space}g")
    }
    widths = {title: float(rect.get("width", "")) for title, rect in shapes.items() if rect is not None}
    assert widths["parse <&> (streams/p.py:7): 30.0%, 30 samples"] == 360.0
    assert widths["handle (shard/core/machine.py:9): 60.0%, 60 samples"] == 720.0
    tops = {rect.get("y") for rect in shapes.values() if rect is not None}
    assert len(tops) == 3, "one row for each level"
    assert profile.flame("nothing", {}).startswith("<svg")


def test_a_process_that_cannot_be_looked_at_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaseFailed, match="py-spy could not record process 999999999"):
        profile.record(999999999, 1, mode="wall")
    asked = argparse.Namespace(workload="single", seconds=1.0, out=tmp_path)
    stacks = {"gateway-0": profile.fold_stacks(TEXT), "shard-0": CaseFailed("not allowed")}
    assert profile.report(asked, "single-64-disk", Measurement({"single-64-disk": 5.0}), stacks) == 2
    told = capsys.readouterr().out
    assert "shard-0: not allowed" in told and "60.0% own  90.0% with calls  handle" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["single-gateway-0.svg", "single.txt"]


def test_every_workload_is_a_row_of_the_benchmark() -> None:
    rows = {row.key for case in bench.CASES for row in case.rows}
    assert set(profile.WORKLOADS.values()) <= rows
