# Written by `make twin` from ../_async/queue.py. Do not edit.
"""A queue: a box whose records are jobs, taken under leases (v0 §8)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from streams.client import answers
from streams.client._sync.box import Box
from streams.client.answers import Entry, Job, encode_entries
from streams.client.job_times import epoch_ms_of, millis_of
from streams.client.options import BoxSettings
from streams.client.retry import Retry
from streams.protocol.messages import replies

if TYPE_CHECKING:
    from streams.client._sync.worker import Worker
    from streams.client.working import Handler

T = TypeVar("T")


class Queue(Box):
    """Everything of a box, and jobs. `create(max_deliveries=5, dead_letter="jobs.dead")` makes one."""

    def create(self, **config: Unpack[BoxSettings]) -> replies.PutBoxReply:
        config.setdefault("type", "queue")
        return super().create(**config)

    def claim(
        self,
        node: str,
        *,
        max: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        retry: Retry | None = None,
        raw_data: bool = False,
    ) -> list[Job]:
        """Up to `max` jobs, which are this node's until their deadline; waits up to `wait_ms` for the
        first. With `raw_data` their data is a `msgspec.Raw`, the JSON text as it was appended."""
        body: dict[str, Any] = {"node": node, "max": max, "wait_ms": wait_ms}
        if lease_ms is not None:
            body["lease_ms"] = lease_ms
        path = f"{self.path}/claim"
        if raw_data:
            raw = self.client.call("POST", path, answers.RawClaimReply, body, retry=retry)
            return list[Job](raw.claimed)
        return (self.client.call("POST", path, replies.ClaimReply, body, retry=retry)).claimed

    def ack(
        self,
        node: str,
        jobs: Sequence[Job],
        *,
        outputs: Mapping[str, Iterable[Entry | Any]] | None = None,
        idempotency_key: str | None = None,
    ) -> replies.AckReply:
        """These jobs are done, and gone. After an answer that was lost, a job that the first attempt has
        acked is among the skipped.

        `outputs` are entries by box. Then all jobs are acked or none (`LeaseLost`), and each entry appears in
        its box exactly once. A repeat has the same key, the caller's own or one that is made up."""
        if outputs is None:
            return self._settle("ack", replies.AckReply, node, jobs)
        records = {
            box: {"records": [msgspec.Raw(entry) for entry in encode_entries(entries)]}
            for box, entries in outputs.items()
        }
        key = idempotency_key or uuid.uuid4().hex
        return self._settle("ack", replies.AckReply, node, jobs, outputs=records, idempotency_key=key)

    def nack(
        self, node: str, jobs: Sequence[Job], *, delay_ms: int | None = None, error: str | None = None
    ) -> replies.NackReply:
        """These jobs are for others, after the delay; without one, after the queue's `retry_backoff`. The
        next worker, and the dead letter, see the `error`."""
        fields = {"delay_ms": delay_ms, "error": error}
        more = {name: value for name, value in fields.items() if value is not None}
        return self._settle("nack", replies.NackReply, node, jobs, **more)

    def extend(self, node: str, jobs: Sequence[Job], *, lease_ms: int) -> replies.ExtendReply:
        """These jobs stay this node's for so long from now."""
        return self._settle("extend", replies.ExtendReply, node, jobs, lease_ms=lease_ms)

    def _settle(self, action: str, kind: type[T], node: str, jobs: Sequence[Job], **more: Any) -> T:
        body = {"node": node, "seqs": [job.seq for job in jobs], "lease_ids": [job.lease_id for job in jobs]}
        return self.client.call("POST", f"{self.path}/{action}", kind, {**body, **more})

    def reschedule(
        self,
        seqs: Sequence[int] | None = None,
        *,
        match: str | list[str] | None = None,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
    ) -> replies.RescheduleReply:
        """Gives waiting and delayed jobs another time. `delay` and `deliver_at` as for `append`."""
        fields = {
            "seqs": seqs,
            "match": match,
            "delay_ms": millis_of(delay),
            "deliver_at": epoch_ms_of(deliver_at),
        }
        body = {name: value for name, value in fields.items() if value is not None}
        return self.client.call("POST", f"{self.path}/reschedule", replies.RescheduleReply, body)

    def reprioritize(
        self,
        seqs: Sequence[int] | None = None,
        *,
        match: str | list[str] | None = None,
        job_priority: int,
    ) -> replies.ReprioritizeReply:
        """Gives waiting and delayed jobs another priority, 0 to 9."""
        fields = {"seqs": seqs, "match": match, "job_priority": job_priority}
        body = {name: value for name, value in fields.items() if value is not None}
        return self.client.call("POST", f"{self.path}/reprioritize", replies.ReprioritizeReply, body)

    def pause(self) -> None:
        """Claims get no jobs until `resume`. Jobs that are leased can be finished."""
        self.client.call("POST", f"{self.path}/pause", replies.PauseReply)

    def resume(self) -> None:
        """Ends a pause; waiting claims get their jobs."""
        self.client.call("POST", f"{self.path}/resume", replies.PauseReply)

    def requeue(self, dead_letters: str, *, max: int = 100) -> int:
        """Moves jobs back that died here; how many."""
        body = {"from": dead_letters, "max": max}
        path = f"{self.path}/requeue"
        answer = self.client.call("POST", path, replies.RequeueReply, body, is_repeatable=False)
        return answer.requeued

    def worker(
        self,
        handler: Handler,
        *,
        node: str | None = None,
        concurrency: int = 1,
        lease_ms: int | None = None,
        raw_data: bool = False,
    ) -> Worker:
        """Calls `handler(job)` for each job, `concurrency` at once: `worker.run()`. `raw_data` as for
        `claim`."""
        from streams.client._sync.worker import Worker

        return Worker(self, handler, node=node, concurrency=concurrency, lease_ms=lease_ms, raw_data=raw_data)
