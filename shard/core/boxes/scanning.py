"""Handles the reads of bulk clients: scans, states of many boxes, seqs by time (docs/reference/wire.md).

Rules of the file
- Nothing here changes anything but what time has brought about: records that have expired are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator

from shard.core.boxes.box import Box
from shard.core.boxes.sealed import NotLoaded
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from streams.protocol.messages import bulk
from streams.protocol.messages.commands import Scan


class Scanning:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_command(Scan, self._scan)
        context.on_command(bulk.States, self._states)
        context.on_command(bulk.Locate, self._locate)

    def _scan(self, command: Scan, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        box.volatile.last_read_ms = now_ms
        return self._context.answer(box, box.scan(command), entries, box.floor_lsn)

    def _states(self, command: bulk.States, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        positions: list[bulk.BoxPosition] = []
        more = False
        boxes: list[tuple[Box, int]] = []
        for box in self._requested_boxes(command):
            if len(positions) == command.limit:
                more = True
                break
            try:
                context.expire(box, now_ms, entries)
            except NotLoaded:
                pass  # a tick will see to it; a list does not wait for payloads
            boxes.append((box, box.floor_lsn))
            positions.append(_position(box))
        return reply_after(context.durability.wait_for_list(boxes), entries, bulk.Positions(positions, more))

    def _requested_boxes(self, command: bulk.States) -> Iterator[Box]:
        boxes = self._context.boxes
        if command.boxes is not None:
            yield from (boxes[name] for name in sorted(set(command.boxes)) if name in boxes)
            return
        for name in boxes.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                return
            if name > command.after or not command.after:
                yield boxes[name]

    def _locate(self, command: bulk.Locate, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        positions: list[tuple[int, int] | None] = []
        boxes: list[tuple[Box, int]] = []
        for name, ts in command.lookups:
            box: Box | None = context.boxes.get(name)
            if box is None:
                positions.append(None)
                continue
            context.expire(box, now_ms, entries)
            boxes.append((box, box.floor_lsn))
            seq = min(box.log.first_seq_at(ts), box.log.visible_seq + 1)
            positions.append((box.generation, max(seq, box.visible_earliest_seq)))
        return reply_after(context.durability.wait_for_list(boxes), entries, bulk.LocateReply(positions))


def _position(box: Box) -> bulk.BoxPosition:
    log = box.log
    count, size = log.visible_totals()
    return bulk.BoxPosition(
        box.name,
        box.generation,
        box.visible_earliest_seq,
        log.visible_seq,
        # A floor may be ahead of what is visible while its change is on the way to the disk.
        min(log.evict_floor, log.visible_seq + 1),
        count,
        size,
        box.config.type,
        box.config.durability,
        log.visible_ts,
    )
