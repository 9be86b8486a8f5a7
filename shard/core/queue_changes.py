"""The changes of queues and the facts of queues in snapshots: a part of `changes.py`, which has the rules."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class JobsLeased(msgspec.Struct, frozen=True):
    """Jobs of a queue were given out. Logged only where leases are as durable as the box."""

    generation: int
    lease_id: str
    node: str
    deadline_ms: int
    #: The highest seq given out so far.
    fresh_seq: int
    seqs: Sequence[int]
    #: How often each of them has been delivered, this time included.
    deliveries: Sequence[int]
    #: The connection that the leases end with; 0 = none.
    holder: int = 0
    at_ms: int = 0


class JobsExtended(msgspec.Struct, frozen=True):
    generation: int
    seqs: Sequence[int]
    deadline_ms: int
    at_ms: int = 0


class JobsReturned(msgspec.Struct, frozen=True):
    """Leases were given up. The jobs can be claimed from `ready_ms` on; 0 = at once."""

    generation: int
    seqs: Sequence[int]
    deliveries: Sequence[int]
    ready_ms: int = 0
    at_ms: int = 0
    #: Where the jobs have different ones: `ready_ms` of each.
    ready_times: Sequence[int] = ()
    #: The error of the worker; empty = none was given, and the last one stays.
    error: str = ""
    node: str = ""
    #: When each of them was delivered first.
    first_times: Sequence[int] = ()


class JobsCounted(msgspec.Struct, frozen=True):
    """How often jobs have been delivered, where the leases themselves are not logged."""

    generation: int
    seqs: Sequence[int]
    deliveries: Sequence[int]
    #: The last node of each, and when it was delivered first.
    nodes: Sequence[str] = ()
    first_times: Sequence[int] = ()


#: (seq, deliveries, lease id, node, holder, when the lease or the delay is over). An entry with more goes on:
#: key, priority, `deliver_at`, when it was delivered first, last node, last error.
JobEntry = tuple[int | str, ...]


class JobsRescheduled(msgspec.Struct, frozen=True):
    """Waiting jobs are to be delivered at another time, in wall-clock time; 0 = at once."""

    generation: int
    seqs: Sequence[int]
    deliver_at: int
    at_ms: int = 0


class JobsReprioritized(msgspec.Struct, frozen=True):
    generation: int
    seqs: Sequence[int]
    priority: int
    at_ms: int = 0


class JobsRestated(msgspec.Struct, frozen=True):
    """All that is known of the jobs of a queue. The first of several says that earlier words do not count."""

    generation: int
    fresh_seq: int
    is_first: bool
    jobs: Sequence[JobEntry]


class MovesPlanned(msgspec.Struct, frozen=True):
    """Records are to move to another box; each gets the next position of the line that leads there."""

    generation: int
    dest: str
    is_dead: bool
    #: 0 = a position without a record: the other box is known to be past it.
    seqs: Sequence[int]
    deliveries: Sequence[int]
    #: Bytes of each.
    sizes: Sequence[int]
    #: Of dead letters: the last error and the last node of each, and when they died.
    errors: Sequence[str] = ()
    nodes: Sequence[str] = ()
    at_ms: int = 0


class MovesDone(msgspec.Struct, frozen=True):
    """The other box has the line up to `position`: these records are deleted here."""

    generation: int
    dest: str
    is_dead: bool
    position: int
    #: Those that are live, in order, and their bytes in each batch that holds some of them.
    seqs: Sequence[int]
    sizes: Sequence[int]
    at_ms: int


class OutputsPlanned(msgspec.Struct, frozen=True):
    """Jobs were acked with outputs: they are deleted, and these records are to be appended to other boxes.
    One fact, so that neither is ever there alone."""

    generation: int
    #: The jobs, in order, and their bytes in each batch that holds some of them.
    seqs: Sequence[int]
    sizes: Sequence[int]
    idempotency_key: str
    #: (box, `Batch.to_parts` of its records). The seqs in a batch are positions: one sequence for all boxes.
    outputs: Sequence[tuple[str, bytes]]
    at_ms: int = 0


class OutputsDelivered(msgspec.Struct, frozen=True):
    """The other box has the outputs of this queue up to `position`."""

    generation: int
    dest: str
    position: int
    at_ms: int = 0
    #: The number of copies of this queue that the other box has had by then, and its generation.
    total: int = 0
    dest_generation: int = 0


class QueueFacts(msgspec.Struct, kw_only=True):
    fresh_seq: int = 0
    jobs: Sequence[JobEntry] = ()
    dead_lettered: int = 0


class LineFacts(msgspec.Struct, kw_only=True):
    dest: str
    is_dead: bool
    position: int
    #: (seq, deliveries, bytes) of the positions after it, and error, node and time of a dead letter that has
    #: them; zeros for a record that is gone.
    moves: Sequence[tuple[int | str, ...]]


class OutputFacts(msgspec.Struct, kw_only=True):
    #: The last position that was assigned.
    last_position: int
    #: (box, position that it has, batches after it as in `OutputsPlanned`).
    queues: list[tuple[str, int, list[bytes]]]
    #: For each of `queues`: `total` and `dest_generation` of its last `OutputsDelivered`.
    deliveries: Sequence[tuple[int, int]] = ()
