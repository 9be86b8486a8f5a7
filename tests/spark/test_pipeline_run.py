"""`streams pipeline run`: jobs in order, results in a box, the exit code of the first failure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import streams
from streams.spark.jobs.job_context import JobRefused
from streams.spark.jobs.pipeline import RUNS_BOX, parse_plan
from streams.testing import Server
from tests.support.commands import in_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_jobs_run_in_order_and_the_first_failure_ends_the_run(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    client.box(name).append_batch([{"n": n} for n in range(4)])
    environ = {**os.environ, "STREAMS_URL": server.url, "XDG_CONFIG_HOME": str(tmp_path)}
    file = tmp_path / "pipeline.toml"
    file.write_text(
        f"""
        name = "{name}"
        [[job]]
        job = "archive_table"
        boxes = ["{name}"]
        path = "{tmp_path}/table"
        name = "{name}"
        [[job]]
        job = "replay"
        prefix = "{name}"
        to = "copy.{name}"
        name = "{name}"
        """
    )
    ran = in_process(["pipeline", "run", str(file), "--json", "--step-bytes", "1000000"], environ, tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["ok"] and [(each["job"], each["rows"]) for each in result["jobs"]] == [
        ("archive_table", 4),
        ("replay", 4),
    ]
    file.write_text(file.read_text().replace(f'boxes = ["{name}"]', 'boxes = ["there.is.none"]'))
    again = in_process(["pipeline", "run", str(file)], environ, tmp_path)
    assert again.returncode == 2 and b"there is no box there.is.none" in again.stderr
    records = [each.data for each in client.box(RUNS_BOX).read(0) if each.tag == name]
    assert [(each["number"], each["state"], each["rows"]) for each in records] == [
        (1, "done", 4),
        (2, "done", 4),
        (1, "failed", 0),
        (2, "skipped", 0),
    ]
    assert records[2]["error"]["code"] == "box_not_found"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ('nam = "x"', "did you mean name"),
        ("[[job]]", "has no name"),
        ('name = "x"', "needs 1 to 100 jobs"),
        ('name = "x"\n[[job]]\njob = "archiv"', "job 1: job must be one of archive"),
        ('name = "x"\n[[job]]\njob = "archive"\nname = "a"\nboxes = ["b"]', "path is missing"),
        ('name = "x"\n[[job]]\njob = "archive"\nname = "a"\npath = "p"', "name its boxes"),
        ('name = "x"\n[[job]]\njob = "compact"\nname = "a"\nurl = "p"', "url is unknown"),
        ('name = "x"\n[[job]]\njob = "compact"\nname = "a"\neverythin = true', "did you mean everything"),
    ],
)
def test_a_wrong_entry_of_a_pipeline_is_named(text: str, message: str) -> None:
    with pytest.raises(JobRefused, match=message):
        parse_plan(text)
