"""Handles the commands that list boxes: by name, or sorted by a number (v0 §2.3, §26)."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from shard.core.boxes.box import Box
from shard.core.boxes.box_ordering import BoxOrderings, lag_of
from shard.core.boxes.sealed import UNFINISHED, NotLoaded
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from streams.protocol.messages import commands
from streams.protocol.messages.replies import QueueTotals
from streams.protocol.model.boxes import DURABLE

#: Greater than every character of a name.
_LAST = "\U0010ffff"


class BoxListing:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._orderings = BoxOrderings(context.box_rates)
        context.on_command(commands.ListBoxes, self._list_by_name)
        context.on_command(commands.ListSortedBoxes, self._list_sorted)

    def _list_by_name(self, command: commands.ListBoxes, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        page: list[commands.ListedBox] = []
        more = False
        positions: list[tuple[Box, int]] = []
        start = max(command.prefix, command.after)
        for name in context.boxes.irange(minimum=start):
            if not name.startswith(command.prefix):
                break
            if name <= command.after:
                continue
            if len(page) == command.limit:
                more = True
                break
            page.append(self._entry(name, now_ms, entries, positions))
        boxes = context.boxes
        total = boxes.bisect_left(command.prefix + _LAST) - boxes.bisect_left(command.prefix)
        reply = commands.ListBoxesResult(page, more, total)
        return reply_after(context.durability.wait_for_list(positions), entries, reply)

    def _list_sorted(self, command: commands.ListSortedBoxes, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        ordering = self._orderings.find(command, now_ms)
        if ordering is None:
            return Outcome(entries, commands.ListBoxesResult([], False, is_unknown=True))
        if not ordering.is_complete:
            ordering.step(context.boxes)
            return Outcome(entries, None, needs=(UNFINISHED,))
        page: list[commands.ListedBox] = []
        keys: list[float] = []
        offsets: list[int] = []
        positions: list[tuple[Box, int]] = []
        more = False
        for offset, key, name in ordering.entries(command.offset):
            if len(page) == command.limit:
                more = True
                break
            if name in context.boxes:  # it may have been deleted since
                page.append(self._entry(name, now_ms, entries, positions))
                keys.append(key)
                offsets.append(offset + 1)
        reply = commands.ListBoxesResult(page, more, ordering.total, keys, offsets)
        return reply_after(context.durability.wait_for_list(positions), entries, reply)

    def _entry(
        self, name: str, now_ms: int, entries: LogEntries, positions: list[tuple[Box, int]]
    ) -> commands.ListedBox:
        context = self._context
        box = context.boxes[name]
        try:
            context.expire(box, now_ms, entries)
        except NotLoaded:
            pass  # a tick will see to it; a list does not wait for payloads
        positions.append((box, box.floor_lsn))
        log = box.log
        count, size = log.visible_totals()
        return commands.ListedBox(
            box=name,
            type=box.config.type,
            head_seq=log.visible_seq,
            earliest_seq=box.visible_earliest_seq,
            count=count,
            bytes=size,
            durable=box.config.durability in DURABLE,
            durability=box.config.durability,
            effective_priority=box.effective_priority(now_ms),
            last_write_ts=log.visible_ts or None,
            lag=lag_of(box),
            rate=context.box_rates.rate_of(box.generation, now_ms),
            queue=queue_totals(box, count, now_ms, context.wall_ms(now_ms)),
        )


def queue_totals(box: Box, count: int, now_ms: int, wall_ms: int) -> QueueTotals | None:
    """Return the totals of a queue; None for a log. `ready`, `in_flight` and `delayed` make up `count`."""
    queue = box.queue
    if queue is None:
        return None
    queue.advance(now_ms, wall_ms)
    totals = QueueTotals(queue.ready(count), queue.in_flight, queue.delayed_count, queue.dead_lettered)
    if box.outputs is None:
        return totals
    outputs_error = box.outputs.last_error or UNSET
    return replace(totals, outputs_pending=box.outputs.pending_count, outputs_error=outputs_error)
