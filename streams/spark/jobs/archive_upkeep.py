"""Merging and deleting files of an archive, so that it stays fast however many runs it has had.

`archive` merges by itself: after every 16 runs, the small files of each day that has many of them. Files
that have reached 64 MiB are left as they are, so each record is rewritten a few times at most. Then the
ledger is folded to one entry for each box. Both keep an archive of 10,000 runs at a few files a day.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from streams.client._sync.client import Client
from streams.spark.jobs.archive_files import (
    LEDGER,
    fold,
    migrate,
    new_run,
    paths,
    publish,
    ranges,
    read_files,
    run_ms,
    staging,
    trash,
    unpublished,
    write,
)
from streams.spark.jobs.files import File, delete_folders, list_files
from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger, summary
from streams.spark.jobs.spark_errors import spark_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Runs after which `archive` looks for files to merge.
_RUNS_BETWEEN = 16
#: Files below this size are merged, up to about twice of it.
_SMALL_BYTES = 64 << 20
#: Small files that a day may have while records still come for it, and when a later day has begun.
_FILES_OPEN, _FILES_CLOSED = 16, 4
#: Files in one ledger entry: about 80 bytes each, and a record has at most 1 MiB.
_NAMED_MAX = 5_000


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
    """Merges the small files of an archive where there are many; with `everything`, any two of a folder."""
    with JobContext(url, key).client() as client:
        ledger = _ledger(client, name)
        if not dry_run:
            migrate(spark, ledger)
            publish(spark, ledger)
        before = after = folders = 0
        for path in paths(ledger):
            chosen = _chosen(list_files(spark, path), everything)
            folders += len(chosen)
            before += sum(map(len, chosen.values()))
            if chosen and not dry_run:
                after += _merge(spark, ledger, path, chosen)
        if not dry_run:
            fold(ledger)
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
    """Deletes files that were merged, and files of runs that were stopped before they counted. Files of runs
    that began less than `older_than_s` ago are kept."""
    with JobContext(url, key).client() as client:
        ledger = _ledger(client, name)
        if not dry_run:
            publish(spark, ledger)
        waiting = unpublished(ledger)
        doomed: dict[str, list[File]] = {}
        latest_ms = time.time() * 1000 - older_than_s * 1000
        for path in paths(ledger):
            for folder in (staging(path), trash(path)):
                for file in list_files(spark, folder):
                    run = file.path.partition("/")[0]
                    if run not in waiting and run_ms(run) <= latest_ms:
                        doomed.setdefault(f"{folder}/{run}", []).append(file)
        if not dry_run:
            delete_folders(spark, doomed)
    files = [file for found in doomed.values() for file in found]
    return Vacuum(name, len(doomed), len(files), sum(file.size for file in files), is_dry=dry_run)


def _ledger(client: Client, name: str) -> Ledger:
    ledger = Ledger(client, LEDGER + name)
    if not ledger.entries:
        raise JobRefused(f"there is no archive {name}; its ledger would be the box {LEDGER}{name}")
    return ledger


def compact_if_due(spark: SparkSession, ledger: Ledger) -> None:
    """What `archive` does after each of its runs; mostly nothing."""
    runs = {entry["run"] for entry in ranges(ledger) if entry.get("run")}
    if len(runs) < _RUNS_BETWEEN:
        return
    for path in paths(ledger):
        chosen = _chosen(list_files(spark, path), everything=False)
        if chosen:
            _merge(spark, ledger, path, chosen)
    fold(ledger)


def _chosen(files: list[File], everything: bool) -> dict[str, list[File]]:
    """Folder -> small files that are worth merging."""
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
    found = {}
    for folder, some in small.items():
        box, _, date = folder.partition("/")
        allowed = _FILES_OPEN if newest[box].startswith(date) else _FILES_CLOSED
        if len(some) > (1 if everything else allowed):
            found[folder] = some
    return found


def _merge(spark: SparkSession, ledger: Ledger, path: str, chosen: Mapping[str, list[File]]) -> int:
    """Writes the records of these files into few, compares, and exchanges them. Returns how many there "
    "are."""
    run = new_run()
    staged = staging(path, run)
    files = [file for some in chosen.values() for file in some]
    rows = read_files(spark, *[f"{path}/{file.path}" for file in files], base=path)
    size = sum(file.size for file in files)
    write(rows, staged, files=max(1, min(len(chosen), 64), size // (2 * _SMALL_BYTES)))
    before = {row["box"]: row for row in summary(rows).collect()}
    after = {row["box"]: row for row in summary(read_files(spark, staged)).collect()}
    if before != after:
        raise JobRefused(
            f"the merged files in {staged} do not hold what the small ones do; nothing was changed"
        )
    entries = []
    for folder, some in chosen.items():
        names = [file.path.rpartition("/")[2] for file in some]
        for at in range(0, len(names), _NAMED_MAX):
            replaced = names[at : at + _NAMED_MAX]
            entries.append({"merge": run, "path": path, "folder": folder, "replaces": replaced})
    ledger.append(entries)
    merged = len(list_files(spark, staged))
    publish(spark, ledger)
    return merged
