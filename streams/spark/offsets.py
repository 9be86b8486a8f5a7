"""How far a reader is, what it takes next, and how that is cut into tasks. Pure: everything here is a
function of its arguments, so a micro-batch that is planned again is planned the same.

An offset is, for each box, the last seq *examined* and the box's generation: `{"orders": {"gen": 7, "seq":
41}}`. The generation is the box's identity. Without it a box that was deleted and made anew, and has already
grown past the old cursor, would be read on from the middle.

Invariants
  order      `seq` never goes back within a generation
  fairness   a limit gives every box that has something at least one record, as far as it reaches
  cover      the ranges of a plan are exactly what lies between two offsets, each record in one of them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streams.protocol.messages.bulk import BoxPosition
from streams.protocol.model.slots import slot_of
from streams.spark.gaps import Gap


@dataclass(frozen=True, slots=True)
class Place:
    """Examined up to here, in this life of the box."""

    gen: int
    seq: int


@dataclass(frozen=True, slots=True)
class Head:
    """What a shard knows of a box now."""

    gen: int
    earliest_seq: int
    head_seq: int
    evict_floor: int
    count: int
    bytes: int

    @classmethod
    def of(cls, state: BoxPosition) -> Head:
        return cls(
            state.generation, state.earliest_seq, state.head_seq, state.evict_floor, state.count, state.bytes
        )

    @property
    def place(self) -> Place:
        return Place(self.gen, self.head_seq)

    @property
    def start(self) -> Place:
        """Before the first record that is there: a reader that starts here has lost nothing."""
        return Place(self.gen, self.earliest_seq - 1)


@dataclass(frozen=True, slots=True)
class Range:
    """Seqs after `after` up to `to`, which is the last one wanted."""

    box: str
    gen: int
    after: int
    to: int

    def __len__(self) -> int:
        return self.to - self.after


Offset = dict[str, Place]

#: Records that are worth a task of their own: Spark needs some 10 ms for one.
_WORTH_A_TASK = 20_000

#: Beside the boxes of an offset that is only shown: the group for which it is. No box is called like this.
GROUP = "$group"

#: Beside the boxes of the end of a query's first micro-batch: where that batch begins. Spark keeps only the
#: ends. When the first batch runs again after a restart, it asks anew where to begin, and "latest" would be a
#: later place by then.
FIRST = "$first"


def dump(offset: Mapping[str, Place]) -> dict[str, Any]:
    """As Spark keeps it in its checkpoint."""
    return {box: {"gen": place.gen, "seq": place.seq} for box, place in sorted(offset.items())}


def load(text: Mapping[str, Any]) -> Offset:
    return {box: Place(int(place["gen"]), int(place["seq"])) for box, place in text.items() if box != FIRST}


def start_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> Offset:
    """Where the micro-batch begins that has these offsets in the checkpoint."""
    return load(end.get(FIRST, start))


def pending(start: Mapping[str, Place], end: Mapping[str, Place]) -> dict[str, int]:
    """How many seqs of each box lie between the two; boxes without any are left out."""
    found = {box: place.seq - _begin(start, box, place).seq for box, place in end.items()}
    return {box: count for box, count in found.items() if count > 0}


def _begin(start: Mapping[str, Place], box: str, end: Place) -> Place:
    """Where reading begins on the way to `end`: a box of another life, or one never seen, from its
    beginning."""
    place = start.get(box)
    return place if place is not None and place.gen == end.gen else Place(end.gen, 0)


# -- admission


def admit(start: Mapping[str, Place], heads: Mapping[str, Place], limit: int | None) -> Offset:
    """The end of the next micro-batch: all there is, or `limit` records shared in proportion to how far each
    box is behind, at least one each. Boxes without news stay where they are."""
    waiting = pending(start, heads)
    # A box that is gone keeps its place: should it come back, its generation tells.
    kept = {box: place for box, place in start.items() if box not in heads}
    if limit is None or sum(waiting.values()) <= limit:
        return kept | dict(heads)
    shares = _shares(waiting, limit)
    end = dict(kept)
    for box, head in heads.items():
        begin = _begin(start, box, head)
        if shares.get(box):
            end[box] = Place(head.gen, begin.seq + shares[box])
        elif box not in waiting:
            end[box] = head
        elif box in start:
            end[box] = start[box]
        # A box never seen that gets nothing now stays unseen, and begins at 0 when its turn comes.
    return end


def _shares(waiting: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` records over these boxes. One each as far as it reaches, those that are furthest behind first;
    then in proportion; what rounding leaves goes round, one each."""
    boxes = sorted(waiting, key=lambda box: (-waiting[box], box))
    shares = dict.fromkeys(boxes[:limit], 1)
    rest = limit - len(shares)
    wanted = sum(waiting[box] - 1 for box in shares)
    if rest and wanted:
        spread = min(rest, wanted)
        for box in shares:
            shares[box] += (waiting[box] - 1) * spread // wanted
        left = limit - sum(shares.values())
        for box in shares:
            if left and shares[box] < waiting[box]:
                shares[box] += 1
                left -= 1
    return shares


def bytes_to_records(start: Mapping[str, Place], heads: Mapping[str, Head], limit_bytes: int) -> int:
    """About how many of the waiting records these bytes are, by the mean size of each box's records."""
    waiting = pending(start, {box: head.place for box, head in heads.items()})
    records = sum(waiting.values())
    size = sum(count * heads[box].bytes / max(1, heads[box].count) for box, count in waiting.items())
    return max(1, int(records * limit_bytes / size)) if size else max(1, records)


# -- planning


def losses(start: Mapping[str, Place], end: Mapping[str, Place]) -> list[Gap]:
    """Boxes that were deleted and created again in between: what the deleted box still had is lost."""
    return [
        Gap(box, start[box].seq + 1, None, "recreated", None)
        for box in sorted(start)
        if box in end and end[box].gen != start[box].gen
    ]


def ranges(start: Mapping[str, Place], end: Mapping[str, Place]) -> list[Range]:
    found = []
    for box, place in end.items():
        begin = _begin(start, box, place)
        if begin.seq < place.seq:
            found.append(Range(box, place.gen, begin.seq, place.seq))
    return found


def plan(
    wanted: Iterable[Range],
    *,
    partition_records: int,
    min_partitions: int | None,
    partition_bytes: int = 1 << 62,
    sizes: Mapping[str, float] | None = None,
    cores: int = 1,
) -> list[list[Range]]:
    """The work of each task. Long ranges are cut, short ones packed together with their neighbours by slot,
    so that a task has few shards to talk to.

    `sizes` are the mean bytes of a record of each box. A record that is larger than a partition's bytes
    divided by its records counts as several. Without `min_partitions` there are as many partitions as
    `cores`, as long as each has enough to do.
    """
    todo = sorted(wanted, key=lambda each: (slot_of(each.box), each.box, each.after))
    records = sum(map(len, todo))
    if not records:
        return []
    if min_partitions is None:
        min_partitions = max(1, min(cores, records // _WORTH_A_TASK))
    cost = {
        each.box: max(1, int((sizes or {}).get(each.box, 0) * partition_records / partition_bytes))
        for each in todo
    }
    total = sum(len(each) * cost[each.box] for each in todo)
    size = max(1, min(partition_records, -(-total // min_partitions)))
    tasks: list[list[Range]] = []
    room = 0
    for each in todo:
        after = each.after
        while after < each.to:
            if room < cost[each.box]:
                tasks.append([])
                room = size
            to = min(each.to, after + max(1, room // cost[each.box]))
            # Cutting off less than a tenth of a task is not worth a range of its own.
            if (each.to - to) * cost[each.box] < size // 10:
                to = each.to
            tasks[-1].append(Range(each.box, each.gen, after, to))
            room = max(0, room - (to - after) * cost[each.box])
            after = to
    return tasks
