"""Goal: whatever a machine with object boxes has told, the object store has; and what is put back from the
store is what those boxes were, to the last record, key, fence and group.

Method: a random history runs on a live machine whose changes are put into a store that is a dict: group by
group, base by base, at any time, some of them without the machine hearing of it. The machine loses its
process now and then, with and without a snapshot. All the while the store alone is put back, by the very
steps of `shard/offline/restore_objects.py`, and compared with the log replayed up to there.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.core.boxes.box import Box
from shard.core.boxes.offline_edits import fit_change
from shard.core.boxes.sealed import NotLoaded
from shard.core.changes import Change
from shard.core.machine import Machine
from shard.core.snapshot_facts import ShardState
from shard.offline.restore_objects import ReplayResult, replay
from shard.storage import object_log
from shard.storage.files import Corrupt
from shard.storage.object_log import LogName, ObjectLog
from shard.transfer.shard_folders import Parts
from shard.transfer.shard_folders import parts_of as parts_of_machine
from streams.protocol.model.records import Batch
from tests.support import machines
from tests.support.machines import Driver, facts_of, random_command, recovered, sampled


def with_store() -> Machine:
    return Machine(has_store=True)


class Store:
    """A chain: the newest base, and objects by name."""

    def __init__(self) -> None:
        self.base: tuple[int, Parts] | None = None
        self.objects: dict[LogName, bytes] = {}

    def put_base(self, machine: Machine) -> int:
        parts = parts_of_machine(machine, keep=lambda box: box.is_object)
        self.base = (parts.state.lsn, parts)
        return parts.state.lsn

    def put_group(self, machine: Machine, bytes_max: int) -> int | None:
        group = machine.uploading.group(bytes_max)
        if not group:
            return None
        name = LogName(group[0].lsn, group[-1].lsn, machine.forwarding.outboxes.start_lsn)
        self.objects[name] = object_log.encode(
            name.text,
            [(each.lsn, each.change) for each in group],
            previous_lsn=machine.uploading.tail_lsn,
            last_lsn=name.last_lsn,
            life=name.life,
        )
        return name.last_lsn

    def tidy(self) -> None:
        assert self.base is not None
        self.objects = {name: each for name, each in self.objects.items() if name.last_lsn > self.base[0]}

    def contents(self) -> list[ObjectLog | None]:
        found: list[ObjectLog | None] = []
        for name in sorted(self.objects):
            try:
                found.append(object_log.decode(name.text, self.objects[name]))
            except Corrupt:
                found.append(None)
        return found

    def put_back(self) -> tuple[Machine, ReplayResult]:
        machine = Machine()
        base_lsn = 0
        if self.base is not None:
            base_lsn, parts = self.base
            wanted = machine.restore(parts.state)
            for box, segment in wanted.segments:
                box.log.attach(machines.SHELF.open(box.generation, segment), segment.dead)
            for facts in parts.state.boxes:
                lsns = [lsn for lsn in array("Q", facts.batches) if lsn]
                for lsn, kept in zip(lsns, parts.batches_of(facts), strict=True):
                    batch = Batch.from_bytes(memoryview(b"".join(kept.to_parts())))
                    batch.lsn = lsn
                    wanted.batches[lsn].log.hydrate(batch)
            machine.end_hydration()
        return machine, replay(machine, base_lsn, self.contents(), fit)


def fit(change: Change, box: Box) -> Change:
    while True:
        try:
            return fit_change(change, box)
        except NotLoaded as missing:
            segment = missing.segment
            for at in range(segment.front, len(segment)):
                segment.load(at, machines.SHELF.read(segment, at))


def look(machine: Machine) -> dict[str, Any]:
    """Of object boxes, and of marks, what must come back."""
    found = facts_of(machine)["boxes"]
    looks: dict[str, Any] = {}
    for name, box in machine.boxes.items():
        if box.is_object:
            facts = {key: value for key, value in found[name].items() if key not in ("reserved_seq", "queue")}
            facts["keys"] = [(key, known[:3]) for key, known in facts["keys"]]
            facts["live"] = {seq: text for seq, (_, text) in facts["live"].items()}
            looks[name] = facts
    return looks


def check(driver: Driver, store: Store) -> None:
    machine = driver.machine
    restored, found = store.put_back()
    restored.check()
    reached = max(found.last_lsn, machine.uploading.lsn)
    then = recovered(driver.log[:reached])
    unshipped = [commit.lsn for commit in then.txns.commits.values() if commit.to_ship is not None]
    if unshipped:  # the log was cut inside a commit: the store gets its rows with the frames that render them
        then = recovered(driver.log[: min(unshipped) - 1])
    assert found.left_out == 0
    assert look(restored) == look(then)
    if machine.uploading.needs_base_lsn:
        return  # a box may have shown records before it came into the class, and the store is yet to have it
    for box in machine.boxes.values():
        if box.is_object and box.log.visible_seq:
            kept = restored.boxes.get(box.name)
            is_known = kept is not None and kept.generation == box.generation
            assert is_known, f"{box.name} has shown records, and the store does not know it"
            assert kept is not None and kept.log.head_seq >= box.log.visible_seq, "SHOWN"


@sampled(4)
@given(seed=st.integers(0, 2**32))
def test_the_store_has_what_was_told_and_gives_it_back(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(make=with_store)
    driver.classes = ("object", "object", "object", "disk", "memory")
    store = Store()
    snapshot: ShardState | None = None
    driver.start("boot")
    for number in range(100):
        outcome = driver.do(random_command(rng, driver, number))
        rests = outcome.waits_for_lsn
        assert not (outcome.until_uploaded and rests) or rests > driver.machine.uploading.position
        chance = rng.random()
        if chance < 0.15:
            driver.now_ms += rng.randrange(60)
            driver.tick()
        elif chance < 0.3:
            driver.sync(rng.randint(driver.machine.durable_lsn, driver.machine.lsn))
        elif chance < 0.4:
            driver.some_upkeep(rng)
        elif chance < 0.65:
            upload(rng, driver, store)
        elif chance < 0.67:
            snapshot = driver.machine.snapshot()
        elif chance < 0.72:
            survived = rng.randint(driver.machine.durable_lsn, driver.machine.lsn)
            usable = snapshot if snapshot is not None and snapshot.lsn <= driver.machine.durable_lsn else None
            driver = driver.reborn(survived, usable)
            snapshot = usable
            driver.start(f"boot-{number}")
        if chance > 0.95:
            check(driver, store)
    check(driver, store)
    for _ in range(200):
        driver.sync()
        if not driver.machine.uploading.has_work:
            break
        upload(rng, driver, store, is_told=True)
    check(driver, store)
    assert look(store.put_back()[0]) == look(driver.machine)
    assert driver.machine.uploading.position == driver.machine.durable_lsn
    for box in driver.machine.boxes.values():
        assert box.log.visible_seq == box.log.head_seq


def upload(rng: random.Random, driver: Driver, store: Store, *, is_told: bool = False) -> None:
    """A base if one is needed, or if it pleases; else a group. Now and then nobody hears that it arrived."""
    machine = driver.machine
    uploading = machine.uploading
    if not uploading.is_on:
        return
    is_base = bool(uploading.needs_base_lsn) or (bool(uploading.chain) and rng.random() < 0.15)
    if is_base and any(box.is_object and box.log.tail.has_unrendered for box in machine.boxes.values()):
        driver.render()  # a base waits for the rows of commits (`shard/engine/object_uploader.py`)
    if is_base:
        driver.sync()
        lsn: int | None = store.put_base(machine)
    else:
        lsn = store.put_group(machine, rng.choice((1, 200, 10_000)))
    if lsn is not None and (is_told or rng.random() < 0.8):
        driver.keep(uploading.on_upload("00000001-000-1", lsn, is_base=is_base))
        if is_base and rng.random() < 0.5:
            store.tidy()


def test_what_comes_after_a_missing_or_damaged_object_is_left_out() -> None:
    driver = Driver(make=with_store)
    store = Store()
    driver.put("b", durability="object")
    driver.keep(
        driver.machine.uploading.on_upload("00000001-000-1", store.put_base(driver.machine), is_base=True)
    )
    for number in range(4):
        driver.append(number)
        lsn = store.put_group(driver.machine, 1)
        assert lsn is not None
        driver.keep(driver.machine.uploading.on_upload("00000001-000-1", lsn, is_base=False))
        driver.sync()
    names = sorted(store.objects)
    whole = dict(store.objects)
    store.objects[names[2]] = whole[names[2]][:-1]
    machine, found = store.put_back()
    assert (machine.boxes["b"].log.head_seq, found.objects, found.left_out) == (2, 2, 2)
    del store.objects[names[2]]
    machine, found = store.put_back()
    assert (machine.boxes["b"].log.head_seq, found.left_out) == (2, 1)
    store.objects = whole
    store.objects[LogName(names[1].first_lsn, names[2].last_lsn, 99)] = b""
    machine, found = store.put_back()
    assert (machine.boxes["b"].log.head_seq, found.left_out) == (4, 1), "another copy has what it had"


@pytest.mark.parametrize("at", [0, 20, 50, 70, -1])
def test_a_changed_byte_of_an_object_is_found(at: int) -> None:
    driver = Driver(make=with_store)
    driver.put("b", durability="object")
    driver.append("x")
    group = [(each.lsn, each.change) for each in driver.machine.uploading._pending]
    content = bytearray(object_log.encode("log/x", group, previous_lsn=0, last_lsn=2, life=3))
    assert len(object_log.decode("log/x", bytes(content)).changes) == 2
    with pytest.raises(Corrupt):
        object_log.decode("log/y", bytes(content))
    content[at] ^= 1
    with pytest.raises(Corrupt):
        object_log.decode("log/x", bytes(content))
