"""Goal: a snapshot is whole or not there, and damage to one falls back to the one before it.

Method: the fault disk; a crash at every operation of writing one; every byte of one flipped.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from shard.storage import frames
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.snapshot import Snapshots
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep
from tests.support.jobs import QueueDriver

DIRECTORY = "/data/snapshot"


def path_of(lsn: int) -> str:
    return f"{DIRECTORY}/{lsn:020d}.snap"


def content_of(lsn: int) -> bytes:
    return b"state after %d. " % lsn * 50


def written(disk: FaultDisk, *lsns: int) -> Snapshots:
    snapshots = Snapshots(disk, DIRECTORY)
    for lsn in lsns:
        snapshots.write(lsn, [content_of(lsn)[:100], b"", content_of(lsn)[100:]])
    return snapshots


def loaded(disk: DiskLike, directory: str = DIRECTORY) -> tuple[int, bytes, list[str]] | None:
    found = Snapshots(disk, directory).load_newest()
    return None if found is None else (found.lsn, bytes(found.content), found.damaged_paths)


@pytest.mark.parametrize("real", [True, False])
def test_the_newest_snapshot_comes_back_whole(tmp_path: Path, real: bool) -> None:
    disk: DiskLike = Disk() if real else FaultDisk("/data")
    directory = f"{tmp_path}/snapshot" if real else DIRECTORY
    assert loaded(disk, directory) is None
    snapshots = Snapshots(disk, directory)
    for lsn in (0, 9, 10, 100):
        snapshots.write(lsn, [b"lsn ", b"%d" % lsn])
        assert loaded(disk, directory) == (lsn, b"lsn %d" % lsn, [])
    assert snapshots.list_lsns() == [10, 100]
    assert len(disk.listdir(directory)) == 2


def test_a_snapshot_can_be_written_again() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    Snapshots(disk, DIRECTORY).write(7, [b"other"])
    assert loaded(disk) == (7, b"other", [])


def test_a_snapshot_may_be_empty() -> None:
    disk = FaultDisk("/data")
    Snapshots(disk, DIRECTORY).write(3, [])
    assert loaded(disk) == (3, b"", [])


def test_every_flipped_byte_of_the_newest_falls_back_to_the_one_before_and_says_so() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    rng = random.Random(4)
    for at in sweep(range(disk.size(path_of(7))), seed=4, sample=400):
        bits = 1 << rng.randrange(8)
        disk.flip(path_of(7), at, bits)
        assert loaded(disk) == (5, content_of(5), [path_of(7)])
        disk.flip(path_of(7), at, bits)
    assert loaded(disk) == (7, content_of(7), [])


@pytest.mark.parametrize("length", [0, 10, 48, 60])
def test_a_snapshot_that_was_cut_is_damaged(length: int) -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    disk.truncate(disk.open(path_of(7), writable=True), length)
    assert loaded(disk) == (5, content_of(5), [path_of(7)])


def test_a_snapshot_under_another_name_is_damaged() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    disk.rename(path_of(7), path_of(8))
    assert loaded(disk) == (5, content_of(5), [path_of(8)])


def test_when_none_is_valid_the_newest_is_named_with_the_next_step() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    for lsn in (5, 7):
        disk.flip(path_of(lsn), 60)
    with pytest.raises(Corrupt) as caught:
        loaded(disk)
    assert caught.value.path == path_of(7)
    assert "`streams repair`" in str(caught.value) and "no older snapshot" in str(caught.value)


def test_a_damaged_snapshot_does_not_count_as_kept_and_does_not_push_out_a_good_one() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7)
    disk.flip(path_of(7), 60)
    snapshots = Snapshots(disk, DIRECTORY)
    assert snapshots.load_newest() is not None
    assert snapshots.list_lsns() == [5]
    snapshots.write(9, [b"nine"])
    assert snapshots.list_lsns() == [5, 9]
    assert len(disk.listdir(DIRECTORY)) == 2


def test_a_crash_at_any_operation_leaves_the_old_snapshot_or_the_new_one() -> None:
    probe = FaultDisk("/data")
    written(probe, 5, 7)
    before = probe.operations
    written(probe, 9)
    points = [(at, moment) for at in range(before, probe.operations) for moment in MOMENTS]
    for at, moment in sweep(points, seed=5, sample=1000):
        for seed in range(8):
            disk = FaultDisk("/data")
            snapshots = written(disk, 5, 7)
            disk.crash_at(at, moment)
            with pytest.raises(Crashed):
                snapshots.write(9, [content_of(9)])
            after = disk.kill() if seed == 0 else disk.crash(random.Random(seed))
            assert loaded(after) in ((7, content_of(7), []), (9, content_of(9), []))
            written(after, 10)
            assert loaded(after) == (10, content_of(10), [])
            assert not [name for name in after.listdir(DIRECTORY) if name.endswith(".tmp")]


def test_a_snapshot_that_was_written_survives_any_crash() -> None:
    disk = FaultDisk("/data")
    written(disk, 5, 7, 9)
    for seed in range(100):
        assert loaded(disk.crash(random.Random(seed))) == (9, content_of(9), [])


def test_a_failure_at_any_operation_is_raised_and_leaves_a_valid_snapshot() -> None:
    probe = FaultDisk("/data")
    written(probe, 5, 7)
    before = probe.operations
    written(probe, 9)
    for at in range(before, probe.operations):
        disk = FaultDisk("/data")
        snapshots = written(disk, 5, 7)
        disk.fail_at(at, OSError(errno.ENOSPC, "full"))
        with pytest.raises(OSError):
            snapshots.write(9, [content_of(9)])
        found = loaded(disk.crash(random.Random(at)))
        assert found in ((7, content_of(7), []), (9, content_of(9), []))


def test_a_box_with_many_keys_jobs_or_dead_batches_is_encoded_in_parts_and_read_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = QueueDriver()
    driver.put(type="queue", durability="fsync", leases_durable=True)
    for number in range(7):
        driver.append(number, idempotency_key=f"k{number}")
    driver.claim(max=6)
    driver.append(0, box="other", idempotency_key="k")
    driver.put("dead", durability="fsync")
    for _ in range(3):
        for number in range(6):
            driver.append({"data": 1, "tag": str(number % 2)}, box="dead")
        driver.seal("dead")
    driver.delete(tag="1", box="dead")
    state = driver.machine.snapshot()
    whole = frames.decode_state(memoryview(b"".join(frames.encode_state(state))))
    monkeypatch.setattr(frames, "_ITEMS_AT_ONCE", 3)
    monkeypatch.setattr(frames, "_SEGMENTS_AT_ONCE", 1)
    monkeypatch.setattr(frames, "_PIECE_BYTES", 16)
    pauses: list[None] = []
    pieces = frames.encode_state(state, lambda: pauses.append(None))
    assert frames.decode_state(memoryview(b"".join(pieces))) == whole and len(pauses) > 20
    found = {facts.name: facts for facts in whole.boxes}
    assert [entry[0] for entry in found["b"].keys] == [f"k{number}" for number in range(7)]
    assert found["b"].queue is not None and [entry[0] for entry in found["b"].queue.jobs] == [*range(1, 7)]
    assert [len(segment.dead) for segment in found["dead"].segments] == [3, 3, 3]
