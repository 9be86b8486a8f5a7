"""Goal: a cold store belongs to one server, and what two servers keep in one place is kept apart.

Method: claims from many threads at once, of a folder and of an S3 server; segments of two servers whose boxes
have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shard.storage.cold import ColdDamaged, ColdStore, ColdUnavailable, FolderCold, open_cold, ownership
from shard.storage.cold.ownership import MARK, OwnedCold, Owner
from shard.storage.files import Disk
from shard.storage.segments.store import Name, SegmentStore
from tests.support.objectstore import Bucket, bucket, object_server
from tests.support.segments import a_batch

__all__ = ["bucket", "object_server"]

OURS, THEIRS = Owner("1", "here", "/data"), Owner("2", "there", "/other")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ColdStore]:
    if request.param == "folder":
        yield FolderCold(str(tmp_path), Disk())
    else:
        found: Bucket = request.getfixturevalue("bucket")
        yield open_cold(found.url, Disk())


def test_of_many_servers_that_claim_a_store_at_once_one_gets_it(store: ColdStore) -> None:
    claimers = [Owner(str(number)) for number in range(8)]
    with ThreadPoolExecutor(len(claimers)) as pool:
        found = set(pool.map(lambda owner: ownership.claim(store, owner), claimers))
    assert len(found) == 1 and ownership.read_owner(store) in claimers
    assert list(store.names()) == [MARK]


def test_a_create_never_replaces_what_is_there(store: ColdStore) -> None:
    assert store.create("a/b.json", b"first") and not store.create("a/b.json", b"second")
    assert store.read("a/b.json", 0, 5) == b"first"


def test_a_server_whose_store_was_taken_over_changes_nothing_there_any_more(store: ColdStore) -> None:
    now = 0.0
    ours = OwnedCold(store, OURS, clock=lambda: now)
    assert ours.create("a/b.json", b"ours")
    ownership.take_over(store, THEIRS)
    now += ownership.CHECK_S
    for change in (
        lambda: ours.delete("a/b.json"),
        lambda: ours.put("a/b.json", [b"x"], size=1, checksum=0),
        lambda: ours.create("a/c.json", b"x"),
    ):
        with pytest.raises(ColdUnavailable, match=r"belongs to server 2 .*/other on host there.*takeover"):
            change()
    assert ours.read("a/b.json", 0, 4) == b"ours"
    ownership.take_over(store, OURS)
    ours.delete("a/b.json")
    assert ours.size("a/b.json") is None


def test_a_mark_that_cannot_be_read_belongs_to_nobody_until_it_is_taken_over(store: ColdStore) -> None:
    store.create(MARK, b"{}")
    with pytest.raises(ColdDamaged):
        ownership.claim(store, OURS)
    ownership.take_over(store, OURS)
    assert ownership.claim(store, THEIRS) == OURS


# -- segments


def moved(cold: FolderCold, directory: Path, server: str, text: str) -> tuple[SegmentStore, Name]:
    store = SegmentStore(Disk(), str(directory), cold, server=server)
    name = Name.of(store.write(7, 1, [a_batch(1, data=f'"{text}"'.encode())]))
    store.copy_to_cold(name)
    store.remove_local(name)
    return store, name


def texts(store: SegmentStore, name: Name) -> list[bytes]:
    return [bytes(batch.to_parts()[1]) for batch in store.read_all(name)]


def test_segments_of_two_servers_with_the_same_numbers_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    cold = FolderCold(str(tmp_path / "cold"), Disk())
    ours, name = moved(cold, tmp_path / "ours", "1", "ours")
    theirs, same = moved(cold, tmp_path / "theirs", "2", "theirs")
    assert name == same
    assert [b"ours" in text for text in texts(ours, name)] == [True]
    assert [b"theirs" in text for text in texts(theirs, name)] == [True]
    theirs.remove_unnamed(set())
    assert [b"ours" in text for text in texts(ours, name)] == [True]


def test_segments_that_were_moved_before_names_held_the_server_are_read_and_dropped(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    cold = FolderCold(str(tmp_path / "cold"), Disk())
    _, name = moved(cold, tmp_path / "ours", "", "old")
    assert list(cold.names()) == [f"segments/{name.file}"]
    store = SegmentStore(Disk(), str(tmp_path / "ours"), cold, server="1")
    assert [b"old" in text for text in texts(store, name)] == [True]
    store.remove_unnamed(set())
    assert list(cold.names()) == []
