"""Goal: whatever moments a backup has its shards of, and whatever time it is restored to, routers, dead
letters, jobs that came back and streams go on as if nothing had been: no copy is lost, none is made twice,
and what cannot be brought back is reported.

Method: two machines and a carrier between them that the test is. Each is captured when the test says so, both
are restored into one, two or three shards, started, and carried on; then every box is recounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shard.core.machine import Machine
from shard.core.routers.router_outbox import RouterOutbox
from shard.offline.restore import RestoreJob, RestoreResult
from shard.offline.verify import Scope, verify_shard
from shard.storage.cold import FolderCold
from shard.storage.files import Disk
from shard.storage.segments.store import Name, SegmentStore
from shard.transfer.backup import BackupStore, ShardSource
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import parts_of, read_shard
from streams.protocol.messages import forwards, queues, routers, s2
from streams.protocol.messages.forwards import DetachEndpoint
from streams.protocol.messages.routers import Route
from streams.protocol.messages.s2 import BasinConfig, Spec
from streams.protocol.model.matches import Match
from streams.protocol.model.slots import SLOTS
from tests.support.carrying import bring, collect
from tests.support.folders import FILE_BYTES, write_folder
from tests.support.jobs import QueueDriver
from tests.support.machines import Driver, Frame, records_of

DISK = Disk()


class World:
    """Two shards: the registers and all sources are on the first, all destinations on the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "target").mkdir()
        self.target = BackupStore(FolderCold(f"{folder}/target", DISK), DISK)
        self.shards = [QueueDriver(), QueueDriver(Machine(shard=1))]
        for driver in self.shards:
            driver.start("boot")
        self.captured: dict[int, ShardSource] = {}
        self.answer = RestoreResult(0, 0, 0, 0)

    @property
    def first(self) -> QueueDriver:
        return self.shards[0]

    @property
    def second(self) -> QueueDriver:
        return self.shards[1]

    def owner(self, box: str) -> QueueDriver:
        (found,) = [driver for driver in self.shards if box in driver.machine.boxes] or [self.shards[-1]]
        return found

    # -- before

    def capture(self, number: int) -> None:
        """A shard as a running one exports it: its life goes on."""
        folder = f"{self.folder}/shard-{number}"
        write_folder(DISK, folder, self.shards[number])
        parts = parts_of(read_shard(DISK, folder))
        write_export(DISK, f"{folder}/export", parts, now_ms=self.now_ms, file_bytes=FILE_BYTES)
        store = SegmentStore(DISK, f"{folder}/segments")
        self.captured[number] = ShardSource(f"{folder}/export", store, self.now_ms)

    def add_router(self, name: str = "copy", source: str = "from", dest: str = "to", **route: Any) -> str:
        asked = Route(source=source, dest=dest, **route)
        put = self.first.ask(routers.PutRouter(name, asked, 0)).router
        assert put is not None
        at, to = self.owner(source), self.owner(dest)
        life = at.state(source).generation
        to.ask(forwards.AttachEndpoint(box=dest, origin=put.origin, life=life, position=0))
        at.ask(forwards.AttachEndpoint(box=source, origin=put.origin, life=life, position=0, route=put.route))
        self.first.ask(routers.SettleRouter(name, put.number, put.route.revision))
        return put.origin

    @property
    def now_ms(self) -> int:
        return self.first.now_ms

    def wait(self, ms: int = 1_000) -> None:
        for driver in self.shards:
            driver.now_ms += ms

    def carry(self) -> None:
        """Everything that is to be copied or moved, until nothing is left."""
        for _ in range(100):
            for driver in self.shards:
                driver.copy_all_locally()
            found = [(driver, given) for driver in self.shards for given in collect(driver)]
            for driver, given in found:
                driver.do(bring(self.owner(given.parcel.dest), given))
                driver.sync()
            if not found:
                assert all(
                    driver.machine.forwarding.outboxes.next_retry_ms() is None for driver in self.shards
                ), "something is refused"
                return
        raise AssertionError("it never ends")

    def kill(self, *seqs: int, box: str = "jobs") -> None:
        """Jobs are delivered too often."""
        for _ in range(2):
            assert {job["$seq"] for job in self.first.claim(max=len(seqs), box=box)} == set(seqs)
            self.first.nack(*seqs, box=box)
        self.first.claim(max=len(seqs), box=box)
        self.first.sync()

    # -- after

    def restore(self, shards: int = 2, until_ms: int | None = None) -> None:
        for number in range(2):
            if number not in self.captured:
                self.capture(number)
        runs = [(0, SLOTS // 2, 0), (SLOTS // 2, SLOTS, 1)]
        backup = self.target.take([self.captured[0], self.captured[1]], runs).backup
        folders = [f"back-{at}" for at in range(shards)]
        self.answer = RestoreJob(
            DISK,
            self.target,
            self.target.load(backup.id),
            data_dir=str(self.folder),
            folders=folders,
            slots=[slot * shards // SLOTS for slot in range(SLOTS)],
            until_ms=until_ms,
            boot_id="boot-2",
            now_ms=self.now_ms,
        ).run()
        now_ms = self.now_ms
        self.shards = []
        for at, name in enumerate(folders):
            store = SegmentStore(DISK, f"{self.folder}/{name}/segments")
            scope = Scope(f"{self.folder}/{name}", f"{self.folder}/{name}", store, lambda slot: True)
            assert verify_shard(DISK, scope).problems == []
            machine = read_shard(DISK, f"{self.folder}/{name}", shard=at)
            machine.check()
            self._load_all(machine, store)
            driver = QueueDriver(machine, now_ms)
            driver.log = [Frame(0, 0, 0, b"")] * machine.lsn
            self.shards.append(driver)
        for driver in self.shards:
            driver.start("boot-2")

    @staticmethod
    def _load_all(machine: Machine, store: SegmentStore) -> None:
        for segment in machine.segments():
            for at in range(len(segment)):
                segment.load(at, store.read(Name.of(segment), at, bytes_max=1)[0])

    def recount(self, box: str) -> tuple[list[Any], list[tuple[str, int]]]:
        """The data of every record of a box, and (reason, missed) of every tombstone."""
        found: list[Any] = []
        gaps: list[tuple[str, int]] = []
        cursor = 0
        while True:
            page = self.owner(box).read(cursor, box=box, limit=1000)
            found += [record["data"] for record in records_of(page)]
            if page.tombstone is not None:
                gaps.append((page.tombstone.reason, page.tombstone.missed_estimate))
            cursor = page.next_from_seq
            if cursor >= page.head_seq:
                return found, gaps

    def data(self, box: str) -> list[Any]:
        return self.recount(box)[0]

    def gaps(self, box: str) -> list[tuple[str, int]]:
        return self.recount(box)[1]

    def lag(self, source: str = "from") -> int:
        (outbox,) = self.owner(source).machine.boxes[source].outboxes.values()
        assert isinstance(outbox, RouterOutbox)
        return outbox.lag


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.first.put("from", durability="fsync")
    world.second.put("to", durability="fsync")
    world.first.put("jobs", type="queue", max_deliveries=2, dead_letter="dead", durability="fsync")
    world.second.put("dead", durability="fsync")
    yield world
    for driver in world.shards:
        driver.machine.check()


def add(world: World, *data: Any, box: str = "from", **options: Any) -> None:
    world.owner(box).append(*data, box=box, **options)


@pytest.fixture(params=[1, 3])
def shards(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


# -- routers, of two moments


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_new_records_are_copied_when_the_destination_was_captured_after_its_source(
    world: World, shards: int, durability: str
) -> None:
    world.first.put("from", durability=durability)
    world.add_router()
    add(world, 1, 2, 3)
    world.carry()
    world.capture(0)
    add(world, 4, 5, 6)
    world.carry()
    world.restore(shards)
    assert world.answer.skipped_seqs == 3 and world.lag() == 0
    assert world.recount("from") == ([1, 2, 3], [("crash", 3)]), "what the source lost is reported there"
    add(world, *"new")
    world.carry()
    assert world.data("from") == [1, 2, 3, *"new"]
    assert world.recount("to") == ([1, 2, 3, 4, 5, 6, *"new"], [])


def test_seqs_that_a_disk_box_skips_are_reserved_and_never_given_after_a_crash(
    world: World, shards: int
) -> None:
    world.first.put("from", durability="disk")
    world.add_router()
    add(world, 1, 2, 3)
    world.carry()
    world.first.now_ms += 5_000
    world.first.tick()
    assert world.first.machine.boxes["from"].reserved_seq == 3, "an idle box gives back its reservation"
    world.capture(0)
    add(world, 4, 5, 6)
    world.carry()
    world.restore(shards)
    assert world.answer.skipped_seqs == 3
    owner = world.owner("from")
    assert owner.machine.boxes["from"].reserved_seq >= 6
    owner.machine.check()
    crashed = read_shard(DISK, f"{world.folder}/back-{world.shards.index(owner)}")
    crashed.start(boot_id="boot-3", now_ms=world.now_ms)
    assert crashed.boxes["from"].log.head_seq >= 6
    crashed.check()


def test_a_second_destination_is_told_of_what_its_source_lost(world: World, shards: int) -> None:
    world.second.put("other", durability="fsync")
    world.add_router()
    world.add_router("slow", dest="other")
    add(world, 1, 2, 3)
    world.capture(0)
    add(world, 4)
    parcels = [given for given in collect(world.first) if given.parcel.dest == "to"]
    for given in parcels:
        world.first.do(bring(world.second, given))
    world.restore(shards)
    add(world, 5)
    world.carry()
    assert world.recount("to") == ([1, 2, 3, 4, 5], [])
    assert world.recount("other") == ([1, 2, 3, 5], [("source_trim", 1)])


def test_what_is_missing_in_the_destination_is_copied_without_another_write(
    world: World, shards: int
) -> None:
    world.add_router()
    add(world, 1, 2)
    world.carry()
    world.capture(1)
    add(world, 3, 4)
    world.carry()
    world.first.now_ms += 1_000  # so that the position is saved
    add(world, 5)
    world.carry()
    world.restore(shards)
    assert world.lag() == 3, "never 0 while something is missing"
    world.carry()
    assert world.recount("to") == ([1, 2, 3, 4, 5], []) and world.lag() == 0


@pytest.mark.parametrize("missing", ["source", "dest", "both", "register"])
def test_a_router_that_was_made_during_the_backup_is_whole_or_not_there(
    world: World, shards: int, missing: str
) -> None:
    add(world, 1, 2)
    if missing == "dest":
        world.capture(1)
    elif missing == "register":
        world.capture(0)
    origin = world.add_router()
    world.carry()
    # In this world the register is where the source is; elsewhere they are of two moments.
    if missing in ("source", "both"):
        world.first.ask(DetachEndpoint("from", origin))
    if missing == "both":
        world.second.ask(DetachEndpoint("to", origin))
    world.restore(shards)
    register = world.shards[0].machine.routers.routers
    if missing == "register":
        assert not register
        assert not any(
            box.origins or box.outboxes for driver in world.shards for box in driver.machine.boxes.values()
        )
        return
    assert register["copy"].is_tied == (missing != "both")
    if missing == "both":
        return
    add(world, 3)
    world.carry()
    assert world.data("to") == ([1, 2, 3] if missing == "source" else [3])
    assert world.gaps("to") == ([] if missing == "source" else [("source_trim", 2)])


def test_a_later_life_of_the_source_that_never_was_does_not_stop_the_router(world: World) -> None:
    world.add_router()
    add(world, 1)
    world.carry()
    world.capture(0)
    known = world.second.machine.boxes["to"].origins["copy#1"]
    later = forwards.ForwardHead(
        box="to", origin="copy#1", life=known.generation + 7, after=0, upto=1, count=1
    )
    world.second.ask(forwards.Forward(later, b'{"$seq":1,"$ts":5,"data":"later"}'))
    world.restore()
    add(world, 2)
    world.carry()
    assert world.data("to") == [1, "later", 2]
    assert world.gaps("to") == [("source_trim", 1), ("source_trim", 1)]


# -- routers, up to a time


def test_records_after_the_time_are_copied_anew_and_none_twice(world: World, shards: int) -> None:
    world.add_router()
    add(world, 1, 2, 3)
    world.carry()
    until_ms = world.now_ms
    world.wait()
    add(world, 4, 5)
    world.carry()
    world.restore(shards, until_ms)
    assert (world.data("from"), world.data("to"), world.lag()) == ([1, 2, 3], [1, 2, 3], 0)
    add(world, *"new")
    world.carry()
    assert world.recount("from") == ([1, 2, 3, *"new"], [])
    assert world.recount("to") == ([1, 2, 3, *"new"], [])
    assert (world.answer.missing_copies, world.answer.skipped_seqs) == (0, 0)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_copies_that_were_on_their_way_at_the_time_are_made_again(
    world: World, shards: int, filtered: bool, sealed: bool
) -> None:
    world.add_router(filter=Match("t") if filtered else None)
    records = [{"data": number, "tag": "t" if number % 2 or not filtered else "no"} for number in range(8)]
    add(world, *records[:3])
    world.carry()
    add(world, records[3])
    add(world, *records[4:6])
    until_ms = world.now_ms
    world.wait()
    world.carry()
    add(world, *records[6:])
    world.carry()
    if sealed:
        world.first.seal("from")
        world.second.seal("to")
    world.restore(shards, until_ms)
    assert world.lag() > 0, "never 0 while something is missing"
    world.carry()
    assert world.data("from") == list(range(6))
    assert world.recount("to") == ([1, 3, 5] if filtered else list(range(6)), [])


@pytest.mark.parametrize("filtered", [False, True])
def test_copies_of_records_that_came_after_the_source_was_captured_are_cut_and_not_missed(
    world: World, shards: int, filtered: bool
) -> None:
    world.add_router(filter=Match("t") if filtered else None)
    add(world, *({"data": number, "tag": "t"} for number in range(3)))
    world.carry()
    add(world, {"data": 3, "tag": "t"})
    until_ms = world.now_ms
    world.wait()
    world.carry()
    add(world, {"data": 4, "tag": "t"})
    world.carry()
    world.capture(0)
    add(world, {"data": 5, "tag": "t"}, {"data": 6, "tag": "t"})
    world.carry()
    world.restore(shards, until_ms)
    world.carry()
    add(world, {"data": "new", "tag": "t"})
    world.carry()
    assert world.data("from") == [0, 1, 2, 3, "new"]
    # With a filter it is not known how many of the later ones had passed it.
    expected = ([0, 1, 2, "new"], [("source_trim", 1)]) if filtered else ([0, 1, 2, 3, "new"], [])
    assert world.recount("to") == expected


def copy_from_two_boxes(world: World) -> None:
    """Box `to` has one copy of each of two boxes."""
    world.first.put("other", durability="fsync")
    world.add_router()
    world.add_router("second", source="other")
    add(world, 1)
    add(world, "a", box="other")
    world.carry()


def test_copies_of_which_it_is_not_known_where_they_came_from_are_reported(world: World, shards: int) -> None:
    copy_from_two_boxes(world)
    add(world, 2, 3)
    until_ms = world.now_ms
    world.wait()
    world.carry()
    add(world, "b", box="other")
    world.carry()
    world.restore(shards, until_ms)
    assert world.answer.missing_copies == 2
    assert world.recount("to") == ([1, "a"], [("source_trim", 2)]), "at once, not with the next copy"
    add(world, "new", box="other")
    world.carry()
    assert world.data("to") == [1, "a", "new"]


def test_a_copy_that_was_deleted_at_the_start_of_the_cut_hides_no_missing_copy_of_another_router(
    world: World, shards: int
) -> None:
    copy_from_two_boxes(world)
    add(world, 2)
    until_ms = world.now_ms
    world.wait()
    add(world, {"data": "b", "tag": "x"}, box="other")
    parcels = sorted(collect(world.first), key=lambda given: b'"b"' not in given.parcel.text)
    for given in parcels:  # the copy of "b" arrives before that of 2
        world.first.do(bring(world.second, given))
    world.second.delete(tag="x", box="to")
    world.restore(shards, until_ms)
    world.carry()
    assert world.data("from") == [1, 2]
    assert world.recount("to") == ([1, "a"], [("source_trim", 1)])


def test_copies_of_records_that_were_deleted_since_are_reported_at_most_too_often(world: World) -> None:
    world.add_router()
    add(world, 1)
    world.carry()
    until_ms = world.now_ms
    world.wait()
    add(world, {"data": 2, "tag": "x"}, 3)
    world.carry()
    world.first.delete(tag="x", box="from")
    world.restore(until_ms=until_ms)
    assert world.recount("to") == ([1], [("source_trim", 1)])
    add(world, 4)
    world.carry()
    assert world.data("to") == [1, 4]


def test_a_cut_that_had_lost_copies_already_reports_one_even_if_the_counts_agree(
    world: World, shards: int
) -> None:
    world.add_router()
    add(world, 1)
    world.carry()
    add(world, 2)
    until_ms = world.now_ms
    world.wait()
    world.carry()  # only now, so that the cut takes the copy of 2, but not 2
    add(world, {"data": 3, "tag": "x"})
    world.carry()
    world.second.delete(tag="x", box="to")
    world.restore(shards, until_ms)
    world.carry()
    assert world.data("from") == [1, 2]
    assert world.answer.missing_copies == 1, "the cut has one copy, and one record that was copied"
    assert world.recount("to") == ([1], [("source_trim", 1)])


def test_a_router_that_copied_old_records_after_the_time_copies_them_again(world: World, shards: int) -> None:
    add(world, 1, 2, 3)
    until_ms = world.now_ms
    world.wait()
    world.add_router()
    world.carry()
    world.restore(shards, until_ms)
    world.carry()
    assert world.recount("to") == ([1, 2, 3], [])


def test_a_box_in_memory_gets_what_is_written_after_the_time(world: World, shards: int) -> None:
    world.second.put("memory", durability="memory")
    world.add_router(dest="memory")
    add(world, 1, 2)
    world.carry()
    until_ms = world.now_ms
    world.wait()
    add(world, 3, 4, 5)
    world.carry()
    world.first.now_ms += 1_000  # so that the position is saved
    add(world, 6)
    world.carry()
    world.restore(shards, until_ms)
    add(world, *"new")
    world.carry()
    assert (world.data("from"), world.data("memory")) == ([1, 2, *"new"], [*"new"])


# -- dead letters


def everywhere(world: World) -> list[Any]:
    return sorted([*world.data("jobs"), *world.data("dead")])


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("captured", ["planned", "moved"])
def test_a_dead_letter_is_in_one_box_whichever_was_captured_first(
    world: World, shards: int, later: int, captured: str
) -> None:
    add(world, 1, 2, 3, box="jobs")
    world.kill(1, 2, 3)
    world.carry()
    add(world, 4, 5, 6, box="jobs")
    if captured == "planned":
        world.kill(4, 5)
    world.capture(1 - later)
    if captured == "moved":
        world.kill(4, 5)
    world.carry()
    world.restore(shards)
    world.carry()
    lost = later == 0  # the letters had not come yet, and the queue has let go of them
    assert everywhere(world) == ([1, 2, 3, 6] if lost else [1, 2, 3, 4, 5, 6])
    assert world.gaps("dead") == ([("source_trim", 2)] if lost else [])
    assert world.answer.missing_copies == (2 if lost else 0)
    add(world, 7, box="jobs")
    owner = world.owner("jobs")
    for _ in range(2):
        claimed = [job["$seq"] for job in owner.claim(max=9, box="jobs")]
        owner.nack(*claimed, box="jobs")
    owner.claim(max=9, box="jobs")
    owner.sync()
    world.carry()
    assert world.data("jobs") == []
    assert sorted(world.data("dead")) == ([1, 2, 3, 6, 7] if lost else [1, 2, 3, 4, 5, 6, 7])


def test_a_letter_box_that_was_captured_before_its_first_letter_reports_what_is_missing(
    world: World, shards: int
) -> None:
    add(world, 1, 2, box="jobs")
    world.capture(1)
    world.kill(1, 2)
    world.carry()
    world.restore(shards)
    world.carry()
    assert world.recount("dead") == ([], [("source_trim", 2)])


def test_a_job_that_became_a_dead_letter_after_the_time_stays_one(world: World, shards: int) -> None:
    add(world, 1, 2, 3, box="jobs")
    add(world, "written here", box="dead")
    until_ms = world.now_ms
    world.wait()
    add(world, "late", box="dead", idempotency_key="k")
    add(world, 4, 5, box="jobs")
    world.first.claim(max=4, box="jobs")
    world.first.nack(1, 2, 3, box="jobs")
    for _ in range(2):
        claimed = [job["$seq"] for job in world.first.claim(max=4, box="jobs")]
        world.first.nack(*claimed, box="jobs")
    world.first.claim(max=4, box="jobs")
    world.first.claim(max=4, box="jobs")
    world.carry()
    assert world.data("dead")[2:] == [1, 2, 3, 5]
    add(world, "later", box="dead")
    world.restore(shards, until_ms)
    assert world.recount("dead") == (["written here", 1, 2, 3], []), "5 was not there yet"
    assert world.data("jobs") == []
    assert add(world, "again", box="dead", idempotency_key="k") is None
    assert world.data("dead")[-1] == "again"


def test_letters_of_a_queue_that_did_not_exist_at_the_time_never_were(world: World) -> None:
    until_ms = world.now_ms
    world.wait()
    world.first.put("young", type="queue", max_deliveries=2, dead_letter="dead", durability="fsync")
    add(world, 1, box="young")
    world.kill(1, box="young")
    world.carry()
    world.restore(until_ms=until_ms)
    assert world.data("dead") == []


def test_a_job_that_came_back_after_the_time_is_not_lost(world: World, shards: int) -> None:
    add(world, 1, 2, box="jobs")
    world.kill(1, 2)
    world.carry()
    until_ms = world.now_ms
    world.wait()
    world.second.ask(queues.PlanRequeue(box="dead", to="jobs", max=1))
    world.carry()
    world.restore(shards, until_ms)
    assert (world.data("jobs"), world.data("dead")) == ([1], [2])


def test_positions_of_jobs_that_came_back_are_not_given_twice(world: World) -> None:
    add(world, 1, 2, 3, box="jobs")
    world.kill(1, 2, 3)
    world.carry()
    world.capture(1)
    world.second.ask(queues.PlanRequeue(box="dead", to="jobs", max=1))
    world.carry()
    world.restore()
    assert (world.data("jobs"), world.data("dead")) == ([1], [1, 2, 3]), "twice, and never not at all"
    world.owner("dead").ask(queues.PlanRequeue(box="dead", to="jobs", max=9))
    world.carry()
    assert (sorted(world.data("jobs")), world.data("dead")) == ([1, 1, 2, 3], [])


def test_jobs_that_had_left_before_their_queue_was_captured_are_reported(world: World) -> None:
    add(world, 1, 2, box="jobs")
    world.kill(1, 2)
    world.carry()
    world.capture(0)
    world.second.ask(queues.PlanRequeue(box="dead", to="jobs", max=1))
    world.carry()
    world.restore()
    world.carry()
    assert (world.data("dead"), world.recount("jobs")) == ([2], ([], [("source_trim", 1)]))


# -- the registers of streams


def put_stream(driver: Driver, name: str, number: int) -> None:
    driver.ask(s2.PutStream(box=name, basin_number=number, asked=Spec(), defaults=Spec(), ensures=True))


def test_a_stream_whose_basin_was_made_after_the_register_was_captured_keeps_it(
    world: World, shards: int
) -> None:
    world.first.ask(s2.PutBasin(name="early", config=BasinConfig()))
    world.capture(0)
    number = world.first.ask(s2.PutBasin(name="made", config=BasinConfig())).basin.number
    put_stream(world.second, "made/one", number)
    put_stream(world.second, "early/one", 1)
    world.restore(shards)
    register = world.shards[0].machine.basins
    assert {name: basin.number for name, basin in register.basins.items()} == {"early": 1, "made": 2}
    assert register.last_number == 2


def test_a_basin_that_is_younger_than_the_time_never_was(world: World) -> None:
    world.first.ask(s2.PutBasin(name="old", config=BasinConfig()))
    until_ms = world.now_ms
    world.wait()
    number = world.first.ask(s2.PutBasin(name="young", config=BasinConfig())).basin.number
    put_stream(world.second, "young/one", number)
    world.restore(until_ms=until_ms)
    assert list(world.shards[0].machine.basins.basins) == ["old"]
