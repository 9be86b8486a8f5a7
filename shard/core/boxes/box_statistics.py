"""Counts the boxes of a shard a few at a time, while the machine goes on (v0 §13).

A walk over all boxes at once would hold up everybody: a hundred thousand take a tenth of a second. Boxes are
visited in the order of their names, so one that comes or goes meanwhile is counted or not, and none twice.

Lag is counted in records, and in time as the age of the first record that was not dealt with yet. Where the
time of that record is not in memory, the age is that of its batch, so it may be too high and never too low.

Bounds: `rows_max` boxes are reported one by one, the largest by size, lag and rate
(`streams/protocol/telemetry/top_rows.py`), as many routers and half as many groups, those that lag most; the
totals count all. A box costs a step one unit, and each `_GROUPS_A_UNIT` of its groups another.
"""

from __future__ import annotations

from itertools import islice

from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.box_rates import BoxRates
from shard.core.context import Context
from shard.core.queues.queue import Queue
from shard.core.routers.router_outbox import RouterOutbox
from streams.protocol.messages.routers import router_of
from streams.protocol.telemetry.reports import BoxRow, BoxTotals, GroupRow, QueueRow, RouterRow
from streams.protocol.telemetry.top_rows import Top, TopBoxes

_GROUPS_A_UNIT = 16


class BoxStatistics:
    def __init__(self, context: Context, rows_max: int, *, now_ms: int, rates: BoxRates) -> None:
        self._context = context
        self._now_ms = now_ms
        self._rates = rates
        self._walk = rates.begin(now_ms)
        self._after = ""
        self._boxes = TopBoxes(rows_max)
        self._routers: Top[RouterRow] = Top(rows_max)
        self._groups: Top[GroupRow] = Top(rows_max // 2)
        self.totals = BoxTotals(boxes={"memory": 0, "disk": 0, "fsync": 0, "object": 0})

    def __repr__(self) -> str:
        return f"<Census {sum(self.totals.boxes.values())} boxes, up to {self._after!r}>"

    @property
    def boxes(self) -> list[BoxRow]:
        return self._boxes.rows()

    @property
    def routers(self) -> list[RouterRow]:
        return self._routers.rows()

    @property
    def groups(self) -> list[GroupRow]:
        return self._groups.rows()

    @property
    def has_more(self) -> bool:
        return self._boxes.has_more or self._routers.has_more or self._groups.has_more

    def step(self, units: int) -> bool:
        """Count some boxes. Return True if there are more."""
        boxes = self._context.boxes
        names = list(islice(boxes.irange(minimum=self._after, inclusive=(False, True)), units))
        units_left = units
        for name in names:
            units_left -= self._add(boxes[name])
            self._after = name
            if units_left <= 0:
                return True
        self._rates.end(self._walk)
        return False

    def _add(self, box: Box) -> int:
        """Count a box. Return what it cost."""
        totals, log = self.totals, box.log
        records, size = log.visible_totals()
        totals.boxes[box.config.durability] += 1
        totals.records += records
        totals.bytes += size
        totals.segments += len(log.segments)
        lag, queue = 0, None
        if box.queue is not None:
            queue = self._add_queue(box, records)
            lag = queue.ready
        for outbox in box.outboxes.values():
            router = router_of(outbox.origin)
            assert router is not None and isinstance(outbox, RouterOutbox), "moves of jobs are kept elsewhere"
            lag = max(lag, self._add_router(router[0], outbox, log))
        groups = len(box.groups)
        if groups:
            lag = max(lag, self._add_groups(box))
        seq = log.visible_seq
        rate = self._walk.rate_of(box.generation, seq)
        if self._boxes.wants(size, lag, rate):
            earliest_seq = box.visible_earliest_seq
            self._boxes.add(BoxRow(box.name, seq, earliest_seq, records, size, queue, lag, rate))
        return 1 + groups // _GROUPS_A_UNIT

    def _add_queue(self, box: Box, records: int) -> QueueRow:
        assert box.queue is not None
        totals, queue = self.totals, box.queue
        oldest_ms = self._age_ms(box.log, box.log.earliest_seq - 1) if records else 0
        row = QueueRow(
            queue.ready(records),
            queue.in_flight,
            queue.delayed_count,
            queue.dead_lettered,
            oldest_ms / 1000,
            self._ready_ms(box.log, queue) / 1000,
            queue.delivered_count,
            0 if box.outputs is None else box.outputs.pending_count,
        )
        totals.queues += 1
        totals.jobs = QueueRow(
            totals.jobs.ready + row.ready,
            totals.jobs.in_flight + row.in_flight,
            totals.jobs.delayed + row.delayed,
            totals.jobs.dead_lettered + row.dead_lettered,
            max(totals.jobs.oldest_s, row.oldest_s),
            max(totals.jobs.ready_s, row.ready_s),
            totals.jobs.deliveries + row.deliveries,
            totals.jobs.outputs_pending + row.outputs_pending,
        )
        return row

    def _ready_ms(self, log: BoxLog, queue: Queue) -> int:
        """Return for how long the next job to deliver has been ready; 0 if there is none."""
        seqs, _ = queue.pick(log, 1, 0)
        if not seqs:
            return 0
        return max(0, min(self._age_ms(log, seqs[0] - 1), self._now_ms - queue.time_of(seqs[0])))

    def _add_router(self, name: str, outbox: RouterOutbox, log: BoxLog) -> int:
        totals = self.totals
        lag, is_blocked = outbox.lag, bool(outbox.failures)
        lag_s = self._age_ms(log, outbox.done_position) / 1000 if lag else 0.0
        totals.routers += 1
        totals.router_lag += lag
        totals.router_lag_s = max(totals.router_lag_s, lag_s)
        totals.routers_blocked += is_blocked
        if self._routers.wants(lag):
            self._routers.add(lag, name, RouterRow(name, lag, outbox.total, is_blocked, lag_s))
        return lag

    def _add_groups(self, box: Box) -> int:
        """Count the groups of a box. Return the lag of the one that is furthest behind."""
        totals, log, top = self.totals, box.log, self._groups
        seq = log.visible_seq
        least = seq
        for name, group in box.groups.items():
            cursor = group.cursor
            least = min(least, cursor)
            if top.wants(seq - cursor):
                lag_s = self._age_ms(log, cursor) / 1000
                row = GroupRow(box.name, name, seq - cursor, lag_s)
                top.add(seq - cursor, f"{box.name}\0{name}", row)
        totals.groups += len(box.groups)
        if seq > least:
            totals.group_lag_s = max(totals.group_lag_s, self._age_ms(log, least) / 1000)
        return seq - least

    def _age_ms(self, log: BoxLog, seq: int) -> int:
        """Return the age of the first record behind `seq` that readers may see; 0 if there is none."""
        if seq >= log.visible_seq:
            return 0
        for span in log.spans(seq + 1):
            if span.first_seq <= log.visible_seq:
                return max(0, self._now_ms - span.ts_at_least(max(0, seq + 1 - span.first_seq)))
            break
        return 0
