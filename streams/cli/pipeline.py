"""`streams pipeline …`: run the jobs of `streams.spark.jobs` with Spark, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output, pipeline_run, pipeline_tables
from streams.cli.pipeline_options import (
    BoxSelection,
    SparkOptions,
    boxes_option,
    dry_run_option,
    folder_path,
    gaps_option,
    moment,
    name_option,
    parse_sums,
    spark_options,
)
from streams.cli.pipeline_session import show_result, spark_session
from streams.cli.suggestions import BOX_NAME, VerbGroup
from streams.cli.verbs import ServerTarget, example, server_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.group("pipeline", cls=VerbGroup)
def command() -> None:
    """Run Spark jobs over many records, on this machine or on a cluster (--master, --remote).

    A job that was stopped can be run again: it resumes, and writes each record exactly once.
    """


command.add_command(pipeline_run.command)
command.add_command(pipeline_tables.rollup_table)


@example("streams pipeline archive orders --to archive --name orders")
@command.command("archive", short_help="Copy boxes to Parquet files or to a table; optionally trim them.")
@boxes_option
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@name_option
@click.option(
    "--trim", is_flag=True, help="Then compare both, and delete the archived records from the boxes."
)
@click.option(
    "--format", default="parquet", show_default=True, help="parquet (files), or iceberg or delta (a table)."
)
@click.option("--columns", metavar="SQL", help="Table: columns of record fields, 'id bigint'; or infer.")
@click.option("--partition-by", metavar="NAMES", help="Table: partition columns (default: box,date).")
@click.option("--merge", is_flag=True, help="Table: keep the newest record of each tag; null deletes.")
@gaps_option
@dry_run_option
@spark_options
@server_options
def archive(
    target: ServerTarget,
    boxes: BoxSelection,
    path: str,
    name: str,
    trim: bool,
    format: str,
    columns: str | None,
    partition_by: str | None,
    merge: bool,
    skip_gaps: bool,
    dry_run: bool,
    engine: SparkOptions,
) -> None:
    """Copy the new records of BOXES since the last run into Parquet files, by box and day, or into a table.

    A table gets the records of one run in one snapshot, which names their seqs.
    """
    if format == "parquet" and (columns or partition_by or merge):
        raise output.Refusal("--columns, --partition-by and --merge are for tables; add --format iceberg")
    if format != "parquet" and trim:
        raise output.Refusal("--trim works for files only; delete the records of a table's boxes yourself")
    arguments: dict[str, Any] = {
        "name": name,
        "prefix": boxes.prefix,
        "on_gap": "emit" if skip_gaps else "fail",
        "dry_run": dry_run,
    }
    is_table = format != "parquet"
    if is_table:
        names = None if partition_by is None else partition_by.split(",")
        arguments |= {"format": format, "columns": columns, "partition_by": names, "merge": merge}
    else:
        arguments |= {"trim": trim}
    with spark_session("archive", target, engine) as (spark, server):
        result = _archive(spark, boxes.names, folder_path(path), is_table, arguments | server)
    show_result(result, target)


def _archive(
    spark: SparkSession, boxes: Sequence[str], path: str, is_table: bool, arguments: dict[str, Any]
) -> Any:
    from streams.spark.jobs.archive import archive as archive_files
    from streams.spark.jobs.table_archive import archive_table

    return (archive_table if is_table else archive_files)(spark, boxes, path, **arguments)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline read-all orders --to everything --format json",
)
@command.command("read-all", short_help="Export an archive and newer records to files.")
@click.argument("name")
@click.argument("boxes", nargs=-1)
@click.option("--to", "path", required=True, metavar="PATH", help="Folder, or URL that Spark can write to.")
@click.option("--format", default="parquet", show_default=True, help="parquet, json, csv or orc.")
@dry_run_option
@spark_options
@server_options
def read_all(
    target: ServerTarget,
    name: str,
    boxes: tuple[str, ...],
    path: str,
    format: str,
    dry_run: bool,
    engine: SparkOptions,
) -> None:
    """Write the records of the archive NAME and the newer records of its boxes to files, each exactly once.

    With BOXES, only the records of these boxes.
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
@command.command("backfill", short_help="Append files to boxes.")
@click.argument("path")
@click.option("--box", help="Box to append to.")
@click.option("--box-column", metavar="SQL", help="Or an expression for the name of the box.")
@click.option("--format", default="json", show_default=True, help="json (lines), parquet, csv or orc.")
@click.option("--data", metavar="SQL", help="Data of the record (default: the whole row as JSON).")
@click.option("--tag", metavar="SQL", help="Tag of the record.")
@click.option("--ts", metavar="SQL", help="Time of the record; the box must accept client times.")
@click.option(
    "--on-bad-row",
    type=click.Choice(["fail", "deadletter"]),
    default="fail",
    show_default=True,
    help="A row that cannot be written fails its group, or goes to the dead letter box with the reason.",
)
@click.option("--dead-letter-box", metavar="BOX", help="Box for dead letters (default: NAME.dead).")
@name_option
@dry_run_option
@spark_options
@server_options
def backfill(
    target: ServerTarget,
    path: str,
    box: str | None,
    box_column: str | None,
    format: str,
    data: str | None,
    tag: str | None,
    ts: str | None,
    on_bad_row: str,
    dead_letter_box: str | None,
    name: str,
    dry_run: bool,
    engine: SparkOptions,
) -> None:
    """Append the rows of the files at PATH, each exactly once."""
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
            on_bad_row=on_bad_row,
            dead_letter_box=dead_letter_box,
            **server,
            dry_run=dry_run,
        )
    show_result(result, target)


@example("streams pipeline replay orders --to copy --name kitchen --where \"tag = 'kitchen'\"")
@command.command("replay", short_help="Copy records from boxes to a box, with a filter.")
@boxes_option
@click.option("--to", required=True, metavar="BOX", help="Copy to this box.")
@click.option(
    "--where",
    metavar="SQL",
    help="Only matching records: a condition on box, seq, ts, data, tag, node, meta.",
)
@click.option("--from", "from_seq", type=int, help="Start the first run after this seq.")
@click.option("--from-time", metavar="TIME", help="Or at this time: ISO 8601, or milliseconds since 1970.")
@click.option("--until", "to_seq", type=int, help="Stop after this seq.")
@click.option("--until-time", metavar="TIME", help="Or copy only records before this time.")
@click.option("--keep-ts", is_flag=True, help="Copies keep their times; the box must accept client times.")
@click.option("--with-source", is_flag=True, help="Add the source box and seq to the meta of each copy.")
@name_option
@gaps_option
@dry_run_option
@spark_options
@server_options
def replay(
    target: ServerTarget,
    boxes: BoxSelection,
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
    engine: SparkOptions,
) -> None:
    """Copy the records of BOXES, each exactly once. A later run copies the records added since."""
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
@command.command("rollup", short_help="Aggregate boxes by time window into a box.")
@boxes_option
@click.option("--to", required=True, metavar="BOX", help="Write to this box, one record per window.")
@click.option("--window", required=True, help="Length of a window: '5 minutes', '1 hour'.")
@click.option(
    "--sum", "sums", multiple=True, required=True, metavar="NAME=SQL", help="Aggregate; repeatable."
)
@click.option("--by", metavar="SQL", help="Group by this expression.")
@click.option("--time", default="ts", show_default=True, metavar="SQL", help="Time of a record.")
@click.option("--late", metavar="TIME", help="Close windows older than this; ignore later records for them.")
@click.option("--closed-only", is_flag=True, help="Write each window once, after it ends; needs --late.")
@click.option("--checkpoint", required=True, metavar="PATH", help="Folder for Spark's checkpoint.")
@gaps_option
@dry_run_option
@spark_options
@server_options
def rollup(
    target: ServerTarget,
    boxes: BoxSelection,
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
    engine: SparkOptions,
) -> None:
    """Aggregate the records of BOXES by time window. A later run adds the records that arrived since."""
    from streams.spark.jobs.rollup import rollup as job

    aggregates = parse_sums(sums)
    with spark_session("rollup", target, engine) as (spark, server):
        result = job(
            spark,
            boxes.names,
            to,
            checkpoint=folder_path(checkpoint),
            window=window,
            aggregates=aggregates,
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
@command.command("snapshot", short_help="Write the newest record of each tag to a snapshot; optionally trim.")
@click.argument("box", type=BOX_NAME)
@click.option("--trim", is_flag=True, help="Then delete the records that the snapshot covers.")
@click.option("--keep-null", is_flag=True, help="Keep tags whose newest record has null data.")
@gaps_option
@dry_run_option
@spark_options
@server_options
def snapshot(
    target: ServerTarget,
    box: str,
    trim: bool,
    keep_null: bool,
    skip_gaps: bool,
    dry_run: bool,
    engine: SparkOptions,
) -> None:
    """Write the newest record of each tag of BOX to BOX.snap, with the seq from which to continue reading."""
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
    "--all", "everything", is_flag=True, help="Merge all small files, not only where there are many."
)
@dry_run_option
@spark_options
@server_options
def compact(target: ServerTarget, name: str, everything: bool, dry_run: bool, engine: SparkOptions) -> None:
    """Merge the small files of the archive NAME. `archive` does this automatically every 16 runs."""
    from streams.spark.jobs.archive_upkeep import compact as job

    with spark_session("compact", target, engine) as (spark, server):
        result = job(spark, name, **server, everything=everything, dry_run=dry_run)
    show_result(result, target)


@example(
    "streams pipeline archive orders --to archive --name orders",
    "streams pipeline vacuum orders",
)
@command.command("vacuum", short_help="Delete unused files of an archive.")
@click.argument("name")
@click.option(
    "--older-than",
    "hours",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Keep younger files: a run or a query may be using them.",
)
@dry_run_option
@spark_options
@server_options
def vacuum(target: ServerTarget, name: str, hours: float, dry_run: bool, engine: SparkOptions) -> None:
    """Delete the unused files that interrupted runs and merges left beside the archive NAME."""
    from streams.spark.jobs.archive_upkeep import vacuum as job

    with spark_session("vacuum", target, engine) as (spark, server):
        result = job(spark, name, **server, older_than_s=hours * 3600, dry_run=dry_run)
    show_result(result, target)


@example("streams pipeline audit orders")
@command.command("audit", short_help="Check that no record is missing or duplicated.")
@boxes_option
@click.option("--archive", metavar="NAME", help="Also check the records of this archive.")
@click.option("--against", metavar="BOX", help="Also check that this box has the same records.")
@spark_options
@server_options
def audit(
    target: ServerTarget,
    boxes: BoxSelection,
    archive: str | None,
    against: str | None,
    engine: SparkOptions,
) -> int:
    """Check that no record of BOXES is missing or duplicated. Exit code 6 if a problem is found."""
    from streams.spark.jobs.audit import audit as job

    with spark_session("audit", target, engine) as (spark, server):
        result = job(spark, boxes.names, prefix=boxes.prefix, archive=archive, against=against, **server)
    show_result(result, target)
    return output.EXIT_DONE if result.ok else output.EXIT_DAMAGED
