"""The changes of transactions. `changes.py` lists them with all others."""

from __future__ import annotations

import msgspec

from streams.protocol.payloads.packed import PackedHead


class TxnHeld(msgspec.Struct, frozen=True, gc=False):
    """Rows are held for a transaction. They have no seqs and nobody sees them."""

    writer: str
    epoch: int
    query: str
    parcel: str
    chunk: int
    at_ms: int
    packed: PackedHead
    #: The columns themselves (`streams/protocol/payloads/packed.py`).
    body: bytes
    #: Id of the key that it belongs to; empty for a process of the server's own user; None when the log was
    #: written before transactions had owners.
    owner: str | None = None
    #: Whether this query took the writer over from another one (`reset`).
    takes_over: bool = False
    #: The attempt that put it, and those that it has replaced, the last ones last.
    attempt: str = ""
    replaced: list[str] = []


class TxnKept(TxnHeld, frozen=True, gc=False):
    """A `TxnHeld` that is written to the log again, so that the file with its first copy can be deleted."""


class TxnPart(msgspec.Struct, array_like=True, gc=False):
    """The effect of a commit on one box."""

    generation: int
    box: str
    #: How many records its rows become. (A log that was written when rows were rendered at the commit says
    #: how many each of its batches has.)
    counts: list[int]
    first_seq: int
    #: The lower bound from which `resolve_times` computes the times of its records.
    not_before: int
    mode: str
    uncapped: bool
    #: As in `BatchAppended`, ahead of the first batch.
    evict_before_seq: int = 0
    evict_cut_bytes: int = 0
    evicted_ts: int = 0
    #: Bytes that its rows will take, as estimated; and the time of the last one. A log that was written when
    #: rows were rendered at the commit does not say: 0, -1.
    size: int = 0
    last_ts: int = -1


class TxnCommitted(msgspec.Struct, frozen=True):
    """Parcels that are held become records, in this order; all else of this epoch and of earlier ones is
    dropped, and the writer is marked. One fact, so that a crash leaves all of it or nothing."""

    writer: str
    epoch: int
    query: str
    at_ms: int
    parcels: list[str]
    parts: list[TxnPart]
    #: As in `TxnHeld`.
    owner: str | None = None
    #: As in `MarkFacts`.
    once: bool | None = None


class TxnRendered(msgspec.Struct, frozen=True):
    """The rows of the next chunks of a commit, in its order, are in frames of their own."""

    commit_lsn: int
    chunks: int


class TxnDropped(msgspec.Struct, frozen=True):
    """Drops the held rows of these parcels; of the whole epoch when no parcels are named."""

    writer: str
    epoch: int
    parcels: list[str] = []


class TxnForgotten(msgspec.Struct, frozen=True):
    """The writer is not known any more: neither its last epoch nor the key that it belongs to."""

    writer: str
