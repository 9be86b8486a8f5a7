"""Measures the times from the arrival of requests at a shard to their answers.

Requests that arrive in one wake-up share their start time, and answers of one flush share their end time. So
the clock is read once per wake-up and once per flush, and a request costs one counter update.
"""

from __future__ import annotations

from time import monotonic_ns

from streams.protocol.telemetry.histogram import Histogram


class AnswerTimes:
    __slots__ = ("_pending_acks", "_pending_claims", "_pending_reads", "acks", "claims", "reads")

    def __init__(self) -> None:
        #: Times of appends, until their acknowledgement.
        self.acks = Histogram()
        #: Times of reads and claims, except those that wait for a record or a job.
        self.reads = Histogram()
        self.claims = Histogram()
        #: By arrival time: how many requests have answers that leave with the next flush.
        self._pending_acks: dict[int, int] = {}
        self._pending_reads: dict[int, int] = {}
        self._pending_claims: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<AnswerTimes acks {self.acks!r}>"

    def note_ack(self, began_ns: int) -> None:
        self._pending_acks[began_ns] = self._pending_acks.get(began_ns, 0) + 1

    def note_read(self, began_ns: int) -> None:
        self._pending_reads[began_ns] = self._pending_reads.get(began_ns, 0) + 1

    def note_claim(self, began_ns: int) -> None:
        self._pending_claims[began_ns] = self._pending_claims.get(began_ns, 0) + 1

    def flush(self) -> None:
        """Observe the times of all pending answers, which leave now."""
        if self._pending_acks:
            _observe(self.acks, self._pending_acks)
        if self._pending_reads:
            _observe(self.reads, self._pending_reads)
        if self._pending_claims:
            _observe(self.claims, self._pending_claims)


def _observe(times: Histogram, counts_by_start: dict[int, int]) -> None:
    now_ns = monotonic_ns()
    for began_ns, count in counts_by_start.items():
        times.observe((now_ns - began_ns) / 1e9, count)
    counts_by_start.clear()
