"""A data directory is used by one server, with the folders its manifest names, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.shards.placement import even, resize
from gateway.supervise.data_dir import CannotServe, DataDir, Holder, write_atomically
from gateway.supervise.manifest import Manifest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDir]:
    found = DataDir(tmp_path / "some" / "data")
    yield found
    found.close()


def opened(directory: DataDir, shards: int = 5) -> Manifest:
    return directory.open(shards_default=shards, now_ms=1)


def test_a_new_directory_gets_the_shards_wanted_and_keeps_them(directory: DataDir) -> None:
    assert opened(directory, 3).shards == 3
    assert opened(directory, 4).shards == 3
    assert opened(directory).directories == ("shard-00", "shard-01", "shard-02")
    assert [path.name for path in sorted(directory.path.glob("shard-*"))] == list(
        opened(directory).directories
    )
    assert (directory.path / "manifest.copy.json").read_bytes() == opened(directory).encode()


def test_a_manifest_of_format_one_is_read_and_written_anew(directory: DataDir) -> None:
    (directory.path / "manifest.json").write_bytes((GOLDEN / "manifest-v1.json").read_bytes())
    for name in ("shard-00", "shard-01"):
        (directory.path / name).mkdir()
    found = opened(directory)
    assert (found.placement, found.created_ms) == (even(2), 1_700_000_000_000)
    assert found.directories == ("shard-00", "shard-01")
    for name in ("manifest.json", "manifest.copy.json"):
        assert Manifest.decode((directory.path / name).read_bytes()) == found
        assert (directory.path / name).read_bytes() == found.encode()


def test_data_without_its_manifest_is_not_taken_for_a_new_server(directory: DataDir) -> None:
    (directory.path / "shard-00").mkdir()
    (directory.path / "shard-00" / "wal").mkdir()
    with pytest.raises(CannotServe, match=r"manifest.json is missing, but shard-00 exists"):
        opened(directory)


def test_folders_of_a_start_that_was_cut_short_are_no_data(directory: DataDir) -> None:
    (directory.path / "shard-00").mkdir()
    assert opened(directory, 2).shards == 2


def test_a_folder_that_the_manifest_names_and_that_is_missing_is_refused(directory: DataDir) -> None:
    opened(directory, 3)
    (directory.path / "shard-01").rmdir()
    with pytest.raises(CannotServe, match=r"shard-01 is missing, and .*manifest.json names it"):
        opened(directory)
    assert not (directory.path / "shard-01").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "shards": 2, "slots": [[0, 5, 0]], "version": 1}',
        '{"format": 1, "shards": 1, "slots": [[0, 4096, 1]], "version": 1}',
        '{"format": 2, "shards": 1, "slots": [[0, 4096, 0]], "version": 1}',
    ],
)
def test_a_damaged_manifest_is_refused_and_left_as_it_is(directory: DataDir, content: str) -> None:
    (directory.path / "manifest.json").write_text(content)
    with pytest.raises(CannotServe, match=r"manifest.json is damaged at byte \d+: .*streams repair"):
        opened(directory)
    assert (directory.path / "manifest.json").read_text() == content


def test_a_manifest_of_a_later_version_is_refused(directory: DataDir) -> None:
    (directory.path / "manifest.json").write_text('{"format": 4}')
    with pytest.raises(CannotServe, match="has format 4, and this version knows 3"):
        opened(directory)


def test_a_restore_that_did_not_end_is_not_served(directory: DataDir) -> None:
    directory.commit(replace(opened(directory, 2), is_restoring=True))
    with pytest.raises(CannotServe, match="streams restore"):
        opened(directory)


# -- changes of folders


def with_folders(directory: DataDir, *names: str) -> None:
    for name in names:
        (directory.path / name / "wal").mkdir(parents=True)
        (directory.path / name / "wal" / "1.wal").write_bytes(b"x")


def folders_in(directory: DataDir) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir() if path.is_dir())


def test_what_an_unfinished_change_has_built_is_removed_and_nothing_else(directory: DataDir) -> None:
    old = opened(directory, 2)
    with_folders(directory, "shard-00-v2", "shard-00-v7", "shard-00.mine")
    directory.commit(replace(old, building=("shard-00-v2", "shard-01-v2")))
    assert opened(directory) == old
    assert folders_in(directory) == ["shard-00", "shard-00-v7", "shard-00.mine", "shard-01"]
    assert directory.read() == old


def test_what_a_finished_change_has_replaced_is_removed_after_the_copy_says_so(directory: DataDir) -> None:
    old = opened(directory, 2)
    with_folders(directory, "shard-00-v2")
    new = replace(
        old, placement=resize(old.placement, 1), directories=("shard-00-v2",), dropping=old.directories
    )
    directory.commit(new)
    assert Manifest.decode((directory.path / "manifest.copy.json").read_bytes()) == old
    assert opened(directory) == new.without_intents()
    assert folders_in(directory) == ["shard-00-v2"]
    assert (directory.path / "manifest.copy.json").read_bytes() == new.without_intents().encode()
    assert (directory.path / "manifest.json").read_bytes() == new.without_intents().encode()


def test_a_left_over_that_cannot_be_removed_is_named(directory: DataDir) -> None:
    old = opened(directory, 1)
    (directory.path / "shard-00-v2").write_bytes(b"a file where a folder was")
    directory.commit(replace(old, building=("shard-00-v2",)))
    with pytest.raises(CannotServe, match=r"shard-00-v2 cannot be removed"):
        opened(directory)


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotServe, match="STREAMS_DATA_DIR"):
        DataDir(tmp_path / "file" / "data")


def test_the_lock_is_held_until_the_last_process_that_inherited_it_is_gone(directory: DataDir) -> None:
    assert directory.try_lock()
    heir = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=(directory.lock_fd,),
    )
    held = os.open(directory.path / "LOCK", os.O_RDWR)
    os.close(os.dup(directory.lock_fd))
    os.dup2(os.open(os.devnull, os.O_RDONLY), directory.lock_fd)
    with pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    heir.communicate()
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)


def test_the_lock_says_who_holds_it(directory: DataDir) -> None:
    assert directory.holder() == Holder(0, "", "")
    directory.describe_holder(url="http://127.0.0.1:" + "9" * 40, now_ms=1)
    directory.describe_holder(url="http://127.0.0.1:4000", now_ms=1)
    holder = directory.holder()
    assert (holder.pid, holder.url) == (os.getpid(), "http://127.0.0.1:4000")
    assert str(holder) == f"process {os.getpid()} (http://127.0.0.1:4000)"


def test_a_holder_counts_as_alive_only_when_that_is_sure(directory: DataDir) -> None:
    directory.describe_holder(url="", now_ms=1)
    ours = directory.holder()
    assert not ours.is_alive()
    assert Holder(os.getppid(), ours.host, "").is_alive()
    assert not Holder(os.getppid(), "another-machine", "").is_alive()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not Holder(ended.pid, ours.host, "").is_alive()


def test_an_atomic_write_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    for version in (1, 2):
        write_atomically(tmp_path / "x.json", {"version": version})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_bytes()) == {"version": 2}


@pytest.mark.parametrize("name", ["LOCK", ".manifest.json.new"])
def test_a_link_that_was_planted_in_a_data_directory_is_not_written_through(
    tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(victim)
    try:
        directory = DataDir(tmp_path / "data")
        directory.describe_holder(url="", now_ms=1)
        directory.open(shards_default=1, now_ms=1)
    except CannotServe as refused:
        assert name == "LOCK" and "cannot be used" in str(refused)
    assert victim.read_text() == "as it was"


@pytest.mark.parametrize("first", ["missing", "damaged"])
@pytest.mark.parametrize("copy", ["missing", "damaged", "whole"])
def test_a_server_without_its_manifest_advises_what_works(tmp_path: Path, first: str, copy: str) -> None:
    directory = DataDir(tmp_path)
    directory.open(shards_default=1, now_ms=1)
    (tmp_path / "shard-00" / "wal").mkdir()
    for path, state in ((directory.manifest_path, first), (directory.copy_path, copy)):
        if state == "missing":
            path.unlink()
        elif state == "damaged":
            path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CannotServe) as refused:
        directory.open(shards_default=1, now_ms=1)
    advice = str(refused.value)
    assert "streams restore BACKUPS --data-dir NEW" in advice
    assert ("Run `streams repair`" in advice) == (copy == "whole")
    assert ("`streams repair` cannot help" in advice) == (copy != "whole")
