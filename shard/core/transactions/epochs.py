"""One open transaction: its parcels, and what their rows add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shard.core.transactions.chunks import Chunk, Piece


class Epoch:
    """What is held of one transaction."""

    __slots__ = (
        "attempt",
        "bytes",
        "loaded_bytes",
        "owner",
        "parcels",
        "put_ms",
        "query",
        "records",
        "replaced",
        "takes_over",
        "totals",
    )

    def __init__(self, query: str, owner: str | None = None) -> None:
        self.query = query
        #: As in `changes.TxnHeld`.
        self.owner = owner
        #: The attempt whose rows are held, and those that it has replaced.
        self.attempt = ""
        self.replaced: list[str] = []
        self.parcels: dict[str, dict[int, Chunk]] = {}
        #: What its chunks take in the log, how many rows they have, and what of them is in memory.
        self.bytes = 0
        self.records = 0
        self.loaded_bytes = 0
        #: All rows of each box; None when some are gone and it is to be worked out anew.
        self.totals: dict[str, Piece] | None = {}
        #: When the last chunk came.
        self.put_ms = 0
        #: Whether its query took the writer over from another one.
        self.takes_over = False

    def __repr__(self) -> str:
        return f"<Epoch of {self.query!r}, {len(self.parcels)} parcels>"

    def chunks(self) -> Iterator[Chunk]:
        for parcel in self.parcels.values():
            yield from parcel.values()

    def create_of(self, box: str) -> bool | None:
        """Whether the rows of a box may create it: what the first put of them said."""
        return next(chunk.create for chunk in self.chunks() if box in chunk.boxes)

    def totals_of(self, parcels: Sequence[str]) -> dict[str, Piece]:
        """All rows of each box in these parcels. Those of all parcels are known, mostly; so a commit takes no
        time for each chunk."""
        is_all = len(parcels) == len(self.parcels)
        if is_all and self.totals is not None:
            return self.totals
        found: dict[str, Piece] = {}
        for chunk in self.ordered(parcels):
            add_pieces(found, chunk)
        if is_all:
            self.totals = found
        return found

    def ordered(self, parcels: Sequence[str]) -> Iterator[Chunk]:
        for name in parcels:
            chunks = self.parcels[name]
            for number in sorted(chunks):
                yield chunks[number]


def add_pieces(totals: dict[str, Piece], chunk: Chunk) -> None:
    for piece in chunk.pieces():
        before = totals.get(piece.box)
        totals[piece.box] = piece if before is None else before.joined(piece)
