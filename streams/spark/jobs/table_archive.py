"""Archives boxes to an Iceberg table, and reads table and boxes as one.

    records after the cursors of the newest snapshot ─► Parquet files in PATH/data/RUN ─► one commit

The commit contains the files and the new cursors (`tables/versions.py`), so the table decides where the next
run starts. A run that dies before its commit leaves files that no snapshot names, and nothing else.
Small files are merged when a partition has many of them (`table_files.py`).

A table has all records of its boxes, or the newest record of each tag (`merge`, `table_merge.py`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from streams.direct import Shards
from streams.spark.jobs.archive import collect_gaps
from streams.spark.jobs.archive_files import new_run_id
from streams.spark.jobs.job_context import (
    JobContext,
    JobRefused,
    Ledger,
    box_positions,
    resume_seq,
    select_boxes,
)
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.jobs.table_files import compact_if_due, count_records, read_files, write_run
from streams.spark.jobs.table_merge import MergedFiles, merge_rows, newest_rows, write_merge
from streams.spark.jobs.tables.columns import (
    BASE_COLUMNS,
    INFER,
    Column,
    infer_columns,
    new_columns,
    parse_columns,
    typed_rows,
)
from streams.spark.jobs.tables.versions import (
    OpenTable,
    TableRange,
    TableVersion,
    find_version,
    summary_properties,
)
from streams.spark.offsets import Cursor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "table."
#: Format -> module, class and the package that it needs.
FORMATS = {
    "iceberg": ("iceberg", "IcebergTable", "pyiceberg"),
    "delta": ("delta", "OpenDeltaTable", "deltalake"),
}
PARTITION_BY = ("box", "date")
#: Of merged tables: the newest record of a tag may be of any day.
_MERGED_PARTITION_BY = ("box",)


class TableArchive(msgspec.Struct, frozen=True):
    name: str
    format: str
    path: str
    #: Records that were added; tags that were written or deleted, in a merged table.
    records: int
    #: The new snapshot; None if there were no new records.
    snapshot: int | None
    ranges: dict[str, TableRange]
    #: Columns that this run added.
    columns: list[str]
    is_dry: bool = False


def table_path(path: str) -> str:
    return (path if "://" in path else os.path.abspath(path)).rstrip("/")


def _format_class(format: str) -> Any:
    if format not in FORMATS:
        raise JobRefused(f"format {format}: must be one of {', '.join(FORMATS)}")
    module, name, package = FORMATS[format]
    try:
        return getattr(importlib.import_module(f"streams.spark.jobs.tables.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise JobRefused(
            f"format {format} needs the package {package}; install it with "
            f"pip install 'streams-server[tables]'"
        ) from error


def open_table(ledger: Ledger, name: str) -> OpenTable:
    """Return the table of this name. Raises `JobRefused` if there is none."""
    if not ledger.entries:
        raise JobRefused(f"there is no table {name}; its pointer would be in the box {LEDGER}{name}")
    entry = ledger.entries[-1]
    table: OpenTable | None = _format_class(entry["format"]).open(ledger, entry["location"])
    assert table is not None, "a ledger with an entry has a table"
    return table


@spark_job
def archive_table(
    spark: SparkSession,
    boxes: Sequence[str],
    path: str,
    *,
    name: str,
    format: str = "iceberg",
    prefix: str | None = None,
    columns: str | None = None,
    partition_by: Sequence[str] | None = None,
    merge: bool = False,
    url: str | None = None,
    key: str | None = None,
    on_gap: str = "fail",
    dry_run: bool = False,
) -> TableArchive:
    """Add the new records of boxes since the last run to the table at `path`, in one commit.

    `columns` are fields of the records that become columns, as in `'id bigint, price double'`; with `infer`
    they are inferred from a sample. A later run may name more columns. `partition_by` has names of columns,
    or `date` for the day of `ts`; it is fixed when the table is created (default: box and date).

    With `merge`, the table has the newest record of each tag instead of all records, and a record whose data
    is `null` deletes its tag.
    """
    context = JobContext(url, key)
    path = table_path(path)
    kind = _format_class(format)
    with context.client() as client, context.shards() as shards:
        boxes = select_boxes(shards, boxes, prefix)
        ledger = Ledger(client, LEDGER + name)
        table: OpenTable | None = kind.open(ledger, path)
        _check_merge(table, name, merge)
        cursors = {} if table is None or table.newest() is None else find_version(table, None).cursors
        start, end, new_cursors = _plan(shards, boxes, cursors, on_gap)
        if dry_run or not end:
            ranges = {box: _range(new_cursors[box], start[box], end[box] - start[box]) for box in end}
            records = sum(each.records for each in ranges.values())
            return TableArchive(name, format, path, records, None, ranges, [], is_dry=dry_run)
        rows = context.frame(spark, start, end, on_gap=on_gap)
        gaps = collect_gaps(rows)
        rows = rows.filter("data is not null").select(*BASE_COLUMNS)
        requested_columns = _wanted_columns(rows, columns)
        table_columns = table.columns if table is not None else []
        additions = new_columns(table_columns, requested_columns, keep_types=columns == INFER)
        if table is None:
            partition_by = partition_by or (_MERGED_PARTITION_BY if merge else PARTITION_BY)
            check_partition_by(partition_by, additions)
            table = kind.create(ledger, path, additions, partition_by, is_merged=merge)
            table_columns, additions = additions, []
        assert table is not None
        run = new_run_id()
        all_columns = [*table_columns, *additions]
        files = _write_files(
            spark, typed_rows(rows, all_columns), table, all_columns, list(end), f"{path}/data/{run}"
        )
        ranges = {box: _range(new_cursors[box], start[box], files.counts.get(box, 0)) for box in end}
        properties = summary_properties(run, {**cursors, **new_cursors}, ranges, gaps)
        table.commit(files.new_files, properties, remove=files.old_files, new_columns=additions)
        snapshot = find_version(table, None).id
        compact_if_due(spark, table, path)
    return TableArchive(
        name,
        format,
        path,
        sum(each.records for each in ranges.values()),
        snapshot,
        ranges,
        [each.name for each in additions],
    )


def _check_merge(table: OpenTable | None, name: str, merge: bool) -> None:
    if table is not None and table.is_merged != merge:
        has = "the newest record of each tag" if table.is_merged else "all records"
        way = "with" if table.is_merged else "without"
        raise JobRefused(
            f"table {name} has {has}, and cannot change to the other kind; run the job {way} merge, or use "
            f"another name and path"
        )


def _write_files(
    spark: SparkSession,
    rows: DataFrame,
    table: OpenTable,
    columns: Sequence[Column],
    boxes: Sequence[str],
    folder: str,
) -> MergedFiles:
    """Write the data files of a run."""
    if table.is_merged:
        return write_merge(spark, rows, table, columns, boxes, folder)
    files = write_run(spark, rows, table, folder)
    return MergedFiles(files, [], count_records(spark, files))


def _plan(
    shards: Shards, boxes: Sequence[str], cursors: Mapping[str, Cursor], on_gap: str
) -> tuple[dict[str, int], dict[str, int], dict[str, Cursor]]:
    """Return where each box with new records starts and ends, and its new cursor."""
    start, end, new_cursors = {}, {}, {}
    for box, state in box_positions(shards, boxes).items():
        after = resume_seq(box, state, cursors[box], on_gap) if box in cursors else state.earliest_seq - 1
        if after < state.head_seq:
            start[box], end[box] = after, state.head_seq
            new_cursors[box] = Cursor(state.generation, state.head_seq)
    return start, end, new_cursors


def _range(cursor: Cursor, after: int, records: int) -> TableRange:
    return TableRange(cursor.gen, after + 1, cursor.seq, records)


def _wanted_columns(rows: DataFrame, columns: str | None) -> list[Column]:
    if columns is None:
        return []
    return infer_columns(rows) if columns == INFER else parse_columns(columns)


def check_partition_by(partition_by: Sequence[str], columns: Sequence[Column]) -> None:
    names = {*BASE_COLUMNS, *(each.name for each in columns), "date"}
    for name in partition_by:
        if name not in names:
            raise JobRefused(f"partition by {name}: there is no such column; there are {', '.join(names)}")


def table_versions(name: str, *, url: str | None = None, key: str | None = None) -> list[TableVersion]:
    """Return the snapshots of a table with the seqs that each covers, oldest first."""
    with JobContext(url, key).client() as client:
        return open_table(Ledger(client, LEDGER + name), name).versions()


def read_table(
    spark: SparkSession,
    name: str,
    *,
    snapshot: int | None = None,
    with_boxes: bool = True,
    url: str | None = None,
    key: str | None = None,
) -> DataFrame:
    """Read a snapshot of a table up to its cursors, and the boxes from there: each record once.

    With `with_boxes=False` only the records of the snapshot. The boxes are read up to the records that they
    have now. A merged table with its boxes is the newest record of each tag.
    """
    context = JobContext(url, key)
    with context.client() as client, context.shards() as shards:
        table = open_table(Ledger(client, LEDGER + name), name)
        version = find_version(table, snapshot)
        files = [file.path for file in table.files(version.id)]
        rows = read_files(spark, files, table.columns)
        if not with_boxes:
            return rows
        start, end = _tail(shards, version)
    if not end:
        return rows
    live_rows = typed_rows(context.frame(spark, start, end), table.columns)
    return merge_rows(rows, newest_rows(live_rows)) if table.is_merged else rows.unionByName(live_rows)


def _tail(shards: Shards, version: TableVersion) -> tuple[dict[str, int], dict[str, int]]:
    """Return the range of each box behind a snapshot. A deleted box has none."""
    start, end = {}, {}
    for state in shards.states(boxes=sorted(version.cursors)):
        after = resume_seq(state.box, state, version.cursors[state.box], "fail")
        if after < state.head_seq:
            start[state.box], end[state.box] = after, state.head_seq
    return start, end
