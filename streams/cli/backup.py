"""`streams backup`: back up a running or stopped server; list and prune backups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output, pacing
from streams.cli.verbs import example
from streams.config import Config, ConfigError, load

if TYPE_CHECKING:
    from shard.transfer.backup import BackupStore, Verify
    from shard.transfer.backup_manifest import Backup


@example("streams backup backups", "streams backup backups --list")
@click.command("backup")
@click.argument("target")
@click.option("--data-dir", metavar="DIR", help="Data directory of the server. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="LOCATION", help="Cold store of a stopped server. [STREAMS_COLD_DIR]")
@click.option("--list", "lists", is_flag=True, help="List the backups in TARGET instead of taking one.")
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Afterwards delete all but the newest N backups."
)
@click.option(
    "--sign-key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Sign the backup with this private ed25519 key (PEM).",
)
@pacing.option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    target: str,
    data_dir: str | None,
    cold_dir: str | None,
    lists: bool,
    keep: int | None,
    sign_key: Path | None,
    rate: int,
    as_json: bool,
) -> int:
    """Take a backup of a server, running or stopped, into TARGET.

    TARGET is an existing folder, or an object store (s3://bucket/prefix, gs://…, az://…) with credentials in
    the environment. Backups are incremental: segments that the newest backup in TARGET has are not copied.
    """
    config = load_config(data_dir=data_dir, cold_dir=cold_dir)
    hint = "No backup was taken; check the storage behind TARGET, then repeat the command"
    with open_backups(target, hint=hint) as backups:
        if lists:
            return _list(backups, as_json)
        _take(backups, config, keep, sign_key, rate, as_json)
        return output.EXIT_DONE


def load_config(**flags: str | None) -> Config:
    try:
        return load(os.environ, flags)
    except ConfigError as error:
        raise output.Refusal(str(error)) from error


@contextmanager
def open_backups(target: str, *, hint: str, verify: Verify | None = None) -> Iterator[BackupStore]:
    """Open a backup target, and turn its failures into messages.

    `hint` is the next step if a file in the target is damaged. `verify` checks the signature of a backup
    before it is loaded.
    """
    from shard.storage.cold import ColdConfigError, ColdDamaged, ColdMissing, ColdUnavailable, open_cold
    from shard.storage.files import Corrupt, Disk
    from shard.storage.segments.store import ColdStoreUnreachable
    from shard.transfer.backup import BackupStore, BadSignature

    disk = Disk()
    try:
        backups = BackupStore(open_cold(target, disk), disk, verify=verify)
    except ColdConfigError as error:
        raise output.Refusal(str(error).replace("the cold store", "the backup target")) from error
    try:
        yield backups
    except ColdUnavailable as error:
        raise output.BusyRefusal(
            f"{target} cannot be used now ({error.name or 'its listing'}: {error.reason}). Check the "
            "address and, for an object store, the credentials in the environment; then repeat the command"
        ) from error
    except ColdStoreUnreachable as error:
        raise output.BusyRefusal(
            f"{error}. This is the cold store of the server; repeat the command when it is reachable"
        ) from error
    except (ColdMissing, ColdDamaged) as error:
        raise output.Refusal(f"{target}: {error.name} is damaged: {error.reason}. {hint}") from error
    except BadSignature as error:
        raise output.Refusal(
            f"{target}: {error}. Nothing was written. Pass the signer's public key with --verify-key, or "
            "choose another backup with --backup"
        ) from error
    except Corrupt as damage:
        raise output.Refusal(
            f"{damage.path} is damaged at byte {damage.offset}: {damage.reason}. Nothing was backed up or "
            "restored. Run `streams verify` on the data directory, or choose another backup"
        ) from damage
    except BrokenPipeError:  # the reader of the output is gone: not an error of the target
        raise
    except OSError as error:
        where = error.filename or "the disk"
        raise output.Refusal(
            f"{where} cannot be read or written ({error.strerror}). Nothing was backed up or restored; fix "
            "that, then repeat the command"
        ) from error


def _take(
    backups: BackupStore, config: Config, keep: int | None, sign_key: Path | None, rate: int, as_json: bool
) -> None:
    from streams.cli.shardfolders import open_sources
    from streams.cli.signing import load_signer

    signer = None if sign_key is None else load_signer(sign_key)
    with open_sources(config) as sources, pacing.throttle_copy("backup", rate, sources.exports) as throttle:
        result = backups.take(
            sources.shards,
            sources.manifest.placement.ranges(),
            signer=signer,
            pause=throttle.pause,
            expect=throttle.expect,
        )
    _write_note(config, result.backup)
    pruned_ids = _prune(backups, keep, result.backup.id) if keep else []
    facts = {
        **_row(result.backup),
        "online": sources.exports is not None,
        "signed": signer is not None,
        "copied_segments": result.copied_segments,
        "copied_bytes": result.copied_bytes,
        "pruned": pruned_ids,
    }
    text = (
        f"{result.backup.id}: {result.backup.boxes} boxes, {output.size(result.backup.size)}; copied "
        f"{result.copied_segments} new segments, {output.size(result.copied_bytes)} in total"
    )
    suffix = f"; deleted {len(pruned_ids)} older backups" if pruned_ids else ""
    output.show_result(text + suffix, facts, as_json=as_json)


def _write_note(config: Config, backup: Backup) -> None:
    """Record the time of this backup in the data directory, for the server's status and metrics."""
    from gateway.supervise.backup_note import BackupNote, write_note

    try:
        write_note(config.data_dir, BackupNote(backup.id, backup.taken_ms))
    except OSError as error:
        output.warn(
            f"backup {backup.id} is complete, but its time could not be recorded in {config.data_dir} "
            f"({error.strerror}): the metrics show the age of an earlier backup"
        )


def _prune(backups: BackupStore, keep: int, new_id: str) -> list[str]:
    from shard.storage.files import Corrupt

    try:
        return backups.prune(keep)
    except Corrupt as damage:
        raise output.Refusal(
            f"backup {new_id} is complete, but no older backup was deleted: {damage.path} cannot be read "
            f"({damage.reason}), so the segments that it needs are unknown. Delete that file if you do not "
            "need it, then repeat the command"
        ) from damage


def _list(backups: BackupStore, as_json: bool) -> int:
    """List the intact backups, and warn about damaged ones."""
    from shard.storage.files import Corrupt

    intact_backups: list[Backup] = []
    problems: list[Corrupt] = []
    for id in backups.ids():
        try:
            intact_backups.append(backups.load(id))
        except Corrupt as damage:
            problems.append(damage)
    rows = (_row(backup) for backup in intact_backups)
    output.show_rows(("id", "taken_ms", "boxes", "shards", "bytes"), rows, as_json=as_json)
    for problem in problems:
        output.warn(f"{problem.path} cannot be restored: {problem.reason}; take a new backup")
    if problems:
        return output.EXIT_DAMAGED
    return output.EXIT_DONE if intact_backups else output.EXIT_NOTHING


def _row(backup: Backup) -> dict[str, Any]:
    return {
        "id": backup.id,
        "taken_ms": backup.taken_ms,
        "boxes": backup.boxes,
        "shards": len(backup.shards),
        "segments": sum(len(shard.segments) for shard in backup.shards),
        "bytes": backup.size,
    }
