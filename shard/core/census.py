"""Counts the boxes of a shard a few at a time, while the machine goes on (v0 §13).

A walk over all boxes at once would hold up everybody: a hundred thousand take a tenth of a second. Boxes are
visited in the order of their names, so one that comes or goes meanwhile is counted or not, and none twice.

Bounds: `rows_max` boxes and as many routers are told one by one, the first by name, so that the same are told
each time; the others only count in the totals.
"""

from __future__ import annotations

from itertools import islice

from shard.core.box import Box
from shard.core.machine import Machine
from shard.core.router import RouterOutbox
from streams.protocol.reports import BoxRow, BoxTotals, QueueRow, RouterRow
from streams.protocol.routers import router_of


class Census:
    def __init__(self, machine: Machine, rows_max: int) -> None:
        self._machine = machine
        self._rows_max = rows_max
        self._after = ""
        self.totals = BoxTotals(boxes={"memory": 0, "disk": 0, "fsync": 0, "object": 0})
        self.boxes: list[BoxRow] = []
        self.routers: list[RouterRow] = []
        self.has_more = False

    def __repr__(self) -> str:
        return f"<Census {sum(self.totals.boxes.values())} boxes, up to {self._after!r}>"

    def step(self, count: int) -> bool:
        """Whether there is more to count."""
        boxes = self._machine.boxes
        names = list(islice(boxes.irange(minimum=self._after, inclusive=(False, True)), count))
        for name in names:
            self._add(boxes[name])
        if names:
            self._after = names[-1]
        return len(names) == count

    def _add(self, box: Box) -> None:
        totals = self.totals
        records, size = box.log.visible_totals()
        totals.boxes[box.config.durability] += 1
        totals.records += records
        totals.bytes += size
        totals.segments += len(box.log.segments)
        queue = None
        if box.queue is not None:
            queue = QueueRow(
                box.queue.ready(records), box.queue.in_flight, box.queue.delayed, box.queue.dead_lettered
            )
            totals.queues += 1
            totals.jobs = QueueRow(
                totals.jobs.ready + queue.ready,
                totals.jobs.in_flight + queue.in_flight,
                totals.jobs.delayed + queue.delayed,
                totals.jobs.dead_lettered + queue.dead_lettered,
            )
        for outbox in box.outboxes.values():
            named = router_of(outbox.origin)
            assert named is not None and isinstance(outbox, RouterOutbox), "moves of jobs are kept elsewhere"
            self._add_router(named[0], outbox)
        if len(self.boxes) < self._rows_max:
            log = box.log
            row = BoxRow(box.name, log.visible_seq, box.visible_earliest_seq, records, size, queue)
            self.boxes.append(row)
        else:
            self.has_more = True

    def _add_router(self, name: str, outbox: RouterOutbox) -> None:
        totals = self.totals
        lag, is_blocked = outbox.lag, bool(outbox.failures)
        totals.routers += 1
        totals.router_lag += lag
        totals.routers_blocked += is_blocked
        if len(self.routers) < self._rows_max:
            self.routers.append(RouterRow(name, lag, outbox.total, is_blocked))
        else:
            self.has_more = True
