"""Goal: a shard knows when the page cache of its last life may be gone.

Method: the file system of this machine, and a `/sys` of our own, in which a file system is mounted anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from shard.recovery import page_cache
from shard.recovery.page_cache import page_cache_id
from shard.storage.files import Disk


def mounted(system: Path, folder: Path, kind: str = "ext4") -> Path:
    """What the kernel shows of the file system of a folder, as if its device were called sda1."""
    device = os.stat(folder).st_dev
    numbers = system / "dev" / "block"
    numbers.mkdir(parents=True)
    (system / "devices" / "sda1").mkdir(parents=True)
    (numbers / f"{os.major(device)}:{os.minor(device)}").symlink_to(system / "devices" / "sda1")
    made = system / "fs" / kind / "sda1"
    made.mkdir(parents=True)
    return made


def test_a_life_is_another_one_when_its_file_system_was_mounted_anew(tmp_path: Path) -> None:
    system = tmp_path / "sys"
    made = mounted(system, tmp_path)
    (tmp_path / "inner").mkdir()
    before = page_cache_id(str(tmp_path), system=str(system))
    assert before == page_cache_id(str(tmp_path / "inner"), system=str(system)), "one page cache"
    made.rename(tmp_path / "gone")  # so that its inode is not given again
    made.mkdir()
    assert page_cache_id(str(tmp_path), system=str(system)) != before


def test_a_life_is_the_same_one_as_long_as_nothing_was_mounted(tmp_path: Path) -> None:
    assert page_cache_id(str(tmp_path)) == page_cache_id(str(tmp_path))
    nowhere = str(tmp_path / "no-such-system")  # as with file systems that /sys/fs does not have
    assert page_cache_id(str(tmp_path), system=nowhere) == page_cache_id(str(tmp_path), system=nowhere)
    assert page_cache_id("/proc", system=nowhere) != page_cache_id(str(tmp_path), system=nowhere)


def test_a_failure_is_known_until_the_next_life_has_begun(tmp_path: Path) -> None:
    disk, folder = Disk(), str(tmp_path)
    page_cache.clear_failure(disk, folder)
    assert not page_cache.has_failed(disk, folder)
    page_cache.record_failure(disk, folder)
    assert page_cache.has_failed(disk, folder)
    page_cache.clear_failure(disk, folder)
    assert not page_cache.has_failed(disk, folder)
    page_cache.record_failure(disk, f"{folder}/missing")  # the disk fails at this too
