"""Goal: after a repair the server drops the copies in the cold store that nothing names, and no other copy.

Method: real folders with a folder as the cold store. After the repair, the sweep of the next server runs.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shard.offline.repair import repair_shard
from shard.storage.cold import FolderCold
from shard.storage.files import Disk
from shard.storage.salvage import salvage
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.wal import Frame
from shard.transfer.shard_folders import read_shard
from tests.support.folders import write_folder
from tests.support.machines import Driver

DISK = Disk()


class Unlinked(Disk):
    """A file system without hard links."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def store_of(folder: Path, cold: Path) -> SegmentStore:
    return SegmentStore(DISK, f"{folder}/segments", FolderCold(str(cold), DISK), server="7")


def filled(tmp_path: Path, *, snapshots: tuple[float, ...] = (1.0,)) -> tuple[Path, Path]:
    """A box with the segments 1..2, 3..4 and 5..6 (serials 1, 2 and 3), each of two batches and in the cold
    store."""
    driver = Driver()
    driver.put(durability="fsync")
    for number in range(1, 7):
        driver.append(f"record {number}")
        if number % 2 == 0:
            driver.seal()
    driver.stop()
    shard, cold = tmp_path / "shard", tmp_path / "cold"
    cold.mkdir()
    write_folder(DISK, str(shard), driver, snapshots=snapshots)
    move_all(shard, cold)
    return shard, cold


def move_all(shard: Path, cold: Path) -> None:
    store = store_of(shard, cold)
    for segment in read_shard(DISK, str(shard)).segments():
        store.copy_to_cold(Name.of(segment))
        store.remove_local(Name.of(segment))


def copy_of(cold: Path, serial: int) -> Path:
    (path,) = cold.glob(f"segments-7/*/*-{serial:012d}.seg")
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def lose(path: Path, *numbers: int) -> None:
    for number in numbers:
        flip(path, path.read_bytes().index(f"record {number}".encode()))


def repaired(shard: Path, cold: Path, disk: Disk = DISK) -> tuple[list[tuple[int, int]], Path]:
    target = shard.with_name("new")
    done = repair_shard(
        disk,
        str(shard),
        str(target),
        shard=0,
        boot_id="boot",
        now_ms=5_000,
        cold=FolderCold(str(cold), disk),
        verifies_cold=True,
        server="7",
    )
    return [(loss.first_seq, loss.last_seq) for loss in done.losses], target


def swept(shard: Path, cold: Path) -> list[int]:
    """The first seqs of the copies that are left when a server has swept."""
    named = {Name.of(segment) for segment in read_shard(DISK, str(shard)).segments()}
    store_of(shard, cold).remove_unnamed(named)
    return sorted(int(path.name.partition("-")[0]) for path in cold.glob("segments-7/*/*.seg"))


@pytest.mark.parametrize("snapshots", [(), (1.0,)])
def test_the_copy_of_a_segment_of_which_nothing_is_whole_is_dropped(
    tmp_path: Path, snapshots: tuple[float, ...]
) -> None:
    shard, cold = filled(tmp_path, snapshots=snapshots)
    lose(copy_of(cold, 2), 3, 4)
    losses, new = repaired(shard, cold)
    assert losses == [(3, 3), (4, 4)]
    assert swept(new, cold) == [1, 5]


@pytest.mark.parametrize("disk", [DISK, Unlinked()], ids=["links", "no links"])
def test_a_copy_whose_index_and_whose_stub_are_damaged_is_dropped(tmp_path: Path, disk: Disk) -> None:
    shard, cold = filled(tmp_path)
    copy = copy_of(cold, 2)
    flip(copy, copy.stat().st_size - 20)
    (stub,) = shard.glob(f"segments/*/{copy.stem}.stub")
    flip(stub, 100)
    losses, new = repaired(shard, cold, disk)
    assert losses == [(3, 4)]
    assert swept(new, cold) == [1, 5]


def test_copies_that_waited_to_be_dropped_are_dropped_after_a_repair(tmp_path: Path) -> None:
    shard, cold = filled(tmp_path)
    # One has the next number of the box, the other is of a box that was deleted.
    (stub,) = shard.glob("segments/*/*-000000000003.stub")
    copy = copy_of(cold, 3)
    unnamed = f"{3:020d}-{4:012d}"
    (shard / "segments" / "99").mkdir()
    (cold / "segments-7" / "99").mkdir()
    for folder in (stub.parent, shard / "segments" / "99"):
        (folder / f"{unnamed}.stub").write_bytes(stub.read_bytes())
    for folder in (copy.parent, cold / "segments-7" / "99"):
        (folder / f"{unnamed}.seg").write_bytes(copy.read_bytes())
    lose(copy_of(cold, 2), 4)
    losses, new = repaired(shard, cold)
    assert losses == [(4, 4)]
    (anew,) = new.glob("segments/*/*.seg")
    assert anew.stem == f"{3:020d}-{5:012d}", "it has a number that no copy has"
    assert swept(new, cold) == [1, 5]


def test_a_repair_with_the_wrong_cold_store_costs_no_copy_in_the_right_one(tmp_path: Path) -> None:
    shard, cold = filled(tmp_path)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    losses, new = repaired(shard, wrong)
    assert len(losses) == 6
    assert swept(new, cold) == [1, 3, 5]


def test_a_stub_that_a_damaged_log_may_have_named_costs_no_copy(tmp_path: Path) -> None:
    shard, cold = filled(tmp_path, snapshots=())
    (log, *_) = sorted(shard.glob("wal/*.wal"))
    created = next(frame for frame in salvage(DISK, f"{shard}/wal") if isinstance(frame, Frame))
    content = bytearray(log.read_bytes())
    content[created.offset + 24 : created.offset + 40] = bytes(16)
    log.write_bytes(bytes(content))
    losses, new = repaired(shard, cold)
    assert losses and not read_shard(DISK, str(new)).boxes, "the box is gone with the frame that created it"
    assert swept(new, cold) == [1, 3, 5]
