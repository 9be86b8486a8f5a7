"""`streams pipeline …` as it is typed, and the pages about Spark: every example runs.

Method: the verbs run in this process, on the session that is there; the page's blocks run in order in one
namespace, with the address and the folder of the page replaced by those of the test.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

import streams
from streams.cli import cli, run
from streams.cli.output import Refusal
from streams.cli.pipeline_options import SparkOptions
from streams.cli.verbs import examples_of
from streams.spark import jobs
from streams.spark.jobs.spark_errors import StoreNotInstalled
from streams.testing import Server, running_server
from tests.support.cli_page import commands
from tests.support.commands import in_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOBS = {name: command for name, command in commands(cli, "streams") if name.startswith("streams pipeline ")}
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "spark.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("verb", JOBS)
def test_each_example_of_a_job_works_as_typed(
    verb: str, spark: SparkSession, server: Server, client: streams.Client, tmp_path: Path
) -> None:
    for box in list(client.boxes()):
        if "/" not in box.box:  # a stream of another test
            client.box(box.box).drop()
    client.box("orders").append_batch([streams.Entry({"item": n}, tag="kitchen") for n in range(3)])
    (tmp_path / "orders.ndjson").write_text('{"item": 1}\n{"item": 2}\n')
    (tmp_path / "pipeline.toml").write_text(
        'name = "nightly"\n[[job]]\njob = "snapshot"\nbox = "orders"\n'
        '[[job]]\njob = "audit"\nboxes = ["orders"]\n'
    )
    environ = {**os.environ, "STREAMS_URL": server.url, "XDG_CONFIG_HOME": str(tmp_path)}
    assert examples_of(JOBS[verb])
    for line in examples_of(JOBS[verb]):
        # A line of another verb prepares this one: once is enough.
        is_own = line.startswith(verb) and not verb.endswith("audit")
        for more in (("--dry-run",), ("--json",)) if is_own else (("--json",),):
            ran = in_process([*shlex.split(line)[1:], *more], environ, tmp_path)
            assert ran.returncode == 0, f"{line}\n{ran.stdout!r}\n{ran.stderr!r}"
            assert json.loads(ran.stdout)


def test_a_job_that_finds_damage_or_loss_says_so_by_its_exit_code(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    client.box(name).create(cap_records=5)
    for _ in range(2):
        client.box(name).append_batch([streams.Entry(n, tag="t") for n in range(4)])
    environ = {**os.environ, "STREAMS_URL": server.url, "XDG_CONFIG_HOME": str(tmp_path)}
    audited = in_process(["pipeline", "audit", name], environ, tmp_path)
    assert audited.returncode == 6 and b"has lost records 1 to 3" in audited.stdout
    lost = in_process(
        ["pipeline", "replay", name, "--to", "x", "--name", name, "--from", "0"], environ, tmp_path
    )
    assert lost.returncode == 2 and b"(records_lost)" in lost.stderr and b"--skip-gaps" in lost.stderr


def test_a_terminal_sees_a_bar_that_is_gone_at_the_end_and_a_program_sees_none(
    spark: SparkSession, server: Server, client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.box(name).append(1)
    monkeypatch.setenv("STREAMS_URL", server.url)
    monkeypatch.setenv("TERM", "xterm")
    drawn: dict[str, bytes] = {}
    for given in ("", "--json"):
        ours, theirs = pty.openpty()
        with ThreadPoolExecutor() as reader, os.fdopen(ours, "rb", 0) as seen:
            with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
                whole = reader.submit(_all_of, seen)
                patched.setattr("sys.stderr", terminal)
                assert run(["pipeline", "audit", name, *given.split()]) == 0
            drawn[given] = whole.result()
    assert drawn["--json"] == b""
    bar = drawn[""]
    assert b"audit" in bar and b"/?" in bar
    assert bar.rindex(b"\x1b[2K") > bar.rindex(b"/?"), "its line is wiped"
    assert bar.rindex(b"\x1b[?25h") > bar.rindex(b"\x1b[?25l"), "the cursor is back"


def _all_of(terminal: IO[bytes]) -> bytes:
    found = b""
    try:
        while piece := terminal.read(65536):
            found += piece
    except OSError:  # the other end is closed
        pass
    return found


def test_settings_and_packages_of_spark_are_passed_on() -> None:
    engine = SparkOptions(None, None, None, ("spark.jars.packages=a:b:1", "x=y=z"), ("c:d:2",))
    assert engine.settings() == {"spark.jars.packages": "a:b:1,c:d:2", "x": "y=z"}
    with pytest.raises(Refusal, match="--conf needs NAME=VALUE"):
        SparkOptions(None, None, None, ("x",), ()).settings()
    with pytest.raises(Refusal, match="--packages cannot be used with --remote"):
        SparkOptions(None, "sc://a", None, (), ("c:d:2",)).settings()


def test_a_job_takes_boxes_or_a_prefix_of_their_names(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    for given in ([], ["a", "--prefix", "b"]):
        ran = in_process(["pipeline", "audit", *given], environ, tmp_path)
        assert ran.returncode == 2 and b"either as BOXES or with --prefix, not both" in ran.stderr


def test_a_path_that_spark_cannot_reach_names_the_package_that_is_missing(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).append(1)
    with pytest.raises(StoreNotInstalled, match=r"--packages org\.apache\.hadoop:hadoop-aws:3\.\d+\.\d+"):
        jobs.archive(spark, [name], "s3a://bucket/archive", name=name, url=server.url)


def test_without_what_connect_needs_the_extra_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", None)
    environ = {**os.environ, "STREAMS_URL": server.url, "XDG_CONFIG_HOME": str(tmp_path)}
    ran = in_process(["pipeline", "audit", "b", "--remote", "sc://127.0.0.1:1"], environ, tmp_path)
    assert ran.returncode == 2 and b"streams-server[connect]" in ran.stderr


def test_the_how_to_runs_from_its_first_block_to_its_last(spark: SparkSession, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 9
    keys, key = tmp_path / "keys", tmp_path / "spark.key"
    keys.write_text("secret-of-the-executors-0123456789:rw:far.\n")
    key.write_text("secret-of-the-executors-0123456789\n")
    keys.chmod(0o600)
    with (
        running_server(shards=2) as server,
        running_server(shards=2, api_keys_file=keys, shard_host="127.0.0.1", shard_port=0) as far,
    ):
        here = {
            "http://127.0.0.1:4000": server.url,
            "/tmp/spark-how-to": str(tmp_path),
            "http://127.0.0.1:4001": far.url,
            "/etc/streams/spark.key": str(key),
        }
        found: dict[str, Any] = {}
        for block in blocks:
            for there, mine in here.items():
                block = block.replace(there, mine)
            exec(compile(block, str(PAGE), "exec"), found)
        # Over TCP the key's prefix holds. By the Unix socket, which is there too, it would not.
        with pytest.raises(PySparkException, match="near"):
            found["rows"].write.format("streams").options(**found["there"]).mode("append").save("near.orders")


def test_the_recipe_for_change_data_capture_works_as_typed(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    page = PAGE.parents[1] / "cookbook" / "cdc-to-iceberg.md"
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) == 3
    found: dict[str, Any] = {}
    for block in blocks:
        typed = block.replace("http://127.0.0.1:4000", server.url).replace("/tmp/cdc", str(tmp_path))
        exec(compile(typed, str(page), "exec"), found)
