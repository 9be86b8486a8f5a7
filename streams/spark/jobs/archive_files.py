"""The files of an archive, and which of them count.

    PATH/box=orders/date=2026-11-18/RUN-part-….parquet     the table: any engine reads it as partitioned
    Parquet PATH/_streams/staging/RUN/box=…/date=…/part-….parquet   files of a run that is not published yet
    PATH/_streams/trash/RUN/box=…/date=…/….parquet          small files that RUN has merged, until `vacuum`

A run writes its files to staging, reads them back, appends what they hold to the ledger, and then moves them
into the table. So the table never has a file of a run that was stopped before its ledger entry. A run that
was stopped after it is published by the next job of this archive; until then `cold` reads its files from
staging.

Ledger entries
    {"box", "gen", "first", "last", "records", "fingerprint", "gaps", "path", "run"}
                            records of one box in one run; with "base": true, of all runs before
    {"merge": RUN, "path", "folder", "replaces": [file, ...]}
                            RUN has the records of these files of a folder
    {"published": RUN}      all files of the run are in the table

Version 0.1 wrote PATH/RUN/box=…/day=…/ and entries with "folder" in place of "path" and "run". These are read
as they are, and moved into the table by the next `archive` run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from streams.spark.jobs.files import delete_folders, list_files, move_files
from streams.spark.jobs.job_context import SCHEMA, Ledger
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER = "archive."
_OWN = "_streams"

#: With more boxes than this, the whole table is listed and not the folder of each.
_FOLDERS_MAX = 64

#: Entries that one write can replace all others by: the limit of an append.
_FOLDED_MAX = 10_000

#: What Spark escapes in the value of a partition.
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(n) for n in range(32)}


def new_run() -> str:
    """Sorted by time. The time also says when the files of the run can be deleted."""
    return f"{int(time.time() * 1000):013d}-{uuid.uuid4().hex[:8]}"


def run_ms(run: str) -> int:
    """When a run began."""
    return int(run.partition("-")[0])


def staging(path: str, run: str = "") -> str:
    return f"{path}/{_OWN}/staging/{run}".rstrip("/")


def trash(path: str, run: str = "") -> str:
    return f"{path}/{_OWN}/trash/{run}".rstrip("/")


def box_folder(box: str) -> str:
    return "box=" + "".join(f"%{ord(each):02X}" if each in _ESCAPED else each for each in box)


# -- what the ledger says


def ranges(ledger: Ledger) -> list[dict[str, Any]]:
    return [entry for entry in ledger.entries if "box" in entry]


def cursors(ledger: Ledger) -> dict[str, Place]:
    """How far each box has been archived."""
    return {entry["box"]: Place(entry["gen"], entry["last"]) for entry in ranges(ledger)}


def old_folders(ledger: Ledger) -> list[str]:
    """Folders of runs of version 0.1."""
    return sorted({entry["folder"] for entry in ranges(ledger) if entry.get("folder")})


def paths(ledger: Ledger) -> list[str]:
    """Where the archive's files are; several only if its runs were given different ones."""
    found = {entry["path"] for entry in ranges(ledger) if entry.get("path")}
    return sorted(found | {folder.rpartition("/")[0] for folder in old_folders(ledger)})


def unpublished(ledger: Ledger) -> dict[str, str]:
    """Run -> path of runs that count and may have files in staging."""
    found: dict[str, str] = {}
    for entry in ledger.entries:
        if "published" in entry:
            found.pop(entry["published"], None)
        elif entry.get("run"):
            found[entry["run"]] = entry["path"]
        elif "merge" in entry:
            found[entry["merge"]] = entry["path"]
    return found


# -- writing


def write(rows: DataFrame, folder: str, *, files: int | None = None) -> None:
    """By box and day (UTC); sorted in each file, so that statistics of the file tell which seqs it has."""
    # Not to_date: that depends on the time zone of the session.
    dates = rows.withColumn("date", sql.expr("date_from_unix_date(int(floor(unix_millis(ts) / 86400000)))"))
    if files is not None:
        dates = dates.repartition(files, "box", "date")
    ordered = dates.sortWithinPartitions("box", "date", "seq")
    ordered.write.partitionBy("box", "date").option("compression", "zstd").parquet(folder)


def publish(spark: SparkSession, ledger: Ledger) -> None:
    """Moves the files of all runs that count into the table, and merged files out of it."""
    for run, path in unpublished(ledger).items():
        staged = staging(path, run)
        moves = []
        for file in list_files(spark, staged):
            folder, _, name = file.path.rpartition("/")
            moves.append((f"{staged}/{file.path}", f"{path}/{folder}/{run}-{name}"))
        replaced = [entry for entry in ledger.entries if entry.get("merge") == run]
        old = [f"{entry['folder']}/{name}" for entry in replaced for name in entry["replaces"]]
        # A folder at a time, so that another engine sees few records twice and none missing for a moment.
        for folder in sorted({target.rpartition("/")[0] for _, target in moves} | _folders(path, old)):
            move_files(spark, [pair for pair in moves if pair[1].rpartition("/")[0] == folder])
            inside = [each for each in old if f"{path}/{each}".rpartition("/")[0] == folder]
            move_files(spark, [(f"{path}/{each}", f"{trash(path, run)}/{each}") for each in inside])
        delete_folders(spark, [staged])
        ledger.note({"published": run})


def _folders(path: str, files: Iterable[str]) -> set[str]:
    return {f"{path}/{each}".rpartition("/")[0] for each in files}


def migrate(spark: SparkSession, ledger: Ledger) -> None:
    """Moves the files of version 0.1 into the table. Repeats nothing when it was stopped."""
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
    fold(ledger)


def fold(ledger: Ledger) -> None:
    """Replaces the entries of all runs by one for each box. Only while nothing waits to be published."""
    found = paths(ledger)
    if len(found) != 1 or unpublished(ledger):
        return
    totals: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in ranges(ledger):
        known = totals.get((entry["box"], entry["gen"]))
        if known is None:
            known = totals[entry["box"], entry["gen"]] = {
                "box": entry["box"],
                "gen": entry["gen"],
                "first": entry["first"],
                "last": entry["last"],
                "records": 0,
                "fingerprint": 0,
                "gaps": [],
                "path": found[0],
                "run": "",
                "base": True,
            }
        known["last"] = entry["last"]
        known["records"] += entry["records"]
        known["fingerprint"] ^= entry["fingerprint"]
        known["gaps"] = [*known["gaps"], *entry["gaps"]]
    if len(totals) <= _FOLDED_MAX:
        ledger.replace(list(totals.values()))


# -- reading


def read_files(
    spark: SparkSession, *folders: str, base: str | None = None, without: Collection[str] = ()
) -> DataFrame:
    """Records in files that are partitioned by box and date. With a schema: else a box called 7 is a "
    "number."""
    reader = spark.read.schema(f"{SCHEMA}, date date").option("basePath", base or folders[0])
    rows = reader.parquet(*folders)
    if without:
        rows = rows.filter(~sql.col("_metadata.file_name").isin(list(without)))
    return rows.select(*_COLUMNS)


def cold(spark: SparkSession, ledger: Ledger, boxes: Collection[str]) -> DataFrame | None:
    """The archived records of these boxes; None if there are none."""
    wanted = sorted({entry["box"] for entry in ranges(ledger) if entry["records"]} & set(boxes))
    if not wanted:
        return None
    frames = []
    waiting = unpublished(ledger)
    # Staging before the table: a file that is published in between is then in both lists, and reading it
    # fails because it has moved. The other way round it would be missing.
    for run, path in waiting.items():
        staged = staging(path, run)
        if list_files(spark, staged):
            frames.append(read_files(spark, staged))
    replaced = [
        name for entry in ledger.entries if entry.get("merge") in waiting for name in entry["replaces"]
    ]
    old = old_folders(ledger)
    for path in paths(ledger):
        if not waiting and not old and len(wanted) <= _FOLDERS_MAX:
            mine = {entry["box"] for entry in ranges(ledger) if entry["path"] == path and entry["records"]}
            folders = [f"{path}/{box_folder(box)}" for box in wanted if box in mine]
            if folders:
                frames.append(read_files(spark, *folders, base=path))
            continue
        files = list_files(spark, path)
        for folder in old:
            if any(f"{path}/{file.path}".startswith(f"{folder}/") for file in files):
                rows = spark.read.schema(f"{SCHEMA}, day date").option("basePath", folder)
                frames.append(rows.parquet(folder).select(*_COLUMNS))
        tops = sorted({file.path.partition("/")[0] for file in files if file.path.startswith("box=")})
        if tops:
            # Not the path itself: folders of version 0.1 beside them are no partitions.
            below = [f"{path}/{top}" for top in tops] if old else [path]
            frames.append(read_files(spark, *below, base=path, without=replaced))
    if not frames:
        return None
    found = frames[0]
    for frame in frames[1:]:
        found = found.unionByName(frame)
    return found.filter(sql.col("box").isin(wanted))


_COLUMNS = ("box", "seq", "ts", "data", "tag", "node", "meta")
