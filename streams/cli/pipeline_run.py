"""`streams pipeline run`: several Spark jobs in order, from a TOML file."""

from __future__ import annotations

from pathlib import Path

import click

from streams.cli import output
from streams.cli.pipeline_options import SparkOptions, dry_run_option, spark_options
from streams.cli.pipeline_session import show_result, spark_session
from streams.cli.verbs import ServerTarget, example, server_options


@example("streams pipeline run pipeline.toml")
@click.command("run", short_help="Run several jobs in order, from a file.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step-bytes", type=click.IntRange(1), help="Bytes of one step of replay and backfill.")
@dry_run_option
@spark_options
@server_options
def command(
    target: ServerTarget, file: Path, step_bytes: int | None, dry_run: bool, engine: SparkOptions
) -> int:
    """Run the jobs of FILE in order, and record each result in the box pipeline.runs.

    The first job that fails ends the run, with the exit code of that job. A later run resumes every job.
    """
    from streams.spark.jobs.pipeline import JobEntry, parse_plan, run_pipeline

    try:
        plan = parse_plan(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise output.Refusal(f"{file}: {error}") from error

    def on_start(number: int, entry: JobEntry) -> None:
        if not target.as_json:
            click.echo(f"{number}/{len(plan.jobs)} {entry.job} {entry.title}", err=True)

    with spark_session(f"run {plan.name}", target, engine) as (spark, server):
        result, failure = run_pipeline(
            spark, plan, **server, step_bytes=step_bytes, dry_run=dry_run, on_start=on_start
        )
    show_result(result, target)
    if failure is not None:
        raise failure
    return output.EXIT_DONE if result.ok else output.EXIT_DAMAGED
