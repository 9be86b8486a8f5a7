"""Goal: a backup brings back what was there when it was taken, all of it and no more, or is not a backup.

Method: folders of shards with random histories are backed up into a folder and restored, on this disk and on
the fault disk; what readers would get is compared. Objects of a backup are damaged, removed and exchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyroaring import BitMap64

from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.machine import Machine
from shard.offline.restore import RestoreJob, RestoreResult, choose_backup
from shard.storage.cold import ColdDamaged, ColdError, ColdMissing, FolderCold
from shard.storage.files import Corrupt, Disk, DiskLike, remove_tree
from shard.storage.segments.store import Name, SegmentStore
from shard.transfer.backup import BackupStore, ShardSource
from shard.transfer.backup_manifest import Backup
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import end_life, parts_of, read_shard
from streams.protocol.model.slots import SLOTS
from tests.support import machines
from tests.support.faultdisk import FaultDisk
from tests.support.folders import FILE_BYTES, all_contents, contents, write_folder
from tests.support.machines import Driver, random_history

Place = tuple[DiskLike, str]
BOOT = "boot-9"
SLOT_RUNS = [(0, SLOTS, 0)]


@pytest.fixture(params=["disk", "faultdisk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return (Disk(), str(tmp_path)) if request.param == "disk" else (FaultDisk("/data"), "/data")


def target_in(place: Place) -> BackupStore:
    disk, root = place
    disk.mkdir(f"{root}/target")
    return BackupStore(FolderCold(f"{root}/target", disk), disk)


def source_of(place: Place, name: str, taken_ms: int = 5_000) -> ShardSource:
    """As `streams backup` makes it of a stopped server."""
    disk, root = place
    machine = read_shard(disk, f"{root}/{name}")
    end_life(machine, boot_id=BOOT, now_ms=max(taken_ms, machine.last_ms))
    remove_tree(disk, f"{root}/{name}/export")
    write_export(disk, f"{root}/{name}/export", parts_of(machine), now_ms=taken_ms, file_bytes=FILE_BYTES)
    return ShardSource(f"{root}/{name}/export", SegmentStore(disk, f"{root}/{name}/segments"), taken_ms)


def restore(
    place: Place, target: BackupStore, backup: Backup, *, shards: int = 2, until_ms: int | None = None
) -> RestoreResult:
    disk, root = place
    folders = [f"back-{at}" for at in range(shards)]
    for folder in folders:
        remove_tree(disk, f"{root}/{folder}")
    return RestoreJob(
        disk,
        target,
        backup,
        data_dir=root,
        folders=folders,
        slots=[slot * shards // SLOTS for slot in range(SLOTS)],
        until_ms=until_ms,
        file_bytes=FILE_BYTES,
        boot_id=BOOT,
        now_ms=1_000_000,
    ).run()


def restored(
    place: Place, target: BackupStore, backup: Backup, *, shards: int = 2, until_ms: int | None = None
) -> dict[str, Any]:
    disk, root = place
    restore(place, target, backup, shards=shards, until_ms=until_ms)
    return all_contents(disk, [f"{root}/back-{at}" for at in range(shards)])


def stopped(seed: int) -> Driver:
    driver = random_history(seed, 120)
    driver.stop()
    return driver


def simple() -> Driver:
    driver = Driver()
    for _ in range(3):
        driver.append(*"abc")
        driver.seal()
    driver.append("tail")
    driver.stop()
    return driver


@pytest.mark.parametrize("seed", range(4))
def test_a_backup_brings_everything_back(place: Place, seed: int) -> None:
    disk, root = place
    write_folder(disk, f"{root}/one", stopped(seed), snapshots=(0.5,))
    before = contents(disk, f"{root}/one")
    target = target_in(place)
    taken = target.take([source_of(place, "one")], SLOT_RUNS)
    assert target.ids() == [taken.backup.id] and target.load(taken.backup.id) == taken.backup
    assert taken.backup.boxes == len(before)
    assert restored(place, target, taken.backup) == before
    assert contents(disk, f"{root}/one") == before


def test_shards_of_a_backup_come_together_in_as_many_as_are_wanted(place: Place) -> None:
    disk, root = place
    write_folder(disk, f"{root}/one", stopped(3))
    second = Driver(Machine(shard=1))
    for box in "defg":
        second.append(*"xyz", box=box)
        second.seal(box)
    second.stop()
    write_folder(disk, f"{root}/two", second)
    target = target_in(place)
    taken = target.take([source_of(place, "one", 7), source_of(place, "two", 6)], SLOT_RUNS)
    assert taken.backup.taken_ms == 6, "of the shard that was first"
    before = all_contents(disk, [f"{root}/one", f"{root}/two"])
    for shards in (1, 3):
        assert restored(place, target, taken.backup, shards=shards) == before


def test_a_second_backup_copies_only_what_is_new(place: Place) -> None:
    disk, root = place
    driver = simple()
    write_folder(disk, f"{root}/one", driver)
    target = target_in(place)
    first = target.take([source_of(place, "one", 1_000)], SLOT_RUNS)
    assert first.copied_segments == 3
    again = target.take([source_of(place, "one", 2_000)], SLOT_RUNS)
    assert again.copied_segments == 0 and again.copied_bytes < first.copied_bytes

    driver.start("boot-1")
    driver.append(*"more")
    driver.seal()
    driver.delete(before_seq=4)
    driver.stop()
    remove_tree(disk, f"{root}/one")
    write_folder(disk, f"{root}/one", driver)
    third = target.take([source_of(place, "one", 3_000)], SLOT_RUNS)
    assert third.copied_segments == 1
    assert restored(place, target, third.backup) == contents(disk, f"{root}/one")
    assert len(restored(place, target, first.backup)["b"]["live"]) == 10, "the first is as it was"
    assert [target.load(id).taken_ms for id in target.ids()] == [1_000, 2_000, 3_000]


def test_an_object_that_has_shrunk_or_gone_is_copied_again(place: Place) -> None:
    disk, root = place
    write_folder(disk, f"{root}/one", simple())
    target = target_in(place)
    first = target.take([source_of(place, "one")], SLOT_RUNS).backup
    gone, cut, _ = first.shards[0].segments
    disk.unlink(f"{root}/target/{gone.object}")
    handle = disk.open(f"{root}/target/{cut.object}", writable=True)
    disk.truncate(handle, 10)
    disk.close(handle)
    taken = target.take([source_of(place, "one")], SLOT_RUNS)
    assert taken.copied_segments == 2
    assert restored(place, target, taken.backup) == contents(disk, f"{root}/one")


def test_segments_of_one_name_and_another_content_are_kept_apart(place: Place) -> None:
    """As after a restore whose server went another way from there on."""
    disk, root = place
    one = Driver()
    one.append("this")
    one.seal()
    one.stop()
    write_folder(disk, f"{root}/one", one)
    target = target_in(place)
    first = target.take([source_of(place, "one", 1)], SLOT_RUNS).backup
    other = Driver()
    other.append("that")
    other.seal()
    other.stop()
    write_folder(disk, f"{root}/other", other)
    second = target.take([source_of(place, "other", 2)], SLOT_RUNS).backup
    assert first.shards[0].segments[0].name == second.shards[0].segments[0].name
    assert restored(place, target, first) == contents(disk, f"{root}/one")
    assert restored(place, target, second) == contents(disk, f"{root}/other")


def test_segments_in_the_cold_store_are_copied_too(place: Place) -> None:
    disk, root = place
    driver = simple()
    write_folder(disk, f"{root}/one", driver)
    before = contents(disk, f"{root}/one")
    target = target_in(place)
    store = SegmentStore(disk, f"{root}/one/segments", target.store)  # the same place, even
    for segment in driver.machine.boxes["b"].log.segments[:2]:
        store.copy_to_cold(Name.of(segment))
        store.remove_local(Name.of(segment))
    source = source_of(place, "one")._replace(store=SegmentStore(disk, f"{root}/one/segments", target.store))
    taken = target.take([source], SLOT_RUNS)
    assert taken.copied_segments == 3
    # What the server has in the cold store goes with its records; the backup stays.
    for name in list(target.store.names("segments/")):
        target.store.delete(name)
    assert restored(place, target, taken.backup) == before


# -- up to a time


def timed() -> Driver:
    """Records 1..24 of box b at 1000, 1010, …, some in each segment, some unsealed; c came at 1150."""
    driver = Driver(now_ms=1_000)
    for number in range(12):
        driver.append({"data": number, "tag": "x" if number == 3 else "y"}, "second")
        if number in (3, 7):
            driver.seal()
        driver.now_ms += 10
    driver.delete(tag="x")
    driver.now_ms = 1_150
    driver.append("late", box="c")
    driver.stop()
    return driver


@pytest.mark.parametrize("until_ms", [999, 1_000, 1_005, 1_029, 1_030, 1_075, 1_110, 1_149, 1_150, 5_000])
def test_records_and_boxes_that_are_younger_never_were(place: Place, until_ms: int) -> None:
    disk, root = place
    write_folder(disk, f"{root}/one", timed())
    before = contents(disk, f"{root}/one")
    target = target_in(place)
    taken = target.take([source_of(place, "one")], SLOT_RUNS)
    found = restored(place, target, taken.backup, until_ms=until_ms)
    assert set(found) == {"b"} - ({"b"} if until_ms < 1_000 else set()) | (
        {"c"} if until_ms >= 1_150 else set()
    )
    if "b" in found:
        last = min(24, 2 * ((until_ms - 1_000) // 10 + 1))
        expected = {seq: text for seq, text in before["b"]["live"].items() if seq <= last}
        assert found["b"]["live"] == expected
        assert found["b"]["positions"][0] == last
        assert found["b"]["totals"][0] == len(expected)
    segments = [path for path in _all_files(disk, root) if path.endswith(".seg") and "/back-" in path]
    assert len(segments) == len(set(segments)) <= 2


def _all_files(disk: DiskLike, path: str) -> list[str]:
    found: list[str] = []
    for name in disk.listdir(path):
        inner = f"{path}/{name}"
        found += _all_files(disk, inner) if disk.is_dir(inner) else [inner]
    return found


def test_a_time_inside_a_batch_cuts_through_it(place: Place) -> None:
    disk, root = place
    driver = Driver(now_ms=1)
    driver.put(timestamping={"mode": "client-prefer"})
    driver.now_ms = 10_000
    driver.append(*({"data": ts, "ts": ts} for ts in (2, 5, 5, 9)), idempotency_key="early")
    driver.append(*({"data": ts, "ts": ts} for ts in (9, 12, 12, 15)), idempotency_key="late")
    driver.seal()
    driver.append(*({"data": ts, "ts": ts} for ts in (15, 20, 30)))
    driver.stop()
    write_folder(disk, f"{root}/one", driver)
    target = target_in(place)
    backup = target.take([source_of(place, "one", 50_000)], SLOT_RUNS).backup
    expected = ((1, 0), (4, 1), (5, 3), (9, 5), (11, 5), (12, 7), (15, 9), (20, 10), (31, 11))
    for until_ms, head in expected:
        box = restored(place, target, backup, until_ms=until_ms)["b"]
        assert (box["positions"][0], list(box["live"])) == (head, list(range(1, head + 1)))
        assert [key for key, _ in box["keys"]] == ["early"] * (head >= 4) + ["late"] * (head >= 8)
        times = [0, 2, 5, 5, 9, 9, 12, 12, 15, 15, 20, 30]
        assert box["times"][0] == (times[head] or until_ms)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_keys_that_were_compacted_after_the_time_are_counted_and_reported(
    place: Place, sealed: int, durability: str
) -> None:
    disk, root = place
    driver = Driver(now_ms=1_000)
    driver.put(compact="tag", durability=durability)
    for number, tags in enumerate(("abcd", "xae", "bf")):
        driver.append(*({"data": f"{tag}{number}", "tag": tag} for tag in tags), "without a tag")
        if number < sealed:
            driver.seal()
        driver.now_ms += 1_000
    box = driver.machine.boxes["b"]
    machines.SHELF.load_all(driver.machine, box.generation)
    driver.commit(
        box.plan_deletes(BitMap64([1, 2]), SizedSeqs.of({}), driver.now_ms)
    )  # superseded: a by 7, b by 10
    driver.stop()
    write_folder(disk, f"{root}/one", driver)
    target = target_in(place)
    backup = target.take([source_of(place, "one", 9_000)], SLOT_RUNS).backup
    found = restored(place, target, backup, until_ms=1_500)
    assert sorted(found["b"]["live"]) == [3, 4, 5], "c, d, and what has no tag"
    # Of a, x, e, b and f, two were there: as many records are missing.
    assert found["b"]["holes"] == [(6, 7)]
    assert restore(place, target, backup, until_ms=1_500).compacted_keys == 2
    found = restored(place, target, backup, until_ms=2_500)
    assert sorted(found["b"]["live"]) == [3, 4, 5, 6, 7, 8, 9] and found["b"]["holes"] == [(10, 11)]
    assert restored(place, target, backup)["b"]["holes"] == []
    assert restore(place, target, backup).compacted_keys == 0


# -- choosing


def test_the_backup_asked_for_or_the_one_after_the_time_or_the_newest_is_chosen(place: Place) -> None:
    disk, root = place
    target = target_in(place)
    with pytest.raises(LookupError, match="it contains no backup"):
        choose_backup(target)
    write_folder(disk, f"{root}/one", simple())
    one, two, three = (
        target.take([source_of(place, "one", taken_ms)], SLOT_RUNS).backup.id
        for taken_ms in (1_000, 2_000, 3_000)
    )
    assert choose_backup(target) == three
    assert choose_backup(target, id=one) == one
    assert [choose_backup(target, until_ms=at) for at in (0, 1_000, 1_001, 3_000, 9_000)] == [
        one,
        one,
        two,
        three,
        three,
    ]
    with pytest.raises(LookupError, match=f"there is no backup nothing; the existing ones are {one}"):
        choose_backup(target, id="nothing")


def test_pruning_keeps_what_the_kept_backups_need_and_nothing_else(place: Place) -> None:
    disk, root = place
    driver = simple()
    write_folder(disk, f"{root}/one", driver)
    target = target_in(place)
    first = target.take([source_of(place, "one", 1_000)], SLOT_RUNS).backup
    driver.start("boot-1")
    driver.append("new")
    driver.seal()
    driver.delete(before_seq=4)
    driver.stop()
    remove_tree(disk, f"{root}/one")
    write_folder(disk, f"{root}/one", driver)
    second = target.take([source_of(place, "one", 2_000)], SLOT_RUNS).backup
    (leftover,) = [second.shards[0].segments[0].object.replace("-0000", "-0009")]
    target._put(leftover, [b"left by a backup that was cut short"])
    assert target.prune(5) == []
    assert target.prune(1) == [first.id]
    assert target.ids() == [second.id]
    needed = {segment.object for segment in second.shards[0].segments}
    assert set(target.store.names("backup-segments/")) == needed
    assert all(second.id in name for name in target.store.names("backup-shards/"))
    assert restored(place, target, second) == contents(disk, f"{root}/one")


# -- damage


def test_a_damaged_segment_is_not_taken_into_a_backup() -> None:
    disk = FaultDisk("/data")
    place = (disk, "/data")
    write_folder(disk, "/data/one", simple())
    source = source_of(place, "one")
    (path, *_) = [path for path in _all_files(disk, "/data/one/segments") if path.endswith(".seg")]
    disk.flip(path, 100)
    target = target_in(place)
    with pytest.raises(Corrupt) as caught:
        target.take([source], SLOT_RUNS)
    assert caught.value.path == path
    assert target.ids() == []


def test_every_damaged_object_of_a_backup_is_found_before_it_is_served() -> None:
    disk = FaultDisk("/data")
    place = (disk, "/data")
    write_folder(disk, "/data/one", simple())
    target = target_in(place)
    backup = target.take([source_of(place, "one")], SLOT_RUNS).backup
    for path in _all_files(disk, "/data/target"):
        size = disk.size(path)
        for at in sorted({0, 3, 40, size // 3, size // 2, size - 9, size - 1}):
            disk.flip(path, at, 4)
            with pytest.raises((Corrupt, ColdError)):
                restored(place, target, target.load(backup.id))
            disk.flip(path, at, 4)
    assert restored(place, target, target.load(backup.id)) == contents(disk, "/data/one")


def test_an_object_of_another_backup_in_the_place_of_one_is_found(place: Place) -> None:
    disk, root = place
    for name, text in (("one", "this"), ("two", "that")):
        driver = Driver()
        driver.append(text)
        driver.seal()
        driver.stop()
        write_folder(disk, f"{root}/{name}", driver)
    target = target_in(place)
    one = target.take([source_of(place, "one", 1)], SLOT_RUNS).backup
    two = target.take([source_of(place, "two", 2)], SLOT_RUNS).backup
    (mine,), (other,) = one.shards[0].segments, two.shards[0].segments
    content = target.store.read(other.object, 0, other.size)
    target._put(mine.object, [content])
    with pytest.raises(Corrupt, match="another segment than the backup names"):
        restored(place, target, one)


def test_a_backup_that_is_missing_or_of_a_later_format_is_refused(place: Place) -> None:
    target = target_in(place)
    with pytest.raises(ColdMissing):
        target.load("nothing")
    later = Backup(format=3, id="x", taken_ms=1, slots=SLOT_RUNS, shards=[])
    target._put("backups/x.json", [later.encode()])
    with pytest.raises(Corrupt, match="of format 3; this server reads 1 and 2"):
        target.load("x")
    target._put("backups/y.json", [later.encode()[:-3]])
    with pytest.raises(Corrupt, match="checksum"):
        target.load("y")


def test_a_backup_with_a_shard_that_has_no_snapshot_is_refused(place: Place) -> None:
    disk, root = place
    write_folder(disk, f"{root}/one", simple())
    target = target_in(place)
    backup = target.take([source_of(place, "one")], SLOT_RUNS).backup
    (shard,) = backup.shards
    files = {path: stored for path, stored in shard.files.items() if not path.startswith("snapshot")}
    without = msgspec.structs.replace(backup, shards=[msgspec.structs.replace(shard, files=files)])
    with pytest.raises(Corrupt, match="has no snapshot"):
        restored(place, target, without)


def test_a_copy_that_does_not_arrive_whole_is_no_backup() -> None:
    """The target takes what it is given and has something else afterwards."""
    disk = FaultDisk("/data")
    place = (disk, "/data")
    write_folder(disk, "/data/one", simple())
    target = target_in(place)
    real = target.store.verify

    def verify(name: str, *, size: int, checksum: int) -> None:
        disk.flip(f"/data/target/{name}", 7)
        real(name, size=size, checksum=checksum)

    target.store.verify = verify  # type: ignore[method-assign]
    with pytest.raises(ColdDamaged):
        target.take([source_of(place, "one")], SLOT_RUNS)
    assert target.ids() == []
