# Written by `make twin` from ../_async/producer.py. Do not edit.
"""Many records into one box, in batches, in the background, each once and in order.

One batch is on its way at a time. That is what keeps the order when one must be repeated, and it costs
little: while a batch is on its way the next one fills. A batch keeps its key through all its attempts, and
attempts end before the box forgets keys, so a repeat never doubles.
"""

from __future__ import annotations

import threading
import time
import uuid
from types import TracebackType
from typing import Any, Protocol

from streams.client import answers
from streams.client.answers import Entry
from streams.client.batching import Backlog, Bounds, PendingBatch
from streams.client.concurrency import Bell, Crew, Flag, sleep
from streams.client.errors import AnswerLost, Closed
from streams.client.retry import Retry
from streams.client.working import ProducerStatistics
from streams.protocol.errors import Refused, StreamsError
from streams.protocol.messages.replies import AppendReply

#: Refusals that one record of a batch can be the reason of. The batch is halved to find it, so that the
#: others pass.
_ONE_IS_TO_BLAME = frozenset({"invalid_request", "record_too_large", "batch_too_large", "payload_too_large"})
#: Attempts end this much before the box forgets the key.
_WINDOW_SHARE = 0.8
#: Failures that `flush` still tells of, the first ones; there is no end to them when nobody asks.
_FAILURES_KEPT = 1000
_NOT_SENT = "the producer was ended before this was sent"


class Sender(Protocol):
    """Where batches go: a box over HTTP, or a shard directly."""

    def append_encoded(
        self, records: list[bytes], *, key: str, retry: Retry | None = None
    ) -> AppendReply: ...

    def idempotency_window_ms(self) -> int | None: ...


class Ticket:
    """One record on its way."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: PendingBatch[Flag], index: int) -> None:
        self._batch = batch
        self._index = index

    def __repr__(self) -> str:
        return f"<Ticket {self._batch.outcome(self._index) if self.is_settled else 'on its way'}>"

    @property
    def is_settled(self) -> bool:
        """True if the record is stored or has failed."""
        return self._batch.flag.is_set()

    def wait(self, timeout_s: float | None = None) -> int:
        """The record's seq. Raises why it has none: `Refused` or `Busy`, it was not written; `Uncertain`,
        nobody knows. `TimeoutError` says only that it is not settled yet."""
        if not self._batch.flag.wait(timeout_s):
            raise TimeoutError(f"not acknowledged within {timeout_s} s; it may still be written")
        outcome = self._batch.outcome(self._index)
        if isinstance(outcome, StreamsError):
            self._batch.is_seen = True
            raise type(outcome)(outcome.message, **outcome.detail) from outcome
        return outcome


class Producer:
    """
        with client.box("orders").producer() as producer:
            for order in orders:
                producer.submit(order)

    `submit` returns a ticket at once, or waits when too much is on its way. A batch goes when it is full or
    has lingered; `flush`, and leaving the block, wait until all is settled and raise the first failure that
    nobody has seen on its ticket. With `stop_at_failure` nothing is written after a record that was not: the
    rest is settled as `Closed`, and no more is taken.
    """

    def __init__(
        self,
        sender: Sender,
        bounds: Bounds,
        *,
        settle_s: float,
        stop_at_failure: bool = False,
        node: str | None = None,
    ) -> None:
        self._sender = sender
        self._node = node
        self._settle_s = settle_s
        self._stops_at_failure = stop_at_failure
        self._has_stopped = False
        self._name = uuid.uuid4().hex
        self._batches_begun = 0
        self._retry = Retry(total_s=settle_s)
        #: Guards all that follows; never held over a wait.
        self._lock = threading.Lock()
        self._backlog: Backlog[Flag] = Backlog(bounds)
        self._newest: PendingBatch[Flag] | None = None
        self._waiting_for_room: list[Flag] = []
        self._failures: list[PendingBatch[Flag]] = []
        self._acked_count = self._failed_count = 0
        self._is_closing = False
        self._bell = Bell()
        self._crew = Crew()

    def __repr__(self) -> str:
        return f"<Producer {self._name[:8]} to {self._sender!r}: {self._backlog!r}>"

    def __enter__(self) -> Producer:
        window_ms = self._sender.idempotency_window_ms()
        if window_ms is not None:
            total_s = min(self._settle_s, window_ms / 1000 * _WINDOW_SHARE)
            self._retry = Retry(total_s=total_s)
        self._crew.__enter__()
        self._crew.start(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, Exception):
            # Records submitted before the block failed are still sent. Only a cancelled task ends at once.
            self._crew.__exit__(None, None, None)
            return
        self._crew.__exit__(kind, error, trace)
        if error is None:
            self._raise_unseen()

    # -- submitting

    def submit(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        ts: int | None = None,
    ) -> Ticket:
        """Takes a record, or a whole `Entry`, as it is now. `NotJson` when it is not JSON."""
        entry = data if isinstance(data, Entry) else Entry(data, tag, node, meta, ts)
        return self.submit_encoded(answers.encode_entry(entry, self._node))

    def submit_encoded(self, record: bytes) -> Ticket:
        """Submit a record that is the JSON of an `Entry`."""
        backlog = self._backlog
        while True:
            with self._lock:
                if self._is_closing:
                    why = "has stopped at a failure" if self._has_stopped else "is closed"
                    raise Closed(f"the producer {why}; nothing was submitted")
                if backlog.has_room(len(record)):
                    batch = backlog.open_batch(len(record))
                    is_new = batch is None
                    if batch is None:
                        batch = backlog.start(self._new_batch())
                    ticket = Ticket(batch, backlog.add(batch, record))
                    break
                room = Flag()
                self._waiting_for_room.append(room)
            self._bell.ring()
            room.wait()
        if is_new:
            self._bell.ring()
            sleep(0)  # a loop of submits lets the sending go on
        return ticket

    def _new_batch(self) -> PendingBatch[Flag]:
        self._batches_begun += 1
        self._newest = PendingBatch(f"{self._name}-{self._batches_begun}", Flag(), time.monotonic())
        return self._newest

    def flush(self) -> None:
        """Wait until every submitted record is stored or has failed. Raises the first failure that your
        program has not seen on its ticket."""
        with self._lock:
            newest = self._newest
            self._backlog.is_hurried = not self._backlog.is_idle
        self._bell.ring()
        if newest is not None:
            newest.flag.wait()
        self._raise_unseen()

    def statistics(self) -> ProducerStatistics:
        """Return how many records are stored, failed and on their way."""
        with self._lock:
            return ProducerStatistics(
                self._acked_count, self._failed_count, self._backlog.held_records, self._batches_begun
            )

    def _close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._backlog.is_hurried = True
            waiting, self._waiting_for_room = self._waiting_for_room, []
        for room in waiting:
            room.set()
        self._bell.ring()

    def _raise_unseen(self) -> None:
        with self._lock:
            unseen = [batch for batch in self._failures if not batch.is_seen]
            self._failures = []
        for batch in unseen:
            for _, outcome in batch.runs:
                if isinstance(outcome, StreamsError):
                    raise type(outcome)(outcome.message, **outcome.detail) from outcome

    # -- sending

    def _run(self) -> None:
        batch: PendingBatch[Flag] | None = None
        try:
            while True:
                with self._lock:
                    due_in_s = self._backlog.due_in_s(time.monotonic())
                    batch = self._backlog.take() if due_in_s == 0 else None
                    if due_in_s is None and self._is_closing:
                        return
                if batch is None:
                    self._bell.wait(due_in_s)
                    continue
                self._deliver(batch, 0, batch.count, batch.key)
                self._on_settled(batch)
                if self._has_stopped:
                    return
        finally:
            self._give_up(batch)

    def _deliver(self, batch: PendingBatch[Flag], start: int, end: int, key: str) -> None:
        if self._has_stopped:  # within this very batch, whose halves go one after the other
            batch.settle(end - start, Closed(_NOT_SENT))
            return
        outcome: int | StreamsError
        try:
            reply = self._sender.append_encoded(batch.records[start:end], key=key, retry=self._retry)
            outcome = reply.first_seq
        except Refused as error:
            if end - start > 1 and error.code in _ONE_IS_TO_BLAME:
                half = (start + end) // 2
                self._deliver(batch, start, half, f"{key}.0")
                self._deliver(batch, half, end, f"{key}.1")
                return
            outcome = error
        except StreamsError as error:
            outcome = error
        self._has_stopped = self._stops_at_failure and isinstance(outcome, StreamsError)
        batch.settle(end - start, outcome)

    def _on_settled(self, batch: PendingBatch[Flag]) -> None:
        start = 0
        with self._lock:
            for end, outcome in batch.runs:
                if isinstance(outcome, int):
                    self._acked_count += end - start
                else:
                    self._failed_count += end - start
                start = end
            has_failed = any(isinstance(outcome, StreamsError) for _, outcome in batch.runs)
            if has_failed and len(self._failures) < _FAILURES_KEPT:
                self._failures.append(batch)
            self._backlog.release(batch)
            waiting, self._waiting_for_room = self._waiting_for_room, []
        batch.flag.set()
        for room in waiting:
            room.set()

    def _give_up(self, batch: PendingBatch[Flag] | None) -> None:
        """Settle all records when the thread ends early or stops at a failure. The batch in flight is
        uncertain; the rest was not sent."""
        self._close()
        error: StreamsError = AnswerLost("the producer was cancelled while this batch was in flight")
        while True:
            if batch is not None and not batch.flag.is_set():
                batch.settle(batch.count - batch.settled_count, error)
                self._on_settled(batch)
            with self._lock:
                if self._backlog.is_empty:
                    return
                batch = self._backlog.take()
            error = Closed(_NOT_SENT)
