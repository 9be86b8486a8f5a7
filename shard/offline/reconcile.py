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
from shard.offline.payload_loading import loading
from shard.storage.segments.store import SegmentStore
from streams.protocol.messages.routers import Router, router_of
from streams.protocol.messages.s2 import Basin, BasinConfig

T = TypeVar("T")

Made = list[tuple[int, Change]]


class Corrections(NamedTuple):
    #: Seqs that their box skips, because another box has copies of records that this one does not have.
    skipped_seqs: int = 0
    #: Copies that are missing for good; each box with some of them tells its readers.
    missing_copies: int = 0


class _Copies(NamedTuple):
    """A router with both its ends."""

    router: Router
    source: Box
    outbox: RouterOutbox
    dest: Box
    known: Origin


class Reconciler:
    """Compares the shards of a restore, and corrects them. `made` has the changes of each shard."""

    def __init__(
        self,
        machines: Sequence[Machine],
        stores: Sequence[SegmentStore],
        owner_of: Callable[[str], int],
        *,
        cuts: dict[int, Cut],
        younger: set[str],
        until_ms: int | None,
        now_ms: int,
    ) -> None:
        """`cuts` by the generation of the box; `younger` are boxes that a cut has left out whole."""
        self._machines = machines
        self._stores = stores
        self._owner_of = owner_of
        self._cuts = cuts
        self._younger = younger
        self._until_ms = until_ms
        self._now_ms = now_ms
        self._found = Corrections()
        self.made: list[Made] = [[] for _ in machines]

    def __repr__(self) -> str:
        return f"<Reconciler of {len(self._machines)} shards: {self._found}>"

    def run(self) -> Corrections:
        self._settle_basins()
        self._untie_remnants()
        pairs = [pair for router in self._registered() for pair in self._paired(router)]
        if self._until_ms is None:
            self._raise_heads(pairs)
            for pair in pairs:
                self._move(pair, pair.known.position)
        else:
            by_dest: dict[int, list[_Copies]] = {}
            for pair in pairs:
                by_dest.setdefault(pair.dest.generation, []).append(pair)
            for mine in by_dest.values():
                self._move_after_cut(mine)
        self._drop_younger_letters()
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                for origin in list(box.origins):
                    self._settle_line(box, origin)
                for line in list(box.moves.values()):
                    self._settle_unknown_line(box, line)
        return self._found

    # -- helpers

    def _box(self, name: str) -> Box | None:
        box: Box | None = self._machines[self._owner_of(name)].boxes.get(name)
        return box

    def _apply(self, shard: int, change: Change) -> None:
        machine = self._machines[shard]
        lsn = machine.lsn + 1
        machine.apply(change, lsn)
        self.made[shard].append((lsn, change))

    def _change(self, box: Box, change: Change) -> None:
        self._apply(self._owner_of(box.name), change)

    def _store(self, box: Box) -> SegmentStore:
        return self._stores[self._owner_of(box.name)]

    def _loaded(self, box: Box, ask: Callable[[], T]) -> T:
        return loading(self._store(box), ask)

    def _report_missing(self, box: Box, count: int) -> None:
        """Tells the readers of a box that so many copies never came."""
        seq = box.log.head_seq + 1
        self._reserve(box, seq)
        self._change(box, changes.SeqsLost(box.generation, seq, seq, count))
        self._found = self._found._replace(missing_copies=self._found.missing_copies + count)

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
                known: Basin | None = register.basins.get(name)
                if number > last_number and (known is None or known.number < number):
                    basin = Basin(name=name, number=number, config=BasinConfig(), created_ms=box.created_ms)
                    self._apply(0, changes.BasinRegistered(basin))
        if self._until_ms is not None:
            for basin in list(register.basins.values()):
                if basin.created_ms > self._until_ms and basin.number not in numbers:
                    self._apply(0, changes.BasinDropped(basin.name))

    def _registered(self) -> list[Router]:
        return list(self._machines[0].routers.routers.values())

    def _untie_remnants(self) -> None:
        """Ends of routers that are not registered go, so that their numbers can be given to others."""
        registered = {router.origin for router in self._registered()}
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                for origin in list(box.outboxes):
                    if router_of(origin) is not None and origin not in registered:
                        self._change(box, changes.OutboxUntied(box.generation, origin))
                for origin in list(box.origins):
                    if router_of(origin) is not None and origin not in registered:
                        self._change(box, changes.OriginDropped(box.generation, origin))

    # -- routers

    def _paired(self, router: Router) -> list[_Copies]:
        """Both ends of a router, the one that is missing made from the other. Empty where there is nothing to
        compare. A router that has lost a box is dropped when the server starts."""
        source, dest = self._box(router.route.source), self._box(router.route.dest)
        if source is None or dest is None:
            return []
        origin, route = router.origin, router.route
        outbox, known = source.outboxes.get(origin), dest.origins.get(origin)
        head_seq = source.log.head_seq
        if outbox is None and known is None:
            if router.is_tied:  # both boxes were captured before it was made: it begins at the head
                self._apply(0, changes.RouterRegistered(replace(router, is_tied=False, from_seq=None)))
            return []
        if outbox is None:
            assert known is not None
            is_same_life = known.life == source.generation and known.position != NOT_KNOWN
            position = known.position if is_same_life else 0
            self._raise_head(source, position)
            tied = changes.OutboxTied(source.generation, origin, route, position, known.total)
            self._change(source, tied)
            outbox = source.outboxes[origin]
        assert isinstance(outbox, RouterOutbox)
        if known is None:
            # The destination was captured before it was tied: it has none of the copies that were made since.
            position = min(outbox.saved_position, head_seq)
            moved = changes.OriginMoved(dest.generation, origin, source.generation, position, pinned=True)
            self._change(dest, moved)
            if outbox.saved_total and not dest.is_memory:
                self._report_missing(dest, outbox.saved_total)
            known = dest.origins[origin]
        if not dest.is_memory and known.life > source.generation:
            # It knows a later life of the source, which never was.
            position = min(outbox.saved_position, head_seq)
            moved = changes.OriginMoved(
                dest.generation, origin, source.generation, position, known.lost + 1, pinned=True
            )
            self._change(dest, moved)
            known = dest.origins[origin]
        if source.is_memory:
            return []
        if dest.is_memory or known.life != source.generation or known.position == NOT_KNOWN:
            self._move_outbox(source, outbox, min(outbox.saved_position, head_seq), outbox.saved_total)
            return []
        return [_Copies(router, source, outbox, dest, known)]

    def _raise_heads(self, pairs: Sequence[_Copies]) -> None:
        """No source gives a seq that some destination has seen."""
        for pair in pairs:
            self._raise_head(pair.source, pair.known.position)

    def _raise_head(self, box: Box, seq: int) -> None:
        head_seq = box.log.head_seq
        if seq > head_seq and not box.is_memory:
            self._reserve(box, seq)
            self._change(box, changes.SeqsLost(box.generation, head_seq + 1, seq))
            self._found = self._found._replace(skipped_seqs=self._found.skipped_seqs + seq - head_seq)

    def _move(self, pair: _Copies, position: int) -> None:
        """Puts both ends of a router at the same position. What lies behind it is sent at the next start."""
        known = pair.known
        if known.position != position:
            self._change(
                pair.dest,
                changes.OriginMoved(
                    pair.dest.generation,
                    pair.router.origin,
                    known.life,
                    position,
                    known.lost,
                    pinned=known.pinned,
                ),
            )
        self._move_outbox(pair.source, pair.outbox, position, known.total)

    def _move_outbox(self, source: Box, outbox: RouterOutbox, position: int, total: int) -> None:
        if (outbox.saved_position, outbox.saved_total) != (position, total) and not source.is_memory:
            self._change(source, changes.OutboxMoved(source.generation, outbox.origin, position, total))

    def _move_after_cut(self, pairs: Sequence[_Copies]) -> None:
        """Positions of all routers into one box, from whose end a cut may have taken copies.

        Copies that were cut came from records that were cut as well, but for those that were on their way at
        that time. Counting both tells how many those were: they are the last ones below the source's head.
        """
        dest = pairs[0].dest
        cut = self._cuts.get(dest.generation, Cut())
        tops = [min(pair.known.position, pair.source.log.head_seq) for pair in pairs]
        missing = cut.copies
        is_sure = cut.is_whole and not any(map(self._is_uncounted, dest.origins))
        for pair in pairs:
            source_cut = self._cuts.get(pair.source.generation, Cut())
            is_sure &= source_cut.is_whole
            if pair.router.origin in source_cut.wanted:
                wanted = source_cut.wanted[pair.router.origin]
                missing -= wanted.range_cardinality(0, pair.known.position + 1)
            # Of records that came after the source was captured only the copies were there, and are cut.
            head_seq = source_cut.head_seq or pair.source.log.head_seq
            unseen = max(0, pair.known.position - head_seq)
            is_sure &= not unseen or pair.router.route.filter is None
            missing -= unseen
        if missing > 0 and is_sure and len(pairs) == 1:
            found = self._before_last(pairs[0], tops[0], missing)
            if found is not None:
                tops, missing = [found], 0
        if missing > 0 or not cut.is_whole:
            self._report_missing(dest, max(1, missing))
        for pair, top in zip(pairs, tops, strict=True):
            self._move(pair, top)

    def _is_uncounted(self, origin: str) -> bool:
        """Whether what comes from there cannot be told from what routers bring."""
        line = line_of(origin)
        return line is not None and not line.is_dead

    def _before_last(self, pair: _Copies, top: int, count: int) -> int | None:
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
            batch = self._loaded(pair.source, lambda span=span: span.payload)  # type: ignore[misc]
            for start, end in reversed(wanted_runs(route, batch, runs)):
                if end - start + 1 >= count:
                    return span.first_seq + end - count
                count -= end - start + 1
        return None

    # -- dead letters, and jobs that came back

    def _drop_younger_letters(self) -> None:
        """A letter that was kept beyond the time stays if its job was there at that time."""
        for machine in self._machines:
            for box in list(machine.boxes.values()):
                letters = self._cuts.get(box.generation, Cut()).letters
                gone = BitMap64(
                    letter.seq
                    for letter in letters
                    if self._is_younger(letter) and box.log.is_live(letter.seq)
                )
                if gone:
                    sizes = self._loaded(box, lambda box=box, gone=gone: box.log.measure_seqs(gone))  # type: ignore[misc]
                    self._change(box, changes.RecordsDeleted(box.generation, 0, 0, gone, sizes, self._now_ms))

    def _is_younger(self, letter: Letter) -> bool:
        queue = self._box(letter.queue)
        if queue is None:
            return letter.queue in self._younger
        return letter.src_seq > queue.log.head_seq

    def _settle_line(self, dest: Box, origin: str) -> None:
        """Compares a line of moves with what its destination knows of it."""
        found, known = line_of(origin), dest.origins[origin]
        if found is None or known.position == NOT_KNOWN or dest.is_memory:
            return
        source = self._machines[self._owner_of(found.box)].generations.get(found.generation)
        if source is None or source.is_memory:
            return
        line = source.moves.get((dest.name, found.is_dead))
        last = line.last if line is not None else 0
        done = line.saved_position if line is not None else 0
        if known.position > last:
            # The destination has what its source has not planned yet. The source plans it now, and is told at
            # the next start that it has arrived.
            seqs = self._arrived(source, dest, known.position - last) if found.is_dead else []
            padding = known.position - last - len(seqs)
            sizes = self._loaded(
                source, lambda: [source.log.measure_seqs(BitMap64([seq]))[0] for seq in seqs]
            )
            planned = changes.MovesPlanned(
                source.generation,
                dest.name,
                found.is_dead,
                [0] * padding + seqs,
                [0] * (padding + len(seqs)),
                [0] * padding + sizes,
            )
            self._change(source, planned)
        elif known.position < done:
            # The source has let go of records that never came here.
            self._lose_moves(dest, origin, known, done, source.generation)

    def _settle_unknown_line(self, source: Box, line: Line) -> None:
        """A destination that does not know a line yet, and whose source has let go of what it sent there."""
        dest = self._box(line.dest)
        if source.is_memory or not line.saved_position or dest is None or dest.is_memory:
            return
        if line.origin not in dest.origins:
            known = Origin(source.generation, 0)
            self._lose_moves(dest, line.origin, known, line.saved_position, source.generation)

    def _lose_moves(self, dest: Box, origin: str, known: Origin, position: int, life: int) -> None:
        moved = changes.OriginMoved(dest.generation, origin, life, position, known.lost, pinned=known.pinned)
        self._change(dest, moved)
        self._report_missing(dest, position - known.position)

    def _arrived(self, source: Box, dest: Box, count: int) -> list[int]:
        """Jobs of a queue that are the newest `count` letters in `dest`, and still jobs."""
        moving = {move.seq for line in source.moves.values() for move in line.moves.values()}
        found: list[int] = []
        seen = 0
        for span in dest.log.spans_back(dest.log.head_seq + 1):
            batch = self._loaded(dest, lambda span=span: span.payload)  # type: ignore[misc]
            for letter in reversed(letters_in(batch, dest.log.runs(span, 0, span.count - 1))):
                if letter.queue != source.name:
                    continue
                seen += 1
                is_job = source.log.is_live(letter.src_seq) and letter.src_seq not in moving
                if is_job and batch.ts(letter.seq - batch.first_seq) >= source.created_ms:
                    found.append(letter.src_seq)
                if seen >= count:
                    return found[::-1]
        return found[::-1]
