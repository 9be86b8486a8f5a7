"""The jobs of one queue: ready, leased, delayed or moving (v0 §8). No other box, no clock.

A job is a record of the box. A job that was never delivered needs no entry here: it is live, visible and
above `fresh_seq`. Only delivered jobs have an entry, until their record is deleted.

            fresh_seq
                ▼
   ■ □ ■ ■ □ ■ ■|■ ■ ■ ■ ■ ■ ■ ■        ■ live   □ deleted
   └ an entry each ┘└ ready, without entries ┘

    READY ──leased──► LEASED ──deadline passed──► READY        deliveries grows by one with every lease
                        │ └──returned, no delay──► READY
                        └──returned with a delay──► DELAYED ──delay passed──► READY
    READY ──delivered too often──► MOVING (to the dead letter box; counted as delayed)
    any   ──the record is deleted, acked, evicted or moved──► no entry

Rules of the file
- `apply_…` methods apply a change. The others decide, and change nothing but indexes: time alone moves a job
  from LEASED or DELAYED to READY (`advance`). That is not logged, because it follows from `due_ms`.
- A worker's name is no proof: every lease has an id, and only the id of the last lease is valid.
- Leases need not be logged. `logged_deliveries` is the number of deliveries in the log; after a crash, an
  entry whose lease was not logged has that number only.

Invariants (`check`)
- COVER: every live job at or below `fresh_seq` has an entry.
- LIVE: an entry is a live job.
- TOTALS: `in_flight` and `delayed_count` count the entries in those states; READY entries are in `_again`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

from pyroaring import BitMap64
from sortedcontainers import SortedList

from shard.core import changes
from shard.core.boxes.box_log import BoxLog
from shard.core.queues.delivery_rate import DeliveryRate
from shard.core.queues.job import DELAYED, JOBS_AT_ONCE, LEASED, MOVING, READY, Job
from shard.core.queues.job import QueueCopy as QueueCopy

#: Entries that one call of `advance`, or a tick, examines: 10 ms. The rest is due at once again.
ADVANCE_MAX = 5_000
#: Jobs at `max_deliveries` that one claim moves to the dead letters.
EXHAUSTED_MAX = 1000
#: Stale entries in the heap of due times before it is rebuilt.
_STALE_MIN = 64
#: An index is rebuilt when one in so many of its entries goes: cheaper than removing them one by one.
_REBUILD_PART = 8
#: All indexes are rebuilt when half of all entries go, and at least so many.
_REBUILD_MIN = 1_000


class Queue:
    """The jobs of one queue: their states, and the indexes over them."""

    __slots__ = (
        "_again",
        "_due",
        "_floor_seq",
        "_holders",
        "_rate",
        "_searched_seq",
        "dead_lettered",
        "delayed_count",
        "delivered_count",
        "fresh_seq",
        "in_flight",
        "jobs",
    )

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        #: The highest seq ever delivered; above it jobs are fresh unless they have an entry.
        self.fresh_seq = 0
        #: Number of jobs moved to a dead letter box.
        self.dead_lettered = 0
        # Everything below is derived from the above.
        self.in_flight = 0
        self.delayed_count = 0
        self._again: SortedList[int] = SortedList()
        #: (due_ms, seq); stale entries are skipped.
        self._due: list[tuple[int, int]] = []
        self._holders: dict[int, set[int]] = {}
        #: Of a queue with `rate_per_s`.
        self._rate: DeliveryRate | None = None
        #: Deliveries since start. Metrics only.
        self.delivered_count = 0
        #: No job up to here is fresh: a search starts after it.
        self._searched_seq = 0
        #: No entry has a lower seq.
        self._floor_seq = 0

    def __repr__(self) -> str:
        return f"<Queue {self.in_flight} in flight, {self.delayed_count} delayed, {len(self._again)} again>"

    # -- deciding

    def ready(self, live: int) -> int:
        """Return how many of `live` visible jobs can be claimed."""
        return live - self.in_flight - self.delayed_count

    def is_held(self, seq: int, *, node: str, lease_id: str | None, now_ms: int) -> bool:
        """Return True if `node` has leased this job now; with `lease_id`, under this lease."""
        job = self.jobs.get(seq)
        return (
            job is not None
            and job.state == LEASED
            and job.due_ms > now_ms
            and job.node == node
            and (lease_id is None or lease_id == job.lease_id)
        )

    def held_by(self, holder: int) -> list[int]:
        """Return the jobs that are leased to a connection, by seq."""
        return sorted(self._holders.get(holder, ()))

    def room(self, holder: int, limit: int) -> int:
        """Return how many more jobs a connection may lease, up to `limit` at once."""
        return limit - len(self._holders.get(holder, ()))

    def delivery_limit(self, rate_per_s: float, now_ms: int) -> int:
        """Return how many jobs the rate of the queue allows now."""
        if self._rate is None:
            self._rate = DeliveryRate()
        return self._rate.limit(rate_per_s, now_ms)

    def pay(self, count: int, rate_per_s: float, now_ms: int, *, is_limited: bool) -> None:
        """Count deliveries for the rate. With `is_limited`, claims want more jobs, and `advance` reports when
        the rate allows them."""
        assert self._rate is not None
        self._rate.pay(count, rate_per_s, now_ms)
        if is_limited:
            self._rate.wait(rate_per_s, now_ms)

    def next_due_ms(self) -> int | None:
        """Return the time at which the next lease or delay ends, or the rate allows more; None if there is
        none."""
        due_ms = self._next_return_ms()
        if self._rate is None or not self._rate.resume_ms:
            return due_ms
        return self._rate.resume_ms if due_ms is None else min(due_ms, self._rate.resume_ms)

    def _next_return_ms(self) -> int | None:
        due = self._due
        while due:
            when, seq = due[0]
            job = self.jobs.get(seq)
            if job is not None and job.due_ms == when and job.state in (LEASED, DELAYED):
                return when
            heapq.heappop(due)
        return None

    def advance(self, now_ms: int) -> int:
        """Make the jobs ready whose lease or delay has ended. Returns 0 if claims can get no more jobs by
        that."""
        back = 0
        if self._rate is not None and 0 < self._rate.resume_ms <= now_ms:
            self._rate.resume_ms = 0
            back = 1
        for _ in range(ADVANCE_MAX):
            when = self._next_return_ms()
            if when is None or when > now_ms:
                break
            _, seq = heapq.heappop(self._due)
            job = self.jobs[seq]
            self._leave(job)
            self._put(_in_state(job, READY))
            back += 1
        return back

    def is_ready(self, seq: int) -> bool:
        """Return True if this live job can be claimed."""
        job = self.jobs.get(seq)
        return job is None or job.state == READY

    def pick(self, log: BoxLog, limit: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        """Return the next jobs to deliver, up to `limit`: returned jobs, then fresh ones, each by seq. And
        the jobs before them that were delivered `deliveries_max` times; 0 = there is no limit."""
        again = list(islice(self._again, limit))
        exhausted_seqs: list[int] = []
        if deliveries_max:
            again, exhausted_seqs = self._again_or_exhausted(limit, deliveries_max)
        return again + self._fresh(log, limit - len(again)), exhausted_seqs

    def _again_or_exhausted(self, limit: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        again: list[int] = []
        exhausted_seqs: list[int] = []
        for seq in self._again:
            if len(again) >= limit or len(exhausted_seqs) >= EXHAUSTED_MAX:
                break
            (exhausted_seqs if self.jobs[seq].deliveries >= deliveries_max else again).append(seq)
        return again, exhausted_seqs

    def _fresh(self, log: BoxLog, limit: int) -> list[int]:
        """Return the next jobs that were never delivered. The cost is proportional to their number; a deleted
        job is skipped once."""
        seqs: list[int] = []
        if limit <= 0:
            return seqs
        seq = max(self.fresh_seq, self._searched_seq, log.earliest_seq - 1) + 1
        stretch = 2 * limit + 64
        for batch in log.spans(seq):
            base = batch.first_seq
            end = min(batch.count - 1, log.visible_seq - base)
            first = max(0, seq - base)
            while first <= end and len(seqs) < limit:
                last = end if batch.dead == batch.count else min(end, first + stretch - 1)
                for run_first, run_last in log.runs(batch, first, last):
                    run = range(base + run_first, base + run_last + 1)
                    unknown = (seq for seq in run if seq not in self.jobs) if self.jobs else iter(run)
                    seqs += islice(unknown, limit - len(seqs))
                if not seqs:
                    self._searched_seq = base + last
                first = last + 1
            if base + batch.count > log.visible_seq or len(seqs) >= limit:
                break
        return seqs

    # -- applying

    def apply_lease(self, change: changes.JobsLeased, *, is_logged: bool) -> None:
        lease_id, node, holder, due_ms = change.lease_id, change.node, change.holder, change.deadline_ms
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            before = self._take_out(seq)
            in_log = deliveries if is_logged else before.logged_deliveries if before is not None else 0
            self._put(Job(seq, deliveries, lease_id, node, holder, due_ms, in_log, LEASED))
        self.fresh_seq = max(self.fresh_seq, change.fresh_seq)
        self.delivered_count += len(change.seqs)

    def apply_extend(self, change: changes.JobsExtended) -> None:
        for seq in change.seqs:
            job = self.jobs[seq]._replace(due_ms=change.deadline_ms)
            self.jobs[seq] = job
            self._note_due(job)

    def apply_return(self, change: changes.JobsReturned) -> None:
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            self._put_back(seq, deliveries, change.ready_ms)

    def apply_count(self, change: changes.JobsCounted) -> None:
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            self._put_back(seq, deliveries, 0)

    def _put_back(self, seq: int, deliveries: int, ready_ms: int) -> None:
        self._restore(seq, deliveries, "", "", 0, ready_ms)

    def mark_moving(self, seq: int, deliveries: int) -> None:
        """Mark a job that moves to another box."""
        self._take_out(seq)
        self._put(Job(seq, deliveries, "", "", 0, 0, deliveries, MOVING))

    def drop(self, seqs: BitMap64) -> None:
        """Drop the entries of deleted records. The cost is that of the smaller set, seqs or entries."""
        if len(seqs) > len(self.jobs):
            self._forget_all([seq for seq in self.jobs if seq in seqs])
        else:
            self._forget(seqs)

    def drop_before(self, earliest_seq: int) -> None:
        """Drop the entries below `earliest_seq`. Each seq is visited once."""
        if self.jobs and earliest_seq > self._floor_seq:
            seqs: Sequence[int] = range(self._floor_seq, earliest_seq)
            if len(seqs) > len(self.jobs):
                seqs = [seq for seq in self.jobs if seq < earliest_seq]
            self._forget_all(seqs)
        self._floor_seq = max(self._floor_seq, earliest_seq)

    def apply_restate(self, change: changes.JobsRestated) -> None:
        """Replace all entries. A long list comes in several changes; the first one clears the entries."""
        if change.is_first:
            self._clear()
        self.fresh_seq = change.fresh_seq
        for seq, deliveries, lease_id, node, holder, due_ms in change.jobs:
            self._restore(seq, deliveries, lease_id, node, holder, due_ms)

    def on_start(self, *, leases_kept: bool) -> None:
        """Put back the jobs that connections of the last process held; without `leases_kept`, all jobs."""
        if not leases_kept:
            self.restore(self.facts(leases_kept=False))
        for holder in list(self._holders):
            for seq in self.held_by(holder):
                self._put_back(seq, self.jobs[seq].deliveries, 0)

    def rewind(self, ms: int) -> None:
        """Shift all due times back by `ms`, with the clock: leases and delays keep their remaining time."""
        for seq, job in self.jobs.items():
            if job.state in (LEASED, DELAYED):
                self.jobs[seq] = job._replace(due_ms=job.due_ms - ms)
        self._list_due()
        if self._rate is not None:
            self._rate.rewind(ms)

    # -- snapshots

    def facts(self, *, leases_kept: bool) -> changes.QueueFacts:
        """Return the logged state of this queue; without `leases_kept`, without leases. `record_moves.py`
        has the moves."""
        copy = self.copy(leases_kept=leases_kept)
        return copy.facts_with(sorted(copy.entries(copy.jobs)))

    @property
    def is_large(self) -> bool:
        """True if its facts take too long to encode at once."""
        return len(self.jobs) > JOBS_AT_ONCE

    def copy(self, *, leases_kept: bool) -> QueueCopy:
        """Copy the state from which a snapshot encodes the facts of a large queue later."""
        return QueueCopy(self.fresh_seq, self.dead_lettered, list(self.jobs.values()), leases_kept)

    def restore(self, facts: changes.QueueFacts) -> None:
        self._clear()
        self.fresh_seq = facts.fresh_seq
        self.dead_lettered = facts.dead_lettered
        for entry in facts.jobs:
            self._restore(*entry)

    def _restore(self, seq: int, deliveries: int, lease_id: str, node: str, holder: int, due_ms: int) -> None:
        self._take_out(seq)
        state = LEASED if lease_id else DELAYED if due_ms else READY
        self._put(Job(seq, deliveries, lease_id, node, holder, due_ms, deliveries, state))

    # -- indexes

    def _clear(self) -> None:
        self.jobs = {seq: job for seq, job in self.jobs.items() if job.state == MOVING}
        self._again.clear()
        self._due.clear()
        self._holders.clear()
        self.delayed_count = len(self.jobs)
        self.in_flight = self.fresh_seq = self._searched_seq = self._floor_seq = 0

    def _take_out(self, seq: int) -> Job | None:
        """Remove the entry of a job, if any, from all indexes. Returns it; `_put` adds its replacement."""
        job = self.jobs.get(seq)
        if job is not None:
            self._leave(job)
        elif seq < self._floor_seq:
            self._floor_seq = seq
        return job

    def _put(self, job: Job) -> None:
        self.jobs[job.seq] = job
        state = job.state
        if state == READY:
            self._again.add(job.seq)
            return
        if state == LEASED:
            self.in_flight += 1
            if job.holder:
                self._holders.setdefault(job.holder, set()).add(job.seq)
        else:
            self.delayed_count += 1
        if state != MOVING:
            self._note_due(job)

    def _leave(self, job: Job) -> None:
        if job.state == READY:
            self._again.remove(job.seq)
        elif job.state != LEASED:
            self.delayed_count -= 1
        else:
            self.in_flight -= 1
            if job.holder:
                self._release(job)

    def _release(self, job: Job) -> None:
        seqs = self._holders[job.holder]
        seqs.remove(job.seq)
        if not seqs:
            del self._holders[job.holder]

    def _note_due(self, job: Job) -> None:
        if len(self._due) > 2 * len(self.jobs) + _STALE_MIN:
            self._list_due()
        heapq.heappush(self._due, (job.due_ms, job.seq))

    def _list_due(self) -> None:
        self._due = [(job.due_ms, seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)]
        heapq.heapify(self._due)

    def _forget_all(self, seqs: Sequence[int]) -> None:
        """Drop entries. If they are the majority, rebuild all indexes from the others: that takes a fifth of
        the time."""
        if len(seqs) <= len(self.jobs) // 2 or len(seqs) < _REBUILD_MIN:
            self._forget(seqs)
            return
        jobs = self.jobs
        for seq in seqs:
            jobs.pop(seq, None)
        self._holders.clear()
        self.in_flight = self.delayed_count = 0
        ready: list[int] = []
        for seq, job in jobs.items():
            if job.state == READY:
                ready.append(seq)
            elif job.state == LEASED:
                self.in_flight += 1
                if job.holder:
                    self._holders.setdefault(job.holder, set()).add(seq)
            else:
                self.delayed_count += 1
        self._again = SortedList(ready)

    def _forget(self, seqs: Iterable[int]) -> None:
        """Drop entries. READY entries leave their index together: one by one would take most of the time."""
        pop = self.jobs.pop
        ready: list[int] = []
        leased_count = other_count = 0
        for seq in seqs:
            job = pop(seq, None)
            if job is None:
                continue
            if job.state == READY:
                ready.append(seq)
            elif job.state == LEASED:
                leased_count += 1
                if job.holder:
                    self._release(job)
            else:
                other_count += 1
        self.in_flight -= leased_count
        self.delayed_count -= other_count
        if len(ready) * _REBUILD_PART < len(self._again):
            for seq in ready:
                self._again.remove(seq)
        elif ready:
            self._again = SortedList(set(self._again).difference(ready))

    def check(self, log: BoxLog) -> None:
        """Assert the invariants of the file. For tests: it examines all entries."""
        if log.records_awaited:
            return  # a box that is being restored has its jobs before its records
        states = [job.state for job in self.jobs.values()]
        assert self.in_flight == states.count(LEASED), "TOTALS"
        assert self.delayed_count == states.count(DELAYED) + states.count(MOVING), "TOTALS"
        assert list(self._again) == sorted(seq for seq, job in self.jobs.items() if job.state == READY), (
            "TOTALS"
        )
        held_seqs = {seq for seqs in self._holders.values() for seq in seqs}
        leased_seqs = {seq for seq, job in self.jobs.items() if job.state == LEASED}
        assert held_seqs == {seq for seq in leased_seqs if self.jobs[seq].holder}, "TOTALS"
        due = set(self._due)
        expected_due = {(job.due_ms, seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)}
        assert expected_due <= due, "TOTALS"
        for seq in self.jobs:
            assert log.is_live(seq) and seq >= self._floor_seq, "LIVE"
        for seq in range(log.earliest_seq, min(log.head_seq, max(self.fresh_seq, self._searched_seq)) + 1):
            assert seq in self.jobs or not log.is_live(seq), "COVER"


def _in_state(job: Job, state: int) -> Job:
    return Job(*job[:7], state)
