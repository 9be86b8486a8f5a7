"""Goal: the log gives back what was appended, cuts what was never promised, and refuses what was damaged.

Method: small files on the fault disk, so that bytes can be lost or changed on purpose; the same round trips
on real files. Crashes at every operation are in `test_wal_crash.py`.
"""

from __future__ import annotations

import errno
import random
import struct
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from shard.storage.files import Buffer, Corrupt, Disk, DiskLike
from shard.storage.salvage import frames_of
from shard.storage.wal import HEADER_BYTES, Frame, FrameParts, Wal, WalFile
from tests.support.faultdisk import Crashed, FaultDisk, sweep

FILE_BYTES = HEADER_BYTES + 1000
WAL = "/data/wal"
FILE_1 = f"{WAL}/000000000001.wal"
FILE_2 = f"{WAL}/000000000002.wal"


def opened(
    disk: DiskLike, directory: str = WAL, *, snapshot_lsn: int = 0, file_bytes: int = FILE_BYTES
) -> Wal:
    wal = Wal(disk, directory, file_bytes=file_bytes)
    for _ in wal.scan(snapshot_lsn=snapshot_lsn):
        pass
    wal.settle()
    return wal


def scanned(disk: DiskLike, directory: str = WAL, *, snapshot_lsn: int = 0) -> list[Frame]:
    return list(Wal(disk, directory, file_bytes=FILE_BYTES).scan(snapshot_lsn=snapshot_lsn))


def contents(frames: list[Frame]) -> list[bytes]:
    return [bytes(frame.content) for frame in frames]


def frame(lsn: int, *parts: bytes) -> FrameParts:
    return (7, 3, lsn, parts)


def filled(disk: FaultDisk, count: int, *, size: int = 100) -> list[bytes]:
    """A log of `count` synced frames, closed; their contents."""
    wal = opened(disk)
    expected = [(b"%d." % lsn * size)[:size] for lsn in range(1, count + 1)]
    for lsn, content in enumerate(expected, 1):
        wal.append([frame(lsn, content)])
        wal.sync()
    wal.close()
    return expected


@pytest.fixture(params=["disk", "faultdisk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DiskLike, str]:
    if request.param == "disk":
        return Disk(), f"{tmp_path}/wal"
    return FaultDisk("/data"), WAL


def test_frames_come_back_in_order_as_they_were_appended(place: tuple[DiskLike, str]) -> None:
    disk, directory = place
    wal = opened(disk, directory)
    rng = random.Random(1)
    groups = [[rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 9))] for _ in range(40)]
    lsn = 0
    for group in groups:
        wal.append([frame(lsn + 1 + i, content[:7], b"", content[7:]) for i, content in enumerate(group)])
        lsn += len(group)
        assert (wal.logged_lsn, wal.durable_lsn < lsn) == (lsn, True)
        wal.sync()
        assert wal.durable_lsn == lsn
    wal.close()
    frames = scanned(disk, directory)
    assert contents(frames) == [content for group in groups for content in group]
    assert [found.lsn for found in frames] == list(range(1, lsn + 1))
    assert {(found.kind, found.version) for found in frames} == {(7, 3)}
    assert all(found.offset % 8 == 0 for found in frames)
    assert len({found.file for found in frames}) > 3


def test_large_parts_come_back_too(tmp_path: Path) -> None:
    wal = opened(Disk(), f"{tmp_path}/wal", file_bytes=1 << 20)
    parts: list[Buffer] = [
        random.Random(2).randbytes(300_000),
        b"middle",
        bytearray(b"x" * 5001),
        memoryview(b"end"),
    ]
    for lsn in range(1, 8):
        wal.append([(1, 1, lsn, parts)])
    wal.close()
    assert contents(scanned(Disk(), f"{tmp_path}/wal")) == [b"".join(parts)] * 7


def test_an_empty_log_is_empty_and_stays_so(place: tuple[DiskLike, str]) -> None:
    disk, directory = place
    for _ in range(3):
        wal = opened(disk, directory)
        assert (wal.logged_lsn, wal.durable_lsn, wal.files()) == (0, 0, [])
        wal.sync()
        wal.mark()
        wal.close()
    assert disk.listdir(directory) == []


def test_scanning_changes_nothing_on_the_disk() -> None:
    disk = FaultDisk("/data")
    filled(disk, 12)
    before = {name: disk.peek(f"{WAL}/{name}") for name in disk.listdir(WAL)}
    scanned(disk)
    assert {name: disk.peek(f"{WAL}/{name}") for name in disk.listdir(WAL)} == before


def test_the_bytes_are_the_ones_drawn_at_the_top_of_the_file() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.append([(7, 3, 1, [b"hello"])])
    wal.sync()
    wal.append([(8, 4, 2, [b""])])
    wal.close()

    def summed(body: bytes) -> bytes:
        return body + struct.pack("<Q", xxh3_64_intdigest(body, 1))

    def marker(lsn: int) -> bytes:
        return summed(struct.pack("<IBBHQQQ", 16, 0, 1, 0, lsn, 0x9D5CE6F12B8A73C7 ^ 1, lsn))

    header = summed(b"streamsW" + struct.pack("<IIQQ", 1, 0, 1, 1) + bytes(24)).ljust(4096, b"\0")
    first = summed(struct.pack("<IBBHQ", 5, 7, 3, 0, 1) + b"hello\0\0\0")
    second = summed(struct.pack("<IBBHQ", 0, 8, 4, 0, 2))
    assert disk.peek(FILE_1) == header + first + marker(1) + second + marker(2)


def test_progress_of_a_scan_can_be_read() -> None:
    disk = FaultDisk("/data")
    filled(disk, 30)
    wal = Wal(disk, WAL, file_bytes=FILE_BYTES)
    frames = wal.scan()
    next(frames)
    assert 0 == wal.scanned_bytes < wal.total_bytes
    list(frames)
    assert (
        wal.scanned_bytes == wal.total_bytes == sum(disk.size(f"{WAL}/{name}") for name in disk.listdir(WAL))
    )


def test_any_frame_can_be_read_by_its_lsn_in_this_life_and_the_next() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    expected = {lsn: b"%d" % lsn * 30 for lsn in range(1, 41)}
    for lsn, content in expected.items():
        wal.append([frame(lsn, content)])
    assert {lsn: bytes(wal.read(lsn).content) for lsn in expected} == expected
    wal.close()
    wal = opened(disk)
    assert {lsn: bytes(wal.read(lsn).content) for lsn in expected} == expected
    found = wal.read(17)
    disk.flip(f"{WAL}/{found.file:012d}.wal", found.offset + 20)
    with pytest.raises(Corrupt) as caught:
        wal.read(17)
    assert caught.value.offset == found.offset


# Files.


def test_a_frame_never_spans_files_and_one_that_is_too_big_has_its_own() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    sizes = [300, 300, 300, 5000, 10, 9000, 400]
    for lsn, size in enumerate(sizes, 1):
        wal.append([frame(lsn, b"x" * size)])
    wal.close()
    assert [(found.file, len(found.content)) for found in scanned(disk)] == [
        (1, 300), (1, 300), (2, 300), (3, 5000), (4, 10), (5, 9000), (6, 400),
    ]  # fmt: skip


def test_one_group_can_fill_several_files() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.append([frame(lsn, b"y" * 200) for lsn in range(1, 31)])
    assert wal.files()[0] == WalFile(1, 1, 4)
    assert wal.files()[-1] == WalFile(8, 29, 30)
    assert wal.durable_lsn == 28, "WHOLE_BEFORE_NEXT: all but the newest file was synced"
    wal.close()
    assert len(scanned(disk)) == 30


@pytest.mark.parametrize("prepared", [True, False])
def test_rotation_does_not_need_a_prepared_file_but_uses_it(prepared: bool) -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    for lsn in range(1, 21):
        if prepared:
            wal.prepare_next()
        wal.append([frame(lsn, b"z" * 300)])
        newest = f"{WAL}/{wal.files()[-1].number:012d}.wal"
        assert (disk.size(newest) == FILE_BYTES) == prepared
    wal.close()
    assert len(scanned(disk)) == 20


def test_a_prepared_file_is_full_of_durable_zeros_and_never_longer_once_written() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    for lsn in range(1, 60):
        wal.prepare_next()
        wal.append([frame(lsn, b"z" * (lsn * 7 % 131))])
        wal.mark()
    assert wal.rotations > 5
    assert {disk.size(f"{WAL}/{name}") for name in disk.listdir(WAL)} == {FILE_BYTES}


def test_released_files_are_recycled_up_to_a_bound_and_their_old_frames_never_come_back() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    lsn = 0
    kept: dict[int, bytes] = {}
    for generation in range(6):
        for _ in range(16):
            lsn += 1
            wal.prepare_next()
            kept[lsn] = b"%d:%d " % (generation, lsn) * 30
            wal.append([frame(lsn, kept[lsn])])
        for file in wal.files()[:-1]:
            wal.release(file.number)
            for gone in range(file.first_lsn, file.last_lsn + 1):
                del kept[gone]
        names = disk.listdir(WAL)
        assert sum(name.endswith(".spare") for name in names) == 2
        assert sum(name.endswith(".wal") for name in names) == 1
        snapshot_lsn = wal.files()[0].first_lsn - 1
        frames = scanned(disk.kill(), snapshot_lsn=snapshot_lsn)
        assert {found.lsn: bytes(found.content) for found in frames} == kept
        disk = disk.kill()
        wal = opened(disk, snapshot_lsn=snapshot_lsn)


def test_spares_do_not_outlive_the_process() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.prepare_next()
    wal.prepare_next()
    assert disk.listdir(WAL) == ["000000000001.spare"]
    disk = disk.kill()
    opened(disk)
    assert disk.listdir(WAL) == []


def test_only_the_oldest_file_can_be_released_and_never_the_newest() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    for lsn in range(1, 11):
        wal.append([frame(lsn, b"z" * 300)])
    first, second, *_, last = wal.files()
    with pytest.raises(AssertionError, match="CONTIGUOUS_NUMBER"):
        wal.release(second.number)
    for file in wal.files()[:-1]:
        wal.release(file.number)
    with pytest.raises(AssertionError, match="CONTIGUOUS_NUMBER"):
        wal.release(last.number)
    assert wal.files() == [last] and first.number == 1


def test_lsns_out_of_turn_are_our_mistake() -> None:
    wal = opened(FaultDisk("/data"))
    with pytest.raises(AssertionError, match="CONTIGUOUS_LSN"):
        wal.append([frame(2, b"")])


# Torn tails.


def unsynced_tail(seed: int) -> tuple[FaultDisk, list[bytes]]:
    """A crash with frames 1..5 durable and 6..12 not; what had been appended."""
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.prepare_next()
    expected = [b"%d-" % lsn * 10 for lsn in range(1, 13)]
    wal.append([frame(lsn, expected[lsn - 1]) for lsn in range(1, 6)])
    wal.sync()
    for lsn in range(6, 13):
        wal.append([frame(lsn, expected[lsn - 1])])
    return disk.crash(random.Random(seed)), expected


def test_a_torn_tail_is_cut_at_the_last_good_frame() -> None:
    lengths = set()
    for seed in range(200):
        disk, expected = unsynced_tail(seed)
        found = contents(scanned(disk))
        assert found == expected[: len(found)] and len(found) >= 5
        lengths.add(len(found))
    assert lengths == set(range(5, 13))


def test_frames_that_were_cut_never_return_after_a_second_crash() -> None:
    for seed in range(200):
        disk, expected = unsynced_tail(seed)
        wal = opened(disk)
        last = wal.logged_lsn
        wal.append([frame(last + 1, b"new life")])
        wal.sync()
        disk = disk.crash(random.Random(-seed))
        assert contents(scanned(disk)) == [*expected[:last], b"new life"]


def test_the_tail_is_gone_from_the_file_before_anything_new_is_written() -> None:
    for seed in range(50):
        disk, _ = unsynced_tail(seed)
        wal = opened(disk)
        size = disk.size(FILE_1)
        again = disk.crash(random.Random(seed))
        assert again.size(FILE_1) == size and len(scanned(again)) == wal.logged_lsn


def test_the_marker_that_ends_a_cut_file_never_has_cut_frames_behind_it() -> None:
    """Frames as long as a marker: were the cut not durable before it, the next frame would follow it."""
    met = 0
    for seed in range(300):
        disk = FaultDisk("/data")
        wal = opened(disk)
        wal.append([frame(1, b"durable")])
        wal.sync()
        for lsn in (2, 3, 4):
            wal.append([frame(lsn, b"%d" % lsn * 16)])
        disk = disk.crash(random.Random(seed))
        met += len(scanned(disk)) == 1 and b"4" * 16 in disk.peek(FILE_1)
        opened(torn := disk.kill())
        for at in range(torn.operations):
            again = disk.kill()
            again.crash_at(at, "after")
            with pytest.raises(Crashed):
                opened(again)
            assert 1 <= len(scanned(again.crash(random.Random(seed)))) <= 4
    assert met > 5


def test_a_file_begun_by_a_killed_process_has_its_name_for_good_once_settled() -> None:
    disk = FaultDisk("/data")
    filled(disk, 2)
    wal = opened(disk)
    disk.crash_at(disk.operations + 7, "before")
    with pytest.raises(Crashed):
        wal.append([frame(3, b"never written")])
    assert disk.history[-2:] == ["rename", "fsync_dir"]
    disk = disk.kill()
    assert opened(disk).files() == [WalFile(1, 1, 2), WalFile(2, 3, 2)]
    for seed in range(20):
        assert disk.crash(random.Random(seed)).exists(FILE_2)


def test_frames_left_by_a_killed_process_are_durable_once_settled() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.append([frame(lsn, b"k%d" % lsn) for lsn in range(1, 4)])
    disk = disk.kill()
    wal = opened(disk)
    assert wal.durable_lsn == 3
    for seed in range(50):
        assert len(scanned(disk.crash(random.Random(seed)))) == 3


def test_new_frames_after_a_restart_begin_a_new_file() -> None:
    disk = FaultDisk("/data")
    filled(disk, 3)
    wal = opened(disk)
    wal.append([frame(4, b"four")])
    assert wal.files() == [WalFile(1, 1, 3), WalFile(2, 4, 4)]


def test_restarts_without_writes_leave_the_files_alone() -> None:
    disk = FaultDisk("/data")
    filled(disk, 3)
    before = {name: disk.peek(f"{WAL}/{name}") for name in disk.listdir(WAL)}
    for _ in range(3):
        opened(disk).close()
    assert {name: disk.peek(f"{WAL}/{name}") for name in disk.listdir(WAL)} == before


# Damage.


def test_damage_in_the_middle_is_refused_with_the_file_the_offset_and_the_next_step() -> None:
    disk = FaultDisk("/data")
    filled(disk, 12)
    target = scanned(disk)[2]
    disk.flip(FILE_1, target.offset + 40)
    with pytest.raises(Corrupt) as caught:
        scanned(disk)
    assert (caught.value.path, caught.value.offset) == (FILE_1, target.offset)
    message = str(caught.value)
    assert FILE_1 in message and f"byte {target.offset}" in message
    assert "`streams verify`" in message and "`streams repair`" in message


def test_damage_before_a_torn_tail_is_still_damage() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    for lsn in range(1, 4):
        wal.append([frame(lsn, b"synced")])
        wal.sync()
    wal.append([frame(4, b"not synced, but written")])
    disk = disk.kill()
    opened(disk)
    disk.flip(FILE_1, HEADER_BYTES + 20)
    with pytest.raises(Corrupt) as caught:
        scanned(disk)
    assert caught.value.offset == HEADER_BYTES


def test_every_flipped_byte_of_a_quiet_log_is_refused_or_harmless_and_never_other_content() -> None:
    disk = FaultDisk("/data")
    expected = filled(disk, 14)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for found in scanned(disk):
        length = 24 + (len(found.content) + 7) // 8 * 8
        ranges.setdefault(f"{WAL}/{found.file:012d}.wal", []).append((found.offset, found.offset + length))
    assert len(ranges) == 3
    refused = 0
    points = [(path, at) for path in ranges for at in range(disk.size(path))]
    rng = random.Random(3)
    for path, at in sweep(points, seed=3, sample=4000):
        bits = 1 << rng.randrange(8)
        disk.flip(path, at, bits)
        in_frame = [start for start, end in ranges[path] if start <= at < end]
        try:
            assert contents(scanned(disk)) == expected, f"{path} byte {at}: other content"
            assert not in_frame and at >= 64, f"{path} byte {at}: damage went unnoticed"
        except Corrupt as damage:
            refused += 1
            assert damage.path == path
            assert not in_frame or damage.offset == in_frame[0]
        disk.flip(path, at, bits)
    print(f"{refused} flips refused")


def test_a_quiet_log_has_proof_of_its_last_frame_however_it_became_quiet() -> None:
    closed, marked, settled = FaultDisk("/data"), FaultDisk("/data"), FaultDisk("/data")
    filled(closed, 3)
    wal = opened(marked)
    wal.append([frame(1, b"last")])
    wal.sync()
    assert wal.needs_marker
    wal.mark()
    assert not wal.needs_marker
    marked = marked.crash(random.Random(0))
    wal = opened(settled)
    wal.append([frame(1, b"last")])
    settled = settled.kill()
    opened(settled)
    for disk in (closed, marked, settled):
        last = scanned(disk)[-1]
        disk.flip(FILE_1, last.offset + 16)
        with pytest.raises(Corrupt) as caught:
            scanned(disk)
        assert caught.value.offset == last.offset


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_file_is_refused(missing: int) -> None:
    disk = FaultDisk("/data")
    filled(disk, 20)
    assert len(disk.listdir(WAL)) == 4
    disk.unlink(f"{WAL}/{missing:012d}.wal")
    with pytest.raises(Corrupt, match="missing"):
        scanned(disk)


def test_a_file_under_another_number_is_refused() -> None:
    disk = FaultDisk("/data")
    filled(disk, 12)
    disk.rename(FILE_1, FILE_2)
    with pytest.raises(Corrupt, match="header"):
        scanned(disk)


def test_a_file_of_a_later_format_says_so() -> None:
    disk = FaultDisk("/data")
    filled(disk, 1)
    head = b"streamsW" + struct.pack("<IIQQ", 2, 0, 1, 1) + bytes(24)
    handle = disk.open(FILE_1, writable=True)
    disk.pwritev(handle, [head + struct.pack("<Q", xxh3_64_intdigest(head, 1))], 0)
    with pytest.raises(Corrupt, match="format 2"):
        scanned(disk)


def test_the_log_must_join_the_snapshot() -> None:
    disk = FaultDisk("/data")
    filled(disk, 12)
    assert len(scanned(disk, snapshot_lsn=12)) == 12
    with pytest.raises(Corrupt, match="before the snapshot"):
        scanned(disk, snapshot_lsn=13)
    wal = opened(disk)
    wal.release(1)
    first = wal.files()[0].first_lsn
    with pytest.raises(Corrupt, match="older files are missing"):
        scanned(disk, snapshot_lsn=first - 2)
    assert scanned(disk, snapshot_lsn=first - 1)[0].lsn == first
    with pytest.raises(Corrupt, match="no log file"):
        scanned(FaultDisk("/data"), snapshot_lsn=1)


# Failures.


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
def test_after_a_failed_write_or_sync_the_log_takes_nothing_more(operation: str) -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    wal.append([frame(1, b"one")])
    wal.sync()
    disk.fail_next(operation, OSError(errno.EIO, "failed"))
    with pytest.raises(OSError):
        wal.append([frame(2, b"two")])
        wal.sync()
    assert wal.durable_lsn == 1
    operations = disk.operations
    for refused in (wal.sync, wal.mark, wal.prepare_next, lambda: wal.append([frame(3, b"")])):
        with pytest.raises(RuntimeError, match="failed"):
            refused()
    assert disk.operations == operations
    wal.close()
    assert disk.history[operations:] == ["close"], "close lets go and writes nothing"


def test_a_log_that_was_not_settled_takes_nothing() -> None:
    disk = FaultDisk("/data")
    wal = Wal(disk, WAL, file_bytes=FILE_BYTES)
    with pytest.raises(RuntimeError, match="settled"):
        wal.append([frame(1, b"")])
    list(wal.scan())
    with pytest.raises(RuntimeError, match="settled"):
        wal.append([frame(1, b"")])
    wal.settle()
    wal.append([frame(1, b"")])


def test_a_spare_that_could_not_be_filled_is_removed_and_the_log_goes_on() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)
    disk.fail_next("pwritev", OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError):
        wal.prepare_next()
    assert disk.listdir(WAL) == []
    wal.append([frame(1, b"still here")])
    wal.close()
    assert contents(scanned(disk)) == [b"still here"]


# A disk that is full.


def reserving(disk: DiskLike, *, snapshot_lsn: int = 0) -> Wal:
    wal = Wal(disk, WAL, file_bytes=FILE_BYTES, reserves=True)
    list(wal.scan(snapshot_lsn=snapshot_lsn))
    wal.settle()
    return wal


@pytest.mark.parametrize("zeros", [True, False])
def test_a_log_that_reserves_writes_to_a_full_disk_as_much_as_it_said(zeros: bool) -> None:
    disk = FaultDisk("/data")
    wal = reserving(disk)
    wal.append([frame(1, b"x" * 100)])
    wal.prepare_next(zeros=zeros)
    disk.is_full = True
    room = wal.room_bytes
    assert wal.has_spare and room > FILE_BYTES - HEADER_BYTES
    lsn = 1
    while wal.room_bytes >= 124 + 40:
        lsn += 1
        wal.append([frame(lsn, b"x" * 100)])
        wal.mark()
    assert wal.rotations == 2 and not wal.has_spare
    with pytest.raises(OSError):
        wal.append([frame(lsn + 1, b"x" * 1000)])
    disk.is_full = False
    assert contents(scanned(disk.kill())) == [b"x" * 100] * lsn


def test_what_has_no_room_is_written_when_there_is_some() -> None:
    disk = FaultDisk("/data")
    wal = reserving(disk)
    wal.append([frame(1, b"before")])
    looks: list[int] = []

    def on_full(error: OSError) -> bool:
        assert error.errno == errno.ENOSPC
        looks.append(len(looks))
        disk.is_full = len(looks) < 3
        return True

    wal.on_full = on_full
    disk.is_full = True
    large = b"y" * (3 * FILE_BYTES)  # more than a file has: it is made with room for it
    wal.append([frame(2, b"x" * 700), frame(3, b"x" * 700), frame(4, large), frame(5, b"z")])
    wal.close()
    assert len(looks) == 3
    assert contents(scanned(disk)) == [b"before", b"x" * 700, b"x" * 700, large, b"z"]


def test_a_try_that_has_no_room_logs_nothing_and_the_log_goes_on() -> None:
    disk = FaultDisk("/data")
    wal = opened(disk)  # one whose files grow, as on a file system that copies on write
    wal.append([frame(1, b"one")])
    wal.sync()
    disk.is_full = True
    assert not wal.try_append([frame(2, b"two"), frame(3, b"three")])
    assert (wal.logged_lsn, wal.files()[-1].last_lsn) == (1, 1)
    disk.is_full = False
    assert wal.try_append([frame(2, b"again")])
    wal.close()
    assert contents(scanned(disk)) == [b"one", b"again"]


def test_a_log_that_reserves_begins_on_a_full_disk_with_the_spare_of_the_process_before() -> None:
    disk = FaultDisk("/data")
    wal = reserving(disk)
    wal.append([frame(1, b"one")])
    wal.prepare_next()
    disk = disk.kill()
    disk.is_full = True
    wal = reserving(disk)
    assert wal.has_spare
    wal.append([frame(2, b"two")])
    wal.close()
    assert contents(scanned(disk)) == [b"one", b"two"]


# Files that are not written any more, while another process writes the newest one.


def test_closed_files_are_verified_and_the_newest_one_is_left_out() -> None:
    disk = FaultDisk("/data")
    filled(disk, 30)
    files = [f"{WAL}/{name}" for name in disk.listdir(WAL) if name.endswith(".wal")]
    assert len(files) > 3
    assert list(Wal(disk, WAL).verify_closed()) == []
    disk.flip(files[-1], HEADER_BYTES + 20)
    assert list(Wal(disk, WAL).verify_closed()) == [], "it is being written"
    disk.flip(files[1], HEADER_BYTES + 20)
    (damage,) = Wal(disk, WAL).verify_closed()
    assert (damage.path, damage.offset) == (files[1], HEADER_BYTES)
    disk.flip(files[1], HEADER_BYTES + 20)
    disk.flip(files[-1], 5)
    (damage,) = Wal(disk, WAL).verify_closed()
    assert (damage.path, damage.offset) == (files[-1], 0)


def test_a_file_that_is_released_while_it_is_verified_is_passed_over() -> None:
    disk = FaultDisk("/data")
    filled(disk, 30)
    real = disk.read_all

    def read_all(path: str) -> bytes:
        if path == FILE_1 and disk.exists(path):
            disk.unlink(path)
        return real(path)

    disk.read_all = read_all  # type: ignore[method-assign]
    assert list(Wal(disk, WAL).verify_closed()) == []


def test_a_file_that_is_filled_while_it_is_looked_at_is_whole(tmp_path: Path) -> None:
    class Busy(Disk):
        def read_all(self, path: str) -> bytes:
            read = super().read_all(path)
            for lsn in range(2, 20):
                wal.append([(7, 1, lsn, [bytes(100)])])
            return read

    disk, directory = Busy(), f"{tmp_path}/wal"
    wal = opened(disk, directory)
    wal.prepare_next()
    wal.append([(7, 1, 1, [b"one"])])
    [found] = frames_of(disk, f"{directory}/000000000001.wal")
    assert isinstance(found, Frame) and found.lsn == 1
    assert wal.rotations > 1, "the next one has begun meanwhile"
