"""`streams pipeline …`: the jobs of `streams.spark.jobs`, with Spark on this machine or on a cluster."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.pipeline_options import (
    Boxes,
    Engine,
    boxes_option,
    dry_run_option,
    folder_path,
    gaps_option,
    moment,
    name_option,
    spark_options,
)
from streams.cli.pipeline_session import show_result, spark_session
from streams.cli.verbs import Target, connected, example


@click.group("pipeline")
def command() -> None:
    """Jobs over many records, with Spark: on this machine, or unchanged on a cluster (--master, --remote).

    Each can be stopped and run again: it goes on where it was, and writes each record once.
    """


@example("streams pipeline archive orders --to archive --name orders")
@command.command("archive", short_help="Boxes to Parquet, then optionally trim.")
@boxes_option
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@name_option
@click.option(
    "--trim", is_flag=True, help="Then delete what was archived from the boxes, after comparing both."
)
@gaps_option
@dry_run_option
@spark_options
@connected
def archive(
    target: Target,
    boxes: Boxes,
    path: str,
    name: str,
    trim: bool,
    skip_gaps: bool,
    dry_run: bool,
    engine: Engine,
) -> None:
    """Put what is new in BOXES since the last run into Parquet files, by box and day."""
    from streams.spark.jobs.archive import archive as job

    with spark_session("archive", target, engine) as (spark, server):
        result = job(
            spark,
            boxes.names,
            folder_path(path),
            name=name,
            prefix=boxes.prefix,
            **server,
            trim=trim,
            on_gap="emit" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    show_result(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline read-all orders --to everything --format json",
)
@command.command("read-all", short_help="An archive and what has come since, as files.")
@click.argument("name")
@click.argument("boxes", nargs=-1)
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@click.option("--format", default="parquet", show_default=True, help="parquet, json, csv or orc.")
@dry_run_option
@spark_options
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

    with spark_session("read-all", target, engine) as (spark, server):
        result = job(
            spark,
            name,
            folder_path(path),
            boxes,
            format=format,
            **server,
            dry_run=dry_run,
        )
    show_result(result, target)


@example("streams pipeline backfill orders.ndjson --box copy --name orders")
@command.command("backfill", short_help="Files to boxes.")
@click.argument("path")
@click.option("--box", help="Append to this box.")
@click.option("--box-column", metavar="SQL", help="Or to the one that this expression says.")
@click.option("--format", default="json", show_default=True, help="json (lines), parquet, csv or orc.")
@click.option("--data", metavar="SQL", help="What the record is; the whole row as JSON, if not said.")
@click.option("--tag", metavar="SQL", help="Its tag.")
@click.option("--ts", metavar="SQL", help="Its time; the box must take client times.")
@name_option
@dry_run_option
@spark_options
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

    with spark_session("backfill", target, engine) as (spark, server):
        result = job(
            spark,
            folder_path(path),
            name=name,
            box=box,
            box_column=box_column,
            format=format,
            data=data,
            tag=tag,
            ts=ts,
            **server,
            dry_run=dry_run,
        )
    show_result(result, target)


@example("streams pipeline replay orders --to copy --name kitchen --where \"tag = 'kitchen'\"")
@command.command("replay", short_help="Boxes to boxes, with a filter.")
@boxes_option
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
@name_option
@gaps_option
@dry_run_option
@spark_options
@connected
def replay(
    target: Target,
    boxes: Boxes,
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

    with spark_session("replay", target, engine) as (spark, server):
        result = job(
            spark,
            boxes.names,
            to,
            name=name,
            prefix=boxes.prefix,
            **server,
            where=where,
            from_seq=from_seq,
            from_ts=moment(from_time, "--from-time"),
            to_seq=to_seq,
            to_ts=moment(until_time, "--until-time"),
            keep_ts=keep_ts,
            with_source=with_source,
            on_gap="skip" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    show_result(result, target)


@example(
    "streams pipeline rollup orders --to orders.hourly --window '1 hour' --sum n='count(*)' --checkpoint c"
)
@command.command("rollup", short_help="Windows of boxes into a box.")
@boxes_option
@click.option("--to", required=True, metavar="BOX", help="Write to this box, a record for each window.")
@click.option("--window", required=True, help="Its length: '5 minutes', '1 hour'.")
@click.option("--sum", "sums", multiple=True, required=True, metavar="NAME=SQL", help="What is counted.")
@click.option("--by", metavar="SQL", help="Count separately by this.")
@click.option("--time", default="ts", show_default=True, metavar="SQL", help="The time that counts.")
@click.option("--late", metavar="TIME", help="Give windows up that are older than this.")
@click.option("--closed-only", is_flag=True, help="Write a window once, when it is over; needs --late.")
@click.option("--checkpoint", required=True, metavar="PATH", help="Where Spark keeps how far it is.")
@gaps_option
@dry_run_option
@spark_options
@connected
def rollup(
    target: Target,
    boxes: Boxes,
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
    with spark_session("rollup", target, engine) as (spark, server):
        result = job(
            spark,
            boxes.names,
            to,
            checkpoint=folder_path(checkpoint),
            window=window,
            aggregates=named,
            by=by,
            time=time,
            late=late,
            closed_only=closed_only,
            on_gap="skip" if skip_gaps else "fail",
            prefix=boxes.prefix,
            **server,
            dry_run=dry_run,
        )
    show_result(result, target)


@example("streams pipeline snapshot orders")
@command.command("snapshot", short_help="The newest record of each tag, then optionally trim.")
@click.argument("box")
@click.option("--trim", is_flag=True, help="Then delete from the box what the snapshot covers.")
@click.option("--keep-null", is_flag=True, help="A record whose data is null does not take its key away.")
@gaps_option
@dry_run_option
@spark_options
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

    with spark_session("snapshot", target, engine) as (spark, server):
        result = job(
            spark,
            box,
            **server,
            trim=trim,
            drop_null=not keep_null,
            on_gap="skip" if skip_gaps else "fail",
            dry_run=dry_run,
        )
    show_result(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline compact orders",
)
@command.command("compact", short_help="Merge the small files of an archive.")
@click.argument("name")
@click.option(
    "--all", "everything", is_flag=True, help="Merge any two files; without it, where there are many."
)
@dry_run_option
@spark_options
@connected
def compact(target: Target, name: str, everything: bool, dry_run: bool, engine: Engine) -> None:
    """Merge the small files of the archive NAME. `archive` does it by itself after every 16 runs."""
    from streams.spark.jobs.archive_upkeep import compact as job

    with spark_session("compact", target, engine) as (spark, server):
        result = job(spark, name, **server, everything=everything, dry_run=dry_run)
    show_result(result, target)


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
@dry_run_option
@spark_options
@connected
def vacuum(target: Target, name: str, hours: float, dry_run: bool, engine: Engine) -> None:
    """Delete what stopped runs and merged files have left beside the archive NAME."""
    from streams.spark.jobs.archive_upkeep import vacuum as job

    with spark_session("vacuum", target, engine) as (spark, server):
        result = job(spark, name, **server, older_than_s=hours * 3600, dry_run=dry_run)
    show_result(result, target)


@example("streams pipeline audit orders")
@command.command("audit", short_help="Prove that nothing is missing or doubled.")
@boxes_option
@click.option("--archive", metavar="NAME", help="Also everything in this archive.")
@click.option("--against", metavar="BOX", help="And whether that box holds the same records.")
@spark_options
@connected
def audit(
    target: Target,
    boxes: Boxes,
    archive: str | None,
    against: str | None,
    engine: Engine,
) -> int:
    """Look at every record of BOXES. The exit code is 6 when something is found."""
    from streams.spark.jobs.audit import audit as job

    with spark_session("audit", target, engine) as (spark, server):
        result = job(spark, boxes.names, prefix=boxes.prefix, archive=archive, against=against, **server)
    show_result(result, target)
    return output.EXIT_DONE if result.ok else output.EXIT_DAMAGED
