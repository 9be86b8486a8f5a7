"""Collects the records of a producer into batches, and keeps the outcome of each record. Pure.

    submit ──► Backlog: batches in the order of submission ──take──► being sent ──settle, release──► done
               └───────────── held: not settled yet, counted against the bounds ────────────┘

A record is *settled* when its batch was stored or has failed. All batches of a backlog are full, except the
last one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from streams.protocol.errors import StreamsError

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The limits of a producer.

    batch_records, batch_bytes  a batch of this size is full and is sent
    linger_ms                   a smaller batch is sent when its first record has waited this long
    held_records, held_bytes    records that are submitted and not settled; above that, `submit` waits
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
    """One batch and its outcomes. Consecutive records with the same outcome are one run: either stored, with
    the seq of the first one, or failed, with one error. `flag` is set when all are settled."""

    __slots__ = ("begun_s", "bytes", "count", "flag", "is_failure_raised", "key", "records", "runs")

    def __init__(self, key: str, flag: F, begun_s: float) -> None:
        self.key = key
        self.flag = flag
        self.begun_s = begun_s
        #: Emptied when all records are settled, because the program may keep a ticket, and so its batch.
        self.records: list[bytes] = []
        self.count = 0
        self.bytes = 0
        #: True if a ticket has raised a failure of this batch: then `flush` does not raise it again.
        self.is_failure_raised = False
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
        """Return the seq of this record, or its error."""
        start = 0
        for end, outcome in self.runs:
            if index < end:
                return outcome + index - start if isinstance(outcome, int) else outcome
            start = end
        raise LookupError(f"record {index} is not acknowledged yet")


class Backlog(Generic[F]):
    __slots__ = ("_batches", "bounds", "held_bytes", "held_records", "is_flushing")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._batches: deque[PendingBatch[F]] = deque()
        self.held_records = 0
        self.held_bytes = 0
        #: True while `flush` or `close` waits for all records: then every batch is due at once.
        self.is_flushing = False

    def __repr__(self) -> str:
        return f"<Backlog {len(self._batches)} batches, {self.held_records} records held>"

    @property
    def is_empty(self) -> bool:
        return not self._batches

    @property
    def is_idle(self) -> bool:
        """True if every submitted record is settled."""
        return self.held_records == 0

    def has_room(self, size: int) -> bool:
        """Return True if a record of this size fits. When nothing is held, a record of any size does."""
        return self.held_records == 0 or (
            self.held_records < self.bounds.held_records and self.held_bytes + size <= self.bounds.held_bytes
        )

    def batch_for(self, size: int) -> PendingBatch[F] | None:
        """Return the batch that a record of this size joins; None if it needs a new one (`start`)."""
        if self._batches:
            last = self._batches[-1]
            if not self._is_full(last) and last.bytes + size <= self.bounds.batch_bytes:
                return last
        return None

    def start(self, batch: PendingBatch[F]) -> PendingBatch[F]:
        self._batches.append(batch)
        return batch

    def add(self, batch: PendingBatch[F], record: bytes) -> int:
        """Add a record. Return its index in the batch."""
        batch.records.append(record)
        batch.count += 1
        batch.bytes += len(record) + 1
        self.held_records += 1
        self.held_bytes += len(record) + 1
        return batch.count - 1

    def due_in_s(self, now_s: float) -> float | None:
        """Return the time until the first batch is due: 0 = now, None = there is no batch."""
        if not self._batches:
            return None
        first = self._batches[0]
        if self.is_flushing or len(self._batches) > 1 or self._is_full(first):
            return 0.0
        return max(0.0, first.begun_s + self.bounds.linger_ms / 1000 - now_s)

    def take(self) -> PendingBatch[F]:
        return self._batches.popleft()

    def release(self, batch: PendingBatch[F]) -> None:
        """Free the room of a settled batch."""
        assert batch.settled_count == batch.count, "a batch is released when all of it is settled"
        self.held_records -= batch.count
        self.held_bytes -= batch.bytes
        batch.records = []
        if self.is_idle:
            self.is_flushing = False

    def _is_full(self, batch: PendingBatch[F]) -> bool:
        bounds = self.bounds
        return batch.count >= bounds.batch_records or batch.bytes >= bounds.batch_bytes
