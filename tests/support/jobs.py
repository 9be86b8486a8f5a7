"""A driver of queues, and what a queue promises, said as plainly as possible.

`QueueDriver` speaks to a real machine. `ModelQueue` is written from v0 §8, not from the code: every job
is a dict, every question a loop over all of them.
"""

from __future__ import annotations

import json
from typing import Any

from streams.protocol.messages import queues
from tests.support.machines import Driver, columns


class QueueDriver(Driver):
    """Commands of workers. Everything is durable before an answer is looked at."""

    def claim(self, node: str = "w", max: int = 1, *, box: str = "b", **options: Any) -> list[dict[str, Any]]:
        return self.claimed(self.ask(queues.Claim(box=box, node=node, max=max, **options)))

    @staticmethod
    def claimed(reply: queues.ClaimResult) -> list[dict[str, Any]]:
        return [json.loads(job) for _, job in reply.jobs]

    def claim_together(
        self, *claims: queues.Claim, box: str = "b", is_over: bool = False
    ) -> list[list[dict[str, Any]] | None]:
        reply = self.ask(queues.BatchClaim(box=box, claims=claims, is_over=is_over))
        return [None if answer is None else self.claimed(answer) for answer in reply.answers]

    def ack(self, *seqs: int, node: str = "w", box: str = "b", **options: Any) -> Any:
        return self.ask(queues.Ack(box=box, node=node, seqs=list(seqs), **options))

    def ack_with_outputs(
        self, *seqs: int, key: str = "k", node: str = "w", box: str = "b", **outputs: Any
    ) -> Any:
        """`outputs` by box: a list of records."""
        return self.ask(self.outputs_of(*seqs, key=key, node=node, box=box, **outputs))

    @staticmethod
    def outputs_of(
        *seqs: int, key: str = "k", node: str = "w", box: str = "b", **outputs: Any
    ) -> queues.AckWithOutputs:
        return queues.AckWithOutputs(
            box=box,
            node=node,
            seqs=list(seqs),
            idempotency_key=key,
            outputs=tuple((dest, columns(*records)) for dest, records in outputs.items()),
        )

    def nack(self, *seqs: int, node: str = "w", box: str = "b", **options: Any) -> Any:
        return self.ask(queues.Nack(box=box, node=node, seqs=list(seqs), **options))

    def extend(self, *seqs: int, lease_ms: int, node: str = "w", box: str = "b", **options: Any) -> Any:
        return self.ask(queues.Extend(box=box, node=node, seqs=list(seqs), lease_ms=lease_ms, **options))

    def totals(self, box: str = "b") -> tuple[int, int, int]:
        """ready, in_flight, delayed; they always make up the count."""
        state = self.state(box)
        assert state.queue is not None
        found = state.queue.ready, state.queue.in_flight, state.queue.delayed
        assert sum(found) == state.count
        return found

    def after_kill(self) -> QueueDriver:
        """The next life, when the process was killed."""
        return self._next_life("this-boot")

    def after_restart(self) -> QueueDriver:
        """The next life, when the last one ended in order."""
        self.stop()
        return self._next_life("this-boot")

    def _next_life(self, boot_id: str) -> QueueDriver:
        survivor = self.reborn()
        other = QueueDriver(survivor.machine, self.now_ms)
        other.log = survivor.log
        other.start(boot_id)
        return other


class ModelQueue:
    """Jobs by seq. A job that is gone is not in there."""

    def __init__(self, *, leases_durable: bool) -> None:
        self.leases_durable = leases_durable
        self.jobs: dict[int, dict[str, Any]] = {}

    def add(self, seqs: range) -> None:
        for seq in seqs:
            self.jobs[seq] = {"seq": seq, "deliveries": 0, "kept": 0, "lease": None, "ready_ms": 0}

    def state(self, job: dict[str, Any], now_ms: int) -> str:
        if job["lease"] is not None:
            return "in_flight" if job["lease"]["deadline"] > now_ms else "ready"
        return "delayed" if job["ready_ms"] > now_ms else "ready"

    def totals(self, now_ms: int) -> tuple[int, int, int]:
        states = [self.state(job, now_ms) for job in self.jobs.values()]
        return states.count("ready"), states.count("in_flight"), states.count("delayed")

    def held_by(self, holder: int, now_ms: int) -> list[int]:
        return [
            job["seq"]
            for job in self.jobs.values()
            if self.state(job, now_ms) == "in_flight" and job["lease"]["holder"] == holder
        ]

    def claimable(self, now_ms: int) -> list[int]:
        """In the order in which they are given out: those that came back before those nobody ever had."""
        ready = [job for job in self.jobs.values() if self.state(job, now_ms) == "ready"]
        return [job["seq"] for job in sorted(ready, key=lambda job: (job["deliveries"] == 0, job["seq"]))]

    def lease(self, seqs: list[int], node: str, lease_id: str, deadline: int, holder: int = 0) -> None:
        for seq in seqs:
            job = self.jobs[seq]
            job["deliveries"] += 1
            job["lease"] = {"node": node, "id": lease_id, "deadline": deadline, "holder": holder}
            if self.leases_durable or job["deliveries"] > 1:
                job["kept"] = job["deliveries"]
                job["ready_ms"] = 0

    def holds(self, seq: int, node: str, lease_id: str | None, now_ms: int) -> bool:
        job = self.jobs.get(seq)
        return (
            job is not None
            and self.state(job, now_ms) == "in_flight"
            and job["lease"]["node"] == node
            and lease_id in (None, job["lease"]["id"])
        )

    def give_back(self, seqs: list[int], ready_ms: int) -> None:
        for seq in seqs:
            job = self.jobs[seq]
            job["lease"], job["ready_ms"], job["kept"] = None, ready_ms, job["deliveries"]

    def kill(self) -> None:
        """What a crash leaves of it."""
        for job in self.jobs.values():
            if self.leases_durable:
                if job["lease"] is not None and job["lease"]["holder"]:
                    self.give_back([job["seq"]], 0)
            else:
                job["deliveries"] = job["kept"]
                if job["lease"] is not None:
                    job["lease"], job["ready_ms"] = None, 0

    def restart(self) -> None:
        """What an orderly end leaves of it: everything but what connections held."""
        for job in self.jobs.values():
            job["kept"] = job["deliveries"]
            if job["lease"] is not None and job["lease"]["holder"]:
                self.give_back([job["seq"]], 0)
