"""Handles the commands of operators on a queue: pause and resume, reschedule, reprioritize (v0 §21, §23)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import UNFINISHED
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.job import DELAYED, INCOMING, LEASED, MOVING, READY, SCHEDULED, Job
from shard.core.queues.jobs import Jobs
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import queues
from streams.protocol.payloads.appends import AHEAD_MS_MAX

#: Records that one page of a list of jobs examines: about 10 ms.
LIST_EXAMINE_MAX = 20_000

#: By state of an entry.
JOB_STATES: Mapping[int, queues.JobState] = {
    READY: "ready",
    INCOMING: "ready",
    LEASED: "leased",
    DELAYED: "delayed",
    SCHEDULED: "delayed",
    MOVING: "delayed",
}

#: Jobs that one command changes by tag: about 50 ms. The reply says if more match.
CHANGED_JOBS_MAX = 10_000


class QueueOperations:
    def __init__(self, context: Context, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs
        context.on_command(queues.SetPaused, self._set_paused)
        context.on_command(queues.ListJobs, self._list_jobs)
        context.on_command(queues.Reschedule, self._reschedule)
        context.on_command(queues.Reprioritize, self._reprioritize)

    def _set_paused(self, command: queues.SetPaused, now_ms: int, entries: LogEntries) -> Outcome:
        """Change `paused` in the config. All waiting claims are looked at: `/work` streams report it."""
        context = self._context
        box, _ = self._jobs.queue_of(command.box, now_ms, entries)
        if box.config.paused != command.paused:
            config = msgspec.structs.replace(box.config, paused=command.paused)
            context.log(changes.BoxConfigured(box.generation, config, 0), entries)
        wait = context.durability.wait_for_config(box.config_lsn, box.config.durability)
        reply = queues.PauseReply(box.name, command.paused)
        return reply_after(wait, entries, reply, (box.name,))

    def _list_jobs(self, command: queues.ListJobs, now_ms: int, entries: LogEntries) -> Outcome:
        """List jobs by seq. A step examines LIST_EXAMINE_MAX records; the page says where to go on."""
        box, queue = self._jobs.queue_of(command.box, now_ms, entries)
        log = box.log
        wall_ahead_ms = self._context.wall_ahead_ms
        page: list[queues.ListedJob] = []
        seq = command.after
        for examined_count, seq in enumerate(_live_seqs(log, command.after), 1):
            job = queue.jobs.get(seq)
            if (JOB_STATES[job.state] if job is not None else "ready") == command.state:
                page.append(_entry(seq, job, wall_ahead_ms))
            if len(page) >= command.limit or examined_count >= LIST_EXAMINE_MAX:
                break
        more = any(True for _ in _live_seqs(log, seq))
        reply = queues.JobPage(box.name, command.state, page, str(seq) if more else None)
        return self._context.answer(box, reply, entries, box.floor_lsn)

    # -- waiting jobs

    def _reschedule(self, command: queues.Reschedule, now_ms: int, entries: LogEntries) -> Outcome:
        wall_ms = now_ms + self._context.wall_ahead_ms
        deliver_at = command.deliver_at if command.delay_ms is None else wall_ms + command.delay_ms
        if deliver_at > wall_ms + AHEAD_MS_MAX:
            raise InvalidRequest(f"deliver_at: {deliver_at} is more than ten years ahead", field="deliver_at")
        selection = self._find(command, now_ms, entries)
        if selection is None:
            return Outcome(entries, None, needs=(UNFINISHED,))
        box, seqs, skipped_seqs, more = selection
        time = deliver_at if deliver_at > wall_ms else 0
        lsn = 0
        if seqs:
            change = changes.JobsRescheduled(box.generation, seqs, time, now_ms)
            lsn = self._context.stage(change, box, entries)
        reply = queues.RescheduleReply(box.name, len(seqs), skipped_seqs, time or wall_ms, more)
        outcome = self._context.answer(box, reply, entries, max(lsn, box.config_lsn))
        return outcome._replace(wakes=(box.name,))

    def _reprioritize(self, command: queues.Reprioritize, now_ms: int, entries: LogEntries) -> Outcome:
        selection = self._find(command, now_ms, entries)
        if selection is None:
            return Outcome(entries, None, needs=(UNFINISHED,))
        box, seqs, skipped_seqs, more = selection
        lsn = 0
        if seqs:
            change = changes.JobsReprioritized(box.generation, seqs, command.job_priority, now_ms)
            lsn = self._context.stage(change, box, entries)
        reply = queues.ReprioritizeReply(box.name, len(seqs), skipped_seqs, command.job_priority, more)
        outcome = self._context.answer(box, reply, entries, max(lsn, box.config_lsn))
        return outcome._replace(wakes=(box.name,))

    def _find(
        self, command: queues.Reschedule | queues.Reprioritize, now_ms: int, entries: LogEntries
    ) -> tuple[Box, list[int], list[int], bool] | None:
        """Find the waiting and delayed jobs of a command: the box, their seqs, the seqs that are no such
        jobs, and whether more of them match. None if the search needs another step."""
        box, queue = self._jobs.queue_of(command.box, now_ms, entries)
        log = box.log
        if command.match is None:
            seqs: list[int] = []
            skipped_seqs: list[int] = []
            for seq in dict.fromkeys(command.seqs):
                can_change = seq <= log.visible_seq and log.is_live(seq) and queue.can_change(seq)
                (seqs if can_change else skipped_seqs).append(seq)
            return box, seqs, skipped_seqs, False
        search = box.begin_deletion(command, command.match)  # the same search; nothing is deleted
        matches = search.step(box, now_ms)
        if matches is None:
            return None
        box.end_deletion()
        visible = (seq for seq in matches.seqs or () if seq <= log.visible_seq and queue.can_change(seq))
        some = list(islice(visible, CHANGED_JOBS_MAX + 1))
        return box, some[:CHANGED_JOBS_MAX], [], len(some) > CHANGED_JOBS_MAX


def _live_seqs(log: BoxLog, after: int) -> Iterator[int]:
    """The seqs of visible live records above `after`."""
    for span in log.spans(after + 1):
        if span.first_seq > log.visible_seq:
            return
        first = max(0, after + 1 - span.first_seq)
        last = min(span.count - 1, log.visible_seq - span.first_seq)
        for run_first, run_last in log.runs(span, first, last):
            yield from range(span.first_seq + run_first, span.first_seq + run_last + 1)


def _entry(seq: int, job: Job | None, wall_ahead_ms: int) -> queues.ListedJob:
    if job is None:
        return queues.ListedJob(seq, 0)
    is_leased = job.state == LEASED
    due_ts = {DELAYED: job.due_ms, SCHEDULED: job.deliver_at - wall_ahead_ms}.get(job.state)
    return queues.ListedJob(
        seq=seq,
        deliveries=job.deliveries,
        node=job.node if is_leased else "",
        lease_id=job.lease_id if is_leased else "",
        deadline=job.due_ms if is_leased else None,
        due_ts=due_ts,
        moving=job.state == MOVING,
        first_ts=job.first_ms or None,
        last_node=job.last_node if is_leased else job.node_before,
        last_error=job.last_error,
        ordering_key=job.key,
        job_priority=job.priority,
    )
