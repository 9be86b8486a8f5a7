"""Makes the shards of a restore agree about state that two boxes share.

A backup captures each shard at its own moment, and a restore to a point in time cuts each box by its own
times. So two boxes that share state may disagree, and each would act wrongly:

    a destination above its source's head    new records with these seqs would count as duplicates
    a source above its destination           missing copies would be sent only with the next write
    a dead letter in both boxes, or in none  its job would run twice, or never
    one end of a router without the other    the router would be dropped
    a stream without its basin               the stream would be deleted

Rules of the file
- It runs after all shards are restored and before any is served. Every correction is an ordinary change: the
  machine applies it, and it is logged after the restored changes.
- A seq or position that any box has seen is never assigned again.
- Copies are sent again if it is known which are missing. Otherwise the loss is reported at once, as a
  `source_trim` tombstone in the destination. Nothing is copied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.changes import Change
from shard.core.machine import Machine
from shard.core.queues.move_queue import Letter, letters_in, move_queue_of
from shard.core.queues.output_queue import source_of_outputs
from shard.core.queues.planned_outbox import PlannedOutbox
from shard.core.queues.record_moves import planned_outboxes
from shard.core.routers.copy_sources import NOT_KNOWN, Origin
from shard.core.routers.router_outbox import RouterOutbox, runs_to_copy
from shard.offline.box_cuts import Cut, is_gap
from shard.offline.payload_loading import load_missing
from shard.storage.segments.store import SegmentStore
from streams.protocol.messages.routers import RegisteredRouter, router_of
from streams.protocol.messages.s2 import Basin, BasinConfig

T = TypeVar("T")

ShardChanges = list[tuple[int, Change]]


class Corrections(NamedTuple):
    """Counts of the corrections."""

    #: Seqs that a box skips, because another box has copies of records that this box does not have.
    skipped_seqs: int = 0
    #: Copies that are lost; readers of their boxes see a tombstone.
    missing_copies: int = 0


class _RouterPair(NamedTuple):
    """A router with both of its ends."""

    router: RegisteredRouter
    source: Box
    outbox: RouterOutbox
    dest: Box
    origin_state: Origin


class Reconciler:
    """Compares the shards of a restore, and corrects them. `changes_by_shard` has the changes of each
    shard."""

    def __init__(
        self,
        machines: Sequence[Machine],
        stores: Sequence[SegmentStore],
        owner_of: Callable[[str], int],
        *,
        cuts: dict[int, Cut],
        later_boxes: set[str],
        until_ms: int | None,
        now_ms: int,
    ) -> None:
        """`cuts` by the generation of the box; `later_boxes` are boxes that a cut has left out entirely."""
        self._machines = machines
        self._stores = stores
        self._owner_of = owner_of
        self._cuts = cuts
        self._later_boxes = later_boxes
        self._until_ms = until_ms
        self._now_ms = now_ms
        self._corrections = Corrections()
        self.changes_by_shard: list[ShardChanges] = [[] for _ in machines]

    def __repr__(self) -> str:
        return f"<Reconciler of {len(self._machines)} shards: {self._corrections}>"

    def run(self) -> Corrections:
        self._settle_basins()
        self._detach_unregistered()
        pairs = [pair for router in self._routers() for pair in self._pair_ends(router)]
        if self._until_ms is None:
            self._raise_heads(pairs)
            for pair in pairs:
                self._move(pair, pair.origin_state.position)
        else:
            by_dest: dict[int, list[_RouterPair]] = {}
            for pair in pairs:
                by_dest.setdefault(pair.dest.generation, []).append(pair)
            for mine in by_dest.values():
                self._move_after_cut(mine)
        self._drop_later_letters()
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                for origin in list(box.origins):
                    self._settle_line(box, origin)
                    self._settle_outputs(box, origin)
                for outbox in planned_outboxes(box):
                    self._settle_unknown_line(box, outbox)
        return self._corrections

    # -- helpers

    def _box(self, name: str) -> Box | None:
        box: Box | None = self._machines[self._owner_of(name)].boxes.get(name)
        return box

    def _apply(self, shard: int, change: Change) -> None:
        machine = self._machines[shard]
        lsn = machine.lsn + 1
        machine.apply(change, lsn)
        self.changes_by_shard[shard].append((lsn, change))

    def _change(self, box: Box, change: Change) -> None:
        self._apply(self._owner_of(box.name), change)

    def _store(self, box: Box) -> SegmentStore:
        return self._stores[self._owner_of(box.name)]

    def _load(self, box: Box, ask: Callable[[], T]) -> T:
        return load_missing(self._store(box), ask)

    def _report_missing(self, box: Box, count: int) -> None:
        """Add a hole to a box, so that its readers see that `count` copies are missing."""
        seq = box.log.head_seq + 1
        self._reserve(box, seq)
        self._change(box, changes.SeqsLost(box.generation, seq, seq, count))
        self._corrections = self._corrections._replace(
            missing_copies=self._corrections.missing_copies + count
        )

    def _reserve(self, box: Box, seq: int) -> None:
        if box.is_disk and box.reserved_seq < seq:
            self._change(box, changes.SeqsReserved(box.generation, seq))

    # -- registers

    def _settle_basins(self) -> None:
        """Register basins that streams need, and drop basins without streams that are later than the time.

        A basin that was created after the capture of the first shard is missing there, but its streams may
        exist.
        """
        register = self._machines[0].basins
        last_number = register.last_number
        numbers: set[int] = set()
        for machine in self._machines:
            for box in machine.boxes.values():
                if box.stream is None:
                    continue
                number, name = box.stream.stream.basin_number, box.name.partition("/")[0]
                numbers.add(number)
                registered_basin: Basin | None = register.basins.get(name)
                if number > last_number and (registered_basin is None or registered_basin.number < number):
                    basin = Basin(name=name, number=number, config=BasinConfig(), created_ms=box.created_ms)
                    self._apply(0, changes.BasinRegistered(basin))
        if self._until_ms is not None:
            for basin in list(register.basins.values()):
                if basin.created_ms > self._until_ms and basin.number not in numbers:
                    self._apply(0, changes.BasinDropped(basin.name))

    def _routers(self) -> list[RegisteredRouter]:
        return list(self._machines[0].routers.routers.values())

    def _detach_unregistered(self) -> None:
        """Detach ends of routers that are not registered, so that their numbers can be reused."""
        origins = {router.origin for router in self._routers()}
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                for origin in list(box.outboxes):
                    if router_of(origin) is not None and origin not in origins:
                        self._change(box, changes.OutboxUntied(box.generation, origin))
                for origin in list(box.origins):
                    if router_of(origin) is not None and origin not in origins:
                        self._change(box, changes.OriginDropped(box.generation, origin))

    # -- routers

    def _pair_ends(self, router: RegisteredRouter) -> list[_RouterPair]:
        """Return both ends of a router, and create a missing end from the other.

        Returns an empty list if there is nothing to compare. A router that has lost a box is dropped when the
        server starts.
        """
        source, dest = self._box(router.route.source), self._box(router.route.dest)
        if source is None or dest is None:
            return []
        origin, route = router.origin, router.route
        outbox, origin_state = source.outboxes.get(origin), dest.origins.get(origin)
        head_seq = source.log.head_seq
        if outbox is None and origin_state is None:
            if router.is_tied:  # both boxes were captured before it was created: it begins at the head
                self._apply(0, changes.RouterRegistered(replace(router, is_tied=False, from_seq=None)))
            return []
        if outbox is None:
            assert origin_state is not None
            is_same_generation = (
                origin_state.generation == source.generation and origin_state.position != NOT_KNOWN
            )
            position = origin_state.position if is_same_generation else 0
            self._raise_head(source, position)
            attach = changes.OutboxTied(source.generation, origin, route, position, origin_state.total)
            self._change(source, attach)
            outbox = source.outboxes[origin]
        assert isinstance(outbox, RouterOutbox)
        if origin_state is None:
            # The destination was captured before it was attached: it has none of the copies.
            position = min(outbox.log_position.position, head_seq)
            move = changes.OriginMoved(dest.generation, origin, source.generation, position, pinned=True)
            self._change(dest, move)
            if outbox.log_position.total and not dest.is_memory:
                self._report_missing(dest, outbox.log_position.total)
            origin_state = dest.origins[origin]
        if not dest.is_memory and origin_state.generation > source.generation:
            # It knows a later generation of the source, which the restored source never had.
            position = min(outbox.log_position.position, head_seq)
            move = changes.OriginMoved(
                dest.generation, origin, source.generation, position, origin_state.lost_count + 1, pinned=True
            )
            self._change(dest, move)
            origin_state = dest.origins[origin]
        if source.is_memory:
            return []
        if (
            dest.is_memory
            or origin_state.generation != source.generation
            or origin_state.position == NOT_KNOWN
        ):
            self._move_outbox(
                source, outbox, min(outbox.log_position.position, head_seq), outbox.log_position.total
            )
            return []
        return [_RouterPair(router, source, outbox, dest, origin_state)]

    def _raise_heads(self, pairs: Sequence[_RouterPair]) -> None:
        """Raise the heads of sources above every seq that a destination has seen."""
        for pair in pairs:
            self._raise_head(pair.source, pair.origin_state.position)

    def _raise_head(self, box: Box, seq: int) -> None:
        head_seq = box.log.head_seq
        if seq > head_seq and not box.is_memory:
            self._reserve(box, seq)
            self._change(box, changes.SeqsLost(box.generation, head_seq + 1, seq))
            self._corrections = self._corrections._replace(
                skipped_seqs=self._corrections.skipped_seqs + seq - head_seq
            )

    def _move(self, pair: _RouterPair, position: int) -> None:
        """Set both ends of a router to one position. Records after it are sent at the next start."""
        origin_state = pair.origin_state
        if origin_state.position != position:
            self._change(
                pair.dest,
                changes.OriginMoved(
                    pair.dest.generation,
                    pair.router.origin,
                    origin_state.generation,
                    position,
                    origin_state.lost_count,
                    pinned=origin_state.is_pinned,
                ),
            )
        self._move_outbox(pair.source, pair.outbox, position, origin_state.total)

    def _move_outbox(self, source: Box, outbox: RouterOutbox, position: int, total: int) -> None:
        if outbox.log_position != (position, total) and not source.is_memory:
            self._change(source, changes.OutboxMoved(source.generation, outbox.origin, position, total))

    def _move_after_cut(self, pairs: Sequence[_RouterPair]) -> None:
        """Set the positions of all routers into one box, from whose end a cut may have removed copies.

        Copies that were cut came from records that were cut as well, except the copies in flight at that
        time. The difference of the two counts is their number: they are the last ones below the source's
        head.
        """
        dest = pairs[0].dest
        cut = self._cuts.get(dest.generation, Cut())
        tops = [min(pair.origin_state.position, pair.source.log.head_seq) for pair in pairs]
        missing = cut.copies
        is_sure = cut.is_whole and not any(map(self._is_uncounted, dest.origins))
        for pair in pairs:
            source_cut = self._cuts.get(pair.source.generation, Cut())
            is_sure &= source_cut.is_whole
            if pair.router.origin in source_cut.copied_seqs:
                cut_seqs = source_cut.copied_seqs[pair.router.origin]
                missing -= cut_seqs.range_cardinality(0, pair.origin_state.position + 1)
            # Records that came after the capture of the source existed only as copies, and these are cut.
            head_seq = source_cut.head_seq or pair.source.log.head_seq
            unseen = max(0, pair.origin_state.position - head_seq)
            is_sure &= not unseen or pair.router.route.filter is None
            missing -= unseen
        if missing > 0 and is_sure and len(pairs) == 1:
            position = self._position_before_last(pairs[0], tops[0], missing)
            if position is not None:
                tops, missing = [position], 0
        if missing > 0 or not cut.is_whole:
            self._report_missing(dest, max(1, missing))
        for pair, top in zip(pairs, tops, strict=True):
            self._move(pair, top)

    def _is_uncounted(self, origin: str) -> bool:
        """Return True if records from this origin look like copies of routers."""
        line = move_queue_of(origin)
        return line is not None and not line.is_dead

    def _position_before_last(self, pair: _RouterPair, top: int, count: int) -> int | None:
        """Return the seq of the source before the last `count` records, up to `top`, that the router copies.

        Returns None if some of these records may be missing.
        """
        log, route = pair.source.log, pair.router.route
        next_seq = top + 1
        for span in log.spans_back(top + 1):
            runs = log.runs(span, 0, min(span.count - 1, top - span.first_seq))
            last = min(span.last_seq, top)
            is_whole = not is_gap(log, last + 1, next_seq)
            if not is_whole or sum(b - a + 1 for a, b in runs) != last - span.first_seq + 1:
                return None
            next_seq = span.first_seq
            batch = self._load(pair.source, lambda span=span: span.payload)  # type: ignore[misc]
            for start, end in reversed(runs_to_copy(route, batch, runs)):
                if end - start + 1 >= count:
                    return span.first_seq + end - count
                count -= end - start + 1
        return None

    # -- dead letters and requeued jobs

    def _drop_later_letters(self) -> None:
        """Drop retained dead letters whose job did not exist at that time."""
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                letters = self._cuts.get(box.generation, Cut()).letters
                seqs = BitMap64(
                    letter.seq for letter in letters if self._is_later(letter) and box.log.is_live(letter.seq)
                )
                if seqs:
                    sizes = self._load(box, lambda box=box, seqs=seqs: box.log.measure_seqs(seqs))  # type: ignore[misc]
                    self._change(box, changes.RecordsDeleted(box.generation, 0, 0, seqs, sizes, self._now_ms))

    def _is_later(self, letter: Letter) -> bool:
        queue = self._box(letter.queue)
        if queue is None:
            return letter.queue in self._later_boxes
        return letter.src_seq > queue.log.head_seq

    def _settle_line(self, dest: Box, origin: str) -> None:
        """Compare a line of moves with the position that its destination has."""
        line_name, origin_state = move_queue_of(origin), dest.origins[origin]
        if line_name is None or origin_state.position == NOT_KNOWN or dest.is_memory:
            return
        source = self._machines[self._owner_of(line_name.box)].generations.get(line_name.generation)
        if source is None or source.is_memory:
            return
        line = source.moves.get((dest.name, line_name.is_dead))
        last = line.last_position if line is not None else 0
        done_position = line.log_position.position if line is not None else 0
        if origin_state.position > last:
            # The destination has moves that its source has not planned yet. The source plans them now, and
            # learns at the next start that they have arrived.
            seqs = self._arrived_jobs(source, dest, origin_state.position - last) if line_name.is_dead else []
            padding = origin_state.position - last - len(seqs)
            sizes = self._load(source, lambda: [source.log.measure_seqs(BitMap64([seq]))[0] for seq in seqs])
            plan = changes.MovesPlanned(
                source.generation,
                dest.name,
                line_name.is_dead,
                [0] * padding + seqs,
                [0] * (padding + len(seqs)),
                [0] * padding + sizes,
            )
            self._change(source, plan)
        elif origin_state.position < done_position:
            # The source has dropped records that never arrived here.
            assert line is not None
            self._lose_moves(dest, origin_state, line)

    def _settle_outputs(self, dest: Box, origin: str) -> None:
        """Compare outputs of a queue with the position that their box has."""
        name, origin_state = source_of_outputs(origin), dest.origins[origin]
        if name is None or origin_state.position == NOT_KNOWN or dest.is_memory:
            return
        source = self._machines[self._owner_of(name.box)].generations.get(name.generation)
        if source is None or source.is_memory:
            return
        outputs = None if source.outputs is None else source.outputs.queues.get(dest.name)
        if outputs is not None and origin_state.position < outputs.log_position.position:
            self._lose_moves(dest, origin_state, outputs)
        elif source.outputs is None or origin_state.position > source.outputs.last_position:
            # The box has outputs of acks that the source does not know: their positions are used.
            delivery = changes.OutputsDelivered(
                source.generation,
                dest.name,
                origin_state.position,
                self._now_ms,
                origin_state.total,
                dest.generation,
            )
            self._change(source, delivery)

    def _settle_unknown_line(self, source: Box, line: PlannedOutbox) -> None:
        """Report moves and outputs as lost if the destination does not know the line and the source has
        dropped them."""
        dest = self._box(line.dest)
        if source.is_memory or not line.log_position.position or dest is None or dest.is_memory:
            return
        if line.origin not in dest.origins:
            self._lose_moves(dest, Origin(source.generation, 0), line)

    def _lose_moves(self, dest: Box, origin_state: Origin, line: PlannedOutbox) -> None:
        """Report what the source has dropped and the destination does not have, if there is any."""
        count = line.lost_count(origin_state, dest.generation)
        if not count:
            return
        move = changes.OriginMoved(
            dest.generation,
            line.origin,
            line.generation,
            line.log_position.position,
            origin_state.lost_count,
            pinned=origin_state.is_pinned,
        )
        self._change(dest, move)
        self._report_missing(dest, count)

    def _arrived_jobs(self, source: Box, dest: Box, count: int) -> list[int]:
        """Return jobs of a queue that are the newest `count` letters in `dest`, and are still jobs."""
        moving = {move.seq for line in source.moves.values() for move in line.moves.values()}
        job_seqs: list[int] = []
        letter_count = 0
        for span in dest.log.spans_back(dest.log.head_seq + 1):
            batch = self._load(dest, lambda span=span: span.payload)  # type: ignore[misc]
            for letter in reversed(letters_in(batch, dest.log.runs(span, 0, span.count - 1))):
                if letter.queue != source.name:
                    continue
                letter_count += 1
                is_job = source.log.is_live(letter.src_seq) and letter.src_seq not in moving
                if is_job and batch.ts(letter.seq - batch.first_seq) >= source.created_ms:
                    job_seqs.append(letter.src_seq)
                if letter_count >= count:
                    return job_seqs[::-1]
        return job_seqs[::-1]
