"""Aggregates a table in time windows into a box.

    snapshot of the last run ─┐
    newest snapshot ──────────┴► new records ─► their windows ─► all records of these windows ─► box

Snapshots do not change, so a run that is repeated writes the same records. Each run is one step
(`steps.py`): the plan in the ledger names both snapshots, and the records are one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger
from streams.spark.jobs.rollup import aggregate_windows
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.jobs.steps import Steps
from streams.spark.jobs.table_archive import LEDGER as TABLE_LEDGER
from streams.spark.jobs.table_archive import open_table
from streams.spark.jobs.table_files import read_files
from streams.spark.jobs.tables.versions import OpenTable, TableVersion, find_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "table-rollup."


class TableRollup(msgspec.Struct, frozen=True):
    name: str
    table: str
    to: str
    #: The table is aggregated up to this snapshot; None if it has none yet.
    snapshot: int | None
    #: New records of the table, and records that this run has written.
    new_records: int
    records: int
    is_dry: bool = False


@spark_job
def rollup_table(
    spark: SparkSession,
    table: str,
    to: str,
    *,
    name: str,
    window: str,
    aggregates: Mapping[str, str],
    by: str | None = None,
    time: str = "ts",
    url: str | None = None,
    key: str | None = None,
    dry_run: bool = False,
) -> TableRollup:
    """Aggregate a table in windows (`5 minutes`, `1 hour`) into box `to`.

    A run writes the windows of the records that the table has got since the last run. Expressions see the
    columns of the table. If `to` does not exist, it is created with `compact: "tag"`. The arguments of a name
    cannot change later.
    """
    if not aggregates:
        raise JobRefused("no aggregates; give at least one, for example orders=count(*)")
    context = JobContext(url, key)
    definition = {
        "table": table,
        "to": to,
        "window": window,
        "aggregates": dict(aggregates),
        "by": by,
        "time": time,
    }
    writer = f"job:table-rollup:{name}"
    with context.client() as client, context.shards() as shards:
        source = open_table(Ledger(client, TABLE_LEDGER + table), table)
        if source.is_merged:
            raise JobRefused(
                f"table {table} has only the newest record of each tag; a rollup needs a table of all records"
            )
        steps = Steps(Ledger(client, LEDGER + name), shards, writer, is_dry=dry_run)
        if any(plan["definition"] != definition for plan in steps.fixed_plans[-1:]):
            raise JobRefused(f"rollup {name} has run with other arguments; use another name")
        if source.newest() is None:
            return TableRollup(name, table, to, None, 0, 0, is_dry=dry_run)
        newest = find_version(source, None)
        if dry_run:
            new_records = _new_rows(spark, source, _last_end(steps), newest).count()
            return TableRollup(name, table, to, newest.id, new_records, 0, is_dry=True)
        if not client.box(to).exists():
            client.box(to).create(compact="tag")
        write = partial(context.write, box=to, writer=writer, node="rollup")
        new_records = records = 0
        while (plan := _next_plan(source, steps, newest, definition)) is not None:
            after = find_version(source, plan["end"]["snapshot"])
            new_rows = _new_rows(spark, source, plan["start"], after)
            rows = _rows_of_windows(spark, source, after, new_rows, window, by, time)
            records += steps.run(plan, partial(write, aggregate_windows(rows, window, aggregates, by, time)))
            new_records += new_rows.count()
    return TableRollup(name, table, to, newest.id, new_records, records)


def _last_end(steps: Steps) -> dict[str, Any] | None:
    """Return the snapshot and the cursors where the last planned step ends."""
    return steps.fixed_plans[-1]["end"] if steps.fixed_plans else None


def _next_plan(
    source: OpenTable, steps: Steps, newest: TableVersion, definition: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the unfinished plan, or a new one up to the newest snapshot; None if nothing is new."""
    if steps.unfinished_plan is not None:
        return steps.unfinished_plan
    last = _last_end(steps)
    cursors = {box: [cursor.gen, cursor.seq] for box, cursor in newest.cursors.items()}
    if last is not None and last["cursors"] == cursors:
        return None
    end = {"snapshot": newest.id, "cursors": cursors}
    return steps.plan({"start": last, "end": end, "definition": definition})


def _new_rows(
    spark: SparkSession, source: OpenTable, start: dict[str, Any] | None, end: TableVersion
) -> DataFrame:
    """Return the rows that a snapshot has and the snapshot at `start` has not."""
    old_files: set[str] = set()
    if start is not None and any(each.id == start["snapshot"] for each in source.versions()):
        # Without this snapshot, which may have expired, all files are read.
        old_files = {file.path for file in source.files(start["snapshot"])}
    files = [file.path for file in source.files(end.id) if file.path not in old_files]
    rows = read_files(spark, files, source.columns)
    if start is None:
        return rows
    # Merged files have old rows too. A box that was created again starts at 0.
    ends = [
        (box, seq)
        for box, (gen, seq) in start["cursors"].items()
        if box in end.cursors and end.cursors[box].gen == gen
    ]
    old_ends = spark.createDataFrame(ends, "box string, _end bigint")
    return rows.join(sql.broadcast(old_ends), "box", "left").filter("seq > coalesce(_end, 0)").drop("_end")


def _rows_of_windows(
    spark: SparkSession,
    source: OpenTable,
    version: TableVersion,
    new_rows: DataFrame,
    window: str,
    by: str | None,
    time: str,
) -> DataFrame:
    """Return all rows of a snapshot in the windows of the new rows."""

    def with_window(rows: DataFrame) -> DataFrame:
        rows = rows.withColumn("_window", sql.window(sql.expr(time).cast("timestamp"), window))
        return rows.withColumn("_by", sql.expr(by or "null").cast("string"))

    windows = with_window(new_rows).select("_window", "_by").distinct()
    times_ms: tuple[int, int] | None = None
    if time == "ts":
        start, end = sql.min("_window.start"), sql.max("_window.end")
        bounds = windows.agg(sql.unix_millis(start).alias("start"), sql.unix_millis(end).alias("end")).first()
        assert bounds is not None, "an aggregate without groups has one row"
        if bounds["start"] is not None:
            times_ms = (bounds["start"], bounds["end"])
    files = [file.path for file in source.files(version.id, times_ms=times_ms)]
    rows = with_window(read_files(spark, files, source.columns)).alias("rows")
    new = windows.alias("new")
    is_same = (sql.col("rows._window") == sql.col("new._window")) & sql.col("rows._by").eqNullSafe(
        sql.col("new._by")
    )
    return rows.join(new, is_same, "left_semi").drop("_window", "_by")
