"""Times from the arrival of requests at a shard to their answers.

Requests that came in one wake-up share their begin, and those that are answered together share their end: one
look at the clock for each. So between two flushes a request costs a count.
"""

from __future__ import annotations

from time import monotonic_ns

from streams.protocol.telemetry.histogram import Histogram


class AnswerTimes:
    __slots__ = ("_pending_acks", "_pending_claims", "_pending_reads", "acks", "claims", "reads")

    def __init__(self) -> None:
        #: Of appends, up to their acknowledgement.
        self.acks = Histogram()
        #: Of reads and claims, without those that wait.
        self.reads = Histogram()
        self.claims = Histogram()
        #: Requests whose answers leave with the next flush, by when they came: how many came at that time.
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
        """The answers leave now."""
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
