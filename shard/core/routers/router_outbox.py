"""The outbox of a router: selects the next records of the box's log and writes the head of a copy batch.

Rules of the file
- A router copies whole batches at a time where possible. The relay gets visible records only; a copy inside
  the shard may be logged with its record (`Durability.copyable_seq`).
- The outbox counts losses: records that a cap, the TTL, a crash or the source's own source removed before
  they were copied. Deleted records are skipped and not counted (v0 §4.3, §6.1).
- One copy batch has one number of hops, because a batch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.live_runs import RunCollector, walk_live_runs
from shard.core.boxes.pages import runs_of
from shard.core.boxes.sealed import NotLoaded, Span
from shard.core.routers.outbox import (
    BATCH_BYTES_MAX,
    EXAMINE_MAX,
    PATIENT_BATCHES_MAX,
    PATIENT_BYTES_MAX,
    Load,
    Outbox,
)
from streams.protocol.messages.forwards import HOPS_MAX, ForwardHead
from streams.protocol.messages.routers import Route
from streams.protocol.model.job_fields import JobFields, join
from streams.protocol.model.matches import Match
from streams.protocol.model.records import Batch


class RouterOutbox(Outbox):
    """Copies the records of one box along one route."""

    __slots__ = ("_log", "route")

    def __init__(
        self, *, log: BoxLog, route: Route, origin: str, generation: int, position: int, total: int = 0
    ) -> None:
        super().__init__(
            source=route.source,
            origin=origin,
            dest=route.dest,
            generation=generation,
            position=position,
            total=total,
        )
        self.route = route
        self._log = log

    def batch_head(self, load: Load, after: int) -> ForwardHead:
        return ForwardHead(
            box=self.dest,
            origin=self.origin,
            life=self.generation,
            after=after,
            upto=load.upto,
            count=load.count,
            lost=load.lost_count,
            hops=load.hops + 1,
            keep_nodes=self.route.preserve_node,
            tags=load.tags,
            is_urgent=len(self.in_flight) >= PATIENT_BATCHES_MAX or len(load.text) > PATIENT_BYTES_MAX,
            job_fields=load.job_fields,
        )

    def recreate(self, log: BoxLog, generation: int) -> RouterOutbox:
        return RouterOutbox(log=log, route=self.route, origin=self.origin, generation=generation, position=0)

    @property
    def done_position(self) -> int:
        """The visible seq up to which every record is copied or needs no copy."""
        is_busy = self.in_flight or self.is_halted or self.retry_at_ms
        return min(self.position if is_busy else self.seen_from, self._log.visible_seq)

    @property
    def lag(self) -> int:
        return self._log.visible_seq - self.done_position

    def unseen_count(self, upto: int = 0) -> int:
        return max(0, (upto or self._log.visible_seq) - self.seen_from)

    def next_records(self, after: int, records_max: int, upto: int = 0) -> Load:
        log = self._log
        last_seq = upto or log.visible_seq
        floor = min(log.evict_floor, last_seq + 1)
        lost_count = max(0, floor - after - 1)
        start = max(after, floor - 1)
        picker = _Picker(self.route, records_max)
        upto = walk_live_runs(picker, log, start + 1, last_seq)
        hole = log.hole_after(start)
        while hole is not None and hole.last_seq <= upto:
            lost_count += hole.missed_after(start)
            hole = log.hole_after(hole.last_seq)
        return Load(
            upto,
            picker.count,
            picker.text(),
            picker.tags(),
            lost_count,
            picker.hops,
            upto < last_seq,
            picker.job_fields(),
        )


RouterFacts = tuple[str, Route, int, int]


def facts_of(outboxes: Mapping[str, Outbox]) -> list[RouterFacts]:
    """Return (origin, route, position, total) of the routers among these outboxes, for a snapshot."""
    return [
        (name, outbox.route, *outbox.log_position)
        for name, outbox in outboxes.items()
        if isinstance(outbox, RouterOutbox)
    ]


def restore_outboxes(facts: Iterable[RouterFacts], log: BoxLog, generation: int) -> dict[str, Outbox]:
    """Return the outboxes of a snapshot."""
    return {
        name: RouterOutbox(
            log=log, route=route, origin=name, generation=generation, position=position, total=total
        )
        for name, route, position, total in facts
    }


class _Picker(RunCollector):
    """Collects the runs of one copy batch, within its limits."""

    __slots__ = (
        "_bytes_left",
        "_job_fields",
        "_match",
        "_parts",
        "_records_left",
        "_tags",
        "count",
        "examined_count",
        "hops",
    )

    def __init__(self, route: Route, records_max: int) -> None:
        self._match = route.filter
        self._records_left = records_max
        self._bytes_left = BATCH_BYTES_MAX
        self._parts: list[bytes | memoryview] = []
        self._tags: list[bytes] | None = [] if route.preserve_tag else None
        self._job_fields: list[tuple[JobFields | None, int]] = []
        self.count = 0
        self.examined_count = 0
        self.hops = 0

    def text(self) -> bytes:
        return b",".join(self._parts)

    def tags(self) -> bytes | None:
        if not self._tags or not any(tags.strip(b"\0") for tags in self._tags):
            return None
        return b"\0".join(self._tags)

    def job_fields(self) -> bytes | None:
        fields = join(self._job_fields)
        return None if fields is None else fields.to_bytes()

    @property
    def is_full(self) -> bool:
        return self._records_left <= 0 or self._bytes_left <= 0 or self.examined_count >= EXAMINE_MAX

    def stops_before(self, span: Span) -> bool:
        if span.dead < span.count and self.count:
            try:
                if span.payload.hops != self.hops:
                    return True
            except NotLoaded:
                return True  # the records at hand are sent now
        self.examined_count += span.count
        return False

    def take(self, batch: Batch, first: int, last: int) -> int:
        if batch.hops >= HOPS_MAX:
            return last
        self.hops = batch.hops
        for run_first, run_last in matching_runs(self._match, batch, [(first, last)]):
            if self.is_full:
                return run_first - 1
            top = min(run_last, run_first + self._records_left - 1)
            top = batch.index_within_bytes(run_first, top, self._bytes_left)
            if top < run_first:
                if self.count:
                    self._bytes_left = 0
                    return run_first - 1
                top = run_first  # a copy batch has at least one record, however large
            self._parts.append(batch.text(run_first, top))
            if self._tags is not None:
                self._tags.append(batch.tags_of(run_first, top))
            fields = None if batch.job_fields is None else batch.job_fields.part(run_first, top)
            self._job_fields.append((fields and fields.without_times, top - run_first + 1))
            self.count += top - run_first + 1
            self._records_left -= top - run_first + 1
            self._bytes_left -= batch.size(run_first, top)
            if top < run_last:
                return top
        return last


def runs_to_copy(route: Route, batch: Batch, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of these runs of a batch (indexes) that a router copies."""
    return matching_runs(route.filter, batch, runs) if batch.hops < HOPS_MAX else []


def matching_runs(match: Match | None, batch: Batch, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of these runs of a batch (indexes) whose tags match a filter."""
    if match is None or not runs:
        return runs
    tags = batch.tag_list()
    if tags is None:
        return []
    return [
        part for first, last in runs for part in runs_of(map(match.accepts, tags[first : last + 1]), first)
    ]
