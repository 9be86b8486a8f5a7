"""The entry of one job, and a copy of all entries of a queue for a snapshot. `queue.py` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shard.core import changes

#: READY can be claimed. DELAYED waits until a shard time, SCHEDULED until a wall-clock time. INCOMING has job
#: fields and is not visible yet. MOVING goes to the dead letter box.
READY, LEASED, DELAYED, MOVING, INCOMING, SCHEDULED = range(6)

#: Jobs that a snapshot encodes at once: 2 ms.
JOBS_AT_ONCE = 10_000

_encode = msgspec.json.encode
_NOTHING_MORE = ("", 0, 0, 0, "", "")


class Job(NamedTuple):
    """The entry of a job that was delivered or has job fields. It never changes: another one replaces it. So
    a snapshot copies a list of them, a millisecond for 200,000."""

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
    #: Job fields: `ordering_key`, `job_priority`, and `deliver_at` in wall-clock time, 0 = none.
    key: str = ""
    priority: int = 0
    deliver_at: int = 0
    #: When it was delivered first.
    first_ms: int = 0
    #: Node and error of the last delivery that has ended.
    last_node: str = ""
    last_error: str = ""

    @property
    def is_plain(self) -> bool:
        """True if it has neither key nor priority: its place is by seq alone."""
        return not self.key and not self.priority

    @property
    def node_before(self) -> str:
        """The node of the last delivery that has ended, by a return or because its lease has expired."""
        return self.node if self.lease_id else self.last_node

    @property
    def history(self) -> bytes:
        """Its earlier deliveries, as JSON members of a claimed job, each after a comma."""
        if not self.deliveries:
            return b""
        text = b',"first_ts":%d' % self.first_ms
        if self.node_before:
            text += b',"last_node":%b' % _encode(self.node_before)
        if self.last_error:
            text += b',"last_error":%b' % _encode(self.last_error)
        return text

    def entry(self, *, leases_kept: bool) -> changes.JobEntry:
        """The entry for the log or for a snapshot; without `leases_kept`, the part that the log has."""
        more = self[8:]
        if leases_kept:
            return self[:6] if more == _NOTHING_MORE else (*self[:6], *more)
        due_ms = 0 if self.lease_id else self.due_ms
        base = (self.seq, self.logged_deliveries, "", "", 0, due_ms)
        if not self.logged_deliveries:
            more = (*self[8:11], 0, "", "")
        return base if more == _NOTHING_MORE else (*base, *more)

    @classmethod
    def from_entry(cls, entry: Sequence[Any]) -> Job:
        """The job of an entry. Its state is that of a delivered one; `Queue` knows what is visible."""
        deliveries, lease_id, due_ms = entry[1], entry[2], entry[5]
        more = tuple(entry[6:]) or _NOTHING_MORE
        state = LEASED if lease_id else DELAYED if due_ms else SCHEDULED if more[2] else READY
        if not deliveries:
            state = INCOMING
        return cls._make((*entry[:6], deliveries, state, *more))


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
        leases_kept = self.leases_kept
        return [
            job.entry(leases_kept=leases_kept)
            for job in some
            if job.state != MOVING
            and (leases_kept or job.logged_deliveries or job.deliver_at or not job.is_plain)
        ]

    def facts_with(self, entries: list[changes.JobEntry]) -> changes.QueueFacts:
        """Return the facts with these entries."""
        # Without entries no live job is at or below `fresh_seq` (COVER), so it is not needed.
        fresh_seq = self.fresh_seq if self.leases_kept and entries else 0
        return changes.QueueFacts(fresh_seq=fresh_seq, jobs=entries, dead_lettered=self.dead_lettered)
