"""Handles transactions: holds their rows, commits, aborts, lets them expire. Their state is in `state.py`.

    put      ─► TxnHeld                                        answered when it is in the log file
    commit   ─► BoxCreated … SeqsReserved … TxnCommitted         answered when it is on the disk
                ▲ all that can be refused is asked before
    then     ─► BatchKept for each batch that is rendered, TxnRendered
    abort    ─► TxnDropped

Rules of the file
- A commit is worked out in full before the first of its changes is made: what one box refuses, or what has to
  be fetched first, leaves everything as it was.
- A writer belongs to the key that put the first rows of its transaction: the key's id is in the log. Other
  keys can neither put, commit, abort nor list; an admin may abort, and take over what is left of a key.
- All boxes of a commit show it at once, when it is durable, whatever their class: a reader never sees a part
  of it that a crash could take back. What boxes in memory get is in no log, and is shown at once; what object
  boxes get is shown when it is in the store, and then the commit is answered.
- A commit needs no rows but those of boxes in memory and of object boxes; these are loaded first. All others
  are rendered afterwards, in steps (`commits.py`), those of a small commit at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.box import Box, placeholder
from shard.core.boxes.sealed import UNFINISHED, NotLoaded, TagsNotLoaded
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions import permissions
from shard.core.transactions.chunks import Chunk, ChunksNotLoaded, Piece, Times, cost_of, memory_of
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

#: Bytes of a record that all records have, but for the digits of its seq and time.
_RECORD_BYTES = len(b'{"$seq":,"$ts":,"data":}')

#: Epochs and marks that one list shows.
_LISTED_MAX = 10_000

#: Epochs that one tick lets expire.
_EXPIRED_MAX = 16


class _Planned(NamedTuple):
    """What a commit does to one box, before the box is made if it has to be."""

    name: str
    box: Box | None
    part: changes.TxnPart


class Committing:
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
        marks, refusal = self._known(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        done = _mark_of(marks, txn.epoch)
        if done is not None:
            return self._when_durable(bulk.TxnPutReply(True, False, 0), done.lsn, entries)
        others = txns.held_by_others(txn.writer, txn.query) if txn.reset else {}
        epoch = txns.find(txn.writer, txn.epoch) if txn.epoch not in others else None
        replaced: list[str] = []
        if epoch is not None and txn.attempt and txn.attempt != epoch.attempt:
            if txn.attempt in epoch.replaced:
                return self._replaced(txn, entries)
            replaced = [*epoch.replaced, epoch.attempt][-REPLACED_MAX:]
            others[txn.epoch] = epoch
            epoch = None
        elif epoch is not None:
            replaced = epoch.replaced
        chunks = epoch.parcels.get(command.parcel, {}) if epoch is not None else {}
        if command.chunk in chunks:
            assert epoch is not None
            lsn = chunks[command.chunk].lsn
            wait = self._context.durability.wait_for_held_rows(lsn)
            return reply_after(wait, entries, bulk.TxnPutReply(False, True, epoch.bytes))
        freed = sum(other.bytes for other in others.values())
        cost = cost_of(command.rows_head, command.body)
        account = permissions.account_of(command.caller)
        self._check_bounds(txn, epoch, len(command.rows_head.boxes), account)
        if account:
            self._context.usage.require(account, "txn_bytes", cost - freed)
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
            replaced,
        )
        lsn = self._context.log(change, entries)
        held = txns.find(txn.writer, txn.epoch)
        assert held is not None
        if command.rows is not None:
            txns.remember(held.parcels[command.parcel][command.chunk], command.rows)
        wait = self._context.durability.wait_for_held_rows(lsn)
        return reply_after(wait, entries, bulk.TxnPutReply(False, False, held.bytes))

    def _replaced(self, txn: bulk.Txn, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"attempt: {quote(txn.attempt)} of epoch {txn.epoch} of {quote(txn.writer)} was replaced by a "
            "later attempt, which has dropped its rows; end this one",
            writer=txn.writer,
            query=txn.query,
            epoch=txn.epoch,
        )
        return self._when_durable(error, self._context.lsn, entries)

    def _owner_after(self, txn: bulk.Txn, caller: bulk.Caller) -> str:
        """The key that the writer belongs to once this caller has put or committed something."""
        owners = self._txns.owners_of(txn.writer)
        return min(owners) if owners and not txn.reset else caller.key_id

    def _refuse_stranger(self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries) -> Outcome | None:
        """A refusal if the writer belongs to another key. A key that may do everything takes it over with
        `reset`."""
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

    def _known(
        self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries
    ) -> tuple[list[Mark], Outcome | None]:
        """The marks that count for this transaction, or a refusal: they are another key's or query's."""
        refusal = self._refuse_stranger(txn, caller, entries)
        if refusal is not None:
            return [], refusal
        marks = self._txns.marks.get(txn.writer, ())
        if not txn.reset:
            for mark in marks:
                if mark.query != txn.query:
                    return [], self._conflict(txn, mark.query, mark.epoch, mark.lsn, entries)
            for number, epoch in self._txns.held_by_others(txn.writer, txn.query).items():
                if epoch.takes_over:
                    return [], self._conflict(txn, epoch.query, number, self._context.lsn, entries)
        return [mark for mark in marks if mark.query == txn.query], None

    def _conflict(self, txn: bulk.Txn, query: str, epoch: int, lsn: int, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"query: {quote(txn.writer)} was last used by {quote(query)} (epoch {epoch}), not by "
            f"{quote(txn.query)}; its epochs may mean something else. Use another writer, or say reset to "
            "take it over",
            writer=txn.writer,
            query=query,
            epoch=epoch,
        )
        return self._when_durable(error, lsn, entries)

    def _when_durable(self, reply: bulk.BulkReply | StreamsError, lsn: int, entries: LogEntries) -> Outcome:
        """An answer that rests on a change of this lsn."""
        return reply_after(self._context.durability.wait_for_transaction(lsn), entries, reply)

    def _check_bounds(self, txn: bulk.Txn, epoch: Epoch | None, boxes: int, account: str) -> None:
        """What is known of held rows must fit into memory. The rows themselves are bounded by the disk."""
        txns = self._txns
        more = memory_of(boxes)
        is_over = txns.memory + more > txns.bytes_max
        # One key leaves half of it to others.
        if is_over or (account and 2 * (txns.memory_of(account) + more) > txns.bytes_max):
            own = more + sum(chunk.memory for chunk in epoch.chunks()) if epoch is not None else more
            if own > txns.bytes_max:
                raise BatchTooLarge(
                    f"epoch {txn.epoch} of {quote(txn.writer)} is put in so many pieces that to keep account "
                    f"of them takes {own} bytes of memory, at most {txns.bytes_max} are there for it "
                    "(STREAMS_TXN_BYTES); put more rows at a time, or split it into several epochs",
                    limit=txns.bytes_max,
                )
            raise Throttled(
                f"to keep account of what is held for transactions takes {txns.memory} bytes of memory, at "
                f"most {txns.bytes_max} are there for it (STREAMS_TXN_BYTES); try again when some are "
                "committed, aborted or expired",
                limit="txn_bytes",
            )
        self._check_marks(txn)

    def _check_marks(self, txn: bulk.Txn) -> None:
        """Refuses a writer for whose mark there is no room. That of one that is used once always has some."""
        txns = self._txns
        if not txn.once and txn.writer not in txns.marks and txns.marks_kept >= MARKS_MAX:
            raise Throttled(
                f"this shard knows {txns.marks_kept} transaction writers, which is its limit; use the name "
                "of a known writer, or forget those that are not used any more: streams txn forget",
                limit="txn_writers",
            )

    def _check_names(self, command: bulk.TxnPut) -> None:
        """A box that is not there and may not be made is told when its rows come, not at the end of a job."""
        context = self._context
        for name in command.rows_head.boxes:
            if name not in context.boxes and not _may_create(context, name, command.rows_head.create):
                raise BoxNotFound(f"box {name} does not exist and this write may not create it", box=name)

    # -- committing

    def _commit(self, command: bulk.TxnCommit, now_ms: int, entries: LogEntries) -> Outcome:
        outcome: Outcome | None = None
        try:
            outcome = self._try_commit(command, now_ms, entries)
        except (NotLoaded, TagsNotLoaded):
            raise  # it is asked again
        finally:
            if outcome is None or not outcome.needs:
                self._forget_loaded(command)
        return outcome

    def _forget_loaded(self, command: bulk.TxnCommit) -> None:
        """Rows that were loaded for a commit are not needed any more."""
        epoch = self._txns.find(command.txn.writer, command.txn.epoch)
        for chunk in epoch.chunks() if epoch is not None else ():
            if chunk.held is not None and not chunk.is_counted:
                chunk.forget()

    def _try_commit(self, command: bulk.TxnCommit, now_ms: int, entries: LogEntries) -> Outcome:
        context, txn = self._context, command.txn
        marks, refusal = self._known(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        done = _mark_of(marks, txn.epoch)
        if done is not None:
            return self._when_durable(bulk.TxnCommitReply(True, 0, []), done.lsn, entries)
        self._check_marks(txn)
        parcels = [parcel for parcel, chunks in command.parcels if chunks]
        held = self._txns.find(txn.writer, txn.epoch)
        if held is not None and txn.attempt in held.replaced:
            return self._replaced(txn, entries)
        epoch = self._required(command)
        planned: list[_Planned] = []
        totals = epoch.totals_of(parcels)
        for name, own in totals.items():
            if any(_is_over(mark, name, txn.epoch) for mark in marks):
                continue  # the shard that had this box then has committed the epoch
            box: Box | None = context.boxes.get(name)
            try:
                if box is None and not _may_create(context, name, epoch.create_of(name)):
                    raise BoxNotFound(f"box {name} does not exist (any more)", box=name)
                planned.append(_Planned(name, box, self._plan(name, box, own, now_ms, entries)))
            except StreamsError as error:
                if box is None:
                    raise
                return context.answer(box, error.with_traceback(None), entries, box.last_lsn)
        size = sum(rows.size for rows in totals.values())
        self._check_room(command, planned, size, now_ms)
        needed = self._to_load(command, epoch, parcels, planned)
        if command.dry:
            return Outcome(entries, _commit_reply(planned))
        if any(chunk.lsn > context.durability.logged_lsn for chunk in needed):
            return Outcome(entries, None, needs=(UNFINISHED,))  # it is on its way to the file
        if needed:
            return Outcome(entries, None, needs=(ChunksNotLoaded(needed),))
        return self._make(command, epoch, parcels, planned, now_ms, entries)

    def _to_load(
        self, command: bulk.TxnCommit, epoch: Epoch, parcels: list[str], planned: Sequence[_Planned]
    ) -> list[Chunk]:
        """Chunks that have to be in memory first: those with rows of boxes in memory, which are nowhere else,
        and of object boxes, which are told to the store in one piece."""
        eager = {each.name for each in planned if each.box is not None and _is_eager(each.box)}
        if not eager:
            return []
        chunks = [chunk for chunk in epoch.ordered(parcels) if not eager.isdisjoint(chunk.boxes)]
        size, most = sum(chunk.bytes for chunk in chunks), self._txns.bytes_max
        if size > most:
            raise BatchTooLarge(
                f"epoch {command.txn.epoch} of {quote(command.txn.writer)} has {size} bytes with rows for "
                f"boxes of class memory or object, at most {most} can be committed to those at once "
                "(STREAMS_TXN_BYTES); split it into several epochs",
                limit=most,
            )
        return [chunk for chunk in chunks if chunk.held is None]

    def _drop_later_others(self, txn: bulk.Txn, entries: LogEntries) -> None:
        """Drops later epochs that other queries hold: with the mark of this commit they are refused, and what
        is left of them must not be taken for rows of this query when it comes to these epochs."""
        for number in self._txns.held_by_others(txn.writer, txn.query):
            if number > txn.epoch:
                self._context.log(changes.TxnDropped(txn.writer, number), entries)

    def _required(self, command: bulk.TxnCommit) -> Epoch:
        """What is held, if it is all that is named; that may be nothing."""
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
        """What this commit would do to a box."""
        context = self._context
        if box is not None:
            context.expire(box, now_ms, entries)
            stands_for = box
        else:
            stands_for = placeholder(context.plan_box(name, None, now_ms))
        if stands_for.fencing_token:
            raise FencingTokenMismatch(
                f"{name} is fenced by a token; a transaction has none", box=name, field="fencing_token"
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

    def _check_room(
        self, command: bulk.TxnCommit, planned: Sequence[_Planned], size: int, now_ms: int
    ) -> None:
        context, account = self._context, permissions.account_of(command.caller)
        new = sum(each.box is None for each in planned)
        if account and new:
            context.usage.require(account, "boxes", new)
        context.require_room(account, size, now_ms, counts=not command.dry)
        if context.boxes_max and len(context.boxes) + new > context.boxes_max:
            raise Throttled(
                f"there are {len(context.boxes)} boxes already, and {new} more would be needed; delete some "
                "or raise the limit",
                limit="boxes",
            )

    def _make(
        self,
        command: bulk.TxnCommit,
        epoch: Epoch,
        parcels: list[str],
        planned: Sequence[_Planned],
        now_ms: int,
        entries: LogEntries,
    ) -> Outcome:
        context, txn = self._context, command.txn
        stored: list[tuple[Box, changes.TxnPart]] = []
        in_memory: list[tuple[Box, changes.TxnPart]] = []
        for name, box, part in planned:
            if box is None:
                created = context.plan_box(name, None, now_ms)
                context.log(created, entries)
                part.generation = created.generation
                box = context.generations[created.generation]
            if box.is_memory:
                in_memory.append((box, part))
                continue
            context.reserve(box, part.first_seq + sum(part.counts) - 1, entries)
            stored.append((box, part))
        memory_batches = _render_in_memory(in_memory, list(epoch.ordered(parcels)), now_ms)
        is_small = self._txns.is_small(epoch)
        self._drop_later_others(txn, entries)
        parts = [part for _, part in stored]
        owner = self._owner_after(txn, command.caller)
        lsn = context.log(
            changes.TxnCommitted(
                txn.writer, txn.epoch, txn.query, now_ms, parcels, parts, owner, self._once_after(txn)
            ),
            entries,
        )
        for box, _ in stored:
            context.durability.show_commit(box, lsn)
            context.arm_timer(box)
        waits_for = lsn
        objects = [box.name for box, _ in stored if box.is_object]
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
        wait = context.durability.wait_for_commit(waits_for, (box for box, _ in stored))
        return reply_after(wait, entries, _commit_reply(planned), tuple(wakes))._replace(afterthoughts=True)

    def _render_now(self, commit: Commit, only: Sequence[str] | None, entries: LogEntries) -> None:
        """Renders rows of a commit whose chunks are in memory, as far as they have rows of these boxes."""
        step = commit.plan(1 << 62, only)
        wanted = set(step.starts)
        step = step._replace(chunks=[chunk for chunk in step.chunks if not wanted.isdisjoint(chunk.boxes)])
        loaded = [chunk.taken_apart() for chunk in step.chunks]
        for generation, batch in list(render_step(step, loaded)):
            self._context.log(changes.BatchKept(generation, batch), entries)

    def keep_rendered(
        self, commit: Commit, batches: Sequence[tuple[int, Batch]], entries: LogEntries
    ) -> None:
        """Logs batches of a commit that were rendered meanwhile. Those whose place is gone are left out."""
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
        """Whether the mark may expire: not if the writer had one that does not."""
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
        if epoch is None or txn.attempt in epoch.replaced:  # its rows are gone; those held are another's
            return Outcome(entries, bulk.TxnAbortReply(0, 0))
        if not permissions.may_abort(command.caller, epoch):
            refusal = self._refuse_stranger(txn, command.caller, entries)
            if refusal is not None:
                return refusal
        parcels = [each for each in epoch.parcels if not command.parcels or each in set(command.parcels)]
        before = txns.bytes
        if not parcels:
            return Outcome(entries, bulk.TxnAbortReply(0, 0))
        named = parcels if len(parcels) < len(epoch.parcels) else []
        lsn = self._context.log(changes.TxnDropped(txn.writer, txn.epoch, named), entries)
        wait = self._context.durability.wait_for_held_rows(lsn)
        return reply_after(wait, entries, bulk.TxnAbortReply(len(parcels), before - txns.bytes))

    def _forget(self, command: bulk.TxnAbort, entries: LogEntries) -> Outcome:
        """Drops all that is held for the writer, and its mark."""
        txns, writer, caller = self._txns, command.txn.writer, command.caller
        known = txns.of_writer(writer)
        if not permissions.is_admin_of_all(caller):
            refusal = self._refuse_stranger(command.txn, caller, entries)
            if refusal is not None:
                return refusal
        before, parcels = txns.bytes, sum(len(epoch.parcels) for epoch in known.values())
        for number in known:
            self._context.log(changes.TxnDropped(writer, number), entries)
        is_known = writer in txns.marks
        if is_known:
            self._context.log(changes.TxnForgotten(writer), entries)
        reply = bulk.TxnAbortReply(parcels, before - txns.bytes, is_known)
        return self._when_durable(reply, self._context.lsn if entries else 0, entries)

    def tick(self, now_ms: int, entries: LogEntries) -> None:
        """Drops what nobody has put to for too long."""
        for _ in range(_EXPIRED_MAX):
            expired = self._txns.expired(now_ms)
            if expired is None:
                return
            self._context.log(changes.TxnDropped(*expired), entries)

    # -- telling

    def _list(self, command: bulk.TxnList, now_ms: int, entries: LogEntries) -> Outcome:
        txns, caller = self._txns, command.caller
        held = [
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
            for writer, known in sorted(txns.marks.items())
            if writer.startswith(command.prefix)
            for mark in known
            if permissions.may_list(caller, mark.owner)
        ]
        more = max(len(held), len(marks)) > _LISTED_MAX
        lsn = max((mark.lsn for known in txns.marks.values() for mark in known), default=0)
        rendering = [
            bulk.UnrenderedCommit(commit.writer, commit.epoch, commit.records)
            for commit in islice(txns.commits.values(), _LISTED_MAX)
            if commit.writer.startswith(command.prefix)
            and permissions.may_list_writer(caller, txns, commit.writer)
        ]
        state = bulk.TxnState(held[:_LISTED_MAX], marks[:_LISTED_MAX], more, rendering)
        return self._when_durable(state, lsn, entries)


def _commit_reply(planned: Sequence[_Planned]) -> bulk.TxnCommitReply:
    ranges = [
        (each.name, each.part.first_seq, each.part.first_seq + sum(each.part.counts) - 1) for each in planned
    ]
    return bulk.TxnCommitReply(False, sum(sum(each.part.counts) for each in planned), ranges)


def _mark_of(marks: Sequence[Mark], epoch: int) -> Mark | None:
    """The mark that says that all of this epoch was committed."""
    return next((mark for mark in marks if not mark.slots and mark.epoch >= epoch), None)


def _is_over(mark: Mark, box: str, epoch: int) -> bool:
    return mark.epoch >= epoch and mark.covers(box)


def _may_create(context: Context, name: str, create: bool | None) -> bool:
    return name not in context.not_recreated if create is None else create


def _is_eager(box: Box) -> bool:
    """Whether a commit needs the rows of this box itself."""
    return box.is_memory or box.is_object


def _last_ts(part: changes.TxnPart, times: Times | None, now_ms: int) -> int:
    """The time that the last of these rows will have (`resolve_times`)."""
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
    """How many digits these numbers have together."""
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
    """By generation: the batches that rows for boxes in memory become."""
    if not boxes:
        return {}
    starts = {
        box.name: Start(Target(part.generation, part.mode, part.uncapped), 0, part.first_seq, part.not_before)
        for box, part in boxes
    }
    own = [chunk for chunk in chunks if not starts.keys().isdisjoint(chunk.boxes)]
    found: dict[int, list[Batch]] = {}
    for generation, batch in render_step(Step(own, starts, now_ms), [chunk.taken_apart() for chunk in own]):
        found.setdefault(generation, []).append(batch)
    return found
