"""Handles put, abort, list and expiry of transactions; `commit_handlers.py` has the commit.

put      ─► TxnHeld                                        answered when it is in the log file
commit   ─► TxnCommitted                                   answered when it is durable, or stored
abort    ─► TxnDropped
"""

from __future__ import annotations

from itertools import islice

from shard.core import changes
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions import permissions
from shard.core.transactions.chunks import cost_of, memory_of
from shard.core.transactions.epochs import Epoch
from shard.core.transactions.state import REPLACED_MAX, Txns
from shard.core.transactions.writers import Writers, mark_of, may_create
from streams.protocol.errors import (
    BatchTooLarge,
    BoxNotFound,
    Throttled,
)
from streams.protocol.messages import bulk
from streams.protocol.model.names import quote

#: Most epochs and marks in one list.
_LISTED_MAX = 10_000

#: Most epochs that one tick drops.
_EXPIRED_MAX = 16


class TransactionHandlers:
    def __init__(self, context: Context, txns: Txns) -> None:
        self._context = context
        self._txns = txns
        self._writers = Writers(context, txns)
        context.on_command(bulk.TxnPut, self._put)
        context.on_command(bulk.TxnAbort, self._abort)
        context.on_command(bulk.TxnList, self._list)

    # -- putting

    def _put(self, command: bulk.TxnPut, now_ms: int, entries: LogEntries) -> Outcome:
        txns, txn = self._txns, command.txn
        marks, refusal = self._writers.marks_or_refusal(txn, command.caller, entries)
        if refusal is not None:
            return refusal
        commit_mark = mark_of(marks, txn.epoch)
        if commit_mark is not None:
            return self._writers.when_durable(bulk.TxnPutReply(True, False, 0), commit_mark.lsn, entries)
        others = txns.epochs_of_others(txn.writer, txn.query) if txn.reset else {}
        epoch = txns.find(txn.writer, txn.epoch) if txn.epoch not in others else None
        replaced_attempts: list[str] = []
        if epoch is not None and txn.attempt and txn.attempt != epoch.attempt:
            if txn.attempt in epoch.replaced_attempts:
                return self._writers.refuse_replaced_attempt(txn, entries)
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
            self._writers.owner_after(txn, command.caller),
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
        self._writers.check_marks(txn)

    def _check_names(self, command: bulk.TxnPut) -> None:
        """Refuse rows for a missing box that may not be created at once, not at the end of a job."""
        context = self._context
        for name in command.rows_head.boxes:
            if name not in context.boxes and not may_create(context, name, command.rows_head.create):
                raise BoxNotFound(f"box {name} does not exist; create it first", box=name)

    # -- dropping

    def _abort(self, command: bulk.TxnAbort, now_ms: int, entries: LogEntries) -> Outcome:
        txns, txn = self._txns, command.txn
        if command.forgets:
            return self._forget(command, entries)
        epoch = txns.find(txn.writer, txn.epoch)
        if epoch is None or txn.attempt in epoch.replaced_attempts:  # dropped already
            return Outcome(entries, bulk.TxnAbortReply(0, 0))
        if not permissions.may_abort(command.caller, epoch):
            refusal = self._writers.refuse_stranger(txn, command.caller, entries)
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
            refusal = self._writers.refuse_stranger(command.txn, caller, entries)
            if refusal is not None:
                return refusal
        before, parcels = txns.bytes, sum(len(epoch.parcels) for epoch in epochs.values())
        for number in epochs:
            self._context.log(changes.TxnDropped(writer, number), entries)
        has_mark = writer in txns.marks
        if has_mark:
            self._context.log(changes.TxnForgotten(writer), entries)
        reply = bulk.TxnAbortReply(parcels, before - txns.bytes, has_mark)
        return self._writers.when_durable(reply, self._context.lsn if entries else 0, entries)

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
        return self._writers.when_durable(state, lsn, entries)
