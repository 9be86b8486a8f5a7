"""Goal: a backup that is cut short at any operation of the disk is none, and harms neither the server's data
nor the backups before it; the next one is whole.

Method: two backups into a folder on the fault disk, the second stopped before, midway and after an operation
by a kill or a power cut; then a third. The same for pruning, and for a restore that is done again.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from shard.offline.restore import RestoreJob, scratch_of
from shard.storage.cold import FolderCold
from shard.storage.files import remove_tree
from shard.storage.segments.store import SegmentStore
from shard.transfer.backup import BackupStore, ShardSource
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import end_life, parts_of, read_shard
from streams.protocol.model.slots import SLOTS
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep
from tests.support.folders import FILE_BYTES, all_contents, contents, write_folder
from tests.support.machines import Driver, random_history

SEEDS = range(2)
FOLDERS = ["/data/back-0", "/data/back-1"]


def target_of(disk: FaultDisk) -> BackupStore:
    return BackupStore(FolderCold("/data/target", disk), disk)


def back_up(disk: FaultDisk, taken_ms: int) -> str:
    """As `streams backup` does with a stopped server."""
    machine = read_shard(disk, "/data/one")
    end_life(machine, boot_id="boot", now_ms=max(taken_ms, machine.last_ms))
    remove_tree(disk, "/data/one/export")
    write_export(disk, "/data/one/export", parts_of(machine), now_ms=taken_ms, file_bytes=FILE_BYTES)
    source = ShardSource("/data/one/export", SegmentStore(disk, "/data/one/segments"), taken_ms)
    return target_of(disk).take([source], [(0, SLOTS, 0)]).backup.id


def restore(disk: FaultDisk, id: str) -> None:
    for path in (*FOLDERS, f"/data/{scratch_of(0)}"):
        remove_tree(disk, path)
    target = target_of(disk)
    RestoreJob(
        disk,
        target,
        target.load(id),
        data_dir="/data",
        folders=["back-0", "back-1"],
        slots=[slot * 2 // SLOTS for slot in range(SLOTS)],
        file_bytes=FILE_BYTES,
        boot_id="boot",
        now_ms=1_000_000,
    ).run()


@cache
def before(seed: int) -> tuple[FaultDisk, str, dict[str, Any], dict[str, Any]]:
    """A server, a backup of it, and more written since: (disk, the backup, what was then, what is now)."""
    disk = FaultDisk("/data")
    disk.mkdir("/data/target")
    driver = random_history(seed, 50)
    driver.stop()
    write_folder(disk, "/data/one", driver)
    id = back_up(disk, 1_000)
    then = contents(disk, "/data/one")
    go_on(driver)
    remove_tree(disk, "/data/one")
    write_folder(disk, "/data/one", driver)
    disk.fsync_dir("/data")
    return disk, id, then, contents(disk.kill(), "/data/one")


def go_on(driver: Driver) -> None:
    driver.start("boot")
    for box in "de":
        driver.append(*"xyz", box=box)
        driver.seal(box)
        driver.append("tail", box=box)
    driver.stop()


def every_point(operations: dict[int, int]) -> list[tuple[int, int, str]]:
    return [(seed, at, moment) for seed in SEEDS for at in range(operations[seed]) for moment in MOMENTS]


def after_crash(disk: FaultDisk, rng: random.Random) -> FaultDisk:
    return disk.kill() if rng.random() < 0.3 else disk.crash(rng)


def check(disk: FaultDisk, id: str, expected: dict[str, Any]) -> None:
    restore(disk, id)
    assert all_contents(disk, FOLDERS) == expected


def test_a_backup_stopped_at_any_operation_is_none_or_whole() -> None:
    operations = {}
    for seed in SEEDS:
        disk = before(seed)[0].kill()
        back_up(disk, 2_000)
        operations[seed] = disk.operations
    for seed, at, moment in sweep(every_point(operations), seed=41, sample=40):
        rng = random.Random(f"{seed} {at} {moment}")
        original, first, then, now = before(seed)
        disk = original.kill()
        disk.crash_at(at, moment)
        with pytest.raises(Crashed):
            back_up(disk, 2_000)
        disk = after_crash(disk, rng)
        assert contents(disk, "/data/one") == now, "the server's data is only read"
        ids = target_of(disk).ids()
        assert ids[0] == first and len(ids) <= 2
        check(disk, first, then)
        if len(ids) == 2:
            check(disk, ids[1], now)
        third = back_up(disk, 3_000)
        check(disk.crash(rng), third, now)


def test_pruning_stopped_at_any_operation_harms_no_backup_that_is_kept() -> None:
    operations = {}
    for seed in SEEDS:
        disk = before(seed)[0].kill()
        back_up(disk, 2_000)
        start = disk.operations
        target_of(disk).prune(1)
        operations[seed] = disk.operations - start
    for seed, at, moment in sweep(every_point(operations), seed=42, sample=20):
        rng = random.Random(f"{seed} {at} {moment}")
        original, first, then, now = before(seed)
        disk = original.kill()
        second = back_up(disk, 2_000)
        disk.crash_at(disk.operations + at, moment)
        with pytest.raises(Crashed):
            target_of(disk).prune(1)
        disk = after_crash(disk, rng)
        ids = target_of(disk).ids()
        assert ids[-1] == second
        check(disk, second, now)
        if ids[0] == first:
            check(disk, first, then)
        target_of(disk).prune(1)
        assert target_of(disk).ids() == [second]
        check(disk.crash(rng), second, now)


def test_a_restore_stopped_at_any_operation_can_be_done_again() -> None:
    operations = {}
    for seed in SEEDS:
        disk, first, _, _ = before(seed)
        disk = disk.kill()
        restore(disk, first)
        operations[seed] = disk.operations
    for seed, at, moment in sweep(every_point(operations), seed=43, sample=30):
        rng = random.Random(f"{seed} {at} {moment}")
        original, first, then, _ = before(seed)
        disk = original.kill()
        disk.crash_at(at, moment)
        with pytest.raises(Crashed):
            restore(disk, first)
        disk = after_crash(disk, rng)
        restore(disk, first)
        assert all_contents(disk.crash(rng), FOLDERS) == then, "what was restored is durable"
