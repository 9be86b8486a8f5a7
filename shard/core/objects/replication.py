"""What of the log must be in the object store, and how far that is: for boxes of class `object`.

    apply(change) ─► note: does it concern an object box? ─► pending ─► group ─► (an object in the store)
                                                                ▲                       │
    position: all that must be there is, up to here     moved ──┴── UploadsMoved ◄──────┘

What is in the store is a *chain*: a base, which is all object boxes as of one lsn, and after it the changes
that concern them, in the order of the log. `engine/object_uploader.py` uploads both, and
`transfer/object_chains.py` reads them back.

A change is pending from the moment it is applied until it is told that it is in the store. So is what a crash
left: recovery applies the same changes, and `UploadsMoved` in the log says which of them had arrived. Where
that cannot be said change by change, a base is asked for (`needs_base_lsn`), and nothing from there on
counts as uploaded before it is there: a box that has come into the class, a shard that has no chain yet, a
snapshot that was taken while something was pending, more pending than there should be.

Rules of the file
- It decides what is put into the store and never when; it knows no store.
- Segments and what is held for transactions are this disk's own business and are not uploaded. A commit goes
  up as the batches that it made, and its mark.

Invariants
- POSITION: `position` never goes back, and nothing that is pending lies at or below it.
- SHOWN: a record of an object box is visible only if its change is at or below what was told to have moved.

Bounds: commands are refused at `backlog_bytes_max`; what time alone brings about goes on, and is given up in
favour of a base at twice that, or at `PENDING_MAX`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.changes import Change, ShardState
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from streams.protocol.errors import ColdStoreUnavailable, StreamsError, Throttled
from streams.protocol.messages.bulk import TxnCommit
from streams.protocol.messages.commands import Append, Command, PutBox

#: Changes that wait for the store. Each costs some 200 bytes beside the batch, which is in memory anyway.
PENDING_MAX = 200_000

#: What a change without records takes in an object, about.
_CHANGE_BYTES = 256

#: Facts about this disk, or about what the store is not told of.
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
        changes.TxnCommitted,  # `Txns` ships what it comes to
        changes.UploadsMoved,
    }
)
#: What belongs to no box, and is uploaded by every shard that has a chain.
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
#: What can be the first change that concerns the store.
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
        #: Whether there is a store.
        self.is_enabled = is_enabled
        #: Whether an answer about a register (of basins, tokens, routers) waits for the store too.
        self.registers = registers and is_enabled
        self.backlog_bytes_max = backlog_bytes_max
        #: Why the store cannot be used although there is one; empty while it can.
        self.refusal = ""
        #: Whether there is anything to upload, or ever was.
        self.is_on = False
        #: The chain that this shard writes, and of which server the chains are that it takes the place of.
        self.chain = ""
        self.follows: list[str] = []
        #: All that must be in the store up to here is there; its last object, or base, ends at `tail_lsn`.
        self.lsn = 0
        self.tail_lsn = 0
        self.needs_base_lsn = 0
        self._pending: deque[Pending] = deque()
        self.pending_bytes = 0
        #: Names of object boxes whose deletion is on its way there.
        self._deleted: dict[str, int] = {}
        self._woken: list[str] = []
        self._restored_lsn = 0
        context.on_change(changes.UploadsMoved, self._apply_moved)
        context.observe_before(OPENING, self._note_first)
        if self.registers:
            self._turn_on()

    def __repr__(self) -> str:
        return f"<Uploading {self.chain or 'nothing yet'}: at {self.lsn}, {len(self._pending)} changes to go>"

    # -- how far it is

    @property
    def position(self) -> int:
        """Whatever rests on this lsn, or on an earlier one, cannot be lost with this machine."""
        position = self._context.durability.durable_lsn
        if not self.is_enabled:
            return position  # nothing is written to object boxes, and what is there is as safe as it will be
        if self.needs_base_lsn:
            position = min(position, self.needs_base_lsn - 1)
        if self._pending:
            position = min(position, self._pending[0].lsn - 1)
        return position

    def settled_lsn(self, lsn: int) -> int:
        """How far it is of `lsn`, which may not be durable yet."""
        if self.needs_base_lsn:
            lsn = min(lsn, self.needs_base_lsn - 1)
        return min(lsn, self._pending[0].lsn - 1) if self._pending else lsn

    def deletion_of(self, name: str) -> int:
        """What an answer waits for that says of a box that it is not there; 0 = nothing of this kind."""
        lsn = self._deleted.get(name, 0)
        return lsn if lsn > self.position else 0

    @property
    def has_work(self) -> bool:
        """Whether there is something that could be put into the store now."""
        if not self.is_enabled:
            return False
        return bool(self.needs_base_lsn) or bool(
            self._pending and self._pending[0].lsn <= self._context.durability.durable_lsn
        )

    def group(self, bytes_max: int) -> list[Pending]:
        """The oldest changes that are durable here, about so many bytes of them. Changes of one lsn are one
        fact, and stay together."""
        found: list[Pending] = []
        size = 0
        for each in self._pending:
            if each.lsn > self._context.durability.durable_lsn or 0 < self.needs_base_lsn <= each.lsn:
                break
            if size >= bytes_max and each.lsn != found[-1].lsn:
                break
            found.append(each)
            size += each.size
        return found

    # -- admission

    def refuses(self, command: Command) -> StreamsError | None:
        """Whether a command that writes has to be turned away because of the store."""
        if not self._concerns(command):
            return None
        if not self.is_enabled:
            return _no_store("there is none: set STREAMS_COLD_DIR")
        if self.refusal:
            return self.stuck()
        if self.pending_bytes > self.backlog_bytes_max or len(self._pending) > PENDING_MAX:
            return Throttled(
                f"{self.pending_bytes} bytes wait for the object store; try again when it has taken some",
                limit="object_backlog",
            )
        return None

    def stuck(self) -> StreamsError | None:
        """What to tell those who would have to wait for a store that is not to be used."""
        return _no_store(self.refusal) if self.refusal else None

    def _concerns(self, command: Command) -> bool:
        box = self._context.boxes.get(getattr(command, "box", ""))
        if box is not None and box.is_object:
            return True
        if not self.is_enabled:
            return False  # whoever asks for the class is told by the one who makes boxes
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
        """A change is about to be applied."""
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
                self._deleted[box.name] = lsn
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
        self._pending.append(Pending(lsn, change, size))
        self.pending_bytes += size
        if self.pending_bytes > 2 * self.backlog_bytes_max or len(self._pending) > 2 * PENDING_MAX:
            self.require_base(self._pending[0].lsn)
            self._pending.clear()
            self.pending_bytes = 0

    def require_base(self, lsn: int) -> None:
        """Changes from `lsn` on are not in the store before a base is that has them."""
        self.needs_base_lsn = min(self.needs_base_lsn or lsn, lsn)

    def begin_anew(self) -> None:
        """The store does not have the chain: what comes from now on needs another, with a base."""
        self.chain = ""
        self.require_base(self._context.lsn + 1)

    def stage(self, box: Box, lsn: int) -> None:
        """What the box has now is for its readers when `lsn` is in the store."""
        self._context.durability.show_when_stored(box, lsn, box.log.head_seq, box.log.last_ts)

    def stage_upto(self, box: Box, lsn: int, seq: int) -> None:
        """The same of what the box has up to `seq`, of rows that were rendered later than others."""
        last = next(iter(box.log.spans(seq)), None)
        ts = box.log.last_ts if last is None else last.last_ts
        self._context.durability.show_when_stored(box, lsn, seq, ts)

    # -- what has arrived

    def moved(self, chain: str, lsn: int, *, is_base: bool) -> Outcome:
        """An object of the chain that ends at `lsn` is in the store, or a base as of it."""
        entries: LogEntries = []
        context = self._context
        needs_base = self.needs_base_lsn > lsn or (self.needs_base_lsn > 0 and not is_base)
        through = next((each.lsn - 1 for each in self._pending if each.lsn > lsn), context.lsn)
        if needs_base:
            through = min(through, self.needs_base_lsn - 1)
        tail_lsn = max(lsn, self.tail_lsn) if chain == self.chain else lsn
        context.log(changes.UploadsMoved(chain, max(through, lsn), tail_lsn, is_base), entries)
        woken, self._woken = self._woken, []
        woken += context.moves.on_upload(self.lsn)
        return Outcome(entries, None, wakes=tuple(woken))

    def _apply_moved(self, change: changes.UploadsMoved, lsn: int) -> None:
        self._turn_on()
        self.chain = change.chain
        self.lsn = change.lsn
        self.tail_lsn = change.tail_lsn
        if change.is_base and self.needs_base_lsn <= change.lsn:
            self.needs_base_lsn = 0
        while self._pending and self._pending[0].lsn <= change.lsn:
            self.pending_bytes -= self._pending.popleft().size
        for name in [name for name, deleted in self._deleted.items() if deleted <= change.lsn]:
            del self._deleted[name]
        self._woken = self._context.durability.on_stored(change.lsn)

    # -- lives

    def _take_snapshot(self, state: ShardState) -> None:
        state.chain = self.chain
        state.uploaded_lsn = self.settled_lsn(state.lsn) if self.is_on else 0
        state.uploaded_tail_lsn = self.tail_lsn
        state.follows = list(self.follows)

    def _restore(self, state: ShardState) -> None:
        """Takes over a snapshot, when its boxes are there. What of them is not known to be in the store is
        taken to rest on all that the snapshot holds."""
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
        """A life begins: whatever cannot be uploaded change by change needs a base."""
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
    return ColdStoreUnavailable(f"boxes of class object need the object store, and {why}")
