"""Goal: after a kill or a power failure at any operation of the disk, each copy inside a shard is there once,
in order, and none is there whose record is lost.

Method: the shard of `life.py` on a disk that lies. One writer, and routers from a box of each stored class
into boxes of all of them, among them a chain. Copies are logged with their records or later; the log is
written in any pieces; segments are sealed, rewritten and forgotten, snapshots are taken in between.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from streams.protocol.messages import commands, forwards
from streams.protocol.messages.routers import Route
from streams.protocol.model.boxes import BoxPatch
from tests.crash.life import Life, World, columns, new_disk, read_all
from tests.crash.promises import Level
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep

SEEDS = range(4)
NUMBERS = 40
SOURCES = ("disk", "fsync")
#: (source, destination): each destination has one source.
ROUTES = (
    ("disk", "disk-to-disk"),
    ("disk", "disk-to-fsync"),
    ("fsync", "fsync-to-disk"),
    ("fsync", "fsync-to-fsync"),
    ("fsync-to-fsync", "fsync-to-fsync-to-disk"),
)
BOXES = (*SOURCES, *(dest for _, dest in ROUTES))


class Writer:
    """Writes numbers to the sources, and creates boxes and routers first. It outlives the shard."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def run(self, life: Life) -> None:
        self.prepare(life)
        while any(len(numbers(life, box)) < NUMBERS for box in SOURCES):
            for box in SOURCES:
                first = life.machine.boxes[box].log.count + 1
                data = [
                    {"text": str(first + at), "tag": None, "node": None}
                    for at in range(self.rng.choice((1, 1, 3)))
                ]
                reply = life.submit(commands.Append(box=box, columns=columns(data)))
                assert isinstance(reply, commands.AppendResult), reply
                self.other_work(life)
        finish(life)

    def prepare(self, life: Life) -> None:
        for box in BOXES:
            life.submit(commands.PutBox(box, BoxPatch(durability=box.rpartition("-")[2])))  # type: ignore[arg-type]
        for number, (source, dest) in enumerate(ROUTES):
            generation = life.machine.boxes[source].generation
            tie = forwards.AttachEndpoint(box=dest, origin=f"r#{number}", life=generation, position=0)
            life.submit(tie)
            route = Route(source=source, dest=dest)
            life.submit(
                forwards.AttachEndpoint(
                    box=source, origin=f"r#{number}", life=generation, position=0, route=route
                )
            )

    def other_work(self, life: Life) -> None:
        rng = self.rng
        for chance, work in (
            (0.6, lambda: life.copy_locally(is_early=True)),
            (0.5, life.commit),
            (0.2, lambda: life.commit(1)),
            (0.3, lambda: life.copy_locally(is_early=False)),
            (0.2, life.sync),
            (0.3, life.do_file_work),
            (0.6, life.do_upkeep),
            (0.1, life.tick),
        ):
            if rng.random() < chance:
                work()
        life.world.clock.now_ms += rng.choice((1, 20, 600))
        if rng.random() < 0.1 and not life.is_taking_snapshot:
            life.begin_snapshot()
        elif rng.random() < 0.4 and life.is_taking_snapshot:
            life.finish_snapshot()


def finish(life: Life) -> None:
    """Everything is durable and copied."""
    life.commit()
    life.sync()
    while life.machine.local_copies.is_due:
        life.copy_locally(is_early=False)
        life.commit()
        life.sync()


def numbers(life: Life, box: str) -> list[int]:
    return [int(record["data"]["text"]) for record in read_all(life, box, limit=1000).records.values()]


def begin(disk: FaultDisk, world: World) -> Life:
    life = Life(disk, world)
    life.begin()
    return life


@cache
def operations_of(seed: int) -> int:
    disk = new_disk()
    life = begin(disk, World())
    Writer(seed).run(life)
    operations = disk.operations
    check(life)
    return operations


def check(life: Life) -> None:
    for source, dest in ROUTES:
        assert numbers(life, dest) == numbers(life, source), dest
    for number, (source, _) in enumerate(ROUTES):
        outbox = life.machine.boxes[source].outboxes[f"r#{number}"]
        assert outbox.total == len(numbers(life, source)), "the total counts copies, not attempts"
    life.machine.check()


def test_after_a_crash_at_any_operation_each_record_has_one_copy_and_no_copy_outlives_its_record() -> None:
    points = [(seed, at, moment) for seed in SEEDS for at in range(operations_of(seed)) for moment in MOMENTS]
    for seed, at, moment in sweep(points, seed=53, sample=80):
        crash_and_go_on(seed, at, moment)


def crash_and_go_on(seed: int, at: int, moment: str) -> None:
    rng = random.Random(f"{seed} {at} {moment}")
    writer, world, disk = Writer(seed), World(), new_disk()
    disk.crash_at(at, moment)
    with pytest.raises(Crashed):
        writer.run(begin(disk, world))
    is_kill = rng.random() < 0.4
    world.ended(Level.KILL if is_kill else Level.POWER_CUT)
    life = begin(disk.kill() if is_kill else disk.crash(rng), world)
    for source, dest in ROUTES:
        if dest in life.machine.boxes:
            assert set(numbers(life, dest)) <= set(numbers(life, source)), "a copy outlived its record"
    writer.run(life)
    check(life)
