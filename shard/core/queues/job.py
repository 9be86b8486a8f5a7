"""The entry of one job, and a copy of all entries of a queue for a snapshot. `queue.py` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shard.core import changes

READY, LEASED, DELAYED, MOVING = range(4)

#: Jobs that a snapshot encodes at once: 2 ms.
JOBS_AT_ONCE = 10_000


class Job(NamedTuple):
    """The entry of a delivered job. Its first fields are those of a snapshot. It never changes: another one
    replaces it. So a snapshot copies a list of them, a millisecond for 200,000."""

    seq: int
    deliveries: int
    #: Of the last lease; "" after the job was returned.
    lease_id: str
    node: str
    #: The connection whose end ends the lease; 0 = none.
    holder: int
    #: The end of the lease or of the delay.
    due_ms: int
    #: Number of deliveries in the log.
    logged_deliveries: int
    state: int


class QueueCopy(NamedTuple):
    """A copy of a queue for a snapshot, which encodes its jobs later, some at a time."""

    fresh_seq: int
    dead_lettered: int
    jobs: list[Job]
    leases_kept: bool

    def take_some(self) -> list[changes.JobEntry]:
        """Remove `JOBS_AT_ONCE` jobs. Returns their entries for the snapshot."""
        some = self.jobs[-JOBS_AT_ONCE:]
        del self.jobs[-JOBS_AT_ONCE:]
        return self.entries(some)

    def entries(self, some: Sequence[Job]) -> list[changes.JobEntry]:
        if self.leases_kept:
            return [job[:6] for job in some if job.state != MOVING]
        return [
            (job.seq, job.logged_deliveries, "", "", 0, 0 if job.lease_id else job.due_ms)
            for job in some
            if job.logged_deliveries and job.state != MOVING
        ]

    def facts_with(self, entries: list[changes.JobEntry]) -> changes.QueueFacts:
        """Return the facts with these entries."""
        # Without entries no live job is at or below `fresh_seq` (COVER), so it is not needed.
        fresh_seq = self.fresh_seq if self.leases_kept and entries else 0
        return changes.QueueFacts(fresh_seq=fresh_seq, jobs=entries, dead_lettered=self.dead_lettered)
