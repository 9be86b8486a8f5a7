"""Every example in every command's help works as it is typed, and the reference page is what the help says.

Method: bash runs each example in a folder of its own, with our `streams` first on the path, against one real
server whose boxes are put back to the same state before each command.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import streams
from streams.cli import COMMANDS, cli
from streams.cli.output import NEXT_STEPS
from streams.cli.verbs import examples_of
from streams.client.errors import AnswerLost, Closed, NotAnAnswer, Unreachable
from streams.config import READY_FD_VARIABLE
from streams.direct import BoxMoved, Shards, Txn, pack
from streams.protocol.errors import BY_CODE
from streams.spark.gaps import GapError
from streams.spark.java import JavaNotFound
from streams.spark.jobs.job_context import JobRefused
from streams.spark.sessions import SparkNotInstalled
from streams.spark.sink import PartialCommit
from streams.testing import Server, running_server
from tests.support.cli_page import commands, page
from tests.support.commands import Ran, in_process

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
ALL = dict(commands(cli, "streams"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as found:
        yield found


@pytest.fixture
def environ(server: Server, tmp_path: Path) -> dict[str, str]:
    """The environment of a user with this server, these boxes and these contexts."""
    with streams.Client(server.url) as client:
        for router in client.routers():
            client.drop_router(router.router)
        for box in client.boxes():
            client.box(box.box).drop()
        orders = client.box("orders")
        orders.append_batch([streams.Entry({"item": n}, tag="kitchen") for n in range(3)])
        orders.group("billing").commit(1)
        client.box("notes").append("hello")
        client.put_router("orders-audit", "orders", "audit")
        client.box("jobs.dead").create()
        jobs = client.queue("jobs")
        jobs.create(max_deliveries=1, dead_letter="jobs.dead")
        jobs.append({"n": 0})
        jobs.nack("w0", jobs.claim("w0"))
        assert jobs.claim("w0") == []
        assert next(client.box("jobs.dead").follow()).data == {"n": 0}  # type: ignore[union-attr]
        jobs.append_batch([{"n": 1}, {"n": 2}])
        jobs.append({"n": 3}, delay=3600)
        client.schedules.put("report", "jobs", {"kind": "report"}, cron="@monthly")
    with Shards(server.url) as shards:
        shards.txn_put(0, Txn("nightly", 7), "p", 0, pack(["orders"], [1], [b"1"]))
        shards.txn_commit(0, Txn("weekly", 1), [])
    config = tmp_path / "config"
    (config / "streams").mkdir(parents=True)
    known = {"current": "staging", "contexts": {"staging": {"url": server.url, "key": ""}}}
    (config / "streams" / "contexts.json").write_text(json.dumps(known))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **kept,
        "XDG_CONFIG_HOME": str(config),
        "PATH": path,
        "STREAMS_URL": server.url,
        "STREAMS_DATA_DIR": str(server.data_dir),
    }


def typed(line: str, environ: dict[str, str], folder: Path) -> Ran:
    """A line as bash would run it. One that needs no shell is run in this process, which differs only in the
    time that an interpreter takes to start."""
    words = shlex.split(line)
    if words[0] == "streams" and not {"|", ">"} & set(words):
        return in_process(words[1:], environ, folder)
    command = ["bash", "-o", "pipefail", "-c", line]
    ran = subprocess.run(command, env=environ, cwd=folder, capture_output=True, timeout=120, input=b"")
    return Ran(ran.returncode, ran.stdout, ran.stderr)


#: What must have happened before an example makes sense.
BEFORE = {
    "streams queue ack": "streams queue claim jobs --node w1 --max 2",
    "streams queue nack": "streams queue claim jobs --node w1 --max 2",
    "streams queue extend": "streams queue claim jobs --node w1 --max 2",
    "streams import": "streams export orders -o orders.ndjson",
    "streams backup": "mkdir -v backups",
    "streams restore": "mkdir backups && streams backup backups",
    "streams takeover": "mkdir cold it && streams backup it && streams restore it --data-dir restored",
    "streams repair": "mkdir it && streams backup it && streams restore it --data-dir restored",
}


#: Examples that need more than this server: `serve` is one, and jobs are run by tests/spark/test_pipeline.py.
ELSEWHERE = ("streams serve", "streams pipeline ")


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(ELSEWHERE)])
def test_each_example_of_a_command_works_as_typed(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    assert examples_of(ALL[name]), f"{name} has no example"
    if name in BEFORE:
        line = BEFORE[name]
        assert typed(line, environ, tmp_path).returncode == 0
        if "claim" in line:  # the examples name job 1; here the first that is ready has another seq
            seq = _claimed_seq(environ)
            lines = [each.replace(" jobs 1 ", f" jobs {seq} ") for each in examples_of(ALL[name])]
        else:
            lines = list(examples_of(ALL[name]))
    else:
        lines = list(examples_of(ALL[name]))
    for line in lines:
        ran = typed(line, environ, tmp_path)
        assert ran.returncode == 0, f"{line}\n{ran.stdout!r}\n{ran.stderr!r}"
        if name != "streams completion":
            assert ran.stdout or "gaps" in name, f"{line} printed nothing"
        for each in ran.stdout.splitlines():
            json.loads(each)  # in a pipe, data is one JSON value a line


def _claimed_seq(environ: dict[str, str]) -> int:
    with streams.Client(environ["STREAMS_URL"]) as client:
        return client.queue("jobs").state().earliest_seq


def test_the_example_of_serve_serves(environ: dict[str, str], tmp_path: Path) -> None:
    line = examples_of(ALL["streams serve"])[1].replace("5000", "0")
    reader, writer = os.pipe()
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        env={**environ, READY_FD_VARIABLE: str(writer)},
        cwd=tmp_path,
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(writer)
        with open(reader) as ready:
            assert json.loads(ready.readline())["ready"]
        assert (tmp_path / "data" / "manifest.json").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


def test_the_reference_page_is_not_stale() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("name", ALL)
def test_each_command_has_help_an_example_and_json(name: str) -> None:
    command = ALL[name]
    assert command.help and command.help.strip().endswith((".", "`")), name
    assert examples_of(command), name
    options = {option for param in command.params for option in param.opts}
    assert "--json" in options or name == "streams completion", "all but a script can be JSON"
    for param in command.params:
        if isinstance(param, click.Option) and "--help" not in param.opts:
            assert param.help or param.show_default, f"{name} {param.opts}"


def test_the_list_of_verbs_loads_none_of_them() -> None:
    """Else `streams --help`, and each completion of a word, would take as long as the slowest of them."""
    program = "import sys; from streams.cli import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=120)
    shown = ran.stdout.decode()
    assert all(f"  {verb} " in shown and text in shown for verb, (_, text) in COMMANDS.items())
    loaded = set(ran.stderr.decode().split())
    assert "streams.cli.output" in loaded
    assert not loaded & {
        "msgspec",
        "rich",
        "trio",
        *(module.partition(":")[0] for module, _ in COMMANDS.values()),
    }


def test_every_error_says_the_next_step() -> None:
    ours = {error.code for error in (Unreachable, AnswerLost, NotAnAnswer, Closed, BoxMoved)}
    of_jobs = {each.code for each in (GapError, PartialCommit, JobRefused, JavaNotFound, SparkNotInstalled)}
    assert set(NEXT_STEPS) == set(BY_CODE) | ours | of_jobs
