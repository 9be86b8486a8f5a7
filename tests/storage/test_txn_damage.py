"""Goal: `streams repair` brings back what a transaction wrote as long as either the rows that were put or the
batches that they became are whole, and says what it cannot know.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.offline.repair import RepairResult, repair_shard
from shard.storage.segments.store import SegmentStore
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import parts_of, read_shard
from streams.protocol.messages import bulk
from streams.protocol.payloads.packed import pack
from tests.support.faultdisk import FaultDisk
from tests.support.folders import FILE_BYTES, contents_of, write_folder
from tests.support.machines import Driver, put_of

ONE, NEW = "/data/one", "/data/new"
HELD, COMMITTED, KEPT = 50, 51, 15
T1 = bulk.Txn("w", 1, "q")


def history() -> Driver:
    driver = Driver()
    driver.start("boot")
    driver.put("a", durability="fsync")
    driver.append(0, box="a")
    for chunk in range(2):
        packed = pack(["a", "b"], [1, 1], [b'["unique-a",%d]' % chunk, b'["unique-b",%d]' % chunk])
        driver.ask(put_of(T1, "p", chunk, packed))
    driver.ask(bulk.TxnCommit(T1, [("p", 2)]))
    driver.append(9, box="a")
    driver.stop()
    return driver


def damaged(driver: Driver, *lsns: int, snapshots: tuple[float, ...] = ()) -> FaultDisk:
    """The folder of this history with a byte changed in each of these frames."""
    disk = FaultDisk("/data")
    write_folder(disk, ONE, driver, snapshots=snapshots)
    for lsn in lsns:
        content = driver.log[lsn - 1].content
        for name in disk.listdir(f"{ONE}/wal"):
            path = f"{ONE}/wal/{name}"
            descriptor = disk.open(path, writable=False)
            whole = disk.pread(descriptor, disk.size(path), 0)
            disk.close(descriptor)
            if content in whole:
                disk.flip(path, whole.index(content) + len(content) - 3, 255)
    return disk


def repaired(disk: FaultDisk) -> tuple[RepairResult, dict[str, Any], Any]:
    found = repair_shard(disk, ONE, NEW, shard=0, boot_id="boot", now_ms=10**6, file_bytes=FILE_BYTES)
    machine = read_shard(disk, NEW)
    return found, contents_of(machine, SegmentStore(disk, f"{NEW}/segments")), machine.txns.marks


def lsns_of(driver: Driver, kind: int) -> list[int]:
    return [frame.lsn for frame in driver.log if frame.kind == kind]


@pytest.mark.parametrize("kind", [HELD, KEPT])
@pytest.mark.parametrize("at", [0, 1])
def test_rows_or_batches_are_enough(kind: int, at: int) -> None:
    driver = history()
    _, expected, marks = repaired(damaged(driver))
    found, contents, found_marks = repaired(damaged(driver, lsns_of(driver, kind)[at]))
    assert {name: box["live"] for name, box in contents.items()} == {
        name: box["live"] for name, box in expected.items()
    }
    assert [mark.epoch for mark in found_marks["w"]] == [mark.epoch for mark in marks["w"]] == [1]
    assert found.notes


def test_without_the_commit_itself_the_batches_are_kept_and_the_mark_is_not_known() -> None:
    driver = history()
    _, expected, _ = repaired(damaged(driver))
    _, contents, marks = repaired(damaged(driver, *lsns_of(driver, COMMITTED)))
    assert {name: box["live"] for name, box in contents.items()} == {
        name: box["live"] for name, box in expected.items()
    }
    assert "w" not in marks


def test_a_chunk_that_a_snapshot_names_and_that_is_damaged_is_missed_by_its_commit_alone() -> None:
    driver = history()
    first, second = lsns_of(driver, HELD)
    part = second / len(driver.log)
    found, contents, _ = repaired(damaged(driver, first, snapshots=(part,)))
    assert len(contents["b"]["live"]) == 2
    assert found.losses == []


def test_marks_go_into_an_export_and_what_is_held_does_not() -> None:
    driver = history()
    driver = driver.reborn()
    driver.start("boot")
    driver.ask(put_of(bulk.Txn("w", 2, "q"), "p", 0, pack(["b"], [1], [b"1"])))
    disk = FaultDisk("/data")
    assert driver.machine.snapshot().held
    parts = parts_of(driver.machine)
    write_export(disk, NEW, parts, now_ms=10**6, file_bytes=FILE_BYTES)
    machine = read_shard(disk, NEW, open_segment=SegmentStore(disk, f"{ONE}/segments").open)
    assert [mark.epoch for mark in machine.txns.marks["w"]] == [1]
    assert not machine.txns.epochs and machine.snapshot().needs_lsn <= machine.lsn + 1
