"""The outputs of acked jobs on their way to one box, and all of one queue (v0 §24). `outputs.py` uses them.

An output queue is an outbox (`routers/outbox.py`). Its records are in memory and in the log until the
destination has them. All output queues of a box share one sequence of positions, so that one that was
forgotten while it was idle never assigns a position again:

    ack of jobs ─► positions 7 8 9 for box `a`, 10 11 for box `b`    (one change, with the delete of the jobs)
                       │                     │
                   batch 7..9            batch 10..11                (the seqs of a batch are its positions)

Rules of the file
- Outputs are new records, not copies of records: they begin without hops.

Invariants
- OUTPUTS: the batches of an output queue are in the order of their positions, end above its logged position
  and end at its last one.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import NamedTuple

from shard.core import changes
from shard.core.queues.planned_outbox import PlannedOutbox
from shard.core.routers.copy_sources import Origin
from shard.core.routers.outbox import BATCH_BYTES_MAX, Load, SentBatch
from streams.protocol.messages.forwards import ForwardHead, ForwardReply
from streams.protocol.model.job_fields import JobFields, join
from streams.protocol.model.records import Batch

#: Prefix of the origin of an output queue. The name of a router has no space.
PREFIX = "outputs of "
#: Output queues of one box. Beyond it, the one that was created first and has nothing pending is forgotten.
DESTS_MAX = 1_000


class OutputSource(NamedTuple):
    """The queue of an output queue's origin."""

    box: str
    generation: int


def source_of_outputs(origin: str) -> OutputSource | None:
    """Parse the origin of an output queue; None if it is another one's."""
    if not origin.startswith(PREFIX):
        return None
    box, _, generation = origin.removeprefix(PREFIX).rpartition(" ")
    return OutputSource(box, int(generation))


class DeliveryTotal(NamedTuple):
    """How many copies a box has received from an output queue, and the generation of the box."""

    total: int
    dest_generation: int


class OutputQueue(PlannedOutbox):
    """The outputs of one queue for one box."""

    __slots__ = ("_last_reply", "batches", "delivery", "pending_bytes", "pending_count")

    confirms_visible_copies = True

    def __init__(self, *, source: str, generation: int, dest: str, position: int) -> None:
        super().__init__(
            source=source,
            origin=f"{PREFIX}{source} {generation}",
            dest=dest,
            generation=generation,
            position=position,
        )
        #: Logged: batches that the destination does not have, or not all of.
        self.batches: deque[Batch] = deque()
        #: Logged: the total of the destination when it confirmed `log_position`.
        self.delivery = DeliveryTotal(0, 0)
        #: Volatile: the total in its last reply.
        self._last_reply = self.delivery
        #: Derived: records that the destination does not have, and the memory that the batches take.
        self.pending_count = 0
        self.pending_bytes = 0

    def next_records(self, after: int, records_max: int, upto: int = 0) -> Load:
        """Select the records after `after`, of durable plans only."""
        position = max(after, self.log_position.position)
        texts: list[bytes | memoryview] = []
        tags: list[bytes] = []
        fields: list[tuple[JobFields | None, int]] = []
        records_left, bytes_left = records_max, BATCH_BYTES_MAX
        for batch in self.batches:
            if batch.last_seq <= position:
                continue
            if batch.first_seq > self.sendable_position:
                break
            first = max(0, position + 1 - batch.first_seq)
            last = min(batch.count - 1, first + records_left - 1)
            last = batch.index_within_bytes(first, last, bytes_left) if last >= first else last
            if last < first:
                if texts:
                    break
                last = first  # a copy batch has at least one record, however large
            texts.append(batch.text(first, last))
            tags.append(batch.tags_of(first, last))
            fields.append((batch.job_fields and batch.job_fields.part(first, last), last - first + 1))
            records_left -= last - first + 1
            bytes_left -= batch.size(first, last)
            position = batch.first_seq + last
            if last < batch.count - 1:
                break
        else:
            position = max(position, self.sendable_position)
        job_fields = join(fields)
        return Load(
            position,
            sum(count for _, count in fields),
            b",".join(texts),
            b"\0".join(tags) if any(each.strip(b"\0") for each in tags) else None,
            more=position < self.sendable_position,
            job_fields=None if job_fields is None else job_fields.to_bytes(),
        )

    def batch_head(self, load: Load, after: int) -> ForwardHead:
        return self.head_of(load, after, hops=0, create=None)

    def change_of_move(self, generation: int, now_ms: int) -> changes.OutputsDelivered | None:
        """Return the change that drops the confirmed outputs; None if there are none."""
        upto = min(self.position, self.last_position)
        if upto <= self.log_position.position:
            return None
        return changes.OutputsDelivered(generation, self.dest, upto, now_ms, *self._last_reply)

    def on_reply(self, batch: SentBatch, answer: ForwardReply) -> None:
        self._last_reply = DeliveryTotal(answer.total, answer.generation)
        super().on_reply(batch, answer)

    def lost_count(self, origin: Origin, dest_generation: int) -> int:
        """Return how many outputs the destination has lost. The positions do not tell: some of them belong to
        other boxes. A destination that was created after its last reply has lost nothing."""
        total, known_generation = self.delivery
        if origin.position >= self.log_position.position or dest_generation > known_generation:
            return 0
        return max(0, total - (origin.total if dest_generation == known_generation else 0))

    # -- applying

    def apply_plan(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.pending_count += batch.count
        self.pending_bytes += batch.bytes_in_memory
        self.last_position = batch.last_seq

    def apply_delivery(self, position: int, delivery: DeliveryTotal) -> None:
        """Drop the outputs up to `position`, which the destination has."""
        self.delivery = delivery
        before = self.pending_count
        while self.batches and self.batches[0].last_seq <= position:
            batch = self.batches.popleft()
            self.pending_count -= batch.last_seq - max(batch.first_seq - 1, self.log_position.position)
            self.pending_bytes -= batch.bytes_in_memory
        if self.batches and self.batches[0].first_seq <= position:  # delivered in part
            start = max(self.batches[0].first_seq - 1, self.log_position.position)
            self.pending_count -= position - start
        self.last_position = max(self.last_position, position)
        self.apply_logged(position, self.log_position.total + before - self.pending_count)

    def check(self) -> None:
        """Assert OUTPUTS. For tests."""
        seqs = [seq for batch in self.batches for seq in (batch.first_seq, batch.last_seq)]
        assert seqs == sorted(seqs), "OUTPUTS"
        assert not seqs or (self.batches[0].last_seq > self.log_position.position), "OUTPUTS"
        assert not seqs or seqs[-1] == self.last_position, "OUTPUTS"
        assert self.log_position.position <= self.last_position, "OUTPUTS"
        assert self.pending_bytes == sum(batch.bytes_in_memory for batch in self.batches), "OUTPUTS"


class Outputs:
    """The pending outputs of one queue, by destination."""

    __slots__ = ("_generation", "_source", "last_position", "pending_bytes", "queues")

    def __init__(self, source: str, generation: int) -> None:
        self._source = source
        self._generation = generation
        self.queues: dict[str, OutputQueue] = {}
        #: The last position that was assigned, for any box.
        self.last_position = 0
        #: Derived: the memory that pending outputs take.
        self.pending_bytes = 0

    def __repr__(self) -> str:
        return f"<Outputs of {self._source}: {self.pending_count} for {len(self.queues)} boxes>"

    @property
    def pending_count(self) -> int:
        return sum(queue.pending_count for queue in self.queues.values())

    @property
    def last_error(self) -> str:
        """Why outputs are held back; empty if none are."""
        return next((queue.last_error for queue in self.queues.values() if queue.last_error), "")

    @property
    def is_full(self) -> bool:
        """True if there is no place for another destination."""
        return len(self.queues) >= DESTS_MAX and self.find_idle() is None

    def find_idle(self) -> OutputQueue | None:
        """Return the oldest output queue without pending outputs."""
        return next((queue for queue in self.queues.values() if not queue.batches), None)

    def apply_plan(self, dest: str, batch: Batch) -> OutputQueue:
        """Take over the outputs of an ack for one box."""
        queue = self.queues.get(dest) or self._add(dest, self.last_position)
        self.pending_bytes -= queue.pending_bytes
        queue.apply_plan(batch)
        self.pending_bytes += queue.pending_bytes
        self.last_position = batch.last_seq
        return queue

    def apply_delivery(self, dest: str, position: int, delivery: DeliveryTotal) -> None:
        queue = self.queues.get(dest) or self._add(dest, 0)
        self.pending_bytes -= queue.pending_bytes
        queue.apply_delivery(position, delivery)
        self.pending_bytes += queue.pending_bytes
        self.last_position = max(self.last_position, position)

    def forget_idle(self) -> OutputQueue | None:
        """Forget an idle output queue if there are too many. Returns it."""
        idle = self.find_idle() if len(self.queues) >= DESTS_MAX else None
        return None if idle is None else self.queues.pop(idle.dest)

    def _add(self, dest: str, position: int) -> OutputQueue:
        queue = self.queues[dest] = OutputQueue(
            source=self._source, generation=self._generation, dest=dest, position=position
        )
        return queue

    def check(self) -> None:
        """Assert OUTPUTS. For tests."""
        for queue in self.queues.values():
            queue.check()
            assert queue.last_position <= self.last_position, "OUTPUTS"
        assert self.pending_bytes == sum(queue.pending_bytes for queue in self.queues.values()), "OUTPUTS"

    # -- snapshots

    def facts(self) -> changes.OutputFacts:
        return changes.OutputFacts(
            last_position=self.last_position,
            queues=[
                (
                    queue.dest,
                    queue.log_position.position,
                    [b"".join(batch.to_parts()) for batch in queue.batches],
                )
                for queue in self.queues.values()
            ],
            deliveries=[queue.delivery for queue in self.queues.values()],
        )

    @classmethod
    def from_facts(cls, source: str, generation: int, facts: changes.OutputFacts | None) -> Outputs | None:
        if facts is None:
            return None
        outputs = cls(source, generation)
        for (dest, position, batches), delivery in zip(
            facts.queues, facts.deliveries or repeat((0, 0)), strict=False
        ):
            queue = outputs._add(dest, position)
            queue.delivery = DeliveryTotal(*delivery)
            for content in batches:
                queue.apply_plan(Batch.from_bytes(memoryview(content)))
                queue.pending_count -= max(0, position + 1 - queue.batches[-1].first_seq)
            queue.sendable_position = queue.last_position
            outputs.pending_bytes += queue.pending_bytes
        outputs.last_position = facts.last_position
        return outputs
