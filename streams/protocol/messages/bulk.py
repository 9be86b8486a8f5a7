"""Commands and replies of bulk clients: states of boxes, positions by time, transactions.

On the wire each of these is a msgpack array of its fields. Packed rows (`payloads/packed.py`) and stored
records (`payloads/scans.py`) travel in the body. Frozen structs without behaviour.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams.protocol.access.grants import Grant
from streams.protocol.payloads.packed import PackedHead, Rows

#: Positions asked for, or states given, in one message.
LOCATE_MAX = 10_000
STATES_MAX = 10_000

WRITER_BYTES_MAX = 256
PARCEL_BYTES_MAX = 64
ATTEMPT_BYTES_MAX = 64
#: Parcels in one commit: as many as a job has tasks.
PARCELS_MAX = 100_000
#: Chunks of one parcel: a number that fits into 32 bits with room to spare.
CHUNK_MAX = 2**31 - 1
EPOCH_MAX = 2**63 - 1


# ---------------------------------------------------------------------------------------------------
# Commands


class States(msgspec.Struct, array_like=True, frozen=True):
    """Lists boxes whose names start with `prefix`, after `after`; or those of `boxes` that exist."""

    prefix: str = ""
    after: str = ""
    limit: int = STATES_MAX
    boxes: list[str] | None = None


class Locate(msgspec.Struct, array_like=True, frozen=True):
    """Finds the first seq at or after a time, for each (box, ts)."""

    lookups: list[tuple[str, int]]


class Txn(msgspec.Struct, array_like=True, frozen=True):
    """Identifies a transaction: `epoch` counts the transactions of one `writer`, upwards.

    `query` distinguishes two runs that use the same writer by mistake; with `reset` this one takes over.
    """

    writer: str
    epoch: int
    query: str = ""
    reset: bool = False
    #: True for a writer with one epoch, whose name is never used again. The shard forgets it after a day.
    once: bool = False
    #: Names one attempt to write the epoch. The first put of another attempt drops the chunks of the
    #: attempt before; a replaced attempt is refused. Empty: attempts are not distinguished.
    attempt: str = ""


class Caller(msgspec.Struct, frozen=True):
    """The key that sent a command of a transaction. The shard fills it in; it is never on the wire."""

    #: Empty for a process of the server's own user that has no key.
    key_id: str = ""
    #: None for processes of the server's own user, which may do everything.
    grant: Grant | None = None


LOCAL = Caller()


class TxnPutHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    txn: Txn
    parcel: str
    chunk: int
    rows_head: PackedHead


class TxnPut(TxnPutHead, frozen=True, gc=False):
    """Stores rows of a transaction until its commit. A chunk that the shard has already is ignored."""

    #: The body of the message: checked, and stored byte for byte.
    body: bytes
    #: The rows of the body, which the check has decoded.
    rows: list[Rows] | None = None
    caller: Caller = LOCAL


class TxnCommitHead(msgspec.Struct, array_like=True, frozen=True):
    """Makes exactly these parcels visible, in this order: (parcel, number of its chunks on this shard)."""

    txn: Txn
    parcels: list[tuple[str, int]]
    #: Replies as the commit would, and changes nothing.
    dry: bool = False


class TxnCommit(TxnCommitHead, frozen=True):
    caller: Caller = LOCAL


class TxnAbortHead(msgspec.Struct, array_like=True, frozen=True):
    """Drops uncommitted parcels: those named, or all of the transaction when none is named."""

    txn: Txn
    parcels: list[str] = []
    #: Forgets the writer as well: the last epoch that was committed, and the key that it belongs to.
    forgets: bool = False


class TxnAbort(TxnAbortHead, frozen=True):
    caller: Caller = LOCAL


class TxnListHead(msgspec.Struct, array_like=True, frozen=True):
    """Lists uncommitted transactions and last commits of writers whose names start with `prefix`."""

    prefix: str = ""


class TxnList(TxnListHead, frozen=True):
    caller: Caller = LOCAL


TxnCommand = TxnPut | TxnCommit | TxnAbort | TxnList
BulkCommand = States | Locate | TxnCommand


# ---------------------------------------------------------------------------------------------------
# Replies


class BoxPosition(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The range of seqs of a box, and its size. Records below `evict_floor` were lost (v0 §4.2)."""

    box: str
    generation: int
    earliest_seq: int
    head_seq: int
    evict_floor: int
    count: int
    bytes: int
    type: str
    durability: str
    last_ts: int


class Positions(msgspec.Struct, array_like=True, frozen=True):
    boxes: list[BoxPosition]
    more: bool = False


class LocateReply(msgspec.Struct, array_like=True, frozen=True):
    """A (generation, seq) for each question; `head_seq + 1` when no record is that new. None where there is
    no such box."""

    seqs: list[tuple[int, int] | None]


class BoxResult(msgspec.Struct, array_like=True, frozen=True):
    """The result for the rows of one box. With an error none of them was written, and the seqs are 0."""

    box: str
    first_seq: int = 0
    last_seq: int = 0
    created: bool = False
    deduped: bool = False
    #: (code, message, detail).
    error: tuple[str, str, dict[str, Any]] | None = None


class PutColumnsReply(msgspec.Struct, array_like=True, frozen=True):
    results: list[BoxResult]


class TxnPutReply(msgspec.Struct, array_like=True, frozen=True):
    """`is_done`: the epoch was committed before; the chunk is ignored. `is_repeat`: the shard had it."""

    is_done: bool
    is_repeat: bool
    #: Uncommitted bytes of the transaction on this shard.
    held_bytes: int


class TxnCommitReply(msgspec.Struct, array_like=True, frozen=True):
    """`is_done`: the epoch was committed before, and nothing has changed; `boxes` is empty."""

    is_done: bool
    records: int
    #: (box, first seq, last seq).
    boxes: list[tuple[str, int, int]]


class TxnAbortReply(msgspec.Struct, array_like=True, frozen=True):
    parcels: int
    bytes: int
    #: True if the writer was known and is forgotten.
    is_forgotten: bool = False


class CommittedEpoch(msgspec.Struct, array_like=True, frozen=True):
    """The last committed epoch of a writer."""

    writer: str
    epoch: int
    query: str
    at_ms: int
    #: Only some boxes of the shard have it: they came from another shard, which had committed it.
    is_partial: bool = False
    #: It is forgotten a day after the commit.
    is_once: bool = False


class PendingTxn(msgspec.Struct, array_like=True, frozen=True):
    writer: str
    epoch: int
    query: str
    parcels: int
    chunks: int
    records: int
    bytes: int
    #: Dropped then, unless there is another put.
    expires_ms: int


class UnrenderedCommit(msgspec.Struct, array_like=True, frozen=True):
    """A committed transaction whose rows are not all rendered yet."""

    writer: str
    epoch: int
    #: Rows still to render.
    records: int


class TxnState(msgspec.Struct, array_like=True, frozen=True):
    pending: list[PendingTxn]
    marks: list[CommittedEpoch]
    #: True if there are more than this list shows.
    more: bool = False
    rendering: list[UnrenderedCommit] = []


BulkReply = (
    Positions | LocateReply | PutColumnsReply | TxnPutReply | TxnCommitReply | TxnAbortReply | TxnState
)
