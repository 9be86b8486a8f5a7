"""Handles commits of transactions.

    commit   ─► BoxCreated … SeqsReserved … TxnCommitted         answered when it is durable, or stored
                ▲ every check runs before the first of these
    then     ─► BatchKept for each batch that is rendered, TxnRendered

Rules of the file
- A commit is planned in full before its first change is logged: if one box refuses, or rows have to be loaded
  first, nothing has changed.
- All disk and fsync boxes of a commit show it together, when it is durable: a reader never sees a part of it
  that a crash could undo. Object boxes show it when it is in the store; the answer waits for that. Rows of
  memory boxes are in no log and are shown at once.
- A commit loads only the rows of memory boxes and object boxes. All others are rendered afterwards, in steps
  (`commits.py`); those of a small commit at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import UNFINISHED, NotLoaded, TagsNotLoaded
from shard.core.context import Context, placeholder
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions import permissions
from shard.core.transactions.chunks import Chunk, ChunksNotLoaded, ClientTimes, Piece
from shard.core.transactions.commits import Commit, Start, Step, Target, render_step
from shard.core.transactions.epochs import Epoch
from shard.core.transactions.state import Mark, Txns
from shard.core.transactions.writers import Writers, mark_of, may_create
from streams.protocol.errors import (
    BatchTooLarge,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    NotFound,
    StreamsError,
    Throttled,
)
from streams.protocol.messages import bulk, forwards
from streams.protocol.model.names import quote
from streams.protocol.model.records import Batch

#: Fixed bytes of each record, without the digits of its seq and time.
_RECORD_BYTES = len(b'{"$seq":,"$ts":,"data":}')


class _BoxPlan(NamedTuple):
    """The part of a commit for one box; `box` is None if the commit creates it."""

    name: str
    box: Box | None
    part: changes.TxnPart


class CommitHandlers:
    def __init__(self, context: Context, txns: Txns) -> None:
        self._context = context
        self._txns = txns
        self._writers = Writers(context, txns)
        context.on_command(bulk.TxnCommit, self._commit)

    def _commit(self, command: bulk.TxnCommit, now_ms: int, entries: LogEntries) -> Outcome:
        outcome: Outcome | None = None
        try:
            outcome = self._try_commit(command, now_ms, entries)
        except (NotLoaded, TagsNotLoaded):
            raise  # the command is retried
        finally:
            if outcome is None or not outcome.needs:
                self._forget_loaded(command)
        return outcome

    def _forget_loaded(self, command: bulk.TxnCommit) -> None:
        """Release the rows that were loaded for a commit."""
        epoch = self._txns.find(command.txn.writer, command.txn.epoch)
        for chunk in epoch.chunks() if epoch is not None else ():
            if chunk.message is not None and not chunk.is_counted:
                chunk.forget()

    def _try_commit(self, command: bulk.TxnCommit, now_ms: int, entries: LogEntries) -> Outcome:
        context, txn = self._context, command.txn
        marks, refusal = self._writers.marks_or_refusal(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        commit_mark = mark_of(marks, txn.epoch)
        if commit_mark is not None:
            return self._writers.when_durable(bulk.TxnCommitReply(True, 0, []), commit_mark.lsn, entries)
        self._writers.check_marks(txn)
        parcels = [parcel for parcel, chunks in command.parcels if chunks]
        pending = self._txns.find(txn.writer, txn.epoch)
        if pending is not None and txn.attempt in pending.replaced_attempts:
            return self._writers.refuse_replaced_attempt(txn, entries)
        epoch = self._require_parcels(command)
        plans: list[_BoxPlan] = []
        totals = epoch.totals_of(parcels)
        for name, own in totals.items():
            if any(_is_over(mark, name, txn.epoch) for mark in marks):
                continue  # the former shard of this box has committed the epoch
            box: Box | None = context.boxes.get(name)
            try:
                if box is None and not may_create(context, name, epoch.create_of(name)):
                    raise BoxNotFound(f"box {name} does not exist; it may have been deleted", box=name)
                plans.append(_BoxPlan(name, box, self._plan(name, box, own, now_ms, entries)))
            except StreamsError as error:
                if box is None:
                    raise
                return context.answer(box, error.with_traceback(None), entries, box.last_lsn)
        size = sum(rows.size for rows in totals.values())
        self._check_room(command, plans, size, now_ms)
        missing_chunks = self._to_load(command, epoch, parcels, plans)
        if command.dry:
            return Outcome(entries, _commit_reply(plans))
        if any(chunk.lsn > context.durability.logged_lsn for chunk in missing_chunks):
            return Outcome(entries, None, needs=(UNFINISHED,))  # not yet in the log file
        if missing_chunks:
            return Outcome(entries, None, needs=(ChunksNotLoaded(missing_chunks),))
        return self._log_commit(command, epoch, parcels, plans, now_ms, entries)

    def _to_load(
        self, command: bulk.TxnCommit, epoch: Epoch, parcels: list[str], plans: Sequence[_BoxPlan]
    ) -> list[Chunk]:
        """Return the chunks to load first: those with rows of memory boxes, which have no other copy, and of
        object boxes, which are uploaded as one change."""
        eager = {each.name for each in plans if each.box is not None and _is_eager(each.box)}
        if not eager:
            return []
        chunks = [chunk for chunk in epoch.chunks_of(parcels) if not eager.isdisjoint(chunk.boxes)]
        size, most = sum(chunk.bytes for chunk in chunks), self._txns.bytes_max
        if size > most:
            raise BatchTooLarge(
                f"epoch {command.txn.epoch} of {quote(command.txn.writer)} has {size} bytes with rows for "
                f"boxes of class memory or object; the limit of one commit is {most} "
                "(STREAMS_TXN_BYTES); split it into several epochs",
                limit=most,
            )
        return [chunk for chunk in chunks if chunk.message is None]

    def _drop_later_others(self, txn: bulk.Txn, entries: LogEntries) -> None:
        """Drop later epochs of other queries: the mark of this commit refuses them, and this query must not
        find their rows when it reaches the same epoch numbers."""
        for number in self._txns.epochs_of_others(txn.writer, txn.query):
            if number > txn.epoch:
                self._context.log(changes.TxnDropped(txn.writer, number), entries)

    def _require_parcels(self, command: bulk.TxnCommit) -> Epoch:
        """Return the pending epoch, possibly empty; raise `NotFound` unless it has every named chunk."""
        epoch = self._txns.find(command.txn.writer, command.txn.epoch) or Epoch(command.txn.query)
        for parcel, count in command.parcels:
            chunks = epoch.parcels.get(parcel, {})
            if sorted(chunks) != list(range(count)):
                raise NotFound(
                    f"parcel {quote(parcel)} of epoch {command.txn.epoch} of {quote(command.txn.writer)}: "
                    f"{len(chunks)} chunks are held, not {count}; it has expired or was never put. Write "
                    "the epoch again",
                    parcel=parcel,
                    chunks=len(chunks),
                )
        return epoch

    def _plan(
        self, name: str, box: Box | None, rows: Piece, now_ms: int, entries: LogEntries
    ) -> changes.TxnPart:
        """Plan the part of this commit for one box, without a change."""
        context = self._context
        if box is not None:
            context.expire(box, now_ms, entries)
            stands_for = box
        else:
            stands_for = placeholder(context.plan_box(name, None, now_ms))
        if stands_for.fencing_token:
            raise FencingTokenMismatch(
                f"{name} is fenced by a token; a transaction cannot send one", box=name, field="fencing_token"
            )
        log, config = stands_for.log, stands_for.config
        count = rows.records
        part = changes.TxnPart(
            stands_for.generation,
            name,
            [count],
            log.head_seq + 1,
            log.last_ts,
            config.timestamping.mode,
            config.timestamping.uncapped,
        )
        part.last_ts = _last_ts(part, rows.times, now_ms)
        part.size = rows.size + count * (_RECORD_BYTES + len(str(part.last_ts)))
        part.size += _digits(part.first_seq, count)
        if config.cap_records or config.cap_bytes:
            part.evict_before_seq = stands_for.fit(count, part.size)
            part.evict_cut_bytes = log.measure_before(part.evict_before_seq)
            part.evicted_ts = log.newest_ts_before(part.evict_before_seq)
        return part

    def _check_room(self, command: bulk.TxnCommit, plans: Sequence[_BoxPlan], size: int, now_ms: int) -> None:
        context, account = self._context, permissions.account_of(command.caller)
        new = sum(each.box is None for each in plans)
        if account and new:
            context.usage.require(account, "boxes", new)
        context.require_room(account, size, now_ms, counts=not command.dry)
        if context.boxes_max and len(context.boxes) + new > context.boxes_max:
            raise Throttled(
                f"this commit would create {new} boxes, and there are {len(context.boxes)} already; delete "
                "some or raise the limit",
                limit="boxes",
            )

    def _log_commit(
        self,
        command: bulk.TxnCommit,
        epoch: Epoch,
        parcels: list[str],
        plans: Sequence[_BoxPlan],
        now_ms: int,
        entries: LogEntries,
    ) -> Outcome:
        context, txn = self._context, command.txn
        on_disk: list[tuple[Box, changes.TxnPart]] = []
        in_memory: list[tuple[Box, changes.TxnPart]] = []
        for name, box, part in plans:
            if box is None:
                creation = context.plan_box(name, None, now_ms)
                context.log(creation, entries)
                part.generation = creation.generation
                box = context.generations[creation.generation]
            if box.is_memory:
                in_memory.append((box, part))
                continue
            context.reserve(box, part.first_seq + sum(part.counts) - 1, entries)
            on_disk.append((box, part))
        memory_batches = _render_in_memory(in_memory, list(epoch.chunks_of(parcels)), now_ms)
        is_small = self._txns.is_small(epoch)
        self._drop_later_others(txn, entries)
        parts = [part for _, part in on_disk]
        owner = self._writers.owner_after(txn, command.caller)
        lsn = context.log(
            changes.TxnCommitted(
                txn.writer, txn.epoch, txn.query, now_ms, parcels, parts, owner, self._once_after(txn)
            ),
            entries,
        )
        for box, _ in on_disk:
            context.durability.show_commit(box, lsn)
            context.arm_timer(box)
        waits_for = lsn
        objects = [box.name for box, _ in on_disk if box.is_object]
        commit = self._txns.commits.get(lsn)
        if commit is not None and objects:
            self._render_now(commit, objects, entries)
            waits_for = context.lsn
        if commit is not None and is_small:
            self._render_now(commit, None, entries)
        if commit is not None:
            for chunk in commit.chunks:
                chunk.forget()
        wakes = self._append_in_memory(in_memory, memory_batches, now_ms, entries)
        wait = context.durability.wait_for_commit(waits_for, (box for box, _ in on_disk))
        return reply_after(wait, entries, _commit_reply(plans), tuple(wakes))._replace(afterthoughts=True)

    def _render_now(self, commit: Commit, only: Sequence[str] | None, entries: LogEntries) -> None:
        """Render the rows of these boxes (None: all boxes) of a commit whose chunks are in memory."""
        step = commit.plan(1 << 62, only)
        names = set(step.starts)
        step = step._replace(chunks=[chunk for chunk in step.chunks if not names.isdisjoint(chunk.boxes)])
        rows = [chunk.unpack_rows() for chunk in step.chunks]
        for generation, batch in list(render_step(step, rows)):
            self._context.log(changes.BatchKept(generation, batch), entries)

    def keep_rendered(
        self, commit: Commit, batches: Sequence[tuple[int, Batch]], entries: LogEntries
    ) -> None:
        """Log rendered batches of a commit. Skip batches whose place in the box is gone."""
        context = self._context
        for generation, batch in batches:
            box = context.generations.get(generation)
            rows = None if box is None else commit.places.get(box.name)
            if box is None or rows is None or rows.first_seq != batch.first_seq or not rows.count:
                continue
            at = box.log.tail.at(batch.first_seq)
            if at is not None and box.log.tail.batches[at] is rows:
                context.stage(changes.BatchKept(generation, batch), box, entries)

    def end_step(self, commit: Commit, chunks: int, entries: LogEntries) -> None:
        if commit.lsn in self._txns.commits:
            self._context.log(changes.TxnRendered(commit.lsn, chunks), entries)

    def _once_after(self, txn: bulk.Txn) -> bool:
        """Return True if the mark may expire: not if the writer has a permanent mark."""
        return txn.once and all(mark.once for mark in self._txns.marks.get(txn.writer, ()))

    def _append_in_memory(
        self,
        boxes: Sequence[tuple[Box, changes.TxnPart]],
        batches_of: dict[int, list[Batch]],
        now_ms: int,
        entries: LogEntries,
    ) -> list[str]:
        context = self._context
        wakes: list[str] = []
        for box, part in boxes:
            cuts = (0, part.evict_before_seq, 0, part.evict_cut_bytes, part.evicted_ts)
            for batch in batches_of.get(part.generation, ()):
                context.stage(changes.BatchAppended(box.generation, batch, now_ms, None, *cuts), box, entries)
                cuts = (0, 0, 0, 0, 0)
            wakes.append(box.name)
            if box.outboxes and context.forwarding.note(box):
                wakes.append(forwards.RELAY)
        return wakes


def _commit_reply(plans: Sequence[_BoxPlan]) -> bulk.TxnCommitReply:
    ranges = [
        (each.name, each.part.first_seq, each.part.first_seq + sum(each.part.counts) - 1) for each in plans
    ]
    return bulk.TxnCommitReply(False, sum(sum(each.part.counts) for each in plans), ranges)


def _is_over(mark: Mark, box: str, epoch: int) -> bool:
    return mark.epoch >= epoch and mark.covers(box)


def _is_eager(box: Box) -> bool:
    """Return True if the commit itself needs the rows of this box."""
    return box.is_memory or box.is_object


def _last_ts(part: changes.TxnPart, times: ClientTimes | None, now_ms: int) -> int:
    """Return the time of the last of these rows, as `resolve_times` will set it."""
    if part.mode == "arrival":
        return max(now_ms, part.not_before)
    latest = part.not_before
    if times is None or times.has_gaps:
        if part.mode == "client-require":
            raise InvalidRequest(f"ts: {part.box} requires a client timestamp", box=part.box, field="ts")
        latest = max(latest, now_ms)
    if times is not None and times.latest >= 0:
        latest = max(latest, times.latest if part.uncapped else min(times.latest, now_ms))
    return latest


def _digits(first: int, count: int) -> int:
    """Return the total number of digits of `count` numbers from `first` on."""
    total, low = 0, first
    while count > 0:
        digits = len(str(low))
        own = min(count, 10**digits - low)
        total += own * digits
        low, count = low + own, count - own
    return total


def _render_in_memory(
    boxes: Sequence[tuple[Box, changes.TxnPart]], chunks: Sequence[Chunk], now_ms: int
) -> dict[int, list[Batch]]:
    """Return the rendered batches of memory boxes, by generation."""
    if not boxes:
        return {}
    starts = {
        box.name: Start(Target(part.generation, part.mode, part.uncapped), 0, part.first_seq, part.not_before)
        for box, part in boxes
    }
    own = [chunk for chunk in chunks if not starts.keys().isdisjoint(chunk.boxes)]
    batches: dict[int, list[Batch]] = {}
    for generation, batch in render_step(Step(own, starts, now_ms), [chunk.unpack_rows() for chunk in own]):
        batches.setdefault(generation, []).append(batch)
    return batches
