"""State of a stream in addition to its box: its config, the write times of its records, pending trims.

Records of a stream expire by the time they were *written*, not by their timestamps. The write times are
stored in periods: the records after period `i - 1` up to `last_seqs[i]` were written from `opened_ms[i]` to
`closed_ms[i]`. A record expires with its period, so it may stay longer than its retention by one part in
`_PERIODS_PER_AGE`.

A new reader skips trimmed records at once. They are removed later, because a reader that follows the stream
must still get the records of the batch that contains the trim. Pending trims are stored here, so that they
survive a restart.

Invariants
- PERIODS: the three columns rise together, and all of a period lies at or behind the first live record.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

from msgspec.structs import replace

from shard.core.changes import StreamAppended
from shard.core.snapshot_facts import StreamFacts
from streams.protocol.messages.s2 import Stream, in_ms

#: How long readers that follow a stream still get trimmed records. Most are at most one page behind.
TRIM_LAG_MS = 2_000
#: How long a stream stays in deletion before it is removed: meanwhile its readers wake and get an answer.
DELETION_LAG_MS = 50

#: A period covers this fraction of the retention, or a minute where records never expire.
_PERIODS_PER_AGE = 256
_FOREVER_STEP_MS = 60_000
#: Above this number, neighbours are merged. 512 periods are 12 KiB.
_PERIODS_MAX = 512
#: Trims within this time are delayed together, so at most nine are pending.
_TRIM_STEP_MS = 250


class Trim(NamedTuple):
    """Records below `seq` are removed at `due_ms`."""

    seq: int
    due_ms: int
    opened_ms: int


class StreamState:
    __slots__ = ("closed_ms", "last_seqs", "opened_ms", "stream", "trim_lsn", "trims")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.opened_ms = array("q")
        self.closed_ms = array("q")
        self.last_seqs = array("Q")
        self.trims: list[Trim] = []
        #: The lsn of the last trim since start: an answer that skips trimmed records waits for it.
        self.trim_lsn = 0

    def __repr__(self) -> str:
        return f"<StreamState of basin {self.stream.basin_number}, {len(self.last_seqs)} periods>"

    # -- deciding

    @property
    def age_ms(self) -> int:
        """The retention of records; 0 = records never expire."""
        return in_ms(self.stream.spec.age_secs)

    @property
    def gone_ms(self) -> int | None:
        return self.stream.deleted_ms + DELETION_LAG_MS if self.stream.deleted_ms else None

    def due_ms(self) -> int | None:
        """Return the time of the next trim or expiry."""
        due = [self.trims[0].due_ms] if self.trims else []
        if self.age_ms and self.closed_ms:
            due.append(self.closed_ms[0] + self.age_ms + 1)
        return min(due, default=None)

    def expired_before(self, now_ms: int) -> int:
        """The seq below which everything has expired; 0 when nothing has."""
        if not self.age_ms:
            return 0
        old = bisect_left(self.closed_ms, now_ms - self.age_ms)
        return self.last_seqs[old - 1] + 1 if old else 0

    def trimmed_before(self, now_ms: int) -> int:
        """The seq below which everything is to be trimmed by now; 0 when nothing is."""
        return max((trim.seq for trim in self.trims if trim.due_ms <= now_ms), default=0)

    @property
    def first_seq_for_new_readers(self) -> int:
        """The seq below which everything is trimmed, removed or not; 0 when no trim waits."""
        return self.trims[-1].seq if self.trims else 0

    # -- applying

    def apply_append(self, change: StreamAppended, earliest_seq: int, lsn: int) -> None:
        self._note_write(change.at_ms, change.batch.last_seq)
        if change.trim_seq > max(earliest_seq, self.first_seq_for_new_readers):
            self.trim_lsn = lsn
            due_ms = change.at_ms + TRIM_LAG_MS
            if self.trims and change.at_ms - self.trims[-1].opened_ms < _TRIM_STEP_MS:
                self.trims[-1] = Trim(change.trim_seq, due_ms, self.trims[-1].opened_ms)
            else:
                self.trims.append(Trim(change.trim_seq, due_ms, change.at_ms))

    def _note_write(self, at_ms: int, last_seq: int) -> None:
        step_ms = self.age_ms // _PERIODS_PER_AGE if self.age_ms else _FOREVER_STEP_MS
        if self.opened_ms and at_ms < self.opened_ms[-1] + step_ms:
            self.closed_ms[-1] = max(self.closed_ms[-1], at_ms)
            self.last_seqs[-1] = last_seq
            return
        if len(self.opened_ms) >= _PERIODS_MAX:
            self.opened_ms = self.opened_ms[0::2]
            self.closed_ms = self.closed_ms[1::2]
            self.last_seqs = self.last_seqs[1::2]
        # A clock that was set back does not make records older than those before them.
        at_ms = max(at_ms, self.closed_ms[-1]) if self.closed_ms else at_ms
        self.opened_ms.append(at_ms)
        self.closed_ms.append(at_ms)
        self.last_seqs.append(last_seq)

    def drop_before(self, earliest_seq: int) -> None:
        """Drop periods and trims below `earliest_seq`, the first live record."""
        stale_periods = bisect_left(self.last_seqs, earliest_seq)
        if stale_periods:
            del self.opened_ms[:stale_periods], self.closed_ms[:stale_periods], self.last_seqs[:stale_periods]
        self.trims = [trim for trim in self.trims if trim.seq > earliest_seq]

    def cut_after(self, head_seq: int) -> None:
        """Remove every trace of records after `head_seq`."""
        whole = bisect_left(self.last_seqs, head_seq)
        if whole < len(self.last_seqs):
            del self.opened_ms[whole + 1 :], self.closed_ms[whole + 1 :], self.last_seqs[whole + 1 :]
            self.last_seqs[whole] = head_seq
        self.trims = [trim._replace(seq=min(trim.seq, head_seq + 1)) for trim in self.trims]

    def rewound(self, now_ms: int) -> None:
        """Clamp times to `now_ms` after the clock went back. No trim is delayed longer than a new one."""
        for column in (self.opened_ms, self.closed_ms):
            column[:] = array("q", [min(at_ms, now_ms) for at_ms in column])
        self.trims = [
            Trim(trim.seq, min(trim.due_ms, now_ms + TRIM_LAG_MS), min(trim.opened_ms, now_ms))
            for trim in self.trims
        ]
        if self.stream.deleted_ms:
            self.stream = replace(self.stream, deleted_ms=min(self.stream.deleted_ms, now_ms))

    # -- snapshots

    def facts(self) -> StreamFacts:
        return StreamFacts(
            stream=self.stream,
            opened_ms=self.opened_ms.tobytes(),
            closed_ms=self.closed_ms.tobytes(),
            last_seqs=self.last_seqs.tobytes(),
            trims=[(trim.seq, trim.due_ms, trim.opened_ms) for trim in self.trims],
        )

    @classmethod
    def from_facts(cls, facts: StreamFacts) -> StreamState:
        state = cls(facts.stream)
        state.opened_ms.frombytes(facts.opened_ms)
        state.closed_ms.frombytes(facts.closed_ms)
        state.last_seqs.frombytes(facts.last_seqs)
        state.trims = [Trim(*trim) for trim in facts.trims]
        return state

    def check(self, earliest_seq: int) -> None:
        """Asserts the invariants named above. For tests."""
        assert len(self.opened_ms) == len(self.closed_ms) == len(self.last_seqs) <= _PERIODS_MAX, "PERIODS"
        assert list(self.last_seqs) == sorted(set(self.last_seqs)), "PERIODS"
        assert list(self.closed_ms) == sorted(self.closed_ms), "PERIODS"
        assert not self.last_seqs or self.last_seqs[0] >= earliest_seq, "PERIODS"
