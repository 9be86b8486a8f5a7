"""`streams verify`: check every byte of the data of a running or stopped server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streams.cli import output, pacing
from streams.cli.backup import load_config
from streams.cli.verbs import example

if TYPE_CHECKING:
    from gateway.supervise.data_dir import DataDir
    from gateway.supervise.manifest import Manifest
    from shard.offline.verify import Problem, Scope, VerifyResult
    from shard.storage.segments.store import SegmentStore
    from streams.cli.pacing import CopyThrottle
    from streams.cli.shardlinks import ShardExports
    from streams.config import Config


@example("streams verify")
@click.command("verify")
@click.option("--data-dir", metavar="DIR", help="Data directory of the server. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="LOCATION", help="Cold store of a stopped server. [STREAMS_COLD_DIR]")
@click.option("--cold", "with_cold", is_flag=True, help="Also check the segments in the cold store.")
@pacing.option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(data_dir: str | None, cold_dir: str | None, with_cold: bool, rate: int, as_json: bool) -> int:
    """Check every byte of a server's data: checksums, order, positions, indexes. Changes nothing.

    Exit code 0 if everything is intact, 6 if something is damaged, 3 if the cold store is unreachable. The
    newest log files of a running server are skipped: the server is writing them.
    """
    from streams.cli.shardfolders import describe_lock, open_directory

    config = load_config(data_dir=data_dir, cold_dir=cold_dir)
    with ExitStack() as stack:
        directory = stack.enter_context(closing(open_directory(config.data_dir.absolute())))
        problems, manifest = manifest_of(directory)
        reports: list[VerifyResult] = []
        is_online = not directory.try_lock()
        if not is_online:
            describe_lock(directory, "streams verify")
        if manifest is not None:
            scopes, exports = _scopes(stack, directory, manifest, config, is_online, with_cold)
            throttle = stack.enter_context(pacing.throttle_copy("verify", rate, exports))
            reports = list(verify(scopes, throttle))
    problems += [problem for each in reports for problem in each.problems]
    _show(directory.path, problems, reports, is_online, as_json)
    if problems:
        return output.EXIT_DAMAGED
    return output.EXIT_BUSY if any(each.unread for each in reports) else output.EXIT_DONE


def manifest_of(directory: DataDir) -> tuple[list[Problem], Manifest | None]:
    """Read the manifest, or its copy if the manifest is damaged, and list the problems of both."""
    from gateway.supervise.manifest import Manifest, ManifestDamaged, ManifestUnknown
    from shard.offline.verify import Problem

    problems: list[Problem] = []
    manifests: list[Manifest] = []
    for path in (directory.manifest_path, directory.copy_path):
        try:
            manifests.append(Manifest.decode(path.read_bytes()))
        except FileNotFoundError:
            if path == directory.manifest_path:  # the next start of the server writes a missing copy
                problems.append(Problem(str(path), 0, "it is missing"))
        except ManifestDamaged as damage:
            is_copy = path == directory.copy_path
            problems.append(Problem(str(path), damage.offset, damage.reason, is_harmless=is_copy))
        except ManifestUnknown as unknown:
            problems.append(Problem(str(path), 0, str(unknown)))
    if not manifests:
        return problems, None
    missing = [name for name in manifests[0].directories if not (directory.path / name).is_dir()]
    problems += [Problem(str(directory.path / name), 0, "the folder is missing") for name in missing]
    return problems, manifests[0] if not missing else None


def verify(scopes: list[Scope], throttle: CopyThrottle) -> Iterator[VerifyResult]:
    """Verify one shard after the other."""
    from shard.offline.verify import bytes_to_read, verify_shard
    from shard.storage.files import ExaminedDisk

    disk = ExaminedDisk()
    throttle.expect(sum(bytes_to_read(disk, scope) for scope in scopes))
    for scope in scopes:
        yield verify_shard(disk, scope._replace(pause=throttle.pause))


def offline_scope(directory: DataDir, manifest: Manifest, shard: int, store: SegmentStore) -> Scope:
    from shard.offline.verify import Scope

    path = str(directory.path / manifest.directories[shard])
    return Scope(path, path, store, lambda slot: manifest.placement.slots[slot] == shard)


def _scopes(
    stack: ExitStack,
    directory: DataDir,
    manifest: Manifest,
    config: Config,
    is_online: bool,
    with_cold: bool,
) -> tuple[list[Scope], ShardExports | None]:
    from streams.cli.shardfolders import sockets_of, store_of
    from streams.cli.shardlinks import ShardExports

    paths = [directory.path / name for name in manifest.directories]
    if not is_online:
        offline_scopes = [
            offline_scope(directory, manifest, shard, store_of(path, config.cold_dir, manifest))._replace(
                with_cold=with_cold
            )
            for shard, path in enumerate(paths)
        ]
        return offline_scopes, None
    exports = stack.enter_context(ShardExports(sockets_of(directory, manifest), secrets.token_hex(8)))
    scopes = []
    for shard, (path, facts, server) in enumerate(zip(paths, exports.facts, exports.servers, strict=True)):
        scope = offline_scope(directory, manifest, shard, store_of(path, str(server["cold_dir"]), manifest))
        scopes.append(scope._replace(state=str(facts["folder"]), is_online=True, with_cold=with_cold))
    return scopes, exports


def _show(
    path: Path, problems: list[Problem], reports: list[VerifyResult], is_online: bool, as_json: bool
) -> None:
    totals = {
        "data_dir": str(path),
        "online": is_online,
        "shards": len(reports),
        "boxes": sum(each.boxes for each in reports),
        "records": sum(each.records for each in reports),
        "segments": sum(each.segments for each in reports),
        "segment_bytes": sum(each.bytes for each in reports),
    }
    unread = next((each.unread for each in reports if each.unread), "")
    is_for_people = output.is_for_people(as_json)
    if not is_for_people:
        details = {"unread": unread, "problems": [problem._asdict() for problem in problems]}
        output.print_line({**totals, **details})
    if unread:
        output.warn(
            f"the cold store could not be checked completely: {unread}. Repeat the command when it is "
            "reachable"
        )
    if problems:
        rows = [
            [each.path, str(each.offset), each.reason + (" (harmless)" if each.is_harmless else "")]
            for each in problems
        ]
        if is_for_people:
            output.print_table(("file", "byte", "problem"), rows)
        output.warn(
            "stop the server and run `streams repair`, which keeps the intact records and lists the lost "
            "ones, or restore a backup with `streams restore`"
        )
        return
    if unread or not is_for_people:
        return
    click.echo(
        f"{path} is intact: {totals['shards']} shards, {totals['boxes']} boxes, {totals['records']} records, "
        f"{totals['segments']} segments ({output.size(sum(each.bytes for each in reports))} read)"
    )
