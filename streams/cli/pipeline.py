"""`streams pipeline …`: the jobs of `streams.spark.jobs`, with Spark on this machine or on a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from streams.cli import output
from streams.cli.verbs import Target, connected, example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])

#: Between two looks at how far Spark is.
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Engine:
    """Which Spark does the work, and how it is set."""

    master: str | None
    remote: str | None
    cores: int | None
    conf: tuple[str, ...]
    packages: tuple[str, ...]

    def settings(self) -> dict[str, str]:
        found = dict(each.split("=", 1) for each in self.conf if "=" in each)
        if len(found) != len(self.conf):
            raise output.Refusal("--conf needs a name and a value: --conf spark.executor.memory=4g")
        if self.packages:
            if self.remote is not None:
                raise output.Refusal("--packages goes without --remote: packages are those of the server")
            known = [found["spark.jars.packages"]] if "spark.jars.packages" in found else []
            found["spark.jars.packages"] = ",".join([*known, *self.packages])
        return found


def _spark_options(function: F) -> F:
    """Options that every job has, as one argument `engine`."""
    options = (
        click.option("--master", metavar="URL", help="Spark cluster: spark://…, yarn, k8s://…, local[4]."),
        click.option("--remote", metavar="URL", help="Spark Connect server: sc://host."),
        click.option(
            "--cores", type=click.IntRange(1), help="Cores of this machine to use; all, if not said."
        ),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="Setting of Spark."),
        click.option(
            "--packages",
            multiple=True,
            metavar="GROUP:NAME:VERSION",
            help="Package that Spark loads, for example org.apache.hadoop:hadoop-aws:3.5.0 for s3a://.",
        ),
    )

    @wraps(function)
    def gathered(
        *args: Any,
        master: str | None,
        remote: str | None,
        cores: int | None,
        conf: tuple[str, ...],
        packages: tuple[str, ...],
        **more: Any,
    ) -> Any:
        return function(*args, engine=Engine(master, remote, cores, conf, packages), **more)

    found: Any = gathered
    for option in reversed(options):
        found = option(found)
    return cast(F, found)


def _boxes(function: F) -> F:
    """BOXES, or a prefix of their names."""
    found: Any = click.option(
        "--prefix", metavar="TEXT", help="Instead of BOXES: all whose names start with this."
    )(function)
    return cast(F, click.argument("boxes", nargs=-1)(found))


def _check_boxes(boxes: tuple[str, ...], prefix: str | None) -> None:
    if bool(boxes) == (prefix is not None):
        raise output.Refusal("give BOXES or --prefix, one of them")


_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
_name = click.option("--name", required=True, help="Of the job; under it, a later run goes on.")
_gaps = click.option(
    "--skip-gaps", is_flag=True, help="Go on when records are lost; without it, the job refuses."
)


@contextmanager
def _session(title: str, target: Target, engine: Engine) -> Iterator[SparkSession]:
    """A session, and a bar that shows how many of Spark's tasks are done; none for a program (`--json`)."""
    from pyspark.sql import SparkSession

    from streams.spark.sessions import session

    remote = engine.remote
    is_ours = remote is not None or SparkSession.getActiveSession() is None
    spark = session(
        engine.cores,
        master=engine.master,
        remote=remote,
        app=f"streams pipeline {title}",
        config=engine.settings(),
    )
    ended = threading.Event()
    try:
        with output.progress(title, None) if not target.as_json else nullcontext(_untold) as step:
            watcher = threading.Thread(target=_watch, args=(spark, step, ended), daemon=True)
            if remote is None:
                watcher.start()
            try:
                yield spark
            finally:
                ended.set()
                if remote is None:
                    watcher.join()
    finally:
        if is_ours:
            spark.stop()


def _untold(done: int) -> None:
    """Nobody looks."""


def _watch(spark: SparkSession, step: output.Progress, ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    #: By stage. One that is over between two looks is looked at once more: as many as the job has stages.
    done: dict[int, int] = {}
    while not ended.wait(_LOOK_EVERY_S):
        for stage in {*done, *tracker.getActiveStageIds()}:
            info = tracker.getStageInfo(stage)
            if info is not None:
                done[stage] = info.numCompletedTasks
        step(sum(done.values()))


def _path(text: str) -> str:
    """From this folder, as a person means it: the JVM may stand in another one."""
    return text if "://" in text else os.path.abspath(text)


def _moment(text: str | None, option: str) -> int | None:
    from streams.spark.option_table import moment_ms

    try:
        return None if text is None else moment_ms(text)
    except ValueError as error:
        raise output.Refusal(f"{option}: {text!r} {error}") from None


def _show(result: Any, target: Target) -> None:
    import msgspec

    output.show_facts(msgspec.to_builtins(result), as_json=target.as_json)


@click.group("pipeline")
def command() -> None:
    """Jobs over many records, with Spark: on this machine, or unchanged on a cluster (--master, --remote).

    Each can be stopped and run again: it goes on where it was, and writes each record once.
    """


@example("streams pipeline archive orders --to archive --name orders")
@command.command("archive", short_help="Boxes to Parquet, then optionally trim.")
@_boxes
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@_name
@click.option(
    "--trim", is_flag=True, help="Then delete what was archived from the boxes, after comparing both."
)
@_gaps
@_dry_run
@_spark_options
@connected
def archive(
    target: Target,
    boxes: tuple[str, ...],
    prefix: str | None,
    path: str,
    name: str,
    trim: bool,
    skip_gaps: bool,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Put what is new in BOXES since the last run into Parquet files, by box and day."""
    from streams.spark.jobs.archive import archive as job

    _check_boxes(boxes, prefix)
    at = target.resolved()
    with _session("archive", target, engine) as spark:
        result = job(
            spark,
            boxes,
            _path(path),
            name=name,
            prefix=prefix,
            url=at.url,
            key=at.key or None,
            trim=trim,
            on_gap="emit" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    _show(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline read-all orders --to everything --format json",
)
@command.command("read-all", short_help="An archive and what has come since, as files.")
@click.argument("name")
@click.argument("boxes", nargs=-1)
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@click.option("--format", default="parquet", show_default=True, help="parquet, json, csv or orc.")
@_dry_run
@_spark_options
@connected
def read_all(
    target: Target,
    name: str,
    boxes: tuple[str, ...],
    path: str,
    format: str,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Write the archive NAME and what its boxes hold beyond it into files, each record once.

    With BOXES, of these alone.
    """
    from streams.spark.jobs.archive import export_all as job

    at = target.resolved()
    with _session("read-all", target, engine) as spark:
        result = job(
            spark,
            name,
            _path(path),
            boxes,
            format=format,
            url=at.url,
            key=at.key or None,
            dry_run=dry_run,
        )
    _show(result, target)


@example("streams pipeline backfill orders.ndjson --box copy --name orders")
@command.command("backfill", short_help="Files to boxes.")
@click.argument("path")
@click.option("--box", help="Append to this box.")
@click.option("--box-column", metavar="SQL", help="Or to the one that this expression says.")
@click.option("--format", default="json", show_default=True, help="json (lines), parquet, csv or orc.")
@click.option("--data", metavar="SQL", help="What the record is; the whole row as JSON, if not said.")
@click.option("--tag", metavar="SQL", help="Its tag.")
@click.option("--ts", metavar="SQL", help="Its time; the box must take client times.")
@_name
@_dry_run
@_spark_options
@connected
def backfill(
    target: Target,
    path: str,
    box: str | None,
    box_column: str | None,
    format: str,
    data: str | None,
    tag: str | None,
    ts: str | None,
    name: str,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Append the rows of the files at PATH, each once."""
    from streams.spark.jobs.backfill import backfill as job

    at = target.resolved()
    with _session("backfill", target, engine) as spark:
        result = job(
            spark,
            _path(path),
            name=name,
            box=box,
            box_column=box_column,
            format=format,
            data=data,
            tag=tag,
            ts=ts,
            url=at.url,
            key=at.key or None,
            dry_run=dry_run,
        )
    _show(result, target)


@example("streams pipeline replay orders --to copy --name kitchen --where \"tag = 'kitchen'\"")
@command.command("replay", short_help="Boxes to boxes, with a filter.")
@_boxes
@click.option("--to", required=True, metavar="BOX", help="Copy to this box.")
@click.option(
    "--where", metavar="SQL", help="Only these: a condition on box, seq, ts, data, tag, node, meta."
)
@click.option("--from", "from_seq", type=int, help="The first run begins after this seq.")
@click.option("--from-time", metavar="TIME", help="Or at this time: ISO, or milliseconds since 1970.")
@click.option("--until", "to_seq", type=int, help="The last record that is copied.")
@click.option("--until-time", metavar="TIME", help="Or the time before which records are copied.")
@click.option("--keep-ts", is_flag=True, help="Copies keep their times; the box must take client times.")
@click.option("--with-source", is_flag=True, help="Meta of a copy says where it is from.")
@_name
@_gaps
@_dry_run
@_spark_options
@connected
def replay(
    target: Target,
    boxes: tuple[str, ...],
    prefix: str | None,
    to: str,
    where: str | None,
    from_seq: int | None,
    from_time: str | None,
    to_seq: int | None,
    until_time: str | None,
    keep_ts: bool,
    with_source: bool,
    name: str,
    skip_gaps: bool,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Copy what BOXES hold, and at the next run what has come since, each record once."""
    from streams.spark.jobs.replay import replay as job

    _check_boxes(boxes, prefix)
    at = target.resolved()
    with _session("replay", target, engine) as spark:
        result = job(
            spark,
            boxes,
            to,
            name=name,
            prefix=prefix,
            url=at.url,
            key=at.key or None,
            where=where,
            from_seq=from_seq,
            from_ts=_moment(from_time, "--from-time"),
            to_seq=to_seq,
            to_ts=_moment(until_time, "--until-time"),
            keep_ts=keep_ts,
            with_source=with_source,
            on_gap="skip" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    _show(result, target)


@example(
    "streams pipeline rollup orders --to orders.hourly --window '1 hour' --sum n='count(*)' --checkpoint c"
)
@command.command("rollup", short_help="Windows of boxes into a box.")
@_boxes
@click.option("--to", required=True, metavar="BOX", help="Write to this box, a record for each window.")
@click.option("--window", required=True, help="Its length: '5 minutes', '1 hour'.")
@click.option("--sum", "sums", multiple=True, required=True, metavar="NAME=SQL", help="What is counted.")
@click.option("--by", metavar="SQL", help="Count separately by this.")
@click.option("--time", default="ts", show_default=True, metavar="SQL", help="The time that counts.")
@click.option("--late", metavar="TIME", help="Give windows up that are older than this.")
@click.option("--closed-only", is_flag=True, help="Write a window once, when it is over; needs --late.")
@click.option("--checkpoint", required=True, metavar="PATH", help="Where Spark keeps how far it is.")
@_gaps
@_dry_run
@_spark_options
@connected
def rollup(
    target: Target,
    boxes: tuple[str, ...],
    prefix: str | None,
    to: str,
    window: str,
    sums: tuple[str, ...],
    by: str | None,
    time: str,
    late: str | None,
    closed_only: bool,
    checkpoint: str,
    skip_gaps: bool,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Count BOXES in windows of time; a later run counts what has come since."""
    from streams.spark.jobs.rollup import rollup as job

    named = dict(each.split("=", 1) for each in sums if "=" in each)
    if len(named) != len(sums):
        raise output.Refusal("--sum needs a name and an expression: --sum orders='count(*)'")
    _check_boxes(boxes, prefix)
    at = target.resolved()
    with _session("rollup", target, engine) as spark:
        result = job(
            spark,
            boxes,
            to,
            checkpoint=_path(checkpoint),
            window=window,
            aggregates=named,
            by=by,
            time=time,
            late=late,
            closed_only=closed_only,
            on_gap="skip" if skip_gaps else "fail",
            prefix=prefix,
            url=at.url,
            key=at.key or None,
            dry_run=dry_run,
        )
    _show(result, target)


@example("streams pipeline snapshot orders")
@command.command("snapshot", short_help="The newest record of each tag, then optionally trim.")
@click.argument("box")
@click.option("--trim", is_flag=True, help="Then delete from the box what the snapshot covers.")
@click.option("--keep-null", is_flag=True, help="A record whose data is null does not take its key away.")
@_gaps
@_dry_run
@_spark_options
@connected
def snapshot(
    target: Target,
    box: str,
    trim: bool,
    keep_null: bool,
    skip_gaps: bool,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Fold BOX by tag into BOX.snap, which then says from where to follow."""
    from streams.spark.jobs.snapshot import snapshot as job

    at = target.resolved()
    with _session("snapshot", target, engine) as spark:
        result = job(
            spark,
            box,
            url=at.url,
            key=at.key or None,
            trim=trim,
            drop_null=not keep_null,
            on_gap="skip" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    _show(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline compact orders",
)
@command.command("compact", short_help="Merge the small files of an archive.")
@click.argument("name")
@click.option(
    "--all", "everything", is_flag=True, help="Merge any two files; without it, where there are many."
)
@_dry_run
@_spark_options
@connected
def compact(target: Target, name: str, everything: bool, dry_run: bool, engine: Engine) -> None:
    """Merge the small files of the archive NAME. `archive` does it by itself after every 16 runs."""
    from streams.spark.jobs.archive_upkeep import compact as job

    at = target.resolved()
    with _session("compact", target, engine) as spark:
        result = job(spark, name, url=at.url, key=at.key or None, everything=everything, dry_run=dry_run)
    _show(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline vacuum orders",
)
@command.command("vacuum", short_help="Delete files that an archive does not need.")
@click.argument("name")
@click.option(
    "--older-than",
    "hours",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Keep what is younger: a run or a query may be using it.",
)
@_dry_run
@_spark_options
@connected
def vacuum(target: Target, name: str, hours: float, dry_run: bool, engine: Engine) -> None:
    """Delete what stopped runs and merged files have left beside the archive NAME."""
    from streams.spark.jobs.archive_upkeep import vacuum as job

    at = target.resolved()
    with _session("vacuum", target, engine) as spark:
        result = job(spark, name, url=at.url, key=at.key or None, older_than_s=hours * 3600, dry_run=dry_run)
    _show(result, target)


@example("streams pipeline audit orders")
@command.command("audit", short_help="Prove that nothing is missing or doubled.")
@_boxes
@click.option("--archive", metavar="NAME", help="Also everything in this archive.")
@click.option("--against", metavar="BOX", help="And whether that box holds the same records.")
@_spark_options
@connected
def audit(
    target: Target,
    boxes: tuple[str, ...],
    prefix: str | None,
    archive: str | None,
    against: str | None,
    engine: Engine,
) -> int:
    """Look at every record of BOXES. The exit code is 6 when something is found."""
    from streams.spark.jobs.audit import audit as job

    _check_boxes(boxes, prefix)
    at = target.resolved()
    with _session("audit", target, engine) as spark:
        result = job(
            spark, boxes, prefix=prefix, archive=archive, against=against, url=at.url, key=at.key or None
        )
    _show(result, target)
    return output.EXIT_DONE if result.ok else output.EXIT_DAMAGED
