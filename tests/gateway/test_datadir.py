"""A data directory is used by one server, with the shards it was made for, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.datadir import CannotServe, DataDir, Holder, write_atomically
from gateway.placement import even


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDir]:
    found = DataDir(tmp_path / "some" / "data")
    yield found
    found.close()


def placement_of(directory: DataDir, shards_wanted: int = 0) -> int:
    return directory.placement(shards_wanted=shards_wanted, shards_default=5, now_ms=1).shards


def test_a_new_directory_gets_the_shards_wanted_and_keeps_them(directory: DataDir) -> None:
    assert placement_of(directory, shards_wanted=3) == 3
    assert placement_of(directory) == 3
    assert placement_of(directory, shards_wanted=3) == 3
    with pytest.raises(CannotServe, match=r"STREAMS_SHARDS is 4, but .* was made with 3 shards"):
        placement_of(directory, shards_wanted=4)


def test_a_new_directory_gets_the_default_when_nothing_was_wanted(directory: DataDir) -> None:
    assert placement_of(directory) == 5
    manifest = json.loads((directory.path / "manifest.json").read_bytes())
    assert manifest == {"format": 1, **json.loads(even(5).to_json()), "created_ms": 1}


def test_data_without_its_manifest_is_not_taken_for_a_new_server(directory: DataDir) -> None:
    (directory.path / "shard-00").mkdir()
    with pytest.raises(CannotServe, match=r"manifest.json is missing, but shard-00 is there"):
        placement_of(directory)


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
    ],
)
def test_a_damaged_manifest_is_refused_and_left_as_it_is(directory: DataDir, content: str) -> None:
    (directory.path / "manifest.json").write_text(content)
    with pytest.raises(CannotServe, match=r"manifest.json is damaged"):
        placement_of(directory)
    assert (directory.path / "manifest.json").read_text() == content


def test_a_manifest_of_a_later_version_is_refused(directory: DataDir) -> None:
    (directory.path / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(CannotServe, match="has format 2, and this version knows 1"):
        placement_of(directory)


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
        write_atomically(tmp_path / "x.json", {"version": version}, durable=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_bytes()) == {"version": 2}
