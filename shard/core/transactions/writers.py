"""Decides who may use a transaction writer: its key, its query, its attempt.

A writer belongs to the key that put the first rows of its transaction: the key's id is in the log. Other keys
can neither put, commit, abort nor list; an admin may abort, and take over the writers of another key.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions.state import MARKS_MAX, Mark, Txns
from streams.protocol.access.grants import ADMIN
from streams.protocol.errors import (
    Forbidden,
    StreamsError,
    Throttled,
    WriterConflict,
)
from streams.protocol.messages import bulk
from streams.protocol.model.names import quote


class Writers:
    def __init__(self, context: Context, txns: Txns) -> None:
        self._context = context
        self._txns = txns

    def marks_or_refusal(
        self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries
    ) -> tuple[list[Mark], Outcome | None]:
        """Return the marks of this writer and query, or a refusal if another key or query owns the writer."""
        refusal = self.refuse_stranger(txn, caller, entries)
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

    def refuse_replaced_attempt(self, txn: bulk.Txn, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"attempt: {quote(txn.attempt)} of epoch {txn.epoch} of {quote(txn.writer)} was replaced by a "
            "later attempt, which has dropped its rows; end this one",
            writer=txn.writer,
            query=txn.query,
            epoch=txn.epoch,
        )
        return self.when_durable(error, self._context.lsn, entries)

    def owner_after(self, txn: bulk.Txn, caller: bulk.Caller) -> str:
        """Return the key that owns the writer after a put or commit of this caller."""
        owners = self._txns.owners_of(txn.writer)
        return min(owners) if owners and not txn.reset else caller.key_id

    def refuse_stranger(self, txn: bulk.Txn, caller: bulk.Caller, entries: LogEntries) -> Outcome | None:
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
        return self.when_durable(error, self._context.lsn, entries)

    def _conflict(self, txn: bulk.Txn, query: str, epoch: int, lsn: int, entries: LogEntries) -> Outcome:
        error = WriterConflict(
            f"query: {quote(txn.writer)} was last used by {quote(query)} (epoch {epoch}), not by "
            f"{quote(txn.query)}; the epoch numbers of two queries must not mix. Use another writer, or set "
            "reset to take it over",
            writer=txn.writer,
            query=query,
            epoch=epoch,
        )
        return self.when_durable(error, lsn, entries)

    def when_durable(self, reply: bulk.BulkReply | StreamsError, lsn: int, entries: LogEntries) -> Outcome:
        """Reply when the change of this lsn is durable."""
        return reply_after(self._context.durability.wait_for_transaction(lsn), entries, reply)

    def check_marks(self, txn: bulk.Txn) -> None:
        """Refuse a new writer when the shard is at its limit of marks. Writers used once always have room."""
        txns = self._txns
        if not txn.once and txn.writer not in txns.marks and txns.permanent_marks >= MARKS_MAX:
            raise Throttled(
                f"this shard remembers {txns.permanent_marks} transaction writers, which is its limit; use "
                "an existing writer, or remove writers that are no longer used: streams txn forget",
                limit="txn_writers",
            )


def mark_of(marks: Sequence[Mark], epoch: int) -> Mark | None:
    """Return the mark that covers all of this epoch, if it is committed."""
    return next((mark for mark in marks if not mark.slots and mark.epoch >= epoch), None)


def may_create(context: Context, name: str, create: bool | None) -> bool:
    return name not in context.not_recreated if create is None else create
