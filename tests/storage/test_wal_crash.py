"""Goal: whatever operation the power, the process or the disk fails at, a later life finds what it must.

Method: a script of one life (recover, append, sync, prepare, rotate, snapshot, release, mark, close) is run
against the fault disk and stopped at each of its operations, before, midway and after. The next life
recovers, is held against a model of what was promised, writes other frames under the lsns that were lost, and
is stopped as well. All points with STREAMS_SWEEP=full, a sample otherwise.
"""

from __future__ import annotations

import errno
import random
from functools import cache

import pytest

from shard.storage.files import Corrupt
from shard.storage.snapshot import Snapshots
from shard.storage.wal import HEADER_BYTES, Wal
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep

FILE_BYTES = HEADER_BYTES + 700


class Model:
    """What lives before this one wrote, and what they were told is durable."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self.durable_lsn = 0

    def check(self, frames: dict[int, bytes], snapshot_lsn: int) -> None:
        lsns = sorted(frames)
        if lsns:
            assert lsns == list(range(lsns[0], lsns[-1] + 1)), "CONTIGUOUS_LSN"
            assert lsns[0] <= snapshot_lsn + 1
        last = lsns[-1] if lsns else snapshot_lsn
        assert last >= self.durable_lsn, f"lsn {self.durable_lsn} was durable, the log ends at {last}"
        for lsn, content in frames.items():
            assert content == self.written[lsn], f"lsn {lsn} has content that was not written there"


def snapshot_of(model: Model, lsn: int) -> bytes:
    return b"".join(model.written[i] for i in range(1, lsn + 1))


def recover(disk: FaultDisk, model: Model) -> tuple[Wal, Snapshots]:
    """Scan and settle, checking what was found against the model."""
    snapshots = Snapshots(disk, "/data/snapshot")
    loaded = snapshots.load_newest()
    snapshot_lsn = 0
    if loaded is not None:
        snapshot_lsn = loaded.lsn
        assert loaded.damaged_paths == []
        assert bytes(loaded.content) == snapshot_of(model, snapshot_lsn)
    wal = Wal(disk, "/data/wal", file_bytes=FILE_BYTES, reserves=True)
    frames = {frame.lsn: bytes(frame.content) for frame in wal.scan(snapshot_lsn=snapshot_lsn)}
    model.check(frames, snapshot_lsn)
    wal.settle()
    # From here on the frames that were found are shown to readers, and those that were not are nobody's.
    model.durable_lsn = wal.durable_lsn
    model.written = {lsn: content for lsn, content in model.written.items() if lsn <= wal.logged_lsn}
    return wal, snapshots


def live(disk: FaultDisk, model: Model, name: bytes, rng: random.Random) -> None:
    """One life: everything a log can be asked to do, in an order that depends on `rng` alone."""
    wal, snapshots = recover(disk, model)
    for step in range(14):
        if rng.random() < 0.5:
            wal.prepare_next()
        first = wal.logged_lsn + 1
        sizes = [rng.choice((3, 40, 90, 200, 900 if step == 5 else 10)) for _ in range(rng.randrange(1, 4))]
        group = {first + i: b"%s%d." % (name, first + i) * (size // 3) for i, size in enumerate(sizes)}
        model.written.update(group)
        wal.append([(1, 1, lsn, [content[:50], content[50:]]) for lsn, content in group.items()])
        if rng.random() < 0.6:
            wal.sync()
            model.durable_lsn = wal.durable_lsn
        if rng.random() < 0.2:
            wal.mark()
            model.durable_lsn = wal.durable_lsn
        if step % 5 == 4:
            snapshots.write(wal.durable_lsn, [snapshot_of(model, wal.durable_lsn)])
            for file in wal.files()[:-1]:
                if file.last_lsn <= snapshots.list_lsns()[0]:
                    wal.release(file.number)
    wal.close()
    model.durable_lsn = wal.durable_lsn


def stopped(disk: FaultDisk, rng: random.Random) -> FaultDisk:
    return disk.kill() if rng.random() < 0.2 else disk.crash(rng)


@cache
def operations_of_a_life(seed: int) -> int:
    disk = FaultDisk("/data")
    live(disk, Model(), b"a", random.Random(seed))
    return disk.operations


def test_the_script_does_everything_a_log_can_do() -> None:
    disk, model = FaultDisk("/data"), Model()
    live(disk, model, b"a", random.Random(0))
    live(disk, model, b"b", random.Random(1))
    assert set(disk.history) == {
        "create", "open", "close", "pwritev", "truncate", "fdatasync", "fsync", "fsync_dir", "rename",
        "unlink", "mkdir", "listdir", "exists", "size", "read_all", "allocate",
    }  # fmt: skip
    assert disk.operations > 200


def test_a_crash_at_any_operation_loses_nothing_durable_and_invents_nothing() -> None:
    points = [
        (seed, at, moment)
        for seed in range(6)
        for at in range(operations_of_a_life(seed))
        for moment in MOMENTS
    ]
    for seed, at, moment in sweep(points, seed=11, sample=700):
        rng = random.Random(f"{seed} {at} {moment}")
        disk, model = FaultDisk("/data"), Model()
        disk.crash_at(at, moment)
        with pytest.raises(Crashed):
            live(disk, model, b"a", random.Random(seed))
        for name in (b"b", b"c"):
            disk = stopped(disk, rng)
            disk.crash_at(rng.randrange(operations_of_a_life(seed)), rng.choice(MOMENTS))
            try:
                live(disk, model, name, random.Random(rng.random()))
            except Crashed:
                pass
        recover(stopped(disk, rng), model)


def test_a_crash_at_any_operation_of_recovery_is_recovered_from() -> None:
    for seed in sweep(range(200), seed=12, sample=40):
        rng = random.Random(seed)
        disk, model = FaultDisk("/data"), Model()
        disk.crash_at(60 + seed % 60, "midway")
        with pytest.raises(Crashed):
            live(disk, model, b"a", random.Random(seed))
        found = disk.crash(rng)
        at = 0
        while True:
            again = found.kill()
            again.crash_at(at, MOMENTS[(seed + at) % 3])
            trial = Model()
            trial.written, trial.durable_lsn = dict(model.written), model.durable_lsn
            try:
                recover(again, trial)
                break
            except Crashed:
                live(stopped(again, rng), trial, b"b", random.Random(seed))
            at += 1
        assert at >= 8


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failure_at_any_operation_never_lets_a_sync_promise_what_is_lost(code: int) -> None:
    points = [(seed, at) for seed in range(6) for at in range(operations_of_a_life(seed))]
    for seed, at in sweep(points, seed=13, sample=300):
        rng = random.Random(f"{seed} {at}")
        disk, model = FaultDisk("/data"), Model()
        disk.fail_at(at, OSError(code, "failed"))
        try:
            live(disk, model, b"a", random.Random(seed))
        except OSError as error:
            assert error.errno == code
        recover(stopped(disk, rng), model)


def test_after_a_failure_at_any_operation_of_a_write_nothing_is_promised_again() -> None:
    """The failed log is asked to go on, and refuses, at every operation of append, rotate and sync."""

    def begin() -> tuple[FaultDisk, Wal]:
        disk = FaultDisk("/data")
        wal = Wal(disk, "/data/wal", file_bytes=FILE_BYTES)
        list(wal.scan())
        wal.settle()
        wal.append([(1, 1, 1, [b"x" * 500])])
        return disk, wal

    def write(wal: Wal) -> None:
        wal.append([(1, 1, 2, [b"y" * 500]), (1, 1, 3, [b"z" * 10])])
        wal.mark()

    disk, wal = begin()
    before = disk.operations
    write(wal)
    assert disk.history[before:].count("fdatasync") == 4, "old file, new header, frames, marker"
    for at in range(before, disk.operations):
        disk_again, wal = begin()
        disk_again.fail_at(at, OSError(errno.EIO, "failed"))
        with pytest.raises(OSError):
            write(wal)
        with pytest.raises(RuntimeError):
            wal.sync()
        with pytest.raises(RuntimeError):
            wal.append([(1, 1, wal.logged_lsn + 1, [b""])])


def test_damage_after_any_history_of_crashes_is_refused_or_harmless() -> None:
    """A log that crashed and recovered is quiet; then one byte of one durable frame changes."""
    for seed in sweep(range(2000), seed=14, sample=150):
        rng = random.Random(seed)
        disk, model = FaultDisk("/data"), Model()
        disk.crash_at(rng.randrange(40, operations_of_a_life(seed % 6)), "midway")
        with pytest.raises(Crashed):
            live(disk, model, b"a", random.Random(seed % 6))
        disk = disk.crash(rng)
        wal, _ = recover(disk, model)
        if not wal.files() or wal.files()[0].first_lsn > wal.logged_lsn:
            continue
        target = wal.read(rng.randrange(wal.files()[0].first_lsn, wal.logged_lsn + 1))
        path = f"/data/wal/{target.file:012d}.wal"
        disk.flip(path, target.offset + rng.randrange(16 + len(target.content)), 1 << rng.randrange(8))
        with pytest.raises(Corrupt) as caught:
            recover(disk, model)
        assert (caught.value.path, caught.value.offset) == (path, target.offset)
