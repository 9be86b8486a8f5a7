"""A broker for Taskiq.

    from streams.brokers.taskiq import TaskiqBroker

    broker = TaskiqBroker("http://127.0.0.1:4000", queue="mail")

    @broker.task
    async def send(address: str) -> None: ...

One broker is one queue, `taskiq.mail` here. Labels of a task or a call: `delay` in seconds, `priority` (0 to
9, higher first) and `ordering_key`. The lease of a task is extended while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from taskiq.abc.broker import AsyncBroker
from taskiq.acks import AckableMessage
from taskiq.message import BrokerMessage

from streams.brokers.connections import (
    JOBS_MAX,
    LEASE_S,
    PREFETCH_MAX,
    WAIT_MS,
    box_name,
    consumer_name,
    job_priority_of,
    lease_ms_of,
    quiet_http_log,
)
from streams.brokers.task_messages import entry_of, message_of
from streams.client._async.client import AsyncClient
from streams.client._async.queue import AsyncQueue
from streams.client.answers import Job
from streams.client.retry import FOREVER
from streams.protocol.errors import BoxNotFound, StreamsError

log = logging.getLogger("streams.brokers")

_EXTENSIONS_PER_LEASE = 4
#: Jobs that one claim takes at most. They wait in the process until the worker has room for them.
_CLAIM_MAX = 10
#: Pause after a claim that was refused, such as for a missing scope.
_REFUSED_S = 1.0


class TaskiqBroker(AsyncBroker):
    """One queue of a server as a broker of Taskiq.

    `queue_settings` are settings of the queue if the broker creates it, such as `durability` or `fair`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        queue: str = "default",
        prefix: str = "taskiq.",
        lease_s: float = LEASE_S,
        claim_max: int = _CLAIM_MAX,
        queue_settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._url, self._key = url, key
        self._box = box_name(prefix, queue)
        self._lease_ms = lease_ms_of(lease_s)
        self._claim_max = max(1, min(claim_max, PREFETCH_MAX))
        self._queue_settings = dict(queue_settings or {})
        self._node = consumer_name()
        self._client: AsyncClient | None = None
        self._jobs: dict[int, Job] = {}
        self._acks: list[tuple[Job, asyncio.Future[None]]] = []
        self._ack_event = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._claims: set[asyncio.Task[list[Job]]] = set()

    @property
    def queue(self) -> AsyncQueue:
        """The queue of the tasks, as the client has it."""
        if self._client is None:
            raise RuntimeError("the broker is not started; call `await broker.startup()` first")
        return self._client.queue(self._box)

    async def startup(self) -> None:
        quiet_http_log()
        self._client = AsyncClient(self._url, key=self._key)
        if not await self.queue.exists():
            await self.queue.create(**self._queue_settings)
        await super().startup()

    async def shutdown(self) -> None:
        """Send the acks that are left, give back jobs that were not started, and close the client."""
        await super().shutdown()
        if self._client is None:
            return
        for jobs in await asyncio.gather(*self._claims, return_exceptions=True):
            if isinstance(jobs, list):
                await self._give_back(jobs)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._send_acks()
        await self._client.aclose()
        self._client = None

    # -- sending

    async def kick(self, message: BrokerMessage) -> None:
        labels = message.labels
        delay = labels.get("delay")
        entry = entry_of(
            message.message,
            tag=message.task_name,
            job_priority=job_priority_of(labels.get("priority")),
            ordering_key=labels.get("ordering_key"),
            delay_ms=round(float(delay) * 1000) if delay is not None else None,
        )
        try:
            await self.queue.append_batch([entry], create=False)
        except BoxNotFound:
            await self.queue.create(**self._queue_settings)
            await self.queue.append_batch([entry], create=False)

    # -- receiving

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks as the worker has room for them."""
        self._start_tasks()
        jobs: list[Job] = []
        try:
            while True:
                jobs = await self._claim()
                while jobs:
                    job = jobs.pop(0)
                    yield AckableMessage(data=message_of(job), ack=lambda job=job: self._ack(job))
        finally:
            await asyncio.shield(self._give_back(jobs))

    async def _claim(self) -> list[Job]:
        """Claim jobs. A worker that stops leaves the claim to `shutdown`, which gives its jobs back."""
        claim = asyncio.create_task(self._claim_once())
        self._claims.add(claim)
        jobs = await asyncio.shield(claim)
        self._claims.discard(claim)
        return jobs

    async def _claim_once(self) -> list[Job]:
        try:
            jobs = await self.queue.claim(
                self._node,
                max=self._claim_max,
                lease_ms=self._lease_ms,
                wait_ms=WAIT_MS,
                retry=FOREVER,
                raw_data=True,
            )
        except BoxNotFound:
            await self.queue.create(**self._queue_settings)
            return []
        except StreamsError as error:
            log.error("tasks of %s cannot be claimed: %s", self._box, error)
            await asyncio.sleep(_REFUSED_S)
            return []
        self._jobs.update((job.seq, job) for job in jobs)
        return jobs

    async def _give_back(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        self._release(jobs)
        try:
            await self.queue.nack(self._node, jobs, delay_ms=0)
        except StreamsError as error:
            log.warning("tasks of %s could not be given back; their leases will expire: %s", self._box, error)

    # -- acks and leases

    def _start_tasks(self) -> None:
        if not self._tasks:
            self._tasks = {asyncio.create_task(self._keep_acking()), asyncio.create_task(self._keep_leases())}

    async def _ack(self, job: Job) -> None:
        """Return when the server has the ack. Acks that come during a request go together in the next."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._acks.append((job, future))
        self._ack_event.set()
        await future

    async def _keep_acking(self) -> None:
        while True:
            await self._ack_event.wait()
            self._ack_event.clear()
            await self._send_acks()

    async def _send_acks(self) -> None:
        while self._acks:
            acks, self._acks = self._acks[:JOBS_MAX], self._acks[JOBS_MAX:]
            jobs = [job for job, _ in acks]
            failure: StreamsError | None = None
            try:
                reply = await self.queue.ack(self._node, jobs)
            except StreamsError as error:
                failure = error
            else:
                if reply.skipped:
                    log.warning(
                        "tasks of %s were done, but their leases had expired: %s", self._box, reply.skipped
                    )
            self._release(jobs)
            for _, future in acks:
                if future.done():  # the task was cancelled
                    continue
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 1000 / _EXTENSIONS_PER_LEASE)
            jobs = list(self._jobs.values())
            for start in range(0, len(jobs), JOBS_MAX):
                await self._extend(jobs[start : start + JOBS_MAX])

    async def _extend(self, jobs: list[Job]) -> None:
        try:
            reply = await self.queue.extend(self._node, jobs, lease_ms=self._lease_ms)
        except StreamsError as error:
            log.warning("leases of %s could not be extended: %s", self._box, error)
            return
        lost_seqs = set(reply.skipped)
        self._release([job for job in jobs if job.seq in lost_seqs])

    def _release(self, jobs: list[Job]) -> None:
        for job in jobs:
            current = self._jobs.get(job.seq)
            if current is not None and current.lease_id == job.lease_id:
                del self._jobs[job.seq]
