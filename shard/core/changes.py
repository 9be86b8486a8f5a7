"""The closed list of facts the log can hold. Adding one means a kind, a version and a line in formats.md.

A change is what *happened*, worked out in full: applying it asks no question whose answer could differ
later (no clock, no cap arithmetic, no tag look-up). So a replayed log ends where the live machine stood.

A box is named by its generation, the number it was given when it was created; names are for people.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pyroaring import BitMap64

from shard.core.queue_changes import JobEntry as JobEntry
from shard.core.queue_changes import JobsCounted as JobsCounted
from shard.core.queue_changes import JobsExtended as JobsExtended
from shard.core.queue_changes import JobsLeased as JobsLeased
from shard.core.queue_changes import JobsReprioritized as JobsReprioritized
from shard.core.queue_changes import JobsRescheduled as JobsRescheduled
from shard.core.queue_changes import JobsRestated as JobsRestated
from shard.core.queue_changes import JobsReturned as JobsReturned
from shard.core.queue_changes import LineFacts as LineFacts
from shard.core.queue_changes import MovesDone as MovesDone
from shard.core.queue_changes import MovesPlanned as MovesPlanned
from shard.core.queue_changes import OutputFacts as OutputFacts
from shard.core.queue_changes import OutputsDelivered as OutputsDelivered
from shard.core.queue_changes import OutputsPlanned as OutputsPlanned
from shard.core.queue_changes import QueueFacts as QueueFacts
from shard.core.schedule_changes import ScheduleAdvanced as ScheduleAdvanced
from shard.core.schedule_changes import ScheduleDropped as ScheduleDropped
from shard.core.schedule_changes import ScheduleFacts as ScheduleFacts
from shard.core.schedule_changes import ScheduleSet as ScheduleSet
from shard.core.snapshot_facts import BoxFacts
from shard.core.transaction_changes import TxnCommitted as TxnCommitted
from shard.core.transaction_changes import TxnDropped as TxnDropped
from shard.core.transaction_changes import TxnForgotten as TxnForgotten
from shard.core.transaction_changes import TxnHeld as TxnHeld
from shard.core.transaction_changes import TxnKept as TxnKept
from shard.core.transaction_changes import TxnPart as TxnPart
from shard.core.transaction_changes import TxnRendered as TxnRendered
from streams.protocol.messages.routers import RegisteredRouter, Route
from streams.protocol.messages.s2 import AccessToken, Basin, Stream
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.records import Batch


class BoxCreated(msgspec.Struct, frozen=True):
    generation: int
    name: str
    config: BoxConfig
    at_ms: int
    #: Highest seq that may be handed out without another reservation (disk boxes).
    reserved_seq: int


class BoxConfigured(msgspec.Struct, frozen=True):
    generation: int
    config: BoxConfig
    reserved_seq: int


class BoxDeleted(msgspec.Struct, frozen=True):
    generation: int


class BatchAppended(msgspec.Struct, frozen=True, gc=False):
    generation: int
    batch: Batch
    at_ms: int
    idempotency_key: str | None = None
    #: Records below this are deleted in the same step (`trim_before_seq`); 0 = none.
    trim_before_seq: int = 0
    #: Records below this are evicted to stay within the caps; 0 = none.
    evict_before_seq: int = 0
    #: Live bytes that each of the two takes out of the one batch it cuts through. A sealed batch is not in
    #: memory when a change is replayed, so what can only be read off its payload stands in the change.
    trim_cut_bytes: int = 0
    evict_cut_bytes: int = 0
    #: `$ts` of the newest record evicted.
    evicted_ts: int = 0


class RecordsEvicted(msgspec.Struct, frozen=True):
    generation: int
    before_seq: int
    reason: str  # "cap" or "ttl"
    cut_bytes: int = 0
    evicted_ts: int = 0
    at_ms: int = 0


class RecordsDeleted(msgspec.Struct, frozen=True):
    generation: int
    #: Everything below this; 0 = nothing.
    before_seq: int
    cut_bytes: int = 0
    #: And exactly these, all of them live.
    seqs: BitMap64 | None = None
    #: Bytes of `seqs` in each batch that holds some of them, in order.
    sizes: Sequence[int] = ()
    at_ms: int = 0
    #: Of a delete by tag, for each segment that holds some of `seqs`, in order: how many of its batches do,
    #: and the bytes of these records. Further batches are in the tail. So it is applied per segment.
    groups: Sequence[tuple[int, int]] = ()


class TokenFenced(msgspec.Struct, frozen=True):
    generation: int
    token: str


class SeqsReserved(msgspec.Struct, frozen=True):
    generation: int
    reserved_seq: int


class SeqsLost(msgspec.Struct, frozen=True):
    """These seqs hold no record and are never given again: a machine crash took them from a disk box, or a
    restore found that another box has copies of them."""

    generation: int
    first_seq: int
    last_seq: int
    #: How many missing copies the one lost seq represents. 0 = the seqs themselves are missing.
    missed: int = 0


class BatchForwarded(BatchAppended, frozen=True, gc=False, kw_only=True):
    """Copies were appended, and their origin has a new position: one change, so that a crash keeps both or
    neither."""

    origin: str
    #: The generation of the source box.
    life: int
    position: int
    #: Records the source lost before these. Readers see them as a hole of one seq before the batch; 0 = none.
    lost: int = 0


class OriginMoved(msgspec.Struct, frozen=True):
    """An origin has a new position without new copies. `position` -1 is "not known": the next copy batch says
    where it begins."""

    generation: int
    origin: str
    life: int
    position: int
    lost: int = 0
    #: True if the origin stays until it is dropped. Other origins are forgotten when there are too many.
    pinned: bool = False


class OriginDropped(msgspec.Struct, frozen=True):
    generation: int
    origin: str


class OutboxTied(msgspec.Struct, frozen=True):
    """A router copies from this box, from `position` on; or one that did does it by another route."""

    generation: int
    origin: str
    route: Route
    position: int
    total: int = 0


class OutboxUntied(msgspec.Struct, frozen=True):
    generation: int
    origin: str


class OutboxMoved(msgspec.Struct, frozen=True):
    """The destination of this outbox has everything up to `position`, `total` records in all."""

    generation: int
    origin: str
    position: int
    total: int


class SegmentSealed(msgspec.Struct, frozen=True):
    """The oldest unsealed batches of a box stand in a segment file, which is durable."""

    generation: int
    serial: int
    #: Of every batch in the file: its first seq, times, records and bytes (`Segment.to_bytes`).
    columns: bytes


class SegmentsReplaced(msgspec.Struct, frozen=True):
    """Neighbouring segments were written anew, as one, without what was dead in them."""

    generation: int
    serials: list[int]
    #: The new one. (Segments in which nothing is live are gone without a change of their own.)
    serial: int
    columns: bytes


class SegmentMoved(msgspec.Struct, frozen=True):
    """The bytes of a segment are in the cold store, verified."""

    generation: int
    serial: int


class BatchKept(msgspec.Struct, frozen=True, gc=False):
    """An unsealed batch was written to the log again: so that the file with its first copy can go, or because
    it is in the log for the first time (`BoxRestated`)."""

    generation: int
    batch: Batch


class RouterRegistered(msgspec.Struct, frozen=True):
    """The router of this name is this one now, whatever was known under it before."""

    router: RegisteredRouter


class RouterDropped(msgspec.Struct, frozen=True):
    name: str


class ShardStarted(msgspec.Struct, frozen=True):
    """A shard process started. Memory boxes start empty, each with a new generation."""

    boot_id: str
    at_ms: int
    #: How far the clock at this start is behind the last time in the log: the system clock was ahead then, or
    #: is behind now. Deadlines move back by this much, so that a lease has as much time left as it had then.
    rewound_ms: int = 0


class ShardStopped(msgspec.Struct, frozen=True):
    """The shard stopped cleanly: the log contains every acknowledged change."""

    at_ms: int


class ShardRested(msgspec.Struct, frozen=True):
    """Nothing has happened. It gives a snapshot an lsn of its own, so that the one before the last makes
    place, and what that alone still names can go."""

    at_ms: int


class GroupCommitted(msgspec.Struct, frozen=True):
    generation: int
    group: str
    cursor: int
    at_ms: int


class GroupDeleted(msgspec.Struct, frozen=True):
    generation: int
    group: str


class ScheduleFired(BatchAppended, frozen=True, gc=False, kw_only=True):
    """A schedule has appended the records of its due times up to `due_ms`: one change, so that a crash keeps
    the records and the new due time, or neither."""

    schedule: str
    #: 0 = a run by hand, which counts for no due time.
    due_ms: int
    next_due_ms: int


class StreamCreated(BoxCreated, frozen=True, kw_only=True):
    stream: Stream


class StreamStated(msgspec.Struct, frozen=True):
    """The new state of a stream: another config, or that it is being deleted."""

    generation: int
    config: BoxConfig
    stream: Stream


class StreamAppended(BatchAppended, frozen=True, gc=False, kw_only=True):
    """Records of a stream, and what the commands among them say."""

    #: The fencing token from now on; None = as before.
    fence: str | None = None
    #: Records below this are to go a little later; 0 = none.
    trim_seq: int = 0


class BasinRegistered(msgspec.Struct, frozen=True):
    """The basin of this name is this one now."""

    basin: Basin


class BasinDropped(msgspec.Struct, frozen=True):
    name: str


class TokenIssued(msgspec.Struct, frozen=True):
    """The access token of this id is this one now."""

    token: AccessToken


class TokenRevoked(msgspec.Struct, frozen=True):
    id: str


class UploadsMoved(msgspec.Struct, frozen=True):
    """All that the object store must have of this shard, up to `lsn`, it has: in this chain, whose last
    object, or base, ends at `tail_lsn`."""

    chain: str
    lsn: int
    tail_lsn: int
    is_base: bool


class BoxRestated(msgspec.Struct, frozen=True):
    """A box that was in memory alone is about to be stored: all that the log does not know of it. Its batches
    follow, and then its new config; without that, the next life of the shard forgets them again."""

    facts: BoxFacts

    @property
    def generation(self) -> int:
        return self.facts.generation


Change = (
    BoxCreated
    | BoxConfigured
    | BoxDeleted
    | BatchAppended
    | RecordsEvicted
    | RecordsDeleted
    | TokenFenced
    | SeqsReserved
    | SeqsLost
    | SegmentSealed
    | SegmentsReplaced
    | SegmentMoved
    | BatchKept
    | BoxRestated
    | ShardStarted
    | ShardStopped
    | ShardRested
    | JobsLeased
    | JobsExtended
    | JobsReturned
    | JobsCounted
    | JobsRestated
    | JobsRescheduled
    | JobsReprioritized
    | MovesPlanned
    | MovesDone
    | OutputsPlanned
    | OutputsDelivered
    | GroupCommitted
    | GroupDeleted
    | BatchForwarded
    | OriginMoved
    | OriginDropped
    | OutboxTied
    | OutboxUntied
    | OutboxMoved
    | RouterRegistered
    | RouterDropped
    | TxnHeld
    | TxnKept
    | TxnCommitted
    | TxnDropped
    | TxnForgotten
    | TxnRendered
    | StreamCreated
    | StreamStated
    | StreamAppended
    | BasinRegistered
    | BasinDropped
    | TokenIssued
    | TokenRevoked
    | UploadsMoved
    | ScheduleSet
    | ScheduleFired
    | ScheduleAdvanced
    | ScheduleDropped
)

#: Changes that background work makes, not a command.
UpkeepChange = SegmentSealed | SegmentsReplaced | SegmentMoved | BatchKept | RecordsDeleted
