"""Goal: a bad sector is damage like any other: reported with its file, left out by a repair, nothing else.

Method: real folders on a disk that cannot give back one page of one file.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shard.offline.repair import repair_shard
from shard.offline.verify import Scope, verify_shard
from shard.storage.files import PAGE_BYTES, Corrupt, Disk, ExaminedDisk
from shard.storage.segments.store import SegmentStore
from shard.transfer.shard_folders import read_shard
from tests.support.folders import contents, write_folder
from tests.support.machines import Driver

PAD = "x" * 3000


class Worn:
    """Of one file, one page cannot be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, path: Path, page: int, code: int = errno.EIO) -> ExaminedDisk:
        inode, bad, pread = path.stat().st_ino, page * PAGE_BYTES, os.pread

        def read(handle: int, length: int, offset: int) -> bytes:
            if offset < bad + PAGE_BYTES and bad < offset + length and os.fstat(handle).st_ino == inode:
                raise OSError(code, os.strerror(code))
            return pread(handle, length, offset)

        self._monkeypatch.setattr(os, "pread", read)
        return ExaminedDisk()


@pytest.fixture
def worn(monkeypatch: pytest.MonkeyPatch) -> Worn:
    return Worn(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records 1..8 in a segment of four pages and more, 9..16 in the log, a page nearly each."""
    driver = Driver()
    driver.put(durability="fsync")
    for number in range(16):
        driver.append(f"{number}{PAD}")
        if number == 7:
            driver.seal()
    driver.stop()
    write_folder(Disk(), f"{tmp_path}/shard", driver, snapshots=(0.4, 0.9))
    return tmp_path / "shard"


def problems(disk: Disk, folder: Path) -> list[str]:
    store = SegmentStore(disk, f"{folder}/segments")
    return [
        each.path
        for each in verify_shard(disk, Scope(str(folder), str(folder), store, lambda _: True)).problems
    ]


def repaired(disk: Disk, folder: Path) -> tuple[list[tuple[int, int]], set[int]]:
    """(lost seqs, live seqs)."""
    target = f"{folder}-new"
    done = repair_shard(disk, str(folder), target, shard=0, boot_id="boot", now_ms=5_000)
    live = set(contents(Disk(), target)["b"]["live"])
    return [(loss.first_seq, loss.last_seq) for loss in done.losses], live


def test_a_segment_with_a_bad_sector_loses_the_batches_in_it(folder: Path, worn: Worn) -> None:
    (path,) = folder.glob("segments/*/*.seg")
    disk = worn(path, 2)
    assert set(problems(disk, folder)) == {str(path)}
    lost, live = repaired(disk, folder)
    gone = {seq for first, last in lost for seq in range(first, last + 1)}
    assert 1 <= len(gone) <= 3 and live == set(range(1, 17)) - gone


def test_a_log_with_a_bad_sector_is_refused_and_repaired(folder: Path, worn: Worn) -> None:
    (path,) = (path for path in folder.glob("wal/*.wal") if f'"14{PAD}'.encode() in path.read_bytes())
    page = path.read_bytes().index(f'"14{PAD}'.encode()) // PAGE_BYTES
    disk = worn(path, page)
    with pytest.raises(Corrupt, match="the disk cannot read it") as refused:
        read_shard(disk, str(folder))
    assert (refused.value.path, refused.value.offset) == (str(path), page * PAGE_BYTES)
    assert problems(disk, folder) == [str(path)]
    lost, live = repaired(disk, folder)
    gone = {seq for first, last in lost for seq in range(first, last + 1)}
    assert 15 in gone and len(gone) <= 3 and live == set(range(1, 17)) - gone


def test_a_snapshot_with_a_bad_sector_makes_place_for_the_one_before(folder: Path, worn: Worn) -> None:
    newest = sorted(folder.glob("snapshot/*.snap"))[-1]
    disk = worn(newest, 0)
    assert problems(disk, folder) == [str(newest)]
    assert set(read_shard(disk, str(folder)).boxes) == {"b"}
    assert repaired(disk, folder) == ([], set(range(1, 17)))


def test_a_server_is_told_the_error_itself_and_other_errors_are_no_damage(folder: Path, worn: Worn) -> None:
    (path, *_) = folder.glob("wal/*.wal")
    worn(path, 0)
    with pytest.raises(OSError, match="Input/output error"):
        read_shard(Disk(), str(folder))
    with pytest.raises(OSError, match="Too many open files"):
        read_shard(worn(path, 0, errno.EMFILE), str(folder))
