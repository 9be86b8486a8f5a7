"""Steps of jobs: what the ledger says is done, and what becomes of a step that was stopped. Against a real
server and without a JVM: a commit of nothing sets the mark of an epoch as one with rows does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import streams
from streams.direct import Shards, Txn
from streams.spark import sink
from streams.spark.jobs import steps as module
from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.jobs.steps import Steps
from streams.spark.options import WRITE, parse_write_options
from streams.spark.sink import AlreadyCommitted
from streams.testing import Server


@pytest.fixture
def shards(server: Server) -> Iterator[Shards]:
    with Shards(server.url) as found:
        yield found


def commit_epoch(shards: Shards, writer: str, epoch: int, *, on: int = 4) -> None:
    for shard in range(on):
        shards.txn_commit(shard, Txn(writer, epoch), [])


def load_steps(client: streams.Client, shards: Shards, name: str) -> Steps:
    return Steps(Ledger(client, name), shards, name)


def test_a_step_is_planned_written_and_done(client: streams.Client, shards: Shards, name: str) -> None:
    first = load_steps(client, shards, name)
    written: list[dict[str, Any]] = []

    def write(**options: Any) -> int:
        written.append(options)
        return 7

    assert first.run(first.plan({"what": "a"}), write) == 7
    assert written == [{"epoch": 0, "txnIfDone": "fail"}]
    again = load_steps(client, shards, name)
    assert [plan["what"] for plan in again.completed_plans] == ["a"] and again.unfinished_plan is None
    assert again.plan({"what": "b"})["step"] == 1


def test_a_stopped_step_is_cut_anew_unless_a_shard_has_committed_it(
    client: streams.Client, shards: Shards, name: str
) -> None:
    load_steps(client, shards, name).plan({"what": "large"})
    second = load_steps(client, shards, name)
    assert (second.completed_plans, second.unfinished_plan) == ([], None)
    plan = second.plan({"what": "small"})
    assert (plan["step"], plan["cut"]) == (0, 1)
    commit_epoch(shards, name, 0, on=2)
    third = load_steps(client, shards, name)
    assert third.unfinished_plan is not None and third.unfinished_plan["what"] == "small"
    written: list[dict[str, Any]] = []
    third.run(third.unfinished_plan, lambda **options: written.append(options) or 0)  # type: ignore[func-returns-value]
    assert written == [{"epoch": 0}], "rows are added where they are missing"
    load_steps(client, shards, name).plan({"what": "next"})
    commit_epoch(shards, name, 1)
    assert [each["what"] for each in load_steps(client, shards, name).completed_plans] == ["small", "next"]


def test_a_process_that_a_stopped_run_left_behind_cannot_commit_once_the_next_run_has_begun(
    server: Server, client: streams.Client, shards: Shards, name: str
) -> None:
    load_steps(client, shards, name).plan({"what": "large"})
    write = parse_write_options({"url": server.url, "box": f"{name}.to"}, WRITE)
    rows = pa.RecordBatch.from_pydict({"data": ["1", "2"]})
    left_behind = sink.send_rows(write, Txn(name, 0), iter([rows]))
    second = load_steps(client, shards, name)
    with pytest.raises(streams.Refused, match="0 chunks are held"):
        sink.commit_tasks(write, [left_behind])
    plan = second.plan({"what": "small"})
    assert (plan["step"], plan["cut"], max(second._committed_epochs())) == (0, 1, -1)


def test_two_runs_at_a_time_are_refused_and_a_step_that_both_wrote_is_disputed(
    client: streams.Client, shards: Shards, name: str
) -> None:
    first, second = load_steps(client, shards, name), load_steps(client, shards, name)
    first.plan({"what": "a"})
    with pytest.raises(JobRefused, match="another run of this job is writing"):
        second.plan({"what": "b"})
    third = load_steps(client, shards, name)

    def write(**options: Any) -> int:
        raise AlreadyCommitted.of(Txn(name, 0))

    with pytest.raises(JobRefused, match="has committed step 0 in the meantime"):
        third.run(third.plan({"what": "c"}), write)
    with pytest.raises(JobRefused, match="wrote step 0 at the same time"):
        load_steps(client, shards, name)


def test_ledgers_of_the_first_version_are_read_with_the_marks(
    client: streams.Client, shards: Shards, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.box(name).append_batch([{"group": n, "files": [str(n)]} for n in range(3)])
    commit_epoch(shards, name, 1)
    for _ in range(2):
        found = load_steps(client, shards, name)
        assert [plan["files"] for plan in found.completed_plans] == [["0"], ["1"]]
    assert found.plan({"files": ["2"]})["step"] == 2

    client.box(f"{name}.replay").append_batch([{"step": n} for n in range(3)])
    assert len(load_steps(client, shards, f"{name}.replay").completed_plans) == 2, (
        "a replay planned one step at a time"
    )
    client.box(f"{name}.old").append_batch([{"group": 0, "files": []}])
    monkeypatch.setattr(module, "_OLD_EPOCH_RETENTION_MS", -1)
    with pytest.raises(JobRefused, match="the server no longer knows"):
        load_steps(client, shards, f"{name}.old")
