"""Goal: `Disk` does what its docstrings say, and the fault disk is a faithful twin of it.

Method: every behaviour is asserted on both, by the same test. What only a lying disk can do (crash, kill,
fail) is asserted on the fault disk alone, below.
"""

from __future__ import annotations

import errno
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shard.storage.files import BUFFERS_PER_CALL, Disk, DiskLike, parent_of, remove_tree
from tests.support.faultdisk import Crashed, FaultDisk

Place = tuple[DiskLike, str]


@pytest.fixture(params=["disk", "faultdisk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return (Disk(), str(tmp_path)) if request.param == "disk" else (FaultDisk("/data"), "/data")


def test_what_is_written_is_read_back_from_any_offset(place: Place) -> None:
    disk, root = place
    handle = disk.create(f"{root}/a")
    assert disk.pwritev(handle, [b"hello", bytearray(b" "), memoryview(b"world")], 0) == 11
    assert disk.pread(handle, 5, 6) == b"world"
    assert disk.pread(handle, 100, 6) == b"world"
    assert disk.pread(handle, 10, 11) == b""
    disk.pwritev(handle, [b"W"], 6)
    disk.fdatasync(handle)
    disk.fsync(handle)
    disk.close(handle)
    assert disk.read_all(f"{root}/a") == b"hello World"
    assert disk.size(f"{root}/a") == 11


def test_more_buffers_than_one_call_takes_are_all_written(place: Place) -> None:
    disk, root = place
    handle = disk.create(f"{root}/a")
    buffers = [b"%05d" % number for number in range(2 * BUFFERS_PER_CALL + 7)]
    assert disk.pwritev(handle, buffers, 3) == 5 * len(buffers)
    assert disk.read_all(f"{root}/a") == b"\0\0\0" + b"".join(buffers)
    disk.close(handle)


def test_a_file_with_two_names_lives_as_long_as_one_of_them(place: Place) -> None:
    disk, root = place
    disk.mkdir(f"{root}/d")
    handle = disk.create(f"{root}/a")
    disk.pwritev(handle, [b"abc"], 0)
    disk.link(f"{root}/a", f"{root}/d/b")
    disk.pwritev(handle, [b"X"], 1)
    disk.fsync(handle)
    disk.close(handle)
    with pytest.raises(FileExistsError):
        disk.link(f"{root}/a", f"{root}/d/b")
    with pytest.raises(FileNotFoundError):
        disk.link(f"{root}/missing", f"{root}/d/c")
    disk.unlink(f"{root}/a")
    assert disk.read_all(f"{root}/d/b") == b"aXc"


def test_a_tree_is_removed_whole_and_a_directory_only_when_it_is_empty(place: Place) -> None:
    disk, root = place
    for path in ("t", "t/u", "t/u/v"):
        disk.mkdir(f"{root}/{path}")
        disk.close(disk.create(f"{root}/{path}/file"))
    assert disk.is_dir(f"{root}/t/u") and not disk.is_dir(f"{root}/t/file") and not disk.is_dir(f"{root}/x")
    with pytest.raises(OSError) as caught:
        disk.rmdir(f"{root}/t/u")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileNotFoundError):
        disk.rmdir(f"{root}/x")
    remove_tree(disk, f"{root}/t")
    remove_tree(disk, f"{root}/t")
    if isinstance(disk, FaultDisk):
        disk = disk.crash(random.Random(1))
    assert disk.listdir(root) == []


def test_a_disk_says_how_much_is_free(place: Place) -> None:
    disk, root = place
    assert disk.free_bytes(root) > 0


def test_truncate_cuts_and_extends_with_zeros(place: Place) -> None:
    disk, root = place
    handle = disk.create(f"{root}/a")
    disk.pwritev(handle, [b"abcdef"], 0)
    disk.truncate(handle, 3)
    disk.truncate(handle, 5)
    assert disk.read_all(f"{root}/a") == b"abc\0\0"
    disk.close(handle)


def test_create_empties_a_file_that_is_there(place: Place) -> None:
    disk, root = place
    handle = disk.create(f"{root}/a")
    disk.pwritev(handle, [b"old"], 0)
    disk.close(handle)
    disk.close(disk.create(f"{root}/a"))
    assert disk.read_all(f"{root}/a") == b""


def test_open_reads_and_writes_only_as_asked(place: Place) -> None:
    disk, root = place
    disk.close(disk.create(f"{root}/a"))
    handle = disk.open(f"{root}/a", writable=False)
    with pytest.raises(OSError) as caught:
        disk.pwritev(handle, [b"x"], 0)
    assert caught.value.errno == errno.EBADF
    disk.close(handle)
    handle = disk.open(f"{root}/a", writable=True)
    disk.pwritev(handle, [b"x"], 0)
    disk.close(handle)
    assert disk.read_all(f"{root}/a") == b"x"


def test_rename_takes_the_place_of_another_file(place: Place) -> None:
    disk, root = place
    for name, content in (("a", b"new"), ("b", b"old")):
        handle = disk.create(f"{root}/{name}")
        disk.pwritev(handle, [content], 0)
        disk.close(handle)
    disk.rename(f"{root}/a", f"{root}/b")
    disk.fsync_dir(root)
    assert disk.listdir(root) == ["b"]
    assert disk.read_all(f"{root}/b") == b"new"


def test_a_file_that_was_unlinked_or_renamed_is_still_there_for_its_handle(place: Place) -> None:
    disk, root = place
    handle = disk.create(f"{root}/a")
    disk.pwritev(handle, [b"one"], 0)
    disk.rename(f"{root}/a", f"{root}/b")
    disk.pwritev(handle, [b"two"], 3)
    disk.unlink(f"{root}/b")
    disk.fdatasync(handle)
    assert disk.pread(handle, 10, 0) == b"onetwo"
    assert not disk.exists(f"{root}/a") and not disk.exists(f"{root}/b")
    disk.close(handle)


def test_directories_are_made_once_and_list_their_own_names_in_order(place: Place) -> None:
    disk, root = place
    disk.mkdir(f"{root}/d")
    disk.mkdir(f"{root}/d")
    disk.mkdir(f"{root}/d/below")
    for name in ("2", "10", "1"):
        disk.close(disk.create(f"{root}/d/{name}"))
    disk.fsync_dir(f"{root}/d")
    disk.fsync_dir(parent_of(f"{root}/d"))
    assert disk.listdir(f"{root}/d") == ["1", "10", "2", "below"]
    assert disk.exists(f"{root}/d") and disk.exists(f"{root}/d/10")


@pytest.mark.parametrize("call", ["open", "read_all", "unlink", "size", "rename", "listdir", "fsync_dir"])
def test_what_is_not_there_is_reported_as_not_there(place: Place, call: str) -> None:
    disk, root = place
    path = f"{root}/missing"
    more: dict[str, dict[str, object]] = {"open": {"writable": True}, "rename": {"new": f"{root}/b"}}
    with pytest.raises(FileNotFoundError):
        getattr(disk, call)(path, **more.get(call, {}))


def test_nothing_is_made_in_a_directory_that_is_not_there(place: Place) -> None:
    disk, root = place
    for make in (disk.create, disk.mkdir):
        with pytest.raises(FileNotFoundError):
            make(f"{root}/missing/a")


def test_rmdir_removes_a_directory_that_is_empty_and_no_other(place: Place) -> None:
    disk, root = place
    disk.mkdir(f"{root}/d")
    disk.close(disk.create(f"{root}/d/a"))
    with pytest.raises(OSError) as caught:
        disk.rmdir(f"{root}/d")
    assert caught.value.errno == errno.ENOTEMPTY
    disk.unlink(f"{root}/d/a")
    disk.rmdir(f"{root}/d")
    assert disk.listdir(root) == []
    with pytest.raises(FileNotFoundError):
        disk.rmdir(f"{root}/d")


def test_mkdir_refuses_the_name_of_a_file(place: Place) -> None:
    disk, root = place
    disk.close(disk.create(f"{root}/a"))
    with pytest.raises(FileExistsError):
        disk.mkdir(f"{root}/a")


def test_a_lock_has_one_holder_until_it_is_closed(place: Place) -> None:
    disk, root = place
    handle = disk.lock(f"{root}/LOCK")
    with pytest.raises(BlockingIOError):
        disk.lock(f"{root}/LOCK")
    disk.close(handle)
    disk.close(disk.lock(f"{root}/LOCK"))


@contextmanager
def small_files() -> Iterator[None]:
    """Around the one write alone: the limit holds for every file of the process, a log of it included."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_is_cut_short_goes_on_until_it_is_whole_or_fails(tmp_path: Path) -> None:
    disk = Disk()
    handle = disk.create(f"{tmp_path}/a")
    with pytest.raises(OSError) as caught, small_files():
        disk.pwritev(handle, [b"abcd", b"efgh", b"ijkl"], 0)
    assert caught.value.errno == errno.EFBIG
    assert disk.read_all(f"{tmp_path}/a") == b"abcdefghij"
    disk.close(handle)


@pytest.mark.parametrize("skip", range(13))
def test_the_rest_of_a_short_write_lands_where_it_belongs(tmp_path: Path, skip: int) -> None:
    disk = Disk()
    handle = disk.create(f"{tmp_path}/a")
    disk.pwritev(handle, [b"-" * (7 + skip)], 0)
    assert disk._write_rest(handle, [b"abcd", b"", b"efghi", b"jkl"], skip, 7) == 12 - skip
    assert disk.read_all(f"{tmp_path}/a") == b"-" * (7 + skip) + b"abcdefghijkl"[skip:]
    disk.close(handle)


# The fault disk alone.


def written(disk: FaultDisk, path: str, content: bytes) -> int:
    handle = disk.create(path)
    disk.pwritev(handle, [content], 0)
    return handle


def crashes(disk: FaultDisk) -> list[FaultDisk]:
    return [disk.crash(random.Random(seed)) for seed in range(200)]


def test_a_crash_keeps_what_was_synced_under_a_name_that_was_synced() -> None:
    disk = FaultDisk("/data")
    disk.fsync(written(disk, "/data/a", b"x" * 2000))
    disk.fsync_dir("/data")
    assert all(after.read_all("/data/a") == b"x" * 2000 for after in crashes(disk))


def test_a_crash_may_lose_keep_or_tear_what_was_not_synced() -> None:
    disk = FaultDisk("/data")
    handle = written(disk, "/data/a", b"")
    disk.fsync_dir("/data")
    disk.pwritev(handle, [b"x" * 2000], 0)
    found = {after.read_all("/data/a") for after in crashes(disk)}
    assert {b"", b"x" * 2000} < found
    assert any(len(content) == 2000 and b"\0" in content for content in found), "sectors are lost singly"
    assert any(0 < len(content) < 2000 for content in found), "writes are cut"


def test_a_crash_may_lose_the_name_of_a_file_whose_bytes_were_synced() -> None:
    disk = FaultDisk("/data")
    disk.fsync(written(disk, "/data/a", b"x"))
    assert {tuple(after.listdir("/data")) for after in crashes(disk)} == {(), ("a",)}


def test_a_crash_may_undo_a_rename_but_never_halve_it() -> None:
    disk = FaultDisk("/data")
    disk.fsync(written(disk, "/data/a", b"x"))
    disk.fsync_dir("/data")
    disk.rename("/data/a", "/data/b")
    assert {tuple(after.listdir("/data")) for after in crashes(disk)} == {("a",), ("b",)}


def test_a_crash_may_lose_a_directory_with_all_that_is_in_it() -> None:
    disk = FaultDisk("/data")
    disk.mkdir("/data/d")
    disk.fsync(written(disk, "/data/d/a", b"x"))
    disk.fsync_dir("/data/d")
    assert {after.exists("/data/d/a") for after in crashes(disk)} == {True, False}


def test_the_same_seed_gives_the_same_crash() -> None:
    disk = FaultDisk("/data")
    handle = written(disk, "/data/a", b"")
    disk.fsync_dir("/data")
    for number in range(5):
        disk.pwritev(handle, [bytes([number]) * 1000], number * 700)
    for one, other in zip(crashes(disk), crashes(disk), strict=True):
        assert one.read_all("/data/a") == other.read_all("/data/a")


def test_a_killed_process_leaves_all_it_wrote_and_none_of_it_more_durable() -> None:
    disk = FaultDisk("/data")
    written(disk, "/data/a", b"x" * 100)
    assert {later.exists("/data/a") for later in crashes(disk.kill())} == {True, False}
    after = disk.kill()
    assert after.read_all("/data/a") == b"x" * 100
    handle = after.open("/data/a", writable=True)
    after.fsync(handle)
    after.fsync_dir("/data")
    assert all(later.read_all("/data/a") == b"x" * 100 for later in crashes(after))


def test_what_a_failed_sync_left_is_not_saved_by_a_later_one() -> None:
    disk = FaultDisk("/data")
    handle = written(disk, "/data/a", b"x" * 100)
    disk.fsync_dir("/data")
    disk.fail_next("fdatasync", OSError(errno.EIO, "failed"))
    with pytest.raises(OSError):
        disk.fdatasync(handle)
    disk.fdatasync(handle)
    assert b"" in {after.read_all("/data/a") for after in crashes(disk)}


def test_a_failed_operation_is_found_by_its_number_and_may_be_half_done() -> None:
    disk = FaultDisk("/data")
    disk.fail_at(1, OSError(errno.ENOSPC, "full"))
    handle = disk.create("/data/a")
    with pytest.raises(OSError) as caught:
        disk.pwritev(handle, [b"abcd"], 0)
    assert caught.value.errno == errno.ENOSPC
    assert disk.read_all("/data/a") == b"ab"


@pytest.mark.parametrize(("moment", "left"), [("before", b""), ("midway", b"ab"), ("after", b"abcd")])
def test_a_crash_at_an_operation_stops_the_disk_there(moment: str, left: bytes) -> None:
    disk = FaultDisk("/data")
    disk.crash_at(1, moment)
    handle = disk.create("/data/a")
    with pytest.raises(Crashed):
        disk.pwritev(handle, [b"abcd"], 0)
    with pytest.raises(Crashed):
        disk.fsync(handle)
    assert disk.kill().read_all("/data/a") == left
