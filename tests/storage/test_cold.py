"""Goal: a cold store gives back what was put there or says why not, whichever kind of store it is.

Method: the same tests over a folder on the real disk, over a folder on the fault disk and over an S3 server
on loopback. Objects are damaged through the back door. What only one kind can do stands at the end, and what
only the network can do in `test_cold_faults.py`.
"""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xxhash import xxh3_64_intdigest

from shard.storage.cold import (
    ColdConfigError,
    ColdDamaged,
    ColdMissing,
    ColdSource,
    ColdStore,
    ColdUnavailable,
    FolderCold,
    measure,
    object_store,
    open_cold,
)
from shard.storage.cold.object_store import PIECE_BYTES, ObjectCold
from shard.storage.files import Corrupt, Disk, DiskLike
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep

if TYPE_CHECKING:
    from tests.support.objectstore import Bucket

pytest_plugins = ["tests.support.objectstore"]

NAME = "shard-00/segments/7/00000000000000000001-000000000012.seg"
CONTENT = random.Random(1).randbytes(300_000)

# fmt: off
BAD_NAMES = [
    "", "/", "a", "a/b", "/a.seg", "a.seg/", "../a.seg", "a/../b.seg", "a//b.seg", "a/.seg", "a..seg",
    "a.b/c.seg", "a b.seg", "a%2f.seg", "ä.seg", "a.seg\n", "a.seg.tmp", "a\\b.seg", f"{'a' * 201}.seg",
    "a/" * 400 + "a.seg",
]
BAD_LOCATIONS = [
    "", "/", "relative/nowhere", "/no/such/folder", "s3:/bucket", "ftp://host/path", "http://host/path",
    "memory:///", "file://host/path", "file:relative", "s3://", "s3:///prefix", "s3://b u/x", "s3://b//x",
    "s3://b/x?y=z", "s3://[/", "az://container/x",
]
# fmt: on


@dataclass
class Place:
    """A store, and the back door to what is in it."""

    store: ColdStore
    overwrite: Callable[[str, bytes], None]
    content: Callable[[str], bytes]


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.fixture(params=["folder", "fault folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return Place(open_cold(bucket.url, Disk()), bucket.put, bucket.get)
    if request.param == "folder":
        return Place(
            open_cold(str(tmp_path), Disk()),
            lambda name, content: write(tmp_path / name, content),
            lambda name: (tmp_path / name).read_bytes(),
        )
    disk = FaultDisk("/data")

    def overwrite(name: str, content: bytes) -> None:
        handle = disk.create(f"/data/{name}")
        disk.pwritev(handle, [content], 0)
        disk.close(handle)

    return Place(open_cold("/data", disk), overwrite, lambda name: disk.peek(f"/data/{name}"))


@pytest.fixture
def store(place: Place) -> ColdStore:
    return place.store


def put(store: ColdStore, name: str = NAME, content: bytes = CONTENT) -> None:
    store.put(name, [content[:1000], content[1000:]], size=len(content), checksum=xxh3_64_intdigest(content))


def verify(store: ColdStore, name: str = NAME, content: bytes = CONTENT) -> None:
    store.verify(name, size=len(content), checksum=xxh3_64_intdigest(content))


# Every kind of store


@pytest.mark.parametrize("size", [0, 1, 300_000, PIECE_BYTES, 20 << 20])
def test_what_was_put_comes_back(place: Place, size: int) -> None:
    content = random.Random(size).randbytes(size)
    put(place.store, content=content)
    assert place.content(NAME) == content
    assert place.store.size(NAME) == size
    verify(place.store, content=content)
    assert place.store.read(NAME, 0, size) == content


def test_a_local_file_is_put_by_its_path(store: ColdStore, tmp_path: Path) -> None:
    disk = store._disk  # type: ignore[attr-defined]
    path = "/data/local.seg" if isinstance(disk, FaultDisk) else f"{tmp_path}/local.seg"
    content = random.Random(3).randbytes(PIECE_BYTES + 12345)
    handle = disk.create(path)
    disk.pwritev(handle, [content], 0)
    disk.close(handle)
    size, checksum = measure(disk, path)
    store.put(NAME, path, size=size, checksum=checksum)
    store.verify(NAME, size=size, checksum=checksum)
    verify(store, content=content)


def test_a_put_can_be_repeated_and_other_content_replaces(store: ColdStore) -> None:
    put(store)
    put(store)
    verify(store)
    put(store, content=b"other")
    assert store.read(NAME, 0, 5) == b"other"
    assert store.size(NAME) == 5


@pytest.mark.parametrize("size", [1000, PIECE_BYTES + 1000])
@pytest.mark.parametrize("wrong", ["size", "checksum"])
def test_a_source_that_is_not_what_was_promised_is_not_stored(
    store: ColdStore, size: int, wrong: str
) -> None:
    content = bytes(size)
    promised = content + b"x" if wrong == "size" else content[:-1] + b"x"
    with pytest.raises(Corrupt, match="not copied"):
        store.put(NAME, [content], size=len(promised), checksum=xxh3_64_intdigest(promised))
    assert store.size(NAME) is None
    assert list(store.names()) == []


def test_a_local_file_that_cannot_be_read_is_no_fault_of_the_store(store: ColdStore) -> None:
    with pytest.raises(FileNotFoundError):
        store.put(NAME, "/data/nowhere.seg", size=10, checksum=0)
    assert store.size(NAME) is None


def test_ranges_are_exact(store: ColdStore) -> None:
    put(store)
    rng = random.Random(4)
    for _ in range(20):
        offset = rng.randrange(len(CONTENT))
        length = rng.randrange(len(CONTENT) - offset + 1)
        assert store.read(NAME, offset, length) == CONTENT[offset : offset + length]
    assert store.read(NAME, len(CONTENT) - 1, 1) == CONTENT[-1:]
    assert store.read(NAME, len(CONTENT), 0) == b""


def test_many_ranges_come_in_the_order_asked(store: ColdStore) -> None:
    content = random.Random(5).randbytes(2 * PIECE_BYTES + 77)
    put(store, content=content)
    ranges = [(len(content) - 9, 9), (0, 5), (3, 0), (2, 4), (600_000, 10), (600_100, 10), (0, 5)]
    ranges.append((5, len(content) - 10))
    parts = store.read_many(NAME, ranges)
    assert parts == [content[offset : offset + length] for offset, length in ranges]
    assert store.read_many(NAME, []) == []


@pytest.mark.parametrize("offset", [len(CONTENT) - 5, len(CONTENT), len(CONTENT) + 5])
def test_a_read_past_the_end_is_damage_and_never_short(store: ColdStore, offset: int) -> None:
    put(store)
    with pytest.raises(ColdDamaged):
        store.read(NAME, offset, 10)
    with pytest.raises(ColdDamaged):
        store.read_many(NAME, [(0, 10), (offset, 10)])


def test_what_is_not_there_is_missing(store: ColdStore) -> None:
    assert store.size(NAME) is None
    assert list(store.names("shard-00/")) == []
    for ask in (
        lambda: store.read(NAME, 0, 1),
        lambda: store.read_many(NAME, [(0, 1), (10, 1)]),
        lambda: verify(store),
    ):
        with pytest.raises(ColdMissing) as caught:
            ask()
        assert caught.value.name == NAME


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x", b"x" * 300_000])
def test_other_bytes_are_damage(place: Place, damaged: bytes) -> None:
    put(place.store)
    place.overwrite(NAME, damaged)
    with pytest.raises(ColdDamaged):
        verify(place.store)
    put(place.store)
    verify(place.store)


def test_a_folder_of_which_nothing_is_left_goes_and_comes_back(tmp_path: Path) -> None:
    store = FolderCold(str(tmp_path), Disk())
    for name in ("a/b/c/1.seg", "a/b/c/2.seg", "a/d/3.seg"):
        put(store, name=name)
    store.delete("a/b/c/1.seg")
    assert (tmp_path / "a/b/c").is_dir()
    store.delete("a/b/c/2.seg")
    store.delete("a/d/3.seg")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"], "others may be about to use the topmost"
    put(store, name="a/b/c/1.seg")
    assert list(store.names()) == ["a/b/c/1.seg"]


def test_a_delete_is_idempotent(store: ColdStore) -> None:
    store.delete(NAME)
    put(store)
    store.delete(NAME)
    store.delete(NAME)
    assert store.size(NAME) is None
    put(store)
    verify(store)


def test_names_are_sorted_and_only_ours(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "NAMES_PER_PAGE", 2)
    names = ["a/b/1.seg", "a/b/2.seg", "a/b-c.seg", "a/b.seg", "a/bb/1.seg", "a/c/d/e.seg", "z.seg"]
    for name in names:
        put(place.store, name, b"x")
    for foreign in ("a/b/3.seg.tmp", "a/b/README", "a/b/with space.seg"):
        place.overwrite(foreign.replace(" ", "%20"), b"x")
    assert list(place.store.names()) == sorted(names)
    assert list(place.store.names("a/b/")) == ["a/b/1.seg", "a/b/2.seg"]
    assert list(place.store.names("a/nothing/")) == []


def test_a_name_we_would_not_make_is_refused(store: ColdStore) -> None:
    asks: list[Callable[[str], object]] = [
        lambda name: put(store, name),
        lambda name: verify(store, name),
        lambda name: store.read(name, 0, 1),
        store.size,
        store.delete,
    ]
    for name, ask in itertools.product(BAD_NAMES, asks):
        with pytest.raises(ValueError, match="not a valid name"):
            ask(name)
    for prefix in ("a", "/", "../", "a/../", "a.b/"):
        with pytest.raises(ValueError, match="not a folder"):
            list(store.names(prefix))


def test_a_source_reads_like_a_local_file(store: ColdStore) -> None:
    put(store)
    source = ColdSource(store, NAME, len(CONTENT))
    assert source.name.endswith("7/00000000000000000001-000000000012.seg")
    assert source.size() == len(CONTENT)
    assert source.read(100, 50) == CONTENT[100:150]
    assert source.read(len(CONTENT) - 3, 50) == CONTENT[-3:]
    assert source.read(len(CONTENT) + 3, 50) == b""
    assert repr(source) == f"<ColdSource {NAME}: 300000 bytes>"


def test_threads_do_not_disturb_each_other(store: ColdStore) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        content = random.Random(number).randbytes(5000)
        name = f"shard-{number:02d}/segments/1/1.seg"
        try:
            put(store, name, content)
            verify(store, name, content)
            assert store.read(name, number, 1000) == content[number : number + 1000]
            store.delete(name)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(store.names()) == []


# Where it may be


@pytest.mark.parametrize("location", BAD_LOCATIONS)
def test_a_bad_location_is_refused_with_what_is_legal(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ColdConfigError) as caught:
        open_cold(location, FaultDisk("/data"))
    assert caught.value.location == location
    assert "s3://bucket/prefix" in str(caught.value) and "az://container/prefix" in str(caught.value)


def test_keys_in_a_location_are_refused_and_not_repeated() -> None:
    with pytest.raises(ColdConfigError) as caught:
        open_cold("s3://me:secret@bucket/prefix", Disk())
    assert "secret" not in str(caught.value)


def test_every_legal_location_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    (tmp_path / "with space").mkdir()
    assert repr(open_cold(f"{tmp_path}/", Disk())) == f"<FolderCold {tmp_path}: 0 puts in progress>"
    assert repr(open_cold(f"file://{tmp_path}/with%20space", Disk())).startswith(
        f"<FolderCold {tmp_path}/with s"
    )
    for url in ("s3://bucket", "s3://bucket/some/prefix/", "gs://bucket/prefix", "az://container/prefix"):
        assert repr(open_cold(url, Disk())) == f"<ObjectCold {url.rstrip('/')}: 30 s>"


# A folder


def after_crashes(
    at: int, moment: str, act: Callable[[FaultDisk], object], *, setup: bool
) -> Iterator[FaultDisk]:
    for seed in range(6):
        disk = FaultDisk("/data")
        if setup:
            put(FolderCold("/data", disk), content=b"old" * 1000)
        disk.crash_at(disk.operations + at, moment)
        with pytest.raises(Crashed):
            act(disk)
        yield disk.kill() if seed == 0 else disk.crash(random.Random(seed))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_crash_at_any_operation_of_a_put_leaves_it_whole_or_absent(replaces: bool) -> None:
    def act(disk: DiskLike) -> None:
        put(FolderCold("/data", disk))

    probe = FaultDisk("/data")
    act(probe)
    legal = [CONTENT, b"old" * 1000 if replaces else None]
    points = [(at, moment) for at in range(probe.operations) for moment in MOMENTS]
    for at, moment in sweep(points, seed=6, sample=1000):
        for disk in after_crashes(at, moment, act, setup=replaces):
            store = FolderCold("/data", disk)
            size = store.size(NAME)
            assert (None if size is None else store.read(NAME, 0, size)) in legal
            assert list(store.names()) in ([], [NAME])
            put(store)
            verify(store)
            assert disk.listdir("/data/shard-00/segments/7") == [NAME.rpartition("/")[2]]


def test_a_put_and_a_delete_that_returned_survive_any_crash() -> None:
    for seed in range(50):
        disk = FaultDisk("/data")
        store = FolderCold("/data", disk)
        put(store)
        put(store, "shard-00/segments/8/1.seg")
        store.delete(NAME)
        found = FolderCold("/data", disk.crash(random.Random(seed)))
        verify(found, "shard-00/segments/8/1.seg")
        assert found.size(NAME) is None


def test_a_delete_that_is_repeated_after_a_failed_sync_is_durable() -> None:
    for seed in range(50):
        disk = FaultDisk("/data")
        store = FolderCold("/data", disk)
        put(store)
        disk.fail_next("fsync_dir", OSError(errno.EIO, "broken"))
        with pytest.raises(ColdUnavailable):
            store.delete(NAME)
        store.delete(NAME)
        assert FolderCold("/data", disk.crash(random.Random(seed))).size(NAME) is None


def test_a_failure_at_any_operation_of_a_put_is_unavailable_and_leaves_it_whole_or_absent() -> None:
    probe = FaultDisk("/data")
    put(FolderCold("/data", probe))
    for at in range(probe.operations):
        disk = FaultDisk("/data")
        store = FolderCold("/data", disk)
        disk.fail_at(at, OSError(errno.ENOSPC, "full"))
        with pytest.raises(ColdUnavailable, match="full"):
            put(store)
        if store.size(NAME) is not None:
            verify(store)
        put(store)
        verify(store)


def test_a_put_that_failed_leaves_the_space_it_took() -> None:
    disk = FaultDisk("/data")
    disk.fail_next("fsync", OSError(errno.ENOSPC, "full"))
    with pytest.raises(ColdUnavailable):
        put(FolderCold("/data", disk))
    assert disk.listdir("/data/shard-00/segments/7") == []


def test_a_local_disk_that_fails_during_a_put_is_no_fault_of_the_store() -> None:
    disk = FaultDisk("/data")
    handle = disk.create("/data/local.seg")
    disk.pwritev(handle, [CONTENT], 0)
    disk.fail_next("pread", OSError(errno.EIO, "broken"))
    store = FolderCold("/data", disk)
    with pytest.raises(OSError, match="broken"):
        store.put(NAME, "/data/local.seg", size=len(CONTENT), checksum=xxh3_64_intdigest(CONTENT))
    assert store.size(NAME) is None


def test_a_second_put_of_a_name_at_the_same_time_is_told_to_wait(tmp_path: Path) -> None:
    store = FolderCold(str(tmp_path), Disk())

    class Meanwhile:
        def __iter__(self) -> Iterator[bytes]:
            yield CONTENT[:1000]
            with pytest.raises(ColdUnavailable, match="another thread"):
                put(store)
            put(store, "shard-00/segments/7/2.seg")
            yield CONTENT[1000:]

    store.put(NAME, Meanwhile(), size=len(CONTENT), checksum=xxh3_64_intdigest(CONTENT))
    verify(store)
    put(store)


def assert_unavailable(store: ColdStore) -> None:
    for ask in (
        lambda: put(store),
        lambda: verify(store),
        lambda: store.read(NAME, 0, 1),
        lambda: store.size(NAME),
        lambda: list(store.names()),
        lambda: store.delete(NAME),
    ):
        with pytest.raises(ColdUnavailable):
            ask()


def test_a_folder_that_went_away_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    store = open_cold(str(folder), Disk())
    put(store)
    folder.rename(tmp_path / "elsewhere")
    assert_unavailable(store)
    (tmp_path / "elsewhere").rename(folder)
    verify(store)
    put(store)


# An object store


def test_a_bucket_that_is_not_there_is_unavailable_and_not_empty(bucket: Bucket) -> None:
    store = ObjectCold("s3://no-such-bucket/prefix", Disk(), backoff_s=0.001)
    assert_unavailable(store)
    with pytest.raises(ColdUnavailable):
        put(store, content=bytes(PIECE_BYTES + 1))


def test_a_source_that_fails_leaves_no_unfinished_upload(bucket: Bucket) -> None:
    with pytest.raises(Corrupt):
        open_cold(bucket.url, Disk()).put(NAME, [bytes(3 * PIECE_BYTES)], size=3 * PIECE_BYTES, checksum=1)
    assert bucket.server.unfinished_uploads(bucket.name) == 0
    assert bucket.server.keys(bucket.name) == []


def test_near_ranges_are_one_request_and_far_ones_are_not(bucket: Bucket) -> None:
    content = random.Random(7).randbytes(2 << 20)
    store = open_cold(bucket.url, Disk())
    put(store, content=content)
    bucket.proxy.requests.clear()
    ranges = [(100 * number, 10) for number in range(500)] + [(1 << 20, 10)]
    assert store.read_many(NAME, ranges) == [content[offset : offset + 10] for offset, _ in ranges]
    assert len(bucket.proxy.requests) == 2
