"""Handles the commands of a queue: claim, ack, nack, extend (v0 §8). `queue.py` has the state of the jobs.

Rules of the file
- A claim reads payloads before it stages anything: a payload that is not in memory is fetched, and the claim
  is handled again.
- Only visible jobs are delivered, so a crash cannot remove them. The reply to a claim waits only for the
  leases that the claim logs, if the box has `leases_durable`.
- An ack is a delete like any other, with its durability. A job that the worker does not hold is reported as
  skipped. That is not an error: a worker cannot know that its lease has expired.
- Without `leases_durable` the first delivery of a job is not logged. Each later one logs the number of
  deliveries (`JobsCounted`), so that `max_deliveries` survives a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.context import Context
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome
from shard.core.queues.queue import Queue
from streams.protocol.errors import NotAQueue
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import RELAY
from streams.protocol.model.records import Batch

#: Jobs that one pass delivers to all its claims: about 15 ms.
PASS_JOBS_MAX = 5_000
#: Bytes of jobs in the reply to one claim, as for a read; at least one job is always delivered.
CLAIM_BYTES_MAX = 8 * 1024 * 1024
#: Bytes of jobs for all claims of one pass: it bounds the memory of a large cohort.
PASS_BYTES_MAX = 64 * 1024 * 1024
#: Jobs in one `JobsRestated` change: about a megabyte of log.
RESTATE_JOBS_MAX = 10_000
#: Queues whose tags of one batch are kept as a list: jobs of a large batch are claimed a few at a time, and
#: splitting the tags of a thousand takes 20 µs. A few megabytes at most.
SPLIT_TAGS_MAX = 16
_NO_TAGS: tuple[int, list[bytes]] = (0, [])


class Jobs:
    """Handles the commands and applies the changes of queues."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: A lease id starts with the lsn at which this process started, so no id is assigned twice.
        self._start_lsn = 0
        self._lease_count = 0
        #: By generation of a queue: the first seq and the tags of the batch that its last claim read.
        self._split_tags: dict[int, tuple[int, list[bytes]]] = {}
        context.on_command(queues.Claim, self._claim)
        context.on_command(queues.BatchClaim, self._claim_together)
        context.on_command(queues.Ack, self._ack)
        context.on_command(queues.Nack, self._nack)
        context.on_command(queues.Extend, self._extend)
        context.on_command(queues.ReleaseHolder, self._release)
        context.on_box_change(changes.JobsLeased, self._apply_lease, validation.is_queue)
        context.on_box_change(changes.JobsExtended, self._apply_extend, _require_jobs)
        context.on_box_change(changes.JobsReturned, self._apply_return, validation.is_queue)
        context.on_box_change(changes.JobsCounted, self._apply_count, validation.is_queue)
        context.on_box_change(changes.JobsRescheduled, self._apply_reschedule, validation.is_queue)
        context.on_box_change(changes.JobsReprioritized, self._apply_reprioritize, validation.is_queue)
        context.on_box_change(changes.JobsRestated, self._apply_restate, validation.is_queue)

    # -- claiming

    def _claim(self, command: queues.Claim, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self.queue_of(command.box, now_ms, entries)
        if box.config.claim_jitter_ms and not _tells_of_pause(box, command):
            return self._context.nothing_yet(entries, now_ms + box.config.claim_jitter_ms)
        (answer,) = self._serve(box, queue, (command,), now_ms, entries)
        if _may_wait(command, answer):
            return self._with_relay_wake(box, self._context.nothing_yet(entries))
        return self._answer_claim(box, answer, entries)

    def _claim_together(self, command: queues.BatchClaim, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self.queue_of(command.box, now_ms, entries)
        answers: list[queues.ClaimResult | None] = list(
            self._serve(box, queue, command.claims, now_ms, entries)
        )
        if not command.is_over:
            for at, (claim, answer) in enumerate(zip(command.claims, answers, strict=True)):
                if answer is not None and _may_wait(claim, answer):
                    answers[at] = None
        return self._answer_claim(box, queues.BatchClaimResult(answers), entries)

    def _answer_claim(
        self, box: Box, reply: queues.ClaimResult | queues.BatchClaimResult, entries: LogEntries
    ) -> Outcome:
        waits_for = entries[-1][0] if entries and box.config.leases_durable else 0
        return self._with_relay_wake(
            box, self._context.answer(box, reply, entries, max(box.config_lsn, waits_for))
        )

    @staticmethod
    def _with_relay_wake(box: Box, outcome: Outcome) -> Outcome:
        """Wake the relay for the moves of a memory box: they are not logged, so no log report wakes it."""
        return outcome._replace(wakes=(RELAY,)) if box.is_memory and box.moves else outcome

    def _serve(
        self, box: Box, queue: Queue, claims: Sequence[queues.Claim], now_ms: int, entries: LogEntries
    ) -> list[queues.ClaimResult]:
        """Lease jobs to claims: an even share to each if the queue coalesces claims, else in their order."""
        config = box.config
        if config.paused:
            return self._serve_nothing(box, queue, claims)
        rooms = self._rooms(box, queue, claims)
        jobs_wanted = min(sum(rooms), PASS_JOBS_MAX)
        count = (
            min(jobs_wanted, queue.delivery_limit(config.rate_per_s, now_ms))
            if config.rate_per_s
            else jobs_wanted
        )
        limit = config.max_deliveries if config.dead_letter is not None else 0
        seqs, exhausted_seqs = queue.pick(box.log, count, limit)
        moves = self._plan_dead_letters(box, queue, exhausted_seqs, now_ms) if exhausted_seqs else None
        shares = (
            share_evenly(rooms, len(seqs)) if config.claim_jitter_ms else share_in_order(rooms, len(seqs))
        )
        bytes_each = min(CLAIM_BYTES_MAX, PASS_BYTES_MAX // len(claims))
        texts: list[list[tuple[int, bytes]]] = []
        at = 0
        for share in shares:
            texts.append(self._read(box, seqs[at : at + share], bytes_each))
            at += len(texts[-1])  # jobs that did not fit go to the next claim: none is skipped
        # All payloads are read. Stage the changes.
        if moves is not None:
            self._context.stage(moves, box, entries)
        jobs_of_claims = [
            self._lease(box, queue, claim, read if queue.has_lines else sorted(read), now_ms, entries)
            if read
            else []
            for claim, read in zip(claims, texts, strict=True)
        ]
        ready, _ = self.totals(box, queue)
        if config.rate_per_s:
            delivered_count = sum(map(len, jobs_of_claims))
            is_limited = ready > 0 and delivered_count == count < jobs_wanted
            queue.pay(delivered_count, config.rate_per_s, now_ms, is_limited=is_limited)
        self._context.arm_job_timer(box, queue)
        return [
            queues.ClaimResult(box.name, jobs, ready, claim.holder > 0, False, _tells_of_pause(box, claim))
            for claim, jobs in zip(claims, jobs_of_claims, strict=True)
        ]

    def _serve_nothing(
        self, box: Box, queue: Queue, claims: Sequence[queues.Claim]
    ) -> list[queues.ClaimResult]:
        ready, _ = self.totals(box, queue)
        return [
            queues.ClaimResult(box.name, [], ready, claim.holder > 0, True, _tells_of_pause(box, claim))
            for claim in claims
        ]

    def _plan_dead_letters(
        self, box: Box, queue: Queue, seqs: list[int], now_ms: int
    ) -> changes.MovesPlanned:
        assert box.config.dead_letter is not None
        jobs = [queue.jobs[seq] for seq in seqs]
        plan = self._context.moves.plan(
            box, box.config.dead_letter, seqs, [job.deliveries for job in jobs], is_dead=True
        )
        return msgspec.structs.replace(
            plan,
            errors=[job.last_error for job in jobs],
            nodes=[job.node_before for job in jobs],
            at_ms=now_ms,
        )

    @staticmethod
    def _rooms(box: Box, queue: Queue, claims: Sequence[queues.Claim]) -> list[int]:
        """Return the number of jobs that each claim may get. Claims of one connection share its limit, and
        one that reports the end of a pause gets none: its reply is that event."""
        reserved_rooms: dict[int, int] = {}
        rooms: list[int] = []
        for claim in claims:
            room = claim.max
            if _tells_of_pause(box, claim):
                room = 0
            elif claim.holder:
                room = max(0, queue.room(claim.holder, claim.max) - reserved_rooms.get(claim.holder, 0))
                reserved_rooms[claim.holder] = reserved_rooms.get(claim.holder, 0) + room
            rooms.append(room)
        return rooms

    def _lease(
        self,
        box: Box,
        queue: Queue,
        claim: queues.Claim,
        read: list[tuple[int, bytes]],
        now_ms: int,
        entries: LogEntries,
    ) -> list[tuple[int, bytes]]:
        """Lease jobs to a claim. Returns them as in the reply."""
        seqs = [seq for seq, _ in read]
        jobs = queue.jobs
        deliveries = [jobs[seq].deliveries + 1 if seq in jobs else 1 for seq in seqs]
        lease_id = self._next_lease_id()
        deadline_ms = now_ms + (claim.lease_ms or box.config.lease_ms)
        context = self._context
        if not (box.is_memory or box.config.leases_durable):
            redeliveries = [
                (seq, count, jobs[seq].node_before, jobs[seq].first_ms)
                for seq, count in zip(seqs, deliveries, strict=True)
                if count > 1
            ]
            if redeliveries:
                counts = changes.JobsCounted(box.generation, *map(list, zip(*redeliveries, strict=True)))
                context.log(counts, entries)
        histories = [jobs[seq].history if seq in jobs else b"" for seq in seqs]
        fresh_seq = max([seq for seq in seqs if seq not in jobs], default=0)
        change = changes.JobsLeased(
            box.generation,
            lease_id,
            claim.node,
            deadline_ms,
            max(queue.fresh_seq, fresh_seq),
            seqs,
            deliveries,
            claim.holder,
            now_ms,
        )
        self._stage_lease(change, box, entries)
        tail = b',"lease_id":"%b","deadline":%d,"deliveries":' % (lease_id.encode(), deadline_ms)
        return [
            (seq, b"%b%b%d%b}" % (text, tail, count, history))
            for (seq, text), count, history in zip(read, deliveries, histories, strict=True)
        ]

    def _read(self, box: Box, seqs: list[int], bytes_max: int) -> list[tuple[int, bytes]]:
        """Read the first jobs, as many as fit but at least one: the text without its last brace."""
        jobs: list[tuple[int, bytes]] = []
        log = box.log
        bytes_left = bytes_max
        batch: Batch | None = None
        for seq in seqs:
            if batch is None or not batch.first_seq <= seq <= batch.last_seq:
                span = log.span_at(seq)
                assert span is not None, "LIVE"
                batch = span.payload
            index = seq - batch.first_seq
            text = bytes(batch.text(index, index)[:-1])
            if batch.tags is not None:
                tag = self._tags_of(box, batch.first_seq, batch.tags)[index]
                if tag:
                    text += b',"$tag":%b' % msgspec.json.encode(str(tag, "utf-8"))
            if batch.job_fields is not None:
                text += batch.job_fields.texts(index)
            bytes_left -= len(text)
            if bytes_left < 0 and jobs:
                break
            jobs.append((seq, text))
        return jobs

    def _tags_of(self, box: Box, first_seq: int, tags: bytes) -> list[bytes]:
        """Return the tags of a batch. The next claim of its queue, as a rule, reads the same batch."""
        last_seq, split_tags = self._split_tags.get(box.generation, _NO_TAGS)
        if last_seq != first_seq:
            split_tags = tags.split(b"\0")
            if len(self._split_tags) >= SPLIT_TAGS_MAX:
                self._split_tags.clear()
            self._split_tags[box.generation] = first_seq, split_tags
        return split_tags

    def _next_lease_id(self) -> str:
        self._lease_count += 1
        return f"lease_{self._start_lsn:x}{self._lease_count:010x}"

    # -- settling

    def _ack(self, command: queues.Ack, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self.queue_of(command.box, now_ms, entries)
        leased_seqs, skipped_seqs = self.split_by_lease(queue, command, now_ms)
        jobs = [queue.jobs[seq] for seq in leased_seqs]
        frees_room = any(job.holder or job.key for job in jobs)
        if leased_seqs:
            seqs = BitMap64(leased_seqs)
            sizes = box.log.measure_seqs(seqs)
            self._context.stage(
                changes.RecordsDeleted(box.generation, 0, 0, seqs, sizes, now_ms), box, entries
            )
        reply = queues.AckReply(box.name, len(leased_seqs), skipped_seqs, *self.totals(box, queue))
        outcome = self._context.answer(box, reply, entries, box.floor_lsn)
        return outcome._replace(wakes=(box.name,)) if frees_room else outcome

    def _nack(self, command: queues.Nack, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self.queue_of(command.box, now_ms, entries)
        leased_seqs, skipped_seqs = self.split_by_lease(queue, command, now_ms)
        lsn = 0
        if leased_seqs:
            delays_ms = (
                [queue.backoff_ms(seq) for seq in leased_seqs]
                if command.delay_ms is None
                else [command.delay_ms] * len(leased_seqs)
            )
            times = [now_ms + delay_ms if delay_ms else 0 for delay_ms in delays_ms]
            lsn = self._return(box, queue, leased_seqs, times, now_ms, entries, command.error)
        reply = queues.NackReply(box.name, len(leased_seqs), skipped_seqs, *self.totals(box, queue))
        outcome = self._context.answer(box, reply, entries, _lsn_to_await(box, lsn, skipped_seqs))
        return outcome._replace(wakes=(box.name,)) if leased_seqs else outcome

    def _extend(self, command: queues.Extend, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self.queue_of(command.box, now_ms, entries)
        leased_seqs, skipped_seqs = self.split_by_lease(queue, command, now_ms)
        deadline_ms = now_ms + command.lease_ms
        lsn = 0
        if leased_seqs:
            lsn = self._stage_lease(
                changes.JobsExtended(box.generation, leased_seqs, deadline_ms, now_ms), box, entries
            )
            self._context.arm_timer(box)
        reply = queues.ExtendReply(
            box.name, len(leased_seqs), skipped_seqs, dict.fromkeys(map(str, leased_seqs), deadline_ms)
        )
        return self._context.answer(box, reply, entries, _lsn_to_await(box, lsn, skipped_seqs))

    def _release(self, command: queues.ReleaseHolder, now_ms: int, entries: LogEntries) -> Outcome:
        """Return the jobs of a closed connection to the queue: they are ready at once."""
        box, queue = self.queue_of(command.box, now_ms, entries)
        leased_seqs = queue.held_by(command.holder)
        if leased_seqs:
            self._return(box, queue, leased_seqs, [0] * len(leased_seqs), now_ms, entries)
        reply = queues.ReleaseHolderReply(box.name, len(leased_seqs))
        return self._context.answer(box, reply, entries, box.config_lsn)._replace(wakes=(box.name,))

    def _return(
        self,
        box: Box,
        queue: Queue,
        seqs: list[int],
        times: list[int],
        now_ms: int,
        entries: LogEntries,
        error: str = "",
    ) -> int:
        jobs = [queue.jobs[seq] for seq in seqs]
        is_same = times.count(times[0]) == len(times)
        change = changes.JobsReturned(
            box.generation,
            seqs,
            [job.deliveries for job in jobs],
            times[0] if is_same else 0,
            now_ms,
            [] if is_same else times,
            error,
            jobs[0].node,
            [job.first_ms for job in jobs],
        )
        lsn = self._context.stage(change, box, entries)
        self._context.arm_timer(box)
        return lsn

    @staticmethod
    def split_by_lease(queue: Queue, command: queues.Ack, now_ms: int) -> tuple[list[int], list[int]]:
        """Return the command's jobs that its node has leased, each once, and the others."""
        leased_seqs: dict[int, None] = {}
        skipped_seqs: list[int] = []
        lease_ids: Sequence[str | None] = [None] * len(command.seqs)
        if command.lease_ids is not None:
            lease_ids = command.lease_ids
        for seq, lease_id in zip(command.seqs, lease_ids, strict=True):
            if seq not in leased_seqs and queue.is_held(
                seq, node=command.node, lease_id=lease_id, now_ms=now_ms
            ):
                leased_seqs[seq] = None
            else:
                skipped_seqs.append(seq)
        return list(leased_seqs), skipped_seqs

    # -- helpers

    def queue_of(self, name: str, now_ms: int, entries: LogEntries) -> tuple[Box, Queue]:
        box = self._context.find_box(name, now_ms, entries)
        if box.queue is None:
            raise NotAQueue(
                f"box {name} is a log, not a queue; a queue is created with type: queue", box=name
            )
        box.queue.advance(now_ms, self._context.wall_ms(now_ms))
        return box, box.queue

    @staticmethod
    def totals(box: Box, queue: Queue) -> tuple[int, int]:
        return queue.ready(box.log.visible_totals()[0]), queue.in_flight

    def _stage_lease(
        self, change: changes.JobsLeased | changes.JobsExtended, box: Box, entries: LogEntries
    ) -> int:
        """Apply a change of leases. It is logged only if the box has `leases_durable`."""
        if box.config.leases_durable:
            return self._context.stage(change, box, entries)
        self._context.apply(change, 0)
        return 0

    # -- start and stop

    def begin(self, lsn: int) -> None:
        """Start the lease ids of this process."""
        self._start_lsn = lsn
        self._lease_count = 0

    def restate(self, box: Box, entries: LogEntries) -> None:
        """Log all entries of a queue, leases included: at a clean stop, so that the next start continues with
        them, and when `leases_durable` is switched on."""
        assert box.queue is not None
        facts = box.queue.facts(leases_kept=True)
        for at in range(0, max(1, len(facts.jobs)), RESTATE_JOBS_MAX):
            some = facts.jobs[at : at + RESTATE_JOBS_MAX]
            self._context.log(changes.JobsRestated(box.generation, facts.fresh_seq, at == 0, some), entries)

    # -- applying

    def _apply_lease(self, change: changes.JobsLeased, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_lease(change, is_logged=lsn > 0)

    def _apply_extend(self, change: changes.JobsExtended, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_extend(change)

    def _apply_return(self, change: changes.JobsReturned, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_return(change)

    def _apply_count(self, change: changes.JobsCounted, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_count(change)

    def _apply_reschedule(self, change: changes.JobsRescheduled, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_reschedule(change)

    def _apply_reprioritize(self, change: changes.JobsReprioritized, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_reprioritize(change)

    def _apply_restate(self, change: changes.JobsRestated, lsn: int) -> None:
        self._queue_to_change(change.generation, lsn).apply_restate(change)

    def _queue_to_change(self, generation: int, lsn: int) -> Queue:
        box = self._context.generations[generation]
        box.last_lsn = max(box.last_lsn, lsn)
        assert box.queue is not None, "only queues have changes of jobs"
        return box.queue


def _require_jobs(change: changes.JobsExtended, box: Box) -> None:
    validation.is_queue(change, box)
    if box.queue is not None and not all(seq in box.queue.jobs for seq in change.seqs):
        raise DoesNotApply(f"leases of box {box.name} are extended that it does not have")


def _lsn_to_await(box: Box, lsn: int, skipped_seqs: list[int]) -> int:
    """Return the lsn that a reply waits for: of its own change, or of an ack that made it skip a job."""
    return max(lsn, box.floor_lsn if skipped_seqs else box.config_lsn)


def _tells_of_pause(box: Box, claim: queues.Claim) -> bool:
    """Return True if the claim is of a `/work` stream that does not know that its queue was paused or
    resumed."""
    return claim.holder > 0 and claim.knows_paused != box.config.paused


def _may_wait(claim: queues.Claim, answer: queues.ClaimResult) -> bool:
    return claim.wait_ms > 0 and not answer.jobs and not answer.is_pause_event


def share_evenly(limits: Sequence[int], available: int) -> list[int]:
    """Divide `available` evenly. No share exceeds its limit, and the shares of equal limits differ by at most
    one."""
    shares = [0] * len(limits)
    by_limit = sorted(range(len(limits)), key=limits.__getitem__)
    for position, at in enumerate(by_limit):
        shares[at] = min(limits[at], available // (len(limits) - position))
        available -= shares[at]
    return shares


def share_in_order(limits: Sequence[int], available: int) -> list[int]:
    """Divide `available` in the order of the claims, up to the limit of each."""
    shares: list[int] = []
    for limit in limits:
        shares.append(min(limit, available))
        available -= shares[-1]
    return shares
