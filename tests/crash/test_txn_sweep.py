"""Goal: a job whose shard is killed or loses its power at any operation of the disk, and which is then run
again as Spark runs it again, ends with each of its rows in its box once, in order.

Method: the shard of `life.py` on a disk that lies. The job knows only which epochs it was told are committed;
it puts every epoch in other parcels than the last time, and leaves parcels of tasks that died.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from shard.core.transactions import commits
from shard.core.transactions import state as txn
from streams.protocol.messages import bulk, commands
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.payloads.packed import pack
from tests.crash.life import Life, World, new_disk, read_all
from tests.crash.promises import Level
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk, sweep
from tests.support.machines import put_of

SEEDS = range(4)
EPOCHS = 6
BOXES = {"fsync": BoxPatch(durability="fsync"), "disk": BoxPatch(durability="disk"), "made-by-it": None}


class Job:
    """What a driver of tasks does. It outlives the shard."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.committed = 0
        self.attempts = 0

    def run(self, life: Life) -> None:
        for box, config in BOXES.items():
            if config is not None:
                life.submit(commands.PutBox(box, config))
        while self.committed < EPOCHS:
            self.epoch(life, self.committed + 1)

    def epoch(self, life: Life, epoch: int) -> None:
        self.attempts += 1
        txn = bulk.Txn("job", epoch, "query")
        rows = [(box, b"[%d,%d]" % (epoch, number)) for number in range(8) for box in BOXES]
        cut = self.rng.randrange(3, len(rows) - 3)
        self.put(life, txn, f"dead-{self.attempts}", rows[: self.rng.randrange(1, 6)])
        parcels = [
            (f"task-{self.attempts}-{at}", self.put(life, txn, f"task-{self.attempts}-{at}", part))
            for at, part in enumerate((rows[:cut], rows[cut:]))
        ]
        reply = life.submit(bulk.TxnCommit(txn, parcels))
        assert isinstance(reply, bulk.TxnCommitReply), reply
        life.commit()
        life.sync()  # here it is told
        self.committed = epoch

    def put(self, life: Life, txn: bulk.Txn, parcel: str, rows: list[tuple[str, bytes]]) -> int:
        """Some chunks of rows; between them the shard does what it does."""
        size = self.rng.randrange(2, 7)
        chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
        for number, chunk in enumerate(chunks):
            boxes = [box for box in BOXES if any(box == each for each, _ in chunk)]
            counts = [sum(box == each for each, _ in chunk) for box in boxes]
            packed = pack(boxes, counts, [data for box in boxes for each, data in chunk if each == box])
            reply = life.submit(put_of(txn, parcel, number, packed))
            assert isinstance(reply, bulk.TxnPutReply), reply
            self.other_work(life)
        return len(chunks)

    def other_work(self, life: Life) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            life.commit()
        if rng.random() < 0.3:
            life.do_file_work()
        if rng.random() < 0.6:
            life.do_render(rng.choice((1, 2_500, 1 << 20)), rng.choice((1, 3, 1000)))
        for _ in range(rng.choice((0, 1, 6))):
            life.do_upkeep()
        if rng.random() < 0.1 and not life.is_taking_snapshot:
            life.begin_snapshot()
        elif rng.random() < 0.4 and life.is_taking_snapshot:
            life.finish_snapshot()


def begin(disk: FaultDisk, world: World) -> Life:
    life = Life(disk, world)
    life.begin()
    return life


@contextmanager
def sizes(seed: int) -> Iterator[None]:
    """With some seeds no transaction is small: its rows are rendered afterwards, in steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(txn, "SMALL_RECORDS", 0 if seed % 2 else 4_000)
        patch.setattr(commits, "BATCH_RECORDS", 5)
        yield


@cache
def operations_of(seed: int) -> int:
    disk = new_disk()
    with sizes(seed):
        Job(seed).run(begin(disk, World()))
    return disk.operations


def check(life: Life) -> None:
    for box in BOXES:
        found = read_all(life, box, limit=1000).records
        expected = [[epoch, number] for epoch in range(1, EPOCHS + 1) for number in range(8)]
        assert [record["data"] for record in found.values()] == expected, box
    assert not life.machine.txns.epochs and life.machine.txns.bytes == 0
    assert not life.machine.txns.commits and life.machine.txns.memory == 0
    life.machine.check()


def every_point() -> list[tuple[int, int, str]]:
    return [(seed, at, moment) for seed in SEEDS for at in range(operations_of(seed)) for moment in MOMENTS]


def test_a_job_run_again_after_a_crash_at_any_operation_ends_with_each_row_once() -> None:
    for seed, at, moment in sweep(every_point(), seed=47, sample=60):
        with sizes(seed):
            crash_and_run_again(seed, at, moment)


def crash_and_run_again(seed: int, at: int, moment: str) -> None:
    rng = random.Random(f"{seed} {at} {moment}")
    job, world, disk = Job(seed), World(), new_disk()
    disk.crash_at(at, moment)
    with pytest.raises(Crashed):
        job.run(begin(disk, world))
    is_kill = rng.random() < 0.4
    world.ended(Level.KILL if is_kill else Level.POWER_CUT)
    life = begin(disk.kill() if is_kill else disk.crash(rng), world)
    marks = life.machine.txns.marks.get("job", ())
    assert max((mark.epoch for mark in marks), default=0) >= job.committed, "what was told is kept"
    job.run(life)
    while life.do_render():
        pass
    life.commit()
    life.sync()
    check(life)
    life.end()
    world.ended(Level.KILL)
    check(begin(life.disk.kill(), world))


def test_without_a_crash_nothing_is_done_twice_and_old_log_goes_although_rows_are_held() -> None:
    """A chunk that is held would pin its file of the log; it is written again instead."""
    job, life = Job(1), begin(new_disk(), World())
    held = bulk.Txn("slow", 1)
    life.submit(put_of(held, "p", 0, pack(["fsync"], [1], [b'"held"'])))
    put_lsn = life.machine.lsn
    job.run(life)
    first_lsn = life.machine.txns.oldest_lsn
    assert first_lsn is not None and first_lsn > put_lsn
    assert life.wal.files()[0].first_lsn > put_lsn
    for _ in range(2):
        life.begin_snapshot()
        life.finish_snapshot()
        while life.do_upkeep():
            pass
    assert job.attempts == EPOCHS
    assert isinstance(life.submit(bulk.TxnCommit(held, [("p", 1)])), bulk.TxnCommitReply)
    life.commit()
    assert list(read_all(life, "fsync", limit=1000).records.values())[-1]["data"] == "held"


def test_large_transactions_keep_the_files_of_the_log_that_have_their_rows_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others write far more than the log keeps while a transaction is open."""
    monkeypatch.setattr(txn, "SMALL_RECORDS", 0)
    world = World()
    job, life = Job(1), begin(new_disk(), world)
    held = bulk.Txn("slow", 1)
    life.submit(put_of(held, "p", 0, pack(["fsync"], [1], [b'"held"'])))
    put_lsn = life.machine.lsn
    job.run(life)
    for _ in range(3):
        while life.do_render() or life.do_upkeep():
            pass
        life.submit(commands.PutBox("another", BoxPatch()))
        life._make_durable(life.machine.lsn)
        life.begin_snapshot()
        life.finish_snapshot()
        for _ in range(5):
            life.do_file_work()
    assert life.machine.txns.oldest_lsn == put_lsn, "it was not written again"
    assert life.wal.files()[0].first_lsn > put_lsn, "the log has gone on without it"
    (kept,) = life.wal.retained_files()
    assert kept.first_lsn <= put_lsn <= kept.last_lsn
    life.end()
    world.ended(Level.KILL)
    life = begin(life.disk.kill(), world)
    assert isinstance(life.submit(bulk.TxnCommit(held, [("p", 1)])), bulk.TxnCommitReply)
    while life.do_render():
        pass
    assert list(read_all(life, "fsync", limit=1000).records.values())[-1]["data"] == "held"
    for _ in range(3):
        life.submit(commands.PutBox("another", BoxPatch(ttl_ms=life.machine.lsn)))
        life._make_durable(life.machine.lsn)
        life.begin_snapshot()
        life.finish_snapshot()
        for _ in range(5):
            life.do_file_work()
    assert not life.wal.retained_files()
    life.machine.check()
