"""The folders of a server's shards, for commands that read them: of a running server by its leave, of one
that is stopped under its lock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.manifest import Manifest
from shard.recovery.page_cache import has_failed, page_cache_id
from shard.storage.files import Corrupt, Disk, ExaminedDisk, remove_tree
from shard.storage.segments.store import SegmentStore
from shard.transfer.backup import ShardSource
from shard.transfer.boxes import end_life, parts_of, read_shard
from shard.transfer.exports import write_export
from streams.cli import output
from streams.cli.shardlinks import Exported
from streams.config import Config

if TYPE_CHECKING:
    from shard.storage.cold import ColdStore


class Sources(NamedTuple):
    """What of each shard is to be read, as of one moment for each box."""

    manifest: Manifest
    shards: list[ShardSource]
    #: None if the server is stopped.
    exported: Exported | None


def open_directory(path: Path) -> DataDir:
    """A data directory that is there; it is not locked by this."""
    if not (path / "manifest.json").exists() and not (path / "manifest.copy.json").exists():
        raise output.Refusal(
            f"{path} is not a data directory of a server; name one with --data-dir or STREAMS_DATA_DIR"
        )
    try:
        return DataDir(path)
    except CannotServe as error:
        raise output.Refusal(str(error)) from error


def hold(directory: DataDir, who: str) -> None:
    """Says in the lock that it is us, for a server that is started meanwhile."""
    directory.describe_holder(url=who, now_ms=time.time_ns() // 1_000_000)


def read_manifest(directory: DataDir) -> Manifest:
    try:
        manifest = directory.read()
    except CannotServe as error:
        raise output.Refusal(str(error)) from error
    if manifest is None or manifest.is_restoring:
        raise output.Refusal(f"{directory.path} holds no server's data (yet); was a restore cut short?")
    return manifest


@contextmanager
def sources(config: Config) -> Iterator[Sources]:
    """What a backup of the server copies. Its folders are gone when the block ends."""
    with closing(open_directory(config.data_dir.absolute())) as directory:
        manifest = read_manifest(directory)
        if directory.try_lock():
            hold(directory, "streams backup")
            with _offline(directory, manifest, config) as found:
                yield found
        else:
            with _online(directory, manifest, config) as found:
                yield found


@contextmanager
def _online(directory: DataDir, manifest: Manifest, config: Config) -> Iterator[Sources]:
    with Exported(sockets_of(directory, manifest), secrets.token_hex(8)) as exported:
        shards = []
        for name, facts, server in zip(manifest.directories, exported.facts, exported.servers, strict=True):
            store = store_of(directory.path / name, str(server["cold_dir"]), manifest)
            shards.append(ShardSource(str(facts["folder"]), store, int(facts["taken_ms"])))
        yield Sources(manifest, shards, exported)


@contextmanager
def _offline(directory: DataDir, manifest: Manifest, config: Config) -> Iterator[Sources]:
    from shard.offline.clock import now_ms

    disk = Disk()
    folders = [f"{directory.path / name}/export" for name in manifest.directories]
    try:
        shards = []
        for number, (name, folder) in enumerate(zip(manifest.directories, folders, strict=True)):
            source = str(directory.path / name)
            machine = read_shard(disk, source, shard=number)
            survived = not has_failed(disk, source)
            end_life(machine, boot_id=page_cache_id(source), now_ms=now_ms(), cache_survived=survived)
            remove_tree(disk, folder)
            write_export(disk, folder, parts_of(machine), now_ms=now_ms(), file_bytes=config.wal_file_bytes)
            store = store_of(directory.path / name, config.cold_dir, manifest)
            shards.append(ShardSource(folder, store, now_ms()))
        yield Sources(manifest, shards, None)
    except Corrupt as damage:
        raise output.Refusal(str(damage)) from damage
    finally:
        for folder in folders:
            remove_tree(disk, folder)


def sockets_of(directory: DataDir, manifest: Manifest) -> list[Path]:
    """Of the shards of a running server."""
    sockets = [directory.path / "run" / f"shard-{shard:02d}.sock" for shard in range(manifest.shards)]
    if not all(path.exists() for path in sockets):
        raise output.Occupied(
            f"{directory.path} is in use by {directory.holder()}, which is starting, stopping, or no server; "
            "repeat this when that is over"
        )
    return sockets


def store_of(folder: Path, cold_dir: str, manifest: Manifest) -> SegmentStore:
    """The segments of a shard, to be read."""
    return SegmentStore(ExaminedDisk(), f"{folder}/segments", cold_store(cold_dir), server=manifest.server)


def cold_store(location: str) -> ColdStore | None:
    """The cold store of the server, if it has one."""
    if not location:
        return None
    from shard.storage.cold import ColdConfigError, open_cold

    try:
        return open_cold(location, Disk())
    except ColdConfigError as error:
        raise output.Refusal(f"{error} It is set by --cold-dir or STREAMS_COLD_DIR") from error
