"""Goal: boxes that move into a new folder are there as they were, to the last record, and once.

Method: random histories with seals, deletes, evictions, fences, keys and restarts are written as folders, on
this disk and on the fault disk, and moved; what readers would get is compared before and after.
"""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from shard.core.machine import Machine
from shard.core.snapshot_facts import ShardState
from shard.offline.reshard import NotEnoughSpace, ReshardPlan, reshard
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments import list_stubs, write_stub
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.transfer.shard_folders import has_links, read_shard
from streams.protocol.messages import commands
from streams.protocol.model.slots import SLOTS, slot_of
from tests.support.faultdisk import FaultDisk
from tests.support.folders import FILE_BYTES, all_contents, contents, write_folder
from tests.support.machines import Driver, random_history

Place = tuple[DiskLike, str]
BOOT = "boot-9"


@pytest.fixture(params=["disk", "faultdisk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return (Disk(), str(tmp_path)) if request.param == "disk" else (FaultDisk("/data"), "/data")


def plan_of(root: str, sources: int, targets: int, version: int = 2) -> ReshardPlan:
    return ReshardPlan(
        data_dir=root,
        sources=[f"old-{at}" for at in range(sources)],
        targets=[f"new-{at}-v{version}" for at in range(targets)],
        slots=[(SLOTS * at // targets, SLOTS * (at + 1) // targets, at) for at in range(targets)],
        old_slots=[(SLOTS * at // sources, SLOTS * (at + 1) // sources, at) for at in range(sources)],
        wal_file_bytes=FILE_BYTES,
    )


def moved(disk: DiskLike, plan: ReshardPlan, now_ms: int = 10_000) -> dict[str, object]:
    reshard(disk, plan, boot_id=BOOT, now_ms=now_ms)
    return all_contents(disk, [f"{plan.data_dir}/{name}" for name in plan.targets])


def stopped(seed: int) -> Driver:
    driver = random_history(seed, 150)
    driver.stop()
    return driver


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("targets", [1, 3])
def test_boxes_come_out_as_they_went_in(place: Place, seed: int, targets: int) -> None:
    disk, root = place
    driver = stopped(seed)
    write_folder(disk, f"{root}/old-0", driver, snapshots=(0.4, 0.8) if seed % 2 else ())
    before = contents(disk, f"{root}/old-0")
    plan = plan_of(root, 1, targets)
    assert moved(disk, plan) == before
    assert contents(disk, f"{root}/old-0") == before, "the source is only read"
    for at, name in enumerate(plan.targets):
        machine = read_shard(disk, f"{root}/{name}", shard=at)
        assert machine.stopped_clean and machine.boot_id == BOOT
        assert machine.last_generation >= driver.machine.last_generation
        assert all(plan.owners()[slot_of(box)] == at for box in (*machine.boxes, *machine.not_recreated))
    there = [name for new in plan.targets for name in read_shard(disk, f"{root}/{new}").not_recreated]
    assert sorted(there) == sorted(driver.machine.not_recreated)


def test_a_box_that_moved_goes_on_where_it_was(place: Place) -> None:
    disk, root = place
    driver = Driver()
    driver.put(durability="fsync", cap_records=5)
    driver.append("a", "b", "c", idempotency_key="k")
    driver.seal()
    driver.append(*"defg")
    driver.ask(commands.SetFence("b", "t"))
    write_folder(disk, f"{root}/old-0", driver)
    reshard(disk, plan_of(root, 1, 1), boot_id=BOOT, now_ms=driver.now_ms)

    after = Driver(read_shard(disk, f"{root}/new-0-v2"), driver.now_ms)
    after.log = [None] * after.machine.lsn  # type: ignore[list-item]
    repeated = after.ask(after.write("a", "b", "c", idempotency_key="k"))
    assert (repeated.deduped, repeated.first_seq, repeated.last_seq) == (True, 1, 3)
    reply = after.append("h", fencing_token="t")
    assert (reply.first_seq, after.seqs()) == (8, [4, 5, 6, 7, 8])
    assert after.read().tombstone == commands.Tombstone(1, 3, "cap", 3, 4, 8)


def test_generations_given_after_a_move_are_new(place: Place) -> None:
    disk, root = place
    driver = stopped(3)
    write_folder(disk, f"{root}/old-0", driver)
    plan = plan_of(root, 1, 3)
    moved(disk, plan)
    known = {box.generation for box in driver.machine.boxes.values()} | {driver.machine.last_generation}
    given = set()
    for at, name in enumerate(plan.targets):
        after = Driver(read_shard(disk, f"{root}/{name}", shard=at), now_ms=1)
        after.log = [None] * after.machine.lsn  # type: ignore[list-item]
        after.put("fresh")
        given.add(after.state("fresh").generation)
    assert len(given) == 3 and not given & known


def test_a_loss_by_power_cut_is_told_after_the_move_too(place: Place) -> None:
    disk, root = place
    driver = Driver()
    driver.start("boot-1")
    driver.put(durability="disk")
    driver.append("a")
    write_folder(disk, f"{root}/old-0", driver)
    found = moved(disk, plan_of(root, 1, 2))["b"]
    reserved = driver.machine.boxes["b"].reserved_seq
    assert isinstance(found, dict)
    assert found["holes"] == [(2, reserved)] and found["positions"][0] == reserved


def test_the_boxes_of_two_shards_come_together(place: Place) -> None:
    disk, root = place
    first = stopped(4)
    write_folder(disk, f"{root}/old-0", first)
    second = Driver(Machine(shard=1))
    for box in "defgh":
        second.append(*"xyz", box=box)
        second.seal(box)
        second.append("tail", box=box)
    second.stop()
    write_folder(disk, f"{root}/old-1", second)
    before = all_contents(disk, [f"{root}/old-0", f"{root}/old-1"])
    assert moved(disk, plan_of(root, 2, 3)) == before


def test_either_snapshot_of_a_built_folder_is_enough(place: Place) -> None:
    disk, root = place
    write_folder(disk, f"{root}/old-0", stopped(5))
    before = moved(disk, plan_of(root, 1, 1))
    kept = Snapshots(disk, f"{root}/new-0-v2/snapshot").list_lsns()
    assert len(kept) == 2
    disk.unlink(f"{root}/new-0-v2/snapshot/{kept[1]:020d}.snap")
    assert contents(disk, f"{root}/new-0-v2") == before


# -- segment files


def sealed(disk: DiskLike, root: str) -> Driver:
    driver = Driver()
    driver.append(*"abc")
    driver.seal()
    driver.append(*"def")
    driver.seal()
    driver.stop()
    write_folder(disk, f"{root}/old-0", driver)
    return driver


def test_where_there_are_no_links_segments_are_copied_and_verified() -> None:
    disk, root = FaultDisk("/data"), "/data"
    sealed(disk, root)
    before = contents(disk, f"{root}/old-0")
    real = disk.link

    def link(old: str, new: str) -> None:
        raise OSError(errno.EXDEV, "another file system", old)

    disk.link = link  # type: ignore[method-assign]
    assert not has_links(disk, root)
    found = reshard(disk, plan_of(root, 1, 2), boot_id=BOOT, now_ms=1_000)
    assert found.linked == 0 and found.copied_bytes > 0
    assert all_contents(disk, [f"{root}/new-0-v2", f"{root}/new-1-v2"]) == before
    disk.link = real  # type: ignore[method-assign]
    assert has_links(disk, root)
    with pytest.raises(OSError, match="failed"):
        disk.fail_next("link", OSError(errno.EIO, "failed"))
        has_links(disk, root)


def test_a_move_that_does_not_fit_is_refused_before_anything_of_that_shard_is_written() -> None:
    disk, root = FaultDisk("/data"), "/data"
    sealed(disk, root)
    disk.free = 1 << 20
    with pytest.raises(NotEnoughSpace, match="1 MiB are free"):
        reshard(disk, plan_of(root, 1, 2), boot_id=BOOT, now_ms=1_000)
    disk.free = (16 << 20) + 1024 + 100  # enough for links, not for copies

    def link(old: str, new: str) -> None:
        raise OSError(errno.EPERM, "no links here", old)

    real, disk.link = disk.link, link  # type: ignore[method-assign]
    with pytest.raises(NotEnoughSpace):
        reshard(disk, plan_of(root, 1, 2, version=3), boot_id=BOOT, now_ms=1_000)
    disk.link = real  # type: ignore[method-assign]
    reshard(disk, plan_of(root, 1, 2, version=4), boot_id=BOOT, now_ms=1_000)


def test_a_segment_that_is_missing_is_named(place: Place) -> None:
    disk, root = place
    driver = sealed(disk, root)
    name = Name.of(driver.machine.boxes["b"].log.segments[1])
    disk.unlink(f"{root}/old-0/segments/{name.file}")
    with pytest.raises(Corrupt, match="the segment is missing, and the log names it") as caught:
        reshard(disk, plan_of(root, 1, 2), boot_id=BOOT, now_ms=1_000)
    assert caught.value.path.endswith(name.file)


def test_stubs_come_along_and_those_nobody_names_go_where_their_box_is(place: Place) -> None:
    disk, root = place
    driver = Driver()
    for box in "bcd":
        driver.append(*"abc", box=box)
        driver.seal(box)
    gone = driver.machine.boxes["d"]
    driver.ask(commands.DeleteBox("d"))
    driver.stop()
    write_folder(disk, f"{root}/old-0", driver)
    segments = f"{root}/old-0/segments"
    store = SegmentStore(disk, segments)
    of_b, of_c, of_d = (
        store._index(Name.of(box.log.segments[0]))
        for box in (driver.machine.boxes["b"], driver.machine.boxes["c"], gone)
    )
    of_c = msgspec.structs.replace(of_c, serial=9)  # of a move that a crash cut short: nobody names it
    for index in (of_b, of_c, of_d):
        write_stub(disk, segments, index)
    disk.unlink(f"{segments}/{of_b.name}")  # it is in the cold store
    plan = plan_of(root, 1, 4)
    reshard(disk, plan, boot_id=BOOT, now_ms=1_000)
    found = {
        stub: at
        for at, name in enumerate(plan.targets)
        for stub in list_stubs(disk, f"{root}/{name}/segments")
    }
    owners = plan.owners()
    assert found == {
        of_b.stub_name: owners[slot_of("b")],
        of_c.stub_name: owners[slot_of("c")],
        of_d.stub_name: gone.generation % 4,
    }


def test_every_fact_of_a_shard_is_known_to_whoever_moves_boxes() -> None:
    """A new one must be added to `ShardBuilder.finish` and in `reshard` what becomes of it."""
    assert {field.name for field in msgspec.structs.fields(ShardState)} == {
        "lsn", "needs_lsn", "boot_id", "stopped_clean", "last_generation", "not_recreated", "boxes",
        "routers", "last_router_number", "held", "marks", "commits", "basins", "last_basin_number", "tokens",
            "sessions", "chain", "uploaded_lsn", "uploaded_tail_lsn", "follows",
        "at_ms",
    }  # fmt: skip
