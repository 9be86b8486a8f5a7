"""Threads that wait for jobs and broadcasts, and the inbox they fill.

A queue has one thread, which claims as many jobs as its channel has room for and waits at the server while
there are none. An exchange of type fanout has one thread for each queue bound to it here, which reads the box
of the exchange from where the queue was bound. The inbox has a socket that becomes readable with the first
delivery, for event loops.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from streams.brokers.connections import WAIT_MS
from streams.brokers.held_jobs import HeldJobs
from streams.client._sync.client import Client
from streams.client.answers import Job, RawRecord, decode
from streams.protocol.errors import BoxNotFound, StreamsError

log = logging.getLogger("streams.brokers")

#: Records of one page of broadcasts.
_PAGE_RECORDS = 100


class InboxMessage(NamedTuple):
    """A message for the consumer of a queue. A broadcast has no job: there is nothing to ack."""

    queue: str
    message: bytes
    job: Job | None


class Inbox:
    """Deliveries between the threads that read and the one that consumes. A failure of a thread is raised
    to the consumer."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._deliveries: deque[InboxMessage] = deque()
        self._failure: StreamsError | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, deliveries: list[InboxMessage]) -> None:
        with self._condition:
            self._deliveries.extend(deliveries)
            self._ring()

    def fail(self, failure: StreamsError) -> None:
        with self._condition:
            self._failure = failure
            self._ring()

    def _ring(self) -> None:
        self._condition.notify_all()
        try:
            self._writer.send(b"!")
        except OSError:  # full: it is readable already; or closed
            pass

    def take(self, timeout_s: float | None) -> list[InboxMessage]:
        """Return all deliveries; wait up to `timeout_s` for the first."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._deliveries) or self._failure is not None, timeout_s)
            try:
                self._reader.recv(65_536)
            except OSError:
                pass
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            messages = list(self._deliveries)
            self._deliveries.clear()
            return messages

    def take_queue(self, queue: str) -> list[InboxMessage]:
        """Take out what waits for the consumer of one queue, which is leaving."""
        with self._condition:
            messages = [each for each in self._deliveries if each.queue == queue]
            self._deliveries = deque(each for each in self._deliveries if each.queue != queue)
            return messages

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Room:
    """How many more jobs the consumers of a channel may hold."""

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._condition = threading.Condition()
        self._reserved_count = 0

    def wait(self, timeout_s: float) -> int:
        """Return how many jobs may be claimed now; wait up to `timeout_s` until it is one."""
        with self._condition:
            self._condition.wait_for(lambda: self._free() > self._reserved_count, timeout_s)
            return max(0, self._free() - self._reserved_count)

    def take(self, count: int) -> int:
        """Reserve room for up to `count` jobs that were claimed; return for how many there is."""
        with self._condition:
            got = max(0, min(count, self._free() - self._reserved_count))
            self._reserved_count += got
            return got

    def settle(self, count: int) -> None:
        """These jobs are now counted by the channel, or given back."""
        with self._condition:
            self._reserved_count -= count
            self._condition.notify_all()

    def ring(self) -> None:
        with self._condition:
            self._condition.notify_all()


class _Reader:
    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; `join` waits for it."""
        self._stopping.set()

    def join(self) -> None:
        self._thread.join(2 * WAIT_MS / 1000)

    def _run(self) -> None:
        raise NotImplementedError


class QueueReader(_Reader):
    def __init__(
        self,
        queue: str,
        box: str,
        held_jobs: HeldJobs,
        inbox: Inbox,
        room: Room,
        declare: Callable[[str], None],
    ) -> None:
        super().__init__(f"streams claims of {queue}")
        self._queue, self._box = queue, box
        self._held_jobs, self._inbox, self._room = held_jobs, inbox, room
        self._declare = declare

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._claim()
        except StreamsError as error:
            if not self._stopping.is_set():
                self._inbox.fail(error)

    def _claim(self) -> None:
        count = self._room.wait(WAIT_MS / 1000)
        if count == 0 or self._stopping.is_set():
            return
        try:
            jobs = self._held_jobs.claim(self._box, max=count, wait_ms=WAIT_MS)
        except BoxNotFound:
            if not self._stopping.is_set():
                self._declare(self._queue)  # deleted meanwhile
            return
        if not jobs:
            return
        # Another queue of this channel may have used the room meanwhile.
        count_accepted = 0 if self._stopping.is_set() else self._room.take(len(jobs))
        self._inbox.put([InboxMessage(self._queue, bytes(job.data), job) for job in jobs[:count_accepted]])
        if jobs[count_accepted:]:
            self._held_jobs.give_back(self._box, jobs[count_accepted:])


class BroadcastReader(_Reader):
    def __init__(self, queue: str, box: str, from_seq: int, client: Client, inbox: Inbox) -> None:
        super().__init__(f"streams broadcasts to {queue}")
        self._queue, self._box, self._from_seq = queue, box, from_seq
        self._client, self._inbox = client, inbox

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._read()
        except StreamsError as error:
            if not self._stopping.is_set():
                self._inbox.fail(error)

    def _read(self) -> None:
        page = self._client.box(self._box).raw_page(
            from_seq=self._from_seq, limit=_PAGE_RECORDS, wait_ms=WAIT_MS
        )
        self._from_seq = page.next_from_seq
        if page.records and not self._stopping.is_set():
            self._inbox.put(
                [InboxMessage(self._queue, _data_of(bytes(record)), None) for record in page.records]
            )


def _data_of(record: bytes) -> bytes:
    return bytes(decode(record, RawRecord).data)
