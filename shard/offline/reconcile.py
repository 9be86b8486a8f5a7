"""Makes the shards of a restore agree about everything that names two boxes.

A backup has each shard as of its own moment, and a restore up to a time cuts each box by its own times. So
two boxes that share something may not agree, and what each of them would do next is wrong:

    a destination above its source's head    seqs that the source gives again would count as repeats
    a source above its destination           what is missing would be sent with the next write only
    a dead letter in both boxes, or in none  its job would be done twice, or never
    one end of a router without the other    the router would be dropped
    a stream without its basin               the stream would be deleted

Rules of the file
- It runs when all shards are restored and none is served. Every correction is a change like any other: the
  machine applies it, and it is logged behind what was restored.
- A seq or position that any box has seen is never given a second time.
- Copies are sent again where it is known which are missing; where it is not, the loss is reported at once, as
  a `source_trim` tombstone in the destination. Nothing is copied twice.
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
from shard.core.queues.move_lines import Letter, Line, letters_in, line_of
from shard.core.routers.copy_sources import NOT_KNOWN, Origin
from shard.core.routers.router_outbox import RouterOutbox, wanted_runs
from shard.offline.box_cuts import Cut, is_gap
from shard.offline.payload_loading import load_missing
from shard.storage.segments.store import SegmentStore
from streams.protocol.messages.routers import Router, router_of
from streams.protocol.messages.s2 import Basin, BasinConfig

T = TypeVar("T")

ShardChanges = list[tuple[int, Change]]


class Corrections(NamedTuple):
    #: Seqs that their box skips, because another box has copies of records that this one does not have.
    skipped_seqs: int = 0
    #: Copies that are missing for good; each box with some of them tells its readers.
    missing_copies: int = 0


class _RouterPair(NamedTuple):
    """A router with both its ends."""

    router: Router
    source: Box
    outbox: RouterOutbox
    dest: Box
    origin_state: Origin


class Reconciler:
    """Compares the shards of a restore, and corrects them. `made` has the changes of each shard."""

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
        """`cuts` by the generation of the box; `younger` are boxes that a cut has left out whole."""
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
                for line in list(box.moves.values()):
                    self._settle_unknown_line(box, line)
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
        """Tells the readers of a box that so many copies never came."""
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
        """A basin that was made after the first shard was captured is registered for its streams. One that is
        younger than the time, and has none, goes."""
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

    def _routers(self) -> list[Router]:
        return list(self._machines[0].routers.routers.values())

    def _detach_unregistered(self) -> None:
        """Ends of routers that are not registered go, so that their numbers can be given to others."""
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

    def _pair_ends(self, router: Router) -> list[_RouterPair]:
        """Both ends of a router, the one that is missing made from the other. Empty where there is nothing to
        compare. A router that has lost a box is dropped when the server starts."""
        source, dest = self._box(router.route.source), self._box(router.route.dest)
        if source is None or dest is None:
            return []
        origin, route = router.origin, router.route
        outbox, origin_state = source.outboxes.get(origin), dest.origins.get(origin)
        head_seq = source.log.head_seq
        if outbox is None and origin_state is None:
            if router.is_tied:  # both boxes were captured before it was made: it begins at the head
                self._apply(0, changes.RouterRegistered(replace(router, is_tied=False, from_seq=None)))
            return []
        if outbox is None:
            assert origin_state is not None
            is_same_life = origin_state.life == source.generation and origin_state.position != NOT_KNOWN
            position = origin_state.position if is_same_life else 0
            self._raise_head(source, position)
            attach = changes.OutboxTied(source.generation, origin, route, position, origin_state.total)
            self._change(source, attach)
            outbox = source.outboxes[origin]
        assert isinstance(outbox, RouterOutbox)
        if origin_state is None:
            # The destination was captured before it was tied: it has none of the copies that were made since.
            position = min(outbox.saved_position, head_seq)
            move = changes.OriginMoved(dest.generation, origin, source.generation, position, pinned=True)
            self._change(dest, move)
            if outbox.saved_total and not dest.is_memory:
                self._report_missing(dest, outbox.saved_total)
            origin_state = dest.origins[origin]
        if not dest.is_memory and origin_state.life > source.generation:
            # It knows a later life of the source, which never was.
            position = min(outbox.saved_position, head_seq)
            move = changes.OriginMoved(
                dest.generation, origin, source.generation, position, origin_state.lost + 1, pinned=True
            )
            self._change(dest, move)
            origin_state = dest.origins[origin]
        if source.is_memory:
            return []
        if dest.is_memory or origin_state.life != source.generation or origin_state.position == NOT_KNOWN:
            self._move_outbox(source, outbox, min(outbox.saved_position, head_seq), outbox.saved_total)
            return []
        return [_RouterPair(router, source, outbox, dest, origin_state)]

    def _raise_heads(self, pairs: Sequence[_RouterPair]) -> None:
        """No source gives a seq that some destination has seen."""
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
        """Puts both ends of a router at the same position. What lies behind it is sent at the next start."""
        origin_state = pair.origin_state
        if origin_state.position != position:
            self._change(
                pair.dest,
                changes.OriginMoved(
                    pair.dest.generation,
                    pair.router.origin,
                    origin_state.life,
                    position,
                    origin_state.lost,
                    pinned=origin_state.pinned,
                ),
            )
        self._move_outbox(pair.source, pair.outbox, position, origin_state.total)

    def _move_outbox(self, source: Box, outbox: RouterOutbox, position: int, total: int) -> None:
        if (outbox.saved_position, outbox.saved_total) != (position, total) and not source.is_memory:
            self._change(source, changes.OutboxMoved(source.generation, outbox.origin, position, total))

    def _move_after_cut(self, pairs: Sequence[_RouterPair]) -> None:
        """Positions of all routers into one box, from whose end a cut may have taken copies.

        Copies that were cut came from records that were cut as well, but for those that were on their way at
        that time. Counting both tells how many those were: they are the last ones below the source's head.
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
            # Of records that came after the source was captured only the copies were there, and are cut.
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
        """Whether what comes from there cannot be told from what routers bring."""
        line = line_of(origin)
        return line is not None and not line.is_dead

    def _position_before_last(self, pair: _RouterPair, top: int, count: int) -> int | None:
        """The seq of the source behind which lie `count` records, up to `top`, that the router copies. None
        if some of those may be gone."""
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
            for start, end in reversed(wanted_runs(route, batch, runs)):
                if end - start + 1 >= count:
                    return span.first_seq + end - count
                count -= end - start + 1
        return None

    # -- dead letters, and jobs that came back

    def _drop_later_letters(self) -> None:
        """A letter that was kept beyond the time stays if its job was there at that time."""
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
        """Compares a line of moves with what its destination knows of it."""
        line_name, origin_state = line_of(origin), dest.origins[origin]
        if line_name is None or origin_state.position == NOT_KNOWN or dest.is_memory:
            return
        source = self._machines[self._owner_of(line_name.box)].generations.get(line_name.generation)
        if source is None or source.is_memory:
            return
        line = source.moves.get((dest.name, line_name.is_dead))
        last = line.last if line is not None else 0
        done_position = line.saved_position if line is not None else 0
        if origin_state.position > last:
            # The destination has what its source has not planned yet. The source plans it now, and is told at
            # the next start that it has arrived.
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
            # The source has let go of records that never came here.
            self._lose_moves(dest, origin, origin_state, done_position, source.generation)

    def _settle_unknown_line(self, source: Box, line: Line) -> None:
        """A destination that does not know a line yet, and whose source has let go of what it sent there."""
        dest = self._box(line.dest)
        if source.is_memory or not line.saved_position or dest is None or dest.is_memory:
            return
        if line.origin not in dest.origins:
            origin_state = Origin(source.generation, 0)
            self._lose_moves(dest, line.origin, origin_state, line.saved_position, source.generation)

    def _lose_moves(self, dest: Box, origin: str, origin_state: Origin, position: int, life: int) -> None:
        move = changes.OriginMoved(
            dest.generation, origin, life, position, origin_state.lost, pinned=origin_state.pinned
        )
        self._change(dest, move)
        self._report_missing(dest, position - origin_state.position)

    def _arrived_jobs(self, source: Box, dest: Box, count: int) -> list[int]:
        """Jobs of a queue that are the newest `count` letters in `dest`, and still jobs."""
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
