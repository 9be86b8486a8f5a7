"""Goal: through real log files and snapshots, recovery rebuilds the state of the live machine.

Method: random histories are written with `Wal` and `Snapshots` (small files, so that they rotate) and
recovered by `shard.recovery.recovery.recover`, on the disk of this machine and on the fault disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shard.core.machine import Machine
from shard.core.snapshot_facts import ShardState
from shard.recovery.recovery import RecoveryProgress, RecoverySummary, recover
from shard.storage import frames
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import HEADER_BYTES, Wal
from tests.support import machines
from tests.support.faultdisk import FaultDisk
from tests.support.machines import Driver, Frame, facts_of, random_history, recovered

FILE_BYTES = HEADER_BYTES + 4_000


@pytest.fixture(params=["disk", "faultdisk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DiskLike, str]:
    return (Disk(), str(tmp_path)) if request.param == "disk" else (FaultDisk(), "/data")


def written(place: tuple[DiskLike, str], log: list[Frame]) -> None:
    disk, root = place
    wal = Wal(disk, f"{root}/wal", file_bytes=FILE_BYTES)
    for _ in wal.scan():
        pass
    wal.settle()
    machines.SHELF.store(disk, f"{root}/segments")
    for at in range(0, len(log), 7):
        wal.append([(kind, version, lsn, (content,)) for kind, version, lsn, content in log[at : at + 7]])
        wal.sync()
    wal.close()


def found(place: tuple[DiskLike, str]) -> tuple[Machine, RecoverySummary]:
    disk, root = place
    machine = Machine()
    wal = Wal(disk, f"{root}/wal", file_bytes=FILE_BYTES)
    *steps, last = recover(
        machine, wal, Snapshots(disk, f"{root}/snapshot"), SegmentStore(disk, f"{root}/segments").open
    )
    assert all(isinstance(step, RecoveryProgress) and 0 <= step.ratio <= 1 for step in steps)
    assert isinstance(last, RecoverySummary)
    wal.close()
    machine.check()
    return machine, last


@pytest.mark.parametrize("seed", range(4))
def test_a_log_alone_brings_everything_back(place: tuple[DiskLike, str], seed: int) -> None:
    driver = random_history(seed, 120)
    written(place, driver.log)
    machine, report = found(place)
    assert facts_of(machine) == facts_of(driver.machine)
    assert (report.snapshot_lsn, report.last_lsn) == (0, len(driver.log))


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_and_the_rest_of_the_log_bring_everything_back(
    place: tuple[DiskLike, str], seed: int
) -> None:
    driver = random_history(100 + seed, 120)
    written(place, driver.log)
    middle = len(driver.log) // 2
    state = recovered(driver.log[:middle]).snapshot()
    disk, root = place
    Snapshots(disk, f"{root}/snapshot").write(state.lsn, frames.encode_state(state))
    machine, report = found(place)
    assert facts_of(machine) == facts_of(driver.machine)
    assert (report.snapshot_lsn, report.frames_applied) == (middle, len(driver.log) - middle)


def snapshotted(place: tuple[DiskLike, str], driver: Driver) -> tuple[ShardState, Wal]:
    """Writes the log and a snapshot at its end; the log is open."""
    written(place, driver.log)
    state = driver.machine.snapshot()
    disk, root = place
    Snapshots(disk, f"{root}/snapshot").write(state.lsn, frames.encode_state(state))
    wal = Wal(disk, f"{root}/wal", file_bytes=FILE_BYTES)
    for _ in wal.scan(snapshot_lsn=state.lsn):
        pass
    wal.settle()
    return state, wal


def test_a_snapshot_at_the_end_needs_only_the_live_batches(place: tuple[DiskLike, str]) -> None:
    driver = random_history(7, 150)
    driver.stop()
    state, wal = snapshotted(place, driver)
    needs_lsn = min([state.needs_lsn, *state.held])
    for file in wal.files()[:-1]:
        if file.last_lsn >= needs_lsn:
            break
        wal.release(file.number)
    wal.close()
    machine, report = found(place)
    assert facts_of(machine) == facts_of(driver.machine)
    assert report.frames_applied == 0


def test_a_snapshot_whose_batches_are_missing_is_refused(place: tuple[DiskLike, str]) -> None:
    driver = Driver()
    driver.append(*["x" * 1000] * 3)
    for _ in range(20):
        driver.append("y" * 1000, box="c")
    _, wal = snapshotted(place, driver)
    wal.release(wal.files()[0].number)
    wal.close()
    with pytest.raises(Corrupt, match="which the snapshot needs, is missing"):
        found(place)
