"""`streams repair`: make damaged data whole again: leave out what is damaged, and tell what that was."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output, pacing
from streams.cli.backup import configured
from streams.cli.verbs import example
from streams.cli.verify import manifest_of, offline_scope, verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.supervise.data_dir import DataDir
    from gateway.supervise.manifest import Manifest
    from shard.offline.repair import RepairResult
    from shard.offline.verify import Problem
    from streams.config import Config


@example("streams repair --data-dir restored --yes")
@click.command("repair")
@click.option("--data-dir", metavar="DIR", help="Data directory of the server. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="PLACE", help="Its cold store. [STREAMS_COLD_DIR]")
@click.option(
    "--cold/--no-cold",
    "with_cold",
    default=True,
    help="Read what is in the cold store, too, or leave it out.",
)
@click.option("--yes", is_flag=True, help="Do not ask before what is lost is given up.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(data_dir: str | None, cold_dir: str | None, with_cold: bool, yes: bool, as_json: bool) -> int:
    """Make damaged data of a stopped server whole again.

    What is damaged is left out, nothing is made up. Prints which seqs of which boxes are lost: readers get a
    tombstone for them. The damaged files are kept in damaged-TIME/ in the data directory. What is damaged in
    the cold store is written anew without it, here, and the server drops it there.
    """
    from gateway.supervise.data_dir import CannotServe, DataDir
    from streams.cli.shardfolders import hold

    config = configured(data_dir=data_dir, cold_dir=cold_dir)
    path = config.data_dir.absolute()
    if not path.is_dir():
        raise output.Refusal(f"{path} is not there; name a data directory with --data-dir")
    if not any(path.glob("manifest*.json")) and not any(path.glob("shard-*")):
        raise output.Refusal(
            f"{path} is not a data directory of a server; name one with --data-dir or STREAMS_DATA_DIR"
        )
    try:
        with closing(DataDir(path)) as directory:
            if not directory.try_lock():
                raise output.Occupied(f"{path} is in use by {directory.holder()}; stop that server first")
            hold(directory, "streams repair")
            return _Repair(directory, config, with_cold=with_cold, yes=yes, as_json=as_json).run()
    except CannotServe as error:
        raise output.Refusal(str(error)) from error


class _Repair:
    def __init__(
        self, directory: DataDir, config: Config, *, with_cold: bool, yes: bool, as_json: bool
    ) -> None:
        self._directory = directory
        self._config = config
        self._with_cold = with_cold
        self._yes = yes
        self._as_json = as_json
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._aside = directory.path / f"damaged-{moment}"

    def run(self) -> int:
        problems, manifest = manifest_of(self._directory)
        if manifest is None:
            listed = "; ".join(f"{each.path}: {each.reason}" for each in problems)
            raise output.Refusal(
                f"it cannot be told which folders are the server's ({listed}). Put what is missing back, or "
                "restore a backup into another directory with `streams restore`"
            )
        if manifest.is_restoring:
            raise output.Refusal("a restore into this directory did not end; run `streams restore` again")
        damaged = self._damaged(manifest)
        if not problems and not damaged:
            return self._tell(manifest, [], {}, "")
        candidates = self._targets(manifest, range(manifest.shards) if damaged else ())
        for name in {*manifest.building, *candidates.values()} - set(manifest.directories):
            self._directory.remove(name)  # of an earlier try that was cut short
        intent = replace(manifest, building=tuple(candidates.values()))
        if problems:  # of the manifest or its copy: one of the two is whole, and that counts
            self._keep_manifests()
        self._directory.commit(intent)
        try:
            repaired = self._build(intent, damaged, candidates)
            if not self._agreed(repaired):
                raise output.Refusal("nothing was changed")
            if repaired:
                self._make_agree(intent, repaired, candidates)
        except BaseException:
            self._directory.settle(intent)
            raise
        self._put_in_force(intent, {shard: candidates[shard] for shard in repaired})
        return self._tell(manifest, problems, repaired, str(self._aside) if self._aside.exists() else "")

    def _damaged(self, manifest: Manifest) -> list[int]:
        """Shards with which something is wrong."""
        from streams.cli.shardfolders import store_of

        scopes = []
        for shard, name in enumerate(manifest.directories):
            store = store_of(self._directory.path / name, self._config.cold_dir, manifest)
            scope = offline_scope(self._directory, manifest, shard, store)
            scopes.append(scope._replace(with_cold=self._with_cold))
        found = []
        with pacing.copying("looking", pacing.UNLIMITED, None) as copying:
            for shard, looked in enumerate(verify(scopes, copying)):
                if looked.unread:
                    raise output.Occupied(
                        f"the cold store was not looked at, or not all of it: {looked.unread}. Repeat this "
                        "when it answers, or leave it out with --no-cold"
                    )
                if looked.problems:
                    found.append(shard)
        return found

    def _targets(self, manifest: Manifest, shards: Iterable[int]) -> dict[int, str]:
        from gateway.supervise.manifest import folder

        return {shard: folder(shard, manifest.placement.version + 1) for shard in shards}

    def _make_agree(
        self, intent: Manifest, repaired: dict[int, RepairResult], candidates: dict[int, str]
    ) -> None:
        """Corrects what the shards do not agree about any more. A whole one is built anew for that, so that
        all of it counts at once."""
        from shard.offline.clock import now_ms
        from shard.offline.repair import compare_shards
        from shard.storage.files import ExaminedDisk
        from shard.transfer.boxes import amend
        from streams.cli.shardfolders import store_of

        at_ms = now_ms()
        while True:
            folders = [
                self._directory.path / (candidates[shard] if shard in repaired else name)
                for shard, name in enumerate(intent.directories)
            ]
            found, made = compare_shards(
                ExaminedDisk(),
                list(map(str, folders)),
                [store_of(folder, self._config.cold_dir, intent) for folder in folders],
                intent.placement.shard_of,
                now_ms=at_ms,
            )
            others = [shard for shard, mine in enumerate(made) if mine and shard not in repaired]
            if not others:
                break
            repaired |= self._build(intent, others, candidates)
        for shard, mine in enumerate(made):
            if mine:
                amend(
                    ExaminedDisk(),
                    str(folders[shard]),
                    mine,
                    now_ms=at_ms,
                    file_bytes=self._config.wal_file_bytes,
                )
                repaired[shard].notes.append("it was made to agree with the other shards")
        if found.skipped_seqs:
            note = f"{found.skipped_seqs} seqs that other boxes have copies of are not given again"
            repaired[min(repaired)].notes.append(note)
        if found.missing_copies:
            note = f"{found.missing_copies} copies are missing; readers get a tombstone"
            repaired[min(repaired)].notes.append(note)

    def _build(
        self, intent: Manifest, damaged: list[int], targets: dict[int, str]
    ) -> dict[int, RepairResult]:
        from shard.offline.clock import now_ms
        from shard.offline.repair import CannotRepair, repair_shard
        from shard.recovery.page_cache import page_cache_id
        from shard.storage.files import ExaminedDisk
        from streams.cli.shardfolders import cold_store

        repaired = {}
        for shard in damaged:
            source = str(self._directory.path / intent.directories[shard])
            try:
                repaired[shard] = repair_shard(
                    ExaminedDisk(),
                    source,
                    str(self._directory.path / targets[shard]),
                    shard=shard,
                    boot_id=page_cache_id(source),
                    now_ms=now_ms(),
                    cold=cold_store(self._config.cold_dir),
                    verifies_cold=self._with_cold,
                    server=intent.server,
                    file_bytes=self._config.wal_file_bytes,
                )
            except CannotRepair as error:
                raise output.Refusal(
                    f"{source} cannot be repaired: {error}. Restore a backup with `streams restore`"
                ) from error
        return repaired

    def _agreed(self, repaired: dict[int, RepairResult]) -> bool:
        losses = [loss for each in repaired.values() for loss in each.losses]
        if self._yes or not losses:
            return True
        self._show_losses(repaired, is_talk=not output.is_for_people(self._as_json))
        try:
            return click.confirm("These records are lost for good. Go on?", err=True)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise output.Refusal("nothing was changed; add --yes to give these records up") from None

    def _put_in_force(self, intent: Manifest, targets: dict[int, str]) -> None:
        """The new folders count; then the damaged ones go aside."""
        placement = replace(intent.placement, version=intent.placement.version + bool(targets))
        names = [targets.get(shard, name) for shard, name in enumerate(intent.directories)]
        new = replace(intent, placement=placement, directories=tuple(names))
        self._directory.commit(new)
        for shard in targets:
            self._aside.mkdir(mode=0o700, exist_ok=True)
            old = intent.directories[shard]
            (self._directory.path / old).rename(self._aside / old)
        self._directory.settle(new)

    def _keep_manifests(self) -> None:
        self._aside.mkdir(mode=0o700, exist_ok=True)
        for path in (self._directory.manifest_path, self._directory.copy_path):
            if path.exists():
                (self._aside / path.name).write_bytes(path.read_bytes())

    # -- telling

    def _show_losses(self, repaired: dict[int, RepairResult], *, is_talk: bool = False) -> None:
        rows = [
            [loss.box or f"(generation {loss.generation})", f"{loss.first_seq}..{loss.last_seq}", loss.why]
            for each in repaired.values()
            for loss in each.losses
        ]
        output.print_table(("box", "lost seqs", "why"), rows, is_talk=is_talk)

    def _tell(
        self,
        manifest: Manifest,
        problems: list[Problem],
        repaired: dict[int, RepairResult],
        aside: str,
    ) -> int:
        facts: dict[str, Any] = {
            "data_dir": str(self._directory.path),
            "manifest": [problem._asdict() for problem in problems],
            "shards": [
                {"shard": shard, "boxes": each.boxes, "records": each.records, "notes": each.notes}
                for shard, each in repaired.items()
            ],
            "losses": [
                {"shard": shard, **{name: getattr(loss, name) for name in loss.__struct_fields__}}
                for shard, each in repaired.items()
                for loss in each.losses
            ],
            "aside": aside,
        }
        if not output.is_for_people(self._as_json):
            output.print_line(facts)
            return output.EXIT_DONE
        if not repaired and not problems:
            unread = "" if self._with_cold else " (the cold store was not looked at)"
            click.echo(f"{self._directory.path} is whole{unread}; nothing was changed")
            return output.EXIT_DONE
        for shard, each in repaired.items():
            for note in each.notes:
                click.echo(f"shard {shard}: {note}")
        for problem in problems:
            click.echo(f"{problem.path}: {problem.reason}; it was written anew")
        if facts["losses"] and self._yes:
            self._show_losses(repaired)
        lost = sum(loss["last_seq"] - loss["first_seq"] + 1 for loss in facts["losses"])
        click.echo(
            f"{Path(facts['data_dir'])} is whole now; {lost} seqs are lost. The damaged files are in {aside}"
        )
        return output.EXIT_DONE
