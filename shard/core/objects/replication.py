"""Selects the changes to upload to the object store, and tracks their progress: for boxes of class `object`.

    apply(change) ─► note: does it concern an object box? ─► pending ─► group ─► (an object in the store)
                                                                ▲                       │
    position: uploads are complete up to here       on_upload ──┴── UploadsMoved ◄──────┘

The store contains a *chain*: a base, which is all object boxes as of one lsn, and after it the changes of
these boxes, in the order of the log. `engine/object_uploader.py` uploads both, and
`transfer/object_chains.py` reads them back.

A change is pending from its application until the uploader reports that it is in the store. This holds across
a crash: recovery applies the same changes, and `UploadsMoved` in the log says which of them were uploaded.
Where single changes cannot be tracked, a base is required (`needs_base_lsn`), and no later change counts as
uploaded before that base is in the store: a box that changes into the class, a shard without a chain, a
snapshot that was taken while changes were pending, too many pending changes.

Rules of the file
- It decides which changes are uploaded, never when; it does not access the store.
- Segments and pending rows of transactions are local and are not uploaded. A commit is uploaded as its
  batches and its mark.

Invariants
- POSITION: `position` never goes back, and nothing that is pending lies at or below it.
- SHOWN: a record of an object box is visible only if its change is at or below the reported position.

Bounds: commands are refused at `backlog_bytes_max`. Changes by timers continue; at twice that limit, or at
twice `PENDING_MAX`, a base replaces all pending changes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.changes import Change
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import ColdStoreUnavailable, StreamsError, Throttled
from streams.protocol.messages.bulk import TxnCommit
from streams.protocol.messages.commands import Append, Command, PutBox

#: Changes that wait for the store. Each takes about 200 bytes; its batch is in memory anyway.
PENDING_MAX = 200_000

#: Approximate bytes of a change without records in an object.
_CHANGE_BYTES = 256

#: Changes that are local to this disk and are not uploaded.
_LOCAL = frozenset(
    {
        changes.SegmentSealed,
        changes.SegmentsReplaced,
        changes.SegmentMoved,
        changes.BatchKept,
        changes.BoxRestated,
        changes.SeqsReserved,
        changes.SeqsLost,
        changes.ShardStarted,
        changes.ShardStopped,
        changes.ShardRested,
        changes.TxnHeld,
        changes.TxnKept,
        changes.TxnDropped,
        changes.TxnForgotten,
        changes.TxnRendered,
        changes.TxnCommitted,  # `Txns` ships its batches
        changes.UploadsMoved,
    }
)
#: Changes of registries: they belong to no box, and every shard with a chain uploads them.
_REGISTERS = frozenset(
    {
        changes.RouterRegistered,
        changes.RouterDropped,
        changes.BasinRegistered,
        changes.BasinDropped,
        changes.TokenIssued,
        changes.TokenRevoked,
    }
)
#: Changes that can be the first one of an object box.
OPENING = frozenset({changes.BoxCreated, changes.StreamCreated, changes.BoxConfigured})


class Pending(NamedTuple):
    lsn: int
    change: Change
    size: int


class Uploading:
    def __init__(
        self,
        context: Context,
        *,
        is_enabled: bool,
        registers: bool,
        backlog_bytes_max: int,
    ) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        #: True if the server has an object store.
        self.is_enabled = is_enabled
        #: True if a reply about a registry (basins, tokens, routers) waits for the store too.
        self.registers = registers and is_enabled
        self.backlog_bytes_max = backlog_bytes_max
        #: Why the configured store cannot be used; empty while it can.
        self.refusal = ""
        #: Logged, and in snapshots: the chain of this shard, and the servers whose chains it replaces.
        #: Uploads are complete up to `lsn`; the last object, or base, ends at `tail_lsn`.
        self.chain = ""
        self.follows: list[str] = []
        self.lsn = 0
        self.tail_lsn = 0
        #: Derived: recovery notes the changes of the log again, and a snapshot in place of changes asks for a
        #: base. Changes that are not uploaded, and by name the lsn of the deletion of an object box.
        self._pending: deque[Pending] = deque()
        self.pending_bytes = 0
        self._deletion_lsns: dict[str, int] = {}
        self.needs_base_lsn = 0
        self._restored_lsn = 0
        #: Derived: True if there are uploads, or ever were.
        self.is_on = False
        #: Volatile: boxes whose readers an upload has to wake.
        self._wakes: list[str] = []
        context.on_change(changes.UploadsMoved, self._apply_moved)
        context.observe_before(OPENING, self._note_first)
        if self.registers:
            self._turn_on()

    def __repr__(self) -> str:
        return f"<Uploading {self.chain or 'nothing yet'}: at {self.lsn}, {len(self._pending)} changes to go>"

    # -- progress

    @property
    def position(self) -> int:
        """The lsn up to which changes of object boxes survive the loss of this machine."""
        position = self._context.durability.durable_lsn
        if not self.is_enabled:
            return position  # without a store there are no new changes of object boxes
        if self.needs_base_lsn:
            position = min(position, self.needs_base_lsn - 1)
        if self._pending:
            position = min(position, self._pending[0].lsn - 1)
        return position

    def settled_lsn(self, lsn: int) -> int:
        """Return the uploaded position, at most `lsn`, which may not be durable yet."""
        if self.needs_base_lsn:
            lsn = min(lsn, self.needs_base_lsn - 1)
        return min(lsn, self._pending[0].lsn - 1) if self._pending else lsn

    def deletion_of(self, name: str) -> int:
        """Return the lsn of the deletion that a not-found reply must wait for; 0 = none."""
        lsn = self._deletion_lsns.get(name, 0)
        return lsn if lsn > self.position else 0

    @property
    def has_work(self) -> bool:
        """True if a durable change or a base can be uploaded now."""
        if not self.is_enabled:
            return False
        return bool(self.needs_base_lsn) or bool(
            self._pending and self._pending[0].lsn <= self._context.durability.durable_lsn
        )

    def group(self, bytes_max: int) -> list[Pending]:
        """Return the oldest changes that are durable here, about `bytes_max` of them. Changes of one lsn stay
        together."""
        changes_to_upload: list[Pending] = []
        size = 0
        for each in self._pending:
            if each.lsn > self._context.durability.durable_lsn or 0 < self.needs_base_lsn <= each.lsn:
                break
            if size >= bytes_max and each.lsn != changes_to_upload[-1].lsn:
                break
            changes_to_upload.append(each)
            size += each.size
        return changes_to_upload

    # -- admission

    def refuses(self, command: Command) -> StreamsError | None:
        """Return the error for a write that the store cannot accept now, or None."""
        if not self._concerns(command):
            return None
        if not self.is_enabled:
            return _no_store("this server has none: set STREAMS_COLD_DIR")
        if self.refusal:
            return self.refusal_error()
        if self.pending_bytes > self.backlog_bytes_max or len(self._pending) > PENDING_MAX:
            return Throttled(
                f"{self.pending_bytes} bytes wait for upload to the object store; retry later",
                limit="object_backlog",
            )
        return None

    def refusal_error(self) -> StreamsError | None:
        """Return the error for replies that wait for a store that cannot be used, or None."""
        return _no_store(self.refusal) if self.refusal else None

    def _concerns(self, command: Command) -> bool:
        box = self._context.boxes.get(getattr(command, "box", ""))
        if box is not None and box.is_object:
            return True
        if not self.is_enabled:
            return False  # creating a box of the class fails elsewhere
        if isinstance(command, TxnCommit):
            return True
        if isinstance(command, PutBox):
            return command.patch.durability == "object"
        if isinstance(command, Append) and box is None:
            return command.config is not None and command.config.durability == "object"
        return False

    # -- noting

    def _turn_on(self) -> None:
        if not self.is_on:
            self.is_on = True
            self._context.before_apply.append(self.note)

    def _note_first(self, change: Change, lsn: int) -> None:
        if not self.is_on:
            self.note(change, lsn)

    def note(self, change: Change, lsn: int) -> None:
        """Ship a change of an object box or a registry before it is applied."""
        if not lsn or type(change) in _LOCAL:
            return
        if type(change) in _REGISTERS:
            self.ship(change, lsn)
            return
        box = self._context.generations.get(change.generation)  # type: ignore[union-attr]
        was_object = box is not None and box.is_object
        becomes_object = getattr(getattr(change, "config", None), "durability", "") == "object"
        if was_object or (becomes_object and box is None):
            self.ship(change, lsn)
            if type(change) is changes.BoxDeleted and box is not None:
                self._deletion_lsns[box.name] = lsn
        elif becomes_object:
            self._turn_on()
            self.require_base(lsn)

    def ship(self, change: Change, lsn: int) -> None:
        self._turn_on()
        if not self.chain or not self.is_enabled:
            self.require_base(lsn)
        if not self.is_enabled:
            return
        batch = getattr(change, "batch", None)
        size = _CHANGE_BYTES + (len(batch.blob) if batch is not None else 0)
        size += sum(len(content) for _, content in getattr(change, "outputs", ()))
        self._pending.append(Pending(lsn, change, size))
        self.pending_bytes += size
        if self.pending_bytes > 2 * self.backlog_bytes_max or len(self._pending) > 2 * PENDING_MAX:
            self.require_base(self._pending[0].lsn)
            self._pending.clear()
            self.pending_bytes = 0

    def require_base(self, lsn: int) -> None:
        """Require a base: changes from `lsn` on count as uploaded only with it."""
        self.needs_base_lsn = min(self.needs_base_lsn or lsn, lsn)

    def begin_anew(self) -> None:
        """Start a new chain with a base, because the store does not have the current one."""
        self.chain = ""
        self.require_base(self._context.lsn + 1)

    def stage(self, box: Box, lsn: int) -> None:
        """Show the current records of the box to readers when `lsn` is in the store."""
        self._context.durability.show_when_stored(box, lsn, box.log.head_seq, box.log.last_ts)

    def stage_upto(self, box: Box, lsn: int, seq: int) -> None:
        """Show the records up to `seq` when `lsn` is in the store: later rows are rendered later."""
        last = next(iter(box.log.spans(seq)), None)
        ts = box.log.last_ts if last is None else last.last_ts
        self._context.durability.show_when_stored(box, lsn, seq, ts)

    # -- completed uploads

    def on_upload(self, chain: str, lsn: int, *, is_base: bool) -> Outcome:
        """Log that an object of the chain that ends at `lsn`, or a base as of it, is in the store."""
        entries: LogEntries = []
        context = self._context
        needs_base = self.needs_base_lsn > lsn or (self.needs_base_lsn > 0 and not is_base)
        through = next((each.lsn - 1 for each in self._pending if each.lsn > lsn), context.lsn)
        if needs_base:
            through = min(through, self.needs_base_lsn - 1)
        tail_lsn = max(lsn, self.tail_lsn) if chain == self.chain else lsn
        context.log(changes.UploadsMoved(chain, max(through, lsn), tail_lsn, is_base), entries)
        wakes, self._wakes = self._wakes, []
        wakes += context.moves.on_upload(self.lsn)
        return Outcome(entries, None, wakes=tuple(wakes))

    def _apply_moved(self, change: changes.UploadsMoved, lsn: int) -> None:
        self._turn_on()
        self.chain = change.chain
        self.lsn = change.lsn
        self.tail_lsn = change.tail_lsn
        if change.is_base and self.needs_base_lsn <= change.lsn:
            self.needs_base_lsn = 0
        while self._pending and self._pending[0].lsn <= change.lsn:
            self.pending_bytes -= self._pending.popleft().size
        for name in [name for name, at in self._deletion_lsns.items() if at <= change.lsn]:
            del self._deletion_lsns[name]
        self._wakes = self._context.durability.on_stored(change.lsn)

    # -- snapshots and start

    def _take_snapshot(self, state: ShardState) -> None:
        state.chain = self.chain
        state.uploaded_lsn = self.settled_lsn(state.lsn) if self.is_on else 0
        state.uploaded_tail_lsn = self.tail_lsn
        state.follows = list(self.follows)

    def _restore(self, state: ShardState) -> None:
        """Restore a snapshot after its boxes. Boxes that may not be uploaded completely depend on the lsn of
        the whole snapshot."""
        self.chain, self.follows = state.chain, list(state.follows)
        self.lsn, self.tail_lsn = state.uploaded_lsn, state.uploaded_tail_lsn
        self._restored_lsn = state.lsn
        objects = [box for box in self._context.boxes.values() if box.is_object]
        if self.chain or self.follows or objects:
            self._turn_on()
        if self.lsn >= state.lsn:
            return
        for box in objects:
            box.last_lsn = box.floor_lsn = box.config_lsn = state.lsn
            self.stage(box, state.lsn)
            self._context.moves.delay_until_upload(box, state.lsn)

    def start(self) -> None:
        """Require a base at start if changes before the snapshot are not uploaded."""
        if self.is_on and (not self.chain or self.lsn < self._restored_lsn):
            self.require_base(self.lsn + 1)
        self._context.moves.on_upload(self.lsn)

    def check(self) -> None:
        """Asserts POSITION: pending changes are in the order of the log, above what is stored. For tests."""
        lsns = [each.lsn for each in self._pending]
        assert lsns == sorted(lsns), "POSITION"
        assert not lsns or lsns[0] > self.lsn, "POSITION"
        assert self.pending_bytes == sum(each.size for each in self._pending), "POSITION"
        assert self.position <= self._context.durability.durable_lsn, "POSITION"


def _no_store(why: str) -> ColdStoreUnavailable:
    return ColdStoreUnavailable(f"boxes of class object need an object store: {why}")
