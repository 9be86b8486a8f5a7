"""The contents of a snapshot: the facts of the changes before it, folded up. `changes.py` has the rules.

Payloads stay in the log; a batch is named by its lsn.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shard.core.queue_changes import LineFacts, OutputFacts, QueueFacts
from shard.core.schedule_changes import ScheduleFacts
from shard.core.transaction_changes import TxnCommitted
from streams.protocol.messages.routers import RegisteredRouter, Route
from streams.protocol.messages.s2 import AccessToken, Basin, Stream
from streams.protocol.model.boxes import BoxConfig


class SegmentFacts(msgspec.Struct, array_like=True, gc=False):
    serial: int
    first_seq: int
    #: (position, records, bytes) for batches in which something is dead.
    dead: list[tuple[int, int, int]]
    is_cold: bool = False
    #: As in `SegmentSealed`; empty in a snapshot, where the file says it.
    columns: bytes = b""


class StreamFacts(msgspec.Struct, kw_only=True):
    stream: Stream
    #: Columns of the write periods of `shard/core/s2/stream.py`: i64, i64, u64.
    opened_ms: bytes = b""
    closed_ms: bytes = b""
    last_seqs: bytes = b""
    #: (seq, due_ms, opened_ms) of trims that are put off.
    trims: list[tuple[int, int, int]] = []


class BoxFacts(msgspec.Struct, kw_only=True, gc=False):
    name: str
    generation: int
    config: BoxConfig
    created_ms: int
    last_append_ms: int
    #: Since when the box has had no live record; 0 while it has some.
    emptied_ms: int
    reserved_seq: int
    fencing_token: str
    #: (key, first_seq, last_seq, at_ms, lsn), oldest first.
    keys: Sequence[tuple[str, int, int, int, int]]
    head_seq: int
    earliest_seq: int
    cap_floor: int
    ttl_floor: int
    evicted_ts: int
    last_ts: int
    live_count: int
    live_bytes: int
    #: A 64-bit roaring bitmap.
    deleted: bytes
    holes: list[tuple[int, int]]
    #: The lsns of the unsealed batches, as u64s; 0 for a batch with nothing live, or in `unrendered`.
    batches: bytes
    last_serial: int = 0
    segments: list[SegmentFacts] = []
    queue: QueueFacts | None = None
    #: (name, cursor, updated_ms).
    groups: list[tuple[str, int, int]] = []
    moves: list[LineFacts] = []
    outputs: OutputFacts | None = None
    #: (first seq, records missed) of those holes that a source's loss made.
    trims: list[tuple[int, int]] = []
    #: (origin, life, position, total, lost, pinned), least recently moved first.
    origins: list[tuple[str, int, int, int, int, bool]] = []
    #: (origin, route, position, total) of the routers that copy from here.
    outboxes: list[tuple[str, Route, int, int]] = []
    stream: StreamFacts | None = None
    #: Of an object box: (visible seq, its time), where the store is yet to have what comes after.
    shown: tuple[int, int] | None = None
    #: Rows of commits that are yet to be rendered: (first seq, records, bytes as estimated, time that none is
    #: before, time of the last, lsn of the commit).
    unrendered: list[tuple[int, int, int, int, int, int]] = []
    schedules: list[ScheduleFacts] = []


class MarkFacts(msgspec.Struct, array_like=True, gc=False):
    """The last epoch of a writer that was committed: for all boxes of the shard, or for those whose slots
    have a bit in `slots`."""

    writer: str
    epoch: int
    query: str
    at_ms: int
    slots: bytes = b""
    #: As in `TxnHeld`.
    owner: str | None = None
    #: True for a writer that is used once: forgotten after a day. None when the log was written before there
    #: were such: forgotten after 90 days, as all were then.
    once: bool | None = None


class CommitFacts(msgspec.Struct, array_like=True, gc=False):
    """A commit with rows that are yet to be rendered."""

    lsn: int
    writer: str
    epoch: int
    at_ms: int
    #: (box, generation, mode, uncapped).
    targets: list[tuple[str, int, str, bool]]
    #: The lsns of the chunks that are left, in order.
    chunks: list[int]
    #: The commit itself, if it must be uploaded to the object store.
    ships: TxnCommitted | None = None


SessionFacts = tuple[str, int, bytes, int, str]


class ShardState(msgspec.Struct, kw_only=True):
    lsn: int
    #: The oldest lsn whose frame is needed besides those after `lsn`.
    needs_lsn: int
    boot_id: str
    stopped_clean: bool
    last_generation: int
    not_recreated: list[str]
    boxes: list[BoxFacts]
    routers: list[RegisteredRouter] = []
    last_router_number: int = 0
    #: The lsns of the frames whose rows are held for transactions. They may be older than `needs_lsn`.
    held: list[int] = []
    #: Oldest first.
    marks: list[MarkFacts] = []
    commits: list[CommitFacts] = []
    basins: list[Basin] = []
    last_basin_number: int = 0
    #: Of a shard that has stopped cleanly: watch sessions (name, epoch, state, when it lapses, owner).
    sessions: list[SessionFacts] = []
    tokens: list[AccessToken] = []
    #: The chain that the shard writes, how far it is, where its last object ends, and of which servers the
    #: chains are that it takes the place of (`objects/replication.py`).
    chain: str = ""
    uploaded_lsn: int = 0
    uploaded_tail_lsn: int = 0
    follows: list[str] = []
    #: The time of the last change.
    at_ms: int = 0
