"""The jobs that one consumer holds: claims, leases, acks.

One thread extends the leases while tasks run, and sends acks: those that arrive during a request go together
in the next one. An ack is therefore not yet done when `ack` returns. If the process dies in between, the task
runs again, as with every broker that delivers at least once. `close` sends the last acks.

Limits: a request has at most `JOBS_MAX` jobs. The caller decides how many jobs a consumer may hold.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from streams.brokers.connections import JOBS_MAX, consumer_name
from streams.brokers.task_messages import dead_letter_of
from streams.client._sync.client import Client
from streams.client.answers import Job
from streams.client.options import BoxSettings
from streams.protocol.errors import BoxNotFound, StreamsError

log = logging.getLogger("streams.brokers")

#: Leases are extended so often within their length: two may fail and the third still comes in time.
_EXTENSIONS_PER_LEASE = 4
#: Pause after acks that failed_acks. They are sent again until the server answers.
_RETRY_S = 1.0
#: How long `close` waits for the last acks.
_CLOSE_S = 10.0


def _chunks(jobs: list[Job]) -> Iterator[list[Job]]:
    for start in range(0, len(jobs), JOBS_MAX):
        yield jobs[start : start + JOBS_MAX]


class HeldJobs:
    def __init__(self, client: Client, *, lease_ms: int) -> None:
        self._client = client
        self._lease_ms = lease_ms
        self.node = consumer_name()
        self._condition = threading.Condition()
        #: By box and seq. Guarded by the condition, as is everything below.
        self._jobs: dict[str, dict[int, Job]] = defaultdict(dict)
        self._acks: dict[str, list[Job]] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<HeldJobs of {self.node}>"

    def claim(self, box: str, *, max: int, wait_ms: int = 0) -> list[Job]:
        """Claim jobs and keep their leases until they are acked, given back or buried."""
        jobs = self._client.queue(box).claim(
            self.node, max=min(max, JOBS_MAX), lease_ms=self._lease_ms, wait_ms=wait_ms, raw_data=True
        )
        if jobs:
            with self._condition:
                self._jobs[box].update((job.seq, job) for job in jobs)
                self._start_thread()
        return jobs

    def ack(self, box: str, job: Job) -> None:
        """The task is done. Returns at once; the ack is sent with others."""
        with self._condition:
            self._acks.setdefault(box, []).append(job)
            self._start_thread()
            self._condition.notify()

    def give_back(self, box: str, jobs: list[Job]) -> None:
        """Others may have these jobs at once."""
        self._release(box, jobs)
        for chunk in _chunks(jobs):
            try:
                self._client.queue(box).nack(self.node, chunk, delay_ms=0)
            except StreamsError as error:
                log.warning("jobs of %s could not be given back; their leases will expire: %s", box, error)

    def bury(
        self,
        box: str,
        job: Job,
        dead_letter: str,
        error: str | None = None,
        *,
        settings: BoxSettings | None = None,
    ) -> None:
        """Move a rejected job to its queue of dead letters, once: the key of the append names the job.

        The queue is created with `settings` if there is none.
        """
        queue, entry = self._client.queue(dead_letter), dead_letter_of(job, box, self.node, error)
        key = f"rejected:{job.seq}:{job.ts}:{box}"[:256]
        try:
            queue.append_batch([entry], idempotency_key=key, create=False)
        except BoxNotFound:
            queue.create(**(settings or {}))
            queue.append_batch([entry], idempotency_key=key, create=False)
        self.ack(box, job)

    def close(self) -> None:
        """Send the acks that are left and stop extending leases."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    # -- the thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="streams leases")
            self._thread.start()

    def _run(self) -> None:
        pause_s = self._lease_ms / 1000 / _EXTENSIONS_PER_LEASE
        extend_at_s = time.monotonic() + pause_s
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: bool(self._acks) or self._is_closing,
                    timeout=max(0.0, extend_at_s - time.monotonic()),
                )
                acks, self._acks = self._acks, {}
                is_closing = self._is_closing
            failed_acks = self._send_acks(acks)
            if is_closing and not failed_acks:
                return
            if time.monotonic() >= extend_at_s:
                self._extend_all()
                extend_at_s = time.monotonic() + pause_s
            if failed_acks:
                self._keep_for_later(failed_acks)
                if is_closing:
                    return
                time.sleep(min(_RETRY_S, pause_s))

    def _keep_for_later(self, acks: dict[str, list[Job]]) -> None:
        with self._condition:
            for box, jobs in acks.items():
                self._acks.setdefault(box, []).extend(jobs)

    def _send_acks(self, acks: dict[str, list[Job]]) -> dict[str, list[Job]]:
        """Return the acks that failed and are to be sent again."""
        failed_acks: dict[str, list[Job]] = {}
        for box, jobs in acks.items():
            for chunk in _chunks(jobs):
                try:
                    reply = self._client.queue(box).ack(self.node, chunk)
                except BoxNotFound:
                    pass
                except StreamsError as error:
                    log.warning("%d acks of %s failed and are sent again: %s", len(chunk), box, error)
                    failed_acks.setdefault(box, []).extend(chunk)
                    continue
                else:
                    if reply.skipped:
                        log.warning(
                            "tasks of %s were done, but their leases had expired: %s", box, reply.skipped
                        )
                self._release(box, chunk)
        return failed_acks

    def _release(self, box: str, jobs: Iterable[Job]) -> None:
        with self._condition:
            jobs_of_box = self._jobs[box]
            for job in jobs:
                current = jobs_of_box.get(job.seq)
                if current is not None and current.lease_id == job.lease_id:
                    del jobs_of_box[job.seq]

    def _extend_all(self) -> None:
        with self._condition:
            jobs_by_box = {box: list(jobs.values()) for box, jobs in self._jobs.items() if jobs}
        for box, jobs in jobs_by_box.items():
            for chunk in _chunks(jobs):
                self._extend(box, chunk)

    def _extend(self, box: str, jobs: list[Job]) -> None:
        try:
            lost_seqs = set(self._client.queue(box).extend(self.node, jobs, lease_ms=self._lease_ms).skipped)
        except BoxNotFound:
            lost_seqs = {job.seq for job in jobs}
        except StreamsError as error:
            log.warning("leases of %s could not be extended: %s", box, error)
            return
        self._release(box, [job for job in jobs if job.seq in lost_seqs])
