"""One open transaction: its parcels, and the totals of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shard.core.transactions.chunks import Chunk, Piece


class Epoch:
    """The pending rows of one transaction."""

    __slots__ = (
        "attempt",
        "bytes",
        "loaded_bytes",
        "owner",
        "parcels",
        "put_ms",
        "query",
        "records",
        "replaced_attempts",
        "takes_over",
        "totals",
    )

    def __init__(self, query: str, owner: str | None = None) -> None:
        self.query = query
        #: As in `changes.TxnHeld`.
        self.owner = owner
        #: The attempt that put the pending rows, and the attempts that it has replaced.
        self.attempt = ""
        self.replaced_attempts: list[str] = []
        self.parcels: dict[str, dict[int, Chunk]] = {}
        #: Of its chunks: bytes in the log, number of rows, and bytes that are in memory.
        self.bytes = 0
        self.records = 0
        self.loaded_bytes = 0
        #: Totals of the rows of each box; None after rows were dropped, until `totals_of` computes it again.
        self.totals: dict[str, Piece] | None = {}
        #: When the last chunk came.
        self.put_ms = 0
        #: True if its query took the writer over from another query.
        self.takes_over = False

    def __repr__(self) -> str:
        return f"<Epoch of {self.query!r}, {len(self.parcels)} parcels>"

    def chunks(self) -> Iterator[Chunk]:
        for parcel in self.parcels.values():
            yield from parcel.values()

    def create_of(self, box: str) -> bool | None:
        """Return the `create` option of the first put with rows for this box."""
        return next(chunk.create for chunk in self.chunks() if box in chunk.boxes)

    def totals_of(self, parcels: Sequence[str]) -> dict[str, Piece]:
        """Return the totals of the rows of each box in these parcels.

        The totals of all parcels are usually cached, so a commit does no work per chunk."""
        is_all = len(parcels) == len(self.parcels)
        if is_all and self.totals is not None:
            return self.totals
        totals: dict[str, Piece] = {}
        for chunk in self.chunks_of(parcels):
            add_pieces(totals, chunk)
        if is_all:
            self.totals = totals
        return totals

    def chunks_of(self, parcels: Sequence[str]) -> Iterator[Chunk]:
        for name in parcels:
            chunks = self.parcels[name]
            for number in sorted(chunks):
                yield chunks[number]


def add_pieces(totals: dict[str, Piece], chunk: Chunk) -> None:
    for piece in chunk.pieces():
        before = totals.get(piece.box)
        totals[piece.box] = piece if before is None else before.merge(piece)
