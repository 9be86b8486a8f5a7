"""`streams repair`: rebuild damaged shards without their damaged records, and report the losses."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output, pacing
from streams.cli.backup import load_config
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
@click.option("--cold-dir", metavar="LOCATION", help="Its cold store. [STREAMS_COLD_DIR]")
@click.option(
    "--cold/--no-cold",
    "with_cold",
    default=True,
    help="Also check the segments in the cold store (default), or skip them.",
)
@click.option("--yes", is_flag=True, help="Do not ask before damaged records are given up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(data_dir: str | None, cold_dir: str | None, with_cold: bool, yes: bool, as_json: bool) -> int:
    """Repair the damaged data of a stopped server.

    Damaged records are left out; no data is invented. Prints the lost seqs of each box: readers get a
    tombstone for them. The damaged files stay in damaged-TIME/ in the data directory. Damaged segments of the
    cold store are rewritten locally without the damaged records, and the server then deletes the old ones.
    """
    from gateway.supervise.data_dir import CannotServe, DataDir
    from streams.cli.shardfolders import describe_lock

    config = load_config(data_dir=data_dir, cold_dir=cold_dir)
    path = config.data_dir.absolute()
    if not path.is_dir():
        raise output.Refusal(f"{path} does not exist; name a data directory with --data-dir")
    if not any(path.glob("manifest*.json")) and not any(path.glob("shard-*")):
        raise output.Refusal(f"{path} is not a data directory; name one with --data-dir or STREAMS_DATA_DIR")
    try:
        with closing(DataDir(path)) as directory:
            if not directory.try_lock():
                raise output.BusyRefusal(f"{path} is in use by {directory.holder()}; stop that server first")
            describe_lock(directory, "streams repair")
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
        self._damaged_dir = directory.path / f"damaged-{moment}"

    def run(self) -> int:
        problems, manifest = manifest_of(self._directory)
        if manifest is None:
            reasons = "; ".join(f"{each.path}: {each.reason}" for each in problems)
            raise output.Refusal(
                f"no intact manifest names the shard folders ({reasons}). Put the missing files back, or "
                "restore a backup into another directory with `streams restore`"
            )
        if manifest.is_restoring:
            raise output.Refusal(
                "a restore into this directory did not finish; run `streams restore` again before a repair"
            )
        damaged_shards = self._find_damaged_shards(manifest)
        if not problems and not damaged_shards:
            return self._show_report(manifest, [], {}, "")
        candidates = self._targets(manifest, range(manifest.shards) if damaged_shards else ())
        for name in {*manifest.building, *candidates.values()} - set(manifest.directories):
            self._directory.remove(name)  # left by an interrupted repair
        intent = replace(manifest, building=tuple(candidates.values()))
        if problems:  # in the manifest or its copy; the intact one of the two is used
            self._keep_manifests()
        self._directory.commit(intent)
        try:
            repairs = self._build(intent, damaged_shards, candidates)
            if not self._confirm_losses(repairs):
                raise output.Refusal("cancelled; nothing was changed")
            if repairs:
                self._reconcile_shards(intent, repairs, candidates)
        except BaseException:
            self._directory.settle(intent)
            raise
        self._activate(intent, {shard: candidates[shard] for shard in repairs})
        return self._show_report(
            manifest, problems, repairs, str(self._damaged_dir) if self._damaged_dir.exists() else ""
        )

    def _find_damaged_shards(self, manifest: Manifest) -> list[int]:
        """Verify all shards and return the numbers of the damaged ones."""
        from streams.cli.shardfolders import store_of

        scopes = []
        for shard, name in enumerate(manifest.directories):
            store = store_of(self._directory.path / name, self._config.cold_dir, manifest)
            scope = offline_scope(self._directory, manifest, shard, store)
            scopes.append(scope._replace(with_cold=self._with_cold))
        damaged_shards = []
        with pacing.throttle_copy("verify", pacing.UNLIMITED, None) as throttle:
            for shard, report in enumerate(verify(scopes, throttle)):
                if report.unread:
                    raise output.BusyRefusal(
                        f"the cold store could not be checked completely: {report.unread}. Repeat the "
                        "command when it is reachable, or skip it with --no-cold"
                    )
                if report.problems:
                    damaged_shards.append(shard)
        return damaged_shards

    def _targets(self, manifest: Manifest, shards: Iterable[int]) -> dict[int, str]:
        from gateway.supervise.manifest import folder

        return {shard: folder(shard, manifest.placement.version + 1) for shard in shards}

    def _reconcile_shards(
        self, intent: Manifest, repairs: dict[int, RepairResult], candidates: dict[int, str]
    ) -> None:
        """Correct the references between shards that no longer match.

        An intact shard that needs a correction is rebuilt too, so that all changes take effect at once.
        """
        from shard.offline.repair import compare_shards
        from shard.offline.system_clock import now_ms
        from shard.storage.files import ExaminedDisk
        from shard.transfer.shard_folders import amend
        from streams.cli.shardfolders import store_of

        at_ms = now_ms()
        while True:
            folders = [
                self._directory.path / (candidates[shard] if shard in repairs else name)
                for shard, name in enumerate(intent.directories)
            ]
            differences, changes_by_shard = compare_shards(
                ExaminedDisk(),
                list(map(str, folders)),
                [store_of(folder, self._config.cold_dir, intent) for folder in folders],
                intent.placement.shard_of,
                now_ms=at_ms,
            )
            others = [
                shard for shard, changes in enumerate(changes_by_shard) if changes and shard not in repairs
            ]
            if not others:
                break
            repairs |= self._build(intent, others, candidates)
        for shard, changes in enumerate(changes_by_shard):
            if changes:
                amend(
                    ExaminedDisk(),
                    str(folders[shard]),
                    changes,
                    now_ms=at_ms,
                    file_bytes=self._config.wal_file_bytes,
                )
                repairs[shard].notes.append("its references to other shards were corrected")
        if differences.skipped_seqs:
            note = f"{differences.skipped_seqs} seqs are skipped: other boxes have copies of their records"
            repairs[min(repairs)].notes.append(note)
        if differences.missing_copies:
            note = f"{differences.missing_copies} copies are missing; readers see a tombstone"
            repairs[min(repairs)].notes.append(note)

    def _build(self, intent: Manifest, shards: list[int], targets: dict[int, str]) -> dict[int, RepairResult]:
        from shard.offline.repair import CannotRepair, repair_shard
        from shard.offline.system_clock import now_ms
        from shard.recovery.page_cache import page_cache_id
        from shard.storage.files import ExaminedDisk
        from streams.cli.shardfolders import cold_store

        repairs = {}
        for shard in shards:
            source = str(self._directory.path / intent.directories[shard])
            try:
                repairs[shard] = repair_shard(
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
        return repairs

    def _confirm_losses(self, repairs: dict[int, RepairResult]) -> bool:
        losses = [loss for each in repairs.values() for loss in each.losses]
        if self._yes or not losses:
            return True
        self._show_losses(repairs, to_stderr=not output.is_for_people(self._as_json))
        try:
            return click.confirm("These records are lost permanently. Continue?", err=True)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise output.Refusal("nothing was changed; add --yes to repair without these records") from None

    def _activate(self, intent: Manifest, targets: dict[int, str]) -> None:
        """Switch the manifest to the rebuilt folders, then move the damaged ones to damaged-TIME/."""
        placement = replace(intent.placement, version=intent.placement.version + bool(targets))
        names = [targets.get(shard, name) for shard, name in enumerate(intent.directories)]
        new = replace(intent, placement=placement, directories=tuple(names))
        self._directory.commit(new)
        for shard in targets:
            self._damaged_dir.mkdir(mode=0o700, exist_ok=True)
            old = intent.directories[shard]
            (self._directory.path / old).rename(self._damaged_dir / old)
        self._directory.settle(new)

    def _keep_manifests(self) -> None:
        self._damaged_dir.mkdir(mode=0o700, exist_ok=True)
        for path in (self._directory.manifest_path, self._directory.copy_path):
            if path.exists():
                (self._damaged_dir / path.name).write_bytes(path.read_bytes())

    # -- report

    def _show_losses(self, repairs: dict[int, RepairResult], *, to_stderr: bool = False) -> None:
        rows = [
            [loss.box or f"(generation {loss.generation})", f"{loss.first_seq}..{loss.last_seq}", loss.why]
            for each in repairs.values()
            for loss in each.losses
        ]
        output.print_table(("box", "lost seqs", "why"), rows, to_stderr=to_stderr)

    def _show_report(
        self,
        manifest: Manifest,
        problems: list[Problem],
        repairs: dict[int, RepairResult],
        damaged_dir: str,
    ) -> int:
        facts: dict[str, Any] = {
            "data_dir": str(self._directory.path),
            "manifest": [problem._asdict() for problem in problems],
            "shards": [
                {"shard": shard, "boxes": each.boxes, "records": each.records, "notes": each.notes}
                for shard, each in repairs.items()
            ],
            "losses": [
                {"shard": shard, **{name: getattr(loss, name) for name in loss.__struct_fields__}}
                for shard, each in repairs.items()
                for loss in each.losses
            ],
            "aside": damaged_dir,
        }
        if not output.is_for_people(self._as_json):
            output.print_line(facts)
            return output.EXIT_DONE
        if not repairs and not problems:
            unread = "" if self._with_cold else " (the cold store was not checked)"
            click.echo(f"{self._directory.path} is intact{unread}; nothing was changed")
            return output.EXIT_DONE
        for shard, each in repairs.items():
            for note in each.notes:
                click.echo(f"shard {shard}: {note}")
        for problem in problems:
            click.echo(f"{problem.path}: {problem.reason}; it was rewritten")
        if facts["losses"] and self._yes:
            self._show_losses(repairs)
        lost_seqs = sum(loss["last_seq"] - loss["first_seq"] + 1 for loss in facts["losses"])
        click.echo(
            f"{Path(facts['data_dir'])} is repaired; {lost_seqs} seqs are lost. The damaged files are in "
            f"{damaged_dir}"
        )
        return output.EXIT_DONE
