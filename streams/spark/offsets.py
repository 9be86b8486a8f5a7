"""Offsets of a reader, the end of its next micro-batch, and the plan of its tasks.

Pure: every result depends on the arguments only, so planning a micro-batch again gives the same plan.

An offset has, for each box, the last seq *read* and the box's generation: `{"orders": {"gen": 7, "seq":
41}}`. The generation identifies the box. Without it, a reader would continue in the middle of a box that was
deleted, created again, and has already grown past the old cursor.

Invariants
  order      `seq` never goes back within a generation
  fairness   a limit gives at least one record to every box with a backlog, while the limit lasts
  cover      the ranges of a plan cover exactly the seqs between two offsets, each seq once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streams.protocol.messages.bulk import BoxPosition
from streams.protocol.model.slots import slot_of
from streams.spark.gaps import Gap


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last seq read in one generation of a box."""

    gen: int
    seq: int


@dataclass(frozen=True, slots=True)
class BoxHead:
    """The current positions and size of a box."""

    gen: int
    earliest_seq: int
    head_seq: int
    evict_floor: int
    count: int
    bytes: int

    @classmethod
    def of(cls, state: BoxPosition) -> BoxHead:
        return cls(
            state.generation, state.earliest_seq, state.head_seq, state.evict_floor, state.count, state.bytes
        )

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.gen, self.head_seq)

    @property
    def start(self) -> Cursor:
        """The cursor before the first existing record: a reader that starts here sees no gap."""
        return Cursor(self.gen, self.earliest_seq - 1)


@dataclass(frozen=True, slots=True)
class SeqRange:
    """The seqs of a box after `after`, up to and including `to`."""

    box: str
    gen: int
    after: int
    to: int

    def __len__(self) -> int:
        return self.to - self.after


Offset = dict[str, Cursor]

#: The fewest records that justify another task: a task costs Spark about 10 ms.
_TASK_RECORDS_MIN = 20_000

#: Key beside the boxes of a reported offset: the group to commit it to. Not a valid box name.
GROUP = "$group"

#: Key beside the boxes in the end of a query's first micro-batch: the start of that batch. Spark stores only
#: the ends. When the first batch runs again after a restart, Spark asks for the start again, and "latest"
#: would be later by then.
FIRST = "$first"


def to_json(offset: Mapping[str, Cursor]) -> dict[str, Any]:
    """Convert an offset to the JSON object that Spark stores in its checkpoint."""
    return {box: {"gen": cursor.gen, "seq": cursor.seq} for box, cursor in sorted(offset.items())}


def from_json(text: Mapping[str, Any]) -> Offset:
    return {
        box: Cursor(int(cursor["gen"]), int(cursor["seq"])) for box, cursor in text.items() if box != FIRST
    }


def batch_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Offset:
    """Return the start of the micro-batch that has these offsets in the checkpoint."""
    return from_json(end.get(FIRST, start))


def pending_counts(start: Mapping[str, Cursor], end: Mapping[str, Cursor]) -> dict[str, int]:
    """Return how many seqs of each box lie between two offsets, without boxes that have none."""
    counts = {box: cursor.seq - _resume(start, box, cursor).seq for box, cursor in end.items()}
    return {box: count for box, count in counts.items() if count > 0}


def _resume(start: Mapping[str, Cursor], box: str, end: Cursor) -> Cursor:
    """Return the cursor to resume a box from. A new box, or a new generation of one, starts at 0."""
    cursor = start.get(box)
    return cursor if cursor is not None and cursor.gen == end.gen else Cursor(end.gen, 0)


# -- admission


def next_end(start: Mapping[str, Cursor], heads: Mapping[str, Cursor], limit: int | None) -> Offset:
    """Return the end of the next micro-batch.

    Without a limit, the end is the head of every box. Otherwise boxes share `limit` records in proportion to
    their backlog, at least one record each. Boxes without new records keep their cursor.
    """
    backlog = pending_counts(start, heads)
    # A deleted box keeps its cursor: if it is created again, its generation differs.
    absent_boxes = {box: cursor for box, cursor in start.items() if box not in heads}
    if limit is None or sum(backlog.values()) <= limit:
        return absent_boxes | dict(heads)
    shares = _shares(backlog, limit)
    end = dict(absent_boxes)
    for box, head in heads.items():
        begin = _resume(start, box, head)
        if shares.get(box):
            end[box] = Cursor(head.gen, begin.seq + shares[box])
        elif box not in backlog:
            end[box] = head
        elif box in start:
            end[box] = start[box]
        # A new box without a share stays out of the offset; it starts at 0 in a later batch.
    return end


def _shares(backlog: Mapping[str, int], limit: int) -> dict[str, int]:
    """Divide `limit` records among boxes.

    First one record each, largest backlog first; then in proportion to the backlog; then the rounding
    remainder, one record each.
    """
    boxes = sorted(backlog, key=lambda box: (-backlog[box], box))
    shares = dict.fromkeys(boxes[:limit], 1)
    rest = limit - len(shares)
    demand = sum(backlog[box] - 1 for box in shares)
    if rest and demand:
        spread = min(rest, demand)
        for box in shares:
            shares[box] += (backlog[box] - 1) * spread // demand
        remainder = limit - sum(shares.values())
        for box in shares:
            if remainder and shares[box] < backlog[box]:
                shares[box] += 1
                remainder -= 1
    return shares


def bytes_to_records(start: Mapping[str, Cursor], heads: Mapping[str, BoxHead], limit_bytes: int) -> int:
    """Estimate how many pending records fit into `limit_bytes`, from the mean record size of each box."""
    backlog = pending_counts(start, {box: head.cursor for box, head in heads.items()})
    records = sum(backlog.values())
    size = sum(count * heads[box].bytes / max(1, heads[box].count) for box, count in backlog.items())
    return max(1, int(records * limit_bytes / size)) if size else max(1, records)


# -- planning


def recreated_gaps(start: Mapping[str, Cursor], end: Mapping[str, Cursor]) -> list[Gap]:
    """Return a gap for each box that was deleted and created again: its unread records are lost."""
    return [
        Gap(box, start[box].seq + 1, None, "recreated", None)
        for box in sorted(start)
        if box in end and end[box].gen != start[box].gen
    ]


def ranges(start: Mapping[str, Cursor], end: Mapping[str, Cursor]) -> list[SeqRange]:
    seq_ranges = []
    for box, cursor in end.items():
        begin = _resume(start, box, cursor)
        if begin.seq < cursor.seq:
            seq_ranges.append(SeqRange(box, cursor.gen, begin.seq, cursor.seq))
    return seq_ranges


def plan_tasks(
    seq_ranges: Iterable[SeqRange],
    *,
    partition_records: int,
    min_partitions: int | None,
    partition_bytes: int = 1 << 62,
    sizes: Mapping[str, float] | None = None,
    cores: int = 1,
) -> list[list[SeqRange]]:
    """Return the ranges of each task.

    Long ranges are split. Short ranges share a task with their neighbours by slot, so that a task connects to
    few shards.

    `sizes` has the mean record size of each box in bytes. A record larger than `partition_bytes` /
    `partition_records` counts as several. Without `min_partitions` there are up to `cores` tasks, if each has
    at least 20,000 records.
    """
    ordered_ranges = sorted(seq_ranges, key=lambda each: (slot_of(each.box), each.box, each.after))
    records = sum(map(len, ordered_ranges))
    if not records:
        return []
    if min_partitions is None:
        min_partitions = max(1, min(cores, records // _TASK_RECORDS_MIN))
    cost = {
        each.box: max(1, int((sizes or {}).get(each.box, 0) * partition_records / partition_bytes))
        for each in ordered_ranges
    }
    total = sum(len(each) * cost[each.box] for each in ordered_ranges)
    size = max(1, min(partition_records, -(-total // min_partitions)))
    tasks: list[list[SeqRange]] = []
    room = 0
    for each in ordered_ranges:
        after = each.after
        while after < each.to:
            if room < cost[each.box]:
                tasks.append([])
                room = size
            to = min(each.to, after + max(1, room // cost[each.box]))
            # A remainder under a tenth of a task joins this task: it does not justify another range.
            if (each.to - to) * cost[each.box] < size // 10:
                to = each.to
            tasks[-1].append(SeqRange(each.box, each.gen, after, to))
            room = max(0, room - (to - after) * cost[each.box])
            after = to
    return tasks
