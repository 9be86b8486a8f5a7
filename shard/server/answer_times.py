"""Times from the arrival of requests at a shard to their answers.

Requests that came in one wake-up share their begin, and those that are answered together share their end: one
look at the clock for each. So between two flushes a request costs a count.
"""

from __future__ import annotations

from time import monotonic_ns

from streams.protocol.telemetry.histogram import Histogram


class AnswerTimes:
    __slots__ = ("_acked", "_claimed", "_read", "acks", "claims", "reads")

    def __init__(self) -> None:
        #: Of appends, up to their acknowledgement.
        self.acks = Histogram()
        #: Of reads and claims, without those that wait.
        self.reads = Histogram()
        self.claims = Histogram()
        #: Requests whose answers leave with the next flush, by when they came: how many came at that time.
        self._acked: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._claimed: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<AnswerTimes acks {self.acks!r}>"

    def note_ack(self, began_ns: int) -> None:
        self._acked[began_ns] = self._acked.get(began_ns, 0) + 1

    def note_read(self, began_ns: int) -> None:
        self._read[began_ns] = self._read.get(began_ns, 0) + 1

    def note_claim(self, began_ns: int) -> None:
        self._claimed[began_ns] = self._claimed.get(began_ns, 0) + 1

    def flush(self) -> None:
        """The answers leave now."""
        if self._acked:
            _observe(self.acks, self._acked)
        if self._read:
            _observe(self.reads, self._read)
        if self._claimed:
            _observe(self.claims, self._claimed)


def _observe(times: Histogram, began: dict[int, int]) -> None:
    now_ns = monotonic_ns()
    for began_ns, count in began.items():
        times.observe((now_ns - began_ns) / 1e9, count)
    began.clear()
