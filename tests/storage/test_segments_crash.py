"""Goal: wherever power, process or disk fails, a segment is whole and right, or not there at all.

Method: the fault disk stops or fails at every operation of writing one; steps are made small, so that a
segment is written in several.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from shard.storage.files import DiskLike
from shard.storage.segments import (
    FileSource,
    SegmentIndex,
    build_index,
    copy_segment,
    list_segments,
    open_segment,
    read_batches,
    remove_leftovers,
    remove_segment,
    small_steps,
    verify_segment,
    write_segment,
    writer,
)
from streams.protocol.model.records import Batch, render
from streams.protocol.payloads.appends import RecordLimits, parse_append
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep

DIRECTORY = "/data/segments"


@pytest.fixture(autouse=True)
def steps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_steps, "STEP_BYTES", 2000)
    monkeypatch.setattr(writer, "SYNC_BYTES", 4000)


def lot(first_seq: int) -> list[Batch]:
    batches = []
    for seq in range(first_seq, first_seq + 40):
        body = b'{"records":[{"data":%d,"tag":"tag %d"}]}' % (10**90 + seq, seq % 5)
        columns = parse_append(body, RecordLimits()).columns
        batches.append(render(columns, first_seq=seq, times=seq))
    return batches


OLD, NEW = lot(1), lot(100)
OLD_INDEX = build_index(generation=3, serial=1, batches=OLD)
NEW_INDEX = build_index(generation=3, serial=2, batches=NEW)


def write_old(disk: DiskLike) -> SegmentIndex:
    return write_segment(disk, DIRECTORY, generation=3, serial=1, batches=OLD)


def write_new(disk: DiskLike) -> SegmentIndex:
    return write_segment(disk, DIRECTORY, generation=3, serial=2, batches=iter(NEW))


def whole_segments(disk: DiskLike) -> list[str]:
    """The names that are there, every one of them verified."""
    for index, batches in ((OLD_INDEX, OLD), (NEW_INDEX, NEW)):
        if index.name in list_segments(disk, DIRECTORY):
            source = FileSource(disk, f"{DIRECTORY}/{index.name}")
            assert list(verify_segment(source)) == []
            assert open_segment(source) == index
            found = read_batches(source, index, 0, len(index) - 1, bytes_max=1 << 20)
            assert [batch.to_parts() for batch in found] == [batch.to_parts() for batch in batches]
    return list_segments(disk, DIRECTORY)


def elsewhere() -> FileSource:
    disk = FaultDisk("/data")
    write_new(disk)
    return FileSource(disk, f"{DIRECTORY}/{NEW_INDEX.name}")


def copy_new(disk: DiskLike) -> SegmentIndex:
    return copy_segment(disk, DIRECTORY, elsewhere())


#: Both ways in which a segment is created.
MAKERS = pytest.mark.parametrize("make_new", [write_new, copy_new])


def operations_of_new(make_new: Callable[[DiskLike], SegmentIndex], *, after_old: bool) -> range:
    probe = FaultDisk("/data")
    if after_old:
        write_old(probe)
    before = probe.operations
    make_new(probe)
    assert probe.history[before:].count("pwritev") > 3 and "fdatasync" in probe.history[before:]
    return range(before, probe.operations)


@MAKERS
@pytest.mark.parametrize("after_old", [False, True])
def test_a_crash_at_any_operation_leaves_a_whole_segment_or_none(
    make_new: Callable[[DiskLike], SegmentIndex], after_old: bool
) -> None:
    points = [
        (at, moment, seed)
        for at in operations_of_new(make_new, after_old=after_old)
        for moment in MOMENTS
        for seed in range(24)
    ]
    old = [OLD_INDEX.name] if after_old else []
    met = set()
    for at, moment, seed in sweep(points, seed=11, sample=200):
        disk = FaultDisk("/data")
        if after_old:
            write_old(disk)
        disk.crash_at(at, moment)
        with pytest.raises(Crashed):
            make_new(disk)
        after = disk.kill() if seed == 0 else disk.crash(random.Random(seed))
        found = whole_segments(after)
        assert found in (old, [*old, NEW_INDEX.name])
        met.add(len(found))
        remove_leftovers(after, DIRECTORY)
        assert make_new(after) == NEW_INDEX
        again = after.crash(random.Random(seed))
        assert whole_segments(again) == [*old, NEW_INDEX.name]
        assert remove_leftovers(again, DIRECTORY) == []
    assert len(met) == 2, "the sweep has seen both endings"


def test_a_segment_that_was_written_survives_any_crash() -> None:
    disk = FaultDisk("/data")
    write_old(disk)
    write_new(disk)
    for seed in range(50):
        assert whole_segments(disk.crash(random.Random(seed))) == [OLD_INDEX.name, NEW_INDEX.name]


@MAKERS
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_any_operation_is_raised_as_it_came_and_leaves_no_segment(
    make_new: Callable[[DiskLike], SegmentIndex], number: int
) -> None:
    for at in operations_of_new(make_new, after_old=True):
        disk = FaultDisk("/data")
        write_old(disk)
        error = OSError(number, "no")
        disk.fail_at(at, error)
        with pytest.raises(OSError) as caught:
            make_new(disk)
        assert caught.value is error
        assert whole_segments(disk) == [OLD_INDEX.name]
        assert remove_leftovers(disk, DIRECTORY) == []
        assert make_new(disk) == NEW_INDEX
        assert whole_segments(disk.crash(random.Random(at))) == [OLD_INDEX.name, NEW_INDEX.name]


def test_a_failure_whose_leftover_cannot_be_removed_is_still_the_one_that_is_raised() -> None:
    for operation in ("pwritev", "fsync", "rename"):
        disk = FaultDisk("/data")
        error = OSError(errno.ENOSPC, "full")
        disk.fail_next(operation, error)
        disk.fail_next("unlink", OSError(errno.EIO, "cannot"))
        with pytest.raises(OSError) as caught:
            write_new(disk)
        assert caught.value is error
        assert whole_segments(disk) == []
        assert len(remove_leftovers(disk, DIRECTORY)) == 1


def test_batches_that_cannot_be_had_leave_no_segment() -> None:
    def torn_off(count: int) -> object:
        yield from NEW[:count]
        raise OSError(errno.EIO, "the log cannot be read")

    for count in (0, 1, 20, 40):
        disk = FaultDisk("/data")
        with pytest.raises(OSError, match="the log"):
            write_segment(disk, DIRECTORY, generation=3, serial=2, batches=torn_off(count))  # type: ignore[arg-type]
        assert list_segments(disk, DIRECTORY) == [] == remove_leftovers(disk, DIRECTORY)


def test_a_crash_while_removing_leaves_the_segment_whole_or_gone() -> None:
    probe = FaultDisk("/data")
    write_old(probe)
    before = probe.operations
    remove_segment(probe, DIRECTORY, OLD_INDEX.name)
    for at in range(before, probe.operations):
        for moment in MOMENTS:
            for seed in range(8):
                disk = FaultDisk("/data")
                write_old(disk)
                disk.crash_at(at, moment)
                with pytest.raises(Crashed):
                    remove_segment(disk, DIRECTORY, OLD_INDEX.name)
                after = disk.crash(random.Random(seed))
                assert whole_segments(after) in ([], [OLD_INDEX.name])
                remove_segment(after, DIRECTORY, OLD_INDEX.name)
                assert whole_segments(after.crash(random.Random(seed))) == []
