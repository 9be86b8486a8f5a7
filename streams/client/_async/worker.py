"""A worker: claims jobs, runs a handler, keeps the leases, and says how it went."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from streams.client.answers import Job
from streams.client.concurrency import AsyncBell, AsyncCrew, AsyncFlag, ashielded, asleep
from streams.client.retry import FOREVER
from streams.client.working import AsyncHandler, Nack, WorkerStatistics, delay_ms
from streams.protocol.errors import StreamsError
from streams.protocol.messages.replies import BoxState

if TYPE_CHECKING:
    from streams.client._async.queue import AsyncQueue

log = logging.getLogger("streams.worker")

#: How long one claim waits for a job, and so how long `stop` takes when there is none.
_WAIT_MS = 2_000
#: Leases are extended so often within their length: two may fail and the third still comes in time.
_EXTENSIONS_PER_LEASE = 4
_LAST_PAUSE_S = 0.05
#: For giving a job back when the worker is told to end at once.
_GIVE_BACK_S = 2.0
#: More jobs than that cannot be extended in one request.
_CONCURRENCY_MAX = 1000


class AsyncWorker:
    """`run` works until `stop`, then finishes what it has. A handler that returns acks its job; one that
    raises gives it back, for a time that grows with its deliveries; `Nack` gives it back on purpose. Leases
    are extended while handlers run."""

    def __init__(
        self,
        queue: AsyncQueue,
        handler: AsyncHandler,
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
        self.node = node or f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._stopping = AsyncFlag()
        self._finished = AsyncFlag()
        self._freed = AsyncBell()
        #: Guards what follows; never held over a wait.
        self._lock = threading.Lock()
        self._held: dict[int, Job] = {}
        self._done = self._given_back = self._failed = self._lost = 0

    def __repr__(self) -> str:
        return f"<AsyncWorker {self.node} of {self._queue.name}, {len(self._held)} held>"

    def statistics(self) -> WorkerStatistics:
        with self._lock:
            return WorkerStatistics(self._done, self._given_back, self._failed, self._lost, len(self._held))

    def stop(self) -> None:
        """No more jobs; `run` returns when those at work are finished. May be called from a handler."""
        self._stopping.set()
        self._freed.ring()

    async def run(self, *, drain: bool = False) -> None:
        """Works until `stop`, or with `drain` until no job is ready and none is at work, here or elsewhere.
        Jobs that are delayed are not waited for."""
        lease_ms = self._lease_ms or (await self._queue.config()).lease_ms
        async with AsyncCrew() as crew:
            crew.start(self._keep_leases, lease_ms)
            try:
                await self._keep_claiming(crew, drain)
                while self._held:
                    await self._freed.wait()
            finally:
                self._stopping.set()
                self._finished.set()

    async def _keep_claiming(self, crew: AsyncCrew, drain: bool) -> None:
        wait_ms = 0 if drain else _WAIT_MS
        while not self._stopping.is_set():
            free = self._concurrency - len(self._held)
            if free == 0:
                await self._freed.wait()
                continue
            jobs = await self._queue.claim(
                self.node,
                max=free,
                lease_ms=self._lease_ms,
                wait_ms=wait_ms,
                retry=FOREVER,
                raw_data=self._raw_data,
            )
            with self._lock:
                self._held.update((job.seq, job) for job in jobs)
            for job in jobs:
                crew.start(self._work, job)
            if drain and not jobs:
                if self._held:
                    await self._freed.wait()
                elif await self._is_drained():
                    return
                else:  # others are at work; what they give back is ours
                    wait_ms = _WAIT_MS

    async def _is_drained(self) -> bool:
        state = await self._queue.client.get(self._queue.path, BoxState, {"touch": "false"}, retry=FOREVER)
        return state.queue is None or state.queue.ready + state.queue.in_flight == 0

    async def _work(self, job: Job) -> None:
        try:
            try:
                await self._handler(job)
            except Nack as verdict:
                await self._give_back(job, verdict.delay_ms)
                self._count(given_back=1)
            except Exception:
                # It is not ours, and it must not end the worker: whatever it is, the job is to be tried
                # again.
                log.exception("the handler of job %d of %s raised", job.seq, self._queue.name)
                self._count(failed=1)
                await self._give_back(job, delay_ms(job.deliveries))
            except BaseException:  # the worker is told to end at once
                with ashielded(_GIVE_BACK_S):
                    await self._give_back(job, 0)
                raise
            else:
                await self._ack(job)
        finally:
            with self._lock:
                self._held.pop(job.seq, None)
            self._freed.ring()

    async def _ack(self, job: Job) -> None:
        try:
            settled = await self._queue.ack(self.node, [job])
        except StreamsError as error:
            log.error("job %d of %s is done, but the ack failed: %s", job.seq, self._queue.name, error)
            self._count(lost=1)
            return
        if settled.skipped:
            log.warning("job %d of %s is done, but its lease was over", job.seq, self._queue.name)
            self._count(lost=1)
        else:
            self._count(done=1)

    def _count(self, *, done: int = 0, given_back: int = 0, failed: int = 0, lost: int = 0) -> None:
        with self._lock:
            self._done += done
            self._given_back += given_back
            self._failed += failed
            self._lost += lost

    async def _give_back(self, job: Job, after_ms: int) -> None:
        try:
            await self._queue.nack(self.node, [job], delay_ms=after_ms)
        except StreamsError as error:
            # Its lease will be over some time, which says the same.
            log.warning("job %d of %s could not be given back: %s", job.seq, self._queue.name, error)

    async def _keep_leases(self, lease_ms: int) -> None:
        pause_s = lease_ms / 1000 / _EXTENSIONS_PER_LEASE
        while True:
            if await self._finished.wait(pause_s):
                if not self._held:
                    return
                await asleep(_LAST_PAUSE_S)  # `run` was interrupted, and handlers are finishing
            with self._lock:
                held = list(self._held.values())
            if not held:
                continue
            try:
                await self._queue.extend(self.node, held, lease_ms=lease_ms)
            except StreamsError as error:
                log.warning("leases of %s could not be extended: %s", self._queue.name, error)
