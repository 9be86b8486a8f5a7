"""`streams verify`: look at every byte of a server's data, while it runs or not."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streams.cli import output, pacing
from streams.cli.backup import configured
from streams.cli.verbs import example

if TYPE_CHECKING:
    from gateway.supervise.data_dir import DataDir
    from gateway.supervise.manifest import Manifest
    from shard.offline.verify import Problem, Scope, Verified
    from shard.storage.segments.store import SegmentStore
    from streams.cli.pacing import Copying
    from streams.cli.shardlinks import Exported
    from streams.config import Config


@example("streams verify")
@click.command("verify")
@click.option("--data-dir", metavar="DIR", help="Data directory of the server. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="PLACE", help="Its cold store, if it is stopped. [STREAMS_COLD_DIR]")
@click.option("--cold", "with_cold", is_flag=True, help="Read what is in the cold store, too.")
@pacing.option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(data_dir: str | None, cold_dir: str | None, with_cold: bool, rate: int, as_json: bool) -> int:
    """Look at every byte of a server's data: checksums, orders, floors, indexes. Changes nothing.

    Exits with 0 if everything is whole, with 6 if something is damaged and with 3 if the cold store does not
    answer. Of a running server the newest log files are left out: they are being written.
    """
    from streams.cli.shardfolders import hold, open_directory

    config = configured(data_dir=data_dir, cold_dir=cold_dir)
    with ExitStack() as stack:
        directory = stack.enter_context(closing(open_directory(config.data_dir.absolute())))
        problems, manifest = manifest_of(directory)
        verified: list[Verified] = []
        is_online = not directory.try_lock()
        if not is_online:
            hold(directory, "streams verify")
        if manifest is not None:
            scopes, exported = _scopes(stack, directory, manifest, config, is_online, with_cold)
            copying = stack.enter_context(pacing.copying("verify", rate, exported))
            verified = list(verify(scopes, copying))
    problems += [problem for each in verified for problem in each.problems]
    _show(directory.path, problems, verified, is_online, as_json)
    if problems:
        return output.EXIT_DAMAGED
    return output.EXIT_BUSY if any(each.unread for each in verified) else output.EXIT_DONE


def manifest_of(directory: DataDir) -> tuple[list[Problem], Manifest | None]:
    """The manifest, or else its copy, and what is wrong with them."""
    from gateway.supervise.manifest import Manifest, ManifestDamaged, ManifestUnknown
    from shard.offline.verify import Problem

    problems: list[Problem] = []
    found: list[Manifest] = []
    for path in (directory.manifest_path, directory.copy_path):
        try:
            found.append(Manifest.decode(path.read_bytes()))
        except FileNotFoundError:
            if path == directory.manifest_path:  # a copy is made by the next start
                problems.append(Problem(str(path), 0, "it is missing"))
        except ManifestDamaged as damage:
            is_copy = path == directory.copy_path
            problems.append(Problem(str(path), damage.offset, damage.reason, is_harmless=is_copy))
        except ManifestUnknown as unknown:
            problems.append(Problem(str(path), 0, str(unknown)))
    if not found:
        return problems, None
    missing = [name for name in found[0].directories if not (directory.path / name).is_dir()]
    problems += [Problem(str(directory.path / name), 0, "the folder is missing") for name in missing]
    return problems, found[0] if not missing else None


def verify(scopes: list[Scope], copying: Copying) -> Iterator[Verified]:
    """Look at one shard after the other."""
    from shard.offline.verify import bytes_to_read, verify_shard
    from shard.storage.files import ExaminedDisk

    disk = ExaminedDisk()
    copying.expect(sum(bytes_to_read(disk, scope) for scope in scopes))
    for scope in scopes:
        yield verify_shard(disk, scope._replace(pause=copying.pause))


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
) -> tuple[list[Scope], Exported | None]:
    from streams.cli.shardfolders import sockets_of, store_of
    from streams.cli.shardlinks import Exported

    paths = [directory.path / name for name in manifest.directories]
    if not is_online:
        stopped = [
            offline_scope(directory, manifest, shard, store_of(path, config.cold_dir, manifest))._replace(
                with_cold=with_cold
            )
            for shard, path in enumerate(paths)
        ]
        return stopped, None
    exported = stack.enter_context(Exported(sockets_of(directory, manifest), secrets.token_hex(8)))
    scopes = []
    for shard, (path, facts, server) in enumerate(zip(paths, exported.facts, exported.servers, strict=True)):
        scope = offline_scope(directory, manifest, shard, store_of(path, str(server["cold_dir"]), manifest))
        scopes.append(scope._replace(state=str(facts["folder"]), is_online=True, with_cold=with_cold))
    return scopes, exported


def _show(
    path: Path, problems: list[Problem], verified: list[Verified], is_online: bool, as_json: bool
) -> None:
    totals = {
        "data_dir": str(path),
        "online": is_online,
        "shards": len(verified),
        "boxes": sum(each.boxes for each in verified),
        "records": sum(each.records for each in verified),
        "segments": sum(each.segments for each in verified),
        "segment_bytes": sum(each.bytes for each in verified),
    }
    unread = next((each.unread for each in verified if each.unread), "")
    is_for_people = output.is_for_people(as_json)
    if not is_for_people:
        found = {"unread": unread, "problems": [problem._asdict() for problem in problems]}
        output.print_line({**totals, **found})
    if unread:
        output.warn(
            f"the cold store was not looked at, or not all of it: {unread}. Repeat this when it answers"
        )
    if problems:
        rows = [
            [each.path, str(each.offset), each.reason + (" (harmless)" if each.is_harmless else "")]
            for each in problems
        ]
        if is_for_people:
            output.print_table(("file", "byte", "problem"), rows)
        output.warn(
            "stop the server and run `streams repair`, which keeps what is whole and tells what is lost; or "
            "put a backup in place with `streams restore`"
        )
        return
    if unread or not is_for_people:
        return
    click.echo(
        f"{path} is whole: {totals['shards']} shards, {totals['boxes']} boxes, {totals['records']} records, "
        f"{totals['segments']} segments ({output.size(sum(each.bytes for each in verified))} read)"
    )
