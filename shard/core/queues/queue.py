"""The jobs of one queue: ready, leased, delayed or moving (v0 §8). No other box, no clock.

A job is a record of the box. A job that was never delivered needs no entry here: it is live, visible and
above `fresh_seq`. Only jobs that were delivered or have job fields have an entry, until their record is
deleted. `job_index.py` has the indexes over the entries, `lines.py` the order of jobs with keys.

            fresh_seq
                ▼
   ■ □ ■ ■ □ ■ ■|■ ■ ■ ■ ■ ■ ■ ■        ■ live   □ deleted
   └ an entry each ┘└ ready, without entries ┘

    READY ──leased──► LEASED ──deadline passed──► READY        deliveries grows by one with every lease
                        │ └──returned, no delay──► READY
                        └──returned with a delay──► DELAYED ──delay passed──► READY
    INCOMING ──visible──► READY, or SCHEDULED ──its wall-clock time──► READY      jobs with fields
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
- LINES, OFFERS: the lines have exactly the entries with a key or a priority.
- LIVE: an entry is a live job.
- TOTALS: `in_flight` and `delayed_count` count the entries in those states; READY entries are in `_again`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes.box_log import BoxLog
from shard.core.queues import backoff
from shard.core.queues.delivery_rate import DeliveryRate
from shard.core.queues.job import DELAYED, INCOMING, JOBS_AT_ONCE, LEASED, MOVING, READY, SCHEDULED, Job
from shard.core.queues.job import QueueCopy as QueueCopy
from shard.core.queues.job_index import JobIndex
from shard.core.queues.move_queue import Move
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.job_fields import JobFields

#: Entries that one call of `advance`, or a tick, examines: 10 ms. The rest is due at once again.
ADVANCE_MAX = 5_000
#: Jobs at `max_deliveries` that one claim moves to the dead letters.
EXHAUSTED_MAX = 1000


class Queue(JobIndex):
    """The jobs of one queue: their states, and the indexes over them."""

    __slots__ = ("_rate", "_searched_seq", "_wall_ahead_ms", "dead_lettered", "delivered_count", "fresh_seq")

    def __init__(self, log: BoxLog, config: BoxConfig) -> None:
        super().__init__(log, config)
        #: The highest seq ever delivered; above it jobs are fresh unless they have an entry.
        self.fresh_seq = 0
        #: Number of jobs moved to a dead letter box.
        self.dead_lettered = 0
        #: System clock minus shard time, as of the last `advance`.
        self._wall_ahead_ms = 0
        #: Of a queue with `rate_per_s`.
        self._rate: DeliveryRate | None = None
        #: Deliveries since start. Metrics only.
        self.delivered_count = 0
        #: No job up to here is fresh: a search starts after it.
        self._searched_seq = 0

    def __repr__(self) -> str:
        return f"<Queue {self.in_flight} in flight, {self.delayed_count} delayed, {len(self._again)} again>"

    def configure(self, config: BoxConfig) -> None:
        """Use another config."""
        is_backoff_changed = config.retry_backoff != self._config.retry_backoff
        self._config = config
        if is_backoff_changed:
            self._list_due()
        if self._lines is not None:
            self._lines.configure(config.key_concurrency, is_fair=config.fair)

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

    def time_of(self, seq: int) -> int:
        """Return `deliver_at` of a job in shard time; 0 if it has none."""
        job = self.jobs.get(seq)
        return job.deliver_at - self._wall_ahead_ms if job is not None and job.deliver_at else 0

    def floor_for_ttl(self, floor: int, oldest_wall_ms: int) -> int:
        """Return `floor`, or the first job below it whose time is after `oldest_wall_ms`: its TTL counts from
        then, and nothing behind it expires before it does."""
        seqs = self._timed_seqs
        while seqs and seqs[0] < floor:
            job = self.jobs.get(seqs[0])
            if job is not None and job.deliver_at > oldest_wall_ms:
                return seqs[0]
            heapq.heappop(seqs)
        return floor

    def advance(self, now_ms: int, wall_ms: int) -> int:
        """Make the jobs ready whose lease, delay or time has ended, and those with fields that are visible.
        Returns 0 if claims can get no more jobs by that."""
        self._wall_ahead_ms = wall_ms - now_ms
        back = 0
        while self._incoming and self._incoming[0] <= self._log.visible_seq and back < ADVANCE_MAX:
            job = self.jobs.get(heapq.heappop(self._incoming))
            if job is not None and job.state == INCOMING:
                self._put(job._replace(state=SCHEDULED if job.deliver_at > wall_ms else READY))
                back += 1
        if self._rate is not None and 0 < self._rate.resume_ms <= now_ms:
            self._rate.resume_ms = 0
            back += 1
        while back < ADVANCE_MAX:
            when = self._next_return_ms()
            if when is None or when > now_ms:
                break
            _, seq = heapq.heappop(self._due)
            self._end_wait(self.jobs[seq], now_ms)
            back += 1
        while back < ADVANCE_MAX:
            when = self.next_wall_ms()
            if when is None or when > wall_ms:
                break
            _, seq = heapq.heappop(self._times)
            job = self.jobs[seq]
            self._leave(job)
            self._put(job._replace(state=READY))
            back += 1
        return back

    def _end_wait(self, job: Job, now_ms: int) -> None:
        """A lease or a delay has ended: the job is ready, or waits for its backoff."""
        self._leave(job)
        if job.state == LEASED and self._config.retry_backoff is not None:
            delayed_job = job._replace(state=DELAYED)
            if self._end_of(delayed_job) > now_ms:
                self._put(delayed_job)
                return
        self._put(job._replace(state=READY))

    def backoff_ms(self, seq: int) -> int:
        """Return how long a returned job waits."""
        if self._config.retry_backoff is None:
            return 0
        return backoff.delay_ms(self._config.retry_backoff, seq, self.jobs[seq].deliveries)

    def is_ready(self, seq: int) -> bool:
        """Return True if this live job can be claimed."""
        job = self.jobs.get(seq)
        return job is None or job.state == READY

    def pick(self, log: BoxLog, limit: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        """Return the next jobs to deliver, up to `limit`, in the order of claims: without keys and priority
        returned jobs, then fresh ones, each by seq. And the jobs before them that were delivered
        `deliveries_max` times; 0 = there is no limit."""
        if self._lines is not None and self._lines.ready_count:
            return self._lines.pick(
                limit,
                _PlainJobs(self, limit),
                deliveries_max=deliveries_max,
                exhausted_max=EXHAUSTED_MAX,
            )
        again = list(islice(self._again, limit))
        exhausted_seqs: list[int] = []
        if deliveries_max:
            again, exhausted_seqs = self._again_or_exhausted(limit, deliveries_max)
        return again + self.fresh_jobs(limit - len(again)), exhausted_seqs

    @property
    def has_lines(self) -> bool:
        """True if jobs are ordered by more than their seqs."""
        return self._lines is not None

    def can_change(self, seq: int) -> bool:
        """Return True if this live job is waiting or delayed."""
        job = self.jobs.get(seq)
        return job is None or job.state not in (LEASED, MOVING)

    def returned_jobs(self) -> Iterator[int]:
        return iter(self._again)

    def _again_or_exhausted(self, limit: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        again: list[int] = []
        exhausted_seqs: list[int] = []
        for seq in self._again:
            if len(again) >= limit or len(exhausted_seqs) >= EXHAUSTED_MAX:
                break
            (exhausted_seqs if self.jobs[seq].deliveries >= deliveries_max else again).append(seq)
        return again, exhausted_seqs

    def fresh_jobs(self, limit: int) -> list[int]:
        """Return the next jobs that were never delivered. The cost is proportional to their number; a deleted
        job is skipped once."""
        seqs: list[int] = []
        if limit <= 0:
            return seqs
        log = self._log
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

    def add_jobs(self, first_seq: int, count: int, fields: JobFields) -> None:
        """Add entries for the records of a batch that have job fields. They are delivered when visible."""
        for index, key, priority, time in fields.rows(count):
            self._put(Job(first_seq + index, 0, "", "", 0, 0, 0, INCOMING, key, priority, time))

    def apply_lease(self, change: changes.JobsLeased, *, is_logged: bool) -> None:
        lease_id, node, holder, due_ms = change.lease_id, change.node, change.holder, change.deadline_ms
        for seq, deliveries in zip(change.seqs, change.deliveries, strict=True):
            job = self._take_out(seq)
            in_log = deliveries if is_logged else job.logged_deliveries
            self._put(
                Job(
                    seq,
                    deliveries,
                    lease_id,
                    node,
                    holder,
                    due_ms,
                    in_log,
                    LEASED,
                    job.key,
                    job.priority,
                    job.deliver_at,
                    job.first_ms or change.at_ms,
                    job.node_before,
                    job.last_error,
                )
            )
            if self._lines is not None and job.is_plain:
                self._lines.note_plain_turn()
        self.fresh_seq = max(self.fresh_seq, change.fresh_seq)
        self.delivered_count += len(change.seqs)

    def apply_extend(self, change: changes.JobsExtended) -> None:
        for seq in change.seqs:
            job = self.jobs[seq]._replace(due_ms=change.deadline_ms)
            self.jobs[seq] = job
            self._note_due(job)

    def apply_return(self, change: changes.JobsReturned) -> None:
        times = change.ready_times or [change.ready_ms] * len(change.seqs)
        firsts = change.first_times or [0] * len(change.seqs)
        rows = zip(change.seqs, change.deliveries, times, firsts, strict=True)
        for seq, deliveries, ready_ms, first_ms in rows:
            self._put_back(seq, deliveries, ready_ms, first_ms, change.node, change.error)

    def apply_count(self, change: changes.JobsCounted) -> None:
        nodes = change.nodes or [""] * len(change.seqs)
        firsts = change.first_times or [0] * len(change.seqs)
        for seq, deliveries, node, first_ms in zip(
            change.seqs, change.deliveries, nodes, firsts, strict=True
        ):
            self._put_back(seq, deliveries, 0, first_ms, node)

    def _put_back(
        self, seq: int, deliveries: int, ready_ms: int, first_ms: int, node: str, error: str = ""
    ) -> None:
        """Put a job back: it is ready, or delayed until `ready_ms`. The log has its deliveries."""
        job = self._take_out(seq)
        self._put(
            job._replace(
                deliveries=deliveries,
                lease_id="",
                node="",
                holder=0,
                due_ms=ready_ms,
                logged_deliveries=deliveries,
                state=DELAYED if ready_ms else READY,
                first_ms=first_ms or job.first_ms,
                last_node=node or job.last_node,
                last_error=error or job.last_error,
            )
        )

    def apply_reschedule(self, change: changes.JobsRescheduled) -> None:
        for seq in change.seqs:
            job = self._take_out(seq)._replace(
                lease_id="", node="", holder=0, due_ms=0, deliver_at=change.deliver_at
            )
            self._put(job._replace(state=INCOMING))

    def apply_reprioritize(self, change: changes.JobsReprioritized) -> None:
        for seq in change.seqs:
            job = self._take_out(seq)
            self._put(job._replace(priority=change.priority))

    def mark_moving(self, seq: int, deliveries: int) -> None:
        """Mark a job that moves to another box."""
        job = self._take_out(seq)
        self._put(
            job._replace(
                deliveries=deliveries,
                lease_id="",
                node="",
                holder=0,
                due_ms=0,
                logged_deliveries=deliveries,
                state=MOVING,
            )
        )

    def mark_all_moving(self, moves: Iterable[Move]) -> None:
        """Mark the jobs of planned moves after a restore."""
        for move in moves:
            if move.seq:
                self.mark_moving(move.seq, move.deliveries)

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
            self._searched_seq = 0
        self.fresh_seq = change.fresh_seq
        for entry in change.jobs:
            self._restore(entry)

    def on_start(self, *, leases_kept: bool) -> None:
        """Put back the jobs that connections of the last process held; without `leases_kept`, all jobs."""
        if not leases_kept:
            self.restore(self.facts(leases_kept=False))
        for holder in list(self._holders):
            for seq in self.held_by(holder):
                job = self.jobs[seq]
                self._put_back(seq, job.deliveries, 0, 0, job.node)

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
        self._searched_seq = 0
        self.fresh_seq = facts.fresh_seq
        self.dead_lettered = facts.dead_lettered
        for entry in facts.jobs:
            self._restore(entry)

    def _restore(self, entry: changes.JobEntry) -> None:
        job = Job.from_entry(entry)
        self._take_out(job.seq)
        self._put(job)

    def check(self, log: BoxLog) -> None:
        """Assert the invariants of the file. For tests: it examines all entries."""
        if log.records_awaited:
            return  # a box that is being restored has its jobs before its records
        self.check_index(log)
        for seq in range(log.earliest_seq, min(log.head_seq, max(self.fresh_seq, self._searched_seq)) + 1):
            assert seq in self.jobs or not log.is_live(seq), "COVER"


class _PlainJobs:
    """The jobs without key and priority, for one `Lines.pick`: returned ones, then fresh ones."""

    __slots__ = ("_fresh", "_limit", "_next", "_queue", "_returned_seqs")

    def __init__(self, queue: Queue, limit: int) -> None:
        self._queue = queue
        self._limit = limit
        self._returned_seqs = queue.returned_jobs()
        self._fresh: Iterator[int] | None = None
        self._next: tuple[int, int] | None = None

    def head(self) -> tuple[int, int] | None:
        if self._next is None:
            seq = next(self._returned_seqs, None)
            if seq is not None:
                self._next = 0, seq
            else:
                if self._fresh is None:
                    self._fresh = iter(self._queue.fresh_jobs(self._limit))
                seq = next(self._fresh, None)
                self._next = None if seq is None else (1, seq)
        return self._next

    def take(self) -> None:
        self._next = None
