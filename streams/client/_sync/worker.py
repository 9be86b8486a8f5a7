# Written by `make twin` from ../_async/worker.py. Do not edit.
"""A worker: claims jobs, runs a handler, keeps the leases, and says how it went."""

from __future__ import annotations

import logging
import threading
import uuid
from typing import TYPE_CHECKING

from streams.client.answers import Job
from streams.client.concurrency import Bell, Crew, Flag, shield, sleep
from streams.client.errors import Closed
from streams.client.retry import FOREVER
from streams.client.working import Handler, JobOutputs, Nack, WorkerStatistics, delay_ms
from streams.protocol.errors import StreamsError
from streams.protocol.messages.replies import BoxState

if TYPE_CHECKING:
    from streams.client._sync.queue import Queue

log = logging.getLogger("streams.worker")

#: How long one claim waits for a job, and so how long `stop` takes when there is none.
_WAIT_MS = 2_000
#: How long a claim at the end of a drain waits, while outputs are in flight to their boxes.
_OUTPUTS_WAIT_MS = 100
#: Leases are extended so often within their length: two may fail and the third still comes in time.
_EXTENSIONS_PER_LEASE = 4
_LAST_PAUSE_S = 0.05
#: Time to give a job back when the worker is cancelled.
_GIVE_BACK_S = 2.0
#: More jobs than that cannot be extended in one request.
_CONCURRENCY_MAX = 1000


class Worker:
    """`run` works until `stop`, then finishes what it has. A handler that returns acks its job, with outputs
    if it returns `JobOutputs`; one that raises gives it back, for a time that grows with its deliveries;
    `Nack` gives it back on purpose. Leases are extended while handlers run."""

    def __init__(
        self,
        queue: Queue,
        handler: Handler,
        *,
        node: str | None,
        concurrency: int,
        lease_ms: int | None,
        raw_data: bool = False,
    ) -> None:
        if not 1 <= concurrency <= _CONCURRENCY_MAX:
            raise ValueError(f"concurrency must be from 1 to {_CONCURRENCY_MAX}, got {concurrency}")
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._lease_ms = lease_ms
        self._raw_data = raw_data
        self.node = node or queue.node or f"{queue.client.worker_node}-{uuid.uuid4().hex[:6]}"
        self._stopping = Flag()
        self._end_flag = Flag()
        #: True if the queue decides how long a failed job waits.
        self._has_backoff = False
        self._slot_bell = Bell()
        #: Guards what follows; never held over a wait.
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._done_count = self._returned_count = self._failed_count = self._lost_count = 0

    def __repr__(self) -> str:
        return f"<Worker {self.node} of {self._queue.name}, {len(self._jobs)} held>"

    def statistics(self) -> WorkerStatistics:
        """Return how many jobs are done, returned, failed, lost and running."""
        with self._lock:
            return WorkerStatistics(
                self._done_count, self._returned_count, self._failed_count, self._lost_count, len(self._jobs)
            )

    def stop(self) -> None:
        """Take no more jobs. `run` returns when the running ones are finished. May be called from a
        handler."""
        self._stopping.set()
        self._slot_bell.ring()

    def run(self, *, drain: bool = False) -> None:
        """Works until `stop`, or with `drain` until no job is ready, none is at work, here or elsewhere, and
        all outputs of acks are in their boxes. Jobs that are delayed are not waited for. A worker runs once.
        """
        if self._end_flag.is_set():
            raise Closed("this worker has ended; create another one with queue.worker(...)")
        config = self._queue.config()
        lease_ms = self._lease_ms or config.lease_ms
        self._has_backoff = config.retry_backoff is not None
        with Crew() as crew:
            crew.start(self._keep_leases, lease_ms)
            try:
                self._keep_claiming(crew, drain)
                while self._jobs:
                    self._slot_bell.wait()
            finally:
                self._stopping.set()
                self._end_flag.set()

    def _keep_claiming(self, crew: Crew, drain: bool) -> None:
        wait_ms = 0 if drain else _WAIT_MS
        while not self._stopping.is_set():
            free = self._concurrency - len(self._jobs)
            if free == 0:
                self._slot_bell.wait()
                continue
            jobs = self._queue.claim(
                self.node,
                max=free,
                lease_ms=self._lease_ms,
                wait_ms=wait_ms,
                retry=FOREVER,
                raw_data=self._raw_data,
            )
            with self._lock:
                self._jobs.update((job.seq, job) for job in jobs)
            for job in jobs:
                crew.start(self._work, job)
            if drain and not jobs:
                if self._jobs:
                    self._slot_bell.wait()
                else:
                    wait_ms = self._find_drain_wait()
                    if not wait_ms:
                        return

    def _find_drain_wait(self) -> int:
        """Return how long the next claim waits for what others give back; 0 if the queue is drained."""
        state = self._queue.client.get(self._queue.path, BoxState, {"touch": "false"}, retry=FOREVER)
        queue = state.queue
        if queue is not None and queue.ready + queue.in_flight:
            return _WAIT_MS
        # Outputs may be new jobs of this queue.
        return _OUTPUTS_WAIT_MS if queue is not None and queue.outputs_pending else 0

    def _work(self, job: Job) -> None:
        try:
            try:
                result = self._handler(job)
            except Nack as verdict:
                self._give_back(job, verdict.delay_ms, verdict.error)
                self._count(returns=1)
            except Exception as error:
                # It is not ours, and it must not end the worker: whatever it is, the job is to be tried
                # again.
                log.exception("the handler of job %d of %s raised", job.seq, self._queue.name)
                self._count(failures=1)
                after_ms = None if self._has_backoff else delay_ms(job.deliveries)
                self._give_back(job, after_ms, f"{type(error).__name__}: {error}")
            except BaseException:  # the worker is cancelled
                with shield(_GIVE_BACK_S):
                    self._give_back(job, 0)
                raise
            else:
                self._ack(job, result)
        finally:
            with self._lock:
                self._jobs.pop(job.seq, None)
            self._slot_bell.ring()

    def _ack(self, job: Job, result: object) -> None:
        outputs = result.outputs if isinstance(result, JobOutputs) else None
        try:
            reply = self._queue.ack(self.node, [job], outputs=outputs)
        except StreamsError as error:
            log.error("job %d of %s was processed, but its ack failed: %s", job.seq, self._queue.name, error)
            self._count(losses=1)
            return
        if reply.skipped:
            log.warning("job %d of %s was processed, but its lease had expired", job.seq, self._queue.name)
            self._count(losses=1)
        else:
            self._count(acks=1)

    def _count(self, *, acks: int = 0, returns: int = 0, failures: int = 0, losses: int = 0) -> None:
        with self._lock:
            self._done_count += acks
            self._returned_count += returns
            self._failed_count += failures
            self._lost_count += losses

    def _give_back(self, job: Job, after_ms: int | None, error: str | None = None) -> None:
        try:
            self._queue.nack(self.node, [job], delay_ms=after_ms, error=error)
        except StreamsError as error:
            # Its lease will be over some time, which says the same.
            log.warning("job %d of %s could not be given back: %s", job.seq, self._queue.name, error)

    def _keep_leases(self, lease_ms: int) -> None:
        pause_s = lease_ms / 1000 / _EXTENSIONS_PER_LEASE
        while True:
            if self._end_flag.wait(pause_s):
                if not self._jobs:
                    return
                sleep(_LAST_PAUSE_S)  # `run` was interrupted, and handlers are finishing
            with self._lock:
                jobs = list(self._jobs.values())
            if not jobs:
                continue
            try:
                self._queue.extend(self.node, jobs, lease_ms=lease_ms)
            except StreamsError as error:
                log.warning("leases of %s could not be extended: %s", self._queue.name, error)
