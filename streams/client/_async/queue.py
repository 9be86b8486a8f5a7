"""A queue: a box whose records are jobs, taken under leases (v0 §8)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import msgspec

from streams.client import answers
from streams.client._async.box import AsyncBox
from streams.client.answers import Entry, Job, encode_entries
from streams.client.job_times import epoch_ms_of, millis_of
from streams.client.options import BoxSettings
from streams.client.retry import Retry
from streams.protocol.messages import replies

if TYPE_CHECKING:
    from streams.client._async.worker import AsyncWorker
    from streams.client.working import AsyncHandler


class AsyncQueue(AsyncBox):
    """Everything of a box, and jobs. `create(max_deliveries=5, dead_letter="jobs.dead")` makes one."""

    async def create(self, **config: Unpack[BoxSettings]) -> replies.PutBoxReply:
        """Create the queue, or change the settings that are given. The settings are those of
        [`BoxSettings`](#boxsettings)."""
        config.setdefault("type", "queue")
        return await super().create(**config)

    async def claim(
        self,
        node: str | None = None,
        *,
        max: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        retry: Retry | None = None,
        raw_data: bool = False,
    ) -> list[Job]:
        """Up to `max` jobs, which are this node's until their deadline; waits up to `wait_ms` for the
        first. With `raw_data` their data is a `msgspec.Raw`, the JSON text as it was appended. `node` is that
        of the queue or of the client, unless it is given here."""
        body: dict[str, Any] = {"node": node or self._holder, "max": max, "wait_ms": wait_ms}
        if lease_ms is not None:
            body["lease_ms"] = lease_ms
        path = f"{self.path}/claim"
        if raw_data:
            raw = await self.client.call("POST", path, answers.RawClaimReply, body, retry=retry)
            return list[Job](raw.claimed)
        return (await self.client.call("POST", path, replies.ClaimReply, body, retry=retry)).claimed

    @overload
    async def ack(
        self,
        jobs: Sequence[Job],
        /,
        *,
        outputs: Mapping[str, Iterable[Entry | Any]] | None = None,
        idempotency_key: str | None = None,
    ) -> replies.AckReply: ...

    @overload
    async def ack(
        self,
        node: str,
        jobs: Sequence[Job],
        *,
        outputs: Mapping[str, Iterable[Entry | Any]] | None = None,
        idempotency_key: str | None = None,
    ) -> replies.AckReply: ...

    async def ack(
        self,
        node: str | Sequence[Job] = "",
        jobs: Sequence[Job] | None = None,
        *,
        outputs: Mapping[str, Iterable[Entry | Any]] | None = None,
        idempotency_key: str | None = None,
    ) -> replies.AckReply:
        """These jobs are done, and gone: `ack(jobs)`, or `ack(node, jobs)` for jobs of another node than the
        queue's. After an answer that was lost, a job that the first attempt has acked is among the skipped.
        Without jobs and outputs nothing is sent, and all counts are zero.

        `outputs` are entries by box. Then all jobs are acked or none (`LeaseLost`), and each entry appears in
        its box exactly once. A repeat has the same key, the caller's own or one that is made up."""
        body = self._settlement(node, jobs)
        if outputs is not None:
            body["outputs"] = {
                box: {"records": [msgspec.Raw(entry) for entry in encode_entries(entries, self.node)]}
                for box, entries in outputs.items()
            }
            body["idempotency_key"] = idempotency_key or uuid.uuid4().hex
        elif not body["seqs"]:
            return replies.AckReply(self.name, 0, [], 0, 0)
        return await self.client.call("POST", f"{self.path}/ack", replies.AckReply, body)

    @overload
    async def nack(
        self, jobs: Sequence[Job], /, *, delay_ms: int | None = None, error: str | None = None
    ) -> replies.NackReply: ...

    @overload
    async def nack(
        self, node: str, jobs: Sequence[Job], *, delay_ms: int | None = None, error: str | None = None
    ) -> replies.NackReply: ...

    async def nack(
        self,
        node: str | Sequence[Job] = "",
        jobs: Sequence[Job] | None = None,
        *,
        delay_ms: int | None = None,
        error: str | None = None,
    ) -> replies.NackReply:
        """These jobs are for others, after the delay; without one, after the queue's `retry_backoff`. The
        next worker, and the dead letter, see the `error`. Arguments are those of `ack`."""
        fields = {"delay_ms": delay_ms, "error": error}
        body = self._settlement(node, jobs)
        if not body["seqs"]:
            return replies.NackReply(self.name, 0, [], 0, 0)
        body |= {name: value for name, value in fields.items() if value is not None}
        return await self.client.call("POST", f"{self.path}/nack", replies.NackReply, body)

    @overload
    async def extend(self, jobs: Sequence[Job], /, *, lease_ms: int) -> replies.ExtendReply: ...

    @overload
    async def extend(self, node: str, jobs: Sequence[Job], *, lease_ms: int) -> replies.ExtendReply: ...

    async def extend(
        self, node: str | Sequence[Job] = "", jobs: Sequence[Job] | None = None, *, lease_ms: int
    ) -> replies.ExtendReply:
        """These jobs stay this node's for so long from now. Arguments are those of `ack`."""
        body = self._settlement(node, jobs)
        if not body["seqs"]:
            return replies.ExtendReply(self.name, 0, [], {})
        body["lease_ms"] = lease_ms
        return await self.client.call("POST", f"{self.path}/extend", replies.ExtendReply, body)

    @property
    def _holder(self) -> str:
        """The node under which jobs are claimed unless a call names another."""
        return self.node or self.client.worker_node

    def _settlement(self, node: str | Sequence[Job], jobs: Sequence[Job] | None) -> dict[str, Any]:
        holder = node if isinstance(node, str) else ""
        all_jobs = (jobs or ()) if isinstance(node, str) else node
        return {
            "node": holder or self._holder,
            "seqs": [job.seq for job in all_jobs],
            "lease_ids": [job.lease_id for job in all_jobs],
        }

    async def reschedule(
        self,
        seqs: Sequence[int] | None = None,
        *,
        match: str | list[str] | None = None,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
    ) -> replies.RescheduleReply:
        """Give waiting and delayed jobs another time: those of `seqs`, or those whose tag matches.
        `delay` and `deliver_at` are as for `append`."""
        fields = {
            "seqs": seqs,
            "match": match,
            "delay_ms": millis_of(delay),
            "deliver_at": epoch_ms_of(deliver_at),
        }
        body = {name: value for name, value in fields.items() if value is not None}
        return await self.client.call("POST", f"{self.path}/reschedule", replies.RescheduleReply, body)

    async def reprioritize(
        self,
        seqs: Sequence[int] | None = None,
        *,
        match: str | list[str] | None = None,
        job_priority: int,
    ) -> replies.ReprioritizeReply:
        """Give waiting and delayed jobs another priority, 0 to 9: those of `seqs`, or those whose tag
        matches."""
        fields = {"seqs": seqs, "match": match, "job_priority": job_priority}
        body = {name: value for name, value in fields.items() if value is not None}
        return await self.client.call("POST", f"{self.path}/reprioritize", replies.ReprioritizeReply, body)

    async def pause(self) -> None:
        """Give no jobs to claims until `resume`. Jobs that are leased can be finished."""
        await self.client.call("POST", f"{self.path}/pause", replies.PauseReply)

    async def resume(self) -> None:
        """End a pause. Waiting claims get their jobs at once."""
        await self.client.call("POST", f"{self.path}/resume", replies.PauseReply)

    async def jobs(
        self, state: Literal["leased", "delayed", "ready"] = "leased"
    ) -> AsyncIterator[replies.ListedJob]:
        """The jobs in one state, by seq, with the node and deadline of a lease, or the due time."""
        cursor: str | None = "0"
        while cursor is not None:
            params = {"state": state, "page_size": 1000, "cursor": cursor}
            page = await self.client.get(f"{self.path}/leases", replies.JobPage, params)
            for job in page.jobs:
                yield job
            cursor = page.next_cursor

    async def requeue(
        self,
        dead_letters: str,
        *,
        max: int = 100,
        seqs: Sequence[int] | None = None,
        match: str | list[str] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Moves jobs back that died here: the oldest, or those with these seqs of the dead letter box, or
        with this tag. Returns the number; `dry_run` only counts."""
        fields = {"seqs": seqs, "match": match, "dry_run": dry_run or None}
        more = {name: value for name, value in fields.items() if value is not None}
        body = {"from": dead_letters, "max": max, **more}
        path = f"{self.path}/requeue"
        answer = await self.client.call("POST", path, replies.RequeueReply, body, is_repeatable=False)
        return answer.requeued

    def worker(
        self,
        handler: AsyncHandler,
        *,
        node: str | None = None,
        concurrency: int = 1,
        lease_ms: int | None = None,
        raw_data: bool = False,
    ) -> AsyncWorker:
        """Calls `handler(job)` for each job, `concurrency` at once: `await worker.run()`. `raw_data` as for
        `claim`."""
        from streams.client._async.worker import AsyncWorker

        return AsyncWorker(
            self, handler, node=node, concurrency=concurrency, lease_ms=lease_ms, raw_data=raw_data
        )
