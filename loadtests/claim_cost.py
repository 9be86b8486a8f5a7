"""Measures what claims cost in small and large queues: `python -m loadtests.claim_cost [plain delayed …]`.

A claim must cost O(log n) in waiting and delayed jobs and in keys (v0 §23). Each row claims and acks jobs ten
at a time, in a queue with 1,000 and in one with a million waiting jobs, with as many delayed jobs beside
them, and with up to 100,000 keys. The figure is CPU time of the core for one job, without files or sockets,
and the ratio of the two queues. The last row is memory: resident bytes of a plain waiting job beyond an equal
record of a log.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.machine import Machine
from shard.core.queues.new_jobs import job_fields_of
from streams.protocol.messages import commands, queues
from streams.protocol.messages.requests import RecordLimits, parse_append
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import render

SMALL, LARGE = 1_000, 1_000_000
KEYS_MAX = 100_000
CLAIMS, CLAIM_JOBS = 60, 10
BATCH_RECORDS = 1_000
NOW_MS = 1_000


def fill(machine: Machine, box: Box, count: int, fields: str) -> None:
    """Append jobs with these further JSON members; `%d` in them is the number of the job."""
    for first in range(0, count, BATCH_RECORDS):
        numbers = range(first, min(first + BATCH_RECORDS, count))
        records = ",".join(
            '{"data":1%s}' % (fields % number if "%" in fields else fields) for number in numbers
        )
        columns = parse_append(f'{{"records":[{records}]}}'.encode(), RecordLimits()).columns
        batch = render(columns, first_seq=box.log.head_seq + 1, times=NOW_MS)
        batch.job_fields = job_fields_of(columns, "b", is_queue=box.queue is not None, wall_ms=NOW_MS)
        machine.apply(changes.BatchAppended(box.generation, batch, NOW_MS), 0)


def new_box(kind: str, **config: object) -> tuple[Machine, Box]:
    machine = Machine()
    machine.handle(commands.PutBox("b", BoxPatch(type=kind, durability="memory", **config)), NOW_MS)  # type: ignore[arg-type]
    return machine, machine.boxes["b"]


def cost_us(row: str, count: int) -> float:
    """CPU time of one job, claimed and acked."""
    config: dict[str, object] = {"key_concurrency": 1, "fair": True} if row == "keyed" else {}
    machine, box = new_box("queue", **config)
    if row == "delayed":
        fill(machine, box, count, ',"delay_ms":3600000')
    keys = max(1, min(KEYS_MAX, count // 10))
    fields = ',"ordering_key":"k%d"' if row == "keyed" else ""
    if row == "keyed":
        for first in range(0, count, keys):  # each key in turn
            fill(machine, box, min(keys, count - first), fields)
    else:
        fill(machine, box, count, fields)
    claim = queues.Claim(box="b", node="w", max=CLAIM_JOBS)
    machine.handle(claim, NOW_MS)  # makes all jobs visible, a few thousand at a time
    while box.queue is not None and box.queue.advance(NOW_MS, NOW_MS):
        pass
    gc.collect()
    gc.freeze()
    jobs = 0
    started_s = time.thread_time()
    for _ in range(CLAIMS):
        reply = machine.handle(claim, NOW_MS).reply
        assert isinstance(reply, queues.ClaimResult)
        seqs = [seq for seq, _ in reply.jobs]
        jobs += len(seqs)
        machine.handle(queues.Ack(box="b", node="w", seqs=seqs), NOW_MS)
    took_s = time.thread_time() - started_s
    gc.unfreeze()
    assert jobs == CLAIMS * CLAIM_JOBS
    return 1e6 * took_s / jobs


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def memory_of(kind: str, count: int) -> float:
    gc.collect()
    before = resident_bytes()
    machine, box = new_box(kind)
    fill(machine, box, count, "")
    machine.handle(commands.GetState("b", False), NOW_MS)
    return (resident_bytes() - before) / count


def main() -> None:
    for row in sys.argv[1:] or ("plain", "delayed", "keyed", "memory"):
        if row == "memory":
            log, queue = memory_of("log", LARGE), memory_of("queue", LARGE)
            print(f"{row:8} a record of a log {log:.0f} B, a plain waiting job {queue:.0f} B")
            continue
        small, large = (min(cost_us(row, count) for _ in range(3)) for count in (SMALL, LARGE))
        print(
            f"{row:8} {SMALL:,}: {small:.1f} µs  {LARGE:,}: {large:.1f} µs  ratio {large / small:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
