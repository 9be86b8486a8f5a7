"""The commands of a queue: claim, ack, nack, extend (v0 §8). What they rest on is in `queue.py`.

Rules of the file
- A claim reads payloads before it stages anything: a payload that is not in memory is fetched, and the claim
  is handled again.
- What is given out is visible, so it cannot vanish. A claim's answer waits only for what the claim itself
  logs: its leases, where the box says that they are durable.
- An ack is a delete like any other, with its durability. Whoever does not hold a job is told that it was
  skipped; that is not an error, for a worker whose lease has run out cannot know it.
- Without `leases_durable` the log hears nothing of a job's first delivery. From the second on it is told how
  often the job has been delivered (`JobsCounted`), so that `max_deliveries` outlives a crash.
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

#: Jobs that one pass gives out, however many claims it serves: about 15 ms.
PASS_JOBS_MAX = 5_000
#: Bytes of jobs that one claim is answered with, as for a read; at least one job is always given.
CLAIM_BYTES_MAX = 8 * 1024 * 1024
#: And all claims of one pass together, so that a large cohort does not fill the memory.
PASS_BYTES_MAX = 64 * 1024 * 1024
#: Jobs told in one change when all are told anew: about a megabyte of log.
RESTATED_MAX = 10_000


class Jobs:
    """What the machine does with commands and changes of queues."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Ids of leases are never given twice: they begin with the lsn at which this life of the shard began.
        self._life = 0
        self._leases = 0
        # The tags of the one batch that was read last: jobs of a large batch are claimed a few at a time.
        self._tags_of = (0, 0)
        self._tags: list[bytes] = []
        context.on_command(queues.Claim, self._claim)
        context.on_command(queues.BatchClaim, self._claim_together)
        context.on_command(queues.Ack, self._ack)
        context.on_command(queues.Nack, self._nack)
        context.on_command(queues.Extend, self._extend)
        context.on_command(queues.ReleaseHolder, self._release)
        context.on_box_change(changes.JobsLeased, self._apply_leased, validation.is_queue)
        context.on_box_change(changes.JobsExtended, self._apply_extended, _require_jobs)
        context.on_box_change(changes.JobsReturned, self._apply_returned, validation.is_queue)
        context.on_box_change(changes.JobsCounted, self._apply_counted, validation.is_queue)
        context.on_box_change(changes.JobsRestated, self._apply_restated, validation.is_queue)

    # -- claiming

    def _claim(self, command: queues.Claim, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self._queue_of(command.box, now_ms, entries)
        if box.config.claim_jitter_ms:
            return self._context.nothing_yet(entries, now_ms + box.config.claim_jitter_ms)
        (answer,) = self._serve(box, queue, (command,), now_ms, entries)
        if not answer.jobs and command.wait_ms:
            return self._with_carrier(box, self._context.nothing_yet(entries))
        return self._answer_claim(box, answer, entries)

    def _claim_together(self, command: queues.BatchClaim, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self._queue_of(command.box, now_ms, entries)
        answers: list[queues.ClaimResult | None] = list(
            self._serve(box, queue, command.claims, now_ms, entries)
        )
        if not command.is_over:
            for at, (claim, answer) in enumerate(zip(command.claims, answers, strict=True)):
                if answer is not None and not answer.jobs and claim.wait_ms:
                    answers[at] = None
        return self._answer_claim(box, queues.BatchClaimResult(answers), entries)

    def _answer_claim(
        self, box: Box, reply: queues.ClaimResult | queues.BatchClaimResult, entries: LogEntries
    ) -> Outcome:
        waits_for = entries[-1][0] if entries and box.config.leases_durable else 0
        return self._with_carrier(
            box, self._context.answer(box, reply, entries, max(box.config_lsn, waits_for))
        )

    @staticmethod
    def _with_carrier(box: Box, outcome: Outcome) -> Outcome:
        """Of what a box in memory sends away nothing is logged, so no report would wake the carrier."""
        return outcome._replace(wakes=(RELAY,)) if box.is_memory and box.moves else outcome

    def _serve(
        self, box: Box, queue: Queue, claims: Sequence[queues.Claim], now_ms: int, entries: LogEntries
    ) -> list[queues.ClaimResult]:
        """Gives jobs to claims: an even share to each where the queue coalesces, else to the first first."""
        config = box.config
        rooms = self._rooms(queue, claims)
        limit = config.max_deliveries if config.dead_letter is not None else 0
        picked, exhausted = queue.pick(box.log, min(sum(rooms), PASS_JOBS_MAX), limit)
        moves = self._plan_dead_letters(box, queue, exhausted) if exhausted else None
        shares = divided(rooms, len(picked)) if config.claim_jitter_ms else in_turn(rooms, len(picked))
        bytes_each = min(CLAIM_BYTES_MAX, PASS_BYTES_MAX // len(claims))
        texts: list[list[tuple[int, bytes]]] = []
        at = 0
        for share in shares:
            texts.append(self._read(box, picked[at : at + share], bytes_each))
            at += len(texts[-1])  # what did not fit goes to the next: no job is passed over
        # From here on the payloads are read, and things are staged.
        if moves is not None:
            self._context.stage(moves, box, entries)
        given = [
            self._lease(box, queue, claim, sorted(read), now_ms, entries) if read else []
            for claim, read in zip(claims, texts, strict=True)
        ]
        self._context.arm_timer(box)
        ready, _ = self._totals(box, queue)
        return [
            queues.ClaimResult(box.name, jobs, ready, claim.holder > 0)
            for claim, jobs in zip(claims, given, strict=True)
        ]

    def _plan_dead_letters(self, box: Box, queue: Queue, seqs: list[int]) -> changes.MovesPlanned:
        assert box.config.dead_letter is not None
        deliveries = [queue.jobs[seq].deliveries for seq in seqs]
        return self._context.moves.plan(box, box.config.dead_letter, seqs, deliveries, is_dead=True)

    @staticmethod
    def _rooms(queue: Queue, claims: Sequence[queues.Claim]) -> list[int]:
        """How many jobs each claim may get. A connection is not counted twice."""
        given: dict[int, int] = {}
        rooms: list[int] = []
        for claim in claims:
            room = claim.max
            if claim.holder:
                room = max(0, queue.room(claim.holder, claim.max) - given.get(claim.holder, 0))
                given[claim.holder] = given.get(claim.holder, 0) + room
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
        """Leases jobs to a claim. Returns them as the claim is answered."""
        seqs = [seq for seq, _ in read]
        jobs = queue.jobs
        deliveries = [jobs[seq].deliveries + 1 if seq in jobs else 1 for seq in seqs]
        lease_id = self._next_lease_id()
        deadline_ms = now_ms + (claim.lease_ms or box.config.lease_ms)
        context = self._context
        if not (box.is_memory or box.config.leases_durable):
            again = [(seq, count) for seq, count in zip(seqs, deliveries, strict=True) if count > 1]
            if again:
                counted = changes.JobsCounted(box.generation, *map(list, zip(*again, strict=True)))
                context.log(counted, entries)
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
            (seq, b"%b%b%d}" % (text, tail, count))
            for (seq, text), count in zip(read, deliveries, strict=True)
        ]

    def _read(self, box: Box, seqs: list[int], bytes_max: int) -> list[tuple[int, bytes]]:
        """The first of these jobs, as many as fit but at least one: their text without its last brace."""
        found: list[tuple[int, bytes]] = []
        log = box.log
        left = bytes_max
        batch: Batch | None = None
        for seq in seqs:
            if batch is None or not batch.first_seq <= seq <= batch.last_seq:
                span = log.span_at(seq)
                assert span is not None, "LIVE"
                batch = span.payload
            index = seq - batch.first_seq
            text = bytes(batch.text(index, index)[:-1])
            if batch.tags is not None:
                if self._tags_of != (box.generation, batch.first_seq):
                    self._tags_of = (box.generation, batch.first_seq)
                    self._tags = batch.tags.split(b"\0")
                tag = self._tags[index]
                if tag:
                    text += b',"$tag":%b' % msgspec.json.encode(str(tag, "utf-8"))
            left -= len(text)
            if left < 0 and found:
                break
            found.append((seq, text))
        return found

    def _next_lease_id(self) -> str:
        self._leases += 1
        return f"lease_{self._life:x}{self._leases:010x}"

    # -- settling

    def _ack(self, command: queues.Ack, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self._queue_of(command.box, now_ms, entries)
        held, skipped = self._held(queue, command, now_ms)
        frees_room = any(queue.jobs[seq].holder for seq in held)
        if held:
            seqs = BitMap64(held)
            sizes = box.log.measure_seqs(seqs)
            self._context.stage(
                changes.RecordsDeleted(box.generation, 0, 0, seqs, sizes, now_ms), box, entries
            )
        reply = queues.AckReply(box.name, len(held), skipped, *self._totals(box, queue))
        outcome = self._context.answer(box, reply, entries, box.floor_lsn)
        return outcome._replace(wakes=(box.name,)) if frees_room else outcome

    def _nack(self, command: queues.Nack, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self._queue_of(command.box, now_ms, entries)
        held, skipped = self._held(queue, command, now_ms)
        lsn = 0
        if held:
            ready_ms = now_ms + command.delay_ms if command.delay_ms else 0
            lsn = self._return(box, queue, held, ready_ms, now_ms, entries)
        reply = queues.NackReply(box.name, len(held), skipped, *self._totals(box, queue))
        outcome = self._context.answer(box, reply, entries, _rests_on(box, lsn, skipped))
        return outcome._replace(wakes=(box.name,)) if held else outcome

    def _extend(self, command: queues.Extend, now_ms: int, entries: LogEntries) -> Outcome:
        box, queue = self._queue_of(command.box, now_ms, entries)
        held, skipped = self._held(queue, command, now_ms)
        deadline_ms = now_ms + command.lease_ms
        lsn = 0
        if held:
            lsn = self._stage_lease(
                changes.JobsExtended(box.generation, held, deadline_ms, now_ms), box, entries
            )
            self._context.arm_timer(box)
        reply = queues.ExtendReply(box.name, len(held), skipped, dict.fromkeys(map(str, held), deadline_ms))
        return self._context.answer(box, reply, entries, _rests_on(box, lsn, skipped))

    def _release(self, command: queues.ReleaseHolder, now_ms: int, entries: LogEntries) -> Outcome:
        """A connection is gone: what it held can be claimed at once."""
        box, queue = self._queue_of(command.box, now_ms, entries)
        held = queue.held_by(command.holder)
        if held:
            self._return(box, queue, held, 0, now_ms, entries)
        reply = queues.ReleaseHolderReply(box.name, len(held))
        return self._context.answer(box, reply, entries, box.config_lsn)._replace(wakes=(box.name,))

    def _return(
        self, box: Box, queue: Queue, seqs: list[int], ready_ms: int, now_ms: int, entries: LogEntries
    ) -> int:
        deliveries = [queue.jobs[seq].deliveries for seq in seqs]
        returned = changes.JobsReturned(box.generation, seqs, deliveries, ready_ms, now_ms)
        lsn = self._context.stage(returned, box, entries)
        self._context.arm_timer(box)
        return lsn

    @staticmethod
    def _held(queue: Queue, command: queues.Ack, now_ms: int) -> tuple[list[int], list[int]]:
        """Which of the command's jobs its node holds, each once, and which it does not."""
        held: dict[int, None] = {}
        skipped: list[int] = []
        lease_ids: Sequence[str | None] = [None] * len(command.seqs)
        if command.lease_ids is not None:
            lease_ids = command.lease_ids
        for seq, lease_id in zip(command.seqs, lease_ids, strict=True):
            if seq not in held and queue.is_held(seq, node=command.node, lease_id=lease_id, now_ms=now_ms):
                held[seq] = None
            else:
                skipped.append(seq)
        return list(held), skipped

    # -- helpers

    def _queue_of(self, name: str, now_ms: int, entries: LogEntries) -> tuple[Box, Queue]:
        box = self._context.find_box(name, now_ms, entries)
        if box.queue is None:
            raise NotAQueue(f"box {name} is a log; only a box made with type queue has jobs", box=name)
        box.queue.advance(now_ms)
        return box, box.queue

    @staticmethod
    def _totals(box: Box, queue: Queue) -> tuple[int, int]:
        return queue.ready(box.log.visible_totals()[0]), queue.in_flight

    def _stage_lease(
        self, change: changes.JobsLeased | changes.JobsExtended, box: Box, entries: LogEntries
    ) -> int:
        """Leases are logged only where the box says so."""
        if box.config.leases_durable:
            return self._context.stage(change, box, entries)
        self._context.apply(change, 0)
        return 0

    # -- lives

    def begin(self, lsn: int) -> None:
        self._life = lsn
        self._leases = 0

    def restate(self, box: Box, entries: LogEntries) -> None:
        """Logs all that is known of a queue's jobs, leases included: at an orderly end, so that the next life
        goes on with them, and when leases begin to be logged."""
        assert box.queue is not None
        facts = box.queue.facts(leases_kept=True)
        for at in range(0, max(1, len(facts.jobs)), RESTATED_MAX):
            some = facts.jobs[at : at + RESTATED_MAX]
            self._context.log(changes.JobsRestated(box.generation, facts.fresh_seq, at == 0, some), entries)

    # -- applying

    def _apply_leased(self, change: changes.JobsLeased, lsn: int) -> None:
        self._touched(change.generation, lsn).leased(change, is_logged=lsn > 0)

    def _apply_extended(self, change: changes.JobsExtended, lsn: int) -> None:
        self._touched(change.generation, lsn).extended(change)

    def _apply_returned(self, change: changes.JobsReturned, lsn: int) -> None:
        self._touched(change.generation, lsn).returned(change)

    def _apply_counted(self, change: changes.JobsCounted, lsn: int) -> None:
        self._touched(change.generation, lsn).counted(change)

    def _apply_restated(self, change: changes.JobsRestated, lsn: int) -> None:
        self._touched(change.generation, lsn).restated(change)

    def _touched(self, generation: int, lsn: int) -> Queue:
        box = self._context.generations[generation]
        box.last_lsn = max(box.last_lsn, lsn)
        assert box.queue is not None, "changes of jobs are of queues"
        return box.queue


def _require_jobs(change: changes.JobsExtended, box: Box) -> None:
    validation.is_queue(change, box)
    if box.queue is not None and not all(seq in box.queue.jobs for seq in change.seqs):
        raise DoesNotApply(f"leases of box {box.name} are extended that it does not have")


def _rests_on(box: Box, lsn: int, skipped: list[int]) -> int:
    """What an answer waits for: what it has logged, and the ack, perhaps, because of which it skips a job."""
    return max(lsn, box.floor_lsn if skipped else box.config_lsn)


def divided(wanted: Sequence[int], available: int) -> list[int]:
    """`available` shared out evenly: nobody gets more than wanted, and nobody gets two more than another who
    wanted as much."""
    shares = [0] * len(wanted)
    by_want = sorted(range(len(wanted)), key=wanted.__getitem__)
    for position, at in enumerate(by_want):
        shares[at] = min(wanted[at], available // (len(wanted) - position))
        available -= shares[at]
    return shares


def in_turn(wanted: Sequence[int], available: int) -> list[int]:
    """`available` handed out in the order of the claims, as many as each wants."""
    shares: list[int] = []
    for want in wanted:
        shares.append(min(want, available))
        available -= shares[-1]
    return shares
