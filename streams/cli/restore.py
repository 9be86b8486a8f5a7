"""`streams restore`: restore a backup, or the boxes of class object, into an empty data directory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streams.cli import output
from streams.cli.backup import load_config, open_backups
from streams.cli.verbs import example

if TYPE_CHECKING:
    from gateway.supervise.data_dir import DataDir
    from gateway.supervise.manifest import Manifest
    from shard.offline.restore import RestoreResult
    from shard.storage.files import ConfinedDisk
    from shard.transfer.backup import BackupStore, Verify
    from shard.transfer.backup_manifest import Backup
    from shard.transfer.object_chains import RestorableChain
    from streams.config import Config


def _moment(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Parse milliseconds since 1970, or an ISO 8601 time (local time if it has no zone)."""
    if text is None or (text.isascii() and text.isdigit()):
        return int(text) if text else None
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time; write 2026-11-16T16:35:00Z, or milliseconds since 1970"
        ) from None


@example("streams restore backups --data-dir restored")
@click.command("restore")
@click.argument("source")
@click.option("--backup", "id", metavar="ID", default="", help="Backup to restore (default: the newest).")
@click.option(
    "--until",
    "until_ms",
    metavar="TIME",
    callback=_moment,
    help="Restore to this point in time: leave out records with a later $ts.",
)
@click.option(
    "--what",
    type=click.Choice(("backup", "objects")),
    help="Only needed if SOURCE has both: a backup, or the latest state of the boxes of class object.",
)
@click.option(
    "--verify-key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Accept only a backup signed with this ed25519 key (public key, PEM).",
)
@click.option(
    "--data-dir", metavar="DIR", help="Data directory to restore into; must be empty. [STREAMS_DATA_DIR]"
)
@click.option(
    "--shards", type=click.IntRange(1, 256), metavar="N", help="Number of shards (default: as in the backup)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    source: str,
    id: str,
    until_ms: int | None,
    what: str | None,
    verify_key: Path | None,
    data_dir: str | None,
    shards: int | None,
    as_json: bool,
) -> None:
    """Restore a backup from SOURCE into an empty data directory.

    If SOURCE is the cold store of a server (STREAMS_COLD_DIR), this restores its boxes of class object with
    every acknowledged record, even if the machine of the server is lost.

    With --until, the oldest backup taken at or after that time is used, without its younger records and
    boxes. Records that were deleted between that time and the backup stay deleted.
    """
    config = load_config(data_dir=data_dir)
    verify = None if verify_key is None else _verifier(verify_key, what)
    is_backup = bool(id or verify) or until_ms is not None or what == "backup"
    with open_backups(source, hint="Choose another backup", verify=verify) as backups:
        chains = [] if is_backup else _find_objects(backups)
        if chains and what is None and backups.ids():
            raise output.Refusal(
                f"{source} has both backups and boxes of class object; choose with --what backup or "
                "--what objects"
            )
        if chains or what == "objects":
            _restore_objects(backups, chains, source, config, shards, as_json)
            return
        backup = _load_backup(backups, source, id, until_ms)
        with closing(_open_directory(config.data_dir.absolute())) as directory:
            result = _restore(backups, backup, directory, config, shards, until_ms)
    facts = {
        "id": backup.id,
        "taken_ms": backup.taken_ms,
        **result._asdict(),
        "data_dir": str(directory.path),
    }
    cut = f"; left out {result.cut_records} records and {result.cut_boxes} boxes that are newer"
    text = (
        f"{backup.id}, taken {output.moment(backup.taken_ms)}: {result.boxes} boxes, {result.records} "
        f"records are in {directory.path}"
    )
    output.show_result(text + (cut if until_ms is not None else ""), facts, as_json=as_json)
    _warn_of_corrections(result)


def _warn_of_corrections(result: RestoreResult) -> None:
    """Warn about records and copies that two boxes disagreed about, and what readers see."""
    if result.skipped_seqs:
        output.warn(
            f"{result.skipped_seqs} seqs are skipped: other boxes have copies of these records, but the "
            "backup of their source box ends before them. Readers of the source see a tombstone (crash)"
        )
    if result.compacted_keys:
        output.warn(
            f"up to {result.compacted_keys} tags of boxes with `compact: tag` are missing: compaction "
            "deleted their records of that time. Readers of these boxes see a tombstone (crash)"
        )
    if result.missing_copies:
        output.warn(
            f"{result.missing_copies} copies of routers or dead letters could not be restored. "
            "Readers of their boxes see a tombstone (source_trim)"
        )


def _verifier(path: Path, what: str | None) -> Verify:
    from streams.cli.signing import load_verifier

    if what == "objects":
        raise output.Refusal("--verify-key works only with backups; boxes of class object are not signed")
    return load_verifier(path)


def _find_objects(backups: BackupStore) -> list[RestorableChain]:
    from shard.offline.restore_objects import find_chains
    from shard.storage.files import Disk

    return find_chains(backups.store, Disk())


def _restore_objects(
    backups: BackupStore,
    chains: list[RestorableChain],
    source: str,
    config: Config,
    shards: int | None,
    as_json: bool,
) -> None:
    from shard.offline.restore_objects import ObjectRestoreJob, shard_count
    from shard.offline.system_clock import now_ms
    from shard.recovery.page_cache import page_cache_id
    from streams import progress

    if not chains:
        raise output.Refusal(
            f"{source} has no boxes of class object; check the location, or restore a backup"
        )
    with closing(_open_directory(config.data_dir.absolute())) as directory:
        manifest = _manifest(chains[-1].base.slots, shard_count(chains), shards, scratches=len(chains))
        directory.commit(manifest)
        with _open_confined_disk(directory) as disk, progress.show_progress("restore") as report:
            result = ObjectRestoreJob(
                disk,
                backups.store,
                chains,
                data_dir=str(directory.path),
                folders=list(manifest.directories),
                slots=list(manifest.placement.slots),
                file_bytes=config.wal_file_bytes,
                boot_id=page_cache_id(str(directory.path)),
                now_ms=now_ms(),
                report=report,
            ).restore()
        directory.settle(manifest)
    boxes, records = result.result.boxes, result.result.records
    facts = {
        "boxes": boxes,
        "records": records,
        "chains": result.chains,
        "objects": result.objects,
        "left_out_objects": result.left_out,
        "skipped_seqs": result.result.skipped_seqs,
        "missing_copies": result.result.missing_copies,
        "data_dir": str(directory.path),
    }
    text = f"{source}: {boxes} boxes of class object, {records} records are in {directory.path}"
    output.show_result(text, facts, as_json=as_json)
    _warn_of_corrections(result.result)
    if result.left_out:
        output.warn(
            f"{result.left_out} objects were left out: they are damaged, or an object before them is missing"
        )


def _load_backup(backups: BackupStore, source: str, id: str, until_ms: int | None) -> Backup:
    from shard.offline.restore import choose_backup

    try:
        backup_id = choose_backup(backups, id=id, until_ms=until_ms)
    except LookupError as error:
        raise output.Refusal(f"{source}: {error.args[0]}") from error
    return backups.load(backup_id)


def _open_directory(path: Path) -> DataDir:
    """Open and lock the directory. It must be new, empty, or left by an interrupted restore."""
    from gateway.supervise.data_dir import CannotServe, DataDir
    from streams.cli.shardfolders import describe_lock

    not_empty = output.Refusal(f"{path} is not empty; restore into a new directory, with --data-dir")
    if path.is_dir() and not (path / "LOCK").exists() and any(path.iterdir()):
        raise not_empty  # not a data directory: do not even create a lock file there
    try:
        directory = DataDir(path)
        if not directory.try_lock():
            raise output.BusyRefusal(
                f"{path} is in use by {directory.holder()}; restore into a new directory, with --data-dir"
            )
        manifest = directory.read()
        if manifest is not None and manifest.is_restoring:
            for name in (*manifest.building, *manifest.directories):
                directory.remove(name)
        elif manifest is not None or any(entry.name != "LOCK" for entry in path.iterdir()):
            raise not_empty
        describe_lock(directory, "streams restore")
    except CannotServe as error:
        raise output.Refusal(str(error)) from error
    return directory


@contextmanager
def _open_confined_disk(directory: DataDir) -> Iterator[ConfinedDisk]:
    """Open the disk below a data directory. File names in a backup cannot lead outside of it."""
    from shard.storage.files import ConfinedDisk

    disk = ConfinedDisk(str(directory.path))
    try:
        yield disk
    finally:
        disk.close_root()


def _restore(
    backups: BackupStore,
    backup: Backup,
    directory: DataDir,
    config: Config,
    shards: int | None,
    until_ms: int | None,
) -> RestoreResult:
    from shard.offline.restore import RestoreJob
    from shard.offline.system_clock import now_ms
    from shard.recovery.page_cache import page_cache_id
    from shard.transfer.backup import BackupStore
    from streams import progress

    manifest = _manifest(backup.slots, len(backup.shards), shards, scratches=len(backup.shards))
    directory.commit(manifest)
    with _open_confined_disk(directory) as disk, progress.show_progress("restore") as report:
        result = RestoreJob(
            disk,
            BackupStore(backups.store, disk),
            backup,
            data_dir=str(directory.path),
            folders=list(manifest.directories),
            slots=list(manifest.placement.slots),
            until_ms=until_ms,
            file_bytes=config.wal_file_bytes,
            boot_id=page_cache_id(str(directory.path)),
            now_ms=now_ms(),
            report=report,
        ).run()
    directory.settle(manifest)
    return result


def _manifest(
    slots: list[tuple[int, int, int]], shards_before: int, shards: int | None, *, scratches: int
) -> Manifest:
    """Return a manifest that names the folders to build. No server starts on it until the restore is done."""
    from gateway.shards.placement import Placement
    from gateway.supervise.manifest import SALTS, fresh
    from shard.offline.restore import scratch_of

    now_ms = time.time_ns() // 1_000_000
    manifest = fresh(shards or shards_before, now_ms=now_ms, salt=secrets.randbelow(SALTS))
    if shards in (None, shards_before):  # keep the slot map of the backup, including moved slots
        fields = {"slots": slots, "shards": shards_before, "version": 1}
        manifest = replace(manifest, placement=Placement.from_dict(fields))
    scratch = tuple(scratch_of(number) for number in range(scratches))
    return replace(manifest, building=(*manifest.directories, *scratch), is_restoring=True)
