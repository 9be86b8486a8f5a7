"""What the machine does with transactions: takes rows in, commits, aborts, lets expire. State is in `txn.py`.

    put      ─► TxnHeld                                        answered when it is in the log file
    commit   ─► BoxCreated … SeqsReserved … TxnCommitted, and BatchKept for each batch
                ▲ all that can be refused is asked before        answered when it is on the disk
    abort    ─► TxnDropped

Rules of the file
- A commit is worked out in full before the first of its changes is made: what one box refuses, or what has to
  be fetched first, leaves everything as it was.
- A writer belongs to the key that put the first rows of its transaction: the key's id is in the log. Other
  keys can neither put, commit, abort nor list; an admin may abort, and take over what is left of a key.
- All boxes of a commit show it at once, when it is durable, whatever their class: a reader never sees a part
  of it that a crash could take back. What boxes in memory get is in no log, and is shown at once; what object
  boxes get is shown when it is in the store, and then the commit is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shard.core import changes
from shard.core.box import Box, stand_in
from shard.core.outcome import Made, Outcome
from shard.core.txn import MARKS_MAX, REPLACED_MAX, Epoch, Mark, batches_of, cost_of
from streams.protocol import bulk, forwards
from streams.protocol.access import ADMIN
from streams.protocol.errors import (
    BatchTooLarge,
    BoxNotFound,
    FencingTokenMismatch,
    Forbidden,
    NotFound,
    StreamsError,
    Throttled,
    WriterConflict,
)
from streams.protocol.names import shown
from streams.protocol.records import Batch, Columns

if TYPE_CHECKING:
    from shard.core.machine import Machine

#: Rows of several chunks become one batch until it has this many records or bytes: few batches read faster,
#: and none is so large that reading a little of it costs much.
_BATCH_RECORDS, _BATCH_BYTES = 4_000, 1 << 20

#: Epochs and marks that one list shows.
_LISTED_MAX = 10_000

#: Epochs that one tick lets expire.
_EXPIRED_MAX = 16


class _Planned(NamedTuple):
    """What a commit does to one box, before the box is made if it has to be."""

    name: str
    box: Box | None
    part: changes.TxnPart


class _Rows:
    """The rows of some parcels by box, taken apart when somebody asks for them. Most commits need not: what
    they do to a box follows from how many rows it gets."""

    def __init__(self, epoch: Epoch, parcels: list[str]) -> None:
        self._epoch = epoch
        self._parcels = parcels
        self._found: dict[str, list[Columns]] | None = None

    def of(self, box: str) -> list[Columns]:
        if self._found is None:
            self._found = self._epoch.rows(self._parcels)
        return self._found[box]


class Committing:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.handlers: dict[type[Any], Callable[[Any, int, Made], Outcome]] = {
            bulk.TxnPut: self._put,
            bulk.TxnCommit: self._commit,
            bulk.TxnAbort: self._abort,
            bulk.TxnList: self._list,
        }
        self.appliers = machine.txns.appliers

    # -- putting

    def _put(self, command: bulk.TxnPut, now_ms: int, made: Made) -> Outcome:
        txns, txn = self._machine.txns, command.txn
        marks, refusal = self._known(txn, command.caller, made)
        if refusal is not None:
            return refusal
        done = _done(marks, txn.epoch)
        if done is not None:
            return self._when_durable(bulk.Put(True, False, 0), done.lsn, made)
        others = txns.held_by_others(txn.writer, txn.query) if txn.reset else {}
        epoch = txns.find(txn.writer, txn.epoch) if txn.epoch not in others else None
        replaced: list[str] = []
        if epoch is not None and txn.attempt and txn.attempt != epoch.attempt:
            if txn.attempt in epoch.replaced:
                return self._replaced(txn, made)
            replaced = [*epoch.replaced, epoch.attempt][-REPLACED_MAX:]
            others[txn.epoch] = epoch
            epoch = None
        elif epoch is not None:
            replaced = epoch.replaced
        chunks = epoch.parcels.get(command.parcel, {}) if epoch is not None else {}
        if command.chunk in chunks:
            assert epoch is not None
            lsn = chunks[command.chunk].lsn
            waits_for = lsn if lsn > self._machine.logged_lsn else 0
            return Outcome(made, bulk.Put(False, True, epoch.bytes), waits_for)
        freed = sum(other.bytes for other in others.values())
        cost = cost_of(command.packed, command.body)
        self._check_bounds(txn, epoch, cost, freed)
        account = _account_of(command.caller)
        if account:
            self._machine.usage.require(account, "txn_bytes", cost - freed)
            self._machine.usage.require(account, "stored_bytes", len(command.body))
        self._check_names(command)
        was_others = any(other.query != txn.query for other in others.values())
        takes_over = was_others or any(mark.query != txn.query for mark in txns.marks.get(txn.writer, ()))
        for number in others:  # this query takes the writer over, or this attempt replaces another
            self._machine._log(changes.TxnDropped(txn.writer, number), made)
        change = changes.TxnHeld(
            txn.writer,
            txn.epoch,
            txn.query,
            command.parcel,
            command.chunk,
            now_ms,
            command.packed,
            command.body,
            self._owner_after(txn, command.caller),
            takes_over or (epoch is not None and epoch.takes_over),
            txn.attempt or (epoch.attempt if epoch is not None else ""),
            replaced,
        )
        lsn = self._machine._log(change, made)
        held = txns.find(txn.writer, txn.epoch)
        assert held is not None
        if command.rows is not None:
            txns.remember(held.parcels[command.parcel][command.chunk], command.rows)
        return Outcome(made, bulk.Put(False, False, held.bytes), lsn)

    def _replaced(self, txn: bulk.Txn, made: Made) -> Outcome:
        error = WriterConflict(
            f"attempt: {shown(txn.attempt)} of epoch {txn.epoch} of {shown(txn.writer)} was replaced by a "
            "later attempt, which has dropped its rows; end this one",
            writer=txn.writer,
            query=txn.query,
            epoch=txn.epoch,
        )
        return self._when_durable(error, self._machine.lsn, made)

    def _owner_after(self, txn: bulk.Txn, caller: bulk.Caller) -> str:
        """The key that the writer belongs to once this caller has put or committed something."""
        owners = self._machine.txns.owners_of(txn.writer)
        return min(owners) if owners and not txn.reset else caller.key_id

    def _refuse_stranger(self, txn: bulk.Txn, caller: bulk.Caller, made: Made) -> Outcome | None:
        """A refusal if the writer belongs to another key. A key that may do everything takes it over with
        `reset`."""
        grant = caller.grant
        if grant is None or not self._machine.txns.owners_of(txn.writer) - {caller.key_id}:
            return None
        if txn.reset and grant.scopes & ADMIN and not grant.prefixes:
            return None
        error = Forbidden(
            f"writer: {shown(txn.writer)} belongs to another key, which began its transaction; use that key, "
            "or another writer. A key with scope admin and without prefixes takes a writer over with reset",
            field="writer",
        )
        return self._when_durable(error, self._machine.lsn, made)

    def _known(self, txn: bulk.Txn, caller: bulk.Caller, made: Made) -> tuple[list[Mark], Outcome | None]:
        """The marks that count for this transaction, or a refusal: they are another key's or query's."""
        refusal = self._refuse_stranger(txn, caller, made)
        if refusal is not None:
            return [], refusal
        marks = self._machine.txns.marks.get(txn.writer, ())
        if not txn.reset:
            for mark in marks:
                if mark.query != txn.query:
                    return [], self._conflict(txn, mark.query, mark.epoch, mark.lsn, made)
            for number, epoch in self._machine.txns.held_by_others(txn.writer, txn.query).items():
                if epoch.takes_over:
                    return [], self._conflict(txn, epoch.query, number, self._machine.lsn, made)
        return [mark for mark in marks if mark.query == txn.query], None

    def _conflict(self, txn: bulk.Txn, query: str, epoch: int, lsn: int, made: Made) -> Outcome:
        error = WriterConflict(
            f"query: {shown(txn.writer)} was last used by {shown(query)} (epoch {epoch}), not by "
            f"{shown(txn.query)}; its epochs may mean something else. Use another writer, or say reset to "
            "take it over",
            writer=txn.writer,
            query=query,
            epoch=epoch,
        )
        return self._when_durable(error, lsn, made)

    def _when_durable(self, reply: bulk.BulkReply | StreamsError, lsn: int, made: Made) -> Outcome:
        """An answer that rests on a change of this lsn."""
        uploading = self._machine.uploading
        if uploading.is_on:  # it may have been of object boxes
            return Outcome(made, reply, uploading.rests_on(lsn), True, until_uploaded=True)
        return Outcome(made, reply, lsn if lsn > self._machine.durable_lsn else 0, True)

    def _check_bounds(self, txn: bulk.Txn, epoch: Epoch | None, size: int, freed: int) -> None:
        txns = self._machine.txns
        own = (epoch.bytes if epoch is not None else 0) + size
        if own > txns.bytes_max:
            raise BatchTooLarge(
                f"epoch {txn.epoch} of {shown(txn.writer)} would hold {own} bytes here, at most "
                f"{txns.bytes_max} can be held; split it into several epochs",
                limit=txns.bytes_max,
            )
        if txns.bytes - freed + size > txns.bytes_max:
            raise Throttled(
                f"{txns.bytes} bytes are held for transactions, at most {txns.bytes_max} can be; try again "
                "when some of them are committed, aborted or expired",
                limit="txn_bytes",
            )
        self._check_marks(txn)

    def _check_marks(self, txn: bulk.Txn) -> None:
        """Refuses a writer for whose mark there is no room. That of one that is used once always has some."""
        txns = self._machine.txns
        if not txn.once and txn.writer not in txns.marks and txns.marks_kept >= MARKS_MAX:
            raise Throttled(
                f"this shard knows {txns.marks_kept} transaction writers, which is its limit; use the name "
                "of a known writer, or forget those that are not used any more: streams txn forget",
                limit="txn_writers",
            )

    def _check_names(self, command: bulk.TxnPut) -> None:
        """A box that is not there and may not be made is told when its rows come, not at the end of a job."""
        machine = self._machine
        for name in command.packed.boxes:
            if name not in machine.boxes and not _may_create(machine, name, command.packed.create):
                raise BoxNotFound(f"box {name} does not exist and this write may not create it", box=name)

    # -- committing

    def _commit(self, command: bulk.TxnCommit, now_ms: int, made: Made) -> Outcome:
        machine, txn = self._machine, command.txn
        marks, refusal = self._known(txn, command.caller, made)
        if refusal is not None:
            return refusal
        done = _done(marks, txn.epoch)
        if done is not None:
            return self._when_durable(bulk.Committed(True, 0, []), done.lsn, made)
        self._check_marks(txn)
        parcels = [parcel for parcel, chunks in command.parcels if chunks]
        epoch = self._required(command)
        rows = _Rows(epoch, parcels)
        planned: list[_Planned] = []
        shapes = epoch.shapes(parcels)
        for name, shape in shapes.items():
            if any(_is_over(mark, name, txn.epoch) for mark in marks):
                continue  # the shard that had this box then has committed the epoch
            box: Box | None = machine.boxes.get(name)
            try:
                if box is None and not _may_create(machine, name, epoch.create_of(name)):
                    raise BoxNotFound(f"box {name} does not exist (any more)", box=name)
                planned.append(_Planned(name, box, self._plan(name, box, shape, rows, now_ms, made)))
            except StreamsError as error:
                if box is None:
                    raise
                return machine._answer(box, error.with_traceback(None), made, box.last_lsn)
        size = sum(count for shape in shapes.values() for _, count in shape)
        self._check_room(command, planned, size, now_ms)
        if command.dry:
            return Outcome(made, _told(planned))
        return self._make(command, parcels, planned, rows, now_ms, made)

    def _drop_later_others(self, txn: bulk.Txn, made: Made) -> None:
        """Drops later epochs that other queries hold: with the mark of this commit they are refused, and what
        is left of them must not be taken for rows of this query when it comes to these epochs."""
        for number in self._machine.txns.held_by_others(txn.writer, txn.query):
            if number > txn.epoch:
                self._machine._log(changes.TxnDropped(txn.writer, number), made)

    def _required(self, command: bulk.TxnCommit) -> Epoch:
        """What is held, if it is all that is named; that may be nothing."""
        epoch = self._machine.txns.find(command.txn.writer, command.txn.epoch) or Epoch(command.txn.query)
        for parcel, count in command.parcels:
            chunks = epoch.parcels.get(parcel, {})
            if sorted(chunks) != list(range(count)):
                raise NotFound(
                    f"parcel {shown(parcel)} of epoch {command.txn.epoch} of {shown(command.txn.writer)}: "
                    f"{len(chunks)} chunks are held, not {count}; it has expired or was never put. Write "
                    "the epoch again",
                    parcel=parcel,
                    chunks=len(chunks),
                )
        return epoch

    def _plan(
        self,
        name: str,
        box: Box | None,
        shape: Sequence[tuple[int, int]],
        rows: _Rows,
        now_ms: int,
        made: Made,
    ) -> changes.TxnPart:
        """What this commit would do to a box."""
        machine = self._machine
        if box is not None:
            machine._expire(box, now_ms, made)
            stands_for = box
        else:
            stands_for = stand_in(machine._plan_box(name, None, now_ms))
        if stands_for.fencing_token:
            raise FencingTokenMismatch(
                f"{name} is fenced by a token; a transaction has none", box=name, field="fencing_token"
            )
        log, timestamping = stands_for.log, stands_for.config.timestamping
        part = changes.TxnPart(
            stands_for.generation,
            name,
            _gathered(shape),
            log.head_seq + 1,
            log.last_ts,
            timestamping.mode,
            timestamping.uncapped,
        )
        config = stands_for.config
        if config.cap_records or config.cap_bytes or timestamping.mode != "arrival":
            batches = list(batches_of(part, rows.of(name), now_ms))
            if config.cap_records or config.cap_bytes:
                size = sum(batch.live_bytes for batch in batches)
                part.evict_before_seq = stands_for.fit(sum(part.counts), size)
                part.evict_cut_bytes = log.measure_before(part.evict_before_seq)
                part.evicted_ts = log.newest_ts_before(part.evict_before_seq)
        return part

    def _check_room(
        self, command: bulk.TxnCommit, planned: Sequence[_Planned], size: int, now_ms: int
    ) -> None:
        machine, account = self._machine, _account_of(command.caller)
        new = sum(each.box is None for each in planned)
        if account and new:
            machine.usage.require(account, "boxes", new)
        machine.require_room(account, size, now_ms, counts=not command.dry)
        if machine.boxes_max and len(machine.boxes) + new > machine.boxes_max:
            raise Throttled(
                f"there are {len(machine.boxes)} boxes already, and {new} more would be needed; delete some "
                "or raise the limit",
                limit="boxes",
            )

    def _make(
        self,
        command: bulk.TxnCommit,
        parcels: list[str],
        planned: Sequence[_Planned],
        rows: _Rows,
        now_ms: int,
        made: Made,
    ) -> Outcome:
        machine, txn = self._machine, command.txn
        stored: list[tuple[Box, changes.TxnPart]] = []
        in_memory: list[tuple[Box, list[Batch], changes.TxnPart]] = []
        for name, box, part in planned:
            if box is None:
                created = machine._plan_box(name, None, now_ms)
                machine._log(created, made)
                part.generation = created.generation
                box = machine.generations[created.generation]
            if box.is_memory:
                in_memory.append((box, list(batches_of(part, rows.of(name), now_ms)), part))
                continue
            machine._reserve(box, part.first_seq + sum(part.counts) - 1, made)
            stored.append((box, part))
        self._drop_later_others(txn, made)
        parts = [part for _, part in stored]
        owner = self._owner_after(txn, command.caller)
        lsn = machine._log(
            changes.TxnCommitted(
                txn.writer, txn.epoch, txn.query, now_ms, parcels, parts, owner, self._once_after(txn)
            ),
            made,
        )
        for box, _ in stored:
            machine._show_when_durable(lsn, box)
            machine._watch(box)
        for kept in machine.txns.take_unkept():
            machine._log(kept, made)
        wakes = self._append_in_memory(in_memory, now_ms, made)
        until_uploaded = any(box.is_object for box, _ in stored)
        return Outcome(
            made, _told(planned), lsn, True, tuple(wakes), until_uploaded=until_uploaded, afterthoughts=True
        )

    def _once_after(self, txn: bulk.Txn) -> bool:
        """Whether the mark may expire: not if the writer had one that does not."""
        return txn.once and all(mark.once for mark in self._machine.txns.marks.get(txn.writer, ()))

    def _append_in_memory(
        self, boxes: Sequence[tuple[Box, list[Batch], changes.TxnPart]], now_ms: int, made: Made
    ) -> list[str]:
        machine = self._machine
        wakes: list[str] = []
        for box, batches, part in boxes:
            cuts = (0, part.evict_before_seq, 0, part.evict_cut_bytes, part.evicted_ts)
            for batch in batches:
                machine._stage(changes.BatchAppended(box.generation, batch, now_ms, None, *cuts), box, made)
                cuts = (0, 0, 0, 0, 0)
            wakes.append(box.name)
            if box.outboxes and machine.forwarding.note(box):
                wakes.append(forwards.CARRIER)
        return wakes

    # -- dropping

    def _abort(self, command: bulk.TxnAbort, now_ms: int, made: Made) -> Outcome:
        txns, txn = self._machine.txns, command.txn
        if command.forgets:
            return self._forget(command, made)
        epoch = txns.find(txn.writer, txn.epoch)
        if epoch is None:
            return Outcome(made, bulk.Aborted(0, 0))
        if not _may_abort(command.caller, epoch):
            refusal = self._refuse_stranger(txn, command.caller, made)
            if refusal is not None:
                return refusal
        parcels = [each for each in epoch.parcels if not command.parcels or each in set(command.parcels)]
        before = txns.bytes
        if not parcels:
            return Outcome(made, bulk.Aborted(0, 0))
        named = parcels if len(parcels) < len(epoch.parcels) else []
        lsn = self._machine._log(changes.TxnDropped(txn.writer, txn.epoch, named), made)
        return Outcome(made, bulk.Aborted(len(parcels), before - txns.bytes), lsn)

    def _forget(self, command: bulk.TxnAbort, made: Made) -> Outcome:
        """Drops all that is held for the writer, and its mark."""
        txns, writer, caller = self._machine.txns, command.txn.writer, command.caller
        known = txns.of_writer(writer)
        if not _is_admin_of_all(caller):
            refusal = self._refuse_stranger(command.txn, caller, made)
            if refusal is not None:
                return refusal
        before, parcels = txns.bytes, sum(len(epoch.parcels) for epoch in known.values())
        for number in known:
            self._machine._log(changes.TxnDropped(writer, number), made)
        is_known = writer in txns.marks
        if is_known:
            self._machine._log(changes.TxnForgotten(writer), made)
        reply = bulk.Aborted(parcels, before - txns.bytes, is_known)
        return self._when_durable(reply, self._machine.lsn if made else 0, made)

    def tick(self, now_ms: int, made: Made) -> None:
        """Drops what nobody has put to for too long."""
        for _ in range(_EXPIRED_MAX):
            expired = self._machine.txns.expired(now_ms)
            if expired is None:
                return
            self._machine._log(changes.TxnDropped(*expired), made)

    # -- telling

    def _list(self, command: bulk.TxnList, now_ms: int, made: Made) -> Outcome:
        txns, caller = self._machine.txns, command.caller
        held = [
            bulk.Held(
                writer,
                number,
                epoch.query,
                len(epoch.parcels),
                sum(map(len, epoch.parcels.values())),
                sum(chunk.records for chunk in epoch.chunks()),
                epoch.bytes,
                epoch.put_ms + txns.ttl_ms,
            )
            for (writer, number), epoch in sorted(txns.epochs.items())
            if writer.startswith(command.prefix) and _may_list(caller, epoch.owner)
        ]
        marks = [
            bulk.Mark(writer, mark.epoch, mark.query, mark.at_ms, bool(mark.slots), bool(mark.once))
            for writer, known in sorted(txns.marks.items())
            if writer.startswith(command.prefix)
            for mark in known
            if _may_list(caller, mark.owner)
        ]
        more = max(len(held), len(marks)) > _LISTED_MAX
        lsn = max((mark.lsn for known in txns.marks.values() for mark in known), default=0)
        return self._when_durable(bulk.TxnState(held[:_LISTED_MAX], marks[:_LISTED_MAX], more), lsn, made)


def _account_of(caller: bulk.Caller) -> str:
    """The key whose limits count; none for processes of the server's own user."""
    return "" if caller.grant is None else caller.key_id


def _is_admin_of_all(caller: bulk.Caller) -> bool:
    grant = caller.grant
    return grant is None or (bool(grant.scopes & ADMIN) and not grant.prefixes)


def _may_list(caller: bulk.Caller, owner: str | None) -> bool:
    is_admin = caller.grant is None or bool(caller.grant.scopes & ADMIN)
    return is_admin or owner is None or owner == caller.key_id


def _may_abort(caller: bulk.Caller, epoch: Epoch) -> bool:
    """Whether an admin of all its boxes asks. Its owner may too, which is looked at elsewhere."""
    grant = caller.grant
    if grant is None:
        return True
    boxes = (box for chunk in epoch.chunks() for box in chunk.packed.boxes)
    return bool(grant.scopes & ADMIN) and all(map(grant.covers, boxes))


def _told(planned: Sequence[_Planned]) -> bulk.Committed:
    told = [
        (each.name, each.part.first_seq, each.part.first_seq + sum(each.part.counts) - 1) for each in planned
    ]
    return bulk.Committed(False, sum(sum(each.part.counts) for each in planned), told)


def _done(marks: Sequence[Mark], epoch: int) -> Mark | None:
    """The mark that says that all of this epoch was committed."""
    return next((mark for mark in marks if not mark.slots and mark.epoch >= epoch), None)


def _is_over(mark: Mark, box: str, epoch: int) -> bool:
    return mark.epoch >= epoch and mark.covers(box)


def _may_create(machine: Machine, name: str, create: bool | None) -> bool:
    return name not in machine.not_recreated if create is None else create


def _gathered(shape: Sequence[tuple[int, int]]) -> list[int]:
    """How many records each batch has that these pieces become. A piece is never torn apart."""
    counts: list[int] = []
    size = 0
    for count, piece_bytes in shape:
        if not counts or size + piece_bytes > _BATCH_BYTES or counts[-1] + count > _BATCH_RECORDS:
            counts.append(0)
            size = 0
        counts[-1] += count
        size += piece_bytes
    return counts
