"""The queue of moves from one box to another, and the metadata of dead letters.

`record_moves.py` explains moves. A move queue is an outbox (`routers/outbox.py`): it sends the next planned
records, with their origin as metadata.

Invariant
- LINE: each position of a move queue is assigned once, in order, and only positions above the logged one
  have a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from shard.core import changes
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import NotLoaded
from shard.core.queues import output_queue
from shard.core.queues.planned_outbox import PlannedOutbox
from shard.core.routers.outbox import BATCH_BYTES_MAX, EXAMINE_MAX, Load
from streams.protocol.messages.forwards import ForwardHead
from streams.protocol.model.job_fields import JobFields, join
from streams.protocol.model.records import JSON, Batch, metas_of, with_meta

FROM, _DELIVERIES, _SRC_SEQ = "$dead_letter_from", "$dead_letter_deliveries", "$dead_letter_src_seq"
_ERROR, _NODE, _TS = "$dead_letter_error", "$dead_letter_node", "$dead_letter_ts"

#: Prefixes of the origin of a move queue: of dead letters, and of those that go back into their queue.
_DEAD, _BACK = "dead letters of ", "requeued of "

_encode, _decode = msgspec.json.encode, msgspec.json.decode


def is_move(origin: str) -> bool:
    """Return True if the source drops what has arrived: moves and outputs. The name of a router has no
    space."""
    return origin.startswith((_DEAD, _BACK, output_queue.PREFIX))


class Move(NamedTuple):
    """A record to be moved."""

    seq: int
    #: Number of deliveries of a dead letter.
    deliveries: int
    bytes: int
    #: Of a dead letter: its last error and node, and when it died.
    error: str = ""
    node: str = ""
    at_ms: int = 0


class MoveQueueName(NamedTuple):
    """The parts of a move queue's origin."""

    box: str
    generation: int
    is_dead: bool


def move_queue_of(origin: str) -> MoveQueueName | None:
    """Parse the origin of a move queue; None when it is a router's."""
    for kind, is_dead in ((_DEAD, True), (_BACK, False)):
        if origin.startswith(kind):
            box, _, generation = origin.removeprefix(kind).rpartition(" ")
            return MoveQueueName(box, int(generation), is_dead)
    return None


class Letter(NamedTuple):
    """A dead letter: its seq, and the queue and the seq of its job."""

    seq: int
    queue: str
    src_seq: int


def letters_in(batch: Batch, runs: Sequence[tuple[int, int]]) -> list[Letter]:
    """Return the dead letters in these runs (indexes) of a batch, in order."""
    letters: list[Letter] = []
    if batch.encoding != JSON:
        return letters
    for first, last in runs:
        for index, meta in enumerate(metas_of(batch.text(first, last)), first):
            if FROM in meta and _SRC_SEQ in meta:
                queue, src_seq = _decode(meta[FROM]), _decode(meta[_SRC_SEQ])
                if isinstance(queue, str) and isinstance(src_seq, int):  # a client may have written anything
                    letters.append(Letter(batch.first_seq + index, queue, src_seq))
    return letters


class MoveQueue(PlannedOutbox):
    """The moves from one box to another. `moves` are logged."""

    __slots__ = ("_log", "is_dead", "moves")

    def __init__(
        self, *, source: str, generation: int, log: BoxLog, dest: str, is_dead: bool, position: int = 0
    ) -> None:
        super().__init__(
            source=source,
            origin=f"{_DEAD if is_dead else _BACK}{source} {generation}",
            dest=dest,
            generation=generation,
            position=position,
        )
        self._log = log
        #: True for dead letters; False for those that go back into their queue.
        self.is_dead = is_dead
        #: By position: all above `logged.position`.
        self.moves: dict[int, Move] = {}

    def next_records(self, after: int, records_max: int, upto: int = 0) -> Load:
        """Select the records after `after` and set their metadata. Positions without a record are skipped."""
        lost_count = max(0, self.log_position.position - after)  # the destination lost confirmed copies
        upto = max(after, self.log_position.position)  # durable plans only, whatever the caller allows
        texts: list[bytes] = []
        tags: list[bytes] = []
        job_fields: list[tuple[JobFields | None, int]] = []
        size = 0
        for position in range(upto + 1, min(self.sendable_position, upto + EXAMINE_MAX) + 1):
            move = self.moves[position]
            span = self._log.span_at(move.seq) if self._log.is_live(move.seq) else None
            if span is not None:
                try:
                    batch = span.payload
                except NotLoaded:
                    if not texts:
                        raise
                    break  # the records read so far are sent now
                index = move.seq - batch.first_seq
                text = self._stamp(bytes(batch.text(index, index)), move)
                if texts and (len(texts) >= records_max or size + len(text) > BATCH_BYTES_MAX):
                    break
                texts.append(text)
                tags.append(batch.tags_of(index, index))
                fields = None if batch.job_fields is None else batch.job_fields.part(index, index)
                job_fields.append((fields and fields.without_times, 1))
                size += len(text)
            upto = position
        joint_tags = b"\0".join(tags) if any(tags) else None
        joint_fields = join(job_fields)
        return Load(
            upto,
            len(texts),
            b",".join(texts),
            joint_tags,
            lost_count,
            0,
            upto < self.sendable_position,
            None if joint_fields is None else joint_fields.to_bytes(),
        )

    def batch_head(self, load: Load, after: int) -> ForwardHead:
        # A requeue does not recreate a deleted queue.
        return self.head_of(load, after, hops=1, create=self.is_dead)

    def change_of_move(self, generation: int, now_ms: int) -> changes.MovesDone | None:
        """Return the change that deletes the confirmed records; None if there are none."""
        upto = min(self.position, self.last_position)
        if upto <= self.log_position.position:
            return None
        log = self._log
        moves = [self.moves[at] for at in range(self.log_position.position + 1, upto + 1)]
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

    def _stamp(self, text: bytes, move: Move) -> bytes:
        if self.is_dead:
            fields = {
                FROM: _encode(self.source),
                _DELIVERIES: b"%d" % move.deliveries,
                _SRC_SEQ: b"%d" % move.seq,
            }
            if move.error:
                fields[_ERROR] = _encode(move.error)
            if move.node:
                fields[_NODE] = _encode(move.node)
            if move.at_ms:
                fields[_TS] = b"%d" % move.at_ms
            return with_meta(text, fields, without=(_ERROR, _NODE, _TS))
        return with_meta(text, {}, without=(FROM, _DELIVERIES, _SRC_SEQ, _ERROR, _NODE, _TS))

    # -- applying

    def apply_plan(self, moves: list[Move]) -> None:
        """Assign the next positions to these moves."""
        for move in moves:
            self.last_position += 1
            self.moves[self.last_position] = move

    def apply_arrival(self, position: int) -> list[Move]:
        """Remove the moves up to `position`, which the destination confirmed. Returns them."""
        moves = [self.moves.pop(at) for at in range(self.log_position.position + 1, position + 1)]
        self.apply_logged(position, self.log_position.total + len(moves))
        return moves

    # -- snapshots

    def facts(self) -> changes.LineFacts:
        """Return the state for a snapshot. A deleted record has its position only."""
        return changes.LineFacts(
            dest=self.dest,
            is_dead=self.is_dead,
            position=self.log_position.position,
            moves=[
                _entry(move) if self._log.is_live(move.seq) else (0, 0, 0) for move in self.moves.values()
            ],
        )

    def restore(self, facts: changes.LineFacts) -> None:
        """Restore the moves of a snapshot."""
        self.apply_plan([Move(*cast(tuple[Any, ...], move)) for move in facts.moves])
        self.sendable_position = self.last_position


def _entry(move: Move) -> tuple[int | str, ...]:
    """The entry of a move in a snapshot: only a dead letter has more than three fields."""
    return move if move.at_ms else move[:3]
