"""The files of an archive, and the ledger entries that make them valid.

    PATH/box=orders/date=2026-11-18/RUN-part-….parquet      the table: partitioned Parquet for any engine
    PATH/_streams/staging/RUN/box=…/date=…/part-….parquet   files of a run that is not published yet
    PATH/_streams/trash/RUN/box=…/date=…/….parquet          small files that RUN has merged, until `vacuum`

A run writes its files to staging, reads them back, appends their ranges to the ledger, and then moves them
into the table. So the table has no file of a run that stopped before its ledger entry. If a run stops after
its ledger entry, the next job of this archive publishes it; until then `read_archived` reads its files from
staging.

Ledger entries
    {"box", "gen", "first", "last", "records", "fingerprint", "gaps", "path", "run"}
                            records of one box in one run; with "base": true, of all earlier runs
    {"merge": RUN, "path", "folder", "replaces": [file, ...]}
                            RUN has the records of these files of a folder
    {"published": RUN}      all files of the run are in the table

Version 0.1 wrote PATH/RUN/box=…/day=…/ and entries with "folder" in place of "path" and "run". Readers accept
these, and the next `archive` run moves them into the table.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from streams.spark.jobs.files import delete_folders, list_files, move_files
from streams.spark.jobs.job_context import SCHEMA, Ledger
from streams.spark.offsets import Cursor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "archive."
_OWN_FOLDER = "_streams"

#: With more boxes than this, the whole table is listed instead of one folder for each box.
_FOLDERS_MAX = 64

#: Most entries after a compaction of the ledger, which is one write: the limit of an append.
_LEDGER_ENTRIES_MAX = 10_000

#: Characters that Spark escapes in the value of a partition.
_ESCAPED_CHARACTERS = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(n) for n in range(32)}


def new_run_id() -> str:
    """Return the id of a new run. Ids sort by time, and `vacuum` takes the age of files from them."""
    return f"{int(time.time() * 1000):013d}-{uuid.uuid4().hex[:8]}"


def run_start_ms(run: str) -> int:
    """Return when a run started."""
    return int(run.partition("-")[0])


def staging_folder(path: str, run: str = "") -> str:
    return f"{path}/{_OWN_FOLDER}/staging/{run}".rstrip("/")


def trash_folder(path: str, run: str = "") -> str:
    return f"{path}/{_OWN_FOLDER}/trash/{run}".rstrip("/")


def box_folder(box: str) -> str:
    return "box=" + "".join(f"%{ord(each):02X}" if each in _ESCAPED_CHARACTERS else each for each in box)


# -- ledger entries


def range_entries(ledger: Ledger) -> list[dict[str, Any]]:
    return [entry for entry in ledger.entries if "box" in entry]


def archive_cursors(ledger: Ledger) -> dict[str, Cursor]:
    """Return the last archived seq of each box."""
    return {entry["box"]: Cursor(entry["gen"], entry["last"]) for entry in range_entries(ledger)}


def old_folders(ledger: Ledger) -> list[str]:
    """Return the folders of runs of version 0.1."""
    return sorted({entry["folder"] for entry in range_entries(ledger) if entry.get("folder")})


def archive_paths(ledger: Ledger) -> list[str]:
    """Return the paths of the archive; several only if its runs had different ones."""
    current_paths = {entry["path"] for entry in range_entries(ledger) if entry.get("path")}
    return sorted(current_paths | {folder.rpartition("/")[0] for folder in old_folders(ledger)})


def unpublished_runs(ledger: Ledger) -> dict[str, str]:
    """Return run -> path of runs that have ledger entries and may have files in staging."""
    runs: dict[str, str] = {}
    for entry in ledger.entries:
        if "published" in entry:
            runs.pop(entry["published"], None)
        elif entry.get("run"):
            runs[entry["run"]] = entry["path"]
        elif "merge" in entry:
            runs[entry["merge"]] = entry["path"]
    return runs


# -- writing


def write_files(rows: DataFrame, folder: str, *, files: int | None = None) -> None:
    """Write rows to files by box and day (UTC), sorted by seq, so that file statistics show the seqs."""
    # to_date would depend on the time zone of the session.
    dates = rows.withColumn("date", sql.expr("date_from_unix_date(int(floor(unix_millis(ts) / 86400000)))"))
    if files is not None:
        dates = dates.repartition(files, "box", "date")
    sorted_rows = dates.sortWithinPartitions("box", "date", "seq")
    sorted_rows.write.partitionBy("box", "date").option("compression", "zstd").parquet(folder)


def publish(spark: SparkSession, ledger: Ledger) -> None:
    """Move the files of all runs with ledger entries into the table, and merged files out of it."""
    for run, path in unpublished_runs(ledger).items():
        staging = staging_folder(path, run)
        moves = []
        for file in list_files(spark, staging):
            folder, _, name = file.path.rpartition("/")
            moves.append((f"{staging}/{file.path}", f"{path}/{folder}/{run}-{name}"))
        merges = [entry for entry in ledger.entries if entry.get("merge") == run]
        merged_files = [f"{entry['folder']}/{name}" for entry in merges for name in entry["replaces"]]
        # One folder at a time: meanwhile another engine sees few duplicates and no missing record.
        for folder in sorted(
            {target.rpartition("/")[0] for _, target in moves} | _parent_folders(path, merged_files)
        ):
            move_files(spark, [pair for pair in moves if pair[1].rpartition("/")[0] == folder])
            folder_files = [each for each in merged_files if f"{path}/{each}".rpartition("/")[0] == folder]
            move_files(
                spark, [(f"{path}/{each}", f"{trash_folder(path, run)}/{each}") for each in folder_files]
            )
        delete_folders(spark, [staging])
        ledger.note({"published": run})


def _parent_folders(path: str, files: Iterable[str]) -> set[str]:
    return {f"{path}/{each}".rpartition("/")[0] for each in files}


def migrate(spark: SparkSession, ledger: Ledger) -> None:
    """Move the files of version 0.1 into the table. Safe to repeat after a stop."""
    folders = old_folders(ledger)
    if not folders:
        return
    for path in sorted({folder.rpartition("/")[0] for folder in folders}):
        names = {folder.rpartition("/")[2] for folder in folders if folder.rpartition("/")[0] == path}
        moves = []
        for file in list_files(spark, path):
            run, _, inside = file.path.partition("/")
            if run in names:
                folder, _, name = inside.rpartition("/")
                moves.append(
                    (f"{path}/{file.path}", f"{path}/{folder.replace('/day=', '/date=')}/{run}-{name}")
                )
        move_files(spark, moves)
        delete_folders(spark, [f"{path}/{name}" for name in names])
    compact_ledger(ledger)


def compact_ledger(ledger: Ledger) -> None:
    """Replace the entries of all runs by one for each box. Does nothing while a run is unpublished."""
    paths = archive_paths(ledger)
    if len(paths) != 1 or unpublished_runs(ledger):
        return
    totals: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in range_entries(ledger):
        total = totals.get((entry["box"], entry["gen"]))
        if total is None:
            total = totals[entry["box"], entry["gen"]] = {
                "box": entry["box"],
                "gen": entry["gen"],
                "first": entry["first"],
                "last": entry["last"],
                "records": 0,
                "fingerprint": 0,
                "gaps": [],
                "path": paths[0],
                "run": "",
                "base": True,
            }
        total["last"] = entry["last"]
        total["records"] += entry["records"]
        total["fingerprint"] ^= entry["fingerprint"]
        total["gaps"] = [*total["gaps"], *entry["gaps"]]
    if len(totals) <= _LEDGER_ENTRIES_MAX:
        ledger.replace(list(totals.values()))


# -- reading


def read_files(
    spark: SparkSession, *folders: str, base: str | None = None, excluded_files: Collection[str] = ()
) -> DataFrame:
    """Read records from files partitioned by box and date.

    The schema is explicit, because Spark would read a box called 7 as a number.
    """
    reader = spark.read.schema(f"{SCHEMA}, date date").option("basePath", base or folders[0])
    rows = reader.parquet(*folders)
    if excluded_files:
        rows = rows.filter(~sql.col("_metadata.file_name").isin(list(excluded_files)))
    return rows.select(*_COLUMNS)


def read_archived(spark: SparkSession, ledger: Ledger, boxes: Collection[str]) -> DataFrame | None:
    """Read the archived records of these boxes; None if there are none."""
    names = sorted({entry["box"] for entry in range_entries(ledger) if entry["records"]} & set(boxes))
    if not names:
        return None
    frames = []
    new_runs = unpublished_runs(ledger)
    # List staging before the table: a file that is published in between is in both lists, and reading it
    # fails because it has moved. In the other order it would be in neither.
    for run, path in new_runs.items():
        staging = staging_folder(path, run)
        if list_files(spark, staging):
            frames.append(read_files(spark, staging))
    merged_files = [
        name for entry in ledger.entries if entry.get("merge") in new_runs for name in entry["replaces"]
    ]
    old_run_folders = old_folders(ledger)
    for path in archive_paths(ledger):
        if not new_runs and not old_run_folders and len(names) <= _FOLDERS_MAX:
            path_boxes = {
                entry["box"] for entry in range_entries(ledger) if entry["path"] == path and entry["records"]
            }
            folders = [f"{path}/{box_folder(box)}" for box in names if box in path_boxes]
            if folders:
                frames.append(read_files(spark, *folders, base=path))
            continue
        files = list_files(spark, path)
        for folder in old_run_folders:
            if any(f"{path}/{file.path}".startswith(f"{folder}/") for file in files):
                rows = spark.read.schema(f"{SCHEMA}, day date").option("basePath", folder)
                frames.append(rows.parquet(folder).select(*_COLUMNS))
        box_folders = sorted({file.path.partition("/")[0] for file in files if file.path.startswith("box=")})
        if box_folders:
            # Not the path itself: folders of version 0.1 beside them are not partitions.
            read_paths = [f"{path}/{top}" for top in box_folders] if old_run_folders else [path]
            frames.append(read_files(spark, *read_paths, base=path, excluded_files=merged_files))
    if not frames:
        return None
    union = frames[0]
    for frame in frames[1:]:
        union = union.unionByName(frame)
    return union.filter(sql.col("box").isin(names))


_COLUMNS = ("box", "seq", "ts", "data", "tag", "node", "meta")
