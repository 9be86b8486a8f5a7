"""Measures the longest step of a shard's thread in operations on large boxes: `python -m loadtests.steps`.

While a step runs, every other box of the shard waits. Each row is CPU time of one thread, without files or
sockets, so it shows the cost of the core and nothing about a disk. It excludes other threads (encoding a
snapshot, looking up tags). Words on the command line select rows.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment, TagsNotLoaded
from shard.core.machine import Machine
from shard.storage import frames
from streams.protocol.messages import commands, queues
from streams.protocol.messages.requests import RecordLimits, parse_append
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import render

T = TypeVar("T")

RECORDS, SEGMENT_RECORDS = 5_000_000, 10_000
MEMORY_RECORDS = 1_000_000
JOBS = 200_000
#: One record in nine matches, as in the prefix `user-1` of ids that count up.
ONE_IN = 9
SIZE = 60


class Steps:
    """Counts calls, and measures the CPU time of the longest one in milliseconds.

    Earlier objects are frozen: the garbage collector does not visit them.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        self.longest_ms = 0.0
        self.total_ms = 0.0
        self.count = 0

    def run(self, call: Callable[[], T]) -> T:
        start = time.thread_time()
        result = call()
        took_ms = 1000 * (time.thread_time() - start)
        self.longest_ms = max(self.longest_ms, took_ms)
        self.total_ms += took_ms
        self.count += 1
        return result


def sealed_box(batch_records: int) -> tuple[Machine, Box]:
    """Return a box of `RECORDS` sealed records without payloads: no step may need them."""
    machine = Machine()
    machine.handle(commands.PutBox("b", BoxPatch()), 1)
    box = machine.boxes["b"]
    batches = SEGMENT_RECORDS // batch_records
    for serial in range(1, RECORDS // SEGMENT_RECORDS + 1):
        first = (serial - 1) * SEGMENT_RECORDS + 1
        segment = Segment(
            generation=box.generation,
            serial=serial,
            first_seqs=array("Q", range(first, first + SEGMENT_RECORDS, batch_records)),
            first_times=array("q", [1]) * batches,
            last_times=array("q", [1]) * batches,
            counts=array("I", [batch_records]) * batches,
            sizes=array("I", [batch_records * SIZE]) * batches,
        )
        box.log.segments.append(segment)
    log = box.log
    log.head_seq = log.visible_seq = log.count = RECORDS
    log.bytes = RECORDS * SIZE
    log.last_ts = log.visible_ts = 1
    return machine, box


def delete_by_prefix(batch_records: int) -> Steps:
    machine, box = sealed_box(batch_records)
    command = commands.DeleteRecords("b", None, commands.Match("user-1", is_prefix=True))
    steps = Steps()

    def step() -> list[object]:
        outcome = machine.handle(command, 2)
        for lsn, change in outcome.changes:
            frames.encode(lsn, change)
        return list(outcome.needs)

    while needs := steps.run(step):
        for missing in needs:
            if isinstance(missing, TagsNotLoaded):
                for segment in missing.segments:
                    seqs = array("Q", range(segment.first_seq, segment.last_seq + 1, ONE_IN))
                    sizes = array("I", [SIZE]) * len(seqs)
                    box.volatile.tag_lookups[segment.serial, missing.match] = seqs, sizes
    return steps


def delete_in_memory(batch_records: int) -> Steps:
    """Delete by prefix in a box in memory, which is never sealed: its batches are scanned one by one."""
    machine = Machine()
    machine.handle(commands.PutBox("b", BoxPatch(durability="memory")), 1)
    box = machine.boxes["b"]
    records = [b'{"data":1,"tag":"user-%d"}' % (number % ONE_IN) for number in range(batch_records)]
    columns = parse_append(b'{"records":[' + b",".join(records) + b"]}", RecordLimits()).columns
    for number in range(MEMORY_RECORDS // batch_records):
        batch = render(columns, first_seq=number * batch_records + 1, times=1)
        machine.apply(changes.BatchAppended(box.generation, batch, 1), 0)
    steps = Steps()
    command = commands.DeleteRecords("b", None, commands.Match("user-1", is_prefix=True))
    while steps.run(lambda: machine.handle(command, 2)).needs:
        pass
    return steps


def take_snapshot(machine: Machine) -> Steps:
    steps = Steps()
    capture = machine.begin_snapshot()
    while steps.run(lambda: capture.step(32)):
        pass
    machine.end_snapshot(capture)
    return steps


def snapshot_after_delete(batch_records: int) -> Steps:
    machine, box = sealed_box(batch_records)
    for segment in box.log.segments:
        for at in range(0, len(segment), max(1, ONE_IN // batch_records)):
            segment.kill(at, 1, SIZE)
    return take_snapshot(machine)


def queue_box() -> tuple[Machine, Box]:
    machine = Machine()
    machine.handle(commands.PutBox("q", BoxPatch(type="queue", durability="memory")), 1)
    body = b'{"records":[' + b",".join([b'{"data":1}'] * 1000) + b"]}"
    columns = parse_append(body, RecordLimits()).columns
    box = machine.boxes["q"]
    for number in range(JOBS // 1000):
        batch = render(columns, first_seq=number * 1000 + 1, times=1)
        machine.apply(changes.BatchAppended(box.generation, batch, 1), 0)
    return machine, box


def claimed_box() -> tuple[Machine, Box]:
    machine, box = queue_box()
    while machine.handle(queues.Claim(box="q", node="w", max=10_000), 2).reply.jobs:  # type: ignore[union-attr]
        pass
    return machine, box


def claims() -> Steps:
    machine, _ = queue_box()
    steps = Steps()
    for _ in range(20):
        steps.run(lambda: machine.handle(queues.Claim(box="q", node="w", max=10_000), 2))
    return steps


def returned_box() -> tuple[Machine, Box]:
    """Return a queue whose jobs were all returned, so that the log has an entry for each."""
    machine, box = claimed_box()
    machine.handle(commands.PutBox("q", BoxPatch(durability="disk")), 3)
    assert box.queue is not None
    seqs = list(box.queue.jobs)
    for at in range(0, len(seqs), 1000):
        some = seqs[at : at + 1000]
        machine.apply(changes.JobsReturned(box.generation, some, [1] * len(some)), machine.lsn + 1)
    return machine, box


def queue_snapshot() -> Steps:
    machine, _ = returned_box()
    return take_snapshot(machine)


def queue_trim(make: Callable[[], tuple[Machine, Box]]) -> Steps:
    machine, _ = make()
    steps = Steps()
    steps.run(lambda: machine.handle(commands.DeleteRecords("q", 150_001, None), 3))
    return steps


ROWS: dict[str, Callable[[], Steps]] = {
    "delete by prefix, batches of 1000": lambda: delete_by_prefix(1000),
    "delete by prefix, batches of 100": lambda: delete_by_prefix(100),
    "delete by prefix, batches of 1": lambda: delete_by_prefix(1),
    "delete in memory, 1 M in batches of 1000": lambda: delete_in_memory(1000),
    "delete in memory, 1 M in batches of 100": lambda: delete_in_memory(100),
    "snapshot after it, batches of 100": lambda: snapshot_after_delete(100),
    "snapshot after it, batches of 1": lambda: snapshot_after_delete(1),
    "claims of 10,000 jobs": claims,
    "snapshot of a queue with 200,000 entries": queue_snapshot,
    "delete before_seq over 150,000 leased jobs": lambda: queue_trim(claimed_box),
    "delete before_seq over 150,000 returned jobs": lambda: queue_trim(returned_box),
}


def main() -> None:
    gc.set_threshold(100_000, 50, 100)  # as a shard does
    for name, measure in ROWS.items():
        if all(word in name for word in sys.argv[1:]):
            steps = measure()
            times = f"longest {steps.longest_ms:6.1f} ms of {steps.count:4}, {steps.total_ms:7.1f} ms in all"
            print(f"{name:42} {times}", flush=True)


if __name__ == "__main__":
    main()
