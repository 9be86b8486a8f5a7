"""Handles transactions: put, commit, abort, expiry. Their state is in `state.py`.

    put      ─► TxnHeld                                        answered when it is in the log file
    commit   ─► BoxCreated … SeqsReserved … TxnCommitted         answered when it is on the disk
                ▲ every check runs before the first of these
    then     ─► BatchKept for each batch that is rendered, TxnRendered
    abort    ─► TxnDropped

Rules of the file
- A commit is planned in full before its first change is logged: if one box refuses, or rows have to be loaded
  first, nothing has changed.
- A writer belongs to the key that put the first rows of its transaction: the key's id is in the log. Other
  keys can neither put, commit, abort nor list; an admin may abort, and take over the writers of another key.
- All boxes of a commit show it at once, when it is durable, whatever their class: a reader never sees a part
  of it that a crash could undo. Rows of memory boxes are in no log and are shown at once; rows of object
  boxes are shown when they are in the store, and then the commit is answered.
- A commit loads only the rows of memory boxes and object boxes. All others are rendered afterwards, in steps
  (`commits.py`); those of a small commit at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import UNFINISHED, NotLoaded, TagsNotLoaded
from shard.core.context import Context, placeholder
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions import permissions
from shard.core.transactions.chunks import Chunk, ChunksNotLoaded, ClientTimes, Piece, cost_of, memory_of
from shard.core.transactions.commits import Commit, Start, Step, Target, render_step
from shard.core.transactions.epochs import Epoch
from shard.core.transactions.state import MARKS_MAX, REPLACED_MAX, Mark, Txns
from streams.protocol.access.grants import ADMIN
from streams.protocol.errors import (
    BatchTooLarge,
    BoxNotFound,
    FencingTokenMismatch,
    Forbidden,
    InvalidRequest,
    NotFound,
    StreamsError,
    Throttled,
    WriterConflict,
)
from streams.protocol.messages import bulk, forwards
from streams.protocol.model.names import quote
from streams.protocol.model.records import Batch

#: Fixed bytes of each record, without the digits of its seq and time.
_RECORD_BYTES = len(b'{"$seq":,"$ts":,"data":}')

#: Most epochs and marks in one list.
_LISTED_MAX = 10_000

#: Most epochs that one tick drops.
_EXPIRED_MAX = 16


class _BoxPlan(NamedTuple):
    """The part of a commit for one box; `box` is None if the commit creates it."""

    name: str
    box: Box | None
    part: changes.TxnPart


class TransactionHandlers:
    def __init__(self, context: Context, txns: Txns) -> None:
        self._context = context
        self._txns = txns
        context.on_command(bulk.TxnPut, self._put)
        context.on_command(bulk.TxnCommit, self._commit)
        context.on_command(bulk.TxnAbort, self._abort)
        context.on_command(bulk.TxnList, self._list)

    # -- putting

    def _put(self, command: bulk.TxnPut, now_ms: int, entries: LogEntries) -> Outcome:
        txns, txn = self._txns, command.txn
        marks, refusal = self._marks_or_refusal(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        commit_mark = _mark_of(marks, txn.epoch)
        if commit_mark is not None:
            return self._when_durable(bulk.TxnPutReply(True, False, 0), commit_mark.lsn, entries)
        others = txns.epochs_of_others(txn.writer, txn.query) if txn.reset else {}
        epoch = txns.find(txn.writer, txn.epoch) if txn.epoch not in others else None
        replaced_attempts: list[str] = []
        if epoch is not None and txn.attempt and txn.attempt != epoch.attempt:
            if txn.attempt in epoch.replaced_attempts:
                return self._refuse_replaced_attempt(txn, entries)
            replaced_attempts = [*epoch.replaced_attempts, epoch.attempt][-REPLACED_MAX:]
            others[txn.epoch] = epoch
            epoch = None
        elif epoch is not None:
            replaced_attempts = epoch.replaced_attempts
        chunks = epoch.parcels.get(command.parcel, {}) if epoch is not None else {}
        if command.chunk in chunks:
            assert epoch is not None
            lsn = chunks[command.chunk].lsn
            wait = self._context.durability.wait_for_held_rows(lsn)
            return reply_after(wait, entries, bulk.TxnPutReply(False, True, epoch.bytes))
        bytes_freed = sum(other.bytes for other in others.values())
        cost = cost_of(command.rows_head, command.body)
        account = permissions.account_of(command.caller)
        self._check_bounds(txn, epoch, len(command.rows_head.boxes), account)
        if account:
            self._context.usage.require(account, "txn_bytes", cost - bytes_freed)
            self._context.usage.require(account, "stored_bytes", len(command.body))
        self._check_names(command)
        was_others = any(other.query != txn.query for other in others.values())
        takes_over = was_others or any(mark.query != txn.query for mark in txns.marks.get(txn.writer, ()))
        for number in others:  # this query takes the writer over, or this attempt replaces another
            self._context.log(changes.TxnDropped(txn.writer, number), entries)
        change = changes.TxnHeld(
            txn.writer,
            txn.epoch,
            txn.query,
            command.parcel,
            command.chunk,
            now_ms,
            command.rows_head,
            command.body,
            self._owner_after(txn, command.caller),
            takes_over or (epoch is not None and epoch.takes_over),
            txn.attempt or (epoch.attempt if epoch is not None else ""),
            replaced_attempts,
        )
        lsn = self._context.log(change, entries)
        pending = txns.find(txn.writer, txn.epoch)
        assert pending is not None
        if command.rows is not None:
            txns.remember(pending.parcels[command.parcel][command.chunk], command.rows)
        wait = self._context.durability.wait_for_held_rows(lsn)
        return reply_after(wait, entries, bulk.TxnPutReply(False, False, pending.bytes))

    def _refuse_replaced_attempt(self, txn: bulk.Txn, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"attempt: {quote(txn.attempt)} of epoch {txn.epoch} of {quote(txn.writer)} was replaced by a "
            "later attempt, which has dropped its rows; end this one",
            writer=txn.writer,
            query=txn.query,
            epoch=txn.epoch,
        )
        return self._when_durable(error, self._context.lsn, entries)

    def _owner_after(self, txn: bulk.Txn, caller: bulk.Caller) -> str:
        """Return the key that owns the writer after a put or commit of this caller."""
        owners = self._txns.owners_of(txn.writer)
        return min(owners) if owners and not txn.reset else caller.key_id

    def _refuse_stranger(self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries) -> Outcome | None:
        """Return a refusal if the writer belongs to another key. An admin key without prefixes takes it over
        with `reset`."""
        grant = caller.grant
        if grant is None or not self._txns.owners_of(txn.writer) - {caller.key_id}:
            return None
        if txn.reset and grant.scopes & ADMIN and not grant.prefixes:
            return None
        error = Forbidden(
            f"writer: {quote(txn.writer)} belongs to another key, which began its transaction; use that key, "
            "or another writer. A key with scope admin and without prefixes takes a writer over with reset",
            field="writer",
        )
        return self._when_durable(error, self._context.lsn, entries)

    def _marks_or_refusal(
        self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries
    ) -> tuple[list[Mark], Outcome | None]:
        """Return the marks of this writer and query, or a refusal if another key or query owns the writer."""
        refusal = self._refuse_stranger(txn, caller, entries)
        if refusal is not None:
            return [], refusal
        marks = self._txns.marks.get(txn.writer, ())
        if not txn.reset:
            for mark in marks:
                if mark.query != txn.query:
                    return [], self._conflict(txn, mark.query, mark.epoch, mark.lsn, entries)
            for number, epoch in self._txns.epochs_of_others(txn.writer, txn.query).items():
                if epoch.takes_over:
                    return [], self._conflict(txn, epoch.query, number, self._context.lsn, entries)
        return [mark for mark in marks if mark.query == txn.query], None

    def _conflict(self, txn: bulk.Txn, query: str, epoch: int, lsn: int, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"query: {quote(txn.writer)} was last used by {quote(query)} (epoch {epoch}), not by "
            f"{quote(txn.query)}; the epoch numbers of two queries must not mix. Use another writer, or set "
            "reset to take it over",
            writer=txn.writer,
            query=query,
            epoch=epoch,
        )
        return self._when_durable(error, lsn, entries)

    def _when_durable(self, reply: bulk.BulkReply | StreamsError, lsn: int, entries: LogEntries) -> Outcome:
        """Reply when the change of this lsn is durable."""
        return reply_after(self._context.durability.wait_for_transaction(lsn), entries, reply)

    def _check_bounds(self, txn: bulk.Txn, epoch: Epoch | None, boxes: int, account: str) -> None:
        """Refuse a put whose index in memory exceeds the limit. The disk bounds the rows themselves."""
        txns = self._txns
        more = memory_of(boxes)
        is_over = txns.memory + more > txns.bytes_max
        # One key leaves half of it to others.
        if is_over or (account and 2 * (txns.memory_of(account) + more) > txns.bytes_max):
            own = more + sum(chunk.memory for chunk in epoch.chunks()) if epoch is not None else more
            if own > txns.bytes_max:
                raise BatchTooLarge(
                    f"epoch {txn.epoch} of {quote(txn.writer)} has too many small chunks: their index needs "
                    f"{own} bytes of memory, the limit is {txns.bytes_max} (STREAMS_TXN_BYTES); put more "
                    "rows in each chunk, or split the epoch into several epochs",
                    limit=txns.bytes_max,
                )
            raise Throttled(
                f"pending transactions use {txns.memory} bytes of memory, the limit is {txns.bytes_max} "
                "(STREAMS_TXN_BYTES) and one key may use half of it; retry when some transactions are "
                "committed or aborted, or have expired",
                limit="txn_bytes",
            )
        self._check_marks(txn)

    def _check_marks(self, txn: bulk.Txn) -> None:
        """Refuse a new writer when the shard is at its limit of marks. Writers used once always have room."""
        txns = self._txns
        if not txn.once and txn.writer not in txns.marks and txns.permanent_marks >= MARKS_MAX:
            raise Throttled(
                f"this shard remembers {txns.permanent_marks} transaction writers, which is its limit; use "
                "an existing writer, or remove writers that are no longer used: streams txn forget",
                limit="txn_writers",
            )

    def _check_names(self, command: bulk.TxnPut) -> None:
        """Refuse rows for a missing box that may not be created at once, not at the end of a job."""
        context = self._context
        for name in command.rows_head.boxes:
            if name not in context.boxes and not _may_create(context, name, command.rows_head.create):
                raise BoxNotFound(f"box {name} does not exist; create it first", box=name)

    # -- committing

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
        marks, refusal = self._marks_or_refusal(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        commit_mark = _mark_of(marks, txn.epoch)
        if commit_mark is not None:
            return self._when_durable(bulk.TxnCommitReply(True, 0, []), commit_mark.lsn, entries)
        self._check_marks(txn)
        parcels = [parcel for parcel, chunks in command.parcels if chunks]
        pending = self._txns.find(txn.writer, txn.epoch)
        if pending is not None and txn.attempt in pending.replaced_attempts:
            return self._refuse_replaced_attempt(txn, entries)
        epoch = self._require_parcels(command)
        plans: list[_BoxPlan] = []
        totals = epoch.totals_of(parcels)
        for name, own in totals.items():
            if any(_is_over(mark, name, txn.epoch) for mark in marks):
                continue  # the former shard of this box has committed the epoch
            box: Box | None = context.boxes.get(name)
            try:
                if box is None and not _may_create(context, name, epoch.create_of(name)):
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
        owner = self._owner_after(txn, command.caller)
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

    # -- dropping

    def _abort(self, command: bulk.TxnAbort, now_ms: int, entries: LogEntries) -> Outcome:
        txns, txn = self._txns, command.txn
        if command.forgets:
            return self._forget(command, entries)
        epoch = txns.find(txn.writer, txn.epoch)
        if epoch is None or txn.attempt in epoch.replaced_attempts:  # dropped already
            return Outcome(entries, bulk.TxnAbortReply(0, 0))
        if not permissions.may_abort(command.caller, epoch):
            refusal = self._refuse_stranger(txn, command.caller, entries)
            if refusal is not None:
                return refusal
        parcels = [each for each in epoch.parcels if not command.parcels or each in set(command.parcels)]
        before = txns.bytes
        if not parcels:
            return Outcome(entries, bulk.TxnAbortReply(0, 0))
        some_parcels = parcels if len(parcels) < len(epoch.parcels) else []
        lsn = self._context.log(changes.TxnDropped(txn.writer, txn.epoch, some_parcels), entries)
        wait = self._context.durability.wait_for_held_rows(lsn)
        return reply_after(wait, entries, bulk.TxnAbortReply(len(parcels), before - txns.bytes))

    def _forget(self, command: bulk.TxnAbort, entries: LogEntries) -> Outcome:
        """Drop all pending epochs of the writer, and its mark."""
        txns, writer, caller = self._txns, command.txn.writer, command.caller
        epochs = txns.of_writer(writer)
        if not permissions.is_admin_of_all(caller):
            refusal = self._refuse_stranger(command.txn, caller, entries)
            if refusal is not None:
                return refusal
        before, parcels = txns.bytes, sum(len(epoch.parcels) for epoch in epochs.values())
        for number in epochs:
            self._context.log(changes.TxnDropped(writer, number), entries)
        has_mark = writer in txns.marks
        if has_mark:
            self._context.log(changes.TxnForgotten(writer), entries)
        reply = bulk.TxnAbortReply(parcels, before - txns.bytes, has_mark)
        return self._when_durable(reply, self._context.lsn if entries else 0, entries)

    def tick(self, now_ms: int, entries: LogEntries) -> None:
        """Drop epochs that got no put within the time to live."""
        for _ in range(_EXPIRED_MAX):
            key = self._txns.find_expired(now_ms)
            if key is None:
                return
            self._context.log(changes.TxnDropped(*key), entries)

    # -- listing

    def _list(self, command: bulk.TxnList, now_ms: int, entries: LogEntries) -> Outcome:
        txns, caller = self._txns, command.caller
        pending = [
            bulk.PendingTxn(
                writer,
                number,
                epoch.query,
                len(epoch.parcels),
                sum(map(len, epoch.parcels.values())),
                epoch.records,
                epoch.bytes,
                epoch.put_ms + txns.ttl_ms,
            )
            for (writer, number), epoch in sorted(txns.epochs.items())
            if writer.startswith(command.prefix) and permissions.may_list(caller, epoch.owner)
        ]
        marks = [
            bulk.CommittedEpoch(writer, mark.epoch, mark.query, mark.at_ms, bool(mark.slots), bool(mark.once))
            for writer, own_marks in sorted(txns.marks.items())
            if writer.startswith(command.prefix)
            for mark in own_marks
            if permissions.may_list(caller, mark.owner)
        ]
        more = max(len(pending), len(marks)) > _LISTED_MAX
        lsn = max((mark.lsn for own_marks in txns.marks.values() for mark in own_marks), default=0)
        rendering = [
            bulk.UnrenderedCommit(commit.writer, commit.epoch, commit.records)
            for commit in islice(txns.commits.values(), _LISTED_MAX)
            if commit.writer.startswith(command.prefix)
            and permissions.may_list_writer(caller, txns, commit.writer)
        ]
        state = bulk.TxnState(pending[:_LISTED_MAX], marks[:_LISTED_MAX], more, rendering)
        return self._when_durable(state, lsn, entries)


def _commit_reply(plans: Sequence[_BoxPlan]) -> bulk.TxnCommitReply:
    ranges = [
        (each.name, each.part.first_seq, each.part.first_seq + sum(each.part.counts) - 1) for each in plans
    ]
    return bulk.TxnCommitReply(False, sum(sum(each.part.counts) for each in plans), ranges)


def _mark_of(marks: Sequence[Mark], epoch: int) -> Mark | None:
    """Return the mark that covers all of this epoch, if it is committed."""
    return next((mark for mark in marks if not mark.slots and mark.epoch >= epoch), None)


def _is_over(mark: Mark, box: str, epoch: int) -> bool:
    return mark.epoch >= epoch and mark.covers(box)


def _may_create(context: Context, name: str, create: bool | None) -> bool:
    return name not in context.not_recreated if create is None else create


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
