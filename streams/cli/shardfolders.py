"""Opens the folders of a server's shards for commands that read them.

Of a running server, the shards export a consistent state. Of a stopped server, the command takes its lock.
"""

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
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import end_life, parts_of, read_shard
from streams.cli import output
from streams.cli.shardlinks import ShardExports
from streams.config import Config

if TYPE_CHECKING:
    from shard.storage.cold import ColdStore


class Sources(NamedTuple):
    """The data to read from each shard, as of one moment for each box."""

    manifest: Manifest
    shards: list[ShardSource]
    #: None if the server is stopped.
    exports: ShardExports | None


def open_directory(path: Path) -> DataDir:
    """Open an existing data directory without locking it."""
    if not (path / "manifest.json").exists() and not (path / "manifest.copy.json").exists():
        raise output.Refusal(f"{path} is not a data directory; name one with --data-dir or STREAMS_DATA_DIR")
    try:
        return DataDir(path)
    except CannotServe as error:
        raise output.Refusal(str(error)) from error


def describe_lock(directory: DataDir, holder: str) -> None:
    """Write the name of this command into the lock, for the error message of a server started meanwhile."""
    directory.describe_holder(url=holder, now_ms=time.time_ns() // 1_000_000)


def read_manifest(directory: DataDir) -> Manifest:
    try:
        manifest = directory.read()
    except CannotServe as error:
        raise output.Refusal(str(error)) from error
    if manifest is None or manifest.is_restoring:
        raise output.Refusal(
            f"{directory.path} has no complete data of a server; if a restore was interrupted, run "
            "`streams restore` again"
        )
    return manifest


@contextmanager
def open_sources(config: Config) -> Iterator[Sources]:
    """Open the folders that a backup of the server copies. Exports are deleted when the block ends."""
    with closing(open_directory(config.data_dir.absolute())) as directory:
        manifest = read_manifest(directory)
        if directory.try_lock():
            describe_lock(directory, "streams backup")
            with _offline(directory, manifest, config) as sources:
                yield sources
        else:
            with _online(directory, manifest, config) as sources:
                yield sources


@contextmanager
def _online(directory: DataDir, manifest: Manifest, config: Config) -> Iterator[Sources]:
    with ShardExports(sockets_of(directory, manifest), secrets.token_hex(8)) as exports:
        shards = []
        for name, facts, server in zip(manifest.directories, exports.facts, exports.servers, strict=True):
            store = store_of(directory.path / name, str(server["cold_dir"]), manifest)
            shards.append(ShardSource(str(facts["folder"]), store, int(facts["taken_ms"])))
        yield Sources(manifest, shards, exports)


@contextmanager
def _offline(directory: DataDir, manifest: Manifest, config: Config) -> Iterator[Sources]:
    from shard.offline.system_clock import now_ms

    disk = Disk()
    folders = [f"{directory.path / name}/export" for name in manifest.directories]
    try:
        shards = []
        for number, (name, folder) in enumerate(zip(manifest.directories, folders, strict=True)):
            source = str(directory.path / name)
            machine = read_shard(disk, source, shard=number)
            cache_survived = not has_failed(disk, source)
            end_life(machine, boot_id=page_cache_id(source), now_ms=now_ms(), cache_survived=cache_survived)
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
    """Return the socket paths of a running server's shards."""
    sockets = [directory.path / "run" / f"shard-{shard:02d}.sock" for shard in range(manifest.shards)]
    if not all(path.exists() for path in sockets):
        raise output.BusyRefusal(
            f"{directory.path} is locked by {directory.holder()}, but its shards do not listen: a server is "
            "starting or stopping, or another command is running. Repeat the command later"
        )
    return sockets


def store_of(folder: Path, cold_dir: str, manifest: Manifest) -> SegmentStore:
    """Open the segments of a shard for reading."""
    return SegmentStore(ExaminedDisk(), f"{folder}/segments", cold_store(cold_dir), server=manifest.server)


def cold_store(location: str) -> ColdStore | None:
    """Open the cold store at `location`; None if the location is empty."""
    if not location:
        return None
    from shard.storage.cold import ColdConfigError, open_cold

    try:
        return open_cold(location, Disk())
    except ColdConfigError as error:
        raise output.Refusal(f"{error} Set it with --cold-dir or STREAMS_COLD_DIR") from error
