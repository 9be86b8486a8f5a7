"""`streams backup`: copy a server's data elsewhere, while it runs or not; list and prune what was copied."""

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
    from shard.transfer.backup import Target, Verify
    from shard.transfer.backup_manifest import Backup


@example("streams backup backups", "streams backup backups --list")
@click.command("backup")
@click.argument("target")
@click.option("--data-dir", metavar="DIR", help="Data directory of the server. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="PLACE", help="Its cold store, if it is stopped. [STREAMS_COLD_DIR]")
@click.option("--list", "lists", is_flag=True, help="List the backups in TARGET, and take none.")
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Then drop all but the newest N backups."
)
@click.option(
    "--sign-key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Sign the backup with this private ed25519 key (PEM).",
)
@pacing.option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
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

    TARGET is a folder that exists, or an object store (s3://bucket/prefix, gs://…, az://…) whose keys come
    from the environment. Only segments that the newest backup in it does not have are copied.
    """
    config = configured(data_dir=data_dir, cold_dir=cold_dir)
    with opened(target, otherwise="No backup was made; look at what keeps that place, then repeat") as place:
        if lists:
            return _list(place, as_json)
        _take(place, config, keep, sign_key, rate, as_json)
        return output.EXIT_DONE


def configured(**flags: str | None) -> Config:
    try:
        return load(os.environ, flags)
    except ConfigError as error:
        raise output.Refusal(str(error)) from error


@contextmanager
def opened(target: str, *, otherwise: str, verify: Verify | None = None) -> Iterator[Target]:
    """A place for backups. What goes wrong is put into words; `otherwise` is what to do about something in it
    that is damaged, and `verify` says which backups may be loaded."""
    from shard.storage.cold import ColdConfigError, ColdDamaged, ColdMissing, ColdUnavailable, open_cold
    from shard.storage.files import Corrupt, Disk
    from shard.storage.segments.store import Unreachable
    from shard.transfer.backup import BadSignature, Target

    disk = Disk()
    try:
        place = Target(open_cold(target, disk), disk, verify=verify)
    except ColdConfigError as error:
        raise output.Refusal(str(error).replace("the cold store", "a place for backups")) from error
    try:
        yield place
    except ColdUnavailable as error:
        raise output.Occupied(
            f"{target} cannot be used now ({error.name or 'its listing'}: {error.reason}). Check its address "
            "and, of an object store, the keys in the environment; then repeat this"
        ) from error
    except Unreachable as error:
        raise output.Occupied(
            f"{error}. That is the server's own cold store; repeat this when it answers"
        ) from error
    except (ColdMissing, ColdDamaged) as error:
        raise output.Refusal(f"{target}: {error.name} is damaged: {error.reason}. {otherwise}") from error
    except BadSignature as error:
        raise output.Refusal(
            f"{target}: {error}. Nothing was written. Give the public key of whoever took it with "
            "--verify-key, or choose another backup with --backup"
        ) from error
    except Corrupt as damage:
        raise output.Refusal(
            f"{damage.path} is damaged at byte {damage.offset}: {damage.reason}. No backup was made or put "
            "in place. Run `streams verify` on the data directory, or choose another backup"
        ) from damage
    except BrokenPipeError:  # whoever reads our output has enough
        raise
    except OSError as error:
        where = error.filename or "the disk"
        raise output.Refusal(
            f"{where} cannot be read or written ({error.strerror}). No backup was made or put in place; see "
            "to that, then repeat this"
        ) from error


def _take(
    place: Target, config: Config, keep: int | None, sign_key: Path | None, rate: int, as_json: bool
) -> None:
    from streams.cli.shardfolders import sources
    from streams.cli.signing import load_signer

    signer = None if sign_key is None else load_signer(sign_key)
    with sources(config) as found, pacing.copying("backup", rate, found.exported) as copying:
        taken = place.take(
            found.shards,
            found.manifest.placement.ranges(),
            signer=signer,
            pause=copying.pause,
            expect=copying.expect,
        )
    _note(config, taken.backup)
    pruned = _prune(place, keep, taken.backup.id) if keep else []
    facts = {
        **_row(taken.backup),
        "online": found.exported is not None,
        "signed": signer is not None,
        "copied_segments": taken.copied_segments,
        "copied_bytes": taken.copied_bytes,
        "pruned": pruned,
    }
    text = (
        f"{taken.backup.id}: {taken.backup.boxes} boxes, {output.size(taken.backup.size)}; copied "
        f"{taken.copied_segments} new segments, {output.size(taken.copied_bytes)} in all"
    )
    dropped = f"; dropped {len(pruned)} older backups" if pruned else ""
    output.show_result(text + dropped, facts, as_json=as_json)


def _note(config: Config, taken: Backup) -> None:
    """Leave the time of this backup where the server's status and metrics find it."""
    from gateway.supervise.backup_note import BackupNote, write_note

    try:
        write_note(config.data_dir, BackupNote(taken.id, taken.taken_ms))
    except OSError as error:
        output.warn(f"{taken.id} was taken; {config.data_dir} could not be told its age ({error.strerror})")


def _prune(place: Target, keep: int, taken: str) -> list[str]:
    from shard.storage.files import Corrupt

    try:
        return place.prune(keep)
    except Corrupt as damage:
        raise output.Refusal(
            f"{taken} was taken, but nothing was dropped: what {damage.path} needs cannot be told "
            f"({damage.reason}). Remove that file if it is of no use, then repeat this"
        ) from damage


def _list(place: Target, as_json: bool) -> int:
    """Shows those that are whole, and tells of others."""
    from shard.storage.files import Corrupt

    found: list[Backup] = []
    damaged: list[Corrupt] = []
    for id in place.ids():
        try:
            found.append(place.load(id))
        except Corrupt as damage:
            damaged.append(damage)
    rows = (_row(backup) for backup in found)
    output.show_rows(("id", "taken_ms", "boxes", "shards", "bytes"), rows, as_json=as_json)
    for each in damaged:
        output.warn(f"{each.path} cannot be restored: {each.reason}")
    if damaged:
        return output.EXIT_DAMAGED
    return output.EXIT_DONE if found else output.EXIT_NOTHING


def _row(backup: Backup) -> dict[str, Any]:
    return {
        "id": backup.id,
        "taken_ms": backup.taken_ms,
        "boxes": backup.boxes,
        "shards": len(backup.shards),
        "segments": sum(len(shard.segments) for shard in backup.shards),
        "bytes": backup.size,
    }
