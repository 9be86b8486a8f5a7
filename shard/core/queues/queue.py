"""The jobs of one queue: which are leased, which wait, which come back (v0 §8). No other box, no clock.

A job is a record of the box. A job that nobody has ever been given needs no entry here: it is live, visible
and above `fresh_seq`. Only jobs that have been delivered have an entry, until they are gone.

            fresh_seq
                ▼
   ■ □ ■ ■ □ ■ ■|■ ■ ■ ■ ■ ■ ■ ■        ■ live   □ gone
   └ an entry each ┘└ waiting, free of cost ┘

    READY ──leased──► LEASED ──deadline passed──► READY        deliveries grows by one with every lease
                        │ └──returned, no delay──► READY
                        └──returned with a delay──► DELAYED ──delay passed──► READY
    READY ──delivered too often──► MOVING (to the dead letter box; counted as delayed)
    any   ──the record is deleted, acked, evicted or moved──► no entry

Rules of the file
- Methods named after a change make it true. The others decide, and touch nothing but indexes: time alone
  moves a job from LEASED or DELAYED to READY (`advance`), which is no fact of its own: it follows from
  `due_ms`.
- A worker's name is no proof: every lease has an id, and only the id of the last lease counts.
- Leases need not be logged. `kept` is the number of deliveries that the log knows; after a crash that is what
  is left of an entry whose lease was not logged.

Invariants (`check`)
- COVER: every live job at or below `fresh_seq` has an entry.
- LIVE: an entry is a live job.
- TOTALS: `in_flight` and `delayed` count the entries in those states, and READY entries are in `_again`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap64
from sortedcontainers import SortedList

from shard.core import changes
from shard.core.boxes.log import Log

READY, LEASED, DELAYED, MOVING = range(4)

#: Entries that one call of `advance`, or a tick, looks at: 10 ms. The rest is due at once again.
ADVANCE_MAX = 5_000
#: Jobs delivered too often that one claim takes out of the way.
EXHAUSTED_MAX = 1000
#: Jobs whose facts are worked out at once, for a snapshot: 2 ms.
JOBS_AT_ONCE = 10_000
#: Places in the heap of due times that may be out of date before it is made anew.
_STALE_MIN = 64
#: An index is made anew when one in so many of its entries goes: cheaper than to take them out one by one.
_REBUILT_PART = 8
#: All indexes are made anew when half of all entries go, and at least so many.
_REBUILT_MIN = 1_000


class Job(NamedTuple):
    """What is known of a job that has been delivered. It begins with what a snapshot has of it, and never
    changes: another one takes its place. So a snapshot copies a list of them, a millisecond for 200,000."""

    seq: int
    deliveries: int
    #: Of the last lease; "" when it was given back.
    lease_id: str
    node: str
    #: The connection that a lease ends with; 0 = none.
    holder: int
    #: When the lease, or the delay, is over.
    due_ms: int
    #: How many deliveries the log knows of.
    kept: int
    state: int


class QueueCopy(NamedTuple):
    """What a snapshot takes of a queue at once. The entries in it are worked out later, some at a time."""

    fresh_seq: int
    dead_lettered: int
    jobs: list[Job]
    leases_kept: bool

    def take_some(self) -> list[changes.JobEntry]:
        """Takes `JOBS_AT_ONCE` jobs out. Returns what the log knows of them."""
        some = self.jobs[-JOBS_AT_ONCE:]
        del self.jobs[-JOBS_AT_ONCE:]
        return self.entries(some)

    def entries(self, some: Sequence[Job]) -> list[changes.JobEntry]:
        if self.leases_kept:
            return [job[:6] for job in some if job.state != MOVING]
        return [
            (job.seq, job.kept, "", "", 0, 0 if job.lease_id else job.due_ms)
            for job in some
            if job.kept and job.state != MOVING
        ]

    def facts_with(self, entries: list[changes.JobEntry]) -> changes.QueueFacts:
        """The facts, with these entries."""
        # Without entries no live job is at or below it (COVER), and it says nothing.
        fresh_seq = self.fresh_seq if self.leases_kept and entries else 0
        return changes.QueueFacts(fresh_seq=fresh_seq, jobs=entries, dead_lettered=self.dead_lettered)


class Queue:
    __slots__ = (
        "_again",
        "_due",
        "_floor_seq",
        "_holders",
        "_passed_seq",
        "dead_lettered",
        "delayed",
        "fresh_seq",
        "in_flight",
        "jobs",
    )

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        #: The highest seq that was ever given out; above it jobs are fresh unless they have an entry.
        self.fresh_seq = 0
        #: How many jobs have been moved to a dead letter box so far.
        self.dead_lettered = 0
        # Everything below follows from the above.
        self.in_flight = 0
        self.delayed = 0
        self._again: SortedList[int] = SortedList()
        #: (when, seq); an entry that is not due then any more is passed over.
        self._due: list[tuple[int, int]] = []
        self._holders: dict[int, set[int]] = {}
        #: Nothing up to here is fresh: what a search has passed over need not be searched again.
        self._passed_seq = 0
        #: No entry lies below.
        self._floor_seq = 0

    def __repr__(self) -> str:
        return f"<Queue {self.in_flight} in flight, {self.delayed} delayed, {len(self._again)} again>"

    # -- deciding

    def ready(self, live: int) -> int:
        """How many of `live` visible jobs can be claimed."""
        return live - self.in_flight - self.delayed

    def is_held(self, seq: int, *, node: str, lease_id: str | None, now_ms: int) -> bool:
        """Whether `node` holds this job now; with `lease_id`, by this very lease."""
        job = self.jobs.get(seq)
        return (
            job is not None
            and job.state == LEASED
            and job.due_ms > now_ms
            and job.node == node
            and (lease_id is None or lease_id == job.lease_id)
        )

    def held_by(self, holder: int) -> list[int]:
        """Jobs that are leased to a connection, in their order."""
        return sorted(self._holders.get(holder, ()))

    def room(self, holder: int, wanted: int) -> int:
        """How many more jobs a connection that wants so many at once may be given."""
        return wanted - len(self._holders.get(holder, ()))

    def next_due_ms(self) -> int | None:
        """When time alone brings a job back."""
        due = self._due
        while due:
            when, seq = due[0]
            job = self.jobs.get(seq)
            if job is not None and job.due_ms == when and job.state in (LEASED, DELAYED):
                return when
            heapq.heappop(due)
        return None

    def advance(self, now_ms: int) -> int:
        """Lets time pass: jobs whose lease or delay is over can be claimed. Returns how many."""
        back = 0
        for _ in range(ADVANCE_MAX):
            when = self.next_due_ms()
            if when is None or when > now_ms:
                break
            _, seq = heapq.heappop(self._due)
            job = self.jobs[seq]
            self._leave(job)
            self._put(_in_state(job, READY))
            back += 1
        return back

    def is_ready(self, seq: int) -> bool:
        """Whether this live job could be claimed."""
        job = self.jobs.get(seq)
        return job is None or job.state == READY

    def pick(self, log: Log, wanted: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        """The next jobs to give out, up to `wanted`: those that came back, then fresh ones, each by seq. And
        jobs that come before them but have been delivered `deliveries_max` times; 0 = there is no limit."""
        again = list(islice(self._again, wanted))
        exhausted: list[int] = []
        if deliveries_max:
            again, exhausted = self._again_or_exhausted(wanted, deliveries_max)
        return again + self._fresh(log, wanted - len(again)), exhausted

    def _again_or_exhausted(self, wanted: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        again: list[int] = []
        exhausted: list[int] = []
        for seq in self._again:
            if len(again) >= wanted or len(exhausted) >= EXHAUSTED_MAX:
                break
            (exhausted if self.jobs[seq].deliveries >= deliveries_max else again).append(seq)
        return again, exhausted

    def _fresh(self, log: Log, wanted: int) -> list[int]:
        """The next jobs that nobody has ever been given. Costs as much as is found, and what is passed over
        is passed over once."""
        found: list[int] = []
        if wanted <= 0:
            return found
        seq = max(self.fresh_seq, self._passed_seq, log.earliest_seq - 1) + 1
        stretch = 2 * wanted + 64
        for batch in log.spans(seq):
            base = batch.first_seq
            end = min(batch.count - 1, log.visible_seq - base)
            first = max(0, seq - base)
            while first <= end and len(found) < wanted:
                last = end if batch.dead == batch.count else min(end, first + stretch - 1)
                for run_first, run_last in log.runs(batch, first, last):
                    run = range(base + run_first, base + run_last + 1)
                    unknown = (seq for seq in run if seq not in self.jobs) if self.jobs else iter(run)
                    found += islice(unknown, wanted - len(found))
                if not found:
                    self._passed_seq = base + last
                first = last + 1
            if base + batch.count > log.visible_seq or len(found) >= wanted:
                break
        return found

    # -- applying

    def leased(self, change: changes.JobsLeased, *, is_logged: bool) -> None:
        lease_id, node, holder, due_ms = change.lease_id, change.node, change.holder, change.deadline_ms
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            before = self._taken_out(seq)
            kept = deliveries if is_logged else before.kept if before is not None else 0
            self._put(Job(seq, deliveries, lease_id, node, holder, due_ms, kept, LEASED))
        self.fresh_seq = max(self.fresh_seq, change.fresh_seq)

    def extended(self, change: changes.JobsExtended) -> None:
        for seq in change.seqs:
            job = self.jobs[seq]._replace(due_ms=change.deadline_ms)
            self.jobs[seq] = job
            self._note_due(job)

    def returned(self, change: changes.JobsReturned) -> None:
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            self._put_back(seq, deliveries, change.ready_ms)

    def counted(self, change: changes.JobsCounted) -> None:
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            self._put_back(seq, deliveries, 0)

    def _put_back(self, seq: int, deliveries: int, ready_ms: int) -> None:
        self._restore(seq, deliveries, "", "", 0, ready_ms)

    def moving(self, seq: int, deliveries: int) -> None:
        """This job is on its way to another box."""
        self._taken_out(seq)
        self._put(Job(seq, deliveries, "", "", 0, 0, deliveries, MOVING))

    def gone(self, seqs: BitMap64) -> None:
        """These records are not there any more. Costs as much as the fewer of them and of the entries."""
        if len(seqs) > len(self.jobs):
            self._forget_all([seq for seq in self.jobs if seq in seqs])
        else:
            self._forget(seqs)

    def dropped_before(self, earliest_seq: int) -> None:
        """No record below `earliest_seq` is there any more. Passes over every seq once in a box's life."""
        if self.jobs and earliest_seq > self._floor_seq:
            seqs: Sequence[int] = range(self._floor_seq, earliest_seq)
            if len(seqs) > len(self.jobs):
                seqs = [seq for seq in self.jobs if seq < earliest_seq]
            self._forget_all(seqs)
        self._floor_seq = max(self._floor_seq, earliest_seq)

    def restated(self, change: changes.JobsRestated) -> None:
        """All entries, said anew; a long list comes in several changes, the first of which starts over."""
        if change.is_first:
            self._clear()
        self.fresh_seq = change.fresh_seq
        for seq, deliveries, lease_id, node, holder, due_ms in change.jobs:
            self._restore(seq, deliveries, lease_id, node, holder, due_ms)

    def started(self, *, leases_kept: bool) -> None:
        """A new life of the shard: no connection of the last one is left; without `leases_kept`, no lease."""
        if not leases_kept:
            self.restore(self.facts(leases_kept=False))
        for holder in list(self._holders):
            for seq in self.held_by(holder):
                self._put_back(seq, self.jobs[seq].deliveries, 0)

    def rewound(self, ms: int) -> None:
        """Time begins again earlier by `ms`: what is left of leases and delays stays the same."""
        for seq, job in self.jobs.items():
            if job.state in (LEASED, DELAYED):
                self.jobs[seq] = job._replace(due_ms=job.due_ms - ms)
        self._list_due()

    # -- snapshots

    def facts(self, *, leases_kept: bool) -> changes.QueueFacts:
        """What the log knows of this queue; without `leases_kept` that leaves out its leases. What moves is
        a fact of `record_moves.py`."""
        copy = self.copied(leases_kept=leases_kept)
        return copy.facts_with(sorted(copy.entries(copy.jobs)))

    @property
    def is_large(self) -> bool:
        """True if its facts take too long to be worked out at once."""
        return len(self.jobs) > JOBS_AT_ONCE

    def copied(self, *, leases_kept: bool) -> QueueCopy:
        """All that the facts of a large queue are worked out from, later."""
        return QueueCopy(self.fresh_seq, self.dead_lettered, list(self.jobs.values()), leases_kept)

    def restore(self, facts: changes.QueueFacts) -> None:
        self._clear()
        self.fresh_seq = facts.fresh_seq
        self.dead_lettered = facts.dead_lettered
        for entry in facts.jobs:
            self._restore(*entry)

    def _restore(self, seq: int, deliveries: int, lease_id: str, node: str, holder: int, due_ms: int) -> None:
        self._taken_out(seq)
        state = LEASED if lease_id else DELAYED if due_ms else READY
        self._put(Job(seq, deliveries, lease_id, node, holder, due_ms, deliveries, state))

    # -- indexes

    def _clear(self) -> None:
        self.jobs = {seq: job for seq, job in self.jobs.items() if job.state == MOVING}
        self._again.clear()
        self._due.clear()
        self._holders.clear()
        self.delayed = len(self.jobs)
        self.in_flight = self.fresh_seq = self._passed_seq = self._floor_seq = 0

    def _taken_out(self, seq: int) -> Job | None:
        """The entry of a job, if it has one, out of all indexes; `_put` puts another one in its place."""
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
            self.delayed += 1
        if state != MOVING:
            self._note_due(job)

    def _leave(self, job: Job) -> None:
        if job.state == READY:
            self._again.remove(job.seq)
        elif job.state != LEASED:
            self.delayed -= 1
        else:
            self.in_flight -= 1
            if job.holder:
                self._release(job)

    def _release(self, job: Job) -> None:
        held = self._holders[job.holder]
        held.remove(job.seq)
        if not held:
            del self._holders[job.holder]

    def _note_due(self, job: Job) -> None:
        if len(self._due) > 2 * len(self.jobs) + _STALE_MIN:
            self._list_due()
        heapq.heappush(self._due, (job.due_ms, job.seq))

    def _list_due(self) -> None:
        self._due = [(job.due_ms, seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)]
        heapq.heapify(self._due)

    def _forget_all(self, seqs: Sequence[int]) -> None:
        """Drops entries. If they are most of them, everything is made anew from the others: that takes a
        fifth of the time."""
        if len(seqs) <= len(self.jobs) // 2 or len(seqs) < _REBUILT_MIN:
            self._forget(seqs)
            return
        jobs = self.jobs
        for seq in seqs:
            jobs.pop(seq, None)
        self._holders.clear()
        self.in_flight = self.delayed = 0
        ready: list[int] = []
        for seq, job in jobs.items():
            if job.state == READY:
                ready.append(seq)
            elif job.state == LEASED:
                self.in_flight += 1
                if job.holder:
                    self._holders.setdefault(job.holder, set()).add(seq)
            else:
                self.delayed += 1
        self._again = SortedList(ready)

    def _forget(self, seqs: Iterable[int]) -> None:
        """Drops entries. Those that can be claimed again leave their index together: one by one that would
        take most of the time."""
        pop = self.jobs.pop
        ready: list[int] = []
        leased = others = 0
        for seq in seqs:
            job = pop(seq, None)
            if job is None:
                continue
            if job.state == READY:
                ready.append(seq)
            elif job.state == LEASED:
                leased += 1
                if job.holder:
                    self._release(job)
            else:
                others += 1
        self.in_flight -= leased
        self.delayed -= others
        if len(ready) * _REBUILT_PART < len(self._again):
            for seq in ready:
                self._again.remove(seq)
        elif ready:
            self._again = SortedList(set(self._again).difference(ready))

    def check(self, log: Log) -> None:
        """Asserts the invariants named above. For tests: it looks at everything."""
        if log.records_awaited:
            return  # as of the log: the jobs of a box that is about to be stored come before its records
        states = [job.state for job in self.jobs.values()]
        assert self.in_flight == states.count(LEASED), "TOTALS"
        assert self.delayed == states.count(DELAYED) + states.count(MOVING), "TOTALS"
        assert list(self._again) == sorted(seq for seq, job in self.jobs.items() if job.state == READY), (
            "TOTALS"
        )
        held = {seq for seqs in self._holders.values() for seq in seqs}
        leased = {seq for seq, job in self.jobs.items() if job.state == LEASED}
        assert held == {seq for seq in leased if self.jobs[seq].holder}, "TOTALS"
        due = set(self._due)
        timed = {(job.due_ms, seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)}
        assert timed <= due, "TOTALS"
        for seq in self.jobs:
            assert log.is_live(seq) and seq >= self._floor_seq, "LIVE"
        for seq in range(log.earliest_seq, min(log.head_seq, max(self.fresh_seq, self._passed_seq)) + 1):
            assert seq in self.jobs or not log.is_live(seq), "COVER"


def _in_state(job: Job, state: int) -> Job:
    return Job(*job[:7], state)
