"""Results of a worker's handler, the delay of a failed job, and statistics. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.client.answers import Entry, Job

AsyncHandler = Callable[[Job], Awaitable[object]]
Handler = Callable[[Job], object]

#: A job that fails again and again comes back after 1, 2, 4, … s, and at least every 5 minutes.
DELAY_MS_FIRST, DELAY_MS_MAX = 1_000, 300_000


@dataclass(frozen=True, slots=True)
class JobOutputs:
    """Return it from a handler to ack the job with outputs: entries by box, as for `Queue.ack`."""

    outputs: Mapping[str, Sequence[Entry | Any]]


class Nack(Exception):
    """Raise it in a handler to give a job back on purpose: after `delay_ms`, without a word in the log."""

    def __init__(self, delay_ms: int = 0, error: str | None = None) -> None:
        super().__init__(f"given back for {delay_ms} ms")
        self.delay_ms = delay_ms
        self.error = error


def delay_ms(deliveries: int) -> int:
    """How long a job waits whose handler raised, by how often it was delivered."""
    return min(DELAY_MS_FIRST << min(max(deliveries - 1, 0), 20), DELAY_MS_MAX)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """done: acked; given_back: `Nack`; failed: the handler raised; lost: the lease was over before the ack;
    held: at work right now."""

    done: int
    given_back: int
    failed: int
    lost: int
    held: int


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """Records, but for `batches`. `held` are submitted and not settled."""

    acked: int
    failed: int
    held: int
    batches: int
