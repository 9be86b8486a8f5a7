"""Runs several jobs in order, as a TOML file lists them, and records each result in a box.

    name = "nightly"

    [[job]]
    job = "archive"                 # a function of streams.spark.jobs, and its arguments
    boxes = ["orders"]
    path = "/data/archive"
    name = "orders"

The first job that fails ends the run; the jobs after it are skipped. A second run resumes each job where it
stopped, because every job does.
"""

from __future__ import annotations

import difflib
import inspect
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from streams.client.answers import Entry
from streams.protocol.errors import BoxNotFound, StreamsError
from streams.spark import jobs
from streams.spark.jobs.job_context import JobContext, JobRefused, boxes_with_prefix

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The box with a record for each finished job.
RUNS_BOX = "pipeline.runs"
JOBS = (
    "archive",
    "archive_table",
    "audit",
    "backfill",
    "compact",
    "replay",
    "rollup",
    "rollup_table",
    "snapshot",
    "vacuum",
)
#: The run sets these, or they cannot be written in a file.
_RESERVED = {"spark", "url", "key", "transform", "dry_run"}
_JOBS_MAX = 100


class JobRun(msgspec.Struct, frozen=True):
    """The result of one job of a run."""

    pipeline: str
    run: str
    number: int
    job: str
    name: str
    #: done, failed, or skipped because a job before it failed.
    state: str
    rows: int = 0
    duration_ms: int = 0
    #: Records that its boxes received during the job.
    lag_records: int = 0
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


class PipelineRun(msgspec.Struct, frozen=True):
    name: str
    run: str
    ok: bool
    jobs: list[JobRun]
    is_dry: bool = False


class JobEntry(msgspec.Struct, frozen=True):
    job: str
    arguments: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.arguments.get("name") or self.arguments.get("to") or self.arguments.get("box") or "")


class Plan(msgspec.Struct, frozen=True):
    name: str
    jobs: list[JobEntry]


def parse_plan(text: str) -> Plan:
    """Parse the text of a pipeline file. Raises `JobRefused` that names the wrong entry."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobRefused(f"the pipeline is not TOML: {error}") from error
    _refuse_unknown(table, ("name", "job"), "the pipeline")
    name, entries = table.get("name"), table.get("job")
    if not isinstance(name, str) or not name:
        raise JobRefused('the pipeline has no name; add a line such as name = "nightly"')
    if not isinstance(entries, list) or not 0 < len(entries) <= _JOBS_MAX:
        raise JobRefused(f"the pipeline needs 1 to {_JOBS_MAX} jobs, each below a line [[job]]")
    return Plan(name, [_parse_job(number, entry) for number, entry in enumerate(entries, 1)])


def _parse_job(number: int, entry: Mapping[str, Any]) -> JobEntry:
    job = entry.get("job")
    if job not in JOBS:
        raise JobRefused(f"job {number}: job must be one of {', '.join(JOBS)}, not {job!r}")
    parameters = inspect.signature(getattr(jobs, job)).parameters
    arguments = {name: value for name, value in entry.items() if name != "job"}
    _refuse_unknown(
        arguments, [each for each in parameters if each not in _RESERVED], f"job {number} ({job})"
    )
    missing = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and name not in _RESERVED | {"boxes"} and name not in arguments
    ]
    if missing:
        raise JobRefused(f"job {number} ({job}): {missing[0]} is missing")
    if "boxes" in parameters and not arguments.get("boxes") and "prefix" not in arguments:
        raise JobRefused(
            f"job {number} ({job}): name its boxes with boxes = [...], or a prefix of their names"
        )
    return JobEntry(job, {"boxes": [], **arguments} if "boxes" in parameters else arguments)


def _refuse_unknown(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise JobRefused(f"{where}: {name} is unknown; {hint}")


def run_pipeline(
    spark: SparkSession,
    plan: Plan,
    *,
    url: str | None = None,
    key: str | None = None,
    step_bytes: int | None = None,
    dry_run: bool = False,
    on_start: Callable[[int, JobEntry], None] | None = None,
) -> tuple[PipelineRun, StreamsError | None]:
    """Run the jobs of a plan in order. Return the results, and the error that ended the run, if any.

    Each result is appended to the box `pipeline.runs` when its job ends, except in a dry run.
    """
    context = JobContext(url, key)
    run = f"{int(time.time() * 1000):013d}-{uuid.uuid4().hex[:8]}"
    results: list[JobRun] = []
    failure: StreamsError | None = None
    for number, entry in enumerate(plan.jobs, 1):
        facts: dict[str, Any] = {
            "pipeline": plan.name,
            "run": run,
            "number": number,
            "job": entry.job,
            "name": entry.title,
        }
        if failure is not None or (results and results[-1].state != "done"):
            result = JobRun(**facts, state="skipped")
        else:
            if on_start is not None:
                on_start(number, entry)
            result, failure = _run_job(spark, context, entry, facts, step_bytes, dry_run)
        results.append(result)
        if not dry_run:
            with context.client() as client:
                client.box(RUNS_BOX).append_batch(
                    [Entry(msgspec.to_builtins(result), tag=plan.name)], idempotency_key=f"{run}-{number}"
                )
    return PipelineRun(
        plan.name, run, all(each.state == "done" for each in results), results, dry_run
    ), failure


def _run_job(
    spark: SparkSession,
    context: JobContext,
    entry: JobEntry,
    facts: dict[str, Any],
    step_bytes: int | None,
    dry_run: bool,
) -> tuple[JobRun, StreamsError | None]:
    function = getattr(jobs, entry.job)
    parameters = inspect.signature(function).parameters
    options = {"url": context.url, "key": context.key, "dry_run": dry_run, "step_bytes": step_bytes}
    arguments = {name: value for name, value in options.items() if name in parameters and value is not None}
    began_s = time.monotonic()
    with _heads(context, entry) as lag:
        try:
            value = function(spark, **arguments | entry.arguments)
        except StreamsError as error:
            details = {"code": error.code, "message": error.message}
            duration_ms = int((time.monotonic() - began_s) * 1000)
            return JobRun(**facts, state="failed", duration_ms=duration_ms, error=details), error
    result = msgspec.to_builtins(value)
    rows = result.get("records", result.get("examined", result.get("keys", 0)))
    duration_ms = int((time.monotonic() - began_s) * 1000)
    state = "done" if result.get("ok", True) else "failed"
    return JobRun(
        **facts,
        state=state,
        rows=rows if isinstance(rows, int) else 0,
        duration_ms=duration_ms,
        lag_records=lag["records"],
        result=result,
    ), None


@contextmanager
def _heads(context: JobContext, entry: JobEntry) -> Iterator[dict[str, int]]:
    """Yield a dict that gets, at the end, the number of records which the boxes of a job received since."""
    lag = {"records": 0}
    boxes = list(entry.arguments.get("boxes", ()))
    if not boxes and not entry.arguments.get("prefix"):
        yield lag
        return

    def heads() -> dict[str, int]:
        with context.shards() as shards:
            names = boxes or boxes_with_prefix(shards, entry.arguments["prefix"])
            return {each.box: each.head_seq for each in shards.states(boxes=names)}

    try:
        before = heads()
    except (BoxNotFound, JobRefused):  # the job reports it
        before = {}
    yield lag
    if before:
        lag["records"] = sum(max(0, head - before.get(box, head)) for box, head in heads().items())
