"""The entries of a queue's jobs and the indexes over them. `queue.py` has the rules and invariants."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from sortedcontainers import SortedList

from shard.core.boxes.box_log import BoxLog
from shard.core.queues import backoff
from shard.core.queues.job import DELAYED, INCOMING, LEASED, MOVING, READY, SCHEDULED, Job
from shard.core.queues.lines import Lines
from streams.protocol.model.boxes import BoxConfig

#: Stale entries in the heap of due times before it is rebuilt.
_STALE_MIN = 64
#: An index is rebuilt when one in so many of its entries goes: cheaper than removing them one by one.
_REBUILD_PART = 8
#: All indexes are rebuilt when half of all entries go, and at least so many.
_REBUILD_MIN = 1_000


class JobIndex:
    """Entries, by state: every change of an entry goes through `_take_out` and `_put`."""

    __slots__ = (
        "_again",
        "_config",
        "_due",
        "_floor_seq",
        "_holders",
        "_incoming",
        "_lines",
        "_log",
        "_timed_seqs",
        "_times",
        "delayed_count",
        "in_flight",
        "jobs",
    )

    def __init__(self, log: BoxLog, config: BoxConfig) -> None:
        self._log = log
        self._config = config
        self.jobs: dict[int, Job] = {}
        # Everything below is derived from the above.
        self.in_flight = 0
        self.delayed_count = 0
        #: READY entries without key and priority.
        self._again: SortedList[int] = SortedList()
        #: Jobs with a key or a priority; None while there was none.
        self._lines: Lines | None = None
        #: (due_ms, seq); stale entries are skipped.
        self._due: list[tuple[int, int]] = []
        #: (wall-clock time, seq) of SCHEDULED entries; stale entries are skipped.
        self._times: list[tuple[int, int]] = []
        #: Heaps of seqs: INCOMING entries, and entries with a time. Some may be stale.
        self._incoming: list[int] = []
        self._timed_seqs: list[int] = []
        self._holders: dict[int, set[int]] = {}
        #: No entry has a lower seq.
        self._floor_seq = 0

    def next_wall_ms(self) -> int | None:
        """Return the wall-clock time of the next job that waits for one; None if there is none."""
        times = self._times
        while times:
            when, seq = times[0]
            job = self.jobs.get(seq)
            if job is not None and job.state == SCHEDULED and job.deliver_at == when:
                return when
            heapq.heappop(times)
        return None

    def _end_of(self, job: Job) -> int:
        """Return when the lease or the delay of a job ends. A lease that has expired has its backoff then."""
        if job.state == DELAYED and job.lease_id and self._config.retry_backoff is not None:
            return job.due_ms + backoff.delay_ms(self._config.retry_backoff, job.seq, job.deliveries)
        return job.due_ms

    def _next_return_ms(self) -> int | None:
        due = self._due
        while due:
            when, seq = due[0]
            job = self.jobs.get(seq)
            if job is not None and job.state in (LEASED, DELAYED) and self._end_of(job) == when:
                return when
            heapq.heappop(due)
        return None

    def _clear(self) -> None:
        for seq in [seq for seq, job in self.jobs.items() if job.state != MOVING]:
            del self.jobs[seq]
        self._again.clear()
        self._due.clear()
        self._times.clear()
        self._incoming.clear()
        self._timed_seqs.clear()
        self._holders.clear()
        self._lines = None
        self.delayed_count = len(self.jobs)
        self.in_flight = self._floor_seq = 0

    def _take_out(self, seq: int) -> Job:
        """Remove the entry of a job, if any, from all indexes. Returns it, or a new one; `_put` adds its
        replacement."""
        job = self.jobs.pop(seq, None)
        if job is not None:
            self._leave(job)
            return job
        self._floor_seq = min(self._floor_seq, seq)
        return Job(seq, 0, "", "", 0, 0, 0, READY)

    def _put(self, job: Job) -> None:
        self.jobs[job.seq] = job
        state = job.state
        if state == INCOMING:
            heapq.heappush(self._incoming, job.seq)
            if job.deliver_at:
                heapq.heappush(self._timed_seqs, job.seq)
            return
        if not (job.key or job.priority):
            if state == READY:
                self._again.add(job.seq)
                return
        elif state != MOVING:
            if self._lines is None:
                self._lines = Lines(self.jobs)
                self._lines.configure(self._config.key_concurrency, is_fair=self._config.fair)
            self._lines.add(job)
            if state == READY:
                return
        if state == LEASED:
            self.in_flight += 1
            if job.holder:
                self._holders.setdefault(job.holder, set()).add(job.seq)
            self._note_due(job)
            return
        self.delayed_count += 1
        if state == SCHEDULED:
            heapq.heappush(self._times, (job.deliver_at, job.seq))
        elif state == DELAYED:
            self._note_due(job)

    def _leave(self, job: Job) -> None:
        state = job.state
        if state == INCOMING:
            return
        if not job.is_plain and state != MOVING:
            assert self._lines is not None
            self._lines.remove(job)
        elif state == READY:
            self._again.remove(job.seq)
        if state == LEASED:
            self.in_flight -= 1
            if job.holder:
                self._release(job)
        elif state != READY:
            self.delayed_count -= 1

    def _release(self, job: Job) -> None:
        seqs = self._holders[job.holder]
        seqs.remove(job.seq)
        if not seqs:
            del self._holders[job.holder]

    def _note_due(self, job: Job) -> None:
        if len(self._due) > 2 * len(self.jobs) + _STALE_MIN:
            self._list_due()
        heapq.heappush(self._due, (self._end_of(job), job.seq))

    def _list_due(self) -> None:
        self._due = [
            (self._end_of(job), seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)
        ]
        heapq.heapify(self._due)

    def _forget_all(self, seqs: Sequence[int]) -> None:
        """Drop entries. If they are the majority, rebuild all indexes from the others: that takes a fifth of
        the time."""
        if len(seqs) <= len(self.jobs) // 2 or len(seqs) < _REBUILD_MIN or self._lines is not None:
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
            elif job.state != INCOMING:
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
            if not job.is_plain:
                self._leave(job)
            elif job.state == READY:
                ready.append(seq)
            elif job.state == LEASED:
                leased_count += 1
                if job.holder:
                    self._release(job)
            elif job.state != INCOMING:
                other_count += 1
        self.in_flight -= leased_count
        self.delayed_count -= other_count
        if len(ready) * _REBUILD_PART < len(self._again):
            for seq in ready:
                self._again.remove(seq)
        elif ready:
            self._again = SortedList(set(self._again).difference(ready))

    def check_index(self, log: BoxLog) -> None:
        """Assert TOTALS and LIVE. For tests: it examines all entries."""
        states = [job.state for job in self.jobs.values()]
        assert self.in_flight == states.count(LEASED), "TOTALS"
        waiting_count = sum(state in (DELAYED, MOVING, SCHEDULED) for state in states)
        assert self.delayed_count == waiting_count, "TOTALS"
        assert list(self._again) == sorted(
            seq for seq, job in self.jobs.items() if job.state == READY and job.is_plain
        ), "TOTALS"
        if self._lines is not None:
            self._lines.check()
        held_seqs = {seq for seqs in self._holders.values() for seq in seqs}
        leased_seqs = {seq for seq, job in self.jobs.items() if job.state == LEASED}
        assert held_seqs == {seq for seq in leased_seqs if self.jobs[seq].holder}, "TOTALS"
        due = set(self._due)
        expected_due = {
            (self._end_of(job), seq) for seq, job in self.jobs.items() if job.state in (LEASED, DELAYED)
        }
        assert expected_due <= due, "TOTALS"
        times = {(job.deliver_at, seq) for seq, job in self.jobs.items() if job.state == SCHEDULED}
        assert times <= set(self._times), "TOTALS"
        for seq in self.jobs:
            assert log.is_live(seq) and seq >= self._floor_seq, "LIVE"
