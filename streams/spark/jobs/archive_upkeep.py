"""Merges and deletes files of an archive, so that it stays fast after any number of runs.

After every 16 runs, `archive` merges the small files of each day that has many of them. Files of 64 MiB or
more stay, so each record is rewritten a few times at most. Then it compacts the ledger to one entry for each
box. Both keep an archive of 10,000 runs at a few files a day.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from streams.client._sync.client import Client
from streams.spark.jobs.archive_files import (
    LEDGER,
    archive_paths,
    compact_ledger,
    migrate,
    new_run_id,
    publish,
    range_entries,
    read_files,
    run_start_ms,
    staging_folder,
    trash_folder,
    unpublished_runs,
    write_files,
)
from streams.spark.jobs.files import File, delete_folders, list_files
from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger, summary
from streams.spark.jobs.spark_errors import spark_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Runs after which `archive` looks for files to merge.
_RUNS_BETWEEN_MERGES = 16
#: Files below this size are merged, to files of up to about twice this size.
_SMALL_BYTES = 64 << 20
#: Small files that a day may have: while it is the newest day of its box, and after that.
_FILES_OPEN, _FILES_CLOSED = 16, 4
#: Files in one ledger entry: about 80 bytes each, and a record has at most 1 MiB.
_ENTRY_FILES_MAX = 5_000


class Compaction(msgspec.Struct, frozen=True):
    name: str
    folders: int
    files_before: int
    files_after: int
    is_dry: bool = False


class Vacuum(msgspec.Struct, frozen=True):
    name: str
    runs: int
    files: int
    bytes: int
    is_dry: bool = False


@spark_job
def compact(
    spark: SparkSession,
    name: str,
    *,
    url: str | None = None,
    key: str | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> Compaction:
    """Merge small files in folders with many of them; with `everything`, in folders with two or more."""
    with JobContext(url, key).client() as client:
        ledger = _ledger(client, name)
        if not dry_run:
            migrate(spark, ledger)
            publish(spark, ledger)
        before = after = folders = 0
        for path in archive_paths(ledger):
            small_files = _select_small_files(list_files(spark, path), everything)
            folders += len(small_files)
            before += sum(map(len, small_files.values()))
            if small_files and not dry_run:
                after += _merge_files(spark, ledger, path, small_files)
        if not dry_run:
            compact_ledger(ledger)
    return Compaction(name, folders, before, after, is_dry=dry_run)


@spark_job
def vacuum(
    spark: SparkSession,
    name: str,
    *,
    url: str | None = None,
    key: str | None = None,
    older_than_s: float = 86_400,
    dry_run: bool = False,
) -> Vacuum:
    """Delete merged files, and files of runs that stopped before their ledger entry.

    Files of runs that started less than `older_than_s` seconds ago stay.
    """
    with JobContext(url, key).client() as client:
        ledger = _ledger(client, name)
        if not dry_run:
            publish(spark, ledger)
        new_runs = unpublished_runs(ledger)
        obsolete_files: dict[str, list[File]] = {}
        latest_ms = time.time() * 1000 - older_than_s * 1000
        for path in archive_paths(ledger):
            for folder in (staging_folder(path), trash_folder(path)):
                for file in list_files(spark, folder):
                    run = file.path.partition("/")[0]
                    if run not in new_runs and run_start_ms(run) <= latest_ms:
                        obsolete_files.setdefault(f"{folder}/{run}", []).append(file)
        if not dry_run:
            delete_folders(spark, obsolete_files)
    files = [file for run_files in obsolete_files.values() for file in run_files]
    return Vacuum(name, len(obsolete_files), len(files), sum(file.size for file in files), is_dry=dry_run)


def _ledger(client: Client, name: str) -> Ledger:
    ledger = Ledger(client, LEDGER + name)
    if not ledger.entries:
        raise JobRefused(f"there is no archive {name}; its ledger would be the box {LEDGER}{name}")
    return ledger


def compact_if_due(spark: SparkSession, ledger: Ledger) -> None:
    """Merge small files if there have been 16 runs since the last merge. Called after each `archive` run."""
    runs = {entry["run"] for entry in range_entries(ledger) if entry.get("run")}
    if len(runs) < _RUNS_BETWEEN_MERGES:
        return
    for path in archive_paths(ledger):
        small_files = _select_small_files(list_files(spark, path), everything=False)
        if small_files:
            _merge_files(spark, ledger, path, small_files)
    compact_ledger(ledger)


def _select_small_files(files: list[File], everything: bool) -> dict[str, list[File]]:
    """Return folder -> small files, for folders with more small files than allowed."""
    small: dict[str, list[File]] = {}
    newest: dict[str, str] = {}
    for file in files:
        box, _, rest = file.path.partition("/")
        if not box.startswith("box="):
            continue
        folder = file.path.rpartition("/")[0]
        newest[box] = max(newest.get(box, ""), rest)
        if file.size < _SMALL_BYTES:
            small.setdefault(folder, []).append(file)
    selection = {}
    for folder, folder_files in small.items():
        box, _, date = folder.partition("/")
        limit = _FILES_OPEN if newest[box].startswith(date) else _FILES_CLOSED
        if len(folder_files) > (1 if everything else limit):
            selection[folder] = folder_files
    return selection


def _merge_files(
    spark: SparkSession, ledger: Ledger, path: str, small_files: Mapping[str, list[File]]
) -> int:
    """Merge small files into larger ones, compare the records, and publish. Return the new file count."""
    run = new_run_id()
    staging = staging_folder(path, run)
    files = [file for folder_files in small_files.values() for file in folder_files]
    rows = read_files(spark, *[f"{path}/{file.path}" for file in files], base=path)
    size = sum(file.size for file in files)
    write_files(rows, staging, files=max(1, min(len(small_files), 64), size // (2 * _SMALL_BYTES)))
    before = {row["box"]: row for row in summary(rows).collect()}
    after = {row["box"]: row for row in summary(read_files(spark, staging)).collect()}
    if before != after:
        raise JobRefused(
            f"the merged files in {staging} differ from the files they replace; nothing was changed"
        )
    entries = []
    for folder, folder_files in small_files.items():
        names = [file.path.rpartition("/")[2] for file in folder_files]
        for start in range(0, len(names), _ENTRY_FILES_MAX):
            replaces = names[start : start + _ENTRY_FILES_MAX]
            entries.append({"merge": run, "path": path, "folder": folder, "replaces": replaces})
    ledger.append(entries)
    file_count = len(list_files(spark, staging))
    publish(spark, ledger)
    return file_count
