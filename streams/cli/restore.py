"""`streams restore`: put a backup, or the object boxes of an object store, into an empty data directory."""

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
from streams.cli.backup import configured, opened
from streams.cli.verbs import example

if TYPE_CHECKING:
    from gateway.supervise.data_dir import DataDir
    from gateway.supervise.manifest import Manifest
    from shard.offline.restore import Restored
    from shard.storage.files import ConfinedDisk
    from shard.transfer.backup import Target, Verify
    from shard.transfer.backup_manifest import Backup
    from shard.transfer.object_chains import Told
    from streams.config import Config


def _moment(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Milliseconds since 1970, or a date and time; without a zone it is that of this machine."""
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
@click.option("--backup", "id", metavar="ID", default="", help="Which one; the newest unless given.")
@click.option(
    "--until",
    "until_ms",
    metavar="TIME",
    callback=_moment,
    help="Leave out what was written after this time, by its $ts.",
)
@click.option(
    "--what",
    type=click.Choice(("backup", "objects")),
    help="Needed only if SOURCE has both: a backup, or the boxes of class object as they were last.",
)
@click.option(
    "--verify-key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Accept only a backup that was signed with this ed25519 key (public, PEM).",
)
@click.option("--data-dir", metavar="DIR", help="Where to put it; must be empty. [STREAMS_DATA_DIR]")
@click.option(
    "--shards", type=click.IntRange(1, 256), metavar="N", help="As many shards as it had unless given."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
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
    """Put a backup from SOURCE into an empty data directory.

    If SOURCE is the cold store of a server (STREAMS_COLD_DIR), this brings back its boxes of class object
    with everything that was acknowledged, whatever became of its machine.

    With --until the oldest backup that was taken at or after that time is used, and records, and boxes, that
    are younger are left out. What was deleted between that time and the backup stays deleted.
    """
    config = configured(data_dir=data_dir)
    verify = None if verify_key is None else _verifier(verify_key, what)
    is_backup = bool(id or verify) or until_ms is not None or what == "backup"
    with opened(source, otherwise="Choose another backup", verify=verify) as place:
        told = [] if is_backup else _find_objects(place)
        if told and what is None and place.ids():
            raise output.Refusal(
                f"{source} has backups, and what is kept of boxes of class object; say --what backup, or "
                "--what objects"
            )
        if told or what == "objects":
            _restore_objects(place, told, source, config, shards, as_json)
            return
        backup = _chosen(place, source, id, until_ms)
        with closing(_directory(config.data_dir.absolute())) as directory:
            found = _restore(place, backup, directory, config, shards, until_ms)
    facts = {"id": backup.id, "taken_ms": backup.taken_ms, **found._asdict(), "data_dir": str(directory.path)}
    cut = f"; left out {found.cut_records} records and {found.cut_boxes} boxes that are younger"
    text = (
        f"{backup.id}, taken {output.moment(backup.taken_ms)}: {found.boxes} boxes, {found.records} records "
        f"are in {directory.path}"
    )
    output.show_result(text + (cut if until_ms is not None else ""), facts, as_json=as_json)
    _warn_of_corrections(found)


def _warn_of_corrections(found: Restored) -> None:
    """Says what two boxes did not agree about, and what readers are told of it."""
    if found.skipped_seqs:
        output.warn(
            f"{found.skipped_seqs} seqs are skipped: boxes have copies of records that their sources had not "
            "when they were captured. Readers of the sources see a tombstone (crash)"
        )
    if found.compacted_keys:
        output.warn(
            f"up to {found.compacted_keys} keys of boxes with `compact: tag` are missing: compaction has "
            "dropped their records of that time. Readers of the boxes see a tombstone (crash)"
        )
    if found.missing_copies:
        output.warn(
            f"{found.missing_copies} copies of routers or dead letters could not be brought back. "
            "Readers of their boxes see a tombstone (source_trim)"
        )


def _verifier(path: Path, what: str | None) -> Verify:
    from streams.cli.signing import load_verifier

    if what == "objects":
        raise output.Refusal("--verify-key is for backups; what boxes of class object store is not signed")
    return load_verifier(path)


def _find_objects(place: Target) -> list[Told]:
    from shard.offline.restore_objects import find
    from shard.storage.files import Disk

    return find(place.store, Disk())


def _restore_objects(
    place: Target, told: list[Told], source: str, config: Config, shards: int | None, as_json: bool
) -> None:
    from shard.offline.clock import now_ms
    from shard.offline.restore_objects import RestoringObjects, shards_of
    from shard.recovery.page_cache import page_cache_id
    from streams import progress

    if not told:
        raise output.Refusal(f"{source} holds nothing of boxes of class object")
    with closing(_directory(config.data_dir.absolute())) as directory:
        manifest = _manifest(told[-1].base.slots, shards_of(told), shards, scratches=len(told))
        directory.commit(manifest)
        with _confined(directory) as disk, progress.shown("restore") as report:
            found = RestoringObjects(
                disk,
                place.store,
                told,
                data_dir=str(directory.path),
                folders=list(manifest.directories),
                slots=list(manifest.placement.slots),
                file_bytes=config.wal_file_bytes,
                boot_id=page_cache_id(str(directory.path)),
                now_ms=now_ms(),
                report=report,
            ).restore()
        directory.settle(manifest)
    boxes, records = found.restored.boxes, found.restored.records
    facts = {
        "boxes": boxes,
        "records": records,
        "chains": found.chains,
        "objects": found.objects,
        "left_out_objects": found.left_out,
        "skipped_seqs": found.restored.skipped_seqs,
        "missing_copies": found.restored.missing_copies,
        "data_dir": str(directory.path),
    }
    text = f"{source}: {boxes} boxes of class object, {records} records are in {directory.path}"
    output.show_result(text, facts, as_json=as_json)
    _warn_of_corrections(found.restored)
    if found.left_out:
        output.warn(
            f"{found.left_out} objects are damaged, or come after one that is missing; they were left out"
        )


def _chosen(place: Target, source: str, id: str, until_ms: int | None) -> Backup:
    from shard.offline.restore import choose

    try:
        chosen = choose(place, id=id, until_ms=until_ms)
    except LookupError as error:
        raise output.Refusal(f"{source}: {error.args[0]}") from error
    return place.load(chosen)


def _directory(path: Path) -> DataDir:
    """The directory, locked; new, empty, or left by a restore that did not end."""
    from gateway.supervise.data_dir import CannotServe, DataDir
    from streams.cli.shardfolders import hold

    occupied = output.Refusal(f"{path} is not empty; restore into a new directory, with --data-dir")
    if path.is_dir() and not (path / "LOCK").exists() and any(path.iterdir()):
        raise occupied  # somebody else's: not even a lock is put there
    try:
        directory = DataDir(path)
        if not directory.try_lock():
            raise output.Occupied(
                f"{path} is in use by {directory.holder()}; restore into a new directory, with --data-dir"
            )
        unfinished = directory.read()
        if unfinished is not None and unfinished.is_restoring:
            for name in (*unfinished.building, *unfinished.directories):
                directory.remove(name)
        elif unfinished is not None or any(found.name != "LOCK" for found in path.iterdir()):
            raise occupied
        hold(directory, "streams restore")
    except CannotServe as error:
        raise output.Refusal(str(error)) from error
    return directory


@contextmanager
def _confined(directory: DataDir) -> Iterator[ConfinedDisk]:
    """The disk below a data directory: what a backup names cannot be put anywhere else."""
    from shard.storage.files import ConfinedDisk

    disk = ConfinedDisk(str(directory.path))
    try:
        yield disk
    finally:
        disk.close_root()


def _restore(
    place: Target,
    backup: Backup,
    directory: DataDir,
    config: Config,
    shards: int | None,
    until_ms: int | None,
) -> Restored:
    from shard.offline.clock import now_ms
    from shard.offline.restore import Restoring
    from shard.recovery.page_cache import page_cache_id
    from shard.transfer.backup import Target
    from streams import progress

    manifest = _manifest(backup.slots, len(backup.shards), shards, scratches=len(backup.shards))
    directory.commit(manifest)
    with _confined(directory) as disk, progress.shown("restore") as report:
        found = Restoring(
            disk,
            Target(place.store, disk),
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
    return found


def _manifest(
    slots: list[tuple[int, int, int]], shards_before: int, shards: int | None, *, scratches: int
) -> Manifest:
    """Names what is about to be built, and that nobody may serve it before it is."""
    from gateway.shards.placement import Placement
    from gateway.supervise.manifest import SALTS, fresh
    from shard.offline.restore import scratch_of

    now_ms = time.time_ns() // 1_000_000
    manifest = fresh(shards or shards_before, now_ms=now_ms, salt=secrets.randbelow(SALTS))
    if shards in (None, shards_before):  # slots that had moved stay where they were
        fields = {"slots": slots, "shards": shards_before, "version": 1}
        manifest = replace(manifest, placement=Placement.from_dict(fields))
    scratch = tuple(scratch_of(number) for number in range(scratches))
    return replace(manifest, building=(*manifest.directories, *scratch), is_restoring=True)
