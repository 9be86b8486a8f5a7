"""Batches of a producer: when one is full or due, and the outcome of each record. Pure: no clock, no waiting.

A `Backlog` holds what was submitted and not yet taken, as batches in the order of submission: all are full
but the last. Its bound is on what is *held*, that is submitted and not settled, so it covers the batch that
is on its way too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from streams.protocol.errors import StreamsError

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Of a producer.

    batch_records, batch_bytes  a batch goes when it has so much
    linger_ms                   and when its first record has waited so long
    held_records, held_bytes    what may be submitted and not settled; `submit` waits for room
    """

    batch_records: int = 5_000
    batch_bytes: int = 1 << 20
    linger_ms: float = 5.0
    held_records: int = 200_000
    held_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("batch_records", "batch_bytes", "held_records", "held_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.linger_ms < 0:
            raise ValueError(f"linger_ms must not be negative, got {self.linger_ms}")


class PendingBatch(Generic[F]):
    """Records that go together, and what became of them: runs of records, each with its first seq or the
    error of all its records. Waiters wait for `flag`."""

    __slots__ = ("begun_s", "bytes", "count", "flag", "is_seen", "key", "records", "runs")

    def __init__(self, key: str, flag: F, begun_s: float) -> None:
        self.key = key
        self.flag = flag
        self.begun_s = begun_s
        #: Emptied when all is settled: tickets may be kept for long.
        self.records: list[bytes] = []
        self.count = 0
        self.bytes = 0
        #: True if a caller has got a failure of this batch.
        self.is_seen = False
        #: (number of records up to the end of the run, first seq or error)
        self.runs: list[tuple[int, int | StreamsError]] = []

    def __repr__(self) -> str:
        return (
            f"<PendingBatch {self.key}: {self.count} records, {self.bytes} B, {len(self.runs)} runs settled>"
        )

    @property
    def settled_count(self) -> int:
        return self.runs[-1][0] if self.runs else 0

    def settle(self, count: int, outcome: int | StreamsError) -> None:
        """Set the outcome of the next `count` records."""
        end = self.settled_count + count
        assert end <= self.count, "no record is settled twice"
        self.runs.append((end, outcome))

    def outcome(self, index: int) -> int | StreamsError:
        """The seq of this record, or its error."""
        start = 0
        for end, outcome in self.runs:
            if index < end:
                return outcome + index - start if isinstance(outcome, int) else outcome
            start = end
        raise LookupError(f"record {index} is not acknowledged yet")


class Backlog(Generic[F]):
    __slots__ = ("_batches", "bounds", "held_bytes", "held_records", "is_hurried")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._batches: deque[PendingBatch[F]] = deque()
        self.held_records = 0
        self.held_bytes = 0
        #: A flush waits for all records: no batch lingers.
        self.is_hurried = False

    def __repr__(self) -> str:
        return f"<Backlog {len(self._batches)} batches, {self.held_records} records held>"

    @property
    def is_empty(self) -> bool:
        return not self._batches

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is on its way."""
        return self.held_records == 0

    def has_room(self, size: int) -> bool:
        """A record larger than all the room there is may come when it is alone."""
        return self.held_records == 0 or (
            self.held_records < self.bounds.held_records and self.held_bytes + size <= self.bounds.held_bytes
        )

    def open_batch(self, size: int) -> PendingBatch[F] | None:
        """The batch that a record of this size joins; None when it needs a new one (`start`)."""
        if self._batches:
            last = self._batches[-1]
            if not self._is_full(last) and last.bytes + size <= self.bounds.batch_bytes:
                return last
        return None

    def start(self, batch: PendingBatch[F]) -> PendingBatch[F]:
        self._batches.append(batch)
        return batch

    def add(self, batch: PendingBatch[F], record: bytes) -> int:
        """Its place in the batch."""
        batch.records.append(record)
        batch.count += 1
        batch.bytes += len(record) + 1
        self.held_records += 1
        self.held_bytes += len(record) + 1
        return batch.count - 1

    def due_in_s(self, now_s: float) -> float | None:
        """After how long the first batch is to go: 0 = now, None = there is none."""
        if not self._batches:
            return None
        first = self._batches[0]
        if self.is_hurried or len(self._batches) > 1 or self._is_full(first):
            return 0.0
        return max(0.0, first.begun_s + self.bounds.linger_ms / 1000 - now_s)

    def take(self) -> PendingBatch[F]:
        return self._batches.popleft()

    def release(self, batch: PendingBatch[F]) -> None:
        """The batch is settled, and its room free again."""
        assert batch.settled_count == batch.count, "room is held until all of a batch is settled"
        self.held_records -= batch.count
        self.held_bytes -= batch.bytes
        batch.records = []
        if self.is_idle:
            self.is_hurried = False

    def _is_full(self, batch: PendingBatch[F]) -> bool:
        bounds = self.bounds
        return batch.count >= bounds.batch_records or batch.bytes >= bounds.batch_bytes
