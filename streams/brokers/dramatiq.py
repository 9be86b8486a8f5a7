"""A broker for Dramatiq.

    import dramatiq
    from streams.brokers.dramatiq import DramatiqBroker

    dramatiq.set_broker(DramatiqBroker("http://127.0.0.1:4000"))

Each queue of Dramatiq is a queue here, `dramatiq.default` for `default`. A delayed message is a delayed job:
it is in no worker's memory while it waits, and there are no delay queues. A rejected message goes to the dead
letters, `dramatiq.default.XQ`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout
from dramatiq.message import Message

from streams.brokers.connections import (
    LEASE_S,
    PREFETCH_MAX,
    box_name,
    job_priority_of,
    lease_ms_of,
    quiet_http_log,
)
from streams.brokers.held_jobs import HeldJobs
from streams.brokers.task_messages import entry_of, message_of
from streams.client._sync.client import Client
from streams.client.answers import Job
from streams.client.options import BoxSettings
from streams.protocol.errors import BoxNotFound, StreamsError

#: How long dead letters are kept.
DEAD_LETTER_TTL_S = 7 * 86_400.0


class DramatiqBroker(Broker):
    """Queues of a server as queues of Dramatiq.

    `queue_settings` are settings of the queues that it creates, such as `durability`, `fair` or
    `max_deliveries`. An actor or a message may have the options `broker_priority` (0 to 9, higher first) and
    `ordering_key`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        prefix: str = "dramatiq.",
        lease_s: float = LEASE_S,
        dead_letter_ttl_s: float = DEAD_LETTER_TTL_S,
        queue_settings: dict[str, Any] | None = None,
        middleware: list[Any] | None = None,
    ) -> None:
        super().__init__(middleware=middleware)
        self.actor_options |= {"broker_priority", "ordering_key"}
        self.queues: set[str] = set()
        self.prefix = prefix
        self._url, self._key = url, key
        self._lease_ms = lease_ms_of(lease_s)
        self._dead_letter_settings: BoxSettings = {"ttl_ms": round(dead_letter_ttl_s * 1000)}
        self._queue_settings = dict(queue_settings or {})
        self._lock = threading.Lock()
        self._connection: tuple[int, Client, HeldJobs] | None = None

    def __repr__(self) -> str:
        return f"<DramatiqBroker {self._url or 'STREAMS_URL'} {self.prefix}>"

    def connect(self) -> tuple[Client, HeldJobs]:
        """Return the client of this process and its jobs. A process that was forked gets new ones."""
        with self._lock:
            if self._connection is None or self._connection[0] != os.getpid():
                quiet_http_log()
                client = Client(self._url, key=self._key)
                self._connection = (os.getpid(), client, HeldJobs(client, lease_ms=self._lease_ms))
            return self._connection[1:]

    @property
    def client(self) -> Client:
        return self.connect()[0]

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None and connection[0] == os.getpid():
            connection[2].close()
            connection[1].close()

    # -- queues

    def box(self, queue_name: str) -> str:
        return box_name(self.prefix, queue_name)

    def dead_letter_box(self, queue_name: str) -> str:
        return f"{self.box(queue_name)}.XQ"

    def create_queue(self, queue_name: str) -> None:
        """Make the box of a queue. Declaring a queue does not: modules with actors are imported without a
        server."""
        settings = self._queue_settings
        if settings.get("max_deliveries") and "dead_letter" not in settings:
            settings = {**settings, "dead_letter": self.dead_letter_box(queue_name)}
            self.client.queue(self.dead_letter_box(queue_name)).create(**self._dead_letter_settings)
        self.client.queue(self.box(queue_name)).create(**settings)

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        return self.queues.copy()

    def flush(self, queue_name: str) -> None:
        """Delete all messages of a queue: those that wait, are delayed or held by workers, and the dead
        letters."""
        for name in (self.box(queue_name), self.dead_letter_box(queue_name)):
            box = self.client.box(name)
            try:
                box.delete(before_seq=box.position().head_seq + 1)
            except BoxNotFound:
                pass

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until no message of a queue waits, is delayed or held. Used by tests."""
        deadline_s = None if timeout is None else time.monotonic() + timeout / 1000
        while self.count(queue_name):
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    def count(self, queue_name: str) -> int:
        """Return how many messages of a queue wait, are delayed or held by workers."""
        try:
            return self.client.box(self.box(queue_name)).state().count
        except BoxNotFound:
            return 0

    # -- messages

    def enqueue(self, message: Message, *, delay: int | None = None) -> Message:
        """Append a message as a job; `delay` is in milliseconds."""
        self.emit_before("enqueue", message, delay)
        entry = entry_of(
            message.encode(),
            tag=message.actor_name,
            job_priority=job_priority_of(self._option(message, "broker_priority")),
            ordering_key=self._option(message, "ordering_key"),
            delay_ms=delay,
        )
        self._append(message.queue_name, entry)
        self.emit_after("enqueue", message, delay)
        return message

    def _option(self, message: Message, name: str) -> Any:
        actor = self.actors.get(message.actor_name)
        return message.options.get(name, actor.options.get(name) if actor is not None else None)

    def _append(self, queue_name: str, entry: Any) -> None:
        queue = self.client.queue(self.box(queue_name))
        try:
            try:
                queue.append_batch([entry], create=False)
            except BoxNotFound:
                self.create_queue(queue_name)
                queue.append_batch([entry], create=False)
        except StreamsError as error:
            raise ConnectionClosed(error) from error

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        return DramatiqConsumer(self, queue_name, prefetch, timeout)

    def bury(self, queue_name: str, job: Job, error: str | None) -> None:
        """Move a rejected message to the dead letters of its queue."""
        box, dead_letter = self.box(queue_name), self.dead_letter_box(queue_name)
        self.connect()[1].bury(box, job, dead_letter, error, settings=self._dead_letter_settings)


class JobMessage(MessageProxy):
    def __init__(self, message: Message, job: Job) -> None:
        super().__init__(message)
        self.job = job


class DramatiqConsumer(Consumer):
    """Claims jobs of one queue, and waits for them at the server."""

    def __init__(self, broker: DramatiqBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        self._broker = broker
        self._queue_name = queue_name
        self._box = broker.box(queue_name)
        self._prefetch = max(1, min(prefetch, PREFETCH_MAX))
        self._timeout_ms = timeout
        self._held_jobs = broker.connect()[1]
        #: Claimed and not yet given to the worker.
        self._jobs: deque[Job] = deque()
        #: Given to the worker; guarded by the condition, because workers ack from their own threads.
        self._working_count = 0
        self._condition = threading.Condition()

    def __next__(self) -> MessageProxy | None:
        """Return the next message, or None after the timeout."""
        if not self._jobs:
            try:
                self._claim()
            except StreamsError as error:
                raise ConnectionClosed(error) from error
        if not self._jobs:
            return None
        job = self._jobs.popleft()
        message = JobMessage(Message.decode(message_of(job)), job)
        with self._condition:
            self._working_count += 1
        return message

    def _claim(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._working_count < self._prefetch, self._timeout_ms / 1000)
            room = self._prefetch - self._working_count
        if room <= 0:
            return
        try:
            self._jobs.extend(
                self._held_jobs.claim(self._box, max=room, wait_ms=min(self._timeout_ms, 30_000))
            )
        except BoxNotFound:
            self._broker.create_queue(self._queue_name)

    def ack(self, message: JobMessage) -> None:
        self._held_jobs.ack(self._box, message.job)
        self._finish(1)

    def nack(self, message: JobMessage) -> None:
        error = message.options.get("traceback")
        try:
            self._broker.bury(self._queue_name, message.job, str(error).strip() if error else None)
        except StreamsError as failure:
            raise ConnectionClosed(failure) from failure
        self._finish(1)

    def requeue(self, messages: Iterable[JobMessage]) -> None:
        jobs = [message.job for message in messages]
        if jobs:
            self._held_jobs.give_back(self._box, jobs)
            self._finish(len(jobs))

    def _finish(self, count: int) -> None:
        with self._condition:
            self._working_count -= count
            self._condition.notify_all()

    def close(self) -> None:
        if self._jobs:
            self._held_jobs.give_back(self._box, list(self._jobs))
            self._jobs.clear()
