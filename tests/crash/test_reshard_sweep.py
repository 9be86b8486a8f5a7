"""Goal: a move of all boxes to other shards that is cut short at any operation of the disk loses nothing and
doubles nothing: the old folders are as they were, and a repeated run has the same result.

Method: two old shards with random histories on the fault disk; the move is stopped before, midway and after
an operation, by a kill or a power cut. Then what a start would do is done: what the attempt left is removed,
and the boxes are moved again. All points with STREAMS_SWEEP=full, a sample otherwise.
"""

from __future__ import annotations

import errno
import random
from functools import cache
from typing import Any

import pytest

from shard.core.machine import Machine
from shard.offline.reshard import ReshardPlan, reshard
from shard.storage.files import remove_tree
from streams.protocol.model.slots import SLOTS
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep
from tests.support.folders import FILE_BYTES, all_contents, write_folder
from tests.support.machines import Driver, random_history

SEEDS = range(3)
OLD, NEW = ["/data/old-0", "/data/old-1"], ["/data/new-0", "/data/new-1", "/data/new-2"]
PLAN = ReshardPlan(
    data_dir="/data",
    sources=["old-0", "old-1"],
    targets=["new-0", "new-1", "new-2"],
    slots=[(SLOTS * at // 3, SLOTS * (at + 1) // 3, at) for at in range(3)],
    old_slots=[(0, SLOTS // 2, 0), (SLOTS // 2, SLOTS, 1)],
    wal_file_bytes=FILE_BYTES,
)


@cache
def before(seed: int) -> tuple[FaultDisk, dict[str, Any]]:
    """Two shards that were stopped in order, and what is in them."""
    disk = FaultDisk("/data")
    first = random_history(seed, 60)
    first.stop()
    write_folder(disk, OLD[0], first, snapshots=(0.5,))
    second = Driver(Machine(shard=1))
    for box in "defg":
        second.append(*"xyz", box=box)
        second.seal(box)
        second.append("tail", box=box)
    second.stop()
    write_folder(disk, OLD[1], second)
    disk.fsync_dir("/data")
    return disk, all_contents(disk.kill(), OLD)


def attempt(disk: FaultDisk) -> None:
    reshard(disk, PLAN, boot_id="boot", now_ms=1_000_000)


@cache
def operations_of(seed: int) -> int:
    disk = before(seed)[0].kill()
    attempt(disk)
    return disk.operations


def every_point() -> list[tuple[int, int, str]]:
    return [(seed, at, moment) for seed in SEEDS for at in range(operations_of(seed)) for moment in MOMENTS]


def start_again(disk: FaultDisk) -> None:
    for path in NEW:
        remove_tree(disk, path)
    attempt(disk)


def test_a_move_stopped_at_any_operation_harms_nothing_and_can_be_done_again() -> None:
    for seed, at, moment in sweep(every_point(), seed=31, sample=60):
        rng = random.Random(f"{seed} {at} {moment}")
        original, expected = before(seed)
        disk = original.kill()
        disk.crash_at(at, moment)
        with pytest.raises(Crashed):
            attempt(disk)
        found = disk.kill() if rng.random() < 0.3 else disk.crash(rng)
        assert all_contents(found, OLD) == expected, "the old folders are only read"
        start_again(found)
        assert all_contents(found, NEW) == expected
        assert all_contents(found.crash(rng), NEW) == expected, "what was built is durable"


def test_what_was_built_is_durable_when_the_move_returns() -> None:
    for seed in SEEDS:
        original, expected = before(seed)
        for number in range(5):
            disk = original.kill()
            attempt(disk)
            after = disk.crash(random.Random(number))
            assert all_contents(after, NEW) == expected == all_contents(after, OLD)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_any_operation_fails_the_move_and_nothing_else(code: int) -> None:
    points = [(seed, at) for seed in SEEDS for at in range(operations_of(seed))]
    for seed, at in sweep(points, seed=32, sample=30):
        original, expected = before(seed)
        disk = original.kill()
        disk.fail_at(at, OSError(code, "failed"))
        with pytest.raises(OSError, match="failed"):
            attempt(disk)
        assert all_contents(disk, OLD) == expected
        start_again(disk)
        assert all_contents(disk, NEW) == expected
