"""`streams pipeline rollup-table`: aggregates of a table."""

from __future__ import annotations

import click

from streams.cli.pipeline_options import SparkOptions, dry_run_option, name_option, parse_sums, spark_options
from streams.cli.pipeline_session import show_result, spark_session
from streams.cli.verbs import ServerTarget, example, server_options


@example(
    "streams pipeline archive orders --to table --name orders --format iceberg",
    "streams pipeline rollup-table orders --to orders.hourly --name hourly --window '1 hour' "
    "--sum n='count(*)'",
)
@click.command("rollup-table", short_help="Aggregate a table by time window into a box.")
@click.argument("table")
@click.option("--to", required=True, metavar="BOX", help="Write to this box, one record per window.")
@click.option("--window", required=True, help="Length of a window: '5 minutes', '1 hour'.")
@click.option(
    "--sum", "sums", multiple=True, required=True, metavar="NAME=SQL", help="Aggregate; repeatable."
)
@click.option("--by", metavar="SQL", help="Group by this expression.")
@click.option("--time", default="ts", show_default=True, metavar="SQL", help="Time of a record.")
@name_option
@dry_run_option
@spark_options
@server_options
def rollup_table(
    target: ServerTarget,
    table: str,
    to: str,
    window: str,
    sums: tuple[str, ...],
    by: str | None,
    time: str,
    name: str,
    dry_run: bool,
    engine: SparkOptions,
) -> None:
    """Aggregate TABLE by time window. A later run writes the windows of the records added since."""
    from streams.spark.jobs.table_rollup import rollup_table as job

    aggregates = parse_sums(sums)
    with spark_session("rollup-table", target, engine) as (spark, server):
        result = job(
            spark,
            table,
            to,
            name=name,
            window=window,
            aggregates=aggregates,
            by=by,
            time=time,
            **server,
            dry_run=dry_run,
        )
    show_result(result, target)
