"""A line of moves from one box to another, and the words in which dead letters carry their origin.

`record_moves.py` explains moves. A line is an outbox as routers have (`routers/outbox.py`): what it sends is
the next records that were planned, stamped with where they come from.

Invariant
- LINE: positions of a line are given once, in order, and only those above `position` have a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shard.core import changes
from shard.core.boxes.log import Log
from shard.core.boxes.sealed import NotLoaded
from shard.core.routers.outbox import EXAMINE_MAX, PARCEL_BYTES_MAX, Load, Outbox
from streams.protocol.messages.forwards import ForwardHead
from streams.protocol.model.records import JSON, Batch, metas_of, with_meta

FROM, _DELIVERIES, _SRC_SEQ = "$dead_letter_from", "$dead_letter_deliveries", "$dead_letter_src_seq"

#: How the origin of a line begins: of dead letters, and of those that go back into their queue.
_DEAD, _BACK = "dead letters of ", "requeued of "

_encode, _decode = msgspec.json.encode, msgspec.json.decode


def is_move(origin: str) -> bool:
    """True if copies of this origin take the place of their originals, unlike those of a router, whose name
    has no space in it."""
    return origin.startswith((_DEAD, _BACK))


class Move(NamedTuple):
    seq: int
    #: How often a dead letter was delivered.
    deliveries: int
    bytes: int


class LineName(NamedTuple):
    """What the origin of a line says."""

    box: str
    generation: int
    is_dead: bool


def line_of(origin: str) -> LineName | None:
    """The line that an origin belongs to; None when it is a router's."""
    for kind, is_dead in ((_DEAD, True), (_BACK, False)):
        if origin.startswith(kind):
            box, _, generation = origin.removeprefix(kind).rpartition(" ")
            return LineName(box, int(generation), is_dead)
    return None


class Letter(NamedTuple):
    """A dead letter: where it is, and which job of which queue it was."""

    seq: int
    queue: str
    src_seq: int


def letters_in(batch: Batch, runs: Sequence[tuple[int, int]]) -> list[Letter]:
    """The dead letters in these stretches (indexes) of a batch, in order."""
    found: list[Letter] = []
    if batch.encoding != JSON:
        return found
    for first, last in runs:
        for index, meta in enumerate(metas_of(batch.text(first, last)), first):
            if FROM in meta and _SRC_SEQ in meta:
                queue, src_seq = _decode(meta[FROM]), _decode(meta[_SRC_SEQ])
                if isinstance(queue, str) and isinstance(src_seq, int):  # a client may have written anything
                    found.append(Letter(batch.first_seq + index, queue, src_seq))
    return found


class Line(Outbox):
    """The moves from one box to another."""

    __slots__ = ("_log", "_source", "is_dead", "last", "moves", "shown")

    is_line = True

    def __init__(
        self, *, source: str, generation: int, log: Log, dest: str, is_dead: bool, position: int = 0
    ) -> None:
        super().__init__(
            source=source,
            origin=f"{_DEAD if is_dead else _BACK}{source} {generation}",
            dest=dest,
            life=generation,
            position=position,
        )
        self._log = log
        #: Whether these are dead letters on their way out, and not on their way back.
        self.is_dead = is_dead
        #: By position, all above `position`.
        self.moves: dict[int, Move] = {}
        #: The last position given, and the last that is durable and may leave.
        self.last = self.shown = position

    @property
    def may_send(self) -> bool:
        """One parcel at a time. A destination that does not know the line takes it up where the parcel begins
        that comes first, and what came later of an earlier one would count as a repeat."""
        return not self.flights and super().may_send

    def look(self, after: int, records_max: int) -> Load:
        """Copies of what follows `after`, stamped. Positions without a record are passed over."""
        lost = max(0, self.saved_position - after)  # a destination that has lost what it had once confirmed
        upto = max(after, self.saved_position)
        texts: list[bytes] = []
        tags: list[bytes] = []
        size = 0
        for position in range(upto + 1, min(self.shown, upto + EXAMINE_MAX) + 1):
            move = self.moves[position]
            span = self._log.span_at(move.seq) if self._log.is_live(move.seq) else None
            if span is not None:
                try:
                    batch = span.payload
                except NotLoaded:
                    if not texts:
                        raise
                    break  # what there is leaves now
                index = move.seq - batch.first_seq
                text = self._stamped(bytes(batch.text(index, index)), move)
                if texts and (len(texts) >= records_max or size + len(text) > PARCEL_BYTES_MAX):
                    break
                texts.append(text)
                tags.append(batch.tags_of(index, index))
                size += len(text)
            upto = position
        joined = b"\0".join(tags) if any(tags) else None
        return Load(upto, len(texts), b",".join(texts), joined, lost, 0, upto < self.shown)

    def label(self, load: Load, after: int) -> ForwardHead:
        return ForwardHead(
            box=self.dest,
            origin=self.origin,
            life=self.life,
            after=after,
            upto=load.upto,
            count=load.count,
            lost=load.lost,
            tags=load.tags,
            create=self.is_dead,  # a queue that is gone is not made again by what once died there
            bind=after <= self.saved_position,
        )

    def change_of_move(self, generation: int, now_ms: int) -> changes.MovesDone | None:
        """What the destination has is deleted here, each time it says so."""
        upto = min(self.position, self.last)
        if upto <= self.saved_position:
            return None
        log = self._log
        moves = [self.moves[at] for at in range(self.saved_position + 1, upto + 1)]
        live = sorted(move for move in moves if log.is_live(move.seq))
        sizes: dict[int, int] = {}
        for move in live:
            span = log.span_at(move.seq)
            assert span is not None
            sizes[span.first_seq] = sizes.get(span.first_seq, 0) + move.bytes
        seqs = [move.seq for move in live]
        return changes.MovesDone(
            generation, self.dest, self.is_dead, upto, seqs, list(sizes.values()), now_ms
        )

    def _stamped(self, text: bytes, move: Move) -> bytes:
        if self.is_dead:
            return with_meta(
                text,
                {
                    FROM: _encode(self.source),
                    _DELIVERIES: b"%d" % move.deliveries,
                    _SRC_SEQ: b"%d" % move.seq,
                },
            )
        return with_meta(text, {}, without=(FROM, _DELIVERIES, _SRC_SEQ))

    # -- applying

    def planned(self, moves: list[Move]) -> None:
        for move in moves:
            self.last += 1
            self.moves[self.last] = move

    def done(self, position: int) -> list[Move]:
        """The destination has everything up to here. Returns what that was."""
        moves = [self.moves.pop(at) for at in range(self.saved_position + 1, position + 1)]
        self.saved(position, self.saved_total + len(moves))
        return moves

    # -- snapshots

    def facts(self) -> changes.LineFacts:
        """A record that is gone has kept its position, and nothing else."""
        return changes.LineFacts(
            dest=self.dest,
            is_dead=self.is_dead,
            position=self.saved_position,
            moves=[move if self._log.is_live(move.seq) else (0, 0, 0) for move in self.moves.values()],
        )

    def restore(self, facts: changes.LineFacts) -> None:
        """Takes over the moves of a snapshot."""
        self.planned([Move(*move) for move in facts.moves])
        self.shown = self.last
